"""Drafts drawn from the drafter's logits in a captured decode step, and their distributions kept.

The reference is the drawing of `speculation.proposers.EagerDraft`. `rejection_triton` verifies such
drafts by the distributions that are kept here.

Shapes: B sequences, J columns of drafts, R = B * J rows of logits, DV draft vocabulary, C chunks of
a row.
"""

from dataclasses import dataclass
from typing import Self

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.launch import launch
from peagle.kernels.sampling.draw_triton import (
    allocate_weights,
    draw_chunk,
    draw_rows,
    kept_weights,
)
from peagle.kernels.sampling.probabilities_triton import RowStats, row_stats
from peagle.kernels.sampling.random import Purpose, of_step
from peagle.kernels.sampling.verify_triton import SequenceSampling


@dataclass(frozen=True, slots=True)
class DrawScratch:
    """Buffers between the launches.

    Attributes:
        stats: statistics of the rows.
        weights_RC: float64, of each chunk of each row.
        tokens_R: int64, draft ids.
        sequences_R: int64, the sequence of each row.
        start_loc: int64, the first row of each sequence.
    """

    stats: RowStats
    weights_RC: Tensor
    tokens_R: Tensor
    sequences_R: Tensor
    start_loc: Tensor

    @classmethod
    def allocate(
        cls, num_seqs: int, num_columns: int, vocab_size: int, device: torch.device | str
    ) -> Self:
        """Allocate buffers for J drafts of each of B sequences."""
        num_rows = num_seqs * num_columns
        rows_R = torch.arange(num_rows, device=device)
        return cls(
            RowStats.allocate(num_rows, vocab_size, device),
            allocate_weights(num_rows, vocab_size, device),
            torch.zeros_like(rows_R),
            rows_R // num_columns,
            rows_R[::num_columns].contiguous(),
        )


@triton.jit
def write_draws_kernel(
    logits_ptr,
    row_stride,
    vocab_size,
    temperature_ptr,
    max_ptr,
    threshold_ptr,
    last_tie_ptr,
    total_ptr,
    tokens_ptr,
    d2t_ptr,
    drafts_ptr,
    drafts_stride,
    q_ptr,
    q_stride,
    columns,
    HAS_MAP: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Write one chunk of the q of one row, and with the first chunk the draft as a target id."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    b = row // columns
    j = row % columns
    temperature = tl.load(temperature_ptr + b)
    v = chunk * CHUNK + tl.arange(0, CHUNK)
    weights = kept_weights(
        logits_ptr + row * row_stride,
        v,
        vocab_size,
        tl.load(max_ptr + row),
        temperature,
        tl.load(threshold_ptr + row),
        tl.load(last_tie_ptr + row),
    )
    q = tl.where(temperature == 0, 0.0, weights / tl.load(total_ptr + row))
    tl.store(q_ptr + b * q_stride + j * vocab_size + v, q, mask=v < vocab_size)
    if chunk == 0:
        # Any token is a draft where the logits mean nothing: the target decides.
        token = tl.maximum(tl.load(tokens_ptr + row), 0)
        if HAS_MAP:
            token += tl.load(d2t_ptr + token)
        tl.store(drafts_ptr + b * drafts_stride + j, token)


def draw_drafts(
    logits_RV: Tensor,
    d2t: Tensor | None,
    sampling: SequenceSampling,
    num_outputs_B: Tensor,
    scratch: DrawScratch,
    drafts_BJ: Tensor,
    probs_BJD: Tensor,
    *,
    first: int,
) -> None:
    """Draw drafts and keep the distributions that they are drawn from. Five launches.

    At temperature 0 the draft is the argmax, and q is 0: it was not drawn. Min-p has no part in it.

    Args:
        logits_RV: the drafter's, [B * J, DV]; float32, bfloat16 or float16.
        d2t: target id - draft id of each draft id; None where both vocabularies are one.
        num_outputs_B: output tokens of each sequence before the step that verifies the drafts.
        scratch: for these rows.
        drafts_BJ: int64, the target ids; any stride between sequences.
        probs_BJD: float32, q in the draft vocabulary; any stride between sequences.
        first: column of the first of the J drafts.
    """
    num_rows, vocab_size = logits_RV.shape
    columns, stats = drafts_BJ.shape[1], scratch.stats
    assert num_rows == drafts_BJ.numel() == len(scratch.sequences_R), "a row for every draft"
    assert drafts_BJ.stride(1) == 1 and probs_BJD.stride()[1:] == (vocab_size, 1)
    row_stats(
        logits_RV,
        scratch.sequences_R,
        sampling.temperature_B,
        sampling.top_k_B,
        sampling.top_p_B,
        None,
        stats,
    )
    draw_rows(
        logits_RV,
        scratch.sequences_R,
        scratch.start_loc,
        sampling.temperature_B,
        sampling.seeds_B,
        of_step(num_outputs_B, 0),
        stats,
        scratch.weights_RC,
        scratch.tokens_R,
        purpose=Purpose.DRAFT,
        first=first,
    )
    launch(
        write_draws_kernel,
        scratch.weights_RC.shape,
        logits_RV,
        logits_RV.stride(0),
        vocab_size,
        sampling.temperature_B,
        stats.max_R,
        stats.threshold_R,
        stats.last_tie_R,
        stats.total_R,
        scratch.tokens_R,
        scratch.tokens_R if d2t is None else d2t,
        drafts_BJ,
        drafts_BJ.stride(0),
        probs_BJD,
        probs_BJD.stride(0),
        columns,
        HAS_MAP=d2t is not None,
        CHUNK=draw_chunk(vocab_size),
        num_warps=4,
    )
