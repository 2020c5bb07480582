"""Guards vLLM's HTTP server, inside its process: an ASGI middleware, given as --middleware.

It is `SecurityMiddleware`, as before peagle's own routes, and what vLLM needs beside that: a route
that tells what the engine's configuration came to, the refusal of sampling where vLLM samples
wrongly, and the watch on the process that started vLLM.

Speculation in a CPU build of vLLM verifies drafts for greedy decoding only. vLLM turns texts such
as "0.7" into numbers and takes temperatures from more than one place, so that only a request that
is known to decode greedily passes.

vLLM may live in an environment without peagle and its packages, and may run Python 3.10. So this
file and everything that it imports use the standard library alone, as of Python 3.10.
"""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

from peagle.backends.vllm.facts import ENGINE_PATH, GUARD_VARIABLE, vllm_facts
from peagle.serving.errors import ApiError
from peagle.serving.keys import ApiKeys
from peagle.serving.security import SecurityMiddleware

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
                unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

                async def receive_again() -> Message:
                    return unread.pop() if unread else await receive()

                return await self.app(scope, receive_again, send)
        await self.app(scope, receive, send)


def engine_facts(scope: Scope) -> dict[str, Any]:
    """Return the resolved settings of this server's engine."""
    state = getattr(scope.get("app"), "state", None)
    config = getattr(state, "vllm_config", None)
    if config is None:
        config = getattr(getattr(state, "engine_client", None), "vllm_config", None)
    return vllm_facts(config)


async def _read(receive: Receive) -> bytes:
    """Return the whole body of a request."""
    body, more = bytearray(), True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            raise ApiError(400, "The connection was closed before the body was whole.")
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return bytes(body)


async def _answer(send: Send, content: dict[str, Any]) -> None:
    body = json.dumps(content).encode()
    size = str(len(body)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", size)]
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
        return True  # the pid belongs to another user by now, or the system has no /proc


# ---- greedy decoding only ----

# In the bodies of these routes `temperature` is a field; absent, it is the server's default, 0.
_SAMPLING = frozenset(
    {
        *("/v1/completions", "/v1/chat/completions", "/v1/chat/completions/batch"),
        *("/v1/responses", "/v1/messages", "/invocations"),
    }
)
# Takes `sampling_params` as vLLM itself has them, in which an absent temperature is 1.
_GENERATE_PATH = "/inference/v1/generate"
# These draw no tokens.
_OTHER_PATHS = re.compile(
    r"/(tokenize|detokenize|ping|v1/messages/count_tokens|v1/(chat/)?completions/render"
    r"|v1/responses/[^/]+/cancel)"
)
_CPU_PROBLEM = "on a CPU, vLLM samples wrongly with speculative decoding."
_REMEDY = "Send temperature 0, or start the server with --no-speculation."


def check_greedy(path: str, body: bytes) -> None:
    """Refuse a request that vLLM would not decode greedily, or of which that is not known.

    Raises:
        ApiError: a temperature other than 0; a field given twice; a body that is no JSON object; a
            route that is not known.
    """
    if _OTHER_PATHS.fullmatch(path):
        return
    if path not in _SAMPLING and path != _GENERATE_PATH:
        raise ApiError(
            403,
            f"{path!r} is none of the routes that are known to decode greedily: {_CPU_PROBLEM} Use "
            "/v1/completions, /v1/chat/completions, /v1/responses or /v1/messages, or start the "
            "server with --no-speculation.",
            code="route_not_allowed",
        )
    try:
        request = json.loads(body.decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError):
        request = None
    if not isinstance(request, dict):
        raise ApiError(400, "The body is no JSON object in UTF-8: expected one.")
    _check_temperature("temperature", request.get("temperature"))
    for name in ("sampling_params", "extra_body"):
        inner = request.get(name)
        if isinstance(inner, dict):
            _check_temperature(f"{name}.temperature", inner.get("temperature"))
        elif inner is not None:
            raise ApiError(400, f"{name} is no object: expected one, or none.", param=name)
    if path == _GENERATE_PATH and (request.get("sampling_params") or {}).get("temperature") is None:
        raise ApiError(
            400,
            f"sampling_params.temperature is absent, which vLLM takes for 1 here: {_CPU_PROBLEM} "
            f"{_REMEDY}",
            param="sampling_params.temperature",
        )


def _check_temperature(name: str, value: Any) -> None:
    # By type, since True and False are numbers too.
    if value is None or (type(value) in (int, float) and value == 0):
        return
    found = value if type(value) in (int, float, bool) else type(value).__name__
    text = f"{name} is {found}, expected the number 0 or none: {_CPU_PROBLEM} {_REMEDY}"
    raise ApiError(400, text, param=name)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object without repeated fields: vLLM could read another one of the two."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ApiError(400, f"The body has the field {twice[:100]!r} twice: expected it once.")
    return found
