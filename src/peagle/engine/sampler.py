"""Turn the target's logits into tokens, by the sampling parameters of every request.

Shapes: B sequences, K most drafts of a sequence, J = K + 1, R packed target rows (k_b + 1 of each
sequence), V vocabulary.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Tensor

from peagle.engine.rules import CountSlots, build_rules, without_reached_minimum
from peagle.engine.sequence import Sequence
from peagle.kernels.paths import TreePaths
from peagle.kernels.sampling.logits import process_logits
from peagle.kernels.sampling.logits_rules import (
    LogitsRules,
    TreeRows,
    VerificationRows,
    context_tails,
)
from peagle.kernels.sampling.logprobs import TokenLogprobs, token_logprobs
from peagle.kernels.upload import upload_ints, upload_together
from peagle.speculation.verification import SamplingTensors, Verified, verify


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """The tokens that one step sampled, one entry a sequence.

    Attributes:
        verified: accepted drafts and next tokens, on the device.
        num_accepted: the number of accepted drafts, on the host.
        order: the rows of each sequence, first those of the newest token and the accepted drafts.
        new_token_ids: the emitted tokens: accepted drafts, then the target's own.
        sampling: with num_outputs counting the emitted tokens.
        logprobs: log-probabilities of the emitted tokens; None for sequences without the option.
        is_broken: whether a row that gave a token holds NaN, +inf, or -inf alone: the tokens of
            such a sequence are meaningless.
    """

    verified: Verified
    num_accepted: list[int]
    order: SequenceOf[SequenceOf[int]]
    new_token_ids: list[list[int]]
    sampling: SamplingTensors
    logprobs: list[list[TokenLogprobs] | None]
    is_broken: list[bool]


@dataclass(slots=True)
class _Batch:
    """Tensors of a batch, kept while the next batch has the same sequences.

    The num_outputs of `sampling` is that of the first step.
    """

    seq_ids: list[int]
    sampling: SamplingTensors
    rules: LogitsRules | None
    wants_logprobs: bool


class Sampler:
    """Processes logits, verifies drafts, reports log-probabilities.

    Args:
        max_num_seqs: most sequences between their first step and their release.

    Attributes:
        slots: the token counts of penalties, which captured steps share.
    """

    def __init__(
        self,
        vocab_size: int,
        device: torch.device,
        max_num_seqs: int,
        synthetic_acceptance_rates: SequenceOf[float] | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self.slots = CountSlots(max_num_seqs, vocab_size, device)
        self._synthetic_rates_K: Tensor | None = None
        if (rates := synthetic_acceptance_rates) is not None:
            # The kernels of a captured step read the rates in single precision too.
            self._synthetic_rates_K = torch.tensor(rates, dtype=torch.float32, device=device)
        self._batch: _Batch | None = None

    @torch.inference_mode()
    def tensors(self, sequences: SequenceOf[Sequence]) -> SamplingTensors:
        """Return the present sampling parameters of any sequences."""
        batch = self._batch
        if batch is not None and batch.seq_ids == [s.seq_id for s in sequences]:
            return self._current(batch, sequences)
        return self._sampling(sequences)

    @torch.inference_mode()
    def sample(
        self,
        logits_RV: Tensor,
        sequences: SequenceOf[Sequence],
        num_drafted: SequenceOf[int],
        masks_RV: Tensor | None = None,
        paths: TreePaths | None = None,
    ) -> SamplerOutput:
        """Verify the drafts of every sequence and draw its next token.

        Args:
            logits_RV: raw target logits; row j of a sequence comes behind its first j drafts.
            sequences: the sequences; their tokens do not include the drafts.
            num_drafted: k_b, the number of drafts of each sequence in the rows; may be 0.
            masks_RV: bool, the tokens that a grammar permits, all tokens for sequences without a
                grammar; others are never emitted. None if no sequence has a grammar.
            paths: the paths of the rows if drafts are trees; None for chains.
        """
        seq_ids = [s.seq_id for s in sequences]
        batch = self._batch
        if batch is None or batch.seq_ids != seq_ids:
            batch = self._batch = _Batch(
                seq_ids,
                self._sampling(sequences),
                build_rules(sequences, self.slots, self.vocab_size, self.device),
                any(s.params.logprobs is not None for s in sequences),
            )
            sampling = batch.sampling
        else:
            sampling = self._current(batch, sequences)
        if batch.rules is not None:
            batch.rules = without_reached_minimum(batch.rules, sequences)
        rows = self._rows(batch, sequences, num_drafted, sampling, len(logits_RV), paths)
        processed_RV = logits_RV
        if batch.rules is not None or masks_RV is not None:
            rules = batch.rules or LogitsRules()
            processed_RV = process_logits(
                logits_RV, rows, rules, sampling.temperature_B, self.slots.counts, masks_RV
            )
        # Greedy verification has no use for q.
        draft_probs_BKV = None
        if not sampling.all_greedy:
            draft_probs_BKV = self._draft_probs(sequences, num_drafted, has_trees=paths is not None)
        verified = verify(processed_RV, rows, sampling, draft_probs_BKV, self._synthetic_rates_K)
        if batch.rules is not None and batch.rules.has_penalties:
            self._count(batch.rules, rows, verified)

        # All results go to the host in one copy.
        decided = [verified.num_accepted_B, verified.next_tokens_B]
        decided.append(_broken(logits_RV, rows, verified))
        if verified.order_BJ is not None:
            decided += verified.order_BJ.unbind(1)
        num_accepted, next_tokens, is_broken, *order = torch.stack(decided).tolist()
        order = [*zip(*order, strict=True)] or [range(k + 1) for k in num_drafted]
        drafts = [
            [s.drafts[row - 1] for row in rows[1 : k + 1]]
            for s, k, rows in zip(sequences, num_drafted, order, strict=True)
        ]
        new_token_ids = [
            [*tokens[:accepted], token]
            for tokens, accepted, token in zip(drafts, num_accepted, next_tokens, strict=True)
        ]
        num_outputs_B = sampling.num_outputs_B + verified.num_accepted_B + 1
        return SamplerOutput(
            verified,
            num_accepted,
            order,
            new_token_ids,
            replace(sampling, num_outputs_B=num_outputs_B),
            self._logprobs(logits_RV, sequences, num_drafted, new_token_ids, order)
            if batch.wants_logprobs
            else [None] * len(sequences),
            [bool(broken) for broken in is_broken],
        )

    def release(self, sequence: Sequence) -> None:
        """Forget a sequence that finished, was cancelled or preempted; it may come back."""
        if self.slots.release(sequence):
            self._batch = None

    def _current(self, batch: _Batch, sequences: SequenceOf[Sequence]) -> SamplingTensors:
        num_outputs_B = self._ints([s.num_output_tokens for s in sequences])
        return replace(batch.sampling, num_outputs_B=num_outputs_B)

    def _sampling(self, sequences: SequenceOf[Sequence]) -> SamplingTensors:
        params = [s.params for s in sequences]
        # Double precision makes host and device agree on which temperature is 0.
        floats = [p.temperature for p in params], [p.top_p for p in params]
        ints = (
            [min(p.top_k, self.vocab_size) for p in params],
            [s.seed for s in sequences],
            [s.num_output_tokens for s in sequences],
        )
        values = [torch.tensor(of, dtype=torch.float64) for of in floats]
        values += [torch.tensor(of) for of in ints]
        temperature_B, top_p_B, top_k_B, seeds_B, num_outputs_B = upload_together(
            values, self.device
        )
        return SamplingTensors(
            temperature_B=temperature_B,
            top_k_B=top_k_B,
            top_p_B=top_p_B,
            seeds_B=seeds_B,
            num_outputs_B=num_outputs_B,
            all_greedy=all(p.is_greedy for p in params),
        )

    def _rows(
        self,
        batch: _Batch,
        sequences: SequenceOf[Sequence],
        num_drafted: SequenceOf[int],
        sampling: SamplingTensors,
        num_rows: int,
        paths: TreePaths | None,
    ) -> VerificationRows:
        most = max(num_drafted)
        padded = [
            s.drafts[:k] + [0] * (most - k) for s, k in zip(sequences, num_drafted, strict=True)
        ]
        words = None if batch.rules is None else batch.rules.bad_words
        tails_BW = None
        if words is not None and words.prefix_len > 0:
            contexts = [s.token_ids for s in sequences]
            tails_BW = context_tails(contexts, words.prefix_len, self.device)
        drafts_BK = torch.tensor(padded, dtype=torch.int64).view(len(sequences), most)
        drafts_BK, lens_B = upload_together([drafts_BK, torch.tensor(num_drafted)], self.device)
        sizes = drafts_BK, lens_B, sampling.num_outputs_B, num_rows, tails_BW
        return VerificationRows(*sizes) if paths is None else TreeRows(*sizes, paths)

    def _draft_probs(
        self, sequences: SequenceOf[Sequence], num_drafted: SequenceOf[int], *, has_trees: bool
    ) -> Tensor | None:
        """Return q of the batch, [B, K, V]; of trees that of their first C nodes, [B, C, V].

        It is 0 for drafts that were not drawn; None if no drafts were drawn. C is the length of the
        longest drawn chain.
        """
        probs = {
            row: sequence.draft_probs_KV[: min(k, sequence.num_drawn)]
            for row, (sequence, k) in enumerate(zip(sequences, num_drafted, strict=True))
            if sequence.draft_probs_KV is not None
        }
        most = max(map(len, probs.values()), default=0)
        if not most:
            return None
        if not has_trees:
            most = max(num_drafted)
        if len(probs) == len(sequences) and all(len(p) == most for p in probs.values()):
            return torch.stack([*probs.values()])
        stacked_BCV = next(iter(probs.values())).new_zeros(len(sequences), most, self.vocab_size)
        for row, probs_CV in probs.items():
            stacked_BCV[row, : len(probs_CV)] = probs_CV
        return stacked_BCV

    def _count(self, rules: LogitsRules, rows: VerificationRows, verified: Verified) -> None:
        """Add the emitted tokens to the token counts."""
        assert self.slots.counts is not None and rules.count_slots_B is not None
        last_B1 = verified.num_accepted_B.unsqueeze(1)
        drafts_BK = rows.drafts_BK
        if verified.order_BJ is not None:
            drafts_BK = drafts_BK.gather(1, verified.order_BJ[:, 1:] - 1)
        tokens_BJ = torch.nn.functional.pad(drafts_BK, (0, 1))
        tokens_BJ = tokens_BJ.scatter(1, last_B1, verified.next_tokens_B.unsqueeze(1))
        slots_BJ = rules.count_slots_B.unsqueeze(1).expand_as(tokens_BJ)
        self.slots.counts.add(slots_BJ, tokens_BJ, rows.columns_J <= last_B1)

    def _logprobs(
        self,
        logits_RV: Tensor,
        sequences: SequenceOf[Sequence],
        num_drafted: SequenceOf[int],
        new_token_ids: list[list[int]],
        order: SequenceOf[SequenceOf[int]],
    ) -> list[list[TokenLogprobs] | None]:
        rows: list[int] = []
        tokens: list[int] = []
        num_top: list[int] = []
        first = 0
        every = zip(sequences, num_drafted, new_token_ids, order, strict=True)
        for sequence, k, new, own in every:
            if (count := sequence.params.logprobs) is not None:
                rows.extend(first + row for row in own[: len(new)])
                tokens.extend(new)
                num_top.extend([count] * len(new))
            first += k + 1
        found = iter(token_logprobs(logits_RV[self._ints(rows)], tokens, num_top))
        return [
            None if s.params.logprobs is None else list(islice(found, len(new)))
            for s, new in zip(sequences, new_token_ids, strict=True)
        ]

    def _ints(self, values: SequenceOf[int] | list[list[int]]) -> Tensor:
        return upload_ints(values, self.device)


def _broken(logits_RV: Tensor, rows: VerificationRows, verified: Verified) -> Tensor:
    """Return 1 for each sequence that took a token from a row without a finite maximum, int64 [B].

    The maximum of a row with NaN is NaN. Rows behind a rejected draft do not count.
    """
    broken_R = ~logits_RV.amax(-1).isfinite()
    taken_BJ = rows.columns_J <= verified.num_accepted_B.unsqueeze(1)
    rows_BJ = rows.rows_BJ
    if verified.order_BJ is not None:
        rows_BJ = rows_BJ.gather(1, verified.order_BJ)
    return (broken_R[rows_BJ] & taken_BJ).any(-1).long()
