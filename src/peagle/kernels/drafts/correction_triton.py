"""The corrected logits of one slot, and the walk over all slots with argmax drafts.

The reference is `models.correction.DraftCorrection`. Where it has several corrections, a program
goes through those of its rows, from the least number to the greatest. A walk takes the rows in
their order, so that most programs have rows of one.

Shapes: N rows (one a sequence), J slots, W width of the term, r its rank, V target and DV draft
vocabulary, C chunks of a row.
"""

from dataclasses import dataclass
from typing import Any, Self

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from peagle.kernels.drafts.choice_triton import best_of_chunks, choose_of_chunks
from peagle.kernels.launch import DeviceLimits, launch, power_of_two

_ROWS = 16  # of a program: the smallest that matrix units multiply
_TOKENS = 128
_WIDTH = 32
_MOST_CHUNKS = 256  # of a row of a walk


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
    term,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    RANK: tl.constexpr,
):
    """Return term + down @ silu(state + token) of rows behind drafts, [ROWS, RANK].

    The product is that of the inner values from FIRST on.
    """
    r = tl.arange(0, RANK)
    for first in range(FIRST, width, WIDTH):
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
def _load_weight(weight_ptr, v, is_token, rank, RANK: tl.constexpr):
    """Return the rows of tokens, [RANK, TOKENS]."""
    r = tl.arange(0, RANK)
    return tl.load(
        weight_ptr + v.to(tl.int64)[None, :] * rank + r[:, None],
        mask=is_token[None, :] & (r < rank)[:, None],
        other=0,
    )


@triton.jit
def _load_choice(which_ptr, n, is_row):
    """Return the numbers of the corrections of rows, the least of them and the greatest."""
    which = tl.load(which_ptr + n, mask=is_row, other=0)
    least = tl.min(tl.where(is_row, which, 2147483647), 0)
    return which, least.to(tl.int32), tl.max(which, 0).to(tl.int32)


@triton.jit
def _chosen_term(
    n,
    is_row,
    draft,
    states_ptr,
    states_stride,
    tokens_ptr,
    down_ptr,
    num_ids,
    width,
    rank,
    which,
    least,
    most,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    RANK: tl.constexpr,
):
    """Return the term of rows behind drafts, each of its own correction, [ROWS, RANK]."""
    term = tl.zeros((ROWS, RANK), dtype=tl.float32)
    for number in range(least, most + 1):
        term = _term(
            n,
            is_row & (which == number),  # the inner values of other rows are 0
            draft + which * num_ids,
            states_ptr,
            states_stride,
            tokens_ptr,
            down_ptr + number * rank * width,
            width,
            rank,
            term,
            FIRST=0,
            WIDTH=WIDTH,
            RANK=RANK,
        )
    return term


@triton.jit
def _add_chosen(
    logits,
    term,
    weight_ptr,
    v,
    is_token,
    vocab_size,
    rank,
    which,
    least,
    most,
    RANK: tl.constexpr,
):
    """Return the logits of some tokens with the terms of rows, each of its own correction."""
    for number in range(least, most + 1):
        own_ptr = weight_ptr + tl.cast(number, tl.int64) * vocab_size * rank
        weight = _load_weight(own_ptr, v, is_token, rank, RANK=RANK)
        own = tl.where((which == number)[:, None], term, 0.0)
        logits += tl.dot(own.to(weight.dtype), weight, input_precision="ieee")
    return logits


@triton.jit
def _greatest(logits, v, is_token):
    """Return the greatest logit of each row, and the first token that has it. NaN is none."""
    logits = tl.where(is_token[None, :] & (logits == logits), logits, -float("inf"))
    greatest = tl.max(logits, 1)
    is_best = is_token[None, :] & (logits == greatest[:, None])
    return greatest, tl.min(tl.where(is_best, v[None, :], 2147483647), 1)


