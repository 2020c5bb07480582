"""The prompt sets that are made by rule.

    python recipes/prompt_sets/make.py --shared ../shared

Writes `{id, category, turns}` lines, compressed: `summarization`, `question_answering`,
`structured_json` and `long_output` of held-out text, `code_edit` of HumanEval's functions,
`form_json` of invented forms, and `long_reasoning` of the problems in `gsm8k.jsonl.gz`. The same
pins give the same lines.
"""

from __future__ import annotations

import argparse
import ast
import gzip
import hashlib
import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

from edits import edits
from forms import FORMS, form
from passages import Passage, docstrings, pep_sections, sources

PACKAGES = ("arrow", "boltons", "control", "humanize", "mlxtend", "tornado")
PINS = Path(__file__).parent.parent / "bundled_pair" / "packages.txt"
SIZE = 40
PROSE_SHARE = 0.4
WORDS = (75, 220)
CODE_CHARACTERS = (350, 1500)
NUM_CONTINUED, NUM_MANUALS = 12, 8
OPENING_CHARACTERS, OUTLINE_CHARACTERS = (500, 2600), (700, 2000)
LONG_FILE = 20_000
NUM_REASONED, NUM_PROBLEMS = 20, 5
OF_EACH_KIND = 8
REASON = (
    "Solve the five problems below. Reason about each of them step by step. Then solve it again in "
    "a second way and compare both results; where they differ, find the mistake. End with a list "
    "of the five answers."
)
SUMMARIES = (
    "Summarize the text above in one sentence.",
    "Summarize the text above in three bullet points.",
    "Summarize the text above in at most 60 words, for a reader who is new to the subject.",
)
# Headings that say nothing without their document.
_BARE = re.compile(r"Abstract|Overview|Specification|.*summary|Rationale|Performance|Validation")

Row = dict[str, object]


