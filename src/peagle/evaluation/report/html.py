"""Pieces of the page: sections, figures, legends, tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from peagle.evaluation.report.svg import marker
from peagle.evaluation.report.text import h

NARROW = 344.0
WIDE = 520.0


def section(name: str, title: str, *parts: str, say: str = "") -> str:
    """A part of the page that the contents link to. `say` is HTML, one or two sentences."""
    said = f'<p class="say">{say}</p>' if say else ""
    return (
        f'<section id="{name}" aria-labelledby="{name}-title">'
        f'<h2 id="{name}-title">{h(title)}</h2>{said}{"".join(parts)}</section>\n'
    )


def figure(title: str, chart: str, small: str = "") -> str:
    """A chart with its title."""
    note = f"<small>{h(small)}</small>" if small else ""
    return f"<figure><figcaption>{h(title)}{note}</figcaption>{chart}</figure>"


def panels(figures: Sequence[str]) -> str:
    """Figures beside each other: three in a row on a desk, or two where that leaves none over."""
    two = " two" if len(figures) in (2, 4) else ""
    return f'<div class="panels{two}">{"".join(figures)}</div>'


def both(draw: Callable[[float, bool], str]) -> str:
    """A chart for a desk and one for a phone: draw(width, names at the lines)."""
    wide, narrow = draw(WIDE, True), draw(NARROW, False)
    return f'<div class="wide">{wide}</div><div class="narrow">{narrow}</div>'


def legend(series: Iterable[tuple[int, str]], note: str = "", *, narrow: bool = False) -> str:
    """Names of the styles. `narrow`: only where the lines have no room for their names."""
    items = "".join(
        '<li><svg class="chart key" aria-hidden="true" width="34" height="14" viewBox="0 0 34 14">'
        f'<path class="curve s{style}" d="M1 7H33"/>{marker(style, 17, 7)}</svg>{h(name)}</li>'
        for style, name in series
    )
    extra = f'<p class="note">{h(note)}</p>' if note else ""
    return f'<ul class="legend{" narrow" if narrow else ""}">{items}</ul>{extra}'


def table(
    caption: str,
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    texts: int = 1,
    sortable: bool = True,
) -> str:
    """A table that scrolls sideways by itself.

    Args:
        caption: says what it shows.
        header, rows: texts, escaped here. The first cell of a row is its heading.
        texts: how many of the first columns are words.
        sortable: a click on a heading sorts.
    """
    sides = [' class="left"' if i < texts else "" for i in range(len(header))]
    head = "".join(
        f'<th scope="col"{side}>{h(name)}</th>' for name, side in zip(header, sides, strict=True)
    )
    body = []
    for row in rows:
        first = f'<th scope="row">{h(row[0])}</th>'
        rest = "".join(
            f"<td{side}>{h(cell)}</td>" for cell, side in zip(row[1:], sides[1:], strict=True)
        )
        body.append(f"<tr>{first}{rest}</tr>")
    kind = ' class="sortable"' if sortable and len(body) > 2 else ""
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{h(caption)}">'
        f"<table{kind}><caption><span>{h(caption)}</span></caption><thead><tr>{head}</tr></thead>"
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def fold(summary: str, *parts: str) -> str:
    """Parts behind a line that opens them."""
    return f"<details><summary>{h(summary)}</summary>{''.join(parts)}</details>"
