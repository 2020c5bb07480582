"""Triton kernel of slot moves; `kv_moves` launches it and documents its result."""

import triton
import triton.language as tl


@triton.jit
def move_slots_kernel(
    addresses_ptr,
    from_ptr,
    to_ptr,
    width,  # words of a slot
    DEPTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_W: tl.constexpr,
    WORD: tl.constexpr,  # bytes of a word
):
    """Move a part of the slots of one sequence in one cache."""
    address = tl.load(addresses_ptr + tl.program_id(0))
    if WORD == 4:
        cache_ptr = address.to(tl.pointer_type(tl.int32))
    else:
        cache_ptr = address.to(tl.pointer_type(tl.int8))
    d = tl.arange(0, BLOCK_D)
    at = tl.program_id(1) * DEPTH + d
    source = tl.load(from_ptr + at, mask=d < DEPTH, other=-1)
    target = tl.load(to_ptr + at, mask=d < DEPTH, other=-1)
    moves = (source != target) & (source >= 0) & (target >= 0)
    word = tl.program_id(2) * BLOCK_W + tl.arange(0, BLOCK_W)
    mask = moves[:, None] & (word < width)[None, :]
    moved = tl.load(cache_ptr + source[:, None] * width + word[None, :], mask=mask)
    # Another thread's load may read what a store of this one overwrites.
    tl.debug_barrier()
    tl.store(cache_ptr + target[:, None] * width + word[None, :], moved, mask=mask)
