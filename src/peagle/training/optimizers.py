"""Optimizers of a head's weights, and the float32 weights of a head in bfloat16.

A step of 1e-4 of a weight is lost in bfloat16's eight bits, so optimizers move a float32 copy (the
master weights of Micikevicius et al., 2018) and the head is rounded from it after each step.
Gradients are summed in float32 as well. Of several processes each holds a share of that copy.

A head that will be stored in few bits (`head.quantization`) is rounded to these as well, so that
training and validation see the weights of its later file. Gradients go to the float32 copy as if
nothing were rounded (the straight-through estimator of Bengio et al., 2013).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from peagle.models.checkpoint.packed import Rounding
from peagle.training.config import OptimizerSection
from peagle.training.distributed import Processes


class Masters:
    """The weights that the optimizers update: float32 copies of the head's, or the head's own.

    The head, or the correction of one, comes with its first weights in float32 or wider, and
    computes in `dtype`; where that is the type of its weights only those that `rounding` rounds are
    copied.
    """

    def __init__(
        self, head: nn.Module, dtype: torch.dtype, rounding: Rounding | None = None
    ) -> None:
        self.head, self._rounding = head, rounding
        self._own = own = dict(head.named_parameters())
        rounded = frozenset[str]() if rounding is None else rounding.names
        is_narrow = dtype != next(iter(own.values())).dtype
        self._copies = {
            name: nn.Parameter(parameter.detach().clone())
            for name, parameter in own.items()
            if parameter.requires_grad and (is_narrow or name in rounded)
        }
        head.to(dtype)
        for name, master in self._copies.items():
            own[name].grad_dtype = master.dtype
        if rounding is not None:
            self.publish()

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the names and weights that optimizers may update."""
        for name, parameter in self._own.items():
            if parameter.requires_grad:
                yield name, self._copies.get(name, parameter)

    def state(self) -> dict[str, Tensor]:
        """Return all weights and maps of the head, trained ones as precise as there are; no copies.

        Call `publish` after writing to them.
        """
        return {**self.head.state_dict(), **{n: p.detach() for n, p in self._copies.items()}}

    def collect(self) -> list[Tensor]:
        """Hand the head's gradients to the masters; returns the masters that have one."""
        for name, master in self._copies.items():
            gradient, self._own[name].grad = self._own[name].grad, None
            master.grad = None if gradient is None else gradient.to(master.dtype)
        return [parameter for _, parameter in self.named() if parameter.grad is not None]

    def clip(self, moved: list[Tensor], max_norm: float) -> Tensor:
        """Scale gradients to a norm of at most `max_norm`; returns the one that they had."""
        return torch.nn.utils.clip_grad_norm_(moved, max_norm)

    @torch.no_grad()
    def publish(self) -> None:
        """Round the head from the masters; call it after each optimizer step."""
        heads = {name: self._own[name] for name in self._copies}
        _write(heads, list(self._copies.values()), self._rounding)
        for _, parameter in self.named():
            parameter.grad = None


def build_masters(
    head: nn.Module, dtype: torch.dtype, processes: Processes, rounding: Rounding | None = None
) -> Masters:
    """Return the masters of a head, divided among the processes where there are several."""
    if processes.world_size == 1:
        return Masters(head, dtype, rounding)
    return ShardedMasters(head, dtype, processes, rounding)


def _write(
    heads: Mapping[str, nn.Parameter], masters: Sequence[Tensor], rounding: Rounding | None
) -> None:
    """Write masters into the head's parameters, rounded as the head is."""
    plain: list[tuple[Tensor, Tensor]] = []
    for (name, head), master in zip(heads.items(), masters, strict=True):
        if rounding is not None and name in rounding.names:
            rounding.round_into(head, name, master)
        else:
            plain.append((head, master))
    if plain:
        torch._foreach_copy_([head for head, _ in plain], [master for _, master in plain])


