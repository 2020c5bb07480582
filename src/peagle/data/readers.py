"""Files of prompts, conversations and responses, as records; and the provenance beside them.

A folder of data is what `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote, or it holds
.parquet files, which are read in the order of their names. FOLDER/SPLIT names one split of it: a
subfolder, or the files that are named as the hub names them (train-00000-of-00002.parquet).
"""

from __future__ import annotations

import hashlib
import json
import re
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from peagle.errors import UserError
from peagle.extras import install_extra
from peagle.model_folder import sha256_of

if TYPE_CHECKING:
    import pyarrow

_STATE = "state.json"  # beside the .arrow files of a saved dataset
_ROWS_AT_ONCE = 1024
_SHARD = re.compile(r"(.+)-\d+-of-\d+(-[0-9a-f]+)?\.parquet")
# What pyarrow and datasets raise on damaged files; ArrowInvalid is a ValueError.
_DAMAGED = (OSError, ValueError, LookupError, TypeError, AttributeError)


def is_folder(path: Path) -> bool:
    """Whether a path names a folder of data, or a split of one."""
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
            parts_of(folder)  # refuses a folder without any data
        if len(splits) != 1 or not _splits(folder / splits[0]):
            names = ", ".join(splits) or "none; leave --split out"
            raise UserError(f"{str(folder)!r} has no split {split!r}: it has {names}.")
        folder /= splits[0]
    return folder / split


def parts_of(path: Path) -> list[Path]:
    """Return the files that hold a table, or the one folder of a saved dataset.

    Raises:
        UserError: nothing is there, nothing that can be read, or several splits.
    """
    if path.is_file() or (path / _STATE).is_file():
        return [path]
    if not path.is_dir():
        if files := _split_files(path):
            return files
        raise UserError(f"The data file or folder {str(path)!r} is not there.")
    splits = _splits(path)
    if len(splits) > 1:
        choices = " or ".join(repr(str(path / split)) for split in splits)
        raise UserError(f"{str(path)!r} has several splits: name {choices}, or add --split.")
    if files := _parquet_files(path):
        return files
    if splits:
        return parts_of(path / splits[0])
    names = [one.name for one in _visible(path)]
    shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "") if names else "nothing"
    text = (
        f"The folder {str(path)!r} is no data: expected one that Dataset.save_to_disk or "
        "DatasetDict.save_to_disk (of Hugging Face datasets) wrote, or one of .parquet files; it "
        f"holds {shown}."
    )
    if any(name.endswith(".arrow") for name in names):
        text += f" Without {_STATE} it is a cache, or its writing was cut off: save it again."
    raise UserError(text)


