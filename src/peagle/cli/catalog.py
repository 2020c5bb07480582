"""`peagle catalog`: models with P-EAGLE heads, ready to deploy."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from peagle.cli.terminal import printable
from peagle.deploy.instances import INSTANCE_TYPES, fitting_types
from peagle.deploy.memory import GIB, RESERVE_BYTES, gib
from peagle.errors import UserError

if TYPE_CHECKING:
    from peagle.deploy.catalog import CatalogEntry
    from peagle.deploy.deployment import ContainerSource

EXAMPLES = """
What there is, and one of it with the commands that deploy and serve it:
  peagle catalog
  peagle catalog gpt-oss-20b

For a program:
  peagle catalog --format json

A model of your own: begin with an entry that is like it, change it, and look how it is read:
  peagle catalog gpt-oss-20b --format toml > models.toml
  peagle catalog --catalog models.toml my-model

Such a file is read always as ~/.config/peagle/catalog.toml, or where PEAGLE_CATALOG names it:

  # models.toml
  format_version = 1

  [models.my-model]
  target = "Qwen/Qwen3-8B"            # hub id, s3://bucket/prefix/ or a folder
  draft = "./head"                    # beside this file
  num_speculative_tokens = 5
  precision = "bf16"                  # bf16, fp16, fp32, fp8, mxfp4, nvfp4, int8, int4
  weights_gib = 15.3                  # optional: tells whether it fits an instance
  kv_layers = [{ layers = 36, kv_heads = 8, head_dim = 128 }]
  instance_types = ["ml.g6e.xlarge"]
  vllm_flags = { max-model-len = 16384 }
"""


class CatalogFormat(StrEnum):
    """The formats of the printed catalog."""

    TEXT = "text"
    JSON = "json"
    TOML = "toml"


def catalog(
    name: str | None = typer.Argument(
        None,
        metavar="[NAME]",
        help="A model of the catalog, or the hub id of its target.",
        show_default="all, in short",
    ),
    catalogs: list[Path] | None = typer.Option(
        None,
        "--catalog",
        metavar="FILE",
        help="A catalog of your own (TOML); its entries replace those of the same name. May be "
        "given several times.",
        show_default=False,
    ),
    output_format: CatalogFormat = typer.Option(
        CatalogFormat.TEXT, "--format", help="How it is printed; toml is one entry as a file."
    ),
) -> None:
    """List the models that can be deployed by name, with their heads."""
    from peagle.deploy.catalog import find, load_catalog, to_toml

    entries = load_catalog(catalogs or ())
    if name is None:
        if output_format is CatalogFormat.TOML:
            raise UserError(
                "--format toml prints one entry; name one, as in "
                "peagle catalog gpt-oss-20b --format toml."
            )
        if output_format is CatalogFormat.JSON:
            print(json.dumps([facts(e, catalogs or ()) for e in entries.values()], indent=2))
        else:
            print(printable("\n".join(_table(list(entries.values())))))
        return
    entry = find(name, entries)
    if output_format is CatalogFormat.TOML:
        print(to_toml(entry), end="")
    elif output_format is CatalogFormat.JSON:
        print(json.dumps(facts(entry, catalogs or ()), indent=2))
    else:
        lines = [*_details(entry), "", *(f"  {line}" for line in commands(entry, catalogs or ()))]
        if entry.is_head_in_jumpstart:
            studio = f"deploy {entry.jumpstart_model_id} in SageMaker Studio."
            lines.append(f"  With the head of SageMaker JumpStart: {studio}")
        print(printable("\n".join(lines)))


def facts(entry: CatalogEntry, catalogs: Sequence[Path] = ()) -> dict[str, Any]:
    """Return an entry as JSON, with the memory that it needs and the commands that use it."""
    shown = entry.model_dump(mode="json")
    needed = entry.memory_needed()
    if needed is not None:
        gpus = _gpus(entry)
        sizes = {
            "target": needed.target_bytes,
            "draft": needed.draft_bytes,
            "kv_cache": needed.kv_bytes(gpus),
            "reserve": RESERVE_BYTES,
            "per_gpu": needed.per_gpu(gpus),
        }
        shown["memory_gib"] = {part: round(size / GIB, 2) for part, size in sizes.items()}
        shown["kv_bytes_per_token"] = {
            "target": sum(kind.token_bytes for kind in entry.kv_layers) or None,
            "draft": sum(kind.token_bytes for kind in entry.draft_kv_layers) or None,
        }
        shown["memory_for"] = {
            "source": entry.sources[0],
            "tensor_parallel_size": gpus,
            "max_model_len": needed.max_model_len,
            "num_sequences": needed.num_sequences,
        }
        shown["fits"] = [instance.name for instance in fitting_types(needed)]
    return shown | {"commands": commands(entry, catalogs)}


def commands(entry: CatalogEntry, catalogs: Sequence[Path] = ()) -> list[str]:
    """Return the commands that deploy and serve the model; HEAD stands for the user's own head."""
    create = ["peagle", "deploy", "sagemaker", "create", entry.name, "--role", "ROLE_ARN"]
    if entry.sources[0] == "native":
        create += ["--source", entry.sources[0]]
    if entry.origin in map(str, catalogs):
        create += ["--catalog", entry.origin]
    own_head = ["--draft", "HEAD"] if entry.is_head_in_jumpstart else []
    found = [shlex.join(create + own_head)]
    if entry.target.startswith("s3://"):
        return found
    model = ["--target", entry.target, *own_head]
    if entry.draft is not None:
        model += ["--draft", entry.draft, "-k", str(entry.num_speculative_tokens)]
    length = entry.vllm_flags.get("max-model-len", "")
    if length.isdecimal():
        model += ["--max-model-len", length]
    engines = [["--engine", "vllm"], *([[]] if "native" in entry.sources else [])]
    return found + [shlex.join(["peagle", "serve", *engine, *model]) for engine in engines]