def wheels(folder: Path) -> list[Path]:
    """The wheels of the held-out packages; those that are missing are fetched with pip."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [line.split("#")[0].strip() for line in PINS.read_text().splitlines()]
    pins = [line for line in lines if line.partition("==")[0] in PACKAGES]
    files = [next(folder.glob(f"{pin.replace('==', '-')}-*.whl"), None) for pin in pins]
    missing = [pin for pin, file in zip(pins, files, strict=True) if file is None]
    if missing:
        options = ["-q", "--no-deps", "--only-binary=:all:", "-d", str(folder)]
        subprocess.run([sys.executable, "-m", "pip", "download", *options, *missing], check=True)
    return [next(folder.glob(f"{pin.replace('==', '-')}-*.whl")) for pin in pins]


def taking_turns(passages: Iterable[Passage]) -> Iterator[Passage]:
    """Passages in a fixed random order, one of each source after the other."""
    by_source: dict[str, list[Passage]] = defaultdict(list)
    for passage in sorted(passages, key=lambda p: hashlib.sha256(p.name.encode()).digest()):
        by_source[passage.source].append(passage)
    for turn in zip_longest(*(by_source[source] for source in sorted(by_source))):
        yield from (passage for passage in turn if passage is not None)


def is_fit(passage: Passage) -> bool:
    """Long enough to ask about; names no package registry, not even in the words of others."""
    if "pypi" in (passage.text + passage.code).lower():
        return False
    return WORDS[0] <= passage.words <= WORDS[1]


def is_fit_code(passage: Passage) -> bool:
    low, high = CODE_CHARACTERS
    return passage.kind == "function" and low <= len(passage.code) <= high


# ---- what is asked ----


def summarize(passage: Passage, number: int) -> str:
    return f"{passage.text}\n\n{SUMMARIES[number % len(SUMMARIES)]}"


def question(passage: Passage, number: int) -> str | None:
    """The passage and a question that it answers; None where no rule finds one."""
    short = passage.name.rpartition(".")[2]
    if passage.kind == "section":
        if _BARE.fullmatch(passage.name):
            return None
        text, asked = passage.text, passage.name.replace("``", "").removeprefix("But ")
        asked = asked[:1].upper() + asked[1:]
        if not asked.endswith("?"):
            asked = f'What does the text say about "{asked}"?'
    else:
        text = passage.code
        changed = re.search(r"\.\. version(changed|added):: ?([\d.]+)\n", text)
        if changed and changed[1] == "changed":
            asked = f"What changed in `{short}` with version {changed[2]}?"
        elif len(passage.parameters) < 2:
            return None
        elif number % 3 == 2:
            asked = f"Which parameters of `{short}` are documented, and what does each of them do?"
        else:
            asked = f"What is the parameter `{passage.parameters[number % 2]}` of `{short}` for?"
    return f"Text:\n\n{text}\n\nQuestion: {asked} Answer from the text alone.\nAnswer:"


def as_json(passage: Passage, number: int) -> str | None:
    """The passage and the keys of the object to answer with."""
    del number
    if passage.kind == "section":
        keys = (
            '"title" (string), "topic" (string), "claims" (array of strings) and "terms" (array of '
            "the technical terms in it)"
        )
        return f"{passage.text}\n\nDescribe the text above as one JSON object with the keys {keys}."
    if len(passage.parameters) < 2:
        return None
    keys = (
        '"name" (string), "summary" (one sentence), "parameters" (array of objects with the keys '
        '"name", "type" and "meaning") and "returns" (string or null)'
    )
    return f"{passage.code}\n\nDescribe this function as one JSON object with the keys {keys}."


def rows(
    name: str, passages: list[Passage], ask: Callable[[Passage, int], str | None], used: set[str]
) -> list[Row]:
    """A set of SIZE prompts, PROSE_SHARE of them on PEPs.

    No docstring comes twice in all sets, nor do two of one name, which tend to say the same.
    """
    found: list[Row] = []
    limits = {True: round(SIZE * PROSE_SHARE), False: SIZE}
    for is_pep in (True, False):
        for passage in taking_turns(p for p in passages if (p.kind == "section") == is_pep):
            if len(found) == limits[is_pep]:
                break
            key = f"{passage.source}.{passage.name.rpartition('.')[2]}"
            turn = None if key in used else ask(passage, len(found))
            if turn is None:
                continue
            if not is_pep:  # the PEPs are too few for that
                used.add(key)
            slug = re.sub(r"[^\w.]+", "-", passage.name).strip("-").lower()
            category = "prose" if is_pep else "documentation"
            found.append(_row(f"{name}/{passage.source}/{slug}", category, turn))
    if len(found) < SIZE:
        raise ValueError(f"{len(found)} prompts for {name}, {SIZE} wanted: change WORDS")
    return found


def _row(id_: str, category: str, turn: str) -> Row:
    return {"id": id_, "category": category, "turns": [turn]}


# ---- long outputs ----


def opening(text: str) -> str | None:
    """The beginning of a long file, up to the end of its first class's or function's docstring."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            lines = text.split("\n")[: node.body[0].end_lineno]
            while lines and (lines[0].startswith("#") or not lines[0].strip()):
                lines.pop(0)  # copyright
            cut = "\n".join(lines) + "\n"
            return cut if OPENING_CHARACTERS[0] <= len(cut) <= OPENING_CHARACTERS[1] else None
    return None


def outline(text: str) -> str:
    """The public classes, methods and functions of a file, one signature a line."""
    lines: list[str] = []
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            lines.append(f"class {node.name}:")
            lines += [f"    {_signature(f)}" for f in node.body if _is_public(f)]
        elif _is_public(node):
            lines.append(_signature(node))
    return "\n".join(lines)


def _is_public(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef) and not node.name.startswith("_")


def _signature(node: ast.stmt) -> str:
    assert isinstance(node, ast.FunctionDef)
    return f"def {node.name}({ast.unparse(node.args)})"


