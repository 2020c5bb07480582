"""Products of FP8 activations and FP8 weights: y = x W^T + bias.

Activations have a scale for each row and 128 inputs (`fp8_activations`), weights for each
128 x 128. Sums of 128 inputs come from the matrix unit in FP8 and are added up in float32. The
weights are those of `PackedWeight`, which products of few rows read too: a word turns into the four
numbers that it holds while it is loaded, and the inputs of x are put into the same order
(`tiled_inputs`). The product of many rows is the library's where it takes such scales, of numbers
that are taken out of the tiles first.

Shapes: M rows of x, N outputs, K inputs; N and K are multiples of 128.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.kernels.launch import MAX_ARRIVALS, DeviceLimits, arrivals, launch, overlapping
from peagle.kernels.linear.fp8_activations import BLOCK, FP8, QuantisedRows, quantise
from peagle.kernels.linear.packed_weights import PackedWeight

# Rows from which on activations are rounded: the weights alone bound products of fewer rows, and a
# launch that quantises them costs more than it gains (H200, docs/lab/roofline.md).
MIN_ROWS = 16
# Rows that Triton multiplies where the library can too, at most: it has to take the weight out of
# its tiles.
MAX_ROWS = 512
_UNTILED_ROWS = 16  # of one program
_MIN_BLOCKS = 4  # of 128 inputs, in a share of a sum
_LONG_SHARE = 32  # blocks, from which on a share is cut in two where the card has room
_LIBRARY_CAPABILITY = (9, 0)
_LIBRARY_CUDA = (12, 9)  # cuBLAS has block scales from this version on


@dataclass(frozen=True, slots=True)
class Fp8Config:
    """The parameters of a product in Triton.

    Attributes:
        block_m: rows of a tile.
        block_n: half of the outputs of a tile, a divisor of 128.
        num_warps, num_stages: of a program.
        wx: multiply W x^T in the matrix unit, not x W^T.
        split_k: programs that share the sums of a tile.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    wx: bool = False
    split_k: int = 1

    @property
    def label(self) -> str:
        """Return the parameters as text."""
        kind = "wx" if self.wx else "xw"
        cut = f"m{self.block_m} n{self.block_n} w{self.num_warps} st{self.num_stages}"
        return f"{kind} {cut} s{self.split_k}"

    def stage_bytes(self) -> int:
        """Return the shared memory of one stage."""
        return (self.block_m + 2 * self.block_n) * BLOCK


# The fastest ones of an H200 by the most rows that they are used for (docs/lab/roofline.md).
_CONFIGS = (
    (16, Fp8Config(16, 64, 4, 4, wx=True)),
    (32, Fp8Config(32, 64, 4, 4, wx=True)),
    (128, Fp8Config(64, 32, 4, 4)),
)
_MANY_ROWS = Fp8Config(128, 64, 8, 3)


def fits_fp8(weight: PackedWeight) -> bool:
    """Return whether a weight is one that FP8 activations can be multiplied with."""
    sizes = (weight.num_outputs, weight.num_inputs)
    is_whole = not any(size % BLOCK for size in sizes)
    return weight.format == "fp8" and weight.block == (BLOCK, BLOCK) and is_whole


def fp8_linear(x: Tensor, weight: PackedWeight, bias_N: Tensor | None = None) -> Tensor:
    """Compute x W^T + bias over x in FP8, [M, N] in the type of x.

    NaN or infinity in a row of x makes that row of the result NaN, and changes no other row.

    Args:
        x: [M, K].
        weight: [N, K], of which `fits_fp8` is true.
        bias_N: [N].
    """
    rows = quantise(x.contiguous())
    if rows.num_rows > MAX_ROWS and x.dtype == torch.bfloat16 and not library_obstacle(x.device):
        return library_product(rows, weight, bias_N)
    limits = DeviceLimits.of(x.device)
    config = choose_config(rows.num_rows, weight.num_outputs, weight.num_inputs, limits)
    return triton_product(rows, weight, bias_N, dtype=x.dtype, config=config)


