"""The report as one page that opens anywhere: nothing in it is fetched."""

from __future__ import annotations

import hashlib
import json
from base64 import b64encode
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from peagle.evaluation.report import charts, text
from peagle.evaluation.report.acceptance_part import acceptance_sections, text_sections
from peagle.evaluation.report.advice import advice_of
from peagle.evaluation.report.charts import Chart
from peagle.evaluation.report.files import Results
from peagle.evaluation.report.parts import Group, Section
from peagle.evaluation.report.series import Cast, best_cells, conditions, k_runs, key_of, sets_of
from peagle.evaluation.report.text import (
    day,
    depth,
    interval,
    joined,
    number,
    percent,
    rate,
    set_name,
    short,
    temperature,
    times,
)
from peagle.evaluation.report.throughput_part import throughput_sections
from peagle.evaluation.report.tune_part import schedule_words, tune_section
from peagle.evaluation.tuning.schedule import k_at
from peagle.results import ACCEPTANCE, THROUGHPUT, TUNE, Cell, Document, Entry

_TEMPLATES = Path(__file__).parent / "templates"
_FEW_REQUESTS = 20
_WIDE_SPREAD = 0.15
_COMMANDS = {ACCEPTANCE: "Acceptance", THROUGHPUT: "Throughput", TUNE: "Cost and schedule"}

# A figure in large digits: what it is, itself, and under which conditions.
Figure = tuple[str, str, str]


