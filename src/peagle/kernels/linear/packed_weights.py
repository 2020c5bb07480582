"""Weights as quantised checkpoints store them, and how they unpack, in plain torch.

    W[n, k] = scale[n // rows, k // inputs] * (q[n, k] - zero[n // rows, k // inputs])

"plain" weights have no scale. "fp8" is float8_e4m3fn and "int8" is int8, neither with a zero.
"int4" holds q from 0 to 15. "mxfp4" holds e2m1 numbers, and scales 2^(s - 127) of 32 inputs (the
Microscaling Formats specification of the Open Compute Project, version 1.0).

"int4", "mxfp4" and "fp8" put pairs of numbers into a word so that a kernel takes two numbers at a
time into the halves of a register. The first number of a pair is in the low half of the word, the
second, in the same bits, in the high half. `_BIT_MOVES` has the bits.

"int4" has pair i in bits 4i to 4i + 3. Of 32 inputs, word w has inputs 4w to 4w + 3 in the pairs 0
and 1, and 16 + 4w to 16 + 4w + 3 in the pairs 2 and 3.

"mxfp4" has sign and magnitude of the pairs 0, 1 and 2 at the bits where bfloat16 has them, 15 and 8
to 6, shifted to the right by 0, 3 and 6; pair 3 has the bits 14, 13, 11 and 10.

"fp8" has pair 0 in the high bytes of the halves and pair 1 in the low ones, bit for bit: products
of FP8 activations take them as they lie.

The bytes of "mxfp4" and "fp8" lie in tiles of 64 rows of 64 bytes (`TILE`), which programs read
whole: memory gives pieces of single rows more slowly. The matrix unit takes the 16 bytes of words
4t to 4t + 3 of a row from thread t of four. Of 128 inputs of "mxfp4", word 4t + g has in pair i the
inputs 2t and 2t + 1 of the i-th 8 of the g-th 32; of 64 inputs of "fp8", word 4t + g has in pair i
the same two of the i-th 8 of the g-th 16. Inputs are filled up with zeros to multiples of 128.

Shapes: E experts (left out of dense layers), N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

Format = Literal["plain", "fp8", "int8", "int4", "mxfp4"]
FORMATS: tuple[str, ...] = get_args(Format)
FOUR_BIT_FORMATS = ("int4", "mxfp4")
TILED_FORMATS = ("fp8", "mxfp4")
TILE = (64, 64)  # rows and bytes of each of a tile, 4,096 bytes that lie together
STEP = 128  # inputs that kernels of tiled formats take at once
_SCALE_FACTORS = tuple(1 - 0.02 * i for i in range(21))
MX_INPUTS = 32  # inputs of one scale of "mxfp4"
MAX_MX_SCALE = 128  # times 2, more than any layer needs: kernels rely on it; 255 is no number
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Of each pair, the bits of a number by masks, and how far each goes to the left in the half word.
_BIT_MOVES: dict[str, Sequence[Sequence[tuple[int, int]]]] = {
    "int4": [[(0xF, 4 * pair)] for pair in range(4)],
    "mxfp4": [
        [(0x8, 12), (0x7, 6)],
        [(0x8, 9), (0x7, 3)],
        [(0x8, 6), (0x7, 0)],
        [(0xC, 11), (0x3, 10)],
    ],
    "fp8": [[(0xFF, 8)], [(0xFF, 0)]],
}


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """The weight of a linear layer, or of all experts of a layer.

    Attributes:
        data: [E, N, K], or uint8 [E, N, K / 2] of "int4"; rows contiguous. Of tiled formats uint8
            [E, rows of tiles, tiles of a row, 64, 64].
        format: how `data` is read.
        scale: float32 [E, N / rows, K / inputs], rounded up; None for "plain". Of "mxfp4" int32
            [E, N, K / 128], rounded up: s of four times 32 inputs, the first in the low byte.
        zero: uint8, with the shape and the strides of the scale, for "int4"; None: 8 everywhere.
        block: rows and inputs that share a scale.
        padded: outputs and inputs that fill up the last tiles.
    """

    data: Tensor
    format: Format = "plain"
    scale: Tensor | None = None
    zero: Tensor | None = None
    block: tuple[int, int] = (1, 1)
    padded: tuple[int, int] = (0, 0)

    @property
    def num_outputs(self) -> int:
        """Return N, the number of outputs of a matrix, without padding."""
        if self.is_tiled:
            return self.data.shape[-4] * TILE[0] - self.padded[0]
        return self.data.shape[-2]

    @property
    def num_inputs(self) -> int:
        """Return K, the number of inputs of a matrix, without padding."""
        per_byte = 2 if self.format in FOUR_BIT_FORMATS else 1
        if self.is_tiled:
            return self.data.shape[-3] * TILE[1] * per_byte - self.padded[1]
        return self.data.shape[-1] * per_byte

    @property
    def is_tiled(self) -> bool:
        """Return whether `data` lies in tiles."""
        return self.format in TILED_FORMATS

    @property
    def row_stride(self) -> int:
        """Return the numbers of `data` from a row, or from a tile of rows, to the next."""
        return self.data.stride(-4 if self.is_tiled else -2)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all tensors."""
        tensors = (self.data, self.scale, self.zero)
        return sum(t.numel() * t.itemsize for t in tensors if t is not None)

    @property
    def num_experts(self) -> int:
        """Return E, the number of matrices."""
        return self.data.shape[0]

    def expert(self, index: int) -> PackedWeight:
        """Return the weight of one expert, [N, K]."""
        return self._each(lambda tensor: tensor[index])

    def with_rows(self, order: Callable[[Tensor], Tensor]) -> PackedWeight:
        """Return the weight with its rows in another order.

        Args:
            order: puts the rows, [E, N, ...], into the order.
        """
        weight = self._rowwise()
        if not self.is_tiled:
            return weight._each(order)
        data = _to_tiles(order(self._rows()))
        return replace(weight._each(order, keeps_data=True), data=data)

    @staticmethod
    def stack(weights: Sequence[PackedWeight]) -> PackedWeight:
        """Put weights [N, K] of one format and block together, [E, N, K]."""
        first = weights[0]
        assert all((w.format, w.block) == (first.format, first.block) for w in weights)
        return first._joined(weights, torch.stack)

    @staticmethod
    def concatenate(weights: Sequence[PackedWeight]) -> PackedWeight:
        """Put the rows of weights [N, K] of one format behind each other."""
        inputs = {w.block[1] if w.scale is not None else 0 for w in weights}
        assert len({w.format for w in weights}) == len(inputs) == 1
        rows = {w.block[0] for w in weights}
        if len(rows) > 1 or any(w.num_outputs % w.block[0] for w in weights):
            weights = [w._rowwise() for w in weights]
        first = weights[0]
        if not first.is_tiled:
            return first._joined(weights, torch.cat)
        outputs = sum(w.num_outputs for w in weights)
        data = _to_tiles(torch.cat([w._rows() for w in weights]))
        joined = first._joined(weights, torch.cat, keeps_data=True)
        return replace(joined, data=data, padded=(-outputs % TILE[0], first.padded[1]))

    def _rows(self) -> Tensor:
        """Return the bytes of a tiled format as rows, [E, N, bytes]."""
        return _from_tiles(self.data)[..., : self.num_outputs, :]

    def _rowwise(self) -> PackedWeight:
        """Return the same weight with a scale, and a zero if it has them, for every single row."""
        rows, inputs = self.block
        if self.scale is None or rows == 1:
            return self
        spread = self.scale.repeat_interleave(rows, -2)[..., : self.num_outputs, :]
        return replace(self, scale=spread, block=(1, inputs))

    def _each(
        self, change: Callable[[Tensor], Tensor], *, keeps_data: bool = False
    ) -> PackedWeight:
        def changed(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else _kept_strides(change(tensor), tensor)

        data = self.data if keeps_data else change(self.data)
        return replace(self, data=data, scale=changed(self.scale), zero=changed(self.zero))

    def _joined(
        self,
        weights: Sequence[PackedWeight],
        join: Callable[[list[Tensor]], Tensor],
        *,
        keeps_data: bool = False,
    ) -> PackedWeight:
        def joined(name: str) -> Tensor | None:
            tensors = [getattr(w, name) for w in weights]
            return None if tensors[0] is None else _kept_strides(join(tensors), tensors[0])

        data = self.data if keeps_data else join([w.data for w in weights])
        return replace(self, data=data, scale=joined("scale"), zero=joined("zero"))

    def unpack(self, dtype: torch.dtype) -> Tensor:
        """Compute the weight [E, N, K], in float32 and then rounded to `dtype`."""
        if self.scale is None:
            return self.data.to(dtype)
        scale = self.scale
        if self.format == "mxfp4":
            exponents = scale.contiguous().view(torch.uint8).float() - 127
            scale = torch.exp2(exponents)
            q = _from_words(self._rows(), "mxfp4")[..., : self.num_inputs].long()
            values = torch.tensor(_E2M1, device=q.device)[q & 7]
            values = torch.where(q < 8, values, -values)
        elif self.format == "fp8":
            values = self.fp8_numbers().float()
        elif self.format == "int4":
            zero = 8 if self.zero is None else self._spread(self.zero.float())
            values = _from_words(self.data, "int4").float() - zero
        else:
            values = self.data.float()
        return (values * self._spread(scale)).to(dtype)

    def fp8_numbers(self) -> Tensor:
        """Take the numbers of "fp8" out of the tiles, float8_e4m3fn [E, N, K], contiguous."""
        q = _from_words(self._rows(), "fp8")[..., : self.num_inputs]
        return q.contiguous().view(torch.float8_e4m3fn)

    def _spread(self, per_block: Tensor) -> Tensor:
        """Repeat the values of blocks for every weight, [E, N, K]."""
        rows, inputs = self.block
        spread = per_block.repeat_interleave(rows, -2).repeat_interleave(inputs, -1)
        return spread[..., : self.num_outputs, : self.num_inputs]


def _kept_strides(tensor: Tensor, like: Tensor) -> Tensor:
    """Return the tensor with its last two dimensions in memory in the order of `like`."""
    if like.stride(-2) == 1 and like.stride(-1) != 1:
        return tensor.mT.contiguous().mT
    return tensor.contiguous()


def _in_words(q: Tensor, format: Format) -> Tensor:
    """Put the inputs of [..., K] into the order of words, [..., words, pairs, places]."""
    if format == "int4":  # of 32: halves, words, pairs of a half, places
        words = q.unflatten(-1, (-1, 2, 4, 2, 2)).transpose(-4, -3)
        return words.flatten(-3, -2).flatten(-4, -3)
    # of tiles: groups, pairs, threads, places
    words = q.unflatten(-1, (-1, 4, len(_BIT_MOVES[format]), 4, 2)).movedim(-2, -4)
    return words.flatten(-5, -3)


def _in_order(words: Tensor, format: Format) -> Tensor:
    """Return the numbers in the order of the inputs: the inverse of `_in_words`."""
    if format == "int4":
        halves = words.unflatten(-2, (2, 2)).unflatten(-4, (-1, 4)).transpose(-4, -3)
        return halves.flatten(-5)
    return words.unflatten(-3, (-1, 4, 4)).movedim(-4, -2).flatten(-5)


def _to_words(q: Tensor, format: Format) -> Tensor:
    """Put the bits of numbers, uint8 [..., K], into words, as uint8 [..., bytes]."""
    numbers = _in_words(q, format)
    *words, _, places = numbers.shape
    halves = torch.zeros(*words, places, dtype=torch.int16, device=q.device)
    for pair, moves in enumerate(_BIT_MOVES[format]):
        for mask, left in moves:
            halves |= (numbers[..., pair, :] & mask).to(torch.int16) << left
    return halves.flatten(-2).view(torch.uint8)


def _from_words(data: Tensor, format: Format) -> Tensor:
    """Return the numbers of the words, one uint8 each: the inverse of `_to_words`."""
    halves = data.contiguous().view(torch.int16).unflatten(-1, (-1, 2))
    *words, places = halves.shape
    q = torch.zeros(*words, len(_BIT_MOVES[format]), places, dtype=torch.uint8, device=data.device)
    for pair, moves in enumerate(_BIT_MOVES[format]):
        for mask, left in moves:
            q[..., pair, :] |= (halves >> left & mask).to(torch.uint8)
    return _in_order(q, format)


def _to_tiles(rows: Tensor) -> Tensor:
    """Put the bytes of rows, [..., N, bytes], into tiles [..., N / 64, bytes / 64, 64, 64]; N is
    rounded up.
    """
    height, width = TILE
    padded = F.pad(rows, (0, 0, 0, -rows.shape[-2] % height))
    tiles = padded.unflatten(-1, (-1, width)).unflatten(-3, (-1, height))
    return tiles.transpose(-3, -2).contiguous()


def _from_tiles(data: Tensor) -> Tensor:
    """Return the rows of the tiles: the inverse of `_to_tiles`, with its padding left in."""
    return data.transpose(-3, -2).flatten(-2).flatten(-3, -2)


def _make_tiled(q: Tensor, format: Format, scale: Tensor, block: tuple[int, int]) -> PackedWeight:
    """Arrange the bits of numbers, uint8 [..., N, K], in tiles."""
    n, k = q.shape[-2:]
    padded = -n % TILE[0], -k % STEP
    data = _to_tiles(_to_words(F.pad(q, (0, padded[1])), format))
    return PackedWeight(data, format, scale, None, block, padded)


def make_mxfp4(q: Tensor, scale: Tensor) -> PackedWeight:
    """Arrange e2m1 numbers and their scales as kernels read them.

    Args:
        q: uint8 [..., N, K], numbers of 4 bits; K is a multiple of 32.
        scale: uint8 [..., N, K / 32], up to `MAX_MX_SCALE`.
    """
    assert int(scale.max()) <= MAX_MX_SCALE
    # 2^-127 becomes 2^-126, which is as small, and groups that are not there get 1.
    padded = F.pad(scale.clamp(min=1), (0, -scale.shape[-1] % 4), value=127).contiguous()
    words = padded.view(torch.int32).mT.contiguous().mT  # those of the same inputs lie together
    return _make_tiled(q, "mxfp4", words, (1, MX_INPUTS))


def make_fp8(q: Tensor, scale: Tensor, block: tuple[int, int]) -> PackedWeight:
    """Arrange e4m3 numbers as kernels read them.

    Args:
        q: float8_e4m3fn [..., N, K].
        scale: [..., N / rows, K / inputs], rounded up.
        block: rows and inputs that share a scale.
    """
    return _make_tiled(q.contiguous().view(torch.uint8), "fp8", scale.float(), block)


def make_int4(q: Tensor, scale: Tensor, zero: Tensor | None, group: int) -> PackedWeight:
    """Arrange integers from 0 to 15 and their scales as kernels read them.

    Args:
        q: uint8 [..., N, K]; K is a multiple of 32.
        scale: [..., N, K / group]; zero: uint8, likewise; None: 8 everywhere.
        group: inputs that share a scale.
    """
    scale = scale.float().mT.contiguous().mT
    zero = None if zero is None else zero.mT.contiguous().mT
    return PackedWeight(_to_words(q, "int4"), "int4", scale, zero, (1, group))


def pack_fp8(weight: Tensor, block: tuple[int, int]) -> PackedWeight:
    """Quantise [..., N, K] to "fp8" with a float32 scale for each block."""
    q, scale = _scaled(weight, block, torch.finfo(torch.float8_e4m3fn).max)
    return make_fp8(q.to(torch.float8_e4m3fn), scale, block)


def pack_int8(weight: Tensor, block: tuple[int, int]) -> PackedWeight:
    """Quantise [..., N, K] to "int8", rounded to nearest, with a float32 scale for each block."""
    q, scale = _scaled(weight, block, 127)
    return PackedWeight(q.round().to(torch.int8), "int8", scale, block=block)


def pack_int4(weight: Tensor, group: int) -> PackedWeight:
    """Quantise [..., N, K] to "int4" around 8, rounded to nearest, with a scale for each group."""
    scale = int4_scale(weight, group)
    groups = weight.float().unflatten(-1, (-1, group))
    q = (groups / scale.unsqueeze(-1)).round_().clamp_(-8, 7)
    return make_int4((q + 8).to(torch.uint8).flatten(-2), scale, None, group)


def int4_scale(weight: Tensor, group: int) -> Tensor:
    """Return the scales of `pack_int4`, float32 [..., N, K / group].

    Of the scales of `_SCALE_FACTORS` times the one that keeps the largest magnitude, a group takes
    that with the smallest sum of squared errors: with so few numbers a large one may be cut.
    """
    groups = weight.detach().float().unflatten(-1, (-1, group))
    largest = groups.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    scale, rounded = largest / 7, torch.empty_like(groups)
    least = torch.full_like(largest, torch.inf)
    for shrink in _SCALE_FACTORS:
        tried = largest * (shrink / 7)
        torch.div(groups, tried, out=rounded).round_().clamp_(-8, 7)
        error = rounded.mul_(tried).sub_(groups).square_().sum(-1, keepdim=True)
        scale = torch.where(error < least, tried, scale)
        least = torch.minimum(error, least)
    return scale.squeeze(-1)


def _scaled(weight: Tensor, block: tuple[int, int], largest: float) -> tuple[Tensor, Tensor]:
    """Return the weight over its blocks' scales, within `largest`, and the scales."""
    (n, k), (rows, inputs) = weight.shape[-2:], block
    padded = F.pad(weight.float(), (0, -k % inputs, 0, -n % rows))
    blocks = padded.unflatten(-1, (-1, inputs)).unflatten(-3, (-1, rows))
    scale = (blocks.abs().amax((-1, -3)) / largest).clamp_min(torch.finfo(torch.float32).tiny)
    spread = scale.repeat_interleave(rows, -2).repeat_interleave(inputs, -1)
    return weight.float() / spread[..., :n, :k], scale
