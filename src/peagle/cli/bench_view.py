"""What a benchmark shows: how far it is, and its tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from peagle.cli.progress import ProgressLine
from peagle.cli.terminal import printable

if TYPE_CHECKING:
    from peagle.evaluation.sweep import SweepProgress
    from peagle.results import BestK, Cell, ThroughputResults


class Ticker:
    """Tells on standard error how far a sweep is, and the first request that failed."""

    def __init__(self) -> None:
        self._line = ProgressLine("run")
        self._has_problem = False

    def __call__(self, progress: SweepProgress) -> None:
        if progress.problem and not self._has_problem:
            self._has_problem = True
            self._line.print(f"a request failed: {printable(progress.problem)}")
        if progress.point is None or progress.figures is None:
            self._line.begin(f"warming up; {progress.done} of {progress.total} runs are there")
            return
        text = f"{progress.point}: {progress.figures.output_tokens_per_s:.1f} tokens/s"
        line = f"run {progress.done}/{progress.total}  {text}"
        self._line.update(progress.done, progress.total, text, line=line)

    def close(self) -> None:
        """Take the line away."""
        self._line.__exit__()


def result_text(result: ThroughputResults) -> str:
    """The tables of a sweep."""
    cells = result.cells
    blocks: list[str] = []
    for name in dict.fromkeys(cell.set for cell in cells):
        own = [cell for cell in cells if cell.set == name]
        repeats = len(own[0].repeats)
        of = f"medians of {repeats} runs" if repeats > 1 else "one run"
        blocks.append(f"{name}, {result.settings['sets'][name]} prompts, {of}")
        blocks.append(_table(_HEADER, [_row(cell) for cell in own]))
    blocks += _verdicts(result)
    blocks.append(f"Advice: {printable(result.advice)}")
    return "\n".join(blocks)


_HEADER = (
    *("method", "K", "c", "tokens/s", "least-most", "x plain", "x eagle3", "AL", "TTFT p50"),
    *("p99", "ITL p50", "p99 ms", "req/s", "linear", "GPU", "errors"),
)


def _row(cell: Cell) -> list[str]:
    median = cell.median
    speed = median.output_tokens_per_s
    least, most = cell.spread.output_tokens_per_s or (speed, speed)
    return [
        cell.method,
        str(cell.k or "-"),
        str(cell.concurrency),
        f"{speed:.1f}",
        f"{least:.0f}-{most:.0f}",
        _number(cell.speed_up_over_plain),
        _number(cell.speed_up_over_eagle3),
        _number(median.acceptance_length),
        _ms(median.ttft_s.p50),
        _ms(median.ttft_s.p99),
        _ms(median.itl_s.p50),
        _ms(median.itl_s.p99),
        _number(median.requests_per_s),
        _number(cell.linearity),
        _share(median.gpu_busy),
        f"{median.errors:g}" if any(one.errors for one in cell.repeats) else "",
    ]


def _verdicts(result: ThroughputResults) -> list[str]:
    """The best K of each method by load, and the goodput."""
    lines: list[str] = []
    keys = dict.fromkeys((one.method, one.set) for one in result.best_k)
    for method, name in keys:
        own = [one for one in result.best_k if (one.method, one.set) == (method, name)]
        tried = {one.k for one in result.cells if one.method == method}
        if len(tried) < 2:
            continue
        best = ", ".join(f"{one.k} at {one.concurrency}{_ties(one)}" for one in own)
        lines.append(f"best K of {method} on {name}, by concurrency: {best}")
    if result.settings["objective"] is not None:
        kept = sorted(result.goodput, key=lambda one: -(one.requests_per_s or 0.0))
        for one in kept:
            k = f" K={one.k}" if one.k else ""
            lines.append(
                f"goodput of {one.method}{k} on {one.set}: {one.requests_per_s or 0.0:.2f} "
                f"requests/s at concurrency {one.concurrency}"
            )
        if not kept:
            lines.append("no method keeps the objective at any concurrency")
    return lines


def _ties(best: BestK) -> str:
    """The larger K that are not faster than the best one, beyond the spread of the repeats."""
    others = [str(k) for k in best.tied_k if k != best.k]
    return f" (tied: {', '.join(others)})" if others else ""


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows under their headings, names to the left, numbers to the right; empty columns go."""
    columns = [i for i in range(len(header)) if any(row[i] not in ("", "-") for row in rows)]
    every = [[row[i] for i in columns] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*every)]
    lines = (
        "  ".join(
            text.ljust(width) if number == 0 else text.rjust(width)
            for number, (text, width) in enumerate(zip(row, widths))
        )
        for row in every
    )
    return "\n".join(f"  {line.rstrip()}" for line in lines)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
