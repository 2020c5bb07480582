"""`peagle watch`: follow the acceptance of a running server, and warn where it falls."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import typer

from peagle.cli.setup import note
from peagle.cli.terminal import printable
from peagle.disk import needing_room
from peagle.errors import UserError

if TYPE_CHECKING:
    from peagle.evaluation.watching import WatchedInterval

EXAMPLES = """
Write a line every 10 minutes; the first three intervals are the baseline:
  peagle watch http://127.0.0.1:8000 --every 10m --output acceptance.jsonl

Warn where the acceptance length of an hour falls below 3.2, and end after a day:
  peagle watch http://127.0.0.1:8000 --every 1h --baseline 3.2 --count 24

Ctrl-C ends the command with status 0. It goes on while a server is away.
"""

_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?)(?P<unit>[smh])")
_MAX_S = 30 * 86_400.0


def watch(
    url: str = typer.Argument(..., metavar="URL", help="Server, ours or vLLM; with /metrics."),
    every: str = typer.Option(
        "10m", metavar="TIME", help="Length of an interval, like 30s, 10m or 1h; at least 1s."
    ),
    baseline: float | None = typer.Option(
        None,
        metavar="LENGTH",
        help="Acceptance length below which the command warns of an interval.",
        show_default="that of the first 3 intervals with drafts",
    ),
    count: int | None = typer.Option(
        None, metavar="N", help="Number of intervals.", show_default="no end"
    ),
    model: str | None = typer.Option(
        None, help="Name of the server's model.", show_default="the first that the server lists"
    ),
    output: Path | None = typer.Option(
        None,
        metavar="FILE",
        help="File to which each interval is appended as a line of JSON.",
        show_default="standard output",
    ),
) -> None:
    """Follow the acceptance of a running server, and warn where it falls below a baseline.

    The command reads the server's counters of drafts, and asks for no text. PEAGLE_API_KEY holds
    the server's key.
    """
    seconds = _read_duration(every)
    if baseline is not None and not 1 < baseline < math.inf:
        raise UserError(
            f"--baseline is {baseline:g}; expected an acceptance length above 1, like 3.2; it "
            "counts the target's own token too."
        )
    if count is not None and count < 1:
        raise UserError(f"--count is {count}; expected at least 1 interval.")
    from peagle.evaluation.endpoint import EndpointBackend
    from peagle.evaluation.watching import AcceptanceWatch

    server = EndpointBackend(url, model, timeout_s=min(30.0, seconds), option="URL")

    def report(line: str) -> None:
        note(printable(line))

    watching = AcceptanceWatch(server.counters, seconds, baseline, report=report)
    with _opened(output) as file:
        num_below = 0
        try:
            for interval in islice(watching.intervals(), count):
                print(json.dumps(interval.to_json()), file=file, flush=True)
                num_below = num_below + 1 if interval.is_below else 0
                if num_below:
                    report(_warning(interval, num_below))
        except KeyboardInterrupt:
            report("interrupted; watching ends")


def _read_duration(text: str) -> float:
    match = _DURATION.fullmatch(text)
    seconds = float(match["number"]) * _SECONDS[match["unit"]] if match else 0.0
    if not 1 <= seconds <= _MAX_S:
        raise UserError(
            f"--every is {text!r}; expected a time of at least 1s and at most 720h, like 30s, 10m "
            "or 1h."
        )
    return seconds


def _warning(interval: WatchedInterval, num_below: int) -> str:
    low, high = interval.ci or (0.0, 0.0)
    again = f", {num_below} intervals in a row" if num_below > 1 else ""
    return (
        f"acceptance length {interval.acceptance_length or 0.0:.2f} [{low:.2f}, {high:.2f}] is "
        f"below the baseline {interval.baseline or 0.0:.2f}{again}"
    )


@contextmanager
def _opened(path: Path | None) -> Iterator[TextIO]:
    if path is None:
        yield sys.stdout
        return
    try:
        file = path.open("a")
    except OSError as error:
        raise UserError(
            f"--output {str(path)!r} cannot be written: {error.strerror}. Name another file."
        ) from None
    with needing_room(path, "The lines before stay; make room, and watch again."), file:
        yield file
