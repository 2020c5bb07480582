"""How graded elements become a loss: against which target rows, with which weights.

Shapes: M graded elements.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.data.features import TargetStates
from peagle.models.drafter import Drafter
from peagle.models.target_facts import TargetFacts
from peagle.training.chunked_loss import (
    Projection,
    default_chunk_rows,
    judged_loss,
    projected_loss,
)
from peagle.training.config import MethodSection
from peagle.training.losses import DraftLoss
from peagle.training.training_methods import Graded


@dataclass(frozen=True, slots=True)
class Grade:
    """What grading says.

    Attributes:
        loss: weighted sum of the elements' losses.
        weight: sum of the weights.
        match_M: the greedy draft is the target's token.
        draft_M, chance_M: that draft's target id, and its probability under the target at the
            objective's temperature; None without one.
    """

    loss: Tensor
    weight: Tensor
    match_M: Tensor
    draft_M: Tensor | None = None
    chance_M: Tensor | None = None


class Objective:
    """Grades elements of a head against its target.

    Args:
        drafter, target: the head and what it imitates.
        section: loss and weights.
        chunk_rows: elements projected at a time; None chooses by the vocabularies.
        whole_vocabulary: compare with the target's choice over its whole vocabulary, as acceptance
            does. Otherwise, where the loss does not need more, only the draft vocabulary is
            projected: with 32,000 of 152,000 tokens that is a fifth of the work.
        temperature: say how likely the target is to draw each draft at this temperature; without
            gradients, with the whole vocabulary. 0 does not.
    """

    def __init__(
        self,
        drafter: Drafter,
        target: TargetFacts,
        section: MethodSection,
        chunk_rows: int | None = None,
        *,
        whole_vocabulary: bool = True,
        temperature: float = 0.0,
    ) -> None:
        assert whole_vocabulary or not temperature
        self.drafter = drafter
        self.temperature = temperature
        self.loss = DraftLoss(section.loss, section.tv_share)
        config = drafter.config
        device = drafter.lm_head.weight.device
        self.draft_ids, self._logits = None, target.compute_logits
        if config.is_pruned and (whole_vocabulary or section.loss in ("tv", "kl_tv")):
            self.draft_ids = drafter.target_ids()
        elif config.is_pruned:
            self._logits = target.logits_of(drafter.target_ids())
        target_size = config.draft_vocab_size if self.draft_ids is None else config.vocab_size
        self.chunk_rows = chunk_rows or default_chunk_rows(
            target_size, config.draft_vocab_size, device
        )
        # Losses are float32 but where the head is wider.
        dtype = torch.promote_types(drafter.lm_head.weight.dtype, torch.float32)
        self._weights_K = torch.tensor(section.weights(), dtype=dtype, device=device)

    def weights(self, depth_M: Tensor) -> Tensor:
        """Weight of elements by their depth."""
        return self._weights_K[depth_M]

    def grade(self, graded: Graded, states: TargetStates) -> Grade:
        """Grade elements by what the target says where their token is predicted."""
        target_rows = states.hidden_BNH.flatten(0, 1)

        @torch.no_grad()
        def target_logits(positions_P: Tensor) -> Tensor:
            return self._logits(target_rows[positions_P])

        drafter, weights_M = self.drafter, self.weights(graded.selected.depth)
        projection = Projection(
            loss=self.loss,
            order=graded.selected.order,
            weights_M=weights_M,
            target_logits=target_logits,
            draft_ids=self.draft_ids,
            chunk_rows=self.chunk_rows,
        )
        hidden_MD = graded.hidden_MD
        if not drafter.config.norm_output:
            hidden_MD = drafter.norm(hidden_MD)
        if self.temperature:
            loss, *judged = judged_loss(
                hidden_MD, drafter.lm_head.weight, projection, self.temperature
            )
            return Grade(loss, weights_M.sum(), *judged)
        loss, match_M = projected_loss(hidden_MD, drafter.lm_head.weight, projection)
        return Grade(loss, weights_M.sum(), match_M)
