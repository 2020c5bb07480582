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
from peagle.engine.feature_ring import NO_SLOT
from peagle.engine.step_buffers_triton import StepBuffers
from peagle.kernels.draft_choice_triton import (
    ChainBuffers,
    ChoiceScratch,
    choose_drafts,
    plan_chain,
)
from peagle.kernels.expand_triton import (
    DraftBuffers,
    build_target_batch,
    expand_draft_batch,
    gather_features,
)
from peagle.kernels.step_frame_triton import NUM_STAMPS, begin_step, report_step, stamp
from peagle.kernels.target_batch import TargetBatch
from peagle.kernels.verify_triton import VerifyScratch, verify_greedy, verify_sampled
from peagle.models.drafter import Drafter
from peagle.models.target import TargetModel


class DecodeStep:
    """The step over one set of buffers.

    Args:
        target: the target, its KV caches set.
        drafter: the head; None decodes plainly.
        drafter_caches: one KV cache a drafter layer.
        buffers: state of the sequences.
        greedy: every sequence has temperature 0.
        kept_SCA: rings of `FeatureRings`, for what a head reads later; None keeps nothing. With
            them there is no drafter, and one row a sequence.
    """

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter | None,
        drafter_caches: list[LayerKVCache],
        buffers: StepBuffers,
        *,
        greedy: bool,
        kept_SCA: Tensor | None = None,
    ) -> None:
        sizes, device = buffers.sizes, target.device
        self.target = target
        self.drafter = drafter
        self.drafter_caches = drafter_caches
        self.buffers = buffers
        self.greedy = greedy
        self.kept_SCA = kept_SCA
        self._backend = TritonAttention()
        batch, columns = sizes.num_seqs, buffers.drafts_BK.shape[1] + 1
        num_rows = batch * (columns if drafter else 1)
        self._rows = TargetBatch.allocate(batch, num_rows, device)
        self._scratch = VerifyScratch.allocate(batch, num_rows, target.vocab_size, device)
        self._running_B = torch.zeros_like(buffers.active_B)
        self._num_drafted_B = torch.zeros_like(buffers.active_B)
        self._times = torch.zeros(NUM_STAMPS, dtype=torch.int64, device=device)
        if drafter is not None:
            self._make_draft_buffers(drafter)

    def _make_draft_buffers(self, drafter: Drafter) -> None:
        sizes, config, device = self.buffers.sizes, drafter.config, self.target.device
        batch, k = sizes.num_seqs, sizes.num_drafts
        num_slots = batch * (2 * k if config.is_parallel else k + 1)
        self._slots = DraftBuffers.allocate(batch, num_slots, k, device)
        self._hidden_SD = torch.zeros(
            num_slots, config.hidden_size, dtype=self.target.dtype, device=device
        )
        self._no_masks_B = torch.zeros_like(self.buffers.out.num_mask_slots_B)
        num_rows = batch * k if config.is_parallel else batch
        self._choice = ChoiceScratch.allocate(num_rows, config.draft_vocab_size, device)
        self._chain = ChainBuffers.allocate(batch, k, device)
        with torch.inference_mode():
            zeros_D = torch.zeros(config.hidden_size, dtype=self.target.dtype, device=device)
            self._h_shared_D = drafter.shared_hidden() if config.is_parallel else zeros_D
            drafter.reserve_positions(sizes.max_model_len + 2 * k)

    @torch.inference_mode()
    def run(self) -> None:
        """Take the step; what it gave stands in `buffers.out`, what comes next in `buffers`."""
        own = self.buffers
        begin_step(own.active_B, own.state, self._running_B, self._num_drafted_B, self._times)
        logits_TV, features_TA = self._run_target()
        if self.kept_SCA is not None:
            self._keep(features_TA, self.kept_SCA)
        stamp(self._times, 1)
        self._verify(logits_TV)
        stamp(self._times, 2)
        if self.drafter is not None:
            self._draft(self.drafter, features_TA)
        report_step(
            self._num_drafted_B, own.out, own.state, own.drafts_BK, self._times, own.report_RX
        )

    def _run_target(self) -> tuple[Tensor, Tensor]:
        """Logits and features of the newest tokens and the drafts."""
        own, rows, sizes = self.buffers, self._rows, self.buffers.sizes
        state = own.state
        build_target_batch(
            state.last_tokens_B,
            own.drafts_BK,
            state.num_drafts_B,
            state.first_positions_B,
            own.block_tables_BM,
            self._running_B,
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
        return self.target.compute_logits(hidden_TH), features_TA

    def _keep(self, features_TA: Tensor, kept_SCA: Tensor) -> None:
        """Put features where `FeatureRing` looks for those of a position; padding goes last."""
        rows, capacity = self._rows, kept_SCA.shape[1]
        slots_T = self.buffers.feature_slots_B[rows.sequences_T]
        slots_T = slots_T.masked_fill(rows.sequences_T < 0, NO_SLOT)
        kept_SCA[slots_T, rows.positions_T % capacity] = features_TA

    def _verify(self, logits_TV: Tensor) -> None:
        """Accepted drafts, next tokens, new state."""
        own, rows = self.buffers, self._rows
        before = (
            logits_TV,
            rows.sequences_T,
            rows.query_start_loc,
            own.drafts_BK,
            self._running_B,
        )
        after = (own.state, own.limits, self._scratch, own.out)
        if self.greedy:
            verify_greedy(*before, *after, synthetic=own.synthetic)
        else:
            verify_sampled(*before, own.sampling, *after, synthetic=own.synthetic)

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
            self._running_B,
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
            # A sequence's rows stand one after the other, and the last again where drafts end.
            hidden_ND = hidden_SD[slots.draft_rows_BK.view(-1)]
            self._choose(drafter, hidden_ND, own.drafts_BK)
        else:
            self._draft_one_by_one(drafter, hidden_SD)

    def _draft_one_by_one(self, drafter: Drafter, hidden_SD: Tensor) -> None:
        """EAGLE-3: each draft from a pass over the one before."""
        own, slots, sizes = self.buffers, self._slots, self.buffers.sizes
        last_B, chain = slots.batch.last_ntp_B, self._chain
        plan_chain(
            last_B,
            slots.batch.positions_S,
            own.block_tables_BM,
            self._running_B,
            chain,
            block_size=sizes.block_size,
            max_model_len=sizes.max_model_len,
        )
        hidden_BD = hidden_SD[last_B]
        self._choose(drafter, hidden_BD, own.drafts_BK[:, 0])
        for j in range(1, sizes.num_drafts):
            metadata = AttentionMetadata(
                query_start_loc=chain.query_start_loc,
                seq_lens_B=chain.seq_lens_PB[j - 1],
                block_tables_BM=own.block_tables_BM,
                slots_T=chain.slots_PB[j - 1],
                max_query_len=1,
                max_seq_len=sizes.max_model_len,
                context_starts_B=own.context_starts_B,
            )
            tokens_B, positions_B = own.drafts_BK[:, j - 1], chain.positions_PB[j - 1]
            hidden_BD = self._pass(drafter, tokens_B, hidden_BD, positions_B, metadata)
            self._choose(drafter, hidden_BD, own.drafts_BK[:, j])

    def _pass(
        self,
        drafter: Drafter,
        tokens: Tensor,
        hidden: Tensor,
        positions: Tensor,
        metadata: AttentionMetadata,
    ) -> Tensor:
        prepared = self._backend.prepare(metadata)
        scaling, window = drafter.config.head_dim**-0.5, drafter.window

        def attend(layer_idx: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            cache = self.drafter_caches[layer_idx]
            return prepared(query, key, value, cache, scaling=scaling, sliding_window=window)

        return drafter(tokens, hidden, positions, attend)

    def _choose(self, drafter: Drafter, hidden_ND: Tensor, out: Tensor) -> None:
        """Write the argmax drafts of some hidden states, as target ids."""
        choose_drafts(drafter.compute_logits(hidden_ND), drafter.d2t, self._choice, out)
