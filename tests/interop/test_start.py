"""Real vLLM is refused where it does not draft as asked, and gives what our engine gives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from peagle import LLM, SamplingParams
from peagle.backends.vllm.command import VllmLaunch
from peagle.backends.vllm.evidence import Expected, judge
from peagle.backends.vllm.installation import VllmInstallation
from peagle.backends.vllm.server import VllmServer
from peagle.bundled import BUNDLED_PEAGLE, BUNDLED_TARGET
from peagle.config import SpeculativeConfig
from peagle.errors import UserError
from peagle.vllm_llm import VllmLLM

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore:on a CPU:UserWarning")]

K = 4
SIZES: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 8, "kv_cache_gib": 1.0}
PROMPTS = ["def fibonacci(n):", "import os\n\nclass A", "# sort a list\ndef", "x ="]


def test_a_start_without_parallel_drafting_is_refused(installation: VllmInstallation) -> None:
    """Head, K and all else are the same; the log, the configuration and the counters each tell."""
    config = SpeculativeConfig(model=str(BUNDLED_PEAGLE), num_speculative_tokens=K)
    launch = VllmLaunch(str(BUNDLED_TARGET), config, port=0, **SIZES)
    server = VllmServer(launch, installation, probe=False)
    words = (word.replace(', "parallel_drafting": true', "") for word in server.command.argv)
    tampered = tuple(words)
    assert tampered != server.command.argv
    server.command = replace(server.command, argv=tampered)
    with server:
        with pytest.raises(UserError, match="Skipping loading mask_hidden"):
            server.check()
        counts, facts = server.counts(), server.engine_facts()
    expected = Expected("eagle3", K, is_parallel=True)
    assert counts is not None and facts is not None
    with pytest.raises(UserError, match="parallel_drafting is False in the engine"):
        judge(expected, counts, facts)
    with pytest.raises(UserError, match="drafts after the first are not accepted"):
        judge(expected, counts, None)


def test_offline_gives_what_our_engine_gives(installation: VllmInstallation) -> None:
    drafting = {"model": str(BUNDLED_PEAGLE), "num_speculative_tokens": K}
    options = {"dtype": "float32", "speculative_config": drafting, **SIZES}
    ours = LLM(**options)
    theirs = LLM(engine="vllm", vllm_python=installation.python, **options)
    assert isinstance(theirs, VllmLLM)
    params = SamplingParams(max_tokens=48, ignore_eos=True, logprobs=1)
    expected, found = (llm.generate(PROMPTS, params) for llm in (ours, theirs))
    for one, other in zip(expected, found, strict=True):
        assert (one.token_ids, one.text) == (other.token_ids, other.text)
        assert one.finish_reason == other.finish_reason
        assert one.logprobs is not None and other.logprobs is not None
        for a, b in zip(one.logprobs, other.logprobs, strict=True):
            assert abs(a.logprob - b.logprob) < 1e-4 and a.rank == b.rank
    assert ours.stats.speculation == theirs.stats.speculation
    assert theirs.stats.speculation.num_drafts > 0
    stream = theirs.stream("def main():", SamplingParams(max_tokens=200, ignore_eos=True))
    next(stream)
    stream.close()
    (again,) = theirs.generate(PROMPTS[0], replace(params, max_tokens=5))
    assert again.token_ids == expected[0].token_ids[:5]
    theirs.close()
