"""Constrained outputs: how many are valid, and how well drafts are accepted beside free ones.

    python benchmarks/grammar.py --temperature 0
    python benchmarks/grammar.py --temperature 1

Pydantic, which knows nothing of the grammar, reads each output. The free outputs are those of the
same prompts, cut at the length of the constrained one. Prints one JSON object.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from enum import Enum
from typing import Annotated, Any, Literal

from common import add_prompts, finish, methods_of, parser, run_guarded, speculative, start
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from peagle.config import SamplingParams, StructuredOutput
from peagle.evaluation.engine_backend import build_llms, time_requests
from peagle.evaluation.prompts import load_prompt_set
from peagle.llm import LLM, RequestOutput

Name = Annotated[str, Field(min_length=1, max_length=24)]


class Strict(BaseModel):
    """No other keys."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Person(Strict):
    """Text, bounded numbers, a flag."""

    name: Name
    age: int = Field(ge=0, le=120)
    is_member: bool


class Colour(Enum):
    """Choices."""

    RED = "red"
    GREEN = "green"
    BLUE = "blue"


class Palette(Strict):
    """A list of choices."""

    title: Name
    colours: list[Colour] = Field(min_length=1, max_length=4)


class Address(Strict):
    """Part of another."""

    street: Name
    number: int = Field(ge=1, le=9999)


class Customer(Strict):
    """Nested, with an optional part and a list of parts."""

    person: Person
    home: Address | None
    others: list[Address] = Field(max_length=2)


class Call(Strict):
    """A function call."""

    function: Literal["search", "open", "close"]
    arguments: list[Name] = Field(max_length=3)


SCHEMAS = (Person, Palette, Customer, Call)


def main() -> None:
    """Run it."""
    options = parser(__doc__, methods="peagle,eagle3")
    add_prompts(options, limit=125)
    options.set_defaults(max_new_tokens=400)
    options.add_argument("--temperature", type=float, default=0.0)
    options.add_argument("--k", type=int, default=5, help="draft tokens per step")
    args = options.parse_args()

    prompts = [prompt.text for prompt in load_prompt_set(args.set, args.limit)]
    jobs = [(prompt, schema) for schema in SCHEMAS for prompt in prompts]
    target = start(args)
    methods = methods_of(args)
    llms = build_llms(target, {n: speculative(n, folder, args.k) for n, folder in methods.items()})
    params = SamplingParams(max_tokens=args.max_new_tokens, temperature=args.temperature)
    finish(
        args,
        target,
        prompt_set=args.set,
        num_outputs=len(jobs),
        temperature=args.temperature,
        max_new_tokens=args.max_new_tokens,
        num_speculative_tokens=args.k,
        methods={name: figures(llm, jobs, params) for name, llm in llms.items()},
    )


def figures(
    llm: LLM, jobs: list[tuple[str, type[BaseModel]]], params: SamplingParams
) -> dict[str, Any]:
    """Validity and acceptance of one way to draft."""
    prompts = [prompt for prompt, _ in jobs]
    constrained = [
        replace(
            params,
            seed=seed,
            structured_output=StructuredOutput.json_schema(schema.model_json_schema()),
        )
        for seed, (_, schema) in enumerate(jobs)
    ]
    shaped = time_requests(llm, prompts, constrained)
    outputs = shaped.answers
    free = time_requests(
        llm,
        prompts,
        [
            replace(params, seed=seed, max_tokens=len(output.token_ids), ignore_eos=True)
            for seed, output in enumerate(outputs)
        ],
    )
    return {
        "num_valid": sum(
            is_valid(schema, output) for (_, schema), output in zip(jobs, outputs, strict=True)
        ),
        "finish_reasons": Counter(output.finish_reason for output in outputs),
        "num_tokens": sum(map(len, shaped.token_ids)),
        "acceptance_length_constrained": shaped.stats.acceptance_length,
        "acceptance_length_free": free.stats.acceptance_length,
    }


def is_valid(schema: type[BaseModel], output: RequestOutput) -> bool:
    """Whether pydantic takes the text."""
    try:
        schema.model_validate_json(output.text)
    except ValidationError:
        return False
    return True


if __name__ == "__main__":
    run_guarded(main)
