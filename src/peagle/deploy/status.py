"""An endpoint at a glance: its state, speculation, metrics and acceptance."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from peagle.config import cloudwatch as names
from peagle.config.checks import near_names
from peagle.config.speculative import MAX_SPECULATIVE_TOKENS
from peagle.deploy import logs, monitoring
from peagle.deploy.aws import Clients
from peagle.deploy.container import SPECULATIVE
from peagle.deploy.deployment import SOURCE_TAG, Autoscaling
from peagle.deploy.monitoring import Acceptance, Drift
from peagle.deploy.stack import event_line, find_stack, stack_events
from peagle.deploy.template import DIMENSION, resource_of
from peagle.errors import UserError

DEFAULT_WINDOW_S = 3600.0
_MAX_PERIODS = 1440
_MAX_QUERIES = 500  # of one GetMetricData
_INVOCATIONS, _INSTANCES = "AWS/SageMaker", "/aws/sagemaker/Endpoints"


@dataclass(frozen=True, slots=True)
class Metric:
    """One of SageMaker's own metrics of a variant.

    Attributes:
        name, namespace: CloudWatch's.
        is_total: whether the total is shown, not average and maximum.
        scale: factor from CloudWatch's unit to `unit`; latencies come in microseconds.
        unit: the unit that is shown.
    """

    name: str
    namespace: str = _INVOCATIONS
    is_total: bool = False
    scale: float = 1.0
    unit: str = ""

    @property
    def statistics(self) -> tuple[str, ...]:
        """Return the CloudWatch statistics from which any number of periods can be summed up."""
        return ("Sum",) if self.is_total else ("Sum", "SampleCount", "Maximum")


# "Amazon SageMaker AI metrics in Amazon CloudWatch" of SageMaker's developer guide.
METRICS = (
    Metric("Invocations", is_total=True),
    Metric("Invocation4XXErrors", is_total=True),
    Metric("Invocation5XXErrors", is_total=True),
    Metric("ModelLatency", scale=1e-3, unit="ms"),
    Metric("OverheadLatency", scale=1e-3, unit="ms"),
    Metric("FirstChunkLatency", scale=1e-3, unit="ms"),
    Metric("ConcurrentRequestsPerModel"),
    Metric("GPUUtilization", _INSTANCES, unit="%"),
    Metric("GPUMemoryUtilization", _INSTANCES, unit="%"),
)


@dataclass(frozen=True, slots=True)
class MetricValue:
    """A metric over the window; None if CloudWatch has no data."""

    metric: Metric
    total: float | None = None
    average: float | None = None
    maximum: float | None = None


# ---- the state ----


@dataclass(frozen=True, slots=True)
class EndpointState:
    """An endpoint as AWS describes it.

    Attributes:
        endpoint_name, region: name and region of the endpoint.
        status: EndpointStatus, "InService"; "" before there is an endpoint.
        stack_status: StackStatus of its stack; "" without one.
        failures: events of the stack that say why its last change failed.
        endpoint, config, model: answers of the describe calls, {} for a part that is gone; the
            model is the first variant's.
        tags: tags of the endpoint.
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
        """Return the models of the endpoint configuration's variants."""
        variants = self.config.get("ProductionVariants", ())
        return tuple(dict.fromkeys(v["ModelName"] for v in variants if "ModelName" in v))

    @property
    def container(self) -> Mapping[str, Any]:
        """Return the first container of the model; {} without one."""
        return self.model.get("PrimaryContainer") or next(
            iter(self.model.get("Containers") or ()), {}
        )


def describe(clients: Clients, name: str) -> EndpointState:
    """Return an endpoint's state.

    Raises:
        UserError: there is no such endpoint (the error names similar ones), or AWS refused.
    """

    def find(operation: str, **parameters: Any) -> dict[str, Any]:
        return clients.find("sagemaker", operation, **parameters)

    stack = find_stack(clients, name)
    endpoint = find("DescribeEndpoint", EndpointName=name)
    if not endpoint and stack is None:
        listed = find("ListEndpoints", MaxResults=100).get("Endpoints", ())
        near = near_names(name, [one["EndpointName"] for one in listed], 3)
        guess = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise UserError(f"There is no endpoint {name!r} in {clients.region}.{guess}")
    config: dict[str, Any] = {}
    model: dict[str, Any] = {}
    tags: dict[str, Any] = {}
    if endpoint:
        tags = find("ListTags", ResourceArn=endpoint["EndpointArn"])
    if config_name := endpoint.get("EndpointConfigName"):
        config = find("DescribeEndpointConfig", EndpointConfigName=config_name)
    variant = next(iter(config.get("ProductionVariants", ())), {})
    if model_name := variant.get("ModelName"):
        model = find("DescribeModel", ModelName=model_name)
    stack_status = stack["StackStatus"] if stack else ""
    failures: list[str] = []
    if stack and ("FAILED" in stack_status or "ROLLBACK" in stack_status):
        events = stack_events(clients, stack["StackId"])
        failures = [event_line(e) for e in events if e["ResourceStatus"].endswith("_FAILED")]
    running = [v["VariantName"] for v in endpoint.get("ProductionVariants", ())]
    return EndpointState(
        name,
        clients.region,
        endpoint.get("EndpointStatus", ""),
        stack_status,
        tuple(failures[-3:]),
        endpoint,
        config,
        model,
        {tag["Key"]: tag["Value"] for tag in tags.get("Tags", ())},
        *_scaling(clients, name, running),
    )


