"""Acceptance of P-EAGLE, EAGLE-3 and prompt lookup on one prompt set: one JSON object.

    python benchmarks/acceptance.py --set humaneval --temperature 0 --k 7
    python benchmarks/acceptance.py --set heldout_code --temperature 0.7 \\
        --head eagle3-deep=FOLDER --methods peagle,eagle3,eagle3-deep,ngram
"""

from __future__ import annotations

from common import add_prompts, finish, methods_of, parser, run_guarded, speculative, start

from peagle.config import SamplingParams
from peagle.evaluation.acceptance import acceptance_figures
from peagle.evaluation.engine_backend import build_llms, time_requests, warm_up
from peagle.evaluation.prompts import load_prompt_set


def main() -> None:
    """Run it."""
    options = parser(__doc__, methods="peagle,eagle3,ngram")
    add_prompts(options, limit=None)
    options.add_argument("--k", type=int, default=7, help="draft tokens per step")
    options.add_argument("--temperature", type=float, default=0.0)
    options.add_argument("--top-p", type=float, default=1.0)
    options.add_argument("--seed", type=int, default=0, help="prompt i is sampled with SEED + i")
    options.add_argument("--draft-sampling", choices=("argmax", "probabilistic"), default="argmax")
    options.add_argument("--concurrency", type=int, default=16, help="prompts decoded together")
    args = options.parse_args()

    prompts = load_prompt_set(args.set, args.limit)
    params = [
        SamplingParams(
            max_tokens=args.max_new_tokens,
            temperature=args.temperature,
            top_p=args.top_p,
            seed=args.seed + i,
        )
        for i in range(len(prompts))
    ]
    methods = methods_of(args)
    target = start(args)
    texts = [prompt.text for prompt in prompts]
    results = {}
    for name, folder in methods.items():
        config = speculative(name, folder, args.k, draft_sampling=args.draft_sampling)
        llms = build_llms(target, {name: config}, max_num_seqs=args.concurrency)
        warm_up(llms, texts[:1])
        run = time_requests(llms[name], texts, params)
        results[name] = {
            "head": folder,
            **acceptance_figures(run.answers),
            "seconds": run.seconds,
            "tokens_per_s": run.tokens_per_s,
        }
    finish(
        args,
        target,
        prompt_set=args.set,
        num_prompts=len(prompts),
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        draft_sampling=args.draft_sampling,
        num_speculative_tokens=args.k,
        concurrency=args.concurrency,
        methods=results,
    )


run_guarded(main)
