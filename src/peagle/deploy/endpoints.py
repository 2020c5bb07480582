"""Endpoints as they are: what they consist of, and waiting until they serve."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from peagle.deploy import aws_errors
from peagle.deploy.aws import Clients
from peagle.deploy.aws_errors import explain, is_gone, may_pass
from peagle.deploy.deployment import (
    ENDPOINT_TAG,
    UPLOADS_TAG,
    Autoscaling,
    Current,
)
from peagle.errors import UserError

# While an endpoint has one of these, SageMaker refuses to change or delete it.
IN_PROGRESS = ("Creating", "Updating", "SystemUpdating", "RollingBack", "Deleting")
POLL_S = 10.0
# At least so often a line is written while nothing changes.
_TELL_S = 60.0
# So long a status is asked for again that nobody answers.
_SILENCE_S = 300.0
# An update may show in the status only after a moment.
_SETTLING_S = 60.0
_LOG_LINES, _LOG_S = 12, 600.0
_MAX_CONTAINS = 40

Report = Callable[[str], None]


class NotInService(UserError):
    """The endpoint did not come into service."""


# ---- what is there ----------------------------------------------------------------------------


def describe(clients: Clients, name: str) -> Current:
    """What an endpoint consists of, from describe calls and tags.

    Raises:
        UserError: there is no such endpoint (the nearest names are told), or AWS refused.
    """
    found = look_up(clients, name)
    if found.endpoint:
        return found
    listed = _Look(clients, None).all("ListEndpoints", "Endpoints")
    names = [endpoint["EndpointName"] for endpoint in listed]
    near = get_close_matches(name, names, 3)
    guess = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
    raise UserError(f"There is no endpoint {name!r} in {clients.region}.{guess}")


def look_up(clients: Clients, name: str, unseen: dict[str, str] | None = None) -> Current:
    """As `describe`, and also where the endpoint itself is gone: its status is then "".

    Args:
        clients: of AWS.
        name: the endpoint's.
        unseen: takes the operations that AWS refused, and why; None makes that an error. Without
            the endpoint itself and its tags there is always an error.

    Raises:
        UserError: AWS refused.
    """
    look = _Look(clients, unseen)
    endpoint = look("DescribeEndpoint", EndpointName=name, essential=True)
    config_name = endpoint.get("EndpointConfigName", "")
    config = look("DescribeEndpointConfig", EndpointConfigName=config_name) if config_name else {}
    variants = config.get("ProductionVariants", ())
    models = tuple(dict.fromkeys(v["ModelName"] for v in variants if "ModelName" in v))
    described = [look("DescribeModel", ModelName=model) for model in models]
    tags = look.tags(endpoint.get("EndpointArn", ""), essential=True)
    leftovers, left_tags = _leftovers(look, name, {config_name}, set(models))
    running = [v["VariantName"] for v in endpoint.get("ProductionVariants", ())]
    autoscaling, policies = _scaling(look, name, running)
    uris = [uri for model in described for uri in _data_uris(model)]
    uris += [held[UPLOADS_TAG] for held in (tags, *left_tags) if UPLOADS_TAG in held]
    uploads = dict.fromkeys(filter(None, (_upload_root(uri, name) for uri in uris)))
    return Current(
        endpoint_name=name,
        region=clients.region,
        status=endpoint.get("EndpointStatus", ""),
        config_name=config_name,
        model_names=models,
        endpoint=endpoint,
        config=config,
        model=next(iter(described), {}),
        tags=tags,
        autoscaling=autoscaling,
        scaling_policies=policies,
        uploads=tuple(uploads),
        leftovers=leftovers,
    )


class _Look:
    """Describe calls; what is gone is empty."""

    def __init__(self, clients: Clients, unseen: dict[str, str] | None) -> None:
        self.clients = clients
        self._unseen = unseen

    def __call__(
        self, operation: str, *, service: str = "sagemaker", essential: bool = False, **given: Any
    ) -> dict[str, Any]:
        """The answer; {} where it is about something that is gone, or may not be seen."""
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            answer = self.clients.request(service, operation, **given)
        except (BotoCoreError, ClientError) as error:
            if is_gone(error):
                return {}
            if essential or self._unseen is None:
                raise explain(error) from None
            self._unseen[operation] = str(explain(error))
            return {}
        answer.pop("ResponseMetadata", None)
        return answer

    def all(self, operation: str, key: str, **given: Any) -> Iterator[dict[str, Any]]:
        """Of every page."""
        while True:
            answer = self(operation, **given)
            yield from answer.get(key, ())
            if not answer.get("NextToken"):
                return
            given["NextToken"] = answer["NextToken"]

    def tags(self, arn: str, *, essential: bool = False) -> dict[str, str]:
        """Of a resource."""
        if not arn:
            return {}
        found = self.all("ListTags", "Tags", ResourceArn=arn, essential=essential)
        return {tag["Key"]: tag["Value"] for tag in found}


def only_ours(clients: Clients, found: Current) -> Current:
    """Without a configuration and models that have not the endpoint's tag: others made them.

    Raises:
        UserError: the endpoint itself has not, or AWS refused.
    """
    name = found.endpoint_name
    if found.endpoint and found.tags.get(ENDPOINT_TAG) != name:
        raise UserError(
            f"The endpoint {name!r} was not made by peagle: it has no tag {ENDPOINT_TAG}. Delete "
            f"it with what made it, or with: aws sagemaker delete-endpoint --endpoint-name {name} "
            f"--region {found.region}"
        )
    look = _Look(clients, None)

    def is_ours(arn: str) -> bool:
        return not arn or look.tags(arn).get(ENDPOINT_TAG) == name

    models = (look("DescribeModel", ModelName=model) for model in found.model_names)
    return replace(
        found,
        config_name=found.config_name if is_ours(found.config.get("EndpointConfigArn", "")) else "",
        model_names=tuple(m["ModelName"] for m in models if m and is_ours(m["ModelArn"])),
    )


def _leftovers(
    look: _Look, name: str, configs: set[str], models: set[str]
) -> tuple[tuple[tuple[str, str], ...], list[dict[str, str]]]:
    """Models and configurations with the endpoint's tag beside those in use, and their tags."""
    kinds = (
        ("ListEndpointConfigs", "EndpointConfigs", "EndpointConfig", configs),
        ("ListModels", "Models", "Model", models),
    )
    found, tags = [], []
    for operation, key, prefix, in_use in kinds:
        for item in look.all(operation, key, NameContains=name[:_MAX_CONTAINS]):
            if item[f"{prefix}Name"] in in_use:
                continue
            held = look.tags(item[f"{prefix}Arn"])
            if held.get(ENDPOINT_TAG) == name:
                kind = "model" if in_use is models else "endpoint configuration"
                found.append((kind, item[f"{prefix}Name"]))
                tags.append(held)
    return tuple(found), tags


