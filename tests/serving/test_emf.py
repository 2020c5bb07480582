"""What CloudWatch is told of acceptance: valid by the format's specification, and deltas."""

import asyncio
import io
import json
import sys
from dataclasses import replace

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peagle.config import MAX_SPECULATIVE_TOKENS
from peagle.config import cloudwatch as names
from peagle.engine.stats import EngineStats, SpeculationStats
from peagle.serving.emf import AcceptanceLog, dimensions_from, document, publishing
from peagle.serving.metrics import Metrics

# "Specification: Embedded metric format" of the CloudWatch User Guide, in our words: what a
# document must hold, and the limits of its parts (30 dimensions, 100 metrics, names to 255).
NAME = {"type": "string", "minLength": 1, "maxLength": 255}
DIRECTIVE = {
    "type": "object",
    "required": ["Namespace", "Dimensions", "Metrics"],
    "additionalProperties": False,
    "properties": {
        "Namespace": NAME,
        "Dimensions": {
            "type": "array",
            "minItems": 1,
            "items": {"type": "array", "minItems": 1, "maxItems": 30, "items": NAME},
        },
        "Metrics": {
            "type": "array",
            "minItems": 1,
            "maxItems": 100,
            "items": {
                "type": "object",
                "required": ["Name"],
                "additionalProperties": False,
                "properties": {
                    "Name": NAME,
                    "Unit": {"enum": ["Count", "None", "Percent", "Milliseconds"]},
                    "StorageResolution": {"enum": [1, 60]},
                },
            },
        },
    },
}
SCHEMA = {
    "type": "object",
    "required": ["_aws"],
    "properties": {
        "_aws": {
            "type": "object",
            "required": ["Timestamp", "CloudWatchMetrics"],
            "additionalProperties": False,
            "properties": {
                "Timestamp": {"type": "integer", "minimum": 1_000_000_000_000},
                "CloudWatchMetrics": {"type": "array", "minItems": 1, "items": DIRECTIVE},
            },
        }
    },
}
NOW_MS = 1_790_000_000_000
ENDPOINT = {names.ENDPOINT: "code", names.VARIANT: "AllTraffic"}
VARIABLES = {names.ENDPOINT_VARIABLE: "code", names.VARIANT_VARIABLE: "AllTraffic"}
IDLE = EngineStats(0, 0, 8, 8, 1, 0, 0, 0, 0, 0, 0, SpeculationStats(), {})


def check(told: dict) -> None:
    """What the schema says, and what a schema cannot: references lead to members of the root."""
    jsonschema.validate(told, SCHEMA)
    for directive in told["_aws"]["CloudWatchMetrics"]:
        for keys in directive["Dimensions"]:
            assert all(isinstance(told[key], str) and 1 <= len(told[key]) <= 1024 for key in keys)
        for metric in directive["Metrics"]:
            value = told[metric["Name"]]
            assert isinstance(value, int | float) and not isinstance(value, bool)
    assert len(json.dumps(told)) < 256 * 1024


@st.composite
def counters(draw: st.DrawFn) -> SpeculationStats:
    """Of drafts that each had one length and were accepted to one depth."""
    stats = SpeculationStats()
    drafts = st.tuples(st.integers(0, MAX_SPECULATIVE_TOKENS), st.integers(0, 99))
    for drafted, accepted in draw(st.lists(drafts, max_size=20)):
        stats.record(drafted, min(accepted, drafted))
    return stats


@pytest.mark.slow
@given(counters())
def test_every_document_keeps_the_specification(stats):
    told = document(stats, ENDPOINT, NOW_MS)
    check(told)
    assert (told["EndpointName"], told["VariantName"]) == ("code", "AllTraffic")
    listed = [m["Name"] for d in told["_aws"]["CloudWatchMetrics"] for m in d["Metrics"]]
    assert len(listed) == len(set(listed))
    assert set(listed) == set(told) - {"_aws", *ENDPOINT}


def test_the_schema_of_this_test_refuses_what_the_specification_does():
    good = document(SpeculationStats(1, 2, 1, [1, 0]), ENDPOINT, NOW_MS)
    check(good)
    (directive,) = good["_aws"]["CloudWatchMetrics"]
    for wrong in (
        {**directive, "Namespace": ""},
        {**directive, "Dimensions": [[f"d{i}" for i in range(31)]]},
        {**directive, "Metrics": directive["Metrics"] * 15},
        {**directive, "Metrics": [{"Name": "X", "Unit": "Tokens"}]},
    ):
        with pytest.raises(jsonschema.ValidationError):
            check({**good, "_aws": {**good["_aws"], "CloudWatchMetrics": [wrong]}})


