"""Copies of the text in the trees of a captured decode step.

Shapes: B rows of a step, one a sequence; L tokens of the longest text; N nodes of a tree.
"""

from __future__ import annotations

from torch import Tensor

from peagle.engine.step.decode_rows import DecodeRows
from peagle.kernels.trees.copies_triton import (
    HeadTrees,
    JoinedTrees,
    Texts,
    join_found_copies,
)
from peagle.speculation.proposers import HeadProposer


class DecodeCopies:
    """Joins what a step's texts have to the trees of its rows.

    Args:
        rows: the step's; they have texts.
        proposer: the head, with what is known of its nodes and of copies.
        num_nodes_K: nodes of a tree of each depth.
        max_model_len: no node has a slot from here on.

    Attributes:
        worths_BN: worth of each node that the next step may verify, in units.
    """

    def __init__(
        self,
        rows: DecodeRows,
        proposer: HeadProposer,
        num_nodes_K: Tensor,
        max_model_len: int,
    ) -> None:
        assert rows.text_BL is not None and rows.copy_scratch is not None
        assert proposer.survival and proposer.lookup_lengths
        self._lengths = proposer.lookup_lengths
        self._state, self._num_nodes_K, self._max_model_len = rows.state, num_nodes_K, max_model_len
        self._weights_D2, self._rates_C = proposer.survival.weights_D2, proposer.copy_rates_C
        of_rows = rows.state.first_positions_B, rows.has_copies_B, rows.num_predicted_B
        self._texts = Texts(rows.text_BL, *of_rows)
        self._trees = JoinedTrees(rows.drafts_BK, *(rows.nodes(field) for field in range(4)))
        self.worths_BN = self._trees.worths_BN
        self._scratch = rows.copy_scratch

    def write_trees(self, tokens_BN: Tensor, parents_BN: Tensor, scores_BN: Tensor) -> None:
        """Write the trees with their copies into the rows.

        The state has K of each sequence, and gets the number of its nodes.
        """
        depths_B = self._state.num_draft_tokens_B
        join_found_copies(
            self._texts,
            HeadTrees(tokens_BN.contiguous(), parents_BN, scores_BN, depths_B, self._num_nodes_K),
            self._weights_D2,
            self._rates_C,
            self._scratch,
            self._trees,
            lengths=self._lengths,
            max_model_len=self._max_model_len,
        )
