"""`peagle data features`: the target's states of training data, stored for many epochs."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from peagle.cli.options import Format, OutputFormat, check_paths, quiet_libraries
from peagle.cli.progress import ProgressLine
from peagle.config import require_writable_folder
from peagle.errors import UserError

if TYPE_CHECKING:
    from peagle.data.feature_writer import FeatureProgress

EXAMPLES = """
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


def features(
    file: Annotated[
        Path, typer.Argument(metavar="TRAIN_FILE", help="Training data: .safetensors or .jsonl.")
    ],
    target: Annotated[str, typer.Option(help="The target: a folder or a hub id.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of the store.")],
    aux_layer_ids: Annotated[
        str | None,
        typer.Option(
            metavar="IDS",
            help="Layers whose entering states make the feature, as in 2,18,33.",
            show_default="those of a new head",
        ),
    ] = None,
    dtype: Annotated[
        Literal["bf16", "fp8", "fp32"],
        typer.Option(help="Type of stored features; fp8 adds a scale per position and layer."),
    ] = "bf16",
    target_dtype: Annotated[
        Literal["auto", "float32", "float64", "bfloat16", "float16"],
        typer.Option(
            help="Type in which the target runs.", show_default="bfloat16 on a GPU, else float32"
        ),
    ] = "auto",
    max_length: Annotated[
        int | None,
        typer.Option(
            min=8,
            help="Cut longer sequences here; must equal data.max_length of the training run.",
            show_default="its default",
        ),
    ] = None,
    max_disk_gib: Annotated[
        float | None,
        typer.Option(help="Largest size of the store.", show_default="the free space"),
    ] = None,
    shard_gib: Annotated[float, typer.Option(help="Size of a shard.")] = 1.0,
    batch_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens that the target runs at a time.")
    ] = 16384,
    device: Annotated[str, typer.Option(help="Device: auto, cpu or cuda.")] = "auto",
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare existing shards with their hashes.")
    ] = False,
    output_format: Format = OutputFormat.TEXT,
) -> None:
    """Store the target's hidden states of training data, to train from them.

    For each sequence: the features of every position, and the final hidden states of the response,
    which the head imitates. Shards are written whole or not at all; existing shards are kept.
    """
    if max_disk_gib is not None and not max_disk_gib >= 0:
        raise UserError(f"--max-disk-gib is {max_disk_gib}; expected a size of 0 or more.")
    if not shard_gib > 0:
        raise UserError(f"--shard-gib is {shard_gib}; expected a size above 0.")
    require_writable_folder(output, "--output")
    parts = [] if aux_layer_ids is None else [one.strip() for one in aux_layer_ids.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise UserError(
            f"--aux-layer-ids is {aux_layer_ids!r}; expected layer numbers, as in 2,18,33."
        )
    check_paths(target)
    if not file.is_file():
        raise UserError(f"The data file {str(file)!r} is not there.")
    quiet_libraries()
    from peagle.data.dataset import ResponseDataset
    from peagle.data.feature_format import StoreFacts
    from peagle.data.feature_writer import FeatureWriter
    from peagle.engine.memory_plan import size_text
    from peagle.engine.placement import resolve_device, resolve_dtype
    from peagle.models.loading import resolve_model
    from peagle.models.target import (
        TargetModel,
        check_aux_layer_ids,
        default_aux_layer_ids,
        load_tokenizer,
    )
    from peagle.models.target_ends import TargetEnds
    from peagle.training.config import DataSection

    where = resolve_device(device)
    run_dtype = resolve_dtype(target_dtype, where)
    folder = resolve_model(target)
    # Sizes and identity of the target, without its layers: refusals come before the long part.
    ends = TargetEnds.load(folder)
    chosen = tuple(map(int, parts)) or default_aux_layer_ids(ends.num_layers)
    check_aux_layer_ids(chosen, ends.num_layers)
    longest: int = max_length or DataSection.model_fields["max_length"].default
    dataset = ResponseDataset.load(file, load_tokenizer(folder), ends.vocab_size, longest)
    name = str(run_dtype).removeprefix("torch.")
    facts = StoreFacts.of(dataset, ends, chosen, dtype, name, round(shard_gib * _GIB))
    writer = FeatureWriter(output, dataset, facts)
    need = writer.check_disk(None if max_disk_gib is None else round(max_disk_gib * _GIB))
    shards, missing = len(writer.plans), len(writer.missing)
    plan = (
        f"{facts.num_sequences:,} sequences, {facts.num_tokens:,} tokens: "
        f"{size_text(need.total)} ({need.total:,} bytes) in {shards} shards, "
        f"layers {','.join(map(str, chosen))} in {dtype}; {size_text(need.free)} are free"
    )
    if missing < shards:
        plan += f"; {shards - missing} shards are there, {size_text(need.missing)} to write"
    print(f"peagle: {plan}", file=sys.stderr)
    if verify:
        writer.verify()
    computed, seconds = 0, 0.0
    if missing:
        del ends
        model = TargetModel.load(folder, dtype=run_dtype, device=where)
        with ProgressLine("token") as line:
            try:
                done = writer.write(model, batch_tokens, partial(_show, line))
            except KeyboardInterrupt:
                whole = shards - len(writer.missing)
                line.print(
                    f"{whole} of {shards} shards are whole; the same command goes on after them"
                )
                raise
        computed, seconds = done.tokens, done.seconds
    if output_format is OutputFormat.JSON:
        counts = {"output": str(output), "bytes": need.total, "num_shards": shards}
        counts |= {"computed_tokens": computed, "seconds": seconds, "verified": verify}
        print(json.dumps(asdict(facts) | counts))
        return
    state = "whole and as it was written" if verify else "whole"
    speed = f", {computed / seconds:,.0f} tokens/s" if seconds else ""
    print(
        f"{output}: {state}, {facts.num_sequences:,} sequences in {shards} shards, "
        f"{size_text(need.total)}; computed {computed:,} tokens in {seconds:.1f} s{speed}"
    )


def _show(line: ProgressLine, progress: FeatureProgress) -> None:
    speed = f"{progress.tokens / progress.seconds:,.0f} tokens/s"
    text = (
        f"{progress.shards} of {progress.num_shards} shards, "
        f"{progress.tokens:,} of {progress.num_tokens:,} tokens, {speed}"
    )
    line.update(progress.tokens, progress.num_tokens, speed, line=text)
