"""Decoder layers under torch.compile, one graph each, with attention as an opaque operator.

The operator `peagle::paged_attention` knows its layer by a handle, a number in a CPU tensor. The
KV cache and the prepared pass are looked up by it when the operator runs, so the compiler sees
neither: an operator that names what it writes to made Inductor copy the whole cache. The handle is
an input of the graph, not a constant in it, so that equal layers share one compiled graph.

    compiled = compile_layers(target.model, mode="auto", buckets=(1, 2, 4, 8, 16))
"""

from __future__ import annotations

import itertools
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, Literal, cast

import torch
import transformers
from torch import Tensor, nn

from peagle.models.compile_modes import (
    Mode,
    ModeStore,
    choose_mode,
    keep_compiled_code,
    time_call,
)
from peagle.models.drafter import Drafter
from peagle.models.target_attention import decoder_layers

# Compiled graphs hang on the code of a layer's class: every token count of every kind of layer of
# every model in the process counts. The default of 8 is for mistakes; here each one is wanted.
_RECOMPILE_LIMIT = 1024

Others = Literal["eager", "dynamic"]

_numbers = itertools.count()
_attentions: weakref.WeakValueDictionary[int, LayerAttention] = weakref.WeakValueDictionary()


class LayerAttention(ABC):
    """Attention of one layer as its compiled graph calls it; what runs it is set for each pass.

    Attributes:
        handle: int64 [], on the CPU: what the operator finds this object by.
        current: the caller's attention of this pass, None between passes.
    """

    def __init__(self, layer: nn.Module) -> None:
        number = next(_numbers)
        self.handle = torch.tensor(number)
        self.current: Any = None
        self.layer = layer
        _attentions[number] = self

    @abstractmethod
    def swap(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], Any, int]:
        """Arguments of the layer with this object as its attention; the attention that was there
        (None: the call is not to be compiled), and the number of tokens.
        """

    @abstractmethod
    def run(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """Attend as `current` does."""


class TargetLayerAttention(LayerAttention):
    """A `Prepared` for a layer of a transformers model."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__(layer)
        self._attends: Any = None

    def __call__(
        self,
        query_THd: Tensor,
        key_THd: Tensor,
        value_THd: Tensor,
        cache: Any,
        *,
        scaling: float,
        sliding_window: int | None = None,
        sinks: Tensor | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        # `cache` is left alone: reading it would make the graph this one layer's.
        return torch.ops.peagle.paged_attention(
            query_THd, key_THd, value_THd, self.handle, scaling, sliding_window, sinks, softcap
        )

    def swap(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], Any, int]:
        hidden = args[0] if args else kwargs["hidden_states"]
        is_dry = kwargs.get("calls") is not None
        attend = None if is_dry else kwargs.get("attend")
        return args, {**kwargs, "attend": self}, attend, hidden.shape[:-1].numel()

    def run(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        return self.current(query, key, value, cache=self._cache(), **options)

    def _cache(self) -> Any:
        """The KV cache hangs on whichever module of the layer attends."""
        if self._attends is None:
            with_cache = (m for m in self.layer.modules() if hasattr(m, "peagle_cache"))
            self._attends = next(with_cache, None)
        return None if self._attends is None else self._attends.peagle_cache


class DrafterLayerAttention(LayerAttention):
    """An `Attend` for a layer of a `Drafter`."""

    def __call__(self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return torch.ops.peagle.paged_attention(
            query, key, value, self.handle, None, None, None, None
        )

    def swap(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], Any, int]:
        assert len(args) == 4 and not kwargs, "Drafter.forward passes four arguments by position"
        hidden, embedding, rope, attend = args
        return (hidden, embedding, rope, self), kwargs, attend, hidden.shape[:-1].numel()

    def run(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        layer: Any = self.layer
        return self.current(layer.self_attn.layer_idx, query, key, value)


# The operator writes to the KV cache, which is none of its arguments: to the compiler it is pure.
# That is safe because its output is always used, and no graph holds two calls of the same layer.
@torch.library.custom_op(
    "peagle::paged_attention",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor handle, float? scaling, "
    "int? sliding_window, Tensor? sinks, float? softcap) -> Tensor",
)
def _paged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    handle: Tensor,
    scaling: float | None,
    sliding_window: int | None,
    sinks: Tensor | None,
    softcap: float | None,
) -> Tensor:
    out = _attentions[int(handle)].run(
        query,
        key,
        value,
        scaling=scaling,
        sliding_window=sliding_window,
        sinks=sinks,
        softcap=softcap,
    )
    return out.contiguous()


@_paged_attention.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    handle: Tensor,
    scaling: float | None,
    sliding_window: int | None,
    sinks: Tensor | None,
    softcap: float | None,
) -> Tensor:
    return query.new_empty(query.shape)


class CompiledLayers:
    """The compiled layers of one model; they stay inside it.

    Attributes:
        modes: the mode of each number of tokens that has come.
        left: why a layer runs uncompiled, by its index.
    """

    def __init__(
        self,
        attentions: list[LayerAttention],
        mode: Mode | Literal["auto"] | Callable[[int], Mode],
        buckets: Collection[int] | None,
        others: Others,
        backend: str,
        store: ModeStore | None,
    ) -> None:
        self.modes: dict[int, Mode] = {}
        self.left: dict[int, str] = {}
        self.buckets = None if buckets is None else set(buckets)
        self.others = others
        self.backend = backend
        self._mode = mode
        self._store = store
        self._layers = [_CompiledLayer(self, i, a) for i, a in enumerate(attentions)]

    def undo(self) -> None:
        """Take the compiled code out of the model again."""
        for layer in self._layers:
            del layer.attention.layer.forward

    def mode_for(self, tokens: int, measure: Callable[[Mode], float], layer: nn.Module) -> Mode:
        """The mode for a number of tokens; the first layer that asks is measured for all."""
        if tokens not in self.modes:
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"layers first see {tokens} tokens while a CUDA graph is captured; run a pass "
                    "of as many before"
                )
            self.modes[tokens] = self._choose(tokens, measure, layer)
        return self.modes[tokens]

    def _choose(self, tokens: int, measure: Callable[[Mode], float], layer: nn.Module) -> Mode:
        if callable(self._mode):
            return self._mode(tokens)
        if self._mode != "auto":
            return cast(Mode, self._mode)
        weight = next(layer.parameters())
        shapes = [(name, list(p.shape)) for name, p in layer.named_parameters()]
        return choose_mode(
            tokens,
            shapes=[type(layer).__name__, *shapes],
            dtype=weight.dtype,
            device=weight.device,
            measure=measure,
            store=self._store,
        )


class _CompiledLayer:
    """Stands in for the `forward` of one layer."""

    def __init__(self, owner: CompiledLayers, index: int, attention: LayerAttention) -> None:
        self.owner = owner
        self.index = index
        self.attention = attention
        self._forward: Any = attention.layer.forward
        if isinstance(getattr(self._forward, "__self__", None), _CompiledLayer):
            raise RuntimeError("the layers are compiled already; undo that first")
        self._compiled: dict[Mode, Any] = {}
        self._dynamic: Any = None
        attention.layer.forward = self.__call__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        owner = self.owner
        swapped_args, swapped_kwargs, attend, tokens = self.attention.swap(args, kwargs)
        is_bucket = owner.buckets is None or tokens in owner.buckets
        is_plain = not is_bucket and owner.others == "eager"
        if attend is None or is_plain or self.index in owner.left:
            return self._forward(*args, **kwargs)

        def measure(mode: Mode) -> float:
            self.attention.current = _no_attention
            call = partial(self._in_mode(mode), *swapped_args, **swapped_kwargs)
            return time_call(call, next(self.attention.layer.parameters()).device)

        from torch._dynamo.exc import TorchRuntimeError, Unsupported

        try:
            call = self._of_any_size()
            if is_bucket:
                call = self._in_mode(owner.mode_for(tokens, measure, self.attention.layer))
            self.attention.current = attend
            return call(*swapped_args, **swapped_kwargs)
        except (Unsupported, TorchRuntimeError) as error:  # raised before anything has run
            reason = str(error).strip().splitlines()[0]
            owner.left[self.index] = reason
            warnings.warn(f"Layer {self.index} runs uncompiled: {reason}", stacklevel=2)
        finally:
            self.attention.current = None
        return self._forward(*args, **kwargs)

    def _in_mode(self, mode: Mode) -> Any:
        if mode not in self._compiled:
            self._compiled[mode] = torch.compile(
                self._forward,
                fullgraph=True,
                dynamic=False,
                backend=self.owner.backend,
                mode=None if mode == "default" else mode,
            )
        return self._compiled[mode]

    def _of_any_size(self) -> Any:
        if self._dynamic is None:
            self._dynamic = torch.compile(
                self._forward, fullgraph=True, dynamic=True, backend=self.owner.backend
            )
        return self._dynamic


def compile_layers(
    model: transformers.PreTrainedModel | Drafter,
    *,
    mode: Mode | Literal["auto"] | Callable[[int], Mode] = "default",
    buckets: Collection[int] | None = None,
    others: Others = "eager",
    backend: str = "inductor",
    store: ModeStore | None = None,
) -> CompiledLayers:
    """Compile the decoder layers of a model in place, each whole, for fixed numbers of tokens.

    A layer compiles when it first sees a number of tokens, which must not be while a CUDA graph is
    being captured: warm up first. Layers of one kind share the compiled graph. Aux taps, and all
    other hooks on layers, stay outside it. A layer that cannot be traced whole runs as before and
    is listed in `left`.

    Args:
        model: `TargetModel.model`, or a drafter that is not being trained.
        mode: of `torch.compile`; a function of the number of tokens; or "auto", which times both
            modes for each number of tokens and keeps the result on disk.
        buckets: numbers of tokens to compile for; None compiles for each.
        others: how other numbers run: as before, or in one more graph for any number ("dynamic").
        backend: of `torch.compile`; other than "inductor" only in tests.
        store: where "auto" keeps its results; None is the usual place.
    """
    if backend == "inductor":
        keep_compiled_code()
    from torch._dynamo import config as dynamo_config

    for name in ("recompile_limit", "accumulated_recompile_limit"):
        setattr(dynamo_config, name, max(getattr(dynamo_config, name), _RECOMPILE_LIMIT))
    if isinstance(model, Drafter):
        attentions: list[LayerAttention] = [DrafterLayerAttention(x) for x in model.layers]
    else:
        attentions = [TargetLayerAttention(layer) for layer in decoder_layers(model)]
    return CompiledLayers(attentions, mode, buckets, others, backend, store)


def _no_attention(*args: Any, **kwargs: Any) -> Tensor:
    """What is timed in place of attention, which is the same in every mode: nothing."""
    query = next(x for x in args if isinstance(x, Tensor))
    return torch.zeros_like(query, memory_format=torch.contiguous_format)
