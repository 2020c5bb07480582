"""Products of experts and of packed layers at published shapes: the bytes' time against ours.

    python benchmarks/kernels/bench_experts.py --tokens 1,8,128 --out experts.json
    python benchmarks/kernels/bench_experts.py --layers qwen3-coder-up --formats fp8 --quick

Tokens choose their experts evenly at random, differently in each call of a CUDA graph, so that
weights come from memory; each call of a dense layer has a weight of its own. Time is per call; the
floor is the time that the bytes of the weights take at the bandwidth of a copy. `--check` compares
every configuration with plain torch.
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
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.environment import environment
from peagle.kernels.linear.experts import (
    Gate,
    GroupedConfig,
    Kind,
    can_use_registers,
    choose_config,
    grouped_product,
    grouped_product_reference,
    plan_tiles,
)
from peagle.kernels.linear.packed_weights import Format
from peagle.kernels.linear.unpacking import unpack_weight

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
class Layer:
    """A product of experts, or with one expert a dense layer.

    Attributes:
        format: as published.
        num_experts, chosen: experts, and of how many a token is; 1 and 1: a dense layer.
        n, k: outputs (gate and up count both) and inputs.
        shares_x: the experts of a token read one row: the first of the two products.
    """

    name: str
    format: Format
    num_experts: int
    chosen: int
    n: int
    k: int
    gate: Gate | None = None
    has_bias: bool = False
    shares_x: bool = False

    @property
    def is_dense(self) -> bool:
        return self.num_experts == 1

    @property
    def label(self) -> str:
        return f"{self.name} {self.format}"

    def rows(self, tokens: int) -> float:
        """Tokens of an expert that has some, on average."""
        return tokens * self.chosen / min(self.num_experts, tokens * self.chosen)


CLAMPED = Gate("clamped", 1.702, 7.0)
LAYERS = [
    Layer("qwen3-coder-up", "fp8", 128, 8, 1536, 2048, Gate("silu"), shares_x=True),
    Layer("qwen3-coder-down", "fp8", 128, 8, 2048, 768),
    Layer("gpt-oss-20b-up", "mxfp4", 32, 4, 5760, 2880, CLAMPED, has_bias=True, shares_x=True),
    Layer("gpt-oss-20b-down", "mxfp4", 32, 4, 2880, 2880, has_bias=True),
    Layer("qwen3-coder-qkv", "fp8", 1, 1, 5120, 2048),
    Layer("qwen3-coder-o", "fp8", 1, 1, 2048, 4096),
    Layer("qwen3-8b-up", "fp8", 1, 1, 24_576, 4096),
    Layer("qwen3-8b-down", "fp8", 1, 1, 4096, 12_288),
    Layer("qwen3-8b-qkv", "fp8", 1, 1, 6144, 4096),
]
# Kinds, rows of x, half of the rows of the weight, and warps.
IN_REGISTERS: list[tuple[Kind, int, int, int]] = [
    ("registers", 8, 32, 2),
    ("registers", 8, 64, 4),
    ("registers", 16, 32, 2),
    ("registers", 16, 64, 4),
    ("registers", 32, 64, 4),
    ("warpgroup", 16, 64, 4),
    ("warpgroup", 32, 32, 4),
    ("warpgroup", 32, 64, 4),
    ("warpgroup", 32, 64, 8),
    ("warpgroup", 64, 32, 4),
    ("warpgroup", 64, 64, 4),
    ("warpgroup", 64, 64, 8),
    ("warpgroup", 64, 128, 16),
    ("warpgroup", 128, 32, 4),
    ("warpgroup", 128, 64, 8),
    ("warpgroup", 128, 128, 16),
]


def candidates(layer: Layer, tokens: int, quick: bool) -> list[GroupedConfig]:
    """Cuts to try; tiles of about as many rows as an expert has on average. Of tiled formats the
    first alone is Triton's.
    """
    step = 32 if layer.format == "mxfp4" else 128
    one, two = 128 // step, 256 // step
    rows = layer.rows(tokens)
    m = next((m for m in (8, 16, 32, 64) if rows <= m), 128)
    programs = -(-layer.n // 64) * min(layer.num_experts, tokens * layer.chosen)
    found: list[GroupedConfig] = []
    if m <= 16:
        found = [
            GroupedConfig(m, 32, step, one, 2, 3, kind="wx"),
            GroupedConfig(m, 32, step, two, 2, 3, kind="wx"),
            GroupedConfig(m, 16, step, one, 1, 3, kind="wx"),
        ]
        for split in (2, 4, 8):
            if programs * split <= 1600 and layer.k >= 256 * split:
                found += [replace(config, split_k=split) for config in found[:3]]
    if m >= 16:
        found += [
            GroupedConfig(min(m, 64), 32, step, one, 2, 3, kind="wx"),
            GroupedConfig(32, 32, step, one, 2, 3, kind="wx"),
            GroupedConfig(32, 64, step, one, 4, 3),
        ]
    if m >= 32:
        found += [
            GroupedConfig(64, 64, step, one, 4, 3),
            GroupedConfig(128, 64, step, one, 8, 3),
            GroupedConfig(128, 32, step, one, 4, 3),
        ]
        if layer.is_dense:
            found += [replace(c, split_k=s) for c in found[-4:] for s in (2, 4, 8)]
    if layer.format in ("fp8", "mxfp4"):
        found = found[:1] + [
            GroupedConfig(block_m, block_n, step, 1, warps, 3, split, kind)
            for kind, block_m, block_n, warps in IN_REGISTERS
            if m <= 2 * block_m <= 4 * m
            for split in (1, 2, 4, 8)
            if split == 1 or (programs * split < 3000 and layer.k >= 256 * split)
        ]
    itemsize = {"plain": 2.0, "mxfp4": 0.5, "int4": 0.5}.get(layer.format, 1.0)

    def fits(config: GroupedConfig) -> bool:
        if config.kind not in ("xw", "wx"):
            return True
        inputs = config.step * config.steps
        stage = inputs * (2 * config.block_n * itemsize + config.block_m * 2)
        return stage * config.num_stages < SHARED_BYTES

    found = [config for config in dict.fromkeys(found) if fits(config)]
    return found[:3] if quick else found


class Problem:
    """Weights, and rows with their routings."""

    def __init__(self, layer: Layer, tokens: int, num_experts: int | None = None) -> None:
        torch.manual_seed(0)
        self.layer, self.tokens = layer, tokens
        count = num_experts or (ROUTINGS if layer.is_dense else layer.num_experts)
        self.weight = random_weight(layer.format, (count, layer.n, layer.k), DEVICE)
        self.chosen = layer.chosen if layer.shares_x else 1
        size = tokens if layer.shares_x else tokens * layer.chosen
        self.x = torch.randn(size, layer.k, dtype=DTYPE, device=DEVICE)
        if layer.is_dense:
            self.indices = [
                torch.full((tokens,), i % count, device=DEVICE) for i in range(ROUTINGS)
            ]
        else:
            self.indices = [
                torch.rand(tokens, count, device=DEVICE).topk(layer.chosen).indices.view(-1)
                for _ in range(ROUTINGS)
            ]
        self.bias = None
        if layer.has_bias:
            self.bias = torch.randn(count, layer.n, device=DEVICE).to(DTYPE)
        self.plans: dict[int, list[Tensor]] = {}

    @property
    def floor_us(self) -> float:
        """Time of the bytes of a call, on average over the routings."""
        touched = statistics.mean(len(index.unique()) for index in self.indices)
        per_expert = self.weight.num_bytes / self.weight.data.shape[0]
        return touched * per_expert / COPY_BYTES_PER_S * 1e6

    def run(self, routing: int, config: GroupedConfig) -> Tensor:
        index, gate = self.indices[routing], self.layer.gate
        if self.layer.is_dense:
            weight = self.weight.expert(routing % self.weight.num_experts)
            return grouped_product(self.x, weight, None, gate, config=config)
        if config.block_m not in self.plans:
            experts = self.weight.num_experts
            self.plans[config.block_m] = [
                plan_tiles(index, experts, config.block_m) for index in self.indices
            ]
        plan = None if self.tokens == 1 else self.plans[config.block_m][routing]
        return grouped_product(
            self.x, self.weight, self.bias, gate,
            index_S=index, plan=plan, chosen=self.chosen, config=config,
        )  # fmt: skip

    def run_library(self, routing: int) -> Tensor:
        """The product of a dense layer over its unpacked weight."""
        weight = unpack_weight(self.weight.expert(routing % self.weight.num_experts), DTYPE)
        return F.linear(self.x, weight)

    @cached_property
    def expected(self) -> Tensor:
        """In float32, of the first assignments of the first routing."""
        bias = None if self.bias is None else self.bias.float()
        index = self.indices[0][: 8 if self.layer.is_dense else 64]
        x = self.x.float()[: len(index) // self.chosen]
        return grouped_product_reference(x, self.weight, bias, self.layer.gate, index)

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


def compile_one(job: tuple[Layer, int, GroupedConfig]) -> str:
    """Compile into Triton's cache on disk, from which this process's parent takes it."""
    layer, tokens, config = job
    try:
        Problem(layer, tokens, 1 if layer.is_dense else max(layer.chosen, 2)).run(0, config)
        torch.cuda.synchronize()
        return ""
    except Exception as error:
        return f"{layer.label} {label(config)}: {type(error).__name__}: {str(error)[:200]}"


def compile_all(jobs: list[tuple[Layer, int, GroupedConfig]]) -> None:
    start = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(WORKERS, mp_context=context) as pool:
        for reason in pool.map(compile_one, jobs):
            if reason:
                print(f"failed {reason}", flush=True)
    print(f"{len(jobs)} kernels in {time.perf_counter() - start:.0f} s", flush=True)


def label(config: GroupedConfig) -> str:
    m, n, step, steps, warps, stages, split, kind = astuple(config)
    return f"{kind} m{m} n{n} k{step}x{steps} w{warps} st{stages} s{split}"


def measure(layer: Layer, tokens: int, args: argparse.Namespace) -> dict[str, Any]:
    """All configurations of a layer for so many tokens."""
    problem = Problem(layer, tokens)
    weight = problem.weight.expert(0) if layer.is_dense else problem.weight
    choice = choose_config(
        tokens * layer.chosen,
        layer.num_experts,
        weight,
        registers=can_use_registers(problem.x, weight),
    )
    tried: dict[str, float] = {}
    for config in dict.fromkeys([*candidates(layer, tokens, args.quick), choice]):
        try:
            if args.check and not (error := problem.error(config)) < 2e-2:
                print(f"wrong {layer.label} {tokens} {label(config)}: {error:.1e}", flush=True)
            calls = [lambda i=i, c=config: problem.run(i, c) for i in range(ROUTINGS)]
            tried[label(config)] = microseconds(calls)
        except Exception as error:
            print(f"left out {layer.label} {tokens} {label(config)}: {str(error)[:150]}")
    if layer.is_dense and layer.format != "plain":
        calls = [lambda i=i: problem.run_library(i) for i in range(ROUTINGS)]
        tried["unpacked, by the library"] = microseconds(calls)
    ranking = sorted(tried, key=lambda name: tried[name])
    floor = problem.floor_us
    best, us = ranking[0], tried.get(label(choice), float("nan"))
    print(
        f"{layer.label:22} {tokens:4} floor {floor:6.1f} | {tried[best]:6.1f} "
        f"{floor / tried[best]:4.0%} {best} | {us:6.1f} {label(choice)}",
        flush=True,
    )
    if args.all:
        print("    " + "; ".join(f"{name} {tried[name]:.1f}" for name in ranking), flush=True)
    return {"layer": layer.label, "tokens": tokens, "floor_us": floor, "us": tried}


def measure_plan(layer: Layer, tokens: int) -> None:
    index = torch.randint(layer.num_experts, (tokens * layer.chosen,), device=DEVICE)
    us = microseconds([lambda: plan_tiles(index, layer.num_experts, 16)] * 10)
    print(f"{layer.name:22} {tokens:4} plan {us:.1f} us", flush=True)


def main() -> None:
    names = ",".join(layer.name for layer in LAYERS)
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", default="1,8,16,128,512", help="numbers of tokens")
    parser.add_argument("--layers", default=names, help="names, a list")
    parser.add_argument("--formats", help="plain, fp8, int8, int4, mxfp4 (default: as published)")
    parser.add_argument("--quick", action="store_true", help="fewer configurations")
    parser.add_argument("--all", action="store_true", help="print every configuration")
    parser.add_argument("--check", action="store_true", help="compare with plain torch")
    parser.add_argument("--plans", action="store_true", help="time the plans too")
    parser.add_argument("--out", type=Path, help="JSON file of all numbers")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("error: this benchmark needs an NVIDIA GPU.")
    tokens = [int(count) for count in args.tokens.split(",")]
    layers = [
        replace(layer, format=format)
        for layer in LAYERS
        if layer.name in args.layers.split(",")
        for format in (args.formats or layer.format).split(",")
    ]
    jobs = [
        (layer, count, config)
        for layer in layers
        for count in tokens
        for config in candidates(layer, count, args.quick)
    ]
    compile_all(jobs)
    results = [measure(layer, count, args) for layer in layers for count in tokens]
    if args.plans:
        for layer in (layer for layer in layers if layer.shares_x):
            for count in tokens:
                measure_plan(layer, count)
    if args.out:
        report = {"benchmark": "experts", "environment": environment(DEVICE), "results": results}
        args.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
