"""Speed and latency of a run, as `peagle bench` reports them.

Definitions, all in seconds on the clock of the client:
- TTFT, time to first token: from the request's writing to the first chunk that holds a token.
- ITL, inter-token latency: (time since the previous chunk) / (tokens of the chunk), counted once
  for each of these tokens. Speculation brings tokens in bursts; a reader sees the pace of tokens,
  not of bursts. Chunks that one read of the connection brought are one chunk.
  docs/bench.md compares this with guidellm's and vLLM's definitions.
- E2E: from the request's writing to the end of its answer.
- output tokens/s and requests/s: over the time from the first request to the last answer.

Percentiles interpolate linearly between the two nearest values (numpy's default).
"""

from collections.abc import Sequence
from itertools import pairwise, zip_longest
from statistics import median
from typing import Any

import numpy as np

from peagle.evaluation.decoding import Run
from peagle.evaluation.objective import PERCENTILES
from peagle.results import Percentiles, RunFigures


def figures_of(run: Run, gpu_busy: float | None = None) -> RunFigures:
    """Compute the figures of a run; requests without a whole answer count as errors alone.

    At least one answer is whole. `gpu_busy` is the share of the time in which the GPU computed,
    if it could be read.
    """
    whole = [answer for answer in run.answers if not answer.error]
    num_tokens = sum(answer.num_tokens for answer in whole)
    firsts = [t for answer in whole if (t := answer.time_to_first_token_s) is not None]
    gaps = [gap for answer in whole for gap in token_gaps(answer.chunks)]
    drafts = run.counters
    by_source: dict[str, Any] = drafts.shares_by_source if drafts else {}
    return RunFigures(
        seconds=run.seconds,
        num_requests=len(whole),
        num_tokens=num_tokens,
        output_tokens_per_s=num_tokens / run.seconds if run.seconds else 0.0,
        requests_per_s=len(whole) / run.seconds if run.seconds else 0.0,
        ttft_s=spread_of(firsts),
        itl_s=spread_of([gap for gap, _ in gaps], [count for _, count in gaps]),
        e2e_s=spread_of([answer.seconds for answer in whole]),
        acceptance_length=drafts.acceptance_length if drafts and drafts.num_drafts else None,
        **by_source,
        gpu_busy=gpu_busy,
        errors=len(run.answers) - len(whole),
    )


def token_gaps(chunks: Sequence[tuple[float, int]]) -> list[tuple[float, int]]:
    """Return (seconds a token, tokens) of each chunk with tokens after the first.

    [(0.5, 1), (0.7, 2), (0.7, 2), (0.8, 1)] gives [(0.05, 4), (0.1, 1)]: 0.2 s for four tokens
    that came at once, 0.1 s for one.
    """
    merged: list[tuple[float, int]] = []
    for when, count in chunks:
        if merged and merged[-1][0] == when:
            merged[-1] = when, merged[-1][1] + count
        elif count:
            merged.append((when, count))
    pairs = pairwise(merged)
    return [((when - before) / count, count) for (before, _), (when, count) in pairs]


def spread_of(values: Sequence[float], times: Sequence[int] | None = None) -> Percentiles:
    """Return mean and percentiles of weighted values; None for each if there are no values."""
    if not values:
        return Percentiles()
    every = np.asarray(values) if times is None else np.repeat(values, times)
    p50, p90, p99 = map(float, np.percentile(every, PERCENTILES))
    return Percentiles(p50=p50, p90=p90, p99=p99, mean=float(every.mean()))


def median_of(repeats: Sequence[RunFigures]) -> RunFigures:
    """Return the median of each figure over repeats; None for a figure that no repeat has."""

    def middle(values: Sequence[Any]) -> Any:
        known = [value for value in values if value is not None]
        if known and isinstance(known[0], dict):
            names = dict.fromkeys(name for value in known for name in value)
            return {name: middle([value.get(name) for value in known]) for name in names}
        if known and isinstance(known[0], list):
            return [middle(column) for column in zip_longest(*known, fillvalue=0.0)]
        return median(known) if known else None

    return RunFigures.model_validate(middle([repeat.model_dump() for repeat in repeats]))