@triton.jit
def _correct_kernel(
    logits_ptr,
    logits_stride,
    states_ptr,
    states_stride,
    drafts_ptr,
    drafts_stride,
    which_ptr,
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
    HAS_CHOICE: tl.constexpr,
):
    """Add the term behind drafts to the logits of some tokens of a slot."""
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    v = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    is_row, is_token = n < num_rows, v < vocab_size
    # Any token will do where the logits mean nothing.
    draft = tl.load(drafts_ptr + n.to(tl.int64) * drafts_stride, mask=is_row, other=0)
    draft = tl.minimum(tl.maximum(draft, 0), num_ids - 1)
    if HAS_CHOICE:
        which, least, most = _load_choice(which_ptr, n, is_row)
        term = _chosen_term(
            n,
            is_row,
            draft,
            states_ptr,
            states_stride,
            tokens_ptr,
            down_ptr,
            num_ids,
            width,
            rank,
            which,
            least,
            most,
            ROWS=ROWS,
            WIDTH=WIDTH,
            RANK=RANK,
        )
        added = tl.zeros((ROWS, TOKENS), dtype=tl.float32)
        added = _add_chosen(
            added, term, weight_ptr, v, is_token, vocab_size, rank, which, least, most, RANK=RANK
        )
    else:
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
            tl.zeros((ROWS, RANK), dtype=tl.float32),
            FIRST=0,
            WIDTH=WIDTH,
            RANK=RANK,
        )
        weight = _load_weight(weight_ptr, v, is_token, rank, RANK=RANK)
        added = tl.dot(term.to(weight.dtype), weight, input_precision="ieee")
    at = logits_ptr + n.to(tl.int64)[:, None] * logits_stride + v[None, :]
    inside = is_row[:, None] & is_token[None, :]
    logits = tl.load(at, mask=inside, other=0)
    tl.store(at, (logits.to(tl.float32) + added).to(logits.dtype), mask=inside)


