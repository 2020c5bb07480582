"""How many instances an endpoint has: target tracking of Application Auto Scaling, or a number.

Sources: the service models of application-autoscaling and sagemaker in botocore; "Automatic
scaling of Amazon SageMaker AI models" of SageMaker's developer guide.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from peagle.deploy.calls import Call
from peagle.deploy.deployment import Autoscaling
from peagle.errors import UserError

SERVICE = "application-autoscaling"
DIMENSION = "sagemaker:variant:DesiredInstanceCount"
# What the command calls it, and the predefined metric. The first is measured every ten seconds and
# counts waiting requests too; the second once a minute, and a request that takes long is still one.
METRICS = {
    "concurrency": "SageMakerVariantConcurrentRequestsPerModelHighResolution",
    "invocations": "SageMakerVariantInvocationsPerInstance",
}
# Seconds after a change before the next. A new instance loads a large model for ten minutes: to
# give one up too early costs more than to keep it for a while.
SCALE_OUT_COOLDOWN_S = 300
SCALE_IN_COOLDOWN_S = 900


def check(autoscaling: Autoscaling) -> Autoscaling:
    """The same, if it can be.

    Raises:
        UserError: bounds or target are out of range, or the metric is unknown.
    """
    least, most = autoscaling.min_instances, autoscaling.max_instances
    if not 1 <= least <= most:
        raise UserError(
            f"--min is {least} and --max is {most}; expected 1 <= --min <= --max. (An endpoint "
            "without instances would refuse requests: delete it if it is not needed.)"
        )
    if not autoscaling.target_value > 0:
        raise UserError(f"--target is {autoscaling.target_value}; expected a number above 0.")
    if autoscaling.metric not in METRICS.values():
        raise UserError(
            f"The metric is {autoscaling.metric!r}; expected one of {', '.join(METRICS.values())}."
        )
    return autoscaling


def resource_of(endpoint: str, variant: str) -> str:
    """A variant, as Application Auto Scaling calls it."""
    return f"endpoint/{endpoint}/variant/{variant}"


def policy_of(endpoint: str) -> str:
    """The name of the policy that is put for an endpoint."""
    return f"peagle-{endpoint}"


def scaling_calls(
    endpoint: str,
    variant: str,
    wanted: Autoscaling,
    before: Autoscaling | None = None,
    policies: Sequence[str] = (),
) -> list[Call]:
    """Register the variant and put the policy; undone, each leaves what was there before.

    Args:
        endpoint, variant: their names.
        wanted: bounds, metric and its target value.
        before: what is registered already.
        policies: names of the policies that are there already; those of others stay.

    Raises:
        UserError: as `check`.
    """
    check(wanted)
    where = _where(endpoint, variant)
    off_policy, off_target = unscale_calls(endpoint, variant, [policy_of(endpoint)])
    replaces = before if policy_of(endpoint) in policies else None
    register = Call(
        SERVICE,
        "RegisterScalableTarget",
        _bounds(where, wanted),
        "" if before else f"scalable target {where['ResourceId']!r}",
        Call(SERVICE, "RegisterScalableTarget", _bounds(where, before)) if before else off_target,
    )
    put = Call(
        SERVICE,
        "PutScalingPolicy",
        _policy(endpoint, where, wanted),
        "" if replaces else f"scaling policy {policy_of(endpoint)!r}",
        Call(SERVICE, "PutScalingPolicy", _policy(endpoint, where, replaces))
        if replaces
        else off_policy,
    )
    return [register, put]


def unscale_calls(endpoint: str, variant: str, policies: Sequence[str]) -> list[Call]:
    """Delete the policies, then deregister the variant: its number of instances stays."""
    where = _where(endpoint, variant)
    deletes = [
        Call(SERVICE, "DeleteScalingPolicy", {"PolicyName": name, **where}) for name in policies
    ]
    return [*deletes, Call(SERVICE, "DeregisterScalableTarget", where)]


def count_call(endpoint: str, variant: str, count: int, before: int | None = None) -> Call:
    """Give a variant so many instances.

    Raises:
        UserError: fewer than one.
    """
    if count < 1:
        raise UserError(
            f"--instances is {count}; expected at least 1. To stop paying, delete the endpoint."
        )
    undo = None if before is None else count_call(endpoint, variant, before)
    wanted = [{"VariantName": variant, "DesiredInstanceCount": count}]
    parameters = {"EndpointName": endpoint, "DesiredWeightsAndCapacities": wanted}
    return Call("sagemaker", "UpdateEndpointWeightsAndCapacities", parameters, "", undo)


def _where(endpoint: str, variant: str) -> dict[str, Any]:
    return {
        "ServiceNamespace": "sagemaker",
        "ResourceId": resource_of(endpoint, variant),
        "ScalableDimension": DIMENSION,
    }


def _bounds(where: dict[str, Any], autoscaling: Autoscaling) -> dict[str, Any]:
    return {
        **where,
        "MinCapacity": autoscaling.min_instances,
        "MaxCapacity": autoscaling.max_instances,
    }


def _policy(endpoint: str, where: dict[str, Any], autoscaling: Autoscaling) -> dict[str, Any]:
    return {
        "PolicyName": policy_of(endpoint),
        **where,
        "PolicyType": "TargetTrackingScaling",
        "TargetTrackingScalingPolicyConfiguration": {
            "TargetValue": autoscaling.target_value,
            "PredefinedMetricSpecification": {"PredefinedMetricType": autoscaling.metric},
            "ScaleOutCooldown": SCALE_OUT_COOLDOWN_S,
            "ScaleInCooldown": SCALE_IN_COOLDOWN_S,
        },
    }
