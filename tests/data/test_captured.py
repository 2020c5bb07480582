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


def body(side: str, value: Any, encoding: str, kind: str) -> dict[str, Any]:
    text = value if isinstance(value, str) else json.dumps(value)
    data = base64.b64encode(text.encode()).decode() if encoding == "BASE64" else text
    return {"observedContentType": kind, "mode": side, "data": data, "encoding": encoding}


def call(
    request: Any, answer: Any, encoding: str = "JSON", kind: str = "application/json"
) -> dict[str, Any]:
    """A line as SageMaker writes it."""
    return {
        "captureData": {
            "endpointInput": body("INPUT", request, encoding, "application/json"),
            "endpointOutput": body("OUTPUT", answer, encoding, kind),
        },
        "eventMetadata": {"eventId": "e-1", "inferenceTime": "2026-01-02T03:04:05Z"},
        "eventVersion": "0",
    }


def chat(content: str | None = "Yes, 20°.", reason: str = "stop", **message: Any) -> dict[str, Any]:
    """An answer of vLLM to a chat, with a second choice that does not count."""
    nulls = {"refusal": None, "function_call": None, "tool_calls": []}
    first = {"role": "assistant", "content": content, **nulls, **message}
    other = {
        "index": 1,
        "message": {"role": "assistant", "content": "No."},
        "finish_reason": "stop",
    }
    choices = [other, {"index": 0, "message": first, "finish_reason": reason}]
    return {"object": "chat.completion", "choices": choices}


