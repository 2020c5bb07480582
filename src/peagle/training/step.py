"""One batch: how its elements are graded, its gradients in training, its acceptance in validation.

Shapes: M graded elements.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from peagle.data.batches import Batch
from peagle.data.features import TargetStates
from peagle.models.correction import Correction
from peagle.models.drafter import Drafter
from peagle.models.target_facts import TargetFacts
from peagle.training.chains import ChainPlan
from peagle.training.chunked_loss import (
    DraftLoss,
    Projection,
    default_chunk_rows,
    judged_loss,
    projected_loss,
)
from peagle.training.config import MethodSection
from peagle.training.corrected_states import corrected_states
from peagle.training.distributed import ONE_PROCESS, Processes
from peagle.training.partition import (
    PartitionLayout,
    frozen_backward,
    partitioned_graded,
    two_pass_backward,
)
from peagle.training.training_methods import Graded, Selected, TrainingMethod, eagle3_graded

# ---- grading ----


@dataclass(frozen=True, slots=True)
class Grade:
    """The result of grading elements.

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
        chunk_rows: elements projected at a time; None chooses by the vocabularies.
        whole_vocabulary: compare with the target's choice over its whole vocabulary, as acceptance
            does. Otherwise, where the loss does not need more, only the draft vocabulary is
            projected: with 32,000 of 152,000 tokens that is a fifth of the work.
        temperature: say how likely the target is to draw each draft at this temperature; without
            gradients, with the whole vocabulary. 0 does not.
        correction: grade the head with it, each draft corrected by the response's tokens before
            it: acceptance asks for no other, since a draft counts only where those before it pass.
        alone, own_drafts: shares of the chains that are graded without the correction, and
            corrected by the head's own drafts, in training.
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
        correction: Correction | None = None,
        alone: float = 0.0,
        own_drafts: float = 0.0,
    ) -> None:
        assert whole_vocabulary or not temperature
        self._shares = {"alone": alone, "own_drafts": own_drafts}
        self.drafter = drafter
        self.correction = correction
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

    @property
    def draws_chains(self) -> bool:
        """Return whether some chains are drawn to be graded in another way than the others."""
        return any(self._shares.values())

    def planner(self, lots_BN: Tensor | None) -> Callable[[Selected], ChainPlan] | None:
        """Return a function that plans how the correction sees elements; None without one.

        `lots_BN` are uniform numbers, one for the chain of each anchor; None draws no chain.
        """
        if self.correction is None:
            return None

        def plan(at: Selected) -> ChainPlan:
            return ChainPlan.of(at.row, at.anchor, at.depth, lots_BN=lots_BN, **self._shares)

        return plan

    def weights(self, depth_M: Tensor) -> Tensor:
        """Return the weight of elements by their depth."""
        return self._weights_K[depth_M]

    def grade(self, graded: Graded, states: TargetStates) -> Grade:
        """Grade elements by the target's prediction of their token."""
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
        if self.correction is None or graded.plan is None:
            hidden_MD = drafter.normed(graded.hidden_MD)
        else:
            hidden_MD = corrected_states(drafter, self.correction, graded, self.chunk_rows)
        if self.temperature:
            loss, *judged = judged_loss(
                hidden_MD, drafter.lm_head.weight, projection, self.temperature
            )
            return Grade(loss, weights_M.sum(), *judged)
        loss, match_M = projected_loss(hidden_MD, drafter.lm_head.weight, projection)
        return Grade(loss, weights_M.sum(), match_M)


# ---- a batch ----


# Pairs of elements that a mask may hold.
_VALIDATION_PAIRS = 1 << 27
Parts = list[tuple[Selected, Grade]]


@dataclass(frozen=True, slots=True)
class GradedElements:
    """Graded elements of a batch, all [M], without their hidden states.

    Attributes:
        row, anchor, depth: which.
        match: the greedy draft is the target's token.
        loss: mean of the element losses, by their weights; a scalar.
        chance: the target draws the greedy draft with this probability, at the temperature of
            validation; None in training, and without a temperature.
        follows: the greedy draft is the response's token; None as `chance`.
        match_alone: `match` of the head without its correction, in a validation of both.
    """

    row: Tensor
    anchor: Tensor
    depth: Tensor
    match: Tensor
    loss: Tensor
    chance: Tensor | None = None
    follows: Tensor | None = None
    match_alone: Tensor | None = None


