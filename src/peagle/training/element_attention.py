"""Attention among elements under the rule of `models.elements`: dense (reference) or FlexAttention.

Shapes: B rows, Eq query and Ek key elements, Hq/Hkv heads, d head size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.models.elements import Elements, attention_mask, may_attend

ElementAttention = Callable[[Tensor, Tensor, Tensor], Tensor]


def dense_attention(queries: Elements, keys: Elements) -> ElementAttention:
    """Attention of [B, E, H, d] tensors through an explicit mask."""
    mask = attention_mask(queries, keys)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        # With a mask, grouped heads would fall back to the kernel that keeps all scores.
        groups = query.shape[2] // key.shape[2]
        keys, values = (x.repeat_interleave(groups, dim=2) for x in (key, value))
        out = F.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (query, keys, values)), attn_mask=mask
        )
        return out.transpose(1, 2)

    return attend


def flex_attention(queries: Elements, keys: Elements) -> ElementAttention:
    """The same without a mask in memory: FlexAttention skips the blocks that nobody sees.

    GPU only; compiled at first use for each shape.
    """
    q, k = queries, keys

    def rule(row: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return may_attend(
            q.anchors[row, i],
            q.depths[row, i],
            q.documents[row, i],
            k.anchors[row, j],
            k.depths[row, j],
            k.documents[row, j],
        )

    make_mask, run = _compiled()
    rows, num_queries = q.anchors.shape
    blocks = make_mask(rule, rows, None, num_queries, k.anchors.shape[1], device=q.anchors.device)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = run(
            *(x.transpose(1, 2).contiguous() for x in (query, key, value)),
            block_mask=blocks,
            enable_gqa=query.shape[2] != key.shape[2],
        )
        return out.transpose(1, 2)

    return attend


@cache
def _compiled() -> tuple[Any, Any]:
    from torch.nn.attention.flex_attention import create_block_mask
    from torch.nn.attention.flex_attention import flex_attention as flex

    # One compilation a padded length, for training and for validation; the limit's fallback is an
    # implementation that keeps all scores.
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    return torch.compile(create_block_mask), torch.compile(flex, dynamic=False)
