"""Tokens drawn from rows of logits on the device, by inverse CDF.

The reference is `kernels.sampling.probabilities`: `sample_from_weights` over `probs_from_logits`. A
row is cut
into chunks: a token is found by the running sum over the chunks, then over the tokens of one.

Shapes: B sequences, R packed rows, V vocabulary, C chunks of a row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.drafts.step_state import NO_TOKEN
from peagle.kernels.launch import launch
from peagle.kernels.sampling.probabilities_triton import RowStats
from peagle.kernels.sampling.random import Purpose
from peagle.kernels.sampling.random_triton import uniform
from peagle.kernels.sampling.search_triton import is_kept, temperature_rate, weights_of

_FAR = tl.constexpr(2147483647)
_NO_TOKEN = tl.constexpr(NO_TOKEN)


def draw_chunk(vocab_size: int) -> int:
    """Return the tokens of a chunk. The number of rows has no part in it, nor in a draw."""
    return min(2048, triton.next_power_of_2(vocab_size))


def allocate_weights(num_rows: int, vocab_size: int, device: torch.device | str) -> Tensor:
    """Allocate room for the weight of every chunk, float64 [R, C]."""
    num_chunks = triton.cdiv(vocab_size, draw_chunk(vocab_size))
    return torch.zeros(num_rows, num_chunks, dtype=torch.float64, device=device)


@triton.jit
def kept_weights(row_ptr, v, vocab_size, best, temperature, threshold, last_tie):
    """Return the weights of tokens v of a row with greatest logit `best`; 0 for cut tokens."""
    inside = v < vocab_size
    x = tl.load(row_ptr + v, mask=inside, other=-float("inf"))
    weights = weights_of(x, best, temperature_rate(temperature))
    return tl.where(is_kept(weights, v, threshold, last_tie) & inside, weights, 0.0)


@triton.jit
def pick_item(weights, items, target):
    """Return the first item whose cumulative weight exceeds `target`, and the weight before it."""
    through = tl.cumsum(weights.to(tl.float64), 0)
    picked = tl.min(tl.where((through > target) & (weights > 0), items, _FAR))
    # Rounding may leave no sum above the target: then the last that has weight.
    picked = tl.minimum(picked, tl.max(tl.where(weights > 0, items, 0)))
    return picked, tl.max(tl.where(items < picked, through, 0.0))


@triton.jit
def weigh_kernel(
    logits_ptr,
    row_stride,
    vocab_size,
    sequences_ptr,
    temperature_ptr,
    max_ptr,
    threshold_ptr,
    last_tie_ptr,
    weights_ptr,
    num_chunks,
    CHUNK: tl.constexpr,
):
    """Store the float32 sum of the kept weights in one chunk of one row."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    sequence = tl.load(sequences_ptr + row)
    if sequence >= 0:
        temperature = tl.load(temperature_ptr + sequence)
        if temperature != 0:
            weights = kept_weights(
                logits_ptr + row * row_stride,
                chunk * CHUNK + tl.arange(0, CHUNK),
                vocab_size,
                tl.load(max_ptr + row),
                temperature,
                tl.load(threshold_ptr + row),
                tl.load(last_tie_ptr + row),
            )
            tl.store(weights_ptr + row * num_chunks + chunk, tl.sum(weights.to(tl.float64)))


