"""Proposers: given what the target just computed, draft the next K tokens of every sequence.

Shapes: B sequences, T packed target rows, A * H feature width, D drafter width, K drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from peagle.attention import AttentionBackend, AttentionMetadata, LayerKVCache, Prepared
from peagle.config import DraftSampling
from peagle.kernels.expand import DraftBatch, expand_draft_batch, slot_mapping
from peagle.kernels.random import Purpose, uniform
from peagle.kernels.sampling import sample_from_weights
from peagle.models.drafter import Attend, Drafter
from peagle.speculation.verification import SamplingTensors


@dataclass(frozen=True, slots=True)
class TargetStep:
    """What a proposer may read: the batch the target ran and what verification made of it.

    Attributes:
        tokens_T, positions_T: the packed target batch.
        start_loc: [B+1], first row of each sequence.
        features_TA: aux features of the rows.
        num_accepted_B: tokens after the first row that stand (all of them in a prompt).
        next_tokens_B: the token emitted after them.
        block_tables_BM: KV blocks of each sequence.
        sampling: with num_outputs counting the emitted tokens.
        histories: every token of each sequence, the emitted ones included.
    """

    tokens_T: Tensor
    positions_T: Tensor
    start_loc: Tensor
    features_TA: Tensor
    num_accepted_B: Tensor
    next_tokens_B: Tensor
    block_tables_BM: Tensor
    sampling: SamplingTensors
    histories: Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Drafts:
    """K draft tokens a sequence.

    Attributes:
        tokens_BK: target ids.
        lens: drafts of each sequence, K unless fewer were found.
        probs_BKV: the draft distributions in the target vocabulary; None for argmax drafts.
    """

    tokens_BK: Tensor
    lens: list[int]
    probs_BKV: Tensor | None = None


class Proposer(Protocol):
    """A way of drafting."""

    num_speculative_tokens: int

    def propose(self, step: TargetStep) -> Drafts:
        """Draft the tokens that follow `next_tokens` of every sequence."""
        ...


class HeadProposer:
    """What parallel and autoregressive drafting share: the head, its KV cache, its first pass.

    Args:
        drafter: the head.
        backend: attention backend.
        caches: one KV cache a drafter layer, in the block-id space of the target.
        num_speculative_tokens: K.
        max_model_len: positions from here on write no KV.
        draft_sampling: "argmax" or "probabilistic".
    """

    num_mask_slots = 0

    def __init__(
        self,
        drafter: Drafter,
        backend: AttentionBackend,
        caches: Sequence[LayerKVCache],
        *,
        num_speculative_tokens: int,
        max_model_len: int,
        draft_sampling: DraftSampling = "argmax",
    ) -> None:
        self.drafter = drafter
        self.drafter.reserve_positions(max_model_len)
        self.backend = backend
        self.caches = list(caches)
        self.num_speculative_tokens = num_speculative_tokens
        self.max_model_len = max_model_len
        self.draft_sampling = draft_sampling
        self.scaling = drafter.config.head_dim**-0.5
        self._target_ids = drafter.target_ids()

    def _first_pass(self, step: TargetStep) -> tuple[DraftBatch, Tensor]:
        """Run [NTP slots | mask slots] of every sequence: the batch and its hidden states."""
        batch = expand_draft_batch(
            step.tokens_T,
            step.positions_T,
            step.start_loc,
            step.num_accepted_B,
            step.next_tokens_B,
            step.block_tables_BM,
            block_size=self.caches[0].block_size,
            num_mask_slots=self.num_mask_slots,
            mask_token_id=self.drafter.config.mask_token_id or 0,
            max_model_len=self.max_model_len,
        )
        hidden_TD = self.drafter.combine_features(step.features_TA)
        if self.num_mask_slots:
            hidden_TD = torch.cat((hidden_TD, self._shared_hidden()))
        hidden_SD = self._run(
            batch.tokens_S,
            hidden_TD[batch.feature_rows_S],
            batch.positions_S,
            AttentionMetadata(
                query_start_loc=batch.query_start_loc,
                seq_lens_B=batch.seq_lens_B,
                block_tables_BM=step.block_tables_BM,
                slots_T=batch.slots_S,
                max_query_len=int(batch.query_start_loc.diff().max()),
                max_seq_len=int(batch.seq_lens_B.max()),
            ),
        )
        return batch, hidden_SD

    def _run(
        self, tokens: Tensor, hidden: Tensor, positions: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        attend = self._attend(self.backend.prepare(metadata))
        return self.drafter(tokens, hidden, positions, attend)

    def _attend(self, prepared: Prepared) -> Attend:
        def attend(layer_idx: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return prepared(query, key, value, self.caches[layer_idx], scaling=self.scaling)

        return attend

    def _shared_hidden(self) -> Tensor:
        return self.drafter.shared_hidden().unsqueeze(0)

    def _draw(self, hidden_BJD: Tensor, sampling: SamplingTensors, first: int) -> Drafts:
        """Draft tokens from hidden states; column j stands `first` + j tokens after the last."""
        logits_BJV = self.drafter.compute_logits(hidden_BJD)
        batch, columns = logits_BJV.shape[:2]
        if self.draft_sampling == "argmax" or sampling.all_greedy:
            tokens_BJ = self.drafter.to_target_ids(logits_BJV.argmax(-1))
            return Drafts(tokens_BJ, [columns] * batch)
        column_J = torch.arange(columns, device=logits_BJV.device)
        sequences_N = torch.arange(batch, device=logits_BJV.device).repeat_interleave(columns)
        probs_NV = sampling.probs(self._in_target_vocabulary(logits_BJV.flatten(0, 1)), sequences_N)
        position_BJ = sampling.num_outputs_B.unsqueeze(1) + first + column_J
        u_BJ = uniform(sampling.seeds_B.unsqueeze(1), position_BJ, Purpose.DRAFT)
        tokens_BJ = sample_from_weights(probs_NV, u_BJ.flatten()).view(batch, columns)
        return Drafts(tokens_BJ, [columns] * batch, probs_NV.unflatten(0, (batch, columns)))

    def _in_target_vocabulary(self, logits_NV: Tensor) -> Tensor:
        if not self.drafter.config.is_pruned:
            return logits_NV
        full = logits_NV.new_full((logits_NV.shape[0], self.drafter.config.vocab_size), -torch.inf)
        return full.index_copy_(1, self._target_ids, logits_NV)


class ParallelProposer(HeadProposer):
    """P-EAGLE: all K tokens in one drafter pass (arXiv 2602.01469)."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.num_mask_slots = self.num_speculative_tokens - 1
        self._h_shared = self.drafter.shared_hidden().unsqueeze(0)

    def _shared_hidden(self) -> Tensor:
        return self._h_shared

    def propose(self, step: TargetStep) -> Drafts:
        batch, hidden_SD = self._first_pass(step)
        columns = torch.arange(self.num_speculative_tokens, device=hidden_SD.device)
        hidden_BKD = hidden_SD[batch.last_ntp_B.unsqueeze(1) + columns]
        return self._draw(hidden_BKD, step.sampling, first=0)


