"""Rules and log-probabilities of requests in a captured decode step.

The graphs of a step know neither. Where sequences ask for them, the step finds the target's own
tokens outside a graph, and `StepRules` replaces those of these sequences. It launches kernels on
the step's stream and never waits for the device: what changes from step to step lies there.

Shapes: B rows of the step's buffers, K most drafts of a sequence, J = K + 1, T target rows, V
vocabulary. Of the sequences that ask for something, M have rules, P want log-probabilities and N do
one or both; R rows of these, J a sequence, W tokens of a tail, X columns of `logprob_table`.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from peagle.engine.grammar.compiler import full_bitmask, unpack
from peagle.engine.rules import (
    CountSlots,
    build_rules,
    has_penalties,
    has_rules,
    without_reached_minimum,
)
from peagle.engine.sequence import Sequence
from peagle.kernels.logits import process_logits
from peagle.kernels.logits_rules import (
    NO_TOKEN,
    LogitsRules,
    PaddedRows,
    PaddedTreeRows,
    context_tails,
    shift_tails,
)
from peagle.kernels.logprobs import TokenLogprobs, logprob_table, read_logprobs
from peagle.kernels.step_state import StepRecord, StepState
from peagle.kernels.trees import TreePaths
from peagle.kernels.upload import upload, upload_ints
from peagle.kernels.verify_triton import SequenceSampling, VerifyScratch, own_tokens


@dataclass(frozen=True, slots=True)
class PendingLogprobs:
    """Log-probabilities of the tokens that one step emitted, on their way to the host.

    Attributes:
        rows: the step's rows of the P sequences.
        num_top: how many most likely tokens each of them wants.
        table_PJX: on the host, written once all that was launched up to `StepRules.after` is done.
    """

    rows: SequenceOf[int]
    num_top: SequenceOf[int]
    table_PJX: Tensor

    def read(self, new_token_ids: SequenceOf[SequenceOf[int]]) -> list[list[TokenLogprobs] | None]:
        """Return the log-probabilities of each row's tokens, None for rows that want none.

        Args:
            new_token_ids: of each row of the step, the emitted tokens or the first of them. From
                NO_TOKEN on, a row's tokens get none.
        """
        found: list[list[TokenLogprobs] | None] = [None] * len(new_token_ids)
        for row, num_top, table in zip(
            self.rows, self.num_top, self.table_PJX.tolist(), strict=True
        ):
            of_row = found[row] = []
            for token, columns in zip(new_token_ids[row], table, strict=False):
                if token == NO_TOKEN:
                    break
                of_row.append(read_logprobs(columns, token, num_top))
        return found


@dataclass(frozen=True, slots=True)
class _Tails:
    """The last tokens of the M contexts, for bad words.

    Attributes:
        index: the row of each sequence in these tensors, by its number.
        tails_MW: see `context_tails`.
        lengths_M: int64, tokens of prompt and output.
    """

    index: dict[int, int]
    tails_MW: Tensor
    lengths_M: Tensor

    @classmethod
    def start(
        cls,
        sequences: SequenceOf[Sequence],
        width: int,
        device: torch.device,
        old: _Tails | None,
    ) -> _Tails:
        """Take tails from the host, or from `old` where the device has seen more tokens."""
        contexts = [s.token_ids for s in sequences]
        tails_MW = context_tails(contexts, width, device)
        lengths_M = upload_ints([len(context) for context in contexts], device)
        if old is not None:
            at = [old.index.get(s.seq_id, -1) for s in sequences]
            at_M = upload_ints(at, device)
            seen_M = torch.where(at_M >= 0, old.lengths_M[at_M.clamp_min(0)], 0)
            # A sequence had room for its own words before: what it needs is never cut off.
            missing = width - old.tails_MW.shape[1]
            old_MW = torch.nn.functional.pad(old.tails_MW, (missing, 0), value=NO_TOKEN)
            is_newer_M1 = (seen_M > lengths_M).unsqueeze(1)
            tails_MW = torch.where(is_newer_M1, old_MW[at_M.clamp_min(0)], tails_MW)
            lengths_M = torch.maximum(lengths_M, seen_M)
        return cls({s.seq_id: i for i, s in enumerate(sequences)}, tails_MW, lengths_M)

    def shifted(self, emitted_MJ: Tensor) -> _Tails:
        """Return the tails behind the emitted tokens."""
        return replace(
            self,
            tails_MW=shift_tails(self.tails_MW, emitted_MJ),
            lengths_M=self.lengths_M + (emitted_MJ != NO_TOKEN).sum(1),
        )


@dataclass(slots=True)
class _Batch:
    """The N sequences that ask for something: first the M with rules, last the P.

    Attributes:
        num_columns: J.
        ruled: the M sequences.
        rows: the step's row of each of the N.
        num_top: most likely tokens that each of the P wants.
        rules: of the M; None without any.
        has_grammars: whether some of the M have one.
        rows_N: `rows` on the device.
        start_loc_B: first of the R rows of each sequence, by its row in the step.
        scratch: for the M * J rows.
        tails: None where no rule needs any.
        logits_TV: of the step, between `StepRules.apply` and `StepRules.after`.
    """

    num_columns: int
    ruled: list[Sequence]
    rows: list[int]
    num_top: list[int]
    rules: LogitsRules | None
    has_grammars: bool
    rows_N: Tensor
    start_loc_B: Tensor
    scratch: VerifyScratch
    tails: _Tails | None
    logits_TV: Tensor | None = None


class StepRules:
    """Applies the rules of sequences, and measures log-probabilities, between a step's graphs.

    A step is `apply`, the match of its drafts with the tokens, `after`. The result is that of
    `Sampler.sample`, up to the rounding of the kernels.

    Args:
        slots: the sampler's, so that its steps and these may take turns.
    """

    def __init__(self, slots: CountSlots, vocab_size: int, device: torch.device) -> None:
        self._slots = slots
        self._vocab_size = vocab_size
        self._device = device
        self._key: object = None
        self._batch: _Batch | None = None

    @property
    def is_needed(self) -> bool:
        """Whether a sequence of the step has rules or wants log-probabilities."""
        batch = self._batch
        return batch is not None and bool(batch.rules or batch.has_grammars or batch.num_top)

    @torch.inference_mode()
    def set_rows(self, sequences: SequenceOf[Sequence | None], num_drafts: int) -> None:
        """Say which sequences stand in the rows of the next steps, and how many drafts these have.

        The host may know a sequence as it was before the step in flight, if the sequence was in
        `apply` and `after` of that step. A sequence whose tokens of a step are thrown away must
        be missing once before it comes back. Wherever a sequence is released, call this before
        the next step.

        Args:
            sequences: one a row; None for empty rows.
            num_drafts: K, 0 for steps without drafts.
        """
        members = [
            (rank, row, s)
            for row, s in enumerate(sequences)
            if s is not None and (rank := _rank(s)) is not None
        ]
        members.sort(key=lambda member: member[:2])
        # A sequence that was released has another slot.
        slots = [self._slots.of(s) if has_penalties(s) else -1 for _, _, s in members]
        of_rows = [(rank, row, s.seq_id) for rank, row, s in members]
        key = num_drafts, of_rows, slots
        old, device, columns = self._batch, self._device, num_drafts + 1
        if key == self._key and (old is None or old.tails is None):
            return
        self._key, self._batch = key, None
        if not members:
            return
        ruled = [s for rank, _, s in members if rank < _LOGPROBS]
        rules = build_rules(ruled, self._slots, self._vocab_size, device) if ruled else None
        tails = None
        if rules is not None and (words := rules.bad_words) is not None and words.prefix_len:
            tails = _Tails.start(ruled, words.prefix_len, device, old and old.tails)
        rows = [row for _, row, _ in members]
        start_loc = [0] * (max(rows) + 1)
        for index, row in enumerate(rows):
            start_loc[row] = index * columns
        self._batch = _Batch(
            num_columns=columns,
            ruled=ruled,
            rows=rows,
            num_top=[n for _, _, s in members if (n := s.params.logprobs) is not None],
            rules=rules,
            has_grammars=any(s.grammar is not None for s in ruled),
            rows_N=upload_ints(rows, device),
            start_loc_B=upload_ints(start_loc, device),
            scratch=VerifyScratch.allocate(len(ruled) * columns, self._vocab_size, device),
            tails=tails,
        )

    @torch.inference_mode()
    def apply(
        self,
        logits_TV: Tensor,
        start_loc: Tensor,
        drafts_BK: Tensor,
        state: StepState,
        sampling: SequenceSampling,
        running_B: Tensor,
        tokens_T: Tensor,
        *,
        paths_of: Callable[[Tensor, Tensor], TreePaths] | None = None,
        reject: Callable[[Tensor, Tensor, Tensor, VerifyScratch], None] | None = None,
    ) -> None:
        """Replace the target's own tokens in the rows of sequences with rules.

        The masks of grammars must be prepared by then.

        Args:
            logits_TV: the target's, float32, bfloat16 or float16.
            start_loc: first row of each sequence, as in `TargetBatch`; sequence b has
                state.num_drafts_B[b] + 1 rows if it runs.
            drafts_BK: as many of them as `state.num_drafts_B` says.
            state: before the step.
            sampling: how each sequence samples; min-p is taken from the rules instead.
            running_B: not 0 for sequences that run.
            tokens_T: int64, changed in place; NO_TOKEN where the raw logits are broken.
            paths_of: where drafts are trees, their paths, see `StepTrees`.
            reject: rejects drawn drafts, see `DecodeStep`: called with logits of rows, the first
                row of each sequence, which sequences run there, and what was found of the rows.
                None: no draft was drawn.
        """
        batch = self._batch
        assert batch is not None, "no sequence asks for anything"
        batch.logits_TV = logits_TV if batch.num_top else None
        if batch.rules is not None:
            batch.rules = without_reached_minimum(batch.rules, batch.ruled)
        if batch.rules is None and not batch.has_grammars:
            return
        rows_M = batch.rows_N[: len(batch.ruled)]
        columns_J = torch.arange(batch.num_columns, device=self._device)
        is_row_MJ = columns_J <= state.num_drafts_B[rows_M].unsqueeze(1)
        is_row_MJ = is_row_MJ & (running_B[rows_M] != 0).unsqueeze(1)
        at_MJ = (start_loc[rows_M].unsqueeze(1) + columns_J).clamp_max(len(tokens_T) - 1)
        at_R = at_MJ.flatten()
        raw_RV = logits_TV[at_R]
        sizes = (
            drafts_BK[rows_M, : batch.num_columns - 1],
            state.num_drafts_B[rows_M],
            state.num_outputs_B[rows_M],
            len(at_R),
            None if batch.tails is None else batch.tails.tails_MW,
        )
        paths = None if paths_of is None else paths_of(rows_M, at_MJ)
        processed_RV = process_logits(
            raw_RV,
            PaddedRows(*sizes) if paths is None else PaddedTreeRows(*sizes, paths),
            batch.rules or LogitsRules(),
            sampling.temperature_B[rows_M],
            self._slots.counts,
            self._grammar_masks(batch),
        )
        all_greedy = reject is None and all(s.params.is_greedy for s in batch.ruled)
        own_tokens(
            processed_RV,
            torch.where(is_row_MJ, rows_M.unsqueeze(1), -1).flatten(),
            batch.start_loc_B,
            None if all_greedy else replace(sampling, min_p_B=None),
            state.num_outputs_B,
            batch.scratch,
            offsets_R=None if paths is None else paths.depths_BJ.flatten(),
        )
        # Rules may hide that the logits mean nothing.
        is_broken_R = ~raw_RV.amax(-1).isfinite()
        own_R = batch.scratch.tokens_R.masked_fill_(is_broken_R, NO_TOKEN)
        if reject is not None:
            runs_B = torch.zeros_like(running_B)
            runs_B[rows_M] = running_B[rows_M]
            reject(processed_RV, batch.start_loc_B, runs_B, batch.scratch)
        # Padding adds 0, so that it may share a row with others.
        change_R = torch.where(is_row_MJ.flatten(), own_R - tokens_T[at_R], 0)
        tokens_T.index_add_(0, at_R, change_R)

    def _grammar_masks(self, batch: _Batch) -> Tensor | None:
        """Return what grammars permit in the rows of the M sequences, bool; None without grammars.

        Rows behind a draft that a grammar refuses permit everything: no token is taken from them.
        """
        if not batch.has_grammars:
            return None
        packed_RW = full_bitmask(len(batch.ruled) * batch.num_columns, self._vocab_size)
        packed_MJW = packed_RW.view(len(batch.ruled), batch.num_columns, -1)
        for index, bitmask_RW in _prepared_masks(batch):
            prepared_JW = bitmask_RW[: batch.num_columns]
            packed_MJW[index, : len(prepared_JW)] = prepared_JW
        return unpack(upload(packed_RW, self._device), self._vocab_size)

    @torch.inference_mode()
    def drop_refused(self, state: StepState) -> None:
        """Drop the drafts from the first one that a grammar refuses, where acceptance is synthetic.

        Such acceptance takes drafts that no grammar permits. The masks must be prepared by then.
        """
        batch = self._batch
        assert batch is not None, "no sequence asks for anything"
        if not batch.has_grammars:
            return
        found = _prepared_masks(batch)
        rows_M = upload_ints([batch.rows[index] for index, _ in found], self._device)
        most_M = upload_ints([len(bitmask_RW) - 1 for _, bitmask_RW in found], self._device)
        state.num_drafts_B[rows_M] = torch.minimum(state.num_drafts_B[rows_M], most_M)

    @torch.inference_mode()
    def after(
        self, out: StepRecord, start_loc: Tensor, rows_X: Tensor | None = None
    ) -> PendingLogprobs | None:
        """Count what the step emitted, and measure log-probabilities where they are wanted.

        Args:
            out: of the step that `apply` began. All emitted tokens count, those behind a stop
                condition too: the sequence has ended then.
            start_loc: as of `apply`.
            rows_X: where drafts are trees, where the row of a token was at `apply`, see
                `StepTrees`. None: where it is.
        """
        batch = self._batch
        assert batch is not None, "no sequence asks for anything"
        emitted_NJ = out.emitted_BJ[batch.rows_N, : batch.num_columns]
        emitted_MJ = emitted_NJ[: len(batch.ruled)]
        if batch.rules is not None and batch.rules.has_penalties:
            counts, slots_M = self._slots.counts, batch.rules.count_slots_B
            assert counts is not None and slots_M is not None
            counts.add(
                slots_M.unsqueeze(1).expand_as(emitted_MJ), emitted_MJ, emitted_MJ != NO_TOKEN
            )
        if batch.tails is not None:
            batch.tails = batch.tails.shifted(emitted_MJ)
        if not batch.num_top:
            return None
        logits_TV, batch.logits_TV = batch.logits_TV, None
        assert logits_TV is not None, "`apply` comes first"
        num_wanting = len(batch.num_top)
        emitted_PJ, rows_P = emitted_NJ[-num_wanting:], batch.rows_N[-num_wanting:]
        columns_J = torch.arange(emitted_PJ.shape[1], device=self._device)
        at_PJ = (start_loc[rows_P].unsqueeze(1) + columns_J).clamp_max(len(logits_TV) - 1)
        if rows_X is not None:
            at_PJ = rows_X[at_PJ]
        table_RX = logprob_table(
            logits_TV[at_PJ.flatten()], emitted_PJ.flatten().clamp_min(0), max(batch.num_top)
        )
        shape = *emitted_PJ.shape, table_RX.shape[1]
        table_PJX = torch.empty(shape, dtype=table_RX.dtype, pin_memory=table_RX.is_cuda)
        table_PJX.copy_(table_RX.view(shape), non_blocking=True)
        return PendingLogprobs(batch.rows[-num_wanting:], batch.num_top, table_PJX)


def _prepared_masks(batch: _Batch) -> list[tuple[int, Tensor]]:
    """Return the index among the M and the masks of each grammar that has some prepared."""
    return [
        (index, masks.bitmask_RW)
        for index, sequence in enumerate(batch.ruled)
        if sequence.grammar is not None and (masks := sequence.grammar.prepared) is not None
    ]


_LOGPROBS = 2


def _rank(sequence: Sequence) -> int | None:
    """Return 0 for rules alone, 1 for both, 2 for log-probabilities alone, None for neither."""
    wants_logprobs = sequence.params.logprobs is not None
    if has_rules(sequence):
        return int(wants_logprobs)
    return _LOGPROBS if wants_logprobs else None
