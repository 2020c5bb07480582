"""The input of `kernels.sampling.logits`: the rules of a batch, its rows, its token counts.

Shapes: B sequences, R rows (packed, k_b + 1 of each sequence, or padded, J of each), J = K + 1
columns of the widest sequence, K most drafts, V vocabulary, S count slots, A sets of allowed ids, N
entries of a sparse rule, W prefix tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from peagle.kernels.paths import TreePaths
from peagle.kernels.upload import upload_ints

NO_TOKEN = -1
ANY_TOKEN = -2


@dataclass(frozen=True)
class VerificationRows:
    """The context of each packed row; further facts are computed from it when asked for.

    Attributes:
        draft_tokens_BK: int64, the drafts; columns at or above num_draft_tokens are ignored.
        num_draft_tokens_B: int64, k_b of each sequence, 0 where nothing was drafted.
        num_outputs_B: int64, output tokens before row 0.
        num_rows: R, the sum of k_b + 1, known to the host from the logits' shape.
        tails_BW: last context tokens before row 0, see `context_tails`; needed by bad words only.
    """

    draft_tokens_BK: Tensor
    num_draft_tokens_B: Tensor
    num_outputs_B: Tensor
    num_rows: int
    tails_BW: Tensor | None = None

    @property
    def max_drafts(self) -> int:
        """Return K, the most drafts of a sequence."""
        return self.draft_tokens_BK.shape[1]

    @cached_property
    def columns_J(self) -> Tensor:
        """Return the column numbers 0 to K."""
        return torch.arange(self.max_drafts + 1, device=self.num_draft_tokens_B.device)

    @cached_property
    def first_row_B(self) -> Tensor:
        """Return row 0 of each sequence."""
        num_rows_B = self.num_draft_tokens_B + 1
        return num_rows_B.cumsum(0) - num_rows_B

    @cached_property
    def rows_BJ(self) -> Tensor:
        """Return the rows of each sequence; columns past its last row repeat that row."""
        within_BJ = torch.minimum(self.columns_J, self.num_draft_tokens_B.unsqueeze(1))
        return self.first_row_B.unsqueeze(1) + within_BJ

    @cached_property
    def drafted_BK(self) -> Tensor:
        """Return where a sequence has a draft, bool."""
        return self.columns_J[:-1] < self.num_draft_tokens_B.unsqueeze(1)

    @cached_property
    def drafts_BK(self) -> Tensor:
        """Return the drafts of each sequence, 0 where there is none."""
        return torch.where(self.drafted_BK, self.draft_tokens_BK, 0)

    @cached_property
    def sequences_R(self) -> Tensor:
        """Return the sequence of each row."""
        return torch.repeat_interleave(self.num_draft_tokens_B + 1, output_size=self.num_rows)

    @cached_property
    def offsets_R(self) -> Tensor:
        """Return the number of drafts before each row: its j."""
        rows_R = torch.arange(self.num_rows, device=self.num_draft_tokens_B.device)
        return rows_R - self.first_row_B[self.sequences_R]

    @property
    def before_RK(self) -> Tensor:
        """Return which drafts of its sequence a row stands behind, bool."""
        return self.columns_J[:-1] < self.offsets_R.unsqueeze(1)

    def of(self, sequences_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the drafts before each row of the sequences, broadcast to [N, J], the packed rows
        [N, J], and whether they exist.
        """
        exists_NJ = self.columns_J <= self.num_draft_tokens_B[sequences_N].unsqueeze(1)
        return self.columns_J, self.rows_BJ[sequences_N], exists_NJ

    def windows(self, width: int) -> Tensor:
        """Return the last `width` tokens of the context that each row stands in, [B, J, W]."""
        assert self.tails_BW is not None, "windows need the context's tail"
        tails_BW = self.tails_BW[:, self.tails_BW.shape[1] - width :]
        return torch.cat([tails_BW, self.drafts_BK], 1).unfold(1, width, 1)


