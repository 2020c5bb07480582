"""The curves of a run as a picture (matplotlib, the `report` extra)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Blue and orange of Okabe and Ito (2008), told apart by colour-blind readers.
_TRAIN, _VALIDATION = "#0072B2", "#E69F00"
# How much of the colour map (cividis, for colour-blind readers too) is dark enough on white.
_LIGHTEST = 0.88
_MARKERS = "osD^vP*X"
_MOST_LINES = 8
# Markers on more points than these would be a band.
_FEW = 40

Entry = dict[str, Any]


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def draw_curves(entries: Sequence[Entry], path: Path, best: Entry | None = None) -> bool:
    """Draw loss, accuracy by depth, and simulated acceptance length by K over the steps.

    Accuracy is validation's, or training's where there is none; so is acceptance.

    Args:
        entries: reports as metrics.jsonl has them.
        path: the PNG, which appears whole or not at all.
        best: `Selection.best`, marked by a line.

    Returns:
        whether it was drawn: not without matplotlib, entries, or room on the disk, none of which
        is worth a run.
    """
    if not entries or not can_draw():
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    train = [e for e in entries if e["kind"] == "train"]
    validation = [e for e in entries if e["kind"] == "validation"]
    graded = validation or train
    sampled = [e for e in validation if e.get("sampled_acceptance_lengths")]
    figure = Figure(figsize=(13, 8), dpi=110, layout="constrained")
    axes = figure.subplots(2, 2, sharex=True)
    figure.get_layout_engine().set(h_pad=0.12, w_pad=0.08)  # type: ignore[union-attr]
    where, walked = "training", "over all anchors of training"
    if validation:
        where, walked = "validation", "as served"
    _draw_losses(axes[0, 0], train, validation)
    _draw_family(axes[0, 1], graded, "accuracy", "depth {}", first=0)
    axes[0, 1].set(title=f"Accuracy of the drafts, greedy ({where})", ylabel="share that match")
    axes[0, 1].set_ylim(0, 1)
    _draw_family(axes[1, 0], graded, "acceptance_lengths", "K = {}")
    axes[1, 0].set(title=f"Acceptance length, greedy ({walked})")
    if sampled:
        _draw_family(axes[1, 1], sampled, "sampled_acceptance_lengths", "K = {}")
        temperature = sampled[-1]["temperature"]
        axes[1, 1].set(title=f"Acceptance length at temperature {temperature:g} ({walked})")
        axes[1, 1].sharey(axes[1, 0])
    else:
        axes[1, 1].set_axis_off()
    for axis in axes[1, : 1 + bool(sampled)]:
        axis.set_ylabel("1 + accepted tokens / drafts")
        axis.set_ylim(bottom=1)
    for axis in axes.flat[: 3 + bool(sampled)]:
        _finish(axis, best)
    try:
        temporary = path.with_name(path.name + ".part")
        FigureCanvasAgg(figure).print_figure(temporary, format="png")
        os.replace(temporary, path)
    except OSError:
        return False
    return True


def _draw_losses(axis: Axes, train: Sequence[Entry], validation: Sequence[Entry]) -> None:
    axis.set(title="Loss", ylabel="mean over elements")
    for name, entries, color, marker in (
        ("training", train, _TRAIN, "o" if len(train) <= _FEW else ""),
        ("validation", validation, _VALIDATION, "s"),
    ):
        if entries:
            steps, losses = [e["step"] for e in entries], [e["loss"] for e in entries]
            axis.plot(steps, losses, color=color, marker=marker, markersize=4, label=name)


def _draw_family(
    axis: Axes, entries: Sequence[Entry], key: str, label: str, *, first: int = 1
) -> None:
    """A line for each number of the list at `key`, or for some of many."""
    from matplotlib import colormaps

    steps = [e["step"] for e in entries]
    numbers = shown_numbers(len(entries[-1][key]), _MOST_LINES)
    for place, index in enumerate(numbers):
        share = place / max(1, len(numbers) - 1)
        axis.plot(
            steps,
            [e[key][index] for e in entries],
            color=colormaps["cividis"](share * _LIGHTEST),
            marker=_MARKERS[place] if len(entries) <= _FEW else "",
            markersize=5,
            linewidth=1.4,
            label=label.format(first + index),
        )


def _finish(axis: Axes, best: Entry | None) -> None:
    axis.set_xlabel("optimizer step")
    axis.set_xlim(left=0)
    axis.xaxis.get_major_locator().set_params(integer=True)  # type: ignore[call-arg]
    axis.tick_params(labelbottom=True)
    axis.grid(alpha=0.3)
    handles, labels = axis.get_legend_handles_labels()
    if axis.get_title().startswith("Acceptance"):  # the largest K is the highest line
        handles, labels = handles[::-1], labels[::-1]
    if best is not None:
        line = axis.axvline(best["step"], color="black", linestyle=":", linewidth=1.2)
        handles, labels = [*handles, line], [*labels, f"best head ({best['step']:,})"]
    # Beside the axes, where it can cover no line.
    beside = {"loc": "upper left", "bbox_to_anchor": (1.01, 1), "frameon": False, "fontsize": 9}
    axis.legend(handles, labels, **beside)  # type: ignore[arg-type]


def shown_numbers(count: int, most: int) -> list[int]:
    """Indices 0 to count - 1, or with more than `most`: 0, 1, 3, 7, ... and the last."""
    if count <= most:
        return list(range(count))
    powers = [2**i - 1 for i in range(count.bit_length()) if 2**i < count]
    return [*powers, count - 1]
