"""Weights of quantised checkpoints, read as published into `PackedWeight`.

What is stored beside a weight says how it is packed; the method of `quantization_config` decides
where that does not. Activations stay as they are: scales for them are left out.

| method | weights |
|---|---|
| fp8, fbgemm_fp8 | e4m3, with a scale for blocks, for rows, or for all |
| compressed-tensors | e4m3 or int8 likewise; int4 and int8 packed into words, in groups |
| gptq (versions 1 and 2), awq (gemm) | int4 in groups, with zeros |
| mxfp4 | e2m1 of experts, with scales of 32 inputs |

Shapes: N outputs, K inputs, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from peagle.errors import CheckpointError
from peagle.kernels.packed_weights import (
    MAX_MX_SCALE,
    PackedWeight,
    make_fp8,
    make_int4,
    make_mxfp4,
)

METHODS = ("fp8", "fbgemm_fp8", "compressed-tensors", "gptq", "awq", "mxfp4")
# Which of eight outputs a place in a word of AWQ's has, from the low bits on.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_MIN_INPUTS = 16  # of a scale, for the matrix units

Read = Callable[[str], Tensor | None]


@dataclass(frozen=True, slots=True)
class PackedLinearWeight:
    """The weight of one linear layer.

    Attributes:
        weight: [N, K].
        input_order: int64 [K]: the input that each column multiplies; None: they are in order.
    """

    weight: PackedWeight
    input_order: Tensor | None = None


def quantization_of(config: Any) -> dict[str, Any] | None:
    """Return the quantization_config of a model's configuration; None if it has none.

    Raises:
        CheckpointError: its method is none of `METHODS`.
    """
    found = getattr(config, "quantization_config", None)
    if found is None:
        found = getattr(config.get_text_config(), "quantization_config", None)
    if found is None:
        return None
    data = dict(found) if isinstance(found, Mapping) else found.to_dict()
    method = str(data.get("quant_method", data.get("quantization_method", "")))
    if method not in METHODS:
        raise CheckpointError(
            f"The target is quantised by {method or 'no method that its config.json names'!r}; "
            f"peagle reads {', '.join(METHODS)}. `peagle serve --engine vllm` may serve it."
        )
    return {**data, "quant_method": method}


def is_packed(suffixes: set[str]) -> bool:
    """Return whether the tensors beside each other, by their last names, are a packed weight."""
    markers = {"weight_packed", "qweight", "weight_scale", "weight_scale_inv"}
    return bool(suffixes & markers)


def read_linear(
    read: Read, name: str, shape: tuple[int, int], quantization: Mapping[str, Any]
) -> PackedLinearWeight:
    """Read the packed weight of a linear layer.

    Args:
        read: returns a tensor of the layer by its last name, "weight_scale"; None: there is none.
        name: the layer's name, for errors.
        shape: N and K.
        quantization: as `quantization_of` returned it.

    Raises:
        CheckpointError: a tensor is missing, misshapen or of a type that cannot be read.
    """
    if (words := read("qweight")) is not None:
        is_awq = quantization["quant_method"] == "awq"
        return (_read_awq if is_awq else _read_gptq)(words, read, name, shape, quantization)
    if (words := read("weight_packed")) is not None:
        return PackedLinearWeight(_read_words(words, read, name, shape))
    weight = read("weight")
    if weight is None:
        raise CheckpointError(f"The target lacks tensor {name + '.weight'!r}.")
    scale = read("weight_scale_inv")
    scale = read("weight_scale") if scale is None else scale
    assert scale is not None, "`is_packed` looks for it"
    if tuple(weight.shape) != shape or weight.dtype not in (torch.float8_e4m3fn, torch.int8):
        raise CheckpointError(
            f"The target has {name + '.weight'!r} as {weight.dtype} of shape "
            f"{list(weight.shape)}; expected float8_e4m3fn or int8 of shape {list(shape)}."
        )
    if (zeros := read("weight_zero_point")) is not None and bool(zeros.any()):
        raise CheckpointError(
            f"The weight of {name!r} has 8 bits and zero points, which peagle does not read. "
            "Quantise it symmetrically, or use `peagle serve --engine vllm`."
        )
    given = quantization.get("weight_block_size") or _block_structure(quantization)
    scale, block = _blocks_of(scale, name, shape, given)
    if weight.dtype == torch.int8:
        return PackedLinearWeight(PackedWeight(weight, "int8", scale, block=block))
    return PackedLinearWeight(make_fp8(weight, scale, block))


def read_mxfp4(blocks: Tensor, scales: Tensor, name: str) -> PackedWeight:
    """Arrange weights of experts as gpt-oss publishes them.

    Args:
        blocks: uint8 [E, N, K / 32, 16], the number of the even input in the low half of a byte.
        scales: uint8 [E, N, K / 32].
        name: of the weights, for errors.

    Raises:
        CheckpointError: their shapes or values cannot be.
    """
    is_shaped = blocks.ndim == 4 and blocks.shape[-1] == 16 and blocks.shape[:-1] == scales.shape
    if not is_shaped or blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
        raise CheckpointError(
            f"The target has {name}_blocks as {blocks.dtype} {list(blocks.shape)} and "
            f"{name}_scales as {scales.dtype} {list(scales.shape)}; expected uint8 "
            "[experts, outputs, inputs / 32, 16] and [experts, outputs, inputs / 32]."
        )
    if int(scales.max()) > MAX_MX_SCALE:
        raise CheckpointError(
            f"The target has {int(scales.max())} in {name}_scales, which stands for 2 to the power "
            f"of {int(scales.max()) - 127}; expected at most {MAX_MX_SCALE}. Copy or convert the "
            "checkpoint again."
        )
    q = torch.stack((blocks & 0xF, blocks >> 4), -1).flatten(-3)
    return make_mxfp4(q, scales)


# ---- scales ---------------------------------------------------------------------------------


def _block_structure(quantization: Mapping[str, Any]) -> Any:
    """The rows and inputs that a group of compressed-tensors names; None if none does."""
    for group in (quantization.get("config_groups") or {}).values():
        structure = ((group or {}).get("weights") or {}).get("block_structure")
        if structure:
            return structure
    return None


def _blocks_of(
    scale: Tensor, name: str, shape: tuple[int, int], given: Any
) -> tuple[Tensor, tuple[int, int]]:
    """A scale in float32 [N / rows, K / inputs], with rows and inputs."""
    n, k = shape
    scale = scale.float()
    if scale.numel() == 1:
        return scale.view(1, 1), (n, k)
    if scale.ndim == 1:
        scale = scale.unsqueeze(1)
    rows, columns = scale.shape if scale.ndim == 2 else (0, 0)
    if columns and rows == n and k % columns == 0 and k // columns >= _MIN_INPUTS:
        return scale, (1, k // columns)
    if given:
        block = int(given[0]), int(given[1])
        expected = (-(-n // block[0]), -(-k // block[1]))
        if (rows, columns) == expected and block[1] % _MIN_INPUTS == 0:
            return scale, block
    blocks = f"blocks of {given[0]} x {given[1]}" if given else "all, rows or groups of inputs"
    raise CheckpointError(
        f"The scale of {name!r} has shape {list(scale.shape)}, which does not divide a weight of "
        f"{n} x {k} into {blocks}. Convert the checkpoint with blocks that divide its layers."
    )


# ---- integers in words ----------------------------------------------------------------------


def _nibbles(words: Tensor, dim: int) -> Tensor:
    """Unpack int32 words into eight numbers of 4 bits along a dimension, low bits first."""
    shifts = torch.arange(0, 32, 4, device=words.device, dtype=torch.int32)
    moved = words.movedim(dim, -1)
    return (moved.unsqueeze(-1) >> shifts & 0xF).to(torch.uint8).flatten(-2).movedim(-1, dim)


def _check_words(words: Tensor, name: str, expected: tuple[int, ...]) -> None:
    if words.dtype != torch.int32 or tuple(words.shape) != expected:
        raise CheckpointError(
            f"The target has {name!r} as {words.dtype} of shape {list(words.shape)}; expected "
            f"int32 of shape {list(expected)} (4-bit numbers, eight in a word)."
        )


def _need(read: Read, name: str, suffix: str) -> Tensor:
    tensor = read(suffix)
    if tensor is None:
        raise CheckpointError(f"The target lacks tensor {f'{name}.{suffix}'!r}.")
    return tensor


def _group(k: int, groups: int, name: str) -> int:
    if k % 32 or k % groups or (k // groups) % _MIN_INPUTS:
        raise CheckpointError(
            f"The weight of {name!r} has {k} inputs in {groups} groups; expected a multiple of 32 "
            f"inputs, and groups that divide them, each of a multiple of {_MIN_INPUTS}."
        )
    return k // groups


def _read_words(words: Tensor, read: Read, name: str, shape: tuple[int, int]) -> PackedWeight:
    """compressed-tensors: words along the inputs, of q + 8 or q + 128."""
    n, k = shape
    scale, zeros = _need(read, name, "weight_scale"), read("weight_zero_point")
    if read("weight_g_idx") is not None:
        raise CheckpointError(
            f"The weight of {name!r} orders its inputs by activation (weight_g_idx), which peagle "
            "reads from GPTQ checkpoints only. Quantise without actorder, or use "
            "`peagle serve --engine vllm`."
        )
    if words.dtype == torch.int32 and tuple(words.shape) == (n, -(-k // 4)) and zeros is None:
        q = words.contiguous().view(torch.uint8)[:, :k].to(torch.int16) - 128
        scale, block = _blocks_of(scale, name, shape, None)
        return PackedWeight(q.to(torch.int8), "int8", scale, block=block)
    _check_words(words, f"{name}.weight_packed", (n, k // 8))
    group = _group(k, scale.shape[-1], name)
    if zeros is not None:
        zeros = _nibbles(zeros, 0)[:n]
    return make_int4(_nibbles(words, 1), scale, zeros, group)


def _read_gptq(
    words: Tensor, read: Read, name: str, shape: tuple[int, int], quantization: Mapping[str, Any]
) -> PackedLinearWeight:
    """Words along the inputs, [K / 8, N]; version 1 stores each zero less one."""
    n, k = shape
    _check_words(words, f"{name}.qweight", (k // 8, n))
    scale, zeros = _need(read, name, "scales").T, _need(read, name, "qzeros")
    group = _group(k, scale.shape[-1], name)
    _check_words(zeros, f"{name}.qzeros", (k // group, n // 8))
    zero = _nibbles(zeros, 1).T
    if quantization.get("checkpoint_format", "gptq") != "gptq_v2":
        zero = zero + 1
    q, order = _nibbles(words, 0).T, None
    groups = read("g_idx")
    if groups is not None and not torch.equal(
        groups.long(), torch.arange(k, device=groups.device) // group
    ):
        order = torch.argsort(groups, stable=True)
        if not bool((groups.long().bincount(minlength=k // group) == group).all()):
            raise CheckpointError(
                f"{name + '.g_idx'!r} puts different numbers of inputs into the groups; expected "
                f"{group} in each."
            )
        q = q[:, order]
    return PackedLinearWeight(make_int4(q, scale, zero, group), order)


def _read_awq(
    words: Tensor, read: Read, name: str, shape: tuple[int, int], quantization: Mapping[str, Any]
) -> PackedLinearWeight:
    """Words along the outputs, [K, N / 8], of eight outputs in AWQ's order."""
    n, k = shape
    if quantization.get("version", "gemm") not in ("gemm", "GEMM"):
        raise CheckpointError(
            f"The target is an AWQ checkpoint of version {quantization['version']!r}; expected "
            "'gemm'."
        )
    _check_words(words, f"{name}.qweight", (k, n // 8))
    scale, zeros = _need(read, name, "scales").T, _need(read, name, "qzeros")
    group = _group(k, scale.shape[-1], name)
    _check_words(zeros, f"{name}.qzeros", (k // group, n // 8))

    def in_order(packed: Tensor) -> Tensor:
        places = torch.tensor(_AWQ_ORDER, device=packed.device).argsort()
        return _nibbles(packed, 1).unflatten(1, (-1, 8))[..., places].flatten(1).T

    return PackedLinearWeight(make_int4(in_order(words), scale, in_order(zeros), group))
