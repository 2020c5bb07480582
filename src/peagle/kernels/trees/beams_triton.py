"""Beams and trees of `kernels.trees.beams` on a card: one launch a depth, and one for the tree.

The reference is `BeamTrees`. Of candidates of equal score the one that comes first is taken.

Shapes: B sequences, W beam, C candidates of a node, D depths, X candidates of all depths, N nodes
of a tree.
"""

from dataclasses import dataclass
from typing import Self

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.launch import launch, power_of_two
from peagle.kernels.trees.beams import Beam
from peagle.kernels.trees.growth_triton import GrowthScratch

_AT_ONCE = 16  # candidates that all others are compared with


@triton.jit
def extend_beams_kernel(
    logits_ptr,
    tokens_ptr,
    others_ptr,
    old_scores_ptr,
    old_paths_ptr,
    old_visible_ptr,
    level_scores_ptr,
    level_tokens_ptr,
    level_parents_ptr,
    new_scores_ptr,
    new_tokens_ptr,
    new_behind_ptr,
    new_paths_ptr,
    new_visible_ptr,
    size,
    first,
    depth,
    W: tl.constexpr,
    NODES: tl.constexpr,
    NODE_ROWS: tl.constexpr,
    CHILDREN: tl.constexpr,
    C: tl.constexpr,
    IS_ROOT: tl.constexpr,
):
    """Store the candidates behind the nodes of a beam, and the best of them as the next beam."""
    b = tl.program_id(0).to(tl.int64)
    p, c, k = tl.arange(0, NODE_ROWS), tl.arange(0, C), tl.arange(0, CHILDREN)
    is_node = p < NODES
    # Score the candidates of each node.
    at = (b * NODES + p)[:, None] * C + c[None, :]
    logit = tl.load(logits_ptr + at, mask=is_node[:, None], other=-float("inf"))
    token = tl.load(tokens_ptr + at, mask=is_node[:, None], other=0)
    others = tl.load(others_ptr + b * NODES + p, mask=is_node, other=0)
    most = tl.maximum(tl.maximum(tl.max(logit, 1), others), -1e30)
    total = tl.sum(tl.exp(logit - most[:, None]), 1) + tl.exp(others - most)
    score = logit - (most + tl.log(total))[:, None]
    # Broken logits stand behind all others, and are candidates all the same.
    score = tl.where((score == score) & (score > -1e30), score, -1e30)
    if not IS_ROOT:
        score += tl.load(old_scores_ptr + b * W + p, mask=is_node, other=0)[:, None]
    # Keep the W best behind each node, the best first.
    is_left = is_node[:, None] & (c >= 0)[None, :]
    kept = tl.full((NODE_ROWS, CHILDREN), -float("inf"), tl.float32)
    kept_token = tl.zeros((NODE_ROWS, CHILDREN), tl.int32)
    for child in tl.static_range(W):
        left = tl.where(is_left, score, -float("inf"))
        best = tl.max(left, 1)
        place = tl.min(tl.where(is_left & (left == best[:, None]), c[None, :], C - 1), 1)
        is_best = c[None, :] == place[:, None]
        best_token = tl.sum(tl.where(is_best, token, 0), 1)
        is_child = (k == child)[None, :]
        kept = tl.where(is_child, best[:, None], kept)
        kept_token = tl.where(is_child, best_token[:, None], kept_token)
        is_left = is_left & (is_best == 0)
    # Store them as the candidates of this depth.
    inside = is_node[:, None] & (k < W)[None, :]
    place = p[:, None] * W + k[None, :]
    out = b * size + first + place
    is_broken = kept < -1e29
    tl.store(level_scores_ptr + out, tl.where(is_broken, -float("inf"), kept), mask=inside)
    tl.store(level_tokens_ptr + out, kept_token.to(tl.int64), mask=inside)
    parent = tl.full((NODE_ROWS,), -1, tl.int64)
    if not IS_ROOT:
        parent = tl.load(old_paths_ptr + b * W + p, mask=is_node, other=0)
    parent = parent[:, None] + tl.zeros((NODE_ROWS, CHILDREN), tl.int64)
    tl.store(level_parents_ptr + out, parent, mask=inside)
    # Take the W best of all as the next beam.
    is_left = inside
    for i in tl.static_range(W):
        left = tl.where(is_left, kept, -float("inf"))
        best = tl.max(tl.max(left, 1), 0)
        is_equal = is_left & (left == best)
        found = tl.min(tl.min(tl.where(is_equal, place, NODE_ROWS * CHILDREN), 1), 0)
        is_best = inside & (place == found)
        best_token = tl.sum(tl.sum(tl.where(is_best, kept_token, 0), 1), 0)
        behind = found // W
        visible = tl.cast(0, tl.int64)
        if not IS_ROOT:
            visible = tl.load(old_visible_ptr + b * W + behind)
        else:
            behind = behind * 0
        row = tl.minimum(depth * W + i, 63).to(tl.int64)
        new = b * W + i
        tl.store(new_scores_ptr + new, best)
        tl.store(new_tokens_ptr + new, best_token.to(tl.int64))
        tl.store(new_behind_ptr + new, behind.to(tl.int64))
        tl.store(new_paths_ptr + new, (first + found).to(tl.int64))
        tl.store(new_visible_ptr + new, visible | (tl.cast(1, tl.int64) << row))
        is_left = is_left & (is_best == 0)


