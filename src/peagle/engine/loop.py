"""The loop around engines: it carries out orders between steps, and delivers chunks after them."""

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue

from peagle.config import SamplingParams
from peagle.engine.grammar import MAX_THREADS, WorkClock
from peagle.engine.outputs import StreamChunk
from peagle.engine.requests import Prompt, Requests
from peagle.errors import UserError

_COMPILERS = 2
# Seconds between two looks at a compilation.
_LOOK_EVERY_S = 0.05

Order = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Add:
    """An order to run a request on the engine of a proposer; its chunks carry its `index`."""

    index: int
    prompt: Prompt
    params: SamplingParams
    proposer: str = ""
    priority: int = 0
    cache_salt: bytes = b""


@dataclass(slots=True)
class _Compilation:
    """The compilation of a request's grammar, in a thread beside the loop.

    `timer` posts the next look at its clock; None without a limit of time.
    """

    message: Add
    clock: WorkClock
    future: Future[None]
    timer: threading.Timer | None = None


@dataclass(slots=True)
class _Running:
    requests: Requests
    seq_ids: list[int]
    num_left: int  # outputs that have not ended


class EngineLoop:
    """Steps engines in one thread; all methods but `post` belong to that thread.

    Args:
        engines: requests of each engine by the name of its proposer.
        compile_timeout_s: processor seconds after which a grammar that still compiles is refused;
            None waits.
    """

    def __init__(
        self, engines: Mapping[str, Requests], compile_timeout_s: float | None = None
    ) -> None:
        self._engines = engines
        self._compile_timeout_s = compile_timeout_s
        self._orders: SimpleQueue[Order | None] = SimpleQueue()
        self._running: dict[int, _Running] = {}
        self._compiling: dict[int, _Compilation] = {}
        self._compilers = ThreadPoolExecutor(_COMPILERS, thread_name_prefix="peagle-grammar")

    def post(self, order: Order | None) -> None:
        """Have the loop carry out an order before its next step; None ends the loop."""
        self._orders.put(order)

    def deliver(self, chunks: list[StreamChunk]) -> None:
        """Deliver the chunks of a step."""
        raise NotImplementedError

    def refuse(self, index: int, error: BaseException) -> None:
        """Report that a request was not queued."""
        raise NotImplementedError

    def next_order(self) -> Order | None:
        """Wait for an order and return it."""
        return self._orders.get()

    def step(self) -> list[StreamChunk]:
        """Step every engine that has work, and return the chunks."""
        return [c for r in self._engines.values() if r.has_unfinished for c in r.step()]

    @property
    def has_unfinished(self) -> bool:
        """Return whether a step has work to do."""
        return any(requests.has_unfinished for requests in self._engines.values())

    def run(self) -> None:
        """Serve until an order of None."""
        while True:
            while not self._orders.empty() or not self.has_unfinished:
                order = self.next_order()
                if order is None:
                    return
                order()
            chunks = self.step()
            for chunk in chunks:
                running = self._running.get(chunk.index)
                if running is not None and chunk.output is not None:
                    running.num_left -= 1
                    if running.num_left == 0:
                        del self._running[chunk.index]
            self.deliver(chunks)

    def add(self, message: Add) -> None:
        """Queue a request, once threads beside the loop have compiled its grammar."""
        if message.params.structured_output is None:
            self._queue(message)
            return
        requests, clock = self._engines[message.proposer], WorkClock()

        def compile_grammar() -> None:
            with clock:
                requests.compile_grammar(message.params)

        future = self._compilers.submit(compile_grammar)
        compilation = self._compiling[message.index] = _Compilation(message, clock, future)
        if self._compile_timeout_s is not None:
            self._look_later(compilation, self._compile_timeout_s)
        future.add_done_callback(lambda _: self.post(lambda: self._queue_compiled(compilation)))

    def _queue_compiled(self, compilation: _Compilation) -> None:
        message = compilation.message
        if compilation.timer is not None:
            compilation.timer.cancel()
        if self._compiling.get(message.index) is not compilation:
            return  # it was given up or cancelled
        del self._compiling[message.index]
        if (error := compilation.future.exception()) is not None:
            self.refuse(message.index, error)
        else:
            self._queue(message)

    def _look_later(self, compilation: _Compilation, left_s: float) -> None:
        """Look at a compilation once it may have used `left_s` more processor seconds."""
        wait_s = max(left_s / MAX_THREADS, _LOOK_EVERY_S)
        timer = threading.Timer(wait_s, self.post, (lambda: self._look(compilation),))
        timer.daemon = True
        timer.start()
        compilation.timer = timer

    def _look(self, compilation: _Compilation) -> None:
        """Give up a compilation that has used too much time."""
        message, limit_s = compilation.message, self._compile_timeout_s
        if limit_s is None or self._compiling.get(message.index) is not compilation:
            return
        left_s = limit_s - compilation.clock.used_s()
        if left_s > 0:
            self._look_later(compilation, left_s)
            return
        del self._compiling[message.index]
        reason = f"it took more than {limit_s:g} s of the processor to compile; simplify it."
        self._engines[message.proposer].refuse_grammar(message.params, reason)
        self.refuse(message.index, UserError(f"The structured output was given up: {reason}"))

    def _queue(self, message: Add) -> None:
        requests = self._engines[message.proposer]
        try:
            seq_ids = requests.add(
                message.index,
                message.prompt,
                message.params,
                priority=message.priority,
                cache_salt=message.cache_salt,
            )
        except Exception as error:  # other requests go on: this one was not queued
            self.refuse(message.index, error)
        else:
            self._running[message.index] = _Running(requests, seq_ids, message.params.n)

    def cancel(self, index: int) -> bool:
        """Stop a request and free its memory; return whether it was running."""
        if (compilation := self._compiling.pop(index, None)) is not None:
            compilation.future.cancel()
        running = self._running.pop(index, None)
        if running is None:
            return False
        running.requests.cancel(running.seq_ids)
        return True
