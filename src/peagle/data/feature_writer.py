"""Write the frozen target's states of a dataset into a store, shard by shard.

Every shard appears whole or not at all, so a run that was killed goes on after the last whole one.

Shapes: B rows, N positions of a row, T positions and U graded positions of a batch, A aux states,
H target width.
"""

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from peagle.data.batches import Batch, make_batch
from peagle.data.dataset import ResponseDataset
from peagle.data.features import (
    FACTS_KEY,
    FEATURE_DTYPES,
    HIDDEN_DTYPES,
    INDEX_NAME,
    Index,
    ShardEntry,
    ShardPlan,
    StoreFacts,
    TargetStates,
    plan_shards,
    target_states,
)
from peagle.disk import LOCK_NAME, locked, put_in_place, size_text
from peagle.errors import UserError
from peagle.model_folder import sha256_of
from peagle.models.checkpoint import write_json
from peagle.models.target import TargetModel

_PART_SUFFIX = ".part"
_FP8_MAX = torch.finfo(torch.float8_e4m3fn).max


@dataclass(frozen=True, slots=True)
class DiskNeed:
    """Bytes of the whole store (exactly), of its missing shards, and of free space on its disk."""

    total: int
    missing: int
    free: int


@dataclass(slots=True)
class FeatureProgress:
    """How far the writing of stored features has come.

    Attributes:
        shards, num_shards: whole ones, and all.
        tokens, num_tokens: computed by this run, and those that it has to compute.
        seconds: time of this run.
    """

    shards: int
    num_shards: int
    tokens: int
    num_tokens: int
    seconds: float = 0.0


class ShardFile:
    """A shard that is being written, beside its place."""

    def __init__(self, folder: Path, plan: ShardPlan) -> None:
        self.path, self._layout = folder / plan.file, plan.layout
        self._part = folder / (plan.file + _PART_SUFFIX)
        self._file = self._part.open("wb")
        self._file.write(self._layout.header)
        self._at = dict(self._layout.begins)

    def put(self, tensors: Mapping[str, Tensor]) -> None:
        """Add rows to each tensor, after the rows put before."""
        for name, value in tensors.items():
            raw = value.contiguous().view(torch.uint8).numpy()
            self._file.seek(self._at[name])
            self._file.write(raw.data)
            self._at[name] += raw.nbytes

    def close(self) -> str:
        """Move the whole file to its place, and return its SHA-256."""
        self._file.close()
        ends = [*sorted(self._layout.begins.values())[1:], self._layout.size]
        assert sorted(self._at.values()) == ends, "every row was put"
        digest = sha256_of(self._part)
        put_in_place(self._part, self.path)
        return digest

    def abort(self) -> None:
        """Remove the unfinished file."""
        with suppress(OSError):  # buffered bytes may not fit on the disk
            self._file.close()
        self._part.unlink(missing_ok=True)


