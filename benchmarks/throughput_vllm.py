"""The peer of throughput.py: tokens per second of vLLM on a checkpoint that throughput.py wrote.

    python benchmarks/throughput_vllm.py --checkpoint /tmp/qwen3-coder --conc 1,16,64
    python benchmarks/throughput_vllm.py --checkpoint /tmp/qwen3-coder --method peagle --al 3.9
    python benchmarks/throughput_vllm.py --checkpoint /tmp/qwen3-coder --count

Acceptance is synthetic, as there. --count tells how many different tokens a step has and how many
experts of a layer they touch: weights decide the routing, and a mixture whose tokens all take the
same experts is fast and no peer. Prints one line, RESULT and a JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from common import acceptance_rates, concurrencies, run_guarded

from peagle.errors import UserError

COUNTED_STEPS = 32


def main() -> None:
    """Run it."""
    args = _arguments()
    started = time.perf_counter()
    llm = build(args)
    print("# started", round(time.perf_counter() - started, 1), "s", flush=True)
    while args.wait and not args.wait.exists():
        time.sleep(0.2)
    result: dict[str, Any] = {"checkpoint": str(args.checkpoint), "method": args.method}
    if args.count:
        result["counts"] = count(llm, args)
    else:
        cells = {c: measure(llm, c, args) for c in args.conc}
        result |= {"k": args.k, "al_set": args.al, "al": acceptance_length(llm), "tps": cells}
    print("RESULT", json.dumps(result), flush=True)


def _arguments() -> argparse.Namespace:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--checkpoint", type=Path, required=True, help="folder of the target")
    options.add_argument("--method", default="none", choices=("none", "eagle3", "peagle"))
    options.add_argument("--head", type=Path, help="folder of the head (CHECKPOINT-METHOD)")
    options.add_argument("--k", type=int, default=7, help="draft tokens per step (7)")
    options.add_argument("--al", type=float, default=1.0, help="acceptance length to make up (1)")
    options.add_argument("--conc", default="1,16,64", help="sequences together, a list")
    options.add_argument("--prompt", type=int, default=128, help="tokens of a prompt (128)")
    options.add_argument("--out", type=int, default=256, help="tokens to generate (256)")
    options.add_argument("--repeats", type=int, default=5, help="runs of each concurrency (5)")
    options.add_argument("--temperature", type=float, default=0.0)
    options.add_argument("--kv-gib", type=float, default=6.0, help="memory of the KV cache (6)")
    options.add_argument("--max-model-len", type=int, default=2560)
    options.add_argument("--count", action="store_true", help="count tokens and experts instead")
    options.add_argument("--wait", type=Path, help="measure once this file is there")
    args = options.parse_args()
    args.conc = concurrencies(args.conc)
    args.head = args.head or args.checkpoint.with_name(f"{args.checkpoint.name}-{args.method}")
    for folder in (args.checkpoint, *([args.head] if args.method != "none" else [])):
        if not (folder / "config.json").is_file():
            raise UserError(
                f"{str(folder)!r} has no config.json: write it by throughput.py --checkpoint."
            )
    return args


def build(args: argparse.Namespace) -> Any:
    """The offline engine of vLLM; its graphs are those of the concurrencies asked for."""
    from vllm import LLM

    rows = 1 if args.method == "none" else args.k + 1
    sizes = [c * rows for c in args.conc]
    options: dict[str, Any] = {"compilation_config": {"cudagraph_capture_sizes": sizes}}
    if args.method != "none":
        options["speculative_config"] = {
            "method": "eagle3",
            "model": str(args.head),
            "num_speculative_tokens": args.k,
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_rates": acceptance_rates(args.al, args.k),
        } | ({"parallel_drafting": True} if args.method == "peagle" else {})
    if args.count:
        options = {"enforce_eager": True, "enable_return_routed_experts": True}
    return LLM(
        model=str(args.checkpoint),
        skip_tokenizer_init=True,
        max_model_len=args.max_model_len,
        max_num_seqs=max(args.conc),
        kv_cache_memory_bytes=int(args.kv_gib * 2**30),
        enable_prefix_caching=False,
        disable_log_stats=False,
        seed=0,
        **options,
    )


def generate(llm: Any, count: int, out: int, seed: int, args: argparse.Namespace) -> list[Any]:
    """Complete random prompts; the same seed gives the same ones."""
    from vllm import SamplingParams

    source = random.Random(seed * 1000 + count)
    vocabulary = json.loads((args.checkpoint / "config.json").read_text())["vocab_size"]
    first, last = vocabulary // 150, vocabulary * 2 // 3
    prompts: list[Any] = [
        {"prompt_token_ids": [source.randrange(first, last) for _ in range(args.prompt)]}
        for _ in range(count)
    ]
    params = SamplingParams(
        temperature=args.temperature, max_tokens=out, ignore_eos=True, detokenize=False
    )
    return [one.outputs[0] for one in llm.generate(prompts, params, use_tqdm=False)]


def measure(llm: Any, concurrency: int, args: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second of several runs, after two that compile what they need."""
    for seed in (0, 1):
        generate(llm, concurrency, args.out, seed, args)
    speeds = []
    for seed in range(args.repeats):
        start = time.perf_counter()
        outputs = generate(llm, concurrency, args.out, seed, args)
        speeds.append(sum(len(o.token_ids) for o in outputs) / (time.perf_counter() - start))
    runs = [round(speed, 1) for speed in speeds]
    cell = {"median": round(median(speeds), 1), "runs": runs}
    print(f"# vLLM {args.method} c={concurrency}", json.dumps(cell), flush=True)
    return cell


def count(llm: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Distinct tokens of each step, and distinct experts of each layer, in the largest batch."""
    outputs = generate(llm, max(args.conc), COUNTED_STEPS + 1, 0, args)
    tokens = np.array([list(o.token_ids) for o in outputs])
    # The last token is not read by the model any more.
    experts = np.stack([np.asarray(o.routed_experts)[-COUNTED_STEPS:] for o in outputs])
    return {"tokens": distinct(tokens), "experts": distinct_experts(experts)}


def distinct(tokens_BT: np.ndarray) -> list[int]:
    """Return how many different tokens the sequences have at each step."""
    return [len(np.unique(column)) for column in tokens_BT.T]


def distinct_experts(experts_BTLC: np.ndarray) -> dict[str, Any]:
    """Return how many experts a layer's tokens touch in a step: the mean, and each layer's mean."""
    _, steps, layers, _ = experts_BTLC.shape
    counts = [
        [len(np.unique(experts_BTLC[:, step, layer])) for layer in range(layers)]
        for step in range(steps)
    ]
    by_layer: Sequence[float] = np.mean(counts, axis=0).round(1).tolist()
    return {"mean": round(float(np.mean(counts)), 1), "by_layer": by_layer}


def acceptance_length(llm: Any) -> float | None:
    """Tokens of a step that vLLM counted; None without drafts."""
    counters = {m.name: getattr(m, "value", 0) for m in llm.get_metrics()}
    drafts = counters.get("vllm:spec_decode_num_drafts")
    if not drafts:
        return None
    return round(1 + counters["vllm:spec_decode_num_accepted_tokens"] / drafts, 3)


if __name__ == "__main__":
    run_guarded(main)
