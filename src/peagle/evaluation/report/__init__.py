"""One report of the results of `peagle eval`, `peagle bench` and `peagle tune` in a folder."""

from __future__ import annotations

import json
from pathlib import Path

from peagle.evaluation.report import charts
from peagle.evaluation.report.files import (
    acceptance_csv,
    read_results,
    throughput_csv,
    write_file,
)
from peagle.evaluation.report.page import Page
from peagle.results import FORMAT_VERSION

REPORT, RESULTS = "report.html", "results.json"


def write_report(folder: Path) -> Path:
    """Write the report of an output folder.

    Reads whichever of acceptance.json, throughput.json and tune.json are there and writes, each
    whole or not at all: results.json (all of them under one roof), acceptance.csv, throughput.csv,
    PNGs (with matplotlib), and report.html, a single page that opens offline. The same inputs give
    the same files.

    Args:
        folder: what `--output` named.

    Returns:
        where report.html is.

    Raises:
        UserError: none of the three is there, one is malformed (its name and the key) or of a newer
            peagle, or the folder cannot be written to.
    """
    results = read_results(folder)
    together = {"format_version": FORMAT_VERSION, "acceptance": None, "throughput": None}
    together |= {"tune": None}
    for name, document in results.documents.items():
        together[name.removesuffix(".json")] = document.to_json()
    write_file(folder / RESULTS, (json.dumps(together, indent=1) + "\n").encode())
    if results.acceptance is not None:
        write_file(folder / "acceptance.csv", acceptance_csv(results.acceptance))
    if results.throughput is not None:
        write_file(folder / "throughput.csv", throughput_csv(results.throughput))
    page = Page(results)
    if charts.can_draw():
        for section, name in (
            *(("throughput", "throughput.png"), ("sweep", "k_sweep.png")),
            *(("acceptance", "acceptance.png"), ("requests", "histogram.png")),
        ):
            if drawn := page.charts_of(section):
                write_file(folder / name, charts.png(drawn[:6], page.origin))
    write_file(folder / REPORT, page.html().encode())
    return folder / REPORT
