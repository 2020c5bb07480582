"""`peagle generate`: complete prompts."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from peagle.bundled import BUNDLED_PEAGLE
from peagle.cli import options
from peagle.cli.options import OutputFormat
from peagle.cli.settings import (
    Layer,
    Setting,
    Settings,
    environment_layers,
    file_layer,
    speculative_layer,
)
from peagle.config import EngineConfig, SamplingParams, SpeculativeConfig
from peagle.errors import UserError
from peagle.evaluation.prompts import Prompt, read_prompts

if TYPE_CHECKING:
    from peagle.evaluation.compare import Measurement
    from peagle.llm import LLM, RequestOutput, StreamChunk

EXAMPLES = """
The bundled code model and its P-EAGLE head:
  peagle generate --prompt 'def fibonacci(n):'
  peagle generate --prompt 'def fibonacci(n):' --temperature 0.7 --top-p 0.9 --seed 1

Models of your own, in a folder or on the hub; every prompt of a file, one JSON object a line:
  peagle generate --target ./Qwen3-0.6B --draft ./head --prompts prompts.jsonl --format json
  peagle generate --target openai/gpt-oss-20b --draft amazon/GPT-OSS-20B-P-EAGLE --prompt 'Hello'

The same target without a head, and with prompt lookup:
  peagle generate --target ./Qwen3-0.6B --prompt 'Once upon a time'
  peagle generate --target ./Qwen3-0.6B --method ngram -k 4 --prompt 'Once upon a time'

From a pipe; and a configuration as vLLM writes it:
  echo 'import numpy as' | peagle generate --prompts -
  peagle generate --prompt 'class Stack:' --speculative-config
      '{"method": "eagle3", "model": "./head", "num_speculative_tokens": 5}'

