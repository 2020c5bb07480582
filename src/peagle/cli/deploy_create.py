"""`peagle deploy sagemaker create | update | plan | template`: a stack built from options."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from peagle.cli import deploy_options as options
from peagle.cli.deploy_options import EndpointName, Wait
from peagle.cli.flags import Given, takes
from peagle.cli.groups import Format, OutputFormat
from peagle.errors import UserError

if TYPE_CHECKING:
    from peagle.deploy.deployment import Deployment
    from peagle.deploy.request import Lookups

CREATE_EXAMPLES = """
A model of the catalog (`peagle catalog`) with its P-EAGLE head; about 12 minutes:
  peagle deploy sagemaker create gpt-oss-20b --role arn:aws:iam::123456789012:role/sagemaker

Any model, with a head of your own from a folder here (uploaded), K = 5, options of vLLM behind --:
  peagle deploy sagemaker create Qwen/Qwen3-8B --draft ./peagle-head -k 5 \\
      --instance-type ml.g6e.2xlarge --name qwen3 -- --max-model-len 16384

Our own container, of an image that you built and pushed; a model in S3; a VPC:
  peagle deploy sagemaker create s3://models/qwen3-8b/ --draft s3://models/head/ --source native \\
      --image 123456789012.dkr.ecr.us-east-1.amazonaws.com/peagle:cuda \\
      --instance-type ml.g6e.2xlarge --subnet subnet-1 --security-group sg-1

Scaled by what was measured (`peagle tune --output tuned`):
  peagle deploy sagemaker create gpt-oss-20b --max-instances 4 --scale-from tuned/tune.json
"""
UPDATE_EXAMPLES = """
Another K, then a retrained head; all else stays, and requests are answered meanwhile:
  peagle deploy sagemaker update peagle-gpt-oss-20b -k 5
  peagle deploy sagemaker update qwen3 --draft ./peagle-head

Without drafts; on larger instances; with another option of vLLM:
  peagle deploy sagemaker update qwen3 --no-speculation
  peagle deploy sagemaker update qwen3 --instance-type ml.g7e.2xlarge -- --max-num-seqs 64
"""
PLAN_EXAMPLES = """
Every call of create, as JSON; no network, no region, no role, no credentials:
  peagle deploy sagemaker plan gpt-oss-20b

Every call of update and of delete:
  peagle deploy sagemaker plan peagle-gpt-oss-20b --for update --model gpt-oss-20b -k 5
  peagle deploy sagemaker plan peagle-gpt-oss-20b --for delete
"""

TEMPLATE_EXAMPLES = """
The CloudFormation template of an endpoint, for a pipeline of your own:
  peagle deploy sagemaker template gpt-oss-20b > endpoint.json
  aws cloudformation deploy --stack-name peagle-endpoint-peagle-gpt-oss-20b \\
      --template-file endpoint.json \\
      --parameter-overrides RoleArn=arn:aws:iam::123456789012:role/sagemaker
