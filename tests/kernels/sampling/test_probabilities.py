"""Sampling probabilities against a row-by-row Python reference, and drawing from weights."""

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from peagle.kernels.sampling.probabilities import probs_from_logits, sample_from_weights


def reference_row(
    logits: list[float], temperature: float, top_k: int, top_p: float
) -> tuple[list[float], float]:
    """Probabilities of one row, and how near the top-p cut came to falling elsewhere."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if temperature == 0:
        return [1.0 if i == order[0] else 0.0 for i in range(len(logits))], 1.0
    largest = logits[order[0]]
    weight = [math.exp((x - largest) / temperature) for x in logits]
    kept = order[:top_k] if top_k else order
    total = math.fsum(weight[i] for i in kept)
    margin = 1.0
    if top_p < 1:
        nucleus: list[int] = []
        for i in kept:
            before = math.fsum(weight[j] for j in nucleus) / total
            if nucleus:
                margin = min(margin, abs(before - top_p))
            if nucleus and before >= top_p:
                break
            nucleus.append(i)
        kept = nucleus
        total = math.fsum(weight[i] for i in kept)
    return [weight[i] / total if i in kept else 0.0 for i in range(len(logits))], margin


def probs(
    logits: list[list[float]],
    temperature: list[float],
    top_k: list[int],
    top_p: list[float],
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    return probs_from_logits(
        torch.tensor(logits, dtype=dtype),
        torch.tensor(temperature, dtype=torch.float64),
        torch.tensor(top_k),
        torch.tensor(top_p, dtype=torch.float64),
    )


def one(logits: list[float], temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> list:
    return probs([logits], [temperature], [top_k], [top_p])[0].tolist()


# Quarters make ties common.
rows = st.integers(1, 9).flatmap(
    lambda vocab: st.lists(
        st.tuples(
            st.lists(st.integers(-12, 12).map(lambda n: n / 4), min_size=vocab, max_size=vocab),
            st.sampled_from([0.0, 0.3, 1.0, 1.7]),
            st.integers(0, vocab + 2),
            st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.2, 1e-6]),
        ),
        min_size=1,
        max_size=5,
    )
)


@pytest.mark.slow
@settings(deadline=None, max_examples=300)
@given(rows)
def test_equals_the_reference(batch: list[tuple[list[float], float, int, float]]) -> None:
    logits, temperature, top_k, top_p = map(list, zip(*batch))
    expected = []
    for row in batch:
        values, margin = reference_row(*row)
        # Where a sum meets top_p to the last bits, rounding decides; both answers are right.
        assume(margin > 1e-9)
        expected.append(values)
    found = probs(logits, temperature, top_k, top_p)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))
    torch.testing.assert_close(found.sum(-1), torch.ones(len(batch), dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_row_is_the_same_alone_and_in_a_batch(dtype: torch.dtype) -> None:
    logits = torch.randn(8, 300, dtype=dtype, generator=torch.Generator().manual_seed(2)) * 3
    temperature = torch.tensor([0.0, 1.0, 0.7, 1.0, 1.5, 1.0, 0.0, 0.3])
    top_k = torch.tensor([0, 0, 0, 7, 50, 0, 3, 0])
    top_p = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.9, 0.8, 0.5, 1.0])
    together = probs_from_logits(logits, temperature, top_k, top_p)
    for i in range(8):
        row = slice(i, i + 1)
        alone = probs_from_logits(logits[row], temperature[row], top_k[row], top_p[row])
        assert torch.equal(together[row], alone), f"batch-mates changed row {i}"


def test_ties_keep_the_lowest_ids() -> None:
    assert one([1.0, 2.0, 2.0, 2.0], top_k=2) == [0, 0.5, 0.5, 0]
    assert one([1.0, 2.0, 2.0, 2.0], temperature=0) == [0, 1, 0, 0]
    assert one([0.0] * 4, top_p=0.4) == [0.5, 0.5, 0, 0]


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    logits = [math.log(p) for p in (0.125, 0.5, 0.25, 0.125)]
    kept = [[p > 0 for p in one(logits, top_p=p)] for p in (1e-9, 0.5, 0.501, 0.75, 0.751, 0.88)]
    assert kept == [
        [False, True, False, False],
        [False, True, False, False],
        [False, True, True, False],
        [False, True, True, False],
        [True, True, True, False],
        [True, True, True, True],
    ]


def test_top_p_of_one_keeps_every_token_whatever_rounding_does() -> None:
    # In float32 the sum of the larger probabilities is 1 already; the tail is still possible.
    logits_NV = torch.linspace(0, -25, 300).unsqueeze(0)
    assert float(logits_NV.softmax(-1).cumsum(-1)[0, 250]) == 1
    for top_k in (0, 299):
        found = probs_from_logits(logits_NV, torch.ones(1), torch.tensor([top_k]), torch.ones(1))
        assert int((found > 0).sum()) == (top_k or 300)


def test_masked_logits_have_probability_zero() -> None:
    found = one([0.0, -math.inf, 0.0, -math.inf], top_p=0.999, temperature=0.7)
    assert found == [0.5, 0, 0.5, 0]


@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1e-20, 1e20, 1e38, 1e300])
def test_extreme_temperatures_are_the_limits(temperature: float) -> None:
    found = probs_from_logits(
        torch.tensor([[50.0, 60.0, 60.0, -math.inf]]),
        torch.tensor([temperature]),
        torch.zeros(1, dtype=torch.int64),
        torch.ones(1),
    )
    expected = [0, 0.5, 0.5, 0] if temperature < 1 else [1 / 3, 1 / 3, 1 / 3, 0]
    if torch.tensor([temperature]).item() == 0:
        expected = [0, 1, 0, 0]
    assert found[0].tolist() == pytest.approx(expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_logits_give_float32_probabilities(dtype: torch.dtype) -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)).to(dtype)
    ones = torch.ones(3)
    found = probs_from_logits(logits, ones, torch.tensor([0, 10, 0]), ones)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found[0], torch.softmax(logits[0].float(), -1))


# ---- drawing ----

weight = st.sampled_from([0.0, 0.0, 5e-324, 1e-30, 0.1, 1 / 3, 1.0, 7.0]) | st.floats(0, 1)


@pytest.mark.slow
@settings(deadline=None, max_examples=300)
@given(
    st.lists(weight, min_size=1, max_size=8).filter(lambda w: math.fsum(w) > 0),
    st.sampled_from([0.0, 2.0**-53, 0.5, 1 - 2.0**-53]) | st.floats(0, 1, exclude_max=True),
)
def test_draws_by_inverse_cdf_and_never_a_zero(weights: list[float], u: float) -> None:
    index = int(
        sample_from_weights(
            torch.tensor([weights], dtype=torch.float64), torch.tensor([u], dtype=torch.float64)
        )
    )
    assert weights[index] > 0
    # weights before the index sum to at most u * total, with it to more (but for rounding)
    total, slack = math.fsum(weights), 1e-12 * math.fsum(weights) + 1e-300
    assert math.fsum(weights[:index]) <= u * total + slack
    assert math.fsum(weights[: index + 1]) >= u * total - slack


def test_the_ends_of_the_unit_interval() -> None:
    weights = torch.tensor([[0.0, 2.0, 0.0, 3.0, 0.0]]).expand(2, -1)
    u = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)
    assert sample_from_weights(weights, u).tolist() == [1, 3]
    # A total so small that u * total rounds up to it.
    tiny = torch.tensor([[0.0, 5e-324, 0.0]], dtype=torch.float64)
    assert sample_from_weights(tiny, u[1:]).tolist() == [1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_frequencies_match_the_weights(dtype: torch.dtype) -> None:
    count = 400_000
    weights = torch.tensor([3.0, 0.0, 0.01, 1.0, 0.0, 0.5, 2.49, 0.0], dtype=dtype)
    u = torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    drawn = np.bincount(
        sample_from_weights(weights.expand(count, -1), u).numpy(), minlength=len(weights)
    )
    kept = weights > 0
    assert drawn[~kept.numpy()].tolist() == [0, 0, 0]
    expected = (weights[kept].double() / weights.double().sum() * count).numpy()
    assert stats.chisquare(drawn[kept.numpy()], expected).pvalue > 1e-3
    # The same check sees a one-per-cent shift.
    moved = expected + np.array([-0.01, 0, 0, 0.01, 0]) * count
    assert stats.chisquare(drawn[kept.numpy()], moved).pvalue < 1e-9
