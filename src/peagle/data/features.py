"""The frozen target's features of a batch: computed, or read from a store of files.

A store is a folder of safetensors shards and one index. A shard holds whole sequences, one after
the other: the aux features of every position, and the final hidden states of the positions that
grade an element. Element (a, d) is graded at position a + d + 1 and counts iff x[a+1] to x[a+d+2]
lie in one answer: these are the positions of every answer but its last (`ResponseDataset.graded`).

Shapes: B rows, N positions of a row, S sequences, T positions, U graded positions, A aux states,
H target width.
"""

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from peagle.attention.torch_backend import DocumentAttention
from peagle.data.batches import Batch
from peagle.data.dataset import ResponseDataset
from peagle.errors import UserError
from peagle.model_folder import sha256_of
from peagle.models.checkpoint.files import read_object
from peagle.models.fingerprint import TargetFingerprint
from peagle.models.target import TargetModel
from peagle.models.target_facts import TargetFacts


@dataclass(frozen=True, slots=True)
class TargetStates:
    """The target's view of a batch.

    Attributes:
        features_BNA: aux features g of every position.
        hidden_BNH: final hidden states; lm_head of position p gives the distribution of x[p+1].
    """

    features_BNA: Tensor
    hidden_BNH: Tensor


@torch.no_grad()
def target_states(target: TargetModel, batch: Batch) -> TargetStates:
    """Run the target over packed rows; each document begins at position 0."""
    rows, length = batch.tokens_BN.shape
    positions = torch.arange(length).repeat(rows, 1)
    for place in batch.places:
        positions[place.row, place.start : place.start + place.length] -= place.start
    spans = [(place.row, place.start, place.length) for place in batch.places]
    hidden, features = target.forward(
        batch.tokens_BN.flatten(),
        positions.flatten().to(batch.tokens_BN.device),
        DocumentAttention(batch.documents_BN, spans),
    )
    return TargetStates(features.unflatten(0, (rows, length)), hidden.unflatten(0, (rows, length)))


# ---- what a store holds ----


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
        dataset_sha256: of tokens, borders and the mask of supervised tokens.
        num_sequences, num_tokens, longest: sizes of the data after it was cut to its limit.
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
    ) -> Self:
        """Return the facts of a store that is to be written."""
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
        """Return the SHA-256 of all facts that are compared."""
        return hashlib.sha256(json.dumps(self._compared(), sort_keys=True).encode()).hexdigest()

    def difference(self, other: Self) -> str:
        """Describe the first fact that differs; "" if none does."""
        before, now = self._compared(), other._compared()
        for name, value in before.items():
            if now[name] != value:
                return f"{name} {value!r}, not {now[name]!r}"
        return ""

    def _compared(self) -> dict[str, Any]:
        """Return all facts but the name of the target's folder."""
        data = asdict(self)
        target = {f"target {name}": value for name, value in data.pop("target").items()}
        del target["target name"]
        return {**data, **target, "aux_layer_ids": list(self.aux_layer_ids)}

    @property
    def hidden_size(self) -> int:
        """Return H, the width of the target's hidden states."""
        return self.target.hidden_size

    @property
    def num_aux(self) -> int:
        """Return A, the number of layers whose states make the feature."""
        return len(self.aux_layer_ids)

    @property
    def position_bytes(self) -> int:
        """Return the bytes of the features of one position."""
        size = FEATURE_DTYPES[self.dtype].itemsize * self.num_aux * self.hidden_size
        return size + (4 * self.num_aux if self.dtype == "fp8" else 0)

    @property
    def graded_bytes(self) -> int:
        """Return the bytes of the hidden state of one graded position."""
        return HIDDEN_DTYPES[self.dtype].itemsize * self.hidden_size


def dataset_sha256(dataset: ResponseDataset) -> str:
    """Return the hash of tokens, borders and prompt lengths, and of a mask that says more."""
    parts = [dataset.tokens.int(), dataset.start_loc.long(), dataset.prompt_lens.long()]
    if not dataset.has_one_answer_each:
        parts.append(dataset.loss_mask)
    digest = hashlib.sha256()
    for tensor in parts:
        digest.update(tensor.contiguous().numpy().data)
    return digest.hexdigest()


# ---- shards ----


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
        facts: facts of the store.
        num_positions, num_graded: T and U.
    """

    number: int
    sequences: Tensor
    facts: StoreFacts
    num_positions: int
    num_graded: int

    @property
    def file(self) -> str:
        """Return the name of the shard's file."""
        return f"features-{self.number:05d}.safetensors"

    @cached_property
    def layout(self) -> ShardLayout:
        """Return the safetensors layout; tensors of wide types come first, to keep all aligned."""
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
    lens, graded = dataset.start_loc.diff(), dataset.num_graded
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


