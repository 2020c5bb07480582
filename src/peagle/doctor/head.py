"""A head as its files have it, which can be changed in one respect, and its drafts on a probe.

Shapes: A aux states, H target width, D drafter width, DV draft vocabulary; P prompts, N positions,
C anchors of a prompt, K depths, M graded elements.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.data.batches import Batch
from peagle.data.features import TargetStates
from peagle.doctor.probe import Probe
from peagle.models.checkpoint.weights import fill
from peagle.models.drafter import Drafter, DrafterConfig
from peagle.models.elements import Elements, attention_mask
from peagle.training.config import MethodSection
from peagle.training.element_attention import BlockTable, ElementAttention, dense_attention
from peagle.training.partition import PartitionLayout, partitioned_graded
from peagle.training.training_methods import Graded, TrainingMethod, eagle3_graded

SharedState = Literal["fc", "fc without norm", "no fc"]

# Numbers that the logits of a chunk of elements may hold.
_LOGITS_AT_A_TIME = 1 << 25
# Log-probability of a token outside the draft vocabulary, and of all that is less likely.
WORST_LOGPROB = -12.0


@dataclass(frozen=True, slots=True)
class Head:
    """A head, and the way in which a runtime reads it.

    Attributes:
        tensors: weights by checkpoint name, all that `config` asks for.
        token_shift: 1 gives slot p the token x[p] where the method says x[p+1].
        feature_shift: 1 gives slot p the feature g[p-1] where the method says g[p].
        window: positions that a slot of the drafter looks back on; None is all.
        shared_state: the state of mask slots: "fc" is the method's, fc(norm(mask_hidden)); "no fc"
            takes the first D numbers of mask_hidden as they are.
        dtype: type of the computation.
    """

    config: DrafterConfig
    tensors: Mapping[str, Tensor]
    token_shift: int = 0
    feature_shift: int = 0
    window: int | None = None
    shared_state: SharedState = "fc"
    dtype: torch.dtype = torch.float32

    def configured(self, **changes: Any) -> Self:
        """Return the head with other values in its configuration."""
        return replace(self, config=replace(self.config, **changes))

    def read(self, **changes: Any) -> Self:
        """Return the head with other attributes."""
        return replace(self, **changes)

    def filled(self, tensors: Mapping[str, Tensor]) -> Self:
        """Return the head with other tensors under these names."""
        return replace(self, tensors={**self.tensors, **tensors})

    def target_ids(self) -> Tensor:
        """Return the target id of every draft id, int64 [DV]."""
        ids = torch.arange(self.config.draft_vocab_size)
        return ids + self.tensors["d2t"] if self.config.is_pruned else ids

    def with_target_ids(self, ids: Tensor) -> Self:
        """Return the head with another draft vocabulary."""
        kept = torch.zeros(self.config.vocab_size, dtype=torch.bool)
        kept[ids] = True
        return self.filled({"d2t": ids - torch.arange(len(ids)), "t2d": kept})

    def drafter(self, device: torch.device) -> Drafter:
        """Return the module, ready to run."""
        with torch.device("meta"):
            drafter = _ReadDrafter(self.config).to(self.dtype)
        drafter.to_empty(device=device)
        drafter.shared_state = self.shared_state
        fill(drafter, self.tensors)
        return drafter.requires_grad_(False).eval()


class _ReadDrafter(Drafter):
    """A drafter that may read mask_hidden otherwise than the method has it."""

    shared_state: SharedState = "fc"

    def shared_hidden(self) -> Tensor:
        if self.shared_state == "fc":
            return super().shared_hidden()
        assert self.mask_hidden is not None
        if self.shared_state == "fc without norm":
            return self.fc(self.mask_hidden).flatten()
        return self.mask_hidden.flatten()[: self.config.hidden_size]


# ---- its drafts ----


@dataclass(frozen=True, slots=True)
class HeadDrafts:
    """The drafts of a head at the anchors of a probe, all [P, C, K].

    Attributes:
        draft_ids, tokens: greedy drafts, as draft ids and as target ids.
        matches: whether they are the target's tokens.
        logprobs: log-probabilities of the target's tokens, clamped at WORST_LOGPROB.
    """

    draft_ids: Tensor
    tokens: Tensor
    matches: Tensor
    logprobs: Tensor

    @property
    def score_P(self) -> Tensor:
        """Return the mean log-probability of the target's tokens, by prompt."""
        return self.logprobs.mean((1, 2))

    @property
    def accepted_PC(self) -> Tensor:
        """Return the number of draft tokens that verification accepts at each anchor."""
        return self.matches.int().cumprod(-1).sum(-1)

    @property
    def match_share(self) -> list[float]:
        """P(the draft at depth d is the target's token), whatever stands above it."""
        return self.matches.double().mean((0, 1)).tolist()

    @property
    def acceptance_length(self) -> float:
        """1 + accepted draft tokens per anchor, over all anchors."""
        return 1 + float(self.accepted_PC.double().mean())

    def __str__(self) -> str:
        shares = " ".join(f"{value:.0%}" for value in self.match_share)
        length = f"acceptance length {self.acceptance_length:.2f} at every anchor"
        return f"{length}, matches by depth {shares}"


