"""Files of prompts, conversations and responses, as records; and the provenance beside them.

A folder of data is what `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote, or it holds
.parquet files, which are read in the order of their names. FOLDER/SPLIT names one split of it: a
subfolder, or the files that are named as the hub names them (train-00000-of-00002.parquet). Or
`peagle serve --record` wrote it (`peagle.data.recorded`), or SageMaker's data capture
(`peagle.data.captured`).
"""

from __future__ import annotations

import hashlib
import json
import re
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from peagle.data.captured import CALL, CALL_BEGIN, UnusableCall, captured_files, record_of
from peagle.data.recorded import is_recording, record_files, recorded_lines
from peagle.errors import UserError
from peagle.extras import install_extra
from peagle.messages import text_of, tools_in_template_form
from peagle.model_folder import sha256_of

if TYPE_CHECKING:
    import pyarrow

_STATE = "state.json"  # beside the .arrow files of a saved dataset
_ROWS_AT_ONCE = 1024
_SHARD = re.compile(r"(.+)-\d+-of-\d+(-[0-9a-f]+)?\.parquet")
# What pyarrow and datasets raise on damaged files; ArrowInvalid is a ValueError.
_DAMAGE_ERRORS = (OSError, ValueError, LookupError, TypeError, AttributeError)


def is_folder(path: Path) -> bool:
    """Return whether a path names a folder of data, or a split of one."""
    return path.is_dir() or bool(_split_files(path))


def split_of(path: Path, split: str | None) -> Path:
    """Return the place of a split of a folder, or the path itself without a split.

    Raises:
        UserError: the path is a file, is not there, or has no such split.
    """
    if split is None:
        return path
    if path.is_file():
        raise UserError(
            f"{str(path)!r} is a file and has no split {split!r}. Leave --split out, or write it "
            "behind the folder that has it: FOLDER/SPLIT."
        )
    if not path.is_dir():
        raise UserError(f"The data folder {str(path)!r} is not there.")
    folder = path
    while not is_folder(folder / split):
        splits = _splits(folder)
        if not splits:
            table_files(folder)  # refuses a folder without any data
        if len(splits) != 1 or not _splits(folder / splits[0]):
            names = ", ".join(splits) or "none; leave --split out"
            raise UserError(f"{str(folder)!r} has no split {split!r}: it has {names}.")
        folder /= splits[0]
    return folder / split


def table_files(path: Path) -> list[Path]:
    """Return the files that hold a table, or the one folder of a saved dataset.

    Raises:
        UserError: nothing is there, nothing that can be read, or several splits.
    """
    if path.is_file() or (path / _STATE).is_file():
        return [path]
    if is_recording(path):
        if files := record_files(path):
            return files
        raise UserError(f"The folder {str(path)!r} holds no records yet.")
    if not path.is_dir():
        if files := _split_files(path):
            return files
        fault = "is a broken link" if path.is_symlink() else "is not there"
        raise UserError(f"The data file or folder {str(path)!r} {fault}.")
    splits = _splits(path)
    if len(splits) > 1:
        choices = " or ".join(repr(str(path / split)) for split in splits)
        raise UserError(f"{str(path)!r} has several splits: name {choices}, or add --split.")
    if files := _parquet_files(path):
        return files
    if splits:
        return table_files(path / splits[0])
    if files := captured_files(path):
        return files
    names = [one.name for one in _visible(path)]
    shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "") if names else "nothing"
    text = (
        f"The folder {str(path)!r} is no data: expected one that Dataset.save_to_disk or "
        "DatasetDict.save_to_disk (of Hugging Face datasets) or SageMaker's data capture wrote, or "
        f"one of .parquet files; it holds {shown}."
    )
    if any(name.endswith(".arrow") for name in names):
        text += f" Without {_STATE} it is a cache, or its writing was cut off: save it again."
    raise UserError(text)


def check_traffic(folder: Path) -> None:
    """Refuse a folder without recorded or captured traffic.

    Raises:
        UserError: it has none.
    """
    if not is_recording(folder) and not captured_files(folder):
        raise UserError(
            f"{str(folder)!r} holds no records; expected a folder that `peagle serve --record` or "
            "SageMaker's data capture has written."
        )