# ---- the index ----


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """A whole shard, as the index has it."""

    file: str
    bytes: int
    sha256: str

    def check(self, folder: Path, *, verify: bool = False) -> None:
        """Refuse a file that differs from the written one.

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
        facts: facts of the store.
        num_shards: shards of the whole store.
        shards: the whole shards, in order.
    """

    facts: StoreFacts
    num_shards: int
    shards: tuple[ShardEntry, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the contents of index.json."""
        return {"format_version": FORMAT_VERSION, "kind": _KIND, **asdict(self)}

    @property
    def sha256(self) -> str:
        """Return the hash of all facts, and of the names, sizes and hashes of the shards."""
        shards = [asdict(entry) for entry in self.shards]
        return hashlib.sha256(json.dumps([self.facts.sha256, shards]).encode()).hexdigest()

    @classmethod
    def read(cls, folder: Path) -> Self:
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


# ---- reading ----


# float8 is read in pieces that stay in a core's cache.
_FP8_ROWS = 64


@dataclass(frozen=True, slots=True)
class _Shard:
    """The tensors of a shard, mapped from its file; float8 features have scales."""

    features_TA: Tensor
    hidden_UH: Tensor
    scales_TA: Tensor | None


class FeatureStore:
    """The target's states of a dataset, from the folder that `peagle data features` wrote.

    Attributes:
        facts: facts of the store.
        index_sha256: hash of its index, `Index.sha256`.
        features_dtype, hidden_dtype: types of the tensors that `states` gives: bfloat16, also where
            float8 is stored, or float32.
    """

    def __init__(
        self, folder: Path, index: Index, dataset: ResponseDataset, *, pin_memory: bool
    ) -> None:
        self.folder = folder
        self.facts: StoreFacts = index.facts
        self.index_sha256 = index.sha256
        self.features_dtype = self.hidden_dtype = HIDDEN_DTYPES[self.facts.dtype]
        self._pin_memory = pin_memory
        self._lens = dataset.start_loc.diff().tolist()
        self._starts = dataset.start_loc.tolist()
        self._graded = dataset.graded
        self._num_graded = dataset.num_graded.tolist()
        # The shard of each sequence, and its first rows of features and hidden states there.
        self._places: dict[int, tuple[_Shard, int, int]] = {}
        for entry in index.shards:
            self._map(folder / entry.file)
        for sequence in range(len(dataset)):
            if sequence not in self._places:
                raise UserError(
                    f"The stored features {str(folder)!r} lack sequence {sequence}. Make the store "
                    "again."
                )
        values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
        self._fp8_values = values.float()

    @classmethod
    def open(
        cls,
        folder: Path,
        dataset: ResponseDataset,
        target: TargetFacts,
        aux_layer_ids: tuple[int, ...],
        *,
        verify: bool = False,
        pin_memory: bool = False,
    ) -> Self:
        """Open a store for the data, target and layers that it was made for.

        `verify` compares every shard with its checksum, which reads all of them. With `pin_memory`
        `states` gives page-locked tensors, for copies to a GPU.

        Raises:
            UserError: there is none, it is of something else, incomplete or damaged.
        """
        index = Index.read(folder)
        _check(index.facts, folder, dataset, target, aux_layer_ids)
        if len(index.shards) < index.num_shards:
            raise UserError(
                f"The stored features {str(folder)!r} are incomplete: {len(index.shards)} of "
                f"{index.num_shards} shards. `peagle data features` goes on where it stopped."
            )
        for entry in index.shards:
            entry.check(folder, verify=verify)
        return cls(folder, index, dataset, pin_memory=pin_memory)

    def states(self, batch: Batch) -> TargetStates:
        """Return the target's states of a batch of the store's dataset, on the host.

        Features of every position, hidden states of graded positions; zeros elsewhere. A
        place of the batch may hold the first part of its sequence.

        Raises:
            UserError: the states read hold NaN.
        """
        rows, length = batch.tokens_BN.shape
        features = self._empty(rows * length, self.facts.num_aux * self.facts.hidden_size)
        hidden = self._empty(rows * length, self.facts.hidden_size)
        is_empty, is_ungraded = torch.ones(2, rows * length, dtype=torch.bool)
        for place in batch.places:
            index = place.sequence
            assert place.length <= self._lens[index], "the batch is of another dataset"
            begin = place.row * length + place.start
            at = slice(begin, begin + place.length)
            self._read_features(index, features[at])
            is_empty[at] = False
            first_token = self._starts[index]
            is_graded = self._graded[first_token : first_token + place.length]
            graded = begin + is_graded.nonzero().flatten()
            shard, _, first = self._places[index]
            hidden[graded] = shard.hidden_UH[first : first + len(graded)]
            is_ungraded[graded] = False
            # A sum is NaN or infinite if one of its terms is, and fast.
            if not math.isfinite(float(features[at].sum()) + float(hidden[graded].sum())):
                raise UserError(
                    f"The stored features {str(self.folder)!r} of sequence {index} hold NaN or "
                    "infinite values, which were not written so. `peagle data features` with "
                    "--verify finds the shard."
                )
        # Memory is written once: reading fills most of it.
        features[is_empty] = 0
        hidden[is_ungraded] = 0
        return TargetStates(features.view(rows, length, -1), hidden.view(rows, length, -1))

    def _empty(self, positions: int, width: int) -> Tensor:
        options = {"dtype": self.features_dtype, "pin_memory": self._pin_memory}
        return torch.empty(positions, width, **options)

    def features_of(self, sequence: int) -> Tensor:
        """Return the features of a whole sequence, [T, A * H]."""
        width = self.facts.num_aux * self.facts.hidden_size
        out_TA = torch.empty(self._lens[sequence], width, dtype=self.features_dtype)
        self._read_features(sequence, out_TA)
        return out_TA

    def _read_features(self, sequence: int, out_TA: Tensor) -> None:
        shard, begin, _ = self._places[sequence]
        rows = slice(begin, begin + len(out_TA))
        if shard.scales_TA is None:
            out_TA.copy_(shard.features_TA[rows])
        else:
            self._dequantize(shard.features_TA[rows], shard.scales_TA[rows], out_TA)

    def _dequantize(self, values_TA: Tensor, scales_TA: Tensor, out_TA: Tensor) -> None:
        codes_TA, num_aux = values_TA.view(torch.uint8), scales_TA.shape[1]
        for begin in range(0, len(out_TA), _FP8_ROWS):
            rows = slice(begin, begin + _FP8_ROWS)
            # torch converts float8 several times slower than it looks values up.
            flat = self._fp8_values.index_select(0, codes_TA[rows].flatten().int())
            states_TAH = flat.view(-1, num_aux, self.facts.hidden_size)
            states_TAH *= scales_TA[rows].unsqueeze(-1)
            out_TA[rows] = states_TAH.flatten(1)

    def _map(self, path: Path) -> None:
        """Add a shard; its tensors are read when they are used."""
        try:
            with safe_open(path, framework="pt") as reader:
                names = set(reader.keys())
                scales = reader.get_tensor("scales") if "scales" in names else None
                shard = _Shard(reader.get_tensor("features"), reader.get_tensor("hidden"), scales)
                sequences = reader.get_tensor("sequences").tolist()
                owner = (reader.metadata() or {}).get(FACTS_KEY)
        except (SafetensorError, OSError) as error:
            raise UserError(f"{str(path)!r} is not a shard of features: {error}.") from None
        if owner != self.facts.sha256:
            raise UserError(f"{str(path)!r} belongs to another store of features.")
        features = hidden = 0
        for sequence in sequences:
            self._places[sequence] = (shard, features, hidden)
            features += self._lens[sequence]
            hidden += self._num_graded[sequence]
        if (features, hidden) != (len(shard.features_TA), len(shard.hidden_UH)):
            raise UserError(f"{str(path)!r} is damaged: its rows are not those of its sequences.")


def _check(
    facts: StoreFacts,
    folder: Path,
    dataset: ResponseDataset,
    target: TargetFacts,
    aux_layer_ids: tuple[int, ...],
) -> None:
    name = f"The stored features {str(folder)!r}"
    if facts.dataset_sha256 != dataset_sha256(dataset):
        raise UserError(
            f"{name} are of other data: {facts.num_sequences} sequences of {facts.num_tokens} "
            f"tokens, the longest of {facts.longest}; here are {len(dataset)} of "
            f"{len(dataset.tokens)}, the longest of {dataset.longest}. The "
            "file and data.max_length must be the same as for `peagle data features`."
        )
    if difference := facts.target.difference(target, "the store"):
        raise UserError(
            f"{name} are of target {facts.target.name!r}, not of {target.name!r}: {difference}."
        )
    if facts.aux_layer_ids != tuple(aux_layer_ids):
        raise UserError(
            f"{name} are of target layers {list(facts.aux_layer_ids)}, the head reads "
            f"{list(aux_layer_ids)}. Set head.aux_layer_ids to the former, or make the store again "
            "with --aux-layer-ids."
        )
