"""Figures of acceptance: by hand, and against a replay of the drafts."""

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle import LLM, SamplingParams
from peagle.bundled import BUNDLED_PEAGLE, BUNDLED_TARGET
from peagle.engine import SpeculationStats
from peagle.evaluation.acceptance import (
    GroupCounters,
    acceptance_figures,
    beyond_training,
    conditional_acceptance,
    decode_steps,
    figures_of_answers,
    figures_of_counters,
    histogram,
    loop_start,
)
from peagle.evaluation.decoding import Answer, DecodeCounts, Observation
from peagle.evaluation.dialogues import run_dialogues
from peagle.evaluation.engine_backend import EngineBackend, time_requests
from peagle.evaluation.prompts import load_prompt_set
from peagle.evaluation.texts import hardest_texts, pieces
from peagle.results import AcceptanceFigures
from tests.engine.engines import watch_drafts


def completion(token_ids: list[int], steps: list[tuple[int, int]]) -> Answer:
    """An output that came as one prompt token and steps of (drafted, accepted)."""
    stats = SpeculationStats()
    for drafted, accepted in steps:
        stats.record(drafted, accepted)
    own = [DecodeCounts(1, 0, 0), *(DecodeCounts(a + 1, d, a) for d, a in steps)]
    return Answer(num_tokens=len(token_ids), token_ids=token_ids, steps=own, stats=stats)


@pytest.mark.parametrize(
    ("tokens", "start"),
    [
        ([], None),
        ([1, 2, 3], None),
        ([1, 2, 3, 4, 5, 6, 7, 8], None),
        ([1, 2, 3, 1, 2, 3], 3),
        ([1, 2, 3, 1, 2, 3, 1, 2, 3], 3),
        ([9, 1, 2, 3, 4, 1, 2, 3], 5),
        ([9, 1, 2, 3, 4, 1, 2], None),
        ([7, 7, 7], None),
        ([7, 7, 7, 7], 1),  # occurrences may overlap
    ],
)
def test_loop_start(tokens: list[int], start: int | None) -> None:
    assert loop_start(tokens, ngram=3) == start


def test_pooled_not_averaged() -> None:
    short = completion([1, 2, 3], [(3, 1)])
    long = completion(list(range(9)), [(3, 3), (3, 0), (3, 2)])
    result = acceptance_figures([short, long])
    assert (result["num_outputs"], result["num_tokens"]) == (2, 12)
    assert result["num_drafts"] == 4
    assert result["acceptance_length"] == 1 + 6 / 4
    assert result["num_accepted_tokens_per_pos"] == [3, 2, 1]
    assert result["unconditional_acceptance_per_pos"] == [3 / 4, 2 / 4, 1 / 4]
    assert result["conditional_acceptance_per_pos"] == [3 / 4, 2 / 3, 1 / 2]
    assert result["loop_share"] == 0
    assert result["acceptance_length_before_loop"] == result["acceptance_length"]


def test_conditional_acceptance_where_nothing_got() -> None:
    stats = SpeculationStats()
    stats.record(3, 0)
    assert conditional_acceptance(stats) == [0, None, None]


def test_before_the_loop_only_steps_that_end_there_count() -> None:
    # 20 fresh tokens, then the same 20 again: the repeat of a 16-gram begins at index 20.
    tokens = [*range(20), *range(20)]
    # The prompt pass gives token 0; the steps end at 4, 12, 20 (counted), 28, 36, 40.
    steps = [(7, 2), (7, 7), (7, 7), (7, 7), (7, 7), (7, 3)]
    looping = completion(tokens, steps)
    assert sum(step.num_tokens for step in looping.steps or []) == len(tokens)
    result = acceptance_figures([looping])
    assert result["loop_share"] == 1
    assert result["num_drafts_before_loop"] == 3
    assert result["acceptance_length_before_loop"] == 1 + 16 / 3
    assert result["acceptance_length"] == 1 + 33 / 6
    # A step that ends one token later straddles the boundary and is left out.
    straddling = completion([*tokens, 99], [(7, 3), *steps[1:]])
    assert acceptance_figures([straddling])["num_drafts_before_loop"] == 2


