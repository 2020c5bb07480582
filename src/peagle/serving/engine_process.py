"""The engine process: models, steps, and one message a step to the front end.

Slow clients, HTTP and JSON are the front end's: nothing here waits for any of them.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields, replace
from multiprocessing.connection import Connection
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from peagle.engine import EngineStats, LLMEngine, SpeculationStats
from peagle.engine.placement import resolve_device, resolve_dtype
from peagle.engine.requests import Requests
from peagle.engine.threads import set_threads
from peagle.errors import UserError
from peagle.llm import LLM
from peagle.models.target import TargetModel
from peagle.serving.heartbeat import Heartbeat, Pulse, announce_compilation
from peagle.serving.kv_split import split_kv
from peagle.serving.logs import configure_logging
from peagle.serving.memory_release import trim
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

_STATS_EVERY_S = 0.1
_COMPILERS = 2
# Beats of an idle engine, and steps of one token that show that its device still answers.
_BEAT_EVERY_S = 0.5
_CHECK_EVERY_S = 10.0
# What a step may take to end when the front end is gone.
_LAST_STEP_S = 2.0
_PR_SET_PDEATHSIG = 1


def run_engine(spec: EngineSpec, connection: Connection, heartbeat: Heartbeat) -> None:
    """Serve until the front end says stop or goes away; the entry point of the process."""
    # Whoever stops the server signals the whole group; the front end decides what becomes of it.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    _end_with_front_end()
    configure_logging(spec.log_format)
    pulse = Pulse(heartbeat)
    try:
        worker = EngineWorker(_load(spec, pulse), spec, connection, pulse)
        worker.check()  # the first step makes what later ones find made
        start = time.monotonic()
        worker.check()
        pulse.loaded(time.monotonic() - start)
        connection.send(Ready(worker.info()))
        worker.serve()
    except (BrokenPipeError, EOFError, ConnectionResetError):
        pass  # the front end is gone: nobody is left to tell
    except BaseException as error:
        is_mistake = isinstance(error, UserError)
        connection.send(Failed(str(error) if is_mistake else traceback.format_exc(), is_mistake))
    finally:
        # Threads that still compile a grammar are not waited for.
        os._exit(0)


def _end_with_front_end() -> None:
    """Make the process end when the front end does, even in the middle of a step.

    A thread waits for the front end, which the system reports by the end of a pipe. No thread runs
    in a process that is stopped, or while a step holds the interpreter: on Linux the kernel kills
    it, when the thread that started it ends, which is the front end's main thread.
    """
    front_end = multiprocessing.parent_process()
    assert front_end is not None

    def end() -> None:
        front_end.join()
        time.sleep(_LAST_STEP_S)
        os._exit(1)

    threading.Thread(target=end, name="peagle-front-end", daemon=True).start()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if not front_end.is_alive():  # it ended before the kernel knew
            os._exit(1)


def _load(spec: EngineSpec, pulse: Pulse) -> dict[str, LLM]:
    """An LLM for each proposer, on one target."""
    if spec.device_index is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(spec.device_index)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if spec.threads is not None:
        set_threads(spec.threads)
    pulse.loading()
    device = resolve_device(spec.engine.device)
    if device.type == "cuda":  # nothing is compiled for a CPU, and the compilers load slowly
        announce_compilation(pulse)
    dtype = resolve_dtype(spec.engine.dtype, device)
    target = TargetModel.load(Path(spec.target), dtype=dtype, device=device)
    sizes = replace(spec.engine, dtype="auto", device="auto")
    llms: dict[str, LLM] = {}
    for number, (name, speculative) in enumerate(spec.proposers.items()):
        pulse.loading()
        share = asdict(split_kv(sizes, device, number, len(spec.proposers)))
        llm = llms[name] = LLM(model=target, speculative_config=speculative, **share)
        llm.requests = Requests(llm.engine, llm.tokenizer, spec.grammar_budget_s or None)
        llm.engine.touch_caches()
    return llms


@dataclass(slots=True)
class _Request:
    """A request here: which proposer's, the ids of its outputs, how many are yet to end."""

    requests: Requests
    num_left: int
    seq_ids: list[int] = field(default_factory=list)