class Page:
    """The page of some results.

    Attributes:
        sections: in the order of the page.
    """

    def __init__(self, results: Results) -> None:
        self._results = results
        self._cast = Cast.of(results)
        self.sections = list(self._sections())

    @property
    def origin(self) -> str:
        """Target, hardware and day, so that a picture alone says what it shows."""
        provenance = self._results.first.provenance
        facts = [short(provenance.target), str(provenance.environment.get("device") or "")]
        facts += [provenance.dtype, day(provenance.created)]
        facts.append("SYNTHETIC acceptance" if self._results.first.is_synthetic else "")
        return " · ".join(filter(None, facts))

    def charts_of(self, name: str) -> list[Chart]:
        """The charts that a section shows open."""
        found = [one for one in self.sections if one.name == name]
        return list(found[0].groups[0].charts) if found else []

    def html(self) -> str:
        """The whole page."""
        results = self._results
        style = (_TEMPLATES / "report.css").read_text(encoding="utf-8")
        script = (_TEMPLATES / "report.js").read_text(encoding="utf-8")
        first, documents = results.first, results.documents.values()
        created = day(max(document.provenance.created for document in documents))
        verdict, figures = self._verdict()
        source = self._source()
        facts = [f"head {short(source)}" if source else "", created]
        facts += [str(first.provenance.environment.get("device") or ""), first.provenance.dtype]
        return (
            _environment()
            .get_template("page.html")
            .render(
                style=Markup(style),
                script=Markup(script),
                style_digest=_digest(style),
                script_digest=_digest(script),
                target=short(first.provenance.target),
                source=short(source) if source else "",
                created=created,
                facts=list(filter(None, facts)),
                is_synthetic=any(document.is_synthetic for document in documents),
                verdict=verdict,
                figures=figures,
                advice=advice_of(results),
                sections=self.sections,
                cast=self._cast,
                draws=charts.can_draw(),
            )
        )

    def _sections(self) -> Iterator[Section]:
        results, cast = self._results, self._cast
        if results.throughput is not None:
            yield from throughput_sections(results.throughput, cast)
        if results.acceptance is not None:
            yield from acceptance_sections(results.acceptance, cast)
        if results.tune is not None:
            yield tune_section(results.tune)
        if results.acceptance is not None:
            yield from text_sections(results.acceptance, cast)
        yield Section("provenance", "Provenance", "Provenance", self._provenance())
        if caveats := [*self._caveats()]:
            groups = [Group(items=caveats)]
            yield Section("caveats", "Keep in mind", "Keep in mind", groups)

    def _source(self) -> str:
        """The head that the report is about."""
        results = self._results
        items: list[Entry | Cell] = [*(results.acceptance.entries if results.acceptance else [])]
        items += results.throughput.cells if results.throughput else []
        own = (item.source for item in items if key_of(item) == self._cast.hero and item.source)
        return next(own, "")

    # ---- the verdict ------------------------------------------------------------------------

    def _verdict(self) -> tuple[list[tuple[str, dict[str, Any]]], list[Figure]]:
        """Sentences, each the name of a macro with its facts, and large figures."""
        sentences: list[tuple[str, dict[str, Any]]] = []
        figures: list[Figure] = []
        for name, part in (
            ("acceptance", self._acceptance),
            ("speed", self._speed),
            ("depths", self._depths),
        ):
            if (found := part()) is not None:
                facts, own = found
                sentences.append((name, {**facts, "is_named": bool(sentences)}))
                figures += own
        return sentences, figures

    def _acceptance(self) -> tuple[dict[str, Any], list[Figure]] | None:
        file, cast = self._results.acceptance, self._cast
        if cast.hero is None or file is None:
            return None
        found = [(one, one.deepest(cast.hero)) for one in conditions(file.entries)]
        condition, entry = next(((one, own) for one, own in found if own), (None, None))
        if condition is None or entry is None:
            return None
        length, low_high = entry.pooled.length, entry.pooled.acceptance_length_ci
        under = [depth(entry.k), temperature(entry.temperature), file.provenance.dtype]
        template = file.settings.get("chat_template")
        if isinstance(template, bool):
            under.append("chat template" if template else "no chat template")
        under.append(joined([set_name(name) for name in entry.by_set] or [""]))
        rival = next((e for e in condition.deepest_of_all(cast) if e.method == "eagle3"), None)
        if rival is entry or rival is None or not (length and rival.pooled.length):
            rival = None
        facts = {"name": cast.name_of(entry), "length": length, "rival": rival}
        small = f"{depth(entry.k)}, {temperature(entry.temperature)}"
        small += f"; 95% {interval(low_high)}" if low_high else ""
        figure = "Acceptance length", number(length), small
        return {**facts, "under": ", ".join(filter(None, under))}, [figure]

    def _best_cells(self) -> list[Cell]:
        """The cells of the report's head with the best K at each load."""
        file, hero = self._results.throughput, self._cast.hero
        if file is None or hero is None or not file.cells:
            return []
        return best_cells(file.cells, hero, sets_of(file.cells)[0])

    def _speed(self) -> tuple[dict[str, Any], list[Figure]] | None:
        best, file = self._best_cells(), self._results.throughput
        if not best or file is None:
            return None
        first, last = best[0], best[-1]
        speed = first.median.output_tokens_per_s
        load = "one request" if first.concurrency == 1 else f"{first.concurrency} requests"
        figures = [("Tokens per second", rate(speed), f"{load} in flight, {set_name(first.set)}")]
        if first.speed_up_over_plain is not None:
            small = ", ".join(filter(None, [f"{load} in flight", depth(first.k)]))
            if last is not first and last.speed_up_over_plain is not None:
                small += f"; {times(last.speed_up_over_plain)} at {last.concurrency}"
            over = times(first.speed_up_over_plain)
            figures.insert(0, ("Over plain decoding", over, small))
        place = first.concurrency, first.set, first.engine
        rivals = [
            cell.median.output_tokens_per_s
            for cell in file.cells
            if cell.method == "eagle3" != first.method
            and (cell.concurrency, cell.set, cell.engine) == place
        ]
        rival = max(rivals, default=0.0)
        facts = {"load": load, "name": self._cast.name_of(first), "cell": first}
        return {**facts, "over_eagle3": speed / rival if rival else None}, figures

    def _depths(self) -> tuple[dict[str, Any], list[Figure]] | None:
        """The best K by load that bench measured, else the schedule of tune."""
        best = self._best_cells()
        runs = k_runs(best)
        cells = self._results.throughput.cells if self._results.throughput else []
        if runs and len({cell.k for cell in cells if key_of(cell) == self._cast.hero}) > 1:
            loads = f"from {best[0].concurrency} to {best[-1].concurrency} requests in flight"
            figure = "Best K by load", " → ".join(str(k) for k, _ in runs), loads
            return {"runs": runs, "name": self._cast.name_of(best[0])}, [figure]
        tune = self._results.tune
        if tune is None or not tune.schedule:
            return None
        schedule = tune.schedule
        small = f"schedule for {schedule[0][0]} to {schedule[-1][1]} sequences"
        if tune.check.share is not None:
            small += f"; {percent(tune.check.share)} predicted within 10%"
        figure = "K by load", " → ".join(str(k) for *_, k in schedule), small
        return {"runs": None, "schedule": schedule_words(schedule)}, [figure]

    # ---- the end ----------------------------------------------------------------------------

    def _caveats(self) -> Iterator[str]:
        """What limits the numbers, found in them."""
        yield from self._acceptance_caveats()
        yield from self._throughput_caveats()
        documents = list(self._results.documents.values())
        if any(document.is_synthetic for document in documents):
            yield "Acceptance is synthetic: speeds are real, what heads accept is not."
        environments = [document.provenance.environment for document in documents]
        for name in ("commit", "device", "torch"):
            values = list(dict.fromkeys(str(one[name]) for one in environments if one.get(name)))
            if len(values) > 1:
                yield f"The files differ in {name}: {', '.join(values)}."
        targets = list(dict.fromkeys(document.provenance.target for document in documents))
        if len(targets) > 1:
            yield f"The files are of different targets: {', '.join(targets)}."
        if any(str(one.get("commit") or "").endswith("-dirty") for one in environments):
            yield "The code was changed after its commit (-dirty)."
        if not charts.can_draw():
            yield (
                "No chart was drawn: matplotlib is not installed "
                '(pip install "peagle[report]"). The tables have every number.'
            )

    def _acceptance_caveats(self) -> Iterator[str]:
        file, cast = self._results.acceptance, self._cast
        found = conditions(file.entries) if file else []
        for entry in found[0].deepest_of_all(cast)[-1:] if found else []:
            pooled, which = entry.pooled, f"({cast.name_of(entry)}, K = {entry.depth})."
            share = pooled.loop_share if pooled.loop_share is not None else entry.loop_share
            looping = f"{percent(share)} of the outputs fall into a loop, which is easy to draft"
            if share and pooled.acceptance_length_before_loop is None:
                yield f"{looping} {which}"
            elif share:
                yield (
                    f"{looping}: up to there the acceptance length is "
                    f"{number(pooled.acceptance_length_before_loop)} instead of "
                    f"{number(pooled.length)} {which}"
                )
            counts = {name: piece.num_requests for name, piece in entry.by_set.items()}
            few = [set_name(name) for name, count in counts.items() if 0 < count < _FEW_REQUESTS]
            if few:
                yield f"Fewer than {_FEW_REQUESTS} requests each: {', '.join(few)}."
            if pooled.acceptance_length_ci is None:
                yield "The backend tells no figures by request, so there are no intervals."

    def _throughput_caveats(self) -> Iterator[str]:
        cells = self._results.throughput.cells if self._results.throughput else []
        if errors := sum(repeat.errors for cell in cells for repeat in cell.repeats):
            yield f"{errors:g} requests of the throughput runs failed."
        if cells and all(len(cell.repeats) < 2 for cell in cells):
            yield "Every cell was run once: spreads are unknown."
        spreads = [
            (ends[1] - ends[0]) / cell.median.output_tokens_per_s
            for cell in cells
            if (ends := cell.spread.output_tokens_per_s) and cell.median.output_tokens_per_s
        ]
        if noisy := [spread for spread in spreads if spread > _WIDE_SPREAD]:
            yield (
                f"In {len(noisy)} of {len(cells)} cells the repeats are more than "
                f"{100 * _WIDE_SPREAD:.0f}% apart, at most {percent(max(noisy))}."
            )
        if cells and self._cast.many_engines:
            yield "Engines differ: compare methods on one engine, and engines on one method."
        schedule = self._results.tune.schedule if self._results.tune else []
        for cell in self._best_cells() if schedule else ():
            k = k_at(schedule, cell.concurrency)
            if cell.k and cell.concurrency <= schedule[-1][1] and k != cell.k:
                yield (
                    f"At {cell.concurrency} together the best K that was measured is {cell.k}, "
                    f"and the schedule, which is predicted, has {k}: take the measured one at "
                    "that load."
                )

    def _provenance(self) -> list[Group]:
        """Command, versions, commit, hardware and settings of each file."""
        facts = {name: _facts(file) for name, file in self._results.documents.items()}
        first, *others = facts.values()
        shared = {
            key: value
            for key, value in first.items()
            if others and key not in ("command", "created")
            if all(own.get(key) == value for own in others)
        }
        groups = [
            Group(
                heading=f"{_COMMANDS[name]} ({name})",
                facts={key: value for key, value in own.items() if key not in shared},
            )
            for name, own in facts.items()
        ]
        return groups + ([Group(heading="Shared by all", facts=shared)] if shared else [])


def _facts(document: Document) -> dict[str, str]:
    """What a file says of its making, in words."""
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
        *("depth", "number", "percent", "rate", "rates", "set_name", "method_name", "times"),
        *("interval", "milliseconds", "count"),
    ):
        environment.filters[name] = getattr(text, name)
    environment.filters["with_interval"] = lambda piece: text.with_interval(
        piece.length, piece.acceptance_length_ci
    )
    environment.globals["key"] = charts.key
    return environment


def _digest(source: str) -> str:
    """What the policy allows: a script or style of exactly this text."""
    return f"'sha256-{b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"
