"""The interface of attention over a paged KV cache.

Shapes: T packed query tokens of B sequences (ragged), Hq query heads, Hkv key/value heads, d head
size, M blocks a sequence.
"""

import math
from dataclasses import dataclass
from typing import Protocol, Required, TypedDict, Unpack

import numpy as np
import torch
from torch import Tensor

ALL_BEFORE = -1  # see `TreeMask`


@dataclass(frozen=True, slots=True)
class TreeMask:
    """The rows of a pass that each row sees, where the rows of a sequence are a tree.

    A row sees all of the context before the tree; of the rows of the tree it sees the rows on its
    path. Sliding windows count positions, not slots.

    Attributes:
        visible_T: int64, bit i says that a token sees row i of the tree of its sequence; a tree
            has at most 64 rows. ALL_BEFORE: it sees its own row and all before it, as in a prompt.
        positions_T: int64, position of each token: the root's position plus the token's depth.
        rows_before: rows of each tree that earlier passes have written; those of this pass follow.
            No window hides them.
    """

    visible_T: Tensor
    positions_T: Tensor
    rows_before: int = 0


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """The places of a pass's queries in the batch and of their keys in the cache, from `Passes`.

    Attributes:
        query_start_loc: int64 [B+1], first row of each sequence in the packed batch.
        seq_lens_B: int64, context of each sequence including this pass; its queries are the last
            positions of the context.
        block_tables_BM: int64, KV blocks of each sequence in order.
        slots_T: int64, KV slot that each token writes; -1 writes nothing.
        max_query_len, max_seq_len: bounds known to the host.
        context_starts_B: int64, first visible position of each context; None shows all.
        tree: the rows of the pass that each query sees; None: all before it.
    """

    query_start_loc: Tensor
    seq_lens_B: Tensor
    block_tables_BM: Tensor
    slots_T: Tensor
    max_query_len: int
    max_seq_len: int
    context_starts_B: Tensor | None = None
    tree: TreeMask | None = None


class LayerKVCache:
    """Keys and values of one layer, two allocations of [num_blocks + 1, block_size, Hkv, d].

    The last block is scrap: it takes the keys and values that have no slot, and nothing reads it.

    Attributes:
        keys, values: in a type of 8 bits they hold key / key_scale and value / value_scale.
        key_scale, value_scale: 1 in other types.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        scales: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        shape = (num_blocks + 1, block_size, num_kv_heads, head_dim)
        self.block_size = block_size
        self.key_scale, self.value_scale = scales
        self.keys, self.values = (_zeros(shape, dtype, device) for _ in range(2))

    def wipe(self, blocks: list[int]) -> None:
        """Set keys and values of some blocks to zero."""
        for x in (self.keys, self.values):
            as_bytes(x)[blocks] = 0

    @staticmethod
    def bytes_per_block(
        block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> int:
        """Return the bytes of keys and values of one block of one layer."""
        return 2 * block_size * num_kv_heads * head_dim * dtype.itemsize


def as_bytes(x: Tensor) -> Tensor:
    """Return 8-bit floats as bytes, which torch can index on every device; others as they are."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def as_stored(x: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """Return x as a cache of a type stores it: in 8 bits x / scale, cut to the largest number."""
    if dtype.itemsize > 1:
        return x
    limit = torch.finfo(dtype).max  # beyond it there is only NaN
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * (1.0 / scale)).clamp(-limit, limit).to(dtype)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros; numpy's take no memory on a CPU before they are written, torch's do."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(memory).view(dtype).view(shape)


class ScoreOptions(TypedDict, total=False):
    """How a layer's attention makes weights of scores.

    Attributes:
        scaling: factor on the scores.
        sinks: [Hq], one more score of each head, which takes its share of the softmax and gives no
            value.
        softcap: c bends each score s to c * tanh(s / c), before sinks are added.
    """

    scaling: Required[float]
    sinks: Tensor | None
    softcap: float | None


class Prepared(Protocol):
    """One pass, ready to run: every layer calls it once."""

    def __call__(
        self,
        query_THd: Tensor,
        key_THd: Tensor,
        value_THd: Tensor,
        cache: LayerKVCache | None,
        *,
        sliding_window: int | None = None,
        **options: Unpack[ScoreOptions],
    ) -> Tensor:
        """Write this layer's keys and values, then attend causally; returns [T, Hq, d].

        Args:
            query_THd: [T, Hq, d]; key_THd, value_THd: [T, Hkv, d], all after RoPE. Layers of one
                pass may differ in Hkv and d.
            sliding_window: W keeps keys with q_pos - k_pos < W; None keeps all.
        """
        ...


class PreparedPaged(Prepared, Protocol):
    """One pass over the paged KV cache."""

    def write(self, key_THd: Tensor, value_THd: Tensor, cache: LayerKVCache) -> None:
        """Write a layer's keys and values alone, both [T, Hkv, d]."""
        ...


class AttentionBackend(Protocol):
    """Prepares passes: it computes the common data of all layers once."""

    def prepare(self, metadata: AttentionMetadata) -> PreparedPaged: ...