class ShardedMasters(Masters):
    """`Masters` of which each process holds a share, as DTensors divided along dimension 0.

    Of the 18 bytes a weight (bfloat16 weight, float32 gradient, float32 master, two moments of
    AdamW) only the first six serve the forward and backward passes. So each process keeps the head
    whole, and FSDP2 shards the masters, with the optimizer states and the reduced gradients (ZeRO,
    stage 2: Rajbhandari et al., 2020). `fully_shard` on the head itself would not work: the
    two-pass partition runs several backward passes a step and reads some weights directly, so that
    FSDP's hooks would fire once a segment or not at all. Here they fire once a step: a block of
    masters is a module whose forward pass rounds its weights into the head, and whose backward pass
    collects the gradients that all segments have left there. Gradients are summed over the
    processes, not averaged: the loss has one denominator for the rows of all.

    Args:
        head: with its first weights in float32 or wider; every process continues
            with the first process's weights.
        dtype: in which the head computes.
        processes: at least two.
        rounding: rounds weights of the head in each process, from whole ones in float32.
    """

    def __init__(
        self,
        head: nn.Module,
        dtype: torch.dtype,
        processes: Processes,
        rounding: Rounding | None = None,
    ) -> None:
        self.head = head
        self._processes = processes
        self._own = dict(head.named_parameters())
        first = next(iter(self._own.values()))
        wide = first.dtype
        blocks: dict[str, dict[str, nn.Parameter]] = {}
        for name, parameter in self._own.items():
            if parameter.requires_grad:
                blocks.setdefault(_block_of(name), {})[name] = parameter
        self._root = _Root([_Block(block, rounding) for block in blocks.values()])
        head.to(dtype)
        for parameter in self._own.values():
            if parameter.requires_grad and dtype != wide:
                parameter.grad_dtype = wide
        mesh = init_device_mesh(first.device.type, (processes.world_size,))
        narrow = dtype if dtype != wide else None
        rounded = [*(block.is_rounded for block in self._root.blocks), False]
        for block, is_rounded in zip((*self._root.blocks, self._root), rounded, strict=True):
            policy = MixedPrecisionPolicy(None if is_rounded else narrow, reduce_dtype=wide)
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
            sharded = cast(FSDPModule, block)
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)
            # Collecting needs no weights.
            sharded.set_unshard_in_backward(False)
        names = (name for block in blocks.values() for name in block)
        self._copies = dict(zip(names, self._root.parameters(), strict=True))
        self.publish()

    def collect(self) -> list[Tensor]:
        """Sum the gradients of all processes into the masters; return the masters that have one."""
        self._published.backward()
        return [parameter for _, parameter in self.named() if parameter.grad is not None]

    def clip(self, moved: list[Tensor], max_norm: float) -> Tensor:
        """Scale gradients to a norm of at most `max_norm`; returns the one that they had."""
        shares = [cast(DTensor, x.grad).to_local() for x in moved]
        square = torch.nn.utils.get_total_norm(shares).square()
        norm = self._processes.sum(square).sqrt()
        torch._foreach_mul_(shares, (max_norm / (norm + 1e-6)).clamp_max(1.0))
        return norm

    def publish(self) -> None:
        """Round the head from the masters of all processes; call it after each optimizer step."""
        with torch.enable_grad():
            # FSDP2 of torch 2.11 cannot move an empty list of arguments to a GPU.
            self._published = self._root(None)
        for _, parameter in self.named():
            parameter.grad = None


def _block_of(name: str) -> str:
    """Return the block of weights that travel together: a layer, a large table, or all the rest."""
    first, second, *_ = f"{name}.".split(".")
    if first == "layers":
        return f"{first}.{second}"
    return first if first in ("embed_tokens", "lm_head") else "rest"


class _Root(nn.Module):
    """All blocks: FSDP2 needs a module above them."""

    def __init__(self, blocks: list[_Block]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, _: None) -> Tensor:
        return torch.stack([block() for block in self.blocks]).sum()


class _Block(nn.Module):
    """Masters of some weights of the head, copies of their present values."""

    def __init__(self, heads: dict[str, nn.Parameter], rounding: Rounding | None) -> None:
        super().__init__()
        self.heads, self.rounding = heads, rounding
        self.is_rounded = rounding is not None and not rounding.names.isdisjoint(heads)
        for index, head in enumerate(heads.values()):
            self.register_parameter(str(index), nn.Parameter(head.detach().clone()))

    def forward(self) -> Tensor:
        # Whole at this moment, by FSDP's hooks.
        wholes = list(self.parameters())
        for whole, head in zip(wholes, self.heads.values(), strict=True):
            whole.grad_dtype = head.grad_dtype
        return _Publish.apply(self.heads, self.rounding, *wholes)  # type: ignore[return-value]


class _Publish(torch.autograd.Function):
    """Copies weights into the head; takes its gradients from the head going backward."""

    @staticmethod
    def forward(
        ctx: Any, heads: dict[str, nn.Parameter], rounding: Rounding | None, *wholes: Tensor
    ) -> Tensor:
        ctx.heads = list(heads.values())
        _write(heads, wholes, rounding)
        return wholes[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        gradients = [head.grad for head in ctx.heads]
        for head in ctx.heads:
            head.grad = None
        return None, None, *gradients


# ---- the optimizers ----


def build_optimizers(
    named: Iterable[tuple[str, nn.Parameter]], section: OptimizerSection
) -> list[Optimizer]:
    """Build one optimizer for AdamW; for Muon add one, which takes `fc` and the layers' matrices.

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
    """Return whether Muon takes a parameter of a head."""
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
        """Update every matrix that has a gradient once."""
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
    """Return the rows of a matrix that this process holds: all of them where it is not divided."""
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
    """Return each matrix [m, n] with its singular values pushed to about 1.

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
