"""Attention modules whose norms of heads and rotation by position are one kernel.

    use_rotation(target.model)

After `models.fusion.fuse`, queries, keys and values of an attention module of transformers are one
product. A compiler makes two or more kernels of what follows, one of ours reads the product once.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

from peagle.kernels.attention.rotation import rotate_heads
from peagle.models.comparison import relative_difference, tolerance
from peagle.models.fusion import FusedProjections, record_calls
from peagle.models.module_class import class_with
from peagle.models.target_attention import AttentionCall, attention

_NORMS = ("q_norm", "k_norm")


class RotatedAttention(nn.Module):
    """Comes before the class of an attention module with `fused_qkv_proj` and `o_proj`."""

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **keywords: Any,
    ) -> tuple[Tensor, None]:
        """Attend to one row of packed tokens, [1, T, H]; no cache of transformers is filled."""
        module: Any = self
        size, qkv = module.head_dim, module.fused_qkv_proj(hidden_states).squeeze(0)
        widths = module.fused_qkv_proj.sizes
        heads, key_heads = widths[0] // size, widths[1] // size
        norms, eps = None, 0.0
        if getattr(module, "q_norm", None) is not None:
            norms = module.q_norm.weight, module.k_norm.weight
            eps = module.q_norm.variance_epsilon
        cos, sin = (x.squeeze(0) for x in position_embeddings)
        queries, keys = rotate_heads(qkv, cos, sin, (heads, key_heads), norms, eps)
        values = qkv[:, -widths[2] :].unflatten(1, (key_heads, size))
        query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in (queries, keys, values))
        out, _ = attention(
            module,
            query,
            key,
            value,
            attention_mask,
            scaling=module.scaling,
            sliding_window=getattr(module, "sliding_window", None),
            **keywords,
        )
        return module.o_proj(out.flatten(2)), None


@torch.no_grad()
def use_rotation(model: transformers.PreTrainedModel) -> int:
    """Let one kernel norm and rotate the heads of attention modules, in place.

    A module is left as it is unless both ways are found to give attention the same, in a pass over
    a few random tokens.

    Returns:
        how many modules have changed; a second call changes none.
    """
    modules = [module for module in model.modules() if _may_rotate(module)]
    recordings = record_calls(model, modules) if modules else {}
    changed = 0
    for module in modules:
        calls = recordings[id(module)]
        if calls and all(_is_same(module, call.args, call.kwargs) for call in calls):
            module.__class__ = class_with(RotatedAttention, type(module))
            changed += 1
    return changed


def _may_rotate(module: Any) -> bool:
    qkv, size = getattr(module, "fused_qkv_proj", None), getattr(module, "head_dim", None)
    if not (
        isinstance(qkv, FusedProjections) and isinstance(size, int) and hasattr(module, "o_proj")
    ):
        return False
    norms: list[Any] = [getattr(module, name, None) for name in _NORMS]
    has_norms = all(
        hasattr(norm, "variance_epsilon") and norm.weight.shape == (size,) for norm in norms
    )
    return (
        size & (size - 1) == 0
        and (has_norms or norms == [None, None])
        and len(qkv.sizes) == 3
        and not any(width % size for width in qkv.sizes)
        and hasattr(module, "scaling")
        and not isinstance(module, RotatedAttention)
    )


def _is_same(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether attention is called alike, and its results are used alike."""
    outputs: list[Tensor] = []
    calls: list[AttentionCall] = []
    try:
        for forward in (type(module).forward, RotatedAttention.forward):
            outputs.append(forward(module, *args, **kwargs, calls=calls)[0])
    except (RuntimeError, TypeError, AttributeError, ValueError):
        return False
    if len(calls) != 2 or outputs[0].dtype == torch.float64:  # the kernel computes in float32
        return False
    (before, after), bound = calls, tolerance(outputs[0].dtype)
    options = [(call.scaling, call.sliding_window, call.softcap) for call in calls]
    pairs = (
        (outputs[1], outputs[0]),
        *((getattr(after, name), getattr(before, name)) for name in ("query", "key", "value")),
    )
    return options[0] == options[1] and all(
        x.shape == y.shape and relative_difference(x, y) < bound for x, y in pairs
    )
