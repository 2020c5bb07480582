"""`peagle data prepare`: conversations and responses to tokenised training data."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from peagle.cli.options import (
    ChatTemplate,
    Format,
    OutputFormat,
    Split,
    check_paths,
    quiet_libraries,
)
from peagle.cli.setup import note
from peagle.config import require_writable_file
from peagle.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from peagle.data.prepare import PrepareSummary

EXAMPLES = """
Responses of the target, as `peagle data regenerate` wrote them:
  peagle data prepare responses.jsonl --target ./Qwen3-0.6B --output train.safetensors

Conversations as text, answered with thinking turned off; one in fifty for validation, in
train.validation.safetensors:
  peagle data prepare chats.jsonl more.parquet --target ./Qwen3-0.6B --no-thinking \\
      --output train.safetensors --validation-share 0.02

A split of a dataset that Hugging Face datasets saved:
  peagle data prepare ./saved --split train_sft --target ./Qwen3-0.6B --no-thinking \\
      --output train.safetensors

Prompts and responses as plain text, for a base model; drop what is too long:
  peagle data prepare pairs.jsonl --target ./base --raw --max-length 2048 --long drop \\
      --output train.jsonl
"""
_SHARE = 0.02


def prepare(
    sources: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help=".jsonl, .parquet, a folder of .parquet files or one that Hugging Face datasets "
            'wrote (save_to_disk), with {"messages"}, {"prompt", "response"}, token ids '
            '({"prompt_token_ids", "response_token_ids"} or {"input_ids", "loss_mask"}); or '
            ".safetensors written by this command.",
        ),
    ],
    target: Annotated[
        str, typer.Option(help="Target whose tokenizer reads the data: a folder or a hub id.")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Training data: .safetensors or .jsonl.")
    ],
    split: Split = None,
    validation: Annotated[
        Path | None,
        typer.Option(
            help="Second output, for validation.",
            show_default="NAME.validation.SUFFIX beside the output, if there is a share",
        ),
    ] = None,
    validation_share: Annotated[
        float | None,
        typer.Option(
            help="Share of the conversations for validation, chosen by hash, at least one.",
            show_default=f"{_SHARE} with --validation, else 0",
        ),
    ] = None,
    max_length: Annotated[int, typer.Option(help="Largest number of tokens of a sample.")] = 8192,
    long: Annotated[
        Literal["truncate", "drop"], typer.Option(help="Cut longer samples, or leave them out.")
    ] = "truncate",
    thinking: Annotated[
        bool | None,
        typer.Option(
            "--thinking/--no-thinking",
            help="Thinking mode in which the head will serve; needed if the chat template has one.",
            show_default=False,
        ),
    ] = None,
    chat_template: ChatTemplate = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Render prompt and response with the chat template, or take them as they stand.",
            show_default="chat if the tokenizer has a template",
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace existing outputs.")
    ] = False,
    output_format: Format = OutputFormat.TEXT,
) -> None:
    """Tokenise conversations and responses for training.

    Only the target's own tokens are supervised: answers with their end-of-turn token, each behind
    the prompt that serving would have made. The command counts what it leaves out, by reason.
    """
    share = validation_share
    if share is None:
        share = 0.0 if validation is None else _SHARE
    if validation is not None and not share:
        raise UserError(
            "--validation-share is 0, and --validation would be empty. Give a share above 0, or "
            "leave --validation out."
        )
    if validation is None and share:
        validation = output.with_suffix(f".validation{output.suffix}")
    _check_outputs(sources, output, validation, overwrite)
    from peagle.data.tables import parts_of, sha256_of_table, split_of

    sources = [split_of(path, split) for path in sources]
    for source in sources:
        parts_of(source)  # refuses what is not there before torch is imported
    check_paths(target, chat_template=chat_template)
    quiet_libraries()
    from peagle.data import prepare as library
    from peagle.data.readers import tokenizer_sha256
    from peagle.data.samples import SampleMaker, stop_ids_of, vocab_size_of

    folder, tokenizer = load_tokenizer_of(target)
    vocab_size = vocab_size_of(folder, tokenizer)
    limits = library.Limits(vocab_size, max_length, long == "truncate", share)
    maker = SampleMaker(
        tokenizer,
        stop_ids_of(folder, tokenizer),
        chat=chat,
        chat_template=chat_template,
        thinking=thinking,
    )
    fingerprint = tokenizer_sha256(folder, tokenizer)
    train, held_out, report = library.prepare(
        sources, maker, limits, fingerprint, needs_thinking=maker.lacks_thinking
    )
    facts = {
        "kind": "prepare",
        "target": target,
        "tokenizer_sha256": fingerprint,
        "vocab_size": vocab_size,
        "max_length": max_length,
        "thinking": thinking,
        "chat_template": chat_template,
        "sources": [{"path": str(path), "sha256": sha256_of_table(path)} for path in sources],
        "command": " ".join(sys.argv[1:]),
    }
    for path, collected in ((output, train), (validation, held_out)):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            collected.write(path, facts)
    _show(report, output, validation, limits.max_length, output_format)


def load_tokenizer_of(target: str) -> tuple[Path, PreTrainedTokenizerBase]:
    """A model's folder and its tokenizer; a folder here needs no weights.

    Raises:
        UserError: there is no such model, or no tokenizer in it.
    """
    from peagle.bundled import expand_bundled
    from peagle.models.loading import resolve_model
    from peagle.models.target import load_tokenizer

    folder = Path(expand_bundled(target, "target")).expanduser()
    if not folder.is_dir():
        folder = resolve_model(target)
    return folder, load_tokenizer(folder)


def _check_outputs(
    sources: list[Path], output: Path, validation: Path | None, overwrite: bool
) -> None:
    outputs = [path for path in (output, validation) if path is not None]
    for path in outputs:
        require_writable_file(path, "The output")
        if path.suffix not in (".safetensors", ".jsonl"):
            raise UserError(f"The output {str(path)!r} must end in .safetensors or .jsonl.")
        if path.resolve() in [source.resolve() for source in sources]:
            raise UserError(f"{str(path)!r} is read and would be written; choose another output.")
        if path.exists() and not overwrite:
            raise UserError(
                f"{str(path)!r} is there already; choose another output, or add --overwrite."
            )
    if len({path.resolve() for path in outputs}) < len(outputs):
        raise UserError(f"--output and --validation are both {str(output)!r}; expected two files.")


def _show(
    report: PrepareSummary,
    output: Path,
    validation: Path | None,
    max_length: int,
    form: OutputFormat,
) -> None:
    for source in report.unknown_tokenizer:
        note(f"{source} does not say which tokenizer made its token ids")
    if form is OutputFormat.JSON:
        second = None if validation is None else str(validation)
        facts = asdict(report) | {"dropped": dict(report.dropped)}
        print(json.dumps(facts | {"output": str(output), "validation": second}))
        return
    share = report.supervised / report.tokens
    print(
        f"{output}: {report.samples} samples of {report.records} records, {report.tokens} tokens, "
        f"{share:.1%} supervised"
    )
    if validation is not None:
        print(f"{validation}: {report.validation_samples} samples")
    if report.truncated:
        print(f"truncated at {max_length} tokens: {report.truncated}")
    if report.duplicates:
        print(f"left out, equal to another: {report.duplicates}")
    for reason, count in report.dropped.most_common():
        print(f"dropped, {reason}: {count} (first: {report.details[reason]})")
