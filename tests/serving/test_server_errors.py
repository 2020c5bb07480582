"""Bad input: an error object that says what to change, never a fault."""

import json
from typing import Any

import httpx
import pytest

from serving.live import LiveServer

JSON = {"Content-Type": "application/json"}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TOOL = {"type": "function", "function": {"name": "f"}}


def said(response: httpx.Response) -> dict[str, Any]:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"].endswith((".", ";", "?")) and "Traceback" not in error["message"]
    assert response.headers["X-Request-ID"]
    return error


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        (COMPLETIONS, {"prompt": "x", "max_tokns": 3}, 400, "Unknown field 'max_tokns'"),
        (COMPLETIONS, {}, 400, "prompt is missing"),
        (COMPLETIONS, {"prompt": 3}, 400, "prompt is 3"),
        (COMPLETIONS, {"prompt": []}, 400, "prompt is []"),
        (COMPLETIONS, {"prompt": ""}, 400, "prompt is empty"),
        (COMPLETIONS, {"prompt": [1, 99999]}, 400, "token id 99999"),
        (COMPLETIONS, {"prompt": [-1]}, 400, "token id -1"),
        (COMPLETIONS, {"prompt": "x", "model": "gpt-4"}, 404, "'gpt-4' is not served"),
        (COMPLETIONS, {"prompt": "x", "temperature": -1}, 400, "temperature is -1"),
        (COMPLETIONS, {"prompt": "x", "temperature": "hot"}, 400, "temperature is 'hot'"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 0}, 400, "max_tokens is 0"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 9999}, 400, "context is 2048"),
        (COMPLETIONS, {"prompt": "x " * 3000}, 400, "context is 2048"),
        (COMPLETIONS, {"prompt": "x", "n": 2, "temperature": 0}, 400, "n is 2"),
        (COMPLETIONS, {"prompt": "x", "n": 1000}, 400, "n is 1000"),
        (COMPLETIONS, {"prompt": "x", "best_of": 3}, 400, "best_of is 3"),
        (COMPLETIONS, {"prompt": "x", "suffix": "y"}, 400, "suffix is not supported"),
        (COMPLETIONS, {"prompt": "x", "logprobs": 99}, 400, "logprobs is 99"),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {"a": 1}}, 400, "logit_bias has the key 'a'"),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {"99999": 1}}, 400, "99999"),
        (COMPLETIONS, {"prompt": "x", "speculation": {"proposer": "z"}}, 400, "proposer is 'z'"),
        (
            COMPLETIONS,
            {"prompt": "x", "speculation": {"num_speculative_tokens": 8}},
            400,
            "expected 0 (no drafts) to 7",
        ),
        (COMPLETIONS, {"prompt": "x", "response_format": {"type": "regex"}}, 400, "'pattern'"),
        (
            COMPLETIONS,
            {"prompt": "x", "response_format": {"type": "regex", "pattern": "("}},
            400,
            "regex",
        ),
        (CHAT, {"messages": []}, 400, "messages is []"),
        (CHAT, {"messages": [{"role": "wizard", "content": "x"}]}, 400, "'wizard'"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "text"),
        (CHAT, {"messages": [{"role": "user"}]}, 400, "no content"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "x"}], "top_logprobs": 2},
            400,
            "without logprobs",
        ),
        (
            CHAT,
            {
                "messages": [{"role": "user", "content": "x"}],
                "tools": [TOOL],
                "tool_choice": {"type": "function", "function": {"name": "g"}},
            },
            400,
            "'g'",
        ),
        ("/tokenize", {}, 400, "prompt"),
        ("/detokenize", {"tokens": [5000]}, 400, "5000"),
        ("/invocations", {"prompt": "x", "messages": []}, 400, "one of the two"),
        ("/v1/embeddings", {"input": "x"}, 404, "no route POST '/v1/embeddings'"),
    ],
)
def test_what_is_wrong_is_said(
    server: LiveServer, path: str, body: dict[str, Any], status: int, words: str
) -> None:
    with server.client() as client:
        response = client.post(path, json=body)
    assert response.status_code == status, response.text
    assert words in said(response)["message"]


