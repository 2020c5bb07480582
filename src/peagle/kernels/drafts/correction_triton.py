"""The corrected logits of one slot, and the walk over all slots with argmax drafts.

The reference is `models.correction.DraftCorrection`.

Shapes: N rows (one a sequence), J slots, W width of the term, r its rank, V target and DV draft
vocabulary, C chunks of a row.
"""

from dataclasses import dataclass
from typing import Self

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.drafts.choice_triton import best_of_chunks, choose_of_chunks
from peagle.kernels.launch import launch, power_of_two

_ROWS = 16  # of a program: the smallest that matrix units multiply
_TOKENS = 128
_WIDTH = 32
_MOST_CHUNKS = 256  # of a row


@triton.jit
def _term(
    n,
    is_row,
    draft,
    states_ptr,
    states_stride,
    tokens_ptr,
    down_ptr,
    width,
    rank,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    RANK: tl.constexpr,
):
    """Return down @ silu(state + token) of rows behind drafts, [ROWS, RANK]."""
    r = tl.arange(0, RANK)
    term = tl.zeros((ROWS, RANK), dtype=tl.float32)
    for first in range(0, width, WIDTH):
        w = first + tl.arange(0, WIDTH)
        inside = is_row[:, None] & (w < width)[None, :]
        state_at = states_ptr + n.to(tl.int64)[:, None] * states_stride + w[None, :]
        state = tl.load(state_at, mask=inside, other=0)
        token = tl.load(tokens_ptr + draft[:, None] * width + w[None, :], mask=inside, other=0)
        inner = state.to(tl.float32) + token.to(tl.float32)
        inner = inner / (1 + tl.exp(-inner))
        down = tl.load(
            down_ptr + r[None, :] * width + w[:, None],
            mask=(r < rank)[None, :] & (w < width)[:, None],
            other=0,
        )
        term = tl.dot(inner.to(down.dtype), down, term, input_precision="ieee")
    return term


@triton.jit
def _added(term, weight_ptr, v, is_token, rank, RANK: tl.constexpr):
    """Return what the term adds to the logits of tokens, [ROWS, TOKENS]."""
    r = tl.arange(0, RANK)
    weight = tl.load(
        weight_ptr + v.to(tl.int64)[None, :] * rank + r[:, None],
        mask=is_token[None, :] & (r < rank)[:, None],
        other=0,
    )
    return tl.dot(term.to(weight.dtype), weight, input_precision="ieee")


@triton.jit
def _correct_kernel(
    logits_ptr,
    logits_stride,
    states_ptr,
    states_stride,
    drafts_ptr,
    drafts_stride,
    tokens_ptr,
    down_ptr,
    weight_ptr,
    num_rows,
    num_ids,
    vocab_size,
    width,
    rank,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    RANK: tl.constexpr,
):
    """Add the term behind drafts to the logits of some tokens of a slot."""
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    v = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    is_row, is_token = n < num_rows, v < vocab_size
    # Any token will do where the logits mean nothing.
    draft = tl.load(drafts_ptr + n.to(tl.int64) * drafts_stride, mask=is_row, other=0)
    draft = tl.minimum(tl.maximum(draft, 0), num_ids - 1)
    term = _term(
        n,
        is_row,
        draft,
        states_ptr,
        states_stride,
        tokens_ptr,
        down_ptr,
        width,
        rank,
        ROWS=ROWS,
        WIDTH=WIDTH,
        RANK=RANK,
    )
    added = _added(term, weight_ptr, v, is_token, rank, RANK=RANK)
    at = logits_ptr + n.to(tl.int64)[:, None] * logits_stride + v[None, :]
    inside = is_row[:, None] & is_token[None, :]
    logits = tl.load(at, mask=inside, other=0)
    tl.store(at, (logits.to(tl.float32) + added).to(logits.dtype), mask=inside)


@triton.jit
def _walk_kernel(
    logits_ptr,
    logits_stride,
    states_ptr,
    states_stride,
    old_max_ptr,
    old_argmax_ptr,
    new_max_ptr,
    new_argmax_ptr,
    drafts_ptr,
    drafts_stride,
    d2t_ptr,
    tokens_ptr,
    down_ptr,
    weight_ptr,
    num_rows,
    num_ids,
    vocab_size,
    width,
    rank,
    num_chunks,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    TILES: tl.constexpr,
    CHUNKS: tl.constexpr,
    WIDTH: tl.constexpr,
    RANK: tl.constexpr,
    IS_FIRST: tl.constexpr,
    HAS_MAP: tl.constexpr,
):
    """Find the draft of the slot before, and the greatest corrected logit of a chunk of this slot.

    The first program of a row stores the draft. A first slot has none before it.
    """
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = n < num_rows
    chunk_at = n.to(tl.int64) * num_chunks
    if not IS_FIRST:
        draft = best_of_chunks(
            old_max_ptr, old_argmax_ptr, n, is_row, num_chunks, vocab_size, CHUNKS=CHUNKS
        )
        if HAS_MAP:
            draft += tl.load(d2t_ptr + draft, mask=is_row, other=0)
        if tl.program_id(1) == 0:
            tl.store(drafts_ptr + n.to(tl.int64) * drafts_stride, draft, mask=is_row)
        term = _term(
            n,
            is_row,
            tl.minimum(draft, num_ids - 1),
            states_ptr,
            states_stride,
            tokens_ptr,
            down_ptr,
            width,
            rank,
            ROWS=ROWS,
            WIDTH=WIDTH,
            RANK=RANK,
        )
    greatest = tl.full((ROWS,), -float("inf"), tl.float32)
    place = tl.full((ROWS,), 2147483647, tl.int32)
    for tile in range(TILES):
        v = (tl.program_id(1) * TILES + tile) * TOKENS + tl.arange(0, TOKENS)
        is_token = v < vocab_size
        inside = is_row[:, None] & is_token[None, :]
        at = logits_ptr + n.to(tl.int64)[:, None] * logits_stride + v[None, :]
        logits = tl.load(at, mask=inside, other=0).to(tl.float32)
        if not IS_FIRST:
            logits += _added(term, weight_ptr, v, is_token, rank, RANK=RANK)
        logits = tl.where(is_token[None, :] & (logits == logits), logits, -float("inf"))
        best = tl.max(logits, 1)
        is_best = is_token[None, :] & (logits == best[:, None])
        found = tl.min(tl.where(is_best, v[None, :], 2147483647), 1)
        place = tl.where((best > greatest) | (place == 2147483647), found, place)
        greatest = tl.maximum(greatest, best)
    tl.store(new_max_ptr + chunk_at + tl.program_id(1), greatest, mask=is_row)
    tl.store(new_argmax_ptr + chunk_at + tl.program_id(1), place, mask=is_row)


