"""The HTTP client that measures load: asyncio, with connections that are used again.

It keeps the chunks of a stream with their times and reads JSON after the clock has stopped. httpx
costs several times the CPU time a chunk (benchmarks/evaluation/client_cost.py).
"""

import asyncio
import json
import re
import ssl
import time
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import urlsplit

from peagle.client.api import failure_reason
from peagle.client.events import EventReader

Item = TypeVar("Item")
Result = TypeVar("Result")
MAX_BYTES = 64 << 20  # of an answer that is no stream
_END = re.compile(rb"\r?\n\r?\n")  # of the headers; some servers end lines without \r
HANDSHAKE_S = 10.0  # limit of a TLS handshake: a server without TLS may never answer it


@dataclass(slots=True)
class Reply:
    """The answer to a request, or the reason why there is none.

    `problem` is "" for a whole answer; else "refused" (no connection), "unanswered", "cut" (in the
    middle), "timeout", or "dropped" (by this client, as its caller asked).
    """

    status: int = 0  # HTTP status; 0 without an answer
    headers: dict[str, str] = field(default_factory=dict)  # names in lower case
    body: bytes = b""  # empty for a stream of events
    events: list[tuple[float, bytes]] = field(default_factory=list)  # time (perf_counter), data
    sent_s: float = 0.0  # when the request went out on an open connection
    ended_s: float = 0.0  # when the last byte came
    problem: str = ""
    reason: str = ""  # cause of a failed connection

    @property
    def seconds(self) -> float:
        """Return the seconds from the request to the end of the answer."""
        return self.ended_s - self.sent_s