def _scaling(
    clients: Clients, name: str, variants: list[str]
) -> tuple[Autoscaling | None, tuple[str, ...]]:
    """Return the scaling of the first variant that has one, and the names of its policies."""
    where = {"ServiceNamespace": "sagemaker", "ScalableDimension": DIMENSION}
    service = "application-autoscaling"
    for variant in variants:
        resource = resource_of(name, variant)
        found = clients.find(service, "DescribeScalableTargets", **where, ResourceIds=[resource])
        for target in found.get("ScalableTargets", ()):
            answer = clients.find(service, "DescribeScalingPolicies", **where, ResourceId=resource)
            policies = answer.get("ScalingPolicies", [])
            tracking = [p.get("TargetTrackingScalingPolicyConfiguration") for p in policies]
            first = next(filter(None, tracking), {})
            metric = first.get("PredefinedMetricSpecification", {}).get("PredefinedMetricType", "")
            bounds = target["MinCapacity"], target["MaxCapacity"]
            scaling = Autoscaling(*bounds, first.get("TargetValue", 0.0), metric)
            return scaling, tuple(policy["PolicyName"] for policy in policies)
    return None, ()


def variants(current: EndpointState) -> Iterator[dict[str, Any]]:
    """Yield name, instance type, instances now and wanted, and share of traffic of each variant."""
    types = {v["VariantName"]: v for v in current.config.get("ProductionVariants", ())}
    for variant in current.endpoint.get("ProductionVariants", ()):
        yield {
            "name": variant["VariantName"],
            "instance_type": types.get(variant["VariantName"], {}).get("InstanceType"),
            "instances": variant.get("CurrentInstanceCount"),
            "wanted": variant.get("DesiredInstanceCount"),
            "weight": variant.get("CurrentWeight"),
        }


