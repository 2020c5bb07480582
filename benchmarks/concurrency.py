"""Throughput at several concurrencies, of this source tree and maybe of an earlier one.

    python benchmarks/concurrency.py --threads 2
    git worktree add /tmp/before 00fbc0d
    python benchmarks/concurrency.py --threads 2 --before /tmp/before/src

Each tree runs in a process of its own; trees and concurrencies take turns, so that a slow spell of
the machine hits all of them. Every figure is the median of the repeats. Prints one JSON object.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from common import METHODS, add_prompts, finish, methods_of, parser, run_guarded, start

from peagle.errors import UserError

THIS = Path(__file__).resolve().parent.parent / "src"
# Runs in the tree that is measured, which may be older than this file: only what all have.
WORKER = """
import json, sys, time
import torch
from dataclasses import fields
from peagle import EngineConfig, LLM, SamplingParams, SpeculativeConfig
job = json.loads(sys.argv[1])
if job["threads"]:
    torch.set_num_threads(job["threads"])
options = {"dtype": job["dtype"], "device": job["device"]}
if "enable_prefix_caching" in {field.name for field in fields(EngineConfig)}:
    options["enable_prefix_caching"] = False  # repeats would find their prompts' KV
speculative = SpeculativeConfig(**job["speculative"]) if job["speculative"] else None
llms = {
    size: LLM(job["target"], speculative_config=speculative, max_num_seqs=size, **options)
    for size in job["concurrency"]
}
params = SamplingParams(max_tokens=job["max_new_tokens"], ignore_eos=True)
for llm in llms.values():
    llm.generate(job["prompts"][:2], SamplingParams(max_tokens=16))
print("ready", flush=True)
for line in sys.stdin:
    start = time.perf_counter()
    outputs = llms[int(line)].generate(job["prompts"], params)
    seconds = time.perf_counter() - start
    print(sum(len(output.token_ids) for output in outputs) / seconds, flush=True)
"""


class Worker:
    """A process that measures one method on one source tree."""

    def __init__(self, source: Path, job: dict[str, Any]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", WORKER, json.dumps(job)],
            env={**os.environ, "PYTHONPATH": str(source)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()

    def tokens_per_s(self, concurrency: int) -> float:
        """One run over all prompts."""
        assert self._process.stdin is not None
        print(concurrency, file=self._process.stdin, flush=True)
        return float(self._answer())

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise UserError("a worker ended early; its error stands above.")
        return line


def main() -> None:
    """Run it."""
    options = parser(__doc__, methods="plain,peagle")
    add_prompts(options, limit=16)
    options.add_argument("--k", type=int, default=6, help="draft tokens per step")
    options.add_argument("--concurrency", default="1,4,16", help="sequences together, a list")
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--before", type=Path, help="src folder of an earlier tree")
    args = options.parse_args()
    if args.before is not None and not (args.before / "peagle").is_dir():
        raise UserError(f"--before is {str(args.before)!r}; expected the src folder of a checkout.")

    from peagle.evaluation.prompts import load_prompt_set

    prompts = [prompt.text for prompt in load_prompt_set(args.set, args.limit)]
    sizes = [int(size) for size in args.concurrency.split(",")]
    trees = {"now": THIS} | ({"before": args.before} if args.before else {})
    table: dict[str, Any] = {}
    for name, folder in methods_of(args).items():
        job = {
            "target": args.target,
            "dtype": args.dtype,
            "device": args.device,
            "threads": args.threads,
            "speculative": _speculative(name, folder, args.k),
            "prompts": prompts,
            "max_new_tokens": args.max_new_tokens,
            "concurrency": sizes,
        }
        table[name] = measure({tree: Worker(src, job) for tree, src in trees.items()}, sizes, args)
    finish(
        args,
        start(args),
        prompt_set=args.set,
        num_prompts=len(prompts),
        max_new_tokens=args.max_new_tokens,
        num_speculative_tokens=args.k,
        repeats=args.repeats,
        methods=table,
    )


def _speculative(name: str, folder: str | None, k: int) -> dict[str, Any] | None:
    assert name in METHODS or folder is not None
    if name == "plain":
        return None
    source = {"method": "ngram"} if folder is None else {"model": folder}
    return {**source, "num_speculative_tokens": k}


def measure(workers: dict[str, Worker], sizes: list[int], args: Any) -> dict[str, Any]:
    """Median speed of each tree and concurrency, and the ratios that matter."""
    runs: dict[tuple[str, int], list[float]] = {}
    for _ in range(args.repeats):
        for size in sizes:
            for tree, worker in workers.items():
                runs.setdefault((tree, size), []).append(worker.tokens_per_s(size))
    for worker in workers.values():
        worker.close()
    result: dict[str, Any] = {}
    for tree in workers:
        speeds = {size: median(runs[tree, size]) for size in sizes}
        result[tree] = {
            "tokens_per_s": speeds,
            "ratio_to_first": {size: speeds[size] / speeds[sizes[0]] for size in sizes},
        }
    if "before" in workers:
        pairs = {s: zip(runs["now", s], runs["before", s], strict=True) for s in sizes}
        result["now_over_before"] = {s: median(n / b for n, b in p) for s, p in pairs.items()}
    return result


if __name__ == "__main__":
    run_guarded(main)
