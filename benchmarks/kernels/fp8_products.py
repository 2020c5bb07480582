"""Products of FP8 activations with FP8 weights, as candidates beside the engine's own products.

    out = dequantised(x) dequantised(W)^T,  with silu(gate) * up behind it for gate and up

Activations have a float32 scale for each row and 128 inputs, weights for each 128 x 128. Sums of
128 inputs come from the matrix unit in FP8 and are added up in float32.

Shapes: M rows of x, S assignments of rows to experts, N outputs, K inputs, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import fp8_products_triton
import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.kernels.launch import MAX_ARRIVALS, DeviceLimits, arrivals, launch

BLOCK = 128
FP8 = torch.float8_e4m3fn
_QUANTISED_ROWS = 4  # rows of one program
_LIBRARY_ROWS = 16  # the library's rows of scales begin at multiples of 16 bytes
_MIN_BLOCKS = 4  # of K, in a share of a sum


@dataclass(frozen=True, slots=True)
class QuantisedRows:
    """Activations in FP8.

    Attributes:
        q: [M, K]; scale: float32 [K / 128, M], which the library reads as [M, K / 128].
    """

    q: Tensor
    scale: Tensor

    @staticmethod
    def empty(rows: int, k: int, device: torch.device) -> QuantisedRows:
        """Allocate rows of zeros, up to a multiple of what the library takes."""
        padded = -(-rows // _LIBRARY_ROWS) * _LIBRARY_ROWS
        q = torch.zeros(padded, k, dtype=torch.uint8, device=device).view(FP8)
        return QuantisedRows(q, torch.ones(k // BLOCK, padded, device=device))

    def dequantise(self) -> Tensor:
        """Return the numbers in float32, [M, K]."""
        return self.q.float() * self.scale.T.repeat_interleave(BLOCK, 1)


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """Weights in FP8 as a checkpoint stores them.

    Attributes:
        q: [E, N, K]; scale: float32 [E, N / 128, K / 128].
    """

    q: Tensor
    scale: Tensor

    def expert(self, index: int) -> Fp8Weight:
        """Return one matrix, [1, N, K]."""
        return Fp8Weight(self.q[index : index + 1], self.scale[index : index + 1])

    def dequantise(self) -> Tensor:
        """Return the numbers in float32, [E, N, K]."""
        return self.q.float() * self.scale.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)


@dataclass(frozen=True, slots=True)
class Fp8Config:
    """How a product is cut: `block_n` is half of the weight's rows in a tile, a divisor of 128."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    wx: bool = False
    split_k: int = 1

    @property
    def label(self) -> str:
        kind = "wx" if self.wx else "xw"
        cut = f"m{self.block_m} n{self.block_n} w{self.num_warps} st{self.num_stages}"
        return f"{kind} {cut} s{self.split_k}"


CONFIGS = (
    Fp8Config(16, 32, 4, 4, wx=True),
    Fp8Config(16, 64, 4, 3, wx=True),
    Fp8Config(32, 64, 4, 3, wx=True),
    Fp8Config(64, 32, 4, 4),
    Fp8Config(64, 64, 4, 3),
    Fp8Config(128, 64, 8, 3),
    Fp8Config(128, 64, 4, 3),
    Fp8Config(128, 128, 8, 3),
)


