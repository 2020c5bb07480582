"""Passes over few tokens as CUDA graphs: prompts, and what decode steps leave to them.

A pass over a few hundred tokens takes the card less time than the host needs to launch it kernel
by kernel.

Shapes: T tokens (a bucket), B sequences, M blocks a sequence, H target width, A aux states, D
drafter width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from peagle.attention import AttentionBackend, AttentionMetadata, Prepared
from peagle.engine.capture import Capturer
from peagle.kernels.expand import PADDING_SLOT
from peagle.models.target import TargetModel
from peagle.speculation.proposers import HeadProposer

TOKEN_BUCKETS = (32, 128, 256, 512)
MAX_SEQUENCES = 16

# run(tokens [T], positions [T], attend, hidden [T, D] or None) -> outputs, T rows each
Run = Callable[[Tensor, Tensor, Prepared, Tensor | None], tuple[Tensor, ...]]


class PassGraphs:
    """Runs a model over inputs copied into fixed places.

    What a pass returns is overwritten by the next graph that runs, of this or of decode steps.

    Args:
        run: the model.
        backend: attention that reads nothing on the host.
        capture: makes the graphs; no KV is written meanwhile.
        table_width: M, of the longest sequence.
        block_size: slots of a KV block.
        device: where it runs.
        hidden: gives type and width D of the hidden states that go in; None: the model has none.
    """

    def __init__(
        self,
        run: Run,
        backend: AttentionBackend,
        capture: Capturer,
        table_width: int,
        block_size: int,
        device: torch.device,
        hidden: Tensor | None = None,
    ) -> None:
        self._passes = [
            _Pass(run, backend, capture, size, table_width, block_size, device, hidden)
            for size in reversed(TOKEN_BUCKETS)
        ][::-1]

    def __call__(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        metadata: AttentionMetadata,
        hidden_TD: Tensor | None = None,
    ) -> tuple[Tensor, ...] | None:
        """The model's outputs; None where the pass is too large, or asks for what it cannot."""
        too_many = metadata.seq_lens_B.shape[0] > MAX_SEQUENCES
        if too_many or metadata.context_starts_B is not None:
            return None
        for fitting in self._passes:
            if fitting.num_tokens >= tokens_T.shape[0]:
                return fitting(tokens_T, positions_T, metadata, hidden_TD)
        return None


class TargetGraphs(PassGraphs):
    """`TargetModel.forward`: final hidden states and features."""

    def __init__(
        self, target: TargetModel, backend: AttentionBackend, capture: Capturer, table_width: int
    ) -> None:
        def run(
            tokens_T: Tensor, positions_T: Tensor, attend: Prepared, hidden: Tensor | None
        ) -> tuple[Tensor, ...]:
            return target.forward(tokens_T, positions_T, attend)

        block_size = target.kv_caches[0].block_size
        super().__init__(run, backend, capture, table_width, block_size, target.device)


class DrafterGraphs(PassGraphs):
    """`HeadProposer.run_prepared`: the drafter's hidden states."""

    def __init__(self, proposer: HeadProposer, capture: Capturer, table_width: int) -> None:
        def run(
            tokens_T: Tensor, positions_T: Tensor, attend: Prepared, hidden: Tensor | None
        ) -> tuple[Tensor, ...]:
            assert hidden is not None
            return (proposer.run_prepared(tokens_T, hidden, positions_T, attend),)

        weight = proposer.drafter.fc.weight
        hidden = weight.new_zeros(1, proposer.drafter.config.hidden_size)
        block_size, device = proposer.caches[0].block_size, weight.device
        super().__init__(run, proposer.backend, capture, table_width, block_size, device, hidden)


class _Pass:
    """The graph of one number of tokens; the last ones may be padding."""

    def __init__(
        self,
        run: Run,
        backend: AttentionBackend,
        capture: Capturer,
        num_tokens: int,
        table_width: int,
        block_size: int,
        device: torch.device,
        hidden: Tensor | None,
    ) -> None:
        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        self.num_tokens = num_tokens
        self._model, self._backend = run, backend
        self._tokens_T, self._positions_T = ints(num_tokens), ints(num_tokens)
        self._hidden_TD = None if hidden is None else hidden.new_zeros(num_tokens, hidden.shape[1])
        self._metadata = AttentionMetadata(
            query_start_loc=ints(MAX_SEQUENCES + 1),
            seq_lens_B=ints(MAX_SEQUENCES),
            block_tables_BM=ints(MAX_SEQUENCES, table_width),
            slots_T=ints(num_tokens) + PADDING_SLOT,
            max_query_len=num_tokens,
            max_seq_len=table_width * block_size,
        )
        self._outputs: tuple[Tensor, ...] = ()
        self._replay = capture(self._run)

    @torch.inference_mode()
    def _run(self) -> None:
        attend = self._backend.prepare(self._metadata)
        self._outputs = self._model(self._tokens_T, self._positions_T, attend, self._hidden_TD)

    @torch.inference_mode()
    def __call__(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        metadata: AttentionMetadata,
        hidden_TD: Tensor | None,
    ) -> tuple[Tensor, ...]:
        own, count = self._metadata, tokens_T.shape[0]
        num_seqs, width = metadata.block_tables_BM.shape
        _put(self._tokens_T, tokens_T, 0)
        _put(self._positions_T, positions_T, 0)
        _put(own.slots_T, metadata.slots_T, PADDING_SLOT)
        _put(own.query_start_loc, metadata.query_start_loc, count)
        _put(own.seq_lens_B, metadata.seq_lens_B, 0)
        own.block_tables_BM[:num_seqs, :width].copy_(metadata.block_tables_BM)
        if self._hidden_TD is not None and hidden_TD is not None:
            self._hidden_TD[:count].copy_(hidden_TD)
        self._replay()
        return tuple(output[:count] for output in self._outputs)


def _put(buffer: Tensor, values: Tensor, rest: int) -> None:
    buffer[: values.shape[0]].copy_(values)
    buffer[values.shape[0] :].fill_(rest)
