"""Paged attention in plain torch: the CPU's backend and the reference of every other one.

Shapes: T packed queries of B sequences, Q longest query, S longest context, Hq/Hkv heads, d size.
"""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from peagle.attention.base import AttentionMetadata, LayerKVCache, ScoreOptions
from peagle.attention.softmax import masked_attention


class TorchAttention:
    """Gathers each context from its blocks and attends once a layer."""

    def prepare(self, metadata: AttentionMetadata) -> TorchPreparedAttention:
        return TorchPreparedAttention(metadata)


class TorchPreparedAttention:
    """One pass over the paged cache. Masks and index maps are shared by all layers."""

    def __init__(self, metadata: AttentionMetadata) -> None:
        self.metadata = metadata
        self._masks: dict[int | None, Tensor | None] = {}
        self._context_blocks: Tensor | slice | None = None
        self._write_slots: Tensor | None = None
        start = metadata.query_start_loc
        self.num_sequences = start.shape[0] - 1
        num_tokens = metadata.slots_T.shape[0]
        self.is_uniform = num_tokens == self.num_sequences * metadata.max_query_len
        if not self.is_uniform:
            lens_B = start.diff()
            sequences_T = torch.repeat_interleave(lens_B, output_size=num_tokens)
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
        keys_NHd, values_NHd = cache.keys.flatten(0, 1), cache.values.flatten(0, 1)
        slots_T = self._slots_to_write(cache.block_size, keys_NHd.shape[0])
        keys_NHd.index_copy_(0, slots_T, key_THd)
        values_NHd.index_copy_(0, slots_T, value_THd)

        keys_BSHd, values_BSHd = self._context(cache.keys), self._context(cache.values)
        query_BQHd = self._pad(query_THd)
        out_BHQd = masked_attention(
            query_BQHd.transpose(1, 2),
            keys_BSHd.transpose(1, 2),
            values_BSHd.transpose(1, 2),
            self._mask(sliding_window),
            **options,
        )
        return self._unpad(out_BHQd.transpose(1, 2))

    def _slots_to_write(self, block_size: int, num_slots: int) -> Tensor:
        if self._write_slots is None:
            slots_T = self.metadata.slots_T
            scrap = num_slots - block_size  # the first slot of the scrap block
            self._write_slots = torch.where(slots_T < 0, scrap, slots_T)
        return self._write_slots

    def _context(self, cache_NSHd: Tensor) -> Tensor:
        """Keys or values of every context, [B, S, Hkv, d], from a cache of whole blocks."""
        blocks = self._blocks_to_read(cache_NSHd.shape[1])
        read_NSHd = cache_NSHd[blocks]
        context = read_NSHd.view(self.num_sequences, -1, *cache_NSHd.shape[2:])
        return context[:, : self.metadata.max_seq_len]

    def _blocks_to_read(self, block_size: int) -> Tensor | slice:
        """Blocks of every context, one after the other; a slice where that saves the copy."""
        if self._context_blocks is None:
            blocks_BM = self.metadata.block_tables_BM
            num_blocks = -(-self.metadata.max_seq_len // block_size)
            assert num_blocks <= blocks_BM.shape[1], "a context is longer than its blocks"
            # Sequences that run alone mostly own neighbouring blocks. (On a GPU asking would wait.)
            alone = self.num_sequences == 1 and blocks_BM.device.type == "cpu"
            if alone and bool((blocks_BM[:, :num_blocks].diff() == 1).all()):
                first = int(blocks_BM[0, 0])
                self._context_blocks = slice(first, first + num_blocks)
            else:
                self._context_blocks = blocks_BM[:, :num_blocks].flatten()
        return self._context_blocks

    def _mask(self, sliding_window: int | None) -> Tensor | None:
        """Boolean [B, 1, Q, S], true where a query may look; None where every key is visible."""
        if sliding_window is not None and sliding_window >= self.metadata.max_seq_len:
            sliding_window = None  # it hides nothing yet
        if sliding_window not in self._masks:
            self._masks[sliding_window] = self._make_mask(sliding_window)
        return self._masks[sliding_window]

    def _make_mask(self, sliding_window: int | None) -> Tensor | None:
        meta = self.metadata
        all_visible = sliding_window is None and meta.context_starts_B is None
        if self.num_sequences == 1 and meta.max_query_len == 1 and all_visible:
            return None
        device = meta.slots_T.device
        lens_B = meta.query_start_loc.diff()
        first_B = meta.seq_lens_B - lens_B
        query_pos_BQ = first_B.unsqueeze(1) + torch.arange(meta.max_query_len, device=device)
        key_pos_S = torch.arange(meta.max_seq_len, device=device)
        distance_BQS = query_pos_BQ.unsqueeze(-1) - key_pos_S
        visible_BQS = distance_BQS >= 0
        if sliding_window is not None:
            visible_BQS &= distance_BQS < sliding_window
        if meta.context_starts_B is not None:
            visible_BQS &= key_pos_S >= meta.context_starts_B.view(-1, 1, 1)
        return visible_BQS.unsqueeze(1)

    def _pad(self, rows_THd: Tensor) -> Tensor:
        shape = (self.num_sequences, self.metadata.max_query_len, *rows_THd.shape[1:])
        if self.is_uniform:
            return rows_THd.view(shape)
        padded = rows_THd.new_zeros(shape)
        padded.view(-1, *rows_THd.shape[1:])[self._padded_rows_T] = rows_THd
        return padded

    def _unpad(self, rows_BQHd: Tensor) -> Tensor:
        flat = rows_BQHd.flatten(0, 1)
        return flat if self.is_uniform else flat[self._padded_rows_T]


class DenseCausalAttention:
    """Causal attention of whole, right-padded sequences without a cache, as in training.

    The packed rows are `batch` sequences of equal length, one after the other; padding stands at
    the end, where causality hides it.
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
        length = query_THd.shape[0] // self.batch
        is_local = sliding_window is not None and sliding_window < length
        is_special = any(options.get(name) is not None for name in ("sinks", "softcap"))
        needs_mask = is_local or is_special
        # In float32 a GPU has no kernel for grouped heads but the one that keeps all scores.
        groups = query_THd.shape[1] // key_THd.shape[1]
        repeated = (x.repeat_interleave(groups, dim=1) for x in (key_THd, value_THd))
        out_BHTd = masked_attention(
            *(x.unflatten(0, (self.batch, length)).transpose(1, 2) for x in (query_THd, *repeated)),
            mask=self._mask(length, sliding_window, query_THd.device) if needs_mask else None,
            is_causal=not needs_mask,
            **options,
        )
        return out_BHTd.transpose(1, 2).flatten(0, 1)

    @staticmethod
    def _mask(length: int, sliding_window: int | None, device: torch.device) -> Tensor:
        position = torch.arange(length, device=device)
        distance = position.unsqueeze(1) - position
        return (distance >= 0) & (distance < (sliding_window or length))
