"""Stored features as files: which rows each shard holds, and what index.json says.

A store is a folder of safetensors shards and one index. A shard holds whole sequences, one after
the other: the aux features of every position, and the final hidden states of the positions that
grade an element. Element (a, d) is graded at position a + d + 1 and counts iff x[a+1] to x[a+d+2]
lie in the response; with P tokens of prompt and L in all, these are the positions P to L - 2.

Shapes: S sequences, T positions, U graded positions, A aux states, H target width.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from peagle.data.dataset import ResponseDataset
from peagle.errors import UserError
from peagle.model_folder import sha256_of
from peagle.models.checkpoint.files import read_object
from peagle.models.fingerprint import TargetFingerprint
from peagle.models.target_facts import TargetFacts

FORMAT_VERSION = 1
INDEX_NAME = "index.json"
FACTS_KEY = "peagle_features"  # of the metadata of a shard
DEFAULT_SHARD_BYTES = 2**30
_KIND = "peagle features"

StoredDtype = Literal["bf16", "fp8", "fp32"]
FEATURE_DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "fp32": torch.float32}
HIDDEN_DTYPES = {"bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp32": torch.float32}
_DTYPE_NAMES = {
    torch.int64: "I64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
}


@dataclass(frozen=True, slots=True)
class StoreFacts:
    """Everything that decides the bytes of a store, except for the hardware that computes it.

    Attributes:
        dataset_sha256: of tokens, borders and prompt lengths.
        num_sequences, num_tokens, longest: of the data, after it was cut to its longest length.
        target: fingerprint.
        target_dtype: in which the target ran.
        aux_layer_ids: layers of the feature.
        dtype: how features are stored; "fp8" has one scale for each position and aux state.
        shard_bytes: most bytes of a shard with more than one sequence.
    """

    dataset_sha256: str
    num_sequences: int
    num_tokens: int
    longest: int
    target: TargetFingerprint
    target_dtype: str
    aux_layer_ids: tuple[int, ...]
    dtype: StoredDtype
    shard_bytes: int = DEFAULT_SHARD_BYTES

    @classmethod
    def of(
        cls,
        dataset: ResponseDataset,
        target: TargetFacts,
        aux_layer_ids: tuple[int, ...],
        dtype: StoredDtype,
        target_dtype: str,
        shard_bytes: int = DEFAULT_SHARD_BYTES,
    ) -> StoreFacts:
        """The facts of a store that is to be written."""
        return cls(
            dataset_sha256(dataset),
            len(dataset),
            len(dataset.tokens),
            dataset.longest,
            TargetFingerprint.of(target),
            target_dtype,
            aux_layer_ids,
            dtype,
            shard_bytes,
        )

    @property
    def sha256(self) -> str:
        """Hash of all facts."""
        return hashlib.sha256(json.dumps(self._compared(), sort_keys=True).encode()).hexdigest()

    def difference(self, other: StoreFacts) -> str:
        """Describe the first fact that differs; "" if none does."""
        before, now = self._compared(), other._compared()
        for name, value in before.items():
            if now[name] != value:
                return f"{name} {value!r}, not {now[name]!r}"
        return ""

    def _compared(self) -> dict[str, Any]:
        """All facts but the name of the target's folder."""
        data = asdict(self)
        target = {f"target {name}": value for name, value in data.pop("target").items()}
        del target["target name"]
        return {**data, **target, "aux_layer_ids": list(self.aux_layer_ids)}

    @property
    def hidden_size(self) -> int:
        """H."""
        return self.target.hidden_size

    @property
    def num_aux(self) -> int:
        """A."""
        return len(self.aux_layer_ids)

    @property
    def position_bytes(self) -> int:
        """Bytes of the features of one position."""
        size = FEATURE_DTYPES[self.dtype].itemsize * self.num_aux * self.hidden_size
        return size + (4 * self.num_aux if self.dtype == "fp8" else 0)

    @property
    def graded_bytes(self) -> int:
        """Bytes of the hidden state of one graded position."""
        return HIDDEN_DTYPES[self.dtype].itemsize * self.hidden_size


def dataset_sha256(dataset: ResponseDataset) -> str:
    """Return the hash of tokens, borders and prompt lengths."""
    digest = hashlib.sha256()
    for tensor in (dataset.tokens.int(), dataset.start_loc.long(), dataset.prompt_lens.long()):
        digest.update(tensor.contiguous().numpy().data)
    return digest.hexdigest()


def num_graded(dataset: ResponseDataset) -> Tensor:
    """Positions of each sequence that grade an element, int64 [S]; they begin at its response."""
    return (dataset.start_loc.diff() - dataset.prompt_lens - 1).clamp_min(0)


