"""Processor time of work: that of its own threads counts, waiting and other threads do not."""

import sys
import threading
import time
from collections.abc import Callable

import pytest

from peagle.engine.grammar.processor_time import WorkClock


def burn(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def in_thread(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


class Held:
    """Work in a thread that stays until it is let go, so that its clock can be read."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.clock = WorkClock()
        self._is_done, self._may_end = threading.Event(), threading.Event()
        self._work = work
        self._thread = in_thread(self._run)

    def _run(self) -> None:
        burn(0.2)  # before the work: it does not count
        with self.clock:
            self._work()
            self._is_done.set()
            self._may_end.wait()

    def used_s(self) -> float:
        self._is_done.wait()
        used_s = self.clock.used_s()
        self._may_end.set()
        self._thread.join()
        assert self.clock.used_s() == 0.0
        return used_s


def test_waiting_costs_nothing() -> None:
    assert WorkClock().used_s() == 0.0
    assert Held(lambda: time.sleep(0.5)).used_s() < 0.2


@pytest.mark.slow
def test_its_own_work_counts() -> None:
    assert 0.3 <= Held(lambda: burn(0.3)).used_s() < 0.5


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="threads are told apart on Linux only")
def test_threads_that_it_starts_count_and_no_others() -> None:
    ended = threading.Event()

    def with_threads() -> None:
        has_burnt = threading.Semaphore(0)

        def one() -> None:
            burn(0.3)
            has_burnt.release()
            ended.wait()

        for _ in range(2):
            in_thread(one)
            has_burnt.acquire()

    works = [Held(with_threads), Held(lambda: burn(0.1)), Held(with_threads)]
    in_thread(lambda: burn(0.3)).join()
    first, second, third = (work.used_s() for work in works)
    ended.set()
    assert 0.55 < first < 0.85 and 0.1 <= second < 0.3 and 0.55 < third < 0.85
