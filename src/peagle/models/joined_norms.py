"""RMSNorms that a projection computes of its input, in the kernel that rounds it to FP8.

    join_norms(target.model)

After `models.fusion.fuse`, a norm of a decoder layer may be read by one product alone, q/k/v or
gate/up. Where that multiplies FP8 activations, one kernel norms and rounds its input.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from peagle.kernels.linear.fp8_linear import Norm
from peagle.models.comparison import relative_difference, tolerance
from peagle.models.fusion import FusedPackedLinear, RecordedCall, record_calls
from peagle.models.target_attention import decoder_layers

# A norm of a layer, the only module that may read it, and the product there that reads it.
_PARTS = (
    ("input_layernorm", "self_attn", "fused_qkv_proj"),
    ("post_attention_layernorm", "mlp", "fused_gate_up_proj"),
)


@torch.no_grad()
def join_norms(model: transformers.PreTrainedModel) -> int:
    """Let products norm their inputs, in place.

    A norm stays where it is unless, in a pass over a few random tokens, one module alone reads it,
    and computes the same without it.

    Returns:
        how many norms have moved; a second call moves none.
    """
    if not any(map(_may_norm, model.modules())):
        return 0
    layers = decoder_layers(model)
    recordings, moved = record_calls(model, layers), 0
    for layer in layers:
        for name, reader, product_name in _PARTS:
            norm: Any = getattr(layer, name, None)
            module: Any = getattr(layer, reader, None)
            product: Any = getattr(module, product_name, None)
            if not _may_norm(product) or not _is_plain_norm(norm, product):
                continue
            calls = recordings[id(layer)]
            before = [_reading(layer, norm, call) for call in calls]
            if not calls or any(list(outputs) != [module] for outputs in before):
                continue
            product.take_norm(norm)
            setattr(layer, name, without := nn.Identity())
            after = [_reading(layer, without, call) for call in calls]
            if all(map(partial(_is_same, module), after, before)):
                moved += 1
            else:
                setattr(layer, name, norm)
                product.take_norm(None)
    return moved


def _may_norm(product: Any) -> bool:
    is_fit = isinstance(product, FusedPackedLinear) and product.linear.numbers is not None
    return is_fit and product.norm is None


def _reading(layer: nn.Module, norm: nn.Module, call: RecordedCall) -> dict[nn.Module, Tensor]:
    """Run a layer again; return the modules of it that read the output of a norm, and theirs."""
    normed: list[Any] = []
    outputs: dict[nn.Module, Tensor] = {}

    def note(module: nn.Module, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        if module is norm:
            normed.append(out)
        elif any(x is y for x in (*args, *kwargs.values()) for y in normed):
            outputs[module] = out[0] if isinstance(out, tuple) else out

    hooks = [m.register_forward_hook(note, with_kwargs=True) for m in layer.children()]
    try:
        layer(*call.args, **call.kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    return outputs


def _is_plain_norm(norm: Any, product: FusedPackedLinear) -> bool:
    """Return whether a norm computes what `fp8_linear.Norm` says, apart from rounding."""
    weight = getattr(norm, "weight", None)
    if weight is None or not hasattr(norm, "variance_epsilon"):
        return False
    x = torch.randn(4, product.in_features, generator=torch.Generator().manual_seed(0))
    x = x.to(weight.device, weight.dtype)
    expected = Norm(weight.float(), norm.variance_epsilon)(x.float())
    return relative_difference(norm(x), expected) < max(1e-5, 2 * torch.finfo(x.dtype).eps)


def _is_same(
    module: nn.Module, after: dict[nn.Module, Tensor], before: dict[nn.Module, Tensor]
) -> bool:
    out, expected = after[module], before[module]
    return relative_difference(out, expected) < tolerance(out.dtype)
