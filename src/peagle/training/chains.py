"""Chains of elements: their order and shares, for a correction that is trained with its head.

Shapes: M graded elements, C chains, E elements of a depth.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Chains:
    """Whole chains below depth 0, the longest first.

    Attributes:
        row_C, anchor_C: which chains.
        elements: of depth 1, 2, ...: int64 [E], the element of each chain that has this depth,
            among all M. These chains are the first E, so that sizes alone tell which.
    """

    row_C: Tensor
    anchor_C: Tensor
    elements: tuple[Tensor, ...]

    @classmethod
    def of(cls, row_M: Tensor, anchor_M: Tensor, depth_M: Tensor, is_kept_M: Tensor) -> Self:
        """List the chains of elements below depth 0 of which `is_kept_M` keeps all or none."""
        kept_X = is_kept_M.nonzero().flatten()
        row_X, anchor_X, depth_X = (x[kept_X] for x in (row_M, anchor_M, depth_M))
        key_X = row_X * (int(anchor_X.max()) + 1 if len(anchor_X) else 1) + anchor_X
        _, chain_X, length_C = key_X.unique(return_inverse=True, return_counts=True)
        place_C = length_C.argsort(descending=True, stable=True).argsort()
        order_X = (depth_X * len(length_C) + place_C[chain_X]).argsort()
        sizes = torch.bincount(depth_X, minlength=2)[1:].tolist()
        elements = kept_X[order_X].split(sizes)
        first_C = elements[0]
        return cls(row_M[first_C], anchor_M[first_C], elements)


@dataclass(frozen=True, slots=True)
class ChainPlan:
    """How a correction sees the elements of a part below depth 0.

    Attributes:
        own: the chains whose slots are conditioned on the head's own drafts; None: no chain is.
        is_alone_M: the elements of chains that are graded without the correction.
    """

    own: Chains | None
    is_alone_M: Tensor

    @classmethod
    def of(
        cls,
        row_M: Tensor,
        anchor_M: Tensor,
        depth_M: Tensor,
        *,
        lots_BN: Tensor | None = None,
        alone: float = 0.0,
        own_drafts: float = 0.0,
    ) -> Self:
        """Plan the elements of a part.

        Args:
            lots_BN: a uniform number for the chain of each anchor, which decides; None: no chain is
                graded alone or conditioned on own drafts.
            alone, own_drafts: shares of the chains.
        """
        own = None
        lots_M = torch.ones_like(row_M, dtype=torch.float32)
        if lots_BN is not None:
            lots_M = lots_BN[row_M, anchor_M]
        is_alone_M = lots_M < alone
        if own_drafts:
            takes_own_M = ~is_alone_M & (lots_M < alone + own_drafts)
            own = Chains.of(row_M, anchor_M, depth_M, takes_own_M)
        return cls(own, is_alone_M)
