"""Processing of packed verification rows against transformers and slow loops, token by token.

The references see one growing context at a time; the functions under test see all rows at once.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation import logits_process as hf

from peagle.kernels.sampling.logits import (
    apply_masks,
    apply_penalties,
    apply_probability_filters,
    min_p_mask,
    process_logits,
    typical_p_mask,
)
from peagle.kernels.sampling.logits_rules import (
    NO_TOKEN,
    AllowedTokens,
    BadWords,
    LogitBias,
    LogitsRules,
    MinTokens,
    PaddedRows,
    TokenCounts,
    VerificationRows,
    context_tails,
    shift_tails,
)
from peagle.kernels.sampling.probabilities import probs_from_logits, sample_from_weights
from peagle.kernels.sampling.random import Purpose, uniform
from peagle.speculation.verification import SamplingTensors, verify

VOCAB = 7
INF = math.inf


@dataclass
class Request:
    """One sequence and what it asks for: by default nothing."""

    prompt: list[int]
    output: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    temperature: float = 1.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    min_p: float = 0.0
    typical_p: float = 1.0
    bias: dict[int, float] = field(default_factory=dict)
    allowed: list[int] | None = None
    bad_words: list[list[int]] = field(default_factory=list)
    min_tokens: int = 0
    stop: list[int] = field(default_factory=list)

    def plain(self) -> Request:
        return Request(self.prompt, self.output, self.drafts, self.temperature)


def floats(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def rules_of(batch: list[Request]) -> LogitsRules:
    bias = [(b, t, v) for b, r in enumerate(batch) for t, v in r.bias.items()]
    sets = [r.allowed for r in batch if r.allowed is not None]
    mask = torch.zeros(len(sets), VOCAB, dtype=torch.bool)
    for row, allowed in enumerate(sets):
        mask[row, allowed] = True
    which = iter(range(len(sets)))
    stops = [(b, t) for b, r in enumerate(batch) for t in r.stop]
    return LogitsRules(
        repetition_penalty_B=floats([r.repetition for r in batch]),
        presence_penalty_B=floats([r.presence for r in batch]),
        frequency_penalty_B=floats([r.frequency for r in batch]),
        min_p_B=floats([r.min_p for r in batch]),
        typical_p_B=floats([r.typical_p for r in batch]),
        bias=LogitBias(
            ints([b for b, _, _ in bias]),
            ints([t for _, t, _ in bias]),
            floats([v for _, _, v in bias]),
        ),
        allowed=AllowedTokens(mask, ints([-1 if r.allowed is None else next(which) for r in batch]))
        if sets
        else None,
        bad_words=BadWords.build([r.bad_words for r in batch]),
        min_tokens=MinTokens(
            ints([r.min_tokens for r in batch]),
            ints([b for b, _ in stops]),
            ints([t for _, t in stops]),
        ),
    )


def rows_of(batch: list[Request], extra_tail: int = 0) -> VerificationRows:
    most = max(len(r.drafts) for r in batch)
    # What stands past a sequence's drafts must not matter, not even an id outside the vocabulary.
    padded = [r.drafts + [-1] * (most - len(r.drafts)) for r in batch]
    width = BadWords.build([r.bad_words for r in batch]).prefix_len + extra_tail
    return VerificationRows(
        torch.tensor(padded, dtype=torch.int64).view(len(batch), most),
        ints([len(r.drafts) for r in batch]),
        ints([len(r.output) for r in batch]),
        sum(len(r.drafts) + 1 for r in batch),
        context_tails([r.prompt + r.output for r in batch], width),
    )


def counts_of(batch: list[Request]) -> TokenCounts:
    counts = TokenCounts(len(batch), VOCAB)
    for slot, r in enumerate(batch):
        counts.start(slot, ints(r.prompt))
        counts.add(torch.full((len(r.output),), slot), ints(r.output))
    return counts


def process(batch: list[Request], logits: Tensor, grammar: Tensor | None = None) -> Tensor:
    temperature = floats([r.temperature for r in batch])
    rows, rules, counts = rows_of(batch), rules_of(batch), counts_of(batch)
    return process_logits(logits, rows, rules, temperature, counts, grammar)


def contexts(batch: list[Request]) -> list[tuple[Request, list[int]]]:
    """The request and the output before each packed row."""
    return [(r, r.output + r.drafts[:j]) for r in batch for j in range(len(r.drafts) + 1)]


def random_logits(num_rows: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, VOCAB, generator=generator, dtype=torch.float64) * 2


def logits_for(batch: list[Request], seed: int = 0) -> Tensor:
    return random_logits(len(contexts(batch)), seed)


# --- references: one context at a time ---


def hf_masks(r: Request, output: list[int], row: Tensor) -> Tensor:
    """transformers' processors; empty rows by hand."""
    ids, scores = torch.tensor([r.prompt + output]), row[None]
    # First, because it has a rule of its own for rows that come in empty.
    if r.allowed is not None:
        scores = hf.PrefixConstrainedLogitsProcessor(lambda *_: r.allowed, 1)(ids, scores)
    if r.bias:
        scores = hf.SequenceBiasLogitsProcessor({(t,): v for t, v in r.bias.items()})(ids, scores)
    if r.bad_words:
        scores = hf.NoBadWordsLogitsProcessor(r.bad_words)(ids, scores)
    if r.stop:
        shortest = hf.MinNewTokensLengthLogitsProcessor(len(r.prompt), r.min_tokens, r.stop)
        scores = shortest(ids, scores)
    if bool((scores == -INF).all()):
        best = max(r.allowed or range(VOCAB), key=lambda token: float(row[token]))
        scores[0, best] = row[best]
    return scores[0]


