"""A correction of P-EAGLE's drafts: a draft learns which token was drafted before it.

The drafts of one pass do not see each other: each slot gives the distribution of its token over all
that may come before it. A small term on the frozen head mends part of that. Let n_j be the normed
hidden state of slot j = 0, 1, ..., x the token drafted by slot j - 1 and e its embedding in the
head. Then

    logits_j += W2 Wo silu(B n_j + We norm(e(x)) + p_j)        for j >= 1.

W2 = lm_head P has r columns and is computed once, so that a slot reads r numbers of each token of
the draft vocabulary; so is We norm(e(x)) of every token. The first draft follows a token that the
head has read and is left alone. docs/experiments.md has other forms. (Kin: the Markov heads of
DSpark and the selector of DFlash2.)

Shapes: ... leading dimensions, R paths (a chain is one path), J slots, D drafter width, W width of
the term, r its rank, V target and DV draft vocabulary; of trees B sequences, P nodes of a depth, C
candidates of a slot.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from peagle.kernels.sampling import at_least_float32
from peagle.kernels.trees import Children

CANDIDATES = 64  # of a slot of a tree: as many as a depth may hold nodes
_ROWS_AT_ONCE = 1 << 14  # of an embedding


class Correction(nn.Module):
    """The term, for slots 1 to `num_slots`; deeper slots take the last one's p.

    Args:
        hidden_size: D of the head.
        rank, width: r and W.
    """

    def __init__(self, hidden_size: int, *, rank: int, width: int, num_slots: int) -> None:
        super().__init__()
        self.states = nn.Linear(hidden_size, width, bias=False)  # B
        self.tokens = nn.Linear(hidden_size, width, bias=False)  # We
        self.slots = nn.Parameter(torch.zeros(num_slots, width))  # p
        self.down = nn.Linear(width, rank, bias=False)  # Wo
        self.up = nn.Linear(rank, hidden_size, bias=False)  # P

    @torch.no_grad()
    def reset(self, seed: int) -> None:
        """Draw first weights, with which the term is 0."""
        generator = torch.Generator().manual_seed(seed)
        for linear in (self.states, self.tokens, self.up):
            linear.weight.normal_(0, linear.in_features**-0.5, generator=generator)
        self.slots.zero_()
        self.down.weight.zero_()

    def forward(self, normed: Tensor, embedding: Tensor, slot: Tensor) -> Tensor:
        """Return the normed hidden states whose logits are the corrected ones, [..., D].

        Args:
            normed: n, [..., D].
            embedding: of the token drafted by the slot before, [..., D].
            slot: int64 [...], j; slot 0 is left alone.
        """
        inner = self.states(normed) + self.tokens(_scaled(embedding)) + _at(self.slots, slot)
        term = self.up(self.down(F.silu(inner)))
        return torch.where((slot > 0).unsqueeze(-1), normed + term, normed)


class DraftCorrection(nn.Module):
    """A correction made ready for drafting with its head.

    `start` sees the slots of a pass once; `add` then goes from one slot to the next, for any number
    of paths at once, each with the token that it chose. In trees `tree_children` goes from a depth
    to the next. No tensor is part of the head's checkpoint.

    Args:
        correction: on the device and in the type of the head.
        embedding_VD, lm_head_VD: weights of the head, [V, D] and [DV, D].

    Attributes:
        states_WD, slots_JW, down_rW: B, p and Wo.
        tokens_VW: We norm(e(x)) of every token.
        weight_Vr: W2, in the draft vocabulary.
    """

    states_WD: Tensor
    slots_JW: Tensor
    tokens_VW: Tensor
    down_rW: Tensor
    weight_Vr: Tensor

    @torch.no_grad()
    def __init__(self, correction: Correction, embedding_VD: Tensor, lm_head_VD: Tensor) -> None:
        super().__init__()
        parts = embedding_VD.split(_ROWS_AT_ONCE)
        for name, value in {
            "states_WD": correction.states.weight.detach(),
            "slots_JW": correction.slots.detach(),
            "tokens_VW": torch.cat([correction.tokens(_scaled(part)) for part in parts]),
            "down_rW": correction.down.weight.detach(),
            "weight_Vr": lm_head_VD @ correction.up.weight,
        }.items():
            self.register_buffer(name, value, persistent=False)

    def start(self, normed_RJD: Tensor) -> Tensor:
        """Return B n_j + p_j of every slot, [R, J, W]; that of slot 0 is not for use."""
        slot_J = torch.arange(normed_RJD.shape[1], device=normed_RJD.device)
        return F.linear(normed_RJD, self.states_WD) + _at(self.slots_JW, slot_J)

    def add(self, logits_RV: Tensor, states_RW: Tensor, tokens_R: Tensor) -> Tensor:
        """Return the corrected logits of one slot, [R, DV].

        Args:
            logits_RV: the head's own.
            states_RW: of the slot, from `start`.
            tokens_R: drafted by the slot before, target ids.
        """
        return torch.addmm(logits_RV, self._term(states_RW, tokens_R), self.weight_Vr.mT)

    def tree_children(
        self,
        logits_BJV: Tensor,
        states_BJW: Tensor,
        target_ids_V: Tensor,
        temperature: float,
    ) -> Children:
        """Return what finds the candidates after the nodes of trees, for `best_first_trees`.

        They are the C likeliest tokens of a slot by the head's own logits l, and alone corrected:

            log p(c | x) = a_c - log(sum_c exp(a_c) + sum_other exp(l / temperature))
            a_c = add(l, s, x)_c / temperature

        Args:
            logits_BJV: l, in the draft vocabulary.
            states_BJW: s, of the slots, from `start`.
            target_ids_V: the target id of every draft id.
        """
        scaled_BJV = at_least_float32(logits_BJV) / temperature
        columns_BJC = scaled_BJV.topk(min(CANDIDATES, scaled_BJV.shape[2]), -1).indices
        others_BJ = scaled_BJV.scatter(2, columns_BJC, -torch.inf).logsumexp(-1)

        def find(slot: int, tokens_BP: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
            columns_BC = columns_BJC[:, slot]
            term_BPr = self._term(states_BJW[:, slot, None], target_ids_V[tokens_BP])
            added_BPC = term_BPr @ self.weight_Vr[columns_BC].mT
            logits_B1C = logits_BJV[:, slot].gather(1, columns_BC).unsqueeze(1)
            scores_BPC = at_least_float32(logits_B1C + added_BPC) / temperature
            total_BP = torch.logaddexp(scores_BPC.logsumexp(-1), others_BJ[:, slot, None])
            logprobs_BPC = (scores_BPC - total_BP.unsqueeze(2)).nan_to_num(-torch.inf)
            return logprobs_BPC, columns_BC.unsqueeze(1).expand(logprobs_BPC.shape)

        return find

    def _term(self, states: Tensor, tokens: Tensor) -> Tensor:
        """Wo silu(s + We norm(e(x))), [..., r]."""
        return F.silu(states + self.tokens_VW[tokens]) @ self.down_rW.mT


def _at(slots_JW: Tensor, slot: Tensor) -> Tensor:
    """p of slots, [..., W]."""
    return slots_JW[(slot - 1).clamp(0, len(slots_JW) - 1)]


def _scaled(embedding: Tensor) -> Tensor:
    """embedding / its root mean square: models differ widely in the size of their embeddings."""
    return F.rms_norm(embedding, embedding.shape[-1:], eps=1e-12)
