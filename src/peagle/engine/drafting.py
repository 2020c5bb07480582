"""After a target pass: what the drafter reads of it, and the drafts of the next step.

A sequence that does not draft leaves a hole in the drafter's KV. Its last features are kept; when
it drafts again, one pass over them closes the hole, or, if it has grown larger than what is kept,
the drafter's context begins there. Nothing ever looks into a hole.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from peagle.config.speculative import MAX_SPECULATIVE_TOKENS
from peagle.engine.features import FeatureRings
from peagle.engine.grammar import DraftGrammar
from peagle.engine.model_runner import TargetPass, block_tables
from peagle.engine.sampler import Sampler
from peagle.engine.scheduler import Chunk
from peagle.engine.sequence import Sequence
from peagle.speculation import Drafts, PromptLookup, Proposer, TargetStep


class Drafting(Protocol):
    """What follows a target pass; leaves the drafts on the sequences.

    Attributes:
        most_drafts: K of the batch; a sequence may have less. With 0 nobody drafts.
    """

    most_drafts: int

    def draft(self, done: TargetPass) -> None:
        """Draft for the sequences of a pass whose tokens have been appended."""
        ...


def num_drafts(sequence: Sequence, most: int, max_model_len: int) -> int:
    """Drafts of the next step: none may stand beyond the context."""
    return max(0, min(sequence.num_speculative_tokens, most, max_model_len - len(sequence)))


class LookupDrafting:
    """Drafts from the text: no features, no KV."""

    def __init__(self, lookup: PromptLookup, vocab_size: int, max_model_len: int) -> None:
        self.lookup = lookup
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.most_drafts = MAX_SPECULATIVE_TOKENS

    def draft(self, done: TargetPass) -> None:
        for chunk in done.chunks:
            sequence = chunk.sequence
            if chunk.samples and not sequence.is_finished:
                k = num_drafts(sequence, self.most_drafts, self.max_model_len)
                found = self.lookup.find(sequence.token_ids, k) if k else []
                if sequence.grammar is not None:
                    found = found[: sequence.grammar.count_allowed(found)]
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


class HeadDrafting:
    """Drafts with a head.

    Args:
        proposer: the head and its KV.
        sampler: for the sampling parameters of a batch.
        vocab_size: of the target.
        max_model_len: longest sequence.
        max_draft_len: positions up to which the head drafts.
        features: of sequences that do not draft at present.
    """

    def __init__(
        self,
        proposer: Proposer,
        sampler: Sampler,
        vocab_size: int,
        max_model_len: int,
        max_draft_len: int,
        features: FeatureRings | None = None,
    ) -> None:
        self.proposer = proposer
        self.vocab_size = vocab_size
        self.sampler = sampler
        self.max_model_len = max_model_len
        self.max_draft_len = max_draft_len
        self.features = features or FeatureRings()
        self.most_drafts = MAX_SPECULATIVE_TOKENS
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
        if any(grammars):
            draftable = self.proposer.draft_token_ids
            grammar = DraftGrammar(grammars, self.vocab_size, draft_token_ids=draftable)
            _hand_out(readings, self.proposer.propose(replace(step, constraint=grammar)))
            grammar.finish()
        else:
            _hand_out(readings, self.proposer.propose(step))

    def _read(
        self, chunk: Chunk, pass_start: int, row: int, features_TA: Tensor
    ) -> _Reading | None:
        """What the drafter reads of one sequence; keeps the features for later if nothing."""
        sequence = chunk.sequence
        end = min(sequence.num_computed_tokens, self.max_draft_len)
        k = self._num_drafts(sequence) if chunk.samples else 0
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
        self.features.release(sequence)
        if first >= end:
            return None
        sequence.num_drafter_tokens = end
        return _Reading(sequence, first, end, pass_start, row, kept_NA, k)

    def _is_paused(self, chunk: Chunk, pass_start: int) -> bool:
        """Whether the drafter leaves a sequence alone.

        Where nobody drafts it still reads prompts, for what that costs beside the target's pass:
        their blocks can then be shared, and no hole begins before the output.
        """
        sequence = chunk.sequence
        is_decoding = chunk.samples and pass_start >= sequence.num_prompt_tokens
        return not sequence.num_speculative_tokens or (is_decoding and not self.most_drafts)

    def _num_drafts(self, sequence: Sequence) -> int:
        k = num_drafts(sequence, self.most_drafts, self.max_model_len)
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
        if sequence.may_speculate and len(features_NA):
            self.features.open(sequence, position, features_NA).put(features_NA)

    def _step(self, done: TargetPass, readings: SequenceOf[_Reading]) -> TargetStep:
        sequences = [reading.sequence for reading in readings]
        starts = [s.drafter_start for s in sequences]
        device = done.tokens_T.device
        starts_B = torch.tensor(starts, device=device) if any(starts) else None
        if _is_whole(done, readings):
            assert done.sampled is not None
            return TargetStep(
                tokens_T=done.tokens_T,
                positions_T=done.positions_T,
                start_loc=done.start_loc,
                features_TA=done.features_TA,
                num_accepted_B=done.sampled.verified.num_accepted_B,
                next_tokens_B=done.sampled.verified.next_tokens_B,
                block_tables_BM=done.block_tables_BM,
                num_drafts=[reading.num_drafts for reading in readings],
                sampling=done.sampled.sampling,
                histories=[s.token_ids for s in sequences],
                context_starts_B=starts_B,
            )
        return self._gathered(done, readings, starts_B)

    def _gathered(
        self, done: TargetPass, readings: SequenceOf[_Reading], starts_B: Tensor | None
    ) -> TargetStep:
        """A step of those rows and kept features that are read, in one packed batch."""
        sequences = [reading.sequence for reading in readings]
        device = done.tokens_T.device

        def ints(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

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
            block_tables_BM=block_tables(sequences, device),
            num_drafts=[reading.num_drafts for reading in readings],
            sampling=self.sampler.tensors(sequences),
            histories=[s.token_ids for s in sequences],
            context_starts_B=starts_B,
        )


def _is_whole(done: TargetPass, readings: SequenceOf[_Reading]) -> bool:
    """Whether the drafter reads what the pass settled of every sequence, and nothing else."""
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
