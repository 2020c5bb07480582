"""One decode step on the device: target, verification, new state, drafter, next drafts.

Everything that changes from step to step lies in buffers, so that a CUDA graph can hold the whole
step: no size depends on data, and the host reads nothing. Shapes: B sequences (a bucket; the last
ones may be inactive), K most drafts, J = K + 1, T = B * J target rows, S drafter slots, M blocks a
sequence, E stop ids a sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from peagle.attention import Passes
from peagle.attention.triton_backend import TritonAttention
from peagle.engine.features import NO_SLOT
from peagle.engine.model_runner import target_passes
from peagle.engine.sequence import Sequence
from peagle.kernels.batches import DraftBatch, PackedBatch, TargetBatch
from peagle.kernels.batches_triton import build_target_batch, expand_draft_batch, gather_features
from peagle.kernels.draft_choice_triton import (
    ChainBuffers,
    ChoiceScratch,
    choose_drafts,
    plan_chain,
)
from peagle.kernels.step_state import StepLimits, StepRecord, StepState
from peagle.kernels.step_state_triton import NUM_STAMPS, begin_step, report_step, stamp
from peagle.kernels.verify_triton import (
    SequenceSampling,
    SyntheticAcceptance,
    VerifyScratch,
    verify_drafts,
)
from peagle.models.target import TargetModel
from peagle.speculation.proposers import HeadProposer

# One integer, or one number, a sequence; the first five are the fields of `StepState`.
_INTS = (
    "last_tokens",
    "first_positions",
    "num_outputs",
    "num_drafts",
    "finish",
    "min_tokens",
    "max_tokens",
    "num_speculative",
    "top_k",
    "seeds",
    "active",
    "context_starts",
    "feature_slots",
)
_FLOATS = ("temperature", "top_p", "min_p")


@dataclass(frozen=True, slots=True)
class StepSizes:
    """Sizes of a step's buffers; lengths as in `StepLimits`, rates as in `SpeculativeConfig`."""

    num_seqs: int  # B
    num_drafts: int  # K, 0 without a drafter
    table_width: int  # M
    num_stop_ids: int  # E
    block_size: int
    max_model_len: int
    max_draft_len: int
    synthetic_rates: tuple[float, ...] | None = None


class HostWritten:
    """Tensors of one type in one allocation, which the host writes with one copy.

    The host fills two buffers in turn, so that it never writes the one that a copy still reads.

    Attributes:
        on_device: the tensors by name.
    """

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device
    ) -> None:
        sizes = [torch.Size(shape).numel() for shape in shapes.values()]

        def views(flat: Tensor) -> dict[str, Tensor]:
            parts = flat.split(sizes)
            return {n: p.view(s) for (n, s), p in zip(shapes.items(), parts, strict=True)}

        pinned = device.type == "cuda"
        self._flat = torch.zeros(sum(sizes), dtype=dtype, device=device)
        self._twins = [torch.zeros(sum(sizes), dtype=dtype, pin_memory=pinned) for _ in range(2)]
        self._arrays: list[dict[str, Any]] = [
            {name: view.numpy() for name, view in views(twin).items()} for twin in self._twins
        ]
        self._turn = 0
        self.on_device = views(self._flat)

    @property
    def on_host(self) -> dict[str, Any]:
        """The buffer to write next, as numpy arrays by name."""
        return self._arrays[self._turn]

    def upload(self) -> None:
        """Copy the written buffer to the device; the next writes go to the other one."""
        self._flat.copy_(self._twins[self._turn], non_blocking=True)
        self._turn = 1 - self._turn


