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
    """Simulated greedy acceptance, pooled over batches.

    A chain is accepted down to depth d when its drafts at depths 0 to d all match. Because COD
    keeps random anchors and whole chains, sampled elements estimate all of them.

    Args:
        num_depths: K_train.
        device: of what is added.
        walk: keep every chain for `served_acceptance_length`; needs all elements (validation).
    """

    def __init__(self, num_depths: int, device: torch.device, *, walk: bool = False) -> None:
        self.num_depths = num_depths
        self._matched = torch.zeros(num_depths, dtype=torch.float64, device=device)
        self._accepted = torch.zeros_like(self._matched)
        self._count = torch.zeros_like(self._matched)
        self._chains: list[Tensor] | None = [] if walk else None

    def add(self, row: Tensor, anchor: Tensor, depth: Tensor, match: Tensor) -> None:
        """Pool elements, all [M]; a chain's elements come in the same call."""
        if not len(row):
            return
        shape = (int(row.max()) + 1, int(anchor.max()) + 1, self.num_depths)
        grid = torch.zeros(shape, device=match.device)
        grid[row, anchor, depth] = match.float()
        grid = grid.cumprod(-1)
        accepted = grid[row, anchor, depth].double()
        self._count.index_add_(0, depth, torch.ones_like(accepted))
        self._matched.index_add_(0, depth, match.double())
        self._accepted.index_add_(0, depth, accepted)
        if self._chains is not None:
            present = torch.zeros(shape, dtype=torch.bool, device=match.device)
            present[row, anchor, depth] = True
            # Chains that the end of the response cuts short are marked -1: nobody knows their fate.
            lengths = torch.where(present.all(-1), grid.sum(-1), -1.0)
            self._chains.append(lengths.to(torch.int8).cpu())

    def accuracy(self) -> list[float]:
        """P(the draft at depth d matches), whatever stands above it."""
        return (self._matched / self._count.clamp_min(1)).tolist()

    def unconditional(self) -> list[float]:
        """P(the drafts at depths 0 to d all match) over all anchors."""
        return (self._accepted / self._count.clamp_min(1)).tolist()

    def acceptance_length(self, k: int) -> float:
        """1 + the sum of the first k unconditional acceptances, over all anchors.

        Serving gives less: it spends most of its steps where little is accepted.
        """
        return 1 + sum(self.unconditional()[:k])

    def served_acceptance_length(self, k: int) -> float:
        """The acceptance length of serving at K = k: each draft starts where the last one ended."""
        assert self._chains is not None, "only a meter with walk=True keeps the chains"
        num_drafts = num_accepted = 0
        for chains in self._chains:
            for lengths in chains.tolist():
                anchor = next((a for a, n in enumerate(lengths) if n >= 0), len(lengths))
                while anchor < len(lengths) and lengths[anchor] >= 0:
                    accepted = min(lengths[anchor], k)
                    num_drafts += 1
                    num_accepted += accepted
                    anchor += accepted + 1
        return 1 + num_accepted / max(1, num_drafts)
