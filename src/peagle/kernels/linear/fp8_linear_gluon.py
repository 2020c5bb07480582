"""Hopper only. The product of `fp8_linear` for few rows, in Gluon.

The matrix unit takes the rows of x and of the weight from shared memory, where the copy engine
brings the inputs of several turns ahead; no number goes through a register. All rows of a tile are
multiplied at once, so that the weight is read once: the way from the L2 bounds these products.

Shapes: M rows of x, N outputs, K inputs; N and K are multiples of 128.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from peagle.kernels.linear.hopper_gluon import (
    STEP,
    await_inputs,
    barrier,
    give_share,
    load_box,
    share_places,
    sum_shares,
)

TURN = gl.constexpr(2 * STEP)  # inputs of a turn of the loop


@gluon.jit
def _fetch(x_rows, w_rows, row, column, k, end, x_tiles, w_tiles, stage, ready):
    """Let inputs k to k + TURN of a tile's rows come to a stage; zeros where there are none."""
    is_there = k < end
    SIZE: gl.constexpr = (x_tiles.shape[1] + w_tiles.shape[1]) * TURN
    place = ready.index(stage)
    mbarrier.expect(place, SIZE, pred=is_there)
    load_box(w_rows, [column, k], place, w_tiles.index(stage), is_there)
    load_box(x_rows, [row, k], place, x_tiles.index(stage), is_there)


@gluon.jit
def _factors(x_scale_ptrs, is_row, scale_ptr, k, end, stride_scale_k):
    """Load what scales the products of inputs k to k + STEP, for each row of x."""
    number, is_there = k // STEP, k < end
    of_x = gl.load(x_scale_ptrs + number * stride_scale_k, mask=is_row & is_there, other=0.0)
    return of_x * gl.load(scale_ptr + number, mask=is_there, other=0.0)


@gluon.jit
def _product(x, w, none, first: gl.constexpr):
    """Begin to multiply STEP inputs of two tiles, from `first` on."""
    w = w.slice(first, STEP, dim=1).permute([1, 0])
    x = x.slice(first, STEP, dim=1)
    return warpgroup_mma(x, w, none, use_acc=False, is_async=True)


@gluon.jit(do_not_specialize=["num_rows"])
def linear_kernel(
    out_ptr,  # bfloat16 [M, N], contiguous
    x_rows,  # float8e4nv [M, K], a descriptor of tiles [BLOCK_M, TURN]
    x_scale_ptr,  # float32 [K / 128, M or more], rows contiguous
    w_rows,  # float8e4nv [N, K], a descriptor of tiles [BLOCK_N, TURN]
    scale_ptr,  # float32 [N / 128, K / 128], contiguous
    residual_ptr,  # as out; not looked at without HAS_RESIDUAL
    partial_ptr,  # float32 [tiles, SPLIT_K, BLOCK_M * BLOCK_N], where SPLIT_K > 1
    arrivals_ptr,  # int32 [tiles], zero before and after, where SPLIT_K > 1
    num_rows,
    num_columns,  # N
    num_k,
    stride_scale_k,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    SPLIT_K: gl.constexpr,
    STAGES: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr,
    OVERLAPS: gl.constexpr,
):
    """Compute one share of K of one tile, x W^T."""
    FP8: gl.constexpr = gl.float8e4nv
    ACC: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [gl.num_warps(), 1], instr_shape=[16, BLOCK_N, 32]
    )
    STORED: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    x_tiles = gl.allocate_shared_memory(FP8, [STAGES, BLOCK_M, TURN], STORED)
    w_tiles = gl.allocate_shared_memory(FP8, [STAGES, BLOCK_N, TURN], STORED)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
    # Tiles of one weight come first, so that they read its rows at the same time.
    tile_m = gl.program_id(0)
    tile_n = gl.program_id(1) // SPLIT_K
    split = gl.program_id(1) % SPLIT_K
    await_inputs(OVERLAPS)
    row, column = tile_m * BLOCK_M, tile_n * BLOCK_N
    of_rows = row + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, ACC))
    is_row, x_scale_ptrs = of_rows < num_rows, x_scale_ptr + of_rows
    scale_ptr += column // STEP * (num_k // STEP)

    # Sum the products over this share of K.
    acc = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, ACC)
    share = (num_k + TURN * SPLIT_K - 1) // (TURN * SPLIT_K) * TURN
    begin = split * share
    end = gl.minimum(begin + share, num_k)
    for stage in gl.static_range(STAGES):
        at = begin + stage * TURN
        _fetch(x_rows, w_rows, row, column, at, end, x_tiles, w_tiles, stage, ready)
    factor = _factors(x_scale_ptrs, is_row, scale_ptr, begin, end, stride_scale_k)
    second_factor = _factors(x_scale_ptrs, is_row, scale_ptr, begin + STEP, end, stride_scale_k)
    stage, phase = begin * 0, begin * 0
    for k in range(begin, end, TURN):
        after = k + TURN
        later = _factors(x_scale_ptrs, is_row, scale_ptr, after, end, stride_scale_k)
        second_later = _factors(x_scale_ptrs, is_row, scale_ptr, after + STEP, end, stride_scale_k)
        mbarrier.wait(ready.index(stage), phase)
        # Two products are on their way at once.
        none = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, ACC)
        x, w = x_tiles.index(stage), w_tiles.index(stage)
        first = _product(x, w, none, 0)
        second = _product(x, w, none, STEP)
        first = warpgroup_mma_wait(1, deps=[first])
        acc += first * factor[:, None]
        second = warpgroup_mma_wait(0, deps=[second])
        acc += second * second_factor[:, None]
        # All warps are done with this stage: let a later turn come to it.
        barrier()
        at = k + STAGES * TURN
        _fetch(x_rows, w_rows, row, column, at, end, x_tiles, w_tiles, stage, ready)
        factor, second_factor = later, second_later
        is_last = stage == STAGES - 1
        stage, phase = gl.where(is_last, 0, stage + 1), gl.where(is_last, 1 - phase, phase)

    # Add up the shares; only the last program to arrive goes on.
    if SPLIT_K > 1:
        SIZE: gl.constexpr = BLOCK_M * BLOCK_N
        tile = tile_n * gl.num_programs(0) + tile_m
        share_ptrs = share_places(partial_ptr, tile, SPLIT_K, acc.shape, ACC)
        if give_share(share_ptrs + split * SIZE, acc, arrivals_ptr + tile) != SPLIT_K - 1:
            return
        acc = sum_shares(share_ptrs, SPLIT_K, SIZE)
        gl.store(arrivals_ptr + tile, 0)

    # Store rows of outputs.
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [gl.num_warps(), 1], [1, 0])
    out = gl.convert_layout(acc.to(out_ptr.dtype.element_ty), OUT)
    m = row + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, OUT))
    n = column + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, OUT))
    at = m.to(gl.int64)[:, None] * num_columns + n[None, :]
    is_there = (m < num_rows)[:, None]
    if HAS_RESIDUAL:
        residual = gl.load(residual_ptr + at, mask=is_there, other=0.0)
        out = (out.to(gl.float32) + residual.to(gl.float32)).to(out.dtype)
    gl.store(out_ptr + at, out, mask=is_there)