class StepBuffers:
    """State on the device of the sequences that decode.

    Attributes:
        synthetic: acceptance set for measurements; None for the real one.
        drafts_BK: drafts that the next step verifies.
        block_tables_BM: KV blocks, int64.
        active_B: 1 for rows that are sequences, else 0; int64.
        context_starts_B: first drafter slot that attention may read.
        feature_slots_B: ring of `FeatureRings` that takes the features; NO_SLOT without one.
        out: what the last step decided.
        report_RX: the same in one tensor for the host, see `kernels.step_state_triton`.
    """

    def __init__(self, sizes: StepSizes, device: torch.device) -> None:
        batch, most = sizes.num_seqs, max(sizes.num_drafts, 1)
        self.sizes = sizes
        rows = dict.fromkeys(_INTS, (batch,))
        shapes = {**rows, "stop_ids": (batch, sizes.num_stop_ids), "drafts": (batch, most)}
        self._ints = HostWritten(shapes, torch.int64, device)
        self._floats = HostWritten(dict.fromkeys(_FLOATS, (batch,)), torch.float32, device)
        self._tables = HostWritten({"tables": (batch, sizes.table_width)}, torch.int64, device)
        ints, floats = self._ints.on_device, self._floats.on_device
        self.state = StepState(*(ints[name] for name in _INTS[:5]))
        self.limits = StepLimits(
            stop_ids_BE=ints["stop_ids"],
            min_tokens_B=ints["min_tokens"],
            max_tokens_B=ints["max_tokens"],
            num_speculative_B=ints["num_speculative"],
            max_model_len=sizes.max_model_len,
            max_draft_len=sizes.max_draft_len,
        )
        self.sampling = SequenceSampling(
            temperature_B=floats["temperature"],
            top_k_B=ints["top_k"],
            top_p_B=floats["top_p"],
            seeds_B=ints["seeds"],
            min_p_B=floats["min_p"],
        )
        self.synthetic: SyntheticAcceptance | None = None
        if sizes.synthetic_rates is not None:
            rates_K = torch.tensor(sizes.synthetic_rates, dtype=torch.float32, device=device)
            self.synthetic = SyntheticAcceptance(rates_K, ints["seeds"])
        self.drafts_BK = ints["drafts"]
        self.block_tables_BM = self._tables.on_device["tables"]
        self.active_B = ints["active"]
        self.context_starts_B = ints["context_starts"]
        self.feature_slots_B = ints["feature_slots"]
        self.out = StepRecord.allocate(batch, most, device)
        self.report_RX = torch.zeros(batch + 1, 2 * most + 4, dtype=torch.int64, device=device)
        # The blocks of each row, and how many of them each host buffer holds.
        self._blocks: list[list[int]] = [[] for _ in range(batch)]
        self._known = [[0] * batch for _ in range(2)]

    def upload(self, sequences: SequenceOf[Sequence], vocab_size: int) -> None:
        """Overwrite the device's state with what the host knows of the sequences."""
        count, most = len(sequences), self.sizes.num_drafts
        params = [s.params for s in sequences]
        rings = [s.pending_features for s in sequences]
        ints, floats = self._ints.on_host, self._floats.on_host
        for name, values in (
            ("last_tokens", [s.token_ids[-1] for s in sequences]),
            ("first_positions", [len(s) - 1 for s in sequences]),
            ("num_outputs", [s.num_output_tokens for s in sequences]),
            ("num_drafts", [min(len(s.drafts), most) for s in sequences]),
            ("min_tokens", [p.min_tokens for p in params]),
            ("max_tokens", [p.max_tokens for p in params]),
            ("num_speculative", [min(s.num_speculative_tokens, most) for s in sequences]),
            ("top_k", [min(p.top_k, vocab_size) for p in params]),
            ("seeds", [s.seed for s in sequences]),
            ("context_starts", [s.drafter_start for s in sequences]),
            ("feature_slots", [NO_SLOT if ring is None else ring.slot for ring in rings]),
        ):
            ints[name][:count] = values
        for name in _FLOATS:
            floats[name][:count] = [getattr(p, name) for p in params]
        ints["active"][:] = 0
        ints["active"][:count] = 1
        ints["stop_ids"][:] = -1
        for row, sequence in enumerate(sequences):
            ids = sorted(sequence.stop_token_ids)
            ints["stop_ids"][row, : len(ids)] = ids
            drafts = sequence.drafts[:most]
            ints["drafts"][row, : len(drafts)] = drafts
        self._ints.upload()
        self._floats.upload()
        self._known = [[0] * len(known) for known in self._known]
        self.upload_tables(sequences)

    def upload_tables(self, sequences: SequenceOf[Sequence]) -> None:
        """Write the blocks that each sequence holds now; those that ended keep what they had."""
        known = self._known[0]
        tables = self._tables.on_host["tables"]
        for row, sequence in enumerate(sequences):
            # A sequence that ended has no blocks, but this host buffer may lack its last ones.
            blocks = self._blocks[row] = sequence.block_table or self._blocks[row]
            if len(blocks) > known[row]:
                tables[row, known[row] : len(blocks)] = blocks[known[row] :]
                known[row] = len(blocks)
        self._tables.upload()
        self._known.reverse()


