"""CUDA graphs: decode steps, and passes over few tokens.

Graphs decode with one step in flight while the host reads the step before. The host knows each
sequence as it was before the step in flight, and reserves KV blocks for that step and the next. A
sequence that gets freed blocks writes them later on the same stream.

Prompts, and steps that decode graphs cannot run, have graphs of their own where they are short: the
GPU computes a few hundred tokens in less time than the host needs to launch the kernels one by one.

Shapes: B rows of a graph, K drafts, T tokens, D drafter width.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from operator import gt
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from peagle.attention import Passes
from peagle.config import EngineConfig, SpeculativeConfig
from peagle.engine.depth import DepthPolicy
from peagle.engine.features import FeatureRings
from peagle.engine.model_runner import ModelRunner
from peagle.engine.sampler import has_penalties
from peagle.engine.scheduler import Scheduler
from peagle.engine.sequence import Sequence
from peagle.engine.stats import StepTimes
from peagle.kernels.batches import PADDING_SLOT, PackedBatch, TargetBatch
from peagle.models.acceleration import accelerate_drafter, accelerate_target
from peagle.models.drafter import Drafter
from peagle.models.target import TargetModel
from peagle.speculation.proposers import HeadProposer

if TYPE_CHECKING:
    from peagle.engine.decode_step import DecodeStep

MAX_STOP_IDS = 8
# Steps of more sequences take long enough for the host to launch their kernels one by one.
MAX_GRAPH_ROWS = 256
# Passes over few tokens.
TOKEN_BUCKETS = (32, 128, 256, 512)
MAX_SEQUENCES = 16
_WARM_UPS = 2
_TIMED_STEPS = 4

# Makes a function that replays what another one launches on the device.
Capturer = Callable[[Callable[[], None]], Callable[[], None]]


def runs_as_graphs(
    device: torch.device,
    config: EngineConfig,
    speculative: SpeculativeConfig | None,
    drafter: Drafter | None,
) -> bool:
    """Return whether decode steps run as CUDA graphs: plain ones, and argmax drafts of a head."""
    can_draft = speculative is None or (
        drafter is not None and speculative.draft_sampling == "argmax"
    )
    return device.type == "cuda" and not config.enforce_eager and can_draft


def buckets(max_num_seqs: int) -> list[int]:
    """Return the numbers of rows that have graphs: powers of two, then steps of 8, then of 64."""
    most = min(max_num_seqs, MAX_GRAPH_ROWS)
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, MAX_GRAPH_ROWS, 64)]
    return [*(size for size in sizes if size < most), most]


def graph_sizes(
    max_num_seqs: int, possible: Callable[[int], Collection[int]]
) -> list[tuple[int, int]]:
    """Return (rows, K) of the graphs; `possible` is `DepthPolicy.possible`.

    Where K may be 0 for some number of sequences, a pause may make it 0 for every number.
    """
    found: list[tuple[int, int]] = []
    smaller = 0
    pause = {0} & set[int]().union(*map(possible, range(1, max_num_seqs + 1)))
    for size in buckets(max_num_seqs):
        depths = pause.union(*map(possible, range(smaller + 1, size + 1)))
        found += [(size, k) for k in sorted(depths)]
        smaller = size
    return found


def accelerate(
    target: TargetModel,
    drafter: Drafter | None,
    max_num_seqs: int,
    depth: DepthPolicy,
) -> None:
    """Fuse and compile the modules that the graphs run."""
    sizes = graph_sizes(max_num_seqs, depth.possible)
    accelerate_target(target, [rows * (k + 1) for rows, k in sizes])
    sizes = [(rows, k) for rows, k in sizes if k]
    if drafter is None or not sizes:
        return
    target_rows = [rows * (k + 1) for rows, k in sizes]
    all_drafts, single = [rows * k for rows, k in sizes], [rows for rows, _ in sizes]
    parallel = drafter.config.is_parallel
    accelerate_drafter(
        drafter,
        [2 * drafts for drafts in all_drafts] if parallel else [*target_rows, *single],
        num_feature_rows=target_rows,
        num_logit_rows=all_drafts if parallel else single,
    )


def make_graph_runner(
    runner: ModelRunner,
    proposer: HeadProposer | None,
    max_num_seqs: int,
    synthetic_rates: tuple[float, ...] | None,
    *,
    depth: DepthPolicy,
    features: FeatureRings,
    max_draft_len: int,
) -> GraphRunner:
    """Return the runner of decode steps for up to `max_num_seqs` sequences.

    On a GPU this makes all graphs, and gives `runner` and the proposer those of short passes.
    """
    from peagle.engine.decode_step import DecodeStep, StepBuffers, StepSizes

    target, max_model_len = runner.target, runner.max_model_len
    table_width = -(-max_model_len // runner.block_size)
    capture = make_capturer(target.device)

    def make_step(size: tuple[int, int], greedy: bool) -> DecodeStep:
        sizes = StepSizes(
            *size,
            table_width=table_width,
            num_stop_ids=MAX_STOP_IDS,
            block_size=runner.block_size,
            max_model_len=max_model_len,
            max_draft_len=max_draft_len,
            synthetic_rates=synthetic_rates,
        )
        return DecodeStep(
            target,
            proposer if sizes.num_drafts else None,
            StepBuffers(sizes, target.device),
            greedy=greedy,
            kept_SCA=None if sizes.num_drafts else features.rows_SCA,
        )

    graphs = GraphRunner(
        make_step,
        max_num_seqs,
        target.vocab_size,
        depth,
        capture,
        None if features.rows_SCA is None else features,
    )
    if target.device.type == "cuda":
        graphs.capture_all()
        sizes = capture, table_width, runner.block_size, target.device
        runner.passes.graphs = PassGraphs(runner.passes, *sizes)
        if proposer is not None:
            hidden_1D = proposer.drafter.norm.weight.unsqueeze(0)
            for passes in (proposer.passes, proposer.readings):
                passes.graphs = PassGraphs(passes, *sizes, hidden_1D)
    return graphs


@dataclass(frozen=True, slots=True)
class RowReport:
    """What a step did for one sequence.

    Attributes:
        num_drafted, num_accepted: drafts that were verified, and those accepted.
        new_token_ids: the accepted drafts and the target's own token, before stop conditions.
        drafts: drafts for the next step.
    """

    num_drafted: int
    num_accepted: int
    new_token_ids: list[int]
    drafts: list[int]


def read_report(row: list[int], num_drafts: int) -> RowReport:
    """Read a row of `StepBuffers.report_RX` on the host; K is `num_drafts`."""
    num_drafted, num_accepted, num_next = row[:3]
    emitted, drafts = row[3 : 4 + num_drafts], row[4 + num_drafts :]
    return RowReport(num_drafted, num_accepted, emitted[: num_accepted + 1], drafts[:num_next])


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that was launched.

    Attributes:
        sequences: the sequences of its rows.
        report_RX: the report, on the host once `done` has happened.
        done: None on a CPU, where the report is there at once.
    """

    sequences: SequenceOf[Sequence]
    report_RX: Tensor
    done: torch.cuda.Event | None


