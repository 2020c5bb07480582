"""`peagle deploy sagemaker create | update | plan`: from options to calls, and the calls made."""

from __future__ import annotations

import json
import secrets
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from peagle.cli import deploy_options as options
from peagle.cli.deploy_errors import leftovers_told
from peagle.cli.flags import Given, takes
from peagle.cli.options import Format, OutputFormat
from peagle.errors import UserError

if TYPE_CHECKING:
    from peagle.deploy.aws import Clients
    from peagle.deploy.deployment import Deployment
    from peagle.deploy.plan import Step
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
Every call of create, as JSON; no network, no credentials:
  peagle deploy sagemaker plan gpt-oss-20b --region us-east-1 \\
      --role arn:aws:iam::123456789012:role/sagemaker

Those of update and delete, whose present names are not known without asking:
  peagle deploy sagemaker plan peagle-gpt-oss-20b --for update --model gpt-oss-20b -k 5
  peagle deploy sagemaker plan peagle-gpt-oss-20b --for delete --region us-east-1
"""

VllmOptions = Annotated[
    list[str] | None,
    typer.Argument(metavar="[-- VLLM OPTIONS]", help="Options of vLLM.", show_default=False),
]
Wait = Annotated[
    bool, typer.Option("--wait/--no-wait", help="Return when it serves, or as soon as asked for.")
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
EndpointName = Annotated[
    str, typer.Argument(metavar="ENDPOINT", help="Its name.", show_default=False)
]


class Purpose(StrEnum):
    """Whose calls `plan` prints."""

    CREATE = "create"
    UPDATE = "update"
    DELETE = "delete"


@takes(*options.ALL)
def create(
    given: Given,
    model: Model,
    vllm: VllmOptions = None,
    wait: Wait = True,
    output_format: Format = OutputFormat.TEXT,
) -> None:
    """Create an endpoint on Amazon SageMaker: a model with its draft head, in one command.

    Whatever fails, and a Ctrl-C, takes back what was made until then; what cannot be taken back is
    listed with the command that does it. Costs begin with the instances.
    """
    from peagle.deploy.aws import Clients
    from peagle.deploy.endpoints import require_new
    from peagle.deploy.plan import create_calls
    from peagle.deploy.wanted import new_deployment

    clients = Clients(given.value("region"))
    request = options.read_request(given, model, clients.region, vllm or ())
    deployment = _checked(new_deployment(request, _stamp(), _asking(given, clients)))
    if deployment.autoscaling is not None and not wait:
        raise UserError(
            "--no-wait and --max-instances contradict each other: an endpoint can only be scaled "
            "once it is in service. Leave one out, and use `peagle deploy sagemaker scale` later."
        )
    require_new(clients, deployment.endpoint_name)
    with leftovers_told(output_format):
        _carry_out(create_calls(deployment), clients, wait=wait)
    _tell(deployment, "created" if wait else "creating", output_format)


@takes(*options.CHANGES)
def update(
    given: Given,
    endpoint: EndpointName,
    vllm: VllmOptions = None,
    model: OtherModel = None,
    wait: Wait = True,
    output_format: Format = OutputFormat.TEXT,
) -> None:
    """Change an endpoint: what is not said stays. It answers requests all the while.

    SageMaker starts new instances beside the old ones and switches when they are healthy. If they
    are not, the old ones go on.
    """
    from peagle.deploy.aws import Clients
    from peagle.deploy.current import deployed
    from peagle.deploy.endpoints import describe, require_updatable
    from peagle.deploy.plan import update_calls
    from peagle.deploy.wanted import changed_deployment

    clients = Clients(given.value("region"))
    request = options.read_request(given, model or "", clients.region, vllm or (), name=endpoint)
    current = describe(clients, endpoint)
    require_updatable(current)
    base = deployed(current, _stamp())
    deployment = _checked(changed_deployment(base, request, _asking(given, clients)))
    if replace(deployment, bucket=base.bucket) == base:
        raise UserError(
            f"Nothing is to change about {endpoint!r}; name an option (`peagle deploy sagemaker "
            "update --help`)."
        )
    with leftovers_told(output_format):
        _carry_out(update_calls(deployment, current), clients, wait=wait)
    _tell(deployment, "updated" if wait else "updating", output_format)


@takes(*options.ALL)
def plan(
    given: Given,
    name_or_model: Annotated[
        str,
        typer.Argument(
            metavar="NAME_OR_MODEL",
            help="As for create; with --for update or delete the endpoint's name.",
            show_default=False,
        ),
    ],
    vllm: VllmOptions = None,
    purpose: Annotated[
        Purpose, typer.Option("--for", help="The command whose calls are printed.")
    ] = Purpose.CREATE,
    model: OtherModel = None,
) -> None:
    """Print every call of AWS that a command would make as JSON, and make none.

    Nothing is asked of a network, and no credentials are needed. Secrets are not shown. Draft heads
    on the hub or in S3 are not looked at; create does that.
    """
    from peagle.deploy.plan import shown

    region = options.region_of(given)
    notes: list[str] = []
    if purpose is Purpose.CREATE:
        steps = _create_steps(given, name_or_model, region, vllm, notes)
    else:
        if purpose is Purpose.DELETE and model is not None:
            raise UserError("--model and --for delete contradict each other; leave one out.")
        steps = _later_steps(given, name_or_model, region, vllm, notes, purpose, model)
    result = {
        "for": purpose.value,
        "region": region,
        "calls": [shown(step) for step in steps],
        "notes": notes,
    }
    print(json.dumps(result, indent=2))


# ---- plans ----------------------------------------------------------------------------------


def _create_steps(
    given: Given, model: str, region: str, vllm: list[str] | None, notes: list[str]
) -> list[Step]:
    from peagle.deploy.calls import Call
    from peagle.deploy.plan import create_calls
    from peagle.deploy.wanted import new_deployment

    asked: list[Step] = []
    request = options.read_request(given, model, region, vllm or ())
    deployment = _checked(new_deployment(request, _stamp(), _silent(given, asked, notes)))
    is_free = Call("sagemaker", "DescribeEndpoint", {"EndpointName": deployment.endpoint_name})
    return [*asked, is_free, *create_calls(deployment)]


def _later_steps(
    given: Given,
    endpoint: str,
    region: str,
    vllm: list[str] | None,
    notes: list[str],
    purpose: Purpose,
    model: str | None,
) -> list[Step]:
    """The calls of update or delete, with stand-ins for the names that only AWS knows."""
    from peagle.deploy.deployment import Current, check_endpoint_name
    from peagle.deploy.plan import NO_ACCOUNT, delete_calls, reading_calls, update_calls
    from peagle.deploy.wanted import new_deployment

    check_endpoint_name(endpoint)
    current = Current(endpoint, region, "InService", "PRESENT-CONFIGURATION", ("PRESENT-MODEL",))
    notes.append(
        f"PRESENT-CONFIGURATION, PRESENT-MODEL and the account {NO_ACCOUNT} stand for what the "
        "reading calls tell."
    )
    reading = reading_calls(current)
    if purpose is Purpose.DELETE:
        return [*reading, *delete_calls(current)]
    if model is None:
        raise UserError(
            "plan asks AWS nothing, so it does not know what the endpoint serves: give --model and "
            "the other options of its creation."
        )
    notes.append("What update keeps of the endpoint is not known here: options have the defaults.")
    request = options.read_request(given, model, region, vllm or (), name=endpoint)
    deployment = _checked(new_deployment(request, _stamp(), _silent(given, reading, notes)))
    return [*reading, *update_calls(deployment, current)]


def _silent(given: Given, asked: list[Step], notes: list[str]) -> Lookups:
    """Who asks nobody: the hub's call is listed instead, and heads here alone are looked at."""
    from peagle.deploy import heads, jumpstart
    from peagle.deploy.catalog import load_catalog
    from peagle.deploy.model_files import reading_calls
    from peagle.deploy.models import ModelSource
    from peagle.deploy.request import Lookups

    def ask_hub(model_id: str) -> Mapping[str, Any] | None:
        asked.append(jumpstart.describe_call(model_id))
        notes.append(
            "What SageMaker's hub would answer is not known without asking: the calls after "
            "DescribeHubContent are those of the catalog, with --source managed."
        )
        return None

    def read_head(draft: ModelSource) -> heads.HeadFacts | None:
        if draft.kind == "local":
            return heads.head_facts(draft)
        asked.extend(reading_calls(draft))
        notes.append(f"The head {draft.name!r} was not looked at; it is taken for a P-EAGLE head.")
        return None

    def check_target(facts: heads.HeadFacts, draft: ModelSource, target: ModelSource) -> None:
        if target.kind == "local":
            heads.check_target(facts, draft, target)

    return Lookups(load_catalog(_catalogs(given)), read_head, check_target, ask_hub)


