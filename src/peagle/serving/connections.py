"""Connections: how many there are, how large the head of a request is, how long a client may take.

A client that neither sends a request nor reads its answer costs a file and some memory for as long
as the server lets it. The parser is h11, whatever else is installed: uvicorn's other ones do not
bound a head.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
import sys
from collections import Counter
from contextlib import suppress
from functools import partial
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from peagle.errors import UserError
from peagle.serving.errors import ApiError

logger = logging.getLogger("peagle.serving")

BACKLOG = 2048
_MOST_FILES = 65536
_MOST_CONNECTIONS = 4096
# Other open files: pipes to engines, files that are read, connections that close at the moment.
_OTHER_FILES = 256
# As asyncio has it, all connections that wait are accepted before the first of them can be refused.
ACCEPTED_AT_ONCE = 32
MAX_HEAD_BYTES = 16 << 10
MAX_HEADERS = 100
# One read of a socket. h11 takes 2 ms for a KiB of one-byte chunks, in which all others wait.
_READ_BYTES = 8 << 10
_SWEEP_S = 1.0
_REPORT_S = 10.0
# What a refused client may go on sending: a connection closed before that loses the answer.
_LINGER_S, _LINGER_BYTES = 2.0, 64 << 10
_BLANK_LINE = re.compile(rb"\n\r?\n")


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that accepts connections at once, before the server answers.

    Raises:
        UserError: the address cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's delay off only where the protocol is named.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        raise UserError(
            f"Cannot listen on {host} port {port}: {error.strerror or error}. Choose another "
            "--host or --port."
        ) from None
    listening.setblocking(False)
    return listening


def connection_limit(asked: int | None) -> int:
    """Return the limit of open connections; raise the limit of open files up to 65,536.

    Args:
        asked: the limit that the user set; None takes what the files allow, at most 4,096.

    Raises:
        UserError: the user asked for more connections than files may be open.
    """
    num_files = _raise_file_limit()
    room = num_files - min(_OTHER_FILES, num_files // 2)
    if asked is None:
        return min(room, _MOST_CONNECTIONS)
    if asked > room:
        raise UserError(
            f"--max-connections is {asked}, and this process may open {num_files} files: expected "
            f"at most {room}. Lower it, or raise the limit of open files (ulimit -n)."
        )
    return asked


def _raise_file_limit() -> int:
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return _MOST_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    infinity = resource.RLIM_INFINITY
    wanted = _MOST_FILES if hard == infinity else min(hard, _MOST_FILES)
    if soft == infinity or soft >= wanted:
        return _MOST_FILES if soft == infinity else soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):  # macOS allows less than its hard limit
        return soft
    return wanted


class Connections:
    """All connections of a server.

    When there are too many, the one for whose client the server has waited longest is closed, so
    that a client that sends its request at once still gets an answer. Connections whose requests
    are being answered stay; if all are, a new one is refused with status 503.

    Args:
        max_connections: connections at once.
        head_timeout_s: seconds from the start of a connection to the end of the head of its first
            request, and from the first byte of any later request to the end of its head.
        stall_timeout_s: seconds in which a client with data to read must read some data.

    Attributes:
        protocol: makes a connection; uvicorn's setting `http`.
    """

    def __init__(
        self, max_connections: int, head_timeout_s: float = 15.0, stall_timeout_s: float = 60.0
    ) -> None:
        self.max_connections = max_connections
        self.head_timeout_s, self.stall_timeout_s = head_timeout_s, stall_timeout_s
        self.protocol: Any = partial(Connection, self)
        self.buffer = bytearray(_READ_BYTES)
        self._open: set[Connection] = set()
        # The server waits for the clients of these, for the first one longest.
        self._waiting: dict[Connection, None] = {}
        self._closed: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._open)

    def add(self, connection: Connection) -> None:
        """Take a new connection, at the cost of one that waits if there are too many."""
        self._open.add(connection)
        limit = self.max_connections
        while len(self._open) > limit and self._waiting:
            self.close(next(iter(self._waiting)), f"at the limit of {limit} connections")
        self._waiting[connection] = None
        if len(self._open) > limit:
            self._closed[f"with status 503 at the limit of {limit} connections"] += 1
            connection.refuse(
                ApiError(
                    503,
                    f"{limit} connections have requests under way: expected fewer. Try again "
                    "later, or start the server with a larger --max-connections.",
                    code="too_many_connections",
                    headers={"Retry-After": "1"},
                )
            )

    def remove(self, connection: Connection) -> None:
        self._open.discard(connection)
        self._waiting.pop(connection, None)

    def sort(self, connection: Connection) -> None:
        """Note whether the server waits for the client of a connection."""
        if not connection.is_waiting:
            self._waiting.pop(connection, None)
        elif connection in self._open:
            self._waiting.setdefault(connection)

    def close(self, connection: Connection, reason: str) -> None:
        """Close a connection at once; the reason ends the sentence "closed 3 connections"."""
        self._closed[reason] += 1
        self.remove(connection)
        connection.transport.abort()

    async def watch(self) -> None:
        """Close connections that take too long, and log how many, until cancelled."""
        loop = asyncio.get_running_loop()
        reported_s = loop.time()
        while True:
            await asyncio.sleep(_SWEEP_S)
            now = loop.time()
            for connection in tuple(self._open):
                connection.check(now)
            if now - reported_s >= _REPORT_S:
                for reason, count in self._closed.items():
                    logger.warning("closed %d connections %s", count, reason)
                self._closed.clear()
                reported_s = now


class Connection(H11Protocol, asyncio.BufferedProtocol):
    """uvicorn's connection, within limits."""

    def __init__(self, table: Connections, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.conn = _Parser()
        self._table = table
        self._head_deadline_s: float | None = self.loop.time() + self._table.head_timeout_s
        # Bytes that a refused client may still send, which are dropped.
        self._linger_bytes: int | None = None
        self._num_unread = 0
        self._read_s = 0.0

    @property
    def is_waiting(self) -> bool:
        """Whether the server waits for the client: for a request, or for the rest of one."""
        cycle = self.cycle
        return cycle is None or cycle.response_complete or cycle.more_body

    # ---- called by asyncio and uvicorn ----------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._table.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._table.remove(self)
        super().connection_lost(exc)

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._table.buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self._linger_bytes is not None:
            self._linger_bytes -= nbytes
            if self._linger_bytes < 0:
                self.transport.abort()
            return
        self.data_received(bytes(memoryview(self._table.buffer)[:nbytes]))
        if self.cycle is not None and not self.cycle.response_complete:
            self._head_deadline_s = None
        elif self._head_deadline_s is None:
            self._head_deadline_s = self.loop.time() + self._table.head_timeout_s
        self._table.sort(self)

    def on_response_complete(self) -> None:
        super().on_response_complete()  # may begin the next request
        self._table.sort(self)

    def send_400_response(self, msg: str) -> None:
        text = "The request is not one of HTTP/1.1, or its parts contradict each other."
        self.refuse(self.conn.refusal or ApiError(400, text, code="invalid_http"))

    # ---- limits ---------------------------------------------------------------------------------

    def check(self, now: float) -> None:
        """Close the connection if its client has taken too long by `now`."""
        if self._head_deadline_s is not None and now > self._head_deadline_s:
            limit = f"{self._table.head_timeout_s:g} s"
            if self.conn.our_state is h11.IDLE and self.conn.trailing_data[0]:
                text = (
                    f"The head of the request did not end within {limit}. Send it faster, or "
                    "start the server with a larger --head-timeout."
                )
                self.refuse(ApiError(408, text))
            else:
                self._table.close(self, f"that sent no request within {limit}")
            return
        num_unread = self._count_unread()
        if num_unread == 0 or num_unread != self._num_unread:
            self._num_unread, self._read_s = num_unread, now
        elif now - self._read_s > self._table.stall_timeout_s:
            limit = f"{self._table.stall_timeout_s:g} s"
            self._table.close(self, f"that read nothing of their answers for {limit}")

    def refuse(self, error: ApiError) -> None:
        """Answer with an error, read no request any more, and close the connection soon."""
        self._head_deadline_s = None
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()  # an answer has begun
            return
        body = json.dumps(error.body()).encode()
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
            **error.headers,
        }
        parts = h11.Response(status_code=error.status, headers=list(headers.items()))
        for part in (parts, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(part) or b"")
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.close()  # else the application would answer too
            return
        self._linger_bytes = _LINGER_BYTES
        self.loop.call_later(_LINGER_S, self.transport.abort)

    def _count_unread(self) -> int:
        """Count the bytes that wait for the client, in this process and in the kernel."""
        count = self.transport.get_write_buffer_size()
        if count:
            with suppress(ImportError, AttributeError, OSError):
                import fcntl
                import termios

                file = self.transport.get_extra_info("socket").fileno()
                unacknowledged = fcntl.ioctl(file, termios.TIOCOUTQ, bytes(4))
                count += int.from_bytes(unacknowledged, sys.byteorder)
        return count


