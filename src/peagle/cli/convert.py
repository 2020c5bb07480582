"""`peagle convert`: rewrite a draft head, whole or compact, or a GGUF file as a folder."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from peagle.bundled import expand_bundled
from peagle.config import require_folder
from peagle.errors import UserError
from peagle.models.gguf_header import SUFFIX, is_gguf
from peagle.models.head_quantization import DEFAULT_GROUP, GROUP_MULTIPLE, StoredQuantization

if TYPE_CHECKING:
    from peagle.models.checkpoint import Conversion

EXAMPLES = """
A head that vLLM serves, for the speculators package:
  peagle convert ./head ./head-speculators --format speculators

A head that the package trained, in the style of the published P-EAGLE heads:
  peagle convert ./checkpoint_best ./head --format vllm

With the target's name, by which `vllm serve ./head-speculators` finds it; for a program:
  peagle convert ./head ./head-speculators --format speculators --target Qwen/Qwen3-8B --json

A small file to ship, and from it again a head that vLLM serves:
  peagle convert ./head ./head-int4 --format compact --quantization int4
  peagle convert ./head-int4 ./head-vllm --format vllm --target ./model

A target out of a GGUF file, as a folder in Hugging Face format:
  peagle convert ./SmolLM2-135M-Instruct.Q4_1.gguf ./smollm2 --format hf
"""


def convert(
    source: str = typer.Argument(
        ...,
        help="Folder of the head, in either style; bundled is the bundled one. With --format hf "
        "the GGUF file of a target.",
        metavar="SRC",
    ),
    destination: Path = typer.Argument(..., help="Folder that receives it.", metavar="DST"),
    format: Literal["vllm", "speculators", "compact", "hf"] = typer.Option(
        ...,
        help="Style of the new checkpoint. compact is for peagle alone: a small file. hf unpacks a "
        "GGUF file.",
    ),
    target: str | None = typer.Option(
        None,
        metavar="NAME",
        help="Name of the target to write down; it is not loaded. Of a compact head whose "
        "embedding or lm_head are the target's, the target to take them from.",
        show_default="the one that the head names",
    ),
    quantization: StoredQuantization | None = typer.Option(
        None,
        help="Type of the linear layers of a compact head, with a scale for each group of inputs.",
        show_default="as stored",
    ),
    int8_layers: str | None = typer.Option(
        None,
        metavar="NAME,...",
        help="Layers that get INT8 beside --quantization int4, by their last names: "
        "q_proj,k_proj,v_proj.",
        show_default="none",
    ),
    group_size: int | None = typer.Option(
        None,
        min=GROUP_MULTIPLE,
        help=f"Inputs that share a scale with --quantization, a multiple of {GROUP_MULTIPLE}; they "
        "divide those of every layer.",
        show_default=str(DEFAULT_GROUP),
    ),
    force: bool = typer.Option(
        False, "--force", help="Write a head into a folder that is not empty."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the result as one JSON object."),
) -> None:
    """Rewrite a draft head in the style of vLLM or of speculators, or a GGUF file as a folder.

    No weight of a head changes, and the target is not needed, but for compact heads: these are
    rounded by --quantization, and become whole again with vllm or speculators. The style of SRC is
    read from its config.json. Quantised weights of a GGUF file are unpacked to bfloat16.
    """
    options = {"--quantization": quantization, "--int8-layers": int8_layers}
    given = [name for name, value in (options | {"--group-size": group_size}).items() if value]
    if given and format != "compact":
        raise UserError(f"{given[0]} is for --format compact; leave it out with --format {format}.")
    if given and quantization is None:
        raise UserError(f"{given[0]} needs --quantization; without it no layer is rounded.")
    if format == "hf":
        source = expand_bundled(source, "target")
    if source.lower().endswith(SUFFIX) and not Path(source).expanduser().exists():
        raise UserError(f"The GGUF file {source!r} is not there; expected its path.")
    is_file = is_gguf(Path(source).expanduser())
    if format == "hf" or is_file:
        if format != "hf" or not is_file:
            expected = "a GGUF file for --format hf, and the folder of a head for the others"
            raise UserError(f"{source!r} was given with --format {format}; expected {expected}.")
        _unpack(Path(source).expanduser(), destination, target, force=force, as_json=as_json)
        return
    source = expand_bundled(source, "draft")
    require_folder(source, "The draft head")
    target = target and expand_bundled(target, "target")
    from peagle.models.checkpoint import compact_head, convert_head

    if format == "compact":
        result = compact_head(
            source,
            destination,
            quantization=quantization,
            int8_layers=[name.strip() for name in int8_layers.split(",")] if int8_layers else (),
            group_size=group_size or DEFAULT_GROUP,
            force=force,
            target=target,
        )
    else:
        assert format != "hf"
        result = convert_head(source, destination, format, force=force, target=target)
    for note in result.notes:
        print(f"peagle: note: {note}", file=sys.stderr)
    print(json.dumps(result.to_json()) if as_json else _summary(result))


def _unpack(
    file: Path, destination: Path, target: str | None, *, force: bool, as_json: bool
) -> None:
    """Write the folder of a GGUF file."""
    for name, value in (("--target", target), ("--force", force)):
        if value:
            raise UserError(f"{name} is for heads; leave it out with --format hf.")
    from peagle.models.gguf_folder import convert_gguf

    made = convert_gguf(file, destination)
    text = (
        f"{made.model_type}, {made.num_bytes / 1e6:.1f} MB of {made.dtype}: {made.source} "
        f"({', '.join(made.quantization)}) to {made.destination} (hf)"
    )
    print(json.dumps(made.to_json()) if as_json else text)


def _summary(result: Conversion) -> str:
    config = result.config
    layers = "1 layer" if config.num_layers == 1 else f"{config.num_layers} layers"
    return (
        f"{result.config.kind} head, {layers}, {result.num_tensors} tensors, "
        f"{result.num_bytes / 1e6:.1f} MB of {result.dtype}: {result.source} "
        f"({result.source_format}) to {result.destination} ({result.format})"
    )
