"""Who drafted the accepted tokens, where the text drafts beside a head."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

from peagle.evaluation.decoding_methods import NGRAM
from peagle.results import Cell, Entry, TunedTrees

Drafted = TypeVar("Drafted", Entry, Cell, TunedTrees)


def by_source(items: Iterable[Drafted]) -> Iterator[tuple[Drafted, str, list[float]]]:
    """Yield (item, source, P(token i accepted, and drafted by the source)) for head and text.

    Items without a head, or without drafts of the text, are left out. A token that both drafted is
    the head's.
    """
    for item in items:
        if isinstance(item, TunedTrees):
            figures = item
        else:
            figures = item.pooled if isinstance(item, Entry) else item.median
        has_head = isinstance(item, TunedTrees) or item.method != NGRAM
        if has_head and figures.text_per_pos:
            yield item, "head", figures.head_per_pos
            yield item, "text alone", figures.text_per_pos
