"""The ASGI middleware that checks each request before the routes.

A request passes, in this order: its Host (against DNS rebinding), its Origin (against other sites
in the same browser), its key, its content type, and the limits of its body.

It guards vLLM's server too, inside vLLM's process (`vllm_guard`): this file and its imports use the
standard library alone, as of Python 3.10.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import uuid
from collections.abc import Awaitable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from peagle.errors import UserError
from peagle.serving.errors import ApiError, reason_for_absence
from peagle.serving.hosts import Host, allowed_host, allowed_origin, parse_host, parse_origin
from peagle.serving.keys import ApiKeys, bearer_key

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_OPEN_PATHS = frozenset({"/live", "/health", "/ping"})
_STATIC = "/static/"
_ADMIN = "/admin/"
_SAFE_METHODS = frozenset({"GET", "HEAD"})
_BODY_METHODS = frozenset({"POST", "PUT", "PATCH"})
_FIXED_HEADERS = [(b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"no-referrer")]
_EXPOSED_HEADER = (
    b"access-control-expose-headers",
    b"X-Request-ID, Retry-After, WWW-Authenticate, X-Peagle-Recorded",
)
_TOKEN = r"[A-Za-z0-9!#$%&'*+.^_`|~-]+"
_JSON = re.compile(
    rf'application/json((?:[ \t]*;[ \t]*{_TOKEN}=(?:{_TOKEN}|"[^"\\]*"))*)[ \t]*;?',
    re.ASCII | re.IGNORECASE,
)
_PARAMETER = re.compile(rf';[ \t]*({_TOKEN})=(?:({_TOKEN})|"([^"\\]*)")')
_HEADER_NAMES = re.compile(rf"{_TOKEN}(?:[ \t]*,[ \t]*{_TOKEN})*".encode())
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")
_PREFLIGHT_AGE_S = 600
# How long a refused body is still read, so that its client comes to read the answer.
_LINGER_S = 2.0

_Pairs = list[tuple[bytes, bytes]]
_Headers = dict[bytes, list[bytes]]
_T = TypeVar("_T")


class SecurityMiddleware:
    """Guards an ASGI application. To be the outermost layer, so that it sees every answer.

    For the application it sets `scope["state"]["request_id"]` (a string) and `["cache_salt"]`
    (bytes, per API key; empty without keys). A body that is refused while the application reads it
    reaches the application as an `ApiError` from `receive`; the client gets that error whatever
    the application makes of it, unless an answer has begun. An `ApiError` that the application
    raises becomes its answer. Web sockets are refused.

    Args:
        keys: open all routes but /live, /health, /ping and those below /admin/; without keys these
            routes are open.
        admin_keys: open the routes below /admin/, to no web page.
        allowed_hosts: names or addresses without port that the Host header may give, "*" for any;
            see `default_allowed_hosts`.
        allowed_origins: origins of foreign web pages that may use the server, such as
            "https://chat.example.com"; "*" for any.
        body_timeout_s: seconds from the first read of a body to its end.
        has_every_route: the application may have any route. Otherwise a body of any type may go to
            a route that peagle lacks: the application answers with the reason.

    Raises:
        UserError: a host, an origin or a limit that is none.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: ApiKeys,
        allowed_hosts: Iterable[str],
        max_body_bytes: int,
        allowed_origins: Iterable[str] = (),
        body_timeout_s: float = 30.0,
        has_every_route: bool = False,
        admin_keys: ApiKeys | None = None,
    ) -> None:
        if max_body_bytes < 1:
            raise UserError(f"max_body_bytes is {max_body_bytes}: expected at least 1.")
        if not body_timeout_s > 0:
            raise UserError(f"body_timeout_s is {body_timeout_s}: expected more than 0 seconds.")
        self.app = app
        self.keys, self.admin_keys = keys, admin_keys
        self.max_body_bytes = max_body_bytes
        self.body_timeout_s = body_timeout_s
        self.has_every_route = has_every_route
        hosts, origins = set(allowed_hosts), set(allowed_origins)
        self._any_host = "*" in hosts
        self._hosts = {allowed_host(name) for name in hosts - {"*"}}
        self._any_origin = "*" in origins
        self._origins = {allowed_origin(origin) for origin in origins - {"*"}}
        # Caches must not give one origin the answer for another.
        self._answer_headers = [*_FIXED_HEADERS, *([(b"vary", b"Origin")] if origins else [])]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or pass it on to the application."""
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": 1008})
        request_headers: _Headers = {}
        for name, value in scope["headers"]:
            request_headers.setdefault(name, []).append(value)
        # The client's X-Request-ID if it is fit for logs and headers, else a new one.
        given = request_headers.get(b"x-request-id", [b""])[0]
        request_id = given.decode() if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        state = scope.setdefault("state", {})
        state["request_id"], state["cache_salt"] = request_id, b""
        headers = [(b"x-request-id", request_id.encode()), *self._answer_headers]
        if not scope["path"].startswith(_STATIC):
            headers.append((b"cache-control", b"no-store"))
        exchange = _Exchange(receive, send, headers, self.max_body_bytes, self.body_timeout_s)
        try:
            preflight = self._check(scope, request_headers, headers)
        except ApiError as error:
            return await exchange.refuse(error)
        if preflight is not None:
            return await exchange.answer(204, preflight, b"")
        try:
            await self.app(scope, exchange.receive, exchange.send)
        except ApiError as error:
            exchange.failure = exchange.failure or error
        except Exception:
            if exchange.failure is None:  # else it follows from the failure, which is answered
                raise
        if exchange.failure is not None and not exchange.has_started:
            await exchange.refuse(exchange.failure)

    def _check(self, scope: Scope, headers: _Headers, answer_headers: _Pairs) -> _Pairs | None:
        """Refuse by an ApiError, or extend the answer's headers; return a preflight's answer."""
        method, path = scope["method"], scope["path"]
        host = self._check_host(headers)
        if is_admin := bool(self.admin_keys) and path.startswith(_ADMIN):
            _refuse_pages(headers)
        origin = self._check_origin(headers, host, method, path)
        if origin is not None:
            answer_headers += [(b"access-control-allow-origin", origin), _EXPOSED_HEADER]
            if method == "OPTIONS" and b"access-control-request-method" in headers:
                return _preflight_headers(headers)
        keys = self.admin_keys if is_admin else self.keys
        if keys and path not in _OPEN_PATHS:
            scope["state"]["cache_salt"] = _check_key(headers, keys)
        lacks_route = not self.has_every_route and reason_for_absence(path) is not None
        if method in _BODY_METHODS and not lacks_route:
            _check_content_type(headers)
        self._check_content_length(headers)
        return None

    def _check_host(self, headers: _Headers) -> Host:
        values = headers.get(b"host", ())
        if len(values) != 1:
            raise ApiError(400, f"{len(values)} Host headers came: expected exactly one.")
        host = parse_host(values[0])
        if host is None:
            raise ApiError(
                400,
                f"The Host header is {_quoted(values[0])}: expected a name or an address, with or "
                "without a port.",
            )
        if not self._any_host and host.name not in self._hosts:
            raise ApiError(
                403,
                f"The Host header names {host.name!r}, which this server does not answer to: if "
                f"that is its name, start it with --allowed-host {host.name}.",
                code="host_not_allowed",
            )
        return host

    def _check_origin(self, headers: _Headers, host: Host, method: str, path: str) -> bytes | None:
        """Return the origin that gets CORS answers, if it is elsewhere and allowed."""
        origins = headers.get(b"origin", ())
        is_foreign = bool(origins)
        if len(origins) == 1:
            origin = parse_origin(origins[0])
            if origin is not None and (self._any_origin or origin in self._origins):
                return origins[0]
            is_foreign = origin is None or not origin.is_same_as(host)
        if is_foreign:
            if not (method in _SAFE_METHODS and (path == "/" or path.startswith(_STATIC))):
                shown = ", ".join(map(_quoted, origins))
                raise ApiError(
                    403,
                    f"The request comes from a web page of {shown}, not of this server: to let "
                    "that page use it, start it with --allowed-origin and this origin. Behind a "
                    "proxy, let the proxy pass the Host header on.",
                    code="origin_not_allowed",
                )
        elif method not in _SAFE_METHODS and b"cross-site" in headers.get(b"sec-fetch-site", ()):
            raise ApiError(
                403,
                "The browser says that a page of another site sent this request (Sec-Fetch-Site: "
                "cross-site): send it from a page of this server, or start the server with "
                "--allowed-origin and that page's origin.",
                code="origin_not_allowed",
            )
        return None

    def _check_content_length(self, headers: _Headers) -> None:
        values = headers.get(b"content-length")
        if values is None:
            return
        # Nineteen digits are more than any body has, and few enough to convert without a thought.
        if len(values) != 1 or not values[0].isdigit() or len(values[0]) > 19:
            shown = ", ".join(map(_quoted, values))
            raise ApiError(400, f"The Content-Length header is {shown}: expected one number.")
        if int(values[0]) > self.max_body_bytes:
            raise _too_large(f"{int(values[0])} bytes", self.max_body_bytes)


class _Exchange:
    """One request and its answer: limits the body on the way in, adds headers on the way out."""

    def __init__(
        self, receive: Receive, send: Send, headers: _Pairs, max_bytes: int, timeout_s: float
    ) -> None:
        self._receive, self._send, self._headers = receive, send, headers
        self._max_bytes, self._timeout_s = max_bytes, timeout_s
        self._num_bytes = 0
        self._deadline: float | None = None
        self._body_has_ended = False
        self._is_refused = False
        self.failure: ApiError | None = None
        self.has_started = False

    async def receive(self) -> Message:
        """Receive as in ASGI; raise an ApiError once if the body is too large or too slow."""
        if self.failure is not None:
            return {"type": "http.disconnect"}
        if self._body_has_ended:  # what comes now is the disconnection, whenever that is
            return await self._receive()
        if self._deadline is None:
            self._deadline = asyncio.get_running_loop().time() + self._timeout_s
        try:
            message = await _until(self._deadline, self._receive())
        except TimeoutError:
            self.failure = ApiError(
                408,
                f"Of the body {self._num_bytes} bytes came in {self._timeout_s:g} seconds: "
                "expected all of it. Send it faster, or less of it.",
                headers={"Connection": "close"},
            )
            raise self.failure from None
        self._num_bytes += len(message.get("body", b""))
        self._body_has_ended = not message.get("more_body", False)  # a disconnection has neither
        if self._num_bytes > self._max_bytes:
            self.failure = _too_large(f"at least {self._num_bytes} bytes", self._max_bytes)
            raise self.failure
        return message

    async def send(self, message: Message) -> None:
        """Send as in ASGI; replace the application's answer to a failed body by that failure."""
        if self._is_refused:
            return
        if message["type"] == "http.response.start":
            if self.failure is not None and not self.has_started:
                return await self.refuse(self.failure)
            own = message.get("headers", ())
            names = {name for name, _ in own}
            added = (h for h in self._headers if h[0] not in names or h[0] == b"vary")
            message = {**message, "headers": [*own, *added]}
            self.has_started = True
        await self._send(message)

    async def refuse(self, error: ApiError) -> None:
        """Answer with `error`; drop later messages of the application."""
        self._is_refused = True
        headers = [(name.lower().encode(), v.encode()) for name, v in error.headers.items()]
        headers.append((b"content-type", b"application/json"))
        await self.answer(error.status, headers, json.dumps(error.body()).encode())

    async def answer(self, status: int, headers: _Pairs, body: bytes) -> None:
        """Send a whole answer."""
        self.has_started = True
        if body:
            headers = [*headers, (b"content-length", str(len(body)).encode())]
        headers = [*headers, *self._headers]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": True})
        if status != 408:  # a slow client has been waited for
            # A connection that is closed while its client sends loses the answer.
            with suppress(TimeoutError):
                await _until(asyncio.get_running_loop().time() + _LINGER_S, self._discard_body())
        await self._send({"type": "http.response.body", "body": b""})

    async def _discard_body(self) -> None:
        while not self._body_has_ended:
            message = await self._receive()
            self._body_has_ended = not message.get("more_body", False)


