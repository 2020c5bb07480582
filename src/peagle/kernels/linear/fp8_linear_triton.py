"""Triton kernels of `fp8_activations` and `fp8_linear`.

Shapes: M rows of x, N outputs, K inputs; N and K are multiples of 128.
"""

# pyright: reportGeneralTypeIssues=false
import triton
import triton.language as tl

from peagle.kernels.linear.packed_weights_triton import TILE_BYTES
from peagle.kernels.overlap_triton import wait_for_inputs

BLOCK = tl.constexpr(128)  # inputs that share a scale


@triton.jit(do_not_specialize=["num_rows"])
def quantise_kernel(
    q_ptr,  # float8e4nv [M, K], contiguous, in the order of `tiled_inputs`
    scale_ptr,  # float32 [K / 128, stride_scale]
    x_ptr,  # [M, K], contiguous
    num_rows,
    num_k,
    stride_scale,
    ROWS: tl.constexpr,
    LARGEST: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """q = x / scale, where scale is the largest magnitude of a row's 128 inputs over LARGEST."""
    wait_for_inputs(OVERLAPS)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    block = tl.program_id(1)
    is_row = rows < num_rows
    first = rows.to(tl.int64)[:, None] * num_k + block * BLOCK
    place = tl.arange(0, BLOCK)[None, :]
    # The order of `fp8_activations.tiled_inputs`.
    k = place // 16 * 16 + (1 - place % 2) * 8 + place // 4 % 4 * 2 + place // 2 % 2
    x = tl.load(x_ptr + first + k, mask=is_row[:, None], other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), 1), 1e-10) / LARGEST
    q = (x / scale[:, None]).to(q_ptr.dtype.element_ty)
    tl.store(q_ptr + first + place, q, mask=is_row[:, None])
    tl.store(scale_ptr + block * stride_scale + rows, scale, mask=is_row)


@triton.jit
def numbers_kernel(
    out_ptr,  # int32 [N, K / 4], contiguous
    w_ptr,  # int32 of `PackedWeight.data`, contiguous
    num_k,
    ROWS: tl.constexpr,
):
    """Store the numbers of 128 inputs of ROWS rows of a weight, in the order of `tiled_inputs`."""
    n = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    word = tl.program_id(1) * (BLOCK // 4) + tl.arange(0, BLOCK // 4)[None, :]
    at = (n // 64 * (num_k // 64) + word // 16).to(tl.int64) * (TILE_BYTES // 4)
    stored = word % 4 * 4 + word // 4 % 4
    words = tl.load(w_ptr + at + n % 64 * 16 + stored).to(tl.uint32, bitcast=True)
    # As `packed_gluon._BYTES_ASM`.
    low = (words & 0x800F800F) | (words << 4 & 0x7FF07FF0)
    high = (words >> 4 & 0x00800080) | (words >> 8 & 0xFF7FFF7F)
    numbers = (high & 0x00F000F0) | (low & 0xFF0FFF0F)
    out_at = out_ptr + n.to(tl.int64) * (num_k // 4) + word
    tl.store(out_at, numbers.to(tl.int32, bitcast=True))
