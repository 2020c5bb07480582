"""The reports of a run: figures since the last report, the file that keeps them, the best head."""

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peagle.data.batches import Batch
from peagle.disk import needing_room, sync
from peagle.errors import UserError
from peagle.models.checkpoint.files import replace_file
from peagle.training.acceptance import AnchorAcceptance, ServedAcceptance
from peagle.training.config import RunSection, TrainConfig
from peagle.training.distributed import Processes
from peagle.training.step import GradedElements


@dataclass(frozen=True, slots=True)
class TrainingReport:
    """Figures of a run since the last report.

    Fields that begin with "sampled" are at `temperature`, all other acceptance is greedy. Fields
    that end with "per_pos" are along the walk of serving at K = K_train (`training.acceptance`).

    Attributes:
        kind: "train" or "validation".
        step, steps: how far.
        loss: mean over graded elements.
        accuracy: per depth, P(draft matches). In training the target chooses among the draft
            vocabulary where the loss needs no more; in validation among all of its tokens.
        acceptance: per depth, P(all drafts down to it match), over all anchors.
        acceptance_lengths: simulated at K = 1, 2, ... up to the depth of the method; over all
            anchors in training, as serving would walk them in validation.
        learning_rate, tokens_per_s, seconds_left: state of the run; tokens_per_step: a mean.
        gradient_norm: training only; mean over the steps, before clipping.

    Validation only:
        is_best: this is the best head so far, by the figure that `run.select` names.
        num_drafts: drafts of the walk at K_train; none if every response is too short for one.
        unconditional_acceptance_per_pos: P(positions 1 to i all accepted).
        conditional_acceptance_per_pos: P(position i accepted | those before it); None where no
            draft got that far.
        acceptance_lengths_alone: `acceptance_lengths` of the head without its correction, where
            both are trained together.
        temperature: temperature of the sampled figures; None without them.
        sampled_acceptance_lengths, sampled_unconditional_acceptance_per_pos,
            sampled_conditional_acceptance_per_pos: the same at the temperature.
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
    gradient_norm: float | None = None
    is_best: bool = False
    num_drafts: int = 0
    unconditional_acceptance_per_pos: list[float] = field(default_factory=list)
    conditional_acceptance_per_pos: list[float | None] = field(default_factory=list)
    acceptance_lengths_alone: list[float] = field(default_factory=list)
    temperature: float | None = None
    sampled_acceptance_lengths: list[float] = field(default_factory=list)
    sampled_unconditional_acceptance_per_pos: list[float] = field(default_factory=list)
    sampled_conditional_acceptance_per_pos: list[float | None] = field(default_factory=list)


class Window:
    """Figures of training since the last report; nothing waits for the device before a read."""

    def __init__(self, num_depths: int, device: torch.device) -> None:
        self.anchors = AnchorAcceptance(num_depths, device)
        self.num_tokens = 0
        self._losses: list[Tensor] = []
        self._norms: list[Tensor] = []
        self._started = time.perf_counter()

    def add(
        self, outcome: GradedElements, batch: Batch, gradient_norm: Tensor | None = None
    ) -> None:
        """Add the loss, the gradient norm and the counts of a batch."""
        self._losses.append(outcome.loss)
        if gradient_norm is not None:
            self._norms.append(gradient_norm)
        self.num_tokens += batch.num_tokens
        shape = batch.tokens_BN.shape
        self.anchors.add(outcome.row, outcome.anchor, outcome.depth, outcome.match, shape)

    @property
    def num_batches(self) -> int:
        """Return the number of batches added."""
        return len(self._losses)

    def broken(self) -> tuple[int, str, float] | None:
        """Return the first batch with a loss or gradient norm that is not finite.

        Its index, the name of the figure, and the value. Waits for the device.
        """
        for what, values in (("loss", self._losses), ("gradient norm", self._norms)):
            found = torch.stack(values).float() if values else torch.empty(0)
            bad = (~found.isfinite()).nonzero()
            if len(bad):
                return int(bad[0]), what, float(found[bad[0]])
        return None

    def pool(self, processes: Processes) -> None:
        """Add the other processes' counts, once; losses and norms are of all processes already."""
        processes.sum(self.anchors.counters)
        self.num_tokens = int(processes.sum(torch.tensor(self.num_tokens)))

    def figures(self) -> dict[str, Any]:
        """Return the figures, by the names of the report's fields."""
        anchors = self.anchors
        norms = float(torch.stack(self._norms).mean()) if self._norms else None
        return {
            "loss": float(torch.stack(self._losses).mean()),
            "accuracy": anchors.accuracy(),
            "acceptance": anchors.unconditional(),
            "acceptance_lengths": [
                anchors.acceptance_length(k) for k in range(1, anchors.num_depths + 1)
            ],
            "tokens_per_s": self.num_tokens / (time.perf_counter() - self._started),
            "gradient_norm": norms,
        }


