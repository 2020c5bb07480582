"""Weights of a row of logits, and the threshold that top-k or top-p draws through them.

For use inside kernels; `probabilities_triton` says what weights, keys and thresholds are. The
search makes passes that count and add up what lies at or above three pivots. As soon as at most
CAPACITY tokens are left above the lower bound (after one or two passes for usual settings) they are
copied together, and the rest of the search reads the copy. All sums run in a fixed order: the same
row gives the same result wherever it stands.
"""

import torch
import triton
import triton.language as tl

# The bits of 1.0, 2**-3, 2**-8 and 2**-20: where cuts mostly lie in between.
KEY_ONE = tl.constexpr(0x3F800000)
_PIVOT_1 = tl.constexpr(0x3E000000)
_PIVOT_2 = tl.constexpr(0x3B800000)
_PIVOT_3 = tl.constexpr(0x35800000)
# 2**-40 and 2**-80: where there are fewer tokens of weight than top-k asks for.
_PIVOT_4 = tl.constexpr(0x2B800000)
_PIVOT_5 = tl.constexpr(0x17800000)
_LOG2_E = tl.constexpr(1.4426950408889634)
TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
_HUGE = tl.constexpr(2.0**100)


@triton.jit
def temperature_rate(temperature):
    """Return 1 / (temperature * log 2), limited to float32; temperature 0 counts as 1."""
    scale = tl.minimum(tl.maximum(temperature.to(tl.float32), TINY), _HUGE)
    return _LOG2_E / tl.where(temperature == 0, 1.0, scale)


@triton.jit
def weights_of(x, best, rate):
    """w of logits. Every kernel takes them from here: the threshold is a matter of single bits."""
    return tl.exp2((x.to(tl.float32) - best) * rate)


@triton.jit
def keys_of(weights):
    """Return integers in the order of the weights."""
    return weights.to(tl.int32, bitcast=True)


@triton.jit
def is_kept(weights, v, threshold, last_tie):
    """Return whether tokens v of these weights are among the kept."""
    keys = keys_of(weights)
    return (keys > threshold) | ((keys == threshold) & (v <= last_tie))


@triton.jit
def count_above(row_ptr, vocab_size, best, rate, t1, t2, t3, BLOCK: tl.constexpr):
    """Count and weight of the tokens at or above three keys."""
    n1 = tl.zeros([BLOCK], dtype=tl.int32)
    n2 = tl.zeros([BLOCK], dtype=tl.int32)
    n3 = tl.zeros([BLOCK], dtype=tl.int32)
    w1 = tl.zeros([BLOCK], dtype=tl.float32)
    w2 = tl.zeros([BLOCK], dtype=tl.float32)
    w3 = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, vocab_size, BLOCK):
        v = start + tl.arange(0, BLOCK)
        inside = v < vocab_size
        x = tl.load(row_ptr + v, mask=inside, other=-float("inf"))
        w = weights_of(x, best, rate)
        keys = tl.where(inside, keys_of(w), -1)
        n1 += (keys >= t1).to(tl.int32)
        n2 += (keys >= t2).to(tl.int32)
        n3 += (keys >= t3).to(tl.int32)
        w1 += tl.where(keys >= t1, w, 0.0)
        w2 += tl.where(keys >= t2, w, 0.0)
        w3 += tl.where(keys >= t3, w, 0.0)
    return tl.sum(n1), tl.sum(n2), tl.sum(n3), tl.sum(w1), tl.sum(w2), tl.sum(w3)


@triton.jit
def _is_open(low, n_low, high, n_high, k):
    """Return whether the search goes on: keys are left, and more tokens than the wanted ones."""
    return (high - low > 1) & (n_low - n_high > 1) & (n_low != k)


