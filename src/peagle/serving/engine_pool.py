"""The front end's side of the engine processes: it starts, feeds, watches and restarts them.

It runs in one event loop, and in two threads for each process: one receives its messages, one sends
it orders, so that a process that no longer reads blocks that thread alone.
"""

import asyncio
import itertools
import logging
import multiprocessing
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.reduction import ForkingPickler
from queue import SimpleQueue
from typing import Any, NamedTuple, Self

from peagle.config import SamplingParams
from peagle.engine.loop import Add
from peagle.engine.outputs import StreamChunk
from peagle.engine.placement import gpu_names
from peagle.errors import UserError
from peagle.serving.engine_process import (
    Cancel,
    EngineInfo,
    EngineSpec,
    Failed,
    HeadDone,
    HeadOrder,
    Heartbeat,
    NewChunks,
    Refused,
    Stop,
    run_engine,
)
from peagle.serving.errors import ApiError
from peagle.serving.head_trial import HeadSlice
from peagle.serving.metrics import Metrics
from peagle.serving.protocol import api_error

logger = logging.getLogger("peagle.serving")

_WATCH_EVERY_S = 0.5
_JOIN_S = 2.0
# A killed process that is still alive waits in the kernel, most likely for its GPU.
_KILL_S = 30.0
# An engine is restarted as long as it crashes and fails to start no more often than this.
MAX_CRASHES, WINDOW_S = 5, 600.0
MAX_FAILED_STARTS = 3
_FIRST_DELAY_S = 0.5


class EngineFailed(Exception):
    """Engine processes ended by a fault; the message says how, and how often."""


class Deadline(NamedTuple):
    """The end of a request's time on the event loop's clock, and the error that its client gets."""

    end_s: float
    error: ApiError

    @classmethod
    def after(cls, timeout_s: float) -> Self | None:
        """Return the deadline of a request that came now; None if `timeout_s` is 0."""
        if not timeout_s:
            return None
        error = ApiError(
            504,
            f"The request took longer than {timeout_s:g} s. Ask for fewer tokens or try again "
            "later; the operator raises the limit with --request-timeout.",
            code="request_timeout",
        )
        return cls(asyncio.get_running_loop().time() + timeout_s, error)


class CrashBudget:
    """Counts the crashes of one engine, and says whether and when it is started again.

    5 crashes in 10 minutes are allowed, and fewer than 3 failed starts in a row. The wait before a
    restart doubles with each crash in the window.
    """

    def __init__(self) -> None:
        self._crashes: deque[float] = deque()
        self.num_failed_starts = 0  # in a row

    @property
    def num_recent(self) -> int:
        """Return the number of crashes in the window."""
        while self._crashes and self._crashes[0] < time.monotonic() - WINDOW_S:
            self._crashes.popleft()
        return len(self._crashes)

    def crashed(self, *, while_loading: bool) -> None:
        """Count a process that has ended, or was killed because it hung."""
        self._crashes.append(time.monotonic())
        self.num_failed_starts += while_loading

    @property
    def delay_s(self) -> float:
        """Return the seconds to wait before the next start."""
        return _FIRST_DELAY_S * 2 ** max(self.num_recent - 1, 0)

    @property
    def spent(self) -> str | None:
        """Return why there is no further start; None if there is one."""
        if self.num_failed_starts >= MAX_FAILED_STARTS:
            return f"{self.num_failed_starts} starts in a row failed"
        if (crashes := self.num_recent) > MAX_CRASHES:
            limit = f"{MAX_CRASHES} are restarted"
            return f"it ended {crashes} times within {WINDOW_S / 60:g} minutes, of which {limit}"
        return None


@dataclass(slots=True, eq=False)
class _Stream:
    """A request whose client waits for chunks.

    Attributes:
        first: index of its first prompt; its other prompts have the next ones.
        num_outputs: number of outputs that have not ended.
        chunks: the chunks that the client has not taken.
        error: why no more come.
        news: set when chunks or an error came.
        slice: the slice of a trial of heads in which it began; None outside.
    """

    first: int
    num_outputs: int
    slice: HeadSlice | None = None
    chunks: list[StreamChunk] = field(default_factory=list)
    error: Exception | None = None
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, chunk: StreamChunk) -> None:
        self.chunks.append(chunk)
        self.news.set()

    def fail(self, error: Exception) -> None:
        self.error = error
        self.news.set()