def age(current: EndpointState, now: datetime | None = None) -> str:
    """Return the time since the endpoint was created, "3 d 4 h"; "" if AWS does not say."""
    created = current.endpoint.get("CreationTime")
    if created is None:
        return ""
    minutes = int(((now or datetime.now(UTC)) - created).total_seconds() // 60)
    days, hours, rest = minutes // 1440, minutes // 60 % 24, minutes % 60
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {rest} min" if hours else f"{max(rest, 0)} min"


def speculation_of(environment: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the speculative configuration in a container's environment, in vLLM's form.

    None without one; a text that is no JSON object comes back under "unreadable".
    """
    text = environment.get(SPECULATIVE)
    if not text:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"unreadable": text}


def depth_of(current: EndpointState) -> int | None:
    """Return K of an endpoint, 0 without drafts, None if its configuration does not say."""
    speculation = speculation_of(current.container.get("Environment") or {})
    if speculation is None:
        return 0
    k = speculation.get("num_speculative_tokens")
    return k if isinstance(k, int) and 1 <= k <= MAX_SPECULATIVE_TOKENS else None


# ---- the status ----


@dataclass(frozen=True, slots=True)
class EndpointStatus:
    """An endpoint's state, metrics and acceptance.

    Attributes:
        current: the endpoint, as AWS describes it.
        speculation: the container's speculative configuration, in vLLM's form; None without one.
        window_s: length of the window of the metrics, which ends now.
        values: SageMaker's metrics, summed over its variants.
        acceptance: None if nothing was drafted, or if the container does not report it.
        drift: acceptance compared with the expected one; None without either.
        notes: the parts that could not be read, and why.
    """

    current: EndpointState
    speculation: dict[str, Any] | None
    window_s: float
    values: tuple[MetricValue, ...]
    acceptance: Acceptance | None
    drift: Drift | None
    notes: tuple[str, ...]

    @property
    def source(self) -> str:
        """Return the container's source: "native", "managed", or "" if unknown."""
        return self.current.tags.get(SOURCE_TAG, "")

    def to_json(self) -> dict[str, Any]:
        """Return the status in `status --format json`."""
        current, endpoint = self.current, self.current.endpoint
        scaling = current.autoscaling
        policies = {"policies": list(current.scaling_policies)}
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
            "image": current.container.get("Image"),
            "variants": list(variants(current)),
            "speculation": self.speculation,
            "autoscaling": None if scaling is None else asdict(scaling) | policies,
            "window_s": self.window_s,
            "metrics": {
                one.metric.name: {"total": one.total}
                if one.metric.is_total
                else {"average": one.average, "maximum": one.maximum, "unit": one.metric.unit}
                for one in self.values
            },
            "acceptance": self.acceptance and self.acceptance.to_json(),
            "drift": self.drift and self.drift.to_json(),
            "notes": list(self.notes),
        }


def _iso(moment: Any) -> str | None:
    return moment.astimezone(UTC).isoformat(timespec="seconds") if moment else None


def read_status(
    clients: Clients,
    current: EndpointState,
    *,
    window_s: float = DEFAULT_WINDOW_S,
    expected: str | None = None,
    now: datetime | None = None,
) -> EndpointStatus:
    """Read the metrics and the acceptance of an endpoint.

    If AWS refuses to tell something, the status gets a note, since the state alone is worth seeing.

    Args:
        clients: of AWS.
        current: the endpoint, as `describe` returns it.
        window_s: how far back metrics go.
        expected: acceptance length or a file, see `monitoring.expected_from`; None takes the tag.
        now: the end of the window.

    Raises:
        UserError: `expected` cannot be read.
    """
    speculation = speculation_of(current.container.get("Environment") or {})
    k = depth_of(current) or None
    compare = (
        monitoring.expected_from_tags(current.tags)
        if expected is None
        else monitoring.expected_from(expected, k, speculation)
    )
    notes: list[str] = []
    end = now or datetime.now(UTC)
    start = end - timedelta(seconds=window_s)
    counters = monitoring.metric_names(k or MAX_SPECULATIVE_TOKENS)
    keys = [(m.namespace, m.name, s) for m in METRICS for s in m.statistics]
    keys += [(names.NAMESPACE, name, "Sum") for name in counters]
    values: tuple[MetricValue, ...] = ()
    acceptance = None
    try:
        found = _metric_data(clients, current, start, end, keys)
        values = tuple(_value(metric, found) for metric in METRICS)
        sums = {name: found.get((names.NAMESPACE, name, "Sum")) for name in counters}
        acceptance = monitoring.from_sums({n: sum(every) for n, every in sums.items() if every})
    except UserError as error:
        notes.append(f"no metrics: {error}")
    if acceptance is None and speculation is not None:
        acceptance = _logged_acceptance(clients, current, start, end, notes)
    return EndpointStatus(
        current,
        speculation,
        window_s,
        values,
        acceptance,
        monitoring.drift(acceptance, compare) if acceptance and compare else None,
        tuple(notes),
    )


# (namespace, metric, statistic) -> its values in the periods of the window, of all variants.
_MetricData = dict[tuple[str, str, str], list[float]]


def _metric_data(
    clients: Clients,
    current: EndpointState,
    start: datetime,
    end: datetime,
    keys: Sequence[tuple[str, str, str]],
) -> _MetricData:
    # Whole minutes, of which a window has at most _MAX_PERIODS.
    period_s = 60 * max(1, math.ceil((end - start).total_seconds() / 60 / _MAX_PERIODS))
    asked = [(variant["name"], key) for variant in variants(current) for key in keys]
    found: _MetricData = {}
    for first in range(0, len(asked), _MAX_QUERIES):
        part = asked[first : first + _MAX_QUERIES]
        queries = []
        for number, (variant, (namespace, name, statistic)) in enumerate(part):
            dimensions = {names.ENDPOINT: current.endpoint_name, names.VARIANT: variant}
            metric = {
                "Namespace": namespace,
                "MetricName": name,
                "Dimensions": [{"Name": n, "Value": v} for n, v in dimensions.items()],
            }
            stat = {"Metric": metric, "Period": period_s, "Stat": statistic}
            queries.append({"Id": f"m{number}", "MetricStat": stat})
        query: dict[str, Any] = {"MetricDataQueries": queries, "StartTime": start, "EndTime": end}
        while True:
            answer = clients.find("cloudwatch", "GetMetricData", **query)
            for result in answer.get("MetricDataResults", ()):
                key = part[int(result["Id"][1:])][1]
                found.setdefault(key, []).extend(result.get("Values", ()))
            if not answer.get("NextToken"):
                break
            query["NextToken"] = answer["NextToken"]
    return found


def _value(metric: Metric, found: _MetricData) -> MetricValue:
    sums, *others = (
        found.get((metric.namespace, metric.name, statistic), []) for statistic in metric.statistics
    )
    if metric.is_total:
        return MetricValue(metric, total=sum(sums) if sums else None)
    counts, maxima = others
    if not sum(counts):
        return MetricValue(metric)
    average = metric.scale * sum(sums) / sum(counts)
    return MetricValue(metric, average=average, maximum=metric.scale * max(maxima))


def _logged_acceptance(
    clients: Clients, current: EndpointState, start: datetime, end: datetime, notes: list[str]
) -> Acceptance | None:
    """Return the acceptance in vLLM's log, the managed container's only report of it."""
    # To read a log of days would take minutes.
    latest = max(start, end - timedelta(seconds=DEFAULT_WINDOW_S))
    if latest > start:
        notes.append("acceptance is of the last hour alone: it is read from the log")
    since_ms, until_ms = (round(moment.timestamp() * 1000) for moment in (latest, end))
    try:
        lines = logs.read(
            clients,
            current.endpoint_name,
            since_ms,
            until_ms=until_ms,
            pattern=monitoring.VLLM_FILTER,
        )
        return monitoring.from_vllm_log(line.text for line in lines)
    except logs.NoLogYet:
        return None
    except UserError as error:
        notes.append(f"no acceptance from the log: {error}")
        return None
