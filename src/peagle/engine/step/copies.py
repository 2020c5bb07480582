"""Copies of the text in the trees of a captured decode step.

Shapes: B rows of a step, one a sequence; L tokens of the longest text; N nodes of a tree.
"""

from __future__ import annotations

import torch
from torch import Tensor

from peagle.engine.step.decode_rows import DecodeRows
from peagle.kernels.trees.copies import SEARCHED_ROWS, SHORTEST_MATCH
from peagle.kernels.trees.copies_triton import CopyScratch, JoinedTrees, join_found_copies
from peagle.kernels.trees.survival import SCORE_UNIT
from peagle.speculation.proposers import HeadProposer


class DecodeCopies:
    """Joins what a step's texts have to the trees of its rows.

    Args:
        rows: the step's; they have texts.
        proposer: the head, with what is known of its nodes and of copies.
        max_nodes: N.

    Attributes:
        worths_BN: worth of each node that the next step may verify, in units.
    """

    def __init__(self, rows: DecodeRows, proposer: HeadProposer, max_nodes: int) -> None:
        assert rows.text_BL is not None and proposer.survival is not None
        device, num_seqs = rows.text_BL.device, len(rows.text_BL)
        self._text_BL, self._state = rows.text_BL, rows.state
        self._weights_D2, self._rates_C = proposer.survival.weights_D2, proposer.copy_rates_C
        self.worths_BN, self._cells_BN = rows.nodes(2), rows.nodes(3)
        rows_searched = min(SEARCHED_ROWS, max_nodes + 1)
        self._scratch = CopyScratch.allocate(num_seqs, max_nodes, rows_searched, device)
        self._joined = JoinedTrees.allocate(num_seqs, max_nodes, device)
        self._room_B = torch.full((num_seqs,), max_nodes, dtype=torch.int64, device=device)

    def join(
        self, tokens_BN: Tensor, parents_BN: Tensor, scores_BN: Tensor, num_nodes_B: Tensor
    ) -> JoinedTrees:
        """Return the trees with their copies, until the next call; keep worths and cells."""
        joined = self._joined
        join_found_copies(
            self._text_BL,
            self._state.first_positions_B + 1,
            tokens_BN.contiguous(),
            parents_BN,
            scores_BN,
            num_nodes_B,
            self._room_B,
            self._weights_D2,
            self._rates_C,
            self._scratch,
            joined,
            shortest=SHORTEST_MATCH,
        )
        self.worths_BN.copy_((joined.worths_BN / SCORE_UNIT).round().long())
        self._cells_BN.copy_(joined.cells_BN)
        return joined