def long_rows(files: list[Path]) -> list[Row]:
    """Files to go on with, and manuals to write from outlines, packages taking turns."""
    openings, outlines = [], []
    for wheel in files:
        package = wheel.name.partition("-")[0]
        for path, text in sources(wheel):
            if len(text) < LONG_FILE or "pypi" in text.lower():
                continue
            if (start := opening(text)) is not None:
                openings.append(Passage(package, path, "file", start))
            names = outline(text)
            if OUTLINE_CHARACTERS[0] <= len(names) <= OUTLINE_CHARACTERS[1]:
                outlines.append(Passage(package, path, "outline", names))
    found = []
    for passage in list(taking_turns(openings))[:NUM_CONTINUED]:
        found.append(_row(f"long_output/code/{passage.name}", "code", passage.text))
    for passage in list(taking_turns(outlines))[:NUM_MANUALS]:
        ask = (
            f"The module `{passage.name}` defines:\n\n{passage.text}\n\nWrite its complete "
            "reference manual in Markdown, at least 4,000 words long: an introduction, then one "
            "section for each of these classes, methods and functions, in this order, with its "
            "signature, its purpose, every parameter, the return value, the errors it may raise "
            "and an example.\n"
        )
        found.append(_row(f"long_output/manual/{passage.name}", "manual", ask))
    if len(found) < NUM_CONTINUED + NUM_MANUALS:
        raise ValueError(f"{len(found)} prompts for long_output: change LONG_FILE")
    return found


def reasoning_rows(problems: list[str]) -> list[Row]:
    """Several problems a prompt, each to be solved twice: thinking about them takes long."""
    found = []
    for number in range(NUM_REASONED):
        some = problems[number * NUM_PROBLEMS :][:NUM_PROBLEMS]
        listed = [f"{index}. {problem.strip()}" for index, problem in enumerate(some, 1)]
        turn = "\n\n".join([REASON, *listed])
        found.append(_row(f"long_reasoning/gsm8k/{number * NUM_PROBLEMS}", "math", turn))
    return found


# ---- edits and forms ----


def edit_rows(problems: Iterable[dict[str, Any]]) -> list[Row]:
    """Functions of HumanEval, each with a change to make."""
    return [
        _row(f"code_edit/{kind}/{number}", kind, turn)
        for number, kind, turn in edits(problems, OF_EACH_KIND)
    ]


def form_rows() -> list[Row]:
    """Filled-in forms, the kinds taking turns."""
    return [
        _row(f"form_json/{kind}/{seed}", kind, form(kind, seed))
        for seed in range(OF_EACH_KIND)
        for kind in FORMS
    ]


def write_jsonl(path: Path, lines: list[Row]) -> None:
    """Write lines with gzip; a file that holds them already is left alone.

    Releases of zlib differ in the bytes that they make of the same lines.
    """
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode()
    if not path.exists() or gzip.decompress(path.read_bytes()) != text:
        path.write_bytes(gzip.compress(text, mtime=0))


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    # Not splitlines(): it also splits at characters that JSON strings may hold as they are.
    lines = text.split("\n")
    return [json.loads(line) for line in lines if line]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--shared", type=Path, required=True, help="holds corpus/, data/")
    parser.add_argument("--wheels", type=Path, default=Path("build/pair/wheels"))
    parser.add_argument("--prompts", type=Path, default=Path("src/peagle/bundled/prompts"))
    args = parser.parse_args(argv)
    files = wheels(args.wheels)
    texts = list(pep_sections(args.shared / "corpus" / "python_peps.txt.xz", WORDS[1]))
    texts += [passage for wheel in files for passage in docstrings(wheel, WORDS[1])]
    prose = [passage for passage in texts if is_fit(passage)]
    coded = [p for p in texts if is_fit_code(p) and "pypi" not in p.code.lower()]
    sections = [p for p in prose if p.kind == "section"]
    used: set[str] = set()
    sets = {
        "summarization": rows("summarization", prose, summarize, used),
        "question_answering": rows("question_answering", sections + coded, question, used),
        "structured_json": rows("structured_json", sections + coded, as_json, used),
        "long_output": long_rows(files),
        "code_edit": edit_rows(read_jsonl(args.shared / "data" / "humaneval.jsonl")),
        "form_json": form_rows(),
        "long_reasoning": reasoning_rows(
            [problem["turns"][0] for problem in read_jsonl(args.prompts / "gsm8k.jsonl.gz")]
        ),
    }
    for name, lines in sets.items():
        write_jsonl(args.prompts / f"{name}.jsonl.gz", lines)
        print(
            f"{name}: {len(lines)} prompts, {sum(len(str(r['turns'])) for r in lines)} characters"
        )


if __name__ == "__main__":
    main()
