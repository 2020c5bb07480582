"""After a target pass: what the drafter reads of it, and the drafts of the next step.

A sequence that does not draft leaves a hole in the drafter's KV. Its last features are kept. When
it drafts again, one pass over them closes the hole; if the hole is larger than what is kept, the
drafter's context begins behind it. Attention never reads a hole.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from peagle.config.speculative import MAX_SPECULATIVE_TOKENS
from peagle.engine.features import FeatureRings
from peagle.engine.grammar import DraftGrammar, prepare
from peagle.engine.model_runner import TargetPass, block_tables
from peagle.engine.sampler import Sampler
from peagle.engine.scheduler import Chunk
from peagle.engine.sequence import Sequence
from peagle.speculation import Drafts, HeadProposer, PromptLookup, TargetStep

RESUME_AFTER = 8


class DepthPolicy:
    """K of a step: what is scheduled for a number of sequences, and 0 for a while after a 0.

    Drafting stops at once where 0 is scheduled. It begins again when drafts were scheduled at
    RESUME_AFTER steps in a row, or when no sequence runs any more: resuming costs a pass over what
    the drafter has missed, which a load that swings around a border would pay again and again.
    Between other K a change costs nothing and comes at once.

    Args:
        scheduled: K for a number of sequences that run together.
    """

    def __init__(self, scheduled: Callable[[int], int]) -> None:
        self._scheduled = scheduled
        self._num_calm = RESUME_AFTER

    def __call__(self, num_sequences: int) -> int:
        """Return K for so many sequences at this step."""
        return self._scheduled(num_sequences) if self._num_calm >= RESUME_AFTER else 0

    def observe(self, num_sequences: int) -> None:
        """Count a step that begins with so many running sequences."""
        if not num_sequences:
            self._num_calm = RESUME_AFTER
        elif self._scheduled(num_sequences):
            self._num_calm += 1
        else:
            self._num_calm = 0


class Drafting:
    """Leaves the drafts of the next step on the sequences of a target pass.

    Attributes:
        most_drafts: K of the batch; a sequence may draft less. With 0 no sequence drafts.
    """

    def __init__(self, max_model_len: int) -> None:
        self.max_model_len = max_model_len
        self.most_drafts = MAX_SPECULATIVE_TOKENS

    def draft(self, done: TargetPass) -> None:
        """Draft for the sequences of a pass whose new tokens have been appended."""
        raise NotImplementedError

    def num_drafts(self, sequence: Sequence) -> int:
        """Return the number of drafts of the next step; none may stand beyond the context."""
        room = self.max_model_len - len(sequence)
        return max(0, min(sequence.num_speculative_tokens, self.most_drafts, room))


class LookupDrafting(Drafting):
    """Drafts from the text: it needs no features and no KV."""

    def __init__(self, lookup: PromptLookup, max_model_len: int) -> None:
        super().__init__(max_model_len)
        self.lookup = lookup

    def draft(self, done: TargetPass) -> None:
        for chunk in done.chunks:
            sequence, grammar = chunk.sequence, chunk.sequence.grammar
            if not chunk.samples or sequence.is_finished:
                continue
            k = self.num_drafts(sequence)
            found = self.lookup.find(sequence.token_ids, k) if k else []
            if grammar is not None:
                prepare([grammar], [found])
                found = grammar.allowed(found)
            sequence.drafts = found


@dataclass(frozen=True, slots=True)
class _Reading:
    """Positions `first` to before `end` of a sequence that the drafter reads now.

    `row` is the packed target row of the position `pass_start`; features of positions before that
    one are `kept_NA`.
    """

    sequence: Sequence
    first: int
    end: int
    pass_start: int
    row: int
    kept_NA: Tensor | None
    num_drafts: int


class HeadDrafting(Drafting):
    """Drafts with a head.

    Args:
        proposer: the head and its KV.
        sampler: gives the sampling parameters of a batch.
        vocab_size: size of the target's vocabulary.
        max_model_len: length of the longest sequence.
        max_draft_len: positions up to which the head drafts.
        features: features of sequences that do not draft at present.
    """

    def __init__(
        self,
        proposer: HeadProposer,
        sampler: Sampler,
        vocab_size: int,
        max_model_len: int,
        max_draft_len: int,
        features: FeatureRings,
    ) -> None:
        super().__init__(max_model_len)
        self.proposer = proposer
        self.vocab_size = vocab_size
        self.sampler = sampler
        self.max_draft_len = max_draft_len
        self.features = features
        self._has_warned = False

    @torch.inference_mode()
    def draft(self, done: TargetPass) -> None:
        readings: list[_Reading] = []
        row = 0
        for chunk, pass_start in zip(done.chunks, done.starts, strict=True):
            if not chunk.sequence.is_finished:
                reading = self._read(chunk, pass_start, row, done.features_TA)
                readings += [reading] if reading else []
            row += chunk.num_tokens + chunk.num_drafts
        if not readings:
            return
        step = self._step(done, readings)
        grammars = [reading.sequence.grammar for reading in readings]
        if not any(grammars):
            _hand_out(readings, self.proposer.propose(step))
            return
        draftable = self.proposer.draft_token_ids
        constraint = DraftGrammar(grammars, self.vocab_size, draft_token_ids=draftable)
        _hand_out(readings, self.proposer.propose(replace(step, constraint=constraint)))
        constraint.finish()

    def _read(
        self, chunk: Chunk, pass_start: int, row: int, features_TA: Tensor
    ) -> _Reading | None:
        """Return what the drafter reads of one sequence; where it reads nothing, keep features."""
        sequence = chunk.sequence
        end = min(sequence.num_computed_tokens, self.max_draft_len)
        k = self._num_drafts_within(sequence) if chunk.samples else 0
        if chunk.samples:
            sequence.drafts, sequence.draft_probs_KV = [], None
        if self._is_paused(chunk, pass_start):
            num_kept = max(end - pass_start, 0)
            self._keep(sequence, features_TA[row : row + num_kept], pass_start)
            return None
        first = sequence.num_drafter_tokens
        kept = sequence.pending_features
        if kept is not None and kept.first > first:
            first = sequence.drafter_start = kept.first
        # Captured steps keep features beyond the head's reach too.
        kept_NA = None if kept is None else kept.get()[: max(end - kept.first, 0)]
        self.features.release(sequence.seq_id)
        sequence.pending_features = None
        if first >= end:
            return None
        sequence.num_drafter_tokens = end
        return _Reading(sequence, first, end, pass_start, row, kept_NA, k)

    def _is_paused(self, chunk: Chunk, pass_start: int) -> bool:
        """Return whether the drafter leaves a sequence alone.

        While drafting pauses the head still reads prompts, which costs little beside the target's
        pass: sequences can then share the prompt's blocks, and no hole begins before the output.
        """
        sequence = chunk.sequence
        is_decoding = chunk.samples and pass_start >= sequence.num_prompt_tokens
        return not sequence.num_speculative_tokens or (is_decoding and not self.most_drafts)

    def _num_drafts_within(self, sequence: Sequence) -> int:
        k = self.num_drafts(sequence)
        # The last of k drafts comes from the slot at position len + k - 3.
        within = max(0, self.max_draft_len + 2 - len(sequence))
        if k > 0 and within == 0 and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"A sequence has {len(sequence)} tokens and goes on without drafts: the head "
                f"drafts up to {self.max_draft_len}. To draft on, set max_model_len in the "
                "speculative configuration; to draft well there, train the head on longer texts.",
                stacklevel=2,
            )
        return min(k, within)

    def _keep(self, sequence: Sequence, features_NA: Tensor, position: int) -> None:
        if sequence.num_speculative_tokens and len(features_NA):
            if sequence.pending_features is None:
                ring = self.features.open(sequence.seq_id, position, features_NA)
                sequence.pending_features = ring
            sequence.pending_features.put(features_NA)

    def _step(self, done: TargetPass, readings: SequenceOf[_Reading]) -> TargetStep:
        sequences = [reading.sequence for reading in readings]
        starts = [s.drafter_start for s in sequences]
        shared = {
            "num_drafts": [reading.num_drafts for reading in readings],
            "histories": [s.token_ids for s in sequences],
            "context_starts_B": torch.tensor(starts, device=done.device) if any(starts) else None,
        }
        if not _is_whole(done, readings):
            return self._gathered_step(done, readings, shared)
        assert done.sampled is not None
        return TargetStep(
            tokens_T=done.batch.tokens_T,
            positions_T=done.batch.positions_T,
            start_loc=done.batch.query_start_loc,
            features_TA=done.features_TA,
            num_accepted_B=done.sampled.verified.num_accepted_B,
            next_tokens_B=done.sampled.verified.next_tokens_B,
            block_tables_BM=done.block_tables_BM,
            sampling=done.sampled.sampling,
            **shared,
        )

    def _gathered_step(
        self, done: TargetPass, readings: SequenceOf[_Reading], shared: dict
    ) -> TargetStep:
        """Return a step of those rows and kept features that are read, in one packed batch."""
        sequences = [reading.sequence for reading in readings]

        def ints(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=done.device)

        features = [done.features_TA]
        rows: list[int] = []
        tokens: list[int] = []
        positions: list[int] = []
        start_loc = [0]
        num_features = done.features_TA.shape[0]
        for reading in readings:
            if reading.kept_NA is not None:
                features.append(reading.kept_NA)
                rows += range(num_features, num_features + len(reading.kept_NA))
                num_features += len(reading.kept_NA)
            from_pass = range(max(reading.first, reading.pass_start), reading.end)
            rows += [reading.row + p - reading.pass_start for p in from_pass]
            tokens += reading.sequence.token_ids[reading.first : reading.end]
            positions += range(reading.first, reading.end)
            start_loc.append(len(rows))
        return TargetStep(
            tokens_T=ints(tokens),
            positions_T=ints(positions),
            start_loc=ints(start_loc),
            features_TA=torch.cat(features)[ints(rows)],
            num_accepted_B=ints([reading.end - reading.first - 1 for reading in readings]),
            next_tokens_B=ints([r.sequence.token_ids[r.end] for r in readings]),
            block_tables_BM=block_tables(sequences, done.device),
            sampling=self.sampler.tensors(sequences),
            **shared,
        )


def _is_whole(done: TargetPass, readings: SequenceOf[_Reading]) -> bool:
    """Return whether the drafter reads just what the pass settled of every sequence."""
    return len(readings) == len(done.chunks) and all(
        chunk.samples
        and chunk.num_tokens == 1
        and reading.kept_NA is None
        and reading.first == reading.pass_start
        and reading.end == reading.sequence.num_computed_tokens
        for chunk, reading in zip(done.chunks, readings, strict=True)
    )


def _hand_out(readings: SequenceOf[_Reading], drafts: Drafts) -> None:
    tokens = drafts.tokens_BK.tolist()
    for row, reading in enumerate(readings):
        if reading.num_drafts:
            sequence, k = reading.sequence, drafts.lens[row]
            sequence.drafts = tokens[row][:k]
            probs_BKV = drafts.probs_BKV
            sequence.draft_probs_KV = None if probs_BKV is None else probs_BKV[row]
