"""K of a step: the drafts of each sequence that it verifies, by a schedule or by the load.

Of chains K is the length, of trees the number of nodes for each sequence, which the sequences of a
step share (`kernels.trees.growth.allocate_nodes`). For drafts that are an argmax no output depends
on K: the target's own token decides at every row, and a draft that is not verified only ends a step
earlier. So K may change at every step, by whatever is known.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from peagle.config import SpeculativeConfig
from peagle.config.speculative import AUTO
from peagle.engine.features import FEATURES_KEPT
from peagle.engine.tree_record import FORGOTTEN_STEPS, PRIOR_SHARE, TreeRecord

# Steps with drafts scheduled after which drafting resumes; what a pause costs, in plain steps.
RESUME_STEPS = 8
# What another change of K costs, in plain steps: drafts that are dropped, or not there yet.
CHANGE_COST = 1.0
# Gains up to this share of a step are left: estimates are no better.
MIN_SPEED_GAIN = 0.01
# A candidate below the greatest one has at most this share of its target rows.
MAX_ROWS_RATIO = 0.8

# How many drafts the prior counts for, and how many the latest ones do.
PRIOR_DRAFTS, LATEST_DRAFTS = 8, 512
# The latest requests that tell how long prompts are beside outputs.
LATEST_REQUESTS = 64
# The latest steps of which the mean tells what contexts add to a step.
LATEST_STEPS = 8
# Steps of the same rows after which that mean holds for them.
SETTLED_STEPS = 2 * LATEST_STEPS
# By how much an entry of the table may be wrong until its K ran for so many steps at its rows, and
# the share of a step's error that corrects it meanwhile.
TABLE_ERROR, TRUSTED_STEPS, CORRECTION_RATE = 0.2, 12, 0.3
# The device waits for the host where it rests for more than this share of a step behind it.
HOST_BOUND_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class DecodeSeconds:
    """What a decode step took.

    Attributes:
        device: seconds on the device; None where they are not known, or are also those of prompts.
        period: seconds from the end of the step before to the end of this one, which the device
            may in part have waited for the host; None where something else ran between.
    """

    device: float | None = None
    period: float | None = None


class DepthPolicy:
    """K of a step by the number of sequences that run."""

    def __call__(self, num_sequences: int) -> int:
        """Return K for so many sequences at this step."""
        raise NotImplementedError

    def possible(self, num_sequences: int) -> set[int]:
        """Return every K that steps of so many sequences may have, short of a pause."""
        raise NotImplementedError

    def observe(self, load: int) -> None:
        """Count a step that begins with so many sequences, as `Scheduler.load` counts them."""
        raise NotImplementedError

    def record(
        self, k: int, accepted: Sequence[int], num_sequences: int, seconds: DecodeSeconds
    ) -> None:
        """Learn from a decode step of K drafts.

        Args:
            accepted: number of accepted drafts of each sequence, without those that have just
                joined and have no drafts yet.
            num_sequences: in the step, with those.
            seconds: what the step took.
        """

    def served(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Learn from a request that ended how many prompt tokens a head reads for its output."""

    def most_resuming(self, max_num_seqs: int) -> int:
        """Return how many sequences at most resume drafting together; 0 where K is never 0."""
        every = [self.possible(n) for n in range(1, max_num_seqs + 1)]
        if not any(0 in depths for depths in every):
            return 0
        return max((n for n, depths in enumerate(every, 1) if any(depths)), default=1)


class ScheduledDepth(DepthPolicy):
    """What is scheduled for a number of sequences, and 0 for a while after a 0.

    Drafting stops at once where 0 is scheduled. It begins again when drafts were scheduled at
    RESUME_STEPS steps in a row, or when no sequence runs any more: resuming costs a pass over what
    the drafter has missed, which a load that swings around a border would pay again and again.
    Between other K a change costs little and comes at once.

    Args:
        scheduled: K by the number of sequences.
        trees: learns from the trees that are verified.
    """

    def __init__(self, scheduled: Callable[[int], int], trees: TreeRecord | None = None) -> None:
        self._scheduled = scheduled
        self._trees = trees
        self._num_calm = RESUME_STEPS

    def __call__(self, num_sequences: int) -> int:
        return self._scheduled(num_sequences) if self._num_calm >= RESUME_STEPS else 0

    def possible(self, num_sequences: int) -> set[int]:
        return {self._scheduled(num_sequences)}

    def observe(self, load: int) -> None:
        if not load:
            self._num_calm = RESUME_STEPS
        elif self._scheduled(load):
            self._num_calm += 1
        else:
            self._num_calm = 0

    def record(
        self, k: int, accepted: Sequence[int], num_sequences: int, seconds: DecodeSeconds
    ) -> None:
        if self._trees is not None and accepted:
            self._trees.add(k, accepted)


