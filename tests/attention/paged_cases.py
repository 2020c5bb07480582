"""Random paged batches with poison wherever nothing may look, and what attention makes of them.

Shapes: T packed tokens, Hq query heads, Hkv key/value heads, d head size.
"""

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from peagle.attention import ALL_BEFORE, AttentionMetadata, LayerKVCache, TorchAttention, TreeMask
from peagle.kernels.paths import row_depths

FP8 = torch.float8_e4m3fn
SCALING = 0.17
# Largest error of an element, over the largest element of the reference in float64.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


@dataclass
class PagedCase:
    """Sequences with `past` cached tokens and `new` ones to run, over shuffled blocks.

    NaN are: the scrap block, free blocks, slots beyond a context or before its start, the tables'
    unused entries (they name the scrap block), and the rows that pad the batch. `trees` has the
    parent's row of every new token but the first of each sequence; None: chains.
    """

    past: list[int]
    new: list[int]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    device: str = "cpu"
    seed: int = 0
    starts: list[int] | None = None
    trees: list[list[int]] | None = None
    padding_rows: int = 0
    padding_sequences: int = 0
    key_scale: float = 1.0
    value_scale: float = 1.0

    def __post_init__(self) -> None:
        self.generator = torch.Generator(self.device).manual_seed(self.seed)
        self.cache_dtype = self.cache_dtype or self.dtype
        self.lens = [p + n for p, n in zip(self.past, self.new, strict=True)]
        kv = (self.num_kv_heads, self.head_dim)
        self.query_THd = self.normal(sum(self.new), self.num_heads, self.head_dim)
        self.contexts = [
            (self.normal(length, *kv), self.normal(length, *kv)) for length in self.lens
        ]
        counts = [-(-length // self.block_size) for length in self.lens]
        self.num_blocks = sum(counts) + 2
        order = torch.randperm(self.num_blocks, generator=torch.Generator().manual_seed(self.seed))
        self.blocks = order[: sum(counts)].split(counts)

    def normal(self, *shape: int) -> Tensor:
        x = torch.randn(shape, generator=self.generator, device=self.device)
        return x.to(self.dtype)

    def sinks(self) -> Tensor:
        return torch.linspace(-3.0, 3.0, self.num_heads, device=self.device).to(self.dtype)

    def slots(self, sequence: int) -> Tensor:
        position = torch.arange(self.lens[sequence])
        blocks = self.blocks[sequence][position // self.block_size]
        return (blocks * self.block_size + position % self.block_size).to(self.device)

    def stored(self, x: Tensor, scale: float) -> Tensor:
        """What the cache holds of x."""
        assert self.cache_dtype is not None
        if self.cache_dtype != FP8:
            return x.to(self.cache_dtype)
        return (x.float() * (1.0 / scale)).clamp(-448, 448).to(FP8)

    def make_cache(self, *, with_new: bool, poison: bool = True) -> LayerKVCache:
        """Past keys and values in their places; `with_new`: those of this pass too."""
        assert self.cache_dtype is not None
        kv = (self.num_kv_heads, self.head_dim)
        sizes = (self.num_blocks, self.block_size, *kv)
        scales = (self.key_scale, self.value_scale)
        cache = LayerKVCache(*sizes, self.dtype, torch.device(self.device), scales)
        both = [torch.full_like(cache.keys, float("nan") if poison else 0.0) for _ in range(2)]
        both = [self.stored(x, 1.0) for x in both]
        for b, context in enumerate(self.contexts):
            first = self.starts[b] if self.starts else 0
            last = self.lens[b] if with_new else self.past[b]
            slots = self.slots(b)[first:last]
            for x, rows, scale in zip(both, context, (self.key_scale, self.value_scale)):
                stored = self.stored(rows[first:last], scale)
                # 8-bit floats as bytes: torch does not index them.
                raw = torch.uint8 if stored.dtype == FP8 else stored.dtype
                x.view(raw).flatten(0, 1)[slots] = stored.view(raw)
        cache.keys, cache.values = both
        return cache

    def metadata(self, *, padded: bool = True) -> AttentionMetadata:
        rows, sequences = (self.padding_rows, self.padding_sequences) if padded else (0, 0)
        start = [*accumulate(self.new, initial=0), *[sum(self.new)] * sequences]
        width = max(map(len, self.blocks))
        tables = torch.full((len(self.new) + sequences, width), self.num_blocks)
        for b, blocks in enumerate(self.blocks):
            tables[b, : len(blocks)] = blocks
        slots = [self.slots(b)[past:] for b, past in enumerate(self.past)]
        starts = None
        if self.starts is not None:
            starts = torch.tensor([*self.starts, *[0] * sequences], device=self.device)
        return AttentionMetadata(
            query_start_loc=torch.tensor(start, device=self.device),
            seq_lens_B=torch.tensor([*self.lens, *[0] * sequences], device=self.device),
            block_tables_BM=tables.to(self.device),
            slots_T=torch.cat([*slots, torch.full((rows,), -1, device=self.device)]),
            max_query_len=max(self.new),
            max_seq_len=max(self.lens),
            context_starts_B=starts,
            tree=self.tree_mask(rows),
        )

    def paths(self, sequence: int) -> list[set[int]]:
        """The rows that every row of a sequence sees."""
        if self.trees is None:
            return [set(range(row + 1)) for row in range(self.new[sequence])]
        paths = [{0}]
        for row, parent in enumerate(self.trees[sequence], start=1):
            paths.append(paths[parent] | {row})
        return paths

    def positions(self, sequence: int) -> list[int]:
        """The position of every token of a sequence, past and new."""
        past, new = self.past[sequence], self.new[sequence]
        depths = range(new) if self.trees is None else row_depths(self.trees[sequence])
        return [*range(past), *(past + depth for depth in depths)]

    def tree_mask(self, padding_rows: int) -> TreeMask | None:
        if self.trees is None:
            return None
        every = range(len(self.new))
        words = [sum(1 << row for row in path) for b in every for path in self.paths(b)]
        # Prompts, which are chains, may have more rows than a word has bits.
        long = [new > 64 for new in self.new for _ in range(new)]
        words = [ALL_BEFORE if is_long else word for word, is_long in zip(words, long, strict=True)]
        words = [word - 2**64 if word >= 2**63 else word for word in words]
        positions = [p for b in every for p in self.positions(b)[self.past[b] :]]
        both = (torch.tensor([*x, *[0] * padding_rows]) for x in (words, positions))
        return TreeMask(*(x.to(self.device) for x in both))

    def padded(self, x_THd: Tensor) -> Tensor:
        return torch.cat((x_THd, x_THd.new_full((self.padding_rows, *x_THd.shape[1:]), torch.nan)))

    def new_kv(self) -> tuple[Tensor, Tensor]:
        pairs = list(zip(self.past, self.contexts, strict=True))
        return torch.cat([k[p:] for p, (k, _) in pairs]), torch.cat([v[p:] for p, (_, v) in pairs])

    def reference(self, window: int | None = None, **special: Any) -> Tensor:
        """The torch backend in float64, on the same numbers without poison or padding."""
        cache = self.make_cache(with_new=True, poison=False)
        scales = self.key_scale, self.value_scale
        cache.keys, cache.values = (
            x.to(torch.float64) * s for x, s in zip((cache.keys, cache.values), scales)
        )
        cache.key_scale = cache.value_scale = 1.0
        metadata = self.metadata(padded=False)
        slots = metadata.slots_T
        if special.get("sinks") is not None:
            special["sinks"] = special["sinks"].double()
        return TorchAttention().prepare(replace(metadata))(
            self.query_THd.double(),
            *(x.flatten(0, 1)[slots] for x in (cache.keys, cache.values)),
            cache,
            scaling=SCALING,
            sliding_window=window,
            **special,
        )

    def check(self, out_THd: Tensor, expected_THd: Tensor) -> None:
        """As expected, and zero in the padding."""
        rows = expected_THd.shape[0]
        assert out_THd.dtype == self.dtype
        assert out_THd.shape[0] == rows + self.padding_rows
        assert bool((out_THd[rows:] == 0).all()), "padding"
        assert bool(out_THd.isfinite().all())
        error = (out_THd[:rows].double() - expected_THd).abs().amax() / expected_THd.abs().amax()
        assert error < TOLERANCE[self.dtype], float(error)