class _Parser(h11.Connection):
    """h11 with bounds for the head of a request, and streams that cost little.

    Attributes:
        refusal: the error for a head that is too large.
    """

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MAX_HEAD_BYTES)
        self.refusal: ApiError | None = None
        self._is_chunked = False

    def send(self, event: Any) -> bytes | None:
        """Return h11's bytes of an event; chunks of a body are framed here, in less of its time."""
        if type(event) is h11.Data and self._is_chunked and event.data:
            return b"%x\r\n%b\r\n" % (len(event.data), event.data)
        data = super().send(event)
        if type(event) is h11.Response:
            self._is_chunked = b"transfer-encoding: chunked\r\n" in (data or b"").lower()
        elif type(event) is h11.EndOfMessage:
            self._is_chunked = False
        return data

    def next_event(self) -> Any:
        """Return h11's next event; refuse a head that is too large before h11 parses it."""
        if self.their_state is h11.IDLE and (data := self.trailing_data[0]):
            end = _BLANK_LINE.search(data)
            num_bytes = end.end() if end else len(data)
            num_headers = data.count(b"\n", 0, num_bytes) - (2 if end else 1)
            if num_bytes > MAX_HEAD_BYTES:
                self._refuse(f"{num_bytes} bytes", f"{MAX_HEAD_BYTES} bytes")
            if num_headers > MAX_HEADERS:
                self._refuse(f"{num_headers} headers", f"{MAX_HEADERS} headers")
        return super().next_event()

    def _refuse(self, found: str, limit: str) -> None:
        text = f"The head of the request has at least {found}: expected at most {limit}."
        self.refusal = ApiError(431, text, code="head_too_large")
        raise h11.RemoteProtocolError(text, error_status_hint=431)
