"""A sequence ends at its first stop condition; its counters are taken before that."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from peagle.config import SamplingParams
from peagle.engine.sequence import Sequence, SequenceStatus, SpeculationStats

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


def test_a_stop_id_as_the_last_token_allowed_is_a_stop() -> None:
    sequence = make_sequence(max_tokens=2)
    assert sequence.append([4, STOP, 4], 100) == [4, STOP]
    assert sequence.finish_reason == "stop"
    assert sequence.status is SequenceStatus.FINISHED


def test_a_new_sequence_waits_and_holds_nothing() -> None:
    sequence = make_sequence()
    assert sequence.status is SequenceStatus.WAITING
    assert (sequence.block_table, sequence.drafts, sequence.output_token_ids) == ([], [], [])
    assert sequence.append([4], 100) == [4]
    assert not sequence.is_finished
    assert sequence.finish_reason is None


# ---- counters -------------------------------------------------------------------------------

steps_of = st.lists(
    st.integers(0, 6).flatmap(lambda k: st.tuples(st.just(k), st.integers(0, k))), max_size=20
)


@given(steps_of)
def test_counters_are_what_a_recount_gives(steps: list[tuple[int, int]]) -> None:
    stats = SpeculationStats()
    for drafted, accepted in steps:
        stats.record(drafted, accepted)
    drafts = [(drafted, accepted) for drafted, accepted in steps if drafted]
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


@given(steps_of, st.integers(0, 20))
def test_pooling_equals_counting_together(steps: list[tuple[int, int]], cut: int) -> None:
    whole, first, second = SpeculationStats(), SpeculationStats(), SpeculationStats()
    for i, step in enumerate(steps):
        whole.record(*step)
        (first if i < cut else second).record(*step)
    first.add(second)
    assert first == whole


def test_the_published_example_of_an_acceptance_length() -> None:
    # Three drafts of 4: 4, 0 and 2 accepted. Positions: 2/3, 2/3, 1/3, 1/3; 1 + 6/3 = 3.
    stats = SpeculationStats()
    for accepted in (4, 0, 2):
        stats.record(4, accepted)
    assert stats.acceptance_length == 3.0
    assert stats.acceptance_per_pos == [2 / 3, 2 / 3, 1 / 3, 1 / 3]
