"""A progress line on standard error for long commands."""

import sys
import time
from collections import deque
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.table import Column
from rich.text import Text

from peagle.cli.terminal import printable

_LINE_SECONDS = 5.0


class ProgressLine:
    """A context manager that shows the progress of a command.

    On a terminal one line is redrawn in place and cut at the terminal's width: the name of a phase
    with a moving bar and its seconds, or a count with a bar, figures and the time left. Elsewhere
    each phase is a line of text, and counts are occasional lines.
    """

    def __init__(self, unit: str, *, quiet: bool = False, console: Console | None = None) -> None:
        self._unit, self._quiet = unit, quiet
        console = console or Console(stderr=True, highlight=False)
        self.is_live = not quiet and console.is_terminal and not console.is_dumb_terminal
        self._bar = Progress(
            TextColumn("{task.description}", markup=False, table_column=_one_line()),
            BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=4)),
            _Figures(table_column=_one_line()),
            console=console,
            expand=True,
            transient=True,
            redirect_stdout=sys.stdout.isatty(),
        )
        self._task: TaskID | None = None
        self._begun = time.monotonic()
        self._counts: deque[tuple[float, int]] = deque()  # of the last half of the time
        self._printed = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self.is_live:
            self._bar.stop()

    def begin(self, phase: str) -> None:
        """Show the name of a phase of unknown length."""
        if self.is_live:
            self._show(printable(phase), None, 0, "")
        else:
            self.print(phase)

    def update(self, done: int, total: int, figures: str, *, line: str | None = None) -> None:
        """Show a count with figures, and the time left at the pace of the last half of the time.

        A pace that falls, as of prompts of which ever more repeat earlier ones, is soon seen.
        """
        left = self._time_left(done, total)
        if self.is_live:
            figures = "  ".join(filter(None, (figures, left)))
            self._show(f"{self._unit} {done}/{total}", total, done, figures)
        elif line and time.monotonic() - self._printed >= _LINE_SECONDS:
            self._printed = time.monotonic()
            self.print("; ".join(filter(None, (line, left))))

    def print(self, text: str) -> None:
        """Print lines that stay, above the progress line."""
        if self.is_live:
            self._bar.console.print(text, markup=False, soft_wrap=True)
        elif not self._quiet:
            print(f"peagle: {text}", file=sys.stderr, flush=True)

    def _show(self, text: str, total: int | None, done: int, figures: str) -> None:
        """Draw the line; a total of None makes the bar move back and forth."""
        if self._task is None or total is None:
            # A task cannot lose its total, so a phase is a new task.
            if self._task is not None:
                self._bar.remove_task(self._task)
            self._task = self._bar.add_task(text, total=total, figures="")
            self._bar.start()
        self._bar.update(self._task, description=text, total=total, completed=done, figures=figures)

    def _time_left(self, done: int, total: int) -> str:
        now, counts = time.monotonic(), self._counts
        if not counts:
            self._begun = now
        if not counts or done != counts[-1][1]:
            counts.append((now, done))
        while len(counts) > 1 and counts[1][0] <= (self._begun + now) / 2:
            counts.popleft()
        since, first = counts[0]
        if done <= first:
            return ""
        return f"{time_text((now - since) / (done - first) * (total - done))} left"


class _Figures(ProgressColumn):
    """A column with the figures of a count, or the seconds of a phase."""

    max_refresh = None

    def render(self, task: Task) -> Text:
        return Text(task.fields["figures"] if task.total else time_text(task.elapsed or 0))


def time_text(seconds: float) -> str:
    """Return a duration as 2:05 (minutes and seconds), or 1:02:05 from an hour on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _one_line() -> Column:
    return Column(no_wrap=True, overflow="ellipsis")
