"""Decode steps as CUDA graphs: the rows of sequences, launches, results.

Sequences join and leave between two steps without a wait: the host writes their rows on the stream
of the steps. A sequence that gets freed blocks writes them later on the same stream.

Shapes: B rows of a graph, K drafts, J = K + 1.
"""

from __future__ import annotations

import random
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from functools import partial
from operator import mul
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from peagle.config import CandidateTrees, EngineConfig, SamplingParams, SpeculativeConfig
from peagle.engine.depth import DecodeSeconds, DepthPolicy
from peagle.engine.features import FeatureRings
from peagle.engine.model_runner import ModelRunner, RunTarget
from peagle.engine.sequence import Sequence, SequenceStatus
from peagle.engine.stats import GraphTimes
from peagle.engine.step.capture import Capturer, make_capturer
from peagle.engine.step.mixed_pass import MixedPass
from peagle.engine.step.pass_graphs import MAX_SEQUENCES, PassGraphs
from peagle.kernels.drafts.batches import count_draft_slots
from peagle.kernels.drafts.step_state import NO_TOKEN, Stamp
from peagle.kernels.sampling.logprobs import TokenLogprobs
from peagle.kernels.trees.survival import SCORE_UNIT
from peagle.models.acceleration import MAX_FIXED_ROWS, accelerate_drafter, accelerate_target
from peagle.models.drafter import Drafter
from peagle.models.target import TargetModel
from peagle.speculation.proposers import HeadProposer

if TYPE_CHECKING:
    from peagle.engine.step.decode_step import DecodeBuffers, DecodeStep
    from peagle.engine.step.rules import DecodeRules, PendingLogprobs

MAX_STOP_IDS = 8
# Steps of more sequences take long enough for the host to launch their kernels one by one.
MAX_GRAPH_ROWS = 256
# Rows of the passes over a step and prompts, all of which are graphs. The saved read of the weights
# would be a small part of a larger pass.
_MIXED_BUCKETS = (128, 256, 384, 512, 640)
# Sequences with longer contexts decode in a pass of their own, whose attention splits contexts.
_MAX_MIXED_CONTEXT = 4096
_TIMED_STEPS = 4
# Scores and worths of nodes, the first of these among the fields of `RowDrafts`.
_FIRST_IN_UNITS = 2


def runs_as_graphs(device: torch.device, config: EngineConfig) -> bool:
    """Return whether decode steps run as CUDA graphs."""
    return device.type == "cuda" and not config.enforce_eager


def buckets(max_num_seqs: int) -> list[int]:
    """Return the numbers of rows that have graphs: powers of two, then steps of 8, then of 64."""
    most = min(max_num_seqs, MAX_GRAPH_ROWS)
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, MAX_GRAPH_ROWS, 64)]
    return [*(size for size in sizes if size < most), most]


def mixed_buckets(target: TargetModel) -> tuple[int, ...]:
    """Return the numbers of rows for which a pass over a step and prompts has a graph.

    Weights of 4 or 8 bits are used directly for few rows, and unpacked first for many: there a step
    and short prompts are faster apart.
    """
    return _MIXED_BUCKETS if target.quantization is None else ()


def graph_sizes(
    max_num_seqs: int, possible: Callable[[int], Collection[int]]
) -> list[tuple[int, int]]:
    """Return (rows, K) of the graphs; `possible` is `DepthPolicy.possible`.

    For trees K is the number of nodes for each row, which the rows of a graph share. If K may be 0
    for some number of sequences, a pause may make it 0 for every number.
    """
    found: list[tuple[int, int]] = []
    smaller = 0
    pause = {0} & set[int]().union(*map(possible, range(1, max_num_seqs + 1)))
    for size in buckets(max_num_seqs):
        depths = pause.union(*map(possible, range(smaller + 1, size + 1)))
        found += [(size, k) for k in sorted(depths)]
        smaller = size
    return found


