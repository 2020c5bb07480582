"""An endpoint at a glance: its state, speculation, metrics and acceptance."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from difflib import get_close_matches
from typing import Any

from peagle.config import cloudwatch as names
from peagle.config.speculative import MAX_SPECULATIVE_TOKENS
from peagle.deploy import logs, monitoring
from peagle.deploy.aws import Clients
from peagle.deploy.deployment import SOURCE_TAG, Autoscaling
from peagle.deploy.monitoring import Acceptance, Drift
from peagle.deploy.stack import event_line, find_stack, stack_events
from peagle.deploy.template import DIMENSION, resource_of
from peagle.errors import UserError

DEFAULT_WINDOW_S = 3600.0
_MAX_BUCKETS = 1440
_MAX_QUERIES = 500  # of a GetMetricData
_INVOCATIONS, _INSTANCES = "AWS/SageMaker", "/aws/sagemaker/Endpoints"


@dataclass(frozen=True, slots=True)
class Metric:
    """One of SageMaker's own metrics of a variant.

    Attributes:
        name: CloudWatch's.
        namespace: where.
        shows: "total" or "average and maximum".
        scale: what it is multiplied with; latencies come in microseconds.
        unit: after that.
    """

    name: str
    namespace: str = _INVOCATIONS
    shows: str = "average"
    scale: float = 1.0
    unit: str = ""

    @property
    def statistics(self) -> tuple[str, ...]:
        """Of CloudWatch, from which what is shown can be made over any number of periods."""
        return ("Sum",) if self.shows == "total" else ("Sum", "SampleCount", "Maximum")


def _latency(name: str) -> Metric:
    return Metric(name, scale=1e-3, unit="ms")


# "Amazon SageMaker AI metrics in Amazon CloudWatch" of SageMaker's developer guide.
METRICS = (
    Metric("Invocations", shows="total"),
    Metric("Invocation4XXErrors", shows="total"),
    Metric("Invocation5XXErrors", shows="total"),
    _latency("ModelLatency"),
    _latency("OverheadLatency"),
    _latency("FirstChunkLatency"),
    Metric("ConcurrentRequestsPerModel"),
    Metric("GPUUtilization", _INSTANCES, unit="%"),
    Metric("GPUMemoryUtilization", _INSTANCES, unit="%"),
)


@dataclass(frozen=True, slots=True)
class Value:
    """A metric over the window; None where CloudWatch has no data."""

    metric: Metric
    total: float | None = None
    average: float | None = None
    maximum: float | None = None


@dataclass(frozen=True, slots=True)
class EndpointState:
    """An endpoint as AWS describes it.

    Attributes:
        endpoint_name, region: of the endpoint.
        status: EndpointStatus, "InService"; "" before there is an endpoint.
        stack_status: StackStatus of its stack; "" without one.
        failures: events of the stack that say why its last change failed.
        endpoint, config, model: answers of the describe calls; the model is that of the first
            variant. Empty where it is gone.
        tags: of the endpoint.
        autoscaling: the registered scaling; None without it.
        scaling_policies: names of its scaling policies.
    """

    endpoint_name: str
    region: str
    status: str
    stack_status: str = ""
    failures: tuple[str, ...] = ()
    endpoint: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    autoscaling: Autoscaling | None = None
    scaling_policies: tuple[str, ...] = ()

    @property
    def config_name(self) -> str:
        """Name of the endpoint configuration; "" without one."""
        return self.endpoint.get("EndpointConfigName", "")

    @property
    def model_names(self) -> tuple[str, ...]:
        """Models of the endpoint configuration's variants."""
        variants = self.config.get("ProductionVariants", ())
        return tuple(dict.fromkeys(v["ModelName"] for v in variants if "ModelName" in v))