@dataclass(frozen=True)
class TreeRows(VerificationRows):
    """Rows whose drafts are the nodes of a tree: a row stands behind its own path alone.

    Attributes:
        paths: how the rows of each sequence relate; given.
    """

    paths: TreePaths | None = None

    @property
    def _paths(self) -> TreePaths:
        assert self.paths is not None, "rows of trees need their paths"
        return self.paths

    @cached_property
    def _within_R(self) -> tuple[Tensor, Tensor]:
        """Return the indices of each packed row in the tensors of the paths: sequence and j."""
        rows_R = torch.arange(self.num_rows, device=self.num_draft_tokens_B.device)
        return self.sequences_R, rows_R - self.first_row_B[self.sequences_R]

    @cached_property
    def offsets_R(self) -> Tensor:
        """Return the number of drafts before each row: its depth."""
        return self._paths.depths_BJ[self._within_R]

    @property
    def before_RK(self) -> Tensor:
        visible_R1 = self._paths.visible_BJ[self._within_R].unsqueeze(1)
        return (visible_R1 >> self.columns_J[1:]).bitwise_and(1).bool()

    def of(self, sequences_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        _, rows_NJ, exists_NJ = super().of(sequences_N)
        return self._paths.depths_BJ[sequences_N], rows_NJ, exists_NJ

    def windows(self, width: int) -> Tensor:
        assert self.tails_BW is not None, "windows need the context's tail"
        tails_BW = self.tails_BW[:, self.tails_BW.shape[1] - width :]
        tokens_BX = torch.cat([tails_BW, self.drafts_BK], 1)
        # The root is the tail's end; before each token stands the one before it in the tail, or
        # its parent.
        root = width - 1
        before_X = torch.arange(-1, root, device=tokens_BX.device).clamp_min(0)
        before_BX = before_X.expand(len(tokens_BX), -1)
        before_BX = torch.cat([before_BX, self._paths.parents_BN + root], 1)
        at_BJ = (self.columns_J + root).expand(len(tokens_BX), -1)
        found = []
        for _ in range(width):
            found.append(tokens_BX.gather(1, at_BJ))
            at_BJ = before_BX.gather(1, at_BJ)
        return torch.stack(found[::-1], -1)

    def reached(self, tokens_BJ: Tensor) -> Tensor:
        """Return `TreePaths.reached` for the target's own tokens of the rows."""
        return self._paths.reached(tokens_BJ, self.drafts_BK, self.num_draft_tokens_B)

    def leading(self, num_leading_B: Tensor, most: int) -> "LeadingRows":
        """Return the rows of the first nodes of each tree, which are a chain.

        Args:
            num_leading_B: int64, how many of them are in the chain, `most` at most.
        """
        return LeadingRows(
            self.drafts_BK[:, :most],
            num_leading_B,
            self.num_outputs_B,
            self.num_rows,
            starts_B=self.first_row_B,
        )


@dataclass(frozen=True)
class LeadingRows(VerificationRows):
    """The first rows of each sequence, behind which its other rows stand.

    Attributes:
        starts_B: row 0 of each sequence; given.
    """

    starts_B: Tensor | None = None

    @cached_property
    def first_row_B(self) -> Tensor:
        assert self.starts_B is not None, "rows of other sequences stand between"
        return self.starts_B


@dataclass(frozen=True)
class PaddedRows(VerificationRows):
    """J rows for every sequence; rows past its own hold nothing of use."""

    @cached_property
    def first_row_B(self) -> Tensor:
        """Return the first row of each sequence, b * J."""
        width = self.max_drafts + 1
        return torch.arange(0, self.num_rows, width, device=self.num_draft_tokens_B.device)

    @cached_property
    def sequences_R(self) -> Tensor:
        """Return the sequence of each row, r // J."""
        rows_R = torch.arange(self.num_rows, device=self.num_draft_tokens_B.device)
        return rows_R // (self.max_drafts + 1)


@dataclass(frozen=True)
class PaddedTreeRows(PaddedRows, TreeRows):
    """`TreeRows`, J for every sequence."""


@dataclass(frozen=True, slots=True)
class LogitBias:
    """values_N (finite or -inf) to add to the logits of tokens_N in sequences_N, int64.

    Entries of one token add up.
    """

    sequences_N: Tensor
    tokens_N: Tensor
    values_N: Tensor


@dataclass(frozen=True, slots=True)
class AllowedTokens:
    """Token ids outside of which a sequence may not generate.

    mask_AV holds one bool row for each distinct set of ids; index_B, int64, is the row that
    applies to a sequence, below 0 where all ids are allowed.
    """

    mask_AV: Tensor
    index_B: Tensor


@dataclass(frozen=True, slots=True)
class BadWords:
    """Token sequences that must not appear; the last token is banned after the others.

    The prefix is looked for in prompt and output alike, as transformers does. sequences_N is where
    a word is banned, prefixes_NW its tokens but the last (right-aligned behind wildcards), last_N
    the last; int64.
    """

    sequences_N: Tensor
    prefixes_NW: Tensor
    last_N: Tensor

    @classmethod
    def build(
        cls, words: Sequence[Sequence[Sequence[int]]], device: torch.device | str = "cpu"
    ) -> Self:
        """Build from the words of each sequence; a word is a non-empty list of token ids."""
        flat = [(index, list(word)) for index, of in enumerate(words) for word in of]
        width = max((len(word) for _, word in flat), default=1) - 1
        prefixes = [[ANY_TOKEN] * (width + 1 - len(word)) + word[:-1] for _, word in flat]
        return cls(
            upload_ints([index for index, _ in flat], device),
            upload_ints(prefixes, device).view(len(flat), width),
            upload_ints([word[-1] for _, word in flat], device),
        )

    @property
    def prefix_len(self) -> int:
        """Return W, the least width of `context_tails`."""
        return self.prefixes_NW.shape[1]


@dataclass(frozen=True, slots=True)
class MinTokens:
    """Stop ids tokens_N are banned in sequences_N while they have fewer output tokens than
    min_tokens_B; int64.
    """

    min_tokens_B: Tensor
    sequences_N: Tensor
    tokens_N: Tensor


@dataclass(frozen=True, slots=True)
class LogitsRules:
    """The rules of a batch, one entry a sequence; None where nobody uses the feature.

    Attributes:
        repetition_penalty_B: above 0; 1 changes nothing.
        presence_penalty_B, frequency_penalty_B: in logits; 0 changes nothing.
        count_slots_B: int64, the slot of TokenCounts that a sequence has, below 0 for none: such a
            sequence is not penalised. None: slot b for sequence b.
        min_p_B: 0 keeps all tokens.
        typical_p_B: 1 keeps all tokens.
        bias, allowed, bad_words, min_tokens: see the classes.
    """

    repetition_penalty_B: Tensor | None = None
    presence_penalty_B: Tensor | None = None
    frequency_penalty_B: Tensor | None = None
    count_slots_B: Tensor | None = None
    min_p_B: Tensor | None = None
    typical_p_B: Tensor | None = None
    bias: LogitBias | None = None
    allowed: AllowedTokens | None = None
    bad_words: BadWords | None = None
    min_tokens: MinTokens | None = None

    @property
    def is_empty(self) -> bool:
        """Return whether no sequence sets any rule."""
        return all(getattr(self, field.name) is None for field in fields(self))

    @property
    def has_penalties(self) -> bool:
        """Return whether a sequence has a penalty, which needs `TokenCounts`."""
        penalties = (self.repetition_penalty_B, self.presence_penalty_B, self.frequency_penalty_B)
        return any(penalty is not None for penalty in penalties)


class TokenCounts:
    """The tokens in each slot's prompt, and their counts in its output.

    S slots, as many as sequences are penalised together; in_prompt_SV is bool, outputs_SV int32,
    five bytes a slot and token.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self.in_prompt_SV = torch.zeros(num_slots, vocab_size, dtype=torch.bool, device=device)
        self.outputs_SV = torch.zeros(num_slots, vocab_size, dtype=torch.int32, device=device)

    def start(self, slot: int, prompt_N: Tensor) -> None:
        """Give a slot to a new sequence; prompt_N are its int64 prompt ids."""
        self.in_prompt_SV[slot] = False
        self.in_prompt_SV[slot, prompt_N] = True
        self.outputs_SV[slot] = 0

    def add(self, slots_N: Tensor, tokens_N: Tensor, keep_N: Tensor | None = None) -> None:
        """Count output tokens; the arguments have one shape.

        Slots below 0 and entries that keep_N leaves out (rejected drafts, padding) count nothing.
        """
        counted_N = slots_N >= 0 if keep_N is None else keep_N & (slots_N >= 0)
        at_N = (slots_N.clamp_min(0), torch.where(counted_N, tokens_N, 0))
        self.outputs_SV.index_put_(at_N, counted_N.int(), accumulate=True)


def context_tails(
    contexts: Sequence[Sequence[int]], width: int, device: torch.device | str = "cpu"
) -> Tensor:
    """Return the last `width` tokens (prompt and output) of each sequence, int64 [B, width].

    Right-aligned, with NO_TOKEN before the start of a sequence.
    """
    ends = [list(context[max(0, len(context) - width) :]) for context in contexts]
    padded = [[NO_TOKEN] * (width - len(end)) + end for end in ends]
    return upload_ints(padded, device).view(len(contexts), width)


def shift_tails(tails_BW: Tensor, emitted_BJ: Tensor) -> Tensor:
    """Return the tails behind the emitted tokens, of which each row has NO_TOKEN past its end."""
    num_emitted_B1 = (emitted_BJ != NO_TOKEN).sum(1, keepdim=True)
    columns_W = torch.arange(tails_BW.shape[1], device=tails_BW.device)
    return torch.cat([tails_BW, emitted_BJ], 1).gather(1, num_emitted_B1 + columns_W)