def sha256_of_table(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, or that of the names and hashes of a folder's files.

    Raises:
        UserError: as `parts_of` does.
    """
    files = parts_of(path)
    if files == [path] and path.is_file():
        return sha256_of(path)
    if files[0].is_dir():
        files = _saved_files(files[0])
    hashes = [[file.name, sha256_of(file)] for file in files]
    return hashlib.sha256(json.dumps(hashes).encode()).hexdigest()


def table_rows(part: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the rows of a file or of a saved dataset, each with its place for messages.

    Values are what JSON has: times and the like become text. Columns with bytes (images) and nulls
    are left out.

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
            table = table.select_columns([f.name for f in schema if not _has_bytes(f.type)])
            for number, row in enumerate(table, start=1):
                assert isinstance(row, dict)
                present = {key: value for key, value in row.items() if value is not None}
                plain = json.loads(json.dumps(present, default=str))
                yield plain, f"{part}, row {number}"
        except _DAMAGED as error:
            raise UserError(
                f"{str(part)!r} is not a whole {kind} ({_brief(error)}). {remedy}."
            ) from None


def _has_bytes(kind: pyarrow.DataType) -> bool:
    if kind.num_fields:
        return any(_has_bytes(kind.field(index).type) for index in range(kind.num_fields))
    return "binary" in str(kind)


def _brief(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _saved_files(folder: Path) -> list[Path]:
    """The .arrow files of a saved dataset; cached files may lie beside them."""
    state = json.loads((folder / _STATE).read_text(encoding="utf-8"))
    return [folder / one["filename"] for one in state["_data_files"]]


def _visible(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(one for one in folder.iterdir() if not one.name.startswith("."))


def _parquet_files(folder: Path) -> list[Path]:
    return [one for one in _visible(folder) if one.suffix == ".parquet" and one.is_file()]


def _split_files(path: Path) -> list[Path]:
    """The files in FOLDER that belong to the split of FOLDER/SPLIT."""
    return [one for one in _parquet_files(path.parent) if _split_name(one) == path.name]


def _split_name(file: Path) -> str | None:
    found = _SHARD.fullmatch(file.name)
    return found and found[1]


def _splits(folder: Path) -> list[str]:
    """The splits by names of files, or by subfolders where the folder itself has no data."""
    if files := _parquet_files(folder):
        return sorted({name for file in files if (name := _split_name(file)) is not None})
    if (folder / _STATE).is_file():
        return []
    inner = [one for one in _visible(folder) if one.is_dir()]
    return [one.name for one in inner if (one / _STATE).is_file() or _parquet_files(one)]


STORE_KEY = "peagle_data"  # of a store's safetensors metadata
_CONVERSATIONS = ("messages", "conversations")
_ROLES = {"human": "user", "gpt": "assistant"}


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
    """The user's side of one conversation.

    Attributes:
        id: the id in the file; without one, the number of the record.
        turns: what the user says, turn by turn; at least one.
        system: messages before the first turn, as the file has them.
    """

    id: str
    turns: tuple[str, ...]
    system: tuple[Mapping[str, Any], ...] = ()

    @property
    def sha256(self) -> str:
        """Hash of system messages and turns; the id does not count."""
        content = [[dict(message) for message in self.system], list(self.turns)]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


# ---- records --------------------------------------------------------------------------------


def read_records(path: Path) -> Iterator[Record]:
    """Yield the records of a .jsonl or .parquet file, or of a folder of data.

    Raises:
        UserError: nothing is there, the data is of another kind or damaged (the line is named), or
            a package that reads it is missing.
    """
    parts = parts_of(path)
    if parts == [path] and path.is_file() and path.suffix != ".parquet":
        if path.suffix != ".jsonl":
            raise UserError(
                f"The data file {str(path)!r} ends in {path.suffix!r}; expected .jsonl or "
                ".parquet, or a folder that Hugging Face datasets wrote."
            )
        return _read_jsonl(path)
    rows = chain.from_iterable(map(table_rows, parts))
    return (
        Record(_with_message_objects(row), number, where)
        for number, (row, where) in enumerate(rows, start=1)
    )


def _with_message_objects(row: dict[str, Any]) -> dict[str, Any]:
    """Turn messages that datasets keeps as one list for each key into a list of objects."""
    for name in _CONVERSATIONS:
        columns = row.get(name)
        if isinstance(columns, dict) and all(isinstance(one, list) for one in columns.values()):
            lists = columns.values()
            if len(set(map(len, lists))) == 1:
                values = zip(*lists, strict=True)
                row[name] = [dict(zip(columns, one, strict=True)) for one in values]
    return row


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
                raise UserError(_describe_bad_line(where, line, error)) from None
            if isinstance(value, str):
                value = {"prompt": value}
            if not isinstance(value, dict):
                shown = line.decode(errors="replace").strip()[:60]
                raise UserError(f"{where} is {shown}; expected a JSON object.")
            yield Record(value, number, where)


def _describe_bad_line(where: str, line: bytes, error: Exception) -> str:
    if isinstance(error, UnicodeEncodeError):
        return f"{where} holds half of a surrogate pair (\\ud800 to \\udfff), which is no text."
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
    return f"{where} {problem}."


# ---- conversations --------------------------------------------------------------------------


def messages_of(record: Record) -> list[dict[str, Any]] | None:
    """Return the messages of a record, None if it holds no conversation.

    `messages` has them as OpenAI's API does; `conversations` as ShareGPT does, with from and value.

    Raises:
        UserError: they are malformed.
    """
    messages = record.data.get("messages", record.data.get("conversations"))
    if messages is None:
        return None
    if not isinstance(messages, list) or not all(isinstance(m, Mapping) for m in messages):
        raise UserError(f"{record.where}: the messages are no list of objects.")
    found = []
    for message in messages:
        if "from" in message and "role" not in message:
            role = str(message["from"])
            message = {"role": _ROLES.get(role, role), "content": message.get("value")}
        if not isinstance(message.get("role"), str):
            raise UserError(
                f"{record.where}: a message has the role {message.get('role')!r}; expected user, "
                "assistant, system, ..."
            )
        # Parquet has every key in every message.
        found.append({key: value for key, value in message.items() if value is not None})
    return found


def dialogue_of(record: Record) -> AskedConversation:
    """Return the user's side of a record: turns, messages (without the answers) or a prompt.

    Raises:
        UserError: the record has none of them, or they are malformed.
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
    else:
        turns = data["turns"] if "turns" in data else [data.get("prompt")]
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) for t in turns):
        raise UserError(
            f'{record.where}: expected {{"id", "turns": [...]}}, {{"id", "messages": [...]}} or '
            f'{{"id", "prompt"}} with text; got {json.dumps(dict(data), default=str)[:60]}'
        )
    if not all(turns):
        raise UserError(f"{record.where}: the prompt is empty; expected at least one character.")
    return AskedConversation(str(given), tuple(turns), tuple(system))


# ---- provenance -----------------------------------------------------------------------------


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
        return metadata_of(side.read_text(encoding="utf-8"), side)
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{str(side)!r} cannot be read: {error}.") from None


def metadata_of(text: str | None, path: Path) -> dict[str, Any]:
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
    """Identify a tokenizer by the SHA-256 of tokenizer.json, else by that of the vocabulary.

    The former is also in the fingerprint that a head has of its target.
    """
    file = Path(folder) / "tokenizer.json"
    if file.is_file():
        return sha256_of(file)
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(vocabulary.encode()).hexdigest()
