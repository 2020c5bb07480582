"""Clients that say nothing, too much, or read nothing; and ends that nothing can hold up."""

import asyncio
import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
import uvicorn

from peagle.errors import UserError
from peagle.serving.connections import (
    MAX_PIPELINED,
    PROBE_PATHS,
    RESERVED_CONNECTIONS,
    Connections,
    connection_limit,
)
from peagle.serving.http_parser import MAX_HEADERS
from peagle.serving.keys import ApiKeys
from peagle.serving.security import SecurityMiddleware
from peagle.serving.server import CountOpen
from serving.live import (
    SMALL_CACHE,
    LiveServer,
    environment,
    running,
    wait_for,
    wait_until_ready,
)
from serving.warm import WarmProcess

MAX_CONNECTIONS = 20
HEAD_TIMEOUT_S = 3
GET = b"GET /live HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture(scope="module")
def small() -> Iterator[LiveServer]:
    """A server with few connections and little patience."""
    options = ("--max-connections", MAX_CONNECTIONS, "--head-timeout", HEAD_TIMEOUT_S)
    with running("--no-playground", *options, warm=True) as server:
        yield server


@pytest.fixture
def opened() -> Iterator[contextlib.ExitStack]:
    """Closes the connections of a test."""
    with contextlib.ExitStack() as stack:
        yield stack


def connect(server: LiveServer, opened: contextlib.ExitStack, data: bytes = b"") -> socket.socket:
    address = urlsplit(server.url)
    connection = socket.create_connection((address.hostname, address.port), timeout=60)
    opened.enter_context(connection)
    connection.sendall(data)
    return connection


