"""Linear layers of few rows: the launch, and the operators for compilers.

With few rows a product costs what reading its weight costs. The kernel therefore has as many bytes
of it on their way as it can, in all multiprocessors, and is done when the last has come.

Shapes: M rows of x, N outputs, K inputs; I is half of N where gate and up stand in one weight.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from peagle.kernels.launch import MAX_ARRIVALS, arrivals
from peagle.kernels.paged_attention import DeviceLimits
from peagle.kernels.skinny_config import KINDS, MAX_BLOCK_M, SkinnyConfig, choose_config


def skinny_linear(
    x: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    config: SkinnyConfig | None = None,
) -> Tensor:
    """y = x W^T + bias (+ residual) in Triton, for few rows; summed in float32.

    Works for any number of rows, but reads the weight once for each `block_m`. A compiler sees the
    operator `peagle::skinny_linear`; a CUDA graph can hold it. Calls that split K must not run at
    the same time on several streams of a device, and one of them must have run before a capture.

    Args:
        x: [..., K], copied if its last dimension is not contiguous.
        weight_NK: [N, K], its rows contiguous, of the type of x.
        bias_N: [N].
        residual: [..., N] added to the rounded product.
        config: default `choose_config`.

    Returns:
        [..., N], contiguous.
    """
    out_MN = torch.ops.peagle.skinny_linear(
        x.reshape(-1, x.shape[-1]),
        weight_NK,
        bias_N,
        None if residual is None else residual.reshape(-1, residual.shape[-1]),
        None if config is None else config.to_ints(),
    )
    return out_MN.view(*x.shape[:-1], weight_NK.shape[0])


def skinny_swiglu(x: Tensor, weight_2IK: Tensor, *, config: SkinnyConfig | None = None) -> Tensor:
    """silu(x Wg^T) * (x Wu^T) in Triton, for few rows, where the weight holds Wg then Wu.

    The two products are rounded to the type of x, and so is silu, as if they were stored. For
    compilers it is the operator `peagle::skinny_swiglu`; what else holds is as in `skinny_linear`.

    Args:
        x: [..., K].
        weight_2IK: [2I, K].
        config: default `choose_config`.

    Returns:
        [..., I], contiguous.
    """
    out_MI = torch.ops.peagle.skinny_swiglu(
        x.reshape(-1, x.shape[-1]), weight_2IK, None if config is None else config.to_ints()
    )
    return out_MI.view(*x.shape[:-1], weight_2IK.shape[0] // 2)


def skinny_linear_reference(
    x: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None, *, residual: Tensor | None = None
) -> Tensor:
    """`skinny_linear` in plain torch."""
    out = F.linear(x, weight_NK, bias_N)
    return out if residual is None else out + residual


def skinny_swiglu_reference(x: Tensor, weight_2IK: Tensor) -> Tensor:
    """`skinny_swiglu` in plain torch."""
    gate, up = F.linear(x, weight_2IK).chunk(2, dim=-1)
    return F.silu(gate) * up


@torch.library.custom_op(
    "peagle::skinny_linear",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, int[]? config) -> Tensor",
)
def _skinny_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    config: list[int] | None,
) -> Tensor:
    given = None if config is None else SkinnyConfig.from_ints(config)
    return _multiply(x, weight, bias, residual, given, swiglu=False)


@_skinny_linear.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    config: list[int] | None,
) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


@torch.library.custom_op(
    "peagle::skinny_swiglu",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, int[]? config) -> Tensor",
)
def _skinny_swiglu(x: Tensor, weight: Tensor, config: list[int] | None) -> Tensor:
    given = None if config is None else SkinnyConfig.from_ints(config)
    return _multiply(x, weight, None, None, given, swiglu=True)


@_skinny_swiglu.register_fake
def _(x: Tensor, weight: Tensor, config: list[int] | None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0] // 2)


def _multiply(
    x_MK: Tensor,
    weight: Tensor,
    bias_N: Tensor | None,
    residual_MN: Tensor | None,
    config: SkinnyConfig | None,
    *,
    swiglu: bool,
) -> Tensor:
    """Launch the kernel."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    from peagle.kernels import skinny_linear_triton

    kernels: Any = skinny_linear_triton
    if x_MK.stride(1) != 1:
        x_MK = x_MK.contiguous()
    (num_rows, k), parts = x_MK.shape, 2 if swiglu else 1
    n = weight.shape[0] // parts
    assert weight.shape == (parts * n, k) and weight.stride(1) == 1
    assert weight.dtype == x_MK.dtype
    out_MN = torch.empty(num_rows, n, dtype=x_MK.dtype, device=x_MK.device)
    if num_rows == 0:
        return out_MN
    if config is None:
        limits = _limits(x_MK.device)
        config = choose_config(
            num_rows,
            parts * n,
            k,
            weight.dtype.itemsize,
            limits.num_sms,
            swiglu=swiglu,
            tma=_has_descriptors(x_MK.device) and _is_aligned(weight),
            shared_bytes=limits.shared_bytes,
        )
    if bias_N is not None:
        assert bias_N.shape == (n,) and bias_N.is_contiguous()
    if residual_MN is not None:
        assert residual_MN.shape == out_MN.shape and residual_MN.stride(1) == 1

    block_m, block_n, split_k = config.block_m, config.block_n, config.split_k
    tiles_n, tiles_m = -(-n // block_n), -(-num_rows // block_m)
    # Where K is not split these two are not looked at.
    partial = counters = out_MN
    if split_k > 1:
        assert tiles_m * tiles_n <= MAX_ARRIVALS, "too many tiles to split over K"
        size = tiles_m * tiles_n * split_k * parts * block_m * block_n
        partial = torch.empty(size, dtype=torch.float32, device=x_MK.device)
        counters = arrivals(x_MK.device)
    # Of many rows x costs too. Rows that are not aligned, as of a slice, have no descriptor.
    x_tma = config.tma and block_m > MAX_BLOCK_M and _is_aligned(x_MK)
    tile_n = block_n // config.num_tiles
    block, matrix = [tile_n, config.block_k], weight
    paired = swiglu and config.num_tiles > 1
    if paired:
        block, matrix = [2, *block], weight.unflatten(0, (2, n))
    kernels.skinny_kernel[(tiles_n * split_k, tiles_m)](
        out_MN,
        partial,
        counters,
        TensorDescriptor.from_tensor(x_MK, [block_m, config.block_k]) if x_tma else x_MK,
        TensorDescriptor.from_tensor(matrix, block) if config.tma else weight,
        bias_N if bias_N is not None else out_MN,
        residual_MN if residual_MN is not None else out_MN,
        num_rows,
        n,
        k,
        x_MK.stride(0),
        weight.stride(0),
        n if residual_MN is None else residual_MN.stride(0),
        BLOCK_M=block_m,
        BLOCK_N=tile_n,
        BLOCK_K=config.block_k,
        SPLIT_K=split_k,
        STAGES=config.num_stages,
        KIND=KINDS.index(config.kind),
        SWIGLU=swiglu,
        PAIRED=paired,
        TILES=config.num_tiles,
        EVEN_K=k % config.block_k == 0,
        HAS_BIAS=bias_N is not None,
        HAS_RESIDUAL=residual_MN is not None,
        TMA=config.tma,
        X_TMA=x_tma,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out_MN


@cache
def _limits(device: torch.device) -> DeviceLimits:
    return DeviceLimits.of(device)


@cache
def _has_descriptors(device: torch.device) -> bool:
    """The interpreter knows them too."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (9, 0)


def _is_aligned(matrix: Tensor) -> bool:
    """As a descriptor needs it: every row begins at a multiple of 16 bytes."""
    return matrix.data_ptr() % 16 == 0 and matrix.stride(0) * matrix.itemsize % 16 == 0
