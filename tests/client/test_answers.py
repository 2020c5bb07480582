"""The reader of answers, on recorded streams of four servers and on streams that are damaged."""

import json
from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from client.streams import FOLDER, STREAMS, Stream, by_name, called
from peagle.client import events
from peagle.client.answers import (
    AnswerEvent,
    DraftReport,
    ForeignAnswer,
    StreamedAnswer,
    Usage,
    read_whole,
)
from peagle.client.events import EventReader

DONE = b"data: [DONE]\n\n"
streams = st.sampled_from(STREAMS)


def read(*parts: bytes) -> tuple[list[AnswerEvent], StreamedAnswer]:
    answer = StreamedAnswer()
    return list(answer.read_stream(parts)), answer


def cut(draw: st.DataObject, raw: bytes) -> list[bytes]:
    edges = sorted(draw.draw(st.lists(st.integers(0, len(raw)), max_size=12)))
    return [raw[start:end] for start, end in pairwise([0, *edges, len(raw)])]


def sent(*every: Any) -> bytes:
    return b"".join(b"data: %b\n\n" % json.dumps(one).encode() for one in every)


def text(content: str, reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": content, "finish_reason": reason}]}


# ---- recorded streams ----


def test_every_recorded_stream_is_tried() -> None:
    assert sorted(one.name for one in STREAMS) == sorted(one.stem for one in FOLDER.glob("*.sse"))


@by_name
def test_recorded_streams(stream: Stream) -> None:
    found, answer = read(stream.raw)
    texts, reasoning = defaultdict[int, str](str), ""
    for event in found:
        for choice in event.choices:
            texts[choice.index] += choice.text
            reasoning += choice.reasoning
    assert tuple(texts[index] for index in sorted(texts)) == stream.texts
    assert reasoning == stream.reasoning
    reasons = answer.finish_reasons
    assert tuple(reasons[index] for index in sorted(reasons)) == stream.finish_reasons
    assert next((one.usage for one in reversed(found) if one.usage), None) == stream.usage
    assert "".join(event.error for event in found) == stream.error
    calls = [call for event in found for choice in event.choices for call in choice.tool_calls]
    assert called(calls) == stream.calls
    reports = [one.report for one in found if one.report]
    assert [(one.num_drafted, one.num_accepted) for one in reports] == stream.report
    assert answer.is_done == stream.is_done and answer.is_whole


def test_a_report_marks_the_accepted_tokens() -> None:
    found, _ = read(next(one for one in STREAMS if one.name == "ours_completions").raw)
    assert found[0].report == DraftReport(((" ", False),))
    assert found[2].report == DraftReport((("�", True), (" ", False)), 7, 1)


# ---- bytes ----


@given(streams, st.data())
def test_any_cut_of_the_bytes_gives_the_same_events(stream: Stream, data: st.DataObject) -> None:
    found, answer = read(*cut(data, stream.raw))
    whole, other = read(stream.raw)
    assert found == whole and answer.finish_reasons == other.finish_reasons


@given(streams, st.data(), st.sampled_from([": ping", ":", "event: message", "id: 7", "retry: 5"]))
def test_other_lines_and_line_ends_change_nothing(
    stream: Stream, data: st.DataObject, line: str
) -> None:
    lines = stream.raw.decode().splitlines()
    for at in data.draw(st.lists(st.integers(0, len(lines)), max_size=5)):
        lines.insert(at, line)
    raw = "".join(one + data.draw(st.sampled_from(["\n", "\r\n"])) for one in lines).encode()
    assert read(*cut(data, raw))[0] == read(stream.raw)[0]


@given(streams, st.data())
def test_an_event_may_have_several_data_lines(stream: Stream, data: st.DataObject) -> None:
    whole, _ = read(stream.raw)
    lines = []
    for event in whole:
        space = data.draw(st.sampled_from(["", " "]))
        indent = data.draw(st.sampled_from([None, 0, 2]))
        body = json.dumps(event.body, indent=indent)
        lines += [*(f"data:{space}{line}" for line in body.splitlines()), ""]
    assert read(*cut(data, "\n".join([*lines, ""]).encode()))[0] == whole


@given(streams, st.data())
def test_a_stream_that_ends_early_has_its_first_events_and_is_not_whole(
    stream: Stream, data: st.DataObject
) -> None:
    size = data.draw(st.integers(0, len(stream.raw)))
    found, answer = read(*cut(data, stream.raw[:size]))
    whole, _ = read(stream.raw)
    assert found == whole[: len(found)]
    reasons = [choice.finish_reason for event in found for choice in event.choices]
    if not any(reasons) and b"[DONE]" not in stream.raw[:size]:
        assert not answer.is_whole


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\r\n"))), st.data())
def test_the_data_of_events(texts: list[str], data: st.DataObject) -> None:
    wanted = [text.encode() for text in texts]
    raw = b"".join(b": comment\r\nevent: x\ndata: %b\r\n\n" % one for one in wanted)
    reader, found = EventReader(), []
    for part in cut(data, raw):
        found += reader.feed(part)
    assert found == [one.strip() for one in wanted if one.strip()]
    assert reader.end() == []


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n", b"\n\n", b"\n\n: bye\n"])
def test_the_blank_line_behind_the_last_event_may_be_missing(end: bytes) -> None:
    found, answer = read(sent(text("a")) + b"data: [DONE]" + end)
    assert len(found) == 1 and answer.is_done
    found, answer = read(sent(text("a")) + sent(text("b", "stop")).rstrip() + end)
    assert len(found) == 2 and not answer.is_done and answer.is_whole


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
def test_half_an_event_is_dropped(end: bytes) -> None:
    found, answer = read(sent(text("a")) + b'data: {"choices": [' + end)
    assert len(found) == 1 and not answer.is_whole


@pytest.mark.parametrize("line", [b"data: 123456", b"data: 1\ndata: 2"])
def test_an_event_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch, line: bytes) -> None:
    monkeypatch.setattr(events, "MAX_EVENT_BYTES", 14)
    reader = EventReader()
    assert reader.feed(line) == []
    with pytest.raises(ValueError, match="more than 14 bytes"):
        reader.feed(b"3456")