class EngineWorker:
    """Orders between steps, chunks after them.

    Args:
        llms: by proposer, on one target.
        spec: what they were made of.
        connection: to the front end.
        pulse: takes the signs of life.
    """

    def __init__(
        self, llms: dict[str, LLM], spec: EngineSpec, connection: Connection, pulse: Pulse
    ) -> None:
        self._llms = llms
        self._spec = spec
        self._connection = connection
        self._pulse = pulse
        self._beat_every_s = min(_BEAT_EVERY_S, spec.hang_timeout_s / 4 or _BEAT_EVERY_S)
        self._worked_s = time.monotonic()
        for llm in llms.values():
            llm.engine.on_pass = pulse.planned
        self._orders: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._running: dict[int, _Request] = {}
        self._compiling: dict[int, Future[None]] = {}
        self._compilers = ThreadPoolExecutor(_COMPILERS, thread_name_prefix="peagle-grammar")
        self._told_s = 0.0

    def info(self) -> EngineInfo:
        """What the front end has to know."""
        llm = next(iter(self._llms.values()))
        plans = "\n".join(str(one.engine.memory_plan) for one in self._llms.values())
        return EngineInfo(
            max_model_len=llm.engine.max_model_len,
            vocab_size=llm.target.vocab_size,
            max_num_seqs=llm.engine.config.max_num_seqs,
            num_speculative_tokens={
                name: one.engine.num_speculative_tokens for name, one in self._llms.items()
            },
            defaults=llm.target.generation_defaults(),
            memory=plans,
            device=str(llm.target.device),
        )

    def serve(self) -> None:
        """Until told to stop, or until the pipe ends."""
        threading.Thread(target=self._listen, name="peagle-orders", daemon=True).start()
        self._connection.send(Stepped([], self._stats(always=True)))
        requests = [llm.requests for llm in self._llms.values()]
        while True:
            while not self._orders.empty() or not any(r.has_unfinished for r in requests):
                order = self._next_order()
                if order is None:
                    return
                self._pulse.order()
                order()
            with self._pulse.step():
                chunks = [chunk for r in requests if r.has_unfinished for chunk in r.step()]
            self._worked_s = time.monotonic()
            for chunk in chunks:
                if chunk.output is not None:
                    self._count_end(chunk.index)
            idle = not any(r.has_unfinished for r in requests)
            stats = self._stats(always=idle)
            if chunks or stats:
                self._connection.send(Stepped(chunks, stats))

    def check(self) -> None:
        """Compute one token with each engine; nothing may run."""
        for llm in self._llms.values():
            with self._pulse.step():
                llm.engine.check()
        self._worked_s = time.monotonic()

    def _next_order(self) -> Callable[[], None] | None:
        """Wait for an order, with beats and now and then a check of an engine that is idle."""
        while True:
            self._pulse.beat()
            try:
                return self._orders.get(timeout=self._beat_every_s)
            except Empty:
                if time.monotonic() - self._worked_s > _CHECK_EVERY_S:
                    self.check()
                    if trim is not None:
                        trim(0)

    def _listen(self) -> None:
        """Turn messages into orders, in a thread of its own."""
        try:
            while not isinstance(message := self._connection.recv(), Stop):
                self._orders.put(self._order(message))
        except (EOFError, OSError):
            pass
        self._orders.put(None)

    def _order(self, message: Add | Cancel) -> Callable[[], None]:
        if isinstance(message, Cancel):
            return lambda: self._cancel(message.index)
        return lambda: self._add(message)

    # ---- in the engine's thread ---------------------------------------------------------------

    def _add(self, message: Add) -> None:
        """Queue a request, once its grammar is compiled."""
        if message.params.structured_output is None:
            self._queue(message)
            return
        requests = self._llms[message.proposer].requests
        future = self._compilers.submit(requests.compile_grammar, message.params)
        self._compiling[message.index] = future
        limit = self._spec.compile_timeout_s
        timer = threading.Timer(limit, self._orders.put, (lambda: self._give_up(message.index),))
        timer.daemon = True
        timer.start()

        def compiled(_: Future[None]) -> None:
            timer.cancel()
            self._orders.put(lambda: self._compiled(message))

        future.add_done_callback(compiled)

    def _compiled(self, message: Add) -> None:
        future = self._compiling.pop(message.index, None)
        if future is None or future.cancelled():
            return  # given up, or nobody waits any more
        if (error := future.exception()) is not None:
            self._refuse(message.index, error)
        else:
            self._queue(message)

    def _give_up(self, index: int) -> None:
        future = self._compiling.pop(index, None)
        if future is not None:
            future.cancel()
            limit = self._spec.compile_timeout_s
            text = f"The structured output did not compile within {limit:g} s; simplify it."
            self._refuse(index, UserError(text))

    def _queue(self, message: Add) -> None:
        requests = self._llms[message.proposer].requests
        request = _Request(requests, message.params.n)
        try:
            request.seq_ids = requests.add(
                message.index,
                message.prompt,
                message.params,
                priority=message.priority,
                cache_salt=message.cache_salt,
            )
        except Exception as error:  # its own affair: nothing was queued
            self._refuse(message.index, error)
        else:
            self._running[message.index] = request

    def _refuse(self, index: int, error: BaseException) -> None:
        is_mistake = isinstance(error, UserError)
        text = str(error) if is_mistake else "".join(traceback.format_exception(error))
        self._connection.send(Refused(index, text, is_mistake))

    def _cancel(self, index: int) -> None:
        if (future := self._compiling.pop(index, None)) is not None:
            future.cancel()
        request = self._running.pop(index, None)
        if request is not None:
            request.requests.cancel(request.seq_ids)
            self._connection.send(Stepped([], self._stats(always=True)))

    def _count_end(self, index: int) -> None:
        request = self._running.get(index)
        if request is not None:
            request.num_left -= 1
            if request.num_left == 0:
                del self._running[index]

    def _stats(self, *, always: bool) -> EngineStats | None:
        """The counters of all engines together, at most every so often."""
        now = time.monotonic()
        if not always and now - self._told_s < _STATS_EVERY_S:
            return None
        self._told_s = now
        return pooled([llm.engine for llm in self._llms.values()])


def pooled(engines: list[LLMEngine]) -> EngineStats:
    """The counters of several engines as those of one."""
    every = [engine.stats for engine in engines]
    totals: dict[str, Any] = {
        f.name: sum(getattr(stats, f.name) for stats in every)
        for f in fields(EngineStats)
        if f.name not in ("speculation", "step_times")
    }
    speculation = SpeculationStats.pooled(stats.speculation for stats in every)
    return EngineStats(**totals, speculation=speculation, step_times={})
