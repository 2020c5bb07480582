"""Activations in FP8, with a scale for each row and 128 inputs, for products with tiled weights.

    q = x / scale, scale = the largest magnitude of the 128 inputs / 448

Shapes: M rows, K inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.kernels.launch import launch, overlapping

BLOCK = 128  # inputs, and rows of a weight, that share a scale
FP8 = torch.float8_e4m3fn
_QUANTISED_ROWS = 4  # rows of one program
_LIBRARY_ROWS = 16  # the library's rows of scales begin at multiples of 16 bytes


@dataclass(frozen=True, slots=True)
class QuantisedRows:
    """Activations in FP8.

    Attributes:
        q: [M, K], the inputs of a row in the order of `tiled_inputs`; and after them rows without
            values, up to a multiple of what the library takes.
        scale: float32 [K / 128, rows of q], which the library reads as [rows of q, K / 128].
        num_rows: M.
    """

    q: Tensor
    scale: Tensor
    num_rows: int

    def in_tiled_order(self) -> Tensor:
        """Return the numbers in float32, [M, K], in the order of `tiled_inputs`."""
        return (self.q.float() * self.scale.T.repeat_interleave(BLOCK, 1))[: self.num_rows]

    def dequantise(self) -> Tensor:
        """Return the numbers in float32, [M, K], in the order of x."""
        numbers = self.in_tiled_order()
        return numbers[:, tiled_inputs(numbers.shape[1]).argsort().to(numbers.device)]


def tiled_inputs(k: int) -> Tensor:
    """Return the inputs of a row, int64 [K], in the order in which products take tiled FP8 weights.

    A kernel turns each word of `packed_weights` into its four numbers, one a byte: in either half
    of the word the number of pair 1 is in the low byte, that of pair 0 in the high one. The words
    of one group of a tile follow each other: that is how the threads of `packed_gluon` hold them.
    Sums over K come out the same if the inputs of x are in the same order.
    """
    place = torch.arange(k)
    byte, thread = place % 4, place // 4 % 4
    return place // 16 * 16 + 8 * (1 - byte % 2) + 2 * thread + byte // 2


def quantise(x: Tensor) -> QuantisedRows:
    """Quantise rows in Triton, in one pass. NaN or infinity in a row changes no other row.

    Args:
        x: [M, K], contiguous; K is a multiple of 128.
    """
    from peagle.kernels.linear import fp8_linear_triton

    num_rows, k = x.shape
    assert k % BLOCK == 0 and x.is_contiguous()
    padded = -(-num_rows // _LIBRARY_ROWS) * _LIBRARY_ROWS
    q = torch.empty(padded, k, dtype=FP8, device=x.device)
    scale = torch.empty(k // BLOCK, padded, dtype=torch.float32, device=x.device)
    if num_rows:
        launch(
            fp8_linear_triton.quantise_kernel,
            (-(-num_rows // _QUANTISED_ROWS), k // BLOCK),
            q,
            scale,
            x,
            num_rows,
            k,
            padded,
            ROWS=_QUANTISED_ROWS,
            LARGEST=torch.finfo(FP8).max,
            **overlapping(x.device),
            num_warps=4,
        )
    return QuantisedRows(q, scale, num_rows)
