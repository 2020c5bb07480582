"""Layers of a target over packed weights: linear layers, and experts.

Experts of plain weights go the same way: `use_experts` takes their parameters as they are, or
arranges them once where a model stores them transposed or in turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from peagle.kernels.linear.experts import Activation, ExpertWeights, Gate, run_experts
from peagle.kernels.linear.fp8_activations import FP8
from peagle.kernels.linear.fp8_linear import Before
from peagle.kernels.linear.packed_linear import packed_linear
from peagle.kernels.linear.packed_weights import PackedWeight
from peagle.models.comparison import relative_difference

EXPERTS_IMPLEMENTATION = "peagle"
_NUM_PROBES = 64
_GATE_TOLERANCE = 1e-5


class PackedLinear(nn.Module):
    """y = x W^T + bias with a packed weight.

    Attributes:
        packed: the weight, [N, K].
        bias: [N] or None.
        input_order: the input that each column of the weight multiplies; None: in order.
        numbers: `PackedWeight.fp8_numbers` of the weight, if x is rounded to FP8 where it has many
            rows.
    """

    packed: PackedWeight
    bias: Tensor | None
    input_order: Tensor | None
    numbers: Tensor | None

    def __init__(
        self,
        packed: PackedWeight,
        bias: Tensor | None = None,
        input_order: Tensor | None = None,
        *,
        numbers: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = packed.num_outputs, packed.num_inputs
        _hold(self, "packed", packed)
        self.register_buffer("bias", bias, persistent=False)
        self.register_buffer("input_order", input_order, persistent=False)
        self.register_buffer("numbers", numbers, persistent=False)

    @staticmethod
    def concatenate(linears: Sequence[PackedLinear]) -> PackedLinear:
        """Join layers that read inputs of one order in one format into one layer of all outputs.

        All or none of them round to FP8.
        """
        packed = PackedWeight.concatenate([linear.packed for linear in linears])
        biases = [linear.bias for linear in linears if linear.bias is not None]
        # torch.cat has no kernel for FP8 on every device.
        found = [linear.numbers for linear in linears if linear.numbers is not None]
        numbers = torch.cat([q.view(torch.uint8) for q in found]).view(FP8) if found else None
        return PackedLinear(packed, torch.cat(biases) if biases else None, numbers=numbers)

    def forward(self, x: Tensor, before: Before | None = None) -> Tensor:
        """Compute y = x W^T + bias, [..., N], of x or of what `before` makes of it.

        Args:
            x: [..., K]; [..., 2K] if `before` is SwiGLU.
            before: what is computed of x first; the layer has no `input_order` then.
        """
        if self.input_order is not None:
            assert before is None
            x = x[..., self.input_order]
        return packed_linear(x, self.packed, self.bias, self.numbers, before)


def _hold(module: nn.Module, name: str, weight: PackedWeight) -> None:
    """Make a weight an attribute of a module, and its tensors buffers, which memory plans count."""
    setattr(module, name, weight)
    for part in ("data", "scale", "zero"):
        module.register_buffer(f"{name}_{part}", getattr(weight, part), persistent=False)


def hold_experts(module: Any, experts: ExpertWeights) -> None:
    """Let an experts module of transformers compute with these weights, in place of its own.

    Args:
        module: one of `experts_of`.
        experts: [E, N, K], with the rows of gates and of up in the order of the module.
    """
    for name in ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"):
        if name in module._parameters:
            del module._parameters[name]
    if not module.is_concatenated:
        bias = experts.gate_up_bias
        experts = replace(
            experts,
            gate_up=experts.gate_up.with_rows(_gates_first),
            gate_up_bias=None if bias is None else _gates_first(bias),
        )
    _hold(module, "packed_gate_up", experts.gate_up)
    _hold(module, "packed_down", experts.down)
    module.register_buffer("packed_gate_up_bias", experts.gate_up_bias, persistent=False)
    module.register_buffer("packed_down_bias", experts.down_bias, persistent=False)
    module.expert_weights = experts


def _gates_first(rows: Tensor) -> Tensor:
    """Return rows, [E, 2I, ...], in which gate and up take turns, with all gates first."""
    return torch.cat([rows[:, ::2], rows[:, 1::2]], 1)


def experts_of(model: nn.Module) -> list[Any]:
    """Return the experts modules of a transformers model that its experts interface can replace."""
    return [
        module
        for module in model.modules()
        if hasattr(module, "_apply_gate") and hasattr(module, "is_transposed")
    ]


def use_experts(model: transformers.PreTrainedModel) -> int:
    """Let our kernels compute the experts of a model, in place.

    Experts whose activation is none of `kernels.linear.experts` stay with transformers.

    Args:
        model: with its weights where they will run.

    Returns:
        how many modules have experts of ours.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    modules = experts_of(model)
    gates = [find_gate(module) for module in modules]
    if not modules or None in gates:
        return 0
    for module, gate in zip(modules, gates, strict=True):
        assert gate is not None
        if not hasattr(module, "expert_weights"):
            hold_experts(module, _plain_weights(module, gate))
    ALL_EXPERTS_FUNCTIONS.register(EXPERTS_IMPLEMENTATION, _run)
    model.set_experts_implementation(EXPERTS_IMPLEMENTATION)
    return len(modules)


def _run(module: Any, hidden_states: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    return run_experts(hidden_states, index, weights, module.expert_weights)


def find_gate(module: Any) -> Gate | None:
    """Return the activation of an experts module, found by running it; None: it is another one."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.tensor([0.1, 1.0, 3.0, 10.0, 30.0]).repeat_interleave(_NUM_PROBES)[:, None]
    pairs = torch.randn(len(sizes), 2, generator=generator) * sizes  # gate and up of one output
    try:
        found = module._apply_gate(pairs)
    except (RuntimeError, TypeError, AttributeError):
        return None
    kinds: tuple[Activation, ...] = ("silu", "gelu_tanh")
    candidates = [Gate(kind) for kind in kinds]
    alpha, limit = getattr(module, "alpha", None), getattr(module, "limit", None)
    if alpha is not None and limit is not None:
        candidates.append(Gate("clamped", float(alpha), float(limit)))
    return next(
        (g for g in candidates if relative_difference(found, g(pairs)) < _GATE_TOLERANCE), None
    )


def _plain_weights(module: Any, gate: Gate) -> ExpertWeights:
    """Return the parameters of an experts module as [E, N, K]."""

    def matrix(name: str) -> PackedWeight:
        weight = getattr(module, name).detach()
        return PackedWeight(weight.mT.contiguous() if module.is_transposed else weight)

    def bias(name: str) -> Tensor | None:
        return getattr(module, name).detach() if module.has_bias else None

    return ExpertWeights(
        matrix("gate_up_proj"),
        matrix("down_proj"),
        gate,
        bias("gate_up_proj_bias"),
        bias("down_proj_bias"),
    )
