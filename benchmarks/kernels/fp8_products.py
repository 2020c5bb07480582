"""The reference of products of FP8 activations, which are candidates beside the engine's own calls.

    out = dequantised(x) dequantised(W)^T,  with silu(gate) * up behind it for gate and up

Shapes: M rows of x, S assignments of rows to experts, N outputs, K inputs, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.kernels.linear.fp8_activations import BLOCK, QuantisedRows


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