def configs(rows: float, touched: float, n: int, k: int, num_sms: int) -> list[Fp8Config]:
    """Return the cuts to try; tiles have about as many rows as an expert has, and K is split until
    there is about a program for each multiprocessor.

    Args:
        rows: rows of a touched expert, on average; touched: experts, 1 for a dense layer.
        n: rows of the weight; k: inputs.
        num_sms: multiprocessors.
    """
    fitting = next((m for m in (16, 32, 64) if rows <= m), 128)
    found = []
    for config in CONFIGS:
        is_near = config.block_m in (fitting, fitting // 2) or fitting == config.block_m == 16
        if not is_near or n % (2 * config.block_n):
            continue
        programs = touched * max(1, -(-rows // config.block_m)) * (n // (2 * config.block_n))
        split = 1
        while programs * split < num_sms and k // BLOCK >= 2 * split * _MIN_BLOCKS:
            split *= 2
        found.append(replace(config, split_k=split))
    return found


def quantise(x: Tensor, out: QuantisedRows) -> QuantisedRows:
    """Quantise [M, K] in Triton, in one pass."""
    rows, k = x.shape
    assert k % BLOCK == 0 and x.is_contiguous()
    launch(
        fp8_products_triton.quantise_kernel,
        (-(-rows // _QUANTISED_ROWS), k // BLOCK),
        out.q,
        out.scale,
        x,
        rows,
        k,
        out.scale.stride(0),
        ROWS=_QUANTISED_ROWS,
        LARGEST=torch.finfo(FP8).max,
        num_warps=4,
    )
    return out


def product(
    x: QuantisedRows,
    weight: Fp8Weight,
    rows: int,
    config: Fp8Config,
    *,
    has_gate: bool = False,
    plan: Tensor | None = None,
    chosen: int = 1,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Multiply in Triton, [S, N], or with a gate [S, N / 2].

    Args:
        rows: S, without padding.
        plan: `plan_tiles` for `config.block_m`; None: there is one matrix.
        chosen: assignments that share a row of x.
    """
    _, stored, k = weight.q.shape
    n = stored // 2 if has_gate else stored
    assert n % (config.block_n * (1 if has_gate else 2)) == 0 and BLOCK % config.block_n == 0
    out = torch.empty(rows, n, dtype=dtype, device=weight.q.device)
    tiles = -(-rows // config.block_m) if plan is None else (plan.numel() - rows) // 3
    columns = stored // (2 * config.block_n)
    partial = counters = out  # not looked at where K is not split
    if config.split_k > 1:
        assert columns * tiles <= MAX_ARRIVALS, "too many tiles to split over K"
        size = columns * tiles * config.split_k * 2 * config.block_m * config.block_n
        partial = torch.empty(size, dtype=torch.float32, device=out.device)
        counters = arrivals(out.device)
    launch(
        fp8_products_triton.product_kernel,
        (columns * config.split_k, tiles),
        out,
        x.q,
        x.scale,
        out if plan is None else plan,
        out if plan is None else plan[rows:],
        weight.q,
        weight.scale,
        partial,
        counters,
        rows,
        n,
        k,
        tiles,
        chosen,
        x.scale.stride(0),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        SPLIT_K=config.split_k,
        STAGES=config.num_stages,
        HAS_GATE=has_gate,
        PLANNED=plan is not None,
        WX=config.wx,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out


def fits(config: Fp8Config, device: torch.device) -> bool:
    """Return whether the stages of a configuration go into shared memory."""
    stage = (config.block_m + 2 * config.block_n) * BLOCK
    return stage * config.num_stages <= DeviceLimits.of(device).shared_bytes


def library_scales(weight: Fp8Weight) -> Tensor:
    """Return the scales of one matrix as the library reads them: [K / 128 up to fours, N / 128],
    those of one output together.
    """
    return F.pad(weight.scale[0], (0, -weight.scale.shape[2] % 4)).contiguous().T


def library_product(
    x: QuantisedRows, weight: Fp8Weight, scales: Tensor, *, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Multiply by `torch.nn.functional.scaled_mm`, [M, N], M with padding."""
    return F.scaled_mm(
        x.q,
        weight.q[0].T,
        x.scale.T,
        F.ScalingType.BlockWise1x128,
        scales,
        F.ScalingType.BlockWise128x128,
        output_dtype=dtype,
    )


def reference(
    x: QuantisedRows,
    weight: Fp8Weight,
    index_S: Tensor,
    *,
    has_gate: bool = False,
    chosen: int = 1,
) -> Tensor:
    """Compute `product` in float32 from the same quantised numbers, one expert after the other."""
    rows = x.dequantise()
    row_S = torch.arange(len(index_S), device=index_S.device) // chosen
    out = torch.empty(len(index_S), weight.q.shape[1], device=index_S.device)
    for expert in index_S.unique().tolist():
        own = index_S == expert
        out[own] = F.linear(rows[row_S[own]], weight.expert(expert).dequantise()[0])
    if has_gate:
        gate, up = out.chunk(2, dim=1)
        return F.silu(gate) * up
    return out