def make_depth(
    speculative: SpeculativeConfig | None,
    trained_depth: int | None,
    *,
    is_captured: bool,
    trees: TreeRecord | None = None,
) -> DepthPolicy:
    """Return how K is chosen.

    Args:
        trained_depth: K that the head was trained for; None where it is not known.
        is_captured: steps run as CUDA graphs.
        trees: what is known of the trees, where drafts are trees.
    """
    if speculative is None:
        return ScheduledDepth(lambda _: 0)
    # K may change the output of drawn drafts.
    is_free = is_captured and not speculative.draws
    if is_free and speculative.num_speculative_tokens_per_batch_size == AUTO:
        most = speculative.num_verified
        if trees is None and trained_depth is not None:
            most = min(most, trained_depth)
        return AutomaticDepth(most, trees)
    return ScheduledDepth(speculative.tokens_for, trees)


def candidates(most: int) -> tuple[int, ...]:
    """Return the K to choose from: 0, 1, 3, 7, ... below `most`, and `most`.

    rows * (K + 1) then takes few values, and products are tuned for each of these. What costs
    nearly as much as `most` is left out.
    """
    depths = {0, most}
    k = 1
    while k < most and k + 1 <= MAX_ROWS_RATIO * (most + 1):
        depths.add(k)
        k = 2 * k + 1
    return tuple(sorted(depths))


def node_counts(most: int) -> tuple[int, ...]:
    """Return the numbers of nodes to choose from: the K of chains, and 2.

    Where many sequences run, a pass takes time by the token, and few nodes are best: from 1 to 3
    it doubles.
    """
    return tuple(sorted({*candidates(most), min(2, most)}))


class AcceptanceRecord:
    """How many tokens a step brings a sequence at each K, by the latest steps.

    c_i is the share of sequences that accept draft i among those that accepted the i - 1 before it
    in a step that could have had it; a step brings 1 + c_1 + c_1 c_2 + ... + c_1 ... c_K tokens. A
    sequence that drafts less than K by itself counts as one that accepts no more. With few tries
    c_i is like c_{i-1}, and c_1 like PRIOR_SHARE. So a change of the first drafts, which are
    always tried, is one of the deeper ones too. A record that nothing is added to fades over
    thousands of steps: a K that has not paid for long is tried again, if it pays with the prior.
    """

    def __init__(self, most: int) -> None:
        self._tried, self._passed = [0.0] * most, [0.0] * most
        self._k_of_drafts = most  # of the step that made the drafts that are verified next

    def add(self, k: int, accepted: Sequence[int]) -> None:
        """Count a step of depth k, with drafts of the step before it."""
        num_offered, self._k_of_drafts = min(k, self._k_of_drafts), k
        counts = Counter(accepted)
        num_reaching = len(accepted)
        for i in range(len(self._tried)):
            num_passing = num_reaching - counts[i]
            if i < num_offered and num_reaching:
                kept = LATEST_DRAFTS / (LATEST_DRAFTS + num_reaching)
                self._tried[i] = self._tried[i] * kept + num_reaching
                self._passed[i] = self._passed[i] * kept + num_passing
            else:
                self._tried[i] *= 1 - 1 / FORGOTTEN_STEPS
                self._passed[i] *= 1 - 1 / FORGOTTEN_STEPS
            num_reaching = num_passing

    def tokens(self, k: int) -> float:
        """Return the tokens of a sequence in a step of depth k."""
        total = chain = 1.0
        share = PRIOR_SHARE
        for tried, passed in zip(self._tried[:k], self._passed[:k], strict=True):
            share = (passed + share * PRIOR_DRAFTS) / (tried + PRIOR_DRAFTS)
            chain *= share
            total += chain
        return total


