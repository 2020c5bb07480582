"""Read the stored states of a batch, as fast as the disk gives them.

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
        facts: of the store.
        features_dtype, hidden_dtype: of the tensors that `states` gives: bfloat16, also where
            float8 is stored, or float32.
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
        """Return the target's states of a batch, on the host.

        Features of every position, hidden states of those that grade an element; zeros elsewhere.

        Args:
            batch: of the store's dataset; a place may hold the first part of its sequence.

        Raises:
            UserError: what was read holds NaN.
        """
        rows, length = batch.tokens_BN.shape
        features = self._empty(rows * length, self.facts.num_aux * self.facts.hidden_size)
        hidden = self._empty(rows * length, self.facts.hidden_size)
        is_empty, is_ungraded = torch.ones(2, rows * length, dtype=torch.bool)
        for place in batch.places:
            index, prompt_len = place.sequence, self._prompt_lens[place.sequence]
            assert place.length <= self._lens[index], "the batch is of another dataset"
            begin = place.row * length + place.start
            at = slice(begin, begin + place.length)
            self._read_features(index, features[at])
            is_empty[at] = False
            count = max(0, min(self._num_graded[index], place.length - prompt_len))
            graded = slice(begin + prompt_len, begin + prompt_len + count)
            shard, _, first = self._places[index]
            hidden[graded] = shard.hidden_UH[first : first + count]
            is_ungraded[graded] = False
            # A sum is NaN or infinite if one of its terms is, and fast.
            if not math.isfinite(float(features[at].sum()) + float(hidden[graded].sum())):
                raise UserError(
                    f"The stored features {str(self.folder)!r} of sequence {index} hold NaN or "
                    "infinite values, which were not written so. `peagle data features` with "
                    "--verify finds the shard."
                )
        # Memory is written once: most of it is filled with what is read.
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
