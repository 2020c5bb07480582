"""Candidate trees in a captured decode step.

The rows of a sequence are a tree until the step has verified them. Then the rows of the accepted
path come first, and the rest of the step sees a chain. `ModelRunner.run` does the same over exact
sizes. The trees share the rows of the step: the step itself chooses the nodes that it verifies, out
of all that were drafted (`allocate_nodes`). Drafts are deterministic, so this changes no output.

Chains of drawn drafts lead the trees of some sequences (`kernels.trees.chains`). Rejection sampling
decides how many of these pass, and the number of verified ones depends on no draft. Steps in which
no sequence draws do nothing of this.

Shapes: B rows of a step, one a sequence; T target rows; N nodes of a tree, J = N + 1; D most nodes
on a path; C drafts of a chain.
"""

import torch
from torch import Tensor

from peagle.config import CandidateTrees
from peagle.engine.model_runner import cached_bytes
from peagle.engine.step.copies import DecodeCopies
from peagle.engine.step.decode_rows import DecodeRows
from peagle.kernels.attention.kv_moves import SlotMoves
from peagle.kernels.drafts.batches import TargetBatch
from peagle.kernels.paths import TreePaths
from peagle.kernels.trees.chains_triton import merge_chains
from peagle.kernels.trees.growth import allocate_nodes
from peagle.kernels.trees.paths_triton import Descent, descend, place_rows
from peagle.kernels.trees.survival import MIN_SCORE, SCORE_UNIT
from peagle.models.target import TargetModel
from peagle.speculation.proposers import HeadProposer


