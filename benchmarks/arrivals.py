"""What stops for prompts cost where requests come and go all the time, on a card.

    python benchmarks/arrivals.py --shape llama-147m --patience 0,0.01,0.02,0.04 > arrivals.json

A closed loop: as a request ends the next one is sent, each with a length of its own, so that the
ends scatter. Random weights and acceptance made up (every line says so); plain decoding and P-EAGLE
at each patience of `peagle.engine.pipeline`, all taking turns. `later` is the engine as it was
before: no patience, and whoever's prompt is computed joins the others one stop later. Tokens per
second and time to the first token, medians over the repeats: one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import run_guarded
from shapes import SHAPES, make_head, make_target
from throughput import acceptance_rates

from peagle.cli.options import quiet_libraries
from peagle.config import SamplingParams
from peagle.engine import pipeline
from peagle.engine.placement import resolve_device
from peagle.engine.scheduler import Schedule, Scheduler
from peagle.engine.sequence import Sequence
from peagle.environment import environment
from peagle.errors import UserError
from peagle.evaluation.decoding import Request
from peagle.evaluation.local import EngineBackend
from peagle.llm import LLM

LATER = "later"


def main() -> None:
    """Run it."""
    args = _arguments()
    quiet_libraries()
    device = resolve_device("auto")
    if device.type != "cuda":
        raise UserError(
            f"The device is {device.type!r}: steps are captured on an NVIDIA card only."
        )
    shape = SHAPES[args.shape]
    folder = Path(tempfile.mkdtemp(prefix="peagle-arrivals-"))
    target = make_target(shape, folder, torch.bfloat16, device)
    make_head(target, shape, "peagle", folder / "peagle")
    speculative = {
        "model": str(folder / "peagle"),
        "num_speculative_tokens": args.k,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": acceptance_rates(args.al, args.k),
    }
    sizes = {"max_num_seqs": max(args.conc), "max_model_len": 2048, "enable_prefix_caching": False}
    backends = {
        name: EngineBackend(LLM(model=target, speculative_config=config, **sizes))
        for name, config in (("plain", None), ("peagle", speculative))
    }
    ways = [LATER, *args.patience]
    found: dict[tuple[str, int, Any], list[dict[str, float]]] = {}
    for number in range(args.repeats + 1):
        for concurrency in args.conc:
            requests = _requests(args, concurrency, target.vocab_size, number)
            for way in [*ways[number % len(ways) :], *ways[: number % len(ways)]]:
                for name, backend in backends.items():
                    with _engine_as(way):
                        figures = _measure(backend, requests, concurrency)
                    if number:  # the first round warms up
                        found.setdefault((name, concurrency, way), []).append(figures)
        print(f"# round {number}", file=sys.stderr, flush=True)
    cells = [
        {"synthetic": True, "method": name, "concurrency": concurrency, "patience": way}
        | {key: median(one[key] for one in runs) for key in runs[0]}
        | {"runs": [one["tokens_per_s"] for one in runs]}
        for (name, concurrency, way), runs in found.items()
    ]
    settings = vars(args) | {"patience": ways}
    print(json.dumps({"settings": settings, "cells": cells, "environment": environment(device)}))


def _arguments() -> argparse.Namespace:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--shape", default="llama-147m", choices=SHAPES)
    options.add_argument("--k", type=int, default=7, help="draft tokens per step (7)")
    options.add_argument("--al", type=float, default=3.9, help="acceptance length to make up (3.9)")
    options.add_argument("--conc", default="4,16,64", help="requests in flight, a list")
    options.add_argument("--patience", default="0,0.02", help="seconds, a list (0,0.02)")
    options.add_argument("--prompt", type=int, default=128, help="tokens of a prompt (128)")
    options.add_argument("--out", type=int, default=128, help="mean tokens of an output (128)")
    options.add_argument("--requests", type=int, default=4, help="per seat (4)")
    options.add_argument("--repeats", type=int, default=5)
    args = options.parse_args()
    try:
        args.conc = [int(one) for one in args.conc.split(",")]
        args.patience = [float(one) for one in args.patience.split(",")]
    except ValueError as error:
        raise UserError(f"--conc and --patience are lists of numbers: {error}.") from None
    return args


def _requests(
    args: argparse.Namespace, concurrency: int, vocab_size: int, seed: int
) -> list[Request]:
    """Random words; outputs of a half to one and a half of the mean length."""
    source = random.Random(seed)
    requests = []
    for number in range(args.requests * concurrency):
        words = [f"w{source.randrange(1, vocab_size)}" for _ in range(args.prompt)]
        length = source.randrange(args.out // 2, args.out * 3 // 2 + 1)
        params = SamplingParams(max_tokens=length, ignore_eos=True)
        requests.append(Request(str(number), " ".join(words), params))
    return requests


@contextmanager
def _engine_as(way: str | float) -> Iterator[None]:
    """The engine with that patience, or as it was before there was one."""
    patience, decoding = pipeline.PATIENCE_S, Scheduler.decoding

    def planned(scheduler: Scheduler, plan: Schedule) -> list[Sequence]:
        return [chunk.sequence for chunk in plan.decode]

    pipeline.PATIENCE_S = 0.0 if way == LATER else float(way)
    if way == LATER:
        Scheduler.decoding = planned
    try:
        yield
    finally:
        pipeline.PATIENCE_S, Scheduler.decoding = patience, decoding


def _measure(backend: EngineBackend, requests: list[Request], concurrency: int) -> dict[str, float]:
    before = backend.llm.stats.num_steps
    run = backend.run(requests, concurrency)
    firsts = sorted(t for a in run.answers if (t := a.time_to_first_token_s) is not None)
    return {
        "tokens_per_s": round(sum(a.num_tokens for a in run.answers) / run.seconds, 1),
        "first_token_p50_ms": round(1000 * median(firsts), 2),
        "first_token_p99_ms": round(1000 * firsts[int(0.99 * (len(firsts) - 1))], 2),
        "step_ms": round(1000 * run.seconds / (backend.llm.stats.num_steps - before), 3),
    }


if __name__ == "__main__":
    run_guarded(main)
