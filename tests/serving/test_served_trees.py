"""A server that drafts candidate trees: reports to requests, and counts at /metrics."""

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from peagle import SamplingParams
from peagle.evaluation.decoding import Request
from peagle.evaluation.endpoint import EndpointBackend
from serving.live import CHAT_TEMPLATE, LiveServer, running

TREES = {"num_parallel_trees": 4, "prediction_depth": 5, "max_nodes": 12}
BODY = {"prompt": "def fibonacci(n):", "max_tokens": 40, "temperature": 0, "stream": True}


@pytest.fixture(scope="module")
def trees() -> Iterator[LiveServer]:
    options = ("--parallel-drafting-spec", json.dumps(TREES), "--no-prompt-lookup")
    with running(*options, "--hang-timeout", 120, warm=True) as live:
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


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Copies of the text join the trees."""
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(CHAT_TEMPLATE)
    options = ("--parallel-drafting-spec", json.dumps(TREES), "--chat-template", template)
    with running(*options, "--hang-timeout", 120, warm=True) as live:
        yield live


@pytest.mark.slow
def test_tokens_of_the_text_are_told_by_steps_usage_metrics_and_an_evaluation(
    texts: LiveServer,
) -> None:
    steps, usage = reports(texts, True)
    before = texts.metrics()
    backend = EndpointBackend(texts.url)
    request = Request("one", str(BODY["prompt"]), SamplingParams(max_tokens=40))
    run = backend.run([request], 1)
    after = texts.metrics()
    accepted, of_text = (usage[f"num_accepted_{kind}tokens_per_pos"] for kind in ("", "text_"))
    assert 0 < sum(of_text) < sum(accepted) and len(accepted) == len(of_text)
    assert "text_from" not in steps[0], "the pass over the prompt has no drafts"
    told = [(step["text_from"], step["num_accepted"]) for step in steps[1:]]
    assert_recounted(of_text, told)

    stats, (answer,) = run.stats, run.answers
    assert stats == run.counters, "of the request and of /metrics"
    of_text = stats.num_accepted_text_tokens_per_pos
    name = "peagle:spec_decode_num_accepted_text_tokens_per_pos_total"
    labels = [f'{name}{{engine="0",position="{i}"}}' for i in range(len(of_text))]
    assert [after[one] - before.get(one, 0) for one in labels] == of_text
    assert answer.steps is not None
    steps_told = [(step.text_from, step.num_accepted) for step in answer.steps[1:]]
    assert_recounted(of_text, steps_told)


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "def fibonacci(n):"}]}


@pytest.mark.slow
def test_a_prediction_drafts_what_it_predicts(texts: LiveServer) -> None:
    def ask(content: Any) -> tuple[str, int, int]:
        body = CHAT | {"max_tokens": 40, "temperature": 0, "speculation": {"report": True}}
        body["prediction"] = {"type": "content", "content": content}
        with texts.client() as client:
            answer = client.post("/v1/chat/completions", json=body).json()
        usage, text = answer["usage"], answer["choices"][0]["message"]["content"]
        return text, usage["prompt_tokens"], usage["speculation"]["num_drafts"]

    text, *counts = ask("")
    for content in (text, [{"type": "text", "text": part} for part in (text[:9], text[9:])]):
        found, num_prompt, num_drafts = ask(content)
        assert (found, num_prompt) == (text, counts[0]) and num_drafts < counts[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "fields", "told"),
    [
        ([{"type": "image_url"}], {}, "prediction.content"),
        ("x " * 60_000, {}, "The prediction has 120000 characters"),
        ("x " * 3_000, {}, "prediction has 3001 tokens; expected at most"),
        ("x", {"speculation": {"prompt_lookup": False}}, "prediction was given and"),
        ("x", {"speculation": {"num_speculative_tokens": 0}}, "prediction was given, "),
        ("x", {"prompt": "x"}, "prediction"),  # of /v1/completions
    ],
)
def test_predictions_are_refused_by_name(
    texts: LiveServer, content: Any, fields: dict[str, Any], told: str
) -> None:
    body = fields | {"prediction": {"type": "content", "content": content}}
    route = "completions" if "prompt" in body else "chat/completions"
    with texts.client() as client:
        answer = client.post(f"/v1/{route}", json=body if "prompt" in body else CHAT | body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and (told in error["message"] or told in error["param"])
    assert error["param"].startswith("prediction")


def assert_recounted(of_text: list[int], steps: list[tuple[int, int]]) -> None:
    """The steps have the counts, but for a last one that was cut at the length of the answer."""
    counts = Counter(at for first, accepted in steps for at in range(first, accepted))
    wanted = Counter(dict(enumerate(of_text)))
    assert counts.total() > 0 and counts <= wanted
    assert min(wanted - counts, default=64) >= max(steps[-1])
