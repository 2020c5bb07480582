"""Triton kernels of `fp8_activations`, `fp8_linear` and `fp8_experts`: FP8 activations, and their
products with weights in tiles.

Shapes: M rows of x, N outputs, K inputs, S assignments of rows to E experts; N and K are multiples
of 128.
"""

# pyright: reportGeneralTypeIssues=false
import triton
import triton.language as tl

from peagle.kernels.linear.packed_weights_triton import TILE_BYTES
from peagle.kernels.linear.split_sums_triton import add_shares
from peagle.kernels.overlap_triton import wait_for_inputs

BLOCK = tl.constexpr(128)  # inputs, and rows of the weight, that share a scale
# The four numbers of a word ($1): of each half, the second of a pair in the high byte.
_WORD_ASM = tl.constexpr(
    """{
    .reg .b32 a, b, c;
    shl.b32 a, $1, 4;
    shr.b32 b, $1, 4;
    shr.b32 c, $1, 8;
    lop3.b32 a, $1, 0x800f800f, a, 0xe2;
    lop3.b32 b, b, 0x00800080, c, 0xe2;
    lop3.b32 $0, b, 0x00f000f0, a, 0xe2;
    }"""
)


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
    k = place // 64 * 64 + place // 4 % 4 * 16 + (1 - place % 2) * 8
    k += place // 16 % 4 * 2 + place // 2 % 2
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
    words = tl.load(w_ptr + at + n % 64 * 16 + word % 16).to(tl.uint32, bitcast=True)
    # As `_WORD_ASM`.
    low = (words & 0x800F800F) | (words << 4 & 0x7FF07FF0)
    high = (words >> 4 & 0x00800080) | (words >> 8 & 0xFF7FFF7F)
    numbers = (high & 0x00F000F0) | (low & 0xFF0FFF0F)
    out_at = out_ptr + n.to(tl.int64) * (num_k // 4) + word
    tl.store(out_at, numbers.to(tl.int32, bitcast=True))


@triton.jit
def _weight_ptrs(w_ptr, first, num_k, BLOCK_N: tl.constexpr):
    """Return pointers to the first 128 inputs of BLOCK_N rows of tiles, [BLOCK_N, 128]."""
    n = first + tl.arange(0, BLOCK_N)[:, None]
    k = tl.arange(0, BLOCK)[None, :]
    return w_ptr + (n // 64 * (num_k // 64) + k // 64) * TILE_BYTES + n % 64 * 64 + k % 64


@triton.jit
def _numbers(data, ASM: tl.constexpr):
    """Return the numbers of the words of `PackedWeight`, float8e4nv, in the order of
    `fp8_activations.tiled_inputs`; the bytes of both are uint8 and float8e4nv [rows, inputs].
    """
    if ASM:
        # The matrix unit takes four inputs in FP8 at a time, so every layout that a product may
        # choose has the four bytes of a word in a register.
        numbers = tl.inline_asm_elementwise(_WORD_ASM, "=r,r", [data], tl.uint8, True, 4)
    else:
        low, high = tl.split(data.reshape([data.shape[0], data.shape[1] // 2, 2]))
        first = (high & 0x80) | (high << 4 & 0x70) | (low >> 4)
        second = (high << 4 & 0x80) | (high & 0x70) | (low & 0xF)
        numbers = tl.join(second, first).reshape(data.shape)
    return numbers.to(tl.float8e4nv, bitcast=True)


@triton.jit
def _add_block(acc, x, x_scale, w_ptrs, w_scale, ASM: tl.constexpr, WX: tl.constexpr):
    """acc plus the product of 128 inputs, times both scales."""
    w = _numbers(tl.load(w_ptrs), ASM)
    if WX:
        part = tl.dot(w, tl.trans(x)) * (w_scale * x_scale)[None, :]
    else:
        part = tl.dot(x, tl.trans(w)) * (w_scale * x_scale)[:, None]
    return acc + part


@triton.jit
def multiply_tile(
    x_ptr,  # float8e4nv [rows, K], contiguous, in the order of `tiled_inputs`
    x_scale_ptr,  # float32 [K / 128, stride_x_scale]
    row,  # int [BLOCK_M]: rows of x
    is_row,
    w_ptr,  # uint8 [N, K] in tiles, contiguous: `PackedWeight.data`
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
    ASM: tl.constexpr,  # unpack by assembly
    WX: tl.constexpr,  # multiply W x^T in the matrix unit, not x W^T
):
    """Return x W^T in float32 [BLOCK_M, BLOCK_N] for both halves of a tile of outputs, and whether
    this program has the sums over all of K: the last of the SPLIT_K programs of a tile has them.

    Programs are (tiles of outputs * SPLIT_K, tiles of rows). Each sum over 128 inputs is multiplied
    by the scales of x and of the weight before it is added.
    """
    blocks_k = num_k // BLOCK
    w_a = _weight_ptrs(w_ptr, first_a, num_k, BLOCK_N)
    w_b = _weight_ptrs(w_ptr, first_b, num_k, BLOCK_N)
    scale_a = w_scale_ptr + first_a // BLOCK * blocks_k
    scale_b = w_scale_ptr + first_b // BLOCK * blocks_k
    x_ptrs = x_ptr + row.to(tl.int64)[:, None] * num_k + tl.arange(0, BLOCK)[None, :]
    acc_a = tl.zeros([BLOCK_N, BLOCK_M] if WX else [BLOCK_M, BLOCK_N], tl.float32)
    acc_b = acc_a
    split = tl.program_id(0) % SPLIT_K
    share = tl.cdiv(blocks_k, SPLIT_K)
    last = tl.minimum((split + 1) * share, blocks_k)
    for block in tl.range(split * share, last, num_stages=STAGES):
        at = block * (2 * TILE_BYTES)
        x = tl.load(x_ptrs + block * BLOCK, mask=is_row[:, None], other=0.0)
        x_scale = tl.load(x_scale_ptr + block * stride_x_scale + row, mask=is_row, other=0.0)
        acc_a = _add_block(acc_a, x, x_scale, w_a + at, tl.load(scale_a + block), ASM, WX)
        acc_b = _add_block(acc_b, x, x_scale, w_b + at, tl.load(scale_b + block), ASM, WX)
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
    x_ptr,  # float8e4nv [M, K], contiguous, in the order of `tiled_inputs`
    x_scale_ptr,  # float32 [K / 128, stride_x_scale]
    w_ptr,  # uint8 [N, K] in tiles, contiguous
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
    ASM: tl.constexpr,
    WX: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """out = x W^T + bias for a tile of rows and of 2 * BLOCK_N outputs."""
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = row < num_rows
    first = tl.program_id(0) // SPLIT_K * (2 * BLOCK_N)
    wait_for_inputs(OVERLAPS)
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
        ASM,
        WX,
    )
    if not is_last:
        return
    column = first + tl.arange(0, BLOCK_N)
    out_ptrs = out_ptr + row.to(tl.int64)[:, None] * num_columns + column[None, :]
    _store_half(out_ptrs, acc_a, bias_ptr + column, is_row, HAS_BIAS)
    _store_half(out_ptrs + BLOCK_N, acc_b, bias_ptr + column + BLOCK_N, is_row, HAS_BIAS)


@triton.jit(do_not_specialize=["max_tiles", "chosen"])
def experts_kernel(
    out_ptr,  # [S, N], contiguous
    x_ptr,  # float8e4nv [rows, K], contiguous, in the order of `tiled_inputs`
    x_scale_ptr,  # float32 [K / 128, stride_x_scale]
    order_ptr,  # of `plan_tiles`
    tiles_ptr,
    w_ptr,  # uint8 [E, N or 2N, K] in tiles, contiguous; 2N with a gate
    w_scale_ptr,  # float32 [E, N / 128 or 2N / 128, K / 128], contiguous
    num_columns,  # N
    num_k,
    max_tiles,
    chosen,  # assignments that share a row of x
    stride_x_scale,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_GATE: tl.constexpr,
    ASM: tl.constexpr,
    WX: tl.constexpr,
):
    """out[s] = silu(gate) * up or W[expert of s] x[s // chosen], for a tile of s and of outputs.

    A tile of outputs has two halves: gate and up, or one after the other.
    """
    tile, tile_n = tl.program_id(1), tl.program_id(0)
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
    acc_a, acc_b, _ = multiply_tile(
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
        out_ptr,  # K is not split
        out_ptr,
        1,
        BLOCK_M,
        BLOCK_N,
        STAGES,
        ASM,
        WX,
    )
    column = first_a + tl.arange(0, BLOCK_N)
    out_ptrs = out_ptr + assignment.to(tl.int64)[:, None] * num_columns + column[None, :]
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    if HAS_GATE:
        tl.store(out_ptrs, (acc_a * tl.sigmoid(acc_a) * acc_b).to(DTYPE), mask=is_row[:, None])
    else:
        tl.store(out_ptrs, acc_a.to(DTYPE), mask=is_row[:, None])
        tl.store(out_ptrs + BLOCK_N, acc_b.to(DTYPE), mask=is_row[:, None])
