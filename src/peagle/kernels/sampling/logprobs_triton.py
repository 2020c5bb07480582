"""Log-probabilities of a captured decode step, in two passes over the logits.

The reference is `kernels.sampling.logprobs.logprob_table`. Of every chunk of a row the first launch
keeps the sum of exponentials, how many logits are above the token's, and the greatest ones; the
second puts the chunks together.

Shapes: N rows, V vocabulary, C chunks of a row, P most likely tokens, X = 2 + 2P columns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.launch import launch, power_of_two

MAX_TOP = 32
_CHUNK = 4096
_FAR = tl.constexpr(2147483647)


@triton.jit(do_not_specialize=["num_top"])
def chunk_logprobs_kernel(
    logits_ptr,
    rows_ptr,
    tokens_ptr,
    max_ptr,
    sum_ptr,
    above_ptr,
    top_ptr,
    top_ids_ptr,
    vocab_size,
    num_chunks,
    num_top,
    MAX_TOP: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Store a chunk's maximum, sum of exponentials, count above the token, and greatest logits."""
    n = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    row_ptr = logits_ptr + tl.load(rows_ptr + n) * vocab_size
    v = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = v < vocab_size
    x = tl.load(row_ptr + v, mask=inside, other=-float("inf")).to(tl.float32)
    own = tl.load(row_ptr + tl.load(tokens_ptr + n)).to(tl.float32)
    best = tl.max(x)
    out = n * num_chunks + chunk
    tl.store(max_ptr + out, best)
    tl.store(sum_ptr + out, tl.sum(tl.where(x == -float("inf"), 0.0, tl.exp(x - best))))
    tl.store(above_ptr + out, tl.sum((x > own).to(tl.int32)))
    x = tl.where(x == x, x, -float("inf"))
    for p in range(num_top):
        best = tl.max(tl.where(inside, x, -float("inf")))
        first = tl.min(tl.where(inside & (x == best), v, _FAR))
        tl.store(top_ptr + out * MAX_TOP + p, best)
        tl.store(top_ids_ptr + out * MAX_TOP + p, first)
        inside = inside & (v != first)


@triton.jit(do_not_specialize=["num_top"])
def join_logprobs_kernel(
    logits_ptr,
    rows_ptr,
    tokens_ptr,
    max_ptr,
    sum_ptr,
    above_ptr,
    top_ptr,
    top_ids_ptr,
    table_ptr,
    vocab_size,
    num_chunks,
    num_top,
    MAX_TOP: tl.constexpr,
    CHUNKS: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """Join the chunks of one row into its columns of the table."""
    n = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, CHUNKS)
    known = c < num_chunks
    maxima = tl.load(max_ptr + n * num_chunks + c, mask=known, other=-float("inf"))
    sums = tl.load(sum_ptr + n * num_chunks + c, mask=known, other=0.0)
    above = tl.load(above_ptr + n * num_chunks + c, mask=known, other=0)
    best = tl.max(maxima)
    shares = tl.where(maxima == -float("inf"), 0.0, sums * tl.exp(maxima - best))
    total = tl.log(tl.sum(shares))
    own = tl.load(logits_ptr + tl.load(rows_ptr + n) * vocab_size + tl.load(tokens_ptr + n))
    columns = table_ptr + n * (2 + 2 * num_top)
    tl.store(columns, (own.to(tl.float32) - best - total).to(tl.float64))
    tl.store(columns + 1, (tl.sum(above) + 1).to(tl.float64))
    at = tl.arange(0, CANDIDATES)
    left = (at < num_chunks * MAX_TOP) & (at % MAX_TOP < num_top)
    values = tl.load(top_ptr + n * num_chunks * MAX_TOP + at, mask=left, other=-float("inf"))
    ids = tl.load(top_ids_ptr + n * num_chunks * MAX_TOP + at, mask=left, other=_FAR)
    left = left & (ids < _FAR)
    for p in range(num_top):
        value = tl.max(tl.where(left, values, -float("inf")))
        first = tl.min(tl.where(left & (values == value), ids, _FAR))
        tl.store(columns + 2 + p, first.to(tl.float64))
        tl.store(columns + 2 + num_top + p, (value - best - total).to(tl.float64))
        left = left & (ids != first)


def tabulate_logprobs(logits_TV: Tensor, rows_N: Tensor, tokens_N: Tensor, num_top: int) -> Tensor:
    """Return `logprob_table` of some rows, float64 [N, X]. Two launches; no wait for the device.

    Args:
        logits_TV: float32, bfloat16 or float16.
        rows_N: int64, which rows of the logits.
        tokens_N: int64, a token of each.
        num_top: P, at most MAX_TOP; at most V come.
    """
    assert num_top <= MAX_TOP, f"{num_top} most likely tokens; {MAX_TOP} have room"
    assert logits_TV.dtype != torch.float64, "the kernels compute in float32"
    assert logits_TV.is_contiguous(), "kernels read whole rows"
    num_rows, vocab_size, device = len(rows_N), logits_TV.shape[1], logits_TV.device
    num_top, chunk = min(num_top, vocab_size), min(_CHUNK, power_of_two(vocab_size))
    num_chunks = triton.cdiv(vocab_size, chunk)
    max_NC, sum_NC = torch.empty(2, num_rows, num_chunks, dtype=torch.float32, device=device)
    above_NC = torch.empty(num_rows, num_chunks, dtype=torch.int32, device=device)
    top_NCP = torch.empty(num_rows, num_chunks, MAX_TOP, dtype=torch.float32, device=device)
    ids_NCP = torch.empty(num_rows, num_chunks, MAX_TOP, dtype=torch.int32, device=device)
    table_NX = torch.empty(num_rows, 2 + 2 * num_top, dtype=torch.float64, device=device)
    given = logits_TV, rows_N, tokens_N, max_NC, sum_NC, above_NC, top_NCP, ids_NCP
    launch(
        chunk_logprobs_kernel,
        (num_rows, num_chunks),
        *given,
        vocab_size,
        num_chunks,
        num_top,
        MAX_TOP=MAX_TOP,
        CHUNK=chunk,
        num_warps=8,
    )
    launch(
        join_logprobs_kernel,
        (num_rows,),
        *given,
        table_NX,
        vocab_size,
        num_chunks,
        num_top,
        MAX_TOP=MAX_TOP,
        CHUNKS=power_of_two(num_chunks),
        CANDIDATES=power_of_two(num_chunks * MAX_TOP),
        num_warps=4,
    )
    return table_NX
