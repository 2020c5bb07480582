"""Target features of sequences that do not draft at present, for the drafter to read later.

Shapes: N features, A * H their width, S sequences, C positions of a ring.
"""

import torch
from torch import Tensor

FEATURES_KEPT = 256
NO_SLOT = -1


class FeatureRing:
    """The features of a sequence's last positions, at most C of them.

    Row p % C holds the feature of position p. There are no gaps.

    Attributes:
        slot: index of the ring in `FeatureRings.rows_SCA`; NO_SLOT for a ring with its own memory.
        first, end: the ring holds the positions from `first` to before `end`.
    """

    def __init__(self, rows_CA: Tensor, position: int, slot: int = NO_SLOT) -> None:
        self.slot = slot
        self.first = self.end = position
        self.capacity = rows_CA.shape[0]
        self._rows_CA = rows_CA

    def put(self, features_NA: Tensor) -> None:
        """Add the features of the next positions, over the oldest ones.

        The row behind them stays unchanged: a step in flight may have written it.
        """
        most = self.capacity - 1
        self.end += features_NA.shape[0]
        self.first = max(self.first, self.end - most)
        kept_NA = features_NA[max(0, features_NA.shape[0] - most) :]
        self._rows_CA[self._index(self.end - kept_NA.shape[0], self.end)] = kept_NA

    def put_before(self, features_NA: Tensor) -> None:
        """Add the features of the positions before the first one, as far as there is room.

        The row behind the last position stays unchanged too.
        """
        room = max(0, self.capacity - 1 - (self.end - self.first))
        kept_NA = features_NA[max(0, features_NA.shape[0] - room) :]
        self._rows_CA[self._index(self.first - kept_NA.shape[0], self.first)] = kept_NA
        self.first -= kept_NA.shape[0]

    def advance(self, num_new: int) -> None:
        """Count the features of the next positions, which a captured step has written."""
        self.end += num_new
        self.first = max(self.first, self.end - self.capacity)

    def get(self) -> Tensor:
        """Return a copy of the features from `first` to before `end`, [end - first, A * H]."""
        return self._rows_CA[self._index(self.first, self.end)]

    def _index(self, first: int, end: int) -> Tensor:
        return torch.arange(first, end, device=self._rows_CA.device) % self.capacity


class FeatureRings:
    """The rings of an engine's sequences, by sequence id.

    A ring gets memory when it is opened. After `reserve`, which captured steps need, all rings lie
    in one tensor.

    Attributes:
        rows_SCA: the tensor of all rings, with one more for padding; None before `reserve`.
    """

    def __init__(self) -> None:
        self.rows_SCA: Tensor | None = None
        self._free: list[int] = []
        self._slots: dict[int, int] = {}

    def reserve(self, num_seqs: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate the rings of `num_seqs` sequences in one tensor."""
        shape = (num_seqs + 1, FEATURES_KEPT, width)
        self.rows_SCA = torch.zeros(shape, dtype=dtype, device=device)
        self._free = list(range(num_seqs))

    def open(self, seq_id: int, position: int, like_NA: Tensor | None = None) -> FeatureRing:
        """Return a new ring from `position` on; before `reserve` it has the width of `like_NA`."""
        if self.rows_SCA is not None:
            slot = self._slots[seq_id] = self._free.pop()
            return FeatureRing(self.rows_SCA[slot], position, slot)
        assert like_NA is not None
        return FeatureRing(like_NA.new_empty(FEATURES_KEPT, like_NA.shape[1]), position)

    def release(self, seq_id: int) -> None:
        """Free the ring of a sequence, if it has a slot."""
        slot = self._slots.pop(seq_id, None)
        if slot is not None:
            self._free.append(slot)
