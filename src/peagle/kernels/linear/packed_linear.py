"""Linear layers over packed weights: y = x W^T + bias.

A product of few rows reads the weight as it is stored. One of many costs more than unpacking it
once: that leaves the product to the library. From a number of rows on, FP8 weights may multiply FP8
activations (`fp8_linear`), whose numbers lie beside the packed weight then.

Shapes: M rows of x, N outputs, K inputs.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.kernels.linear.experts import (
    Gate,
    can_use_registers,
    grouped_product,
    layout_of,
    make_weight,
)
from peagle.kernels.linear.fp8_linear import MIN_ROWS, Before, Norm, fp8_linear
from peagle.kernels.linear.packed_weights import PackedWeight
from peagle.kernels.linear.unpacking import unpack_weight

# Rows that are multiplied with packed weights, at most.
MAX_ROWS = 128
MAX_ROWS_IN_REGISTERS = 256
_SWIGLU = Gate("silu")


def packed_linear(
    x: Tensor,
    weight: PackedWeight,
    bias_N: Tensor | None = None,
    numbers: Tensor | None = None,
    before: Before | None = None,
) -> Tensor:
    """Compute x W^T + bias; a compiler sees `peagle::packed_linear`, or what `fp8_linear` says.

    Args:
        x: [..., K]; [..., 2K] if `before` is SwiGLU.
        weight: [N, K].
        bias_N: [N].
        numbers: `PackedWeight.fp8_numbers` of the weight: x is rounded to FP8 where it has
            `fp8_linear.MIN_ROWS` rows or more. None: it never is.
        before: what is computed of x first; with x in FP8 in the kernel that rounds it.

    Returns:
        [..., N], contiguous.
    """
    x_MK = x.reshape(-1, x.shape[-1])
    if numbers is not None and x_MK.shape[0] >= MIN_ROWS:
        assert weight.scale is not None
        out_MN = fp8_linear(x_MK, numbers, weight.scale, bias_N, before)
    else:
        if before:
            x_MK = before(x_MK) if isinstance(before, Norm) else _SWIGLU(x_MK)
        out_MN = torch.ops.peagle.packed_linear(
            x_MK, weight.data, weight.scale, weight.zero, bias_N, layout_of(weight)
        )
    return out_MN.view(*x.shape[:-1], weight.num_outputs)


@torch.library.custom_op(
    "peagle::packed_linear",
    mutates_args=(),
    schema="(Tensor x, Tensor data, Tensor? scale, Tensor? zero, Tensor? bias, "
    "int[] layout) -> Tensor",
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
    if x.shape[0] > (MAX_ROWS_IN_REGISTERS if can_use_registers(x, weight) else MAX_ROWS):
        return F.linear(x, unpack_weight(weight, x.dtype), bias)
    return grouped_product(x, weight, bias)


@_packed_linear.register_fake
def _(x: Tensor, *packed: Any) -> Tensor:
    data, scale, zero, *_, layout = packed
    return x.new_empty(x.shape[0], make_weight(data, scale, zero, layout).num_outputs)