def answer_on(connection: socket.socket) -> tuple[int, Any, dict[str, str]]:
    """The status, the JSON body and the headers of the next answer."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += (byte := connection.recv(1))
        assert byte, f"the answer ended after {head!r}"
    start, *lines = head.decode().splitlines()
    headers = {name.lower(): value for name, value in (x.split(": ", 1) for x in lines if x)}
    body = connection.recv(int(headers["content-length"]), socket.MSG_WAITALL)
    return int(start.split()[1]), json.loads(body), headers


def is_closed(connection: socket.socket) -> bool:
    """Whether the server has closed a silent connection, or refused it."""
    connection.setblocking(False)
    try:
        return connection.recv(12) in (b"", b"HTTP/1.1 503")
    except BlockingIOError:
        return False
    except OSError:
        return True


def is_healthy(server: LiveServer) -> bool:
    with contextlib.ExitStack() as stack:
        connection = connect(server, stack, GET.replace(b"/live", b"/health") + b"\r\n")
        return answer_on(connection)[0] == 200


def request_of(body: dict[str, Any], *, path: str = "/v1/completions") -> bytes:
    data = json.dumps(body).encode()
    head = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    return f"POST {path} HTTP/1.1\r\n{head}\r\n\r\n".encode() + data


LONG = {"prompt": "def f(", "max_tokens": 1500, "ignore_eos": True, "stream": True}


# ---- connections of a real server ----


@pytest.mark.slow
def test_silent_connections_beyond_the_limit_leave_room(
    small: LiveServer, opened: contextlib.ExitStack
) -> None:
    stream = connect(small, opened, request_of(LONG))
    assert stream.recv(12) == b"HTTP/1.1 200"
    silent = []
    for _ in range(10):
        silent += [connect(small, opened) for _ in range(MAX_CONNECTIONS)]
        assert is_healthy(small)
    # The oldest are closed; the stream and the newest are not.
    wait_for(lambda: sum(map(is_closed, silent)) >= 9 * MAX_CONNECTIONS)
    newest = connect(small, opened)
    assert is_healthy(small)
    assert not is_closed(newest)
    assert stream.recv(1)
    wait_for(lambda: f"at the limit of {MAX_CONNECTIONS} connections" in small.text)


def test_unfinished_bodies_give_way_too(small: LiveServer, opened: contextlib.ExitStack) -> None:
    unfinished = request_of({"prompt": "x" * 100})[:-50]
    held = [connect(small, opened, unfinished) for _ in range(3 * MAX_CONNECTIONS)]
    assert is_healthy(small)
    wait_for(lambda: sum(map(is_closed, held)) >= 2 * MAX_CONNECTIONS)


def test_a_client_that_leaves_in_its_body_is_no_fault(small: LiveServer) -> None:
    def failures(reason: str) -> float:
        return small.metrics()[f'peagle:request_failure_total{{,reason="{reason}"}}']

    cancelled, faults = failures("cancelled"), failures("error")
    with contextlib.ExitStack() as stack:
        for size in (100, 200_000):  # the larger one is read in parts
            connect(small, stack, request_of({"prompt": "x" * size})[:-50])
    wait_for(lambda: failures("cancelled") >= cancelled + 2)
    assert failures("error") == faults
    assert "Traceback" not in small.text


def test_where_all_have_requests_probes_are_answered_and_others_refused(
    small: LiveServer, opened: contextlib.ExitStack
) -> None:
    streams: list[socket.socket] = []

    def fill() -> bool:  # earlier connections may have to end
        stream = connect(small, opened, request_of(LONG))
        if stream.recv(12) == b"HTTP/1.1 200":
            streams.append(stream)
        return len(streams) == MAX_CONNECTIONS

    wait_for(fill)
    for start in (b"GET /v1/models", b"GET /healthy", b"POST /health", b"GET /health/"):
        refused = connect(small, opened, start + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
        status, body, headers = answer_on(refused)
        assert status == 503
        assert body["error"]["code"] == "too_many_connections"
        assert "--max-connections" in body["error"]["message"]
        assert headers["connection"] == "close" and int(headers["retry-after"]) > 0
        assert refused.recv(1) == b""
    # Whatever else is done with the reserve, probes are answered, and their connections closed.
    silent = [connect(small, opened) for _ in range(RESERVED_CONNECTIONS)]
    for data in (b"", GET, GET + b"\r\n", (GET + b"\r\n") * MAX_PIPELINED):
        for _ in range(2 * RESERVED_CONNECTIONS):
            connect(small, opened, data)
        for path in PROBE_PATHS:
            probe = connect(small, opened, GET.replace(b"/live", path.encode()) + b"\r\n")
            status, _, headers = answer_on(probe)
            assert (status, headers["connection"]) == (200, "close")
            assert probe.recv(1) == b""
    wait_for(lambda: all(map(is_closed, silent)))
    assert all(stream.recv(1) for stream in streams)
    streams[0].close()
    models = GET.replace(b"/live", b"/v1/models") + b"\r\n"
    wait_for(lambda: answer_on(connect(small, opened, models))[0] == 200)


def test_heads_have_a_time_and_rests_between_requests_have_none(
    small: LiveServer, opened: contextlib.ExitStack
) -> None:
    """All at once: each waits for the same seconds."""
    start = time.monotonic()
    silent = connect(small, opened)
    rested = connect(small, opened, GET + b"\r\n")
    assert answer_on(rested)[0] == 200
    first, later = connect(small, opened), connect(small, opened, GET + b"\r\n")
    assert answer_on(later)[0] == 200
    stop = threading.Event()

    def trickle() -> None:
        with contextlib.suppress(OSError):
            while not stop.wait(0.2):
                first.send(b"a")
                later.send(b"a")

    for connection in (first, later):
        connection.sendall(GET + b"X-Slow: ")
    threading.Thread(target=trickle, daemon=True).start()
    for connection in (first, later):
        status, body, headers = answer_on(connection)
        assert status == 408 and headers["connection"] == "close"
        assert f"{HEAD_TIMEOUT_S} s" in body["error"]["message"]
        assert "--head-timeout" in body["error"]["message"]
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(1) == b""
    stop.set()
    assert silent.recv(1) == b""
    assert time.monotonic() - start > HEAD_TIMEOUT_S - 1
    time.sleep(max(0, start + HEAD_TIMEOUT_S + 2.5 - time.monotonic()))
    rested.sendall(GET + b"\r\n")
    assert answer_on(rested)[0] == 200


@pytest.mark.parametrize(
    ("head", "limit"),
    [
        (GET + b"X-A: 1\r\n" * MAX_HEADERS + b"\r\n", "100 headers"),
        (GET + b"a:\r\n" * 3000, "100 headers"),
        (GET + b"X-A: " + b"a" * 17000 + b"\r\n\r\n", "16384 bytes"),
        (GET + b"X-A: " + b"a" * 17000, "16384 bytes"),
        (b"GET /" + b"a" * 17000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", "16384 bytes"),
    ],
)
@pytest.mark.parametrize("before", [b"", GET + b"\r\n"], ids=["first", "pipelined"])
def test_a_large_head_is_refused(
    small: LiveServer, opened: contextlib.ExitStack, head: bytes, limit: str, before: bytes
) -> None:
    connection = connect(small, opened, before + head)
    if before:
        assert answer_on(connection)[0] == 200
    status, body, headers = answer_on(connection)
    assert status == 431 and headers["connection"] == "close"
    assert body["error"]["code"] == "head_too_large"
    assert limit in body["error"]["message"]


def test_a_head_at_the_limits_is_served(small: LiveServer, opened: contextlib.ExitStack) -> None:
    head = GET + b"X-A: 1\r\n" * (MAX_HEADERS - 2)
    padding = (16 << 10) - len(head) - len(b"X-B: \r\n\r\n")
    head += b"X-B: " + b"b" * padding + b"\r\n\r\n"
    connection = connect(small, opened, head[:9000])
    time.sleep(0.2)
    connection.sendall(head[9000:])
    assert answer_on(connection)[0] == 200


def test_endless_headers_are_cut(small: LiveServer, opened: contextlib.ExitStack) -> None:
    connection = connect(small, opened, GET)
    sent, line = 0, b"X-A: " + b"a" * 1000 + b"\r\n"
    with pytest.raises(OSError):
        while sent < 64 << 20:
            connection.sendall(line * 100)
            sent += 100 * len(line)
    assert is_healthy(small)


def test_what_is_no_http_gets_an_error(small: LiveServer, opened: contextlib.ExitStack) -> None:
    status, body, _ = answer_on(connect(small, opened, b"\x16\x03\x01 hello\r\n\r\n"))
    assert status == 400
    assert body["error"]["code"] == "invalid_http"


def test_a_few_requests_at_once_are_answered_in_turn_and_more_are_refused(
    small: LiveServer, opened: contextlib.ExitStack
) -> None:
    connection = connect(small, opened)
    for _ in range(3):
        connection.sendall((GET + b"\r\n") * MAX_PIPELINED)
        assert [answer_on(connection)[0] for _ in range(MAX_PIPELINED)] == [200] * MAX_PIPELINED
    connection.sendall((GET + b"\r\n") * 100)
    assert [answer_on(connection)[0] for _ in range(MAX_PIPELINED)] == [200] * MAX_PIPELINED
    status, body, headers = answer_on(connection)
    assert (status, headers["connection"]) == (429, "close")
    assert body["error"]["code"] == "too_many_pipelined"
    assert connection.recv(1) == b""


def test_unread_answers_hold_no_connection(small: LiveServer, opened: contextlib.ExitStack) -> None:
    """Neither of probes nor of other routes; all of the latter are under way at once."""
    stream = connect(small, opened, request_of(LONG))
    assert stream.recv(12) == b"HTTP/1.1 200"
    for path in (b"/health", b"/openapi.json"):
        requests = (GET.replace(b"/live", path) + b"\r\n") * MAX_PIPELINED
        held = [connect(small, opened, requests) for _ in range(3 * MAX_CONNECTIONS)]
        assert is_healthy(small)
        models = GET.replace(b"/live", b"/v1/models") + b"\r\n"
        wait_for(lambda models=models: answer_on(connect(small, opened, models))[0] == 200)
        for connection in held:
            connection.close()
    assert stream.recv(1)


# ---- the limit of open files ----

FEW_FILES = """
import resource
from peagle.cli.main import main

