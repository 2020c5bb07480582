"""Heads that are stored quantised: their linear layers are read as those of targets are.

`pack_tensors` writes them as compressed-tensors does, with a bfloat16 scale for each group of
inputs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from peagle.errors import CheckpointError, UserError
from peagle.kernels.packed_weights import PackedWeight, pack_int4, pack_int8
from peagle.models.checkpoint.files import object_at
from peagle.models.checkpoint.weights import FUSED, tensor_shapes
from peagle.models.drafter import Drafter, DrafterConfig
from peagle.models.packed_layers import PackedLinear
from peagle.models.quantization import PackedLinearWeight, is_packed, read_linear
from peagle.models.quantization_scheme import check_config

QUANTIZATION_KEY = "quantization_config"
StoredQuantization = Literal["int8", "int4"]
_BITS: dict[StoredQuantization, int] = {"int8": 8, "int4": 4}
_FORMATS: dict[StoredQuantization, str] = {"int8": "int-quantized", "int4": "pack-quantized"}
_PER_WORD = 8  # numbers of 4 bits in an int32
_INT4_INPUTS = 32  # of which `PackedWeight` holds a multiple


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
    found = quantization_in(data)
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


def quantization_in(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the quantization_config in the config.json of a head; empty where it has none.

    Raises:
        CheckpointError: it is no object.
    """
    layers = object_at(data, "transformer_layer_config")
    return object_at(data, QUANTIZATION_KEY) or object_at(layers, QUANTIZATION_KEY)


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


# ---- writing ------------------------------------------------------------------------------------


def pack_tensors(
    tensors: Mapping[str, Tensor], types: Mapping[StoredQuantization, Collection[str]], group: int
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Quantise linear layers of a head, symmetrically and rounded to nearest.

    Args:
        tensors: all of the head, by canonical name.
        types: names of the layers that get each type ("layers.0.mlp.down_proj").
        group: inputs that share a scale.

    Returns:
        the tensors to store, and the quantization_config that describes them.

    Raises:
        UserError: a layer does not divide into such groups, or INT4 cannot hold its inputs.
    """
    stored = dict(tensors)
    groups: dict[str, Any] = {}
    for quantization, layers in types.items():
        for layer in layers:
            weight = stored.pop(f"{layer}.weight")
            if weight.shape[1] % group:
                raise UserError(
                    f"The group size is {group} and {layer!r} has {weight.shape[1]} inputs; "
                    "expected a size that divides the inputs of every layer."
                )
            if quantization == "int4" and weight.shape[1] % _INT4_INPUTS:
                raise UserError(
                    f"{layer!r} has {weight.shape[1]} inputs; expected a multiple of "
                    f"{_INT4_INPUTS} for int4. Name it in --int8-layers, or take int8."
                )
            packed = _pack(weight, quantization, group)
            stored |= {f"{layer}.{last}": value for last, value in packed.items()}
        groups[f"group_{len(groups)}"] = {
            "targets": sorted(layers),
            "weights": {
                "num_bits": _BITS[quantization],
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": group,
            },
            "format": _FORMATS[quantization],
        }
    formats = {one["format"] for one in groups.values()}
    return stored, {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "config_groups": groups,
        "ignore": [],
    }


def _pack(weight: Tensor, quantization: StoredQuantization, group: int) -> dict[str, Tensor]:
    """Return the tensors that store one weight [N, K], by their last names."""
    found = pack_int4(weight, group) if quantization == "int4" else pack_int8(weight, (1, group))
    assert found.scale is not None
    scale = found.scale.to(torch.bfloat16).contiguous()
    # Rounded once more, for the scale that is stored.
    largest = 2 ** (_BITS[quantization] - 1) - 1
    ratio = weight.float().unflatten(1, (-1, group)) / scale.float().unsqueeze(-1)
    q = ratio.round().clamp(-largest - (quantization == "int4"), largest).flatten(1)
    if quantization == "int8":
        return {"weight": q.to(torch.int8), "weight_scale": scale}
    shifts = torch.arange(0, 4 * _PER_WORD, 4)
    words = ((q.long() + 8).unflatten(1, (-1, _PER_WORD)) << shifts).sum(-1)
    return {
        "weight_packed": words.to(torch.int32),
        "weight_scale": scale,
        "weight_shape": torch.tensor(weight.shape),
    }
