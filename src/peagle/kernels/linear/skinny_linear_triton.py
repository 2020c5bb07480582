"""Triton kernel of the product for few rows; `skinny_linear` launches it and documents its result.

One program computes BLOCK_M rows of x times BLOCK_N rows of the weight over one share of K. Reading
the weight costs the time: it is read once, tile after tile along its rows, while the next tiles are
on their way. x is small, stays in the L2 and is read by all programs.

KIND is the way to multiply:
0: x W^T in the matrix unit, BLOCK_M being its rows.
1: W x^T in the matrix unit, BLOCK_N being its rows: Hopper's wgmma takes 64 of them at a time.
2: multiply and add without the matrix unit, for a single row.
"""

import triton
import triton.language as tl

from peagle.kernels.linear.split_sums_triton import add_shares
from peagle.kernels.overlap_triton import wait_for_inputs


@triton.jit
def _load_weight(
    weight,
    row_ptrs,  # [BLOCK_N, 1] of the rows that begin at first_row; not looked at with TMA
    first_row,
    first_k,
    num_k,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    TMA: tl.constexpr,
):
    """[BLOCK_N, BLOCK_K] of the weight, zero beyond K."""
    if TMA:
        w = weight.load([first_row, first_k])
    else:
        offs_k = first_k + tl.arange(0, BLOCK_K)[None, :]
        if EVEN_K:
            w = tl.load(row_ptrs + offs_k, eviction_policy="evict_first")
        else:
            w = tl.load(
                row_ptrs + offs_k, mask=offs_k < num_k, other=0.0, eviction_policy="evict_first"
            )
    return w


@triton.jit
def _accumulate(acc, x, w, KIND: tl.constexpr):
    """Add the product of one tile of K: x is [BLOCK_M, BLOCK_K], w [BLOCK_N, BLOCK_K]."""
    if KIND == 0:
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
    elif KIND == 1:
        acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
    else:
        acc += w.to(tl.float32) * x.to(tl.float32)  # summed over K at the end
    return acc


@triton.jit
def _rows_first(acc, KIND: tl.constexpr):
    """Return the sums of `_accumulate` as [BLOCK_M, BLOCK_N]."""
    if KIND == 0:
        rows = acc
    elif KIND == 1:
        rows = tl.trans(acc)
    else:
        rows = tl.sum(acc, 1)[None, :]
    return rows


@triton.jit
def _store(
    out_ptr,
    acc,  # [BLOCK_M, BLOCK_N]
    acc_up,  # as acc, for SWIGLU
    bias_ptr,
    offs_m,
    offs_n,
    num_rows,
    num_columns,
    SWIGLU: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Apply SwiGLU or the bias, and store."""
    if SWIGLU:
        # Rounded as the two products are that it stands for.
        gate = acc.to(out_ptr.dtype.element_ty).to(tl.float32)
        up = acc_up.to(out_ptr.dtype.element_ty).to(tl.float32)
        acc = (gate * tl.sigmoid(gate)).to(out_ptr.dtype.element_ty).to(tl.float32) * up
    mask = (offs_m < num_rows)[:, None] & (offs_n < num_columns)[None, :]
    if HAS_BIAS:
        bias = tl.load(bias_ptr + offs_n, mask=offs_n < num_columns, other=0.0)
        acc += bias.to(tl.float32)[None, :]
    rows = offs_m.to(tl.int64)[:, None]
    out = acc.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + rows * num_columns + offs_n[None, :], out, mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def skinny_kernel(
    out_ptr,  # [M, N], contiguous
    partial_ptr,  # float32 [programs, PARTS, BLOCK_M, rows of the weight's tile], SPLIT_K > 1
    arrivals_ptr,  # int32 [tiles], zero before and after, where SPLIT_K > 1
    x,  # [M, K]: a pointer, or a descriptor with X_TMA
    weight,  # [N, K] or, for SWIGLU, [2N, K]: a pointer, or a descriptor with TMA
    bias_ptr,
    num_rows,
    num_columns,  # N of the output
    num_k,
    stride_x,
    stride_weight,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    STAGES: tl.constexpr,
    KIND: tl.constexpr,
    SWIGLU: tl.constexpr,
    EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TMA: tl.constexpr,
    X_TMA: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Compute a tile of the output, or one share of its sum over K."""
    # Find the tile of the output and the share of K.
    program = tl.program_id(0)
    tile_n = program // SPLIT_K
    split = program % SPLIT_K
    tile_m = tl.program_id(1)
    offs_m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    first_n = tile_n * BLOCK_N
    offs_n = first_n + tl.arange(0, BLOCK_N)
    PARTS: tl.constexpr = 2 if SWIGLU else 1  # gate and up

    share = tl.cdiv(tl.cdiv(num_k, BLOCK_K), SPLIT_K)
    first_k = split * share * BLOCK_K
    last_k = tl.minimum(first_k + share * BLOCK_K, num_k)

    # The last rows again where there are no more: what they give is not stored.
    row = tl.minimum(offs_n, num_columns - 1).to(tl.int64)[:, None]
    if TMA:
        gate_ptrs = row
        up_ptrs = row
    else:
        gate_ptrs = weight + row * stride_weight
        up_ptrs = weight + (row + num_columns) * stride_weight

    wait_for_inputs(OVERLAPS)
    is_row = offs_m[:, None] < num_rows
    x_ptrs = is_row if X_TMA else x + offs_m.to(tl.int64)[:, None] * stride_x
    # Sum the products over this share of K.
    if KIND == 0:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    elif KIND == 1:
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        tl.static_assert(BLOCK_M == 1, "without the matrix unit a program takes one row")
        acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    up = acc
    for k in tl.range(first_k, last_k, BLOCK_K, num_stages=STAGES):
        if X_TMA:
            x_tile = x.load([tile_m * BLOCK_M, k])
        else:
            offs_k = k + tl.arange(0, BLOCK_K)[None, :]
            mask = is_row if EVEN_K else is_row & (offs_k < num_k)
            x_tile = tl.load(x_ptrs + offs_k, mask=mask, other=0.0, eviction_policy="evict_last")
        w = _load_weight(weight, gate_ptrs, first_n, k, num_k, BLOCK_N, BLOCK_K, EVEN_K, TMA)
        acc = _accumulate(acc, x_tile, w, KIND)
        if SWIGLU:
            first_up = first_n + num_columns
            w = _load_weight(weight, up_ptrs, first_up, k, num_k, BLOCK_N, BLOCK_K, EVEN_K, TMA)
            up = _accumulate(up, x_tile, w, KIND)

    # Add up the shares; only the last program to arrive stores.
    acc = _rows_first(acc, KIND)
    up = _rows_first(up, KIND)
    if SPLIT_K > 1:
        tile = tile_m * (tl.num_programs(0) // SPLIT_K) + tile_n
        acc, up, is_last = add_shares(
            acc, up, partial_ptr, arrivals_ptr, tile, split, SPLIT_K, PARTS
        )
        if not is_last:
            return

    _store(out_ptr, acc, up, bias_ptr, offs_m, offs_n, num_rows, num_columns, SWIGLU, HAS_BIAS)
