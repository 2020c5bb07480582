"""The state of each decoding sequence on the device, and its change by a verified step.

Shapes: B sequences, K most drafts, J = K + 1 tokens that a step can emit, E stop ids a sequence.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Self

import torch
from torch import Tensor

NO_TOKEN = -1


class Stamp(IntEnum):
    """When a step looks at the clock. Between VERIFIED and DRAFTING the head may read prompts."""

    BEGIN = 0
    TARGET_DONE = 1
    VERIFIED = 2
    DRAFTING = 3
    DRAFTED = 4


class Finish(IntEnum):
    """Why a sequence ended, as the device writes it."""

    RUNNING = 0
    STOP = 1
    LENGTH = 2


@dataclass(frozen=True, slots=True)
class DecodeState:
    """State of each sequence, int64 [B], changed in place.

    Attributes:
        last_tokens_B: newest token.
        first_positions_B: its position: the target has not run it yet.
        num_outputs_B: tokens generated so far.
        num_draft_tokens_B: drafts that the next target pass verifies.
        finish_B: `Finish`; once not 0 nothing of the sequence changes any more.
    """

    last_tokens_B: Tensor
    first_positions_B: Tensor
    num_outputs_B: Tensor
    num_draft_tokens_B: Tensor
    finish_B: Tensor

    @classmethod
    def allocate(cls, num_seqs: int, device: torch.device | str) -> Self:
        """Allocate zeros for B sequences."""
        return cls(*(torch.zeros(num_seqs, dtype=torch.int64, device=device) for _ in range(5)))


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """The ends of sequences and their most drafts; int64.

    Attributes:
        stop_ids_BE: ids that end the output; padded with -1.
        min_tokens_B: a stop id ends the output only behind so many tokens.
        max_tokens_B: output tokens at which it ends.
        k_B: K of each sequence; 0 drafts nothing.
        max_model_len: tokens of prompt and output at which it ends; no draft stands beyond.
        max_draft_len: positions up to which the head drafts.
    """

    stop_ids_BE: Tensor
    min_tokens_B: Tensor
    max_tokens_B: Tensor
    k_B: Tensor
    max_model_len: int
    max_draft_len: int

    @property
    def draft_end(self) -> int:
        """Return the length at which drafting ends; d tokens before it are at most d drafts.

        The last of k drafts comes from the drafter slot at position length + k - 3.
        """
        return min(self.max_model_len, self.max_draft_len + 2)


@dataclass(frozen=True, slots=True)
class DecodeResult:
    """The report of a step to the host, int64.

    Attributes:
        num_accepted_B: a, drafts accepted, before stop conditions trim; 0 where inactive.
        next_tokens_B: the target's own token after them; 0 where inactive.
        emitted_BJ: the accepted drafts, then the target's token; -1 behind.
        num_kept_B: emitted tokens up to the first stop condition, at most a + 1.
        num_mask_slots_B: of the drafter's next pass: k - 1 where k drafts are to be made.
    """

    num_accepted_B: Tensor
    next_tokens_B: Tensor
    emitted_BJ: Tensor
    num_kept_B: Tensor
    num_mask_slots_B: Tensor

    @classmethod
    def allocate(cls, num_seqs: int, max_drafts: int, device: torch.device | str) -> Self:
        """Allocate buffers for B sequences and K drafts."""

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        return cls(
            ints(num_seqs),
            ints(num_seqs),
            ints(num_seqs, max_drafts + 1),
            ints(num_seqs),
            ints(num_seqs),
        )


def advance(
    state: DecodeState,
    limits: DecodeLimits,
    active_B: Tensor,
    drafts_BK: Tensor,
    num_accepted_B: Tensor,
    next_tokens_B: Tensor,
) -> DecodeResult:
    """Move the state over the a + 1 tokens that a verification emitted, and check for the end.

    Emitted token i is the (n + i + 1)-th output and makes the sequence first_position + i + 2
    tokens long. It ends the output as a stop id where n + i >= min_tokens, else where the output or
    the sequence reaches its greatest length; emitted tokens behind it are not kept. The state moves
    over all emitted tokens, kept or not: their KV is written. Inactive and finished sequences emit
    and keep nothing, and their state stays.

    A next token of NO_TOKEN says that the logits were NaN or infinite: it is emitted as such and
    ends the sequence; as the last token, which is embedded, 0 stands for it.
    """
    runs_B = active_B & (state.finish_B == Finish.RUNNING)
    num_accepted_B = torch.where(active_B, num_accepted_B, 0)
    next_tokens_B = torch.where(active_B, next_tokens_B, 0)
    num_emitted_B = torch.where(runs_B, num_accepted_B + 1, 0)

    column_J = torch.arange(drafts_BK.shape[1] + 1, device=drafts_BK.device)
    tokens_BJ = torch.nn.functional.pad(drafts_BK, (0, 1))
    tokens_BJ = tokens_BJ.scatter(1, num_accepted_B.unsqueeze(1), next_tokens_B.unsqueeze(1))
    is_emitted_BJ = column_J < num_emitted_B.unsqueeze(1)
    emitted_BJ = torch.where(is_emitted_BJ, tokens_BJ, NO_TOKEN)

    before_BJ = state.num_outputs_B.unsqueeze(1) + column_J
    length_BJ = state.first_positions_B.unsqueeze(1) + column_J + 2
    is_stop_BJ = (tokens_BJ.unsqueeze(2) == limits.stop_ids_BE.unsqueeze(1)).any(-1)
    is_stop_BJ = is_stop_BJ & (before_BJ >= limits.min_tokens_B.unsqueeze(1)) & is_emitted_BJ
    is_long_BJ = before_BJ + 1 >= limits.max_tokens_B.unsqueeze(1)
    is_long_BJ = is_long_BJ | (length_BJ >= limits.max_model_len) | (tokens_BJ == NO_TOKEN)
    is_long_BJ = is_long_BJ & is_emitted_BJ
    ends_BJ = is_stop_BJ | is_long_BJ
    last_B = torch.where(ends_BJ, column_J, len(column_J)).amin(1)
    num_kept_B = torch.minimum(num_emitted_B, last_B + 1)
    ended_B = last_B < len(column_J)
    stopped_B = is_stop_BJ.gather(1, last_B.clamp_max(len(column_J) - 1).unsqueeze(1)).squeeze(1)
    reason_B = torch.where(stopped_B, int(Finish.STOP), int(Finish.LENGTH))

    state.finish_B.copy_(torch.where(ended_B, reason_B, state.finish_B))
    next_tokens_B = next_tokens_B.clamp_min(0)
    state.last_tokens_B.copy_(torch.where(runs_B, next_tokens_B, state.last_tokens_B))
    state.first_positions_B.add_(num_emitted_B)
    state.num_outputs_B.add_(num_emitted_B)
    room_B = (limits.draft_end - 1 - state.first_positions_B).clamp_min(0)
    drafting_B = active_B & (state.finish_B == Finish.RUNNING)
    k_B = torch.where(drafting_B, torch.minimum(limits.k_B, room_B), 0)
    state.num_draft_tokens_B.copy_(k_B)
    masks_B = (k_B - 1).clamp_min(0)
    return DecodeResult(num_accepted_B, next_tokens_B, emitted_BJ, num_kept_B, masks_B)
