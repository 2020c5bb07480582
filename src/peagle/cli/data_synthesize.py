"""`peagle data synthesize`: prompts that the target writes itself."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from peagle.cli import groups
from peagle.cli.data_answers import (
    answer_speed,
    begin_output,
    check_jsonl,
    flag_for_answers,
    given_sampling,
    load_for_batches,
    print_counts,
    template_id,
)
from peagle.cli.flags import Given, pick_flags, takes
from peagle.cli.groups import ChatTemplate, Format, OutputFormat
from peagle.cli.progress import ProgressLine
from peagle.cli.settings import Layer, Setting
from peagle.cli.setup import Setup
from peagle.config import require_writable_file
from peagle.environment import environment
from peagle.errors import UserError

if TYPE_CHECKING:
    from peagle.data.synthesize import SynthesizeProgress

SYNTHESIZE_EXAMPLES = """
Prompts for a chat model of which you have no data:
  peagle data synthesize --target ./Qwen3-0.6B --count 20000 --output prompts.jsonl

Two kinds of users by turns, and a second message in every conversation:
  peagle data synthesize --target ./Qwen3-0.6B --count 20000 --system-file coder.txt \\
      --system-file support.txt --turns 2 --temperature 0.8 --output prompts.jsonl

Then the target answers them:
  peagle data regenerate prompts.jsonl --target ./Qwen3-0.6B --output responses.jsonl
"""
_MAX_PROMPT_TOKENS = 512
_MAX_DOCUMENT_TOKENS = 64


@takes(
    *groups.MODEL,
    *groups.SPECULATION,
    *groups.SAMPLING,
    *groups.FINER_SAMPLING,
    *map(flag_for_answers, groups.ENGINE),
    *pick_flags(groups.SETTINGS, "config", "show_memory"),
)
def synthesize(
    given: Given,
    count: int = typer.Option(..., min=1, help="Number of prompts that the output shall have."),
    output: Path = typer.Option(
        ..., "--output", "-o", help="JSONL file that receives the prompts."
    ),
    system_file: list[Path] = typer.Option(
        [],
        metavar="FILE",
        help="Text of a system message; given several times, the samples take them by turns.",
        show_default="no system message",
    ),
    turns: int = typer.Option(1, min=1, max=2, help="Messages of the user in a conversation."),
    thinking: bool | None = typer.Option(
        None,
        "--thinking/--no-thinking",
        help="Thinking mode of the answers between two turns.",
        show_default="the template's",
    ),
    chat_template: ChatTemplate = None,
    output_format: Format = OutputFormat.TEXT,
) -> None:
    """Let the target write prompts itself, for heads without data of your own.

    The chat template opens a message of the user, and the target goes on at --temperature (default
    1) for at most --max-new-tokens (512). A base model without a template begins documents of
    --max-new-tokens (64) instead.

    The command drops and counts prompts that are empty, short, cut off or looping, and
    near-duplicates of earlier prompts and of the evaluation sets of the package; it keeps them in
    NAME.dropped.jsonl beside NAME.jsonl. The same command goes on with an
    output. OUTPUT.meta.json holds the provenance.
    """
    from peagle.data.synthesize import dropped_file

    check_jsonl(output)
    require_writable_file(dropped_file(output), "The file of dropped samples")
    open_ended = {"sampling.temperature": Setting(1.0, "default")}
    setup = Setup(given, Layer(open_ended))
    if setup.params.n != 1:
        raise UserError(f"n is {setup.params.n}; a sample is one prompt. Leave n out.")
    if not setup.params.temperature:
        raise UserError(
            "--temperature is 0, at which the target writes one prompt again and again; give one "
            "above 0."
        )
    systems = [_read_system(path) for path in system_file]
    setup.check_paths(chat_template)
    deciding = {
        "thinking": thinking,
        "chat_template": template_id(chat_template),
        "systems": systems,
        "turns": turns,
        "sampling": given_sampling(setup),
        "seed": setup.params.seed or 0,
    }
    known = begin_output(output, deciding)
    with ProgressLine("prompt") as progress:
        progress.begin("loading the model")
        llm, facts = load_for_batches(setup)
        from peagle.data import synthesize as library
        from peagle.evaluation.prompts import PROMPT_SETS, load_prompt_set

        is_chat = chat_template is not None or bool(getattr(llm.tokenizer, "chat_template", None))
        if setup.settings.value("sampling.max_tokens") is None:
            longest = _MAX_PROMPT_TOKENS if is_chat else _MAX_DOCUMENT_TOKENS
            setup.params = replace(setup.params, max_tokens=longest)
        writer = library.LocalWriter(
            llm,
            setup.params,
            systems=systems,
            turns=turns,
            chat_template=chat_template,
            thinking=thinking,
        )
        options = {"model": facts.pop("model"), "chat": writer.is_chat, **known}
        facts |= {"command": " ".join(sys.argv[1:]), "held_out": list(PROMPT_SETS)}
        facts |= environment(facts.pop("device", None))
        held_out = [
            turn for name in PROMPT_SETS for one in load_prompt_set(name) for turn in one.turns
        ]
        done = library.synthesize(
            writer,
            count,
            output,
            options,
            facts,
            held_out=held_out,
            watch=partial(_show_prompts, progress),
        )
    if output_format is OutputFormat.JSON:
        print_counts(done, output)
        return
    print(f"{output}: {_synthesis(done)}")
    for reason, number in done.dropped.most_common():
        print(f"dropped, {reason}: {number}")


def _read_system(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"--system-file {str(path)!r} is not readable: {reason}.") from None
    if not text:
        raise UserError(f"--system-file {str(path)!r} is empty; expected a system message.")
    return text


def _synthesis(done: SynthesizeProgress) -> str:
    parts = [f"{done.kept} prompts of {done.samples} samples"]
    parts += [f"{done.resumed} were there"] if done.resumed else []
    parts += [f"{dropped} dropped"] if (dropped := done.dropped.total()) else []
    return ", ".join(parts) + (
        f"; {done.tokens} tokens in {done.seconds:.1f} s ({answer_speed(done):.1f} tokens/s)"
    )


def _show_prompts(line: ProgressLine, done: SynthesizeProgress) -> None:
    speed = f"{answer_speed(done):,.0f} tokens/s" if done.tokens else ""
    line.update(min(done.kept, done.count), done.count, speed, line=_synthesis(done))
