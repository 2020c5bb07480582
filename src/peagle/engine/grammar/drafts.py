"""Grammars and drafts: masks for the rows of a verification, and masks while drafting.

Shapes: B sequences, R packed rows (k_b + 1 of each sequence), V vocabulary, W packed words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from peagle.engine.grammar.compiler import GrammarState, full_bitmask, pack, unpack


def prepare(states: Sequence[GrammarState | None], drafts: Sequence[Sequence[int]]) -> None:
    """Have the states find the masks that verify these drafts, unless they have them.

    A state that takes long is busy when this returns, see `StepBudget`.

    Args:
        states: of each sequence, None where nothing constrains it.
        drafts: of each sequence, wherever they come from.
    """
    wanted = [
        None if state is None or state.is_prepared_for(tokens) else state
        for state, tokens in zip(states, drafts, strict=True)
    ]
    known = next((state for state in wanted if state is not None), None)
    if known is not None:
        known.budget.each(wanted, lambda b, state: state.prepare(drafts[b]))


def walk(
    states: Sequence[GrammarState | None], drafts: Sequence[Sequence[int]], vocab_size: int
) -> tuple[list[int], Tensor | None]:
    """Cut drafts at the first token not allowed, and mask the rows that verify the rest.

    The states end where they were; those that are not prepared are made so.

    Args:
        states, drafts: as in `prepare`; none is busy.
        vocab_size: V.

    Returns:
        k_b of each sequence; the packed masks of the rows, int32 [R, W] on the CPU, or None when
        no sequence has a state. Row j of a sequence has the tokens allowed after its first j
        drafts; rows after a stop id, and those of sequences without a state, allow everything.
    """
    if not any(states):
        return [len(tokens) for tokens in drafts], None
    rows = []
    for state, tokens in zip(states, drafts, strict=True):
        if state is None:
            rows.append(full_bitmask(len(tokens) + 1, vocab_size))
            continue
        if not state.is_prepared_for(tokens):
            state.prepare(tokens)
        assert state.prepared is not None
        rows.append(state.prepared.bitmask_RW)
    return [len(bitmask_RW) - 1 for bitmask_RW in rows], torch.cat(rows)


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
        self._is_over = [s is not None and (s.is_finished or not _is_free(s)) for s in states]
        self._was_busy = [False] * len(states)
        self._fill_column(lambda b, state: True)

    def mask(self, device: torch.device | str = "cpu") -> Tensor | None:
        """Tokens allowed as the next draft, bool [B, V]; None if nothing is constrained.

        Rows without a state, and those whose drafting is over, are True throughout.
        """
        if all(s is None or o for s, o in zip(self._states, self._is_over, strict=True)):
            return None
        return unpack(self._bitmask_BW.to(device), self._vocab_size)

    def advance(self, tokens: Sequence[int]) -> None:
        """Take the drafts just chosen, one a sequence."""
        for b, state in enumerate(self._states):
            if state is None:
                self.lens[b] += 1
        self._fill_column(lambda b, state: self._take(b, state, tokens[b]))

    def _take(self, b: int, state: GrammarState, token: int) -> bool:
        """Move a state past its draft; whether drafting goes on."""
        if not state.try_advance(token):
            return False
        self.lens[b] += 1
        return not state.is_finished

    def finish(self) -> None:
        """Put the states back to where they were; those that are busy do so when they are done."""
        for b, state in enumerate(self._states):
            if state is not None and _is_free(state) and not self._was_busy[b]:
                state.rollback(self.lens[b])

    def _fill_column(self, take: Callable[[int, GrammarState], bool]) -> None:
        """Move the states on, and make the masks after the drafts so far.

        Ends drafting where no id to draft is allowed, and where the grammar takes long.
        """
        # A new tensor: a state that is busy may still write into the last one.
        bitmask_BW = full_bitmask(len(self._states), self._vocab_size)

        def fill(b: int, state: GrammarState) -> None:
            self._is_over[b] = not take(b, state)
            if not self._is_over[b]:
                state.mask_into(bitmask_BW, b)

        wanted = [
            None if self._is_over[b] or self._was_busy[b] else state
            for b, state in enumerate(self._states)
        ]
        known = next((state for state in wanted if state is not None), None)
        beside: set[int] = set()
        if known is not None:
            budget = known.budget
            beside = budget.each(wanted, fill, lambda b, state: state.rollback(self.lens[b]))
        for b, state in enumerate(wanted):
            if state is None:
                continue
            if b in beside:
                self._was_busy[b] = self._is_over[b] = True
                bitmask_BW = bitmask_BW.clone()
            elif self._is_over[b] or self._has_draft(bitmask_BW[b]):
                continue
            self._is_over[b] = True
            bitmask_BW[b] = -1
        self._bitmask_BW = bitmask_BW

    def _has_draft(self, bitmask_W: Tensor) -> bool:
        """Whether an id that may be drafted is allowed."""
        return self._draftable_W is None or bool((bitmask_W & self._draftable_W).any())


def _is_free(state: GrammarState) -> bool:
    return not (state.is_busy or state.is_over_budget)
