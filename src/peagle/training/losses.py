"""What a draft is graded by.

Shapes: M graded elements, R of them, P target rows, V target and DV draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.training.config import LossKind


@dataclass(frozen=True, slots=True)
class TargetRows:
    """What the target says at P positions.

    Attributes:
        best_P: its most likely token, target id.
        best_draft_P: its most likely token of the draft vocabulary, draft id.
        probs_PV: its distribution over the draft vocabulary, renormalised there, [P, DV].
        inside_P: probability of the draft vocabulary as a whole; None where that is all.
    """

    best_P: Tensor
    best_draft_P: Tensor
    probs_PV: Tensor
    inside_P: Tensor | None

    @classmethod
    def of(cls, logits_PV: Tensor, draft_ids: Tensor | None) -> TargetRows:
        """Read target logits [P, V]; `draft_ids` [DV] are None where the vocabularies are equal."""
        best_P = logits_PV.argmax(-1)
        if draft_ids is None:
            return cls(best_P, best_P, _softmax(logits_PV), None)
        kept_PV = logits_PV[:, draft_ids]
        wide = _wide(logits_PV.dtype)
        all_P, kept_P = (x.to(wide).logsumexp(-1) for x in (logits_PV, kept_PV))
        inside_P = (kept_P - all_P).exp()
        return cls(best_P, kept_PV.argmax(-1), _softmax(kept_PV), inside_P)


@dataclass(frozen=True, slots=True)
class DraftLoss:
    """Losses of a draft distribution q against the target's p, with their gradients.

    "kl": KL(p || q) over the draft vocabulary, p renormalised on it.
    "ce": cross-entropy on the target's most likely token of the draft vocabulary.
    "tv": 1 - sum of min(p, q), the chance that rejection sampling refuses a draft drawn from q;
    p is over the full vocabulary, so that what the head cannot draft counts as refused.
    "kl_tv": (1 - tv_share) * KL + tv_share * TV; far from the target TV alone hardly moves.

    Attributes:
        kind: which loss.
        tv_share: of "kl_tv".
    """

    kind: LossKind = "kl"
    tv_share: float = 0.5

    def grade(
        self, draft_logits_RV: Tensor, target: TargetRows, index_R: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Losses [R] and their gradients with respect to the logits, [R, DV].

        Computed in at least float32.

        Args:
            draft_logits_RV: [R, DV].
            target: rows to compare with.
            index_R: which row of `target` each draft is graded by.
        """
        wide = _wide(draft_logits_RV.dtype)
        log_q_RV = F.log_softmax(draft_logits_RV, dim=-1, dtype=wide)
        if self.kind == "ce":
            return _cross_entropy(log_q_RV, target.best_draft_P[index_R])
        p_RV = target.probs_PV.to(wide)[index_R]
        inside_R = None if target.inside_P is None else target.inside_P.to(wide)[index_R]
        if self.kind == "kl":
            return _divergence(log_q_RV, p_RV)
        tv_R, tv_gradient_RV = _variation(log_q_RV.exp(), p_RV, inside_R)
        if self.kind == "tv":
            return tv_R, tv_gradient_RV
        kl_R, kl_gradient_RV = _divergence(log_q_RV, p_RV)
        return kl_R.lerp(tv_R, self.tv_share), kl_gradient_RV.lerp_(tv_gradient_RV, self.tv_share)


def _cross_entropy(log_q_RV: Tensor, best_R: Tensor) -> tuple[Tensor, Tensor]:
    """-log q[best]; the gradient is q - onehot(best)."""
    best_R1 = best_R.unsqueeze(1)
    losses_R = -log_q_RV.gather(1, best_R1).squeeze(1)
    gradient_RV = log_q_RV.exp_()
    gradient_RV.scatter_add_(1, best_R1, torch.full_like(best_R1, -1, dtype=gradient_RV.dtype))
    return losses_R, gradient_RV


def _divergence(log_q_RV: Tensor, p_RV: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of p (log p - log q); the gradient is q - p."""
    losses_R = -torch.special.entr(p_RV).sum(-1) - (p_RV * log_q_RV).sum(-1)
    return losses_R, log_q_RV.exp_().sub_(p_RV)


def _variation(q_RV: Tensor, p_RV: Tensor, inside_R: Tensor | None) -> tuple[Tensor, Tensor]:
    """1 - sum of min(p, q); the gradient is q * sum(q[q < p]) - q[q < p]."""
    if inside_R is not None:
        p_RV = p_RV * inside_R.unsqueeze(1)
    losses_R = 1 - torch.minimum(p_RV, q_RV).sum(-1)
    below_RV = q_RV.masked_fill(q_RV >= p_RV, 0)
    return losses_R, (q_RV * below_RV.sum(-1, keepdim=True)).sub_(below_RV)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _softmax(logits: Tensor) -> Tensor:
    return torch.softmax(logits, dim=-1, dtype=_wide(logits.dtype))
