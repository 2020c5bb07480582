"""Drafting after a target pass: the drafter reads the pass's states and drafts for the next step.

A sequence that does not draft leaves a hole in the drafter's KV, its prompt included. Its last
features are kept. Before it drafts again the drafter catches up: a pass over them closes the hole.
If the hole is larger than the kept features, the drafter's context begins behind it. A drafter with
a window has a context that begins one window before the end of a prompt. Attention reads nothing
before a context.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate

import torch
from torch import Tensor

from peagle.attention import AttentionBackend
from peagle.config import SamplingParams, SpeculativeConfig
from peagle.config.speculative import MAX_SPECULATIVE_TOKENS, chains_lead
from peagle.engine.features import FeatureRings
from peagle.engine.grammar import (
    BeamGrammar,
    DraftGrammar,
    GrammarState,
    LogitsAfter,
    grow_masked_trees,
    prepare_masks,
)
from peagle.engine.model_runner import TargetPass, block_tables
from peagle.engine.sampler import Sampler
from peagle.engine.scheduler import Chunk
from peagle.engine.sequence import Sequence
from peagle.engine.step.pass_graphs import MAX_SEQUENCES, TOKEN_BUCKETS
from peagle.kernels.paths import row_depths
from peagle.kernels.sampling.probabilities import at_least_float32
from peagle.kernels.trees.chains import merge_chain
from peagle.kernels.trees.copies import (
    NO_COPY,
    SEARCHED_ROWS,
    TextIndex,
    Tree,
    find_matches,
    join_copies,
)
from peagle.kernels.trees.growth import allocate_nodes
from peagle.kernels.trees.survival import MIN_SCORE, Survival
from peagle.kernels.upload import host_ints, upload_ints
from peagle.models.correction import DraftCorrection
from peagle.models.drafter import Drafter
from peagle.speculation import (
    AutoregressiveProposer,
    Drafts,
    HeadProposer,
    ParallelProposer,
    PromptLookup,
    ProposerInput,
    TreeSlots,
)
from peagle.speculation.proposers import TREE_TEMPERATURE
from peagle.speculation.verification import SamplingTensors

# Number of positions without drafts from which on a pass of their own pays.
MIN_APART_POSITIONS = 256
# Most positions of a pass that closes holes; with MAX_SEQUENCES sequences a graph can run it.
MAX_CAUGHT_UP = TOKEN_BUCKETS[-1]
_TIMED_READINGS = 4


def make_drafting(
    drafter: Drafter | None,
    speculative: SpeculativeConfig | None,
    backend: AttentionBackend,
    sampler: Sampler,
    features: FeatureRings,
    *,
    max_model_len: int,
    max_draft_len: int,
) -> Drafting | None:
    """Return the drafting of a configuration; its proposer has no KV caches yet."""
    if speculative is None:
        return None
    if drafter is None:
        return LookupDrafting(PromptLookup(*speculative.lookup_lengths), max_model_len)
    make_proposer = ParallelProposer if drafter.config.is_parallel else AutoregressiveProposer
    proposer = make_proposer(
        drafter,
        backend,
        [],
        max_model_len=max_model_len,
        trees=speculative.trees,
        draws=speculative.draws,
        lookup_lengths=speculative.lookup_lengths if speculative.copies_join_trees else None,
    )
    vocab_size = sampler.vocab_size
    return HeadDrafting(proposer, sampler, vocab_size, max_model_len, max_draft_len, features)


def fixes_k(params: SamplingParams, speculative: SpeculativeConfig | None) -> bool:
    """Return whether a request keeps its K under load.

    If drafts are drawn the output depends on them: with a seed it must not depend on the load.
    """
    if speculative is None or speculative.parallel_drafting_spec is not None:
        return False
    return speculative.draws and not params.is_greedy and params.seed is not None


def has_copies(params: SamplingParams, speculative: SpeculativeConfig | None) -> bool:
    """Return whether copies of the text may be a request's drafts, or join its trees.

    Copies in trees are deeper than K, so a request that asks for fewer drafts has none.
    """
    if speculative is None:
        return False
    if speculative.method == "ngram":
        return params.prompt_lookup and params.num_speculative_tokens != 0
    if params.num_speculative_tokens is not None and params.num_speculative_tokens < speculative.k:
        return False
    return speculative.copies_join_trees and params.prompt_lookup


def draws_chain(params: SamplingParams, speculative: SpeculativeConfig | None) -> bool:
    """Return whether chains of drawn drafts lead the trees of a request.

    A seeded output must not depend on drafts, no grammar restricts such draws, and a prediction is
    worth all nodes of a tree.
    """
    first = None if speculative is None else speculative.drawn_chains_from
    is_free = params.seed is None and params.structured_output is None and not params.prediction
    is_free = is_free and not params.is_greedy
    return is_free and chains_lead(first, params.temperature)


class Drafting:
    """The base class of drafting, which sets the next drafts on the sequences of a target pass.

    Attributes:
        max_drafts: K of the batch, see `max_drafts_of`; a sequence may draft less. For trees it is
            the mean number of nodes that a step verifies of each.
    """

    def __init__(self, max_model_len: int) -> None:
        self.max_model_len = max_model_len
        self.max_drafts = MAX_SPECULATIVE_TOKENS

    def catch_up(self, sequences: SequenceOf[Sequence]) -> None:
        """Read the kept features of sequences that draft again, before their next pass."""

    def draft(self, done: TargetPass) -> None:
        """Draft for the sequences of a pass whose new tokens have been appended."""
        raise NotImplementedError

    def num_draft_tokens(self, sequence: Sequence) -> int:
        """Return the number of drafts of the next step; no draft may lie beyond the context."""
        room = max(0, self.max_model_len - len(sequence))
        return min(sequence.num_speculative_tokens, self.max_drafts_of(sequence), room)

    def max_drafts_of(self, sequence: Sequence) -> int:
        """Return K of the batch; for a sequence whose K must not follow it the greatest K."""
        return self.max_drafts

    def num_verified(self, sequences: SequenceOf[Sequence], most: int) -> list[int]:
        """Return the number of drafts of each sequence that a decode step verifies.

        A step that ran as a graph leaves drafts that a grammar may refuse.

        Args:
            most: mean number of nodes of a sequence, if drafts are trees.
        """
        return [
            len(s.drafts if s.grammar is None else s.grammar.allowed(s.drafts)) for s in sequences
        ]


class LookupDrafting(Drafting):
    """Drafts by prompt lookup, which needs no features and no KV."""

    def __init__(self, lookup: PromptLookup, max_model_len: int) -> None:
        super().__init__(max_model_len)
        self.lookup = lookup

    def draft(self, done: TargetPass) -> None:
        for chunk in done.chunks:
            sequence, grammar = chunk.sequence, chunk.sequence.grammar
            if not chunk.samples or sequence.is_finished:
                continue
            k = self.num_draft_tokens(sequence)
            texts = sequence.token_ids, k, sequence.prediction
            found = self.lookup.find(*texts) if k else []
            if grammar is not None:
                prepare_masks([grammar], [found], [None])
                found = grammar.allowed(found)
            sequence.drafts = found


@dataclass(frozen=True, slots=True)
class _Reading:
    """Positions `first` to before `end` of a sequence that the drafter reads now.

    `row` is the row of `first` in the features. A chain of `num_drawn` drafts leads the tree.
    """

    sequence: Sequence
    first: int
    end: int
    row: int
    num_draft_tokens: int = 0
    num_drawn: int = 0

    def __len__(self) -> int:
        return self.end - self.first

    @property
    def rows(self) -> range:
        """Return the rows of the positions."""
        return range(self.row, self.row + len(self))

    def split(self) -> tuple[_Reading, _Reading]:
        """Return the positions before the one that drafts start from, and that one."""
        at = self.end - 1 if self.num_draft_tokens else self.end
        row = self.row + at - self.first
        before = replace(self, end=at, num_draft_tokens=0, num_drawn=0)
        return before, replace(self, first=at, row=row)


class HeadDrafting(Drafting):
    """Drafts with a head, for positions below `max_draft_len`.

    Args:
        features: features of sequences that do not draft at present.
    """

    def __init__(
        self,
        proposer: HeadProposer,
        sampler: Sampler,
        vocab_size: int,
        max_model_len: int,
        max_draft_len: int,
        features: FeatureRings,
    ) -> None:
        super().__init__(max_model_len)
        self.proposer = proposer
        self.vocab_size = vocab_size
        self.sampler = sampler
        self.max_draft_len = max_draft_len
        self.features = features
        draftable = proposer.draft_token_ids
        self._draft_token_ids = None if draftable is None else torch.tensor(draftable)
        self._has_warned = False

    @torch.inference_mode()
    def draft(self, done: TargetPass) -> None:
        readings: list[_Reading] = []
        row = 0
        for chunk, pass_start in zip(done.chunks, done.starts, strict=True):
            if not chunk.sequence.is_finished:
                reading = self._read(chunk, pass_start, row, done.features_TA)
                readings += [] if reading is None else [reading]
            row += chunk.num_tokens + chunk.num_draft_tokens
        readings = self._read_apart(done, readings)
        if not readings:
            return
        step = self._step(done, readings)
        grammars = [reading.sequence.grammar for reading in readings]
        constraint = None
        if any(grammars) and self.proposer.trees is None:
            draftable = self.proposer.draft_token_ids
            constraint = DraftGrammar(grammars, self.vocab_size, draft_token_ids=draftable)
            step = replace(step, constraint=constraint)
        elif any(grammars) and not self.proposer.drafter.config.is_parallel:
            step = replace(step, beam_constraint=BeamGrammar(grammars, self.vocab_size))
        drafts = self.proposer.propose(step)
        if drafts.parents_BK is not None and drafts.scores_BK is not None:
            self._set_trees(readings, drafts, drafts.parents_BK, drafts.scores_BK)
            return
        tokens, probs_BKV = drafts.tokens_BK.tolist(), drafts.probs_BKV
        for row, reading in enumerate(readings):
            if reading.num_draft_tokens:
                reading.sequence.drafts = tokens[row][: drafts.lens[row]]
                reading.sequence.draft_probs_KV = None if probs_BKV is None else probs_BKV[row]
        if constraint is not None:
            constraint.restore_states()

    @torch.inference_mode()
    def catch_up(self, sequences: SequenceOf[Sequence]) -> None:
        group: list[tuple[_Reading, Tensor]] = []
        for sequence in sequences:
            missed = self._missed(sequence)
            if missed is None:
                continue
            num_positions = sum(len(reading) for reading, _ in group) + len(missed[0])
            if group and (num_positions > MAX_CAUGHT_UP or len(group) == MAX_SEQUENCES):
                self._read_kept(group)
                group = []
            group.append(missed)
        if group:
            self._read_kept(group)

    def _missed(self, sequence: Sequence) -> tuple[_Reading, Tensor] | None:
        """Return the kept positions and features of a sequence, if the drafter is to read them."""
        ring = sequence.pending_features
        if ring is None or not self.max_drafts_of(sequence):
            return None
        if ring.first >= sequence.num_computed_tokens:
            return None  # a step keeps features while the sequence's prompt runs in its pass
        end = min(sequence.num_computed_tokens, self.max_draft_len)
        first = _first_unread(sequence, ring.first)
        # Captured steps keep features beyond the head's reach too.
        kept_NA = ring.get()[first - ring.first : max(end - ring.first, 0)]
        self.features.release(sequence.seq_id)
        sequence.pending_features = None
        if first >= end:
            return None
        sequence.num_drafter_tokens = end
        return _Reading(sequence, first, end, row=0), kept_NA

    def _read_kept(self, missed: list[tuple[_Reading, Tensor]]) -> None:
        readings = _one_behind_another([reading for reading, _ in missed])
        features_TA = torch.cat([kept_NA for _, kept_NA in missed])
        self.proposer.read(_proposer_input(readings, features_TA))

    def _set_trees(
        self, readings: list[_Reading], drafts: Drafts, parents_BN: Tensor, scores_BN: Tensor
    ) -> None:
        """Set trees on their sequences, cut to the slots of the context.

        Under a grammar the tree of a parallel pass grows again, from tokens that the grammar
        allows; other trees have grown so.
        """
        tokens, parents = torch.stack((drafts.tokens_BK, parents_BN)).tolist()
        scores = scores_BN.tolist()
        growing = [(row, r) for row, r in enumerate(readings) if r.num_draft_tokens]
        masked = [
            (row, r, g)
            for row, r in growing
            if row in drafts.slots and (g := r.sequence.grammar) is not None
        ]
        if masked:
            assert self.proposer.trees is not None
            grow_masked_trees(
                [grammar for *_, grammar in masked],
                [self._logits_after(drafts.slots[row]) for row, *_ in masked],
                [reading.num_draft_tokens for _, reading, _ in masked],
                self.proposer.trees,
                TREE_TEMPERATURE,
                self._draft_token_ids,
            )
        survival = None if self.proposer.lookup_lengths is None else self._host_survival
        chains = None if drafts.chains_BC is None else drafts.chains_BC.tolist()
        for row, reading in growing:
            sequence, grammar = reading.sequence, reading.sequence.grammar
            found = tokens[row][: drafts.lens[row]], parents[row], scores[row]
            if grammar is not None and row in drafts.slots:
                found = grammar.prepared_tree()
            elif grammar is not None:
                found = _allowed_tree(grammar, *found)
            # The nodes of a depth share a position, but each needs a slot.
            count = min(len(found[0]), self.max_model_len - len(sequence))
            sequence.drafts = found[0][:count]
            sequence.draft_parents, sequence.draft_scores = found[1][:count], found[2][:count]
            # A grammar that takes long has no tree yet.
            if sequence.has_copies and (grammar is None or sequence.drafts):
                self._join_copies(sequence, survival)
            if reading.num_drawn and chains is not None and drafts.probs_BKV is not None:
                self._merge_chain(sequence, chains[row][: reading.num_drawn])
                sequence.draft_probs_KV = drafts.probs_BKV[row, : reading.num_drawn]

    def _merge_chain(self, sequence: Sequence, chain: list[int]) -> None:
        """Let a drawn chain lead the tree of a sequence."""
        assert self.proposer.trees is not None
        tokens, parents, has_copies = sequence.drafts, sequence.draft_parents or [], True
        worths, cells = sequence.draft_worths, sequence.draft_cells
        if worths is None or cells is None:
            worths, cells, has_copies = [0.0] * len(tokens), [NO_COPY] * len(tokens), False
        tree = Tree(tokens, parents, sequence.draft_scores or [], worths, cells)
        room = min(self.proposer.trees.max_nodes, self.max_model_len - len(sequence))
        tree = merge_chain(tree, chain, room)
        sequence.drafts, sequence.draft_parents, sequence.draft_scores = tree[:3]
        if has_copies:
            sequence.draft_worths, sequence.draft_cells = tree[3:]

    def _join_copies(self, sequence: Sequence, survival: Survival | None) -> None:
        """Let copies of the text join the tree of a sequence."""
        proposer, text = self.proposer, sequence.token_ids
        lengths = proposer.lookup_lengths
        assert proposer.trees and survival and lengths
        tokens, parents = sequence.drafts, sequence.draft_parents or []
        scores = sequence.draft_scores or []
        if not sequence.text_indices:
            index = partial(TextIndex, longest=lengths[0], shortest=lengths[1])
            sequence.text_indices = [index(text)]
            if given := sequence.prediction:
                sequence.text_indices.append(index(given, is_prediction=True))
        for index in sequence.text_indices:
            index.extend()
        depths = row_depths(parents)[1:]
        worths = survival(torch.tensor([scores]), torch.tensor([depths]))[0].tolist()
        for node, parent in enumerate(parents):
            worths[node] = min(worths[node], worths[parent - 1] if parent else 1.0)
        tree = Tree(tokens, parents, scores, worths, [NO_COPY] * len(tokens))
        matches = find_matches(sequence.text_indices, tokens, parents, SEARCHED_ROWS)
        room = min(proposer.trees.max_nodes, self.max_model_len - len(text))
        if matches and room > 0:
            tree = join_copies(tree, matches, proposer.copy_rates, max_nodes=room)
        sequence.drafts, sequence.draft_parents, sequence.draft_scores = tree[:3]
        sequence.draft_worths, sequence.draft_cells = tree[3:]

    def _logits_after(self, slots: TreeSlots) -> LogitsAfter:
        """Return the function of the logits behind a path of drafts, on the host like grammars."""
        logits_KV, correction = slots.logits_KV.cpu(), self._host_correction
        if correction is None or slots.states_KW is None:
            return lambda path: at_least_float32(logits_KV[len(path)])
        states_KW = slots.states_KW.cpu()
        which_1 = None if slots.which_1 is None else slots.which_1.cpu()

        def after(path: SequenceOf[int]) -> Tensor:
            logits_1V, states_1W = logits_KV[len(path), None], states_KW[len(path), None]
            if path:
                logits_1V = correction.add(logits_1V, states_1W, torch.tensor(path[-1:]), which_1)
            return at_least_float32(logits_1V[0])

        return after

    @property
    def _host_survival(self) -> Survival | None:
        """Return the survival of nodes as it is now, on the host."""
        survival = self.proposer.survival
        return None if survival is None else Survival(survival.weights_D2.cpu())

    @cached_property
    def _host_correction(self) -> DraftCorrection | None:
        """Return the head's correction on the host, copied if the head is on a GPU."""
        correction = self.proposer.drafter.correction
        if correction is None or correction.weight_Vr.device.type == "cpu":
            return correction
        return copy.deepcopy(correction).cpu()

    @torch.inference_mode()
    def derive_again(self) -> None:
        """Compute again, in place, what follows from the head's weights, which have changed."""
        drafter = self.proposer.drafter
        if drafter.config.is_parallel:
            self.proposer.h_shared_1D.copy_(drafter.shared_hidden())
        self.__dict__.pop("_host_correction", None)

    @torch.inference_mode()
    def time_reading(self, num_tokens: int) -> float:
        """Return the seconds in which the head reads a prompt token, the fastest of a few passes.

        It overwrites KV block 0, so it must run before requests come.
        """
        drafter, caches = self.proposer.drafter, self.proposer.caches
        weight, block_size = drafter.norm.weight, caches[0].keys.shape[1]
        ints = partial(torch.zeros, dtype=torch.int64)
        step = ProposerInput(
            tokens_T=ints(num_tokens),
            positions_T=torch.arange(num_tokens),
            start_loc=torch.tensor([0, num_tokens]),
            features_TA=weight.new_zeros(num_tokens, drafter.config.feature_size),
            next_tokens_B=ints(1),
            block_tables_BM=ints(1, -(-num_tokens // block_size)),
            num_rows=[num_tokens],
            seq_lens=[num_tokens],
            num_draft_tokens=[0],
            sampling=None,
            histories=[()],
            num_drawn=[0],
        )
        seconds: list[float] = []
        for _ in range(_TIMED_READINGS):
            start_s = time.perf_counter()
            self.proposer.read(step)
            if weight.is_cuda:
                torch.cuda.synchronize(weight.device)
            seconds.append(time.perf_counter() - start_s)
        return min(seconds) / num_tokens

    def num_verified(self, sequences: SequenceOf[Sequence], most: int) -> list[int]:
        budget, counts = most * len(sequences), super().num_verified(sequences, most)
        if self.proposer.survival is None or sum(counts) <= budget:
            return counts
        survival = self._host_survival
        assert survival is not None, "the head drafts trees"
        width = max(counts)
        depths = [row_depths(s.draft_parents or ())[1:] for s in sequences]
        scores = [s.draft_scores or [] for s in sequences]
        scores_BN = torch.tensor([some + [0.0] * (width - len(some)) for some in scores])
        depths_BN = torch.tensor([some + [0] * (width - len(some)) for some in depths])
        survival_BN = survival(scores_BN, depths_BN)
        for row, sequence in enumerate(sequences):
            if sequence.draft_worths is not None:
                survival_BN[row, : len(sequence.draft_worths)] = torch.tensor(sequence.draft_worths)
        return allocate_nodes(survival_BN, torch.tensor(counts), budget).tolist()

    def num_draft_tokens(self, sequence: Sequence) -> int:
        room = max(0, self.max_model_len - len(sequence))
        return min(super().num_draft_tokens(sequence), self.proposer.max_depth(room))

    def max_drafts_of(self, sequence: Sequence) -> int:
        if (trees := self.proposer.trees) is not None:
            return trees.depth(self.max_drafts)
        return MAX_SPECULATIVE_TOKENS if sequence.fixes_k else self.max_drafts

    def _read(
        self, chunk: Chunk, pass_start: int, row: int, features_TA: Tensor
    ) -> _Reading | None:
        """Return the positions that the drafter reads of a sequence; if none, keep the features."""
        sequence = chunk.sequence
        end = min(sequence.num_computed_tokens, self.max_draft_len)
        k = 0
        if chunk.samples:
            k = self._num_drafts_within(sequence)
            sequence.drafts, sequence.draft_probs_KV = [], None
            sequence.draft_parents = sequence.draft_scores = None
            sequence.draft_worths = sequence.draft_cells = None
        if not sequence.num_speculative_tokens:
            return None
        if not self.max_drafts_of(sequence):
            self._put_features(sequence, pass_start, features_TA[row:][: max(end - pass_start, 0)])
            return None
        first = _first_unread(sequence, pass_start)
        if first >= end:
            return None
        sequence.num_drafter_tokens = end
        num_drawn = 0
        if sequence.draws_chain and (trees := self.proposer.trees) is not None:
            num_drawn = min(k, trees.num_drawn(self.max_drafts))
        return _Reading(sequence, first, end, row + first - pass_start, k, num_drawn)

    def _put_features(self, sequence: Sequence, start: int, features_NA: Tensor) -> None:
        """Keep the features of the positions from `start` on while a sequence does not draft."""
        ring = sequence.pending_features
        if not len(features_NA):
            return
        if ring is None:
            ring = self.features.open(sequence.seq_id, start, features_NA)
            sequence.pending_features = ring
        if ring.end == start:
            ring.put(features_NA)
        else:  # a prompt ran in the pass of a step, which keeps the later features
            ring.put_before(features_NA)

    def _num_drafts_within(self, sequence: Sequence) -> int:
        k = self.num_draft_tokens(sequence)
        # The last of k drafts comes from the slot at position len + k - 3.
        within = max(0, self.max_draft_len + 2 - len(sequence))
        if k > 0 and within == 0 and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"A sequence has {len(sequence)} tokens and goes on without drafts: the head "
                f"drafts up to {self.max_draft_len}. To draft on, set max_model_len in the "
                "speculative configuration; to draft well there, train the head on longer texts.",
                stacklevel=2,
            )
        return min(k, within)

    def _read_apart(self, done: TargetPass, readings: list[_Reading]) -> list[_Reading]:
        """Read the positions whose hidden states no draft needs; return the rest.

        The last layer computes only keys and values of such positions. A pass of their own pays
        beside drafts only if they are many.
        """
        num_apart = sum(len(r) - (r.num_draft_tokens > 0) for r in readings)
        are_drafting = any(r.num_draft_tokens for r in readings)
        if not num_apart or (are_drafting and num_apart < MIN_APART_POSITIONS):
            return readings
        parts = [reading.split() for reading in readings]
        self.proposer.read(self._step(done, [before for before, _ in parts if len(before)]))
        return [last for _, last in parts if len(last)]

    def _step(self, done: TargetPass, readings: SequenceOf[_Reading]) -> ProposerInput:
        """Return the drafter's input for readings of a pass: all its rows, or a copy of some."""
        features_TA, sampled = done.features_TA, done.sampled
        if 2 * sum(map(len, readings)) < len(features_TA):
            every = [row for reading in readings for row in reading.rows]
            features_TA = features_TA[upload_ints(every, features_TA.device)]
            readings = _one_behind_another(readings)
        sampling = None
        if any(reading.num_draft_tokens for reading in readings):
            # A decode step mostly reads all sequences of its pass, whose tensors exist already.
            sequences = [reading.sequence for reading in readings]
            are_known = sequences == [chunk.sequence for chunk in done.chunks if chunk.samples]
            known = sampled.sampling if sampled is not None and are_known else None
            sampling = known or self.sampler.tensors(sequences)
        return _proposer_input(readings, features_TA, sampling)


def _proposer_input(
    readings: SequenceOf[_Reading], features_TA: Tensor, sampling: SamplingTensors | None = None
) -> ProposerInput:
    """Return the drafter's input for readings of these features."""
    sequences = [reading.sequence for reading in readings]
    # Rows that belong to no reading keep token 0 and position 0, and are not read.
    tokens, positions = ([0] * len(features_TA) for _ in range(2))
    for reading in readings:
        rows = slice(reading.row, reading.row + len(reading))
        tokens[rows] = reading.sequence.token_ids[reading.first : reading.end]
        positions[rows] = range(reading.first, reading.end)
    context_starts = [s.drafter_start for s in sequences]
    return ProposerInput(
        tokens_T=host_ints(tokens),
        positions_T=host_ints(positions),
        start_loc=host_ints([*(reading.row for reading in readings), len(tokens)]),
        features_TA=features_TA,
        next_tokens_B=host_ints([r.sequence.token_ids[r.end] for r in readings]),
        block_tables_BM=block_tables(sequences),
        num_rows=[len(reading) for reading in readings],
        seq_lens=[reading.end for reading in readings],
        num_draft_tokens=[reading.num_draft_tokens for reading in readings],
        sampling=sampling,
        histories=[s.token_ids for s in sequences],
        num_drawn=[reading.num_drawn for reading in readings],
        context_starts_B=host_ints(context_starts) if any(context_starts) else None,
        corrections=[s.correction for s in sequences],
    )


def _allowed_tree(
    grammar: GrammarState, tokens: list[int], parents: list[int], scores: list[float]
) -> tuple[list[int], list[int], list[float]]:
    """Return the nodes of a tree that grew under a grammar which the grammar allows.

    A forbidden node has no probability, so it stands behind all others. While the grammar works,
    and if it failed, there are none.
    """
    if not grammar.is_free:
        return [], [], []
    count = sum(score > MIN_SCORE for score in scores[: len(tokens)])
    return tokens[:count], parents[:count], scores[:count]


def _first_unread(sequence: Sequence, known: int) -> int:
    """Return the first position from `known` on that the drafter has not read.

    If it is `known`, the drafter's context begins there.
    """
    if known > sequence.num_drafter_tokens:
        sequence.num_drafter_tokens = sequence.drafter_start = known
    return sequence.num_drafter_tokens


def _one_behind_another(readings: SequenceOf[_Reading]) -> list[_Reading]:
    """Return the readings with rows that follow each other."""
    starts = accumulate(map(len, readings), initial=0)
    return [replace(reading, row=start) for reading, start in zip(readings, starts, strict=False)]
