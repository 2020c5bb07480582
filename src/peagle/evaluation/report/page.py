"""The report as one page that opens anywhere: nothing in it is fetched."""

from __future__ import annotations

import hashlib
from base64 import b64encode
from pathlib import Path

from peagle.evaluation.report import verdict
from peagle.evaluation.report.acceptance_part import (
    decay_section,
    places_section,
    requests_section,
    sets_section,
)
from peagle.evaluation.report.closing import caveats_section, provenance_section
from peagle.evaluation.report.files import Results
from peagle.evaluation.report.series import Cast
from peagle.evaluation.report.text import h
from peagle.evaluation.report.text_part import hardest_section, samples_section
from peagle.evaluation.report.throughput_part import sweep_section, throughput_section
from peagle.evaluation.report.tune_part import tune_section

_HERE = Path(__file__).parent
_CONTENTS = {
    "throughput": "Throughput",
    "sweep": "Choosing K",
    "acceptance": "By position",
    "sets": "By prompt set",
    "places": "Along the text",
    "requests": "Requests",
    "cost": "Cost",
    "samples": "Samples",
    "hardest": "Hardest texts",
    "provenance": "Provenance",
    "caveats": "Keep in mind",
}


def render(results: Results, notes: list[str]) -> str:
    """The whole page.

    Args:
        results: of an output folder.
        notes: further lines for "Keep in mind".
    """
    cast = Cast.of(results)
    sections = _sections(results, cast, notes)
    shown = [name for name, html in sections.items() if html]
    links = "".join(f'<li><a href="#{name}">{_CONTENTS[name]}</a></li>' for name in shown)
    style = (_HERE / "report.css").read_text(encoding="utf-8")
    script = (_HERE / "report.js").read_text(encoding="utf-8")
    policy = (
        f"default-src 'none'; style-src {_digest(style)}; script-src {_digest(script)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="referrer" content="no-referrer"><link rel="icon" href="data:,">'
        f"<title>{h(verdict.title(results, cast))}</title>"
        f"<style>{style}</style></head>\n<body>{verdict.head(results, cast)}\n"
        f'<nav aria-label="Contents"><ul>{links}</ul></nav>\n'
        f"<main>{''.join(sections.values())}</main>\n"
        "<footer><p>Written by peagle. Beside this page: results.json and CSV files with every "
        "number.</p></footer>\n"
        f'<div id="tip" aria-hidden="true" hidden></div><script>{script}</script></body></html>\n'
    )


def _sections(results: Results, cast: Cast, notes: list[str]) -> dict[str, str]:
    """By name, in the order of the page; what nothing is known of is empty."""
    acceptance, throughput = results.acceptance, results.throughput
    return {
        "throughput": throughput_section(throughput, cast) if throughput else "",
        "sweep": sweep_section(throughput, cast) if throughput else "",
        "acceptance": decay_section(acceptance, cast) if acceptance else "",
        "sets": sets_section(acceptance, cast) if acceptance else "",
        "places": places_section(acceptance, cast) if acceptance else "",
        "requests": requests_section(acceptance, cast) if acceptance else "",
        "cost": tune_section(results.tune) if results.tune else "",
        "samples": samples_section(acceptance, cast) if acceptance else "",
        "hardest": hardest_section(acceptance, cast) if acceptance else "",
        "provenance": provenance_section(results),
        "caveats": caveats_section(results, cast, notes),
    }


def _digest(text: str) -> str:
    """What the policy allows: a script or style of exactly this text."""
    return f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
