"""MLPs whose SwiGLU and the rounding of its result to FP8 are one kernel.

    use_gated_mlps(target.model)

After `models.fusion.fuse`, an MLP of transformers computes down(silu(gate) * up) of one product.
Where down multiplies FP8 activations, its kernel that rounds them reads gate and up itself.
"""

from typing import Any

import torch
from torch import Tensor, nn

from peagle.kernels.linear.fp8_linear import MIN_ROWS
from peagle.models.comparison import relative_difference
from peagle.models.fusion import FusedPackedLinear
from peagle.models.module_class import class_with
from peagle.models.packed_layers import PackedLinear

_TOLERANCE = 0.03  # numbers of FP8 at a border go to one or the other
_SPREAD = 1.5  # of gates, where SiLU and GELU differ by far more


class GatedMLP(nn.Module):
    """Comes before the class of an MLP with `fused_gate_up_proj` and `down_proj`."""

    def forward(self, x: Tensor) -> Tensor:
        mlp: Any = self
        return mlp.down_proj(mlp.fused_gate_up_proj(x), "swiglu")


@torch.no_grad()
def use_gated_mlps(model: nn.Module) -> int:
    """Let one kernel compute the activations of MLPs and round them, in place.

    An MLP is left as it is unless both ways are found to give the same for random inputs.

    Returns:
        how many MLPs have changed; a second call changes none.
    """
    changed = 0
    for module in model.modules():
        if _may_be_gated(module) and _is_same(module):
            module.__class__ = class_with(GatedMLP, type(module))
            changed += 1
    return changed


def _may_be_gated(module: Any) -> bool:
    gate_up, down = (getattr(module, name, None) for name in ("fused_gate_up_proj", "down_proj"))
    return (
        isinstance(gate_up, FusedPackedLinear)
        and isinstance(down, PackedLinear)
        and down.numbers is not None
        and gate_up.sizes == [down.in_features] * 2
        and not isinstance(module, GatedMLP)
    )


def _is_same(mlp: Any) -> bool:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(MIN_ROWS, mlp.fused_gate_up_proj.in_features, generator=generator)
    numbers: Tensor = mlp.down_proj.numbers
    x = x.to(numbers.device, torch.bfloat16 if numbers.is_cuda else torch.float32)
    x *= _SPREAD / mlp.fused_gate_up_proj(x).std()
    try:
        expected = mlp(x)
    except (RuntimeError, TypeError, AttributeError):
        return False
    return relative_difference(GatedMLP.forward(mlp, x), expected) < _TOLERANCE
