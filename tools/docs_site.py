"""Write the pages of the documentation site into a folder, from which mkdocs builds the site.

    python tools/docs_site.py build/pages

The pages are those of docs/, and those that `reference_pages` makes from the source. A link that
leaves docs/ becomes a link into the repository. Its address is `Repository` of [project.urls] in
pyproject.toml, else that of the repository in which GitHub runs a workflow; without either the path
stands there in place of a link.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

from reference_pages import reference_pages

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?!https?:|#)([^)\s]+)\)")
_FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


def repository_address(environ: Mapping[str, str]) -> str | None:
    """Return the address of the repository's pages; None where nothing tells it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    if named := project.get("urls", {}).get("Repository"):
        return named.rstrip("/")
    server, name = environ.get("GITHUB_SERVER_URL"), environ.get("GITHUB_REPOSITORY")
    return f"{server}/{name}" if server and name else None


def site_page(text: str, folder: Path, address: str | None) -> str:
    """Return a page of docs/ as the site has it.

    Args:
        text: the page.
        folder: its folder.
        address: the address of the repository, if it is known.

    Raises:
        SystemExit: a link leads to no file.
    """

    def link(match: re.Match[str]) -> str:
        words, target = match.groups()
        name, _, heading = target.partition("#")
        file = (folder / name).resolve()
        if not file.exists():
            sys.exit(f"docs_site: {folder}: the link to {target!r} leads to no file.")
        if file.is_relative_to(DOCS):
            return match[0]
        path = file.relative_to(ROOT).as_posix()
        if address is None:
            return words if f"`{path}`" in words else f"{words} (`{path}`)"
        kind = "tree" if file.is_dir() else "blob"
        return f"[{words}]({address}/{kind}/main/{path}{'#' * bool(heading)}{heading})"

    # Code has no links, and the word behind a block's language is for the tests.
    parts, at = [], 0
    for fence in _FENCE.finditer(text):
        parts += [_LINK.sub(link, text[at : fence.start()])]
        parts += [re.sub(r"^```(\w+) .*", r"```\1", fence[0], count=1)]
        at = fence.end()
    return "".join([*parts, _LINK.sub(link, text[at:])])


def write_site(target: Path, address: str | None) -> None:
    """Write all pages, and the pictures beside them, into a folder that is emptied first."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(DOCS, target)
    for page in sorted(DOCS.rglob("*.md")):
        text = site_page(page.read_text(), page.parent, address)
        (target / page.relative_to(DOCS)).write_text(text)
    for name, text in reference_pages().items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_text(text)


if __name__ == "__main__":
    write_site(Path(sys.argv[1]), repository_address(os.environ))
