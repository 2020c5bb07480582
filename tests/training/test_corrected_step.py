"""A step of a head and its correction together, against all elements in one dense pass."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.data.batches import Batch
from peagle.data.features import TargetStates
from peagle.models.correction import Correction
from peagle.models.drafter import Drafter
from peagle.training.config import MethodSection
from peagle.training.step import Objective, TrainingStep
from peagle.training.training_methods import TrainingMethod
from tests.corrections import term_of
from tests.training.reference import HIDDEN, VOCAB, make_head, make_plain_batch, peagle_forward

SECTION = MethodSection(depth=5, depth_decay=0.9, cod_ratio=0.8, cod_floor=0.3)  # type: ignore[call-arg]
SEED, ALONE, OWN = 6, 0.3, 0.25


def make_correction(size: int) -> Correction:
    """Random weights, whose term is about as large as the states."""
    torch.manual_seed(3)
    correction = Correction(size, rank=4, width=7, num_slots=SECTION.depth - 1).double()
    correction.reset(1)
    with torch.no_grad():
        for parameter in correction.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.4)
    return correction


def make_inputs() -> tuple[Batch, TargetStates, Tensor]:
    """Three rows, one of them padded; and the target's last matrix."""
    torch.manual_seed(8)
    tokens = torch.randint(2, VOCAB, (3, 30))
    batch = make_plain_batch(tokens, torch.tensor([1, 4, 9]), torch.tensor([30, 30, 21]))
    features = torch.randn(3, 30, 3 * HIDDEN, dtype=torch.float64)
    states = TargetStates(features, features[..., :HIDDEN])
    return batch, states, torch.randn(VOCAB, HIDDEN, dtype=torch.float64)


def make_step(
    head: Drafter, correction: Correction, matrix: Tensor, segments: int, own: float
) -> TrainingStep:
    target = cast(Any, SimpleNamespace(compute_logits=lambda hidden: hidden @ matrix.mT))
    training = Objective(
        head, target, SECTION, 16, correction=correction, alone=ALONE, own_drafts=own
    )
    validation = Objective(head, target, SECTION, 16, correction=correction)
    alone = Objective(head, target, SECTION, 16)
    return TrainingStep(head, TrainingMethod(SECTION), training, validation, segments, alone=alone)


def in_one_pass(
    head: Drafter, correction: Correction, matrix: Tensor, own_share: float
) -> tuple[Tensor, int]:
    """The loss, chain after chain and slot after slot, and how many own drafts differ."""
    batch, states, _ = make_inputs()
    generator = torch.Generator().manual_seed(SEED)
    method = TrainingMethod(SECTION)
    elements = method.elements(batch, generator)
    lots = torch.rand(batch.tokens_BN.shape, generator=generator)
    hidden = peagle_forward(head, batch, states, elements)
    chains: dict[tuple[int, int], dict[int, Tensor]] = {}
    for row, column in elements.supervised.nonzero().tolist():
        anchor, depth = int(elements.anchors[row, column]), int(elements.depths[row, column])
        chains.setdefault((row, anchor), {})[depth] = head.normed(hidden[row, column])
    total, weight, differ = torch.zeros((), dtype=torch.float64), 0.0, 0
    for (row, anchor), normed in chains.items():
        assert sorted(normed) == list(range(len(normed)))
        lot = float(lots[row, anchor])
        takes_own = ALONE <= lot < ALONE + own_share
        last = normed[0]
        for depth in range(len(normed)):
            if depth:
                text = batch.tokens_BN[row, anchor + depth + 1]
                drafted = head.to_target_ids(head.lm_head(last).argmax())
                differ += int(takes_own and bool(drafted != text))
                table = head.embed_tokens.weight
                before = table[drafted].detach() if takes_own else table[text]
                last = normed[depth] + term_of(correction, normed[depth], before, depth)
            state = normed[depth] if lot < ALONE else last
            log_q = head.lm_head(state).log_softmax(-1)
            target = states.hidden_BNH[row, anchor + depth + 1] @ matrix.mT
            log_p = target[head.target_ids()].log_softmax(-1)
            loss = F.kl_div(log_q, log_p, reduction="sum", log_target=True)
            total = total + loss * 0.9**depth
            weight += 0.9**depth
    return total / weight, differ


def gradients(*modules: torch.nn.Module) -> dict[str, Tensor]:
    found = {
        f"{i}.{name}": p.grad.clone()
        for i, module in enumerate(modules)
        for name, p in module.named_parameters()
        if p.grad is not None
    }
    for module in modules:
        module.zero_grad()
    return found


@pytest.mark.parametrize(
    ("own", "options"), [(0.0, {}), (OWN, {"norm_output": True, "draft_vocab_size": 40})]
)
def test_gradients_are_those_of_one_pass(own: float, options: dict[str, Any]) -> None:
    head = make_head(**options)
    if head.config.is_pruned:
        head.set_draft_vocabulary(torch.arange(VOCAB - 40, VOCAB))
    correction = make_correction(head.config.hidden_size)
    batch, states, matrix = make_inputs()
    loss, differ = in_one_pass(head, correction, matrix, own)
    assert (differ > 5) == (own > 0), "some drafts are not the text's tokens"
    loss.backward()
    expected = gradients(head, correction)
    assert all(gradient.abs().max() > 1e-6 for gradient in expected.values())
    for segments in (1, 3):
        step = make_step(head, correction, matrix, segments, own)
        outcome = step.backward(batch, states, torch.Generator().manual_seed(SEED))
        torch.testing.assert_close(outcome.loss, loss.detach(), rtol=1e-10, atol=1e-10)
        found = gradients(head, correction)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-8, atol=1e-10, msg=name)
