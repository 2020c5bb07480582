"""Triton kernels of paged attention; `paged_attention` launches them and says what they compute.

One program takes a tile of BLOCK_M rows of one sequence and one key/value head. A row is a pair
(query, query head): all query heads that share the key head stand below each other, query after
query, so that a few queries fill the rows of the matrix unit and each key is read once for all of
them. It walks over the visible keys in tiles of BLOCK_N with an online softmax, in base 2.

The program that arrives last adds up the splits of the keys:

    out = sum_s w_s partial_s / sum_s w_s  with  w_s = 2^lse_s

A sink is one more split, of value 0.
"""

import triton
import triton.language as tl

from peagle.kernels.attention.fp8_cache_triton import as_read, as_stored
from peagle.kernels.overlap_triton import wait_for_inputs

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
    """Add up the splits of a tile of rows, always in one order; the loads bypass L1."""
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


@triton.jit
def _sequence_of_tile(
    query_start_ptr, tile, num_sequences, BLOCK_Q: tl.constexpr, B2: tl.constexpr
):
    """Return the sequence of a tile and the tile inside it.

    Sequence b owns the tiles from start_b // BLOCK_Q + b on.

    That gives each at least as many tiles as it needs, and tokens // BLOCK_Q + sequences in all.
    """
    b = tl.arange(0, B2)
    is_sequence = b < num_sequences
    starts = tl.load(query_start_ptr + b, mask=is_sequence, other=0).to(tl.int32)
    begun = is_sequence & (starts // BLOCK_Q + b <= tile)
    sequence = tl.sum(begun.to(tl.int32), 0) - 1
    start = tl.load(query_start_ptr + sequence).to(tl.int32)
    return sequence, tile - (start // BLOCK_Q + sequence)


@triton.jit
def _load_rows(
    cache_rows, new_rows, is_new, any_new, mask, factor, dtype: tl.constexpr, LIMIT: tl.constexpr
):
    """Load a tile of keys or values, the new ones from this pass, as the cache would give them."""
    if LIMIT > 0:
        rows = tl.load(cache_rows, mask=mask & ~is_new, other=0.0)
        x = as_read(rows, dtype)
        if any_new:
            new = tl.load(new_rows, mask=mask & is_new, other=0.0)
            x = tl.where(is_new, as_read(as_stored(new, factor, rows.dtype, LIMIT), dtype), x)
    else:  # one load from either place
        x = tl.load(tl.where(is_new, new_rows, cache_rows), mask=mask, other=0.0)
    return x


@triton.jit
def _write_rows(
    key_ptr,
    value_ptr,
    slots_ptr,
    keys_ptr,
    values_ptr,
    key_factor,
    value_factor,
    stride_key_row,
    stride_value_row,
    stride_block,
    stride_slot,
    start,
    count,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """Write the keys and values of one sequence and head into the cache; slot -1 writes nothing."""
    offs = tl.arange(0, ROWS)
    offs_d = tl.arange(0, BLOCK_D)[None, :]
    row = (start + offs).to(tl.int64)
    slot = tl.load(slots_ptr + row, mask=offs < count, other=-1).to(tl.int64)
    is_read = (offs < count)[:, None] & (offs_d < HEAD_DIM)
    key = tl.load(key_ptr + (row * stride_key_row)[:, None] + offs_d, mask=is_read)
    value = tl.load(value_ptr + (row * stride_value_row)[:, None] + offs_d, mask=is_read)
    target = slot // BLOCK_SIZE * stride_block + slot % BLOCK_SIZE * stride_slot
    target = target[:, None] + offs_d
    mask = is_read & (slot >= 0)[:, None]
    dtype: tl.constexpr = keys_ptr.dtype.element_ty
    tl.store(keys_ptr + target, as_stored(key, key_factor, dtype, LIMIT), mask=mask)
    tl.store(values_ptr + target, as_stored(value, value_factor, dtype, LIMIT), mask=mask)


@triton.jit
def _add_tile(scores, values, highest, total, acc, dtype: tl.constexpr):
    """Add a tile of keys to an online softmax; scores of -inf are keys that a row does not see."""
    risen = tl.maximum(highest, tl.max(scores, 1))
    base = tl.where(risen == float("-inf"), 0.0, risen)  # nothing seen yet: inf - inf
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(highest - base)
    total = total * shrink + tl.sum(weights, 1)
    acc = acc * shrink[:, None]
    acc = tl.dot(weights.to(dtype), as_read(values, dtype), acc, input_precision="ieee")
    return risen, total, acc


@triton.jit(
    do_not_specialize=[
        "stride_table",
        "table_width",
        "num_sequences",
        "num_rows",
        "tiles_per_sequence",
        "num_splits",
        "few_splits",
        "window",
        "rows_before",
    ]
)
def attend_kernel(
    out_ptr,  # [T, Hq, d], contiguous
    partial_ptr,  # float32 [tile, Hkv, num_splits, BLOCK_M, BLOCK_D]; looked at where IS_SPLIT
    lse_ptr,  # as partial without the last dimension, base 2
    arrivals_ptr,  # int32 [tile, Hkv], zeros; looked at where IS_SPLIT
    query_ptr,
    keys_ptr,
    values_ptr,
    key_ptr,  # [T, Hkv, d] of this pass, as the next; looked at where WRITE_ROWS
    value_ptr,
    slots_ptr,
    query_start_ptr,
    seq_lens_ptr,
    starts_ptr,
    visible_ptr,  # int64 [T], as the next; looked at where HAS_TREE
    positions_ptr,
    tables_ptr,
    sinks_ptr,
    score_scale,  # to base 2; with a softcap c: 2 log2(e) scaling / c
    cap_scale,  # c log2(e)
    value_scale,
    key_factor,  # 1 / key_scale
    value_factor,
    stride_query_row,
    stride_query_head,
    stride_block,
    stride_slot,
    stride_head,
    stride_key_row,
    stride_key_head,
    stride_value_row,
    stride_value_head,
    stride_table,
    table_width,
    num_sequences,
    num_rows,
    tiles_per_sequence,
    num_splits,
    few_splits,
    window,
    rows_before,  # of a tree, cached by earlier passes
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
    IS_SPLIT: tl.constexpr,  # several programs share the keys of a tile of rows
    COMBINE_STAGES: tl.constexpr,
    MIN_KEYS: tl.constexpr,  # as many splits have keys as get so many each, up to few_splits
    MANY_KEYS: tl.constexpr,  # and further ones as long as each gets so many
    WRITE_ROWS: tl.constexpr,  # most queries of a sequence, up to a power of two; 0: all is cached
    LIMIT: tl.constexpr,  # the largest number of an 8-bit cache; 0: a cache of the keys' dtype
    OPEN_TILES: tl.constexpr,  # keys that all rows of a tile see are not masked
    HAS_WINDOW: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    HAS_TREE: tl.constexpr,  # the queries of a sequence are a tree of at most 64, or a prompt
    HAS_SINKS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    OVERLAPS: tl.constexpr,
    SETTLED: tl.constexpr,  # what says where keys are is older than the launch before
):
    """Attention of one tile of rows over one share of the keys."""
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    # Heads next to each other: they read neighbouring memory.
    program = tl.program_id(0)
    kv_head = program % NUM_KV_HEADS
    num_tiles = tl.num_programs(0) // (NUM_KV_HEADS * num_splits)
    # The last splits have no keys in a short context: all others get a multiprocessor before them.
    split = program // (NUM_KV_HEADS * num_tiles)
    # The last tiles of a prompt see the most keys; started last they would be waited for.
    tile = num_tiles - 1 - program // NUM_KV_HEADS % num_tiles
    counter = tile * NUM_KV_HEADS + kv_head
    first_padding = tile
    # In a short context it has no keys, and so the time for what has to be done once.
    is_last_split = split == num_splits - 1

    # Find the sequence of this tile and its rows.
    offs_d = tl.arange(0, BLOCK_D)
    offs_m = tl.arange(0, BLOCK_M)
    in_row = offs_d < HEAD_DIM
    head = kv_head * GROUP + offs_m % GROUP

    wait_for_inputs(OVERLAPS and not SETTLED)
    if SEARCH:
        sequence, tile = _sequence_of_tile(query_start_ptr, tile, num_sequences, BLOCK_Q, B2)
    else:
        sequence = tile // tiles_per_sequence
        tile = tile % tiles_per_sequence
    query_start = tl.load(query_start_ptr + sequence).to(tl.int32)
    num_queries = tl.load(query_start_ptr + sequence + 1).to(tl.int32) - query_start
    num_cached = tl.load(seq_lens_ptr + sequence).to(tl.int32) - num_queries
    used_rows = tl.load(query_start_ptr + num_sequences).to(tl.int32)
    first_query = tile * BLOCK_Q

    # Visible to any row of the tile are the keys of [low, high), in num_keys tiles.
    low = 0
    if HAS_STARTS:
        low = tl.maximum(tl.load(starts_ptr + sequence).to(tl.int32), 0)
    if HAS_WINDOW:
        # A row of a tree stands at its depth, which may be that of the root's first child.
        first_position = num_cached + (-rows_before if HAS_TREE else first_query)
        low = tl.maximum(first_position - window + 1, low)
    high = tl.maximum(num_cached + tl.minimum(first_query + BLOCK_Q, num_queries), 0)
    first_keys = low // BLOCK_N
    num_keys = tl.maximum((high + BLOCK_N - 1) // BLOCK_N - first_keys, 0)
    # Splits take tiles in turns, so that the first tile of each is known before the length is.
    first_keys += split
    FEW: tl.constexpr = (MIN_KEYS + BLOCK_N - 1) // BLOCK_N
    MANY: tl.constexpr = (MANY_KEYS + BLOCK_N - 1) // BLOCK_N
    num_active = tl.minimum((num_keys + FEW - 1) // FEW, few_splits)
    num_active = tl.maximum((num_keys + MANY - 1) // MANY, num_active)
    num_active = tl.minimum(num_active, num_splits)
    step = tl.maximum(num_active, 1)
    num_own = tl.where(split < num_active, (num_keys - split + step - 1) // step, 0)

    # Keys and values are addressed by slot below; the head is the same for all.
    keys_ptr += kv_head * stride_head
    values_ptr += kv_head * stride_head
    table_ptr = tables_ptr + sequence.to(tl.int64) * stride_table
    key = first_keys * BLOCK_N + tl.arange(0, BLOCK_N)
    # Not masked by the length: without a window it does not wait for it.
    block = tl.load(table_ptr + key // BLOCK_SIZE, mask=key // BLOCK_SIZE < table_width, other=0)
    block = block.to(OFFSET)

    wait_for_inputs(OVERLAPS and SETTLED)
    # Fill the padding with zeros.
    if is_last_split:
        # Rows beyond the last sequence pad the batch: zero, so that nothing later sees a NaN.
        of_head = (offs_m < GROUP)[:, None] & in_row[None, :]
        for padding in range(used_rows + first_padding, num_rows, num_tiles):
            target = (head.to(tl.int64) + padding * (NUM_KV_HEADS * GROUP)) * HEAD_DIM
            nothing = tl.zeros([BLOCK_M, BLOCK_D], out_ptr.dtype.element_ty)
            tl.store(out_ptr + target[:, None] + offs_d[None, :], nothing, mask=of_head)
    if first_query >= num_queries:
        return

    # Locate the rows of the tile in the batch and in the output.
    query = first_query + offs_m // GROUP
    is_row = (offs_m < BLOCK_Q * GROUP) & (query < num_queries)
    mask = is_row[:, None] & in_row[None, :]
    position = num_cached + query
    if HAS_TREE:
        seen = tl.load(visible_ptr + query_start + query, mask=is_row, other=0)
        position = tl.load(positions_ptr + query_start + query, mask=is_row, other=0).to(tl.int32)
    row = ((query_start + query).to(tl.int64) * (NUM_KV_HEADS * GROUP)) + head
    out_tile = out_ptr + (row * HEAD_DIM)[:, None] + offs_d[None, :]

    # Write the new keys and values into the cache.
    if WRITE_ROWS:
        key_ptr += kv_head * stride_key_head
        value_ptr += kv_head * stride_value_head
        # No program reads these slots in this launch: any program may write them at any time.
        if is_last_split & (first_query == 0):
            _write_rows(
                key_ptr,
                value_ptr,
                slots_ptr,
                keys_ptr,
                values_ptr,
                key_factor,
                value_factor,
                stride_key_row,
                stride_value_row,
                stride_block,
                stride_slot,
                query_start,
                num_queries,
                HEAD_DIM=HEAD_DIM,
                BLOCK_SIZE=BLOCK_SIZE,
                BLOCK_D=BLOCK_D,
                ROWS=WRITE_ROWS,
                LIMIT=LIMIT,
            )
    # End here where this split has no keys.
    if IS_SPLIT:  # noqa: SIM102 (one is known when the kernel is compiled)
        if num_own == 0:
            if is_last_split & (num_active == 0):
                nothing = tl.zeros([BLOCK_M, BLOCK_D], out_ptr.dtype.element_ty)
                tl.store(out_tile, nothing, mask=mask)
            return

    # Load the queries.
    source = (query_start + query).to(tl.int64) * stride_query_row + head * stride_query_head
    q = tl.load(query_ptr + source[:, None] + offs_d[None, :], mask=mask, other=0.0)

    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    num_open = 0
    # Attend to the keys that all rows see.
    if OPEN_TILES:
        # Of a prompt most tiles of keys are visible to all rows of a tile.
        num_visible = tl.minimum(num_cached + first_query + 1, high) // BLOCK_N - first_keys
        num_open = tl.where(low % BLOCK_N == 0, tl.maximum(num_visible, 0), 0)
        for i in range(num_open):
            key = (first_keys + i) * BLOCK_N + tl.arange(0, BLOCK_N)
            slot = block * stride_block + key % BLOCK_SIZE * stride_slot
            if HEAD_DIM == BLOCK_D:
                k = tl.load(keys_ptr + slot[None, :] + offs_d[:, None])
                v = tl.load(values_ptr + slot[:, None] + offs_d[None, :])
            else:
                k = tl.load(keys_ptr + slot[None, :] + offs_d[:, None], in_row[:, None], 0.0)
                v = tl.load(values_ptr + slot[:, None] + offs_d[None, :], in_row[None, :], 0.0)
            ahead = key + BLOCK_N
            block = tl.load(table_ptr + ahead // BLOCK_SIZE, mask=ahead < high, other=0).to(OFFSET)
            scores = tl.dot(q, as_read(k, q.dtype), input_precision="ieee") * score_scale
            if HAS_SOFTCAP:
                scores = cap_scale * (1.0 - 2.0 / (tl.exp2(scores) + 1.0))  # tanh
            highest, total, acc = _add_tile(scores, v, highest, total, acc, q.dtype)
    # Attend to the other keys, masked.
    for i in range(num_open, num_own):
        key = (first_keys + i * step) * BLOCK_N + tl.arange(0, BLOCK_N)
        # Nothing else is loaded: unused and hidden slots may hold NaN, and 0 * NaN is NaN.
        is_key = (key >= low) & (key < high)
        slot = block * stride_block + key % BLOCK_SIZE * stride_slot
        if HEAD_DIM == BLOCK_D:
            keys_mask = is_key[None, :]
            values_mask = is_key[:, None]
        else:
            keys_mask = is_key[None, :] & in_row[:, None]
            values_mask = is_key[:, None] & in_row[None, :]
        # Load keys and values, the new ones from their rows.
        if WRITE_ROWS:
            # With or without a slot: to ask for it would be one more load to wait for.
            is_new = key >= num_cached
            any_new = (first_keys + i * step + 1) * BLOCK_N > num_cached
            from_row = (query_start + key - num_cached).to(tl.int64)
            k = _load_rows(
                (keys_ptr + slot)[None, :] + offs_d[:, None],
                (key_ptr + from_row * stride_key_row)[None, :] + offs_d[:, None],
                is_new[None, :],
                any_new,
                keys_mask,
                key_factor,
                q.dtype,
                LIMIT,
            )
            v = _load_rows(
                (values_ptr + slot)[:, None] + offs_d[None, :],
                (value_ptr + from_row * stride_value_row)[:, None] + offs_d[None, :],
                is_new[:, None],
                any_new,
                values_mask,
                value_factor,
                q.dtype,
                LIMIT,
            )
        else:
            k = tl.load(keys_ptr + slot[None, :] + offs_d[:, None], mask=keys_mask, other=0.0)
            v = tl.load(values_ptr + slot[:, None] + offs_d[None, :], mask=values_mask, other=0.0)

        # The next tile's blocks one step ahead, so that its keys need not wait for them.
        ahead = key + BLOCK_N * step
        block = tl.load(table_ptr + ahead // BLOCK_SIZE, mask=ahead < high, other=0).to(OFFSET)

        # Multiply and scale.
        scores = tl.dot(q, as_read(k, q.dtype), input_precision="ieee") * score_scale
        if HAS_SOFTCAP:
            scores = cap_scale * (1.0 - 2.0 / (tl.exp2(scores) + 1.0))  # tanh
        # Hide the keys that a row does not see.
        key_position = key
        if HAS_TREE:
            key_row = key - num_cached
            tree_row = key_row + rows_before
            bit = tl.minimum(tl.maximum(tree_row, 0), 63).to(tl.int64)
            on_path = (seen[:, None] >> bit[None, :]) & 1
            before = key_row[None, :] <= query[:, None]  # of a prompt, whose bits are all set
            visible = is_key[None, :] & ((tree_row < 0)[None, :] | ((on_path != 0) & before))
            if HAS_WINDOW:
                is_node = is_key & (key_row >= 0)
                node = tl.load(positions_ptr + query_start + key_row, mask=is_node, other=0)
                # No window hides the rows of earlier passes.
                context = tl.where(tree_row < 0, key, 2147483647 // 2)
                key_position = tl.where(is_node, node.to(tl.int32), context)
        else:
            visible = is_key[None, :] & (key[None, :] <= position[:, None])
        if HAS_WINDOW:
            visible = visible & (position[:, None] - key_position[None, :] < window)
        scores = tl.where(visible, scores, float("-inf"))
        highest, total, acc = _add_tile(scores, v, highest, total, acc, q.dtype)

    # Store the share of this split, and let the last split to arrive combine all shares.
    is_part = False
    if IS_SPLIT:
        is_part = num_active > 1
    if is_part:
        safe = tl.where(total > 0.0, total, 1.0)
        lse = tl.where(total > 0.0, highest + tl.log2(safe), float("-inf"))
        acc = acc * (value_scale / safe)[:, None]
        # All of a tile lies together: no other program touches its cache lines.
        lse_tile = lse_ptr + counter.to(tl.int64) * num_splits * BLOCK_M + offs_m
        partial_tile = partial_ptr + counter.to(tl.int64) * num_splits * (BLOCK_M * BLOCK_D)
        partial_tile += offs_m[:, None] * BLOCK_D + offs_d[None, :]
        tl.store(lse_tile + split * BLOCK_M, lse)
        tl.store(partial_tile + split * (BLOCK_M * BLOCK_D), acc)
        tl.debug_barrier()  # all threads have stored before one of them says so
        arrived = tl.atomic_add(arrivals_ptr + counter, 1, sem="acq_rel", scope="gpu")
        if arrived == num_active - 1:
            tl.store(arrivals_ptr + counter, 0)  # for the next launch
            acc = combine_tile(
                partial_tile,
                lse_tile,
                sinks_ptr,
                head,
                num_active,
                BLOCK_M=BLOCK_M,
                BLOCK_D=BLOCK_D,
                HAS_SINKS=HAS_SINKS,
                STAGES=COMBINE_STAGES,
            )
            tl.store(out_tile, acc.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        if HAS_SINKS:
            sink = tl.load(sinks_ptr + head, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
            base = tl.maximum(highest, sink)
            shrink = tl.exp2(highest - base)
            total = total * shrink + tl.exp2(sink - base)
            acc = acc * shrink[:, None]
        acc = acc * (value_scale / tl.where(total > 0.0, total, 1.0))[:, None]
        tl.store(out_tile, acc.to(out_ptr.dtype.element_ty), mask=mask)
