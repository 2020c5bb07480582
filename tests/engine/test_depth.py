"""K by itself: against the best fixed K, on a simulated card and drafts that pass at random.

What steps cost here is a plausible shape, not a measurement: flat up to some 300 tokens, where
arithmetic begins to limit a pass, then by the token.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.config import CandidateTrees, SpeculativeConfig
from peagle.engine.depth import (
    PRIOR_DRAFTS,
    PRIOR_SHARE,
    TABLE_ERROR,
    TRUSTED_STEPS,
    AcceptanceRecord,
    AutomaticDepth,
    CostTable,
    DecodeSeconds,
    DepthPolicy,
    LookupDepth,
    ScheduledDepth,
    candidates,
    make_depth,
    node_counts,
)
from peagle.engine.features import FEATURES_KEPT
from peagle.engine.step.graph_runner import buckets, count_target_rows, graph_sizes
from peagle.engine.tree_record import TreeRecord
from peagle.errors import UserError
from peagle.models.head_json import with_depth

MOST = 7
KS = candidates(MOST)
ROWS = buckets(256)
LOADS = (1, 4, 16, 48, 128, 256)
# The share of each draft that passes where those before it did.
HEADS = {
    "great": (0.93,) * MOST,
    "good": (0.85, 0.82, 0.8, 0.78, 0.76, 0.75, 0.74),
    "middling": (0.7, 0.65, 0.6, 0.6, 0.55, 0.5, 0.5),
    "bad": (0.3,) * MOST,
    "broken": (0.03,) * MOST,
}
# Each head at three loads, and each load with two heads or three.
PAIRED = [(head, load) for i, head in enumerate(HEADS) for load in LOADS[i % 2 :: 2]]


def step_s(rows: int, k: int) -> float:
    """Seconds of a step."""
    drafting = 0.8e-3 + 4e-6 * rows * k if k else 0.0
    return 6.3e-3 + 20e-6 * max(0, rows * (k + 1) - 300) + drafting


def rows_of(load: int) -> int:
    return next(rows for rows in ROWS if rows >= load)


def tokens_of(shares: Sequence[float], k: int) -> float:
    total = chain = 1.0
    for share in shares[:k]:
        chain *= share
        total += chain
    return total


@dataclass
class Card:
    """Steps of a policy, or of a fixed K. A change of K costs an idle moment, a resumption more."""

    policy: AutomaticDepth | ScheduledDepth
    shares: tuple[float, ...] = HEADS["good"]
    context_s: float = 0.0  # of each sequence
    host_s: float = 0.0  # of a step with drafts; half of it of a plain one
    missed_s: float = 0.0  # that the head takes for a sequence where drafting resumes
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    seconds: float = 0.0
    num_tokens: float = 0.0  # expected ones: what the draws of a run bring is luck
    knows_times: bool = True
    ks: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if isinstance(self.policy, AutomaticDepth):
            self.policy.measure(ROWS, step_s)
        self.policy.observe(0)

    def step(self, load: int, num_joining: int = 0, num_new: int = 0) -> list[int]:
        """Returns the tokens of each sequence; the last `num_new` of them have no drafts yet."""
        self.policy.observe(load + num_joining)
        k = self.policy(load)
        before = self.ks[-1] if self.ks else k
        self.ks.append(k)
        device_s = step_s(rows_of(load), k) + load * self.context_s
        resuming_s = (30e-3 + load * self.missed_s) * (k > before == 0)
        period_s = self.period_s(load, k)
        self.seconds += period_s + 1.5e-3 * (k != before) + resuming_s
        drafted = load - num_new
        accepted = self._accepted(min(k, before), drafted)
        seconds = DecodeSeconds(device_s, period_s) if self.knows_times else DecodeSeconds()
        self.policy.record(k, accepted, load, seconds)
        self.num_tokens += num_new + drafted * tokens_of(self.shares, min(k, before))
        return [1 + count for count in accepted] + [1] * num_new

    def _accepted(self, most: int, drafted: int) -> list[int]:
        """Draw how many of the first `most` drafts pass, for each sequence."""
        chains = accumulate(self.shares[:most], mul)  # P(more than 0 pass), P(more than 1), ...
        at_most = [*(1 - chain for chain in chains), 1.0]
        return self.rng.choices(range(most + 1), cum_weights=at_most, k=drafted)

    def period_s(self, load: int, k: int) -> float:
        """Seconds from step to step: the device runs one while the host reads the one before."""
        device_s = step_s(rows_of(load), k) + load * self.context_s
        return max(device_s, self.host_s if k else self.host_s / 2)

    def speed(self, load: int, k: int) -> float:
        """Tokens a second of a fixed K, in the long run."""
        return load * tokens_of(self.shares, k) / self.period_s(load, k)

    def best(self, load: int) -> float:
        return max(self.speed(load, k) for k in KS)

    def run(self, load: int, steps: int) -> float:
        """Tokens a second over some steps."""
        before = self.num_tokens, self.seconds
        for _ in range(steps):
            self.step(load)
        return (self.num_tokens - before[0]) / (self.seconds - before[1])

    def steps_until_good(self, load: int, most: int) -> int:
        """Steps until a K is chosen that is within 2% of the best."""
        for number in range(most):
            if self.speed(load, self.policy(load)) > 0.98 * self.best(load):
                return number
            self.step(load)
        return most


# ---- against every fixed K ----


@pytest.mark.slow
@pytest.mark.parametrize(("head", "load"), PAIRED)
def test_as_fast_as_the_best_fixed_k_and_never_below_plain(load: int, head: str) -> None:
    card = Card(AutomaticDepth(MOST), HEADS[head])
    found = card.run(load, 3000)
    assert found >= 0.98 * card.best(load)
    assert found >= 0.98 * card.speed(load, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("load", "head", "host_s"),
    [
        (load, head, (9e-3, 25e-3)[(i + j) % 2])
        for i, load in enumerate((1, 64, 256))
        for j, head in enumerate(("great", "middling", "bad"))
    ],
)
def test_where_the_host_is_slower_than_the_device(load: int, head: str, host_s: float) -> None:
    card = Card(AutomaticDepth(MOST), HEADS[head], host_s=host_s)
    assert card.run(load, 3000) >= 0.98 * max(card.best(load), card.speed(load, 0))


@pytest.mark.parametrize("error", [-0.1, 0.1])
@pytest.mark.parametrize("load", [8, 64, 128, 256])
@pytest.mark.parametrize("head", ["good", "bad"])
def test_a_table_that_is_wrong_is_corrected(head: str, load: int, error: float) -> None:
    """Steps with drafts take longer than at the start, or less long."""
    card = Card(AutomaticDepth(MOST), HEADS[head])
    card.policy.measure(ROWS, lambda rows, k: step_s(rows, k) * (1 + error * (k > 0)))
    card.run(load, 300)
    found = card.run(load, 500)
    assert found >= 0.98 * card.best(load)
    assert found >= 0.98 * card.speed(load, 0)


@pytest.mark.slow
@pytest.mark.parametrize("load", [16, 64, 128])
def test_long_contexts_make_deeper_drafts_pay(load: int) -> None:
    """They are read once, whatever K is; the table knows nothing of them."""
    card = Card(AutomaticDepth(MOST), context_s=0.3e-3)
    assert card.run(load, 2000) >= 0.98 * card.best(load)
    short = Card(AutomaticDepth(MOST))
    short.run(load, 2000)
    assert card.ks[-1] >= short.ks[-1]


@pytest.mark.slow
@pytest.mark.parametrize("prompt_s", [2e-3, 25e-3])
@pytest.mark.parametrize(("head", "in_flight"), [("good", 8), ("bad", 64), ("good", 128)])
def test_prompts_in_flight(head: str, in_flight: int, prompt_s: float) -> None:
    """Each request that ends makes way for a prompt, whose passes come between the steps."""

    def run(policy: AutomaticDepth | ScheduledDepth) -> float:
        card = Card(policy, HEADS[head])
        rng = random.Random(1)
        left = [rng.randrange(1, 200) for _ in range(in_flight)]
        for _ in range(1500):
            left = [n - new for n, new in zip(left, card.step(in_flight), strict=True)]
            card.seconds += prompt_s * sum(n <= 0 for n in left)
            left = [n if n > 0 else 200 for n in left]
        return card.num_tokens / card.seconds

    fixed = [run(ScheduledDepth(lambda _, k=k: k)) for k in KS]
    found = run(AutomaticDepth(MOST))
    assert found >= 0.98 * max(fixed)
    assert found >= 0.98 * fixed[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head", "in_flight", "num_prompt_tokens"),
    [("great", 16, 1024), ("great", 256, 128), ("good", 16, 128), ("good", 128, 1024)],
)
def test_drafts_pay_for_the_heads_reading(
    head: str, in_flight: int, num_prompt_tokens: int
) -> None:
    """A head that pauses reads no prompts: each request costs it nothing."""
    reading_s = 5e-6

    def run(policy: AutomaticDepth | ScheduledDepth, *, knows: bool = True) -> float:
        card = Card(policy, HEADS[head], missed_s=FEATURES_KEPT * reading_s)
        if isinstance(policy, AutomaticDepth):
            policy.measure(ROWS, step_s, reading_s if knows else 0.0)
        rng = random.Random(1)
        left = [rng.randrange(1, 128) for _ in range(in_flight)]
        for _ in range(1500):
            left = [n - new for n, new in zip(left, card.step(in_flight), strict=True)]
            for _ in range(sum(n <= 0 for n in left)):
                policy.served(num_prompt_tokens, 128)
                card.seconds += num_prompt_tokens * (25e-6 + reading_s * (card.ks[-1] > 0))
            left = [n if n > 0 else 128 for n in left]
        return card.num_tokens / card.seconds

    fixed = {k: run(ScheduledDepth(lambda _, k=k: k)) for k in KS}
    found = run(AutomaticDepth(MOST))
    assert found >= 0.98 * max(fixed.values())
    if (head, in_flight, num_prompt_tokens) == ("good", 128, 1024):
        assert max(fixed, key=fixed.__getitem__) == 0, "decode steps alone would choose drafts"
        assert run(AutomaticDepth(MOST), knows=False) < 0.98 * max(fixed.values())


@pytest.mark.slow
@pytest.mark.parametrize("length", [4, 8, 40])
@pytest.mark.parametrize("in_flight", [8, 64, 128])
def test_a_request_begins_with_a_step_without_drafts(in_flight: int, length: int) -> None:
    def run(policy: AutomaticDepth | ScheduledDepth, *, knows: bool = True) -> float:
        card, rng = Card(policy), random.Random(1)
        left, num_new = [rng.randrange(1, length) for _ in range(in_flight)], 0
        for _ in range(750):
            tokens = card.step(in_flight, num_new=num_new)
            left = [n - new for n, new in zip(left, tokens, strict=True) if n > new]
            num_new = in_flight - len(left)
            left += [length] * num_new  # the new ones are the last
            for _ in range(num_new * knows):
                policy.served(0, length)
        return card.num_tokens / card.seconds

    fixed = {k: run(ScheduledDepth(lambda _, k=k: k)) for k in KS}
    assert run(AutomaticDepth(MOST)) >= 0.98 * max(fixed.values())
    if in_flight == 128:
        assert run(AutomaticDepth(MOST), knows=False) < 0.98 * max(fixed.values())


@pytest.mark.slow
@pytest.mark.parametrize("load", LOADS[::2])
@pytest.mark.parametrize("head", ["good", "bad"])
def test_prompts_in_every_step(head: str, load: int) -> None:
    """The time of such a step is not that of its K. Tries of another K must end all the same."""
    card = Card(AutomaticDepth(MOST), HEADS[head])
    card.run(load, 40)
    card.knows_times = False
    card.run(load, 1000)
    assert card.run(load, 1000) >= 0.98 * card.best(load)


# ---- changes ----


@pytest.mark.parametrize("head", ["great", "good", "bad"])
@pytest.mark.parametrize("loads", [(1, 256, 1), (4, 64, 4), (256, 16, 192), (32, 128, 8)])
def test_settles_after_the_load_changes(loads: tuple[int, ...], head: str) -> None:
    card = Card(AutomaticDepth(MOST), HEADS[head])
    card.run(loads[0], 300)
    for load in loads[1:]:
        assert card.steps_until_good(load, 120) < 120
        assert card.run(load, 800) >= 0.97 * card.best(load)


def test_drafts_deeply_again_when_the_load_falls() -> None:
    card = Card(AutomaticDepth(MOST))
    card.run(256, 500)
    assert card.ks[-1] == 0
    assert card.steps_until_good(4, 40) < 40
    card.run(4, 200)
    assert card.ks[-1] == MOST


@pytest.mark.parametrize("context_s", [0.3e-3, 3e-3])
@pytest.mark.parametrize("many", [64, 128])
def test_what_one_sequence_costs_says_little_of_many(many: int, context_s: float) -> None:
    """A long context of one sequence is not multiplied by those of the next burst."""
    card = Card(AutomaticDepth(MOST), context_s=2e-5)
    card.run(many, 100)
    card.context_s = context_s
    card.run(1, 60)
    card.policy.observe(0)
    card.context_s = 2e-5
    assert card.steps_until_good(many, 40) < 40
    assert card.run(many, 300) >= 0.98 * card.best(many)


def test_an_idle_moment_makes_a_change_free() -> None:
    card = Card(AutomaticDepth(MOST))
    card.run(256, 300)
    assert card.policy(1) == 0
    card.policy.observe(0)
    assert card.policy(1) == MOST
    card.policy.observe(256)  # all at once
    assert card.policy(256) == 0


@pytest.mark.parametrize("head", ["good", "middling", "bad"])
@pytest.mark.parametrize(("num_requests", "least"), [(64, 0.99), (128, 0.98), (256, 0.97)])
def test_a_burst_is_drafted_for_as_a_whole(num_requests: int, least: float, head: str) -> None:
    """Requests come at once, and a few prompts a step are computed; against plain decoding."""

    def seconds(card: Card) -> float:
        begin, waiting, left = card.seconds, num_requests, list[int]()
        card.policy.observe(0)
        while waiting or left:
            joining = min(16, waiting)
            waiting, left = waiting - joining, left + [128] * joining
            tokens = card.step(len(left), waiting, joining)
            left = [n - new for n, new in zip(left, tokens, strict=True) if n > new]
        return card.seconds - begin

    total_s = 0.0
    for seed in range(3):  # what passes in the first burst is luck
        card = Card(AutomaticDepth(MOST), HEADS[head], rng=random.Random(seed))
        seconds(card)  # what there is to learn
        total_s += sum(seconds(card) for _ in range(3))
    plain_s = seconds(Card(ScheduledDepth(lambda _: 0), HEADS[head]))
    assert 9 * plain_s >= least * total_s


@pytest.mark.slow
@pytest.mark.parametrize(("load", "most"), [(1, 20_000), (16, 20_000), (64, 20_000)])
def test_finds_out_that_drafts_pass_again(load: int, most: int) -> None:
    card = Card(AutomaticDepth(MOST), HEADS["broken"])
    card.run(load, 3000)
    assert card.ks[-1] == 0
    card.shares = HEADS["good"]
    assert card.steps_until_good(load, most) < most


def test_follows_acceptance_while_it_drafts() -> None:
    card = Card(AutomaticDepth(MOST), HEADS["bad"])
    card.run(64, 1000)
    assert card.ks[-1] < MOST
    card.shares = HEADS["great"]
    assert card.steps_until_good(64, 300) < 300
    card.shares = HEADS["bad"]
    assert card.steps_until_good(64, 300) < 300


@pytest.mark.slow
@pytest.mark.parametrize("period", [5, 20, 100])
@pytest.mark.parametrize("loads", [(150, 256), (48, 72), (1, 256)])
def test_a_load_that_swings_costs_little(loads: tuple[int, int], period: int) -> None:
    card = Card(AutomaticDepth(MOST))
    fixed = [Card(ScheduledDepth(lambda _, k=k: k)) for k in KS]
    best = {load: card.best(load) for load in loads}

    def efficiency(one: Card) -> float:
        """The least time for the tokens that it brought, over its own time."""
        least_s = 0.0
        for number in range(600):
            load = loads[number // period % 2]
            least_s += sum(one.step(load)) / best[load]
        return least_s / one.seconds

    assert efficiency(card) >= 0.95 * max(map(efficiency, fixed))


# ---- whatever it is told ----


@pytest.mark.slow
@settings(max_examples=40)
@given(data=st.data(), most=st.integers(1, 9))
def test_k_is_always_a_candidate(data: st.DataObject, most: int) -> None:
    policy = AutomaticDepth(most)
    assert policy(3) == most, "until costs are known"
    costs = st.floats(1e-6, 1e3)
    policy.measure([1, 4], lambda rows, k: data.draw(costs))
    for _ in range(data.draw(st.integers(1, 30))):
        load = data.draw(st.integers(0, 9))
        policy.observe(load)
        k = policy(load)
        assert k in candidates(most) and 0 <= k <= most
        assert {policy(n) for n in range(1, 9)} == {k}, "one K within a step"
        accepted = data.draw(st.lists(st.integers(0, k), max_size=load))
        seconds = DecodeSeconds(data.draw(st.none() | costs), data.draw(st.none() | costs))
        policy.record(k, accepted, len(accepted), seconds)


def test_the_same_observations_give_the_same_choices() -> None:
    first, second = (Card(AutomaticDepth(MOST), HEADS["middling"]) for _ in range(2))
    for card in (first, second):
        for load in (3, 200, 17, 90):
            card.run(load, 100)
    assert first.ks == second.ks
    assert len(set(first.ks)) > 1


# ---- the parts ----


def test_few_numbers_of_target_rows_are_compiled() -> None:
    sizes = graph_sizes(64, AutomaticDepth(7).possible)
    found = count_target_rows(sizes)
    assert set(found) == set(sizes)
    assert sorted({n for n in found.values() if n <= 128}) == [1, 2, 4, 8, 16, 32, 64, 128]
    for (rows, k), num_rows in found.items():
        least = rows * (k + 1)
        assert least <= num_rows < 2 * least
        assert num_rows == least or (k < 7 and least <= 128)
    # One K at the same rows has its own size.
    assert count_target_rows([(1, 0), (24, 0), (40, 0)]) == {(1, 0): 1, (24, 0): 24, (40, 0): 40}
    assert count_target_rows([(3, 4), (24, 0)]) == {(3, 4): 15, (24, 0): 24}
    assert count_target_rows([(3, 4), (3, 1), (9, 1)]) == {(3, 4): 15, (3, 1): 8, (9, 1): 18}


def test_candidates_share_their_sizes() -> None:
    assert candidates(7) == (0, 1, 3, 7)
    assert candidates(5) == (0, 1, 3, 5)
    assert candidates(1) == (0, 1)
    assert candidates(16) == (0, 1, 3, 7, 16), "15 costs as much as 16"
    assert candidates(63) == (0, 1, 3, 7, 15, 31, 63)
    assert node_counts(16) == (0, 1, 2, 3, 7, 16)
    assert [node_counts(n) for n in (1, 2, 3)] == [(0, 1), (0, 1, 2), (0, 1, 2, 3)]
    sizes = graph_sizes(32, AutomaticDepth(7).possible)
    assert sizes == [(rows, k) for rows in buckets(32) for k in (0, 1, 3, 7)]
    assert AutomaticDepth(7).most_resuming(32) == 32


def test_acceptance_is_what_was_seen() -> None:
    record = AcceptanceRecord(3)
    assert record.tokens(3) == pytest.approx(1 + PRIOR_SHARE + PRIOR_SHARE**2 + PRIOR_SHARE**3)
    for _ in range(100):
        record.add(2, [0, 1, 2, 2] * 8)
    # Of 4 sequences 3 accept the first draft, 2 of these the second; the third is like the second.
    first, second = 3 / 4, 2 / 3
    assert record.tokens(1) == pytest.approx(1 + first, abs=0.01)
    assert record.tokens(2) == pytest.approx(1 + first + first * second, abs=0.01)
    third = first * second * second
    assert record.tokens(3) == pytest.approx(1 + first + first * second + third, abs=0.01)


def test_deeper_drafts_follow_the_first_one() -> None:
    record = AcceptanceRecord(3)
    for _ in range(100):
        record.add(3, [3, 3, 0, 1] * 8)
    for _ in range(100):
        record.add(1, [0] * 31 + [1])
    assert record.tokens(3) < 1.15


def test_a_record_fades_to_the_prior() -> None:
    record = AcceptanceRecord(2)
    for _ in range(50):
        record.add(2, [0] * 32)
    assert record.tokens(2) < 1.05
    for _ in range(40_000):
        record.add(0, [0] * 32)
    assert record.tokens(2) == pytest.approx(1 + PRIOR_SHARE + PRIOR_SHARE**2, abs=0.01)


def test_a_record_of_few_counts_little() -> None:
    record = AcceptanceRecord(1)
    record.add(1, [0])
    assert record.tokens(1) == pytest.approx(1 + PRIOR_SHARE * PRIOR_DRAFTS / (PRIOR_DRAFTS + 1))


TABLE = {(2, 0): 1.0, (2, 1): 1.2, (2, 3): 1.5, (8, 0): 2.0, (8, 1): 3.0, (8, 3): 4.0}


def test_costs_are_those_of_the_next_larger_graph_less_a_doubt() -> None:
    costs, left = CostTable(TABLE), 1 - TABLE_ERROR
    found = [costs(n, 3) for n in (1, 2, 3, 8, 16)]
    assert found == pytest.approx([1.5 * left, 1.5 * left, 4 * left, 4 * left, 8 * left])
    for _ in range(TRUSTED_STEPS):
        costs.add(8, 3, DecodeSeconds(4.0))
    assert (costs(8, 3), costs(16, 3)) == (4.0, 8.0)
    assert costs(8, 0) == 2.0 * left


def test_contexts_cost_the_same_at_each_k() -> None:
    costs, left = CostTable(TABLE), 1 - TABLE_ERROR
    for _ in range(200):
        costs.add(6, 0, DecodeSeconds(2.0 + 3.0))
    assert costs(6, 0) == pytest.approx(5.0)
    assert costs(6, 3) == pytest.approx(4.0 * left + 3.0)
    for _ in range(200):
        costs.add(6, 0, DecodeSeconds(0.1))
    assert costs(6, 0) == 1.0, "never less than half of the table"


def test_the_first_steps_of_another_k_correct_its_entry() -> None:
    costs = CostTable(TABLE)
    for _ in range(200):
        costs.add(8, 0, DecodeSeconds(2.0 + 4.0))
    for _ in range(TRUSTED_STEPS):
        costs.add(8, 3, DecodeSeconds(4.6 + 4.0))
    assert costs(8, 3) == pytest.approx(8.6, rel=0.01)
    assert costs(8, 0) == pytest.approx(6.0, rel=0.01)
    for _ in range(200):  # later steps tell of contexts
        costs.add(8, 3, DecodeSeconds(4.6 + 8.0))
    assert costs(8, 3) == pytest.approx(12.6, rel=0.01)
    assert costs(8, 0) == pytest.approx(10.0, rel=0.01)


def test_an_entry_is_not_corrected_beyond_doubt() -> None:
    """What a step takes beyond that is its contexts'."""
    costs = CostTable(TABLE)
    for _ in range(TRUSTED_STEPS):
        costs.add(8, 0, DecodeSeconds(2.0))
    for _ in range(200):
        costs.add(8, 3, DecodeSeconds(14.0))
    assert costs(8, 3) == pytest.approx(14.0, rel=0.01)
    assert costs(8, 0) == pytest.approx(2.0 + 14.0 - 4.0 * (1 + TABLE_ERROR), rel=0.01)