class _Connection(asyncio.Protocol):
    """A connection that carries one request after the other."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.is_open = False
        self._done: asyncio.Future[None] | None = None
        self._begin()

    def _begin(self) -> None:
        self.answer = Reply()
        self._raw, self._body = bytearray(), bytearray()
        self._reader = EventReader()
        self._is_framed = False  # the answer says where its body ends
        self._parser = self._parse()

    async def ask(self, request: bytes, limit_s: float) -> Reply:
        """Send a request and wait up to `limit_s` for its answer (problem "timeout")."""
        self._begin()
        self._done = asyncio.get_running_loop().create_future()
        self.answer.sent_s = self.answer.ended_s = time.perf_counter()
        if self.transport is None or not self.is_open:
            self._end("unanswered")
        else:
            self.transport.write(request)
        try:
            await asyncio.wait_for(self._done, limit_s)
        except TimeoutError:
            self.answer.ended_s = time.perf_counter()
            self.answer.problem = "timeout"
        return self.answer

    def close(self) -> None:
        """Close the connection."""
        if self.transport is not None:
            self.transport.close()

    @property
    def can_be_used_again(self) -> bool:
        """Return whether the answer is whole and the server keeps the connection."""
        is_kept = self.answer.headers.get("connection", "").lower() != "close"
        return self.is_open and self._is_framed and is_kept and not self.answer.problem

    def connection_made(self, transport: Any) -> None:
        self.transport, self.is_open = transport, True

    def data_received(self, data: bytes) -> None:
        self.answer.ended_s = time.perf_counter()
        self._raw += data
        try:
            next(self._parser)
            if len(self._raw) + len(self._body) > MAX_BYTES:
                raise ValueError(MAX_BYTES)
        except StopIteration:
            self._end("")
        except (ValueError, IndexError):  # no HTTP, no size of a chunk, or an endless answer
            self._end("cut" if self.answer.status else "unanswered")

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        if not self.answer.status:
            self._end("unanswered")
        else:
            self._end("cut" if self._is_framed else "")

    def _parse(self) -> Generator[None]:
        """Read the answer from the bytes so far; each yield waits for more bytes."""
        raw, answer = self._raw, self.answer
        while (end := _END.search(raw)) is None:
            yield
        first, *lines = (line.decode("latin-1") for line in raw[: end.start()].splitlines())
        pairs = (line.partition(":") for line in lines)
        headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        left = int(headers["content-length"]) if "content-length" in headers else None
        answer.status, answer.headers = int(first.split()[1]), headers
        del raw[: end.end()]
        is_chunked = headers.get("transfer-encoding", "").lower() == "chunked"
        if answer.status in (204, 304):  # these never have a body
            is_chunked, left = False, 0
        is_stream = headers.get("content-type", "").startswith("text/event-stream")
        self._is_framed = is_chunked or left is not None
        body, is_whole = self._body, False
        while True:
            if is_chunked:
                at = 0
                while not is_whole and (begin := raw.find(b"\n", at) + 1) > 0:
                    size = int(raw[at:begin].partition(b";")[0], 16)
                    past = begin + size + (2 if raw[begin - 2 : begin] == b"\r\n" else 1)
                    if len(raw) < past:
                        break
                    body += raw[begin : begin + size]
                    at, is_whole = past, size == 0
                del raw[:at]
            else:
                body += raw
                if left is not None:
                    left -= len(raw)
                    is_whole = left <= 0
                raw.clear()
            if is_stream:
                answer.events += [(answer.ended_s, data) for data in self._reader.feed(body)]
                body.clear()
            if is_whole:
                return
            yield

    def _end(self, problem: str) -> None:
        if self._done is not None and not self._done.done():
            self.answer.events += [(self.answer.ended_s, data) for data in self._reader.end()]
            self.answer.body = bytes(self._body)
            self.answer.problem = problem
            self._done.set_result(None)


class HttpClient:
    """The client of one server, which joins paths to `url` unchanged.

    With `keep_alive` a finished connection carries the next request. A time to the first token
    never holds a handshake: clocks start as the request goes out.
    """

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str] | None = None,
        *,
        timeout_s: float = 300.0,
        keep_alive: bool = True,
    ) -> None:
        parts = urlsplit(url)
        self.host = parts.hostname or ""
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self.timeout_s = timeout_s
        self._base = parts.path.rstrip("/")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._keep_alive = keep_alive
        ending = {} if keep_alive else {"Connection": "close"}
        self._headers = {"Host": parts.netloc, **ending, **(headers or {})}
        self._idle: list[_Connection] = []

    async def send(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | bytes = b"",
        headers: Mapping[str, str] | None = None,
        *,
        drop_after_s: float | None = None,
    ) -> Reply:
        """Send a request and wait for its whole answer.

        A mapping goes out as JSON, bytes as they are. `headers` replace those of every request.
        After `drop_after_s` the client closes the connection.
        """
        request = self._request(method, path, body, headers or {})
        limit_s = self.timeout_s if drop_after_s is None else drop_after_s
        while self._idle:
            reply = await self._exchange(self._idle.pop(), request, limit_s)
            # A server may close a connection that was idle for long: the request is sent again.
            if (reply.status, reply.problem) != (0, "unanswered"):
                break
        else:
            loop, now = asyncio.get_running_loop(), time.perf_counter()
            try:
                tls: dict[str, Any] = {}
                if self._tls is not None:
                    tls = {"ssl": self._tls, "ssl_handshake_timeout": HANDSHAKE_S}
                making = loop.create_connection(_Connection, self.host, self.port, **tls)
                _, connection = await asyncio.wait_for(making, self.timeout_s)
            except (OSError, TimeoutError, UnicodeError) as error:
                reason = failure_reason(error)
                return Reply(problem="refused", reason=reason, sent_s=now, ended_s=now)
            reply = await self._exchange(connection, request, limit_s)
        if drop_after_s is not None and reply.problem == "timeout":
            reply.problem = "dropped"
        return reply

    def close(self) -> None:
        """Close the idle connections; they belong to one event loop."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _exchange(self, connection: _Connection, request: bytes, limit_s: float) -> Reply:
        is_kept = False
        try:
            reply = await connection.ask(request, limit_s)
            is_kept = self._keep_alive and connection.can_be_used_again
        finally:
            if is_kept:
                self._idle.append(connection)
            else:
                connection.close()
        return reply

    def _request(
        self, method: str, path: str, body: Mapping[str, Any] | bytes, headers: Mapping[str, str]
    ) -> bytes:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        fields = dict(self._headers)
        if method != "GET":
            fields |= {"Content-Type": "application/json", "Content-Length": str(len(raw))}
        lines = [f"{name}: {value}\r\n" for name, value in (fields | dict(headers)).items()]
        return f"{method} {self._base}{path} HTTP/1.1\r\n{''.join(lines)}\r\n".encode() + raw


async def run_clients(
    count: int, items: Iterable[Item], work: Callable[[Item], Awaitable[Result]]
) -> list[Result]:
    """Return the results of `work` on all items, in their order.

    `count` clients each take the next item as soon as they can. The first error that `work` raises
    ends all clients.
    """
    waiting = iter(list(enumerate(items)))
    results: dict[int, Result] = {}

    async def client() -> None:
        for number, item in waiting:
            results[number] = await work(item)

    clients = [asyncio.ensure_future(client()) for _ in range(count)]
    try:
        await asyncio.gather(*clients)
    finally:
        for one in clients:
            one.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
    return [results[number] for number in sorted(results)]
