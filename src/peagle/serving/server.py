"""Starting, draining and ending a server."""

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from peagle.errors import UserError
from peagle.serving.app import create_app
from peagle.serving.config import ServerConfig
from peagle.serving.connections import (
    ACCEPTED_AT_ONCE,
    BACKLOG,
    PROBE_PATHS,
    Connections,
    connection_limit,
    listen,
)
from peagle.serving.emf import publishing
from peagle.serving.engine_pool import EngineFailed, EnginePool, specs_for
from peagle.serving.engine_process import EngineSpec
from peagle.serving.errors import ApiError
from peagle.serving.head_swap import HeadSwaps, resolve_folders
from peagle.serving.hosts import bind_warning, default_allowed_hosts
from peagle.serving.keys import ApiKeys, QuotaMiddleware, Quotas
from peagle.serving.memory_release import return_memory
from peagle.serving.metrics import Metrics, ServedHead
from peagle.serving.recording import Recorder
from peagle.serving.security import SecurityMiddleware
from peagle.serving.service import Service
from peagle.serving.tokenizer import Tokenizer
from peagle.serving.tracing import Tracing

logger = logging.getLogger("peagle.serving")

_UNCOUNTED_PATHS = (*PROBE_PATHS, "/metrics")
# Seconds for answers on their way after the last request, or after an engine died for good.
_FLUSH_S = 2
# Seconds for the last lines of the log, whose reader may be gone.
_LOG_S = 1.0