def test_a_step_takes_no_less_than_the_host() -> None:
    costs = CostTable(TABLE)
    for _ in range(100):
        costs.add(8, 3, DecodeSeconds(4.0, 7.0))
    assert costs(8, 1) == costs(8, 3) == pytest.approx(7.0, rel=0.01)
    assert costs(8, 0) == 2.0 * (1 - TABLE_ERROR), "plain steps are another matter"
    costs.add(8, 3, DecodeSeconds(4.0, 500.0))
    assert costs(8, 3) < 8.0, "it stood still once"
    costs.add(8, 3, DecodeSeconds(4.0, 4.1))
    assert costs(8, 3) == pytest.approx(4.1), "the host was done before the device"


def test_a_busy_device_says_little_of_the_host() -> None:
    costs = CostTable(TABLE)
    for _ in range(100):
        costs.add(8, 3, DecodeSeconds(4.0, 4.1))
    assert costs(8, 1) == TABLE[8, 1] * (1 - TABLE_ERROR)


# ---- who gets it ----


def test_which_configurations_choose_k() -> None:
    auto = SpeculativeConfig(
        model="head", num_speculative_tokens=7, num_speculative_tokens_per_batch_size="auto"
    )
    depth = make_depth(auto, None, is_captured=True)
    assert isinstance(depth, AutomaticDepth) and depth.possible(1) == {0, 1, 3, 7}
    assert make_depth(auto, 4, is_captured=True).possible(9) == {0, 1, 3, 4}
    assert make_depth(auto, 4, is_captured=False).possible(9) == {7}
    drawn = replace(auto, draft_sampling="probabilistic")
    assert make_depth(drawn, 4, is_captured=True).possible(9) == {7}
    fixed = SpeculativeConfig(model="head", num_speculative_tokens=5)
    assert make_depth(fixed, 7, is_captured=True).possible(3) == {5}
    schedule = SpeculativeConfig(
        model="head", num_speculative_tokens_per_batch_size=((1, 4, 5), (5, 9, 0))
    )
    scheduled = make_depth(schedule, 7, is_captured=True)
    assert (scheduled.possible(4), scheduled.possible(5)) == ({5}, {0})
    assert scheduled.most_resuming(8) == 4
    assert make_depth(None, None, is_captured=True).possible(3) == {0}


