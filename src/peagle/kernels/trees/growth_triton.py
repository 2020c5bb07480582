"""Candidate trees grown on a card: three launches whatever the number of nodes.

The reference is `peagle.kernels.trees.growth.best_first_trees`; where the head has a
correction, with `DraftCorrection.tree_children`.

Shapes: B sequences, K slots, V draft vocabulary, P parts of it, C candidates of a slot, N nodes of
a tree, W width of the correction's term, r its rank.
"""

from dataclasses import dataclass, fields, replace
from typing import Self

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.launch import launch, power_of_two

CANDIDATES = 64  # C: as many as a tree may have nodes beside each other
_LOGITS_PER_PROGRAM = 2048  # logits of one program


@triton.jit
def _best_of(logit, inside, C: tl.constexpr):
    """Mark the C greatest of the numbers inside; of equal ones the first come first."""
    bits = logit.to(tl.int32, bitcast=True)
    # Numbers from 1 to 2^32 - 1 in the order of the floats.
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64) + 0x80000000
    key = tl.where(inside, key, 0)
    least, bit = tl.cast(0, tl.int64), tl.cast(0x80000000, tl.int64)
    for _ in range(32):
        is_enough = tl.sum((key >= (least | bit)).to(tl.int32), 0) >= C
        least = tl.where(is_enough, least | bit, least)
        bit = bit >> 1
    is_above = key > least
    is_equal = inside & (key == least)
    num_left = C - tl.sum(is_above.to(tl.int32), 0)
    return is_above | (is_equal & (tl.cumsum(is_equal.to(tl.int32), 0) <= num_left))


@triton.jit
def _store_best(is_best, logit, token, logits_ptr, tokens_ptr, C: tl.constexpr):
    """Store the C best, in the order in which they stand; -inf where there are fewer."""
    place = tl.cumsum(is_best.to(tl.int32), 0) - 1
    tl.store(logits_ptr + place, logit, mask=is_best)
    tl.store(tokens_ptr + place, token, mask=is_best)
    c = tl.arange(0, C)
    is_missing = c >= tl.sum(is_best.to(tl.int32), 0)
    tl.store(logits_ptr + c, tl.full((C,), -float("inf"), tl.float32), mask=is_missing)
    tl.store(tokens_ptr + c, tl.zeros((C,), tl.int32), mask=is_missing)