@pytest.mark.parametrize(
    ("content", "headers", "status", "words"),
    [
        (b'{"prompt": "\xff"}', JSON, 400, "UTF-8"),
        (b'{"prompt": ', JSON, 400, "not JSON"),
        (b"[1]", JSON, 400, "[1]"),
        (b'{"prompt": "x", "temperature": NaN}', JSON, 400, "temperature is nan"),
        (b'{"prompt": "\\ud800"}', JSON, 400, "surrogate"),
        (b'{"prompt": "x", "stop": ["\\udfff"]}', JSON, 400, "surrogate"),
        (b"[" * 100_000, JSON, 400, "JSON"),
        (b'{"prompt": "x", "max_tokens": 1' + b"0" * 5000 + b"}", JSON, 400, ""),
        (b'{"prompt": "' + b"x" * 10_000_000 + b'"}', JSON, 413, "10000014 bytes"),
        (b"prompt=x", {"Content-Type": "application/x-www-form-urlencoded"}, 415, "json"),
        (b'{"prompt": "x"}', {"Content-Type": "text/plain"}, 415, "json"),
        (b'{"prompt": "x"}', {**JSON, "Host": "evil.example"}, 403, "evil.example"),
        (b'{"prompt": "x"}', {**JSON, "Origin": "http://evil.example"}, 403, "evil.example"),
    ],
)
def test_bodies_and_headers_of_all_kinds(
    server: LiveServer, content: bytes, headers: dict[str, str], status: int, words: str
) -> None:
    with server.client() as client:
        response = client.post(COMPLETIONS, content=content, headers=headers)
        assert response.status_code == status, response.text
        assert words in said(response)["message"]
        assert client.get("/ready").status_code == 200


def test_a_pair_of_surrogates_is_a_character(server: LiveServer) -> None:
    content = b'{"prompt": "\\ud83d\\ude00", "max_tokens": 1, "echo": true}'
    with server.client() as client:
        response = client.post(COMPLETIONS, content=content, headers=JSON)
    assert response.json()["choices"][0]["text"].startswith("\N{GRINNING FACE}")


def test_an_error_in_a_stream_has_its_status(server: LiveServer) -> None:
    body = {"prompt": "x", "stream": True, "response_format": {"type": "regex", "pattern": "("}}
    with server.client() as client:
        response = client.post(COMPLETIONS, json=body)
    assert response.status_code == 400
    assert "does not parse" in said(response)["message"]


def test_prompts_are_not_logged(server: LiveServer) -> None:
    secret = "xyzzy-plugh-4711"
    with server.client() as client:
        assert client.post(COMPLETIONS, json={"prompt": secret}).status_code == 200
        client.post(COMPLETIONS, json={"prompt": secret, "temperature": -1})
        client.post(CHAT, json={"messages": [{"role": secret, "content": secret}]})
    assert secret not in server.text


def test_request_ids_come_back_and_reach_the_log(server: LiveServer) -> None:
    with server.client() as client:
        headers = {"X-Request-ID": "order-66.b"}
        response = client.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 1}, headers=headers)
        assert response.headers["X-Request-ID"] == "order-66.b"
        bad = client.get("/version", headers={"X-Request-ID": "a b"})
        assert bad.headers["X-Request-ID"] != "a b"
    assert "request_id=order-66.b" in server.text


def test_the_openapi_document_names_every_route(server: LiveServer) -> None:
    with server.client() as client:
        document = json.loads(client.get("/openapi.json").text)
    assert {COMPLETIONS, CHAT, "/v1/models", "/metrics", "/ping", "/invocations"} <= set(
        document["paths"]
    )
