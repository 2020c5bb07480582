"""What the page of a report says and draws, against the files it was made from."""

import base64
import copy
import csv
import hashlib
import random
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markupsafe import escape

from evaluation import report_samples as samples
from evaluation.report_pages import Parsed, page_of, small, some
from peagle.config import CandidateTrees
from peagle.evaluation.decoding_methods import DecodingMethod
from peagle.evaluation.report import charts, write_report
from peagle.evaluation.report.charts import Axis, Chart, ChartLine, ChartPoint, Look
from peagle.evaluation.report.files import Results, read_results
from peagle.evaluation.report.page import page_html
from peagle.evaluation.report.series import Cast
from peagle.evaluation.report.text import method_name, milliseconds, visible
from peagle.results import AcceptanceResults, ThroughputResults, TuneResults


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of all three files."""
    return page_of(tmp_path_factory.mktemp("page"), **small())


@pytest.fixture
def _undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the charts, which take their time."""
    monkeypatch.setattr(charts, "can_draw", lambda: False)


def text_of(folder: Path, **documents: dict[str, Any]) -> str:
    return Parsed(page_of(folder, **documents)).text("style", "script")


# ---- the page ----


@pytest.mark.slow
def test_the_page_fetches_nothing(html):
    page = Parsed(html)
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


@pytest.mark.slow
def test_the_order_of_the_page(html):
    page = Parsed(html)
    sections = [attributes["id"] for tag, attributes in page.tags if tag == "section"]
    assert sections == [
        *("throughput", "sweep", "acceptance", "sets", "places", "requests", "cost", "samples"),
        *("hardest", "provenance", "caveats"),
    ]
    links = [a["href"] for tag, a in page.tags if tag == "a"]
    assert links == [f"#{name}" for name in sections]


def test_charts_have_alternatives_and_tables(html):
    page = Parsed(html)
    found = [a for tag, a in page.tags if tag == "svg" and "key" not in (a.get("class") or "")]
    assert len(found) > 20
    assert all(chart["role"] == "img" and chart["aria-label"] for chart in found)
    assert html.count("<table") == html.count("<caption>") > 10
    for part in re.findall(r"<section.*?</section>", html, re.DOTALL):
        assert ("<svg" in part) <= ("<table" in part)


def test_the_verdict(html):
    text = Parsed(html).text("style", "script")
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
    drafted, plain = (
        milliseconds(best(method, 1)["median"]["ttft_s"]["p50"]) for method in ("peagle", "plain")
    )
    assert drafted != plain
    assert (
        f"Its first token comes after {drafted} ms with drafts and after {plain} ms without" in text
    )
    assert f"{drafted} msp50 with drafts, one request in flight; {plain} ms without" in text


@pytest.mark.usefixtures("_undrawn")
def test_the_time_to_the_first_token_is_compared_on_one_engine(tmp_path):
    """Without plain decoding there the report shows the time with drafts alone."""
    documents = some("throughput")
    documents["throughput"]["cells"] = [
        cell | ({"engine": "http://other"} if cell["method"] == "plain" else {})
        for cell in documents["throughput"]["cells"]
    ]
    text = text_of(tmp_path, **documents)
    assert "Time to first token" in text and "Its first token comes" not in text