def test_lookups_run_where_the_text_has_enough() -> None:
    config = SpeculativeConfig(method="ngram", num_speculative_tokens=3)
    assert make_depth(config, None, is_captured=False).possible(4) == {3}
    depth = make_depth(config, None, is_captured=True)
    assert isinstance(depth, LookupDepth) and depth.possible(4) == {0, 3}

    def after(num_steps: int, num_drafting: int, accepted: int = 4) -> int:
        for _ in range(num_steps):
            depth.record(depth.captured(4), [accepted] * num_drafting, 4, DecodeSeconds())
            depth.drafted(num_drafting)
        return depth.captured(4)

    assert (depth(4), depth.captured(4)) == (3, 0), "nothing is known of the text"
    assert [after(9, 1), after(40, 0), after(9, 1)] == [3, 0, 3]
    depth.measure([(4, 0), (4, 3)], lambda rows, k: 1 + k / 2)
    assert [after(9, 1), after(9, 4)] == [0, 3], "one of four cannot pay for all"
    assert [after(99, 4, 2), after(99, 4, 1)] == [3, 0]
    runs = {after(1, 4, 1) for _ in range(4000)}
    assert runs == {0, 3}, "it is tried again"


def test_which_configurations_choose_nodes(tmp_path: Path) -> None:
    """As K of chains: where K is given it is the shape's depth, and all nodes are verified."""
    shape = CandidateTrees(num_parallel_trees=4, prediction_depth=5, max_nodes=16)
    (tmp_path / "config.json").write_text("{}")

    def depth_of(is_captured: bool = True, **options: Any) -> DepthPolicy:
        config = SpeculativeConfig(model="head", parallel_drafting_spec=shape, **options)
        config = with_depth(config, tmp_path)
        assert config.k == 5
        return make_depth(config, 5, is_captured=is_captured, trees=TreeRecord(shape))

    open_ = depth_of()
    assert isinstance(open_, AutomaticDepth) and open_.possible(1) == {0, 1, 2, 3, 7, 16}
    assert depth_of(is_captured=False).possible(1) == {16}
    assert depth_of(num_speculative_tokens=5).possible(1) == {16}
    auto = depth_of(num_speculative_tokens=5, num_speculative_tokens_per_batch_size="auto")
    assert auto.possible(9) == {0, 1, 2, 3, 7, 16}
    schedule = depth_of(num_speculative_tokens_per_batch_size=((1, 4, 99), (5, 8, 3), (9, 9, 0)))
    assert [schedule.possible(n) for n in (1, 5, 9)] == [{16}, {3}, {0}]
    with pytest.raises(UserError, match="num_speculative_tokens is 7; expected 5, the prediction"):
        depth_of(num_speculative_tokens=7)