class _Graph:
    """One captured step. On a CPU, for tests, it runs without capture."""

    def __init__(self, step: DecodeStep, capture: Capturer) -> None:
        self._step = step  # owns the tensors in which the graph works
        self.buffers = step.buffers
        self.size = step.buffers.sizes.num_seqs, step.buffers.sizes.num_drafts
        self._is_cuda = self.buffers.active_B.is_cuda
        self._run = capture(step.run)
        shape = self.buffers.report_RX.shape
        self._reports = [
            torch.empty(shape, dtype=torch.int64, pin_memory=self._is_cuda) for _ in range(2)
        ]

    def launch(self, sequences: SequenceOf[Sequence]) -> Flight:
        self._run()
        report_RX = self._reports[0]
        self._reports.reverse()
        report_RX.copy_(self.buffers.report_RX, non_blocking=True)
        if not self._is_cuda:
            return Flight(sequences, report_RX, None)
        done = torch.cuda.Event()
        done.record()
        return Flight(sequences, report_RX, done)


class GraphRunner:
    """Launches decode steps and reads their results.

    Args:
        make_step: makes the step of (rows, K), greedy or not.
        depth: K of each step.
        capture: makes the graphs; no sequence is active, so that no KV is written.
        features: takes the features of steps without drafts, where drafting may pause.

    Attributes:
        times: device times of the steps, by the rows of the graph.
        step_s: seconds on the device of the step that was read last; None where nothing stamps it.
    """

    def __init__(
        self,
        make_step: Callable[[tuple[int, int], bool], DecodeStep],
        max_num_seqs: int,
        vocab_size: int,
        depth: DepthPolicy,
        capture: Capturer,
        features: FeatureRings | None = None,
    ) -> None:
        self._make_step = make_step
        self._sizes = graph_sizes(max_num_seqs, depth.possible)
        self._buckets = buckets(max_num_seqs)
        self._vocab_size = vocab_size
        self._depth = depth
        self._capture = capture
        self._features = features
        self._graphs: dict[tuple[tuple[int, int], bool], _Graph] = {}
        self._sequences: list[Sequence] = []
        self._num_blocks: list[int] = []  # blocks of each sequence that the device knows
        self._graph: _Graph | None = None
        self._has_warned = False
        self.times: dict[int, StepTimes] = {}
        self.step_s: float | None = None

    def capture_all(self) -> None:
        """Make all graphs now, the largest first: the others then fit into its memory."""
        for size in reversed(self._sizes):
            for greedy in (True, False):
                self._graph_of(size, greedy)

    def time_step(self, rows: int, num_drafts: int) -> float:
        """Return the seconds of a greedy step of (rows, K) on the device: the fastest of a few.

        No sequence is active, so that no KV is written.
        """
        graph = self._graph_of((rows, num_drafts), greedy=True)
        seconds: list[float] = []
        for _ in range(_TIMED_STEPS):
            flight = graph.launch(())
            assert flight.done is not None, "a GPU alone stamps its steps"
            self.read(flight)
            assert self.step_s is not None
            seconds.append(self.step_s)
        self.times.clear()
        return min(seconds)

    @property
    def num_drafts(self) -> int:
        """K of the steps that were started last."""
        assert self._graph is not None, "nothing was started"
        return self._graph.size[1]

    def obstacle(self, sequences: SequenceOf[Sequence]) -> str | None:
        """Return why no graph can run these sequences; None: one can.

        It is the name of a rule that only the sampler applies, "too_many_sequences", or
        "missed_features" where the head reads features first that it has missed.
        """
        most = self._buckets[-1]
        if len(sequences) > most:
            if not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    f"{len(sequences)} sequences decode together; the largest CUDA graph has "
                    f"{most} rows. Such steps run without a graph; to avoid them, set max_num_seqs "
                    f"to {most}.",
                    stacklevel=2,
                )
            return "too_many_sequences"
        keeps_features = self._features is not None and not self._depth(len(sequences))
        if not keeps_features and any(s.pending_features is not None for s in sequences):
            return "missed_features"
        return next(filter(None, map(_rule_of_sampler, sequences)), None)

    def is_tight(self, num_sequences: int) -> bool:
        """Return whether the running graph is the one for so many sequences."""
        assert self._graph is not None, "nothing was started"
        return self._size(num_sequences) == self._graph.size

    def _size(self, num_sequences: int) -> tuple[int, int]:
        rows = next(size for size in self._buckets if size >= num_sequences)
        return rows, self._depth(num_sequences)

    def start(self, sequences: SequenceOf[Sequence]) -> Flight:
        """Upload the sequences' state from the host and launch a step."""
        greedy = all(s.params.is_greedy for s in sequences)
        self._graph = self._graph_of(self._size(len(sequences)), greedy)
        if self._features is not None and not self._graph.size[1]:
            for sequence in sequences:
                if sequence.num_speculative_tokens and sequence.pending_features is None:
                    ring = self._features.open(sequence.seq_id, sequence.num_computed_tokens)
                    sequence.pending_features = ring
        self._sequences = list(sequences)
        self._num_blocks = [len(s.block_table) for s in sequences]
        self._graph.buffers.upload(sequences, self._vocab_size)
        return self._graph.launch(sequences)

    def go_on(self) -> Flight:
        """Launch the next step of the same sequences, whose blocks may have grown.

        Sequences that ended on the device do nothing in it.
        """
        assert self._graph is not None, "nothing was started"
        num_blocks = [len(s.block_table) for s in self._sequences]
        if any(map(gt, num_blocks, self._num_blocks)):
            self._num_blocks = num_blocks
            self._graph.buffers.upload_tables(self._sequences)
        return self._graph.launch(self._sequences)

    def read(self, flight: Flight) -> list[RowReport]:
        """Wait for a step and return its report, a row a sequence."""
        if flight.done is not None:
            flight.done.synchronize()
        *rows, times = flight.report_RX.tolist()
        if flight.done is not None:
            self.step_s = self.times.setdefault(len(rows), StepTimes()).add(times)
        num_drafts = flight.report_RX.shape[1] // 2 - 2
        return [read_report(row, num_drafts) for row in rows[: len(flight.sequences)]]

    def _graph_of(self, size: tuple[int, int], greedy: bool) -> _Graph:
        if (size, greedy) not in self._graphs:
            self._graphs[size, greedy] = _Graph(self._make_step(size, greedy), self._capture)
        return self._graphs[size, greedy]


