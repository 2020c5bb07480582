"""The counter-based numbers: equal to SplitMix64 on Python ints, uniform, independent, pure."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from peagle.kernels.sampling.random import Purpose, derive_seed, uniform

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15
MAX_SEED = 2**63 - 1


def splitmix(state: int) -> int:
    """The output function of SplitMix64."""
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
    return state ^ (state >> 31)


def reference(seed: int, position: int, purpose: int) -> float:
    """Number (3 position + purpose + 1) of the SplitMix64 stream whose state is a mixed seed."""
    counter = 3 * position + purpose + 1
    bits = splitmix((splitmix((seed + GOLDEN) & MASK) + counter * GOLDEN) & MASK)
    return (bits >> 11) / 2**53


@given(st.integers(-MAX_SEED - 1, MAX_SEED), st.integers(-(2**40), 2**40))
def test_a_derived_seed_is_a_number_of_its_seed(seed: int, index: int) -> None:
    assert derive_seed(seed, index) == reference(seed, index, Purpose.SAMPLE) * 2**53


def numbers(seeds: Tensor | int, positions: Tensor | int, purpose: Purpose) -> Tensor:
    return uniform(torch.as_tensor(seeds), torch.as_tensor(positions), purpose)


def test_the_reference_is_splitmix64() -> None:
    # Published outputs of the generator started at 1234567, and its first one at 0.
    outputs = [splitmix((1234567 + i * GOLDEN) & MASK) for i in range(1, 4)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert splitmix(GOLDEN) == 0xE220A8397B1DCDAF


@given(
    seed=st.integers(0, MAX_SEED) | st.sampled_from([0, 1, 2**62, 2**63 - 1]),
    position=st.integers(0, 2**31) | st.integers(2**61, 2**62),
    purpose=st.sampled_from(Purpose),
)
def test_equals_the_reference(seed: int, position: int, purpose: Purpose) -> None:
    # Where 3 * position passes 64 bits both sides wrap around.
    expected = reference(seed, position, purpose)
    assert numbers(seed, position, purpose).item() == expected


def test_range_type_and_resolution() -> None:
    u = numbers(torch.arange(200_000), 3, Purpose.ACCEPT)
    assert u.dtype == torch.float64
    assert float(u.min()) >= 0
    assert float(u.max()) < 1
    scaled = u * 2**53
    assert torch.equal(scaled, scaled.round()), "53 bits"
    assert bool((scaled.long() % 2 == 1).any()), "the lowest bit is used"


def test_is_a_pure_function_of_its_arguments() -> None:
    seeds, positions = torch.arange(5).unsqueeze(1) * 991, torch.arange(7)
    state = torch.random.get_rng_state()
    table = numbers(seeds, positions, Purpose.SAMPLE)
    torch.rand(3)
    assert torch.equal(numbers(seeds, positions, Purpose.SAMPLE), table)
    torch.random.set_rng_state(state)
    after = torch.rand(3)
    torch.random.set_rng_state(state)
    numbers(seeds, positions, Purpose.SAMPLE)
    assert torch.equal(torch.rand(3), after), "torch's own generator is left alone"
    # What else is in the batch, and the order, are of no account.
    one_by_one = [[numbers(991 * s, p, Purpose.SAMPLE).item() for p in range(7)] for s in range(5)]
    assert table.tolist() == one_by_one
    assert torch.equal(numbers(seeds.flip(0), positions, Purpose.SAMPLE), table.flip(0))


COUNT = 200_000
SEQUENCES = {
    "positions of seed 0": lambda: numbers(0, torch.arange(COUNT), Purpose.ACCEPT),
    "positions of a large seed": lambda: numbers(MAX_SEED, torch.arange(COUNT), Purpose.DRAFT),
    "seeds at position 0": lambda: numbers(torch.arange(COUNT), 0, Purpose.SAMPLE),
    "seeds at position 1000": lambda: numbers(torch.arange(COUNT), 1000, Purpose.DRAFT),
    "seeds 2**20 apart": lambda: numbers(torch.arange(COUNT) * 2**20, 1, Purpose.ACCEPT),
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_uniform(name: str) -> None:
    u = SEQUENCES[name]().numpy()
    assert stats.kstest(u, "uniform").pvalue > 1e-3
    assert stats.chisquare(np.histogram(u, bins=256, range=(0, 1))[0]).pvalue > 1e-3
    # The low bits too: the fractional part of a large multiple.
    low = (u * 2**40) % 1
    assert stats.chisquare(np.histogram(low, bins=64, range=(0, 1))[0]).pvalue > 1e-3


def independence_pvalue(*columns: Tensor, bins: int = 12) -> float:
    """Chi-square of the joint histogram against all cells equal."""
    sample = torch.stack(columns, dim=1).numpy()
    counts = np.histogramdd(sample, bins=bins, range=[(0, 1)] * len(columns))[0]
    return float(stats.chisquare(counts.ravel()).pvalue)


def test_independent_between_purposes() -> None:
    seeds = torch.arange(COUNT)
    for position in (0, 5):
        columns = [numbers(seeds, position, purpose) for purpose in Purpose]
        for pair in itertools.combinations(columns, 2):
            assert independence_pvalue(*pair) > 1e-3
        assert independence_pvalue(*columns, bins=6) > 1e-3


@pytest.mark.slow
def test_independent_between_positions() -> None:
    seeds = torch.arange(COUNT)
    for purpose, later in itertools.product(Purpose, Purpose):
        # Neighbours are where a counter that overlaps between purposes would show.
        for distance in (1, 2, 3):
            pair = numbers(seeds, 4, purpose), numbers(seeds, 4 + distance, later)
            assert independence_pvalue(*pair) > 1e-4
    stream = numbers(7, torch.arange(COUNT + 2), Purpose.ACCEPT)
    assert independence_pvalue(stream[:-2], stream[1:-1], stream[2:], bins=6) > 1e-3


def test_independent_between_seeds() -> None:
    seeds = torch.arange(COUNT)
    for distance in (1, 2, 2**32):
        for shift in (0, 1):
            first = numbers(seeds, 4, Purpose.SAMPLE)
            second = numbers(seeds + distance, 4 - shift, Purpose.SAMPLE)
            assert independence_pvalue(first, second) > 1e-3


def test_the_independence_check_can_fail() -> None:
    seeds = torch.arange(COUNT)
    u = numbers(seeds, 0, Purpose.ACCEPT)
    assert independence_pvalue(u, u) < 1e-9
    other = numbers(seeds, 1, Purpose.ACCEPT)
    leaky = torch.where(seeds % 10 == 0, u, other)  # one pair in ten repeats its number
    assert independence_pvalue(u, leaky) < 1e-9


def test_no_number_is_used_for_two_decisions() -> None:
    positions = torch.arange(50_000)
    drawn = torch.stack([numbers(11, positions, purpose) for purpose in Purpose]).flatten()
    assert len(drawn.unique()) == len(drawn)
