"""Tiles of packed weights in Triton: they are loaded as stored, and unpacked in registers.

The reference is `PackedWeight.unpack`; the caller applies the scales. A 4-bit format gives two
tiles, of the even and of the odd inputs, so that no number changes its place.

In bfloat16 on a card, four bytes are unpacked at once, two numbers a register. Numbers of e4m3 and
e2m1 have the exponent and the mantissa of a small bfloat16: they are shifted into place, and one
product moves the exponent to its bias. Integers become the mantissa of 128 + q.
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
    shr.b32 c, a, 4;
    shr.b32 d, b, 4;
    and.b32 c, c, 0x07f007f0;
    and.b32 d, d, 0x07f007f0;
    lop3.b32 a, a, 0x80008000, c, 0xea;
    lop3.b32 b, b, 0x80008000, d, 0xea;
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
# As above. A product with two bits shifts a number to the places of its sign and of the rest.
_MXFP4_ASM = tl.constexpr(
    """{
    .reg .b32 a, b, c, d, f;
    prmt.b32 a, 0, $4, 0x0504;
    prmt.b32 b, 0, $4, 0x0706;
    and.b32 c, a, 0x00f000f0;
    and.b32 d, b, 0x00f000f0;
    and.b32 a, a, 0x000f000f;
    and.b32 b, b, 0x000f000f;
    mul.lo.u32 a, a, 0x1040;
    mul.lo.u32 b, b, 0x1040;
    mul.lo.u32 c, c, 0x104;
    mul.lo.u32 d, d, 0x104;
    and.b32 a, a, 0x81c081c0;
    and.b32 b, b, 0x81c081c0;
    and.b32 c, c, 0x81c081c0;
    and.b32 d, d, 0x81c081c0;
    mov.b32 f, 0x7e807e80;
    mul.bf16x2 $0, a, f;
    mul.bf16x2 $1, b, f;
    mul.bf16x2 $2, c, f;
    mul.bf16x2 $3, d, f;
    }"""
)


@triton.jit
def unpack(
    packed,  # [ROWS, BYTES] as stored; 8-bit floats and 4-bit numbers as uint8
    zero,  # int32 [ROWS, 1], of "int4"; else not looked at
    DTYPE: tl.constexpr,
    FORMAT: tl.constexpr,
    ASM: tl.constexpr,
):
    """The tile in DTYPE, or the tiles of even and of odd inputs; one tile is given twice."""
    if FORMAT == PLAIN:
        even = packed.to(DTYPE)
        odd = even
    elif ASM:
        even, odd = _unpack_bfloat16(packed, zero, FORMAT)
    else:
        even, odd = _unpack_float32(packed, zero, FORMAT)
        even = even.to(DTYPE)
        odd = odd.to(DTYPE)
    return even, odd


@triton.jit
def _unpack_bfloat16(packed, zero, FORMAT: tl.constexpr):
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
    elif FORMAT == INT4:
        half = zero + 0x4300
        # Of the four registers that an int32 takes here the last three are not named.
        even, odd = tl.inline_asm_elementwise(
            _INT4_ASM,
            "=r,=r,=r,=r,r,r,r,r,r",
            [packed, tl.broadcast_to(half | (half << 16), packed.shape)],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        even, odd = tl.inline_asm_elementwise(
            _MXFP4_ASM,
            "=r,=r,=r,=r,r",
            [packed],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    return even, odd


@triton.jit
def _unpack_float32(packed, zero, FORMAT: tl.constexpr):
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
        even = ((q & 0xF) - zero).to(tl.float32)
        odd = ((q >> 4) - zero).to(tl.float32)
    else:
        q = packed.to(tl.int32)
        low = ((q & 0x8) << 28) | ((q & 0x7) << 22)
        high = ((q & 0x80) << 24) | ((q & 0x70) << 18)
        even = low.to(tl.float32, bitcast=True) * 2.0**126
        odd = high.to(tl.float32, bitcast=True) * 2.0**126
    return even, odd