def loop_penalties(r: Request, output: list[int], row: Tensor) -> Tensor:
    ids = torch.tensor([r.prompt + output])
    scores = hf.RepetitionPenaltyLogitsProcessor(r.repetition)(ids, row[None])[0]
    for token in range(VOCAB):
        count = output.count(token)
        scores[token] -= r.presence * (count > 0) + r.frequency * count
    return scores


def hf_filters(r: Request, row: Tensor) -> Tensor:
    ids, scores = torch.tensor([[0]]), row[None]
    if r.temperature == 0:
        return row
    if r.min_p > 0:
        scaled = hf.MinPLogitsWarper(r.min_p)(ids, scores / r.temperature)
        scores = scores.masked_fill(scaled == -INF, -INF)
    if r.typical_p < 1:
        scaled = hf.TypicalLogitsWarper(r.typical_p)(ids, scores / r.temperature)
        scores = scores.masked_fill(scaled == -INF, -INF)
    return scores[0]


def reference(batch: list[Request], logits: Tensor) -> Tensor:
    rows = []
    for (r, output), row in zip(contexts(batch), logits, strict=True):
        rows.append(hf_filters(r, loop_penalties(r, output, hf_masks(r, output, row))))
    return torch.stack(rows)


def one_at_a_time(batch: list[Request], logits: Tensor) -> Tensor:
    """Our own functions, a batch of one sequence without drafts for every row."""
    rows = []
    for (r, output), row in zip(contexts(batch), logits, strict=True):
        alone = Request(**{**vars(r), "output": output, "drafts": []})
        rows.append(process([alone], row[None])[0])
    return torch.stack(rows)


# --- strategies ---

tokens = st.integers(0, VOCAB - 1)


def few(most: int, least: int = 0) -> st.SearchStrategy[list[int]]:
    return st.lists(tokens, min_size=least, max_size=most)


requests = st.builds(
    Request,
    prompt=few(5, 1),
    output=few(5),
    drafts=few(4),
    temperature=st.sampled_from([0.0, 0.4, 1.0, 1.9]),
    repetition=st.sampled_from([1.0, 0.7, 1.3, 2.0]),
    presence=st.sampled_from([0.0, 0.8, -1.5]),
    frequency=st.sampled_from([0.0, 0.4, -0.3]),
    min_p=st.sampled_from([0.0, 0.1, 0.45, 1.0]),
    typical_p=st.sampled_from([1.0, 0.9, 0.5, 0.05]),
    bias=st.dictionaries(tokens, st.sampled_from([-100.0, -1.5, 2.0, -INF]), max_size=3),
    allowed=st.none() | st.lists(tokens, min_size=1, max_size=5, unique=True),
    bad_words=st.lists(few(3, 1), max_size=4, unique_by=tuple),
    min_tokens=st.integers(0, 9),
    stop=st.lists(tokens, max_size=3, unique=True),
)
batches = st.lists(requests, min_size=1, max_size=4)
seeds = st.integers(0, 2**31)


# --- properties ---


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(batches, seeds)
def test_equals_the_references_with_a_growing_context(batch: list[Request], seed: int) -> None:
    logits = logits_for(batch, seed)
    torch.testing.assert_close(
        process(batch, logits), reference(batch, logits), rtol=1e-9, atol=1e-9
    )


@pytest.mark.slow
@settings(deadline=None, max_examples=100)
@given(batches, seeds)
def test_one_shot_equals_one_position_at_a_time(batch: list[Request], seed: int) -> None:
    logits = logits_for(batch, seed)
    assert torch.equal(process(batch, logits), one_at_a_time(batch, logits))


