"""Prompts: the bundled sets, and files of the user's own."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peagle.bundled import BUNDLED_PROMPTS
from peagle.errors import UserError

# In the package; evaluation/prompt_sets.py knows more, from the hub.
PROMPT_SETS = (
    "humaneval",
    "mt_bench",
    "gsm8k",
    "heldout_code",
    "summarization",
    "question_answering",
    "structured_json",
    "long_output",
    "long_reasoning",
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt.

    Attributes:
        id: the id in the file; without one, the number of the line.
        turns: what the user says, turn by turn; at least one, none empty.
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
        """The first turn."""
        return self.turns[0]

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation up to the first turn."""
        return [*map(dict, self.system), {"role": "user", "content": self.text}]


def load_prompt_set(name: str, limit: int | None = None) -> list[Prompt]:
    """Read a bundled prompt set, or its first `limit` prompts.

    Raises:
        UserError: no such set, or this installation lacks it.
    """
    if name not in PROMPT_SETS:
        raise UserError(f"No prompt set {name!r}; there are {', '.join(PROMPT_SETS)}.")
    check_limit(limit)
    return read_prompts(BUNDLED_PROMPTS / f"{name}.jsonl")[:limit]


def check_limit(limit: int | None) -> None:
    """Refuse to take no prompt."""
    if limit is not None and limit < 1:
        raise UserError(f"The limit is {limit}; expected at least 1 prompt.")


def read_prompts(path: str | Path) -> list[Prompt]:
    """Read the prompts of a file, one a line; "-" is standard input.

    The first line that is not blank decides how all are read: if it begins with `{` or `"`, every
    line is JSON ({"id", "turns"}, {"id", "prompt"} or a string; "category" is read too, further
    keys are left alone), otherwise every line is a prompt as it stands. Blank lines are skipped.

    Raises:
        UserError: the file is not readable or has no prompt, or a line is not one (its number).
    """
    name = "standard input" if str(path) == "-" else repr(str(path))
    try:
        raw = sys.stdin.buffer.read() if str(path) == "-" else Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"The prompt file {name} is not readable: {error.strerror}.") from None
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise UserError(f"{name}, line {line}: not UTF-8 text.") from None
    # Not splitlines(): it also splits at characters that JSON strings may hold as they are.
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
