"""The experts that a mixture sends its tokens to, recorded while it runs.

    with record_routing(target) as chosen:
        target.forward(tokens_T, positions_T, attend)
    chosen  # a tensor [T, C] of each layer with experts, in the order in which they ran

Shapes: T packed tokens, C experts chosen for each.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor

from peagle.models.packed_layers import experts_of
from peagle.models.target import TargetModel


def num_experts_of(target: TargetModel) -> int:
    """Return the number of experts in a layer; 0 for a dense model."""
    return max((module.num_experts for module in experts_of(target.model)), default=0)


@contextmanager
def record_routing(target: TargetModel) -> Iterator[list[Tensor]]:
    """Record the experts of every token, integers [T, C], once for each layer of each pass.

    The layers run uncompiled meanwhile. A CUDA graph that was captured before records nothing.
    Nothing is copied to the host, and nothing stays in the model afterwards.
    """
    chosen: list[Tensor] = []

    def record(module: Any, args: tuple[Any, ...]) -> None:
        _, index_TC, _ = args
        chosen.append(index_TC)

    hooks = [module.register_forward_pre_hook(record) for module in experts_of(target.model)]
    try:
        with nullcontext() if target.compiled is None else target.compiled.suspended():
            yield chosen
    finally:
        for hook in hooks:
            hook.remove()
