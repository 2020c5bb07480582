"""Grammars and drafts: masks for the rows of a verification, and masks while drafting.

Shapes: B sequences, R packed rows (k_b + 1 of each sequence), V vocabulary, W packed words.
"""

from collections.abc import Callable, Sequence
from functools import partial
from heapq import heappop, heappush

import torch
from torch import Tensor

from peagle.config import CandidateTrees
from peagle.engine.grammar.compiler import DraftMasks, GrammarState, full_bitmask, to_bools, to_mask

# logits_after(path of drafts) -> logits [V] of the slot behind that path, on the CPU.
LogitsAfter = Callable[[Sequence[int]], Tensor]


def prepare_masks(
    states: Sequence[GrammarState],
    drafts: Sequence[Sequence[int]],
    parents: Sequence[Sequence[int] | None],
) -> None:
    """Find the masks that verify each state's drafts, unless the state has them.

    A grammar that takes long leaves its state busy, see `GrammarBudget`. A grammar that exceeded
    the budget, or raised an exception, leaves its state with a `failure`.

    Args:
        parents: for each tree the row of each draft's parent; None for a chain.
    """
    budget = states[0].budget
    missing = [
        None if state.is_prepared_for(tokens, rows_before) else state
        for state, tokens, rows_before in zip(states, drafts, parents, strict=True)
    ]
    budget.each(missing, lambda b, state: state.prepare(drafts[b], parents[b]))
    budget.mark_excess()


def verification_masks(
    states: Sequence[GrammarState | None], drafts: Sequence[Sequence[int]], vocab_size: int
) -> Tensor | None:
    """Return the packed masks of the rows that verify drafts, int32 [R, W] on the CPU.

    Row j of a sequence has the tokens allowed after its first j drafts, in a tree after the drafts
    on its path. Rows after a stop id, and rows of sequences without a state, allow everything. The
    result is None if no sequence has a state. Every state must be prepared, and its drafts allowed.
    """
    if not any(states):
        return None
    rows = []
    for state, tokens in zip(states, drafts, strict=True):
        count = len(tokens) + 1
        if state is None:
            rows.append(full_bitmask(count, vocab_size))
            continue
        assert state.is_prepared_for(tokens) and state.prepared is not None
        rows.append(state.prepared.bitmask_RW[:count])
        assert len(rows[-1]) == count, "drafts are cut when they are made"
    return torch.cat(rows)


def grow_masked_trees(
    states: Sequence[GrammarState],
    logits_after: Sequence[LogitsAfter],
    depths: Sequence[int],
    shape: CandidateTrees,
    temperature: float,
    draft_token_ids: Tensor | None = None,
) -> None:
    """Set the `prepared` of each state to the best tree that its grammar allows, with its masks.

    The trees are those of `kernels.trees.growth.best_first_trees`, but a node's children are the
    tokens that the grammar allows behind its path, each with its probability among these. A state
    whose grammar takes long is busy when this returns, as after `prepare_masks`.

    Args:
        logits_after: logits behind a path, one function a state.
        depths: most nodes on a path of each tree.
        draft_token_ids: the id of each column of the logits; None if columns are ids.
    """
    budget = states[0].budget

    def grow(b: int, state: GrammarState) -> None:
        _grow(state, logits_after[b], depths[b], shape, temperature, draft_token_ids)

    budget.each([state if state.is_free else None for state in states], grow)
    budget.mark_excess()