class AutoregressiveProposer(HeadProposer):
    """EAGLE-3: draft token j + 1 from a pass over draft token j and the head's own hidden state."""

    def propose(self, step: TargetStep) -> Drafts:
        batch, hidden_SD = self._first_pass(step)
        hidden_BD = hidden_SD[batch.last_ntp_B]
        drawn = [self._draw(hidden_BD.unsqueeze(1), step.sampling, first=0)]
        sequences_B = torch.arange(hidden_BD.shape[0], device=hidden_BD.device)
        start_loc = torch.arange(hidden_BD.shape[0] + 1, device=hidden_BD.device)
        position_B = batch.positions_S[batch.last_ntp_B]
        longest = int(position_B.max()) + 1
        for j in range(1, self.num_speculative_tokens):
            position_B = position_B + 1
            slots_B = slot_mapping(
                step.block_tables_BM,
                sequences_B,
                position_B,
                self.caches[0].block_size,
                self.max_model_len,
            )
            metadata = AttentionMetadata(
                query_start_loc=start_loc,
                seq_lens_B=position_B + 1,
                block_tables_BM=step.block_tables_BM,
                slots_T=slots_B,
                max_query_len=1,
                max_seq_len=longest + j,
            )
            hidden_BD = self._run(drawn[-1].tokens_BK[:, 0], hidden_BD, position_B, metadata)
            drawn.append(self._draw(hidden_BD.unsqueeze(1), step.sampling, first=j))
        probs = [d.probs_BKV for d in drawn if d.probs_BKV is not None]
        return replace(
            drawn[0],
            tokens_BK=torch.cat([d.tokens_BK for d in drawn], dim=1),
            lens=[self.num_speculative_tokens] * hidden_BD.shape[0],
            probs_BKV=torch.cat(probs, dim=1) if probs else None,
        )


class PromptLookupProposer:
    """Drafts what followed the latest earlier occurrence of the last n tokens, longest n first.

    Prompt lookup decoding (Saxena, 2023): free, no head; the baseline any head must beat.
    """

    def __init__(self, num_speculative_tokens: int, max_ngram: int, min_ngram: int) -> None:
        self.num_speculative_tokens = num_speculative_tokens
        self.max_ngram = max_ngram
        self.min_ngram = min_ngram

    def propose(self, step: TargetStep) -> Drafts:
        found = [self.lookup(history) for history in step.histories]
        k = self.num_speculative_tokens
        padded = [tokens + [0] * (k - len(tokens)) for tokens in found]
        tokens_BK = torch.tensor(padded, dtype=torch.int64, device=step.tokens_T.device)
        return Drafts(tokens_BK, [len(tokens) for tokens in found])

    def lookup(self, history: Sequence[int]) -> list[int]:
        """The drafts for one sequence of tokens, at most K, maybe none."""
        tokens = list(history)
        for n in range(min(self.max_ngram, len(tokens) - 1), self.min_ngram - 1, -1):
            pattern = tokens[-n:]
            for start in range(len(tokens) - n - 1, -1, -1):
                if tokens[start : start + n] == pattern:
                    return tokens[start + n : start + n + self.num_speculative_tokens]
        return []
