"""Layers of a target that multiply activations in FP8 with the FP8 weights of a checkpoint.

A linear layer, or the experts of a mixture, does so if its checkpoint was made for such products:
scales of weights for blocks of 128 x 128, and scales of activations that are found while the model
runs.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from peagle.kernels.linear.fp8_activations import BLOCK
from peagle.kernels.linear.fp8_linear import fp8_linear
from peagle.models.packed_layers import find_gate
from peagle.models.quantization import StoredLinear

_CAPABILITY = (8, 9)  # from which on the matrix unit multiplies FP8


class Fp8Linear(nn.Module):
    """y = x W^T + bias with x rounded to FP8, a scale for each row and 128 inputs.

    Attributes:
        q: float8_e4m3fn [N, K].
        scale: float32 [N / 128, K / 128].
        bias: [N] or None.
    """

    q: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, q: Tensor, scale: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = q.shape
        self.register_buffer("q", q, persistent=False)
        self.register_buffer("scale", scale, persistent=False)
        self.register_buffer("bias", bias, persistent=False)

    @staticmethod
    def concatenate(linears: Sequence[Fp8Linear]) -> Fp8Linear:
        """Join layers that read one input into one layer of all outputs."""
        biases = [linear.bias for linear in linears if linear.bias is not None]
        return Fp8Linear(
            # torch.cat has no kernel for FP8 on every device
            torch.cat([linear.q.view(torch.uint8) for linear in linears]).view(linears[0].q.dtype),
            torch.cat([linear.scale for linear in linears]),
            torch.cat(biases) if biases else None,
        )

    def forward(self, x: Tensor) -> Tensor:
        return fp8_linear(x, self.q, self.scale, self.bias)


def device_obstacle(device: torch.device) -> str | None:
    """Return why no layer on a device can multiply FP8 activations; None: layers can."""
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability >= _CAPABILITY:
            return None
        return f"the card has compute capability {capability[0]}.{capability[1]}, below 8.9"
    return None if os.environ.get("TRITON_INTERPRET") == "1" else "the device is no GPU"


def layer_obstacle(stored: StoredLinear) -> str | None:
    """Return why a layer of a checkpoint cannot be an `Fp8Linear`; None: it can."""
    if stored.kind != "fp8":
        return f"weights of the kind {stored.kind}"
    if odd := [size for size in stored.shape if size % BLOCK]:
        return f"a width of {odd[0]}, which {BLOCK} does not divide"
    if stored.block != (BLOCK, BLOCK):
        return f"a scale for {stored.block[0]} x {stored.block[1]} weights, not {BLOCK} x {BLOCK}"
    if not stored.scheme.rounds_inputs:
        return "activations without dynamic scales of 128 inputs"
    return None


def experts_obstacle(module: Any, parts: Iterable[StoredLinear | None]) -> str | None:
    """Return why experts cannot multiply FP8 activations; None: they can.

    Args:
        module: one of `packed_layers.experts_of`.
        parts: of all experts, as the checkpoint stores them; None: as plain numbers.
    """
    gate = find_gate(module)
    if gate is None or gate.activation != "silu":
        return "experts whose activation is not SiLU"
    if module.has_bias:
        return "experts with a bias"
    if not module.is_concatenated:
        return "experts whose rows of gate and up take turns"
    reasons = (
        layer_obstacle(part) if part else "weights of experts that are not FP8" for part in parts
    )
    return next(filter(None, reasons), None)


def multiplies_fp8(module: nn.Module) -> bool:
    """Return whether a layer multiplies FP8 activations."""
    experts = getattr(module, "expert_weights", None)
    return isinstance(module, Fp8Linear) or (experts is not None and experts.fp8_activations)
