"""Decoder layers under torch.compile, one graph each, with attention as an opaque operator.

The operator `peagle::paged_attention` finds its layer by a handle, a number in a CPU tensor. It
looks up the KV cache and the prepared pass when it runs, so the compiler sees neither: Inductor
copied the whole cache for an operator that named it as an output. The handle is an input of the
graph, not a constant in it, so that equal layers share one compiled graph.

    compiled = compile_layers(target.model, buckets=(1, 2, 4, 8, 16))
"""

from __future__ import annotations

import itertools
import os
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from peagle.kernels.launch import compiled_kernels_overlap
from peagle.models.drafter import Drafter
from peagle.models.target_attention import decoder_layers, windowed_modules

CACHE_VARIABLE = "PEAGLE_CACHE"
# The variables by which Inductor and Triton choose their folders, and our folders for them.
_CACHE_FOLDERS = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
# Compiled graphs hang on the code of a layer's class: every token count of every kind of layer of
# every model in the process counts. The default of 8 is for mistakes; here each one is wanted.
_RECOMPILE_LIMIT = 1024

_numbers = itertools.count()
_attentions: weakref.WeakValueDictionary[int, LayerAttention] = weakref.WeakValueDictionary()


class LayerAttention(ABC):
    """Attention of one layer as its compiled graph calls it; what runs it is set for each pass.

    Attributes:
        handle: int64 [], on the CPU: the number by which the operator finds this object.
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
        """Return the layer's arguments with this object as its attention.

        Also the attention that was there (None: the call is not to be compiled), and the number of
        tokens.
        """

    @abstractmethod
    def run(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """Attend as `current` does."""

    def begin(self, attend: Any) -> None:
        """Begin a pass of the compiled layer; `end` ends it."""
        self.current = attend

    def end(self) -> None:
        """End the pass of the compiled layer: `current` is None again."""
        self.current = None


class TargetLayerAttention(LayerAttention):
    """A `Prepared` for a layer of a transformers model.

    Args:
        windowed: the layer's module of `windowed_modules`. Its window is hidden from the graph, so
            that layers with and without a window share one.
    """

    def __init__(self, layer: nn.Module, windowed: Any = None) -> None:
        super().__init__(layer)
        self._attends: Any = None
        self._windowed = windowed
        self._window = None if windowed is None else windowed.sliding_window

    def begin(self, attend: Any) -> None:
        super().begin(attend)
        if self._windowed is not None:
            self._windowed.sliding_window = None

    def end(self) -> None:
        super().end()
        if self._windowed is not None:
            self._windowed.sliding_window = self._window

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
        if self._windowed is not None:
            options["sliding_window"] = self._window
        return self.current(query, key, value, cache=self._cache(), **options)

    def _cache(self) -> Any:
        """Return the KV cache, which hangs on whichever module of the layer attends."""
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
    options = {"scaling": scaling, "sliding_window": sliding_window}
    options |= {"sinks": sinks, "softcap": softcap}
    return _attentions[int(handle)].run(query, key, value, **options).contiguous()


@_paged_attention.register_fake
def _(query: Tensor, *_: Any) -> Tensor:
    return query.new_empty(query.shape)


class CompiledLayers:
    """The compiled layers of one model; they stay inside it.

    Attributes:
        buckets: numbers of tokens that have a graph of their own; None: each has. May grow.
        left: why a layer runs uncompiled, by its index.
        is_suspended: all layers run uncompiled for now.
    """

    def __init__(
        self, attentions: list[LayerAttention], buckets: Collection[int] | None, backend: str
    ) -> None:
        self.left: dict[int, str] = {}
        self.buckets = None if buckets is None else set(buckets)
        self.is_suspended = False
        self._seen: set[int] = set()
        for index, attention in enumerate(attentions):
            attention.layer.forward = _CompiledLayer(self, index, attention, backend).__call__

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Run all layers uncompiled meanwhile, so that hooks inside them are called."""
        self.is_suspended = True
        try:
            yield
        finally:
            self.is_suspended = False

    def is_fixed(self, tokens: int) -> bool:
        """Return whether a number of tokens has a graph of its own.

        Raises:
            RuntimeError: it comes for the first time while a CUDA graph is captured.
        """
        if self.buckets is not None and tokens not in self.buckets:
            return False
        if tokens not in self._seen:
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"layers first see {tokens} tokens while a CUDA graph is captured; run a pass "
                    "of as many before"
                )
            self._seen.add(tokens)
        return True


