"""The options that the commands of `peagle deploy sagemaker` share, and their readers."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Annotated

import typer

from peagle.cli import groups
from peagle.cli.flags import Given, group, pick_flags
from peagle.cli.groups import OutputFormat
from peagle.errors import UserError

if TYPE_CHECKING:
    from peagle.deploy.catalog import CatalogEntry
    from peagle.deploy.request import DeploymentRequest, Lookups

EndpointName = Annotated[
    str, typer.Argument(metavar="ENDPOINT", help="Name of the endpoint.", show_default=False)
]
Region = Annotated[
    str | None, typer.Option(help="AWS region.", show_default="boto3's own configuration")
]
Wait = Annotated[
    bool,
    typer.Option("--wait/--no-wait", help="Return once the endpoint serves, or once it is begun."),
]
Variant = Annotated[
    str | None, typer.Option(help="Production variant of the endpoint.", show_default="all")
]

ENDPOINT = group(
    "Endpoint",
    """
    --name TEXT
        Name of the endpoint. [default: peagle-MODEL]
    --source TEXT
        Container: managed (AWS's for vLLM) or native (ours, see --image). [default:
        managed, or what the catalog says]
    """,
)
PLACE = group(
    "Place",
    """
    --region TEXT
        AWS region. [default: boto3's own configuration]
    --role ARN
        IAM role of the containers. [default: the variable SAGEMAKER_ROLE]
    --instance-type TYPE
        Instance type, like ml.g7e.2xlarge. [default: what the catalog says]
    --instance-count INT
        Number of instances. [default: 1]
    --subnet ID ... = subnets
        Subnet of the VPC that the containers are in; may be given several times. [default:
        SageMaker's own network]
    --security-group ID ... = security_groups
        Security group of the VPC; may be given several times.
    --kms-key KEY
        KMS key for the hosts' volumes and for uploads. [default: AWS's own keys]
    --upload-to S3-URI
        S3 prefix for uploads, which go below peagle/NAME/. [default:
        s3://sagemaker-REGION-ACCOUNT/ of the role's account]
    --tag KEY=VALUE ... = tags
        Tag of all resources; may be given several times.
    --alarm-topic ARN
        SNS topic that gets alarms on failures and, with native, on drifting acceptance.
        [default: no alarms]
    --catalog FILE:PATH ...
        A catalog of your own (`peagle catalog --help`); may be given several times.
    """,
)
SPECULATION = group(
    "Speculation",
    """
    --speculation/--no-speculation
        Draft with a head, or decode plainly. [default: with a head, where one is known]
    --draft MODEL
        The head, P-EAGLE or EAGLE-3: hub id, s3:// prefix or a folder here. [default: the
        catalog's]
    -k, --num-speculative-tokens INT
        K: draft tokens per step. [default: the catalog's, else 7]
    --speculative-config JSON
        Speculative configuration in vLLM's form, in place of --draft.
    """,
)
TREES = pick_flags(groups.SPECULATION, groups.TREES)  # for native containers
CONTAINER = group(
    "Container",
    """
    --image URI
        URI of the container's image; native needs one. [default: the managed vLLM
        container's]
    --ami VERSION
        Image of the hosts, which brings the GPU driver. [default: by the CUDA version in
        the image's tag]
    --startup-timeout SECONDS:INT = startup_timeout_s
        Seconds until a container must be healthy, 60 to 3600. [default: 900]
    --env NAME[=VALUE] ...
        Variable of the container; a name alone takes its value here. May be given several
        times.
    --vllm-flag NAME[=VALUE] ...
        Option of vLLM, like max-model-len=8192; may be given several times, or write the
        options behind --.
    --pass-hf-token
        Give the container this machine's Hugging Face token, for gated models; Secrets
        Manager keeps it. Whoever may describe the model in AWS can read it there.
    """,
)
SCALING = group(
    "Automatic scaling",
    """
    --min-instances INT
        Fewest instances. [default: 1]
    --max-instances INT
        Most instances; turns scaling on. [default: no scaling]
    --scale-target NUMBER:FLOAT
        Requests at once that one instance should have. [default: what --scale-from says]
    --scale-from FILE:PATH
        A measured curve: tune.json of `peagle tune`, or throughput.json of `peagle bench`.
    """,
)
CAPTURE = group(
    "Data capture",
    """
    --capture-share SHARE:FLOAT
        Share of the requests that SageMaker writes to S3 with their answers, as training
        data; 0 to 1 in whole percent. [default: nothing is captured]
    --capture-to S3-URI
        S3 prefix for them. [default: peagle/NAME/capture below the prefix for uploads]
    --capture-kms-key ARN
        KMS key that encrypts them. [default: what the bucket says]
    """,
)
UPDATE_OPTIONS = (*PLACE, *SPECULATION, *TREES, *CONTAINER, *SCALING, *CAPTURE)
ALL_OPTIONS = (*ENDPOINT, *UPDATE_OPTIONS)


def read_request(
    given: Given, model: str, region: str, vllm: Sequence[str], *, name: str = ""
) -> DeploymentRequest:
    """Return the options as a request; `vllm` is the command line behind --."""
    from peagle.deploy.container import flags_from
    from peagle.deploy.request import DeploymentRequest
    from peagle.deploy.speculation import SpeculationFlags

    others = ("min_instances", "scale_target", "scale_from")
    named = next((key for key in others if key in given), None)
    if "max_instances" not in given and named is not None:
        raise UserError(
            f"{given[named].source} is given without --max-instances; expected the most instances "
            "too."
        )
    keys = {field.name for field in fields(DeploymentRequest)} & given.keys()
    values = {key: given.value(key) for key in keys}
    values |= {key: tuple(value) for key, value in values.items() if isinstance(value, list)}
    speculation = SpeculationFlags(
        given.value("speculation"),
        given.value("draft"),
        given.value("num_speculative_tokens"),
        given.value("speculative_config"),
        given.value(groups.TREES),
    )
    values |= {"model": model, "region": region, "speculation": speculation}
    values |= {"name": name} if name else {}
    return DeploymentRequest(
        vllm_flags=flags_from(given.value("vllm_flag", []), list(vllm)),
        hf_token=_hub_token() if given.value("pass_hf_token") else None,
        **values,
    )


def _hub_token() -> str:
    from huggingface_hub import get_token

    token = get_token()
    if not token:
        raise UserError(
            "--pass-hf-token: no Hugging Face token is known here; set HF_TOKEN, or run "
            "`hf auth login`."
        )
    return token


def load_entries(given: Given) -> dict[str, CatalogEntry]:
    """Load the catalog with the user's own files."""
    from peagle.deploy.catalog import load_catalog

    return load_catalog(given.value("catalog", []))


def offline_lookups(given: Given) -> Lookups:
    """Return lookups that read only local files."""
    from peagle.deploy.request import Lookups

    return Lookups(load_entries(given))


def region_of(given: Given) -> str:
    """Return the configured region without a network or credentials; "" if there is none."""
    found = given.value("region") or os.environ.get("AWS_DEFAULT_REGION")
    if found:
        return found
    try:
        import boto3
        from botocore.exceptions import BotoCoreError
    except ImportError:
        return ""
    try:
        return boto3.Session().region_name or ""
    except BotoCoreError:
        return ""


def new_stamp() -> str:
    """Return the time with random letters, which tell two changes in one second apart."""
    return f"{time.strftime('%Y%m%d%H%M%S', time.gmtime())}-{secrets.token_hex(2)}"


@contextmanager
def leftovers_printed(output_format: OutputFormat) -> Iterator[None]:
    """If the output is JSON, print an error that leaves resources behind as JSON too.

    The object on standard output has the error, and `stayed`, a list with kind, command and reason.
    """
    from peagle.deploy.stack import Unfinished

    try:
        yield
    except Unfinished as error:
        if output_format is OutputFormat.JSON:
            stayed = [asdict(one) for one in error.stayed]
            print(json.dumps({"error": error.cause, "stayed": stayed}, indent=2))
        raise
