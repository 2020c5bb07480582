"""The charts as PNGs, for slides and READMEs (matplotlib, the `report` extra)."""

from __future__ import annotations

import io
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peagle.evaluation.report.files import Results, write_bytes
from peagle.evaluation.report.series import Cast, Condition, best_cells, conditions, sets_of
from peagle.evaluation.report.text import cut, day, depth, set_name, short, temperature, visible
from peagle.results import Entry

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The page's light colours, markers and dashes, by style.
_COLOURS = ("#5f646b", "#0b6e63", "#b0560a", "#5648c7", "#a3246e", "#1d66a8", "#6b5a10", "#8c1d18")
_MARKERS = "oosD^vP*"
_DASHES: tuple[Any, ...] = (
    *((0, (2, 2)), "-", (0, (6, 2)), (0, (6, 2, 1, 2)), (0, (3, 2)), (0, (9, 2))),
    *((0, (1, 2, 4, 2)), (0, (4, 1, 1, 1))),
)
_TEXT, _MUTED, _LINE = "#1b1d1f", "#5a5f66", "#e2e2dc"


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def draw_pictures(results: Results, folder: Path) -> list[Path]:
    """Draw throughput.png, k_sweep.png, acceptance.png and histogram.png, as far as there is data.

    Returns:
        those drawn; none without matplotlib.

    Raises:
        UserError: one cannot be written.
    """
    if not can_draw():
        return []
    from matplotlib import rc_context

    # Names are users': dollars in them are no formulas.
    with rc_context({"text.parse_math": False}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        return _draw(results, folder)


def _draw(results: Results, folder: Path) -> list[Path]:
    cast = Cast.of(results)
    found = conditions(results.acceptance.entries) if results.acceptance else []
    figures = {
        "throughput.png": _throughput(results, cast),
        "k_sweep.png": _sweep(results, cast),
        "acceptance.png": _acceptance(found[0], cast) if found else None,
        "histogram.png": _histograms(found[0], cast) if found else None,
    }
    drawn = []
    for name, picture in figures.items():
        if picture is not None:
            look = {"ha": "left", "fontsize": 9, "color": _MUTED}
            picture.suptitle(_origin(results), x=0.012, **look)  # type: ignore[arg-type]
            buffer = io.BytesIO()
            picture.savefig(buffer, format="png", dpi=160)
            write_bytes(folder / name, buffer.getvalue())
            drawn.append(folder / name)
    return drawn


def _origin(results: Results) -> str:
    """Target, hardware and day, so that a picture alone says what it shows."""
    provenance = results.documents[0].provenance
    device = provenance.environment.get("device") or ""
    facts = [short(provenance.target), str(device), provenance.dtype, day(provenance.created)]
    facts.append("SYNTHETIC acceptance" if results.documents[0].is_synthetic else "")
    return _plain(" · ".join(filter(None, facts)))


def _plain(text: str) -> str:
    """A name as matplotlib can draw it, not too long."""
    return cut(visible(text), 90).replace("\n", " ")


def _new(columns: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)  # type: ignore[union-attr]
    axes = figure.subplots(1, columns, squeeze=False)[0]
    return figure, list(axes)


def _finish(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(_plain(title), loc="left", fontsize=11, fontweight="bold", color=_TEXT, pad=12)
    axes.set_xlabel(x, color=_TEXT, fontsize=9.5)
    axes.set_ylabel(y, color=_TEXT, fontsize=9.5)
    axes.grid(axis="y", color=_LINE, linewidth=0.9)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_MUTED, labelsize=9, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_MUTED)


def _look(style: int, **more: Any) -> dict[str, Any]:
    look = {"color": _COLOURS[style], "marker": _MARKERS[style], "linestyle": _DASHES[style]}
    return {**look, "markersize": 6, "linewidth": 2, "markeredgecolor": "white", **more}


def _legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    labels = [_plain(name) for name in labels]
    options = {"loc": "outside lower center", "frameon": False, "fontsize": 9.5}
    figure.legend(handles, labels, ncols=min(5, len(labels)), **options)  # type: ignore[arg-type]


def _throughput(results: Results, cast: Cast) -> Figure | None:
    cells = results.throughput.cells if results.throughput else []
    if len({cell.concurrency for cell in cells}) < 2:
        return None
    name = sets_of(cells)[0]
    figure, (speeds, ratios) = _new(2, 10.5, 4.4)
    loads = sorted({cell.concurrency for cell in cells if cell.set == name})
    for key, style in cast.styles.items():
        best = best_cells(cells, key, name)
        if not best:
            continue
        rates = [cell.median.output_tokens_per_s for cell in best]
        at = [cell.concurrency for cell in best]
        speeds.plot(at, rates, label=cast.name(key), **_look(style))
        if key == cast.hero:
            for x, y, cell in zip(at, rates, best, strict=True):
                speeds.annotate(
                    depth(cell.k),
                    (x, y),
                    xytext=(0, 8),
                    textcoords="offset points",
                    ha="center",
                    fontsize=8.5,
                    color=_COLOURS[style],
                )
        ups = [(c.concurrency, c.speed_up_over_plain) for c in best if c.speed_up_over_plain]
        if key[0] != "plain" and ups:
            ratios.plot(*zip(*ups, strict=True), label=cast.name(key), **_look(style))
    speeds.set_yscale("log")
    speeds.margins(y=0.12)
    ratios.axhline(1, color=_MUTED, linestyle=(0, (3, 3)), linewidth=1.2)
    ratios.set_ylim(bottom=0)
    for axes in (speeds, ratios):
        axes.set_xscale("log", base=2)
        axes.set_xticks(loads, [str(load) for load in loads])
        axes.minorticks_off()
    speeds.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    _finish(speeds, f"Output tokens per second, {set_name(name)}", "requests in flight", "")
    _finish(ratios, "Speed-up over plain decoding", "requests in flight", "")
    _legend(figure, speeds)
    return figure


def _sweep(results: Results, cast: Cast) -> Figure | None:
    cells = results.throughput.cells if results.throughput else []
    ks = sorted({cell.k for cell in cells if cell.k})
    if len(ks) < 2:
        return None
    name = sets_of(cells)[0]
    cells = [cell for cell in cells if cell.set == name]
    loads = sorted({cell.concurrency for cell in cells if cell.k})[:6]
    if not loads:
        return None
    figure, panels = _new(len(loads), 2.8 * len(loads) + 0.6, 3.6)
    for axes, load in zip(panels, loads, strict=True):
        here = [cell for cell in cells if cell.concurrency == load]
        for key, style in cast.styles.items():
            own = [c for c in here if (c.method, c.engine) == key]
            points = sorted((c.k, c.median.output_tokens_per_s) for c in own if c.k)
            if points:
                axes.plot(*zip(*points, strict=True), label=cast.name(key), **_look(style))
            elif key[0] == "plain" and own:
                level = own[0].median.output_tokens_per_s
                look = {"color": _COLOURS[style], "linestyle": _DASHES[style]}
                axes.axhline(level, label=cast.name(key), **look)
        axes.set_ylim(bottom=0)
        axes.set_xticks(ks)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        many = "One request" if load == 1 else f"{load} requests"
        _finish(axes, many, "K", "tokens/s" if axes is panels[0] else "")
    _legend(figure, panels[0])
    return figure


def _acceptance(condition: Condition, cast: Cast) -> Figure:
    figure, (lengths, unconditional, conditional) = _new(3, 12, 4)
    for key in cast.among(condition.entries):
        own = [e for e in condition.entries if (e.method, e.engine) == key]
        points = sorted((e.depth, e.pooled.acceptance_length or 1.0) for e in own)
        look = _look(cast.styles[key])
        lengths.plot(*zip(*points, strict=True), label=cast.name(key), **look)
        deepest = condition.deepest(key)
        assert deepest is not None
        _positions(unconditional, list(deepest.pooled.unconditional), look)
        _positions(conditional, deepest.pooled.conditional, look)
    said = temperature(condition.temperature)
    lengths.set_ylim(bottom=1)
    lengths.set_xticks(sorted({entry.depth for entry in condition.entries}))
    for axes in (unconditional, conditional):
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f}%")
        axes.xaxis.get_major_locator().set_params(integer=True)  # type: ignore[call-arg]
    _finish(lengths, f"Acceptance length by K, {said}", "K", "tokens a step")
    _finish(unconditional, "Unconditional acceptance", "position in the draft", "")
    _finish(conditional, "Conditional acceptance", "position in the draft", "")
    _legend(figure, lengths)
    return figure


