"""Reports for tests: their inputs, and pages taken apart."""

import copy
import re
from functools import cache
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from evaluation import report_samples as samples
from peagle.evaluation.report.files import read_results
from peagle.evaluation.report.page import page_html

VOID = {"meta", "link", "br", "hr", "img", "input"}


@cache
def small() -> dict[str, dict[str, Any]]:
    """All three files, few entries and cells; not to be changed."""
    return {
        "acceptance": samples.acceptance(("eagle3", "peagle"), (3, 7), (0.0, 0.7)),
        "throughput": samples.throughput(("plain", "eagle3", "peagle"), (3, 7), (1, 16)),
        "tune": samples.tune(),
    }


def some(*names: str) -> dict[str, dict[str, Any]]:
    """Copies of some of the files."""
    return {name: copy.deepcopy(small()[name]) for name in names}


def page_of(folder: Path, **documents: dict[str, Any]) -> str:
    """The page, without PNGs, which take their time."""
    return page_html(read_results(samples.write(folder, **documents)).with_turns())


def table_of(page: str, caption: str) -> list[list[str]]:
    """The texts of a table of the page, row by row."""
    (table,) = (t for t in re.findall(r"<table.*?</table>", page, re.DOTALL) if caption in t)
    rows = re.findall(r"<tr>(.*?)</tr>", table, re.DOTALL)
    return [
        [unescape(re.sub(r"<.*?>", "", cell)) for cell in re.findall(r"<t[hd].*?</t[hd]>", row)]
        for row in rows
    ]


class Parsed(HTMLParser):
    """Tags with attributes, and text by tag; fails where a tag is not closed."""

    def __init__(self, html: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.texts.append((self._open[-1] if self._open else "", data))

    def text(self, *without: str) -> str:
        """The text of the page, without that in some tags."""
        return "".join(text for tag, text in self.texts if tag not in without)
