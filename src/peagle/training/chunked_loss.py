"""Losses of drafts against the target, and the head's last projection in chunks.

The logits of a few thousand elements over a large vocabulary outweigh all else in a training step.
Here a chunk of elements at a time is projected, graded and turned into gradients of its inputs; its
logits are then dropped, and nothing is computed twice. (Gradients in the forward pass: as in Liger
Kernel's fused linear cross-entropy, Hsu et al., 2024.) A target row is projected once for all
elements of the chunk that predict the same token.

Shapes: M elements, R of a chunk, P target rows, D drafter width, V target and DV draft vocabulary.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from peagle.data.batches import ON_HOST
from peagle.training.config import LossKind

# ---- what the target says, and the losses ----


@dataclass(frozen=True, slots=True)
class TargetRows:
    """The target's predictions at P positions.

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
    def of(cls, logits_PV: Tensor, draft_ids: Tensor | None) -> Self:
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
        """Return losses [R] and their gradients by the logits, [R, DV], in at least float32.

        `index_R` says which row of `target` grades each draft.
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


# ---- chunk after chunk ----


# Logits that a chunk may have, of draft and target together: 256 MiB in bfloat16 on a GPU, where
# small products waste the card; on a CPU what its caches like.
_GPU_LOGITS = 1 << 27
_CPU_LOGITS = 1 << 21


@dataclass(frozen=True, slots=True)
class TargetOrder:
    """The target rows that grade the elements, equal ones side by side.

    Attributes:
        rows_P: int64, the rows, each once.
        which_M: int64, index into them of each element, ascending.
        on_host: `which_M` on the host, so that cutting chunks does not wait for the device.
    """

    rows_P: Tensor
    which_M: Tensor
    on_host: Tensor = field(metadata=ON_HOST)

    @classmethod
    def of(cls, positions_M: Tensor) -> Self:
        """Order elements by the target row of each, equal rows side by side."""
        rows_P, which_M = positions_M.unique_consecutive(return_inverse=True)
        return cls(rows_P, which_M, which_M.cpu())


@dataclass(frozen=True, slots=True)
class Projection:
    """The inputs of grading, beside the elements' hidden states and the head's last matrix.

    Attributes:
        loss: which loss.
        order: which target row grades each element.
        weights_M: of each element in the sum, in float32 or wider.
        target_logits: logits [P, V] of the given target rows [P].
        draft_ids: target id of every draft id, [DV]; None where the vocabularies are equal.
        chunk_rows: elements of a chunk.
    """

    loss: DraftLoss
    order: TargetOrder
    weights_M: Tensor
    target_logits: Callable[[Tensor], Tensor]
    draft_ids: Tensor | None
    chunk_rows: int


def default_chunk_rows(vocab_size: int, draft_vocab_size: int, device: torch.device) -> int:
    """Return the elements of a chunk that keep its logits small, at least 64."""
    budget = _GPU_LOGITS if device.type == "cuda" else _CPU_LOGITS
    return max(64, budget // (vocab_size + draft_vocab_size))


def projected_loss(
    hidden_MD: Tensor, weight_VD: Tensor, projection: Projection
) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of the losses of hidden @ weight^T, and which drafts match greedily.

    Differentiable (once) in `hidden_MD`, which the last matrix reads, and in that matrix. Products
    are in the type of these, losses and the sum of the matrix's gradient in at least float32.

    Returns:
        the sum, a scalar, and bool [M]: the argmax draft is the target's over its full vocabulary.
    """
    if torch.is_grad_enabled() and (hidden_MD.requires_grad or weight_VD.requires_grad):
        return _ProjectedLoss.apply(hidden_MD, weight_VD, projection)  # type: ignore[return-value]
    loss, match, _, _ = _run(hidden_MD, weight_VD, projection, (False, False))
    return loss, match


