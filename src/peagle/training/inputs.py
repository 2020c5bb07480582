"""The inputs of a run: target and responses, and batches with the target's features of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from peagle.data.batches import Batch, moved, owned_by, pinned
from peagle.data.dataset import ResponseDataset, data_facts
from peagle.data.features import FeatureStore, TargetStates, target_states
from peagle.data.readers import tokenizer_sha256
from peagle.engine.placement import resolve_dtype
from peagle.errors import UserError
from peagle.models.target import TargetModel, load_tokenizer
from peagle.models.target_ends import TargetEnds
from peagle.models.target_facts import TargetFacts
from peagle.training.build import Built, build_drafter
from peagle.training.config import TrainConfig
from peagle.training.warm_start import start_mask_hidden

# Batches made ahead, whose states lie on the device where a store has them.
BATCHES_AHEAD = 2


@dataclass(slots=True)
class Inputs:
    """The frozen side of a run.

    Attributes:
        config: the run.
        device: where it computes.
        target: the whole model; with stored features its embedding and lm_head only.
        tokenizer: the target's.
        dataset, validation: responses.
        data_facts: `data_facts` of "train" and "validation", None where there is no validation.
    """

    config: TrainConfig
    device: torch.device
    target: TargetFacts
    tokenizer: PreTrainedTokenizerBase
    dataset: ResponseDataset
    validation: ResponseDataset | None
    data_facts: dict[str, dict[str, Any] | None]
    _stores: dict[str, FeatureStore] = field(default_factory=dict)

    @classmethod
    def load(cls, config: TrainConfig, device: torch.device) -> Inputs:
        """Read target and data.

        Raises:
            UserError: one of them is not usable.
        """
        dtype, data = resolve_dtype(config.run.target_dtype, device), config.data
        load = TargetModel.load if data.features is None else TargetEnds.load
        target: TargetFacts = load(config.target, dtype=dtype, device=device)
        tokenizer = load_tokenizer(config.target)
        digest = tokenizer_sha256(config.target, tokenizer)

        def read(path: Path) -> tuple[ResponseDataset, dict[str, Any]]:
            before = _version_of(path)
            dataset = ResponseDataset.load(
                path, tokenizer, target.vocab_size, data.max_length, digest
            )
            facts = data_facts(path, dataset)
            if _version_of(path) != before:
                raise UserError(
                    f"The data file {str(path)!r} changed while it was read. Start again when it "
                    "is complete."
                )
            return dataset, facts

        validation, facts = (None, None) if data.validation is None else read(data.validation)
        dataset, own_facts = read(data.train)
        every = {"train": own_facts, "validation": facts}
        return cls(config, device, target, tokenizer, dataset, validation, every)

    def build_head(self) -> Built:
        """Build the head before its first step, and open its stores or tap its target.

        Raises:
            UserError: the head cannot be, or a store is not of this target, data or layers.
        """
        built = build_drafter(self.config, self.target, self.tokenizer, self.dataset)
        layers = built.drafter.config.aux_layer_ids
        if isinstance(self.target, TargetModel):
            self.target.tap_aux(layers)
            return built
        data = self.config.data
        pairs = {
            "train": (data.features, self.dataset),
            "validation": (data.validation_features, self.validation),
        }
        for name, (folder, dataset) in pairs.items():
            if folder is not None and dataset is not None:
                self._stores[name] = FeatureStore.open(
                    folder, dataset, self.target, layers, pin_memory=self.device.type == "cuda"
                )
        if built.warm_start is not None and built.warm_start.mask_hidden_is_new:
            start_mask_hidden(built.drafter, self.dataset, self._stores["train"].features_of)
        return built

    def identity(self) -> dict[str, str | None]:
        """Return the SHA-256 of each file of responses and of each store's index, if there."""
        stores = {"train": "features", "validation": "validation_features"}
        found: dict[str, str | None] = dict.fromkeys([*self.data_facts, *stores.values()])
        found |= {name: facts["sha256"] for name, facts in self.data_facts.items() if facts}
        return found | {stores[name]: store.index_sha256 for name, store in self._stores.items()}

    def source(self, batch_at: Callable[[int], Batch], name: str = "train") -> Source:
        """Return the batches of "train" or "validation" with the target's features of them."""
        if isinstance(self.target, TargetModel):
            compute = partial(target_states, self.target)
            return Source(batch_at, self.device, compute=compute)
        return Source(batch_at, self.device, read=self._stores[name].states)


def _version_of(path: Path) -> tuple[int, ...]:
    """Return the facts of a file that change when it is written or replaced; () without it."""
    if not path.is_file():
        return ()
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


class Source:
    """Batches on the device, with the target's states.

    A thread makes the next batches with `batch_at`, on the host, and copies them to the GPU on a
    stream of its own. Their states come from the target in this process (`compute`, on the device)
    or from a store (`read`, on the host, also ahead).
    """

    def __init__(
        self,
        batch_at: Callable[[int], Batch],
        device: torch.device,
        *,
        compute: Callable[[Batch], TargetStates] | None = None,
        read: Callable[[Batch], TargetStates] | None = None,
    ) -> None:
        assert (compute is None) != (read is None)
        self._batch_at, self._device = batch_at, device
        self._compute, self._read = compute, read
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def range(self, start: int, stop: int) -> Iterator[tuple[Batch, TargetStates]]:
        """Yield the batches and states of the steps from `start` to before `stop`."""
        with ThreadPoolExecutor(1, "peagle-data", initializer=self._choose_gpu) as thread:
            waiting: list[Future[tuple[Batch, TargetStates | None, torch.cuda.Event | None]]] = []
            step = start
            try:
                while step < stop or waiting:
                    while step < stop and len(waiting) < BATCHES_AHEAD:
                        waiting.append(thread.submit(self._make, step))
                        step += 1
                    batch, states, ready = waiting.pop(0).result()
                    if ready is not None:
                        self._wait(ready, batch, states)
                    if states is None:
                        assert self._compute is not None
                        states = self._compute(batch)
                    yield batch, states
            finally:
                for future in waiting:
                    future.cancel()

    def _choose_gpu(self) -> None:
        """Choose this process's GPU: a new thread would pin memory for the first one."""
        if self._stream is not None:
            torch.cuda.set_device(self._stream.device)

    def _make(self, step: int) -> tuple[Batch, TargetStates | None, torch.cuda.Event | None]:
        batch = self._batch_at(step)
        states = self._read(batch) if self._read is not None else None
        if self._stream is None:
            return batch, states, None
        with torch.cuda.stream(self._stream):
            batch, states = moved(pinned((batch, states)), self._device)
            ready = torch.cuda.Event()
            ready.record(self._stream)
            return batch, states, ready

    def _wait(self, ready: torch.cuda.Event, batch: Batch, states: TargetStates | None) -> None:
        """Let the computing stream wait for the copies, and own their memory."""
        current = torch.cuda.current_stream(self._device)
        current.wait_event(ready)
        owned_by((batch, states), current)