if __name__ == "__main__":  # not in the engine's process
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    main()
"""


@pytest.mark.slow
def test_silent_connections_do_not_use_up_the_files(
    tmp_path: Path, opened: contextlib.ExitStack
) -> None:
    script = tmp_path / "few_files.py"
    script.write_text(FEW_FILES)
    log = tmp_path / "log"
    words = ["peagle", "serve", "--port", "0", "--no-playground", *map(str, SMALL_CACHE)]
    process = WarmProcess(words, environment(), log, script=script)
    try:
        server = LiveServer("", process, log)
        server.url = wait_until_ready(server)
        assert "at most 128 connections" in server.text
        size = log.stat().st_size
        for _ in range(3):
            for _ in range(150):
                connect(server, opened)
            assert is_healthy(server)
        stream = connect(server, opened, request_of(LONG))
        assert stream.recv(12) == b"HTTP/1.1 200"
        assert "Too many open files" not in server.text
        assert log.stat().st_size - size < 4096
    finally:
        process.kill()
        process.wait()


def test_more_connections_than_files_are_refused() -> None:
    with pytest.raises(UserError, match="--max-connections is 100000000"):
        connection_limit(100_000_000)
    assert connection_limit(3) == 3


# ---- clients without a key, and clients that do not read ----


@contextlib.asynccontextmanager
async def serving(app: Any, connections: Connections) -> AsyncIterator[int]:
    """An application on a free port, its connections limited."""
    config = uvicorn.Config(
        app, http=connections.protocol, log_config=None, lifespan="off", ws="none"
    )
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        running = asyncio.ensure_future(server.serve(sockets=[listening]))
        watching = asyncio.ensure_future(connections.watch())
        try:
            yield listening.getsockname()[1]
        finally:
            watching.cancel()
            server.should_exit = server.force_exit = True
            await running


class Endless:
    """Streams until its client goes; `ended` is set then."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def stream() -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while True:
                part = {"type": "http.response.body", "body": b"a" * 65536, "more_body": True}
                await send(part)
                await asyncio.sleep(0.001)

        streaming = asyncio.ensure_future(stream())
        while (await receive())["type"] != "http.disconnect":
            pass
        streaming.cancel()
        self.ended.set()