@torch.no_grad()
def drafted(
    head: Head, probe: Probe, *, every_anchor: bool = False, foreign_features: bool = False
) -> HeadDrafts:
    """Run the training-side forward pass of a head over a probe.

    Args:
        every_anchor: take all anchors of the answers, not only some.
        foreign_features: give each prompt the features of another one, with which a head should do
            far worse.
    """
    device = probe.tokens_PN.device
    drafter = head.drafter(device)
    anchors_PC = probe.all_anchors_PC if every_anchor else probe.anchors_PC
    batch = probe.batch(anchors_PC, head.token_shift)
    features = probe.features(head.config.aux_layer_ids, head.feature_shift).to(head.dtype)
    if foreign_features:
        features = features.roll(1, dims=0)
    states = TargetStates(features, features[..., :0])
    shape = (*anchors_PC.shape, probe.k)
    draft_ids = torch.zeros(shape, dtype=torch.int64, device=device)
    logprobs = torch.full(shape, WORST_LOGPROB, dtype=torch.float64, device=device)
    columns_PC = torch.arange(anchors_PC.shape[1], device=device).expand_as(anchors_PC)
    column_PN = torch.zeros_like(probe.tokens_PN).scatter(1, anchors_PC, columns_PC)
    for graded in _graded(drafter, head, batch, states, probe.k):
        chosen = graded.selected
        at = (chosen.row, column_PN[chosen.row, chosen.anchor], chosen.depth)
        truth_M = probe.tokens_PN[chosen.row, chosen.anchor + chosen.depth + 2]
        draft_ids[at], logprobs[at] = _choose(drafter, graded.hidden_MD, truth_M)
    tokens = drafter.target_ids()[draft_ids]
    matches = tokens == probe.truth(anchors_PC)
    return HeadDrafts(draft_ids.cpu(), tokens.cpu(), matches.cpu(), logprobs.cpu())


def _graded(
    drafter: Drafter, head: Head, batch: Batch, states: TargetStates, k: int
) -> Iterator[Graded]:
    window = head.window
    if window is not None and window >= batch.tokens_BN.shape[1]:
        window = None  # it hides nothing
    attention = dense_attention if window is None else _windowed_attention(window)
    kind = "peagle" if head.config.is_parallel else "eagle3"
    section = MethodSection.model_validate({"name": kind, "depth": k})
    method = TrainingMethod(section, attention)
    if kind == "eagle3":
        yield eagle3_graded(drafter, batch, states, method)
        return
    elements = method.elements(batch, None, everything=True)
    layout = PartitionLayout.of(elements, batch.tokens_BN.shape[1], 1, method)
    # Only the general path asks `method` how elements attend.
    layout = replace(layout, is_causal=window is None and layout.is_causal)
    yield from partitioned_graded(drafter, batch, states, layout, method)


def _choose(drafter: Drafter, hidden_MD: Tensor, truth_M: Tensor) -> tuple[Tensor, Tensor]:
    """Return the draft ids of hidden states, and the log-probabilities of the target's tokens."""
    size = drafter.config.draft_vocab_size
    ids = drafter.target_ids()
    draft_of = torch.full((drafter.config.vocab_size,), -1, device=ids.device)
    draft_of[ids] = torch.arange(size, device=ids.device)
    drafts, logprobs = [], []
    rows = max(1, _LOGITS_AT_A_TIME // size)
    for hidden, truth in zip(hidden_MD.split(rows), truth_M.split(rows), strict=True):
        scores = drafter.compute_logits(hidden).float().log_softmax(-1)
        drafts.append(scores.argmax(-1))
        place = draft_of[truth]
        logprob = scores.gather(1, place.clamp_min(0).unsqueeze(1)).squeeze(1)
        logprobs.append(logprob.masked_fill(place < 0, WORST_LOGPROB))
    logprob_M = torch.cat(logprobs).double().nan_to_num(WORST_LOGPROB, neginf=WORST_LOGPROB)
    return torch.cat(drafts), logprob_M.clamp_min(WORST_LOGPROB)


def _windowed_attention(window: int) -> Callable[..., ElementAttention]:
    """Return the attention rule that looks no further back than the window."""

    def attention(queries: Elements, keys: Elements, blocks: BlockTable | None) -> ElementAttention:
        distance = queries.positions.unsqueeze(2) - keys.positions.unsqueeze(1)
        mask = attention_mask(queries, keys) & (distance < window).unsqueeze(1)

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            parts = (x.transpose(1, 2) for x in (query, key, value))
            out = F.scaled_dot_product_attention(*parts, attn_mask=mask, enable_gqa=True)
            return out.transpose(1, 2)

        return attend

    return attention
