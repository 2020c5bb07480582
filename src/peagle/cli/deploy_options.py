"""The options that the commands of `peagle deploy sagemaker` share, and how they are read."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from peagle.cli.flags import Flag, Given, group
from peagle.cli.options import OutputFormat
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
Variant = Annotated[
    str | None, typer.Option(help="Production variant of the endpoint.", show_default="all")
]

ENDPOINT = group(
    "Endpoint",
    Flag("name", str, "Name of the endpoint.", default="peagle-MODEL"),
    Flag(
        "source",
        str,
        "Container: managed (AWS's for vLLM) or native (ours, see --image).",
        default="managed, or what the catalog says",
    ),
)
PLACE = group(
    "Place",
    Flag("region", str, "AWS region.", default="boto3's own configuration"),
    Flag(
        "role",
        str,
        "IAM role of the containers.",
        metavar="ARN",
        default="the variable SAGEMAKER_ROLE",
    ),
    Flag(
        "instance_type",
        str,
        "Instance type, like ml.g7e.2xlarge.",
        metavar="TYPE",
        default="what the catalog says",
    ),
    Flag("instance_count", int, "Number of instances.", default="1"),
    Flag(
        "subnet",
        list[str],
        "Subnet of the VPC that the containers are in; may be given several times.",
        metavar="ID",
        default="SageMaker's own network",
    ),
    Flag(
        "security_group",
        list[str],
        "Security group of the VPC; may be given several times.",
        metavar="ID",
    ),
    Flag(
        "kms_key",
        str,
        "KMS key for the hosts' volumes and for uploads.",
        metavar="KEY",
        default="AWS's own keys",
    ),
    Flag(
        "upload_to",
        str,
        "S3 prefix for uploads, which go below peagle/NAME/.",
        metavar="S3-URI",
        default="s3://sagemaker-REGION-ACCOUNT/ of the role's account",
    ),
    Flag(
        "tag", list[str], "Tag of all resources; may be given several times.", metavar="KEY=VALUE"
    ),
    Flag(
        "alarm_topic",
        str,
        "SNS topic that gets alarms on failures and, with native, on drifting acceptance.",
        metavar="ARN",
        default="no alarms",
    ),
    Flag(
        "catalog",
        list[Path],
        "A catalog of your own (`peagle catalog --help`); may be given several times.",
        metavar="FILE",
    ),
)
SPECULATION = group(
    "Speculation",
    Flag(
        "speculation",
        bool,
        "Draft with a head, or decode plainly.",
        "--speculation/--no-speculation",
        default="with a head, where one is known",
    ),
    Flag(
        "draft",
        str,
        "The head, P-EAGLE or EAGLE-3: hub id, s3:// prefix or a folder here.",
        metavar="MODEL",
        default="the catalog's",
    ),
    Flag(
        "num_speculative_tokens",
        int,
        "K: draft tokens per step.",
        short="-k",
        default="the catalog's, else 7",
    ),
    Flag(
        "speculative_config",
        str,
        "Speculative configuration in vLLM's form, in place of --draft.",
        metavar="JSON",
    ),
)
CONTAINER = group(
    "Container",
    Flag(
        "image",
        str,
        "URI of the container's image; native needs one.",
        metavar="URI",
        default="the managed vLLM container's",
    ),
    Flag(
        "ami",
        str,
        "Image of the hosts, which brings the GPU driver.",
        metavar="VERSION",
        default="by the CUDA version in the image's tag",
    ),
    Flag(
        "startup_timeout",
        int,
        "Seconds until a container must be healthy, 60 to 3600.",
        metavar="SECONDS",
        default="900",
    ),
    Flag(
        "env",
        list[str],
        "Variable of the container; a name alone takes its value here. May be given several times.",
        metavar="NAME[=VALUE]",
    ),
    Flag(
        "vllm_flag",
        list[str],
        "Option of vLLM, like max-model-len=8192; may be given several times, or write the options "
        "behind --.",
        metavar="NAME[=VALUE]",
    ),
    Flag(
        "pass_hf_token",
        bool,
        "Give the container this machine's Hugging Face token, for gated models; Secrets Manager "
        "keeps it. Whoever may describe the model in AWS can read it there.",
    ),
)
SCALING = group(
    "Automatic scaling",
    Flag("min_instances", int, "Fewest instances.", default="1"),
    Flag("max_instances", int, "Most instances; turns scaling on.", default="no scaling"),
    Flag(
        "scale_target",
        float,
        "Requests at once that one instance should have.",
        metavar="NUMBER",
        default="what --scale-from says",
    ),
    Flag(
        "scale_from",
        Path,
        "A measured curve: tune.json of `peagle tune`, or throughput.json of `peagle bench`.",
        metavar="FILE",
    ),
)
CHANGES = (*PLACE, *SPECULATION, *CONTAINER, *SCALING)
ALL = (*ENDPOINT, *CHANGES)


def read_request(
    given: Given, model: str, region: str, vllm: Sequence[str], *, name: str = ""
) -> DeploymentRequest:
    """What the options ask for.

    Args:
        given: the options.
        model: the positional argument, "" where the model stays.
        region: of AWS.
        vllm: a command line of vLLM, what stood behind --.
        name: of an endpoint that is there.

    Raises:
        UserError: an option's value cannot be read.
    """
    from peagle.deploy.container import flags_from
    from peagle.deploy.request import DeploymentRequest
    from peagle.deploy.speculation import SpeculationOptions

    most, others = given.value("max_instances"), ("min_instances", "scale_target", "scale_from")
    named = next((key for key in others if key in given), None)
    if most is None and named is not None:
        raise UserError(
            f"{given[named].source} is given without --max-instances; expected the most instances "
            "too."
        )
    return DeploymentRequest(
        model=model,
        region=region,
        name=name or given.value("name", ""),
        source=given.value("source"),
        image=given.value("image"),
        ami=given.value("ami"),
        role=given.value("role"),
        kms_key=given.value("kms_key"),
        alarm_topic=given.value("alarm_topic"),
        upload_to=given.value("upload_to"),
        speculation=SpeculationOptions(
            given.value("speculation"),
            given.value("draft"),
            given.value("num_speculative_tokens"),
            given.value("speculative_config"),
        ),
        instance_type=given.value("instance_type"),
        instance_count=given.value("instance_count"),
        startup_timeout_s=given.value("startup_timeout"),
        tags=tuple(given.value("tag", ())),
        env=tuple(given.value("env", ())),
        subnets=tuple(given.value("subnet", ())),
        security_groups=tuple(given.value("security_group", ())),
        vllm_flags=flags_from(given.value("vllm_flag", []), list(vllm)),
        hf_token=_hub_token() if given.value("pass_hf_token") else None,
        min_instances=given.value("min_instances", 1),
        max_instances=most,
        scale_target=given.value("scale_target"),
        scale_from=given.value("scale_from"),
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
    """The catalog, with the user's own files."""
    from peagle.deploy.catalog import load_catalog

    return load_catalog(given.value("catalog", []))


def offline_lookups(given: Given) -> Lookups:
    """Lookups that read local files alone."""
    from peagle.deploy.request import Lookups

    return Lookups(load_entries(given))


def region_of(given: Given) -> str:
    """The region, without a network and without credentials; "" where none is known."""
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
    """The time and random letters: two changes of one second stay apart."""
    return f"{time.strftime('%Y%m%d%H%M%S', time.gmtime())}-{secrets.token_hex(2)}"


@contextmanager
def leftovers_printed(output_format: OutputFormat) -> Iterator[None]:
    """Within, an error that leaves something behind is also printed as JSON, if that was asked for.

    One object on standard output: error, and stayed, a list of what, command and reason.
    """
    from peagle.deploy.stack import Unfinished

    try:
        yield
    except Unfinished as error:
        if output_format is OutputFormat.JSON:
            stayed = [asdict(one) for one in error.stayed]
            print(json.dumps({"error": error.cause, "stayed": stayed}, indent=2))
        raise
