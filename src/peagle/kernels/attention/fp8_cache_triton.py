"""Numbers to and from the 8-bit floats of a KV cache, inside Triton kernels.

A cache of 8-bit floats holds x / scale. Its tensor is of that type on a card that converts the type
itself. Elsewhere kernels get its bytes (uint8), which stand for float8_e4m3fn, and convert them by
their bits: `peagle.kernels.attention.kv_write.kernel_view` decides.
"""

import triton
import triton.language as tl


@triton.jit
def as_stored(x, factor, dtype: tl.constexpr, LIMIT: tl.constexpr):
    """Return x as the cache stores it: x * factor, cut to LIMIT; x itself if LIMIT is 0.

    LIMIT is the largest number of an 8-bit type, beyond which there is only NaN.
    """
    if LIMIT > 0:
        x = tl.minimum(tl.maximum(x.to(tl.float32) * factor, -LIMIT), LIMIT)
        if dtype == tl.uint8:
            x = _to_e4m3(x)
    return x.to(dtype)


@triton.jit
def as_read(x, dtype: tl.constexpr):
    """Return a number of the cache in the type that attention computes in."""
    if x.dtype == tl.uint8:
        x = _from_e4m3(x)
    return x.to(dtype)


@triton.jit
def _to_e4m3(x):
    """Return float32 numbers within -448 and 448 as e4m3 bytes, ties rounded to even."""
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    bits = bits & 0x7FFFFFFF
    # The exponent counts from 7 instead of 127; of 23 bits of the fraction 3 remain.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 all numbers are multiples of 2^-9, the last bit of float32 at 2^14.
    fixed = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) & 0x7FFFFF
    return sign | tl.where(bits < (121 << 23), fixed, normal)


@triton.jit
def _from_e4m3(x):
    """Return e4m3 bytes as float16 numbers, whose exponent counts from 15 instead of 7."""
    q = x.to(tl.uint16)
    bits = ((q & 0x80) << 8) | ((q & 0x7F) << 7)
    return bits.to(tl.float16, bitcast=True) * 256.0
