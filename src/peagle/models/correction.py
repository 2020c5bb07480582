"""A correction of P-EAGLE's drafts: a draft learns which token was drafted before it.

The drafts of one pass do not see each other: each slot gives the distribution of its token over all
that may come before it. A small term mends part of that. Let n_j be the normed hidden state of slot
j = 0, 1, ..., x_j the token drafted by slot j - 1, and e its embedding in the head. Then

    logits_j += W2 Wo silu(B n_j + t_j + p_j),  t_j = We norm(e(x_j)),     for j >= 1,

so that a draft knows the one before it. W2 = lm_head P has r columns and is computed once, so that
a slot reads r numbers of each token of the draft vocabulary; so is t of every token. The first
draft follows a token that the head has read and is left alone. A correction is fitted on a frozen
head or trained with the head (`training.corrected_states`). docs/lab/bundled.md compares terms.
(Kin: the Markov heads of DSpark and the selector of DFlash2.)

Shapes: ... leading dimensions, R chains, J slots, D drafter width, W width of the term, r its rank,
V target and DV draft vocabulary; of trees B sequences, P nodes of a depth, C candidates of a slot.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from peagle.kernels.sampling.probabilities import at_least_float32
from peagle.kernels.trees.growth import After, Children, Ranked

CANDIDATES = 64  # of a slot of a tree: as many as a depth may hold nodes
_LIKELIEST = 12  # tokens of a slot of which `tree_search` computes at once what follows them
_ROWS_AT_ONCE = 1 << 14  # of an embedding


class Correction(nn.Module):
    """The term, for slots 1 to `num_slots`; deeper slots take the last one's p.

    Args:
        hidden_size: D of the head.
        rank, width: r and W.
    """

    def __init__(self, hidden_size: int, *, rank: int, width: int, num_slots: int) -> None:
        super().__init__()
        self.rank, self.width = rank, width
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

    def read(self, embedding: Tensor) -> Tensor:
        """Return t of tokens, [..., W], from their embeddings [..., D]."""
        return self.tokens(_scaled(embedding))

    def forward(self, normed: Tensor, embedding: Tensor, slot: Tensor) -> Tensor:
        """Return the normed hidden states whose logits are the corrected ones, [..., D].

        Args:
            normed: n, [..., D].
            embedding: e of the token drafted by the slot before, [..., D].
            slot: int64 [...], j; slot 0 is left alone.
        """
        inner = self.states(normed) + self.read(embedding) + self.of_slots(slot)
        corrected = normed + self.up(self.down(F.silu(inner)))
        return torch.where((slot > 0).unsqueeze(-1), corrected, normed)

    def of_slots(self, slot: Tensor) -> Tensor:
        """Return p of slots, [..., W]."""
        return self.slots[(slot - 1).clamp(0, len(self.slots) - 1)]


class DraftCorrection(nn.Module):
    """A correction made ready for drafting with its head.

    `start` sees the slots of a pass once; then `add` corrects one slot after the other, for any
    number of chains at once, each with the token that it chose. In trees `tree_children` goes from
    a depth to the next. No tensor is part of the head's checkpoint.

    It may hold several corrections of one head, of equal rank and width. Each tensor then has a
    first dimension of so many, and `which` says which one a chain or a sequence has; it is None
    where there is one.

    Args:
        correction: one or several, on the device and in the type of the head.
        embedding_VD, lm_head_VD: weights of the head, [V, D] and [DV, D].

    Attributes:
        tokens_VW: t of every token.
        weight_Vr: W2, in the draft vocabulary.
        states_WD, down_rW: B and Wo.
        slots_JW: p of slot 0, which is of no use, and of the others.
    """

    tokens_VW: Tensor
    weight_Vr: Tensor
    states_WD: Tensor
    slots_JW: Tensor
    down_rW: Tensor

    @torch.no_grad()
    def __init__(
        self,
        correction: Correction | Sequence[Correction],
        embedding_VD: Tensor,
        lm_head_VD: Tensor,
    ) -> None:
        super().__init__()
        every = [correction] if isinstance(correction, Correction) else correction
        parts, slots = embedding_VD.split(_ROWS_AT_ONCE), max(len(one.slots) for one in every)
        slot_J = torch.arange(slots + 1, device=embedding_VD.device)
        derived: dict[str, Callable[[Correction], Tensor]] = {
            "tokens_VW": lambda one: torch.cat([one.read(part) for part in parts]),
            "weight_Vr": lambda one: lm_head_VD @ one.up.weight,
            "states_WD": lambda one: one.states.weight.detach(),
            "slots_JW": lambda one: one.of_slots(slot_J),
            "down_rW": lambda one: one.down.weight.detach(),
        }
        for name, derive in derived.items():
            value = (
                derive(every[0]) if len(every) == 1 else _stacked(map(derive, every), len(every))
            )
            self.register_buffer(name, value, persistent=False)

    @property
    def has_choice(self) -> bool:
        """Return whether there are several corrections."""
        return self.down_rW.dim() == 3

    @property
    def weights(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the weights that kernels take: `tokens_VW`, `down_rW` and `weight_Vr`."""
        return self.tokens_VW, self.down_rW, self.weight_Vr

    def start(self, normed_RJD: Tensor, which_R: Tensor | None = None) -> Tensor:
        """Return B n_j + p_j of every slot, [R, J, W]; that of slot 0 is of no use.

        Args:
            which_R: int64, the number of each chain's correction.
        """
        slots_JW = self._slots(num_slots := normed_RJD.shape[1])
        if which_R is None:
            return F.linear(normed_RJD, self.states_WD) + slots_JW
        every_RJX = F.linear(normed_RJD, self.states_WD.flatten(0, 1))
        every_RJCW = every_RJX.unflatten(2, self.states_WD.shape[:2])
        at_R = _before(which_R, every_RJCW)
        own_RJ1W = every_RJCW.gather(2, at_R.expand(-1, num_slots, 1, every_RJCW.shape[3]))
        return own_RJ1W.squeeze(2) + slots_JW[which_R]

    def add(
        self,
        logits_RV: Tensor,
        states_RW: Tensor,
        tokens_R: Tensor,
        which_R: Tensor | None = None,
    ) -> Tensor:
        """Return the corrected logits of one slot, [R, DV].

        Args:
            logits_RV: the head's own.
            states_RW: of the slot, from `start`.
            tokens_R: drafted by the slot before, target ids.
            which_R: int64, the number of each chain's correction.
        """
        term_Rr = self._term(states_RW, tokens_R, which_R)
        if which_R is None:
            return torch.addmm(logits_RV, term_Rr, self.weight_Vr.mT)
        for number, weight_Vr in enumerate(self.weight_Vr):
            own_Rr = term_Rr.masked_fill((which_R != number).unsqueeze(1), 0)
            logits_RV = torch.addmm(logits_RV, own_Rr, weight_Vr.mT)
        return logits_RV

    def tree_children(
        self,
        logits_BJV: Tensor,
        states_BJW: Tensor,
        target_ids_V: Tensor,
        temperature: float,
        which_B: Tensor | None = None,
    ) -> Children:
        """Return a function that finds the candidates after nodes of trees, for `best_first_trees`.

        They are the C likeliest tokens of a slot by the head's own logits l, and alone corrected:

            log p(c | x) = a_c - log(sum_c exp(a_c) + sum_other exp(l / temperature))
            a_c = add(l, s, x)_c / temperature

        Args:
            logits_BJV: l, in the draft vocabulary.
            states_BJW: s, of the slots, from `start`.
            target_ids_V: the target id of every draft id.
            which_B: int64, the number of each sequence's correction.
        """
        given = logits_BJV, states_BJW, target_ids_V, temperature, which_B
        columns_BJC, logprobs = self._candidates(*given)

        def find(slot: int, tokens_BP: Tensor) -> tuple[Tensor, Tensor]:
            at = slice(None), slice(slot, slot + 1)
            found_BPC = logprobs(at, tokens_BP.unsqueeze(1)).squeeze(1)
            return found_BPC, columns_BJC[:, slot, None].expand(found_BPC.shape)

        return find

    def tree_search(
        self,
        logits_BJV: Tensor,
        states_BJW: Tensor,
        target_ids_V: Tensor,
        temperature: float,
        count: int,
        which_B: Tensor | None = None,
    ) -> After:
        """Return a function that finds `tree_children`'s `count` best candidates after one token.

        Those after the likeliest tokens of each slot are computed at once, the rest if asked for.
        """
        given = logits_BJV, states_BJW, target_ids_V, temperature, which_B
        columns_BJC, logprobs = self._candidates(*given)
        columns = columns_BJC.tolist()
        count = min(count, columns_BJC.shape[2])
        known: dict[tuple[int, int, int], tuple[list[float], list[int]]] = {}

        def learn(first: int, slot: int, tokens_BJP: Tensor) -> None:
            """Compute the candidates after tokens; they begin at sequence `first`, slot `slot`."""
            num_seqs, num_slots, _ = tokens_BJP.shape
            at = slice(first, first + num_seqs), slice(slot, slot + num_slots)
            best = logprobs(at, tokens_BJP).flatten(0, 2).topk(count)
            keys = (
                (b, j, token)
                for b, of_slots in enumerate(tokens_BJP.tolist(), start=first)
                for j, of_slot in enumerate(of_slots, start=slot)
                for token in of_slot
            )
            known.update(zip(keys, zip(best.values.tolist(), best.indices.tolist())))

        def after(b: int, slot: int, token: int) -> Ranked:
            if (b, slot, token) not in known:
                learn(b, slot, torch.tensor([[[token]]]))
            values, ranks = known[b, slot, token]
            return values, [columns[b][slot][rank] for rank in ranks]

        likeliest_BJP = columns_BJC[..., :_LIKELIEST].roll(1, 1)
        likeliest_BJP[:, 0] = 0  # any token will do before slot 0
        learn(0, 0, likeliest_BJP)
        return after

    def _candidates(
        self,
        logits_BJV: Tensor,
        states_BJW: Tensor,
        target_ids_V: Tensor,
        temperature: float,
        which_B: Tensor | None,
    ) -> tuple[Tensor, Callable[[tuple[slice, slice], Tensor], Tensor]]:
        """Return the candidates of each slot, likeliest first, and a function that finds their
        log-probabilities [B, J, P, C], for some sequences and slots, after tokens [B, J, P].

        Slot 0 has the same after every token.
        """
        scaled_BJV = at_least_float32(logits_BJV) / temperature
        columns_BJC = scaled_BJV.topk(min(CANDIDATES, scaled_BJV.shape[2]), -1).indices
        others_BJ11 = scaled_BJV.scatter(2, columns_BJC, -torch.inf).logsumexp(-1)[..., None, None]
        logits_BJC = logits_BJV.gather(2, columns_BJC)
        weight_BJrC = _rows(self.weight_Vr, columns_BJC, which_B).mT
        weight_BJrC[:, 0] = 0  # nothing is drafted before slot 0

        def logprobs(at: tuple[slice, slice], tokens_BJP: Tensor) -> Tensor:
            own_B = None if which_B is None else which_B[at[0]]
            term_BJPr = self._term(states_BJW[at].unsqueeze(2), target_ids_V[tokens_BJP], own_B)
            logits_BJPC = logits_BJC[at].unsqueeze(2) + term_BJPr @ weight_BJrC[at]
            scores_BJPC = at_least_float32(logits_BJPC) / temperature
            others_BJP1 = others_BJ11[at].expand(*scores_BJPC.shape[:3], 1)
            every_BJPX = torch.cat((scores_BJPC, others_BJP1), -1)
            return torch.log_softmax(every_BJPX, -1)[..., :-1].nan_to_num(-torch.inf)

        return columns_BJC, logprobs

    def _slots(self, count: int) -> Tensor:
        """Return p of the first slots, [..., J, W]."""
        known = self.slots_JW[..., :count, :]
        deeper = known[..., -1:, :].expand(*known.shape[:-2], count - known.shape[-2], -1)
        return torch.cat((known, deeper), -2) if deeper.numel() else known

    def _term(self, states: Tensor, tokens: Tensor, which_R: Tensor | None) -> Tensor:
        """Return the term before W2, [R, ..., r], of states and tokens of R chains."""
        inner = F.silu(states + _rows(self.tokens_VW, tokens, which_R))
        if which_R is None:
            return inner @ self.down_rW.mT
        if inner.dim() == 2:  # all products cost less than a copy of the weights for each row
            every_RX = F.linear(inner, self.down_rW.flatten(0, 1))
            every_RCr = every_RX.unflatten(1, self.down_rW.shape[:2])
            return every_RCr.take_along_dim(_before(which_R, every_RCr), 1).squeeze(1)
        return torch.einsum("r...w,rkw->r...k", inner, self.down_rW[which_R])


def _rows(table: Tensor, ids: Tensor, which_R: Tensor | None) -> Tensor:
    """Return rows of a table, [R, ..., x], each from the table of its chain."""
    if which_R is None:
        return F.embedding(ids, table)
    return table[_before(which_R, ids), ids]


def _before(which_R: Tensor, other: Tensor) -> Tensor:
    """Return the numbers of R chains with as many dimensions as a tensor of theirs."""
    return which_R.reshape(-1, *(1,) * (other.dim() - 1))


def _stacked(values: Iterable[Tensor], count: int) -> Tensor:
    """Return tensors of one shape as one. No two of them are in memory beside it."""
    out: Tensor | None = None
    for number, value in enumerate(values):
        out = value.new_empty(count, *value.shape) if out is None else out
        out[number] = value
    assert out is not None
    return out


def _scaled(embedding: Tensor) -> Tensor:
    """Return embedding / its root mean square: models differ widely in its size."""
    return F.rms_norm(embedding, embedding.shape[-1:], eps=1e-12)
