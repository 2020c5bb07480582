"""Acceptance from counters and from vLLM's log, and drift beside what is expected."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.operating import drafts, vllm_line
from peagle.deploy import monitoring
from peagle.deploy.container import container_environment
from peagle.deploy.deployment import Deployment
from peagle.deploy.models import ModelSource
from peagle.deploy.status import speculation_of
from peagle.engine.stats import SpeculationStats
from peagle.errors import UserError
from peagle.serving.emf import dimensions_from


@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=30), min_size=1, max_size=5))
def test_lines_of_vllm_pool_to_the_acceptance_of_all_drafts(intervals):
    every = [drafts(5, *accepted) for accepted in intervals]
    total = SpeculationStats.pooled(every)
    found = monitoring.from_vllm_log(vllm_line(one) for one in every)
    assert found is not None
    assert found.num_drafts == pytest.approx(total.num_drafts)
    assert found.acceptance_length == pytest.approx(total.acceptance_length)
    # The rates of a line have three digits.
    assert found.unconditional == pytest.approx(total.acceptance_per_pos, abs=6e-4)


def test_older_lines_and_others_among_them():
    older = (
        "INFO 09-01 SpecDecoding metrics: Draft acceptance rate: 50.0%, Mean acceptance length: "
        "2.00, Accepted: 10 tokens, Drafted: 20 tokens, Per-position acceptance rate: 0.700, 0.300"
    )
    lines = ["INFO Engine 000: Avg prompt throughput: 1.0 tokens/s", "SpecDecoding metrics: "]
    found = monitoring.from_vllm_log([*lines, older, older.replace("2.00", "nan")])
    assert found is not None
    assert (found.num_drafts, found.num_accepted_tokens) == (10, 10)
    assert found.unconditional == pytest.approx([0.7, 0.3])
    assert monitoring.from_vllm_log(lines) is None


@given(st.lists(st.integers(0, 4), min_size=1, max_size=40))
def test_sums_of_counters(accepted):
    stats = drafts(4, *accepted)
    sums = dict(
        zip(
            monitoring.metric_names(4),
            [stats.num_drafts, stats.num_accepted_tokens, *stats.num_accepted_tokens_per_pos],
        )
    )
    found = monitoring.from_sums(sums)
    assert found is not None
    assert found.acceptance_length == stats.acceptance_length
    assert found.unconditional == stats.acceptance_per_pos
    reached = 1.0
    for share, conditional in zip(found.unconditional, found.conditional):
        if conditional is None:
            assert share == reached == 0
        else:
            assert share == pytest.approx(reached * conditional)
        reached = share


def test_nothing_drafted_is_not_an_acceptance_of_one():
    assert monitoring.from_sums({}) is None
    assert monitoring.from_sums({"NumDrafts": 0, "NumAcceptedTokens": 0}) is None


# ---- what is expected ----


def entry(k: int, length: float, temperature: float = 0.0) -> dict:
    pooled = {"acceptance_length": length, "unconditional": [0.8, 0.5]}
    pooled |= {"num_drafts": 9, "num_accepted_tokens": 12}
    return {"method": "peagle", "k": k, "temperature": temperature, "pooled": pooled}


HEAD = {"format_version": 1, "provenance": {"target": "t"}}


def test_expected_of_a_number_or_of_acceptance_json(tmp_path):
    assert monitoring.expected_from("3.1", 7).acceptance_length == 3.1
    path = tmp_path / "acceptance.json"
    plain = {**entry(0, 1.0), "method": "plain"}
    every = [plain, entry(5, 2.5), entry(7, 2.6, 1.0), entry(7, 2.9)]
    path.write_text(json.dumps({**HEAD, "entries": every}))
    found = monitoring.expected_from(str(path), 7)
    assert (found.acceptance_length, found.unconditional) == (2.9, (0.8, 0.5))
    assert "K = 7, temperature 0" in found.source
    with pytest.raises(UserError, match=r"no entry for K = 3; it has K: 5, 7"):
        monitoring.expected_from(str(path), 3)


def test_expected_of_the_drafts_that_the_endpoint_makes(tmp_path):
    shape = {"num_parallel_trees": 7, "prediction_depth": 7, "max_nodes": 15}
    head, trees, copies, lookup = (entry(7, length) for length in (2.9, 3.4, 4.1, 2.2))
    trees["parallel_drafting_spec"] = copies["parallel_drafting_spec"] = shape
    lookup["method"] = "ngram"
    for of_text in (copies, lookup):
        of_text["pooled"]["text_per_pos"] = [0.1, 0.2]
    path = tmp_path / "acceptance.json"

    def length(*entries, **speculation):
        path.write_text(json.dumps({**HEAD, "entries": entries}))
        return monitoring.expected_from(str(path), 7, speculation).acceptance_length

    every = lookup, copies, trees, head
    assert length(*every, method="eagle3") == 2.9
    assert length(*every, parallel_drafting_spec={}) == 4.1
    assert length(*every, parallel_drafting_spec={}, prompt_lookup=False) == 3.4
    assert length(*every, method="ngram") == 2.2
    with pytest.raises(UserError, match=r"no entry of chains, .* it has candidate trees, ngram"):
        length(lookup, trees, method="eagle3")


@pytest.mark.parametrize("text", ["0.5", "nan", "-3", "inf"])
def test_lengths_that_are_none(text):
    with pytest.raises(UserError, match="at least 1"):
        monitoring.expected_from(text, 7)


def test_files_that_are_none(tmp_path):
    with pytest.raises(UserError, match=r"no-such.*acceptance.json of `peagle eval"):
        monitoring.expected_from(str(tmp_path / "no-such"), 7)
    path = tmp_path / "x.json"
    for text, said in (
        ("{", "is not JSON"),
        (json.dumps(HEAD), "entries"),
        (json.dumps({**HEAD, "entries": [{**entry(1, 1.0), "k": "x"}]}), r"entries.*\bk\b"),
        (json.dumps({**HEAD, "entries": [entry(7, None)]}), "no drafts for K = 7"),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=said):
            monitoring.expected_from(str(path), 7)


def test_the_tag_of_an_endpoint():
    found = monitoring.expected_from_tags({monitoring.EXPECTED_TAG: "3.02"})
    assert found is not None
    assert found.acceptance_length == 3.02
    for tags in ({}, {monitoring.EXPECTED_TAG: "high"}, {monitoring.EXPECTED_TAG: "0"}):
        assert monitoring.expected_from_tags(tags) is None


def test_drift_by_position():
    measured = monitoring.Acceptance(1000, 1300, (800, 500), "here")
    expected = monitoring.ExpectedAcceptance(3.0, (0.9, 0.6, 0.3))
    found = monitoring.drift(measured, expected)
    assert found.share == pytest.approx(2.3 / 3 - 1)
    assert found.per_pos == pytest.approx((-0.1, -0.1))
    assert found.is_drift
    few = monitoring.Acceptance(10, 13, (8, 5), "here")
    assert not monitoring.drift(few, expected).is_drift


# ---- the container's configuration ----


def test_the_speculative_configuration_of_a_container():
    config = '{"method": "eagle3", "num_speculative_tokens": 7}'
    read = speculation_of
    assert read({"SM_VLLM_SPECULATIVE_CONFIG": config}) == json.loads(config)
    assert read({"OTHER": "x"}) is None
    assert read({"SM_VLLM_SPECULATIVE_CONFIG": "[1]"}) == {"unreadable": "[1]"}


@pytest.mark.parametrize(("source", "is_told"), [("native", True), ("managed", False)])
def test_create_tells_our_container_which_endpoint_it_is_of(source, is_told):
    d = Deployment("code", "1", source, "a/b:c", ModelSource("hub", "org/m"), "", "ml.g7e.2xlarge")
    named = dimensions_from(container_environment(d), "m")
    told = {"EndpointName": "code", "VariantName": "AllTraffic"}
    assert named == (told if is_told else {"ModelName": "m"})
