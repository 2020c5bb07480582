"""A schedule of `peagle tune` against single K and plain decoding, on real drafts: one JSON object.

    peagle tune --threads 1 --output out
    python benchmarks/schedule.py out/tune.json --conc 1,4,16 --threads 1 --repeats 5

Closed loops over HumanEval prompts at each concurrency, all ways to decode taking turns; output
tokens per second, medians. With one thread the thread's own time counts, as in `peagle tune`:
what other processes take of the machine is left out.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

from common import concurrencies, run_guarded, take_turns, write_result

from peagle.bundled import BUNDLED_TARGET
from peagle.cli.setup import quiet_libraries, set_threads
from peagle.config import EngineConfig, SamplingParams, SpeculativeConfig
from peagle.engine.placement import load_target
from peagle.environment import environment
from peagle.evaluation.decoding import Request
from peagle.evaluation.engine_backend import EngineBackend, build_llms
from peagle.evaluation.prompts import load_prompt_set
from peagle.evaluation.tuning.machine import clock_of


def main() -> None:
    """Run it."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("tune", type=Path, help="tune.json")
    options.add_argument("--target", default=str(BUNDLED_TARGET), help="folder of the target")
    options.add_argument("--conc", default="1,4,16", help="requests in flight (1,4,16)")
    options.add_argument("--repeats", type=int, default=5, help="of each (5)")
    options.add_argument("--max-new-tokens", type=int, default=64)
    options.add_argument("--threads", type=int, help="CPU threads (torch's choice)")
    options.add_argument("--dtype", default="auto")
    options.add_argument("--device", default="auto")
    args = options.parse_args()
    quiet_libraries()
    set_threads(args.threads)
    loads = concurrencies(args.conc)
    result = json.loads(args.tune.read_text(encoding="utf-8"))
    target = load_target(args.target, EngineConfig(dtype=args.dtype, device=args.device))
    llms = build_llms(target, ways(result), max_num_seqs=max(loads))
    backends = {name: EngineBackend(llm) for name, llm in llms.items()}
    clock = clock_of(target.device)
    params = SamplingParams(max_tokens=args.max_new_tokens, ignore_eos=True)
    found: dict[str, Any] = {}
    for concurrency in loads:
        prompts = load_prompt_set("humaneval", max(4, 2 * concurrency))
        requests = [Request(one.id, one.text, params) for one in prompts]
        speeds: dict[str, list[float]] = {name: [] for name in backends}
        turns = take_turns(backends, requests, concurrency, args.repeats, clock)
        for name, run, seconds in turns:
            speeds[name].append(sum(answer.num_tokens for answer in run.answers) / seconds)
        found[str(concurrency)] = {
            name: {
                "tokens_per_s": round(median(values), 1),
                "spread": [round(min(values), 1), round(max(values), 1)],
            }
            for name, values in speeds.items()
        }
    figures = {
        "schedule": result["schedule"],
        "best_single_k": result["best_single_k"],
        "repeats": args.repeats,
        "by_concurrency": found,
        "environment": environment(target.device),
    }
    write_result(figures, None)


def ways(result: dict[str, Any]) -> dict[str, SpeculativeConfig | None]:
    """Plain decoding, the schedule, each of its K alone, and the best single K."""
    config = result["speculative_config"]["peagle"]
    if config is None:
        raise SystemExit("The schedule never drafts: there is nothing to compare.")
    head = config["model"]
    ks = {result["best_single_k"], *(k for _, _, k in result["schedule"])} - {0}
    single = {f"K={k}": SpeculativeConfig(model=head, num_speculative_tokens=k) for k in sorted(ks)}
    return {"plain": None, **single, "schedule": SpeculativeConfig.parse(config)}


if __name__ == "__main__":
    run_guarded(main)
