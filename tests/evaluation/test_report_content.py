"""What the page of a report says and draws, against the files it was made from."""

from __future__ import annotations

import base64
import copy
import csv
import hashlib
import random
import re
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evaluation import report_samples as samples
from evaluation.report_pages import Page, page_of, small, some
from peagle.evaluation.report import write_report
from peagle.evaluation.report.files import Results, read_results
from peagle.evaluation.report.page import render
from peagle.evaluation.report.series import Cast
from peagle.evaluation.report.svg import Axis, label, log_axis, spread, value_axis
from peagle.evaluation.report.text import h, visible
from peagle.results import AcceptanceResults, ThroughputResults, TuneResults


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of all three files."""
    return page_of(tmp_path_factory.mktemp("page"), **small())


# ---- the page -------------------------------------------------------------------------------


def test_the_page_fetches_nothing(html):
    page = Page(html)
    for tag, attributes in page.tags:
        assert tag not in ("img", "iframe", "object", "embed", "base", "form", "image", "use")
        assert not any(name.startswith("on") or name == "style" for name in attributes)
        for name in ("src", "href", "xlink:href", "action"):
            value = attributes.get(name) or "#"
            assert value.startswith("#") or value == "data:,"
    assert "@import" not in html and "url(" not in html
    (policy,) = (
        a["content"] or "" for _, a in page.tags if a.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy.startswith("default-src 'none'; ") and "unsafe" not in policy
    for kind in ("style", "script"):
        text = "".join(text for tag, text in page.texts if tag == kind)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy


def test_the_order_of_the_page(html):
    page = Page(html)
    sections = [attributes["id"] for tag, attributes in page.tags if tag == "section"]
    assert sections == [
        *("throughput", "sweep", "acceptance", "sets", "places", "requests", "cost", "samples"),
        *("hardest", "provenance", "caveats"),
    ]
    links = [a["href"] for tag, a in page.tags if tag == "a"]
    assert links == [f"#{name}" for name in sections]


def test_charts_have_alternatives_and_tables(html):
    page = Page(html)
    charts = [a for tag, a in page.tags if tag == "svg" and "key" not in (a.get("class") or "")]
    assert len(charts) > 20
    assert all(chart["role"] == "img" and chart["aria-label"] for chart in charts)
    assert html.count("<table") == html.count("<caption>") > 10
    for part in re.findall(r"<section.*?</section>", html, re.DOTALL):
        assert ("<svg" in part) <= ("<table" in part)


def test_the_verdict(html):
    text = Page(html).text("style", "script")
    documents = small()
    pooled = {
        entry["method"]: entry["pooled"]["acceptance_length"]
        for entry in documents["acceptance"]["entries"]
        if (entry["k"], entry["temperature"]) == (7, 0.0)
    }
    assert (
        f"P-EAGLE has an acceptance length of {pooled['peagle']:.2f} (K = 7, greedy, bfloat16, no "
        "chat template, HumanEval, MT-Bench and GSM8K), "
        f"{pooled['peagle'] / pooled['eagle3']:.2f}× that of EAGLE-3 "
        f"({pooled['eagle3']:.2f}, K = 7)."
    ) in text
    cells = [c for c in documents["throughput"]["cells"] if c["set"] == "humaneval"]

    def best(method: str, concurrency: int) -> dict[str, Any]:
        own = [c for c in cells if (c["method"], c["concurrency"]) == (method, concurrency)]
        return max(own, key=lambda cell: cell["median"]["output_tokens_per_s"])

    rates = {m: best(m, 1)["median"]["output_tokens_per_s"] for m in ("peagle", "eagle3")}
    over = best("peagle", 1)["speed_up_over_plain"]
    assert (
        f"With one request in flight it writes {rates['peagle']:.0f} tokens/s on HumanEval "
        f"(K = {best('peagle', 1)['k']}), {over:.2f}× plain decoding and "
        f"{rates['peagle'] / rates['eagle3']:.2f}× EAGLE-3 at its best K."
    ) in text
    assert {best("peagle", c)["k"] for c in (1, 16)} == {7}
    assert "Its best K is 7 at every load measured." in text


def test_provenance_and_caveats(tmp_path):
    documents = some("acceptance", "throughput", "tune")
    documents["tune"]["provenance"]["environment"]["commit"] = "0123456789ab-dirty"
    documents["throughput"]["provenance"]["synthetic"] = True
    documents["throughput"]["cells"][3]["repeats"][0]["errors"] = 2
    documents["throughput"]["cells"][4]["spread"]["output_tokens_per_s"] = [1.0, 1e6]
    text = Page(page_of(tmp_path, **documents)).text("style", "script")
    for document in documents.values():
        assert document["provenance"]["command"] in text
    for value in samples.ENVIRONMENT.values():
        assert str(value) in text
    for caveat in (
        "6.0% of the outputs fall into a loop, which is easy to draft: up to there",
        "The files differ in commit: 2ba806fade07, 0123456789ab-dirty.",
        "The code was changed after its commit (-dirty).",
        "2 requests of the throughput runs failed.",
        "Acceptance is synthetic",
        "In 1 of 20 cells the repeats are more than 15% apart",
        "Synthetic. Acceptance in this report is set, not measured.",
    ):
        assert caveat in text


HOSTILE = (
    "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&amp;\x00\x1b[31m\u202e\ud800\ufffe"
)
SHOWN = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&amp;␀␛[31m���"


def test_hostile_texts_are_texts(tmp_path):
    documents = some("acceptance", "throughput", "tune")
    calm = Page(page_of(tmp_path / "calm", **documents))
    entry = documents["acceptance"]["entries"][-1]
    for one in documents["acceptance"]["entries"]:
        one["by_set"][HOSTILE] = one["pooled"]
        one["by_category"][f"{HOSTILE}/b"] = one["pooled"]
        pieces = [[HOSTILE, "accepted"], ["x" * 100_000, HOSTILE]]
        texts = dict.fromkeys(("set", "id", "prompt_tail"), HOSTILE)
        one["samples"] = [{**texts, "pieces": pieces}]
        one["hardest"] = [{"set": "", "id": HOSTILE, "text_before": HOSTILE, "text": HOSTILE}]
    for document in documents.values():
        document["provenance"] |= {"target": HOSTILE, "command": HOSTILE, "dtype": HOSTILE}
        document["settings"][HOSTILE] = HOSTILE
    for cell in documents["throughput"]["cells"]:
        cell["set"] = HOSTILE
    entry["method"] = HOSTILE
    folder = samples.write(tmp_path / "hostile", **documents)
    html = write_report(folder).read_text(encoding="utf-8")
    page = Page(html)
    assert SHOWN in page.text()
    assert not re.search(r"[\x00-\x08\x0b-\x1f\u202e]", html)
    kinds = {tag for tag, _ in page.tags}
    assert kinds <= {tag for tag, _ in calm.tags}
    assert sum(tag == "script" for tag, _ in page.tags) == 1
    assert len(html) < 5 * sum(len(text) for _, text in page.texts) and "x" * 7000 not in html
    rows = list(csv.reader((folder / "throughput.csv").open(encoding="utf-8", newline="")))
    assert {len(row) for row in rows} == {len(rows[0])}


@given(st.text(st.characters(), max_size=40))
def test_any_text_is_shown_as_text(text):
    shown = visible(text)
    shown.encode()
    assert visible(shown) == shown
    page = Page(f'<p title="{h(text)}">{h(text)}</p>')
    assert page.text() == shown == page.tags[0][1]["title"]
    kept = [c for c in text.replace("\r\n", "\n") if c.isalnum()]
    assert [c for c in shown if c.isalnum()] == kept


def without(value: Any, chance: float, rng: random.Random) -> Any:
    """A file in which some parts that a backend may not know are null, missing or empty."""
    needed = {"format_version", "provenance", "target", "method", "k", "concurrency", "median"}
    needed |= {"output_tokens_per_s", "num_drafts", "num_accepted_tokens", "pooled", "slice"}
    needed |= {"from", "to", "count", "text", "batch", "predicted_tokens_per_s", "entries", "cells"}
    needed |= {"acceptance_length", *samples.SETS, *samples.CATEGORIES, *map(str, range(1, 9))}
    if isinstance(value, dict):
        kept = {}
        for key, inner in value.items():
            if key not in needed and rng.random() < chance:
                if rng.random() < 0.5:
                    kept[key] = None
            else:
                kept[key] = without(inner, chance, rng)
        return kept
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [without(v, chance, rng) for v in value if rng.random() >= chance]
    return value


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([0.02, 0.1, 0.4, 0.9]))
def test_what_is_not_known_is_left_out(seed, chance):
    rng = random.Random(seed)
    raw = {f"{name}.json": without(document, chance, rng) for name, document in small().items()}
    results = Results(
        AcceptanceResults.model_validate(raw["acceptance.json"]),
        ThroughputResults.model_validate(raw["throughput.json"]),
        TuneResults.model_validate(raw["tune.json"]),
    )
    text = Page(render(results, [])).text("style", "script")
    assert "None" not in text and "nan" not in text.split()


def test_a_server_that_tells_only_counters(tmp_path):
    documents = some("acceptance", "throughput")
    url = "http://localhost:8000"
    bare = documents["acceptance"]["entries"][-1]
    bare |= {"engine": url, "k": 0, "by_context": [], "by_output_position": [], "histogram": []}
    bare |= {"hardest": [], "samples": [], "loop_share": None}
    for name in ("acceptance_length_ci", "unconditional_ci", "conditional_ci", "loop_share"):
        bare["pooled"][name] = None
    silent = copy.deepcopy(bare) | {"method": "plain"}
    silent["pooled"] |= {"num_drafts": 0, "num_accepted_tokens": 0, "acceptance_length": None}
    documents["acceptance"]["entries"] = [bare, silent]
    for cell in documents["throughput"]["cells"]:
        cell |= {"engine": url, "k": None, "speed_up_over_plain": None}
    text = Page(page_of(tmp_path, **documents)).text("style", "script")
    assert f"P-EAGLE has an acceptance length of {bare['pooled']['acceptance_length']:.2f}" in text
    assert "The backend tells no figures by request, so there are no intervals." in text


def test_engines_are_told_apart(tmp_path):
    documents = some("throughput")
    cells = documents["throughput"]["cells"]
    theirs = [cell | {"engine": "https://gpu.example:8000"} for cell in copy.deepcopy(cells)]
    documents["throughput"]["cells"] = cells + theirs
    results = read_results(samples.write(tmp_path, **documents))
    cast = Cast.of(results)
    assert len(cast.styles) == 6 and len(set(cast.styles.values())) == 6
    assert cast.hero == ("peagle", "peagle")
    text = Page(render(results, [])).text("style", "script")
    assert "EAGLE-3 on gpu.example:8000" in text
    assert "Engines differ" in text


# ---- charts ---------------------------------------------------------------------------------

TICK = re.compile(r'<text x="[\d.-]+" y="([\d.]+)" class="end">([\d.,]+)%?</text>')
HIT = re.compile(r'data-tip="([^"]*)"><circle class="area" cx="([\d.]+)" cy="([\d.]+)"')


def chart(html: str, words: str) -> str:
    """The first chart whose text alternative has these words."""
    (found, *_) = (c for c in re.findall(r"<svg.*?</svg>", html, re.DOTALL) if words in c)
    return found


def heights(svg: str) -> list[tuple[str, float]]:
    """Tooltip of each point, and the value that its height means by the labelled ticks."""
    ticks = [(float(y) - 4, float(text.replace(",", ""))) for y, text in TICK.findall(svg)]
    (y0, v0), (y1, v1) = ticks[0], ticks[-1]
    middle_y, middle = ticks[len(ticks) // 2]
    is_log = abs(v0 + (v1 - v0) * (middle_y - y0) / (y1 - y0) - middle) > 0.05 * abs(v1 - v0)
    found = []
    for tip, _, y in HIT.findall(svg):
        share = (float(y) - y0) / (y1 - y0)
        found.append((tip, v0 * (v1 / v0) ** share if is_log else v0 + (v1 - v0) * share))
    return found


def test_points_stand_at_their_values(html):
    rates = heights(chart(html, "output tokens per second over concurrency"))
    assert len(rates) == 3 * 2
    for tip, value in rates:
        shown = float(re.findall(r"\n([\d,.]+) tokens/s", tip)[0].replace(",", ""))
        assert value == pytest.approx(shown, rel=0.02)
    ups = heights(chart(html, "speed-up over plain"))
    for tip, value in ups:
        assert value == pytest.approx(float(re.findall(r"([\d.]+)× plain", tip)[0]), abs=0.02)
    lengths = heights(chart(html, "acceptance length by K"))
    pooled = {
        ("P-EAGLE" if e["method"] == "peagle" else "EAGLE-3", e["k"]): e["pooled"]
        for e in small()["acceptance"]["entries"]
        if e["temperature"] == 0
    }
    assert len(lengths) == len(pooled) == 4
    for tip, value in lengths:
        name, k = re.findall(r"^(.*), K = (\d)", tip)[0]
        assert value == pytest.approx(pooled[name, int(k)]["acceptance_length"], abs=0.02)
    for kind in ("unconditional", "conditional"):
        points = heights(chart(html, f"Line chart of {kind} acceptance"))
        expected = [
            100 * value
            for method in ("eagle3", "peagle")
            for e in small()["acceptance"]["entries"]
            if (e["method"], e["k"], e["temperature"]) == (method, 7, 0)
            for value in e["pooled"][kind]
        ]
        assert [value for _, value in points] == pytest.approx(expected, abs=0.5)


def test_bars_have_their_counts(html):
    svg = chart(html, "requests, P-EAGLE, K = 7")
    bars = re.findall(r'data-tip="[^:]*: ([\d,]+) requests"[^>]* height="([\d.]+)"', svg)
    (entry,) = (
        e
        for e in small()["acceptance"]["entries"]
        if (e["method"], e["k"], e["temperature"]) == ("peagle", 7, 0)
    )
    counts = [b["count"] for b in entry["histogram"] if b["count"]]
    assert [int(count.replace(",", "")) for count, _ in bars] == counts
    unit = max(float(height) for _, height in bars) / max(counts)
    assert [float(height) for _, height in bars] == pytest.approx(
        [count * unit for count in counts], abs=0.2
    )


@given(
    st.lists(st.floats(0, 1e7, allow_subnormal=False), min_size=1, max_size=20),
    st.sampled_from([None, 0.0, 1.0]),
)
def test_a_linear_axis_holds_its_values(values, low):
    values = [round(value, 6) for value in values]
    axis = value_axis("", values, low=low)
    assert axis.low <= max(min(values), axis.low) and max(values) <= axis.high * (1 + 1e-9) + 1e-9
    assert low is None or axis.low == low
    assert 2 <= len(axis.ticks) <= 8
    assert len({text for _, text in axis.ticks}) == len(axis.ticks)
    shares = [axis.share(value) for value in sorted(values)]
    assert shares == sorted(shares) and shares[0] >= 0 and shares[-1] <= 1


@given(st.lists(st.floats(1e-3, 1e8), min_size=1, max_size=20))
def test_a_logarithmic_axis_holds_its_values(values):
    axis = log_axis("", values)
    assert axis.low <= min(values) * 1.0002 and max(values) <= axis.high * 1.0002
    assert 1 <= len(axis.ticks) <= 13
    middle = (axis.low * axis.high) ** 0.5
    assert axis.share(middle) == pytest.approx(0.5)


@given(st.lists(st.floats(0, 300), max_size=8), st.floats(1, 20), st.floats(200, 400))
def test_labels_are_moved_apart(places, gap, high):
    places.sort()
    moved = spread(places, gap, high)
    assert all(b - a >= gap - 1e-6 for a, b in pairwise(moved))
    assert not moved or moved[-1] <= high + 1e-9
    far = all(b - a >= gap for a, b in pairwise(places))
    if far and places and places[-1] <= high:
        assert moved == pytest.approx(places)


def test_labels_of_ticks():
    assert [label(value, 0.25) for value in (1, 1.25)] == ["1.00", "1.25"]
    assert [label(value, 2.5) for value in (5, 7.5)] == ["5.0", "7.5"]
    assert label(12500, 2500) == "12,500"
    assert Axis("", 1, 1, ()).share(1) == 0.5
