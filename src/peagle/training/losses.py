"""What a draft is graded by. Shapes: M graded elements, V target and DV draft vocabulary."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor


def draft_loss(
    draft_logits_MV: Tensor,
    target_logits_MV: Tensor,
    draft_ids: Tensor | None,
    kind: Literal["kl", "ce"],
) -> Tensor:
    """Loss of each element, float32 [M].

    "kl": KL(target || draft) over the draft vocabulary, the target renormalised on it.
    "ce": cross-entropy on the target's most likely token of the draft vocabulary.

    Args:
        draft_logits_MV: [M, DV].
        target_logits_MV: [M, V], no gradient.
        draft_ids: target id of every draft id, [DV]; None where the vocabularies are equal.
        kind: which loss.
    """
    reference_MV = target_logits_MV if draft_ids is None else target_logits_MV[:, draft_ids]
    log_q_MV = F.log_softmax(draft_logits_MV.float(), dim=-1)
    if kind == "ce":
        best_M1 = reference_MV.argmax(-1, keepdim=True)
        return -log_q_MV.gather(1, best_M1).squeeze(1)
    log_p_MV = F.log_softmax(reference_MV.float(), dim=-1)
    return (log_p_MV.exp() * (log_p_MV - log_q_MV)).sum(-1)


def greedy_match(
    draft_logits_MV: Tensor, target_logits_MV: Tensor, draft_ids: Tensor | None
) -> Tensor:
    """Whether the argmax draft is the target's argmax over its full vocabulary, bool [M]."""
    draft_M = draft_logits_MV.argmax(-1)
    if draft_ids is not None:
        draft_M = draft_ids[draft_M]
    return draft_M == target_logits_MV.argmax(-1)


class AcceptanceMeter:
    """Simulated greedy acceptance by depth, pooled over batches.

    A chain is accepted down to depth d when its drafts at depths 0 to d all match. Because COD
    keeps random anchors and whole chains, sampled elements estimate all of them.
    """

    def __init__(self, num_depths: int, device: torch.device) -> None:
        self._matched = torch.zeros(num_depths, dtype=torch.float64, device=device)
        self._accepted = torch.zeros_like(self._matched)
        self._count = torch.zeros_like(self._matched)

    def add(self, row: Tensor, anchor: Tensor, depth: Tensor, match: Tensor) -> None:
        """Pool elements, all [M]; a chain's elements come in the same call."""
        num_depths = len(self._count)
        if not len(row):
            return
        grid = torch.zeros(
            int(row.max()) + 1, int(anchor.max()) + 1, num_depths, device=match.device
        )
        grid[row, anchor, depth] = match.float()
        accepted = grid.cumprod(-1)[row, anchor, depth].double()
        self._count.index_add_(0, depth, torch.ones_like(accepted))
        self._matched.index_add_(0, depth, match.double())
        self._accepted.index_add_(0, depth, accepted)

    def accuracy(self) -> list[float]:
        """P(the draft at depth d matches), whatever stands above it."""
        return (self._matched / self._count.clamp_min(1)).tolist()

    def unconditional(self) -> list[float]:
        """P(the drafts at depths 0 to d all match): per-position acceptance."""
        return (self._accepted / self._count.clamp_min(1)).tolist()

    def acceptance_length(self, k: int) -> float:
        """1 + the sum of the first k unconditional acceptances: the simulated AL at K = k."""
        return 1 + sum(self.unconditional()[:k])
