"""`peagle generate`: complete prompts."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from itertools import product
from typing import TYPE_CHECKING

import typer

from peagle.cli import groups
from peagle.cli.flags import Given, takes
from peagle.cli.groups import Format, OutputFormat
from peagle.cli.setup import Setup, name_target, note
from peagle.cli.terminal import safe
from peagle.config import SamplingParams
from peagle.errors import UserError
from peagle.evaluation.prompts import Prompt, read_prompts

if TYPE_CHECKING:
    from peagle.cli.tally import Tally
    from peagle.llm import LLM, RequestOutput, StreamChunk

EXAMPLES = """
The bundled code model and its P-EAGLE head:
  peagle generate --prompt 'def fibonacci(n):'
  peagle generate --prompt 'def fibonacci(n):' --temperature 0.7 --top-p 0.9 --seed 1

Models of your own, in a folder or on the hub; every prompt of a file, one JSON object a line:
  peagle generate ./Qwen3-0.6B --draft ./head --prompts prompts.jsonl --format json
  peagle generate --target openai/gpt-oss-20b --draft amazon/GPT-OSS-20B-P-EAGLE --prompt 'Hello'

The same target without a head, and with prompt lookup:
  peagle generate --target ./Qwen3-0.6B --prompt 'Once upon a time'
  peagle generate --target ./Qwen3-0.6B --method ngram -k 4 --prompt 'Once upon a time'

JSON that fits a schema; several outputs of a prompt:
  peagle generate --target ./Qwen3-0.6B --prompt 'Ada Lovelace as JSON:' --json-schema person.json
  peagle generate --prompt 'def sort(' --n 3 --temperature 0.8

From a pipe; and a configuration as vLLM writes it:
  echo 'import numpy as' | peagle generate --prompts -
  peagle generate --prompt 'class Stack:' --speculative-config \\
      '{"method": "eagle3", "model": "./head", "num_speculative_tokens": 5}'

Settings in a file, and what they amount to together with variables and flags:
  PEAGLE_MAX_NUM_SEQS=4 peagle generate --config peagle.toml -k 3 --show-config
"""


@takes(
    *groups.MODEL,
    *groups.SPECULATION,
    *groups.SAMPLING,
    *groups.FINER_SAMPLING,
    *groups.STRUCTURE,
    *groups.RESULTS,
    *groups.ENGINE,
    *groups.SETTINGS,
)
def generate(
    given: Given,
    model: groups.Model = None,
    prompt: str | None = typer.Option(
        None, help="Text to complete; the output streams as it comes."
    ),
    prompts: str | None = typer.Option(
        None,
        metavar="FILE",
        help='Prompts, one a line: {"id", "turns"} (the first turn), {"id", "prompt"}, JSON '
        "strings or plain text; - is standard input.",
    ),
    output_format: Format = OutputFormat.TEXT,
) -> None:
    """Complete prompts of your own.

    Completions go to standard output, a line of statistics to standard error.
    Drafts make decoding faster; the output is that of the target alone.
    """
    name_target(given, model)
    only_show = "show_config" in given
    questions = [] if only_show else _prompts(prompt, prompts, model)
    setup = Setup(given)
    if only_show:
        setup.show()
        return
    params = setup.params
    is_text = output_format is OutputFormat.TEXT
    if is_text and (params.logprobs is not None or params.prompt_logprobs is not None):
        note("text has no room for log-probabilities: see them with --format json")
    llm = setup.load()
    from peagle.cli.tally import Tally

    tally = Tally()
    streams = prompt is not None and params.n == 1 and is_text
    show = _write if streams else _in_order(questions, params.n, output_format)
    is_empty = True
    for chunk in tally.watch(llm.stream([question.text for question in questions], params)):
        is_empty = is_empty and not chunk.text
        show(chunk)
    if is_empty and getattr(llm.tokenizer, "chat_template", None):
        note("no text follows; `peagle chat` asks this chat model as its template does")
    print(_summary(tally, llm, params), file=sys.stderr)


def _prompts(prompt: str | None, file: str | None, model: str | None) -> list[Prompt]:
    if (prompt is None) == (file is None):
        given = "both" if prompt is not None else "neither"
        taken = "" if model is None else f" {model!r} is taken for the model."
        raise UserError(f"Give --prompt or --prompts, one of them; {given} was given.{taken}")
    if prompt is not None:
        if not prompt:
            raise UserError("--prompt is empty; expected at least one character.")
        return [Prompt("1", (prompt,))]
    assert file is not None
    prompts = read_prompts(file)
    if further := sum(len(p.turns) > 1 for p in prompts):
        note(f"{further} of {len(prompts)} prompts have further turns: only the first is used")
    return prompts


def _write(chunk: StreamChunk) -> None:
    print(safe(chunk.text, sys.stdout), end="" if chunk.output is None else "\n", flush=True)


def _in_order(
    prompts: Sequence[Prompt], num_outputs: int, output_format: OutputFormat
) -> Callable[[StreamChunk], None]:
    """Return a function that prints finished outputs in the order of the prompts."""
    finished: dict[tuple[int, int], RequestOutput] = {}
    waiting = product(range(len(prompts)), range(num_outputs))
    due = next(waiting)

    def show(chunk: StreamChunk) -> None:
        nonlocal due
        if chunk.output is not None:
            finished[chunk.index, chunk.output_index] = chunk.output
        while due in finished:
            number = due[1] if num_outputs > 1 else None
            print(_result(prompts[due[0]], number, finished.pop(due), output_format), flush=True)
            due = next(waiting, (-1, -1))

    return show


def _result(
    prompt: Prompt, number: int | None, output: RequestOutput, output_format: OutputFormat
) -> str:
    """Return the text of an output, with its number if its prompt has several."""
    if output_format is OutputFormat.JSON:
        index = {} if number is None else {"index": number}
        return json.dumps({"id": prompt.id, **index, **output.to_json()})
    return (
        f"=== {prompt.id}{'' if number is None else f' #{number}'}\n{safe(output.text, sys.stdout)}"
    )


def _summary(tally: Tally, llm: LLM, params: SamplingParams) -> str:
    """Return a line with the tokens, the speed and the acceptance."""
    from peagle.cli.tally import drafts_of
    from peagle.models.target_facts import precision_of

    speed = (
        f"{tally.num_tokens} tokens in {tally.seconds:.2f} s ({tally.tokens_per_s:.1f} tokens/s)"
    )
    dtype = precision_of(llm.target)
    drafting = tally.drafting(drafts_of(llm))
    return f"{speed}; {drafting}, temperature {params.temperature:g}, {dtype}"
