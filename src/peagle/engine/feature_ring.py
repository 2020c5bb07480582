"""The features of a sequence's last positions, in a ring.

Shapes: N features, A * H their width, C positions of a ring.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
