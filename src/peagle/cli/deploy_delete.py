"""`peagle deploy sagemaker delete`: an endpoint and everything that was made for it."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from peagle.cli.deploy_options import EndpointName, Region, leftovers_printed
from peagle.cli.options import Format, OutputFormat
from peagle.errors import UserError

DELETE_EXAMPLES = """
Show what would be deleted, and ask:
  peagle deploy sagemaker delete peagle-gpt-oss-20b

Without a question, in another region; keep the model's files in S3; for a program:
  peagle deploy sagemaker delete qwen3 --yes --region eu-west-1
  peagle deploy sagemaker delete qwen3 --yes --keep-uploads
  peagle deploy sagemaker delete qwen3 --yes --format json
"""


def delete(
    endpoint: EndpointName,
    region: Region = None,
    keep_uploads: Annotated[
        bool, typer.Option("--keep-uploads", help="Leave the files that peagle put into S3.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Delete without a question.")] = False,
    output_format: Format = OutputFormat.TEXT,
) -> None:
    """Delete an endpoint's stack (scaling, endpoint, configuration, model), then its uploads.

    A stack that is gone is no error, so that the command can be run again. Objects in S3 go only if
    peagle put them there. What could not be deleted is listed with a command that does it.
    """
    from peagle.deploy import stack
    from peagle.deploy.aws import Clients
    from peagle.deploy.deployment import check_endpoint_name

    clients = Clients(region)
    check_endpoint_name(endpoint)
    names: list[str] = []
    files: list[str] = []
    kept: list[str] = []
    if stack.find_stack(clients, endpoint) is None:
        stack.require_absent(clients, endpoint)
    else:
        names = stack.resources_of(clients, endpoint)
        files = list(stack.uploads_of(clients, endpoint))
        if keep_uploads:
            files, kept = [], files
        _confirm(endpoint, clients.region, [*names, *files], yes=yes)
        with leftovers_printed(output_format):
            stack.delete(clients, endpoint, files)
    deleted = [*names, *files]
    if output_format is OutputFormat.JSON:
        result = {"endpoint": endpoint, "region": clients.region}
        print(json.dumps({**result, "deleted": deleted, "kept": kept}, indent=2))
    else:
        what = "\n".join(f"  {name}" for name in deleted)
        print(f"deleted:\n{what}" if deleted else f"There is nothing of endpoint {endpoint!r}.")
        for uri in kept:
            print(f"kept: {uri}")


def _confirm(endpoint: str, region: str, names: list[str], *, yes: bool) -> None:
    if yes:
        return
    shown = "\n".join(f"  {name}" for name in names)
    print(f"To be deleted in {region}:\n{shown}", file=sys.stderr)
    if not sys.stdin.isatty():
        raise UserError(f"Nothing was deleted of {endpoint!r}: nobody can be asked. Give --yes.")
    typer.confirm("Delete it?", abort=True, err=True)
