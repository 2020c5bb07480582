"""Candidate trees of a head that drafts one token a pass: a beam of nodes goes on at each depth.

The head reads the W nodes of a beam, each behind its own path, and the W likeliest tokens behind
each are candidates. The W best candidates by the score of their path are the next beam. All
candidates compete for the nodes of the tree (EAGLE-2, arXiv 2406.16858). W = 1 gives chains.

The keys of a beam's nodes stand behind the context, beam after beam: row (d - 1) W + i of the tree
is node i of the beam of depth d.

Nothing here waits for the device, and all sizes follow from shapes: a CUDA graph can hold it.

Shapes: B sequences, W beam, V draft vocabulary, N nodes of a tree, X candidates of a depth, P
passes over beams, R = B W rows of such a pass, M blocks a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.kernels.drafts.batches import PADDING_SLOT, PackedBatch, slot_mapping
from peagle.kernels.trees.growth import log_probs, rank_paths

Count = TypeVar("Count", int, Tensor)


@dataclass(frozen=True, slots=True)
class Beam:
    """The nodes of one depth from which the head goes on, best first.

    Attributes:
        tokens_BW: draft ids.
        scores_BW: scores of their paths.
        behind_BW: place of each node's parent in the beam before; 0 at depth 1.
        paths_BW: each node among the candidates of all depths.
        visible_BW: bit i says that row i of the tree is on the path to the node, which ends it.
    """

    tokens_BW: Tensor
    scores_BW: Tensor
    behind_BW: Tensor
    paths_BW: Tensor
    visible_BW: Tensor


class GrowingTrees(Protocol):
    """Trees that grow with beams; `BeamTrees` says what the methods do."""

    def start(self, logits_BV: Tensor, /) -> Beam: ...

    def extend(self, logits_NWV: Tensor, /) -> Beam: ...

    def best(self, depths_B: Tensor, /) -> tuple[Tensor, Tensor, Tensor]: ...


class BeamTrees:
    """The trees of some sequences while they grow, a pass of the head for each depth.

        score(x_1 .. x_j) = sum_i log softmax(logits_i / temperature)[x_i]

    with logits_i those behind x_1 .. x_(i-1).

    Args:
        beam: W, at most V.
        max_nodes: N.
        temperature: above 0; sharpens the scores.
    """

    def __init__(self, beam: int, max_nodes: int, temperature: float) -> None:
        self.beam, self._max_nodes, self._temperature = beam, max_nodes, temperature
        self._levels: list[tuple[Tensor, Tensor, Tensor]] = []
        self._last: Beam | None = None

    def start(self, logits_BV: Tensor) -> Beam:
        """Return the beam of depth 1, from the logits behind the newest tokens."""
        scores_BW, tokens_BW = self._likeliest(logits_BV)
        column_W = torch.arange(self.beam, device=logits_BV.device)
        columns_BW, none_BW = column_W.expand_as(tokens_BW), torch.zeros_like(tokens_BW)
        self._levels = [(scores_BW, tokens_BW, none_BW - 1)]
        visible_BW = (1 << column_W).expand_as(tokens_BW)
        self._last = Beam(tokens_BW, scores_BW, none_BW, columns_BW, visible_BW)
        return self._last

    def extend(self, logits_NWV: Tensor) -> Beam:
        """Return the next beam, from the logits behind the nodes of the last one.

        Args:
            logits_NWV: of the first N sequences; the trees of the others are finished.
        """
        num_seqs, width = logits_NWV.shape[:2]
        last, depth = self._last, len(self._levels)
        assert last is not None and width == self.beam
        first = sum(scores.shape[1] for scores, *_ in self._levels)
        found = self._likeliest(logits_NWV.flatten(0, 1))
        added_NWW, tokens_NWW = (x_RW.unflatten(0, (num_seqs, width)) for x_RW in found)
        scores_NX = (last.scores_BW[:num_seqs].unsqueeze(2) + added_NWW).flatten(1)
        tokens_NX = tokens_NWW.flatten(1)
        parents_NX = last.paths_BW[:num_seqs].repeat_interleave(width, 1)
        self._levels.append((scores_NX, tokens_NX, parents_NX))
        scores_NW, at_NW = scores_NX.topk(width, -1)
        behind_NW = at_NW // width
        row_W = depth * width + torch.arange(width, device=at_NW.device)
        visible_NW = last.visible_BW[:num_seqs].gather(1, behind_NW) | (1 << row_W.clamp_max(63))
        tokens_NW = tokens_NX.gather(1, at_NW)
        self._last = Beam(tokens_NW, scores_NW, behind_NW, first + at_NW, visible_NW)
        return self._last

    def best(self, depths_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return token, parent row and score of each node, as `best_first_trees` does.

        Args:
            depths_B: int64, most nodes on a path of each sequence.
        """
        num_seqs, levels = len(self._levels[0][0]), list[tuple[Tensor, Tensor, Tensor]]()
        for column, (scores_NX, tokens_NX, parents_NX) in enumerate(self._levels):
            missing = 0, 0, 0, num_seqs - len(scores_NX)
            scores_BX = F.pad(scores_NX, missing, value=-torch.inf)
            scores_BX = scores_BX.masked_fill((depths_B <= column).unsqueeze(1), -torch.inf)
            levels.append((scores_BX, F.pad(tokens_NX, missing), F.pad(parents_NX, missing)))
        few = self._max_nodes - sum(scores.shape[1] for scores, *_ in levels)
        if few > 0:
            nothing_BX = levels[0][0].new_full((num_seqs, few), -torch.inf)
            none_BX = torch.zeros_like(nothing_BX, dtype=torch.int64)
            levels.append((nothing_BX, none_BX, none_BX - 1))
        return rank_paths(levels, self._max_nodes)

    def _likeliest(self, logits_RV: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and ids of the W likeliest tokens of each row, [R, W]."""
        best = log_probs(logits_RV, self._temperature).topk(self.beam, -1)
        return best.values, best.indices


def count_beam_nodes(depth: int, beam: int, max_nodes: int) -> int:
    """Return how many nodes a tree of `BeamTrees` has."""
    return min(beam + (depth - 1) * beam * beam, max_nodes) if depth else 0


def beam_slots(depth: int, beam: int) -> int:
    """Return the KV slots behind the context that the beams of a tree of this depth take.

    The nodes of the last depth have none: the head does not read them.
    """
    return max(depth - 1, 0) * beam


def depth_within(room: Count, beam: int) -> Count:
    """Return the greatest depth of a tree whose beams find slots, of one sequence or of several.

    Args:
        room: tokens that the context can still take. The first node stands at the position of the
            newest token, which the head has read as the token after the position before.
    """
    return 1 + (room + 1) // beam


@dataclass(frozen=True, slots=True)
class BeamPlan:
    """Positions and KV slots of the beams of the P passes behind the first one.

    Attributes:
        positions_PR: last + d for the nodes of depth d, last being the last position before them.
        slots_PR: of the positions last + 1, last + 2, ..., node after node.
        seq_lens_PB: contexts with all nodes so far.
        query_start_loc: 0, W, ... B W.
    """

    positions_PR: Tensor
    slots_PR: Tensor
    seq_lens_PB: Tensor
    query_start_loc: Tensor

    @classmethod
    def of(
        cls,
        last_B: Tensor,
        block_tables_BM: Tensor,
        *,
        num_passes: int,
        beam: int,
        block_size: int,
        max_model_len: int,
        running_B: Tensor | None = None,
    ) -> BeamPlan:
        """Return the positions and KV slots of all passes behind the first one.

        Args:
            last_B: position of the last slot of each sequence in the first pass.
            block_tables_BM: KV blocks of each sequence.
            num_passes, beam: P and W.
            block_size: slots of a block.
            max_model_len: positions from here on write no KV.
            running_B: whether each sequence drafts, all by default. Others have position 0 and slot
                -1, and attend to their own rows.
        """
        num_seqs, device = len(last_B), last_B.device
        if running_B is None:
            running_B = torch.ones_like(last_B)
        runs_B1, column_P = (running_B != 0).unsqueeze(1), torch.arange(num_passes, device=device)
        places_BX = last_B.unsqueeze(1) + 1 + torch.arange(num_passes * beam, device=device)
        rows_BX = torch.arange(num_seqs, device=device).unsqueeze(1).expand_as(places_BX)
        slots_BX = slot_mapping(block_tables_BM, rows_BX, places_BX, block_size, max_model_len)
        slots_BX = torch.where(runs_B1, slots_BX, PADDING_SLOT)
        positions_BP = torch.where(runs_B1, last_B.unsqueeze(1) + 1 + column_P, 0)
        lens_BP = torch.where(runs_B1, last_B.unsqueeze(1) + 1 + beam * (column_P + 1), beam)
        return cls(
            positions_BP.T.repeat_interleave(beam, 1),
            slots_BX.unflatten(1, (num_passes, beam)).transpose(0, 1).flatten(1),
            lens_BP.T.contiguous(),
            torch.arange(num_seqs + 1, device=device) * beam,
        )

    def batch(self, index: int, tokens_NW: Tensor) -> PackedBatch:
        """Return the inputs of pass `index` over the beams of the first N sequences."""
        num_seqs, rows = len(tokens_NW), slice(tokens_NW.numel())
        return PackedBatch(
            tokens_NW.flatten(),
            self.positions_PR[index, rows],
            self.slots_PR[index, rows],
            self.query_start_loc[: num_seqs + 1],
            self.seq_lens_PB[index, :num_seqs],
        )
