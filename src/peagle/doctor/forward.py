"""The drafts of a head on the training side: elements of the target's own answers.

Shapes: P prompts (a row each), N positions, C anchors of a prompt, K depths, M graded elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from peagle.doctor.head import Head
from peagle.doctor.probe import Probe
from peagle.models.drafter import Drafter
from peagle.models.elements import Elements, attention_mask
from peagle.training.batches import Batch
from peagle.training.config import MethodSection
from peagle.training.eagle3 import eagle3_graded
from peagle.training.element_attention import BlockTable, ElementAttention, dense_attention
from peagle.training.features import TargetStates
from peagle.training.partition import PartitionLayout, partitioned_graded
from peagle.training.training_methods import Graded, TrainingMethod

# Numbers that the logits of a chunk of elements may hold.
_LOGITS_AT_A_TIME = 1 << 25
# Log-probability of a token outside the draft vocabulary, and of all that is less likely.
WORST_LOGPROB = -12.0


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
        """Mean log-probability of the target's tokens, by prompt."""
        return self.logprobs.mean((1, 2))

    @property
    def accepted_PC(self) -> Tensor:
        """Draft tokens that verification accepts at each anchor."""
        return self.matches.int().cumprod(-1).sum(-1)

    @property
    def match_share(self) -> list[float]:
        """P(the draft at depth d is the target's token), whatever stands above it."""
        return self.matches.double().mean((0, 1)).tolist()

    @property
    def acceptance_length(self) -> float:
        """1 + accepted draft tokens per anchor, over all anchors."""
        return 1 + float(self.accepted_PC.double().mean())


@torch.no_grad()
def drafted(
    head: Head,
    probe: Probe,
    *,
    every_anchor: bool = False,
    foreign_features: bool = False,
) -> HeadDrafts:
    """Run the training-side forward pass of a head over a probe.

    Args:
        head: as it is, or changed.
        probe: texts of the target with its features.
        every_anchor: take all anchors of the answers, not only some.
        foreign_features: give each prompt the features of another one, which should make a head
            far worse.
    """
    reading, drafter = head.reading, head.drafter(probe.tokens_PN.device)
    anchors_PC = probe.all_anchors_PC if every_anchor else probe.anchors_PC
    batch = probe.batch(anchors_PC, reading.token_shift)
    features = probe.features(head.config.aux_layer_ids, reading.feature_shift).to(reading.dtype)
    if foreign_features:
        features = features.roll(1, dims=0)
    states = TargetStates(features, features[..., :0])
    shape = (*anchors_PC.shape, probe.num_drafts)
    draft_ids = torch.zeros(shape, dtype=torch.int64, device=probe.tokens_PN.device)
    logprobs = torch.full(shape, WORST_LOGPROB, dtype=torch.float64, device=probe.tokens_PN.device)
    column_PN = probe.column_of(anchors_PC)
    for graded in _graded(drafter, head, batch, states, probe.num_drafts):
        chosen = graded.selected
        at = (chosen.row, column_PN[chosen.row, chosen.anchor], chosen.depth)
        truth_M = probe.tokens_PN[chosen.row, chosen.anchor + chosen.depth + 2]
        draft_ids[at], logprobs[at] = _choose(drafter, graded.hidden_MD, truth_M)
    tokens = drafter.target_ids()[draft_ids]
    matches = tokens == probe.truth(anchors_PC)
    return HeadDrafts(draft_ids.cpu(), tokens.cpu(), matches.cpu(), logprobs.cpu())


def _graded(
    drafter: Drafter, head: Head, batch: Batch, states: TargetStates, num_drafts: int
) -> Iterator[Graded]:
    window = head.reading.window
    attention = dense_attention if window is None else _windowed_attention(window)
    kind = "peagle" if head.config.is_parallel else "eagle3"
    section = MethodSection.model_validate({"name": kind, "depth": num_drafts})
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
    """Draft ids of these hidden states, and the log-probability of what the target says."""
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
            groups = query.shape[2] // key.shape[2]
            parts = (query, *(x.repeat_interleave(groups, dim=2) for x in (key, value)))
            q, k, v = (x.transpose(1, 2) for x in parts)
            attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            return attended.transpose(1, 2)

        return attend

    return attention
