"""Triton kernel of `fp8_products`: FP8 activations with the FP8 weights of experts.

Shapes: S assignments, N outputs, K inputs, a multiple of 128, E experts.
"""

# pyright: reportGeneralTypeIssues=false
import triton
import triton.language as tl

from peagle.kernels.linear.fp8_linear_triton import BLOCK, multiply_tile


@triton.jit(do_not_specialize=["max_tiles"])
def experts_kernel(
    out_ptr,  # [S, N], contiguous
    x_ptr,  # float8e4nv [rows, K], contiguous
    x_scale_ptr,  # float32 [K / 128, stride_x_scale]
    order_ptr,  # of `plan_tiles`
    tiles_ptr,
    w_ptr,  # float8e4nv [E, N or 2N, K], contiguous; 2N with a gate
    w_scale_ptr,  # float32 [E, N / 128 or 2N / 128, K / 128], contiguous
    partial_ptr,  # float32 [tiles, SPLIT_K, 2, BLOCK_M * BLOCK_N], where SPLIT_K > 1
    arrivals_ptr,  # int32 [tiles], zero before and after, where SPLIT_K > 1
    num_columns,  # N, a multiple of BLOCK_N, without a gate of twice as many
    num_k,
    max_tiles,
    chosen,  # assignments that share a row of x
    stride_x_scale,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,  # up to 128
    SPLIT_K: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_GATE: tl.constexpr,
    WX: tl.constexpr,
):
    """out[s] = silu(gate) * up or W[expert of s] x[s // chosen], for a tile of s and of outputs.

    A tile of outputs has two halves: gate and up, or one after the other.
    """
    tile = tl.program_id(1)
    tile_n = tl.program_id(0) // SPLIT_K
    expert = tl.load(tiles_ptr + tile)
    if expert < 0:
        return
    place = tl.load(tiles_ptr + max_tiles + tile) + tl.arange(0, BLOCK_M)
    is_row = place < tl.load(tiles_ptr + 2 * max_tiles + tile)
    assignment = tl.load(order_ptr + place, mask=is_row, other=0)

    if HAS_GATE:
        first_a = tile_n * BLOCK_N
        first_b = first_a + num_columns
        num_stored = 2 * num_columns
    else:
        first_a = tile_n * (2 * BLOCK_N)
        first_b = first_a + BLOCK_N
        num_stored = num_columns
    acc_a, acc_b, is_last = multiply_tile(
        x_ptr,
        x_scale_ptr,
        assignment // chosen,
        is_row,
        w_ptr + expert.to(tl.int64) * num_stored * num_k,
        w_scale_ptr + expert * (num_stored // BLOCK) * (num_k // BLOCK),
        first_a,
        first_b,
        num_k,
        stride_x_scale,
        partial_ptr,
        arrivals_ptr,
        SPLIT_K,
        BLOCK_M,
        BLOCK_N,
        STAGES,
        WX,
    )
    if not is_last:
        return
    column = first_a + tl.arange(0, BLOCK_N)
    out_ptrs = out_ptr + assignment.to(tl.int64)[:, None] * num_columns + column[None, :]
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    if HAS_GATE:
        tl.store(out_ptrs, (acc_a * tl.sigmoid(acc_a) * acc_b).to(DTYPE), mask=is_row[:, None])
    else:
        tl.store(out_ptrs, acc_a.to(DTYPE), mask=is_row[:, None])
        tl.store(out_ptrs + BLOCK_N, acc_b.to(DTYPE), mask=is_row[:, None])
