"""Whether a head drafts one way of prompting better than another, at equal difficulty.

Texts differ between the ways, and some are easier for any head. So first drafts are compared at
equal confidence of the target: within bins of the probability that it gives its own token.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from peagle.doctor.forward import HeadDrafts
from peagle.doctor.probe import Probe
from peagle.doctor.questions import Style

_BINS = torch.tensor([0.3, 0.6, 0.9, 0.99])
# By so much must first drafts match more often, in so many standard errors, and the acceptance
# length be so many times higher, before the style is blamed.
_MIN_DIFFERENCE, _MIN_T, _MIN_RATIO = 0.1, 4.0, 1.15

Tried = tuple[Probe, HeadDrafts]


def better_style(now: Tried, others: Mapping[Style, Tried]) -> tuple[Style, str] | None:
    """The style that a head drafts clearly better than the one in use, with what shows it."""
    best: tuple[float, Style, str] | None = None
    for style, other in others.items():
        difference, error = matched_difference(other, now)
        ratio = other[1].acceptance_length / now[1].acceptance_length
        clear = difference >= _MIN_DIFFERENCE and difference >= _MIN_T * error
        if clear and ratio >= _MIN_RATIO and (best is None or difference > best[0]):
            text = (
                f"acceptance length {other[1].acceptance_length:.2f} against "
                f"{now[1].acceptance_length:.2f}; at equal confidence of the target first drafts "
                f"match {difference:+.0%} (standard error {error:.1%})"
            )
            best = (difference, style, text)
    return None if best is None else (best[1], best[2])


def matched_difference(one: Tried, other: Tried) -> tuple[float, float]:
    """How much more often first drafts match, at equal confidence, and the standard error.

    sum over bins of w_b * (match_b(one) - match_b(other)), with weights of both together; the error
    is that of means over prompts.
    """
    (ones, bins_one), (others, bins_other) = (_first_drafts(*tried) for tried in (one, other))
    difference = variance = 0.0
    total = bins_one.numel() + bins_other.numel()
    weights = 0.0
    for index in range(len(_BINS) + 1):
        in_one, in_other = bins_one == index, bins_other == index
        if min(int(in_one.sum()), int(in_other.sum())) < 8:
            continue
        weight = float(in_one.sum() + in_other.sum()) / total
        mean_one, error_one = _mean(ones, in_one)
        mean_other, error_other = _mean(others, in_other)
        difference += weight * (mean_one - mean_other)
        variance += weight**2 * (error_one**2 + error_other**2)
        weights += weight
    return (difference / weights, variance**0.5 / weights) if weights else (0.0, 1.0)


def _first_drafts(probe: Probe, drafted: HeadDrafts) -> tuple[Tensor, Tensor]:
    """Matches of first drafts, and the bin of the target's confidence there, both [P, C]."""
    confidence_PC = probe.confidence_PN.gather(1, probe.anchors_PC + 2).cpu()
    return drafted.matches[..., 0].double(), torch.bucketize(confidence_PC, _BINS)


def _mean(matches_PC: Tensor, chosen_PC: Tensor) -> tuple[float, float]:
    """Mean of the chosen, and its standard error with prompts as the units."""
    mean = float(matches_PC[chosen_PC].mean())
    rest_P = ((matches_PC - mean) * chosen_PC).sum(1)
    return mean, float(rest_P.square().sum().sqrt()) / float(chosen_PC.sum())
