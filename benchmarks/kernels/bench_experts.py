"""Grouped products of experts at the shapes of published mixtures: the bytes' time against ours.

    python benchmarks/kernels/bench_experts.py --tokens 1,8,128 --out experts.json
    python benchmarks/kernels/bench_experts.py --shapes qwen3-coder --formats fp8 --quick

Tokens choose their experts evenly at random, differently in each call of a CUDA graph, so that
weights come from memory. Time is per call; the floor is the time that the bytes of the chosen
experts take at the bandwidth of a copy. `--check` compares every configuration with plain torch.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peagle.environment import environment
from peagle.kernels.experts import (
    Gate,
    GroupedConfig,
    choose_config,
    grouped_product,
    grouped_product_reference,
    plan_tiles,
)
from peagle.kernels.packed_weights import Format, PackedWeight

sys.path.append(str(Path(__file__).parents[1]))
from shapes import random_weight

DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
COPY_BYTES_PER_S = 3.03e12  # an H100's
ROUTINGS = 12  # calls of a graph, each with its own routing
REPLAYS = 10
WORKERS = 14
SHARED_BYTES = 220_000


@dataclass(frozen=True)
class Shape:
    """One layer of experts; a dense layer is one expert that everything goes to."""

    name: str
    num_experts: int
    chosen: int
    hidden_size: int
    inner_size: int
    gate: Gate
    has_bias: bool = False


SHAPES = [
    Shape("qwen3-coder", 128, 8, 2048, 768, Gate("silu")),
    Shape("gpt-oss-20b", 32, 4, 2880, 2880, Gate("clamped", 1.702, 7.0), has_bias=True),
    Shape("qwen3-8b", 1, 1, 4096, 12_288, Gate("silu")),
]


@dataclass(frozen=True)
class Product:
    """gate_up or down of a shape in a format."""

    shape: Shape
    format: Format
    is_down: bool

    @property
    def n(self) -> int:
        return self.shape.hidden_size if self.is_down else 2 * self.shape.inner_size

    @property
    def k(self) -> int:
        return self.shape.inner_size if self.is_down else self.shape.hidden_size

    @property
    def name(self) -> str:
        return f"{self.shape.name} {'down' if self.is_down else 'up'} {self.format}"

    def make(self, num_experts: int | None = None) -> PackedWeight:
        size = (num_experts or self.shape.num_experts, self.n, self.k)
        return random_weight(self.format, size, DEVICE)


def candidates(product: Product, tokens: int, quick: bool) -> list[GroupedConfig]:
    """Cuts to try; tiles of about as many rows as an expert has on average, or of twice as many."""
    shape = product.shape
    rows = tokens * shape.chosen / min(shape.num_experts, tokens * shape.chosen)
    average = next(m for m in (8, 16, 32, 64, 128) if rows <= m or m == 128)
    heights = [average] if quick or tokens == 1 or average > 32 else [average, 2 * average]
    inner = [(32, 4), (32, 8)] if product.format == "mxfp4" else [(128, 1), (128, 2)]
    found = []
    for m in heights:
        for step, steps in inner:
            for stages in (2, 3, 4):
                found.append(GroupedConfig(m, 32, step, steps, 2, stages, wx=True))
                if not quick and stages == 3:
                    found.append(GroupedConfig(m, 16, step, steps, 1, stages, wx=True))
                if m >= 16 and stages == 3:
                    found.append(GroupedConfig(m, 32, step, steps, 4, stages, wx=True))
                if m >= 16 and stages == 3 and not quick:
                    found.append(GroupedConfig(m, 32, step, steps, 4, stages))
                    found.append(GroupedConfig(m, 32, step, steps, 2, stages))
                if m >= 32 and stages < 4:
                    found.append(GroupedConfig(m, 64, step, steps, 4, stages))
    itemsize = {"plain": 2.0, "mxfp4": 0.5, "int4": 0.5}.get(product.format, 1.0)

    def fits(config: GroupedConfig) -> bool:
        inputs = config.step * config.steps
        stage = inputs * (2 * config.block_n * itemsize + config.block_m * 2)
        return stage * config.num_stages < SHARED_BYTES

    return [config for config in found if fits(config)]


class Problem:
    """A weight, and rows with their routings."""

    def __init__(self, product: Product, tokens: int, num_experts: int | None = None) -> None:
        torch.manual_seed(0)
        shape = product.shape
        self.product, self.tokens = product, tokens
        self.weight = product.make(num_experts)
        count = num_experts or shape.num_experts
        self.chosen = shape.chosen if not product.is_down else 1
        size = tokens * shape.chosen if product.is_down else tokens
        self.x = torch.randn(size, product.k, dtype=DTYPE, device=DEVICE)
        self.indices = [
            torch.rand(tokens, count, device=DEVICE).topk(shape.chosen).indices.view(-1)
            for _ in range(ROUTINGS)
        ]
        self.bias = None
        if shape.has_bias:
            self.bias = torch.randn(count, product.n, device=DEVICE).to(DTYPE)
        self.gate = None if product.is_down else shape.gate
        self.plans: dict[int, list[Tensor]] = {}

    @property
    def floor_us(self) -> float:
        """Time of the chosen experts' bytes, on average over the routings."""
        touched = statistics.mean(len(index.unique()) for index in self.indices)
        per_expert = self.weight.num_bytes / self.weight.data.shape[0]
        return touched * per_expert / COPY_BYTES_PER_S * 1e6

    def run(self, routing: int, config: GroupedConfig) -> Tensor:
        index = self.indices[routing]
        if config.block_m not in self.plans:
            experts = self.weight.data.shape[0]
            self.plans[config.block_m] = [
                plan_tiles(index, experts, config.block_m) for index in self.indices
            ]
        plan = None if self.tokens == 1 else self.plans[config.block_m][routing]
        return grouped_product(
            self.x, self.weight, self.bias, self.gate,
            index_S=index, plan=plan, chosen=self.chosen, config=config,
        )  # fmt: skip

    @cached_property
    def expected(self) -> Tensor:
        """In float32, of the first assignments of the first routing."""
        bias = None if self.bias is None else self.bias.float()
        index = self.indices[0][:64]
        x = self.x.float()[: len(index) // self.chosen]
        return grouped_product_reference(x, self.weight, bias, self.gate, index)

    def error(self, config: GroupedConfig) -> float:
        found = self.run(0, config)[: len(self.expected)].float()
        return float((found - self.expected).norm() / self.expected.norm())


def microseconds(calls: list[Callable[[], Any]]) -> float:
    """Median time of a call, from replays of a graph of all of them."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times) / len(calls)


def compile_one(job: tuple[Product, int, GroupedConfig]) -> str:
    """Compile into Triton's cache on disk, from which this process's parent takes it."""
    product, tokens, config = job
    try:
        few = max(product.shape.chosen, 2) if product.shape.num_experts > 1 else 1
        Problem(product, tokens, few).run(0, config)
        torch.cuda.synchronize()
        return ""
    except Exception as error:
        return f"{product.name} {label(config)}: {type(error).__name__}: {str(error)[:200]}"


def compile_all(jobs: list[tuple[Product, int, GroupedConfig]]) -> None:
    start = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(WORKERS, mp_context=context) as pool:
        for reason in pool.map(compile_one, jobs):
            if reason:
                print(f"failed {reason}", flush=True)
    print(f"{len(jobs)} kernels in {time.perf_counter() - start:.0f} s", flush=True)


def label(config: GroupedConfig) -> str:
    m, n, step, steps, warps, stages, wx = astuple(config)
    return f"m{m} n{n} k{step}x{steps} w{warps} st{stages}{' wx' if wx else ''}"


def measure(product: Product, tokens: int, args: argparse.Namespace) -> dict[str, Any]:
    """All configurations of a product for so many tokens."""
    problem = Problem(product, tokens)
    count = tokens * product.shape.chosen
    choice = choose_config(count, product.shape.num_experts, problem.weight)
    tried: dict[str, float] = {}
    for config in dict.fromkeys([*candidates(product, tokens, args.quick), choice]):
        try:
            if args.check and not (error := problem.error(config)) < 2e-2:
                print(f"wrong {product.name} {tokens} {label(config)}: {error:.1e}", flush=True)
            calls = [lambda i=i, c=config: problem.run(i, c) for i in range(ROUTINGS)]
            tried[label(config)] = microseconds(calls)
        except Exception as error:
            print(f"left out {product.name} {tokens} {label(config)}: {str(error)[:150]}")
    ranking = sorted(tried, key=lambda name: tried[name])
    floor = problem.floor_us
    best, us = ranking[0], tried.get(label(choice), float("nan"))
    print(
        f"{product.name:28} {tokens:4} floor {floor:7.1f} | {tried[best]:7.1f} "
        f"{floor / tried[best]:4.0%} {best:24} | {us:7.1f} {label(choice)}",
        flush=True,
    )
    if args.all:
        print("    " + "; ".join(f"{name} {tried[name]:.1f}" for name in ranking), flush=True)
    return {"product": product.name, "tokens": tokens, "floor_us": floor, "us": tried}


def measure_plan(shape: Shape, tokens: int) -> None:
    count = tokens * shape.chosen
    index = torch.randint(shape.num_experts, (count,), device=DEVICE)
    us = microseconds([lambda: plan_tiles(index, shape.num_experts, 16)] * 10)
    print(f"{shape.name:28} {tokens:4} plan {us:.1f} us", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", default="1,8,16,128,512", help="numbers of tokens")
    parser.add_argument("--shapes", default="qwen3-coder,gpt-oss-20b", help="names, a list")
    parser.add_argument("--formats", help="plain, fp8, int8, int4, mxfp4 (default: as published)")
    parser.add_argument("--quick", action="store_true", help="fewer configurations")
    parser.add_argument("--all", action="store_true", help="print every configuration")
    parser.add_argument("--check", action="store_true", help="compare with plain torch")
    parser.add_argument("--out", type=Path, help="JSON file of all numbers")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("error: this benchmark needs an NVIDIA GPU.")
    published = {"qwen3-coder": "fp8", "gpt-oss-20b": "mxfp4", "qwen3-8b": "fp8"}
    tokens = [int(count) for count in args.tokens.split(",")]
    shapes = [shape for shape in SHAPES if shape.name in args.shapes.split(",")]
    products = [
        Product(shape, format, is_down)
        for shape in shapes
        for format in (args.formats or published[shape.name]).split(",")
        for is_down in (False, True)
    ]
    jobs = [
        (product, count, config)
        for product in products
        for count in tokens
        for config in candidates(product, count, args.quick)
    ]
    compile_all(list(dict.fromkeys(jobs)))
    results = [measure(product, count, args) for product in products for count in tokens]
    for shape in shapes:
        for count in tokens:
            if shape.num_experts > 1 and count > 1:
                measure_plan(shape, count)
    if args.out:
        report = {"benchmark": "experts", "environment": environment(DEVICE), "results": results}
        args.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
