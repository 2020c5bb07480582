"""The drafter: Llama-style layers that read target features; P-EAGLE and EAGLE-3 share it.

Shapes: ... leading dimensions, D drafter width, H target width, A aux states, V target vocabulary,
DV draft vocabulary, Hq/Hkv heads, d head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.nn.functional as F
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from peagle.errors import CheckpointError
from peagle.models.architectures import SUPPORTED_ROPE_TYPES
from peagle.models.correction import DraftCorrection

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
        rope_parameters: RoPE parameters of transformers ({"rope_type", "rope_theta", ...}).
        trained_depth: K that training covered, None if unknown.
        windows: positions that each layer attends to, itself and those before it: W keeps keys with
            q_pos - k_pos < W, None keeps all. (): all in every layer.
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
    windows: tuple[int | None, ...] = ()

    def __post_init__(self) -> None:
        self._check_types()
        self._check_windows()
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

    def _check_windows(self) -> None:
        if not any(self.windows):
            object.__setattr__(self, "windows", ())
        elif len(self.windows) != self.num_layers or not all(
            window is None or (type(window) is int and window >= 1) for window in self.windows
        ):
            raise CheckpointError(
                f"The windows of the layers are {list(self.windows)}; expected one for each of "
                f"{self.num_layers} layers, a whole number of at least 1 or none."
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
        """Return the configuration from which transformers makes the angles of RoPE."""
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
        """Return whether the head is of P-EAGLE: all K tokens in one pass."""
        return self.mask_token_id is not None

    @property
    def kind(self) -> str:
        """Return the kind of head, P-EAGLE or EAGLE-3."""
        return "P-EAGLE" if self.is_parallel else "EAGLE-3"

    @property
    def feature_size(self) -> int:
        """Return A * H, the width of a feature before fc."""
        return len(self.aux_layer_ids) * self.target_hidden_size

    @property
    def is_pruned(self) -> bool:
        """Return whether the draft vocabulary is smaller than the target's."""
        return self.draft_vocab_size < self.vocab_size


# attend(layer index, query [..., Hq, d], key [..., Hkv, d], value [..., Hkv, d]) -> [..., Hq, d]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
# write(layer index, key [..., Hkv, d], value [..., Hkv, d])
Write = Callable[[int, Tensor, Tensor], None]
Rope = tuple[Tensor, Tensor]  # cos and sin, [..., 1, d]


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, computed in at least float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype in (torch.float32, torch.float64) and self.weight.dtype == x.dtype:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


