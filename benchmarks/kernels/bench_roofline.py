"""Where the milliseconds of a decode step of an FP8 model go, layer by layer, against their floors.

    python benchmarks/kernels/bench_roofline.py --shape qwen3-coder-30b-a3b   # about 3 minutes
    python benchmarks/kernels/bench_roofline.py --shape qwen3-8b --output roofline.json
    python benchmarks/kernels/bench_roofline.py --quick                       # about a minute
    python benchmarks/kernels/bench_roofline.py --check                       # errors, no times
    python benchmarks/kernels/bench_roofline.py --target CHECKPOINT           # counts its experts
    TRITON_INTERPRET=1 python benchmarks/kernels/bench_roofline.py --shape tiny-experts \\
        --device cpu --tokens 1,3 --context 32                                # a smoke test

A table for each number of tokens has the layers of a step of the target and of a P-EAGLE head. Its
columns, in microseconds of one layer:

- MB, GFLOP: what must be read and written, and computed. Weights count once, of experts those that
  the timed routings touch.
- bytes: the time of the bytes at the bandwidth of a copy; bf16, fp8: the time of the operations at
  the rate of the matrix unit, each measured by this script first. Activations lie in the L2, as in
  a step, so layers that read little else can beat the time of their bytes.
- binds: the longer of the two. FP8 stands where the operations bind in bfloat16 but not in FP8.
- ours: the engine's own call; x: ours over the floor, which is the longer of bytes and bf16.
- ms: ours times the layers of a step.
- fp8 x fp8: the fastest candidate that multiplies FP8 activations, and the time of quantising them
  (1 x 128), which comes on top; of "experts whole" it is part of the candidate.

Time is of CUDA graphs that call copies of the weights in turn, together larger than the L2. A step
has --queries rows of each sequence, over a cache of --context positions; attention and counts round
tokens up to whole sequences. A candidate that differs from float32 products of the same quantised
numbers is named as not there. The last line is one JSON object.
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
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from bench_paged_attention import seconds
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1]))
from common import run_guarded
from roofline_layers import DTYPE, ExpertProduct, Layer, Setting, Work, layers_of
from shapes import SHAPES

from peagle import LLM, SamplingParams
from peagle.cli.setup import quiet_libraries
from peagle.environment import environment
from peagle.evaluation.prompts import load_prompt_set
from peagle.evaluation.touched_experts import (
    DecodePass,
    count_by_batch,
    expected_experts,
    recorded_passes,
)
from peagle.kernels.attention.paged_attention import MAX_WRITE_ROWS
from peagle.models.routing import num_experts_of

ROTATED_BYTES = 200_000_000  # four times the L2 of an H100
BUDGET_S = 0.01  # of a graph
WORKERS = 12
COUNTED_SEQUENCES, COUNTED_STEPS = 64, 32
Call = Callable[[], Any]


@dataclass(frozen=True)
class Rates:
    """What the device does in a second: bytes of a copy, read and written, and operations.

    Attributes:
        fp8_flops: None where there is no such product.
    """

    copy_bytes: float
    bf16_flops: float
    fp8_flops: float | None

    def times_us(self, work: Work, *, is_fp8: bool) -> dict[str, float | None]:
        """Return the times of a layer's bytes and operations."""
        fp8 = self.fp8_flops if is_fp8 else None
        return {
            "bytes_us": work.bytes / self.copy_bytes * 1e6,
            "bf16_us": work.flops / self.bf16_flops * 1e6,
            "fp8_us": work.flops / fp8 * 1e6 if fp8 else None,
        }


