"""Bandwidth of paged attention in Triton against a device-to-device copy of the same run.

    python benchmarks/kernels/bench_paged_attention.py            # table, sweep and one JSON line
    python benchmarks/kernels/bench_paged_attention.py --no-sweep
    python benchmarks/kernels/bench_paged_attention.py --kv float8_e4m3fn --no-sweep
    python benchmarks/kernels/bench_paged_attention.py --sweep-only --splits 1,2,3,4
    python benchmarks/kernels/bench_paged_attention.py --decode   # launches of a step, compared

Time is of a CUDA graph of calls over caches that together are far larger than the L2, per call;
bandwidth is bytes of keys and values over it. "copy" is that over the bytes that a copy reads and
writes in a second. Errors are against the torch backend in float32.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from paged_attention_decode import measure_decode
from torch import Tensor

from peagle.attention import AttentionMetadata, LayerKVCache, TorchAttention
from peagle.environment import environment
from peagle.kernels.attention.paged_attention import (
    AttentionShape,
    PagedAttentionConfig,
    Workspace,
    choose_config,
    paged_attention,
)
from peagle.kernels.launch import DeviceLimits

DEVICE = torch.device("cuda")
HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
DTYPE = torch.bfloat16
L2_MULTIPLE = 4  # caches in rotation, in L2 sizes
TARGET = 0.8  # of the copy bandwidth, at the shape below


@dataclass(frozen=True)
class Shape:
    """One measurement: `queries` each of `batch` sequences whose context ends with them."""

    name: str
    batch: int
    queries: int
    context: int
    kv: str = "bfloat16"

    @property
    def kv_dtype(self) -> torch.dtype:
        return getattr(torch, self.kv)

    @property
    def kv_bytes(self) -> int:
        return 2 * self.batch * self.context * KV_HEADS * HEAD_DIM * self.kv_dtype.itemsize

    @property
    def flops(self) -> float:
        visible = self.context - (self.queries - 1) / 2
        return 4.0 * self.batch * self.queries * HEADS * HEAD_DIM * visible

    def layer(self) -> AttentionShape:
        return AttentionShape(
            self.batch,
            self.batch * self.queries,
            self.queries,
            HEADS,
            KV_HEADS,
            HEAD_DIM,
            DTYPE,
            self.kv_dtype,
        )


TARGET_SHAPE = Shape("verify", 16, 8, 8192)
STEPS = [
    Shape(name, batch, queries, context)
    for name, queries in (("decode", 1), ("verify", 8))
    for context in (512, 8192, 32768)
    for batch in (1, 4, 16, 64)
]
PROMPTS = [
    Shape("prefill", 1, 2048, 2048),
    Shape("prefill", 8, 2048, 2048),
    Shape("chunk", 1, 512, 8192),
]
SWEPT = [TARGET_SHAPE, Shape("verify", 1, 8, 8192), Shape("decode", 16, 1, 8192), PROMPTS[1]]


class Problem:
    """Queries and as many caches as the L2 cannot hold."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        torch.manual_seed(0)
        l2_bytes = torch.cuda.get_device_properties(DEVICE).L2_cache_size
        copies = 1 + L2_MULTIPLE * l2_bytes // shape.kv_bytes
        blocks_each = -(-shape.context // BLOCK_SIZE)
        num_blocks = shape.batch * blocks_each
        size = (copies, num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
        # Views of one tensor: attention only reads them.
        self.keys, self.values = (
            torch.randn(size, dtype=DTYPE, device=DEVICE).to(shape.kv_dtype) for _ in range(2)
        )
        self.tables = torch.randperm(num_blocks, device=DEVICE).view(shape.batch, blocks_each)
        rows = shape.batch * shape.queries
        self.query = torch.randn(rows, HEADS, HEAD_DIM, dtype=DTYPE, device=DEVICE)
        self.start = torch.arange(shape.batch + 1, device=DEVICE) * shape.queries
        self.lens = torch.full((shape.batch,), shape.context, device=DEVICE)

    def runs(self, config: PagedAttentionConfig) -> list[Callable[[], Tensor]]:
        """One call for each cache."""
        workspace = Workspace.make(self.shape.layer(), config, DEVICE)

        def call(keys: Tensor, values: Tensor) -> Callable[[], Tensor]:
            return lambda: paged_attention(
                self.query,
                keys,
                values,
                self.start,
                self.lens,
                self.tables,
                max_query_len=self.shape.queries,
                scaling=HEAD_DIM**-0.5,
                config=config,
                workspace=workspace,
            )

        return [call(k, v) for k, v in zip(self.keys, self.values)]

    def reference(self) -> Tensor:
        """The torch backend over the first cache, in float32."""
        keys, values = self.keys[0].float(), self.values[0].float()
        cache = LayerKVCache(0, BLOCK_SIZE, KV_HEADS, HEAD_DIM, torch.float32, DEVICE)
        cache.keys, cache.values = keys, values
        first = self.lens[:1] - self.shape.queries
        position = first + torch.arange(self.shape.queries, device=DEVICE)
        slots = (self.tables[:, position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE).view(
            -1
        )
        metadata = AttentionMetadata(
            self.start,
            self.lens,
            self.tables,
            slots,
            self.shape.queries,
            self.shape.context,
        )
        new = (x.flatten(0, 1)[slots] for x in (keys, values))
        return TorchAttention().prepare(metadata)(
            self.query.float(), *new, cache, scaling=HEAD_DIM**-0.5
        )


def seconds(runs: list[Callable[[], Any]], budget: float = 0.02) -> float:
    """Median time of one run, from replays of a graph that holds each of them at least once."""
    runs[0]()  # compiles
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for run in runs[:3]:
            run()
    torch.cuda.synchronize()
    once = _elapsed(runs[0])
    repeats = max(1, min(200, int(budget / max(once, 1e-6))) // len(runs))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for run in runs:
                run()
    graph.replay()
    times = [_elapsed(graph.replay) for _ in range(9)]
    return statistics.median(times) / (repeats * len(runs))


def _elapsed(run: Callable[[], Any]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def copy_bandwidth() -> float:
    """Bytes per second of a device-to-device copy, read and written."""
    source = torch.randint(0, 255, (2**30,), dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds([lambda: target.copy_(source)])


def measure(problem: Problem, config: PagedAttentionConfig, copy: float) -> dict[str, Any]:
    """Time, bandwidth and rate of one configuration."""
    time = seconds(problem.runs(config))
    shape = problem.shape
    return {
        **dataclasses.asdict(shape),
        "config": dataclasses.asdict(config),
        "us": time * 1e6,
        "tb_per_s": shape.kv_bytes / time / 1e12,
        "of_copy": shape.kv_bytes / time / copy,
        "tflops": shape.flops / time / 1e12,
    }


def line(result: dict[str, Any], note: str = "") -> str:
    c = result["config"]
    cut = f"m{c['block_m']} n{c['block_n']} s{c['num_splits']} w{c['num_warps']}"
    return (
        f"{result['name']:8} {result['batch']:5} {result['queries']:5} {result['context']:6} "
        f"{result['us']:9.1f} {result['tb_per_s']:6.2f} {result['of_copy']:6.1%} "
        f"{result['tflops']:7.1f}  {cut} st{c['num_stages']} {note}"
    )


def sweep(
    shape: Shape, copy: float, limits: DeviceLimits, splits: list[int] | None
) -> list[dict[str, Any]]:
    """Tiles first, then splits with the best of them; those that do not fit are left out."""
    from triton.runtime.errors import OutOfResources

    problem = Problem(shape)
    chosen = choose_config(shape.layer(), limits)
    expected = problem.reference()
    tried: dict[PagedAttentionConfig, dict[str, Any]] = {}

    def attempt(config: PagedAttentionConfig) -> None:
        if config in tried:
            return
        try:
            out = problem.runs(config)[0]()
            error = (out.float() - expected).norm() / expected.norm()
            tried[config] = {**measure(problem, config, copy), "error": float(error)}
        except OutOfResources as reason:
            print(f"left out {config}: {reason}", file=sys.stderr)

    attempt(chosen)
    block_ms = (chosen.block_m,) if shape.queries <= 32 else (64, 128)
    for block_m in block_ms:
        for block_n in (32, 64, 128):
            for num_warps in (4, 8):
                for num_stages in (2, 3, 4):
                    attempt(
                        PagedAttentionConfig(
                            block_m, block_n, chosen.num_splits, num_warps, num_stages
                        )
                    )
    if shape.queries <= 32:
        ranking = sorted(tried, key=lambda config: tried[config]["us"])
        around = chosen.num_splits
        for best in ranking[:2]:
            for n in splits or [1, around // 2, around - 1, around + 1, 2 * around, 3 * around]:
                if n >= 1:
                    attempt(dataclasses.replace(best, num_splits=n))
    return sorted(tried.values(), key=lambda result: result["us"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--no-sweep", action="store_true", help="the chosen configurations only")
    parser.add_argument("--sweep-only", action="store_true", help="only the sweep")
    parser.add_argument(
        "--decode", action="store_true", help="layers of a step, in one launch or two"
    )
    parser.add_argument("--kv", default="bfloat16", choices=("bfloat16", "float8_e4m3fn"))
    parser.add_argument("--out", type=Path, help="JSON file with all times of --decode")
    parser.add_argument("--splits", help="splits to sweep, as 1,2,3 (default: around the chosen)")
    parser.add_argument("--top", type=int, default=6, help="lines of each sweep")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("error: this benchmark needs an NVIDIA GPU.")
    if args.decode:
        results = measure_decode(seconds, top=3)
        found = {"benchmark": "paged_attention_decode", "environment": environment(DEVICE)}
        if args.out:
            args.out.write_text(json.dumps({**found, "results": results}))
        return

    limits = DeviceLimits.of(DEVICE)
    copy = copy_bandwidth()
    splits = [int(n) for n in args.splits.split(",")] if args.splits else None
    shapes = [] if args.sweep_only else [*STEPS, *PROMPTS]
    results, swept = [], []
    for shape in (dataclasses.replace(shape, kv=args.kv) for shape in shapes):
        problem = Problem(shape)
        results.append(measure(problem, choose_config(shape.layer(), limits), copy))
        del problem
    for shape in [] if args.no_sweep else SWEPT:
        swept.append(sweep(dataclasses.replace(shape, kv=args.kv), copy, limits, splits))

    again = copy_bandwidth()
    print(f"copy {copy / 1e12:.2f} TB/s (again at the end: {again / 1e12:.2f})")
    print("shape    batch     q    ctx        us   TB/s   copy  TFLOP/s config")
    for result in results:
        is_target = all(result[k] == v for k, v in dataclasses.asdict(TARGET_SHAPE).items())
        reached = "reached" if result["of_copy"] >= TARGET else "missed"
        print(line(result, f"<- target {TARGET:.0%} {reached}" if is_target else ""))
    for ranking in swept:
        print("sweep, fastest first:")
        for result in ranking[: args.top]:
            print(line(result, f"error {result['error']:.1e}"))
        worst = max(ranking, key=lambda result: result["error"])
        print(line(worst, f"error {worst['error']:.1e}  <- largest error"))
    print(
        json.dumps(
            {
                "benchmark": "paged_attention",
                "environment": environment(DEVICE),
                "heads": [HEADS, KV_HEADS, HEAD_DIM],
                "dtype": str(DTYPE).removeprefix("torch."),
                "block_size": BLOCK_SIZE,
                "copy_tb_per_s": [copy / 1e12, again / 1e12],
                "results": results,
                "sweeps": [ranking[: args.top] for ranking in swept],
            }
        )
    )


if __name__ == "__main__":
    main()
