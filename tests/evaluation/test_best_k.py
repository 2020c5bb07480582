"""One best K for one load, wherever it is named."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from peagle.cli.bench import result_text
from peagle.cli.tune import _speeds
from peagle.evaluation.best_k import Speed, best_k, tied_fastest
from peagle.evaluation.report import charts, write_report
from peagle.evaluation.report.advice import throughput_advice
from peagle.evaluation.report.files import read_results
from peagle.evaluation.report.series import Cast, best_cells
from peagle.evaluation.sweep import SweepPoint
from peagle.evaluation.throughput import summarize
from peagle.evaluation.tuning.schedule import k_at
from peagle.results import ThroughputResults, TuneResults
from tests.evaluation import report_samples
from tests.evaluation.report_samples import write

LOADS, KS = (1, 4, 16), (2, 3, 5)


@pytest.fixture(autouse=True)
def _undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(charts, "can_draw", lambda: False)


def figures(speed: float) -> dict[str, Any]:
    """As `timing.figures_of` gives them."""
    percentiles = dict.fromkeys(("p50", "p90", "p99", "mean"), 0.1)
    return {
        **{"seconds": 1.0, "num_requests": 4, "num_tokens": 64, "output_tokens_per_s": speed},
        **{"requests_per_s": 1.0, "acceptance_length": 2.0, "gpu_busy": None, "errors": 0},
        **{"ttft_s": percentiles, "itl_s": percentiles, "e2e_s": percentiles},
    }


def measured(rng: random.Random) -> dict[SweepPoint, list[dict[str, Any]]]:
    """A sweep of random speeds, of which many tie."""
    arms = [("plain", 0), *(("eagle3", k) for k in KS), *(("peagle", k) for k in KS)]
    return {
        SweepPoint(method, "", "peagle", k, load, "humaneval"): [
            figures(rng.choice((90, 100, 104, 110, 130)) * load + rng.randint(0, 6))
            for _ in range(2)
        ]
        for method, k in arms
        for load in LOADS
    }


def bench(rng: random.Random) -> ThroughputResults:
    results = summarize(
        measured(rng),
        None,
        provenance=report_samples.provenance("peagle bench"),
        settings={"sets": {"humaneval": 4}, "objective": None},
    )
    return results.model_copy(update={"advice": throughput_advice(results)})


def test_the_definition() -> None:
    speeds = {3: Speed(100, 95, 104), 5: Speed(110, 103, 112), 7: Speed(90, 80, 102)}
    assert tied_fastest(speeds) == [3, 5]
    assert best_k(speeds) == 3
    assert best_k(speeds | {3: Speed(100, 95, 102.9)}) == 5
    assert best_k({7: Speed(100, 100, 100), 5: Speed(100, 100, 100), 3: Speed(99, 99, 99)}) == 5


@pytest.mark.parametrize("seed", range(12))
def test_all_places_agree(tmp_path: Path, seed: int) -> None:
    result = bench(random.Random(seed))
    best = {one.concurrency: one.k for one in result.best_k if one.method == "peagle"}
    # The definition again, from the repeats themselves.
    for load in LOADS:
        own = {
            cell.k: [one.output_tokens_per_s for one in cell.repeats]
            for cell in result.cells
            if cell.method == "peagle" and cell.concurrency == load
        }
        fastest = max(own.values(), key=sum)
        assert best[load] == min(k for k, runs in own.items() if max(runs) >= min(fastest)), load
    write(tmp_path, throughput=result.to_json())
    page = write_report(tmp_path).read_text()
    results = read_results(tmp_path)
    assert results.throughput is not None
    cells = best_cells(results.throughput.cells, ("peagle", "peagle"), "humaneval")
    assert {cell.concurrency: cell.k for cell in cells} == best
    table = page.split("Best K by method and concurrency")[-1].split("</table>")[0]
    rows = re.findall(r">P-EAGLE</th><td>(\d+)</td><td>(\d+)</td>", table)
    assert {int(load): int(k) for k, load in rows} == best
    runs = [k for n, k in enumerate(best.values()) if n == 0 or k != [*best.values()][n - 1]]
    shown = page.split("Best K by load</dt><dd>")[1].split("<small>")[0]
    assert shown == " → ".join(map(str, runs))
    text = result_text(result)
    line = text.split("best K of peagle on humaneval, by concurrency: ")[1].splitlines()[0]
    line = re.sub(r" \(tied: [\d, ]+\)", "", line)
    assert line == ", ".join(f"{k} at {load}" for load, k in best.items())
    for method, k in re.findall(r"(P-EAGLE|EAGLE-3) with K = (\d+)", result.advice):
        name = {"P-EAGLE": "peagle", "EAGLE-3": "eagle3"}[method]
        assert int(k) in {one.k for one in result.best_k if one.method == name}


def test_the_schedule_is_the_only_k_that_tune_names(tmp_path: Path) -> None:
    tune = report_samples.tune()
    for one in tune["predictions"]:  # K = 5 is fastest everywhere, a little
        one["predicted_tokens_per_s"] = 100.0 + (one["k"] == 5)
        one["measured_tokens_per_s"] = 100.0 + (one["k"] == 5)
    write(tmp_path, tune=tune)
    page = write_report(tmp_path).read_text()
    batches = sorted({one["batch"] for one in tune["predictions"]})
    ks = sorted({one["k"] for one in tune["predictions"]})
    table = page.split("a star marks")[-1].split("</table>")[0]
    for batch in batches:
        row = re.search(rf">{batch}</t[hd]>(.*?)</tr>", table, re.S)
        assert row is not None
        stars = ["★" in cell for cell in re.findall(r"<td[^>]*>(.*?)</td>", row[1], re.S)]
        assert [k for k, star in zip(ks, stars, strict=True) if star] == [
            k_at(tune["schedule"], batch)
        ]
    lines = _speeds(TuneResults.model_validate(tune))[2:]
    for batch, line in zip(batches, lines, strict=True):
        stars = ["*" in speed for speed in re.findall(r"[\d,]+\*?", line)[1:]]
        assert ks[stars.index(True)] == k_at(tune["schedule"], batch)
        assert sum(stars) == 1


def test_a_measured_and_a_predicted_k_are_reconciled(tmp_path: Path) -> None:
    result = bench(random.Random(1))
    best = {one.concurrency: one.k for one in result.best_k if one.method == "peagle"}
    tune = report_samples.tune() | {"schedule": [[1, 64, best[4] + 1]]}
    write(tmp_path, throughput=result.to_json(), tune=json.loads(json.dumps(tune)))
    page = write_report(tmp_path).read_text()
    assert f"At 4 together the best K that was measured is {best[4]}" in page
    assert Cast.of(read_results(tmp_path)).hero == ("peagle", "peagle")
