"""The middleware that guards the server, driven as a server drives it: senders and bodies."""

import asyncio
import base64
import json
import logging
import re
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
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.responses import StreamingResponse
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from peagle.errors import UserError
from peagle.serving import security
from peagle.serving.errors import ApiError
from peagle.serving.hosts import parse_host
from peagle.serving.keys import ApiKeys
from peagle.serving.security import SecurityMiddleware
from serving import asgi
from serving.asgi import JSON, LIMIT, guard, read

KEY, OTHER_KEY, WRONG = "a-key-0123456789abcd", "b-key-0123456789abcd", "wrong-key-9876543210"


@pytest.fixture(scope="module", params=sorted(asgi.APPLICATIONS), autouse=True)
def _each_application(request: pytest.FixtureRequest) -> Iterator[None]:
    """All of this holds before peagle's own routes, and before vLLM's."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(asgi, "guarding", request.param)
        yield


# ---- every answer ----


def test_request_id_and_headers_are_on_every_answer() -> None:
    server = guard(keys=ApiKeys([KEY]))
    cases = [
        (server(path="/health"), 200),
        (server(), 401),
        (server(headers=[]), 400),
        (server(headers={"host": "evil.example"}), 403),
    ]
    ids = set()
    for answer, status in cases:
        assert answer.status == status and answer.is_complete
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["cache-control"] == "no-store"
        assert "vary" not in answer.headers
        ids.add(answer.headers["x-request-id"])
    assert len(ids) == len(cases)
    assert server.scope["state"]["request_id"] in ids


def test_a_clients_request_id_is_kept() -> None:
    server = guard()
    assert server(headers={"x-request-id": "trace-1.a_B"}).headers["x-request-id"] == "trace-1.a_B"
    assert server.scope["state"] == {"request_id": "trace-1.a_B", "cache_salt": b""}
    for unfit in ("", "x" * 129, "a b", "a\n", "\xe4", "a/b", "a\x00", "a\r\nb"):
        ids = {server(headers={"x-request-id": unfit}).headers["x-request-id"] for _ in range(2)}
        assert len(ids) == 2 and all(re.fullmatch(r"[0-9a-f]{32}", made) for made in ids)
    # The state of the server's lifespan stays.
    scope = {**server.scope, "state": {"engines": 2}}
    sent: list[dict] = []

    async def run() -> None:
        async def receive() -> dict:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: dict) -> None:
            sent.append(message)

        await server.app(scope, receive, send)

    asyncio.run(run())
    assert scope["state"]["engines"] == 2 and sent


def test_what_the_application_set_stays_and_files_may_be_cached() -> None:
    async def app(scope: dict, receive: Callable, send: Callable) -> None:
        headers = [(b"cache-control", b"max-age=60"), (b"vary", b"Accept")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body"})

    answer = guard(app, allowed_origins=["https://a.example"])()
    assert answer.headers.get_list("cache-control") == ["max-age=60"]
    assert answer.headers.get_list("vary") == ["Accept", "Origin"]
    assert "cache-control" not in guard()(path="/static/playground.js").headers


def test_other_scopes() -> None:
    app = FastAPI()
    started: list[bool] = []
    app.router.on_startup.append(lambda: started.append(True))
    guarded = SecurityMiddleware(app, keys=ApiKeys(), allowed_hosts=["*"], max_body_bytes=LIMIT)
    with TestClient(guarded) as client:
        assert started == [True]
        with pytest.raises(WebSocketDisconnect) as caught, client.websocket_connect("/"):
            pass
        assert caught.value.code == 1008


@pytest.mark.parametrize(
    "options",
    [
        {"max_body_bytes": 0},
        {"body_timeout_s": 0},
        {"body_timeout_s": float("nan")},
        {"allowed_hosts": ["a:1"]},
        {"allowed_origins": ["a"]},
    ],
)
def test_bad_options(options: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="expected"):
        guard(**options)


# ---- Host ----


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST.:1", "127.0.0.1:8000", "[0:0::1]:8000"])
def test_own_hosts(host: str) -> None:
    assert guard()(headers={"host": host}).status == 200


def test_dns_rebinding_is_refused() -> None:
    # The page's own name points to 127.0.0.1 by now: for the browser this is the same origin.
    headers = {"host": "evil.example:8000", "origin": "http://evil.example:8000", **JSON}
    answer = guard()("POST", "/v1/completions", headers, b"{}")
    assert answer.status == 403 and answer.error["code"] == "host_not_allowed"
    assert "--allowed-host evil.example" in answer.error["message"]
    assert guard(allowed_hosts=["Evil.example"])("POST", "/", headers, b"{}").status == 200
    assert guard(allowed_hosts=["*"])("POST", "/", headers, b"{}").status == 200


@pytest.mark.parametrize("allowed", ["*", "localhost"])
@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("host", "localhost"), ("host", "localhost")],
        [("host", "localhost, evil.example")],
        [("host", "")],
        [("host", "localhost:port")],
    ],
)
def test_malformed_hosts(headers: list[tuple[str, str]], allowed: str) -> None:
    answer = guard(allowed_hosts=[allowed])(headers=headers)
    assert answer.status == 400 and "Host header" in answer.error["message"]


HOST_TEXT = st.text(st.characters(max_codepoint=255), max_size=30)
NEAR_HOSTS = st.from_regex(r"(?i)[ @.]?(localhost|127\.0\.0\.1|\[::1\]|[a-f.:]{1,9})[.:@0-9]{0,7}")


@pytest.mark.slow
@settings(deadline=None)
@given(HOST_TEXT | NEAR_HOSTS.filter(lambda text: all(ord(c) < 256 for c in text)))
def test_only_allowed_names_pass(host: str) -> None:
    answer = guard()(headers={"host": host})
    parsed = parse_host(host.encode("latin-1"))
    if parsed is None:
        assert answer.status == 400
    else:
        is_own = parsed.name in {"localhost", "127.0.0.1", "[::1]"}
        assert answer.status == (200 if is_own else 403)


# ---- Origin ----

PAGE = "https://chat.example.com"


@pytest.mark.parametrize("origin", ["http://localhost:8000", "https://LOCALHOST:8000"])
def test_own_pages_may_post(origin: str) -> None:
    headers = {"origin": origin, "sec-fetch-site": "same-origin", **JSON}
    answer = guard()("POST", "/v1/completions", headers, b"{}")
    assert answer.status == 200
    assert "access-control-allow-origin" not in answer.headers


FOREIGN = ["null", "http://evil.example", "http://localhost:3000", "http://localhost:8000.evil", ""]


@pytest.mark.parametrize("origin", FOREIGN)
@pytest.mark.parametrize("allowed", [(), (PAGE,)])
def test_foreign_pages_are_refused(origin: str, allowed: tuple[str, ...]) -> None:
    server = guard(allowed_origins=allowed)
    for method, path in [("POST", "/"), ("GET", "/v1/models"), ("OPTIONS", "/"), ("DELETE", "/x")]:
        headers = {"origin": origin, "access-control-request-method": "POST", **JSON}
        answer = server(method, path, headers)
        assert answer.status == 403 and answer.error["code"] == "origin_not_allowed"
        assert ascii(origin) in answer.error["message"]
        assert not any(name.startswith("access-control") for name in answer.headers)
    for method, path in [("GET", "/"), ("HEAD", "/static/a.css")]:
        answer = server(method, path, {"origin": origin})
        assert answer.status == 200 and "access-control-allow-origin" not in answer.headers


def test_two_origins_are_foreign() -> None:
    headers = [("host", "localhost"), *[("origin", "http://localhost")] * 2]
    assert guard()("GET", "/v1/models", headers).status == 403


def test_cross_site_posts_without_origin_are_refused() -> None:
    headers = {"sec-fetch-site": "cross-site", **JSON}
    assert guard()("POST", "/v1/completions", headers, b"{}").status == 403
    assert guard()("GET", "/", headers).status == 200  # a link to the playground
    for site in ("same-origin", "same-site", "none"):
        headers = {"sec-fetch-site": site, **JSON}
        assert guard()("POST", "/v1/completions", headers, b"{}").status == 200


@pytest.mark.parametrize(
    "content_type",
    ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"],
)
def test_a_form_of_another_site_is_refused_twice(content_type: str) -> None:
    form = {"content-type": content_type}
    body = b'{"prompt": "x", "a": "="}'
    assert guard()("POST", "/v1/completions", {"origin": "null", **form}, body).status == 403
    # An old browser says neither where the form comes from nor what it is for.
    assert guard()("POST", "/v1/completions", form, body).status == 415


@pytest.mark.parametrize("allowed", ["https://Chat.example.com:443/", "*"])
def test_allowed_pages_get_cors_answers(allowed: str) -> None:
    server = guard(allowed_origins=[allowed], keys=ApiKeys([KEY]))
    asked = {"access-control-request-method": "POST"}
    asked["access-control-request-headers"] = "authorization, content-type,x-stainless-os"
    answer = server("OPTIONS", "/v1/chat/completions", {"origin": PAGE, **asked})
    assert answer.status == 204 and answer.is_complete and answer.body == b""
    assert "content-length" not in answer.headers
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert answer.headers["access-control-allow-headers"] == asked["access-control-request-headers"]
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert answer.headers["vary"] == "Origin" and "x-request-id" in answer.headers
    assert "access-control-allow-credentials" not in answer.headers

    headers = {"origin": PAGE, "sec-fetch-site": "cross-site", **JSON}
    refused = server("POST", "/v1/completions", headers, b"{}")
    accepted = server("POST", "/", {**headers, "authorization": f"Bearer {KEY}"}, b"{}")
    assert (refused.status, accepted.status) == (401, 200)
    for answer in (refused, accepted):  # a page can only read an error that it may read
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert "X-Request-ID" in answer.headers["access-control-expose-headers"]
    assert server("OPTIONS", "/", {"origin": PAGE}).status == 401  # no preflight
    assert server(path="/health").headers["vary"] == "Origin"
    assert server("POST", "/", {"origin": "null", **JSON}).status == 403


@pytest.mark.parametrize("names", ["a b", "a\x00", "(", "", ",", "a" * 50_000 + "(", "a," * 5000])
def test_odd_preflights_are_not_echoed(names: str) -> None:
    headers = {"origin": PAGE, "access-control-request-method": "POST"}
    headers["access-control-request-headers"] = names
    answer = guard(allowed_origins=[PAGE])("OPTIONS", "/", headers)
    assert answer.status == 204 and "access-control-allow-headers" not in answer.headers


# ---- keys ----


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def basic(key: str) -> dict[str, str]:
    return {"authorization": "Basic " + base64.b64encode(f"me:{key}".encode()).decode()}


def test_keys_open_and_salt() -> None:
    server = guard(keys=ApiKeys([KEY, OTHER_KEY]))
    salts = []
    for headers in (bearer(KEY), basic(KEY), bearer(OTHER_KEY)):
        assert server(headers=headers).status == 200
        salts.append(server.scope["state"]["cache_salt"])
    assert salts[0] == salts[1] != salts[2] and all(isinstance(s, bytes) and s for s in salts)


@pytest.mark.parametrize(
    "headers", [{}, bearer(WRONG), basic(WRONG), bearer(""), bearer(KEY + "x")]
)
def test_without_a_key_nothing_opens(headers: dict[str, str]) -> None:
    server = guard(keys=ApiKeys([KEY]))
    for path in (
        "/",
        "/v1/models",
        "/metrics",
        "/ready",
        "/static/a.js",
        "/health/",
        "/Health",
        "/live/",
    ):
        answer = server(path=path, headers=headers)
        assert answer.status == 401 and answer.error["type"] == "authentication_error"
        assert answer.headers["www-authenticate"] == "Bearer"
        page = server(path=path, headers={"accept": "text/html,*/*;q=0.8", **headers})
        assert page.status == 401
        assert page.headers["www-authenticate"] == 'Basic realm="peagle"'
    for path in ("/live", "/health", "/ping"):
        assert server(path=path, headers=headers).status == 200
        assert server.scope["state"]["cache_salt"] == b""


def test_two_authorizations_are_none() -> None:
    value = f"Bearer {KEY}"
    headers = [("host", "localhost"), ("authorization", value), ("authorization", value)]
    assert guard(keys=ApiKeys([KEY]))(headers=headers).status == 401


def test_keys_are_told_to_nobody(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    server = guard(keys=ApiKeys([KEY]))
    for headers in (bearer(KEY), bearer(WRONG), basic(WRONG), {"authorization": WRONG}):
        answer = server("POST", headers={**headers, "content-type": "text/plain"})
        assert answer.status in (401, 415)
        everything = answer.body + b"".join(b"".join(pair) for pair in answer.raw_headers)
        for key in (KEY, WRONG):
            assert key.encode() not in everything
    assert KEY not in caplog.text and WRONG not in caplog.text
    assert KEY not in repr(vars(server.app))


# ---- content type ----


@pytest.mark.parametrize(
    "value",
    [
        *("application/json", "Application/JSON", "application/json;", "application/json; a=b"),
        *("application/json;charset=utf-8", 'application/json ; charset="UTF-8"; a="b;c"'),
    ],
)
def test_json_is_taken(value: str) -> None:
    for method in ("POST", "PUT", "PATCH"):
        answer = guard()(method, "/invocations", {"content-type": value}, b"{}")
        assert answer.status == 200 and answer.body == b"got {}"


@pytest.mark.parametrize(
    "value",
    [
        *("", "text/plain", "application/jsonp", "application/json, text/plain", "json"),
        *(
            "text/plain; application/json",
            "application/json; charset=latin-1",
            "application/json; a",
        ),
        *('application/json; a="b', "application/json; charset=utf-8; charset=utf-16"),
        *('application/json; charset="utf-16"', "application/json; a=b" * 3000 + "("),
    ],
)
def test_everything_else_is_not(value: str) -> None:
    for path in ("/v1/completions", "/invocations"):
        answer = guard()("POST", path, {"content-type": value}, b"{}")
        assert answer.status == 415 and "expected application/json" in answer.error["message"]


def test_content_type_is_needed_once() -> None:
    assert "absent" in guard()("POST", body=b"{}").error["message"]
    headers = [("host", "localhost"), ("content-type", "application/json"), ("content-type", "a/b")]
    assert guard()("POST", headers=headers, body=b"{}").status == 415
    assert guard()("GET").status == 200


# ---- bodies ----


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


# ---- with what the server is built of ----


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