def _grow(
    state: GrammarState,
    logits_after: LogitsAfter,
    depth: int,
    shape: CandidateTrees,
    temperature: float,
    draft_token_ids: Tensor | None,
) -> None:
    """Grow a tree best-first: move the best path of the heap into the tree, push sibling and child.

    The state ends at its old position.
    """
    bitmask_RW = full_bitmask(shape.max_nodes + 1, state.vocab_size)
    paths: list[list[int]] = [[]]  # the tokens on the path to each row
    parents: list[int] = []
    scores: list[float] = []
    candidates: list[list[tuple[float, int]]] = []  # scores and tokens of each row, best first
    heap: list[tuple[float, int, int, int]] = []  # score, depth, row of the parent, rank

    def push(row: int, rank: int) -> None:
        if rank < len(candidates[row]):
            heappush(heap, (-candidates[row][rank][0], len(paths[row]), row, rank))

    def expand(row: int, score: float) -> None:
        state.mask_into(bitmask_RW, row)
        found: list[tuple[float, int]] = []
        if len(paths[row]) < depth and not state.is_finished:
            allowed_V = to_bools(bitmask_RW[row], state.vocab_size)
            if draft_token_ids is not None:
                allowed_V = allowed_V[draft_token_ids]
            most = shape.max_nodes if row else shape.num_parallel_trees
            most = min(most, int(allowed_V.sum()))
            if most:
                logits_V = logits_after(paths[row]).masked_fill(~allowed_V, -torch.inf)
                best = torch.log_softmax(logits_V / temperature, -1).topk(most)
                ids = best.indices if draft_token_ids is None else draft_token_ids[best.indices]
                scores = (score + best.values).tolist()
                found = list(zip(scores, ids.tolist(), strict=True))
        candidates.append(found)
        push(row, 0)

    expand(0, 0.0)
    behind = 0  # tokens that the state has moved past
    while heap and len(parents) < shape.max_nodes:
        negative, _, parent, rank = heappop(heap)
        push(parent, rank + 1)
        path = [*paths[parent], candidates[parent][rank][1]]
        state.rollback(behind)
        behind = 0
        for token in path:
            behind += state.try_advance(token)
        if behind == len(path):
            parents.append(parent)
            scores.append(-negative)
            paths.append(path)
            expand(len(parents), -negative)
    state.rollback(behind)
    drafts = tuple(path[-1] for path in paths[1:])
    state.prepared = DraftMasks(drafts, bitmask_RW[: len(paths)], tuple(parents), tuple(scores))