def microseconds(calls: list[Call], device: torch.device) -> float:
    """Median time of a call: of a CUDA graph of all of them, or on a CPU of one after the other."""
    if device.type == "cuda":
        return seconds(calls, BUDGET_S) * 1e6
    times = []
    for call in calls:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def measure_rates(device: torch.device) -> Rates:
    """Measure a copy, and square products in both types."""
    size, side = (2**30, 8192) if device.type == "cuda" else (2**20, 256)
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_us = microseconds([lambda: target.copy_(source)], device)
    a, b = (torch.randn(side, side, dtype=DTYPE, device=device) for _ in range(2))
    bf16_us = microseconds([lambda: a @ b.T], device)
    a8, b8 = (x.to(torch.float8_e4m3fn) for x in (a, b))
    one = torch.ones((), device=device)

    def multiply() -> Tensor:
        return torch._scaled_mm(a8, b8.T, one, one, out_dtype=DTYPE, use_fast_accum=True)

    try:
        fp8_us = microseconds([multiply], device)
    except (RuntimeError, NotImplementedError) as error:
        print(f"no product of FP8: {first_line(error)}", file=sys.stderr)
        fp8_us = None
    flops = 2 * side**3
    return Rates(
        2e6 * size / copy_us, 1e6 * flops / bf16_us, 1e6 * flops / fp8_us if fp8_us else None
    )


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def measure(
    layer: Layer, tokens: int, rates: Rates | None, *, with_candidates: bool
) -> dict[str, Any]:
    """One row: a layer for so many tokens; without rates candidates are compared, not timed."""
    work = layer.work(tokens)
    row: dict[str, Any] = {
        "model": layer.owner,
        "layer": layer.name,
        "tokens": tokens,
        "per_step": layer.per_step,
        "bytes": work.bytes,
        "flops": work.flops,
    }
    if rates:
        row |= rates.times_us(work, is_fp8=layer.is_fp8)
        row["binds"] = binding(row)
        row["floor_us"] = max(row["bytes_us"], row["bf16_us"])
        row |= time_ours(layer, tokens, row)
    if with_candidates and layer.is_fp8:
        row |= measure_candidates(layer, tokens, timed=rates is not None)
    return row


def time_ours(layer: Layer, tokens: int, row: dict[str, Any]) -> dict[str, Any]:
    """Time the engine's call, and compare it with the floors of its row."""
    try:
        calls = layer.calls(tokens)
        us = microseconds(calls, layer.setting.device) if calls else 0.0
    except Exception as error:
        return {"ours_us": None, "over_floor": None, "failed": first_line(error)}
    over: dict[str, Any] = {"over_floor": us / row["floor_us"] if row["floor_us"] else None}
    if row["fp8_us"]:
        over["over_fp8_floor"] = us / max(row["bytes_us"], row["fp8_us"])
    return {"ours_us": us, **over}


def binding(row: dict[str, Any]) -> str:
    """Return which of the times is the floor."""
    if row["bf16_us"] <= row["bytes_us"]:
        return "bytes"
    return "FP8" if row["fp8_us"] and row["fp8_us"] <= row["bytes_us"] else "flops"


def measure_candidates(layer: Layer, tokens: int, *, timed: bool) -> dict[str, Any]:
    """Compare the candidates of a layer with float32 and time those that agree."""
    device = layer.setting.device
    try:
        candidates, unavailable = layer.candidates(tokens)
    except Exception as error:
        return {"candidates": [], "unavailable": {"all": first_line(error)}}
    found: list[dict[str, Any]] = []
    quantise_us = None
    for candidate in candidates:
        try:
            if not (error := candidate.error()) < candidate.largest_error:
                unavailable[candidate.name] = f"wrong: its error is {error:.1e}"
                continue
            us = microseconds(candidate.calls, device) if timed else None
        except Exception as reason:
            unavailable[candidate.name] = first_line(reason)
            continue
        if candidate.name == "quantise":
            quantise_us = us
        else:
            found.append({"name": candidate.name, "us": us, "error": error})
    if timed:
        found.sort(key=lambda one: one["us"])
    return {"quantise_us": quantise_us, "candidates": found, "unavailable": unavailable}


