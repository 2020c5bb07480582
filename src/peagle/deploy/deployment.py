"""One deployment on Amazon SageMaker as data: what is wanted, and what is there."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from peagle.deploy.models import ModelSource
from peagle.errors import UserError

Source = Literal["native", "managed", "jumpstart"]
SOURCES: tuple[Source, ...] = ("native", "managed", "jumpstart")

VARIANT = "AllTraffic"
ENDPOINT_TAG = "peagle:endpoint"
SOURCE_TAG = "peagle:source"
UPLOADS_TAG = "peagle:uploads"
DRAFT_CHANNEL = "drafter"

DEFAULT_STARTUP_TIMEOUT_S = 900
# Bounds of ContainerStartupHealthCheckTimeoutInSeconds in SageMaker's service model.
STARTUP_TIMEOUTS_S = (60, 3600)

# EndpointName of SageMaker's service model: letters, digits, single or repeated hyphens inside.
_NAME = re.compile(r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}")
MAX_NAME = 63
_ROLE = re.compile(r"arn:(aws[a-z-]*):iam::(\d{12}):role/?[a-zA-Z_0-9+=,.@\-_/]+")


class Secret(str):
    """Text that is sent, and never shown: `repr` hides it, and so does what `plan` prints."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'********'"


@dataclass(frozen=True, slots=True)
class Vpc:
    """The network of the containers: ids of subnets and of security groups."""

    subnets: tuple[str, ...]
    security_groups: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Autoscaling:
    """Target tracking of the number of instances.

    Attributes:
        min_instances, max_instances: bounds of the number of instances.
        target_value: of the metric, per instance; with concurrent requests, how many of them.
        metric: predefined metric type of Application Auto Scaling.
    """

    min_instances: int
    max_instances: int
    target_value: float
    metric: str = "SageMakerVariantConcurrentRequestsPerModelHighResolution"


@dataclass(frozen=True, slots=True)
class HubModel:
    """What SageMaker's public hub says of a model, as far as a deployment takes it over.

    Attributes:
        name: in the hub.
        environment: variables of the container.
        data: S3DataSource of the model's files; None where the container fetches them.
        additional: (channel, S3DataSource) of further files, heads for one.
        gated: whether its licence must be accepted.
    """

    name: str
    environment: Mapping[str, str] = field(default_factory=dict)
    data: Mapping[str, Any] | None = None
    additional: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    gated: bool = False

    def model_data(self, accept_eula: bool) -> dict[str, Any]:
        """ModelDataSource of CreateModel's container, {} without files."""
        if self.data is None:
            return {}
        return {"ModelDataSource": {"S3DataSource": self._source(self.data, accept_eula)}}

    def channels(self, accept_eula: bool) -> list[dict[str, Any]]:
        """AdditionalModelDataSources of CreateModel's container."""
        return [
            {"ChannelName": name, "S3DataSource": self._source(data, accept_eula)}
            for name, data in self.additional
        ]

    def _source(self, data: Mapping[str, Any], accept_eula: bool) -> dict[str, Any]:
        access = {"ModelAccessConfig": {"AcceptEula": True}} if self.gated and accept_eula else {}
        return {**data, **access}


