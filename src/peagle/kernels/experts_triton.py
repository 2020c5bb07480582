"""Triton kernels of `kernels.experts`: the plan of the tiles, and the grouped product.

Shapes: T tokens, C experts chosen for each, S = T * C assignments of tokens to experts, E experts.
An assignment's number is token * C + place.
"""

from __future__ import annotations

import triton
import triton.language as tl

from peagle.kernels.packed_weights_triton import INT4, MXFP4, PLAIN, mx_factor, unpack

NO_GATE = tl.constexpr(0)
SILU = tl.constexpr(1)
CLAMPED = tl.constexpr(2)
GELU_TANH = tl.constexpr(3)


@triton.jit
def plan_kernel(
    order_ptr,  # int32 [S]: assignments, those of one expert together
    tiles_ptr,  # int32 [3, max_tiles]: expert, first and last place in the order; expert -1: none
    next_ptr,  # int32 [E], for this kernel alone
    index_ptr,  # [S]: the expert of an assignment
    num_assignments,
    num_experts,
    max_tiles,
    BLOCK_M: tl.constexpr,
    ASSIGNMENTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    TILES: tl.constexpr,
):
    """Order the assignments by expert, and cut each expert's into tiles. One program.

    The order of an expert's assignments is left to chance: no row of a product depends on others.
    """
    s = tl.arange(0, ASSIGNMENTS)
    is_one = s < num_assignments
    expert = tl.load(index_ptr + s, mask=is_one, other=0).to(tl.int32)
    counts = tl.histogram(expert, EXPERTS, mask=is_one)
    first = tl.cumsum(counts, 0) - counts
    num_tiles = tl.cdiv(counts, BLOCK_M)
    first_tile = tl.cumsum(num_tiles, 0) - num_tiles

    e = tl.arange(0, EXPERTS)
    tl.store(next_ptr + e, first, mask=e < num_experts)
    tl.debug_barrier()
    place = tl.atomic_add(next_ptr + expert, 1, mask=is_one)
    tl.store(order_ptr + place, s, mask=is_one)

    for i in range(tl.max(num_tiles, 0)):
        has_tile = i < num_tiles
        begin = first + i * BLOCK_M
        tl.store(tiles_ptr + first_tile + i, e, mask=has_tile)
        tl.store(tiles_ptr + max_tiles + first_tile + i, begin, mask=has_tile)
        end = tl.minimum(begin + BLOCK_M, first + counts)
        tl.store(tiles_ptr + 2 * max_tiles + first_tile + i, end, mask=has_tile)
    t = tl.arange(0, TILES)
    tl.store(tiles_ptr + t, -1, mask=(t >= tl.sum(num_tiles, 0)) & (t < max_tiles))


@triton.jit
def _gated(gate, up, alpha, limit, GATE: tl.constexpr):
    """Activation of gate and up, in float32."""
    if GATE == SILU:
        out = gate * tl.sigmoid(gate) * up
    elif GATE == CLAMPED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        out = (up + 1.0) * gate * tl.sigmoid(gate * alpha)
    else:
        cubic = gate * (1.0 + 0.044715 * gate * gate)
        out = gate * tl.sigmoid(1.5957691216057308 * cubic) * up  # 2 * sqrt(2 / pi)
    return out


