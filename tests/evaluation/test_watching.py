"""Acceptance over time, from counters that a clock without waiting makes."""

from collections.abc import Callable
from itertools import chain, islice, repeat

import numpy as np
import pytest

from peagle.client.counters import Counters, DraftCounts
from peagle.errors import UserError
from peagle.evaluation.watching import READINGS, AcceptanceWatch, WatchedInterval


def counters_of(**engines: tuple[int, int, int]) -> Counters:
    """Return counters of drafts, accepted tokens and output tokens of engines, 4 tokens a draft."""
    each = {
        name: Counters(DraftCounts(drafts, 4 * drafts, accepted), num_tokens)
        for name, (drafts, accepted, num_tokens) in engines.items()
    }
    drafts, accepted, num_tokens = map(sum, zip(*engines.values()))
    return Counters(DraftCounts(drafts, 4 * drafts, accepted), num_tokens, each)


class Traffic:
    """Counters of a server at a time; drafts of 4 tokens, `share(second)` of them accepted.

    Each second has an acceptance of its own, as requests differ.
    """

    def __init__(self, share: Callable[[int], float], seed: int = 0) -> None:
        self.now, self.share = 0.0, share
        self.dice = np.random.default_rng(seed)
        self.drafts = self.accepted = self.second = 0
        self.lines: list[str] = []
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    def read(self) -> Counters | None:
        while self.second < self.now:
            mean = self.share(self.second) + self.dice.normal(0, 0.05)
            self.drafts += 20
            self.accepted += int(self.dice.binomial(80, min(max(mean, 0), 1)))
            self.second += 1
        return counters_of(a=(self.drafts, self.accepted, self.accepted))

    def watch(self, count: int, **options: object) -> list[WatchedInterval]:
        options = {"clock": lambda: self.now, "sleep": self.sleep, **options}
        options["report"] = self.lines.append
        watch = AcceptanceWatch(self.read, 60.0, **options)  # type: ignore[arg-type]
        return list(islice(watch.intervals(), count))


def test_an_interval_has_the_drafts_between_its_ends() -> None:
    traffic = Traffic(lambda _: 0.5)
    one, two = traffic.watch(2)
    assert traffic.slept == pytest.approx([60.0 / READINGS] * 2 * READINGS)
    assert (one.drafts.num_drafts, two.drafts.num_drafts) == (1200, 1200)
    accepted = one.drafts.num_accepted_tokens + two.drafts.num_accepted_tokens
    assert accepted == traffic.accepted == (one.num_tokens or 0) + (two.num_tokens or 0)
    length = 1 + one.drafts.num_accepted_tokens / 1200
    assert one.acceptance_length == length
    assert one.ci is not None and one.ci[0] < length < one.ci[1]
    assert one.to_json()["acceptance_length"] == round(length, 4)


def test_a_fall_is_warned_of_and_a_steady_server_is_not() -> None:
    """Three intervals make the baseline; acceptance falls from 2 to 1.8 tokens in the seventh."""
    found = Traffic(lambda second: 0.5 if second < 360 else 0.45).watch(8)
    assert [one.baseline is None for one in found] == [True] * 3 + [False] * 5
    first = [one.drafts.num_accepted_tokens for one in found[:3]]
    assert found[3].baseline == pytest.approx(1 + sum(first) / 3600)
    assert [one.is_below for one in found[:6]] == [False] * 6
    assert found[6].is_below and found[7].is_below


def test_steady_servers_are_seldom_below_a_given_baseline() -> None:
    """One end of a 95% interval misses 2.5%: 5 of 200; 12 or more come in 1 of 200 such tests."""
    found = Traffic(lambda _: 0.5, seed=3).watch(200, baseline=3.0)
    assert all(one.baseline == 3.0 for one in found)
    assert 1 <= sum(one.is_below for one in found) <= 11


