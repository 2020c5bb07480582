"""Guards vLLM's HTTP server, inside its process: an ASGI middleware, given as --middleware.

It holds what `peagle serve` holds of its own server: who may ask (keys, Host, Origin), and how much
(bodies). It answers one route of its own, ENGINE_PATH: what the engine's configuration came to.

It imports the standard library only: vLLM may live in an environment without peagle. What is
allowed comes in the variable PEAGLE_VLLM_GUARD, a JSON object: hosts, origins, max_body_bytes, keys
(SHA-256 in hexadecimal), greedy_only, and parent, a process without which this one ends.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import signal
import threading
import time
from typing import Any
from urllib.parse import urlsplit

ENGINE_PATH = "/peagle/engine"
_OPEN_PATHS = frozenset({"/health", "/ping"})
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_WATCH_S = 1.0


class Refused(Exception):
    """A request that is not passed on: its status and why."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Guard:
    """Refuses requests before vLLM sees them.

    Args:
        app: what it guards.
        rules: as in PEAGLE_VLLM_GUARD; None reads that variable.
    """

    def __init__(self, app: Any, rules: dict[str, Any] | None = None) -> None:
        if rules is None:
            rules = json.loads(os.environ["PEAGLE_VLLM_GUARD"])
        assert rules is not None
        self.app = app
        self.hosts = {name.lower() for name in rules["hosts"]}
        self.origins = {origin.rstrip("/").lower() for origin in rules["origins"]}
        self.max_body_bytes = int(rules["max_body_bytes"])
        self.keys = [bytes.fromhex(digest) for digest in rules["keys"]]
        self.greedy_only = bool(rules["greedy_only"])
        if rules.get("parent"):
            watching = threading.Thread(target=_end_without, args=(rules["parent"],), daemon=True)
            watching.start()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Answer one request, or pass it on."""
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":
            return await send({"type": "websocket.close", "code": 1008})
        try:
            self._check(scope)
            if scope["path"] == ENGINE_PATH:
                return await _answer(send, 200, engine_facts(scope))
            if scope["method"] not in _SAFE_METHODS:
                receive = await self._body(scope, receive)
        except Refused as refused:
            error = {"message": str(refused), "type": "invalid_request_error", "param": None}
            return await _answer(send, refused.status, {"error": {**error, "code": refused.status}})
        await self.app(scope, receive, send)

    def _check(self, scope: dict[str, Any]) -> None:
        headers: dict[str, list[str]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1"))
        host = self._check_host(headers.get("host", []))
        self._check_origin(headers, host, scope["method"])
        preflight = scope["method"] == "OPTIONS" and "origin" in headers
        if self.keys and scope["path"] not in _OPEN_PATHS and not preflight:
            self._check_key(headers.get("authorization", []))
        if scope["method"] not in _SAFE_METHODS:
            self._check_content(headers)

    def _check_host(self, values: list[str]) -> str:
        if len(values) != 1:
            raise Refused(400, f"{len(values)} Host headers came: expected exactly one.")
        name = _name_of(values[0])
        if "*" not in self.hosts and name not in self.hosts:
            raise Refused(
                403,
                f"The Host header names {name!r}, which this server does not answer to: if that is "
                f"its name, start it with --allowed-host {name}.",
            )
        return values[0].lower()

    def _check_origin(self, headers: dict[str, list[str]], host: str, method: str) -> None:
        """Refuse web pages of other sites: CORS alone would only hide the answer from them."""
        origins = headers.get("origin", [])
        if len(origins) == 1:
            origin = origins[0].lower()
            if "*" in self.origins or origin in self.origins:
                return
            if urlsplit(origin).netloc == host:
                return
        if origins or (
            method not in _SAFE_METHODS and "cross-site" in headers.get("sec-fetch-site", [])
        ):
            raise Refused(
                403,
                "The request comes from a web page of another site: to let that page use this "
                "server, start it with --allowed-origin and its origin.",
            )

    def _check_key(self, values: list[str]) -> None:
        scheme, _, key = (values[0] if len(values) == 1 else "").partition(" ")
        digest = hashlib.sha256(key.strip().encode("latin-1")).digest()
        # All are compared, so that the time taken tells nothing.
        known = [hmac.compare_digest(digest, one) for one in self.keys]
        if scheme.lower() != "bearer" or not any(known):
            found = "That API key is not one of this server's" if key else "No API key came"
            raise Refused(401, f"{found}: send the header 'Authorization: Bearer KEY'.")

    def _check_content(self, headers: dict[str, list[str]]) -> None:
        lengths = headers.get("content-length", [])
        if lengths and not (len(lengths) == 1 and lengths[0].isdigit() and len(lengths[0]) < 20):
            raise Refused(400, "The Content-Length header is malformed: expected one number.")
        if lengths and int(lengths[0]) > self.max_body_bytes:
            raise self._too_large(int(lengths[0]))
        kinds = headers.get("content-type", [])
        has_body = (lengths and lengths[0] != "0") or "transfer-encoding" in headers
        if has_body and not (len(kinds) == 1 and _is_json(kinds[0])):
            raise Refused(415, "The Content-Type header is not application/json: expected that.")

    def _too_large(self, size: int) -> Refused:
        return Refused(
            413,
            f"The body has {size} bytes: expected at most {self.max_body_bytes}. Send less at "
            "once, or start the server with a larger --max-body-bytes.",
        )

    async def _body(self, scope: dict[str, Any], receive: Any) -> Any:
        """Read the body whole, check it, and give what hands it on."""
        parts, more = bytearray(), True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                raise Refused(400, "The connection was closed before the body was whole.")
            parts += message.get("body", b"")
            more = message.get("more_body", False)
            if len(parts) > self.max_body_bytes:
                raise self._too_large(len(parts))
        if self.greedy_only:
            _refuse_sampling(bytes(parts))
        pending = [{"type": "http.request", "body": bytes(parts), "more_body": False}]

        async def again() -> Any:
            return pending.pop() if pending else await receive()

        return again


def engine_facts(scope: dict[str, Any]) -> dict[str, Any]:
    """What the configuration of this server's engine came to."""
    state = getattr(scope.get("app"), "state", None)
    config = getattr(state, "vllm_config", None)
    if config is None:
        config = getattr(getattr(state, "engine_client", None), "vllm_config", None)
    return facts_of(config)


