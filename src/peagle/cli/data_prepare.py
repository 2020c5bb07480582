"""`peagle data prepare`: conversations and responses as tokens to train on."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from peagle.bundled import expand_bundled
from peagle.cli.flags import spread
from peagle.cli.groups import ChatTemplate, Format, OutputFormat, Split
from peagle.cli.setup import check_paths, note, quiet_libraries
from peagle.config import require_writable_file
from peagle.data.limits import Limits, check_limits
from peagle.data.readers import (
    DropCounts,
    read_records,
    sha256_of_table,
    split_of,
    table_files,
    tokenizer_sha256,
)
from peagle.data.recorded import is_recording, read_cipher
from peagle.errors import CheckpointError, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from peagle.data.prepare import PrepareSummary

PREPARE_EXAMPLES = """
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


@dataclass(frozen=True, slots=True)
class PrepareOptions:
    """The options of `peagle data prepare`, as typed."""

    sources: list[Path] = typer.Argument(
        ...,
        metavar="FILE...",
        help=".jsonl, .parquet, a folder of .parquet files, one that Hugging Face datasets wrote "
        "(save_to_disk), one that serve --record wrote or one (or a file) of SageMaker's data "
        'capture, with {"messages"}, {"prompt", '
        '"response"}, token ids ({"prompt_token_ids", "response_token_ids"} or {"input_ids", '
        '"loss_mask"}); or '
        ".safetensors written by this command.",
    )
    target: str = typer.Option(
        ..., help="Target whose tokenizer reads the data: a folder, a GGUF file or a hub id."
    )
    output: Path = typer.Option(
        ..., "--output", "-o", help="Training data: .safetensors or .jsonl."
    )
    split: Split = None
    validation: Path | None = typer.Option(
        None,
        help="Second output, for validation.",
        show_default="NAME.validation.SUFFIX beside the output, if there is a share",
    )
    validation_share: float | None = typer.Option(
        None,
        help="Share of the conversations for validation, chosen by hash, at least one.",
        show_default=f"{_SHARE} with --validation, else 0",
    )
    max_length: int = typer.Option(8192, help="Largest number of tokens of a sample.")
    long: Literal["truncate", "drop"] = typer.Option(
        "truncate", help="Cut longer samples, or leave them out."
    )
    thinking: bool | None = typer.Option(
        None,
        "--thinking/--no-thinking",
        help="Thinking mode in which the head will serve; needed if the chat template has one.",
        show_default=False,
    )
    chat_template: ChatTemplate = None
    record_key_file: Path | None = typer.Option(
        None,
        metavar="FILE",
        help="Key file of the server that encrypted the records of FILE.",
        show_default=False,
    )
    chat: bool | None = typer.Option(
        None,
        "--chat/--raw",
        help="Render prompt and response with the chat template, or take them as they stand.",
        show_default="chat if the tokenizer has a template",
    )
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace existing outputs.")
    output_format: Format = OutputFormat.TEXT


@spread
def prepare(options: PrepareOptions) -> None:
    """Tokenise conversations and responses for training.

    Only the target's own tokens are supervised: answers with their end-of-turn token, each behind
    the prompt that serving would have made. The answers of a conversation share a sample where the
    chat template renders earlier turns alike. The command counts what it leaves out, by reason.
    """
    plan = _plan_preparation(options)
    report = _prepare(options, plan)
    _print_preparation(report, options, plan.validation)


@dataclass(frozen=True, slots=True)
class PreparePlan:
    """The tables to read, the validation output with its share, and the cipher of records."""

    sources: list[Path]
    validation: Path | None
    share: float
    cipher: Any = None


