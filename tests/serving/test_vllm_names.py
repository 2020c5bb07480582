"""What clients of vLLM send and read, beside OpenAI's API: fields, attributes and routes."""

import json
import re
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from peagle.serving.app import create_app
from peagle.serving.config import ServerConfig
from peagle.serving.keys import ApiKeys
from peagle.serving.metrics import Metrics
from peagle.serving.service import Service
from serving.asgi import JSON, guard
from serving.live import LiveServer
from serving.test_server_openai import FUNCTION, greedy

MESSAGES: Any = [{"role": "user", "content": "x"}]
SCHEMA = {
    "type": "object",
    "properties": {"x": {"enum": ["p", "q"]}},
    "required": ["x"],
    "additionalProperties": False,
}
GRAMMAR = 'root ::= "select " column\ncolumn ::= "a" | "b"\n'


@pytest.mark.parametrize(
    ("kind", "value", "pattern"),
    [
        ("choice", ["positive", "negative (bad)"], r"positive|negative \(bad\)"),
        ("regex", r"[a-z]{3}@\w{2}\.com\n", r"[a-z]{3}@\w{2}\.com\n"),
        ("json", SCHEMA, r'\s*\{\s*"x"\s*:\s*"[pq]"\s*\}\s*'),
        ("json", json.dumps(SCHEMA), r'\s*\{\s*"x"\s*:\s*"[pq]"\s*\}\s*'),
        ("grammar", GRAMMAR, "select [ab]"),
    ],
)
def test_structured_outputs_by_either_name(
    client: openai.OpenAI, server: LiveServer, kind: str, value: Any, pattern: str
) -> None:
    options = greedy(max_tokens=120)
    for extra in ({"structured_outputs": {kind: value}}, {f"guided_{kind}": value}):
        chat = client.chat.completions.create(messages=MESSAGES, extra_body=extra, **options)
        assert re.fullmatch(pattern, chat.choices[0].message.content or "")
        text = client.completions.create(prompt="x", extra_body=extra, **options).choices[0].text
        assert re.fullmatch(pattern, text)
    with server.client() as http:
        body = {"prompt": "x", "max_tokens": 120, f"guided_{kind}": value}
        answer = http.post("/invocations", json=body).json()
    assert re.fullmatch(pattern, answer["choices"][0]["text"])


def test_json_without_blanks(client: openai.OpenAI) -> None:
    wanted = {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}
    answer = client.chat.completions.create(messages=MESSAGES, extra_body=wanted, **greedy())
    assert answer.choices[0].message.content in ('{"x":"p"}', '{"x":"q"}')


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"chioce": ["a"]}}, "structured_outputs.chioce", "mean"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "is []"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag", ""),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "not supported"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_regex", "exactly one"),
        ({"guided_regx": "a"}, "guided_regx", "mean 'guided_regex'"),
        (
            {"guided_regex": "a", "structured_outputs": {"regex": "a"}},
            "guided_regex",
            "structured_outputs and guided_regex were both given",
        ),
        (
            {"guided_regex": "a", "response_format": {"type": "json_object"}},
            "guided_regex",
            "response_format and guided_regex were both given",
        ),
        ({"max_tokns": 3}, "max_tokns", "mean 'max_tokens'"),
        (
            {"stream_options": {"inclde_usage": True}},
            "stream_options.inclde_usage",
            "include_usage",
        ),
        (
            {"response_format": {"type": "structural_tag", "structures": [], "triggers": []}},
            "response_format",
            "'structural_tag'",
        ),
        ({"response_format": {"typ": "text"}}, "response_format.typ", "mean 'type'"),
        ({"speculation": {"propser": "x"}}, "speculation.propser", "mean 'proposer'"),
        ({"reasoning_effort": "low"}, "reasoning_effort", "reasoning_effort is 'low'"),
        ({"chat_template_kwargs": {"efort": 1}}, "chat_template_kwargs", "chat_template_kwargs"),
        (
            {"tools": [{"type": "function", "function": {"nme": "f", "name": "f"}}]},
            "tools.0.function.nme",
            "mean 'name'",
        ),
        (
            {"tools": [FUNCTION], "tool_choice": "required", "guided_json_object": True},
            "guided_json_object",
            "guided_json_object and a forced tool_choice",
        ),
    ],
)
def test_mistakes_name_their_field(
    server: LiveServer, fields: dict[str, Any], param: str, words: str
) -> None:
    body = {"messages": MESSAGES, **fields}
    with server.client() as http:
        for route in ("/v1/chat/completions", "/invocations"):
            answer = http.post(route, json=body)
            error = answer.json()["error"]
            assert answer.status_code == 400 and error["param"] == param, error
            assert words in error["message"]