@triton.jit
def _narrow(
    row_ptr,
    vocab_size,
    best,
    rate,
    low,
    n_low,
    w_low,
    high,
    n_high,
    w_high,
    k,
    mass,
    capacity,
    BLOCK: tl.constexpr,
):
    """Narrow [low, high) until it is settled, or at most `capacity` tokens lie at or above low.

    n and w are the count and the weight of the tokens at or above a bound.
    """
    passes = tl.full((), 0, tl.int32)
    while _is_open(low, n_low, high, n_high, k) & (n_low > capacity):
        gap = high - low
        t1 = high - tl.maximum(gap // 4, 1)
        t2 = low + gap // 2
        t3 = low + gap // 4
        if (high > KEY_ONE) & (low < _PIVOT_1):
            t1 = tl.maximum(low, _PIVOT_1)
            t2 = tl.maximum(low, _PIVOT_2)
            t3 = tl.maximum(low, _PIVOT_3)
        if (high == _PIVOT_3) & (low == 0):
            t1 = _PIVOT_4 + low
            t2 = _PIVOT_5 + low
            t3 = 1 + low
        n1, n2, n3, w1, w2, w3 = count_above(row_ptr, vocab_size, best, rate, t1, t2, t3, BLOCK)
        # A pivot at low tells nothing new: what is known of low excludes ties cut off already.
        enough1 = tl.where(k > 0, n1 >= k, w1 >= mass) & (t1 > low)
        enough2 = tl.where(k > 0, n2 >= k, w2 >= mass) & (t2 > low)
        enough3 = tl.where(k > 0, n3 >= k, w3 >= mass) & (t3 > low)
        short1 = (enough1 == 0) & (t1 > low)
        short2 = (enough2 == 0) & (t2 > low)
        short3 = (enough3 == 0) & (t3 > low)
        # low becomes the highest pivot with enough, high the lowest that falls short.
        n_low = tl.where(enough1, n1, tl.where(enough2, n2, tl.where(enough3, n3, n_low)))
        w_low = tl.where(enough1, w1, tl.where(enough2, w2, tl.where(enough3, w3, w_low)))
        low = tl.where(enough1, t1, tl.where(enough2, t2, tl.where(enough3, t3, low)))
        n_high = tl.where(short3, n3, tl.where(short2, n2, tl.where(short1, n1, n_high)))
        w_high = tl.where(short3, w3, tl.where(short2, w2, tl.where(short1, w1, w_high)))
        high = tl.where(short3, t3, tl.where(short2, t2, tl.where(short1, t1, high)))
        passes += 1
    return low, n_low, w_low, high, n_high, w_high, passes


@triton.jit
def _compact(row_ptr, vocab_size, best, rate, low, buffer_ptr, BLOCK: tl.constexpr):
    """Copy the logits with keys above low, in order; their number."""
    count = tl.full((), 0, tl.int32)
    for start in range(0, vocab_size, BLOCK):
        v = start + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + v, mask=v < vocab_size, other=-float("inf")).to(tl.float32)
        above = (keys_of(weights_of(x, best, rate)) > low).to(tl.int32)
        at = count + tl.cumsum(above, 0) - 1
        tl.store(buffer_ptr + at, x, mask=above > 0)
        count += tl.sum(above)
    tl.debug_barrier()
    return count


@triton.jit
def search(
    row_ptr,
    buffer_ptr,
    held,
    vocab_size,
    best,
    rate,
    low,
    n_low,
    w_low,
    k,
    mass,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Find the greatest key at or above which there are k tokens, or (k = 0) the weight `mass`.

    [low, high) always holds it. Ends when high is low + 1, or when exactly the tokens at or above
    low are wanted. `held` tokens above low are in the buffer, -1: not yet. Returns (held, low, its
    count and weight, count and weight of high, passes).
    """
    high = tl.full((), KEY_ONE + 1, tl.int32)
    n_high = tl.full((), 0, tl.int32)
    w_high = tl.full((), 0.0, tl.float32)
    passes = tl.full((), 0, tl.int32)
    # Narrow over the whole row, then copy the tokens that are left into the buffer.
    if held < 0:
        low, n_low, w_low, high, n_high, w_high, passes = _narrow(
            row_ptr,
            vocab_size,
            best,
            rate,
            low,
            n_low,
            w_low,
            high,
            n_high,
            w_high,
            k,
            mass,
            CAPACITY,
            BLOCK,
        )
        if _is_open(low, n_low, high, n_high, k):
            # The ties at low need no room: their count and weight are known.
            held = _compact(row_ptr, vocab_size, best, rate, low, buffer_ptr, BLOCK)
            passes += 1
    # Narrow over the buffer.
    if held >= 0:
        low, n_low, w_low, high, n_high, w_high, _short = _narrow(
            buffer_ptr,
            held,
            best,
            rate,
            low,
            n_low,
            w_low,
            high,
            n_high,
            w_high,
            k,
            mass,
            0,
            CAPACITY,
        )
    return held, low, n_low, w_low, n_high, w_high, passes


@triton.jit
def index_of_tie(row_ptr, vocab_size, best, rate, key, rank, BLOCK: tl.constexpr):
    """Return the index of the rank-th token (from 1) that has this key."""
    found = tl.full((), -1, tl.int32)
    before = tl.full((), 0, tl.int32)
    for start in range(0, vocab_size, BLOCK):
        v = start + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + v, mask=v < vocab_size, other=-float("inf"))
        same = (keys_of(weights_of(x, best, rate)) == key) & (v < vocab_size)
        ranks = before + tl.cumsum(same.to(tl.int32), 0)
        found = tl.maximum(found, tl.max(tl.where(same & (ranks == rank), v, -1)))
        before += tl.sum(same.to(tl.int32))
    return found
