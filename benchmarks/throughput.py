"""Tokens per second of a named shape at several concurrencies; weights and acceptance are made up.

    python benchmarks/throughput.py --shape qwen3-8b --method none
    python benchmarks/throughput.py --shape qwen3-8b --method peagle --k 7 --al 3.94 \\
        --conc 1,4,16,64 --prompt 128 --out 256

    python benchmarks/throughput.py --shape gpt-oss-20b --checkpoint /tmp/gpt-oss-20b --method none

Random weights at the sizes of a real model, and SYNTHETIC acceptance: after i drafts the next one
passes with a constant probability, chosen so that a step gives AL tokens on average. All work is
done as ever, full logits and verification included. Prints one line, RESULT and a JSON object:
median tokens per second of each concurrency, the acceptance length really had, where the device
spent a step, memory. It drives the `LLM` that users have.
"""

from __future__ import annotations

import time

STARTED = time.perf_counter()

import argparse  # noqa: E402
import gc  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import random  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
from collections.abc import Sequence  # noqa: E402
from dataclasses import asdict  # noqa: E402
from pathlib import Path  # noqa: E402
from statistics import median  # noqa: E402
from typing import Any, get_args  # noqa: E402

import torch  # noqa: E402
from checkpoints import write_checkpoint  # noqa: E402
from common import acceptance_rates, concurrencies, run_guarded  # noqa: E402
from shapes import SHAPES, make_head, make_target  # noqa: E402

from peagle import LLM, SamplingParams  # noqa: E402
from peagle.cli.mix import Share, apply_mix, read_mix  # noqa: E402
from peagle.cli.setup import quiet_libraries  # noqa: E402
from peagle.config import MAX_SPECULATIVE_TOKENS, DType  # noqa: E402
from peagle.config.engine import Fp8Activations, KVCacheDType  # noqa: E402
from peagle.config.speculative import Quantization  # noqa: E402
from peagle.engine.placement import resolve_device, resolve_dtype  # noqa: E402
from peagle.environment import environment  # noqa: E402
from peagle.errors import UserError  # noqa: E402
from peagle.evaluation.decoding import Request  # noqa: E402
from peagle.models.quantize import quantize_model  # noqa: E402
from peagle.models.target import TargetModel  # noqa: E402


def main() -> None:
    """Run it."""
    args = _arguments()
    quiet_libraries()
    rates = acceptance_rates(args.al, args.k) if args.method != "none" else None
    llm = build(args, rates)
    device = llm.target.device
    generate(llm, 1, args.prompt, 1, random.Random(1))
    start_s = time.perf_counter() - STARTED
    generate(llm, 1, args.prompt, min(32, args.out), random.Random(1))
    gc.collect()
    gc.freeze()  # as the engine process of a server does
    cells = {c: measure(llm, c, args) for c in args.conc}
    stats = llm.stats.speculation
    result = {
        "synthetic": True,
        "shape": args.shape,
        "method": args.method,
        "quantization": llm.target.quantization,
        "fp8_activations": llm.target.fp8_activations,
        "kv_cache_dtype": llm.target.kv_cache_dtype,
        "k": args.k if rates else 0,
        "k_per_batch_size": args.k_per_batch_size,
        "al_set": args.al if rates else 1.0,
        "al": round(stats.acceptance_length, 3),
        "tps": {c: cell["tps"] for c, cell in cells.items()},
        "runs": {c: cell["runs"] for c, cell in cells.items()},
        "step_ms": {c: cell["step_ms"] for c, cell in cells.items()},
        "mix": [share.entry for share in args.shares],
        "prompt": args.prompt,
        "out": args.out,
        "first_token_s": round(start_s, 4),
        "memory": memory(llm),
        "environment": environment(device),
    }
    print("RESULT", json.dumps(result), flush=True)