def test_a_server_that_is_away_is_one_line() -> None:
    traffic = Traffic(lambda _: 0.5)
    read = traffic.read

    def reading() -> Counters | None:
        if 30 < traffic.now < 100:
            raise UserError("No server answers.")
        if traffic.now >= 100:  # it was restarted
            traffic.drafts, traffic.accepted = traffic.drafts % 1000, traffic.accepted % 1000
        return read()

    traffic.read = reading  # type: ignore[method-assign]
    one, two, three = traffic.watch(3)
    assert [bool(one.away), bool(two.away), bool(three.away)] == [True, True, False]
    assert len(traffic.lines) == 2
    assert "away, watching goes on: No server answers." in traffic.lines[0]
    assert traffic.lines[1] == "the server is back"
    assert one.drafts.num_drafts == 600, "of the readings before it went"
    assert min(two.drafts.num_drafts, three.drafts.num_drafts) >= 0
    assert three.drafts.num_drafts > 0


def watch_pages(*pages: Counters) -> WatchedInterval:
    """Return the interval of these readings, the last of which goes on."""
    traffic, every = Traffic(lambda _: 0.5), chain(pages, repeat(pages[-1]))
    traffic.read = lambda: next(every)  # type: ignore[method-assign]
    (one,) = traffic.watch(1, baseline=2.0)
    return one


def test_a_restart_shows_in_any_count() -> None:
    """An engine that began anew passes its old drafts at once, and counts from zero."""
    old = [counters_of(a=(9 * n, 20 * n, 30 * n)) for n in range(6)]
    one = watch_pages(*old, *(counters_of(a=(50 + n, 2 * n, 3 * n)) for n in range(5)))
    assert one.drafts == DraftCounts(5 * 9 + 54, 5 * 36 + 4 * 54, 5 * 20 + 8)
    assert one.num_tokens == 5 * 30 + 12


def test_an_engine_that_was_not_listed_for_a_while_brings_no_history() -> None:
    a, b = (1000, 2000, 3000), (500, 600, 700)
    both, later = counters_of(a=a, b=b), counters_of(a=(1010, 2020, 3030), b=(500, 601, 702))
    one = watch_pages(both, counters_of(b=b), later)
    assert (one.drafts, one.num_tokens) == (DraftCounts(10, 40, 21), 32)
    assert watch_pages(counters_of(b=b), both).drafts == DraftCounts(), "a was there before"


def test_an_engine_that_returns_with_less_began_anew() -> None:
    both, b = counters_of(a=(1000, 2000, 3000), b=(500, 600, 700)), (505, 610, 720)
    one = watch_pages(both, counters_of(b=b), counters_of(a=(7, 8, 9), b=b))
    assert (one.drafts, one.num_tokens) == (DraftCounts(12, 48, 18), 29)


def test_a_slow_server_is_not_read_again_for_each_time_missed() -> None:
    traffic = Traffic(lambda _: 0.5)
    read = traffic.read

    def slow() -> Counters | None:
        traffic.now += 60.0 if traffic.now < 600 else 0.0  # a reading was due after 6 s
        return read()

    traffic.read = slow  # type: ignore[method-assign]
    assert traffic.watch(2)[1].drafts.num_drafts == 1200


def test_intervals_without_drafts_have_no_figures() -> None:
    traffic = Traffic(lambda _: 0.5)
    traffic.read = lambda: Counters(DraftCounts(), None)  # type: ignore[method-assign]
    (one,) = traffic.watch(1, baseline=2.0)
    assert (one.acceptance_length, one.ci, one.is_below, one.num_tokens) == (
        None,
        None,
        False,
        None,
    )


@pytest.mark.parametrize("counters", [None, Counters(None, 5)])
def test_a_server_without_counters_is_refused(counters: Counters | None) -> None:
    traffic = Traffic(lambda _: 0.5)
    traffic.read = lambda: counters  # type: ignore[method-assign]
    with pytest.raises(UserError, match="counts no drafts at /metrics; expected the counters of"):
        traffic.watch(1)
