"""The options of `peagle deploy sagemaker create`, `update` and `plan`, and what they ask for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from peagle.cli.flags import Flag, Given, group
from peagle.errors import UserError

if TYPE_CHECKING:
    from peagle.deploy.deployment import Source
    from peagle.deploy.request import Request, ScalingAsked

ENDPOINT = group(
    "Endpoint",
    Flag("name", str, "Of the endpoint.", default="peagle-MODEL"),
    Flag(
        "source",
        str,
        "Whose container: managed (AWS's for vLLM), native (ours, see --image), jumpstart (what "
        "SageMaker's public hub says of the model).",
        default="managed, or what the catalog says",
    ),
)
PLACE = group(
    "Place",
    Flag("region", str, "Of AWS.", default="boto3's own configuration"),
    Flag(
        "role",
        str,
        "IAM role that the containers have.",
        metavar="ARN",
        default="the variable SAGEMAKER_ROLE",
    ),
    Flag(
        "instance_type",
        str,
        "Like ml.g7e.2xlarge.",
        metavar="TYPE",
        default="what the catalog says",
    ),
    Flag("instance_count", int, "How many.", default="1"),
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
        "Encrypts the hosts' volumes and what is uploaded.",
        metavar="KEY",
        default="AWS's own keys",
    ),
    Flag(
        "upload_to",
        str,
        "Where local folders are uploaded, below peagle/NAME/.",
        metavar="S3-URI",
        default="s3://sagemaker-REGION-ACCOUNT/ of the role's account",
    ),
    Flag("tag", list[str], "May be given several times.", metavar="KEY=VALUE"),
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
        "All of the above in vLLM's form, in place of --draft.",
        metavar="JSON",
    ),
)
CONTAINER = group(
    "Container",
    Flag(
        "image",
        str,
        "URI of its image; native needs one.",
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
        "Give the container this machine's Hugging Face token, for gated models. Who may describe "
        "the model in AWS can read it there.",
    ),
    Flag("accept_eula", bool, "Accept the licence of a gated model of SageMaker's hub."),
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
) -> Request:
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
    from peagle.deploy.request import Request
    from peagle.deploy.speculation import Asked

    return Request(
        model=model,
        region=region,
        name=name or given.value("name", ""),
        source=_source(given.value("source")),
        image=given.value("image"),
        ami=given.value("ami"),
        role=given.value("role"),
        kms_key=given.value("kms_key"),
        upload_to=given.value("upload_to"),
        speculative=Asked(
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
        accept_eula=bool(given.value("accept_eula")),
        scaling=_scaling(given),
    )


def _source(text: str | None) -> Source | None:
    from peagle.deploy.deployment import SOURCES

    if text is None:
        return None
    for source in SOURCES:
        if source == text:
            return source
    raise UserError(f"--source is {text!r}; expected one of {', '.join(SOURCES)}.")


def _hub_token() -> str:
    from huggingface_hub import get_token

    token = get_token()
    if not token:
        raise UserError(
            "--pass-hf-token: no Hugging Face token is known here; set HF_TOKEN, or run "
            "`hf auth login`."
        )
    return token


def _scaling(given: Given) -> ScalingAsked | None:
    from peagle.deploy.request import ScalingAsked

    most, others = given.value("max_instances"), ("min_instances", "scale_target", "scale_from")
    if most is not None:
        asked = (given.value("min_instances", 1), *map(given.value, others[1:]))
        return ScalingAsked(most, *asked)
    if named := next((key for key in others if key in given), None):
        raise UserError(
            f"{given[named].source} is given without --max-instances; expected the most instances "
            "too."
        )
    return None


def region_of(given: Given) -> str:
    """The region, without a network and without credentials.

    Raises:
        UserError: none is known.
    """
    found = given.value("region") or os.environ.get("AWS_DEFAULT_REGION") or _configured_region()
    if not found:
        raise UserError(
            "No AWS region is known. Give it with --region, in the variable AWS_DEFAULT_REGION, or "
            "in ~/.aws/config."
        )
    return found


def _configured_region() -> str | None:
    try:
        import boto3
        from botocore.exceptions import BotoCoreError
    except ImportError:
        return None
    try:
        return boto3.Session().region_name
    except BotoCoreError:
        return None
