"""What a page is made of: sections of groups of charts, tables and texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from peagle.evaluation.report.charts import Chart

# The name of a macro of tables.html, and its argument.
Table = tuple[str, Any]


@dataclass(frozen=True, slots=True)
class Text:
    """A text in pieces, each "accepted", "target", "missed" or "before" (the text before)."""

    title: str
    label: str
    pieces: Sequence[tuple[str, str]]
    small: str = ""


@dataclass(frozen=True, slots=True)
class Group:
    """A part of a section.

    Attributes:
        fold: of a group that is folded, the line that opens it.
        heading, say: above its charts.
        charts, note: with one legend.
        data: tables, folded where there are charts.
        tables: tables that stay open.
        texts: outputs.
        facts: names and values.
        items: a list.
    """

    fold: str = ""
    heading: str = ""
    say: str = ""
    charts: Sequence[Chart] = ()
    note: str = ""
    data: Sequence[Table] = ()
    tables: Sequence[Table] = ()
    texts: Sequence[Text] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    items: Sequence[str] = ()

    @property
    def legend(self) -> list[tuple[int, str]]:
        """Style and name of each series of the charts."""
        return list(dict.fromkeys(one for chart in self.charts for one in chart.legend))


@dataclass(frozen=True, slots=True)
class Section:
    """A section that the contents link to; the template makes its sentences from `facts`."""

    name: str
    title: str
    link: str
    groups: Sequence[Group]
    facts: Mapping[str, Any] = field(default_factory=dict)