def sha256_of_table(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, or of the names and hashes of a folder's files.

    Records that a server deletes meanwhile, as its limits ask, are left out.

    Raises:
        UserError: as `table_files` does.
    """
    files = table_files(path)
    if files == [path] and path.is_file():
        return sha256_of(path)
    if files[0].is_dir():
        files = _saved_files(files[0])
    hashes: list[list[str]] = []
    for file in files:
        with suppress(FileNotFoundError):
            hashes.append([file.name, sha256_of(file)])
    return hashlib.sha256(json.dumps(hashes).encode()).hexdigest()


def table_rows(part: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the rows of a file or of a saved dataset, each with its place for messages.

    Values are what JSON has: times and the like become text. Columns with bytes (images) are left
    out, and so are the nulls of objects at any depth: a table gives every object the keys of all
    others. The nulls in a list are values, and so are those in JSON text.

    Raises:
        UserError: the data is damaged, or Hugging Face datasets is missing.
    """
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            f"Reading {str(part)!r} needs datasets, which cannot be imported ({_brief(error)}): "
            f"{install_extra('train')}"
        ) from None
    if part.is_dir():
        kind = "dataset"
        remedy = (
            f"Save it again, with this version of datasets ({datasets.__version__}) or an older one"
        )
    else:
        kind, remedy = "Parquet file", "Write or copy it again"
    # datasets keeps a lock file of its own beside what it reads.
    with TemporaryDirectory() as cache:
        try:
            if not part.is_dir():
                datasets.logging.set_verbosity(datasets.logging.CRITICAL)
                options: dict[str, Any] = {"split": "train", "streaming": True, "cache_dir": cache}
                # Without a size, datasets takes that of the first group of rows, which may be 0.
                options["batch_size"] = _ROWS_AT_ONCE
                table = datasets.load_dataset("parquet", data_files=[str(part)], **options)
            elif _saved_files(part):
                table = datasets.Dataset.load_from_disk(str(part), keep_in_memory=False)
            else:  # datasets cannot load a dataset without rows
                return
            # A saved dataset keeps the format that it was last read in, such as tensors.
            table = table.with_format(None)
            schema = table.features.arrow_schema
            kept = [f for f in schema if not _has_bytes(f.type)]
            table = table.select_columns([f.name for f in kept])
            without_nulls = _null_remover({f.name: f.type for f in kept})
            for number, row in enumerate(table, start=1):
                plain = json.loads(json.dumps(without_nulls(row), default=str))
                yield plain, f"{part}, row {number}"
        except _DAMAGE_ERRORS as error:
            raise UserError(
                f"{str(part)!r} is not a whole {kind} ({_brief(error)}). {remedy}."
            ) from None


def _has_bytes(kind: pyarrow.DataType) -> bool:
    if kind.num_fields:
        return any(_has_bytes(kind.field(index).type) for index in range(kind.num_fields))
    return "binary" in str(kind)