@pytest.mark.slow
@given(batches, seeds)
def test_padded_rows_equal_packed_ones(batch: list[Request], seed: int) -> None:
    """To the last bit, whatever stands in the padding."""
    rows, rules, counts = rows_of(batch), rules_of(batch), counts_of(batch)
    temperature, logits = floats([r.temperature for r in batch]), logits_for(batch, seed)
    width = rows.max_drafts + 1
    at = [b * width + j for b, r in enumerate(batch) for j in range(len(r.drafts) + 1)]
    spread = torch.full((len(batch) * width, VOCAB), torch.nan, dtype=logits.dtype)
    spread[at] = logits
    padded = replace(PaddedRows(**vars(rows)), num_rows=len(spread))
    found = process_logits(spread, padded, rules, temperature, counts)[at]
    assert torch.equal(found, process_logits(logits, rows, rules, temperature, counts))


@pytest.mark.slow
@settings(deadline=None, max_examples=100)
@given(batches, st.lists(st.booleans(), min_size=4, max_size=4), seeds)
def test_sequences_without_rules_keep_their_bits(
    batch: list[Request], quiet: list[bool], seed: int
) -> None:
    batch = [r.plain() if q else r for r, q in zip(batch, quiet, strict=False)]
    logits = logits_for(batch, seed)
    logits[:, 0] = -0.0
    result = process(batch, logits)
    for row, (r, _) in enumerate(contexts(batch)):
        if r == r.plain():
            # As integers, so that -0.0 and 0.0 differ.
            assert torch.equal(result[row].view(torch.int64), logits[row].view(torch.int64))


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(
    batches,
    seeds,
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    st.sampled_from([1.0, 1e4, 1e36]),
)
def test_never_nan_and_a_token_survives(
    batch: list[Request], seed: int, dtype: torch.dtype, scale: float
) -> None:
    limit = torch.finfo(dtype).max
    logits = (logits_for(batch, seed) * scale).clamp(-limit, limit).to(dtype)
    # Targets that pad their vocabulary hold -inf themselves.
    logits[:, seed % VOCAB] = -INF
    before = logits.clone()
    result = process(batch, logits)
    assert torch.equal(logits, before)
    assert not result.isnan().any()
    assert (result > -INF).any(-1).all()
    assert (result < INF).all()
    temperature = floats([r.temperature for r, _ in contexts(batch)])
    probs = probs_from_logits(
        result, temperature, torch.zeros(len(result)).long(), torch.ones(len(result))
    )
    assert bool((probs.sum(-1) - 1).abs().max() < 1e-5)


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(batches, seeds)
def test_the_grammar_wins(batch: list[Request], seed: int) -> None:
    """Rows with a grammar are those of a request that allows what both permit, row by row."""
    logits = logits_for(batch, seed)
    generator = random.Random(seed)
    permitted = [
        set(range(VOCAB)) if generator.random() < 0.3 else set(generator.sample(range(VOCAB), size))
        for size in generator.choices([1, 2, 4], k=len(logits))
    ]
    mask = torch.zeros(logits.shape, dtype=torch.bool)
    for row, tokens in enumerate(permitted):
        mask[row, list(tokens)] = True
    result = process(batch, logits, mask)
    assert not (result[~mask] > -INF).any()
    assert (result > -INF).any(-1).all()
    for row, (r, output) in enumerate(contexts(batch)):
        both = permitted[row] & set(range(VOCAB) if r.allowed is None else r.allowed)
        if both:
            alone = Request(**{**vars(r), "output": output, "drafts": [], "allowed": sorted(both)})
            assert torch.equal(result[row], process([alone], logits[row : row + 1])[0])
        else:
            best = max(permitted[row], key=lambda token: float(logits[row, token]))
            assert (result[row] > -INF).nonzero().tolist() == [[best]]


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.integers(-12, 12).map(lambda n: n / 4), min_size=1, max_size=8),
    st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    st.sampled_from([1.0, 0.99, 0.6, 1e-9]),
)
def test_filters_keep_a_token_even_with_ties(row: list[float], min_p: float, mass: float) -> None:
    probs = floats(row).softmax(-1)[None]
    kept = min_p_mask(probs, floats([min_p]))[0]
    assert bool(kept[probs.argmax()]) and (min_p > 0 or bool(kept.all()))
    typical = typical_p_mask(probs, floats([mass]))[0]
    assert bool(typical.any()) and (mass < 1 or bool(typical.all()))
    assert float(probs[0, typical].sum()) >= mass - 1e-12


# --- single rules, by hand ---


