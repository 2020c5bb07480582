"""The engine processes as the front end sees them: started, fed, listened to, restarted.

All of it runs in one event loop, except a thread for each process that waits for its messages.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import multiprocessing
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from peagle.config import SamplingParams
from peagle.engine import EngineStats
from peagle.engine.outputs import StreamChunk
from peagle.errors import UserError
from peagle.serving.engine_process import run_engine
from peagle.serving.errors import ApiError
from peagle.serving.messages import (
    Add,
    Cancel,
    EngineInfo,
    EngineSpec,
    Failed,
    Ready,
    Refused,
    Stepped,
    Stop,
)

logger = logging.getLogger("peagle.serving")

_MOST_FAILED_STARTS = 3
_RESTART_AFTER_S = 0.5
_JOIN_S = 5.0


class EngineFailed(Exception):
    """An engine process ended by a fault; the message is what it said, if anything."""


@dataclass(slots=True, eq=False)
class _Stream:
    """Who waits for a request."""

    num_outputs: int
    items: asyncio.Queue[StreamChunk | Exception] = field(default_factory=asyncio.Queue)


class EngineProcess:
    """One engine process.

    Args:
        number: its index.
        spec: what it loads.
        told: called in the event loop with each of its messages, None when the process is gone.

    Attributes:
        info: of the loaded engine, None before.
        streams: requests that run here.
    """

    def __init__(
        self, number: int, spec: EngineSpec, told: Callable[[EngineProcess, Any], None]
    ) -> None:
        self.number = number
        self.spec = spec
        self.info: EngineInfo | None = None
        self.streams: dict[int, _Stream] = {}
        self._told = told
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=run_engine, args=(spec, theirs), name=f"peagle-engine-{number}", daemon=True
        )
        self._process.start()
        theirs.close()
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._listen, name=f"peagle-engine-{number}", daemon=True).start()

    @property
    def pid(self) -> int | None:
        """Of the process."""
        return self._process.pid

    @property
    def load(self) -> int:
        """Outputs that run or wait here."""
        return sum(stream.num_outputs for stream in self.streams.values())

    def send(self, message: Add | Cancel | Stop) -> None:
        """Give an order; to a process that is gone it is lost, which `told` hears of."""
        with suppress(OSError):
            self._connection.send(message)

    def _listen(self) -> None:
        """Hand messages to the event loop, in a thread of its own."""
        message: Any = True
        while message is not None:
            try:
                message = self._connection.recv()
            except (EOFError, OSError):
                message = None
            try:
                self._loop.call_soon_threadsafe(self._told, self, message)
            except RuntimeError:
                return  # the loop is closed

    def kill(self) -> None:
        """End the process by force, also if it is stopped."""
        self._process.kill()

    def stop(self) -> None:
        """End the process, by force if it does not listen."""
        self.send(Stop())
        self._process.join(_JOIN_S)
        if self._process.is_alive():
            self.kill()
            self._process.join()


class EnginePool:
    """Engine processes behind one door: the least loaded gets the next request.

    Args:
        specs: one each.
        max_queue: outputs that may wait beyond those that are decoded.
        restart: whether a process that died is started again.
        on_stats: called with the number of an engine and its counters, now and then.
        on_restart: called with the number of an engine that is started again.
    """

    def __init__(
        self,
        specs: list[EngineSpec],
        *,
        max_queue: int,
        restart: bool,
        on_stats: Callable[[int, EngineStats], None],
        on_restart: Callable[[int], None],
    ) -> None:
        self._specs = specs
        self._max_queue = max_queue
        self._restart = restart
        self._on_stats = on_stats
        self._on_restart = on_restart
        self._engines: list[EngineProcess | None] = [None] * len(specs)
        self._failed_starts = [0] * len(specs)
        self._numbers = itertools.count()
        self._is_closing = False
        self.failure: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        self.became_ready = asyncio.Event()

    def start(self) -> None:
        """Start all processes; `became_ready` is set when one of them has loaded."""
        for number in range(len(self._specs)):
            self._start(number)

    def _start(self, number: int) -> None:
        if not self._is_closing:
            self._engines[number] = EngineProcess(number, self._specs[number], self._told)

    @property
    def ready(self) -> list[EngineProcess]:
        """Those that take requests."""
        return [engine for engine in self._engines if engine is not None and engine.info]

    @property
    def info(self) -> EngineInfo | None:
        """Of the engines, which are all alike; None while none is loaded."""
        return next((engine.info for engine in self.ready), None)

    @property
    def load(self) -> int:
        """Outputs that run or wait."""
        return sum(engine.load for engine in self._engines if engine is not None)

    # ---- requests -------------------------------------------------------------------------------

    async def stream(
        self,
        engine: EngineProcess,
        prompt: list[int],
        params: SamplingParams,
        *,
        proposer: str,
        priority: int = 0,
        cache_salt: bytes = b"",
    ) -> AsyncGenerator[StreamChunk, None]:
        """Chunks of the outputs of a prompt; leaving the iterator cancels the request.

        Args:
            engine: from `choose`.
            prompt: token ids.
            params: how it is sampled.
            proposer: one of the engine's.
            priority: lower goes first.
            cache_salt: only requests of the same salt share cached KV.

        Raises:
            ApiError: the request is refused, or the engine died meanwhile.
        """
        index, stream = next(self._numbers), _Stream(params.n)
        engine.streams[index] = stream
        engine.send(Add(index, prompt, params, proposer, priority, cache_salt))
        try:
            while stream.num_outputs:
                item = await stream.items.get()
                if isinstance(item, Exception):
                    stream.num_outputs = 0
                    raise item
                stream.num_outputs -= item.output is not None
                yield item
        finally:
            if engine.streams.pop(index, None) is not None and stream.num_outputs:
                engine.send(Cancel(index))

    def choose(self, num_outputs: int) -> EngineProcess:
        """The engine with the least to do.

        Raises:
            ApiError: no engine is there (503), or too many wait (429).
        """
        ready = self.ready
        if not ready:
            text = "The model is not loaded at the moment; try again shortly."
            raise ApiError(503, text, code="not_ready", headers={"Retry-After": "2"})
        room = sum(engine.info.max_num_seqs for engine in ready if engine.info) + self._max_queue
        if (load := self.load) + num_outputs > room:
            raise ApiError(
                429,
                f"{load} outputs run or wait and {num_outputs} were asked for; expected at most "
                f"{room} together. Try again later, or ask for fewer at a time.",
                code="queue_full",
                headers={"Retry-After": "1"},
            )
        return min(ready, key=lambda engine: engine.load)

    # ---- messages -------------------------------------------------------------------------------

    def _told(self, engine: EngineProcess, message: Any) -> None:
        if isinstance(message, Stepped):
            for chunk in message.chunks:
                if (stream := engine.streams.get(chunk.index)) is not None:
                    stream.items.put_nowait(chunk)
            if message.stats is not None:
                self._on_stats(engine.number, message.stats)
        elif isinstance(message, Refused):
            self._refuse(engine, message)
        elif isinstance(message, Ready):
            engine.info = message.info
            self._failed_starts[engine.number] = 0
            self.became_ready.set()
            logger.info(
                "engine %d is ready",
                engine.number,
                extra={"engine": engine.number, "pid": engine.pid},
            )
        elif isinstance(message, Failed):
            self._said(engine, message)
        else:
            self._died(engine)

    def _refuse(self, engine: EngineProcess, message: Refused) -> None:
        if (stream := engine.streams.get(message.index)) is None:
            return
        if message.is_user_error:
            stream.items.put_nowait(ApiError(400, message.message))
        else:
            logger.error("a request failed: %s", message.message)
            text = "The engine could not take the request; the server's log says why."
            stream.items.put_nowait(ApiError(500, text, code="engine_error"))

    def _said(self, engine: EngineProcess, message: Failed) -> None:
        """A process said why it ends."""
        if message.is_user_error and not self.failure.done():
            self.failure.set_result(UserError(message.message))
        else:
            logger.error("engine %d failed: %s", engine.number, message.message)

    def _died(self, engine: EngineProcess) -> None:
        """Tell everybody who waits, and start another one if that is wanted."""
        if self._engines[engine.number] is not engine:
            return
        self._engines[engine.number] = None
        text = "The engine stopped while it served this request; send it again."
        for stream in engine.streams.values():
            stream.items.put_nowait(ApiError(500, text, code="engine_died"))
        if self._is_closing or self.failure.done():
            return
        logger.error("engine %d is gone", engine.number, extra={"engine": engine.number})
        self._failed_starts[engine.number] += engine.info is None
        if not self._restart or self._failed_starts[engine.number] >= _MOST_FAILED_STARTS:
            self.failure.set_result(EngineFailed(f"engine {engine.number} ended by a fault"))
            return
        self._on_restart(engine.number)
        delay = _RESTART_AFTER_S * 2 ** self._failed_starts[engine.number]
        asyncio.get_running_loop().call_later(delay, self._start, engine.number)

    def kill(self) -> None:
        """End all processes at once."""
        self._is_closing = True
        for engine in self._engines:
            if engine is not None:
                engine.kill()

    async def close(self) -> None:
        """End all processes; whoever waits is told."""
        self._is_closing = True
        engines = [engine for engine in self._engines if engine is not None]
        await asyncio.gather(*(asyncio.to_thread(engine.stop) for engine in engines))


def specs_for(spec: EngineSpec, count: int) -> list[EngineSpec]:
    """The specs of `count` processes, each with a GPU of its own where there are any.

    Raises:
        UserError: there are fewer GPUs than processes.
    """
    if count == 1:
        return [spec]
    if spec.engine.device == "cpu":
        return [spec] * count
    import torch

    num_gpus = torch.cuda.device_count()
    if num_gpus == 0 and spec.engine.device == "auto":
        return [spec] * count
    if count > num_gpus:
        raise UserError(
            f"data_parallel_size is {count}, and there are {num_gpus} GPUs; expected at most one "
            "engine a GPU. Lower it, or set device cpu."
        )
    return [replace(spec, device_index=number) for number in range(count)]