@pytest.mark.usefixtures("_undrawn")
def test_provenance_and_caveats(tmp_path):
    documents = some("acceptance", "throughput", "tune")
    documents["tune"]["provenance"]["environment"]["commit"] = "0123456789ab-dirty"
    documents["throughput"]["provenance"]["synthetic"] = True
    documents["throughput"]["cells"][3]["repeats"][0]["errors"] = 2
    documents["throughput"]["cells"][4]["spread"]["output_tokens_per_s"] = [1.0, 1e6]
    text = text_of(tmp_path, **documents)
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
    "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&amp;$\x00\x1b[31m\u202e\ud800\ufffe"
)
SHOWN = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&amp;$␀␛[31m���"


@pytest.mark.slow
def test_hostile_texts_are_texts(tmp_path, html):
    documents = some("acceptance", "throughput", "tune")
    calm = Parsed(html)
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
    hostile = write_report(folder).read_text(encoding="utf-8")
    page = Parsed(hostile)
    assert SHOWN in page.text()
    assert not re.search(r"[\x00-\x08\x0b-\x1f\u202e]", hostile)
    kinds = {tag for tag, _ in page.tags}
    assert kinds <= {tag for tag, _ in calm.tags}
    assert sum(tag == "script" for tag, _ in page.tags) == 1
    assert "x" * 7000 not in hostile
    rows = list(csv.reader((folder / "throughput.csv").open(encoding="utf-8", newline="")))
    assert {len(row) for row in rows} == {len(rows[0])}


@given(st.text(st.characters(), max_size=40))
def test_any_text_is_shown_as_text(text):
    shown = visible(text)
    shown.encode()
    assert visible(shown) == shown
    page = Parsed(f'<p title="{escape(shown)}">{escape(shown)}</p>')
    assert page.text() == shown == page.tags[0][1]["title"]
    kept = [c for c in text.replace("\r\n", "\n") if c.isalnum()]
    assert [c for c in shown if c.isalnum()] == kept


def without(value: Any, chance: float, rng: random.Random) -> Any:
    """A file in which some parts that a backend may not know are null, missing or empty."""
    needed = {"format_version", "provenance", "target", "method", "k", "concurrency", "median"}
    needed |= {"output_tokens_per_s", "num_drafts", "num_accepted_tokens", "pooled", "slice"}
    needed |= {"from", "to", "count", "text", "batch", "predicted_tokens_per_s", "entries", "cells"}
    needed |= {"parallel_drafting_spec", "tokens_per_s", "wins_at"}
    needed |= {"num_parallel_trees", "prediction_depth", "max_nodes"}
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


TINY = {
    "acceptance": samples.acceptance(("eagle3", "peagle"), (3,), (0.0,)),
    "throughput": samples.throughput(("plain", "peagle"), (3, 7), (1, 16), ("humaneval",)),
    "tune": samples.tune(),
}


@pytest.mark.slow
@settings(max_examples=5, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([0.02, 0.1, 0.4, 0.9]))
def test_what_is_not_known_is_left_out(seed, chance):
    rng = random.Random(seed)
    raw = {name: without(document, chance, rng) for name, document in TINY.items()}
    results = Results(
        AcceptanceResults.model_validate(raw["acceptance"]),
        ThroughputResults.model_validate(raw["throughput"]),
        TuneResults.model_validate(raw["tune"]),
    )
    text = Parsed(page_html(results)).text("style", "script")
    assert "None" not in text and "nan" not in text.split()


@pytest.mark.usefixtures("_undrawn")
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
    text = text_of(tmp_path, **documents)
    assert f"P-EAGLE has an acceptance length of {bare['pooled']['acceptance_length']:.2f}" in text
    assert "The backend tells no figures by request, so there are no intervals." in text


def test_methods_are_named_in_words():
    trees = CandidateTrees(4, 3, 9), CandidateTrees(9, 3, 9)
    names = [DecodingMethod("peagle", "head").with_trees(one).name for one in trees]
    assert [*map(method_name, names)] == [
        "P-EAGLE, trees of 9 nodes, 4 wide",
        "P-EAGLE, trees of 9 nodes",
    ]
    named = DecodingMethod("peagle", "head").with_trees(trees[1], has_copies=True).name
    assert method_name(named) == "P-EAGLE, trees of 9 nodes, and the text"
    assert method_name("mine") == "mine" and method_name("eagle3") == "EAGLE-3"


@pytest.mark.usefixtures("_undrawn")
def test_candidate_trees_stand_beside_chains(tmp_path):
    documents = some("tune")
    text = text_of(tmp_path, **documents)
    assert "They win at batch sizes 1, 8." in text
    assert "NodesFirst tokensDepthAcceptance lengthBatch 1Batch 8Batch 64" in text
    assert "7774.13578★ 3,7178,260" in text and "161674.86★ 6804,374" in text
    for one in documents["tune"]["trees"]:
        one["wins_at"] = []
    assert "Chains or no drafts are as fast at every batch size." in text_of(tmp_path, **documents)
    documents["tune"]["trees"] = []
    assert "Candidate trees" not in text_of(tmp_path, **documents)


@pytest.mark.usefixtures("_undrawn")
def test_engines_are_told_apart(tmp_path):
    documents = some("throughput")
    cells = documents["throughput"]["cells"]
    theirs = [cell | {"engine": "https://gpu.example:8000"} for cell in copy.deepcopy(cells)]
    documents["throughput"]["cells"] = cells + theirs
    results = read_results(samples.write(tmp_path, **documents))
    cast = Cast.of(results)
    assert len(cast.styles) == 6 and len(set(cast.styles.values())) == 6
    assert cast.hero == ("peagle", "peagle")
    text = Parsed(page_html(results)).text("style", "script")
    assert "EAGLE-3 on gpu.example:8000" in text
    assert "Engines differ" in text


# ---- charts ----

TICK = re.compile(
    r'<text x="[\d.-]+" y="([\d.]+)"[^>]*text-anchor="end"[^>]*>(-?[\d.,]+)(%?)</text>'
)
HIT = re.compile(r'data-tip="([^"]*)"><circle class="area" cx="([\d.]+)" cy="([\d.]+)"')


def chart(html: str, words: str) -> str:
    """The first chart whose text alternative has these words."""
    (found, *_) = (c for c in re.findall(r"<svg.*?</svg>", html, re.DOTALL) if words in c)
    return found


def heights(svg: str) -> list[tuple[str, float]]:
    """Tooltip of each point, and the value that its height means by the labelled ticks."""
    ticks = [
        (float(y) - 4.6, float(text.replace(",", "")) / (100 if percent else 1))
        for y, text, percent in TICK.findall(svg)
    ]
    (y0, v0), (y1, v1) = ticks[0], ticks[-1]
    middle_y, middle = ticks[len(ticks) // 2]
    is_log = abs(v0 + (v1 - v0) * (middle_y - y0) / (y1 - y0) - middle) > 0.05 * abs(v1 - v0)
    found = []
    for tip, _, y in HIT.findall(svg):
        share = (float(y) - y0) / (y1 - y0)
        found.append((tip, v0 * (v1 / v0) ** share if is_log else v0 + (v1 - v0) * share))
    return found


def test_points_stand_at_their_values(html):
    rates = heights(chart(html, "Output tokens per second"))
    assert len(rates) == 3 * 2
    for tip, value in rates:
        shown = float(re.findall(r"\n([\d,.]+) tokens/s", tip)[0].replace(",", ""))
        assert value == pytest.approx(shown, rel=0.02)
    ups = heights(chart(html, "Speed-up over plain"))
    for tip, value in ups:
        assert value == pytest.approx(float(re.findall(r"([\d.]+)× plain", tip)[0]), abs=0.02)
    lengths = heights(chart(html, "Acceptance length by K"))
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
        points = heights(chart(html, f"{kind.capitalize()} acceptance"))
        expected = [
            value
            for method in ("eagle3", "peagle")
            for e in small()["acceptance"]["entries"]
            if (e["method"], e["k"], e["temperature"]) == (method, 7, 0)
            for value in e["pooled"][kind]
        ]
        assert [value for _, value in points] == pytest.approx(expected, abs=0.005)


def test_bars_have_their_counts(html):
    svg = chart(html, "Requests by acceptance length, P-EAGLE, K = 7")
    bars = re.findall(r'data-tip="[^:]*: ([\d,]+) requests"><path d="([^"]*)"', svg)
    (entry,) = (
        e
        for e in small()["acceptance"]["entries"]
        if (e["method"], e["k"], e["temperature"]) == ("peagle", 7, 0)
    )
    counts = [b["count"] for b in entry["histogram"] if b["count"]]
    assert [int(count.replace(",", "")) for count, _ in bars] == counts
    ends = [[float(y) for y in re.findall(r"[\d.]+ ([\d.]+)", path)] for _, path in bars]
    tall = [max(ys) - min(ys) for ys in ends]
    unit = max(tall) / max(counts)
    assert tall == pytest.approx([count * unit for count in counts], abs=0.3)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(1, 10**7), min_size=2, max_size=8),
    st.sampled_from([None, 0.0, 1.0]),
    st.booleans(),
)
def test_a_chart_holds_its_points(values, low, log):
    points = [ChartPoint(i, value, tip=str(value)) for i, value in enumerate(values, 1)]
    y = Axis("y", log=True) if log else Axis("y", low=low)
    drawn = Chart("", [ChartLine("a", Look(1), points)], Axis("x"), y)
    ((_, svg),) = drawn.svgs()
    hits = [(float(x), float(y)) for _, x, y in HIT.findall(svg)]
    assert len(hits) == len(values)
    assert all(0 <= x <= charts.NARROW and 0 <= y <= drawn.height - 40 for x, y in hits)
    downwards = sorted(range(len(values)), key=lambda i: -values[i])
    assert [hits[i][1] for i in downwards] == sorted(hits[i][1] for i in downwards)
    ticks = [text for _, text, _ in TICK.findall(svg)]
    assert len(set(ticks)) == len(ticks) <= 12
