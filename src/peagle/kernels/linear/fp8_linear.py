"""Linear layers over FP8 activations and FP8 weights: y = x W^T + bias.

Activations have a scale for each row and 128 inputs (`fp8_activations`), weights for each
128 x 128. Sums of 128 inputs come from the matrix unit in FP8 and are added up in float32. Products
take the numbers of a weight row by row, a second copy beside the tiles that products of fewer rows
read. Our kernel computes results of few rows (`is_own`), the library larger ones.

Shapes: M rows of x, N outputs, K inputs; N and K are multiples of 128.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.kernels.launch import arrivals, launch, overlapping
from peagle.kernels.linear.fp8_activations import BLOCK
from peagle.kernels.linear.packed_weights import PackedWeight

# Rows from which on activations are rounded: products of fewer rows are as fast with the tiles and
# activations as they are (H200, docs/lab/roofline.md).
MIN_ROWS = 32
_TILE_ROWS = 64
_MAX_OWN_NUMBERS = 2**20  # of a result of more rows than a tile has
_CAPABILITY = (9, 0)
_CUDA = (12, 9)  # cuBLAS has block scales from this version on
_MIN_INPUTS = 1024  # of a share of a sum
_MANY_INPUTS = 3072  # of a share: two programs of a multiprocessor are faster then
_MULTIPROCESSORS = 132
_FEW_PROGRAMS = 80
_SHARED_BYTES = 100 * 1024  # of a program: two run beside each other
_NUM_WARPS = 4


@dataclass(frozen=True, slots=True)
class Norm:
    """The RMSNorm x / sqrt(mean(x^2) + eps) * weight, with a weight [K]."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """Compute the norm of [..., K] in plain torch, rounded before the weight multiplies it."""
        mean = x.float().square().mean(-1, keepdim=True)
        return self.weight * (x.float() * torch.rsqrt(mean + self.eps)).to(x.dtype)


# What a layer may compute of its input first: a norm, or silu(gate) * up of all gates and all up.
Before = Norm | Literal["swiglu"]


@dataclass(frozen=True, slots=True)
class LinearConfig:
    """How a product is cut.

    Attributes:
        block_n: outputs of a tile, 16 to 128.
        split_k: programs that share the sum over K of one tile.
    """

    block_n: int
    split_k: int

    @property
    def num_stages(self) -> int:
        """Return the turns of 256 inputs on their way or in use."""
        return _SHARED_BYTES // (2 * BLOCK * (_TILE_ROWS + self.block_n))


def fits_fp8(weight: PackedWeight) -> bool:
    """Return whether a weight is one that FP8 activations can be multiplied with."""
    sizes = (weight.num_outputs, weight.num_inputs)
    is_whole = not any(size % BLOCK for size in sizes)
    return weight.format == "fp8" and weight.block == (BLOCK, BLOCK) and is_whole


def fp8_linear(
    x: Tensor,
    numbers: Tensor,
    scale: Tensor,
    bias_N: Tensor | None = None,
    before: Before | None = None,
) -> Tensor:
    """Compute x W^T + bias over x in FP8, [M, N] in the type of x; on a CPU in plain torch.

    A compiler sees operators. NaN or infinity in a row of x makes that row of the result NaN, and
    changes no other row.

    Args:
        x: [M, K]; [M, 2K] if `before` is SwiGLU.
        numbers: `PackedWeight.fp8_numbers` of the weight.
        scale: its scales, float32 [N / 128, K / 128].
        bias_N: [N].
        before: what is computed of x and rounded, in one kernel.
    """
    if isinstance(before, Norm):
        rows = torch.ops.peagle.quantise_normed(x, before.weight, before.eps)
    else:
        rows = torch.ops.peagle.quantise(x, before == "swiglu")
    out = torch.ops.peagle.fp8_product(*rows, numbers, scale, x.shape[0], None).to(x.dtype)
    return out if bias_N is None else out + bias_N


@cache
def fp8_obstacle(device: torch.device) -> str | None:
    """Return why `torch.nn.functional.scaled_mm` cannot multiply with block scales here."""
    if device.type != "cuda":
        return "block scales need a card"
    if (capability := torch.cuda.get_device_capability(device)) != _CAPABILITY:
        return f"block scales need compute capability 9.0, not {capability[0]}.{capability[1]}"
    cuda = torch.version.cuda
    if cuda is None or tuple(map(int, cuda.split(".")[:2])) < _CUDA:
        return f"block scales need CUDA 12.9, not {cuda}"
    return None


@torch.library.custom_op(
    "peagle::fp8_product",
    mutates_args=(),
    schema="(Tensor q, Tensor scale_of_x, Tensor numbers, Tensor scale, SymInt num_rows, "
    "Tensor? residual) -> Tensor",
)
def _fp8_product(
    q: Tensor,
    scale_of_x: Tensor,
    numbers: Tensor,
    scale: Tensor,
    num_rows: int,
    residual: Tensor | None,
) -> Tensor:
    n = numbers.shape[0]
    added = None if residual is None else residual.reshape(num_rows, n).contiguous()
    if q.device.type == "cuda" and is_own(num_rows, n):
        return fp8_product(q[:num_rows], scale_of_x, numbers, scale, added)
    product = library_product if q.device.type == "cuda" else fp8_product_reference
    out = product(q, scale_of_x, numbers, scale)[:num_rows]
    return out if added is None else out + added


@_fp8_product.register_fake
def _(
    q: Tensor, scale_of_x: Tensor, numbers: Tensor, scale: Tensor, num_rows: int, *others: object
) -> Tensor:
    dtype = torch.bfloat16 if q.device.type == "cuda" else torch.float32
    return q.new_empty(num_rows, numbers.shape[0], dtype=dtype)


def is_own(num_rows: int, n: int) -> bool:
    """Return whether our kernel computes a result [M, N], and not the library."""
    return num_rows <= _TILE_ROWS or num_rows * n <= _MAX_OWN_NUMBERS


def fp8_product(
    q: Tensor,
    scale_of_x: Tensor,
    numbers: Tensor,
    scale: Tensor,
    residual: Tensor | None = None,
    config: LinearConfig | None = None,
) -> Tensor:
    """Multiply in Gluon on a card of compute capability 9.0, bfloat16 [M, N].

    Args:
        q: the rounded rows of x, [M, K], contiguous.
        scale_of_x: float32 [K / 128, M or more].
        numbers: [N, K], contiguous; scale: float32 [N / 128, K / 128], contiguous.
        residual: bfloat16 [M, N], contiguous, is added to the rounded product.
        config: default `choose_linear_config`.
    """
    from peagle.kernels.linear import fp8_linear_gluon

    (num_rows, k), n = q.shape, numbers.shape[0]
    cut = config or choose_linear_config(num_rows, n, k)
    out = torch.empty(num_rows, n, dtype=torch.bfloat16, device=q.device)
    if num_rows == 0:
        return out
    tiles, columns = -(-num_rows // _TILE_ROWS), n // cut.block_n
    partial = counters = out  # not looked at where K is not split
    if cut.split_k > 1:
        size = tiles * columns * cut.split_k * _TILE_ROWS * cut.block_n
        partial = torch.empty(size, dtype=torch.float32, device=q.device)
        counters = arrivals(q.device)
    launch(
        fp8_linear_gluon.linear_kernel,
        (tiles, columns * cut.split_k),
        out,
        _boxes(q, _TILE_ROWS),
        scale_of_x,
        _boxes(numbers, cut.block_n),
        scale,
        out if residual is None else residual,
        partial,
        counters,
        num_rows,
        n,
        k,
        scale_of_x.stride(0),
        BLOCK_M=_TILE_ROWS,
        BLOCK_N=cut.block_n,
        SPLIT_K=cut.split_k,
        STAGES=cut.num_stages,
        HAS_RESIDUAL=residual is not None,
        **overlapping(q.device),
        num_warps=_NUM_WARPS,
    )
    return out


def _boxes(matrix: Tensor, rows: int) -> Any:
    """Describe a matrix in FP8 to the copy engine, which brings boxes of rows of 256 numbers."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor.from_tensor(
        matrix, [rows, 2 * BLOCK], gl.NVMMASharedLayout(128, 8, rank=2)
    )


