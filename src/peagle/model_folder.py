"""Read files of a model's folder within limits: the folder may be broken or malicious.

JSON of up to 100 MB, nested up to 64 deep; headers of safetensors files of up to 100 MB, that
format's own limit, and never more than the file has.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from peagle.errors import CheckpointError

MAX_JSON_BYTES = 100_000_000
MAX_HEADER_BYTES = 100_000_000
MAX_DEPTH = 64
# What transformers reads by itself. Of these, larger files are vocabularies of tokenizers, which
# are not parsed only to be looked at.
_READ_ELSEWHERE = (
    *("config.json", "generation_config.json", "adapter_config.json", "chat_template.json"),
    *("tokenizer_config.json", "tokenizer.json", "vocab.json", "added_tokens.json"),
    *("special_tokens_map.json", "preprocessor_config.json", "processor_config.json"),
)
_LOOKED_AT_BYTES = 1 << 20
LFS_POINTER = b"version https://git-lfs"
_VALUE_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"), 8),
}


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, as hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Readable(Protocol):
    """A file, or an object in S3, at its beginning."""

    def read(self, size: int, /) -> bytes:
        """Return the next bytes, fewer at the end."""
        ...


def parse_json(text: bytes, *, unique: bool = True) -> Any:
    """Return the value of JSON in UTF-8.

    Args:
        text: the JSON.
        unique: refuse an object that has a key twice; else the last one counts.

    Raises:
        ValueError: it is none, nested too deeply, or an object has a key twice.
    """
    try:
        value = json.loads(text.decode(), object_pairs_hook=_unique if unique else None)
    except RecursionError:
        value = None
        is_deep = True
    else:
        is_deep = _is_deep(value)
    if is_deep:
        raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
    return value


def read_json(path: Path, *, unique: bool = True) -> Any:
    """Return the value of a JSON file; `unique` as in `parse_json`.

    Raises:
        CheckpointError: it is too large, or `parse_json` refuses it.
        OSError: it cannot be read.
    """
    _check_size(path)
    try:
        return parse_json(path.read_bytes(), unique=unique)
    except ValueError as error:
        raise CheckpointError(f"{str(path)!r} is not JSON: {error}.") from None


def check_json(folder: Path) -> None:
    """Refuse files that transformers will read, and that are too large, too deep or no JSON.

    Raises:
        CheckpointError: naming the file.
    """
    for path in (folder / name for name in _READ_ELSEWHERE):
        if path.is_file() and _check_size(path) <= _LOOKED_AT_BYTES:
            read_json(path, unique=False)


def read_weight_map(index: Path) -> dict[str, str]:
    """Return the file of every tensor in an index of shards; the files lie beside the index.

    Raises:
        CheckpointError: it is no such index.
    """
    data = read_json(index)
    listed = data.get("weight_map") if isinstance(data, Mapping) else None
    if not isinstance(listed, dict) or not listed:
        raise CheckpointError(
            f"{str(index)!r} is not an index of shards; expected an object with weight_map, "
            "file names by tensor names. Copy or fetch it again."
        )
    for name, file in listed.items():
        if not isinstance(file, str) or file in ("", "..") or Path(file).name != file:
            raise CheckpointError(
                f"{str(index)!r} puts tensor {name!r} into {file!r}; expected the name of a "
                "file beside it."
            )
    return listed


def read_header(data: Readable, size: int | None = None) -> dict[str, dict[str, Any]]:
    """Return the tensors that a safetensors file names: dtype, shape and data_offsets of each.

    The file is 8 bytes (the header's length N), N bytes of JSON, then the tensors, end to end.

    Args:
        data: the file; nothing behind the header is read.
        size: bytes of the file; None where that is not known.

    Raises:
        ValueError: the header is malformed; the message names the fault.
    """
    first = data.read(8)
    if len(first) < 8:
        raise ValueError(f"it has {len(first)} bytes, too few for a header")
    if LFS_POINTER.startswith(first):
        raise ValueError("it is a pointer of Git LFS, not the weights; `git lfs pull` fetches them")
    length = int.from_bytes(first, "little")
    if length == 0 or (size is not None and length > size - 8):
        raise ValueError(f"its header takes {length} bytes, the file has {size}")
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"its header takes {length} bytes, expected at most {MAX_HEADER_BYTES}")
    try:
        header = parse_json(data.read(length))
    except ValueError:
        header = None
    if not isinstance(header, dict):
        raise ValueError("its header is not that of a safetensors file")
    header.pop("__metadata__", None)
    end = 0
    for begin, end_here in sorted(_span(name, entry) for name, entry in header.items()):
        if begin != end:
            raise ValueError(f"its tensors overlap or leave a gap at byte {min(begin, end)}")
        end = end_here
    if size is not None and end != size - 8 - length:
        raise ValueError(f"its tensors take {size - 8 - length} bytes, expected {end}")
    return header


def read_file_header(path: Path) -> dict[str, dict[str, Any]]:
    """Return the tensors that a safetensors file on disk names, as `read_header` does.

    Raises:
        ValueError: as `read_header`.
        OSError: it cannot be read.
    """
    with path.open("rb") as data:
        return read_header(data, path.stat().st_size)


def _span(name: str, entry: Any) -> tuple[int, int]:
    """Return where a tensor begins and ends."""
    try:
        (begin, end), shape, dtype = entry["data_offsets"], entry["shape"], entry["dtype"]
        whole = all(type(number) is int and number >= 0 for number in (begin, end, *shape))
    except (KeyError, TypeError, ValueError):
        whole, begin, end, shape, dtype = False, 0, 0, [], ""
    bits = _VALUE_BITS.get(dtype) if isinstance(dtype, str) else 0
    if not whole or bits == 0 or begin > end:
        raise ValueError(f"its header describes tensor {name[:100]!r} wrongly")
    if bits is not None and math.prod(shape) * bits != (end - begin) * 8:
        raise ValueError(f"tensor {name[:100]!r} does not have the bytes that its shape needs")
    return begin, end


def _check_size(path: Path) -> int:
    size = path.stat().st_size
    if size > MAX_JSON_BYTES:
        raise CheckpointError(
            f"{str(path)!r} has {size} bytes; expected JSON of at most {MAX_JSON_BYTES}."
        )
    return size


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"the key {twice[:100]!r} stands twice in one object")
    return found


def _is_deep(value: Any) -> bool:
    """Return whether lists and objects are nested more than MAX_DEPTH deep."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        inside: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                inside += one.values()
            elif isinstance(one, list):
                inside += one
        if not inside:
            return False
        level = [one for one in inside if isinstance(one, dict | list)]
        if not level:
            return False
    return True