async def _until(deadline: float, coming: Awaitable[_T]) -> _T:
    """Await something until a time of the event loop's clock; then raise a TimeoutError."""
    if sys.version_info >= (3, 11):  # noqa: UP036 (vLLM may run Python 3.10)
        async with asyncio.timeout_at(deadline):
            return await coming
    try:  # this makes a task of each wait, which costs 0.1 ms
        return await asyncio.wait_for(coming, deadline - asyncio.get_running_loop().time())
    except asyncio.TimeoutError:  # noqa: UP041 (in Python 3.10 not the built-in one)
        raise TimeoutError from None


def _too_large(size: str, limit: int) -> ApiError:
    return ApiError(
        413,
        f"The body has {size}: expected at most {limit}. Send less at once, or start the server "
        "with a larger --max-body-bytes.",
        headers={"Connection": "close"},
    )


def _check_key(headers: _Headers, keys: ApiKeys) -> bytes:
    """Return the salt of the key that came."""
    values = headers.get(b"authorization", ())
    key = bearer_key(values[0]) if len(values) == 1 else None
    salt = None if key is None else keys.salt_of(key)
    if salt is not None:
        return salt
    wants_page = any(b"text/html" in value.lower() for value in headers.get(b"accept", ()))
    found = "That API key is not one of this server's" if key else "No API key came"
    raise ApiError(
        401,
        f"{found}: send the header 'Authorization: Bearer KEY', or give the key as the "
        "password where a browser asks for one.",
        code="invalid_api_key",
        headers={"WWW-Authenticate": 'Basic realm="peagle"' if wants_page else "Bearer"},
    )


