"""`peagle serve` as a backend of evaluations: the same figures as the engine in this process."""

from __future__ import annotations

import pytest

from peagle import LLM, SamplingParams
from peagle.evaluation.decoding import Request
from peagle.evaluation.endpoint import EndpointBackend
from peagle.evaluation.engine_backend import EngineBackend
from peagle.evaluation.prompts import load_prompt_set
from serving.live import LiveServer


@pytest.mark.parametrize("report", [True, False])
def test_the_server_answers_as_the_engine(server: LiveServer, offline: LLM, report: bool) -> None:
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    requests = [Request(p.id, p.text, params) for p in load_prompt_set("humaneval", 4)]
    here = EngineBackend(offline).run(requests, 2)
    backend = EndpointBackend(server.url, report=report)
    assert backend.is_ours and backend.num_speculative_tokens() == 7 and backend.has_chat
    there = backend.run(requests, 2)
    assert backend.notes == [] and there.counters == here.counters
    for one, other in zip(there.answers, here.answers, strict=True):
        assert (one.text, one.num_tokens, one.finish_reason) == (
            other.text,
            other.num_tokens,
            other.finish_reason,
        )
        assert one.num_prompt_tokens == other.num_prompt_tokens
        assert sum(count for _, count in one.chunks) == one.num_tokens
        assert one.stats == (other.stats if report else None)
        if report:
            assert one.steps == other.steps
        # Chunks with half a character wait for the next one.
        assert len(one.chunks) <= len(other.chunks)
