"""Tiles of packed weights in Triton: they are loaded as stored, and unpacked in registers.

The reference is `PackedWeight.unpack`; `packed_weights` says how words are laid out. The caller
applies the scales.

In bfloat16 on a card, a word is unpacked at once, two numbers a register. Numbers of e4m3 and e2m1
have the exponent and the mantissa of a small bfloat16, and one product moves the exponent to its
bias. Integers become the mantissa of 128 + q.
"""

import triton
import triton.language as tl

PLAIN = tl.constexpr(0)
FP8 = tl.constexpr(1)
INT8 = tl.constexpr(2)
INT4 = tl.constexpr(3)
MXFP4 = tl.constexpr(4)
TILE_BYTES = tl.constexpr(4096)  # of 64 rows of 64 bytes

# The pairs 0 and 1 of a word.
_INT8_ASM = tl.constexpr(
    """{
    .reg .b32 a, b, c, d;
    prmt.b32 a, 0, $2, 0x0504;
    prmt.b32 b, 0, $2, 0x0706;
    lop3.b32 c, a, 0x00800080, 0x43004300, 0xea;
    lop3.b32 d, b, 0x00800080, 0x43004300, 0xea;
    lop3.b32 a, a, 0x007f007f, 0x43004300, 0xea;
    lop3.b32 b, b, 0x007f007f, 0x43004300, 0xea;
    sub.bf16x2 $0, a, c;
    sub.bf16x2 $1, b, d;
    }"""
)
# The pairs 0 and 1 of a word, then 2 and 3. $3 is 128 + zero, twice.
_INT4_FIRST_ASM = tl.constexpr(
    """{
    .reg .b32 a, b;
    shr.b32 b, $2, 4;
    lop3.b32 a, $2, 0x000f000f, 0x43004300, 0xea;
    lop3.b32 b, b, 0x000f000f, 0x43004300, 0xea;
    sub.bf16x2 $0, a, $3;
    sub.bf16x2 $1, b, $3;
    }"""
)
_INT4_LAST_ASM = tl.constexpr(
    """{
    .reg .b32 a, b;
    shr.b32 a, $2, 8;
    shr.b32 b, $2, 12;
    lop3.b32 a, a, 0x000f000f, 0x43004300, 0xea;
    lop3.b32 b, b, 0x000f000f, 0x43004300, 0xea;
    sub.bf16x2 $0, a, $3;
    sub.bf16x2 $1, b, $3;
    }"""
)
# Likewise.
_MXFP4_FIRST_ASM = tl.constexpr(
    """{
    .reg .b32 a, b, f;
    mov.b32 f, 0x7e807e80;
    shl.b32 b, $2, 3;
    and.b32 a, $2, 0x81c081c0;
    and.b32 b, b, 0x81c081c0;
    mul.bf16x2 $0, a, f;
    mul.bf16x2 $1, b, f;
    }"""
)
_MXFP4_LAST_ASM = tl.constexpr(
    """{
    .reg .b32 a, b, c, f;
    mov.b32 f, 0x7e807e80;
    shl.b32 a, $2, 6;
    shl.b32 b, $2, 1;
    and.b32 a, a, 0x81c081c0;
    shr.b32 c, $2, 5;
    and.b32 b, b, 0x80008000;
    lop3.b32 b, c, 0x01000100, b, 0xea;
    shr.b32 c, $2, 4;
    lop3.b32 b, c, 0x00c000c0, b, 0xea;
    mul.bf16x2 $0, a, f;
    mul.bf16x2 $1, b, f;
    }"""
)


@triton.jit
def row_offsets(row, stride_row, FORMAT: tl.constexpr):
    """Return the offset of each row's first number; `PackedWeight.row_stride` is the stride."""
    row = row.to(tl.int64)
    if FORMAT == MXFP4 or FORMAT == FP8:  # noqa: SIM109 - Triton has no `in`
        offs = row // 64 * stride_row + row % 64 * 64
    else:
        offs = row * stride_row
    return offs