class DrafterAttention(nn.Module):
    """Self-attention with RoPE; how it attends is the caller's business."""

    def __init__(self, config: DrafterConfig, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.split = (config.num_attention_heads, config.num_kv_heads, config.num_kv_heads)
        # Layer 0 reads the embedding and the hidden state side by side.
        input_size = config.hidden_size * (2 if layer_idx == 0 else 1)
        bias = config.attention_bias
        self.qkv_proj = nn.Linear(input_size, sum(self.split) * config.head_dim, bias=bias)
        self.o_proj = nn.Linear(
            config.num_attention_heads * config.head_dim, config.hidden_size, bias=bias
        )
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def project(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor, Tensor]:
        """Return query [..., Hq, d], key and value [..., Hkv, d]; RoPE is in the first two."""
        qkv = self.qkv_proj(x).unflatten(-1, (sum(self.split), self.head_dim))
        num_rotated = self.split[0] + self.split[1]
        unrotated = qkv[..., :num_rotated, :]
        if self.q_norm is not None and self.k_norm is not None:
            query, key = unrotated.split(self.split[:2], dim=-2)
            unrotated = torch.cat((self.q_norm(query), self.k_norm(key)), dim=-2)
        # Angles may be more precise than the matrix products (mixed-precision training).
        rotated = _rotate(unrotated, *rope).to(qkv.dtype)
        query, key = rotated[..., : self.split[0], :], rotated[..., self.split[0] :, :]
        return query, key, qkv[..., num_rotated:, :]

    def project_keys(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """Return the key and value of `project`, without the product for the query."""
        first, linear = self.split[0] * self.head_dim, self.qkv_proj
        if isinstance(linear, nn.Linear):
            bias = None if linear.bias is None else linear.bias[first:]
            both = F.linear(x, linear.weight[first:], bias)
        else:  # rows of packed weights cannot be cut out
            both = linear(x)[..., first:]
        key, value = both.unflatten(-1, (-1, self.head_dim)).chunk(2, dim=-2)
        if self.k_norm is not None:
            key = self.k_norm(key)
        return _rotate(key, *rope).to(both.dtype), value


class DrafterMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class DrafterLayer(nn.Module):
    """A Llama or Qwen3 block.

    Layer 0 takes concat(norm(embedding), norm(hidden)) and keeps a residual.
    """

    def __init__(self, config: DrafterConfig, layer_idx: int) -> None:
        super().__init__()
        self.norm_before_residual = config.norm_before_residual
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps)
        self.hidden_norm = RMSNorm(size, eps) if layer_idx == 0 else None
        self.self_attn = DrafterAttention(config, layer_idx)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = DrafterMLP(config)

    def before_attention(
        self, hidden: Tensor, embedding: Tensor, rope: Rope
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the residual [..., D], and query, key and value."""
        residual, x = self._inputs(hidden, embedding)
        return residual, *self.self_attn.project(x, rope)

    def keys(self, hidden: Tensor, embedding: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """Return key and value alone."""
        return self.self_attn.project_keys(self._inputs(hidden, embedding)[1], rope)

    def _inputs(self, hidden: Tensor, embedding: Tensor) -> tuple[Tensor, Tensor]:
        """Return the residual and the inputs of the projections."""
        if self.hidden_norm is None:
            return hidden, self.input_layernorm(hidden)
        normed = self.hidden_norm(hidden)
        x = torch.cat((self.input_layernorm(embedding), normed), dim=-1)
        return normed if self.norm_before_residual else hidden, x

    def after_attention(self, residual: Tensor, attended: Tensor, light: bool = False) -> Tensor:
        """Return the layer's output [..., D], from the output of attention, [..., Hq, d].

        With `light` the MLP's inner states are not kept for the backward pass but computed again.
        """
        hidden = residual + self.self_attn.o_proj(attended.flatten(-2))
        if light and torch.is_grad_enabled():
            return hidden + cast(Tensor, checkpoint(self._feed, hidden, use_reentrant=False))
        return hidden + self._feed(hidden)

    def _feed(self, hidden: Tensor) -> Tensor:
        return self.mlp(self.post_attention_layernorm(hidden))

    def forward(self, hidden: Tensor, embedding: Tensor, rope: Rope, attend: Attend) -> Tensor:
        residual, query, key, value = self.before_attention(hidden, embedding, rope)
        return self.after_attention(residual, attend(self.self_attn.layer_idx, query, key, value))


class Drafter(nn.Module):
    """Draft head of P-EAGLE or EAGLE-3. Parameter names follow the checkpoint but for fused
    q/k/v and gate/up, which `models.checkpoint` splits and joins.
    """

    # Draft-vocabulary maps, None when the draft vocabulary is the target's.
    d2t: Tensor | None
    t2d: Tensor | None

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        size, eps = config.hidden_size, config.rms_norm_eps
        self.embed_tokens = nn.Embedding(config.vocab_size, size)
        self.fc = nn.Linear(config.feature_size, size, bias=False)
        self.input_norm = RMSNorm(config.feature_size, eps) if config.norm_before_fc else None
        num_aux = len(config.aux_layer_ids)
        self.fc_norm = (
            nn.ModuleList(RMSNorm(config.target_hidden_size, eps) for _ in range(num_aux))
            if config.fc_norm
            else None
        )
        self.mask_hidden = (
            nn.Parameter(torch.zeros(1, 1, config.feature_size)) if config.is_parallel else None
        )
        self.layers = nn.ModuleList(DrafterLayer(config, i) for i in range(config.num_layers))
        self.norm = RMSNorm(size, eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        pruned = config.is_pruned
        identity = torch.zeros(config.draft_vocab_size, dtype=torch.int64)
        kept = torch.arange(config.vocab_size) < config.draft_vocab_size
        self.register_buffer("d2t", identity if pruned else None)
        self.register_buffer("t2d", kept if pruned else None)
        # Of each layer, how far back a position looks when it drafts, itself included; None: to the
        # beginning.
        self.windows: tuple[int | None, ...] = config.windows or (None,) * config.num_layers
        # Of a longer prompt drafts need the last so many positions alone; None: all.
        self.reach: int | None = None
        if all(self.windows):
            # A layer looks from what the one before it made of positions that looked back too.
            self.reach = 1 + sum(window - 1 for window in self.windows if window is not None)
        # Not part of the state either: it has a file of its own (`checkpoint.correction`).
        self.correction: DraftCorrection | None = None
        # Outside the module tree: a table of constants, not part of the checkpoint.
        self._rope: tuple[Tensor, Tensor] | None = None
        self._num_positions = config.max_position_embeddings

    def combine_features(self, features: Tensor) -> Tensor:
        """fc(norm(features)): [..., A * H] to [..., D]."""
        if self.input_norm is not None:
            features = self.input_norm(features)
        elif self.fc_norm is not None:
            chunks = features.chunk(len(self.fc_norm), dim=-1)
            features = torch.cat([n(c) for n, c in zip(self.fc_norm, chunks, strict=True)], dim=-1)
        return self.fc(features)

    def shared_hidden(self) -> Tensor:
        """h_shared = fc(norm(mask_hidden)), [D]: the hidden state of every mask slot."""
        assert self.mask_hidden is not None, "an autoregressive head has no shared hidden state"
        return self.combine_features(self.mask_hidden).flatten()

    def forward(self, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Run one drafter pass.

        Args:
            tokens: int64 [...], the token after each position, or the mask token.
            hidden: [..., D], combined feature, h_shared, or the head's own previous output.
            positions: int64, broadcastable to [...].
            attend: attention of the caller.

        Returns:
            [..., D] before the final norm (after it with `norm_output`): the next feature of
            autoregressive drafting.
        """
        embedding = self.embed_tokens(tokens)
        rope = self._rope_at(positions, hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden, embedding, rope, attend)
        return self.norm(hidden) if self.config.norm_output else hidden

    def read(
        self, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: Attend, write: Write
    ) -> Tensor:
        """Compute the keys and values of one pass, and nothing of its last layer beside them.

        Args:
            tokens, hidden, positions, attend: as in `forward`.
            write: takes the keys and values of the last layer, which does not attend.

        Returns:
            [..., D], the hidden states that enter the last layer.
        """
        embedding = self.embed_tokens(tokens)
        rope = self._rope_at(positions, hidden.dtype)
        for layer in self.layers[:-1]:
            hidden = layer(hidden, embedding, rope, attend)
        last: Any = self.layers[-1]
        write(last.self_attn.layer_idx, *last.keys(hidden, embedding, rope))
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Compute lm_head(norm(hidden)) of `forward`'s states: [..., D] to [..., DV]."""
        return self.lm_head(self.normed(hidden))

    def normed(self, hidden: Tensor) -> Tensor:
        """Return norm(hidden) of `forward`'s states, [..., D]: the input of lm_head."""
        return hidden if self.config.norm_output else self.norm(hidden)

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Return the target ids of draft ids: id + d2t[id]."""
        return draft_ids if self.d2t is None else draft_ids + self.d2t[draft_ids]

    def target_ids(self) -> Tensor:
        """Return the target id of every draft id, [DV]."""
        return self.to_target_ids(
            torch.arange(self.config.draft_vocab_size, device=self.fc.weight.device)
        )

    def set_draft_vocabulary(self, target_ids: Tensor) -> None:
        """Make draft id i stand for the target id `target_ids[i]` (ascending, distinct)."""
        assert self.d2t is not None and self.t2d is not None
        self.d2t.copy_(target_ids - torch.arange(len(target_ids), device=target_ids.device))
        self.t2d.zero_()[target_ids] = True

    def reserve_positions(self, count: int) -> None:
        """Make angles for `count` positions where the head's own maximum is smaller.

        Many heads name the length they were trained for, and serve targets with longer contexts.
        """
        if count > self._num_positions:
            self._num_positions, self._rope = count, None

    def _rope_at(self, positions: Tensor, dtype: torch.dtype) -> Rope:
        """Return cos and sin at the positions, [..., 1, d], broadcasting over heads."""
        if (
            self._rope is None
            or self._rope[0].dtype != dtype
            or self._rope[0].device != positions.device
        ):
            self._rope = self._make_rope(dtype, positions.device)
        cos, sin = self._rope
        # Slots beyond the last position write nothing and are never sampled; any angle serves.
        index = positions.clamp_max(cos.shape[0] - 1)
        return cos[index].unsqueeze(-2), sin[index].unsqueeze(-2)

    def _make_rope(self, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        rotary = LlamaRotaryEmbedding(self.config.rotary_config()).to(device)
        positions = torch.arange(self._num_positions, device=device).unsqueeze(0)
        cos, sin = rotary(torch.empty(0, dtype=dtype, device=device), positions)
        return cos.squeeze(0), sin.squeeze(0)


def spread_logits(logits_RV: Tensor, target_ids_D: Tensor, vocab_size: int) -> Tensor:
    """Return logits of a draft vocabulary, [R, DV], in the target's: minus infinity elsewhere.

    Args:
        target_ids_D: the target id of every draft id, [DV].
        vocab_size: V, of the target.
    """
    full_RV = logits_RV.new_full((len(logits_RV), vocab_size), -torch.inf)
    return full_RV.index_copy_(1, target_ids_D, logits_RV)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
