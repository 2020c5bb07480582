"""Target features that the drafter has not read yet, while a sequence does not draft.

Shapes: N features, A * H their width, S sequences, C positions of a ring.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from peagle.engine.feature_ring import FeatureRing

if TYPE_CHECKING:
    from peagle.engine.sequence import Sequence

FEATURES_KEPT = 256


class FeatureRings:
    """The rings of an engine's sequences.

    Each has memory of its own, made when it is needed; where captured steps write features, all lie
    in one tensor that is there from the start.

    Attributes:
        rows_SCA: that tensor, with one more ring at the end for what nobody wants; or None.
    """

    def __init__(self) -> None:
        self.rows_SCA: Tensor | None = None
        self._free: list[int] = []
        self._slots: dict[int, int] = {}

    def reserve(self, num_seqs: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        """Make the one tensor, for so many sequences at a time."""
        shape = (num_seqs + 1, FEATURES_KEPT, width)
        self.rows_SCA = torch.zeros(shape, dtype=dtype, device=device)
        self._free = list(range(num_seqs))

    def open(self, sequence: Sequence, position: int, like_NA: Tensor | None = None) -> FeatureRing:
        """The sequence's ring; a new one begins at `position`.

        Args:
            sequence: whose features.
            position: of the next feature.
            like_NA: features of the right width, type and device; None after `reserve`.
        """
        ring = sequence.pending_features
        if ring is None:
            if self.rows_SCA is not None:
                slot = self._slots[sequence.seq_id] = self._free.pop()
                ring = FeatureRing(self.rows_SCA[slot], position, slot)
            else:
                assert like_NA is not None
                ring = FeatureRing(like_NA.new_empty(FEATURES_KEPT, like_NA.shape[1]), position)
            sequence.pending_features = ring
        return ring

    def release(self, sequence: Sequence) -> None:
        """Give up the sequence's ring, if it has one."""
        sequence.pending_features = None
        slot = self._slots.pop(sequence.seq_id, None)
        if slot is not None:
            self._free.append(slot)
