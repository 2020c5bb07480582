"""What is learnt of trees: survival by score, its error, and the tokens of n nodes."""

import random

import pytest
import torch

from peagle.config import CandidateTrees
from peagle.engine import tree_record
from peagle.engine.stats import Calibration
from peagle.engine.tree_record import PRIOR_SHARE, TreeRecord, fit_logistic
from peagle.kernels.trees.growth import allocate_nodes
from peagle.kernels.trees.survival import MAX_LOGIT, Survival, score_logits

SHAPE = CandidateTrees(num_parallel_trees=3, prediction_depth=3, max_nodes=4)
PARENTS = [0, 1, 0, 2]
DEPTHS = torch.tensor([[1, 2, 1, 3]])


# ---- survival of nodes ----


def test_without_a_calibration_survival_is_the_probability_of_the_path() -> None:
    probs = torch.tensor([[0.9, 0.4, 0.05, 1e-3]])
    survival = Survival.uncalibrated(3, "cpu")
    assert survival(probs.log(), DEPTHS) == pytest.approx(probs, abs=1e-5)
    ends = score_logits(torch.tensor([0.0, -1e9, -torch.inf, torch.nan]))
    assert ends.tolist() == [MAX_LOGIT, *[-MAX_LOGIT] * 3]


def test_the_fit_finds_the_weights_that_made_the_data() -> None:
    centres, prior = tree_record._CENTRES_X, torch.tensor([1.0, 0.0]).double()
    tried = torch.full_like(centres, 1e5)
    for wanted in ((1.0, 0.0), (0.3, -1.2), (2.5, 3.0), (0.0, -4.0)):
        found = fit_logistic(tried, tried * torch.sigmoid(wanted[0] * centres + wanted[1]), prior)
        assert found.tolist() == pytest.approx(wanted, abs=0.02)
    few = fit_logistic(tried * 0, tried * 0, torch.tensor([0.7, -0.1]).double())
    assert few.tolist() == pytest.approx([0.7, -0.1]), "nothing was seen: the prior"


def test_the_fit_ends_where_it_cannot_be_better() -> None:
    """Data that a line separates, and all of one kind."""
    centres, prior = tree_record._CENTRES_X, torch.tensor([1.0, 0.0]).double()
    tried = torch.full_like(centres, 1e4)
    for passed in (tried * 0, tried, tried * (centres > 2)):
        assert fit_logistic(tried, passed, prior).isfinite().all()


def feed(record: TreeRecord, rng: random.Random, steps: int, trees: int = 4) -> None:
    """Trees of a head that says 0.9, 0.8, 0.3 and 0.7; half of the first two nodes pass."""
    scores = torch.tensor([0.9, 0.8, 0.3, 0.7]).log().tolist()
    for _ in range(steps):
        for _ in range(trees):
            path = [0, 1][: rng.choice([0, 0, 2, 2])] or [2][: rng.choice([0, 0, 0, 1])]
            record.saw(scores, PARENTS, path, verified=3)
        record.add(3, [0] * trees)


def test_survival_follows_what_is_accepted() -> None:
    record, survival = TreeRecord(SHAPE), Survival.uncalibrated(3, "cpu")
    record.calibrates(survival)
    feed(record, random.Random(0), 300)
    found = survival(torch.tensor([[0.9, 0.8, 0.3, 0.7]]).log(), DEPTHS)[0].tolist()
    assert found[:3] == pytest.approx([0.5, 0.5, 0.125], abs=0.05)
    assert record.tokens(0) == 1
    assert record.tokens(2) == pytest.approx(1 + 0.5 + 0.5, abs=0.1)


def test_the_error_is_that_of_predictions() -> None:
    record = TreeRecord(SHAPE)
    assert record.calibration.error is None
    feed(record, random.Random(2), 1, trees=tree_record.TREES_A_STEP)
    first = record.calibration.error
    assert first is not None and first > 0.1, "it is the head's own at first"
    feed(record, random.Random(1), 400)
    record.calibration = Calibration()
    feed(record, random.Random(2), 200)
    assert record.calibration.error is not None and record.calibration.error < 0.03


@pytest.mark.parametrize(("trees", "steps"), [(2, 8), (16, 8), (64, 8)])
def test_what_is_known_is_learnt_from_seldom(trees: int, steps: int) -> None:
    """And before, from the trees of every step."""
    record = TreeRecord(SHAPE)
    learnt: list[int] = []
    learn = record._learn
    record._learn = lambda depth: (learnt.append(len(record._pending)), learn(depth))[1]
    looked = [feed_where_it_looks(record, trees) for _ in range(400)]
    first = 128 // min(trees, 16)
    assert all(looked[:first]) and learnt[:8] == [16] * 8
    assert len(learnt) == pytest.approx(8 + (400 - first) / steps, abs=1)


