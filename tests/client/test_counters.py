"""Counters of a server, read from its page of metrics."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peagle.client.counters import DraftCounts, read_counters
from tests.evaluation.fake_endpoint import NUM_TOKENS, metrics


@pytest.mark.parametrize("prefix", ["vllm", "peagle"])
def test_counters_are_summed_over_the_engines_of_one_model(prefix: str) -> None:
    counters = read_counters(metrics(2, prefix=prefix), "m")
    assert counters.drafts == DraftCounts(18, 72, 18, (12, 6, 0, 0))
    assert counters.num_tokens == 2 * NUM_TOKENS
    drafts = [one.drafts and one.drafts.num_drafts for one in counters.engines.values()]
    assert drafts == [6, 12]


def test_a_page_without_counters_of_drafts() -> None:
    page = 'vllm:generation_tokens_total{model_name="x"} 3\nvllm:request_success_total 1\n'
    counters = read_counters(page, "m")
    assert counters.drafts is None and counters.num_tokens == 3
    assert read_counters("<html>", "m").num_tokens is None
    assert read_counters(page.replace(" 3", " NaN").replace(" 1", " +Inf"), "m").num_tokens is None


@pytest.mark.parametrize("value", ["NaN", "+Inf", "x"])
def test_counts_that_are_no_number_are_not_known(value: str) -> None:
    """As 0 they would be a restart, and the next reading all drafts since the start."""
    for line in metrics(2).splitlines():
        name, _, number = line.rpartition(" ")
        if 'engine="1"' in name and "created" not in name:
            page = metrics(2).replace(line, f"{name} {value}")
            assert read_counters(page, "m").drafts is None, number


def test_counters_of_one_model_go_by_any_name() -> None:
    page = metrics(1).replace('model_name="an \\"other\\""', 'model_name="m"')
    drafts = read_counters(page, "an alias").drafts
    assert drafts is not None and drafts.num_drafts == 9 + 10**6


def test_a_page_of_the_official_writer() -> None:
    client = pytest.importorskip("prometheus_client")
    registry = client.CollectorRegistry()
    for at, name in enumerate(("num_drafts", "num_draft_tokens", "num_accepted_tokens")):
        metric = client.Counter(f"vllm:spec_decode_{name}", "d", ["model_name"], registry=registry)
        metric.labels("m").inc(10 * (at + 1))
    name, labels = "vllm:spec_decode_num_accepted_tokens_per_pos", ["model_name", "position"]
    metric = client.Counter(name, "d", labels, registry=registry)
    for position, count in enumerate((7, 5, 2)):
        metric.labels("m", str(position)).inc(count)
    page = client.generate_latest(registry).decode()
    assert read_counters(page, "m").drafts == DraftCounts(10, 20, 30, (7, 5, 2))


counts = st.builds(
    lambda n, per_pos, of_text: DraftCounts(
        n, 4 * n, sum(per_pos), tuple(sorted(per_pos, reverse=True)), tuple(of_text)
    ),
    st.integers(0, 1000),
    st.lists(st.integers(0, 1000), min_size=4, max_size=4),
    st.lists(st.integers(0, 1000), min_size=3, max_size=3),
)


@given(counts, counts)
def test_differences_of_counters(earlier: DraftCounts, added: DraftCounts) -> None:
    per_pos = zip(earlier.num_accepted_tokens_per_pos, added.num_accepted_tokens_per_pos)
    of_text = zip(earlier.num_accepted_text_tokens_per_pos, added.num_accepted_text_tokens_per_pos)
    later = DraftCounts(
        earlier.num_drafts + added.num_drafts,
        earlier.num_draft_tokens + added.num_draft_tokens,
        earlier.num_accepted_tokens + added.num_accepted_tokens,
        tuple(a + b for a, b in per_pos),
        tuple(a + b for a, b in of_text),
    )
    assert later.since(earlier) == added and added.since(DraftCounts()) == added
