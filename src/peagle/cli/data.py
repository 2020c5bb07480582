"""`peagle data synthesize | regenerate | prepare | inspect | features`: the data of training."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer
from typer.core import TyperCommand, TyperGroup

from peagle.bundled import expand_bundled
from peagle.cli import groups
from peagle.cli.flags import Flag, Given, pick_flags, spread, takes
from peagle.cli.groups import ChatTemplate, Format, OutputFormat, Split
from peagle.cli.main import CONTEXT, with_examples
from peagle.cli.progress import ProgressLine
from peagle.cli.settings import Layer, Setting, read_temperatures
from peagle.cli.setup import Setup, check_paths, note, quiet_libraries
from peagle.cli.terminal import bright, dim, has_styles, printable
from peagle.config import EngineConfig, require_writable_file, require_writable_folder
from peagle.data.limits import Limits, check_limits
from peagle.data.readers import (
    AskedConversation,
    DropCounts,
    Dropped,
    dialogue_of,
    is_folder,
    read_records,
    sha256_of_table,
    split_of,
    table_files,
    tokenizer_sha256,
)
from peagle.data.recorded import is_recording, read_cipher
from peagle.disk import size_text
from peagle.environment import environment
from peagle.errors import CheckpointError, UserError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from transformers import PreTrainedTokenizerBase

    from peagle.data.feature_writer import DiskNeed, FeatureProgress, FeatureWriter
    from peagle.data.inspect import Inspection
    from peagle.data.prepare import PrepareSummary
    from peagle.data.regenerate import Answerer, CallFinder, RegenerateProgress
    from peagle.data.samples import Sample
    from peagle.data.synthesize import SynthesizeProgress
    from peagle.llm import LLM

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


FEATURES_EXAMPLES = """
Once for all epochs, at most 500 GiB; training then loads only the target's embedding and head:
  peagle data features train.safetensors --target ./Qwen3-8B --max-length 8192 \\
      --output features --max-disk-gib 500

In about 0.6 of the space, for a head that reads other layers:
  peagle data features train.safetensors --target ./Qwen3-8B --output features \\
      --dtype fp8 --aux-layer-ids 2,12,33

Is every byte of a copied store as it was written?
  peagle data features train.safetensors --target ./Qwen3-8B --output features --verify

