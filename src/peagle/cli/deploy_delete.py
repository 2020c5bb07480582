"""`peagle deploy sagemaker delete`: an endpoint and everything that was made for it."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from peagle.cli.deploy_errors import leftovers_told
from peagle.cli.options import Format, OutputFormat
from peagle.errors import UserError

if TYPE_CHECKING:
    from peagle.deploy.aws import Clients
    from peagle.deploy.deployment import Current
    from peagle.deploy.undo import Stayed, Undo

DELETE_EXAMPLES = """
Show what would be deleted, and ask:
  peagle deploy sagemaker delete peagle-gpt-oss-20b

Without a question, in another region; keep the model's files in S3; for a program:
  peagle deploy sagemaker delete qwen3 --yes --region eu-west-1
  peagle deploy sagemaker delete qwen3 --yes --keep-uploads
  peagle deploy sagemaker delete qwen3 --yes --format json
"""
_LISTINGS = ("ListModels", "ListEndpointConfigs", "ListTags")
_SCALING = ("DescribeScalableTargets", "DescribeScalingPolicies")


def delete(
    endpoint: Annotated[
        str, typer.Argument(metavar="ENDPOINT", help="Its name.", show_default=False)
    ],
    region: Annotated[
        str | None, typer.Option(help="Of AWS.", show_default="boto3's own configuration")
    ] = None,
    keep_uploads: Annotated[
        bool, typer.Option("--keep-uploads", help="Leave what was uploaded for it in S3.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    output_format: Format = OutputFormat.TEXT,
) -> None:
    """Delete an endpoint, its scaling, configuration, models and uploads, in this order.

    What is not there any more is passed over, so that it can be run again. Objects in S3 go only if
    peagle uploaded them. What could not be deleted is listed with a command that does it.
    """
    from peagle.deploy.apply import Unfinished, apply
    from peagle.deploy.aws import Clients
    from peagle.deploy.deployment import check_endpoint_name
    from peagle.deploy.endpoints import look_up, only_ours
    from peagle.deploy.undo import what_of

    clients = Clients(region)
    unseen: dict[str, str] = {}
    found = only_ours(clients, look_up(clients, check_endpoint_name(endpoint), unseen))
    kept = found.uploads if keep_uploads else ()
    found = replace(found, uploads=() if keep_uploads else found.uploads)
    steps = _steps(found, blind=any(operation in unseen for operation in _SCALING))
    deleted: tuple[str, ...] = ()
    with leftovers_told(output_format):
        if found.endpoint or found.leftovers or found.uploads:
            names = [what_of(step) for step in steps]
            _ask(endpoint, clients.region, names, yes=yes)
            deleted = apply(steps, clients).deleted
        if stayed := _unlisted(clients, endpoint, unseen):
            raise Unfinished("AWS did not show everything that there may be.", stayed)
    if output_format is OutputFormat.JSON:
        result = {"endpoint": endpoint, "region": clients.region}
        print(json.dumps({**result, "deleted": list(deleted), "kept": list(kept)}, indent=2))
    else:
        what = "\n".join(f"  {name}" for name in deleted)
        print(f"deleted:\n{what}" if deleted else f"There is nothing of endpoint {endpoint!r}.")
        for uri in kept:
            print(f"kept: {uri}")


def _steps(found: Current, *, blind: bool) -> list[Undo]:
    """What goes; blind: scaling that could not be seen is deleted in case it is there."""
    from peagle.deploy.deployment import VARIANT
    from peagle.deploy.plan import Wait, delete_calls
    from peagle.deploy.scaling import policy_of, unscale_calls

    name = found.endpoint_name
    scaling = unscale_calls(name, VARIANT, [policy_of(name)]) if blind else []
    return [*scaling, *(step for step in delete_calls(found) if not isinstance(step, Wait))]


def _ask(endpoint: str, region: str, names: list[str], *, yes: bool) -> None:
    if yes:
        return
    shown = "\n".join(f"  {name}" for name in names)
    print(f"To be deleted in {region}:\n{shown}", file=sys.stderr)
    if not sys.stdin.isatty():
        raise UserError(f"Nothing was deleted of {endpoint!r}: nobody can be asked. Give --yes.")
    typer.confirm("Delete it?", abort=True, err=True)


def _unlisted(clients: Clients, endpoint: str, unseen: dict[str, str]) -> list[Stayed]:
    """What may be there, and was not shown."""
    from peagle.deploy.undo import Stayed

    reasons = [unseen[operation] for operation in _LISTINGS if operation in unseen]
    again = f"peagle deploy sagemaker delete {endpoint} --yes --region {clients.region}"
    what = f"models and configurations of earlier tries for {endpoint!r}, if there are any"
    return [Stayed(what, again, reasons[0])] if reasons else []