KEY = "k" * 24
HOST = b"Host: localhost\r\n"
HOLDER = b"GET /%b HTTP/1.1\r\n" + HOST + b"Authorization: Bearer " + KEY.encode() + b"\r\n\r\n"
STRANGERS = {
    "half a head": GET,
    "no key": (b"GET /work HTTP/1.1\r\n" + HOST + b"\r\n") * MAX_PIPELINED,
    "probes": (GET + b"\r\n") * (MAX_PIPELINED + 1),
    "again and again": b"GET /work HTTP/1.1\r\n" + HOST + b"\r\n",
    "chunks": b"POST /work HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n",
}


async def ask(port: int, data: bytes) -> int:
    """The status of the answer on a new connection; 0 if there is none."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        return int((await reader.readline()).split()[1])
    except (OSError, IndexError):
        return 0
    finally:
        writer.close()


@pytest.mark.parametrize("kind", STRANGERS)
def test_strangers_keep_nobody_out(kind: str) -> None:
    """Whatever they do, those with a key get connections, and probes are answered beyond those."""
    most, released = 30, asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/work":
            await released.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"done"})

    async def strangers(port: int) -> list[asyncio.StreamWriter]:
        writers = []
        for _ in range(2 * most):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(STRANGERS[kind])
            writers.append(writer)
        return writers

    async def ask_on(writers: list[asyncio.StreamWriter]) -> None:
        while kind == "again and again":
            for writer in writers:
                writer.write(STRANGERS[kind])
            await asyncio.sleep(0.05)

    async def run() -> None:
        service: Any = SimpleNamespace(num_open=0)
        counted = CountOpen(app, service)
        guarded = SecurityMiddleware(
            counted, keys=ApiKeys([KEY]), allowed_hosts=["localhost"], max_body_bytes=1000
        )
        connections = Connections(most)
        async with serving(guarded, connections) as port:
            held = await strangers(port)
            asking = asyncio.ensure_future(ask_on(held))
            work = []
            for number in range(most):
                tries = 0
                while await ask(port, HOLDER % b"quick") != 200:
                    tries += 1
                    assert tries < 20
                    await asyncio.sleep(0.05)
                assert await ask(port, GET + b"\r\n") == 200, number
                work.append(asyncio.ensure_future(ask(port, HOLDER % b"work")))
                while service.num_open <= number:
                    await asyncio.sleep(0.01)
                held += await strangers(port) if number in (0, 15, 29) else []
            await asyncio.sleep(0.1)
            assert not any(answer.done() for answer in work)
            for number in range(10):
                assert await ask(port, GET + b"\r\n") == 200, number
                assert await ask(port, HOLDER % b"quick") == 503, number
                held += await strangers(port) if number < 2 else []
            assert len(connections) <= most + RESERVED_CONNECTIONS
            released.set()
            assert await asyncio.gather(*work) == [200] * most
            asking.cancel()
            for writer in held:
                writer.close()

    asyncio.run(run())


def test_a_head_behind_other_requests_has_its_time_too() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(0.05)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def run() -> bytes:
        async with serving(app, Connections(10, head_timeout_s=0.2)) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write((GET + b"\r\n") * 2 + GET)
            answers = await asyncio.wait_for(reader.read(), 20)
            writer.close()
            return answers

    answers = asyncio.run(run())
    assert answers.count(b"HTTP/1.1 200") == 2 and answers.count(b"HTTP/1.1 408") == 1


def test_a_body_behind_its_answer_ends_too() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def run() -> None:
        async with serving(app, Connections(10, head_timeout_s=0.2)) as port:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST / HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n")
            with pytest.raises(OSError):
                while True:
                    writer.write(b"1\r\na\r\n")
                    await asyncio.wait_for(writer.drain(), 20)
                    await asyncio.sleep(0.05)
            writer.close()

    asyncio.run(asyncio.wait_for(run(), 30))


def test_a_new_client_waits_for_few_of_those_who_ask_all_the_time() -> None:
    """Counted in requests, so that no machine is too slow."""
    served: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        served.append(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def run() -> int:
        async with serving(app, Connections(300)) as port:
            many = [await asyncio.open_connection("127.0.0.1", port) for _ in range(200)]
            for _, writer in many:
                writer.write((GET + b"\r\n") * MAX_PIPELINED)
            while not served:
                await asyncio.sleep(0)
            before = len(served)
            assert await ask(port, GET.replace(b"/live", b"/new") + b"\r\n") == 200
            after = served.index("/new")
            while len(served) < 200 * MAX_PIPELINED + 1:  # the others are served as well
                await asyncio.sleep(0.01)
            for _, writer in many:
                writer.close()
            return after - before

    assert asyncio.run(asyncio.wait_for(run(), 60)) < 200


async def _read_by(wait_s: float, num_bytes: int, for_s: float) -> bool:
    """Whether an endless answer has ended, when its client read that many bytes so often."""
    app, loop = Endless(), asyncio.get_running_loop()
    connections = Connections(10, stall_timeout_s=3)
    async with serving(app, connections) as port:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            await loop.sock_connect(client, ("127.0.0.1", port))
            await loop.sock_sendall(client, GET + b"\r\n")
            end = loop.time() + for_s
            while loop.time() < end and not app.ended.is_set():
                if num_bytes:
                    await loop.sock_recv(client, num_bytes)
                await asyncio.sleep(wait_s)
            if app.ended.is_set():
                assert len(connections) == 0
            return app.ended.is_set()


def test_a_client_that_reads_nothing_is_closed_and_a_slow_one_is_served() -> None:
    """4 kB in 100 ms is too little to empty the kernel's buffer of megabytes in this time."""

    async def both() -> list[bool]:
        return list(await asyncio.gather(_read_by(0.1, 0, 60), _read_by(0.1, 4096, 8)))

    assert asyncio.run(both()) == [True, False]


