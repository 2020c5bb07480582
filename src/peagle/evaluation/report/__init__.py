"""One report from what `peagle eval`, `peagle bench` and `peagle tune` wrote into a folder."""

from __future__ import annotations

import json
from pathlib import Path

from peagle.evaluation.report.files import csv_text, read_results, write_bytes
from peagle.evaluation.report.page import render
from peagle.evaluation.report.pictures import can_draw, draw_pictures
from peagle.evaluation.report.tables import (
    ACCEPTANCE_HEADER,
    THROUGHPUT_HEADER,
    acceptance_rows,
    throughput_rows,
)
from peagle.results import FORMAT_VERSION

REPORT, RESULTS = "report.html", "results.json"
_NO_PICTURES = 'No PNG was drawn: matplotlib is not installed (pip install "peagle[report]").'


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
    together = {
        "format_version": FORMAT_VERSION,
        **{
            name: None if document is None else document.to_json()
            for name, document in (
                ("acceptance", results.acceptance),
                ("throughput", results.throughput),
                ("tune", results.tune),
            )
        },
    }
    write_bytes(folder / RESULTS, (json.dumps(together, indent=1) + "\n").encode())
    if results.acceptance is not None:
        rows = csv_text(ACCEPTANCE_HEADER, acceptance_rows(results.acceptance))
        write_bytes(folder / "acceptance.csv", rows.encode())
    if results.throughput is not None:
        rows = csv_text(THROUGHPUT_HEADER, throughput_rows(results.throughput))
        write_bytes(folder / "throughput.csv", rows.encode())
    notes = [] if can_draw() else [_NO_PICTURES]
    draw_pictures(results, folder)
    write_bytes(folder / REPORT, render(results, notes).encode())
    return folder / REPORT
