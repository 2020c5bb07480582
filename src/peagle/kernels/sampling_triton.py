"""Row statistics of sampling on the device: softmax parts, top-k / top-p / min-p without a sort.

References: `kernels.random.uniform`, `kernels.sampling.probs_from_logits`.

A row's weight is w_v = exp((x_v - max x) / temperature), in (0, 1] where not 0; its probability is
w_v / sum of the kept w. Non-negative floats are ordered as their bits are, so "the most likely" is
a threshold on 30 bits: token v is kept where its key, the bits of w_v, is above `threshold`, or
equal to it with v <= `last_tie`.

The threshold is searched by passes that count and add up what lies at or above three pivots. As
soon as at most CAPACITY tokens are left above the lower bound (one or two passes for usual
settings) they are copied together, and the rest of the search reads the copy. All sums run in a
fixed order: the same row gives the same result wherever it stands.

Shapes: R packed rows, V vocabulary, C chunks of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15 - 2**64)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9 - 2**64)
_MIX_2 = tl.constexpr(0x94D049BB133111EB - 2**64)
_NUM_PURPOSES = tl.constexpr(3)

# The bits of 1.0, 2**-3, 2**-8 and 2**-20: where cuts mostly lie in between.
_KEY_ONE = tl.constexpr(0x3F800000)
_PIVOT_1 = tl.constexpr(0x3E000000)
_PIVOT_2 = tl.constexpr(0x3B800000)
_PIVOT_3 = tl.constexpr(0x35800000)
# 2**-40 and 2**-80: where there are fewer tokens of weight than top-k asks for.
_PIVOT_4 = tl.constexpr(0x2B800000)
_PIVOT_5 = tl.constexpr(0x17800000)
_LOG2_E = tl.constexpr(1.4426950408889634)
_TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
_HUGE = tl.constexpr(2.0**100)

CAPACITY = 2048


@dataclass(frozen=True, slots=True)
class RowStats:
    """What is known of each row's distribution.

    Attributes:
        max_R: greatest logit, float32.
        argmax_R: its first index, int32.
        threshold_R, last_tie_R: int32, which tokens are kept; see the module.
        total_R: sum of the kept weights, float32.
        num_passes_R: passes over the whole row that the search took, int32.
        candidates_RN: float32, room for the logits among which the threshold lies.
        chunk_max_RC, chunk_argmax_RC, chunk_sum_RC: of each chunk, before they are put together.
    """

    max_R: Tensor
    argmax_R: Tensor
    threshold_R: Tensor
    last_tie_R: Tensor
    total_R: Tensor
    num_passes_R: Tensor
    candidates_RN: Tensor
    chunk_max_RC: Tensor
    chunk_argmax_RC: Tensor
    chunk_sum_RC: Tensor

    @classmethod
    def allocate(
        cls,
        num_rows: int,
        vocab_size: int,
        device: torch.device | str,
        capacity: int = CAPACITY,
    ) -> RowStats:
        """Buffers for R rows; their number decides the chunks. `capacity` is a power of two."""
        chunks = triton.cdiv(vocab_size, chunk_size(num_rows, vocab_size))

        def floats(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float32, device=device)

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        return cls(
            max_R=floats(num_rows),
            argmax_R=ints(num_rows),
            threshold_R=ints(num_rows),
            last_tie_R=ints(num_rows),
            total_R=floats(num_rows),
            num_passes_R=ints(num_rows),
            candidates_RN=floats(num_rows, capacity),
            chunk_max_RC=floats(num_rows, chunks),
            chunk_argmax_RC=ints(num_rows, chunks),
            chunk_sum_RC=floats(num_rows, chunks),
        )


def chunk_size(num_rows: int, vocab_size: int) -> int:
    """Logits that one program holds: fewer where there are few rows, so that all units work."""
    wanted = 8192 if num_rows >= 64 else 4096 if num_rows >= 16 else 2048
    return min(wanted, triton.next_power_of_2(vocab_size))


# ---- numbers ---------------------------------------------------------------------------------


@triton.jit
def uniform(seeds, positions, PURPOSE: tl.constexpr):
    """`kernels.random.uniform`, to the last bit; seeds and positions are int64."""
    golden = tl.full((), _GOLDEN, tl.int64).to(tl.uint64, bitcast=True)
    first = tl.full((), _MIX_1, tl.int64).to(tl.uint64, bitcast=True)
    second = tl.full((), _MIX_2, tl.int64).to(tl.uint64, bitcast=True)
    counter = (positions * _NUM_PURPOSES + (PURPOSE + 1)).to(tl.uint64, bitcast=True)
    x = seeds.to(tl.uint64, bitcast=True) + golden
    x = (x ^ (x >> 30)) * first
    x = (x ^ (x >> 27)) * second
    x = (x ^ (x >> 31)) + counter * golden
    x = (x ^ (x >> 30)) * first
    x = (x ^ (x >> 27)) * second
    x = x ^ (x >> 31)
    return (x >> 11).to(tl.float64) * (1.0 / 9007199254740992.0)


@triton.jit
def _uniform_kernel(
    seeds_ptr, positions_ptr, out_ptr, count, PURPOSE: tl.constexpr, BLOCK: tl.constexpr
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    seeds = tl.load(seeds_ptr + i, mask=i < count, other=0)
    positions = tl.load(positions_ptr + i, mask=i < count, other=0)
    tl.store(out_ptr + i, uniform(seeds, positions, PURPOSE), mask=i < count)


def uniform_numbers(seeds_N: Tensor, positions_N: Tensor, purpose: int) -> Tensor:
    """`kernels.random.uniform` of int64 vectors, by the kernel's own arithmetic; float64."""
    out_N = torch.empty(len(seeds_N), dtype=torch.float64, device=seeds_N.device)
    grid = (triton.cdiv(len(seeds_N), 256),)
    _uniform_kernel[grid](seeds_N, positions_N, out_N, len(seeds_N), PURPOSE=purpose, BLOCK=256)
    return out_N


