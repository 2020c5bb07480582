"""Packed weights unpacked in Triton, in one pass, for products of many rows.

Shapes: E experts (left out of dense layers), N outputs, K inputs.
"""

from functools import cache

import torch
from torch import Tensor

from peagle.kernels.launch import launch
from peagle.kernels.linear.packed_weights import FORMATS, PackedWeight

# Four bytes or more for each thread, as the assembly needs them.
_TILE_ROWS, _TILE_INPUTS = 32, 256


def unpack_weight(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """Compute `PackedWeight.unpack` of a weight [E, N, K] or [N, K]."""
    from peagle.kernels.linear import packed_weights_triton

    scale, zero, stored, k = weight.scale, weight.zero, weight.data, weight.num_inputs
    if scale is None:
        return stored.to(dtype)
    assert zero is None or zero.stride() == scale.stride()
    n, (rows, inputs), experts = weight.num_outputs, weight.block, scale.shape[:-2]
    out = torch.empty(*experts, n, k, dtype=dtype, device=stored.device)
    step = 128 if weight.format == "mxfp4" else shared_inputs(weight, 128)
    launch(
        packed_weights_triton.unpack_kernel,
        (-(-n // _TILE_ROWS), -(-k // _TILE_INPUTS), *(experts or (1,))),
        out,
        stored,
        scale,
        scale if zero is None else zero,
        n,
        k,
        stored.stride(0),
        weight.row_stride,
        scale.stride(0),
        scale.stride(-2),
        scale.stride(-1),
        ROWS=_TILE_ROWS,
        STEP=step,
        STEPS=_TILE_INPUTS // step,
        FORMAT=FORMATS.index(weight.format),
        SCALE_ROWS=min(rows, n),
        SCALE_K=min(inputs, k),
        HAS_ZERO=zero is not None,
        EVEN_K=k % _TILE_INPUTS == 0,
        ASM=can_use_assembly(weight, dtype),
        num_warps=4,
    )
    return out


def can_use_assembly(weight: PackedWeight, dtype: torch.dtype) -> bool:
    """Return whether assembly unpacks a weight to a type; of "fp8" it does not."""
    is_fit = weight.format != "fp8" and dtype == torch.bfloat16
    return is_fit and has_assembly(weight.data.device)


def shared_inputs(weight: PackedWeight, most: int) -> int:
    """Return the largest power of two, up to `most`, of inputs that share their scales."""
    inputs = weight.block[1]
    if weight.format != "mxfp4" and (weight.scale is None or inputs >= weight.num_inputs):
        return most
    while inputs % most:
        most //= 2
    return most


@cache
def has_assembly(device: torch.device) -> bool:
    """Return whether a device has products of two bfloat16 at once: 9.0 and later; no CPU."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
