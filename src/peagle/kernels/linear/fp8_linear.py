"""Linear layers over FP8 activations and FP8 weights: y = x W^T + bias.

Activations have a scale for each row and 128 inputs (`fp8_activations`), weights for each
128 x 128. The library multiplies: sums of 128 inputs come from the matrix unit in FP8 and are added
up in float32. It takes the numbers of a weight row by row, a second copy beside the tiles that
products of few rows read.

Shapes: M rows of x, N outputs, K inputs; N and K are multiples of 128.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.kernels.launch import launch
from peagle.kernels.linear.fp8_activations import BLOCK, FP8, QuantisedRows, quantise
from peagle.kernels.linear.packed_weights import PackedWeight

# Rows from which on activations are rounded: products of fewer rows are as fast with the tiles and
# activations as they are (H200, docs/lab/roofline.md).
MIN_ROWS = 96
_UNTILED_ROWS = 16  # of one program
_CAPABILITY = (9, 0)
_CUDA = (12, 9)  # cuBLAS has block scales from this version on


def fits_fp8(weight: PackedWeight) -> bool:
    """Return whether a weight is one that FP8 activations can be multiplied with."""
    sizes = (weight.num_outputs, weight.num_inputs)
    is_whole = not any(size % BLOCK for size in sizes)
    return weight.format == "fp8" and weight.block == (BLOCK, BLOCK) and is_whole


def fp8_linear(x: Tensor, numbers: Tensor, scale: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """Compute x W^T + bias over x in FP8, [M, N] in the type of x; on a CPU in plain torch.

    NaN or infinity in a row of x makes that row of the result NaN, and changes no other row.

    Args:
        x: [M, K].
        numbers: `numbers_of` the weight.
        scale: its scales, float32 [N / 128, K / 128].
        bias_N: [N].
    """
    rows = quantise(x.contiguous())
    product = fp8_product if x.device.type == "cuda" else fp8_product_reference
    out = product(rows, numbers, scale).to(x.dtype)
    return out if bias_N is None else out.add_(bias_N)


@cache
def fp8_obstacle(device: torch.device) -> str | None:
    """Return why `torch.nn.functional.scaled_mm` cannot multiply with block scales here."""
    if device.type != "cuda":
        return "block scales need a card"
    if (capability := torch.cuda.get_device_capability(device)) != _CAPABILITY:
        return f"block scales need compute capability 9.0, not {capability[0]}.{capability[1]}"
    cuda = torch.version.cuda
    if cuda is None or tuple(map(int, cuda.split(".")[:2])) < _CUDA:
        return f"block scales need CUDA 12.9, not {cuda}"
    return None


def fp8_product(x: QuantisedRows, numbers: Tensor, scale: Tensor) -> Tensor:
    """Multiply by `torch.nn.functional.scaled_mm`, bfloat16 [M, N]; `fp8_linear` names the rest."""
    return F.scaled_mm(
        x.q,
        numbers.T,
        x.scale.T,
        F.ScalingType.BlockWise1x128,
        library_scales(scale),
        F.ScalingType.BlockWise128x128,
        output_dtype=torch.bfloat16,
    )[: x.num_rows]


def fp8_product_reference(x: QuantisedRows, numbers: Tensor, scale: Tensor) -> Tensor:
    """Compute `fp8_product` in float32 in plain torch."""
    spread = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return F.linear(x.in_tiled_order(), numbers.float() * spread)


def numbers_of(weight: PackedWeight) -> Tensor:
    """Take the numbers of a weight out of its tiles, float8_e4m3fn [N, K], each row in the order
    of `tiled_inputs`.
    """
    from peagle.kernels.linear import fp8_linear_triton

    n, k = weight.num_outputs, weight.num_inputs
    assert fits_fp8(weight) and weight.data.is_contiguous()
    words = torch.empty(n, k // 4, dtype=torch.int32, device=weight.data.device)
    launch(
        fp8_linear_triton.numbers_kernel,
        (n // _UNTILED_ROWS, k // BLOCK),
        words,
        weight.data.view(torch.int32),
        k,
        ROWS=_UNTILED_ROWS,
        num_warps=4,
    )
    return words.view(FP8)


def library_scales(scale: Tensor) -> Tensor:
    """Return scales of a weight as the library reads them: [K / 128 up to fours, N / 128], those of
    one output together.
    """
    missing = -scale.shape[1] % 4
    return (F.pad(scale, (0, missing)) if missing else scale).T
