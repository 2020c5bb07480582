"""The middleware that guards the server: how large and how slow a body may be."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, Request
from starlette.responses import StreamingResponse

from peagle.serving import security
from peagle.serving.errors import ApiError
from serving import asgi
from serving.asgi import JSON, LIMIT, guard, read


@pytest.fixture(scope="module", params=sorted(asgi.APPLICATIONS), autouse=True)
def _each_application(request: pytest.FixtureRequest) -> Iterator[None]:
    """All of this holds before peagle's own routes, and before vLLM's."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(asgi, "guarding", request.param)
        yield


def test_a_length_over_the_limit_is_refused_at_once() -> None:
    called: list[bool] = []

    async def app(scope: dict, receive: Callable, send: Callable) -> None:
        called.append(True)

    answer = guard(app)("POST", "/", {"content-length": str(LIMIT + 1), **JSON}, b"x" * (LIMIT + 1))
    assert answer.status == 413 and not called
    assert "1001" in answer.error["message"] and "1000" in answer.error["message"]
    assert answer.headers["connection"] == "close"
    body = b"x" * LIMIT
    assert guard()("POST", "/", {"content-length": str(LIMIT), **JSON}, body).body == b"got " + body


@pytest.mark.parametrize("value", ["", "-1", "+1", "1.0", "0x1", "1 1", "1,1", "²", "9" * 5000])
def test_bad_lengths(value: str) -> None:
    answer = guard()("POST", "/", {"content-length": value, **JSON})
    assert answer.status == 400 and "Content-Length" in answer.error["message"]


def test_two_lengths_are_bad() -> None:
    headers = [("host", "localhost"), ("content-length", "2"), ("content-length", "2")]
    assert guard()("POST", headers=[*headers, *JSON.items()], body=b"{}").status == 400


CHUNKS: list[bytes | float] = [b"x" * 400] * 4


def test_chunks_are_counted_as_they_come() -> None:
    answer = guard()("POST", "/", JSON, CHUNKS)
    assert answer.status == 413 and "1200" in answer.error["message"]
    assert answer.headers.get_list("x-request-id")
    fine = guard()("POST", "/", JSON, [b"x" * 400, b"", b"x" * 600])
    assert fine.status == 200 and len(fine.body) == 1004


@pytest.mark.parametrize("num_answers", [0, 1, 2])
def test_an_application_that_swallows_the_refusal_cannot_answer(num_answers: int) -> None:
    seen: list[Any] = []

    async def app(scope: dict, receive: Callable, send: Callable) -> None:
        try:
            await read(receive)
        except ApiError as error:
            seen.append(error.status)
        seen.append(await receive())
        for _ in range(num_answers):
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"fine"})

    answer = guard(app)("POST", "/", JSON, CHUNKS)
    assert answer.status == 413 and "1000" in answer.error["message"]
    assert seen == [413, {"type": "http.disconnect"}]


def test_what_the_refusal_breaks_is_not_the_servers_failure() -> None:
    async def app(scope: dict, receive: Callable, send: Callable) -> None:
        try:
            await read(receive)
        except ApiError as error:
            both = [error, RuntimeError("and what follows")]
            raise ExceptionGroup("of a task group", both) from error

    answer = guard(app)("POST", "/", JSON, CHUNKS)
    assert answer.status == 413 and "1000" in answer.error["message"]


def test_an_answer_that_has_begun_is_cut() -> None:
    async def app(scope: dict, receive: Callable, send: Callable) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"partial", "more_body": True})
        await read(receive)

    answer = guard(app)("POST", "/", JSON, CHUNKS)
    assert (answer.status, answer.body, answer.is_complete) == (200, b"partial", False)


def test_other_failures_of_the_application_are_its_own() -> None:
    async def app(scope: dict, receive: Callable, send: Callable) -> None:
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        guard(app)()


