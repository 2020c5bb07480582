"""Weights of quantised checkpoints, read as published into `PackedWeight`.

`models.quantization_scheme` says how the weight of a layer is stored; the shape and the type of
every tensor of the layer follow from that and from the layer's sizes. `check_linear` compares them
with the stored tensors, without the values. Stored scales for activations are left out.

| method | weights |
|---|---|
| fp8, fbgemm_fp8 | e4m3, with a scale for blocks, for rows, or for all |
| compressed-tensors | e4m3 or int8 likewise; int4 and int8 packed into words, in groups |
| gptq (versions 1 and 2), awq (gemm) | int4 in groups, with zeros |
| mxfp4 | e2m1 of experts, with scales of 32 inputs |

Shapes: N outputs, K inputs, E experts.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from peagle.errors import CheckpointError
from peagle.kernels.linear.packed_weights import (
    MAX_MX_SCALE,
    MX_INPUTS,
    PackedWeight,
    make_fp8,
    make_int4,
    make_mxfp4,
)
from peagle.models.quantization_scheme import Scheme, check_config, scheme_of

# Which of eight outputs a place in a word of AWQ's has, from the low bits on.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_MIN_INPUTS = 16  # of a scale, for the matrix units
_MIN_INT4_INPUTS = 32  # of a layer, see `kernels.linear.packed_weights`
# Last names of tensors that only a quantised weight has.
_MARKERS = {
    *("weight_scale", "weight_scale_inv", "weight_packed", "weight_zero_point", "weight_shape"),
    *("weight_g_idx", "weight_global_scale", "qweight", "qzeros", "scales", "g_idx"),
    *("compressed", "bitmask"),
}
_SCALE_NAMES = ("weight_scale_inv", "weight_scale", "scales")
# How the names of tensors for activations begin.
_OF_ACTIVATIONS = ("input_", "output_", "activation_")
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_SCALES = (*_FLOATS, torch.float8_e8m0fnu)
_CONVERT_AGAIN = "Copy or convert the checkpoint again."

Read = Callable[[str], Tensor | None]
Kind = Literal["fp8", "int8", "int8 in words", "int4 in words", "gptq", "awq"]
_IN_COLUMNS = ("gptq", "awq")  # a column for each output, and packed zeros


@dataclass(frozen=True, slots=True)
class PackedLinearWeight:
    """The weight of one linear layer.

    Attributes:
        weight: [N, K].
        input_order: int64 [K]: the input that each column multiplies; None: they are in order.
    """

    weight: PackedWeight
    input_order: Tensor | None = None


@dataclass(frozen=True, slots=True)
class StoredLinear:
    """The tensors of a packed weight, with the shapes and types that they must have.

    Attributes:
        name: the layer's name, for errors.
        kind: how the numbers are stored.
        shape: N and K.
        block: rows and inputs that share a scale.
        tensors: by their last names.
        scheme: the meaning of quantization_config.
    """

    name: str
    kind: Kind
    shape: tuple[int, int]
    block: tuple[int, int]
    tensors: Mapping[str, Tensor]
    scheme: Scheme

    @property
    def scale_name(self) -> str:
        """Return the last name of the tensor of scales."""
        return next(suffix for suffix in self.tensors if suffix in _SCALE_NAMES)

    @property
    def format_text(self) -> str:
        """Return the format as text; stacked weights, as experts' are, must have it in common."""
        zeros = ", zero points" if "weight_zero_point" in self.tensors else ""
        return f"{self.kind}, a scale for {self.block[0]} x {self.block[1]}{zeros}"


@dataclass(frozen=True, slots=True)
class _Expected:
    """The shape and type that a tensor of a layer must have.

    Attributes:
        shapes: it has one of them.
        dtypes: it has one of them; (): any.
        is_needed: the layer cannot be without it.
    """

    shapes: list[tuple[int, ...]]
    dtypes: tuple[torch.dtype, ...]
    is_needed: bool = True


def quantization_of(config: Any) -> dict[str, Any] | None:
    """Return the quantization_config of a model's configuration; None if it has none.

    Raises:
        CheckpointError: as `quantization_scheme.check_config`.
    """
    found = getattr(config, "quantization_config", None)
    if found is None:
        found = getattr(config.get_text_config(), "quantization_config", None)
    if found is None:
        return None
    if not isinstance(found, Mapping) and not hasattr(found, "to_dict"):
        raise CheckpointError(
            f"The checkpoint has the quantization_config {str(found)[:100]!r}; expected an object. "
            "Correct its config.json, or copy the checkpoint again."
        )
    data = dict(found) if isinstance(found, Mapping) else found.to_dict()
    data = {**data, "quant_method": data.get("quant_method", data.get("quantization_method"))}
    check_config(data)
    return data