@torch.no_grad()
def judged_loss(
    hidden_MD: Tensor, weight_VD: Tensor, projection: Projection, temperature: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the sum of `projected_loss`, without gradients, and the target's view of the drafts.

    Target logits are of the full vocabulary; `temperature`, above 0, is of the target's
    distribution.

    Returns:
        the sum; bool [M], the draft is the target's most likely token; [M], the greedy drafts as
        target ids; [M], the probability that the target gives them, in at least float32.
    """
    total = torch.zeros((), dtype=projection.weights_M.dtype, device=hidden_MD.device)
    match_M = torch.empty(len(hidden_MD), dtype=torch.bool, device=hidden_MD.device)
    tokens_M = torch.empty_like(match_M, dtype=torch.int64)
    wide = torch.promote_types(weight_VD.dtype, torch.float32)
    chance_M = torch.empty_like(match_M, dtype=wide)
    grade = _compiled_grade() if hidden_MD.is_cuda else _grade
    judge = _compiled_judge() if hidden_MD.is_cuda else _judge
    draft_ids = projection.draft_ids
    for rows, positions_P, index_R in _chunks(projection):
        logits_RV = hidden_MD[rows] @ weight_VD.mT
        target_PV = projection.target_logits(positions_P)
        weights_R = projection.weights_M[rows]
        # The gradient of the logits is not kept.
        loss, match_M[rows] = grade(
            projection.loss, logits_RV, target_PV, index_R, weights_R, draft_ids
        )[:2]
        total += loss
        tokens_M[rows], chance_M[rows] = judge(
            logits_RV, target_PV, index_R, draft_ids, temperature
        )
    return total, match_M, tokens_M, chance_M


class _ProjectedLoss(torch.autograd.Function):
    """Computes its gradients going forward; going backward it only scales them."""

    @staticmethod
    def forward(
        ctx: Any, hidden_MD: Tensor, weight_VD: Tensor, projection: Projection
    ) -> tuple[Tensor, Tensor]:
        loss, match, *ctx.gradients = _run(
            hidden_MD, weight_VD, projection, ctx.needs_input_grad[:2]
        )
        ctx.mark_non_differentiable(match)
        return loss, match

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        if ctx.gradients is None:
            raise RuntimeError("projected_loss keeps its gradients for one backward pass only")
        gradients, ctx.gradients = ctx.gradients, None
        # In place: the gradient of a large vocabulary's matrix is not wanted twice.
        return *(g if g is None else g.mul_(grads[0]) for g in gradients), None


def _run(
    hidden_MD: Tensor, weight_VD: Tensor, projection: Projection, wanted: tuple[bool, bool]
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return loss, matches and the wanted gradients of hidden and weight."""
    total = torch.zeros((), dtype=projection.weights_M.dtype, device=hidden_MD.device)
    match_M = torch.empty(len(hidden_MD), dtype=torch.bool, device=hidden_MD.device)
    grad_hidden = torch.empty_like(hidden_MD) if wanted[0] else None
    wide = torch.promote_types(weight_VD.dtype, torch.float32)
    grad_weight = torch.zeros_like(weight_VD, dtype=wide) if wanted[1] else None
    grade = _compiled_grade() if hidden_MD.is_cuda else _grade
    for rows, positions_P, index_R in _chunks(projection):
        hidden_RD = hidden_MD[rows]
        loss, match_M[rows], gradient_RV = grade(
            projection.loss,
            hidden_RD @ weight_VD.mT,
            projection.target_logits(positions_P),
            index_R,
            projection.weights_M[rows],
            projection.draft_ids,
        )
        total += loss
        if grad_hidden is not None:
            torch.mm(gradient_RV, weight_VD, out=grad_hidden[rows])
        if grad_weight is not None:
            _add_product(grad_weight, gradient_RV.mT, hidden_RD)
    if grad_weight is not None:
        # A bfloat16 head may sum its gradients in float32 (`training.optimizers`).
        wanted_type = weight_VD.grad_dtype if weight_VD.is_leaf else weight_VD.dtype
        grad_weight = grad_weight.to(wanted_type or weight_VD.dtype)
    return total, match_M, grad_hidden, grad_weight


def _grade(
    loss: DraftLoss,
    logits_RV: Tensor,
    target_logits_PV: Tensor,
    index_R: Tensor,
    weights_R: Tensor,
    draft_ids: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weighted sum of a chunk's losses, its matches, and the gradient of its logits."""
    target = TargetRows.of(target_logits_PV, draft_ids)
    draft_R = _greedy(logits_RV, draft_ids)
    losses_R, gradient_RV = loss.grade(logits_RV, target, index_R)
    gradient_RV = gradient_RV.mul_(weights_R.unsqueeze(1)).to(logits_RV.dtype)
    return (losses_R * weights_R).sum(), draft_R == target.best_P[index_R], gradient_RV


def _judge(
    logits_RV: Tensor,
    target_logits_PV: Tensor,
    index_R: Tensor,
    draft_ids: Tensor | None,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    """Return a chunk's greedy drafts, as target ids, and softmax(target / temperature) at them."""
    draft_R = _greedy(logits_RV, draft_ids)
    wide = torch.promote_types(target_logits_PV.dtype, torch.float32)
    total_P = (target_logits_PV.to(wide) / temperature).logsumexp(-1)
    chosen_R = target_logits_PV[index_R, draft_R].to(wide) / temperature
    return draft_R, (chosen_R - total_P[index_R]).exp()


def _greedy(logits_RV: Tensor, draft_ids: Tensor | None) -> Tensor:
    """Return the most likely tokens, as target ids."""
    draft_R = logits_RV.argmax(-1)
    return draft_R if draft_ids is None else draft_ids[draft_R]


@cache
def _compiled_grade() -> Any:
    """Return `_grade` compiled into few kernels, so that logits are seldom read and written."""
    return torch.compile(_grade)


@cache
def _compiled_judge() -> Any:
    return torch.compile(_judge)


def _chunks(projection: Projection) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield slices of the elements, their target rows, and the row that each element reads."""
    order = projection.order
    for start in range(0, len(order.on_host), projection.chunk_rows):
        rows = slice(start, start + projection.chunk_rows)
        low, high = order.on_host[rows][[0, -1]].tolist()
        yield rows, order.rows_P[low : high + 1], order.which_M[rows] - low


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, also where the factors are of a narrower type."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif total.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right