@triton.jit
def _best_of_part_kernel(
    logits_ptr,
    stride_sequence,
    stride_slot,
    best_ptr,
    tokens_ptr,
    rest_ptr,
    num_slots,
    vocab_size,
    inverse_temperature,
    PART: tl.constexpr,
    C: tl.constexpr,
):
    """Store the C likeliest tokens of a part, and log sum exp(l / temperature) of its others."""
    row, part = tl.program_id(0), tl.program_id(1)
    at = (row // num_slots).to(tl.int64) * stride_sequence + row % num_slots * stride_slot
    token = part * PART + tl.arange(0, PART)
    inside = token < vocab_size
    logit = tl.load(logits_ptr + at + token, mask=inside, other=0).to(tl.float32)
    logit = tl.where(logit == logit, logit, -float("inf")) * inverse_temperature
    is_best = _best_of(logit, inside, C)
    out = (row * tl.num_programs(1) + part).to(tl.int64)
    _store_best(is_best, logit, token, best_ptr + out * C, tokens_ptr + out * C, C)
    tl.store(rest_ptr + out, _log_sum_exp(logit, inside & (is_best == 0)))


@triton.jit
def _log_sum_exp(x, inside):
    """Return log sum exp of the items inside; a number far below all others if none is inside."""
    x = tl.where(inside, x, -float("inf"))
    most = tl.maximum(tl.max(x, 0), -1e30)
    total = tl.sum(tl.exp(x - most), 0)  # at least 1, or nothing is inside
    return most + tl.log(tl.maximum(total, 1.0))


@triton.jit
def _best_of_slot_kernel(
    best_ptr,
    best_tokens_ptr,
    rest_ptr,
    logits_ptr,
    tokens_ptr,
    others_ptr,
    num_parts,
    PARTS: tl.constexpr,
    C: tl.constexpr,
):
    """Store the C likeliest tokens of a slot, and log sum exp(l / temperature) of all others."""
    row = tl.program_id(0)
    i, p = tl.arange(0, PARTS * C), tl.arange(0, PARTS)
    at = row.to(tl.int64) * num_parts * C + i
    is_in_part = i < num_parts * C
    logit = tl.load(best_ptr + at, mask=is_in_part, other=-float("inf"))
    token = tl.load(best_tokens_ptr + at, mask=is_in_part, other=0)
    is_best = _best_of(logit, is_in_part, C)
    _store_best(is_best, logit, token, logits_ptr + row * C, tokens_ptr + row * C, C)
    left = _log_sum_exp(logit, is_in_part & (is_best == 0))
    rest = tl.load(rest_ptr + row * num_parts + p, mask=p < num_parts, other=-1e30)
    most = tl.maximum(tl.max(rest, 0), left)
    total = tl.sum(tl.exp(rest - most), 0) + tl.exp(left - most)
    tl.store(others_ptr + row, most + tl.log(total))


@triton.jit
def _children(score, added, logits_ptr, others_ptr, slot, inverse_temperature, C: tl.constexpr):
    """Return the scores of the candidates behind a node; -inf where there is none."""
    c = tl.arange(0, C)
    logit = tl.load(logits_ptr + slot * C + c)
    others = tl.load(others_ptr + slot)
    logit = logit + added * inverse_temperature
    most = tl.maximum(tl.maximum(tl.max(logit, 0), others), -1e30)
    total = tl.sum(tl.exp(logit - most), 0) + tl.exp(others - most)
    logprob = logit - (most + tl.log(total))
    # Broken logits stand behind all others, and are candidates all the same.
    return score + tl.where((logprob == logprob) & (logprob > -1e30), logprob, -1e30)


@triton.jit
def _grow_kernel(
    depths_ptr,
    logits_ptr,
    tokens_ptr,
    others_ptr,
    states_ptr,
    stride_states,
    embedded_ptr,
    down_ptr,
    weight_ptr,
    d2t_ptr,
    which_ptr,
    scores_ptr,
    out_tokens_ptr,
    out_parents_ptr,
    out_scores_ptr,
    num_slots,
    num_roots,
    num_candidates,
    inverse_temperature,
    num_ids,
    vocab_size,
    width,
    rank,
    N: tl.constexpr,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    RANK: tl.constexpr,
    IS_CORRECTED: tl.constexpr,
    HAS_MAP: tl.constexpr,
    HAS_CHOICE: tl.constexpr,
):
    """Grow the tree of one sequence: N times, add the best child that any row does not have yet.

    `scores` holds, for every row, the scores of its children that are not in the tree yet.
    """
    b = tl.program_id(0)
    depth = tl.load(depths_ptr + b)
    first_slot = b * num_slots
    c, row = tl.arange(0, C), tl.arange(0, ROWS)
    scores_ptr += b.to(tl.int64) * ROWS * C
    if HAS_CHOICE:
        which = tl.load(which_ptr + b)
        embedded_ptr += which * num_ids * width
        down_ptr += which * rank * width
        weight_ptr += which * vocab_size * rank
    if IS_CORRECTED:
        r, w = tl.arange(0, RANK), tl.arange(0, WIDTH)
        down_inside = (r < rank)[:, None] & (w < width)[None, :]
        down = tl.load(down_ptr + r[:, None] * width + w[None, :], mask=down_inside, other=0)
        down = down.to(tl.float32)
    # Score the children of the root.
    nothing = tl.zeros((C,), dtype=tl.float32)
    children = _children(0.0, nothing, logits_ptr, others_ptr, first_slot, inverse_temperature, C=C)
    children = tl.where((c < num_candidates) & (depth > 0), children, -float("inf"))
    tl.store(scores_ptr + c, children)
    # Of each row: the score of its best child that is not in the tree, and its depth.
    front = tl.where(row == 0, tl.max(children, 0), -float("inf"))
    depths = tl.zeros((ROWS,), dtype=tl.int32)
    num_left = num_roots + tl.cast(0, tl.int32)  # a 1 is a constant otherwise
    for n in range(N):
        tl.debug_barrier()
        # Find the best child that is left.
        best = tl.max(front, 0)
        parent = tl.min(tl.where(front == best, row, ROWS - 1), 0)
        above = tl.sum(tl.where(row == parent, depths, 0), 0)
        children = tl.load(scores_ptr + parent * C + c)
        at = tl.min(tl.where(children == best, c, C - 1), 0)
        slot = first_slot + tl.minimum(above, num_slots - 1)
        token = tl.load(tokens_ptr + slot * C + at)
        # Store it as node n.
        tl.store(out_tokens_ptr + b * N + n, token.to(tl.int64))
        tl.store(out_parents_ptr + b * N + n, parent.to(tl.int64))
        tl.store(out_scores_ptr + b * N + n, best)
        # Take it off its parent's children.
        children = tl.where(c == at, -float("inf"), children)
        tl.store(scores_ptr + parent * C + c, children)
        num_left -= (parent == 0).to(tl.int32)
        next_best = tl.where((parent > 0) | (num_left > 0), tl.max(children, 0), -float("inf"))
        front = tl.where(row == parent, next_best, front)
        # Score its own children.
        own_depth = above + 1
        depths = tl.where(row == n + 1, own_depth, depths)
        if (own_depth < depth) & (best > -float("inf")):
            added = tl.zeros((C,), dtype=tl.float32)
            slot = first_slot + own_depth
            if IS_CORRECTED:
                target_id = token.to(tl.int64)
                if HAS_MAP:
                    target_id += tl.load(d2t_ptr + token)
                state_at = states_ptr + slot.to(tl.int64) * stride_states + w
                state = tl.load(state_at, mask=w < width, other=0).to(tl.float32)
                embedded_at = embedded_ptr + target_id * width + w
                embedded = tl.load(embedded_at, mask=w < width, other=0).to(tl.float32)
                inner = state + embedded
                inner = inner / (1 + tl.exp(-inner))
                term = tl.sum(down * inner[None, :], 1)
                candidate = tl.load(tokens_ptr + slot * C + c).to(tl.int64)
                weight_at = weight_ptr + candidate[:, None] * rank + r[None, :]
                weight = tl.load(weight_at, mask=(r < rank)[None, :], other=0).to(tl.float32)
                added = tl.sum(weight * term[None, :], 1)
            children = _children(
                best, added, logits_ptr, others_ptr, slot, inverse_temperature, C=C
            )
            children = tl.where(c < num_candidates, children, -float("inf"))
            tl.store(scores_ptr + (n + 1) * C + c, children)
            front = tl.where(row == n + 1, tl.max(children, 0), front)


def _part_size(vocab_size: int) -> int:
    return max(CANDIDATES, power_of_two(min(vocab_size, _LOGITS_PER_PROGRAM)))


@dataclass(frozen=True, slots=True)
class GrowthScratch:
    """The buffers between the launches: the best of parts and of slots, the scores of children."""

    best_RPC: Tensor
    best_tokens_RPC: Tensor
    rest_RP: Tensor
    logits_RC: Tensor
    tokens_RC: Tensor
    others_R: Tensor
    scores_BJC: Tensor

    @classmethod
    def allocate(
        cls, num_seqs: int, num_slots: int, max_nodes: int, vocab_size: int, device: torch.device
    ) -> Self:
        """Allocate buffers for B sequences of K slots each; R is B * K."""
        rows, parts = num_seqs * num_slots, triton.cdiv(vocab_size, _part_size(vocab_size))
        floats = {"dtype": torch.float32, "device": device}
        return cls(
            torch.zeros((rows, parts, CANDIDATES), **floats),
            torch.zeros((rows, parts, CANDIDATES), dtype=torch.int32, device=device),
            torch.zeros((rows, parts), **floats),
            torch.zeros((rows, CANDIDATES), **floats),
            torch.zeros((rows, CANDIDATES), dtype=torch.int32, device=device),
            torch.zeros(rows, **floats),
            torch.zeros((num_seqs, power_of_two(max_nodes + 1), CANDIDATES), **floats),
        )

    def first(self, num_rows: int) -> Self:
        """Return the buffers of the first R slots, for `find_candidates`."""
        return replace(
            self,
            **{
                one.name: getattr(self, one.name)[:num_rows]
                for one in fields(self)
                if one.name != "scores_BJC"
            },
        )


@dataclass(frozen=True, slots=True)
class CorrectionTerm:
    """A correction over the slots of some sequences; see `DraftCorrection`.

    Attributes:
        states_BKW: of the slots.
        tokens_VW, down_rW, weight_Vr: its weights; of several with a first dimension.
        d2t: target id - draft id; None where both vocabularies are one.
        which_B: int64, the number of each sequence's correction; None where there are not several.
    """

    states_BKW: Tensor
    tokens_VW: Tensor
    down_rW: Tensor
    weight_Vr: Tensor
    d2t: Tensor | None
    which_B: Tensor | None = None


def find_candidates(logits_BKV: Tensor, scratch: GrowthScratch, temperature: float) -> None:
    """Find the C likeliest tokens of each slot.

    `scratch` gets their logits / temperature and their ids, in no order, -inf where there are
    fewer, and log sum exp of all other logits / temperature.

    Args:
        logits_BKV: any strides between rows.
        scratch: for so many slots.
    """
    num_seqs, num_slots, vocab_size = logits_BKV.shape
    rows, num_parts, c = scratch.best_RPC.shape
    assert rows == num_seqs * num_slots and logits_BKV.stride(2) == 1
    launch(
        _best_of_part_kernel,
        (rows, num_parts),
        logits_BKV,
        logits_BKV.stride(0),
        logits_BKV.stride(1),
        scratch.best_RPC,
        scratch.best_tokens_RPC,
        scratch.rest_RP,
        num_slots,
        vocab_size,
        1.0 / temperature,
        PART=_part_size(vocab_size),
        C=c,
        num_warps=4,
    )
    launch(
        _best_of_slot_kernel,
        (rows,),
        scratch.best_RPC,
        scratch.best_tokens_RPC,
        scratch.rest_RP,
        scratch.logits_RC,
        scratch.tokens_RC,
        scratch.others_R,
        num_parts,
        PARTS=power_of_two(num_parts),
        C=c,
        num_warps=4 if num_parts <= 32 else 16,
    )


def grow_trees(
    logits_BKV: Tensor,
    depths_B: Tensor,
    term: CorrectionTerm | None,
    scratch: GrowthScratch,
    tokens_BN: Tensor,
    parents_BN: Tensor,
    scores_BN: Tensor,
    *,
    num_parallel_trees: int,
    temperature: float,
) -> None:
    """Grow the trees of `best_first_trees` over the C likeliest tokens of each slot.

    Of two paths of equal score the one whose parent came first is first. Needs no synchronisation
    and allocates nothing, so that a CUDA graph can hold it.

    Args:
        logits_BKV: the head's own, any strides between rows.
        depths_B: int64, most nodes on a path of each sequence, up to K.
        term: the correction of the logits behind each node but the root; None: there is none.
        tokens_BN, parents_BN, scores_BN: int64 and float32, contiguous; take draft ids, parent rows
            and scores.
    """
    num_seqs, num_slots, vocab_size = logits_BKV.shape
    c, max_nodes = scratch.logits_RC.shape[1], tokens_BN.shape[1]
    assert all(x.is_contiguous() for x in (tokens_BN, parents_BN, scores_BN)) and max_nodes < c
    find_candidates(logits_BKV, scratch, temperature)
    rank, width = (0, 0) if term is None else term.down_rW.shape[-2:]
    states_KW = scratch.logits_RC if term is None else term.states_BKW.flatten(0, 1)
    launch(
        _grow_kernel,
        (num_seqs,),
        depths_B,
        scratch.logits_RC,
        scratch.tokens_RC,
        scratch.others_R,
        states_KW,
        states_KW.stride(0),
        scratch.logits_RC if term is None else term.tokens_VW,
        scratch.logits_RC if term is None else term.down_rW,
        scratch.logits_RC if term is None else term.weight_Vr,
        scratch.tokens_RC if term is None or term.d2t is None else term.d2t,
        depths_B if term is None or term.which_B is None else term.which_B,
        scratch.scores_BJC,
        tokens_BN,
        parents_BN,
        scores_BN,
        num_slots,
        min(num_parallel_trees, max_nodes, vocab_size),
        min(c, vocab_size),
        1.0 / temperature,
        0 if term is None else term.tokens_VW.shape[-2],
        vocab_size,
        width,
        rank,
        N=max_nodes,
        C=c,
        ROWS=scratch.scores_BJC.shape[1],
        WIDTH=power_of_two(width),
        RANK=power_of_two(rank),
        IS_CORRECTED=term is not None,
        HAS_MAP=term is not None and term.d2t is not None,
        HAS_CHOICE=term is not None and term.which_B is not None,
        num_warps=1 if term is None else 8,
    )