def is_packed(suffixes: set[str]) -> bool:
    """Return whether the tensors beside each other, by their last names, are a packed weight."""
    return bool(suffixes & _MARKERS)


def check_linear(
    read: Read,
    name: str,
    shape: tuple[int, int],
    quantization: Mapping[str, Any],
    suffixes: Collection[str] = (),
) -> StoredLinear:
    """Return the tensors of a linear layer's packed weight; their values are not looked at.

    Args:
        read: returns a tensor of the layer by its last name, "weight_scale"; None: there is none.
        name: the layer's name, for errors.
        shape: N and K.
        quantization: as `quantization_of` returned it.
        suffixes: last names of all tensors that are stored for the layer.

    Raises:
        CheckpointError: a tensor is missing, surplus, misshapen or of a type that cannot be read;
            or the configuration cannot be, or describes what peagle does not read.
    """
    scheme = scheme_of(quantization, name)
    kind = _kind_of(scheme, read, name)
    blocks = [_block_of(block, shape, kind, name) for block in scheme.blocks]
    if read("weight_g_idx") is not None:
        raise CheckpointError(
            f"The weight of {name!r} orders its inputs by activation (weight_g_idx), which peagle "
            "reads from GPTQ checkpoints only. Quantise without actorder, or use "
            "`peagle serve --engine vllm`."
        )
    expected = _expected(kind, scheme, blocks, shape, read)
    tensors: dict[str, Tensor] = {}
    for suffix, one in expected.items():
        tensor = read(suffix)
        if tensor is not None:
            _check(tensor, f"{name}.{suffix}", one, scheme)
            tensors[suffix] = tensor
        elif one.is_needed:
            raise CheckpointError(
                f"The checkpoint lacks tensor {f'{name}.{suffix}'!r}: its quantization_config says "
                f"{_reason(suffix, scheme)}. {_CONVERT_AGAIN}"
            )
    for suffix in sorted(set(suffixes) - set(expected) - {"bias"}):
        if not suffix.startswith(_OF_ACTIVATIONS):
            raise CheckpointError(
                f"The checkpoint has tensor {f'{name}.{suffix}'!r}, which a layer of this kind "
                f"does not have ({scheme.text}). {_CONVERT_AGAIN}"
            )
    scales = next(tensor for suffix, tensor in tensors.items() if suffix in _SCALE_NAMES)
    per_block = scales.mT if kind in _IN_COLUMNS else scales
    block = next(b for b in blocks if tuple(per_block.shape) in _scale_shapes(b, shape))
    return StoredLinear(name, kind, shape, block, tensors, scheme)


def read_linear(
    read: Read, name: str, shape: tuple[int, int], quantization: Mapping[str, Any]
) -> PackedLinearWeight:
    """Read the packed weight of a linear layer; `check_linear` describes the arguments.

    Raises:
        CheckpointError: as `check_linear`; or scales, zero points or the order of inputs have
            values that cannot be.
    """
    stored = check_linear(read, name, shape, quantization)
    _check_scales(stored)
    _check_stored_shape(stored)
    if stored.kind == "gptq":
        return _arrange_gptq(stored, quantization.get("checkpoint_format") == "gptq_v2")
    if stored.kind == "awq":
        return _arrange_awq(stored)
    if stored.kind == "int4 in words":
        return PackedLinearWeight(_arrange_words(stored))
    return PackedLinearWeight(_arrange_bytes(stored))