def _scaling(
    look: _Look, name: str, variants: list[str]
) -> tuple[Autoscaling | None, tuple[str, ...]]:
    from peagle.deploy.scaling import DIMENSION, SERVICE, resource_of

    where: dict[str, Any] = {
        "service": SERVICE,
        "ServiceNamespace": "sagemaker",
        "ScalableDimension": DIMENSION,
    }
    for variant in variants:
        resource = resource_of(name, variant)
        targets = look("DescribeScalableTargets", ResourceIds=[resource], **where)
        policies = look("DescribeScalingPolicies", ResourceId=resource, **where)
        for target in targets.get("ScalableTargets", ()):
            found = policies.get("ScalingPolicies", [])
            tracking = [p.get("TargetTrackingScalingPolicyConfiguration") for p in found]
            first = next(filter(None, tracking), {})
            metric = first.get("PredefinedMetricSpecification", {}).get("PredefinedMetricType", "")
            autoscaling = Autoscaling(
                target["MinCapacity"], target["MaxCapacity"], first.get("TargetValue", 0.0), metric
            )
            return autoscaling, tuple(policy["PolicyName"] for policy in found)
    return None, ()


def _data_uris(model: dict[str, Any]) -> Iterator[str]:
    """Where a model reads from S3."""
    containers = [model.get("PrimaryContainer") or {}, *(model.get("Containers") or ())]
    for container in containers:
        sources = [container.get("ModelDataSource") or {}]
        sources += container.get("AdditionalModelDataSources") or []
        yield from (s["S3DataSource"]["S3Uri"] for s in sources if "S3DataSource" in s)


def _upload_root(uri: str, name: str) -> str | None:
    """s3://bucket/.../peagle/NAME/STAMP/ of what was uploaded for an endpoint; None for others."""
    match = re.match(rf"s3://[^/]+/(?:.*/)?peagle/{re.escape(name)}/[^/]+/", uri)
    return match and match[0]


def require_new(clients: Clients, name: str) -> None:
    """Refuse the name of an endpoint that is there.

    Raises:
        UserError: it is there, or AWS refused.
    """
    if found := _Look(clients, None)("DescribeEndpoint", EndpointName=name):
        raise UserError(
            f"There is an endpoint {name!r} in {clients.region} already "
            f"({found['EndpointStatus']}). Give this one another name with --name, change that one "
            f"(peagle deploy sagemaker update {name}) or delete it."
        )


# ---- waiting ----------------------------------------------------------------------------------


