"""What one client can do to a server: a table of attacks, and the process that runs one of them.

    python attacks.py NAME --port 8000 --key KEY --seconds 60

The process says "begins" once its bodies are built. It attacks until the time is over and prints
what it was answered as a JSON object. It yields its processor to the server, since a client on
another machine would take none of it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import itertools
import json
import os
import resource
import socket
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from load import Answer, Client, fault_in, is_openai_error

SIZE = 4_000_000  # bytes of a large body: below the default of --max-body-bytes
NICENESS = 10
LEAD_S = 0.3  # for the streams to run when the attack begins
SILENT = 1100
SERIAL = b"31415926"  # in a body that must differ from request to request
LETTER = b"27182818"  # in a body, where the token id of "a" belongs
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


# ---- the client that attacks ----


@dataclass
class Attacker:
    """One attacking client: where it sends, until when, and what it was answered.

    Attributes:
        port: of the server on this machine.
        key: for it.
        letter: the token id of "a".
        end_s: when the attack is over (perf_counter).
        statuses: answers by the label of their request and their status, 0 for no answer.
        slowest_s: the longest time to an answer by label.
        said: the first error by label.
        bad: answers that a server must not give.
    """

    port: int
    key: str
    letter: bytes = b""
    end_s: float = 0.0
    statuses: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    slowest_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    said: dict[str, str] = field(default_factory=dict)
    bad: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.client = Client(self.port, key=self.key)

    @property
    def is_on(self) -> bool:
        return time.perf_counter() < self.end_s

    def add(self, label: str, answer: Answer) -> None:
        """Count an answer."""
        self.statuses[label][str(answer.status)] += 1
        self.slowest_s[label] = max(self.slowest_s[label], answer.seconds)
        if answer.error is not None:
            self.said.setdefault(label, str(answer.error.get("message"))[:200])
        if fault := fault_of(answer):
            self.bad.append(f"{label}: {fault}")

    async def connect(self, receive_buffer: int = 0) -> socket.socket:
        """A connection, with as little room for answers as told."""
        sock = socket.socket()
        if receive_buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(sock, (self.client.host, self.port))
        except BaseException:
            sock.close()
            raise
        return sock

    def head(self, length: int, path: str = COMPLETIONS) -> bytes:
        """The head of a request with a body of so many bytes."""
        return (
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {self.key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
        ).encode()


def fault_of(answer: Answer) -> str:
    """What is wrong with an answer to an attack; "" if nothing is."""
    # 503 with a time to come back and 504 for a request that took too long are documented.
    if answer.status == 504 or (answer.status == 503 and "retry-after" in answer.headers):
        return "" if is_openai_error(answer.body) else "another form of error"
    return fault_in(answer)


Run = Callable[[Attacker], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Attack:
    """An attack.

    Attributes:
        what: it is, in a phrase.
        make: builds it.
        fills_queue: it asks for work that is allowed, as much as the queue takes: the remedy is a
            limit of each key, and the wait for a first token is told, not bounded.
    """

    what: str
    make: Callable[[], Run]
    fills_queue: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """A body that is sent again and again."""

    label: str
    path: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()
    drop_after_s: float | None = None


def storm(requests: list[Request], clients: int = 1) -> Run:
    """Send these requests in turn, over so many connections at once, without a pause."""

    async def run(attacker: Attacker) -> None:
        number = count()

        async def client() -> None:
            while attacker.is_on:
                serial = next(number)
                one = requests[serial % len(requests)]
                body = one.body
                if len(body) < SIZE // 2:
                    body = body.replace(SERIAL, b"%08d" % serial)
                    body = body.replace(LETTER, attacker.letter)
                try:
                    answer = await attacker.client.send(
                        "POST", one.path, body, dict(one.headers), drop_after_s=one.drop_after_s
                    )
                except asyncio.CancelledError:  # the time is over
                    attacker.statuses[one.label]["unfinished"] += 1
                    raise
                if answer.problem == "refused":
                    await asyncio.sleep(0.01)
                if answer.problem != "dropped":
                    attacker.add(one.label, answer)

        await asyncio.gather(*(client() for _ in range(clients)))

    return run


# ---- bodies ----


def request(label: str, path: str = COMPLETIONS, **fields: Any) -> Request:
    """A request of an object; a completion of a few tokens unless `fields` say otherwise."""
    given = {"prompt": "x", "max_tokens": 4} if path == COMPLETIONS else {}
    return Request(label, path, json.dumps({**given, **fields}, separators=(",", ":")).encode())


def chat(label: str, **fields: Any) -> Request:
    messages = [{"role": "user", "content": "x"}]
    return request(label, CHAT, **{"messages": messages, "max_tokens": 4, **fields})


def filled(item: Any) -> list[Any]:
    """As many copies of a value as fit a large body."""
    return [item] * (SIZE // (len(json.dumps(item)) + 1) - 100)


@functools.cache
def words(size: int = SIZE - 1000) -> str:
    """Text of so many characters with words that differ."""
    return "".join(f"w{number} " for number in range(size // 4))[:size]


def refused() -> Run:
    """4 MB that are refused by their type: what the bytes alone cost."""
    headers = (("Content-Type", "text/plain"),)
    return storm([Request("415", COMPLETIONS, b" " * SIZE, headers)])


def numbers() -> Run:
    return storm([request("bad_words", bad_words=filled(1))])


def strings() -> Run:
    return storm(
        [
            request("bad_words, one", bad_words=[words()]),
            request("bad_words, many", bad_words=words(SIZE // 2).split()),
            request("stop, one", stop=words()),
            request("stop, many", stop=words(SIZE // 2).split()),
            request("stop, empty", stop=filled("")),
            request("guided_choice", guided_choice=words(SIZE // 2).split()),
            request("cache_salt", cache_salt=words()),
            request("model", model=words()),
        ]
    )


def ids() -> Run:
    return storm(
        [
            request("logit_bias", logit_bias={str(token): 1 for token in range(SIZE // 12)}),
            request("logit_bias, long", logit_bias={"1" * (SIZE - 1000): 1}),
            request("allowed_token_ids", allowed_token_ids=filled(7)),
            request("stop_token_ids", stop_token_ids=filled(1)),
        ]
    )


def tokenize() -> Run:
    return storm(
        [
            request("words", "/tokenize", prompt=words()),
            request("a letter", "/tokenize", prompt="a" * (SIZE - 1000)),
            request("with texts", "/tokenize", prompt=words(), return_token_strs=True),
            request("detokenize", "/detokenize", tokens=filled(5)),
        ]
    )


def prompts() -> Run:
    return storm(
        [
            request("text", prompt=words()),
            request("token ids", prompt=filled(5)),
            request("256 texts", prompt=[words(SIZE // 260)] * 256),
            request("256 lists", prompt=[[5] * (SIZE // 520)] * 256),
            chat("message", messages=[{"role": "user", "content": words()}]),
            request("input", "/v1/responses", input=words()),
        ],
        clients=6,
    )


def messages() -> Run:
    message = {"role": "user", "content": "x"}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    part = {"type": "text", "text": "x"}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    parts = [{"role": "user", "content": filled(part)}]
    calls = [{"role": "assistant", "content": "x", "tool_calls": filled(call)}]
    return storm(
        [
            chat("messages", messages=filled(message)),
            chat("empty messages", messages=filled({})),
            chat("tools", tools=filled(tool)),
            chat("forced tools", tools=filled(tool), tool_choice="required"),
            chat("parts", messages=parts),
            chat("calls", messages=calls),
            request("items", "/v1/responses", input=filled(message)),
            request("messages to tokenize", "/tokenize", messages=filled(message)),
        ]
    )


def long_field_name() -> Run:
    """Names near a known one, and far from all."""
    near, far = "max_tokens" * (SIZE // 10 - 100), words()
    return storm(
        [
            request("near", **{near: 1}),
            request("far", **{far: 1}),
            chat("in a message", messages=[{"role": "user", "content": "x", far: 1}]),
            request("to tokenize", "/tokenize", prompt="x", **{near: 1}),
        ]
    )


def nesting() -> Run:
    """Arrays and objects as deep as a large body lets them be."""

    def deep(label: str, path: str, start: bytes, left: bytes, right: bytes, end: bytes) -> Request:
        depth = (SIZE - 1000) // len(left + right)
        return Request(label, path, start + left * depth + b"1" + right * depth + end)

    prompt = b'{"prompt":"x","max_tokens":4,'
    user = b'{"messages":[{"role":"user","content":"x"}],"max_tokens":4,'
    schema = prompt + b'"response_format":{"type":"json_schema","json_schema":{"schema":'
    return storm(
        [
            deep("metadata", COMPLETIONS, prompt + b'"metadata":{"a":', b"[", b"]", b"}}"),
            deep("schema", COMPLETIONS, schema, b'{"not":', b"}", b"}}}"),
            deep("prompt", COMPLETIONS, b'{"prompt":', b"[", b"]", b"}"),
            deep("kwargs", CHAT, user + b'"chat_template_kwargs":{"a":', b'{"a":', b"}", b"}}"),
            deep("unknown", CHAT, user + b'"unknown":', b'{"a":', b"}", b"}"),
            deep("content", CHAT, b'{"messages":[{"role":"user","content":', b"[", b"]", b"}]}"),
        ]
    )


# ---- grammars ----

# A grammar that may stop at once would do so: the letter a is the likeliest token.
ENDLESS = {"max_tokens": 300, "stream": True, "logit_bias": {LETTER.decode(): 100}}


def grammar(label: str, source: str) -> Request:
    shape = {"type": "grammar", "grammar": f"{source}\n# {SERIAL.decode()}"}
    return request(label, **ENDLESS, response_format=shape)


def regex(label: str, pattern: str) -> Request:
    return request(label, **ENDLESS, response_format={"type": "regex", "pattern": pattern})


def schema(label: str, value: Any) -> Request:
    named = {"name": "a", "schema": {**value, "description": SERIAL.decode()}}
    return request(label, **ENDLESS, response_format={"type": "json_schema", "json_schema": named})


def ambiguous() -> Run:
    return storm(
        [
            grammar("three ways", 'root ::= s\ns ::= s s | s s s | "a" | ""'),
            grammar("two ways", 'root ::= s\ns ::= s s | "a"'),
            grammar("left and right", 'root ::= s\ns ::= s "a" s | "a" s | s "a" | ""'),
            grammar("optional parts", "root ::= " + '"a"? ' * 2000 + '\nother ::= "b"'),
        ],
        clients=3,
    )


def repeats() -> Run:
    inner: dict[str, Any] = {"type": "string", "maxLength": 1000}
    for _ in range(4):
        inner = {"type": "array", "items": inner, "minItems": 1, "maxItems": 1000}
    return storm(
        [
            grammar("grammar", "root ::= " + "(" * 6 + '"a"' + "){0,50}" * 6),
            grammar("grammar of stars", "root ::= " + "(" * 12 + '"a"' + ")*" * 12),
            grammar("grammar, one", 'root ::= ("a"{0,9999} "a"{0,9999}){0,9999}'),
            regex("regex", "(" * 6 + "a" + "){0,50}" * 6),
            regex("regex of stars", "(" * 12 + "a" + ")*" * 12),
            regex("regex in a row", "a{0,60}" * 16),
            schema("schema", inner),
            schema("pattern", {"type": "string", "pattern": "^(a|aa|aaa)+$"}),
            schema("lengths", {"type": "array", "items": {}, "minItems": 9999}),
        ],
        clients=3,
    )


def schemas() -> Run:
    """Sources of about 64 kB, the most that the server takes."""
    leaf = {"type": "string", "pattern": "^[a-z0-9]{3,40}$"}
    wide = {f"property_{number}": leaf for number in range(700)}
    number = {"type": "integer", "minimum": -(10**15), "maximum": 10**17 + 7, "multipleOf": 7}
    date = {"type": "string", "format": "date-time"}
    tree: dict[str, Any] = {"type": "string"}
    for _ in range(6):
        tree = {"type": "object", "properties": {"a": tree, "b": tree, "c": tree}}
    return storm(
        [
            schema("properties", {"type": "object", "properties": wide}),
            schema("required", {"type": "object", "properties": wide, "required": list(wide)}),
            schema("numbers", {"anyOf": [number] * 600}),
            schema("dates", {"anyOf": [date] * 900}),
            schema("enum", {"enum": [f"value {number}" for number in range(3500)]}),
            schema("tree", tree),
            schema("all of", {"allOf": [{"properties": {f"p{i}": leaf}} for i in range(700)]}),
            grammar("rules", _rules(1500)),
            regex("choices", "|".join(f"word{number}" for number in range(6000))),
        ],
        clients=3,
    )


def _rules(number: int) -> str:
    lines = [f'r{i} ::= "a" r{(7 * i + 1) % number} | r{(3 * i + 2) % number} "b" | ""'
             for i in range(number)]  # fmt: skip
    return "\n".join(["root ::= r0", *lines])


def regex_counts() -> Run:
    shapes = [".{1,900}", ".{1,129}", "[a-z]{200,900}", "(ab?){1,500}"]
    return storm(
        [
            request(pattern, max_tokens=100, response_format={"type": "regex", "pattern": pattern})
            for pattern in shapes
        ]
    )


# ---- much work ----


def outputs() -> Run:
    stops = [f"no such text {number}" for number in range(64)]
    return storm(
        [
            request("n and stops", n=64, stop=stops, max_tokens=64, temperature=1, stream=True),
            request("logprobs", n=16, logprobs=20, max_tokens=64, temperature=1, stream=True),
            request("prompt_logprobs", prompt=words(1000), prompt_logprobs=20, max_tokens=1),
            request("prompts", prompt=["def f():"] * 256, max_tokens=16),
        ]
    )


def many_logprobs() -> Run:
    asked = {"n": 64, "logprobs": 20, "prompt_logprobs": 20, "temperature": 1, "max_tokens": 100}
    return storm([request("n and logprobs", prompt=words(1000), **asked)])


def leavers() -> Run:
    """Requests that are given up as soon as they run."""
    work = {"n": 8, "max_tokens": 500, "ignore_eos": True, "stream": True}
    body = request("left", **work).body
    large = request("left", prompt=words()).body
    return storm(
        [
            Request("left", COMPLETIONS, body, drop_after_s=0.05),
            Request("left while large", COMPLETIONS, large, drop_after_s=0.05),
        ],
        clients=4,
    )


def malformed() -> Run:
    """Small bodies that are hard to read, many at a time."""
    digits = b"9" * 4300
    deep = b"[" * 50_000
    return storm(
        [
            Request("digits", COMPLETIONS, b'{"prompt":"x","max_tokens":' + digits + b"}"),
            Request("digits of a seed", COMPLETIONS, b'{"prompt":"x","seed":-' + digits + b"}"),
            Request("surrogates", COMPLETIONS, b'{"prompt":"\xed\xa0\x80"}'),
            Request("surrogates to tokenize", "/tokenize", b'{"prompt":"\xed\xa0\x80"}'),
            Request("escaped surrogates", COMPLETIONS, b'{"prompt":"\\ud800","max_tokens":1}'),
            Request("surrogate as a stop", COMPLETIONS, b'{"prompt":"x","stop":"\\udfff"}'),
            Request("deep", COMPLETIONS, deep),
            Request("deep object", CHAT, b'{"messages":' + deep),
            Request("not a number", COMPLETIONS, b'{"prompt":"x","temperature":NaN}'),
            Request("huge number", COMPLETIONS, b'{"prompt":"x","top_p":1e999}'),
        ],
        clients=8,
    )


def template() -> Run:
    """A chat template that never ends when a keyword of the request says so."""
    return storm([chat("spin", chat_template_kwargs={"spin": True})])


def polling() -> Run:
    """The small routes, as fast as they answer."""

    async def run(attacker: Attacker) -> None:
        async def client(path: str) -> None:
            while attacker.is_on:
                attacker.add(path, await attacker.client.get(path))

        await asyncio.gather(*map(client, ("/metrics", "/openapi.json", "/v1/models", "/")))

    return lambda attacker: run(attacker)


# ---- connections ----

Talk = Callable[[Attacker, socket.socket], Awaitable[str]]


def connections(number: int, talk: Talk, receive_buffer: int = 0) -> Run:
    """Keep so many connections open; `talk` uses one and says how it ended, then it is renewed."""

    async def run(attacker: Attacker) -> None:
        async def keep() -> None:
            while attacker.is_on:
                ended = "open to the end"
                try:
                    with await attacker.connect(receive_buffer) as sock:
                        ended = await talk(attacker, sock)
                except OSError as error:
                    ended = type(error).__name__
                    await asyncio.sleep(0.1)
                finally:
                    attacker.statuses["connections"][ended] += 1

        await asyncio.gather(*(keep() for _ in range(number)))

    return run


async def say_nothing(attacker: Attacker, sock: socket.socket) -> str:
    return await _answer_on(sock)


async def _answer_on(sock: socket.socket) -> str:
    """The status of what is answered, "closed" if nothing is."""
    answer = await asyncio.get_running_loop().sock_recv(sock, 4096)
    return answer.split(b" ", 2)[1].decode() if answer.startswith(b"HTTP/1.") else "closed"


def trickling(start: bytes, part: bytes, pause_s: float) -> Talk:
    """Send `start` with the client's key, then a part at a time for as long as it is taken."""

    async def talk(attacker: Attacker, sock: socket.socket) -> str:
        loop = asyncio.get_running_loop()
        answering = asyncio.ensure_future(_answer_on(sock))
        try:
            await loop.sock_sendall(sock, start or attacker.head(SIZE))
            while not answering.done() and attacker.is_on:
                await loop.sock_sendall(sock, part)
                await asyncio.sleep(pause_s)
            return answering.result() if answering.done() else "open to the end"
        finally:
            answering.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await answering

    return talk


