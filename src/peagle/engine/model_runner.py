"""Runs the target over one batch of chunks: tensors of the batch, target pass, new tokens.

Shapes: B sequences, T packed target rows, N sampled rows, M blocks of a sequence, J rows of the
largest tree.
"""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from peagle.attention import AttentionBackend, Passes, Prepared
from peagle.engine.grammar import to_bools, verification_masks
from peagle.engine.sampler import Sampler, SamplerOutput
from peagle.engine.scheduler import Chunk
from peagle.engine.sequence import Sequence
from peagle.kernels.attention.kv_moves import move_slots
from peagle.kernels.drafts.batches import TargetBatch, pack_rows
from peagle.kernels.paths import TreePaths
from peagle.kernels.sampling.logprobs import logprob_table
from peagle.kernels.upload import host_ints, upload_ints, upload_together
from peagle.models.target import TargetModel

# A function that runs the target, with the signature of `Passes.__call__`.
RunTarget = Callable[..., tuple[Tensor, ...]]

# Prompt rows whose logits exist at the same time.
_LOGPROB_ROWS = 512


@dataclass(frozen=True, slots=True)
class TargetPass:
    """The results of one pass of the target.

    Attributes:
        chunks: chunks of the pass, in the order of the packed rows.
        starts: position of the first row of each chunk.
        features_TA: aux features of the packed rows; for trees the rows of each sequence's newest
            token and accepted drafts come first, as for a chain.
        sampled: new tokens of the chunks that sample; None if none does.
    """

    chunks: SequenceOf[Chunk]
    starts: list[int]
    features_TA: Tensor
    sampled: SamplerOutput | None


