"""A server that drafts candidate trees: reports to requests, and counts at /metrics."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from serving.live import LiveServer, running

TREES = {"num_parallel_trees": 4, "prediction_depth": 5, "max_nodes": 12}
BODY = {"prompt": "def fibonacci(n):", "max_tokens": 40, "temperature": 0, "stream": True}


@pytest.fixture(scope="module")
def trees() -> Iterator[LiveServer]:
    options = ("--parallel-drafting-spec", json.dumps(TREES), "--hang-timeout", 120)
    with running(*options, warm=True) as live:
        yield live


def reports(server: LiveServer, report: bool | str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Ask for an answer: the report of each step, and that of the usage."""
    with server.client() as client:
        answer = client.post("/v1/completions", json={**BODY, "speculation": {"report": report}})
    assert answer.status_code == 200, answer.text
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    *steps, last = map(json.loads, lines)
    return [step["speculation"] for step in steps], last["usage"]["speculation"]


@pytest.mark.slow
def test_the_tree_of_a_step_is_reported_where_it_is_asked_for(trees: LiveServer) -> None:
    steps, usage = reports(trees, "trees")
    assert "tree" not in steps[0]  # of the prompt
    assert len(steps) == usage["num_drafts"] + 1
    for step in steps[1:]:
        nodes = step["tree"]
        assert len(nodes) == step["num_drafted"] == TREES["max_nodes"]
        depths, row, path = [0], 0, []
        for i, (text, parent, is_accepted) in enumerate(nodes, start=1):
            assert 0 <= parent < i
            depths.append(depths[parent] + 1)
            if is_accepted:
                assert parent == row
                row = i
                path.append(text)
        assert max(depths) == step["draft_depth"] <= TREES["prediction_depth"]
        assert path == [text for text, is_accepted in step["tokens"] if is_accepted]
    for step in steps[1:-1]:
        assert [text for text, _, is_accepted in step["tree"] if not is_accepted] == step[
            "rejected"
        ]
    assert usage["num_draft_tokens"] == sum(len(step["tree"]) for step in steps[1:])

    others, same = reports(trees, True)
    assert same == usage
    assert others == [{k: v for k, v in step.items() if k != "tree"} for step in steps]


def test_a_wrong_report_is_refused(trees: LiveServer) -> None:
    with trees.client() as client:
        answer = client.post("/v1/completions", json={**BODY, "speculation": {"report": "tree"}})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert "report" in error["param"] and "trees" in error["message"]


def test_metrics_count_trees_nodes_and_depths(trees: LiveServer) -> None:
    def counted() -> dict[str, float]:
        names = ("drafts", "draft_tokens", "accepted_tokens")
        found = trees.metrics()
        counts = {
            name: found[f'peagle:spec_decode_num_{name}_total{{engine="0"}}'] for name in names
        }
        for i in range(TREES["prediction_depth"]):
            sample = "peagle:spec_decode_num_accepted_tokens_per_pos_total"
            counts[str(i)] = found.get(f'{sample}{{engine="0",position="{i}"}}', 0)
        return counts

    before = counted()
    _, usage = reports(trees, True)
    after = counted()
    added = {name: after[name] - before[name] for name in after}
    per_pos = usage["num_accepted_tokens_per_pos"]
    assert added == {
        "drafts": usage["num_drafts"],
        "draft_tokens": usage["num_draft_tokens"],
        "accepted_tokens": usage["num_accepted_tokens"],
        **{str(i): count for i, count in enumerate(per_pos)},
    }
    assert added["draft_tokens"] == TREES["max_nodes"] * added["drafts"]
    assert sum(per_pos) == added["accepted_tokens"] > 0