@triton.jit
def _add_product(
    acc,
    x_even,
    x_odd,
    data_ptrs,  # [BLOCK_N, 1], at the first number of the rows
    scale_ptrs,  # [BLOCK_N, 1], at the first scale of the rows
    zero_ptrs,
    k,
    num_k,
    DTYPE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SCALE_K: tl.constexpr,
    FORMAT: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    EVEN_K: tl.constexpr,
    ASM: tl.constexpr,
    WX: tl.constexpr,
):
    """acc plus the product with one tile of the weight, its scales applied."""
    HALVES: tl.constexpr = FORMAT >= INT4  # INT4 or MXFP4
    BYTES: tl.constexpr = BLOCK_K // 2 if HALVES else BLOCK_K
    first = k // 2 if HALVES else k
    offs = first + tl.arange(0, BYTES)[None, :]
    if EVEN_K:
        packed = tl.load(data_ptrs + offs, eviction_policy="evict_first")
    else:
        last = num_k // 2 if HALVES else num_k
        packed = tl.load(data_ptrs + offs, mask=offs < last, other=0, eviction_policy="evict_first")
    group = 8
    if FORMAT == MXFP4:
        offs_s = k // 32 + tl.arange(0, BLOCK_K // 32)[None, :]
        if EVEN_K:
            group = tl.load(scale_ptrs + offs_s).to(tl.int32)
        else:
            group = tl.load(scale_ptrs + offs_s, mask=offs_s < num_k // 32, other=0).to(tl.int32)
    elif FORMAT == INT4:
        if HAS_ZERO:
            group = tl.load(zero_ptrs + (k // SCALE_K if SCALE_K > 0 else 0)).to(tl.int32)
        else:
            group = tl.full([packed.shape[0], 1], 8, tl.int32)
    even, odd = unpack(packed, group, DTYPE, FORMAT, ASM)
    IS_SCALED: tl.constexpr = SCALE_K > 0 and FORMAT != MXFP4
    if IS_SCALED:
        part = tl.zeros_like(acc)
    else:
        part = acc
    if WX:
        part = tl.dot(even, tl.trans(x_even), part, input_precision="ieee")
        if HALVES:
            part = tl.dot(odd, tl.trans(x_odd), part, input_precision="ieee")
    else:
        part = tl.dot(x_even, tl.trans(even), part, input_precision="ieee")
        if HALVES:
            part = tl.dot(x_odd, tl.trans(odd), part, input_precision="ieee")
    if IS_SCALED:
        scale = tl.load(scale_ptrs + k // SCALE_K)
        part = acc + part * (scale if WX else tl.trans(scale))
    return part


@triton.jit
def _finished(
    acc,
    scale_ptrs,
    bias_ptrs,  # [BLOCK_N]
    is_column,
    dtype: tl.constexpr,
    SCALE_K: tl.constexpr,
    FORMAT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ASM: tl.constexpr,
    WX: tl.constexpr,
):
    """The sums as [BLOCK_M, BLOCK_N] with what is left of the scales, rounded, with the bias."""
    if FORMAT == MXFP4:
        acc *= mx_factor(FORMAT, ASM)
    elif FORMAT != PLAIN and SCALE_K == 0:
        scale = tl.load(scale_ptrs)
        acc *= scale if WX else tl.trans(scale)
    if WX:
        acc = tl.trans(acc)
    if HAS_BIAS:
        acc += tl.load(bias_ptrs, mask=is_column, other=0.0).to(tl.float32)[None, :]
    return acc.to(dtype).to(tl.float32)


@triton.jit(do_not_specialize=["num_rows", "max_tiles"])
def grouped_kernel(
    out_ptr,  # [S, N], contiguous
    x_ptr,  # [rows, K]
    order_ptr,
    tiles_ptr,
    index_ptr,  # [S], where there is one token
    data_ptr,  # [E, N or 2N, K as stored]
    scale_ptr,  # [E, rows of scales, columns of scales]
    zero_ptr,
    bias_ptr,  # [E, N or 2N]
    num_rows,
    num_columns,  # N
    num_k,
    max_tiles,
    chosen,  # assignments that share a row of x
    stride_x,
    stride_expert,
    stride_row,
    stride_scale_expert,
    stride_scale_row,
    alpha,
    limit,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    FORMAT: tl.constexpr,
    SCALE_ROWS: tl.constexpr,  # rows that share a scale; 0: all
    SCALE_K: tl.constexpr,  # inputs that share a scale; 0: all
    GATE: tl.constexpr,
    INTERLEAVED: tl.constexpr,  # gate and up in turns, not one after the other
    HAS_BIAS: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    EVEN_K: tl.constexpr,
    MODE: tl.constexpr,  # 0: one expert and rows in order, 1: one token, 2: planned tiles
    ASM: tl.constexpr,
    WX: tl.constexpr,
):
    """out[s] = act(W[expert of s] x[s // chosen] + bias), for a tile of s and of outputs."""
    tile = tl.program_id(1)
    rows = tl.arange(0, BLOCK_M)
    if MODE == 0:
        expert = tl.program_id(1) * 0
        assignment = tile * BLOCK_M + rows
        is_row = assignment < num_rows
    elif MODE == 1:
        expert = tl.load(index_ptr + tile).to(tl.int32)
        assignment = tile + rows
        is_row = rows == 0
    else:
        expert = tl.load(tiles_ptr + tile)
        if expert < 0:
            return
        place = tl.load(tiles_ptr + max_tiles + tile) + rows
        is_row = place < tl.load(tiles_ptr + 2 * max_tiles + tile)
        assignment = tl.load(order_ptr + place, mask=is_row, other=0)

    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = column < num_columns
    column = tl.minimum(column, num_columns - 1)  # the last again: that is not stored
    GAP: tl.constexpr = 2 if INTERLEAVED else 1
    gate_row = column * GAP
    up_row = gate_row + (1 if INTERLEAVED else num_columns)
    expert = expert.to(tl.int64)
    data_ptr += expert * stride_expert
    scale_ptr += expert * stride_scale_expert
    zero_ptr += expert * stride_scale_expert
    bias_ptr += expert * (num_columns * (1 if GATE == NO_GATE else 2))
    gate_ptrs = data_ptr + gate_row.to(tl.int64)[:, None] * stride_row
    up_ptrs = data_ptr + up_row.to(tl.int64)[:, None] * stride_row
    gate_scale = (gate_row // SCALE_ROWS if SCALE_ROWS > 0 else gate_row * 0)[:, None]
    up_scale = (up_row // SCALE_ROWS if SCALE_ROWS > 0 else up_row * 0)[:, None]
    gate_scale *= stride_scale_row
    up_scale *= stride_scale_row

    HALVES: tl.constexpr = FORMAT >= INT4  # INT4 or MXFP4
    x_ptrs = x_ptr + (assignment // chosen).to(tl.int64)[:, None] * stride_x
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    PAIRS: tl.constexpr = HALVES and DTYPE.primitive_bitwidth == 16
    if PAIRS:
        x_pairs = x_ptrs.to(tl.pointer_type(tl.int32))
    else:
        x_pairs = x_ptrs
    if WX:
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = acc
    for k in tl.range(0, num_k, BLOCK_K, num_stages=STAGES):
        if HALVES:
            offs_h = k // 2 + tl.arange(0, BLOCK_K // 2)[None, :]
            mask = is_row[:, None] & (offs_h < num_k // 2)
            if PAIRS:
                pair = tl.load(x_pairs + offs_h, mask=mask, other=0)
                x_even = pair.to(tl.int16).to(DTYPE, bitcast=True)
                x_odd = (pair >> 16).to(tl.int16).to(DTYPE, bitcast=True)
            else:
                x_even = tl.load(x_ptrs + 2 * offs_h, mask=mask, other=0.0)
                x_odd = tl.load(x_ptrs + 2 * offs_h + 1, mask=mask, other=0.0)
        else:
            offs_k = k + tl.arange(0, BLOCK_K)[None, :]
            mask = is_row[:, None] & (offs_k < num_k)
            x_even = tl.load(x_ptrs + offs_k, mask=mask, other=0.0)
            x_odd = x_even
        acc = _add_product(
            acc, x_even, x_odd, gate_ptrs, scale_ptr + gate_scale, zero_ptr + gate_scale, k, num_k,
            DTYPE, BLOCK_K, SCALE_K, FORMAT, HAS_ZERO, EVEN_K, ASM, WX,
        )  # fmt: skip
        if GATE != NO_GATE:
            up = _add_product(
                up, x_even, x_odd, up_ptrs, scale_ptr + up_scale, zero_ptr + up_scale, k, num_k,
                DTYPE, BLOCK_K, SCALE_K, FORMAT, HAS_ZERO, EVEN_K, ASM, WX,
            )  # fmt: skip

    out = _finished(
        acc, scale_ptr + gate_scale, bias_ptr + gate_row, is_column, DTYPE, SCALE_K, FORMAT,
        HAS_BIAS, ASM, WX,
    )  # fmt: skip
    if GATE != NO_GATE:
        up = _finished(
            up, scale_ptr + up_scale, bias_ptr + up_row, is_column, DTYPE, SCALE_K, FORMAT,
            HAS_BIAS, ASM, WX,
        )  # fmt: skip
        out = _gated(out, up, alpha, limit, GATE)
    out_ptrs = out_ptr + assignment.to(tl.int64)[:, None] * num_columns + column[None, :]
    tl.store(out_ptrs, out.to(DTYPE), mask=is_row[:, None] & is_column[None, :])
