"""The dashboard: importable, tidy, and asking only for what /metrics has."""

import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

DASHBOARD = Path(__file__).resolve().parents[2] / "deploy" / "grafana.json"
NAME = re.compile(r"peagle:\w+")
SELECTOR = re.compile(r"(peagle:\w+)\{([^}]*)\}(\[[^\]]+\])?")
CLOSING = {")": "(", "]": "[", "}": "{"}


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    return json.loads(DASHBOARD.read_text())


@pytest.fixture(scope="module")
def queries(dashboard) -> list[str]:
    return [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]


def is_balanced(query: str) -> bool:
    stack = []
    for character in re.sub(r'"(\\.|[^"\\])*"', "", query):
        if character in "([{":
            stack.append(character)
        elif character in CLOSING and (not stack or stack.pop() != CLOSING[character]):
            return False
    return not stack and '"' not in re.sub(r'"(\\.|[^"\\])*"', "", query)


def test_panels_have_ids_of_their_own(dashboard):
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids)) > 15


def test_panels_do_not_overlap(dashboard):
    boxes = [(panel["title"], panel["gridPos"]) for panel in dashboard["panels"]]
    for title, box in boxes:
        assert box["x"] >= 0 and box["x"] + box["w"] <= 24 and box["w"] and box["h"], title
    for (one, a), (other, b) in combinations(boxes, 2):
        apart = (
            a["x"] + a["w"] <= b["x"]
            or b["x"] + b["w"] <= a["x"]
            or a["y"] + a["h"] <= b["y"]
            or b["y"] + b["h"] <= a["y"]
        )
        assert apart, f"{one} and {other}"


def test_source_and_model_are_chosen_by_variables(dashboard, queries):
    variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["query"] == "prometheus"
    assert dashboard["id"] is None and "__inputs" not in dashboard
    for panel in dashboard["panels"]:
        for part in [panel, *panel.get("targets", [])] if panel["type"] != "row" else []:
            assert part["datasource"]["uid"] == "${datasource}", panel["title"]
    used = {name for query in queries for name in re.findall(r"\$\{?(\w+)", query)}
    assert used - {"__rate_interval", "__range"} == {"model_name", "engine"} <= variables.keys()


def test_every_panel_asks_something(dashboard):
    for panel in dashboard["panels"]:
        if panel["type"] != "row":
            assert panel["targets"], panel["title"]
            refs = [target["refId"] for target in panel["targets"]]
            assert len(refs) == len(set(refs)), panel["title"]


def test_queries_are_of_metrics_that_exist(dashboard, queries, rendered):
    of_variables = [v["definition"] for v in dashboard["templating"]["list"] if "definition" in v]
    for query in [*queries, *of_variables]:
        names = NAME.findall(query)
        assert names, query
        assert set(names) <= rendered.keys(), query


def test_queries_filter_and_group_by_labels_that_exist(queries, rendered):
    for query in queries:
        selected = SELECTOR.findall(query)
        assert len(selected) == len(NAME.findall(query)), f"unfiltered: {query}"
        for name, matchers, _ in selected:
            labels = set(re.findall(r'(\w+)=~"', matchers))
            assert "model_name" in labels, query
            assert labels <= rendered[name], query
        for grouped in re.findall(r"by \((\w+)\)", query):
            assert any(grouped in rendered[name] for name, _, _ in selected), query


def test_counters_are_read_as_rates_and_gauges_as_they_are(queries):
    for query in queries:
        for name, _, window in SELECTOR.findall(query):
            counts = name.endswith(("_total", "_bucket", "_sum", "_count"))
            assert bool(window) == counts, query


@pytest.mark.parametrize(
    "metric",
    [
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "generation_tokens_total",
        "spec_decode_num_drafts_total",
        "spec_decode_num_draft_tokens_total",
        "spec_decode_num_accepted_tokens_total",
        "spec_decode_num_accepted_tokens_per_pos_total",
        "time_to_first_token_seconds_bucket",
        "inter_token_latency_seconds_bucket",
        "e2e_request_latency_seconds_bucket",
        "request_queue_time_seconds_bucket",
        "num_preemptions_total",
        "prefix_cache_hits_total",
        "request_failure_total",
    ],
)
def test_what_matters_is_shown(queries, metric):
    assert any(f"peagle:{metric}" in NAME.findall(query) for query in queries)


def test_queries_are_balanced(queries):
    for query in queries:
        assert is_balanced(query), query


@pytest.mark.parametrize("query", ["sum(a", "sum(a]", "a)", 'a{b="c}', "a{b=(}"])
def test_the_check_of_balance_sees(query):
    assert not is_balanced(query)
    assert is_balanced('sum(a{b="(]"}[1m])')
