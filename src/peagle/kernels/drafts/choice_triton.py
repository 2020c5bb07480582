"""Choosing drafts, and what EAGLE-3 needs between its passes.

Shapes: B sequences (a bucket), K most drafts, S drafter slots, M blocks a sequence, N rows of
drafts, DV draft vocabulary, C chunks of a row.
"""

from dataclasses import dataclass
from typing import Self

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.drafts.batches import PackedBatch
from peagle.kernels.drafts.batches_triton import kv_slots
from peagle.kernels.launch import launch
from peagle.kernels.sampling.probabilities_triton import chunk_kernel, chunk_size


@triton.jit
def best_of_chunks(max_ptr, argmax_ptr, n, is_row, num_chunks, vocab_size, CHUNKS: tl.constexpr):
    """Return the first of the greatest of each row, from those of its chunks."""
    c = tl.arange(0, CHUNKS)
    at = n.to(tl.int64)[:, None] * num_chunks + c[None, :]
    inside = is_row[:, None] & (c < num_chunks)[None, :]
    maxima = tl.load(max_ptr + at, mask=inside, other=-float("inf"))
    indices = tl.load(argmax_ptr + at, mask=inside, other=2147483647)
    is_best = maxima == tl.max(maxima, 1)[:, None]
    best = tl.min(tl.where(is_best, indices, 2147483647), 1).to(tl.int64)
    # Broken logits have no greatest: any token will do.
    return tl.minimum(best, vocab_size - 1)


