"""The rows of candidate trees in a captured step: who sees whom, and the accepted path.

The reference is `peagle.kernels.paths.TreePaths`, with `path_rows`.

Shapes: B sequences, N nodes of a tree, D most nodes on a path, T packed rows, X = T + 1.
"""

from dataclasses import dataclass
from typing import Self

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.drafts.batches import TargetBatch
from peagle.kernels.launch import launch, power_of_two

_PADDING_AT_ONCE = 256


@triton.jit
def place_rows_kernel(
    parents_ptr,
    parents_stride,
    start_loc_ptr,
    first_positions_ptr,
    visible_ptr,
    depths_ptr,
    positions_ptr,
    num_seqs,
    num_rows,
    ROWS: tl.constexpr,
    PADDING: tl.constexpr,
):
    """Store the paths and positions of one sequence's rows; the last program fills the padding."""
    b = tl.program_id(0)
    start = tl.load(start_loc_ptr + b)
    if b == num_seqs:
        for first in range(start, num_rows, PADDING):
            at = first + tl.arange(0, PADDING)
            nothing = tl.zeros((PADDING,), tl.int64)
            tl.store(visible_ptr + at, nothing, mask=at < num_rows)
            tl.store(depths_ptr + at, nothing, mask=at < num_rows)
            tl.store(positions_ptr + at, nothing, mask=at < num_rows)
        return
    count = tl.load(start_loc_ptr + b + 1) - start
    if count == 0:
        return
    row = tl.arange(0, ROWS)
    visible = (row == 0).to(tl.int64)
    own = tl.full((ROWS,), 1, tl.int64) << row.to(tl.int64)
    depth = tl.zeros((ROWS,), tl.int64)
    for n in range(1, count):
        parent = tl.load(parents_ptr + b * parents_stride + n - 1)
        above = tl.sum(tl.where(row == parent, visible, 0), 0)
        depth_above = tl.sum(tl.where(row == parent, depth, 0), 0)
        visible = tl.where(row == n, above | own, visible)
        depth = tl.where(row == n, depth_above + 1, depth)
    at, inside = start + row, row < count
    tl.store(visible_ptr + at, visible, mask=inside)
    tl.store(depths_ptr + at, depth, mask=inside)
    tl.store(positions_ptr + at, tl.load(first_positions_ptr + b) + depth, mask=inside)


@triton.jit
def descend_kernel(
    own_tokens_ptr,
    tokens_ptr,
    slots_ptr,
    start_loc_ptr,
    running_ptr,
    num_draft_tokens_ptr,
    drafts_ptr,
    drafts_stride,
    parents_ptr,
    parents_stride,
    num_accepted_ptr,
    path_ptr,
    from_ptr,
    to_ptr,
    rows_ptr,
    num_seqs,
    num_rows,
    N: tl.constexpr,
    DEPTH: tl.constexpr,
    ROWS: tl.constexpr,
    PADDING: tl.constexpr,
):
    """Store the accepted path of one sequence and its rows; the last program fills the padding."""
    b = tl.program_id(0)
    start = tl.load(start_loc_ptr + b)
    if b == num_seqs:
        for first in range(start, num_rows, PADDING):
            at = first + tl.arange(0, PADDING)
            tl.store(rows_ptr + at, at, mask=at < num_rows)
        return
    count = tl.load(start_loc_ptr + b + 1) - start
    # Load the tree.
    row = tl.arange(0, ROWS)
    is_node = (row > 0) & (row <= N)
    parent = tl.load(parents_ptr + b * parents_stride + row - 1, mask=is_node, other=-1)
    draft = tl.load(drafts_ptr + b * drafts_stride + row - 1, mask=is_node, other=-1)
    num_draft_tokens = tl.where(tl.load(running_ptr + b) != 0, tl.load(num_draft_tokens_ptr + b), 0)
    is_node = is_node & (row <= num_draft_tokens)
    root_slot = tl.load(slots_ptr + start, mask=count > 0, other=-1)
    # Descend from the root while a child is the target's own token.
    at = tl.cast(0, tl.int32)
    accepted = at
    goes_on = count > 0
    is_path = row == 0
    for d in range(DEPTH):
        token = tl.load(own_tokens_ptr + start + at, mask=goes_on, other=-1)
        child = tl.min(tl.where(is_node & (parent == at) & (draft == token), row, ROWS), 0)
        goes_on = goes_on & (child < ROWS)
        at = tl.where(goes_on, child, at)
        accepted += goes_on.to(tl.int32)
        is_path = is_path | (goes_on & (row == at))
        source = tl.load(slots_ptr + start + at, mask=goes_on, other=-1)
        target = tl.load(slots_ptr + start + d + 1, mask=goes_on, other=-1)
        tl.store(path_ptr + b * DEPTH + d, tl.where(goes_on, token, 0))
        tl.store(from_ptr + b * DEPTH + d, tl.where(goes_on, source, root_slot))
        tl.store(to_ptr + b * DEPTH + d, tl.where(goes_on, target, root_slot))
    tl.store(num_accepted_ptr + b, accepted.to(tl.int64))
    # Rows of the path ascend, since parents come first; so do the others, behind them.
    inside = row < count
    on_path = tl.cumsum(is_path.to(tl.int32), 0) - 1
    behind = accepted + tl.cumsum((is_path == 0).to(tl.int32), 0)
    place = start + tl.where(is_path, on_path, behind)
    token = tl.load(tokens_ptr + start + row, mask=inside)
    own_token = tl.load(own_tokens_ptr + start + row, mask=inside)
    tl.debug_barrier()
    tl.store(rows_ptr + place, start + row, mask=inside)
    tl.store(tokens_ptr + place, token, mask=inside)
    tl.store(own_tokens_ptr + place, own_token, mask=inside)