Settings in a file, and what they amount to together with variables and flags:
  PEAGLE_MAX_NUM_SEQS=4 peagle generate --config peagle.toml -k 3 --show-config
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
            metavar="MODEL",
            help="The target: a folder in Hugging Face format, or a hub id.",
            show_default="the bundled code model, with its P-EAGLE head",
            rich_help_panel=options.MODEL,
        ),
    ] = None,
    revision: options.Revision = None,
    draft: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="The draft head, P-EAGLE or EAGLE-3: a folder or a hub id.",
            show_default="none with a target of your own",
            rich_help_panel=options.MODEL,
        ),
    ] = None,
    draft_revision: options.DraftRevision = None,
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
        options.option_of(
            SpeculativeConfig,
            "draft_sampling",
            options.SPECULATION,
            help="argmax or probabilistic drafts, where the temperature is not 0.",
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
    max_new_tokens: options.MaxNewTokens = None,
    temperature: Annotated[
        float | None,
        options.option_of(SamplingParams, "temperature", options.SAMPLING, help="0 is greedy."),
    ] = None,
    top_k: Annotated[
        int | None,
        options.option_of(SamplingParams, "top_k", options.SAMPLING, help="0 keeps every token."),
    ] = None,
    top_p: Annotated[
        float | None,
        options.option_of(SamplingParams, "top_p", options.SAMPLING, help="1 keeps every token."),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Of every prompt: alone or batched, the same seed gives the same output.",
            show_default="one for each prompt, the same in every run",
            rich_help_panel=options.SAMPLING,
        ),
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(
            help="Text that ends the output and is left out of it; may be given several times.",
            rich_help_panel=options.SAMPLING,
        ),
    ] = None,
    dtype: options.DType = None,
    device: options.Device = None,
    max_num_seqs: Annotated[
        int | None,
        options.option_of(
            EngineConfig, "max_num_seqs", options.ENGINE, help="Most prompts decoded together."
        ),
    ] = None,
    threads: options.Threads = None,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="TOML file: format_version, target, revision, and the tables engine, speculative "
            "and sampling. Variables (PEAGLE_DTYPE, PEAGLE_SPECULATIVE_CONFIG, ...) go over it, "
            "flags over both.",
            rich_help_panel=options.SETTINGS,
        ),
    ] = None,
    show_config: Annotated[
        bool,
        typer.Option(
            "--show-config",
            help="Print every setting with its source as JSON, and do nothing else.",
            rich_help_panel=options.SETTINGS,
        ),
    ] = False,
) -> None:
    """Complete prompts of your own.

    Completions go to standard output, a line of statistics to standard error.
    Drafts make decoding faster; the output is that of the target alone.
    """
    questions = [] if show_config else _prompts(prompt, prompts)
    shorthands = {
        "speculative.model": draft,
        "speculative.revision": draft_revision,
        "speculative.method": method,
        "speculative.num_speculative_tokens": num_speculative_tokens,
        "speculative.draft_sampling": draft_sampling,
    }
    flags = {
        "target": target,
        "revision": revision,
        "engine.dtype": dtype,
        "engine.device": device,
        "engine.max_num_seqs": max_num_seqs,
        "sampling.max_tokens": max_new_tokens,
        "sampling.temperature": temperature,
        "sampling.top_k": top_k,
        "sampling.top_p": top_p,
        "sampling.seed": seed,
        "sampling.stop": stop or None,
    }
    settings = Settings(
        *([] if config is None else [file_layer(config)]),
        *environment_layers(os.environ),
        _flags(flags),
        _speculative_flags(shorthands, speculative_config, no_speculation),
    )
    params, engine = settings.build("sampling"), settings.build("engine")
    speculative = None if no_speculation else _speculation(settings)
    name = options.target_or_bundled(settings.value("target"))
    if show_config:
        off = "--no-speculation" if no_speculation else "default"
        print(json.dumps(settings.shown(name, speculative, off), indent=2))
        return
    if speculative is None and not no_speculation:
        _note("no --draft: decoding plainly (--method ngram needs no head)")
    options.set_threads(threads)
    options.quiet_libraries()
    from peagle.evaluation.compare import measure
    from peagle.llm import LLM

    llm = LLM(
        name,
        revision=settings.value("revision"),
        speculative_config=speculative,
        **asdict(engine),
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


_FLAGS = {
    "speculative.model": "--draft",
    "speculative.revision": "--draft-revision",
    "sampling.max_tokens": "--max-new-tokens",
}


def _flags(values: dict[str, Any]) -> Layer:
    """Those of the options that were given; a model takes its revision along."""
    given = {key: value for key, value in values.items() if value is not None}
    names = {key: "--" + key.rpartition(".")[2].replace("_", "-") for key in given} | _FLAGS
    settings = {key: Setting(value, names[key]) for key, value in given.items()}
    return Layer(settings, ("revision",) if "target" in given else ())


def _speculative_flags(shorthands: dict[str, Any], config: str | None, off: bool) -> Layer:
    """--speculative-config, --no-speculation, or options for single keys: one of the three."""
    layer = _flags(shorthands)
    names = [setting.source for setting in layer.settings.values()]
    if off and config is not None:
        names.append("--speculative-config")
    if names and (off or config is not None):
        other = "--no-speculation" if off else "--speculative-config"
        raise UserError(f"{other} and {names[0]} contradict each other; leave one of them out.")
    if config is not None:
        return speculative_layer(config, "--speculative-config")
    # Another source of drafts: what a lower layer says of its own does not apply.
    if shorthands["speculative.model"] is not None or shorthands["speculative.method"] == "ngram":
        keys = ("method", "model", "revision", "parallel_drafting")
        return Layer(layer.settings, tuple(f"speculative.{key}" for key in keys))
    return layer


def _speculation(settings: Settings) -> SpeculativeConfig | None:
    """The speculative configuration that the settings amount to; None decodes plainly."""
    given = settings.section("speculative")
    if given.get("method") != "ngram" and "model" not in given:
        if (target := settings.value("target")) is not None:
            if not given:
                return None
            source = settings.source(f"speculative.{next(iter(given))}")
            raise UserError(
                f"{source} was given, but no draft head for {target!r}. Name one with --draft, or "
                "look drafts up in the text with --method ngram."
            )
        head = Setting(options.bundled(BUNDLED_PEAGLE), "default")
        settings.put(Layer({"speculative.model": head}))
    return settings.build("speculative")


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
