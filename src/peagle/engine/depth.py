"""K of the next step, by how many sequences run together."""

from __future__ import annotations

from collections.abc import Callable

RESUME_AFTER = 8


class DepthPolicy:
    """K of a step: what is scheduled for so many sequences, and 0 for a while after that was 0.

    Drafting stops at once where 0 is scheduled, and begins again when the number of sequences has
    asked for drafts at RESUME_AFTER steps in a row, or when nobody runs any more: to resume costs a
    pass over what the drafter has missed, which a load that swings around a border would pay
    again and again. Between other K a change costs nothing and comes at once.

    Args:
        scheduled: K where so many sequences run together.
    """

    def __init__(self, scheduled: Callable[[int], int]) -> None:
        self._scheduled = scheduled
        self._num_calm = RESUME_AFTER

    def __call__(self, num_sequences: int) -> int:
        """K where so many run together now."""
        return self._scheduled(num_sequences) if self._num_calm >= RESUME_AFTER else 0

    def observe(self, num_sequences: int) -> None:
        """Count a step that begins with so many running."""
        if not num_sequences:
            self._num_calm = RESUME_AFTER
        elif self._scheduled(num_sequences):
            self._num_calm += 1
        else:
            self._num_calm = 0
