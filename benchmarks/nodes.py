"""Nodes by load against every fixed number of them, chains and plain decoding: one JSON object.

    python benchmarks/nodes.py --conc 1,2,4 --threads 1
    python benchmarks/nodes.py --target DIR --draft HEAD --conc 1,2,4,8,16,32,64,128,256
    python benchmarks/nodes.py --target DIR --draft HEAD --eagle3 HEAD --ways plain,chain,eagle3,n

Closed loops over prompts of each set at each temperature and concurrency, --waves times as many as
are in flight or --prompts, all ways to decode taking turns; output tokens per second, medians. A
set with fewer begins anew. A way is `plain`, `chain K=7`, `eagle3 K=7`, `n=N` (every step verifies
trees of N nodes), `never n=N` (without drawn chains), `shared n=N` (the requests share N nodes for
each of them, out of trees of the greatest N), `adaptive`, which chooses n by load,
`adaptive-chain`, which chooses K by load, or `default`, which an engine takes where nothing but the
head is named. Trees of the EAGLE-3 head are `eagle3-n n=N` and `eagle3-adaptive`. On a CPU adaptive
ways and the default are the greatest fixed number, and are left out. With one thread the thread's
own time counts, as in `peagle tune`. A prompt goes through the chat template where the target has
one.

A small model falls into loops, which are easy to draft. `--cut-loops` measures each concurrency a
second time, with outputs that end where plain decoding begins its first loop. Standard error shows
the figures of each concurrency as soon as they are known.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle, islice, product
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal

from common import concurrencies, run_guarded, take_turns, write_result

from peagle.bundled import BUNDLED_PEAGLE, BUNDLED_TARGET
from peagle.cli.setup import quiet_libraries, set_threads
from peagle.config import CandidateTrees, EngineConfig, SamplingParams, SpeculativeConfig
from peagle.engine.placement import load_target
from peagle.engine.stats import EngineStats
from peagle.environment import environment
from peagle.evaluation.acceptance import VerifiedDraft, decode_steps, loop_start
from peagle.evaluation.decoding import Request
from peagle.evaluation.engine_backend import EngineBackend, build_llms
from peagle.evaluation.prompts import PROMPT_SETS, load_prompt_set
from peagle.evaluation.tuning.machine import clock_of
from peagle.models.target import load_tokenizer

_BY_LOAD = re.compile("adaptive|default")
SCHEDULE = "num_speculative_tokens_per_batch_size"


def parser() -> argparse.ArgumentParser:
    """The options."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--target", default=str(BUNDLED_TARGET), help="folder of the target")
    options.add_argument("--draft", default=str(BUNDLED_PEAGLE), help="folder of a P-EAGLE head")
    options.add_argument("--eagle3", help="folder of an EAGLE-3 head to compare with")
    options.add_argument("--ways", help="those to measure, or their first words (all)")
    options.add_argument("--cut-loops", action="store_true", help="also without loops")
    options.add_argument("--set", default="humaneval", help="prompt sets, a list (humaneval)")
    options.add_argument("--prompts", type=int, default=4, help="of a small concurrency (4)")
    options.add_argument("--waves", type=int, default=2, help="prompts of one in flight (2)")
    options.add_argument("--conc", default="1,2,4", help="requests in flight (1,2,4)")
    options.add_argument("--nodes", default="1,3,7,16", help="numbers of nodes (1,3,7,16)")
    options.add_argument("--depth", type=int, default=7, help="of the trees (7)")
    options.add_argument("--chains", default="7", help="K of the chains (7)")
    options.add_argument("--repeats", type=int, default=5, help="of each (5)")
    options.add_argument("--max-new-tokens", type=int, default=64)
    options.add_argument("--temperature", default="0", help="of the requests, a list (0)")
    options.add_argument("--threads", type=int, help="CPU threads (torch's choice)")
    options.add_argument("--dtype", default="auto")
    options.add_argument("--device", default="auto")
    options.add_argument("--output", type=Path, help="file for the result, instead of printing it")
    return options


def main() -> None:
    """Run it."""
    args = parser().parse_args()
    quiet_libraries()
    set_threads(args.threads)
    loads = concurrencies(args.conc)
    sets = args.set.split(",")
    if unknown := set(sets) - set(PROMPT_SETS):
        sys.exit(f"error: --set names {min(unknown)!r}; there are {', '.join(PROMPT_SETS)}.")
    target = load_target(args.target, EngineConfig(dtype=args.dtype, device=args.device))
    sizes, ks = (sorted(map(int, one.split(","))) for one in (args.nodes, args.chains))
    every = ways(args.draft, args.eagle3, sizes, args.depth, ks)
    if target.device.type == "cpu":
        every = {name: way for name, way in every.items() if not _BY_LOAD.search(name)}
    if args.ways is not None:
        wanted = {"plain", *args.ways.split(",")}
        first = re.compile("[ =]")
        every = {name: one for name, one in every.items() if wanted & {name, first.split(name)[0]}}
    is_chat = bool(getattr(load_tokenizer(args.target), "chat_template", None))
    llms = build_llms(target, every, max_num_seqs=max(loads))
    backends = {name: EngineBackend(llm) for name, llm in llms.items()}
    clock = clock_of(target.device)
    found: dict[str, dict[str, dict[str, dict[str, Any]]]] = {name: {} for name in sets}
    stats, device = dict[str, EngineStats](), dict[str, dict[int, dict[str, float]]]()
    for temperature, name in product(args.temperature.split(","), sets):
        params = SamplingParams(
            max_tokens=args.max_new_tokens, ignore_eos=True, temperature=float(temperature)
        )
        here = found[name][temperature] = {"by_concurrency": {}, "before_loops": {}}
        for concurrency in loads:
            count = max(args.prompts, args.waves * concurrency)
            prompts = islice(cycle(load_prompt_set(name, count)), count)
            requests = [
                Request(f"{i}-{one.id}", one.messages if is_chat else one.text, params)
                for i, one in enumerate(prompts)
            ]
            lengths = {"by_concurrency": requests}
            if args.cut_loops:
                lengths["before_loops"] = cut_at_loops(requests, backends["plain"], concurrency)
            for length, some in lengths.items():
                measured = measure(backends, some, concurrency, args.repeats, clock)
                here[length][str(concurrency)] = measured
                line = {"set": name, "temperature": temperature, length: {concurrency: measured}}
                # An interrupted run leaves these.
                print(json.dumps(line), file=sys.stderr, flush=True)
        stats = {name: llm.stats for name, llm in llms.items()}
        device = {name: device_ms(one) for name, one in stats.items() if one.step_times}
        print(json.dumps({"device_ms": device}), file=sys.stderr, flush=True)
    result = {
        "command": " ".join(["python", *sys.argv]),
        "repeats": args.repeats,
        "by_set": found,
        "steps_by_nodes": {name: one.decode_steps for name, one in stats.items()},
        "device_ms": device,
        "calibration_error": {
            name: None if (error := one.calibration.error) is None else round(error, 4)
            for name, one in stats.items()
        },
        "environment": environment(target.device),
    }
    write_result(result, args.output)


