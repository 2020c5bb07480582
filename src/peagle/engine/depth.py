"""K of a step: the number of drafts of each sequence that it verifies, by a schedule or the load.

K is the length of chains; for trees it is the number of nodes for each sequence, which the
sequences of a step share (`kernels.trees.growth.allocate_nodes`). If drafts are the likeliest
tokens, no output depends on K: the target's own token decides at every row, and a draft that is not
verified only ends a step earlier. So K may change at every step.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from peagle.config import SpeculativeConfig
from peagle.config.speculative import AUTO
from peagle.engine.features import FEATURES_KEPT
from peagle.engine.tree_record import FORGOTTEN_STEPS, PRIOR_SHARE, TreeRecord

# Steps in a row with scheduled drafts before drafting resumes; price of a pause in plain steps.
RESUME_STEPS = 8
# Price of any other change of K in plain steps: dropped or missing drafts.
CHANGE_COST = 1.0
# Gains up to this share of a step do not count: estimates are no better.
MIN_SPEED_GAIN = 0.01
# A candidate below the greatest one has at most this share of its target rows.
MAX_ROWS_RATIO = 0.8

# Weight of the prior and of the latest drafts, in drafts.
PRIOR_DRAFTS, LATEST_DRAFTS = 8, 512
# Accepted drafts of a lookup before any was verified, many so that K is tried; weight of the latest
# lookups; reports whose mean foretells the next.
PRIOR_ACCEPTED, LATEST_LOOKUPS, LATEST_REPORTS = 4.0, 64, 4
# Number of the latest requests whose lengths of prompts and outputs count.
LATEST_REQUESTS = 64
# Number of the latest steps whose mean is the time that contexts add to a step.
LATEST_STEPS = 8
# Steps of the same rows after which that mean holds for them.
SETTLED_STEPS = 2 * LATEST_STEPS
# Share by which an entry of the table may be wrong; steps of its rows and K until it is trusted;
# and the share of a step's error that corrects it until then.
TABLE_ERROR, TRUSTED_STEPS, CORRECTION_RATE = 0.2, 12, 0.3
# The device waits for the host if it rests after a step for more than this share of the step.
HOST_BOUND_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class DecodeSeconds:
    """The duration of a decode step.

    Attributes:
        device: seconds on the device; None if unknown, or if they include prompts.
        period: seconds from the end of the step before to the end of this one, which may include
            waiting for the host; None if something else ran between.
    """

    device: float | None = None
    period: float | None = None


class DepthPolicy:
    """The choice of K of a step by the number of running sequences."""

    def __call__(self, num_sequences: int) -> int:
        """Return K of this step for so many sequences."""
        raise NotImplementedError

    def possible(self, num_sequences: int) -> set[int]:
        """Return every K that steps of so many sequences may have, without a pause."""
        raise NotImplementedError

    def observe(self, load: int) -> None:
        """Count a step that begins with `load` sequences, as `Scheduler.load` counts them."""
        raise NotImplementedError

    def record(
        self, k: int, accepted: Sequence[int], num_sequences: int, seconds: DecodeSeconds
    ) -> None:
        """Learn from a decode step of K drafts.

        Args:
            accepted: number of accepted drafts of each sequence, except for sequences that have
                just joined and had no drafts.
            num_sequences: number of all sequences in the step.
            seconds: duration of the step.
        """

    def captured(self, num_sequences: int) -> int:
        """Return K of a step that runs as a graph."""
        return self(num_sequences)

    def drafted(self, num_drafting: int) -> None:
        """Learn for how many sequences a graph made drafts."""

    def served(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Learn from a finished request how many prompt tokens a head reads for its output."""

    def most_resuming(self, max_num_seqs: int) -> int:
        """Return the most sequences that resume drafting together; 0 if K is never 0."""
        every = [self.possible(n) for n in range(1, max_num_seqs + 1)]
        if not any(0 in depths for depths in every):
            return 0
        return max((n for n, depths in enumerate(every, 1) if any(depths)), default=1)


