"""Control calls and single streams of a server with OpenAI's interface, on httpx.

No call uses a proxy or follows a redirect. httpx is imported with the first call.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from peagle.client.answers import (
    AnswerEvent,
    ForeignAnswer,
    StreamedAnswer,
    error_message,
    printable_line,
)
from peagle.errors import UserError

if TYPE_CHECKING:
    from httpx import Response

KEY_VARIABLE = "PEAGLE_API_KEY"
CONNECT_S = 10.0
_POLL_S = 0.1  # between two looks at whether the user wants to stop
_MAX_BYTES = 64 << 20  # of a body


class NoAnswer(UserError):
    """A server that cannot be reached, or an answer that broke off; `reason` lacks the URL."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class ApiReply:
    """An answer: status of HTTP, headers (names in any case), body."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def text(self) -> str:
        """Return the body as text."""
        return self.body.decode(errors="replace")


class ApiClient:
    """Calls a server with OpenAI's interface.

    Args:
        url: like http://127.0.0.1:8000, with or without /v1 at its end; `base` has it without.
        key: sent as a bearer token; None or "" sends none.
        option: the option that names the URL, for messages.
        timeout_s: limit of each step of an exchange (CONNECT_S for connecting) and of the body of
            a whole answer; None waits.
        headers: further headers of every request.

    Raises:
        UserError: the URL is none of HTTP, or the key is not printable ASCII.
    """

    def __init__(
        self,
        url: str,
        key: str | None = None,
        *,
        option: str = "--endpoint",
        timeout_s: float | None = 600.0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.url, self.base, self._option = url, _base(url, option), option
        self.headers = {"User-Agent": "peagle", "Accept-Encoding": "identity", **(headers or {})}
        if key:
            if not key.isascii() or not key.isprintable():
                raise UserError(
                    f"{KEY_VARIABLE} has characters that no key has; expected ASCII text."
                )
            self.headers["Authorization"] = f"Bearer {key.strip()}"
        self._timeout_s = timeout_s
        self._tls = ssl.create_default_context() if self.base.startswith("https:") else False

    def call(
        self, method: str, path: str, body: Any = None, *, timeout_s: float | None = None
    ) -> ApiReply:
        """Do as `call_async`, and wait for the answer."""
        return asyncio.run(self.call_async(method, path, body, timeout_s=timeout_s))

    async def call_async(
        self, method: str, path: str, body: Any = None, *, timeout_s: float | None = None
    ) -> ApiReply:
        """Send a request, with `body` as JSON, and return the answer, whatever its status.

        Raises:
            NoAnswer: the server cannot be reached, or the answer broke off.
        """
        limit_s = timeout_s or self._timeout_s
        async with (
            self._stream(method, path, body, limit_s) as response,
            asyncio.timeout(limit_s),
        ):
            return ApiReply(response.status_code, response.headers, await _body(response))

    def models(self, *, may_lack_list: bool = False) -> list[dict[str, Any]]:
        """Return the facts of each model that GET /v1/models lists.

        With `may_lack_list` a server without that route has the list [].

        Raises:
            UserError: the server cannot be reached, refuses, or is none of this kind.
        """
        reply = self.call("GET", "/v1/models")
        if may_lack_list and reply.status in (404, 405):
            return []
        if reply.status != 200:
            raise self.refusal(reply.status, reply.body)
        listed = self.json_object(reply.body).get("data")
        if not isinstance(listed, list) or not all(
            isinstance(one, dict) and "id" in one for one in listed
        ):
            raise self.foreign(reply.text[:80])
        return listed

    def events(self, path: str, body: Any) -> Generator[AnswerEvent | None]:
        """Yield the events of a streamed answer, and None whenever none came for a moment.

        Closing this closes the connection, whereupon the server drops the request.

        Raises:
            UserError: the request was refused, or the answer ended in an error or in the middle.
        """
        events = self._events(path, body)
        pending: asyncio.Future[AnswerEvent | None] | None = None

        async def wait() -> bool:
            nonlocal pending
            pending = pending or asyncio.ensure_future(anext(events, None))
            return bool((await asyncio.wait({pending}, timeout=_POLL_S))[0])

        with asyncio.Runner() as runner:
            while True:
                if not runner.run(wait()) or pending is None:
                    yield None
                    continue
                event, pending = pending.result(), None
                if event is None:
                    return
                yield event

    async def _events(self, path: str, body: Any) -> AsyncGenerator[AnswerEvent, None]:
        async with self._stream("POST", path, body, None) as response:
            if response.status_code != 200:
                raise self.refusal(response.status_code, await _body(response))
            kind = response.headers.get("content-type", "").partition(";")[0]
            if kind != "text/event-stream":
                raise self.foreign(f"a body of {kind!r}, not a stream")
            answer = StreamedAnswer()
            async for raw in response.aiter_bytes():
                for event in self._checked(answer.feed(raw)):
                    yield event
                if answer.is_done:
                    return
            for event in self._checked(answer.end()):
                yield event
        if not answer.is_whole:
            raise self._broken("it ended in the middle of the answer")

    def _checked(self, events: Iterator[AnswerEvent]) -> Iterator[AnswerEvent]:
        try:
            for event in events:
                if event.error:
                    raise UserError(f"{self.url} ended the answer: {event.error}")
                yield event
        except ForeignAnswer as error:
            if not error.is_object:
                raise self.foreign(str(error)) from None
            raise UserError(
                f"{self.url} sent a chunk that is none of a chat completion: {error}"
            ) from None

    @asynccontextmanager
    async def _stream(
        self, method: str, path: str, body: Any, timeout_s: float | None
    ) -> AsyncIterator[Response]:
        """Send a request and hold its answer open; failures of the connection are NoAnswer."""
        import httpx

        connect_s = CONNECT_S if timeout_s is None else min(timeout_s, CONNECT_S)
        timeout = httpx.Timeout(timeout_s, connect=connect_s)
        try:
            async with (
                httpx.AsyncClient(
                    headers=self.headers, timeout=timeout, trust_env=False, verify=self._tls
                ) as client,
                client.stream(method, self.base + path, json=body) as response,
            ):
                yield response
        except UserError:
            raise
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.InvalidURL, UnicodeError) as error:
            raise self.unreachable(failure_reason(error)) from None
        except (httpx.HTTPError, httpx.StreamError, OSError, ValueError) as error:
            raise self._broken(failure_reason(error)) from None

    # ---- errors ----

    def refusal(self, status: int, body: bytes) -> UserError:
        """Return the error for an answer of another status than 200."""
        message = error_message(body)
        if status in (401, 403):
            return UserError(
                f"{self.url} refused the key ({status}: {message}). Set the variable "
                f"{KEY_VARIABLE} to one that it takes."
            )
        if 300 <= status < 400:
            return UserError(
                f"{self.url} redirects ({status}), which is not followed. Correct {self._option}: "
                "name the URL behind it."
            )
        if status == 404 and b'"error"' not in body:
            return self.foreign(f"no such page ({status})")
        again = " Try again." if status >= 500 else ""
        return UserError(f"{self.url} refused the request ({status}: {message}).{again}")

    def foreign(self, answer: str) -> UserError:
        """Return the error for a server that knows nothing of OpenAI's interface."""
        return UserError(
            f"{self.url} answered {printable_line(answer)!r}, which is not OpenAI's interface. "
            f"Correct {self._option}; it takes the URL up to /v1."
        )

    def json_object(self, raw: bytes) -> dict[str, Any]:
        """Return a JSON object that the server sent.

        Raises:
            UserError: it is none.
        """
        try:
            value = json.loads(raw)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise self.foreign(raw[:80].decode(errors="replace"))
        return value

    def _broken(self, reason: str) -> NoAnswer:
        return NoAnswer(f"The connection to {self.url} broke: {reason}. Try again.", reason)

    def unreachable(self, reason: str) -> NoAnswer:
        """Return the error for an address at which no server answers."""
        return NoAnswer(
            f"No server answers at {self.url}: {reason}. Start one with `peagle serve`, or correct "
            f"{self._option}.",
            reason,
        )


