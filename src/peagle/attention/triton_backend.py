"""Paged attention in Triton: the GPU's backend.

On a CPU it runs under Triton's interpreter, for tests: TRITON_INTERPRET=1, set before triton is
imported. Shapes: T packed tokens, Hq query heads, Hkv key/value heads, d head size.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from typing import NamedTuple, Unpack

import torch
from torch import Tensor

from peagle.attention.base import AttentionMetadata, LayerKVCache, ScoreOptions
from peagle.errors import UserError
from peagle.kernels.attention.kv_write import kv_write
from peagle.kernels.attention.paged_attention import (
    MAX_FLOAT32_HEAD_DIM,
    MAX_HEAD_DIM,
    AttentionShape,
    NewKeyValues,
    PagedAttentionConfig,
    Workspace,
    choose_config,
    paged_attention,
    writes_new,
)
from peagle.kernels.launch import DeviceLimits

MIN_CAPABILITY = (8, 0)
_REMEDY = 'use another GPU, or device "cpu" with the torch backend'
Chooser = Callable[[AttentionShape, DeviceLimits], PagedAttentionConfig]


class TritonAttention:
    """Writes keys and values and attends: in one kernel for the few queries of a step, else in two.

    Args:
        choose: says how the work of a layer is cut.
        one_launch: attention writes the keys and values itself, where it can.
    """

    def __init__(self, choose: Chooser = choose_config, *, one_launch: bool = True) -> None:
        self._choose = choose
        self._one_launch = one_launch

    def prepare(self, metadata: AttentionMetadata) -> TritonPreparedAttention:
        """Return the pass that `metadata` describes; the host reads no tensor."""
        check_device(metadata.slots_T.device)
        return TritonPreparedAttention(metadata, self._choose, one_launch=self._one_launch)


class _Plan(NamedTuple):
    """How the layers of one shape run."""

    config: PagedAttentionConfig
    workspace: Workspace | None
    writes_new: bool


class TritonPreparedAttention:
    """One pass over the paged cache.

    A CUDA graph that captured it may be replayed after the metadata's tensors were overwritten:
    neither grid nor memory depend on what they hold. Layers of one shape share configuration and
    workspace, so they must run on one stream, one after the other.

    Rows of the batch that belong to no sequence come out as zeros.
    """

    def __init__(
        self, metadata: AttentionMetadata, choose: Chooser, *, one_launch: bool = True
    ) -> None:
        self.metadata = metadata
        self._choose = choose
        self._one_launch = one_launch
        self._plans: dict[AttentionShape, _Plan] = {}

    def __call__(
        self,
        query_THd: Tensor,
        key_THd: Tensor,
        value_THd: Tensor,
        cache: LayerKVCache | None,
        *,
        sliding_window: int | None = None,
        **options: Unpack[ScoreOptions],
    ) -> Tensor:
        """Write the new keys and values, and return the attention over the cache.

        Raises a UserError for a layer that the kernels cannot compute.
        """
        assert cache is not None, "paged attention needs the layer's cache"
        meta = self.metadata
        plan = self._plan(query_THd, cache)
        new = None
        if plan.writes_new:
            new = NewKeyValues(_rows(key_THd), _rows(value_THd), meta.slots_T)
        else:
            self.write(key_THd, value_THd, cache)
        return paged_attention(
            _rows(query_THd),
            cache.keys,
            cache.values,
            meta.query_start_loc,
            meta.seq_lens_B,
            meta.block_tables_BM,
            max_query_len=meta.max_query_len,
            context_starts_B=meta.context_starts_B,
            visible_T=None if meta.tree is None else meta.tree.visible_T,
            positions_T=None if meta.tree is None else meta.tree.positions_T,
            rows_before=0 if meta.tree is None else meta.tree.rows_before,
            config=plan.config,
            workspace=plan.workspace,
            new=new,
            settled=True,  # queries are computed after it
            sliding_window=sliding_window,
            **_scales(cache),
            **options,
        )

    def write(self, key_THd: Tensor, value_THd: Tensor, cache: LayerKVCache) -> None:
        """Write a layer's new keys and values to its cache in one launch."""
        new, slots_T = (_rows(key_THd), _rows(value_THd)), self.metadata.slots_T
        kv_write(*new, cache.keys, cache.values, slots_T, **_scales(cache))

    def _plan(self, query_THd: Tensor, cache: LayerKVCache) -> _Plan:
        num_tokens, num_heads, head_dim = query_THd.shape
        shape = AttentionShape(
            num_sequences=self.metadata.seq_lens_B.shape[0],
            num_tokens=num_tokens,
            max_query_len=self.metadata.max_query_len,
            num_heads=num_heads,
            num_kv_heads=cache.keys.shape[2],
            head_dim=head_dim,
            query_dtype=query_THd.dtype,
            cache_dtype=cache.keys.dtype,
        )
        if shape not in self._plans:
            device = query_THd.device
            check_layer(shape)
            config = self._choose(shape, DeviceLimits.of(device))
            self._plans[shape] = _Plan(
                config,
                Workspace.make(shape, config, device),
                self._one_launch and writes_new(shape),
            )
        return self._plans[shape]


