"""A refusal costs no more than an answer to a body of that size, and says little of it back.

Processor time is compared within this process: a body that is refused, beside one that is accepted
and carries the same value as metadata. So no limit depends on the machine.
"""

import gc
import json
import time
from collections.abc import Iterator
from statistics import median
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from peagle.config import checks
from peagle.config.checks import near_names
from serving.asgi import JSON, Reply, guard
from serving.test_family_chat import Chat
from serving.test_neutral_values import BODIES, CHAT, COMPLETIONS, RESPONSES, chat

__all__ = ["chat"]

LARGE = 4_000_000  # bytes; the server takes up to 4 MiB
MOST_SHOWN = 4_096  # bytes of an error's body
# Processor time of a refusal over that of the accepted body. Both parse the same JSON; before names
# were bounded it was 20 to 100.
MOST_TIMES = 10
ROUTES = {**BODIES, "/invocations": BODIES[COMPLETIONS]}


def text(size: int) -> str:
    """A text that resembles the names of many fields."""
    return ("max_tokens_" * (size // 11 + 1))[:size]


def values(size: int) -> dict[str, Any]:
    """Values of about this many bytes of JSON, within the limits of JSON."""
    deep: Any = text(size)
    for _ in range(90):
        deep = [deep]
    few, many = min(size // 6, 30_000), min(size // 3, 65_000)
    return {
        "a name": text(size),
        "quotes": "'\"" * (size // 3),
        "control characters": "\x01" * (size // 6),
        "wide characters": "\N{GRINNING FACE}" * (size // 12),
        "a key": {text(size): 1},
        "a key of a key": {"type": {text(size): 1}},
        "a type": {"type": text(size)},
        "lists": [[]] * few,
        "objects": [{"a": 1}] * min(size // 9, 30_000),
        "texts": ["a"] * many,
        "long texts": [text(size // 50)] * 48,
        "numbers": [1] * min(size // 2, 260_000),
        "long numbers": [10**90] * (size // 93),
        "many keys": {f"k{i}": 1 for i in range(min(size // 12, 60_000))},
        "64 long values": {f"k{i}": text(size // 64) for i in range(60)},
        "depth": deep,
        "a message": [{"role": "user", "content": text(size)}],
        "a role": [{"role": text(size), "content": "x"}],
        "a kind of content": [{"role": "user", "content": {text(size): 1}}],
        "a kind of part": [{"role": "user", "content": [{"type": text(size)}]}],
        "a part": [{"role": "user", "content": [{"type": "text", "text": [text(size)]}]}],
        "an item": [{"type": text(size)}],
        "a call": [{"type": "function_call_output", "call_id": text(size), "output": "x"}],
        "arguments": calls_with('{"x":[' + "[]," * (size // 3) + "[]]}"),
        "arguments of many names": calls_with(json.dumps({f"k{i}": [] for i in range(size // 18)})),
        "a tool": [{"type": "function", "function": {"name": text(size)}}],
        "a schema": [
            {"type": "function", "function": {"name": "f", "parameters": {"type": text(size)}}}
        ],
    }


def calls_with(arguments: str) -> list[dict[str, Any]]:
    """Messages with a tool call, and its result."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": "c", "content": "x"}
    user = {"role": "user", "content": "x"}
    return [user, {"role": "assistant", "tool_calls": [call]}, result, user]


def paths_of(model: type[BaseModel], before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the places of all fields of a body, those within its objects too."""
    for name, field in model.model_fields.items():
        path = (*before, field.alias or name)
        yield path
        kinds: list[Any] = [field.annotation]
        while kinds:
            kind = kinds.pop()
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from paths_of(kind, path)
                yield (*path, "")  # a key that is the value itself
            else:
                kinds += get_args(kind)


def body_with(route: str, path: tuple[str, ...], value: Any) -> bytes:
    """Return a body of a route with the value at a place; "" stands for the text as a name."""
    body = at = dict(ROUTES[route][1])
    for name in path[:-1]:
        at[name] = dict(at[name]) if isinstance(at.get(name), dict) else {}
        at = at[name]
    at[path[-1] or json.dumps(value)[:LARGE]] = 1 if path[-1] == "" else value
    return json.dumps(body).encode()


@pytest.fixture(scope="module")
def client(chat: Chat) -> Any:
    gc.collect()
    gc.freeze()  # as the server does, whose collections leave out what is loaded
    chat.engine.script = "Hi"
    yield guard(chat.client.app, max_body_bytes=5_000_000)
    gc.unfreeze()


def post(client: Any, route: str, body: bytes) -> tuple[Reply, float]:
    """Return the answer, and the processor seconds that this process spent on it.

    What other tests left in memory is not collected meanwhile.
    """
    gc.disable()
    try:
        start = time.process_time()
        reply = client("POST", route, headers=JSON, body=body)
        return reply, time.process_time() - start
    finally:
        gc.enable()


WIDE: list[tuple[str, tuple[str, ...], str]] = [
    *((route, ("",), "a name") for route in ROUTES),  # an unknown field
    *((route, ("model",), "a name") for route in ROUTES),
    (COMPLETIONS, ("prompt",), "a name"),
    (COMPLETIONS, ("prompt",), "objects"),
    (COMPLETIONS, ("stop",), "texts"),
    (COMPLETIONS, ("logit_bias",), "many keys"),
    (COMPLETIONS, ("logit_bias",), "a key"),
    (COMPLETIONS, ("structured_outputs",), "a key"),
    (COMPLETIONS, ("structured_outputs", "regex"), "numbers"),
    (COMPLETIONS, ("guided_json",), "many keys"),
    (COMPLETIONS, ("guided_choice",), "long texts"),
    (COMPLETIONS, ("speculation", ""), "a name"),
    (COMPLETIONS, ("speculation", "proposer"), "depth"),
    (COMPLETIONS, ("temperature",), "quotes"),
    (COMPLETIONS, ("max_tokens",), "long numbers"),
    (CHAT, ("messages",), "a message"),
    (CHAT, ("messages",), "a role"),
    (CHAT, ("messages",), "a kind of content"),
    (CHAT, ("messages",), "a kind of part"),
    (CHAT, ("messages",), "a part"),
    (CHAT, ("messages",), "lists"),
    (CHAT, ("messages",), "arguments"),
    (CHAT, ("messages",), "arguments of many names"),
    (CHAT, ("chat_template_kwargs",), "a key"),
    (CHAT, ("chat_template_kwargs",), "64 long values"),
    (CHAT, ("tools",), "a tool"),
    (CHAT, ("tools",), "a schema"),
    (CHAT, ("tool_choice",), "a type"),
    (CHAT, ("tool_choice",), "a key of a key"),
    (CHAT, ("response_format",), "a key"),
    (CHAT, ("reasoning_effort",), "wide characters"),
    (RESPONSES, ("input",), "a role"),
    (RESPONSES, ("input",), "an item"),
    (RESPONSES, ("input",), "a call"),
    (RESPONSES, ("text", "format", "schema"), "many keys"),
    (RESPONSES, ("truncation",), "control characters"),
    ("/tokenize", ("messages",), "a kind of part"),
    ("/tokenize", ("prompt",), "a name"),
    ("/detokenize", ("tokens",), "numbers"),
    ("/detokenize", ("tokens",), "long numbers"),
]


@pytest.fixture(scope="module")
def large() -> dict[str, Any]:
    return values(LARGE)


def test_a_large_refusal_costs_what_an_answer_costs(client: Any, large: dict[str, Any]) -> None:
    def accepted_s(kind: str) -> float:
        body = body_with(COMPLETIONS, ("metadata", "x"), large[kind])
        reply, seconds = post(client, COMPLETIONS, body)
        assert reply.status == 200, kind
        return seconds

    for route, path, kind in WIDE:
        body, times, answers = body_with(route, path, large[kind]), [], []
        is_cheap = False
        for _ in range(10):  # once where threads of other tests rest
            answers.append(accepted_s(kind))
            reply, seconds = post(client, route, body)
            assert 400 <= reply.status < 500, (route, path, kind)
            size = len(reply.body)
            assert size < MOST_SHOWN, (route, path, kind)
            assert reply.error["message"]
            times.append(seconds)
            # A machine that is busy all the while delays both.
            is_cheap = min(times) < MOST_TIMES * median(answers)
            if is_cheap:
                break
        assert is_cheap, (route, path, kind, times, answers)


PLACES = [(route, path) for route, (model, _) in ROUTES.items() for path in paths_of(model)]
SMALLER = values(60_000)


@given(st.sampled_from(PLACES), st.sampled_from(sorted(SMALLER)))
@settings(max_examples=250, deadline=None, database=None)
def test_no_error_shows_much(client: Any, place: tuple[str, tuple[str, ...]], kind: str) -> None:
    reply, _ = post(client, place[0], body_with(*place, SMALLER[kind]))
    status, size = reply.status, len(reply.body)
    assert status in (200, 400, 404)
    assert status == 200 or size < MOST_SHOWN


@pytest.mark.slow
@pytest.mark.parametrize("size", [1_000, 60_000])
def test_what_is_not_in_a_body(client: Any, size: int) -> None:
    long = text(size)
    for path, headers in (
        (f"/v1/{long}", {}),
        (f"/v1/models/{long}", {}),
        ("/v1/models", {"host": long}),
        ("/v1/models", {"host": "localhost", "origin": f"http://{long}.example"}),
        ("/v1/completions", {"content-type": long}),
        ("/v1/completions", {**JSON, "content-length": long}),
    ):
        reply = client("POST" if "completions" in path else "GET", path, headers=headers)
        status, size = reply.status, len(reply.body)
        assert 400 <= status < 500 and size < MOST_SHOWN, path[:20]


def test_long_names_are_compared_with_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert near_names("max_tokns", ["max_tokens", "n"]) == ["max_tokens"]
    monkeypatch.setattr(checks, "get_close_matches", lambda *_: pytest.fail("compared"))
    assert near_names(text(129), [text(128)]) == []
