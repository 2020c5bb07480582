"""Files of prompts, conversations and responses, as records; and stores of tokens, checked."""

from __future__ import annotations

import hashlib
import json
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from peagle.data.tables import parts_of, table_rows
from peagle.errors import UserError

SIDE_SUFFIX = ".meta.json"
STORE_KEY = "peagle_data"  # of a store's safetensors metadata
_CONVERSATIONS = ("messages", "conversations")
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}


@dataclass(frozen=True, slots=True)
class Record:
    """One object of a data file.

    Attributes:
        data: its fields; a line that is only a string is {"prompt": the string}.
        number: from 1.
        where: file and line (or row), for messages.
    """

    data: Mapping[str, Any]
    number: int
    where: str


@dataclass(frozen=True, slots=True)
class AskedConversation:
    """What is asked in one conversation.

    Attributes:
        id: as the file gives it, else the number of the record.
        turns: what the user says, turn by turn; at least one.
        system: messages before the first turn, as the file has them.
    """

    id: str
    turns: tuple[str, ...]
    system: tuple[Mapping[str, Any], ...] = ()

    @property
    def sha256(self) -> str:
        """Of what is asked; the id does not count."""
        asked = [[dict(message) for message in self.system], list(self.turns)]
        return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()


# ---- records --------------------------------------------------------------------------------


def read_records(path: Path) -> Iterator[Record]:
    """The records of a .jsonl or .parquet file, or of a folder of data, one after the other.

    Raises:
        UserError: nothing is there, it is of another kind, damaged (the line is named), or a
            package that reads it is missing.
    """
    parts = parts_of(path)
    if parts == [path] and path.is_file():
        if path.suffix == ".jsonl":
            return _read_jsonl(path)
        if path.suffix != ".parquet":
            raise UserError(
                f"The data file {str(path)!r} ends in {path.suffix!r}; expected .jsonl or "
                ".parquet, or a folder that Hugging Face datasets wrote."
            )
    return _read_tables(parts)


def _read_tables(parts: Sequence[Path]) -> Iterator[Record]:
    rows = chain.from_iterable(map(table_rows, parts))
    for number, (row, where) in enumerate(rows, start=1):
        for name in _CONVERSATIONS:
            if isinstance(row.get(name), dict):
                row[name] = _rows_of_columns(row[name])
        yield Record(row, number, where)


def _rows_of_columns(columns: dict[str, Any]) -> Any:
    """What datasets makes of a Sequence of objects, a list for each key, as objects again."""
    lists = columns.values()
    if not all(isinstance(one, list) for one in lists) or len(set(map(len, lists))) != 1:
        return columns
    return [dict(zip(columns, values, strict=True)) for values in zip(*lists, strict=True)]


def _read_jsonl(path: Path) -> Iterator[Record]:
    try:
        lines = path.open("rb")
    except OSError as error:
        raise UserError(f"The data file {str(path)!r} cannot be read: {error.strerror}.") from None
    with lines:
        for number, line in enumerate(lines, start=1):
            where = f"{path}, line {number}"
            if number == 1:
                line = line.removeprefix(BOM_UTF8)
            if not line.strip():
                continue
            try:
                value = json.loads(line.decode())
                if b"\\ud" in line.lower():
                    json.dumps(value, ensure_ascii=False).encode()
            except (ValueError, RecursionError) as error:
                raise UserError(_bad_line(where, line, error)) from None
            if isinstance(value, str):
                value = {"prompt": value}
            if not isinstance(value, dict):
                shown = line.decode(errors="replace").strip()[:60]
                raise UserError(f"{where} is {shown}; expected a JSON object.")
            yield Record(value, number, where)


def _bad_line(where: str, line: bytes, error: Exception) -> str:
    if isinstance(error, UnicodeEncodeError):
        return f"{where} holds half of a surrogate pair (\\ud800 to \\udfff), which is no text."
    if not line.endswith(b"\n") and _is_cut(line, error):
        return (
            f"{where} ends in the middle: the file was cut off. Write it again, or remove the "
            "last line."
        )
    if isinstance(error, UnicodeDecodeError):
        return f"{where} is not UTF-8 text."
    if isinstance(error, json.JSONDecodeError):
        # The line that it would name is always 1.
        return f"{where} is not JSON: {error.msg} at character {error.pos + 1}."
    return f"{where} is not JSON: {error}."


