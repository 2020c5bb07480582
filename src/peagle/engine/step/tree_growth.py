"""Growth of the candidate trees of a captured decode step.

Shapes: B rows of a step, one a sequence; K slots; V draft vocabulary; W width of a correction, or
children of a node; N nodes of a tree; R nodes of beams; C candidates of a node.
"""

import torch
from torch import Tensor

from peagle.config import CandidateTrees
from peagle.kernels.trees.growth import best_first_trees
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
        self._paths_BJW = None
        if (term := drafter.correction) is not None and term.decay_W is not None:
            rows = self._scratch.scores_BJC.shape[1]
            self._paths_BJW = torch.zeros((num_seqs, rows, len(term.decay_W)), device=device)

    def __call__(
        self, logits_BKV: Tensor, states_BKW: Tensor | None, depths_B: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return token, parent row and score of each node, [B, N], until the next call."""
        drafter, shape, term = self._drafter, self._shape, None
        correction = drafter.correction
        if correction is not None and states_BKW is not None and not correction.has_kernels:
            ids = drafter.target_ids()
            tokens_BN, parents_BN, scores_BN = best_first_trees(
                logits_BKV,
                depths_B,
                num_parallel_trees=shape.num_parallel_trees,
                max_nodes=shape.max_nodes,
                temperature=TREE_TEMPERATURE,
                children=correction.tree_children(logits_BKV, states_BKW, ids, TREE_TEMPERATURE),
            )
            return drafter.to_target_ids(tokens_BN), parents_BN, scores_BN
        if correction is not None and states_BKW is not None:
            weights = correction.tokens_VW, correction.down_rW, correction.weight_Vr
            paths = correction.decay_W, self._paths_BJW
            term = CorrectionTerm(states_BKW, *weights, drafter.d2t, *paths)
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


class BeamSearch:
    """Finds the children of the nodes of beams (`kernels.trees.beams.Find`).

    Args:
        num_rows: most nodes of the beams of all sequences.
    """

    def __init__(self, drafter: Drafter, num_rows: int) -> None:
        device = drafter.norm.weight.device
        sizes = num_rows, 1, 1, drafter.config.draft_vocab_size
        self._scratch = GrowthScratch.allocate(*sizes, device)

    def __call__(self, logits_RV: Tensor, count: int, temperature: float) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and ids of the likeliest tokens of each row, both [R, W]."""
        found = self._scratch.first(len(logits_RV))
        find_candidates(logits_RV.unsqueeze(1), found, temperature)
        of_best_R = found.logits_RC.logsumexp(-1)
        total_R1 = torch.logaddexp(of_best_R, found.others_R).unsqueeze(1)
        best = (found.logits_RC - total_R1).nan_to_num(-torch.inf).topk(count, -1)
        return best.values, found.tokens_RC.gather(1, best.indices).long()
