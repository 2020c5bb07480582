"""What our Gluon kernels for Hopper share: waiting, asynchronous copies of rows, sums of shares."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

STEP = gl.constexpr(128)  # inputs of a turn of a loop
# Names since Triton 3.7, and before.
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


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
def sum_shares(share_ptrs, SPLIT_K: gl.constexpr, STRIDE: gl.constexpr):
    """Sum all shares of a tile; other programs wrote them through the L2, so the L1 is skipped."""
    acc = gl.load(share_ptrs, cache_modifier=".cg")
    for share in gl.static_range(1, SPLIT_K):
        acc += gl.load(share_ptrs + share * STRIDE, cache_modifier=".cg")
    return acc
