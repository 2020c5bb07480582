"""Hopper and later only; elsewhere layers stay with cuBLAS. Layers of few rows in Triton.

    use_skinny(target.model)

Linear layers and SwiGLUs of a model compute in Triton as many rows as it is faster for. Modules
change their class and nothing else: parameters, hooks and names stay as they are, and equal layers
still share one compiled graph. How many rows are few is a number of each module. In a graph
for any number of rows the library computes always, so that it is one graph.
"""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from peagle.kernels.linear.skinny_linear import max_skinny_rows, skinny_linear, skinny_swiglu
from peagle.models.comparison import relative_difference, tolerance
from peagle.models.drafter import DrafterMLP
from peagle.models.fusion import FusedLinear

_NUM_PROBE_ROWS = 5
_FUSED_MLP = "fused_gate_up_proj"


class SkinnyLinear(nn.Linear):
    """`nn.Linear` for up to `skinny_rows` rows in Triton; made by `use_skinny`."""

    skinny_rows: int

    def forward(self, input: Tensor) -> Tensor:
        if _is_few(input, self.skinny_rows):
            return skinny_linear(input, self.weight, self.bias)
        return F.linear(input, self.weight, self.bias)


class SkinnyFusedLinear(FusedLinear):
    """`FusedLinear` for up to `skinny_rows` rows in Triton."""

    skinny_rows: int

    def forward(self, x: Tensor) -> Tensor:
        if _is_few(x, self.skinny_rows):
            return skinny_linear(x, self.weight, self.bias)
        return F.linear(x, self.weight, self.bias)


class SkinnySwiGLU(nn.Module):
    """Comes before the class of a module that computes down_proj(silu(gate) * up)."""

    skinny_swiglu_rows: int

    def forward(self, x: Tensor) -> Tensor:
        if _is_few(x, self.skinny_swiglu_rows):
            mlp: Any = self
            return mlp.down_proj(skinny_swiglu(x, _gate_up(mlp).weight))
        forward: Any = super().forward
        return forward(x)


@torch.no_grad()
def use_skinny(model: nn.Module, *, max_rows: int | None = None) -> int:
    """Let the linear layers and SwiGLUs of a model compute few rows in Triton, in place.

    Layers stay as they are unless their weight is bfloat16 or float16 on a card of compute
    capability 9.0 or more, and of a size at which `max_skinny_rows` knows Triton to be faster.

    Args:
        model: a transformers model after `models.fusion.fuse`, or a drafter; not to be trained.
        max_rows: limit of rows for all layers, of any type, size and device, for tests.

    Returns:
        how many modules have changed; a second call changes none.
    """
    # Any: pyright knows no modules with numbers, nor that a class can change.
    modules: list[Any] = list(model.modules())
    changed = 0
    for module in modules:
        kind = {nn.Linear: SkinnyLinear, FusedLinear: SkinnyFusedLinear}.get(type(module))
        if kind is not None and (rows := _max_rows(module, max_rows)):
            module.__class__, module.skinny_rows = kind, rows
            changed += 1
    for module in modules:
        if not isinstance(module, SkinnySwiGLU) and _may_be_swiglu(module):
            changed += _replace_swiglu(module, max_rows)
    return changed


def _is_few(x: Tensor, limit: int) -> bool:
    """Return whether x, [..., K], has up to `limit` rows; no where a compiler does not know."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    leading: Any = x.shape[:-1]
    return statically_known_true(leading.numel() <= limit)


def _max_rows(linear: Any, given: int | None, *, swiglu: bool = False) -> int:
    """Return up to how many rows Triton computes; 0: none."""
    weight: Tensor = linear.weight
    if given is not None:
        return given
    if weight.device.type != "cuda":
        return 0
    is_half = weight.dtype in (torch.bfloat16, torch.float16)
    is_able = torch.cuda.get_device_capability(weight.device) >= (9, 0)
    is_plain = weight.stride(1) == 1 and weight.data_ptr() % 16 == 0
    if not (is_half and is_able and is_plain):
        return 0
    n, k = weight.shape
    return max_skinny_rows(n, k, weight.itemsize, swiglu=swiglu)


def _gate_up(mlp: Any) -> Any:
    """Return the layer whose outputs are gate, then up."""
    return mlp.gate_up_proj if isinstance(mlp, DrafterMLP) else getattr(mlp, _FUSED_MLP)


def _may_be_swiglu(module: nn.Module) -> bool:
    if isinstance(module, DrafterMLP):
        return isinstance(module.gate_up_proj, nn.Linear)  # not packed
    children = dict(module.named_children())
    fused, down = children.get(_FUSED_MLP), children.get("down_proj")
    return (
        isinstance(fused, FusedLinear)
        and isinstance(down, nn.Linear)
        and fused.bias is None
        and fused.sizes == [down.in_features] * 2
    )


def _replace_swiglu(mlp: Any, given: int | None) -> bool:
    """Give a SwiGLU the forward of `SkinnySwiGLU`, unless that changes its outputs."""
    original, weight = type(mlp), _gate_up(mlp).weight
    rows = _max_rows(_gate_up(mlp), given, swiglu=True)
    if not rows or not (original is DrafterMLP or _is_swiglu(mlp)):
        return False
    x = _random(min(rows, _NUM_PROBE_ROWS), weight.shape[1], weight)
    before = mlp(x)
    mlp.__class__ = _with_swiglu(original)
    mlp.skinny_swiglu_rows = rows
    if relative_difference(mlp(x), before) <= tolerance(x.dtype):
        return True
    mlp.__class__ = original
    del mlp.skinny_swiglu_rows
    return False


@cache
def _with_swiglu(kind: type[nn.Module]) -> type[nn.Module]:
    """Make one class for all modules of a class, so that they share compiled graphs."""
    return type(f"Skinny{kind.__name__}", (SkinnySwiGLU, kind), {"__module__": kind.__module__})


def _is_swiglu(mlp: Any) -> bool:
    """Return whether a module is down_proj(silu(gate) * up), and nothing else happens in it.

    It runs with outputs of gate and up that are small and large, where other activations, limits
    and factors show.
    """
    fused: Any = _gate_up(mlp)
    down: Any = mlp.down_proj
    x = _random(_NUM_PROBE_ROWS, fused.in_features, fused.weight)
    sizes = torch.tensor([0.1, 1.0, 3.0, 10.0, 30.0]).to(x)[:, None]
    given = _random(_NUM_PROBE_ROWS, sum(fused.sizes), x) * sizes
    calls: list[tuple[Tensor, Tensor]] = []
    hooks = [
        fused.register_forward_hook(lambda *_: given),
        down.register_forward_hook(lambda _, args, out: calls.append((args[0].clone(), out))),
    ]
    try:
        found = mlp(x)
    except Exception:  # whatever it is: it is not called with one tensor
        return False
    finally:
        for hook in hooks:
            hook.remove()
    if len(calls) != 1 or not isinstance(found, Tensor) or not torch.equal(found, calls[0][1]):
        return False
    gate, up = given.chunk(2, dim=-1)
    expected = F.silu(gate) * up
    return all(
        relative_difference(row, other) <= tolerance(x.dtype)
        for row, other in zip(calls[0][0], expected, strict=True)
    )


def _random(rows: int, size: int, like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, size, generator=generator).to(like)