def feed_where_it_looks(record: TreeRecord, trees: int) -> bool:
    looks = record.looks
    for _ in range(trees):
        if record.looks:
            record.saw([-0.1, -0.2, -1.0, -0.4], PARENTS, [0], verified=3)
    record.add(3, [1] * trees)
    return looks


def test_a_record_without_a_fit_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_record, "fit_logistic", lambda tried, passed, prior: prior)
    with pytest.raises(AssertionError):
        test_survival_follows_what_is_accepted()


def test_errors_add_up() -> None:
    one, other = Calibration(), Calibration()
    one.num_nodes[2], one.predicted[2], one.accepted[2] = 4, 1.0, 2
    other.num_nodes[7], other.predicted[7], other.accepted[7] = 6, 4.5, 3
    one.add(other)
    assert one.error == pytest.approx((1.0 + 1.5) / 10)
    assert other.copy() == other


# ---- tokens of n nodes ----


def test_the_prior_is_a_chain_of_a_good_head_and_comes_back() -> None:
    prior = [1 + sum(PRIOR_SHARE**i for i in range(1, n + 1)) for n in range(5)]
    record = TreeRecord(SHAPE)
    assert [record.tokens(n) for n in range(5)] == pytest.approx(prior)
    feed(record, random.Random(0), 300)
    assert record.tokens(4) < prior[4] - 0.5
    for _ in range(60_000):
        record.add(0, [0] * 4)
    assert [record.tokens(n) for n in range(5)] == pytest.approx(prior, abs=0.01)


def test_many_together_give_the_nodes_to_the_surest() -> None:
    """Half of the trees are sure, half are not."""

    def tokens_of(load: int) -> list[float]:
        record = TreeRecord(SHAPE)
        for step in range(200):
            score = -0.01 if step % 2 else -5.0
            record.saw([score] * 4, PARENTS, [0, 1, 3] if step % 2 else [], verified=4)
            record.add(4, [0] * load)
        return [record.tokens(n) for n in range(5)]

    alone, together = tokens_of(1), tokens_of(64)
    assert together[4] == pytest.approx(alone[4], abs=0.05), "all nodes of all"
    assert together[2] > alone[2] + 0.3


def test_what_is_known_is_counted_again_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though some of those that run join, and have no drafts in their first step."""
    record, counted = TreeRecord(SHAPE), list[int]()
    curve = record._make_curve
    monkeypatch.setattr(record, "_make_curve", lambda of: (counted.append(1), curve(of))[1])
    for step in range(400):
        for _ in range(16):
            if record.looks:
                record.saw([-0.1, -0.2, -1.0, -0.4], PARENTS, [0], verified=3)
        record.add(3, [1] * (16 - step % 3))
        record.tokens(3)
    assert len(counted) <= 8 + 400 // tree_record.HELD_STEPS
    number = len(counted)
    record.add(3, [1] * 40)
    record.tokens(3)
    assert len(counted) == number + 1, "many more share their nodes"


# ---- nodes that trees share ----


def test_the_most_probable_nodes_of_all_trees_are_verified() -> None:
    survival = torch.tensor([[0.9, 0.5, 0.4, 0.1], [0.8, 0.6, 0.55, 0.2], [0.3, 0.3, 0.3, 0.3]])
    every = torch.tensor([4, 4, 4])
    expected = {0: [0, 0, 0], 1: [1, 0, 0], 3: [1, 2, 0], 6: [3, 3, 0], 7: [3, 3, 1], 99: [4] * 3}
    for budget, counts in expected.items():
        assert allocate_nodes(survival, every, budget).tolist() == counts
    assert allocate_nodes(survival, torch.tensor([1, 0, 4]), 3).tolist() == [1, 0, 2]


def test_a_tree_gives_its_first_nodes() -> None:
    """A node is worth no more than those before it, without which it cannot be verified."""
    survival = torch.tensor([[0.2, 0.9, 0.9], [0.5, 0.4, 0.3]])
    assert allocate_nodes(survival, torch.tensor([3, 3]), 3).tolist() == [0, 3]
    assert allocate_nodes(survival, torch.tensor([3, 3]), 4).tolist() == [1, 3]


@pytest.mark.parametrize("seed", range(20))
def test_as_one_by_one(seed: int) -> None:
    """Against a loop that takes the best next node, the lower index first of equal ones."""
    rng = random.Random(seed)
    rows, nodes = rng.randint(1, 6), rng.randint(1, 9)
    survival = torch.rand(rows, nodes, generator=torch.Generator().manual_seed(seed))
    survival = (survival * 4).round() / 4  # ties
    have, budget = [rng.randint(0, nodes) for _ in range(rows)], rng.randint(0, rows * nodes)
    counts = [0] * rows
    for _ in range(min(budget, sum(have))):
        worth = [
            (float(survival[b, : counts[b] + 1].min()), -b)
            for b in range(rows)
            if counts[b] < have[b]
        ]
        counts[-max(worth)[1]] += 1
    assert allocate_nodes(survival, torch.tensor(have), budget).tolist() == counts