def _rule_of_sampler(sequence: Sequence) -> str | None:
    """Return the first rule of a request that only the sampler applies."""
    params = sequence.params
    rules = {
        "typical_p": params.typical_p < 1,
        "penalties": has_penalties(sequence),
        "logit_bias": params.logit_bias,
        "bad_words": params.bad_words,
        "allowed_token_ids": params.allowed_token_ids is not None,
        "logprobs": params.logprobs is not None,
        "grammar": sequence.grammar is not None,
        "drawn_drafts": sequence.draft_probs_KV is not None,
        "stop_token_ids": len(sequence.stop_token_ids) > MAX_STOP_IDS,
        # Until then the sampler forbids the stop ids.
        "min_tokens": sequence.num_output_tokens < params.min_tokens,
    }
    return next((name for name, applies in rules.items() if applies), None)


class Pipeline:
    """Decides when a step may be launched before the last one is read.

    Args:
        take: called with each sequence and what a step did for it.
    """

    def __init__(
        self,
        runner: GraphRunner,
        scheduler: Scheduler,
        take: Callable[[Sequence, RowReport], None],
    ) -> None:
        self.runner = runner
        self._scheduler = scheduler
        self._take = take
        self._flight: Flight | None = None
        self._version = -1

    def start(self, sequences: SequenceOf[Sequence]) -> None:
        """Launch a step of these sequences."""
        assert self._flight is None, "a step is in flight"
        self._flight = self.runner.start(list(sequences))
        # Sequences whose prompts still run join as soon as they can.
        alone = len(sequences) == len(self._scheduler.running)
        self._version = self._scheduler.version if alone else -1

    def go_on(self) -> bool:
        """Launch the next step, then take the results of the last; return false if that cannot be.

        It cannot where a sequence came, was stopped or changed, where K changes, or where blocks
        run out. The device knows the sequences that ended by themselves: the others go on, unless a
        waiting sequence can take the place or a smaller graph would do.
        """
        flight = self._flight
        if flight is None or self._version != self._scheduler.version:
            return False
        unfinished = [s for s in flight.sequences if not s.is_finished]
        if not self.runner.is_tight(len(unfinished)) or not self._scheduler.reserve(unfinished):
            return False
        self._flight = self.runner.go_on()
        self._read(flight)
        return True

    def drain(self) -> None:
        """Take the results of the step in flight, if there is one."""
        flight, self._flight = self._flight, None
        if flight is not None:
            self._read(flight)

    def _read(self, flight: Flight) -> None:
        num_ended = num_left = 0
        for sequence, report in zip(flight.sequences, self.runner.read(flight), strict=True):
            if not sequence.is_finished:
                self._take(sequence, report)
                num_ended += sequence.is_finished
                num_left += not sequence.is_finished
        can_stay = num_left and not self._scheduler.waiting and self.runner.is_tight(num_left)
        if can_stay:
            self._version += num_ended  # each end counts as a change