def facts_of(config: Any) -> dict[str, Any]:
    """What a VllmConfig came to, null where this vLLM does not say."""
    drafting = getattr(config, "speculative_config", None)
    facts: dict[str, Any] = {"has_config": config is not None, "speculative": None}
    if drafting is not None:
        names = ("method", "num_speculative_tokens", "parallel_drafting")
        facts["speculative"] = {name: getattr(drafting, name, None) for name in names}
    facts["model_runner_v2"] = getattr(config, "use_v2_model_runner", None)
    return facts


def _end_without(parent: int) -> None:
    """End this process in order once who started it all is gone: nobody else would."""
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


def _refuse_sampling(body: bytes) -> None:
    """A CPU build of vLLM verifies drafts for greedy decoding only."""
    try:
        asked = json.loads(body) if body else None
    except ValueError:
        return  # vLLM says what is wrong with it
    nested = asked.get("sampling_params") if isinstance(asked, dict) else None
    temperatures = [one.get("temperature") for one in (asked, nested) if isinstance(one, dict)]
    for temperature in temperatures:
        if not isinstance(temperature, (int, float)) or temperature <= 0:
            continue
        raise Refused(
            400,
            f"temperature is {temperature}: on a CPU, vLLM samples wrongly with speculative "
            "decoding. Send temperature 0, or start the server with --no-speculation.",
        )


def _name_of(host: str) -> str:
    """A Host header without its port, in lower case."""
    name = host.lower()
    if name.startswith("["):
        return name.partition("]")[0] + "]"
    return name.partition(":")[0].removesuffix(".")


def _is_json(content_type: str) -> bool:
    return content_type.partition(";")[0].strip().lower() == "application/json"


async def _answer(send: Any, status: int, content: dict[str, Any]) -> None:
    body = json.dumps(content).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"cache-control", b"no-store"),
        *([(b"www-authenticate", b"Bearer")] if status == 401 else []),
        *([(b"connection", b"close")] if status == 413 else []),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