# ---- shards ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """The bytes of a shard before its tensors are known.

    Attributes:
        header: the first bytes of the file.
        begins: where each tensor begins in the file.
        size: bytes of the whole file.
    """

    header: bytes
    begins: dict[str, int]
    size: int


@dataclass(frozen=True)
class ShardPlan:
    """A shard that is to be written.

    Attributes:
        number: from 0.
        sequences: int64, indices of the data, longest first.
        facts: of the store.
        num_positions, num_graded: T and U.
    """

    number: int
    sequences: Tensor
    facts: StoreFacts
    num_positions: int
    num_graded: int

    @property
    def file(self) -> str:
        """Name of the file."""
        return f"features-{self.number:05d}.safetensors"

    @cached_property
    def layout(self) -> ShardLayout:
        """The safetensors layout; tensors of wide types come first, which keeps all aligned."""
        facts = self.facts
        tensors = {"sequences": (torch.int64, [len(self.sequences)])}
        if facts.dtype == "fp8":
            tensors["scales"] = (torch.float32, [self.num_positions, facts.num_aux])
        hidden_shape = [self.num_graded, facts.hidden_size]
        tensors["hidden"] = (HIDDEN_DTYPES[facts.dtype], hidden_shape)
        features_shape = [self.num_positions, facts.num_aux * facts.hidden_size]
        tensors["features"] = (FEATURE_DTYPES[facts.dtype], features_shape)
        entries: dict[str, Any] = {"__metadata__": {FACTS_KEY: facts.sha256}}
        begins, end = {}, 0
        for name, (dtype, shape) in tensors.items():
            begins[name] = end
            end += dtype.itemsize * torch.Size(shape).numel()
            offsets = [begins[name], end]
            entries[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": shape, "data_offsets": offsets}
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        header = len(text).to_bytes(8, "little") + text
        begins = {name: len(header) + begin for name, begin in begins.items()}
        return ShardLayout(header, begins, len(header) + end)


def plan_shards(dataset: ResponseDataset, facts: StoreFacts) -> list[ShardPlan]:
    """Divide the sequences, from long to short, into shards of about `facts.shard_bytes`."""
    lens, graded = dataset.start_loc.diff(), num_graded(dataset)
    order = lens.argsort(descending=True, stable=True)
    sizes = (lens * facts.position_bytes + graded * facts.graded_bytes)[order].tolist()
    counts, filled = [0], 0
    for size in sizes:
        if filled and filled + size > facts.shard_bytes:
            counts.append(0)
            filled = 0
        counts[-1] += 1
        filled += size
    return [
        ShardPlan(number, chosen, facts, int(lens[chosen].sum()), int(graded[chosen].sum()))
        for number, chosen in enumerate(order.split(counts))
    ]


# ---- the index ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """A whole shard, as the index has it."""

    file: str
    bytes: int
    sha256: str

    def check(self, folder: Path, *, verify: bool = False) -> None:
        """Refuse a file that is not what was written.

        Raises:
            UserError: it is missing, of another size or, with `verify`, of other contents.
        """
        path = folder / self.file
        found = path.stat().st_size if path.is_file() else None
        problem = ""
        if found is None:
            problem = "is missing"
        elif found != self.bytes:
            problem = f"has {found} bytes, expected {self.bytes}: it was cut off"
        elif verify and (digest := sha256_of(path)) != self.sha256:
            problem = f"was altered: its SHA-256 is {digest}, expected {self.sha256}"
        if problem:
            raise UserError(
                f"The shard {str(path)!r} of stored features {problem}. Remove it and run "
                "`peagle data features` again, which computes what is missing."
            )


@dataclass(frozen=True, slots=True)
class Index:
    """The index of a store.

    Attributes:
        facts: of the store.
        num_shards: of the whole store.
        shards: those that are whole, in order.
    """

    facts: StoreFacts
    num_shards: int
    shards: tuple[ShardEntry, ...]

    def to_json(self) -> dict[str, Any]:
        """The contents of index.json."""
        return {"format_version": FORMAT_VERSION, "kind": _KIND, **asdict(self)}

    @classmethod
    def read(cls, folder: Path) -> Index:
        """Read the index of the store in `folder`.

        Raises:
            UserError: there is none, it is damaged, or of a newer format.
        """
        path = folder / INDEX_NAME
        if not path.is_file():
            raise UserError(
                f"{str(folder)!r} holds no stored features ({INDEX_NAME} is not there); "
                "`peagle data features` makes them."
            )
        data = read_object(path)
        version = data.get("format_version")
        if data.get("kind") != _KIND or not isinstance(version, int):
            raise UserError(f"{str(path)!r} is not an index of stored features.")
        if version > FORMAT_VERSION:
            raise UserError(
                f"{str(path)!r} has format_version {version}, newer than this peagle reads "
                f"({FORMAT_VERSION}); upgrade peagle."
            )
        try:
            facts = {**data["facts"], "aux_layer_ids": tuple(data["facts"]["aux_layer_ids"])}
            facts["target"] = TargetFingerprint.from_json(facts["target"])
            shards = tuple(ShardEntry(**entry) for entry in data["shards"])
            return cls(StoreFacts(**facts), data["num_shards"], shards)
        except (KeyError, TypeError, UserError) as error:
            raise UserError(f"{str(path)!r} is damaged: {error}. Make the store again.") from None
