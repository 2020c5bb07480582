"""The pages of questions: from a claim to its source, our figure and a command in two clicks."""

import re
import tomllib

import pytest

from tests.docs.pages import ROOT, blocks

PAGE = ROOT / "docs" / "questions.md"
if not PAGE.is_file():
    pytest.skip("a source archive has no pages", allow_module_level=True)

CLAIMS = PAGE.read_text().partition("## The claims")[2].partition("\n## ")[0]
ROWS = [line for line in CLAIMS.splitlines() if line.startswith("|")][2:]
SECTIONS = {
    f"{page.name}#{re.sub(r'[^a-z0-9 -]', '', text.splitlines()[0].lower()).replace(' ', '-')}": (
        page,
        text,
    )
    for page in sorted(PAGE.parent.glob("questions*.md"))
    for text in re.split(r"^## ", page.read_text(), flags=re.MULTILINE)[1:]
    if not text.startswith("The claims")
}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip())
def test_a_claim_leads_to_a_figure_and_a_command(row: str) -> None:
    _, claim, source, _, ours, verdict, _ = row.split("|")
    assert claim.strip() and ours.strip()
    named = re.fullmatch(r" \[(.*)\] | write-ups of P-EAGLE ", source)
    assert named and (named[1] is None or f"\n[{named[1]}]: https://" in PAGE.read_text())
    link = re.fullmatch(r" \[(reproduced|missed|not to be had).*\]\((.*)\) ", verdict)
    assert link and link[2] in SECTIONS


@pytest.mark.parametrize("name", SECTIONS)
def test_an_answer_has_a_figure_and_a_command(name: str) -> None:
    page, text = SECTIONS[name]
    assert any(block.text in text for block in blocks(page) if block.language == "sh")
    assert re.search(r"\d\.\d|\d{2}|No figure", text)


def test_published_figures_are_those_of_the_recipe() -> None:
    tables = tomllib.loads((ROOT / "recipes" / "published" / "figures.toml").read_text())
    speed, lengths = tables["speed"], tables["acceptance"]["lengths"]["humaneval"]
    over = tables["concurrency"]["over_eagle3"]
    published = [f"{value:,}" for value in speed["tokens_per_s"]["humaneval"].values()]
    published += [str(value) for value in speed["over_plain"].values()]
    published += [f"{value:.2f}" for every in lengths.values() for value in every]
    published += [f"{every[0]:.2f} to {every[-1]:.2f}" for every in over.values()]
    cells = " ".join(row.split("|")[3] for row in ROWS)
    assert [figure for figure in published if figure not in cells] == []
