"""What a proposer reads and gives.

Shapes: B sequences, T packed target rows, A * H feature width, K drafts, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from peagle.speculation.verification import SamplingTensors


class DraftConstraint(Protocol):
    """Says which tokens may be drafted, column after column: a grammar, for instance.

    For each column `mask`, then `advance` with the tokens chosen.
    """

    lens: list[int]
    """How many drafts of each sequence are valid so far; later ones must not be verified."""

    def mask(self, device: torch.device) -> Tensor | None:
        """Tokens allowed in the next column, bool [B, V]; None if all are."""
        ...

    def advance(self, tokens: Sequence[int]) -> None:
        """Take the tokens chosen for the column, one a sequence."""
        ...


@dataclass(frozen=True, slots=True)
class TargetStep:
    """What a proposer may read: rows the target ran and what verification made of them.

    Attributes:
        tokens_T, positions_T: the packed target batch.
        start_loc: [B+1], first row of each sequence.
        features_TA: aux features of the rows.
        num_accepted_B: tokens after the first row that stand (all of them in a prompt).
        next_tokens_B: the token after them: emitted, or the next one of a prompt.
        block_tables_BM: KV blocks of each sequence.
        num_drafts: k_b, drafts to make for each sequence, at most K; with 0 a head only reads on.
        sampling: with num_outputs counting the emitted tokens.
        histories: every token of each sequence, the emitted ones included.
        context_starts_B: first drafter slot of each sequence that may be looked at; None: all.
        constraint: which tokens may be drafted; None: all.
    """

    tokens_T: Tensor
    positions_T: Tensor
    start_loc: Tensor
    features_TA: Tensor
    num_accepted_B: Tensor
    next_tokens_B: Tensor
    block_tables_BM: Tensor
    num_drafts: Sequence[int]
    sampling: SamplingTensors
    histories: Sequence[Sequence[int]]
    context_starts_B: Tensor | None = None
    constraint: DraftConstraint | None = None


@dataclass(frozen=True, slots=True)
class Drafts:
    """Draft tokens of a batch.

    Attributes:
        tokens_BK: target ids; what stands at or above lens means nothing.
        lens: drafts of each sequence: as many as were asked for, unless fewer were found.
        probs_BKV: the draft distributions in the target vocabulary; None for argmax drafts.
    """

    tokens_BK: Tensor
    lens: list[int]
    probs_BKV: Tensor | None = None