def _arguments() -> argparse.Namespace:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--shape", default="qwen3-8b", choices=SHAPES)
    options.add_argument(
        "--checkpoint",
        type=Path,
        help="folder of a checkpoint of the shape, written if it is empty; heads go beside it "
        "(default: weights are made in memory)",
    )
    options.add_argument("--method", default="none", choices=("none", "eagle3", "peagle"))
    options.add_argument("--k", type=int, default=7, help="draft tokens per step (7)")
    options.add_argument(
        "--k-per-batch-size", type=json.loads, help="schedule, like [[1,16,7],[17,64,4]] (none)"
    )
    options.add_argument("--al", type=float, default=1.0, help="acceptance length to make up (1)")
    options.add_argument("--conc", default="1,4,16,64", help="sequences together, a list")
    options.add_argument("--prompt", type=int, default=128, help="tokens of a prompt (128)")
    options.add_argument("--out", type=int, default=256, help="tokens to generate (256)")
    options.add_argument("--repeats", type=int, default=3, help="runs of each concurrency (3)")
    options.add_argument("--max-model-len", type=int, default=2048)
    options.add_argument("--device", default="auto")
    options.add_argument("--dtype", default="auto", choices=get_args(DType))
    options.add_argument("--quantization", choices=get_args(Quantization), help="as the engine's")
    options.add_argument(
        "--fp8-activations",
        default="off",
        choices=get_args(Fp8Activations),
        help="as the engine's; auto needs --checkpoint of a shape in FP8 (off)",
    )
    options.add_argument("--kv-cache-dtype", default="auto", choices=get_args(KVCacheDType))
    options.add_argument("--temperature", type=float, default=0.0)
    options.add_argument(
        "--mix", type=Path, help="further sampling parameters, as in peagle bench (all are alike)"
    )
    options.add_argument(
        "--profile", type=Path, help="write a table of the kernels of 8 steps here"
    )
    args = options.parse_args()
    args.conc = concurrencies(args.conc)
    _check(args)
    args.shares = read_mix(args.mix) if args.mix else []
    return args


def _check(args: argparse.Namespace) -> None:
    """Refuse what would end a run in the middle, or measure something else than it says."""
    for name in ("prompt", "out", "repeats"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name} is {getattr(args, name)}; expected at least 1.")
    if args.quantization and SHAPES[args.shape].format != "plain":
        raise UserError(
            f"--quantization is {args.quantization!r}, but {args.shape} is published in "
            f"{SHAPES[args.shape].format}: leave it out."
        )
    if args.fp8_activations == "auto" and args.checkpoint is None:
        raise UserError("--fp8-activations is 'auto'; it needs --checkpoint DIR.")
    drafts = 0
    if args.method != "none":
        drafts, most = args.k, MAX_SPECULATIVE_TOKENS
        if not 1 <= drafts <= most:
            raise UserError(f"--k is {drafts}; expected 1 to {most}. No drafts: --method none.")
        if not 1 <= args.al <= drafts + 1:
            raise UserError(f"--al is {args.al}; expected 1 to {drafts + 1}, which --k allows.")
    # At the end of the context outputs are cut, and so are drafts.
    longest = min(args.max_model_len, SHAPES[args.shape].config["max_position_embeddings"])
    if (length := args.prompt + args.out + drafts) > longest:
        raise UserError(
            f"--prompt {args.prompt} and --out {args.out} make {length} tokens with the last "
            f"drafts; expected at most {longest}, of --max-model-len and the shape's positions."
        )
    if args.profile:
        if resolve_device(args.device).type != "cuda":
            raise UserError(f"--profile is {str(args.profile)!r}; it needs a GPU: leave it out.")
        try:
            args.profile.open("a").close()
        except OSError as error:
            raise UserError(f"--profile cannot be written: {error}.") from None


def build(args: argparse.Namespace, rates: list[float] | None) -> LLM:
    """The engine that users get, on random weights."""
    device = resolve_device(args.device)
    shape, dtype = SHAPES[args.shape], resolve_dtype(args.dtype, device)
    base = args.checkpoint or _folder(args.shape)
    if args.checkpoint is None:
        target = make_target(shape, base, dtype, device)
    else:
        if not (base / "config.json").is_file():
            write_checkpoint(shape, base, dtype, device)
        target = TargetModel.load(
            base, dtype=dtype, device=device, fp8_activations=args.fp8_activations
        )
    if args.quantization:
        quantize_model(target.model, args.quantization, device, unpack=device.type != "cuda")
        target.quantization = args.quantization
    if args.kv_cache_dtype == "fp8":
        target.round_kv({})
    speculative = None
    if rates is not None:
        head = base.parent / f"{base.name}-{args.method}" if args.checkpoint else base / args.method
        make_head(shape, args.method, head, dtype, device)
        speculative = {
            "model": str(head),
            "num_speculative_tokens": args.k,
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_rates": rates,
            "num_speculative_tokens_per_batch_size": args.k_per_batch_size,
        }
    return LLM(
        model=target,
        speculative_config=speculative,
        max_model_len=min(args.max_model_len, target.max_model_len),
        max_num_seqs=max(args.conc),
        enable_prefix_caching=False,
    )


