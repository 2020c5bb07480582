"""The pivot of results, against the files that it was made from."""

import csv
import io
import random
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evaluation import report_samples as samples
from evaluation.report_pages import page_of, table_of
from peagle.cli.tables import pivot_table
from peagle.evaluation.pivot import bench_pivot, eval_pivot
from peagle.evaluation.report import charts
from peagle.evaluation.report.files import Results, pivot_csv
from peagle.results import AcceptanceResults, ThroughputResults

BENCH = samples.throughput(("plain", "eagle3", "peagle"), (3, 7), (1, 16))
EVAL = samples.acceptance(("eagle3", "peagle"), (3, 7), (0.0, 0.7))


def bench_of(raw: dict[str, Any]) -> ThroughputResults:
    return ThroughputResults.model_validate(raw)


@settings(max_examples=20, deadline=None)
@given(st.randoms(use_true_random=False))
def test_every_cell_is_at_its_place(rng: random.Random) -> None:
    """In whatever order the cells are, and whichever are missing."""
    kept = rng.sample(BENCH["cells"], rng.randint(1, len(BENCH["cells"])))
    pivot = bench_pivot(bench_of({**BENCH, "cells": kept}))
    found = {
        (row.method, row.k, row.concurrency, name): (
            one.acceptance_length,
            one.speed_up_over_plain,
        )
        for row, figures in pivot.rows.items()
        for name, one in figures.items()
    }
    assert found == {
        (cell["method"], cell["k"], cell["concurrency"], cell["set"]): (
            cell["median"]["acceptance_length"],
            cell["speed_up_over_plain"],
        )
        for cell in kept
    }
    loads = [row.concurrency or 0 for row in pivot.rows]
    assert loads == sorted(loads)
    assert set(pivot.sets) == {cell["set"] for cell in kept}


def test_acceptance_by_every_k_and_temperature() -> None:
    pivot = eval_pivot(AcceptanceResults.model_validate(EVAL))
    assert not pivot.has_speed_ups and pivot.sets == list(samples.SETS)
    rows = {(row.method, row.k, row.temperature): own for row, own in pivot.rows.items()}
    assert len(rows) == len(EVAL["entries"]) == 8
    for entry in EVAL["entries"]:
        own = rows[entry["method"], entry["k"], entry["temperature"]]
        lengths = {name: one["acceptance_length"] for name, one in entry["by_set"].items()}
        assert {name: one.acceptance_length for name, one in own.items()} == lengths


def test_the_text() -> None:
    pivot = bench_pivot(bench_of(BENCH))
    header, *lines = pivot_table(pivot).splitlines()
    assert re.split(r"  +", header.strip()) == [
        *("method", "K", "c", "humaneval AL", "x plain", "mt_bench AL", "x plain"),
    ]
    cells = {(c["method"], c["k"], c["concurrency"], c["set"]): c for c in BENCH["cells"]}
    assert len(lines) == 10
    for line in lines:
        method, k, load, *figures = line.split()
        for name, length, speed_up in zip(samples.SETS, figures[::2], figures[1::2], strict=False):
            cell = cells[method, 0 if k == "-" else int(k), int(load), name]
            assert speed_up == f"{cell['speed_up_over_plain']:.2f}"
            known = cell["median"]["acceptance_length"]
            assert length == ("-" if known is None else f"{known:.2f}")
    one = {**BENCH, "cells": [c for c in BENCH["cells"] if c["concurrency"] == 1]}
    assert pivot_table(bench_pivot(bench_of(one))).split()[:4] == ["method", "K", "humaneval", "AL"]


def test_the_csv_has_both_commands() -> None:
    results = Results(AcceptanceResults.model_validate(EVAL), bench_of(BENCH))
    rows = list(csv.DictReader(io.StringIO(pivot_csv(results).decode())))
    assert [row["command"] for row in rows] == ["bench"] * 10 + ["eval"] * 8
    for raw in BENCH["cells"]:
        (row,) = (
            row
            for row in rows[:10]
            if (row["method"], int(row["k"]), int(row["concurrency"]))
            == (raw["method"], raw["k"], raw["concurrency"])
        )
        assert float(row[f"{raw['set']} speed_up_over_plain"]) == raw["speed_up_over_plain"]
        assert row[f"{raw['set']} acceptance_length"] == str(
            raw["median"]["acceptance_length"] or ""
        )
    assert all(row["gsm8k acceptance_length"] for row in rows[10:])
    assert not any(row["gsm8k acceptance_length"] for row in rows[:10])


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(charts, "can_draw", lambda: False)
    page = page_of(tmp_path, acceptance=EVAL, throughput=BENCH)
    caption = "Acceptance length and speed-up over plain decoding by method, K and prompt set<"
    header, *rows = table_of(page, caption)
    assert header == [
        *("Method", "K", "Concurrency"),
        *("Length, HumanEval", "Over plain", "Length, MT-Bench", "Over plain"),
    ]
    (cell,) = (
        cell
        for cell in BENCH["cells"]
        if (cell["method"], cell["k"], cell["concurrency"], cell["set"])
        == ("peagle", 3, 16, "mt_bench")
    )
    (row,) = (row for row in rows if row[:3] == ["P-EAGLE", "3", "16"])
    length, speed_up = cell["median"]["acceptance_length"], cell["speed_up_over_plain"]
    assert row[5:] == [f"{length:.2f}", f"{speed_up:.2f}×"]
    assert len(rows) == 10 and rows[0][:4] == ["Plain decoding", "–", "1", "–"]
    header, *rows = table_of(page, "Acceptance length by method, K and prompt set<")
    assert header == [
        *("Method", "K", "Temperature"),
        *("Length, HumanEval", "Length, MT-Bench", "Length, GSM8K"),
    ]
    entry = EVAL["entries"][0]
    lengths = [f"{one['acceptance_length']:.2f}" for one in entry["by_set"].values()]
    assert rows[0] == ["EAGLE-3", "3", "greedy", *lengths] and len(rows) == 8
