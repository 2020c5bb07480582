"""`peagle deploy sagemaker status | logs | delete`: an endpoint's state, log and end."""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import typer

from peagle.cli.deploy_options import EndpointName, Region, Variant, leftovers_printed
from peagle.cli.groups import Format, OutputFormat
from peagle.cli.terminal import printable
from peagle.deploy.aws import Clients
from peagle.deploy.logs import LogLine, seconds_ago
from peagle.deploy.monitoring import TOLERATED_DROP, Acceptance, Drift
from peagle.deploy.status import EndpointStatus, MetricValue, age, describe, read_status, variants
from peagle.errors import UserError

STATUS_EXAMPLES = """
State, metrics of the last hour, acceptance; the same every 30 s:
  peagle deploy sagemaker status peagle-gpt-oss-20b
  peagle deploy sagemaker status peagle-gpt-oss-20b --watch

Acceptance of the last day beside what `peagle eval --output measured` found:
  peagle deploy sagemaker status qwen3 --window 1d --expected measured/acceptance.json
  peagle deploy sagemaker status qwen3 --expected 3.1 --format json
"""
LOGS_EXAMPLES = """
The last ten minutes, then all that comes:
  peagle deploy sagemaker logs qwen3
  peagle deploy sagemaker logs qwen3 --follow

Errors of the last day, as JSON; what vLLM says of its drafts:
  peagle deploy sagemaker logs qwen3 --since 1d --filter ERROR --format json
  peagle deploy sagemaker logs qwen3 --since 1h --filter '"SpecDecoding metrics"'
"""
_WATCH_S = 30.0


# ---- status ----


def status(
    endpoint: EndpointName,
    window: str = typer.Option("1h", metavar="TIME", help="How far back metrics go: 10m, 2h, 7d."),
    expected: str | None = typer.Option(
        None,
        metavar="LENGTH|FILE",
        help="Acceptance length to compare with, or acceptance.json of `peagle eval`.",
        show_default="the endpoint's tag peagle-acceptance-length",
    ),
    watch: bool = typer.Option(False, "--watch", help="Look again every 30 s until Ctrl-C."),
    region: Region = None,
    output_format: Format = OutputFormat.TEXT,
) -> None:
    """Show an endpoint: state, instances, how it drafts, metrics and acceptance.

    Acceptance covers the whole window: it comes from counts of our container in CloudWatch, else
    from lines that vLLM logged in the last hour. Less than 85% of the expected length is called
    drift.
    """
    window_s = seconds_ago(window, "--window")
    clients = Clients(region)
    while True:
        found = read_status(
            clients, describe(clients, endpoint), window_s=window_s, expected=expected
        )
        if output_format is OutputFormat.JSON:
            print(json.dumps(found.to_json()), flush=True)
        else:
            print("\n".join(printable(line) for line in status_lines(found)), flush=True)
        if not watch:
            return
        if output_format is OutputFormat.TEXT:
            print(f"--- {datetime.now(UTC):%H:%M:%S} UTC, again in {_WATCH_S:g} s", flush=True)
        clients.clock.sleep(_WATCH_S)


# ---- logs ----


def logs(
    endpoint: EndpointName,
    since: str = typer.Option("10m", metavar="TIME", help="How far back: 90s, 10m, 2h, 1d."),
    follow: bool = typer.Option(
        False, "--follow", "-f", help="Go on with what comes, until Ctrl-C."
    ),
    pattern: str = typer.Option(
        "",
        "--filter",
        metavar="PATTERN",
        help="Filter pattern of CloudWatch Logs, like ERROR or '\"two words\"'.",
    ),
    variant: Variant = None,
    region: Region = None,
    output_format: Format = OutputFormat.TEXT,
) -> None:
    """Show the log of the containers of an endpoint.

    Time, variant and instance come first on every line; times are UTC.
    """
    from peagle.deploy import logs as source

    since_ms = round(1000 * (time.time() - source.seconds_ago(since)))
    clients = Clients(region)
    where: dict[str, Any] = {"variant": variant or "", "pattern": pattern}
    if follow:
        for line in source.follow(clients, endpoint, since_ms, **where):
            if line is not None:
                _show_line(line, output_format)
        return
    is_empty = True
    for line in source.read(clients, endpoint, since_ms, **where):
        _show_line(line, output_format)
        is_empty = False
    if is_empty:
        print(f"nothing in the last {since}; --since looks further back", file=sys.stderr)


def _show_line(line: LogLine, output_format: OutputFormat) -> None:
    if output_format is OutputFormat.JSON:
        fields = {"time": line.time, "stream": line.stream, "message": line.text}
        print(json.dumps(fields), flush=True)
    else:
        print(f"{line.time} {line.stream} {printable(line.text)}", flush=True)


_LABEL = 28
_METRIC_NAMES = {
    "SageMakerVariantConcurrentRequestsPerModelHighResolution": "requests at once",
    "SageMakerVariantInvocationsPerInstance": "requests a minute",
}


def status_lines(status: EndpointStatus) -> list[str]:
    """Return the lines of a status for people."""
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


DELETE_EXAMPLES = """
Show what would be deleted, and ask:
  peagle deploy sagemaker delete peagle-gpt-oss-20b

Without a question, in another region; keep the model's files in S3; for a program:
  peagle deploy sagemaker delete qwen3 --yes --region eu-west-1
  peagle deploy sagemaker delete qwen3 --yes --keep-uploads
  peagle deploy sagemaker delete qwen3 --yes --format json
"""


def delete(
    endpoint: EndpointName,
    region: Region = None,
    keep_uploads: bool = typer.Option(
        False, "--keep-uploads", help="Leave the files that peagle put into S3."
    ),
    yes: bool = typer.Option(False, "--yes", help="Delete without a question."),
    output_format: Format = OutputFormat.TEXT,
) -> None:
    """Delete an endpoint's stack (scaling, endpoint, configuration, model), then its uploads.

    A stack that is gone is no error, so that the command can be run again. Objects in S3 go only if
    peagle put them there. Anything that could not be deleted is listed with a command that does it.
    """
    from peagle.deploy import stack
    from peagle.deploy.deployment import check_endpoint_name

    clients = Clients(region)
    check_endpoint_name(endpoint)
    names: list[str] = []
    files: list[str] = []
    kept: list[str] = []
    if stack.find_stack(clients, endpoint) is None:
        stack.require_absent(clients, endpoint)
    else:
        names = stack.resources_of(clients, endpoint)
        files = list(stack.uploads_of(clients, endpoint))
        if keep_uploads:
            files, kept = [], files
        _confirm(endpoint, clients.region, [*names, *files], yes=yes)
        with leftovers_printed(output_format):
            stack.delete(clients, endpoint, files)
    deleted = [*names, *files]
    if output_format is OutputFormat.JSON:
        result = {"endpoint": endpoint, "region": clients.region}
        print(json.dumps({**result, "deleted": deleted, "kept": kept}, indent=2))
    else:
        what = "\n".join(f"  {name}" for name in deleted)
        print(f"deleted:\n{what}" if deleted else f"There is nothing of endpoint {endpoint!r}.")
        for uri in kept:
            print(f"kept: {uri}")


def _confirm(endpoint: str, region: str, names: list[str], *, yes: bool) -> None:
    if yes:
        return
    shown = "\n".join(f"  {name}" for name in names)
    print(f"To be deleted in {region}:\n{shown}", file=sys.stderr)
    if not sys.stdin.isatty():
        raise UserError(f"Nothing was deleted of {endpoint!r}: nobody can be asked. Give --yes.")
    typer.confirm("Delete it?", abort=True, err=True)
