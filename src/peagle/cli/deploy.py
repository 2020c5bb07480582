"""`peagle deploy sagemaker ...`: an endpoint's life on Amazon SageMaker."""

from __future__ import annotations

from importlib import import_module
from textwrap import indent
from typing import Any

import typer
from typer.core import TyperGroup

from peagle.cli.main import Command, LazyCommand, command_of

EXAMPLES = """
One click: a model of the catalog with its P-EAGLE head (needs a role, and credentials of AWS):
  peagle deploy sagemaker create gpt-oss-20b --role arn:aws:iam::123456789012:role/sagemaker

The calls that this makes, as JSON, without a call; then the endpoint's life:
  peagle deploy sagemaker plan gpt-oss-20b
  peagle deploy sagemaker status peagle-gpt-oss-20b
  peagle deploy sagemaker invoke peagle-gpt-oss-20b 'Why is the sky blue?'
  peagle deploy sagemaker delete peagle-gpt-oss-20b

More about each:
  peagle deploy sagemaker create --help
"""

# Module of peagle.cli and one-line help of each command. The command is the function of its name
# there, and NAME_EXAMPLES close its help page; it is imported when somebody calls it.
SUBCOMMANDS = {
    "create": ("deploy_create", "Create an endpoint of a model and its draft head."),
    "update": ("deploy_create", "Change an endpoint: model, head, K, instances, image."),
    "status": ("deploy_operate", "Show an endpoint's state and its acceptance."),
    "invoke": ("deploy_invoke", "Send a prompt to an endpoint and stream the answer."),
    "scale": ("deploy_scale", "Set the number of instances, or scale automatically."),
    "logs": ("deploy_operate", "Show the log of an endpoint's containers."),
    "delete": ("deploy_delete", "Delete an endpoint and all that was made for it."),
    "plan": ("deploy_create", "Print every call of AWS that a command would make, and make none."),
    "template": ("deploy_create", "Print the CloudFormation template of an endpoint."),
}
_CONTEXT = {"help_option_names": ["-h", "--help"]}


class DeployCommand(LazyCommand):
    """A subcommand of `peagle deploy sagemaker`, imported when it is called."""

    def load(self) -> Command:
        """Import it."""
        assert self.name is not None
        module = import_module(f"peagle.cli.{SUBCOMMANDS[self.name][0]}")
        examples = getattr(module, f"{self.name.upper()}_EXAMPLES")
        return command_of(self.name, getattr(module, self.name), examples)


class DeployGroup(TyperGroup):
    """A group whose help page ends with examples."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help page."""
        super().format_help(ctx, formatter)
        formatter.write(f" Examples:\n{indent(EXAMPLES.strip(), '   ')}\n")


class SagemakerGroup(DeployGroup):
    """The commands of the table above."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for name, (_, text) in SUBCOMMANDS.items():
            self.add_command(DeployCommand(name, help=text))


deploy = typer.Typer(
    cls=DeployGroup,
    add_completion=False,
    context_settings=_CONTEXT,
    help="Deploy a model and its draft head on a managed platform.",
)
_sagemaker = typer.Typer(cls=SagemakerGroup, context_settings=_CONTEXT, no_args_is_help=True)


@_sagemaker.callback()
def sagemaker() -> None:
    """Deploy on Amazon SageMaker: create, change, call, watch and delete endpoints."""


deploy.add_typer(_sagemaker, name="sagemaker")


@deploy.callback()
def _deploy() -> None:
    """Deploy a model and its draft head on a managed platform."""
