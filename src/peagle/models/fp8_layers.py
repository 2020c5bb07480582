"""Which layers of a target multiply activations in FP8 with the FP8 weights of a checkpoint.

A linear layer, or the experts of a mixture, does so if its checkpoint was made for such products:
scales of weights for blocks of 128 x 128, and scales of activations that are found while the model
runs.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from peagle.kernels.linear.fp8_activations import BLOCK
from peagle.kernels.linear.fp8_linear import fp8_obstacle
from peagle.models.packed_layers import PackedLinear, find_gate
from peagle.models.quantization import StoredLinear


def device_obstacle(device: torch.device) -> str | None:
    """Return why no layer on a device can multiply FP8 activations; None: layers can."""
    if device.type == "cuda":
        return fp8_obstacle(device)
    return None if os.environ.get("TRITON_INTERPRET") == "1" else "the device is no GPU"


def layer_obstacle(stored: StoredLinear) -> str | None:
    """Return why a layer of a checkpoint cannot multiply FP8 activations; None: it can."""
    if stored.kind != "fp8":
        return f"weights of the kind {stored.kind}"
    if odd := [size for size in stored.shape if size % BLOCK]:
        return f"a width of {odd[0]}, which {BLOCK} does not divide"
    if stored.block != (BLOCK, BLOCK):
        return f"a scale for {stored.block[0]} x {stored.block[1]} weights, not {BLOCK} x {BLOCK}"
    if not stored.scheme.rounds_inputs:
        return "activations without dynamic scales of 128 inputs"
    return None


def experts_obstacle(
    module: Any,
    parts: Iterable[StoredLinear | None],
    dtype: torch.dtype,
    device: torch.device,
) -> str | None:
    """Return why experts cannot multiply FP8 activations; None: they can.

    Args:
        module: one of `packed_layers.experts_of`.
        parts: of all experts, as the checkpoint stores them; None: as plain numbers.
        dtype: type of the model's activations.
        device: where it runs.
    """
    if device.type == "cuda" and dtype != torch.bfloat16:
        return f"experts in {str(dtype).removeprefix('torch.')}, not bfloat16"
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
    if isinstance(module, PackedLinear):
        return module.numbers is not None
    experts = getattr(module, "expert_weights", None)
    return experts is not None and experts.fp8_activations
