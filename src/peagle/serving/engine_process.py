"""The engine process: models, steps, and one message a step to the front end.

It never waits for clients, HTTP or JSON, which are the front end's.
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
from dataclasses import asdict, fields, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from queue import Empty
from typing import Any

from peagle.engine import EngineStats, LLMEngine, SpeculationStats
from peagle.engine.loop import EngineLoop, Order
from peagle.engine.outputs import StreamChunk
from peagle.engine.placement import resolve_device, resolve_dtype, set_threads
from peagle.engine.requests import Requests
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
# Beats of an idle engine, and steps of one token that show that its device still answers.
_BEAT_EVERY_S = 0.5
_CHECK_EVERY_S = 10.0
# What a step may take to end when the front end is gone.
_LAST_STEP_S = 2.0
_PR_SET_PDEATHSIG = 1


def run_engine(spec: EngineSpec, connection: Connection, heartbeat: Heartbeat) -> None:
    """Serve until the front end says stop or goes away; the entry point of the process."""
    # A signal to stop the server reaches the whole process group; the front end handles it.
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
        pass  # the front end is gone
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
    """Load an LLM for each proposer, on one target."""
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


class EngineWorker(EngineLoop):
    """The loop of an engine process: orders come from the front end, chunks go back to it.

    Args:
        llms: an LLM for each proposer, all on one target.
        spec: what they were made of.
        connection: the pipe to the front end.
        pulse: takes the signs of life.
    """

    def __init__(
        self, llms: dict[str, LLM], spec: EngineSpec, connection: Connection, pulse: Pulse
    ) -> None:
        super().__init__({n: llm.requests for n, llm in llms.items()}, spec.compile_timeout_s)
        self._llms = llms
        self._connection = connection
        self._pulse = pulse
        self._beat_every_s = min(_BEAT_EVERY_S, spec.hang_timeout_s / 4 or _BEAT_EVERY_S)
        self._worked_s = time.monotonic()
        for llm in llms.values():
            llm.engine.on_pass = pulse.planned
        self._last_stats_s = 0.0

    def info(self) -> EngineInfo:
        """Return what the front end has to know."""
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
        """Serve until the front end says stop, or until the pipe ends."""
        threading.Thread(target=self._listen, name="peagle-orders", daemon=True).start()
        self._send([], always=True)
        self.run()

    def check(self) -> None:
        """Compute one token with each engine; no request may run."""
        for llm in self._llms.values():
            with self._pulse.step():
                llm.engine.check()
        self._worked_s = time.monotonic()

    def step(self) -> list[StreamChunk]:
        with self._pulse.step():
            chunks = super().step()
        self._worked_s = time.monotonic()
        return chunks

    def deliver(self, chunks: list[StreamChunk]) -> None:
        self._send(chunks, always=not self.has_unfinished)

    def refuse(self, index: int, error: BaseException) -> None:
        is_mistake = isinstance(error, UserError)
        text = str(error) if is_mistake else "".join(traceback.format_exception(error))
        self._connection.send(Refused(index, text, is_mistake))

    def next_order(self) -> Order | None:
        """Wait for an order; an idle engine beats, and is checked now and then."""
        while True:
            self._pulse.beat()
            try:
                order = self._orders.get(timeout=self._beat_every_s)
            except Empty:
                if time.monotonic() - self._worked_s > _CHECK_EVERY_S:
                    self.check()
                    if trim is not None:
                        trim(0)
            else:
                self._pulse.order()
                return order

    def _listen(self) -> None:
        """Turn messages into orders, in a thread of its own."""
        try:
            while not isinstance(message := self._connection.recv(), Stop):
                self.post(partial(self._obey, message))
        except (EOFError, OSError):
            pass
        self.post(None)

    def _obey(self, message: Add | Cancel) -> None:
        if isinstance(message, Add):
            self.add(message)
        elif self.cancel(message.index):
            self._send([], always=True)

    def _send(self, chunks: list[StreamChunk], *, always: bool) -> None:
        """Send chunks, and the counters of all engines together at most every so often."""
        now, stats = time.monotonic(), None
        if always or now - self._last_stats_s >= _STATS_EVERY_S:
            self._last_stats_s = now
            stats = pooled([llm.engine for llm in self._llms.values()])
        if chunks or stats:
            self._connection.send(Stepped(chunks, stats))


def pooled(engines: list[LLMEngine]) -> EngineStats:
    """Return the counters of several engines as those of one."""
    every = [engine.stats for engine in engines]
    totals: dict[str, Any] = {
        f.name: sum(getattr(stats, f.name) for stats in every)
        for f in fields(EngineStats)
        if f.name not in ("speculation", "step_times")
    }
    speculation = SpeculationStats.pooled(stats.speculation for stats in every)
    return EngineStats(**totals, speculation=speculation, step_times={})
