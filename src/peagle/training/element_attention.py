"""Attention among elements under the rule of `models.elements`: dense, causal or FlexAttention.

Shapes: B rows, Eq query and Ek key elements, Hq/Hkv heads, d head size; Q and K blocks of 128
elements.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from peagle.models.elements import Elements, attention_mask, may_attend

BLOCK = 128
_FASTEST_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
ElementAttention = Callable[[Tensor, Tensor, Tensor], Tensor]


def dense_attention(
    queries: Elements, keys: Elements, blocks: BlockTable | None = None
) -> ElementAttention:
    """Return attention of [B, E, H, d] tensors through an explicit mask."""
    mask = attention_mask(queries, keys)
    return lambda query, key, value: _with_all_heads(query, key, value, mask=mask)


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend causally: the rule at depth 0 of rows with one document each.

    Padding is at the end, where no counted element sees it.
    """
    if not query.is_cuda or query.dtype not in (torch.bfloat16, torch.float16):
        return _with_all_heads(query, key, value, mask=None)
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    # On a Hopper GPU cuDNN's kernel takes little more than half of FlashAttention-2's time.
    with sdpa_kernel(_FASTEST_FIRST, set_priority=True):
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2)


def _with_all_heads(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Attend, causally without a mask.

    Grouped heads would fall back to the kernel that keeps all scores, so keys and values are
    repeated.
    """
    groups = query.shape[2] // key.shape[2]
    key, value = (x.repeat_interleave(groups, dim=2) for x in (key, value))
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None)
    return out.transpose(1, 2)


def flex_attention(
    queries: Elements, keys: Elements, blocks: BlockTable | None = None
) -> ElementAttention:
    """Return the same attention without a mask: FlexAttention skips blocks that no query sees.

    GPU only; compiled at first use for each shape.
    """
    mask = (blocks or BlockTable.of(queries, keys)).mask(queries, keys)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = _compiled_flex()(
            *(x.transpose(1, 2) for x in (query, key, value)),
            block_mask=mask,
            enable_gqa=query.shape[2] != key.shape[2],
        )
        return out.transpose(1, 2)

    return attend


@dataclass(frozen=True, slots=True)
class BlockTable:
    """The pairs of blocks of 128 elements that attend, as FlexAttention lists them.

    torch's own `create_block_mask` evaluates the rule for every pair of elements; here it is
    decided for pairs of blocks, from the ranges of anchors and documents in them. A block that is
    called partial for caution costs time, not exactness: the rule is applied inside. Made on the
    host, ahead of the step, it costs the GPU nothing.

    Attributes:
        partial_keys, full_keys: per query block, how many key blocks and which.
        partial_queries, full_queries: per key block, how many query blocks and which.
    """

    partial_keys: tuple[Tensor, Tensor]
    full_keys: tuple[Tensor, Tensor]
    partial_queries: tuple[Tensor, Tensor]
    full_queries: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, queries: Elements, keys: Elements) -> BlockTable:
        """Classify the blocks."""
        full, partial = _classify(queries, keys)
        tables = (_listed(x) for x in (partial, full, partial.mT, full.mT))
        return cls(*tables)

    def mask(self, queries: Elements, keys: Elements) -> Any:
        """Return FlexAttention's `BlockMask`, on the device of table and elements."""
        from torch.nn.attention.flex_attention import BlockMask

        q, k = (
            Elements(x.anchors.int(), x.depths.int(), x.documents.int(), x.supervised)
            for x in (queries, keys)
        )

        def rule(row: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return may_attend(
                q.anchors[row, i],
                q.depths[row, i],
                q.documents[row, i],
                k.anchors[row, j],
                k.depths[row, j],
                k.documents[row, j],
            )

        return BlockMask(
            seq_lengths=(q.anchors.shape[1], k.anchors.shape[1]),
            kv_num_blocks=self.partial_keys[0],
            kv_indices=self.partial_keys[1],
            full_kv_num_blocks=self.full_keys[0],
            full_kv_indices=self.full_keys[1],
            q_num_blocks=self.partial_queries[0],
            q_indices=self.partial_queries[1],
            full_q_num_blocks=self.full_queries[0],
            full_q_indices=self.full_queries[1],
            BLOCK_SIZE=(BLOCK, BLOCK),
            mask_mod=rule,
        )


@dataclass(frozen=True, slots=True)
class _Ranges:
    """The ranges of each block of elements, all [B, blocks]; padding of the last block is left out.

    Attributes:
        low, high: least and greatest anchor.
        context_low: least anchor of depth 0; larger than every anchor in a block without depth 0.
        chain_low, chain_high: range of the deeper elements; empty in a block without them.
        first, last: least and greatest document.
        only_context: nothing deeper than 0.
        whole: no document is padding, and the block is not cut short by the end.
    """

    low: Tensor
    high: Tensor
    context_low: Tensor
    chain_low: Tensor
    chain_high: Tensor
    first: Tensor
    last: Tensor
    only_context: Tensor
    whole: Tensor

    @classmethod
    def of(cls, elements: Elements, *, unsqueeze: int) -> _Ranges:
        """Return the ranges of the elements' blocks, with a dimension of 1 to compare them."""
        top = torch.iinfo(torch.int32).max
        anchors, is_deep = elements.anchors, elements.depths > 0
        first, last = _least(elements.documents), _greatest(elements.documents)
        ends = _least(torch.ones_like(anchors), beyond=0) == 0
        ranges = (
            _least(anchors),
            _greatest(anchors),
            _least(anchors.masked_fill(is_deep, top)),
            _least(anchors.masked_fill(~is_deep, top)),
            _greatest(anchors.masked_fill(~is_deep, -1)),
            first,
            last,
            _greatest(is_deep.int()) <= 0,
            (first >= 0) & ~ends,
        )
        return cls(*(x.unsqueeze(unsqueeze) for x in ranges))


def _classify(queries: Elements, keys: Elements) -> tuple[Tensor, Tensor]:
    """Return bool [B, Q, K] twice: every pair of elements may attend; some pairs might."""
    q, k = _Ranges.of(queries, unsqueeze=2), _Ranges.of(keys, unsqueeze=1)
    one_document = (q.first == k.first) & (q.last == k.last) & (q.first == q.last)
    full = one_document & (k.high <= q.low) & k.only_context & k.whole & q.whole
    shared = (q.first <= k.last) & (k.first <= q.last)
    chain = (k.chain_low <= q.high) & (q.low <= k.chain_high)
    return full, shared & ((k.context_low <= q.high) | chain) & ~full


def _least(x_BE: Tensor, beyond: int = torch.iinfo(torch.int32).max) -> Tensor:
    return _blocks(x_BE, beyond).amin(-1)


def _greatest(x_BE: Tensor) -> Tensor:
    return _blocks(x_BE, -1).amax(-1)


def _blocks(x_BE: Tensor, beyond: int) -> Tensor:
    """Return [B, blocks, 128], the last block filled with a value that the reduction ignores."""
    missing = -x_BE.shape[1] % BLOCK
    return F.pad(x_BE, (0, missing), value=beyond).unflatten(1, (-1, BLOCK))


def _listed(wanted_BQK: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many blocks each query block reads, [B, 1, Q], and all blocks, these first."""
    order = wanted_BQK.int().argsort(dim=-1, descending=True, stable=True)
    counts, indices = wanted_BQK.sum(-1, dtype=torch.int32), order.to(torch.int32)
    return counts.unsqueeze(1).contiguous(), indices.unsqueeze(1).contiguous()


@cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention as flex

    # One compilation a shape; the limit's fallback is an implementation that keeps all scores.
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    return torch.compile(flex, dynamic=False)