@triton.jit
def load_tiles(
    row_ptrs,  # [ROWS, 1], at the first number of the rows, of uint8 in words
    shared,  # int32 [ROWS]: zeros of "int4", or words of `PackedWeight.scale` of "mxfp4"
    k,
    num_k,
    STEP: tl.constexpr,
    DTYPE: tl.constexpr,
    FORMAT: tl.constexpr,
    EVEN_K: tl.constexpr,
    ASM: tl.constexpr,
):
    """Load inputs k to k + STEP of the rows, as two tiles.

    In a 4-bit format they hold the first and the last 16 of each 32 inputs, [ROWS, STEP / 2]; else
    one tile [ROWS, STEP] is given twice. With ASM, "mxfp4" gives the numbers of 128 inputs, in the
    order of the bytes.
    """
    if FORMAT == FP8:
        first = _select_fp8(row_ptrs, k, num_k, STEP).to(DTYPE)
        last = first
    elif FORMAT < INT4:
        packed = _load(row_ptrs, k, num_k, STEP, EVEN_K)
        if FORMAT == PLAIN:
            first = packed.to(DTYPE)
        elif ASM:
            first = tl.inline_asm_elementwise(
                _INT8_ASM, "=r,=r,r", [packed], dtype=tl.bfloat16, is_pure=True, pack=4
            )
        else:
            first = packed.to(DTYPE)
        last = first
    elif ASM:
        if FORMAT == INT4:
            packed = _load(row_ptrs, k // 2, num_k // 2, STEP // 2, EVEN_K)
            twice = tl.broadcast_to(((shared + 0x4300) * 0x00010001)[:, None], packed.shape)
            # Of the four registers that an int32 takes here the last three are not named.
            first = tl.inline_asm_elementwise(
                _INT4_FIRST_ASM, "=r,=r,r,r,r,r,r", [packed, twice], tl.bfloat16, True, 4
            )
            last = tl.inline_asm_elementwise(
                _INT4_LAST_ASM, "=r,=r,r,r,r,r,r", [packed, twice], tl.bfloat16, True, 4
            )
        else:
            i = tl.arange(0, 64)[None, :]
            packed = tl.load(row_ptrs + k // 128 * TILE_BYTES + i, mask=k + i * 0 < num_k)
            first = tl.inline_asm_elementwise(
                _MXFP4_FIRST_ASM, "=r,=r,r", [packed], tl.bfloat16, True, 4
            )
            last = tl.inline_asm_elementwise(
                _MXFP4_LAST_ASM, "=r,=r,r", [packed], tl.bfloat16, True, 4
            )
    else:
        first = _select(row_ptrs, shared, k, num_k, 0, STEP, FORMAT).to(DTYPE)
        last = _select(row_ptrs, shared, k, num_k, 2, STEP, FORMAT).to(DTYPE)
    return first, last


@triton.jit
def _load(row_ptrs, first, end, SIZE: tl.constexpr, IS_EVEN: tl.constexpr):
    offs = first + tl.arange(0, SIZE)[None, :]
    if IS_EVEN:
        tile = tl.load(row_ptrs + offs, eviction_policy="evict_first")
    else:
        tile = tl.load(row_ptrs + offs, mask=offs < end, other=0, eviction_policy="evict_first")
    return tile


@triton.jit
def _select_fp8(row_ptrs, k, num_k, STEP: tl.constexpr):
    """Return a tile of "fp8", in float32: four numbers out of each word."""
    # Assembly that takes four bytes at once is wrong here: it reads registers in the order of the
    # layout, which the product chooses.
    i = tl.arange(0, STEP // 4)[None, :]
    group = k // 16 + i // 4
    offs = group // 4 * (TILE_BYTES // 4) + i % 4 * 4 + group % 4
    word_ptrs = row_ptrs.to(tl.pointer_type(tl.uint32))
    words = tl.load(word_ptrs + offs, mask=group * 16 < num_k, other=0)
    ROWS: tl.constexpr = words.shape[0]
    GROUPS: tl.constexpr = STEP // 16
    first = _pairs_fp8(words).reshape([ROWS, GROUPS, 8])
    last = _pairs_fp8(words << 8).reshape([ROWS, GROUPS, 8])
    return tl.join(first, last).permute([0, 1, 3, 2]).reshape([ROWS, STEP]) * 2.0**120


@triton.jit
def _pairs_fp8(words):
    """Return the two numbers in high bytes of each word, times 2^-120, in float32, [..., 2].

    Exponent and mantissa of e4m3 come to the bits where bfloat16 has them, and so does the sign.
    """
    words = (words & 0x80008000) | (words >> 4 & 0x07F007F0)
    low, high = words << 16, words & 0xFFFF0000
    return tl.join(low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True))


@triton.jit
def _select(
    row_ptrs, shared, k, num_k, FIRST: tl.constexpr, STEP: tl.constexpr, FORMAT: tl.constexpr
):
    """Return one tile of a 4-bit format, in float32: every number out of its word."""
    i = tl.arange(0, STEP // 2)[None, :]
    group = k // 32 + i // 16
    if FORMAT == INT4:
        offs = group * 4 + i % 16 // 4
        pair = FIRST + i % 4 // 2
    else:
        offs = group // 4 * (TILE_BYTES // 4) + i % 8 // 2 * 4 + group % 4
        pair = FIRST + i % 16 // 8
    word_ptrs = row_ptrs.to(tl.pointer_type(tl.int32))
    words = tl.load(word_ptrs + offs, mask=group < num_k // 32, other=0) >> (i % 2 * 16)
    if FORMAT == INT4:
        values = ((words >> (4 * pair) & 0xF) - shared[:, None]).to(tl.float32)
    else:
        moved = words << (3 * pair)
        sign = tl.where(pair == 3, words >> 14, moved >> 15) & 1
        rest = (words >> 13 & 1) << 2 | words >> 10 & 3
        bits = sign << 31 | tl.where(pair == 3, rest, moved >> 6 & 7) << 22
        values = bits.to(tl.float32, bitcast=True) * 2.0**126
    return values


@triton.jit
def scale_of(words, k):
    """Return the scale of inputs k and later out of words of four "mxfp4" scales."""
    return ((words >> (k // 32 % 4 * 8) & 0xFF) << 23).to(tl.float32, bitcast=True)


@triton.jit
def unpack_kernel(
    out_ptr,  # [E, N, K], contiguous
    data_ptr,  # [E, N, K as stored], or in tiles
    scale_ptr,  # [E, rows of scales, columns of scales]
    zero_ptr,
    num_rows,  # N
    num_k,
    stride_expert,
    stride_row,
    stride_scale_expert,
    stride_scale_row,
    stride_scale_k,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    STEPS: tl.constexpr,
    FORMAT: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_K: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    EVEN_K: tl.constexpr,
    ASM: tl.constexpr,
):
    """out = scale * (q - zero), of ROWS rows and STEPS times STEP inputs. Inputs of a step share a
    scale, or a word of four.
    """
    # Locate the rows and their scales.
    expert = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = (row < num_rows)[:, None]
    row = tl.minimum(row, num_rows - 1)
    row_ptrs = data_ptr + expert * stride_expert + row_offsets(row, stride_row, FORMAT)[:, None]
    out_ptrs = out_ptr + (expert * num_rows + row)[:, None] * num_k
    INPUTS: tl.constexpr = 128 if FORMAT == MXFP4 else SCALE_K
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    first_offs = expert * stride_scale_expert + row // SCALE_ROWS * stride_scale_row
    zero = tl.full([ROWS], 8, tl.int32)
    for i in tl.static_range(STEPS):
        k = (tl.program_id(1) * STEPS + i) * STEP
        offs = first_offs + tl.minimum(k, num_k - 1) // INPUTS * stride_scale_k
        # Load scales, zeros and numbers.
        scale = tl.load(scale_ptr + offs)[:, None]
        if HAS_ZERO:
            zero = tl.load(zero_ptr + offs).to(tl.int32)
        first, last = load_tiles(row_ptrs, zero, k, num_k, STEP, DTYPE, FORMAT, EVEN_K, ASM)
        # Find the input of each number, scale and store.
        if FORMAT < INT4:
            offs_k = k + tl.arange(0, STEP)[None, :]
        else:
            j = tl.arange(0, STEP // 2)[None, :]
            if FORMAT == MXFP4 and ASM:  # threads, groups, pairs, places
                offs_k = k + j // 16 * 2 + j // 4 % 4 * 32 + j // 2 % 2 * 8 + j % 2
            else:
                offs_k = k + j // 16 * 32 + j % 16
            if FORMAT == MXFP4:
                scale = scale_of(scale, offs_k)
            last = (last.to(tl.float32) * scale).to(DTYPE)
            tl.store(out_ptrs + offs_k + 16, last, mask=is_row & (offs_k < num_k))
        first = (first.to(tl.float32) * scale).to(DTYPE)
        tl.store(out_ptrs + offs_k, first, mask=is_row & (offs_k < num_k))
