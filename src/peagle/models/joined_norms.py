"""RMSNorms that a projection computes of its input, in the kernel that rounds it to FP8.

    join_norms(target.model)

After `models.fusion.fuse`, a norm of a decoder layer may be read by one product alone, q/k/v or
gate/up. Where that multiplies FP8 activations, one kernel norms and rounds its input.
"""

from typing import Any

import torch
import transformers
from torch import Tensor, nn

from peagle.models.comparison import relative_difference, tolerance
from peagle.models.fusion import FusedPackedLinear, record_calls
from peagle.models.target_attention import decoder_layers

# A norm of a layer, and the product that may be the only one to read it.
_PAIRS = {
    "input_layernorm": "self_attn.fused_qkv_proj",
    "post_attention_layernorm": "mlp.fused_gate_up_proj",
}


@torch.no_grad()
def join_norms(model: transformers.PreTrainedModel) -> int:
    """Let products norm their inputs, in place.

    A norm stays where it is unless its layer is found to compute the same without it, in a pass
    over a few random tokens.

    Returns:
        how many norms have moved; a second call moves none.
    """
    layers = decoder_layers(model)
    recordings, moved = record_calls(model, layers), 0
    for layer in layers:
        for name, path in _PAIRS.items():
            norm, product = getattr(layer, name, None), _find(layer, path)
            if product is None or product.norm is not None or not _is_plain_norm(norm, product):
                continue
            product.take_norm(norm)
            setattr(layer, name, nn.Identity())
            if all(_is_same(layer, call) for call in recordings[id(layer)]):
                moved += 1
            else:
                setattr(layer, name, norm)
                product.take_norm(None)
    return moved


def _find(layer: nn.Module, path: str) -> FusedPackedLinear | None:
    found: Any = layer
    for name in path.split("."):
        found = getattr(found, name, None)
    is_fit = isinstance(found, FusedPackedLinear) and found.linear.numbers is not None
    return found if is_fit else None


def _is_plain_norm(norm: Any, product: FusedPackedLinear) -> bool:
    """Return whether a norm computes what `fp8_linear.Norm` says, apart from rounding."""
    weight = getattr(norm, "weight", None)
    if weight is None or not hasattr(norm, "variance_epsilon"):
        return False
    x = torch.randn(4, product.in_features, generator=torch.Generator().manual_seed(0))
    x = x.to(weight.device, weight.dtype)
    mean = x.float().square().mean(-1, keepdim=True)
    expected = weight.float() * (x.float() * torch.rsqrt(mean + norm.variance_epsilon))
    return relative_difference(norm(x), expected) < max(1e-5, 2 * torch.finfo(x.dtype).eps)


def _is_same(layer: nn.Module, call: Any) -> bool:
    out = layer(*call.args, **call.kwargs)
    out = out if isinstance(out, Tensor) else out[0]
    return relative_difference(out, call.output) < tolerance(out.dtype)
