"""Passages of held-out text: sections of PEPs, docstrings, outlines of modules."""

from __future__ import annotations

import ast
import inspect
import lzma
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

HELD_OUT_PEPS = ("465", "617")
# Their docstrings repeat those of the standard library, which was in the training text.
_NOT_HELD_OUT = ("boltons/cacheutils.py", "boltons/tbutils.py")
# A heading is underlined; the collection has them at the left margin.
_HEADING = re.compile(r"^(\S[^\n]*)\n([=\-~^\"'])\2{3,}\n", re.M)
# Where the sections of a docstring begin that are no prose.
_SECTION = re.compile(
    r"^(?:Args|Arguments|Parameters|Returns|Raises|Examples?|Attributes|Notes?|References|"
    r"Usage|See Also|Yields|Keyword Args)\s*:*\s*$|^:(?:param|return|rtype|raises?)\b|^\.\. |^>>>",
    re.M | re.I,
)
_NUMPY = re.compile(r"^(\*{0,2}\w+) ?: ?([^\n]+)\n((?:[ \t]+[^\n]+\n?)+)", re.M)
_SPHINX = re.compile(r"^:param (?:\w+ )?(\w+): ([^\n]+)()", re.M)
_GOOGLE = re.compile(r"^ {4}(\w+)(?: \(([^)]*)\))?: ([^\n]+)", re.M)


@dataclass(frozen=True)
class Passage:
    """A piece of text and where it stands.

    Attributes:
        source: package or PEP.
        name: dotted name, or the heading.
        kind: "section", "module", "class" or "function".
        text: whole paragraphs.
        code: signature and docstring as the file has them ("" for others).
        parameters: those that the docstring explains.
        path: of the file.
    """

    source: str
    name: str
    kind: str
    text: str
    code: str = ""
    parameters: tuple[str, ...] = field(default=())
    path: str = ""

    @property
    def words(self) -> int:
        return len(self.text.split())


def is_prose(paragraph: str) -> bool:
    """Whether a paragraph is sentences: no list, code, table or directive."""
    starts = (" ", ">>>", "..", ":", "*", "-", "+", "|", "=", "#")
    if paragraph.startswith(starts) or not paragraph[:1].isupper() or "`__" in paragraph:
        return False
    return len(paragraph.split()) >= 12 and bool(re.search(r"[.!?][)\"*]?$", paragraph.rstrip()))


def prose(text: str, words: int) -> str:
    """The beginning of a text, whole paragraphs up to so many words; the last one is sentences.

    Empty where sentences are less than half of it, or where it does not begin with them.
    """
    paragraphs = [one.strip("\n") for one in re.split(r"\n\s*\n", text.strip("\n"))]
    kept: list[str] = []
    for paragraph in paragraphs:
        if kept and len(" ".join([*kept, paragraph]).split()) > words:
            break
        kept.append(paragraph)
    while kept and not is_prose(kept[-1]):
        kept.pop()
    sentences = sum(len(one.split()) for one in kept if is_prose(one))
    if not kept or not kept[0][:1].isupper() or 2 * sentences < len(" ".join(kept).split()):
        return ""
    return "\n\n".join(kept)


def pep_sections(collection: Path, words: int) -> Iterator[Passage]:
    """Sections of the held-out PEPs, in their order."""
    with lzma.open(collection, "rt", encoding="utf-8") as packed:
        parts = re.split(r"\n(?=PEP \d+: )", packed.read())
    for part in parts:
        number = re.match(r"PEP (\d+)", part)
        if number is None or number[1] not in HELD_OUT_PEPS:
            continue
        pieces = _HEADING.split(part)
        for heading, text in zip(pieces[1::3], pieces[3::3], strict=True):
            if heading not in ("References", "Copyright"):
                yield Passage(f"pep-{number[1]}", heading, "section", prose(text, words))


def docstrings(wheel: Path, words: int) -> Iterator[Passage]:
    """The documented modules, classes and functions of a wheel that are public and no tests."""
    package = wheel.name.partition("-")[0]
    for path, text in sources(wheel):
        tree = ast.parse(text)
        module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        yield from _own(tree, module, text, package, path, words)


def sources(wheel: Path) -> Iterator[tuple[str, str]]:
    """(path, text) of the Python files of a wheel that are neither tests nor others' work."""
    with zipfile.ZipFile(wheel) as archive:
        for path in sorted(archive.namelist()):
            if path in _NOT_HELD_OUT or re.search(r"(^|/)(tests?|externals)/|/test_|/_", path):
                continue
            if path.endswith(".py"):
                yield path, archive.read(path).decode("utf-8").expandtabs(4)


def _own(
    node: ast.AST, name: str, text: str, package: str, path: str, words: int
) -> Iterator[Passage]:
    if passage := _passage(node, name, text, package, path, words):
        yield passage
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef) and not child.name.startswith("_"):
            yield from _own(child, f"{name}.{child.name}", text, package, path, words)


def _passage(
    node: ast.AST, name: str, text: str, package: str, path: str, words: int
) -> Passage | None:
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
        return None
    doc = ast.get_docstring(node)
    if not doc or not doc.isascii():
        return None
    kinds = {ast.Module: "module", ast.ClassDef: "class", ast.FunctionDef: "function"}
    cut = _SECTION.search(doc)
    code = ""
    if not isinstance(node, ast.Module):
        lines = text.split("\n")[node.lineno - 1 : node.body[0].end_lineno]
        code = inspect.cleandoc("\n".join(["", *lines]))
    return Passage(
        package,
        name,
        kinds[type(node)],
        prose(doc[: cut.start()] if cut else doc, words),
        code,
        _parameters(doc, node),
        path,
    )


def _parameters(doc: str, node: ast.AST) -> tuple[str, ...]:
    found: list[str] = []
    if numpy := re.search(r"^Parameters\n-+\n(.*?)(?=^\w[^\n]*\n---|\Z)", doc, re.M | re.S):
        found = [match[1] for match in _NUMPY.finditer(numpy[1])]
    elif google := re.search(r"^Args:\n(.*?)(?=^\S|\Z)", doc, re.M | re.S):
        found = [match[1] for match in _GOOGLE.finditer(google[1])]
    else:
        found = [match[1] for match in _SPHINX.finditer(doc)]
    taken = {arg.arg for arg in ast.walk(node) if isinstance(arg, ast.arg)}
    return tuple(name for name in found if name in taken)