Interrupted? The same command again goes on after the last whole shard.
"""
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class FeaturesOptions:
    """The options of `peagle data features`, as typed."""

    file: Path = typer.Argument(
        ..., metavar="TRAIN_FILE", help="Training data: .safetensors or .jsonl."
    )
    target: str = typer.Option(..., help="The target: a folder, a GGUF file or a hub id.")
    output: Path = typer.Option(..., "--output", "-o", help="Folder of the store.")
    aux_layer_ids: str | None = typer.Option(
        None,
        metavar="IDS",
        help="Layers whose entering states make the feature, as in 2,18,33.",
        show_default="those of a new head",
    )
    dtype: Literal["bf16", "fp8", "fp32"] = typer.Option(
        "bf16", help="Type of stored features; fp8 adds a scale per position and layer."
    )
    target_dtype: Literal["auto", "float32", "float64", "bfloat16", "float16"] = typer.Option(
        "auto",
        help="Type in which the target runs.",
        show_default="bfloat16 on a GPU, else float32",
    )
    quantization: Literal["fp8", "int8", "int4"] | None = typer.Option(
        None,
        help="Type that the weights of the target's layers get when they are loaded.",
        show_default="as stored",
    )
    kv_cache_dtype: Literal["auto", "fp8"] = typer.Option(
        "auto",
        help="Type of the KV cache of the engine that is trained for; fp8 rounds keys and values.",
    )
    max_length: int | None = typer.Option(
        None,
        min=8,
        help="Cut longer sequences here; must equal data.max_length of the training run.",
        show_default="its default",
    )
    max_disk_gib: float | None = typer.Option(
        None, help="Largest size of the store.", show_default="the free space"
    )
    shard_gib: float = typer.Option(1.0, help="Size of a shard.")
    batch_tokens: int = typer.Option(16384, min=1, help="Tokens that the target runs at a time.")
    device: str = typer.Option("auto", help="Device: auto, cpu or cuda.")
    verify: bool = typer.Option(
        False, "--verify", help="Compare existing shards with their hashes."
    )
    output_format: Format = OutputFormat.TEXT


@spread
def features(options: FeaturesOptions) -> None:
    """Store the target's hidden states of training data, to train from them.

    Each sequence has the features of every position, and the final hidden states of the response,
    which the head imitates. Shards are written whole or not at all; existing shards are kept.
    """
    plan = _plan_features(options)
    shards, missing = len(plan.writer.plans), len(plan.writer.missing)
    _show_plan(options, plan)
    if options.verify:
        plan.writer.verify()
    computed, seconds = _write_features(options, plan) if missing else (0, 0.0)
    facts, need = plan.writer.facts, plan.need
    if options.output_format is OutputFormat.JSON:
        counts = {"output": str(options.output), "bytes": need.total, "num_shards": shards}
        counts |= {"computed_tokens": computed, "seconds": seconds, "verified": options.verify}
        print(json.dumps(asdict(facts) | counts))
        return
    state = "whole and as it was written" if options.verify else "whole"
    speed = f", {computed / seconds:,.0f} tokens/s" if seconds else ""
    print(
        f"{options.output}: {state}, {facts.num_sequences:,} sequences in {shards} shards, "
        f"{size_text(need.total)}; computed {computed:,} tokens in {seconds:.1f} s{speed}"
    )


@dataclass(frozen=True, slots=True)
class FeaturesPlan:
    """A store that fits the disk, and the folder of the target, which is not loaded yet."""

    folder: Path
    engine: EngineConfig
    writer: FeatureWriter
    need: DiskNeed


def _plan_features(options: FeaturesOptions) -> FeaturesPlan:
    """Check the options, read the data, and lay out the store; the target's layers stay unread."""
    if options.max_disk_gib is not None and not options.max_disk_gib >= 0:
        raise UserError(f"--max-disk-gib is {options.max_disk_gib}; expected a size of 0 or more.")
    if not options.shard_gib > 0:
        raise UserError(f"--shard-gib is {options.shard_gib}; expected a size above 0.")
    require_writable_folder(options.output, "--output")
    ids = options.aux_layer_ids
    parts = [] if ids is None else [one.strip() for one in ids.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise UserError(f"--aux-layer-ids is {ids!r}; expected layer numbers, as in 2,18,33.")
    check_paths(options.target)
    if not options.file.is_file():
        found = "is a folder; expected a file" if options.file.is_dir() else "is not there"
        raise UserError(f"The data file {str(options.file)!r} {found}.")
    quiet_libraries()
    from peagle.data.dataset import ResponseDataset
    from peagle.data.feature_writer import FeatureWriter
    from peagle.data.features import StoreFacts
    from peagle.engine.placement import resolve_device, resolve_dtype
    from peagle.models.loading import resolve_model
    from peagle.models.target import check_aux_layer_ids, default_aux_layer_ids, load_tokenizer
    from peagle.models.target_ends import TargetEnds
    from peagle.models.target_facts import precision_text
    from peagle.training.config import DataSection

    where, kv_dtype = resolve_device(options.device), options.kv_cache_dtype
    engine = EngineConfig(
        options.target_dtype, options.quantization, options.device, kv_cache_dtype=kv_dtype
    )
    folder = resolve_model(options.target)
    # The target without its layers gives sizes and identity: refusals come before the long part.
    ends = TargetEnds.load(folder)
    chosen = tuple(map(int, parts)) or default_aux_layer_ids(ends.num_layers)
    check_aux_layer_ids(chosen, ends.num_layers)
    longest: int = options.max_length or DataSection.model_fields["max_length"].default
    tokenizer = load_tokenizer(folder)
    dataset = ResponseDataset.load(options.file, tokenizer, ends.vocab_size, longest)
    name = str(resolve_dtype(options.target_dtype, where)).removeprefix("torch.")
    name = precision_text(name, options.quantization, kv_dtype)
    shard_bytes, most = round(options.shard_gib * _GIB), options.max_disk_gib
    facts = StoreFacts.of(dataset, ends, chosen, options.dtype, name, shard_bytes)
    writer = FeatureWriter(options.output, dataset, facts)
    need = writer.check_disk(None if most is None else round(most * _GIB))
    return FeaturesPlan(folder, engine, writer, need)


def _show_plan(options: FeaturesOptions, plan: FeaturesPlan) -> None:
    """Print to standard error the size of the store and the number of existing shards."""
    facts, need = plan.writer.facts, plan.need
    shards, missing = len(plan.writer.plans), len(plan.writer.missing)
    text = (
        f"{facts.num_sequences:,} sequences, {facts.num_tokens:,} tokens: "
        f"{size_text(need.total)} ({need.total:,} bytes) in {shards} shards, "
        f"layers {','.join(map(str, facts.aux_layer_ids))} in {options.dtype}; "
        f"{size_text(need.free)} are free"
    )
    if missing < shards:
        text += f"; {shards - missing} shards are there, {size_text(need.missing)} to write"
    print(f"peagle: {text}", file=sys.stderr)


def _write_features(options: FeaturesOptions, plan: FeaturesPlan) -> tuple[int, float]:
    """Run the target for the missing shards; return the computed tokens and the seconds."""
    from peagle.engine.placement import load_target

    model, writer = load_target(plan.folder, plan.engine), plan.writer
    with ProgressLine("token") as line:
        try:
            done = writer.write(model, options.batch_tokens, partial(_show_features, line))
        except KeyboardInterrupt:
            shards = len(writer.plans)
            whole = shards - len(writer.missing)
            line.print(f"{whole} of {shards} shards are whole; the same command goes on after them")
            raise
    return done.tokens, done.seconds


def _show_features(line: ProgressLine, progress: FeatureProgress) -> None:
    speed = f"{progress.tokens / progress.seconds:,.0f} tokens/s"
    text = (
        f"{progress.shards} of {progress.num_shards} shards, "
        f"{progress.tokens:,} of {progress.num_tokens:,} tokens, {speed}"
    )
    line.update(progress.tokens, progress.num_tokens, speed, line=text)


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
    _print_dropped(report)


def _print_dropped(counts: DropCounts) -> None:
    for reason, count in counts.dropped.most_common():
        print(f"dropped, {reason}: {count} (first: {counts.details[reason]})")


REGENERATE_EXAMPLES = """
By the target in this process, with a head that makes it faster:
  peagle data regenerate prompts.jsonl --target ./Qwen3-0.6B --output responses.jsonl
  peagle data regenerate prompts.parquet --target ./Qwen3-0.6B --draft ./head --temperature 0.7 \\
      --no-thinking --max-new-tokens 4096 --output responses.jsonl

Half of the prompts are answered greedily, half are sampled:
  peagle data regenerate prompts.jsonl --target ./Qwen3-0.6B --temperature 0,0.7 \\
      --output responses.jsonl

By any server with OpenAI's interface; the variable PEAGLE_API_KEY holds its key:
  peagle data regenerate prompts.jsonl --endpoint http://127.0.0.1:8000 --concurrency 64 \\
      --output responses.jsonl

Interrupted? The same command again goes on where it was.
"""
_MAX_TOKENS = 2048
_RAW_HAS_NO_TEMPLATE = "--raw uses no chat template; leave --chat-template and --thinking out."
_BATCH_ON_GPU = 256  # sequences decoded together; a GPU decodes them at little more than one's cost


def _for_answers(flag: Flag) -> Flag:
    """Return a flag with the default or the values of this command."""
    if flag.key == "sampling.temperature":
        help = "Temperature of sampling, 0 is greedy; of several each question gets one."
        return replace(flag, kind=str, metavar="T,...", help=help, read=read_temperatures)
    if flag.key == "engine.max_num_seqs":
        return replace(flag, default=f"{_BATCH_ON_GPU} on a GPU, else {flag.shown_default}")
    return flag


@dataclass(frozen=True, slots=True)
class RegenerateOptions:
    """The options of `peagle data regenerate`, as typed."""

    prompts: Path = typer.Argument(
        ...,
        metavar="FILE",
        help=".jsonl, .parquet, a folder of .parquet files or one that Hugging Face datasets "
        'wrote (save_to_disk), with {"id", "turns"}, {"id", "messages"} (answers in them are '
        "left out, but for those that results of tools follow; tools are asked with) or "
        '{"id", "prompt"}; or plain text, a prompt a line.',
    )
    output: Path = typer.Option(..., "--output", "-o", help="JSONL file that receives the answers.")
    split: Split = None
    endpoint: str | None = typer.Option(
        None,
        metavar="URL",
        help="Ask a server with OpenAI's interface; --target is then the model's name there.",
        show_default="the target in this process",
    )
    concurrency: int = typer.Option(16, help="Number of questions in flight at the endpoint.")
    retries: int = typer.Option(6, help="Number of further tries if the endpoint fails or is busy.")
    timeout: float = typer.Option(600.0, help="Longest time of one try in seconds.")
    thinking: bool | None = typer.Option(
        None,
        "--thinking/--no-thinking",
        help="Thinking mode of the chat template.",
        show_default="the template's",
    )
    chat_template: ChatTemplate = None
    chat: bool | None = typer.Option(
        None,
        "--chat/--raw",
        help="Answer in a conversation, or complete the first turn as it stands.",
        show_default="chat if there is a template",
    )
    limit: int | None = typer.Option(None, min=1, help="Largest number of prompts, from the first.")
    output_format: Format = OutputFormat.TEXT


@takes(
    *groups.MODEL,
    *groups.SPECULATION,
    *map(_for_answers, (*groups.SAMPLING, *groups.FINER_SAMPLING, *groups.ENGINE)),
    *pick_flags(groups.SETTINGS, "config", "show_memory"),
)
@spread
def regenerate(given: Given, options: RegenerateOptions) -> None:
    """Let the target answer prompts: its heads are trained on the answers.

    The command writes each answer at once, and skips questions that the output already answers. It
    asks equal prompts once. The seed of a question depends only on --seed and the conversation.
    OUTPUT.meta.json beside the output holds the provenance. The command counts left-out prompts by
    reason.
    """
    done = _regenerate(options, _plan_answers(given, options))
    if options.output_format is OutputFormat.JSON:
        _print_counts(done, options.output)
    else:
        print(f"{options.output}: {_summary(done)}")
        _print_dropped(done)
    if done.failures:
        name, reason = next(iter(done.failures.items()))
        raise UserError(
            f"{len(done.failures)} of {done.prompts} prompts have no whole answer; the "
            f"first, {name!r}: {reason} The same command asks for them again."
        )


@dataclass(frozen=True, slots=True)
class AnswersPlan:
    """The prompts to answer and the settings of the answers.

    Attributes:
        prompts: the table of the prompts.
        found: the dialogues to ask, and records that are left out.
        temperatures: several temperatures, of which each question gets one, else (None,).
        known: the settings that decide the answers, as JSON, without the model.
    """

    setup: Setup
    prompts: Path
    found: list[AskedConversation | Dropped]
    temperatures: tuple[float | None, ...]
    known: dict[str, Any]


def _plan_answers(given: Given, options: RegenerateOptions) -> AnswersPlan:
    """Check the options and the output, and read the prompts."""
    chat_template, thinking = options.chat_template, options.thinking
    _check_jsonl(options.output)
    temperatures: tuple[float, ...] = given.value("sampling.temperature", ())
    if temperatures:
        source = given["sampling.temperature"].source
        given["sampling.temperature"] = Setting(temperatures[0], source)
    setup = Setup(given, Layer({"sampling.max_tokens": Setting(_MAX_TOKENS, "default")}))
    if setup.params.n != 1:
        raise UserError(f"n is {setup.params.n}; a prompt has one response. Leave n out.")
    if options.endpoint is None:
        setup.check_paths(chat_template)
        if options.chat is False and (chat_template is not None or thinking):
            raise UserError(_RAW_HAS_NO_TEMPLATE)
    else:
        _check_remote(given, chat_template)
    prompts = split_of(options.prompts, options.split)
    found = list(_first_dialogues(prompts, options.limit))
    are_several = len(temperatures) > 1
    at = {"temperature": temperatures} if are_several else {}
    deciding = {
        "thinking": thinking,
        "chat_template": _template_id(chat_template),
        "sampling": _sampling(setup) | at,
        "seed": setup.params.seed or 0,
    }
    known = _begun(options.output, deciding)
    return AnswersPlan(setup, prompts, found, temperatures if are_several else (None,), known)


def _check_jsonl(output: Path) -> None:
    if output.suffix != ".jsonl":
        raise UserError(f"--output is {str(output)!r}; expected a name that ends in .jsonl.")
    require_writable_file(output, "--output")


def _begun(output: Path, deciding: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of an output as JSON; refuse an output that was begun with others."""
    from peagle.data.regenerate import check_begun

    known = json.loads(json.dumps(deciding, default=str))  # a setting may be no JSON
    check_begun(output, known)
    return known


def _regenerate(options: RegenerateOptions, plan: AnswersPlan) -> RegenerateProgress:
    """Ask the questions that the output does not answer yet, of the target here or of a server."""
    with ProgressLine("answer") as progress:
        if options.endpoint is None:
            progress.begin("loading the model")
            answerer, facts = _local(plan.setup, options)
        else:
            answerer, facts = _remote(plan.setup, options, options.endpoint)
        if not answerer.is_chat:
            dialogues = [one for one in plan.found if isinstance(one, AskedConversation)]
            further = sum(bool(d.turns[1:] or d.system or d.tools) for d in dialogues)
            if further:
                note(
                    f"{further} of {len(dialogues)} prompts have further turns, system messages or "
                    "tools: only the first message of the user is used"
                )
        from peagle.data import regenerate as library
        from peagle.data.origins import read_prompt_origin

        deciding = {"model": facts.pop("model"), "chat": answerer.is_chat, **plan.known}
        prompts = plan.prompts
        is_stored = prompts.is_file() or is_folder(prompts)  # not standard input or a pipe
        origin = read_prompt_origin(prompts) if is_stored else None
        facts |= {
            "prompts_sha256": sha256_of_table(prompts) if is_stored else None,
            "prompts": origin and origin.model_dump(),
            "command": " ".join(sys.argv[1:]),
        }
        facts |= environment(facts.pop("device", None))
        return library.regenerate(
            plan.found,
            answerer,
            options.output,
            deciding,
            facts,
            temperatures=plan.temperatures,
            seed=plan.known["seed"],
            watch=partial(_show_answers, progress),
        )


def _first_dialogues(file: Path, limit: int | None) -> Iterator[AskedConversation | Dropped]:
    """Yield the first prompts of a file, and the records left out before the last of them.

    The detail of a left-out record begins with its place.

    Raises:
        UserError: the file has no prompt.
    """
    from peagle.evaluation.prompts import read_prompts

    if file.suffix not in (".jsonl", ".parquet") and not is_folder(file):
        for prompt in read_prompts(file)[:limit]:
            yield AskedConversation(prompt.id, prompt.turns)
        return
    counts, number = DropCounts(), 0
    for record in read_records(file):
        made = dialogue_of(record)
        if isinstance(made, Dropped):
            counts.drop(made, record.where)
            detail = f"{record.where}: {made.detail}" if made.detail else record.where
            yield Dropped(made.reason, detail)
            continue
        yield made
        number += 1
        if number == limit:
            return
    if not number:
        why = "; ".join(counts.reasons()) or "it is empty"
        raise UserError(f"{str(file)!r} has no prompts: {why}.")


def _local(setup: Setup, options: RegenerateOptions) -> tuple[Answerer, dict[str, Any]]:
    llm, facts = _load_for_batches(setup)
    from peagle.data.regenerate import LocalAnswerer

    chat, chat_template, thinking = options.chat, options.chat_template, options.thinking
    if chat is None:
        chat = chat_template is not None or bool(getattr(llm.tokenizer, "chat_template", None))
    if not chat and (chat_template is not None or thinking):
        raise UserError(_RAW_HAS_NO_TEMPLATE)
    answerer = LocalAnswerer(
        llm,
        setup.params,
        is_chat=chat,
        chat_template=chat_template,
        thinking=thinking,
        call_finder=call_finder(llm.tokenizer, chat_template) if chat else None,
    )
    return answerer, facts


def _load_for_batches(setup: Setup) -> tuple[LLM, dict[str, Any]]:
    """Load the target with large batches on a GPU; return it with facts for the provenance."""
    from peagle.engine.placement import resolve_device

    is_open = setup.settings.value("engine.max_num_seqs") is None
    if is_open and resolve_device(setup.engine.device).type == "cuda":
        setup.engine = replace(setup.engine, max_num_seqs=_BATCH_ON_GPU)
    llm = setup.load()
    from peagle.models.target_facts import precision_of

    return llm, {
        "model": Path(llm.target.name).name,
        "tokenizer_sha256": tokenizer_sha256(llm.target.name, llm.tokenizer),
        "device": llm.target.device,
        "dtype": precision_of(llm.target),
    }


def call_finder(tokenizer: PreTrainedTokenizerBase, chat_template: str | None) -> CallFinder:
    """Return a finder of tool calls in the form that the server expects for the chat template."""
    from peagle.chat import resolve_chat_template
    from peagle.data.regenerate import CallFinder
    from peagle.serving.tool_parsers import PARSERS, detect_parser, parser_for
    from peagle.serving.tools import message_from

    kind = detect_parser(resolve_chat_template(tokenizer, chat_template, with_tools=True))

    def find(text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str | None, list[dict]]:
        content, calls = message_from(parser_for(kind, tools).add(text, final=True))
        # A server's random ids would make each run differ; some templates want nine characters.
        return content, [{**call, "id": f"call{i:05}"} for i, call in enumerate(calls, 1)]

    return CallFinder(PARSERS[kind].markers, find)


def _remote(
    setup: Setup, options: RegenerateOptions, endpoint: str
) -> tuple[Answerer, dict[str, Any]]:
    from peagle.client.api import KEY_VARIABLE, key_from_environment
    from peagle.client.fields import sampling_fields
    from peagle.data.regenerate import EndpointAnswerer, Patience

    fields = sampling_fields(setup.params, _sampling(setup))
    if options.thinking is not None:
        fields["chat_template_kwargs"] = {"enable_thinking": options.thinking}
    patience = Patience(options.retries, timeout_s=options.timeout)
    answerer = EndpointAnswerer(
        endpoint,
        setup.settings.value("target"),
        fields,
        key=key_from_environment(KEY_VARIABLE),
        concurrency=options.concurrency,
        is_chat=options.chat is not False,
        patience=patience,
    )
    return answerer, {"model": answerer.model, "endpoint": endpoint}


def _sampling(setup: Setup) -> dict[str, Any]:
    """Return the given sampling values without the seed and n, which is always 1."""
    given = setup.settings.section("sampling")
    return {key: value for key, value in given.items() if key not in ("seed", "n")}


def _check_remote(given: Given, chat_template: str | None) -> None:
    """Refuse options that have no effect on a server."""
    here = ("engine.", "speculative", "no_speculation", "revision", "threads", "show_memory")
    idle = [setting.source for key, setting in given.items() if key.startswith(here)]
    idle += ["--chat-template"] if chat_template is not None else []
    if idle:
        raise UserError(f"{idle[0]} has no effect on a server (--endpoint); leave it out.")


def _template_id(chat_template: str | None) -> str | None:
    """Return the identity of a template: its name, or the hash of its file."""
    if chat_template is None or not Path(chat_template).is_file():
        return chat_template
    from peagle.model_folder import sha256_of

    return sha256_of(Path(chat_template))


def _speed(progress: RegenerateProgress | SynthesizeProgress) -> float:
    return progress.tokens / progress.seconds if progress.seconds else 0.0


def _summary(progress: RegenerateProgress) -> str:
    parts = [f"{progress.answers} answers to {progress.prompts} prompts"]
    parts += [f"{progress.resumed} were there"] if progress.resumed else []
    parts += [f"{progress.duplicates} duplicates"] if progress.duplicates else []
    parts += [f"{progress.cut} cut off"] if progress.cut else []
    ended = progress.ended_by_calls
    parts += [f"{ended} conversations ended by a tool call without a result"] if ended else []
    parts += [f"{dropped} dropped"] if (dropped := progress.dropped.total()) else []
    parts += [f"{len(progress.failures)} failed"] if progress.failures else []
    return ", ".join(parts) + (
        f"; {progress.tokens} tokens in {progress.seconds:.1f} s ({_speed(progress):.1f} tokens/s)"
    )


def _print_counts(done: RegenerateProgress | SynthesizeProgress, output: Path) -> None:
    print(json.dumps(asdict(done) | {"dropped": done.dropped, "output": str(output)}))


def _show_answers(line: ProgressLine, progress: RegenerateProgress) -> None:
    there = progress.resumed + progress.answers
    speed = f"{_speed(progress):,.0f} tokens/s" if progress.tokens else ""
    line.update(there, there + progress.waited_for, speed, line=_summary(progress))


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
    *map(_for_answers, groups.ENGINE),
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

    _check_jsonl(output)
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
        "chat_template": _template_id(chat_template),
        "systems": systems,
        "turns": turns,
        "sampling": _sampling(setup),
        "seed": setup.params.seed or 0,
    }
    known = _begun(output, deciding)
    with ProgressLine("prompt") as progress:
        progress.begin("loading the model")
        llm, facts = _load_for_batches(setup)
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
        _print_counts(done, output)
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
        f"; {done.tokens} tokens in {done.seconds:.1f} s ({_speed(done):.1f} tokens/s)"
    )


def _show_prompts(line: ProgressLine, done: SynthesizeProgress) -> None:
    speed = f"{_speed(done):,.0f} tokens/s" if done.tokens else ""
    line.update(min(done.kept, done.count), done.count, speed, line=_synthesis(done))


EXAMPLES = """
No prompts? The target writes them:
  peagle data synthesize --target ./Qwen3-0.6B --count 20000 --output prompts.jsonl

From prompts to training data, and a look at it:
  peagle data regenerate prompts.jsonl --target ./Qwen3-0.6B --output responses.jsonl
  peagle data prepare responses.jsonl --target ./Qwen3-0.6B --output train.safetensors
  peagle data inspect train.safetensors --target ./Qwen3-0.6B

What the target says about it, stored once for all epochs:
  peagle data features train.safetensors --target ./Qwen3-0.6B --output features

More about each:
  peagle data prepare --help
"""


data = typer.Typer(
    cls=with_examples(TyperGroup, EXAMPLES),
    add_completion=False,
    context_settings=CONTEXT,
    help="Make, prepare and inspect training data.",
)
for _function, _examples in (
    (synthesize, SYNTHESIZE_EXAMPLES),
    (regenerate, REGENERATE_EXAMPLES),
    (prepare, PREPARE_EXAMPLES),
    (inspect, INSPECT_EXAMPLES),
    (features, FEATURES_EXAMPLES),
):
    data.command(cls=with_examples(TyperCommand, _examples))(_function)
