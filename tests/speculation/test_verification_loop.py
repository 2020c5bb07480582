"""Verification of ragged, mixed batches against a loop that takes draft after draft."""

import itertools
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from peagle.kernels.sampling.logits_rules import VerificationRows
from peagle.kernels.sampling.random import DRAWS_PER_STEP, Purpose, uniform
from peagle.speculation.verification import SamplingTensors, verify
from tests.speculation.block_reference import accept_block
from tests.speculation.test_verification import probabilities

VOCAB = 5


@dataclass
class Ragged:
    """A packed batch with rows of different length and different parameters."""

    num_draft_tokens: list[int]
    temperature: list[float]
    top_k: list[int]
    is_drawn: list[bool]
    seed: int

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        batch, most = len(self.num_draft_tokens), max(self.num_draft_tokens)
        rows = sum(self.num_draft_tokens) + batch
        self.logits = torch.randn(rows, VOCAB, generator=generator, dtype=torch.float64)
        best = self.logits.argmax(-1).tolist()
        self.drafts = torch.randint(VOCAB, (batch, most), generator=generator)
        row = 0
        for b, k in enumerate(self.num_draft_tokens):
            for j in range(k):  # most drafts are the target's favourite
                if torch.rand((), generator=generator) < 0.7:
                    self.drafts[b, j] = best[row + j]
            row += k + 1
        self.q: Tensor | None = None
        if any(self.is_drawn):
            self.q = torch.rand(batch, most, VOCAB, generator=generator, dtype=torch.float64)
            self.q /= self.q.sum(-1, keepdim=True)
            self.q[~torch.tensor(self.is_drawn)] = 0
        self.num_outputs = torch.randint(0, 50, (batch,), generator=generator)

    @property
    def sampling(self) -> SamplingTensors:
        batch = len(self.num_draft_tokens)
        return SamplingTensors(
            temperature_B=torch.tensor(self.temperature, dtype=torch.float64),
            top_k_B=torch.tensor(self.top_k),
            top_p_B=torch.ones(batch, dtype=torch.float64),
            seeds_B=torch.arange(batch) + self.seed,
            num_outputs_B=self.num_outputs,
            all_greedy=not any(self.temperature),
        )

    def run(self) -> list[tuple[int, int]]:
        num_draft_tokens = torch.tensor(self.num_draft_tokens)
        rows = VerificationRows(self.drafts, num_draft_tokens, self.num_outputs, len(self.logits))
        found = verify(self.logits, rows, self.sampling, self.q)
        return list(zip(found.num_accepted_B.tolist(), found.next_tokens_B.tolist()))

    def reference(self) -> list[tuple[int, int]]:
        results, row = [], 0
        for b, k in enumerate(self.num_draft_tokens):
            rows = self.logits[row : row + k + 1].tolist()
            results.append(self._one(b, rows))
            row += k + 1
        return results

    def _one(self, b: int, rows: list[list[float]]) -> tuple[int, int]:
        """Accept drawn drafts as a block, others one by one while the target draws the same.

        Then comes the target's own token, or one instead of a draft.
        """

        def number(column: int, purpose: Purpose) -> float:
            position = self.num_outputs[b] + column
            if purpose is Purpose.ACCEPT:
                position = self.num_outputs[b] * DRAWS_PER_STEP + column
            return uniform(torch.tensor(b + self.seed), position, purpose).item()

        def drawn(column: int, weights: list[float]) -> int:
            threshold = number(column, Purpose.SAMPLE) * sum(weights)
            sums = list(itertools.accumulate(weights))
            return next(i for i in range(VOCAB) if sums[i] > threshold)

        p = [probabilities(row, self.temperature[b], self.top_k[b]) for row in rows]
        drafts = self.drafts[b, : len(rows) - 1].tolist()
        if self.q is not None and self.is_drawn[b]:
            q = self.q[b].tolist()
            numbers = [number(j, Purpose.ACCEPT) for j in range(len(drafts))]
            accepted, share = accept_block(p, q, drafts, numbers)
            weights = p[accepted]
            if accepted < len(drafts):
                left = [max(share * x - y, 0.0) for x, y in zip(weights, q[accepted], strict=True)]
                weights = left if sum(left) > 0 else weights
            return accepted, drawn(accepted, weights)
        for j, x in enumerate(drafts):
            if (own := drawn(j, p[j])) != x:
                return j, own
        return len(drafts), drawn(len(drafts), p[-1])


def ragged(temperatures: list[float]) -> st.SearchStrategy[Ragged]:
    return st.integers(1, 6).flatmap(
        lambda batch: st.builds(
            Ragged,
            num_draft_tokens=st.lists(st.integers(0, 5), min_size=batch, max_size=batch),
            temperature=st.lists(st.sampled_from(temperatures), min_size=batch, max_size=batch),
            top_k=st.lists(st.integers(0, 6), min_size=batch, max_size=batch),
            is_drawn=st.lists(st.booleans(), min_size=batch, max_size=batch),
            seed=st.integers(0, 10_000),
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize("temperatures", [[0.0], [0.0, 0.5, 1.3]], ids=str)
@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_verification_equals_the_loop(temperatures: list[float], data: st.DataObject) -> None:
    """Greedy rows among sampled ones, rows without drafts, argmax drafts among drawn ones."""
    case = data.draw(ragged(temperatures))
    case.q = case.q if any(temperatures) else None
    assert case.run() == case.reference()


@pytest.mark.slow
@settings(deadline=None, max_examples=100)
@given(ragged([0.0, 0.5, 1.3]))
def test_neighbours_with_drawn_drafts_change_nothing(case: Ragged) -> None:
    found = case.run()
    case.q = None
    plain = case.run()
    assert all(a == b or drawn for a, b, drawn in zip(found, plain, case.is_drawn))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_columns_past_the_drafts_are_ignored(temperature: float) -> None:
    case = Ragged([0, 1, 4, 2], [temperature] * 4, [0] * 4, [temperature > 0] * 4, seed=5)
    expected = case.run()
    for b, k in enumerate(case.num_draft_tokens):
        case.drafts[b, k:] = 10**9
        if case.q is not None:
            case.q[b, k:] = 0
    assert case.run() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_logits(dtype: torch.dtype) -> None:
    """The same decisions as on the same numbers in float64, but for rounding of the softmax."""
    case = Ragged([3] * 200, [0.0, 1.0] * 100, [0] * 200, [False] * 200, seed=9)
    case.logits = case.logits.to(dtype)
    found = case.run()
    wide = replace(case)
    wide.logits, wide.drafts, wide.q = case.logits.double(), case.drafts, case.q
    assert sum(a != b for a, b in zip(found, wide.run())) <= 1
