"""Read what a store holds about a batch, as fast as the disk gives it.

Shapes: B rows, N positions of a row, T positions, A aux states, H target width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from peagle.data.batches import Batch
from peagle.data.dataset import ResponseDataset
from peagle.data.feature_format import (
    FACTS_KEY,
    HIDDEN_DTYPES,
    Index,
    StoreFacts,
    dataset_sha256,
    num_graded,
)
from peagle.data.features import TargetStates
from peagle.errors import UserError
from peagle.models.target_facts import TargetFacts

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
        facts: what it is of.
        features_dtype: of what is read: bfloat16, also where float8 is stored, or float32.
        hidden_dtype: the same.
    """

    def __init__(
        self, folder: Path, index: Index, dataset: ResponseDataset, *, pin_memory: bool
    ) -> None:
        self.folder = folder
        self.facts: StoreFacts = index.facts
        self.features_dtype = self.hidden_dtype = HIDDEN_DTYPES[self.facts.dtype]
        self._pin_memory = pin_memory
        self._lens = dataset.start_loc.diff().tolist()
        self._prompt_lens = dataset.prompt_lens.tolist()
        self._num_graded = num_graded(dataset).tolist()
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
    ) -> FeatureStore:
        """Open a store for the data, target and layers that it was made for.

        Args:
            folder: the store.
            dataset: the sequences that batches are made of.
            target: the one to imitate.
            aux_layer_ids: layers that the head reads.
            verify: compare every shard with its checksum, which reads all of them.
            pin_memory: `states` gives page-locked tensors, for copies to a GPU.

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
        """What the target says about a batch, on the host.

        Features of every position, hidden states of those that grade an element; zeros elsewhere.

        Args:
            batch: of the store's dataset; a place may hold the first part of its sequence.

        Raises:
            UserError: what was read holds NaN.
        """
        rows, length = batch.tokens_BN.shape
        width = self.facts.num_aux * self.facts.hidden_size
        features = _Canvas(rows, length, width, self.features_dtype, pin_memory=self._pin_memory)
        hidden = _Canvas(
            rows, length, self.facts.hidden_size, self.hidden_dtype, pin_memory=self._pin_memory
        )
        for place in sorted(batch.places, key=lambda place: (place.row, place.start)):
            index, first = place.sequence, self._prompt_lens[place.sequence]
            assert place.length <= self._lens[index], "the batch is of another dataset"
            count = max(0, min(self._num_graded[index], place.length - first))
            read = features.take(place.row, place.start, place.length)
            self._read_features(index, read)
            graded = hidden.take(place.row, place.start + first, count)
            shard, _, begin = self._places[index]
            graded.copy_(shard.hidden_UH[begin : begin + count])
            # A sum is NaN or infinite if one of its terms is, and fast.
            if not math.isfinite(float(read.sum()) + float(graded.sum())):
                raise UserError(
                    f"The stored features {str(self.folder)!r} of sequence {index} hold NaN or "
                    "infinite values, which were not written so. `peagle data features` with "
                    "--verify finds the shard."
                )
        return TargetStates(features.done(), hidden.done())

    def features_of(self, sequence: int) -> Tensor:
        """The features of a whole sequence, [T, A * H]."""
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


class _Canvas:
    """Rows that are filled from left to right; what is left out is zero.

    Memory is written once: most of it is filled with what is read.
    """

    def __init__(
        self, rows: int, length: int, width: int, dtype: torch.dtype, *, pin_memory: bool
    ) -> None:
        self._shape = rows, length, width
        self._flat = torch.empty(rows * length, width, dtype=dtype, pin_memory=pin_memory)
        self._end = 0

    def take(self, row: int, start: int, length: int) -> Tensor:
        """The next positions to fill, [length, width]."""
        begin = row * self._shape[1] + start
        assert length == 0 or begin >= self._end, "places do not overlap"
        if length:
            self._flat[self._end : begin].zero_()
            self._end = begin + length
        return self._flat[begin : begin + length]

    def done(self) -> Tensor:
        """Everything, [rows, length, width]."""
        self._flat[self._end :].zero_()
        return self._flat.view(self._shape)


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
