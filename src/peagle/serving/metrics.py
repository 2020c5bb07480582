"""Metrics of the server for Prometheus: vLLM's names and meanings under `peagle:`.

One `Metrics` belongs to one event loop: it has no locks. It computes values when it renders them:
it keeps the last snapshot of each engine, and an observation is one addition.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, zip_longest
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, get_args

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.utils import floatToGoString

from peagle import __version__

if TYPE_CHECKING:
    from peagle.engine.outputs import RequestOutput
    from peagle.engine.stats import EngineStats, SpeculationStats

Failure = Literal["cancelled", "refused", "timeout", "invalid", "error"]

_PREFIX = "peagle:"
_SPECULATION = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
# Counts of each position, and what they count.
_PER_POS = {
    "num_accepted_tokens_per_pos": (
        "Drafts with all tokens up to this position (from 0) accepted; of a tree, one path."
    ),
    "num_accepted_text_tokens_per_pos": (
        "Those of them whose token at this position the text alone drafted, no head."
    ),
}
_TEXT = "text/plain; version=0.0.4; charset=utf-8"
_OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"

_PER_TOKEN_S = tuple(
    round(digit * 10.0**power, 6) for power in range(-4, 1) for digit in (1, 1.5, 2, 3, 5, 7.5)
)
_PER_REQUEST_S = tuple(
    round(digit * 10.0**power, 6) for power in range(-3, 4) for digit in (1, 2.5, 5)
)
_TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))

# Name -> (what it counts, the attribute of an engine's snapshot).
_TOTALS = {
    "spec_decode_num_drafts": ("Drafts verified: chains or trees.", "speculation.num_drafts"),
    "spec_decode_num_draft_tokens": (
        "Draft tokens verified; of a tree, all nodes.",
        "speculation.num_draft_tokens",
    ),
    "spec_decode_num_accepted_tokens": (
        "Draft tokens accepted.",
        "speculation.num_accepted_tokens",
    ),
    "num_preemptions": (
        "Times that a request gave its KV up and was computed again.",
        "num_preemptions",
    ),
    "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", "num_prompt_tokens"),
    "prefix_cache_hits": ("Prompt tokens whose KV was in the prefix cache.", "num_cached_tokens"),
    "prompt_tokens": ("Tokens of the prompts admitted, cached ones included.", "num_prompt_tokens"),
    "generation_tokens": ("Tokens given out.", "num_output_tokens"),
}
_NO_TOTALS = [[0] * len(_TOTALS), *([] for _ in _PER_POS)]
_GAUGES: dict[str, tuple[str, Callable[[EngineStats], float]]] = {
    "num_requests_running": ("Outputs being computed.", attrgetter("num_running")),
    "num_requests_waiting": ("Outputs in the queue.", attrgetter("num_waiting")),
    "kv_cache_usage_perc": (
        "Share of the KV blocks in use, 0 to 1.",
        lambda stats: 1 - stats.num_free_kv_blocks / stats.num_kv_blocks,
    ),
    "spec_decode_calibration_error": (
        "Predicted acceptance of tree nodes, distance from what is accepted, 0 to 1.",
        lambda stats: stats.calibration.error or 0.0,
    ),
}
_HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "time_to_first_token_seconds": ("From the request to its first token.", _PER_REQUEST_S),
    "inter_token_latency_seconds": (
        "Time since the previous chunk over the chunk's tokens, once per token.",
        _PER_TOKEN_S,
    ),
    "inter_chunk_latency_seconds": ("Time between two chunks of an output.", _PER_TOKEN_S),
    "e2e_request_latency_seconds": ("From the request to the end of the answer.", _PER_REQUEST_S),
    "request_queue_time_seconds": ("From the request to its admission.", _PER_REQUEST_S),
    "request_prefill_time_seconds": ("From admission to the first token.", _PER_REQUEST_S),
    "request_decode_time_seconds": ("From the first token to the last.", _PER_REQUEST_S),
    "request_prompt_tokens": ("Tokens of the prompt of a finished output.", _TOKENS),
    "request_generation_tokens": ("Tokens of a finished output.", _TOKENS),
}


@dataclass(slots=True)
class RecordCounts:
    """Answers that were recorded, and those that the queue or the disk had no room for."""

    written: int = 0
    dropped: int = 0


@dataclass(slots=True)
class ServedHead:
    """The head that a server drafts with: the name of its folder, and its version.

    A new head has the version 1 + `num_swaps`; one that comes back has its own.
    """

    name: str
    version: int = 1
    num_swaps: int = 0
    num_rollbacks: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the name and the version."""
        return {"name": self.name, "version": self.version}


