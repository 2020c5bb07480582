"""Copies found and joined to trees on a card: three launches whatever the number of nodes.

The reference is `peagle.kernels.trees.copies`. The search compares every place of the text, not the
latest of a run alone.

Shapes: B sequences, L most tokens of a text, N nodes of a tree, M rows of it whose paths are looked
for, S tokens of a copy, X nodes of a tree and of all copies, D depths, C cells.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.launch import launch, power_of_two
from peagle.kernels.trees.copies import MAX_COPIED, NO_COPY, NUM_LENGTHS
from peagle.kernels.trees.survival import MAX_LOGIT, MIN_SCORE, SCORE_UNIT

# A program of the search is one warp, so that it can end early while others still compare.
_PLACES = 128  # that it compares at a time
_PROGRAMS = 64  # of a sequence
_STEPS = 2  # tokens that are compared before it looks whether any place still matches
_CHUNK = 16  # nodes that all others are compared with at a time


@triton.jit
def _find_kernel(
    text_ptr,
    stride_text,
    first_positions_ptr,
    has_copies_ptr,
    num_predicted_ptr,
    depths_ptr,
    num_nodes_ptr,
    tokens_ptr,
    parents_ptr,
    found_ptr,
    num_rows,
    shortest,
    width,
    N: tl.constexpr,
    M: tl.constexpr,
    PLACES: tl.constexpr,
    STEPS: tl.constexpr,
    LONGEST: tl.constexpr,
):
    """Raise each row's best match, length * 2^32 + rank of its place, to the best of some places.

    The rank in the text is the place behind the match. In the prediction it is above all of these,
    and 2 * width less the last place of the match, so that the first counts.
    """
    b = tl.program_id(0)
    depth_of_tree = tl.load(depths_ptr + b)
    has_copies = (tl.load(has_copies_ptr + b) != 0) & (depth_of_tree > 0)
    length_of_text = tl.where(has_copies, tl.load(first_positions_ptr + b).to(tl.int32) + 1, 0)
    num_nodes = tl.load(num_nodes_ptr + depth_of_tree).to(tl.int32)
    text_ptr += b.to(tl.int64) * stride_text
    m = tl.arange(0, M)
    is_row = (m < num_rows) & (m <= num_nodes)
    # A prediction stands at the end of the row, as far as the text does not reach.
    predicted = tl.load(num_predicted_ptr + b).to(tl.int32)
    predicted_from = tl.maximum(width - tl.where(has_copies, predicted, 0), length_of_text)
    num_of_text = (tl.maximum(length_of_text - 1, 0) + PLACES - 1) // PLACES
    num_predicted = (tl.maximum(width - 1 - predicted_from, 0) + PLACES - 1) // PLACES
    for part in range(tl.program_id(1), num_of_text + num_predicted, tl.num_programs(1)):
        in_text = part < num_of_text
        first = tl.where(in_text, 0, predicted_from)
        last = tl.where(in_text, length_of_text, width) - 1
        at = first + tl.where(in_text, part, part - num_of_text) * PLACES + tl.arange(0, PLACES)
        matches = is_row[:, None] & (at < last)[None, :]
        lengths = tl.zeros((M, PLACES), tl.int32)
        # Walk back from each row to the root, and on into the text, while any place matches.
        row, place = m, tl.full((M,), 0, tl.int32) + length_of_text - 1
        back, num_matches = 0, 1
        while (back < LONGEST) & (num_matches > 0):
            for _ in tl.static_range(STEPS):
                is_node = (row > 0) & is_row
                node = b * N + tl.maximum(row - 1, 0)
                drafted = tl.load(tokens_ptr + node, mask=is_node, other=0).to(tl.int32)
                parent = tl.load(parents_ptr + node, mask=is_node, other=0).to(tl.int32)
                written = tl.load(text_ptr + place, mask=(is_node == 0) & (place >= 0), other=-1)
                end = tl.where(is_node, drafted, written)
                shifted = tl.load(
                    text_ptr + at - back, mask=(at - back >= first) & (at < last), other=-2
                )
                matches = matches & (shifted[None, :] == end[:, None]) & (back < LONGEST)
                lengths += matches.to(tl.int32)
                place = tl.where(is_node, place, place - 1)
                row = tl.where(is_node, parent, 0)
                back += 1
            num_matches = tl.sum(tl.sum(matches.to(tl.int32), 1), 0)
        ranks = tl.where(in_text, at + 1, 2 * width - at)
        keys = lengths.to(tl.int64) * 4294967296 + ranks[None, :]
        best = tl.max(tl.where(lengths >= shortest, keys, 0), 1)
        tl.atomic_max(found_ptr + b * M + m, best, mask=best > 0)


@triton.jit
def _class_of(length):
    """Return the class of a match's length, see `copies.rate_cell`."""
    least_3_4 = (length >= 3).to(tl.int32) + (length >= 4).to(tl.int32)
    return least_3_4 + (length >= 6).to(tl.int32) + (length >= 9) + (length >= 16)