@pytest.mark.parametrize("body", [[30.0, b"{}"], [b"{", 30.0, b"}"], [b"{", *[0.02, b" "] * 99]])
@pytest.mark.parametrize("version", [(3, 10), sys.version_info[:2]])
def test_slow_bodies(
    body: list[bytes | float], version: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(security, "sys", SimpleNamespace(version_info=version))
    server = guard(body_timeout_s=0.1)
    answer = server("POST", "/", JSON, body)
    assert answer.status == 408 and "0.1 seconds" in answer.error["message"]
    assert answer.headers["connection"] == "close"
    assert server.unread  # it has been waited for long enough


def test_the_clock_runs_only_while_the_body_is_awaited() -> None:
    async def app(scope: dict, receive: Callable, send: Callable) -> None:
        await asyncio.sleep(0.2)
        assert await read(receive) == b"{}"
        done, _ = await asyncio.wait([asyncio.ensure_future(receive())], timeout=0.2)
        assert not done
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body"})

    assert guard(app, body_timeout_s=0.1)("POST", "/", JSON, b"{}").status == 200


@pytest.mark.parametrize("body", [b"{}", [b"{", b"}"]])
def test_disconnection_passes_on(body: bytes | list[bytes | float]) -> None:
    seen: list[str] = []

    async def app(scope: dict, receive: Callable, send: Callable) -> None:
        await read(receive)
        for _ in range(2):
            seen.append((await receive())["type"])

    guard(app)("POST", "/", JSON, body, leaves=True)
    assert seen == ["http.disconnect"] * 2


def test_disconnection_within_the_body_passes_on() -> None:
    async def app(scope: dict, receive: Callable, send: Callable) -> None:
        assert await receive() == {"type": "http.disconnect"}

    server = guard(app)
    assert server("POST", "/", JSON, [], leaves=True).status == 0


def test_a_refusal_reads_the_body_so_that_its_client_reads_the_answer() -> None:
    for headers in ({"content-type": "text/plain"}, {"content-length": "2000", **JSON}):
        server = guard()
        answer = server("POST", "/", headers, [b"x", 0.05, b"x"])
        assert answer.is_complete and answer.status in (413, 415)
        assert server.unread == []


def test_a_refusal_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(security, "_LINGER_S", 0.1)
    server = guard()
    answer = server("POST", "/", {"content-type": "text/plain"}, [b"x", 30.0, b"x"])
    assert answer.is_complete and answer.status == 415
    assert server.unread == [b"x"]


# ---- with what the server is built of ---------------------------------------------------------


def fastapi_app() -> FastAPI:
    app = FastAPI()

    @app.post("/json")
    async def take(body: dict[str, Any], request: Request) -> dict[str, Any]:
        return {"n": len(body["text"]), "id": request.state.request_id}

    @app.post("/stream")
    async def stream(request: Request) -> StreamingResponse:
        async def lines() -> AsyncIterator[str]:
            for number in range(3):
                assert not await request.is_disconnected()
                yield f"{number}\n"

        await request.json()
        return StreamingResponse(lines())

    return app


async def post_all(app: Any) -> list[httpx.Response]:
    async def chunks() -> AsyncIterator[bytes]:
        yield b'{"text": "'
        for _ in range(30):
            yield b"x" * 100
        yield b'"}'

    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost:8000") as client:
        return [
            await client.post("/json", json={"text": "abc"}, headers={"x-request-id": "mine"}),
            await client.post("/json", content=chunks(), headers=JSON),
            await client.post("/stream", json={}),
            await client.post("/stream", content=chunks(), headers=JSON),
            await client.get("/nowhere"),
        ]


def test_fastapi_behind_it() -> None:
    answers = asyncio.run(post_all(guard(fastapi_app()).app))
    assert [answer.status_code for answer in answers] == [200, 413, 200, 413, 404]
    assert answers[0].json() == {"n": 3, "id": "mine"}
    assert answers[2].text == "0\n1\n2\n"
    assert all(answer.headers.get_list("x-request-id") for answer in answers)
    for answer in (answers[1], answers[3]):
        assert "at most 1000" in answer.json()["error"]["message"]


@pytest.fixture
def port() -> Iterator[int]:
    """Of a guarded application behind uvicorn."""
    config = uvicorn.Config(
        guard(fastapi_app(), body_timeout_s=0.5).app, port=0, log_level="error", lifespan="off"
    )
    server = uvicorn.Server(config)
    ready = threading.Event()
    startup = server.startup

    async def signalled(sockets: Any = None) -> None:
        await startup(sockets)
        ready.set()

    server.startup = signalled  # pyright: ignore[reportAttributeAccessIssue]
    thread = threading.Thread(target=server.run)
    thread.start()
    assert ready.wait(30)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    thread.join(30)
    assert not thread.is_alive()


def test_a_client_that_sends_too_much_learns_why(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(security, "_LINGER_S", 25.0)  # this machine may be busy
    # This client sends all before it reads: a server that hangs up early shows it a broken pipe.
    request = urllib.request.Request(f"http://127.0.0.1:{port}/json", b"x" * 8_000_000, JSON)
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=30)
    with caught.value as answer:
        assert answer.code == 413
        assert "has 8000000 bytes" in json.load(answer)["error"]["message"]


def test_a_client_that_stops_sending_is_hung_up_on(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
        head = "POST /json HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        client.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n1\r\n{{\r\n".encode())
        answer = b"".join(iter(lambda: client.recv(4096), b""))  # up to the end of the connection
    assert answer.startswith(b"HTTP/1.1 408") and b"Of the body 1 bytes" in answer
