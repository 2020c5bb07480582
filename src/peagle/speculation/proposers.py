"""Drafting with a head: P-EAGLE in one pass of the head, EAGLE-3 in K.

A recipe says how drafts come from features (`HeadProposer.draft`). An executor runs its parts:
`EagerDraft` over the exact sizes of a batch, `engine.step.decode_step.CapturedDraft` over the
buffers of a captured step.

Shapes: B sequences, N of them, T packed target rows, S drafter slots, A * H feature width, D
drafter width, K drafts, J columns of them, V target vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import add
from typing import Protocol

import torch
from torch import Tensor

from peagle.attention import AttentionBackend, LayerKVCache, Passes, PreparedPaged
from peagle.config import CandidateTrees
from peagle.kernels.drafts.batches import DraftBatch, PackedBatch, expand_draft_batch, slot_mapping
from peagle.kernels.sampling.probabilities import sample_from_weights
from peagle.kernels.sampling.random import Purpose, of_step, uniform
from peagle.kernels.trees.beams import (
    Beam,
    BeamPlan,
    BeamTrees,
    Count,
    GrowingTrees,
    count_beam_nodes,
    depth_within,
)
from peagle.kernels.trees.copies import PRIOR_RATES
from peagle.kernels.trees.growth import after_slots, best_first_trees, count_nodes, searched_trees
from peagle.kernels.trees.survival import Survival
from peagle.kernels.upload import host_ints, upload_ints, upload_together
from peagle.models.drafter import Attend, Drafter, spread_logits
from peagle.speculation.verification import SamplingTensors

# Sharpens the scores of paths: at 16 nodes 4% longer acceptance than with 1 (docs/lab/trees.md).
TREE_TEMPERATURE = 0.7


class DraftConstraint(Protocol):
    """Restricts drafts column by column, as a grammar does: `mask`, choose, `advance`.

    Attributes:
        lens: number of valid drafts of each sequence so far; later ones must not be verified.
    """

    lens: list[int]

    def mask(self, device: torch.device) -> Tensor | None:
        """Return the tokens allowed in the next column, bool [B, V]; None if all are."""

    def advance(self, tokens: Sequence[int]) -> None:
        """Take the tokens chosen for the column, one a sequence."""


class BeamConstraint(Protocol):
    """Restricts the nodes of beams, as a grammar does."""

    def masks(
        self,
        sequences: Sequence[int],
        tokens: Sequence[Sequence[int]],
        behind: Sequence[Sequence[int]],
    ) -> Tensor:
        """Return the tokens allowed behind each node of a beam, bool [N, W, V] on the CPU.

        Args:
            sequences: N numbers of sequences of the batch.
            tokens: W target ids of each.
            behind: of each node its parent's place among the nodes of the call before. Without
                such a call there is one parent, the newest token.
        """
        ...


@dataclass(frozen=True, slots=True)
class ProposerInput:
    """A proposer's input: the rows that the target ran, and the results of verification.

    Features and sampling parameters are on the device, all other tensors on the host.

    Attributes:
        tokens_T, positions_T: of the rows that the target ran.
        start_loc: [B+1], first row of each sequence.
        features_TA: aux features of the rows.
        next_tokens_B: the token after them: emitted, or the next one of a prompt.
        block_tables_BM: KV blocks of each sequence.
        num_rows: a_b + 1 of each sequence: its first row, and the a_b tokens after it that stand
            (all of them in a prompt).
        seq_lens: positions of each sequence that the head has read after this step.
        num_draft_tokens: k_b, draft tokens to make for each sequence, at most K; with 0 a head
            only reads on.
        sampling: with num_outputs counting the emitted tokens; None where nothing is drafted.
        histories: every token of each sequence, the emitted ones included.
        num_drawn: length of the chain of drawn drafts that leads the tree of each sequence; 0
            without one.
        context_starts_B: first drafter slot of each sequence that may be looked at; None: all.
        constraint: which tokens of chains may be drafted; None: all.
        beam_constraint: which nodes of an EAGLE-3 head's trees may be drafted; None: all.
        corrections: number of each sequence's correction, where the head has several.
    """

    tokens_T: Tensor
    positions_T: Tensor
    start_loc: Tensor
    features_TA: Tensor
    next_tokens_B: Tensor
    block_tables_BM: Tensor
    num_rows: Sequence[int]
    seq_lens: Sequence[int]
    num_draft_tokens: Sequence[int]
    sampling: SamplingTensors | None
    histories: Sequence[Sequence[int]]
    num_drawn: Sequence[int]
    context_starts_B: Tensor | None = None
    constraint: DraftConstraint | None = None
    beam_constraint: BeamConstraint | None = None
    corrections: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class TreeSlots:
    """The slots of one sequence in a parallel pass.

    Attributes:
        logits_KV: the head's own, in the draft vocabulary.
        states_KW: their `DraftCorrection.start`; None for a head without a correction.
        which_1: the number of their correction; None where there are not several.
    """

    logits_KV: Tensor
    states_KW: Tensor | None
    which_1: Tensor | None


@dataclass(frozen=True, slots=True)
class Drafts:
    """Draft tokens of a batch.

    Attributes:
        tokens_BK: target ids; columns at or above lens hold nothing of use.
        lens: drafts of each sequence: as many as were asked for, unless fewer were found.
        probs_BKV: the draft distributions in the target vocabulary; 0 for drafts that were not
            drawn, None where no draft was.
        parents_BK: the row of each draft's parent where drafts are trees (`kernels.trees.growth`);
            None for chains. K is then the nodes of a tree.
        scores_BK: the scores of the nodes then, as `best_first_trees` gives them.
        slots: the slots from which a sequence's tree grew, by its number.
        chains_BC: drawn drafts that lead trees, as many of each sequence as were asked for, with
            their distributions in `probs_BKV`; None where no tree has any.
    """

    tokens_BK: Tensor
    lens: list[int]
    probs_BKV: Tensor | None = None
    parents_BK: Tensor | None = None
    scores_BK: Tensor | None = None
    slots: Mapping[int, TreeSlots] = field(default_factory=dict)
    chains_BC: Tensor | None = None


class DraftExecutor(Protocol):
    """Runs the parts of a recipe for the sequences of one target pass.

    Attributes:
        k: K, most drafts of a sequence.
    """

    k: int

    def first_batch(self) -> DraftBatch:
        """Return the drafter's batch that follows from the verification.

        Its `draft_rows_BK` are the rows of the sequences that draft.
        """
        ...

    def gather(self, features_TD: Tensor, batch: DraftBatch) -> Tensor:
        """Return the batch's hidden states, [S, D]: features after fc, and h_shared elsewhere."""
        ...

    def next_batch(self, column: int) -> PackedBatch:
        """Return the batch of one slot of each sequence that drafts on, over its draft before.

        They are the first of the sequences that the batch before had.
        """
        ...

    def beam_batch(self, column: int, tokens_BW: Tensor) -> PackedBatch:
        """Return the batch of the nodes of depth `column`, as `next_batch` does for chains.

        Args:
            tokens_BW: their target ids, of all sequences that draft.
        """
        ...

    def run(
        self,
        batch: PackedBatch,
        hidden_SD: Tensor,
        visible_R: Tensor | None = None,
        rows_before: int = 0,
    ) -> Tensor:
        """Run the drafter over the batch made last, and return its hidden states, [S, D].

        Args:
            visible_R, rows_before: as `Passes` takes them.
        """
        ...

    def choose(self, hidden_NJD: Tensor, first: int) -> None:
        """Choose J drafts of each sequence, from column `first` on."""
        ...

    def beam_trees(self, beam: int, max_nodes: int) -> GrowingTrees:
        """Return trees of at most so many nodes, to be grown with beams."""
        ...

    def allow(self, logits_NJV: Tensor, beam: Beam | None) -> Tensor:
        """Return the logits of tokens that may follow the nodes of a beam, others as -inf.

        Args:
            logits_NJV: behind the J nodes of N sequences.
            beam: the nodes; None for the newest tokens.
        """
        ...

    def set_trees(self, trees: GrowingTrees) -> None:
        """Take the trees that have grown as the drafts."""
        ...


