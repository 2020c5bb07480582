"""A deployment on Amazon SageMaker as data, from which `template` makes a CloudFormation stack."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from peagle.deploy.models import ModelSource
from peagle.errors import UserError

ContainerSource = Literal["managed", "native"]
CONTAINERS: tuple[ContainerSource, ...] = ("managed", "native")

VARIANT = "AllTraffic"
ENDPOINT_TAG = "peagle:endpoint"
SOURCE_TAG = "peagle:source"
MODEL_FOLDER = "/opt/ml/model/"

DEFAULT_STARTUP_TIMEOUT_S = 900
# Bounds of ContainerStartupHealthCheckTimeoutInSeconds in SageMaker's service model.
STARTUP_TIMEOUTS_S = (60, 3600)

# EndpointName of SageMaker's service model: letters, digits, single or repeated hyphens inside.
_NAME = re.compile(r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}")
MAX_NAME = 63
_ROLE = re.compile(r"arn:aws[a-z-]*:iam::(\d{12}):role/?[a-zA-Z_0-9+=,.@\-_/]+")


class Secret(str):
    """Text that goes to AWS and that peagle never prints."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'********'"


class KeptSecret(Secret):
    """The name of a parameter of the stack that keeps its present, secret value."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Vpc:
    """The network of the containers: ids of subnets and security groups."""

    subnets: tuple[str, ...]
    security_groups: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Autoscaling:
    """Target tracking: bounds of the number of instances, and the metric's value on each of them.

    `metric` is a predefined metric type of Application Auto Scaling.
    """

    min_instances: int
    max_instances: int
    target_value: float
    metric: str = "SageMakerVariantConcurrentRequestsPerModelHighResolution"


@dataclass(frozen=True, slots=True)
class Capture:
    """SageMaker's data capture, which writes requests and answers to S3.

    Attributes:
        percent: of the requests, 1 to 100.
        uri: s3:// prefix, without a slash at its end.
        kms_key: key that encrypts them; "" leaves that to the bucket.
    """

    percent: int
    uri: str
    kms_key: str = ""


@dataclass(frozen=True, slots=True)
class Transfer:
    """Files that S3 must have before CloudFormation makes the stack.

    Attributes:
        source: a local folder to upload, or a prefix in S3 to copy.
        uri: s3:// prefix of the files in S3.
        kms_key: key that encrypts them; "" leaves that to the bucket.
    """

    source: ModelSource
    uri: str
    kms_key: str = ""


@dataclass(frozen=True, slots=True)
class Deployment:
    """An endpoint with its container, model and draft head.

    Attributes:
        endpoint_name: the user's name of the endpoint.
        stamp: makes the names of parameters and uploads of this deployment unique.
        source: "managed" runs AWS's vLLM container, "native" ours.
        image: URI of the container's image; may name ${AWS::Region}.
        target: the target model, on the hub or in S3.
        role: ARN of the containers' role; "" makes the role a parameter of the template.
        instance_type, instance_count: instances of the endpoint.
        draft: the draft head, on the hub or in S3; None without one.
        speculative_config: vLLM's form of it without "model"; None decodes without drafts.
        ami: version of the hosts' image.
        startup_timeout_s: time until a container must be healthy.
        sets_count: whether an update sets the number of instances that run.
        tags: tags of all resources, beside peagle's own.
        kms_key: encrypts the hosts' volumes and the uploads; "" leaves both to AWS.
        vpc: None for SageMaker's own network.
        environment: further variables of the containers; the user's own are `Secret`.
        vllm_flags: options of vLLM by name without dashes, as text of SM_VLLM_*.
        autoscaling: None keeps the number of instances.
        alarm_topic: ARN of an SNS topic that gets alarms; "" makes no alarms.
        capture: None captures nothing.
        uploads: s3:// prefixes that peagle filled for this endpoint.
        transfers: files to upload or copy first.
    """

    endpoint_name: str
    stamp: str
    source: ContainerSource
    image: str
    target: ModelSource
    role: str
    instance_type: str
    instance_count: int = 1
    draft: ModelSource | None = None
    speculative_config: Mapping[str, Any] | None = None
    ami: str = ""
    startup_timeout_s: int = DEFAULT_STARTUP_TIMEOUT_S
    sets_count: bool = False
    tags: Mapping[str, str] = field(default_factory=dict)
    kms_key: str = ""
    vpc: Vpc | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    vllm_flags: Mapping[str, str] = field(default_factory=dict)
    autoscaling: Autoscaling | None = None
    alarm_topic: str = ""
    capture: Capture | None = None
    uploads: tuple[str, ...] = ()
    transfers: tuple[Transfer, ...] = ()

    @property
    def served_model_name(self) -> str:
        """Return the model's name in requests."""
        named = self.vllm_flags.get("served-model-name")
        return named or (self.target.name if self.target.kind == "hub" else self.endpoint_name)

    @property
    def num_speculative_tokens(self) -> int | None:
        """Return K; None without speculation."""
        return (self.speculative_config or {}).get("num_speculative_tokens")


def check_endpoint_name(name: str) -> str:
    """Return the name; UserError if SageMaker would not take it for an endpoint."""
    if _NAME.fullmatch(name) is None:
        raise UserError(
            f"The endpoint's name is {name!r}; expected 1 to {MAX_NAME} letters, digits and "
            "hyphens, with no hyphen at either end. Give another one with --name."
        )
    return name


def account_of(role: str) -> str:
    """Return the account in a role's ARN, "123456789012"; UserError for other text."""
    match = _ROLE.fullmatch(role)
    if match is None:
        raise UserError(
            f"The role is {role!r}; expected the ARN of an IAM role that SageMaker may assume, "
            "like arn:aws:iam::123456789012:role/sagemaker-execution."
        )
    return match[1]
