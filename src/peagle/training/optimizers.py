"""The optimizers of a head: AdamW, or Muon for the matrices of its layers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from peagle.training.config import OptimizerSection


def build_optimizers(
    named: Iterable[tuple[str, nn.Parameter]], section: OptimizerSection
) -> list[Optimizer]:
    """One optimizer for AdamW; for Muon a second one, which takes `fc` and the layers' matrices.

    Embeddings, lm_head, mask_hidden and norms are always AdamW's. Weight decay is on matrices.
    """
    hidden: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, parameter in named:
        if parameter.requires_grad:
            muons = section.name == "muon" and suits_muon(name, parameter.ndim)
            (hidden if muons else rest).append(parameter)
    groups = [
        {"params": [p for p in rest if p.ndim == 2], "weight_decay": section.weight_decay},
        {"params": [p for p in rest if p.ndim != 2], "weight_decay": 0.0},
    ]
    fused = rest[0].device.type == "cuda"
    optimizers: list[Optimizer] = [
        torch.optim.AdamW(groups, lr=section.learning_rate, betas=section.betas, fused=fused)
    ]
    if hidden:
        optimizers.append(Muon(hidden, lr=section.learning_rate, weight_decay=section.weight_decay))
    return optimizers


def suits_muon(name: str, ndim: int) -> bool:
    """Whether Muon takes a parameter of a head."""
    return ndim == 2 and name.startswith(("fc.", "layers."))


class Muon(Optimizer):
    """Momentum orthogonalised by a quintic Newton-Schulz iteration (Jordan et al., 2024).

    W <- (1 - lr * wd) * W - lr * 0.2 * sqrt(max(m, n)) * U, where U is about the polar factor of
    the Nesterov momentum; the factor gives updates the usual RMS of AdamW's, so that both share
    one learning rate (Liu et al., 2025). `torch.optim.Muon` walks matrix by matrix, thousands of
    launches a step for a deep small model; here matrices of one shape are one batch, divided among
    the processes where there are several.

    The parameters are matrices; weight decay is decoupled, as AdamW's.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every matrix that has a gradient."""
        for group in self.param_groups:
            shapes: dict[torch.Size, list[Tensor]] = {}
            for weight in group["params"]:
                if weight.grad is not None:
                    shapes.setdefault(weight.shape, []).append(weight)
            for weights in shapes.values():
                self._step_same_shape(weights, group)

    def _step_same_shape(self, weights: list[Tensor], group: dict) -> None:
        grads = [_own_share(weight.grad) for weight in weights if weight.grad is not None]
        for weight in weights:
            if not self.state[weight]:
                self.state[weight]["momentum"] = torch.zeros_like(weight)
        momenta = [_own_share(self.state[weight]["momentum"]) for weight in weights]
        torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
        nesterov = torch._foreach_lerp(grads, momenta, group["momentum"])
        updates = _orthogonalized(nesterov, weights[0]).to(weights[0].dtype)
        rate = group["lr"] * 0.2 * math.sqrt(max(weights[0].shape))
        own = [_own_share(weight) for weight in weights]
        torch._foreach_mul_(own, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(own, list(updates.unbind()), alpha=-rate)


def _own_share(tensor: Tensor) -> Tensor:
    """The rows of a matrix that this process holds: all of them where it is not divided."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _orthogonalized(shares: Sequence[Tensor], like: Tensor) -> Tensor:
    """`orthogonalize` of matrices of one shape, of which each process has a share of the rows.

    The iteration needs whole matrices. They travel so that each process has some of them whole, and
    back again. `like` is one of them, as a DTensor where they are divided.
    """
    stacked = torch.stack(list(shares))
    if not isinstance(like, DTensor):
        return orthogonalize(stacked)
    shape = torch.Size((len(shares), *like.shape))
    layout = {"run_check": False, "shape": shape, "stride": (like.numel(), like.shape[1], 1)}
    rows = DTensor.from_local(stacked, like.device_mesh, [Shard(1)], **layout)
    matrices = orthogonalize(rows.redistribute(placements=[Shard(0)]).to_local())
    done = DTensor.from_local(matrices.contiguous(), like.device_mesh, [Shard(0)], **layout)
    return done.redistribute(placements=[Shard(1)]).to_local()


def orthogonalize(matrices_Nmn: Tensor, iterations: int = 5) -> Tensor:
    """Each matrix [m, n] with its singular values pushed to about 1.

    Computed in bfloat16 on a GPU, in the matrices' own type on a CPU, where bfloat16 is slow.
    """
    a, b, c = 3.4445, -4.7750, 2.0315  # coefficients of Jordan et al.
    x = matrices_Nmn.bfloat16() if matrices_Nmn.is_cuda else matrices_Nmn
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(iterations):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
