"""The choice of the sequences and tokens of the next step."""

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field

from peagle.engine.block_manager import BlockManager
from peagle.engine.gathering import Gathering
from peagle.engine.prompt_budget import PromptBudget
from peagle.engine.sequence import Sequence, SequenceStatus

# Blocks that sequences get before they need them, if many are free.
BLOCKS_AHEAD = 4


@dataclass(frozen=True, slots=True)
class Chunk:
    """The tokens of one sequence that one pass computes.

    Attributes:
        num_tokens: number of tokens, from the first that is not computed.
        num_draft_tokens: number of drafts that are verified behind them.
        samples: whether the rows of the last token and the drafts give new tokens; only the last
            chunk of a prompt does.
    """

    sequence: Sequence
    num_tokens: int
    num_draft_tokens: int = 0
    samples: bool = True


@dataclass(slots=True)
class Schedule:
    """One step: chunks of prompts, and the sequences that decode behind them or in the same pass.

    `admitted` sequences got their blocks, `preempted` ones lost theirs.
    """

    prefill: list[Chunk] = field(default_factory=list)
    decode: list[Chunk] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)


class Scheduler:
    """Continuous batching with chunked prefill, by priority, then first come first served.

    A running sequence holds blocks for its tokens and a few more. When it cannot get the next
    block, the scheduler preempts the last sequence in order, which gives up its blocks and is
    computed again later. The first in order can always go on, so every sequence finishes. No
    sequence overtakes a waiting one because it needs fewer blocks. A waiting sequence preempts
    running ones of lower priority.

    Args:
        max_num_seqs: most sequences that run together.
        max_num_batched_tokens: most prompt tokens of one step.
        max_itl_ms: as in `EngineConfig`.
        num_lookahead_slots: KV slots that a step may touch beyond the last token.
        draft_window: tokens that a position of the drafter attends to. The drafter reads only
            this many tokens at the end of a longer prompt, a length that it knows from training.
            None sets no window.
        max_hold_ms: as in `EngineConfig`.

    Attributes:
        drafting_pauses: whether sequences may share blocks that the drafter has not read.
        max_prompts: most prompts in one step; None sets no limit.
        is_holding: whether the last plan let prompts wait for others (`Gathering`).
        may_begin_more: whether the next plan may begin sequences although no event came: the last
            plan had no more tokens for prompts, or a leader or a grammar kept a sequence waiting.
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        num_lookahead_slots: int,
        draft_window: int | None = None,
        max_itl_ms: float = 0.0,
        max_hold_ms: float = 0.0,
    ) -> None:
        self.blocks = blocks
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.prompt_budget = PromptBudget(max_itl_ms, max_num_batched_tokens)
        self.is_holding = self.may_begin_more = False
        self._gathering = Gathering(max_hold_ms)
        self.max_model_len = max_model_len
        self.num_lookahead_slots = num_lookahead_slots
        self.draft_window = draft_window
        self.drafting_pauses = False
        self.max_prompts: int | None = None
        # Both queues are sorted by `Sequence.order`.
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        # Counts the events that may change the next step: arrivals, ends, changes of a sequence.
        self.version = 0

    def most_slots(self, sequence: Sequence) -> int:
        """Return the most KV slots that the sequence ever holds."""
        return self.slots_for(sequence.num_prompt_tokens + sequence.params.max_tokens)

    def slots_for(self, num_tokens: int) -> int:
        """Return the KV slots of so many tokens, with those that drafts ahead of them need."""
        return min(num_tokens + self.num_lookahead_slots, self.max_model_len)

    def add(self, sequence: Sequence) -> None:
        """Add a sequence to the queue."""
        self.version += 1
        insort(self.waiting, sequence, key=lambda s: s.order)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def load(self) -> int:
        """Return the number of running sequences, and of waiting ones with a place and blocks."""
        load, num_free = len(self.running), self.blocks.num_free_blocks
        for sequence in self.waiting[: self.max_num_seqs - load]:
            num_new = self.blocks.blocks_for(self.slots_for(len(sequence)))
            if num_new + load > num_free:  # as in `_make_room`
                break
            num_free -= num_new
            load += 1
        return load

    def schedule(self) -> Schedule:
        """Choose the next step's chunks; there must be unfinished sequences."""
        plan = Schedule()
        self._decode(plan)
        budget = self._continue_prompts(plan)
        self._admit(plan, budget)
        assert (
            plan.decode
            or plan.prefill
            or any(s.waits_for_grammar for s in (*self.running, *self.waiting))
        ), "nothing runs and nothing fits: the request should have been refused"
        return plan

    def reserve(self, sequences: Iterable[Sequence]) -> bool:
        """Give running sequences the blocks of their next step without preemption.

        If many blocks are free, all get some more as soon as one needs any: a device that is told
        of new blocks waits for the host.
        """
        every = list(sequences)
        if all(self.blocks.holds(s, self.slots_for(len(s))) for s in every):
            return True
        ahead = BLOCKS_AHEAD * self.blocks.block_size
        most = self.blocks.blocks_for(self.num_lookahead_slots + ahead) + 1
        if len(every) * most > self.blocks.num_free_blocks // 2:
            ahead = 0
        slots = (min(self.slots_for(len(s)) + ahead, self.most_slots(s)) for s in every)
        return all(map(self.blocks.extend, every, slots))

    def may_preempt(self) -> bool:
        """Return whether the next plan may take the blocks of a running sequence."""
        if not self.running:
            return False
        if self.waiting and self.waiting[0].priority < self.running[-1].priority:
            return True
        return not self.reserve(s for s in self.running if not s.is_prefilling)

    def _decode(self, plan: Schedule) -> None:
        decoding = [s for s in self.running if not (s.is_prefilling or s.waits_for_grammar)]
        if self.reserve(decoding):
            plan.decode = [Chunk(sequence, 1, len(sequence.drafts)) for sequence in decoding]
            return
        for sequence in decoding:
            if sequence.status is not SequenceStatus.RUNNING:
                continue
            slots = self.slots_for(len(sequence))
            while not self.blocks.extend(sequence, slots):
                self._preempt(self.running[-1], plan)
                if sequence.status is not SequenceStatus.RUNNING:
                    break
            else:
                plan.decode.append(Chunk(sequence, 1, len(sequence.drafts)))

    def _continue_prompts(self, plan: Schedule) -> int:
        """Add chunks of the running prompts; return the rest of the step's token budget."""
        budget = self.prompt_budget(decoding=bool(plan.decode))
        for sequence in self.running:
            if sequence.is_prefilling and budget and not sequence.waits_for_grammar:
                budget = self._add_prompt(plan, sequence, budget)
        return budget

    def holds(self, num_decoding: int) -> bool:
        """Return whether the prompts that could begin wait for others, as so many decode."""
        num_empty = max(self.max_num_seqs - len(self.running), 0)
        first = [s for s in self.waiting[:num_empty] if s.can_begin]
        if not first or any(s.is_prefilling for s in self.running):
            return False
        if first[0].num_preemptions or first[0].priority < self.running[-1].priority:
            return False
        if self.max_prompts is not None and len(first) >= self.max_prompts:
            return False  # they fill a step already
        num_tokens, added_s = sum(map(len, first)), self.prompt_budget.added_s
        return self._gathering.waits(len(first), num_decoding, num_tokens, added_s)

    def _admit(self, plan: Schedule, budget: int) -> None:
        self.may_begin_more = False
        self.is_holding = bool(plan.decode) and self.holds(len(plan.decode))
        if self.is_holding:
            return
        at = 0  # in the queue, which may be long: it is neither copied nor searched
        while at < len(self.waiting):
            sequence = self.waiting[at]
            # No sequence overtakes one that has just been preempted.
            if not budget or any(s.order <= sequence.order for s in plan.preempted):
                self.may_begin_more = True
                break
            if not sequence.can_begin:
                self.may_begin_more = True
                at += 1
                continue
            matched = []
            if not sequence.needs_every_token:
                unread_until = self._unread_until(sequence)
                matched = self.blocks.match(sequence, unread_until=unread_until)
            if not self._make_room(sequence, matched, plan):
                break
            del self.waiting[at]
            self.blocks.admit(sequence, matched, self.slots_for(len(sequence)))
            num_cached = len(matched) * self.blocks.block_size
            sequence.num_computed_tokens = num_cached
            sequence.num_drafter_tokens = max(num_cached, self._window_start(sequence))
            sequence.drafter_start = self.blocks.read_from(matched)
            if num_cached < sequence.num_drafter_tokens:
                sequence.drafter_start = sequence.num_drafter_tokens
            if sequence.num_cached_tokens is None:
                sequence.num_cached_tokens = num_cached
            sequence.status = SequenceStatus.RUNNING
            insort(self.running, sequence, key=lambda s: s.order)
            plan.admitted.append(sequence)
            if sequence.is_prefilling:
                budget = self._add_prompt(plan, sequence, budget)
            else:
                plan.decode.append(Chunk(sequence, 1, len(sequence.drafts)))
        if plan.admitted:
            self._gathering.began(len(plan.admitted))

    def _add_prompt(self, plan: Schedule, sequence: Sequence, budget: int) -> int:
        """Add a chunk of a prompt; return the prompt tokens that the step may still compute."""
        remaining = sequence.prefill_end - sequence.num_computed_tokens
        num_tokens = min(remaining, budget)
        samples = num_tokens == remaining and sequence.prefill_end == len(sequence)
        plan.prefill.append(Chunk(sequence, num_tokens, samples=samples))
        return 0 if len(plan.prefill) == self.max_prompts else budget - num_tokens

    def _window_start(self, sequence: Sequence) -> int:
        """Return the first position that the drafter reads of a sequence without cached blocks.

        A block begins there, so that an equal prompt can share all blocks that the drafter has
        read.
        """
        if self.draft_window is None or sequence.fixes_k:
            return 0
        num_before = max(0, sequence.num_prompt_tokens - self.draft_window)
        return num_before // self.blocks.block_size * self.blocks.block_size

    def _unread_until(self, sequence: Sequence) -> int:
        """Return the position before which the drafter need not have read cached blocks.

        Half the window behind it is enough for the drafter. Otherwise a prompt that is a little
        shorter than the one before it would share few of its blocks.
        """
        if not sequence.num_speculative_tokens or (self.drafting_pauses and not sequence.fixes_k):
            return len(sequence)
        if self.draft_window is None or not self._window_start(sequence):
            return 0
        return sequence.num_prompt_tokens - self.draft_window // 2

    def _make_room(self, sequence: Sequence, matched: list[int], plan: Schedule) -> bool:
        """Find a place and blocks; preempt running sequences of lower priority if needed."""
        slots = self.slots_for(len(sequence))
        while True:
            # A block for each running sequence stays free, or they would be preempted at once.
            has_blocks = self.blocks.can_admit(matched, slots, num_reserved=len(self.running))
            if has_blocks and len(self.running) < self.max_num_seqs:
                return True
            last = self.running[-1] if self.running else None
            if last is None or last.priority <= sequence.priority:
                return False
            self._preempt(last, plan)

    def _preempt(self, sequence: Sequence, plan: Schedule) -> None:
        self.running.remove(sequence)
        self.blocks.free(sequence)
        sequence.forget_computed()
        sequence.status = SequenceStatus.WAITING
        sequence.num_preemptions += 1
        self.add(sequence)
        plan.preempted.append(sequence)
        for chunks in (plan.decode, plan.prefill):
            chunks[:] = [chunk for chunk in chunks if chunk.sequence is not sequence]

    def retire(self, sequence: Sequence) -> None:
        """Remove a finished sequence from its queue and free its blocks."""
        self.version += 1
        for queue in (self.running, self.waiting):
            at = bisect_left(queue, sequence.order, key=lambda s: s.order)
            if at < len(queue) and queue[at] is sequence:
                del queue[at]
        self.blocks.free(sequence)
