"""Attention of decode and verify steps: in two launches or one; per layer, in a graph.

    python benchmarks/kernels/bench_paged_attention.py --decode

Each layer of the graph has its own cache, all of them together twice the L2, as in a step, whose
weights leave nothing there. "two": kv_write, then attention. "one": attention writes the keys too.
"""

from __future__ import annotations

import itertools
import multiprocessing
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from peagle.kernels.attention.kv_write import kv_write
from peagle.kernels.attention.paged_attention import (
    AttentionShape,
    NewKeyValues,
    PagedAttentionConfig,
    Workspace,
    choose_config,
    paged_attention,
)
from peagle.kernels.launch import DeviceLimits

DEVICE = torch.device("cuda")
HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
MAX_LEN = 4096  # width of the block tables, in tokens
DTYPE = torch.bfloat16
LAYERS = (20, 100)  # fewest and most
WORKERS = 12
LARGEST_ERROR = 2e-2  # of the largest element, between two ways
BATCHES, CONTEXTS, QUERIES = (1, 4, 16, 64), (256, 1024), (8, 1)
# Keys of a tile, warps, stages.
TILES = ((64, 4, 3), (32, 4, 3), (32, 4, 4), (64, 8, 3), (64, 4, 2), (32, 2, 3))
CAPS = (33, 16)
MIN_KEYS = (64, 128, 256, 512)
Timer = Callable[[list[Callable[[], Tensor]]], float]


@dataclass(frozen=True)
class Way:
    """How a layer runs."""

    config: PagedAttentionConfig
    writes: bool

    @property
    def name(self) -> str:
        return "one" if self.writes else "two"