class _Capture:
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
    """Return what captures graphs on a GPU; on a CPU, for tests, functions replay themselves."""
    return _Capture() if device.type == "cuda" else lambda run: run


class PassGraphs:
    """Runs passes over inputs that it copies into fixed buffers, a graph a number of rows.

    The next graph that runs, of this or of a decode step, overwrites the outputs.

    Args:
        passes: the model, with an attention backend that reads nothing on the host.
        capture: makes the graphs; capturing writes no KV.
        table_width: blocks of the longest sequence.
        hidden_1D: a tensor with the type and width of the hidden states that the model reads; None
            for a model that reads none.
    """

    def __init__(
        self,
        passes: Passes,
        capture: Capturer,
        table_width: int,
        block_size: int,
        device: torch.device,
        hidden_1D: Tensor | None = None,
    ) -> None:
        launched = Passes(passes.run, passes.backend)
        self._passes = [
            _Pass(launched, capture, size, table_width, block_size, device, hidden_1D)
            for size in reversed(TOKEN_BUCKETS)
        ][::-1]

    def __call__(
        self, batch: PackedBatch, block_tables_BM: Tensor, hidden_RD: Tensor | None
    ) -> tuple[Tensor, ...] | None:
        """Return the model's outputs; None where no graph fits the pass."""
        if batch.seq_lens_B.shape[0] > MAX_SEQUENCES:
            return None
        for fitting in self._passes:
            if fitting.num_rows >= batch.tokens_R.shape[0]:
                return fitting(batch, block_tables_BM, hidden_RD)
        return None


