"""What a step of a mixture is priced by in `peagle tune`: tokens, or the experts it touches.

    python benchmarks/step_price.py --shape qwen3-coder-30b-a3b --layers 8
    python benchmarks/step_price.py --shape small-experts --threads 1 --k 1,2,3,4,5,6,7 --rounds 8

Times decode steps of a random mixture with a random head as `peagle tune` does, and counts the
experts that steps touch. The model of costs is fitted to the usual cells three times: without a
price for experts, with one for experts under even routing, and with one for counted experts. One
JSON object says how far each is off at the cells that it was not fitted to, in seconds of a step
and of the target's pass.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from common import run_guarded
from shapes import SHAPES, make_head, make_target

from peagle.cli.setup import quiet_libraries, set_threads
from peagle.engine.placement import resolve_device, resolve_dtype
from peagle.environment import environment
from peagle.evaluation.journal import Journal
from peagle.evaluation.touched_experts import ExpertCounts, expected_experts
from peagle.evaluation.tuning.acceptance import AcceptanceByK
from peagle.evaluation.tuning.machine import CostPoint, DecodeCost, EngineMachine
from peagle.evaluation.tuning.model import CostModel, Shape
from peagle.evaluation.tuning.tune import Grid, measure_costs

ACCEPTED = 0.8  # of the drafts whose predecessors were accepted


def even_counts(counted: ExpertCounts) -> ExpertCounts:
    """The experts that the same steps touch under even routing."""
    chosen, count = counted.num_chosen, counted.num_experts
    return replace(
        counted,
        by_k={
            k: [expected_experts(b * (k + 1), chosen, count) for b in range(1, len(own) + 1)]
            for k, own in counted.by_k.items()
        },
    )


def errors(
    shape: Shape, costs: Mapping[CostPoint, DecodeCost], fitted: frozenset[CostPoint]
) -> dict[str, dict[str, float]]:
    """How far a fitted model is off at the other points, as shares."""
    model = CostModel(shape, {point: costs[point] for point in costs if point in fitted})
    others = [point for point in costs if point not in fitted]
    found = {
        "step": [model.seconds(p.batch, p.k) / costs[p].seconds - 1 for p in others],
        "target_pass": [model.target_seconds(p) / costs[p].target_s - 1 for p in others],
    }
    return {
        name: {
            "worst": round(max(map(abs, shares)), 4),
            "mean": round(fmean(map(abs, shares)), 4),
            "within_10_percent": sum(abs(share) <= 0.1 for share in shares),
            "cells": len(shares),
        }
        for name, shares in found.items()
    }


def parse_args() -> argparse.Namespace:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--shape", default="tiny-experts", choices=SHAPES)
    options.add_argument("--layers", type=int, help="layers of the target (the shape's)")
    options.add_argument("--k", default="1,3,7", help="draft tokens per step (1,3,7)")
    options.add_argument("--batch-sizes", default="1,2,4,8,16", help="sequences (1,2,4,8,16)")
    options.add_argument("--context", type=int, default=128, help="tokens of a sequence (128)")
    options.add_argument("--steps", type=int, default=8, help="timed steps of a visit (8)")
    options.add_argument("--rounds", type=int, default=3, help="visits to each cell (3)")
    options.add_argument("--threads", type=int, help="CPU threads (torch's choice)")
    options.add_argument("--device", default="auto")
    return options.parse_args()


def main() -> None:
    args = parse_args()
    quiet_libraries()
    set_threads(args.threads)
    device = resolve_device(args.device)
    shape = SHAPES[args.shape]
    if device.type != "cuda":
        shape = replace(shape, format="plain")  # no kernel reads packed weights on a CPU
    if args.layers:
        shape = replace(shape, config=shape.config | {"num_hidden_layers": args.layers})
    grid = Grid(*(tuple(map(int, text.split(","))) for text in (args.batch_sizes, args.k)))
    acceptance = AcceptanceByK({k: [ACCEPTED ** (i + 1) for i in range(k)] for k in grid.ks})
    source, most = random.Random(0), grid.batches[-1]
    words = range(shape.config["vocab_size"])
    prompts = [source.choices(words, k=args.context) for _ in range(most)]
    with tempfile.TemporaryDirectory() as name:
        dtype = resolve_dtype("auto", device)
        target = make_target(shape, Path(name), dtype, device)
        make_head(shape, "peagle", Path(name, "head"), dtype, device)
        machine = EngineMachine(
            *(target, str(Path(name, "head")), acceptance, grid.ks, prompts),
            context=args.context,
            steps=args.steps,
        )
        costs = measure_costs(
            machine.measure,
            grid,
            args.rounds,
            Journal(None, {}),
            interleave_k=machine.changes_k_cheaply,
        )
        counted = machine.count_experts()
    assert counted is not None, "the shape is a mixture"
    even, is_padded = even_counts(counted), device.type == "cuda"
    prices = {"tokens": None, "experts, even routing": even, "experts, counted": counted}
    found = {
        name: errors(
            Shape(acceptance.lengths(), True, machine.batch_rows, is_padded, experts),
            costs.by_point,
            grid.fitted,
        )
        for name, experts in prices.items()
    }
    result = {
        "benchmark": "step_price",
        "environment": environment(device),
        "shape": args.shape,
        "layers": target.num_layers,
        "context": args.context,
        "spread": round(costs.spread, 4),
        "off_by": found,
        "cells": [
            {"batch": p.batch, "k": p.k, "ms": round(1e3 * cost.seconds, 3)}
            | {"target_ms": round(1e3 * cost.target_s, 3), "fitted": p in grid.fitted}
            | {name: round(one.touched(p.batch, p.k), 1)
               for name, one in (("experts", counted), ("experts_even", even))}
            for p, cost in sorted(costs.by_point.items())
        ],
    }  # fmt: skip
    print(json.dumps(result))


if __name__ == "__main__":
    run_guarded(main)
