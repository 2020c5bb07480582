"""Reports of a training run as text."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from peagle.cli.progress import ProgressLine, time_text

if TYPE_CHECKING:
    from peagle.training.reporting import TrainingReport

_MOST_COLUMNS = 8  # A validation then fits into 80 columns.
_LABEL = 27


class TrainView:
    """Prints a run: on its progress line and as text on standard output.

    Where the line is live and standard output is the same terminal, reports of training are on the
    line only, and validations are text above it.

    Args:
        progress: the line.
        steps: of the run.
    """

    def __init__(self, progress: ProgressLine, steps: int) -> None:
        self._progress, self._steps = progress, steps
        self._figures = ""

    def stepped(self, step: int) -> None:
        """Show the number of a finished step."""
        self._progress.update(step, self._steps, self._figures)

    def report(self, report: TrainingReport) -> None:
        """Show the figures of a report."""
        if report.kind == "train":
            self._figures = (
                f"loss {report.loss:.4f}  AL {report.acceptance_lengths[-1]:.2f}  "
                f"{report.tokens_per_s:,.0f} tokens/s"
            )
            self.stepped(report.step)
        if report.kind == "validation" or not (self._progress.is_live and sys.stdout.isatty()):
            print(progress_text(report), flush=True)


def progress_text(report: TrainingReport) -> str:
    """A report: one line of training, or the block of a validation."""
    head = f"{report.kind:<10} {report.step}/{report.steps}  loss {report.loss:.4f}"
    if report.kind == "validation":
        note = "  the best head so far" if report.is_best else ""
        return "\n".join([head + note, *_acceptance_rows(report)])
    lengths = report.acceptance_lengths
    accuracy = " ".join(_share(value) for value in report.accuracy)
    return (
        f"{head}  AL {lengths[-1]:.2f} (K={len(lengths)})  accuracy by depth {accuracy}  "
        f"{report.tokens_per_s:,.0f} tokens/s  {time_text(report.seconds_left)} left"
    )


def result_text(record: dict[str, Any], folder: str) -> str:
    """The text for the end of a run: why it stopped, and where its head is."""
    best, lines = record["best"], []
    if record["stop_reason"] == "patience":
        patience = record["config"]["run"]["patience"]
        lines.append(f"stopped at step {record['steps']}: no better head in {patience} validations")
    which = "head"
    if best is not None:
        how = f"temperature {best['temperature']:g}" if best["temperature"] else "greedy"
        which = (
            f"head of step {best['step']} (acceptance length {best['acceptance_length']:.2f} as "
            f"served, K={best['k']}, {how})"
        )
    lines.append(f"{which} written to {folder} after {record['seconds']:.0f} s")
    return "\n".join(lines)


def _acceptance_rows(report: TrainingReport) -> list[str]:
    """Simulated acceptance by K and by position, with a heading."""
    depth = len(report.acceptance_lengths)
    if not report.num_drafts:
        return [f"  no acceptance: every response is shorter than {depth + 2} tokens"]
    columns = chosen_columns(depth, _MOST_COLUMNS)
    at = f"T={report.temperature:g}" if report.temperature is not None else ""
    rows: list[tuple[str, Sequence[float | None], bool]] = [
        ("acceptance length, greedy", report.acceptance_lengths, False),
        (f"acceptance length, {at}", report.sampled_acceptance_lengths, False),
        ("unconditional, greedy", report.unconditional_acceptance_per_pos, True),
        (f"unconditional, {at}", report.sampled_unconditional_acceptance_per_pos, True),
        ("conditional, greedy", report.conditional_acceptance_per_pos, True),
        (f"conditional, {at}", report.sampled_conditional_acceptance_per_pos, True),
    ]
    heading = f"  {f'by K; by position of K={depth}':<{_LABEL}}"
    lines = [heading + "".join(f"{column + 1:>6}" for column in columns)]
    for label, values, shares in rows:
        if values:
            shown = (_share(values[i]) if shares else f"{values[i]:.2f}" for i in columns)
            lines.append(f"  {label:<{_LABEL}}" + "".join(f"{text:>6}" for text in shown))
    return lines


def _share(value: float | None) -> str:
    """A share without the leading 0; "-" where it is unknown."""
    return "-" if value is None else f"{value:.2f}".removeprefix("0")


def chosen_columns(count: int, most: int) -> list[int]:
    """Indices 0 to count - 1, or with more than `most`: 0, 1, 3, 7, ... and the last."""
    if count <= most:
        return list(range(count))
    powers = [2**i - 1 for i in range(count.bit_length()) if 2**i < count]
    return [*powers, count - 1]