class FeatureWriter:
    """Writes a store, or the missing shards of one.

    Args:
        folder: folder of the store, new or begun with the same facts.
        dataset: the sequences.
        facts: facts of the store.

    Raises:
        UserError: the folder holds something else, a store of other facts, or a damaged one.
    """

    def __init__(self, folder: Path, dataset: ResponseDataset, facts: StoreFacts) -> None:
        self.folder, self.dataset, self.facts = folder, dataset, facts
        self.plans = plan_shards(dataset, facts)
        self._lens = dataset.start_loc.diff()
        self._entries: dict[int, ShardEntry] = {}
        if folder.exists():
            self._find_whole()

    @property
    def missing(self) -> list[ShardPlan]:
        """Return the shards that are still to be written."""
        return [plan for plan in self.plans if plan.number not in self._entries]

    def need(self) -> DiskNeed:
        """Compute the space that the store takes on the disk."""
        shards = sum(plan.layout.size for plan in self.plans)
        # All digests have one length, so the size of the index is known before their values.
        entries = [ShardEntry(p.file, p.layout.size, "0" * 64) for p in self.plans]
        index = len(json.dumps(self._index(entries).to_json(), indent=2)) + 1
        missing = sum(plan.layout.size for plan in self.missing)
        place = next(p for p in (self.folder, *self.folder.absolute().parents) if p.exists())
        parts = self.folder.glob(f"features-*{_PART_SUFFIX}")  # a killed run left them
        free = shutil.disk_usage(place).free + sum(part.stat().st_size for part in parts)
        return DiskNeed(shards + index, missing, free)

    def check_disk(self, max_bytes: int | None = None) -> DiskNeed:
        """Refuse a store that is larger than allowed or than the disk's free space.

        Raises:
            UserError: with both numbers.
        """
        need = self.need()
        remedy = "Store less (--dtype fp8, a shorter --max-length, less data), or train without it."
        if max_bytes is not None and need.total > max_bytes:
            raise UserError(
                f"The features take {size_text(need.total)} and --max-disk-gib allows "
                f"{size_text(max_bytes)}. {remedy}"
            )
        if need.missing > need.free:
            raise UserError(
                f"The features still take {size_text(need.missing)} in {str(self.folder)!r}, and "
                f"the disk has {size_text(need.free)} left. {remedy}"
            )
        return need

    def verify(self) -> None:
        """Read all shards that are there, and compare them with the index.

        Raises:
            UserError: naming the first that was altered.
        """
        for _, entry in sorted(self._entries.items()):
            entry.check(self.folder, verify=True)

    def write(
        self,
        target: TargetModel,
        batch_tokens: int,
        watch: Callable[[FeatureProgress], None] = lambda _: None,
    ) -> FeatureProgress:
        """Compute and write the missing shards.

        Args:
            target: its taps are set to the layers of the facts.
            batch_tokens: tokens of a forward pass, padding included; at least one sequence.
            watch: called after every batch.

        Raises:
            UserError: a sequence's states hold NaN, another process writes here, or the disk is
                full; whole shards stay.
        """
        target.tap_aux(self.facts.aux_layer_ids)
        missing = self.missing
        num_tokens = sum(plan.num_positions for plan in missing)
        progress = FeatureProgress(len(self._entries), len(self.plans), 0, num_tokens)
        start = time.perf_counter()

        def count(tokens: int) -> None:
            progress.tokens += tokens
            progress.shards = len(self._entries)
            progress.seconds = time.perf_counter() - start
            watch(progress)

        try:
            with locked(self.folder), ThreadPoolExecutor(1, "peagle-features") as thread:
                self._write_index()
                pending: Future[None] | None = None
                for plan in missing:
                    pending = self._write_shard(plan, target, batch_tokens, thread, pending, count)
                if pending is not None:
                    pending.result()
        except OSError as error:
            raise UserError(
                f"The features {str(self.folder)!r} could not be written: {error}. Whole shards "
                "stay; free some space and run the same command again."
            ) from None
        progress.shards = len(self._entries)
        return progress

    def _write_shard(
        self,
        plan: ShardPlan,
        target: TargetModel,
        batch_tokens: int,
        thread: ThreadPoolExecutor,
        pending: Future[None] | None,
        count: Callable[[int], None],
    ) -> Future[None]:
        """Compute a shard while another thread, with one job at a time, writes the last batch."""
        shard = ShardFile(self.folder, plan)

        def submit(job: Callable[..., None], *arguments: Any) -> Future[None]:
            if pending is not None:
                pending.result()  # raises the error of a failed job
            return thread.submit(job, *arguments)

        try:
            pending = submit(shard.put, {"sequences": plan.sequences})
            for group in _batches_of(plan, self._lens, batch_tokens):
                rows = [[sequence] for sequence in group]
                batch = make_batch(self.dataset, rows, int(self._lens[group].max()))
                batch = replace(
                    batch,
                    tokens_BN=batch.tokens_BN.to(target.device),
                    documents_BN=batch.documents_BN.to(target.device),
                )
                pending = submit(shard.put, self._encode(batch, target_states(target, batch)))
                count(batch.num_tokens)
            return submit(self._close_shard, plan, shard)
        except BaseException:
            wait([pending] if pending is not None else [])
            shard.abort()
            raise

    def _close_shard(self, plan: ShardPlan, shard: ShardFile) -> None:
        try:
            digest = shard.close()
        except BaseException:
            shard.abort()
            raise
        self._entries[plan.number] = ShardEntry(plan.file, plan.layout.size, digest)
        self._write_index()

    def _encode(self, batch: Batch, states: TargetStates) -> dict[str, Tensor]:
        """Return the stored tensors of a batch, on the host."""
        real_BN = batch.documents_BN >= 0
        graded_BN = torch.zeros_like(real_BN)
        borders = (self.dataset.start_loc[p.sequence :][:2].tolist() for p in batch.places)
        graded_T = torch.cat([self.dataset.graded[begin:end] for begin, end in borders])
        graded_BN[real_BN] = graded_T.to(graded_BN.device)
        features_TA = states.features_BNA[real_BN]
        hidden_UH = states.hidden_BNH[graded_BN].to(HIDDEN_DTYPES[self.facts.dtype])
        if self.facts.dtype == "fp8":
            features_TA, scales_TA = quantize_features(features_TA, self.facts.num_aux)
            stored = {"features": features_TA, "scales": scales_TA, "hidden": hidden_UH}
            sum_T = scales_TA.sum(-1)
        else:
            features_TA = features_TA.to(FEATURE_DTYPES[self.facts.dtype])
            stored = {"features": features_TA, "hidden": hidden_UH}
            sum_T = features_TA.sum(-1)
        finite_T, finite_U = sum_T.isfinite(), hidden_UH.sum(-1).isfinite()
        if not bool(finite_T.all() & finite_U.all()):
            broken = (real_BN.nonzero()[~finite_T], graded_BN.nonzero()[~finite_U])
            row, position = torch.cat(broken)[0].tolist()
            raise UserError(
                f"The target's states of sequence {batch.places[row].sequence} (from 0) hold NaN "
                f"or infinite values at position {position}. Its weights are damaged, or "
                f"{self.facts.target_dtype} is too narrow for them: try another --target-dtype."
            )
        return {name: value.cpu() for name, value in stored.items()}

    def _find_whole(self) -> None:
        if not (self.folder / INDEX_NAME).is_file():
            if not self.folder.is_dir() or any(p.name != LOCK_NAME for p in self.folder.iterdir()):
                raise UserError(
                    f"{str(self.folder)!r} is there already and holds no stored features; choose "
                    "another output."
                )
            return
        found = Index.read(self.folder)
        if difference := found.facts.difference(self.facts):
            raise UserError(
                f"{str(self.folder)!r} holds features of other things: {difference}. Choose "
                "another output, or remove it."
            )
        entries = {entry.file: entry for entry in found.shards}
        for plan in self.plans:
            path, entry = self.folder / plan.file, entries.get(plan.file)
            if path.exists():
                if entry is None:
                    entry = self._unlisted(path, plan)
                entry.check(self.folder)
                self._entries[plan.number] = entry

    def _unlisted(self, path: Path, plan: ShardPlan) -> ShardEntry:
        """Return the entry of a shard that was finished just before the run was killed."""
        try:
            with safe_open(path, framework="pt") as reader:
                is_ours = (reader.metadata() or {}).get(FACTS_KEY) == self.facts.sha256
        except (SafetensorError, OSError):
            is_ours = False
        if not is_ours:
            raise UserError(
                f"{str(path)!r} does not belong to the store that it lies in; remove it."
            )
        return ShardEntry(plan.file, plan.layout.size, sha256_of(path))

    def _index(self, entries: list[ShardEntry]) -> Index:
        return Index(self.facts, len(self.plans), tuple(entries))

    def _write_index(self) -> None:
        entries = [entry for _, entry in sorted(self._entries.items())]
        write_json(self.folder / INDEX_NAME, self._index(entries).to_json())


def quantize_features(features_TA: Tensor, num_aux: int) -> tuple[Tensor, Tensor]:
    """float8_e4m3fn with a scale s = max|g| / 448 for each position and aux state.

    Returns:
        the values, [T, A * H], and float32 scales, [T, A].
    """
    states_TAH = features_TA.float().unflatten(-1, (num_aux, -1))
    scales_TA = states_TAH.abs().amax(-1) / _FP8_MAX
    divisor_TA = scales_TA.clamp_min(torch.finfo(torch.float32).tiny)
    values_TAH = (states_TAH / divisor_TA.unsqueeze(-1)).to(torch.float8_e4m3fn)
    return values_TAH.flatten(-2), divisor_TA


def _batches_of(plan: ShardPlan, lens: Tensor, batch_tokens: int) -> Iterator[list[int]]:
    """Yield the sequences of a shard in groups of `batch_tokens` tokens, padding included."""
    group: list[int] = []
    for sequence in plan.sequences.tolist():
        # The first is the longest.
        if group and (len(group) + 1) * int(lens[group[0]]) > batch_tokens:
            yield group
            group = []
        group.append(sequence)
    yield group