def test_what_the_clients_of_vllm_read(client: openai.OpenAI) -> None:
    """A completion with n and logprobs; `reasoning` of messages, and sent back in the next turn."""
    (model,) = client.models.list().data
    options: Any = {"model": model.id, "prompt": "A robot", "n": 2, "logprobs": 3, "echo": False}
    completion = client.completions.create(**options)
    assert [choice.index for choice in completion.choices] == [0, 1]
    assert all(
        len(choice.logprobs.tokens) <= 16 for choice in completion.choices if choice.logprobs
    )
    pieces = list(client.completions.create(stream=True, **options))
    assert {choice.index for piece in pieces for choice in piece.choices} == {0, 1}
    thought = {"structured_outputs": {"regex": "<think>abc</think>de"}}
    ask = greedy(messages=MESSAGES, extra_body=thought)
    message: Any = client.chat.completions.create(**ask).choices[0].message
    assert (message.reasoning, message.content) == ("abc", "de")
    deltas: list[Any] = [
        event.choices[0].delta for event in client.chat.completions.create(stream=True, **ask)
    ]
    told = [delta.reasoning for delta in deltas if hasattr(delta, "reasoning")]
    assert "".join(told) == "abc" and not any(delta.content for delta in deltas if "abc" in told)
    plain: Any = client.chat.completions.create(messages=MESSAGES, **greedy()).choices[0].message
    assert plain.reasoning is None
    turn: Any = [*MESSAGES, message.to_dict(), {"role": "user", "content": "y"}]
    assert client.chat.completions.create(messages=turn, **greedy()).choices[0].message.content


def test_a_tool_call_goes_back_as_it_came(client: openai.OpenAI) -> None:
    call = r'<tool_call>\{"name": "add", "arguments": \{"a": 1\}\}</tool_call>'
    ask = greedy(messages=MESSAGES, tools=[FUNCTION], max_tokens=80)
    ask["extra_body"] = {"structured_outputs": {"regex": f"<think>ab</think>{call}"}}
    answer = client.chat.completions.create(**ask)
    message: Any = answer.choices[0].message
    (called,) = message.tool_calls
    assert json.loads(called.function.arguments) == {"a": 1} and message.reasoning == "ab"
    turn: Any = {"role": "assistant", "tool_calls": message.tool_calls, "reasoning": "ab"}
    result: Any = {"role": "tool", "content": "2", "tool_call_id": called.id, "name": "add"}
    messages: Any = [*MESSAGES, turn, result]
    options = greedy(messages=messages, tools=[FUNCTION])
    assert client.chat.completions.create(**options).choices[0].finish_reason


# ---- routes ----


def service(**fields: Any) -> Service:
    """Of no model; `fields` replace what its pool says."""
    pool: Any = SimpleNamespace(
        **{"ready": [], "info": None, "failure": SimpleNamespace()} | fields
    )
    pool.failure.done = lambda: fields.get("has_failed", False)
    metrics = Metrics("m")
    return Service(ServerConfig(), "m", ("plain",), pool, metrics, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("method", "path", "words"),
    [
        ("POST", "/v1/embeddings", "embedding model"),
        ("POST", "/pooling", "embedding model"),
        ("POST", "/v1/score", "classifier"),
        ("POST", "/classify", "classifier"),
        ("POST", "/v2/rerank", "embedding model"),
        ("POST", "/v1/moderations", "classifier"),
        ("POST", "/v1/audio/transcriptions", "text only"),
        ("POST", "/v1/images/generations", "text only"),
        ("POST", "/v1/batches", "all at once"),
        ("GET", "/v1/files/file_1/content", "all at once"),
        ("GET", "/v1/responses/resp_1/input_items", "stores nothing"),
        ("GET", "/v1/chat/completions/chatcmpl-1", "stores nothing"),
        ("POST", "/v1/load_lora_adapter", "another `peagle serve`"),
        ("POST", "/v1/messages", "/v1/chat/completions"),
        ("POST", "/v1/embedings", "see /openapi.json"),
    ],
)
def test_absent_routes_say_why(method: str, path: str, words: str) -> None:
    server = guard(create_app(service()), keys=ApiKeys())
    # Files come as forms, and are told about the route all the same.
    form = {"content-type": "multipart/form-data; boundary=x"}
    for headers in (JSON, form) if "see" not in words else (JSON,):
        answer = server(method, path, headers=headers, body=b"{}")
        assert answer.status == 404
        assert f"There is no route {method} '{path}'" in answer.error["message"]
        assert words in answer.error["message"] and answer.error["type"] == "not_found_error"


def test_routes_that_exist_are_not_called_absent() -> None:
    from peagle.serving.errors import reason_for_absence

    paths = json.loads(guard(create_app(service()))(path="/openapi.json").body)["paths"]
    assert "/v1/responses" in paths
    assert not [path for path in paths if reason_for_absence(path)]
    assert not reason_for_absence("/v1/responses/") and not reason_for_absence("/")


def test_health_is_200_only_when_requests_are_served() -> None:
    def statuses(one: Service) -> list[int]:
        server = guard(create_app(one))
        return [server(path=path).status for path in ("/live", "/health", "/ready", "/v1/models")]

    loading = service()
    assert statuses(loading) == [200, 503, 503, 503]
    info: Any = SimpleNamespace(
        num_speculative_tokens={"plain": 0}, corrections={}, max_model_len=8
    )
    served = service(ready=["engine"], info=info)
    served.tokenizer = SimpleNamespace(template_source=None, characters_per_token=1)  # type: ignore[assignment]
    assert statuses(served) == [200, 200, 200, 200]
    served.is_draining = True
    assert statuses(served) == [200, 503, 503, 503]
    assert statuses(service(has_failed=True))[:2] == [503, 503]
