"""Synthetic acceptance in the speculative configuration."""

from __future__ import annotations

import json
from typing import Any

import pytest

from peagle import SpeculativeConfig
from peagle.config import speculative_keys
from peagle.errors import UserError

HEAD = {"method": "eagle3", "model": "head", "num_speculative_tokens": 3}
RATES = [0.7, 0.5, 0.5]


@pytest.mark.parametrize("method", [{}, {"rejection_sample_method": "synthetic"}], ids=str)
def test_rates_with_and_without_the_method(method: dict[str, str]) -> None:
    keys = {**HEAD, **method, "synthetic_acceptance_rates": RATES}
    for form in (keys, json.dumps(keys)):
        config = SpeculativeConfig.parse(form)
        assert config == SpeculativeConfig(**{**HEAD, "synthetic_acceptance_rates": RATES})
        assert config.synthetic_acceptance_rates == (0.7, 0.5, 0.5)
        assert isinstance(hash(config), int)
    assert speculative_keys(keys) == {**HEAD, "synthetic_acceptance_rates": RATES}


def test_acceptance_is_real_by_default() -> None:
    for keys in ({}, {"rejection_sample_method": None, "synthetic_acceptance_rates": None}):
        assert SpeculativeConfig.parse({**HEAD, **keys}).synthetic_acceptance_rates is None


@pytest.mark.parametrize("rates", [[1, 1, 0], (1.0, 1.0, 0.0), [1e-9, 0, 0], [0, 0, 0]], ids=str)
def test_the_ends_of_the_range(rates: Any) -> None:
    found = SpeculativeConfig.parse({**HEAD, "synthetic_acceptance_rates": rates})
    assert found.synthetic_acceptance_rates == tuple(rates)
    assert all(type(rate) is float for rate in found.synthetic_acceptance_rates or ())


def test_prompt_lookup_takes_them_too() -> None:
    config = SpeculativeConfig(
        method="ngram", num_speculative_tokens=1, synthetic_acceptance_rates=(0.5,)
    )
    assert config.synthetic_acceptance_rates == (0.5,)


THREE = "expected a list of 3 numbers, one for each of num_speculative_tokens. Rate i is"
RANGE = "expected probabilities from 0 to 1. Rate i is the probability that at least the first i"
ORDER = "expected no rate above the one before it. Rate i is"


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ([0.7, 0.5], THREE),
        ([0.7, 0.5, 0.3, 0.1], THREE),
        ([], THREE),
        (0.7, THREE),
        ("0.7", THREE),
        ({"1": 0.7}, THREE),
        ([0.7, 0.5, -0.1], RANGE),
        ([1.1, 0.5, 0.1], RANGE),
        ([0.7, 0.5, True], RANGE),
        ([0.7, 0.5, "0.1"], RANGE),
        ([0.7, 0.5, None], RANGE),
        ([float("nan"), 0.5, 0.1], RANGE),
        ([0.5, 0.7, 0.1], ORDER),
        ([0.5, 0.0, 1e-9], ORDER),
    ],
    ids=str,
)
def test_rates_that_are_refused(rates: Any, expected: str) -> None:
    with pytest.raises(UserError) as caught:
        SpeculativeConfig.parse({**HEAD, "synthetic_acceptance_rates": rates})
    assert str(caught.value).startswith(f"synthetic_acceptance_rates is {rates!r}; {expected}")


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (
            {"rejection_sample_method": "synthetic"},
            "rejection_sample_method is 'synthetic', without synthetic_acceptance_rates; expected "
            "one rate for each of num_speculative_tokens",
        ),
        (
            {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": None},
            "rejection_sample_method is 'synthetic', without synthetic_acceptance_rates",
        ),
        (
            {"rejection_sample_method": "standard", "synthetic_acceptance_rates": RATES},
            "rejection_sample_method 'standard' and synthetic_acceptance_rates [0.7, 0.5, 0.5] "
            "contradict each other",
        ),
        (
            {"rejection_sample_method": "block"},
            'rejection_sample_method is \'block\'; expected "standard" or "synthetic".',
        ),
        ({"rejection_sample_method": ["synthetic"]}, "rejection_sample_method is ['synthetic']"),
    ],
    ids=str,
)
def test_methods_that_are_refused(keys: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError) as caught:
        SpeculativeConfig.parse({**HEAD, **keys})
    assert expected in str(caught.value)
