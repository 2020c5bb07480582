"""What a user asks of a deployment: the options, and what single ones of them mean."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peagle.deploy import scaling
from peagle.deploy.catalog import CatalogEntry, ReadSize
from peagle.deploy.curve import Bounds, capacity, read_curves
from peagle.deploy.deployment import Autoscaling, Secret, Source, Vpc, role_account
from peagle.deploy.heads import HeadFacts
from peagle.deploy.models import ModelSource, s3_prefix
from peagle.deploy.speculation import Asked
from peagle.errors import UserError

ROLE_VARIABLE = "SAGEMAKER_ROLE"
_TAG = re.compile(r"[\w\s.:/=+@-]*")
_OWN_TAGS = ("aws:", "peagle:")
# Bounds of VpcConfig and of tags in SageMaker's service model.
_MAX_SUBNETS, _MAX_GROUPS, _MAX_TAGS = 16, 5, 46


@dataclass(frozen=True, slots=True)
class ScalingAsked:
    """Automatic scaling, as it was asked for.

    Attributes:
        max_instances, min_instances: bounds.
        target: requests at once on an instance; None takes the curve's.
        curve: file of a measured curve, see `deploy.curve`.
    """

    max_instances: int
    min_instances: int = 1
    target: float | None = None
    curve: Path | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """What the user said; None, "" and empty where nothing was said.

    Attributes:
        model: a catalog name, a hub id, an s3:// prefix or a folder; "" in an update that keeps it.
        name: of the endpoint; "" makes one of the model's.
        region: of AWS, known by now.
        source: whose container.
        image, ami, role, kms_key, upload_to: as in `Deployment` (upload_to is its bucket).
        speculative: of speculation.
        instance_type, instance_count, startup_timeout_s: as in `Deployment`.
        tags, env: "NAME=VALUE" each; a variable without "=" takes the value it has here.
        subnets, security_groups: of the VPC.
        vllm_flags: as in `Deployment`.
        hf_token: that the container gets as HF_TOKEN.
        accept_eula: --accept-eula.
        scaling: automatic scaling.
    """

    model: str
    region: str
    name: str = ""
    source: Source | None = None
    image: str | None = None
    ami: str | None = None
    role: str | None = None
    kms_key: str | None = None
    upload_to: str | None = None
    speculative: Asked = field(default_factory=Asked)
    instance_type: str | None = None
    instance_count: int | None = None
    startup_timeout_s: int | None = None
    tags: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    subnets: tuple[str, ...] = ()
    security_groups: tuple[str, ...] = ()
    vllm_flags: Mapping[str, str] = field(default_factory=dict)
    hf_token: str | None = None
    accept_eula: bool = False
    scaling: ScalingAsked | None = None


@dataclass(frozen=True, slots=True)
class Lookups:
    """What is asked of others while a request is read.

    Attributes:
        entries: of the catalog.
        read_head: what a head's files say; None if they are not looked at.
        check_target: raises UserError if a head is of another target.
        ask_hub: SageMaker's hub's answer about a model id; None if it is not asked, or refuses.
        environ: variables of this process.
        read_size: sizes of a model on the hub; None if it is not looked at.
    """

    entries: dict[str, CatalogEntry]
    read_head: Callable[[ModelSource], HeadFacts | None]
    check_target: Callable[[HeadFacts, ModelSource, ModelSource], None]
    ask_hub: Callable[[str], Mapping[str, Any] | None]
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    read_size: ReadSize = lambda _: None


# ---- single options -------------------------------------------------------------------------


def role_of(request: Request, lookups: Lookups) -> str:
    """The ARN of the role.

    Raises:
        UserError: there is none, or it is no ARN of a role.
    """
    role = request.role or lookups.environ.get(ROLE_VARIABLE, "")
    if not role:
        raise UserError(
            "No role: SageMaker needs the ARN of an IAM role that may read the image and the "
            f"model. Give --role, or set {ROLE_VARIABLE}."
        )
    role_account(role)
    return role


def bucket_of(request: Request, role: str) -> str:
    """Where uploads go: as told, else SageMaker's usual bucket of the role's account.

    Raises:
        UserError: no prefix in S3, or no role.
    """
    if request.upload_to:
        return s3_prefix(request.upload_to, "--upload-to")
    return f"s3://sagemaker-{request.region}-{role_account(role)[1]}/"


def vpc_of(request: Request) -> Vpc | None:
    """The network; None for SageMaker's own.

    Raises:
        UserError: subnets without security groups or the other way round, or too many.
    """
    subnets, groups = request.subnets, request.security_groups
    if not subnets and not groups:
        return None
    if not (1 <= len(subnets) <= _MAX_SUBNETS and 1 <= len(groups) <= _MAX_GROUPS):
        raise UserError(
            f"The VPC has {len(subnets)} subnets and {len(groups)} security groups; expected 1 to "
            f"{_MAX_SUBNETS} of --subnet and 1 to {_MAX_GROUPS} of --security-group."
        )
    return Vpc(subnets, groups)


def tags_of(pairs: tuple[str, ...]) -> dict[str, str]:
    """Tags of KEY=VALUE pairs.

    Raises:
        UserError: no such pair, or a key or value that AWS refuses.
    """
    tags: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        fits = 1 <= len(key) <= 128 and len(value) <= 256 and _TAG.fullmatch(key + value)
        if not equals or not fits or key.startswith(_OWN_TAGS):
            raise UserError(
                f"--tag is {pair!r}; expected KEY=VALUE of letters, digits, spaces and _.:/=+-@, "
                f"and a key that does not begin with {' or '.join(_OWN_TAGS)}."
            )
        tags[key] = value
    if len(tags) > _MAX_TAGS:
        raise UserError(f"There are {len(tags)} tags; expected at most {_MAX_TAGS}.")
    return tags


def environment_of(request: Request, lookups: Lookups) -> dict[str, str]:
    """Further variables of the container, whose values are never shown.

    A secret may have any name, DATABASE_URL for one.

    Raises:
        UserError: a name alone that is not set here.
    """
    found: dict[str, str] = {}
    for pair in request.env:
        name, equals, value = pair.partition("=")
        if not equals:
            if name not in lookups.environ:
                raise UserError(
                    f"--env names {name!r}, which is not set here; expected NAME=VALUE, or the "
                    "name of a variable that is."
                )
            value = lookups.environ[name]
        found[name] = Secret(value)
    if request.hf_token:
        found["HF_TOKEN"] = Secret(request.hf_token)
    return found


def autoscaling_of(asked: ScalingAsked | None, k: int) -> Autoscaling | None:
    """Bounds and target, the target of the curve at K (0 without drafts).

    Raises:
        UserError: no target or two, a curve that was not measured as it is deployed, bad bounds.
    """
    if asked is None:
        return None
    least, most, target = asked.min_instances, asked.max_instances, asked.target
    if not 1 <= least <= most:
        raise UserError(
            f"--min-instances is {least} and --max-instances is {most}; expected "
            "1 <= --min-instances <= --max-instances."
        )
    if target is not None and asked.curve is not None:
        raise UserError("--scale-target and --scale-from contradict each other; leave one out.")
    if asked.curve is not None:
        target = capacity(read_curves(asked.curve, k=k), Bounds()).target("concurrency")
    if target is None or not target > 0:
        raise UserError(
            f"--max-instances is given, and the target is {target}: give --scale-from a measured "
            "curve (tune.json of `peagle tune`), or the requests at once on an instance with "
            "--scale-target, a number above 0."
        )
    return scaling.check(Autoscaling(least, most, target))
