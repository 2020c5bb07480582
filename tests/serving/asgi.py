"""As much of a server as an ASGI application needs: one request, its messages, its answer."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from peagle.serving.hosts import default_allowed_hosts
from peagle.serving.keys import ApiKeys
from peagle.serving.security import SecurityMiddleware
from peagle.serving.vllm_guard import Guard

LIMIT = 1000
JSON = {"content-type": "application/json"}


@dataclass
class Reply:
    status: int = 0
    raw_headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    body: bytes = b""
    is_complete: bool = False

    @property
    def headers(self) -> httpx.Headers:
        return httpx.Headers(self.raw_headers)

    @property
    def error(self) -> dict[str, Any]:
        """What a refusal says; a refusal is whole, and has the form that every client knows."""
        assert self.is_complete and self.headers["content-type"] == "application/json"
        assert int(self.headers["content-length"]) == len(self.body)
        (name, error) = next(iter(json.loads(self.body).items()))
        assert name == "error" and set(error) == {"message", "type", "param", "code"}
        return error


@dataclass
class AsgiClient:
    """Sends requests to `app`, one at a time; keeps the last one's scope, and what was not read.

    A body is sent whole, or as a list of chunks; a number in it is a pause in seconds. After the
    body the client stays until `leaves` says that it goes.
    """

    app: Any
    scope: dict[str, Any] = field(default_factory=dict)
    unread: list[bytes | float] = field(default_factory=list)

    async def request(
        self,
        method: str = "GET",
        path: str = "/v1/models",
        headers: dict[str, str] | list[tuple[str, str]] | None = None,
        body: bytes | list[bytes | float] = b"",
        leaves: bool = False,
    ) -> Reply:
        pairs = list(headers.items()) if isinstance(headers, dict) else list(headers or [])
        if isinstance(headers, dict) or headers is None:
            pairs = [("host", "localhost:8000")] * ("host" not in (headers or {})) + pairs
        raw = [(name.encode(), value.encode("latin-1")) for name, value in pairs]
        self.scope = {"type": "http", "method": method, "path": path, "headers": raw}
        self.scope["query_string"] = b""
        parts: list[bytes | float] = list(body) if isinstance(body, list) else [body]
        self.unread = parts
        answer = Reply()
        breaches: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            while parts:
                part = parts.pop(0)
                if isinstance(part, bytes):
                    return {"type": "http.request", "body": part, "more_body": bool(parts)}
                await asyncio.sleep(part)
            if leaves:
                return {"type": "http.disconnect"}
            return await asyncio.get_running_loop().create_future()

        async def send(message: dict[str, Any]) -> None:
            is_start = message["type"] == "http.response.start"
            if answer.is_complete or is_start == bool(answer.status):
                breaches.append(message)  # raised here, it could be caught by whoever sends
            elif is_start:
                answer.status, answer.raw_headers = message["status"], message["headers"]
            else:
                answer.body += message.get("body", b"")
                answer.is_complete = not message.get("more_body", False)

        # No deadline of the tests' own: a request that hangs is one that never ends for clients.
        await asyncio.wait_for(self.app(self.scope, receive, send), 30)
        assert not breaches
        return answer

    def __call__(self, *args: Any, **options: Any) -> Reply:
        return asyncio.run(self.request(*args, **options))


async def read(receive: Callable) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        assert message["type"] == "http.request"
        body, more = body + message["body"], message["more_body"]
    return body


async def echo(scope: dict, receive: Callable, send: Callable) -> None:
    body = await read(receive)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"got " + body})


def before_vllm(app: Any, *, keys: ApiKeys, **rules: Any) -> Guard:
    """The guard inside vLLM's process, by the rules that the variable PEAGLE_VLLM_GUARD has."""
    digests = [digest.hex() for digest in keys.digests]
    return Guard(app, {"greedy_only": False, "keys": digests, **rules})


APPLICATIONS: dict[str, Callable[..., Any]] = {"peagle": SecurityMiddleware, "vllm": before_vllm}
guarding = "peagle"  # the security tests try both


def guard(app: Any = echo, **options: Any) -> AsgiClient:
    defaults = {"keys": ApiKeys(), "allowed_hosts": default_allowed_hosts("127.0.0.1")}
    made = APPLICATIONS[guarding](app, **{**defaults, "max_body_bytes": LIMIT, **options})
    return AsgiClient(made)
