"""Hopper only. The product of `fp8_linear` for few rows, in Gluon.

The matrix unit takes the rows of the weight and of x from shared memory, where asynchronous copies
bring the inputs of several steps ahead; no number goes through a register.

Shapes: M rows of x, N outputs, K inputs; N and K are multiples of 128.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from peagle.kernels.linear.hopper_gluon import (
    STEP,
    await_inputs,
    barrier,
    copy_rows,
    copy_scales,
    give_share,
    share_places,
    sum_shares,
)


@gluon.jit(do_not_specialize=["num_rows"])
def linear_kernel(
    out_ptr,  # bfloat16 [M, N], contiguous
    x_ptr,  # float8e4nv [M, K], contiguous
    x_scale_ptr,  # float32 [K / 128, M or more]
    weight_ptr,  # float8e4nv [N, K], contiguous
    scale_ptr,  # float32 [N / 128, K / 128], contiguous
    residual_ptr,  # as out; not looked at without HAS_RESIDUAL
    partial_ptr,  # float32 [tiles, SPLIT_K, BLOCK_N * BLOCK_M], where SPLIT_K > 1
    arrivals_ptr,  # int32 [tiles], zero before and after, where SPLIT_K > 1
    num_rows,
    num_columns,  # N
    num_k,
    stride_scale_k,
    stride_scale_row,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    SPLIT_K: gl.constexpr,
    STAGES: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr,
    OVERLAPS: gl.constexpr,
):
    """Compute one share of K of one tile, W x^T."""
    FP8: gl.constexpr = gl.float8e4nv
    ACC: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [gl.num_warps(), 1], instr_shape=[16, BLOCK_M, 32]
    )
    COPY: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [gl.num_warps(), 1], [1, 0])
    OF_SCALES: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    STORED: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tiles_w = gl.allocate_shared_memory(FP8, [STAGES, BLOCK_N, STEP], STORED)
    tiles_x = gl.allocate_shared_memory(FP8, [STAGES, BLOCK_M, STEP], STORED)
    x_scales = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], PLAIN)
    # Tiles of one weight come first, so that they read its rows at the same time.
    tile_m = gl.program_id(0)
    tile_n = gl.program_id(1) // SPLIT_K
    split = gl.program_id(1) % SPLIT_K
    await_inputs(OVERLAPS)
    # Locate the rows of both, and their scales.
    column = tile_n * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, COPY))
    row = tile_m * BLOCK_M + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, COPY))
    w_ptrs = weight_ptr + column.to(gl.int64)[:, None] * num_k
    x_ptrs = x_ptr + row.to(gl.int64)[:, None] * num_k
    is_column, is_row = column < num_columns, row < num_rows
    scale_row = tile_m * BLOCK_M + gl.arange(0, BLOCK_M, layout=OF_SCALES)
    x_scale_ptrs = x_scale_ptr + scale_row.to(gl.int64) * stride_scale_row
    has_scale = scale_row < num_rows
    scale_ptr += tile_n * BLOCK_N // STEP * (num_k // STEP)

    # Sum the products over this share of K.
    acc = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, ACC)
    share = (num_k + STEP * SPLIT_K - 1) // (STEP * SPLIT_K) * STEP
    begin = split * share
    end = gl.minimum(begin + share, num_k)
    for stage in gl.static_range(STAGES - 1):
        at = begin + stage * STEP
        copy_rows(tiles_w.index(stage), w_ptrs, is_column, at, end, COPY)
        copy_rows(tiles_x.index(stage), x_ptrs, is_row, at, end, COPY)
        copy_scales(x_scales.index(stage), x_scale_ptrs, has_scale, at, end, stride_scale_k)
        async_copy.commit_group()
    scale = gl.load(scale_ptr + gl.minimum(begin, num_k - 1) // STEP)
    stage = 0
    for k in range(begin, end, STEP):
        # Wait for this step, and start the copies of a later one.
        async_copy.wait_group(STAGES - 2)
        fence_async_shared()
        barrier()
        free = gl.where(stage == 0, STAGES - 1, stage - 1)
        ahead = k + (STAGES - 1) * STEP
        copy_rows(tiles_w.index(free), w_ptrs, is_column, ahead, end, COPY)
        copy_rows(tiles_x.index(free), x_ptrs, is_row, ahead, end, COPY)
        copy_scales(x_scales.index(free), x_scale_ptrs, has_scale, ahead, end, stride_scale_k)
        async_copy.commit_group()
        x = tiles_x.index(stage).permute([1, 0])
        later = warpgroup_mma(tiles_w.index(stage), x, acc, use_acc=False, is_async=True)
        next_scale = gl.load(scale_ptr + gl.minimum(k + STEP, end - 1) // STEP)
        factor = x_scales.index(stage).load(gl.SliceLayout(0, ACC)) * scale
        part = warpgroup_mma_wait(0, deps=[later])
        acc += part * factor[None, :]
        scale = next_scale
        stage = gl.where(stage == STAGES - 1, 0, stage + 1)
    async_copy.wait_group(0)

    # Add up the shares; only the last program to arrive goes on.
    if SPLIT_K > 1:
        SIZE: gl.constexpr = BLOCK_N * BLOCK_M
        tile = tile_n * gl.num_programs(0) + tile_m
        share_ptrs = share_places(partial_ptr, tile, SPLIT_K, acc.shape, ACC)
        if give_share(share_ptrs + split * SIZE, acc, arrivals_ptr + tile) != SPLIT_K - 1:
            return
        acc = sum_shares(share_ptrs, SPLIT_K, SIZE)
        gl.store(arrivals_ptr + tile, 0)

    # Store rows of outputs.
    OUT: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, gl.num_warps()], [0, 1])
    out = gl.convert_layout(acc.to(out_ptr.dtype.element_ty), OUT)
    n = tile_n * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, OUT))
    m = tile_m * BLOCK_M + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, OUT))
    at = m.to(gl.int64)[None, :] * num_columns + n[:, None]
    is_there = (m < num_rows)[None, :] & (n < num_columns)[:, None]
    if HAS_RESIDUAL:
        residual = gl.load(residual_ptr + at, mask=is_there, other=0.0)
        out = (out.to(gl.float32) + residual.to(gl.float32)).to(out.dtype)
    gl.store(out_ptr + at, out, mask=is_there)
