"""From what is wanted to the calls that make it, in order; nothing is called here.

The calls are those of SageMaker's API (CreateModel, CreateEndpointConfig, CreateEndpoint,
UpdateEndpoint and their opposites) as botocore's service model has them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from peagle.deploy.calls import Call
from peagle.deploy.container import container, is_secret_name
from peagle.deploy.deployment import (
    ENDPOINT_TAG,
    SOURCE_TAG,
    UPLOADS_TAG,
    VARIANT,
    Autoscaling,
    Current,
    Deployment,
    Secret,
)
from peagle.deploy.models import ModelSource, folder_files
from peagle.deploy.scaling import (
    DIMENSION,
    SERVICE,
    resource_of,
    scaling_calls,
    unscale_calls,
)
from peagle.deploy.uploads import Removal

HIDDEN = "********"
# Stands for the account in a plan, which asks nobody whose it is.
NO_ACCOUNT = "000000000000"
# Of CreateEndpoint's DescribeEndpoint loop: instances, image and weights come before the start-up.
_PROVISIONING_S = 1800
_MAX_CONTAINS = 40


@dataclass(frozen=True, slots=True)
class Upload:
    """A local folder that goes to S3, file by file (PutObject, or a multipart upload).

    Attributes:
        folder: here.
        bucket, prefix: there; the prefix ends with a slash.
        files: how many go, see `models.folder_files`.
        size: of all of them, in bytes.
        kms_key: encrypts them; "" leaves that to the bucket.
    """

    folder: Path
    bucket: str
    prefix: str
    files: int
    size: int
    kms_key: str = ""

    @property
    def uri(self) -> str:
        """s3://bucket/prefix/, what the containers read."""
        return f"s3://{self.bucket}/{self.prefix}"

    def parameters(self, name: str) -> dict[str, Any]:
        """Of PutObject for one file, named relative to the folder; without its content."""
        encryption = {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": self.kms_key}
        key = {"Bucket": self.bucket, "Key": self.prefix + name}
        return key | (encryption if self.kms_key else {})


@dataclass(frozen=True, slots=True)
class Wait:
    """Until the endpoint is in service: DescribeEndpoint again and again.

    Attributes:
        endpoint_name: whose status is looked at.
        timeout_s: after which waiting ends with an error.
    """

    endpoint_name: str
    timeout_s: int


# What a plan consists of; applied in order.
Step = Call | Upload | Wait | Removal


def create_calls(d: Deployment) -> list[Step]:
    """Uploads, model, endpoint configuration, endpoint, Wait, then what scales it.

    Raises:
        UserError: the deployment cannot be written as requests, see `container.environment`.
    """
    create = Call(
        "sagemaker",
        "CreateEndpoint",
        {
            "EndpointName": d.endpoint_name,
            "EndpointConfigName": d.resource_name,
            "Tags": _tags(d),
        },
        f"endpoint {d.endpoint_name!r}",
        _delete("Endpoint", d.endpoint_name),
    )
    return [*_resources(d), create, _wait(d), *_scaling(d)]


def update_calls(d: Deployment, current: Current) -> list[Step]:
    """Uploads, a new model and configuration, UpdateEndpoint, Wait; then the old ones go.

    Where the endpoint is scaled automatically and the instance type changes, scaling ends first and
    begins anew: SageMaker refuses such an update otherwise
    (https://docs.aws.amazon.com/sagemaker/latest/dg/endpoint-scaling.html).

    Raises:
        UserError: as `create_calls`.
    """
    back = {"EndpointName": d.endpoint_name, "EndpointConfigName": current.config_name}
    update = Call(
        "sagemaker",
        "UpdateEndpoint",
        {**back, "EndpointConfigName": d.resource_name},
        undo=Call("sagemaker", "UpdateEndpoint", back),
    )
    moved = current.autoscaling is not None and _instance_type(current) != d.instance_type
    unscaled = _unscaling_for_update(current) if moved else []
    before = None if moved else current.autoscaling
    policies = current.scaling_policies if before else ()
    scaled = _scaling(d, before, policies) if d.autoscaling != before else []
    old = [_delete("EndpointConfig", current.config_name)] if current.config_name else []
    old += [_delete("Model", name) for name in current.model_names]
    return [
        *_resources(d),
        *unscaled,
        update,
        *_new_tags(d, current),
        _wait(d),
        *scaled,
        *old,
        *_unused(d, current),
    ]


def delete_calls(current: Current) -> list[Step]:
    """Scaling, endpoint, configuration, models, uploads: in the reverse order of their making."""
    kinds = {"model": "Model", "endpoint configuration": "EndpointConfig"}
    found: list[Step] = [*_unscaling(current), _delete("Endpoint", current.endpoint_name)]
    if current.config_name:
        found.append(_delete("EndpointConfig", current.config_name))
    found += [_delete("Model", name) for name in current.model_names]
    leftovers = sorted(current.leftovers)  # configurations before models
    found += [_delete(kinds[kind], name) for kind, name in leftovers]
    return [*found, *map(Removal, current.uploads)]


def reading_calls(current: Current) -> list[Step]:
    """The calls that tell what is there, before an update or a deletion (`endpoints.current`)."""
    name = current.endpoint_name
    arn = f"arn:aws:sagemaker:{current.region}:{NO_ACCOUNT}:endpoint/{name.lower()}"
    similar = {"NameContains": name[:_MAX_CONTAINS]}
    variant = {"ServiceNamespace": "sagemaker", "ScalableDimension": DIMENSION}
    resource = resource_of(name, VARIANT)
    asked: list[tuple[str, str, dict[str, Any]]] = [
        ("sagemaker", "DescribeEndpoint", {"EndpointName": name}),
        ("sagemaker", "DescribeEndpointConfig", {"EndpointConfigName": current.config_name}),
        *(("sagemaker", "DescribeModel", {"ModelName": model}) for model in current.model_names),
        ("sagemaker", "ListTags", {"ResourceArn": current.endpoint.get("EndpointArn", arn)}),
        ("sagemaker", "ListEndpointConfigs", similar),
        ("sagemaker", "ListModels", similar),
        (SERVICE, "DescribeScalableTargets", {**variant, "ResourceIds": [resource]}),
        (SERVICE, "DescribeScalingPolicies", {**variant, "ResourceId": resource}),
    ]
    return [Call(*one) for one in asked]


# ---- parts ----------------------------------------------------------------------------------


def uploads(d: Deployment) -> dict[ModelSource, Upload]:
    """What goes to S3 first: the local folders, each under a prefix of this deployment."""
    places = {"target": d.target}
    if d.draft is not None and d.speculation:
        places["draft"] = d.draft
    found: dict[ModelSource, Upload] = {}
    for role, source in places.items():
        if source.kind == "local" and source not in found:
            files = folder_files(Path(source.name))
            bucket, _, key = uploads_prefix(d).removeprefix("s3://").partition("/")
            size = sum(file.stat().st_size for file in files)
            prefix = f"{key}{role}/"
            found[source] = Upload(Path(source.name), bucket, prefix, len(files), size, d.kms_key)
    return found


def uploads_prefix(d: Deployment) -> str:
    """The s3:// prefix of all that is uploaded for a deployment, what its tags say."""
    root = d.bucket if d.bucket.endswith("/") else d.bucket + "/"
    return f"{root}peagle/{d.endpoint_name}/{d.stamp}/"


def _resources(d: Deployment) -> Iterator[Step]:
    sent = uploads(d)
    uris = {source: upload.uri for source, upload in sent.items()}
    uris |= {s: s.name for s in (d.target, d.draft) if s is not None and s.kind == "s3"}
    yield from sent.values()
    model: dict[str, Any] = {
        "ModelName": d.resource_name,
        "PrimaryContainer": container(d, uris),
        "ExecutionRoleArn": d.role,
        "Tags": _tags(d),
    }
    if d.vpc is not None:
        groups = list(d.vpc.security_groups)
        model["VpcConfig"] = {"SecurityGroupIds": groups, "Subnets": list(d.vpc.subnets)}
    yield Call(
        "sagemaker",
        "CreateModel",
        model,
        f"model {d.resource_name!r}",
        _delete("Model", d.resource_name),
    )
    config: dict[str, Any] = {
        "EndpointConfigName": d.resource_name,
        "ProductionVariants": [_variant(d, mounts=_mounts(model))],
        "Tags": _tags(d),
    }
    if d.kms_key:
        config["KmsKeyId"] = d.kms_key
    yield Call(
        "sagemaker",
        "CreateEndpointConfig",
        config,
        f"endpoint configuration {d.resource_name!r}",
        _delete("EndpointConfig", d.resource_name),
    )


def _mounts(model: Mapping[str, Any]) -> bool:
    keys = ("ModelDataSource", "AdditionalModelDataSources")
    return any(key in model["PrimaryContainer"] for key in keys)


def _variant(d: Deployment, *, mounts: bool) -> dict[str, Any]:
    variant: dict[str, Any] = {
        "VariantName": VARIANT,
        "ModelName": d.resource_name,
        "InstanceType": d.instance_type,
        "InitialInstanceCount": d.instance_count,
        "InitialVariantWeight": 1.0,
        "ContainerStartupHealthCheckTimeoutInSeconds": d.startup_timeout_s,
        # An answer of many tokens occupies an instance for long: go where the fewest are.
        "RoutingConfig": {"RoutingStrategy": "LEAST_OUTSTANDING_REQUESTS"},
    }
    if mounts:
        variant["ModelDataDownloadTimeoutInSeconds"] = d.startup_timeout_s
    if d.ami is not None:
        variant["InferenceAmiVersion"] = d.ami
    return variant


def _tags(d: Deployment) -> list[dict[str, str]]:
    own = {ENDPOINT_TAG: d.endpoint_name, SOURCE_TAG: d.source}
    if uploads(d):
        own[UPLOADS_TAG] = uploads_prefix(d)
    return [{"Key": key, "Value": value} for key, value in {**d.tags, **own}.items()]


def _new_tags(d: Deployment, current: Current) -> list[Call]:
    """What the endpoint itself, which stays, is not tagged with yet."""
    arn = current.endpoint.get("EndpointArn")
    new = [tag for tag in _tags(d) if current.tags.get(tag["Key"]) != tag["Value"]]
    if not arn or not new:
        return []
    had = ((tag["Key"], current.tags.get(tag["Key"])) for tag in new)
    old = [{"Key": key, "Value": value} for key, value in had if value is not None]
    undo = Call("sagemaker", "AddTags", {"ResourceArn": arn, "Tags": old}) if old else None
    return [Call("sagemaker", "AddTags", {"ResourceArn": arn, "Tags": new}, undo=undo)]


def _unused(d: Deployment, current: Current) -> list[Removal]:
    """What was uploaded for the endpoint before, and is read no more."""
    container = current.model.get("PrimaryContainer") or {}
    sources = [container.get("ModelDataSource") or {}]
    sources += container.get("AdditionalModelDataSources") or []
    read = (source["S3DataSource"]["S3Uri"] for source in sources if "S3DataSource" in source)
    kept = {source.name for source in (d.target, d.draft if d.speculation else None) if source}
    return [Removal(u) for u in read if u not in kept and u.startswith(current.uploads)]


def _delete(kind: str, name: str) -> Call:
    return Call("sagemaker", f"Delete{kind}", {f"{kind}Name": name})


def _wait(d: Deployment) -> Wait:
    return Wait(d.endpoint_name, _PROVISIONING_S + 2 * d.startup_timeout_s)


def _scaling(
    d: Deployment, before: Autoscaling | None = None, policies: Sequence[str] = ()
) -> list[Call]:
    if d.autoscaling is None:
        return []
    return scaling_calls(d.endpoint_name, VARIANT, d.autoscaling, before, policies)


def _unscaling_for_update(current: Current) -> list[Call]:
    """What ends scaling; undone, it scales as before."""
    assert current.autoscaling is not None
    made = scaling_calls(current.endpoint_name, VARIANT, current.autoscaling)
    opposite = {call.undo.operation: call for call in made if call.undo is not None}
    return [
        replace(call, undo=replace(opposite[call.operation], creates="", undo=None))
        for call in _unscaling(current)
    ]


def _unscaling(current: Current) -> list[Call]:
    if current.autoscaling is None:
        return []
    return unscale_calls(current.endpoint_name, VARIANT, current.scaling_policies)


def _instance_type(current: Current) -> str:
    variants = current.config.get("ProductionVariants") or [{}]
    return variants[0].get("InstanceType", "")


# ---- for people -----------------------------------------------------------------------------


def shown(step: Step) -> dict[str, Any]:
    """A step as JSON for people, with secrets hidden.

    An upload is one PutObject with all the files' keys; a Wait is DescribeEndpoint, repeated; a
    removal is the listing, behind which each object is looked at, and deleted if it was uploaded
    from here.
    """
    if isinstance(step, Removal):
        bucket, prefix = step.place
        call = Call("s3", "ListObjectsV2", {"Bucket": bucket, "Prefix": prefix})
        return {**call.to_json(), "then": ["HeadObject", "DeleteObjects"]}
    if isinstance(step, Call):
        return _masked(step.to_json())
    if isinstance(step, Wait):
        call = Call("sagemaker", "DescribeEndpoint", {"EndpointName": step.endpoint_name})
        return {**call.to_json(), "until": "InService", "timeout_s": step.timeout_s}
    names = [file.relative_to(step.folder).as_posix() for file in folder_files(step.folder)]
    call = Call("s3", "PutObject", step.parameters(names[0]))
    return {
        **call.to_json(),
        "folder": str(step.folder),
        "keys": [step.prefix + name for name in names],
        "bytes": step.size,
    }


def _masked(value: Any, name: str = "") -> Any:
    """The value with what is secret, by type or by a variable's name, replaced."""
    if isinstance(value, Mapping):
        return {key: _masked(item, key) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_masked(item) for item in value]
    if isinstance(value, str) and (isinstance(value, Secret) or _is_secret(name)):
        return HIDDEN
    return value


def _is_secret(name: str) -> bool:
    # Names of variables are in capitals or have an underscore; "Key" is a tag's.
    return is_secret_name(name) and (name.isupper() or "_" in name)
