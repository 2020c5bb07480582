"""One report of the results of `peagle eval`, `peagle bench` and `peagle tune` in a folder."""

import json
from pathlib import Path

from peagle.evaluation.report import charts, plots
from peagle.evaluation.report.files import (
    Results,
    acceptance_csv,
    pivot_csv,
    read_results,
    throughput_csv,
    write_file,
)
from peagle.evaluation.report.page import origin, page_html
from peagle.evaluation.report.series import Cast, conditions, sets_of
from peagle.results import FORMAT_VERSION

REPORT, RESULTS = "report.html", "results.json"


def write_report(folder: Path) -> Path:
    """Write the report of an output folder and return the path of report.html.

    Reads those of acceptance.json, throughput.json and tune.json that exist and writes, each
    whole or not at all: results.json (all of them in one), acceptance.csv, throughput.csv,
    pivot.csv, PNGs (with matplotlib), and report.html, a single page that opens offline. The same
    inputs give the same files.

    Raises:
        UserError: none of the three exists, one is malformed (its name and the key) or of a newer
            peagle, or the folder cannot be written to.
    """
    results = read_results(folder)
    together = {"format_version": FORMAT_VERSION, "acceptance": None, "throughput": None}
    together |= {"tune": None}
    for name, document in results.documents.items():
        together[name.removesuffix(".json")] = document.to_json()
    write_file(folder / RESULTS, (json.dumps(together, indent=1) + "\n").encode())
    results = results.with_turns()
    if results.acceptance is not None:
        write_file(folder / "acceptance.csv", acceptance_csv(results.acceptance))
    if results.throughput is not None:
        write_file(folder / "throughput.csv", throughput_csv(results.throughput))
    if results.entries or results.cells:
        write_file(folder / "pivot.csv", pivot_csv(results))
    if charts.can_draw():
        for name, drawn in _pictures(results).items():
            if drawn:
                write_file(folder / name, charts.png(drawn[:6], origin(results)))
    write_file(folder / REPORT, page_html(results).encode())
    return folder / REPORT


def _pictures(results: Results) -> dict[str, list[charts.Chart]]:
    """Return by file the charts for slides: those that the page shows unfolded."""
    cast, file = Cast.of(results), results.throughput
    drawn: dict[str, list[charts.Chart]] = {}
    sets = sets_of(results.cells)
    if file is not None and sets:
        drawn["throughput.png"] = plots.load_charts(file, cast, sets[0])
        if file.has_many_k:
            found = (plots.k_charts(file, cast, name) for name in sets)
            drawn["k_sweep.png"] = next(filter(None, found), [])
    for condition in conditions(results.entries)[:1]:
        drawn["acceptance.png"] = plots.position_charts(condition, cast)
    found = (plots.request_charts(one, cast) for one in conditions(results.entries))
    drawn["histogram.png"] = next(filter(None, found), [])
    return drawn
