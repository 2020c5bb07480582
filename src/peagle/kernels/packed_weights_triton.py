"""Tiles of packed weights in Triton: they are loaded as stored, and unpacked in registers.

The reference is `PackedWeight.unpack`; the caller applies the scales, but for "mxfp4". A 4-bit
format gives two tiles, of the even and of the odd inputs, so that no number changes its place.

In bfloat16 on a card, four bytes are unpacked at once, two numbers a register. Numbers of e4m3 and
e2m1 have the exponent and the mantissa of a small bfloat16: they are shifted into place, and one
product moves the exponent to its bias. "mxfp4" tiles are then 2^-63 of their values, so that no
scale overflows; `mx_factor` undoes that in the sums. Integers become the mantissa of 128 + q.
"""

from __future__ import annotations

import triton
import triton.language as tl

PLAIN = tl.constexpr(0)
FP8 = tl.constexpr(1)
INT8 = tl.constexpr(2)
INT4 = tl.constexpr(3)
MXFP4 = tl.constexpr(4)

_FP8_ASM = tl.constexpr(
    """{
    .reg .b32 a, b, c, d;
    prmt.b32 a, 0, $2, 0x5040;
    prmt.b32 b, 0, $2, 0x7060;
    and.b32 c, a, 0x80008000;
    and.b32 d, b, 0x80008000;
    and.b32 a, a, 0x7f007f00;
    and.b32 b, b, 0x7f007f00;
    shr.b32 a, a, 4;
    shr.b32 b, b, 4;
    or.b32 a, a, c;
    or.b32 b, b, d;
    mov.b32 c, 0x7b807b80;
    mul.bf16x2 $0, a, c;
    mul.bf16x2 $1, b, c;
    }"""
)
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
# Even inputs in $0 and $1, odd ones in $2 and $3. $5 is 128 + zero, twice.
_INT4_ASM = tl.constexpr(
    """{
    .reg .b32 a, b, c, d;
    prmt.b32 a, 0, $4, 0x0504;
    prmt.b32 b, 0, $4, 0x0706;
    shr.b32 c, a, 4;
    shr.b32 d, b, 4;
    lop3.b32 a, a, 0x000f000f, 0x43004300, 0xea;
    lop3.b32 b, b, 0x000f000f, 0x43004300, 0xea;
    lop3.b32 c, c, 0x000f000f, 0x43004300, 0xea;
    lop3.b32 d, d, 0x000f000f, 0x43004300, 0xea;
    sub.bf16x2 $0, a, $5;
    sub.bf16x2 $1, b, $5;
    sub.bf16x2 $2, c, $5;
    sub.bf16x2 $3, d, $5;
    }"""
)
# As above; $5 is the factor of the 32 inputs, twice.
_MXFP4_ASM = tl.constexpr(
    """{
    .reg .b32 a, b, c, d, s;
    prmt.b32 a, 0, $4, 0x0504;
    prmt.b32 b, 0, $4, 0x0706;
    shl.b32 c, a, 6;
    shl.b32 s, a, 12;
    and.b32 s, s, 0x80008000;
    lop3.b32 c, c, 0x01c001c0, s, 0xea;
    mul.bf16x2 $0, c, $5;
    shl.b32 c, b, 6;
    shl.b32 s, b, 12;
    and.b32 s, s, 0x80008000;
    lop3.b32 c, c, 0x01c001c0, s, 0xea;
    mul.bf16x2 $1, c, $5;
    shl.b32 c, a, 2;
    shl.b32 s, a, 8;
    and.b32 s, s, 0x80008000;
    lop3.b32 c, c, 0x01c001c0, s, 0xea;
    mul.bf16x2 $2, c, $5;
    shl.b32 c, b, 2;
    shl.b32 s, b, 8;
    and.b32 s, s, 0x80008000;
    lop3.b32 c, c, 0x01c001c0, s, 0xea;
    mul.bf16x2 $3, c, $5;
    }"""
)


