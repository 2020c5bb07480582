"""The end of the page: what to keep in mind, and where every number comes from."""

from __future__ import annotations

import json
from typing import Any

from peagle.evaluation.report.files import Results
from peagle.evaluation.report.html import section
from peagle.evaluation.report.series import Cast, best_cells, conditions, sets_of
from peagle.evaluation.report.text import h, number, percent, set_name
from peagle.evaluation.tuning.schedule import k_at
from peagle.results import ACCEPTANCE, THROUGHPUT, TUNE, Document

_FEW_REQUESTS = 20
_WIDE_SPREAD = 0.15
_COMMANDS = {ACCEPTANCE: "Acceptance", THROUGHPUT: "Throughput", TUNE: "Cost and schedule"}
_SAME = ("commit", "device", "torch")


def caveats_section(results: Results, cast: Cast, notes: list[str]) -> str:
    """What limits the numbers, found in them."""
    found = [*_of_acceptance(results, cast), *_of_throughput(results, cast)]
    found += [*_of_depths(results, cast), *_of_documents(results), *notes]
    if not found:
        return ""
    items = "".join(f"<li>{h(line)}</li>" for line in found)
    return section("caveats", "Keep in mind", f'<ul class="caveats">{items}</ul>')


def _of_acceptance(results: Results, cast: Cast) -> list[str]:
    if results.acceptance is None:
        return []
    found = []
    groups = conditions(results.acceptance.entries)
    for entry in groups[0].deepest_of_all(cast)[-1:] if groups else []:
        pooled = entry.pooled
        share = pooled.loop_share if pooled.loop_share is not None else entry.loop_share
        if share:
            said = f"{percent(share)} of the outputs fall into a loop, which is easy to draft"
            if pooled.acceptance_length_before_loop is not None:
                before = number(pooled.acceptance_length_before_loop)
                said += f": up to there the acceptance length is {before} "
                said += f"instead of {number(pooled.length)}"
            found.append(f"{said} ({cast.name_of(entry)}, K = {entry.depth}).")
        few = [set_name(n) for n, s in entry.by_set.items() if 0 < s.num_requests < _FEW_REQUESTS]
        if few:
            found.append(f"Fewer than {_FEW_REQUESTS} requests each: {', '.join(few)}.")
        if pooled.acceptance_length_ci is None:
            found.append("The backend tells no figures by request, so there are no intervals.")
    return found


def _of_throughput(results: Results, cast: Cast) -> list[str]:
    if results.throughput is None:
        return []
    cells = results.throughput.cells
    found = []
    if errors := sum(repeat.errors for cell in cells for repeat in cell.repeats):
        found.append(f"{errors:g} requests of the throughput runs failed.")
    if cells and all(len(cell.repeats) < 2 for cell in cells):
        found.append("Every cell was run once: spreads are unknown.")
    noisy = []
    for cell in cells:
        ends, middle = cell.spread.output_tokens_per_s, cell.median.output_tokens_per_s
        if ends and middle and (ends[1] - ends[0]) / middle > _WIDE_SPREAD:
            noisy.append((ends[1] - ends[0]) / middle)
    if noisy:
        found.append(
            f"In {len(noisy)} of {len(cells)} cells the repeats are more than "
            f"{100 * _WIDE_SPREAD:.0f}% apart, at most {percent(max(noisy))}."
        )
    if cast.many_engines:
        found.append("Engines differ: compare methods on one engine, and engines on one method.")
    return found


def _of_depths(results: Results, cast: Cast) -> list[str]:
    """Loads at which the schedule of tune has another K than the best one that bench measured."""
    if results.throughput is None or results.tune is None or not results.tune.schedule:
        return []
    schedule, cells = results.tune.schedule, results.throughput.cells
    if cast.hero is None or not cells:
        return []
    best = best_cells(cells, cast.hero, sets_of(cells)[0])
    return [
        f"At {cell.concurrency} together the best K that was measured is {cell.k}, and the "
        f"schedule, which is predicted, has {k}: take the measured one at that load."
        for cell in best
        if cell.k and cell.concurrency <= schedule[-1][1]
        if (k := k_at(schedule, cell.concurrency)) != cell.k
    ]


def _of_documents(results: Results) -> list[str]:
    found = []
    environments = [d.provenance.environment for d in results.documents]
    if any(document.is_synthetic for document in results.documents):
        found.append("Acceptance is synthetic: speeds are real, what heads accept is not.")
    for name in _SAME:
        values = list(dict.fromkeys(str(e[name]) for e in environments if e.get(name)))
        if len(values) > 1:
            found.append(f"The files differ in {name}: {', '.join(values)}.")
    targets = list(dict.fromkeys(d.provenance.target for d in results.documents))
    if len(targets) > 1:
        found.append(f"The files are of different targets: {', '.join(targets)}.")
    if any(str(e.get("commit") or "").endswith("-dirty") for e in environments):
        found.append("The code was changed after its commit (-dirty).")
    return found


# ---- provenance -----------------------------------------------------------------------------


def provenance_section(results: Results) -> str:
    """Command, versions, commit, hardware and settings of each file."""
    documents = {
        ACCEPTANCE: results.acceptance,
        THROUGHPUT: results.throughput,
        TUNE: results.tune,
    }
    facts = {name: _facts(document) for name, document in documents.items() if document}
    shared = _shared(list(facts.values()))
    parts = [
        _source(_COMMANDS[name], name, {k: v for k, v in own.items() if k not in shared})
        for name, own in facts.items()
    ]
    if shared:
        parts.append(_source("Shared by all", "", shared))
    return section("provenance", "Provenance", *parts)


def _facts(document: Document) -> dict[str, str]:
    """Everything that a file says of its making, in words."""
    provenance = document.provenance
    facts: dict[str, Any] = {"command": provenance.command, "created": provenance.created}
    facts |= document.settings
    facts |= {"target": provenance.target, "dtype": provenance.dtype}
    facts |= provenance.environment | (provenance.model_extra or {})
    return {key: said for key, value in facts.items() if (said := _said(value))}


def _shared(all_facts: list[dict[str, str]]) -> dict[str, str]:
    """What several files agree on."""
    if len(all_facts) < 2:
        return {}
    first, *others = all_facts
    own = ("command", "created")
    return {
        key: value
        for key, value in first.items()
        if key not in own and all(facts.get(key) == value for facts in others)
    }


def _source(title: str, file: str, facts: dict[str, str]) -> str:
    items = "".join(
        f"<dt>{h(key.replace('_', ' '))}</dt>"
        f"<dd>{f'<code>{h(value)}</code>' if key == 'command' else h(value)}</dd>"
        for key, value in facts.items()
    )
    small = f' <small class="note">{file}</small>' if file else ""
    return f'<h3 class="group">{title}{small}</h3><dl class="source">{items}</dl>'


def _said(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_said(inner) or '–'}" for key, inner in value.items())
    if isinstance(value, list):
        return ", ".join(map(_said, value))
    return value if isinstance(value, str) else json.dumps(value)
