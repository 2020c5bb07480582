"""Hopper only; elsewhere, and for other types, `grouped_kernel` of `experts_triton` computes it.

Grouped products of tiled weights in Gluon, the part of Triton where programs choose layouts. The
words go from memory into the registers from which the matrix unit takes them unpacked: straight, or
for wgmma of "fp8" through shared memory, which holds the words of several steps. `packed_weights`
documents their order. x comes to shared memory by asynchronous copies.

The scales of "mxfp4" are powers of two, which a thread multiplies in while it unpacks. The scales
of "fp8" are float32 and multiply sums: once at the end where all inputs share them, else the sum of
each `STEP` inputs. x may be in FP8 itself, with scales of its own that multiply the same sums; its
inputs are then in the order of `fp8_activations.tiled_inputs`, and the matrix unit takes the
weights from shared memory as they lie.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from peagle.kernels.linear.hopper_gluon import (
    STEP,
    async_load,
    await_inputs,
    barrier,
    copy_rows,
    copy_scales,
    give_share,
    share_places,
    sum_shares,
)
from peagle.kernels.linear.packed_weights_triton import MXFP4

TILE_WORDS = gl.constexpr(1024)  # of 64 rows of 16

NO_GATE = gl.constexpr(0)
SILU = gl.constexpr(1)
CLAMPED = gl.constexpr(2)

# The eight "mxfp4" numbers of a word ($8), in the order of their inputs, times 2^126 and the scale,
# which is twice in $9.
_MXFP4_ASM = gl.constexpr(
    """{
    .reg .b32 a, b, c;
    shl.b32 b, $8, 3;
    and.b32 a, $8, 0x81c081c0;
    and.b32 b, b, 0x81c081c0;
    mul.bf16x2 a, a, $9;
    mul.bf16x2 b, b, $9;
    mov.b32 {$0, $1}, a;
    mov.b32 {$2, $3}, b;
    shl.b32 a, $8, 6;
    shl.b32 b, $8, 1;
    and.b32 a, a, 0x81c081c0;
    shr.b32 c, $8, 5;
    and.b32 b, b, 0x80008000;
    lop3.b32 b, c, 0x01000100, b, 0xea;
    shr.b32 c, $8, 4;
    lop3.b32 b, c, 0x00c000c0, b, 0xea;
    mul.bf16x2 a, a, $9;
    mul.bf16x2 b, b, $9;
    mov.b32 {$4, $5}, a;
    mov.b32 {$6, $7}, b;
    }"""
)
# The four "fp8" numbers of a word ($4), in the order of their inputs.
_FP8_ASM = gl.constexpr(
    """{
    .reg .b32 a, b, c, f;
    mov.b32 f, 0x7b807b80;
    shr.b32 a, $4, 4;
    and.b32 a, a, 0x07f007f0;
    lop3.b32 a, $4, 0x80008000, a, 0xea;
    shl.b32 b, $4, 4;
    shl.b32 c, $4, 8;
    and.b32 b, b, 0x07f007f0;
    lop3.b32 b, c, 0x80008000, b, 0xea;
    mul.bf16x2 a, a, f;
    mul.bf16x2 b, b, f;
    mov.b32 {$0, $1}, a;
    mov.b32 {$2, $3}, b;
    }"""
)


@gluon.jit
def _row_offsets(row, stride_row):
    """Return the offset of the first word of each row; tiles have 64 rows of 64 bytes."""
    row = row.to(gl.int64)
    return row // 64 * stride_row + row % 64 * 64


@gluon.jit
def _load_words(row_ptrs, k, FORMAT: gl.constexpr, WORDS: gl.constexpr):
    """Load the words of inputs k to k + STEP: [rows, 16] of "mxfp4", [rows, 32] of "fp8"."""
    if FORMAT == MXFP4:
        i = gl.arange(0, STEP // 8, layout=gl.SliceLayout(0, WORDS))[None, :]
        offs = k // STEP * TILE_WORDS + i
    else:
        i = gl.arange(0, STEP // 4, layout=gl.SliceLayout(0, WORDS))[None, :]
        offs = (k // STEP * 2 + i // 16) * TILE_WORDS + i % 16
    return gl.load(row_ptrs + offs, eviction_policy="evict_first")


@gluon.jit
def _copy_words(first, second, row_ptrs, k, end, COPY: gl.constexpr):
    """Let the words of inputs k to k + STEP come to shared memory, two tiles of [rows, width];
    zeros where there are none.
    """
    width: gl.constexpr = first.shape[1]
    i = gl.arange(0, width, layout=gl.SliceLayout(0, COPY))[None, :]
    number, is_there = k // STEP * 2, (i < width) & (k < end)
    async_load(first, row_ptrs + (number * (64 * width) + i), mask=is_there)
    async_load(second, row_ptrs + ((number + 1) * (64 * width) + i), mask=is_there)


@gluon.jit
def _take_words(first, second, WORDS: gl.constexpr):
    """Return the words of two tiles in shared memory, [rows, 2 * width]."""
    width: gl.constexpr = first.shape[1]
    pair = gl.join(first.load(WORDS), second.load(WORDS)).permute([0, 2, 1])
    pair = pair.reshape([pair.shape[0], 2 * width])
    return gl.convert_layout(pair, WORDS, assert_trivial=True)


@gluon.jit
def _load_scales(row_ptrs, k, stride_k, STORED_K: gl.constexpr):
    """Load each row's scale of inputs k to k + STEP; of "mxfp4", the word of four scales."""
    return gl.load(row_ptrs + k // STORED_K * stride_k)


@gluon.jit
def _mxfp4_operand(words, scale, WORDS: gl.constexpr, A: gl.constexpr):
    """Return the numbers of words times their scales, bfloat16 [rows, STEP].

    `scale` has four scales a row. The matrix unit takes the numbers from the registers that hold
    them.
    """
    rows: gl.constexpr = words.shape[0]
    group = gl.arange(0, STEP // 8, layout=gl.SliceLayout(0, WORDS))[None, :] % 4
    exponent = (scale[:, None] >> (group * 8)) & 0xFF
    factor = (exponent + 126) * 0x00800080  # the bits of 2^(exponent - 127 + 126), twice
    numbers = gl.inline_asm_elementwise(
        _MXFP4_ASM, "=h,=h,=h,=h,=h,=h,=h,=h,r,r", [words, factor], (gl.bfloat16,) * 8, True, 1
    )
    first = gl.join(gl.join(numbers[0], numbers[1]), gl.join(numbers[2], numbers[3]))
    last = gl.join(gl.join(numbers[4], numbers[5]), gl.join(numbers[6], numbers[7]))
    # rows, threads, groups, places, and the two bits of a pair's number, the low one first
    tile = gl.join(first, last).reshape([rows, 4, 4, 2, 2, 2]).permute([0, 2, 5, 4, 1, 3])
    return gl.convert_layout(tile.reshape([rows, STEP]), A, assert_trivial=True)


@gluon.jit
def _fp8_operand(words, A: gl.constexpr):
    """Return the numbers of words, bfloat16 [rows, STEP], for the matrix unit, without a scale."""
    rows: gl.constexpr = words.shape[0]
    numbers = gl.inline_asm_elementwise(
        _FP8_ASM, "=h,=h,=h,=h,r", [words], (gl.bfloat16,) * 4, True, 1
    )
    tile = gl.join(gl.join(numbers[0], numbers[1]), gl.join(numbers[2], numbers[3]))
    # rows, tiles, threads, groups, places, pairs
    tile = tile.reshape([rows, 2, 4, 4, 2, 2]).permute([0, 1, 3, 5, 2, 4])
    return gl.convert_layout(tile.reshape([rows, STEP]), A, assert_trivial=True)


@gluon.jit
def _product_of_tiles(first, second, x_tile, none):
    """Begin to multiply the numbers of two tiles, as they lie, with x^T in FP8."""
    half: gl.constexpr = STEP // 2
    x = x_tile.slice(0, half, dim=1).permute([1, 0])
    part = warpgroup_mma(first, x, none, use_acc=False, is_async=True)
    x = x_tile.slice(half, half, dim=1).permute([1, 0])
    return warpgroup_mma(second, x, part, use_acc=True, is_async=True)


@gluon.jit
def _add_product(acc, operand, x_tile, B: gl.constexpr, WGMMA: gl.constexpr, FRESH: gl.constexpr):
    """acc plus the operand times x^T; with FRESH the product alone, and acc says its layout."""
    x = x_tile.permute([1, 0])
    if WGMMA:
        later = warpgroup_mma(operand, x, acc, use_acc=not FRESH, is_async=True)
        acc, _ = warpgroup_mma_wait(0, deps=[later, operand])
    else:
        if FRESH:
            acc = gl.full_like(acc, 0)
        acc = mma_v2(operand, x.load(B), acc)
    return acc


@gluon.jit
def _stored_rows(
    tile_n, num_columns, BLOCK_N: gl.constexpr, GATE: gl.constexpr, LAYOUT: gl.constexpr
):
    """Return the rows of the weight in a tile.

    With a gate, 8 rows of gate and the same 8 of up take turns: a thread has both of an output.
    """
    row = gl.arange(0, 2 * BLOCK_N, layout=LAYOUT)
    if GATE == NO_GATE:
        row += tile_n * (2 * BLOCK_N)
    else:
        row = tile_n * BLOCK_N + row // 16 * 8 + row % 8 + row // 8 % 2 * num_columns
    return row


@gluon.jit
def _turns(tile):
    """Return rows of a tile that take turns by eight, as two tiles."""
    rows: gl.constexpr = tile.shape[0]
    columns: gl.constexpr = tile.shape[1]
    turns = tile.reshape([rows // 16, 2, 8, columns]).permute([0, 2, 3, 1])
    first, second = gl.split(turns)
    return first.reshape([rows // 2, columns]), second.reshape([rows // 2, columns])


@gluon.jit
def _gated(gate, up, alpha, limit, GATE: gl.constexpr):
    """Return the activation of gate and up, in float32."""
    if GATE == SILU:
        out = gate / (1.0 + gl.exp(-gate)) * up
    elif GATE == CLAMPED:
        gate = gl.minimum(gate, limit)
        up = gl.minimum(gl.maximum(up, -limit), limit)
        out = (up + 1.0) * gate / (1.0 + gl.exp(-gate * alpha))
    else:
        cubic = gate * (1.0 + 0.044715 * gate * gate)
        out = gate / (1.0 + gl.exp(-1.5957691216057308 * cubic)) * up  # 2 * sqrt(2 / pi)
    return out


@gluon.jit(do_not_specialize=["num_rows", "max_tiles"])
def packed_kernel(
    out_ptr,  # [S, N], contiguous
    x_ptr,  # [rows, K], bfloat16 or float8e4nv
    x_scale_ptr,  # float32 [K / STEP, stride_x_scale] of an x in FP8
    order_ptr,
    tiles_ptr,
    index_ptr,  # [S]
    data_ptr,  # uint8 [E, rows of tiles, tiles of a row, 64, 64]; with a gate of 2N rows
    scale_ptr,  # float32 [E, rows of scales, columns of scales]; of "mxfp4" int32 [E, N, K / 128]
    zero_ptr,  # not looked at
    bias_ptr,  # [E, N or 2N]
    partial_ptr,  # float32 [tiles, SPLIT_K, 2 * BLOCK_N * BLOCK_M], where SPLIT_K > 1
    arrivals_ptr,  # int32 [tiles], zero before and after, where SPLIT_K > 1
    num_rows,
    num_columns,  # N
    num_k,
    max_tiles,
    chosen,
    stride_x,
    stride_x_scale,
    stride_expert,
    stride_row,
    stride_scale_expert,
    stride_scale_row,
    stride_scale_k,
    alpha,
    limit,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    SPLIT_K: gl.constexpr,
    GATE: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    EVEN_N: gl.constexpr,
    MODE: gl.constexpr,
    STAGES: gl.constexpr,
    FORMAT: gl.constexpr,
    SCALE_ROWS: gl.constexpr,  # rows that share a scale; 0: all
    SCALE_K: gl.constexpr,  # inputs that share a scale; 0: all
    WGMMA: gl.constexpr,
    OVERLAPS: gl.constexpr,
):
    """Compute one share of K of one tile, as `experts_triton.grouped_kernel` does."""
    # Choose the layouts of sums, operands and x.
    X_DTYPE: gl.constexpr = x_ptr.dtype.element_ty
    IN_FP8: gl.constexpr = gl.float8e4nv == X_DTYPE
    if WGMMA:
        ACC: gl.constexpr = gl.NVMMADistributedLayout(
            [3, 0], [gl.num_warps(), 1], instr_shape=[16, BLOCK_M, 32 if IN_FP8 else 16]
        )
    else:
        ACC: gl.constexpr = gl.NVMMADistributedLayout(
            [2, 0], [gl.num_warps(), 1], instr_shape=[16, 8]
        )
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, ACC, 2)
    WORDS: gl.constexpr = gl.DotOperandLayout(0, ACC, 4)
    if IN_FP8:
        X: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [gl.num_warps(), 1], [1, 0])
    else:
        X: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [gl.num_warps(), 1], [1, 0])
    x_tiles = gl.allocate_shared_memory(
        X_DTYPE, [STAGES, BLOCK_M, STEP], gl.NVMMASharedLayout(128, 8 if IN_FP8 else 16, 2)
    )
    THROUGH_SHARED: gl.constexpr = WGMMA and FORMAT != MXFP4
    WORD: gl.constexpr = gl.float8e4nv if IN_FP8 else gl.int32
    if THROUGH_SHARED:
        WIDTH: gl.constexpr = 64 if IN_FP8 else 16
        COPY: gl.constexpr = gl.BlockedLayout([1, WIDTH // 4], [8, 4], [gl.num_warps(), 1], [1, 0])
        if IN_FP8:  # the matrix unit takes them from there
            STORED: gl.constexpr = gl.NVMMASharedLayout(64, 8, 2)
        else:
            STORED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        SIZE_OF_TILES: gl.constexpr = [STAGES, 2 * BLOCK_N, WIDTH]
        first_tiles = gl.allocate_shared_memory(WORD, SIZE_OF_TILES, STORED)
        second_tiles = gl.allocate_shared_memory(WORD, SIZE_OF_TILES, STORED)
    if IN_FP8:
        SCALES_OF_X: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        x_scales = gl.allocate_shared_memory(
            gl.float32, [STAGES, BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [0])
        )
    # Tiles of one weight come first, so that they read its rows at the same time.
    TILES: gl.constexpr = 0 if MODE == 0 else 1
    tile = gl.program_id(TILES)
    tile_n = gl.program_id(1 - TILES) // SPLIT_K
    split = gl.program_id(1 - TILES) % SPLIT_K
    await_inputs(OVERLAPS)
    # Find the expert and the assignments of this tile.
    m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, X))
    if MODE == 0:
        expert = tile * 0
        assignment = tile * BLOCK_M + m
        is_row = assignment < num_rows
    elif MODE == 1:
        expert = gl.load(index_ptr + tile).to(gl.int32)
        assignment = tile + m
        is_row = m == 0
    else:
        expert = gl.load(tiles_ptr + tile)
        if expert < 0:
            return
        place = gl.load(tiles_ptr + max_tiles + tile) + m
        is_row = place < gl.load(tiles_ptr + 2 * max_tiles + tile)
        assignment = gl.load(order_ptr + place, mask=is_row, other=0)

    # Scales of "mxfp4", four in a word, multiply numbers; those of "fp8" multiply sums.
    STORED_K: gl.constexpr = STEP if FORMAT == MXFP4 else SCALE_K
    SCALES: gl.constexpr = gl.SliceLayout(1, WORDS if FORMAT == MXFP4 else ACC)
    # Locate the weight's rows, their scales and x.
    num_stored = num_columns if GATE == NO_GATE else 2 * num_columns
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, COPY if THROUGH_SHARED else WORDS)
    row = _stored_rows(tile_n, num_columns, BLOCK_N, GATE, OF_ROWS)
    scale_row = _stored_rows(tile_n, num_columns, BLOCK_N, GATE, SCALES)
    if not EVEN_N:  # the last again, where there are no more: that is not stored
        row = gl.minimum(row, num_stored - 1)
        scale_row = gl.minimum(scale_row, num_stored - 1)
    scale_row = scale_row // SCALE_ROWS if SCALE_ROWS > 0 else scale_row * 0
    expert = expert.to(gl.int64)
    data_ptr += expert * stride_expert
    word_ptrs = (data_ptr + _row_offsets(row, stride_row)[:, None]).to(gl.pointer_type(WORD))
    scale_ptrs = scale_ptr + expert * stride_scale_expert + scale_row * stride_scale_row
    x_row = assignment // chosen
    x_ptrs = x_ptr + x_row.to(gl.int64)[:, None] * stride_x
    if IN_FP8:
        x_scale_ptrs = x_scale_ptr + gl.convert_layout(x_row, SCALES_OF_X)
        has_scale = gl.convert_layout(is_row, SCALES_OF_X)

    # Sum the products over this share of K.
    acc = gl.zeros([2 * BLOCK_N, BLOCK_M], gl.float32, ACC)
    share = (num_k + STEP * SPLIT_K - 1) // (STEP * SPLIT_K) * STEP
    begin = split * share
    end = gl.minimum(begin + share, num_k)
    # x and words of the next steps are on their way during a product.
    for stage in gl.static_range(STAGES - 1):
        at = begin + stage * STEP
        if THROUGH_SHARED:
            first_tile, second_tile = first_tiles.index(stage), second_tiles.index(stage)
            _copy_words(first_tile, second_tile, word_ptrs, at, end, COPY)
        if IN_FP8:
            copy_scales(x_scales.index(stage), x_scale_ptrs, has_scale, at, end, stride_x_scale)
        copy_rows(x_tiles.index(stage), x_ptrs, is_row, at, end, X)
        async_copy.commit_group()
    first = gl.minimum(begin, num_k - 1)  # a share may have nothing
    if not THROUGH_SHARED:
        words = _load_words(word_ptrs, first, FORMAT, WORDS)
    if SCALE_K > 0:
        scale = _load_scales(scale_ptrs, first, stride_scale_k, STORED_K)
    stage = 0
    for k in range(begin, end, STEP):
        # Wait for x of this step, and start the loads of later steps.
        async_copy.wait_group(STAGES - 2)
        if WGMMA:
            fence_async_shared()
        barrier()
        free = gl.where(stage == 0, STAGES - 1, stage - 1)
        ahead = k + (STAGES - 1) * STEP
        later = gl.minimum(k + STEP, end - 1)
        if THROUGH_SHARED:
            first_tile, second_tile = first_tiles.index(free), second_tiles.index(free)
            _copy_words(first_tile, second_tile, word_ptrs, ahead, end, COPY)
        else:
            next_words = _load_words(word_ptrs, later, FORMAT, WORDS)
        if IN_FP8:
            copy_scales(x_scales.index(free), x_scale_ptrs, has_scale, ahead, end, stride_x_scale)
        copy_rows(x_tiles.index(free), x_ptrs, is_row, ahead, end, X)
        async_copy.commit_group()
        if THROUGH_SHARED and not IN_FP8:
            words = _take_words(first_tiles.index(stage), second_tiles.index(stage), WORDS)
        if SCALE_K > 0:
            next_scale = _load_scales(scale_ptrs, later, stride_scale_k, STORED_K)
        # Unpack the words and multiply.
        x_tile = x_tiles.index(stage)
        if IN_FP8:
            none = gl.zeros([2 * BLOCK_N, BLOCK_M], gl.float32, ACC)
            part = _product_of_tiles(
                first_tiles.index(stage), second_tiles.index(stage), x_tile, none
            )
            x_scale = x_scales.index(stage).load(gl.SliceLayout(0, ACC))
            part = warpgroup_mma_wait(0, deps=[part])
            acc += part * (scale[:, None] * x_scale[None, :])
        elif FORMAT == MXFP4:
            operand = _mxfp4_operand(words, scale, WORDS, A)
            acc = _add_product(acc, operand, x_tile, B, WGMMA, False)
        elif SCALE_K > 0:
            part = _add_product(acc, _fp8_operand(words, A), x_tile, B, WGMMA, True)
            acc += part * scale[:, None]
        else:
            acc = _add_product(acc, _fp8_operand(words, A), x_tile, B, WGMMA, False)
        if not THROUGH_SHARED:
            words = next_words
        if SCALE_K > 0:
            scale = next_scale
        stage = gl.where(stage == STAGES - 1, 0, stage + 1)
    async_copy.wait_group(0)

    # Add up the shares; only the last program to arrive goes on.
    n = gl.arange(0, 2 * BLOCK_N, layout=gl.SliceLayout(1, ACC))
    m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, ACC))
    if SPLIT_K > 1:
        SIZE: gl.constexpr = 2 * BLOCK_N * BLOCK_M
        tile += tile_n * gl.num_programs(TILES)
        share_ptrs = share_places(partial_ptr, tile, SPLIT_K, acc.shape, ACC)
        if give_share(share_ptrs + split * SIZE, acc, arrivals_ptr + tile) != SPLIT_K - 1:
            return
        acc = sum_shares(share_ptrs, SPLIT_K, SIZE)
        gl.store(arrivals_ptr + tile, 0)

    # Scale, add the bias and round.
    DTYPE: gl.constexpr = out_ptr.dtype.element_ty
    if SCALE_K == 0:
        acc *= gl.load(scale_ptrs)[:, None]
    stored = _stored_rows(tile_n, num_columns, BLOCK_N, GATE, gl.SliceLayout(1, ACC))
    if GATE == NO_GATE:
        column = stored
    else:
        column = tile_n * BLOCK_N + n // 16 * 8 + n % 8
    is_output = column < num_columns
    if HAS_BIAS:
        bias = gl.load(bias_ptr + expert * num_stored + stored, mask=is_output, other=0.0)
        acc += bias.to(gl.float32)[:, None]
    out = acc.to(DTYPE)
    # Apply the gate and store.
    assignment = gl.convert_layout(assignment, gl.SliceLayout(0, ACC)).to(gl.int64)
    is_row = gl.convert_layout(is_row, gl.SliceLayout(0, ACC))
    if GATE == NO_GATE:
        out_ptrs = out_ptr + assignment[None, :] * num_columns + column[:, None]
        gl.store(out_ptrs, out, mask=is_row[None, :] & is_output[:, None])
    else:
        gate, up = _turns(out.to(gl.float32))
        out = _gated(gate, up, alpha, limit, GATE).to(DTYPE)
        OUT: gl.constexpr = out.type.layout
        column = tile_n * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, OUT))
        assignment = gl.convert_layout(assignment, gl.SliceLayout(0, OUT))
        is_row = gl.convert_layout(is_row, gl.SliceLayout(0, OUT))
        out_ptrs = out_ptr + assignment[None, :] * num_columns + column[:, None]
        gl.store(out_ptrs, out, mask=is_row[None, :] & (column < num_columns)[:, None])
