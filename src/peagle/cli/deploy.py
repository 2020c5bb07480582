"""`peagle deploy sagemaker ...`: an endpoint's life on Amazon SageMaker."""

from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from peagle.cli.main import CONTEXT, LazyCommand, command_of, with_examples

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

# Module of peagle.cli and one-line help of each command. The module has the command as a function
# of its name, and NAME_EXAMPLES for its help page. It is imported when the command is called.
SUBCOMMANDS = {
    "create": ("deploy_create", "Create an endpoint of a model and its draft head."),
    "update": ("deploy_create", "Change an endpoint: model, head, K, instances, image."),
    "adapt": ("deploy_adapt", "Adapt the head to captured traffic, and deploy it if better."),
    "status": ("deploy_operate", "Show an endpoint's state and its acceptance."),
    "invoke": ("deploy_invoke", "Send a prompt to an endpoint and stream the answer."),
    "scale": ("deploy_scale", "Set the number of instances, or scale automatically."),
    "logs": ("deploy_operate", "Show the log of an endpoint's containers."),
    "delete": ("deploy_operate", "Delete an endpoint and all that was made for it."),
    "plan": ("deploy_create", "Print every call of AWS that a command would make, and make none."),
    "template": ("deploy_create", "Print the CloudFormation template of an endpoint."),
}


class DeployCommand(LazyCommand):
    """A subcommand of `peagle deploy sagemaker`, imported when it is called."""

    def load(self) -> TyperCommand:
        assert self.name is not None
        module = import_module(f"peagle.cli.{SUBCOMMANDS[self.name][0]}")
        examples = getattr(module, f"{self.name.upper()}_EXAMPLES")
        return command_of(self.name, getattr(module, self.name), examples)


class SagemakerGroup(with_examples(TyperGroup, EXAMPLES)):
    """The group of the commands in `SUBCOMMANDS`."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for name, (_, text) in SUBCOMMANDS.items():
            self.add_command(DeployCommand(name, help=text))


deploy = typer.Typer(
    cls=with_examples(TyperGroup, EXAMPLES),
    add_completion=False,
    context_settings=CONTEXT,
    help="Deploy a model and its draft head on a managed platform.",
)
_sagemaker = typer.Typer(cls=SagemakerGroup, context_settings=CONTEXT, no_args_is_help=True)


@_sagemaker.callback()
def sagemaker() -> None:
    """Deploy on Amazon SageMaker: create, change, call, watch and delete endpoints."""


deploy.add_typer(_sagemaker, name="sagemaker")


@deploy.callback()
def _deploy() -> None:
    """Deploy a model and its draft head on a managed platform."""
