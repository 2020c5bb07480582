"""The corrected states of graded elements, with gradients into the correction and the head.

A slot is conditioned on the tokens drafted before it. Acceptance asks for the text's own: a draft
counts only where those before it pass. A share of the chains takes the head's own corrected drafts
instead, found depth by depth as serving finds them, and another share is graded without the
correction, so that the head alone keeps its worth.

The logits of n + P r are those of n with the correction's term, since W2 = lm_head P: so the loss
needs no second projection, and its chunks need not hold whole chains. A slot needs no chain at all
where the token before it is the text's. Own drafts need all elements of a chain before them, and
find these in the same part of the partition.

Shapes: B rows, N positions, M graded elements, C chains, E elements of a depth, O elements of
chains on own drafts, D drafter width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.models.correction import Correction
from peagle.models.drafter import Drafter
from peagle.training.chains import Chains
from peagle.training.training_methods import Graded, Roots


def corrected_states(
    drafter: Drafter, correction: Correction, graded: Graded, chunk_rows: int
) -> Tensor:
    """Return the normed hidden states whose logits are the corrected ones, [M, D].

    Gradients go to the correction, to the elements' states, and to the embedding that
    `graded.roots` lends; depth 0 and the embedding of an own draft get none.

    Args:
        graded: elements below depth 0, with their roots and their plan.
        chunk_rows: own drafts whose logits are in memory at once.
    """
    at, roots, plan = graded.selected, graded.roots, graded.plan
    assert roots is not None and plan is not None, "elements below depth 0 have both"
    normed_MD = drafter.normed(graded.hidden_MD)
    before_M = at.row * roots.embedding_BND.shape[1] + at.anchor + at.depth
    embedding_MD = F.embedding(before_M, roots.embedding_BND.flatten(0, 1))
    if plan.own is not None:
        given = graded, roots, plan.own
        own_O, own_OD = _own_drafts(drafter, correction, *given, normed_MD.detach(), chunk_rows)
        embedding_MD = embedding_MD.index_copy(0, own_O, own_OD.to(embedding_MD.dtype))
    corrected_MD = correction(normed_MD, embedding_MD, at.depth)
    return torch.where(plan.is_alone_M.unsqueeze(1), normed_MD, corrected_MD)


@torch.no_grad()
def _own_drafts(
    drafter: Drafter,
    correction: Correction,
    graded: Graded,
    roots: Roots,
    chains: Chains,
    normed_MD: Tensor,
    chunk_rows: int,
) -> tuple[Tensor, Tensor]:
    """Return the elements of chains on own drafts [O], and the embedding of the draft before each,
    [O, D].
    """
    found: list[Tensor] = []
    at_C = chains.row_C * roots.hidden_BND.shape[1] + chains.anchor_C
    hidden_ED = drafter.normed(roots.hidden_BND.flatten(0, 1).index_select(0, at_C))
    for elements_E in chains.elements:
        count = len(elements_E)
        embedding_ED = drafter.embed_tokens(_drafts(drafter, hidden_ED[:count], chunk_rows))
        found.append(embedding_ED)
        slot_E = graded.selected.depth[elements_E]
        hidden_ED = correction(normed_MD[elements_E], embedding_ED, slot_E)
    return torch.cat(chains.elements), torch.cat(found)


def _drafts(drafter: Drafter, hidden_ED: Tensor, chunk_rows: int) -> Tensor:
    """Return the likeliest tokens of normed states, as target ids, [E]."""
    parts = [drafter.lm_head(part).argmax(-1) for part in hidden_ED.split(chunk_rows)]
    return drafter.to_target_ids(torch.cat(parts))
