"""What counters, log and configuration say about drafts. Figures are real vLLM's."""

import pytest

from peagle.backends.vllm.evidence import Expected, judge, skips_mask_hidden
from peagle.client.counters import DraftCounts
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


def facts(parallel: bool | None = True, speculative: bool = True) -> dict[str, object]:
    told = {"method": "eagle3", "parallel_drafting": parallel} if speculative else None
    return {"has_config": True, "speculative": told}


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
