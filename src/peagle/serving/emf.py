"""Acceptance for CloudWatch: one line of JSON an interval, in the embedded metric format.

CloudWatch Logs makes metrics of such lines in whatever log group they arrive: on SageMaker a
container only has to print them. The format is the "Specification: Embedded metric format" of the
CloudWatch User Guide.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, TextIO

from peagle.config import cloudwatch as names

if TYPE_CHECKING:
    from peagle.engine import SpeculationStats
    from peagle.serving.metrics import Metrics

logger = logging.getLogger("peagle.serving")

DEFAULT_INTERVAL_S = 60
MAX_METRICS = 100  # of a directive, by the specification


def dimensions_from(environ: Mapping[str, str], model_name: str) -> dict[str, str]:
    """Return endpoint and variant, where the environment names them, else the model."""
    endpoint = environ.get(names.ENDPOINT_VARIABLE)
    variant = environ.get(names.VARIANT_VARIABLE)
    if endpoint and variant:
        return {names.ENDPOINT: endpoint, names.VARIANT: variant}
    return {names.MODEL: model_name}


def document(
    stats: SpeculationStats, dimensions: Mapping[str, str], timestamp_ms: int
) -> dict[str, Any]:
    """Return the drafts of an interval in the embedded metric format.

    Counts are there always; acceptance length and acceptance per position (unconditional, from 0
    to 1) only where something was drafted, since they are not known otherwise.

    Args:
        stats: counters of the interval alone.
        timestamp_ms: end of the interval, milliseconds since 1970.
    """
    counts = {
        names.NUM_DRAFTS: stats.num_drafts,
        names.NUM_DRAFT_TOKENS: stats.num_draft_tokens,
        names.NUM_ACCEPTED_TOKENS: stats.num_accepted_tokens,
    }
    for position, count in enumerate(stats.num_accepted_tokens_per_pos):
        counts[names.num_accepted_at(position)] = count
    ratios: dict[str, float] = {}
    if stats.num_drafts:
        ratios[names.ACCEPTANCE_LENGTH] = round(stats.acceptance_length, 4)
        for position, share in enumerate(stats.acceptance_per_pos):
            ratios[names.acceptance_at(position)] = round(share, 4)
    metrics = [{"Name": name, "Unit": "Count"} for name in counts]
    metrics += [{"Name": name, "Unit": "None"} for name in ratios]
    directives = [
        {
            "Namespace": names.NAMESPACE,
            "Dimensions": [list(dimensions)],
            "Metrics": metrics[first : first + MAX_METRICS],
        }
        for first in range(0, len(metrics), MAX_METRICS)
    ]
    about = {"Timestamp": timestamp_ms, "CloudWatchMetrics": directives}
    return {"_aws": about, **dimensions, **counts, **ratios}


class AcceptanceLog:
    """Writes the drafts since the last line to a stream; None is standard output."""

    def __init__(
        self, metrics: Metrics, dimensions: Mapping[str, str], stream: TextIO | None = None
    ) -> None:
        self._metrics = metrics
        self._dimensions = dict(dimensions)
        self._stream = stream
        self._tokens, self._before = metrics.speculation()

    def write(self) -> None:
        """Write a line; none where no token was given out since the last one."""
        tokens, now = self._metrics.speculation()
        drafted = now.since(self._before)
        if tokens == self._tokens and not drafted.num_drafts:
            return
        self._tokens, self._before = tokens, now
        line = json.dumps(document(drafted, self._dimensions, round(time.time() * 1000)))
        print(line, file=self._stream or sys.stdout, flush=True)


@asynccontextmanager
async def publishing(metrics: Metrics, model_name: str, interval_s: float) -> AsyncIterator[None]:
    """Write a line to standard output each interval, and one at the end; with 0, none."""
    if not interval_s:
        yield
        return
    log = AcceptanceLog(metrics, dimensions_from(os.environ, model_name))

    async def repeat() -> None:
        try:
            while True:
                await asyncio.sleep(interval_s)
                log.write()
        except OSError as error:
            text = "no further metrics for CloudWatch: standard output: %s"
            logger.warning(text, error.strerror)

    task = asyncio.ensure_future(repeat())
    try:
        yield
    finally:
        task.cancel()
        with suppress(OSError):
            log.write()