def test_outputs_with_and_without_loops_pool() -> None:
    looping = completion([5] * 30, [(4, 4)] * 5 + [(4, 3)])
    fresh = completion(list(range(10)), [(4, 2), (4, 2), (4, 2)])
    pooled = acceptance_figures([looping, fresh])
    assert pooled["loop_share"] == 0.5
    # [5] * 17 repeats its first 16-gram at index 1: no step of that output ends that early.
    assert pooled["num_drafts_before_loop"] == 3


def test_steps_without_a_draft_count_as_steps() -> None:
    found_once = completion([1, 2, 3, 4, 5, 6], [(0, 0), (3, 2), (0, 0)])
    pooled = acceptance_figures([found_once])
    assert pooled["acceptance_length"] == 3
    assert pooled["tokens_per_step"] == 1 + 2 / 3


def test_nothing_at_all() -> None:
    result = acceptance_figures([])
    assert result["acceptance_length"] == 1 and result["loop_share"] == 0


K, MAX_TOKENS = 5, 40
PROMPTS = {name: load_prompt_set(name, 6) for name in ("humaneval", "heldout_code")}
PARAMS = SamplingParams(max_tokens=MAX_TOKENS, seed=0)


def make_llm(k: int = K) -> LLM:
    speculative = {"model": str(BUNDLED_PEAGLE), "num_speculative_tokens": k}
    return LLM(
        BUNDLED_TARGET,
        speculative_config=speculative,
        max_num_seqs=4,
        enable_prefix_caching=False,
    )


@pytest.fixture(scope="module")
def llm() -> LLM:
    return make_llm()


@pytest.fixture(scope="module")
def observations(llm: LLM) -> list[Observation]:
    return run_dialogues(EngineBackend(llm), PROMPTS, PARAMS, 4, chat=False).observations


@pytest.fixture(scope="module")
def result(llm: LLM, observations: list[Observation]) -> AcceptanceFigures:
    return figures_of_answers(observations, K, llm.tokenizer)


def replay(
    prompt: list[int], truth: list[int], num_tokens: int, drafts: dict[tuple[int, ...], list[int]]
) -> SpeculationStats:
    """Greedy verification in plain Python: drafts that equal what the target says are accepted."""
    stats, position = SpeculationStats(), 1  # the prompt pass gave the first token
    while position < num_tokens:
        draft = drafts[(*prompt, *truth[:position])]
        expected = truth[position : position + len(draft)]
        accepted = next((i for i, token in enumerate(draft) if token != expected[i]), len(draft))
        stats.record(len(draft), accepted)
        position += accepted + 1
    return stats


@pytest.mark.slow
def test_pooled_figures_are_those_of_a_replay_of_the_drafts(result: AcceptanceFigures) -> None:
    watched = make_llm()
    drafts = watch_drafts(watched)
    texts = [prompt.text for prompts in PROMPTS.values() for prompt in prompts]
    watched.generate(texts, PARAMS)
    # What the target says alone, beyond the end: the last draft was verified whole.
    further = SamplingParams(max_tokens=MAX_TOKENS + K + 1, ignore_eos=True)
    plain = LLM(BUNDLED_TARGET, enable_prefix_caching=False)
    truths = plain.generate(texts, further)
    short = plain.generate(texts, PARAMS)
    total = SpeculationStats.pooled(
        replay(truth.prompt_token_ids, truth.token_ids, len(own.token_ids), drafts)
        for truth, own in zip(truths, short, strict=True)
    )
    pooled = result.pooled
    assert total.num_drafts > 50
    assert pooled.num_drafts == total.num_drafts
    assert pooled.num_draft_tokens == total.num_draft_tokens
    assert pooled.num_accepted_tokens_per_pos == total.num_accepted_tokens_per_pos
    assert pooled.acceptance_length == 1 + total.num_accepted_tokens / total.num_drafts
    assert pooled.num_tokens == sum(len(output.token_ids) for output in short)


