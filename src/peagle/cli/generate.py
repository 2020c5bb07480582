"""`peagle generate`: complete prompts."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from peagle.bundled import BUNDLED_PEAGLE
from peagle.cli import options
from peagle.cli.options import OutputFormat, default_of
from peagle.config import SamplingParams, SpeculativeConfig
from peagle.errors import UserError
from peagle.evaluation.prompts import Prompt, read_prompts

if TYPE_CHECKING:
    from peagle.evaluation.compare import Measurement
    from peagle.llm import LLM, RequestOutput, StreamChunk

EXAMPLES = """
The bundled code model and its P-EAGLE head:
  peagle generate --prompt 'def fibonacci(n):'
  peagle generate --prompt 'def fibonacci(n):' --temperature 0.7 --top-p 0.9 --seed 1

Models of your own, every prompt of a file, one JSON object a line:
  peagle generate --target ./Qwen3-0.6B --draft ./head --prompts prompts.jsonl --format json

The same target without a head, and with prompt lookup:
  peagle generate --target ./Qwen3-0.6B --prompt 'Once upon a time'
  peagle generate --target ./Qwen3-0.6B --method ngram -k 4 --prompt 'Once upon a time'

From a pipe; and a configuration as vLLM writes it:
  echo 'import numpy as' | peagle generate --prompts -
  peagle generate --prompt 'class Stack:' --speculative-config
      '{"method": "eagle3", "model": "./head", "num_speculative_tokens": 5}'
