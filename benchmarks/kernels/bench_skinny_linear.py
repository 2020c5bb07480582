"""Products of few rows at the shapes of Qwen3-8B and its drafter: cuBLAS against ours.

    python benchmarks/kernels/bench_skinny_linear.py --out skinny.json
    python benchmarks/kernels/bench_skinny_linear.py --m 1,8 --quick

Time is of a CUDA graph that calls copies of the weight in turn, together far larger than the L2,
per call. Fractions are of the bandwidth of a copy. "swiglu" is gate_up with silu(gate) * up behind
it, in cuBLAS three kernels.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from peagle.environment import environment
from peagle.kernels.linear.skinny_linear import (
    H100_SHARED_BYTES,
    Kind,
    SkinnyConfig,
    choose_config,
    skinny_linear,
    skinny_swiglu,
    skinny_swiglu_reference,
)

DEVICE = torch.device("cuda")
H100_SMS = 132
DTYPE = torch.bfloat16
COPY_BYTES_PER_S = 3.03e12  # an H100's
ROTATED_BYTES = 200e6
REPLAYS = 10
WORKERS = 8
# Kind, block_n, block_k, warps and stages at 128 rows. One, two or three of these programs share a
# multiprocessor.
MANY_ROWS: list[tuple[Kind, int, int, int, int]] = [
    ("wx", 128, 64, 8, 3),
    ("wx", 64, 64, 4, 4),
    ("wx", 64, 64, 4, 3),
    ("wx", 128, 64, 4, 3),
    ("wx", 128, 64, 8, 6),
    ("xw", 128, 64, 8, 3),
    ("wx", 256, 64, 8, 4),
]
MANY_ROWS_SWIGLU: list[tuple[Kind, int, int, int, int]] = [  # so many rows of gate and of up
    ("wx", 64, 64, 8, 3),
    ("wx", 64, 64, 4, 3),
    ("wx", 64, 64, 8, 6),
    ("wx", 64, 128, 8, 3),
    ("xw", 64, 64, 8, 3),
    ("xw", 32, 64, 4, 4),
    ("wx", 128, 64, 8, 4),
    ("xw", 128, 64, 8, 4),
]
Call = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Shape:
    """One weight, and how often a step of the target reads it."""

    name: str
    n: int
    k: int
    per_step: int

    @property
    def is_swiglu(self) -> bool:
        return self.name == "swiglu"

    @property
    def weight_bytes(self) -> int:
        return self.n * self.k * DTYPE.itemsize


SHAPES = [
    Shape("o", 4096, 4096, 36),
    Shape("qkv", 6144, 4096, 36),
    Shape("down", 4096, 12_288, 36),
    Shape("gate_up", 24_576, 4096, 36),
    Shape("lm_head", 151_936, 4096, 1),
    Shape("fc", 4096, 12_288, 0),
    Shape("qkv0", 6144, 8192, 0),
    Shape("d_head", 32_000, 4096, 0),
    Shape("swiglu", 24_576, 4096, 0),
]


def candidates(shape: Shape, m: int, quick: bool) -> list[SkinnyConfig]:
    """What is tried: the same kernels for 2 to 16 rows, and as many of the same for all shapes."""
    if m > 64:
        return many_rows(shape, quick)
    c = SkinnyConfig
    is_small = shape.n <= 8192
    configs: list[SkinnyConfig] = []
    if m <= 16:
        configs += [
            c(16, 64, 128, 1, 4, 4),
            c(16, 32, 256, 1, 4, 6),
            c(16, 64, 128, 1, 4, 4, kind="wx"),
            c(16, 64, 128, 1, 4, 6, kind="wx", tma=True),
        ]
        if not quick and is_small:
            configs += [
                c(16, 32, 128, 1, 4, 6),
                c(16, 16, 256, 1, 4, 6),
                c(16, 32, 256, 1, 4, 6, tma=True),
                c(16, 64, 128, 2, 4, 6),
                c(16, 128, 128, 4, 4, 4),
                c(16, 64, 128, 2, 4, 5, kind="wx", tma=True),
            ]
        elif not quick:
            configs += [
                c(16, 64, 256, 1, 4, 3),
                c(16, 128, 128, 1, 4, 3),
                c(16, 128, 64, 1, 4, 5),
                c(16, 128, 128, 1, 4, 3, kind="wx"),
                c(16, 128, 128, 1, 4, 4, kind="wx", tma=True),
                c(16, 128, 128, 1, 8, 4, kind="wx"),
            ]
        if m == 1:
            gemvs = [
                c(1, 16, 512, 1, 4, 1, kind="gemv"),
                c(1, 8, 1024, 1, 4, 1, kind="gemv"),
                c(1, 8, 512, 1, 4, 4, kind="gemv"),
                c(1, 4, 1024, 1, 2, 1, kind="gemv"),
            ]
            configs = [*(configs[:2] if quick else configs[:8]), *gemvs[: 2 if quick else 4]]
    else:
        block_m = 32 if m <= 32 else 64
        configs += [
            c(block_m, 64, 128, 2 if is_small else 1, 4, 4 if m <= 32 else 3),
            c(block_m, 64, 128, 2 if is_small else 1, 4, 4, kind="wx", tma=True),
            c(block_m, 128, 64, 4 if is_small else 1, 4, 5, kind="wx"),
        ]
        if not quick:
            configs += [
                c(block_m, 128, 128, 4 if is_small else 1, 4, 3, kind="wx", tma=True),
                c(block_m, 128, 128, 4 if is_small else 1, 8, 3, kind="wx"),
                c(block_m, 32 if is_small else 256, 128 if is_small else 64, 1, 4, 4),
            ]
    if shape.is_swiglu:  # so many rows of gate and of up
        halves = (dataclasses.replace(x, block_n=x.block_n // 2) for x in configs)
        configs = [x for x in halves if x.kind != "wx" or x.block_n >= 64]
    return list(dict.fromkeys(configs))


def many_rows(shape: Shape, quick: bool) -> list[SkinnyConfig]:
    """Above 64 rows: up to 128 of them in one tile, so that the weight is read once. K is split so
    that there is a program for every place in a multiprocessor, but for swiglu.
    """
    cuts = MANY_ROWS_SWIGLU if shape.is_swiglu else MANY_ROWS
    configs: list[SkinnyConfig] = []
    for kind, block_n, block_k, num_warps, num_stages in cuts[:4] if quick else cuts:
        config = SkinnyConfig(128, block_n, block_k, 1, num_warps, num_stages, kind=kind, tma=True)
        used = num_stages * config.stage_bytes(DTYPE.itemsize, swiglu=shape.is_swiglu)
        places = H100_SMS * (H100_SHARED_BYTES // (used + 2048))  # barriers, and what Triton adds
        split_k = places // -(-shape.n // block_n)
        if not shape.is_swiglu and split_k > 1:
            config = dataclasses.replace(config, split_k=min(split_k, 8))
        configs.append(config)
    return configs


def chosen(shape: Shape, m: int, num_sms: int) -> SkinnyConfig:
    """What the operator takes when it is given nothing."""
    return choose_config(
        m, shape.n, shape.k, DTYPE.itemsize, num_sms, swiglu=shape.is_swiglu, tma=True
    )


def ours(shape: Shape, config: SkinnyConfig) -> Call:
    multiply = skinny_swiglu if shape.is_swiglu else skinny_linear
    return lambda x, weight: multiply(x, weight, config=config)


def cublas(shape: Shape) -> Call:
    return skinny_swiglu_reference if shape.is_swiglu else F.linear


def compile_one(job: tuple[bool, SkinnyConfig]) -> str:
    """Compile into Triton's cache on disk, from which this process's parent takes it."""
    is_swiglu, config = job
    try:
        shape = Shape("swiglu" if is_swiglu else "", 512, 4096, 0)
        x = torch.zeros(2, shape.k, dtype=DTYPE, device=DEVICE)
        weight = torch.zeros(shape.n, shape.k, dtype=DTYPE, device=DEVICE)
        ours(shape, config)(x, weight)
        torch.cuda.synchronize()
        return ""
    except Exception as error:
        return f"{label(config)}: {type(error).__name__}: {str(error)[:200]}"


def compile_all(jobs: list[tuple[bool, SkinnyConfig]]) -> None:
    """In several processes; what fails here is compiled again, and reported, where it is timed."""
    start = time.perf_counter()
    failures: list[str] = []
    try:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(WORKERS, mp_context=context) as pool:
            failures = [reason for reason in pool.map(compile_one, jobs) if reason]
    except Exception as error:
        print(f"compiling one by one: {error}", flush=True)
    for reason in failures:
        print(f"failed {reason}", flush=True)
    print(f"{len(jobs)} kernels in {time.perf_counter() - start:.0f} s", flush=True)


class Problem:
    """Rows and as many copies of a weight as the L2 cannot hold."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        torch.manual_seed(0)
        copies = max(1, -(-int(ROTATED_BYTES) // shape.weight_bytes))
        self.weights = [
            torch.randn(shape.n, shape.k, dtype=DTYPE, device=DEVICE) * shape.k**-0.5
            for _ in range(copies)
        ]

    def rows(self, m: int) -> Tensor:
        torch.manual_seed(m)
        return torch.randn(m, self.shape.k, dtype=DTYPE, device=DEVICE)

    def expected(self, x: Tensor) -> Tensor:
        """In float32, of the first copy."""
        return cublas(self.shape)(x.float(), self.weights[0].float())

    def microseconds(self, x: Tensor, call: Call) -> float:
        """Median time of a call, from replays of a graph with at least ten of them."""
        for weight in self.weights[:2]:
            call(x, weight)
        torch.cuda.synchronize()
        rounds = max(1, -(-10 // len(self.weights))) if self.shape.weight_bytes < 1e9 else 2
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(rounds):
                for weight in self.weights:
                    call(x, weight)
        graph.replay()
        times = [elapsed(graph.replay) for _ in range(REPLAYS)]
        return statistics.median(times) / (rounds * len(self.weights))


def elapsed(run: Callable[[], Any]) -> float:
    """Microseconds."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def label(config: SkinnyConfig) -> str:
    tma = " tma" if config.tma else ""
    sizes = f"m{config.block_m} n{config.block_n} k{config.block_k} s{config.split_k}"
    return f"{config.kind} {sizes} w{config.num_warps} st{config.num_stages}{tma}"


def measure(
    problem: Problem, m: int, configs: list[SkinnyConfig], choice: SkinnyConfig
) -> dict[str, Any]:
    """cuBLAS and all configurations at one shape and number of rows."""
    shape, x = problem.shape, problem.rows(m)
    expected = problem.expected(x)
    tried: dict[SkinnyConfig, float] = {}
    for config in dict.fromkeys([*configs, choice]):
        try:
            out = ours(shape, config)(x, problem.weights[0])
            error = float((out.float() - expected).norm() / expected.norm())
            if not error < 1e-2:
                print(f"wrong {shape.name} m={m} {label(config)}: {error:.1e}", flush=True)
                continue
            tried[config] = problem.microseconds(x, ours(shape, config))
        except Exception as reason:
            text = f"{type(reason).__name__}: {str(reason)[:150]}"
            print(f"left out {shape.name} m={m} {label(config)}: {text}", flush=True)
    ranking = sorted(tried, key=lambda config: tried[config])
    best = ranking[0] if ranking else None
    return {
        "shape": shape.name,
        "n": shape.n,
        "k": shape.k,
        "m": m,
        "floor_us": shape.weight_bytes / COPY_BYTES_PER_S * 1e6,
        "cublas_us": problem.microseconds(x, cublas(shape)),
        "best_us": tried[best] if best else None,
        "best": label(best) if best else None,
        "choice_us": tried.get(choice),
        "choice": label(choice),
        "all_us": {label(config): tried[config] for config in ranking},
    }


def line(r: dict[str, Any]) -> str:
    def cell(us: float | None) -> str:
        return f"{us:7.1f} {r['floor_us'] / us:4.0%}" if us else "      -    -"

    return (
        f"{r['shape']:8} {r['m']:3} {cell(r['cublas_us'])} | {cell(r['best_us'])} "
        f"{r['best'] or '-':36} | "
        f"{cell(r['choice_us'])} {r['choice']}"
    )


def step_sums(results: list[dict[str, Any]], m: int) -> dict[str, float | None]:
    """Milliseconds of a step of the target, by column; None where a shape is missing."""
    found = {r["shape"]: r for r in results if r["m"] == m}
    sums: dict[str, float | None] = {}
    for column in ("floor_us", "cublas_us", "best_us", "choice_us"):
        total: float | None = 0.0
        for shape in SHAPES:
            if shape.per_step:
                us = found.get(shape.name, {}).get(column)
                total = None if us is None or total is None else total + shape.per_step * us / 1e3
        sums[column] = total
    return sums


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--m", default="1,4,8,16,32,64", help="numbers of rows")
    parser.add_argument("--shapes", help="names, as o,qkv (default: all)")
    parser.add_argument("--quick", action="store_true", help="fewer configurations")
    parser.add_argument("--all", action="store_true", help="print every configuration")
    parser.add_argument("--out", type=Path, help="JSON file of all numbers")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("error: this benchmark needs an NVIDIA GPU.")
    begin = time.perf_counter()
    rows = [int(m) for m in args.m.split(",")]
    names = args.shapes.split(",") if args.shapes else [shape.name for shape in SHAPES]
    shapes = [shape for shape in SHAPES if shape.name in names]
    num_sms = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    jobs = dict.fromkeys(
        (shape.is_swiglu, config)
        for shape in shapes
        for m in rows
        for config in [*candidates(shape, m, args.quick), chosen(shape, m, num_sms)]
    )
    # How K is split and how many rows there are changes no more than a number, or nothing.
    compile_all(list(jobs))

    results: list[dict[str, Any]] = []
    report: dict[str, Any] = {
        "benchmark": "skinny_linear",
        "environment": environment(DEVICE),
        "dtype": str(DTYPE).removeprefix("torch."),
        "copy_bytes_per_s": COPY_BYTES_PER_S,
        "results": results,
    }
    print("shape      m  cuBLAS us     | best us, config | choose_config", flush=True)
    for shape in shapes:
        problem = Problem(shape)
        for m in rows:
            configs = candidates(shape, m, args.quick)
            results.append(measure(problem, m, configs, chosen(shape, m, num_sms)))
            print(line(results[-1]), flush=True)
            if args.all:
                for name, us in results[-1]["all_us"].items():
                    print(f"    {us:8.2f} {name}", flush=True)
            if args.out:  # after each, so that a run cut short leaves what it had
                args.out.write_text(json.dumps(report, indent=1))
        del problem
        torch.cuda.empty_cache()
    print("a step of the target, ms: copy bandwidth, cuBLAS, best, choose_config")
    report["steps"] = {m: step_sums(results, m) for m in rows}
    for m, sums in report["steps"].items():
        values = " ".join(f"{ms:6.2f}" if ms else "     -" for ms in sums.values())
        print(f"  m={m:<3} {values}")
    report["seconds"] = time.perf_counter() - begin
    print(f"{report['seconds']:.0f} s")
    if args.out:
        args.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
