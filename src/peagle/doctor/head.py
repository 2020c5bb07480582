"""A head as its files have it, which can be changed in one respect and run again.

Shapes: A aux states, H target width, D drafter width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from peagle.models.checkpoint.weights import fill
from peagle.models.drafter import Drafter, DrafterConfig

SharedState = Literal["fc", "fc without norm", "no fc"]


@dataclass(frozen=True, slots=True)
class Reading:
    """How a runtime reads a head: what neither config.json nor the weights say.

    Attributes:
        token_shift: 1 gives slot p the token x[p] where the method says x[p+1].
        feature_shift: 1 gives slot p the feature g[p-1] where the method says g[p].
        window: positions that a slot of the drafter looks back on; None is all.
        shared_state: the state of mask slots: "fc" is the method's, fc(norm(mask_hidden)); "no fc"
            takes the first D numbers of mask_hidden as they are.
        dtype: type of the computation.
    """

    token_shift: int = 0
    feature_shift: int = 0
    window: int | None = None
    shared_state: SharedState = "fc"
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True, slots=True)
class Head:
    """Shape, weights (by checkpoint name, all that `config` asks for) and reading of a head."""

    config: DrafterConfig
    tensors: Mapping[str, Tensor]
    reading: Reading = field(default_factory=Reading)

    def configured(self, **changes: Any) -> Head:
        """Return the head with other values in its configuration."""
        return replace(self, config=replace(self.config, **changes))

    def filled(self, **tensors: Tensor) -> Head:
        """Return the head with other tensors; "." of their names is written "__"."""
        named = {name.replace("__", "."): value for name, value in tensors.items()}
        return replace(self, tensors={**self.tensors, **named})

    def read(self, **changes: Any) -> Head:
        """Return the head, run in another way."""
        return replace(self, reading=replace(self.reading, **changes))

    def target_ids(self) -> Tensor:
        """Return the target id of every draft id, int64 [DV]."""
        ids = torch.arange(self.config.draft_vocab_size)
        return ids + self.tensors["d2t"] if self.config.is_pruned else ids

    def with_target_ids(self, ids: Tensor) -> Head:
        """Return the head with another draft vocabulary."""
        kept = torch.zeros(self.config.vocab_size, dtype=torch.bool)
        kept[ids] = True
        return self.filled(d2t=ids - torch.arange(len(ids)), t2d=kept)

    def drafter(self, device: torch.device) -> Drafter:
        """Return the module, ready to run."""
        with torch.device("meta"):
            drafter = _ReadDrafter(self.config).to(self.reading.dtype)
        drafter.to_empty(device=device)
        drafter.shared_state = self.reading.shared_state
        fill(drafter, self.tensors)
        return drafter.requires_grad_(False).eval()


class _ReadDrafter(Drafter):
    """A drafter that may read mask_hidden otherwise than the method has it."""

    shared_state: SharedState = "fc"

    def shared_hidden(self) -> Tensor:
        if self.shared_state == "fc":
            return super().shared_hidden()
        assert self.mask_hidden is not None
        if self.shared_state == "fc without norm":
            return self.fc(self.mask_hidden).flatten()
        return self.mask_hidden.flatten()[: self.config.hidden_size]