@triton.jit
def draw_kernel(
    logits_ptr,
    row_stride,
    vocab_size,
    sequences_ptr,
    start_loc_ptr,
    offsets_ptr,
    temperature_ptr,
    seeds_ptr,
    positions_ptr,
    first,
    max_ptr,
    argmax_ptr,
    threshold_ptr,
    last_tie_ptr,
    weights_ptr,
    num_chunks,
    tokens_ptr,
    HAS_OFFSETS: tl.constexpr,
    PURPOSE: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Draw the token of one row: first the chunk, then the token in it."""
    row = tl.program_id(0).to(tl.int64)
    sequence = tl.load(sequences_ptr + row)
    if sequence >= 0:
        best = tl.load(max_ptr + row)
        token = tl.load(argmax_ptr + row)
        temperature = tl.load(temperature_ptr + sequence)
        if temperature != 0:
            # Draw the random number of the row's position.
            if HAS_OFFSETS:
                offset = tl.load(offsets_ptr + row)
            else:
                offset = row - tl.load(start_loc_ptr + sequence)
            position = tl.load(positions_ptr + sequence) + offset + first
            u = uniform(tl.load(seeds_ptr + sequence), position, PURPOSE)
            # Choose the chunk.
            c = tl.arange(0, CHUNKS)
            at = row * num_chunks + c
            sums = tl.load(weights_ptr + at, mask=c < num_chunks, other=0.0)
            target = u * tl.sum(sums)
            chunk, before = pick_item(sums, c, target)
            # Choose the token in the chunk.
            v = chunk * CHUNK + tl.arange(0, CHUNK)
            weights = kept_weights(
                logits_ptr + row * row_stride,
                v,
                vocab_size,
                best,
                temperature,
                tl.load(threshold_ptr + row),
                tl.load(last_tie_ptr + row),
            )
            token, _before = pick_item(weights, v, target - before)
        # NaN compares as false.
        token = tl.where(tl.abs(best) < float("inf"), token, _NO_TOKEN)
        tl.store(tokens_ptr + row, token.to(tl.int64))


def draw_rows(
    logits_RV: Tensor,
    sequences_R: Tensor,
    start_loc: Tensor,
    temperature_B: Tensor,
    seeds_B: Tensor,
    positions_B: Tensor,
    stats: RowStats,
    weights_RC: Tensor,
    out_R: Tensor,
    *,
    purpose: Purpose,
    first: int = 0,
    offsets_R: Tensor | None = None,
) -> None:
    """Draw a token from each row; at temperature 0 the argmax. Two launches.

    Row r of sequence s draws with the number of (seeds[s], positions[s] + first + r - start_loc[s],
    purpose). The token is a function of that number, the row's logits and its kept tokens: other
    rows, and how many there are, have no part in it. The kept tokens do not depend on them either,
    but for the last token of top-p alone, for which `row_stats` sums the whole row in float32.

    Args:
        logits_RV: as `row_stats` got them.
        sequences_R: the sequence of each row; rows with -1 are skipped.
        start_loc: the first row of each sequence, int64 [B] or longer.
        temperature_B: as in `probs_from_logits`.
        seeds_B, positions_B: int64.
        stats: the result of `row_stats`.
        weights_RC: buffer of `allocate_weights`.
        out_R: int64; NO_TOKEN where the greatest logit is NaN or infinite.
        purpose: the use of the tokens.
        first: added to all positions.
        offsets_R: int64, stands for r - start_loc[s], as the depth of a row of a tree does.
    """
    num_rows, vocab_size = logits_RV.shape
    chunk, num_chunks = draw_chunk(vocab_size), weights_RC.shape[1]
    assert len(weights_RC) == num_rows == len(out_R), "buffers of another shape"
    assert num_chunks == triton.cdiv(vocab_size, chunk), "buffers of another shape"
    logits = (logits_RV, logits_RV.stride(0), vocab_size)
    launch(
        weigh_kernel,
        (num_rows, num_chunks),
        *logits,
        sequences_R,
        temperature_B,
        stats.max_R,
        stats.threshold_R,
        stats.last_tie_R,
        weights_RC,
        num_chunks,
        CHUNK=chunk,
        num_warps=4,
    )
    launch(
        draw_kernel,
        (num_rows,),
        *logits,
        sequences_R,
        start_loc,
        start_loc if offsets_R is None else offsets_R,
        temperature_B,
        seeds_B,
        positions_B,
        first,
        stats.max_R,
        stats.argmax_R,
        stats.threshold_R,
        stats.last_tie_R,
        weights_RC,
        num_chunks,
        out_R,
        HAS_OFFSETS=offsets_R is not None,
        PURPOSE=int(purpose),
        CHUNKS=triton.next_power_of_2(num_chunks),
        CHUNK=chunk,
        num_warps=4,
    )