def require_updatable(found: Current) -> None:
    """Refuse an endpoint that SageMaker would not update now.

    Raises:
        UserError: it is being changed, or has failed.
    """
    name = found.endpoint_name
    if found.status in IN_PROGRESS:
        raise UserError(
            f"The endpoint {name!r} is {found.status}: it is being changed, and SageMaker takes no "
            "other change until that has ended. See how far it is: peagle deploy sagemaker status "
            f"{name}"
        )
    if found.status != "InService":
        reason = aws_errors.clean(found.endpoint.get("FailureReason", ""))
        raise UserError(
            f"The endpoint {name!r} is {found.status}{f' ({reason})' if reason else ''}: it can "
            "only be deleted (peagle deploy sagemaker delete) and created anew."
        )


def wait_in_service(
    clients: Clients, name: str, timeout_s: float, report: Report, *, config: str = ""
) -> None:
    """Wait until an endpoint is in service, and tell how it goes.

    Args:
        clients: of AWS.
        name: the endpoint's.
        timeout_s: after which it is given up.
        report: gets a line for every change, and one a minute.
        config: the endpoint configuration that it must then run with; "" is any.

    Raises:
        NotInService: it failed (with SageMaker's reason and the last lines of its log), was rolled
            back, was deleted, or took too long.
        UserError: its status cannot be asked for.
    """
    start = clients.clock.now()
    said, told_at, is_moving = "", start, not config
    for endpoint in _statuses(clients, name):
        status, elapsed = endpoint.get("EndpointStatus", "gone"), clients.clock.now() - start
        if status != said or clients.clock.now() - told_at >= _TELL_S:
            said, told_at = status, clients.clock.now()
            report(f"endpoint {name}: {status}, {_minutes(elapsed)} of {_minutes(timeout_s)}")
        is_moving = is_moving or status in IN_PROGRESS or elapsed >= _SETTLING_S
        if is_moving and (status not in IN_PROGRESS or status == "Deleting"):
            return _check_end(clients, name, endpoint, config)
        if status == "InService" and config == endpoint.get("EndpointConfigName"):
            return None
        if elapsed >= timeout_s:
            raise NotInService(
                f"The endpoint {name!r} is still {status} after {_minutes(elapsed)}. A larger "
                "model needs longer: --startup-timeout; and see what it does: peagle deploy "
                f"sagemaker logs {name}.{_last_lines(clients, name)}"
            )
        clients.clock.sleep(POLL_S)


def wait_until_gone(clients: Clients, name: str, timeout_s: float) -> bool:
    """Wait until a deleted endpoint is gone; false if it is not after that time."""
    deadline = clients.clock.now() + timeout_s
    for endpoint in _statuses(clients, name):
        if not endpoint:
            return True
        if clients.clock.now() >= deadline:
            return False
        clients.clock.sleep(POLL_S)
    return False


def _statuses(clients: Clients, name: str) -> Iterator[dict[str, Any]]:
    """DescribeEndpoint again and again, {} when it is gone; a while without an answer is let pass.

    Raises:
        UserError: AWS refuses to tell, or does not answer for minutes.
    """
    from botocore.exceptions import BotoCoreError, ClientError

    heard = clients.clock.now()
    while True:
        try:
            yield clients.request("sagemaker", "DescribeEndpoint", EndpointName=name)
            heard = clients.clock.now()
        except (BotoCoreError, ClientError) as error:
            if is_gone(error):
                yield {}
            elif may_pass(error) and clients.clock.now() - heard < _SILENCE_S:
                clients.clock.sleep(POLL_S)
            else:
                raise explain(error) from None


def _check_end(clients: Clients, name: str, endpoint: dict[str, Any], config: str) -> None:
    status = endpoint.get("EndpointStatus", "gone")
    reason = aws_errors.clean(endpoint.get("FailureReason", "")).rstrip(".")
    if status == "InService" and config in ("", endpoint.get("EndpointConfigName")):
        return
    if status == "InService":
        raise NotInService(
            f"SageMaker took the update of {name!r} back{f': {reason}' if reason else ''}. The "
            f"endpoint serves as before.{_last_lines(clients, name)}"
        )
    raise NotInService(
        f"The endpoint {name!r} is {status}{f': {reason}' if reason else ''}."
        f"{_last_lines(clients, name)}"
    )


def _last_lines(clients: Clients, name: str) -> str:
    """What its containers last wrote, to go behind a message; "" where there is no log."""
    from peagle.deploy import logs

    try:
        lines = deque(logs.read(clients, name, int((time.time() - _LOG_S) * 1000)), _LOG_LINES)
    except UserError:
        return ""
    return "".join(f"\n  | {aws_errors.clean(line.text)}" for line in lines)


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02} min"