class _Pass:
    """The graph of one number of rows; the last ones may be padding."""

    def __init__(
        self,
        passes: Passes,
        capture: Capturer,
        num_rows: int,
        table_width: int,
        block_size: int,
        device: torch.device,
        hidden_1D: Tensor | None,
    ) -> None:
        self.num_rows = num_rows
        self._passes = passes
        self._batch = TargetBatch.allocate(MAX_SEQUENCES, num_rows, device)
        self._batch.slots_R.fill_(PADDING_SLOT)
        self._tables_BM = torch.zeros(MAX_SEQUENCES, table_width, dtype=torch.int64, device=device)
        self._max_seq_len = table_width * block_size
        self._hidden_RD = None
        if hidden_1D is not None:
            self._hidden_RD = hidden_1D.new_zeros(num_rows, hidden_1D.shape[1])
        self._outputs: tuple[Tensor, ...] = ()
        self._replay = capture(self._run)

    @torch.inference_mode()
    def _run(self) -> None:
        self._outputs = self._passes(
            self._batch,
            self._tables_BM,
            self._hidden_RD,
            max_query_len=self.num_rows,
            max_seq_len=self._max_seq_len,
        )

    @torch.inference_mode()
    def __call__(
        self, batch: PackedBatch, block_tables_BM: Tensor, hidden_RD: Tensor | None
    ) -> tuple[Tensor, ...]:
        own, count = self._batch, batch.tokens_R.shape[0]
        num_seqs, width = block_tables_BM.shape
        for buffer, values, padding in (
            (own.tokens_R, batch.tokens_R, 0),
            (own.positions_R, batch.positions_R, 0),
            (own.slots_R, batch.slots_R, PADDING_SLOT),
            (own.query_start_loc, batch.query_start_loc, count),
            (own.seq_lens_B, batch.seq_lens_B, 0),
        ):
            buffer[: values.shape[0]].copy_(values)
            buffer[values.shape[0] :].fill_(padding)
        self._tables_BM[:num_seqs, :width].copy_(block_tables_BM)
        if self._hidden_RD is not None and hidden_RD is not None:
            self._hidden_RD[:count].copy_(hidden_RD)
        self._replay()
        return tuple(output[:count] for output in self._outputs)