# ---- carrying out ---------------------------------------------------------------------------


def _asking(given: Given, clients: Clients) -> Lookups:
    """Who asks the hub of models, and SageMaker's."""
    from peagle.deploy import heads, jumpstart
    from peagle.deploy.aws_errors import explain, may_pass
    from peagle.deploy.catalog import load_catalog
    from peagle.deploy.model_size import facts_of_hub
    from peagle.deploy.request import Lookups

    def ask_hub(model_id: str) -> Mapping[str, Any] | None:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            return clients.call(jumpstart.describe_call(model_id))
        except (BotoCoreError, ClientError) as error:
            if may_pass(error):
                raise explain(error) from None
            print(
                f"SageMaker's hub does not tell about {model_id!r}: {explain(error)} Going on with "
                "the catalog.",
                file=sys.stderr,
            )
            return None

    s3 = clients.client("s3")
    return Lookups(
        load_catalog(_catalogs(given)),
        partial(heads.head_facts, s3=s3),
        partial(heads.check_target, s3=s3),
        ask_hub,
        read_size=facts_of_hub,
    )


def _catalogs(given: Given) -> list[Path]:
    return given.value("catalog", [])


def _checked(d: Deployment) -> Deployment:
    """The deployment, if our own container takes its environment where it is to run it.

    Raises:
        UserError: it would refuse a variable at its start.
    """
    from peagle.deploy.container import environment
    from peagle.serving.sagemaker import arguments_from

    if d.source == "native":
        arguments_from(environment(d), with_model=False)
    return d


