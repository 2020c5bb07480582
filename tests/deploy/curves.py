"""Files of `peagle bench` and `peagle tune`, for what is read of them."""

import json
from pathlib import Path

from peagle.evaluation.objective import LatencyObjective
from peagle.evaluation.sweep import SweepPoint
from peagle.evaluation.throughput import summarize
from peagle.results import RunFigures

# Concurrency -> tokens/s with drafts and without: the gain shrinks, and is none from 32 on.
DRAFTING = {1: 100, 2: 190, 4: 360, 8: 640, 16: 1000, 32: 1200, 64: 1250}
PLAIN = {1: 50, 2: 98, 4: 190, 8: 380, 16: 720, 32: 1300, 64: 2000}


def figures(concurrency: int, speed: float) -> RunFigures:
    """What a repeat of `peagle bench` measured: every request gets its share of the speed."""
    gap = concurrency / speed
    spread = {"p50": gap, "p90": 1.5 * gap, "p99": 3 * gap, "mean": gap}
    return RunFigures.model_validate(
        {
            "seconds": 10.0,
            "num_requests": 8,
            "num_tokens": 800,
            "output_tokens_per_s": float(speed),
            "requests_per_s": speed / 100,
            "ttft_s": {name: 10 * value for name, value in spread.items()},
            "itl_s": spread,
            "e2e_s": spread,
        }
    )


def throughput(path: Path, *, k: int = 7, objective: str | None = None, sets=("code",)) -> Path:
    """throughput.json, its tables made by `peagle bench`'s own code."""
    cells = {}
    for set_name in sets:
        for c, speed in DRAFTING.items():
            slower = 1 if set_name == "code" else 0.7
            cell = SweepPoint("peagle", "./head", "peagle", k, c, set_name)
            cells[cell] = [figures(c, speed * slower)]
        for c, speed in PLAIN.items():
            cells[SweepPoint("plain", "", "peagle", 0, c, set_name)] = [figures(c, speed)]
    bounds = LatencyObjective.parse(objective) if objective else None
    results = summarize(cells, bounds, provenance={"target": "t"}, settings={})
    path.write_text(json.dumps(results.to_json()))
    return path


def tune(path: Path) -> Path:
    """tune.json: measured at K = 7, and without drafts only predicted."""

    def one(batch: int, k: int, predicted: float, measured: float | None) -> dict:
        speeds = {"predicted_tokens_per_s": predicted, "measured_tokens_per_s": measured}
        return {"batch": batch, "k": k, "fitted": measured is None, **speeds}

    predictions = [one(b, 7, 1.2 * speed, speed) for b, speed in DRAFTING.items()]
    predictions += [one(b, 0, speed, None) for b, speed in PLAIN.items()]
    data = {"format_version": 1, "provenance": {"target": "t"}, "predictions": predictions}
    data |= {"best_single_k": 7, "schedule": []}
    path.write_text(json.dumps(data))
    return path
