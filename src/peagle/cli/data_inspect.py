"""`peagle data inspect`: statistics and samples of training data."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from peagle.cli.data_prepare import load_tokenizer_of
from peagle.cli.groups import ChatTemplate, Format, OutputFormat, Split
from peagle.cli.setup import check_paths, quiet_libraries
from peagle.cli.terminal import bright, dim, has_styles, printable
from peagle.data.readers import split_of, table_files, tokenizer_sha256

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from peagle.data.inspect import Inspection
    from peagle.data.samples import Sample

INSPECT_EXAMPLES = """
Counts, lengths, what is supervised, and three samples as text:
  peagle data inspect train.safetensors --target ./Qwen3-0.6B

Numbers alone, for a program:
  peagle data inspect train.safetensors --samples 0 --format json

What prepare would make of conversations:
  peagle data inspect chats.jsonl --target ./Qwen3-0.6B --no-thinking
"""
_SHOWN_CHARACTERS = 600  # shown characters of each part of a sample


def inspect(
    file: Path = typer.Argument(
        ...,
        help="Data of train or prepare: .safetensors, .jsonl, .parquet, a folder of .parquet "
        "files or one that Hugging Face datasets wrote (save_to_disk).",
    ),
    target: str | None = typer.Option(
        None,
        help="Target whose tokenizer reads text and shows the samples as text.",
        show_default="none: samples as token ids",
    ),
    split: Split = None,
    samples: int = typer.Option(3, min=0, help="Number of samples to show."),
    thinking: bool | None = typer.Option(
        None,
        "--thinking/--no-thinking",
        help="Mode of the chat template, for conversations.",
        show_default=False,
    ),
    chat_template: ChatTemplate = None,
    output_format: Format = OutputFormat.TEXT,
) -> None:
    """Show statistics and samples of a file of training data.

    The supervised part of a sample stands out: in colour on a terminal, else in [[ ]].
    """
    file = split_of(file, split)
    table_files(file)  # refuses a missing file before torch is imported
    check_paths(target, chat_template=chat_template)
    quiet_libraries()
    from peagle.data.inspect import inspect_data
    from peagle.data.samples import SampleMaker
    from peagle.models.end_tokens import eos_token_ids

    tokenizer, stop_ids, fingerprint = None, (), None
    if target is not None:
        folder, tokenizer = load_tokenizer_of(target)
        stop_ids = eos_token_ids(folder, tokenizer)
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
                "prompt_token_ids": sample.ids[: sample.begin],
                "response_token_ids": sample.ids[sample.begin :],
                "answers": sample.answers,
            }
            if tokenizer is not None:
                parts["prompt"] = _decode(tokenizer, parts["prompt_token_ids"])
                parts["response"] = _decode(tokenizer, parts["response_token_ids"])
            shown.append(parts)
        facts = asdict(found) | {"file": str(file), "shown": shown}
        print(json.dumps(facts | {"supervised_share": found.supervised_share}))
    else:
        _print_inspection(file, found, tokenizer)


def _print_inspection(
    file: Path, found: Inspection, tokenizer: PreTrainedTokenizerBase | None
) -> None:
    print(
        f"{file}: {found.samples} samples, {found.answers} answers, {found.tokens} tokens, "
        f"{found.supervised} supervised ({found.supervised_share:.1%})"
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
        print(f"no sample, {reason}: {count} (first: {found.details[reason]})")
    shares = ", ".join(f"{k}: {share:.2%}" for k, share in found.coverage.items())
    print(f"supervised tokens: {found.distinct} different, largest id {found.largest_id}")
    print(f"covered by the most frequent: {shares or 'nothing is supervised'}")
    for number, sample in enumerate(found.shown, start=1):
        begin, num_answers = sample.begin, len(sample.answers)
        several = f" with {num_answers} answers" if num_answers > 1 else ""
        print(f"--- sample {number}: {begin} + {len(sample.ids) - begin} tokens{several}")
        print(_sample_text(sample, tokenizer))


def _sample_text(sample: Sample, tokenizer: PreTrainedTokenizerBase | None) -> str:
    """Return the end of the first prompt and the rest of the sample, with the answers marked."""
    borders = [0, *(place for answer in sample.answers for place in answer)]
    parts = [sample.ids[begin:end] for begin, end in pairwise(borders)]
    texts = [
        printable(" ".join(map(str, part)) if tokenizer is None else _decode(tokenizer, part))
        for part in parts
    ]
    if len(texts[0]) > _SHOWN_CHARACTERS:
        texts[0] = "..." + texts[0][-_SHOWN_CHARACTERS:]
    room = _SHOWN_CHARACTERS
    for index, text in enumerate(texts[1:], start=1):
        if len(text) > room:
            texts[index:] = [text[:room] + "..."]
            break
        room -= len(text)

    def marked(text: str, is_answer: bool) -> str:
        if has_styles(sys.stdout):
            return (bright if is_answer else dim)(text, sys.stdout)
        return f"[[{text}]]" if is_answer else text

    return "".join(marked(text, index % 2 == 1) for index, text in enumerate(texts))


def _decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    text: Any = tokenizer.decode(ids, skip_special_tokens=False)
    return text