def _stamp() -> str:
    """The time, and letters by chance: who deploys under one name in one second undoes his own."""
    return f"{time.strftime('%Y%m%d%H%M%S', time.gmtime())}-{secrets.token_hex(2)}"


def _carry_out(steps: list[Step], clients: Clients, *, wait: bool) -> None:
    """Check all requests, then make them."""
    from peagle.deploy.apply import apply
    from peagle.deploy.aws import validate
    from peagle.deploy.calls import Call

    for step in steps:
        if isinstance(step, Call):
            validate(step)
    apply(steps, clients, wait=wait)


def _tell(d: Deployment, what: str, output_format: OutputFormat) -> None:
    """The end of the command: the endpoint, and how to call it."""
    invoke = f"peagle deploy sagemaker invoke {d.endpoint_name} --region {d.region}"
    result = {
        "endpoint": d.endpoint_name,
        "status": what,
        "region": d.region,
        "source": d.source,
        "image": d.image,
        "model": d.served_model_name,
        "draft": d.draft.name if d.draft else None,
        "num_speculative_tokens": d.num_speculative_tokens,
        "instance_type": d.instance_type,
        "instance_count": d.instance_count,
        "invoke": invoke,
    }
    if output_format is OutputFormat.JSON:
        print(json.dumps(result, indent=2))
        return
    drafts = f"K = {d.num_speculative_tokens}" if d.speculation else "without drafts"
    print(
        f"{what}: {d.endpoint_name} in {d.region}, {d.served_model_name} ({drafts}) on "
        f"{d.instance_count} x {d.instance_type}\n"
        f"Call it:   {invoke} 'Hello'\n"
        "           or boto3's invoke_endpoint_with_response_stream with a request of OpenAI's "
        f'form and "model": "{d.served_model_name}"\n'
        f"Look:      peagle deploy sagemaker status {d.endpoint_name} --region {d.region}\n"
        f"Delete it: peagle deploy sagemaker delete {d.endpoint_name} --region {d.region}"
    )
