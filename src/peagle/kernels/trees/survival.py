"""How probable it is that a node of a candidate tree is accepted, by the score of its path.

A head's probability of a path ranks paths well and says little about how often they pass: heads are
too sure or not sure enough, and the scores of trees are sharpened. Let s be the score of a path of
d nodes (`kernels.trees.growth.best_first_trees`). Then

    x = log(e^s / (1 - e^s)),    P(all d nodes are accepted) = sigmoid(w_d x + b_d).

With w = 1 and b = 0 that is e^s, the head's own probability. w and b need no trained output:
`engine.tree_record` fits them to the tokens that are accepted.

Shapes: B sequences, N nodes of a tree, D most nodes on a path.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

# Scores cross to the host and back as whole numbers of these units, none below the least one.
SCORE_UNIT = 2.0**-16
MIN_SCORE = -1e4
DRAWN_SCORE = 1.0  # of the nodes of a drawn chain; all others have 0 or less
SURELY_VERIFIED = 2.0  # more than any probability: drawn chains take their share first
MAX_LOGIT = 8.0  # |x| is at most that: probabilities from 0.0003 to 0.9997


def score_logits(scores: Tensor) -> Tensor:
    """Return x of scores, from -MAX_LOGIT to MAX_LOGIT; scores are 0 or less.

    A score that is not a number is the least one.
    """
    scores = scores.nan_to_num(-torch.inf).clamp(-MAX_LOGIT - 1, -1e-9)
    return (scores - torch.log(-torch.expm1(scores))).clamp(-MAX_LOGIT, MAX_LOGIT)


@dataclass(frozen=True, slots=True)
class Survival:
    """The calibrated survival of nodes.

    Attributes:
        weights_D2: w and b of each depth, depth 1 first; changed in place.
    """

    weights_D2: Tensor

    @classmethod
    def uncalibrated(cls, depth: int, device: torch.device | str) -> Self:
        """Return the head's own probabilities for trees of so many depths."""
        return cls(torch.tensor([1.0, 0.0], device=device).repeat(depth, 1))

    def __call__(self, scores_BN: Tensor, depths_BN: Tensor) -> Tensor:
        """Return the probability that a node is accepted, float32 [B, N].

        How many drafts of a drawn chain are verified must not depend on drafts: each of them has
        SURELY_VERIFIED.

        Args:
            scores_BN: scores of the nodes' paths, DRAWN_SCORE of drawn drafts.
            depths_BN: int64, nodes on these paths; beyond D the deepest weights count.
        """
        slopes_BN, offsets_BN = self.weights_D2[
            (depths_BN - 1).clamp(0, len(self.weights_D2) - 1)
        ].unbind(-1)
        survival_BN = torch.sigmoid(slopes_BN * score_logits(scores_BN) + offsets_BN)
        return torch.where(scores_BN > 0, SURELY_VERIFIED, survival_BN)