@dataclass(frozen=True, slots=True)
class Deployment:
    """What is wanted. `plan.create_calls` makes the calls of it; nothing here is looked up.

    Attributes:
        endpoint_name: the user's name of the endpoint.
        region: of AWS, "us-east-1".
        stamp: suffix of the names of model and endpoint configuration, the time in UTC.
        source: whose container runs: ours, the managed vLLM container, or what the hub names.
        image: URI of the container's image.
        target: where the target model is.
        draft: where the head is; None without speculation, or with a method that needs none.
        speculative_config: vLLM's form of it without "model"; None decodes without drafts.
        instance_type, instance_count: where it runs.
        role: ARN of the role that the containers have.
        ami: version of the hosts' image; None leaves it to SageMaker.
        startup_timeout_s: until a container must be healthy.
        bucket: s3:// prefix under which local folders are uploaded; "" where there are none.
        tags: of all three resources, beside those that peagle adds.
        kms_key: encrypts the hosts' volumes and what is uploaded; "" leaves both to AWS.
        vpc: None for SageMaker's own network.
        environment: further variables of the containers; those that the user gave are `Secret`.
        vllm_flags: options of vLLM by name without dashes, as text of SM_VLLM_*.
        autoscaling: None keeps the number of instances.
        accept_eula: the user accepts the licence of a gated model.
        hub_model: with the source "jumpstart": image and files are the hub's.
    """

    endpoint_name: str
    region: str
    stamp: str
    source: Source
    image: str
    target: ModelSource
    role: str
    instance_type: str
    instance_count: int = 1
    draft: ModelSource | None = None
    speculative_config: Mapping[str, Any] | None = None
    ami: str | None = None
    startup_timeout_s: int = DEFAULT_STARTUP_TIMEOUT_S
    bucket: str = ""
    tags: Mapping[str, str] = field(default_factory=dict)
    kms_key: str = ""
    vpc: Vpc | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    vllm_flags: Mapping[str, str] = field(default_factory=dict)
    autoscaling: Autoscaling | None = None
    accept_eula: bool = False
    hub_model: HubModel | None = None

    @property
    def resource_name(self) -> str:
        """The name of the model and of the endpoint configuration: unique by its time stamp."""
        room = MAX_NAME - 1 - len(self.stamp)
        return f"{self.endpoint_name[:room].rstrip('-')}-{self.stamp}"

    @property
    def served_model_name(self) -> str:
        """What requests call the model."""
        named = self.vllm_flags.get("served-model-name")
        return named or (self.target.name if self.target.kind == "hub" else self.endpoint_name)

    @property
    def speculation(self) -> bool:
        """Whether drafts are made."""
        return self.speculative_config is not None

    @property
    def num_speculative_tokens(self) -> int | None:
        """K; None without speculation, or where the container's default holds."""
        return (self.speculative_config or {}).get("num_speculative_tokens")


@dataclass(frozen=True, slots=True)
class Current:
    """What is there: an endpoint as AWS describes it.

    Attributes:
        endpoint_name, region: of the endpoint.
        status: EndpointStatus, "InService".
        config_name: of the endpoint configuration it runs with; "" where it has none any more.
        model_names: of that configuration's variants.
        endpoint: DescribeEndpoint's answer.
        config: DescribeEndpointConfig's answer; empty where it is gone.
        model: DescribeModel's answer for the first model; empty where it is gone.
        tags: of the endpoint.
        autoscaling: what is registered for it; None for none.
        scaling_policies: names of its scaling policies.
        uploads: s3:// prefixes that were uploaded for it.
        leftovers: (kind, name) of further models and configurations with the endpoint's tag, kind
            "model" or "endpoint configuration".
    """

    endpoint_name: str
    region: str
    status: str
    config_name: str = ""
    model_names: tuple[str, ...] = ()
    endpoint: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    autoscaling: Autoscaling | None = None
    scaling_policies: tuple[str, ...] = ()
    uploads: tuple[str, ...] = ()
    leftovers: tuple[tuple[str, str], ...] = ()


def check_endpoint_name(name: str) -> str:
    """The name, if SageMaker takes it for an endpoint.

    Raises:
        UserError: it does not.
    """
    if _NAME.fullmatch(name) is None:
        raise UserError(
            f"The endpoint's name is {name!r}; expected 1 to {MAX_NAME} letters, digits and "
            "hyphens, with no hyphen at either end. Give another one with --name."
        )
    return name


def role_account(role: str) -> tuple[str, str]:
    """Partition and account of a role's ARN, ("aws", "123456789012").

    Raises:
        UserError: it is no ARN of a role.
    """
    match = _ROLE.fullmatch(role)
    if match is None:
        raise UserError(
            f"The role is {role!r}; expected the ARN of an IAM role that SageMaker may assume, "
            "like arn:aws:iam::123456789012:role/sagemaker-execution."
        )
    return match[1], match[2]
