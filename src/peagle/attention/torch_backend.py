"""Attention in plain torch: paged for the CPU and as every kernel's reference, dense for training.

Shapes: T packed queries of B sequences, Q longest query, S longest context, Hq query heads, Hkv
key/value heads (Hq is a multiple), d head size; rows of N positions in training.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.attention.base import (
    AttentionMetadata,
    LayerKVCache,
    ScoreOptions,
    TreeMask,
    as_bytes,
    as_stored,
)

# A document that is longer on average gets a launch of its own, which computes nothing across
# borders; shorter ones share a masked launch.
_MIN_LAUNCH_KEYS = 512


class TorchAttention:
    """Gathers each context from its blocks and attends once a layer."""

    def prepare(self, metadata: AttentionMetadata) -> TorchPreparedAttention:
        return TorchPreparedAttention(metadata)


class TorchPreparedAttention:
    """One pass over the paged cache. All layers share masks and index maps."""

    def __init__(self, metadata: AttentionMetadata) -> None:
        self.metadata = metadata
        self._masks: dict[tuple[int | None, torch.dtype], Tensor | None] = {}
        self._context_blocks: Tensor | slice | None = None
        self._write_slots_T: Tensor | None = None
        start = metadata.query_start_loc
        self._num_sequences = start.shape[0] - 1
        num_tokens = metadata.slots_T.shape[0]
        self._padded_rows_T: Tensor | None = None  # None: all queries have the same length
        if num_tokens != self._num_sequences * metadata.max_query_len:
            sequences_T = torch.repeat_interleave(start.diff(), output_size=num_tokens)
            offset_T = torch.arange(num_tokens, device=start.device) - start[sequences_T]
            self._padded_rows_T = sequences_T * metadata.max_query_len + offset_T

    def __call__(
        self,
        query_THd: Tensor,
        key_THd: Tensor,
        value_THd: Tensor,
        cache: LayerKVCache | None,
        *,
        sliding_window: int | None = None,
        **options: Unpack[ScoreOptions],
    ) -> Tensor:
        assert cache is not None, "paged attention needs the layer's cache"
        self.write(key_THd, value_THd, cache)
        options["scaling"] *= cache.key_scale
        out_BHQd = masked_attention(
            self._pad(query_THd).transpose(1, 2),
            self._context(cache.keys).to(query_THd.dtype).transpose(1, 2),
            self._context(cache.values).to(query_THd.dtype).transpose(1, 2),
            self._mask(sliding_window, query_THd.dtype),
            **options,
        )
        out = out_BHQd.transpose(1, 2).flatten(0, 1)
        out = out if self._padded_rows_T is None else out[self._padded_rows_T]
        return out if cache.value_scale == 1.0 else out * cache.value_scale

    def write(self, key_THd: Tensor, value_THd: Tensor, cache: LayerKVCache) -> None:
        """Write a layer's new keys and values to its cache; slots below 0 go to the scrap block."""
        if self._write_slots_T is None:
            slots_T = self.metadata.slots_T
            scrap = (cache.keys.shape[0] - 1) * cache.block_size  # the scrap block's first slot
            self._write_slots_T = torch.where(slots_T < 0, scrap, slots_T)
        self._write(key_THd, cache.keys, cache.key_scale)
        self._write(value_THd, cache.values, cache.value_scale)

    def _write(self, rows_THd: Tensor, cache_NSHd: Tensor, scale: float) -> None:
        stored_THd = as_stored(rows_THd, cache_NSHd.dtype, scale)
        assert self._write_slots_T is not None
        as_bytes(cache_NSHd).flatten(0, 1).index_copy_(0, self._write_slots_T, as_bytes(stored_THd))

    def _context(self, cache_NSHd: Tensor) -> Tensor:
        """Return keys or values of every context, [B, S, Hkv, d], from a cache of whole blocks."""
        read_NSHd = as_bytes(cache_NSHd)[self._blocks_to_read(cache_NSHd.shape[1])]
        context = read_NSHd.view(self._num_sequences, -1, *cache_NSHd.shape[2:])
        return context[:, : self.metadata.max_seq_len].view(cache_NSHd.dtype)

    def _blocks_to_read(self, block_size: int) -> Tensor | slice:
        """Return the blocks of every context in a row; as a slice where that saves the copy."""
        if self._context_blocks is None:
            blocks_BM = self.metadata.block_tables_BM
            num_blocks = -(-self.metadata.max_seq_len // block_size)
            assert num_blocks <= blocks_BM.shape[1], "a context is longer than its blocks"
            # Sequences that run alone mostly own neighbouring blocks. (On a GPU asking would wait.)
            alone = self._num_sequences == 1 and blocks_BM.device.type == "cpu"
            if alone and bool((blocks_BM[:, :num_blocks].diff() == 1).all()):
                first = int(blocks_BM[0, 0])
                self._context_blocks = slice(first, first + num_blocks)
            else:
                self._context_blocks = blocks_BM[:, :num_blocks].flatten()
        return self._context_blocks

    def _mask(self, sliding_window: int | None, dtype: torch.dtype) -> Tensor | None:
        """Return the mask to add to the scores, [B, 1, Q, S]: 0 where a query may look, else -inf.

        None if every key is visible. The mask is kept for later layers; from a boolean mask torch
        would make this one again in each layer.
        """
        if sliding_window is not None and sliding_window >= self.metadata.max_seq_len:
            sliding_window = None  # it hides nothing yet
        key = sliding_window, dtype
        if key not in self._masks:
            visible, mask = self._make_mask(sliding_window), None
            if visible is not None:
                mask = torch.full_like(visible, -torch.inf, dtype=dtype).masked_fill_(visible, 0)
            self._masks[key] = mask
        return self._masks[key]

    def _make_mask(self, sliding_window: int | None) -> Tensor | None:
        meta = self.metadata
        all_visible = sliding_window is None and meta.context_starts_B is None
        if self._num_sequences == 1 and meta.max_query_len == 1 and all_visible:
            return None
        device = meta.slots_T.device
        first_B = meta.seq_lens_B - meta.query_start_loc.diff()
        query_pos_BQ = first_B.unsqueeze(1) + torch.arange(meta.max_query_len, device=device)
        key_pos_S = torch.arange(meta.max_seq_len, device=device)
        if meta.tree is not None:
            visible_BQS = self._see_path(
                meta.tree, key_pos_S - first_B.unsqueeze(1), sliding_window
            )
        else:
            visible_BQS = _is_near(query_pos_BQ.unsqueeze(-1) - key_pos_S, sliding_window)
        if meta.context_starts_B is not None:
            visible_BQS &= key_pos_S >= meta.context_starts_B.view(-1, 1, 1)
        return visible_BQS.unsqueeze(1)

    def _see_path(self, tree: TreeMask, key_rows_BS: Tensor, sliding_window: int | None) -> Tensor:
        """Return whether a query sees a key, bool [B, Q, S].

        Args:
            key_rows_BS: row of each key in this pass, below 0 in the context before it.
        """
        words_BQ, query_pos_BQ = (self._pad(x_T) for x_T in (tree.visible_T, tree.positions_T))
        num_queries, before = words_BQ.shape[1], tree.rows_before
        row_BS = key_rows_BS.clamp(-before, num_queries - 1)
        bit_BS = (row_BS + before).clamp_max(63)
        bits_BQS = (words_BQ.unsqueeze(-1) >> bit_BS.unsqueeze(1)).bitwise_and(1).bool()
        # Of a prompt, whose bits are all set, a row sees no later one.
        query_row_Q1 = torch.arange(num_queries, device=row_BS.device).unsqueeze(1)
        bits_BQS &= row_BS.unsqueeze(1) <= query_row_Q1
        # Keys beyond the rows of a sequence stand for none.
        bits_BQS &= (key_rows_BS == row_BS).unsqueeze(1)
        in_context_BS = key_rows_BS < -before
        visible_BQS = bits_BQS | in_context_BS.unsqueeze(1)
        if sliding_window is None:
            return visible_BQS
        context_pos_BS = torch.arange(row_BS.shape[1], device=row_BS.device).expand_as(row_BS)
        in_pass_BS, own_BS = key_rows_BS >= 0, row_BS.clamp_min(0)
        key_pos_BS = torch.where(in_pass_BS, query_pos_BQ.gather(1, own_BS), context_pos_BS)
        distance_BQS = query_pos_BQ.unsqueeze(-1) - key_pos_BS.unsqueeze(1)
        is_earlier_BS = ~(in_context_BS | in_pass_BS)
        return visible_BQS & ((distance_BQS < sliding_window) | is_earlier_BS.unsqueeze(1))

    def _pad(self, rows_THd: Tensor) -> Tensor:
        shape = (self._num_sequences, self.metadata.max_query_len, *rows_THd.shape[1:])
        if self._padded_rows_T is None:
            return rows_THd.view(shape)
        padded = rows_THd.new_zeros(shape)
        padded.view(-1, *rows_THd.shape[1:])[self._padded_rows_T] = rows_THd
        return padded


class DenseCausalAttention:
    """Causal attention of `batch` right-padded sequences of equal length, without a cache.

    Causality hides the padding, which stands at the end. A layer's cache is not touched; if its
    type has 8 bits, keys and values are rounded as it would round them.
    """

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def __call__(
        self,
        query_THd: Tensor,
        key_THd: Tensor,
        value_THd: Tensor,
        cache: LayerKVCache | None,
        *,
        sliding_window: int | None = None,
        **options: Unpack[ScoreOptions],
    ) -> Tensor:
        if cache is not None:
            key_THd, value_THd = rounded(key_THd, value_THd, cache)
        length = query_THd.shape[0] // self.batch
        is_local = sliding_window is not None and sliding_window < length
        mask = None
        if is_local or any(options.get(name) is not None for name in ("sinks", "softcap")):
            mask = _is_near(_distances(length, query_THd.device), sliding_window)
        return _attend_rows(query_THd, key_THd, value_THd, self.batch, mask, **options)


class DocumentAttention:
    """Causal attention of the documents of packed rows; the rows of padding mean nothing.

    Keys and values are rounded as by `DenseCausalAttention`.

    Args:
        documents_BN: document of each position, -1 where padded.
        spans: (row, start, length) of every document.
    """

    def __init__(self, documents_BN: Tensor, spans: Sequence[tuple[int, int, int]]) -> None:
        self.documents_BN = documents_BN
        rows, self.length = documents_BN.shape
        self.spans = [(row * self.length + start, length) for row, start, length in spans]
        # Right-padded rows of one document need no borders.
        alone = len(spans) == rows and not any(start for _, start, _ in spans)
        self._whole_rows = DenseCausalAttention(rows) if alone else None
        self._masks: dict[int, Tensor] = {}

    def __call__(
        self,
        query_THd: Tensor,
        key_THd: Tensor,
        value_THd: Tensor,
        cache: LayerKVCache | None,
        *,
        sliding_window: int | None = None,
        **options: Unpack[ScoreOptions],
    ) -> Tensor:
        """Attention of every position to its document up to itself, [T, Hq, d]."""
        if cache is not None:
            key_THd, value_THd = rounded(key_THd, value_THd, cache)
            cache = None
        if self._whole_rows is not None:
            return self._whole_rows(
                query_THd, key_THd, value_THd, cache, sliding_window=sliding_window, **options
            )
        if sum(size for _, size in self.spans) >= _MIN_LAUNCH_KEYS * len(self.spans):
            out_THd = torch.zeros_like(query_THd)
            one = DenseCausalAttention(1)
            for start, size in self.spans:
                at = slice(start, start + size)
                parts = (query_THd[at], key_THd[at], value_THd[at])
                out_THd[at] = one(*parts, cache, sliding_window=sliding_window, **options)
            return out_THd
        window = min(sliding_window or self.length, self.length)
        if window not in self._masks:
            near = _is_near(_distances(self.length, self.documents_BN.device), window)
            same = self.documents_BN.unsqueeze(2) == self.documents_BN.unsqueeze(1)
            self._masks[window] = (near & same).unsqueeze(1)
        rows, mask = len(self.documents_BN), self._masks[window]
        return _attend_rows(query_THd, key_THd, value_THd, rows, mask, **options)


def rounded(key_THd: Tensor, value_THd: Tensor, cache: LayerKVCache) -> tuple[Tensor, Tensor]:
    """Return keys and values as a cache would give them back; only one of 8 bits rounds them."""
    pairs = ((key_THd, cache.key_scale), (value_THd, cache.value_scale))
    dtype = cache.keys.dtype
    if dtype.itemsize > 1:
        return key_THd, value_THd
    key_THd, value_THd = (as_stored(x, dtype, s).to(x.dtype) * s for x, s in pairs)
    return key_THd, value_THd


def _distances(length: int, device: torch.device) -> Tensor:
    position = torch.arange(length, device=device)
    return position.unsqueeze(1) - position


def _is_near(distance: Tensor, sliding_window: int | None) -> Tensor:
    """Return where keys that stand `distance` positions before their query are visible, bool."""
    visible = distance >= 0
    return visible if sliding_window is None else visible & (distance < sliding_window)


def _attend_rows(
    query_THd: Tensor,
    key_THd: Tensor,
    value_THd: Tensor,
    rows: int,
    mask: Tensor | None,
    **options: Unpack[ScoreOptions],
) -> Tensor:
    """Attend within rows of equal length, causally if `mask` is None."""
    # In float32 a GPU has no kernel for grouped heads but the one that keeps all scores.
    groups = query_THd.shape[1] // key_THd.shape[1]
    repeated = (x.repeat_interleave(groups, dim=1) for x in (key_THd, value_THd))
    out_BHNd = masked_attention(
        *(x.unflatten(0, (rows, -1)).transpose(1, 2) for x in (query_THd, *repeated)),
        mask=mask,
        is_causal=mask is None,
        **options,
    )
    return out_BHNd.transpose(1, 2).flatten(0, 1)


def masked_attention(
    query_BHQd: Tensor,
    keys_BHSd: Tensor,
    values_BHSd: Tensor,
    mask: Tensor | None,
    *,
    scaling: float,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    is_causal: bool = False,
) -> Tensor:
    """softmax(q . k * scaling) v under a mask, [B, Hq, Q, d]; by torch's fused kernel where it can.

    Args:
        query_BHQd: [B, Hq, Q, d]; keys_BHSd, values_BHSd: [B, Hkv, S, d].
        mask: broadcast to [B, Hq, Q, S], true or the number 0 where a query may look, else false or
            -inf; None shows all.
        scaling, sinks, softcap: as `ScoreOptions`.
        is_causal: in place of a mask where Q = S, without sinks and softcap: faster.
    """
    if sinks is None and softcap is None:
        return F.scaled_dot_product_attention(
            query_BHQd,
            keys_BHSd,
            values_BHSd,
            attn_mask=mask,
            is_causal=is_causal,
            scale=scaling,
            enable_gqa=query_BHQd.shape[1] != keys_BHSd.shape[1],
        )
    assert not is_causal, "what torch does not fuse needs the mask"
    dtype = torch.promote_types(query_BHQd.dtype, torch.float32)
    shape = (*query_BHQd.shape[:-1], keys_BHSd.shape[2])
    # The query heads that share a key head stand below each other, so that no key is copied.
    query_BHGd = query_BHQd.to(dtype).reshape(*keys_BHSd.shape[:2], -1, query_BHQd.shape[-1])
    scores_BHQS = (query_BHGd @ keys_BHSd.to(dtype).mT * scaling).view(shape)
    if softcap is not None:
        scores_BHQS = torch.tanh(scores_BHQS / softcap) * softcap
    if mask is not None:
        visible = mask if mask.dtype == torch.bool else mask == 0
        scores_BHQS = scores_BHQS.masked_fill(~visible, -torch.inf)
    highest = scores_BHQS.amax(-1, keepdim=True)
    if sinks is not None:
        sinks = sinks.to(dtype).view(-1, 1, 1)
        highest = torch.maximum(highest, sinks)
    weights_BHQS = torch.exp(scores_BHQS - highest)
    total = weights_BHQS.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks - highest)
    weights_BHGS = (weights_BHQS / total).view(*query_BHGd.shape[:-1], -1)
    out_BHGd = weights_BHGS @ values_BHSd.to(dtype)
    return out_BHGd.view(query_BHQd.shape).to(query_BHQd.dtype)