class CostTable:
    """Seconds of a step, from a table and from the steps that run.

    A step takes what the table says of its rows and K, and as much again as its contexts, which are
    read once whatever K is: the latest steps tell how much. That figure belongs to the rows of
    these steps: after SETTLED_STEPS of them it is known, and the first steps of another K correct
    the table, by TABLE_ERROR at most. Until then an entry counts for so much less: a K that might
    pay is tried once. A step whose time is not known corrects nothing, and is a try all the same.

    Where the host takes longer for a step than the device, as it may for many sequences of a small
    model, a step takes the host's time, whatever K is, if it has drafts; plain steps have less to
    tell the host. That time is known where the device waits, and an upper bound of it elsewhere.

    Args:
        table: seconds by (rows, K), for every K at the same rows.
    """

    def __init__(self, table: Mapping[tuple[int, int], float]) -> None:
        self._measured, self._table = table, dict(table)
        self._rows = sorted({rows for rows, _ in table})
        self._num_run = dict.fromkeys(table, 0)
        self._contexts_s = 0.0
        self._latest_rows, self._num_latest = 0, 0
        self._host_s: dict[tuple[int, bool], float] = {}  # by rows and whether there are drafts

    def __call__(self, num_sequences: int, k: int) -> float:
        rows, share = self._size_of(num_sequences)
        table_s = self._table[rows, k] * share
        if self._num_run[rows, k] < TRUSTED_STEPS:
            table_s *= 1 - TABLE_ERROR
        host_s = self._host_s.get((rows, k > 0), 0.0) * share
        return max(table_s + self._contexts_s, table_s / 2, host_s)

    def _size_of(self, num_sequences: int) -> tuple[int, float]:
        """Return the rows of a step's graph, and its sequences over these where none is larger."""
        rows = self._rows[min(bisect_left(self._rows, num_sequences), len(self._rows) - 1)]
        return rows, max(1.0, num_sequences / rows)

    def add(self, num_sequences: int, k: int, seconds: DecodeSeconds) -> None:
        """Count a step."""
        rows, share = self._size_of(num_sequences)
        if seconds.device is not None:
            self._correct(rows, share, k, seconds.device)
            if seconds.period is not None:
                self._follow_host((rows, k > 0), seconds.device / share, seconds.period / share)
        self._num_run[rows, k] += 1

    def _follow_host(self, key: tuple[int, bool], device_s: float, period_s: float) -> None:
        """Learn the host's time from a step; one that stood still counts as twice the usual."""
        if period_s > (1 + HOST_BOUND_SHARE) * device_s:
            host_s = self._host_s.get(key, device_s)
            change_s = min(period_s, 2 * host_s) - host_s
            self._host_s[key] = host_s + change_s / LATEST_STEPS
        elif key in self._host_s:
            self._host_s[key] = min(self._host_s[key], period_s)

    def _correct(self, rows: int, share: float, k: int, seconds: float) -> None:
        if rows != self._latest_rows:
            self._latest_rows, self._num_latest = rows, 0
        error_s = seconds - self._table[rows, k] * share - self._contexts_s
        others = (n for (r, other), n in self._num_run.items() if r == rows and other != k)
        is_new = self._num_run[rows, k] < TRUSTED_STEPS <= max(others, default=0)
        if is_new and self._num_latest >= SETTLED_STEPS:
            bounds = 1 - TABLE_ERROR, 1 + TABLE_ERROR
            least_s, most_s = (c * self._measured[rows, k] for c in bounds)
            wanted_s = self._table[rows, k] + CORRECTION_RATE * error_s / share
            self._table[rows, k] = min(max(wanted_s, least_s), most_s)
            self._contexts_s += (wanted_s - self._table[rows, k]) * share
        else:
            self._contexts_s += error_s / LATEST_STEPS
            self._num_latest += 1


