"""What `peagle eval` shows: how far it is, and a table of each entry."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence

from peagle.cli.progress import ProgressLine
from peagle.cli.terminal import bright, printable
from peagle.results import Entry, EntryKey, Slice

_MOST_COLUMNS = 12
_LABEL = 18


class EvalView:
    """Progress on standard error; finished entries go to `show`.

    Args:
        show: is told of each entry.
    """

    def __init__(self, show: Callable[[Entry], None]) -> None:
        self._show = show
        self._line = ProgressLine("request")
        self._done = self._total = 0

    def begin(self, key: EntryKey, num_requests: int) -> None:
        """Say which entry is begun."""
        self._line = ProgressLine("request")
        self._line.begin(f"{printable(str(key))}: {num_requests} requests")
        self._done, self._total = 0, num_requests

    def advance(self) -> None:
        """Count a request."""
        self._done += 1
        self._line.update(self._done, self._total, "")

    def close(self) -> None:
        """Take the line away."""
        self._line.__exit__()

    def end(self, entry: Entry, *, was_there: bool) -> None:
        """Take the line away and pass the entry on."""
        self.close()
        if was_there:
            name = printable(f"{entry.method}, K={entry.k}, temperature {entry.temperature:g}")
            print(f"peagle: {name}: measured before", file=sys.stderr)
        self._show(entry)


def entry_text(entry: Entry, dtype: str, *, chat: bool) -> str:
    """An entry as a table: the figures of all prompts, and a line for every set and category.

    Args:
        entry: of acceptance.json.
        dtype: of the target, "" where nobody knows.
        chat: prompts went behind the chat template.
    """
    pooled = entry.pooled
    k = entry.k or "unknown"
    title = f"{entry.method}  K={k}  temperature {entry.temperature:g}"
    title += f", {entry.draft_sampling} drafts" if entry.temperature else ""
    prompts = "chat template" if chat else "plain prompts"
    server = "" if entry.engine == "peagle" else entry.engine
    where = "  ".join(filter(None, (dtype, prompts, entry.source, server)))
    lines = [bright(printable(title), sys.stdout) + printable(f"  {where}")]
    lines.append("  " + _summary(pooled))
    if pooled.acceptance_length is None:
        lines.append(f"  {entry.output_tokens_per_s:.1f} output tokens/s")
    lines += _positions(pooled)
    lines += _group_lines(entry.by_set, entry.by_category)
    lines += [printable(f"  note: {note}") for note in entry.notes]
    return "\n".join(lines)


def _summary(one: Slice) -> str:
    parts = [f"acceptance length {_length(one)}"]
    length, per_step = one.acceptance_length, one.tokens_per_step
    if length is not None and per_step is not None and abs(per_step - length) >= 0.005:
        parts.append(f"{per_step:.2f} tokens per step, those without a draft too")
    if one.loop_share:
        before = one.acceptance_length_before_loop
        shown = "" if before is None else f" (before that {before:.2f})"
        parts.append(f"{one.loop_share:.0%} of the outputs fall into a loop{shown}")
    parts.append(f"{one.num_requests} requests, {one.num_tokens:,} tokens")
    return "; ".join(parts)


def _length(one: Slice) -> str:
    if one.acceptance_length is None:
        return "unknown"
    if not one.num_drafts:
        return "1.00 (nothing was drafted)"
    interval = one.acceptance_length_ci
    shown = "" if interval is None else " [{:.2f}, {:.2f}]".format(*interval)
    return f"{one.acceptance_length:.2f}{shown}"


def _positions(pooled: Slice) -> list[str]:
    depth = min(len(pooled.unconditional), _MOST_COLUMNS)
    if not depth:
        return []
    lines = [f"  {'position':<{_LABEL}}" + "".join(f"{i + 1:>6}" for i in range(depth))]
    for name, shares, intervals in (
        ("unconditional", pooled.unconditional, pooled.unconditional_ci),
        ("conditional", pooled.conditional, pooled.conditional_ci),
    ):
        lines.append(_row(name, shares[:depth]))
        if intervals is not None:
            for side, label in enumerate(("  95% from", "  95% to")):
                ends = [None if one is None else one[side] for one in intervals[:depth]]
                lines.append(_row(label, ends))
    return lines


def _row(label: str, values: Sequence[float | None]) -> str:
    return f"  {label:<{_LABEL}}" + "".join(f"{_share(value):>6}" for value in values)


def _share(value: float | None) -> str:
    """Without the leading 0; - where nobody knows."""
    return "-" if value is None else f"{value:.2f}".removeprefix("0")


def _group_lines(by_set: Mapping[str, Slice], by_category: Mapping[str, Slice]) -> list[str]:
    """A line for each set where there are several, and for each category of those with several."""
    lines: list[str] = []
    for name, whole in by_set.items():
        own = [other for other in by_category if other.startswith(f"{name}/")]
        if len(by_set) > 1 or len(own) > 1:
            lines.append(_group_line(name, whole))
        if len(own) > 1:
            lines += [_group_line(other, by_category[other]) for other in sorted(own)]
    return lines


def _group_line(name: str, one: Slice) -> str:
    return f"  {printable(name):<32} {_length(one):<20} {one.num_requests:>6} requests"
