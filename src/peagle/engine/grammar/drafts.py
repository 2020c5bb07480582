"""Grammars and drafts: masks for the rows of a verification, and masks while drafting.

Shapes: B sequences, R packed rows (k_b + 1 of each sequence), V vocabulary, W packed words.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from peagle.engine.grammar.compiler import GrammarState, full_bitmask, pack, unpack


def walk(
    states: Sequence[GrammarState | None], drafts: Sequence[Sequence[int]], vocab_size: int
) -> tuple[list[int], Tensor | None]:
    """Cut drafts at the first token not allowed, and mask the rows that verify the rest.

    The states end where they were.

    Args:
        states: of each sequence, None where nothing constrains it.
        drafts: of each sequence, wherever they come from.
        vocab_size: V.

    Returns:
        k_b of each sequence; the packed masks of the rows, int32 [R, W] on the CPU, or None when
        no sequence has a state. Row j of a sequence has the tokens allowed after its first j
        drafts; rows after a stop id, and those of sequences without a state, allow everything.
    """
    if not any(states):
        return [len(tokens) for tokens in drafts], None
    bitmask_RW = full_bitmask(sum(len(tokens) + 1 for tokens in drafts), vocab_size)
    lens: list[int] = []
    row = 0
    for state, tokens in zip(states, drafts, strict=True):
        length = len(tokens) if state is None else _walk_one(state, tokens, bitmask_RW, row)
        lens.append(length)
        row += length + 1
    return lens, bitmask_RW[:row]


def _walk_one(state: GrammarState, tokens: Sequence[int], bitmask_RW: Tensor, row: int) -> int:
    """Fill the rows of one sequence from `row` on; returns how many of its drafts stand."""
    length = 0
    state.mask_into(bitmask_RW, row)
    for token in tokens:
        if not state.try_advance(token):
            break
        length += 1
        state.mask_into(bitmask_RW, row + length)
    state.rollback(length)
    return length


class DraftGrammar:
    """Masks the drafts of one batch while they are chosen, column after column.

    For each column: `mask()`, choose, `advance(tokens)`; at the end `finish()`. Drafting of a
    sequence is over at a token that its grammar does not allow, after a stop id, and where no id of
    the draft vocabulary is allowed; what is chosen for it from then on is ignored.

    Args:
        states: of each sequence, None where nothing constrains it; each after its output tokens.
        vocab_size: V.
        draft_token_ids: the draft vocabulary, if it is not all of V.

    Attributes:
        lens: how many drafts of each sequence are valid so far.
    """

    def __init__(
        self,
        states: Sequence[GrammarState | None],
        vocab_size: int,
        *,
        draft_token_ids: Sequence[int] | None = None,
    ) -> None:
        self.lens = [0] * len(states)
        self._states = states
        self._vocab_size = vocab_size
        self._draftable_W = None if draft_token_ids is None else pack(draft_token_ids, vocab_size)
        self._is_over = [state is not None and state.is_finished for state in states]
        self._bitmask_BW = full_bitmask(len(states), vocab_size)
        self._fill_column()

    def mask(self, device: torch.device | str = "cpu") -> Tensor | None:
        """Tokens allowed as the next draft, bool [B, V]; None if nothing is constrained.

        Rows without a state, and those whose drafting is over, are True throughout.
        """
        if all(s is None or o for s, o in zip(self._states, self._is_over, strict=True)):
            return None
        return unpack(self._bitmask_BW.to(device), self._vocab_size)

    def advance(self, tokens: Sequence[int]) -> None:
        """Take the drafts just chosen, one a sequence."""
        for b, (state, token) in enumerate(zip(self._states, tokens, strict=True)):
            if self._is_over[b]:
                continue
            if state is not None and not state.try_advance(token):
                self._is_over[b] = True
                continue
            self.lens[b] += 1
            self._is_over[b] = state is not None and state.is_finished
        self._fill_column()

    def finish(self) -> None:
        """Put the states back to where they were."""
        for state, length in zip(self._states, self.lens, strict=True):
            if state is not None:
                state.rollback(length)

    def _fill_column(self) -> None:
        """The masks after the drafts so far; ends drafting where no id to draft is allowed."""
        self._bitmask_BW.fill_(-1)
        for b, state in enumerate(self._states):
            if state is None or self._is_over[b]:
                continue
            state.mask_into(self._bitmask_BW, b)
            if (
                self._draftable_W is not None
                and not (self._bitmask_BW[b] & self._draftable_W).any()
            ):
                self._is_over[b] = True
                self._bitmask_BW[b] = -1
