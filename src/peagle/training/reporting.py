"""What a run says while it goes on: figures since the last report, and the records of all."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from peagle.training.losses import AcceptanceMeter
from peagle.training.step import Outcome


@dataclass(frozen=True, slots=True)
class Report:
    """What the trainer says while it runs.

    Attributes:
        kind: "train" or "validation".
        step, steps: how far.
        loss: mean over graded elements.
        accuracy: per depth, P(draft matches). In training the target chooses among the draft
            vocabulary where the loss needs no more; in validation among all of its tokens.
        acceptance: per depth, P(all drafts down to it match).
        acceptance_lengths: simulated, greedy, at K = 1, 2, ... up to the depth of the method; over
            all anchors in training, as serving would walk them in validation.
        learning_rate, tokens_per_s, seconds_left: of the run; tokens_per_step: mean of the data.
    """

    kind: str
    step: int
    steps: int
    loss: float
    accuracy: list[float]
    acceptance: list[float]
    acceptance_lengths: list[float]
    learning_rate: float
    tokens_per_s: float
    tokens_per_step: float
    seconds_left: float


class Window:
    """Figures since the last report; nothing waits for the device before they are read.

    Args:
        num_depths: K_train.
        device: of what is added.
        walk: acceptance as serving would walk the responses (validation).
    """

    def __init__(self, num_depths: int, device: torch.device, *, walk: bool = False) -> None:
        self.walk = walk
        self.meter = AcceptanceMeter(num_depths, device, walk=walk)
        self._losses: list[torch.Tensor] = []
        self._num_tokens = 0
        self._started = time.perf_counter()

    def add(self, outcome: Outcome, num_tokens: int) -> None:
        """Pool a batch."""
        self._losses.append(outcome.loss)
        self._num_tokens += num_tokens
        self.meter.add(outcome.row, outcome.anchor, outcome.depth, outcome.match)

    def acceptance_lengths(self) -> list[float]:
        """At K = 1, 2, ... K_train."""
        meter = self.meter
        at = meter.served_acceptance_length if self.walk else meter.acceptance_length
        return [at(k) for k in range(1, meter.num_depths + 1)]

    def loss(self) -> float:
        """Mean over the batches."""
        return float(torch.stack(self._losses).mean()) if self._losses else float("nan")

    def tokens_per_s(self) -> float:
        """Tokens of the data, without padding."""
        return self._num_tokens / (time.perf_counter() - self._started)


class History:
    """The reports of a run, in memory and as lines of metrics.jsonl.

    Args:
        folder: the run's output.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / "metrics.jsonl"
        self.entries: list[dict[str, Any]] = []

    def add(self, report: Report) -> None:
        """Keep a report."""
        self.entries.append(asdict(report))
        with self._file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(self.entries[-1]) + "\n")

    def last(self, kind: str | None = None) -> dict[str, Any] | None:
        """The last report, of a kind."""
        chosen = [entry for entry in self.entries if kind in (None, entry["kind"])]
        return chosen[-1] if chosen else None