class Step:
    """Layers of one step, each with a cache of its own."""

    def __init__(self, batch: int, context: int, queries: int, layers: int | None = None) -> None:
        torch.manual_seed(0)
        rows = batch * queries
        self.shape = AttentionShape(batch, rows, queries, HEADS, KV_HEADS, HEAD_DIM, DTYPE, DTYPE)
        blocks_each = -(-context // BLOCK_SIZE)
        num_blocks = batch * blocks_each
        kv_bytes = 2 * num_blocks * BLOCK_SIZE * KV_HEADS * HEAD_DIM * DTYPE.itemsize
        l2_bytes = torch.cuda.get_device_properties(DEVICE).L2_cache_size
        layers = layers or min(max(2 * l2_bytes // kv_bytes, LAYERS[0]), LAYERS[1])

        def random(*size: int) -> Tensor:
            return torch.randn(size, dtype=DTYPE, device=DEVICE)

        size = (num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
        self.keys, self.values = random(layers, *size), random(layers, *size)
        self.tables = torch.zeros(batch, MAX_LEN // BLOCK_SIZE, dtype=torch.int64, device=DEVICE)
        owned = torch.randperm(num_blocks, device=DEVICE).view(batch, blocks_each)
        self.tables[:, :blocks_each] = owned
        self.query, self.key, self.value = (
            random(rows, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)
        )
        self.start = torch.arange(batch + 1, device=DEVICE) * queries
        self.lens = torch.full((batch,), context, device=DEVICE)
        position = torch.arange(context - queries, context, device=DEVICE)
        slots = owned[:, position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        self.slots = slots.view(-1)

    def runs(self, way: Way) -> list[Callable[[], Tensor]]:
        """One call for each layer."""
        workspace = Workspace.make(self.shape, way.config, DEVICE)
        new = NewKeyValues(self.key, self.value, self.slots) if way.writes else None

        def layer(keys: Tensor, values: Tensor) -> Tensor:
            if new is None:
                kv_write(self.key, self.value, keys, values, self.slots)
            return paged_attention(
                self.query,
                keys,
                values,
                self.start,
                self.lens,
                self.tables,
                max_query_len=self.shape.max_query_len,
                scaling=HEAD_DIM**-0.5,
                config=way.config,
                workspace=workspace,
                new=new,
            )

        return [lambda k=k, v=v: layer(k, v) for k, v in zip(self.keys, self.values)]


def ways(batch: int, queries: int) -> list[Way]:
    """Both at the chosen tile, "one" at the others, with some caps on the splits."""
    shape = AttentionShape(batch, batch * queries, queries, HEADS, KV_HEADS, HEAD_DIM, DTYPE, DTYPE)
    chosen = choose_config(shape, DeviceLimits.of(DEVICE))
    splits = sorted(
        {min(chosen.num_splits, cap) for cap in CAPS} | {max(1, chosen.num_splits // 2)}
    )
    found = []
    for count, tile in itertools.product(splits, TILES):
        config = replace(
            chosen, num_splits=count, block_n=tile[0], num_warps=tile[1], num_stages=tile[2]
        )
        if tile == TILES[0]:
            found.append(Way(config, False))
        found += [Way(replace(config, min_keys=n // 2, many_keys=n), True) for n in MIN_KEYS]
    return found


def compile_one(job: tuple[int, Way]) -> str | None:
    """Compile what a way needs, into Triton's cache; why that failed."""
    queries, way = job
    try:
        Step(2, 64, queries, layers=1).runs(way)[0]()
    except Exception as error:
        return f"{way}: {error!r}"
    return None


def compile_all() -> None:
    """In several processes; what fails here fails again, and is reported, where it is timed."""
    jobs = {
        # Splits are no constant of a kernel, beyond whether there are any.
        (queries, replace(way.config, num_splits=min(way.config.num_splits, 2)), way.writes)
        for queries in QUERIES
        for batch in BATCHES
        for way in ways(batch, queries)
    }
    start = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(WORKERS, mp_context=context) as pool:
        reasons = pool.map(compile_one, [(q, Way(config, writes)) for q, config, writes in jobs])
        for reason in filter(None, reasons):
            print(f"failed {reason}", file=sys.stderr)
    print(f"{len(jobs)} ways compiled in {time.perf_counter() - start:.0f} s", flush=True)


def measure_decode(seconds: Timer, top: int) -> list[dict[str, Any]]:
    """Time all ways of all shapes and print them: the best of each name, then the fastest."""
    compile_all()
    results = []
    for queries, context, batch in itertools.product(QUERIES, CONTEXTS, BATCHES):
        step = Step(batch, context, queries)
        timed: list[tuple[float, Way]] = []
        expected = None
        for way in ways(batch, queries):
            runs = step.runs(way)
            try:
                out = runs[0]().float()
            except Exception as error:
                print(f"left out {way}: {error!r}", file=sys.stderr)
                continue
            expected = out if expected is None else expected
            error = float((out - expected).abs().amax() / expected.abs().amax())
            assert error < LARGEST_ERROR, f"{way} is off by {error}"
            timed.append((seconds(runs) * 1e6, way))
        timed.sort(key=lambda pair: pair[0])
        print(f"B {batch} q {queries} context {context}, {len(step.keys)} layers: us of each")
        best = {way.name: (us, way) for us, way in reversed(timed)}
        for name in ("two", "one"):
            same = [(us, way) for us, way in timed if way.name == name and is_chosen_tile(way)]
            splits = "  ".join(f"s{way.config.num_splits} {us:.2f}" for us, way in same)
            us, way = best[name]
            print(f"  {name:9} {splits:30} best {us:.2f} {cut(way)}")
        fastest = "; ".join(f"{us:.2f} {way.name} {cut(way)}" for us, way in timed[:top])
        print(f"  fastest: {fastest}", flush=True)
        results += [
            {
                **{"batch": batch, "queries": queries, "context": context, "us": us},
                **{"way": way.name, "config": asdict(way.config)},
            }
            for us, way in timed
        ]
        del step
    return results


def cut(way: Way) -> str:
    c = way.config
    tile = f"m{c.block_m} n{c.block_n} s{c.num_splits}"
    return f"{tile} w{c.num_warps} st{c.num_stages} min{c.many_keys}"


def is_chosen_tile(way: Way) -> bool:
    """Whether the way differs in nothing but its launches."""
    c = way.config
    return (c.block_n, c.num_warps, c.num_stages) == TILES[0]
