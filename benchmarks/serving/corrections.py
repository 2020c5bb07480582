"""What corrections chosen by request add to a step of an engine against one for all requests.

    python benchmarks/serving/bench_serving.py corrections --target models/smollm2-135m \\
        --draft smollm2

Two engines on one target take turns. `one` has the head's own correction; `again` is `one` once
more and shows what the machine makes of equal work. The other engine has the same correction twice:
all requests name the second one (`alike`), or every other request does (`mixed`). `device_ms` is
the time of the graphs on a GPU, of the models' passes on a CPU. `host_ms` is a step without its
waits for the GPU, or without these passes.
"""

from __future__ import annotations

import argparse
import time
from typing import Any
from unittest.mock import patch

import torch
from script import compare, take_turns

from peagle import LLM, SamplingParams
from peagle.cli.setup import quiet_libraries
from peagle.config import EngineConfig, SpeculativeConfig
from peagle.engine.placement import load_target
from peagle.errors import UserError
from peagle.evaluation.engine_backend import build_llms
from peagle.evaluation.prompts import load_prompt_set
from peagle.evaluation.tuning.machine import contexts, time_steps
from peagle.models.loading import resolve_model

# The side to compare with, the engine, and the corrections that its requests name in turn.
SIDES: dict[str, tuple[str | None, str, list[str | None]]] = {
    "one": (None, "one", [None]),
    "again": ("one", "one", [None]),
    "alike": ("one", "two", ["other"]),
    "mixed": ("one", "two", [None, "other"]),
}


def add_options(options: argparse.ArgumentParser) -> None:
    options.add_argument("--sequences", type=int, default=64, help="that decode together (64)")
    options.add_argument("--k", type=int, default=7, help="drafts of a step (7)")
    options.add_argument("--nodes", type=int, help="of candidate trees (none: chains)")
    options.add_argument("--context", type=int, default=128, help="tokens of a prompt (128)")
    options.add_argument("--steps", type=int, default=60, help="timed steps of a round (60)")
    options.add_argument("--repeats", type=int, default=7, help="rounds of each side (7)")
    options.add_argument("--target", default="bundled", help="(bundled)")
    options.add_argument("--draft", default="bundled", help="(bundled)")
    options.add_argument("--bound", type=float, default=0.02, help="share that `mixed` adds (0.02)")


def run(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Figures, and what missed its bound."""
    quiet_libraries()
    torch.set_num_threads(args.threads)
    head = str(resolve_model(args.draft, role="draft"))
    target = load_target(str(resolve_model(args.target)), EngineConfig())
    drafts: dict[str, Any] = {"model": head, "num_speculative_tokens": args.k}
    if args.nodes:
        drafts["parallel_drafting_spec"] = {"max_nodes": args.nodes}
    two = SpeculativeConfig(**drafts, corrections={"other": head})
    ways = {"one": SpeculativeConfig(**drafts), "two": two}
    llms = build_llms(target, ways, max_num_seqs=args.sequences)
    prompts = contexts(target, {"": load_prompt_set("humaneval")}, args.sequences, args.context)
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in SIDES}
    for name in take_turns(SIDES, args.repeats):
        _, engine, names = SIDES[name]
        rows[name].append(_round(llms[engine], prompts, names, args.steps))
    over = {name: side for name, (side, _, _) in SIDES.items()}
    return compare(rows, over, "mixed", "again", args.bound)


def _round(
    llm: LLM, prompts: list[list[int]], names: list[str | None], steps: int
) -> dict[str, float]:
    """Milliseconds of a step: all of it, the device's part and the host's."""
    engine, wait, waits_s = llm.requests, torch.cuda.Event.synchronize, list[float]()

    def timed(event: Any) -> None:
        start = time.perf_counter()
        wait(event)
        waits_s.append(time.perf_counter() - start)

    for index, prompt in enumerate(prompts):
        name = names[index % len(names)]
        params = SamplingParams(max_tokens=1 << 16, ignore_eos=True, correction=name)
        engine.add(index, prompt, params)
    try:
        first = {*range(len(prompts))}
        while first:
            first -= {chunk.index for chunk in engine.step()}
        with patch.object(torch.cuda.Event, "synchronize", timed):
            start = time.perf_counter()
            cost = time_steps(llm, steps)
            host_s = (time.perf_counter() - start - sum(waits_s)) / steps
        if len(llm.engine.scheduler.running) < len(prompts):
            raise UserError(f"--steps is {steps}; a sequence ended before them. Lower it.")
    finally:
        engine.cancel_all()
    device_s = cost.target_s + cost.draft_s
    if llm.target.device.type != "cuda":
        host_s = cost.seconds - device_s
    return {"step_ms": 1e3 * cost.seconds, "device_ms": 1e3 * device_s, "host_ms": 1e3 * host_s}
