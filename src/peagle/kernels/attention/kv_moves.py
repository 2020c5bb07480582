"""Slots of many KV caches moved, in plain torch or in one launch.

Shapes: B sequences, D slots that may move of each.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from peagle.kernels.launch import launch, power_of_two

_BYTES_AT_ONCE = 2048  # of a slot, which a program moves


def move_slots(caches: Iterable[Tensor], from_BD: Tensor, to_BD: Tensor) -> None:
    """Copy slots within caches. All slots of a cache are read before one is written.

    Args:
        caches: [slots, ...] each, of any types, as many slots in all.
        from_BD, to_BD: int64, slots; -1 is the last slot, which is scrap.
    """
    caches = list(caches)
    source_X, target_X = (slots.flatten() % len(caches[0]) for slots in (from_BD, to_BD))
    for cache in caches:
        cache.index_copy_(0, target_X, cache[source_X])


class SlotMoves:
    """Copies slots within caches in Triton: one launch for all caches of one slot size.

    Needs no synchronisation and allocates nothing, so that a CUDA graph can hold it. The caches
    must stay where they are.

    Args:
        caches: bytes [slots, bytes of a slot] each, as many slots in all, contiguous.
    """

    def __init__(self, caches: Iterable[Tensor]) -> None:
        by_size: dict[int, list[Tensor]] = {}
        for cache in caches:
            assert cache.is_contiguous() and cache.dtype == torch.uint8
            by_size.setdefault(cache.shape[1], []).append(cache)
        self._groups = [
            (torch.tensor([x.data_ptr() for x in group], device=group[0].device), group)
            for group in by_size.values()
        ]

    def __call__(self, from_BD: Tensor, to_BD: Tensor) -> None:
        """Copy slots, all of a sequence's read before one is written; of several sequences at once.

        Args:
            from_BD, to_BD: int64, slots. A move to the same slot, from or to -1 changes nothing.
        """
        from peagle.kernels.attention import kv_moves_triton as kernels

        num_seqs, depth = from_BD.shape
        for addresses, group in self._groups:
            width = group[0].shape[1]
            word = 4 if width % 4 == 0 else 1
            block = power_of_two(min(width, _BYTES_AT_ONCE) // word)
            launch(
                kernels.move_slots_kernel,
                (len(group), num_seqs, -(-width // word // block)),
                addresses,
                from_BD,
                to_BD,
                width // word,
                DEPTH=depth,
                BLOCK_D=power_of_two(depth),
                BLOCK_W=block,
                WORD=word,
            )
