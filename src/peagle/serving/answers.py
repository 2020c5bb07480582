"""Answers that end when the client goes away: whole ones, and streams of events."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from peagle.serving.errors import ApiError

logger = logging.getLogger("peagle.serving")

_JSON = [(b"content-type", b"application/json")]
_EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"x-accel-buffering", b"no")]
_DONE = b"data: [DONE]\n\n"


def to_json(value: Any) -> bytes:
    """Compact JSON in UTF-8; half a surrogate pair is escaped."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    try:
        return text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


async def until_gone(receive: Receive, work: Awaitable[None]) -> None:
    """Do something unless the client goes away first: it is cancelled then."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        watch.cancel()
        if not task.done():
            task.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)
    if not task.cancelled() and (error := task.exception()) is not None:
        raise error


class WholeAnswer(Response):
    """A JSON object that takes a while to make.

    Args:
        make: makes it; an ApiError it raises is answered as such.
    """

    def __init__(self, make: Callable[[], Awaitable[dict[str, Any]]]) -> None:
        self._make = make
        self.status_code = 200
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def work() -> None:
            body = to_json(await self._make())
            headers = [*_JSON, (b"content-length", str(len(body)).encode())]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": body})

        await until_gone(receive, work())


class EventStream(Response):
    """Server-sent events, each a JSON object.

    The first one is waited for before the answer begins, so that a refusal has its status. What
    goes wrong later is an event of its own.

    An event that has a `type` is named by it, and ends its stream by itself; a stream of events
    without names ends with "[DONE]".

    Args:
        events: the objects.
        failed: makes the event of an error; None takes the error's own object.
    """

    def __init__(
        self,
        events: AsyncGenerator[dict[str, Any], None],
        *,
        failed: Callable[[ApiError], dict[str, Any]] = ApiError.body,
    ) -> None:
        self._events = events
        self._failed = failed
        self.status_code = 200
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await until_gone(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        started, is_named = False, False

        async def write(event: dict[str, Any]) -> None:
            nonlocal started, is_named
            if not started:
                started = True
                start = {"type": "http.response.start", "status": 200, "headers": _EVENTS}
                await send(start)
            is_named = "type" in event
            name = f"event: {event['type']}\n".encode() if is_named else b""
            body = name + b"data: " + to_json(event) + b"\n\n"
            await send({"type": "http.response.body", "body": body, "more_body": True})

        try:
            async with aclosing(self._events) as events:
                async for event in events:
                    await write(event)
        except Exception as error:
            if not started:
                raise
            if not isinstance(error, ApiError):
                logger.exception("a stream failed")
                error = ApiError(500, "The server failed; its log says why.", code="internal_error")
            await write(self._failed(error))
        await send({"type": "http.response.body", "body": b"" if is_named else _DONE})
