"""Calls that SageMaker's data capture wrote: which become records, and why the others do not."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from peagle.data.captured import UnusableCall, record_of
from peagle.data.readers import Record, conversation_of, read_records, sha256_of_table, table_files
from peagle.errors import UserError
from tests.data.files import write

CALLS = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
USER = {"role": "user", "content": "Is it 20°?"}
CHAT, PROMPT, BASE64 = {"messages": [USER]}, {"prompt": "p"}, "BASE64"


def call(request: Any, answer: Any, encoding: str = "JSON") -> dict[str, Any]:
    """A line as SageMaker writes it."""
    captured = {}
    for mode, value in (("Input", request), ("Output", answer)):
        data = value if isinstance(value, str) else json.dumps(value)
        data = base64.b64encode(data.encode()).decode() if encoding == BASE64 else data
        captured[f"endpoint{mode}"] = {"data": data, "encoding": encoding}
    return {"captureData": captured, "eventMetadata": {"eventId": "1"}, "eventVersion": "0"}


def chat(**message: Any) -> dict[str, Any]:
    """An answer of vLLM, with a second choice that does not count."""
    first = {"role": "assistant", "content": "Yes.", "refusal": None, "tool_calls": [], **message}
    other = {"index": 1, "message": {"content": "No."}, "finish_reason": "stop"}
    return {"choices": [other, {"index": 0, "message": first, "finish_reason": "stop"}]}


def text(**choice: Any) -> dict[str, Any]:
    return {"choices": [{"text": " return a", "finish_reason": "length", **choice}]}


def events(*parts: Any) -> str:
    return "".join(f"data: {json.dumps(part)}\n\n" for part in parts)


def delta(reason: str | None = None, ids: Any = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"delta": fields, "finish_reason": reason, "token_ids": ids}]}


@pytest.mark.parametrize("encoding", ["JSON", BASE64])
def test_chats_are_conversations_and_completions_text(encoding: str) -> None:
    asked = [USER, {"role": "assistant", "tool_calls": CALLS}, {"role": "tool", "content": "20"}]
    request = {"messages": asked, "tools": [TOOL], "temperature": 0.7}
    made = record_of(call(request, chat(reasoning="Warm.", tool_calls=CALLS), encoding))
    assert (made["temperature"], made["finish_reason"], made["turn"]) == (0.7, "stop", 4)
    found = conversation_of(Record(made, 1, "here"))
    assert found is not None and found.tools == [TOOL]
    answer = {"role": "assistant", "content": "Yes.", "reasoning_content": "Warm."}
    assert found.messages == [*asked, answer | {"tool_calls": CALLS}]
    for request in (PROMPT, {"prompt": ["p"], "add_special_tokens": False}):
        made = record_of(call(request, text(), encoding))
        assert (made["prompt"], made["response"]) == ("p", " return a")
        assert made["add_special_tokens"] is ("add_special_tokens" not in request)


@pytest.mark.parametrize("told", [None, "2026", [1]])
def test_a_call_without_readable_facts_has_no_time(told: Any) -> None:
    assert record_of(call(PROMPT, text()) | {"eventMetadata": told})["time"] == ""


def test_streams_are_joined() -> None:
    parts = ({"reasoning": "Wa"}, {"reasoning": "rm."}, {"content": "Ye"}, {"content": "s."})
    stream = events(*(delta(**part) for part in parts), delta("stop"))
    assert record_of(call(CHAT, stream, BASE64)) == record_of(call(CHAT, chat(reasoning="Warm.")))


def test_token_ids_are_used_where_all_are_there() -> None:
    """vLLM has a chat's prompt beside the choices, a completion's in them."""
    high = CHAT | {"reasoning_effort": "high"}  # how the prompt was made does not matter then
    first = delta(None, [3], content="Y") | {"prompt_token_ids": [1, 2]}
    completion = text(prompt_token_ids=[1, 2], token_ids=[3, 4])
    for one in (call(high, events(first, delta("stop", [4]))), call({"prompt": [1]}, completion)):
        made = record_of(one)
        assert (made["prompt_token_ids"], made["response_token_ids"]) == ([1, 2], [3, 4])
    fewer = completion | {"usage": {"completion_tokens": 3}}
    assert "prompt_token_ids" not in record_of(call(PROMPT, fewer))


@pytest.mark.parametrize(
    ("one", "reason"),
    [
        (call(CHAT | {"store": False}, chat()), '"store": false'),
        (call(CHAT, {"error": {"message": "too long"}}), "failed: too long"),
        (call(CHAT, events({"error": {"message": "oh"}})), "failed: oh"),
        (call(PROMPT, text(finish_reason="abort")), "is not complete"),
        (call(CHAT, json.dumps(chat())[:40]), "is not complete: {"),
        (call(CHAT, events(delta(content="Ye"))), "is not complete"),
        (call(CHAT, events(delta("stop"))[:30], BASE64), "is not complete"),
        (call(CHAT, events(delta(tool_calls=CALLS), delta("stop"))), "was streamed"),
        (call({"input": "x"}, chat()), 'no chat or completion: {"input": "x"}'),
        (call("[", chat()), "no chat or completion: ["),
        (call({"prompt": [1, 2]}, text()), "the prompt is not one text: [1, 2]"),
        (call(PROMPT | {"echo": True}, text()), "made otherwise: by echo"),
        (call(CHAT | {"chat_template_kwargs": {"thinking": True, "x": 1}}, chat()), ": by x"),
        ({"captureData": None}, "endpointInput was not captured"),
    ],
)
def test_calls_that_are_skipped_say_why(one: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnusableCall) as caught:
        record_of(one)
    assert reason in ": ".join(caught.value.args)


def test_folders_are_read_in_order_and_cut_lines_counted(tmp_path: Path) -> None:
    half = call(PROMPT, '{"choices": [{"text": "\\ud83d"}]}', BASE64)
    for hour, lines in (("00", [call(CHAT, chat()), '{"capture']), ("01", ["ata", half])):
        place = tmp_path / "endpoint" / "AllTraffic" / "2026" / "01" / "02" / hour
        place.mkdir(parents=True)
        write(place / "x.jsonl", *lines)
    records = list(read_records(tmp_path))
    cut = "the line was cut off"
    reasons = [record.fault and record.fault.reason for record in records]
    assert reasons == [None, cut, cut, "the text holds half of a surrogate pair"]
    assert [record.number for record in records] == [1, 2, 3, 4]
    (tmp_path / "folder.jsonl").mkdir()
    one, _ = table_files(tmp_path)
    assert list(read_records(one)) == records[:2]
    before = sha256_of_table(tmp_path)
    write(one, call(CHAT, text()))
    assert sha256_of_table(tmp_path) != before


def test_other_folders_are_no_captures(tmp_path: Path) -> None:
    file = write(tmp_path / "x.jsonl", json.dumps("captureData"))
    assert [record.data for record in read_records(file)] == [{"prompt": "captureData"}]
    with pytest.raises(UserError, match="SageMaker's data capture wrote"):
        read_records(tmp_path)
