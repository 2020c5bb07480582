"""An engine as a backend: the same tokens as `LLM.generate`, at most so many in flight."""

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
        for i, prompt in enumerate(load_prompt_set("heldout_code", 5))
    ]


@pytest.mark.parametrize("concurrency", [1, 3, 100])
def test_answers_are_those_of_generate(
    llm: LLM, requests: list[Request], concurrency: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = llm.generate([str(r.prompt) for r in requests], [r.params for r in requests])
    most, ended, step = 0, list[int](), llm.requests.step

    def counting() -> Any:
        nonlocal most
        most = max(most, llm.stats.num_running + llm.stats.num_waiting)
        return step()

    monkeypatch.setattr(llm.requests, "step", counting)
    backend = EngineBackend(llm)
    before = backend.counters
    assert before.num_drafts > 0, "counters run since the engine was built"
    run = backend.run(requests, concurrency, lambda index, answer: ended.append(index))
    assert most == min(concurrency, len(requests))
    assert sorted(ended) == list(range(len(requests)))
    drafts = SpeculationStats.pooled(answer.stats for answer in run.answers if answer.stats)
    assert run.counters == drafts == backend.counters.since(before)
    for answer, output in zip(run.answers, expected, strict=True):
        assert (answer.token_ids, answer.stats) == (output.token_ids, output.stats)
        assert (answer.text, answer.finish_reason) == (output.text, output.finish_reason)
        assert answer.num_tokens == len(output.token_ids) == sum(n for _, n in answer.chunks)
        assert answer.num_prompt_tokens == len(output.prompt_token_ids)
        assert "".join(answer.texts) == answer.text and not answer.error
        assert answer.steps is not None
        assert [one.num_tokens for one in answer.steps] == [n for _, n in answer.chunks]
        assert (answer.steps[0].num_tokens, answer.steps[0].num_drafted) == (1, 0)
        assert all(one.num_drafted == K for one in answer.steps[1:-1])
        times = [when for when, _ in answer.chunks]
        assert times == sorted(times) and 0 < times[0] == answer.time_to_first_token_s
        assert times[-1] == answer.seconds <= run.seconds
    # The engine is busy for at least the share of the requests' time that fits in flight.
    total = sum(answer.seconds for answer in run.answers)
    assert total <= min(concurrency, len(requests)) * run.seconds * 1.01


def test_a_refused_request_has_an_error_and_the_others_go_on(
    llm: LLM, requests: list[Request]
) -> None:
    long = Request("long", "x = 1\n" * 400, SamplingParams())
    ended: list[Answer] = []
    run = EngineBackend(llm).run([long, *requests[:2]], 1, lambda _, answer: ended.append(answer))
    assert "context of 512" in run.answers[0].error and not run.answers[0].finish_reason
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
    several = replace(requests[0], params=SamplingParams(n=2, temperature=1.0))
    chat = replace(requests[0], prompt=[{"role": "user", "content": "Hi"}])
    for sent, concurrency, message in (
        (requests, 0, "concurrency is 0"),
        ([several], 1, "n is 2"),
        ([requests[0], chat], 1, "no chat template"),
    ):
        with pytest.raises(UserError, match=message):
            backend.run(sent, concurrency)
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
    nothing = EngineBackend(llm).run([], 4)
    assert (nothing.answers, nothing.counters) == ([], SpeculationStats(0, 0, 0, [0] * K))