def describe(clients: Clients, name: str) -> EndpointState:
    """Return an endpoint's state.

    Raises:
        UserError: there is no such endpoint (the nearest names are told), or AWS refused.
    """
    stack = find_stack(clients, name)
    endpoint = clients.ask("sagemaker", "DescribeEndpoint", EndpointName=name)
    if not endpoint and stack is None:
        listed = clients.ask("sagemaker", "ListEndpoints", MaxResults=100).get("Endpoints", ())
        near = get_close_matches(name, [one["EndpointName"] for one in listed], 3)
        guess = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise UserError(f"There is no endpoint {name!r} in {clients.region}.{guess}")
    config: dict[str, Any] = {}
    if config_name := endpoint.get("EndpointConfigName"):
        config = clients.ask("sagemaker", "DescribeEndpointConfig", EndpointConfigName=config_name)
    variant = next(iter(config.get("ProductionVariants", ())), {})
    model_name = variant.get("ModelName")
    model = clients.ask("sagemaker", "DescribeModel", ModelName=model_name) if model_name else {}
    tags = (
        clients.ask("sagemaker", "ListTags", ResourceArn=endpoint["EndpointArn"])
        if endpoint
        else {}
    )
    stack_status = stack["StackStatus"] if stack else ""
    running = [v["VariantName"] for v in endpoint.get("ProductionVariants", ())]
    return EndpointState(
        name,
        clients.region,
        endpoint.get("EndpointStatus", ""),
        stack_status,
        _failures(clients, stack) if "FAILED" in stack_status or "ROLLBACK" in stack_status else (),
        endpoint,
        config,
        model,
        {tag["Key"]: tag["Value"] for tag in tags.get("Tags", ())},
        *_scaling(clients, name, running),
    )


def _failures(clients: Clients, stack: Mapping[str, Any] | None) -> tuple[str, ...]:
    assert stack is not None
    events = stack_events(clients, stack["StackId"])
    return tuple(event_line(e) for e in events if e["ResourceStatus"].endswith("_FAILED"))[-3:]


def _scaling(
    clients: Clients, name: str, variants: list[str]
) -> tuple[Autoscaling | None, tuple[str, ...]]:
    for variant in variants:
        where = {"ServiceNamespace": "sagemaker", "ScalableDimension": DIMENSION}
        service, resource = "application-autoscaling", resource_of(name, variant)
        asked = {**where, "ResourceIds": [resource]}
        targets = clients.ask(service, "DescribeScalableTargets", **asked)
        for target in targets.get("ScalableTargets", ()):
            asked = {**where, "ResourceId": resource}
            answer = clients.ask(service, "DescribeScalingPolicies", **asked)
            policies = answer.get("ScalingPolicies", [])
            tracking = [p.get("TargetTrackingScalingPolicyConfiguration") for p in policies]
            first = next(filter(None, tracking), {})
            metric = first.get("PredefinedMetricSpecification", {}).get("PredefinedMetricType", "")
            bounds = target["MinCapacity"], target["MaxCapacity"]
            scaling = Autoscaling(*bounds, first.get("TargetValue", 0.0), metric)
            return scaling, tuple(policy["PolicyName"] for policy in policies)
    return None, ()


@dataclass(frozen=True, slots=True)
class Status:
    """What there is to say of an endpoint.

    Attributes:
        current: it, as AWS describes it.
        speculation: the container's speculative configuration, in vLLM's form; None without one.
        window_s: of the metrics, up to now.
        values: SageMaker's metrics, summed over its variants.
        acceptance: None where nothing was drafted, or where nobody tells.
        drift: beside what is expected; None without either.
        notes: what could not be looked at, and why.
    """

    current: EndpointState
    speculation: dict[str, Any] | None
    window_s: float
    values: tuple[Value, ...]
    acceptance: Acceptance | None
    drift: Drift | None
    notes: tuple[str, ...]

    @property
    def source(self) -> str:
        """Whose container it is: "native", "managed", "jumpstart", or "" where nobody says."""
        return self.current.tags.get(SOURCE_TAG, "")

    def to_json(self) -> dict[str, Any]:
        """What `status --format json` prints."""
        current, endpoint = self.current, self.current.endpoint
        autoscaling = current.autoscaling
        return {
            "name": current.endpoint_name,
            "region": current.region,
            "status": current.status,
            "failure_reason": endpoint.get("FailureReason"),
            "stack_status": current.stack_status or None,
            "stack_failures": list(current.failures),
            "source": self.source or None,
            "created": _iso(endpoint.get("CreationTime")),
            "changed": _iso(endpoint.get("LastModifiedTime")),
            "configuration": current.config_name,
            "models": list(current.model_names),
            "image": _container(current).get("Image"),
            "variants": list(variants(current)),
            "speculation": self.speculation,
            "autoscaling": None
            if autoscaling is None
            else {**asdict(autoscaling), "policies": list(current.scaling_policies)},
            "window_s": self.window_s,
            "metrics": {value.metric.name: _value_json(value) for value in self.values},
            "acceptance": self.acceptance and self.acceptance.to_json(),
            "drift": self.drift and self.drift.to_json(),
            "notes": list(self.notes),
        }


