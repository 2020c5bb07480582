"""What training and checkpoints ask of a target, whether its layers are loaded or not.

Shapes: N rows, H target width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import transformers
from torch import Tensor


class TargetSizes(Protocol):
    """The sizes of a target: `TargetFacts`, or `TargetShape` of its configuration alone."""

    @property
    def name(self) -> str:
        """Where it was loaded from."""
        ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def num_layers(self) -> int: ...

    @property
    def text_config(self) -> transformers.PretrainedConfig:
        """The configuration of its decoder."""
        ...


class TargetFacts(TargetSizes, Protocol):
    """The sizes of a target and both of its ends: `TargetModel`, or `TargetEnds` without layers."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    def compute_logits(self, hidden_NH: Tensor) -> Tensor:
        """Logits [N, V] of final hidden states, after the last norm."""
        ...

    def logits_of(self, token_ids: Tensor) -> Callable[[Tensor], Tensor]:
        """A function that computes the logits of some tokens only, [N, n]."""
        ...

    def lm_head_weight(self) -> Tensor:
        """The output embedding, [V, H]."""
        ...

    def embedding_weight(self) -> Tensor:
        """The input embedding, [V, H]."""
        ...

    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a text."""
        ...


def end_of_text_ids(generation: Any, text_config: transformers.PretrainedConfig) -> tuple[int, ...]:
    """End-of-text ids of a generation config, else of the model's own.

    Args:
        generation: transformers' GenerationConfig, or None.
        text_config: of the decoder.
    """
    value = getattr(generation, "eos_token_id", None)
    if value is None:
        value = text_config.eos_token_id
    if value is None:
        return ()
    return tuple(value) if isinstance(value, Sequence) else (value,)
