"""Causal attention within the documents of packed rows, without a cache, as in training.

Shapes: B rows, N positions of a row, T = B * N, H heads, d head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import torch
from torch import Tensor

from peagle.attention.base import LayerKVCache, ScoreOptions
from peagle.attention.softmax import masked_attention
from peagle.attention.torch_backend import DenseCausalAttention

# Documents that are longer on average each get a launch of their own, which computes nothing across
# borders; shorter ones share a masked launch.
_WORTH_A_LAUNCH = 512


class DocumentAttention:
    """Causal attention of the documents of packed rows; the rows of padding mean nothing.

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
        if self._whole_rows is not None:
            return self._whole_rows(
                query_THd, key_THd, value_THd, cache, sliding_window=sliding_window, **options
            )
        if sum(size for _, size in self.spans) >= _WORTH_A_LAUNCH * len(self.spans):
            out_THd = torch.zeros_like(query_THd)
            one = DenseCausalAttention(1)
            for start, size in self.spans:
                at = slice(start, start + size)
                parts = (query_THd[at], key_THd[at], value_THd[at])
                out_THd[at] = one(*parts, cache, sliding_window=sliding_window, **options)
            return out_THd
        rows = len(self.documents_BN)
        groups = query_THd.shape[1] // key_THd.shape[1]
        repeated = (x.repeat_interleave(groups, dim=1) for x in (key_THd, value_THd))
        out_BHNd = masked_attention(
            *(x.unflatten(0, (rows, -1)).transpose(1, 2) for x in (query_THd, *repeated)),
            mask=self._mask(sliding_window),
            **options,
        )
        return out_BHNd.transpose(1, 2).flatten(0, 1)

    def _mask(self, sliding_window: int | None) -> Tensor:
        """Bool [B, 1, N, N], true where a position may look."""
        window = min(sliding_window or self.length, self.length)
        if window not in self._masks:
            position = torch.arange(self.length, device=self.documents_BN.device)
            distance = position.unsqueeze(1) - position
            near = (distance >= 0) & (distance < window)
            same = self.documents_BN.unsqueeze(2) == self.documents_BN.unsqueeze(1)
            self._masks[window] = (near & same).unsqueeze(1)
        return self._masks[window]