def test_values_of_one_interval():
    stats = SpeculationStats(10, 40, 18, [9, 5, 3, 1])
    told = document(stats, ENDPOINT, NOW_MS)
    assert told["_aws"]["Timestamp"] == NOW_MS
    assert {k: v for k, v in told.items() if k not in ("_aws", *ENDPOINT)} == {
        "NumDrafts": 10,
        "NumDraftTokens": 40,
        "NumAcceptedTokens": 18,
        "NumAcceptedTokensPos0": 9,
        "NumAcceptedTokensPos1": 5,
        "NumAcceptedTokensPos2": 3,
        "NumAcceptedTokensPos3": 1,
        "AcceptanceLength": 2.8,
        "AcceptancePos0": 0.9,
        "AcceptancePos1": 0.5,
        "AcceptancePos2": 0.3,
        "AcceptancePos3": 0.1,
    }


def test_no_acceptance_is_told_where_nothing_was_drafted():
    told = document(SpeculationStats(), ENDPOINT, NOW_MS)
    assert "AcceptanceLength" not in told
    assert told["NumDrafts"] == 0


def test_the_environment_names_the_endpoint():
    assert dimensions_from(VARIABLES, "m") == ENDPOINT
    assert dimensions_from({names.ENDPOINT_VARIABLE: "code"}, "m") == {"ModelName": "m"}
    assert dimensions_from({}, "org/model") == {"ModelName": "org/model"}


# ---- lines of a server ----


def snapshot(num_tokens: int, *drafts: tuple[int, int]) -> EngineStats:
    """An engine that gave out so many tokens, with drafts of (length, accepted)."""
    stats = SpeculationStats()
    for drafted, accepted in drafts:
        stats.record(drafted, accepted)
    return replace(IDLE, num_output_tokens=num_tokens, speculation=stats)


def lines(stream: io.StringIO) -> list[dict]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_tells_what_was_drafted_since_the_last_one():
    metrics, stream = Metrics("m"), io.StringIO()
    metrics.record_engine(0, snapshot(10, (3, 3), (3, 0)))
    log = AcceptanceLog(metrics, ENDPOINT, stream)
    log.write()
    assert lines(stream) == []  # what was before is nobody's interval
    metrics.record_engine(0, snapshot(14, (3, 3), (3, 0), (3, 3)))
    metrics.record_engine(1, snapshot(2, (3, 1)))
    log.write()
    log.write()
    (told,) = lines(stream)
    check(told)
    assert (told["NumDrafts"], told["NumAcceptedTokens"]) == (2, 4)
    assert told["AcceptanceLength"] == 3.0
    assert [told[f"AcceptancePos{i}"] for i in range(3)] == [1.0, 0.5, 0.5]


def test_sums_of_all_lines_are_the_totals_also_across_a_restart_of_an_engine():
    metrics, stream = Metrics("m"), io.StringIO()
    log = AcceptanceLog(metrics, ENDPOINT, stream)
    for shot in (snapshot(4, (2, 2)), snapshot(8, (2, 2), (2, 1))):
        metrics.record_engine(0, shot)
        log.write()
    metrics.engine_restarted(0)
    log.write()
    metrics.record_engine(0, snapshot(3, (2, 2)))
    log.write()
    assert sum(one["NumDrafts"] for one in lines(stream)) == 3
    assert sum(one["NumAcceptedTokens"] for one in lines(stream)) == 5


def test_tokens_without_drafts_are_told_as_no_drafts():
    """So that a server which ceased to draft does not look like one without traffic."""
    metrics, stream = Metrics("m"), io.StringIO()
    log = AcceptanceLog(metrics, ENDPOINT, stream)
    metrics.record_engine(0, snapshot(5))
    log.write()
    assert [one["NumDrafts"] for one in lines(stream)] == [0]


@pytest.mark.parametrize(("interval", "at_least"), [(0.01, 2), (60, 1), (0, 0)])
def test_lines_come_at_the_interval_and_at_the_end(monkeypatch, capsys, interval, at_least):
    for variable, value in VARIABLES.items():
        monkeypatch.setenv(variable, value)
    metrics = Metrics("m")

    async def run() -> None:
        async with publishing(metrics, "m", interval):
            metrics.record_engine(0, snapshot(4, (2, 2)))
            await asyncio.sleep(0.1)
            metrics.record_engine(0, snapshot(8, (2, 2), (2, 1)))

    asyncio.run(run())
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(told) >= at_least
    assert sum(one["NumDrafts"] for one in told) == (2 if interval else 0)
    assert all(one["EndpointName"] == "code" for one in told)


def test_a_reader_that_went_away_ends_the_lines_and_not_the_server(caplog):
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError(32, "Broken pipe")

    metrics = Metrics("m")

    async def run() -> bool:
        async with publishing(metrics, "m", 0.01):
            metrics.record_engine(0, snapshot(4, (2, 2)))
            await asyncio.sleep(0.1)
        return True

    before, sys.stdout = sys.stdout, Closed()
    try:
        assert asyncio.run(run())
    finally:
        sys.stdout = before
    assert "Broken pipe" in caplog.text
