"""`peagle deploy sagemaker status | logs`: how an endpoint is, and what it says."""

from __future__ import annotations

import json
import sys
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from peagle.cli.deploy_options import EndpointName, Region, Variant
from peagle.cli.options import Format, OutputFormat
from peagle.cli.terminal import printable

if TYPE_CHECKING:
    from peagle.deploy.logs import LogLine

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


# ---- status ---------------------------------------------------------------------------------


def status(
    endpoint: EndpointName,
    window: Annotated[
        str, typer.Option(metavar="TIME", help="How far back metrics go: 10m, 2h, 7d.")
    ] = "1h",
    expected: Annotated[
        str | None,
        typer.Option(
            metavar="LENGTH|FILE",
            help="Acceptance length to compare with, or acceptance.json of `peagle eval`.",
            show_default="the endpoint's tag peagle-acceptance-length",
        ),
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Look again every 30 s until Ctrl-C.")
    ] = False,
    region: Region = None,
    output_format: Format = OutputFormat.TEXT,
) -> None:
    """Show an endpoint: state, instances, what it drafts with, metrics and acceptance.

    Acceptance is that of the whole window: counts of our container in CloudWatch, else lines that
    vLLM logged in the last hour. Less than 85% of what is expected is called drift.
    """
    from peagle.cli.deploy_view import status_lines
    from peagle.deploy.aws import Clients
    from peagle.deploy.logs import seconds_ago
    from peagle.deploy.status import describe, read_status

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


# ---- logs -----------------------------------------------------------------------------------


def logs(
    endpoint: EndpointName,
    since: Annotated[
        str, typer.Option(metavar="TIME", help="How far back: 90s, 10m, 2h, 1d.")
    ] = "10m",
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with what comes, until Ctrl-C.")
    ] = False,
    pattern: Annotated[
        str,
        typer.Option(
            "--filter",
            metavar="PATTERN",
            help="Filter pattern of CloudWatch Logs, like ERROR or '\"two words\"'.",
        ),
    ] = "",
    variant: Variant = None,
    region: Region = None,
    output_format: Format = OutputFormat.TEXT,
) -> None:
    """Show what the containers of an endpoint wrote.

    Time, variant and instance come first on every line; times are UTC.
    """
    from peagle.deploy import logs as source
    from peagle.deploy.aws import Clients

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
