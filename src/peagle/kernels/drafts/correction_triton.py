"""The corrected logits of one slot, in place.

The reference is `models.correction.DraftCorrection.add`.

Shapes: N rows (one a sequence), W width of the term, r its rank, V target and DV draft vocabulary.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.launch import launch, power_of_two

_ROWS = 16  # of a program: the smallest that matrix units multiply
_TOKENS = 128
_WIDTH = 64


@dataclass(frozen=True, slots=True)
class Paths:
    """The sums of the tokens of paths, see `models.correction`.

    Attributes:
        before_NW: s of the slot before, any stride between rows.
        after_NW: takes s of this slot, contiguous; another tensor.
        decay_W: what is kept of the slot before.
    """

    before_NW: Tensor
    after_NW: Tensor
    decay_W: Tensor


@triton.jit
def _correct_kernel(
    logits_ptr,
    logits_stride,
    states_ptr,
    states_stride,
    paths_ptr,
    paths_stride,
    decay_ptr,
    out_paths_ptr,
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
    IS_GATED: tl.constexpr,
    HAS_PATHS: tl.constexpr,
):
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    v = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    r = tl.arange(0, RANK)
    is_row, is_token, is_rank = n < num_rows, v < vocab_size, r < rank
    # Any token will do where the logits mean nothing.
    draft = tl.load(drafts_ptr + n.to(tl.int64) * drafts_stride, mask=is_row, other=0)
    draft = tl.minimum(tl.maximum(draft, 0), num_ids - 1)
    if IS_GATED:
        # term = down silu(state + path), summed over parts of the width.
        term = tl.zeros((ROWS, RANK), dtype=tl.float32)
        for first in range(0, width, WIDTH):
            w = first + tl.arange(0, WIDTH)
            inside = is_row[:, None] & (w < width)[None, :]
            state_at = states_ptr + n.to(tl.int64)[:, None] * states_stride + w[None, :]
            state = tl.load(state_at, mask=inside, other=0)
            token = tl.load(tokens_ptr + draft[:, None] * width + w[None, :], mask=inside, other=0)
            path = token.to(tl.float32)
            if HAS_PATHS:
                decay = tl.load(decay_ptr + w, mask=w < width, other=0).to(tl.float32)
                path_at = paths_ptr + n.to(tl.int64)[:, None] * paths_stride + w[None, :]
                before = tl.load(path_at, mask=inside, other=0).to(tl.float32)
                path += decay[None, :] * before
                if tl.program_id(1) == 0:
                    out_at = out_paths_ptr + n.to(tl.int64)[:, None] * width + w[None, :]
                    tl.store(out_at, path, mask=inside)
            inner = state.to(tl.float32) + path
            inner = inner / (1 + tl.exp(-inner))
            down = tl.load(
                down_ptr + r[None, :] * width + w[:, None],
                mask=is_rank[None, :] & (w < width)[:, None],
                other=0,
            )
            term = tl.dot(inner.to(down.dtype), down, term, input_precision="ieee")
    else:
        term_at = tokens_ptr + draft[:, None] * rank + r[None, :]
        term = tl.load(term_at, mask=is_row[:, None] & is_rank[None, :], other=0)
    # Multiply by the weights of these tokens, and add to the logits.
    weight = tl.load(
        weight_ptr + v.to(tl.int64)[None, :] * rank + r[:, None],
        mask=is_token[None, :] & is_rank[:, None],
        other=0,
    )
    added = tl.dot(term.to(weight.dtype), weight, input_precision="ieee")
    at = logits_ptr + n.to(tl.int64)[:, None] * logits_stride + v[None, :]
    inside = is_row[:, None] & is_token[None, :]
    logits = tl.load(at, mask=inside, other=0)
    tl.store(at, (logits.to(tl.float32) + added).to(logits.dtype), mask=inside)


def correct_logits(
    logits_NV: Tensor,
    states_NW: Tensor,
    drafts_N: Tensor,
    tokens_VW: Tensor,
    down_rW: Tensor | None,
    weight_Vr: Tensor,
    paths: Paths | None = None,
) -> None:
    """logits += weight @ down @ silu(states + path), in place, path = tokens[drafts]. One launch.

    With `paths` path = tokens[drafts] + decay * before. In the Markov form, without down,
    logits += weight @ tokens[drafts].

    Args:
        logits_NV: the head's own of a slot, [N, DV], any stride between rows.
        states_NW: of the slot, any stride between rows.
        drafts_N: int64, drafted by the slot before, target ids, any stride.
        tokens_VW, down_rW, weight_Vr: see `DraftCorrection`.
        paths: of a form that sums the tokens of a path.
    """
    num_rows, vocab_size = logits_NV.shape
    rank, width = weight_Vr.shape[1], tokens_VW.shape[1]
    states_NW = tokens_VW if down_rW is None else states_NW  # not read
    assert logits_NV.stride(1) == states_NW.stride(1) == 1, "kernels step over whole rows"
    assert tokens_VW.is_contiguous() and weight_Vr.is_contiguous()
    assert down_rW is None or down_rW.is_contiguous()
    if paths is None:
        before_NW, decay_W, after_NW = states_NW, states_NW, states_NW  # not read
    else:
        before_NW, decay_W, after_NW = paths.before_NW, paths.decay_W, paths.after_NW
        assert before_NW.stride(1) == 1 and after_NW.is_contiguous()
    launch(
        _correct_kernel,
        (triton.cdiv(num_rows, _ROWS), triton.cdiv(vocab_size, _TOKENS)),
        logits_NV,
        logits_NV.stride(0),
        states_NW,
        states_NW.stride(0),
        before_NW,
        before_NW.stride(0),
        decay_W,
        after_NW,
        drafts_N,
        drafts_N.stride(0),
        tokens_VW,
        weight_Vr if down_rW is None else down_rW,
        weight_Vr,
        num_rows,
        len(tokens_VW),
        vocab_size,
        width,
        rank,
        ROWS=_ROWS,
        TOKENS=_TOKENS,
        WIDTH=_WIDTH,
        RANK=max(16, power_of_two(rank)),
        IS_GATED=down_rW is not None,
        HAS_PATHS=paths is not None,
        num_warps=4,
    )