class EngineProcess:
    """One engine process.

    Args:
        on_message: called in the event loop with each message, and with None at the process's end.

    Attributes:
        info: facts of the loaded engine; None before.
        streams: requests that run here, by the indices of their prompts.
        end: how the process ended or hung, as a part of a sentence; "" while it lives.
        head_order: waits for the end of an order of a swap of heads; None without one.
        slice: counts the requests that begin now in a trial of heads; None counts none.
    """

    def __init__(
        self, number: int, spec: EngineSpec, on_message: Callable[[Self, Any], None]
    ) -> None:
        self.number = number
        self.info: EngineInfo | None = None
        self.streams: dict[int, _Stream] = {}
        self.end = ""
        self.head_order: asyncio.Future[HeadDone] | None = None
        self.slice: HeadSlice | None = None
        self._on_message = on_message
        self._orders: SimpleQueue[Any] = SimpleQueue()
        context = multiprocessing.get_context("spawn")
        self.heartbeat = Heartbeat(context, spec.hang_timeout_s)
        self._forgiven_s, self._forgiven_of = 0.0, 0.0
        self._connection, theirs = context.Pipe()
        name, args = f"peagle-engine-{number}", (spec, theirs, self.heartbeat)
        self._process = context.Process(target=run_engine, args=args, name=name, daemon=True)
        self._process.start()
        theirs.close()
        self._loop = asyncio.get_running_loop()
        for work in (self._receive, self._send):
            threading.Thread(target=work, name=name, daemon=True).start()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    @property
    def is_ready(self) -> bool:
        """Return whether the process takes requests."""
        return self.info is not None and not self.end

    @property
    def load(self) -> int:
        """Return the number of outputs that run or wait here."""
        return sum(stream.num_outputs for stream in set(self.streams.values()))

    def send(self, message: Add | Cancel | HeadOrder | Stop) -> None:
        """Send an order; it is lost if the process has ended, which `on_message` reports."""
        self._orders.put(ForkingPickler.dumps(message))

    def _send(self) -> None:
        with suppress(OSError):
            while (order := self._orders.get()) is not None:
                self._connection.send_bytes(order)

    def _receive(self) -> None:
        message: Any = True
        while message is not None:
            try:
                message = self._connection.recv()
            except (EOFError, OSError):
                message = None
                self._orders.put(None)
            try:
                self._loop.call_soon_threadsafe(self._on_message, self, message)
            except RuntimeError:
                return  # the loop is closed

    def is_overdue(self, now: float, late_s: float) -> bool:
        """Return whether a sign of life should have come by `now`, by `time.monotonic`.

        `late_s` is how late this call comes. The machine may have stood still, and the engine with
        it: the delay extends the limit until the engine's next sign.
        """
        last_s, due_s = self.heartbeat.last_s, self.heartbeat.due_s
        if last_s != self._forgiven_of:
            self._forgiven_s, self._forgiven_of = 0.0, last_s
        self._forgiven_s += late_s
        return now > due_s + self._forgiven_s

    def kill(self) -> None:
        """Kill the process, even if it is stopped."""
        self._process.kill()

    def stop(self) -> None:
        """End the process; kill it if it hangs or does not end."""
        if not self.end:
            self.send(Stop())
            self._process.join(_JOIN_S)
        if self._process.is_alive():
            self.kill()
            self._process.join(_KILL_S)