def pipelining(sizes: tuple[int, ...]) -> Talk:
    """Ask probes without a key and read no answer, so many at a time; connections take turns."""
    turns = itertools.cycle(sizes)

    async def talk(attacker: Attacker, sock: socket.socket) -> str:
        requests = PROBE * next(turns)
        while attacker.is_on:
            await asyncio.get_running_loop().sock_sendall(sock, requests)
            await asyncio.sleep(0.1)
        return "open to the end"

    return talk


def reading_slowly(start: bytes) -> Talk:
    """Send requests, the client's long stream if there are none, and read a byte a second."""

    async def talk(attacker: Attacker, sock: socket.socket) -> str:
        loop = asyncio.get_running_loop()
        body = request("slow", max_tokens=1500, ignore_eos=True, stream=True).body
        await loop.sock_sendall(sock, start or attacker.head(len(body)) + body)
        while attacker.is_on:
            if not await loop.sock_recv(sock, 1):
                return "closed"
            await asyncio.sleep(1.0)
        return "open to the end"

    return talk


async def read_nothing(attacker: Attacker, sock: socket.socket) -> str:
    """Ask for a long stream and never read a byte of it."""
    body = request("unread", max_tokens=1500, ignore_eos=True, stream=True).body
    await asyncio.get_running_loop().sock_sendall(sock, attacker.head(len(body)) + body)
    while attacker.is_on:
        await asyncio.sleep(0.1)
    return "open to the end"