def measure(
    backends: dict[str, EngineBackend],
    requests: list[Request],
    concurrency: int,
    repeats: int,
    clock: Callable[[], float],
) -> dict[str, Any]:
    """Figures of all ways, which take turns."""
    speeds: dict[str, list[float]] = {name: [] for name in backends}
    steps: dict[str, list[VerifiedDraft]] = {}
    for name, run, seconds in take_turns(backends, requests, concurrency, repeats, clock):
        speeds[name].append(sum(answer.num_tokens for answer in run.answers) / seconds)
        steps[name] = [one for answer in run.answers for one in decode_steps(answer)]
    return figures(speeds, steps)


def device_ms(stats: EngineStats) -> dict[int, dict[str, float]]:
    """Milliseconds of the parts of a step without prompts on a GPU, by the rows of its graph."""
    return {
        rows: {
            "steps": times.num_steps,
            **{
                part: round(1000 * getattr(times, part) / times.num_steps, 4)
                for part in ("target", "verify", "draft")
            },
        }
        for rows, times in sorted(stats.step_times.items())
    }


def cut_at_loops(requests: list[Request], plain: EngineBackend, concurrency: int) -> list[Request]:
    """The same requests, each for as many tokens as plain decoding gives before its first loop."""
    answers = plain.run(requests, concurrency).answers
    starts = [loop_start(answer.token_ids) for answer in answers]
    return [
        one if start is None else replace(one, params=replace(one.params, max_tokens=start))
        for one, start in zip(requests, starts, strict=True)
    ]


def ways(
    head: str, eagle3: str | None, sizes: list[int], depth: int, ks: list[int]
) -> dict[str, SpeculativeConfig | None]:
    """Plain decoding, chains, trees of each size, the largest with fewer nodes, and by load."""

    def trees(
        size: int,
        nodes: object = None,
        drawn: Literal["never"] | None = None,
        model: str = head,
    ) -> SpeculativeConfig:
        deepest = min(depth, size)
        shape = CandidateTrees.parse({"max_nodes": size}, deepest, parallel=model == head)
        return SpeculativeConfig(
            model=model,
            num_speculative_tokens=deepest,
            parallel_drafting_spec=shape,
            drawn_chains_from=drawn,
            **{SCHEDULE: nodes},  # type: ignore[arg-type]
        )

    most = sizes[-1]
    others: dict[str, SpeculativeConfig | None] = {}
    if eagle3 is not None:
        others = {f"eagle3-n n={size}": trees(size, model=eagle3) for size in sizes}
        others["eagle3-adaptive"] = trees(most, "auto", model=eagle3)
    heads = {"chain": head} | ({} if eagle3 is None else {"eagle3": eagle3})
    return {
        "plain": None,
        **{
            f"{name} K={k}": SpeculativeConfig(model=one, num_speculative_tokens=k)
            for name, one in heads.items()
            for k in ks
        },
        "adaptive-chain": SpeculativeConfig(
            model=head,
            num_speculative_tokens=max(ks),
            **{SCHEDULE: "auto"},  # type: ignore[arg-type]
        ),
        **{f"n={size}": trees(size) for size in sizes},
        **{f"never n={size}": trees(size, drawn="never") for size in sizes},
        **{f"shared n={size}": trees(most, ((1, 1, size),)) for size in sizes[:-1]},
        "adaptive": trees(most, "auto"),
        "default": SpeculativeConfig(model=head),
        **others,
    }


def figures(
    speeds: dict[str, list[float]], steps: dict[str, list[VerifiedDraft]]
) -> dict[str, Any]:
    """Tokens a second of each way, and their ratios to the best fixed way and to plain decoding.

    Acceptance length and nodes are of the steps of a request, those without nodes included.
    """
    medians = {name: median(values) for name, values in speeds.items()}
    best = max(speed for name, speed in medians.items() if name.startswith(("plain", "n=")))
    return {
        name: {
            "tokens_per_s": round(speed, 1),
            "by_repeat": [round(one, 1) for one in speeds[name]],
            "over_best_fixed": round(speed / best, 3),
            "over_plain": round(speed / medians["plain"], 3),
            "acceptance_length": round(1 + fmean(one.num_accepted for one in steps[name]), 3),
            "nodes_a_step": round(fmean(one.num_drafted for one in steps[name]), 2),
        }
        for name, speed in medians.items()
    }


if __name__ == "__main__":
    run_guarded(main)
