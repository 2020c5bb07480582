"""What /metrics says, read back with prometheus-client's parsers."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import REGISTRY, CollectorRegistry, Histogram
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as openmetrics_families,
)
from prometheus_client.parser import text_string_to_metric_families

from peagle import __version__
from peagle.client.counters import read_counters
from peagle.engine.outputs import RequestOutput
from peagle.engine.stats import Calibration, EngineStats, SpeculationStats
from peagle.evaluation.endpoint_answers import stats_of
from peagle.serving import metrics as metrics_file
from peagle.serving.metrics import Failure, Metrics

SOURCE = Path(__file__).resolve().parents[2] / "src"
PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;q=0.4,"
    "text/plain;version=0.0.4;q=0.3,*/*;q=0.1"
)
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def snapshot(num_steps: int = 10, accepted: list[int] | None = None, **fields: int) -> EngineStats:
    """A look at an engine whose five drafts of three tokens were accepted as given."""
    speculation = SpeculationStats()
    for num_accepted in accepted if accepted is not None else [3, 1, 0, 2, 0]:
        speculation.record(3, num_accepted)
    given = {
        "num_waiting": 4,
        "num_running": 2,
        "num_kv_blocks": 80,
        "num_free_kv_blocks": 60,
        "num_finished": 0,
        "num_cancelled": 0,
        "num_preemptions": 1,
        "num_prompt_tokens": 100,
        "num_cached_tokens": 32,
        "num_output_tokens": 11,
    }
    return EngineStats(
        num_steps=num_steps, speculation=speculation, step_times={}, **{**given, **fields}
    )


def output(**fields: Any) -> RequestOutput:
    """A finished output: 0.25 s in the queue, first token after 1 s, last after 3 s."""
    given = {
        "text": "abc",
        "token_ids": [5, 6, 7],
        "prompt_token_ids": [1, 2, 3, 4],
        "finish_reason": "stop",
        "stats": SpeculationStats(),
        "elapsed_s": 3.0,
        "time_to_first_token_s": 1.0,
        "queue_time_s": 0.25,
    }
    return RequestOutput(**{**given, **fields})


def busy_metrics() -> Metrics:
    """Metrics after some of everything."""
    metrics = Metrics("m")
    metrics.record_engine(0, snapshot())
    metrics.first_token(0.04)
    metrics.chunk(0.006, 4)
    metrics.finished(output(), 3.5)
    metrics.failed("cancelled")
    return metrics


def samples(metrics: Metrics) -> Samples:
    """(name, sorted labels without model_name) -> value, of everything rendered."""
    found: Samples = {}
    for family in text_string_to_metric_families(metrics.render()[0].decode()):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k != "model_name"}
            key = (sample.name, tuple(sorted(labels.items())))
            assert key not in found, f"{key} is rendered twice"
            found[key] = sample.value
    return found


def value(metrics: Metrics, name: str, **labels: str) -> float:
    return samples(metrics)[f"peagle:{name}", tuple(sorted(labels.items()))]


# ---- engines ----


def test_a_snapshot_under_vllms_names():
    metrics = Metrics("m")
    metrics.record_engine(3, snapshot())
    for name, expected in {
        "num_requests_running": 2,
        "num_requests_waiting": 4,
        "kv_cache_usage_perc": 0.25,
        "num_preemptions_total": 1,
        "prefix_cache_queries_total": 100,
        "prefix_cache_hits_total": 32,
        "prompt_tokens_total": 100,
        "generation_tokens_total": 11,
        "spec_decode_num_drafts_total": 5,
        "spec_decode_num_draft_tokens_total": 15,
        "spec_decode_num_accepted_tokens_total": 6,
        "engine_restarts_total": 0,
    }.items():
        assert value(metrics, name, engine="3") == expected, name


def test_eager_steps_by_reason_go_on_over_a_restart():
    metrics = Metrics("m")
    metrics.record_engine(0, replace(snapshot(), eager_steps={"grammar": 3, "penalties": 1}))
    metrics.record_engine(0, replace(snapshot(11), eager_steps={"grammar": 4, "penalties": 1}))
    metrics.engine_restarted(0)
    metrics.record_engine(0, replace(snapshot(2), eager_steps={"grammar": 2}))
    counts = {
        reason: value(metrics, "eager_steps_total", engine="0", reason=reason)
        for reason in ("grammar", "penalties")
    }
    assert counts == {"grammar": 6, "penalties": 1}


def test_decode_steps_by_k_go_on_over_a_restart():
    metrics = Metrics("m")
    metrics.record_engine(0, replace(snapshot(), decode_steps={7: 3, 0: 1}))
    metrics.engine_restarted(0)
    metrics.record_engine(0, replace(snapshot(2), decode_steps={7: 2}))
    counts = {
        k: value(metrics, "decode_steps_total", engine="0", num_speculative_tokens=k)
        for k in ("0", "7")
    }
    assert counts == {"0": 1, "7": 5}


def test_accepted_tokens_are_counted_per_position():
    metrics = Metrics("m")
    metrics.record_engine(0, snapshot(accepted=[3, 1, 0, 2, 0]))
    name = "spec_decode_num_accepted_tokens_per_pos_total"
    counts = [value(metrics, name, engine="0", position=str(i)) for i in range(3)]
    assert counts == [3, 2, 1]  # drafts accepted up to the first, second, third token
    assert sum(counts) == value(metrics, "spec_decode_num_accepted_tokens_total", engine="0")


def test_trees_are_counted_by_nodes_and_depth():
    # Trees of 9 nodes, of which paths of 3, 0 and 1 nodes were accepted; the last is shallow.
    speculation = SpeculationStats()
    for num_nodes, num_accepted, depth in ((9, 3, 5), (9, 0, 4), (4, 1, 2)):
        speculation.record(num_nodes, num_accepted, depth)
    metrics = Metrics("m")
    metrics.record_engine(0, replace(snapshot(), speculation=speculation))
    totals = {
        name: value(metrics, f"spec_decode_num_{name}_total", engine="0")
        for name in ("drafts", "draft_tokens", "accepted_tokens")
    }
    assert totals == {"drafts": 3, "draft_tokens": 22, "accepted_tokens": 4}
    name = "spec_decode_num_accepted_tokens_per_pos_total"
    counts = [value(metrics, name, engine="0", position=str(i)) for i in range(5)]
    assert counts == [2, 1, 1, 0, 0]


TEXT = "peagle:spec_decode_num_accepted_text_tokens_per_pos"


def test_tokens_of_the_text_are_counted_per_position():
    metrics, plain = Metrics("m"), snapshot().speculation
    metrics.record_engine(0, snapshot())
    assert TEXT not in metrics.render()[0].decode(), "no text drafts"
    assert metrics.speculation()[1] == plain
    both = SpeculationStats()
    for accepted, text_from in ((3, 1), (2, 2), (3, 2), (0, 0)):
        both.record(9, accepted, 4, text_from)
    metrics.record_engine(0, replace(snapshot(11), speculation=both))
    # A new process goes on; its positions are not those of the old one.
    metrics.engine_restarted(0)
    later = SpeculationStats()
    later.record(9, 6, 6, 5)
    metrics.record_engine(0, replace(snapshot(1), speculation=later))
    name = TEXT.removeprefix("peagle:") + "_total"
    counts = [value(metrics, name, engine="0", position=str(i)) for i in range(6)]
    assert counts == [0, 1, 2, 0, 0, 1]
    total = SpeculationStats.pooled([both, later])
    assert metrics.speculation()[1] == total
    drafts = read_counters(metrics.render()[0].decode(), "m").drafts
    assert stats_of(drafts) == total


def test_the_error_of_predicted_acceptance():
    metrics, error = Metrics("m"), "spec_decode_calibration_error"
    metrics.record_engine(0, snapshot())
    assert value(metrics, error, engine="0") == 0, "no tree was verified"
    calibration = Calibration()
    calibration.num_nodes[2], calibration.predicted[2], calibration.accepted[2] = 40, 10.0, 14
    calibration.num_nodes[9], calibration.predicted[9], calibration.accepted[9] = 10, 9.5, 9
    metrics.record_engine(0, replace(snapshot(11), calibration=calibration))
    assert value(metrics, error, engine="0") == pytest.approx((4 + 0.5) / 50)


def test_hangs_signs_of_life_and_the_oldest_request_without_a_token(
    monkeypatch: pytest.MonkeyPatch,
):
    clock = iter([100.0, 101.0, 105.0, 110.0, 111.0])  # two requests begin, three looks
    monkeypatch.setattr(metrics_file, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    metrics = Metrics("m")
    first, second = object(), object()
    metrics.begins_to_wait(first)
    metrics.begins_to_wait(second)
    metrics.engine_beat(1, 12.5)
    metrics.engine_hung(1)
    found = samples(metrics)
    assert found["peagle:engine_last_beat_seconds", (("engine", "1"),)] == 12.5
    assert found["peagle:engine_hangs_total", (("engine", "1"),)] == 1
    assert found["peagle:oldest_waiting_request_seconds", ()] == 5
    metrics.waits_no_more(first)
    assert value(metrics, "oldest_waiting_request_seconds") == 9
    metrics.waits_no_more(second)
    metrics.waits_no_more(second)
    assert value(metrics, "oldest_waiting_request_seconds") == 0


def test_engines_are_told_apart():
    metrics = Metrics("m")
    metrics.record_engine(0, snapshot(num_output_tokens=5))
    metrics.record_engine(11, snapshot(num_output_tokens=7))
    metrics.first_token(0.1, engine=11)
    assert value(metrics, "generation_tokens_total", engine="0") == 5
    assert value(metrics, "generation_tokens_total", engine="11") == 7
    assert value(metrics, "time_to_first_token_seconds_count", engine="0") == 0
    assert value(metrics, "time_to_first_token_seconds_count", engine="11") == 1


def test_a_restart_that_is_announced_loses_nothing():
    metrics = Metrics("m")
    metrics.record_engine(0, snapshot(num_steps=3, num_output_tokens=5))
    metrics.engine_restarted(0)
    assert value(metrics, "generation_tokens_total", engine="0") == 5
    assert value(metrics, "num_requests_running", engine="0") == 0
    assert value(metrics, "kv_cache_usage_perc", engine="0") == 0
    # The new process did more before it was first looked at than the old one ever did.
    metrics.record_engine(0, snapshot(num_steps=9, num_output_tokens=50))
    assert value(metrics, "generation_tokens_total", engine="0") == 55
    assert value(metrics, "engine_restarts_total", engine="0") == 1


class FakeEngine:
    """An engine whose processes come and go; `totals` is what all of them did."""

    def __init__(self) -> None:
        self.ended = {"accepted": 0, "tokens": 0, "drafts": 0}
        self.restarts = 0
        self.begin()

    def begin(self) -> None:
        self.num_steps, self.num_tokens = 0, 0
        self.accepted: list[int] = []

    def totals(self) -> dict[str, int]:
        now = {"tokens": self.num_tokens, "drafts": len(self.accepted)}
        now["accepted"] = sum(self.accepted)
        return {name: count + now[name] for name, count in self.ended.items()}

    def die(self) -> None:
        self.ended = self.totals()
        self.restarts += 1
        self.begin()

    def step(self, accepted: list[int], num_tokens: int) -> EngineStats:
        self.num_steps += 1
        self.accepted += accepted
        self.num_tokens = max(0, self.num_tokens + num_tokens)
        return snapshot(self.num_steps, self.accepted, num_output_tokens=self.num_tokens)


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["step", "step", "announced restart", "silent restart"]),
        st.lists(st.integers(0, 3), max_size=4),  # accepted tokens of the drafts of a step
        st.integers(-2, 9),  # its output tokens; below 0: those of a stop string are taken back
        st.booleans(),  # somebody looks
    ),
    min_size=1,
    max_size=25,
)


@settings(deadline=None, max_examples=30)
@given(EVENTS)
def test_counters_never_fall_and_end_at_the_sum_of_all_processes(events):
    metrics, engine = Metrics("m"), FakeEngine()
    before: Samples = {}
    most_tokens = 0
    for event, accepted, num_tokens, looked in events:
        if event == "announced restart":
            engine.die()
            metrics.engine_restarted(0)
        elif event == "silent restart" and engine.num_steps > 1:
            engine.die()
        metrics.record_engine(0, engine.step(accepted, num_tokens))
        if looked:
            now = samples(metrics)
            most_tokens = max(most_tokens, engine.totals()["tokens"])
            assert {key for key in before if key[0].endswith("_total")} <= now.keys()
            for key, old in before.items():
                assert now[key] >= old or not key[0].endswith("_total"), key
            before = now

    expected = engine.totals()
    for name, count in {
        "spec_decode_num_drafts_total": expected["drafts"],
        "spec_decode_num_accepted_tokens_total": expected["accepted"],
        "generation_tokens_total": max(most_tokens, expected["tokens"]),
        "engine_restarts_total": engine.restarts,
    }.items():
        assert value(metrics, name, engine="0") == count, name


# ---- requests ----


SECONDS = st.one_of(
    st.floats(0, 20, allow_nan=False), st.sampled_from([0.0, 0.0015, 0.001, 7.5, 0.0006])
)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(SECONDS, st.integers(0, 9)), max_size=30))
def test_bursts_as_prometheus_client_counts_them_one_by_one(bursts):
    metrics = Metrics("m")
    metrics.record_engine(0, snapshot())
    rendered = samples(metrics)
    oracles = {}
    for name in ("inter_token_latency_seconds", "inter_chunk_latency_seconds"):
        bounds = [
            float(dict(labels)["le"]) for n, labels in rendered if n == f"peagle:{name}_bucket"
        ]
        oracles[name] = Histogram(name, "x", registry=CollectorRegistry(), buckets=bounds)
    for seconds, num_tokens in bursts:
        metrics.chunk(seconds, num_tokens)
        oracles["inter_chunk_latency_seconds"].observe(seconds)
        for _ in range(num_tokens):
            oracles["inter_token_latency_seconds"].observe(seconds / num_tokens)

    rendered = samples(metrics)
    for oracle in oracles.values():
        (family,) = oracle.collect()
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                labels = tuple(sorted({**sample.labels, "engine": "0"}.items()))
                assert rendered[f"peagle:{sample.name}", labels] == pytest.approx(sample.value)


def test_a_finished_output():
    metrics = Metrics("m")
    metrics.finished(output(), 3.5)
    metrics.finished(output(finish_reason="length"), 3.5)
    for name, expected in {
        "e2e_request_latency_seconds": 3.5,
        "request_queue_time_seconds": 0.25,
        "request_prefill_time_seconds": 0.75,
        "request_decode_time_seconds": 2.0,
        "request_prompt_tokens": 4,
        "request_generation_tokens": 3,
    }.items():
        assert value(metrics, f"{name}_sum", engine="0") == 2 * expected, name
        assert value(metrics, f"{name}_count", engine="0") == 2, name
    success = "request_success_total"
    assert value(metrics, success, engine="0", finished_reason="stop") == 1
    assert value(metrics, success, engine="0", finished_reason="length") == 1


def test_an_output_without_tokens_was_in_its_prompt_pass_to_the_end():
    metrics = Metrics("m")
    metrics.finished(output(token_ids=[], elapsed_s=1.25, time_to_first_token_s=0.0), 1.5)
    assert value(metrics, "request_prefill_time_seconds_sum", engine="0") == 1.0
    assert value(metrics, "request_decode_time_seconds_sum", engine="0") == 0.0


def test_failures():
    metrics = Metrics("m")
    reasons: tuple[Failure, ...] = get_args(Failure)
    for number, reason in enumerate(reasons):
        for _ in range(number):
            metrics.failed(reason)
    counts = [value(metrics, "request_failure_total", reason=reason) for reason in reasons]
    assert counts == list(range(len(reasons)))


# ---- the page ----


def test_what_there_is_before_the_first_request():
    metrics = Metrics("m")
    metrics.record_engine(0, snapshot(accepted=[]))
    found = samples(metrics)
    assert found["peagle:build_info", (("version", __version__),)] == 1
    for reason in ("stop", "length"):  # from 0 on, or rate() would miss the first of them
        assert value(metrics, "request_success_total", engine="0", finished_reason=reason) == 0
    assert {name for name, _ in found if name.endswith("_count")} == {
        "peagle:time_to_first_token_seconds_count",
        "peagle:inter_token_latency_seconds_count",
        "peagle:inter_chunk_latency_seconds_count",
        "peagle:e2e_request_latency_seconds_count",
        "peagle:request_queue_time_seconds_count",
        "peagle:request_prefill_time_seconds_count",
        "peagle:request_decode_time_seconds_count",
        "peagle:request_prompt_tokens_count",
        "peagle:request_generation_tokens_count",
    }


def test_several_in_one_process_do_not_meet():
    everybodys = {family.name for family in REGISTRY.collect()}
    one, other = Metrics("m"), Metrics("m")
    one.first_token(0.1)
    one.record_engine(0, snapshot())
    other.record_engine(0, snapshot(num_output_tokens=1))
    assert value(one, "generation_tokens_total", engine="0") == 11
    assert value(other, "generation_tokens_total", engine="0") == 1
    assert value(other, "time_to_first_token_seconds_count", engine="0") == 0
    assert {family.name for family in REGISTRY.collect()} == everybodys


@pytest.mark.parametrize(
    "accept", [None, "", "*/*", "text/plain;version=0.0.4;q=0.3", "text/html, application/json"]
)
def test_prometheus_text_is_the_default(accept):
    body, content_type = busy_metrics().render(accept)
    assert content_type == "text/plain; version=0.0.4; charset=utf-8"
    assert b"# EOF" not in body
    assert b"# TYPE peagle:spec_decode_num_drafts_total counter" in body


@pytest.mark.parametrize(
    "accept",
    [
        PROMETHEUS_3,
        "Application/OpenMetrics-Text",
        "application/openmetrics-text; version=nonsense",
    ],
)
def test_openmetrics_on_demand(accept):
    metrics = busy_metrics()
    body, content_type = metrics.render(accept)
    assert content_type == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    # The parser is strict: order of samples, suffixes, the end of the file.
    families = {family.name: family for family in openmetrics_families(body.decode())}
    assert families["peagle:build"].type == "info"
    found = {
        (
            sample.name,
            tuple(sorted((k, v) for k, v in sample.labels.items() if k != "model_name")),
        ): sample.value
        for family in families.values()
        for sample in family.samples
    }
    assert found == samples(metrics)


@pytest.mark.parametrize("accept", [None, PROMETHEUS_3])
@given(name=st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
@settings(deadline=None, max_examples=25)
def test_any_model_name_comes_back(accept, name):
    parse = openmetrics_families if accept else text_string_to_metric_families
    metrics = Metrics(name)
    metrics.first_token(0.1)
    names = {
        sample.labels["model_name"]
        for family in parse(metrics.render(accept)[0].decode())
        for sample in family.samples
    }
    assert names == {name}


def test_metrics_and_spans_load_nothing_heavy():
    code = (
        "import sys, peagle.serving.emf, peagle.serving.metrics, peagle.serving.tracing\n"
        "print(sorted({'opentelemetry', 'torch', 'requests', 'google'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.stdout.strip() == "[]", result.stderr
