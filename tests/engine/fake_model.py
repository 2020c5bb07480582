"""A target and a drafter that are pure functions of what their KV slots hold.

They read their context through block tables, as attention does, so that a stale, stolen or
misplaced slot changes what they say; and they are fast enough for thousands of schedules. The
drafter checks that each slot it may look at holds what an undisturbed run would have put there.
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch

from peagle.config import CandidateTrees
from peagle.engine.depth import DecodeSeconds, DepthPolicy
from peagle.engine.model_runner import TargetPass
from peagle.engine.scheduler import Chunk
from peagle.engine.sequence import Sequence
from peagle.engine.step.graph_runner import RowDrafts, RowTokens, buckets
from peagle.kernels.trees.beams import beam_slots, depth_within
from peagle.kernels.trees.chains import count_drawn
from peagle.kernels.trees.copies import PRIOR_RATES
from peagle.kernels.trees.survival import Survival
from peagle.speculation import Drafts, ProposerInput

VOCAB = 11
CPU = torch.device("cpu")
MASK = "mask"


@lru_cache(maxsize=200_000)
def digest(tokens: tuple[int, ...]) -> int:
    """A number that depends on every token and on their order."""
    value = 17
    for token in tokens:
        value = (value * 1_000_003 + token + 1) % 2_147_483_647
    return value


def next_token(context: tuple[int, ...]) -> int:
    """What the target says after a context."""
    return digest(context) % VOCAB


def own_token(sequence: Sequence, context: tuple[int, ...]) -> int:
    """What the target says, or draws for a sampled request: half of the time something else."""
    if sequence.params.is_greedy or digest((*context, 5)) % 2:
        return next_token(context)
    return digest((*context, 7)) % VOCAB


class FakeRunner:
    """Stands in for `ModelRunner`: token ids as keys and values.

    What a sampled request emits depends on a draft that was rejected if drafts are drawn.
    """

    def __init__(self, num_blocks: int, block_size: int, has_drawn_drafts: bool = False) -> None:
        self.block_size = block_size
        self.has_drawn_drafts = has_drawn_drafts
        self.kv: list[int] = [-1] * (num_blocks * block_size)

    def slot(self, table: SequenceOf[int], position: int) -> int:
        """The slot of a position; an IndexError if the sequence has no block for it."""
        return table[position // self.block_size] * self.block_size + position % self.block_size

    def run(
        self, chunks: SequenceOf[Chunk], run_target: Callable[[], None] | None = None
    ) -> TargetPass:
        if run_target is not None:
            run_target()
        accepted: list[int] = []
        new: list[list[int]] = []
        features: list[list[float]] = []
        starts = [chunk.sequence.num_computed_tokens for chunk in chunks]
        for chunk, start in zip(chunks, starts, strict=True):
            sequence = chunk.sequence
            drafts = sequence.drafts[: chunk.num_draft_tokens]
            rows = [*sequence.token_ids[start : start + chunk.num_tokens], *drafts]
            if drafts and sequence.draft_parents is not None:
                path, own = self._run_tree(sequence, start, drafts)
                emitted = [*(rows[row] for row in path), own]
                contexts = [self._context(sequence, p) for p in range(start, start + 1 + len(path))]
                contexts += [(-1,)] * (len(drafts) - len(path))  # of rows that nobody may read
                features += [[float(digest(context))] for context in contexts]
                accepted.append(len(path))
                new.append(emitted)
                continue
            for position, token in enumerate(rows, start):
                self.kv[self.slot(sequence.block_table, position)] = token
            # All of them are written before any of them looks, as in a packed pass.
            contexts = [self._context(sequence, p) for p in range(start, start + len(rows))]
            features += [[float(digest(context))] for context in contexts]
            if chunk.samples:
                emitted = self.verify(sequence, contexts[len(rows) - len(drafts) - 1 :], drafts)
                accepted.append(len(emitted) - 1)
                new.append(emitted)
        return TargetPass(
            chunks,
            starts,
            features_TA=torch.tensor(features, dtype=torch.float64),
            sampled=_sampled(accepted, new),
        )

    def _run_tree(
        self, sequence: Sequence, start: int, drafts: SequenceOf[int]
    ) -> tuple[list[int], int]:
        """The rows of the accepted path without the root, and the token after it.

        Every node has a slot of its own; those of the path end in the slots of a chain.
        """
        table, parents = sequence.block_table, (sequence.draft_parents or [])[: len(drafts)]
        num_drawn = min(count_drawn(sequence.draft_scores), len(drafts))
        assert parents[:num_drawn] == [*range(num_drawn)], "a drawn chain leads the tree"
        assert sequence.draws_chain or not num_drawn
        for row, token in enumerate([sequence.token_ids[start], *drafts]):
            self.kv[self.slot(table, start + row)] = token
        context, path = self._context(sequence, start), list[int]()
        while True:
            own = own_token(sequence, context)
            at = path[-1] if path else 0
            children = [r for r, parent in enumerate(parents, start=1) if parent == at]
            held = {self.kv[self.slot(table, start + row)]: row for row in children}
            assert len(held) == len(children), "siblings are alike"
            if own not in held:
                break
            path.append(held[own])
            context = (*context, own)
        for to, row in enumerate(path, start=1):
            self.kv[self.slot(table, start + to)] = self.kv[self.slot(table, start + row)]
        return path, own

    def verify(
        self, sequence: Sequence, contexts: list[tuple[int, ...]], drafts: list[int]
    ) -> list[int]:
        """The emitted tokens, with a context for each draft and one behind them."""
        emitted = _verify(sequence, contexts, drafts)
        if self.has_drawn_drafts and not sequence.params.is_greedy:
            rejected = drafts[len(emitted) - 1 : len(emitted)]
            emitted[-1] = (emitted[-1] + sum(rejected)) % VOCAB
        return emitted

    def _context(self, sequence: Sequence, position: int) -> tuple[int, ...]:
        table = sequence.block_table
        return tuple(self.kv[self.slot(table, p)] for p in range(position + 1))


def _sampled(accepted: list[int], new: list[list[int]]) -> Any:
    verified = SimpleNamespace(
        num_accepted_B=torch.tensor(accepted),
        next_tokens_B=torch.tensor([tokens[-1] for tokens in new]),
    )
    return SimpleNamespace(
        verified=verified,
        num_accepted=accepted,
        new_token_ids=new,
        sampling=None,
        logprobs=[None] * len(new),
        is_broken=[False] * len(new),
    )


def _verify(sequence: Sequence, contexts: list[tuple[int, ...]], drafts: list[int]) -> list[int]:
    for j, draft in enumerate(drafts):
        own = own_token(sequence, contexts[j])
        if draft != own:
            return [*drafts[:j], own]
    return [*drafts, own_token(sequence, contexts[len(drafts)])]


class FakeSampler:
    """Stands in for `Sampler` where only its interface is called."""

    def tensors(self, sequences: SequenceOf[Sequence]) -> Any:
        return None

    def release(self, sequence: Sequence) -> None:
        pass


class FakeProposer:
    """Stands in for a head, and checks what it is given and what its slots hold."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        has_drawn_drafts: bool = False,
        max_nodes: int = 0,
        has_copies: bool = False,
        beam: int = 0,
    ) -> None:
        self.draws, self.beam = has_drawn_drafts, beam
        self.lookup_lengths = (4, 1) if has_copies else None
        self.copy_rates = [0.9] * len(PRIOR_RATES)
        self.trees = CandidateTrees(1, min(8, max_nodes), max_nodes) if max_nodes else None
        self.survival = Survival.uncalibrated(8, "cpu") if max_nodes else None
        self.draft_token_ids = None
        self.block_size = block_size
        self.kv: list[Any] = [None] * (num_blocks * block_size)

    def max_depth(self, room: int) -> int:
        return depth_within(room, self.beam) if self.beam else room

    def read(self, step: ProposerInput) -> None:
        assert not any(step.num_draft_tokens)
        self.propose(step)

    def propose(self, step: ProposerInput) -> Drafts:
        starts = step.context_starts_B
        tokens: list[list[int]] = []
        parents: list[list[int]] = []
        for b, history in enumerate(step.histories):
            first = int(step.start_loc[b])
            count = step.num_rows[b]
            rows = range(first, first + count)
            after = [*step.tokens_T[first + 1 : first + count].tolist(), int(step.next_tokens_B[b])]
            table = step.block_tables_BM[b].tolist()
            for row, token in zip(rows, after, strict=True):
                slot = self._slot(table, int(step.positions_T[row]))
                self.kv[slot] = (token, float(step.features_TA[row, 0]))
            last = int(step.positions_T[rows[-1]])
            self.check(table, history, 0 if starts is None else int(starts[b]), last)
            k = step.num_draft_tokens[b]
            ahead = beam_slots(k, self.beam) if self.beam else k - 1
            for j in range(1, ahead + 1):
                self.kv[self._slot(table, last + j)] = MASK
            chain = _draft(tuple(history[: last + 2]), k) if k else []
            grown = _grow(chain, self.trees.max_nodes) if self.trees else (chain, [])
            tokens.append(grown[0])
            parents.append(grown[1])
        most = max(map(len, tokens))
        padded = [row + [0] * (most - len(row)) for row in tokens]
        tokens_BK = torch.tensor(padded).view(len(tokens), most)
        if not self.trees:
            return Drafts(tokens_BK, list(step.num_draft_tokens))
        rows = [row + [0] * (most - len(row)) for row in parents]
        parents_BK = torch.tensor(rows).view(len(tokens), most)
        # Trees of some texts are surer than those of others.
        worth_B = torch.tensor([1.0 + digest((len(history),)) % 3 for history in step.histories])
        scores_BK = -0.3 * worth_B.unsqueeze(1) * torch.arange(1, most + 1)
        drafts = Drafts(tokens_BK, [*map(len, tokens)], parents_BK=parents_BK, scores_BK=scores_BK)
        if not (drawn := max(step.num_drawn)):
            return drafts
        # Drawn chains begin as the trees do, and may leave them behind.
        chains_BC = torch.tensor([_draft((*history, 1), drawn) for history in step.histories])
        chains_BC[:, 0] = tokens_BK[:, 0]
        probs_BKV = torch.zeros(len(chains_BC), drawn, VOCAB)
        return replace(drafts, chains_BC=chains_BC, probs_BKV=probs_BKV)

    def check(self, table: list[int], history: SequenceOf[int], start: int, last: int) -> None:
        for p in range(start, last + 1):
            expected = (history[p + 1], float(digest(tuple(history[: p + 1]))))
            found = self.kv[self._slot(table, p)]
            assert found == expected, f"drafter slot {p} holds {found}, not {expected}"

    def _slot(self, table: list[int], position: int) -> int:
        return table[position // self.block_size] * self.block_size + position % self.block_size


def _draft(context: tuple[int, ...], k: int) -> list[int]:
    """K drafts, most of them right; which ones depends on the context alone."""
    drafts: list[int] = []
    for _ in range(k):
        right = next_token((*context, *drafts))
        is_right = digest((*context, *drafts, 3)) % 4 > 0
        drafts.append(right if is_right else (right + 1) % VOCAB)
    return drafts


def _grow(chain: list[int], max_nodes: int) -> tuple[list[int], list[int]]:
    """A tree of nodes around a chain, in an order that follows from the chain."""
    tokens, parents, end = list[int](), list[int](), 0
    for depth, token in enumerate(chain):
        siblings = [token, (token + 1) % VOCAB, (token + 4) % VOCAB]
        turn = digest((*chain, depth)) % 3
        siblings = siblings[turn:] + siblings[:turn]
        left = max_nodes - len(tokens) - (len(chain) - depth - 1)
        some = siblings[: max(1, left)]
        if token not in some:
            some[-1] = token
        first = len(tokens) + 1
        tokens += some
        parents += [end] * len(some)
        end = first + some.index(token)
    return tokens[:max_nodes], parents[:max_nodes]


@dataclass
class Row:
    """A sequence as the device knows it: what was uploaded, and what its own steps added."""

    sequence: Sequence
    tokens: list[int]
    drafts: list[int]
    table: list[int]
    drafter_start: int
    has_ended: bool = False


def _row(sequence: Sequence) -> Row:
    tokens, drafts = list(sequence.token_ids), list(sequence.drafts)
    return Row(sequence, tokens, drafts, [], sequence.drafter_start)


@dataclass(eq=False)
class Flight:
    k: int
    sequences: list[Sequence]
    tokens: list[Any]
    drafts: list[Any]


class FakeGraphs:
    """Stands in for `GraphRunner`: a device that decodes by its own books, a report a step.

    What it says of a sequence follows from what was launched, not from what the host knows: only
    one that joins is taken as the host has it. It keeps the KV of the other fakes, so that steps
    without graphs can follow.
    """

    def __init__(
        self,
        runner: FakeRunner,
        head: FakeProposer,
        max_num_seqs: int,
        max_model_len: int,
        depth: DepthPolicy,
    ) -> None:
        self._runner, self._head, self._depth = runner, head, depth
        self._buckets = buckets(max_num_seqs)
        self._max_model_len = max_model_len
        self._rows: dict[Sequence, Row] = {}
        self._unread: list[Flight] = []
        self._undrafted: list[Flight] = []  # those whose tokens alone were read
        self._size = (0, 0)
        self.launches: list[int] = []  # how many sequences, for each time that they were given
        self.num_launches = self.num_reads = self.num_mixed = 0
        self.times: dict[int, Any] = {}
        self.last_k, self.last_seconds = 0, DecodeSeconds()
        self.num_following = 0  # steps with nothing between them and the one before

    @property
    def draws(self) -> bool:
        return self._runner.has_drawn_drafts

    def obstacle(self, sequences: list[Sequence]) -> str | None:
        is_missing = any(s.pending_features is not None for s in sequences)
        return "missed_features" if is_missing else None

    def can_mix(self, sequences: list[Sequence], num_prompt_tokens: int) -> bool:
        """Some prompts are too many for one pass with a step."""
        is_possible = bool(sequences) and self.obstacle(sequences) is None
        return is_possible and num_prompt_tokens % 4 > 0

    def needs_results(self, sequences: list[Sequence]) -> bool:
        return False

    def is_tight(self, num_sequences: int) -> bool:
        return self._sizes(num_sequences) == self._size

    def _sizes(self, num_sequences: int) -> tuple[int, int]:
        rows = next(size for size in self._buckets if size >= num_sequences)
        return rows, self._depth(num_sequences)

    def launch(
        self,
        sequences: list[Sequence],
        meanwhile: None,
        run_prompts: Callable[[Callable[[], None]], None] | None = None,
        before_drafts: Callable[[], None] | None = None,
    ) -> Flight:
        assert len(self._unread) <= 1, "one step may be in flight"
        in_flight = {s for flight in self._unread for s in flight.sequences}
        for sequence in sequences:
            if sequence not in self._rows:
                assert sequence not in in_flight, "the host does not know yet where it stands"
        self._size = self._sizes(len(sequences))
        self._rows = {s: self._rows.get(s) or _row(s) for s in sequences}
        for row in self._rows.values():
            row.drafts = row.drafts[: self._size[1]]
        self.launches.append(len(sequences))
        if run_prompts is not None:
            before = self.num_mixed
            run_prompts(self._run_target)
            assert self.num_mixed == before + 1, "the target runs once, over both"
        return self._launch(before_drafts)

    def _run_target(self) -> None:
        self.num_mixed += 1

    def clear(self) -> None:
        assert not self._unread, "the host does not know yet where they stand"
        self._rows = {}

    def go_on(self, meanwhile: None) -> Flight:
        assert len(self._unread) == 1, "one step is in flight"
        return self._launch()

    def read(self, flight: Flight) -> list[Any]:
        assert self._unread.pop(0) is flight, "steps are read once, and in their order"
        assert not self._undrafted, "the drafts of a step come before the next one's tokens"
        self._undrafted.append(flight)
        self.num_reads += 1
        self.last_k = flight.k
        return flight.tokens

    def read_drafts(self, flight: Flight, *, follows: bool = False) -> list[Any]:
        assert self._undrafted.pop() is flight
        self.num_following += follows
        return flight.drafts

    def _launch(self, before_drafts: Callable[[], None] | None = None) -> Flight:
        self.num_launches += 1
        for sequence, row in self._rows.items():
            row.table = list(sequence.block_table) or row.table
        # Of a sequence that has ended there is no report.
        running = [None if row.has_ended else row for row in self._rows.values()]
        tokens = [row and self._verify(row) for row in running]
        if before_drafts is not None:
            before_drafts()
        drafts = [row and self._draft(row) for row in running]
        self._unread.append(Flight(self._size[1], list(self._rows), tokens, drafts))
        return self._unread[-1]

    def _verify(self, row: Row) -> RowTokens:
        sequence, first, drafts = row.sequence, len(row.tokens) - 1, row.drafts
        rows = [row.tokens[-1], *drafts]
        for position, token in enumerate(rows, first):
            self._runner.kv[self._runner.slot(row.table, position)] = token
        contexts = [(*row.tokens, *drafts[:j]) for j in range(len(rows))]
        new = self._runner.verify(sequence, contexts, drafts)
        row.tokens += new
        if sequence.num_speculative_tokens:
            for p in range(first, first + len(new)):
                feature = float(digest(tuple(row.tokens[: p + 1])))
                slot = self._runner.slot(row.table, p)
                self._head.kv[slot] = (row.tokens[p + 1], feature)
        num_outputs = len(row.tokens) - sequence.num_prompt_tokens
        row.has_ended = (
            num_outputs >= sequence.params.max_tokens
            or len(row.tokens) >= self._max_model_len
            or not sequence.stop_token_ids.isdisjoint(new)
        )
        return RowTokens(len(drafts), len(new) - 1, new)

    def _draft(self, row: Row) -> RowDrafts:
        sequence, last = row.sequence, len(row.tokens) - 2
        room = self._max_model_len - len(row.tokens)
        k = max(0, min(sequence.num_speculative_tokens, room, self._size[1]))
        if k:
            self._head.check(row.table, row.tokens, row.drafter_start, last)
        for j in range(1, k):  # mask slots
            self._head.kv[self._runner.slot(row.table, last + j)] = MASK
        row.drafts = _draft(tuple(row.tokens), k)
        return RowDrafts(row.drafts)
