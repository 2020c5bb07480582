"""The record of the trees that a head drafts: acceptance of nodes, and tokens that n nodes bring.

The estimate needs no trained output. It starts from the head's own probabilities, and the latest
acceptances correct these (`kernels.trees.survival`).

Shapes: D depths, X cells of score logits, R trees, N nodes of a tree, S trees of a step.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from peagle.config import CandidateTrees
from peagle.engine.stats import NUM_CALIBRATION_BINS, Calibration
from peagle.kernels.paths import row_depths
from peagle.kernels.trees.copies import NO_COPY, NUM_LENGTHS, PRIOR_RATES
from peagle.kernels.trees.survival import MAX_LOGIT, Survival, score_logits
from peagle.kernels.upload import upload

# Number of trees that are learnt from at once, and most recorded trees of a step: more add little.
# Once LATEST_TREES are known, the record rests for LEARN_STEPS between them: to learn takes half a
# millisecond of the host, a quarter of a small model's step.
TREES_A_STEP, LEARN_STEPS = 16, 8
# Recorded steps after which w and b are fitted again; the first fits come sooner.
REFIT_STEPS = 50
# Weight of the latest verified nodes of a depth, and of w and b of the depth before, in nodes.
LATEST_NODES, PRIOR_NODES = 4096, 8
# Weight of the latest copied tokens of a cell, and of its prior rate, in tokens.
LATEST_COPIES, PRIOR_COPIES = 512, 8
# Number of the latest trees whose mean estimates a tree's tokens, and the steps for which that
# estimate is kept: while fewer trees are known, and later.
LATEST_TREES, FIRST_HELD_STEPS, HELD_STEPS = 128, 4, 8
# Weight of the prior and of the latest trees, in trees.
PRIOR_TREES, MAX_TREES = 1, 512
# Acceptance of each draft before there is a record, that of a good head.
PRIOR_SHARE = 0.8
# Steps without drafts after which a record has lost two thirds of its weight.
FORGOTTEN_STEPS = 4000

_CELLS = 64  # cells of score logits
_CENTRES_X = (torch.arange(_CELLS).double() + 0.5) * (2 * MAX_LOGIT / _CELLS) - MAX_LOGIT
_FEATURES_X2 = torch.stack((_CENTRES_X, torch.ones_like(_CENTRES_X)), 1)
_NEWTON_STEPS, _MIN_STEP = 8, 1e-4


@dataclass(frozen=True, slots=True)
class _Seen:
    """One tree that a step verified: the arguments of `TreeRecord.saw`, with depths for parents."""

    scores: Sequence[float]
    depths: list[int]
    path: list[int]
    verified: int
    worths: Sequence[float] | None
    cells: Sequence[int] | None


class CopyRates:
    """How often a copied token passes where its parent does, for each cell, by the latest copies.

    Args:
        rates: the rate of each cell, changed in place.
    """

    def __init__(self, rates: list[float]) -> None:
        self.rates = rates
        self._tried = [0.0] * len(rates)
        self._passed = [0.0] * len(rates)

    def add(
        self, parents: Sequence[int], cells: Sequence[int], path: Sequence[int], verified: int
    ) -> None:
        """Count the copies of one tree; arguments as in `TreeRecord.saw`."""
        reached = {0, *(node + 1 for node in path)}
        kept = LATEST_COPIES / (LATEST_COPIES + 1)
        for node, (parent, cell) in enumerate(zip(parents[:verified], cells, strict=False)):
            if cell != NO_COPY and parent in reached:
                self._tried[cell] = self._tried[cell] * kept + 1
                self._passed[cell] = self._passed[cell] * kept + (node + 1 in reached)
                prior = PRIOR_RATES[cell] * PRIOR_COPIES
                self.rates[cell] = (self._passed[cell] + prior) / (self._tried[cell] + PRIOR_COPIES)


@dataclass(slots=True)
class _Trees:
    """The latest trees of one greatest depth.

    Attributes:
        scores_RN, depths_RN: ring of trees; missing nodes are at depth 0.
        worths_RN: worth of copies; NaN for other nodes.
        count: number of all trees so far.
        weight: weight of the record in trees; it fades.
    """

    scores_RN: Tensor
    depths_RN: Tensor
    worths_RN: Tensor
    count: int = 0
    weight: float = 0.0

    def put(self, scores_SN: Tensor, depths_SN: Tensor, worths_SN: Tensor) -> None:
        """Add the trees of a step."""
        count = len(scores_SN)
        places_S = torch.arange(self.count, self.count + count) % LATEST_TREES
        self.scores_RN[places_S], self.depths_RN[places_S] = scores_SN, depths_SN
        self.worths_RN[places_S] = worths_SN
        self.count += count
        self.weight = self.weight * MAX_TREES / (MAX_TREES + count) + count


class TreeRecord:
    """The expected tokens of a sequence in a step at each number of nodes, by the latest trees.

    A tree of n nodes brings 1 + the sum of its nodes' survival. As many of the latest trees as run
    together share their nodes (`trees.growth.allocate_nodes`), so that n is the mean of each.
    Before there is a record a tree of n nodes counts as a chain of n drafts of a good head. Without
    new trees a record fades to that over thousands of steps. Steps of few nodes draft trees of less
    depth (`CandidateTrees.depth`), which tell little of larger ones: a size is judged by the latest
    trees of its own depth, scaled by the first nodes of the present trees.

    w and b of each depth are those of a logistic regression, by Newton's method, over the latest
    verified nodes of the depth. With few nodes they are like those of the depth before; depth 1
    starts from the head's own probabilities.

    Attributes:
        calibration: predicted and actual acceptance of nodes.
    """

    def __init__(self, shape: CandidateTrees) -> None:
        depth, nodes = shape.prediction_depth, shape.max_nodes
        self.calibration = Calibration()
        self._shape, self._depth, self._num_nodes = shape, depth, nodes
        self._survival = Survival.uncalibrated(depth, "cpu")
        self._shared: Survival | None = None
        self._rates = CopyRates(list(PRIOR_RATES))
        self._shared_rates_C: Tensor | None = None
        self._tried_DX, self._passed_DX = torch.zeros(2, depth, _CELLS, dtype=torch.float64)
        self._pending: list[_Seen] = []
        self._has_new = False  # whether this step has recorded trees
        self._num_steps = self._next_fit = 0
        self._num_resting = 0  # steps before trees are recorded again
        self._trees: dict[int, _Trees] = {}  # by their greatest depth
        self._latest = depth  # greatest depth of the trees that are verified next
        self._group = 1
        self._found: dict[int, float] = {}  # results of `tokens`
        self._curves: dict[int, list[float]] = {}  # results of `_curve`
        self._age = 0  # age of both, in steps

    def calibrates(
        self,
        survival: Survival | None,
        copy_rates: list[float] | None = None,
        copy_rates_C: Tensor | None = None,
    ) -> None:
        """Copy what is learnt from now on to where it decides about the nodes of steps.

        Args:
            survival: takes the fitted w and b.
            copy_rates, copy_rates_C: take the rate of each cell, on the host and on the device;
                None where trees have no copies.
        """
        self._shared = survival
        self._rates = CopyRates(copy_rates or list(PRIOR_RATES))
        self._shared_rates_C = copy_rates_C

    @property
    def looks(self) -> bool:
        """Return whether `saw` may record another tree now."""
        return not self._num_resting and len(self._pending) < TREES_A_STEP

    def saw(
        self,
        scores: Sequence[float],
        parents: Sequence[int],
        path: Sequence[int],
        verified: int,
        worths: Sequence[float] | None = None,
        cells: Sequence[int] | None = None,
    ) -> None:
        """Record the tree of one sequence and its acceptance in this step; `add` ends the step.

        Args:
            scores, parents: scores and parents of the whole tree.
            path: the accepted nodes.
            verified: number of verified nodes, the first ones; may be 0.
            worths, cells: worth and cell of each node where copies may have joined the tree
                (`kernels.trees.copies`).
        """
        depths = row_depths(parents)[1:]
        self._pending.append(_Seen(scores, depths, [*path], verified, worths, cells))
        if cells is not None:
            self._rates.add(parents, cells, path, verified)
        self._has_new = True

    def add(self, k: int, accepted: Sequence[int]) -> None:
        """Count a step, and learn from the trees that it verified, which the step before drafted.

        Trees wait until there are enough to be worth the small operations, or the next ones have
        another depth.

        Args:
            k: nodes of the step for each sequence.
            accepted: accepted nodes of each sequence that ran.
        """
        before = self._group, self._latest
        count = min(len(accepted), LATEST_TREES)
        # The group keeps its size while some sequences join, whose first step has no drafts.
        if count and not self._group // 2 < count < 2 * self._group:
            self._group = 1 << (count.bit_length() - 1)
        for trees in self._trees.values():
            trees.weight *= 1 - 1 / FORGOTTEN_STEPS
        drafted, next_depth = self._latest, self._shape.depth(k)
        self._num_steps += self._has_new
        self._has_new = False
        self._num_resting = max(0, self._num_resting - 1)
        if self._pending and (len(self._pending) >= TREES_A_STEP or next_depth != drafted):
            self._learn(drafted)
            if self._trees[drafted].count >= LATEST_TREES:
                self._num_resting = LEARN_STEPS - max(1, TREES_A_STEP // self._group)
        if next_depth:
            self._latest = next_depth
        self._age += 1
        is_known = drafted in self._trees and self._trees[drafted].count >= LATEST_TREES
        most = HELD_STEPS if is_known else FIRST_HELD_STEPS
        if self._age >= most or before != (self._group, self._latest):
            self._age = 0
            self._found.clear()
            self._curves.clear()

    def _learn(self, depth: int) -> None:
        """Learn from the waiting trees, which were drafted up to `depth`."""
        seen, nodes = self._pending, self._num_nodes

        def padded(rows: Iterable[Sequence[float]], filling: float) -> Tensor:
            return torch.tensor([[*row, *[filling] * (nodes - len(row))] for row in rows])

        scores_SN = padded((one.scores for one in seen), 0.0)
        depths_SN = padded((one.depths for one in seen), 0)
        cells_SN = padded((one.cells or () for one in seen), NO_COPY)
        worths_SN = padded((one.worths or () for one in seen), torch.nan)
        verified_S = torch.tensor([one.verified for one in seen])
        passed_SN = torch.zeros(len(seen), nodes, dtype=torch.bool)
        for tree, one in enumerate(seen):
            passed_SN[tree, one.path] = True
        seen.clear()
        # The head says nothing of a node that only the text has.
        is_seen_SN = torch.arange(nodes) < verified_S.unsqueeze(1)
        is_seen_SN &= (cells_SN == NO_COPY) | (cells_SN >= NUM_LENGTHS)
        self._count(scores_SN[is_seen_SN], depths_SN[is_seen_SN], passed_SN[is_seen_SN])
        if depth not in self._trees:
            empty_RN = torch.zeros(LATEST_TREES, nodes)
            self._trees[depth] = _Trees(empty_RN, empty_RN.long(), empty_RN.clone())
        worths_SN = worths_SN.where(cells_SN != NO_COPY, torch.nan)
        self._trees[depth].put(scores_SN, depths_SN, worths_SN)
        if self._num_steps >= self._next_fit:
            self._next_fit = self._num_steps + min(self._num_steps, REFIT_STEPS)
            self._fit()

    def _count(self, scores_X: Tensor, depths_X: Tensor, passed_X: Tensor) -> None:
        """Count nodes by depth and score, and their predicted survival."""
        logits_X = score_logits(scores_X)
        cell_X = (logits_X + MAX_LOGIT) * (_CELLS / (2 * MAX_LOGIT))
        at_X = (depths_X - 1) * _CELLS + cell_X.long().clamp_max(_CELLS - 1)
        new_DX, new_passed_DX = (
            torch.bincount(at_X, weights, self._depth * _CELLS).view(-1, _CELLS)
            for weights in (torch.ones_like(scores_X, dtype=torch.float64), passed_X.double())
        )
        kept_D1 = LATEST_NODES / (LATEST_NODES + new_DX.sum(1, keepdim=True))
        self._tried_DX.mul_(kept_D1).add_(new_DX)
        self._passed_DX.mul_(kept_D1).add_(new_passed_DX)
        survival_X = self._survival(scores_X.unsqueeze(0), depths_X.unsqueeze(0))[0].double()
        bins = NUM_CALIBRATION_BINS
        bin_X = (survival_X * bins).long().clamp_max(bins - 1)
        sums = (torch.ones_like(survival_X), survival_X, passed_X.double())
        self.calibration.add(Calibration(*(torch.bincount(bin_X, x, bins).tolist() for x in sums)))

    def _fit(self) -> None:
        """Fit w and b of each depth to the counts."""
        weights_2, fitted = torch.tensor([1.0, 0.0], dtype=torch.float64), list[Tensor]()
        for tried_X, passed_X in zip(self._tried_DX, self._passed_DX, strict=True):
            weights_2 = fit_logistic(tried_X, passed_X, weights_2)
            fitted.append(weights_2)
        weights_D2 = torch.stack(fitted).float()
        self._survival.weights_D2.copy_(weights_D2)
        if self._shared is not None:
            shared_D2 = self._shared.weights_D2
            shared_D2.copy_(upload(weights_D2, shared_D2.device))
        if (rates_C := self._shared_rates_C) is not None and rates_C.is_cuda:
            rates_C.copy_(upload(torch.tensor(self._rates.rates), rates_C.device))

    def tokens(self, k: int) -> float:
        """Return the expected tokens of a sequence in a step that verifies k nodes of each."""
        if k not in self._found:
            self._found[k] = self._tokens(k)
        return self._found[k]

    def _tokens(self, k: int) -> float:
        prior, wanted = sum(PRIOR_SHARE**i for i in range(1, k + 1)), self._shape.depth(k)
        if not self._trees:
            return 1 + prior
        depth = min(self._trees, key=lambda known: (known < wanted, abs(known - wanted)))
        trees, latest = self._trees[depth], self._latest
        found = self._curve(depth)[k]
        if latest != depth and latest in self._trees:
            found = min(found * self._curve(latest)[1] / self._curve(depth)[1], k)
        return 1 + (found * trees.weight + prior * PRIOR_TREES) / (trees.weight + PRIOR_TREES)

    def _curve(self, depth: int) -> list[float]:
        """Return the expected sum of survival of n nodes a tree, for n from 0 to N, at a depth."""
        if depth not in self._curves:
            self._curves[depth] = self._make_curve(self._trees[depth])
        return self._curves[depth]

    def _make_curve(self, trees: _Trees) -> list[float]:
        known = min(trees.count, LATEST_TREES)
        group = 1 << (min(self._group, known).bit_length() - 1)
        known -= known % group
        depths_RN = trees.depths_RN[:known]
        survival_RN = self._survival(trees.scores_RN[:known], depths_RN) * (depths_RN > 0)
        worths_RN = trees.worths_RN[:known]
        survival_RN = torch.where(worths_RN.isnan(), survival_RN, worths_RN)
        worth_GX, survival_GX = (
            x.reshape(-1, group * self._num_nodes)
            for x in (survival_RN.cummin(1).values, survival_RN)
        )
        order_GX = worth_GX.sort(descending=True, stable=True).indices
        sums_X = survival_GX.gather(1, order_GX).cumsum(1).mean(0) / group
        return [0.0, *sums_X[group - 1 :: group].tolist()]


def fit_logistic(tried_X: Tensor, passed_X: Tensor, prior_2: Tensor) -> Tensor:
    """Return the w and b for which sigmoid(w x + b) best predicts the accepted nodes, [2].

    They minimise

        - sum_x (passed log p + (tried - passed) log(1 - p)) + PRIOR_NODES / 2 |(w, b) - prior|^2

    by Newton's method; a step that would not lower the loss is halved.

    Args:
        tried_X, passed_X: number of nodes in each cell of score logits, and of accepted ones.
    """

    tried, passed, prior = tried_X.numpy(), passed_X.numpy(), prior_2.numpy()
    features = _FEATURES_X2.numpy()

    def loss_at(weights: np.ndarray) -> float:
        z = features @ weights
        missed = tried @ np.logaddexp(0, z) - passed @ z
        return float(missed + PRIOR_NODES / 2 * np.square(weights - prior).sum())

    weights, loss = prior, loss_at(prior)
    for _ in range(_NEWTON_STEPS):
        p = 0.5 + 0.5 * np.tanh(features @ weights / 2)
        slope = features.T @ (tried * p - passed) + PRIOR_NODES * (weights - prior)
        curvature = (features.T * (tried * p * (1 - p))) @ features + PRIOR_NODES * np.eye(2)
        step = np.linalg.solve(curvature, slope)
        while (found := loss_at(weights - step)) > loss and np.abs(step).max() > _MIN_STEP:
            step = step / 2
        if found >= loss:
            break
        weights, loss = weights - step, found
    return torch.from_numpy(weights)
