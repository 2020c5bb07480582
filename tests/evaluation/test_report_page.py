"""The report in a real browser, headless, opened as a file."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from evaluation import report_samples as samples
from peagle.evaluation.report.files import read_results
from peagle.evaluation.report.page import page_html
from tests.browsing import Pages, grave

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = sync_api.expect


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report with every section and some text that is hard on a layout."""
    acceptance = samples.acceptance(("eagle3", "peagle"), (3, 7), (0.0,))
    for entry in acceptance["entries"]:
        entry["samples"][0]["pieces"].append(["x" * 500, "accepted"])
        entry["by_category"]["mt_bench/" + "a_very_long_name_of_a_category" * 3] = entry["pooled"]
    folder = samples.write(
        tmp_path_factory.mktemp("page"),
        acceptance=acceptance,
        throughput=samples.throughput(("plain", "eagle3", "peagle"), (3, 7)),
        tune=samples.tune(),
    )
    path = folder / "report.html"
    path.write_text(page_html(read_results(folder)), encoding="utf-8")
    return path


@pytest.fixture
def visit(pages: Pages, report: Path) -> Iterator[Callable[..., Any]]:
    """visit(**context options): the page, loaded anew. It may fetch nothing and write no error."""
    used = []

    def watch(page: Any) -> None:
        page.on("console", lambda line: page.problems.append(line.text))
        page.on("request", lambda request: page.problems.append(request.url))

    def open_page(**options: Any) -> Any:
        page = pages.open(watch, options)
        used.append(page)
        page.goto(report.as_uri())
        page.problems.remove(report.as_uri())
        return page

    yield open_page
    problems = [
        [problem for problem in page.problems if not problem.startswith("data:")] for page in used
    ]
    for page in used:
        page.emulate_media(media="null")
        page.goto("about:blank")
    assert not any(problems), problems


def unfold(page: Any) -> None:
    page.evaluate("for (const fold of document.querySelectorAll('details')) fold.open = true")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_have_contrast(visit, scheme):
    assert grave(visit(color_scheme=scheme), runOnly=["color-contrast"]) == []


def test_axe_finds_nothing_serious(visit):
    page = visit()
    unfold(page)
    # Contrast takes its time, above.
    assert grave(page, rules={"color-contrast": {"enabled": False}}) == []
    # It would find something.
    page.evaluate("document.documentElement.removeAttribute('lang')")
    assert len(grave(page, runOnly=["html-has-lang"])) == 1


@pytest.mark.parametrize("width", [320, 390, 768, 1280])
def test_the_page_scrolls_in_one_direction(visit, width):
    page = visit(viewport={"width": width, "height": 800})
    unfold(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    beyond = page.evaluate(
        """width => [...document.querySelectorAll('body *:not(.scroll *, .text *)')]
            .filter(node => node.checkVisibility() && node.getBoundingClientRect().right > width)
            .map(node => node.outerHTML.slice(0, 120))""",
        width + 0.5,
    )
    assert beyond == []


@pytest.mark.parametrize("width", [320, 1280])
def test_labels_of_charts_do_not_overlap(visit, width):
    page = visit(viewport={"width": width, "height": 800})
    unfold(page)
    touching = page.evaluate(
        """() => [...document.querySelectorAll('svg.chart')].filter(svg => svg.checkVisibility())
            .flatMap(svg => {
                const boxes = [...svg.querySelectorAll('text')].map(
                    text => [text.textContent, text.getBoundingClientRect()]);
                return boxes.flatMap(([a, p], i) => boxes.slice(i + 1).filter(([, q]) =>
                    Math.min(p.right, q.right) - Math.max(p.left, q.left) > 1 &&
                    Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top) > 5
                ).map(([b]) => [svg.getAttribute('aria-label'), a, b]));
            })"""
    )
    assert touching == []


def test_tooltips_show_the_numbers(visit):
    page = visit(viewport={"width": 1280, "height": 900})
    tip = page.locator("#tip")
    expect(tip).to_be_hidden()
    mark = page.locator("#throughput > .panels .wide .hit").last
    mark.scroll_into_view_if_needed()
    mark.hover()
    expect(tip).to_contain_text("P-EAGLE")
    expect(tip).to_contain_text("× plain decoding")
    box = tip.bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= 1280
    page.keyboard.press("Escape")
    expect(tip).to_be_hidden()


def test_a_click_on_a_heading_sorts(visit):
    page = visit()
    unfold(page)
    table = page.locator("#throughput table").first
    button = table.get_by_role("button", name="Tokens/s", exact=True)
    column = (
        "table => [...table.tBodies[0].rows].map(r => +r.cells[3].textContent.replace(',', ''))"
    )
    before = table.evaluate(column)
    button.click()
    assert table.evaluate(column) == sorted(before) != before
    expect(table.locator("th[aria-sort=ascending]")).to_have_text("Tokens/s")
    button.click()
    assert table.evaluate(column) == sorted(before, reverse=True)


def test_paper_is_light_and_shows_what_is_open(visit):
    page = visit(color_scheme="dark", viewport={"width": 718, "height": 1000})
    page.locator("#throughput details").first.evaluate("fold => fold.open = true")
    page.emulate_media(media="print")
    back = "node => getComputedStyle(node).backgroundColor"
    assert page.locator("body").evaluate(back) == "rgb(255, 255, 255)"
    dark = "node => getComputedStyle(node).color.match(/\\d+/g).every(part => part < 60)"
    assert page.locator("h1").evaluate(dark)
    expect(page.locator("nav")).to_be_hidden()
    # The table that was opened, and two that no fold holds: by prompt set, and of goodput.
    expect(page.locator("#throughput table:visible")).to_have_count(3)
    expect(page.locator("#acceptance table").first).to_be_hidden()
    assert page.evaluate("document.documentElement.scrollWidth") <= 718


def test_it_reads_without_scripts(visit):
    page = visit(java_script_enabled=False)
    expect(page.locator(".verdict")).to_contain_text("P-EAGLE has an acceptance length of")
    expect(page.locator("#throughput svg.chart:visible").first).to_be_visible()
    page.locator("#throughput summary").first.click()
    expect(page.locator("#throughput table").first).to_be_visible()


def test_the_policy_is_in_force(visit):
    page = visit()
    page.evaluate(
        """() => {
            const script = document.createElement('script');
            script.textContent = 'window.isBroken = true';
            document.body.append(script);
        }"""
    )
    assert page.evaluate("window.isBroken") is None
    assert any("Content Security Policy" in text for text in page.problems)
    page.problems.clear()
