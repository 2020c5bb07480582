"""Prompts from the bundled sets and from files of the user."""

import gzip
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peagle.bundled import BUNDLED_PROMPTS
from peagle.errors import UserError

# Sets in the package; evaluation/prompt_sets.py adds sets of the hub.
PROMPT_SETS = (
    "humaneval",
    "mt_bench",
    "gsm8k",
    "heldout_code",
    "summarization",
    "question_answering",
    "structured_json",
    "code_edit",
    "form_json",
    "long_output",
    "long_reasoning",
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt of one turn or of several.

    Attributes:
        id: the id in the file; without one, the number of the line.
        turns: the user's texts, turn by turn; at least one, none empty.
        category: the task's category in the file; "" without one.
        system: messages before the first turn.
        tools: functions that the model may call.
    """

    id: str
    turns: tuple[str, ...]
    category: str = ""
    system: tuple[Mapping[str, Any], ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()

    @property
    def text(self) -> str:
        """Return the user's first turn."""
        return self.turns[0]

    @property
    def messages(self) -> list[dict[str, Any]]:
        """Return the conversation up to the first turn."""
        return [*map(dict, self.system), {"role": "user", "content": self.text}]


def load_prompt_set(name: str, limit: int | None = None) -> list[Prompt]:
    """Read a bundled prompt set, or its first `limit` prompts.

    Raises:
        UserError: no such set, or this installation lacks it.
    """
    if name not in PROMPT_SETS:
        raise UserError(f"No prompt set {name!r}; there are {', '.join(PROMPT_SETS)}.")
    check_limit(limit)
    packed = BUNDLED_PROMPTS / f"{name}.jsonl.gz"
    try:
        lines = gzip.decompress(packed.read_bytes())
    except FileNotFoundError:
        raise UserError(
            f"The prompt set {name!r} is not there: this installation has no {str(packed)!r}. "
            "Install peagle again."
        ) from None
    return _parse_prompts(lines, repr(str(packed)))[:limit]


def check_limit(limit: int | None) -> None:
    """Raise a UserError for a limit below 1."""
    if limit is not None and limit < 1:
        raise UserError(f"The limit is {limit}; expected at least 1 prompt.")


def read_prompts(path: str | Path) -> list[Prompt]:
    """Read the prompts of a file, one a line; "-" is standard input.

    The first line that is not blank decides the format of all: if it begins with `{` or `"`, every
    line is JSON ({"id", "turns"}, {"id", "prompt"} or a string; "category" is read too, further
    keys are left alone), otherwise every line is a prompt by itself. Blank lines are skipped.

    Raises:
        UserError: the file is not readable or has no prompt, or a line is no prompt; the message
            has its number.
    """
    name = "standard input" if str(path) == "-" else repr(str(path))
    try:
        raw = sys.stdin.buffer.read() if str(path) == "-" else Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"The prompt file {name} is not readable: {error.strerror}.") from None
    return _parse_prompts(raw, name)


def _parse_prompts(raw: bytes, name: str) -> list[Prompt]:
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise UserError(f"{name}, line {line}: not UTF-8 text.") from None
    # Not splitlines(), which also splits at characters that JSON strings may hold unescaped.
    lines = [(i, line.strip("\r")) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise UserError(f"{name} has no prompts: it is empty. Expected one prompt a line.")
    if not lines[0][1].lstrip().startswith(("{", '"')):
        return [Prompt(str(number), (line,)) for number, line in lines]
    return [_parse_json(line, str(number), f"{name}, line {number}") for number, line in lines]


def _parse_json(line: str, number: str, where: str) -> Prompt:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        problem = f"{error.msg} at column {error.colno}"
        raise UserError(f"{where}: not JSON ({problem}). Expected one JSON value a line.") from None
    if isinstance(record, str):
        record = {"prompt": record}
    if not isinstance(record, dict) or len({"prompt", "turns"} & set(record)) != 1:
        raise UserError(
            f'{where}: expected {{"id", "turns": [...]}}, {{"id", "prompt"}} or a string; '
            f"got {line[:60]}"
        )
    id, category = record.get("id", number), record.get("category")
    turns = record["turns"] if "turns" in record else [record["prompt"]]
    if category is not None and not isinstance(category, str):
        raise UserError(f"{where}: category is {category!r}; expected a string.")
    if isinstance(id, bool) or not isinstance(id, str | int):
        raise UserError(f"{where}: id is {id!r}; expected a string or a whole number.")
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) for t in turns):
        raise UserError(f"{where}: the prompt is {turns!r}; expected text, or a list of turns.")
    if not all(turns):
        raise UserError(f"{where}: the prompt is empty; expected at least one character.")
    return Prompt(str(id), tuple(turns), category or "")
