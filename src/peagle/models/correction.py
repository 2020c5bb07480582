"""A correction of P-EAGLE's drafts: a draft learns which tokens were drafted before it.

The drafts of one pass do not see each other: each slot gives the distribution of its token over all
that may come before it. A small term mends part of that. Let n_j be the normed hidden state of slot
j = 0, 1, ..., x_j the token drafted by slot j - 1, e its embedding in the head, and t_j =
We norm(e(x_j)). Then

    logits_j += W2 r_j                                         for j >= 1,

where the forms of the correction have

    markov:     r_j = t_j
    gated:      r_j = Wo silu(B n_j + t_j + p_j)
    diagonal:   r_j = Wo silu(B n_j + s_j + p_j)
                s_j = a * s_(j-1) + t_j,  s_0 = 0, a a number of each channel
    recurrent:  r_j = Wo silu(B n_j + t_j + Ws s_j + p_j)
                s_j = GRU(t_j, s_(j-1)),  s_0 = tanh(A n_0)

so that a draft knows the one before it, in the last two forms all drafts on its path. W2 = lm_head
P has r columns and is computed once, so that a slot reads r numbers of each token of the draft
vocabulary; so is t of every token. The first draft follows a token that the head has read and is
left alone. A correction is fitted on a frozen head or trained with the head
(`training.corrected_states`). docs/lab/bundled.md compares forms. (Kin: the Markov heads of DSpark
and the selector of DFlash2; GRU: Cho et al., 2014.)

Shapes: ... leading dimensions, R paths (a chain is one path), J slots, D drafter width, W width of
the term (r in the Markov form), r its rank, V target and DV draft vocabulary; of trees B sequences,
P nodes of a depth, C candidates of a slot.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from peagle.kernels.sampling.probabilities import at_least_float32
from peagle.kernels.trees.growth import After, Children, Ranked
from peagle.models.correction_form import CorrectionForm

CANDIDATES = 64  # of a slot of a tree: as many as a depth may hold nodes
_LIKELIEST = 12  # tokens of a slot of which `tree_search` computes at once what follows them
_ROWS_AT_ONCE = 1 << 14  # of an embedding
_GRU = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")  # as torch.gru_cell takes them


class Correction(nn.Module):
    """The term, for slots 1 to `num_slots`; deeper slots take the last one's p.

    Args:
        hidden_size: D of the head.
        rank, width: r and W; the Markov form has no width of its own.
        form: which form.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        rank: int,
        width: int,
        num_slots: int,
        form: CorrectionForm = "gated",
    ) -> None:
        super().__init__()
        self.form: CorrectionForm = form
        self.rank = rank
        self.width = width = rank if form == "markov" else width
        self.tokens = nn.Linear(hidden_size, width, bias=False)  # We
        self.up = nn.Linear(rank, hidden_size, bias=False)  # P
        if form == "markov":
            return
        self.states = nn.Linear(hidden_size, width, bias=False)  # B
        self.slots = nn.Parameter(torch.zeros(num_slots, width))  # p
        self.down = nn.Linear(width, rank, bias=False)  # Wo
        if form == "diagonal":
            self.decay = nn.Parameter(torch.zeros(width))  # a
        if form == "recurrent":
            self.begin = nn.Linear(hidden_size, width, bias=False)  # A
            self.gru = nn.GRUCell(width, width)
            self.path = nn.Linear(width, width, bias=False)  # Ws

    @property
    def follows_paths(self) -> bool:
        """Return whether the term depends on all tokens of a path, not on the last alone."""
        return self.form in ("diagonal", "recurrent")

    @torch.no_grad()
    def reset(self, seed: int) -> None:
        """Draw first weights, with which the term is 0."""
        generator = torch.Generator().manual_seed(seed)
        names = ("states", "tokens", "up", "begin", "path")
        modules = [getattr(self, name) for name in names if hasattr(self, name)]
        matrices = [module.weight for module in modules]
        if self.form == "recurrent":
            matrices += [self.gru.weight_ih, self.gru.weight_hh]
            self.gru.bias_ih.zero_()
            self.gru.bias_hh.zero_()
        for matrix in matrices:
            matrix.normal_(0, matrix.shape[1] ** -0.5, generator=generator)
        if self.form == "diagonal":
            self.decay.copy_(torch.linspace(0, 1, len(self.decay) + 1)[:-1])
        if self.form == "markov":
            self.tokens.weight.zero_()
        else:
            self.slots.zero_()
            self.down.weight.zero_()

    def read(self, embedding: Tensor) -> Tensor:
        """Return t of tokens, [..., W], from their embeddings [..., D]."""
        return self.tokens(_scaled(embedding))

    def forward(
        self, normed: Tensor, token: Tensor, slot: Tensor, path: Tensor | None = None
    ) -> Tensor:
        """Return the normed hidden states whose logits are the corrected ones, [..., D].

        Args:
            normed: n, [..., D].
            token: t of the token drafted by the slot before, [..., W].
            slot: int64 [...], j; slot 0 is left alone.
            path: s, [..., W], of the form that follows paths.
        """
        inner = token
        if self.form != "markov":
            last = token if self.form != "diagonal" or path is None else path
            inner = self.states(normed) + last + self.of_slots(slot)
            if self.form == "recurrent" and path is not None:
                inner = inner + self.path(path)
            inner = self.down(F.silu(inner))
        return torch.where((slot > 0).unsqueeze(-1), normed + self.up(inner), normed)

    def of_slots(self, slot: Tensor) -> Tensor:
        """Return p of slots, [..., W]."""
        return _at(self.slots, slot)

    def begin_paths(self, normed: Tensor) -> Tensor | None:
        """Return s_0 of n_0, [..., W]; None for a form that follows no paths."""
        if self.form == "diagonal":
            return normed.new_zeros(*normed.shape[:-1], len(self.decay))
        return torch.tanh(self.begin(normed)) if self.follows_paths else None

    def follow(self, path: Tensor, token: Tensor) -> Tensor:
        """Return s of paths [R, W] that go on with tokens of t [R, W]."""
        if self.form == "diagonal":
            return torch.addcmul(token, self.decay, path)
        return self.gru(token, path)


