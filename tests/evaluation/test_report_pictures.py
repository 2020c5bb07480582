"""Pictures of a report: each text inside the picture and off the lines, each series with a look of
its own.
"""

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise, product
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from evaluation import report_samples as samples
from peagle.evaluation.report import _pictures
from peagle.evaluation.report.charts import Axis, Chart, ChartLine, ChartPoint, Look, picture
from peagle.evaluation.report.files import read_results
from peagle.evaluation.report.page import origin
from peagle.evaluation.report.plots import set_charts
from peagle.evaluation.report.series import Cast, conditions
from peagle.evaluation.report.text import engine_name
from peagle.results import Cell, RunFigures, ThroughputResults

LOADS = (1, 8, 64)
OURS, VLLM, SERVER = "peagle", "vllm", "http://gpu-7.example:8000"
TREES = "peagle-tree-w15-n15"
LONG = "a-head-of-our-own-with-a-name-that-somebody-made-far-too-long-for-any-legend-{}"
CASTS: dict[str, list[tuple[str, str]]] = {
    "two": [("plain", OURS), ("peagle", OURS)],
    "seven": [
        *((method, OURS) for method in ("plain", "peagle", "eagle3", TREES)),
        *((method, VLLM) for method in ("plain", "peagle", "eagle3")),
    ],
    "twelve": list(product(("plain", "peagle", "eagle3", TREES), (OURS, VLLM, SERVER))),
    "six engines": list(product(("plain", "peagle"), (OURS, VLLM, *"abcd"))),
    "long names": [(LONG.format(i) if i else "plain", OURS) for i in range(12)],
    "a server alone": [("plain", SERVER), ("peagle", SERVER)],
}


def throughput(keys: Sequence[tuple[str, str]], ks: Sequence[int] = (3, 5, 7)) -> ThroughputResults:
    """Speeds that cross each other."""
    cells = []
    for i, (method, engine) in enumerate(keys):
        for load, k in product(LOADS, (0,) if method == "plain" else ks):
            speed = 400.0 * load ** (0.6 + 0.35 * ((i * 5) % 7) / 7) * (1 + i % 4) * (1 + k / 40)
            cells.append(
                Cell(
                    **{"method": method, "engine": engine, "k": k, "concurrency": load},
                    set="humaneval",
                    repeats=[],
                    median=RunFigures(output_tokens_per_s=speed),
                    speed_up_over_plain=speed / (400.0 * load) if k else 1.0,
                )
            )
    document = samples.throughput(("plain", "peagle"), (3,), (1,))
    results = ThroughputResults.model_validate(document)
    return results.model_copy(update={"cells": cells})


