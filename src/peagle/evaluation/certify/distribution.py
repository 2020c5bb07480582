"""Pearson's test of sampled outputs against the target's distribution of the first tokens.

The exact joint distribution of the first tokens is computed from transformers' logits, as far as it
has mass: a cell is a whole beginning, or a beginning with any other continuation. Cells with fewer
expected outputs than MIN_EXPECTED are pooled. X2 = sum((O - E)^2 / E) over the cells is then
compared with the chi-square distribution of cells - 1 degrees of freedom.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

MIN_EXPECTED = 10
POWER = 0.9
_NO_MASS = 1e-12

Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fit:
    """The result of a test of samples against a distribution; see `peagle.results.SampledTest`."""

    num_samples: int
    num_cells: int
    statistic: float | None
    p_value: float
    detectable_shift: float


def joint_cells(
    next_probs: Callable[[list[Tokens]], Tensor], num_tokens: int, least: float
) -> dict[Tokens, float]:
    """Return a partition of all outputs by their first tokens, with exact probabilities.

    An output belongs to the longest key that it begins with. The longest keys have `num_tokens`
    tokens, and a key is made longer where its probability stays at least `least`. `next_probs`
    gives p(next token | beginning) of beginnings of one length, [B, V].
    """
    cells: dict[Tokens, float] = {}
    beginnings: dict[Tokens, float] = {(): 1.0}
    for _ in range(num_tokens):
        if not beginnings:
            break
        probs_BV = next_probs(list(beginnings))
        longer: dict[Tokens, float] = {}
        for (begin, mass), probs_V in zip(beginnings.items(), probs_BV, strict=True):
            joint_V = mass * probs_V
            kept = torch.nonzero(joint_V >= least).flatten()
            longer |= {(*begin, int(token)): float(joint_V[token]) for token in kept}
            cells[begin] = max(0.0, mass - float(joint_V[kept].sum()))
        beginnings = longer
    return cells | beginnings


def cell_of(cells: Mapping[Tokens, float], output: Sequence[int], num_tokens: int) -> Tokens:
    """Return the cell of an output: the longest key that it begins with."""
    begin = tuple(output[:num_tokens])
    while begin not in cells:
        begin = begin[:-1]
    return begin


def fit(
    cells: Mapping[Tokens, float],
    outputs: Iterable[Sequence[int]],
    num_tokens: int,
    significance: float,
) -> Fit:
    """Compare outputs of at least `num_tokens` tokens with the target's distribution.

    `cells` come from `joint_cells`; p-values below `significance` are faults.
    """
    observed = Counter(cell_of(cells, output, num_tokens) for output in outputs)
    total = observed.total()
    masses = {cell: mass for cell, mass in cells.items() if mass >= _NO_MASS}
    # Cells of at least MIN_EXPECTED outputs stand alone, smaller ones together.
    ranked = sorted(masses, key=lambda cell: masses[cell], reverse=True)
    groups = [[cell] for cell in ranked if total * masses[cell] >= MIN_EXPECTED]
    small = ranked[len(groups) :]
    while small and groups and total * sum(masses[cell] for cell in small) < MIN_EXPECTED:
        small = [*groups.pop(), *small]
    groups += [small] if small else []
    expected = [sum(masses[cell] for cell in group) for group in groups]
    shift = detectable_shift(expected, total, significance)
    if any(cell not in masses for cell in observed):
        return Fit(total, len(groups), None, 0.0, shift)
    statistic = sum(
        (sum(observed[cell] for cell in group) - total * mass) ** 2 / (total * mass)
        for group, mass in zip(groups, expected)
    )
    return Fit(total, len(groups), statistic, chi_square_tail(statistic, len(groups) - 1), shift)


def chi_square_tail(statistic: float, degrees: int) -> float:
    """Return P(X >= statistic) of the chi-square distribution; 1 without a degree of freedom."""
    if degrees < 1:
        return 1.0
    half = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def detectable_shift(masses: Sequence[float], total: int, significance: float) -> float:
    """Return the mass d that is found with POWER when it moves between the two likeliest cells.

    X2 then has the noncentrality n d^2 (1/p + 1/q); a normal distribution of the same mean and
    variance approximates it. The result is 1 where no shift can be found.
    """
    degrees = len(masses) - 1
    if degrees < 1:
        return 1.0
    limit = _bisect(lambda x: chi_square_tail(x, degrees) < significance, 0, 20.0 * degrees + 1e3)
    reach = NormalDist().inv_cdf(POWER)

    def found(noncentrality: float) -> bool:
        spread = math.sqrt(2 * (degrees + 2 * noncentrality))
        return degrees + noncentrality - reach * spread > limit

    needed = _bisect(found, 0, 100.0 * limit)
    first, second = sorted(masses, reverse=True)[:2]
    return min(1.0, math.sqrt(needed / (total * (1 / first + 1 / second))))


def _bisect(is_enough: Callable[[float], bool], low: float, high: float) -> float:
    """Return the least number between `low` and `high` that is enough."""
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high