class HeadProposer:
    """The common part of parallel and autoregressive drafting: head, KV cache and first pass.

    Args:
        caches: one KV cache a drafter layer, in the block-id space of the target.
        max_model_len: positions from here on write no KV.
        trees: draft trees of this shape; None: chains.
        draws: whether drafts of some sequences are drawn.
        lookup_lengths: the most tokens that are compared, and the fewest that are a match, where
            continuations of the text join trees (`kernels.trees.copies`); None: they do not.

    Attributes:
        passes: passes of the drafter.
        readings: passes over features that give keys and values alone.
        survival: where drafts are trees, how probable it is that a node is accepted.
        copy_rates: where they have copies, the rate of each cell (`kernels.trees.copies`);
            `copy_rates_C` has these on the device.
    """

    def __init__(
        self,
        drafter: Drafter,
        backend: AttentionBackend,
        caches: Sequence[LayerKVCache],
        *,
        max_model_len: int,
        trees: CandidateTrees | None = None,
        draws: bool = False,
        lookup_lengths: tuple[int, int] | None = None,
    ) -> None:
        self.drafter = drafter
        self.drafter.reserve_positions(max_model_len)
        self.passes = Passes(self._run, backend)
        self.readings = Passes(self._read, backend)
        self.caches = list(caches)
        self.max_model_len = max_model_len
        self.trees = trees
        self.draws = draws
        self.lookup_lengths = lookup_lengths
        self.survival: Survival | None = None
        if trees is not None:
            self.survival = Survival.uncalibrated(
                trees.prediction_depth, drafter.norm.weight.device
            )
        self.copy_rates = list(PRIOR_RATES)
        self.copy_rates_C = torch.tensor(PRIOR_RATES, device=drafter.norm.weight.device)
        if drafter.config.is_parallel:
            self.h_shared_1D = drafter.shared_hidden().unsqueeze(0)
        self.scaling = drafter.config.head_dim**-0.5
        self.target_ids = drafter.target_ids()
        pruned = drafter.config.is_pruned
        self.draft_token_ids: Sequence[int] | None = self.target_ids.tolist() if pruned else None

    def read(self, step: ProposerInput) -> None:
        """Read positions after which nothing is drafted: the last layer's query, attention and MLP
        are left out.
        """
        assert not any(step.num_draft_tokens), "drafts need the whole pass"
        on, features_TA = EagerDraft(self, step, self.readings), step.features_TA
        batch = on.first_batch()
        if sum(step.num_rows) < len(features_TA):
            features_TA = features_TA[batch.feature_rows_R]
        on.run(batch, features_TA)

    def propose(self, step: ProposerInput) -> Drafts:
        """Draft the `num_draft_tokens` tokens that follow `next_tokens_B` of every sequence."""
        on = EagerDraft(self, step, self.passes)
        self.draft(on, step.features_TA)
        return on.drafts()

    def draft(self, on: DraftExecutor, features_TA: Tensor) -> None:
        """Read the features of a target pass, and draft."""
        raise NotImplementedError

    def max_depth(self, room: Count) -> Count:
        """Return the greatest depth of drafts that find KV slots, of one sequence or of several.

        Args:
            room: tokens that the context can still take.
        """
        return room

    def count_nodes(self, depth: int) -> int:
        """Return the nodes of a tree of some depth."""
        shape = self.trees
        assert shape is not None, "the head drafts chains"
        vocab_size = self.drafter.config.draft_vocab_size
        return count_nodes(depth, shape.num_parallel_trees, shape.max_nodes, vocab_size)

    def first_pass(self, on: DraftExecutor, features_TA: Tensor) -> tuple[DraftBatch, Tensor]:
        """Run [NTP slots | mask slots] of every sequence: the batch and its hidden states."""
        batch = on.first_batch()
        hidden_SD = on.gather(self.drafter.combine_features(features_TA), batch)
        return batch, on.run(batch, hidden_SD)

    def grow(
        self,
        logits_NKV: Tensor,
        states_NKW: Tensor | None,
        depths_N: Tensor,
        which_N: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return trees over the slots of sequences: token, parent row and score of each node.

        Args:
            logits_NKV: of the slots, the head's own.
            states_NKW: of the slots, from `DraftCorrection.start`; None without a correction.
            depths_N: as `best_first_trees` takes them.
            which_N: the number of each sequence's correction; None where there are not several.
        """
        shape, correction = self.trees, self.drafter.correction
        assert shape is not None, "the head drafts chains"
        w, most = shape.num_parallel_trees, shape.max_nodes
        ids, heat = self.target_ids, TREE_TEMPERATURE
        if logits_NKV.device.type == "cpu":
            if correction is None or states_NKW is None:
                after = after_slots(logits_NKV, most, heat)
            else:
                after = correction.tree_search(logits_NKV, states_NKW, ids, heat, most, which_N)
            grown = searched_trees(after, depths_N.tolist(), num_parallel_trees=w, max_nodes=most)
        else:
            children = None
            if correction is not None and states_NKW is not None:
                children = correction.tree_children(logits_NKV, states_NKW, ids, heat, which_N)
            grown = best_first_trees(
                logits_NKV,
                depths_N,
                num_parallel_trees=w,
                max_nodes=most,
                temperature=heat,
                children=children,
            )
        tokens_NX, parents_NX, scores_NX = grown
        return self.drafter.to_target_ids(tokens_NX), parents_NX, scores_NX

    def _run(
        self, tokens: Tensor, positions: Tensor, prepared: PreparedPaged, hidden: Tensor | None
    ) -> tuple[Tensor]:
        assert hidden is not None, "the drafter reads hidden states"
        return (self.drafter(tokens, hidden, positions, self._attend(prepared)),)

    def _read(
        self, tokens: Tensor, positions: Tensor, prepared: PreparedPaged, hidden: Tensor | None
    ) -> tuple[Tensor]:
        assert hidden is not None, "the drafter reads features"

        def write(layer_idx: int, key: Tensor, value: Tensor) -> None:
            prepared.write(key, value, self.caches[layer_idx])

        hidden = self.drafter.combine_features(hidden)
        return (self.drafter.read(tokens, hidden, positions, self._attend(prepared), write),)

    def _attend(self, prepared: PreparedPaged) -> Attend:
        windows = self.drafter.windows

        def attend(layer_idx: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            cache, options = self.caches[layer_idx], {"scaling": self.scaling}
            return prepared(query, key, value, cache, sliding_window=windows[layer_idx], **options)

        return attend


class ParallelProposer(HeadProposer):
    """P-EAGLE: all K tokens in one drafter pass (arXiv 2602.01469)."""

    def draft(self, on: DraftExecutor, features_TA: Tensor) -> None:
        batch, hidden_SD = self.first_pass(on, features_TA)
        if on.k:
            on.choose(hidden_SD[batch.draft_rows_BK], 0)


class AutoregressiveProposer(HeadProposer):
    """EAGLE-3: draft token j + 1 from a pass over draft token j and the head's own hidden state.

    For trees the pass is over a beam of nodes (`kernels.trees.beams`).
    """

    @property
    def beam(self) -> int:
        """Return W, the nodes of a depth from which the head goes on."""
        assert self.trees is not None, "the head drafts chains"
        return min(self.trees.num_parallel_trees, self.drafter.config.draft_vocab_size)

    def max_depth(self, room: Count) -> Count:
        return room if self.trees is None else depth_within(room, self.beam)

    def count_nodes(self, depth: int) -> int:
        assert self.trees is not None, "the head drafts chains"
        return count_beam_nodes(depth, self.beam, self.trees.max_nodes)

    def draft(self, on: DraftExecutor, features_TA: Tensor) -> None:
        batch, hidden_SD = self.first_pass(on, features_TA)
        if not on.k:
            return
        hidden_ND = hidden_SD[batch.draft_rows_BK[:, 0]]
        if self.trees is not None:
            self._draft_trees(on, hidden_ND, self.trees)
            return
        on.choose(hidden_ND.unsqueeze(1), 0)
        for column in range(1, on.k):
            single = on.next_batch(column)
            hidden_ND = on.run(single, hidden_ND[: single.tokens_R.shape[0]])
            on.choose(hidden_ND.unsqueeze(1), column)

    def _draft_trees(self, on: DraftExecutor, hidden_ND: Tensor, shape: CandidateTrees) -> None:
        """Grow trees from the hidden states behind the newest tokens."""
        drafter, width = self.drafter, self.beam
        trees = on.beam_trees(width, shape.max_nodes)
        hidden_NWD = hidden_ND.unsqueeze(1)  # all nodes of depth 1 have one parent
        logits_N1V = on.allow(drafter.compute_logits(hidden_NWD), None)
        beam = trees.start(logits_N1V.squeeze(1))
        for column in range(1, on.k):
            batch = on.beam_batch(column, drafter.to_target_ids(beam.tokens_BW))
            count = batch.tokens_R.shape[0] // width
            behind_NW1 = beam.behind_BW[:count].unsqueeze(2)
            size = hidden_NWD.shape[2]
            hidden_NWD = hidden_NWD[:count].gather(1, behind_NW1.expand(-1, -1, size))
            hidden_RD = on.run(
                batch,
                hidden_NWD.flatten(0, 1),
                beam.visible_BW[:count].flatten(),
                rows_before=(column - 1) * width,
            )
            hidden_NWD = hidden_RD.unflatten(0, (count, width))
            logits_NWV = drafter.compute_logits(hidden_RD).unflatten(0, (count, width))
            beam = trees.extend(on.allow(logits_NWV, beam))
        on.set_trees(trees)


class EagerDraft:
    """A `DraftExecutor` over the exact sizes of a batch, any way of drafting.

    Sequences with the most drafts come first: those that still draft are then a prefix.

    Args:
        passes: `passes` or `readings` of the proposer.
    """

    def __init__(self, proposer: HeadProposer, step: ProposerInput, passes: Passes) -> None:
        self._proposer, self._step, self._passes = proposer, step, passes
        self._device = step.features_TA.device
        lens = self._lens = list(step.num_draft_tokens)
        self.k = max(lens)
        drafting = [b for b, k in enumerate(lens) if k]
        self._order = sorted(drafting, key=lambda b: -lens[b])
        columns = self.k if proposer.trees is None else max(step.num_drawn)
        shape = len(lens), columns
        self._tokens_BK = torch.zeros(shape, dtype=torch.int64, device=self._device)
        self._probs_BKV: Tensor | None = None
        self._trees: Drafts | None = None
        self._max_query_len = self._max_seq_len = 1

    def first_batch(self) -> DraftBatch:
        """Return the drafter's batch; the host makes it, and sends all of it in one copy."""
        step, own = self._step, self._proposer
        parallel = own.drafter.config.is_parallel
        num_mask_slots = [max(k - 1, 0) if parallel else 0 for k in self._lens]
        batch = expand_draft_batch(
            step.tokens_T,
            step.positions_T,
            step.start_loc,
            host_ints(step.num_rows) - 1,
            step.next_tokens_B,
            step.block_tables_BM,
            block_size=own.caches[0].block_size,
            num_mask_slots_B=host_ints(num_mask_slots),
            max_drafts=self.k,
            mask_token_id=own.drafter.config.mask_token_id or 0,
            max_model_len=own.max_model_len,
        )
        self._max_query_len = max(map(add, step.num_rows, num_mask_slots))
        self._max_seq_len = max(map(add, step.seq_lens, num_mask_slots))
        order_N = host_ints(self._order)
        last_N = batch.positions_R[batch.last_ntp_B[order_N]]
        batch = replace(batch, draft_rows_BK=batch.draft_rows_BK[order_N])
        own_of_step = [order_N, last_N, step.block_tables_BM]
        if step.context_starts_B is not None:
            own_of_step.append(step.context_starts_B)
        num_own = len(own_of_step)
        there = upload_together([*own_of_step, *batch.tensors], self._device)
        self._order_N, self._last_N, self._tables_BM, *starts = there[:num_own]
        self._starts_B = starts[0] if starts else None
        self._tables_NM, self._starts_N = self._tables_BM, self._starts_B
        return DraftBatch(*there[num_own:])

    def gather(self, features_TD: Tensor, batch: DraftBatch) -> Tensor:
        if self.k > 1 and self._proposer.drafter.config.is_parallel:
            features_TD = torch.cat((features_TD, self._proposer.h_shared_1D))
        return features_TD[batch.feature_rows_R]

    def next_batch(self, column: int) -> PackedBatch:
        own, step, sequences_N = self._proposer, self._step, self._still_drafting(column)
        num_seqs = sequences_N.shape[0]
        self._tables_NM = self._tables_BM[sequences_N]
        if self._starts_B is not None:
            self._starts_N = self._starts_B[sequences_N]
        position_N = self._last_N[:num_seqs] + column
        rows = torch.arange(num_seqs + 1, device=self._device)
        size = own.caches[0].block_size
        slots_N = slot_mapping(self._tables_NM, rows[:-1], position_N, size, own.max_model_len)
        self._max_query_len = 1
        self._max_seq_len = max(step.seq_lens[b] for b in self._order[:num_seqs]) + column
        tokens_N = self._tokens_BK[sequences_N, column - 1]
        return PackedBatch(tokens_N, position_N, slots_N, rows, position_N + 1)

    def beam_batch(self, column: int, tokens_BW: Tensor) -> PackedBatch:
        own, sequences_N = self._proposer, self._still_drafting(column)
        num_seqs, width = sequences_N.shape[0], tokens_BW.shape[1]
        if column == 1:
            self._beams = BeamPlan.of(
                self._last_N,
                self._tables_BM[self._order_N],
                num_passes=self.k - 1,
                beam=width,
                block_size=own.caches[0].block_size,
                max_model_len=own.max_model_len,
            )
        self._tables_NM = self._tables_BM[sequences_N]
        if self._starts_B is not None:
            self._starts_N = self._starts_B[sequences_N]
        lens = [self._step.seq_lens[b] for b in self._order[:num_seqs]]
        self._max_query_len, self._max_seq_len = width, max(lens) + column * width
        return self._beams.batch(column - 1, tokens_BW[:num_seqs])

    def run(
        self,
        batch: PackedBatch,
        hidden_SD: Tensor,
        visible_R: Tensor | None = None,
        rows_before: int = 0,
    ) -> Tensor:
        (done_SD,) = self._passes(
            batch,
            self._tables_NM,
            hidden_SD,
            max_query_len=self._max_query_len,
            max_seq_len=self._max_seq_len,
            context_starts_B=self._starts_N,
            visible_R=visible_R,
            rows_before=rows_before,
        )
        return done_SD

    def choose(self, hidden_NJD: Tensor, first: int) -> None:
        drafter, constraint = self._proposer.drafter, self._step.constraint
        logits_NJV = drafter.compute_logits(hidden_NJD)
        correction, states_NJW, which_N = drafter.correction, None, None
        if correction is not None:
            if correction.has_choice:
                corrections = [self._step.corrections[b] for b in self._order]
                which_N = upload_ints(corrections, self._device)
            states_NJW = correction.start(drafter.normed(hidden_NJD), which_N)
        if self._proposer.trees is not None:
            self._trees = self._grow(logits_NJV, states_NJW, which_N)
            chains = [n for n, b in enumerate(self._order) if self._step.num_drawn[b]]
            if not chains:
                return
            chains_N = upload_ints(chains, self._device)
            logits_NJV, constraint = logits_NJV[chains_N, : self._tokens_BK.shape[1]], None
            states_NJW = None if states_NJW is None else states_NJW[chains_N]
            which_N = None if which_N is None else which_N[chains_N]
            sequences_N = self._order_N[chains_N]
        else:
            sequences_N = self._still_drafting(first)
        if constraint is None and correction is None:
            self._put(logits_NJV, sequences_N, first)
            return
        # What may or should come next depends on what was chosen before it: one column at a time.
        for j in range(logits_NJV.shape[1]):
            logits_NV = logits_NJV[:, j]
            if correction is not None and states_NJW is not None and j:
                tokens_N = self._tokens_BK[sequences_N, first + j - 1]
                logits_NV = correction.add(logits_NV, states_NJW[:, j], tokens_N, which_N)
            mask_BV = None if constraint is None else constraint.mask(self._device)
            if mask_BV is not None:
                mask_NV = mask_BV[sequences_N][:, self._proposer.target_ids]
                logits_NV = logits_NV.masked_fill(~mask_NV, -torch.inf)
            self._put(logits_NV.unsqueeze(1), sequences_N, first + j)
            if constraint is not None:
                constraint.advance(self._tokens_BK[:, first + j].tolist())

    def drafts(self) -> Drafts:
        """Return the drafts chosen, cut where the constraint ends them."""
        if self._trees is not None:
            if self._probs_BKV is None:
                return self._trees
            return replace(self._trees, probs_BKV=self._probs_BKV, chains_BC=self._tokens_BK)
        lens, constraint = self._lens, self._step.constraint
        if constraint is not None:
            lens = list(map(min, lens, constraint.lens))
        return Drafts(self._tokens_BK, lens, self._probs_BKV)

    def _grow(
        self, logits_NKV: Tensor, states_NKW: Tensor | None, which_N: Tensor | None
    ) -> Drafts:
        """Return trees over the slots of the sequences that draft."""
        grown = self._proposer.grow(logits_NKV, states_NKW, self._depths_N, which_N)
        slots = {
            b: TreeSlots(
                logits_NKV[n],
                None if states_NKW is None else states_NKW[n],
                None if which_N is None else which_N[n : n + 1],
            )
            for n, b in enumerate(self._order)
        }
        return replace(self._of_trees(*grown), slots=slots)

    def beam_trees(self, beam: int, max_nodes: int) -> GrowingTrees:
        return BeamTrees(beam, max_nodes, TREE_TEMPERATURE)

    def allow(self, logits_NJV: Tensor, beam: Beam | None) -> Tensor:
        constraint, drafter = self._step.beam_constraint, self._proposer.drafter
        if constraint is None:
            return logits_NJV
        count = len(logits_NJV)
        sequences = self._order[:count]
        if beam is None:
            nothing: list[list[int]] = [[] for _ in sequences]
            allowed_NJV = constraint.masks(sequences, nothing, nothing)
        else:
            tokens_NW = drafter.to_target_ids(beam.tokens_BW[:count])
            behind_NW = beam.behind_BW[:count]
            allowed_NJV = constraint.masks(sequences, tokens_NW.tolist(), behind_NW.tolist())
        allowed_NJV = allowed_NJV.to(self._device)[..., self._proposer.target_ids]
        return logits_NJV.masked_fill(~allowed_NJV, -torch.inf)

    def set_trees(self, trees: GrowingTrees) -> None:
        tokens_NX, parents_NX, scores_NX = trees.best(self._depths_N)
        tokens_NX = self._proposer.drafter.to_target_ids(tokens_NX)
        self._trees = self._of_trees(tokens_NX, parents_NX, scores_NX)

    @property
    def _depths_N(self) -> Tensor:
        """Return the depths of the trees of the sequences that draft."""
        return upload_ints([self._lens[b] for b in self._order], self._device)

    def _of_trees(self, tokens_NX: Tensor, parents_NX: Tensor, scores_NX: Tensor) -> Drafts:
        """Return the trees of the sequences that draft as the drafts of all."""
        shape = len(self._lens), tokens_NX.shape[1]
        every = torch.zeros((2, *shape), dtype=torch.int64, device=self._device)
        every[:, self._order_N] = torch.stack((tokens_NX, parents_NX))
        scores_BX = scores_NX.new_zeros(shape)
        scores_BX[self._order_N] = scores_NX
        lens = [self._proposer.count_nodes(k) for k in self._lens]
        return Drafts(every[0], lens, parents_BK=every[1], scores_BK=scores_BX)

    def _still_drafting(self, column: int) -> Tensor:
        """Return the sequences that draft more than `column` tokens."""
        return self._order_N[: sum(self._lens[b] > column for b in self._order)]

    def _put(self, logits_NJV: Tensor, sequences_N: Tensor, first: int) -> None:
        """Choose tokens of these logits, and write them from column `first` on."""
        drafter, sampling = self._proposer.drafter, self._step.sampling
        assert sampling is not None, "drafts are made"
        batch, columns = logits_NJV.shape[:2]
        places = sequences_N, slice(first, first + columns)
        if not self._proposer.draws or sampling.all_greedy:
            self._tokens_BK[places] = drafter.to_target_ids(logits_NJV.argmax(-1))
            return
        logits_RV = logits_NJV.flatten(0, 1)
        if drafter.config.is_pruned:
            ids_D, vocab_size = self._proposer.target_ids, drafter.config.vocab_size
            logits_RV = spread_logits(logits_RV, ids_D, vocab_size)
        probs_RV = sampling.probs(logits_RV, sequences_N.repeat_interleave(columns))
        column_J = torch.arange(columns, device=self._device)
        num_outputs_N1 = sampling.num_outputs_B[sequences_N].unsqueeze(1)
        position_NJ = of_step(num_outputs_N1, first + column_J)
        u_NJ = uniform(sampling.seeds_B[sequences_N].unsqueeze(1), position_NJ, Purpose.DRAFT)
        tokens_RV = sample_from_weights(probs_RV, u_NJ.flatten())
        if self._probs_BKV is None:
            shape = (*self._tokens_BK.shape, probs_RV.shape[1])
            self._probs_BKV = probs_RV.new_zeros(shape)
        self._tokens_BK[places] = tokens_RV.view(batch, columns)
        self._probs_BKV[places] = probs_RV.unflatten(0, (batch, columns))