def greatest_depths(sizes: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Return the greatest K of each number of rows, from pairs (rows, K)."""
    greatest: dict[int, int] = {}
    for rows, k in sizes:
        greatest[rows] = max(k, greatest.get(rows, 0))
    return greatest


def count_target_rows(sizes: Iterable[tuple[int, int]]) -> dict[tuple[int, int], int]:
    """Return T of each (rows, K): rows * (K + 1), or a little more.

    Each T of up to MAX_FIXED_ROWS is compiled for, which takes seconds. So if several K may run at
    the same rows, only the greatest has a T of its own. The others are padded to one of those, or
    to a power of two.
    """
    sizes = set(sizes)
    greatest = greatest_depths(sizes)
    own = {rows * (k + 1) for rows, k in greatest.items()}
    powers = {1 << i for i in range(MAX_FIXED_ROWS.bit_length())}
    counts: dict[tuple[int, int], int] = {}
    for rows, k in sizes:
        least = rows * (k + 1)
        is_padded = k < greatest[rows] and least <= MAX_FIXED_ROWS
        counts[rows, k] = min(n for n in own | powers if n >= least) if is_padded else least
    return counts


def accelerate(
    target: TargetModel,
    drafter: Drafter | None,
    max_num_seqs: int,
    depth: DepthPolicy,
    trees: CandidateTrees | None,
    max_path: int | None,
) -> None:
    """Fuse and compile the modules that the graphs run.

    Args:
        max_path: most nodes on a path of a tree; None for chains.
    """
    num_rows = count_target_rows(graph_sizes(max_num_seqs, depth.possible))
    accelerate_target(target, set(num_rows.values()))
    # A head is small: it is compiled only for the greatest K at the same rows.
    sizes = [(rows, k) for rows, k in greatest_depths(num_rows).items() if k]
    if drafter is None or not sizes:
        return
    verified = [num_rows[size] for size in sizes]
    single = [rows for rows, _ in sizes]
    depths = [trees.depth(k) if trees else k for _, k in sizes]
    all_drafts = list(map(mul, single, depths))
    parallel = drafter.config.is_parallel
    slots = [
        count_draft_slots(rows, num_read, max_path or k, k - 1 if parallel else 0)
        for rows, num_read, k in zip(single, verified, depths, strict=True)
    ]
    beams = [rows * trees.num_parallel_trees for rows in single] if trees else single
    accelerate_drafter(
        drafter,
        slots if parallel else [*slots, *beams],
        num_feature_rows=verified,
        num_logit_rows=all_drafts if parallel else {*single, *beams},
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
    speculative: SpeculativeConfig | None,
) -> GraphRunner:
    """Return the runner of decode steps for up to `max_num_seqs` sequences.

    On a GPU this makes all graphs, and gives `runner` and the proposer the graphs of short passes.
    """
    from peagle.engine.step.decode_step import BufferSizes, DecodeBuffers, DecodeStep
    from peagle.engine.step.drawn_drafts import DrawnDrafts
    from peagle.engine.step.lookup import LookupSizes
    from peagle.engine.step.rules import DecodeRules

    target, max_model_len, lookup = runner.target, runner.max_model_len, None
    if speculative is not None and speculative.method == "ngram":
        lookup = LookupSizes(speculative.k, *speculative.lookup_lengths)
    trees = None if proposer is None else proposer.trees
    table_width = -(-max_model_len // runner.block_size)
    capture = make_capturer(target.device)
    num_rows = count_target_rows(graph_sizes(max_num_seqs, depth.possible))
    sizes = BufferSizes(
        buckets(max_num_seqs)[-1],
        max(num_rows.values()),
        table_width=table_width,
        num_stop_ids=MAX_STOP_IDS,
        block_size=runner.block_size,
        max_model_len=max_model_len,
        max_draft_len=max_model_len if lookup else max_draft_len,
        synthetic_rates=synthetic_rates,
        trees=trees,
        has_copies=proposer is not None and proposer.lookup_lengths is not None,
        lookup=lookup,
    )
    drawn, max_drafts = None, max(k for _, k in num_rows)
    if proposer is not None and proposer.draws:
        drawn = DrawnDrafts(proposer.drafter, sizes.num_seqs, sizes.num_drawn(max_drafts))
    buffers = DecodeBuffers(sizes, target.device, drawn)

    def make_step(num_seqs: int, k: int) -> DecodeStep:
        return DecodeStep(
            target,
            proposer if k else None,
            buffers,
            num_seqs,
            k,
            num_rows.get((num_seqs, k), num_seqs * (k + 1)),
            kept_SCA=None if k else features.rows_SCA,
        )

    mixed_pass = None
    if mixed_buckets(target):
        mixed_pass = MixedPass(runner.passes, has_trees=trees is not None)
    graphs = GraphRunner(
        buffers,
        make_step,
        max_num_seqs,
        target.vocab_size,
        depth,
        capture,
        DecodeRules(runner.sampler.slots, target.vocab_size, target.device),
        None if features.rows_SCA is None else features,
        mixed_pass,
    )
    if target.device.type == "cuda":
        graphs.capture_all()
        graphs.warm_up_rules(runner.sampler.release)
        shape = capture, table_width, runner.block_size, target.device
        runner.passes.graphs = PassGraphs(runner.passes, *shape)
        if mixed_pass is not None:
            mixed_pass.passes.graphs = PassGraphs(
                mixed_pass.passes,
                *shape,
                token_buckets=mixed_buckets(target),
                max_sequences=sizes.num_seqs + 1 + MAX_SEQUENCES,
                always_pays=True,
                has_trees=trees is not None,
            )
        if proposer is not None:
            weight_D, width = proposer.drafter.norm.weight, proposer.drafter.config.feature_size
            for passes, row in (
                (proposer.passes, weight_D.unsqueeze(0)),
                (proposer.readings, weight_D.new_zeros(1, width)),
            ):
                passes.graphs = PassGraphs(passes, *shape, row, has_starts=True)
    return graphs


class RowTokens(NamedTuple):
    """The tokens that a step verified of one sequence.

    Attributes:
        num_drafted, num_accepted: number of verified and of accepted drafts.
        new_token_ids: the accepted drafts and the target's own token, before stop conditions.
        logprobs: log-probabilities of the new tokens, if requested.
    """

    num_drafted: int
    num_accepted: int
    new_token_ids: list[int]
    logprobs: SequenceOf[TokenLogprobs] = ()


class RowDrafts(NamedTuple):
    """The drafts that a step made for one sequence.

    Attributes:
        token_ids: drafts for the next step.
        parents, scores: row of each draft's parent in a tree, and its score; None for a chain.
        worths, cells: worth and cell of each node; None where trees have no copies.
    """

    token_ids: list[int]
    parents: list[int] | None = None
    scores: list[float] | None = None
    worths: list[float] | None = None
    cells: list[int] | None = None


def read_tokens(rows_BX: np.ndarray, max_accepted: int) -> list[RowTokens]:
    """Read the tokens of each sequence in `DecodeStep.report_RX` on the host.

    Args:
        rows_BX: the report without the row of times.
        max_accepted: most drafts that a step accepts of a sequence.
    """
    counts, tokens = rows_BX[:, :2].tolist(), rows_BX[:, 3 : 4 + max_accepted].tolist()
    return [
        RowTokens(num_drafted, num_accepted, new[: num_accepted + 1])
        for (num_drafted, num_accepted), new in zip(counts, tokens, strict=True)
    ]


def read_drafts(rows_BX: np.ndarray, max_accepted: int, max_drafts: int) -> list[RowDrafts]:
    """Read the drafts of each sequence in `DecodeStep.report_RX` on the host.

    Args:
        rows_BX, max_accepted: as `read_tokens` takes them.
        max_drafts: most drafts of a sequence.
    """
    counts = rows_BX[:, 2].tolist()
    if not any(counts):
        return [RowDrafts([]) for _ in counts]
    following_BX = rows_BX[:, 4 + max_accepted :]
    fields = following_BX.shape[1] // max_drafts
    columns = [following_BX[:, at * max_drafts : (at + 1) * max_drafts] for at in range(fields)]
    for at in range(_FIRST_IN_UNITS, min(fields, _FIRST_IN_UNITS + 2)):
        columns[at] = columns[at] * SCORE_UNIT
    every = zip(counts, *(column.tolist() for column in columns), strict=True)
    return [
        RowDrafts(*[of_row[:count] for of_row in row]) if count else RowDrafts([])
        for count, *row in every
    ]


@dataclass(frozen=True, slots=True)
class Report:
    """A report of a step, on its way to the host.

    Attributes:
        rows_RX: the report, on the host once `done` has happened.
        done: event of the copy; None on a CPU, where the report exists at once.
    """

    rows_RX: Tensor
    done: torch.cuda.Event | None

    def read(self) -> np.ndarray:
        """Wait for the report; return its rows, of which the last has the times."""
        if self.done is not None:
            self.done.synchronize()
        return self.rows_RX.numpy()


@dataclass(frozen=True, slots=True)
class Flight:
    """A decode step that the host has launched, and its reports.

    Attributes:
        k: K; for trees the nodes for each row.
        sequences: the sequence of each row; None for an empty row.
        max_accepted, max_drafts: as `DecodeStep`, for the reading of the reports.
        tokens: report of the verified tokens, before the step drafts.
        drafts: the same with the drafts for the next step; that report itself without any.
        logprobs: log-probabilities, on the host with the tokens; None if no request wants any.
        has_prompts: whether the target's pass computed prompts too, which its time includes.
    """

    k: int
    sequences: SequenceOf[Sequence | None]
    max_accepted: int
    max_drafts: int
    tokens: Report
    drafts: Report
    logprobs: PendingLogprobs | None
    has_prompts: bool = False


class _Graph:
    """The captured parts of one step. On a CPU, for tests, they run without capture.

    Where drawn chains may lead trees, all parts behind the target's pass have a graph for steps in
    which a sequence draws, and one for the others, which then do nothing for chains: at most twice
    the graphs. They share their memory.
    """

    def __init__(self, step: DecodeStep, capture: Capturer) -> None:
        self._step = step  # owns the tensors in which the graphs work
        self.num_rows = step.batch.tokens_R.shape[0]
        self._run_target = capture(step.run_target)
        self._always_draws = step.may_draw and step.trees is None
        variants = [(False, True)] if step.may_draw else []  # greedy or not, draws or not
        if not self._always_draws:
            variants += [(True, False), (False, False)]
        self._find_own_tokens = {
            (greedy, draws): capture(partial(step.find_own_tokens, greedy=greedy, draws=draws))
            for greedy, draws in variants
        }
        each = sorted({draws for _, draws in variants})
        self._verify = {draws: capture(partial(step.verify, draws=draws)) for draws in each}
        self._draft = None
        if step.k or step.lookup:
            self._draft = {draws: capture(partial(step.draft, draws=draws)) for draws in each}
        shape, self._is_cuda = step.report_RX.shape, step.report_RX.is_cuda
        # Two reports of the step in flight, and two of the step that the host reads.
        self._reports = deque(
            torch.empty(shape, dtype=torch.int64, pin_memory=self._is_cuda) for _ in range(4)
        )

    def launch(
        self,
        sequences: SequenceOf[Sequence | None],
        rules: DecodeRules,
        meanwhile: Callable[[], None] | None,
        run_mixed: Callable[[DecodeStep], None] | None,
        before_drafts: Callable[[], None] | None,
    ) -> Flight:
        """Launch the step; the arguments are those of `GraphRunner.launch`."""
        if run_mixed is None:
            self._run_target()
        else:
            run_mixed(self._step)
        if meanwhile is not None:
            meanwhile()
            sequences = self._without_waiting(sequences)
        draws = self._always_draws or any(s.draws_chain for s in sequences if s is not None)
        draws = draws and self._step.may_draw
        greedy = not draws and all(s.params.is_greedy for s in sequences if s is not None)
        if rules.is_needed:
            self._step.find_own_tokens(greedy=greedy, draws=draws, rules=rules)
        else:
            self._find_own_tokens[greedy, draws]()
        self._verify[draws]()
        logprobs = self._step.logprobs(rules) if rules.is_needed else None
        tokens = drafts = self._report()
        if before_drafts is not None:
            before_drafts()
        if self._draft is not None:
            self._draft[draws]()
            drafts = self._report()
        step = self._step
        return Flight(
            step.k,
            sequences,
            step.max_accepted,
            step.max_drafts,
            tokens,
            drafts,
            logprobs,
            has_prompts=run_mixed is not None,
        )

    def _report(self) -> Report:
        """Send the step's report to the host."""
        self._reports.rotate()
        rows_RX = self._reports[0]
        rows_RX.copy_(self._step.report_RX, non_blocking=True)
        done = None
        if self._is_cuda:
            done = torch.cuda.Event()
            done.record()
        return Report(rows_RX, done)

    def _without_waiting(self, sequences: SequenceOf[Sequence | None]) -> list[Sequence | None]:
        """Let sequences whose grammars are not ready sit this step out; return the others."""
        waiting = {
            row: s
            for row, s in enumerate(sequences)
            if s is not None and s.waits_for_grammar and not s.is_finished
        }
        if waiting:
            self._step.sit_out(list(waiting))
            for sequence in waiting.values():
                sequence.drafts = []
        return [None if row in waiting else s for row, s in enumerate(sequences)]


class GraphRunner:
    """Launches decode steps and reads their results.

    Args:
        buffers: state of the sequences.
        make_step: makes the step of (rows, K).
        depth: K of each step.
        capture: makes the graphs; no sequence is active, so that no KV is written.
        rules: rules of requests beyond temperature, top-k, top-p and min-p.
        features: takes the features of steps without drafts, if drafting may pause.
        mixed_pass: runs the target over a step and prompts; None if prompts run apart.

    Attributes:
        times: device times of the steps without prompts, by the rows of the graph.
        last_k: K of the step whose tokens were read last.
        last_seconds: duration of the step whose drafts were read last.
    """

    def __init__(
        self,
        buffers: DecodeBuffers,
        make_step: Callable[[int, int], DecodeStep],
        max_num_seqs: int,
        vocab_size: int,
        depth: DepthPolicy,
        capture: Capturer,
        rules: DecodeRules,
        features: FeatureRings | None,
        mixed_pass: MixedPass | None,
    ) -> None:
        self._mixed_pass = mixed_pass
        self._buffers = buffers
        self._make_step = make_step
        self._sizes = graph_sizes(max_num_seqs, depth.possible)
        self._buckets = buckets(max_num_seqs)
        self._vocab_size = vocab_size
        self._depth = depth
        self._capture = capture
        self._rules = rules
        self._features = features
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._size = 0, 0  # rows and K of the step launched last
        self._sequences: list[Sequence | None] = [None] * self._buckets[-1]
        self._num_blocks = [0] * self._buckets[-1]  # blocks of each row that the device knows
        self._has_warned = False
        self.times: dict[int, GraphTimes] = {}
        self.last_k = 0
        self.last_seconds = DecodeSeconds()
        self._last_end_ns = 0  # end of the step that was read last

    @property
    def draws(self) -> bool:
        """Return whether drafts of some sequences are drawn from the head's distribution."""
        return self._buffers.drawn is not None and any(
            self._buffers.trees is None or sequence.draws_chain
            for sequence in self._sequences
            if sequence is not None
        )

    def capture_all(self) -> None:
        """Make all graphs now, the largest first: the others then fit into its memory."""
        for size in reversed(self._sizes):
            self._graph_of(size)

    def time_step(self, num_rows: int, k: int) -> float:
        """Return the seconds of a greedy step of (rows, K) on the device, the fastest of a few."""
        params, seconds = SamplingParams(max_tokens=1 << 20), list[float]()
        for _ in self._make_up(num_rows, k, params, _TIMED_STEPS):
            device_s = self.last_seconds.device
            assert device_s is not None, "a GPU alone stamps its steps"
            seconds.append(device_s)
        return min(seconds)

    def warm_up_rules(self, release: Callable[[Sequence], None]) -> None:
        """Compile the kernels of rules and log-probabilities, before a request waits for them.

        Args:
            release: releases a sequence in the sampler.
        """
        penalised = SamplingParams(
            max_tokens=1 << 20, temperature=1.0, frequency_penalty=0.1, typical_p=0.9, logprobs=1
        )
        # Logits are float32 after masks, and otherwise have the type of the target.
        for params in (penalised, replace(penalised, logit_bias={0: 0.1})):
            for rows, most in greatest_depths(self._sizes).items():
                for sequences in self._make_up(rows, most, params, 1):
                    for sequence in sequences:
                        release(sequence)

    def _make_up(
        self, num_rows: int, k: int, params: SamplingParams, num_steps: int
    ) -> Iterator[list[Sequence]]:
        """Run steps of made-up sequences; yield these after each step.

        Their tokens are random, so that a mixture reads about as many experts as for real ones.
        They overwrite KV block 0, so this must run before requests come.
        """
        dice, sequences = random.Random(0), list[Sequence]()
        for row in range(num_rows):
            token, *drafts = (dice.randrange(self._vocab_size) for _ in range(k + 1))
            made_up = Sequence(row, [token], params, row, frozenset())
            made_up.num_speculative_tokens = self._buffers.sizes.depth(k)
            made_up.drafts = drafts
            if self._buffers.trees is not None:
                made_up.draft_parents = [0] * k
                made_up.draws_chain = self._buffers.drawn is not None and not params.is_greedy
            sequences.append(made_up)
        self._size = num_rows, k
        self._buffers.switch(k)
        self._seat(sequences, num_rows)
        self._rules.set_rows(sequences, self._buffers.sizes.max_drafts(k))
        for _ in range(num_steps):
            flight = self.go_on()
            self.read(flight)
            self.read_drafts(flight)
            yield sequences
        self.clear()
        self.times.clear()

    def obstacle(self, sequences: SequenceOf[Sequence]) -> str | None:
        """Return the reason why no graph can run these sequences; None if one can.

        It is "too_many_sequences", "stop_token_ids" for a request with more than MAX_STOP_IDS, or
        "missed_features" until the head has caught up, or "kept_k" for one with a greater fixed K.
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
        k = self._depth(len(sequences))
        if any(s.fixes_k and s.num_speculative_tokens > k for s in sequences):
            return "kept_k"
        has_many = any(len(s.stop_token_ids) > MAX_STOP_IDS for s in sequences)
        return "stop_token_ids" if has_many else None

    def can_mix(self, sequences: SequenceOf[Sequence], num_prompt_tokens: int) -> bool:
        """Return whether the target's pass of a step of these sequences may compute prompts too."""
        if self._mixed_pass is None or not sequences:
            return False
        if self.obstacle(sequences) is not None or self.needs_results(sequences):
            return False
        num_rows = self._graph_of(self._size_for(len(sequences))).num_rows
        is_small = num_rows + num_prompt_tokens <= _MIXED_BUCKETS[-1]
        return is_small and all(len(sequence) <= _MAX_MIXED_CONTEXT for sequence in sequences)

    def is_tight(self, num_sequences: int) -> bool:
        """Return whether the step launched last has the size for so many sequences."""
        return self._size_for(num_sequences) == self._size

    def _size_for(self, num_sequences: int) -> tuple[int, int]:
        return self._rows_for(num_sequences), self._depth.captured(num_sequences)

    def _rows_for(self, num_sequences: int) -> int:
        return next(size for size in self._buckets if size >= num_sequences)

    def needs_results(self, sequences: SequenceOf[Sequence]) -> bool:
        """Return whether the host must read the step in flight before it launches one of these.

        It must when drafting stops: rings of features begin at the sequences' present positions.
        """
        k = self._size_for(len(sequences))[1]
        return self._features is not None and self._size[1] > 0 == k

    def launch(
        self,
        sequences: SequenceOf[Sequence],
        meanwhile: Callable[[], None] | None = None,
        run_prompts: Callable[[RunTarget], None] | None = None,
        before_drafts: Callable[[], None] | None = None,
    ) -> Flight:
        """Launch a step of these sequences.

        Sequences of the step before go on in its state, which may be in flight; others join with
        the host's state. Sequences that ended on the device do nothing.

        Args:
            meanwhile: called while the target runs, before verification; afterwards the masks of
                grammars are ready. A sequence whose grammar is not ready sits out.
            run_prompts: computes prompts with the function that it gets, which runs the target over
                this step too; requires `can_mix`. None if there are no prompts.
            before_drafts: called between the launches of verification and of drafting; lets
                the head read prompts.
        """
        num_rows, k = self._size = self._size_for(len(sequences))
        if k != self._buffers.k:
            self._buffers.switch(k)
        if self._features is not None and not k:
            for sequence in sequences:
                if sequence.num_speculative_tokens and sequence.pending_features is None:
                    # A prompt that runs in this pass is not computed to its end yet.
                    ring = self._features.open(sequence.seq_id, len(sequence) - 1)
                    sequence.pending_features = ring
        self._seat(sequences, num_rows)
        max_drafts = self._buffers.sizes.max_drafts(k)
        self._rules.set_rows(self._sequences[:num_rows], max_drafts)
        return self.go_on(meanwhile, run_prompts, before_drafts)

    def _seat(self, sequences: SequenceOf[Sequence], num_rows: int) -> None:
        """Give each sequence a row below `num_rows`; empty the rows of sequences that left.

        The q of drawn drafts joins and leaves with its sequence. The q that leaves belongs to the
        drafts of the step in flight: a preempted sequence does not get those drafts, and its own
        drafts count as not drawn.
        """
        seats, staying, drawn = self._sequences, set(sequences), self._buffers.drawn
        written: dict[int, Sequence | None] = {}
        for row, sequence in enumerate(seats):
            if sequence is not None and sequence not in staying:
                seats[row] = written[row] = None
                draws = self._buffers.trees is None or sequence.draws_chain
                leaves = sequence.status is SequenceStatus.RUNNING
                if drawn is not None and draws and leaves:
                    sequence.draft_probs_KV = drawn.read(row)
        free = [row for row in range(num_rows) if seats[row] is None]
        moves = {row: free.pop(0) for row in range(num_rows, len(seats)) if seats[row] is not None}
        for old, new in moves.items():
            seats[new], self._num_blocks[new] = seats[old], self._num_blocks[old]
            seats[old] = written[old] = None
            written.pop(new, None)
        if moves:
            moved = (seats[row] for row in moves.values())
            draws = self._buffers.trees is None or any(s.draws_chain for s in moved if s)
            self._buffers.move(moves, draws=draws)
        seated = set(seats)
        for sequence in sequences:
            if sequence not in seated:
                row = free.pop(0)
                seats[row] = written[row] = sequence
                self._num_blocks[row] = 0
        if written:
            self._buffers.write(written, self._vocab_size)
        for sequence in written.values():
            if sequence is not None:
                sequence.draft_probs_KV = None

    def go_on(
        self,
        meanwhile: Callable[[], None] | None = None,
        run_prompts: Callable[[RunTarget], None] | None = None,
        before_drafts: Callable[[], None] | None = None,
    ) -> Flight:
        """Launch the next step of the same sequences, whose blocks may have grown."""
        new: list[tuple[int, int, int]] = []
        num_rows = self._size[0]
        for row, sequence in enumerate(self._sequences[:num_rows]):
            if sequence is not None and len(sequence.block_table) > self._num_blocks[row]:
                known, blocks = self._num_blocks[row], sequence.block_table
                new += ((row, index, blocks[index]) for index in range(known, len(blocks)))
                self._num_blocks[row] = len(blocks)
        if new:
            self._buffers.add_blocks(new)
        graph = self._graph_of(self._size)
        run_mixed = None if run_prompts is None else partial(self._run_mixed, run_prompts)
        sequences = self._sequences[:num_rows]
        return graph.launch(sequences, self._rules, meanwhile, run_mixed, before_drafts)

    def _run_mixed(self, run_prompts: Callable[[RunTarget], None], step: DecodeStep) -> None:
        """Run the target over a step and prompts."""
        assert self._mixed_pass is not None, "`can_mix` was asked"
        run_prompts(partial(self._mixed_pass, step))

    def clear(self) -> None:
        """Forget the sequences, because something else has changed them; they join again."""
        self._seat([], 0)
        self._rules.set_rows([], 0)

    def read(self, flight: Flight) -> list[RowTokens]:
        """Wait for the verified tokens of a step; return them, a row a sequence."""
        self.last_k = flight.k
        reports = read_tokens(flight.tokens.read()[:-1], flight.max_accepted)
        if flight.logprobs is not None:
            found = flight.logprobs.read([report.new_token_ids for report in reports])
            pairs = zip(reports, found, strict=True)
            reports = [report._replace(logprobs=of or ()) for report, of in pairs]
        return reports

    def read_drafts(self, flight: Flight, *, follows: bool = False) -> list[RowDrafts]:
        """Wait for the end of a step; return its drafts, a row a sequence.

        Args:
            follows: whether the device ran nothing between the step read last and this one.
        """
        report_RX = flight.drafts.read()
        rows_BX, times = report_RX[:-1], report_RX[-1].tolist()
        self._depth.drafted(int((rows_BX[:, 2] > 0).sum()))
        seconds, before_ns = DecodeSeconds(), self._last_end_ns
        self._last_end_ns = times[Stamp.DRAFTED]
        if flight.drafts.done is not None and not flight.has_prompts:
            device_s = self.times.setdefault(len(rows_BX), GraphTimes()).add(times)
            period_s = (self._last_end_ns - before_ns) * 1e-9 if follows else None
            seconds = DecodeSeconds(device_s, period_s)
        # After sequences ended in the step before, the graph may be larger than the others need.
        num_active = int((rows_BX[:, 3] != NO_TOKEN).sum())
        if not num_active or self._rows_for(num_active) != len(rows_BX):
            seconds = DecodeSeconds()
        self.last_seconds = seconds
        return read_drafts(rows_BX, flight.max_accepted, flight.max_drafts)

    def _graph_of(self, size: tuple[int, int]) -> _Graph:
        if size not in self._graphs:
            self._graphs[size] = _Graph(self._make_step(*size), self._capture)
        return self._graphs[size]
