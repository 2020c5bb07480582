"""Rules and log-probabilities of requests in a captured decode step.

The graphs of a step know neither. If sequences ask for them, the step finds the target's own tokens
outside a graph, and `DecodeRules` replaces the tokens of these sequences. It launches kernels on
the step's stream and never waits for the device, which holds all data that changes from step to
step.

Shapes: B rows of the step's buffers, K most drafts of a sequence, J = K + 1, T target rows, V
vocabulary. P sequences want log-probabilities, and M sequences have rules that apply together; R
rows, J a sequence, W tokens of a tail, X columns of `logprob_table`.
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from peagle.engine.grammar.compiler import full_bitmask, to_bools
from peagle.engine.rules import (
    CountSlots,
    build_rules,
    has_masks,
    has_penalties,
    has_rules,
    without_reached_minimum,
)
from peagle.engine.sequence import Sequence
from peagle.kernels.drafts.step_state import DecodeResult, DecodeState
from peagle.kernels.paths import TreePaths
from peagle.kernels.sampling.logits import process_logits
from peagle.kernels.sampling.logits_rules import (
    NO_TOKEN,
    LogitsRules,
    PaddedRows,
    PaddedTreeRows,
    context_tails,
    shift_tails,
)
from peagle.kernels.sampling.logprobs import TokenLogprobs, read_logprobs
from peagle.kernels.sampling.logprobs_triton import tabulate_logprobs
from peagle.kernels.sampling.penalties_triton import penalise
from peagle.kernels.sampling.verify_triton import SequenceSampling, VerifyScratch, own_tokens
from peagle.kernels.upload import upload, upload_ints


@dataclass(frozen=True, slots=True)
class PendingLogprobs:
    """Log-probabilities of the tokens that one step emitted, on their way to the host.

    Attributes:
        rows: the step's rows of the P sequences.
        num_top: number of most likely tokens that each of them wants.
        table_PJX: table on the host, complete once all kernels launched up to `after` are done.
    """

    rows: SequenceOf[int]
    num_top: SequenceOf[int]
    table_PJX: Tensor

    def read(self, new_token_ids: SequenceOf[SequenceOf[int]]) -> list[list[TokenLogprobs] | None]:
        """Return the log-probabilities of each row's tokens, None for rows that want none.

        Args:
            new_token_ids: all or the first emitted tokens of each row. From NO_TOKEN on,
                a row's tokens get none.
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
        cls, sequences: SequenceOf[Sequence], width: int, device: torch.device, old: Self | None
    ) -> Self:
        """Return tails from the host, or from `old` where the device has seen more tokens."""
        contexts = [s.token_ids for s in sequences]
        tails_MW = context_tails(contexts, width, device)
        lengths_M = upload_ints([len(context) for context in contexts], device)
        if old is not None:
            at = [old.index.get(s.seq_id, -1) for s in sequences]
            at_M = upload_ints(at, device)
            seen_M = torch.where(at_M >= 0, old.lengths_M[at_M.clamp_min(0)], 0)
            # A sequence had room for its own words before: no token that it needs is cut off.
            missing = width - old.tails_MW.shape[1]
            old_MW = torch.nn.functional.pad(old.tails_MW, (missing, 0), value=NO_TOKEN)
            is_newer_M1 = (seen_M > lengths_M).unsqueeze(1)
            tails_MW = torch.where(is_newer_M1, old_MW[at_M.clamp_min(0)], tails_MW)
            lengths_M = torch.maximum(lengths_M, seen_M)
        return cls({s.seq_id: i for i, s in enumerate(sequences)}, tails_MW, lengths_M)

    def shifted(self, emitted_MJ: Tensor) -> Self:
        """Return the tails behind the emitted tokens."""
        return replace(
            self,
            tails_MW=shift_tails(self.tails_MW, emitted_MJ),
            lengths_M=self.lengths_M + (emitted_MJ != NO_TOKEN).sum(1),
        )


