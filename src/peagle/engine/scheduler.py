"""Which sequences run in the next step."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from peagle.engine.block_manager import BlockManager
from peagle.engine.sequence import Sequence, SequenceStatus


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """The sequences of one step: all of them prompts, or all of them decoding."""

    sequences: list[Sequence]
    is_prefill: bool


class Scheduler:
    """Continuous batching, first come first served.

    A sequence is admitted once the blocks for its whole life are free, so a running sequence never
    runs out. Waiting prompts go first: they fill the decode batch.

    Args:
        blocks: the KV blocks.
        max_num_seqs: most sequences running together.
        max_num_batched_tokens: most prompt tokens of one prefill pass; a longer prompt runs alone.
        max_model_len: longest sequence.
        num_lookahead_slots: KV slots that a step may touch beyond the last token.
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        num_lookahead_slots: int,
    ) -> None:
        self.blocks = blocks
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.num_lookahead_slots = num_lookahead_slots
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def slots_needed(self, sequence: Sequence) -> int:
        """KV slots of the sequence's whole life, the last step's drafts included."""
        longest = len(sequence.prompt_token_ids) + sequence.params.max_tokens
        return min(longest, self.max_model_len) + self.num_lookahead_slots

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self.waiting.append(sequence)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def schedule(self) -> ScheduledBatch:
        """Choose the next step's sequences; there must be unfinished ones."""
        if admitted := self._admit():
            return ScheduledBatch(admitted, is_prefill=True)
        assert self.running, "nothing runs and nothing fits: the request should have been refused"
        return ScheduledBatch(list(self.running), is_prefill=False)

    def _admit(self) -> list[Sequence]:
        admitted: list[Sequence] = []
        budget = self.max_num_batched_tokens
        while self.waiting and len(self.running) < self.max_num_seqs:
            sequence = self.waiting[0]
            num_tokens = len(sequence.prompt_token_ids)
            slots = self.slots_needed(sequence)
            if (admitted and num_tokens > budget) or not self.blocks.can_allocate(slots):
                break
            self.waiting.popleft()
            self.blocks.allocate(sequence, slots)
            sequence.status = SequenceStatus.RUNNING
            self.running.append(sequence)
            admitted.append(sequence)
            budget -= num_tokens
        return admitted

    def retire_finished(self) -> None:
        """Drop finished sequences and free their blocks."""
        for sequence in self.running:
            if sequence.is_finished:
                self.blocks.free(sequence)
        self.running = [s for s in self.running if not s.is_finished]

    def cancel(self, sequence: Sequence) -> None:
        """Finish a sequence now, wherever it stands."""
        if sequence.is_finished:
            return
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = "cancelled"
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        self.retire_finished()
