"""Target features that the drafter has not read yet, while a sequence does not draft.

Shapes: N features, A * H their width, C positions of a ring, S sequences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from peagle.engine.sequence import Sequence

FEATURES_KEPT = 256
NO_SLOT = -1


class FeatureRing:
    """The features of the last positions, at most C of them.

    The feature of position p lies in row p % C. Positions are put in order and without gaps.

    Args:
        rows_CA: where the features lie.
        position: of the first feature that will be put.
        slot: which of a store's rings it is; NO_SLOT: its memory is its own.

    Attributes:
        first, end: the ring holds the positions from `first` to before `end`.
    """

    def __init__(self, rows_CA: Tensor, position: int, slot: int = NO_SLOT) -> None:
        self.slot = slot
        self.first = self.end = position
        self._rows_CA = rows_CA

    @property
    def capacity(self) -> int:
        """Positions that fit."""
        return self._rows_CA.shape[0]

    def put(self, features_NA: Tensor) -> None:
        """Add the features of the next positions; the oldest give way."""
        self.advance(features_NA.shape[0])
        kept_NA = features_NA[max(0, features_NA.shape[0] - self.capacity) :]
        self._rows_CA[self._index(self.end - kept_NA.shape[0], self.end)] = kept_NA

    def advance(self, num_new: int) -> None:
        """Count features of the next positions that the device has written by itself."""
        self.end += num_new
        self.first = max(self.first, self.end - self.capacity)

    def get(self) -> Tensor:
        """A copy of the features from `first` to before `end`, [end - first, A * H]."""
        return self._rows_CA[self._index(self.first, self.end)]

    def _index(self, first: int, end: int) -> Tensor:
        return torch.arange(first, end, device=self._rows_CA.device) % self.capacity


class FeatureStore:
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
            like_NA: features of the right width, type and device; None where the store is reserved.
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
