"""Sums over K that several programs share, in Triton: the last to arrive adds them up.

The caller gives the counters of `launch.arrivals`.
"""

import triton
import triton.language as tl


@triton.jit
def _sum_shares(share_ptrs, SPLIT_K: tl.constexpr, STRIDE: tl.constexpr):
    """Sum all shares of a tile; other programs wrote them through the L2, so the L1 is skipped."""
    acc = tl.zeros(share_ptrs.shape, tl.float32)
    for share in range(SPLIT_K):
        acc += tl.load(share_ptrs + share * STRIDE, cache_modifier=".cg")
    return acc


@triton.jit
def add_shares(
    first,  # float32 [rows, columns]: this program's share
    second,  # likewise, of another result; only with PARTS 2
    partial_ptr,  # float32 [tiles, SPLIT_K, PARTS, rows * columns]
    arrivals_ptr,  # int32 [tiles], zero before and after
    tile,
    split,
    SPLIT_K: tl.constexpr,
    PARTS: tl.constexpr = 2,
):
    """Return the sums over all shares of a tile, and whether this program has them: the last one.

    The order of the sum is always the same.
    """
    SIZE: tl.constexpr = first.shape[0] * first.shape[1]
    rows = tl.arange(0, first.shape[0])[:, None]
    offs = rows * first.shape[1] + tl.arange(0, first.shape[1])[None, :]
    partial_ptrs = partial_ptr + tile.to(tl.int64) * (SPLIT_K * PARTS * SIZE) + offs
    own_ptrs = partial_ptrs + split * (PARTS * SIZE)
    tl.store(own_ptrs, first)
    if PARTS == 2:
        tl.store(own_ptrs + SIZE, second)
    # All threads have stored before one of them says so.
    tl.debug_barrier()
    arrived = tl.atomic_add(arrivals_ptr + tile, 1, sem="acq_rel", scope="gpu")
    is_last = arrived == SPLIT_K - 1
    if is_last:
        first = _sum_shares(partial_ptrs, SPLIT_K, PARTS * SIZE)
        if PARTS == 2:
            second = _sum_shares(partial_ptrs + SIZE, SPLIT_K, PARTS * SIZE)
        tl.store(arrivals_ptr + tile, 0)
    return first, second, is_last
