"""Pearson's test on sampled beginnings, against enumeration, scipy and simulation."""

import itertools
import math
from collections import defaultdict
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from peagle.evaluation.certify.distribution import (
    POWER,
    Tokens,
    cell_of,
    chi_square_tail,
    detectable_shift,
    fit,
    joint_cells,
)

NUM_TOKENS = 3


class Chain:
    """p(next | beginning) of a toy language, each beginning with a distribution of its own."""

    def __init__(self, vocab_size: int, seed: int, zeros: bool = False) -> None:
        self.size, self.seed, self.zeros = vocab_size, seed, zeros

    def probs(self, beginning: Tokens) -> np.ndarray:
        dice = np.random.default_rng([self.seed, len(beginning), *beginning])
        weights = dice.gamma(0.4, size=self.size) + 1e-3
        if self.zeros:
            weights[dice.integers(self.size)] = 0
        return weights / weights.sum()

    def next_probs(self, beginnings: list[Tokens]) -> Tensor:
        return torch.tensor(np.stack([self.probs(one) for one in beginnings]))

    @cache  # noqa: B019 - chains are few and small
    def joint(self) -> dict[Tokens, float]:
        every = itertools.product(range(self.size), repeat=NUM_TOKENS)
        return {
            one: math.prod(float(self.probs(one[:i])[one[i]]) for i in range(NUM_TOKENS))
            for one in every
        }

    def sample(self, count: int, seed: int, shift: float = 0.0) -> list[Tokens]:
        """Outputs; a share `shift` of them becomes the likeliest from the second likeliest."""
        joint = self.joint()
        outputs = sorted(joint, key=lambda one: joint[one], reverse=True)
        mass = np.array([joint[one] for one in outputs])
        mass[0] -= shift
        mass[1] += shift
        drawn = np.random.default_rng(seed).choice(len(outputs), count, p=mass)
        return [outputs[i] for i in drawn]


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(2, 6),
    seed=st.integers(0, 1000),
    least=st.sampled_from([1e-9, 0.01, 0.05, 0.3, 2.0]),
    zeros=st.booleans(),
)
def test_cells_are_a_partition_with_the_right_masses(
    size: int, seed: int, least: float, zeros: bool
) -> None:
    chain = Chain(size, seed, zeros)
    cells = joint_cells(chain.next_probs, NUM_TOKENS, least)
    masses: defaultdict[Tokens, float] = defaultdict(float)
    for output, mass in chain.joint().items():
        masses[cell_of(cells, output, NUM_TOKENS)] += mass
    assert sum(cells.values()) == pytest.approx(1)
    for cell, mass in cells.items():
        assert mass == pytest.approx(masses[cell], abs=1e-9)
        assert len(cell) < NUM_TOKENS or mass >= least


@settings(max_examples=60, deadline=None)
@given(statistic=st.floats(0, 500), degrees=st.integers(1, 300))
def test_chi_square_tail(statistic: float, degrees: int) -> None:
    expected = float(stats.chi2.sf(statistic, degrees))
    assert chi_square_tail(statistic, degrees) == pytest.approx(expected, rel=1e-6, abs=1e-13)


def test_the_statistic_is_pearsons() -> None:
    cells: dict[Tokens, float] = {(0,): 0.5, (1,): 0.3, (2,): 0.19, (3,): 0.006, (): 0.004}
    outputs = [(0,)] * 480 + [(1,)] * 320 + [(2,)] * 185 + [(3,)] * 9 + [(7,)] * 6
    found = fit(cells, outputs, 1, 0.01)
    observed, expected = [480, 320, 185, 15], [500, 300, 190, 10]
    wanted = stats.chisquare(observed, expected)
    assert found.num_cells == 4 and found.num_samples == 1000
    assert found.statistic == pytest.approx(wanted.statistic)
    assert found.p_value == pytest.approx(wanted.pvalue)


def test_what_cannot_come_is_a_fault_however_seldom() -> None:
    cells: dict[Tokens, float] = {(0,): 0.5, (1,): 0.5, (): 0.0}
    fair = [(0,), (1,)] * 500
    assert fit(cells, fair, 1, 0.01).p_value == 1
    found = fit(cells, [*fair, (5,)], 1, 0.01)
    assert found.p_value == 0 and found.statistic is None


def test_nothing_to_tell_apart() -> None:
    assert fit({(0,): 1.0}, [(0,)] * 50, 1, 0.01).p_value == 1
    assert fit({(0,): 1.0}, [(0,)] * 50, 1, 0.01).detectable_shift == 1


@pytest.mark.slow
def test_p_values_are_even_and_a_planted_shift_is_found_as_often_as_stated() -> None:
    chain, count, runs, significance = Chain(6, 4), 1000, 200, 0.01
    cells = joint_cells(chain.next_probs, NUM_TOKENS, 10 / count)
    right = [fit(cells, chain.sample(count, i), NUM_TOKENS, significance) for i in range(runs)]
    # 200 even p-values: their greatest distance from a straight line is below 0.115 in 99%.
    assert stats.kstest([one.p_value for one in right], "uniform").statistic < 0.115
    shift = right[0].detectable_shift
    assert 0.03 < shift < 0.12
    found = [
        fit(cells, chain.sample(count, i, shift), NUM_TOKENS, significance).p_value < significance
        for i in range(runs)
    ]
    assert POWER - 0.09 < np.mean(found) <= 1


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), cells=st.integers(2, 40))
def test_more_samples_find_smaller_shifts(seed: int, cells: int) -> None:
    masses = np.random.default_rng(seed).dirichlet(np.ones(cells)).tolist()
    shifts = [detectable_shift(masses, total, 0.001) for total in (100, 1000, 10_000)]
    assert shifts == sorted(shifts, reverse=True)
    assert detectable_shift(masses, 1000, 1e-6) >= shifts[1]
