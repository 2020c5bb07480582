"""Triton kernel of the product for few rows; `skinny_linear` launches it and says what it computes.

One program computes BLOCK_M rows of x times BLOCK_N rows of the weight over one share of K. It is
the weight that costs: it is read once, tile after tile along its rows, while the next tiles are on
their way. x is small, stays in the L2 and is read by all programs.

KIND says who multiplies:
0: x W^T in the matrix unit, BLOCK_M being its rows.
1: W x^T in the matrix unit, BLOCK_N being its rows: Hopper's wgmma takes 64 of them at a time.
2: multiply and add without the matrix unit, for a single row.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LINE_BYTES = tl.constexpr(128)  # of the L2


@triton.jit
def _prefetch(ptrs):
    """Fetch the lines at these addresses into the L2; nothing waits for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [ptrs.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _load_weight(
    weight,
    row_ptrs,  # [BLOCK_N, 1] of the rows that begin at first_row; not looked at with TMA
    first_row,
    first_k,
    num_k,
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
    """One tile of K more: x is [BLOCK_M, BLOCK_K], w [BLOCK_N, BLOCK_K]."""
    if KIND == 0:
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
    elif KIND == 1:
        acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
    else:
        acc += w.to(tl.float32) * x.to(tl.float32)  # summed over K at the end
    return acc


@triton.jit
def _rows_first(acc, KIND: tl.constexpr):
    """The sums of `_accumulate` as [BLOCK_M, BLOCK_N]."""
    if KIND == 0:
        rows = acc
    elif KIND == 1:
        rows = tl.trans(acc)
    else:
        rows = tl.sum(acc, 1)[None, :]
    return rows


@triton.jit(do_not_specialize=["num_rows"])
def skinny_kernel(
    out_ptr,  # [M, N], contiguous
    partial_ptr,  # float32 [tiles, SPLIT_K, 1 or 2, BLOCK_M, BLOCK_N] where SPLIT_K > 1
    arrivals_ptr,  # int32 [tiles], zero before and after, where SPLIT_K > 1
    x_ptr,
    weight,  # [N, K] or, for SWIGLU, [2N, K]: a pointer, or a descriptor with TMA
    bias_ptr,
    residual_ptr,  # [M, N]
    num_rows,
    num_columns,  # N of the output
    num_k,
    stride_x,
    stride_weight,
    stride_residual,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    STAGES: tl.constexpr,
    KIND: tl.constexpr,
    SWIGLU: tl.constexpr,
    EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    TMA: tl.constexpr,
    PDL: tl.constexpr,
):
    """One tile of the output, or one share of its sum over K."""
    program = tl.program_id(0)
    tile_n = program // SPLIT_K
    split = program % SPLIT_K
    tile_m = tl.program_id(1)
    offs_m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)

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

    if PDL:
        # The weight depends on no other kernel: it may come while the last one still runs.
        gdc_launch_dependents()
        if not TMA:
            PER_LINE: tl.constexpr = LINE_BYTES * 8 // weight.dtype.element_ty.primitive_bitwidth
            lines = tl.arange(0, BLOCK_K // PER_LINE)[None, :] * PER_LINE
            for k in range(first_k, tl.minimum(last_k, first_k + STAGES * BLOCK_K), BLOCK_K):
                offs_line = tl.minimum(k + lines, num_k - 1)
                _prefetch(gate_ptrs + offs_line)
                if SWIGLU:
                    _prefetch(up_ptrs + offs_line)
        gdc_wait()

    x_ptrs = x_ptr + offs_m.to(tl.int64)[:, None] * stride_x
    is_row = offs_m[:, None] < num_rows
    if KIND == 0:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    elif KIND == 1:
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        tl.static_assert(BLOCK_M == 1, "without the matrix unit a program takes one row")
        acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    acc_up = acc
    for k in tl.range(first_k, last_k, BLOCK_K, num_stages=STAGES):
        offs_k = k + tl.arange(0, BLOCK_K)[None, :]
        mask = is_row if EVEN_K else is_row & (offs_k < num_k)
        x = tl.load(x_ptrs + offs_k, mask=mask, other=0.0, eviction_policy="evict_last")
        gate = _load_weight(weight, gate_ptrs, tile_n * BLOCK_N, k, num_k, BLOCK_K, EVEN_K, TMA)
        acc = _accumulate(acc, x, gate, KIND)
        if SWIGLU:
            up = _load_weight(
                weight, up_ptrs, num_columns + tile_n * BLOCK_N, k, num_k, BLOCK_K, EVEN_K, TMA
            )
            acc_up = _accumulate(acc_up, x, up, KIND)

    acc = _rows_first(acc, KIND)
    acc_up = _rows_first(acc_up, KIND)
    if SPLIT_K > 1:
        PARTS: tl.constexpr = 2 if SWIGLU else 1
        SIZE: tl.constexpr = BLOCK_M * BLOCK_N
        tile = tile_m * (tl.num_programs(0) // SPLIT_K) + tile_n
        offs = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        partial_ptr += tile.to(tl.int64) * (SPLIT_K * PARTS * SIZE)
        own_ptrs = partial_ptr + split * (PARTS * SIZE) + offs
        tl.store(own_ptrs, acc)
        if SWIGLU:
            tl.store(own_ptrs + SIZE, acc_up)
        # All threads have stored before one of them says so.
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals_ptr + tile, 1, sem="acq_rel", scope="gpu")
        if arrived != SPLIT_K - 1:
            return
        # The last to come sums, its own share included, in the same order whoever it is. Others
        # wrote these through the L2: not from the L1.
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        acc_up = acc
        for other in range(SPLIT_K):
            ptrs = partial_ptr + other * (PARTS * SIZE) + offs
            acc += tl.load(ptrs, cache_modifier=".cg")
            if SWIGLU:
                acc_up += tl.load(ptrs + SIZE, cache_modifier=".cg")
        tl.store(arrivals_ptr + tile, 0)

    if SWIGLU:
        # Rounded as the two products are that it stands for.
        gate = acc.to(out_ptr.dtype.element_ty).to(tl.float32)
        up = acc_up.to(out_ptr.dtype.element_ty).to(tl.float32)
        acc = (gate * tl.sigmoid(gate)).to(out_ptr.dtype.element_ty).to(tl.float32) * up
    mask = is_row & (offs_n < num_columns)[None, :]
    if HAS_BIAS:
        bias = tl.load(bias_ptr + offs_n, mask=offs_n < num_columns, other=0.0)
        acc += bias.to(tl.float32)[None, :]
    rows = offs_m.to(tl.int64)[:, None]
    if HAS_RESIDUAL:
        residual = tl.load(
            residual_ptr + rows * stride_residual + offs_n[None, :], mask=mask, other=0.0
        )
        # Rounded first, as the product is that it stands for.
        acc = acc.to(out_ptr.dtype.element_ty).to(tl.float32) + residual.to(tl.float32)
    out = acc.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + rows * num_columns + offs_n[None, :], out, mask=mask)
