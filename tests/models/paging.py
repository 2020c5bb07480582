"""Sequences of a target over shuffled KV blocks, to be compared with transformers' own."""

from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from peagle.attention import AttentionMetadata, LayerKVCache, Prepared, TorchAttention
from peagle.models.target import TargetModel

BLOCK_SIZE = 4
LENS = [5, 1, 19, 8]  # prompts
CHUNKS = [1, 4, 8, 3]  # newest token and drafts of each sequence


@dataclass
class Counting:
    """Counts the layers that call the attention function."""

    inner: Prepared
    calls: int = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        self.calls += 1
        return self.inner(*args, **kwargs)


@dataclass
class Paged:
    """Sequences of one target over shuffled blocks."""

    target: TargetModel
    sequences: list[list[int]]
    caches: list[LayerKVCache] = field(init=False)
    tables: Tensor = field(init=False)

    def __post_init__(self) -> None:
        width = -(-max(map(len, self.sequences)) // BLOCK_SIZE)
        count = width * len(self.sequences)
        order = torch.randperm(count, generator=torch.Generator().manual_seed(3))
        self.tables = order.view(len(self.sequences), width)
        self.caches = self.target.make_kv_caches(count, BLOCK_SIZE)
        self.target.set_kv_caches(self.caches)

    def run(self, first: list[int], lens: list[int]) -> tuple[list[Tensor], list[Tensor], int]:
        """Logits and features of lens[b] tokens from first[b] on, and the attention calls."""
        where = [
            (b, p)
            for b, (f, n) in enumerate(zip(first, lens, strict=True))
            for p in range(f, f + n)
        ]
        metadata = AttentionMetadata(
            query_start_loc=torch.tensor(list(accumulate(lens, initial=0))),
            seq_lens_B=torch.tensor([f + n for f, n in zip(first, lens, strict=True)]),
            block_tables_BM=self.tables,
            slots_T=torch.tensor(
                [
                    int(self.tables[b, p // BLOCK_SIZE]) * BLOCK_SIZE + p % BLOCK_SIZE
                    for b, p in where
                ]
            ),
            max_query_len=max(lens),
            max_seq_len=max(f + n for f, n in zip(first, lens, strict=True)),
        )
        attend = Counting(TorchAttention().prepare(metadata))
        hidden, features = self.target.forward(
            torch.tensor([self.sequences[b][p] for b, p in where]),
            torch.tensor([p for _, p in where]),
            attend,
        )
        logits = self.target.compute_logits(hidden)
        return list(logits.split(lens)), list(features.split(lens)), attend.calls

    def prefill(self) -> tuple[list[Tensor], list[Tensor], int]:
        """All prompts in one ragged batch."""
        return self.run([0] * len(LENS), LENS)

    def verify(self) -> list[Tensor]:
        """Logits of each sequence's newest token and drafts."""
        return self.run(LENS, CHUNKS)[0]

    def corrupt(self, cache: int, part: str) -> None:
        """Change the newest cached position of each sequence, which no window leaves out."""
        for b, length in enumerate(LENS):
            block = int(self.tables[b, (length - 1) // BLOCK_SIZE])
            getattr(self.caches[cache], part)[block, (length - 1) % BLOCK_SIZE] += 0.5


def make_sequences() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    totals = [n + k for n, k in zip(LENS, CHUNKS, strict=True)]
    return [torch.randint(2, 300, (n,), generator=generator).tolist() for n in totals]


def largest_difference(found: list[Tensor], expected: list[Tensor]) -> float:
    return max(float((f - e).abs().max()) for f, e in zip(found, expected, strict=True))
