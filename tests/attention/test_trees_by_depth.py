"""A tree whose depths run in passes of their own gets the attention of one pass over all of it."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from peagle.attention import AttentionMetadata, LayerKVCache, TorchAttention, TreeMask

HEADS, KV_HEADS, SIZE, BLOCK = 4, 2, 64, 16
PAST, WIDTH, DEPTH = [37, 5, 0], 4, 3


def triton_attention() -> Any:
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("TRITON_INTERPRET is not 1")
    from peagle.attention.triton_backend import TritonAttention

    return TritonAttention()


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("make", [TorchAttention, triton_attention], ids=["torch", "triton"])
def test_each_depth_sees_the_rows_of_earlier_passes(
    make: Callable[[], Any], window: int | None
) -> None:
    """The window is longer than a path, and hides some of the context."""
    generator = torch.Generator().manual_seed(3)
    num_seqs, num_rows = len(PAST), WIDTH * DEPTH
    parents = torch.randint(WIDTH, (num_seqs, DEPTH, WIDTH), generator=generator)
    visible = torch.zeros(num_seqs, num_rows, dtype=torch.int64)
    for b in range(num_seqs):
        for row in range(num_rows):
            depth, i = divmod(row, WIDTH)
            before = visible[b, (depth - 1) * WIDTH + parents[b, depth, i]] if depth else 0
            visible[b, row] = before | 1 << row
    past_B = torch.tensor(PAST)
    positions = past_B.unsqueeze(1) + torch.arange(num_rows) // WIDTH
    blocks = -(-(max(PAST) + num_rows) // BLOCK)
    tables_BM = torch.randperm(num_seqs * blocks, generator=generator).view(num_seqs, blocks)
    places = past_B.unsqueeze(1) + torch.arange(num_rows)
    slots = tables_BM.gather(1, places // BLOCK) * BLOCK + places % BLOCK
    shape = num_seqs, num_rows, HEADS + 2 * KV_HEADS, SIZE
    qkv = torch.randn(shape, generator=generator)

    def attend(cache: LayerKVCache, first: int, last: int) -> torch.Tensor:
        """Run the rows from first to before last of every tree."""
        rows, count = slice(first, last), last - first
        metadata = AttentionMetadata(
            query_start_loc=torch.arange(num_seqs + 1) * count,
            seq_lens_B=past_B + last,
            block_tables_BM=tables_BM,
            slots_T=slots[:, rows].flatten(),
            max_query_len=count,
            max_seq_len=max(PAST) + last,
            tree=TreeMask(visible[:, rows].flatten(), positions[:, rows].flatten(), first),
        )
        parts = qkv[:, rows].flatten(0, 1).split((HEADS, KV_HEADS, KV_HEADS), 1)
        run = make().prepare(metadata)
        out = run(*parts, cache, scaling=0.3, sliding_window=window)
        return out.unflatten(0, (num_seqs, count))

    def new_cache() -> LayerKVCache:
        sizes = num_seqs * blocks, BLOCK, KV_HEADS, SIZE
        cache = LayerKVCache(*sizes, torch.float32, torch.device("cpu"))
        for x in (cache.keys, cache.values):
            x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(1)))
        return cache

    whole, cache = attend(new_cache(), 0, num_rows), new_cache()
    for depth in range(DEPTH):
        first, last = depth * WIDTH, (depth + 1) * WIDTH
        found = attend(cache, first, last)
        torch.testing.assert_close(found, whole[:, first:last], atol=1e-5, rtol=1e-5)
