"""The text of `peagle deploy sagemaker status`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from peagle.deploy.monitoring import TOLERATED_DROP, Acceptance, Drift
from peagle.deploy.status import EndpointStatus, MetricValue, age, variants

_LABEL = 28
_METRIC_NAMES = {
    "SageMakerVariantConcurrentRequestsPerModelHighResolution": "requests at once",
    "SageMakerVariantInvocationsPerInstance": "requests a minute",
}


def status_lines(status: EndpointStatus) -> list[str]:
    """A status as text for people."""
    return [
        *_state(status),
        *_metrics(status),
        *_acceptance(status),
        *(f"note: {note}" for note in status.notes),
    ]


def _state(status: EndpointStatus) -> Iterator[str]:
    current = status.current
    facts = [current.status or "not there yet", current.region]
    facts += [f"stack {current.stack_status}"] if current.stack_status else []
    facts += [f"{age(current)} old"] if age(current) else []
    facts += [f"container: {status.source}"] if status.source else []
    yield f"{current.endpoint_name}: {', '.join(facts)}"
    if reason := current.endpoint.get("FailureReason"):
        yield f"  why: {reason}"
    yield from (f"  why: {failure}" for failure in current.failures)
    yield f"  configuration {current.config_name or 'gone'}; models {_names(current.model_names)}"
    for one in variants(current):
        wanted = "" if one["wanted"] in (None, one["instances"]) else f", {one['wanted']} wanted"
        yield f"  {one['name']}: {one['instances']} x {one['instance_type'] or '?'}{wanted}"
    yield f"  speculation: {_speculation(status)}"
    scaling = current.autoscaling
    if scaling is None:
        yield "  automatic scaling: none"
    else:
        what = _METRIC_NAMES.get(scaling.metric, scaling.metric or "no target tracking")
        bounds = f"{scaling.min_instances} to {scaling.max_instances} instances"
        yield f"  automatic scaling: {bounds}, {scaling.target_value:g} {what} on each"


def _names(names: Sequence[str]) -> str:
    return ", ".join(names) or "gone"


def _speculation(status: EndpointStatus) -> str:
    found = status.speculation
    if found is None:
        return "none"
    if "unreadable" in found:
        return f"not readable: {found['unreadable']!r}"
    k = found.get("num_speculative_tokens")
    parts = [str(found.get("method", "eagle3")), str(found.get("model", ""))]
    parts += [f"K = {k}"] if k is not None else []
    parts += ["parallel drafting"] if found.get("parallel_drafting") else []
    return ", ".join(part for part in parts if part)


def _metrics(status: EndpointStatus) -> Iterator[str]:
    if not status.values:
        return
    yield f"{f'last {_span(status.window_s)}':<{_LABEL + 2}}{'average':>14}{'maximum':>14}"
    for value in status.values:
        yield f"  {value.metric.name:<{_LABEL}}{_numbers(value)}"


def _span(seconds: float) -> str:
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds % unit == 0:
            return f"{seconds / unit:g} {name}"
    return f"{seconds:g} s"


def _numbers(value: MetricValue) -> str:
    unit = f" {value.metric.unit}" if value.metric.unit else ""
    if value.metric.is_total:
        return f"{'no data' if value.total is None else f'{value.total:g} in all':>14}"
    if value.average is None or value.maximum is None:
        return f"{'no data':>14}"
    return f"{f'{value.average:,.1f}{unit}':>14}{f'{value.maximum:,.1f}{unit}':>14}"


def _acceptance(status: EndpointStatus) -> Iterator[str]:
    found = status.acceptance
    if found is None:
        if status.speculation is not None:
            yield "acceptance length: not known, nothing was drafted or nobody tells"
        return
    yield (
        f"acceptance length {found.acceptance_length:.2f} over {found.num_drafts:,.0f} drafts "
        f"({found.source})"
    )
    yield from _positions(found, status.drift)
    if status.drift is not None:
        yield _verdict(status.drift)


def _positions(found: Acceptance, drift: Drift | None) -> Iterator[str]:
    count = len(found.num_accepted_tokens_per_pos)
    rows: list[tuple[str, Sequence[float | None]]] = [
        ("unconditional", found.unconditional),
        ("conditional", found.conditional),
    ]
    if drift is not None and drift.expected.unconditional:
        rows.append(("expected, unconditional", drift.expected.unconditional[:count]))
    yield f"  {'position':<{_LABEL}}" + "".join(f"{i + 1:>6}" for i in range(count))
    for name, shares in rows:
        cells = ("-" if share is None else f"{share:.3f}" for share in shares)
        yield f"  {name:<{_LABEL}}" + "".join(f"{cell:>6}" for cell in cells)


def _verdict(drift: Drift) -> str:
    expected = f"{drift.expected.acceptance_length:.2f} ({drift.expected.source})"
    change = f"{drift.share:+.1%} beside the expected {expected}"
    if not drift.is_known:
        return f"drift: {change}; too few drafts to say"
    if drift.is_drift:
        return (
            f"DRIFT: {change}, more than {TOLERATED_DROP:.0%}: docs/operations.md says what to do"
        )
    return f"drift: {change}, within {TOLERATED_DROP:.0%}"