class DraftGrammar:
    """Masks the drafts of one batch column by column: `mask()`, choose, `advance(tokens)`.

    At the end `restore_states()` leaves the masks with the states, for the verification. Drafting
    of a sequence ends at a token that its grammar does not allow, after a stop id, and where no id
    of the draft vocabulary is allowed; later tokens of the sequence are ignored.

    Args:
        states: state of each sequence after its output tokens; None for one without a grammar.
        draft_token_ids: the draft vocabulary, if it is not all of V.

    Attributes:
        lens: number of valid drafts of each sequence so far.
    """

    def __init__(
        self,
        states: Sequence[GrammarState | None],
        vocab_size: int,
        *,
        draft_token_ids: Sequence[int] | None = None,
    ) -> None:
        self.lens = [0] * len(states)
        self._states = states
        self._vocab_size = vocab_size
        self._draftable_W = (
            None if draft_token_ids is None else to_mask(draft_token_ids, vocab_size)
        )
        self._is_over = [s is not None and (s.is_finished or not s.is_free) for s in states]
        self._was_busy = [s is not None and not s.is_free for s in states]
        self._tokens: list[list[int]] = [[] for _ in states]
        self._masks: list[list[Tensor]] = [[] for _ in states]
        self._fill_column(None)

    def mask(self, device: torch.device | str = "cpu") -> Tensor | None:
        """Return the tokens allowed as the next draft, bool [B, V]; None if nothing is constrained.

        Rows without a state, and rows whose drafting is over, are all True.
        """
        if all(s is None or o for s, o in zip(self._states, self._is_over, strict=True)):
            return None
        return to_bools(self._bitmask_BW.to(device), self._vocab_size)

    def advance(self, tokens: Sequence[int]) -> None:
        """Move past the drafts just chosen, one a sequence."""
        for b, state in enumerate(self._states):
            if state is None:
                self.lens[b] += 1
        self._fill_column(tokens)

    def restore_states(self) -> None:
        """Roll the states back to their output; busy ones roll back when their call has ended."""
        for b, state in enumerate(self._states):
            if state is not None and self._masks[b] and state.is_free and not self._was_busy[b]:
                state.attempt(partial(state.rollback, self.lens[b]))
                state.prepared = DraftMasks(tuple(self._tokens[b]), torch.stack(self._masks[b]))

    def _fill_column(self, tokens: Sequence[int] | None) -> None:
        """Move the states past these tokens, and make the masks after the drafts so far.

        Drafting of a sequence ends if no id is allowed, or if its grammar takes long.
        """
        # A new tensor: a state that is busy may still write into the last one.
        bitmask_BW = full_bitmask(len(self._states), self._vocab_size)

        def fill(b: int, state: GrammarState) -> None:
            if tokens is not None:
                if not state.try_advance(tokens[b]):
                    self._is_over[b] = True
                    return
                self.lens[b] += 1
                self._tokens[b].append(tokens[b])
            state.mask_into(bitmask_BW, b)

        open_states = [None if over else s for s, over in zip(self._states, self._is_over)]
        known = next((state for state in open_states if state is not None), None)
        beside: set[int] = set()
        if known is not None:
            beside = known.budget.each(
                open_states, fill, lambda b, state: state.rollback(self.lens[b])
            )
        for b, state in enumerate(open_states):
            if state is None:
                continue
            if b in beside:
                self._was_busy[b] = self._is_over[b] = True
                bitmask_BW = bitmask_BW.clone()
            elif not state.is_free:
                self._is_over[b] = True
            elif not self._is_over[b]:
                self._masks[b].append(bitmask_BW[b].clone())
                may_draft = (
                    bitmask_BW[b]
                    if self._draftable_W is None
                    else bitmask_BW[b] & self._draftable_W
                )
                self._is_over[b] = state.is_finished or not may_draft.any()
            if self._is_over[b]:
                bitmask_BW[b] = -1
        self._bitmask_BW = bitmask_BW


class BeamGrammar:
    """Masks the nodes of beams (`speculation.proposers.BeamConstraint`).

    The states are at their output between the calls. Behind a token that a grammar does not allow,
    and behind a stop id, nothing is allowed. Of a state that is busy all is allowed: its sequence
    must not keep the tree.

    Args:
        states: state of each sequence after its output tokens; None for one without a grammar.
    """

    def __init__(self, states: Sequence[GrammarState | None], vocab_size: int) -> None:
        self._states = states
        self._vocab_size = vocab_size
        self._paths: dict[int, list[list[int]]] = {}

    def masks(
        self,
        sequences: Sequence[int],
        tokens: Sequence[Sequence[int]],
        behind: Sequence[Sequence[int]],
    ) -> Tensor:
        """Return the tokens allowed behind each node, bool [N, W, V]; see `BeamConstraint`."""
        width = len(tokens[0]) or 1
        for b, own, parents in zip(sequences, tokens, behind, strict=True):
            before = self._paths.get(b, [[]])
            nodes = zip(own, parents, strict=True)
            self._paths[b] = [[*before[parent], token] for token, parent in nodes] or [[]]
        # A new tensor: a state that is busy may still write into the last one.
        bitmask_RW = full_bitmask(len(sequences) * width, self._vocab_size)

        def fill(n: int, state: GrammarState) -> None:
            for i, path in enumerate(self._paths[sequences[n]]):
                row, moved = n * width + i, 0
                for token in path:
                    moved += state.try_advance(token)
                if moved < len(path) or state.is_finished:
                    bitmask_RW[row] = 0
                else:
                    state.mask_into(bitmask_RW, row)
                state.rollback(moved)

        states = [self._states[b] for b in sequences]
        known = next((state for state in states if state is not None), None)
        if known is not None:
            known.budget.each(states, fill)
            known.budget.mark_excess()
        return to_bools(bitmask_RW, self._vocab_size).unflatten(0, (len(sequences), width))