@pytest.mark.slow
def test_figures_are_those_of_the_benchmark(llm: LLM, result: AcceptanceFigures) -> None:
    """benchmarks/acceptance.py and the demo print `acceptance_figures`."""
    for name, prompts in PROMPTS.items():
        run = time_requests(llm, [prompt.text for prompt in prompts], PARAMS)
        expected, ours = acceptance_figures(run.answers), result.by_set[name]
        for key in (
            "num_tokens",
            "num_drafts",
            "num_draft_tokens",
            "num_accepted_tokens_per_pos",
            "acceptance_length",
            "tokens_per_step",
            "loop_share",
            "acceptance_length_before_loop",
        ):
            assert getattr(ours, key) == pytest.approx(expected[key]), key
        assert ours.unconditional == expected["unconditional_acceptance_per_pos"]
        assert ours.conditional == expected["conditional_acceptance_per_pos"]


@pytest.mark.parametrize(
    "parts", ["by_set", "by_category", "by_context", "by_output_position"], ids=str
)
def test_parts_add_up_to_the_whole(result: AcceptanceFigures, parts: str) -> None:
    slices = getattr(result, parts)
    every = list(slices.values()) if isinstance(slices, dict) else [s.slice for s in slices]
    assert len(every) >= 2
    for key in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        assert sum(getattr(one, key) for one in every) == getattr(result.pooled, key)
    per_pos = [sum(one.num_accepted_tokens_per_pos[i] for one in every) for i in range(K)]
    assert per_pos == result.pooled.num_accepted_tokens_per_pos


def test_ranges_hold_the_steps_that_begin_in_them(
    result: AcceptanceFigures, observations: list[Observation]
) -> None:
    """Every step counted again, each found its range by looking at all of them."""
    for part, prompt_counts in (("by_context", True), ("by_output_position", False)):
        slices = getattr(result, part)
        ranges = [(one.first, one.last) for one in slices]
        assert ranges[0][0] == 0 or part == "by_context"
        assert all(high == 2 * low for low, high in ranges if low)
        drafts: Counter[tuple[int, int]] = Counter()
        for one in observations:
            length = one.answer.num_prompt_tokens if prompt_counts else 0
            for number, step in enumerate(one.answer.steps or []):
                if number and step.num_drafted:
                    (found,) = [r for r in ranges if r[0] <= length < r[1]]
                    drafts[found] += 1
                length += step.num_tokens
        assert [drafts[r] for r in ranges] == [one.slice.num_drafts for one in slices]


def test_everything_is_json_and_has_the_promised_keys(result: AcceptanceFigures) -> None:
    data = result.to_json()
    assert AcceptanceFigures.model_validate(json.loads(json.dumps(data, allow_nan=False))) == result
    assert list(data) == [
        *("pooled", "by_set", "by_category", "by_context", "by_output_position"),
        *("histogram", "loop_share", "by_conversation", "hardest", "samples"),
    ]
    assert set(result.by_category) == {"humaneval/code", "heldout_code/heldout-code"}
    low, high = result.pooled.acceptance_length_ci
    assert low < result.pooled.acceptance_length < high
    for i, (low, high) in enumerate(result.pooled.unconditional_ci):
        assert low <= result.pooled.unconditional[i] <= high


def test_samples_are_the_outputs_in_pieces(
    result: AcceptanceFigures, observations: list[Observation]
) -> None:
    by_id = {(one.set, one.id): one for one in observations}
    assert {one.set for one in result.samples} == set(PROMPTS)
    lengths = [one.acceptance_length for one in result.samples]
    every = [o.answer.stats.acceptance_length for o in observations if o.answer.stats]
    assert (max(lengths), min(lengths)) == (max(every), min(every))
    for sample in result.samples:
        one = by_id[sample.set, sample.id]
        assert "".join(text for text, _ in sample.pieces) == one.answer.text
        assert one.prompt.endswith(sample.prompt_tail)
        assert {kind for _, kind in sample.pieces} <= {"accepted", "target"}


