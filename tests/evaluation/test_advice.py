"""Comparisons, the best K, and the sentences that rest on them."""

import json
import random
import re
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest

from peagle.cli.bench import bench_text
from peagle.cli.tune import _speeds
from peagle.evaluation.comparisons import compare_entries
from peagle.evaluation.report import charts, write_report
from peagle.evaluation.report.advice import acceptance_advice, throughput_advice
from peagle.evaluation.report.files import read_results
from peagle.evaluation.report.series import Cast, best_cells
from peagle.evaluation.sweep import SweepPoint
from peagle.evaluation.throughput import best_k_cell, summarize, tied_fastest
from peagle.evaluation.training_record import read_training_record
from peagle.evaluation.tuning.schedule import k_at
from peagle.intervals import acceptance_intervals, paired_difference
from peagle.results import Cell, Entry, RunFigures, ThroughputResults, TrainingRecord, TuneResults
from tests.evaluation import report_samples
from tests.evaluation.report_samples import make_cell, make_slice, provenance, write

Counts = np.ndarray


def requests(rng: np.random.Generator, count: int, gain: float) -> tuple[Counts, Counts]:
    """Two heads on the same requests, which differ far more than the heads do: [N, 2] each."""
    chance_N = rng.beta(2, 2, size=count)
    drafts_N = rng.integers(20, 60, size=count)
    one, other = (
        rng.binomial(4 * drafts_N, np.clip(chance_N + more, 0, 1)) for more in (gain, 0.0)
    )
    return np.stack([one, drafts_N], 1), np.stack([other, drafts_N], 1)


def test_paired_intervals_cover_the_truth() -> None:
    rng, runs, covered = np.random.default_rng(3), 200, 0
    for run in range(runs):
        one, other = requests(rng, 16, 0.0)
        _, interval = paired_difference(one, other, resamples=400, seed=run)
        assert interval is not None
        covered += interval[0] <= 0 <= interval[1]
    assert 0.89 <= covered / runs <= 0.99


def test_pairing_shows_what_separate_intervals_do_not() -> None:
    one, other = requests(np.random.default_rng(1), 24, 0.06)
    difference, interval = paired_difference(one, other)
    assert difference == pytest.approx(
        one[:, 0].sum() / one[:, 1].sum() - other[:, 0].sum() / other[:, 1].sum()
    )
    assert interval is not None
    assert 0 < interval[0] < difference < interval[1]
    alone = [
        acceptance_intervals(counts[:, 1], counts[:, :1]).acceptance_length
        for counts in (one, other)
    ]
    assert alone[0] is not None
    assert alone[1] is not None
    assert alone[0][0] < alone[1][1]  # these overlap
    assert paired_difference(other, one)[0] == pytest.approx(-difference)


def test_few_requests_have_no_interval_and_equal_heads_no_difference() -> None:
    one, other = requests(np.random.default_rng(2), 4, 0.3)
    assert paired_difference(one, other)[1] is None
    one, _ = requests(np.random.default_rng(2), 9, 0.3)
    assert paired_difference(one, one) == (0.0, (0.0, 0.0))


# ---- advice on acceptance ----


def entry(method: str, counts: dict[str, list[int]], **more: Any) -> dict[str, Any]:
    return {
        **{"method": method, "source": "", "k": 4, "temperature": 0.0, "engine": "peagle"},
        **{"draft_sampling": "argmax", "by_conversation": counts},
        "pooled": make_slice("peagle", 4, 1.0, 400, 8),
        **more,
    }


def counts(accepted: int, steps: int = 10) -> dict[str, list[int]]:
    """Eight requests of ten drafts with about so many accepted tokens each."""
    return {f"set/{i}": [10, accepted + i % 3, steps] for i in range(8)}


def advice(*entries: dict[str, Any]) -> str:
    found = [Entry.model_validate(one) for one in entries]
    return acceptance_advice(found, compare_entries(found))


def test_better_worse_and_no_difference() -> None:
    old = entry("old", counts(20))
    assert "P-EAGLE is better than old (+1.00 acceptance length" in advice(
        entry("peagle", counts(30)), old
    )
    told = advice(entry("peagle", counts(10)), old)
    assert "P-EAGLE is worse than old (-1.00" in told
    assert told.endswith("keep old.")
    shifted = {f"set/{i}": [10, 20 + (i + 1) % 3, 10] for i in range(8)}
    assert "No difference between P-EAGLE and old is shown" in advice(entry("peagle", shifted), old)
    assert "too few requests" in advice(
        entry("peagle", {"set/0": [10, 20, 10]}), entry("old", {"set/0": [10, 30, 10]})
    )