class Metrics:
    """Counters, gauges and histograms of one server; several may live in one process.

    Engines are known by their index; their counters go on where they were when an engine's process
    is replaced. `num_requests_*` and `finished` count outputs: a request with n = 2 is two of them.

    Args:
        model_name: the label `model_name` of every sample.
        records: counts of recorded answers, where a server records.
        head: the head, where a server may swap it.
    """

    def __init__(
        self,
        model_name: str,
        records: RecordCounts | None = None,
        head: ServedHead | None = None,
    ) -> None:
        self._model_name = model_name
        self._records = records
        self._head = head
        self._engines: dict[int, _Engine] = {}
        self._waiting: dict[int, float] = {}
        self._failures: dict[Failure, int] = dict.fromkeys(get_args(Failure), 0)
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def record_engine(self, engine: int, stats: EngineStats) -> None:
        """Take a snapshot of an engine, whose totals run since its process began.

        Snapshots of an engine come in order. One with fewer steps than the last is from a new
        process: then `engine_restarted` need not have been called.
        """
        at = self._at(engine)
        if at.stats is not None and stats.num_steps < at.stats.num_steps:
            at.restart()
        at.stats = stats

    def engine_restarted(self, engine: int) -> None:
        """Note that an engine's process is gone, before the first snapshot of the next one.

        Only so is a restart seen if the new process has done more than the old one by the time
        of its first snapshot. The engine's gauges are 0 until then.
        """
        self._at(engine).restart()

    def engine_hung(self, engine: int) -> None:
        """Note that an engine wrote no heartbeat and is killed."""
        self._at(engine).num_hangs += 1

    def engine_beat(self, engine: int, seconds: float) -> None:
        """Note the seconds since an engine's last heartbeat."""
        self._at(engine).silent_s = seconds

    def begins_to_wait(self, request: object) -> None:
        """Note that a request begins to wait for its first token."""
        self._waiting[id(request)] = time.monotonic()

    def waits_no_more(self, request: object) -> None:
        """Note that a request has its first token, or has ended; repeated calls do nothing."""
        self._waiting.pop(id(request), None)

    def first_token(self, seconds: float, *, engine: int = 0) -> None:
        """Count the first token of an output, `seconds` after its request came."""
        self._at(engine).first_token.observe(seconds)

    def chunk(self, seconds_since_previous: float, num_tokens: int, *, engine: int = 0) -> None:
        """Count a chunk after the first of its output.

        A burst of n tokens counts n times in the latency between tokens, each with an n-th of the
        time; a chunk without tokens counts only as a chunk.
        """
        at = self._at(engine)
        at.inter_chunk.observe(seconds_since_previous)
        if num_tokens:
            at.inter_token.observe(seconds_since_previous / num_tokens, num_tokens)

    def finished(self, output: RequestOutput, seconds: float, *, engine: int = 0) -> None:
        """Count an output that ended by itself, `seconds` after its request came."""
        at = self._at(engine)
        at.num_finished[output.finish_reason] += 1
        # An output that got no token was in its prompt pass to the end.
        first = output.time_to_first_token_s or output.elapsed_s
        for name, value in (
            ("e2e_request_latency_seconds", seconds),
            ("request_queue_time_seconds", output.queue_time_s),
            ("request_prefill_time_seconds", first - output.queue_time_s),
            ("request_decode_time_seconds", output.elapsed_s - first),
            ("request_prompt_tokens", len(output.prompt_token_ids)),
            ("request_generation_tokens", len(output.token_ids)),
        ):
            at.histograms[name].observe(max(value, 0.0))

    def failed(self, reason: Failure) -> None:
        """Count a request that got no full answer.

        Args:
            reason: "cancelled": the client went away; "refused": no room, loading or draining (429,
                503); "timeout": it took too long (408, 504); "invalid": the request was wrong (400,
                404, 413); "error": the server or an engine failed.

        Raises:
            KeyError: another reason.
        """
        self._failures[reason] += 1

    def speculation(self) -> tuple[int, SpeculationStats]:
        """Return the tokens given out, and the drafts of all engines since the server began."""
        from peagle.engine.stats import SpeculationStats

        num_tokens, total = 0, SpeculationStats()
        for at in self._engines.values():
            values, accepted, of_text = at.totals()
            known = dict(zip(_TOTALS, values))
            num_tokens += known["generation_tokens"]
            counts = {n: known[f"spec_decode_{n}"] for n in _SPECULATION}
            total.add(
                SpeculationStats(
                    **counts,
                    num_accepted_tokens_per_pos=accepted,
                    num_accepted_text_tokens_per_pos=of_text,
                )
            )
        return num_tokens, total

    def render(self, accept: str | None = None) -> tuple[bytes, str]:
        """Return all metrics as (body, content type).

        Args:
            accept: the header; OpenMetrics 1.0 if it names that, else Prometheus's text format.
        """
        kinds = [part.partition(";")[0].strip() for part in (accept or "").lower().split(",")]
        if "application/openmetrics-text" in kinds:
            # Its default makes peagle_ of peagle:, which no query would find.
            body = openmetrics.generate_latest(self._registry, escaping=openmetrics.ALLOWUTF8)
            return body, _OPENMETRICS
        return generate_latest(self._registry), _TEXT

    def collect(self) -> Iterator[Metric]:
        """Yield all families with their samples, for the registry."""

        def family(kind: type[Any], name: str, text: str, *labels: str) -> Any:
            return kind(_PREFIX + name, text, labels=["model_name", *labels])

        counter, gauge, model = CounterMetricFamily, GaugeMetricFamily, self._model_name
        build = family(InfoMetricFamily, "build", "What runs here.")
        build.add_metric([model], {"version": __version__})
        text = "Age of the oldest request that has no token yet; 0 where none waits."
        oldest = family(gauge, "oldest_waiting_request_seconds", text)
        now = time.monotonic()
        since = next(iter(self._waiting.values()), now)  # in the order in which they began
        oldest.add_metric([model], now - since)
        failure = family(counter, "request_failure", "Requests without a full answer.", "reason")
        for reason, count in self._failures.items():
            failure.add_metric([model, reason], count)

        gauges = {name: family(gauge, name, text, "engine") for name, (text, _) in _GAUGES.items()}
        text = "Seconds since an engine's last sign of life; 0 while it loads or compiles."
        beat = family(gauge, "engine_last_beat_seconds", text, "engine")
        text = "Times that an engine gave no sign of life and was killed."
        hangs = family(counter, "engine_hangs", text, "engine")
        text = "Times that an engine began anew."
        restarts = family(counter, "engine_restarts", text, "engine")
        totals = [family(counter, name, text, "engine") for name, (text, _) in _TOTALS.items()]
        per_pos = [
            family(counter, f"spec_decode_{name}", text, "engine", "position")
            for name, text in _PER_POS.items()
        ]
        text = "Decode steps that no CUDA graph could run."
        eager = family(counter, "eager_steps", text, "engine", "reason")
        text = "Decode steps, by the draft tokens verified of a request: K, or nodes of a tree."
        steps = family(counter, "decode_steps", text, "engine", "num_speculative_tokens")
        text = "Outputs that ended by themselves."
        success = family(counter, "request_success", text, "engine", "finished_reason")
        histograms = {
            name: family(HistogramMetricFamily, name, text, "engine")
            for name, (text, _) in _HISTOGRAMS.items()
        }
        for _, at in sorted(self._engines.items()):
            labels = [model, at.label]
            for name, (_, read) in _GAUGES.items():
                gauges[name].add_metric(labels, read(at.stats) if at.stats else 0)
            beat.add_metric(labels, at.silent_s)
            hangs.add_metric(labels, at.num_hangs)
            restarts.add_metric(labels, at.num_restarts)
            values, *positions = at.totals()
            for total, value in zip(totals, values):
                total.add_metric(labels, value)
            for counts, values in zip(per_pos, positions):
                for position, value in enumerate(values):
                    counts.add_metric([*labels, str(position)], value)
            for reason, count in at.eager_steps().items():
                eager.add_metric([*labels, reason], count)
            for k, count in sorted(at.decode_steps().items()):
                steps.add_metric([*labels, str(k)], count)
            for reason, count in at.num_finished.items():
                success.add_metric([*labels, reason], count)
            for name, histogram in at.histograms.items():
                histograms[name].add_metric(labels, histogram.buckets(), histogram.sum)
        yield from (build, *gauges.values(), beat, hangs, oldest)
        if (records := self._records) is not None:
            full = "Answers that were to be recorded, and found the queue or the disk full."
            for name, text, count in (
                ("recorded_answers", "Answers that were recorded.", records.written),
                ("unrecorded_answers", full, records.dropped),
            ):
                answers = family(counter, name, text)
                answers.add_metric([model], count)
                yield answers
        if (head := self._head) is not None:
            served = family(InfoMetricFamily, "head", "The draft head that is served.")
            served.add_metric([model], {"name": head.name, "version": str(head.version)})
            swaps = family(counter, "head_swaps", "Times that the draft head was swapped.")
            swaps.add_metric([model], head.num_swaps)
            text = "Times that a trial ended with the old draft head."
            rollbacks = family(counter, "head_rollbacks", text)
            rollbacks.add_metric([model], head.num_rollbacks)
            yield from (served, swaps, rollbacks)
        yield from (
            *totals,
            per_pos[0],
            *(counts for counts in per_pos[1:] if counts.samples),  # none where no text drafts
            eager,
            steps,
            restarts,
            success,
            failure,
            *histograms.values(),
        )

    def _at(self, engine: int) -> _Engine:
        found = self._engines.get(engine)
        if found is None:
            found = self._engines[engine] = _Engine(engine)
        return found