class EnginePool:
    """All engine processes; the least loaded one gets the next request.

    The pool kills an engine that gives no sign of life in time. It restarts an engine that ended as
    long as its `CrashBudget` lasts; after that the others go on without it.

    Args:
        specs: the models and limits of each process.
        metrics: takes the counters, the signs of life and the ends of the engines.
        max_queue: number of outputs that may wait beyond the ones that are decoded.
        restart: whether a process that died is started again.

    Attributes:
        failure: why the server cannot go on, once it cannot.
        became_ready: set when one of the engines has loaded.
    """

    def __init__(
        self, specs: list[EngineSpec], metrics: Metrics, *, max_queue: int, restart: bool
    ) -> None:
        self._specs = specs
        self._metrics = metrics
        self._max_queue = max_queue
        self._restart = restart
        self._engines: list[EngineProcess | None] = [None] * len(specs)
        self._budgets = [CrashBudget() for _ in specs]
        self._beats = [time.monotonic()] * len(specs)
        self._given_up: set[int] = set()
        self._loaded = set[int]()
        self._numbers = itertools.count()
        self._is_closing = False
        self._watching: asyncio.Task[None] | None = None
        self.failure: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        self.became_ready = asyncio.Event()

    def start(self) -> None:
        """Start all processes; `became_ready` is set when one of them has loaded."""
        for number in range(len(self._specs)):
            self._start(number)
        self._watching = asyncio.ensure_future(self._watch())

    def _start(self, number: int) -> None:
        if self._is_closing or self.failure.done():
            return
        try:
            self._engines[number] = EngineProcess(number, self._specs[number], self._handle_message)
        except OSError as error:  # too many files or processes, too little memory
            self._budgets[number].crashed(while_loading=True)
            self._start_again(number, f"could not be started: {error}")

    @property
    def ready(self) -> list[EngineProcess]:
        """Return the engines that take requests."""
        return [engine for engine in self._engines if engine is not None and engine.is_ready]

    @property
    def info(self) -> EngineInfo | None:
        """Return the facts of the engines, which are all alike; None while none is loaded."""
        return next((engine.info for engine in self.ready), None)

    # ---- requests ----

    async def stream(
        self,
        engine: EngineProcess,
        prompts: list[list[int]],
        params: SamplingParams,
        *,
        proposer: str,
        priority: int = 0,
        cache_salt: bytes = b"",
        deadline: Deadline | None = None,
    ) -> AsyncGenerator[list[tuple[int, StreamChunk]], None]:
        """Yield the chunks of a request's outputs, as (index of the prompt, chunk).

        A list has all chunks that came since the last list, at least a step's. Leaving the
        iterator cancels the request.

        Args:
            engine: from `choose`.
            priority: requests with a lower number go first.
            cache_salt: only requests with the same salt share cached KV.

        Raises:
            ApiError: the request is refused, its engine died, or its deadline is over.
        """
        indices = list(itertools.islice(self._numbers, len(prompts)))
        stream = _Stream(indices[0], len(prompts) * params.n)
        if proposer == next(iter(self._specs[0].proposers)):
            stream.slice = engine.slice
        engine.streams |= dict.fromkeys(indices, stream)
        timer = None
        if deadline is not None:
            loop = asyncio.get_running_loop()
            timer = loop.call_at(deadline.end_s, stream.fail, deadline.error)
        try:
            for index, prompt in zip(indices, prompts):
                engine.send(Add(index, prompt, params, proposer, priority, cache_salt))
            while stream.num_outputs:
                await stream.news.wait()
                stream.news.clear()
                if chunks := stream.chunks:
                    stream.chunks = []
                    stream.num_outputs -= sum([chunk.output is not None for chunk in chunks])
                    yield [(chunk.index - stream.first, chunk) for chunk in chunks]
                if stream.error is not None and stream.num_outputs:
                    raise stream.error
        finally:
            if timer is not None:
                timer.cancel()
            for index in indices:
                del engine.streams[index]
                if stream.num_outputs:
                    engine.send(Cancel(index))

    def choose(self, num_outputs: int) -> EngineProcess:
        """Return the engine with the smallest load.

        Raises:
            ApiError: no engine is there (503), or too many outputs wait (429).
        """
        ready = self.ready
        if not ready:
            text = "The model is not loaded at the moment; try again shortly."
            raise ApiError(503, text, code="not_ready", headers={"Retry-After": "2"})
        room = sum(engine.info.max_num_seqs for engine in ready if engine.info) + self._max_queue
        load = sum(engine.load for engine in self._engines if engine is not None)
        if load + num_outputs > room:
            raise ApiError(
                429,
                f"{load} outputs run or wait and {num_outputs} were asked for; expected at most "
                f"{room} together. Try again later, or ask for fewer at a time.",
                code="queue_full",
                headers={"Retry-After": "1"},
            )
        return min(ready, key=lambda engine: engine.load)

    def fail_streams(self, error: ApiError) -> None:
        """End all requests by an error."""
        for engine in self._engines:
            for stream in engine.streams.values() if engine is not None else ():
                stream.fail(error)

    # ---- swap of the head ----

    @property
    def head_folder(self) -> str | None:
        """Return the folder of the head that the first proposer of a new engine loads."""
        speculative = next(iter(self._specs[0].proposers.values()))
        return None if speculative is None else speculative.model

    async def try_head(self, folder: str) -> list[EngineProcess]:
        """Let the first proposer of all engines draft with another head, or leave all as they are.

        Returns the engines, for `keep_head` or `restore_head`. Those that start before load the old
        head.

        Raises:
            ApiError: an engine is not there (503), refuses the head (400), or failed (500).
        """
        numbers = [n for n in range(len(self._specs)) if n not in self._given_up]
        engines = [engine for n in numbers if (engine := self._engines[n]) is not None]
        if len(engines) < len(numbers) or not all(engine.is_ready for engine in engines):
            text = "An engine is not loaded at the moment; try again shortly."
            raise ApiError(503, text, code="not_ready", headers={"Retry-After": "5"})
        try:
            for order in (HeadOrder("load", folder), HeadOrder("copy")):
                await _order_all(engines, order)
        except BaseException:
            self.restore_head(engines)
            raise
        return engines

    async def turn_head(self, engines: list[EngineProcess], *, is_new: bool) -> None:
        """Let engines of `try_head` draft with the new head, or with the old one.

        Raises:
            ApiError: an engine failed (500); `restore_head` must follow.
        """
        await _order_all(engines, HeadOrder("new" if is_new else "old"))

    def restore_head(self, engines: list[EngineProcess]) -> None:
        """Let engines of `try_head` draft with the old head for good."""
        for engine in engines:
            engine.send(HeadOrder("restore"))

    def keep_head(self, engines: list[EngineProcess], folder: str) -> None:
        """Let engines of `try_head` draft with the new head for good, and later ones load it."""
        for engine in engines:
            engine.send(HeadOrder("keep"))
        for number, spec in enumerate(self._specs):
            name, speculative = next(iter(spec.proposers.items()))
            assert speculative is not None, "it drafts with a head"
            proposers = {**spec.proposers, name: replace(speculative, model=folder)}
            self._specs[number] = replace(spec, proposers=proposers)

    # ---- messages ----

    def _handle_message(self, engine: EngineProcess, message: Any) -> None:
        match message:
            case NewChunks(chunks, stats):
                for chunk in chunks:
                    if (stream := engine.streams.get(chunk.index)) is not None:
                        stream.add(chunk)
                        if stream.slice is not None and stream.slice is engine.slice:
                            stream.slice.count(stream.first, chunk)
                if stats is not None:
                    self._metrics.record_engine(engine.number, stats)
            case Refused(index, text, is_user_error):
                if (stream := engine.streams.get(index)) is None:
                    return
                error = api_error(text)
                if not is_user_error:
                    logger.error("a request failed: %s", text)
                    text = "The engine could not take the request; the server's log says why."
                    error = ApiError(500, text, code="engine_error")
                stream.fail(error)
            case HeadDone():
                if engine.head_order is not None and not engine.head_order.done():
                    engine.head_order.set_result(message)
            case EngineInfo():
                engine.info = message
                self._budgets[engine.number].num_failed_starts = 0
                self._loaded.add(engine.number)
                self.became_ready.set()
                extra = {"engine": engine.number, "pid": engine.pid}
                logger.info("engine %d is ready", engine.number, extra=extra)
            case Failed(text, is_user_error):
                # At a restart, as where a swapped head was deleted, the others go on.
                is_first = engine.number not in self._loaded
                if is_user_error and is_first and not self.failure.done():
                    self.failure.set_result(UserError(text))
                else:
                    logger.error("engine %d failed: %s", engine.number, text)
            case None:
                self._handle_end(engine)

    # ---- ends ----

    async def _watch(self) -> None:
        """Look for engines that give no sign of life, for as long as the pool runs."""
        before = time.monotonic()
        while True:
            await asyncio.sleep(_WATCH_EVERY_S)
            now = time.monotonic()
            late_s, before = now - before - _WATCH_EVERY_S, now
            for number, engine in enumerate(self._engines):
                is_busy = False
                if engine is not None:
                    self._beats[number] = engine.heartbeat.last_s
                    is_busy = engine.heartbeat.activity != "working"
                    if not engine.end and engine.is_overdue(now, late_s):
                        self._end_hung(engine, now)
                self._metrics.engine_beat(number, 0.0 if is_busy else now - self._beats[number])

    def _end_hung(self, engine: EngineProcess, now: float) -> None:
        heartbeat, number = engine.heartbeat, engine.number
        silent_s, limit_s = now - heartbeat.last_s, heartbeat.due_s - heartbeat.last_s
        logger.error(
            "engine %d hangs: it was %s and gave no sign of life for %.1f s, of %.1f s allowed; it "
            "is killed",
            *(number, heartbeat.activity, silent_s, limit_s),
            extra={"engine": number, "pid": engine.pid},
        )
        self._metrics.engine_hung(number)
        self._take_out_of_service(engine, f"hung for {silent_s:.1f} s", "engine_hung")
        engine.kill()
        asyncio.get_running_loop().call_later(_KILL_S, self._give_up_if_alive, engine)

    def _give_up_if_alive(self, engine: EngineProcess) -> None:
        """Give up an engine that has not ended long after it was killed."""
        if self._engines[engine.number] is engine and not self._is_closing:
            text = f"was killed and is still there after {_KILL_S:g} s; its GPU may hang"
            self._give_up(engine.number, text)

    def _take_out_of_service(self, engine: EngineProcess, end: str, code: str) -> None:
        """Count the crash of an engine, and end the requests that wait for it."""
        engine.end = end
        self._budgets[engine.number].crashed(while_loading=engine.info is None)
        crashes = sum(budget.num_recent for budget in self._budgets)
        text = "The engine stopped while it served this request; send it again."
        if crashes > 1:
            text = (
                f"The engine stopped while it served this request; engines stopped {crashes} times "
                f"within {WINDOW_S / 60:g} minutes. The request may be the cause: do not send it "
                "again as it is."
            )
        for stream in engine.streams.values():
            stream.fail(ApiError(500, text, code=code))
        if engine.head_order is not None and not engine.head_order.done():
            engine.head_order.set_result(HeadDone(f"engine {engine.number} {end}", False))

    def _handle_end(self, engine: EngineProcess) -> None:
        """Start another process in the place of one that has ended, if the pool restarts."""
        number = engine.number
        if self._engines[number] is not engine:
            return
        self._engines[number] = None
        if not engine.end:
            self._take_out_of_service(engine, "ended by a fault", "engine_died")
        if self._is_closing or self.failure.done() or number in self._given_up:
            return
        logger.error("engine %d is gone", number, extra={"engine": number})
        self._start_again(number, engine.end)

    def _start_again(self, number: int, end: str) -> None:
        """Start another process within the engine's crash budget; `end` says how the last ended."""
        budget = self._budgets[number]
        if not self._restart:
            self._give_up(number, end)
        elif budget.spent is not None:
            self._give_up(number, f"{end}; {budget.spent}")
        else:
            self._metrics.engine_restarted(number)
            asyncio.get_running_loop().call_later(budget.delay_s, self._start, number)

    def _give_up(self, number: int, reason: str) -> None:
        """Start an engine no more; without any engine the server ends."""
        self._given_up.add(number)
        if self._restart and len(self._given_up) < len(self._specs):
            logger.error("engine %d %s. The others go on without it", number, reason)
        elif not self.failure.done():
            self.failure.set_result(EngineFailed(f"engine {number} {reason}"))

    def kill(self) -> None:
        """Kill all processes at once."""
        self._is_closing = True
        for engine in self._engines:
            if engine is not None:
                engine.kill()

    async def close(self) -> None:
        """End all processes; requests that wait end with an error."""
        self._is_closing = True
        if self._watching is not None:
            self._watching.cancel()
        engines = [engine for engine in self._engines if engine is not None]
        await asyncio.gather(*(asyncio.to_thread(engine.stop) for engine in engines))


