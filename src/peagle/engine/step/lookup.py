"""Prompt lookup in a captured decode step; `speculation.PromptLookup` is the reference."""

from __future__ import annotations

from typing import NamedTuple

import torch

from peagle.engine.step.decode_rows import DecodeRows
from peagle.kernels.trees.copies_triton import HeadTrees, Texts, find_copies


class LookupSizes(NamedTuple):
    """Most drafts of a sequence; most and fewest tokens of a match."""

    k: int
    longest: int
    shortest: int


class DecodeLookup:
    """Drafts what stands behind the latest longest match in the text of each row of a step."""

    def __init__(self, rows: DecodeRows, sizes: LookupSizes) -> None:
        assert rows.text_BL is not None and rows.copy_scratch is not None
        self._rows, self._lengths, self._scratch = rows, sizes[1:], rows.copy_scratch
        self._text_BL, state = rows.text_BL, rows.state
        of_rows = state.first_positions_B, rows.has_copies_B, rows.num_predicted_B
        self._texts = Texts(rows.text_BL, *of_rows)
        # The trees have no nodes: only the end of the text is looked for.
        num_nodes_K = rows.drafts_BK.new_zeros(sizes.k + 1)
        node_B1 = torch.zeros_like(rows.drafts_BK[:, :1])
        self._roots = HeadTrees(node_B1, node_B1, node_B1, state.num_draft_tokens_B, num_nodes_K)
        self._columns_K = torch.arange(sizes.k, device=node_B1.device)

    def draft(self) -> None:
        """Write the drafts of each row; the state has K of each, and gets their number."""
        rows, state, found_BM = self._rows, self._rows.state, self._scratch.found_BM
        find_copies(self._texts, self._roots, self._scratch, self._lengths)
        found_B1, width = found_BM[:, :1], self._text_BL.shape[1]
        rank_B1 = found_B1 & 0xFFFFFFFF
        in_prediction_B1 = rank_B1 > width
        at_BK = torch.where(in_prediction_B1, 2 * width + 1 - rank_B1, rank_B1) + self._columns_K
        ends_B1 = torch.where(in_prediction_B1, width, state.first_positions_B.unsqueeze(1) + 1)
        is_draft_BK = (at_BK < ends_B1) & (found_B1 > 0)
        is_draft_BK &= self._columns_K < state.num_draft_tokens_B.unsqueeze(1)
        copied_BK = self._text_BL.gather(1, at_BK.clamp_max(width - 1))
        rows.drafts_BK.copy_(torch.where(is_draft_BK, copied_BK, 0))
        state.num_draft_tokens_B.copy_(is_draft_BK.sum(1))
        found_BM.zero_()