def key_from_environment(*variables: str) -> str | None:
    """Return the first key in the first of these variables that is set, of several with commas.

    `peagle serve` takes several keys from PEAGLE_API_KEY; any of them is one of a client.
    """
    found = next(filter(None, map(os.environ.get, variables)), None)
    return None if found is None else found.partition(",")[0]


def _base(url: str, option: str) -> str:
    try:
        parts = urlsplit(url)
        is_address = bool(parts.scheme in ("http", "https") and parts.hostname) and parts.port != 0
    except ValueError:
        parts, is_address = urlsplit(""), False
    if not is_address or parts.query or parts.fragment or "@" in parts.netloc:
        raise UserError(f"{option} is {url!r}; expected a URL like http://127.0.0.1:8000.")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"


def failure_reason(error: BaseException) -> str:
    """Return the operating system's words for a failure, which httpx wraps, else its own."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            # asyncio writes words of its own there, and TLS has numbers of its own.
            is_known = cause.errno in errno.errorcode and not isinstance(cause, ssl.SSLError)
            return os.strerror(cause.errno or 0) if is_known else cause.strerror
        cause = cause.__cause__ or cause.__context__
    return str(error) or type(error).__name__


async def _body(response: Response) -> bytes:
    raw = bytearray()
    async for part in response.aiter_bytes():
        raw += part
        if len(raw) > _MAX_BYTES:
            raise ValueError(f"a body of more than {_MAX_BYTES} bytes")
    return bytes(raw)