def test_typical_keeps_the_smallest_typical_set() -> None:
    probs = floats([0.5, 0.3, 0.15, 0.05])[None]
    # H = 1.142; |-log p - H| = 0.449, 0.062, 0.755, 1.854.
    assert typical_p_mask(probs, floats([0.2]))[0].tolist() == [False, True, False, False]
    assert typical_p_mask(probs, floats([0.4]))[0].tolist() == [True, True, False, False]
    assert typical_p_mask(probs, floats([0.81]))[0].tolist() == [True, True, True, False]


def test_greedy_rows_are_not_filtered() -> None:
    # At temperature 1 typical-p would remove the argmax.
    logits = floats([0.5, 0.3, 0.15, 0.05]).log().expand(2, 4)
    filtered = apply_probability_filters(logits, floats([0.0, 1.0]), None, floats([0.2, 0.2]))
    assert torch.equal(filtered[0], logits[0]) and int(filtered[1].argmax()) == 1


def test_slots_reach_the_counts_and_none_is_not_penalised() -> None:
    counts = TokenCounts(3, VOCAB)
    counts.start(2, ints([1, 1]))
    counts.add(ints([2, 2, -1, 2]), ints([3, 3, 4, -1]), torch.tensor([True, True, True, False]))
    assert counts.outputs_SV[2].tolist() == [0, 0, 0, 2, 0, 0, 0]
    assert not counts.outputs_SV[:2].any()
    batch = [Request([0], drafts=[5]), Request([1])]
    rules = LogitsRules(frequency_penalty_B=floats([1.0, 1.0]), count_slots_B=ints([-1, 2]))
    result = apply_penalties(torch.zeros(3, VOCAB), rows_of(batch), rules, counts)
    assert not result[:2].any()
    assert result[2].tolist() == [0, 0, 0, -2, 0, 0, 0]
    counts.start(2, ints([6]))
    assert not counts.outputs_SV.any() and counts.in_prompt_SV[2].nonzero().item() == 6


def test_bad_words_match_across_context_and_drafts() -> None:
    batch = [Request([1], [2], [3, 4], bad_words=[[1, 2, 3], [2, 3, 4], [3, 4, 5], [6]])]
    for extra in (0, 3):
        result = apply_masks(torch.zeros(3, VOCAB), rows_of(batch, extra), rules_of(batch))
        banned = [row.isinf().nonzero().flatten().tolist() for row in result]
        assert banned == [[3, 6], [4, 6], [5, 6]]


@pytest.mark.parametrize(
    ("request_", "survivor"),
    [
        (Request([0], allowed=[2, 4], bad_words=[[2], [4]]), 4),
        (Request([0], allowed=[3], min_tokens=1, stop=[3]), 3),
        (Request([0], bad_words=[[t] for t in range(VOCAB)]), 6),
        (Request([0], allowed=[]), 6),
        (Request([0], bias=dict.fromkeys(range(VOCAB), -INF)), 6),
        (Request([0], allowed=[1], bias={1: -INF}), 1),
    ],
)
def test_an_empty_row_keeps_the_most_likely_allowed_token(request_: Request, survivor: int) -> None:
    logits = torch.arange(VOCAB, dtype=torch.float64)[None]
    result = process([request_], logits)
    assert (result > -INF).nonzero().tolist() == [[0, survivor]]


def test_an_allowed_token_of_raw_probability_zero_survives() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 2] = -INF
    # In the prompt, so that the penalty multiplies the lowest number there is.
    result = process([Request([2], allowed=[2], repetition=3.0)], logits)
    assert (result > -INF).nonzero().tolist() == [[0, 2]]


def test_the_grammar_is_stronger_than_allowed_ids_and_bias() -> None:
    logits = torch.arange(VOCAB, dtype=torch.float64).expand(3, VOCAB)
    mask = torch.ones(3, VOCAB, dtype=torch.bool)
    mask[:2, 3:] = False
    banned = Request([0], bias={0: -INF, 1: -INF, 2: -INF})
    batch = [Request([0], allowed=[5]), banned, Request([0])]
    result = process(batch, logits, mask)
    assert (result[:2] > -INF).nonzero().tolist() == [[0, 2], [1, 2]]
    assert torch.equal(result[2], logits[2])


