"""Heads that are stored quantised: their linear layers are read as those of targets are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from peagle.errors import CheckpointError
from peagle.kernels.packed_weights import PackedWeight
from peagle.models.checkpoint.files import object_at
from peagle.models.checkpoint.weights import FUSED, tensor_shapes
from peagle.models.drafter import Drafter, DrafterConfig
from peagle.models.packed_layers import PackedLinear
from peagle.models.quantization import PackedLinearWeight, is_packed, read_linear
from peagle.models.quantization_scheme import check_config

_KEY = "quantization_config"


def unpack_tensors(
    tensors: dict[str, Tensor], config: DrafterConfig, data: Mapping[str, Any], source: str
) -> dict[str, PackedWeight]:
    """Put plain float32 weights in the place of the packed ones of a head.

    Args:
        tensors: all of the head, by canonical name.
        config: shape of the head.
        data: its config.json.
        source: what to name in messages.

    Returns:
        the packed weight [N, K] of each linear layer that has one and keeps the order of its
        inputs, by the layer's name.

    Raises:
        CheckpointError: quantization_config or a packed weight cannot be read.
    """
    found = object_at(data, _KEY) or object_at(object_at(data, "transformer_layer_config"), _KEY)
    if not found:
        return {}
    try:
        check_config(found)
        stored = {
            name.removesuffix(".weight"): _read(tensors, name.removesuffix(".weight"), shape, found)
            for name, shape in tensor_shapes(config).items()
            if name.endswith(".weight") and is_packed(_suffixes(tensors, name[: -len("weight")]))
        }
    except CheckpointError as error:
        raise CheckpointError(f"{source}: {error}") from None
    packed = {}
    for layer, one in stored.items():
        for suffix in _suffixes(tensors, f"{layer}.") - {"bias"}:
            del tensors[f"{layer}.{suffix}"]
        weight = one.weight.unpack(torch.float32)
        if one.input_order is None:
            packed[layer] = one.weight
        else:
            weight[:, one.input_order] = weight.clone()
        tensors[f"{layer}.weight"] = weight
    return packed


def _suffixes(tensors: Mapping[str, Tensor], prefix: str) -> set[str]:
    """The last names of the tensors of a layer."""
    rest = (name.removeprefix(prefix) for name in tensors if name.startswith(prefix))
    return {suffix for suffix in rest if "." not in suffix}


def _read(
    tensors: Mapping[str, Tensor], layer: str, shape: tuple[int, ...], found: Mapping[str, Any]
) -> PackedLinearWeight:
    outputs, inputs = shape
    return read_linear(lambda last: tensors.get(f"{layer}.{last}"), layer, (outputs, inputs), found)


def hold_packed(drafter: Drafter, packed: Mapping[str, PackedWeight]) -> None:
    """Let the layers of a head whose weights are packed compute with them, in place.

    A projection that joins several layers of the checkpoint stays plain unless all of them are
    stored in one format.
    """
    for parent_name, parent in list(drafter.layers.named_modules()):
        for last, linear in list(parent.named_children()):
            if type(linear) is not nn.Linear:
                continue
            names = [f"layers.{parent_name}.{part}" for part in FUSED.get(last, (last,))]
            parts = [packed[name] for name in names if name in packed]
            kinds = {(w.format, w.block[1], w.zero is None) for w in parts}
            if len(parts) == len(names) and len(kinds) == 1:
                joined = _moved(PackedWeight.concatenate(parts), linear.weight.device)
                setattr(parent, last, PackedLinear(joined, linear.bias))


def _moved(weight: PackedWeight, device: torch.device) -> PackedWeight:
    tensors = {name: getattr(weight, name) for name in ("data", "scale", "zero")}
    return replace(weight, **{n: None if t is None else t.to(device) for n, t in tensors.items()})
