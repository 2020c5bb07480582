"""Target features that the drafter has not read yet, while a sequence does not draft."""

from __future__ import annotations

import torch
from torch import Tensor


class FeatureRing:
    """The features of the last positions, at most `capacity` of them.

    The feature of position p lies in row p % capacity. Positions are put in order and without
    gaps.

    Args:
        capacity: positions that fit.
        position: of the first feature that will be put.
        like_NA: features of the right width, type and device.

    Attributes:
        first, end: the ring holds the positions from `first` to before `end`.
    """

    def __init__(self, capacity: int, position: int, like_NA: Tensor) -> None:
        self.capacity = capacity
        self.first = self.end = position
        self._rows = like_NA.new_empty(capacity, like_NA.shape[1])

    def put(self, features_NA: Tensor) -> None:
        """Add the features of the next positions; the oldest give way."""
        num_new = features_NA.shape[0]
        self.end += num_new
        self.first = max(self.first, self.end - self.capacity)
        kept_NA = features_NA[max(0, num_new - self.capacity) :]
        self._rows[self._index(self.end - kept_NA.shape[0], self.end)] = kept_NA

    def get(self) -> Tensor:
        """The features from `first` to before `end`, [end - first, A * H]."""
        return self._rows[self._index(self.first, self.end)]

    def _index(self, first: int, end: int) -> Tensor:
        return torch.arange(first, end, device=self._rows.device) % self.capacity
