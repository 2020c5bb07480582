"""`peagle tune`: what drafts cost on this machine, and K by batch size."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from peagle.cli import groups
from peagle.cli.flags import Given, pick, takes
from peagle.cli.options import (
    DEFAULT_LIMIT,
    Format,
    OutputFormat,
    Results,
    UseTemplate,
    check_paths,
)
from peagle.cli.settings import Layer, Settings
from peagle.cli.tune_request import TuneRequest
from peagle.cli.values import whole_numbers
from peagle.config import MAX_SPECULATIVE_TOKENS
from peagle.errors import UserError

EXAMPLES = """
The bundled pair on this machine; about two minutes:
  peagle tune --threads 1

A head of your own, with the acceptance that peagle eval measured; a report in out/:
  peagle eval --target ./Qwen3-0.6B --draft ./head -k 1,3,7 --output out
  peagle tune --target ./Qwen3-0.6B --draft ./head -k 1-7 --acceptance out --output out

Larger batches and longer contexts, K from a list:
  peagle tune --target ./Qwen3-0.6B --draft ./head -k 1,3,5,7 --batch-sizes 1,4,16,32,64 \\
      --context 2048

Interrupted? The same command with the same --output goes on where it was.
What it prints goes into --speculative-config of peagle serve.
"""

DEFAULT_SET = "humaneval"


@takes(
    *pick(groups.MODEL, "target", "revision", "speculative.model"),
    *pick(groups.SAMPLING, "sampling.max_tokens", "sampling.temperature", "sampling.seed"),
    *pick(groups.ENGINE, "engine.dtype", "engine.device", "engine.kv_cache_gib"),
    *pick(groups.ENGINE, "engine.gpu_memory_utilization", "threads"),
)
def tune(
    given: Given,
    k: Annotated[
        str | None,
        typer.Option(
            "-k",
            "--num-speculative-tokens",
            metavar="K,...",
            help="Draft tokens per step to choose from, like 1-8 or 1,3,5,7; no drafts (K = 0) is "
            "always among them.",
            show_default="1 to what the head was trained for, at most 8",
        ),
    ] = None,
    batch_sizes: Annotated[
        str, typer.Option(metavar="B,...", help="Sequences that decode together.")
    ] = "1,2,4,8,16",
    acceptance: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The acceptance.json of peagle eval, or its folder.",
            show_default="measured here, on --set",
        ),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Whose acceptance to take from that file.",
            show_default="that of --draft",
        ),
    ] = None,
    sets: Annotated[
        str, typer.Option("--set", metavar="NAME,...", help="Prompt sets, as in peagle eval.")
    ] = DEFAULT_SET,
    limit: Annotated[int, typer.Option(help="Prompts of each set.")] = DEFAULT_LIMIT,
    chat_template: UseTemplate = None,
    context: Annotated[int, typer.Option(help="Tokens of a sequence whose steps are timed.")] = 256,
    steps: Annotated[int, typer.Option(help="Decode steps timed in one visit to a cell.")] = 8,
    rounds: Annotated[
        int, typer.Option(help="Visits to each cell, the fastest counts; more on a busy machine.")
    ] = 5,
    threshold: Annotated[
        float, typer.Option(help="Gain in speed below which neighbouring sizes keep one K.")
    ] = 0.03,
    output: Results = None,
    output_format: Format = OutputFormat.TEXT,
) -> None:
    """Choose K by batch size for this machine and head.

    Measures what a decode step costs by batch size and K, joins it with acceptance, predicts
    tokens/s (checked on cells that it was not fitted to) and prints a schedule of K by batch size,
    K = 0 where drafts do not pay, with the acceptance length from which they would.
    """
    params = Settings(Layer(dict(given))).build("sampling")
    request = TuneRequest(
        ks=() if k is None else whole_numbers("-k", k, MAX_SPECULATIVE_TOKENS),
        batches=whole_numbers("--batch-sizes", batch_sizes, 4096),
        acceptance=acceptance,
        method=method,
        sets=tuple(dict.fromkeys(sets.split(","))),
        limit=limit,
        chat=chat_template,
        params=params if params.seed is not None else replace(params, seed=0),
        context=_at_least_one("--context", context),
        steps=_at_least_one("--steps", steps),
        rounds=_at_least_one("--rounds", rounds),
        threshold=threshold,
        output=output,
        as_json=output_format is OutputFormat.JSON,
    )
    if threshold < 0:
        raise UserError(f"--threshold is {threshold}; expected at least 0, like 0.03 for 3%.")
    if method is not None and acceptance is None:
        raise UserError(f"--method is {method!r}: it chooses from a file; add --acceptance.")
    if draft := given.value("speculative.model"):  # a target without one is refused for that
        check_paths(given.value("target"), draft)
    if acceptance is not None and not acceptance.exists():
        raise UserError(f"--acceptance {str(acceptance)!r} is not readable: it is not there.")
    from peagle.cli.tune_run import run

    result = run(given, request)
    if request.as_json:
        print(json.dumps(result.to_json(), indent=2))
        return
    from peagle.cli.tune_view import result_text

    print(result_text(result))


def _at_least_one(flag: str, number: int) -> int:
    if number < 1:
        raise UserError(f"{flag} is {number}; expected at least 1.")
    return number