# ---- ends ----


def test_an_answer_ends_by_done_or_by_the_end_of_all_its_choices() -> None:
    other = {"choices": [{"index": 1, "text": "b"}]}
    usage = {"choices": [], "usage": {"completion_tokens": 2}}
    for raw, is_whole in (
        (b"", False),
        (sent(text("a")), False),
        (sent(text("a"), usage), False),
        (sent(text("a")) + DONE, True),
        (sent(text("a", "stop")), True),
        (sent(text("a", "stop"), usage), True),
        (sent(text("a"), text("", "stop")), True),
        (sent(text("a", "stop"), text("")), True),
        (sent(text("a", "stop"), other), False),
        (sent(text("a", "stop"), other) + DONE, True),
    ):
        assert read(raw)[1].is_whole == is_whole, raw


def test_nothing_behind_done_is_read() -> None:
    found, answer = read(sent(text("a")) + DONE + sent(text("b")) + b"data: nonsense\n\n")
    assert [event.choices[0].text for event in found] == ["a"] and answer.is_done


# ---- events ----


def test_usage_may_lack_everything() -> None:
    (event,), _ = read(sent({"choices": None, "usage": {"prompt_tokens_details": None}}))
    assert (event.usage, event.choices) == (Usage(), ())
    (event,), _ = read(sent({"usage": {"prompt_tokens": 3}}))
    assert event.usage == Usage(3, None)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ({"message": "out of\nmemory"}, "out of memory"),
        ("out of memory", "out of memory"),
        ({"code": 5}, "it gave no reason"),
        (["\x1b[31m"], "['\\x1b[31m']"),
    ],
)
def test_errors(error: Any, said: str) -> None:
    (event,), _ = read(sent({"error": error}))
    assert event.error == said


@pytest.mark.parametrize(
    ("body", "is_object"),
    [
        ("hello", False),
        ("[1]", False),
        ("{nonsense", False),
        ("[" * 100_000, False),
        ('{"generated_text": "x"}', True),
        ('{"choices": 3}', True),
        ('{"choices": ["x"]}', True),
        ('{"choices": [{"text": 3}]}', True),
        ('{"choices": [{"delta": "x"}]}', True),
        ('{"choices": [{"index": "x"}]}', True),
        ('{"choices": [{"index": 1e999}]}', True),
        ('{"choices": [{"finish_reason": {"type": "stop"}}]}', True),
        ('{"choices": [{"delta": {"tool_calls": 3}}]}', True),
        ('{"choices": [{"delta": {"tool_calls": ["f"]}}]}', True),
        ('{"usage": 3}', True),
        ('{"usage": {"completion_tokens": "x"}}', True),
        ('{"choices": [], "speculation": {"tokens": [3]}}', True),
    ],
)
def test_events_of_another_kind_come_behind_those_before(body: str, is_object: bool) -> None:
    raw = sent(text("a")) + f"data: {body}\n\n".encode()
    found = []
    with pytest.raises(ForeignAnswer) as caught:
        found.extend(StreamedAnswer().feed(raw))
    assert len(found) == 1
    assert caught.value.is_object == is_object and caught.value.data == body.encode()
    assert str(caught.value) == body[:80]
    with pytest.raises(ForeignAnswer):
        read_whole(body.encode())


# ---- whole answers ----


def test_whole_answers() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    message = {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [call]}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    event = read_whole(json.dumps({"choices": [choice], "usage": usage}).encode())
    (delta,) = event.choices
    assert (delta.text, delta.reasoning, delta.tool_calls) == ("", "hm", (call,))
    assert (delta.finish_reason, event.usage) == ("tool_calls", Usage(3, 2))
    assert read_whole(b'{"error": {"message": "no"}}').error == "no"


@pytest.mark.parametrize("body", ["{}", '{"choices": []}', '{"choices": [{}]}', '{"usage": {}}'])
def test_whole_answers_without_text(body: str) -> None:
    with pytest.raises(ForeignAnswer):
        read_whole(body.encode())
