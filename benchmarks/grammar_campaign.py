"""Random schemas and regular expressions with large counts: is every finished output valid?

    python benchmarks/grammar_campaign.py
    python benchmarks/grammar_campaign.py --num 20 --num-seeds 1 --methods plain

Most counts reach 5,000 and least counts 200. `re` and jsonschema, which know nothing of the
grammars, read each output that ended by itself. Prints one JSON object; the status is 1 if an
output is not valid, ended with an error, or a structure was refused.
"""

from __future__ import annotations

import json
import random
import re
import sys
import time
from collections import Counter
from typing import Any

from common import finish, methods_of, parser, run_guarded, speculative, start
from jsonschema import Draft202012Validator

from peagle.config import SamplingParams, StructuredOutput
from peagle.errors import UserError
from peagle.evaluation.engine_backend import build_llms
from peagle.llm import LLM, RequestOutput

MOST, LEAST = 5000, 200
PROMPTS = ("def f(x):\n", "# A list of names:\n", "{", "import os\n", 'text = "')
CHARACTERS = (
    *("[a-z]", "[a-z ]", "[A-Za-z0-9_]", "[^a-z]", '[^"\\n]', ".", r"\w", r"\d", r"\S", r"[\w .,]"),
    *("[а-яё ]", "[一-龥]", "[ࠀ-ࠐab]", "[a-zÀ-ɏ]", "[^а-я]"),
)
GROUPS = ("(?:ab|c)", "(?:[a-z]+,)", "(?:x|yz|[0-9])", r"(?:\w+ )", "(?:[а-я]|- )")
WORDS = ("a", "end", "x=", " ", "\\.", "é", "", "")
# Texts that end soon once they may.
END_BIAS = 4.0


def random_counts(rng: random.Random) -> str:
    """Return the suffix of a repeat; most of them are large."""
    least = rng.choice((0, 1, rng.randint(0, 40), rng.randint(100, LEAST)))
    most = least + rng.choice((rng.randint(0, 30), rng.randint(100, 200), rng.randint(0, 4700)))
    counts = (
        *(f"{{{least},{min(most, MOST)}}}",) * 4,
        *(f"{{{least},}}", f"{{{least}}}", f"{{,{most}}}", "*", "+", "?", "{0}"),
    )
    return rng.choice(counts) + rng.choice(("", "", "", "?"))


def random_regex(rng: random.Random) -> str:
    """Return an expression of one to three parts, of which one or two repeat."""
    parts = []
    for _ in range(rng.randint(1, 2)):
        item = rng.choice(CHARACTERS if rng.random() < 0.7 else GROUPS)
        parts += [rng.choice(WORDS), item + random_counts(rng)]
    parts.append(rng.choice(WORDS))
    if rng.random() < 0.2:
        parts.append(f"(?:{rng.choice(CHARACTERS)}{random_counts(rng)}|no)")
    return "".join(parts)


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """Return a schema whose lengths, items and properties are counted."""
    kinds = ["text", "pattern", "scalar"] if depth else []
    match rng.choice(kinds + ["array", "object", "object", "map"] * (depth < 2)):
        case "text":
            least = rng.choice((0, 1, rng.randint(0, LEAST)))
            most = least + rng.choice((10, rng.randint(100, 200), rng.randint(0, MOST - LEAST)))
            counts = {"minLength": least, "maxLength": most}
            kept = rng.choice((("maxLength",), ("minLength",), tuple(counts)))
            return {"type": "string", **{key: counts[key] for key in kept}}
        case "pattern":
            return {"type": "string", "pattern": f"^{random_regex(rng)}$"}
        case "scalar":
            values: tuple[dict[str, Any], ...] = (
                {"type": "integer", "minimum": 0, "maximum": rng.choice((9, 500))},
                {"type": "boolean"},
                {"enum": ["red", "grün", None, 3]},
            )
            return rng.choice(values)
        case "array":
            least = rng.choice((0, 1, rng.randint(0, 20), rng.randint(100, LEAST)))
            is_short = least > 20 or depth > 0
            items = {"type": "boolean"} if is_short else random_schema(rng, depth + 1)
            most = least + rng.choice((3, rng.randint(100, 200), rng.randint(0, MOST - LEAST)))
            return {"type": "array", "items": items, "minItems": least, "maxItems": most}
        case "map":
            return {
                "type": "object",
                "additionalProperties": random_schema(rng, 2),
                "minProperties": rng.choice((0, 1)),
                "maxProperties": rng.choice((1, 3, rng.randint(129, MOST))),
            }
    names = [f"{word}{n}" for n, word in enumerate(rng.sample(("id", "name", "ok", "tags"), 2))]
    return {
        "type": "object",
        "properties": {name: random_schema(rng, depth + 1) for name in names},
        "required": rng.sample(names, rng.randint(0, len(names))),
        "additionalProperties": False,
    }


