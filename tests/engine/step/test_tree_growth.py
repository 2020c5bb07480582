"""The children of beams that kernels find against those of torch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from peagle.kernels.trees.beams import likeliest
from tests.kernels.devices import DEVICES

pytest.importorskip("triton")

from peagle.engine.step.tree_growth import BeamSearch


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("rows", "vocab", "count"), [(3, 2100, 8), (2, 40, 4), (1, 5, 5)])
def test_children_are_those_of_torch(device: str, rows: int, vocab: int, count: int) -> None:
    """Some rows of a larger step; tokens without probability are candidates of none."""
    generator = torch.Generator().manual_seed(vocab)
    logits = (3 * torch.randn(rows, vocab, generator=generator)).to(device)
    logits[0, 2:4] = -torch.inf
    weight = SimpleNamespace(weight=torch.empty(0, device=device))
    drafter: Any = SimpleNamespace(norm=weight, config=SimpleNamespace(draft_vocab_size=vocab))
    scores, tokens = BeamSearch(drafter, rows + 2)(logits, count, 0.7)
    expected_scores, expected_tokens = likeliest(logits, count, 0.7)
    kept = expected_scores > -1e4
    assert torch.equal(tokens[kept], expected_tokens[kept])
    torch.testing.assert_close(scores[kept], expected_scores[kept], rtol=1e-4, atol=1e-4)
    assert bool((scores[~kept] < -1e4).all())
