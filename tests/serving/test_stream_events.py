"""Events of streams: those written from a template are the ones that dictionaries would give."""

import asyncio
import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletionChunk

from peagle.config import SamplingParams
from peagle.engine.outputs import RequestOutput, StreamChunk
from peagle.engine.stats import SpeculationStats
from peagle.kernels.sampling.logprobs import TokenLogprobs
from peagle.markers import SIGN
from peagle.serving.answers import EventTemplate, event_bytes
from peagle.serving.completions import AnswerReader, _Chat, _Completion
from peagle.serving.protocol import ChatBody, CompletionBody
from peagle.serving.tool_parsers import PARSERS, ToolCallParser
from peagle.thinking import ThinkingSplitter

MESSAGES = [{"role": "user", "content": "hi"}]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
TOKENS = SimpleNamespace(token_bytes=lambda id: b"%d" % id, token_text=str)
SERVICE: Any = SimpleNamespace(loaded=lambda: (TOKENS, None), name='m "é"\n')
# Quotes, escapes, control characters, separators of lines and events, characters of 1 to 4 bytes.
TEXTS = st.lists(
    st.text(st.one_of(st.characters(codec="utf-8"), st.sampled_from('"\\\n\r\x00\u2028é漢👩‍👧: '))),
    min_size=1,
    max_size=8,
)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "several outputs": {"n": 2},
    "usage": {"stream_options": {"include_usage": True}},
    "usage in every chunk": {
        "stream_options": {"include_usage": True, "continuous_usage_stats": True}
    },
    "report": {"speculation": {"report": True}},
    "log-probabilities": {"logprobs": True},
}


def chunks_of(texts: Sequence[str], n: int = 1, *, logprobs: bool = False) -> list[StreamChunk]:
    """Return chunks of n outputs in turn, each with these texts."""
    chunks = []
    given = [TokenLogprobs(7, -0.5, 1, [(7, -0.5), (8, -1.0)])] if logprobs else []
    for number, text in enumerate(texts):
        for index in range(n):
            output = None
            if number == len(texts) - 1:
                token_ids = [7] * len(texts)
                output = RequestOutput(
                    "".join(texts), token_ids, [1], "stop", SpeculationStats(), 1.0, index
                )
            chunks.append(StreamChunk(0, text, [7], 1, 3, output, index, given, [8, 9]))
    return chunks


def stream(answer: Any, lists: list[list[StreamChunk]]) -> bytes:
    """Return the events of an answer whose chunks come in these lists."""
    outputs = [c.output for chunks in lists for c in chunks if c.output is not None]

    async def come() -> Any:
        for chunks in lists:
            yield [(0, chunk) for chunk in chunks]

    answer.generation.chunks, answer.generation.ordered = come, outputs

    async def read() -> bytes:
        return b"".join([data async for data in answer.events()])

    return asyncio.run(read())


def parsed(data: bytes) -> list[dict[str, Any]]:
    """Return the events' objects; each event is one line of data."""
    *events, last = data.decode().split("\n\n")
    assert last == "" and all(event.startswith("data: ") for event in events)
    return [json.loads(event.removeprefix("data: ")) for event in events]


def answers(kind: str, options: dict[str, Any], reader: Any = None) -> tuple[Any, Any]:
    """Return two answers to one request, of which the second uses no template."""
    made: list[Any] = []
    for _ in range(2):
        fields: dict[str, Any] = {"stream": True, **options}
        n = fields.get("n", 1)
        generation: Any = SimpleNamespace(
            params=SamplingParams(n=n, temperature=1.0), prompts=[[1]]
        )
        if kind == "completion":
            if "logprobs" in fields:
                fields["logprobs"] = 1
            body = CompletionBody(prompt="a", **fields)
            made.append(_Completion(SERVICE, body, generation))
        else:
            new = reader or (lambda: AnswerReader(lambda: None, ToolCallParser(), None))
            chat = ChatBody(messages=MESSAGES, **fields)
            made.append(_Chat(SERVICE, chat, generation, [new() for _ in range(n)]))
    fast, slow = made
    fast.head = slow.head
    slow._has_only_text = False
    return fast, slow


def check(kind: str, options: dict[str, Any], texts: list[str], reader: Any = None) -> list[Any]:
    """Compare both ways, and chunks that come together with chunks that come one by one."""
    chunks = chunks_of(texts, options.get("n", 1), logprobs="logprobs" in options)
    fast, slow = answers(kind, options, reader)
    data = stream(fast, [chunks])
    assert data == stream(slow, [[chunk] for chunk in chunks])
    events = parsed(data)
    model: Any = Completion if kind == "completion" else ChatCompletionChunk
    for event in events:
        # OpenAI's model of a completion knows no choice that goes on, which its server sends.
        ended = [{**c, "finish_reason": c["finish_reason"] or "stop"} for c in event["choices"]]
        model.model_validate({**event, "choices": ended}, strict=True)
    return events


@pytest.mark.parametrize("kind", ["completion", "chat"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
@settings(deadline=None, max_examples=30)
@given(texts=TEXTS)
def test_events_are_those_of_dictionaries(
    kind: str, options: dict[str, Any], texts: list[str]
) -> None:
    events = check(kind, options, texts)
    for index in range(options.get("n", 1)):
        mine = [c for e in events for c in e["choices"] if c["index"] == index]
        given = (c["text"] if kind == "completion" else c["delta"].get("content") for c in mine)
        assert "".join(text or "" for text in given) == "".join(texts)
        assert [c["finish_reason"] for c in mine] == [None] * (len(mine) - 1) + ["stop"]
    assert ("usage" in events[-1]) == ("stream_options" in options or "speculation" in options)
    assert ("speculation" in events[0]) == ("speculation" in options)


def test_echo_and_half_characters() -> None:
    events = check("completion", {"echo": True}, ["", "b", "", "c"])
    assert [event["choices"][0]["text"] for event in events] == ["a", "b", "c"]
    events = check("completion", {}, ["", "b", "", "c"])
    assert [event["choices"][0]["text"] for event in events] == ["b", "c"]


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_reasoning_and_calls_in_any_cut(data: st.DataObject) -> None:
    written = f'<think>so "é"\n</think>\n\nhi {CALL}'
    cuts = sorted(data.draw(st.sets(st.integers(1, len(written) - 1))))
    texts = [written[a:b] for a, b in zip([0, *cuts], [*cuts, len(written)])]

    def reader() -> AnswerReader:
        parser = PARSERS["hermes"](["add"])
        return AnswerReader(lambda: ThinkingSplitter(opened=False), parser, None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("peagle.serving.tool_parsers.new_call_id", lambda: "call_1")
        events = check("chat", {}, texts, reader)
    deltas = [event["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("reasoning", "") for delta in deltas) == 'so "é"'
    assert "".join(delta.get("content") or "" for delta in deltas) == "hi "
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
    assert calls[0]["name"] == "add"
    assert "".join(call["arguments"] for call in calls) == '{"a": 1}'


def test_half_a_surrogate_pair_is_escaped() -> None:
    template = EventTemplate(lambda text: event_bytes({"model": "é", "text": text}))
    for text in ("é", f"{SIGN}é"):
        (event,) = parsed(template(text))
        assert event == {"model": "é", "text": text}