class CountOpen:
    """Counts the requests under way, so that a drain knows when it is over.

    For the connection it sets `scope["state"]["is_admitted"]`: the request is work that is not to
    be lost, since it has passed the checks and is no probe.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service
        self._limits: set[asyncio.Timeout] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _UNCOUNTED_PATHS:
            return await self._app(scope, receive, send)
        scope["state"]["is_admitted"] = True
        self._service.num_open += 1
        limit = asyncio.timeout(None)
        try:
            async with limit:
                self._limits.add(limit)
                await self._app(scope, receive, send)
        except TimeoutError:
            if not limit.expired():
                raise
            raise _stopped() from None
        finally:
            self._limits.discard(limit)
            self._service.num_open -= 1

    def end_all(self) -> None:
        """End all requests under way: each gets an error, if its answer has not begun."""
        for limit in self._limits:
            limit.reschedule(0)


def _stopped() -> ApiError:
    """Return the error of a request that the server cannot finish before it stops."""
    text = "The server stops, and the answer took longer than it waits for; try another one."
    return ApiError(503, text, code="draining", headers={"Retry-After": "5"})


class Server(uvicorn.Server):
    """Uvicorn, with signals that drain: the first one stops new requests, the second all."""

    def __init__(self, config: uvicorn.Config, service: Service, counter: CountOpen) -> None:
        super().__init__(config)
        self.service, self.counter = service, counter
        self._is_ending = False
        self._drain: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Do nothing, in place of uvicorn: signals are handled from before to after it serves."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(BACKLOG)  # uvicorn's setting is also how many are accepted at once

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal, whatever the event loop and other threads do."""
        if self._is_ending:
            self.service.pool.kill()
            end_process(0)
        self._is_ending = True
        self._loop.call_soon_threadsafe(self._start_drain, sig)

    def _start_drain(self, number: int) -> None:
        name = signal.Signals(number).name
        logger.info("%s: finishing %d requests", name, self.service.num_open)
        self._drain = asyncio.ensure_future(self.drain())

    async def drain(self) -> None:
        """Take no new requests, let the others finish, end late ones, then end."""
        self.service.is_draining = True
        await self._until_none_is_open(self.service.config.drain_timeout_s)
        if self.service.num_open:
            logger.warning("%d requests did not finish in time", self.service.num_open)
            self.service.pool.fail_streams(_stopped())
            await self._until_none_is_open(_FLUSH_S / 2)
            self.counter.end_all()  # these wait for a client or a thread
            await self._until_none_is_open(_FLUSH_S / 2)
        self.should_exit = True

    async def _until_none_is_open(self, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        while self.service.num_open and time.monotonic() < end:
            await asyncio.sleep(0.05)


def serve(
    config: ServerConfig,
    spec: EngineSpec,
    keys: ApiKeys,
    admin_keys: ApiKeys | None = None,
    *,
    name: str,
    typed_name: str | None = None,
    listening: socket.socket | None = None,
) -> NoReturn:
    """Serve until a signal ends the process: with status 0, or 1 if the engines were lost.

    Args:
        admin_keys: keys of an administrator, who may swap the head for one of
            `config.allow_heads`; without them nobody may.
        name, typed_name: as of `Service`.
        listening: a socket that is bound already; None binds one.

    Raises:
        UserError: a model or an option is not usable, or the address is taken.
    """
    listening = listening or listen(config.host, config.port)
    connections = Connections(connection_limit(config.max_connections), config.head_timeout_s)
    with asyncio.Runner() as runner:
        run = _serve(config, spec, keys, admin_keys, name, typed_name, listening, connections)
        end_process(runner.run(run))


def end_process(status: int) -> NoReturn:
    """End now: at its own end the interpreter waits for threads, and one of them may never end."""

    def flush() -> None:
        logging.shutdown()
        sys.stdout.flush()

    flushing = threading.Thread(target=flush, daemon=True)
    flushing.start()
    flushing.join(_LOG_S)
    os._exit(status)


@contextmanager
def _signals_to(handler: Callable[[int, FrameType | None], None]) -> Generator[None, None, None]:
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, kept in before.items():
            signal.signal(number, kept)


async def _serve(
    config: ServerConfig,
    spec: EngineSpec,
    keys: ApiKeys,
    admin_keys: ApiKeys | None,
    name: str,
    typed_name: str | None,
    listening: socket.socket,
    connections: Connections,
) -> int:
    started = time.monotonic()
    recorder = Recorder.of(config, keys)
    spec = replace(spec, identify_target=recorder is not None)
    folders = resolve_folders(config.allow_heads)
    head = _swappable_head(spec) if folders else None
    metrics = Metrics(name, recorder and recorder.counts, head)
    pool = EnginePool(
        specs_for(spec, config.data_parallel_size),
        metrics,
        max_queue=config.max_queue,
        restart=config.on_engine_failure == "restart",
    )
    tracing = Tracing(config.otlp_endpoint) if config.otlp_endpoint is not None else None
    swaps = None if head is None else HeadSwaps(pool, folders, head)
    names = tuple(spec.proposers)
    service = Service(config, name, names, pool, metrics, tracing, recorder, swaps)
    service.typed_name = typed_name
    counter = _counted(service)
    uvicorn_config = uvicorn.Config(
        _guarded(counter, service, keys, admin_keys),
        http=connections.protocol,
        backlog=ACCEPTED_AT_ONCE,
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=_FLUSH_S,
    )
    server = Server(uvicorn_config, service, counter)
    host, port = listening.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    logger.info("listening on %s; loading %s", url, name)
    logger.info("at most %d connections at once", connections.max_connections)
    if warning := bind_warning(config.host, keys):
        logger.warning("%s", warning)
    with _signals_to(server.handle_exit):
        pool.start()
        async with publishing(metrics, name, config.cloudwatch_interval_s):
            serving = asyncio.ensure_future(server.serve(sockets=[listening]))
            loading = asyncio.ensure_future(_load(service, spec, url, started))
            watching = asyncio.ensure_future(connections.watch())
            returning = asyncio.ensure_future(return_memory(loading))
            try:
                return await _until_end(service, server, serving, loading)
            finally:
                for task in (loading, watching, returning):
                    task.cancel()
                if swaps is not None:
                    swaps.close()
                await pool.close()
                if recorder is not None:
                    await asyncio.to_thread(recorder.close, _FLUSH_S)
                if tracing is not None:
                    tracing.shutdown()


def _counted(service: Service) -> CountOpen:
    app: ASGIApp = create_app(service)
    if service.tracing is not None:
        app = service.tracing.wrap(app)
    return CountOpen(app, service)


def _swappable_head(spec: EngineSpec) -> ServedHead:
    """Return the head of the first proposer.

    Raises:
        UserError: it has none, or further corrections, which fit no other head.
    """
    speculative = next(iter(spec.proposers.values()))
    if speculative is None or speculative.model is None:
        raise UserError("--allow-heads was given, and the server drafts without a head.")
    if speculative.corrections:
        raise UserError(
            "--allow-heads and --correction were given; the corrections fit no other head, so the "
            "server would swap none. Leave one of them out."
        )
    return ServedHead(Path(speculative.model).resolve().name)


def _guarded(app: ASGIApp, service: Service, keys: ApiKeys, admin_keys: ApiKeys | None) -> ASGIApp:
    config = service.config
    hosts = config.allowed_hosts
    if (quotas := Quotas.of(config, has_keys=bool(keys))) is not None:
        app = QuotaMiddleware(app, quotas, service.metrics)
    return SecurityMiddleware(
        app,
        keys=keys,
        admin_keys=admin_keys,
        allowed_hosts=default_allowed_hosts(config.host) if hosts is None else hosts,
        allowed_origins=config.allowed_origins,
        max_body_bytes=config.max_body_bytes,
    )


async def _load(service: Service, spec: EngineSpec, url: str, started: float) -> None:
    """Load the tokenizer beside the engines; log when the server is ready."""
    tokenizer = await asyncio.to_thread(
        Tokenizer,
        spec.target,
        service.config.chat_template,
        parse_special_tokens=service.config.parse_special_tokens,
    )
    await service.pool.became_ready.wait()
    info = service.pool.info
    if service.recorder is not None and info is not None and info.target_identity is not None:
        service.recorder.begin(service.name, info.target_identity)
    service.tokenizer = tokenizer  # from here on requests are taken
    if info is not None:
        if spec.show_memory or info.device.startswith("cuda"):
            for name, plan in info.memory_plans.items():
                for line in plan.splitlines():
                    logger.info("%s: %s", name, line)
        drafting = ", ".join(f"{n} (K = {k})" for n, k in info.num_speculative_tokens.items())
        logger.info(
            "ready on %s after %.1f s: %s with %s, %d tokens of context, on %s",
            *(url, time.monotonic() - started, service.name),
            *(drafting, info.max_model_len, info.device),
        )


async def _until_end(
    service: Service, server: Server, serving: asyncio.Task[Any], loading: asyncio.Task[Any]
) -> int:
    """Wait for whatever ends the server first; return the status of the process."""
    failure = service.pool.failure
    waiting = {serving, loading, failure}
    while not serving.done() and not failure.done():
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if loading in done:
            waiting.discard(loading)
            if (error := loading.exception()) is not None:
                failure.done() or failure.set_result(error)  # type: ignore[arg-type]
    if not failure.done():
        await serving
        return 0
    server.should_exit = True
    await serving
    error = failure.result()
    if isinstance(error, EngineFailed):
        logger.error("the server ends: %s", error)
        return 1
    raise error
