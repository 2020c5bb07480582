"""The splits of paged attention into one: by the program that arrives last, or another launch.

    out = sum_s w_s partial_s / sum_s w_s  with  w_s = 2^lse_s

A sink is one more split, of value 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def combine_tile(
    partial_tile,
    lse_tile,
    sinks_ptr,
    head,
    num_active,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Of a tile of rows, in the order of the splits, so that it is the same each time; past L1."""
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SINKS:
        highest = tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E
        total += 1.0
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for split in tl.range(0, num_active, num_stages=STAGES):
        lse = tl.load(lse_tile + split * BLOCK_M, cache_modifier=".cg")
        partial = tl.load(partial_tile + split * (BLOCK_M * BLOCK_D), cache_modifier=".cg")
        risen = tl.maximum(highest, lse)
        base = tl.where(risen == float("-inf"), 0.0, risen)  # nothing seen yet: inf - inf
        weight = tl.exp2(lse - base)
        shrink = tl.exp2(highest - base)
        total = total * shrink + weight
        acc = acc * shrink[:, None] + partial * weight[:, None]
        highest = risen
    return acc * (1.0 / tl.where(total > 0.0, total, 1.0))[:, None]


@triton.jit(do_not_specialize=["num_sequences", "num_splits"])
def combine_kernel(
    out_ptr,  # [T, Hq, d], contiguous
    partial_ptr,  # float32 [T, Hq, num_splits, d]
    lse_ptr,  # float32 [T, Hq, num_splits], base 2; -inf where a split saw nothing
    query_start_ptr,
    sinks_ptr,
    num_sequences,
    num_splits,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    S2: tl.constexpr,  # num_splits, up to a power of two
    CHUNK: tl.constexpr,  # splits summed at a time
    HAS_SINKS: tl.constexpr,
):
    """Of one row."""
    row = tl.program_id(0)  # of [T, Hq]
    used_rows = tl.load(query_start_ptr + num_sequences).to(tl.int32)
    # Padding rows have no splits, and so become zero.
    used_splits = tl.where(row // NUM_HEADS < used_rows, num_splits, 0)
    offs_s = tl.arange(0, S2)
    offs_d = tl.arange(0, BLOCK_D)
    in_row = offs_d < HEAD_DIM
    first = row.to(tl.int64) * num_splits

    lse = tl.load(lse_ptr + first + offs_s, mask=offs_s < used_splits, other=float("-inf"))
    highest = tl.max(lse, 0)
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + row % NUM_HEADS).to(tl.float32) * LOG2_E
        highest = tl.maximum(highest, sink)
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.sum(tl.exp2(lse - highest), 0)
    if HAS_SINKS:
        total += tl.exp2(sink - highest)

    acc = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, used_splits, CHUNK):
        split = start + tl.arange(0, CHUNK)
        chunk_lse = tl.load(lse_ptr + first + split, mask=split < used_splits, other=float("-inf"))
        # Splits that saw nothing wrote no partial result: what is there may be NaN.
        partial = tl.load(
            partial_ptr + ((first + split) * HEAD_DIM)[:, None] + offs_d[None, :],
            mask=(chunk_lse > float("-inf"))[:, None] & in_row[None, :],
            other=0.0,
        )
        acc += tl.sum(partial * tl.exp2(chunk_lse - highest)[:, None], 0)
    acc = acc / tl.where(total > 0.0, total, 1.0)
    out = acc.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row.to(tl.int64) * HEAD_DIM + offs_d, out, mask=in_row)
