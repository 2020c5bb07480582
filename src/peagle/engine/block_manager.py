"""Ownership of KV blocks, and prefixes that sequences share."""

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice

from peagle.engine.sequence import Sequence

# Suffixes of the hashes of blocks that the drafter has not read, or read without their prefix.
_UNREAD, _IN_PART = b"unread", b"in part"


class BlockManager:
    """Hands out KV blocks; target and drafter layers share the block ids.

    A full block whose KV is settled is *published* under the hash of `kv_identity`, of all tokens
    up to its end and of the next token. Sequences that begin with these tokens share the block.
    When its owners have gone it stays cached until a sequence needs the space: the least recently
    used free block is taken first.

    The next token counts because the drafter's slot p reads token p + 1: equal blocks before
    different tokens hold different drafter KV. Blocks that the drafter has not read, or has read
    without their prefix, also hold different drafter KV: they have hashes of their own.

    Args:
        kv_identity: type and scales of the KV, by which it differs between engines.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        kv_identity: bytes = b"",
        enable_prefix_caching: bool = True,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._root = hashlib.sha256(kv_identity).digest()
        # The block that is taken first comes first.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._num_owners: Counter[int] = Counter()
        self._published: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    @property
    def num_free_blocks(self) -> int:
        """Return the number of blocks without an owner; some may still be published."""
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def match(self, sequence: Sequence, *, unread_until: int = 0) -> list[int]:
        """Return published blocks that hold the sequence's beginning without its last token.

        A sequence that keeps its K gets no block that the drafter has read without its prefix: its
        drafts must not depend on other sequences.

        Args:
            unread_until: also take blocks before this position that the drafter has not read.
        """
        blocks: list[int] = []
        if self.enable_prefix_caching:
            for index in range((len(sequence) - 1) // self.block_size):
                key = self._hash(sequence, index)
                block = self._published.get(key)
                if block is None and not sequence.fixes_k:
                    block = self._published.get(key + _IN_PART)
                if block is None and (index + 1) * self.block_size <= unread_until:
                    block = self._published.get(key + _UNREAD)
                if block is None:
                    break
                blocks.append(block)
        return blocks

    def read_from(self, matched: list[int]) -> int:
        """Return the position from which on the drafter has read these blocks of a sequence.

        It is 0 if the drafter has read all of them, each with its whole prefix.
        """
        first = 0
        for index, block in enumerate(matched):
            kind = self._hash_of[block][len(self._root) :]
            if kind == _UNREAD:
                first = (index + 1) * self.block_size
            elif kind == _IN_PART and not first:
                first = index * self.block_size
        return first

    def can_admit(self, matched: list[int], num_tokens: int, num_reserved: int = 0) -> bool:
        """Return whether a sequence that shares `matched` gets blocks for `num_tokens` tokens.

        `num_reserved` further blocks must stay free.
        """
        num_new = self.blocks_for(num_tokens) - len(matched)
        num_woken = sum(block in self._free for block in matched)
        return num_new + num_woken + num_reserved <= self.num_free_blocks

    def admit(self, sequence: Sequence, matched: list[int], num_tokens: int) -> None:
        """Give a sequence its shared blocks and new ones; `can_admit` must hold."""
        assert not sequence.block_table, "the sequence has blocks already"
        for block in matched:
            self._free.pop(block, None)
            self._num_owners[block] += 1
        sequence.block_table = list(matched)
        sequence.num_published_blocks = sequence.num_read_blocks = len(matched)
        assert self.extend(sequence, num_tokens), "not enough free blocks"

    def holds(self, sequence: Sequence, num_tokens: int) -> bool:
        """Return whether `num_tokens` tokens fit into the sequence's blocks."""
        return self.blocks_for(num_tokens) <= len(sequence.block_table)

    def extend(self, sequence: Sequence, num_tokens: int) -> bool:
        """Add blocks until `num_tokens` tokens fit; return False, unchanged, if they cannot."""
        num_new = self.blocks_for(num_tokens) - len(sequence.block_table)
        if num_new <= 0:
            return True
        if num_new > self.num_free_blocks:
            return False
        for _ in range(num_new):
            block, _ = self._free.popitem(last=False)
            self._unpublish(block)
            self._num_owners[block] = 1
            sequence.block_table.append(block)
        return True

    def publish(self, sequence: Sequence, num_tokens: int, num_read: int) -> None:
        """Share the full blocks of the first `num_tokens` tokens, whose KV is settled.

        The sequence must have one token more.

        Args:
            num_read: the drafter has read from `drafter_start` to before this position; without a
                drafter all tokens count as read.
        """
        assert num_tokens < len(sequence), "the token after the last block is part of its hash"
        if not self.enable_prefix_caching or sequence.has_old_drafter_kv:
            return
        start, num_read_blocks = sequence.drafter_start, num_read // self.block_size
        first = sequence.num_published_blocks
        if num_read_blocks > sequence.num_read_blocks:
            first = sequence.num_read_blocks  # the drafter has read some since
        for index in range(first, num_tokens // self.block_size):
            block, key = sequence.block_table[index], self._hash(sequence, index)
            if index < num_read_blocks and index * self.block_size >= start:
                if self._hash_of.get(block) == key + _UNREAD:
                    self._unpublish(block)
                key += _IN_PART if start else b""
            else:
                key += _UNREAD
            if key not in self._published and block not in self._hash_of:
                self._published[key] = block
                self._hash_of[block] = key
            sequence.num_published_blocks = index + 1
        settled = min(num_read_blocks, sequence.num_published_blocks)
        sequence.num_read_blocks = max(sequence.num_read_blocks, settled)

    def free(self, sequence: Sequence) -> None:
        """Take back the sequence's blocks; published ones stay until the space is needed."""
        # The end of a prefix is useless without its beginning, so it is reused first. Without a
        # prefix cache the order stays: attention is faster over neighbouring blocks.
        table = sequence.block_table
        for block in reversed(table) if self.enable_prefix_caching else table:
            self._num_owners[block] -= 1
            if self._num_owners[block] == 0:
                del self._num_owners[block]
                self._free[block] = None
        sequence.block_table = []

    @contextmanager
    def borrowed(self, num_blocks: int) -> Iterator[None]:
        """Move the first `num_blocks` free blocks to the front again at the end.

        Repeated work that keeps nothing then displaces cached prefixes only once.
        """
        first = list(islice(self._free, num_blocks))
        yield
        for block in reversed(first):
            self._free.move_to_end(block, last=False)

    def withdraw(self, sequence: Sequence) -> list[int]:
        """Unpublish the blocks that a sequence alone owns; return them."""
        own = [block for block in sequence.block_table if self._num_owners[block] == 1]
        for block in own:
            self._unpublish(block)
        return own

    def unpublish_all(self) -> None:
        """Let no later sequence share a block that is published by now."""
        self._published.clear()
        self._hash_of.clear()

    def _unpublish(self, block: int) -> None:
        key = self._hash_of.pop(block, None)
        if key is not None:
            del self._published[key]

    def _hash(self, sequence: Sequence, index: int) -> bytes:
        """Return the hash of the tokens up to one after block `index`; it cannot be forged."""
        hashes = sequence.block_hashes
        while len(hashes) <= index:
            start = len(hashes) * self.block_size
            tokens = array("q", sequence.token_ids[start : start + self.block_size + 1])
            parent = hashes[-1] if hashes else self._root + sequence.cache_salt
            hashes.append(hashlib.sha256(parent + tokens.tobytes()).digest())
        return hashes[index]
