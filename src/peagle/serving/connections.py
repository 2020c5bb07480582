"""Connections: how many there are, and how long a client may take.

A client that neither sends a request nor reads its answer costs a file and some memory for as long
as the server lets it. The parser is h11, whatever else is installed: uvicorn's other ones do not
bound a head.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import sys
from collections import Counter, OrderedDict, deque
from contextlib import suppress
from functools import partial
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from peagle.errors import UserError
from peagle.serving.errors import ApiError
from peagle.serving.http_parser import HttpParser, RefusedRequest

logger = logging.getLogger("peagle.serving")

BACKLOG = 2048
_MAX_FILES = 65536
_MAX_CONNECTIONS = 4096
# As asyncio has it, all connections that wait are accepted before the first of them can be refused.
ACCEPTED_AT_ONCE = 8
# Connections that are parsed, and may begin a request, in one round of the event loop, and the time
# after which no more of them are: the streams of others go on between two rounds. More than are
# accepted in a round, so that new ones never wait for long.
_TURNS, _ROUND_S = 2 * ACCEPTED_AT_ONCE, 0.005
# Connections that come while a new one is made, read and given to the application.
_MAX_ARRIVING = 3 * ACCEPTED_AT_ONCE
# By then it has happened. A request that has come waits for less of it.
_NEW_S, _NEW_BESIDE_REQUEST_S = 0.5, 0.05
# What a load balancer or an orchestrator asks; a connection beyond the limit may ask it too.
PROBE_PATHS = ("/live", "/health", "/ready", "/ping")
RESERVED_CONNECTIONS = 32
_RESERVE_HEAD_S = 2.0
# Other open files: the reserve, pipes to engines, files that are read, connections that close.
_OTHER_FILES = 256
# Requests that a client may send before it has the answer to the first of them.
MAX_PIPELINED = 8
# One read of a socket.
_READ_BYTES = 8 << 10
_SWEEP_S = 1.0
_REPORT_S = 10.0
# What a refused client may go on sending: a connection closed before that loses the answer.
_LINGER_S, _LINGER_BYTES = 2.0, 64 << 10


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
        return min(room, _MAX_CONNECTIONS)
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
        return _MAX_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    infinity = resource.RLIM_INFINITY
    wanted = _MAX_FILES if hard == infinity else min(hard, _MAX_FILES)
    if soft == infinity or soft >= wanted:
        return _MAX_FILES if soft == infinity else soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):  # macOS allows less than its hard limit
        return soft
    return wanted


class Connections:
    """All connections of a server.

    When there are too many, the idle one that has had no work for longest is closed, so that a
    client that sends its request at once still gets an answer. Connections with work stay; if all
    have some, a new one belongs to the reserve: it may ask a probe, and is refused anything else
    with status 503. A reserve that is full gives up its oldest connection.

    Args:
        max_connections: connections at once, without the reserve.
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
        # When those that may be idle began, or last had work; the longest ago first.
        self._idle_s: OrderedDict[Connection, float] = OrderedDict()
        self._reserve: OrderedDict[Connection, None] = OrderedDict()
        self._closed: Counter[str] = Counter()
        self._num_turns, self._round_end_s = 0, 0.0
        self._firsts: deque[Connection] = deque()
        self._others: deque[Connection] = deque()

    def __len__(self) -> int:
        return len(self._open) + len(self._reserve)

    def add(self, connection: Connection) -> None:
        """Take a new connection, into the reserve if need be."""
        if not self.admit(connection):
            self._reserve[connection] = None
            if len(self._reserve) > RESERVED_CONNECTIONS:
                oldest = next(iter(self._reserve))
                self.close(oldest, f"beyond the limit of {self.max_connections} connections")

    def admit(self, connection: Connection) -> bool:
        """Take a connection, new or from the reserve, at the cost of an idle one if need be.

        Connections that come all the time would replace each other before the first of their
        requests is answered. So where few are idle, the new ones of them stay for a moment.

        Returns:
            whether there was room.
        """
        limit, now = self.max_connections, connection.loop.time()
        if len(self._open) >= limit and (idle := self._longest_idle()) is not None:
            new_s = _NEW_BESIDE_REQUEST_S if connection in self._reserve else _NEW_S
            is_new = now - self._idle_s[idle] < new_s and not idle.has_answered
            if len(self._idle_s) > _MAX_ARRIVING or not is_new:
                self.close(idle, f"at the limit of {limit} connections")
        has_room = len(self._open) < limit
        if has_room:
            self._reserve.pop(connection, None)
            self._open.add(connection)
            self.note(connection)
        connection.is_in_reserve = not has_room
        return has_room

    def _longest_idle(self) -> Connection | None:
        """Return the idle connection that has had no work for longest; None if there is none."""
        while self._idle_s:
            connection = next(iter(self._idle_s))
            if connection.is_idle:
                return connection
            del self._idle_s[connection]  # until its work is done
        return None

    def note(self, connection: Connection) -> None:
        """Note that a connection is new or had work until now, and may be idle."""
        if connection in self._open:
            self._idle_s[connection] = connection.loop.time()
            self._idle_s.move_to_end(connection)

    def remove(self, connection: Connection) -> None:
        self._open.discard(connection)
        self._idle_s.pop(connection, None)
        self._reserve.pop(connection, None)

    def close(self, connection: Connection, reason: str) -> None:
        """Close a connection at once; the reason ends the sentence "closed 3 connections"."""
        self._closed[reason] += 1
        self.remove(connection)
        connection.transport.abort()

    # ---- turns ----

    def take_turn(self, connection: Connection) -> bool:
        """Return whether a connection may parse in this round; if not, it will be told to.

        The first request of a connection goes before others, so that a client that does not come
        again and again waits for none that do.
        """
        is_first = connection.cycle is None
        is_next = not self._firsts and (is_first or not self._others)
        if is_next and self._begin_turn(connection.loop):
            return True
        (self._firsts if is_first else self._others).append(connection)
        return False

    def _begin_turn(self, loop: asyncio.AbstractEventLoop) -> bool:
        now = loop.time()
        if not self._num_turns:
            self._round_end_s = now + _ROUND_S
            loop.call_soon(self._next_round, loop)
        elif self._num_turns >= _TURNS or now > self._round_end_s:
            return False
        self._num_turns += 1
        return True

    def _next_round(self, loop: asyncio.AbstractEventLoop) -> None:
        self._num_turns = 0
        while (queue := self._firsts or self._others) and self._begin_turn(loop):
            queue.popleft().handle_turn()

    # ---- limits ----

    def all_busy(self) -> RefusedRequest:
        """Return the refusal of a request for which there is no connection, and count it."""
        limit = self.max_connections
        self._closed[f"with status 503 at the limit of {limit} connections"] += 1
        return RefusedRequest(
            503,
            f"{limit} connections have requests under way: expected fewer. Try again later, or "
            "start the server with a larger --max-connections.",
            "too_many_connections",
            **{"Retry-After": "1"},
        )

    async def watch(self) -> None:
        """Close connections that take too long, and log how many, until cancelled."""
        loop = asyncio.get_running_loop()
        reported_s = loop.time()
        while True:
            await asyncio.sleep(_SWEEP_S)
            now = loop.time()
            for connection in (*self._open, *self._reserve):
                connection.check(now)
            if now - reported_s >= _REPORT_S:
                for reason, count in self._closed.items():
                    logger.warning("closed %d connections %s", count, reason)
                self._closed.clear()
                reported_s = now