@dataclass(slots=True)
class _Ruled:
    """The M sequences whose rules are applied together.

    Attributes:
        num_columns: J.
        sequences: the M sequences.
        rows: the step's row of each.
        rules: rules besides grammars; None without any.
        has_grammars: whether some have a grammar.
        rows_M: `rows` on the device.
        start_loc_B: first of the R rows of each sequence, by its row in the step.
        scratch: scratch memory for the R rows.
        tails: last tokens of the contexts; None if no rule needs them.
    """

    num_columns: int
    sequences: list[Sequence]
    rows: list[int]
    rules: LogitsRules | None
    has_grammars: bool
    rows_M: Tensor
    start_loc_B: Tensor
    scratch: VerifyScratch
    tails: _Tails | None


@dataclass(slots=True)
class _Wanting:
    """The P sequences that want log-probabilities.

    Attributes:
        rows: the step's row of each.
        num_top: most likely tokens that each wants.
        rows_P: `rows` on the device.
        logits_TV: logits of the step, between `DecodeRules.apply` and `DecodeRules.after`.
    """

    rows: list[int]
    num_top: list[int]
    rows_P: Tensor
    logits_TV: Tensor | None = None


class DecodeRules:
    """Applies the rules of sequences, and measures log-probabilities, between a step's graphs.

    A step is `apply`, the match of its drafts with the tokens, `after`. The result is that of
    `Sampler.sample`, up to the rounding of the kernels. Masks take several passes over the logits,
    so sequences with masks are treated apart from the others.

    Args:
        slots: slots of the sampler, so that its steps and these may take turns.
    """

    def __init__(self, slots: CountSlots, vocab_size: int, device: torch.device) -> None:
        self._slots = slots
        self._vocab_size = vocab_size
        self._device = device
        self._key: object = None
        self._masked: _Ruled | None = None
        self._unmasked: _Ruled | None = None
        self._wanting: _Wanting | None = None

    @property
    def is_needed(self) -> bool:
        """Return whether a sequence of the step has rules or wants log-probabilities."""
        return bool(self._ruled or self._wanting)

    @property
    def _ruled(self) -> list[_Ruled]:
        every = (self._masked, self._unmasked)
        return [ruled for ruled in every if ruled and (ruled.rules or ruled.has_grammars)]

    @torch.inference_mode()
    def set_rows(self, sequences: SequenceOf[Sequence | None], k: int) -> None:
        """Set the sequences in the rows of the next steps, and the number of their drafts.

        The host may know a sequence from before the step in flight, if the sequence was in `apply`
        and `after` of that step. A sequence whose tokens of a step are thrown away must be missing
        once before it comes back. After a sequence is released, call this before the next step.

        Args:
            sequences: one a row; None for empty rows.
            k: K, 0 for steps without drafts.
        """
        masked, unmasked, num_top = dict[int, Sequence](), dict[int, Sequence](), dict[int, int]()
        for row, sequence in enumerate(sequences):
            if sequence is None:
                continue
            if has_rules(sequence):
                (masked if has_masks(sequence) else unmasked)[row] = sequence
            if sequence.params.logprobs is not None:
                num_top[row] = sequence.params.logprobs
        # A sequence that was released has another slot.
        both = (*masked.values(), *unmasked.values())
        slots = [self._slots.of(s) if has_penalties(s) else -1 for s in both]
        key = k, list(masked), list(unmasked), [s.seq_id for s in both], slots, num_top
        old = self._masked
        if key == self._key and (old is None or old.tails is None):
            return
        self._key = key
        self._masked = self._build(masked, k + 1, old and old.tails)
        self._unmasked = self._build(unmasked, k + 1, None)
        rows = list(num_top)
        self._wanting = None
        if rows:
            rows_P = upload_ints(rows, self._device)
            self._wanting = _Wanting(rows, list(num_top.values()), rows_P)

    def _build(
        self, sequence_of: dict[int, Sequence], num_columns: int, tails: _Tails | None
    ) -> _Ruled | None:
        """Return the sequences of some rows with their rules; None without sequences.

        `tails` are those of the step before.
        """
        if not sequence_of:
            return None
        rows, sequences = list(sequence_of), list(sequence_of.values())
        rules = build_rules(sequences, self._slots, self._vocab_size, self._device)
        words = None if rules is None else rules.bad_words
        width = 0 if words is None else words.prefix_len
        start_loc = [0] * (max(rows) + 1)
        for index, row in enumerate(rows):
            start_loc[row] = index * num_columns
        num_rows = len(rows) * num_columns
        return _Ruled(
            num_columns=num_columns,
            sequences=sequences,
            rows=rows,
            rules=rules,
            has_grammars=any(s.grammar is not None for s in sequences),
            rows_M=upload_ints(rows, self._device),
            start_loc_B=upload_ints(start_loc, self._device),
            scratch=VerifyScratch.allocate(num_rows, self._vocab_size, self._device),
            tails=_Tails.start(sequences, width, self._device, tails) if width else None,
        )

    @torch.inference_mode()
    def apply(
        self,
        logits_TV: Tensor,
        start_loc: Tensor,
        drafts_BK: Tensor,
        state: DecodeState,
        sampling: SequenceSampling,
        running_B: Tensor,
        tokens_T: Tensor,
        *,
        paths_of: Callable[[Tensor, Tensor], TreePaths] | None = None,
        reject: Callable[[Tensor, Tensor, Tensor, VerifyScratch], None] | None = None,
    ) -> None:
        """Replace the target's own tokens in the rows of sequences with rules.

        The masks of grammars must be prepared before.

        Args:
            logits_TV: logits of the target, float32, bfloat16 or float16.
            start_loc: first row of each sequence, as in `TargetBatch`; sequence b has
                state.num_draft_tokens_B[b] + 1 rows if it runs.
            drafts_BK: drafts; `state.num_draft_tokens_B` of each row count.
            state: state before the step.
            sampling: sampling parameters; min-p is taken from the rules instead.
            running_B: not 0 for sequences that run.
            tokens_T: int64, changed in place; NO_TOKEN where the raw logits are broken.
            paths_of: returns the paths of trees, see `DecodeTrees`; None for chains.
            reject: rejects drawn drafts, see `DecodeStep`: called with logits, the first row of
                each sequence, the running sequences, and the scratch memory with their own tokens.
                None if no draft was drawn.
        """
        if self._wanting is not None:
            self._wanting.logits_TV = logits_TV
        for ruled in self._ruled:
            if ruled.rules is not None:
                ruled.rules = without_reached_minimum(ruled.rules, ruled.sequences)
            if ruled.rules is None and not ruled.has_grammars:
                continue
            rows_M = ruled.rows_M
            columns_J = torch.arange(ruled.num_columns, device=self._device)
            is_row_MJ = columns_J <= state.num_draft_tokens_B[rows_M].unsqueeze(1)
            is_row_MJ = is_row_MJ & (running_B[rows_M] != 0).unsqueeze(1)
            at_MJ = (start_loc[rows_M].unsqueeze(1) + columns_J).clamp_max(len(tokens_T) - 1)
            at_R = at_MJ.flatten()
            raw_RV = logits_TV[at_R]
            sizes = (
                drafts_BK[rows_M, : ruled.num_columns - 1],
                state.num_draft_tokens_B[rows_M],
                state.num_outputs_B[rows_M],
                len(at_R),
                None if ruled.tails is None else ruled.tails.tails_MW,
            )
            paths = None if paths_of is None else paths_of(rows_M, at_MJ)
            processed_RV = process_logits(
                raw_RV,
                PaddedRows(*sizes) if paths is None else PaddedTreeRows(*sizes, paths),
                ruled.rules or LogitsRules(),
                sampling.temperature_B[rows_M],
                self._slots.counts,
                self._grammar_masks(ruled),
                penalise,
            )
            all_greedy = reject is None and all(s.params.is_greedy for s in ruled.sequences)
            own_tokens(
                processed_RV,
                torch.where(is_row_MJ, rows_M.unsqueeze(1), -1).flatten(),
                ruled.start_loc_B,
                None if all_greedy else replace(sampling, min_p_B=None),
                state.num_outputs_B,
                ruled.scratch,
                offsets_R=None if paths is None else paths.depths_BJ.flatten(),
            )
            # Rules may hide broken logits, so the raw ones are checked.
            is_broken_R = ~raw_RV.amax(-1).isfinite()
            own_R = ruled.scratch.tokens_R.masked_fill_(is_broken_R, NO_TOKEN)
            if reject is not None:
                runs_B = torch.zeros_like(running_B)
                runs_B[rows_M] = running_B[rows_M]
                reject(processed_RV, ruled.start_loc_B, runs_B, ruled.scratch)
            # Padding adds 0, so that it may share a row with others.
            change_R = torch.where(is_row_MJ.flatten(), own_R - tokens_T[at_R], 0)
            tokens_T.index_add_(0, at_R, change_R)

    def _grammar_masks(self, ruled: _Ruled) -> Tensor | None:
        """Return the tokens that grammars permit in the R rows, bool; None without grammars.

        Rows behind a draft that a grammar refuses permit everything: no token is taken from them.
        """
        if not ruled.has_grammars:
            return None
        packed_RW = full_bitmask(len(ruled.sequences) * ruled.num_columns, self._vocab_size)
        packed_MJW = packed_RW.view(len(ruled.sequences), ruled.num_columns, -1)
        for index, bitmask_RW in _prepared_masks(ruled):
            prepared_JW = bitmask_RW[: ruled.num_columns]
            packed_MJW[index, : len(prepared_JW)] = prepared_JW
        return to_bools(upload(packed_RW, self._device), self._vocab_size)

    @torch.inference_mode()
    def drop_refused(self, state: DecodeState) -> None:
        """Drop the drafts from the first one that a grammar refuses, if acceptance is synthetic.

        Synthetic acceptance would take drafts that no grammar permits. The masks must be prepared
        before.
        """
        if self._masked is None or not self._masked.has_grammars:
            return
        found = _prepared_masks(self._masked)
        rows_M = upload_ints([self._masked.rows[index] for index, _ in found], self._device)
        most_M = upload_ints([len(bitmask_RW) - 1 for _, bitmask_RW in found], self._device)
        state.num_draft_tokens_B[rows_M] = torch.minimum(state.num_draft_tokens_B[rows_M], most_M)

    @torch.inference_mode()
    def after(
        self, out: DecodeResult, start_loc: Tensor, rows_X: Tensor | None = None
    ) -> PendingLogprobs | None:
        """Count the emitted tokens of the step, and measure the requested log-probabilities.

        Args:
            out: result of the step that `apply` began. All emitted tokens count, even behind a stop
                condition: the sequence has ended then.
            start_loc: as for `apply`.
            rows_X: for trees the row of each token at `apply`, see `DecodeTrees`; None for chains.
        """
        for ruled in self._ruled:
            emitted_MJ = out.emitted_BJ[ruled.rows_M, : ruled.num_columns]
            if ruled.rules is not None and ruled.rules.has_penalties:
                counts, slots_M = self._slots.counts, ruled.rules.count_slots_B
                assert counts is not None and slots_M is not None
                counts.add(
                    slots_M.unsqueeze(1).expand_as(emitted_MJ), emitted_MJ, emitted_MJ != NO_TOKEN
                )
            if ruled.tails is not None:
                ruled.tails = ruled.tails.shifted(emitted_MJ)
        wanting = self._wanting
        if wanting is None:
            return None
        logits_TV, wanting.logits_TV = wanting.logits_TV, None
        assert logits_TV is not None, "`apply` comes first"
        emitted_PJ = out.emitted_BJ[wanting.rows_P]
        columns_J = torch.arange(emitted_PJ.shape[1], device=self._device)
        at_PJ = (start_loc[wanting.rows_P].unsqueeze(1) + columns_J).clamp_max(len(logits_TV) - 1)
        if rows_X is not None:
            at_PJ = rows_X[at_PJ]
        tokens_R, num_top = emitted_PJ.flatten().clamp_min(0), max(wanting.num_top)
        table_RX = tabulate_logprobs(logits_TV, at_PJ.flatten(), tokens_R, num_top)
        shape = *emitted_PJ.shape, table_RX.shape[1]
        table_PJX = torch.empty(shape, dtype=table_RX.dtype, pin_memory=table_RX.is_cuda)
        table_PJX.copy_(table_RX.view(shape), non_blocking=True)
        return PendingLogprobs(wanting.rows, wanting.num_top, table_PJX)


def _prepared_masks(ruled: _Ruled) -> list[tuple[int, Tensor]]:
    """Return the index among the M and the masks of each grammar that has some prepared."""
    return [
        (index, masks.bitmask_RW)
        for index, sequence in enumerate(ruled.sequences)
        if sequence.grammar is not None and (masks := sequence.grammar.prepared) is not None
    ]