"""


def generate(
    prompt: Annotated[
        str | None, typer.Option(help="The text to complete; streamed as it comes.")
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help='Prompts, one a line: {"id", "turns"} (the first turn), {"id", "prompt"}, JSON '
            "strings or plain text; - is standard input.",
        ),
    ] = None,
    output_format: options.Format = OutputFormat.TEXT,
    target: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Folder of the target, in Hugging Face format.",
            show_default="the bundled code model, with its P-EAGLE head",
            rich_help_panel=options.MODEL,
        ),
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Folder of the draft head, P-EAGLE or EAGLE-3.",
            show_default="none with a target of your own",
            rich_help_panel=options.MODEL,
        ),
    ] = None,
    num_speculative_tokens: options.NumSpeculativeTokens = None,
    no_speculation: Annotated[
        bool,
        typer.Option(
            "--no-speculation",
            help="Decode plainly, with no draft.",
            rich_help_panel=options.SPECULATION,
        ),
    ] = False,
    method: Annotated[
        str | None,
        typer.Option(
            help="eagle3 (a head; its kind is read from it) or ngram (prompt lookup).",
            show_default="eagle3 with a head",
            rich_help_panel=options.SPECULATION,
        ),
    ] = None,
    draft_sampling: Annotated[
        str | None,
        typer.Option(
            help="argmax or probabilistic drafts, where the temperature is not 0.",
            show_default=default_of(SpeculativeConfig, "draft_sampling"),
            rich_help_panel=options.SPECULATION,
        ),
    ] = None,
    speculative_config: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help="All of the above in vLLM's form, in place of the options above.",
            rich_help_panel=options.SPECULATION,
        ),
    ] = None,
    max_new_tokens: options.MaxNewTokens = options.DEFAULT_MAX_NEW_TOKENS,
    temperature: Annotated[
        float, typer.Option(help="0 is greedy.", rich_help_panel=options.SAMPLING)
    ] = default_of(SamplingParams, "temperature"),
    top_k: Annotated[
        int, typer.Option(help="0 keeps every token.", rich_help_panel=options.SAMPLING)
    ] = default_of(SamplingParams, "top_k"),
    top_p: Annotated[
        float, typer.Option(help="1 keeps every token.", rich_help_panel=options.SAMPLING)
    ] = default_of(SamplingParams, "top_p"),
    seed: Annotated[
        int | None,
        typer.Option(
            help="Of every prompt: alone or batched, the same seed gives the same output.",
            show_default="one for each prompt, the same in every run",
            rich_help_panel=options.SAMPLING,
        ),
    ] = None,
    dtype: options.DType = options.DEFAULT_DTYPE,
    device: options.Device = options.DEFAULT_DEVICE,
    max_num_seqs: Annotated[
        int, typer.Option(help="Most prompts decoded together.", rich_help_panel=options.ENGINE)
    ] = options.DEFAULT_MAX_NUM_SEQS,
    threads: options.Threads = None,
) -> None:
    """Complete prompts of your own.

    Completions go to standard output, a line of statistics to standard error.
    Drafts make decoding faster; the output is that of the target alone.
    """
    questions = _prompts(prompt, prompts)
    params = SamplingParams(
        max_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed
    )
    speculative = _speculation(
        target,
        speculative_config,
        no_speculation,
        {
            "model": draft,
            "method": method,
            "num_speculative_tokens": num_speculative_tokens,
            "draft_sampling": draft_sampling,
        },
    )
    folder = options.target_or_bundled(target)
    options.set_threads(threads)
    options.quiet_libraries()
    from peagle.evaluation.compare import measure
    from peagle.llm import LLM

    llm = LLM(
        folder,
        speculative_config=speculative,
        dtype=dtype,
        device=device,
        max_num_seqs=max_num_seqs,
    )
    watch = _printer(questions, output_format, stream=prompt is not None)
    measurement = measure(llm, [question.text for question in questions], params, watch)
    print(_summary(measurement, llm, params), file=sys.stderr)


def _prompts(prompt: str | None, file: str | None) -> list[Prompt]:
    if (prompt is None) == (file is None):
        given = "both" if prompt is not None else "neither"
        raise UserError(f"Give --prompt or --prompts, one of them; {given} was given.")
    if prompt is not None:
        if not prompt:
            raise UserError("--prompt is empty; expected at least one character.")
        return [Prompt("1", (prompt,))]
    assert file is not None
    prompts = read_prompts(file)
    if further := sum(len(p.turns) > 1 for p in prompts):
        _note(f"{further} of {len(prompts)} prompts have further turns: only the first is used")
    return prompts


def _speculation(
    target: str | None, config: str | None, off: bool, single: dict[str, Any]
) -> SpeculativeConfig | None:
    """The speculative configuration that the options amount to; None decodes plainly."""
    flags = {"model": "--draft"}
    given = {name: value for name, value in single.items() if value is not None}
    names = [flags.get(name, "--" + name.replace("_", "-")) for name in given]
    if off and config is not None:
        names.append("--speculative-config")
    if names and (off or config is not None):
        other = "--no-speculation" if off else "--speculative-config"
        raise UserError(f"{other} and {names[0]} contradict each other; leave one of them out.")
    if off:
        return None
    if config is not None:
        return SpeculativeConfig.parse(config)
    if given.get("method") != "ngram" and "model" not in given:
        if target is not None:
            if names:
                raise UserError(
                    f"{names[0]} was given, but no draft head for {target!r}. Name one with "
                    "--draft, or look drafts up in the text with --method ngram."
                )
            _note("no --draft: decoding plainly (--method ngram needs no head)")
            return None
        given["model"] = options.bundled(BUNDLED_PEAGLE)
    return SpeculativeConfig.parse(given)


def _printer(
    prompts: Sequence[Prompt], output_format: OutputFormat, *, stream: bool
) -> Callable[[StreamChunk], None]:
    """What is done with each chunk: completions are printed in the order of the prompts."""
    finished: dict[int, RequestOutput] = {}
    num_printed = 0

    def watch(chunk: StreamChunk) -> None:
        nonlocal num_printed
        if stream and output_format is OutputFormat.TEXT:
            print(chunk.text, end="" if chunk.output is None else "\n", flush=True)
            return
        if chunk.output is not None:
            finished[chunk.index] = chunk.output
        while num_printed in finished:
            prompt, output = prompts[num_printed], finished.pop(num_printed)
            if output_format is OutputFormat.JSON:
                print(json.dumps({"id": prompt.id, **output.to_json()}), flush=True)
            else:
                print(f"=== {prompt.id}\n{output.text}", flush=True)
            num_printed += 1

    return watch


def _summary(measurement: Measurement, llm: LLM, params: SamplingParams) -> str:
    """One line: how much, how fast, how well drafted."""
    speculative = llm.engine.speculative
    parts = [
        f"{measurement.num_tokens} tokens in {measurement.seconds:.2f} s "
        f"({measurement.tokens_per_s:.1f} tokens/s)"
    ]
    if speculative is None:
        parts.append("no speculation")
    else:
        length = measurement.stats.acceptance_length
        parts.append(f"acceptance length {length:.2f} at K={speculative.num_speculative_tokens}")
    dtype = str(llm.target.dtype).removeprefix("torch.")
    return f"{'; '.join(parts)}, temperature {params.temperature:g}, {dtype}"


def _note(text: str) -> None:
    print(f"peagle: note: {text}", file=sys.stderr)
