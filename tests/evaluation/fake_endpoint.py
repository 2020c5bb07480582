"""A server with OpenAI's interface that answers from a script, in a thread of its own."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

# Steps of an answer: (text, tokens of the step).
STEPS = [("One", 1), (" two three", 2), (" four", 1), (" five six seven", 3)]
TEXT = "".join(text for text, _ in STEPS)
NUM_TOKENS = sum(count for _, count in STEPS)


@dataclass
class Script:
    """How the server behaves, and what it saw.

    Attributes:
        url: where it listens.
        models: what /v1/models lists; None answers 404, text is sent as it is.
        models_status: status of that answer.
        stream: events of every answer in place of STEPS: objects, text, bytes that are sent as they
            are, or pauses in seconds.
        status, content_type: of such an answer; with another type its events are its body.
        usage: "continuous" (if it is asked for), "last" (in an event of its own), "final" (in the
            last event with text) or "none".
        refuses: names of stream options that are answered with 400.
        streams: False answers whole.
        report: tells drafts as our server does.
        key: the only one that it takes.
        metrics: text of /metrics; None answers 404. With `counts` drafts are added to it.
        delay_s: before each step.
        holds: requests in flight for which the first answers wait.
        fails: (status, body) for requests whose prompt has "[fail]".
        dies_after: answers, in the middle of the next of which it goes away for good.
        answers: returns status, body and headers of an answer from the path and the body, in place
            of all of this but /metrics and the list of models; it may raise `Dead`.
    """

    url: str = ""
    models: Any = field(default_factory=lambda: [{"id": "m"}, {"id": "other"}])
    models_status: int = 200
    stream: list[Any] | None = None
    status: int = 200
    content_type: str = "text/event-stream"
    usage: str = "continuous"
    refuses: tuple[str, ...] = ()
    streams: bool = True
    report: bool = False
    key: str = ""
    metrics: str | None = None
    counts: bool = False
    delay_s: float = 0.0
    holds: int = 0
    fails: tuple[int, bytes] = (500, b'{"error": {"message": "planned"}}')
    dies_after: int | None = None
    keep_alive: bool = True
    answers: Callable[[str, dict[str, Any]], tuple[int, Any, dict[str, str]]] | None = None
    # What it saw.
    paths: list[str] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    num_connections: int = 0
    in_flight: int = 0
    most_in_flight: int = 0
    num_answers: int = 0
    dropped: threading.Event = field(default_factory=threading.Event)


class Dead(Exception):
    """The server goes away."""


@contextmanager
def endpoint(script: Script) -> Iterator[str]:
    """Serve within `with`; yields the URL."""
    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(_start(script))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        script.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield script.url
    finally:

        async def end() -> None:
            server.close()
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _start(script: Script) -> asyncio.Server:
    writers: list[asyncio.StreamWriter] = []
    server: asyncio.Server

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        script.num_connections += 1
        try:
            while True:
                await _answer(script, reader, writer)
                if not script.keep_alive:
                    return
        except Dead:
            server.close()
            for one in writers:
                one.transport.abort()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    return server


async def _answer(
    script: Script, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    raw = (await reader.readuntil(b"\r\n\r\n")).decode()
    first, *lines = raw.strip().split("\r\n")
    pairs = (line.partition(":") for line in lines)
    headers = {name.lower(): value.strip() for name, _, value in pairs}
    content = await reader.readexactly(int(headers.get("content-length", 0)))
    path = first.split()[1]
    script.paths.append(path)
    script.headers.append(headers)
    if script.key and headers.get("authorization") != f"Bearer {script.key}":
        _send(writer, 401, b'{"error": {"message": "no such key"}}')
    elif path == "/v1/models":
        listed = script.models
        if isinstance(listed, str):
            _send(writer, script.models_status, listed.encode())
        elif listed is None:
            _send(writer, 404, b"not here")
        else:
            _send(writer, script.models_status, json.dumps({"data": listed}).encode())
    elif path == "/metrics":
        text = script.metrics
        _send(writer, 404 if text is None else 200, (text or "").encode())
    elif script.answers is not None:
        status, body, more = script.answers(path, json.loads(content))
        _send(writer, status, json.dumps(body).encode(), more)
    elif path in ("/v1/completions", "/v1/chat/completions"):
        if script.stream is None:
            await _complete(script, json.loads(content), "chat" in path, writer)
        else:
            script.bodies.append(json.loads(content))
            await _play(script, script.stream, reader, writer)
    else:
        _send(writer, 404, b"not here")


async def _play(
    script: Script, stream: list[Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Answer with the script's events; a client that goes away during a pause is noticed."""
    head = f"HTTP/1.1 {script.status} X\r\nContent-Type: {script.content_type}\r\n"
    writer.write(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
    for event in stream:
        if isinstance(event, int | float):
            with suppress(TimeoutError):
                if await asyncio.wait_for(reader.read(1), event) == b"":
                    script.dropped.set()
                    raise ConnectionResetError
            continue
        if isinstance(event, bytes):
            raw = event
        else:
            data = event if isinstance(event, str) else json.dumps(event)
            is_stream = script.content_type == "text/event-stream"
            raw = (f"data: {data}\n\n" if is_stream else data).encode()
        writer.write(b"%x\r\n%b\r\n" % (len(raw), raw))
        await writer.drain()
    writer.write(b"0\r\n\r\n")


async def _complete(
    script: Script, body: dict[str, Any], is_chat: bool, writer: asyncio.StreamWriter
) -> None:
    script.bodies.append(body)
    prompt = json.dumps(body.get("prompt") or body.get("messages"))
    asked = body.get("stream_options") or {}
    if refused := [name for name in script.refuses if name in asked]:
        _send(writer, 400, json.dumps({"error": {"message": f"what is {refused[0]}?"}}).encode())
        return
    if "[fail]" in prompt:
        await asyncio.sleep(0.01)
        _send(writer, *script.fails)
        return
    script.in_flight += 1
    script.most_in_flight = max(script.most_in_flight, script.in_flight)
    while body["max_tokens"] > 1 and script.most_in_flight < script.holds:
        await asyncio.sleep(0.001)
    try:
        is_dying = script.dies_after is not None and script.num_answers >= script.dies_after
        if script.streams:
            await _stream(script, asked, is_chat, writer, is_dying)
        else:
            await asyncio.sleep(script.delay_s)
            _send(writer, 200, json.dumps(_whole(is_chat)).encode())
    finally:
        script.in_flight -= 1
    script.num_answers += 1
    if script.counts and body["max_tokens"] > 1:  # not the one that asks for the stream options
        script.metrics = metrics(script.num_answers - 1)


async def _stream(
    script: Script,
    asked: dict[str, Any],
    is_chat: bool,
    writer: asyncio.StreamWriter,
    is_dying: bool,
) -> None:
    writer.write(
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    number = 0
    async for event in _events(script, asked, is_chat):
        data = b"data: " + (event if isinstance(event, bytes) else json.dumps(event).encode())
        data += b"\n\n"
        writer.write(b"%x\r\n%b\r\n" % (len(data), data))
        await writer.drain()
        number += 1
        if is_dying and number == 2:
            raise Dead
    writer.write(b"0\r\n\r\n")


async def _events(
    script: Script, asked: dict[str, Any], is_chat: bool
) -> AsyncIterator[dict[str, Any] | bytes]:
    is_continuous = script.usage == "continuous" and asked.get("continuous_usage_stats")
    so_far = 0
    if is_chat:
        head: dict[str, Any] = {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
        yield head | ({"usage": usage(0)} if is_continuous else {})
    for number, (text, count) in enumerate(STEPS):
        await asyncio.sleep(script.delay_s)
        so_far += count
        is_last = number == len(STEPS) - 1
        part = {"delta": {"content": text}} if is_chat else {"text": text}
        event: dict[str, Any] = {
            "choices": [{"index": 0, **part, "finish_reason": "length" if is_last else None}]
        }
        if is_continuous or (is_last and script.usage == "final"):
            event["usage"] = usage(so_far)
        if script.report:
            tokens = [[text if i == 0 else "", i < count - 1] for i in range(count)]
            drafted = 0 if number == 0 else 4
            event["speculation"] = {
                "num_drafted": drafted,
                "num_accepted": count - 1,
                "tokens": tokens,
            }
        yield event
    if asked.get("include_usage") and script.usage in ("continuous", "last"):
        told = usage(so_far) | ({"speculation": SPECULATION} if script.report else {})
        yield {"choices": [], "usage": told}
    yield b"[DONE]"


SPECULATION = {
    "num_drafts": 3,
    "num_draft_tokens": 12,
    "num_accepted_tokens": 3,
    "num_accepted_tokens_per_pos": [2, 1, 0, 0],
}


def usage(count: int) -> dict[str, Any]:
    return {"prompt_tokens": 5, "completion_tokens": count, "total_tokens": 5 + count}


def _whole(is_chat: bool) -> dict[str, Any]:
    part = {"message": {"content": TEXT}} if is_chat else {"text": TEXT}
    choice = {"index": 0, "finish_reason": "length", **part}
    return {"choices": [choice], "usage": usage(NUM_TOKENS)}


def metrics(num_answers: int, model: str = "m", prefix: str = "vllm") -> str:
    """Counters after so many answers: of two engines, and of another model."""
    lines = ["# TYPE vllm:spec_decode_num_drafts counter", "python_gc_objects_collected_total 7.0"]
    for engine, share in ((0, 1), (1, 2)):
        labels = f'engine="{engine}",model_name="{model}"'
        counts = {"num_drafts": 3, "num_draft_tokens": 12, "num_accepted_tokens": 3}
        for name, each in counts.items():
            full = f"{prefix}:spec_decode_{name}"
            lines.append(f"{full}_total{{{labels}}} {share * each * num_answers}.0")
            lines.append(f"{full}_created{{{labels}}} 1.7e+09")
        for position, each in enumerate((2, 1, 0, 0)):
            full = f"{prefix}:spec_decode_num_accepted_tokens_per_pos_total"
            value = float(share * each * num_answers)
            lines.append(f'{full}{{{labels},position="{position}"}} {value}')
    tokens = NUM_TOKENS * num_answers
    lines.append(f'{prefix}:generation_tokens_total{{engine="0",model_name="{model}"}} {tokens}')
    lines.append(f'{prefix}:spec_decode_num_drafts_total{{model_name="an \\"other\\""}} 1e6')
    return "\n".join(lines) + "\n"


def _send(
    writer: asyncio.StreamWriter, status: int, body: bytes, more: Mapping[str, str] | None = None
) -> None:
    lines = [f"{name}: {value}\r\n" for name, value in (more or {}).items()]
    head = f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n{''.join(lines)}\r\n"
    with suppress(ConnectionError):
        writer.write(head.encode() + body)
