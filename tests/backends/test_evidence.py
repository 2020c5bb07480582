"""Counters, log and configuration as evidence of drafts. The figures are real vLLM's."""

from dataclasses import replace
from functools import partial

import pytest

from peagle.backends.vllm.evidence import judge
from peagle.client.counters import DraftCounts
from peagle.config import SpeculativeConfig
from peagle.errors import UserError

HEAD = SpeculativeConfig(model="head", num_speculative_tokens=4)
judge_parallel = partial(judge, HEAD, is_parallel=True)
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
    assert judge_parallel(counts, facts()) == ()
    assert judge_parallel(counts, None) == ()
    assert judge_parallel(counts, {"has_config": False, "speculative": None}) == ()


@pytest.mark.parametrize("counts", ONE_BY_ONE)
def test_counters_alone_tell_drafts_made_one_by_one(counts):
    with pytest.raises(UserError, match="drafts after the first are not accepted"):
        judge_parallel(counts, None)


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
        judge_parallel(counts, told, skipped=skipped)


def test_last_drafts_may_be_shorter():
    assert judge_parallel(DraftCounts(116, 464 - 12, 203, (78, 56, 40, 29)), facts()) == ()


def test_poor_heads_are_not_told_apart():
    """A head of 8 training steps (docs/compatibility.md): 217 of 2,326 drafts."""
    (note,) = judge_parallel(DraftCounts(150, 600, 14, (14, 0, 0, 0)), facts())
    assert "too few drafts were accepted" in note


def test_other_ways_to_draft():
    eagle3 = partial(judge, HEAD, is_parallel=False)
    for counts in (*HEALTHY, *ONE_BY_ONE):
        assert eagle3(counts, facts(parallel=False)) == ()
    with pytest.raises(UserError, match="parallel_drafting is True"):
        eagle3(HEALTHY[0], facts(parallel=True))
    lookup = SpeculativeConfig(method="ngram", num_speculative_tokens=4)
    (note,) = judge(lookup, DraftCounts(), None, is_parallel=False)
    assert "found nothing to repeat" in note
    assert judge(lookup, DraftCounts(9, 20, 5, (3, 2)), None, is_parallel=False) == ()
    single = replace(HEAD, num_speculative_tokens=1)
    assert judge(single, DraftCounts(90, 90, 60, (60,)), facts(), is_parallel=True) == ()
    scheduled = replace(HEAD, num_speculative_tokens_per_batch_size=((1, 4, 4), (5, 9, 2)))
    counts = DraftCounts(100, 200, 90, (50, 40))
    assert judge(scheduled, counts, None, is_parallel=False) == ()
    with pytest.raises(UserError, match="another length than K = 4"):
        eagle3(counts, None)


def test_a_schedule_may_draft_fewer_or_none():
    schedule = ((1, 2, 4), (3, 8, 0))
    scheduled = replace(HEAD, num_speculative_tokens_per_batch_size=schedule)
    (note,) = judge(scheduled, DraftCounts(), facts(), is_parallel=True)
    assert "K = 0" in note
    assert (
        judge(scheduled, DraftCounts(90, 300, 110, (60, 40, 10)), facts(), is_parallel=True) == ()
    )
    with pytest.raises(UserError, match="drafts after the first are not accepted"):
        judge(scheduled, DraftCounts(90, 300, 60, (60, 0, 0)), facts(), is_parallel=True)
    some = replace(scheduled, num_speculative_tokens_per_batch_size=((1, 8, 2),))
    with pytest.raises(UserError, match="no drafts at all"):
        judge(some, DraftCounts(), facts(), is_parallel=True)