async def _order_all(engines: list[EngineProcess], order: HeadOrder) -> None:
    """Give all engines an order, wait for its end in all, and raise an ApiError if one failed."""
    waiting: list[asyncio.Future[HeadDone]] = []
    for engine in engines:
        engine.head_order = asyncio.get_running_loop().create_future()
        waiting.append(engine.head_order)
        if engine.end:
            engine.head_order.set_result(HeadDone(f"engine {engine.number} {engine.end}", False))
        engine.send(order)
    every = await asyncio.gather(*waiting)
    # An engine that ended after it had done its part starts again with the old head.
    every += [HeadDone(f"engine {e.number} {e.end}", False) for e in engines if e.end]
    for done in every:
        if done.error and done.is_user_error:
            raise ApiError(400, done.error, param="head", code="head_refused")
        if done.error:
            logger.error("a head could not be swapped: %s", done.error)
            text = "An engine could not take the head; the server's log says why."
            raise ApiError(500, text, code="engine_error")


def specs_for(spec: EngineSpec, count: int) -> list[EngineSpec]:
    """Return the specs of `count` processes, each with its own GPU where there are GPUs.

    Raises:
        UserError: there are fewer GPUs than processes.
    """
    if count == 1:
        return [spec]
    if spec.engine.device == "cpu":
        return [spec] * count
    gpus = gpu_names()
    if not gpus and spec.engine.device == "auto":
        return [spec] * count
    if count > len(gpus):
        raise UserError(
            f"data_parallel_size is {count}, and there are {len(gpus)} GPUs; expected at most one "
            "engine a GPU. Lower it, or set device cpu."
        )
    return [replace(spec, gpu=gpu) for gpu in gpus[:count]]