def new_processes(count: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn"))


def warm_one(job: tuple[str, Setting, int, int, bool]) -> str | None:
    """Compile what a layer needs for so many tokens into Triton's cache; say why that failed."""
    shape, setting, index, tokens, with_candidates = job
    try:
        with torch.inference_mode():
            layer = layers_of(as_fp8(shape), setting)[index]
            for call in layer.calls(tokens)[:1]:
                call()
            others = layer.candidates(tokens)[0] if with_candidates else []
            for other in others:
                other.calls[0]()
            torch.cuda.synchronize()
    except Exception as error:
        return first_line(error)
    finally:
        torch.cuda.empty_cache()
    return None


def warm(shape: str, setting: Setting, tokens: list[int], *, with_candidates: bool) -> None:
    """Compile in several processes; what fails here fails again where it is timed."""
    small = replace(setting, rotated_bytes=0)
    jobs = [
        (shape, small, index, count, with_candidates)
        for count in tokens
        for index, layer in enumerate(layers_of(as_fp8(shape), setting))
        if not layer.is_compiled and layer.per_step
    ]
    start = time.perf_counter()
    with new_processes(WORKERS) as pool:
        for reason in filter(None, pool.map(warm_one, jobs)):
            print(f"failed {reason}", file=sys.stderr)
    print(f"compiled in {time.perf_counter() - start:.0f} s", file=sys.stderr)


def count_touched(
    checkpoint: str, tokens: list[int], setting: Setting
) -> tuple[dict[int, float], str]:
    """Count the distinct experts that a step of so many tokens touches in a layer of a model.

    Sequences decode HumanEval without drafts. Rows of a sequence are its tokens of steps that
    follow each other. Numbers of tokens that need more sequences have no count.
    """
    llm = LLM(checkpoint, max_num_seqs=COUNTED_SEQUENCES, device=str(setting.device))
    num_experts = num_experts_of(llm.target)
    if not num_experts:
        return {}, "the model has no experts"
    prompts = [prompt.text for prompt in load_prompt_set("humaneval", COUNTED_SEQUENCES)]
    steps = COUNTED_STEPS + setting.queries
    with recorded_passes(llm) as passes:
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True))
    full = [one for one in passes if len(one.num_rows) == len(prompts)]
    merged = [
        join_passes(full[i : i + setting.queries])
        for i in range(0, len(full) - setting.queries + 1, setting.queries)
    ]
    if not merged:
        return {}, "no step had all sequences"
    sizes = {count: setting.sequences(count) for count in tokens}
    ks = sorted({queries - 1 for _, queries in sizes.values()})
    counts = count_by_batch(merged, num_experts, ks)
    return {
        count: counts.touched(sequences, queries - 1)
        for count, (sequences, queries) in sizes.items()
        if sequences <= len(prompts)
    }, f"{len(prompts)} sequences of humaneval, {len(merged)} groups of steps"


def join_passes(passes: list[DecodePass]) -> DecodePass:
    """Return passes of one row of a sequence as one pass of as many rows."""
    experts = torch.stack([one.experts_LTC for one in passes], 2)  # L, B, rows, C
    return DecodePass((len(passes),) * experts.shape[1], experts.flatten(1, 2))


def touched_experts(
    layers: list[Layer], tokens: list[int], counted: dict[int, float], rates: Rates
) -> dict[int, dict[str, Any]]:
    """Return the experts that steps touch, and the time of their products' bytes as counted."""
    products = [layer for layer in layers if isinstance(layer, ExpertProduct)]
    if not products:
        return {}
    problem = products[0].problem
    found = {}
    for count in tokens:
        own: dict[str, Any] = {
            "even": expected_experts(count, problem.chosen, problem.experts),
            "timed": problem.num_touched(count),
            "counted": counted.get(count),
        }
        if count in counted:
            own["counted_bytes_us"] = {
                layer.name: layer.work_of(count, counted[count]).bytes / rates.copy_bytes * 1e6
                for layer in products
            }
        found[count] = own
    return found


