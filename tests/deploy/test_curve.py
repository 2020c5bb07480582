"""What one instance carries by a measured curve."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.curves import throughput, tune
from peagle.deploy import curve
from peagle.deploy.curve import Bounds, Curve, CurvePoint, capacity, read_curves
from peagle.errors import UserError

# ---- the rule ----


def test_a_curve_ends_where_drafts_no_longer_pay(tmp_path):
    for path in (throughput(tmp_path / "throughput.json"), tune(tmp_path / "tune.json")):
        found = capacity(read_curves(path, k=7), Bounds())
        assert found.concurrency == 16
        assert found.why == "at 32 drafts no longer pay: 0.92 times the speed without them"
        assert found.target("concurrency") == 11  # 70% of 16, whole


def test_a_curve_ends_where_latency_is_missed(tmp_path):
    path = throughput(tmp_path / "throughput.json")
    # 1.5 * 8 / 640 s = 18.75 ms at 8, 1.5 * 16 / 1000 s = 24 ms at 16.
    for bounds, percentile, concurrency in (
        (Bounds(itl_ms=20), 90, 8),
        (Bounds(itl_ms=24), 90, 16),
        (Bounds(itl_ms=32), 99, 2),
        (Bounds(ttft_ms=130), 50, 8),
        (Bounds(itl_ms=24, ttft_ms=170), 90, 4),
    ):
        found = capacity(read_curves(path, k=7, percentile=percentile), bounds)
        assert found.concurrency == concurrency, (bounds, percentile)
    assert "first token" in found.why


def test_the_objective_of_the_measurement_holds_without_bounds(tmp_path):
    path = throughput(tmp_path / "throughput.json", objective="itl=20ms@p90")
    found = capacity(read_curves(path, k=7), Bounds())
    assert (found.concurrency, "objective" in found.why) == (8, True)
    # Bounds of one's own go over it.
    assert capacity(read_curves(path, k=7), Bounds(itl_ms=24)).concurrency == 16


def test_a_curve_ends_at_its_knee(tmp_path):
    # Without drafts: to 32 requests speed grows by 0.81 for 1.0, to 64 by 0.54 for 1.0.
    path = throughput(tmp_path / "throughput.json")
    found = capacity(read_curves(path, k=0), Bounds())
    assert (found.concurrency, found.why) == (64, "it is the largest measured")
    flat = Curve(
        (CurvePoint(1, 10), CurvePoint(2, 18), CurvePoint(4, 22), CurvePoint(8, 40)), "x", "P90"
    )
    ended = capacity([flat], Bounds())
    # 22 / 18 is +22% for +100%: below a quarter. What comes behind a knee is not looked at.
    assert (ended.concurrency, "100% more requests bring only +22%" in ended.why) == (2, True)


def test_of_several_sets_the_slowest_counts(tmp_path):
    path = throughput(tmp_path / "throughput.json", sets=("code", "chat"))
    found = capacity(read_curves(path, k=7), Bounds(itl_ms=24))
    assert found.concurrency == 4
    assert "on chat" in found.what


@given(
    speeds=st.lists(st.floats(1, 1e4), min_size=1, max_size=8),
    bound=st.none() | st.floats(0.1, 1e3),
)
def test_a_capacity_holds_at_it_and_below_it_and_ends_behind_it(speeds, bound):
    points = tuple(
        CurvePoint(2**i, speed, itl_ms=1000 * 2**i / speed) for i, speed in enumerate(speeds)
    )

    def holds(index: int) -> bool:
        if bound is not None and points[index].itl_ms > bound:
            return False
        before = points[index - 1].tokens_per_s
        return not index or points[index].tokens_per_s / before - 1 >= curve.MIN_KNEE_GAIN

    try:
        found = capacity([Curve(points, "x", "mean")], Bounds(itl_ms=bound))
    except UserError:
        assert not holds(0)
        return
    index = [point.concurrency for point in points].index(found.concurrency)
    assert all(holds(i) for i in range(index + 1))
    assert index + 1 == len(points) or not holds(index + 1)
    assert 1 <= found.target("concurrency") <= found.concurrency


def test_requests_a_minute(tmp_path):
    found = capacity(read_curves(throughput(tmp_path / "t.json"), k=7), Bounds())
    assert found.target("invocations") == pytest.approx(0.7 * 60 * 10)
    tuned = capacity(read_curves(tune(tmp_path / "tune.json"), k=7), Bounds())
    with pytest.raises(UserError, match="how many requests a second"):
        tuned.target("invocations")


# ---- bad files ----


def test_what_was_not_measured_as_it_is_deployed(tmp_path):
    path = throughput(tmp_path / "throughput.json")
    with pytest.raises(UserError, match=r"K = 5.*has: peagle with K = 7, plain with K = 0"):
        read_curves(path, k=5)
    with pytest.raises(UserError, match="nothing"):
        read_curves(path, k=7, method="mine")
    assert read_curves(path, k=None)  # one method drafts
    with pytest.raises(UserError, match=r"no speeds at K = 3; it has K: 0, 7"):
        read_curves(tune(tmp_path / "tune.json"), k=3)


def test_a_server_that_does_not_tell_its_k_is_taken_by_its_name(tmp_path):
    path = throughput(tmp_path / "throughput.json")
    text = path.read_text().replace('"method": "peagle"', '"method": "vllm"')
    path.write_text(text.replace('"k": 7', '"k": 0'))
    with pytest.raises(UserError, match="nothing"):
        read_curves(path, k=7)
    found = capacity(read_curves(path, k=7, method="vllm"), Bounds())
    assert (found.concurrency, "no longer pay" in found.why) == (16, True)
    with pytest.raises(UserError, match="nothing"):
        read_curves(path, k=7, method="plain")


def test_a_bound_that_nothing_was_measured_for(tmp_path):
    curves = read_curves(tune(tmp_path / "tune.json"), k=7)
    assert capacity(curves, Bounds(itl_ms=17)).concurrency == 16
    with pytest.raises(UserError, match="no times to the first token"):
        capacity(curves, Bounds(ttft_ms=100))


def test_a_bound_that_nothing_keeps(tmp_path):
    curves = read_curves(throughput(tmp_path / "t.json"), k=7)
    with pytest.raises(UserError, match=r"smallest concurrency measured, 1, .*above 2 ms"):
        capacity(curves, Bounds(itl_ms=2))


HEAD = '{"format_version": 1, "provenance": {"target": "t"}, '
CELLS = HEAD + '"cells": [{"method": "a", "k": 7, %s}]}'
PREDICTIONS = HEAD + '"predictions": [{"batch": 1, "k": 7, "predicted_tokens_per_s": %s}]}'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "not readable"),
        ("", "is not JSON"),
        ("[]", "expected a JSON object"),
        ('{"entries": []}', "neither throughput.json"),
        ('{"cells": []}', "neither throughput.json"),
        ('{"format_version": 2, "cells": [{}]}', "format_version 2, newer"),
        (CELLS % '"concurrency": 0, "median": {}', "concurrency"),
        (CELLS % '"concurrency": 1, "median": {"output_tokens_per_s": 0}', "is 0 tokens/s"),
        (PREDICTIONS % "0", "is 0 tokens/s"),
        (PREDICTIONS % "NaN", "predicted"),
    ],
)
def test_files_that_hold_no_curve(tmp_path, text, said):
    path = tmp_path / "file.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=said):
        read_curves(path, k=7)