def _plan_preparation(options: PrepareOptions) -> PreparePlan:
    """Check the options, the sources and the target."""
    output, validation, share = options.output, options.validation, options.validation_share
    if share is None:
        share = 0.0 if validation is None else _SHARE
    if validation is not None and not share:
        raise UserError(
            "--validation-share is 0, and --validation would be empty. Give a share above 0, or "
            "leave --validation out."
        )
    if validation is None and share:
        validation = output.with_suffix(f".validation{output.suffix}")
    check_limits(options.max_length, share)
    sources = [split_of(path, options.split) for path in options.sources]
    for source in sources:
        table_files(source)  # refuses a missing file before torch is imported
        if source.is_file() and source.suffix not in (".safetensors", ".parquet"):
            next(read_records(source), None)  # and a file that is not JSON
    _check_outputs(options.sources, output, validation, options.overwrite)
    check_paths(options.target, chat_template=options.chat_template)
    cipher = read_cipher(options.record_key_file) if options.record_key_file else None
    return PreparePlan(sources, validation, share, cipher)


def lm_head_of(folder: Path) -> str | None:
    """Return the hash of a target's lm_head as records name it; None if it cannot be compared."""
    from peagle.models.fingerprint import identity_of
    from peagle.models.target_ends import TargetEnds

    try:
        return identity_of(TargetEnds.load(folder))["lm_head_sha256"]
    except CheckpointError:  # its ends are quantised
        return None


def _prepare(options: PrepareOptions, plan: PreparePlan) -> PrepareSummary:
    """Tokenise the sources, and write the outputs."""
    quiet_libraries()
    from peagle.data import prepare as library
    from peagle.data.samples import SampleMaker, vocab_size_of
    from peagle.models.end_tokens import eos_token_ids

    folder, tokenizer = load_tokenizer_of(options.target)
    vocab_size = vocab_size_of(folder, tokenizer)
    limits = Limits(vocab_size, options.max_length, options.long == "truncate", plan.share)
    maker = SampleMaker(
        tokenizer,
        eos_token_ids(folder, tokenizer),
        chat=options.chat,
        chat_template=options.chat_template,
        thinking=options.thinking,
    )
    fingerprint = tokenizer_sha256(folder, tokenizer)
    train, held_out, report = library.prepare(
        plan.sources,
        maker,
        limits,
        fingerprint,
        needs_thinking=maker.lacks_thinking,
        lm_head=lm_head_of(folder) if any(map(is_recording, plan.sources)) else None,
        cipher=plan.cipher,
    )
    facts = {
        "kind": "prepare",
        "target": options.target,
        "tokenizer_sha256": fingerprint,
        "vocab_size": vocab_size,
        "max_length": options.max_length,
        "thinking": options.thinking,
        "chat_template": options.chat_template,
        "origins": _origins(report),
        "sources": [{"path": str(one), "sha256": sha256_of_table(one)} for one in plan.sources],
        "command": " ".join(sys.argv[1:]),
    }
    for path, collected in ((options.output, train), (plan.validation, held_out)):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            collected.write(path, facts)
    return report


def load_tokenizer_of(target: str) -> tuple[Path, PreTrainedTokenizerBase]:
    """Return a model's folder and tokenizer; a local folder needs no weights."""
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


def _origins(report: PrepareSummary) -> list[dict[str, Any]]:
    return [origin.model_dump() for origin in report.origins]


def _print_preparation(
    report: PrepareSummary, options: PrepareOptions, validation: Path | None
) -> None:
    output = options.output
    for source in report.unknown_tokenizer:
        note(f"{source} does not say which tokenizer made its token ids")
    if options.output_format is OutputFormat.JSON:
        second = None if validation is None else str(validation)
        facts = asdict(report) | {"dropped": dict(report.dropped), "origins": _origins(report)}
        print(json.dumps(facts | {"output": str(output), "validation": second}))
        return
    share = report.supervised / report.tokens
    print(
        f"{output}: {report.samples} samples of {report.records} records, "
        f"{report.answers} answers, {report.tokens} tokens, {share:.1%} supervised"
    )
    if validation is not None:
        counts = f"{report.validation_samples} samples, {report.validation_answers} answers"
        print(f"{validation}: {counts}")
    if report.truncated:
        print(f"truncated at {options.max_length} tokens: {report.truncated}")
    if report.duplicates:
        print(f"left out, equal to another: {report.duplicates}")
    print_dropped(report)


def print_dropped(counts: DropCounts) -> None:
    """Print how many records were left out, by reason."""
    for reason, count in counts.dropped.most_common():
        print(f"dropped, {reason}: {count} (first: {counts.details[reason]})")
