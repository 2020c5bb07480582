"""`peagle data features`: the target's hidden states of training data, stored once."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from peagle.cli.flags import spread
from peagle.cli.groups import Format, OutputFormat
from peagle.cli.progress import ProgressLine
from peagle.cli.setup import check_paths, quiet_libraries
from peagle.config import EngineConfig, require_writable_folder
from peagle.disk import size_text
from peagle.errors import UserError

if TYPE_CHECKING:
    from peagle.data.feature_writer import DiskNeed, FeatureProgress, FeatureWriter

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
