"""Headers of GGUF files: read within limits, and refused before any weight is read.

A GGUF file is the magic, a version, two counts, metadata (keys with typed values), a table of
tensors (name, shape, type, place), padding, then the tensors. Source:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Only the standard library is needed here,
so that a wrong file is refused at once.
"""

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from peagle.errors import CheckpointError
from peagle.model_folder import LFS_POINTER

SUFFIX = ".gguf"
MAGIC = b"GGUF"
# The architectures of GGUF that transformers reads right and that a target may have; shown by
# tests/models/test_gguf.py. Of others (phi3, gpt-oss, gemma4) it leaves out settings.
ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3")
_GEMMA_HEAD_SIZE = 256
CONVERT_HINT = "make a folder of it with `peagle convert FILE.gguf FOLDER --format hf`"

_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_LENGTH = struct.Struct("<Q")
_LONGEST_STRING = 1 << 26


class TensorType(NamedTuple):
    """How a type of tensors is stored: so many values take so many bytes."""

    name: str
    values: int
    bytes: int


# Of all types of ggml, those that transformers unpacks.
TYPES = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    16: TensorType("IQ2_XXS", 256, 66),
    17: TensorType("IQ2_XS", 256, 74),
    18: TensorType("IQ3_XXS", 256, 98),
    19: TensorType("IQ1_S", 256, 50),
    20: TensorType("IQ4_NL", 32, 18),
    21: TensorType("IQ3_S", 256, 110),
    22: TensorType("IQ2_S", 256, 82),
    23: TensorType("IQ4_XS", 256, 136),
    29: TensorType("IQ1_M", 256, 56),
    30: TensorType("BF16", 1, 2),
    34: TensorType("TQ1_0", 256, 54),
    35: TensorType("TQ2_0", 256, 66),
    39: TensorType("MXFP4", 32, 17),
}
_UNREAD_TYPES = {9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64"}
_UNREAD_TYPES |= {40: "NVFP4", 41: "Q1_0"}


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The metadata of a GGUF file.

    Attributes:
        architecture: its name in GGUF, one of `ARCHITECTURES`.
        metadata: numbers and texts by key; lists are left out.
        tensor_types: type of each tensor, by the tensor's name.
        num_values: values of all tensors.
    """

    architecture: str
    metadata: Mapping[str, Any]
    tensor_types: Mapping[str, TensorType]
    num_values: int

    @property
    def dtype(self) -> str:
        """Return the type of the unpacked weights: the file's, or bfloat16 if it is quantised."""
        names = {kind.name for kind in self.tensor_types.values()}
        if not names <= {"F32", "F16", "BF16"} or "BF16" in names:
            return "bfloat16"
        return "float16" if "F16" in names else "float32"


def is_gguf(path: Path) -> bool:
    """Return whether a path is a file that claims to be GGUF, by its name or by its magic."""
    if not path.is_file():
        return False
    if path.suffix.lower() == SUFFIX:
        return True
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def read_gguf_header(path: Path) -> GgufHeader:
    """Read the header of a GGUF file; the tensors are only measured.

    Raises:
        CheckpointError: it is no GGUF file, cut or damaged; a part of a model, an adapter or no
            language model; of an architecture or with tensors that cannot be read.
    """
    try:
        with path.open("rb") as file:
            first = file.read(24)
            _check_first(path, first)
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _read(path, data)
    except OSError as error:
        raise CheckpointError(
            f"The GGUF file {str(path)!r} cannot be read: {error.strerror or error}."
        ) from None


# ---- what is refused ----


def _refuse(path: Path, why: str) -> NoReturn:
    raise CheckpointError(f"The GGUF file {str(path)!r} {why}")


def _check_first(path: Path, first: bytes) -> None:
    if not first.startswith(MAGIC):
        if LFS_POINTER.startswith(first[:20]) and first:
            _refuse(path, "is a pointer of Git LFS, not the model; `git lfs pull` fetches it.")
        found = f"it begins with {first[:4]!r}" if first else "it is empty"
        raise CheckpointError(
            f"{str(path)!r} is not a GGUF file: {found}, expected {MAGIC!r}. Copy or fetch it "
            "again."
        )
    if len(first) < 24:
        _refuse(path, f"is cut: it has {len(first)} bytes. Copy or fetch it again.")
    version = int.from_bytes(first[4:8], "little")
    if version in _VERSIONS:
        return
    if int.from_bytes(first[4:8], "big") in _VERSIONS:
        _refuse(path, "is big-endian; expected a little-endian file. Fetch the usual one.")
    _refuse(
        path,
        f"has version {version} of the format; expected {' or '.join(map(str, _VERSIONS))}. "
        "Fetch or make a newer file.",
    )


def _check_kind(path: Path, metadata: Mapping[str, Any]) -> str:
    """Return the architecture of a file that holds a whole model."""
    if metadata.get("general.type") == "adapter" or "adapter.type" in metadata:
        _refuse(
            path,
            "is an adapter, not a model. Merge it into its model first, then name the merged file.",
        )
    parts = metadata.get("split.count", 0)
    if isinstance(parts, int) and parts > 1:
        _refuse(
            path,
            f"is part {int(metadata.get('split.no', 0)) + 1} of {parts} of a split model; expected "
            "one whole file. Join them with `llama-gguf-split --merge FIRST_PART WHOLE.gguf`.",
        )
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        _refuse(
            path,
            f"has architecture {architecture!r}; GGUF files are read of "
            f"{', '.join(ARCHITECTURES)}. Use the model's own folder (config.json, "
            "*.safetensors), or another model.",
        )
    if (setting := _unread_setting(architecture, metadata)) is not None:
        _refuse(
            path,
            f"has {setting}, which transformers does not read out of GGUF: the model would compute "
            "something else. Use the model's own folder (config.json, *.safetensors).",
        )
    if "tokenizer.ggml.model" not in metadata:
        _refuse(path, "has no tokenizer (tokenizer.ggml.model). Fetch or make a file that has one.")
    return architecture


def _unread_setting(architecture: str, metadata: Mapping[str, Any]) -> str | None:
    """Return a setting that changes the model and that transformers ignores, as text."""

    def of(key: str) -> Any:
        return metadata.get(f"{architecture}.{key}")

    if of("rope.scaling.type") not in (None, "none") and of("rope.scaling.factor") != 1.0:
        return f"scaled rotary positions ({of('rope.scaling.type')})"
    if architecture in ("gemma2", "gemma3"):
        # The scale of the scores is not in the file. transformers has that of this size.
        size = of("attention.key_length")
        return None if size == _GEMMA_HEAD_SIZE else f"attention heads of size {size}"
    window = of("attention.sliding_window")
    return f"a sliding window of {window}" if window else None


def _type_of(path: Path, name: str, number: int, shape: tuple[int, ...]) -> TensorType:
    kind = TYPES.get(number)
    if kind is None:
        known = ", ".join(one.name for one in TYPES.values())
        _refuse(
            path,
            f"has tensor {name[:100]!r} of type {_UNREAD_TYPES.get(number, number)}, which "
            f"transformers cannot unpack; it unpacks {known}. Use a file of another quantisation.",
        )
    if not shape or 0 in shape or shape[0] % kind.values:
        _refuse(
            path,
            f"is damaged: tensor {name[:100]!r} has shape {list(shape)}, whose rows are no whole "
            f"blocks of {kind.values} values ({kind.name}). Copy or fetch it again.",
        )
    return kind


# ---- the format ----


class _Cursor:
    """Reads values of a file one after another."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.place = data, 0

    def number(self, form: str) -> Any:
        value = struct.unpack_from("<" + form, self.data, self.place)[0]
        self.place += struct.calcsize("<" + form)
        return value

    def skip_string(self) -> int:
        """Go behind a string; return where it begins."""
        (length,) = _LENGTH.unpack_from(self.data, self.place)
        begin = self.place + 8
        if length > _LONGEST_STRING:
            raise ValueError(f"a text of {length} bytes at byte {self.place}")
        self.place = begin + length
        return begin

    def string(self) -> str:
        begin = self.skip_string()
        if self.place > len(self.data):
            raise ValueError(f"a text that goes on behind the end at byte {begin}")
        return self.data[begin : self.place].decode()

    def value(self) -> Any:
        """Return a number or a text; go behind a list and return None."""
        kind = self.number("I")
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            self._skip_list()
            return None
        return self.number(_scalar(kind))

    def _skip_list(self) -> None:
        kind, count = self.number("I"), self.number("Q")
        if count > len(self.data):
            raise ValueError(f"a list of {count} values at byte {self.place}")
        if kind != _STRING:
            self.place += count * struct.calcsize("<" + _scalar(kind))
            return
        for _ in range(count):
            self.skip_string()


def _scalar(kind: int) -> str:
    if kind not in _SCALARS:
        raise ValueError(f"a value of type {kind}")
    return _SCALARS[kind]


def _read(path: Path, data: mmap.mmap) -> GgufHeader:
    cursor = _Cursor(data)
    cursor.place = 8
    metadata: dict[str, Any] = {}
    entries: list[tuple[str, tuple[int, ...], int, int]] = []
    try:
        num_tensors, num_keys = cursor.number("Q"), cursor.number("Q")
        for _ in range(num_keys):
            key = cursor.string()
            if (value := cursor.value()) is not None:
                metadata[key] = value
        for _ in range(num_tensors):
            name, num_dims = cursor.string(), cursor.number("I")
            if num_dims > 8:
                raise ValueError(f"a tensor of {num_dims} dimensions")
            shape = tuple(cursor.number("Q") for _ in range(num_dims))
            entries.append((name, shape, cursor.number("I"), cursor.number("Q")))
    except (struct.error, ValueError) as error:
        why = "its header does not end" if isinstance(error, struct.error) else f"it has {error}"
        _refuse(path, f"is cut or damaged: {why}. Copy or fetch it again.")
    architecture = _check_kind(path, metadata)
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        _refuse(path, f"is damaged: general.alignment is {alignment!r}. Copy or fetch it again.")
    types = {name: _type_of(path, name, kind, shape) for name, shape, kind, _ in entries}
    if not entries:
        _refuse(path, "has no tensors: it is a vocabulary alone. Fetch the file with the weights.")
    if len(types) < len(entries):
        _refuse(path, "is damaged: two tensors have one name. Copy or fetch it again.")
    start = -(-cursor.place // alignment) * alignment
    for name, shape, _, offset in entries:
        kind = types[name]
        end = start + offset + math.prod(shape) // kind.values * kind.bytes
        if end > len(data):
            _refuse(
                path,
                f"is cut: tensor {name[:100]!r} ends at byte {end:,}, the file has {len(data):,}. "
                "Copy or fetch it again.",
            )
    num_values = sum(math.prod(shape) for _, shape, _, _ in entries)
    return GgufHeader(architecture, metadata, types, num_values)
