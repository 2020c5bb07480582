"""What a run reads: target and responses, and what the one says about the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from peagle.data.batches import Batch
from peagle.data.dataset import ResponseDataset
from peagle.data.feature_store import FeatureStore
from peagle.data.features import target_states
from peagle.data.readers import tokenizer_sha256
from peagle.engine.placement import resolve_dtype
from peagle.models.target import TargetModel, load_tokenizer
from peagle.models.target_ends import TargetEnds
from peagle.models.target_facts import TargetFacts
from peagle.training.build import Built, build
from peagle.training.config import TrainConfig
from peagle.training.mask_hidden import start_mask_hidden
from peagle.training.source import Source


@dataclass(slots=True)
class Inputs:
    """The frozen side of a run.

    Attributes:
        config: the run.
        device: where it computes.
        target: the whole model; with stored features its embedding and lm_head only.
        tokenizer: the target's.
        dataset, validation: responses.
    """

    config: TrainConfig
    device: torch.device
    target: TargetFacts
    tokenizer: PreTrainedTokenizerBase
    dataset: ResponseDataset
    validation: ResponseDataset | None
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

        def read(path: Path) -> ResponseDataset:
            return ResponseDataset.load(path, tokenizer, target.vocab_size, data.max_length, digest)

        validation = None if data.validation is None else read(data.validation)
        return cls(config, device, target, tokenizer, read(data.train), validation)

    def build_head(self) -> Built:
        """The head before its first step; stores are opened, or the target is tapped, for it.

        Raises:
            UserError: the head cannot be, or a store is not of this target, data or layers.
        """
        built = build(self.config, self.target, self.tokenizer, self.dataset)
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

    def source(self, batch_at: Callable[[int], Batch], name: str = "train") -> Source:
        """Batches of "train" or "validation" with what the target says about them."""
        if isinstance(self.target, TargetModel):
            compute = partial(target_states, self.target)
            return Source(batch_at, self.device, compute=compute)
        return Source(batch_at, self.device, read=self._stores[name].states)