class ScheduledDepth(DepthPolicy):
    """The scheduled K for a number of sequences, and 0 for a while after a scheduled 0.

    Drafting stops at once where 0 is scheduled. It begins again when drafts were scheduled at
    RESUME_STEPS steps in a row, or when no sequence runs any more: resuming costs a pass over the
    positions that the drafter missed, which a load that swings around a border would pay again and
    again. A change between K above 0 costs little and comes at once.

    Args:
        scheduled: K by the number of sequences.
        trees: learns from the verified trees.
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


class LookupDepth(ScheduledDepth):
    """The scheduled K of prompt lookup; captured steps are plain where it gains less than it costs.

    A graph costs the same however many texts have drafts. It gains the share of sequences with
    drafts in the latest reports, those of plain steps too, times the accepted drafts of each. While
    steps are plain, these return to PRIOR_ACCEPTED: K is tried again.
    """

    def __init__(self, scheduled: Callable[[int], int]) -> None:
        super().__init__(scheduled)
        self._accepted, self._num_drafting = PRIOR_ACCEPTED, 0.0
        self._costs: dict[tuple[int, int], float] = {}

    def possible(self, num_sequences: int) -> set[int]:
        return {0, *super().possible(num_sequences)}

    def measure(
        self, sizes: Iterable[tuple[int, int]], time_step: Callable[[int, int], float]
    ) -> None:
        """Measure the cost of graphs of (rows, K) by `time_step`; until then drafts are free."""
        seconds = {size: time_step(*size) for size in sizes}
        self._costs = {(rows, k): s / seconds[rows, 0] for (rows, k), s in seconds.items()}

    def captured(self, num_sequences: int) -> int:
        k = self(num_sequences)
        rows = min((r for r, _ in self._costs if r >= num_sequences), default=0)
        gain = self._accepted * min(1.0, self._num_drafting / num_sequences)
        return k if gain >= max(self._costs.get((rows, k), 1.0) - 1, MIN_SPEED_GAIN) else 0

    def drafted(self, num_drafting: int) -> None:
        self._num_drafting += (num_drafting - self._num_drafting) / LATEST_REPORTS

    def record(
        self, k: int, accepted: Sequence[int], num_sequences: int, seconds: DecodeSeconds
    ) -> None:
        found, weight = PRIOR_ACCEPTED, 1 / FORGOTTEN_STEPS
        if k:
            found = sum(accepted) / max(self._num_drafting, 1.0)
            weight = self._num_drafting / (LATEST_LOOKUPS + self._num_drafting)
        self._accepted += (found - self._accepted) * weight


def make_depth(
    speculative: SpeculativeConfig | None,
    trained_depth: int | None,
    *,
    is_captured: bool,
    trees: TreeRecord | None = None,
) -> DepthPolicy:
    """Return the policy that chooses K.

    Args:
        trained_depth: K that the head was trained for; None if unknown.
        is_captured: whether steps run as CUDA graphs.
        trees: record of the trees; None if drafts are chains.
    """
    if speculative is None:
        return ScheduledDepth(lambda _: 0)
    # K may change the output of drawn drafts. The chains that lead trees follow past steps alone.
    is_free = is_captured and (trees is not None or not speculative.draws)
    if is_free and speculative.num_speculative_tokens_per_batch_size == AUTO:
        most = speculative.num_verified
        if trees is None and trained_depth is not None:
            most = min(most, trained_depth)
        return AutomaticDepth(most, trees)
    if is_captured and speculative.method == "ngram":
        return LookupDepth(speculative.tokens_for)
    return ScheduledDepth(speculative.tokens_for, trees)


def candidates(most: int) -> tuple[int, ...]:
    """Return the K to choose from: 0, 1, 3, 7, ... below `most`, and `most`.

    rows * (K + 1) then takes few values, and products are tuned for each of these. A K that costs
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

    With many sequences a pass takes time by the token, and few nodes are best: from 1 to 3 nodes
    its time doubles.
    """
    return tuple(sorted({*candidates(most), min(2, most)}))


class AcceptanceRecord:
    """The expected tokens of a sequence in a step at each K, from the latest steps.

    c_i is the share of sequences that accept draft i among those that accepted the i - 1 before it
    in steps that offered draft i; a step brings 1 + c_1 + c_1 c_2 + ... + c_1 ... c_K tokens. A
    sequence that drafts less than K by itself counts as accepting no more. With few tries c_i is
    like c_{i-1}, and c_1 like PRIOR_SHARE: a change of the first drafts, which are always tried,
    changes the deeper ones too. Old measurements fade over thousands of steps: a K that has not
    paid for long is tried again, if it pays with the prior.
    """

    def __init__(self, most: int) -> None:
        self._tried, self._passed = [0.0] * most, [0.0] * most
        self._k_of_drafts = most  # K of the step that made the next drafts to verify

    def add(self, k: int, accepted: Sequence[int]) -> None:
        """Count a step of depth k, which verified drafts of the step before it."""
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
        """Return the expected tokens of a sequence in a step of depth k."""
        total = chain = 1.0
        share = PRIOR_SHARE
        for tried, passed in zip(self._tried[:k], self._passed[:k], strict=True):
            share = (passed + share * PRIOR_DRAFTS) / (tried + PRIOR_DRAFTS)
            chain *= share
            total += chain
        return total


class CostTable:
    """The expected seconds of a step, from a table that the running steps correct.

    The seconds are the table's for the rows and K, and those that contexts add, whatever K is: the
    mean error of the latest steps. After SETTLED_STEPS steps of the same rows that mean is known,
    and the first steps of another K correct the table, by TABLE_ERROR at most. Until TRUSTED_STEPS
    steps of a K its entry counts TABLE_ERROR less: a K that might pay is tried once. A step without
    known seconds corrects nothing, and counts as a try.

    The host may take longer for a step than the device, as for many sequences of a small model.
    Then a step with drafts takes the host's time, whatever K is; plain steps take less of the host.
    That time is known if the device waits for the host; otherwise the period bounds it.

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
        """Return the rows of a step's graph, and sequences / rows where that exceeds 1."""
        rows = self._rows[min(bisect_left(self._rows, num_sequences), len(self._rows) - 1)]
        return rows, max(1.0, num_sequences / rows)

    def add(self, num_sequences: int, k: int, seconds: DecodeSeconds) -> None:
        """Count a step and correct the table by its seconds."""
        rows, share = self._size_of(num_sequences)
        if seconds.device is not None:
            self._correct(rows, share, k, seconds.device)
            if seconds.period is not None:
                self._follow_host((rows, k > 0), seconds.device / share, seconds.period / share)
        self._num_run[rows, k] += 1

    def _follow_host(self, key: tuple[int, bool], device_s: float, period_s: float) -> None:
        """Learn the host's time from a step, which counts at most twice the present estimate."""
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
    """The K with most tokens a second at the present load, by the costs and acceptance of steps.

    Each step adds up the time that every other K would have gained or lost. K changes when the
    gains of another K reach the price of the change: at once for large gains, and not for small
    gains or short ones. A change from 0 has the highest price, because the drafter has to read the
    positions that it missed. With nothing running a change is free: a burst of requests begins with
    the K that suits all of it.

    The target computes prompts whatever K is. The head reads them if K is above 0, and each output
    token bears its share of that time, as in the latest requests. The first step of a request has
    no drafts.

    Args:
        most: the greatest K.
        trees: record of the trees; None if drafts are chains.
    """

    def __init__(self, most: int, trees: TreeRecord | None = None) -> None:
        self._candidates = candidates(most) if trees is None else node_counts(most)
        self._costs: CostTable | None = None
        self._acceptance = AcceptanceRecord(most) if trees is None else trees
        self._k = most
        self._is_idle = True
        self._gains = dict.fromkeys(self._candidates, 0.0)  # in plain steps
        self._reading_s = 0.0  # seconds in which the head reads a prompt token
        self._num_requests = self._prompt_tokens = self._output_tokens = 0.0  # latest requests

    def measure(
        self, rows: Iterable[int], time_step: Callable[[int, int], float], reading_s: float = 0.0
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
        """Return the mean tokens of a request in a step of depth k, its first step included."""
        tokens = self._acceptance.tokens(k)
        if self._num_requests:
            length = max(self._output_tokens / self._num_requests, 1.0)
            tokens = length / (1 + (length - 1) / tokens)
        return tokens

    def _price(self, k: int, missed: float) -> float:
        """Return the price of a change to k in plain steps; `missed` is for missed positions."""
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
