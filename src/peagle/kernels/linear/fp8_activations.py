"""Activations in FP8, with a scale for each row and 128 inputs, for products with tiled weights.

    q = x / scale, scale = the largest magnitude of the 128 inputs / 448

Shapes: M rows, K inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.kernels.launch import launch, overlapping, power_of_two

BLOCK = 128  # inputs, and rows of a weight, that share a scale
FP8 = torch.float8_e4m3fn
_MANY_BLOCKS = 4096  # of 128 inputs: enough for programs that take 16
_FEW_INPUTS = 2048  # of a row, which four warps norm
_SMALLEST = 1e-10  # magnitude that counts as the largest
_LIBRARY_ROWS = 16  # the library's rows of scales begin at multiples of 16 bytes


@dataclass(frozen=True, slots=True)
class QuantisedRows:
    """Activations in FP8.

    Attributes:
        q: [M, K], and after them rows without values, up to a multiple of what the library takes.
        scale: float32 [K / 128, rows of q].
        num_rows: M.
        is_tiled: the inputs of a row are in the order of `tiled_inputs`.
    """

    q: Tensor
    scale: Tensor
    num_rows: int
    is_tiled: bool = False

    def dequantise(self) -> Tensor:
        """Return the numbers in float32, [M, K], in the order of x."""
        numbers = (self.q.float() * self.scale.T.repeat_interleave(BLOCK, 1))[: self.num_rows]
        if not self.is_tiled:
            return numbers
        return numbers[:, tiled_inputs(numbers.shape[1]).argsort().to(numbers.device)]


def tiled_inputs(k: int) -> Tensor:
    """Return the inputs of a row, int64 [K], in the order in which tiled FP8 weights lie.

    `packed_weights` says which inputs a word has. In either half of a word the number of pair 1 is
    in the low byte, that of pair 0 in the high one. Sums over K come out the same if the inputs of
    x are in the same order.
    """
    place = torch.arange(k)
    byte, group, thread = place % 4, place // 4 % 4, place // 16 % 4
    return place // 64 * 64 + 16 * group + 8 * (1 - byte % 2) + 2 * thread + byte // 2


def quantise(x: Tensor, *, is_tiled: bool = False, is_gated: bool = False) -> QuantisedRows:
    """Quantise rows in Triton, in one pass. NaN or infinity in a row changes no other row.

    Args:
        x: [M, K], contiguous; K is a multiple of 128. If `is_gated`, [M, 2K], all gates of a row
            first: silu(gate) * up is quantised.
        is_tiled: put the inputs of a row into the order of `tiled_inputs`.
    """
    from peagle.kernels.linear import fp8_activations_triton

    num_rows, k = x.shape[0], x.shape[1] // (2 if is_gated else 1)
    assert k % BLOCK == 0 and x.is_contiguous()
    q, scale = _empty(x, k)
    if num_blocks := num_rows * k // BLOCK:
        of_program = 16 if num_blocks > _MANY_BLOCKS else 4
        launch(
            fp8_activations_triton.quantise_kernel,
            (-(-num_blocks // of_program),),
            q,
            scale,
            x,
            num_blocks,
            k,
            scale.stride(0),
            BLOCKS=of_program,
            SMALLEST=_SMALLEST,
            LARGEST=torch.finfo(FP8).max,
            GATED=is_gated,
            TILED=is_tiled,
            **overlapping(x.device),
            num_warps=4,
        )
    return QuantisedRows(q, scale, num_rows, is_tiled)


def _empty(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return q and scale for the rows of x, without values."""
    padded = x.shape[0] + -x.shape[0] % _LIBRARY_ROWS
    q = x.new_empty(padded, k, dtype=FP8)
    return q, x.new_empty(k // BLOCK, padded, dtype=torch.float32)


@torch.library.custom_op(
    "peagle::quantise",
    mutates_args=(),
    schema="(Tensor x, bool is_gated) -> (Tensor, Tensor)",
)
def _quantise(x: Tensor, is_gated: bool) -> tuple[Tensor, Tensor]:
    rows = quantise(x.contiguous(), is_gated=is_gated)
    return rows.q, rows.scale


@_quantise.register_fake
def _(x: Tensor, is_gated: bool) -> tuple[Tensor, Tensor]:
    return _empty(x, x.shape[1] // (2 if is_gated else 1))


@torch.library.custom_op(
    "peagle::quantise_normed",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)",
)
def quantise_normed(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Quantise x / sqrt(mean(x^2) + eps) * weight in Triton, row by row; q and scale.

    Args:
        x: [M, K], K a multiple of 128; weight: [K].
        eps: of the RMSNorm.
    """
    from peagle.kernels.linear import fp8_activations_triton

    x = x.contiguous()
    num_rows, k = x.shape
    q, scale = _empty(x, k)
    if num_rows:
        launch(
            fp8_activations_triton.quantise_normed_kernel,
            (num_rows,),
            q,
            scale,
            x,
            weight,
            k,
            scale.stride(0),
            eps,
            BLOCKS=power_of_two(k // BLOCK),
            SMALLEST=_SMALLEST,
            LARGEST=torch.finfo(FP8).max,
            **overlapping(x.device),
            num_warps=4 if k <= _FEW_INPUTS else 8,
        )
    return q, scale


@quantise_normed.register_fake
def _(x: Tensor, *others: object) -> tuple[Tensor, Tensor]:
    return _empty(x, x.shape[1])
