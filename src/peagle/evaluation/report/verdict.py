"""The head of the page: what was measured, and what came of it in two or three sentences."""

from __future__ import annotations

from dataclasses import dataclass

from peagle.evaluation.report.advice import advice_of
from peagle.evaluation.report.files import Results
from peagle.evaluation.report.series import (
    Cast,
    best_cells,
    conditions,
    depth_runs,
    depths_by_load,
    sets_of,
)
from peagle.evaluation.report.text import (
    day,
    depth,
    h,
    interval,
    joined,
    name_html,
    number,
    percent,
    rate,
    set_name,
    short,
    temperature,
    times,
)
from peagle.evaluation.report.tune_part import schedule_words
from peagle.results import Cell, Entry


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure that is worth large digits: what it is, itself, and under which conditions."""

    name: str
    value: str
    small: str


def head(results: Results, cast: Cast) -> str:
    """Title, facts, verdict and the large figures, as HTML."""
    sentences, figures = _verdict(results, cast)
    document = results.documents[0]
    facts = [day(max(d.provenance.created for d in results.documents))]
    if source := _source(results, cast):
        facts.insert(0, f"head {short(source)}")
    facts.append(str(document.provenance.environment.get("device") or ""))
    facts.append(document.provenance.dtype)
    listed = "".join(f"<li>{h(fact)}</li>" for fact in facts if fact)
    large = "".join(
        f"<div><dt>{h(f.name)}</dt><dd>{h(f.value)}<small>{h(f.small)}</small></dd></div>"
        for f in figures
    )
    large = f'<dl class="figures">{large}</dl>' if large else ""
    made_up = any(document.is_synthetic for document in results.documents)
    advice = "".join(
        f'<p class="advice"><strong>Advice:</strong> {h(one)}</p>' for one in advice_of(results)
    )
    banner = (
        '<p class="banner"><strong>Synthetic.</strong> Acceptance in this report is set, not '
        "measured.</p>"
    )
    return (
        '<header><p class="kicker">Speculative decoding report</p>'
        f'<h1>{h(short(document.provenance.target))}</h1><ul class="facts">{listed}</ul>'
        f"{banner if made_up else ''}"
        f'<p class="verdict">{" ".join(sentences)}</p>{advice}'
        f"{large}</header>"
    )


def title(results: Results, cast: Cast) -> str:
    """One line for the browser's tab."""
    document = results.documents[0]
    source = _source(results, cast)
    with_head = f" with {short(source)}" if source else ""
    when = day(max(d.provenance.created for d in results.documents))
    return f"{short(document.provenance.target)}{with_head}, {when}: peagle report"


def _source(results: Results, cast: Cast) -> str:
    items: list[Entry | Cell] = [*(results.acceptance.entries if results.acceptance else [])]
    items += results.throughput.cells if results.throughput else []
    own = (i.source for i in items if (i.method, i.engine) == cast.hero and i.source)
    return next(own, "")


def _verdict(results: Results, cast: Cast) -> tuple[list[str], list[Figure]]:
    sentences: list[str] = []
    figures: list[Figure] = []
    for part in (_acceptance, _speed, _depths):
        sentence, found = part(results, cast, bool(sentences))
        sentences += [sentence] if sentence else []
        figures += found
    if not sentences:
        sentences = ["No drafts were measured; the sections below have what there is."]
    return sentences, figures