def _null_remover(kinds: Mapping[str, pyarrow.DataType]) -> Callable[[Any], Any]:
    """Return a function that removes the nulls of an object whose values have these types."""
    inner = {name: within for name, kind in kinds.items() if (within := _null_remover_of(kind))}

    def remove(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        present = {name: one for name, one in value.items() if one is not None}
        return present | {name: inner[name](present[name]) for name in inner if name in present}

    return remove


def _null_remover_of(kind: pyarrow.DataType) -> Callable[[Any], Any] | None:
    """Return `_null_remover` for the objects in values of a type, None if it has no objects."""
    from pyarrow import types

    if types.is_struct(kind):
        fields = (kind.field(index) for index in range(kind.num_fields))
        return _null_remover({field.name: field.type for field in fields})
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        remove = _null_remover_of(kind.field(0).type)
        return remove and (lambda value: [remove(one) for one in value])
    return None


def _brief(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _saved_files(folder: Path) -> list[Path]:
    """Return the .arrow files of a saved dataset; cached files may lie beside them."""
    state = json.loads((folder / _STATE).read_text(encoding="utf-8"))
    return [folder / one["filename"] for one in state["_data_files"]]


def _visible(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(one for one in folder.iterdir() if not one.name.startswith("."))


def _parquet_files(folder: Path) -> list[Path]:
    return [one for one in _visible(folder) if one.suffix == ".parquet" and one.is_file()]


def _split_files(path: Path) -> list[Path]:
    """Return the files in FOLDER that belong to the split of FOLDER/SPLIT."""
    return [one for one in _parquet_files(path.parent) if _split_name(one) == path.name]


def _split_name(file: Path) -> str | None:
    found = _SHARD.fullmatch(file.name)
    return found and found[1]


def _splits(folder: Path) -> list[str]:
    """Return the splits by names of files, or by subfolders where the folder itself has no data."""
    if files := _parquet_files(folder):
        return sorted({name for file in files if (name := _split_name(file)) is not None})
    if (folder / _STATE).is_file():
        return []
    inner = [one for one in _visible(folder) if one.is_dir()]
    return [one.name for one in inner if (one / _STATE).is_file() or _parquet_files(one)]


STORE_KEY = "peagle_data"  # of a store's safetensors metadata
_CONVERSATIONS = ("messages", "conversations")
# Names of ShareGPT, and of OpenAI's API before it had tools, for roles.
_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool", "function": "tool"}
_FUNCTION = ("name", "description", "parameters", "strict")  # in the order that a server has


@dataclass(frozen=True, slots=True)
class Record:
    """One object of a data file.

    Attributes:
        data: its fields; a line that is only a string is {"prompt": the string}.
        number: from 1.
        where: file and line (or row), for messages.
        fault: the reason why it cannot be used whatever reads it; it has no fields then.
    """

    data: Mapping[str, Any]
    number: int
    where: str
    fault: Dropped | None = None

    def check(self) -> None:
        """Raise an UnusableRecord if it has a fault."""
        if self.fault is not None:
            raise UnusableRecord(self.fault.reason, self.fault.detail)


@dataclass(frozen=True, slots=True)
class Dropped:
    """The reason why a record or an answer is left out, in words that many share; and details."""

    reason: str
    detail: str = ""


class UnusableRecord(Exception):
    """A record, or a part of one, cannot be used; `why` counts it among others."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.why = Dropped(reason, detail)


@dataclass(slots=True)
class DropCounts:
    """Counts of the records and parts that are left out.

    Attributes:
        dropped: how many were left out, by reason.
        details: the first case of each reason.
    """

    dropped: Counter[str] = field(default_factory=Counter)
    details: dict[str, str] = field(default_factory=dict)

    def drop(self, why: Dropped, where: str) -> None:
        """Count a part that is left out of the record at a place."""
        self.dropped[why.reason] += 1
        self.details.setdefault(why.reason, f"{where}: {why.detail}" if why.detail else where)

    def reasons(self) -> list[str]:
        """Return a phrase for each reason, with its count and first case, by count."""
        return [
            f"{count} × {reason} (first: {self.details[reason]})"
            for reason, count in self.dropped.most_common()
        ]


@dataclass(frozen=True, slots=True)
class RecordedConversation:
    """A conversation in the form of OpenAI's API.

    Attributes:
        messages: content is text; keys without a value are left out.
        weights: of each message; 1 where the record has none.
        tools: functions that the assistant may call, in the form that a server gives to templates.
        rest: the reason why further messages of the record are left out, None if all are there.
    """

    messages: list[dict[str, Any]]
    weights: list[Any]
    tools: list[dict[str, Any]]
    rest: Dropped | None = None


@dataclass(frozen=True, slots=True)
class AskedConversation:
    """One conversation without the answers of the assistant.

    Attributes:
        id: the id in the file; without one, the number of the record.
        turns: the turns before each answer, at least one: the text of the user, or messages.
            Messages with one of the assistant's take the place of the answer before them: results
            of tools belong to the calls that the file has.
        system: messages before the first turn, as the file has them.
        tools: functions that the assistant may call.
    """

    id: str
    turns: tuple[str | tuple[Mapping[str, Any], ...], ...]
    system: tuple[Mapping[str, Any], ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()

    @property
    def sha256(self) -> str:
        """Return the hash of system messages, turns and tools; the id does not count."""
        content: list[Any] = [self.system, self.turns]
        content += [self.tools] if self.tools else []
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


# ---- records ----

_NO_OBJECT = "the line is no object"
_CUT_LINE = "the line was cut off, since its server was killed"
_CUT_CALL = "the line was cut off"
_HALF_PAIR = "the text holds half of a surrogate pair"


def read_records(path: Path, cipher: Any = None) -> Iterator[Record]:
    """Yield the records of a .jsonl or .parquet file, or of a folder of data.

    Args:
        cipher: reads the encrypted records of `peagle serve --record` (`recorded.read_cipher`).

    Raises:
        UserError: nothing is there, the data is of another kind or damaged (the line is named), or
            a package that reads it is missing.
    """
    parts = table_files(path)
    if is_recording(path):
        return _read_recording(parts, cipher)
    if parts == [path] and path.is_file() and path.suffix != ".parquet":
        if path.suffix != ".jsonl":
            raise UserError(
                f"The data file {str(path)!r} ends in {path.suffix!r}; expected .jsonl or "
                ".parquet, or a folder that Hugging Face datasets wrote."
            )
        return _read_jsonl(path)
    if parts[0].suffix == ".jsonl" and parts[0].is_file():
        records = chain.from_iterable(_read_jsonl(part, is_captured=True) for part in parts)
        return (replace(record, number=number) for number, record in enumerate(records, start=1))
    rows = chain.from_iterable(map(table_rows, parts))
    return (
        Record(_with_message_objects(row), number, where)
        for number, (row, where) in enumerate(rows, start=1)
    )


def _read_recording(files: Sequence[Path], cipher: Any) -> Iterator[Record]:
    number = 0
    for file in files:
        for line, value in recorded_lines(file, cipher):
            number += 1
            fault = Dropped(_CUT_LINE) if value is None else None
            yield Record(value or {}, number, f"{file}, line {line}", fault)


def _with_message_objects(row: dict[str, Any]) -> dict[str, Any]:
    """Turn messages and tools into lists of objects.

    datasets keeps them as a list for each key; messages may be JSON text too.
    """
    for name in (*_CONVERSATIONS, "tools"):
        columns = row.get(name)
        if name in _CONVERSATIONS and isinstance(columns, str):
            row[name] = _parsed(columns)
        if isinstance(columns, dict) and all(isinstance(one, list) for one in columns.values()):
            lists = columns.values()
            if len(set(map(len, lists))) == 1:
                values = zip(*lists, strict=True)
                row[name] = [dict(zip(columns, one, strict=True)) for one in values]
    return row


def _read_jsonl(path: Path, *, is_captured: bool = False) -> Iterator[Record]:
    try:
        lines = path.open("rb")
    except OSError as error:
        raise UserError(f"The data file {str(path)!r} cannot be read: {error.strerror}.") from None
    with lines:
        for number, line in enumerate(lines, start=1):
            where = f"{path}, line {number}"
            is_captured |= CALL_BEGIN.match(line) is not None
            if number == 1:
                line = line.removeprefix(BOM_UTF8)
            if not line.strip():
                continue
            try:
                value = json.loads(line.decode())
            except (ValueError, RecursionError) as error:
                if is_captured:
                    yield Record({}, number, where, Dropped(_CUT_CALL))
                    continue
                raise UserError(_describe_bad_line(where, line, error)) from None
            fault = _fault(value, line)
            if fault is None and isinstance(value, dict) and CALL in value:
                value, fault = _captured(value)
            if isinstance(value, str):
                value = {"prompt": value}
            yield Record({} if fault else _with_message_objects(value), number, where, fault)


def _captured(call: Mapping[str, Any]) -> tuple[dict[str, Any], Dropped | None]:
    try:
        data = record_of(call)
        return data, _half_pair(data)
    except UnusableCall as error:
        return {}, Dropped(*error.args)


def _fault(value: Any, line: bytes) -> Dropped | None:
    """Return the reason why the value of a line is no record, None if it is one."""
    if not isinstance(value, str | dict):
        return Dropped(_NO_OBJECT, line.decode(errors="replace").strip()[:60])
    return _half_pair(value) if b"\\ud" in line.lower() else None


def _half_pair(value: Any) -> Dropped | None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        return Dropped(_HALF_PAIR, f"\\u{ord(error.object[error.start]):x} stands alone")
    return None


def _describe_bad_line(where: str, line: bytes, error: Exception) -> str:
    is_cut = False
    if isinstance(error, UnicodeDecodeError):
        is_cut = error.reason == "unexpected end of data"
        problem = "is not UTF-8 text"
    elif isinstance(error, json.JSONDecodeError):
        at_end = error.pos >= len(error.doc.rstrip()) or error.msg.startswith("Unterminated string")
        is_cut = at_end or not line.rstrip().endswith(b"}")
        # The line that the error would name is always 1.
        problem = f"is not JSON: {error.msg} at character {error.pos + 1}"
    else:
        problem = f"is not JSON: {error}"
    if is_cut and not line.endswith(b"\n"):
        return (
            f"{where} ends in the middle: the file was cut off. Write it again, or remove the "
            "last line."
        )
    return f"{where} {problem}. Correct the line or remove it."


# ---- conversations ----


def conversation_of(record: Record) -> RecordedConversation | None:
    """Return the conversation of a record, None if it holds none.

    `messages` has it as OpenAI's API does; `conversations` as ShareGPT does, with from and value.
    `tools` (or `functions`, their older name) may be JSON text, and so may the calls of a message.

    Raises:
        UnusableRecord: it is malformed.
    """
    record.check()
    found = (record.data.get(name) for name in _CONVERSATIONS)
    given = next((one for one in found if one is not None), None)
    if given is None:
        return None
    if not isinstance(given, list) or not all(isinstance(m, Mapping) for m in given):
        raise UnusableRecord("the messages are no list of objects", json.dumps(given)[:60])
    return conversation_with(record, [_in_openai_form(message) for message in given])


def conversation_with(
    record: Record, messages: Sequence[Mapping[str, Any]]
) -> RecordedConversation:
    """Return a conversation of some messages with the system prompt and the tools of a record.

    `system` (or `system_prompt`) counts where the messages begin with no system message.

    Raises:
        UnusableRecord: the system prompt is not text, or the tools are no functions.
    """
    given = record.data.get("system") or record.data.get("system_prompt")
    if given and (not messages or messages[0]["role"] not in ("system", "developer")):
        messages = [{"role": "system", "content": given}, *messages]
    kept: list[dict[str, Any]] = []
    weights: list[Any] = []
    rest = None
    for message in messages:
        # Nulls are keys without a value: OpenAI's API means that, and tables have every key.
        message = {key: value for key, value in message.items() if value is not None}
        try:
            if "content" in message:
                message["content"] = text_of(
                    message["content"], f"The message of {message['role']}"
                )
        except UserError as error:
            rest = Dropped("the content of a message is not text", str(error))
            break
        weights.append(message.pop("weight", 1))
        kept.append(message)
    return RecordedConversation(kept, weights, _tools_of(record), rest)


def _in_openai_form(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as OpenAI's API has it, from that form, its older one or ShareGPT's."""
    formed = dict(message)
    if "from" in message and "role" not in message:
        formed = {"role": str(message["from"]), "content": message.get("value")}
        formed["weight"] = message.get("weight")
        if formed["role"] == "function_call":
            calls = _parsed(formed.pop("content"))
            calls = calls if isinstance(calls, list) else [calls]
            formed |= {"role": "assistant", "tool_calls": [_call(one) for one in calls]}
    role = formed.get("role")
    if not isinstance(role, str):
        raise UnusableRecord(
            "a message has no role", f"the role {role!r}; expected user, assistant, system, ..."
        )
    formed["role"] = _ROLES.get(role, role)
    if (call := formed.pop("function_call", None)) is not None:
        formed["tool_calls"] = [_call(call)]
    calls = _parsed(formed.pop("tool_calls", None)) or []
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise UnusableRecord("the tool calls of a message are no list", json.dumps(calls)[:60])
    return formed | ({"tool_calls": calls} if calls else {})


def _call(function: Any) -> dict[str, Any]:
    """Return the call of a function by its name and arguments."""
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UnusableRecord("a call has no function", json.dumps(function)[:60])
    return {"type": "function", "function": dict(function)}


def _tools_of(record: Record) -> list[dict[str, Any]]:
    given = record.data.get("tools")
    given = record.data.get("functions") if given is None else given
    try:
        return [_tool(one) for one in tools_in_template_form(given, is_harmony=False)]
    except UserError as error:
        raise UnusableRecord("the tools are no list of functions", str(error)) from None


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool as a server gives it to templates: a function may have stood by itself."""
    function = tool.get("function", tool)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UserError(f"a tool is {json.dumps(tool)[:60]}; expected a function with a name.")
    keys = [*_FUNCTION, *(key for key in function if key not in (*_FUNCTION, "type"))]
    present = {key: function[key] for key in keys if function.get(key) is not None}
    return {"type": "function", "function": present}


def _parsed(value: Any) -> Any:
    """Return the value of JSON text; any other text or value as it is."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def dialogue_of(record: Record) -> AskedConversation | Dropped:
    """Return a record's questions: turns, messages (without the answers) or a prompt.

    Answers that results of tools follow stay, since these belong to them.
    """
    try:
        return _dialogue(record)
    except UnusableRecord as error:
        return error.why


def _dialogue(record: Record) -> AskedConversation:
    data = record.data
    id = record.number if data.get("id") is None else data["id"]
    if isinstance(id, bool) or not isinstance(id, str | int):
        raise UnusableRecord("the id is neither text nor a whole number", f"id is {id!r}")
    if (conversation := conversation_of(record)) is None:
        texts = [data.get("prompt")] if data.get("turns") is None else data["turns"]
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise UnusableRecord(
                "there is no prompt",
                'expected {"id", "turns": [...]}, {"id", "messages": [...]} or {"id", "prompt"} '
                f"with text; got {json.dumps(dict(data), default=str)[:60]}",
            )
        conversation = conversation_with(record, [{"role": "user", "content": t} for t in texts])
    if conversation.rest is not None:
        raise UnusableRecord(conversation.rest.reason, conversation.rest.detail)
    messages = conversation.messages
    first = next((i for i, m in enumerate(messages) if m["role"] == "user"), len(messages))
    system = tuple(m for m in messages[:first] if m["role"] != "assistant")
    if not (turns := _turns_of(messages[first:])):
        raise UnusableRecord("there is no message of the user")
    return AskedConversation(str(id), turns, system, tuple(conversation.tools))


def _turns_of(messages: Sequence[dict[str, Any]]) -> tuple[str | tuple[dict[str, Any], ...], ...]:
    """Return the turns before each answer; see `AskedConversation`."""
    turns: list[str | tuple[dict[str, Any], ...]] = []
    since: list[dict[str, Any]] = []  # messages after the last turn
    for message in (*messages, {"role": ""}):
        role = message["role"]
        if role not in ("system", "developer", "tool") and any(m["role"] == "tool" for m in since):
            if all(m["role"] != "assistant" for m in since):
                raise UnusableRecord("the result of a tool follows no answer of the assistant")
            turns.append(tuple(since))
            since = []
        if role != "user":
            since.append(message)
            continue
        if not message.get("content"):
            raise UnusableRecord("a message of the user is empty")
        before = [m for m in since if m["role"] != "assistant"]
        turns.append((*before, message) if before else message["content"])
        since = []
    return tuple(turns)


# ---- provenance ----


def side_file(path: Path) -> Path:
    """Return the place of the provenance of a data file or folder: NAME.meta.json beside it."""
    if path.name in ("", ".."):  # "." and the like have a name once they are resolved
        path = path.resolve()
    return path.parent / f"{path.name}.meta.json"


def read_side(path: Path) -> dict[str, Any]:
    """Return the provenance beside a data file, {} without one.

    Raises:
        UserError: it cannot be read.
    """
    side = side_file(path)
    try:
        return parse_metadata(side.read_text(encoding="utf-8"), side)
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{str(side)!r} cannot be read: {error}.") from None


def parse_metadata(text: str | None, path: Path) -> dict[str, Any]:
    """Parse the metadata of a file, a JSON object; {} without any."""
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UserError(f"The metadata of {str(path)!r} is not JSON: {error}.") from None
    if not isinstance(value, dict):
        raise UserError(f"The metadata of {str(path)!r} is {value!r}; expected an object.")
    return value


def tokenizer_sha256(folder: str | Path, tokenizer: Any) -> str:
    """Identify a tokenizer by the SHA-256 of tokenizer.json, else by the vocabulary's.

    A head's fingerprint of its target holds the former too.
    """
    file = Path(folder) / "tokenizer.json"
    if file.is_file():
        return sha256_of(file)
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(vocabulary.encode()).hexdigest()
