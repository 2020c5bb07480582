"""Comparisons of decoding methods on the same requests."""

from collections.abc import Sequence

import numpy as np

from peagle.evaluation.decoding_methods import NGRAM
from peagle.intervals import paired_difference
from peagle.results import Comparison, Entry


def compare_entries(entries: Sequence[Entry], *, seed: int = 0) -> list[Comparison]:
    """Compare the first head of some entries with every other method, at equal K and temperature.

    `difference` is the acceptance length of "method" less that of "over", and `ci` its 95%
    interval, paired over requests. Prompt lookup does not draft at every step, so its comparison is
    by tokens per step. Entries without figures of single requests are left out.
    """
    known = [entry for entry in entries if entry.by_conversation]
    first = next((entry.method for entry in known if entry.method != NGRAM), None)
    return [
        _compare(one, other, seed)
        for one in known
        for other in known
        if one.method == first != other.method
        and (one.k, one.temperature, one.engine) == (other.k, other.temperature, other.engine)
    ]


def _compare(one: Entry, other: Entry, seed: int) -> Comparison:
    measure = "tokens_per_step" if other.method == NGRAM else "acceptance_length"
    # Conversations have [drafts, accepted draft tokens, decode steps].
    columns = [1, 2] if other.method == NGRAM else [1, 0]
    shared = sorted(one.by_conversation.keys() & other.by_conversation.keys())
    pairs = [
        np.array([entry.by_conversation[name] for name in shared], dtype=np.int64).reshape(-1, 3)[
            :, columns
        ]
        for entry in (one, other)
    ]
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
