"""Chains of elements: what a correction that is trained with its head needs of their order.

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
        every: all chains, for a form that follows their paths; None for others.
        own: the chains whose slots are conditioned on the head's own drafts; None: no chain is.
        is_alone_M: the elements of chains that are graded without the correction.
    """

    every: Chains | None
    own: Chains | None
    is_alone_M: Tensor

    @classmethod
    def of(
        cls,
        row_M: Tensor,
        anchor_M: Tensor,
        depth_M: Tensor,
        *,
        follows_paths: bool,
        lots_BN: Tensor | None = None,
        alone: float = 0.0,
        own_drafts: float = 0.0,
    ) -> Self:
        """Plan the elements of a part.

        Args:
            follows_paths: the form of the correction does.
            lots_BN: a uniform number for the chain of each anchor, which decides; None: no chain is
                graded alone or conditioned on own drafts.
            alone, own_drafts: shares of the chains.
        """
        of_part, every, own = (row_M, anchor_M, depth_M), None, None
        if follows_paths:
            every = Chains.of(*of_part, torch.ones_like(row_M, dtype=torch.bool))
        lots_M = torch.ones_like(row_M, dtype=torch.float32)
        if lots_BN is not None:
            lots_M = lots_BN[row_M, anchor_M]
        is_alone_M = lots_M < alone
        if own_drafts:
            own = Chains.of(*of_part, ~is_alone_M & (lots_M < alone + own_drafts))
        return cls(every, own, is_alone_M)
