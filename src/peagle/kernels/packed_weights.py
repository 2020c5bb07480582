"""Weights as quantised checkpoints store them, and how they unpack, in plain torch.

    W[n, k] = scale[n // rows, k // inputs] * (q[n, k] - zero[n // rows, k // inputs])

"plain" weights have no scale. "fp8" is float8_e4m3fn and "int8" is int8, neither with a zero.
"int4" holds q from 0 to 15. "mxfp4" holds e2m1 numbers, and scales 2^(s - 127) of 32 inputs (the
Microscaling Formats specification of the Open Compute Project, version 1.0). The two 4-bit formats
pack two numbers into a byte, the one of the even input in the low half.

Shapes: E experts (left out of dense layers), N outputs, K inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

Format = Literal["plain", "fp8", "int8", "int4", "mxfp4"]
FORMATS: tuple[str, ...] = get_args(Format)
HALF_BYTE_FORMATS = ("int4", "mxfp4")
MX_INPUTS = 32  # inputs of one scale of "mxfp4"
MX_WORD = 4 * MX_INPUTS  # inputs of the four scales in an int32
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """The weight of a linear layer, or of all experts of a layer.

    Attributes:
        data: [E, N, K], or [E, N, K / 2] uint8 in a 4-bit format; rows contiguous.
        format: how `data` is read.
        scale: float32 [E, N / rows, K / inputs], rounded up; of "mxfp4" int32 [E, N, K / 128] of
            `mx_words`; None for "plain".
        zero: uint8, with the shape and the strides of the scale, for "int4"; None: 8 everywhere.
        block: rows and inputs that share a scale.
    """

    data: Tensor
    format: Format = "plain"
    scale: Tensor | None = None
    zero: Tensor | None = None
    block: tuple[int, int] = (1, 1)

    @property
    def num_inputs(self) -> int:
        """K."""
        return self.data.shape[-1] * (2 if self.format in HALF_BYTE_FORMATS else 1)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        tensors = (self.data, self.scale, self.zero)
        return sum(t.numel() * t.itemsize for t in tensors if t is not None)

    def unpack(self, dtype: torch.dtype) -> Tensor:
        """Compute the weight [E, N, K], in float32 and then rounded to `dtype`."""
        if self.scale is None:
            return self.data.to(dtype)
        values = _unpacked(self.data, self.format)
        scale = self.scale
        if self.format == "mxfp4":
            scale = torch.exp2(scale.contiguous().view(torch.uint8).float() - 127)
        if self.format == "int4":
            values = values - (8 if self.zero is None else self._spread(self.zero.float()))
        return (values * self._spread(scale)).to(dtype)

    def _spread(self, per_block: Tensor) -> Tensor:
        """Repeat the values of blocks for every weight, [E, N, K]."""
        rows, inputs = self.block
        spread = per_block.repeat_interleave(rows, -2).repeat_interleave(inputs, -1)
        return spread[..., : self.data.shape[-2], : self.num_inputs]


def _unpacked(data: Tensor, format: Format) -> Tensor:
    """The stored numbers q in float32, [E, N, K]."""
    if format not in HALF_BYTE_FORMATS:
        return data.float()
    q = torch.stack((data & 0xF, data >> 4), -1).flatten(-2).long()
    if format == "int4":
        return q.float()
    values = torch.tensor(_E2M1, device=data.device)
    return torch.where(q < 8, values[q & 7], -values[q & 7])


def mx_words(scale: Tensor) -> Tensor:
    """Put scales of "mxfp4", four of a row at a time, into words that kernels load at once.

    Args:
        scale: uint8 [..., N, K / 32], as published.

    Returns:
        int32 [..., N, K / 128], rounded up, the first scale in the low byte; all words of the same
        inputs lie together.
    """
    padded = torch.nn.functional.pad(scale, (0, -scale.shape[-1] % 4)).contiguous()
    return padded.view(torch.int32).mT.contiguous().mT


def pack_mxfp4(weight: Tensor) -> PackedWeight:
    """Quantise [..., N, K] to "mxfp4": the largest magnitude of 32 inputs decides their scale."""
    groups = weight.float().unflatten(-1, (-1, MX_INPUTS))
    largest = groups.abs().amax(-1)
    exponent = torch.floor(torch.log2(largest.clamp_min(2.0**-126))) - 2
    values = torch.tensor(_E2M1, device=weight.device)
    scaled = (groups * torch.exp2(-exponent)[..., None]).flatten(-2)
    q = (scaled.abs()[..., None] - values).abs().argmin(-1).to(torch.uint8)
    q |= (scaled < 0).to(torch.uint8) << 3
    data = q[..., ::2] | q[..., 1::2] << 4
    scale = mx_words((exponent + 127).to(torch.uint8))
    return PackedWeight(data, "mxfp4", scale, block=(1, MX_INPUTS))


def pack_fp8(weight: Tensor, block: tuple[int, int]) -> PackedWeight:
    """Quantise [..., N, K] to "fp8" with a float32 scale for each block."""
    q, scale = _scaled(weight, block, torch.finfo(torch.float8_e4m3fn).max)
    return PackedWeight(q.to(torch.float8_e4m3fn), "fp8", scale, block=block)


def pack_int8(weight: Tensor, block: tuple[int, int]) -> PackedWeight:
    """Quantise [..., N, K] to "int8", rounded to nearest, with a float32 scale for each block."""
    q, scale = _scaled(weight, block, 127)
    return PackedWeight(q.round().to(torch.int8), "int8", scale, block=block)


def pack_int4(weight: Tensor, group: int) -> PackedWeight:
    """Quantise [..., N, K] to "int4" around 8, rounded to nearest, with a scale for each group."""
    q, scale = _scaled(weight, (1, group), 7)
    q = (q.round() + 8).to(torch.uint8)
    return PackedWeight(q[..., ::2] | q[..., 1::2] << 4, "int4", scale, block=(1, group))


def _scaled(weight: Tensor, block: tuple[int, int], largest: float) -> tuple[Tensor, Tensor]:
    """The weight over its blocks' scales, up to `largest`, and the scales."""
    (n, k), (rows, inputs) = weight.shape[-2:], block
    padding = (0, -k % inputs, 0, -n % rows)
    padded = torch.nn.functional.pad(weight.float(), padding)
    blocks = padded.unflatten(-1, (-1, inputs)).unflatten(-3, (-1, rows))
    scale = (blocks.abs().amax((-1, -3)) / largest).clamp_min(torch.finfo(torch.float32).tiny)
    spread = scale.repeat_interleave(rows, -2).repeat_interleave(inputs, -1)
    return weight.float() / spread[..., :n, :k], scale
