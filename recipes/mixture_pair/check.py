"""Check that P-EAGLE on the mixture pair gives the tokens of plain decoding, in every precision.

    python recipes/mixture_pair/check.py build/mixture_pair --precision float32,fp8,int8,int4

Greedy outputs of an engine with the head are compared with those of an engine without it, token by
token. Each first difference is a near-tie, where rounding explains the gap between the two logits,
or a fault. In a mixture a rounding may choose another expert, which moves logits by much: so what
rounding does is measured, between two ways of plain decoding. A file `check-PRECISION.json` in
the folder of the pair holds the figures.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from peagle.attention.torch_backend import DenseCausalAttention
from peagle.config import EngineConfig, SamplingParams, SpeculativeConfig
from peagle.engine import SpeculationStats
from peagle.engine.placement import load_target
from peagle.evaluation.certify.reference import Reference, first_difference, near_tie_bound
from peagle.evaluation.engine_backend import build_llms
from peagle.evaluation.prompts import load_prompt_set
from peagle.evaluation.touched_experts import count_touched, recorded_passes
from peagle.llm import LLM
from peagle.models.routing import num_experts_of
from peagle.models.target import TargetModel

PRECISIONS = ("float64", "float32", "bfloat16", "fp8", "int8", "int4")
QUANTIZATIONS = ("fp8", "int8", "int4")
K = 5


@dataclass(frozen=True)
class Load:
    """What is decoded: prompts of `heldout_code`, tokens of each output, requests in flight."""

    num_prompts: int
    max_tokens: int
    concurrency: int


def engine_config(precision: str) -> EngineConfig:
    """Quantised weights compute in bfloat16 on a GPU and in float32 on a CPU."""
    if precision in QUANTIZATIONS:
        return EngineConfig(quantization=precision)
    return EngineConfig(dtype=precision)


@torch.inference_mode()
def plain_reference(target: TargetModel, prompt: list[int], output: list[int]) -> Reference:
    """The plain output, and the logits that one pass over the whole sequence gives for it."""
    tokens = torch.tensor([*prompt, *output[:-1]], device=target.device)
    positions = torch.arange(len(tokens), device=target.device)
    hidden_TH, _ = target.forward(tokens, positions, DenseCausalAttention(1))
    logits = target.compute_logits(hidden_TH[len(prompt) - 1 :])
    return Reference(output, logits.float().cpu())


def rounding(
    llm: LLM, prompts: list[list[int]], max_tokens: int, references: list[Reference]
) -> float:
    """By how much log-probabilities of plain decoding differ from those of the references.

    The value is above 99.9% of the differences of the two likeliest tokens at each position, up to
    the first other token.
    """
    params = SamplingParams(max_tokens=max_tokens, logprobs=2)
    moves = [0.0]
    for output, reference in zip(llm.generate(prompts, params), references, strict=True):
        logprobs_NV = reference.logits_NV.double().log_softmax(-1)
        tokens = zip(output.outputs[0].logprobs or [], reference.token_ids, strict=False)
        for at, (found, expected) in enumerate(tokens):
            for token_id, logprob in found.top:
                moves.append(abs(logprob - float(logprobs_NV[at, token_id])))
            if found.token_id != expected:
                break
    return float(np.quantile(moves, 0.999))


def touched(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> float | None:
    """Distinct experts that a decode step touches in a layer."""
    with recorded_passes(llm) as passes:
        llm.generate(prompts, params)
    found = count_touched(passes, num_experts_of(llm.target))
    return None if found is None else round(found.mean, 2)


def check(pair: Path, precision: str, load: Load) -> dict[str, Any]:
    """Compare the outputs of both engines in one precision; the figures of RESULT."""
    started = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a CPU unpacks the weights
        target = load_target(pair / "target", engine_config(precision))
    head = SpeculativeConfig(model=str(pair / "peagle" / "head"), num_speculative_tokens=K)
    sizes = {"max_num_seqs": load.concurrency, "kv_cache_gib": 0.25}
    llms = build_llms(target, {"plain": None, "peagle": head}, **sizes)
    texts = [prompt.text for prompt in load_prompt_set("heldout_code", load.num_prompts)]
    prompts = [llms["plain"].requests.encode(text) for text in texts]
    params = SamplingParams(max_tokens=load.max_tokens)
    outputs = {name: llm.generate(prompts, params) for name, llm in llms.items()}
    stats, differences = SpeculationStats(), []
    plain, drafted = ([one.outputs[0].token_ids for one in outputs[n]] for n in llms)
    references = [plain_reference(target, *both) for both in zip(prompts, plain, strict=True)]
    moved = rounding(llms["plain"], prompts, load.max_tokens, references)
    bound = near_tie_bound(target.dtype)
    if target.dtype.itemsize == 2:  # each of two logits may move so far
        bound = max(bound, 2 * moved)
    for number, (reference, found) in enumerate(zip(references, drafted, strict=True)):
        stats.add(outputs["peagle"][number].stats)
        difference = first_difference(str(number), found, reference, bound)
        if difference is not None:
            differences.append(difference)
    few = SamplingParams(max_tokens=min(24, load.max_tokens), ignore_eos=True)
    beginning = prompts[: load.concurrency]
    return {
        "precision": precision,
        "computed_in": str(target.dtype).removeprefix("torch."),
        "device": str(target.device),
        "k": K,
        **asdict(load),
        "num_tokens": sum(map(len, plain)),
        "rounding": float(f"{moved:.3g}"),
        "acceptance_length": round(stats.acceptance_length, 3),
        "compared": len(prompts),
        "identical": len(prompts) - len(differences),
        "near_ties": sum(one.is_near_tie for one in differences),
        "faults": sum(not one.is_near_tie for one in differences),
        "differences": [one.to_json() for one in differences],
        "experts_touched": {n: touched(llm, beginning, few) for n, llm in llms.items()},
        "num_experts": num_experts_of(target),
        "seconds": round(time.perf_counter() - started, 1),
    }


def check_file(pair: Path, precision: str) -> Path:
    """Where the figures of a precision are kept."""
    return pair / f"check-{precision}.json"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("pair", type=Path, help="folder with target/ and peagle/head/")
    parser.add_argument("--precision", default=",".join(PRECISIONS), help="precisions to check")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--concurrency", type=int, default=4, help="requests in flight")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    load = Load(args.prompts, args.max_new_tokens, args.concurrency)
    num_faults = 0
    for precision in args.precision.split(","):
        found = check(args.pair, precision, load)
        check_file(args.pair, precision).write_text(json.dumps(found, indent=1) + "\n")
        num_faults += found["faults"]
        print(
            f"{precision}, computed in {found['computed_in']}: {found['identical']} of "
            f"{found['compared']} outputs identical, {found['near_ties']} near-ties, "
            f"{found['faults']} faults, acceptance length {found['acceptance_length']}",
            flush=True,
        )
    raise SystemExit(1 if num_faults else 0)


if __name__ == "__main__":
    main()
