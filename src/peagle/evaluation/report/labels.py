"""Labels inside a chart, each placed where it covers no line, no marker and no other label."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.path import Path
    from matplotlib.transforms import Bbox

FONT_SIZE = 11  # points, like all distances here
_GAP = 7  # from the middle of a marker
_LEVEL_GAP = 3
_BEYOND_RIGHT, _BEYOND_TOP = 10, 5  # room for labels outside the axes


@dataclass(frozen=True, slots=True)
class Spot:
    """A place for a label: an anchor, the distance from it in points, and the label's alignment.

    The anchor's x is a fraction of the axes with `is_fraction`, else a value of the data.
    """

    x: float
    y: float
    dx: float
    dy: float
    horizontal: str
    vertical: str
    is_fraction: bool = False


def spots_of_point(x: float, y: float) -> list[Spot]:
    """Return the places about a point, the best first."""
    above = [Spot(x, y, 0, _GAP, "center", "bottom"), Spot(x, y, 0, -_GAP, "center", "top")]
    corners = [
        Spot(x, y, dx, dy, side, vertical)
        for dy, vertical in ((_GAP, "bottom"), (-_GAP, "top"))
        for dx, side in ((-6, "right"), (6, "left"))
    ]
    beside = [Spot(x, y, dx, 0, side, "center") for dx, side in ((-_GAP, "right"), (_GAP, "left"))]
    return above + corners + beside


def spots_of_level(y: float) -> list[Spot]:
    """Return the places along a horizontal line, those at its ends first."""
    places = [(0.0, 6, "left"), (1.0, -6, "right"), *((i / 24, 0, "center") for i in range(1, 24))]
    return [
        Spot(x, y, dx, dy, side, vertical, is_fraction=True)
        for x, dx, side in places
        for dy, vertical in ((_LEVEL_GAP, "bottom"), (-_LEVEL_GAP, "top"))
    ]


class Labels:
    """The labels of an axes.

    Args:
        axes: axes with everything drawn, in their final place, on a canvas of Agg.
    """

    def __init__(self, axes: Axes) -> None:
        from matplotlib.transforms import Bbox

        figure: Any = axes.get_figure()
        self._axes, self._renderer = axes, figure.canvas.get_renderer()
        self._scale = figure.dpi / 72
        self._lines = list(_lines(axes))
        self._boxes = list(_boxes(axes, self._scale))
        room = axes.get_window_extent(self._renderer)
        right = min(room.x1 + _BEYOND_RIGHT * self._scale, figure.bbox.x1)
        top = min(room.y1 + _BEYOND_TOP * self._scale, figure.bbox.y1)
        self._room = Bbox.from_extents(room.x0, room.y0, right, top)

    def write(
        self, text: str, spots: Sequence[Spot], colour: str, *, is_needed: bool = False
    ) -> None:
        """Write a label at the first free spot; without one leave it out.

        Args:
            is_needed: without a free spot, write it at the first spot.
        """
        for spot in spots:
            label = self._annotate(text, spot, colour)
            box = label.get_window_extent(self._renderer)
            if self._is_free(box):
                self._boxes.append(box)
                return
            label.remove()
        if is_needed:
            self._annotate(text, spots[0], colour)

    def _annotate(self, text: str, spot: Spot, colour: str) -> Any:
        return self._axes.annotate(
            text,
            (spot.x, spot.y),
            xycoords=self._axes.get_yaxis_transform() if spot.is_fraction else "data",
            xytext=(spot.dx, spot.dy),
            textcoords="offset points",
            ha=spot.horizontal,
            va=spot.vertical,
            fontsize=FONT_SIZE,
            fontweight="bold",
            color=colour,
            gid="halo",
            zorder=5,
        )

    def _is_free(self, box: Bbox) -> bool:
        inside = self._room.x0 <= box.x0 and self._room.y0 <= box.y0
        inside = inside and box.x1 <= self._room.x1 and box.y1 <= self._room.y1
        return (
            inside
            and not any(box.overlaps(other) for other in self._boxes)
            and not any(line.intersects_bbox(box, filled=False) for line in self._lines)
        )


def _lines(axes: Axes) -> Iterator[Path]:
    """Yield the lines and whiskers of an axes, in pixels."""
    from matplotlib.collections import LineCollection

    for line in axes.lines:
        if line.get_linestyle() != "None":
            yield line.get_transform().transform_path(line.get_path())
    for drawn in axes.collections:
        if isinstance(drawn, LineCollection):
            yield from map(drawn.get_transform().transform_path, drawn.get_paths())


def _boxes(axes: Axes, scale: float) -> Iterator[Bbox]:
    """Yield the boxes about the markers and the bars of an axes, in pixels."""
    from matplotlib.transforms import Bbox

    for line in axes.lines:
        if line.get_marker() not in ("", "None", None):
            half = (line.get_markersize() / 2 + 1) * scale
            for x, y in line.get_transform().transform(line.get_xydata()):
                yield Bbox.from_extents(x - half, y - half, x + half, y + half)
    for bar in axes.patches:
        yield bar.get_window_extent()
