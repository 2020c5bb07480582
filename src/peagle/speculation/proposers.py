"""Drafting with a head: P-EAGLE in one pass of the head, EAGLE-3 in K.

Shapes: B sequences, N of them, T packed target rows, S drafter slots, A * H feature width, D
drafter width, K drafts, J columns of them, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from peagle.attention import AttentionBackend, AttentionMetadata, LayerKVCache, Prepared
from peagle.config import DraftSampling
from peagle.kernels.batches import DraftBatch, TargetBatch, expand_draft_batch, slot_mapping
from peagle.kernels.random import Purpose, uniform
from peagle.kernels.sampling import sample_from_weights
from peagle.models.drafter import Attend, Drafter
from peagle.speculation.verification import SamplingTensors


class DraftConstraint(Protocol):
    """Restricts drafts column by column, as a grammar does: `mask`, choose, `advance`.

    Attributes:
        lens: number of valid drafts of each sequence so far; later ones must not be verified.
    """

    lens: list[int]

    def mask(self, device: torch.device) -> Tensor | None:
        """The tokens allowed in the next column, bool [B, V]; None if all are."""

    def advance(self, tokens: Sequence[int]) -> None:
        """Take the tokens chosen for the column, one a sequence."""


@dataclass(frozen=True, slots=True)
class TargetStep:
    """What a proposer may read: rows that the target ran, and what verification decided.

    Attributes:
        tokens_T, positions_T: the packed target batch.
        start_loc: [B+1], first row of each sequence.
        features_TA: aux features of the rows.
        num_accepted_B: tokens after the first row that stand (all of them in a prompt).
        next_tokens_B: the token after them: emitted, or the next one of a prompt.
        block_tables_BM: KV blocks of each sequence.
        num_drafts: k_b, drafts to make for each sequence, at most K; with 0 a head only reads on.
        sampling: with num_outputs counting the emitted tokens.
        histories: every token of each sequence, the emitted ones included.
        context_starts_B: first drafter slot of each sequence that may be looked at; None: all.
        constraint: which tokens may be drafted; None: all.
    """

    tokens_T: Tensor
    positions_T: Tensor
    start_loc: Tensor
    features_TA: Tensor
    num_accepted_B: Tensor
    next_tokens_B: Tensor
    block_tables_BM: Tensor
    num_drafts: Sequence[int]
    sampling: SamplingTensors
    histories: Sequence[Sequence[int]]
    context_starts_B: Tensor | None = None
    constraint: DraftConstraint | None = None


@dataclass(frozen=True, slots=True)
class Drafts:
    """Draft tokens of a batch.

    Attributes:
        tokens_BK: target ids; what stands at or above lens means nothing.
        lens: drafts of each sequence: as many as were asked for, unless fewer were found.
        probs_BKV: the draft distributions in the target vocabulary; None for argmax drafts.
    """

    tokens_BK: Tensor
    lens: list[int]
    probs_BKV: Tensor | None = None


class HeadProposer:
    """What parallel and autoregressive drafting share: the head, its KV cache, its first pass.

    Args:
        caches: one KV cache a drafter layer, in the block-id space of the target.
        max_model_len: positions from here on write no KV.

    Attributes:
        graphs: runs passes over few slots, or gives None; None launches every kernel by itself.
    """

    def __init__(
        self,
        drafter: Drafter,
        backend: AttentionBackend,
        caches: Sequence[LayerKVCache],
        *,
        max_model_len: int,
        draft_sampling: DraftSampling = "argmax",
    ) -> None:
        self.drafter = drafter
        self.drafter.reserve_positions(max_model_len)
        self.backend = backend
        self.caches = list(caches)
        self.max_model_len = max_model_len
        self.draft_sampling = draft_sampling
        self.graphs: Callable[..., tuple[Tensor, ...] | None] | None = None
        if drafter.config.is_parallel:
            self._h_shared_1D = drafter.shared_hidden().unsqueeze(0)
        self.scaling = drafter.config.head_dim**-0.5
        self._target_ids = drafter.target_ids()
        pruned = drafter.config.is_pruned
        self.draft_token_ids: Sequence[int] | None = self._target_ids.tolist() if pruned else None

    def propose(self, step: TargetStep) -> Drafts:
        """Draft the `num_drafts` tokens that follow `next_tokens_B` of every sequence."""
        raise NotImplementedError

    def _first_pass(self, step: TargetStep) -> tuple[DraftBatch, Tensor]:
        """Run [NTP slots | mask slots] of every sequence: the batch and its hidden states."""
        parallel = self.drafter.config.is_parallel
        num_mask_slots = [max(k - 1, 0) if parallel else 0 for k in step.num_drafts]
        batch = expand_draft_batch(
            step.tokens_T,
            step.positions_T,
            step.start_loc,
            step.num_accepted_B,
            step.next_tokens_B,
            step.block_tables_BM,
            block_size=self.caches[0].block_size,
            num_mask_slots_B=torch.tensor(num_mask_slots, device=step.tokens_T.device),
            mask_token_id=self.drafter.config.mask_token_id or 0,
            max_model_len=self.max_model_len,
        )
        hidden_TD = self.drafter.combine_features(step.features_TA)
        if any(num_mask_slots):
            hidden_TD = torch.cat((hidden_TD, self._h_shared_1D))
        metadata = AttentionMetadata.of_batch(
            batch,
            step.block_tables_BM,
            max_query_len=int(batch.query_start_loc.diff().max()),
            max_seq_len=int(batch.seq_lens_B.max()),
            context_starts_B=step.context_starts_B,
        )
        hidden_SD = hidden_TD[batch.feature_rows_S]
        return batch, self._run(batch.tokens_S, hidden_SD, batch.positions_S, metadata)

    def _run(
        self, tokens: Tensor, hidden: Tensor, positions: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        if self.graphs is not None:
            done = self.graphs(tokens, positions, metadata, hidden)
            if done is not None:
                return done[0]
        return self.run_prepared(tokens, hidden, positions, self.backend.prepare(metadata))

    def run_prepared(
        self, tokens: Tensor, hidden: Tensor, positions: Tensor, prepared: Prepared
    ) -> Tensor:
        """The drafter's hidden states of one pass whose attention is prepared."""
        return self.drafter(tokens, hidden, positions, self._attend(prepared))

    def _attend(self, prepared: Prepared) -> Attend:
        window = self.drafter.window

        def attend(layer_idx: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            cache = self.caches[layer_idx]
            return prepared(query, key, value, cache, scaling=self.scaling, sliding_window=window)

        return attend

    def _draw(
        self, hidden_NJD: Tensor, step: TargetStep, sequences_N: Tensor, first: int
    ) -> tuple[Tensor, Tensor | None]:
        """Draft tokens [N, J] and their q [N, J, V] (None if argmax) from hidden states.

        Column j stands `first` + j tokens after the last; the rows are those of `sequences_N`.
        """
        logits_NJV = self.drafter.compute_logits(hidden_NJD)
        if step.constraint is None:
            return self._choose(logits_NJV, step.sampling, sequences_N, first)
        # What may come next depends on what was chosen before it: one column at a time.
        columns = []
        for j in range(logits_NJV.shape[1]):
            logits_N1V = logits_NJV[:, j : j + 1]
            mask_BV = step.constraint.mask(logits_NJV.device)
            if mask_BV is not None:
                mask_N1V = mask_BV[sequences_N][:, self._target_ids].unsqueeze(1)
                logits_N1V = logits_N1V.masked_fill(~mask_N1V, -torch.inf)
            columns.append(self._choose(logits_N1V, step.sampling, sequences_N, first + j))
            tokens_B = torch.zeros_like(step.next_tokens_B)
            tokens_B[sequences_N] = columns[-1][0].squeeze(1)
            step.constraint.advance(tokens_B.tolist())
        probs = [probs_N1V for _, probs_N1V in columns if probs_N1V is not None]
        tokens_NJ = torch.cat([tokens_N1 for tokens_N1, _ in columns], dim=1)
        return tokens_NJ, torch.cat(probs, dim=1) if probs else None

    def _choose(
        self, logits_NJV: Tensor, sampling: SamplingTensors, sequences_N: Tensor, first: int
    ) -> tuple[Tensor, Tensor | None]:
        """The tokens of these logits, as `_draw` gives them."""
        if self.draft_sampling == "argmax" or sampling.all_greedy:
            return self.drafter.to_target_ids(logits_NJV.argmax(-1)), None
        batch, columns = logits_NJV.shape[:2]
        logits_RV = logits_NJV.flatten(0, 1)
        if self.drafter.config.is_pruned:
            shape = (logits_RV.shape[0], self.drafter.config.vocab_size)
            full_RV = logits_RV.new_full(shape, -torch.inf)
            logits_RV = full_RV.index_copy_(1, self._target_ids, logits_RV)
        probs_RV = sampling.probs(logits_RV, sequences_N.repeat_interleave(columns))
        column_J = torch.arange(columns, device=logits_NJV.device)
        position_NJ = sampling.num_outputs_B[sequences_N].unsqueeze(1) + first + column_J
        u_NJ = uniform(sampling.seeds_B[sequences_N].unsqueeze(1), position_NJ, Purpose.DRAFT)
        tokens_NJ = sample_from_weights(probs_RV, u_NJ.flatten()).view(batch, columns)
        return tokens_NJ, probs_RV.unflatten(0, (batch, columns))


class ParallelProposer(HeadProposer):
    """P-EAGLE: all K tokens in one drafter pass (arXiv 2602.01469)."""

    def propose(self, step: TargetStep) -> Drafts:
        batch, hidden_SD = self._first_pass(step)
        written = _DraftWriter(step.num_drafts, hidden_SD.device)
        if written.most:
            device = hidden_SD.device
            lens_B = torch.tensor(written.lens, device=device)
            sequences_N = lens_B.nonzero().flatten()
            # Past its own drafts a sequence repeats its last one; nothing reads the copies.
            last_N1 = lens_B[sequences_N].unsqueeze(1) - 1
            columns_K = torch.arange(written.most, device=device)
            rows_NK = batch.last_ntp_B[sequences_N].unsqueeze(1) + columns_K.minimum(last_N1)
            written.put(0, sequences_N, self._draw(hidden_SD[rows_NK], step, sequences_N, first=0))
        return written.drafts(step.constraint)


class AutoregressiveProposer(HeadProposer):
    """EAGLE-3: draft token j + 1 from a pass over draft token j and the head's own hidden state."""

    def propose(self, step: TargetStep) -> Drafts:
        batch, hidden_SD = self._first_pass(step)
        lens, device = step.num_drafts, hidden_SD.device
        written = _DraftWriter(lens, device)
        # Sequences with the most drafts come first: those that still draft are then a prefix.
        order_N = torch.tensor(sorted(range(len(lens)), key=lambda b: -lens[b]), device=device)
        position_N = batch.positions_S[batch.last_ntp_B[order_N]]
        hidden_ND = hidden_SD[batch.last_ntp_B[order_N]]
        tokens_N = position_N
        positions = position_N.tolist()
        for j in range(written.most):
            still = sum(k > j for k in lens)
            sequences_N, hidden_ND = order_N[:still], hidden_ND[:still]
            if j:
                tokens_N, position_N = tokens_N[:still], position_N[:still] + 1
                longest = max(positions[:still]) + j + 1
                metadata = self._metadata(step, sequences_N, tokens_N, position_N, longest)
                hidden_ND = self._run(tokens_N, hidden_ND, position_N, metadata)
            drawn = self._draw(hidden_ND.unsqueeze(1), step, sequences_N, first=j)
            tokens_N = drawn[0].squeeze(1)
            written.put(j, sequences_N, drawn)
        return written.drafts(step.constraint)

    def _metadata(
        self,
        step: TargetStep,
        sequences_N: Tensor,
        tokens_N: Tensor,
        position_N: Tensor,
        max_seq_len: int,
    ) -> AttentionMetadata:
        """The metadata of a pass over one token of each of the given sequences."""
        tables_NM, starts_B = step.block_tables_BM[sequences_N], step.context_starts_B
        rows = torch.arange(sequences_N.shape[0] + 1, device=sequences_N.device)
        size = self.caches[0].block_size
        slots_N = slot_mapping(tables_NM, rows[:-1], position_N, size, self.max_model_len)
        batch = TargetBatch(tokens_N, position_N, slots_N, rows[:-1], rows, position_N + 1)
        return AttentionMetadata.of_batch(
            batch,
            tables_NM,
            max_query_len=1,
            max_seq_len=max_seq_len,
            context_starts_B=None if starts_B is None else starts_B[sequences_N],
        )


class _DraftWriter:
    """Puts drafts together, where not every sequence drafts as much as the others."""

    def __init__(self, num_drafts: Sequence[int], device: torch.device) -> None:
        self.lens = list(num_drafts)
        self.most = max(self.lens)
        self._tokens_BK = torch.zeros(len(self.lens), self.most, dtype=torch.int64, device=device)
        self._probs_BKV: Tensor | None = None

    def put(self, first: int, sequences_N: Tensor, drawn: tuple[Tensor, Tensor | None]) -> None:
        """Write the columns from `first` on of the given sequences."""
        tokens_NJ, probs_NJV = drawn
        columns = slice(first, first + tokens_NJ.shape[1])
        self._tokens_BK[sequences_N, columns] = tokens_NJ
        if probs_NJV is not None:
            if self._probs_BKV is None:
                shape = (*self._tokens_BK.shape, probs_NJV.shape[-1])
                self._probs_BKV = probs_NJV.new_zeros(shape)
            self._probs_BKV[sequences_N, columns] = probs_NJV

    def drafts(self, constraint: DraftConstraint | None) -> Drafts:
        """The drafts put, cut where the constraint ends them."""
        lens = self.lens
        if constraint is not None:
            lens = list(map(min, lens, constraint.lens))
        return Drafts(self._tokens_BK, lens, self._probs_BKV)
