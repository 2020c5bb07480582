"""Synthetic acceptance: counts follow the rates whatever the drafts are, the next token is real."""

import math

import pytest
import torch
from torch import Tensor

from peagle.kernels.sampling.logits_rules import VerificationRows
from peagle.speculation.verification import SamplingTensors, Verified, verify

K, VOCAB = 4, 5
RATES = [0.9, 0.6, 0.6, 0.05]
KINDS = ["greedy", "argmax drafts", "drawn drafts"]


class Batch:
    """Random logits and drafts; every sequence has a seed, and its own k up to `most`."""

    def __init__(self, kind: str, count: int, *, ragged: bool = False, most: int = K) -> None:
        generator = torch.Generator().manual_seed(len(kind))
        self.num_draft_tokens_B = torch.full((count,), most)
        if ragged:
            self.num_draft_tokens_B = torch.arange(count) % (most + 1)
        self.drafts_BK = torch.randint(VOCAB, (count, most), generator=generator)
        temperature_B = torch.full((count,), 0.0 if kind == "greedy" else 0.8, dtype=torch.float64)
        if kind != "greedy":
            temperature_B[::5] = 0  # greedy neighbours
        self.sampling = SamplingTensors(
            temperature_B,
            torch.full((count,), 3),
            torch.full((count,), 0.9, dtype=torch.float64),
            seeds_B=torch.arange(count) * 7919 + 13,
            num_outputs_B=torch.arange(count) % 11,
            all_greedy=kind == "greedy",
        )
        self.probs_BKV = None
        if kind == "drawn drafts":
            noise_BKV = torch.randn(count, most, VOCAB, generator=generator, dtype=torch.float64)
            self.probs_BKV = noise_BKV.softmax(-1)
        rows = self.rows()
        self.logits_RV = torch.randn(rows.num_rows, VOCAB, generator=generator, dtype=torch.float64)

    def rows(self) -> VerificationRows:
        return VerificationRows(
            self.drafts_BK,
            self.num_draft_tokens_B,
            self.sampling.num_outputs_B,
            int(self.num_draft_tokens_B.sum()) + len(self.num_draft_tokens_B),
        )

    def verify(self, rates: list[float] | None) -> Verified:
        rates_K = None if rates is None else torch.tensor(rates)
        return verify(self.logits_RV, self.rows(), self.sampling, self.probs_BKV, rates_K)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KINDS, "steps of one sequence"])
def test_counts_follow_the_rates(kind: str) -> None:
    count = 100_000
    batch = Batch(kind if kind in KINDS else "greedy", count)
    if kind not in KINDS:
        batch.sampling.seeds_B.fill_(5)
        batch.sampling.num_outputs_B.copy_(torch.arange(count))
    accepted_B = batch.verify(RATES).num_accepted_B
    assert accepted_B.dtype == torch.int64
    # Five standard deviations, which chance exceeds once in 1.7 million.
    for i, rate in enumerate(RATES, start=1):
        share = float((accepted_B >= i).double().mean())
        assert abs(share - rate) < 5 * math.sqrt(rate * (1 - rate) / count)
    assert 1 + float(accepted_B.double().mean()) == pytest.approx(1 + sum(RATES), abs=0.03)
    assert int((accepted_B == 2).sum()) == 0, "0.6 twice: the third draft passes with the second"


@pytest.mark.parametrize("kind", KINDS)
def test_counts_depend_on_seed_and_position_alone(kind: str) -> None:
    batch = Batch(kind, 2000)
    accepted_B = batch.verify(RATES).num_accepted_B
    batch.logits_RV = batch.logits_RV.flip(0)
    batch.drafts_BK = batch.drafts_BK.flip(0)
    assert torch.equal(batch.verify(RATES).num_accepted_B, accepted_B)
    assert torch.equal(Batch("greedy", 2000).verify(RATES).num_accepted_B, accepted_B)
    batch.sampling.num_outputs_B.add_(1)
    assert not torch.equal(batch.verify(RATES).num_accepted_B, accepted_B)


@pytest.mark.parametrize("kind", KINDS)
def test_sequences_with_fewer_drafts(kind: str) -> None:
    full = Batch(kind, 5000).verify(RATES).num_accepted_B
    ragged = Batch(kind, 5000, ragged=True)
    found = ragged.verify(RATES).num_accepted_B
    assert found.tolist() == torch.minimum(full, ragged.num_draft_tokens_B).tolist()
    narrow = Batch(kind, 5000, most=2).verify(RATES).num_accepted_B
    assert narrow.tolist() == full.clamp_max(2).tolist(), "the rates of longer drafts are unread"
    none = Batch(kind, 50, most=0)
    assert none.verify(RATES).num_accepted_B.tolist() == [0] * 50
    assert torch.equal(none.verify(RATES).next_tokens_B, none.verify(None).next_tokens_B)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rates", [RATES, [1.0] * K, [0.0] * K], ids=str)
def test_the_next_token_is_the_targets_own(kind: str, rates: list[float]) -> None:
    batch = Batch(kind, 5000, ragged=True)
    found = batch.verify(rates)
    if rates != RATES:
        assert torch.equal(found.num_accepted_B, batch.num_draft_tokens_B * int(rates[0]))
    rows_B = batch.rows().first_row_B + found.num_accepted_B
    greedy_B = batch.sampling.temperature_B == 0
    best_B = batch.logits_RV[rows_B].argmax(-1)
    assert torch.equal(found.next_tokens_B[greedy_B], best_B[greedy_B])
    # As of a sequence that has the accepted drafts already and drafts nothing: no leftover of
    # p - q has a part in it.
    assert torch.equal(found.next_tokens_B, undrafted(batch, rows_B, found.num_accepted_B))


def undrafted(batch: Batch, rows_B: Tensor, num_accepted_B: Tensor) -> Tensor:
    """What a plain step draws at the given rows."""
    own = batch.sampling
    count = len(rows_B)
    position_B = own.num_outputs_B + num_accepted_B
    none_B0 = torch.zeros(count, 0, dtype=torch.int64)
    rows = VerificationRows(none_B0, torch.zeros(count, dtype=torch.int64), position_B, count)
    sampling = SamplingTensors(
        own.temperature_B, own.top_k_B, own.top_p_B, own.seeds_B, position_B, own.all_greedy
    )
    return verify(batch.logits_RV[rows_B], rows, sampling).next_tokens_B


def test_fewer_rates_than_drafts_are_refused() -> None:
    with pytest.raises(AssertionError, match="a rate for every draft"):
        Batch("greedy", 3).verify([0.5])
