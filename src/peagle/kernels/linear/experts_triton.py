"""Triton kernels of `kernels.linear.experts`: the plan of the tiles, the grouped product, the sum.

Shapes: T tokens, C experts chosen for each, S = T * C assignments of tokens to experts, E experts.
An assignment's number is token * C + place.
"""

import triton
import triton.language as tl

from peagle.kernels.linear.packed_weights_triton import (
    INT4,
    MXFP4,
    PLAIN,
    load_tiles,
    row_offsets,
    scale_of,
)
from peagle.kernels.linear.split_sums_triton import add_shares
from peagle.kernels.overlap_triton import wait_for_inputs

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
    OVERLAPS: tl.constexpr,
):
    """Order the assignments by expert, and cut each expert's into tiles. One program.

    The order of an expert's assignments is left to chance: no row of a product depends on others.
    """
    wait_for_inputs(OVERLAPS)
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


@triton.jit(do_not_specialize=["num_assignments"])
def count_kernel(
    counts_ptr,  # int32 [blocks, E]
    index_ptr,  # [S]: the expert of an assignment
    num_assignments,
    num_experts,
    BLOCK: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """Count the assignments of each expert in a block of BLOCK assignments."""
    s = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_one = s < num_assignments
    expert = tl.load(index_ptr + s, mask=is_one, other=0).to(tl.int32)
    e = tl.arange(0, EXPERTS)
    counts = tl.histogram(expert, EXPERTS, mask=is_one)
    tl.store(counts_ptr + tl.program_id(0) * num_experts + e, counts, mask=e < num_experts)


@triton.jit(do_not_specialize=["num_assignments", "max_tiles"])
def place_kernel(
    order_ptr,  # of `plan_kernel`
    tiles_ptr,
    next_ptr,  # int32 [blocks, E], for this kernel alone
    counts_ptr,  # int32 [blocks, E], of `count_kernel`
    index_ptr,  # [S]
    num_assignments,
    num_experts,
    max_tiles,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,  # blocks whose counts are read at once
    TILES: tl.constexpr,  # tiles that are written at once
):
    """Plan as `plan_kernel` does: a program orders its block, and writes a share of the tiles."""
    # Sum the counts of all blocks, and of those before this one.
    block, num_blocks = tl.program_id(0), tl.num_programs(0)
    e = tl.arange(0, EXPERTS)
    is_expert = e < num_experts
    counts = tl.zeros([EXPERTS], tl.int32)
    before = counts
    for first_row in range(0, num_blocks, ROWS):
        row = first_row + tl.arange(0, ROWS)[:, None]
        mask = (row < num_blocks) & is_expert[None, :]
        part = tl.load(counts_ptr + row * num_experts + e[None, :], mask=mask, other=0)
        counts += tl.sum(part, 0)
        before += tl.sum(tl.where(row < block, part, 0), 0)
    first = tl.cumsum(counts, 0) - counts

    # Order the assignments of this block.
    next_ptr += block * num_experts
    tl.store(next_ptr + e, first + before, mask=is_expert)
    tl.debug_barrier()
    s = block * BLOCK + tl.arange(0, BLOCK)
    is_one = s < num_assignments
    expert = tl.load(index_ptr + s, mask=is_one, other=0).to(tl.int32)
    place = tl.atomic_add(next_ptr + expert, 1, mask=is_one)
    tl.store(order_ptr + place, s, mask=is_one)

    # Find the expert of each tile: the only one whose tiles it is among.
    num_tiles = tl.cdiv(counts, BLOCK_M)
    first_tile = tl.cumsum(num_tiles, 0) - num_tiles
    for share in range(block * TILES, max_tiles, num_blocks * TILES):
        t = share + tl.arange(0, TILES)
        in_expert = t[:, None] - first_tile[None, :]
        is_own = (in_expert >= 0) & (in_expert < num_tiles[None, :])
        begin = first[None, :] + in_expert * BLOCK_M
        end = tl.minimum(begin + BLOCK_M, (first + counts)[None, :])
        is_tile = t < max_tiles
        owner = tl.sum(tl.where(is_own, e[None, :] + 1, 0), 1) - 1
        tl.store(tiles_ptr + t, owner, mask=is_tile)
        begin = tl.sum(tl.where(is_own, begin, 0), 1)
        tl.store(tiles_ptr + max_tiles + t, begin, mask=is_tile)
        end = tl.sum(tl.where(is_own, end, 0), 1)
        tl.store(tiles_ptr + 2 * max_tiles + t, end, mask=is_tile)


@triton.jit
def _gated(gate, up, alpha, limit, GATE: tl.constexpr):
    """Return the activation of gate and up, in float32."""
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
def _load_x(x_ptrs, is_row, k, num_k, STEP: tl.constexpr, FORMAT: tl.constexpr):
    """Load inputs k to k + STEP of x, in the order of the weight's by `load_tiles`."""
    if FORMAT < INT4:
        offs = k + tl.arange(0, STEP)[None, :]
        first = tl.load(x_ptrs + offs, mask=is_row & (offs < num_k), other=0.0)
        last = first
    else:
        i = tl.arange(0, STEP // 2)[None, :]
        offs = k + i // 16 * 32 + i % 16
        mask = is_row & (offs < num_k)
        first = tl.load(x_ptrs + offs, mask=mask, other=0.0)
        last = tl.load(x_ptrs + offs + 16, mask=mask, other=0.0)
    return first, last


@triton.jit
def _add_product(
    acc,
    x_first,
    x_last,
    row_ptrs,  # [BLOCK_N, 1], at the first number of the weight's rows
    scale,  # [BLOCK_N]: as stored, of inputs k and later
    zero,
    k,
    num_k,
    STEP: tl.constexpr,
    IS_SCALED: tl.constexpr,
    FORMAT: tl.constexpr,
    EVEN_K: tl.constexpr,
    ASM: tl.constexpr,
    WX: tl.constexpr,
):
    """acc plus the product with STEP inputs of the weight."""
    first, last = load_tiles(row_ptrs, zero, k, num_k, STEP, x_first.dtype, FORMAT, EVEN_K, ASM)
    if IS_SCALED:
        part = tl.zeros_like(acc)
    else:
        part = acc
    if WX:
        part = tl.dot(first, tl.trans(x_first), part, input_precision="ieee")
        if FORMAT >= INT4:
            part = tl.dot(last, tl.trans(x_last), part, input_precision="ieee")
    else:
        part = tl.dot(x_first, tl.trans(first), part, input_precision="ieee")
        if FORMAT >= INT4:
            part = tl.dot(x_last, tl.trans(last), part, input_precision="ieee")
    if IS_SCALED:
        if FORMAT == MXFP4:
            scale = scale_of(scale, k)
        part = acc + part * (scale[:, None] if WX else scale[None, :])
    return part


@triton.jit
def _finished(
    acc,
    scale_ptrs,
    bias_ptrs,  # [BLOCK_N]
    is_output,
    DTYPE: tl.constexpr,
    IS_OPEN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WX: tl.constexpr,
):
    """Return the sums as float32 [BLOCK_M, BLOCK_N], with the bias, rounded to DTYPE.

    If IS_OPEN, they are first multiplied by the scale that all inputs share.
    """
    if WX:
        acc = tl.trans(acc)
    if IS_OPEN:
        acc *= tl.load(scale_ptrs)[None, :]
    if HAS_BIAS:
        acc += tl.load(bias_ptrs, mask=is_output, other=0.0).to(tl.float32)[None, :]
    return acc.to(DTYPE).to(tl.float32)


@triton.jit(do_not_specialize=["num_rows", "max_tiles"])
def grouped_kernel(
    out_ptr,  # [S, N], contiguous
    x_ptr,  # [rows, K]
    order_ptr,
    tiles_ptr,
    index_ptr,  # [S]
    data_ptr,  # [E, N or 2N, K as stored]; 2N with a gate
    scale_ptr,  # [E, rows of scales, columns of scales]
    zero_ptr,
    bias_ptr,  # [E, N or 2N]
    partial_ptr,  # float32 [tiles, SPLIT_K, 2, BLOCK_M * BLOCK_N], where SPLIT_K > 1
    arrivals_ptr,  # int32 [tiles], zero before and after, where SPLIT_K > 1
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
    stride_scale_k,
    alpha,
    limit,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STEP: tl.constexpr,
    STEPS: tl.constexpr,
    STAGES: tl.constexpr,
    SPLIT_K: tl.constexpr,
    FORMAT: tl.constexpr,
    SCALE_ROWS: tl.constexpr,  # rows that share a scale; 0: all
    SCALE_K: tl.constexpr,  # inputs that share a scale; 0: all
    GATE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    MODE: tl.constexpr,  # 0: one weight, rows in order, 1: one assignment a tile, 2: planned tiles
    ASM: tl.constexpr,
    WX: tl.constexpr,  # multiply W x^T in the matrix unit, not x W^T
    OVERLAPS: tl.constexpr,
):
    """out[s] = act(W[expert of s] x[s // chosen] + bias), for a tile of s and of outputs, or one
    share of its sum over K.
    """
    tile = tl.program_id(1)
    tile_n = tl.program_id(0) // SPLIT_K
    split = tl.program_id(0) % SPLIT_K
    wait_for_inputs(OVERLAPS)
    # Find the expert and the assignments of this tile.
    rows = tl.arange(0, BLOCK_M)
    if MODE == 0:
        expert = tile * 0
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

    # Two tiles of outputs, a and b: gate and up, or one after the other.
    n = tl.arange(0, BLOCK_N)
    if GATE == NO_GATE:
        row_a = tile_n * (2 * BLOCK_N) + n
        row_b = row_a + BLOCK_N
        num_stored = num_columns
    else:
        row_a = tile_n * BLOCK_N + n
        row_b = row_a + num_columns
        num_stored = 2 * num_columns
    is_a = row_a < num_columns
    is_b = row_b < num_stored
    if not EVEN_N:  # the last again, where there are no more: that is not stored
        row_a = tl.minimum(row_a, num_stored - 1)
        row_b = tl.minimum(row_b, num_stored - 1)
    # Locate their weights, scales and inputs.
    expert = expert.to(tl.int64)
    data_ptr += expert * stride_expert
    scale_ptr += expert * stride_scale_expert
    zero_ptr += expert * stride_scale_expert
    bias_ptr += expert * num_stored
    data_a = data_ptr + row_offsets(row_a, stride_row, FORMAT)[:, None]
    data_b = data_ptr + row_offsets(row_b, stride_row, FORMAT)[:, None]
    offset_a = (row_a // SCALE_ROWS if SCALE_ROWS > 0 else row_a * 0) * stride_scale_row
    offset_b = (row_b // SCALE_ROWS if SCALE_ROWS > 0 else row_b * 0) * stride_scale_row

    x_ptrs = x_ptr + (assignment // chosen).to(tl.int64)[:, None] * stride_x
    # Sum the products over this share of K.
    acc_a = tl.zeros([BLOCK_N, BLOCK_M] if WX else [BLOCK_M, BLOCK_N], tl.float32)
    acc_b = acc_a
    IS_SCALED: tl.constexpr = SCALE_K > 0
    # Inputs of a stored scale; they are loaded once for all.
    STORED_K: tl.constexpr = 128 if FORMAT == MXFP4 else SCALE_K if IS_SCALED else STEP * STEPS
    share = tl.cdiv(tl.cdiv(num_k, STEP * STEPS), SPLIT_K) * (STEP * STEPS)
    last = tl.minimum((split + 1) * share, num_k)
    for first in tl.range(split * share, last, STEP * STEPS, num_stages=STAGES):
        for i in tl.static_range(STEPS):
            k = first + i * STEP
            # Load the scales and zeros where new ones begin.
            if i == 0:
                scale_a = row_a
                scale_b = row_b
                zero_a = tl.full([BLOCK_N], 8, tl.int32)
                zero_b = zero_a
            if i * STEP % STORED_K == 0 or STEP * STEPS % STORED_K != 0:
                scale_at = 0
                if IS_SCALED:
                    # Inputs that are not there are zero in x: any scale will do for them.
                    scale_at = tl.minimum(k, num_k - 1) // STORED_K * stride_scale_k
                    scale_a = tl.load(scale_ptr + offset_a + scale_at)
                    scale_b = tl.load(scale_ptr + offset_b + scale_at)
                if HAS_ZERO:
                    zero_a = tl.load(zero_ptr + offset_a + scale_at).to(tl.int32)
                    zero_b = tl.load(zero_ptr + offset_b + scale_at).to(tl.int32)
            # Load x and multiply.
            x_first, x_last = _load_x(x_ptrs, is_row[:, None], k, num_k, STEP, FORMAT)
            acc_a = _add_product(
                acc_a, x_first, x_last, data_a, scale_a, zero_a,
                k, num_k, STEP, IS_SCALED, FORMAT, EVEN_K, ASM, WX,
            )  # fmt: skip
            acc_b = _add_product(
                acc_b, x_first, x_last, data_b, scale_b, zero_b,
                k, num_k, STEP, IS_SCALED, FORMAT, EVEN_K, ASM, WX,
            )  # fmt: skip

    # Add up the shares; only the last program to arrive goes on.
    if SPLIT_K > 1:
        tiles_n = tl.num_programs(0) // SPLIT_K
        acc_a, acc_b, is_last = add_shares(
            acc_a, acc_b, partial_ptr, arrivals_ptr, tile * tiles_n + tile_n, split, SPLIT_K
        )
        if not is_last:
            return

    # Scale, add the bias, apply the gate and store.
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    IS_OPEN: tl.constexpr = FORMAT != PLAIN and not IS_SCALED
    out_a = _finished(
        acc_a, scale_ptr + offset_a, bias_ptr + row_a, is_a, DTYPE, IS_OPEN, HAS_BIAS, WX
    )
    out_b = _finished(
        acc_b, scale_ptr + offset_b, bias_ptr + row_b, is_b, DTYPE, IS_OPEN, HAS_BIAS, WX
    )
    out_ptrs = out_ptr + assignment.to(tl.int64)[:, None] * num_columns
    mask = is_row[:, None] & is_a[None, :]
    if GATE == NO_GATE:
        tl.store(out_ptrs + row_a[None, :], out_a.to(DTYPE), mask=mask)
        mask = is_row[:, None] & is_b[None, :]
        tl.store(out_ptrs + row_b[None, :], out_b.to(DTYPE), mask=mask)
    else:
        out = _gated(out_a, out_b, alpha, limit, GATE)
        tl.store(out_ptrs + row_a[None, :], out.to(DTYPE), mask=mask)


@triton.jit
def epilogue_kernel(
    out_ptr,  # [S, N]
    y_ptr,  # [S, N or 2N], contiguous; 2N with a gate
    bias_ptr,  # [E, N or 2N]
    expert_ptr,  # [S]
    place_ptr,  # [S]
    num_columns,  # N
    alpha,
    limit,
    BLOCK: tl.constexpr,
    GATE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_PLACE: tl.constexpr,
):
    """out[place[s]] = act(y[s] + bias[expert[s]]), of BLOCK outputs of one s."""
    s = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_output = n < num_columns
    num_stored = num_columns * (1 if GATE == NO_GATE else 2)
    DTYPE: tl.constexpr = y_ptr.dtype.element_ty
    y_ptrs = y_ptr + s * num_stored + n
    out = tl.load(y_ptrs, mask=is_output, other=0.0).to(tl.float32)
    bias_ptrs = bias_ptr + tl.load(expert_ptr + s).to(tl.int64) * num_stored + n
    if HAS_BIAS:
        bias = tl.load(bias_ptrs, mask=is_output, other=0.0).to(tl.float32)
        out = (out + bias).to(DTYPE).to(tl.float32)
    if GATE != NO_GATE:
        up = tl.load(y_ptrs + num_columns, mask=is_output, other=0.0).to(tl.float32)
        if HAS_BIAS:
            bias = tl.load(bias_ptrs + num_columns, mask=is_output, other=0.0).to(tl.float32)
            up = (up + bias).to(DTYPE).to(tl.float32)
        out = _gated(out, up, alpha, limit, GATE)
    place = tl.load(place_ptr + s).to(tl.int64) if HAS_PLACE else s
    tl.store(out_ptr + place * num_columns + n, out.to(DTYPE), mask=is_output)


@triton.jit
def weighted_sum_kernel(
    out_ptr,  # [T, N], contiguous
    y_ptr,  # [T, CHOSEN, N], contiguous
    weight_ptr,  # [T, CHOSEN], contiguous
    num_columns,  # N
    BLOCK: tl.constexpr,
    CHOSEN: tl.constexpr,
):
    """out[t] = the sum over c of weight[t, c] * y[t, c], of BLOCK outputs of one t."""
    t = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_output = n < num_columns
    y_ptrs = y_ptr + t * CHOSEN * num_columns + n
    out = tl.zeros([BLOCK], tl.float32)
    for c in tl.static_range(CHOSEN):
        weight = tl.load(weight_ptr + t * CHOSEN + c).to(tl.float32)
        y = tl.load(y_ptrs + c * num_columns, mask=is_output, other=0.0)
        out += weight * y.to(tl.float32)
    tl.store(out_ptr + t * num_columns + n, out.to(out_ptr.dtype.element_ty), mask=is_output)