def test_prompt_lookup_is_compared_by_tokens_a_step() -> None:
    """It drafts at few steps, and is accepted more often where it does."""
    seldom = entry("ngram", {f"set/{i}": [2, 8, 10] for i in range(8)})
    assert "P-EAGLE is better than prompt lookup (+1.29 tokens a step" in advice(
        entry("peagle", counts(20)), seldom
    )
    often = entry("ngram", {f"set/{i}": [10, 38, 10] for i in range(8)})
    told = advice(entry("peagle", counts(20)), often)
    assert "worse than prompt lookup" in told
    assert "--method ngram" in told


def test_a_head_that_was_trained_too_little_is_named() -> None:
    little = TrainingRecord(steps=60, planned=60, tokens=122_880).to_json()
    told = advice(entry("peagle", counts(20), training=little), entry("old", counts(20)))
    assert told.startswith("P-EAGLE was trained too little to be judged, for 60 steps (122,880")
    enough = TrainingRecord(steps=12_000, planned=12_000).to_json()
    assert "trained" not in advice(entry("peagle", counts(20), training=enough))


def test_records_of_training(tmp_path: Path) -> None:
    head = tmp_path / "head"
    head.mkdir()
    assert read_training_record(head) is None
    record = {"steps": 900, "tokens": 5, "config": {"optimizer": {"steps": 5000}}}
    (tmp_path / "train.json").write_text(json.dumps(record))
    found = read_training_record(head)
    assert found == TrainingRecord(steps=900, planned=5000, tokens=5)
    assert str(found) == "900 of 5,000 steps (5 tokens)"
    for steps, planned, early, is_little in (
        *((999, 999, False, True), (1000, 1000, False, False)),
        *((2000, 5000, False, True), (2000, 5000, True, False), (2500, 5000, False, False)),
    ):
        assert (
            TrainingRecord(steps=steps, planned=planned, stopped_early=early).is_little == is_little
        )
    for fresh, is_little in (([], False), (["mask_hidden"], True)):
        start = {"steps": 40, "warm_start": {"fresh": fresh}}
        (head / "train.json").write_text(json.dumps(start))
        continued = read_training_record(head)
        assert continued is not None and continued.is_little == is_little
    for broken in ("[]", "{", '{"steps": "many"}', '{"steps": 5, "config": 3}'):
        (head / "train.json").write_text(broken)
        assert read_training_record(head) is None


# ---- advice on speed ----


def test_ties_go_to_the_simpler_choice() -> None:
    cells = [
        *(make_cell("plain", 0, 1, 95, 105), make_cell("plain", 0, 16, 1000, 1040)),
        *(make_cell("ngram", 3, 1, 100, 120), make_cell("ngram", 3, 16, 950, 980)),
        *(make_cell("peagle", 3, 1, 188, 204), make_cell("peagle", 5, 1, 190, 210)),
        *(make_cell("peagle", 3, 16, 990, 1100), make_cell("peagle", 5, 16, 700, 800)),
    ]
    file = {"provenance": provenance("peagle bench"), "cells": cells}
    told = throughput_advice(ThroughputResults.model_validate(file))
    assert "take P-EAGLE with K = 3 at 1 together (K = 5 ties)" in told
    assert "plain decoding at 16 together (P-EAGLE with K = 3 ties)" in told
    file["training"] = {"peagle": TrainingRecord(steps=10, planned=10, tokens=100).to_json()}
    assert "P-EAGLE was trained too little" in throughput_advice(
        ThroughputResults.model_validate(file)
    )
    faster = [*cells, make_cell("ngram", 5, 1, 300, 310)]
    told = throughput_advice(ThroughputResults.model_validate(file | {"cells": faster}))
    assert "prompt lookup with K = 5 at 1 together" in told


def test_the_report_says_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(charts, "can_draw", lambda: False)
    entries = [entry("peagle", counts(30)), entry("old", counts(20))]
    data = {"format_version": 1, "provenance": provenance("peagle eval"), "entries": entries}
    found = [Entry.model_validate(one) for one in entries]
    data["comparisons"] = [one.to_json() for one in compare_entries(found)]
    write(tmp_path, acceptance=data)
    assert advice(*entries) in write_report(tmp_path).read_text()


LOADS, KS = (1, 4, 16), (2, 3, 5)


@pytest.fixture(autouse=True)
def _undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(charts, "can_draw", lambda: False)


def figures(speed: float) -> RunFigures:
    return RunFigures(output_tokens_per_s=speed, requests_per_s=1.0, acceptance_length=2.0)


def measured(rng: random.Random) -> dict[SweepPoint, list[RunFigures]]:
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


def at(k: int, median: float, least: float, most: float) -> Cell:
    median_speed, spread = {"output_tokens_per_s": median}, {"output_tokens_per_s": (least, most)}
    cell = {"method": "peagle", "k": k, "concurrency": 1, "median": median_speed, "spread": spread}
    return Cell.model_validate(cell)