class DecodeStep:
    """The step over one set of buffers.

    Args:
        target: the target, its KV caches set.
        proposer: the head with its KV caches; None decodes plainly.
        greedy: every sequence has temperature 0.
        kept_SCA: `FeatureRings.rows_SCA`, which takes the features for a head that reads them
            later; None keeps none. With rings there is no drafter, and one row a sequence.
    """

    def __init__(
        self,
        target: TargetModel,
        proposer: HeadProposer | None,
        buffers: StepBuffers,
        *,
        greedy: bool,
        kept_SCA: Tensor | None = None,
    ) -> None:
        sizes, device = buffers.sizes, target.device
        self.target = target
        self.buffers = buffers
        self.greedy = greedy
        self.kept_SCA = kept_SCA
        self._proposer = proposer
        self._passes = target_passes(target, TritonAttention())
        batch = sizes.num_seqs
        num_rows = batch * (buffers.drafts_BK.shape[1] + 1 if proposer else 1)
        self._rows = TargetBatch.allocate(batch, num_rows, device)
        self._scratch = VerifyScratch.allocate(num_rows, target.vocab_size, device)
        self._running_B = torch.zeros_like(buffers.active_B)
        self._num_drafted_B = torch.zeros_like(buffers.active_B)
        self._times = torch.zeros(NUM_STAMPS, dtype=torch.int64, device=device)
        if proposer is not None:
            self._draft = CapturedDraft(proposer, buffers, self._rows, self._running_B)

    @torch.inference_mode()
    def run(self) -> None:
        """Take the step: results go to `buffers.out`, the next step's state to `buffers`."""
        own = self.buffers
        begin_step(own.active_B, own.state, self._running_B, self._num_drafted_B, self._times)
        logits_TV, features_TA = self._run_target()
        if self.kept_SCA is not None:
            self._keep(features_TA, self.kept_SCA)
        stamp(self._times, 1)
        self._verify(logits_TV)
        stamp(self._times, 2)
        if self._proposer is not None:
            self._proposer.draft(self._draft, features_TA)
        report_step(
            self._num_drafted_B, own.out, own.state, own.drafts_BK, self._times, own.report_RX
        )

    def _run_target(self) -> tuple[Tensor, Tensor]:
        """Return logits and features of the newest tokens and the drafts."""
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
        hidden_TH, features_TA = self._passes(
            rows,
            own.block_tables_BM,
            max_query_len=rows.tokens_R.shape[0] // sizes.num_seqs,
            max_seq_len=sizes.max_model_len,
        )
        return self.target.compute_logits(hidden_TH), features_TA

    def _keep(self, features_TA: Tensor, kept_SCA: Tensor) -> None:
        """Put features into the sequences' rings; those of padding go to the last ring."""
        rows, capacity = self._rows, kept_SCA.shape[1]
        slots_T = self.buffers.feature_slots_B[rows.sequences_R]
        slots_T = slots_T.masked_fill(rows.sequences_R < 0, NO_SLOT)
        kept_SCA[slots_T, rows.positions_R % capacity] = features_TA

    def _verify(self, logits_TV: Tensor) -> None:
        """Compute accepted drafts, next tokens and the new state."""
        own, rows = self.buffers, self._rows
        verify_drafts(
            logits_TV,
            rows.sequences_R,
            rows.query_start_loc,
            own.drafts_BK,
            self._running_B,
            own.state,
            own.limits,
            self._scratch,
            own.out,
            sampling=None if self.greedy else own.sampling,
            synthetic=own.synthetic,
        )