def _folder(shape: str) -> Path:
    """Where the tokenizer and the heads of a shape stay for the next run."""
    try:
        folder = Path(tempfile.gettempdir(), "peagle-shapes", shape)
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UserError(
            f"No folder for temporary models: {error}. Set TMPDIR to one that can be written."
        ) from None
    return folder


def generate(
    llm: LLM,
    count: int,
    prompt: int,
    out: int,
    source: random.Random,
    shares: Sequence[Share] = (),
    **params: Any,
) -> int:
    """Complete random prompts, which `shares` may give further parameters; returns new tokens."""
    first, last = llm.target.vocab_size // 150, llm.target.vocab_size * 2 // 3
    prompts = [[source.randrange(first, last) for _ in range(prompt)] for _ in range(count)]
    alike = Request("", "", SamplingParams(max_tokens=out, ignore_eos=True, **params))
    outputs = llm.generate(prompts, [one.params for one in apply_mix([alike] * count, shares)])
    return sum(len(output.token_ids) for output in outputs)


def measure(llm: LLM, concurrency: int, args: argparse.Namespace) -> dict[str, Any]:
    """Runs at one concurrency: their speed, and where the time of a step went."""
    source = random.Random(concurrency)
    options = {"temperature": args.temperature, "shares": args.shares}
    generate(llm, concurrency, args.prompt, min(16, args.out), source, **options)
    speeds, before, seconds = [], llm.stats, 0.0
    for _ in range(args.repeats):
        start = time.perf_counter()
        tokens = generate(llm, concurrency, args.prompt, args.out, source, **options)
        speeds.append(tokens / (time.perf_counter() - start))
        seconds += time.perf_counter() - start
    after = llm.stats
    if args.profile:
        profile(llm, concurrency, args, source)
    cell = {
        "tps": round(median(speeds), 1),
        "runs": [round(speed, 1) for speed in speeds],
        "step_ms": split(before, after, seconds),
    }
    print(f"# synthetic {args.shape} {args.method} c={concurrency}", json.dumps(cell), flush=True)
    return cell


def split(before: Any, after: Any, seconds: float) -> dict[str, float]:
    """Milliseconds of a decode step by part, over all steps, and over those of the largest graph.

    `other` is all else: prompts and the steps with prompts in their pass, the host, the gaps.
    """
    steps: dict[int, dict[str, float]] = {}
    for rows, times in after.step_times.items():
        earlier = asdict(before.step_times[rows]) if rows in before.step_times else {}
        steps[rows] = {k: v - earlier.get(k, 0) for k, v in asdict(times).items()}
    steps = {rows: counts for rows, counts in steps.items() if counts["num_steps"]}
    if not steps:
        return {"whole": round(1000 * seconds / (after.num_steps - before.num_steps), 3)}
    parts = {k: sum(counts[k] for counts in steps.values()) for k in steps[max(steps)]}
    count, full = parts.pop("num_steps"), steps[max(steps)]
    parts["other"] = seconds - sum(parts.values())
    full_count = full.pop("num_steps")
    mean = {name: round(1000 * part / count, 3) for name, part in parts.items()}
    return mean | {f"full_{k}": round(1000 * part / full_count, 3) for k, part in full.items()}


def profile(llm: LLM, concurrency: int, args: argparse.Namespace, source: random.Random) -> None:
    """A table of the kernels of a short run, most expensive first."""
    from torch.profiler import ProfilerActivity

    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as record:
        generate(llm, concurrency, args.prompt, min(args.out, 32), source)
    averages = record.key_averages()
    table = averages.table(sort_by="cuda_time_total", row_limit=60, max_name_column_width=90)
    with args.profile.open("a", encoding="utf-8") as file:
        print(f"== {args.method} c={concurrency}", table, sep="\n", file=file)


def memory(llm: LLM) -> dict[str, Any]:
    """GiB at the peak, and the plan made at the start."""
    plan = getattr(llm.engine, "memory_plan", None)
    facts: dict[str, Any] = {"plan": None if plan is None else asdict(plan)}
    if llm.target.device.type == "cuda":
        facts["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        facts["reserved_gib"] = round(torch.cuda.max_memory_reserved() / 2**30, 2)
    return facts


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    run_guarded(main)
    sys.stdout.flush()
