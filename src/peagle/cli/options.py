"""What commands share beside the groups of options: output format, chat template, the pair."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from peagle.bundled import BUNDLED, Role
from peagle.errors import UserError


class OutputFormat(StrEnum):
    """How a command prints its result."""

    TEXT = "text"
    JSON = "json"


ChatTemplate = Annotated[
    str | None,
    typer.Option(
        help="Chat template: a Jinja file, or the name of one of the tokenizer's.",
        show_default="the tokenizer's",
    ),
]
Split = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Split of a folder of data; FOLDER/NAME names it too.",
        show_default=False,
    ),
]
# Of commands that measure.
MoreHeads = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=MODEL",
        help="Another method: a head with a name of yours, or ngram; may be given several times.",
    ),
]
UseTemplate = Annotated[
    bool | None,
    typer.Option(
        "--chat-template/--no-chat-template",
        help="Format prompts by the chat template, or take them as text.",
        show_default="the template where there is one",
    ),
]
Thinking = Annotated[
    bool | None,
    typer.Option(
        "--thinking/--no-thinking",
        help="Thinking mode of the chat template; a template without one accepts --no-thinking.",
        show_default="the template's",
    ),
]
DEFAULT_LIMIT = 16
PromptLimit = Annotated[
    int | None,
    typer.Option(
        help="Number of prompts of each set.",
        show_default=f"{DEFAULT_LIMIT} without --set, else all",
    ),
]
ShuffleSeed = Annotated[
    int | None,
    typer.Option(
        metavar="SEED",
        help="Seed that chooses prompts from all over a set.",
        show_default="the first ones",
    ),
]
Results = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Folder for results and a report; results in it are not measured again.",
    ),
]
Format = Annotated[OutputFormat, typer.Option("--format", help="Form of the printed result.")]


def own_target(target: str | None) -> str | None:
    """Return the target that was named, None where it is the bundled one, by name or by default."""
    return None if target == BUNDLED else target


def thinking_mode(thinking: bool | None, chat_template: bool | None) -> bool | None:
    """Return the thinking mode to set; text without a template has none to turn off.

    Raises:
        UserError: thinking is asked for without a chat template.
    """
    if chat_template is not False:
        return thinking
    if thinking:
        raise UserError("--no-chat-template was given, so there is no thinking mode to turn on.")
    return None


def check_paths(
    target: str | None,
    draft: str | None = None,
    eagle3: str | None = None,
    methods: Iterable[str] | None = None,
    chat_template: str | None = None,
) -> None:
    """Refuse models that are neither folders here nor hub ids, and a template file that is not
    there, before torch is imported.

    Raises:
        UserError: naming the first.
    """
    from peagle.chat import check_template_file
    from peagle.evaluation.decoding_methods import DecodingMethod
    from peagle.models.loading import find_folder

    named: list[tuple[str | None, Role]] = [(target, "target"), (draft, "draft")]
    named += [
        (eagle3, "eagle3"),
        *((DecodingMethod.parse(m).source, "draft") for m in methods or ()),
    ]
    for name, role in named:
        if name:
            find_folder(name, role)
    check_template_file(chat_template)


def set_threads(threads: int | None) -> None:
    """Let torch use so many CPU threads; None leaves the number to the model and the machine.

    Raises:
        UserError: fewer than one.
    """
    if threads is None:
        return
    from peagle.engine import placement as library

    library.set_threads(threads)


def quiet_libraries() -> None:
    """Keep the progress bars and advice of transformers out of our output."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers.utils import logging

    disable: Callable[[], None] = logging.disable_progress_bar
    disable()
    logging.set_verbosity_error()