# ---- the end ----

ENDLESS_TEMPLATE = """\
{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}\
{% endfor %}{% endfor %}{{ messages }}"""


@pytest.fixture
def hung(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LiveServer]:
    """A server whose tokenizer's thread is held up by a template that loops.

    Its parameter is how many seconds it drains.
    """
    template = tmp_path / "chat.jinja"
    template.write_text(ENDLESS_TEMPLATE)
    options = ("--no-playground", "--chat-template", template, "--drain-timeout", request.param)
    with running(*options, warm=True) as server, contextlib.ExitStack() as stack:
        body = {"messages": [{"role": "user", "content": "hello"}]}
        connect(server, stack, request_of(body, path="/v1/chat/completions"))
        time.sleep(1)
        yield server


@pytest.mark.slow
@pytest.mark.parametrize("hung", [1], indirect=True)
def test_one_signal_ends_it_though_a_template_loops(hung: LiveServer) -> None:
    """All requests that cannot end in time are told, whatever they wait for."""
    with contextlib.ExitStack() as stack:
        endless = {**LONG, "max_tokens": 2000, "bad_words": ["no such text"]}
        streams = [connect(hung, stack, request_of({**endless, "n": n})) for n in (1, 3)]
        for stream in streams:
            assert stream.recv(12) == b"HTTP/1.1 200"
        whole = connect(hung, stack, request_of({**endless, "stream": False}))
        sending = connect(hung, stack, request_of({"prompt": "x" * 100})[:-50])
        idle = connect(hung, stack)
        running = 'peagle:num_requests_running{engine="0"}'
        wait_for(lambda: hung.metrics()[running] == 5)
        hung.terminate()
        for connection in (whole, sending):
            status, answer, headers = answer_on(connection)
            assert status == 503 and answer["error"]["code"] == "draining"
            assert int(headers["retry-after"]) > 0
        for stream in streams:
            events = events_of(stream)
            assert events[-1] == "[DONE]"
            assert json.loads(events[-2])["error"]["code"] == "draining"
            assert json.loads(events[-3])["choices"]
        assert idle.recv(1) == b""
        assert hung.process.wait(60) == 0
    assert "SIGTERM" in hung.text
    assert "requests did not finish in time" in hung.text
    assert "Traceback" not in hung.text


