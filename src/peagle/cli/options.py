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


MODEL, SPECULATION, SAMPLING, ENGINE = "Model", "Speculation", "Sampling", "Engine"

Format = Annotated[OutputFormat, typer.Option("--format", help="How the result is printed.")]
Threads = Annotated[
    int | None,
    typer.Option(help="CPU threads.", show_default="torch's choice", rich_help_panel=ENGINE),
]
DType = Annotated[
    str,
    typer.Option(
        "--dtype",
        help="auto (float32 on a CPU, bfloat16 on a GPU), float32, float64, bfloat16 or float16.",
        rich_help_panel=ENGINE,
    ),
]
Device = Annotated[
    str,
    typer.Option(help="auto (the GPU if there is one), cpu or cuda.", rich_help_panel=ENGINE),
]
MaxNewTokens = Annotated[
    int, typer.Option(help="Most tokens to generate per prompt.", rich_help_panel=SAMPLING)
]
NumSpeculativeTokens = Annotated[
    int | None,
    typer.Option(
        "--num-speculative-tokens",
        "-k",
        help="K: draft tokens per step.",
        show_default=str(default_of(SpeculativeConfig, "num_speculative_tokens")),
        rich_help_panel=SPECULATION,
    ),
]

DEFAULT_DTYPE: str = default_of(EngineConfig, "dtype")
DEFAULT_DEVICE: str = default_of(EngineConfig, "device")
DEFAULT_MAX_NUM_SEQS: int = default_of(EngineConfig, "max_num_seqs")
DEFAULT_MAX_NEW_TOKENS: int = default_of(SamplingParams, "max_tokens")


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
    """The folder named, else the bundled target."""
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
