"""The cost of serving, against exact arithmetic and in the files of a report."""

import csv
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evaluation import report_samples as samples
from evaluation.report_pages import page_of, table_of
from peagle.evaluation.report import charts, write_report
from peagle.evaluation.serving_cost import cost_per_million_tokens, instances_for
from peagle.results import ThroughputResults

AMOUNTS = st.floats(1e-3, 1e6)


def test_by_hand() -> None:
    # 1,000 tokens/s are 3.6 million an hour.
    assert cost_per_million_tokens(4.5, 1000.0) == pytest.approx(1.25)
    assert [instances_for(n, 2.5) for n in (0.1, 2.5, 2.6, 20.0)] == [1, 1, 2, 8]
    assert cost_per_million_tokens(4.5, 0.0) is None
    assert instances_for(20.0, 0.0) is None is instances_for(20.0, None)


@given(AMOUNTS, AMOUNTS)
def test_the_tokens_of_an_hour_cost_its_price(price: float, tokens_per_s: float) -> None:
    cost = cost_per_million_tokens(price, tokens_per_s)
    assert cost is not None
    paid = Fraction(cost) * Fraction(tokens_per_s) * 3600 / 10**6
    assert float(paid) == pytest.approx(price)


@pytest.mark.slow
@given(AMOUNTS, AMOUNTS)
def test_the_instances_suffice_and_one_less_does_not(wanted: float, of_one: float) -> None:
    count = instances_for(wanted, of_one)
    assert count is not None and count >= 1
    rounding = 1 + 1e-12
    assert Fraction(count) * Fraction(of_one) * Fraction(rounding) >= Fraction(wanted)
    assert (count - 1) * Fraction(of_one) < Fraction(wanted) * Fraction(rounding)


def best(document: dict[str, Any], method: str, load: int, name: str) -> dict[str, Any]:
    """The fastest cell of a method: the samples have no ties."""
    return max(
        (
            cell
            for cell in document["cells"]
            if (cell["method"], cell["concurrency"], cell["set"]) == (method, load, name)
        ),
        key=lambda cell: cell["median"]["output_tokens_per_s"],
    )


def test_the_page_and_the_csv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(charts, "can_draw", lambda: False)
    raw = samples.throughput(
        ("plain", "eagle3", "peagle"), (1, 7), (1, 16), price_per_hour=4.5, requests_per_second=20
    )
    page = page_of(tmp_path, throughput=raw)
    header, *rows = table_of(page, "Cost of serving, every method with its best K<")
    assert header == [
        *("Method", "Set", "K", "Concurrency", "Tokens/s", "A million output tokens"),
        *("Requests/s", "Instances", "Their cost an hour", "Objective"),
    ]
    keys = [
        (name, load, method)
        for name in ("humaneval", "mt_bench")
        for load in (1, 16)
        for method in ("plain", "eagle3", "peagle")
    ]
    assert len(rows) == len(keys)
    for row, (name, load, method) in zip(rows, keys, strict=True):
        median = best(raw, method, load, name)["median"]
        needed = -(-20 // Fraction(median["requests_per_s"]))
        assert float(row[5]) == pytest.approx(
            4.5e6 / 3600 / median["output_tokens_per_s"], rel=0.01
        )
        assert (int(row[3]), int(row[7])) == (load, needed)
        assert float(row[8]) == pytest.approx(4.5 * needed, rel=0.01)
    cost = min(
        best(raw, "peagle", load, "humaneval")["cost_per_million_tokens"] for load in (1, 16)
    )
    assert f"<dt>A million output tokens</dt><dd>{cost:.3g}<small>at 16 in flight and" in page
    write_report(tmp_path)
    for cell, row in zip(
        raw["cells"], csv.DictReader((tmp_path / "throughput.csv").open()), strict=True
    ):
        assert float(row["cost_per_million_tokens"]) == cell["cost_per_million_tokens"]


def test_one_of_the_two_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(charts, "can_draw", lambda: False)
    caption = "Cost of serving, every method with its best K<"
    priced = samples.throughput(("plain", "peagle"), (3,), (1,), price_per_hour=0.9)
    header, *_ = table_of(page_of(tmp_path / "priced", throughput=priced), caption)
    assert "A million output tokens" in header and "Instances" not in header
    wanted = samples.throughput(("plain", "peagle"), (3,), (1,), requests_per_second=3)
    header, *_ = table_of(page_of(tmp_path / "wanted", throughput=wanted), caption)
    assert "Instances" in header and "A million output tokens" not in header


def test_files_without_costs_are_read() -> None:
    raw = samples.throughput(("plain", "peagle"), (3,), (1,))
    for name in ("price_per_hour", "requests_per_second"):
        assert raw.pop(name) is None
    for cell in raw["cells"]:
        assert cell.pop("cost_per_million_tokens") is None is cell.pop("instances")
    assert ThroughputResults.model_validate(raw).price_per_hour is None
