"""Which cells are measured, which of them are fitted, in what order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import log2

from peagle.errors import UserError
from peagle.evaluation.tuning.machine import CostPoint


@dataclass(frozen=True, slots=True)
class Grid:
    """The cells of a cost table: every batch size at every K and at K = 0.

    Attributes:
        batches: ascending, each once.
        ks: draft tokens per step, ascending, each once; K = 0 comes by itself.

    Raises:
        UserError: a list is empty, not ascending, or has a number below 1.
    """

    batches: tuple[int, ...]
    ks: tuple[int, ...]

    def __post_init__(self) -> None:
        for name, numbers in (("--batch-sizes", self.batches), ("-k", self.ks)):
            if not numbers or list(numbers) != sorted(set(numbers)) or numbers[0] < 1:
                raise UserError(
                    f"{name} is {', '.join(map(str, numbers)) or 'empty'}; expected ascending "
                    "whole numbers of at least 1."
                )

    @property
    def cells(self) -> list[CostPoint]:
        """All of them, K = 0 first."""
        return [CostPoint(batch, k) for k in (0, *self.ks) for batch in self.batches]

    @property
    def fitted(self) -> frozenset[CostPoint]:
        """Those that the checked model is fitted to; the others are its check.

        Every second batch size and the largest; K = 0, the smallest, the largest and one between:
        near a power of two less one, so that cells of unlike batch sizes share their token counts,
        and what a sequence costs is told apart from what a token costs.
        """
        batches = {*self.batches[::2], self.batches[-1]}
        first, last = self.ks[0], self.ks[-1]
        middle = 2 ** round(log2((last + 1) / 2))
        between = min(self.ks[1:-1] or self.ks, key=lambda k: (abs(k + 1 - middle), k))
        return frozenset(CostPoint(b, k) for b in batches for k in {0, first, between, last})

    def visits(self, rounds: int, *, interleave_k: bool) -> Iterator[tuple[int, CostPoint]]:
        """(round, cell) in the order of measurement.

        All cells take turns, beginning with another one in each round, so that a slow spell hits
        all of them and not one. Where a change of K is dear, batch sizes alone take turns.
        """
        groups = [self.cells] if interleave_k else _by_k(self.cells)
        for cells in groups:
            for number in range(rounds):
                shift = number * len(cells) // rounds
                yield from ((number, cell) for cell in [*cells[shift:], *cells[:shift]])


def _by_k(cells: Sequence[CostPoint]) -> list[list[CostPoint]]:
    ks = dict.fromkeys(cell.k for cell in cells)
    return [[cell for cell in cells if cell.k == k] for k in ks]