class ValidationWindow(Window):
    """Figures of a validation, which has one sequence a row and all of its elements.

    A temperature of 0 leaves out the sampled figures.
    """

    def __init__(self, num_depths: int, device: torch.device, temperature: float) -> None:
        super().__init__(num_depths, device)
        self.temperature = temperature
        self.greedy = ServedAcceptance(num_depths)
        self.alone = ServedAcceptance(num_depths)
        self.sampled = ServedAcceptance(num_depths)

    def add(
        self, outcome: GradedElements, batch: Batch, gradient_norm: Tensor | None = None
    ) -> None:
        """Add a batch, and the acceptance along its walks."""
        super().add(outcome, batch, gradient_norm)
        which, shape = (outcome.row, outcome.anchor, outcome.depth), batch.tokens_BN.shape
        self.greedy.add(*which, outcome.match, outcome.match, shape)
        if (alone := outcome.match_alone) is not None:
            self.alone.add(*which, alone, alone, shape)
        if outcome.follows is not None and outcome.chance is not None:
            self.sampled.add(*which, outcome.follows, outcome.chance, shape)

    def pool(self, processes: Processes) -> None:
        """Add the other processes' counts and losses, since those are of other batches."""
        super().pool(processes)
        processes.sum(self.greedy.counters)
        processes.sum(self.alone.counters)
        processes.sum(self.sampled.counters)
        losses = torch.tensor([float(sum(self._losses)), len(self._losses)], dtype=torch.float64)
        total, count = processes.sum(losses)
        self._losses = [total / count]

    def figures(self) -> dict[str, Any]:
        """Return the figures, by the names of the report's fields."""
        k = self.greedy.num_depths
        figures = super().figures() | {
            "num_drafts": self.greedy.num_drafts(k),
            "acceptance_lengths": self.greedy.acceptance_lengths(),
            "unconditional_acceptance_per_pos": self.greedy.unconditional(k),
            "conditional_acceptance_per_pos": self.greedy.conditional(k),
        }
        if self.alone.num_drafts(k):
            figures |= {"acceptance_lengths_alone": self.alone.acceptance_lengths()}
        if not self.temperature:
            return figures
        return figures | {
            "temperature": self.temperature,
            "sampled_acceptance_lengths": self.sampled.acceptance_lengths(),
            "sampled_unconditional_acceptance_per_pos": self.sampled.unconditional(k),
            "sampled_conditional_acceptance_per_pos": self.sampled.conditional(k),
        }


def require_finite(window: Window, step: int, config: TrainConfig) -> None:
    """Stop a run whose weights a loss or gradient without a value has spoilt.

    Waits for the device. `step` counts the steps of the window.

    Raises:
        UserError: naming the step, and what to do.
    """
    if (broken := window.broken()) is None:
        return
    index, what, value = broken
    where = f"step {step - window.num_batches + index + 1} of {config.optimizer.steps}"
    if isinstance(window, ValidationWindow):
        where = f"the validation after step {step}"
    checkpoint = config.output / "checkpoint"
    raise UserError(
        f"The {what} is {value} at {where}. Lower optimizer.learning_rate "
        f"({config.optimizer.learning_rate:g}), warm up longer (optimizer.warmup_ratio "
        f"{config.optimizer.warmup_ratio:g}) or look at the data, and start anew in another output "
        f"folder."
        + (f" The checkpoint {str(checkpoint)!r} is from before." if checkpoint.exists() else "")
    )


class History:
    """The reports of a run: in memory, and in metrics.jsonl of its output folder, one a line.

    Of several processes one writes the file.

    Attributes:
        earlier: the reports of the run that this one resumes.
        entries: the reports of this process.
    """

    def __init__(self, folder: Path, *, write: bool = True) -> None:
        self._writes = write
        self._file = folder / "metrics.jsonl"
        self.earlier: list[dict[str, Any]] = []
        self.entries: list[dict[str, Any]] = []

    def begin(self, step: int) -> None:
        """Start at a step; drop later reports, which this run will make again."""
        self.earlier = []
        if self._file.is_file():
            found = (_entry(line) for line in self._file.read_text(encoding="utf-8").splitlines())
            self.earlier = [entry for entry in found if entry and entry["step"] <= step]
        if self._writes:
            lines = "".join(json.dumps(entry) + "\n" for entry in self.earlier)
            replace_file(self._file, lines.encode())

    def add(self, report: TrainingReport) -> None:
        self.entries.append(asdict(report))
        if self._writes:
            advice = "The last checkpoint stays. Make room, then go on with --resume."
            with needing_room(self._file, advice), self._file.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(self.entries[-1]) + "\n")

    def sync(self) -> None:
        """Wait until the file's lines are on the disk."""
        if self._writes and self._file.is_file():
            sync(self._file)

    def every(self, kind: str | None = None) -> list[dict[str, Any]]:
        """Return all reports of the run, of a kind, in order."""
        return [e for e in (*self.earlier, *self.entries) if kind in (None, e["kind"])]

    def last(self, kind: str | None = None) -> dict[str, Any] | None:
        """Return the last report, or the last of a kind; None without one."""
        return next(iter(reversed(self.every(kind))), None)


def _entry(line: str) -> dict[str, Any] | None:
    """Return a line of metrics.jsonl; None where the process died while writing it."""
    try:
        entry = json.loads(line)
    except json.JSONDecodeError:
        return None
    return entry if isinstance(entry, dict) and {"kind", "step"} <= entry.keys() else None


# ---- the best head ----


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
        """Take in a validation, and return whether its head is the best so far.

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
        """Return whether `run.patience` validations in a row brought no better head."""
        return self.patience is not None and self.stale >= self.patience

    def to_json(self) -> dict[str, Any]:
        """Return the selection's state for the checkpoint."""
        return {"best": self.best, "stale": self.stale}

    def restore(self, data: dict[str, Any]) -> None:
        """Take the state of `to_json`; a best head by another figure is forgotten."""
        best = data.get("best")
        figure = {"k": self.k, "select": self.select, "temperature": self.temperature}
        if best and figure.items() <= best.items():
            self.best, self.stale = best, data["stale"]
