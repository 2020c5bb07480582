"""The probe on which heads are tried: prompts, the target's greedy answers, and its features.

Shapes: P prompts (a row each, padded at its end), N positions, C anchors of a prompt, K drafts, H
target width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from peagle.models.target import TargetModel
from peagle.training.batches import Batch, Place
from peagle.training.features import target_states


@dataclass(frozen=True)
class Probe:
    """Texts of the target and what it sees in them.

    Attributes:
        tokens_PN: prompt and answer.
        lengths, prompt_lens: of each row.
        entering: by layer, the hidden states that enter it, [P, N, H].
        confidence_PN: probability of the token at each position, under the target.
        num_drafts: K.
        anchors_PC: anchors that are tried, the same number of each prompt.
    """

    tokens_PN: Tensor
    lengths: tuple[int, ...]
    prompt_lens: tuple[int, ...]
    entering: dict[int, Tensor]
    confidence_PN: Tensor
    num_drafts: int
    anchors_PC: Tensor

    @cached_property
    def all_anchors_PC(self) -> Tensor:
        """Every anchor that all prompts have: with K tokens of the answer behind it."""
        return _anchors(self.lengths, self.prompt_lens, self.num_drafts, 1).to(
            self.tokens_PN.device
        )

    def features(self, layers: Sequence[int], shift: int = 0) -> Tensor:
        """Return aux features of these layers, [P, N, A * H], of `shift` positions before each."""
        return torch.cat([self.entering[layer] for layer in layers], dim=-1).roll(shift, dims=1)

    def part(self, step: int) -> Probe:
        """Return every `step`th prompt of it, from the first."""
        rows = slice(None, None, step)
        width = max(self.lengths[rows])
        return replace(
            self,
            tokens_PN=self.tokens_PN[rows, :width],
            lengths=self.lengths[rows],
            prompt_lens=self.prompt_lens[rows],
            entering={layer: x[rows, :width] for layer, x in self.entering.items()},
            confidence_PN=self.confidence_PN[rows, :width],
            anchors_PC=self.anchors_PC[rows],
        )

    def column_of(self, anchors_PC: Tensor) -> Tensor:
        """Return the column of each position in `anchors_PC`, int64 [P, N]; 0 where it has none."""
        columns = torch.arange(anchors_PC.shape[1], device=self.tokens_PN.device)
        empty = torch.zeros_like(self.tokens_PN)
        return empty.scatter(1, anchors_PC, columns.expand_as(anchors_PC))

    def truth(self, anchors_PC: Tensor) -> Tensor:
        """Return the target's K tokens behind each anchor, [P, C, K]."""
        depths_K = torch.arange(self.num_drafts, device=self.tokens_PN.device)
        at_PCK = anchors_PC.unsqueeze(-1) + depths_K + 2
        return self.tokens_PN.gather(1, at_PCK.flatten(1)).view(at_PCK.shape)

    def batch(self, anchors_PC: Tensor, token_shift: int = 0) -> Batch:
        """Return the rows as training has them, these anchors supervised at every depth."""
        deepest_PN = torch.full_like(self.tokens_PN, -1)
        deepest_PN.scatter_(1, anchors_PC, self.num_drafts - 1)
        places = tuple(Place(row, row, 0, length) for row, length in enumerate(self.lengths))
        return Batch(
            tokens_BN=self.tokens_PN.roll(token_shift, dims=1),
            documents_BN=_documents(self.lengths, self.tokens_PN.shape[1], self.tokens_PN.device),
            deepest_BN=deepest_PN,
            places=places,
            max_anchors=anchors_PC.shape[1],
            first_row=0,
            num_rows=len(places),
        )


@torch.no_grad()
def make_probe(
    target: TargetModel,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    layers: Sequence[int],
    num_drafts: int,
    *,
    stride: int = 2,
) -> Probe:
    """Run the target over prompts and answers.

    Args:
        target: its taps are put back as they were.
        prompts, answers: token ids; an answer has at least K + 2 tokens.
        layers: those whose entering states are kept, ascending.
        num_drafts: K.
        stride: step between the anchors that are tried.
    """
    texts = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    lengths, prompt_lens = tuple(map(len, texts)), tuple(map(len, prompts))
    width = max(lengths)
    tokens_PN = torch.tensor([text + [0] * (width - len(text)) for text in texts])
    anchors_PC = _anchors(lengths, prompt_lens, num_drafts, stride)
    tokens_PN, anchors_PC = tokens_PN.to(target.device), anchors_PC.to(target.device)
    places = tuple(Place(row, row, 0, length) for row, length in enumerate(lengths))
    documents_PN = _documents(lengths, width, target.device)
    nothing_PN = torch.full_like(tokens_PN, -1)
    batch = Batch(tokens_PN, documents_PN, nothing_PN, places, 1, 0, len(places))
    before = target.aux_layer_ids
    target.tap_aux(layers)
    try:
        states = target_states(target, batch)
    finally:
        target.tap_aux(before)
    parts = states.features_BNA.split(target.hidden_size, dim=-1)
    confidence_PN = torch.zeros(tokens_PN.shape, dtype=torch.float32, device=target.device)
    for row in range(len(texts)):
        logits = target.compute_logits(states.hidden_BNH[row, :-1]).float()
        next_N = tokens_PN[row, 1:]
        confidence_PN[row, 1:] = logits.softmax(-1).gather(1, next_N.unsqueeze(1)).squeeze(1)
    return Probe(
        tokens_PN,
        lengths,
        prompt_lens,
        dict(zip(layers, parts, strict=True)),
        confidence_PN,
        num_drafts,
        anchors_PC,
    )


def _anchors(
    lengths: Sequence[int], prompt_lens: Sequence[int], num_drafts: int, stride: int
) -> Tensor:
    """Anchors a with x[a+1] .. x[a+K+1] all in the answer, or a + 1 the end of the prompt."""
    room = min(n - p - num_drafts for n, p in zip(lengths, prompt_lens, strict=True))
    offsets = torch.arange(0, room, stride)
    return torch.tensor(prompt_lens).unsqueeze(1) - 1 + offsets


def _documents(lengths: Sequence[int], width: int, device: torch.device) -> Tensor:
    position_N = torch.arange(width)
    return torch.where(position_N < torch.tensor(lengths).unsqueeze(1), 0, -1).to(device)
