"""The best head of a run, and when to stop waiting for a better one."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from peagle.training.config import RunSection
from peagle.training.reporting import TrainingReport


class Selection:
    """Follows the validations of a run.

    The figure is the simulated acceptance length of serving, at `run.select_k`, greedy or at the
    validation's temperature as `run.select` says. Of equal ones the lower loss is better.

    Attributes:
        best: step, k, select ("greedy" or "sampled"), temperature, acceptance_length and the whole
            validation of the best head; None before the first.
        stale: validations since then.
    """

    def __init__(self, run: RunSection, depth: int) -> None:
        self.k = run.select_k or depth
        self.select = run.select
        self.temperature = run.validation_temperature if run.select == "sampled" else 0.0
        self.patience = run.patience
        self.best: dict[str, Any] | None = None
        self.stale = 0

    def consider(self, report: TrainingReport) -> bool:
        """Whether the head of a validation is the best so far.

        It always is where nothing could be walked: every response is too short.
        """
        sampled = self.select == "sampled"
        lengths = report.sampled_acceptance_lengths if sampled else report.acceptance_lengths
        found = lengths[self.k - 1]
        if self.best is not None and report.num_drafts:
            best = self.best["acceptance_length"], -self.best["validation"]["loss"]
            if (found, -report.loss) <= best:
                self.stale += 1
                return False
        self.stale = 0
        self.best = {
            "step": report.step,
            "k": self.k,
            "select": self.select,
            "temperature": self.temperature,
            "acceptance_length": found,
            "validation": asdict(report) | {"is_best": True},
        }
        return True

    @property
    def exhausted(self) -> bool:
        """`run.patience` validations in a row brought no better head."""
        return self.patience is not None and self.stale >= self.patience

    def to_json(self) -> dict[str, Any]:
        """For the checkpoint."""
        return {"best": self.best, "stale": self.stale}

    def restore(self, data: dict[str, Any]) -> None:
        """Take what `to_json` gave; a best head by another figure is forgotten."""
        best = data.get("best")
        figure = {"k": self.k, "select": self.select, "temperature": self.temperature}
        if best and figure.items() <= best.items():
            self.best, self.stale = best, data["stale"]
