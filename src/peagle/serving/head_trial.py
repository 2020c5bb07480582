"""The statistics of a trial: a new draft head against the old one on the requests of a server.

A captured step has the weights of one head, so the heads take turns of all requests, slice by slice
of time. The drafts of a request count for the head under which it began, until that slice ends:
later drafts would read KV that the other head wrote. Requests that a slice cuts count with the
drafts before the cut. To count whole requests alone would leave out the long ones, and more of
them for the slower head.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from peagle.engine.outputs import StreamChunk
from peagle.intervals import Counts, paired_difference
from peagle.results import Interval
from peagle.serving.metrics import ServedHead

LOOKS = 10
# At each look. All looks together roll a head back that is as good in at most 2.5% of trials: of
# the 5% that the looks share (Bonferroni) one half is on the side of a head that is better.
LEVEL = 1 - 0.05 / LOOKS
_MIN_REQUESTS = 20  # of each head; fewer do not show how requests vary


class HeadSlice:
    """The drafts of requests that began while one head served.

    Attributes:
        counts: [accepted draft tokens, drafts] of each request that drafted, by its number.
        ended: the requests that ended in time, with drafts or without.
    """

    def __init__(self) -> None:
        self.counts: dict[int, list[int]] = {}
        self.ended: set[int] = set()

    def count(self, request: int, chunk: StreamChunk) -> None:
        """Count a step of a request."""
        if chunk.num_drafted:
            counts = self.counts.setdefault(request, [0, 0])
            counts[0] += chunk.num_accepted
            counts[1] += 1
        if chunk.output is not None:
            self.ended.add(request)


@dataclass(slots=True)
class _Arm:
    """A head of a trial, the drafts of its requests, and the number of all its requests."""

    head: ServedHead
    counts: list[list[int]] = field(default_factory=list)
    num_seen: int = 0

    @property
    def length(self) -> float | None:
        """Return the acceptance length; None without drafts."""
        accepted, drafts = (sum(column) for column in zip([0, 0], *self.counts))
        return 1 + accepted / drafts if drafts else None

    def to_json(self) -> dict[str, Any]:
        facts = {"requests": len(self.counts), "acceptance_length": self.length}
        return self.head.to_json() | facts


class HeadTrial:
    """A trial of a new head, which serves first.

    `look` compares the heads after a slice whenever the new one has another tenth of the requests,
    by the interval of the difference of acceptance lengths over requests (`paired_difference`).

    Args:
        requests: number of requests of the new head after which it stays.
        share: share of the new head in the requests. A share of time would count idle hours, for
            which the other head would then serve alone.

    Attributes:
        state: "rolled back" has a `reason`, a sentence.
        difference: acceptance length of the new head less that of the old one, at the last look.
        interval: its interval of confidence `LEVEL`; None where a head has too few requests.
        is_stopped: whether the administrator has asked for the old head.
    """

    def __init__(self, old: ServedHead, new: ServedHead, requests: int, share: float) -> None:
        self.requests, self.share = requests, share
        self.old, self.new = _Arm(old), _Arm(new)
        self.state: Literal["running", "kept", "rolled back"] = "running"
        self.reason = ""
        self.difference: float | None = None
        self.interval: Interval | None = None
        self.is_stopped = False
        self._per_slice = max(_MIN_REQUESTS, -(-requests // LOOKS))
        self._num_looked_at = 0

    def is_full(self, part: HeadSlice) -> bool:
        """Return whether enough requests of a slice have ended, or all that the trial needs began.

        A slice outlives requests: so most drafts of a request count, and most requests find KV of
        earlier ones in the prefix cache, which begins anew with each turn.
        """
        return len(part.ended) >= self._per_slice or len(part.counts) >= self.requests

    def add(self, part: HeadSlice, *, is_new: bool) -> None:
        """Count a slice that has ended."""
        arm = self.new if is_new else self.old
        arm.counts += part.counts.values()
        arm.num_seen += len(part.counts.keys() | part.ended)

    @property
    def is_new_next(self) -> bool:
        """Return whether the new head serves next, by the requests that both have had."""
        return self.new.num_seen <= self.share * (self.new.num_seen + self.old.num_seen)

    @property
    def has_all(self) -> bool:
        """Return whether the new head has its requests, and the old one has served too."""
        return len(self.new.counts) >= self.requests and self.old.num_seen > 0

    @property
    def is_due(self) -> bool:
        """Return whether a look follows."""
        return self.has_all or len(self.new.counts) >= self._num_looked_at + self._per_slice

    def look(self) -> None:
        """Compare the heads, if both have requests enough."""
        new, old = self.new.counts, self.old.counts
        if min(len(new), len(old)) < _MIN_REQUESTS:
            return
        self._num_looked_at = len(new)
        rows: Counts = np.zeros((len(new) + len(old), 4), dtype=np.int64)
        rows[: len(new), :2], rows[len(new) :, 2:] = new, old
        self.difference, self.interval = paired_difference(rows[:, :2], rows[:, 2:], level=LEVEL)

    @property
    def is_worse(self) -> bool:
        """Return whether the whole interval of the last look lies below 0."""
        return self.interval is not None and self.interval[1] < 0

    def end(self, reason: str) -> None:
        """End the trial: the new head stays, or is rolled back for a reason."""
        self.state, self.reason = "rolled back" if reason else "kept", reason

    def verdict(self) -> str:
        """Return the figures of the last look as a part of a sentence."""
        lengths = [arm.length for arm in (self.new, self.old)]
        new, old = ("-" if length is None else f"{length:.3f}" for length in lengths)
        ends = "unknown" if self.interval is None else "{:+.3f} to {:+.3f}".format(*self.interval)
        return (
            f"acceptance length {new} over {len(self.new.counts)} requests, that of the old head "
            f"{old} over {len(self.old.counts)}; {LEVEL:.1%} interval of the difference {ends}"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the state and the figures by name."""
        return {
            "state": self.state,
            "reason": self.reason,
            "requests": self.requests,
            "share": self.share,
            "new": self.new.to_json(),
            "old": self.old.to_json(),
            "difference": self.difference,
            "interval": self.interval,
            "level": LEVEL,
        }
