"""Time to the first token with drafts over the time without, alone or beside other requests.

    python benchmarks/first_token.py
    python benchmarks/first_token.py --target TARGET --peagle HEAD --prompt 1024 --others 8
    python benchmarks/first_token.py --shape qwen3-8b --k 7 --acceptance 3.3 --others 16 --by-load
    python benchmarks/first_token.py --ahead 3

A plain engine and one that drafts with a P-EAGLE head take turns: each gets the same made-up
prompts, which share nothing, and the order changes from repeat to repeat. A time ends when the step
that has a request's first token returns. On a CPU seconds are processor time, which other programs
do not change; on a GPU they are the clock's. --others requests decode meanwhile. --ahead requests
of the same lengths come just before and are served first, in the same place. --shape takes random
weights of a known shape, of which --acceptance says how much is accepted. With --by-load the engine
chooses K by the load, up to --k. Prints JSON: medians of both sides, and the median of the ratios
of the repeats.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from common import acceptance_rates, finish, parser, run_guarded, start
from shapes import SHAPES, make_head, make_target

from peagle.config import EngineConfig, SamplingParams, SpeculativeConfig
from peagle.config.speculative import AUTO
from peagle.engine import LLMEngine
from peagle.models.target import TargetModel

MAX_MODEL_LEN = 4096
KV_CACHE_GIB = 4.0


def main() -> None:
    """Run it."""
    options = parser(__doc__, methods="plain,peagle")
    options.add_argument("--prompt", type=int, default=700, help="tokens of a prompt")
    options.add_argument("--out", type=int, default=64, help="tokens of an answer")
    options.add_argument("--others", type=int, default=0, help="requests that decode meanwhile")
    options.add_argument("--ahead", type=int, default=0, help="requests that it waits for")
    options.add_argument("--repeats", type=int, default=7)
    options.add_argument("--k", type=int, help="drafts a step (default: the head's)")
    options.add_argument("--by-load", action="store_true", help="K by the load, up to --k")
    options.add_argument("--shape", choices=SHAPES, help="random weights, in place of --target")
    options.add_argument("--acceptance", type=float, help="acceptance length; needs --k")
    args = options.parse_args()
    with TemporaryDirectory() as folder:
        target = models(args, Path(folder))
        engines = make_engines(args, target)
    clock = time.perf_counter if target.device.type == "cuda" else time.process_time
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
    for repeat in range(args.repeats + 1):
        names = list(engines)
        for name in names if repeat % 2 else reversed(names):
            dice = random.Random(repeat)
            sizes = (args.prompt, args.out, args.others, args.ahead)
            times = measure(engines[name], dice, clock, *sizes)
            if repeat:  # the first one warms up
                found[name].append(times)
    result: dict[str, object] = {}
    for at, what in enumerate(("first_token", "answer")):
        sides = {name: [times[at] for times in rows] for name, rows in found.items()}
        ratios = [d / p for d, p in zip(sides["drafting"], sides["plain"], strict=True)]
        result[f"{what}_ms"] = {name: round(1000 * median(s), 2) for name, s in sides.items()}
        result[f"{what}_ratio"] = round(median(ratios), 3)
        result[f"{what}_ratios"] = [round(ratio, 3) for ratio in ratios]
    names = ("prompt", "out", "others", "ahead", "by_load")
    sizes = {name: getattr(args, name) for name in names}
    finish(args, target, **sizes, **result)


def models(args: Any, folder: Path) -> TargetModel:
    """Return the target; of a shape `args` get the name and the head, which `folder` takes."""
    if args.shape is None:
        return start(args)
    shape, device, dtype = SHAPES[args.shape], torch.device("cuda"), torch.bfloat16
    make_head(shape, "peagle", folder / "head", dtype, device)
    args.target, args.peagle = f"{args.shape}, random weights", str(folder / "head")
    return make_target(shape, folder / "tokenizer", dtype, device)


def make_engines(args: Any, target: TargetModel) -> dict[str, LLMEngine]:
    """Return both engines, alike but for the drafts."""
    config = EngineConfig(
        max_num_seqs=args.others + 1,
        max_model_len=min(MAX_MODEL_LEN, target.max_model_len),
        kv_cache_gib=KV_CACHE_GIB,
        enable_prefix_caching=False,
    )
    drafts: dict[str, Any] = {"model": args.peagle}
    if args.k is not None:
        drafts["num_speculative_tokens"] = args.k
    if args.by_load:
        drafts["num_speculative_tokens_per_batch_size"] = AUTO
    if args.acceptance is not None:
        drafts["synthetic_acceptance_rates"] = tuple(acceptance_rates(args.acceptance, args.k))
    return {
        "plain": LLMEngine(target, config),
        "drafting": LLMEngine(target, config, SpeculativeConfig(**drafts)),
    }


def measure(
    engine: LLMEngine,
    dice: random.Random,
    clock: Callable[[], float],
    num_prompt: int,
    num_out: int,
    num_others: int,
    num_ahead: int,
) -> tuple[float, float]:
    """Return the seconds to the first token of a request, and to its last."""
    vocabulary = range(engine.target.vocab_size)
    longest = engine.max_model_len - 1
    params = SamplingParams(max_tokens=longest, temperature=0.0, ignore_eos=True)
    others = [engine.add_request(dice.choices(vocabulary, k=64), params) for _ in range(num_others)]
    while any(not other.num_output_tokens for other in others):
        engine.step()
    prompts = [dice.choices(vocabulary, k=num_prompt) for _ in range(num_ahead + 1)]
    answer = SamplingParams(max_tokens=num_out, temperature=0.0, ignore_eos=True)
    start_s = clock()
    *_, one = [engine.add_request(prompt, answer) for prompt in prompts]
    first_s = None
    while not one.is_finished:
        engine.step()
        if first_s is None and one.num_output_tokens:
            first_s = clock() - start_s
    answer_s = clock() - start_s
    assert first_s is not None and not any(other.is_finished for other in others)
    for other in others:
        engine.cancel(other)
    while engine.has_unfinished:
        engine.step()
    return first_s, answer_s


if __name__ == "__main__":
    run_guarded(main)