"""

VllmOptions = Annotated[
    list[str] | None,
    typer.Argument(metavar="[-- VLLM OPTIONS]", help="Options of vLLM.", show_default=False),
]
OtherModel = Annotated[
    str | None,
    typer.Option(metavar="NAME_OR_MODEL", help="Another target.", show_default="it stays"),
]
Model = Annotated[
    str,
    typer.Argument(
        metavar="NAME_OR_MODEL",
        help="A model of the catalog, a hub id, an s3:// prefix or a folder here (uploaded).",
        show_default=False,
    ),
]


class PlannedCommand(StrEnum):
    """The command whose calls `plan` prints."""

    CREATE = "create"
    UPDATE = "update"
    DELETE = "delete"


@takes(*options.ALL_OPTIONS)
def create(
    given: Given,
    model: Model,
    vllm: VllmOptions = None,
    wait: Wait = True,
    output_format: Format = OutputFormat.TEXT,
) -> None:
    """Create an endpoint on Amazon SageMaker: a model with its draft head, in one command.

    CloudFormation makes a stack of it. If that fails, and on Ctrl-C, all of it is taken back; what
    cannot be taken back is listed with the command that does it. Costs begin with the instances.
    """
    if model.startswith((".", "/", "~")):
        from peagle.deploy.models import source_of

        source_of(model)  # refuses a missing folder before AWS is called
    from peagle.deploy import stack
    from peagle.deploy.aws import Clients
    from peagle.deploy.request import Lookups, new_deployment, require_role

    clients = Clients(given.value("region"))
    lookups = Lookups(options.load_entries(given), clients.client("s3"))
    request = options.read_request(given, model, clients.region, vllm or ())
    d = _checked(new_deployment(request, options.new_stamp(), lookups))
    require_role(d)
    stack.require_new(clients, d.endpoint_name)
    with options.leftovers_printed(output_format):
        stack.create(clients, d, wait=wait)
    _print_result(d, clients.region, "created" if wait else "creating", output_format)


@takes(*options.UPDATE_OPTIONS)
def update(
    given: Given,
    endpoint: EndpointName,
    vllm: VllmOptions = None,
    model: OtherModel = None,
    wait: Wait = True,
    output_format: Format = OutputFormat.TEXT,
) -> None:
    """Change an endpoint: settings without an option stay. It answers requests all the while.

    SageMaker starts new instances beside the old ones and switches when they are healthy. If they
    are not, CloudFormation goes back, and the old ones go on.
    """
    from peagle.deploy import stack
    from peagle.deploy.aws import Clients
    from peagle.deploy.request import Lookups, changed_deployment
    from peagle.deploy.template import deployment_of

    clients = Clients(given.value("region"))
    lookups = Lookups(options.load_entries(given), clients.client("s3"))
    request = options.read_request(given, model or "", clients.region, vllm or (), name=endpoint)
    stack.require_updatable(stack.stack_of(clients, endpoint), endpoint, clients.region)
    present = stack.template_of(clients, endpoint)
    base = deployment_of(present, options.new_stamp())
    d = _checked(changed_deployment(base, request, lookups))
    if replace(d, sets_count=False) == base and not d.sets_count:
        raise UserError(
            f"Nothing is to change about {endpoint!r}; name an option (`peagle deploy sagemaker "
            "update --help`)."
        )
    with options.leftovers_printed(output_format):
        stack.update(clients, d, base, present, wait=wait)
    _print_result(d, clients.region, "updated" if wait else "updating", output_format)


@takes(*options.ALL_OPTIONS)
def template(given: Given, model: Model, vllm: VllmOptions = None) -> None:
    """Print the CloudFormation template of an endpoint as JSON, and call nothing.

    Values of --env, and the role where none is given, are parameters of the template.
    """
    from peagle.deploy.template import endpoint_template

    lookups = options.offline_lookups(given)
    d = _new(given, model, vllm, lookups, stamp="")
    print(json.dumps(endpoint_template(d), indent=2))
    for transfer in d.transfers:
        print(f"Put the files of {transfer.source.name} under {transfer.uri}.", file=sys.stderr)
    for note in lookups.notes:
        print(note, file=sys.stderr)


@takes(*options.ALL_OPTIONS)
def plan(
    given: Given,
    name_or_model: str = typer.Argument(
        ...,
        metavar="NAME_OR_MODEL",
        help="As for create; with --for update or delete the endpoint's name.",
        show_default=False,
    ),
    vllm: VllmOptions = None,
    planned: PlannedCommand = typer.Option(
        PlannedCommand.CREATE, "--for", help="The command whose calls are printed."
    ),
    model: OtherModel = None,
) -> None:
    """Print every call of AWS that a command would make as JSON, and make none.

    The command needs no network, region, role or credentials. Secrets are not shown. It does not
    read draft heads on the hub or in S3; create does.
    """
    lookups = options.offline_lookups(given)
    if planned is PlannedCommand.CREATE:
        calls = _create_calls(_new(given, name_or_model, vllm, lookups), lookups.notes)
    elif planned is PlannedCommand.UPDATE:
        calls = _update_calls(given, name_or_model, vllm, model, lookups)
    else:
        if model is not None:
            raise UserError("--model and --for delete contradict each other; leave one out.")
        calls = _delete_calls(name_or_model, lookups.notes)
    result = {
        "for": planned.value,
        "region": options.region_of(given) or None,
        "calls": calls,
        "notes": lookups.notes,
    }
    print(json.dumps(result, indent=2))


# ---- plans ----


def _create_calls(d: Deployment, notes: list[str]) -> list[dict[str, Any]]:
    from peagle.deploy.stack import change_set_request, planned_call, planned_calls, stack_name_of

    if not d.role:
        notes.append("No role was given: create needs --role, or the variable SAGEMAKER_ROLE.")
    name = d.endpoint_name
    reading = [
        planned_call("cloudformation", "DescribeStacks", {"StackName": stack_name_of(name)}),
        planned_call("sagemaker", "DescribeEndpoint", {"EndpointName": name}),
    ]
    return [*reading, *planned_calls(d, [change_set_request(d, creates=True)])]


def _update_calls(
    given: Given, endpoint: str, vllm: list[str] | None, model: str | None, lookups: Lookups
) -> list[dict[str, Any]]:
    from peagle.deploy.stack import change_set_request, planned_calls

    if model is None:
        raise UserError(
            "plan asks AWS nothing, so it does not know what the endpoint serves: give --model and "
            "the other options of its creation."
        )
    lookups.notes.append(
        "plan does not know what update keeps of the endpoint: options have their defaults."
    )
    d = _new(given, model, vllm, lookups, name=endpoint)
    return [*_reading_calls(endpoint), *planned_calls(d, [change_set_request(d)])]


def _delete_calls(endpoint: str, notes: list[str]) -> list[dict[str, Any]]:
    from peagle.deploy.deployment import check_endpoint_name
    from peagle.deploy.stack import planned_call, stack_name_of

    stack = {"StackName": stack_name_of(check_endpoint_name(endpoint))}
    notes.append("Files that peagle put into S3 go after the stack; its template names them.")
    return [
        *_reading_calls(endpoint),
        planned_call("cloudformation", "DescribeStackResources", stack),
        planned_call("cloudformation", "DeleteStack", stack),
        planned_call("cloudformation", "DescribeStacks", stack) | {"until": "DELETE_COMPLETE"},
    ]


def _reading_calls(endpoint: str) -> list[dict[str, Any]]:
    from peagle.deploy.stack import planned_call, stack_name_of

    stack = {"StackName": stack_name_of(endpoint)}
    return [
        planned_call("cloudformation", operation, stack)
        for operation in ("DescribeStacks", "GetTemplate")
    ]


def _new(
    given: Given,
    model: str,
    vllm: list[str] | None,
    lookups: Lookups,
    *,
    name: str = "",
    stamp: str | None = None,
) -> Deployment:
    from peagle.deploy.request import new_deployment

    region = options.region_of(given)
    if not region and given.value("image") is None:
        lookups.notes.append(
            "No region was given: some regions have the managed image in another account."
        )
    request = options.read_request(given, model, region, vllm or (), name=name)
    return _checked(
        new_deployment(request, options.new_stamp() if stamp is None else stamp, lookups)
    )


def _checked(d: Deployment) -> Deployment:
    """Return the deployment; refuse variables that our own container would refuse at its start."""
    from peagle.deploy.container import container_environment
    from peagle.serving.sagemaker import arguments_from

    if d.source == "native":
        arguments_from(container_environment(d), with_model=False)
    return d


def _print_result(d: Deployment, region: str, what: str, output_format: OutputFormat) -> None:
    """Print the endpoint, and how to call it."""
    invoke = f"peagle deploy sagemaker invoke {d.endpoint_name} --region {region}"
    if output_format is OutputFormat.JSON:
        result = {
            "endpoint": d.endpoint_name,
            "status": what,
            "region": region,
            "source": d.source,
            "image": d.image,
            "model": d.served_model_name,
            "draft": d.draft.name if d.draft else None,
            "num_speculative_tokens": d.num_speculative_tokens,
            "instance_type": d.instance_type,
            "instance_count": d.instance_count,
            "invoke": invoke,
        }
        print(json.dumps(result, indent=2))
        return
    drafts = f"K = {d.num_speculative_tokens}" if d.speculative_config else "without drafts"
    print(
        f"{what}: {d.endpoint_name} in {region}, {d.served_model_name} ({drafts}) on "
        f"{d.instance_count} x {d.instance_type}\n"
        f"Call it:   {invoke} 'Hello'\n"
        "           or boto3's invoke_endpoint_with_response_stream with a request of OpenAI's "
        f'form and "model": "{d.served_model_name}"\n'
        f"Look:      peagle deploy sagemaker status {d.endpoint_name} --region {region}\n"
        f"Delete it: peagle deploy sagemaker delete {d.endpoint_name} --region {region}"
    )
