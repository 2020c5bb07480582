"""The report as one page that opens offline: it fetches nothing."""

import hashlib
import json
from base64 import b64encode
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from peagle.evaluation.report import charts, plots, series, text
from peagle.evaluation.report.advice import advice_of
from peagle.evaluation.report.files import Results
from peagle.evaluation.report.series import Cast, best_cells, conditions, series_of, sets_of
from peagle.evaluation.sources import by_source
from peagle.evaluation.tuning.schedule import k_at
from peagle.results import Document

_TEMPLATES = Path(__file__).parent / "templates"


def page_html(results: Results) -> str:
    """Return the whole page."""
    cast = Cast.of(results)
    style = (_TEMPLATES / "report.css").read_text(encoding="utf-8")
    script = (_TEMPLATES / "report.js").read_text(encoding="utf-8")
    documents = list(results.documents.values())
    file, sets = results.throughput, sets_of(results.cells)
    best = best_cells(results.cells, cast.hero, sets[0]) if sets else []
    return (
        _environment()
        .get_template("page.html")
        .render(
            style=Markup(style),
            script=Markup(script),
            style_digest=_digest(style),
            script_digest=_digest(script),
            results=results,
            documents=documents,
            target=text.short(results.first.provenance.target),
            source=hero_source(results),
            created=text.day(max(document.provenance.created for document in documents)),
            device=str(results.first.provenance.environment.get("device") or ""),
            dtype=results.first.provenance.dtype,
            is_synthetic=any(document.is_synthetic for document in documents),
            advice=advice_of(results),
            cast=cast,
            conditions=conditions(results.entries),
            sets=sets,
            best=[cell for cell in best if file is not None and file.is_sound(cell)],
            facts={name: _facts(document) for name, document in results.documents.items()},
            draws=charts.can_draw(),
            contents=[],
        )
    )


def hero_source(results: Results) -> str:
    """Return the source of the head that the report is about; "" for none."""
    every, hero = [*results.entries, *results.cells], Cast.of(results).hero
    found = next((one.source for one in every if series_of(one) == hero and one.source), "")
    return text.short(found)


def origin(results: Results) -> str:
    """Return target, head, hardware and day, which a picture needs to be understood alone."""
    provenance, source = results.first.provenance, hero_source(results)
    facts = [
        text.short(provenance.target),
        source and f"head {source}",
        str(provenance.environment.get("device") or ""),
    ]
    facts += [provenance.dtype, text.day(provenance.created)]
    facts.append("SYNTHETIC acceptance" if results.first.is_synthetic else "")
    return " · ".join(filter(None, facts))


def _facts(document: Document) -> dict[str, str]:
    """Return the command, settings, models and machine of a results file, in words."""
    provenance = document.provenance
    facts: dict[str, Any] = {"command": provenance.command, "created": provenance.created}
    facts |= document.settings
    facts |= {"target": provenance.target, "dtype": provenance.dtype}
    facts |= provenance.environment | (provenance.model_extra or {})
    return {key: words for key, value in facts.items() if (words := _words(value))}


def _words(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_words(inner) or '–'}" for key, inner in value.items())
    if isinstance(value, list):
        return ", ".join(map(_words, value))
    return value if isinstance(value, str) else json.dumps(value)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: value if isinstance(value, Markup) else text.visible(str(value)),
    )
    for name in (
        *("depth", "figure", "percent", "rate", "rates", "set_name", "times"),
        *("interval", "milliseconds", "count", "with_interval", "temperature", "listed", "cut"),
        *("schedule_words", "text_title", "shown_pieces", "money", "objective"),
    ):
        environment.filters[name] = getattr(text, name)
    environment.filters |= {"json": json.dumps, "attr_of": lambda value, name: value.get(name)}
    environment.tests["varies_in"] = lambda name, pivot: pivot.varies(name)
    environment.tests["is_dirty"] = lambda commit: commit.endswith("-dirty")
    environment.globals |= {"key": charts.key, "plots": plots, "series": series, "k_at": k_at}
    environment.filters["by_source"] = by_source
    return environment


def _digest(source: str) -> str:
    """Return the policy's permission for a script or style of exactly this text."""
    return f"'sha256-{b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"
