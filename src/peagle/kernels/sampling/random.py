"""Counter-based random numbers: a pure function of (seed, output position, purpose).

No generator state exists, so preemption, batch-mates and the order of steps cannot change what a
request draws. Each number is used for one decision only: an output position is settled once.
Drafts of a block are drawn and tried again at a position where an earlier step failed, and what
that step saw of them must not count: their numbers belong to the step (`of_step`).
"""

from enum import IntEnum
from typing import TypeVar

import torch
from torch import Tensor

Word = TypeVar("Word", int, Tensor)
# The increment and multipliers of SplitMix64 (Steele, Lea and Flood, 2014), as signed 64-bit.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64

# A position's share of the counters. It stays what it is when a purpose is added: otherwise every
# seed would draw anew.
COUNTERS_PER_POSITION = 3
# Numbers of a step for one purpose, at most.
DRAWS_PER_STEP = 64


class Purpose(IntEnum):
    """The decision that a random number serves; separate purposes at one position are independent.

    SAMPLE draws the target's own token, or the one that replaces a rejected draft. DRAFT draws a
    draft, ACCEPT lets it pass; `of_step` gives their positions.
    """

    ACCEPT = 0
    SAMPLE = 1
    DRAFT = 2
    # On the counters of positions from 2**40 on, which no output reaches.
    SYNTHETIC = COUNTERS_PER_POSITION << 40


def _shift_right(x: Word, bits: int) -> Word:
    # torch shifts int64 arithmetically; the mask makes the shift logical. Python's integers never
    # wrap around; the mask leaves what counts of them.
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Word) -> Word:
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def uniform(seeds: Tensor, positions: Tensor, purpose: Purpose) -> Tensor:
    """Return uniform numbers in [0, 1) with 53 random bits.

    Args:
        seeds: int64, any shape.
        positions: int64 output positions, broadcastable with seeds.
        purpose: the decision that the numbers are for.

    Returns:
        float64 of the broadcast shape.
    """
    return _draw(seeds, positions, purpose).to(torch.float64) * 2.0**-53


def _draw(seeds: Word, positions: Word, purpose: Purpose) -> Word:
    """Return 53 random bits."""
    counter = positions * COUNTERS_PER_POSITION + int(purpose) + 1
    return _shift_right(_mix(_mix(seeds + _GOLDEN) + counter * _GOLDEN), 11)


def of_step(num_outputs: Tensor, column: Tensor | int) -> Tensor:
    """Return the position that stands for a draft of the step that begins behind some outputs.

    Args:
        num_outputs: int64, outputs of the sequence before the step that verifies the draft.
        column: the draft, from 0 to `DRAWS_PER_STEP` - 1; broadcastable with `num_outputs`.
    """
    return num_outputs * DRAWS_PER_STEP + column


def derive_seed(seed: int, index: int) -> int:
    """Return a seed of 53 random bits for the request or output `index`, made from one of many."""
    # Of Python's integers: tensors of one number would take 0.1 ms.
    return _draw(seed, index, Purpose.SAMPLE)