# ---- statistics of the rows ------------------------------------------------------------------


@triton.jit
def temperature_rate(temperature):
    """1 / (temperature * log 2), limited to what float32 can hold; of greedy, that of 1."""
    scale = tl.minimum(tl.maximum(temperature.to(tl.float32), _TINY), _HUGE)
    return _LOG2_E / tl.where(temperature == 0, 1.0, scale)


@triton.jit
def weights_of(x, best, rate):
    """w of logits. Every kernel takes them from here: the threshold is a matter of single bits."""
    return tl.exp2((x.to(tl.float32) - best) * rate)


@triton.jit
def keys_of(weights):
    """Integers in the order of the weights."""
    return weights.to(tl.int32, bitcast=True)


@triton.jit
def is_kept(weights, v, threshold, last_tie):
    """Whether tokens v of these weights are among the kept."""
    keys = keys_of(weights)
    return (keys > threshold) | ((keys == threshold) & (v <= last_tie))


@triton.jit
def chunk_kernel(
    logits_ptr,
    sequences_ptr,
    temperature_ptr,
    max_ptr,
    argmax_ptr,
    sum_ptr,
    vocab_size,
    row_stride,
    num_chunks,
    SUMS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Max, its first index and (for sampling) the sum of weights of one chunk of one row."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    sequence = tl.load(sequences_ptr + row)
    if sequence >= 0:
        v = chunk * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(logits_ptr + row * row_stride + v, mask=v < vocab_size, other=-float("inf"))
        x = x.to(tl.float32)
        best = tl.max(x)
        out = row * num_chunks + chunk
        tl.store(max_ptr + out, best)
        tl.store(argmax_ptr + out, tl.min(tl.where(x == best, v, 2147483647)))
        if SUMS:
            rate = temperature_rate(tl.load(temperature_ptr + sequence))
            # A chunk without a token has no weight; its max would make NaN.
            weights = weights_of(x, best, rate)
            total = tl.sum(tl.where(x == -float("inf"), 0.0, weights))
            tl.store(sum_ptr + out, total)


@triton.jit
def _measure(row_ptr, vocab_size, best, rate, t1, t2, t3, BLOCK: tl.constexpr):
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
    """Whether the search goes on: more keys than one, and not just the tokens that are wanted."""
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

    n and w are the count and the weight of what lies at or above a bound.
    """
    passes = tl.full((), 0, tl.int32)
    while _is_open(low, n_low, high, n_high, k) & (n_low > capacity):
        gap = high - low
        t1 = high - tl.maximum(gap // 4, 1)
        t2 = low + gap // 2
        t3 = low + gap // 4
        if (high > _KEY_ONE) & (low < _PIVOT_1):
            t1 = tl.maximum(low, _PIVOT_1)
            t2 = tl.maximum(low, _PIVOT_2)
            t3 = tl.maximum(low, _PIVOT_3)
        if (high == _PIVOT_3) & (low == 0):
            t1 = _PIVOT_4 + low
            t2 = _PIVOT_5 + low
            t3 = 1 + low
        n1, n2, n3, w1, w2, w3 = _measure(row_ptr, vocab_size, best, rate, t1, t2, t3, BLOCK)
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
def _search(
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
    """The greatest key at or above which there are k tokens, or (k = 0) the weight `mass`.

    [low, high) always holds it. Ends when high is low + 1, or when exactly the tokens at or above
    low are wanted. `held` tokens above low are in the buffer, -1: not yet. Returns (held, low, its
    count and weight, count and weight of high, passes).
    """
    high = tl.full((), _KEY_ONE + 1, tl.int32)
    n_high = tl.full((), 0, tl.int32)
    w_high = tl.full((), 0.0, tl.float32)
    passes = tl.full((), 0, tl.int32)
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
def _index_of_tie(row_ptr, vocab_size, best, rate, key, rank, BLOCK: tl.constexpr):
    """Index of the rank-th token (from 1) that has this key."""
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


@triton.jit
def cut_kernel(
    logits_ptr,
    sequences_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    chunk_max_ptr,
    chunk_argmax_ptr,
    chunk_sum_ptr,
    max_ptr,
    argmax_ptr,
    threshold_ptr,
    last_tie_ptr,
    total_ptr,
    passes_ptr,
    candidates_ptr,
    vocab_size,
    row_stride,
    num_chunks,
    HAS_MIN_P: tl.constexpr,
    CAPACITY: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Put a row's chunks together and find what min-p, top-k and top-p keep of it."""
    row = tl.program_id(0).to(tl.int64)
    sequence = tl.load(sequences_ptr + row)
    if sequence >= 0:
        c = tl.arange(0, CHUNKS)
        known = c < num_chunks
        at = row * num_chunks + c
        maxima = tl.load(chunk_max_ptr + at, mask=known, other=-float("inf"))
        indices = tl.load(chunk_argmax_ptr + at, mask=known, other=2147483647)
        sums = tl.load(chunk_sum_ptr + at, mask=known, other=0.0)
        best = tl.max(maxima)
        temperature = tl.load(temperature_ptr + sequence)
        rate = temperature_rate(temperature)
        total = tl.sum(tl.where(sums > 0, sums * weights_of(maxima, best, rate), 0.0))
        tl.store(max_ptr + row, best)
        tl.store(argmax_ptr + row, tl.min(tl.where(maxima == best, indices, 2147483647)))

        row_ptr = logits_ptr + row * row_stride
        low = tl.full((), 0, tl.int32)
        count = vocab_size + low
        passes = tl.full((), 0, tl.int32)
        held = tl.full((), -1, tl.int32)
        buffer_ptr = candidates_ptr + row * CAPACITY
        num_ties = tl.full((), 0, tl.int32)  # 0: all tokens of the threshold's key
        samples = temperature != 0
        if HAS_MIN_P:
            min_p = tl.load(min_p_ptr + sequence).to(tl.float32)
            if samples & (min_p > 0):
                low = tl.minimum(keys_of(min_p), _KEY_ONE)
                count, _n2, _n3, total, _w2, _w3 = _measure(
                    row_ptr, vocab_size, best, rate, low, low, low, BLOCK
                )
                passes += 1
        top_k = tl.load(top_k_ptr + sequence)
        if samples & (top_k > 0) & (top_k < count):
            k = top_k.to(tl.int32)
            held, low, count, total, n_high, w_high, taken = _search(
                row_ptr,
                buffer_ptr,
                held,
                vocab_size,
                best,
                rate,
                low,
                count,
                total,
                k,
                0.0,
                CAPACITY,
                BLOCK,
            )
            passes += taken
            if count > k:
                num_ties = k - n_high
                total = w_high + num_ties.to(tl.float32) * low.to(tl.float32, bitcast=True)
                count = k
        top_p = tl.load(top_p_ptr + sequence).to(tl.float32)
        if samples & (top_p < 1):
            mass = top_p * total
            start = low
            held, low, count, total, n_high, w_high, taken = _search(
                row_ptr,
                buffer_ptr,
                held,
                vocab_size,
                best,
                rate,
                low,
                count,
                total,
                0,
                mass,
                CAPACITY,
                BLOCK,
            )
            passes += taken
            if low > start:
                num_ties = tl.full((), 0, tl.int32)
            if count - n_high > 1:
                weight = low.to(tl.float32, bitcast=True)
                needed = tl.ceil((mass - w_high) / tl.maximum(weight, _TINY))
                needed = tl.minimum(tl.maximum(needed, 1.0), 1.0e9).to(tl.int32)
                if needed < count - n_high:
                    num_ties = needed
                    total = w_high + needed.to(tl.float32) * weight
        last_tie = vocab_size + num_ties * 0
        # Tokens of weight 0 are never drawn: which of them stay does not matter.
        if (num_ties > 0) & (low > 0):
            last_tie = _index_of_tie(row_ptr, vocab_size, best, rate, low, num_ties, BLOCK)
            passes += 1
        tl.store(threshold_ptr + row, low)
        tl.store(last_tie_ptr + row, last_tie)
        tl.store(total_ptr + row, total)
        tl.store(passes_ptr + row, passes)


def row_stats(
    logits_RV: Tensor,
    sequences_R: Tensor,
    temperature_B: Tensor,
    top_k_B: Tensor,
    top_p_B: Tensor,
    min_p_B: Tensor | None,
    out: RowStats,
    *,
    block: int = 4096,
    num_warps: int = 16,
) -> None:
    """What of each row the sampling parameters of its sequence keep; two launches.

    Args:
        logits_RV: float32, bfloat16 or float16; each row has a finite logit, none is +inf or NaN.
        sequences_R: the sequence of each row; rows with -1 are skipped.
        temperature_B, top_k_B, top_p_B: as in `probs_from_logits`.
        min_p_B: applied before top-k and top-p, at the temperature; None: nobody has one.
        out: buffers of `RowStats.allocate`.
        block, num_warps: of the passes of a search, for tuning.
    """
    chunk_stats(logits_RV, sequences_R, temperature_B, out, sums=True)
    num_rows, vocab_size = logits_RV.shape
    cut_kernel[(num_rows,)](
        logits_RV,
        sequences_R,
        temperature_B,
        top_k_B,
        top_p_B,
        top_p_B if min_p_B is None else min_p_B,
        out.chunk_max_RC,
        out.chunk_argmax_RC,
        out.chunk_sum_RC,
        out.max_R,
        out.argmax_R,
        out.threshold_R,
        out.last_tie_R,
        out.total_R,
        out.num_passes_R,
        out.candidates_RN,
        vocab_size,
        logits_RV.stride(0),
        out.chunk_max_RC.shape[1],
        HAS_MIN_P=min_p_B is not None,
        CAPACITY=out.candidates_RN.shape[1],
        CHUNKS=triton.next_power_of_2(out.chunk_max_RC.shape[1]),
        BLOCK=min(block, triton.next_power_of_2(vocab_size)),
        num_warps=num_warps,
    )


def chunk_stats(
    logits_RV: Tensor, sequences_R: Tensor, temperature_B: Tensor, out: RowStats, *, sums: bool
) -> None:
    """Max, argmax and (with `sums`) weight of every chunk of every row; one launch."""
    num_rows, vocab_size = logits_RV.shape
    assert logits_RV.dtype != torch.float64, "the kernels compute in float32"
    assert logits_RV.stride(1) == 1, "kernels read whole rows"
    chunk = chunk_size(num_rows, vocab_size)
    num_chunks = triton.cdiv(vocab_size, chunk)
    assert out.chunk_max_RC.shape == (num_rows, num_chunks), "buffers of another shape"
    chunk_kernel[(num_rows, num_chunks)](
        logits_RV,
        sequences_R,
        temperature_B,
        out.chunk_max_RC,
        out.chunk_argmax_RC,
        out.chunk_sum_RC,
        vocab_size,
        logits_RV.stride(0),
        num_chunks,
        SUMS=sums,
        CHUNK=chunk,
        num_warps=8 if chunk > 4096 else 4,
    )


@triton.jit
def _probs_kernel(
    logits_ptr,
    sequences_ptr,
    temperature_ptr,
    max_ptr,
    argmax_ptr,
    threshold_ptr,
    last_tie_ptr,
    total_ptr,
    probs_ptr,
    vocab_size,
    row_stride,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    sequence = tl.load(sequences_ptr + row)
    v = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    out_ptr = probs_ptr + row * vocab_size + v
    if sequence >= 0:
        temperature = tl.load(temperature_ptr + sequence)
        x = tl.load(logits_ptr + row * row_stride + v, mask=v < vocab_size, other=-float("inf"))
        weights = weights_of(x, tl.load(max_ptr + row), temperature_rate(temperature))
        kept = is_kept(weights, v, tl.load(threshold_ptr + row), tl.load(last_tie_ptr + row))
        probs = tl.where(kept, weights / tl.load(total_ptr + row), 0.0)
        best = tl.where(v == tl.load(argmax_ptr + row), 1.0, 0.0)
        tl.store(out_ptr, tl.where(temperature == 0, best, probs), mask=v < vocab_size)
    else:
        tl.store(out_ptr, tl.zeros([CHUNK], dtype=tl.float32), mask=v < vocab_size)


def probs_from_stats(
    logits_RV: Tensor, sequences_R: Tensor, temperature_B: Tensor, stats: RowStats, out_RV: Tensor
) -> None:
    """`probs_from_logits` in float32, from `row_stats`; one launch. Rows with sequence -1 are 0."""
    num_rows, vocab_size = logits_RV.shape
    chunk = chunk_size(num_rows, vocab_size)
    _probs_kernel[(num_rows, triton.cdiv(vocab_size, chunk))](
        logits_RV,
        sequences_R,
        temperature_B,
        stats.max_R,
        stats.argmax_R,
        stats.threshold_R,
        stats.last_tie_R,
        stats.total_R,
        out_RV,
        vocab_size,
        logits_RV.stride(0),
        CHUNK=chunk,
        num_warps=8 if chunk > 4096 else 4,
    )
