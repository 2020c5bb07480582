"""Paged attention in Triton: how the work is cut, and the launch of the kernels.

The reference in plain torch is `peagle.attention.torch_backend`.

Shapes: T packed query tokens of B sequences, Hq query heads, Hkv key/value heads, d head size,
N blocks of S slots, M blocks a sequence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from peagle.kernels.attention.kv_write import kernel_view
from peagle.kernels.launch import (
    MAX_ARRIVALS,
    DeviceLimits,
    arrivals,
    overlapping,
    power_of_two,
)

MAX_HEAD_DIM = 512
MAX_FLOAT32_HEAD_DIM = 256  # beyond, no tile of it fits the shared memory of small cards
MAX_SPLITS = 128
WAVES = 1  # programs of the grid per multiprocessor, about, where keys are split
# Most queries of a sequence in a verification; attention writes their keys and values itself.
MAX_WRITE_ROWS = 64
# Sequences among which a program of a ragged batch looks for its own, at least: batches of any
# number up to here share a kernel, which takes seconds to compile.
_MIN_SEARCHED_SEQUENCES = 128
# Shared memory for the partial results that the last program adds up: that of the keys' tiles.
_COMBINE_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The sizes and types that decide the launch of one layer; the length of a context does not.

    Attributes:
        num_sequences, num_tokens, max_query_len: sizes of the batch, padding included.
        num_heads, num_kv_heads, head_dim: sizes of the layer.
        query_dtype, cache_dtype: types of the layer.
    """

    num_sequences: int
    num_tokens: int
    max_query_len: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    query_dtype: torch.dtype
    cache_dtype: torch.dtype

    @property
    def group(self) -> int:
        """Return the number of query heads of a key/value head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True)
class PagedAttentionConfig:
    """How the work is cut.

    Attributes:
        block_m: rows of a tile, pairs of query and query head; a power of two from 16 on.
        block_n: keys of a tile; a power of two from 16 on.
        num_splits: programs that share the keys of one tile of rows.
        num_warps, num_stages: Triton's.
        few_splits, min_keys, many_keys: a short context has fewer splits. There are up to
            few_splits where each gets min_keys, and more where each gets many_keys.
    """

    block_m: int
    block_n: int
    num_splits: int
    num_warps: int
    num_stages: int
    few_splits: int = 8
    min_keys: int = 64
    many_keys: int = 128


@dataclass(frozen=True, slots=True)
class QueryTiles:
    """How the rows are cut into tiles: evenly, or for ragged batches as the lengths are.

    Attributes:
        count: tiles of all sequences.
        per_sequence: None where the device looks for the sequence of a tile.
    """

    count: int
    per_sequence: int | None

    @staticmethod
    def of(shape: AttentionShape, block_m: int) -> QueryTiles:
        """Choose the way with fewer tiles; with as many, the even way, because it is simpler."""
        queries = block_m // shape.group
        per_sequence = -(-shape.max_query_len // queries)
        even = shape.num_sequences * per_sequence
        ragged = shape.num_tokens // queries + shape.num_sequences
        return QueryTiles(even, per_sequence) if even <= ragged else QueryTiles(ragged, None)


@dataclass(frozen=True, slots=True)
class Workspace:
    """Partial results of the splits, of all layers of one shape in turn.

    Attributes:
        partial: float32 [R, d'], each split's own softmax. R is tiles * Hkv * splits * block_m and
            d' the head size up to a power of two.
        lse: float32 [R], base-2 logarithms of their weights.
    """

    partial: Tensor
    lse: Tensor

    @staticmethod
    def make(
        shape: AttentionShape, config: PagedAttentionConfig, device: torch.device
    ) -> Workspace | None:
        """Allocate the buffers of `paged_attention`; None where nothing is split."""
        if config.num_splits == 1:
            return None
        tiles = QueryTiles.of(shape, config.block_m).count
        rows = tiles * shape.num_kv_heads * config.block_m * config.num_splits
        return Workspace(
            torch.empty(rows, _block_d(shape.head_dim), dtype=torch.float32, device=device),
            torch.empty(rows, dtype=torch.float32, device=device),
        )


@dataclass(frozen=True, slots=True)
class NewKeyValues:
    """Keys and values of the queries' own positions, which `paged_attention` writes to the cache.

    Attributes:
        key_THd, value_THd: [T, Hkv, d], the last dimension contiguous.
        slots_T: as of `kv_write`; -1 in rows of no sequence. No other sequence looks into these
            slots in this pass. The queries see the keys of their pass with or without a slot.
    """

    key_THd: Tensor
    value_THd: Tensor
    slots_T: Tensor


def writes_new(shape: AttentionShape) -> bool:
    """Return whether attention can write the keys: a sequence has few queries."""
    return shape.max_query_len <= MAX_WRITE_ROWS


def choose_config(shape: AttentionShape, limits: DeviceLimits) -> PagedAttentionConfig:
    """Choose a configuration from the shape alone, so that it is the same for all contexts.

    Rows: all of a sequence, where they are few. Splits: as many as make about one program per
    multiprocessor, two where rows are many; a large batch or a long prompt has that many without.
    """
    is_float32 = shape.query_dtype == torch.float32
    is_verification = shape.max_query_len <= MAX_WRITE_ROWS
    block_d = _block_d(shape.head_dim)
    # float32 is multiplied without the matrix unit, out of registers.
    largest = 32 if is_float32 else 64 if is_verification or block_d > 128 else 128
    rows = shape.max_query_len * shape.group
    smallest = power_of_two(shape.group)
    block_m = max(16, power_of_two(min(rows, largest)), smallest)

    def num_programs(block_m: int) -> int:
        return QueryTiles.of(shape, block_m).count * shape.num_kv_heads

    has_many_rows = is_verification and rows > 32
    if has_many_rows:  # a sweep is in docs/lab/engine.md
        # Small tiles, where two programs can share the keys of each.
        while block_m > max(32, smallest) and 2 * num_programs(block_m // 2) <= limits.num_sms:
            block_m //= 2
    programs = num_programs(block_m)
    waves = 2 * WAVES if has_many_rows else WAVES
    num_splits = min(max(1, round(waves * limits.num_sms / programs)), MAX_SPLITS)
    if programs > limits.num_sms and block_m <= 32 and not is_float32 and block_d <= 128:
        # Many short programs: small ones, of which more fit a multiprocessor.
        return PagedAttentionConfig(block_m, 32, 1, num_warps=2, num_stages=3)

    itemsize = max(shape.query_dtype.itemsize, shape.cache_dtype.itemsize)

    def fits(block_n: int, num_stages: int) -> bool:
        elements = (2 * num_stages * block_n + block_m) * block_d
        return elements * itemsize <= limits.shared_bytes

    # Enough threads to keep the sums, and in float32 the operands, in registers.
    is_wide = block_m * block_d > 64 * 128 or block_d > 256 or (is_float32 and block_d > 128)
    block_n = 32 if is_float32 or block_d > 128 else 64
    if is_verification and itemsize == 2 and block_d <= 128:
        if block_m > 32:
            block_n = 32  # many rows leave few registers to keys
        elif num_splits == 1 and fits(128, 3):
            block_n = 128  # a program has its multiprocessor for itself
    num_stages = 3 if fits(block_n, 3) else 2
    while block_n > 16 and not fits(block_n, num_stages):
        block_n //= 2
    config = PagedAttentionConfig(block_m, block_n, num_splits, 8 if is_wide else 4, num_stages)
    if not has_many_rows:
        return config
    # The second wave is for contexts in which it has enough to do.
    return replace(config, few_splits=max(1, num_splits // 2), many_keys=512)


def paged_attention(
    query_THd: Tensor,
    keys_NSHd: Tensor,
    values_NSHd: Tensor,
    query_start_loc: Tensor,
    seq_lens_B: Tensor,
    block_tables_BM: Tensor,
    *,
    max_query_len: int,
    scaling: float,
    sliding_window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    context_starts_B: Tensor | None = None,
    visible_T: Tensor | None = None,
    positions_T: Tensor | None = None,
    rows_before: int = 0,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    config: PagedAttentionConfig | None = None,
    workspace: Workspace | None = None,
    new: NewKeyValues | None = None,
    settled: bool = False,
) -> Tensor:
    """softmax(q . k * scaling) v of every query over the keys of its sequence up to its position.

    Prefill, verification and decoding alike. A CUDA graph can hold it: it does not synchronise, and
    grid and memory depend on shapes and `max_query_len` alone. Float32 is computed in float32, not
    TF32; 16-bit types are multiplied as they are and summed in float32.

    Args:
        query_THd: [T, Hq, d], the last dimension contiguous.
        keys_NSHd, values_NSHd: cache of the layer, equal strides; without `new` this pass's keys
            are in it.
        query_start_loc: [B+1] first row of each sequence; rows beyond the last give zeros.
        seq_lens_B: context of each sequence, the queries being its end.
        block_tables_BM: blocks of each sequence.
        max_query_len: no sequence has more queries.
        scaling, sliding_window, sinks, softcap: as `peagle.attention.Prepared`.
        context_starts_B: first visible position of each context; None: 0.
        visible_T, positions_T, rows_before: as `peagle.attention.TreeMask`, where the queries of a
            sequence are a tree; None: they are a chain.
        key_scale, value_scale: factors on the cache's numbers.
        config: default `choose_config`.
        workspace: of `Workspace.make`, to be shared by layers; default a new one.
        new: keys and values to write first, where `writes_new`.
        settled: what says where keys are (`query_start_loc`, `seq_lens_B`, `block_tables_BM`,
            `context_starts_B`) is older than the last launch, which may still run.

    Returns:
        [T, Hq, d], contiguous; zero for queries that see nothing.
    """
    import triton.language as tl

    from peagle.kernels.attention import paged_attention_triton

    attend_kernel: Any = paged_attention_triton.attend_kernel

    num_tokens, num_heads, head_dim = query_THd.shape
    block_size, num_kv_heads = keys_NSHd.shape[1:3]
    assert keys_NSHd.stride() == values_NSHd.stride() and keys_NSHd.stride(3) == 1
    assert query_THd.stride(2) == block_tables_BM.stride(1) == 1
    assert num_heads % num_kv_heads == 0 and head_dim <= MAX_HEAD_DIM
    device = query_THd.device
    num_sequences = seq_lens_B.shape[0]
    shape = AttentionShape(
        num_sequences,
        num_tokens,
        max_query_len,
        num_heads,
        num_kv_heads,
        head_dim,
        query_THd.dtype,
        keys_NSHd.dtype,
    )
    config = config or choose_config(shape, DeviceLimits.of(device))
    assert config.block_m >= shape.group
    out_THd = torch.empty(query_THd.shape, dtype=query_THd.dtype, device=device)
    if num_tokens == 0:
        return out_THd
    is_split = config.num_splits > 1
    if is_split and workspace is None:
        workspace = Workspace.make(shape, config, device)
    # Where there is no split these two are not looked at.
    partial, lse = (workspace.partial, workspace.lse) if workspace else (out_THd, out_THd)
    is_8bit = keys_NSHd.dtype.itemsize == 1
    if new is not None:
        assert writes_new(shape)
        assert new.key_THd.stride(2) == new.value_THd.stride(2) == new.slots_T.stride(0) == 1
        assert is_8bit or new.key_THd.dtype == new.value_THd.dtype == keys_NSHd.dtype
        assert is_8bit or key_scale == value_scale == 1.0, "only an 8-bit cache is scaled"
    key_THd, value_THd = (new.key_THd, new.value_THd) if new else (query_THd, query_THd)

    log2_e = 1.0 / math.log(2.0)
    score_scale = scaling * key_scale * log2_e
    if softcap is not None:
        score_scale *= 2.0 / softcap
    block_d = _block_d(head_dim)
    # 32-bit offsets where they reach: a third fewer registers.
    last_element = sum((n - 1) * s for n, s in zip(keys_NSHd.shape, keys_NSHd.stride()))
    tiles = QueryTiles.of(shape, config.block_m)
    groups = tiles.count * num_kv_heads
    assert not is_split or groups <= MAX_ARRIVALS
    has_tree, has_window = visible_T is not None, sliding_window is not None
    # Ragged batches of any length share a kernel.
    is_ragged = tiles.per_sequence is None
    write_rows = MAX_WRITE_ROWS if is_ragged else power_of_two(max_query_len)
    attend_kernel[(groups * config.num_splits,)](
        out_THd,
        partial,
        lse,
        arrivals(device) if is_split else query_start_loc,
        query_THd,
        kernel_view(keys_NSHd),
        kernel_view(values_NSHd),
        key_THd,
        value_THd,
        new.slots_T if new else query_start_loc,
        query_start_loc,
        seq_lens_B,
        context_starts_B if context_starts_B is not None else seq_lens_B,
        visible_T if visible_T is not None else seq_lens_B,
        positions_T if positions_T is not None else seq_lens_B,
        block_tables_BM,
        sinks if sinks is not None else query_THd,
        score_scale,
        (softcap or 0.0) * log2_e,
        float(value_scale),
        1.0 / key_scale,
        1.0 / value_scale,
        *query_THd.stride()[:2],
        *keys_NSHd.stride()[:3],
        *key_THd.stride()[:2],
        *value_THd.stride()[:2],
        block_tables_BM.stride(0),
        block_tables_BM.shape[1],
        num_sequences,
        num_tokens,
        tiles.per_sequence or 1,
        config.num_splits,
        config.few_splits,
        sliding_window or 0,
        rows_before,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=shape.group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        OFFSET=tl.int32 if last_element < 2**31 else tl.int64,
        BLOCK_D=block_d,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        B2=max(_MIN_SEARCHED_SEQUENCES, power_of_two(num_sequences)) if is_ragged else 1,
        SEARCH=is_ragged,
        IS_SPLIT=is_split,
        COMBINE_STAGES=min(4, max(1, _COMBINE_BYTES // (config.block_m * block_d * 4))),
        MIN_KEYS=config.min_keys,
        MANY_KEYS=config.many_keys,
        WRITE_ROWS=write_rows if new else 0,
        LIMIT=torch.finfo(keys_NSHd.dtype).max if is_8bit else 0.0,
        OPEN_TILES=config.block_m > 32 and not (is_split or new or has_tree or has_window),
        HAS_WINDOW=has_window,
        HAS_STARTS=context_starts_B is not None,
        HAS_TREE=has_tree,
        HAS_SINKS=sinks is not None,
        HAS_SOFTCAP=softcap is not None,
        **overlapping(device),
        SETTLED=settled,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out_THd


def _block_d(head_dim: int) -> int:
    return max(16, power_of_two(head_dim))
