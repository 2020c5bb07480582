"""Triton kernels of `fp8_products`: activations in FP8, and their products with FP8 weights.

Shapes: M rows of x, N outputs, K inputs, a multiple of 128, E experts.
"""

# pyright: reportGeneralTypeIssues=false
import triton
import triton.language as tl

from peagle.kernels.linear.split_sums_triton import add_shares

BLOCK = tl.constexpr(128)  # inputs, and rows of the weight, that share a scale


@triton.jit(do_not_specialize=["num_rows"])
def quantise_kernel(
    q_ptr,  # float8e4nv [M, K], contiguous
    scale_ptr,  # float32 [K / 128, stride_scale]
    x_ptr,  # [M, K], contiguous
    num_rows,
    num_k,
    stride_scale,
    ROWS: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """q = x / scale, where scale is the largest magnitude of a row's 128 inputs over LARGEST."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    block = tl.program_id(1)
    is_row = rows < num_rows
    offs = rows.to(tl.int64)[:, None] * num_k + block * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(x_ptr + offs, mask=is_row[:, None], other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), 1), 1e-10) / LARGEST
    tl.store(q_ptr + offs, (x / scale[:, None]).to(q_ptr.dtype.element_ty), mask=is_row[:, None])
    tl.store(scale_ptr + block * stride_scale + rows, scale, mask=is_row)


@triton.jit
def _add_block(acc, x, x_scale, w_ptrs, w_scale, WX: tl.constexpr):
    """acc plus the product of 128 inputs, times both scales."""
    w = tl.load(w_ptrs)
    if WX:
        part = tl.dot(w, tl.trans(x)) * (w_scale * x_scale)[None, :]
    else:
        part = tl.dot(x, tl.trans(w)) * (w_scale * x_scale)[:, None]
    return acc + part


@triton.jit(do_not_specialize=["num_rows", "max_tiles"])
def product_kernel(
    out_ptr,  # [S, N], contiguous
    x_ptr,  # float8e4nv [rows, K], contiguous
    x_scale_ptr,  # float32 [K / 128, stride_x_scale]
    order_ptr,  # of `plan_tiles`
    tiles_ptr,
    w_ptr,  # float8e4nv [E, N or 2N, K], contiguous; 2N with a gate
    w_scale_ptr,  # float32 [E, N / 128 or 2N / 128, K / 128], contiguous
    partial_ptr,  # float32 [tiles, SPLIT_K, 2, BLOCK_M * BLOCK_N], where SPLIT_K > 1
    arrivals_ptr,  # int32 [tiles], zero before and after, where SPLIT_K > 1
    num_rows,
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
    PLANNED: tl.constexpr,
    WX: tl.constexpr,  # multiply W x^T in the matrix unit, not x W^T
):
    """out[s] = silu(gate) * up or W[expert of s] x[s // chosen], for a tile of s and of outputs.

    A tile of outputs has two halves: gate and up, or one after the other. Each sum over 128 inputs
    is multiplied by the scales of x and of the weight and added in float32.
    """
    tile = tl.program_id(1)
    tile_n = tl.program_id(0) // SPLIT_K
    split = tl.program_id(0) % SPLIT_K
    rows = tl.arange(0, BLOCK_M)
    if PLANNED:
        expert = tl.load(tiles_ptr + tile)
        if expert < 0:
            return
        place = tl.load(tiles_ptr + max_tiles + tile) + rows
        is_row = place < tl.load(tiles_ptr + 2 * max_tiles + tile)
        assignment = tl.load(order_ptr + place, mask=is_row, other=0)
    else:
        expert = tile * 0
        assignment = tile * BLOCK_M + rows
        is_row = assignment < num_rows

    if HAS_GATE:
        first_a = tile_n * BLOCK_N
        first_b = first_a + num_columns
        num_stored = 2 * num_columns
    else:
        first_a = tile_n * (2 * BLOCK_N)
        first_b = first_a + BLOCK_N
        num_stored = num_columns
    blocks_k = num_k // BLOCK
    n = tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK)
    w_ptr += expert.to(tl.int64) * num_stored * num_k
    w_a = w_ptr + (first_a + n)[:, None] * num_k + k[None, :]
    w_b = w_ptr + (first_b + n)[:, None] * num_k + k[None, :]
    w_scale_ptr += expert * (num_stored // BLOCK) * blocks_k
    scale_a = w_scale_ptr + first_a // BLOCK * blocks_k
    scale_b = w_scale_ptr + first_b // BLOCK * blocks_k
    row = assignment // chosen
    x_ptrs = x_ptr + row.to(tl.int64)[:, None] * num_k + k[None, :]

    acc_a = tl.zeros([BLOCK_N, BLOCK_M] if WX else [BLOCK_M, BLOCK_N], tl.float32)
    acc_b = acc_a
    share = tl.cdiv(blocks_k, SPLIT_K)
    last = tl.minimum((split + 1) * share, blocks_k)
    for block in tl.range(split * share, last, num_stages=STAGES):
        at = block * BLOCK
        x = tl.load(x_ptrs + at, mask=is_row[:, None], other=0.0)
        x_scale = tl.load(x_scale_ptr + block * stride_x_scale + row, mask=is_row, other=0.0)
        acc_a = _add_block(acc_a, x, x_scale, w_a + at, tl.load(scale_a + block), WX)
        acc_b = _add_block(acc_b, x, x_scale, w_b + at, tl.load(scale_b + block), WX)

    if SPLIT_K > 1:
        tiles_n = tl.num_programs(0) // SPLIT_K
        acc_a, acc_b, is_last = add_shares(
            acc_a, acc_b, partial_ptr, arrivals_ptr, tile * tiles_n + tile_n, split, SPLIT_K
        )
        if not is_last:
            return
    if WX:
        acc_a = tl.trans(acc_a)
        acc_b = tl.trans(acc_b)
    out_ptrs = out_ptr + assignment.to(tl.int64)[:, None] * num_columns + (first_a + n)[None, :]
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    if HAS_GATE:
        tl.store(out_ptrs, (acc_a * tl.sigmoid(acc_a) * acc_b).to(DTYPE), mask=is_row[:, None])
    else:
        tl.store(out_ptrs, acc_a.to(DTYPE), mask=is_row[:, None])
        tl.store(out_ptrs + BLOCK_N, acc_b.to(DTYPE), mask=is_row[:, None])