class DraftCorrection(nn.Module):
    """A correction made ready for drafting with its head.

    `start` sees the slots of a pass once; a walk then goes from one slot to the next, for any
    number of paths at once, each with the token that it chose: `follow` first, then `add`. In trees
    `tree_children` goes from a depth to the next. No tensor is part of the head's checkpoint.

    Args:
        correction: on the device and in the type of the head.
        embedding_VD, lm_head_VD: weights of the head, [V, D] and [DV, D].

    Attributes:
        form: which form.
        tokens_VW: t of every token.
        weight_Vr: W2, in the draft vocabulary.
        states_WD, slots_JW, down_rW: B, p and Wo; None in the Markov form.
        decay_W: a; None in forms without.
        begin_WD, path_WW, gru: A, Ws and the GRU's weights; None in forms that follow no paths.
    """

    tokens_VW: Tensor
    weight_Vr: Tensor
    states_WD: Tensor | None
    slots_JW: Tensor | None
    down_rW: Tensor | None
    decay_W: Tensor | None
    begin_WD: Tensor | None
    path_WW: Tensor | None

    @torch.no_grad()
    def __init__(self, correction: Correction, embedding_VD: Tensor, lm_head_VD: Tensor) -> None:
        super().__init__()
        self.form = correction.form
        own = {name: value.detach() for name, value in correction.named_parameters()}
        parts = embedding_VD.split(_ROWS_AT_ONCE)
        for name, value in {
            "tokens_VW": torch.cat([correction.read(part) for part in parts]),
            "weight_Vr": lm_head_VD @ correction.up.weight,
            "states_WD": own.get("states.weight"),
            "slots_JW": own.get("slots"),
            "down_rW": own.get("down.weight"),
            "decay_W": own.get("decay"),
            "begin_WD": own.get("begin.weight"),
            "path_WW": own.get("path.weight"),
            **{name: own.get(f"gru.{name}") for name in _GRU},
        }.items():
            self.register_buffer(name, value, persistent=False)

    @property
    def follows_paths(self) -> bool:
        """Return whether the term depends on all tokens of a path, not on the last alone."""
        return self.form in ("diagonal", "recurrent")

    @property
    def has_kernels(self) -> bool:
        """Return whether kernels walk chains and grow trees with this form."""
        return self.form != "recurrent"

    def start(self, normed_RJD: Tensor) -> Tensor:
        """Return B n_j + p_j of every slot, [R, J, W].

        Slot 0 has s_0 in its place where the form follows paths, else nothing of use. In the Markov
        form W is 0.
        """
        if self.states_WD is None or self.slots_JW is None:
            return normed_RJD[..., :0]
        slot_J = torch.arange(normed_RJD.shape[1], device=normed_RJD.device)
        states_RJW = F.linear(normed_RJD, self.states_WD) + _at(self.slots_JW, slot_J)
        if self.decay_W is not None:
            states_RJW[:, 0] = 0
        if self.begin_WD is not None:
            states_RJW[:, 0] = torch.tanh(F.linear(normed_RJD[:, 0], self.begin_WD))
        return states_RJW

    def follow(self, states_RW: Tensor, path_RW: Tensor, tokens_R: Tensor) -> tuple[Tensor, Tensor]:
        """Return the state of a slot for `add`, and s of paths that go on with tokens, [R, W] both.

        Forms that follow no paths return what they get.

        Args:
            states_RW: of the slot, from `start`.
            path_RW: s of the slot before; for slot 1 that is slot 0 of `start`.
            tokens_R: drafted by the slot before, target ids.
        """
        if not self.follows_paths:
            return states_RW, path_RW
        # Any token will do where a captured step has no draft.
        token_RW = F.embedding(tokens_R.clamp(0, len(self.tokens_VW) - 1), self.tokens_VW)
        if self.decay_W is not None:
            before_RW = self.decay_W * path_RW
            return states_RW + before_RW, before_RW + token_RW
        assert self.path_WW is not None
        weights = [getattr(self, name) for name in _GRU]
        path_RW = torch.gru_cell(token_RW, path_RW, *weights)
        return states_RW + F.linear(path_RW, self.path_WW), path_RW

    def add(self, logits_RV: Tensor, states_RW: Tensor, tokens_R: Tensor) -> Tensor:
        """Return the corrected logits of one slot, [R, DV].

        Args:
            logits_RV: the head's own.
            states_RW: of the slot, from `follow`.
            tokens_R: drafted by the slot before, target ids.
        """
        return torch.addmm(logits_RV, self._term(states_RW, tokens_R), self.weight_Vr.mT)

    def tree_children(
        self, logits_BJV: Tensor, states_BJW: Tensor, target_ids_V: Tensor, temperature: float
    ) -> Children:
        """Return a function that finds the candidates after nodes of trees, for `best_first_trees`.

        They are the C likeliest tokens of a slot by the head's own logits l, and alone corrected:

            log p(c | x) = a_c - log(sum_c exp(a_c) + sum_other exp(l / temperature))
            a_c = add(l, s, x)_c / temperature

        Args:
            logits_BJV: l, in the draft vocabulary.
            states_BJW: s, of the slots, from `start`.
            target_ids_V: the target id of every draft id.
        """
        columns_BJC, logprobs = self._candidates(logits_BJV, target_ids_V, temperature)
        path_BPW = states_BJW[:, :1]  # of the nodes of the depth before

        def find(slot: int, tokens_BP: Tensor, behind_BP: Tensor) -> tuple[Tensor, Tensor]:
            nonlocal path_BPW
            states_BPW = states_BJW[:, slot, None].expand(*tokens_BP.shape, states_BJW.shape[2])
            if self.follows_paths:
                at_BPW = behind_BP.clamp_max(path_BPW.shape[1] - 1).unsqueeze(2)
                path_BPW = path_BPW.gather(1, at_BPW.expand_as(states_BPW))
                states_BPW, path_BPW = self._follow_all(
                    states_BPW, path_BPW, target_ids_V[tokens_BP]
                )
            at = slice(None), slice(slot, slot + 1)
            found_BPC = logprobs(at, states_BPW.unsqueeze(1), tokens_BP.unsqueeze(1)).squeeze(1)
            return found_BPC, columns_BJC[:, slot, None].expand(found_BPC.shape)

        return find

    def tree_search(
        self,
        logits_BJV: Tensor,
        states_BJW: Tensor,
        target_ids_V: Tensor,
        temperature: float,
        count: int,
    ) -> After:
        """Return a function that finds `tree_children`'s `count` best candidates after one path.

        Where a token's candidates depend on no other token, those after the likeliest tokens of
        each slot are computed at once, the rest if asked for. Slot 0 has candidates of its own.
        """
        columns_BJC, logprobs = self._candidates(logits_BJV, target_ids_V, temperature)
        columns = columns_BJC.tolist()
        count = min(count, columns_BJC.shape[2])
        known: dict[tuple[int, int, tuple[int, ...]], tuple[list[float], list[int]]] = {}
        paths: dict[tuple[int, tuple[int, ...]], Tensor] = {}

        def learn(first: int, slot: int, states_BJPW: Tensor, tokens_BJP: Tensor) -> None:
            """Compute the candidates after tokens; they begin at sequence `first`, slot `slot`."""
            num_seqs, num_slots, _ = tokens_BJP.shape
            at = slice(first, first + num_seqs), slice(slot, slot + num_slots)
            best = logprobs(at, states_BJPW, tokens_BJP).flatten(0, 2).topk(count)
            keys = (
                (b, j, (token,))
                for b, of_slots in enumerate(tokens_BJP.tolist(), start=first)
                for j, of_slot in enumerate(of_slots, start=slot)
                for token in of_slot
            )
            known.update(zip(keys, zip(best.values.tolist(), best.indices.tolist())))

        def after(b: int, path: tuple[int, ...]) -> Ranked:
            slot = len(path)
            key = path if self.follows_paths else path[-1:]
            if not slot:
                key = (columns[b][-1][0],)  # any that is known
            elif (b, slot, key) not in known:
                states_1W = states_BJW[b, slot, None]
                token = torch.tensor(path[-1:])
                if self.follows_paths:
                    before_1W = paths.get((b, path[:-1]), states_BJW[b, 0, None])
                    states_1W, paths[b, path] = self.follow(
                        states_1W, before_1W, target_ids_V[token]
                    )
                learn(b, slot, states_1W.view(1, 1, 1, -1), token.view(1, 1, 1))
                known[b, slot, key] = known[b, slot, path[-1:]]
            values, ranks = known[b, slot, key]
            return values, [columns[b][slot][rank] for rank in ranks]

        likeliest_BJP = columns_BJC[..., :_LIKELIEST].roll(1, 1)
        if self.follows_paths:
            likeliest_BJP = likeliest_BJP[:, :1, :1]  # of slot 0, which follows no path
        states_BJPW = states_BJW[:, : likeliest_BJP.shape[1]].unsqueeze(2)
        learn(0, 0, states_BJPW, likeliest_BJP)
        return after

    def _candidates(
        self, logits_BJV: Tensor, target_ids_V: Tensor, temperature: float
    ) -> tuple[Tensor, Callable[[tuple[slice, slice], Tensor, Tensor], Tensor]]:
        """Return the candidates of each slot, likeliest first, and what finds their
        log-probabilities [B, J, P, C], for some sequences and slots, after tokens [B, J, P] with
        states of `follow` [B, J, P or 1, W].
        """
        scaled_BJV = at_least_float32(logits_BJV) / temperature
        columns_BJC = scaled_BJV.topk(min(CANDIDATES, scaled_BJV.shape[2]), -1).indices
        others_BJ11 = scaled_BJV.scatter(2, columns_BJC, -torch.inf).logsumexp(-1)[..., None, None]
        logits_BJC = logits_BJV.gather(2, columns_BJC)
        weight_BJrC = F.embedding(columns_BJC, self.weight_Vr).mT
        weight_BJrC[:, 0] = 0  # nothing is drafted before slot 0

        def logprobs(at: tuple[slice, slice], states_BJPW: Tensor, tokens_BJP: Tensor) -> Tensor:
            term_BJPr = self._term(states_BJPW, target_ids_V[tokens_BJP])
            logits_BJPC = logits_BJC[at].unsqueeze(2) + term_BJPr @ weight_BJrC[at]
            scores_BJPC = at_least_float32(logits_BJPC) / temperature
            others_BJP1 = others_BJ11[at].expand(*scores_BJPC.shape[:3], 1)
            every_BJPX = torch.cat((scores_BJPC, others_BJP1), -1)
            return torch.log_softmax(every_BJPX, -1)[..., :-1].nan_to_num(-torch.inf)

        return columns_BJC, logprobs

    def _follow_all(
        self, states_BPW: Tensor, path_BPW: Tensor, tokens_BP: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Call `follow` for the nodes of several sequences."""
        flat = (x.flatten(0, 1) for x in (states_BPW, path_BPW, tokens_BP))
        states_RW, path_RW = self.follow(*flat)
        return states_RW.view_as(states_BPW), path_RW.view_as(path_BPW)

    def _term(self, states: Tensor, tokens: Tensor) -> Tensor:
        """Return the term before W2, [..., r]."""
        embedded = F.embedding(tokens, self.tokens_VW)
        if self.down_rW is None:
            return embedded
        return F.silu(states + embedded) @ self.down_rW.mT


def _at(slots_JW: Tensor, slot: Tensor) -> Tensor:
    """Return p of slots, [..., W]."""
    return slots_JW[(slot - 1).clamp(0, len(slots_JW) - 1)]


def _scaled(embedding: Tensor) -> Tensor:
    """Return embedding / its root mean square: models differ widely in its size."""
    return F.rms_norm(embedding, embedding.shape[-1:], eps=1e-12)