@triton.jit
def mx_factor(FORMAT: tl.constexpr, ASM: tl.constexpr):
    """What sums of `unpack` are multiplied by."""
    if FORMAT == MXFP4 and ASM:
        return 2.0**63
    else:
        return 1.0


@triton.jit
def unpack(
    packed,  # [ROWS, BYTES] as stored; 8-bit floats and 4-bit numbers as uint8
    group,  # int32: "mxfp4": scales [ROWS, BYTES / 16]; "int4": zeros [ROWS, 1]; else not looked at
    DTYPE: tl.constexpr,
    FORMAT: tl.constexpr,
    ASM: tl.constexpr,
):
    """The tile in DTYPE, or the tiles of even and of odd inputs; one tile is given twice."""
    if FORMAT == PLAIN:
        even = packed.to(DTYPE)
        odd = even
    elif ASM:
        even, odd = _unpack_bfloat16(packed, group, FORMAT)
    else:
        even, odd = _unpack_float32(packed, group, FORMAT)
        even = even.to(DTYPE)
        odd = odd.to(DTYPE)
    return even, odd


@triton.jit
def _unpack_bfloat16(packed, group, FORMAT: tl.constexpr):
    ROWS: tl.constexpr = packed.shape[0]
    BYTES: tl.constexpr = packed.shape[1]
    if FORMAT < INT4:
        even = tl.inline_asm_elementwise(
            _FP8_ASM if FORMAT == FP8 else _INT8_ASM,
            "=r,=r,r",
            [packed],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
        odd = even
    else:
        if FORMAT == MXFP4:
            # The exponent s - 127 of a scale, 126 that the shift took away, and 63 less.
            half = (group + 63) << 7
            PER_GROUP: tl.constexpr = 16
            BODY: tl.constexpr = _MXFP4_ASM
        else:
            half = group + 0x4300
            PER_GROUP: tl.constexpr = BYTES
            BODY: tl.constexpr = _INT4_ASM
        SHAPE: tl.constexpr = [ROWS, BYTES // PER_GROUP, PER_GROUP]
        twice = tl.broadcast_to((half | (half << 16))[:, :, None], SHAPE)
        # Of the four registers that an int32 takes here the last three are not named.
        even, odd = tl.inline_asm_elementwise(
            BODY,
            "=r,=r,=r,=r,r,r,r,r,r",
            [tl.reshape(packed, SHAPE), twice],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
        even = tl.reshape(even, [ROWS, BYTES])
        odd = tl.reshape(odd, [ROWS, BYTES])
    return even, odd


@triton.jit
def _unpack_float32(packed, group, FORMAT: tl.constexpr):
    ROWS: tl.constexpr = packed.shape[0]
    BYTES: tl.constexpr = packed.shape[1]
    if FORMAT == INT8:
        even = packed.to(tl.float32)
        odd = even
    elif FORMAT == FP8:
        q = packed.to(tl.int32)
        bits = ((q & 0x80) << 24) | ((q & 0x7F) << 20)
        even = bits.to(tl.float32, bitcast=True) * 2.0**120
        odd = even
    elif FORMAT == INT4:
        q = packed.to(tl.int32)
        even = ((q & 0xF) - group).to(tl.float32)
        odd = ((q >> 4) - group).to(tl.float32)
    else:
        q = tl.reshape(packed, [ROWS, BYTES // 16, 16]).to(tl.int32)
        scale = tl.exp2((group - 127).to(tl.float32))[:, :, None]
        low = ((q & 0x8) << 28) | ((q & 0x7) << 22)
        high = ((q & 0x80) << 24) | ((q & 0x70) << 18)
        even = tl.reshape(low.to(tl.float32, bitcast=True) * 2.0**126 * scale, [ROWS, BYTES])
        odd = tl.reshape(high.to(tl.float32, bitcast=True) * 2.0**126 * scale, [ROWS, BYTES])
    return even, odd
