"""Patience for grammars: what takes long goes on beside the engine, and ends if it takes too long.

A few grammars make the matcher take seconds for one mask, and a call of it cannot be interrupted.
So a thread of its own makes these calls. The engine waits some milliseconds of a step for each
grammar; a sequence whose grammar takes longer sits out steps until its call has ended, and beyond
the budget of a step it ends with an error. The interpreter is free during the calls. Times are
those of the processor: a busy machine ends no request.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Generic, Protocol, TypeVar

_PATIENCE_S = 0.01
_LOOK_EVERY_S = 0.005
# Threads that go on beside the engine, each on a core.
_MOST_BESIDE = max(2, (os.cpu_count() or 1) // 2)
# Where no thread's clock can be read by another thread, the time is that on the wall.
_HAS_THREAD_CLOCKS = hasattr(time, "pthread_getcpuclockid")
_clock = time.thread_time if _HAS_THREAD_CLOCKS else time.perf_counter


class Spender(Protocol):
    """What spends the budget.

    Attributes:
        spent_s: processor seconds of this step so far.
        is_busy: its work goes on beside the engine; nothing else may touch it.
        is_over_budget: its work took too long; it is never touched again.
    """

    spent_s: float
    is_busy: bool
    is_over_budget: bool


S = TypeVar("S", bound=Spender)
Work = Callable[[int, S], None]


class StepBudget:
    """Carries out the grammar work of an engine's steps.

    Args:
        seconds: of the processor for one grammar in one step; None sets no limit, and the caller's
            thread does the work, however long it takes.
    """

    def __init__(self, seconds: float | None = None) -> None:
        self.seconds = seconds
        self._worker: _Worker | None = None
        self._beside: list[_Job] = []

    def each(
        self, spenders: Sequence[S | None], work: Work[S], afterwards: Work[S] | None = None
    ) -> set[int]:
        """Call `work(index, spender)` for each spender that is there and free.

        A spender whose call takes long is busy from then on until the call has ended.

        Args:
            spenders: None is passed over, and so are those that are busy or over the budget.
            work: what is called.
            afterwards: called in the same way behind a call that the engine did not wait for.

        Returns:
            the indices of the spenders that the engine did not wait for.
        """
        items = [
            (index, spender)
            for index, spender in enumerate(spenders)
            if spender is not None and not (spender.is_busy or spender.is_over_budget)
        ]
        if self.seconds is None:
            for index, spender in items:
                work(index, spender)
            return set()
        beside: set[int] = set()
        while items:
            items, left = self._carry_out(_Job(items, work, afterwards, self.seconds))
            beside |= left
        return beside

    def _carry_out(self, job: _Job[S]) -> tuple[list[tuple[int, S]], set[int]]:
        """Do the work; returns items that are left to do, and those that are not waited for."""
        if self._worker is None:
            self._worker = _Worker()
            self._worker.start()
        self._worker.jobs.put(job)
        while not job.done.acquire(timeout=_LOOK_EVERY_S):
            may_pass = sum(not one.is_over for one in self._beside) < _MOST_BESIDE
            found = job.go_beside(self._worker, alone=may_pass)
            if found is not None:
                self._worker = None
                self._beside.append(job)
                rest, beside = found
                return rest, {index for index, _ in beside}
        if job.error is not None:
            raise job.error
        return [], set()

    def mark_excess(self) -> None:
        """Mark the grammars that have gone beyond the budget meanwhile."""
        self._beside = [job for job in self._beside if not job.is_over]
        for job in self._beside:
            job.mark_excess()

    def wait_for_room(self) -> None:
        """Wait until another thread may go on beside the engine."""
        while sum(not job.is_over for job in list(self._beside)) >= _MOST_BESIDE:
            time.sleep(_LOOK_EVERY_S)

    @property
    def excess(self) -> str:
        """What a user is told of a grammar that goes beyond the budget."""
        return (
            f"the grammar took more than {self.seconds:g} s of the processor in one step. Bound "
            "its repeats more tightly, and write it so that a text can be read in one way only; "
            "the operator raises the limit with --grammar-budget."
        )


class _Job(Generic[S]):
    """Calls of one step. Both threads move it on under its lock."""

    def __init__(
        self,
        items: list[tuple[int, S]],
        work: Work[S],
        afterwards: Work[S] | None,
        seconds: float,
    ) -> None:
        self.done = threading.Lock()
        self.done.acquire()
        self.error: BaseException | None = None
        self.is_over = False
        self._items, self._work, self._afterwards = items, work, afterwards
        self._seconds = seconds
        self._lock = threading.Lock()
        self._at: int | None = None  # the item whose call is under way
        self._start_s = 0.0
        self._worker: _Worker | None = None  # once the engine does not wait any more
        self._last = len(items)  # items behind this one are not this job's

    def carry_out(self) -> bool:
        """In the worker: make the calls; whether the worker is still waited for."""
        try:
            for at, (index, spender) in enumerate(self._items):
                if at >= self._last:
                    break
                self._start_s = _clock()
                self._at = at
                self._work(index, spender)
                with self._lock:
                    is_beside = spender.is_busy
                    if not is_beside:
                        self._end(spender)
                if is_beside:
                    if self._afterwards is not None:
                        self._afterwards(index, spender)
                    with self._lock:
                        self._end(spender)
        except BaseException as error:
            self.error = error
            for _, spender in self._items[(self._at or 0) :]:
                spender.is_over_budget |= spender.is_busy
        with self._lock:
            self._at, self.is_over = None, True
            is_waited_for = self._worker is None
        self.done.release()
        return is_waited_for

    def _end(self, spender: S) -> None:
        """A call has ended, and nobody stops waiting for it any more."""
        self._at = None
        spender.spent_s += _clock() - self._start_s
        spender.is_over_budget |= spender.spent_s > self._seconds
        spender.is_busy = False

    def go_beside(
        self, worker: _Worker, *, alone: bool
    ) -> tuple[list[tuple[int, S]], list[tuple[int, S]]] | None:
        """In the engine: stop waiting for a call that takes long.

        Args:
            worker: that makes it.
            alone: the items behind it are done elsewhere; otherwise they go with it.

        Returns:
            the items that are left to do elsewhere, and those that go beside the engine; None
            where the engine goes on waiting.
        """
        with self._lock:
            at = self._at
            if at is None:
                return None
            spent_s = self._items[at][1].spent_s + worker.used_s() - self._start_s
            if spent_s <= _PATIENCE_S:
                return None
            self._worker = worker
            self._last = at + 1 if alone else len(self._items)
            beside = self._items[at : self._last]
            for _, spender in beside:
                spender.is_busy = True
            return self._items[self._last :], beside

    def mark_excess(self) -> None:
        """In the engine: mark the spender whose call has gone beyond the budget."""
        with self._lock:
            if self._at is None or self._worker is None:
                return
            spender = self._items[self._at][1]
            if spender.spent_s + self._worker.used_s() - self._start_s > self._seconds:
                spender.is_over_budget = True


class _Worker(threading.Thread):
    """A thread that carries out jobs until the engine does not wait for one."""

    def __init__(self) -> None:
        super().__init__(name="peagle-grammar-steps", daemon=True)
        self.jobs: SimpleQueue[_Job] = SimpleQueue()

    def run(self) -> None:
        while self.jobs.get().carry_out():
            pass

    def used_s(self) -> float:
        """Processor seconds that the thread has used."""
        assert self.ident is not None
        if _HAS_THREAD_CLOCKS:
            return time.clock_gettime(time.pthread_getcpuclockid(self.ident))
        return _clock()