def _gpus(entry: CatalogEntry) -> int:
    """Return the number of GPUs of the preferred instance type, 1 for an unknown type."""
    instance = INSTANCE_TYPES.get(entry.instance_types[0])
    return 1 if instance is None or entry.sources[0] == "native" else instance.num_gpus


def _table(entries: list[CatalogEntry]) -> list[str]:
    """Return the list of entries, two lines for each."""
    width = max(len(entry.name) for entry in entries)
    lines = [f"{'model':<{width}}  {'K':>2}  {'precision':<9}  {'instance type':<16}  GPU memory"]
    for entry in entries:
        k, needed, gpus = entry.num_speculative_tokens or "-", entry.memory_needed(), _gpus(entry)
        memory = gib(needed.per_gpu(gpus)) if needed else "not known"
        split = f" x {gpus}" if needed and gpus > 1 else ""
        mark = f"  (in place of the entry of {entry.replaces})" if entry.replaces else ""
        lines.append(
            f"{entry.name:<{width}}  {k:>2}  {entry.precision:<9}  "
            f"{entry.instance_types[0]:<16}  {memory}{split}{mark}"
        )
        lines.append(f"    {entry.target} + {_head(entry)}")
    return lines


def _head(entry: CatalogEntry) -> str:
    if entry.draft is not None:
        return entry.draft
    return "a head of your own, or JumpStart's" if entry.is_head_in_jumpstart else "no head"


def _details(entry: CatalogEntry) -> list[str]:
    """Return all facts of the catalog about an entry."""
    flags = " ".join(f"--{flag} {value}" for flag, value in entry.vllm_flags.items())
    origin = entry.origin + (f", in place of the entry of {entry.replaces}" * bool(entry.replaces))
    gated = {None: "", True: ", to be accepted first", False: ", open to all"}[entry.gated]
    rows = {
        "target": _size(entry, entry.target, "weights_gib", entry.precision),
        "head": _size(entry, _head(entry), "draft_weights_gib"),
        "K": _k(entry),
        "memory": _memory(entry, entry.sources[0]),
        "native": _memory(entry, "native") if "native" in entry.sources[1:] else "",
        "a token": _token(entry),
        "instances": ", ".join(entry.instance_types),
        "sources": ", ".join(entry.sources),
        "JumpStart": entry.jumpstart_model_id or "id not known here",
        "flags": flags or "none",
        "variables": " ".join(f"{k}={v}" for k, v in entry.environment.items()),
        "licence": (entry.license or "not known here") + gated,
        "from": origin,
    }
    lines = [entry.name, *(f"  {label:<10} {text}" for label, text in rows.items() if text)]
    if any("~" in line for line in lines):
        lines.append("  ~ is an estimate.")
    return lines


def _k(entry: CatalogEntry) -> str:
    if entry.num_speculative_tokens is None:
        return "up to what the head was trained for" if entry.is_head_in_jumpstart else "none"
    deepest = entry.max_speculative_tokens
    return str(entry.num_speculative_tokens) + (f", the deepest is {deepest}" if deepest else "")


def _size(entry: CatalogEntry, model: str, key: str, precision: str = "") -> str:
    size = getattr(entry, key)
    about = "~" if key in entry.estimates else ""
    told = ", ".join(part for part in (precision, f"{about}{size} GiB" if size else "") if part)
    return f"{model} ({told})" if told else model


def _token(entry: CatalogEntry) -> str:
    """Return the KV cache of one token, in a type of two bytes."""
    parts = []
    for key, model in (("kv_layers", "target"), ("draft_kv_layers", "head")):
        if size := sum(kind.token_bytes for kind in getattr(entry, key)):
            about = "~" if key in entry.estimates else ""
            parts.append(f"{about}{size / 1024:g} KiB of the {model}")
    return f"KV cache: {', '.join(parts)}" if parts else ""


def _memory(entry: CatalogEntry, source: ContainerSource) -> str:
    needed = entry.memory_needed(source)
    if needed is None:
        return "not known: weights_gib is not given"
    gpus = 1 if needed.max_gpus == 1 else _gpus(entry)
    each = "one GPU" if gpus == 1 else f"each of {gpus} GPUs"
    return f"{gib(needed.per_gpu(gpus))} of {each}: {needed.describe(gpus)}"