def slow_reader() -> Run:
    """Many probes read slowly without a key, and two long streams with one."""
    probes = connections(150, reading_slowly(PROBE * 8), 2048)
    streams = connections(2, reading_slowly(b""), 2048)

    async def run(attacker: Attacker) -> None:
        await asyncio.gather(probes(attacker), streams(attacker))

    return run


def chunk_extensions() -> Run:
    """Bodies without a key that never end: chunks of a byte, with extensions and without."""
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n"
    )
    parts = [b"1\r\n \r\n" * 2000, b"1;%b\r\n \r\n" % (b"x" * 8000), b"1;" + b"x" * 8000]
    runs = [connections(30, trickling(head, part, 0.01)) for part in parts]

    async def run(attacker: Attacker) -> None:
        await asyncio.gather(*(one(attacker) for one in runs))

    return run


HEAD = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
PROBE = HEAD + b"\r\n"
ATTACKS = {
    "refused": Attack("4 MB that are refused by their type: the cost of the bytes", refused),
    "numbers": Attack("4 MB of numbers in bad_words", numbers),
    "strings": Attack("4 MB in bad_words, stop, choices and names: one string, or many", strings),
    "ids": Attack("4 MB of token ids and biases", ids),
    "tokenize": Attack("4 MB to /tokenize and /detokenize", tokenize),
    "prompts": Attack("six prompts of 4 MB at once", prompts),
    "messages": Attack("a hundred thousand messages, tools, parts and calls", messages),
    "nesting": Attack("4 MB of brackets", nesting),
    "ambiguous": Attack("grammars with very many derivations of one text", ambiguous),
    "repeats": Attack("nested repeats in grammars, regexes and schemas", repeats),
    "schemas": Attack("schemas and grammars of the largest size", schemas),
    "outputs": Attack(
        "n = 64 with 64 stops, log-probabilities, 256 prompts", outputs, fills_queue=True
    ),
    "leavers": Attack("requests that are given up as soon as they run", leavers),
    "malformed": Attack("4,300 digits, raw surrogates, deep brackets, eight at a time", malformed),
    "polling": Attack("the small routes as fast as they answer", polling),
    "silent": Attack(
        f"{SILENT} connections without a key that say nothing",
        lambda: connections(SILENT, say_nothing),
    ),
    "headers": Attack(
        "200 connections without a key that send a header a second",
        lambda: connections(200, trickling(HEAD, b"X-A: b\r\n", 1.0)),
    ),
    "endless": Attack(
        "4 connections without a key whose headers never end",
        lambda: connections(4, trickling(HEAD, b"X-A: b\r\n" * 1000, 0.0)),
    ),
    "trickle": Attack(
        "200 bodies of 4 MB that come a byte a second",
        lambda: connections(200, trickling(b"", b" ", 1.0)),
    ),
    "unread": Attack(
        "2 long streams that are never read", lambda: connections(2, read_nothing, 2048)
    ),
    "unread_health": Attack(
        "200 connections without a key that pipeline probes and read no answer",
        lambda: connections(200, pipelining((100, 8, 1))),
    ),
    "slow_reader": Attack("152 connections that read a byte a second", slow_reader),
    "half_heads": Attack(
        "200 connections without a key that send half a head",
        lambda: connections(200, trickling(HEAD, b"", 0.1)),
    ),
    "chunk_extensions": Attack(
        "90 bodies without a key in chunks of a byte, with extensions", chunk_extensions
    ),
    "regex_counts": Attack("a regex with a large count", regex_counts),
    "long_field_name": Attack("names of unknown fields of 4 MB", long_field_name),
    "many_logprobs": Attack(
        "n = 64 with 20 log-probabilities of outputs and prompts", many_logprobs, fills_queue=True
    ),
    "template": Attack("a chat template that never ends", template),
}