class Connection(H11Protocol, asyncio.BufferedProtocol):
    """uvicorn's connection, within limits.

    Attributes:
        is_in_reserve: it came when all others had work, and may only ask a probe.
    """

    conn: HttpParser

    def __init__(self, table: Connections, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.conn = HttpParser(self._check_request)
        self.is_in_reserve = False
        self._table = table
        self._head_deadline_s: float | None = None
        # Bytes that a refused client may still send, which are dropped.
        self._linger_bytes: int | None = None
        self._num_pipelined = 0  # requests in a row that had come before an answer was complete
        self._num_unread = 0
        self._read_s = 0.0

    @property
    def is_answering(self) -> bool:
        """Return whether a request has begun, and its answer has not ended."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def has_answered(self) -> bool:
        """Return whether all requests that have begun are answered, and there was one."""
        return self.cycle is not None and not self.is_answering

    @property
    def is_idle(self) -> bool:
        """Return whether no work is lost with the connection.

        The server waits for the client: for a request, for the rest of one, or to read an answer.
        Or the request is none that the application has taken, see `CountOpen`: it is a probe, or
        about to be refused.
        """
        if not self.is_answering or self.cycle.more_body or self.flow.write_paused:
            return True
        return not self._is_admitted

    @property
    def _is_admitted(self) -> bool:
        return "is_admitted" in self.cycle.scope.get("state", {})

    # ---- called by asyncio and uvicorn ----

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._table.add(self)
        timeout_s = self._table.head_timeout_s
        if self.is_in_reserve:
            timeout_s = min(timeout_s, _RESERVE_HEAD_S)
        self._head_deadline_s = self.loop.time() + timeout_s

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
        if not self.is_answering:
            self._num_pipelined = 0
        self.data_received(bytes(memoryview(self._table.buffer)[:nbytes]))

    def on_response_complete(self) -> None:
        self._num_pipelined += 1
        if self._is_admitted:
            self._table.note(self)
        super().on_response_complete()  # may begin the next request

    def handle_events(self) -> None:
        if self._table.take_turn(self):
            self._handle_events()
        else:
            self.flow.pause_reading()

    def handle_turn(self) -> None:
        """Parse the bytes that had to wait."""
        if not self.transport.is_closing() and self._linger_bytes is None:
            self.flow.resume_reading()
            self._handle_events()

    def _handle_events(self) -> None:
        """Parse the bytes received, and begin a request if it is there.

        The time for a head begins with its first byte, or with the rest of a body that is not read
        any more; a client gets no more time by sending it in parts.
        """
        super().handle_events()
        has_begun = self.conn.their_state is not h11.IDLE or bool(self.conn.trailing_data[0])
        if self.is_answering or self._linger_bytes is not None:
            self._head_deadline_s = None
        elif has_begun and self._head_deadline_s is None:
            self._head_deadline_s = self.loop.time() + self._table.head_timeout_s

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._is_admitted:
            self._table.note(self)

    def send_400_response(self, msg: str) -> None:
        text = "The request is not one of HTTP/1.1, or its parts contradict each other."
        self.refuse(self.conn.refusal or ApiError(400, text, code="invalid_http"))

    # ---- limits ----

    def _check_request(self, request: h11.Request) -> None:
        """Refuse a request that was sent too far ahead, or for which there is no connection."""
        if self._num_pipelined >= MAX_PIPELINED:
            text = (
                f"The client sent more than {MAX_PIPELINED} requests before it had the answer to "
                "the first of them: send the others again, after the answers."
            )
            raise RefusedRequest(429, text, "too_many_pipelined")
        if self.is_in_reserve:
            path = request.target.partition(b"?")[0].decode("ascii")
            if request.method in (b"GET", b"HEAD") and path in PROBE_PATHS:
                self.conn.is_last = True
            elif not self._table.admit(self):
                raise self._table.all_busy()

    def check(self, now: float) -> None:
        """Close the connection if its client has taken too long by `now`."""
        if self._head_deadline_s is not None and now > self._head_deadline_s:
            limit = f"{self._table.head_timeout_s:g} s"
            if self.is_in_reserve:
                self.refuse(self._table.all_busy().answer)
            elif self.conn.our_state is h11.IDLE and self.conn.trailing_data[0]:
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
        if self.is_answering:  # the application reads the body; it must not answer too
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.flow.resume_reading()
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
