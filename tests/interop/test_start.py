"""Real vLLM is refused where it does not draft as asked."""

from dataclasses import replace
from typing import Any

import pytest

from peagle.backends.vllm.evidence import judge
from peagle.backends.vllm.installation import VllmInstallation
from peagle.backends.vllm.launch import VllmLaunch
from peagle.backends.vllm.server import VllmServer
from peagle.bundled import BUNDLED_PEAGLE, BUNDLED_TARGET
from peagle.config import SpeculativeConfig
from peagle.errors import UserError

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore:on a CPU:UserWarning")]

K = 4
SIZES: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 8, "kv_cache_gib": 1.0}


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
    assert counts is not None and facts is not None
    with pytest.raises(UserError, match="parallel_drafting is False in the engine"):
        judge(config, counts, facts, is_parallel=True)
    with pytest.raises(UserError, match="drafts after the first are not accepted"):
        judge(config, counts, None, is_parallel=True)