@pytest.mark.parametrize(
    ("cells", "tied", "best"),
    [
        ([at(3, 108, 95, 109), at(5, 110, 103, 112), at(7, 107, 80, 104)], [3, 5, 7], 3),
        ([at(3, 108, 95, 102.9), at(5, 110, 103, 112), at(7, 107, 80, 102)], [5], 5),
        ([at(3, 106, 95, 109), at(5, 110, 103, 112)], [5], 5),
        ([at(7, 100, 100, 100), at(5, 100, 100, 100), at(3, 99, 99, 99)], [7, 5], 5),
    ],
)
def test_the_definition(cells: list[Cell], tied: list[int], best: int) -> None:
    assert [cell.k for cell in tied_fastest(cells)] == tied
    assert best_k_cell(cells).k == best


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
        fastest = max(own.values(), key=median)
        near = {k: runs for k, runs in own.items() if median(runs) >= 0.97 * median(fastest)}
        assert best[load] == min(k for k, runs in near.items() if max(runs) >= min(fastest)), load
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
    text = bench_text(result)
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
    table = page.split("a star marks that of the schedule")[-1].split("</table>")[0]
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


# ---- doubts ----


def swept(
    tmp_path: Path, speeds: dict[str, list[float]], length: float = 3.0, **more: list[Any]
) -> tuple[ThroughputResults, str]:
    """A sweep of one set with repeats of these speeds, and its page; `more` are other figures."""
    measured = {
        SweepPoint(method, "head" if k else "", "peagle", k, load, "humaneval"): [
            RunFigures(
                output_tokens_per_s=speed * load,
                acceptance_length=length if k else None,
                **{name: values[i] for name, values in more.items()},
            )
            for i, speed in enumerate(own)
        ]
        for load in (1, 4)
        for (method, k), own in zip((("plain", 0), ("peagle", 7)), speeds.values(), strict=True)
    }
    results = summarize(
        measured,
        None,
        provenance=provenance("peagle bench"),
        settings={"sets": {"humaneval": 4}, "objective": None},
    )
    (tmp_path / "throughput.json").write_text(json.dumps(results.to_json()))
    return results, write_report(tmp_path).read_text()


VERDICT = "writes <strong>"


def test_sound_repeats_are_a_headline(tmp_path: Path) -> None:
    results, page = swept(tmp_path, {"plain": [100, 101, 102], "peagle": [200, 210, 220]})
    assert not results.doubts and not any(cell.doubts for cell in results.cells)
    assert VERDICT in page and "take P-EAGLE with K = 7" in throughput_advice(results)
    assert "?" not in bench_text(results)


def test_repeats_far_apart_are_none(tmp_path: Path) -> None:
    """Of plain decoding too, with which the others are compared."""
    results, page = swept(tmp_path, {"plain": [60, 100, 111], "peagle": [200, 210, 220]})
    assert [bool(cell.doubts) for cell in results.cells] == [True, False, True, False]
    assert VERDICT not in page and "its repeats are 51% apart" in page
    advice = throughput_advice(results)
    assert advice == "At 1 and 4 together nothing is advised: see what is doubtful there."
    text = bench_text(results)
    assert "1.00?" in text and "doubtful (?): plain at 4 on humaneval: its repeats are 51%" in text


def test_a_speed_up_above_the_acceptance_length_is_flagged(tmp_path: Path) -> None:
    speeds = {"plain": [100.0], "peagle": [320.0]}
    results, page = swept(tmp_path, speeds, length=3.0)
    doubt = "its speed-up of 3.20 is above its acceptance length of 3.00"
    assert [cell.doubts for cell in results.cells] == [[], [doubt], [], [doubt]]
    assert doubt in page and VERDICT not in page
    results, _ = swept(tmp_path, speeds, length=3.19)
    assert not any(cell.doubts for cell in results.cells)


def test_sittings_under_other_loads_are_none(tmp_path: Path) -> None:
    speeds = {"plain": [100, 101], "peagle": [200, 201]}
    busy = {"sitting": [1, 2], "other_cores": [0.1, 1.2]}
    results, page = swept(tmp_path, speeds, **busy)
    (doubt,) = results.doubts
    assert "in 2 sittings, in which other programs kept 0.1 to 1.2 cores busy" in doubt
    assert VERDICT not in page and "No speed of this report is a result" in page
    assert throughput_advice(results) == f"No speed here is a result: {doubt}. Measure anew."
    assert f"doubtful (?): {doubt}" in bench_text(results)
    for alike in ({"sitting": [1, 2], "other_cores": [0.1, 0.3]}, {"sitting": [1, 2]}):
        assert not swept(tmp_path, speeds, **alike)[0].doubts
