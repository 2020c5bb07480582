"""Greedy output of every method against transformers' own `generate`: one JSON object.

    python benchmarks/identity.py --dtype float64
    python benchmarks/identity.py --dtype float32
    python benchmarks/identity.py --dtype bfloat16 --device cuda --reference-device cpu

164 HumanEval prompts and the first turns of 40 MT-Bench questions, 128 new tokens. float64 must
show no difference; elsewhere each first difference must be a near-tie of the reference (top-2 gap
below 1e-4, in bfloat16 0.25), and all are listed. Exit status 1 if one is not.
"""

from __future__ import annotations

import sys

import torch
from common import finish, methods_of, parser, run_guarded, speculative, start

from peagle.config import SamplingParams
from peagle.evaluation.certify.reference import TargetReference, first_difference
from peagle.evaluation.engine_backend import build_llms
from peagle.evaluation.prompts import load_prompt_set


def main() -> None:
    """Run it."""
    options = parser(__doc__, methods="plain,eagle3,peagle")
    options.add_argument("--humaneval", type=int, default=164, help="prompts of HumanEval")
    options.add_argument("--mt-bench", type=int, default=40, help="prompts of MT-Bench")
    options.add_argument("--max-new-tokens", type=int, default=128)
    options.add_argument("--k", type=int, default=7, help="draft tokens per step")
    options.add_argument("--reference-device", help="of transformers (default: that of --device)")
    options.add_argument("--concurrency", type=int, default=16, help="prompts decoded together")
    args = options.parse_args()

    prompts = load_prompt_set("humaneval", args.humaneval)
    prompts += load_prompt_set("mt_bench", args.mt_bench)
    methods = methods_of(args)
    target = start(args)
    reference_device = args.reference_device or str(target.device)
    reference = TargetReference(args.target, target.dtype, reference_device)
    params = SamplingParams(max_tokens=args.max_new_tokens)
    outputs = {}
    for name, folder in methods.items():
        config = speculative(name, folder, args.k)
        llm = build_llms(target, {name: config}, max_num_seqs=args.concurrency)[name]
        outputs[name] = llm.generate([prompt.text for prompt in prompts], params)
    differences = {name: [] for name in methods}
    first = next(iter(methods))
    for i, prompt in enumerate(prompts):
        expected = reference.greedy(outputs[first][i].prompt_token_ids, params)
        for name in methods:
            found = first_difference(
                prompt.id, outputs[name][i].token_ids, expected, reference.bound
            )
            differences[name] += [found] if found else []
    excused = target.dtype != torch.float64
    passed = all(excused and d.is_near_tie for found in differences.values() for d in found)
    finish(
        args,
        target,
        num_prompts=len(prompts),
        max_new_tokens=args.max_new_tokens,
        num_speculative_tokens=args.k,
        concurrency=args.concurrency,
        reference_device=reference_device,
        near_tie_bound=reference.bound,
        passed=passed,
        methods={
            name: {
                "num_differences": len(found),
                "num_near_ties": sum(d.is_near_tie for d in found),
                "differences": [d.to_json() for d in found],
            }
            for name, found in differences.items()
        },
    )
    if not passed:
        sys.exit(1)


run_guarded(main)
