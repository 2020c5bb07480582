"""Valid bodies of all POST routes, and seeded ways to break them."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

HEADERS = {"Content-Type": "application/json"}
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "def f():"}]
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object"}},
}
SAMPLING = {
    "max_tokens": 3,
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.05,
    "n": 2,
    "seed": 1,
    "stop": ["\n\n"],
    "logit_bias": {"5": -1},
    "presence_penalty": 0.5,
    "stop_token_ids": [3],
}
VALID: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/completions", {"prompt": "def f():", "max_tokens": 3}),
    ("/v1/completions", {"prompt": ["a = 1", "b"], **SAMPLING, "stream": True}),
    ("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 2, "logprobs": 2, "echo": True}),
    (
        "/v1/completions",
        {
            "prompt": "def f():",
            "max_tokens": 4,
            "stream": True,
            "stream_options": {"include_usage": True},
            "speculation": {"proposer": "peagle", "num_speculative_tokens": 3, "report": True},
        },
    ),
    ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 3}),
    ("/v1/chat/completions", {"messages": CHAT, **SAMPLING, "stream": True}),
    (
        "/v1/chat/completions",
        {
            "messages": CHAT,
            "max_tokens": 4,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": SCHEMA, "strict": True},
            },
        },
    ),
    (
        "/v1/chat/completions",
        {"messages": CHAT, "max_tokens": 3, "logprobs": True, "top_logprobs": 2},
    ),
    ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 3, "tools": [TOOL]}),
    (
        "/v1/completions",
        {"prompt": "x", "max_tokens": 4, "response_format": {"type": "regex", "pattern": "[ab]+"}},
    ),
    ("/v1/completions", {"prompt": "x", "structured_outputs": {"choice": ["a", "b"]}}),
    ("/v1/responses", {"input": CHAT, "max_output_tokens": 3}),
    (
        "/v1/responses",
        {
            "input": [
                CHAT[1],
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "1"},
            ],
            "tools": [{"type": "function", **TOOL["function"]}],
            "max_output_tokens": 3,
        },
    ),
    ("/invocations", {"messages": CHAT, "max_tokens": 2}),
    ("/invocations", {"prompt": "def f():", "max_tokens": 2, "stream": True}),
    ("/tokenize", {"prompt": "def f():", "add_special_tokens": True}),
    ("/tokenize", {"messages": CHAT}),
    ("/detokenize", {"tokens": [5, 6, 7]}),
)

ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 1.5, -0.0, 1e-320, 10**9, 2**31, 2**63, 2**64, 10**400,
    -(10**30), float("nan"), float("inf"), float("-inf"), "", " ", "0", "1", "nan", "null",
    "x" * 5000,
    "\x00", "\u2028", "\U0001f600", "e\u0301", "\ud800", "\udc00\ud800", "\ufffe", "\u202e",
    "<|endoftext|>", "<think>", "{{ 7 * 7 }}", "../../etc/passwd", "(a+)+$", "[", "root ::= root",
    [], {}, [[]], [None], [0], [-1], [10**12], ["\ud800"], [{}], {"": None}, {"type": "x"},
    {"type": "text", "text": "\ud800"}, {"type": "image_url", "image_url": {"url": "http://x"}},
    [{"role": "user", "content": None}], [{"role": "user"}], [{"role": "\ud800", "content": "x"}],
    [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
)  # fmt: skip
NAMES = ("prompt", "messages", "max_tokens", "n", "best_of", "suffix", "stream", "model", "stop",
         "logprobs", "top_logprobs", "echo", "tools", "tool_choice", "guided_json", "priority",
         "cache_salt", "response_format", "chat_template", "chat_template_kwargs", "user",
         "prompt_logprobs", "ignore_eos", "min_tokens", "allowed_token_ids", "bad_words",
         "repetition_penalty", "typical_p", "__proto__", "\ud800", "", "stream_options",
         "continue_final_message", "add_generation_prompt", "speculation")  # fmt: skip
TYPES = ("", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x",
         "application/json; charset=utf-16", "application/jsonx", "application/json;;;",
         "*/*", "application/cbor")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """A request: its number among those of a seed, where it goes, and how it was broken."""

    number: int
    path: str
    body: bytes
    headers: dict[str, str]
    mutation: str


def make_case(seed: int, number: int) -> Case:
    """The case of this number: the same for the same seed, whatever else is sent."""
    source = random.Random(f"{seed}/{number}")
    path, valid = source.choice(VALID)
    name, mutate = source.choice(MUTATIONS)
    raw, headers = mutate(copy.deepcopy(valid), source)
    return Case(number, path, raw, headers, name)


Broken = tuple[bytes, dict[str, str]]


def _dump(body: Any) -> bytes:
    """JSON text; lone surrogates go as escapes, NaN and infinities as Python writes them."""
    return json.dumps(body).encode()


def _places(body: Any) -> list[tuple[Any, Any]]:
    """(container, key) of every value in a body."""
    found = []
    items = body.items() if isinstance(body, dict) else enumerate(body)
    for key, value in items:
        found.append((body, key))
        if isinstance(value, dict | list):
            found += _places(value)
    return found


def _structural(change: Callable[[dict[str, Any], random.Random], None]) -> Any:
    """A mutation of the object; one to three times."""

    def mutate(body: dict[str, Any], source: random.Random) -> Broken:
        for _ in range(source.choice((1, 1, 2, 3))):
            change(body, source)
        return _dump(body), HEADERS

    return mutate


def _value(body: dict[str, Any], source: random.Random) -> None:
    if places := _places(body):
        container, key = source.choice(places)
        container[key] = copy.deepcopy(source.choice(ODD))


def _drop(body: dict[str, Any], source: random.Random) -> None:
    if places := _places(body):
        container, key = source.choice(places)
        del container[key]


def _add(body: dict[str, Any], source: random.Random) -> None:
    body[source.choice(NAMES)] = copy.deepcopy(source.choice(ODD))


def _rename(body: dict[str, Any], source: random.Random) -> None:
    keyed = [(container, key) for container, key in _places(body) if isinstance(container, dict)]
    if keyed:
        container, key = source.choice(keyed)
        container[source.choice((*NAMES, f"{key}s", key.upper()))] = container.pop(key)


def _swap(body: dict[str, Any], source: random.Random) -> None:
    """A value of another type that says the same."""
    if places := _places(body):
        container, key = source.choice(places)
        value = container[key]
        container[key] = source.choice((str(value), [value], {"value": value}, repr(value)))


def _nest(body: dict[str, Any], source: random.Random) -> Broken:
    depth = source.choice((50, 500, 5_000, 100_000))
    left, right = source.choice((("[", "]"), ('{"a":', "}")))
    deep = f"{left * depth}1{right * depth if source.random() < 0.7 else ''}"
    key = source.choice([*body, "metadata", "chat_template_kwargs", "response_format"])
    rest = {k: v for k, v in body.items() if k != key}
    return (json.dumps(rest)[:-1] + f', "{key}": {deep}}}').encode(), HEADERS


def _bytes(body: dict[str, Any], source: random.Random) -> Broken:
    """Some bytes changed, put in or taken out; they need not be UTF-8 any more."""
    raw = bytearray(_dump(body))
    for _ in range(source.randint(1, 4)):
        at = source.randrange(len(raw))
        kind = source.randrange(3)
        if kind == 0:
            raw[at] = source.randrange(256)
        elif kind == 1:
            raw[at:at] = source.randbytes(source.randint(1, 4))
        else:
            del raw[at]
    return bytes(raw), HEADERS


def _cut(body: dict[str, Any], source: random.Random) -> Broken:
    raw = _dump(body)
    return raw[: source.randrange(len(raw))], HEADERS


def _whole(body: dict[str, Any], source: random.Random) -> Broken:
    """No object at all, or one in another coat."""
    raw = _dump(body)
    coats = (b"", b" ", b"null", b"[]", b"{}", b'"x"', b"1", b"NaN", b"{" * 1000, raw * 2)
    coats += (b"[" + raw + b"]", b"\xef\xbb\xbf" + raw, raw.decode().encode("utf-16"))
    coats += (raw[:-1] + b"," + raw[1:], b"\x00" * 64, raw + b"\x00", raw.replace(b'"', b"'"))
    return source.choice(coats), HEADERS


def _type(body: dict[str, Any], source: random.Random) -> Broken:
    return _dump(body), {"Content-Type": source.choice(TYPES)}


def _untouched(body: dict[str, Any], source: random.Random) -> Broken:
    return _dump(body), HEADERS


MUTATIONS: tuple[tuple[str, Callable[[dict[str, Any], random.Random], Broken]], ...] = (
    ("value", _structural(_value)),
    ("value", _structural(_value)),
    ("drop", _structural(_drop)),
    ("add", _structural(_add)),
    ("rename", _structural(_rename)),
    ("swap", _structural(_swap)),
    ("nest", _nest),
    ("bytes", _bytes),
    ("cut", _cut),
    ("whole", _whole),
    ("type", _type),
    ("untouched", _untouched),
)
