"""A sequence: its ends, what is computed of it, its order; the counters of its drafts."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peagle.config import SamplingParams
from peagle.engine.features import FeatureRing
from peagle.engine.sequence import Sequence, SequenceStatus
from peagle.engine.stats import SpeculationStats
from peagle.kernels.sampling.logprobs import TokenLogprobs

STOP = 9


def make_sequence(prompt_len: int = 3, max_tokens: int = 5, stop: int | None = STOP) -> Sequence:
    return Sequence(
        0,
        [1] * prompt_len,
        SamplingParams(max_tokens=max_tokens),
        seed=0,
        stop_token_ids=frozenset() if stop is None else frozenset([stop]),
    )


@given(
    steps=st.lists(st.lists(st.integers(5, STOP), min_size=1, max_size=5), min_size=1, max_size=8),
    prompt_len=st.integers(1, 6),
    max_tokens=st.integers(1, 12),
    max_model_len=st.integers(7, 16),
)
def test_append_keeps_tokens_up_to_the_first_stop_condition(
    steps: list[list[int]], prompt_len: int, max_tokens: int, max_model_len: int
) -> None:
    sequence = make_sequence(prompt_len, max_tokens)
    kept: list[int] = []
    for tokens in steps:
        if sequence.is_finished:
            break
        kept += sequence.append(tokens, max_model_len)
    given_ = [token for tokens in steps for token in tokens]
    limit = min(max_tokens, max_model_len - prompt_len)
    expected = given_[:limit]
    reason = "length" if len(given_) >= limit else None
    if STOP in expected:
        expected, reason = expected[: expected.index(STOP) + 1], "stop"
    assert kept == sequence.output_token_ids == expected
    assert sequence.finish_reason == reason
    assert sequence.is_finished == (reason is not None)
    assert sequence.token_ids == [1] * prompt_len + expected
    assert len(sequence) == prompt_len + len(expected)


def test_what_is_computed_before_it_decodes() -> None:
    """All of a new prompt, whose last token gives the first output; all but the newest later."""
    sequence = make_sequence(prompt_len=3)
    assert (sequence.prefill_end, sequence.is_prefilling) == (3, True)
    sequence.num_computed_tokens = 2
    assert sequence.is_prefilling
    sequence.num_computed_tokens = 3
    sequence.append([4, 5], 100)
    assert (sequence.prefill_end, sequence.is_prefilling) == (4, True)
    sequence.num_computed_tokens = 4
    assert not sequence.is_prefilling


def test_preemption_forgets_what_was_computed_and_nothing_else() -> None:
    sequence = make_sequence()
    sequence.append([4, 5], 100)
    sequence.num_computed_tokens = sequence.num_drafter_tokens = 4
    sequence.drafter_start, sequence.num_published_blocks, sequence.drafts = 2, 1, [6, 7]
    sequence.pending_features = FeatureRing(torch.empty(2, 1), 4)
    sequence.forget_computed()
    assert sequence.num_computed_tokens == sequence.num_drafter_tokens == 0
    assert sequence.drafter_start == sequence.num_published_blocks == 0
    assert sequence.pending_features is None
    assert (sequence.output_token_ids, sequence.drafts) == ([4, 5], [6, 7])


def test_trimming_drops_what_follows_a_stop_string() -> None:
    sequence = make_sequence(stop=None)
    sequence.append([4, 5, 6], 100)
    sequence.logprobs = [TokenLogprobs(token, -1.0, 1, []) for token in (4, 5, 6)]
    sequence.trim(2)
    assert sequence.token_ids == [1, 1, 1, 4]
    assert [found.token_id for found in sequence.logprobs] == [4]
    assert sequence.finish_reason == "stop"
    sequence.trim(0)
    assert sequence.token_ids == [1, 1, 1, 4]


def test_a_follower_waits_until_its_leader_has_output_or_is_gone() -> None:
    leader, follower = make_sequence(), make_sequence()
    assert not follower.waits_for_leader
    follower.leader = leader
    assert follower.waits_for_leader
    leader.append([4], 100)
    assert not follower.waits_for_leader
    gone = make_sequence()
    follower.leader = gone
    gone.status = SequenceStatus.FINISHED
    assert not follower.waits_for_leader


# ---- counters ----

Step = tuple[int, int, int | None]  # drafted, accepted, first of the text


def steps_of(drafted: int) -> st.SearchStrategy[Step]:
    first = st.none() | st.integers(0, drafted)
    return st.tuples(st.just(drafted), st.integers(0, drafted), first)


@given(st.lists(st.integers(0, 6).flatmap(steps_of), max_size=20), st.integers(0, 20))
def test_counters_are_what_a_recount_gives(steps: list[Step], cut: int) -> None:
    """Also where two count and one pools them, and where a later look subtracts an earlier one."""
    stats, first, second = SpeculationStats(), SpeculationStats(), SpeculationStats()
    for i, (drafted, accepted, text_from) in enumerate(steps):
        stats.record(drafted, accepted, text_from=text_from)
        (first if i < cut else second).record(drafted, accepted, text_from=text_from)
    earlier = first.copy()
    first.add(second)
    assert first == stats == SpeculationStats.pooled([earlier, second])
    later = stats.since(earlier)
    assert later.num_accepted_tokens == second.num_accepted_tokens
    assert later.num_drafts == second.num_drafts
    drafts = [(drafted, accepted) for drafted, accepted, _ in steps if drafted]
    of_text = [step for step in steps if step[0] and step[2] is not None]
    assert stats.num_accepted_text_tokens_per_pos == [
        sum(first <= i < accepted for _, accepted, first in of_text if first is not None)
        for i in range(max((drafted for drafted, *_ in of_text), default=0))
    ]
    if of_text and drafts:
        shares = [*stats.shares_by_source.values()]
        both = [head + text for head, text in zip(*shares, strict=True)]
        assert both == pytest.approx(stats.acceptance_per_pos)
    else:
        assert stats.shares_by_source == {}
    deepest = max((drafted for drafted, _ in drafts), default=0)
    assert stats.num_drafts == len(drafts)
    assert stats.num_draft_tokens == sum(drafted for drafted, _ in drafts)
    assert stats.num_accepted_tokens == sum(accepted for _, accepted in drafts)
    per_pos = [sum(accepted > i for _, accepted in drafts) for i in range(deepest)]
    assert stats.num_accepted_tokens_per_pos == per_pos
    assert sum(per_pos) == stats.num_accepted_tokens
    if drafts:
        assert stats.acceptance_length == 1 + stats.num_accepted_tokens / len(drafts)
        assert stats.acceptance_per_pos == [count / len(drafts) for count in per_pos]
    else:
        assert stats.acceptance_length == 1.0
        assert stats.acceptance_per_pos == []


def test_drafts_that_passed() -> None:
    sequence = Sequence(0, [1], SamplingParams(), 0, frozenset())
    sequence.drafts = [4, 5, 6, 5, 4]
    assert [*sequence.accepted_drafts([4, 5])] == [0, 1]
    # Two nodes of one token stand behind different parents.
    sequence.draft_parents = [0, 0, 2, 1, 3]
    assert sequence.accepted_drafts([5, 6, 4]) == [1, 2, 4]
    assert sequence.accepted_drafts([4, 5]) == [0, 3]
    assert sequence.accepted_drafts([]) == []