@triton.jit
def _choose_kernel(
    chunk_max_ptr,
    chunk_argmax_ptr,
    d2t_ptr,
    out_ptr,
    num_chunks,
    vocab_size,
    columns,
    stride_row,
    stride_column,
    CHUNKS: tl.constexpr,
    HAS_MAP: tl.constexpr,
):
    n = tl.program_id(0) + tl.arange(0, 1)
    token = best_of_chunks(
        chunk_max_ptr, chunk_argmax_ptr, n, n >= 0, num_chunks, vocab_size, CHUNKS=CHUNKS
    )
    if HAS_MAP:
        token += tl.load(d2t_ptr + token)
    tl.store(out_ptr + n // columns * stride_row + n % columns * stride_column, token)


@dataclass(frozen=True, slots=True)
class ChoiceScratch:
    """Greatest logit of each chunk of N rows, and where it stands."""

    max_NC: Tensor
    argmax_NC: Tensor
    rows_N: Tensor

    @classmethod
    def allocate(cls, num_rows: int, vocab_size: int, device: torch.device | str) -> Self:
        """Allocate buffers for N rows of DV logits."""
        shape = (num_rows, triton.cdiv(vocab_size, chunk_size(num_rows, vocab_size)))
        return cls(
            torch.zeros(shape, dtype=torch.float32, device=device),
            torch.zeros(shape, dtype=torch.int32, device=device),
            torch.zeros(num_rows, dtype=torch.int64, device=device),
        )


def choose_drafts(
    logits_NV: Tensor, d2t: Tensor | None, scratch: ChoiceScratch, out: Tensor
) -> None:
    """out = argmax of each row as a target id, id + d2t[id]; of equal logits the first. 2 launches.

    Args:
        logits_NV: rows [B * columns, DV] in the order of `out`.
        d2t: the map; None where both vocabularies are one.
        scratch: for so many rows.
        out: int64 [B] or [B, columns], any strides.
    """
    num_rows, vocab_size = logits_NV.shape
    chunk = chunk_size(num_rows, vocab_size)
    num_chunks = scratch.max_NC.shape[1]
    assert num_rows == out.numel() == scratch.rows_N.shape[0] and logits_NV.stride(1) == 1
    launch(
        chunk_kernel,
        (num_rows, num_chunks),
        logits_NV,
        scratch.rows_N,
        scratch.max_NC,  # no temperature is read without sums
        scratch.max_NC,
        scratch.argmax_NC,
        scratch.max_NC,
        vocab_size,
        logits_NV.stride(0),
        num_chunks,
        SUMS=False,
        CHUNK=chunk,
        num_warps=8 if chunk > 4096 else 4,
    )
    choose_of_chunks(scratch.max_NC, scratch.argmax_NC, d2t, out, vocab_size)


def choose_of_chunks(
    max_NC: Tensor, argmax_NC: Tensor, d2t: Tensor | None, out: Tensor, vocab_size: int
) -> None:
    """out = argmax of each row, from the greatest of each chunk of it and where that stands.

    Args:
        max_NC, argmax_NC: contiguous.
        d2t, out: as for `choose_drafts`.
    """
    num_rows, num_chunks = max_NC.shape
    columns = 1 if out.dim() == 1 else out.shape[1]
    launch(
        _choose_kernel,
        (num_rows,),
        max_NC,
        argmax_NC,
        argmax_NC if d2t is None else d2t,
        out,
        num_chunks,
        vocab_size,
        columns,
        out.stride(0),
        0 if out.dim() == 1 else out.stride(1),
        CHUNKS=triton.next_power_of_2(num_chunks),
        HAS_MAP=d2t is not None,
        num_warps=1,
    )


@dataclass(frozen=True, slots=True)
class ChainBuffers:
    """Inputs of the passes over one draft token of each sequence, P = K - 1 of them.

    Attributes:
        positions_PB, slots_PB, seq_lens_PB: of the slot behind the last one, and so on. A sequence
            that does not run has position 0, slot -1 and length 1: it attends to something.
        query_start_loc: 0, 1, ... B: one query each.
    """

    positions_PB: Tensor
    slots_PB: Tensor
    seq_lens_PB: Tensor
    query_start_loc: Tensor

    @classmethod
    def allocate(cls, num_seqs: int, max_drafts: int, device: torch.device | str) -> Self:
        """Allocate buffers for B sequences and K drafts."""
        shape = (3, max(max_drafts - 1, 0), num_seqs)
        positions, slots, lens = torch.zeros(shape, dtype=torch.int64, device=device)
        return cls(positions, slots, lens, torch.arange(num_seqs + 1, device=device))

    def batch(self, index: int, tokens_B: Tensor) -> PackedBatch:
        """Return the inputs of pass `index` over the given draft tokens."""
        rows = self.positions_PB[index], self.slots_PB[index]
        return PackedBatch(tokens_B, *rows, self.query_start_loc, self.seq_lens_PB[index])


@triton.jit
def _chain_kernel(
    last_ntp_ptr,
    slot_positions_ptr,
    tables_ptr,
    running_ptr,
    positions_ptr,
    slots_ptr,
    lens_ptr,
    num_seqs,
    num_passes,
    table_width,
    limit,
    BLOCK_SIZE: tl.constexpr,
    PASSES: tl.constexpr,
):
    b = tl.program_id(0)
    p = tl.arange(0, PASSES)
    last = tl.load(slot_positions_ptr + tl.load(last_ntp_ptr + b))
    inside = p < tl.where(tl.load(running_ptr + b) != 0, num_passes, 0)
    positions = tl.where(inside, last + 1 + p, 0)
    table = tables_ptr + b.to(tl.int64) * table_width
    slots = kv_slots(table, positions, inside, table_width, limit, BLOCK_SIZE)
    at = p * num_seqs + b
    tl.store(positions_ptr + at, positions, mask=p < num_passes)
    tl.store(slots_ptr + at, slots, mask=p < num_passes)
    tl.store(lens_ptr + at, positions + 1, mask=p < num_passes)


def plan_chain(
    last_ntp_B: Tensor,
    positions_S: Tensor,
    block_tables_BM: Tensor,
    running_B: Tensor,
    out: ChainBuffers,
    *,
    block_size: int,
    max_model_len: int,
) -> None:
    """Plan where the drafts behind the first pass stand: pass p at position last + 1 + p.

    Args:
        last_ntp_B, positions_S: of the first pass, see `DraftBatch`.
        block_tables_BM: KV blocks of each sequence.
        running_B: whether each sequence drafts.
        out: buffers.
        block_size: slots of a block.
        max_model_len: positions from here on write no KV.
    """
    assert block_tables_BM.is_contiguous(), "kernels step over whole rows"
    num_passes, num_seqs = out.positions_PB.shape
    if num_passes == 0:
        return
    launch(
        _chain_kernel,
        (num_seqs,),
        last_ntp_B,
        positions_S,
        block_tables_BM,
        running_B,
        out.positions_PB,
        out.slots_PB,
        out.seq_lens_PB,
        num_seqs,
        num_passes,
        block_tables_BM.shape[1],
        max_model_len,
        BLOCK_SIZE=block_size,
        PASSES=triton.next_power_of_2(num_passes),
        num_warps=1,
    )
