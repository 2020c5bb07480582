"""Latency of runs, against naive recomputation."""

from statistics import fmean, median, quantiles
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peagle.engine import SpeculationStats
from peagle.errors import UserError
from peagle.evaluation.decoding import Answer, Run
from peagle.evaluation.objective import LatencyObjective
from peagle.evaluation.timing import figures_of, median_of, spread_of, token_gaps
from peagle.results import Percentiles, RunFigures

CHUNKS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 6)), min_size=1, max_size=20).map(
    lambda pairs: [(when / 10, count) for when, count in sorted(pairs)]
)


def test_gaps_by_hand() -> None:
    assert token_gaps([(0.5, 1), (0.7, 2), (0.7, 2), (0.8, 1)]) == [
        (pytest.approx(0.05), 4),
        (pytest.approx(0.1), 1),
    ]
    assert token_gaps([(0.5, 3)]) == [] == token_gaps([])


@given(CHUNKS)
def test_gaps_add_up_to_the_time_after_the_first_token(chunks: list[tuple[float, int]]) -> None:
    gaps = token_gaps(chunks)
    with_tokens = [when for when, count in chunks if count]
    if not with_tokens:
        assert gaps == []
        return
    first, last = with_tokens[0], with_tokens[-1]
    late = sum(count for when, count in chunks if when > first)
    assert sum(count for _, count in gaps) == late
    assert sum(gap * count for gap, count in gaps) == pytest.approx(last - first)


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(1, 5)), min_size=1, max_size=30))
def test_spreads_count_each_value_so_often(pairs: list[tuple[float, int]]) -> None:
    every = [value for value, times in pairs for _ in range(times)]
    found = spread_of([value for value, _ in pairs], [times for _, times in pairs])
    assert found.mean == pytest.approx(fmean(every))
    assert found.p50 == pytest.approx(median(every))
    if len(every) > 1:
        cuts = quantiles(every, n=100, method="inclusive")
        assert [found.p90, found.p99] == pytest.approx([cuts[89], cuts[98]])


def test_figures_of_a_run() -> None:
    answers = [
        Answer(num_tokens=4, chunks=[(0.0 + 0.5, 1), (0.8, 3)], seconds=0.9),
        Answer(num_tokens=2, chunks=[(0.1, 0), (0.3, 1), (0.5, 1)], seconds=0.6),
        Answer(num_tokens=1, chunks=[(9.0, 1)], seconds=9.0, error="cut"),
    ]
    drafts = SpeculationStats(4, 12, 6, [3, 2, 1])
    figures = figures_of(Run(answers, 2.0, drafts), 0.25)
    assert (figures.num_requests, figures.errors, figures.num_tokens) == (2, 1, 6)
    assert (figures.output_tokens_per_s, figures.requests_per_s) == (3.0, 1.0)
    assert figures.ttft_s.mean == pytest.approx(0.4)
    assert figures.itl_s.mean == pytest.approx((0.3 + 0.2) / 4)
    assert figures.itl_s.p50 == pytest.approx(0.1)
    assert figures.e2e_s.p50 == pytest.approx(0.75)
    assert (figures.acceptance_length, figures.gpu_busy) == (2.5, 0.25)


def test_shares_of_head_and_text() -> None:
    drafts = SpeculationStats()
    for accepted, text_from in ((3, 1), (2, 2), (0, 0), (1, 0)):
        drafts.record(7, accepted, 3, text_from)
    run = Run([Answer(num_tokens=1, chunks=[(0.5, 1)], seconds=1)], 1.0, drafts)
    one = figures_of(run)
    assert (one.head_per_pos, one.text_per_pos) == ([0.5, 0.25, 0.0], [0.25, 0.25, 0.25])
    assert sum(one.head_per_pos) + sum(one.text_per_pos) + 1 == one.acceptance_length
    # Positions that a repeat did not reach count as 0 in the median.
    others = [one.model_copy(update={"text_per_pos": own}) for own in ([0.5], [0.75, 0.5])]
    assert median_of([one, *others]).text_per_pos == [0.5, 0.25, 0.0]
    assert median_of([figures_of(Run(run.answers, 1.0)), one]).text_per_pos == one.text_per_pos


@pytest.mark.parametrize("drafts", [None, SpeculationStats()])
def test_unknown_figures(drafts: SpeculationStats | None) -> None:
    figures = figures_of(Run([Answer(num_tokens=1, chunks=[(0.5, 1)], seconds=1)], 1.0, drafts))
    assert figures.acceptance_length is None is figures.itl_s.p99


def test_medians_of_repeats() -> None:
    speeds = (3.0, 1.0, 2.0)
    waits, lengths = (1.0, 4.0, 2.0), (None, 2.0, 4.0)
    repeats = [
        RunFigures(output_tokens_per_s=a, ttft_s=Percentiles(p50=b), acceptance_length=c)
        for a, b, c in zip(speeds, waits, lengths, strict=True)
    ]
    assert median_of(repeats) == RunFigures(
        output_tokens_per_s=2.0, ttft_s=Percentiles(p50=2.0), acceptance_length=3.0
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ttft=500ms,itl=50ms@p90", (500, 50, 90)),
        ("itl=0.05s", (None, 50, 99)),
        ("TTFT = 1s @ p50", (1000, None, 50)),
    ],
)
def test_objectives(text: str, expected: tuple[Any, ...]) -> None:
    found = LatencyObjective.parse(text)
    assert (found.ttft_ms, found.itl_ms, found.percentile) == pytest.approx(expected)


@pytest.mark.parametrize(
    "text", ["", "500ms", "ttft=500", "ttft=5ms,,", "itl=5ms@p95", "itl=0ms", "itl=5ms@90", "x=1s"]
)
def test_objectives_that_are_none(text: str) -> None:
    with pytest.raises(UserError, match=r"The objective is .*like ttft=500ms,itl=50ms@p90"):
        LatencyObjective.parse(text)


def test_keeping_an_objective() -> None:
    ttft, itl = Percentiles(p90=0.5), Percentiles(p90=0.05)
    figures = RunFigures(output_tokens_per_s=1.0, ttft_s=ttft, itl_s=itl)
    assert LatencyObjective(500, 50, 90).is_met(figures)
    assert not LatencyObjective(499, None, 90).is_met(figures)
    assert not LatencyObjective(None, 49, 90).is_met(figures)
    assert not LatencyObjective(None, 49, 50).is_met(figures)
