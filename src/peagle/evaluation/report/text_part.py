"""The sections that show texts: outputs with accepted drafts marked, and where drafts fail."""

from __future__ import annotations

from itertools import groupby

from peagle.evaluation.report.html import fold, section
from peagle.evaluation.report.series import Cast, conditions
from peagle.evaluation.report.text import (
    LONGEST_TEXT,
    cut,
    depth,
    h,
    number,
    set_name,
    temperature,
)
from peagle.results import AcceptanceResults, Entry, HardText, OutputSample

_MOST_SAMPLES = 3
_MOST_HARD = 8


def _entries(file: AcceptanceResults, cast: Cast) -> list[Entry]:
    """Each method at the lowest temperature and its largest K, the report's head first."""
    found = conditions(file.entries)
    return found[0].deepest_of_all(cast)[::-1] if found else []


def _name(entry: Entry, cast: Cast) -> str:
    return f"{cast.name_of(entry)}, {depth(entry.k)}, {temperature(entry.temperature)}"


def _title(item: OutputSample | HardText) -> str:
    """Prompt set and id; the id alone where it begins with the set's name."""
    name = set_name(item.set) if item.set else ""
    parts = [item.id] if name and item.id.lower().startswith(name.lower()) else [name, item.id]
    return " · ".join(filter(None, parts)) or "Output"


# ---- outputs --------------------------------------------------------------------------------


def samples_section(file: AcceptanceResults, cast: Cast) -> str:
    """Outputs in which accepted drafts are marked; empty without any."""
    entries = [entry for entry in _entries(file, cast) if entry.samples]
    if not entries:
        return ""
    first, *others = entries
    legend = (
        '<ul class="legend"><li><span class="accepted">underlined</span> accepted draft tokens</li>'
        '<li><span class="target">plain</span> tokens of the target itself</li></ul>'
    )
    parts = [legend, _samples(first, cast)]
    parts += [fold(_name(entry, cast), _samples(entry, cast)) for entry in others]
    say = f"Who wrote what, with {h(_name(first, cast))}. Each gap between underlines is a step of "
    say += "the target; the longer the underlined runs, the fewer steps."
    return section("samples", "Sample outputs", *parts, say=say)


def _samples(entry: Entry, cast: Cast) -> str:
    return "".join(_sample(sample, entry, cast) for sample in entry.samples[:_MOST_SAMPLES])


def _sample(sample: OutputSample, entry: Entry, cast: Cast) -> str:
    title = _title(sample)
    parts, left = [], LONGEST_TEXT
    for kind, group in groupby(sample.pieces, key=lambda piece: piece[1]):
        if left <= 0:
            break
        tokens = []
        for text, _ in group:
            tokens.append(cut(text, left))
            left -= len(text)
            if left <= 0:
                break
        if kind == "accepted":
            parts += [f'<span class="accepted">{h(token)}</span>' for token in tokens]
        else:
            parts.append(h("".join(tokens)))
    name = h(f"{title}, {cast.name_of(entry)}")
    tail = sample.prompt_tail.lstrip("\n")
    before = f'<span class="before">{h(cut(tail))}</span>' if tail else ""
    small = f"acceptance length {number(sample.acceptance_length)}"
    return (
        f'<figure class="sample"><figcaption>{h(title)}<small>{small}</small>'
        f'</figcaption><div class="text" role="region" tabindex="0" aria-label="{name}">'
        f"{before}{''.join(parts)}</div></figure>"
    )


# ---- where drafts fail ----------------------------------------------------------------------


def hardest_section(file: AcceptanceResults, cast: Cast) -> str:
    """Stretches of text where few drafts were accepted; empty without any."""
    entries = [entry for entry in _entries(file, cast) if entry.hardest]
    if not entries:
        return ""
    first, *others = entries
    parts = [_hard_ones(first, cast)]
    parts += [fold(_name(entry, cast), _hard_ones(entry, cast)) for entry in others]
    say = f"Where {h(_name(first, cast))}, accepts least: the stretch in bold behind the bar, with "
    say += "the text before it. More such text in training is what would help."
    return section("hardest", "Hardest texts", *parts, say=say)


def _hard_ones(entry: Entry, cast: Cast) -> str:
    return "".join(_hard(item, entry, cast) for item in entry.hardest[:_MOST_HARD])


def _hard(item: HardText, entry: Entry, cast: Cast) -> str:
    title = _title(item)
    small = f"acceptance length {number(item.acceptance_length)} over {item.num_drafts:,} drafts"
    before = item.text_before[-600:]
    name = h(f"{title}, {cast.name_of(entry)}, hard text")
    return (
        f'<figure class="sample"><figcaption>{h(title)}<small>{small}</small></figcaption>'
        f'<div class="text" role="region" tabindex="0" aria-label="{name}">'
        f'<span class="before">{h(before)}</span><span class="missed">{h(cut(item.text, 2000))}'
        "</span></div></figure>"
    )