def _refuse_pages(headers: _Headers) -> None:
    """Refuse what a browser sends for a web page, also for a page of this server."""
    if b"origin" in headers or b"sec-fetch-site" in headers:
        raise ApiError(
            403,
            "The request comes from a web page, and pages cannot administer this server: send it "
            "with curl or a script.",
            code="origin_not_allowed",
        )


def _check_content_type(headers: _Headers) -> None:
    """Refuse bodies that a browser sends to other sites without asking: any but JSON."""
    values = headers.get(b"content-type", ())
    if len(values) != 1 or not _is_json(values[0]):
        shown = ", ".join(map(_quoted, values)) or "absent"
        raise ApiError(
            415,
            f"The Content-Type header is {shown}: expected application/json, in UTF-8.",
            code="unsupported_media_type",
        )


def _is_json(content_type: bytes) -> bool:
    if content_type == b"application/json":  # nearly always
        return True
    match = _JSON.fullmatch(content_type.decode("latin-1"))
    if match is None:
        return False
    parameters = _PARAMETER.findall(match[1])
    charsets = [token or quoted for name, token, quoted in parameters if name.lower() == "charset"]
    return all(charset.lower() in ("utf-8", "utf8") for charset in charsets)


def _preflight_headers(headers: _Headers) -> _Pairs:
    """Return the methods and headers that a page of an allowed origin may send."""
    asked = b", ".join(headers.get(b"access-control-request-headers", ()))
    answer = [
        (b"access-control-allow-methods", b"GET, HEAD, POST"),
        (b"access-control-max-age", str(_PREFLIGHT_AGE_S).encode()),
    ]
    if _HEADER_NAMES.fullmatch(asked):  # clients have many headers of their own
        answer.append((b"access-control-allow-headers", asked))
    return answer


def _quoted(value: bytes) -> str:
    """Return a header's value as an error names it."""
    text = value[:100].decode("latin-1")
    return ascii(text) + ("..." if len(value) > 100 else "")
