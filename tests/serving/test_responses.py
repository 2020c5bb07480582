"""POST /v1/responses, by way of OpenAI's own client and its own types."""

import json
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from peagle.llm import LLM
from peagle.serving.errors import ApiError
from peagle.serving.responses import OutputItems, messages_of
from peagle.serving.tools import CallDelta, ContentDelta
from serving.live import LiveServer
from serving.test_server_openai import MODEL, texts

TOOL: Any = {
    "type": "function",
    "name": "add",
    "description": "Add.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer", "maximum": 9, "minimum": 0}},
        "required": ["a"],
        "additionalProperties": False,
    },
}
# An output with all three kinds of items, which no small model writes by itself.
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
ALL_KINDS = r'<think>ab</think>hi <tool_call>\{"name": "add", "arguments": \{"a": 1\}\}</tool_call>'
EVENTS: Any = TypeAdapter(ResponseStreamEvent)


def asked(text: Any = "x", **options: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": text, "temperature": 0, "max_output_tokens": 40, **options}


def test_a_response_is_the_chat_answer(client: openai.OpenAI, offline: LLM) -> None:
    prompt = "# system: Be brief.\n# user: def f(\n# assistant:"
    (expected,) = texts(offline, [prompt])
    response = client.responses.create(
        instructions="Be brief.", metadata={"k": "v"}, store=False, **asked("def f(")
    )
    assert response.output_text == expected
    assert response.status == "incomplete" and response.incomplete_details
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage and response.usage.output_tokens == 40
    assert response.usage.input_tokens == len(offline.tokenizer.encode(prompt))
    assert (response.metadata, response.instructions) == ({"k": "v"}, "Be brief.")
    assert response.output[0].status == "incomplete" and response.model == MODEL
    # The same conversation as items.
    items: Any = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "def f("}]},
    ]
    assert client.responses.create(**asked(items)).output_text == expected


@pytest.mark.parametrize(
    ("options", "kinds"),
    [
        ({}, ["message"]),
        ({"tools": [TOOL], "tool_choice": "required"}, ["function_call"]),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "add"}}, ["function_call"]),
        (
            {"tools": [TOOL], "structured_outputs": {"regex": ALL_KINDS}},
            ["reasoning", "message", "function_call"],
        ),
    ],
)
def test_streams_are_whole_responses_in_events(
    server: LiveServer, options: dict[str, Any], kinds: list[str]
) -> None:
    """Both validated by the types of OpenAI's package."""
    body = asked(max_output_tokens=100, parallel_tool_calls=False, **options)
    with server.client() as http:
        whole = http.post("/v1/responses", json=body).json()
        frames = http.post("/v1/responses", json={**body, "stream": True}).text
    Response.model_validate(whole)
    *blocks, last = frames.split("\n\n")
    assert last == ""  # no "[DONE]": the last event has a name
    events = []
    for block in blocks:
        name, data = block.split("\n")
        events.append(EVENTS.validate_python(json.loads(data.removeprefix("data: "))))
        assert name == f"event: {events[-1].type}"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == f"response.{whole['status']}"
    assert [item["type"] for item in whole["output"]] == kinds
    told: dict[int, str] = {}
    for event in events:
        if event.type.endswith(".delta"):
            told[event.output_index] = told.get(event.output_index, "") + event.delta
    for item, other in zip(whole["output"], events[-1].response.output, strict=True):
        text = item["arguments"] if "arguments" in item else item["content"][0]["text"]
        assert text == told[whole["output"].index(item)]
        random = {"id": None, "call_id": None}
        assert {**item, **random} == {**other.to_dict(), **random}


def test_usage_counts_reasoning(client: openai.OpenAI, offline: LLM) -> None:
    extra = {"structured_outputs": {"regex": "<think>abc</think>de"}}
    response = client.responses.create(extra_body=extra, **asked())
    reasoning, message = response.output
    assert reasoning.type == "reasoning" and reasoning.content and message.type == "message"
    assert (reasoning.content[0].text, response.output_text) == ("abc", "de")
    usage = response.usage
    assert usage and 0 < usage.output_tokens_details.reasoning_tokens < usage.output_tokens
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens


