"""CUDA graphs of passes over few tokens: prompts, and the steps that decode graphs cannot run.

The GPU computes a pass over a few hundred tokens in less time than the host needs to launch its
kernels one by one. Shapes: T tokens (a bucket), B sequences, M blocks a sequence, D drafter width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from peagle.attention import AttentionBackend, AttentionMetadata, Prepared
from peagle.kernels.expand import PADDING_SLOT
from peagle.kernels.target_batch import TargetBatch
from peagle.models.target import TargetModel
from peagle.speculation.proposers import HeadProposer

TOKEN_BUCKETS = (32, 128, 256, 512)
MAX_SEQUENCES = 16
_WARM_UPS = 2

# Makes a function that replays what another one launches on the device.
Capturer = Callable[[Callable[[], None]], Callable[[], None]]
# run(tokens [T], positions [T], attend, hidden [T, D] or None) -> outputs, T rows each
Run = Callable[[Tensor, Tensor, Prepared, Tensor | None], tuple[Tensor, ...]]


class Capture:
    """Captures CUDA graphs that share one memory pool, because only one of them runs at a time.

    The caller holds the tensors that outlive a run.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        """Return the replay of `run`, which first runs a few times to compile and warm up."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UPS):
                run()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            run()
        return graph.replay


def make_capturer(device: torch.device) -> Capturer:
    """Return a `Capture` on a GPU; on a CPU, for tests, functions replay themselves."""
    return Capture() if device.type == "cuda" else lambda run: run


class PassGraphs:
    """Runs a model over inputs that it copies into fixed buffers.

    The next graph that runs, of this or of a decode step, overwrites the outputs.

    Args:
        run: the model.
        backend: an attention backend that reads nothing on the host.
        capture: makes the graphs; no KV is written meanwhile.
        table_width: M of the longest sequence.
        block_size: slots of a KV block.
        device: device of the model.
        hidden: a tensor with the type and width D of the hidden states that the model reads; None
            for a model that reads none.
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
        """Return the model's outputs; None where no graph fits the pass."""
        too_many = metadata.seq_lens_B.shape[0] > MAX_SEQUENCES
        if too_many or metadata.context_starts_B is not None:
            return None
        for fitting in self._passes:
            if fitting.num_tokens >= tokens_T.shape[0]:
                return fitting(tokens_T, positions_T, metadata, hidden_TD)
        return None


def make_target_graphs(
    target: TargetModel, backend: AttentionBackend, capture: Capturer, table_width: int
) -> PassGraphs:
    """Return graphs of `TargetModel.forward`: final hidden states and features."""

    def run(
        tokens_T: Tensor, positions_T: Tensor, attend: Prepared, hidden: Tensor | None
    ) -> tuple[Tensor, ...]:
        return target.forward(tokens_T, positions_T, attend)

    block_size = target.kv_caches[0].block_size
    return PassGraphs(run, backend, capture, table_width, block_size, target.device)


def make_drafter_graphs(proposer: HeadProposer, capture: Capturer, table_width: int) -> PassGraphs:
    """Return graphs of `HeadProposer.run_prepared`: the drafter's hidden states."""

    def run(
        tokens_T: Tensor, positions_T: Tensor, attend: Prepared, hidden: Tensor | None
    ) -> tuple[Tensor, ...]:
        assert hidden is not None
        return (proposer.run_prepared(tokens_T, hidden, positions_T, attend),)

    weight = proposer.drafter.fc.weight
    hidden = weight.new_zeros(1, proposer.drafter.config.hidden_size)
    block_size = proposer.caches[0].block_size
    return PassGraphs(
        run, proposer.backend, capture, table_width, block_size, weight.device, hidden
    )


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
        self.num_tokens = num_tokens
        self._model, self._backend = run, backend
        self._batch = TargetBatch.allocate(MAX_SEQUENCES, num_tokens, device)
        self._batch.slots_T.fill_(PADDING_SLOT)
        self._hidden_TD = None if hidden is None else hidden.new_zeros(num_tokens, hidden.shape[1])
        self._metadata = AttentionMetadata.of_batch(
            self._batch,
            torch.zeros(MAX_SEQUENCES, table_width, dtype=torch.int64, device=device),
            max_query_len=num_tokens,
            max_seq_len=table_width * block_size,
        )
        self._outputs: tuple[Tensor, ...] = ()
        self._replay = capture(self._run)

    @torch.inference_mode()
    def _run(self) -> None:
        attend = self._backend.prepare(self._metadata)
        batch = self._batch
        self._outputs = self._model(batch.tokens_T, batch.positions_T, attend, self._hidden_TD)

    @torch.inference_mode()
    def __call__(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        metadata: AttentionMetadata,
        hidden_TD: Tensor | None,
    ) -> tuple[Tensor, ...]:
        own, count = self._batch, tokens_T.shape[0]
        num_seqs, width = metadata.block_tables_BM.shape
        _put(own.tokens_T, tokens_T, 0)
        _put(own.positions_T, positions_T, 0)
        _put(own.slots_T, metadata.slots_T, PADDING_SLOT)
        _put(own.query_start_loc, metadata.query_start_loc, count)
        _put(own.seq_lens_B, metadata.seq_lens_B, 0)
        self._metadata.block_tables_BM[:num_seqs, :width].copy_(metadata.block_tables_BM)
        if self._hidden_TD is not None and hidden_TD is not None:
            self._hidden_TD[:count].copy_(hidden_TD)
        self._replay()
        return tuple(output[:count] for output in self._outputs)


def _put(buffer: Tensor, values: Tensor, rest: int) -> None:
    buffer[: values.shape[0]].copy_(values)
    buffer[values.shape[0] :].fill_(rest)
