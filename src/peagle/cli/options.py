"""Options that several commands share, and the folders they fall back on."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import fields
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from peagle.bundled import BUNDLED_TARGET
from peagle.config import EngineConfig, SamplingParams, SpeculativeConfig
from peagle.errors import UserError


class OutputFormat(StrEnum):
    """How a command prints its result."""

    TEXT = "text"
    JSON = "json"


def default_of(config: type, name: str) -> Any:
    """The default of a configuration field, for help texts: it is written there only."""
    return next(field.default for field in fields(config) if field.name == name)


def given(**values: Any) -> dict[str, Any]:
    """Those options that were given: the others are left to the configuration's defaults."""
    return {name: value for name, value in values.items() if value is not None}


MODEL, SPECULATION, SAMPLING, ENGINE = "Model", "Speculation", "Sampling", "Engine"
SETTINGS = "Settings"


def option_of(config: type, field: str, panel: str, *names: str, help: str) -> Any:
    """An option whose default is that of a configuration field."""
    shown = str(default_of(config, field))
    return typer.Option(*names, help=help, show_default=shown, rich_help_panel=panel)


Format = Annotated[OutputFormat, typer.Option("--format", help="How the result is printed.")]
Threads = Annotated[
    int | None,
    typer.Option(help="CPU threads.", show_default="torch's choice", rich_help_panel=ENGINE),
]
DType = Annotated[
    str | None,
    option_of(
        EngineConfig,
        "dtype",
        ENGINE,
        "--dtype",
        help="auto (float32 on a CPU, bfloat16 on a GPU), float32, float64, bfloat16 or float16.",
    ),
]
Device = Annotated[
    str | None,
    option_of(EngineConfig, "device", ENGINE, help="auto (the GPU if there is one), cpu or cuda."),
]
MaxNewTokens = Annotated[
    int | None,
    option_of(SamplingParams, "max_tokens", SAMPLING, help="Most tokens to generate per prompt."),
]
NumSpeculativeTokens = Annotated[
    int | None,
    option_of(
        SpeculativeConfig,
        "num_speculative_tokens",
        SPECULATION,
        "--num-speculative-tokens",
        "-k",
        help="K: draft tokens per step.",
    ),
]
Revision = Annotated[
    str | None,
    typer.Option(
        help="Branch, tag or commit of the target's hub id; owner/name@revision does the same.",
        show_default="main",
        rich_help_panel=MODEL,
    ),
]
DraftRevision = Annotated[
    str | None,
    typer.Option(
        help="Branch, tag or commit of the head's hub id.",
        show_default="main",
        rich_help_panel=MODEL,
    ),
]


def bundled(folder: Path) -> str:
    """A folder of the bundled pair.

    Raises:
        UserError: this installation has no bundled weights.
    """
    if not (folder / "config.json").is_file():
        raise UserError(
            f"This installation has no bundled {folder.name} ({str(folder)!r} is not there). "
            "Install a released wheel, or name models of your own with --target and --draft."
        )
    return str(folder)


def target_or_bundled(target: str | None) -> str:
    """The model named, else the folder of the bundled target."""
    return target or bundled(BUNDLED_TARGET)


def set_threads(threads: int | None) -> None:
    """Let torch use so many CPU threads.

    Raises:
        UserError: fewer than one.
    """
    if threads is None:
        return
    if threads < 1:
        raise UserError(f"--threads is {threads}; expected at least 1.")
    import torch

    torch.set_num_threads(threads)


def quiet_libraries() -> None:
    """Keep the progress bars and advice of transformers out of our output."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers.utils import logging

    disable: Callable[[], None] = logging.disable_progress_bar
    disable()
    logging.set_verbosity_error()