def _positions(axes: Axes, values: list[float | None], look: dict[str, Any]) -> None:
    points = [(i, value) for i, value in enumerate(values, 1) if value is not None]
    if points:
        axes.plot(*zip(*points, strict=True), **look)


def _histograms(condition: Condition, cast: Cast) -> Figure | None:
    entries: list[Entry] = [
        e for e in condition.deepest_of_all(cast)[::-1] if any(b.count for b in e.histogram)
    ]
    if not entries:
        return None
    figure, panels = _new(len(entries), 3.6 * len(entries) + 0.6, 3.4)
    end = max(b.last for e in entries for b in e.histogram if b.count)
    for axes, entry in zip(panels, entries, strict=True):
        bins = [b for b in entry.histogram if b.count]
        axes.bar(
            [b.first for b in bins],
            [b.count for b in bins],
            [b.last - b.first for b in bins],
            align="edge",
            color=_COLOURS[cast.style(entry)],
            edgecolor="white",
        )
        length = entry.pooled.acceptance_length or 1.0
        axes.axvline(length, color=_TEXT, linewidth=1.4)
        axes.set_xlim(1, end)
        title = f"{cast.name_of(entry)}, {depth(entry.k)}: {length:.2f}"
        _finish(axes, title, "acceptance length of a request", "requests")
    return figure
