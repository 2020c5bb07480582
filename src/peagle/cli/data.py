"""`peagle data regenerate | prepare | inspect | features`: from prompts to what train reads."""

from __future__ import annotations

from textwrap import indent
from typing import Any

import typer
from typer.core import TyperGroup

from peagle.cli import data_features, data_inspect, data_prepare, data_regenerate
from peagle.cli.main import Command

EXAMPLES = """
From prompts to training data, and a look at it:
  peagle data regenerate prompts.jsonl --target ./Qwen3-0.6B --output responses.jsonl
  peagle data prepare responses.jsonl --target ./Qwen3-0.6B --output train.safetensors
  peagle data inspect train.safetensors --target ./Qwen3-0.6B

What the target says about it, stored once for all epochs:
  peagle data features train.safetensors --target ./Qwen3-0.6B --output features

More about each:
  peagle data prepare --help
"""


class DataGroup(TyperGroup):
    """The commands of `peagle data`; the help page ends with examples."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help page."""
        super().format_help(ctx, formatter)
        formatter.write(f" Examples:\n{indent(EXAMPLES.strip(), '   ')}\n")


data = typer.Typer(
    cls=DataGroup,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Make, prepare and inspect training data.",
)


def _add(name: str, function: Any, text: str) -> None:
    command = type("DataCommand", (Command,), {"examples": text})
    data.command(name, cls=command)(function)


_add("regenerate", data_regenerate.regenerate, data_regenerate.EXAMPLES)
_add("prepare", data_prepare.prepare, data_prepare.EXAMPLES)
_add("inspect", data_inspect.inspect, data_inspect.EXAMPLES)
_add("features", data_features.features, data_features.EXAMPLES)