def test_pieces_tell_accepted_tokens_from_the_targets(llm: LLM) -> None:
    words = [llm.tokenizer.encode(text)[0] for text in ("def", " x", " =", " return", " self")]
    steps = [DecodeCounts(1, 0, 0), DecodeCounts(3, 5, 2), DecodeCounts(1, 5, 0)]
    assert pieces(words, steps, llm.tokenizer) == [
        ("def", "target"),
        (" x =", "accepted"),
        (" return", "target"),
        (" self", "target"),
    ]
    assert pieces(words, steps, llm.tokenizer, most_tokens=1) == [("def", "target")]


def synthetic(accepted: list[int], *, name: str = "1", k: int = 7) -> Observation:
    """An output whose step i says "<i>", with so many accepted tokens."""
    stats = SpeculationStats()
    for count in accepted:
        stats.record(k, count)
    steps = [DecodeCounts(1, 0, 0), *(DecodeCounts(count + 1, k, count) for count in accepted)]
    answer = Answer(
        num_prompt_tokens=10,
        num_tokens=sum(step.num_tokens for step in steps),
        texts=[f"<{i}>" for i in range(len(steps))],
        steps=steps,
        stats=stats,
    )
    return Observation("set", "", name, 0, "prompt", answer)


def test_hardest_texts_are_the_worst_stretches() -> None:
    easy = synthetic([7] * 30, name="easy")
    hard = synthetic([7] * 10 + [0] * 15 + [1] + [7] * 4, name="hard")
    short = synthetic([0] * 3, name="short")
    first, second = hardest_texts([easy, hard, short])
    assert (first.id, second.id) == ("hard", "easy")
    assert first.acceptance_length == 1 + 1 / 16
    assert first.text == "".join(f"<{i}>" for i in range(11, 27))
    assert first.text_before == "prompt" + "".join(f"<{i}>" for i in range(11))
    # Where no output is long enough, the whole of one counts.
    (only,) = hardest_texts([short])
    assert (only.num_drafts, only.acceptance_length) == (3, 1.0)
    assert hardest_texts([]) == []


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=40), min_size=1, max_size=5))
def test_no_stretch_is_harder_than_the_one_found(outputs: list[list[int]]) -> None:
    found = hardest_texts([synthetic(accepted) for accepted in outputs], window=8)
    window = min(8, max(map(len, outputs)))
    least = min(
        sum(accepted[i : i + window])
        for accepted in outputs
        for i in range(len(accepted) - window + 1)
    )
    assert found[0].acceptance_length == pytest.approx(1 + least / window)
    lengths = [one.acceptance_length for one in found]
    assert lengths == sorted(lengths)


def test_a_trimmed_last_step_counts_as_verified() -> None:
    """The counters know that 6 drafts were accepted where the output had room for 2."""
    one = synthetic([3, 6])
    assert one.answer.steps is not None
    one.answer.steps[-1] = DecodeCounts(2, 7, 2)
    assert [step.num_accepted for step in decode_steps(one.answer)] == [3, 6]
    assert [(step.context, step.output) for step in decode_steps(one.answer)] == [(11, 1), (15, 5)]


def test_histogram_counts_requests() -> None:
    assert histogram([]) == []
    every = [synthetic([a]).answer.stats for a in (0, 0, 1, 7)]
    bins = histogram(stats for stats in every if stats)
    assert [(b.first, b.last, b.count) for b in bins if b.count] == [
        (1.0, 1.5, 2),
        (2.0, 2.5, 1),
        (8.0, 8.5, 1),
    ]
    assert len(bins) == 15


def test_turns_of_a_conversation_are_one_cluster() -> None:
    """Twice the same requests, as second turns, must not make the interval narrower."""
    single = [synthetic([n % 8] * 10, name=str(n)) for n in range(24)]
    twice = single + [synthetic([n % 8] * 10, name=str(n)) for n in range(24)]
    one, other = (figures_of_answers(observed, 7).pooled for observed in (single, twice))
    assert other.num_requests == 48
    assert other.acceptance_length_ci == pytest.approx(one.acceptance_length_ci)


