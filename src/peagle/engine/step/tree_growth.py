"""Growth of the candidate trees of a captured decode step.

Shapes: B rows of a step, one a sequence; K slots; V draft vocabulary; W width of a correction, or
children of a node; N nodes of a tree; R nodes of beams; C candidates of a node.
"""

import torch
from torch import Tensor

from peagle.config import CandidateTrees
from peagle.kernels.trees.beams import Beam
from peagle.kernels.trees.beams_triton import BeamBuffers, extend_beams, rank_candidates
from peagle.kernels.trees.growth_triton import (
    CorrectionTerm,
    GrowthScratch,
    find_candidates,
    grow_trees,
)
from peagle.models.drafter import Drafter
from peagle.speculation.proposers import TREE_TEMPERATURE


class TreeGrowth:
    """Grows the trees of a step from the logits of its slots, as `HeadProposer.grow` does.

    Args:
        num_seqs, num_slots: B and K, slots of each sequence.
    """

    def __init__(
        self,
        drafter: Drafter,
        shape: CandidateTrees,
        num_seqs: int,
        num_slots: int,
        device: torch.device,
    ) -> None:
        vocab_size, nodes = drafter.config.draft_vocab_size, shape.max_nodes
        self._drafter, self._shape = drafter, shape
        sizes = num_seqs, num_slots, nodes, vocab_size
        self._scratch = GrowthScratch.allocate(*sizes, device)
        self._tokens_BN, self._parents_BN = torch.zeros(
            (2, num_seqs, nodes), dtype=torch.int64, device=device
        )
        self._scores_BN = torch.zeros(num_seqs, nodes, device=device)

    def __call__(
        self,
        logits_BKV: Tensor,
        states_BKW: Tensor | None,
        depths_B: Tensor,
        which_B: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return token, parent row and score of each node, [B, N], until the next call."""
        drafter, shape, term = self._drafter, self._shape, None
        correction = drafter.correction
        if correction is not None and states_BKW is not None:
            term = CorrectionTerm(states_BKW, *correction.weights, drafter.d2t, which_B)
        grow_trees(
            logits_BKV,
            depths_B,
            term,
            self._scratch,
            self._tokens_BN,
            self._parents_BN,
            self._scores_BN,
            num_parallel_trees=shape.num_parallel_trees,
            temperature=TREE_TEMPERATURE,
        )
        return drafter.to_target_ids(self._tokens_BN), self._parents_BN, self._scores_BN


class BeamGrowth:
    """Grows the trees of a step with beams, as `BeamTrees` does.

    Args:
        num_seqs, depth: B, and the greatest depth of a tree.
    """

    def __init__(
        self,
        drafter: Drafter,
        shape: CandidateTrees,
        num_seqs: int,
        depth: int,
        device: torch.device,
    ) -> None:
        vocab_size = drafter.config.draft_vocab_size
        beam = min(shape.num_parallel_trees, vocab_size)
        self._scratch = GrowthScratch.allocate(num_seqs * beam, 1, 1, vocab_size, device)
        self._buffers = BeamBuffers.allocate(num_seqs, beam, depth, shape.max_nodes, device)
        self._depth = 0

    def start(self, logits_BV: Tensor) -> Beam:
        """Return the beam of depth 1, from the logits behind the newest tokens."""
        self._depth = 0
        return self._extend(logits_BV)

    def extend(self, logits_BWV: Tensor) -> Beam:
        """Return the next beam, from the logits behind the nodes of the last one."""
        self._depth += 1
        return self._extend(logits_BWV.flatten(0, 1))

    def best(self, depths_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return token, parent row and score of each node, until the next call."""
        return rank_candidates(self._buffers, depths_B)

    def _extend(self, logits_RV: Tensor) -> Beam:
        found = self._scratch.first(len(logits_RV))
        find_candidates(logits_RV.unsqueeze(1), found, TREE_TEMPERATURE)
        return extend_beams(found, self._buffers, self._depth)
