"""Calls that SageMaker's data capture wrote: which become records, and why the others do not."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from peagle.data.captured import UnusableCall, record_of
from peagle.data.readers import Record, conversation_of, read_records, sha256_of_table, table_files
from peagle.errors import UserError
from tests.data.files import write

USER = {"role": "user", "content": "Is it 20°?"}
CALL = {"type": "function", "function": {"name": "f", "arguments": '{"x": "y"}'}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CHAT = {"messages": [USER]}
STREAM = "text/event-stream"


def call(
    request: Any, answer: Any, encoding: str = "JSON", kind: str = "application/json"
) -> dict[str, Any]:
    """A line as SageMaker writes it."""
    captured = {}
    for mode, value in (("Input", request), ("Output", answer)):
        data = value if isinstance(value, str) else json.dumps(value)
        data = base64.b64encode(data.encode()).decode() if encoding == "BASE64" else data
        part = {"observedContentType": kind, "mode": mode.upper(), "data": data}
        captured[f"endpoint{mode}"] = {**part, "encoding": encoding}
    return {"captureData": captured, "eventMetadata": {"eventId": "1"}, "eventVersion": "0"}


def chat(content: str | None = "Yes.", **message: Any) -> dict[str, Any]:
    """An answer of vLLM, with a second choice that does not count."""
    first = {"role": "assistant", "content": content, "refusal": None, "tool_calls": [], **message}
    other = {"index": 1, "message": {"content": "No."}, "finish_reason": "stop"}
    return {"choices": [other, {"index": 0, "message": first, "finish_reason": "stop"}]}


def text(**choice: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": " return a", "finish_reason": "length", **choice}]}


def events(*parts: Any) -> str:
    return "".join(f"data: {json.dumps(part)}\n\n" for part in parts)


def delta(reason: str | None = None, **fields: Any) -> dict[str, Any]:
    ids = {"token_ids": fields.pop("token_ids", None)}
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": reason, **ids}]}


@pytest.mark.parametrize("encoding", ["JSON", "BASE64"])
def test_chats_are_conversations_and_completions_text(encoding: str) -> None:
    messages = [
        USER,
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "content": "20"},
    ]
    request = {"messages": messages, "tools": [TOOL], "temperature": 0.7}
    made = record_of(call(request, chat(reasoning="Warm."), encoding))
    assert (made["temperature"], made["finish_reason"]) == (0.7, "stop")
    assert "turn" in made  # earlier answers may be of others
    found = conversation_of(Record(made, 1, "here"))
    assert found is not None and found.tools == [TOOL]
    answer = {"role": "assistant", "content": "Yes.", "reasoning_content": "Warm."}
    assert found.messages == [*messages, answer]
    for request in ({"prompt": "p"}, {"prompt": ["p"], "add_special_tokens": False}):
        made = record_of(call(request, text(), encoding))
        assert (made["prompt"], made["response"]) == ("p", " return a")
        assert made["add_special_tokens"] is ("add_special_tokens" not in request)


def test_streams_are_joined_to_the_same_record() -> None:
    answer = chat("Hm", reasoning="Warm.", tool_calls=[{"id": "c", **CALL}])
    named = {"index": 0, "id": "c", "function": {"name": "f", "arguments": ""}}
    rest = [{"index": 0, "function": {"arguments": part}} for part in ('{"x": ', '"y"}')]
    parts: list[dict[str, Any]]
    parts = [{"reasoning": "Wa"}, {"reasoning": "rm."}, {"content": "H"}, {"content": "m"}]
    parts += [{"tool_calls": [part]} for part in (named, *rest)]
    stream = events(*(delta(**part) for part in parts), delta("stop"))
    streamed = record_of(call(CHAT, stream, "BASE64", STREAM))
    assert record_of(call(CHAT, answer)) == streamed
    assert streamed["messages"][-1]["tool_calls"] == [CALL]


def test_token_ids_are_used_where_all_are_there() -> None:
    """vLLM has a chat's prompt beside the choices, a completion's in them."""
    high = CHAT | {"reasoning_effort": "high"}  # how the prompt was made does not matter then
    first = delta(content="Y", token_ids=[3]) | {"prompt_token_ids": [1, 2]}
    stream = events(first, delta("stop", token_ids=[4]))
    completion = text(prompt_token_ids=[1, 2], token_ids=[3, 4])
    for one in (call(high, stream, kind=STREAM), call({"prompt": [1, 2]}, completion)):
        made = record_of(one)
        assert (made["prompt_token_ids"], made["response_token_ids"]) == ([1, 2], [3, 4])
    fewer = completion | {"usage": {"completion_tokens": 3}}
    assert "prompt_token_ids" not in record_of(call({"prompt": "p"}, fewer))


@pytest.mark.parametrize(
    ("one", "reason"),
    [
        (call(CHAT | {"store": False}, chat()), '"store": false'),
        (call(CHAT, {"error": {"message": "too long"}}), "failed: too long"),
        (call(CHAT, events({"error": {"message": "oh"}}), kind=STREAM), "failed: oh"),
        (call({"prompt": "p"}, text(finish_reason="abort")), "is not complete"),
        (call(CHAT, json.dumps(chat())[:40]), "is not complete: {"),
        (call(CHAT, events(delta(content="Ye"))), "is not complete"),
        (call(CHAT, events(delta("stop"))[:30], "BASE64", STREAM), "is not complete"),
        (call({"input": "x"}, chat()), 'no chat or completion: {"input": "x"}'),
        (call("[", chat()), "no chat or completion: ["),
        (call({"messages": None}, chat()), "no chat or completion"),
        (call({"prompt": [1, 2]}, text()), "the prompt is not one text: [1, 2]"),
        (call({"prompt": "a", "echo": True}, text()), "made otherwise: by echo"),
        (call(CHAT | {"chat_template_kwargs": {"thinking": True, "x": 1}}, chat()), ": by x"),
        ({"captureData": None}, "endpointInput was not captured"),
        ({"captureData": {"endpointInput": {"data": "?", "encoding": "BASE64"}}}, "not captured"),
    ],
)
def test_calls_that_are_skipped_say_why(one: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnusableCall) as caught:
        record_of(one)
    assert reason in ": ".join(caught.value.args)


def test_folders_are_read_in_order_and_cut_lines_counted(tmp_path: Path) -> None:
    half = call({"prompt": "p"}, '{"choices": [{"text": "\\ud83d"}]}', "BASE64")
    for hour, lines in (("00", [call(CHAT, chat()), '{"capture']), ("01", ["ata", half])):
        place = tmp_path / "endpoint" / "AllTraffic" / "2026" / "01" / "02" / hour
        place.mkdir(parents=True)
        write(place / "01-02-uuid.jsonl", *lines)
    records = list(read_records(tmp_path))
    cut = "the line was cut off"
    reasons = [record.fault and record.fault.reason for record in records]
    assert reasons == [None, cut, cut, "the text holds half of a surrogate pair"]
    assert [record.number for record in records] == [1, 2, 3, 4]
    assert records[2].where.endswith("01/01-02-uuid.jsonl, line 1")
    one, _ = table_files(tmp_path)
    assert list(read_records(one)) == records[:2]
    before = sha256_of_table(tmp_path)
    write(one, call(CHAT, chat("No.")))
    assert sha256_of_table(tmp_path) != before


def test_other_folders_are_no_captures(tmp_path: Path) -> None:
    file = write(tmp_path / "x.jsonl", json.dumps("of captureData"))
    assert [record.data for record in read_records(file)] == [{"prompt": "of captureData"}]
    with pytest.raises(UserError, match="SageMaker's data capture wrote"):
        list(read_records(tmp_path))