def test_counters_of_a_server() -> None:
    stats = SpeculationStats(100, 300, 180, [90, 60, 30])
    groups = [
        GroupCounters("mt_bench", "mt_bench/math", 10, 290, stats),
        GroupCounters("mt_bench", "mt_bench/stem", 5, 105, SpeculationStats(50, 150, 0, [0, 0, 0])),
        GroupCounters("gsm8k", "gsm8k", 5, 100, None),
    ]
    result = figures_of_counters(groups, 3)
    math = result.by_category["mt_bench/math"]
    assert (math.acceptance_length, math.unconditional) == (2.8, [0.9, 0.6, 0.3])
    assert math.conditional == [0.9, pytest.approx(60 / 90), 0.5]
    assert math.acceptance_length_ci is None
    assert math.tokens_per_step == 1 + 180 / 100  # 290 = 10 first tokens + 100 steps + 180
    assert result.by_set["mt_bench"].acceptance_length == 1 + 180 / 150
    assert result.by_set["gsm8k"].acceptance_length is None
    assert result.pooled.num_requests == 20


def test_without_steps_requests_still_count() -> None:
    """Our server tells the drafts of a request, but not its tokens."""
    every = [synthetic([n % 4] * 10, name=str(n)) for n in range(12)]
    expected = figures_of_answers(every, 7)
    for one in every:
        one.answer.steps = None
    result = figures_of_answers(every, 7)
    assert result.histogram == expected.histogram
    assert result.pooled.tokens_per_step == expected.pooled.tokens_per_step
    assert result.pooled.acceptance_length_ci == expected.pooled.acceptance_length_ci
    assert (result.by_context, result.loop_share, result.samples) == ([], None, [])


# ---- beyond the lengths of training ----


def answered(number: int, accepted: list[int], prompt: int = 10) -> Observation:
    """A request whose steps draft 4 tokens and accept so many of them."""
    stats, steps = SpeculationStats(), [DecodeCounts(1, 0, 0)]
    for count in accepted:
        stats.record(4, count)
        steps.append(DecodeCounts(count + 1, 4, count))
    total = sum(step.num_tokens for step in steps)
    answer = Answer("", "length", prompt, total, token_ids=[], steps=steps, stats=stats)
    return Observation("mine", "", str(number), 0, "", answer)


def test_what_longer_contexts_cost_is_told() -> None:
    """Three tokens a step to position 41, then one and two in turn: 10 steps, and 20 behind."""
    every = [answered(n, [2] * 10 + [0, 1] * 10) for n in range(8)]
    told = beyond_training(every, 41, 4)
    assert told is not None
    assert told.startswith("67% of the drafts stand beyond the 41 tokens that the head was trained")
    assert "acceptance length 1.50 there, 3.00 before" in told
    # One token more is known ground, and with it the first of the poor steps.
    told = beyond_training(every, 42, 4)
    assert told is not None and told.startswith("63% of")
    assert "acceptance length 1.53 there, 2.82 before" in told


@pytest.mark.parametrize(
    ("accepted", "length"),
    [
        ([2] * 30, 41),  # nothing is lost
        ([0] * 20 + [2] * 10, 20),  # it is the other way round
        ([2] * 10, 1000),  # nobody goes there
        ([2] * 10, 1),  # nobody stays below
    ],
    ids=["level", "better", "shorter", "longer"],
)
def test_nothing_is_said_where_nothing_is_lost(accepted: list[int], length: int) -> None:
    assert beyond_training([answered(n, accepted) for n in range(8)], length, 4) is None


def test_a_collapse_is_told_of_five_requests_on() -> None:
    every = [answered(n, [2] * 10 + [0] * 20) for n in range(5)]
    assert "acceptance length 1.00 there, 3.00 before" in str(beyond_training(every, 41, 4))
    assert beyond_training(every[:4], 41, 4) is None


def test_a_difference_within_the_noise_is_not_told() -> None:
    every = [answered(n, [n % 5] * 10 + [(n + 2) % 5] * 10) for n in range(5)]
    assert beyond_training(every, 30, 4) is None


def test_answers_without_steps_tell_nothing() -> None:
    every = [answered(n, [2] * 10 + [0, 1] * 10) for n in range(8)]
    for one in every:
        one.answer.steps = None
    assert beyond_training(every, 41, 4) is None
