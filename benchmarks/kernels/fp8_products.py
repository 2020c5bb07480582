"""Products of FP8 activations with FP8 weights, as candidates beside the engine's own products.

    out = dequantised(x) dequantised(W)^T,  with silu(gate) * up behind it for gate and up

`peagle.kernels.linear.fp8_linear` has the product of a dense layer; this file has that of experts,
and the parameters to try for both.

Shapes: M rows of x, S assignments of rows to experts, N outputs, K inputs, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import fp8_products_triton
import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.kernels.launch import DeviceLimits, launch
from peagle.kernels.linear.fp8_activations import BLOCK, QuantisedRows
from peagle.kernels.linear.fp8_linear import Fp8Config, partial_sums, split_for

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


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """Weights in FP8 as a checkpoint stores them.

    Attributes:
        q: [E, N, K]; scale: float32 [E, N / 128, K / 128].
    """

    q: Tensor
    scale: Tensor

    def expert(self, index: int) -> Fp8Weight:
        """Return one matrix, [N, K]."""
        return Fp8Weight(self.q[index], self.scale[index])

    def dequantise(self) -> Tensor:
        """Return the numbers in float32, [..., N, K]."""
        return self.q.float() * self.scale.repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)


def configs(rows: float, touched: float, n: int, k: int, num_sms: int) -> list[Fp8Config]:
    """Return the parameters to try; tiles have about as many rows as an expert has, and K is split
    until there is about a program for each multiprocessor.

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
        found.append(replace(config, split_k=split_for(programs, k, num_sms)))
    return found


def experts_product(
    x: QuantisedRows,
    weight: Fp8Weight,
    rows: int,
    config: Fp8Config,
    *,
    plan: Tensor,
    has_gate: bool = False,
    chosen: int = 1,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Multiply with experts in Triton, [S, N], or with a gate [S, N / 2].

    Args:
        rows: S.
        plan: `plan_tiles` for `config.block_m`.
        chosen: assignments that share a row of x.
    """
    _, stored, k = weight.q.shape
    n = stored // 2 if has_gate else stored
    assert n % (config.block_n * (1 if has_gate else 2)) == 0 and BLOCK % config.block_n == 0
    out = torch.empty(rows, n, dtype=dtype, device=weight.q.device)
    tiles = (plan.numel() - rows) // 3
    columns = stored // (2 * config.block_n)
    partial, counters = partial_sums(tiles * columns, config, out)
    launch(
        fp8_products_triton.experts_kernel,
        (columns * config.split_k, tiles),
        out,
        x.q,
        x.scale,
        plan,
        plan[rows:],
        weight.q,
        weight.scale,
        partial,
        counters,
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
        WX=config.wx,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out


def fits(config: Fp8Config, device: torch.device) -> bool:
    """Return whether the stages of a configuration go into shared memory."""
    return config.stage_bytes() * config.num_stages <= DeviceLimits.of(device).shared_bytes


def reference(
    x: QuantisedRows,
    weight: Fp8Weight,
    index_S: Tensor | None = None,
    *,
    has_gate: bool = False,
    chosen: int = 1,
) -> Tensor:
    """Compute the products in float32 from the same quantised numbers, one expert after the other.

    Without `index_S` the weight is one matrix.
    """
    rows = x.dequantise()
    if index_S is None:
        return F.linear(rows, weight.dequantise())
    row_S = torch.arange(len(index_S), device=index_S.device) // chosen
    out = torch.empty(len(index_S), weight.q.shape[1], device=index_S.device)
    for expert in index_S.unique().tolist():
        own = index_S == expert
        out[own] = F.linear(rows[row_S[own]], weight.expert(expert).dequantise())
    if has_gate:
        gate, up = out.chunk(2, dim=1)
        return F.silu(gate) * up
    return out
