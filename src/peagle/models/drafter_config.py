"""Shape and conventions of a draft head, checked when they are read or made."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import transformers
from huggingface_hub.errors import StrictDataclassError

from peagle.errors import CheckpointError
from peagle.models.architectures import SUPPORTED_ROPE_TYPES

_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_attention_heads",
    "num_kv_heads",
    "head_dim",
    "vocab_size",
    "draft_vocab_size",
    "target_hidden_size",
    "max_position_embeddings",
)
_FLAGS = (
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "attention_bias",
    "qk_norm",
    "norm_output",
)


def _is_number(value: object, *also: type) -> bool:
    return type(value) in (int, float, *also) and math.isfinite(value)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """Shape and conventions of a draft head (reference/peagle.md, "Drafter architecture").

    Attributes:
        hidden_size: D; intermediate_size: width of the MLP; num_layers: decoder layers.
        num_attention_heads, num_kv_heads, head_dim: attention geometry.
        vocab_size: V of the target; draft_vocab_size: DV, at most V.
        target_hidden_size: H; aux_layer_ids: target layers whose entering states are the feature.
        norm_before_residual: the residual of layer 0 is the normed hidden state.
        norm_before_fc: one RMSNorm over the concatenated features; fc_norm: one per aux state.
        qk_norm: RMSNorm of every query and key head before RoPE (Qwen3-style layers).
        norm_output: an autoregressive head reads its own previous output after the final norm.
        mask_token_id: token of the mask slots; None for an autoregressive (EAGLE-3) head.
        rope_parameters: as transformers has them ({"rope_type", "rope_theta", ...}).
        trained_depth: K that training covered, None if unknown.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    aux_layer_ids: tuple[int, ...]
    mask_token_id: int | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    attention_bias: bool = False
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 2048
    rope_parameters: dict[str, Any] = field(
        default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0}
    )
    trained_depth: int | None = None
    qk_norm: bool = False
    norm_output: bool = False

    def __post_init__(self) -> None:
        self._check_types()
        mask = self.mask_token_id
        if mask is not None and not (type(mask) is int and 0 <= mask < self.vocab_size):
            raise CheckpointError(
                f"The mask token id is {mask!r}; expected an id of the vocabulary, 0 to "
                f"{self.vocab_size - 1}."
            )
        if not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise CheckpointError(
                f"draft_vocab_size is {self.draft_vocab_size}; expected 1 to vocab_size "
                f"({self.vocab_size})."
            )
        if self.num_attention_heads % self.num_kv_heads:
            raise CheckpointError(
                f"num_attention_heads is {self.num_attention_heads}; expected a multiple of "
                f"num_key_value_heads ({self.num_kv_heads})."
            )
        if self.head_dim % 2:
            raise CheckpointError(
                f"head_dim is {self.head_dim}; expected an even number (RoPE turns pairs)."
            )
        if self.norm_before_fc and self.fc_norm:
            raise CheckpointError("norm_before_fc and fc_norm are both set; expected one at most.")
        self._check_rope()

    def _check_types(self) -> None:
        for name in _SIZES:
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise CheckpointError(
                    f"{name} is {value!r}; expected a whole number of at least 1."
                )
        ids = self.aux_layer_ids
        whole = all(type(i) is int and i >= 0 for i in ids)
        if not ids or not whole or list(ids) != sorted(set(ids)):
            raise CheckpointError(
                f"aux_layer_ids is {ids}; expected distinct ascending layers of the target."
            )
        for name in _FLAGS:
            if type(getattr(self, name)) is not bool:
                raise CheckpointError(f"{name} is {getattr(self, name)!r}; expected true or false.")
        depth = self.trained_depth
        if depth is not None and (type(depth) is not int or depth < 1):
            raise CheckpointError(
                f"trained_depth is {depth!r}; expected a whole number of at least 1, or none."
            )
        if not _is_number(self.rms_norm_eps) or self.rms_norm_eps <= 0:
            raise CheckpointError(
                f"rms_norm_eps is {self.rms_norm_eps!r}; expected a number above 0."
            )

    def _check_rope(self) -> None:
        rope = self.rope_parameters
        rope_type = rope.get("rope_type", "default")
        if rope_type not in SUPPORTED_ROPE_TYPES:
            raise CheckpointError(
                f"The head's RoPE type is {rope_type!r}; "
                f"supported: {', '.join(SUPPORTED_ROPE_TYPES)}."
            )
        if rope.get("partial_rotary_factor", 1) != 1:
            raise CheckpointError(
                f"rope_parameters.partial_rotary_factor is {rope['partial_rotary_factor']!r}; "
                "expected 1, because the drafter turns whole heads."
            )
        for name, value in rope.items():
            if name != "rope_type" and value is not None and not _is_number(value, bool):
                raise CheckpointError(f"rope_parameters.{name} is {value!r}; expected a number.")
        try:
            self.rotary_config()
        except (KeyError, TypeError, ValueError, StrictDataclassError) as error:
            raise CheckpointError(f"rope_parameters is {rope}: {error}.") from None

    def rotary_config(self) -> transformers.LlamaConfig:
        """What transformers makes the angles of RoPE from."""
        return transformers.LlamaConfig(
            hidden_size=self.num_attention_heads * self.head_dim,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=self.max_position_embeddings,
            rope_parameters=dict(self.rope_parameters),
        )

    @property
    def is_parallel(self) -> bool:
        """True for P-EAGLE: all K tokens in one pass."""
        return self.mask_token_id is not None

    @property
    def feature_size(self) -> int:
        """A * H, the width of a feature before fc."""
        return len(self.aux_layer_ids) * self.target_hidden_size

    @property
    def is_pruned(self) -> bool:
        """True when the draft vocabulary is smaller than the target's."""
        return self.draft_vocab_size < self.vocab_size
