"""What `peagle tune` shows: how far it is, and its tables."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from peagle.cli.progress import ProgressLine
from peagle.cli.terminal import bright, printable
from peagle.evaluation.tuning.schedule import k_at

if TYPE_CHECKING:
    from peagle.evaluation.tuning.machine import CostPoint
    from peagle.results import BreakEven, Prediction, TunedAcceptance, TuneResults

_MOST_COLUMNS = 10
NOISY = 0.15


class TuneView:
    """Tells on standard error how far it is.

    Args:
        total: visits to cells.
    """

    def __init__(self, total: int) -> None:
        self._total, self._done = total, 0
        self._line = ProgressLine("cost")

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self._line.print(text)

    def visited(self, cell: CostPoint, was_there: bool) -> None:
        """Count a visit."""
        self._done += 1
        text = f"batch {cell.batch}, K = {cell.k}{', measured before' if was_there else ''}"
        line = f"cost {self._done}/{self._total}  {text}"
        self._line.update(self._done, self._total, text, line=line)

    def close(self) -> None:
        """Take the line away."""
        self._line.__exit__()


def result_text(result: TuneResults) -> str:
    """tune.json as text: the tables of speed and break-even, the check, the schedule."""
    settings, told = result.settings, result.provenance
    title = f"{told.target} with {settings['draft']}, {told.dtype}, "
    title += f"{told.environment['device']}, context {settings['context']}, "
    title += f"temperature {settings['temperature']:g}"
    return "\n".join(
        [
            bright(printable(title), sys.stdout),
            "",
            *_acceptance(result.acceptance),
            "",
            *_speeds(result),
            *_check(result),
            "",
            *_break_even(result),
            "",
            *_schedule(result),
        ]
    )


def _acceptance(acceptance: TunedAcceptance) -> list[str]:
    lengths = acceptance.acceptance_length
    measured = ", ".join(map(str, acceptance.measured_k))
    where = "measured here" if acceptance.source == "measured" else "of acceptance.json"
    return [
        f"Acceptance length by K ({where} at K = {measured}, else interpolated)",
        *_table(
            "K", {"": [f"{length:.2f}" for length in lengths.values()]}, list(map(str, lengths))
        ),
    ]


def _speeds(result: TuneResults) -> list[str]:
    speeds = result.predictions
    batches, ks = _axes(speeds)
    at = {(one.batch, one.k): one for one in speeds}
    rows = {}
    for batch in batches:
        measured = {k: (at[batch, k].measured_tokens_per_s or 0.0) for k in ks}
        chosen = k_at(result.schedule, batch)
        rows[str(batch)] = [f"{measured[k]:,.0f}{'*' if k == chosen else ' '}" for k in ks]
    heading = "Tokens/s by batch size and K, from measured steps (* K of the schedule below)"
    return [heading, *_table("batch", rows, [f"{k} " for k in ks])]


def _check(result: TuneResults) -> list[str]:
    check, spread = result.check, result.costs.spread or 0.0
    lines = ["No cell was left to check the predictions on."]
    if check.num_unfitted:
        fitted = len(result.predictions) - check.num_unfitted
        lines = [
            f"Predicted from {fitted} of these cells, {check.within_10_percent} of the other "
            f"{check.num_unfitted} are within 10% ({check.share:.0%}), the worst is off by "
            f"{check.worst:.0%}."
        ]
    if spread > NOISY:
        lines.append(
            f"The machine was busy: a usual visit took {spread:.0%} longer than the fastest. Raise "
            "--rounds."
        )
    return lines


def _break_even(result: TuneResults) -> list[str]:
    batches, ks = _axes(result.break_even)
    at = {(one.batch, one.k): one.acceptance_length for one in result.break_even}
    rows = {str(batch): [f"{at[batch, k]:.2f}" for k in ks] for batch in batches}
    heading = "Acceptance length from which drafting is faster than not drafting"
    return [heading, *_table("batch", rows, [str(k) for k in ks])]


def _schedule(result: TuneResults) -> list[str]:
    lines = [f"K by batch size (K changes where that gains more than {result.threshold:.0%})"]
    for first, last, k in result.schedule:
        sizes = str(first) if first == last else f"{first} to {last}"
        lines.append(f"  {sizes:>9}  K = {k}{'' if k else ' (no drafts)'}")
    configs = result.speculative_config
    ours, theirs = configs["peagle"], configs["vllm"]
    if ours is None or theirs is None:
        return [*lines, "", "Drafts do not pay here at any batch size: serve without a head."]
    lines += ["", "For --speculative-config of peagle serve:", f"  '{_json(ours)}'"]
    lines += ["The same for vLLM:", f"  '{_json(theirs)}'"]
    if len(result.schedule) == 1 or "parallel_drafting" not in theirs:
        return lines
    lines.append("vLLM up to 0.32 crashes on a schedule with parallel drafting; the best single K:")
    single = configs["vllm_single_k"]
    return [*lines, "  0: leave the head out" if single is None else f"  '{_json(single)}'"]


def _json(config: Mapping[str, Any]) -> str:
    return printable(json.dumps(config))


def _axes(cells: Sequence[Prediction | BreakEven]) -> tuple[list[int], list[int]]:
    return sorted({one.batch for one in cells}), sorted({one.k for one in cells})


def _table(corner: str, rows: Mapping[str, Sequence[str]], columns: Sequence[str]) -> list[str]:
    """Lines of a table, cut into pieces of so many columns."""
    lines = []
    for start in range(0, len(columns), _MOST_COLUMNS):
        part = slice(start, start + _MOST_COLUMNS)
        lines.append(f"  {corner:>6}" + "".join(f"{one:>9}" for one in columns[part]))
        lines += [
            f"  {name:>6}" + "".join(f"{value:>9}" for value in values[part])
            for name, values in rows.items()
        ]
    return lines