class _CompiledLayer:
    """Stands in for the `forward` of one layer."""

    def __init__(
        self, owner: CompiledLayers, index: int, attention: LayerAttention, backend: str
    ) -> None:
        self.owner = owner
        self.index = index
        self.attention = attention
        self._forward: Any = attention.layer.forward
        if isinstance(getattr(self._forward, "__self__", None), _CompiledLayer):
            raise RuntimeError("the layers are compiled already")
        self._dynamic, self._fixed = (
            torch.compile(self._forward, fullgraph=True, dynamic=dynamic, backend=backend)
            for dynamic in (True, False)
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        swapped_args, swapped_kwargs, attend, tokens = self.attention.swap(args, kwargs)
        if attend is None or self.owner.is_suspended or self.index in self.owner.left:
            return self._forward(*args, **kwargs)
        from torch._dynamo.exc import TorchRuntimeError, Unsupported

        try:
            call = self._fixed if self.owner.is_fixed(tokens) else self._dynamic
            self.attention.begin(attend)
            return call(*swapped_args, **swapped_kwargs)
        except (Unsupported, TorchRuntimeError) as error:  # raised before anything has run
            reason = str(error).strip().splitlines()[0]
            self.owner.left[self.index] = reason
            warnings.warn(f"Layer {self.index} runs uncompiled: {reason}", stacklevel=2)
        finally:
            self.attention.end()
        return self._forward(*args, **kwargs)


def compile_layers(
    model: transformers.PreTrainedModel | Drafter,
    *,
    buckets: Collection[int] | None = None,
    backend: str = "inductor",
) -> CompiledLayers:
    """Compile the decoder layers of a model in place, each whole, for fixed numbers of tokens.

    A layer compiles when it first sees a number of tokens, which must not be while a CUDA graph is
    being captured: warm up first. Layers of one kind share the compiled graph. Aux taps, and all
    other hooks on layers, stay outside it. A layer that cannot be traced whole runs as before and
    is listed in `left`.

    Args:
        model: `TargetModel.model`, or a drafter that is not being trained.
        buckets: numbers of tokens to compile for, while one more graph runs all others; None
            compiles for each.
        backend: of `torch.compile`; other than "inductor" only in tests.
    """
    if backend == "inductor":
        cache_compiled_code()
        wait_before_reading()
        from peagle.models.joined_residuals import join_residuals

        join_residuals()
    from torch._dynamo import config as dynamo_config

    for name in ("recompile_limit", "accumulated_recompile_limit"):
        setattr(dynamo_config, name, max(getattr(dynamo_config, name), _RECOMPILE_LIMIT))
    if isinstance(model, Drafter):
        attentions: list[LayerAttention] = [DrafterLayerAttention(x) for x in model.layers]
    else:
        windowed = windowed_modules(model)
        attentions = [
            TargetLayerAttention(layer, next((m for m in layer.modules() if m in windowed), None))
            for layer in decoder_layers(model)
        ]
    return CompiledLayers(attentions, buckets, backend)


@cache
def wait_before_reading() -> None:
    """Let compiled kernels that begin before the launch before them is done wait before they read.

    Inductor's `triton.enable_pdl` waits only for the node that was compiled before, and reads all
    else at once. Launches of our own operators are no such nodes.
    """
    from torch._inductor.codegen.triton import TritonKernel
    from torch._inductor.virtualized import V

    before_access: Any = getattr(TritonKernel, "_handle_pdl_before_access", None)
    if before_access is None or not compiled_kernels_overlap():
        return

    def wait(self: Any, *args: Any, **kwargs: Any) -> None:
        graph = V.graph
        scheduler, graph.scheduler = graph.scheduler, None  # no node before: waits in any case
        try:
            before_access(self, *args, **kwargs)
        finally:
            graph.scheduler = scheduler

    TritonKernel._handle_pdl_before_access = wait


def code_cache_folder() -> Path:
    """Return where compiled code is kept: $PEAGLE_CACHE, else ~/.cache/peagle."""
    named = os.environ.get(CACHE_VARIABLE)
    return Path(named) if named else Path.home() / ".cache" / "peagle"


def cache_compiled_code() -> None:
    """Let Inductor and Triton keep code and autotuning results below `code_cache_folder()`.

    Call it before either compiles anything, so that both look in one place. A variable that the
    user has set stays as it is. Where the folder cannot be written, the libraries use their own.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    folder = code_cache_folder()
    try:
        for name in _CACHE_FOLDERS.values():
            (folder / name).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        warnings.warn(f"Compiled code is not kept in {str(folder)!r}: {error}.", stacklevel=3)
        return
    for variable, name in _CACHE_FOLDERS.items():
        # Importing Inductor sets its variable to the default: no user chose that.
        if os.environ.get(variable) in (None, default_cache_dir()):
            os.environ[variable] = str(folder / name)
