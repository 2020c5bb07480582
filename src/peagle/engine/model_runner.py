"""Runs one step: tensors of the batch, target pass, verification, drafting.

Shapes: B sequences, T packed target rows, K drafts of a sequence, M blocks of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from peagle.attention import AttentionBackend, AttentionMetadata, LayerKVCache
from peagle.engine.scheduler import ScheduledBatch
from peagle.engine.sequence import Sequence
from peagle.kernels.expand import slot_mapping
from peagle.models.target import TargetModel
from peagle.speculation import Proposer, SamplingTensors, TargetStep, Verified, verify


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step produced.

    Attributes:
        new_token_ids: accepted drafts and the target's own token, of each sequence.
        num_drafted, num_accepted: of each sequence.
        target_step: what the proposer reads.
    """

    new_token_ids: list[list[int]]
    num_drafted: list[int]
    num_accepted: list[int]
    target_step: TargetStep


class ModelRunner:
    """Owns the device side of a step.

    Args:
        target: the target model, its KV caches set.
        backend: attention backend.
        proposer: how drafts are made; None decodes plainly.
        block_size: slots of a KV block.
        max_model_len: positions from here on write no KV.
    """

    def __init__(
        self,
        target: TargetModel,
        backend: AttentionBackend,
        proposer: Proposer | None,
        *,
        block_size: int,
        max_model_len: int,
    ) -> None:
        self.target = target
        self.backend = backend
        self.proposer = proposer
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.device = target.device

    @torch.inference_mode()
    def run_target(self, batch: ScheduledBatch) -> StepResult:
        """Target pass and verification of one scheduled batch."""
        sequences = batch.sequences
        if batch.is_prefill:
            chunks = [s.prompt_token_ids for s in sequences]
            num_drafted = [0] * len(sequences)
        else:
            chunks = [[s.output_token_ids[-1], *s.drafts] for s in sequences]
            num_drafted = [len(s.drafts) for s in sequences]
        lens = [len(chunk) for chunk in chunks]
        first = [0 if batch.is_prefill else len(s) - 1 for s in sequences]

        lens_B, first_B = self._ints(lens), self._ints(first)
        start_loc = torch.nn.functional.pad(lens_B.cumsum(0), (1, 0))
        tokens_T = self._ints([token for chunk in chunks for token in chunk])
        sequences_T = torch.repeat_interleave(lens_B, output_size=sum(lens))
        offset_T = torch.arange(sum(lens), device=self.device) - start_loc[sequences_T]
        positions_T = first_B[sequences_T] + offset_T
        tables_BM = self._block_tables(sequences)
        slots_T = slot_mapping(
            tables_BM, sequences_T, positions_T, self.block_size, self.max_model_len
        )
        attend = self.backend.prepare(
            AttentionMetadata(
                query_start_loc=start_loc,
                seq_lens_B=first_B + lens_B,
                block_tables_BM=tables_BM,
                slots_T=slots_T,
                max_query_len=max(lens),
                max_seq_len=max(f + n for f, n in zip(first, lens, strict=True)),
            )
        )
        hidden_TH, features_TA = self.target.forward(tokens_T, positions_T, attend)
        if batch.is_prefill:
            hidden_TH = hidden_TH[start_loc[1:] - 1]
        sampling = self._sampling(sequences)
        verified = self._verify(hidden_TH, sequences, num_drafted, sampling)

        num_accepted = verified.num_accepted_B.tolist()
        next_tokens = verified.next_tokens_B.tolist()
        step = TargetStep(
            tokens_T=tokens_T,
            positions_T=positions_T,
            start_loc=start_loc,
            features_TA=features_TA,
            num_accepted_B=lens_B - 1 if batch.is_prefill else verified.num_accepted_B,
            next_tokens_B=verified.next_tokens_B,
            block_tables_BM=tables_BM,
            sampling=replace(
                sampling, num_outputs_B=sampling.num_outputs_B + verified.num_accepted_B + 1
            ),
            histories=(),
        )
        new = [
            [*s.drafts[:a], token]
            for s, a, token in zip(sequences, num_accepted, next_tokens, strict=True)
        ]
        return StepResult(new, num_drafted, num_accepted, step)

    @torch.inference_mode()
    def propose(self, sequences: SequenceOf[Sequence], step: TargetStep) -> None:
        """Draft for every sequence of the batch; the drafts are left on the sequences."""
        if self.proposer is None:
            return
        histories = [s.token_ids for s in sequences]
        drafts = self.proposer.propose(replace(step, histories=histories))
        for row, (sequence, tokens) in enumerate(
            zip(sequences, drafts.tokens_BK.tolist(), strict=True)
        ):
            sequence.drafts = tokens[: drafts.lens[row]]
            sequence.draft_probs_KV = None if drafts.probs_BKV is None else drafts.probs_BKV[row]

    def _verify(
        self,
        hidden_TH: Tensor,
        sequences: SequenceOf[Sequence],
        num_drafted: list[int],
        sampling: SamplingTensors,
    ) -> Verified:
        most = max(num_drafted)
        padded = [
            s.drafts[:n] + [0] * (most - n) for s, n in zip(sequences, num_drafted, strict=True)
        ]
        probs = [s.draft_probs_KV for s in sequences if s.draft_probs_KV is not None]
        return verify(
            self.target.compute_logits(hidden_TH),
            self._ints(padded).view(len(sequences), most),
            self._ints(num_drafted),
            sampling,
            self._stack_draft_probs(sequences, probs, most) if probs and most else None,
        )

    def _stack_draft_probs(
        self, sequences: SequenceOf[Sequence], probs: list[Tensor], most: int
    ) -> Tensor:
        """q of the batch; one-hot rows for sequences that were drafted by argmax."""
        if len(probs) == len(sequences):
            return torch.stack(probs)
        stacked_BKV = probs[0].new_zeros(len(sequences), most, self.target.vocab_size)
        for row, sequence in enumerate(sequences):
            if sequence.draft_probs_KV is not None:
                stacked_BKV[row] = sequence.draft_probs_KV
            else:
                columns = torch.arange(len(sequence.drafts), device=self.device)
                stacked_BKV[row, columns, self._ints(sequence.drafts)] = 1.0
        return stacked_BKV

    def _block_tables(self, sequences: SequenceOf[Sequence]) -> Tensor:
        widest = max(len(s.block_table) for s in sequences)
        return self._ints([s.block_table + [0] * (widest - len(s.block_table)) for s in sequences])

    def _sampling(self, sequences: SequenceOf[Sequence]) -> SamplingTensors:
        params = [s.params for s in sequences]
        return SamplingTensors(
            temperature_B=torch.tensor([p.temperature for p in params], device=self.device),
            top_k_B=self._ints([min(p.top_k, self.target.vocab_size) for p in params]),
            top_p_B=torch.tensor([p.top_p for p in params], device=self.device),
            seeds_B=self._ints([s.seed for s in sequences]),
            num_outputs_B=self._ints([len(s.output_token_ids) for s in sequences]),
            all_greedy=all(p.is_greedy for p in params),
        )

    def _ints(self, values: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)


def make_caches(
    shapes: SequenceOf[tuple[int, int]],
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> list[LayerKVCache]:
    """One KV cache a layer of (key/value heads, head size)."""
    return [LayerKVCache(num_blocks, block_size, h, d, dtype, device) for h, d in shapes]