def _value_json(value: Value) -> dict[str, Any]:
    if value.metric.shows == "total":
        return {"total": value.total}
    return {"average": value.average, "maximum": value.maximum, "unit": value.metric.unit}


def _iso(moment: Any) -> str | None:
    return moment.astimezone(UTC).isoformat(timespec="seconds") if moment else None


def variants(current: EndpointState) -> Iterator[dict[str, Any]]:
    """Name, instance type, instances now and wanted, and share of the traffic of each variant."""
    types = {v["VariantName"]: v for v in current.config.get("ProductionVariants", ())}
    for variant in current.endpoint.get("ProductionVariants", ()):
        configured = types.get(variant["VariantName"], {})
        yield {
            "name": variant["VariantName"],
            "instance_type": configured.get("InstanceType"),
            "instances": variant.get("CurrentInstanceCount"),
            "wanted": variant.get("DesiredInstanceCount"),
            "weight": variant.get("CurrentWeight"),
        }


def age(current: EndpointState, now: datetime | None = None) -> str:
    """How long the endpoint exists, "3 d 4 h"; "" where AWS does not say."""
    created = current.endpoint.get("CreationTime")
    if created is None:
        return ""
    minutes = int(((now or datetime.now(UTC)) - created).total_seconds() // 60)
    days, hours, rest = minutes // 1440, minutes // 60 % 24, minutes % 60
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {rest} min" if hours else f"{max(rest, 0)} min"


def look(
    clients: Clients,
    current: EndpointState,
    *,
    window_s: float = DEFAULT_WINDOW_S,
    expected: str | None = None,
    now: datetime | None = None,
) -> Status:
    """Look at the metrics and the acceptance of an endpoint.

    What may not be read is a note, since the state alone is worth seeing.

    Args:
        clients: of AWS.
        current: the endpoint, as `endpoints.current` describes it.
        window_s: how far back metrics go.
        expected: acceptance length or a file, see `monitoring.expected_from`; None takes the tag.
        now: the end of the window.

    Raises:
        UserError: what is expected cannot be read.
    """
    speculation = speculation_of(current)
    k = depth_of(current) or None
    compare = (
        monitoring.expected_from_tags(current.tags)
        if expected is None
        else monitoring.expected_from(expected, k)
    )
    notes: list[str] = []
    end = now or datetime.now(UTC)
    window = _Window(clients, current, end - timedelta(seconds=window_s), end, window_s)
    values, acceptance = _measured(window, k, notes)
    if acceptance is None and speculation is not None:
        acceptance = _logged(window, notes)
    return Status(
        current,
        speculation,
        window_s,
        values,
        acceptance,
        monitoring.drift(acceptance, compare) if acceptance and compare else None,
        tuple(notes),
    )


def _container(current: EndpointState) -> Mapping[str, Any]:
    model = current.model
    return model.get("PrimaryContainer") or next(iter(model.get("Containers") or ()), {})


def speculation_of(current: EndpointState) -> dict[str, Any] | None:
    """The speculative configuration of an endpoint's container, in vLLM's form."""
    return monitoring.speculation_of(_container(current).get("Environment") or {})


def depth_of(current: EndpointState) -> int | None:
    """K of an endpoint, 0 without drafts, None where its configuration does not say."""
    speculation = speculation_of(current)
    if speculation is None:
        return 0
    k = speculation.get("num_speculative_tokens")
    is_k = isinstance(k, int) and 1 <= k <= MAX_SPECULATIVE_TOKENS
    return k if is_k else None


# ---- metrics --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Window:
    """A time of an endpoint."""

    clients: Clients
    current: EndpointState
    start: datetime
    end: datetime
    seconds: float

    @property
    def period_s(self) -> int:
        """Whole minutes, so that a window has at most so many periods."""
        return 60 * max(1, math.ceil(self.seconds / 60 / _MAX_BUCKETS))


# (namespace, metric, statistic) -> its values in the window.
_Found = dict[tuple[str, str, str], list[float]]


def _measured(
    window: _Window, k: int | None, notes: list[str]
) -> tuple[tuple[Value, ...], Acceptance | None]:
    asked = [(m.namespace, m.name, s) for m in METRICS for s in m.statistics]
    counters = monitoring.metric_names(k or MAX_SPECULATIVE_TOKENS)
    asked += [(names.NAMESPACE, name, "Sum") for name in counters]
    try:
        found = _ask(window, asked)
    except UserError as error:
        notes.append(f"no metrics: {error}")
        return (), None
    sums = {
        name: sum(found[names.NAMESPACE, name, "Sum"])
        for name in counters
        if found.get((names.NAMESPACE, name, "Sum"))
    }
    return tuple(_value(metric, found) for metric in METRICS), monitoring.from_sums(sums)


def _value(metric: Metric, found: _Found) -> Value:
    def of(statistic: str) -> list[float]:
        return found.get((metric.namespace, metric.name, statistic), [])

    if metric.shows == "total":
        return Value(metric, total=sum(of("Sum")) if of("Sum") else None)
    count = sum(of("SampleCount"))
    if not count:
        return Value(metric)
    average, maximum = sum(of("Sum")) / count, max(of("Maximum"))
    return Value(metric, average=metric.scale * average, maximum=metric.scale * maximum)


def _ask(window: _Window, asked: Sequence[tuple[str, str, str]]) -> _Found:
    """Values of metrics in each period of a window, of all variants in one list."""
    endpoint = window.current.endpoint_name
    queries: list[tuple[tuple[str, str, str], dict[str, Any]]] = [
        (key, _query(number, key, endpoint, variant["name"], window.period_s))
        for number, (variant, key) in enumerate(
            (variant, key) for variant in variants(window.current) for key in asked
        )
    ]
    found: _Found = {}
    for first in range(0, len(queries), _MAX_QUERIES):
        part = queries[first : first + _MAX_QUERIES]
        by_id = {query["Id"]: key for key, query in part}
        for result in _results(window, [query for _, query in part]):
            found.setdefault(by_id[result["Id"]], []).extend(result.get("Values", ()))
    return found


def _query(
    number: int, key: tuple[str, str, str], endpoint: str, variant: str, period_s: int
) -> dict[str, Any]:
    namespace, name, statistic = key
    dimensions = {names.ENDPOINT: endpoint, names.VARIANT: variant}
    metric = {
        "Namespace": namespace,
        "MetricName": name,
        "Dimensions": [{"Name": n, "Value": v} for n, v in dimensions.items()],
    }
    return {
        "Id": f"m{number}",
        "MetricStat": {"Metric": metric, "Period": period_s, "Stat": statistic},
    }


def _results(window: _Window, queries: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    asked: dict[str, Any] = {
        "MetricDataQueries": list(queries),
        "StartTime": window.start,
        "EndTime": window.end,
    }
    while True:
        answer = window.clients.ask("cloudwatch", "GetMetricData", **asked)
        yield from answer.get("MetricDataResults", ())
        if not answer.get("NextToken"):
            return
        asked["NextToken"] = answer["NextToken"]


def _logged(window: _Window, notes: list[str]) -> Acceptance | None:
    """Acceptance of what vLLM logged, the only place where the managed container tells of it."""
    # A log of days would take minutes to read.
    start = max(window.start, window.end - timedelta(seconds=DEFAULT_WINDOW_S))
    if start > window.start:
        notes.append("acceptance is of the last hour alone: it is read from the log")
    start_ms, end_ms = (round(t.timestamp() * 1000) for t in (start, window.end))
    try:
        lines = logs.read(
            window.clients,
            window.current.endpoint_name,
            start_ms,
            until_ms=end_ms,
            pattern=monitoring.VLLM_FILTER,
        )
        return monitoring.from_vllm_log(line.text for line in lines)
    except logs.NoLogYet:
        return None
    except UserError as error:
        notes.append(f"no acceptance from the log: {error}")
        return None
