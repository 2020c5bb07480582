"""Methods on the same prompts, compared request by request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from peagle.evaluation.decoding_methods import NGRAM
from peagle.evaluation.intervals import Counts, paired_difference
from peagle.results import Comparison, Entry

# Places of the numerator and the denominator in an entry's "by_conversation". Prompt lookup does
# not draft at every step, so that with it only tokens per step compare.
_MEASURES = {"acceptance_length": (1, 0), "tokens_per_step": (1, 2)}


def compare_entries(entries: Sequence[Entry], *, seed: int = 0) -> list[Comparison]:
    """Compare the first head of some entries with every other method, at equal K and temperature.

    `difference` is the acceptance length of "method" less that of "over" (tokens per step, where
    one of them is prompt lookup), and `ci` its 95% interval, paired over requests; null below 5 of
    them. Entries that tell nothing of single requests are left out.

    Args:
        entries: of acceptance.json, those of the head that is judged first.
        seed: of the intervals.
    """
    known = [entry for entry in entries if entry.by_conversation]
    first = next((entry for entry in known if entry.method != NGRAM), None)
    if first is None:
        return []
    return [
        _compare(one, other, seed)
        for one in known
        for other in known
        if one.method == first.method != other.method and _condition(one) == _condition(other)
    ]


def _condition(entry: Entry) -> tuple[int, float, str]:
    return entry.k, entry.temperature, entry.engine


def _compare(one: Entry, other: Entry, seed: int) -> Comparison:
    measure = "tokens_per_step" if other.method == NGRAM else "acceptance_length"
    ours, theirs = one.by_conversation, other.by_conversation
    shared = sorted(name for name in ours if name in theirs)
    pairs = [_ratios(counts, shared, measure) for counts in (ours, theirs)]
    difference, interval = paired_difference(*pairs, seed=seed)
    return Comparison(
        method=one.method,
        over=other.method,
        k=one.k,
        temperature=one.temperature,
        engine=one.engine,
        measure=measure,
        difference=difference if np.isfinite(difference) else 0.0,
        ci=interval,
        num_requests=len(shared),
    )


def _ratios(counts: Mapping[str, Sequence[int]], names: Sequence[str], measure: str) -> Counts:
    """Numerator and denominator of each conversation, [N, 2]."""
    above, below = _MEASURES[measure]
    rows = [(counts[name][above], counts[name][below]) for name in names]
    return np.array(rows, dtype=np.int64).reshape(len(rows), 2)
