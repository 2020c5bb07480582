"""What our Gluon kernels for Hopper share: waiting, asynchronous copies of rows, sums of shares."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

STEP = gl.constexpr(128)  # inputs of a turn of a loop
# Names since Triton 3.7, and before.
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
load_box = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@gluon.jit
def await_inputs(OVERLAPS: gl.constexpr):
    """Do what `overlap_triton.wait_for_inputs` does."""
    if OVERLAPS:
        gl.inline_asm_elementwise(
            "{ griddepcontrol.wait; griddepcontrol.launch_dependents; mov.b32 $0, 0; }",
            "=r",
            [],
            gl.int32,
            False,
            1,
        )


@gluon.jit
def copy_rows(tile, row_ptrs, is_row, k, end, COPY: gl.constexpr):
    """Let inputs k to k + STEP of rows come to a tile of shared memory, [rows, STEP]; zeros where
    there are none.
    """
    offs = k + gl.arange(0, STEP, layout=gl.SliceLayout(0, COPY))[None, :]
    async_load(tile, row_ptrs + offs, mask=is_row[:, None] & (offs < end))


@gluon.jit
def copy_scales(tile, row_ptrs, is_row, k, end, stride):
    """Let the scales of inputs k to k + STEP of x come to a tile of shared memory, [BLOCK_M]."""
    async_load(tile, row_ptrs + k // STEP * stride, mask=is_row & (k < end))


@gluon.jit
def share_places(partial_ptr, tile, SPLIT_K: gl.constexpr, SHAPE: gl.constexpr, ACC: gl.constexpr):
    """Return where the first share of a tile lies; the others follow it."""
    rows: gl.constexpr = SHAPE[0]
    columns: gl.constexpr = SHAPE[1]
    n = gl.arange(0, rows, layout=gl.SliceLayout(1, ACC))
    m = gl.arange(0, columns, layout=gl.SliceLayout(0, ACC))
    share_ptrs = partial_ptr + tile.to(gl.int64) * (SPLIT_K * rows * columns)
    return share_ptrs + (n[:, None] * columns + m[None, :])


@gluon.jit
def give_share(share_ptrs, acc, arrival_ptr):
    """Store a share; return how many programs of the tile had stored theirs."""
    gl.store(share_ptrs, acc)
    barrier()
    return gl.atomic_add(arrival_ptr, 1, sem="acq_rel", scope="gpu")


@gluon.jit
def sum_shares(share_ptrs, SPLIT_K: gl.constexpr, STRIDE: gl.constexpr):
    """Sum all shares of a tile; other programs wrote them through the L2, so the L1 is skipped."""
    acc = gl.load(share_ptrs, cache_modifier=".cg")
    for share in gl.static_range(1, SPLIT_K):
        acc += gl.load(share_ptrs + share * STRIDE, cache_modifier=".cg")
    return acc
