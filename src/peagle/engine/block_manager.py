"""Who owns which KV block."""

from __future__ import annotations

from collections import deque

from peagle.engine.sequence import Sequence


class BlockManager:
    """Hands out KV blocks; target and drafter layers share the block ids.

    Args:
        num_blocks: blocks of the cache.
        block_size: token slots of a block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free: deque[int] = deque(range(num_blocks))

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def can_allocate(self, num_tokens: int) -> bool:
        """Whether enough blocks are free for `num_tokens` tokens."""
        return self.blocks_for(num_tokens) <= self.num_free_blocks

    def allocate(self, sequence: Sequence, num_tokens: int) -> None:
        """Give `sequence` blocks for `num_tokens` tokens; `can_allocate` must hold."""
        assert not sequence.block_table, "the sequence has blocks already"
        assert self.can_allocate(num_tokens), "not enough free blocks"
        sequence.block_table = [self._free.popleft() for _ in range(self.blocks_for(num_tokens))]

    def free(self, sequence: Sequence) -> None:
        """Take the sequence's blocks back."""
        self._free.extend(sequence.block_table)
        sequence.block_table = []
