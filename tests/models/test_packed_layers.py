"""Experts modules of transformers over our kernels, against transformers' own computation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from peagle.kernels.experts import Gate
from peagle.models.packed_layers import experts_of, find_gate, use_experts
from tests.kernels.devices import DEVICES
from tests.models.test_architectures import ARCHITECTURES, WITH_EXPERTS
from tests.models.tiny import make_model

pytest.importorskip("triton", reason="needs triton")


def model_with_experts(name: str) -> Any:
    found = ARCHITECTURES[name]
    return make_model(found.model_type, **found.options).eval().requires_grad_(False)


@torch.no_grad()
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_whole_models_equal_transformers(name: str, device: str) -> None:
    model = model_with_experts(name).to(device)
    tokens = torch.randint(320, (2, 9), generator=torch.Generator().manual_seed(1)).to(device)
    model.set_experts_implementation("eager")
    expected = model(tokens).logits
    names = set(model.state_dict())
    assert use_experts(model) == 4
    found = model(tokens).logits
    assert (found - expected).norm() < 1e-4 * expected.norm()
    gone = {name for name in names - set(model.state_dict()) if "experts" in name}
    assert len(gone) >= 8, "the weights are there once, not twice"


@pytest.mark.parametrize(
    ("name", "gate"),
    [
        ("qwen3_moe", Gate("silu")),
        ("gpt_oss", Gate("clamped", 1.702, 7.0)),
        ("gemma4, experts, keys as values", Gate("gelu_tanh")),
    ],
)
def test_finds_the_activation(name: str, gate: Gate) -> None:
    modules = experts_of(model_with_experts(name))
    assert len(modules) == 4
    assert [find_gate(module) for module in modules] == [gate] * 4


def test_another_activation_stays_with_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_with_experts("qwen3_moe")

    def squared(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return gate.relu().square() * up

    for module in experts_of(model):
        module._apply_gate = squared
    before = model.get_experts_implementation()
    assert use_experts(model) == 0
    assert model.get_experts_implementation() == before
    assert use_experts(make_model("qwen3", head_dim=8)) == 0