@triton.jit
def _scores_within(scores_ptr, x, size, depth, W: tl.constexpr):
    """Load the scores of candidates; those deeper than a tree may be are worth nothing."""
    column = tl.where(x < W, 0, 1 + (x - W) // (W * W))
    return tl.load(scores_ptr + x, mask=(x < size) & (column < depth), other=-float("inf"))


@triton.jit
def rank_candidates_kernel(
    scores_ptr,
    tokens_ptr,
    parents_ptr,
    depths_ptr,
    ranks_ptr,
    out_tokens_ptr,
    out_parents_ptr,
    out_scores_ptr,
    size,
    N: tl.constexpr,
    W: tl.constexpr,
    CANDIDATES: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Store the N best candidates of a sequence as its tree."""
    b = tl.program_id(0).to(tl.int64)
    depth = tl.load(depths_ptr + b)
    scores_ptr += b * size
    x = tl.arange(0, CANDIDATES)
    score = _scores_within(scores_ptr, x, size, depth, W)
    # The rank of a candidate is the number of those before it.
    rank = tl.zeros((CANDIDATES,), tl.int32)
    for first in range(0, CANDIDATES, AT_ONCE):
        y = first + tl.arange(0, AT_ONCE)
        other = _scores_within(scores_ptr, y, size, depth, W)
        is_equal = (other[None, :] == score[:, None]) & (y[None, :] < x[:, None])
        is_before = (other[None, :] > score[:, None]) | is_equal
        rank += tl.sum(is_before.to(tl.int32), 1)
    tl.store(ranks_ptr + b * CANDIDATES + x, rank)
    tl.debug_barrier()
    parent = tl.load(parents_ptr + b * size + x, mask=x < size, other=-1)
    above = tl.load(ranks_ptr + b * CANDIDATES + tl.maximum(parent, 0))
    token = tl.load(tokens_ptr + b * size + x, mask=x < size, other=0)
    out = b * N + rank
    tl.store(out_tokens_ptr + out, token, mask=rank < N)
    tl.store(out_parents_ptr + out, tl.where(parent < 0, 0, above + 1).to(tl.int64), mask=rank < N)
    tl.store(out_scores_ptr + out, score, mask=rank < N)


@dataclass(frozen=True, slots=True)
class BeamBuffers:
    """The candidates of all depths, the beams of each depth, and the trees.

    Attributes:
        scores_BX, tokens_BX, parents_BX: as `kernels.trees.growth.rank_paths` takes them, depth
            after depth.
        beam_scores_DBW: scores of the paths to the nodes of beams.
        beams_DFBW: int64; F is tokens, places of parents, places among the candidates and visible
            rows, see `Beam`.
        ranks_BX: takes the place of each candidate in its tree.
        nodes_2BN, node_scores_BN: take draft ids and parent rows, and scores.
    """

    scores_BX: Tensor
    tokens_BX: Tensor
    parents_BX: Tensor
    beam_scores_DBW: Tensor
    beams_DFBW: Tensor
    ranks_BX: Tensor
    nodes_2BN: Tensor
    node_scores_BN: Tensor

    @classmethod
    def allocate(
        cls, num_seqs: int, beam: int, depth: int, max_nodes: int, device: torch.device
    ) -> Self:
        """Allocate buffers for B sequences, and D depths of beams of W nodes."""
        size = _first_of(depth, beam)
        floats = {"dtype": torch.float32, "device": device}
        ints = {"dtype": torch.int64, "device": device}
        ranks = num_seqs, power_of_two(max(size, max_nodes, _AT_ONCE))
        return cls(
            torch.zeros((num_seqs, size), **floats),
            torch.zeros((num_seqs, size), **ints),
            torch.zeros((num_seqs, size), **ints),
            torch.zeros((depth, num_seqs, beam), **floats),
            torch.zeros((depth, 4, num_seqs, beam), **ints),
            torch.zeros(ranks, dtype=torch.int32, device=device),
            torch.zeros((2, num_seqs, max_nodes), **ints),
            torch.zeros((num_seqs, max_nodes), **floats),
        )

    def beam(self, depth: int) -> Beam:
        """Return the beam of a depth, 0 the first."""
        tokens_BW, behind_BW, paths_BW, visible_BW = self.beams_DFBW[depth]
        return Beam(tokens_BW, self.beam_scores_DBW[depth], behind_BW, paths_BW, visible_BW)


def _first_of(depth: int, beam: int) -> int:
    """Return the place of the first candidate of a depth among those of all depths."""
    return beam + (depth - 1) * beam**2 if depth else 0


def extend_beams(found: GrowthScratch, buffers: BeamBuffers, depth: int) -> Beam:
    """Return the beam of a depth, 0 the first; its candidates are stored. One launch.

    Args:
        found: what `find_candidates` found behind the newest token of each sequence or, below the
            first depth, behind each node of the beam before.
        buffers: with the beam before.
    """
    num_seqs, size = buffers.scores_BX.shape
    width = buffers.beam_scores_DBW.shape[2]
    nodes = width if depth else 1
    assert len(found.logits_RC) == num_seqs * nodes
    old, new = buffers.beam(max(depth - 1, 0)), buffers.beam(depth)
    launch(
        extend_beams_kernel,
        (num_seqs,),
        found.logits_RC,
        found.tokens_RC,
        found.others_R,
        old.scores_BW,
        old.paths_BW,
        old.visible_BW,
        buffers.scores_BX,
        buffers.tokens_BX,
        buffers.parents_BX,
        new.scores_BW,
        new.tokens_BW,
        new.behind_BW,
        new.paths_BW,
        new.visible_BW,
        size,
        _first_of(depth, width),
        depth,
        W=width,
        NODES=nodes,
        NODE_ROWS=power_of_two(nodes),
        CHILDREN=power_of_two(width),
        C=found.logits_RC.shape[1],
        IS_ROOT=not depth,
        num_warps=1 if nodes * width <= 16 else 4,
    )
    return new


def rank_candidates(buffers: BeamBuffers, depths_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return draft id, parent row and score of each node, as `BeamTrees.best` does. One launch.

    Args:
        depths_B: int64, most nodes on a path of each sequence.
    """
    num_seqs, max_nodes = buffers.node_scores_BN.shape
    tokens_BN, parents_BN = buffers.nodes_2BN
    launch(
        rank_candidates_kernel,
        (num_seqs,),
        buffers.scores_BX,
        buffers.tokens_BX,
        buffers.parents_BX,
        depths_B,
        buffers.ranks_BX,
        tokens_BN,
        parents_BN,
        buffers.node_scores_BN,
        buffers.scores_BX.shape[1],
        N=max_nodes,
        W=buffers.beam_scores_DBW.shape[2],
        CANDIDATES=buffers.ranks_BX.shape[1],
        AT_ONCE=_AT_ONCE,
        num_warps=4 if buffers.ranks_BX.shape[1] <= 128 else 8,
    )
    return tokens_BN, parents_BN, buffers.node_scores_BN