def correct_logits(
    logits_NV: Tensor,
    states_NW: Tensor,
    drafts_N: Tensor,
    weights: tuple[Tensor, Tensor, Tensor],
) -> None:
    """logits += weight @ down @ silu(states + tokens[drafts]), in place. One launch.

    Args:
        logits_NV: the head's own of a slot, [N, DV], any stride between rows.
        states_NW: of the slot, any stride between rows.
        drafts_N: int64, drafted by the slot before, target ids, any stride.
        weights: `DraftCorrection.weights`.
    """
    tokens_VW, down_rW, _ = weights
    num_rows, vocab_size = logits_NV.shape
    rank, width = down_rW.shape
    assert logits_NV.stride(1) == states_NW.stride(1) == 1, "kernels step over whole rows"
    assert all(x.is_contiguous() for x in weights)
    launch(
        _correct_kernel,
        (triton.cdiv(num_rows, _ROWS), triton.cdiv(vocab_size, _TOKENS)),
        logits_NV,
        logits_NV.stride(0),
        states_NW,
        states_NW.stride(0),
        drafts_N,
        drafts_N.stride(0),
        *weights,
        num_rows,
        len(tokens_VW),
        vocab_size,
        width,
        rank,
        ROWS=_ROWS,
        TOKENS=_TOKENS,
        WIDTH=_WIDTH,
        RANK=max(16, power_of_two(rank)),
        num_warps=4,
    )


@dataclass(frozen=True, slots=True)
class WalkScratch:
    """Greatest corrected logit of each chunk of N rows of two slots, and where it stands."""

    max_2NC: Tensor
    argmax_2NC: Tensor

    @classmethod
    def allocate(cls, num_rows: int, vocab_size: int, device: torch.device | str) -> Self:
        """Allocate buffers for N rows of DV logits."""
        shape = 2, num_rows, triton.cdiv(vocab_size, _TOKENS * _tiles(vocab_size))
        return cls(
            torch.zeros(shape, dtype=torch.float32, device=device),
            torch.zeros(shape, dtype=torch.int32, device=device),
        )


def _tiles(vocab_size: int) -> int:
    """Return how many tiles of tokens a program looks at, so that a row has few chunks."""
    return triton.cdiv(vocab_size, _TOKENS * _MOST_CHUNKS)


def walk_chains(
    logits_NJV: Tensor,
    states_NJW: Tensor,
    d2t: Tensor | None,
    weights: tuple[Tensor, Tensor, Tensor],
    scratch: WalkScratch,
    out_NJ: Tensor,
) -> None:
    """Choose argmax drafts slot after slot, each corrected by the drafts before it.

    Launches: one a slot, and one more. The logits stay as they are; of equal ones the first is
    taken.

    Args:
        logits_NJV: the head's own, any strides between rows.
        states_NJW: from `DraftCorrection.start`, any strides between rows.
        d2t: the map from draft ids, id + d2t[id]; None where both vocabularies are one.
        weights: `DraftCorrection.weights`.
        scratch: for so many rows.
        out_NJ: int64, any strides; takes target ids.
    """
    tokens_VW, down_rW, _ = weights
    num_rows, num_slots, vocab_size = logits_NJV.shape
    rank, width = down_rW.shape
    num_chunks = scratch.max_2NC.shape[2]
    assert logits_NJV.stride(2) == states_NJW.stride(2) == 1, "kernels step over whole rows"
    assert all(x.is_contiguous() for x in weights)
    for j in range(num_slots):
        old, new = (j + 1) % 2, j % 2
        launch(
            _walk_kernel,
            (triton.cdiv(num_rows, _ROWS), num_chunks),
            logits_NJV[:, j],
            logits_NJV.stride(0),
            states_NJW[:, j],
            states_NJW.stride(0),
            scratch.max_2NC[old],
            scratch.argmax_2NC[old],
            scratch.max_2NC[new],
            scratch.argmax_2NC[new],
            out_NJ[:, max(j - 1, 0)],
            out_NJ.stride(0),
            scratch.argmax_2NC if d2t is None else d2t,
            *weights,
            num_rows,
            len(tokens_VW),
            vocab_size,
            width,
            rank,
            num_chunks,
            ROWS=_ROWS,
            TOKENS=_TOKENS,
            TILES=_tiles(vocab_size),
            CHUNKS=power_of_two(num_chunks),
            WIDTH=_WIDTH,
            RANK=max(16, power_of_two(rank)),
            IS_FIRST=not j,
            HAS_MAP=d2t is not None,
            num_warps=4,
        )
    last = (num_slots - 1) % 2
    found = scratch.max_2NC[last], scratch.argmax_2NC[last]
    choose_of_chunks(*found, d2t, out_NJ[:, -1], vocab_size)