class TrainingStep:
    """Computes gradients and grades of a head, of a correction on a frozen one, or of both.

    `training` and `validation` say how elements are graded, `alone` how those of the head without
    its correction are in validation; `segments` is S of the two-pass partition, and `processes`
    share the rows of a batch. `is_frozen` says that nothing of the head is trained.
    """

    def __init__(
        self,
        drafter: Drafter,
        method: TrainingMethod,
        training: Objective,
        validation: Objective,
        segments: int,
        processes: Processes = ONE_PROCESS,
        *,
        alone: Objective | None = None,
        is_frozen: bool = False,
    ) -> None:
        self.drafter = drafter
        self.alone = alone
        self.is_frozen = is_frozen
        self.method = method
        self.training = training
        self.validation = validation
        self.segments = segments
        self.processes = processes

    def lay_out(self, batch: Batch, generator: torch.Generator) -> PartitionLayout | None:
        """Sample the elements of a batch and split them; None for EAGLE-3, which has all.

        It runs on the host, ahead of the step: on a GPU each decision would make the device wait.
        """
        if self.method.section.name == "eagle3":
            return None
        elements = self.method.elements(batch, generator)
        length, plan = batch.tokens_BN.shape[1], None
        if self.training.correction is not None:
            lots_BN = None
            if self.training.draws_chains:
                lots_BN = self.method.uniform(batch, generator)
            plan = self.training.planner(lots_BN)
        return PartitionLayout.of(elements, length, self.segments, self.method, plan)

    def backward(
        self, batch: Batch, states: TargetStates, generator: torch.Generator
    ) -> GradedElements:
        """Add this process's part of the gradients of a batch's mean loss to the head's.

        Batch and states are on the device of the head. The generator samples the elements of a
        batch that has no layout yet.
        """
        parts: Parts = []
        if self.method.section.name == "eagle3":
            depths_K = torch.arange(self.method.section.depth, device=batch.deepest_BN.device)
            counts_K = (batch.deepest_BN.unsqueeze(-1) >= depths_K).sum((0, 1))
            weight = self._weight((self.training.weights(depths_K) * counts_K).sum())
            graded = eagle3_graded(self.drafter, batch, states, self.method)
            loss = self._graded_loss(graded, states, weight, parts)
            loss.backward()
        else:
            layout = batch.layout or self.lay_out(batch, generator)
            assert layout is not None
            # One denominator for all segments, known before the first.
            weights = [self.training.weights(part.depth).sum() for part in layout.graded]
            weight = self._weight(torch.stack(weights).sum())

            def loss_of(graded: Graded) -> Tensor:
                return self._graded_loss(graded, states, weight, parts)

            run = (self.drafter, batch, states, layout)
            run_backward = frozen_backward if self.is_frozen else two_pass_backward
            loss = run_backward(*run, loss_of, method=self.method)
        return _joined(parts, self.processes.sum(loss.detach()))

    @torch.no_grad()
    def evaluate(self, batch: Batch, states: TargetStates) -> GradedElements:
        """Grade every element of a batch, over the target's whole vocabulary."""
        parts: Parts = []
        alone: list[Tensor] = []
        for graded in self._everything(batch, states):
            parts.append((graded.selected, self.validation.grade(graded, states)))
            if self.alone is not None:
                alone.append(self.alone.grade(graded, states).match_M)
        loss = torch.stack([grade.loss for _, grade in parts]).sum()
        weight = torch.stack([grade.weight for _, grade in parts]).sum().clamp_min(1)
        outcome = _joined(parts, loss / weight)
        if alone:
            outcome = replace(outcome, match_alone=torch.cat(alone))
        chances = [grade.chance_M for _, grade in parts if grade.chance_M is not None]
        drafts = [grade.draft_M for _, grade in parts if grade.draft_M is not None]
        if not drafts:
            return outcome
        token_M = batch.tokens_BN[outcome.row, outcome.anchor + outcome.depth + 2]
        return replace(outcome, chance=torch.cat(chances), follows=torch.cat(drafts) == token_M)

    def _everything(self, batch: Batch, states: TargetStates) -> Iterator[Graded]:
        # Validation's shapes are too many to compile each.
        method = TrainingMethod(self.method.section)
        if method.section.name == "eagle3":
            yield eagle3_graded(self.drafter, batch, states, method)
            return
        elements = method.elements(batch, None, everything=True)
        pairs = elements.anchors.numel() * batch.tokens_BN.shape[1]
        segments = -(-pairs // _VALIDATION_PAIRS)
        plan = self.validation.planner(None)
        layout = PartitionLayout.of(elements, batch.tokens_BN.shape[1], segments, method, plan)
        yield from partitioned_graded(self.drafter, batch, states, layout, method)

    def _weight(self, own: Tensor) -> Tensor:
        """Return the denominator of the loss: the weights of all processes' elements."""
        return self.processes.sum(own).clamp_min(1)

    def _graded_loss(
        self, graded: Graded, states: TargetStates, weight: Tensor, parts: Parts
    ) -> Tensor:
        grade = self.training.grade(graded, states)
        parts.append((graded.selected, grade))
        return grade.loss / weight


def _joined(parts: Parts, loss: Tensor) -> GradedElements:
    """Return all parts as one, since a chain is spread over them."""
    return GradedElements(
        row=torch.cat([selected.row for selected, _ in parts]),
        anchor=torch.cat([selected.anchor for selected, _ in parts]),
        depth=torch.cat([selected.depth for selected, _ in parts]),
        match=torch.cat([grade.match_M for _, grade in parts]),
        loss=loss,
    )
