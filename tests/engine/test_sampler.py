"""The sampler against a slow reference, over schedules that an engine may make."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.config import SamplingParams
from peagle.engine import sampler as sampler_module
from peagle.engine.sampler import Sampler, SamplerOutput
from tests.engine.sampling_reference import VOCAB, Request, Rows, draft, packed, permitted, step

CPU = torch.device("cpu")
PLAIN = SamplingParams()
DRAFTING = ("none", "argmax", "probabilistic")
STOP = frozenset({0, 4, 6})


def make_sampler(max_num_seqs: int = 8) -> Sampler:
    return Sampler(VOCAB, CPU, max_num_seqs)


def run_step(sampler: Sampler, batch: list[Any]) -> tuple[list[Rows], SamplerOutput]:
    """One step of a batch of requests; drafts are left on them, nothing is appended."""
    num_drafted = [draft(request) for request in batch]
    rows = [Rows.of(request, k) for request, k in zip(batch, num_drafted, strict=True)]
    logits, masks = packed(rows)
    before = logits.clone()
    masked = any(request.is_constrained for request in batch)
    result = sampler.sample(logits, batch, num_drafted, masks if masked else None)
    assert torch.equal(logits, before)
    return rows, result


def check(batch: list[Request], rows: list[Rows], result: SamplerOutput) -> None:
    new = result.new_token_ids
    assert new == [step(request, of) for request, of in zip(batch, rows, strict=True)]
    assert (
        result.num_accepted == result.verified.num_accepted_B.tolist() == [len(n) - 1 for n in new]
    )
    assert result.verified.next_tokens_B.tolist() == [tokens[-1] for tokens in new]
    counted = [r.num_output_tokens + len(n) for r, n in zip(batch, new, strict=True)]
    assert result.sampling.num_outputs_B.tolist() == counted
    for request, of, tokens, found in zip(batch, rows, new, result.logprobs, strict=True):
        for context, token in zip(of.contexts, tokens, strict=False):
            assert token in permitted(request, context)
        if request.params.logprobs is None:
            assert found is None
            continue
        assert found is not None and [one.token_id for one in found] == tokens
        for one, raw in zip(found, of.logits, strict=False):
            total = math.log(sum(map(math.exp, raw)))
            best = sorted(((x - total, -i) for i, x in enumerate(raw)), reverse=True)
            assert one.logprob == pytest.approx(raw[one.token_id] - total, abs=1e-12)
            assert best[one.rank - 1][1] == -one.token_id
            expected = [(-i, pytest.approx(x, abs=1e-12)) for x, i in best]
            assert one.top == expected[: request.params.logprobs]


Step = tuple[list[Request], list[Rows], SamplerOutput]


def simulate(
    sampler: Sampler, requests: list[Request], seed: int, num_steps: int = 10
) -> Iterator[Step]:
    """Steps of changing batches, in any order, with preemptions, each held against the reference.

    Between changes the same batch runs for a while, as in an engine. Yields every step before its
    tokens are appended.
    """
    dice = random.Random(seed)
    batch: list[Request] = []
    for _ in range(num_steps):
        if not batch or dice.random() < 0.3:
            batch = dice.sample(requests, dice.randint(1, len(requests)))
        if dice.random() < 0.2:
            sampler.release(dice.choice(requests))  # preempted, and back at once or later
        rows, result = run_step(sampler, batch)
        check(batch, rows, result)
        yield batch, rows, result
        append(batch, result)


def append(batch: list[Request], result: SamplerOutput) -> None:
    for request, tokens in zip(batch, result.new_token_ids, strict=True):
        request.output_token_ids.extend(tokens)


numbers = st.sampled_from
optional_ids = st.none() | st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4)
words = st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3), max_size=3)


@st.composite
def requests_(draw: st.DrawFn, seq_id: int) -> Request:
    grammar = draw(st.integers(0, 3)) == 0
    params = SamplingParams(
        temperature=draw(numbers([0.0, 0.0, 0.6, 1.3])),
        top_k=draw(numbers([0, 0, 3, 100])),
        top_p=draw(numbers([1.0, 1.0, 0.8])),
        min_p=draw(numbers([0.0, 0.0, 0.2])),
        typical_p=draw(numbers([1.0, 1.0, 0.7])),
        repetition_penalty=draw(numbers([1.0, 1.0, 1.7, 0.8])),
        presence_penalty=draw(numbers([0.0, 0.0, 1.1, -1.0])),
        frequency_penalty=draw(numbers([0.0, 0.0, -0.4, 0.8])),
        logit_bias=draw(numbers([{}, {}, {1: 2.0, 3: -math.inf, 4: -1.0}, {2: 9.0, 5: -math.inf}])),
        bad_words=() if grammar else draw(words),
        allowed_token_ids=None if grammar else draw(optional_ids),
        min_tokens=0 if grammar else draw(numbers([0, 0, 3, 9])),
        logprobs=draw(st.none() | st.integers(0, 4)),
    )
    return Request(
        seq_id,
        params,
        draw(st.integers(0, 2**40)),
        draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4)),
        draw(numbers([frozenset(), STOP])),
        draw(numbers(DRAFTING)),
        grammar,
    )


any_batch = st.integers(1, 5).flatmap(lambda n: st.tuples(*(requests_(i) for i in range(n))))


@pytest.mark.slow
@settings(deadline=None, max_examples=80)
@given(any_batch, st.integers(0, 2**31))
def test_mixed_features_and_schedules(requests: tuple[Request, ...], seed: int) -> None:
    for _ in simulate(make_sampler(len(requests)), list(requests), seed):
        pass


@pytest.mark.parametrize("drafting", ["argmax", "probabilistic"])
@pytest.mark.parametrize("temperature", [0.0, 1.2], ids=["greedy", "sampled"])
def test_synthetic_acceptance(temperature: float, drafting: str) -> None:
    sampler = Sampler(VOCAB, CPU, 8, synthetic_acceptance_rates=[1.0, 1.0, 0.0, 0.0])
    params = SamplingParams(temperature=temperature, frequency_penalty=0.5, logprobs=0)
    batch = [Request(i, params, i, drafting=drafting) for i in range(6)]
    plain = make_sampler()
    seen = set()
    for _ in range(6):
        rows, result = run_step(sampler, batch)
        num_drafted = [len(of.contexts) - 1 for of in rows]
        seen |= {*num_drafted}
        assert result.num_accepted == [min(k, 2) for k in num_drafted]
        for i, request in enumerate(batch):
            new = result.new_token_ids[i]
            assert new[:-1] == request.drafts[: min(num_drafted[i], 2)]
            # The last token is what a step without drafts gives behind the others.
            request.output_token_ids.extend(new[:-1])
            alone = Rows.of(request, 0)
            logits, _ = packed([alone])
            assert plain.sample(logits, [request], [0]).new_token_ids == [new[-1:]]
            plain.release(request)
            request.output_token_ids.append(new[-1])
    assert seen == {0, 1, 2, 3, 4}


# --- what it keeps ---

PENALTY = SamplingParams(frequency_penalty=1.0)


def test_counts_are_those_of_prompt_and_output_after_any_step() -> None:
    sampler = make_sampler()
    batch = [Request(i, PENALTY, i, [2, 2, i], drafting="argmax") for i in range(3)]
    for number in range(6):
        if number == 3:
            sampler.release(batch[1])
        _, result = run_step(sampler, batch)
        append(batch, result)
    assert any(r.num_output_tokens > 6 for r in batch), "drafts should have been accepted"
    for request in batch:
        slot = sampler.slots.of(request)
        counts = sampler.slots.counts
        assert counts is not None
        expected = [request.output_token_ids.count(token) for token in range(VOCAB)]
        assert counts.outputs_SV[slot].tolist() == expected
        assert counts.in_prompt_SV[slot].nonzero().flatten().tolist() == sorted({2, request.seq_id})


def test_slots_are_for_penalties_only_and_are_given_back() -> None:
    sampler = make_sampler(max_num_seqs=2)
    plain = [Request(i, SamplingParams(temperature=1.0, min_p=0.1), i) for i in range(5)]
    run_step(sampler, plain)
    assert sampler.slots.counts is None
    for i in range(10, 40, 2):
        pair = [Request(i, PENALTY, i), plain[0], Request(i + 1, PENALTY, i)]
        assert len(list(simulate(sampler, pair, seed=i, num_steps=3))) == 3
        for request in pair:
            sampler.release(request)
            sampler.release(request)  # of no effect
    assert sorted(sampler.slots._free) == [0, 1]
    with pytest.raises(AssertionError, match="not released"):
        run_step(sampler, [Request(i, PENALTY, i) for i in range(3)])


def test_tensors_are_built_once_a_composition(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[int] = []
    build = sampler_module.build_rules

    def counting(sequences: Any, *rest: Any) -> Any:
        built.append(len(sequences))
        return build(sequences, *rest)

    monkeypatch.setattr(sampler_module, "build_rules", counting)
    sampler = make_sampler()
    batch = [Request(i, PENALTY, i, drafting="argmax") for i in range(3)]
    for same in (batch, batch, batch, batch[:2], batch[:2], [*batch[1::-1]], batch):
        rows, result = run_step(sampler, same)
        check(same, rows, result)
        append(same, result)
    assert built == [3, 2, 2, 3]
    now = sampler.tensors(batch)
    assert now.num_outputs_B.tolist() == [r.num_output_tokens for r in batch]
    assert now.all_greedy and now.seeds_B.tolist() == [0, 1, 2]
    # Those of others, as drafting asks for, neither disturb what is kept nor take a slot.
    others = sampler.tensors([batch[2], Request(9, PENALTY, 7)])
    assert others.seeds_B.tolist() == [2, 7] and 9 not in sampler.slots._slot_of
    run_step(sampler, batch)
    assert built == [3, 2, 2, 3]


def test_a_plain_batch_is_not_processed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is one whose minimum length is reached, or a greedy one that asks for filters."""

    def never(*_: Any) -> Any:
        raise AssertionError("the logits were processed")

    sampler = make_sampler()
    short = [Request(0, SamplingParams(min_tokens=2), 0, stop_token_ids=STOP), Request(1, PLAIN, 1)]
    assert run_step(sampler, short)[1].new_token_ids[0][0] not in STOP
    monkeypatch.setattr(sampler_module, "process_logits", never)
    with pytest.raises(AssertionError, match="processed"):
        run_step(sampler, short)
    short[0].output_token_ids = [1, 1]
    filters = SamplingParams(min_p=0.5, typical_p=0.5)
    for batch in (
        short,
        [Request(2, filters, 0)],
        [Request(3, SamplingParams(temperature=1.0), 0)],
    ):
        rows, result = run_step(sampler, batch)
        check(batch, rows, result)


