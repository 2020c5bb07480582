"""Row statistics of sampling on the device: softmax parts, top-k / top-p / min-p without a sort.

The reference is `kernels.sampling.probabilities.probs_from_logits`.

A row's weight is w_v = exp((x_v - max x) / temperature), in (0, 1] where not 0; its probability is
w_v / sum of the kept w. Non-negative floats are ordered as their bits are, so "the most likely" is
a threshold on 30 bits: token v is kept where its key, the bits of w_v, is above `threshold`, or
equal to it with v <= `last_tie`.

Shapes: R packed rows, V vocabulary, C chunks of a row.
"""

from dataclasses import dataclass
from typing import Self

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.launch import launch
from peagle.kernels.sampling.search_triton import (
    KEY_ONE,
    TINY,
    count_above,
    index_of_tie,
    keys_of,
    search,
    temperature_rate,
    weights_of,
)

CAPACITY = 2048


@dataclass(frozen=True, slots=True)
class RowStats:
    """The statistics of each row's distribution.

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
        cls, num_rows: int, vocab_size: int, device: torch.device | str, capacity: int = CAPACITY
    ) -> Self:
        """Allocate buffers for R rows, which decide the chunks. `capacity` is a power of two."""
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
    """Return how many logits one program holds: fewer for few rows, so that all units work."""
    wanted = 8192 if num_rows >= 64 else 4096 if num_rows >= 16 else 2048
    return min(wanted, triton.next_power_of_2(vocab_size))


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
    """Store the maximum of one chunk, its first index and (for sampling) the sum of weights."""
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
    """Put a row's chunks together and find the tokens that min-p, top-k and top-p keep."""
    row = tl.program_id(0).to(tl.int64)
    sequence = tl.load(sequences_ptr + row)
    if sequence >= 0:
        # Join the chunks: maximum, argmax and sum of the weights.
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

        # Begin with all tokens.
        row_ptr = logits_ptr + row * row_stride
        low = tl.full((), 0, tl.int32)
        count = vocab_size + low
        passes = tl.full((), 0, tl.int32)
        held = tl.full((), -1, tl.int32)
        buffer_ptr = candidates_ptr + row * CAPACITY
        num_ties = tl.full((), 0, tl.int32)  # 0: all tokens of the threshold's key
        samples = temperature != 0
        # Cut by min-p.
        if HAS_MIN_P:
            min_p = tl.load(min_p_ptr + sequence).to(tl.float32)
            if samples & (min_p > 0):
                low = tl.minimum(keys_of(min_p), KEY_ONE)
                count, _n2, _n3, total, _w2, _w3 = count_above(
                    row_ptr, vocab_size, best, rate, low, low, low, BLOCK
                )
                passes += 1
        # Cut by top-k.
        top_k = tl.load(top_k_ptr + sequence)
        if samples & (top_k > 0) & (top_k < count):
            k = top_k.to(tl.int32)
            held, low, count, total, n_high, w_high, taken = search(
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
        # Cut by top-p.
        top_p = tl.load(top_p_ptr + sequence).to(tl.float32)
        if samples & (top_p < 1):
            mass = top_p * total
            start = low
            held, low, count, total, n_high, w_high, taken = search(
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
                needed = tl.ceil((mass - w_high) / tl.maximum(weight, TINY))
                needed = tl.minimum(tl.maximum(needed, 1.0), 1.0e9).to(tl.int32)
                if needed < count - n_high:
                    num_ties = needed
                    total = w_high + needed.to(tl.float32) * weight
        # Find the last token kept among equal weights, and store.
        last_tie = vocab_size + num_ties * 0
        # Tokens of weight 0 are never drawn: which of them stay does not matter.
        if (num_ties > 0) & (low > 0):
            last_tie = index_of_tie(row_ptr, vocab_size, best, rate, low, num_ties, BLOCK)
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
) -> None:
    """Find the tokens of each row that the sequence's sampling parameters keep; two launches.

    Args:
        logits_RV: float32, bfloat16 or float16; each row has a finite logit, none is +inf or NaN.
        sequences_R: the sequence of each row; rows with -1 are skipped.
        temperature_B, top_k_B, top_p_B: as in `probs_from_logits`.
        min_p_B: applied before top-k and top-p, at the temperature; None: nobody has one.
        out: buffers of `RowStats.allocate`.
    """
    chunk_stats(logits_RV, sequences_R, temperature_B, out, sums=True)
    num_rows, vocab_size = logits_RV.shape
    launch(
        cut_kernel,
        (num_rows,),
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
        BLOCK=min(4096, triton.next_power_of_2(vocab_size)),
        num_warps=16,
    )


def chunk_stats(
    logits_RV: Tensor, sequences_R: Tensor, temperature_B: Tensor, out: RowStats, *, sums: bool
) -> None:
    """Compute maximum, argmax and (with `sums`) weight of every chunk of every row; one launch."""
    num_rows, vocab_size = logits_RV.shape
    assert logits_RV.dtype != torch.float64, "the kernels compute in float32"
    assert logits_RV.stride(1) == 1, "kernels read whole rows"
    # Triton 3.6 fails to compile the search for a size of 1, which it makes a constant.
    assert vocab_size > 1, "one token leaves nothing to choose"
    chunk = chunk_size(num_rows, vocab_size)
    num_chunks = triton.cdiv(vocab_size, chunk)
    assert out.chunk_max_RC.shape == (num_rows, num_chunks), "buffers of another shape"
    launch(
        chunk_kernel,
        (num_rows, num_chunks),
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