def _is_cut(line: bytes, error: Exception) -> bool:
    """Whether more bytes could make a last line whole."""
    if isinstance(error, UnicodeDecodeError):
        return error.reason == "unexpected end of data"
    if not isinstance(error, json.JSONDecodeError):
        return False
    at_end = error.pos >= len(error.doc.rstrip()) or error.msg.startswith("Unterminated string")
    return at_end or not line.rstrip().endswith(b"}")


# ---- conversations --------------------------------------------------------------------------


def messages_of(record: Record) -> list[dict[str, Any]] | None:
    """The messages of a record, None if it is no conversation.

    `messages` has them as OpenAI's API does; `conversations` as ShareGPT does, with from and value.

    Raises:
        UserError: they are malformed.
    """
    messages = record.data.get("messages", record.data.get("conversations"))
    if messages is None:
        return None
    if not isinstance(messages, list) or not all(isinstance(m, Mapping) for m in messages):
        raise UserError(f"{record.where}: the messages are no list of objects.")
    return [_message(message, record.where) for message in messages]


def _message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    if "from" in message and "role" not in message:
        role = str(message["from"])
        message = {"role": _ROLES.get(role, role), "content": message.get("value")}
    if not isinstance(message.get("role"), str):
        raise UserError(
            f"{where}: a message has the role {message.get('role')!r}; expected user, assistant, "
            "system, ..."
        )
    # Parquet has every key in every message.
    return {key: value for key, value in message.items() if value is not None}


def dialogue_of(record: Record) -> AskedConversation:
    """What is asked in a record: turns, messages (answers in them are left out) or a prompt.

    Raises:
        UserError: it has none of them, or they are malformed.
    """
    data = record.data
    given = data.get("id", record.number)
    if isinstance(given, bool) or not isinstance(given, str | int):
        raise UserError(f"{record.where}: id is {given!r}; expected a string or a whole number.")
    system: list[dict[str, Any]] = []
    if (messages := messages_of(record)) is not None:
        first = next((i for i, m in enumerate(messages) if m["role"] == "user"), len(messages))
        system = [m for m in messages[:first] if m["role"] != "assistant"]
        turns: Any = [m.get("content") for m in messages[first:] if m["role"] == "user"]
    elif "turns" in data:
        turns = data["turns"]
    else:
        turns = [data.get("prompt")]
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) for t in turns):
        raise UserError(
            f'{record.where}: expected {{"id", "turns": [...]}}, {{"id", "messages": [...]}} or '
            f'{{"id", "prompt"}} with text; got {json.dumps(dict(data), default=str)[:60]}'
        )
    if not all(turns):
        raise UserError(f"{record.where}: the prompt is empty; expected at least one character.")
    return AskedConversation(str(given), tuple(turns), tuple(system))


# ---- stores ---------------------------------------------------------------------------------


def side_file(path: Path) -> Path:
    """The file beside a data file or folder that says where it comes from."""
    if path.name in ("", ".."):  # "." and the like have a name once they are resolved
        path = path.resolve()
    return path.parent / (path.name + SIDE_SUFFIX)


def read_side(path: Path) -> dict[str, Any]:
    """What stands beside a data file, {} if nothing does.

    Raises:
        UserError: it cannot be read.
    """
    side = side_file(path)
    try:
        return metadata_of(side.read_text(encoding="utf-8"), side)
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{str(side)!r} cannot be read: {error}.") from None


def metadata_of(text: str | None, path: Path) -> dict[str, Any]:
    """What a file says of itself, a JSON object; {} where it says nothing."""
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UserError(f"The metadata of {str(path)!r} is not JSON: {error}.") from None
    if not isinstance(value, dict):
        raise UserError(f"The metadata of {str(path)!r} is {text[:60]!r}; expected an object.")
    return value


def tokenizer_sha256(folder: str | Path, tokenizer: Any) -> str:
    """What identifies a tokenizer: SHA-256 of tokenizer.json, else of the vocabulary.

    The former is also what a head's fingerprint holds.
    """
    file = Path(folder) / "tokenizer.json"
    if file.is_file():
        return hashlib.sha256(file.read_bytes()).hexdigest()
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(vocabulary.encode()).hexdigest()
