"""Event files for TensorBoard (the `train` extra)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from peagle.errors import UserError
from peagle.extras import install_extra
from peagle.training.reporting import Report

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter


class Board:
    """Writes the figures of reports as scalars, one tag each.

    Args:
        folder: receives the event files.

    Raises:
        UserError: TensorBoard is not installed.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError as error:
            raise UserError(
                f"run.tensorboard needs the package tensorboard, which cannot be imported "
                f"({error}): {install_extra('train')}, or leave it out; metrics.jsonl and "
                "curves.png have the same figures."
            ) from None
        self._make: type[SummaryWriter] = SummaryWriter
        self._folder = folder
        self._writer: SummaryWriter | None = None

    def begin(self, step: int) -> None:
        """Go on from a step: what earlier files hold beyond it is no longer shown."""
        self._writer = self._make(str(self._folder), purge_step=step + 1)

    def add(self, report: Report) -> None:
        """Write a report."""
        if self._writer is None:
            return
        for tag, value in scalars(report).items():
            self._writer.add_scalar(f"{report.kind}/{tag}", value, report.step)
        self._writer.flush()

    def close(self) -> None:
        """End the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def scalars(report: Report) -> dict[str, float]:
    """The figures of a report by tag; what is not known is left out."""
    validates = report.kind == "validation"
    values: dict[str, Any] = {"loss": report.loss}
    if not validates:
        values |= {
            "learning_rate": report.learning_rate,
            "gradient_norm": report.gradient_norm,
            "tokens_per_s": report.tokens_per_s,
        }
    values |= _numbered("accuracy/depth", report.accuracy, first=0)
    values |= _numbered("acceptance_length/K", report.acceptance_lengths)
    values |= _numbered("sampled_acceptance_length/K", report.sampled_acceptance_lengths)
    for name in ("unconditional", "conditional"):
        for prefix in ("", "sampled_"):
            per_pos = getattr(report, f"{prefix}{name}_acceptance_per_pos")
            values |= _numbered(f"{prefix}{name}_acceptance/position", per_pos)
    return {tag: float(value) for tag, value in values.items() if value is not None}


def _numbered(tag: str, values: list[Any], first: int = 1) -> dict[str, Any]:
    # Two digits, so that TensorBoard, which sorts by text, shows them in order.
    return {f"{tag}_{number:02d}": value for number, value in enumerate(values, start=first)}
