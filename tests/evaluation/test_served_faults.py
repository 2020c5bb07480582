"""The certificate of our own engine behind HTTP: it passes, and faults in the engine are found."""

import hashlib
from dataclasses import replace
from typing import Any

import pytest

from peagle.bundled import BUNDLED_PEAGLE
from peagle.config import SamplingParams
from peagle.engine.block_manager import BlockManager
from peagle.engine.detokenizer import OutputText
from peagle.evaluation.certify.options import ServedOptions
from peagle.evaluation.certify.served import ServedSubject, certify_server, long_prompts
from peagle.evaluation.certify.server import ScoringServer
from peagle.evaluation.endpoint import EndpointBackend
from peagle.llm import LLM
from peagle.results import ServedCertificate
from tests.evaluation.fake_endpoint import Script, endpoint

K = 3
TEXTS = [
    "def total(values: list[int]) -> int:\n    result = 0\n",
    "import json\n\n\ndef read_settings(path: str) -> dict:\n    with",
]


def engine(**speculative: Any) -> LLM:
    config = {"model": str(BUNDLED_PEAGLE), "num_speculative_tokens": K, **speculative}
    return LLM(speculative_config=config, enable_prefix_caching=True, kv_cache_gib=0.2)


def certify(llm: LLM, *, has_switch: bool, samples: int = 0) -> ServedCertificate:
    def answer(path: str, body: dict[str, Any]) -> tuple[int, Any, dict[str, str]]:
        if path == "/tokenize":
            return 200, {"tokens": llm.requests.encode(body["prompt"])}, {}
        if "prompt" not in body:
            return 404, {"error": "no chat here"}, {}
        params = SamplingParams(
            max_tokens=body["max_tokens"],
            temperature=body["temperature"],
            seed=body.get("seed"),
            stop=tuple(body.get("stop", ())),
            logprobs=body.get("logprobs"),
            num_speculative_tokens=body.get("speculation", {}).get("num_speculative_tokens"),
        )
        echo = body.get("echo", False)
        if echo:
            params = replace(params, prompt_logprobs=params.logprobs)
        (output,) = llm.generate([body["prompt"]], [params])
        scored = [*((output.prompt_logprobs or [])[1:] if echo else ()), *(output.logprobs or [])]
        listed: dict[str, list[Any]] = {
            "tokens": [f"token_id:{one.token_id}" for one in scored],
            "token_logprobs": [one.logprob for one in scored],
            "top_logprobs": [{f"token_id:{i}": value for i, value in one.top} for one in scored],
        }
        if echo:  # the first token of a prompt has none
            for values in listed.values():
                values.insert(0, None)
            listed["tokens"][0] = f"token_id:{output.prompt_token_ids[0]}"
        choice = {"text": output.text, "finish_reason": output.finish_reason, "logprobs": listed}
        usage = {
            "prompt_tokens": len(output.prompt_token_ids),
            "completion_tokens": len(output.token_ids),
            "prompt_tokens_details": {"cached_tokens": output.num_cached_tokens},
        }
        return 200, {"choices": [choice], "usage": usage}, {}

    drafts = [{"name": "peagle", "num_speculative_tokens": K}]
    facts = {"id": "m", "speculation": {"default": "peagle", "proposers": drafts}}
    models = [facts if has_switch else {"id": "m"}]
    with endpoint(Script(models=models, answers=answer)) as url:
        server = ScoringServer(EndpointBackend(url))
        options = ServedOptions(
            max_new_tokens=10,
            samples=samples,
            sampled_prompts=1,
            concurrency=1,
            tolerance=1e-3,
        )
        subject = ServedSubject(server, server, 0 if has_switch else None, options)
        kinds = {
            kind: [(str(i), text) for i, text in enumerate(texts)]
            for kind, texts in (("short", TEXTS), ("long", long_prompts(TEXTS, 600)))
        }
        return certify_server(subject, kinds, {"target": "bundled"})


@pytest.fixture(scope="module")
def lossless() -> LLM:
    return engine()


@pytest.mark.slow
def test_our_engine_passes(lossless: LLM) -> None:
    found = certify(lossless, has_switch=False, samples=100)
    assert (found.error, found.faults) == ("", [])
    greedy = [one for one in found.conditions if "stop string" not in one.condition]
    assert all(one.num_answers == 1 and one.num_asked_again == 2 for one in greedy)
    assert all(one.num_scored_anew == one.num_tokens for one in greedy)
    assert lossless.stats.speculation.num_accepted_tokens > 50


@pytest.mark.slow
def test_drafts_accepted_without_comparison() -> None:
    rates = {"synthetic_acceptance_rates": [0.6, 0.3, 0.1], "rejection_sample_method": "synthetic"}
    found = certify(engine(**rates), has_switch=False, samples=100)
    assert any("but its own log-probabilities" in fault for fault in found.faults)
    assert any("asked again it is" in fault for fault in found.faults)
    seconds = [test for test in found.distribution if test.prompt.endswith("token 2")]
    assert not all(test.passed for test in seconds)
    assert all(test.passed for test in found.distribution if test not in seconds)


@pytest.mark.slow
def test_tokens_past_a_stop(lossless: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop string is overlooked where a step brings several tokens."""
    add = OutputText.add

    def overlooking(self: Any, token_ids: list[int], **options: Any) -> Any:
        if len(token_ids) == 1:
            return add(self, token_ids, **options)
        stop, self._stop = self._stop, ()
        try:
            return add(self, token_ids, **options)
        finally:
            self._stop = stop

    monkeypatch.setattr(OutputText, "add", overlooking)
    found = certify(lossless, has_switch=True)
    assert found.faults and all("with the stop string" in fault for fault in found.faults)


@pytest.mark.slow
@pytest.mark.parametrize("has_switch", [True, False])
def test_a_cache_block_of_another_prompt(has_switch: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All first blocks count as the same one, for answers without drafts too."""

    def forgetful(self: Any, sequence: Any, index: int) -> bytes:
        hashes = sequence.block_hashes
        while len(hashes) <= index:
            start = len(hashes) * self.block_size
            tokens = sequence.token_ids[start : start + self.block_size] if hashes else []
            hashes.append(hashlib.sha256(repr((hashes[-1:], tokens)).encode()).digest())
        return hashes[index]

    monkeypatch.setattr(BlockManager, "_hash", forgetful)
    found = certify(engine(), has_switch=has_switch)
    assert found.error == ""
    assert any("computed anew with its whole prompt it is" in fault for fault in found.faults)
