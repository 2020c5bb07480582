"""Linear layers over packed weights: y = x W^T + bias.

A product of few rows reads the weight as it is stored. One of many costs more than unpacking it
once: that leaves the product to the library.

Shapes: M rows of x, N outputs, K inputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.kernels.experts import (
    grouped_product,
    has_assembly,
    layout_of,
    make_weight,
    shared_inputs,
)
from peagle.kernels.launch import launch
from peagle.kernels.packed_weights import FORMATS, PackedWeight

MAX_ROWS = 128  # that are multiplied with packed weights
_TILE_ROWS = 32


def packed_linear(x: Tensor, weight: PackedWeight, bias_N: Tensor | None = None) -> Tensor:
    """Compute x W^T + bias in Triton; a compiler sees the operator `peagle::packed_linear`.

    Args:
        x: [..., K].
        weight: [N, K].
        bias_N: [N].

    Returns:
        [..., N], contiguous.
    """
    out_MN = torch.ops.peagle.packed_linear(
        x.reshape(-1, x.shape[-1]),
        weight.data,
        weight.scale,
        weight.zero,
        bias_N,
        layout_of(weight),
    )
    return out_MN.view(*x.shape[:-1], weight.data.shape[0])


@torch.library.custom_op(
    "peagle::packed_linear",
    mutates_args=(),
    schema="(Tensor x, Tensor data, Tensor? scale, Tensor? zero, Tensor? bias, int[] layout) "
    "-> Tensor",
)
def _packed_linear(
    x: Tensor,
    data: Tensor,
    scale: Tensor | None,
    zero: Tensor | None,
    bias: Tensor | None,
    layout: list[int],
) -> Tensor:
    weight = make_weight(data, scale, zero, layout)
    if x.shape[0] > MAX_ROWS:
        return F.linear(x, unpack(weight, x.dtype), bias)
    return grouped_product(x, weight, bias)


@_packed_linear.register_fake
def _(
    x: Tensor,
    data: Tensor,
    scale: Tensor | None,
    zero: Tensor | None,
    bias: Tensor | None,
    layout: list[int],
) -> Tensor:
    return x.new_empty(x.shape[0], data.shape[0])


def unpack(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """Compute `PackedWeight.unpack` of a weight [N, K] in Triton, in one pass."""
    from peagle.kernels import packed_weights_triton

    data, scale, zero = weight.data, weight.scale, weight.zero
    (n, k), (rows, inputs) = (data.shape[0], weight.num_inputs), weight.block
    out = torch.empty(n, k, dtype=dtype, device=data.device)
    stored = weight.stored
    step = shared_inputs(weight, 128)
    launch(
        packed_weights_triton.unpack_kernel,
        (-(-n // _TILE_ROWS), -(-k // step)),
        out,
        stored,
        out if scale is None else scale,
        out if zero is None else zero,
        n,
        k,
        stored.stride(0),
        0 if scale is None else scale.stride(0),
        0 if scale is None else scale.stride(1),
        ROWS=_TILE_ROWS,
        STEP=step,
        FORMAT=FORMATS.index(weight.format),
        SCALE_ROWS=min(rows, n),
        SCALE_K=min(inputs, k),
        HAS_ZERO=zero is not None,
        EVEN_K=k % step == 0,
        ASM=has_assembly(data.device) and dtype == torch.bfloat16,
        num_warps=4,
    )
    return out
