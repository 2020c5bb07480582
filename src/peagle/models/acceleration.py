"""A target and a drafter made fast for a card: fused projections, products of few rows that stream
their weights, compiled layers and edges.

    accelerate_target(target, num_rows=[1, 8, 16])
    accelerate_drafter(drafter, num_rows=[14, 28])

Decode steps of few rows come in few sizes; for these everything is compiled with fixed shapes. All
else shares one graph with a size to be filled in.
"""

from collections.abc import Callable, Collection
from typing import Any

import torch

from peagle.models.compilation import CompiledLayers, cache_compiled_code, compile_layers
from peagle.models.drafter import Drafter
from peagle.models.fusion import fuse
from peagle.models.gated_mlps import use_gated_mlps
from peagle.models.joined_norms import join_norms
from peagle.models.packed_layers import use_experts
from peagle.models.rotated_attention import use_rotation
from peagle.models.routers import use_routers
from peagle.models.skinny import use_skinny
from peagle.models.target import TargetModel

MAX_FIXED_ROWS = 128


class CompiledCall:
    """Stands in for a function of [..., rows, width]: compiled for few rows, and for any number.

    Args:
        call: the function, which traces whole; its first argument has the rows.
        num_rows: numbers of rows that have a graph of their own. May grow.
        backend: of `torch.compile`.
    """

    def __init__(self, call: Callable[..., Any], num_rows: set[int], backend: str) -> None:
        self._num_rows = num_rows
        self._fixed, self._any = (
            torch.compile(call, fullgraph=True, dynamic=dynamic, backend=backend)
            for dynamic in (False, True)
        )

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        is_fixed = x.shape[:-1].numel() in self._num_rows
        return (self._fixed if is_fixed else self._any)(x, *args, **kwargs)


def accelerate_target(
    target: TargetModel,
    num_rows: Collection[int],
    *,
    backend: str = "inductor",
    max_skinny_rows: int | None = None,
) -> CompiledLayers:
    """Fuse and compile in place; a second call adds sizes.

    Args:
        target: the target; results stay as they are, within rounding.
        num_rows: tokens of the passes that are compiled for their size.
        backend: of `torch.compile`; other than "inductor" only in tests.
        max_skinny_rows: `max_rows` of `models.skinny.use_skinny`, only in tests.
    """
    if target.compiled is None:
        if backend == "inductor":
            cache_compiled_code()
            use_experts(target.model)
            use_routers(target.model)
        fuse(target.model)
        use_gated_mlps(target.model)
        join_norms(target.model)
        if backend == "inductor":
            use_rotation(target.model)
        _use_skinny(target.model, backend, max_skinny_rows)
        target.compiled = _compile(target.model, num_rows, backend)
        decoder: Any = target.model.get_decoder()
        for name in ("norm", "rotary_emb"):
            module = getattr(decoder, name, None)
            if module is not None:
                module.forward = CompiledCall(module.forward, set(), backend)
    assert target.compiled.buckets is not None
    target.compiled.buckets.update(_few(num_rows))
    return target.compiled


def accelerate_drafter(
    drafter: Drafter,
    num_rows: Collection[int],
    *,
    num_feature_rows: Collection[int] = (),
    num_logit_rows: Collection[int] = (),
    backend: str = "inductor",
    max_skinny_rows: int | None = None,
) -> CompiledLayers:
    """Compile in place; q/k/v and gate/up of a drafter are fused from the beginning.

    Args:
        drafter: a head that is not being trained.
        num_rows: slots of the passes that are compiled for their size.
        num_feature_rows: rows whose features are combined; num_logit_rows: rows that draft.
        backend: of `torch.compile`; other than "inductor" only in tests.
        max_skinny_rows: `max_rows` of `models.skinny.use_skinny`, only in tests.
    """
    _use_skinny(drafter, backend, max_skinny_rows)
    for name, rows in (("combine_features", num_feature_rows), ("compute_logits", num_logit_rows)):
        setattr(drafter, name, CompiledCall(getattr(drafter, name), _few(rows), backend))
    last: Any = drafter.layers[-1]
    last.keys = CompiledCall(last.keys, set(), backend)
    return _compile(drafter, num_rows, backend)


def _use_skinny(model: Any, backend: str, max_rows: int | None) -> None:
    if backend == "inductor" or max_rows is not None:
        use_skinny(model, max_rows=max_rows)


def _compile(model: Any, num_rows: Collection[int], backend: str) -> CompiledLayers:
    return compile_layers(model, buckets=_few(num_rows), backend=backend)


def _few(num_rows: Collection[int]) -> set[int]:
    """Return the sizes whose own graph pays: the library computes products of more rows."""
    return {rows for rows in num_rows if rows <= MAX_FIXED_ROWS}