class CapturedDraft:
    """A `DraftExecutor` of argmax drafts over the buffers of a step, all of one size.

    Args:
        rows: the target's batch.
        running_B: which sequences run.
    """

    def __init__(
        self,
        proposer: HeadProposer,
        buffers: StepBuffers,
        rows: TargetBatch,
        running_B: Tensor,
    ) -> None:
        sizes, drafter, device = buffers.sizes, proposer.drafter, running_B.device
        config, num_seqs = drafter.config, sizes.num_seqs
        self.num_drafts = k = sizes.num_drafts
        self._drafter, self._buffers = drafter, buffers
        self._rows, self._running_B = rows, running_B
        self._passes = Passes(proposer.passes.run, TritonAttention())
        num_slots = num_seqs * (2 * k if config.is_parallel else k + 1)
        self._batch = DraftBatch.allocate(num_seqs, num_slots, k, device)
        self._num_mask_slots_B = buffers.out.num_mask_slots_B
        self._h_shared_D = torch.zeros_like(drafter.norm.weight)
        if config.is_parallel:
            self._h_shared_D = proposer.h_shared_1D.squeeze(0)
        else:
            self._num_mask_slots_B = torch.zeros_like(self._num_mask_slots_B)
            self._chain = ChainBuffers.allocate(num_seqs, k, device)
        self._hidden_SD = self._h_shared_D.new_zeros(num_slots, config.hidden_size)
        num_rows = num_seqs * k if config.is_parallel else num_seqs
        self._scratch = ChoiceScratch.allocate(num_rows, config.draft_vocab_size, device)
        drafter.reserve_positions(sizes.max_model_len + 2 * k)

    def first_batch(self) -> DraftBatch:
        own, rows, batch, sizes = self._buffers, self._rows, self._batch, self._buffers.sizes
        ends = {"block_size": sizes.block_size, "max_model_len": sizes.max_model_len}
        expand_draft_batch(
            rows.tokens_R,
            rows.positions_R,
            rows.query_start_loc,
            own.out.num_accepted_B,
            own.out.next_tokens_B,
            own.block_tables_BM,
            self._running_B,
            batch,
            num_mask_slots_B=self._num_mask_slots_B,
            mask_token_id=self._drafter.config.mask_token_id or 0,
            **ends,
        )
        if not self._drafter.config.is_parallel:
            place = batch.last_ntp_B, batch.positions_R, own.block_tables_BM
            plan_chain(*place, self._running_B, self._chain, **ends)
        return batch

    def gather(self, features_TD: Tensor, batch: DraftBatch) -> Tensor:
        gather_features(features_TD, self._h_shared_D, batch.feature_rows_R, self._hidden_SD)
        return self._hidden_SD

    def next_batch(self, column: int) -> PackedBatch:
        return self._chain.batch(column - 1, self._buffers.drafts_BK[:, column - 1])

    def run(self, batch: PackedBatch, hidden_SD: Tensor) -> Tensor:
        own, sizes = self._buffers, self._buffers.sizes
        (done_SD,) = self._passes(
            batch,
            own.block_tables_BM,
            hidden_SD,
            max_query_len=hidden_SD.shape[0] // sizes.num_seqs,
            max_seq_len=sizes.max_model_len,
            context_starts_B=own.context_starts_B,
        )
        return done_SD

    def choose(self, hidden_NJD: Tensor, first: int) -> None:
        logits_RV = self._drafter.compute_logits(hidden_NJD.flatten(0, 1))
        out_BJ = self._buffers.drafts_BK[:, first : first + hidden_NJD.shape[1]]
        choose_drafts(logits_RV, self._drafter.d2t, self._scratch, out_BJ)
