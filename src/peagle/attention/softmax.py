"""softmax(q . k * scaling) v under a mask: torch's fused form where it can, else written out.

Shapes: B sequences, Hq query heads, Hkv key/value heads (Hq a multiple), Q queries, S keys, d size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


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
    """Attention of every query to the keys that `mask` shows it.

    Args:
        query_BHQd: [B, Hq, Q, d]; keys_BHSd, values_BHSd: [B, Hkv, S, d].
        mask: boolean, broadcast to [B, Hq, Q, S], true where a query may look; None shows all.
        scaling, sinks, softcap: as `Prepared`.
        is_causal: in place of a mask where Q = S, without sinks and softcap: faster.

    Returns:
        [B, Hq, Q, d].
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
    return _written_out(query_BHQd, keys_BHSd, values_BHSd, mask, scaling, sinks, softcap)


def _written_out(
    query_BHQd: Tensor,
    keys_BHSd: Tensor,
    values_BHSd: Tensor,
    mask: Tensor | None,
    scaling: float,
    sinks: Tensor | None,
    softcap: float | None,
) -> Tensor:
    """scaled_dot_product_attention knows neither sinks nor softcap. In float32 at least."""
    dtype = torch.promote_types(query_BHQd.dtype, torch.float32)
    shape = (*query_BHQd.shape[:-1], keys_BHSd.shape[2])
    # The query heads that share a key head stand below each other, so that no key is copied.
    query_BHGd = query_BHQd.to(dtype).reshape(*keys_BHSd.shape[:2], -1, query_BHQd.shape[-1])
    scores_BHQS = (query_BHGd @ keys_BHSd.to(dtype).mT * scaling).view(shape)
    if softcap is not None:
        scores_BHQS = torch.tanh(scores_BHQS / softcap) * softcap
    if mask is not None:
        scores_BHQS = scores_BHQS.masked_fill(~mask, -torch.inf)
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
