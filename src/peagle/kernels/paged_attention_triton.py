"""Triton kernels of paged attention; `paged_attention` launches them and says what they compute.

One program takes a tile of BLOCK_M rows of one sequence and one key/value head. A row is a pair
(query, query head): all query heads that share the key head stand below each other, query after
query, so that a few queries fill the rows of the matrix unit and each key is read once for all of
them. It walks over the visible keys in tiles of BLOCK_N with an online softmax, in base 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _sequence_of_tile(
    query_start_ptr, tile, num_sequences, BLOCK_Q: tl.constexpr, B2: tl.constexpr
):
    """Sequence and tile inside it, where sequence b owns tiles from start_b // BLOCK_Q + b on.

    That gives each at least as many tiles as it needs, and tokens // BLOCK_Q + sequences in all.
    """
    b = tl.arange(0, B2)
    is_sequence = b < num_sequences
    starts = tl.load(query_start_ptr + b, mask=is_sequence, other=0).to(tl.int32)
    begun = is_sequence & (starts // BLOCK_Q + b <= tile)
    sequence = tl.sum(begun.to(tl.int32), 0) - 1
    start = tl.load(query_start_ptr + sequence).to(tl.int32)
    return sequence, tile - (start // BLOCK_Q + sequence)


@triton.jit(
    do_not_specialize=[
        "stride_table",
        "num_sequences",
        "num_rows",
        "tiles_per_sequence",
        "num_splits",
        "window",
    ]
)
def attend_kernel(
    out_ptr,  # [T, Hq, d], contiguous; written where IS_SPLIT is false
    partial_ptr,  # float32 [T, Hq, num_splits, d]; written where IS_SPLIT is true, as the next
    lse_ptr,  # float32 [T, Hq, num_splits], base 2
    query_ptr,
    keys_ptr,
    values_ptr,
    query_start_ptr,
    seq_lens_ptr,
    starts_ptr,
    tables_ptr,
    sinks_ptr,
    score_scale,  # to base 2; with a softcap c: 2 log2(e) scaling / c
    cap_scale,  # c log2(e)
    value_scale,
    stride_query_row,
    stride_query_head,
    stride_block,
    stride_slot,
    stride_head,
    stride_table,
    num_sequences,
    num_rows,
    tiles_per_sequence,
    num_splits,
    window,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a key head
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    OFFSET: tl.constexpr,  # integers that count the elements of the cache
    BLOCK_D: tl.constexpr,  # HEAD_DIM, up to a power of two
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    B2: tl.constexpr,  # num_sequences, up to a power of two
    SEARCH: tl.constexpr,  # tiles are dealt by _sequence_of_tile, not evenly
    IS_SPLIT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """Attention of one tile of rows over one share of the keys."""
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    # Heads next to each other: they read neighbouring memory.
    program = tl.program_id(0)
    kv_head = program % NUM_KV_HEADS
    split = program // NUM_KV_HEADS % num_splits
    num_tiles = tl.num_programs(0) // (NUM_KV_HEADS * num_splits)
    # The last tiles of a prompt see the most keys; started last they would be waited for.
    tile = num_tiles - 1 - program // (NUM_KV_HEADS * num_splits)

    offs_d = tl.arange(0, BLOCK_D)
    offs_m = tl.arange(0, BLOCK_M)
    head = kv_head * GROUP + offs_m % GROUP
    if not IS_SPLIT:
        # Rows beyond the last sequence pad the batch: zero, so that nothing later sees a NaN.
        used_rows = tl.load(query_start_ptr + num_sequences).to(tl.int32)
        of_head = (offs_m < GROUP)[:, None] & (offs_d < HEAD_DIM)[None, :]
        for row in range(used_rows + tile, num_rows, num_tiles):
            target = (head.to(tl.int64) + row * (NUM_KV_HEADS * GROUP)) * HEAD_DIM
            nothing = tl.zeros([BLOCK_M, BLOCK_D], out_ptr.dtype.element_ty)
            tl.store(out_ptr + target[:, None] + offs_d[None, :], nothing, mask=of_head)

    if SEARCH:
        sequence, tile = _sequence_of_tile(query_start_ptr, tile, num_sequences, BLOCK_Q, B2)
    else:
        sequence = tile // tiles_per_sequence
        tile = tile % tiles_per_sequence
    query_start = tl.load(query_start_ptr + sequence).to(tl.int32)
    num_queries = tl.load(query_start_ptr + sequence + 1).to(tl.int32) - query_start
    first_query = tile * BLOCK_Q
    if first_query >= num_queries:
        return

    # Visible to any row of the tile are the keys of [low, high); split evenly, in whole tiles.
    query = first_query + offs_m // GROUP
    is_row = (offs_m < BLOCK_Q * GROUP) & (query < num_queries)
    num_cached = tl.load(seq_lens_ptr + sequence).to(tl.int32) - num_queries
    position = num_cached + query
    low = 0
    if HAS_STARTS:
        low = tl.maximum(tl.load(starts_ptr + sequence).to(tl.int32), 0)
    if HAS_WINDOW:
        low = tl.maximum(num_cached + first_query - window + 1, low)
    high = tl.maximum(num_cached + tl.minimum(first_query + BLOCK_Q, num_queries), 0)
    first_keys = low // BLOCK_N
    last_keys = (high + BLOCK_N - 1) // BLOCK_N
    share = (tl.maximum(last_keys - first_keys, 0) + num_splits - 1) // num_splits
    first_keys += split * share
    last_keys = tl.minimum(first_keys + share, last_keys)

    row = ((query_start + query).to(tl.int64) * (NUM_KV_HEADS * GROUP)) + head
    if IS_SPLIT:  # noqa: SIM102 (one is known when the kernel is compiled)
        if first_keys >= last_keys:
            tl.store(
                lse_ptr + row * num_splits + split,
                tl.full([BLOCK_M], float("-inf"), tl.float32),
                mask=is_row,
            )
            return

    in_row = offs_d < HEAD_DIM
    source = (query_start + query).to(tl.int64) * stride_query_row + head * stride_query_head
    q = tl.load(
        query_ptr + source[:, None] + offs_d[None, :],
        mask=is_row[:, None] & in_row[None, :],
        other=0.0,
    )
    # Keys and values are addressed by slot below; the head is the same for all.
    keys_ptr += kv_head * stride_head
    values_ptr += kv_head * stride_head
    table_ptr = tables_ptr + sequence.to(tl.int64) * stride_table

    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    key = first_keys * BLOCK_N + tl.arange(0, BLOCK_N)
    is_key = (key >= low) & (key < high)
    block = tl.load(table_ptr + key // BLOCK_SIZE, mask=is_key, other=0).to(OFFSET)
    for keys_tile in range(first_keys, last_keys):
        key = keys_tile * BLOCK_N + tl.arange(0, BLOCK_N)
        # Nothing else is loaded: unused and hidden slots may hold NaN, and 0 * NaN is NaN.
        is_key = (key >= low) & (key < high)
        slot = block * stride_block + key % BLOCK_SIZE * stride_slot
        if HEAD_DIM == BLOCK_D:
            keys_mask = is_key[None, :]
            values_mask = is_key[:, None]
        else:
            keys_mask = is_key[None, :] & in_row[:, None]
            values_mask = is_key[:, None] & in_row[None, :]
        k = tl.load(keys_ptr + slot[None, :] + offs_d[:, None], mask=keys_mask, other=0.0)
        v = tl.load(values_ptr + slot[:, None] + offs_d[None, :], mask=values_mask, other=0.0)

        # The next tile's blocks one step ahead, so that its keys need not wait for them.
        ahead = key + BLOCK_N
        block = tl.load(table_ptr + ahead // BLOCK_SIZE, mask=ahead < high, other=0).to(OFFSET)

        scores = tl.dot(q, k.to(q.dtype), input_precision="ieee") * score_scale
        if HAS_SOFTCAP:
            scores = cap_scale * (1.0 - 2.0 / (tl.exp2(scores) + 1.0))  # tanh
        visible = is_key[None, :] & (key[None, :] <= position[:, None])
        if HAS_WINDOW:
            visible = visible & (position[:, None] - key[None, :] < window)
        scores = tl.where(visible, scores, float("-inf"))

        risen = tl.maximum(highest, tl.max(scores, 1))
        base = tl.where(risen == float("-inf"), 0.0, risen)  # nothing seen yet: inf - inf
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(highest - base)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc, input_precision="ieee")
        highest = risen

    mask = is_row[:, None] & in_row[None, :]
    if IS_SPLIT:
        safe = tl.where(total > 0.0, total, 1.0)
        lse = tl.where(total > 0.0, highest + tl.log2(safe), float("-inf"))
        acc = acc * (value_scale / safe)[:, None]
        place = row * num_splits + split
        tl.store(lse_ptr + place, lse, mask=is_row)
        tl.store(partial_ptr + (place * HEAD_DIM)[:, None] + offs_d[None, :], acc, mask=mask)
    else:
        if HAS_SINKS:
            sink = tl.load(sinks_ptr + head, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
            base = tl.maximum(highest, sink)
            shrink = tl.exp2(highest - base)
            total = total * shrink + tl.exp2(sink - base)
            acc = acc * shrink[:, None]
        acc = acc * (value_scale / tl.where(total > 0.0, total, 1.0))[:, None]
        out = acc.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + (row * HEAD_DIM)[:, None] + offs_d[None, :], out, mask=mask)


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
    """out = sum_s w_s partial_s / sum_s w_s with w_s = 2^lse_s; a sink is one more, of value 0."""
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