# ---- the process ----


def _allow_files(wanted: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))


async def _attack(attacker: Attacker, run: Run, seconds: float) -> None:
    body = {"prompt": "a", "add_special_tokens": False}
    answer = await attacker.client.send("POST", "/tokenize", body)
    attacker.letter = str(answer.json["tokens"][0]).encode()
    print("begins", flush=True)
    await asyncio.sleep(LEAD_S)
    attacker.end_s = time.perf_counter() + seconds
    # What is still on its way then is given up, as by a client that leaves.
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(run(attacker), seconds)


def _report(attacker: Attacker) -> Iterator[tuple[str, Any]]:
    yield "answers", {label: dict(counts) for label, counts in attacker.statuses.items()}
    yield "slowest_s", {label: round(value, 2) for label, value in attacker.slowest_s.items()}
    yield "said", attacker.said
    yield "num_bad", len(attacker.bad)
    yield "bad", list(dict.fromkeys(attacker.bad))[:10]


def main() -> None:
    """Run an attack; its report goes to standard output."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=ATTACKS)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--key", required=True)
    parser.add_argument("--seconds", type=float, required=True)
    args = parser.parse_args()
    _allow_files(2 * SILENT)
    attacker = Attacker(args.port, args.key)
    run = ATTACKS[args.name].make()
    os.nice(NICENESS)
    asyncio.run(_attack(attacker, run, args.seconds))
    print(json.dumps(dict(_report(attacker))), flush=True)


if __name__ == "__main__":
    sys.exit(main())