@triton.jit
def _order_of(place, ROWS: tl.constexpr, N: tl.constexpr, S: tl.constexpr):
    """Return the number of the node at a place, if all nodes of a copy follow each other."""
    copied = tl.maximum(place - N, 0)
    return tl.where(place < N, place, N + copied % ROWS * S + copied // ROWS)


@triton.jit
def _place_of(order, ROWS: tl.constexpr, N: tl.constexpr, S: tl.constexpr):
    """Return the place of a node by its number, see `_order_of`."""
    copied = tl.maximum(order - N, 0)
    return tl.where(order < N, order, N + copied % S * ROWS + copied // S)


@triton.jit
def _rounded(value):
    """Return the nearest whole number, of two the even one."""
    above = tl.floor(value + 0.5)
    is_odd_tie = (above == value + 0.5) & (tl.floor(above * 0.5) * 2 != above)
    return (above - is_odd_tie.to(tl.float32)).to(tl.int64)


@triton.jit
def _room_of(first_position, depth_of_tree, max_len, N: tl.constexpr):
    """Return how many nodes a tree may have: as many as have KV slots."""
    room = tl.minimum(tl.maximum(max_len - 1 - first_position, 0), N).to(tl.int32)
    return tl.where(depth_of_tree > 0, room, 0)


@triton.jit
def _path_of(above, own):
    """Return a number of a path, from that of the path above its last node and that of the node."""
    return (above ^ (above >> 29)) * 6364136223846793005 + own


@triton.jit
def _walk_kernel(
    text_ptr,
    stride_text,
    first_positions_ptr,
    depths_ptr,
    num_nodes_ptr,
    tokens_ptr,
    parents_ptr,
    scores_ptr,
    found_ptr,
    weights_ptr,
    rates_ptr,
    paths_ptr,
    worths_ptr,
    copied_ptr,
    cells_ptr,
    steps_ptr,
    depth,
    width,
    max_len,
    N: tl.constexpr,
    NODES: tl.constexpr,
    M: tl.constexpr,
    ROWS: tl.constexpr,
    S: tl.constexpr,
    X: tl.constexpr,
    NUM_LENGTHS: tl.constexpr,
    NO_COPY: tl.constexpr,
    MAX_LOGIT: tl.constexpr,
):
    """Find path, worth and cell of each node of one sequence's tree, and of its copies."""
    b = tl.program_id(0)
    n, m = tl.arange(0, NODES), tl.arange(0, M)
    text_ptr += b.to(tl.int64) * stride_text
    length_of_text = tl.load(first_positions_ptr + b).to(tl.int32) + 1
    depth_of_tree = tl.load(depths_ptr + b)
    num_nodes = tl.load(num_nodes_ptr + depth_of_tree).to(tl.int32)
    room = _room_of(length_of_text - 1, depth_of_tree, max_len, N)
    is_node = n < num_nodes
    token = tl.load(tokens_ptr + b * N + n, mask=is_node, other=-1).to(tl.int64)
    parent = tl.load(parents_ptr + b * N + n, mask=is_node, other=0).to(tl.int32)
    score = tl.load(scores_ptr + b * N + n, mask=is_node, other=0)
    # Find depth, path and worth of the head's nodes.
    above, has_parent = tl.maximum(parent - 1, 0), parent > 0
    level = tl.zeros((NODES,), tl.int32) + 1
    path = (token + 1) * -7046029254386353131 + 1442695040888963407
    root_path = path
    for _ in range(depth - 1):
        level = tl.where(has_parent, tl.gather(level, above, 0) + 1, 1)
        path = tl.where(has_parent, _path_of(tl.gather(path, above, 0), root_path), root_path)
    score = tl.minimum(tl.where(score == score, score, -MAX_LOGIT - 1), -1e-9)
    score = tl.maximum(score, -MAX_LOGIT - 1)
    logit = score - tl.log(tl.where(score > -1e-4, -score, 1 - tl.exp(score)))
    logit = tl.minimum(tl.maximum(logit, -MAX_LOGIT), MAX_LOGIT)
    weight_at = weights_ptr + (tl.minimum(level, depth) - 1) * 2
    logit = tl.load(weight_at) * logit + tl.load(weight_at + 1)
    worth = tl.where(is_node, 1 / (1 + tl.exp(-logit)), -1.0)
    own_worth = worth
    for _ in range(depth - 1):
        least_above = tl.minimum(own_worth, tl.gather(worth, above, 0))
        worth = tl.where(has_parent, least_above, own_worth)
    is_sibling = (parent[:, None] == parent[None, :]) & (n[None, :] < n[:, None])
    is_likeliest = 1 - tl.max((is_sibling & is_node[None, :]).to(tl.int32), 1)
    base = b * X
    tl.store(paths_ptr + base + n, path, mask=is_node)
    tl.store(worths_ptr + base + n, worth, mask=n < N)
    tl.store(copied_ptr + base + n, token, mask=is_node)
    tl.store(cells_ptr + base + n, tl.full((NODES,), NO_COPY, tl.int32), mask=n < N)
    # A copy ends where its tokens are worth less than enough nodes of the tree.
    behind = tl.sum((is_node[None, :] & (worth[None, :] >= worth[:, None])).to(tl.int32), 1)
    least = tl.max(tl.where(is_node & (behind >= room), worth, 0.0), 0)
    # Walk along all copies together.
    found = tl.load(found_ptr + b * M + m, mask=m < ROWS, other=0)
    length, rank = (found >> 32).to(tl.int32), (found & 0xFFFFFFFF).to(tl.int32)
    start = tl.where(rank > width, 2 * width - rank + 1, rank)
    left = tl.maximum(tl.where(rank > width, width, length_of_text) - start, 1)
    row, base_node = m, tl.minimum(tl.maximum(m - 1, 0), NODES - 1)
    copy_worth = tl.where(m == 0, 1.0, tl.gather(worth, base_node, 0))
    copy_path = tl.gather(path, base_node, 0)
    is_open = (length > 0) & (m < ROWS)
    has_path = m > 0
    s, num_open = 0, tl.sum(is_open.to(tl.int32), 0)
    while (s < S) & (num_open > 0):
        copied = tl.load(text_ptr + start + s % left, mask=is_open, other=0).to(tl.int64)
        is_child = (parent[:, None] == row[None, :]) & (token[:, None] == copied[None, :])
        child = tl.max(tl.where(is_child & is_node[:, None], n[:, None] + 1, 0), 0)
        node = tl.maximum(child - 1, 0)
        drafted = tl.where(child > 0, 1 + tl.gather(is_likeliest, node, 0), 0)
        cell = drafted * NUM_LENGTHS + _class_of(length + s)
        copy_worth *= tl.load(rates_ptr + cell)
        of_head = tl.where(child > 0, tl.gather(worth, node, 0), 0.0)
        copy_worth = tl.maximum(copy_worth, of_head)
        own = (copied + 1) * -7046029254386353131 + 1442695040888963407
        copy_path = tl.where(has_path, _path_of(copy_path, own), own)
        has_path = m >= 0
        is_open = is_open & (copy_worth > least)
        at = base + N + s * ROWS + m
        tl.store(paths_ptr + at, copy_path, mask=m < ROWS)
        tl.store(worths_ptr + at, tl.where(is_open, copy_worth, -1.0), mask=m < ROWS)
        tl.store(copied_ptr + at, copied, mask=m < ROWS)
        tl.store(cells_ptr + at, cell, mask=m < ROWS)
        row = tl.where(child > 0, child, -1)
        s, num_open = s + 1, tl.sum(is_open.to(tl.int32), 0)
    tl.store(steps_ptr + b, s)
    tl.store(found_ptr + b * M + m, tl.zeros((M,), tl.int64))


@triton.jit
def _join_kernel(
    first_positions_ptr,
    depths_ptr,
    parents_ptr,
    scores_ptr,
    paths_ptr,
    worths_ptr,
    copied_ptr,
    cells_ptr,
    steps_ptr,
    firsts_ptr,
    ranks_ptr,
    out_tokens_ptr,
    stride_tokens,
    out_parents_ptr,
    out_scores_ptr,
    out_worths_ptr,
    out_cells_ptr,
    stride_nodes,
    max_len,
    N: tl.constexpr,
    NODES: tl.constexpr,
    ROWS: tl.constexpr,
    S: tl.constexpr,
    X: tl.constexpr,
    CHUNK: tl.constexpr,
    LAST: tl.constexpr,
    NO_COPY: tl.constexpr,
    MIN_SCORE: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Write the nodes of one sequence that are worth most, of its tree and its copies."""
    b = tl.program_id(0)
    n, x = tl.arange(0, NODES), tl.arange(0, X)
    base, s = b * X, tl.load(steps_ptr + b)
    room = _room_of(tl.load(first_positions_ptr + b), tl.load(depths_ptr + b), max_len, N)
    # Let the first of the nodes of one path stand for all, with the worth of the best copy. Nodes
    # of copies lie step by step, but count one copy after the other.
    num_all = N + s * ROWS
    order = _order_of(x, ROWS, N, S)
    is_any = x < num_all
    own_path = tl.load(paths_ptr + base + x, mask=is_any, other=0)
    x_worth = tl.load(worths_ptr + base + x, mask=is_any, other=-1.0)
    x_cell = tl.load(cells_ptr + base + x, mask=is_any, other=NO_COPY)
    best_worth, first = x_worth, order
    is_any = is_any & (x_worth > 0)
    tl.debug_barrier()
    best_order = tl.where(x_cell == NO_COPY, LAST, order)
    # A thread has a column of each tile: what is reduced along it stays in registers.
    for c in range(0, num_all, CHUNK):
        y = c + tl.arange(0, CHUNK)
        y_order = _order_of(y, ROWS, N, S)
        y_worth = tl.load(worths_ptr + base + y, mask=y < num_all, other=-1.0)
        y_path = tl.load(paths_ptr + base + y, mask=y < num_all, other=0)
        y_cell = tl.load(cells_ptr + base + y, mask=y < num_all, other=NO_COPY)
        same = (own_path[None, :] == y_path[:, None]) & (y_worth > 0)[:, None] & is_any[None, :]
        first = tl.minimum(first, tl.min(tl.where(same, y_order[:, None], LAST), 0))
        is_copy = same & (y_cell != NO_COPY)[:, None]
        worth = tl.max(tl.where(is_copy, y_worth[:, None], -1.0), 0)
        is_best = is_copy & (y_worth[:, None] == worth[None, :])
        at = tl.min(tl.where(is_best, y_order[:, None], LAST), 0)
        is_equal = (worth == best_worth) & (at < best_order)
        is_better = (worth > 0) & ((best_order == LAST) | (worth > best_worth) | is_equal)
        best_worth = tl.where(is_better, worth, best_worth)
        best_order = tl.where(is_better, at, best_order)
    best_place = _place_of(tl.minimum(best_order, LAST - 1), ROWS, N, S)
    is_copied = is_any & (best_order < LAST)
    best_cell = tl.load(cells_ptr + base + best_place, mask=is_copied, other=NO_COPY)
    is_first = is_any & (first == order)
    tl.debug_barrier()
    tl.store(worths_ptr + base + x, tl.where(is_first, best_worth, -1.0))
    tl.store(firsts_ptr + base + x, _place_of(first, ROWS, N, S))
    tl.debug_barrier()
    rank = tl.zeros((X,), tl.int32)
    for c in range(0, num_all, CHUNK):
        y = c + tl.arange(0, CHUNK)
        y_order = _order_of(y, ROWS, N, S)
        y_worth = tl.load(worths_ptr + base + y, mask=y < num_all, other=-1.0)[:, None]
        is_before = (y_worth == best_worth[None, :]) & (y_order[:, None] < order[None, :])
        is_before = (is_before | (y_worth > best_worth[None, :])) & (y_worth > 0)
        rank += tl.sum(is_before.to(tl.int32), 0)
    tl.store(ranks_ptr + base + x, rank)
    tl.debug_barrier()
    # Write the nodes that are worth most.
    count = tl.minimum(tl.sum(is_first.to(tl.int32), 0), room)
    is_taken = is_first & (rank < count)
    of_tree = x < N
    in_tree = tl.load(parents_ptr + b * N + x, mask=of_tree & is_taken, other=0).to(tl.int32) - 1
    # The first node of a copy stands behind a row of the tree.
    behind_copy = tl.where(x < N + ROWS, x - N - 1, x - ROWS)
    parent_at = tl.where(of_tree, in_tree, behind_copy)
    has_parent = is_taken & (parent_at >= 0)
    parent_first = tl.load(firsts_ptr + base + parent_at, mask=has_parent, other=0)
    parent_rank = tl.load(ranks_ptr + base + parent_first, mask=has_parent, other=-1)
    own_score = tl.load(scores_ptr + b * N + x, mask=of_tree & is_taken, other=0)
    own_score = tl.where(of_tree, own_score, tl.log(tl.maximum(best_worth, 1e-30)))
    own_score = tl.where(own_score == own_score, own_score, MIN_SCORE)
    score_units = _rounded(tl.maximum(own_score, MIN_SCORE) / UNIT)
    out_tokens_ptr += b * stride_tokens
    base_out = b * stride_nodes
    out = base_out + rank
    tl.store(out_tokens_ptr + rank, tl.load(copied_ptr + base + x, mask=is_taken), mask=is_taken)
    tl.store(out_parents_ptr + out, (parent_rank + 1).to(tl.int64), mask=is_taken)
    tl.store(out_scores_ptr + out, score_units, mask=is_taken)
    tl.store(out_worths_ptr + out, _rounded(best_worth / UNIT), mask=is_taken)
    tl.store(out_cells_ptr + out, best_cell.to(tl.int64), mask=is_taken)
    is_empty, zeros = (n >= count) & (n < N), tl.zeros((NODES,), tl.int64)
    tl.store(out_tokens_ptr + n, zeros, mask=is_empty)
    tl.store(out_parents_ptr + base_out + n, zeros, mask=is_empty)
    tl.store(out_scores_ptr + base_out + n, zeros, mask=is_empty)
    tl.store(out_worths_ptr + base_out + n, zeros, mask=is_empty)
    tl.store(out_cells_ptr + base_out + n, zeros + NO_COPY, mask=is_empty)
    tl.store(depths_ptr + b, count.to(tl.int64))


@dataclass(frozen=True, slots=True)
class CopyScratch:
    """The buffers of the three launches.

    Attributes:
        found_BM: best match of each row; 0 between launches.
        paths_BX, worths_BX, tokens_BX, cells_BX, firsts_BX, ranks_BX: of each node, those of copies
            step by step: number of its path, worth, token, cell, place of the first node of its
            path, and how many are worth more.
        steps_B: how many tokens of the copies were looked at.
    """

    found_BM: Tensor
    paths_BX: Tensor
    worths_BX: Tensor
    tokens_BX: Tensor
    cells_BX: Tensor
    firsts_BX: Tensor
    ranks_BX: Tensor
    steps_B: Tensor
    num_rows: int

    @classmethod
    def allocate(
        cls, num_seqs: int, max_nodes: int, num_rows: int, device: torch.device | str
    ) -> CopyScratch:
        """Allocate buffers for B trees of N nodes, of which `num_rows` rows are looked for."""
        width = power_of_two(max_nodes + num_rows * min(MAX_COPIED, max_nodes))
        rows = num_seqs, width

        def zeros(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            zeros((num_seqs, power_of_two(num_rows)), torch.int64),
            zeros(rows, torch.int64),
            zeros(rows, torch.float32),
            zeros(rows, torch.int64),
            *(zeros(rows, torch.int32) for _ in range(3)),
            torch.zeros(num_seqs, dtype=torch.int32, device=device),
            num_rows,
        )

    def first(self, num_seqs: int) -> CopyScratch:
        """Return the buffers of the first trees; steps that follow each other share them."""
        tensors = (getattr(self, one.name) for one in fields(self) if one.name != "num_rows")
        return CopyScratch(*(tensor[:num_seqs] for tensor in tensors), self.num_rows)


@dataclass(frozen=True, slots=True)
class JoinedTrees:
    """The trees of a step's rows, each part int64 [B, N]; any stride between rows.

    Attributes:
        tokens_BN, parents_BN: token and parent's row of each node; 0 behind the last.
        scores_BN, worths_BN: score and worth in units of `SCORE_UNIT`; 0 behind the last.
        cells_BN: which rate a copied node had; NO_COPY for the others.
    """

    tokens_BN: Tensor
    parents_BN: Tensor
    scores_BN: Tensor
    worths_BN: Tensor
    cells_BN: Tensor


@dataclass(frozen=True, slots=True)
class Texts:
    """The texts of a step's rows.

    Attributes:
        tokens_BL: int32, the tokens of each sequence, the newest included, and at the row's end its
            prediction, whose beginning the text may overwrite; any stride between rows.
        first_positions_B: int64, the place of the newest.
        has_copies_B: int64, 1 where copies may join the tree, else 0.
        num_predicted_B: int64, the tokens of each prediction.
    """

    tokens_BL: Tensor
    first_positions_B: Tensor
    has_copies_B: Tensor
    num_predicted_B: Tensor


@dataclass(frozen=True, slots=True)
class HeadTrees:
    """The trees of a head, as `grow_trees` leaves them, and their sizes.

    Attributes:
        tokens_BN, parents_BN, scores_BN: contiguous.
        depths_B: int64, most nodes on a path of each; 0 without a tree.
        num_nodes_K: int64, the nodes of a tree of each depth.
    """

    tokens_BN: Tensor
    parents_BN: Tensor
    scores_BN: Tensor
    depths_B: Tensor
    num_nodes_K: Tensor


def find_copies(
    texts: Texts, trees: HeadTrees, scratch: CopyScratch, lengths: tuple[int, int]
) -> None:
    """Raise `scratch.found_BM` to the best match of each path; see `join_found_copies`."""
    num_seqs, max_nodes = trees.tokens_BN.shape
    rows, max_len = scratch.num_rows, texts.tokens_BL.shape[1]
    launch(
        _find_kernel,
        (num_seqs, min(_PROGRAMS, triton.cdiv(max_len, _PLACES))),
        texts.tokens_BL,
        texts.tokens_BL.stride(0),
        texts.first_positions_B,
        texts.has_copies_B,
        texts.num_predicted_B,
        trees.depths_B,
        trees.num_nodes_K,
        trees.tokens_BN,
        trees.parents_BN,
        scratch.found_BM,
        rows,
        lengths[1],
        max_len,
        N=max_nodes,
        M=power_of_two(rows),
        PLACES=min(_PLACES, power_of_two(max_len)),
        STEPS=_STEPS,
        LONGEST=lengths[0],
        num_warps=1,
    )


def join_found_copies(
    texts: Texts,
    trees: HeadTrees,
    weights_D2: Tensor,
    rates_C: Tensor,
    scratch: CopyScratch,
    out: JoinedTrees,
    *,
    lengths: tuple[int, int],
    max_model_len: int,
) -> None:
    """Find the copies of each text and join them to its tree, as `trees.copies` does.

    A tree has as many nodes as have KV slots. `trees.depths_B` takes the number of nodes of each.
    Needs no synchronisation and allocates nothing, so that a CUDA graph can hold it.

    Args:
        weights_D2: of `Survival`.
        rates_C: float32, the rate of each cell.
        lengths: the most tokens that are compared, at most MAX_MATCH, and the fewest that are a
            match.
        max_model_len: no node has a slot from here on.
    """
    find_copies(texts, trees, scratch, lengths)
    num_seqs, max_nodes = trees.tokens_BN.shape
    rows = scratch.num_rows
    copied = min(MAX_COPIED, max_nodes)
    launch(
        _walk_kernel,
        (num_seqs,),
        texts.tokens_BL,
        texts.tokens_BL.stride(0),
        texts.first_positions_B,
        trees.depths_B,
        trees.num_nodes_K,
        trees.tokens_BN,
        trees.parents_BN,
        trees.scores_BN,
        scratch.found_BM,
        weights_D2,
        rates_C,
        scratch.paths_BX,
        scratch.worths_BX,
        scratch.tokens_BX,
        scratch.cells_BX,
        scratch.steps_B,
        len(weights_D2),
        texts.tokens_BL.shape[1],
        max_model_len,
        N=max_nodes,
        NODES=power_of_two(max_nodes),
        M=power_of_two(rows),
        ROWS=rows,
        S=copied,
        X=scratch.paths_BX.shape[1],
        NUM_LENGTHS=NUM_LENGTHS,
        NO_COPY=NO_COPY,
        MAX_LOGIT=MAX_LOGIT,
        num_warps=1 if max_nodes < 32 else 4,
    )
    launch(
        _join_kernel,
        (num_seqs,),
        texts.first_positions_B,
        trees.depths_B,
        trees.parents_BN,
        trees.scores_BN,
        scratch.paths_BX,
        scratch.worths_BX,
        scratch.tokens_BX,
        scratch.cells_BX,
        scratch.steps_B,
        scratch.firsts_BX,
        scratch.ranks_BX,
        out.tokens_BN,
        out.tokens_BN.stride(0),
        out.parents_BN,
        out.scores_BN,
        out.worths_BN,
        out.cells_BN,
        out.cells_BN.stride(0),
        max_model_len,
        N=max_nodes,
        NODES=power_of_two(max_nodes),
        ROWS=rows,
        S=copied,
        X=scratch.paths_BX.shape[1],
        CHUNK=_CHUNK,
        LAST=max_nodes + rows * copied,
        NO_COPY=NO_COPY,
        MIN_SCORE=MIN_SCORE,
        UNIT=SCORE_UNIT,
        num_warps=max(1, min(scratch.paths_BX.shape[1] // 32, 8)),
    )


@triton.jit
def _append_kernel(
    text_ptr,
    stride_text,
    first_positions_ptr,
    emitted_ptr,
    num_columns,
    max_len,
    COLUMNS: tl.constexpr,
):
    """Write the emitted tokens of one sequence to the end of its text."""
    b = tl.program_id(0)
    j = tl.arange(0, COLUMNS)
    inside = j < num_columns
    token = tl.load(emitted_ptr + b * num_columns + j, mask=inside, other=-1)
    is_emitted = inside & (token >= 0)
    end = tl.load(first_positions_ptr + b) + 1
    place = end - tl.sum(is_emitted.to(tl.int64), 0) + j
    at = text_ptr + b.to(tl.int64) * stride_text + place
    tl.store(at, token.to(tl.int32), mask=is_emitted & (place < max_len))


def append_emitted(text_BL: Tensor, first_positions_B: Tensor, emitted_BJ: Tensor) -> None:
    """Write what a step emitted to the ends of the texts. One launch.

    Args:
        text_BL: int32, any stride between rows.
        first_positions_B: int64, the place of each sequence's newest token, an emitted one where
            any was.
        emitted_BJ: int64, contiguous; -1 behind the emitted tokens.
    """
    num_seqs, num_columns = emitted_BJ.shape
    launch(
        _append_kernel,
        (num_seqs,),
        text_BL,
        text_BL.stride(0),
        first_positions_B,
        emitted_BJ,
        num_columns,
        text_BL.shape[1],
        COLUMNS=power_of_two(num_columns),
        num_warps=1,
    )
