"""Parameters and references of FP8 products, which are candidates beside the engine's own calls.

    out = dequantised(x) dequantised(W)^T,  with silu(gate) * up behind it for gate and up

The products are those of `peagle.kernels.linear.fp8_linear` and `fp8_experts`.

Shapes: M rows of x, S assignments of rows to experts, N outputs, K inputs, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.kernels.launch import DeviceLimits
from peagle.kernels.linear.fp8_activations import BLOCK, QuantisedRows
from peagle.kernels.linear.fp8_linear import Fp8Config, split_for

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
