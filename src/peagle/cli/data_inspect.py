"""`peagle data inspect`: statistics and samples of a file of training data."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from peagle.cli.options import (
    ChatTemplate,
    Format,
    OutputFormat,
    Split,
    check_paths,
    quiet_libraries,
)
from peagle.cli.terminal import bright, dim, has_styles, printable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from peagle.data.inspect import Inspection
    from peagle.data.samples import Sample

EXAMPLES = """
Counts, lengths, what is supervised, and three samples as text:
  peagle data inspect train.safetensors --target ./Qwen3-0.6B

Numbers alone, for a program:
  peagle data inspect train.safetensors --samples 0 --format json

What prepare would make of conversations:
  peagle data inspect chats.jsonl --target ./Qwen3-0.6B --no-thinking
"""
_SHOWN_CHARACTERS = 600  # of each part of a sample


def inspect(
    file: Annotated[
        Path,
        typer.Argument(
            help="Data of train or prepare: .safetensors, .jsonl, .parquet, a folder of .parquet "
            "files or one that Hugging Face datasets wrote (save_to_disk)."
        ),
    ],
    target: Annotated[
        str | None,
        typer.Option(
            help="Target whose tokenizer reads text and shows the samples as text.",
            show_default="none: samples as token ids",
        ),
    ] = None,
    split: Split = None,
    samples: Annotated[int, typer.Option(min=0, help="Number of samples to show.")] = 3,
    thinking: Annotated[
        bool | None,
        typer.Option(
            "--thinking/--no-thinking",
            help="Mode of the chat template, for conversations.",
            show_default=False,
        ),
    ] = None,
    chat_template: ChatTemplate = None,
    output_format: Format = OutputFormat.TEXT,
) -> None:
    """Show statistics and samples of a file of training data.

    The supervised part of a sample stands out: in colour on a terminal, else in [[ ]].
    """
    from peagle.data.tables import parts_of, split_of

    file = split_of(file, split)
    parts_of(file)  # refuses what is not there before torch is imported
    check_paths(target, chat_template=chat_template)
    quiet_libraries()
    from peagle.cli.data_prepare import load_tokenizer_of
    from peagle.data.inspect import inspect_data
    from peagle.data.readers import tokenizer_sha256
    from peagle.data.samples import SampleMaker, stop_ids_of

    tokenizer, stop_ids, fingerprint = None, (), None
    if target is not None:
        folder, tokenizer = load_tokenizer_of(target)
        stop_ids = stop_ids_of(folder, tokenizer)
        fingerprint = tokenizer_sha256(folder, tokenizer)
    # Train reads prompt and response as plain text.
    maker = SampleMaker(
        tokenizer, stop_ids, chat=False, chat_template=chat_template, thinking=thinking
    )
    found = inspect_data(file, maker, num_shown=samples, fingerprint=fingerprint)
    if output_format is OutputFormat.JSON:
        shown = []
        for sample in found.shown:
            parts: dict[str, Any] = {
                "prompt_token_ids": sample.prompt,
                "response_token_ids": sample.response,
            }
            if tokenizer is not None:
                parts["prompt"] = _decode(tokenizer, sample.prompt)
                parts["response"] = _decode(tokenizer, sample.response)
            shown.append(parts)
        facts = asdict(found) | {"file": str(file), "shown": shown}
        print(json.dumps(facts | {"supervised_share": found.supervised_share}))
    else:
        _show(file, found, tokenizer)


def _show(file: Path, found: Inspection, tokenizer: PreTrainedTokenizerBase | None) -> None:
    print(
        f"{file}: {found.samples} samples, {found.tokens} tokens, {found.supervised} supervised "
        f"({found.supervised_share:.1%})"
    )
    print(f"{'tokens':<12}{'P50':>9}{'P90':>9}{'P99':>9}{'longest':>9}")
    for name in ("length", "prompt_length", "response_length"):
        lens = getattr(found, name)
        numbers = "".join(f"{n:>9}" for n in (lens.p50, lens.p90, lens.p99, lens.longest))
        print(f"{name.removesuffix('_length'):<12}{numbers}")
    print(f"duplicates: {found.duplicates}")
    if found.too_short:
        print(f"too short to train on: {found.too_short}")
    for reason, count in found.dropped.items():
        print(f"no sample, {reason}: {count}")
    shares = ", ".join(f"{k}: {share:.2%}" for k, share in found.coverage.items())
    print(f"supervised tokens: {found.distinct} different, largest id {found.largest_id}")
    print(f"covered by the most frequent: {shares or 'nothing is supervised'}")
    for number, sample in enumerate(found.shown, start=1):
        print(f"--- sample {number}: {len(sample.prompt)} + {len(sample.response)} tokens")
        print(_shown(sample, tokenizer))


def _shown(sample: Sample, tokenizer: PreTrainedTokenizerBase | None) -> str:
    """The end of the prompt and the beginning of the response, which stands out."""
    parts = []
    for ids in (sample.prompt, sample.response):
        text = " ".join(map(str, ids)) if tokenizer is None else _decode(tokenizer, ids)
        parts.append(printable(text))
    prompt, response = parts
    if len(prompt) > _SHOWN_CHARACTERS:
        prompt = "..." + prompt[-_SHOWN_CHARACTERS:]
    if len(response) > _SHOWN_CHARACTERS:
        response = response[:_SHOWN_CHARACTERS] + "..."
    if has_styles(sys.stdout):
        return dim(prompt, sys.stdout) + bright(response, sys.stdout)
    return f"{prompt}[[{response}]]"


def _decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    text: Any = tokenizer.decode(ids, skip_special_tokens=False)
    return text