class ModelRunner:
    """Runs the target over chunks of sequences.

    Args:
        target: the target model, its KV caches set.
        max_model_len: positions from here on write no KV.

    Attributes:
        passes: passes of the target.
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
        self.passes = target_passes(target, backend)
        self.sampler = sampler
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.device = target.device

    @torch.inference_mode()
    def run(self, chunks: SequenceOf[Chunk], run_target: RunTarget | None = None) -> TargetPass:
        """Compute the chunks, and verify and sample at their ends.

        Args:
            run_target: replaces `passes`.
        """
        sequences = [chunk.sequence for chunk in chunks]
        first = [s.num_computed_tokens for s in sequences]
        rows = [
            [*s.token_ids[start : start + chunk.num_tokens], *s.drafts[: chunk.num_draft_tokens]]
            for s, start, chunk in zip(sequences, first, chunks, strict=True)
        ]
        lens = [len(row) for row in rows]
        paths = _paths(chunks)
        batch, tables_BM, visible_T = self._batch(rows, first, block_tables(sequences), paths)
        if paths is not None:
            paths = paths.to(self.device)
        hidden_TH, features_TA = (run_target or self.passes)(
            batch,
            tables_BM,
            max_query_len=max(lens),
            max_seq_len=max(f + n for f, n in zip(first, lens, strict=True)),
            visible_R=visible_T,
        )
        self._prompt_logprobs(chunks, hidden_TH, lens)
        sampled = self._sample(chunks, hidden_TH, lens, paths)
        if paths is not None and sampled is not None:
            order = [
                start + row
                for start, rows, length in zip(_starts(lens), sampled.order, lens, strict=True)
                for row in rows[:length]
            ]
            moves = [
                [order[start + j], start + j]
                for start, accepted in zip(_starts(lens), sampled.num_accepted, strict=True)
                for j in range(1, accepted + 1)
                if order[start + j] != start + j
            ]
            if moves:
                move_path(self.target, batch.slots_R[self._ints(moves)])
                features_TA = features_TA[self._ints(order)]
        return TargetPass(chunks, first, features_TA, sampled)

    def _batch(
        self,
        rows: SequenceOf[SequenceOf[int]],
        first: SequenceOf[int],
        tables_BM: Tensor,
        paths: TreePaths | None,
    ) -> tuple[TargetBatch, Tensor, Tensor | None]:
        """Return the batch of some rows on the device, its KV blocks, and the mask of visible rows.

        The host makes them: launching a kernel takes longer than computing so little.

        Args:
            rows: the tokens of each sequence.
            first: the position of each sequence's first row.
            tables_BM: the KV blocks of each sequence, on the host.
            paths: paths of the trees, on the host; None if each row sees all rows before it.
        """
        limits = {"block_size": self.block_size, "max_model_len": self.max_model_len}
        batch, own_of_pass = pack_rows(rows, first, tables_BM, **limits), [tables_BM]
        if paths is not None:  # nodes of one depth share a position, but each has a slot of its own
            sequences_T = batch.sequences_R
            offset_T = torch.arange(len(sequences_T)) - batch.query_start_loc[sequences_T]
            own_of_pass.append(paths.visible_BJ[sequences_T, offset_T])
            positions_T = host_ints(first)[sequences_T] + paths.depths_BJ[sequences_T, offset_T]
            batch = replace(batch, positions_R=positions_T)
        num_own = len(own_of_pass)
        there = upload_together([*own_of_pass, *batch.tensors], self.device)
        tables_BM, *visible = there[:num_own]
        return TargetBatch(*there[num_own:]), tables_BM, visible[0] if visible else None

    def _sample(
        self, chunks: SequenceOf[Chunk], hidden_TH: Tensor, lens: list[int], paths: TreePaths | None
    ) -> SamplerOutput | None:
        sampling = [chunk for chunk in chunks if chunk.samples]
        if not sampling:
            return None
        if sum(lens) > sum(1 + chunk.num_draft_tokens for chunk in sampling):
            # The last row of a chunk and the rows of its drafts predict new tokens.
            ends = list(accumulate(lens))
            sampled_rows = [
                row
                for chunk, end in zip(chunks, ends, strict=True)
                if chunk.samples
                for row in range(end - chunk.num_draft_tokens - 1, end)
            ]
            hidden_TH = hidden_TH[self._ints(sampled_rows)]
        sequences, vocab_size = [chunk.sequence for chunk in sampling], self.target.vocab_size
        packed_RW = verification_masks(
            [s.grammar for s in sequences],
            [chunk.sequence.drafts[: chunk.num_draft_tokens] for chunk in sampling],
            vocab_size,
        )
        masks_RV = None if packed_RW is None else to_bools(packed_RW.to(self.device), vocab_size)
        num_draft_tokens = [chunk.num_draft_tokens for chunk in sampling]
        logits_RV = self.target.compute_logits(hidden_TH)
        return self.sampler.sample(logits_RV, sequences, num_draft_tokens, masks_RV, paths)

    def _prompt_logprobs(
        self, chunks: SequenceOf[Chunk], hidden_TH: Tensor, lens: list[int]
    ) -> None:
        """Add the log-probabilities of the prompt tokens after the rows, where requested."""
        row = 0
        for chunk, length in zip(chunks, lens, strict=True):
            sequence, given = chunk.sequence, chunk.sequence.prompt_logprobs
            if given is not None and sequence.needs_every_token:
                start = sequence.num_computed_tokens
                # A preempted sequence has the log-probabilities of its first pass already.
                first = max(start, len(given) - 1)
                last = min(start + length, sequence.num_prompt_tokens - 1)
                for at in range(first, last, _LOGPROB_ROWS):
                    end = min(at + _LOGPROB_ROWS, last)
                    hidden_NH = hidden_TH[row + at - start : row + end - start]
                    tokens_N = self._ints(sequence.token_ids[at + 1 : end + 1])
                    logits_NV = self.target.compute_logits(hidden_NH)
                    given.add(logprob_table(logits_NV, tokens_N, given.num_top))
            row += length

    def _ints(self, values: list[int] | list[list[int]]) -> Tensor:
        return upload_ints(values, self.device)


def _paths(chunks: SequenceOf[Chunk]) -> TreePaths | None:
    """Return the paths of the rows of each chunk, on the host; None if all drafts are chains."""
    if not any(chunk.sequence.draft_parents for chunk in chunks if chunk.num_draft_tokens):
        return None
    assert all(chunk.num_tokens == 1 and chunk.samples for chunk in chunks), "a decode step"
    return TreePaths.of_lists(
        [
            (chunk.sequence.draft_parents or list(range(chunk.num_draft_tokens)))[
                : chunk.num_draft_tokens
            ]
            for chunk in chunks
        ]
    )


def target_passes(target: TargetModel, backend: AttentionBackend) -> Passes:
    """Return the passes of `TargetModel.forward`: final hidden states and features."""

    def run(
        tokens_T: Tensor, positions_T: Tensor, attend: Prepared, hidden: Tensor | None
    ) -> tuple[Tensor, ...]:
        return target.forward(tokens_T, positions_T, attend)

    return Passes(run, backend)


def cached_bytes(target: TargetModel) -> list[Tensor]:
    """Return the target's KV caches as bytes, [slots, bytes of a slot] each."""
    pairs = ((cache.keys, cache.values) for cache in target.kv_caches)
    return [x.view(torch.uint8).flatten(2).flatten(0, 1) for pair in pairs for x in pair]


def move_path(target: TargetModel, slots_X2: Tensor) -> None:
    """Move the target's keys and values of accepted paths to the slots of chains.

    The head's keys and values need no move: real tokens overwrite them.

    Args:
        slots_X2: old and new slots.
    """
    move_slots(cached_bytes(target), slots_X2[:, 0], slots_X2[:, 1])


def _starts(lens: list[int]) -> Iterator[int]:
    """Yield the first packed row of each sequence."""
    return accumulate(lens[:-1], initial=0)


def block_tables(sequences: SequenceOf[Sequence]) -> Tensor:
    """Return the KV blocks of the sequences on the host, padded to the longest table, [B, M].

    A sequence's own first block pads its row: attention multiplies masked values by a weight of 0,
    and a NaN in another request's block would still spread.
    """
    width = max(len(s.block_table) for s in sequences)
    tables = [(s.block_table + (s.block_table[:1] or [0]) * width)[:width] for s in sequences]
    return host_ints(tables)
