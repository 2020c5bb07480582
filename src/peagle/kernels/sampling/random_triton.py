"""Counter-based random numbers in Triton; the reference is `kernels.sampling.random`."""

import triton
import triton.language as tl

from peagle.kernels.sampling.random import COUNTERS_PER_POSITION

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15 - 2**64)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9 - 2**64)
_MIX_2 = tl.constexpr(0x94D049BB133111EB - 2**64)
_PER_POSITION = tl.constexpr(COUNTERS_PER_POSITION)


@triton.jit
def uniform(seeds, positions, PURPOSE: tl.constexpr):
    """`kernels.sampling.random.uniform`, to the last bit; seeds and positions are int64."""
    golden = tl.full((), _GOLDEN, tl.int64).to(tl.uint64, bitcast=True)
    first = tl.full((), _MIX_1, tl.int64).to(tl.uint64, bitcast=True)
    second = tl.full((), _MIX_2, tl.int64).to(tl.uint64, bitcast=True)
    counter = (positions * _PER_POSITION + (PURPOSE + 1)).to(tl.uint64, bitcast=True)
    x = seeds.to(tl.uint64, bitcast=True) + golden
    x = (x ^ (x >> 30)) * first
    x = (x ^ (x >> 27)) * second
    x = (x ^ (x >> 31)) + counter * golden
    x = (x ^ (x >> 30)) * first
    x = (x ^ (x >> 27)) * second
    x = x ^ (x >> 31)
    return (x >> 11).to(tl.float64) * (1.0 / 9007199254740992.0)