@triton.jit
def _order_kernel(order_ptr, which_ptr, num_rows, ROWS: tl.constexpr, OTHERS: tl.constexpr):
    """Put the rows in the order of their corrections, rows of one as they come; one program."""
    n = tl.arange(0, ROWS)
    is_row = n < num_rows
    which = tl.load(which_ptr + n, mask=is_row, other=0)
    place = tl.zeros((ROWS,), tl.int32)
    for first in range(0, num_rows, OTHERS):
        m = first + tl.arange(0, OTHERS)
        other = tl.load(which_ptr + m, mask=m < num_rows, other=0)[None, :]
        is_before = (other < which[:, None]) | (
            (other == which[:, None]) & (m[None, :] < n[:, None])
        )
        place += tl.sum((is_before & (m < num_rows)[None, :]).to(tl.int32), 1)
    tl.store(order_ptr + place, n, mask=is_row)


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
    which_ptr,
    order_ptr,
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
    IS_WIDE: tl.constexpr,
    HAS_MAP: tl.constexpr,
    HAS_CHOICE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Find the draft of the slot before, and the greatest corrected logit of a chunk of this slot.

    The first program of a row stores the draft. A first slot has none before it. Where launches
    overlap, the next slot's programs begin as soon as these have their inputs, and read what no
    slot writes.
    """
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    r, w = tl.arange(0, RANK), tl.arange(0, WIDTH)
    v = tl.program_id(1) * TILES * TOKENS + tl.arange(0, TOKENS)
    is_row, is_token = n < num_rows, v < vocab_size
    if HAS_CHOICE and not IS_FIRST:
        n = tl.load(order_ptr + n, mask=is_row, other=0)
    is_inner = is_row[:, None] & (w < width)[None, :]
    row = n.to(tl.int64)
    logits_at = logits_ptr + row[:, None] * logits_stride
    inside = is_row[:, None] & is_token[None, :]
    logits = tl.load(logits_at + v[None, :], mask=inside, other=0).to(tl.float32)
    if not IS_FIRST:
        if HAS_CHOICE:
            which, least, most = _load_choice(which_ptr, n, is_row)
        else:
            weight = _load_weight(weight_ptr, v, is_token, rank, RANK=RANK)
            is_down = (r < rank)[None, :] & (w < width)[:, None]
            down = tl.load(down_ptr + r[None, :] * width + w[:, None], mask=is_down, other=0)
            state_at = states_ptr + row[:, None] * states_stride + w[None, :]
            state = tl.load(state_at, mask=is_inner, other=0).to(tl.float32)
        if OVERLAPS:
            gdc_wait()
    if OVERLAPS:
        # Not before the wait: so no launch begins before the last but one is done.
        gdc_launch_dependents()
    if not IS_FIRST:
        draft = best_of_chunks(
            old_max_ptr, old_argmax_ptr, n, is_row, num_chunks, vocab_size, CHUNKS=CHUNKS
        )
        if HAS_MAP:
            draft += tl.load(d2t_ptr + draft, mask=is_row, other=0)
        if tl.program_id(1) == 0:
            tl.store(drafts_ptr + row * drafts_stride, draft, mask=is_row)
        draft = tl.minimum(draft, num_ids - 1)
        if HAS_CHOICE:
            term = _chosen_term(
                n,
                is_row,
                draft,
                states_ptr,
                states_stride,
                tokens_ptr,
                down_ptr,
                num_ids,
                width,
                rank,
                which,
                least,
                most,
                ROWS=ROWS,
                WIDTH=WIDTH,
                RANK=RANK,
            )
            logits = _add_chosen(
                logits,
                term,
                weight_ptr,
                v,
                is_token,
                vocab_size,
                rank,
                which,
                least,
                most,
                RANK=RANK,
            )
        else:
            token_at = tokens_ptr + draft[:, None] * width + w[None, :]
            inner = state + tl.load(token_at, mask=is_inner, other=0).to(tl.float32)
            inner = inner / (1 + tl.exp(-inner))
            term = tl.dot(inner.to(down.dtype), down, input_precision="ieee")
            if IS_WIDE:
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
                    term,
                    FIRST=WIDTH,
                    WIDTH=WIDTH,
                    RANK=RANK,
                )
            logits += tl.dot(term.to(weight.dtype), weight, input_precision="ieee")
    greatest, place = _greatest(logits, v, is_token)
    for _ in range(1, TILES):
        v += TOKENS
        is_token = v < vocab_size
        inside = is_row[:, None] & is_token[None, :]
        logits = tl.load(logits_at + v[None, :], mask=inside, other=0).to(tl.float32)
        if not IS_FIRST:
            if HAS_CHOICE:
                logits = _add_chosen(
                    logits,
                    term,
                    weight_ptr,
                    v,
                    is_token,
                    vocab_size,
                    rank,
                    which,
                    least,
                    most,
                    RANK=RANK,
                )
            else:
                weight = _load_weight(weight_ptr, v, is_token, rank, RANK=RANK)
                logits += tl.dot(term.to(weight.dtype), weight, input_precision="ieee")
        best, found = _greatest(logits, v, is_token)
        place = tl.where((best > greatest) | (place == 2147483647), found, place)
        greatest = tl.maximum(greatest, best)
    at = row * num_chunks + tl.program_id(1)
    tl.store(new_max_ptr + at, greatest, mask=is_row)
    tl.store(new_argmax_ptr + at, place, mask=is_row)


def correct_logits(
    logits_NV: Tensor,
    states_NW: Tensor,
    drafts_N: Tensor,
    weights: tuple[Tensor, Tensor, Tensor],
    which_N: Tensor | None = None,
) -> None:
    """logits += weight @ down @ silu(states + tokens[drafts]), in place. One launch.

    Args:
        logits_NV: the head's own of a slot, [N, DV], any stride between rows.
        states_NW: of the slot, any stride between rows.
        drafts_N: int64, drafted by the slot before, target ids, any stride.
        weights: `DraftCorrection.weights`.
        which_N: int64, the number of each row's correction; None where there are not several.
    """
    tokens_VW, down_rW, _ = weights
    num_rows, vocab_size = logits_NV.shape
    rank, width = down_rW.shape[-2:]
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
        drafts_N if which_N is None else which_N,
        *weights,
        num_rows,
        tokens_VW.shape[-2],
        vocab_size,
        width,
        rank,
        ROWS=_ROWS,
        TOKENS=_TOKENS,
        WIDTH=_WIDTH,
        RANK=max(16, power_of_two(rank)),
        HAS_CHOICE=which_N is not None,
        num_warps=4,
    )


@dataclass(frozen=True, slots=True)
class WalkScratch:
    """Greatest corrected logit of each chunk of N rows of two slots, and where it stands; and the
    rows in the order of their corrections.
    """

    max_2NC: Tensor
    argmax_2NC: Tensor
    order_N: Tensor

    @classmethod
    def allocate(cls, num_rows: int, weights: tuple[Tensor, Tensor, Tensor]) -> Self:
        """Allocate buffers for N rows; `weights` are those of `walk_chains`."""
        device, vocab_size = weights[2].device, weights[2].shape[-2]
        tile = _WalkTile.of(weights)
        shape = 2, num_rows, triton.cdiv(vocab_size, tile.num_tokens * tile.num_tiles)
        return cls(
            torch.empty(shape, dtype=torch.float32, device=device),
            torch.empty(shape, dtype=torch.int32, device=device),
            torch.empty(num_rows, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True, slots=True)
class _WalkTile:
    """The tokens and inner values that a program of a walk holds at once; and its tiles."""

    num_tokens: int
    width: int
    num_tiles: int

    @classmethod
    def of(cls, weights: tuple[Tensor, Tensor, Tensor]) -> Self:
        """Return up to 512 tokens, whose weights take at most a third of the shared memory."""
        _, down_rW, weight_Vr = weights
        rank, width = down_rW.shape[-2:]
        shared_bytes = DeviceLimits.of(weight_Vr.device).shared_bytes
        row_bytes = max(16, power_of_two(rank)) * weight_Vr.element_size()
        num_values = power_of_two(shared_bytes // 3 + 1) // 2 // row_bytes
        num_tokens = min(512, max(64, num_values))
        num_tiles = triton.cdiv(weight_Vr.shape[-2], num_tokens * _MOST_CHUNKS)
        return cls(num_tokens, min(power_of_two(width), max(32, num_values // 2)), num_tiles)


def walk_chains(
    logits_NJV: Tensor,
    states_NJW: Tensor,
    d2t: Tensor | None,
    weights: tuple[Tensor, Tensor, Tensor],
    scratch: WalkScratch,
    out_NJ: Tensor,
    which_N: Tensor | None = None,
) -> None:
    """Choose argmax drafts slot after slot, each corrected by the drafts before it.

    Launches: one a slot and one more, with several corrections two more. On cards from compute
    capability 9.0 on, a launch begins while the one before it is at work (programmatic dependent
    launch). The logits stay as they are; of equal ones the first is taken.

    Args:
        logits_NJV: the head's own, any strides between rows.
        states_NJW: from `DraftCorrection.start`, any strides between rows.
        d2t: the map from draft ids, id + d2t[id]; None where both vocabularies are one.
        weights: `DraftCorrection.weights`.
        scratch: for so many rows.
        out_NJ: int64, any strides; takes target ids.
        which_N: int64, the number of each row's correction; None where there are not several.
    """
    tokens_VW, down_rW, weight_Vr = weights
    num_rows, num_slots, vocab_size = logits_NJV.shape
    rank, width = down_rW.shape[-2:]
    num_chunks = scratch.max_2NC.shape[2]
    assert logits_NJV.stride(2) == states_NJW.stride(2) == 1, "kernels step over whole rows"
    assert all(x.is_contiguous() for x in weights)
    tile = _WalkTile.of(weights)
    overlaps = DeviceLimits.of(weight_Vr.device).overlaps_launches
    if which_N is not None and num_rows:
        sizes: Any = {"ROWS": power_of_two(num_rows), "OTHERS": 16, "num_warps": 4}
        launch(_order_kernel, (1,), scratch.order_N, which_N, num_rows, **sizes)
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
            out_NJ if which_N is None else which_N,
            scratch.order_N,
            *weights,
            num_rows,
            tokens_VW.shape[-2],
            vocab_size,
            width,
            rank,
            num_chunks,
            ROWS=_ROWS,
            TOKENS=tile.num_tokens,
            TILES=tile.num_tiles,
            CHUNKS=power_of_two(num_chunks),
            WIDTH=tile.width,
            RANK=max(16, power_of_two(rank)),
            IS_FIRST=not j,
            IS_WIDE=width > tile.width,
            HAS_MAP=d2t is not None,
            HAS_CHOICE=which_N is not None,
            OVERLAPS=overlaps,
            num_warps=8,
            **({"launch_pdl": True} if overlaps and j else {}),
        )
    last = (num_slots - 1) % 2
    found = scratch.max_2NC[last], scratch.argmax_2NC[last]
    choose_of_chunks(*found, d2t, out_NJ[:, -1], vocab_size)
