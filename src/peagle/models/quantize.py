"""Quantise the layers of a target or a head while it loads: weights alone, without calibration.

fp8 and int8 have a scale for each row of a weight, int4 one for each group of 128 inputs, or of 32
where 128 do not divide them. Embedding, norms, routers and lm_head keep their type.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from peagle.config.speculative import Quantization
from peagle.errors import UserError
from peagle.kernels.linear.experts import ExpertWeights
from peagle.kernels.linear.packed_weights import PackedWeight, pack_fp8, pack_int4, pack_int8
from peagle.models.drafter import Drafter
from peagle.models.packed_layers import (
    PackedLinear,
    experts_of,
    find_gate,
    hold_experts,
    use_experts,
)
from peagle.models.target_attention import decoder_layers

_GROUPS = (128, 32)


@torch.no_grad()
def quantize_model(
    model: transformers.PreTrainedModel,
    quantization: Quantization,
    device: torch.device,
    *,
    unpack: bool,
) -> None:
    """Quantise a model in place, one weight at a time, and move it to a device.

    Args:
        model: with plain weights, wherever they are.
        quantization: type of the weights of its layers.
        device: where they are quantised, and stay.
        unpack: keep plain weights that have the quantised values.

    Raises:
        UserError: a layer cannot have this type.
    """
    names = {id(module): name for name, module in model.named_modules()}
    experts = experts_of(model)
    for module in experts:
        _quantize_experts(module, names[id(module)], quantization, device, unpack=unpack)
    routers = {id(linear) for module in experts for linear in _routers(model, module, names)}
    for layer in decoder_layers(model):
        _quantize_linears(layer, routers, names, quantization, device, unpack=unpack)
    nn.Module.to(model, device)
    if not unpack:
        use_experts(model)


@torch.no_grad()
def quantize_head(drafter: Drafter, quantization: Quantization, *, unpack: bool) -> None:
    """Quantise the layers of a draft head in place; `fc`, embedding and lm_head keep their type.

    Raises:
        UserError: a layer cannot have this type.
    """
    names = {id(module): f"the head's {name}" for name, module in drafter.named_modules()}
    device = drafter.fc.weight.device
    for layer in drafter.layers:
        _quantize_linears(layer, set(), names, quantization, device, unpack=unpack)


def _quantize_linears(
    layer: nn.Module,
    spared: set[int],
    names: Mapping[int, str],
    quantization: Quantization,
    device: torch.device,
    *,
    unpack: bool,
) -> None:
    """Quantise the linear layers within a module, but for the layers whose ids are `spared`."""
    for module in list(layer.modules()):
        for last, linear in list(module.named_children()):
            if type(linear) is not nn.Linear or id(linear) in spared:
                continue
            packed = pack_weight(linear.weight.to(device), quantization, names[id(linear)])
            if unpack:
                linear.weight.data = packed.unpack(linear.weight.dtype)
            else:
                bias = None if linear.bias is None else linear.bias.to(device)
                setattr(module, last, PackedLinear(packed, bias))


def pack_weight(weight_NK: Tensor, quantization: Quantization, name: str) -> PackedWeight:
    """Quantise the weight of the layer `name`.

    Raises:
        UserError: its inputs do not divide into groups.
    """
    inputs = weight_NK.shape[1]
    if quantization == "fp8":
        return pack_fp8(weight_NK, (1, inputs))
    if quantization == "int8":
        return pack_int8(weight_NK, (1, inputs))
    group = next((group for group in _GROUPS if inputs % group == 0), None)
    if group is None:
        raise UserError(
            f"quantization is 'int4', but {name} has {inputs} inputs; expected a multiple of "
            f"{_GROUPS[-1]}. Choose int8 or fp8."
        )
    return pack_int4(weight_NK, group)


def _routers(model: nn.Module, experts: Any, names: Mapping[int, str]) -> Iterator[nn.Linear]:
    """Yield the linear layers beside experts that choose among them, or open and close one."""
    beside = model.get_submodule(names[id(experts)].rpartition(".")[0])
    for module in beside.modules():
        if isinstance(module, nn.Linear) and module.out_features in (1, experts.num_experts):
            yield module


def _quantize_experts(
    module: Any, name: str, quantization: Quantization, device: torch.device, *, unpack: bool
) -> None:
    gate = find_gate(module)
    if gate is None:
        raise UserError(
            f"quantization is {quantization!r}, but the experts {name} have an activation that "
            "peagle does not compute over quantised weights. Leave the option out."
        )
    weights: list[PackedWeight] = []
    for part in ("gate_up_proj", "down_proj"):
        parameter = getattr(module, part)
        packed: list[PackedWeight] = []
        for stored in parameter:
            matrix = stored.to(device)
            matrix = matrix.mT.contiguous() if module.is_transposed else matrix
            packed.append(pack_weight(matrix, quantization, f"{name}.{part}"))
            if unpack:
                plain = packed.pop().unpack(parameter.dtype)
                stored.copy_(plain.mT if module.is_transposed else plain)
        if packed:
            weights.append(PackedWeight.stack(packed))
    if not unpack:
        biases: list[Tensor | None] = [None, None]
        if module.has_bias:
            parts = (module.gate_up_proj_bias, module.down_proj_bias)
            biases = [bias.detach().to(device) for bias in parts]
        hold_experts(module, ExpertWeights(weights[0], weights[1], gate, biases[0], biases[1]))