@pytest.mark.parametrize("num_outputs", range(5))
def test_the_minimum_length_holds_from_wherever_a_batch_starts(num_outputs: int) -> None:
    """As after preemption: the sampler first sees the sequence with some output."""
    sampler, stop = make_sampler(), frozenset(range(VOCAB - 1))
    request = Request(0, SamplingParams(min_tokens=3), 0, stop_token_ids=stop)
    request.output_token_ids = [VOCAB - 1] * num_outputs
    rows, result = run_step(sampler, [request])
    check([request], rows, result)
    assert (result.new_token_ids == [[VOCAB - 1]]) is (num_outputs < 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_logits(dtype: torch.dtype) -> None:
    """Everything at once on a bfloat16 model: tokens come, inside the grammar, with logprobs."""
    params = SamplingParams(
        temperature=0.9,
        logprobs=1,
        logit_bias={0: 2.5, 1: -4.0, 5: -math.inf},
        frequency_penalty=-0.6,
        presence_penalty=-1.0,
        repetition_penalty=0.8,
        min_p=0.3,
        typical_p=0.5,
    )
    sampler = make_sampler()
    batch = [Request(i, params, i, drafting="probabilistic", is_constrained=True) for i in range(4)]
    for _ in range(5):
        num_drafted = [draft(request) for request in batch]
        logits, masks = packed([Rows.of(r, k) for r, k in zip(batch, num_drafted, strict=True)])
        result = sampler.sample(logits.to(dtype), batch, num_drafted, masks)
        for request, tokens in zip(batch, result.new_token_ids, strict=True):
            for token in tokens:
                assert token in permitted(request, request.output_token_ids)
                request.output_token_ids.append(token)
