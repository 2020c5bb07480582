"""Drawn chains that lead the trees of a captured decode step. The reference is `merge_chain`.

Shapes: B sequences, N nodes of a tree, C most drafts of a chain.
"""

import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.launch import launch, power_of_two
from peagle.kernels.trees.copies import NO_COPY
from peagle.kernels.trees.survival import DRAWN_SCORE, SCORE_UNIT, SURELY_VERIFIED

_ELEMENTS_A_WARP = 1024


@triton.jit
def merge_chains_kernel(
    draws_ptr,
    depths_ptr,
    first_positions_ptr,
    chains_ptr,
    chains_stride,
    num_nodes_ptr,
    tokens_ptr,
    tokens_stride,
    nodes_ptr,
    nodes_stride,
    max_model_len,
    N: tl.constexpr,
    FIELDS: tl.constexpr,
    LENGTH: tl.constexpr,
    ROWS: tl.constexpr,
    SCORE: tl.constexpr,
    WORTH: tl.constexpr,
    CELL: tl.constexpr,
):
    """Let a drawn chain lead the tree of one sequence."""
    b = tl.program_id(0).to(tl.int64)
    num_slots = tl.maximum(max_model_len - 1 - tl.load(first_positions_ptr + b), 0)
    length = tl.minimum(tl.minimum(tl.load(depths_ptr + b), LENGTH), num_slots)
    if (tl.load(draws_ptr + b) != 0) & (length > 0):
        # Load the tree.
        row = tl.arange(0, ROWS)
        num_nodes = tl.load(num_nodes_ptr + b)
        is_node = (row > 0) & (row <= num_nodes)
        tokens, nodes = tokens_ptr + b * tokens_stride, nodes_ptr + b * nodes_stride
        token = tl.load(tokens + row - 1, mask=is_node, other=-1)
        parent = tl.load(nodes + row - 1, mask=is_node, other=-1)
        score = tl.load(nodes + N + row - 1, mask=is_node, other=0)
        if FIELDS == 4:
            worth = tl.load(nodes + 2 * N + row - 1, mask=is_node, other=0)
            cell = tl.load(nodes + 3 * N + row - 1, mask=is_node, other=0)
        # The new row of the root, and of nodes on the chain's path.
        new = tl.where(row == 0, 0, -1).to(tl.int64)
        at = tl.cast(0, tl.int32)
        for d in range(LENGTH):
            draft = tl.load(chains_ptr + b * chains_stride + d)
            is_child = is_node & (parent == at) & (token == draft) & (d < length)
            at = tl.min(tl.where(is_child, row, ROWS), 0)  # ROWS where the path has left the tree
            new = tl.where(row == at, d + 1, new)
        # The other nodes follow the chain.
        is_other = is_node & (new < 0)
        new = tl.where(is_other, length + tl.cumsum(is_other.to(tl.int64), 0), new)
        num_merged = length + tl.sum(is_other.to(tl.int64), 0)
        num_merged = tl.minimum(num_merged, tl.minimum(num_slots, N))
        is_parent = parent[:, None] == row[None, :]
        new_parent = tl.sum(tl.where(is_parent, new[None, :], 0), 1)
        tl.debug_barrier()
        tl.store(num_nodes_ptr + b, num_merged)
        place, is_kept = new - 1, is_other & (new <= num_merged)
        tl.store(tokens + place, token, mask=is_kept)
        tl.store(nodes + place, new_parent, mask=is_kept)
        tl.store(nodes + N + place, score, mask=is_kept)
        if FIELDS == 4:
            tl.store(nodes + 2 * N + place, worth, mask=is_kept)
            tl.store(nodes + 3 * N + place, cell, mask=is_kept)
        # Store the chain.
        is_drawn = row < length
        draft = tl.load(chains_ptr + b * chains_stride + row, mask=is_drawn, other=0)
        filled = tl.zeros((ROWS,), tl.int64)
        tl.store(tokens + row, draft, mask=is_drawn)
        tl.store(nodes + row, row.to(tl.int64), mask=is_drawn)
        tl.store(nodes + N + row, filled + SCORE, mask=is_drawn)
        if FIELDS == 4:
            tl.store(nodes + 2 * N + row, filled + WORTH, mask=is_drawn)
            tl.store(nodes + 3 * N + row, filled + CELL, mask=is_drawn)


def merge_chains(
    chains_BC: Tensor,
    depths_B: Tensor,
    draws_B: Tensor,
    first_positions_B: Tensor,
    num_nodes_B: Tensor,
    tokens_BN: Tensor,
    nodes_BX: Tensor,
    *,
    max_model_len: int,
) -> None:
    """Let drawn chains lead the trees of the sequences that draw, in place. One launch.

    A chain has as many drafts as the depth of its sequence allows, at most C, and a tree as many
    nodes as find KV slots, at most N.

    Args:
        chains_BC: int64, drawn drafts.
        depths_B: int64, most drafts on a path that a head drafts of each sequence.
        draws_B: int64, 1 for sequences that draw; others keep their trees.
        first_positions_B: int64, of the roots.
        num_nodes_B: int64, nodes of each tree, those that find slots.
        tokens_BN: int64, tokens of the nodes.
        nodes_BX: int64, `DecodeRows.nodes_BX`: parents, scores and, with copies, worths and cells,
            N numbers each.
        max_model_len: no node has a slot from here on.
    """
    num_seqs, max_nodes = tokens_BN.shape
    fields, rows = nodes_BX.shape[1] // max_nodes, power_of_two(max_nodes + 1)
    assert tokens_BN.stride(1) == nodes_BX.stride(1) == chains_BC.stride(1) == 1
    launch(
        merge_chains_kernel,
        (num_seqs,),
        draws_B,
        depths_B,
        first_positions_B,
        chains_BC,
        chains_BC.stride(0),
        num_nodes_B,
        tokens_BN,
        tokens_BN.stride(0),
        nodes_BX,
        nodes_BX.stride(0),
        max_model_len,
        N=max_nodes,
        FIELDS=fields,
        LENGTH=min(chains_BC.shape[1], max_nodes),
        ROWS=rows,
        SCORE=round(DRAWN_SCORE / SCORE_UNIT),
        WORTH=round(SURELY_VERIFIED / SCORE_UNIT),
        CELL=NO_COPY,
        num_warps=max(1, rows * rows // _ELEMENTS_A_WARP),
    )