@pytest.fixture(scope="module", params=CASTS)
def drawn(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """The keys of a cast, and its pictures by file."""
    keys = CASTS[request.param]
    folder = samples.write(tmp_path_factory.mktemp("cast"), throughput=throughput(keys).to_json())
    results = read_results(folder)
    charts = {name: own for name, own in _pictures(results).items() if own}
    assert set(charts) == {"throughput.png", "k_sweep.png"}
    figures = {name: picture(own, origin(results)) for name, own in charts.items()}
    for figure in figures.values():
        figure.draw_without_rendering()  # places the texts of legends
    return keys, figures


def data_lines(axes: Axes) -> list[Line2D]:
    return [line for line in axes.lines if line.get_gid()]


def look(line: Line2D) -> tuple[object, ...]:
    """What can be seen of a line: its colour, marker, dashes, and whether the marker is filled."""
    is_filled = to_rgba(line.get_markerfacecolor()) == to_rgba(line.get_color())
    # Matplotlib has no public way to read dashes.
    dashes = line._unscaled_dash_pattern  # pyright: ignore[reportAttributeAccessIssue]
    return to_rgba(line.get_color()), line.get_marker(), str(dashes), is_filled


def texts(figure: Figure) -> Iterator[Text]:
    for text in figure.findobj(Text):
        if isinstance(text, Text) and text.get_text().strip() and text.get_visible():
            yield text


def crossings(axes: Axes, box: Bbox) -> list[str]:
    """The lines of an axes that cross a box, by points close to each other along each."""
    found = []
    for line in axes.lines:
        if line.get_linestyle() == "None" and line.get_marker() in ("", "None"):
            continue
        ends = line.get_transform().transform(line.get_xydata())
        points = [ends[:1]]
        if line.get_linestyle() != "None":
            points += [a + (b - a) * np.linspace(0, 1, 400)[:, None] for a, b in pairwise(ends)]
        if any(box.contains(x, y) for x, y in np.concatenate(points)):
            found.append(str(line.get_label()))
    return found


@pytest.mark.slow
def test_every_text_is_inside_the_picture(drawn):
    for name, figure in drawn[1].items():
        canvas = figure.bbox
        assert figure.legends, name
        for one in [*texts(figure), *figure.legends]:
            box = one.get_window_extent()
            words = one.get_text() if isinstance(one, Text) else "legend"
            assert canvas.x0 <= box.x0 and box.x1 <= canvas.x1, (name, words)
            assert canvas.y0 <= box.y0 and box.y1 <= canvas.y1, (name, words)


def test_the_legend_names_every_line_with_its_look(drawn):
    keys, figures = drawn
    for figure in figures.values():
        (legend,) = figure.legends
        names = [text.get_text().replace("\n", " ") for text in legend.get_texts()]
        assert len(names) == len(set(names)) == len(keys)
        looks = dict(zip(names, map(look, legend.legend_handles), strict=True))
        for axes in figure.axes:
            for line in data_lines(axes):
                assert look(line) == looks[str(line.get_label())]


def test_every_series_has_a_look_of_its_own(drawn):
    keys, figures = drawn
    engines = {engine for _, engine in keys}
    for figure in figures.values():
        lines = data_lines(figure.axes[0])
        assert len(lines) == len(keys) == len(set(map(look, lines)))
        by_name: dict[str, list[Line2D]] = {}
        for line in lines:
            by_name.setdefault(str(line.get_label()).partition(" on ")[0], []).append(line)
        # A method has one colour and marker on all engines; filled markers are ours alone.
        for own in by_name.values():
            assert len({look(line)[:2] for line in own}) == 1
        for line in lines if len(engines) > 1 else ():
            assert look(line)[3] == (" on " not in str(line.get_label()))


@pytest.mark.slow
def test_labels_cover_nothing(drawn):
    """Notes and names of levels, against lines, each other, and titles."""
    for name, figure in drawn[1].items():
        for axes in figure.axes:
            notes = [text for text in axes.texts if text.get_gid() == "halo"]
            boxes = [(note.get_text(), note.get_window_extent()) for note in notes]
            for words, box in boxes:
                assert crossings(axes, box) == [], (name, words)
            titles = [text for text in texts(figure) if text not in notes]
            others = [(text.get_text(), text.get_window_extent()) for text in titles]
            for (one, box), (other, other_box) in [
                *combinations(boxes, 2),
                *product(boxes, others),
            ]:
                assert not box.overlaps(other_box), (name, one, other)


def test_titles_of_neighbours_do_not_touch(tmp_path):
    acceptance = samples.acceptance(("eagle3", "peagle"), (3,), (0.0,))
    for i, entry in enumerate(acceptance["entries"]):
        entry["method"] = LONG.format(i)
    results = read_results(samples.write(tmp_path, acceptance=acceptance))
    figure = picture(_pictures(results)["histogram.png"], origin(results))
    titles = [axes.title if axes.title.get_text() else axes._left_title for axes in figure.axes]
    boxes = [title.get_window_extent() for title in titles]
    assert len(boxes) == 2 and all("\n" in title.get_text() for title in titles)
    assert not boxes[0].overlaps(boxes[1])
    assert all(box.y1 <= figure.bbox.y1 for box in boxes)


@pytest.mark.parametrize("height", [0.4, 1.0, 1.5, 2.6])
def test_the_name_of_a_level_stands_where_there_is_room(height):
    """A line that hides the left end, where the name stood, moves it; with room it is there."""
    line = [ChartPoint(1, height), ChartPoint(2, height), ChartPoint(3, 3), ChartPoint(9, 3)]
    chart = Chart(
        "t",
        [ChartLine("a", Look(1), line)],
        Axis("x"),
        Axis("y", low=0),
        level=(1.2, "plain decoding"),
    )
    (axes,) = picture([chart], "").axes
    (name,) = [text for text in axes.texts if text.get_gid() == "halo"]
    assert crossings(axes, name.get_window_extent()) == []


def test_a_note_without_room_is_left_out():
    """Rows of markers all around a point; the point beside them has room."""
    block = [ChartPoint(x / 4, y / 4) for x, y in product(range(17), repeat=2)]
    walled = Chart(
        "t",
        [
            ChartLine("wall", Look(1), block),
            ChartLine(
                "noted",
                Look(1),
                [ChartPoint(2, 2, note="123"), ChartPoint(8, 2, note="456")],
            ),
        ],
        Axis("x"),
        Axis("y"),
        connected=False,
    )
    (axes,) = picture([walled], "").axes
    assert [text.get_text() for text in axes.texts if text.get_gid() == "halo"] == ["456"]


def test_engines_have_their_names():
    names = {"vllm": "vLLM", "peagle": "peagle", SERVER: "gpu-7.example:8000", "mine": "mine"}
    assert {engine: engine_name(engine) for engine in names} == names


def test_a_method_keeps_its_colour_in_all_charts(tmp_path):
    """Acceptance was measured of other methods than throughput was."""
    acceptance = samples.acceptance(("eagle3", "peagle"), (3,), (0.0,))
    acceptance["entries"][0] |= {"method": "mine"}
    keys = [("plain", OURS), ("mine", VLLM), ("peagle", VLLM), ("other", OURS)]
    folder = samples.write(tmp_path, acceptance=acceptance, throughput=throughput(keys).to_json())
    results = read_results(folder)
    colours: dict[str, set[object]] = {}
    for charts in _pictures(results).values():
        for axes in picture(charts[:2], "").axes:
            for line in data_lines(axes):
                name = str(line.get_label()).partition(" on ")[0]
                colours.setdefault(name, set()).add(line.get_color())
    assert set(colours) == {"Plain decoding", "mine", "P-EAGLE", "other"}
    assert all(len(own) == 1 for own in colours.values())
    assert len(set.union(*colours.values())) == 4


def test_entries_of_a_prompt_set_stand_side_by_side(tmp_path: Path):
    """Each row has the points of its own entries; a category is named below its set."""
    acceptance = samples.acceptance(("ngram", "eagle3", "peagle"), (3,), (0.0,))
    results = read_results(samples.write(tmp_path, acceptance=acceptance))
    (condition,) = conditions(results.entries)
    ((chart,), _) = set_charts(condition, Cast.of(results))
    heights = [[point.y for point in line.points] for line in chart.lines]
    assert [[round(y) for y in own] for own in heights] == [list(range(len(heights[0])))] * 3
    assert len({y for own in heights for y in own}) == 3 * len(heights[0])
    assert [title for _, title in chart.y.ticks or ()] == [
        *("All prompts", "HumanEval", "MT-Bench", "· writing", "· math", "· coding", "GSM8K"),
        "structured, json",
    ]
    (axes,) = picture([chart], "").axes
    low, high = sorted(axes.get_ylim())
    assert (low, high) == (-0.5, len(heights[0]) - 0.5)