def test_the_stream_helper_and_parsed_text(client: openai.OpenAI) -> None:
    class Point(BaseModel):
        x: bool

    wide = asked(max_output_tokens=300)
    with client.responses.stream(text_format=Point, **wide) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    assert isinstance(final.output_parsed, Point)
    parsed = client.responses.parse(text_format=Point, **wide)
    assert parsed.output_parsed == final.output_parsed
    wanted: Any = {"format": {"type": "json_object"}}
    text = client.responses.create(text=wanted, **asked(max_output_tokens=300)).output_text
    assert text.lstrip().startswith("{")


def test_a_call_and_its_result_go_back(client: openai.OpenAI, offline: LLM) -> None:
    extra = {"structured_outputs": {"regex": ALL_KINDS}}
    options = asked([{"role": "user", "content": "add"}], tools=[TOOL], max_output_tokens=100)
    first = client.responses.create(extra_body=extra, **options)
    call = first.output[-1]
    assert call.type == "function_call" and json.loads(call.arguments) == {"a": 1}
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "2"}
    items: Any = [*options["input"], *first.output, output]
    second = client.responses.create(**asked(items))
    prompt = "# user: add\n# assistant: hi \n# calls: add\n# tool: 2\n# assistant:"
    assert second.output_text == texts(offline, [prompt])[0]
    lost: Any = [*options["input"], output]
    with pytest.raises(openai.BadRequestError, match="no function_call before it") as caught:
        client.responses.create(**asked(lost))
    assert caught.value.param == "input[1]"


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id", "stores no"),
        ({"input": "x", "conversation": "conv_1"}, "conversation", "stores no"),
        ({"input": "x", "background": True}, "background", "should be false"),
        ({"input": "x", "store": True}, "store", "should be false"),
        ({"input": "x", "prompt": {"id": "p"}}, "prompt", "stores no prompts"),
        ({"input": "x", "truncation": "auto"}, "truncation", "shortens no input"),
        ({"input": "x", "include": ["file_search_call.results"]}, "include", "should be"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools.0.type", "runs no tools"),
        ({"input": "x", "reasoning": {"effort": "low"}}, "reasoning.effort", "reasoning.effort is"),
        ({"input": "x", "reasoning": {"efort": "low"}}, "reasoning.efort", "mean 'effort'"),
        ({"input": "x", "reasoning": {"summary": "detailed"}}, "reasoning.summary", "'auto'"),
        ({"input": "x", "max_tokens": 3}, "max_tokens", "mean 'max_output_tokens'"),
        ({"input": "x", "messages": []}, "messages", "mean 'input'"),
        ({"input": "x", "max_output_tokens": 9999}, "max_output_tokens", "lower max_output_tokens"),
        ({"input": "x", "text": {"format": {"type": "json_schema"}}}, "text.format.schema", "need"),
        ({"input": "x", "tool_choice": "required"}, "tool_choice", "no tools"),
        ({"input": "x", "tools": [{**TOOL, "name": "?"}]}, "tools[0].name", "'?'"),
        ({"input": []}, "input", "input is []"),
        ({}, "input", "input is missing"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "item_reference"),
        ({"input": [{"role": "user"}]}, "input[0].content", "expected text or a list"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type",
            "reads text only",
        ),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input", "'wizard'"),
        ({"input": "x", "model": "gpt-4"}, "model", "not served"),
    ],
)
def test_what_cannot_be_done_is_refused(
    server: LiveServer, body: dict[str, Any], param: str, words: str
) -> None:
    with server.client() as http:
        answer = http.post("/v1/responses", json=body)
        streamed = http.post("/v1/responses", json={**body, "stream": True})
    assert answer.status_code == streamed.status_code == (404 if "model" in body else 400)
    error = answer.json()["error"]
    assert error == streamed.json()["error"]
    assert error["param"] == param and words in error["message"]


