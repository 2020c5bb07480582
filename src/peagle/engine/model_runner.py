"""Runs the target over one batch of chunks: tensors of the batch, target pass, new tokens.

Shapes: B sequences, T packed target rows, N rows that are sampled, M blocks of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.attention import AttentionBackend, AttentionMetadata, LayerKVCache
from peagle.engine.grammar import unpack, walk
from peagle.engine.sampler import SampledStep, Sampler
from peagle.engine.scheduler import Chunk
from peagle.engine.sequence import Sequence
from peagle.engine.target_graphs import TargetGraphs
from peagle.kernels.expand import slot_mapping
from peagle.kernels.logprobs import token_logprobs
from peagle.models.target import TargetModel

# Prompt rows whose logits exist at the same time.
_LOGPROB_ROWS = 512


@dataclass(frozen=True, slots=True)
class TargetPass:
    """What one pass of the target left behind.

    Attributes:
        chunks: what it ran over, in the order of the packed rows.
        starts: position of the first row of each chunk.
        tokens_T, positions_T: the packed rows; start_loc: [B+1], where each sequence begins.
        features_TA: aux features of the rows.
        block_tables_BM: KV blocks of each sequence.
        sampled: new tokens of the chunks that sample, None if none does.
    """

    chunks: SequenceOf[Chunk]
    starts: list[int]
    tokens_T: Tensor
    positions_T: Tensor
    start_loc: Tensor
    features_TA: Tensor
    block_tables_BM: Tensor
    sampled: SampledStep | None


class ModelRunner:
    """Owns the device side of a target pass.

    Args:
        target: the target model, its KV caches set.
        backend: attention backend.
        sampler: verifies drafts and draws tokens.
        block_size: slots of a KV block.
        max_model_len: positions from here on write no KV.

    Attributes:
        graphs: passes over few tokens; None launches every kernel by itself.
    """

    def __init__(
        self,
        target: TargetModel,
        backend: AttentionBackend,
        sampler: Sampler,
        *,
        block_size: int,
        max_model_len: int,
    ) -> None:
        self.target = target
        self.backend = backend
        self.sampler = sampler
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.device = target.device
        self.graphs: TargetGraphs | None = None

    @torch.inference_mode()
    def run(self, chunks: SequenceOf[Chunk]) -> TargetPass:
        """Compute the chunks, and verify and sample where they end."""
        sequences = [chunk.sequence for chunk in chunks]
        rows = [_tokens(chunk) for chunk in chunks]
        lens, first = [len(row) for row in rows], [s.num_computed_tokens for s in sequences]

        lens_B, first_B = self._ints(lens), self._ints(first)
        start_loc = torch.nn.functional.pad(lens_B.cumsum(0), (1, 0))
        tokens_T = self._ints([token for row in rows for token in row])
        sequences_T = torch.repeat_interleave(lens_B, output_size=sum(lens))
        offset_T = torch.arange(sum(lens), device=self.device) - start_loc[sequences_T]
        positions_T = first_B[sequences_T] + offset_T
        tables_BM = block_tables(sequences, self.device)
        metadata = AttentionMetadata(
            query_start_loc=start_loc,
            seq_lens_B=first_B + lens_B,
            block_tables_BM=tables_BM,
            slots_T=slot_mapping(
                tables_BM, sequences_T, positions_T, self.block_size, self.max_model_len
            ),
            max_query_len=max(lens),
            max_seq_len=max(f + n for f, n in zip(first, lens, strict=True)),
        )
        hidden_TH, features_TA = self._forward(tokens_T, positions_T, metadata)
        self._prompt_logprobs(chunks, hidden_TH, lens)
        sampled = self._sample(chunks, hidden_TH, lens)
        return TargetPass(
            chunks, first, tokens_T, positions_T, start_loc, features_TA, tables_BM, sampled
        )

    def _forward(
        self, tokens_T: Tensor, positions_T: Tensor, metadata: AttentionMetadata
    ) -> tuple[Tensor, Tensor]:
        if self.graphs is not None:
            done = self.graphs(tokens_T, positions_T, metadata)
            if done is not None:
                hidden_TH, features_TA = done
                return hidden_TH, features_TA
        return self.target.forward(tokens_T, positions_T, self.backend.prepare(metadata))

    def _sample(
        self, chunks: SequenceOf[Chunk], hidden_TH: Tensor, lens: list[int]
    ) -> SampledStep | None:
        sampling = [chunk for chunk in chunks if chunk.samples]
        if not sampling:
            return None
        if sum(lens) > sum(1 + chunk.num_drafts for chunk in sampling):
            hidden_TH = hidden_TH[self._ints(_sampled_rows(chunks, lens))]
        sequences = [chunk.sequence for chunk in sampling]
        return self.sampler.sample(
            self.target.compute_logits(hidden_TH),
            sequences,
            [chunk.num_drafts for chunk in sampling],
            self._masks(sequences),
        )

    def _masks(self, sequences: SequenceOf[Sequence]) -> Tensor | None:
        """The tokens that grammars allow in each row, bool [R, V]; None if there are none."""
        grammars = [s.grammar for s in sequences]
        if not any(grammars):
            return None
        lens, bitmask_RW = walk(grammars, [s.drafts for s in sequences], self.target.vocab_size)
        assert lens == [len(s.drafts) for s in sequences], "drafts are cut when they are made"
        assert bitmask_RW is not None
        return unpack(bitmask_RW.to(self.device), self.target.vocab_size)

    def _prompt_logprobs(
        self, chunks: SequenceOf[Chunk], hidden_TH: Tensor, lens: list[int]
    ) -> None:
        """Log-probabilities of the prompt tokens that follow the rows, where asked for."""
        row = 0
        for chunk, length in zip(chunks, lens, strict=True):
            sequence, num_top = chunk.sequence, chunk.sequence.params.prompt_logprobs
            if num_top is not None and sequence.needs_every_token:
                start = sequence.num_computed_tokens
                # What a preempted pass gave already is not given twice.
                first = max(start, len(sequence.prompt_logprobs))
                last = min(start + length, sequence.num_prompt_tokens - 1)
                for at in range(first, last, _LOGPROB_ROWS):
                    end = min(at + _LOGPROB_ROWS, last)
                    hidden_NH = hidden_TH[row + at - start : row + end - start]
                    sequence.prompt_logprobs += token_logprobs(
                        self.target.compute_logits(hidden_NH),
                        sequence.token_ids[at + 1 : end + 1],
                        [num_top] * (end - at),
                    )
            row += length

    def _ints(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)


def _tokens(chunk: Chunk) -> list[int]:
    sequence, start = chunk.sequence, chunk.sequence.num_computed_tokens
    tokens = sequence.token_ids[start : start + chunk.num_tokens]
    return tokens + sequence.drafts if chunk.num_drafts else tokens


def _sampled_rows(chunks: SequenceOf[Chunk], lens: list[int]) -> list[int]:
    """Packed rows that predict a new token: those of the drafts and the one before them."""
    rows: list[int] = []
    end = 0
    for chunk, length in zip(chunks, lens, strict=True):
        end += length
        if chunk.samples:
            rows.extend(range(end - chunk.num_drafts - 1, end))
    return rows


def block_tables(
    sequences: SequenceOf[Sequence], device: torch.device, width: int | None = None
) -> Tensor:
    """KV blocks of the sequences, padded, int64 [B, M]; M is that of the longest.

    Padding is a sequence's own first block: masked keys of weight 0 count too where they are NaN,
    and those of another request must not reach it.
    """
    width = width or max(len(s.block_table) for s in sequences)
    tables = [(s.block_table + (s.block_table[:1] or [0]) * width)[:width] for s in sequences]
    return torch.tensor(tables, dtype=torch.int64, device=device)


def make_caches(
    shapes: SequenceOf[tuple[int, int]],
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> list[LayerKVCache]:
    """One KV cache a layer of (key/value heads, head size)."""
    return [LayerKVCache(num_blocks, block_size, h, d, dtype, device) for h, d in shapes]
