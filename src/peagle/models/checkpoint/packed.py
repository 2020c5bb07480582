"""Heads that are stored quantised: their linear layers are read as a target's are.

`pack_tensors` writes them as compressed-tensors does, with a bfloat16 scale for each group of
inputs. `Rounding` gives a head in training the weights that its file will hold.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from peagle.errors import CheckpointError
from peagle.kernels.linear.packed_weights import PackedWeight, int4_scale
from peagle.models.checkpoint.ends import ENDS
from peagle.models.checkpoint.files import object_at
from peagle.models.checkpoint.weights import FUSED, parts_in, tensor_shapes
from peagle.models.drafter import Drafter, DrafterConfig
from peagle.models.head_quantization import HeadQuantization, StoredQuantization
from peagle.models.packed_layers import PackedLinear
from peagle.models.quantization import PackedLinearWeight, is_packed, read_linear
from peagle.models.quantization_scheme import check_config

QUANTIZATION_KEY = "quantization_config"
_BITS: dict[StoredQuantization, int] = {"int8": 8, "int4": 4}
_LARGEST: dict[StoredQuantization, int] = {"int8": 127, "int4": 7}
_FORMATS: dict[StoredQuantization, str] = {"int8": "int-quantized", "int4": "pack-quantized"}
_PER_WORD = 8  # numbers of 4 bits in an int32


def unpack_tensors(
    tensors: dict[str, Tensor], config: DrafterConfig, data: Mapping[str, Any], source: str
) -> dict[str, PackedWeight]:
    """Put plain float32 weights in the place of the packed ones of a head.

    Args:
        tensors: all of the head, by canonical name.
        config: shape of the head.
        data: its config.json.
        source: the file, for messages.

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
    """Return the last names of the tensors of a layer."""
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


# ---- writing ----


def layer_types(
    shapes: Mapping[str, Sequence[int]], quantization: HeadQuantization
) -> dict[str, StoredQuantization]:
    """Return the type that each linear layer of a head gets, by the layer's name.

    Args:
        shapes: of the head's tensors, by canonical name.
        quantization: how the layers are to be stored.

    Raises:
        UserError: as `HeadQuantization.types`.
    """
    matrices = {name: shape for name, shape in shapes.items() if len(shape) == 2}
    layers = {n.removesuffix(".weight"): s[1] for n, s in matrices.items() if n not in ENDS}
    return quantization.types(layers)


