"""What commands share beside the groups of options: output format, chat template, the pair."""

from __future__ import annotations

import os
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from peagle.bundled import BUNDLED
from peagle.errors import UserError


class OutputFormat(StrEnum):
    """How a command prints its result."""

    TEXT = "text"
    JSON = "json"


ChatTemplate = Annotated[
    str | None,
    typer.Option(
        help="Jinja file, or the name of one of the tokenizer's templates.",
        show_default="the tokenizer's",
    ),
]
Split = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Split of a folder of data; FOLDER/NAME says the same.",
        show_default=False,
    ),
]
# Of commands that measure.
MoreHeads = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=MODEL",
        help="A further head under a name of yours, or ngram; may be given several times.",
    ),
]
UseTemplate = Annotated[
    bool | None,
    typer.Option(
        "--chat-template/--no-chat-template",
        help="Put prompts behind the chat template, or send them as text.",
        show_default="the template where there is one",
    ),
]
Thinking = Annotated[
    bool | None,
    typer.Option(
        "--thinking/--no-thinking",
        help="Thinking mode of the chat template.",
        show_default="the template's",
    ),
]
DEFAULT_LIMIT = 16
PromptLimit = Annotated[
    int | None,
    typer.Option(
        help="Prompts of each set.", show_default=f"{DEFAULT_LIMIT} without --set, else all"
    ),
]
ShuffleSeed = Annotated[
    int | None,
    typer.Option(
        metavar="SEED",
        help="Take the prompts from all over a set, by this seed.",
        show_default="the first ones",
    ),
]
Results = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Keep results and a report here; what is there already is not measured again.",
    ),
]
Format = Annotated[OutputFormat, typer.Option("--format", help="How the result is printed.")]


def own_target(target: str | None) -> str | None:
    """Return the target that was named, None where it is the bundled one, by name or by default."""
    return None if target == BUNDLED else target


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