class _Engine:
    """The counts of one engine over all its processes.

    Attributes:
        stats: the last snapshot of the running process, None before its first.
        num_finished: outputs, by why they ended.
        silent_s: seconds since the engine's last sign of life.
    """

    def __init__(self, engine: int) -> None:
        self.label = str(engine)
        self.stats: EngineStats | None = None
        self.num_restarts = 0
        self.num_hangs = 0
        self.silent_s = 0.0
        self.num_finished = Counter(stop=0, length=0)
        self.histograms = {name: _Histogram(bounds) for name, (_, bounds) in _HISTOGRAMS.items()}
        self.first_token = self.histograms["time_to_first_token_seconds"]
        self.inter_token = self.histograms["inter_token_latency_seconds"]
        self.inter_chunk = self.histograms["inter_chunk_latency_seconds"]
        self._ended = _NO_TOTALS  # the totals of processes that are gone
        self._totals = _NO_TOTALS
        self._ended_eager: Counter[str] = Counter()
        self._ended_steps: Counter[int] = Counter()

    def restart(self) -> None:
        self._ended = self._sums()
        self._ended_eager = self.eager_steps()
        self._ended_steps = self.decode_steps()
        self.stats = None
        self.num_restarts += 1

    def totals(self) -> list[list[int]]:
        """Return the values of _TOTALS, and of each of _PER_POS; none is lower than before.

        An engine takes the tokens of a stop string back: its count of tokens may fall. A counter
        stays where it was until the count has caught up.
        """
        self._totals = _joined(max, self._totals, self._sums())
        return self._totals

    def eager_steps(self) -> Counter[str]:
        """Return the steps that no graph could run, by the reason."""
        return self._ended_eager + Counter(self.stats.eager_steps if self.stats else {})

    def decode_steps(self) -> Counter[int]:
        """Return the decode steps by K."""
        return self._ended_steps + Counter(self.stats.decode_steps if self.stats else {})

    def _sums(self) -> list[list[int]]:
        if self.stats is None:
            return self._ended
        now = [attrgetter(where)(self.stats) for _, where in _TOTALS.values()]
        per_pos = [getattr(self.stats.speculation, name) for name in _PER_POS]
        return _joined(sum, self._ended, [now, *per_pos])


def _joined(
    join: Callable[[tuple[int, ...]], int], one: list[list[int]], other: list[list[int]]
) -> list[list[int]]:
    """Return lists whose items are joined from those of two; missing items are 0."""
    pairs = zip(one, other, strict=True)
    return [[join(pair) for pair in zip_longest(*both, fillvalue=0)] for both in pairs]


class _Histogram:
    """Values in buckets, with weights: prometheus-client's own takes one value at a time."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """Return (upper bound, number of values up to it) of every bucket."""
        bounds = [floatToGoString(bound) for bound in (*self.bounds, float("inf"))]
        return list(zip(bounds, accumulate(self.counts)))
