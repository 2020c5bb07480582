"""The time budget of a step's grammars; `engine.loop` holds the limit of compiling one.

Long calls go on beside the engine, and end if they take too long.

Some grammars make the matcher take seconds for one mask; no call of the matcher can be interrupted.
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
from functools import partial
from queue import SimpleQueue
from typing import Any

from peagle.engine.grammar.processor_time import own_seconds, thread_seconds

_PATIENCE_S = 0.01
_LOOK_EVERY_S = 0.005
# Threads that go on beside the engine, each on a core.
_MAX_BESIDE = max(2, (os.cpu_count() or 1) // 2)


class Spender:
    """The base class of grammar states, which spend the budget of a step.

    Attributes:
        spent_s: processor seconds of this step so far.
        is_busy: its work goes on beside the engine; nothing else may touch it.
        is_over_budget: its work took too long; it is never touched again.
        error: exception that its work raised; it is never touched again.
    """

    def __init__(self) -> None:
        self.spent_s = 0.0
        self.is_busy = self.is_over_budget = False
        self.error: Exception | None = None

    @property
    def is_free(self) -> bool:
        """Return whether work may be done now."""
        return not (self.is_busy or self.is_over_budget) and self.error is None

    def attempt(self, work: Callable[[], None]) -> None:
        """Do work; an exception becomes the `error` of this spender alone."""
        try:
            work()
        except Exception as error:
            self.error = error


Work = Callable[[int, Any], None]
_Items = list[tuple[int, Spender]]


class GrammarBudget:
    """Carries out the grammar work of an engine's steps.

    Args:
        seconds: processor time of one grammar in one step; None sets no limit, and the caller's
            thread does the work, however long it takes.
    """

    def __init__(self, seconds: float | None = None) -> None:
        self.seconds = seconds
        self._worker: _Worker | None = None
        self._beside: list[_Job] = []

    def each(
        self, spenders: Sequence[Spender | None], work: Work, afterwards: Work | None = None
    ) -> set[int]:
        """Call `work(index, spender)` for each free spender; a long call makes its spender busy.

        An exception of a call becomes the error of its spender.

        Args:
            spenders: None and spenders that are not free are skipped.
            afterwards: called in the same way behind a call that the engine did not wait for.

        Returns:
            the indices of the spenders that the engine did not wait for.
        """
        items = [
            (index, spender)
            for index, spender in enumerate(spenders)
            if spender is not None and spender.is_free
        ]
        if self.seconds is None:
            for index, spender in items:
                spender.attempt(partial(work, index, spender))
            return set()
        beside: set[int] = set()
        while items:
            job = _Job(items, work, afterwards, self.seconds)
            items = []
            if self._worker is None:
                self._worker = _Worker()
                self._worker.start()
            self._worker.jobs.put(job)
            while not job.is_over.wait(_LOOK_EVERY_S):
                found = job.go_beside(self._worker, alone=self._num_beside() < _MAX_BESIDE)
                if found is not None:
                    self._worker = None
                    self._beside.append(job)
                    items, gone = found
                    beside |= {index for index, _ in gone}
                    break
            else:
                if job.error is not None:
                    raise job.error
        return beside

    def _num_beside(self) -> int:
        return sum(not job.is_over.is_set() for job in list(self._beside))

    def mark_excess(self) -> None:
        """Mark the grammars that went beyond the budget since the last call."""
        self._beside = [job for job in self._beside if not job.is_over.is_set()]
        for job in self._beside:
            job.mark_excess()

    def wait_for_room(self) -> None:
        """Wait until another thread may go on beside the engine."""
        while self._num_beside() >= _MAX_BESIDE:
            time.sleep(_LOOK_EVERY_S)

    @property
    def excess(self) -> str:
        """Return the message to a user whose grammar exceeds the budget."""
        return (
            f"the grammar took more than {self.seconds:g} s of the processor in one step. Bound "
            "its repeats more tightly, and write it so that a text can be read in one way only; "
            "the operator raises the limit with --grammar-budget."
        )


class _Job:
    """Calls of one step; engine and worker change the job under its lock."""

    def __init__(self, items: _Items, work: Work, afterwards: Work | None, seconds: float) -> None:
        self.is_over = threading.Event()
        self.error: BaseException | None = None
        self._items, self._work, self._afterwards = items, work, afterwards
        self._seconds = seconds
        self._lock = threading.Lock()
        self._at: int | None = None  # index of the item whose call runs
        self._start_s = 0.0
        self._worker: _Worker | None = None  # set when the engine stops waiting
        self._last = len(items)  # the job's items end before this index

    def carry_out(self) -> bool:
        """Make the calls, in the worker; return whether the engine still waits for the worker."""
        try:
            for at, (index, spender) in enumerate(self._items):
                if at >= self._last:
                    break
                self._start_s = own_seconds()
                self._at = at
                spender.attempt(partial(self._work, index, spender))
                with self._lock:
                    is_beside = spender.is_busy
                    if not is_beside:
                        self._end(spender)
                if is_beside:
                    if self._afterwards is not None and spender.error is None:
                        spender.attempt(partial(self._afterwards, index, spender))
                    with self._lock:
                        self._end(spender)
        except BaseException as error:
            self.error = error
            for _, spender in self._items[(self._at or 0) :]:
                spender.is_over_budget |= spender.is_busy
        with self._lock:
            self._at = None
            is_waited_for = self._worker is None
        self.is_over.set()
        return is_waited_for

    def _end(self, spender: Spender) -> None:
        """Record the end of a call; the engine then waits for the next one."""
        self._at = None
        spender.spent_s += own_seconds() - self._start_s
        spender.is_over_budget |= spender.spent_s > self._seconds
        spender.is_busy = False

    def go_beside(self, worker: _Worker, *, alone: bool) -> tuple[_Items, _Items] | None:
        """Stop waiting for a long call, in the engine.

        Args:
            alone: whether the call goes on without the items behind it, which another worker gets.

        Returns:
            The items for another worker and the items that go on beside the engine; None while the
            engine keeps waiting.
        """
        with self._lock:
            at = self._at
            if at is None or self._spent_s(at, worker) <= _PATIENCE_S:
                return None
            self._worker = worker
            self._last = at + 1 if alone else len(self._items)
            beside = self._items[at : self._last]
            for _, spender in beside:
                spender.is_busy = True
            return self._items[self._last :], beside

    def mark_excess(self) -> None:
        """Mark, in the engine, the spender whose call has exceeded the budget."""
        with self._lock:
            if self._at is None or self._worker is None:
                return
            if self._spent_s(self._at, self._worker) > self._seconds:
                self._items[self._at][1].is_over_budget = True

    def _spent_s(self, at: int, worker: _Worker) -> float:
        return self._items[at][1].spent_s + worker.used_s() - self._start_s


class _Worker(threading.Thread):
    """A thread that carries out jobs until the engine does not wait for one."""

    def __init__(self) -> None:
        super().__init__(name="peagle-grammar-steps", daemon=True)
        self.jobs: SimpleQueue[_Job] = SimpleQueue()

    def run(self) -> None:
        while self.jobs.get().carry_out():
            pass

    def used_s(self) -> float:
        """Return the processor seconds that the thread has used."""
        assert self.ident is not None
        return thread_seconds(self.ident)