def test_stored_responses_are_no_route(client: openai.OpenAI) -> None:
    for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError, match="peagle stores nothing"):
            call("resp_1")


# ---- without a server ----


def test_items_of_one_turn_become_one_message() -> None:
    items = [
        {"role": "developer", "content": "brief"},
        {"role": "user", "content": "q"},
        {
            "type": "reasoning",
            "summary": [],
            "content": [{"text": "why", "type": "reasoning_text"}],
        },
        {"role": "assistant", "content": [{"type": "output_text", "text": "a"}], "id": "msg_1"},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c2", "output": "two"},
        {"type": "reasoning", "summary": [{"text": "left out", "type": "summary_text"}]},
        {"role": "user", "content": "next"},
        {"type": "reasoning", "summary": [{"text": "short", "type": "summary_text"}]},
        {"type": "function_call", "call_id": "c3", "name": "f", "arguments": "{}"},
    ]
    call = {"type": "function", "id": "c1", "function": {"name": "f", "arguments": "{}"}}
    calls = [call, {**call, "id": "c2", "function": {"name": "g", "arguments": "{}"}}]
    expected = [
        {"role": "system", "content": "rules"},
        {"role": "developer", "content": "brief"},
        {"role": "user", "content": "q"},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "a"}],
            "reasoning_content": "why",
            "tool_calls": calls,
        },
        {"role": "tool", "tool_call_id": "c2", "name": "g", "content": "two"},
        {"role": "user", "content": "next"},
        {
            "role": "assistant",
            "content": "",  # which every template can write
            "reasoning_content": "short",
            "tool_calls": [{**call, "id": "c3"}],
        },
    ]
    assert messages_of(items, "rules") == expected


def test_an_answer_of_nothing_is_an_empty_message() -> None:
    items = OutputItems()
    names = [event["type"] for event in items.close("completed")]
    assert names[0] == "response.output_item.added" and names[-1] == "response.output_item.done"
    assert items.items[0]["content"][0]["text"] == ""


def test_text_after_a_call_is_an_item_of_its_own() -> None:
    items = OutputItems()
    deltas = [ContentDelta("a"), CallDelta(0, "{", "call_1", "f"), CallDelta(0, "}")]
    for _ in (*items.add(deltas), *items.add([ContentDelta("b")]), *items.close("x")):
        pass
    assert [item["type"] for item in items.items] == ["message", "function_call", "message"]
    assert items.items[1]["arguments"] == "{}"
    assert [item["status"] for item in items.items] == ["completed", "completed", "x"]


def test_an_error_in_a_stream_is_its_last_event() -> None:
    import asyncio

    from peagle.config import SamplingParams
    from peagle.serving.protocol import ResponsesBody
    from peagle.serving.responses import _Response

    async def chunks() -> Any:
        yield [(0, SimpleNamespace(text="a", output=None))]
        raise ApiError(500, "The engine died.")

    class Reader:
        def add(self, text: str, *, final: bool) -> Any:
            return [ContentDelta(text)]

    service: Any = SimpleNamespace(loaded=lambda: (None, None), name="m")
    generation: Any = SimpleNamespace(params=SamplingParams(), chunks=chunks)
    reader: Any = Reader()
    response = _Response(service, ResponsesBody(input="x", stream=True), generation, reader)
    sent: list[dict[str, Any]] = []

    async def run() -> None:
        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            await asyncio.Event().wait()

        await response({}, receive, send)

    asyncio.run(run())
    blocks = b"".join(message.get("body", b"") for message in sent).decode().split("\n\n")
    event = json.loads(blocks[-2].split("\n")[1].removeprefix("data: "))
    failed = EVENTS.validate_python(event)
    assert failed.type == "response.failed" and failed.response.error.message == "The engine died."
    assert failed.response.output[0].content[0].text == "a"
