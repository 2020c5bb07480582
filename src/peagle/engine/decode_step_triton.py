"""One decode step on the device alone: target, verification, state, drafter, next drafts.

Everything that changes from step to step lies in buffers, so that a CUDA graph can hold the whole
step: no size depends on data, nothing is read on the host. Shapes: B sequences (a bucket; the last
ones may be inactive), K most drafts, J = K + 1, T = B * J target rows, S drafter slots, M blocks a
sequence, E stop ids a sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from peagle.attention import AttentionMetadata, LayerKVCache
from peagle.attention.triton_backend import TritonAttention
from peagle.engine.graph_runner import StepSizes
from peagle.kernels.expand import PADDING_SLOT, slot_mapping
from peagle.kernels.expand_triton import (
    DraftBuffers,
    build_target_batch,
    expand_draft_batch,
    gather_features,
)
from peagle.kernels.step_state import StepLimits, StepOutput, StepState
from peagle.kernels.target_batch import TargetBatch
from peagle.kernels.verify_triton import (
    SequenceSampling,
    VerifyScratch,
    verify_greedy,
    verify_sampled,
)
from peagle.models.drafter import Drafter
from peagle.models.target import TargetModel


class StepBuffers:
    """State of the sequences that decode, on the device.

    Attributes:
        state, limits, sampling: see the classes.
        drafts_BK: drafts that the next step verifies.
        block_tables_BM: KV blocks, int64.
        active_B: which rows are sequences.
        context_starts_B: first drafter slot that may be looked at.
        out: what the last step said.
        report_BX: the same in one tensor, for the host: see `pipeline.read_report`.
    """

    def __init__(self, sizes: StepSizes, device: torch.device) -> None:
        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        batch = sizes.num_seqs
        self.sizes = sizes
        self.state = StepState.allocate(batch, device)
        self.limits = StepLimits(
            stop_ids_BE=ints(batch, sizes.num_stop_ids) - 1,
            min_tokens_B=ints(batch),
            max_tokens_B=ints(batch),
            num_speculative_B=ints(batch),
            max_model_len=sizes.max_model_len,
            max_draft_len=sizes.max_draft_len,
        )
        self.sampling = SequenceSampling(
            temperature_B=torch.zeros(batch, device=device),
            top_k_B=ints(batch),
            top_p_B=torch.ones(batch, device=device),
            seeds_B=ints(batch),
            min_p_B=torch.zeros(batch, device=device),
        )
        self.drafts_BK = ints(batch, max(sizes.num_drafts, 1))
        self.block_tables_BM = ints(batch, sizes.table_width)
        self.active_B = torch.zeros(batch, dtype=torch.bool, device=device)
        self.context_starts_B = ints(batch)
        self.out = StepOutput.allocate(batch, self.drafts_BK.shape[1], device)
        self.report_BX = ints(batch, 2 * self.drafts_BK.shape[1] + 4)


class DecodeStep:
    """The step over one set of buffers.

    Args:
        target: the target, its KV caches set.
        drafter: the head; None decodes plainly.
        drafter_caches: one KV cache a drafter layer.
        buffers: state of the sequences.
        greedy: every sequence has temperature 0.
    """

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter | None,
        drafter_caches: list[LayerKVCache],
        buffers: StepBuffers,
        *,
        greedy: bool,
    ) -> None:
        sizes, device = buffers.sizes, target.device
        self.target = target
        self.drafter = drafter
        self.drafter_caches = drafter_caches
        self.buffers = buffers
        self.greedy = greedy
        self._backend = TritonAttention()
        batch, columns = sizes.num_seqs, buffers.drafts_BK.shape[1] + 1
        num_rows = batch * (columns if drafter else 1)
        self._rows = TargetBatch.allocate(batch, num_rows, device)
        self._scratch = VerifyScratch.allocate(batch, num_rows, target.vocab_size, device)
        if drafter is not None:
            k, config = sizes.num_drafts, drafter.config
            num_slots = batch * (2 * k if config.is_parallel else columns)
            self._slots = DraftBuffers.allocate(batch, num_slots, k, device)
            self._hidden_SD = torch.zeros(
                num_slots, config.hidden_size, dtype=target.dtype, device=device
            )
            self._no_masks_B = torch.zeros_like(buffers.out.num_mask_slots_B)
            with torch.inference_mode():
                zeros_D = torch.zeros(config.hidden_size, dtype=target.dtype, device=device)
                self._h_shared_D = drafter.shared_hidden() if config.is_parallel else zeros_D
                drafter.reserve_positions(sizes.max_model_len + 2 * k)

    @torch.inference_mode()
    def run(self) -> None:
        """Take the step; what it gave stands in `buffers.out`, what comes next in `buffers`."""
        own = self.buffers
        num_drafted_B = own.state.num_drafts_B.clone()
        features_TA = self._verify()
        if self.drafter is not None:
            self._draft(self.drafter, features_TA)
        counts_B3 = torch.stack((num_drafted_B, own.out.num_accepted_B, own.state.num_drafts_B), 1)
        torch.cat((counts_B3, own.out.emitted_BJ, own.drafts_BK), dim=1, out=own.report_BX)

    def _verify(self) -> Tensor:
        """Target pass, verification, new state; returns the features."""
        own, rows, sizes = self.buffers, self._rows, self.buffers.sizes
        state = own.state
        build_target_batch(
            state.last_tokens_B,
            own.drafts_BK,
            state.num_drafts_B,
            state.first_positions_B,
            own.block_tables_BM,
            own.active_B,
            rows,
            block_size=sizes.block_size,
            max_model_len=sizes.max_model_len,
        )
        attend = self._backend.prepare(
            AttentionMetadata(
                query_start_loc=rows.query_start_loc,
                seq_lens_B=rows.seq_lens_B,
                block_tables_BM=own.block_tables_BM,
                slots_T=rows.slots_T,
                max_query_len=rows.tokens_T.shape[0] // sizes.num_seqs,
                max_seq_len=sizes.max_model_len,
            )
        )
        hidden_TH, features_TA = self.target.forward(rows.tokens_T, rows.positions_T, attend)
        logits_TV = self.target.compute_logits(hidden_TH)
        before = (logits_TV, rows.sequences_T, rows.query_start_loc, own.drafts_BK, own.active_B)
        after = (state, own.limits, self._scratch, own.out)
        if self.greedy:
            verify_greedy(*before, *after)
        else:
            verify_sampled(*before, own.sampling, *after)
        return features_TA

    def _draft(self, drafter: Drafter, features_TA: Tensor) -> None:
        own, rows, slots, sizes = self.buffers, self._rows, self._slots, self.buffers.sizes
        parallel = drafter.config.is_parallel
        expand_draft_batch(
            rows.tokens_T,
            rows.positions_T,
            rows.query_start_loc,
            own.out.num_accepted_B,
            own.out.next_tokens_B,
            own.block_tables_BM,
            own.active_B,
            slots,
            block_size=sizes.block_size,
            num_mask_slots_B=own.out.num_mask_slots_B if parallel else self._no_masks_B,
            mask_token_id=drafter.config.mask_token_id or 0,
            max_model_len=sizes.max_model_len,
        )
        gather_features(
            drafter.combine_features(features_TA),
            self._h_shared_D,
            slots.batch.feature_rows_S,
            self._hidden_SD,
        )
        hidden_SD = self._pass(
            drafter,
            slots.batch.tokens_S,
            self._hidden_SD,
            slots.batch.positions_S,
            AttentionMetadata(
                query_start_loc=slots.batch.query_start_loc,
                seq_lens_B=slots.batch.seq_lens_B,
                block_tables_BM=own.block_tables_BM,
                slots_T=slots.batch.slots_S,
                max_query_len=self._hidden_SD.shape[0] // sizes.num_seqs,
                max_seq_len=sizes.max_model_len,
                context_starts_B=own.context_starts_B,
            ),
        )
        if parallel:
            own.drafts_BK.copy_(self._best(drafter, hidden_SD[slots.draft_rows_BK]))
        else:
            self._draft_one_by_one(drafter, hidden_SD)

    def _draft_one_by_one(self, drafter: Drafter, hidden_SD: Tensor) -> None:
        """EAGLE-3: each draft from a pass over the one before."""
        own, slots, sizes = self.buffers, self._slots, self.buffers.sizes
        last_B = slots.batch.last_ntp_B
        hidden_BD, position_B = hidden_SD[last_B], slots.batch.positions_S[last_B]
        # Sequences are the first rows; the others have no queries.
        sequences_B = torch.arange(sizes.num_seqs, device=position_B.device)
        rows = torch.arange(sizes.num_seqs + 1, device=position_B.device)
        rows = rows.minimum(own.active_B.sum())
        own.drafts_BK[:, 0] = self._best(drafter, hidden_BD)
        for j in range(1, sizes.num_drafts):
            position_B = position_B + 1
            slots_B = slot_mapping(
                own.block_tables_BM,
                sequences_B,
                position_B,
                sizes.block_size,
                sizes.max_model_len,
            )
            metadata = AttentionMetadata(
                query_start_loc=rows,
                seq_lens_B=torch.where(own.active_B, position_B + 1, 0),
                block_tables_BM=own.block_tables_BM,
                slots_T=torch.where(own.active_B, slots_B, PADDING_SLOT),
                max_query_len=1,
                max_seq_len=sizes.max_model_len,
                context_starts_B=own.context_starts_B,
            )
            tokens_B = own.drafts_BK[:, j - 1]
            hidden_BD = self._pass(drafter, tokens_B, hidden_BD, position_B, metadata)
            own.drafts_BK[:, j] = self._best(drafter, hidden_BD)

    def _pass(
        self,
        drafter: Drafter,
        tokens: Tensor,
        hidden: Tensor,
        positions: Tensor,
        metadata: AttentionMetadata,
    ) -> Tensor:
        prepared = self._backend.prepare(metadata)
        scaling = drafter.config.head_dim**-0.5

        def attend(layer_idx: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            cache = self.drafter_caches[layer_idx]
            return prepared(query, key, value, cache, scaling=scaling)

        return drafter(tokens, hidden, positions, attend)

    @staticmethod
    def _best(drafter: Drafter, hidden: Tensor) -> Tensor:
        """Argmax drafts, as target ids."""
        return drafter.to_target_ids(drafter.compute_logits(hidden).argmax(-1))
