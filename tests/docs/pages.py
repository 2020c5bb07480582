"""The pages that users read, their fenced blocks, and the commands in them."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "recipes").glob("*/README.md")),
]
# The needs of a block that a test cannot meet. The word stands after the language: ```sh gpu
NEEDS = {
    "gpu": "an NVIDIA card",
    "hub": "a model hub",
    "account": "an account at AWS",
    "vllm": "an installed vLLM",
    "docker": "a Docker engine",
    "make": "a checkout of its own, in which make sets up .venv",
    "install": "a package index",
    "nodes": "several machines",
    "long": "more than minutes on a CPU",
    "data": "data that the repository does not hold",
    "peer": "another project's program",
    "server": "the server that a block above started",
}
_FENCE = re.compile(r"^```(\S*) ?(.*)$")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        page: the page.
        line: number of its first line of text in the page.
        language: the first word behind the fence.
        needs: the word behind the language, a key of `NEEDS`, or nothing.
        text: what it shows.
    """

    page: Path
    line: int
    language: str
    needs: str
    text: str

    @property
    def names_smollm2(self) -> bool:
        """Whether it uses the chat model, whose target is fetched; paths do not name it."""
        return re.search(r"(?<![\w./-])smollm2(-eagle3)?(?![\w./-])", self.text) is not None

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, from top to bottom."""
    found: list[Block] = []
    opened: tuple[str, str, int] | None = None
    lines: list[str] = []
    for number, line in enumerate(page.read_text().splitlines(), start=1):
        fence = _FENCE.match(line)
        if fence and opened is None:
            opened, lines = (fence[1], fence[2].strip(), number + 1), []
        elif fence and opened is not None:
            language, needs, first = opened
            found.append(Block(page, first, language, needs, "\n".join(lines)))
            opened = None
        elif opened is not None:
            lines.append(line)
    assert opened is None, f"{page}: the block at line {opened and opened[2] - 1} is not closed"
    return found


def commands(text: str) -> Iterator[list[str]]:
    """The commands of a shell block, each as words; `&&` and `|` separate commands."""
    logical = ""
    for line in text.replace("\\\n", " ").splitlines():
        logical += line
        lexer = shlex.shlex(logical, posix=True, punctuation_chars="|&;<>")
        lexer.whitespace_split = True
        try:
            found = [*lexer, ";"]
        except ValueError:  # a quotation goes on in the next line
            logical += "\n"
            continue
        logical = ""
        words: list[str] = []
        for word in found:
            if word.strip("|&;"):
                words.append(word)
            elif words:
                yield words[: next((i for i, w in enumerate(words) if w[0] in "<>"), None)]
                words = []


def spans(page: Path, program: str = "peagle") -> list[str]:
    """The inline code of a page that begins with a program, as written."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return [" ".join(span.split()) for span in re.findall(rf"`({program}\s[^`]+)`", text)]
