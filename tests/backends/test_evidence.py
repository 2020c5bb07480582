"""What counters, log and configuration say about drafts. Figures are real vLLM's."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peagle.backends.vllm.evidence import DraftCounts, Expected, judge, skips_mask_hidden
from peagle.errors import UserError

PARALLEL = Expected("eagle3", 4, True)
# vLLM 0.32.0 for CPUs, the bundled P-EAGLE head, K = 4: told to draft in parallel, and not told.
HEALTHY = [
    DraftCounts(116, 464, 203, (78, 56, 40, 29)),
    DraftCounts(82, 328, 176, (54, 49, 41, 32)),
    DraftCounts(55, 220, 140, (45, 42, 27, 26)),
]
ONE_BY_ONE = [
    DraftCounts(178, 712, 138, (133, 3, 1, 1)),
    DraftCounts(143, 572, 111, (111, 0, 0, 0)),
    DraftCounts(103, 412, 86, (86, 0, 0, 0)),
]
METRICS = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 10.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 5.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 60.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 12.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 4.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 6.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",position="0"} 2.0
vllm:spec_decode_num_accepted_tokens_per_pos_created{engine="0",position="0"} 1.7e+09
"""


def facts(parallel: bool | None = True, speculative: bool = True) -> dict[str, object]:
    told = {"method": "eagle3", "parallel_drafting": parallel} if speculative else None
    return {"has_config": True, "speculative": told}


def test_counters_are_read_as_prometheus_writes_them():
    assert DraftCounts.read(METRICS) == DraftCounts(15, 60, 12, (8, 4))
    assert DraftCounts.read("python_info 1.0\n") is None


def test_counters_read_by_another_reader(tmp_path):
    """prometheus_client's own writer, and the reader that evaluation has."""
    client = pytest.importorskip("prometheus_client")
    from peagle.evaluation.counters import read_counters

    registry = client.CollectorRegistry()
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    for at, name in enumerate(names):
        metric = client.Counter(f"vllm:spec_decode_{name}", "d", ["model_name"], registry=registry)
        metric.labels("m").inc(10 * (at + 1))
    name, labels = "vllm:spec_decode_num_accepted_tokens_per_pos", ["model_name", "position"]
    metric = client.Counter(name, "d", labels, registry=registry)
    for position, count in enumerate((7, 5, 2)):
        metric.labels("m", str(position)).inc(count)
    text = client.generate_latest(registry).decode()
    found, other = DraftCounts.read(text), read_counters(text, "m").drafts
    assert found is not None and other is not None
    assert found == DraftCounts(10, 20, 30, (7, 5, 2))
    assert list(found.accepted_per_pos) == other.num_accepted_tokens_per_pos


@pytest.mark.parametrize("counts", HEALTHY)
def test_parallel_drafts_pass(counts):
    assert judge(PARALLEL, counts, facts()) == ()
    assert judge(PARALLEL, counts, None) == ()
    assert judge(PARALLEL, counts, {"has_config": False, "speculative": None}) == ()


@pytest.mark.parametrize("counts", ONE_BY_ONE)
def test_counters_alone_tell_drafts_made_one_by_one(counts):
    with pytest.raises(UserError, match="drafts after the first are not accepted"):
        judge(PARALLEL, counts, None)


@pytest.mark.parametrize(
    ("counts", "told", "skipped", "message"),
    [
        (HEALTHY[0], facts(parallel=False), False, "parallel_drafting is False in the engine"),
        (HEALTHY[0], facts(speculative=False), False, "has no speculation"),
        (HEALTHY[0], facts(), True, "Skipping loading mask_hidden"),
        (None, facts(), False, "no counters"),
        (DraftCounts(), facts(), False, "no drafts at all"),
        (DraftCounts(100, 300, 90, (50, 40, 0, 0)), facts(), False, "another length than K = 4"),
        (DraftCounts(100, 500, 90, (50, 40, 0, 0)), facts(), False, "another length than K = 4"),
    ],
)
def test_each_evidence_refuses_alone(counts, told, skipped, message):
    with pytest.raises(UserError, match=message):
        judge(PARALLEL, counts, told, skipped=skipped)


def test_last_drafts_may_be_shorter():
    assert judge(PARALLEL, DraftCounts(116, 464 - 12, 203, (78, 56, 40, 29)), facts()) == ()


def test_poor_heads_are_not_told_apart():
    """A head of 8 training steps (docs/compatibility.md): 217 of 2,326 drafts."""
    (note,) = judge(PARALLEL, DraftCounts(150, 600, 14, (14, 0, 0, 0)), facts())
    assert "too few drafts were accepted" in note


def test_other_ways_to_draft():
    eagle3 = Expected("eagle3", 4, False)
    for counts in (*HEALTHY, *ONE_BY_ONE):
        assert judge(eagle3, counts, facts(parallel=False)) == ()
    with pytest.raises(UserError, match="parallel_drafting is True"):
        judge(eagle3, HEALTHY[0], facts(parallel=True))
    lookup = Expected("ngram", 4, False)
    (note,) = judge(lookup, DraftCounts(), None)
    assert "found nothing to repeat" in note
    assert judge(lookup, DraftCounts(9, 20, 5, (3, 2)), None) == ()
    assert judge(Expected("eagle3", 1, True), DraftCounts(90, 90, 60, (60,)), facts()) == ()
    scheduled = Expected("eagle3", 4, False, is_fixed=False)
    assert judge(scheduled, DraftCounts(100, 200, 90, (50, 40)), None) == ()


def test_log_line():
    line = (
        "WARNING 11-21 23:54:01 [llama_eagle3.py:434] mask_hidden found in weights but model is "
        "not configured for parallel drafting. Skipping loading mask_hidden."
    )
    assert skips_mask_hidden(line) and not skips_mask_hidden("Loading drafter model...")


counts = st.builds(
    lambda n, per_pos: DraftCounts(n, 4 * n, sum(per_pos), tuple(sorted(per_pos, reverse=True))),
    st.integers(0, 1000),
    st.lists(st.integers(0, 1000), min_size=4, max_size=4),
)


@given(counts, counts)
def test_differences_of_counters(earlier, added):
    later = DraftCounts(
        earlier.num_drafts + added.num_drafts,
        earlier.num_draft_tokens + added.num_draft_tokens,
        earlier.num_accepted_tokens + added.num_accepted_tokens,
        tuple(a + b for a, b in zip(earlier.accepted_per_pos, added.accepted_per_pos)),
    )
    assert later.since(earlier) == added
    assert added.since(DraftCounts()) == added
