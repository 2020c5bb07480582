"""One request inside the engine, and what speculation did for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from torch import Tensor

from peagle.config import SamplingParams


class SequenceStatus(Enum):
    """Where a sequence stands."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(slots=True)
class SpeculationStats:
    """Counters of speculative decoding, taken before stop conditions trim the output (as in vLLM).

    Attributes:
        num_drafts: verified drafts (a draft is up to K tokens).
        num_draft_tokens: tokens in them.
        num_accepted_tokens: tokens accepted.
        num_accepted_tokens_per_pos: drafts whose first i + 1 tokens were all accepted.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)

    def record(self, num_drafted: int, num_accepted: int) -> None:
        """Count one verified draft."""
        if num_drafted == 0:
            return
        self.num_drafts += 1
        self.num_draft_tokens += num_drafted
        self.num_accepted_tokens += num_accepted
        per_pos = self.num_accepted_tokens_per_pos
        per_pos.extend([0] * (num_drafted - len(per_pos)))
        for position in range(num_accepted):
            per_pos[position] += 1

    def add(self, other: SpeculationStats) -> None:
        """Pool another's counters into these."""
        self.num_drafts += other.num_drafts
        self.num_draft_tokens += other.num_draft_tokens
        self.num_accepted_tokens += other.num_accepted_tokens
        per_pos = self.num_accepted_tokens_per_pos
        per_pos.extend([0] * (len(other.num_accepted_tokens_per_pos) - len(per_pos)))
        for position, count in enumerate(other.num_accepted_tokens_per_pos):
            per_pos[position] += count

    @property
    def acceptance_length(self) -> float:
        """1 + accepted draft tokens / drafts; 1.0 where nothing was drafted."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0

    @property
    def acceptance_per_pos(self) -> list[float]:
        """Unconditional acceptance: P(the first i + 1 drafts are all accepted)."""
        return [count / self.num_drafts for count in self.num_accepted_tokens_per_pos]


@dataclass(slots=True)
class Sequence:
    """A prompt, its output so far, its KV blocks and its pending drafts.

    Attributes:
        seq_id: of the engine.
        prompt_token_ids, output_token_ids: tokens.
        params: how it is sampled; seed: the seed it draws with.
        stop_token_ids: ids that end the output.
        block_table: KV blocks in order.
        drafts: tokens that the next step verifies; draft_probs_KV: their q, None if argmax.
        finish_reason: "stop" or "length" once finished.
    """

    seq_id: int
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    stop_token_ids: frozenset[int]
    output_token_ids: list[int] = field(default_factory=list)
    status: SequenceStatus = SequenceStatus.WAITING
    block_table: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    draft_probs_KV: Tensor | None = None
    finish_reason: str | None = None
    stats: SpeculationStats = field(default_factory=SpeculationStats)

    def __len__(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def token_ids(self) -> list[int]:
        """Prompt and output."""
        return self.prompt_token_ids + self.output_token_ids

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    def append(self, token_ids: list[int], max_model_len: int) -> list[int]:
        """Add new tokens up to the first stop condition; returns those that were kept.

        A stop id is kept as the last token. Sets `status` and `finish_reason` at the end.
        """
        kept: list[int] = []
        for token in token_ids:
            self.output_token_ids.append(token)
            kept.append(token)
            if token in self.stop_token_ids:
                self.finish_reason = "stop"
            elif len(self.output_token_ids) >= self.params.max_tokens or len(self) >= max_model_len:
                self.finish_reason = "length"
            if self.finish_reason:
                self.status = SequenceStatus.FINISHED
                break
        return kept

    def trim(self, num_surplus: int) -> None:
        """Drop the last tokens of a finished output, those after a stop string."""
        del self.output_token_ids[len(self.output_token_ids) - num_surplus :]
        self.finish_reason = "stop"
