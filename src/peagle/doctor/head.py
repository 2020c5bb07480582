"""A head as its files have it, which can be changed in one respect and run again.

Neither config.json nor the weights say all of how a head is run: `Reading` holds the conventions
that the code of a runtime decides.

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
    """How a runtime reads a head.

    Attributes:
        token_shift: 1 gives slot p the token x[p] where the method says x[p+1].
        feature_shift: 1 gives slot p the feature g[p-1] where the method says g[p].
        window: positions that a slot of the drafter may look back on; None is all.
        shared_state: what becomes of mask_hidden: "fc" is the method's, fc(norm(mask_hidden));
            "no fc" takes its first D numbers as they are.
        dtype: what it computes in.
    """

    token_shift: int = 0
    feature_shift: int = 0
    window: int | None = None
    shared_state: SharedState = "fc"
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True, slots=True)
class Head:
    """Shape, weights and reading of a head.

    Attributes:
        config: its shape.
        tensors: by checkpoint name, all that `config` asks for.
        reading: how it is run.
    """

    config: DrafterConfig
    tensors: Mapping[str, Tensor]
    reading: Reading = field(default_factory=Reading)

    def configured(self, **changes: Any) -> Head:
        """The same head with other values in its configuration."""
        return replace(self, config=replace(self.config, **changes))

    def filled(self, **tensors: Tensor) -> Head:
        """The same head with other tensors; "." of their names is written "__"."""
        named = {name.replace("__", "."): value for name, value in tensors.items()}
        return replace(self, tensors={**self.tensors, **named})

    def read(self, **changes: Any) -> Head:
        """The same head, run in another way."""
        return replace(self, reading=replace(self.reading, **changes))

    def target_ids(self) -> Tensor:
        """Target id of every draft id, int64 [DV]."""
        ids = torch.arange(self.config.draft_vocab_size)
        return ids + self.tensors["d2t"] if self.config.is_pruned else ids

    def with_target_ids(self, ids: Tensor) -> Head:
        """The same head with another draft vocabulary."""
        kept = torch.zeros(self.config.vocab_size, dtype=torch.bool)
        kept[ids] = True
        return self.filled(d2t=ids - torch.arange(len(ids)), t2d=kept)

    def drafter(self, device: torch.device) -> Drafter:
        """The module, ready to run."""
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