def structures(num: int, seed: int) -> list[StructuredOutput]:
    """Return `num` schemas, then `num` expressions."""
    rng = random.Random(seed)
    schemas = [
        StructuredOutput.json_schema(random_schema(rng), compact=rng.random() < 0.3)
        for _ in range(num)
    ]
    return schemas + [StructuredOutput.regex(random_regex(rng)) for _ in range(num)]


def is_valid(structure: StructuredOutput, text: str) -> bool:
    """Whether a finished output is what its structure asks for."""
    if structure.kind == "regex":
        return re.fullmatch(structure.source, text, re.ASCII) is not None
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return Draft202012Validator(json.loads(structure.source)).is_valid(value)


def params_for(llm: LLM, structure: StructuredOutput, seed: int, most: int) -> SamplingParams:
    """Return how one output is sampled: drawn tokens, with a liking for its end."""
    bias = tuple((token, END_BIAS) for token in llm.engine.eos_token_ids)
    return SamplingParams(
        max_tokens=most, temperature=1.0, seed=seed, structured_output=structure, logit_bias=bias
    )


def run(llm: LLM, asked: list[StructuredOutput], num_seeds: int, most: int) -> dict[str, Any]:
    """Generate `num_seeds` outputs for each structure and check those that ended by themselves."""
    start_s = time.perf_counter()
    jobs: list[StructuredOutput] = []
    faults: list[dict[str, Any]] = []
    for structure in asked:
        try:
            llm.requests.compile_grammar(params_for(llm, structure, 0, most))
        except UserError as error:
            faults.append({"source": structure.source, "refused": str(error)})
        else:
            jobs += [structure] * num_seeds
    outputs: list[RequestOutput] = []
    for at in range(0, len(jobs), 128):
        part = range(at, min(at + 128, len(jobs)))
        prompts = [PROMPTS[job % len(PROMPTS)] for job in part]
        outputs += llm.generate(prompts, [params_for(llm, jobs[job], job, most) for job in part])
        print(f"# {len(outputs)} of {len(jobs)} outputs", file=sys.stderr, flush=True)
    for structure, output in zip(jobs, outputs, strict=True):
        is_fault = output.finish_reason == "stop" and not is_valid(structure, output.text)
        if is_fault or output.error is not None:
            faults.append({"source": structure.source, "text": output.text, "error": output.error})
    return {
        "num_outputs": len(outputs),
        "finish_reasons": Counter(output.finish_reason for output in outputs),
        "num_tokens": sum(len(output.token_ids) for output in outputs),
        "longest_finished": max(
            (len(o.text) for o in outputs if o.finish_reason == "stop"), default=0
        ),
        "num_faults": len(faults),
        "faults": faults[:10],
        "seconds": time.perf_counter() - start_s,
    }


def main() -> None:
    """Run it."""
    options = parser(__doc__, methods="plain,peagle")
    options.add_argument("--num", type=int, default=200, help="schemas, and as many expressions")
    options.add_argument("--num-seeds", type=int, default=3, help="outputs of each structure")
    options.add_argument("--seed", type=int, default=0, help="of the structures")
    options.add_argument("--max-new-tokens", type=int, default=600)
    options.add_argument("--k", type=int, default=5, help="draft tokens per step")
    args = options.parse_args()
    target = start(args)
    methods = methods_of(args)
    llms = build_llms(target, {n: speculative(n, folder, args.k) for n, folder in methods.items()})
    asked = structures(args.num, args.seed)
    found = {
        name: run(llm, asked, args.num_seeds, args.max_new_tokens) for name, llm in llms.items()
    }
    finish(
        args,
        target,
        num_schemas=args.num,
        num_regexes=args.num,
        num_seeds=args.num_seeds,
        max_new_tokens=args.max_new_tokens,
        num_speculative_tokens=args.k,
        methods=found,
    )
    if any(figures["num_faults"] for figures in found.values()):
        sys.exit(1)


if __name__ == "__main__":
    run_guarded(main)
