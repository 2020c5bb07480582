"""Speed at concurrency 1: plain decoding, EAGLE-3 and P-EAGLE over K; and the cost of drafting.

    python benchmarks/speed.py --threads 2

All configurations take turns in one process; every figure is the median of the repeats. Prints one
JSON object.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from common import add_prompts, finish, methods_of, parser, run_guarded, speculative, start

from peagle.config import SamplingParams
from peagle.engine.model_runner import TargetPass
from peagle.evaluation.decoding import Run
from peagle.evaluation.engine_backend import build_llms, time_requests, warm_up
from peagle.evaluation.prompts import load_prompt_set
from peagle.llm import LLM
from peagle.models.target import TargetModel


def main() -> None:
    """Run it."""
    options = parser(__doc__, methods="eagle3,peagle")
    add_prompts(options, limit=16)
    options.add_argument("--k", default="1,2,3,4,5,7,10", help="draft tokens per step, a list")
    options.add_argument("--repeats", type=int, default=3)
    args = options.parse_args()

    prompts = [prompt.text for prompt in load_prompt_set(args.set, args.limit)]
    params = SamplingParams(max_tokens=args.max_new_tokens)
    depths = [int(k) for k in args.k.split(",")]
    methods = {name: folder for name, folder in methods_of(args).items() if name != "plain"}
    target = start(args)
    cells = {
        f"{name} {k}": (name, k, speculative(name, folder, k))
        for name, folder in methods.items()
        for k in depths
    }
    llms = build_llms(
        target, {"plain": None, **{key: cell[2] for key, cell in cells.items()}}, max_num_seqs=1
    )
    warm_up(llms, prompts[:1])
    runs: dict[str, list[Run]] = {name: [] for name in llms}
    for _ in range(args.repeats):  # taking turns lets a slow spell of the machine hit all of them
        for name, llm in llms.items():
            runs[name].append(time_requests(llm, prompts, params))
    finish(
        args,
        target,
        prompt_set=args.set,
        num_prompts=len(prompts),
        max_new_tokens=args.max_new_tokens,
        temperature=0.0,
        concurrency=1,
        repeats=args.repeats,
        **sweeps(runs, {key: cell[:2] for key, cell in cells.items()}),
        draft_ms=drafting(target, methods, prompts, params),
    )


def sweeps(
    runs: Mapping[str, Sequence[Run]], cells: Mapping[str, tuple[str, int]]
) -> dict[str, Any]:
    """The figures of every method and K, and the best K of each."""
    plain = median(run.tokens_per_s for run in runs["plain"])
    table: dict[str, list[dict[str, Any]]] = {}
    for key, (name, k) in cells.items():
        speed = median(run.tokens_per_s for run in runs[key])
        row = {
            "num_speculative_tokens": k,
            "tokens_per_s": speed,
            "speed_up": speed / plain,
            "acceptance_length": runs[key][0].stats.acceptance_length,
            "tokens_per_s_of_runs": [run.tokens_per_s for run in runs[key]],
            "different_outputs": sum(
                ours != theirs
                for ours, theirs in zip(
                    runs[key][0].token_ids, runs["plain"][0].token_ids, strict=True
                )
            ),
        }
        table.setdefault(name, []).append(row)
    best = {name: max(rows, key=lambda row: row["tokens_per_s"]) for name, rows in table.items()}
    return {
        "plain_tokens_per_s": plain,
        "plain_tokens_per_s_of_runs": [run.tokens_per_s for run in runs["plain"]],
        "methods": table,
        "best": best,
    }


def drafting(
    target: TargetModel,
    methods: Mapping[str, str | None],
    prompts: Sequence[str],
    params: SamplingParams,
) -> dict[str, Any]:
    """Milliseconds of drafting 1 and 7 tokens, by method."""
    result: dict[str, Any] = {}
    for name, folder in methods.items():
        configurations = {str(k): speculative(name, folder, k) for k in (1, 7)}
        llms: dict[str, LLM] = build_llms(target, configurations, max_num_seqs=1)
        warm_up(llms, prompts[:1])
        seconds: dict[str, list[float]] = {k: [] for k in llms}
        for prompt in prompts:
            for k, llm in llms.items():
                seconds[k] += draft_seconds(llm, [prompt], params)
        times = {k: 1000 * median(values) for k, values in seconds.items()}
        result[name] = {**times, "ratio": times["7"] / times["1"]}
    return result


def draft_seconds(llm: LLM, prompts: Sequence[str], params: SamplingParams) -> list[float]:
    """Seconds of each drafting while `prompts` are completed, save those after prompt passes.

    Args:
        llm: what decodes; not plain.
        prompts: texts.
        params: for all of them.
    """
    drafting = llm.engine.drafting
    assert drafting is not None, "plain decoding drafts nothing"
    draft = drafting.draft
    seconds: list[float] = []

    def timed(done: TargetPass) -> None:
        start = time.perf_counter()
        draft(done)
        sequences = [chunk.sequence for chunk in done.chunks]
        decoded = all(sequence.num_output_tokens > 1 for sequence in sequences)
        if decoded and not all(sequence.is_finished for sequence in sequences):
            seconds.append(time.perf_counter() - start)

    drafting.draft = timed
    try:
        llm.generate(prompts, params)
    finally:
        drafting.draft = draft
    return seconds


run_guarded(main)