def choose_config(num_rows: int, n: int, k: int, limits: DeviceLimits) -> Fp8Config:
    """Return the parameters for a number of rows, with K split as `split_for` says."""
    config = next((config for most, config in _CONFIGS if num_rows <= most), _MANY_ROWS)
    stages = min(config.num_stages, max(1, limits.shared_bytes // config.stage_bytes()))
    programs = -(-num_rows // config.block_m) * (n // (2 * config.block_n))
    return replace(config, num_stages=stages, split_k=split_for(programs, k, limits.num_sms))


def split_for(programs: float, k: int, num_sms: int) -> int:
    """Return the shares of K: about a program for each multiprocessor, or two with long shares."""
    split, blocks = 1, k // BLOCK
    while blocks >= 2 * split * _MIN_BLOCKS:
        is_long = blocks > _LONG_SHARE * split and programs * split <= num_sms
        if 8 * programs * split >= 7 * num_sms and not is_long:
            break
        split *= 2
    return split


def triton_product(
    x: QuantisedRows,
    weight: PackedWeight,
    bias_N: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    config: Fp8Config,
) -> Tensor:
    """Multiply in Triton, [M, N]; weight and bias are those of `fp8_linear`."""
    from peagle.kernels.linear import fp8_linear_triton

    n, k, data, scale = weight.num_outputs, weight.num_inputs, weight.data, weight.scale
    assert fits_fp8(weight) and scale is not None
    assert BLOCK % config.block_n == 0 and n % (2 * config.block_n) == 0
    assert data.is_contiguous() and scale.is_contiguous()
    out = torch.empty(x.num_rows, n, dtype=dtype, device=data.device)
    tiles, columns = -(-x.num_rows // config.block_m), n // (2 * config.block_n)
    if tiles == 0:
        return out
    partial, counters = partial_sums(tiles * columns, config, out)
    launch(
        fp8_linear_triton.linear_kernel,
        (columns * config.split_k, tiles),
        out,
        x.q,
        x.scale,
        data,
        scale,
        out if bias_N is None else bias_N,
        partial,
        counters,
        x.num_rows,
        n,
        k,
        x.scale.stride(0),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        SPLIT_K=config.split_k,
        STAGES=config.num_stages,
        HAS_BIAS=bias_N is not None,
        ASM=data.is_cuda,
        WX=config.wx,
        **overlapping(data.device),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out


def partial_sums(tiles: int, config: Fp8Config, out: Tensor) -> tuple[Tensor, Tensor]:
    """Return memory for the sums of programs that share a tile, and their counters.

    Without shares both are `out`, which the kernel then does not look at in their place.
    """
    if config.split_k == 1:
        return out, out
    assert tiles <= MAX_ARRIVALS, "too many tiles to split over K"
    size = tiles * config.split_k * 2 * config.block_m * config.block_n
    return torch.empty(size, dtype=torch.float32, device=out.device), arrivals(out.device)


# ---- the library --------------------------------------------------------------------------------


@cache
def library_obstacle(device: torch.device) -> str | None:
    """Return why `torch.nn.functional.scaled_mm` cannot multiply with block scales here."""
    if not hasattr(F, "scaled_mm"):
        return f"torch {torch.__version__} has no torch.nn.functional.scaled_mm"
    if device.type != "cuda":
        return "block scales need a card"
    if (capability := torch.cuda.get_device_capability(device)) != _LIBRARY_CAPABILITY:
        return f"block scales need compute capability 9.0, not {capability[0]}.{capability[1]}"
    cuda = torch.version.cuda
    if cuda is None or tuple(map(int, cuda.split(".")[:2])) < _LIBRARY_CUDA:
        return f"block scales need CUDA 12.9, not {cuda}"
    return None


def library_product(
    x: QuantisedRows,
    weight: PackedWeight,
    bias_N: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Multiply by `torch.nn.functional.scaled_mm`, [M, N]; the arguments are `triton_product`'s."""
    assert weight.scale is not None
    out = F.scaled_mm(
        x.q,
        numbers_of(weight).T,
        x.scale.T,
        F.ScalingType.BlockWise1x128,
        library_scales(weight.scale),
        F.ScalingType.BlockWise128x128,
        output_dtype=dtype,
    )[: x.num_rows]
    return out if bias_N is None else out.add_(bias_N)


def numbers_of(weight: PackedWeight) -> Tensor:
    """Take the numbers of a weight out of its tiles, float8_e4m3fn [N, K], each row in the order
    of `tiled_inputs`.
    """
    from peagle.kernels.linear import fp8_linear_triton

    n, k = weight.num_outputs, weight.num_inputs
    assert fits_fp8(weight) and weight.data.is_contiguous()
    words = torch.empty(n, k // 4, dtype=torch.int32, device=weight.data.device)
    launch(
        fp8_linear_triton.numbers_kernel,
        (n // _UNTILED_ROWS, k // BLOCK),
        words,
        weight.data.view(torch.int32),
        k,
        ROWS=_UNTILED_ROWS,
        num_warps=4,
    )
    return words.view(FP8)


def library_scales(scale: Tensor) -> Tensor:
    """Return scales of a weight as the library reads them: [K / 128 up to fours, N / 128], those of
    one output together.
    """
    missing = -scale.shape[1] % 4
    return (F.pad(scale, (0, missing)) if missing else scale).T
