"""Acceptance of a running server over time, from its counters of drafts.

An interval is read ten times. The drafts between two readings are one cluster of
`acceptance_intervals`: single drafts of a request are alike, minutes of traffic are far less so.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import numpy as np

from peagle.client.counters import Counters, DraftCounts
from peagle.errors import UserError
from peagle.intervals import acceptance_intervals
from peagle.results import Interval

READINGS = 10  # of an interval
Reader = Callable[[], Counters | None]


@dataclass(frozen=True, slots=True)
class WatchedInterval:
    """The drafts of one interval.

    Attributes:
        time: when it ended, ISO 8601 in UTC.
        drafts: drafts of the interval, as far as readings came.
        num_tokens: output tokens; None where the server does not count them.
        ci: 95% interval of the acceptance length; None below 5 readings with drafts.
        baseline: acceptance length to compare with; None before it is known.
        away: why the server gave no counters, at the last reading that failed; "" if all came.
    """

    time: str
    drafts: DraftCounts
    num_tokens: int | None
    ci: Interval | None
    baseline: float | None
    away: str = ""

    @property
    def acceptance_length(self) -> float | None:
        """Return 1 + accepted draft tokens / drafts; None without drafts."""
        drafts = self.drafts
        return 1 + drafts.num_accepted_tokens / drafts.num_drafts if drafts.num_drafts else None

    @property
    def is_below(self) -> bool:
        """Return whether the whole 95% interval lies below the baseline."""
        return self.ci is not None and self.baseline is not None and self.ci[1] < self.baseline

    def to_json(self) -> dict[str, Any]:
        """Return the interval as an object of one line."""
        drafts, length = self.drafts, self.acceptance_length
        return {
            "time": self.time,
            "num_drafts": drafts.num_drafts,
            "num_draft_tokens": drafts.num_draft_tokens,
            "num_accepted_tokens": drafts.num_accepted_tokens,
            "num_tokens": self.num_tokens,
            "acceptance_length": None if length is None else round(length, 4),
            "acceptance_length_ci": None if self.ci is None else [round(x, 4) for x in self.ci],
            "baseline": None if self.baseline is None else round(self.baseline, 4),
            "is_below": self.is_below,
            "away": self.away,
        }


@dataclass(slots=True)
class AcceptanceWatch:
    """Reads the counters of a server at intervals.

    Attributes:
        read: returns the counters, None without a page of metrics; a UserError says that the server
            cannot be reached.
        every_s: seconds of an interval.
        baseline: acceptance length to compare with; None takes that of the first intervals.
        num_first: number of intervals with drafts that make the baseline.
        wait: sleeps until a time of `clock`, in seconds.
        report: gets a line when the server goes away, and when it is back.
    """

    read: Reader
    every_s: float
    baseline: float | None = None
    num_first: int = 3
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    report: Callable[[str], None] = lambda _: None
    _last: dict[str, Counters] = field(default_factory=dict)  # of each engine seen
    _first: list[DraftCounts] = field(default_factory=list)
    _is_away: bool = False

    def intervals(self) -> Iterator[WatchedInterval]:
        """Yield one interval after the other, without an end.

        Raises:
            UserError: the first reading has no counters of drafts.
        """
        first = self.read()
        if first is None or first.drafts is None:
            raise UserError(
                "The server counts no drafts at /metrics; expected the counters of `peagle serve` "
                "or of vLLM. Serve with drafts, or correct the URL."
            )
        self._last |= first.engines
        due = self.clock()
        while True:
            parts: list[DraftCounts] = []
            num_tokens: int | None = None
            away = ""
            for _ in range(READINGS):
                # Readings of a slow server are not made up for.
                due = max(due + self.every_s / READINGS, self.clock())
                self.sleep(max(0.0, due - self.clock()))
                now, reason = self._try_to_read()
                away = reason or away
                if now is None or now.drafts is None:
                    continue
                # The page may lack an engine for a while, and a new one may bring a history.
                known = [name for name in now.engines if name in self._last]
                added = [now.engines[name].since(self._last[name]) for name in known]
                self._last |= now.engines
                if drafts := [one.drafts for one in added if one.drafts is not None]:
                    parts.append(_sum(drafts))
                if tokens := [one.num_tokens for one in added if one.num_tokens is not None]:
                    num_tokens = (num_tokens or 0) + sum(tokens)
            yield self._interval(parts, num_tokens, away)

    def _try_to_read(self) -> tuple[Counters | None, str]:
        try:
            found = self.read()
            reason = "" if found is not None and found.drafts else "it has no counters of drafts"
        except UserError as error:
            found, reason = None, str(error)
        if reason and not self._is_away:
            self.report(f"the server is away, watching goes on: {reason}")
        elif self._is_away and not reason:
            self.report("the server is back")
        self._is_away = bool(reason)
        return found, reason

    def _interval(
        self, parts: list[DraftCounts], num_tokens: int | None, away: str
    ) -> WatchedInterval:
        drafts_N = np.array([one.num_drafts for one in parts], dtype=np.int64)
        accepted_N1 = np.array([[one.num_accepted_tokens] for one in parts], dtype=np.int64)
        ci = acceptance_intervals(drafts_N, accepted_N1.reshape(-1, 1)).acceptance_length
        drafts = _sum(parts)
        baseline = self.baseline
        found = WatchedInterval(
            datetime.now(UTC).isoformat(timespec="seconds"), drafts, num_tokens, ci, baseline, away
        )
        if baseline is None and drafts.num_drafts:
            self._first.append(drafts)
            if len(self._first) == self.num_first:
                total = _sum(self._first)
                self.baseline = 1 + total.num_accepted_tokens / total.num_drafts
        return found


def _sum(parts: list[DraftCounts]) -> DraftCounts:
    return DraftCounts(
        sum(one.num_drafts for one in parts),
        sum(one.num_draft_tokens for one in parts),
        sum(one.num_accepted_tokens for one in parts),
    )