def pack_tensors(
    tensors: Mapping[str, Tensor],
    quantization: HeadQuantization,
    scales: Mapping[str, Tensor] | None = None,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Quantise the linear layers of a head, symmetrically and rounded to nearest.

    Of the maps of a vocabulary d2t is stored alone.

    Args:
        tensors: all of the head, by canonical name.
        quantization: how.
        scales: bfloat16 [N, K / group] by the layers' names; None chooses them.

    Returns:
        the tensors to store, and the quantization_config that describes them.

    Raises:
        UserError: as `HeadQuantization.types`.
    """
    stored, group = compact_maps(tensors), quantization.group_size
    targets: dict[StoredQuantization, list[str]] = {}
    shapes = {name: value.shape for name, value in tensors.items()}
    for layer, one in layer_types(shapes, quantization).items():
        weight, scale = stored.pop(f"{layer}.weight"), None if scales is None else scales[layer]
        packed = _pack(weight, one, group, scale)
        stored |= {f"{layer}.{last}": value for last, value in packed.items()}
        targets.setdefault(one, []).append(layer)
    groups = {
        f"group_{number}": {
            "targets": sorted(layers),
            "weights": {
                "num_bits": _BITS[one],
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": group,
            },
            "format": _FORMATS[one],
        }
        for number, (one, layers) in enumerate(targets.items())
    }
    formats = {str(one["format"]) for one in groups.values()}
    return stored, {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "config_groups": groups,
        "ignore": [],
    }


def compact_maps(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a head without t2d, which follows from d2t, and d2t in 32 bits."""
    kept = {name: value for name, value in tensors.items() if name != "t2d"}
    return kept | ({"d2t": kept["d2t"].to(torch.int32)} if "d2t" in kept else {})


def _pack(
    weight: Tensor, quantization: StoredQuantization, group: int, scale: Tensor | None
) -> dict[str, Tensor]:
    """Return the tensors that store one weight [N, K], by their last names."""
    if scale is None:
        scale = _scale_of(weight, quantization, group)
    q = _rounded(weight, quantization, scale).flatten(1)
    if quantization == "int8":
        return {"weight": q.to(torch.int8), "weight_scale": scale}
    shifts = torch.arange(0, 4 * _PER_WORD, 4)
    words = ((q.long() + 8).unflatten(1, (-1, _PER_WORD)) << shifts).sum(-1)
    return {
        "weight_packed": words.to(torch.int32),
        "weight_scale": scale,
        "weight_shape": torch.tensor(weight.shape),
    }


def _scale_of(weight: Tensor, quantization: StoredQuantization, group: int) -> Tensor:
    """Return the bfloat16 scales [N, K / group] of a weight [N, K]."""
    if quantization == "int4":
        return int4_scale(weight, group).to(torch.bfloat16)
    groups = weight.float().unflatten(1, (-1, group))
    least = torch.finfo(torch.float32).tiny
    return (groups.abs().amax(-1) / _LARGEST["int8"]).clamp_min(least).to(torch.bfloat16)


def _rounded(weight: Tensor, quantization: StoredQuantization, scale: Tensor) -> Tensor:
    """Return the integers, float32 [N, K / group, group], of a weight [N, K] and its scales."""
    largest = _LARGEST[quantization]
    groups = weight.float().unflatten(1, (scale.shape[1], -1))
    ratio = groups / scale.float().unsqueeze(-1)
    return ratio.round_().clamp_(-largest - (quantization == "int4"), largest)


# ---- training ----


class Rounding:
    """Rounds the linear layers of a head, while it is trained, to the weights of its later file.

    Attributes:
        quantization: how the layers will be stored.
        names: names of the parameters of `Drafter` that are rounded.
        scales: bfloat16 [N, K / group] of the last `round_into`, by the layers' names in the
            checkpoint.

    Raises:
        UserError: as `HeadQuantization.types`.
    """

    def __init__(self, config: DrafterConfig, quantization: HeadQuantization) -> None:
        self.quantization = quantization
        self.scales: dict[str, Tensor] = {}
        shapes = tensor_shapes(config)
        self._types = layer_types(shapes, quantization)
        self._sizes = {layer: prod(shapes[f"{layer}.weight"]) for layer in self._types}
        self._parts: dict[str, list[tuple[str, int]]] = {}
        with torch.device("meta"):
            skeleton = Drafter(config)
        for name, value in skeleton.named_parameters():
            parts = [(n.removesuffix(".weight"), rows) for n, rows in parts_in(name, value, config)]
            if parts[0][0] in self._types:
                self._parts[name] = parts
        self.names = frozenset(self._parts)

    @torch.no_grad()
    def round_into(self, head: Tensor, name: str, weight: Tensor) -> None:
        """Write a weight into the head, rounded: W[n, k] = scale[n, k // group] * q[n, k].

        Args:
            head: the parameter, [N, K] in the type that the head computes in.
            name: its name, one of `names`.
            weight: [N, K], in float32 or wider.
        """
        parts = self._parts[name]
        counts = [rows for _, rows in parts]
        for (layer, _), *pair in zip(parts, head.split(counts), weight.split(counts), strict=True):
            self._round_layer(layer, *pair)

    def _round_layer(self, layer: str, place: Tensor, weight: Tensor) -> None:
        one = self._types[layer]
        self.scales[layer] = scale = _scale_of(weight, one, self.quantization.group_size)
        q = _rounded(weight, one, scale)
        place.copy_(q.mul_(scale.float().unsqueeze(-1)).flatten(1))

    def pack(self, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Pack the head's tensors, which `round_into` wrote, as `pack_tensors` does.

        The stored integers and scales come from the last `round_into`: a weight of bfloat16 is less
        than half a step off the number that it was rounded from.
        """
        scales = {layer: scale.cpu() for layer, scale in self.scales.items()}
        return pack_tensors(tensors, self.quantization, scales)

    @property
    def largest(self) -> int:
        """Return the count of numbers in the largest layer."""
        return max(self._sizes.values())

    @property
    def scale_bytes(self) -> int:
        """Return the bytes of the scales of all layers."""
        return 2 * sum(self._sizes.values()) // self.quantization.group_size

    @property
    def stored_bytes(self) -> int:
        """Return the bytes of all layers in a file."""
        bits = sum(_BITS[self._types[layer]] * size for layer, size in self._sizes.items())
        return bits // 8 + self.scale_bytes
