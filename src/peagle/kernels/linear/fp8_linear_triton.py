"""Triton kernels of `fp8_activations` and `fp8_linear`: activations in FP8, and their products.

Shapes: M rows of x, N outputs, K inputs; N and K are multiples of 128.
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


@triton.jit
def multiply_tile(
    x_ptr,  # float8e4nv [rows, K], contiguous
    x_scale_ptr,  # float32 [K / 128, stride_x_scale]
    row,  # int [BLOCK_M]: rows of x
    is_row,
    w_ptr,  # float8e4nv [N, K], contiguous
    w_scale_ptr,  # float32 [N / 128, K / 128], contiguous
    first_a,  # outputs that the two halves of a tile begin with, multiples of BLOCK_N
    first_b,
    num_k,
    stride_x_scale,
    partial_ptr,  # of `add_shares`, where SPLIT_K > 1
    arrivals_ptr,
    SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,  # up to 128
    STAGES: tl.constexpr,
    WX: tl.constexpr,  # multiply W x^T in the matrix unit, not x W^T
):
    """Return x W^T in float32 [BLOCK_M, BLOCK_N] for both halves of a tile of outputs, and whether
    this program has the sums over all of K: the last of the SPLIT_K programs of a tile has them.

    Programs are (tiles of outputs * SPLIT_K, tiles of rows). Each sum over 128 inputs is multiplied
    by the scales of x and of the weight before it is added.
    """
    blocks_k = num_k // BLOCK
    n = tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK)
    w_a = w_ptr + (first_a + n)[:, None] * num_k + k[None, :]
    w_b = w_ptr + (first_b + n)[:, None] * num_k + k[None, :]
    scale_a = w_scale_ptr + first_a // BLOCK * blocks_k
    scale_b = w_scale_ptr + first_b // BLOCK * blocks_k
    x_ptrs = x_ptr + row.to(tl.int64)[:, None] * num_k + k[None, :]
    acc_a = tl.zeros([BLOCK_N, BLOCK_M] if WX else [BLOCK_M, BLOCK_N], tl.float32)
    acc_b = acc_a
    split = tl.program_id(0) % SPLIT_K
    share = tl.cdiv(blocks_k, SPLIT_K)
    last = tl.minimum((split + 1) * share, blocks_k)
    for block in tl.range(split * share, last, num_stages=STAGES):
        at = block * BLOCK
        x = tl.load(x_ptrs + at, mask=is_row[:, None], other=0.0)
        x_scale = tl.load(x_scale_ptr + block * stride_x_scale + row, mask=is_row, other=0.0)
        acc_a = _add_block(acc_a, x, x_scale, w_a + at, tl.load(scale_a + block), WX)
        acc_b = _add_block(acc_b, x, x_scale, w_b + at, tl.load(scale_b + block), WX)
    is_last = True
    if SPLIT_K > 1:
        tile = tl.program_id(1) * (tl.num_programs(0) // SPLIT_K) + tl.program_id(0) // SPLIT_K
        acc_a, acc_b, is_last = add_shares(
            acc_a, acc_b, partial_ptr, arrivals_ptr, tile, split, SPLIT_K
        )
    if WX:
        acc_a = tl.trans(acc_a)
        acc_b = tl.trans(acc_b)
    return acc_a, acc_b, is_last


@triton.jit
def _store_half(out_ptrs, acc, bias_ptrs, is_row, HAS_BIAS: tl.constexpr):
    if HAS_BIAS:
        acc += tl.load(bias_ptrs).to(tl.float32)[None, :]
    tl.store(out_ptrs, acc.to(out_ptrs.dtype.element_ty), mask=is_row[:, None])


@triton.jit(do_not_specialize=["num_rows"])
def linear_kernel(
    out_ptr,  # [M, N], contiguous
    x_ptr,  # float8e4nv [M, K], contiguous
    x_scale_ptr,  # float32 [K / 128, stride_x_scale]
    w_ptr,  # float8e4nv [N, K], contiguous
    w_scale_ptr,  # float32 [N / 128, K / 128], contiguous
    bias_ptr,  # [N], where HAS_BIAS
    partial_ptr,  # float32 [tiles, SPLIT_K, 2, BLOCK_M * BLOCK_N], where SPLIT_K > 1
    arrivals_ptr,  # int32 [tiles], zero before and after, where SPLIT_K > 1
    num_rows,
    num_columns,  # N
    num_k,
    stride_x_scale,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT_K: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WX: tl.constexpr,
):
    """out = x W^T + bias for a tile of rows and of 2 * BLOCK_N outputs."""
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = row < num_rows
    first = tl.program_id(0) // SPLIT_K * (2 * BLOCK_N)
    acc_a, acc_b, is_last = multiply_tile(
        x_ptr,
        x_scale_ptr,
        row,
        is_row,
        w_ptr,
        w_scale_ptr,
        first,
        first + BLOCK_N,
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
    column = first + tl.arange(0, BLOCK_N)
    out_ptrs = out_ptr + row.to(tl.int64)[:, None] * num_columns + column[None, :]
    _store_half(out_ptrs, acc_a, bias_ptr + column, is_row, HAS_BIAS)
    _store_half(out_ptrs + BLOCK_N, acc_b, bias_ptr + column + BLOCK_N, is_row, HAS_BIAS)