def text(answer: str = " return a", **choice: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": answer, "finish_reason": "length", **choice}]}


def events(*parts: Any, done: bool = True) -> str:
    lines = [*map(json.dumps, parts), *(["[DONE]"] if done else [])]
    return "".join(f"data: {line}\n\n" for line in lines)


def delta(reason: str | None = None, **fields: Any) -> dict[str, list[dict[str, Any]]]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": reason}]}


def why(one: dict[str, Any]) -> str:
    with pytest.raises(UnusableCall) as caught:
        record_of(one)
    return ": ".join(caught.value.args)


@pytest.mark.parametrize("encoding", ["JSON", "BASE64"])
def test_chats_are_conversations_with_one_answer(encoding: str) -> None:
    earlier = [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    messages = [*earlier, {"role": "tool", "content": "20"}]
    request = {"messages": messages, "tools": [TOOL], "temperature": 0.7}
    made = record_of(call(request, chat(reasoning="Warm."), encoding))
    assert (made["id"], made["temperature"], made["finish_reason"]) == ("e-1", 0.7, "stop")
    assert "turn" in made  # only the last answer is the target's for certain
    found = conversation_of(Record(made, 1, "here"))
    assert found is not None and found.tools == [TOOL]
    assert found.messages[:-1] == [
        earlier[0],
        {"role": "assistant", "tool_calls": [CALL]},
        messages[2],
    ]
    assert found.messages[-1] == {
        "role": "assistant",
        "content": "Yes, 20°.",
        "reasoning_content": "Warm.",
    }


@pytest.mark.parametrize("encoding", ["JSON", "BASE64"])
def test_completions_are_text(encoding: str) -> None:
    for prompt in ("def f(a):", ["def f(a):"]):
        made = record_of(call({"prompt": prompt}, text(), encoding))
        assert (made["prompt"], made["response"]) == ("def f(a):", " return a")
        assert made["add_special_tokens"] is True and made["finish_reason"] == "length"
    bare = {"prompt": "p", "add_special_tokens": False}
    assert record_of(call(bare, text()))["add_special_tokens"] is False


def test_calls_of_tools_are_part_of_the_answer() -> None:
    request = {"messages": [USER], "tools": [TOOL]}
    whole = record_of(call(request, chat(None, "tool_calls", tool_calls=[{"id": "c", **CALL}])))
    named = {"index": 0, "id": "c", "function": {"name": "f", "arguments": ""}}
    parts = [{"index": 0, "function": {"arguments": part}} for part in ('{"x": ', '"y"}')]
    stream = events(
        delta(role="assistant", content=""),
        *(delta(tool_calls=[part]) for part in (named, *parts)),
        delta("tool_calls"),
        {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 5}},
    )
    streamed = record_of(call(request, stream, "BASE64", "text/event-stream"))
    assert whole == streamed
    assert whole["messages"][-1]["tool_calls"] == [CALL]


def test_complete_streams_are_joined() -> None:
    stream = events(
        delta(reasoning="Wa"), delta(reasoning="rm."), delta(content="Yes"), delta("stop")
    )
    made = record_of(call({"messages": [USER], "stream": True}, stream, kind="text/event-stream"))
    assert made["messages"][-1]["content"] == "Yes"
    assert made["messages"][-1]["reasoning_content"] == "Warm."
    assert made["finish_reason"] == "stop"


def test_token_ids_are_used_where_all_are_there() -> None:
    """vLLM gives those of a chat's prompt beside the choices, those of a completion's in them."""
    usage = {"prompt_tokens": 2, "completion_tokens": 3}
    answer = chat() | {"prompt_token_ids": [1, 2], "usage": usage}
    answer["choices"][1]["token_ids"] = [3, 4, 5]
    # How the prompt was made does not matter then.
    request = {"messages": [USER], "reasoning_effort": "high"}
    made = record_of(call(request, answer))
    assert (made["prompt_token_ids"], made["response_token_ids"]) == ([1, 2], [3, 4, 5])
    answer["choices"][1]["token_ids"] = [3, 4]
    assert "prompt_token_ids" not in record_of(call({"messages": [USER]}, answer))
    completion = call({"prompt": [1, 2]}, text(prompt_token_ids=[1, 2], token_ids=[3]))
    assert record_of(completion)["response_token_ids"] == [3]
    first = delta(content="Y")
    first["choices"][0]["token_ids"] = [3]
    last = delta("stop", content="es")
    last["choices"][0]["token_ids"] = [4]
    streamed = call({"messages": [USER]}, events(first | {"prompt_token_ids": [1, 2]}, last))
    assert record_of(streamed)["response_token_ids"] == [3, 4]


CHAT = {"messages": [USER]}
STREAM = events(delta(content="Yes"), delta("stop"))


@pytest.mark.parametrize(
    ("one", "reason"),
    [
        (call(CHAT | {"store": False}, chat()), '"store": false'),
        (call(CHAT, {"error": {"message": "too long", "code": 400}}), "failed: too long"),
        (call(CHAT, events({"error": {"message": "oh"}}), kind="text/event-stream"), "failed: oh"),
        (call(CHAT, chat(reason="abort")), "the request failed: its finish reason is abort"),
        (call(CHAT, "<html>"), "the answer is no completion: <html>"),
        (call(CHAT, json.dumps(chat())[:40]), "the answer is no completion"),
        (call(CHAT, events(delta(content="Ye"), done=False)), "stream"),
        (call(CHAT, STREAM[:30], "BASE64", "text/event-stream"), "answer is not complete"),
        (call({"input": "x"}, chat()), 'neither a chat nor a completion: {"input": "x"}'),
        (call("[", chat()), "neither a chat nor a completion: ["),
        (call({"prompt": ["a", "b"]}, text()), 'the prompt is not one text: ["a", "b"]'),
        (call({"prompt": [1, 2]}, text()), "the prompt is not one text: [1, 2]"),
        (call({"prompt": "a", "echo": True}, text()), "how its prompt is made: it has echo"),
        (call(CHAT | {"reasoning_effort": "low"}, chat()), "it has reasoning_effort"),
        (call(CHAT | {"chat_template_kwargs": {"x": 1}}, chat()), "it has x"),
        (call(CHAT | {"tools": [TOOL], "tool_choice": "none"}, chat()), "it has tool_choice"),
        ({"captureData": {"endpointInput": body("INPUT", CHAT, "JSON", "")}}, "endpointOutput was"),
        ({"captureData": None}, "endpointInput was not captured"),
        ({"captureData": {"endpointInput": {"data": "?", "encoding": "BASE64"}}}, "be decoded"),
    ],
)
def test_calls_that_are_skipped_say_why(one: dict[str, Any], reason: str) -> None:
    assert reason in why(one)


def test_a_mode_of_thinking_is_left_to_prepare() -> None:
    made = record_of(call(CHAT | {"chat_template_kwargs": {"enable_thinking": False}}, chat()))
    assert made["messages"][0] == USER


def tree(folder: Path) -> Path:
    """What `aws s3 sync` makes of two hours, with a cut line and a file that begins cut."""
    for hour, lines in (
        ("00", [call(CHAT, chat("first")), '{"captureData": {"endpointInp']),
        ("01", ["ata", call({"prompt": "p"}, text()), call(CHAT | {"store": False}, chat())]),
    ):
        place = folder / "endpoint" / "AllTraffic" / "2026" / "01" / "02" / hour
        place.mkdir(parents=True)
        write(place / "01-02-uuid.jsonl", *lines)
    return folder


def test_folders_are_read_in_order_and_cut_lines_counted(tmp_path: Path) -> None:
    records = list(read_records(tree(tmp_path)))
    assert [record.number for record in records] == [1, 2, 3, 4, 5]
    reasons = [record.fault and record.fault.reason for record in records]
    cut = "the line was cut off"
    assert reasons == [None, cut, cut, None, 'the request says "store": false']
    assert records[0].data["messages"][-1]["content"] == "first"
    assert records[3].where.endswith("01/01-02-uuid.jsonl, line 2")
    assert len(table_files(tmp_path)) == 2
    (one, _) = table_files(tmp_path)
    assert list(read_records(one))[:2] == records[:2]
    before = sha256_of_table(tmp_path)
    write(one, call(CHAT, chat("other")))
    assert sha256_of_table(tmp_path) != before


def test_other_folders_are_no_captures(tmp_path: Path) -> None:
    write(tmp_path / "x.jsonl", {"prompt": "p"})
    with pytest.raises(UserError, match="SageMaker's data capture wrote"):
        list(read_records(tmp_path))


def test_half_of_a_surrogate_pair_is_found_in_base64(tmp_path: Path) -> None:
    file = write(
        tmp_path / "x.jsonl", call({"prompt": "p"}, '{"choices": [{"text": "\\ud83d"}]}', "BASE64")
    )
    (record,) = read_records(file)
    assert record.fault is not None and "surrogate" in record.fault.reason
