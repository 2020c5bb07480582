"""The rows of one captured decode step: what is known of its sequences, on the device.

Shapes: B rows of a step, one a sequence; K most drafts of a sequence; N nodes of a tree; M blocks a
sequence; L most tokens of a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from peagle.kernels.drafts.step_state import DecodeLimits, DecodeState
from peagle.kernels.sampling.rejection_triton import DraftProbs
from peagle.kernels.sampling.verify_triton import SequenceSampling, SyntheticAcceptance
from peagle.kernels.trees.copies_triton import CopyScratch


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """State of the rows of one step, parts of the buffers.

    Attributes:
        synthetic: acceptance set for measurements; None for the real one.
        drafts_BK: drafts that the next step verifies, or the whole trees of which it verifies some
            nodes; one column if K is 0.
        nodes_BX: `node_fields` numbers of each node of a tree: parent's row and score in units,
            with copies also worth in units and cell; undefined for chains.
        text_BL: tokens of each sequence, and at the end of the row its prediction, int32; None
            without copies.
        copy_scratch: buffers that find copies and join them to trees; None without them.
        draft_probs: q of these drafts; None if drafts are an argmax, or K is 0.
        block_tables_BM: KV blocks, int64.
        active_B: 1 for rows that are sequences, else 0; int64.
        context_starts_B: first drafter slot that attention may read.
        feature_slots_B: ring of `FeatureRings` that takes the features; NO_SLOT without one.
        draws_chain_B: 1 where drawn chains lead trees, else 0; int64.
        has_copies_B: 1 where copies of the text may be drafts, else 0; int64.
        num_predicted_B: tokens of the prediction; int64.
        which_B: number of each sequence's correction; int64.
    """

    state: DecodeState
    limits: DecodeLimits
    sampling: SequenceSampling
    synthetic: SyntheticAcceptance | None
    drafts_BK: Tensor
    nodes_BX: Tensor
    node_fields: int
    text_BL: Tensor | None
    copy_scratch: CopyScratch | None
    draft_probs: DraftProbs | None
    block_tables_BM: Tensor
    active_B: Tensor
    context_starts_B: Tensor
    feature_slots_B: Tensor
    draws_chain_B: Tensor
    has_copies_B: Tensor
    num_predicted_B: Tensor
    which_B: Tensor

    def nodes(self, field: int) -> Tensor:
        """Return one number of each node: parent's row, score, worth or cell."""
        return self.nodes_BX.tensor_split(self.node_fields, 1)[field]