def _acceptance(results: Results, cast: Cast, _: bool) -> tuple[str, list[Figure]]:
    if cast.hero is None or results.acceptance is None:
        return "", []
    found = [(c, c.deepest(cast.hero)) for c in conditions(results.acceptance.entries)]
    condition, entry = next(((c, own) for c, own in found if own is not None), (None, None))
    if condition is None or entry is None:
        return "", []
    length, low_high = entry.pooled.length, entry.pooled.acceptance_length_ci
    template = results.acceptance.settings.get("chat_template")
    said = [depth(entry.k), temperature(entry.temperature), results.acceptance.provenance.dtype]
    if isinstance(template, bool):
        said.append("chat template" if template else "no chat template")
    said.append(" and ".join(filter(None, [joined([set_name(n) for n in entry.by_set] or [""])])))
    under = ", ".join(filter(None, said))
    sentence = f"{name_html(cast.name_of(entry))} has an acceptance length of "
    sentence += f"<strong>{number(length)}</strong> ({h(under)})"
    rival = next((e for e in condition.deepest_of_all(cast) if e.method == "eagle3"), None)
    if rival is not None and rival is not entry and length and rival.pooled.length:
        ratio = times(length / rival.pooled.length)
        sentence += f", {ratio} that of {name_html('EAGLE-3')} "
        sentence += f"({number(rival.pooled.length)}, {depth(rival.k)})"
    small = f"{depth(entry.k)}, {temperature(entry.temperature)}"
    small += f"; 95% {interval(low_high)}" if low_high else ""
    return sentence + ".", [Figure("Acceptance length", number(length), small)]


def _speed(results: Results, cast: Cast, is_named: bool) -> tuple[str, list[Figure]]:
    if results.throughput is None or not results.throughput.cells or cast.hero is None:
        return "", []
    cells = results.throughput.cells
    name = sets_of(cells)[0]
    best = best_cells(cells, cast.hero, name)
    if not best:
        return "", []
    first, last = best[0], best[-1]
    load = "one request" if first.concurrency == 1 else f"{first.concurrency} requests"
    per_second = rate(first.median.output_tokens_per_s)
    who = "it" if is_named else name_html(cast.name(cast.hero))
    sentence = (
        f"With {load} in flight {who} writes <strong>{per_second} tokens/s</strong> on "
        f"{h(set_name(name))} ({h(depth(first.k))})"
    ).replace(" ()", "")
    small = f"{load} in flight, {set_name(name)}"
    figures = [Figure("Tokens per second", per_second, small)]
    if first.speed_up_over_plain is not None:
        sentence += f", <strong>{times(first.speed_up_over_plain)}</strong> plain decoding"
        small = f"{load} in flight, {depth(first.k)}".removesuffix(", ")
        if last is not first and last.speed_up_over_plain is not None:
            small += f"; {times(last.speed_up_over_plain)} at {last.concurrency}"
        figures.insert(0, Figure("Over plain decoding", times(first.speed_up_over_plain), small))
    rival = [c for c in cells if c.method == "eagle3" and c.concurrency == first.concurrency]
    rival = [c for c in rival if c.set == name and c.engine == first.engine]
    if rival and first.method != "eagle3":
        fastest = max(c.median.output_tokens_per_s for c in rival)
        if fastest:
            over = first.median.output_tokens_per_s / fastest
            sentence += f" and {times(over)} {name_html('EAGLE-3')} at its best K"
    return sentence + ".", figures


def _depths(results: Results, cast: Cast, is_named: bool) -> tuple[str, list[Figure]]:
    """Best K by load, of the bench, else of the schedule."""
    cells = results.throughput.cells if results.throughput else []
    best = best_cells(cells, cast.hero, sets_of(cells)[0]) if cells and cast.hero else []
    runs = depth_runs(best)
    several = len({c.k for c in cells if (c.method, c.engine) == cast.hero}) > 1
    if runs and several:
        hero = name_html(cast.name(cast.hero)) if cast.hero else ""
        whose = "Its best K" if is_named else f"The best K of {hero}"
        sentence = f"{whose} is {depths_by_load(best)} together."
        if len(runs) == 1:
            sentence = f"{whose} is <strong>{runs[0][0]}</strong> at every load measured."
        value = " → ".join(str(k) for k, _ in runs)
        loads = f"from {best[0].concurrency} to {best[-1].concurrency} requests in flight"
        return sentence, [Figure("Best K by load", value, loads)]
    if results.tune is None or not results.tune.schedule:
        return "", []
    schedule = results.tune.schedule
    value = " → ".join(str(k) for *_, k in schedule)
    small = f"schedule for {schedule[0][0]} to {schedule[-1][1]} sequences"
    share = results.tune.check.share
    small += f"; {percent(share)} predicted within 10%" if share is not None else ""
    sentence = f"The schedule for this machine: {h(schedule_words(schedule))}."
    return sentence, [Figure("K by load", value, small)]