def _scales(cache: LayerKVCache) -> dict[str, float]:
    return {"key_scale": cache.key_scale, "value_scale": cache.value_scale}


def _rows(x_THd: Tensor) -> Tensor:
    """Return the tensor with a contiguous last dimension, as models nearly always hand it over."""
    return x_THd if x_THd.stride(2) == 1 else x_THd.contiguous()


@cache
def check_device(device: torch.device) -> None:
    """Raise a UserError where triton is missing, or where its kernels cannot run."""
    try:
        import triton  # noqa: F401
    except ImportError:
        raise UserError(
            "The Triton attention backend needs the package triton, which is not installed; "
            'install it (Linux: pip install triton), or use device "cpu" with the torch backend.'
        ) from None
    if device.type == "cuda":
        if torch.version.hip is not None:
            raise UserError(
                f"{torch.cuda.get_device_name(device)} runs ROCm; the Triton attention backend "
                f"expects an NVIDIA GPU: {_REMEDY}."
            )
        capability = torch.cuda.get_device_capability(device)
        if capability < MIN_CAPABILITY:
            found, expected = (".".join(map(str, v)) for v in (capability, MIN_CAPABILITY))
            raise UserError(
                f"{torch.cuda.get_device_name(device)} has compute capability {found}; the Triton "
                f"attention backend expects {expected} or later: {_REMEDY}."
            )
    elif device.type != "cpu" or os.environ.get("TRITON_INTERPRET") != "1":
        raise UserError(
            f'The Triton attention backend cannot run on device "{device}"; expected an NVIDIA GPU '
            '(or, for tests, "cpu" with TRITON_INTERPRET=1): use the torch backend there.'
        )


def check_layer(shape: AttentionShape) -> None:
    """Raise a UserError for a head size, a number of heads or a type beyond the kernels."""
    if shape.head_dim > MAX_HEAD_DIM:
        raise UserError(
            f"The model's attention has head size {shape.head_dim}; the Triton attention backend "
            f"expects at most {MAX_HEAD_DIM}: {_REMEDY}."
        )
    if shape.query_dtype == torch.float32 and shape.head_dim > MAX_FLOAT32_HEAD_DIM:
        raise UserError(
            f"The model's attention has head size {shape.head_dim} and runs in float32, for which "
            f"the Triton attention backend expects at most {MAX_FLOAT32_HEAD_DIM}: choose bfloat16 "
            'or float16, or device "cpu" with the torch backend.'
        )
    if shape.num_heads % shape.num_kv_heads or shape.group > 128:
        raise UserError(
            f"The model has {shape.num_heads} query heads on {shape.num_kv_heads} key/value heads; "
            f"the Triton attention backend expects a multiple, up to 128: {_REMEDY}."
        )
    if shape.query_dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise UserError(
            f"The model runs in {shape.query_dtype}; the Triton attention backend expects float32, "
            'float16 or bfloat16: choose another dtype, or device "cpu" with the torch backend.'
        )
