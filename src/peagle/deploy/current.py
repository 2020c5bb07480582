"""From a deployment that is there back to what was wanted: what an update starts from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from peagle.deploy.container import PREFIX, SPECULATIVE, draft_path, is_secret_name, runner
from peagle.deploy.deployment import (
    DEFAULT_STARTUP_TIMEOUT_S,
    DRAFT_CHANNEL,
    SOURCE_TAG,
    SOURCES,
    Current,
    Deployment,
    HubModel,
    Secret,
    Source,
    Vpc,
)
from peagle.deploy.models import ModelSource
from peagle.deploy.monitoring import container_environment
from peagle.errors import UserError

_OUR_TAGS = "peagle:"
_MODEL = PREFIX + "MODEL"
_REVISION = PREFIX + "REVISION"
_HUB_MODEL = "HF_MODEL_ID"


def deployed(current: Current, stamp: str, bucket: str = "") -> Deployment:
    """The deployment that would be created as this one was; its stamp and bucket are new.

    Raises:
        UserError: it was not made by peagle, or its model or configuration is gone.
    """
    source = current.tags.get(SOURCE_TAG)
    if source not in SOURCES or not current.config or not current.model:
        raise UserError(
            f"The endpoint {current.endpoint_name!r} cannot be updated from here: it was not made "
            "by `peagle deploy sagemaker create`, or its model or its configuration is gone. "
            "Create a new one."
        )
    variant, model = current.config["ProductionVariants"][0], current.model
    container: Mapping[str, Any] = model.get("PrimaryContainer") or {}
    variables = dict(container.get("Environment") or {})
    for name in container_environment("", ""):
        variables.pop(name, None)
    config = _speculative(variables.pop(SPECULATIVE, None))
    for name, value in runner(source, config).items():
        if variables.get(name) == value:
            del variables[name]
    channels = {
        channel["ChannelName"]: channel["S3DataSource"]
        for channel in container.get("AdditionalModelDataSources") or ()
    }
    hub = _hub_model(current, container, variables, channels) if source == "jumpstart" else None
    target = _target(current, container, variables)
    draft = _draft(config, channels)
    vpc = model.get("VpcConfig")
    return Deployment(
        endpoint_name=current.endpoint_name,
        region=current.region,
        stamp=stamp,
        source=_source(source),
        image=container.get("Image", ""),
        target=target,
        role=model["ExecutionRoleArn"],
        instance_type=variant["InstanceType"],
        instance_count=_count(current, variant),
        draft=draft,
        speculative_config=config,
        ami=variant.get("InferenceAmiVersion"),
        startup_timeout_s=variant.get(
            "ContainerStartupHealthCheckTimeoutInSeconds", DEFAULT_STARTUP_TIMEOUT_S
        ),
        bucket=bucket,
        tags={k: v for k, v in current.tags.items() if not k.startswith(_OUR_TAGS)},
        kms_key=current.config.get("KmsKeyId", ""),
        vpc=Vpc(tuple(vpc["Subnets"]), tuple(vpc["SecurityGroupIds"])) if vpc else None,
        environment={} if hub else _hidden({k: v for k, v in variables.items() if not _ours(k)}),
        vllm_flags={} if hub else _flags(variables),
        autoscaling=current.autoscaling,
        accept_eula=bool(hub and hub.gated),
        hub_model=hub,
    )


def _source(text: str) -> Source:
    return next(source for source in SOURCES if source == text)


def _count(current: Current, variant: Mapping[str, Any]) -> int:
    """Instances as they are now wanted: scaling may have changed what the configuration says."""
    running = (current.endpoint.get("ProductionVariants") or [{}])[0]
    return running.get("DesiredInstanceCount") or variant["InitialInstanceCount"]


def _speculative(text: str | None) -> dict[str, Any] | None:
    """The configuration that runs; with a "model" only where the head is in no channel."""
    if text is None:
        return None
    try:
        data = json.loads(text)
    except json.JSONDecodeError:
        data = None
    if not isinstance(data, dict):
        raise UserError(f"The endpoint's {SPECULATIVE} is {text!r}, not a JSON object.")
    return data


def _draft(config: dict[str, Any] | None, channels: Mapping[str, Any]) -> ModelSource | None:
    """Where the head is, taken out of the configuration; None where a file of the image has it."""
    name = (config or {}).get("model")
    if config is None or name is None:
        return None
    if name == draft_path() and DRAFT_CHANNEL in channels:
        del config["model"]
        return ModelSource("s3", channels[DRAFT_CHANNEL]["S3Uri"])
    if name.startswith("/"):
        return None
    del config["model"]
    return ModelSource("hub", name, config.pop("revision", None))


def _target(
    current: Current, container: Mapping[str, Any], variables: Mapping[str, str]
) -> ModelSource:
    name = variables.get(_MODEL) or variables.get(_HUB_MODEL)
    data = (container.get("ModelDataSource") or {}).get("S3DataSource")
    if data and _MODEL not in variables:
        return ModelSource("s3", data["S3Uri"])
    return ModelSource("hub", name or current.endpoint_name, variables.get(_REVISION))


def _hub_model(
    current: Current,
    container: Mapping[str, Any],
    variables: Mapping[str, str],
    channels: Mapping[str, Mapping[str, Any]],
) -> HubModel:
    data = (container.get("ModelDataSource") or {}).get("S3DataSource")
    sources = [source for source in (data, *channels.values()) if source]
    return HubModel(
        name=current.endpoint_name,
        environment=_hidden(variables),
        data=_without_access(data) if data else None,
        additional=tuple(
            (name, _without_access(source))
            for name, source in channels.items()
            if name != DRAFT_CHANNEL
        ),
        gated=any("ModelAccessConfig" in source for source in sources),
    )


def _without_access(source: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in source.items() if key != "ModelAccessConfig"}


def _ours(variable: str) -> bool:
    return variable.startswith(PREFIX)


def _flags(variables: Mapping[str, str]) -> dict[str, str]:
    """Options of vLLM by name; those of the model itself are the target's."""
    return {
        name.removeprefix(PREFIX).lower().replace("_", "-"): _hidden({name: value})[name]
        for name, value in variables.items()
        if _ours(name) and name not in (_MODEL, _REVISION)
    }


def _hidden(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables, of which only options of vLLM without a secret's name are shown."""
    return {k: v if _ours(k) and not is_secret_name(k) else Secret(v) for k, v in variables.items()}