class DecodeTrees:
    """The trees of a step's rows.

    Args:
        batch, rows, running_B, num_accepted_B: the step's.
        target: the target, whose KV caches hold the rows.
        proposer: the head that drafts the trees.
        depth: D, most nodes on a path.
        max_model_len: no node has a slot from here on.

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
        rows: DecodeRows,
        running_B: Tensor,
        num_accepted_B: Tensor,
        target: TargetModel,
        proposer: HeadProposer,
        *,
        depth: int,
        max_model_len: int,
    ) -> None:
        assert proposer.survival is not None, "the head drafts trees"
        device = running_B.device
        self._batch, self._state, self._running_B = batch, rows.state, running_B
        self._drafts_BN, self._parents_BN, self._scores_BN = (
            rows.drafts_BK,
            rows.nodes(0),
            rows.nodes(1),
        )
        self._survival, self._max_depth = proposer.survival, proposer.max_depth
        self._draws_B, self._nodes_BX = rows.draws_chain_B, rows.nodes_BX
        self._max_model_len, self._depth = max_model_len, depth
        self._move = SlotMoves(cached_bytes(target))
        self._columns_N = torch.arange(shape.max_nodes, device=device)
        self._descent = Descent.allocate(num_accepted_B, depth, len(batch.tokens_R))
        self.rows_X, self.path_BD = self._descent.rows_X, self._descent.path_BD
        self.visible_T, self.depths_T = (torch.zeros_like(batch.tokens_R) for _ in range(2))
        sizes = [proposer.count_nodes(k) for k in range(shape.prediction_depth + 1)]
        self._num_nodes_K = torch.tensor(sizes, device=device)
        self._copies = None
        if rows.text_BL is not None:
            self._copies = DecodeCopies(rows, proposer, self._num_nodes_K, max_model_len)

    def allocate_nodes(self) -> None:
        """Choose the nodes of each running sequence's tree that the rows of the step verify.

        One row of each sequence is for its newest token; all other rows take the most probable
        nodes of all trees, and before these the drafts of drawn chains.
        """
        num_nodes_B = self._state.num_draft_tokens_B
        num_nodes_B.mul_(self._running_B)
        budget = len(self._batch.tokens_R) - len(num_nodes_B)
        if budget < self._scores_BN.numel():
            if self._copies is not None:
                survival_BN = self._copies.worths_BN * SCORE_UNIT
            else:
                paths = TreePaths.of(self._parents_BN, self._depth)
                survival_BN = self._survival(self._scores_BN * SCORE_UNIT, paths.depths_BJ[:, 1:])
            num_nodes_B.copy_(allocate_nodes(survival_BN, num_nodes_B, budget))

    def place_rows(self) -> None:
        """Set the positions of the batch's rows by the depths of their nodes."""
        first_B = self._state.first_positions_B
        place_rows(self._parents_BN, first_B, self._batch, self.visible_T, self.depths_T)

    def paths_of(self, rows_M: Tensor, at_MJ: Tensor) -> TreePaths:
        """Return the paths of the trees of some rows, between `place_rows` and `descend`.

        Args:
            at_MJ: rows of the batch that hold these trees; entries beyond the end of a tree are
                ignored.
        """
        parents_MN = self._parents_BN[rows_M]
        return TreePaths(parents_MN, self.visible_T[at_MJ], self.depths_T[at_MJ], self._depth)

    def num_drawn(self) -> Tensor:
        """Return how many of the verified nodes of each sequence are a drawn chain, int64 [B]."""
        return torch.minimum((self._scores_BN > 0).sum(1), self._state.num_draft_tokens_B)

    def descend(self, tokens_T: Tensor, *, draws: bool) -> None:
        """Accept a path of each sequence; move its rows, keys and values to those of a chain.

        Args:
            tokens_T: the target's own token of each row, behind the drafts of a drawn chain that
                pass the one that rejection sampling emits; they move too.
            draws: whether drawn chains lead some trees.
        """
        found, num_nodes_B = self._descent, self._state.num_draft_tokens_B
        if draws:
            self._pass_drawn(tokens_T)
        drafts = self._drafts_BN, self._parents_BN, num_nodes_B
        descend(tokens_T, *drafts, self._running_B, self._batch, found)
        self._move(found.from_BD, found.to_BD)

    def _pass_drawn(self, tokens_T: Tensor) -> None:
        """Replace the own tokens of rows by the drafts of drawn chains that passed."""
        num_passed_B = torch.where(self._running_B != 0, self._descent.num_accepted_B, 0)
        passes_BN = self._columns_N < num_passed_B.unsqueeze(1)
        at_BN = self._batch.query_start_loc[:-1].unsqueeze(1) + self._columns_N
        at_BN = at_BN.clamp_max(len(tokens_T) - 1)
        change_BN = torch.where(passes_BN, self._drafts_BN - tokens_T[at_BN], 0)
        tokens_T.index_add_(0, at_BN.flatten(), change_BN.flatten())

    @property
    def _num_slots_B(self) -> Tensor:
        """Return how many drafts of each sequence have KV slots."""
        return (self._max_model_len - 1 - self._state.first_positions_B).clamp_min(0)

    def limit_depths(self) -> None:
        """Make the next trees no deeper than the head finds KV slots for."""
        depths_B = self._state.num_draft_tokens_B
        depths_B.copy_(torch.minimum(depths_B, self._max_depth(self._num_slots_B)))

    def write_trees(
        self,
        tokens_BN: Tensor,
        parents_BN: Tensor,
        scores_BN: Tensor,
        chains_BC: Tensor | None = None,
    ) -> None:
        """Write the trees that the next step may verify, as many nodes as have KV slots.

        The state has K of each sequence, and gets the number of its nodes.

        Args:
            chains_BC: drawn chains that lead the trees of sequences that draw; None if no sequence
                does.
        """
        state = self._state
        depths_B = state.num_draft_tokens_B
        if chains_BC is not None:
            depths_B = depths_B.clone()
        if self._copies is not None:
            self._copies.write_trees(tokens_BN, parents_BN, scores_BN)
        else:
            num_nodes_B = torch.minimum(self._num_nodes_K[depths_B], self._num_slots_B)
            state.num_draft_tokens_B.copy_(num_nodes_B)
            is_node_BN = self._columns_N < num_nodes_B.unsqueeze(1)
            self._drafts_BN.copy_(torch.where(is_node_BN, tokens_BN, 0))
            self._parents_BN.copy_(torch.where(is_node_BN, parents_BN, 0))
            units_BN = (scores_BN.clamp_min(MIN_SCORE) / SCORE_UNIT).round().long()
            self._scores_BN.copy_(torch.where(is_node_BN, units_BN, 0))
        if chains_BC is not None:
            merge_chains(
                chains_BC,
                depths_B,
                self._draws_B,
                state.first_positions_B,
                state.num_draft_tokens_B,
                self._drafts_BN,
                self._nodes_BX,
                max_model_len=self._max_model_len,
            )