def test_a_row_without_a_permitted_token_stays_a_distribution() -> None:
    """Such rows stand behind a refused draft; they are computed, and never reached."""
    mask = torch.zeros(1, VOCAB, dtype=torch.bool)
    result = process([Request([0])], random_logits(1, 0), mask)
    assert int((result > -INF).sum()) == 1 and not result.isnan().any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_no_number_that_a_request_may_give_makes_nan_or_inf(dtype: torch.dtype) -> None:
    huge = 1.7e308
    logits = torch.tensor([[0.0, -0.0, 1.0, -1.0, -INF, 3e4, -3e4]], dtype=dtype)
    for factor in (5e-324, huge):
        rules = LogitsRules(repetition_penalty_B=floats([factor]))
        batch = [Request(list(range(VOCAB)))]
        result = apply_penalties(logits, rows_of(batch), rules, counts_of(batch))
        assert not result.isnan().any() and (result < INF).all()
        assert (result == -INF).nonzero().tolist() == [[0, 4]]
    twice = LogitBias(ints([0] * 5), ints([0, 0, 5, 5, 5]), floats([huge, huge, huge, huge, -INF]))
    logits[0, 0] = torch.finfo(dtype).max
    result = apply_masks(logits, rows_of([Request([0])]), LogitsRules(bias=twice))
    assert not result.isnan().any() and (result < INF).all() and result[0, 5] == -INF


def test_no_rules_leave_the_very_tensor() -> None:
    logits, batch = random_logits(3, 0), [Request([0], drafts=[1, 2])]
    assert process_logits(logits, rows_of(batch), LogitsRules(), floats([1.0])) is logits


# --- exactness under verification ---

_PAIR = {"repetition": 1.6, "frequency": 0.5, "typical_p": 0.9, "bad_words": [[1, 2], [6, 4]]}


def _context_logits(output: list[int]) -> Tensor:
    """A toy target: the logits depend on the last token, which it likes to say again."""
    logits = random_logits(1, 7 + (output[-1] if output else VOCAB))
    logits[:, output[-1:]] += 3
    return logits


@cache
def _plain(output: tuple[int, ...]) -> Tensor:
    """Probabilities of the next token in plain decoding, by the references."""
    batch = [Request([3, 1], list(output), **_PAIR)]
    return reference(batch, _context_logits(list(output)))[0].softmax(-1)


@pytest.mark.slow
def test_verification_of_processed_rows_is_distributed_as_plain_decoding() -> None:
    """First two output tokens of 8,000 sequences with two drafts each, against the exact law."""
    num, generator = 8_000, random.Random(0)
    # There are six pairs of drafts, whose rows are the same for everyone who has them.
    kinds = [Request([3, 1], [], [a, b], **_PAIR) for a in (1, 5, 6) for b in (2, 6)]
    which = [generator.randrange(len(kinds)) for _ in range(num)]
    batch = [kinds[i] for i in which]
    table = torch.cat([_context_logits([t]) for t in range(VOCAB)] + [_context_logits([])])
    index = ints([i for r in kinds for i in (VOCAB, *r.drafts)])
    logits = process(kinds, table[index]).unflatten(0, (len(kinds), 3))[which].flatten(0, 1)
    sampling = SamplingTensors(
        floats([1.0] * num),
        ints([0] * num),
        floats([1.0] * num),
        torch.arange(num),
        ints([0] * num),
        all_greedy=False,
    )
    verified = verify(logits, rows_of(batch), sampling)
    accepted, own = verified.num_accepted_B.tolist(), verified.next_tokens_B.tolist()
    assert set(accepted) == {0, 1, 2}
    outputs = [(*r.drafts[:a], t) for r, a, t in zip(batch, accepted, own, strict=True)]

    # A step that ends after one token goes on plainly.
    first = {o: _plain(o) for o in outputs if len(o) == 1}
    unsettled = [b for b, o in enumerate(outputs) if len(o) == 1]
    uniform_N = uniform(ints(unsettled), torch.tensor(1), Purpose.SAMPLE)
    probs = torch.stack([first[outputs[b]] for b in unsettled])
    for b, token in zip(unsettled, sample_from_weights(probs, uniform_N).tolist(), strict=True):
        outputs[b] = (*outputs[b], token)
    seen = Counter(o[:2] for o in outputs)
    for one, p_one in enumerate(_plain(()).tolist()):
        for two, p_two in enumerate(_plain((one,)).tolist()):
            p = p_one * p_two
            error = abs(seen[one, two] / num - p)
            assert error <= 5 * math.sqrt(p * (1 - p) / num), (one, two)


def test_tails_move_by_what_each_sequence_emits() -> None:
    tails = ints([NO_TOKEN, 1, 2] * 3).view(3, 3)
    emitted = ints([5, 6, NO_TOKEN, NO_TOKEN] + [5, 6, 7, 8] + [NO_TOKEN] * 4).view(3, 4)
    assert shift_tails(tails, emitted).tolist() == [[2, 5, 6], [6, 7, 8], [NO_TOKEN, 1, 2]]