class AutomaticDepth(DepthPolicy):
    """The K that brings most tokens a second at the present load, by what steps cost and bring.

    At each step another K would have gained or lost time for the same tokens. K changes when the
    gains of another one have added up to what the change costs: at once where that gains much, and
    not for small gains or short ones. A change from 0 costs most, because the drafter has to read
    what it missed. With nothing running a change is free: a burst of requests begins with the
    K that suits all of it.

    The target computes prompts whatever K is. The head reads them where K is above 0, and each
    output token bears its share of that time, as in the latest requests. The first step of a
    request has no drafts.

    Args:
        most: the greatest K.
        trees: tells what steps bring where drafts are trees.
    """

    def __init__(self, most: int, trees: TreeRecord | None = None) -> None:
        self._candidates = candidates(most) if trees is None else node_counts(most)
        self._costs: CostTable | None = None
        self._acceptance = AcceptanceRecord(most) if trees is None else trees
        self._k = most
        self._is_idle = True
        self._gains = dict.fromkeys(self._candidates, 0.0)  # in plain steps
        self._reading_s = 0.0  # seconds in which the head reads a prompt token
        self._num_requests = self._prompt_tokens = self._output_tokens = 0.0  # the latest ones

    def measure(
        self,
        rows: Iterable[int],
        time_step: Callable[[int, int], float],
        reading_s: float = 0.0,
    ) -> None:
        """Measure the table of costs; K is `most` until then.

        Args:
            time_step: runs steps of (rows, K) and returns the seconds of one.
            reading_s: seconds in which the head reads a prompt token.
        """
        self._reading_s = reading_s
        sizes = [(num_rows, k) for num_rows in rows for k in self._candidates]
        self._costs = CostTable({size: time_step(*size) for size in sizes})

    def __call__(self, num_sequences: int) -> int:
        return self._k

    def possible(self, num_sequences: int) -> set[int]:
        return set(self._candidates)

    def observe(self, load: int) -> None:
        costs = self._costs
        if costs is None:
            return
        rows = max(load, 1)
        step_s = {k: costs(rows, k) for k in self._candidates}
        reading_s = self._reading_s * self._prompt_tokens / max(self._output_tokens, 1.0)
        speed = dict[int, float]()
        for k in self._candidates:
            token_s = step_s[k] / (rows * self._tokens(k))
            speed[k] = 1 / (token_s + reading_s if k else token_s)
        ready = list(self._candidates)
        if load and not self._is_idle:
            now = self._k
            missed = load * FEATURES_KEPT * self._reading_s / step_s[0]
            for k in self._candidates:
                gain = (1 - speed[now] / speed[k] - MIN_SPEED_GAIN) * step_s[now] / step_s[0]
                self._gains[k] = max(0.0, self._gains[k] + gain)
            ready = [k for k in self._candidates if self._gains[k] >= self._price(k, missed)]
        if ready:
            # Drafts have to gain a little: speeds are estimates.
            self._change(max(ready, key=lambda k: speed[k] * (1 - MIN_SPEED_GAIN * (k > 0))))
        self._is_idle = not load

    def _tokens(self, k: int) -> float:
        """Return the tokens of a sequence in a step of depth k, its first step counted."""
        tokens = self._acceptance.tokens(k)
        if self._num_requests:
            length = max(self._output_tokens / self._num_requests, 1.0)
            tokens = length / (1 + (length - 1) / tokens)
        return tokens

    def _price(self, k: int, missed: float) -> float:
        """Return what a change to k costs, in plain steps: `missed` to read what was missed."""
        if k and self._k:
            return CHANGE_COST
        return RESUME_STEPS + (missed if k else 0.0)

    def _change(self, k: int) -> None:
        self._k = k
        self._gains = dict.fromkeys(self._candidates, 0.0)

    def served(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        kept = 1 - 1 / LATEST_REQUESTS
        self._num_requests = self._num_requests * kept + 1
        self._prompt_tokens = self._prompt_tokens * kept + num_prompt_tokens
        self._output_tokens = self._output_tokens * kept + num_output_tokens

    def record(
        self, k: int, accepted: Sequence[int], num_sequences: int, seconds: DecodeSeconds
    ) -> None:
        if accepted:
            self._acceptance.add(k, accepted)
        if self._costs is not None:
            self._costs.add(num_sequences, k, seconds)