def choose_linear_config(num_rows: int, n: int, k: int) -> LinearConfig:
    """Choose a configuration from shapes alone, as timing many on an H200 found them."""
    tiles = -(-num_rows // _TILE_ROWS)
    block_n = 128 if tiles * n > _MULTIPROCESSORS * 64 else 64
    programs, split_k = tiles * n // block_n, 1
    while k >= 2 * _MIN_INPUTS * split_k and (
        programs * split_k < _FEW_PROGRAMS
        or (programs * split_k <= _MULTIPROCESSORS and k >= 2 * _MANY_INPUTS * split_k)
    ):
        split_k *= 2
    return LinearConfig(block_n, split_k)


def library_product(q: Tensor, scale_of_x: Tensor, numbers: Tensor, scale: Tensor) -> Tensor:
    """Multiply by `torch.nn.functional.scaled_mm`, as `fp8_product`; M is a multiple of 16."""
    return F.scaled_mm(
        q,
        numbers.T,
        scale_of_x.contiguous().T,
        F.ScalingType.BlockWise1x128,
        library_scales(scale),
        F.ScalingType.BlockWise128x128,
        output_dtype=torch.bfloat16,
    )


def fp8_product_reference(q: Tensor, scale_of_x: Tensor, numbers: Tensor, scale: Tensor) -> Tensor:
    """Compute `fp8_product` in float32 in plain torch."""
    x = q.float() * scale_of_x.T.repeat_interleave(BLOCK, 1)
    spread = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return F.linear(x, numbers.float() * spread)


def library_scales(scale: Tensor) -> Tensor:
    """Return scales of a weight as the library reads them: [K / 128 up to fours, N / 128], those of
    one output together.
    """
    missing = -scale.shape[1] % 4
    return (F.pad(scale, (0, missing)) if missing else scale).T
