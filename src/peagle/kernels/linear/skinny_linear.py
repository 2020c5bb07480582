"""Linear layers of few rows: the configuration, the launch, and the operators for compilers.

With few rows a product costs what reading its weight costs. The kernel therefore keeps as many
bytes of the weight in flight as it can, in all multiprocessors.

The rules of `choose_config` are of an H100 in bfloat16 at the shapes of Qwen3-8B and its drafter,
found by timing many. Other shapes get the configuration of the nearest of these.

Shapes: M rows of x, N outputs, K inputs; I is half of N where gate and up stand in one weight.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from peagle.kernels.launch import (
    MAX_ARRIVALS,
    DeviceLimits,
    arrivals,
    overlapping,
    power_of_two,
)

Kind = Literal["xw", "wx", "gemv"]
KINDS: tuple[str, ...] = get_args(Kind)
MAX_BLOCK_M = 64
H100_SHARED_BYTES = 232_448  # of one program
_TILE_BYTES = 16 * 1024  # of the weight, in one step of one program
_SHARED_BYTES = 200_000  # of a multiprocessor, to be shared by its programs
# From so many weights on: up to how many rows ours is faster as a product, and as `skinny_swiglu`.
# Smaller weights are not measured.
_FASTER_ROWS = (
    (2**28, 128, 128),
    (2**26, 64, 128),
    (2**25, 32, 64),
    (2**24, 16, 32),
    (2**22, 16, 16),
)


@dataclass(frozen=True, slots=True)
class SkinnyConfig:
    """How the work is cut. Block sizes are powers of two.

    Attributes:
        block_m: rows of x in a tile; from 16 on, from 8 on for "wx", 1 for "gemv".
        block_n: rows of the weight in a tile; `skinny_swiglu` takes so many of gate and of up.
        block_k: inputs of a tile at each step.
        split_k: programs that share the sum over K of one tile.
        num_warps: Triton's.
        num_stages: tiles that are loaded ahead, plus one; for "gemv" 1 loads into registers.
        kind: "xw" multiplies x W^T in the matrix unit, "wx" W x^T; "gemv" does without.
        tma: load the weight through a tensor descriptor; from 128 rows on, x too.
    """

    block_m: int
    block_n: int
    block_k: int
    split_k: int
    num_warps: int
    num_stages: int
    kind: Kind = "xw"
    tma: bool = False

    def to_ints(self) -> list[int]:
        """Return the configuration as an operator can take it."""
        fields = dataclasses.asdict(self)
        return [int(v) for v in {**fields, "kind": KINDS.index(self.kind)}.values()]

    @staticmethod
    def from_ints(numbers: list[int]) -> SkinnyConfig:
        """Make a configuration from the numbers of `to_ints`."""
        *sizes, kind, tma = numbers
        name: Any = KINDS[kind]
        return SkinnyConfig(*sizes, kind=name, tma=bool(tma))

    def stage_bytes(self, itemsize: int, *, swiglu: bool = False) -> int:
        """Return the shared bytes of one stage: a tile of x, and one or two of the weight."""
        rows = self.block_m + self.block_n * (2 if swiglu else 1)
        return rows * self.block_k * itemsize


def max_skinny_rows(n: int, k: int, itemsize: int = 2, *, swiglu: bool = False) -> int:
    """Return up to how many rows the Triton kernel is faster than cuBLAS; 0: never.

    The larger the weight, the longer it is the weight that costs. At 32 rows cuBLAS is faster for
    4096 x 4096 and as fast for 6144 x 4096, at 64 as fast for 4096 x 12288, at 128 as fast for
    24576 x 4096. With `swiglu` ours is compared with a product and another kernel for
    silu(gate) * up.
    """
    if itemsize != 2 or k * itemsize % 16:
        return 0
    return next((limits[swiglu] for size, *limits in _FASTER_ROWS if n * k >= size), 0)


def choose_config(
    m: int,
    n: int,
    k: int,
    itemsize: int,
    num_sms: int,
    *,
    swiglu: bool = False,
    tma: bool = False,
    shared_bytes: int = H100_SHARED_BYTES,
) -> SkinnyConfig:
    """Choose a configuration from shapes alone.

    Args:
        m, n, k: rows of x, rows of the weight, inputs.
        itemsize: bytes of a number.
        num_sms: multiprocessors.
        swiglu: the weight is gate and up; n counts both.
        tma: there are tensor descriptors, and the weight is aligned as they need it.
        shared_bytes: shared memory that one program may have.
    """
    tiles = -(-n // (128 if swiglu else 64))
    if itemsize == 2 and MAX_BLOCK_M < m <= 2 * MAX_BLOCK_M and tma:
        config = _up_to_128(swiglu=swiglu)
    elif itemsize == 4 or m > MAX_BLOCK_M:
        config = _by_size(m, n, k, itemsize, num_sms, swiglu=swiglu)
    elif m == 1:
        config = _one_row(k, swiglu=swiglu)
    elif tiles < 0.45 * num_sms:
        config = _by_size(m, n, k, itemsize, num_sms, swiglu=swiglu)
    elif swiglu:
        config = _swiglu(m, tma=tma)
    elif m <= 16:
        config = _up_to_16(tiles, k, num_sms, tma=tma)
    else:
        config = _up_to_64(m, n, tiles, num_sms, tma=tma)
    if config.kind != "gemv":
        stages = shared_bytes // config.stage_bytes(itemsize, swiglu=swiglu)
        in_registers = config.kind == "xw" and config.block_m < 64
        stages = min(config.num_stages, stages + in_registers)
        config = dataclasses.replace(config, num_stages=max(stages, 1))
    return config


def _one_row(k: int, *, swiglu: bool) -> SkinnyConfig:
    """Choose many small programs that load into registers, without the matrix unit."""
    block_k = min(1024, max(32, power_of_two(k)))
    return SkinnyConfig(1, 4 >> swiglu, block_k, 1, 2, 1, kind="gemv")


def _swiglu(m: int, *, tma: bool) -> SkinnyConfig:
    """Choose few stages: there are two tiles of the weight in each."""
    block_m = 16 if m <= 16 else 32 if m <= 32 else 64
    if tma:
        return SkinnyConfig(block_m, 64, 128, 1, 4, 4 if m <= 16 else 3, kind="wx", tma=True)
    return SkinnyConfig(block_m, 32, 128, 1, 4, 4 if m <= 32 else 3)


def _up_to_16(tiles: int, k: int, num_sms: int, *, tma: bool) -> SkinnyConfig:
    """Choose tiles of 64 rows of the weight, as wgmma takes them.

    They are half as tall where K is long and all of these run at once.
    """
    if 2 * tiles <= num_sms and (k >= 8192 or not tma):
        return SkinnyConfig(16, 32, 256, 1, 4, 6)
    if tma:
        return SkinnyConfig(16, 64, 128, 1, 4, 6, kind="wx", tma=True)
    return SkinnyConfig(16, 64, 128, 1, 4, 4, kind="wx")


def _up_to_64(m: int, n: int, tiles: int, num_sms: int, *, tma: bool) -> SkinnyConfig:
    """Choose tall tiles, which read x less often, where the last wave of them is nearly full.

    K is split where there are fewer tiles than multiprocessors.
    """
    block_m = 32 if m <= 32 else 64
    tall = -(-n // 128)
    waves = -(-tall // num_sms)
    at_once = 2 * tiles <= num_sms
    if tall > num_sms and tall >= 0.9 * waves * num_sms:
        return SkinnyConfig(block_m, 128, 128, 1, 4 if tma else 8, 3, kind="wx", tma=tma)
    if block_m == 64 and tiles < 0.9 * num_sms and not at_once:
        return SkinnyConfig(block_m, 32, 128, 1, 4, 4)
    split_k = 2 if tiles < 0.9 * num_sms else 1
    if tma:
        return SkinnyConfig(block_m, 64, 128, split_k, 4, 4, kind="wx", tma=True)
    return SkinnyConfig(block_m, 64, 128, split_k, 4, 4 if m <= 32 else 6 if at_once else 3)


def _up_to_128(*, swiglu: bool) -> SkinnyConfig:
    """Put all rows of x into one tile, so that the weight is read once."""
    if swiglu:
        return SkinnyConfig(128, 64, 64, 1, 4, 3, kind="wx", tma=True)
    return SkinnyConfig(128, 128, 128, 1, 8, 3, kind="wx", tma=True)


def _by_size(m: int, n: int, k: int, itemsize: int, num_sms: int, *, swiglu: bool) -> SkinnyConfig:
    """Choose by size, where nothing was measured.

    Tiles as tall as still give a program to nine of ten multiprocessors, which saves reading x
    again; with many rows x counts, and K is split before tiles get low. Programs are all resident
    where there are at most three a multiprocessor, and so end together. They share its memory.
    """
    block_m = min(max(16, power_of_two(m)), MAX_BLOCK_M)
    wanted = 0.9 * num_sms / -(-m // block_m)
    lowest = 32 if block_m == 16 else 64
    block_n = 128
    while block_n > lowest and -(-n // block_n) < wanted:
        block_n //= 2
    if itemsize == 4:
        block_n = 32  # multiplied without the matrix unit, out of registers
    block_k = min(max(_TILE_BYTES // (block_n * itemsize), 32), 256)
    tiles = -(-n // block_n)
    split_k = 1
    while tiles * split_k < wanted and split_k < 8 and k >= 8 * split_k * block_k:
        split_k *= 2
    resident = min(max(1, -(-tiles * split_k // num_sms)), 3)
    tiles_in_memory = _SHARED_BYTES // resident // ((block_n + block_m) * block_k * itemsize)
    # Up to 32 rows the tile that is multiplied is in registers already.
    num_stages = min(max(2, tiles_in_memory + (block_m < 64)), 6)
    return SkinnyConfig(block_m, block_n >> swiglu, block_k, split_k, 4, num_stages)


def skinny_linear(
    x: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None = None,
    *,
    config: SkinnyConfig | None = None,
) -> Tensor:
    """y = x W^T + bias in Triton, for few rows; summed in float32.

    Works for any number of rows, but reads the weight once for each `block_m`. A compiler sees the
    operator `peagle::skinny_linear`; a CUDA graph can hold it. Calls that split K must not run at
    the same time on several streams of a device, and one of them must have run before a capture.

    Args:
        x: [..., K], copied if its last dimension is not contiguous.
        weight_NK: [N, K], its rows contiguous, of the type of x.
        bias_N: [N].
        config: default `choose_config`.

    Returns:
        [..., N], contiguous.
    """
    out_MN = torch.ops.peagle.skinny_linear(
        x.reshape(-1, x.shape[-1]), weight_NK, bias_N, None if config is None else config.to_ints()
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


def skinny_swiglu_reference(x: Tensor, weight_2IK: Tensor) -> Tensor:
    """Compute `skinny_swiglu` in plain torch."""
    gate, up = F.linear(x, weight_2IK).chunk(2, dim=-1)
    return F.silu(gate) * up


@torch.library.custom_op(
    "peagle::skinny_linear",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor? bias, int[]? config) -> Tensor",
)
def _skinny_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, config: list[int] | None
) -> Tensor:
    given = None if config is None else SkinnyConfig.from_ints(config)
    return _multiply(x, weight, bias, given, swiglu=False)


@_skinny_linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, config: list[int] | None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


@torch.library.custom_op(
    "peagle::skinny_swiglu",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, int[]? config) -> Tensor",
)
def _skinny_swiglu(x: Tensor, weight: Tensor, config: list[int] | None) -> Tensor:
    given = None if config is None else SkinnyConfig.from_ints(config)
    return _multiply(x, weight, None, given, swiglu=True)


@_skinny_swiglu.register_fake
def _(x: Tensor, weight: Tensor, config: list[int] | None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0] // 2)


def _multiply(
    x_MK: Tensor,
    weight: Tensor,
    bias_N: Tensor | None,
    config: SkinnyConfig | None,
    *,
    swiglu: bool,
) -> Tensor:
    """Return the product [M, N], or its SwiGLU [M, N / 2], from the Triton kernel."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    from peagle.kernels.linear import skinny_linear_triton

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
        limits = DeviceLimits.of(x_MK.device)
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
    kernels.skinny_kernel[(tiles_n * split_k, tiles_m)](
        out_MN,
        partial,
        counters,
        TensorDescriptor.from_tensor(x_MK, [block_m, config.block_k]) if x_tma else x_MK,
        TensorDescriptor.from_tensor(weight, [block_n, config.block_k]) if config.tma else weight,
        bias_N if bias_N is not None else out_MN,
        num_rows,
        n,
        k,
        x_MK.stride(0),
        weight.stride(0),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=config.block_k,
        SPLIT_K=split_k,
        STAGES=config.num_stages,
        KIND=KINDS.index(config.kind),
        SWIGLU=swiglu,
        EVEN_K=k % config.block_k == 0,
        HAS_BIAS=bias_N is not None,
        TMA=config.tma,
        X_TMA=x_tma,
        **overlapping(x_MK.device),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out_MN


@cache
def _has_descriptors(device: torch.device) -> bool:
    """Return whether a device has tensor descriptors; the interpreter has."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (9, 0)


def _is_aligned(matrix: Tensor) -> bool:
    """Return whether every row begins at a multiple of 16 bytes, as a descriptor needs it."""
    return matrix.data_ptr() % 16 == 0 and matrix.stride(0) * matrix.itemsize % 16 == 0
