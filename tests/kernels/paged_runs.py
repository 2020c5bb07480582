"""`paged_attention` over a `PagedCase`, on the devices that there are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from peagle.attention import LayerKVCache
from peagle.kernels.paged_attention import NewKeyValues, PagedAttentionConfig, paged_attention
from tests.attention.paged_cases import SCALING, PagedCase

HALF = {"cpu": torch.float16, "cuda": torch.bfloat16}


def config(
    block_m: int = 16, block_n: int = 16, num_splits: int = 1, num_warps: int = 4, **how: Any
) -> PagedAttentionConfig:
    return PagedAttentionConfig(block_m, block_n, num_splits, num_warps, num_stages=2, **how)


def attend(
    case: PagedCase,
    chosen: PagedAttentionConfig | None,
    window: int | None = None,
    lens: list[int] | None = None,
    *,
    cache: LayerKVCache | None = None,
    slots_T: Tensor | None = None,
    **special: Any,
) -> Tensor:
    """Over a cache that holds all keys; or with `cache`, which lacks those of `slots_T`, or of all
    new tokens, writes them.
    """
    meta = case.metadata()
    seq_lens_B = meta.seq_lens_B if lens is None else meta.seq_lens_B.new_tensor(lens)
    new = None
    if cache is not None:
        rows = (case.padded(x) for x in case.new_kv())
        new = NewKeyValues(*rows, meta.slots_T if slots_T is None else slots_T)
    cache = cache or case.make_cache(with_new=True)
    return paged_attention(
        case.padded(case.query_THd),
        cache.keys,
        cache.values,
        meta.query_start_loc,
        seq_lens_B,
        meta.block_tables_BM,
        max_query_len=meta.max_query_len,
        scaling=SCALING,
        sliding_window=window,
        context_starts_B=meta.context_starts_B,
        key_scale=case.key_scale,
        value_scale=case.value_scale,
        config=chosen,
        new=new,
        **special,
    )
