"""A lean HTTP client for load tests: asyncio, one connection a request, no package beside.

Chunks of a stream are kept as they come, with their times; JSON is read when somebody asks, after
the clock has stopped.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
DONE = b"[DONE]"


@dataclass(slots=True)
class Answer:
    """What came of a request.

    Attributes:
        status: of HTTP; 0 if there was no answer.
        headers: names in lower case.
        body: unless it was a stream of events.
        events: data of a stream's events, and when each came (perf_counter).
        sent_s, ended_s: when the request went out, when the last byte or the end came.
        problem: "" for an answer that is whole; else "refused" (no connection), "unanswered",
            "cut" (in the middle), "timeout", or "dropped" (by this client, as it was told).
    """

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    events: list[tuple[float, bytes]] = field(default_factory=list)
    sent_s: float = 0.0
    ended_s: float = 0.0
    problem: str = ""

    @property
    def chunks(self) -> list[dict[str, Any]]:
        """The events, read."""
        return [json.loads(data) for _, data in self.events if data != DONE]

    @property
    def json(self) -> Any:
        """The body, read.

        Raises:
            ValueError: it is no JSON.
        """
        return json.loads(self.body)

    @property
    def text(self) -> str:
        """Of the first choice of a completion, streamed or not."""
        parts = self.chunks if self.events else [self.json]
        choices = (choice for part in parts for choice in part.get("choices", ())[:1])
        return "".join(choice.get("text") or "" for choice in choices)

    @property
    def finish_reason(self) -> str | None:
        """Of the first choice."""
        found = None
        for part in self.chunks if self.events else [self.json]:
            for choice in part.get("choices", ())[:1]:
                found = choice.get("finish_reason") or found
        return found

    @property
    def usage(self) -> dict[str, Any]:
        """Tokens, as the body or the last chunk has them; {} where there are none."""
        return self._last.get("usage") or {}

    @property
    def error(self) -> dict[str, Any] | None:
        """The error of the body or of the last event, None if there is none."""
        return self._last.get("error")

    @property
    def _last(self) -> dict[str, Any]:
        """The body or the last chunk; {} for what is no JSON object."""
        try:
            last = self.chunks[-1] if self.events else self.json
        except (ValueError, IndexError):
            return {}
        return last if isinstance(last, dict) else {}

    @property
    def is_complete(self) -> bool:
        """A whole answer of status 200 that ends as it should."""
        ended = not self.events or self.events[-1][1] == DONE
        return self.status == 200 and not self.problem and ended and self.error is None

    @property
    def first_token_s(self) -> float:
        """Seconds to the first event."""
        return self.events[0][0] - self.sent_s

    @property
    def seconds(self) -> float:
        """From the request to the end."""
        return self.ended_s - self.sent_s


class _Exchange(asyncio.Protocol):
    """One request and its answer."""

    def __init__(self, request: bytes, done: asyncio.Future[None]) -> None:
        self.answer = Answer()
        self.transport: asyncio.Transport | None = None
        self._request = request
        self._done = done
        self._raw = bytearray()
        self._body = bytearray()
        self._has_head = self._is_chunked = self._is_stream = False
        self._left: int | None = None  # bytes of the body, None up to the end of the connection

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.answer.sent_s = time.perf_counter()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = self.answer.ended_s = time.perf_counter()
        self._raw += data
        if not self._has_head and not self._take_head():
            return
        is_whole = self._take_chunks() if self._is_chunked else self._take_plain()
        if self._is_stream:
            *lines, rest = bytes(self._body).split(b"\n")
            self._body = bytearray(rest)
            events = (line[5:].strip() for line in lines if line.startswith(b"data:"))
            self.answer.events += [(now, event) for event in events]
        if is_whole:
            self._finish("")

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._has_head:
            self._finish("unanswered")
        else:
            self._finish("cut" if self._is_chunked or self._left else "")

    def _take_head(self) -> bool:
        end = self._raw.find(b"\r\n\r\n")
        if end < 0:
            return False
        first, *lines = self._raw[:end].decode("latin-1").split("\r\n")
        pairs = (line.partition(":") for line in lines)
        headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        self.answer.status, self.answer.headers = int(first.split()[1]), headers
        del self._raw[: end + 4]
        self._has_head = True
        self._is_chunked = headers.get("transfer-encoding", "").lower() == "chunked"
        self._is_stream = headers.get("content-type", "").startswith("text/event-stream")
        length = headers.get("content-length")
        self._left = int(length) if length is not None else None
        return True

    def _take_plain(self) -> bool:
        self._body += self._raw
        if self._left is not None:
            self._left -= len(self._raw)
        self._raw.clear()
        return self._left is not None and self._left <= 0

    def _take_chunks(self) -> bool:
        raw, at = self._raw, 0
        is_last = False
        while not is_last and (end := raw.find(b"\r\n", at)) >= 0:
            size = int(raw[at:end].partition(b";")[0], 16)
            if len(raw) < end + 2 + size + 2:
                break
            self._body += raw[end + 2 : end + 2 + size]
            at, is_last = end + 2 + size + 2, size == 0
        del raw[:at]
        return is_last

    def _finish(self, problem: str) -> None:
        if not self._done.done():
            if not self._is_stream:
                self.answer.body = bytes(self._body)
            self.answer.problem = problem
            self._done.set_result(None)


class Client:
    """Sends requests to a server on this machine.

    Args:
        port: where it listens.
        host: and on which address.
        timeout_s: of a request.
    """

    def __init__(self, port: int, host: str = "127.0.0.1", timeout_s: float = 300.0) -> None:
        self.port = port
        self.host = host
        self.timeout_s = timeout_s

    async def send(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | bytes = b"",
        headers: Mapping[str, str] | None = None,
        *,
        drop_after_s: float | None = None,
    ) -> Answer:
        """Send a request and wait for all of its answer.

        Args:
            method: of HTTP.
            path: of the route.
            body: an object goes out as JSON, bytes as they are.
            headers: further ones, or others.
            drop_after_s: close the connection then, whatever has come.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        exchange = _Exchange(self._request(method, path, body, headers or {}), done)
        try:
            await loop.create_connection(lambda: exchange, self.host, self.port)
        except OSError:
            now = time.perf_counter()
            return Answer(problem="refused", sent_s=now, ended_s=now)
        limit = self.timeout_s if drop_after_s is None else drop_after_s
        try:
            await asyncio.wait_for(done, limit)
        except TimeoutError:
            exchange.answer.ended_s = time.perf_counter()
            exchange.answer.problem = "timeout" if drop_after_s is None else "dropped"
        finally:
            assert exchange.transport is not None
            exchange.transport.close()
        return exchange.answer

    async def get(self, path: str) -> Answer:
        """GET a route."""
        return await self.send("GET", path)

    async def complete(
        self, prompt: str, *, drop_after_s: float | None = None, **fields: Any
    ) -> Answer:
        """A completion, streamed and greedy unless `fields` say otherwise."""
        usage = {"stream_options": {"include_usage": True}} if fields.get("stream", True) else {}
        body = {"prompt": prompt, "temperature": 0, "stream": True, **usage, **fields}
        return await self.send("POST", "/v1/completions", body, drop_after_s=drop_after_s)

    def _request(
        self, method: str, path: str, body: Mapping[str, Any] | bytes, headers: Mapping[str, str]
    ) -> bytes:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        fields = {"Host": f"{self.host}:{self.port}", "Connection": "close"}
        if method != "GET":
            fields |= {"Content-Type": "application/json", "Content-Length": str(len(raw))}
        lines = [f"{name}: {value}\r\n" for name, value in (fields | dict(headers)).items()]
        return f"{method} {path} HTTP/1.1\r\n{''.join(lines)}\r\n".encode() + raw


async def at_most(
    count: int, items: Iterable[Item], work: Callable[[Item], Awaitable[Result]]
) -> list[Result]:
    """Work on items by so many clients, each of which takes the next as soon as it can.

    Returns:
        the results in the order of the items.
    """
    waiting = iter(list(enumerate(items)))
    results: dict[int, Result] = {}

    async def client() -> None:
        for number, item in waiting:
            results[number] = await work(item)

    await asyncio.gather(*(client() for _ in range(count)))
    return [results[number] for number in sorted(results)]


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of all values (0 to 1) does not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Of the line that fits (x, y) best by least squares; 0 where all x are the same."""
    n = len(points)
    mean_x, mean_y = (sum(axis) / n for axis in zip(*points))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0
