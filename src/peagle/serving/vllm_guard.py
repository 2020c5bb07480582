"""Guards vLLM's HTTP server, inside its process: an ASGI middleware, given as --middleware.

It is `SecurityMiddleware`, as before peagle's own routes, and what vLLM needs beside that: a route
that tells what the engine's configuration came to, the refusal of sampling where vLLM samples
wrongly, and the watch on the process that started vLLM.

vLLM may live in an environment without peagle and its packages, and may run Python 3.10. So this
file and everything that it imports use the standard library alone, as of Python 3.10.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

from peagle.backends.vllm.facts import ENGINE_PATH, GUARD_VARIABLE, facts_of
from peagle.serving.errors import ApiError
from peagle.serving.keys import ApiKeys
from peagle.serving.security import SecurityMiddleware
from peagle.serving.vllm_greedy import check_greedy

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_WATCH_S = 1.0


class Guard:
    """Refuses requests before vLLM sees them.

    Args:
        app: vLLM's application.
        rules: None reads them, a JSON object, from the variable PEAGLE_VLLM_GUARD. `keys` are
            SHA-256 digests in hexadecimal; `greedy_only` refuses sampling; without the process
            `parent` this one ends. The others are arguments of `SecurityMiddleware`.

    Raises:
        UserError: a host, an origin or a limit that is none.
    """

    def __init__(self, app: ASGIApp, rules: dict[str, Any] | None = None) -> None:
        options = dict(json.loads(os.environ[GUARD_VARIABLE]) if rules is None else rules)
        parent = options.pop("parent", None)
        self.app = app
        self.greedy_only = bool(options.pop("greedy_only"))
        keys = ApiKeys(digests=map(bytes.fromhex, options.pop("keys")))
        self.guarded = SecurityMiddleware(self._pass_on, keys=keys, has_every_route=True, **options)
        if parent:
            threading.Thread(target=_end_without, args=(parent,), daemon=True).start()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or pass it on."""
        await self.guarded(scope, receive, send)

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            if scope["path"] == ENGINE_PATH:
                return await _answer(send, engine_facts(scope))
            if self.greedy_only and scope["method"] not in _SAFE_METHODS:
                body = await _read(receive)
                check_greedy(scope["path"].removeprefix(scope.get("root_path", "")), body)
                receive = _again(body, receive)
        await self.app(scope, receive, send)


def engine_facts(scope: Scope) -> dict[str, Any]:
    """What the configuration of this server's engine came to."""
    state = getattr(scope.get("app"), "state", None)
    config = getattr(state, "vllm_config", None)
    if config is None:
        config = getattr(getattr(state, "engine_client", None), "vllm_config", None)
    return facts_of(config)


async def _read(receive: Receive) -> bytes:
    """The whole body of a request."""
    body, more = bytearray(), True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            raise ApiError(400, "The connection was closed before the body was whole.")
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return bytes(body)


def _again(body: bytes, receive: Receive) -> Receive:
    """What gives a body that was read already, and then what comes behind it."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def give() -> Message:
        return pending.pop() if pending else await receive()

    return give


async def _answer(send: Send, content: dict[str, Any]) -> None:
    body = json.dumps(content).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _end_without(parent: int) -> None:
    """End this process in order once the process that started vLLM is gone."""
    while _is_alive(parent):
        time.sleep(_WATCH_S)
    os.kill(os.getpid(), signal.SIGTERM)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat", encoding="latin-1") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except ProcessLookupError:
        return False
    except OSError:
        return True  # somebody else's by now, or a system without /proc