def print_table(rows: list[dict[str, Any]], tokens: int) -> None:
    """Print the layers of a step of so many tokens."""
    print(f"\n{tokens} tokens")
    print(
        f"{'':26}{'MB':>8}{'GFLOP':>8}{'bytes':>8}{'bf16':>8}{'fp8':>8} {'binds':6}{'ours':>8}"
        f"{'x':>6}{'ms':>7}  fp8 x fp8"
    )
    for row in rows:
        fp8 = f"{row['fp8_us']:8.1f}" if row["fp8_us"] is not None else f"{'-':>8}"
        over = f"{row['over_floor']:6.1f}" if row["over_floor"] else f"{'-':>6}"
        name, us = f"{row['model']}: {row['layer']}", row["ours_us"]
        ours = f"{'failed':>8}" if us is None else f"{us:8.1f}"
        ms = f"{row['per_step'] * us / 1e3:7.2f}" if us and row["per_step"] else f"{'-':>7}"
        print(
            f"{name:26}{row['bytes'] / 1e6:8.2f}{row['flops'] / 1e9:8.2f}{row['bytes_us']:8.2f}"
            f"{row['bf16_us']:8.1f}{fp8} {row['binds']:6}{ours}{over}{ms}"
            f"  {best_candidate(row)}"
        )
    for model, total in step_sums(rows).items():
        times = ", ".join(f"{name} {ms:.2f}" for name, ms in total.items())
        print(f"{model}, ms of a step: {times}")


def best_candidate(row: dict[str, Any]) -> str:
    if not row.get("candidates"):
        return ""
    best, quantise_us = row["candidates"][0], row["quantise_us"]
    added = "" if quantise_us is None else f"+ {quantise_us:.1f} "
    return f"{best['us']:.1f} {added}{best['name']}"


