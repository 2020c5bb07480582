"""An engine that answers requests: the same tokens as `LLM.generate`, so many in flight."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from peagle import LLM, SamplingParams
from peagle.bundled import BUNDLED_PEAGLE, BUNDLED_TARGET
from peagle.engine import SpeculationStats
from peagle.errors import UserError
from peagle.evaluation.decoding import Answer, Request
from peagle.evaluation.engine_backend import EngineBackend
from peagle.evaluation.prompts import load_prompt_set

K = 5
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if enable_thinking %}<think>{% endif %}"
)


@pytest.fixture(scope="module")
def llm() -> LLM:
    speculative = {"model": str(BUNDLED_PEAGLE), "num_speculative_tokens": K}
    return LLM(BUNDLED_TARGET, speculative_config=speculative, max_num_seqs=8, max_model_len=512)


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return [
        Request(prompt.id, prompt.text, SamplingParams(max_tokens=8 + 5 * i, seed=i))
        for i, prompt in enumerate(load_prompt_set("heldout_code", 6))
    ]


def test_answers_are_those_of_generate(llm: LLM, requests: list[Request]) -> None:
    expected = llm.generate([str(r.prompt) for r in requests], [r.params for r in requests])
    ended: list[int] = []
    run = EngineBackend(llm).run(requests, 3, lambda index, answer: ended.append(index))
    assert sorted(ended) == list(range(len(requests)))
    for answer, output in zip(run.answers, expected, strict=True):
        assert answer.token_ids == output.token_ids
        assert (answer.text, answer.finish_reason) == (output.text, output.finish_reason)
        assert answer.stats == output.stats
        assert answer.num_tokens == len(output.token_ids) == sum(n for _, n in answer.chunks)
        assert answer.num_prompt_tokens == len(output.prompt_token_ids)
        assert "".join(answer.texts) == answer.text
        assert not answer.error


def test_steps_and_times(llm: LLM, requests: list[Request]) -> None:
    run = EngineBackend(llm).run(requests, 2)
    for answer in run.answers:
        assert answer.steps is not None
        assert [step.num_tokens for step in answer.steps] == [n for _, n in answer.chunks]
        assert (answer.steps[0].num_tokens, answer.steps[0].num_drafted) == (1, 0)
        assert all(step.num_drafted == K for step in answer.steps[1:-1])
        times = [when for when, _ in answer.chunks]
        assert times == sorted(times)
        assert 0 < times[0] == answer.time_to_first_token_s
        assert times[-1] == answer.seconds <= run.seconds
    # Two in flight: the engine is busy for at least half of what requests took.
    total = sum(answer.seconds for answer in run.answers)
    assert total <= 2 * run.seconds * 1.01


def test_counters_are_the_sum_over_requests(llm: LLM, requests: list[Request]) -> None:
    backend = EngineBackend(llm)
    before = backend.counters
    assert before.num_drafts > 0, "counters run since the engine was built"
    run = backend.run(requests, 4)
    assert run.counters == SpeculationStats.pooled(
        answer.stats for answer in run.answers if answer.stats
    )
    assert run.counters == backend.counters.since(before)


@pytest.mark.parametrize("concurrency", [1, 3, 100])
def test_never_more_in_flight(llm: LLM, requests: list[Request], concurrency: int) -> None:
    most = 0
    step = llm.requests.step

    def counting() -> Any:
        nonlocal most
        stats = llm.stats
        most = max(most, stats.num_running + stats.num_waiting)
        return step()

    llm.requests.step = counting  # type: ignore[method-assign]
    try:
        EngineBackend(llm).run(requests, concurrency)
    finally:
        del llm.requests.step  # type: ignore[attr-defined]
    assert most == min(concurrency, len(requests))


def test_a_refused_request_has_an_error_and_the_others_go_on(
    llm: LLM, requests: list[Request]
) -> None:
    long = Request("long", "x = 1\n" * 400, SamplingParams())
    ended: list[Answer] = []
    run = EngineBackend(llm).run([long, *requests[:2]], 1, lambda _, answer: ended.append(answer))
    assert "context of 512" in run.answers[0].error
    assert not run.answers[0].finish_reason
    assert [bool(answer.error) for answer in run.answers] == [True, False, False]
    assert ended == run.answers


def test_messages_go_behind_the_template(llm: LLM) -> None:
    backend = EngineBackend(llm, chat_template=TEMPLATE)
    request = Request("chat", [{"role": "user", "content": "def f(x):"}], SamplingParams())
    assert backend.encode(request) == llm.tokenizer.encode("<user>def f(x):")
    assert not backend.opens_thinking(request)
    thinking = EngineBackend(llm, chat_template=TEMPLATE, thinking=True)
    assert thinking.opens_thinking(request)
    (answer,) = backend.run([request], 1).answers
    assert answer.text == llm.generate("<user>def f(x):", SamplingParams())[0].text


def test_mistakes(llm: LLM, requests: list[Request]) -> None:
    backend = EngineBackend(llm)
    with pytest.raises(UserError, match="concurrency is 0"):
        backend.run(requests, 0)
    several = replace(requests[0], params=SamplingParams(n=2, temperature=1.0))
    with pytest.raises(UserError, match="n is 2"):
        backend.run([several], 1)
    chat = replace(requests[0], prompt=[{"role": "user", "content": "Hi"}])
    with pytest.raises(UserError, match="no chat template"):
        backend.run([requests[0], chat], 1)
    stream: Any = llm.stream("def f(", SamplingParams())
    next(stream)
    with pytest.raises(UserError, match="generating already"):
        backend.run(requests, 1)
    stream.close()
    assert not llm.requests.has_unfinished


def test_an_interruption_leaves_nothing_running(llm: LLM, requests: list[Request]) -> None:
    def interrupt(index: int, answer: Answer) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        EngineBackend(llm).run(requests, 4, interrupt)
    assert not llm.requests.has_unfinished
    assert EngineBackend(llm).run(requests[:1], 1).answers[0].num_tokens == 8


def test_no_requests(llm: LLM) -> None:
    run = EngineBackend(llm).run([], 4)
    assert (run.answers, run.counters) == ([], SpeculationStats(0, 0, 0, [0] * K))
