"""Candidate trees in a captured decode step.

The rows of a sequence are a tree until the step has verified them. Then those of the accepted path
come first, and the rest of the step sees a chain. `ModelRunner.run` is the same over exact sizes.

The trees share the rows of the step: which nodes it verifies, of all that were drafted, the step
itself decides (`share`). Drafts are deterministic, so this changes no output.

Shapes: B rows of a step, one a sequence; T target rows; N nodes of a tree, J = N + 1; D most nodes
on a path.
"""

from __future__ import annotations

import torch
from torch import Tensor

from peagle.config import CandidateTrees
from peagle.engine.model_runner import move_path
from peagle.kernels.batches import TargetBatch
from peagle.kernels.step_state import StepRecord, StepState
from peagle.kernels.survival import Survival
from peagle.kernels.trees import TreePaths, count_nodes, path_rows, share_nodes
from peagle.models.target import TargetModel

# Scores cross to the host and back as whole numbers of these units, none below the least one.
SCORE_UNIT = 2.0**-16
LEAST_SCORE = -1e4


class StepTrees:
    """The trees of a step's rows.

    Args:
        batch, state, drafts_BN, parents_BN, scores_BN, running_B: the step's.
        survival: how probable it is that a node is accepted.
        max_model_len: no node has a slot from here on.
        vocab_size: tokens from which the head drafts.

    Attributes:
        visible_T: which rows of its sequence a row sees, as `TreeMask`.
        depths_T: drafts before a row.
        rows_X: after `descend`, the row that stood where a row of the batch now stands, and T.
        path_BD: after `descend`, the accepted drafts.
    """

    def __init__(
        self,
        shape: CandidateTrees,
        batch: TargetBatch,
        state: StepState,
        drafts_BN: Tensor,
        parents_BN: Tensor,
        scores_BN: Tensor,
        running_B: Tensor,
        *,
        survival: Survival,
        max_model_len: int,
        vocab_size: int,
    ) -> None:
        device, depth = drafts_BN.device, shape.prediction_depth
        self._batch, self._state, self._running_B = batch, state, running_B
        self._drafts_BN, self._max_model_len = drafts_BN, max_model_len
        self._scores_BN, self._survival = scores_BN, survival
        self._columns_J = torch.arange(shape.max_nodes + 1, device=device)
        self.rows_X = torch.arange(len(batch.tokens_R) + 1, device=device)
        self._rows_T = self.rows_X[:-1].clone()
        num_seqs, num_nodes = drafts_BN.shape
        words_BJ, depths_BJ = self._rows_T.new_zeros(2, num_seqs, num_nodes + 1)
        self._paths = TreePaths(parents_BN, words_BJ, depths_BJ, depth)
        self.visible_T, self.depths_T = (torch.zeros_like(self._rows_T) for _ in range(2))
        self.path_BD = drafts_BN.new_zeros(num_seqs, depth)
        sizes = [
            count_nodes(k, shape.num_parallel_trees, shape.max_nodes, vocab_size)
            for k in range(depth + 1)
        ]
        self._num_nodes_K = torch.tensor(sizes, device=device)

    def share(self) -> None:
        """Leave each running sequence the nodes of its tree that the rows of the step verify.

        All rows take nodes, the most probable ones of all trees, but one for each sequence.
        """
        num_nodes_B, paths = self._state.num_drafts_B, self._follow_parents()
        num_nodes_B.mul_(self._running_B)
        budget = len(self._batch.tokens_R) - len(num_nodes_B)
        if budget < self._scores_BN.numel():
            survival_BN = self._survival(self._scores_BN * SCORE_UNIT, paths.depths_BJ[:, 1:])
            num_nodes_B.copy_(share_nodes(survival_BN, num_nodes_B, budget))

    def begin(self) -> None:
        """Put the rows of the batch at the positions of their depths."""
        found, batch, (sequences_T, offsets_T) = self._paths, self._batch, self._places()
        is_row_T = batch.sequences_R >= 0
        for rows_T, rows_BJ in (
            (self.visible_T, found.visible_BJ),
            (self.depths_T, found.depths_BJ),
        ):
            rows_T.copy_(torch.where(is_row_T, rows_BJ[sequences_T, offsets_T], 0))
        first_T = torch.where(is_row_T, self._state.first_positions_B[sequences_T], 0)
        torch.add(first_T, self.depths_T, out=batch.positions_R)

    def _follow_parents(self) -> TreePaths:
        """Keep the paths for the part of the step that verifies."""
        kept = self._paths
        found = TreePaths.of(kept.parents_BN, kept.depth)
        kept.visible_BJ.copy_(found.visible_BJ)
        kept.depths_BJ.copy_(found.depths_BJ)
        return kept

    def _places(self) -> tuple[Tensor, Tensor]:
        """Return the sequence of each row and its row there; any for padding."""
        sequences_T = self._batch.sequences_R.clamp_min(0)
        offsets_T = self._rows_T - self._batch.query_start_loc[sequences_T]
        return sequences_T, offsets_T.clamp_max(self._columns_J.shape[0] - 1)

    def descend(self, target: TargetModel, tokens_T: Tensor, out: StepRecord) -> None:
        """Accept a path of each sequence; put its rows and its keys and values where a chain's are.

        Args:
            tokens_T: the target's own token of each row; they move too.
            out: takes the number of accepted drafts.
        """
        batch, paths, drafts_BN = self._batch, self._paths, self._drafts_BN
        first_B = batch.query_start_loc[:-1]
        at_BJ = (first_B.unsqueeze(1) + self._columns_J).clamp_max(len(tokens_T) - 1)
        num_drafts_B = torch.where(self._running_B != 0, self._state.num_drafts_B, 0)
        reached_BJ = paths.reached(tokens_T[at_BJ], drafts_BN, num_drafts_B)
        order_BJ = path_rows(reached_BJ)
        torch.sub(reached_BJ.sum(-1), 1, out=out.num_accepted_B)
        move_path(target, batch, order_BJ, out.num_accepted_B, paths.depth)
        torch.gather(drafts_BN, 1, order_BJ[:, 1 : paths.depth + 1] - 1, out=self.path_BD)
        sequences_T, offsets_T = self._places()
        moved_T = first_B[sequences_T] + order_BJ[sequences_T, offsets_T]
        rows_T = self.rows_X[:-1]
        rows_T.copy_(torch.where(batch.sequences_R >= 0, moved_T, self._rows_T))
        for values_T in (batch.tokens_R, tokens_T):
            values_T.copy_(values_T[rows_T])

    def plant(self, tokens_BN: Tensor, parents_BN: Tensor, scores_BN: Tensor) -> None:
        """Take the trees that the next step may verify, as many nodes as have KV slots.

        The state has K of each sequence, and gets the number of its nodes.
        """
        state, kept = self._state, self._paths
        num_slots_B = (self._max_model_len - 1 - state.first_positions_B).clamp_min(0)
        num_nodes_B = torch.minimum(self._num_nodes_K[state.num_drafts_B], num_slots_B)
        state.num_drafts_B.copy_(num_nodes_B)
        is_node_BN = self._columns_J[:-1] < num_nodes_B.unsqueeze(1)
        self._drafts_BN.copy_(torch.where(is_node_BN, tokens_BN, 0))
        kept.parents_BN.copy_(torch.where(is_node_BN, parents_BN, 0))
        units_BN = (scores_BN.clamp_min(LEAST_SCORE) / SCORE_UNIT).round().long()
        self._scores_BN.copy_(torch.where(is_node_BN, units_BN, 0))