def check_mxfp4(blocks: Tensor, scales: Tensor, name: str, shape: tuple[int, int, int]) -> None:
    """Refuse weights of experts, as gpt-oss publishes them, of other shapes or types.

    Args:
        blocks: uint8 [E, N, K / 32, 16], the number of the even input in the low half of a byte.
        scales: uint8 [E, N, K / 32].
        name: of the weights, for errors.
        shape: E, N and K.

    Raises:
        CheckpointError: naming the tensor.
    """
    groups = (*shape[:2], shape[2] // MX_INPUTS)
    if shape[2] % MX_INPUTS:
        raise CheckpointError(
            f"The weights of {name!r} have {shape[2]} inputs; expected a multiple of {MX_INPUTS} "
            "for MXFP4. `peagle serve --engine vllm` may serve the model."
        )
    for suffix, tensor, expected in (("blocks", blocks, (*groups, 16)), ("scales", scales, groups)):
        if tensor.dtype != torch.uint8 or tuple(tensor.shape) != expected:
            raise CheckpointError(
                f"The checkpoint has {f'{name}_{suffix}'!r} as {_text(tensor)}; expected uint8 of "
                f"shape {list(expected)} (MXFP4: {shape[0]} experts of {shape[1]} x {shape[2]}). "
                f"{_CONVERT_AGAIN}"
            )


def read_mxfp4(
    blocks: Tensor, scales: Tensor, name: str, shape: tuple[int, int, int]
) -> PackedWeight:
    """Arrange weights of experts as gpt-oss publishes them; the arguments are `check_mxfp4`'s.

    Raises:
        CheckpointError: as `check_mxfp4`; or a scale is too large.
    """
    check_mxfp4(blocks, scales, name, shape)
    if int(scales.max()) > MAX_MX_SCALE:
        raise CheckpointError(
            f"The checkpoint has {int(scales.max())} in {name}_scales, which stands for 2 to the "
            f"power of {int(scales.max()) - 127}; expected at most {MAX_MX_SCALE}. Copy or convert "
            "the checkpoint again."
        )
    q = torch.stack((blocks & 0xF, blocks >> 4), -1).flatten(-3)
    return make_mxfp4(q, scales)


# ---- shapes and types ----


def _kind_of(scheme: Scheme, read: Read, name: str) -> Kind:
    if scheme.method in ("gptq", "awq"):
        if scheme.bits == 4:
            return "gptq" if scheme.method == "gptq" else "awq"
    elif (scheme.bits, scheme.is_float) == (8, True):
        return "fp8"
    elif (scheme.bits, scheme.is_float) == (8, False):
        if scheme.is_symmetric:
            return "int8" if read("weight_packed") is None else "int8 in words"
        raise CheckpointError(
            f"The weight of {name!r} has 8 bits and zero points, which peagle does not read. "
            "Quantise it symmetrically, or use `peagle serve --engine vllm`."
        )
    elif (scheme.bits, scheme.is_float) == (4, False) and scheme.blocks != ((0, 0),):
        return "int4 in words"
    raise CheckpointError(
        f"The weight of {name!r} is stored as {scheme.text}; peagle reads integers of 4 bits in "
        "groups, and of compressed-tensors integers of 8 bits and e4m3 too. `peagle serve "
        "--engine vllm` may serve the model."
    )


def _block_of(
    block: tuple[int, int], shape: tuple[int, int], kind: Kind, name: str
) -> tuple[int, int]:
    """Return the rows and inputs that share a scale in a layer; 0 in `block` means all of them."""
    n, k = shape
    rows, inputs = block[0] or n, min(block[1] or k, k)
    is_whole = inputs == k or (inputs % _MIN_INPUTS == 0 and (kind == "fp8" or k % inputs == 0))
    if not is_whole:
        raise CheckpointError(
            f"The weight of {name!r} has {k} inputs, and a scale for {inputs} of them; expected "
            f"groups of a multiple of {_MIN_INPUTS} inputs that divide them. Quantise it with "
            "other groups, or use `peagle serve --engine vllm`."
        )
    is_int4, has_packed_zeros = kind not in ("fp8", "int8", "int8 in words"), kind in _IN_COLUMNS
    if (is_int4 and k % _MIN_INT4_INPUTS) or (has_packed_zeros and n % 8):
        raise CheckpointError(
            f"The weight of {name!r} has {n} outputs and {k} inputs; expected a multiple of "
            f"{_MIN_INT4_INPUTS} inputs for integers of 4 bits, and of GPTQ and AWQ a multiple "
            "of 8 outputs. `peagle serve --engine vllm` may serve the model."
        )
    return rows, inputs


def _scale_shapes(block: tuple[int, int], shape: tuple[int, int]) -> list[tuple[int, ...]]:
    """Return the shapes that scales of a block may have, the usual one first."""
    rows, columns = -(-shape[0] // block[0]), -(-shape[1] // block[1])
    shapes: list[tuple[int, ...]] = [(rows, columns)]
    if columns == 1:
        shapes.append((rows,))
    return [*shapes, ()] if (rows, columns) == (1, 1) else shapes


def _expected(
    kind: Kind, scheme: Scheme, blocks: list[tuple[int, int]], shape: tuple[int, int], read: Read
) -> dict[str, _Expected]:
    """Return the types and shapes that the tensors of a layer must have, by their last names."""
    (n, k), group = shape, blocks[0][1]
    int32 = (torch.int32,)
    if kind in _IN_COLUMNS:
        words = (k // 8, n) if kind == "gptq" else (k, n // 8)
        found = {
            "qweight": _Expected([words], int32),
            "qzeros": _Expected([(k // group, n // 8)], int32),
            "scales": _Expected([(k // group, n)], _FLOATS),
        }
        if kind == "gptq":
            ordered = (torch.int32, torch.int64)
            found["g_idx"] = _Expected([(k,)], ordered, is_needed=scheme.has_order)
        return found
    scales = [one for block in blocks for one in _scale_shapes(block, shape)]
    zeros = _Expected(scales, (), is_needed=False)
    if kind == "int4 in words":
        scales = scales[:1]
        zeros = _Expected([(-(-n // 8), k // group)], int32, is_needed=not scheme.is_symmetric)
    found: dict[str, _Expected] = {}
    if kind in ("int4 in words", "int8 in words"):
        per_word = 8 if kind == "int4 in words" else 4
        found["weight_packed"] = _Expected([(n, -(-k // per_word))], int32)
        found["weight_shape"] = _Expected([(2,)], (torch.int64, torch.int32), is_needed=False)
    else:
        dtype = torch.float8_e4m3fn if kind == "fp8" else torch.int8
        found["weight"] = _Expected([shape], (dtype,))
    is_inverse = kind == "fp8" and read("weight_scale_inv") is not None
    name = "weight_scale_inv" if is_inverse else "weight_scale"
    return {**found, name: _Expected(scales, _SCALES), "weight_zero_point": zeros}


def _check(tensor: Tensor, name: str, expected: _Expected, scheme: Scheme) -> None:
    is_typed = not expected.dtypes or tensor.dtype in expected.dtypes
    if is_typed and tuple(tensor.shape) in expected.shapes:
        return
    names = [str(dtype).removeprefix("torch.") for dtype in expected.dtypes]
    types = " or ".join(names) if names else "numbers"
    shapes = " or ".join(str(list(shape)) for shape in dict.fromkeys(expected.shapes))
    raise CheckpointError(
        f"The checkpoint has {name!r} as {_text(tensor)}; expected {types} of shape {shapes} "
        f"({scheme.text}). {_CONVERT_AGAIN}"
    )


def _text(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {list(tensor.shape)}"


def _reason(suffix: str, scheme: Scheme) -> str:
    """Return why a layer needs a tensor."""
    if suffix == "g_idx":
        return "desc_act true, so the inputs have an order"
    if suffix == "weight_zero_point":
        return "symmetric false, so there are zero points"
    return scheme.text


# ---- values ----


def _check_scales(stored: StoredLinear) -> None:
    """Refuse scales that no quantiser writes: the tensor was not filled, or it is damaged.

    Integers may have scales below 0, and a few that were rounded to 0.
    """
    scales = stored.tensors[stored.scale_name].float()
    is_valid = scales.isfinite()
    if stored.kind == "fp8":
        is_valid &= scales > 0
    if bool(is_valid.all()) and bool(scales.any()):
        return
    wrong = scales[~is_valid].flatten()
    value = float(wrong[0]) if len(wrong) else 0.0
    expected = "finite numbers above 0" if stored.kind == "fp8" else "finite numbers, not all 0"
    name = f"{stored.name}.{stored.scale_name}"
    raise CheckpointError(
        f"The checkpoint has {value} in {name!r}, the scales of a weight; expected {expected}. "
        f"{_CONVERT_AGAIN}"
    )


def _refuse_nan(stored: StoredLinear) -> None:
    """Refuse e4m3 numbers that are NaN, which kernels would take for 480."""
    magnitudes = stored.tensors["weight"].view(torch.uint8) & 0x7F
    if int(magnitudes.max()) == 0x7F:
        raise CheckpointError(
            f"The checkpoint has NaN in {f'{stored.name}.weight'!r}; expected numbers of e4m3. "
            f"{_CONVERT_AGAIN}"
        )


def _check_stored_shape(stored: StoredLinear) -> None:
    found = stored.tensors.get("weight_shape")
    if found is not None and found.tolist() != list(stored.shape):
        raise CheckpointError(
            f"The checkpoint has {found.tolist()} in {f'{stored.name}.weight_shape'!r}; expected "
            f"{list(stored.shape)}, outputs and inputs of the layer. {_CONVERT_AGAIN}"
        )


def _scales_of_bytes(stored: StoredLinear) -> Tensor:
    """Return the scales of 8-bit numbers, float32 [N / rows, K / inputs]."""
    (n, k), tensors = stored.shape, stored.tensors
    zeros = tensors.get("weight_zero_point")
    if zeros is not None and bool(zeros.float().any()):
        raise CheckpointError(
            f"The weight of {stored.name!r} has 8 bits and zero points, which peagle does not "
            "read. Quantise it symmetrically, or use `peagle serve --engine vllm`."
        )
    rows, columns = -(-n // stored.block[0]), -(-k // stored.block[1])
    return tensors[stored.scale_name].float().reshape(rows, columns).contiguous()


def _arrange_bytes(stored: StoredLinear) -> PackedWeight:
    """Arrange compressed-tensors and FP8: 8-bit numbers, as they are or in words of q + 128."""
    tensors, scale = stored.tensors, _scales_of_bytes(stored)
    if stored.kind == "fp8":
        _refuse_nan(stored)
        return make_fp8(tensors["weight"], scale, stored.block)
    if stored.kind == "int8":
        return PackedWeight(tensors["weight"], "int8", scale, block=stored.block)
    words = tensors["weight_packed"].contiguous()
    q = words.view(torch.uint8)[:, : stored.shape[1]].to(torch.int16) - 128
    return PackedWeight(q.to(torch.int8), "int8", scale, block=stored.block)


def _nibbles(words: Tensor, dim: int) -> Tensor:
    """Unpack int32 words into eight numbers of 4 bits along a dimension, low bits first."""
    shifts = torch.arange(0, 32, 4, device=words.device, dtype=torch.int32)
    moved = words.movedim(dim, -1)
    return (moved.unsqueeze(-1) >> shifts & 0xF).to(torch.uint8).flatten(-2).movedim(-1, dim)


def _arrange_words(stored: StoredLinear) -> PackedWeight:
    """Arrange compressed-tensors: words along the inputs, of q + 8."""
    zeros = stored.tensors.get("weight_zero_point")
    if zeros is not None:
        zeros = _nibbles(zeros, 0)[: stored.shape[0]]
    q = _nibbles(stored.tensors["weight_packed"], 1)
    return make_int4(q, stored.tensors["weight_scale"], zeros, stored.block[1])


def _arrange_gptq(stored: StoredLinear, is_v2: bool) -> PackedLinearWeight:
    """Arrange words along the inputs, [K / 8, N]; version 1 stores each zero less one."""
    (_, k), group, tensors = stored.shape, stored.block[1], stored.tensors
    zero = _nibbles(tensors["qzeros"], 1).T
    if not is_v2:
        zero = zero + 1
    q, order = _nibbles(tensors["qweight"], 0).T, None
    groups = tensors.get("g_idx")
    if groups is not None and not torch.equal(
        groups.long(), torch.arange(k, device=groups.device) // group
    ):
        low, high = int(groups.min()), int(groups.max())
        if low < 0 or high >= k // group:
            raise CheckpointError(
                f"{stored.name + '.g_idx'!r} puts inputs into the groups {low} to {high}; expected "
                f"0 to {k // group - 1}. {_CONVERT_AGAIN}"
            )
        if not bool((groups.long().bincount(minlength=k // group) == group).all()):
            raise CheckpointError(
                f"{stored.name + '.g_idx'!r} puts different numbers of inputs into the groups; "
                f"expected {group} in each. {_CONVERT_AGAIN}"
            )
        order = torch.argsort(groups, stable=True)
        q = q[:, order]
    return PackedLinearWeight(make_int4(q, tensors["scales"].T, zero, group), order)


def _arrange_awq(stored: StoredLinear) -> PackedLinearWeight:
    """Arrange words along the outputs, [K, N / 8], of eight outputs in AWQ's order."""

    def in_order(packed: Tensor) -> Tensor:
        places = torch.tensor(_AWQ_ORDER, device=packed.device).argsort()
        return _nibbles(packed, 1).unflatten(1, (-1, 8))[..., places].flatten(1).T

    tensors = stored.tensors
    q, zero = in_order(tensors["qweight"]), in_order(tensors["qzeros"])
    return PackedLinearWeight(make_int4(q, tensors["scales"].T, zero, stored.block[1]))