def place_rows(
    parents_BN: Tensor,
    first_positions_B: Tensor,
    batch: TargetBatch,
    visible_T: Tensor,
    depths_T: Tensor,
) -> None:
    """Write which rows each row sees, its depth, and its position in the batch. One launch.

    Args:
        parents_BN: int64, the row of each node's parent, any stride between trees.
        first_positions_B: int64, of the roots.
        batch: takes the positions; padding gets 0 of all three.
    """
    num_seqs, max_nodes = parents_BN.shape
    launch(
        place_rows_kernel,
        (num_seqs + 1,),
        parents_BN,
        parents_BN.stride(0),
        batch.query_start_loc,
        first_positions_B,
        visible_T,
        depths_T,
        batch.positions_R,
        num_seqs,
        len(visible_T),
        ROWS=power_of_two(max_nodes + 1),
        PADDING=_PADDING_AT_ONCE,
        num_warps=1,
    )


@dataclass(frozen=True, slots=True)
class Descent:
    """The path that verification took through each tree, int64.

    Attributes:
        num_accepted_B: nodes on the accepted path.
        path_BD: their tokens; 0 behind them.
        from_BD, to_BD: KV slots of the path's rows, and the slots that a chain has for them.
        rows_X: the row that stood where a row of the batch now stands, and T.
    """

    num_accepted_B: Tensor
    path_BD: Tensor
    from_BD: Tensor
    to_BD: Tensor
    rows_X: Tensor

    @classmethod
    def allocate(cls, num_accepted_B: Tensor, depth: int, num_rows: int) -> Self:
        """Allocate buffers for paths of up to D nodes and T rows."""
        device = num_accepted_B.device
        path_BD, from_BD, to_BD = torch.zeros(
            (3, len(num_accepted_B), depth), dtype=torch.int64, device=device
        )
        rows_X = torch.arange(num_rows + 1, device=device)
        return cls(num_accepted_B, path_BD, from_BD, to_BD, rows_X)


def descend(
    own_tokens_T: Tensor,
    drafts_BN: Tensor,
    parents_BN: Tensor,
    num_draft_tokens_B: Tensor,
    running_B: Tensor,
    batch: TargetBatch,
    out: Descent,
) -> None:
    """Go from each root to the child equal to the target's own token; bring the path's rows first.

    The tokens of the batch and the target's own ones move with their rows. One launch.

    Args:
        own_tokens_T: int64, of each row.
        drafts_BN, parents_BN: int64, the nodes, any stride between trees; those at or above
            `num_draft_tokens_B` are none.
        running_B: int64; a sequence that does not run accepts nothing.
    """
    num_seqs, max_nodes = drafts_BN.shape
    assert drafts_BN.stride(1) == parents_BN.stride(1) == 1
    launch(
        descend_kernel,
        (num_seqs + 1,),
        own_tokens_T,
        batch.tokens_R,
        batch.slots_R,
        batch.query_start_loc,
        running_B,
        num_draft_tokens_B,
        drafts_BN,
        drafts_BN.stride(0),
        parents_BN,
        parents_BN.stride(0),
        out.num_accepted_B,
        out.path_BD,
        out.from_BD,
        out.to_BD,
        out.rows_X,
        num_seqs,
        len(own_tokens_T),
        N=max_nodes,
        DEPTH=out.path_BD.shape[1],
        ROWS=power_of_two(max_nodes + 1),
        PADDING=_PADDING_AT_ONCE,
        num_warps=1,
    )