def step_sums(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return milliseconds of a step by model: floors, ours, and ours with candidates where they and
    the quantising before them are faster. A layer that failed is in none.
    """
    sums: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["ours_us"] is None:
            continue
        own = sums.setdefault(
            row["model"], dict.fromkeys(("floor", "fp8_floor", "ours", "with_candidates"), 0.0)
        )
        fp8_us = row["bf16_us"] if row["fp8_us"] is None else row["fp8_us"]
        times = {
            "floor": row["floor_us"],
            "fp8_floor": max(row["bytes_us"], fp8_us),
            "ours": row["ours_us"],
            "with_candidates": row["ours_us"],
        }
        if row.get("candidates") and row["quantise_us"] is not None:
            other = row["candidates"][0]["us"] + row["quantise_us"]
            times["with_candidates"] = min(row["ours_us"], other)
        for name, us in times.items():
            own[name] += row["per_step"] * us / 1e3
    return sums


def as_fp8(name: str) -> Any:
    return replace(SHAPES[name], format="fp8")


def parse_args() -> argparse.Namespace:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [name for name, one in SHAPES.items() if one.model_type in ("qwen3", "qwen3_moe")]
    on_gpu = torch.cuda.is_available()
    options.add_argument("--shape", default="qwen3-coder-30b-a3b", choices=names)
    options.add_argument("--tokens", help="numbers of tokens (1,8,16,64,128,512,2048)")
    options.add_argument("--context", type=int, default=1024, help="positions of a sequence (1024)")
    options.add_argument("--queries", type=int, default=8, help="rows of a sequence, up to 64 (8)")
    options.add_argument("--layers", help="time these alone, as q/k/v,o (all)")
    options.add_argument("--target", help="checkpoint whose experts are counted, loaded first")
    options.add_argument("--no-candidates", action="store_true", help="time our kernels alone")
    options.add_argument("--quick", action="store_true", help="1, 64 and 512 tokens")
    options.add_argument("--check", action="store_true", help="compare candidates, time nothing")
    options.add_argument("--device", default="cuda" if on_gpu else "cpu")
    options.add_argument("--output", type=Path, help="file for the JSON object")
    args = options.parse_args()
    default = "1,64,512" if args.quick else "1,8,16,64,128,512,2048"
    if not 1 <= args.queries <= min(MAX_WRITE_ROWS, args.context):
        options.error(f"--queries is {args.queries}; expected 1 to {MAX_WRITE_ROWS} and --context")
    args.tokens = [int(count) for count in (args.tokens or default).split(",")]
    return args


def main() -> None:
    args = parse_args()
    quiet_libraries()
    begin, device = time.perf_counter(), torch.device(args.device)
    rotated = ROTATED_BYTES if device.type == "cuda" else 0
    setting = Setting(device, args.context, args.queries, rotated)
    report: dict[str, Any] = {
        "benchmark": "roofline",
        "command": " ".join(["python", *sys.argv]),
        "environment": environment(device),
        "shape": args.shape,
        "context": args.context,
        "queries": args.queries,
    }
    with_candidates = not args.no_candidates
    counted: dict[int, float] = {}
    if args.target:
        with new_processes(1) as pool:  # which gives its memory back
            job = pool.submit(count_touched, args.target, args.tokens, setting)
            counted, report["counted"] = job.result()
    if device.type == "cuda":
        warm(args.shape, setting, args.tokens, with_candidates=with_candidates)
    torch.manual_seed(0)
    with torch.inference_mode():
        rates = None if args.check else measure_rates(device)
        layers = layers_of(as_fp8(args.shape), setting)
        if args.layers:
            layers = [layer for layer in layers if layer.name in args.layers.split(",")]
        touched = touched_experts(layers, args.tokens, counted, rates) if rates else {}
        rows = []
        while layers:  # each is freed before the next is made
            layer = layers.pop(0)
            for count in args.tokens:
                rows.append(measure(layer, count, rates, with_candidates=with_candidates))
            del layer
            torch.cuda.empty_cache()
    report |= {"rates": asdict(rates) if rates else None, "touched": touched, "rows": rows}
    report["seconds"] = time.perf_counter() - begin
    show(report, args.tokens)
    if args.output:
        args.output.write_text(json.dumps(report) + "\n", encoding="utf-8")


def show(report: dict[str, Any], tokens: list[int]) -> None:
    """Print the tables, and the report as the last line."""
    ordered = sorted(report["rows"], key=lambda row: tokens.index(row["tokens"]))
    if rates := report["rates"]:
        fp8 = rates["fp8_flops"]
        print(
            f"copy {rates['copy_bytes'] / 1e12:.2f} TB/s, bfloat16 "
            f"{rates['bf16_flops'] / 1e12:.0f} TFLOP/s, FP8 "
            f"{f'{fp8 / 1e12:.0f} TFLOP/s' if fp8 else 'not there'}"
        )
        steps = report["steps"] = {}
        for count, group in groupby(ordered, key=lambda row: row["tokens"]):
            own = list(group)
            print_table(own, count)
            steps[count] = step_sums(own)
    for count, experts in report["touched"].items():
        numbers = ", ".join(f"{n} {v:.1f}" for n, v in experts.items() if isinstance(v, float))
        print(f"experts that {count} tokens touch: {numbers}")
    reasons: dict[str, list[int]] = {}
    for row in ordered:
        place = f"{row['model']}: {row['layer']}"
        failed = {"ours": row["failed"]} if "failed" in row else {}
        for name, reason in (failed | row.get("unavailable", {})).items():
            reasons.setdefault(f"{place}, {name}: {reason}", []).append(row["tokens"])
        if not rates:
            for one in row.get("candidates", ()):
                print(f"{place}, {row['tokens']} tokens, {one['name']}: error {one['error']:.1e}")
    for reason, counts in reasons.items():
        print(f"not there for {', '.join(map(str, counts))} tokens: {reason}")
    print(json.dumps(report))


if __name__ == "__main__":
    run_guarded(main)