def events_of(stream: socket.socket) -> list[str]:
    """The events of the rest of a stream in chunks, which must end as HTTP has it."""
    data = b""
    while part := stream.recv(65536):
        data += part
    _, _, rest = data.partition(b"\r\n\r\n")
    body = b""
    while True:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        body += rest[:length]
        assert rest[length : length + 2] == b"\r\n"
        rest = rest[length + 2 :]
        if not length:
            assert rest == b""
            return [event.removeprefix("data: ") for event in body.decode().split("\n\n") if event]


@pytest.mark.parametrize("hung", [600], indirect=True)
def test_two_signals_end_it_though_a_template_loops(hung: LiveServer) -> None:
    """The first alone would let the stream come to its end."""
    with contextlib.ExitStack() as stack:
        stream = connect(hung, stack, request_of({**LONG, "n": 4}))
        assert stream.recv(12) == b"HTTP/1.1 200"
        hung.terminate()
        wait_for(lambda: "SIGTERM" in hung.text)
        hung.terminate()
        assert hung.process.wait(60) == 0
        rest = b""
        with contextlib.suppress(OSError):
            while part := stream.recv(65536):
                rest += part
        assert b"[DONE]" not in rest


ENDLESS_LOADING = """
import time
from pathlib import Path
from peagle.serving import engine_process

def load(*_):  # in the engine's process, which imports this file too
    Path(__file__).with_name("loading").touch()
    time.sleep(1000)

engine_process._load = load
if __name__ == "__main__":
    from peagle.cli.main import main
    main()
"""


def test_it_can_be_interrupted_twice_while_it_loads(tmp_path: Path) -> None:
    script = tmp_path / "endless_loading.py"
    script.write_text(ENDLESS_LOADING)
    log = tmp_path / "log"
    words = ["peagle", "serve", "--port", "0", "--no-playground"]
    process = WarmProcess(words, environment(), log, script=script)
    server = LiveServer("", process, log)
    try:
        wait_for(lambda: "at most" in server.text and (tmp_path / "loading").exists())
        process.send_signal(signal.SIGINT)
        wait_for(lambda: "finishing 0 requests" in server.text)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


# ---- memory ----

STORM = """
import asyncio
from peagle.serving import memory_release as memory

async def main():
    memory._EVERY_S = 0.2
    loaded = asyncio.get_running_loop().create_future()
    loaded.set_result(None)
    returning = asyncio.ensure_future(memory.return_memory(loaded))
    await asyncio.sleep(1)
    rest = memory.resident_bytes()
    storm = [bytes(3000) for _ in range(60000)]
    peak = memory.resident_bytes()
    kept = storm[::2000]  # so that the C library cannot shrink its heap by itself
    del storm
    for _ in range(100):
        await asyncio.sleep(0.2)
        if memory.resident_bytes() < 1.1 * rest:
            break
    print(rest, peak, memory.resident_bytes(), len(kept))

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems keep what was freed")
def test_freed_memory_is_given_back() -> None:
    done = subprocess.run(
        [sys.executable, "-c", STORM],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    rest, peak, after, _ = map(int, done.stdout.split())
    assert peak > rest + 150e6
    assert after < 1.1 * rest, done.stdout
