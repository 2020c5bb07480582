"""Routers of mixtures of experts that choose in one kernel.

    use_routers(target.model)

torch takes four kernels or more for a softmax, the largest of it and their sum, which in a step of
one token cost as much as the products of an expert.
"""

from typing import Any

import torch
from torch import Tensor, nn

from peagle.kernels.linear.router import MAX_EXPERTS, route, route_reference
from peagle.models.comparison import relative_difference
from peagle.models.module_class import class_with

_NUM_PROBE_ROWS = 64
_TOLERANCE = 1e-6


class OneKernelRouter(nn.Module):
    """Comes before the class of a router that returns logits, weights and experts of tokens."""

    among_chosen: bool

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        router: Any = self
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        bias = router._parameters.get("bias")
        return route(rows, router.weight, bias, router.top_k, among_chosen=router.among_chosen)


@torch.no_grad()
def use_routers(model: nn.Module) -> int:
    """Let the routers of a model choose in one kernel, in place.

    A router is left as it is unless it is found, by running it in float64, to compute what
    `kernels.linear.router` does.

    Returns:
        how many routers have changed; a second call changes none.
    """
    modules: list[Any] = [m for m in model.modules() if _may_be_router(m)]
    found: dict[Any, bool | None] = {}  # layers have equal routers, but for their weights
    changed = 0
    for module in modules:
        settings = {k: v for k, v in vars(module).items() if isinstance(v, int | float | str)}
        shapes = {name: None if p is None else p.shape for name, p in module._parameters.items()}
        kind = (type(module), *shapes.items(), *settings.items())
        if kind not in found:
            found[kind] = is_among_chosen(module)
        if (among_chosen := found[kind]) is not None:
            module.__class__ = class_with(OneKernelRouter, type(module))
            module.among_chosen = among_chosen
            changed += 1
    return changed


def _may_be_router(module: Any) -> bool:
    weight = module._parameters.get("weight")
    return (
        isinstance(getattr(module, "top_k", None), int)
        and not isinstance(module, OneKernelRouter)
        and weight is not None
        and weight.ndim == 2
        and weight.shape[0] <= MAX_EXPERTS
        and not set(module._parameters) - {"weight", "bias"}
        and not module._buffers
        and not any(True for _ in module.children())
    )


def is_among_chosen(router: Any) -> bool | None:
    """Return `route`'s `among_chosen` for a router; None: it computes something else."""
    weight: Tensor = router.weight
    generator = torch.Generator().manual_seed(0)
    # Numbers of its own: those of the model may be all alike.
    sizes = {name: p.shape for name, p in router._parameters.items() if p is not None}
    given = {
        name: torch.randn(size, generator=generator, dtype=torch.float64)
        for name, size in sizes.items()
    }
    x = torch.randn(_NUM_PROBE_ROWS, weight.shape[1], generator=generator, dtype=torch.float64)
    x /= weight.shape[1] ** 0.5
    try:
        outputs = torch.func.functional_call(router, given, (x,))
    except (RuntimeError, TypeError, AttributeError):
        return None
    if not (isinstance(outputs, tuple) and len(outputs) == 3):
        return None
    for among_chosen in (True, False):
        expected = route_reference(
            x, given["weight"], given.get("bias"), router.top_k, among_chosen=among_chosen
        )
        if all(
            isinstance(out, Tensor)
            and out.shape == other.shape
            and relative_difference(out, other) < _TOLERANCE
            for out, other in zip(outputs, expected, strict=True)
        ):
            return among_chosen
    return None
