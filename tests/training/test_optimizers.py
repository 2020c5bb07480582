"""Muon against its definition, and which parameters it takes."""

import math

import pytest
import torch
from torch import nn

from peagle.models.drafter import Drafter, DrafterConfig
from peagle.training.config import OptimizerSection
from peagle.training.optimizers import Muon, build_optimizers, orthogonalize

HEAD = DrafterConfig(
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_attention_heads=2,
    num_kv_heads=1,
    head_dim=8,
    vocab_size=40,
    draft_vocab_size=40,
    target_hidden_size=12,
    aux_layer_ids=(0, 1, 2),
    mask_token_id=1,
    norm_before_fc=True,
)


@pytest.mark.parametrize("shape", [(8, 8), (24, 8), (8, 40)])
def test_orthogonalize_keeps_singular_vectors_and_levels_singular_values(
    shape: tuple[int, int],
) -> None:
    generator = torch.Generator().manual_seed(3)
    matrices = torch.randn(5, *shape, generator=generator, dtype=torch.float64)
    out = orthogonalize(matrices)
    u, _, vt = torch.linalg.svd(matrices, full_matrices=False)
    core = u.mT @ out @ vt.mT  # diagonal iff the singular vectors are the same
    values = core.diagonal(dim1=1, dim2=2)
    assert torch.allclose(core, torch.diag_embed(values), atol=1e-10)
    assert values.min() > 0.3 and values.max() < 1.3, "the quintic's band, whatever went in"


def test_muon_step_is_decay_then_nesterov_direction() -> None:
    generator = torch.Generator().manual_seed(4)
    weights = [nn.Parameter(torch.randn(6, 10, generator=generator).double()) for _ in range(3)]
    start = [w.detach().clone() for w in weights]
    optimizer = Muon(weights, lr=0.1, momentum=0.9, weight_decay=0.5)
    momenta = [torch.zeros_like(w) for w in start]
    for _ in range(3):
        for index, weight in enumerate(weights):
            weight.grad = torch.randn(6, 10, generator=generator).double()
            momenta[index] = 0.9 * momenta[index] + 0.1 * weight.grad
            direction = 0.1 * weight.grad + 0.9 * momenta[index]
            update = orthogonalize(direction.unsqueeze(0))[0]
            start[index] = start[index] * (1 - 0.05) - 0.1 * 0.2 * math.sqrt(10) * update
        optimizer.step()
    for weight, expected in zip(weights, start, strict=True):
        assert torch.allclose(weight, expected, atol=1e-9)


def test_a_matrix_without_gradient_is_left_alone() -> None:
    used, unused = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4, 4))
    used.grad = torch.eye(4)
    Muon([used, unused], lr=0.1, weight_decay=0.5).step()
    assert torch.equal(unused, torch.ones(4, 4)) and not torch.equal(used, torch.ones(4, 4))


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_every_parameter_has_one_optimizer(name: str) -> None:
    drafter = Drafter(HEAD)
    section = OptimizerSection.model_validate({"steps": 5, "name": name, "weight_decay": 0.1})
    optimizers = build_optimizers(drafter.named_parameters(), section)
    names = {id(p): n for n, p in drafter.named_parameters()}
    owned = [
        (type(optimizer).__name__, names[id(p)], group["weight_decay"])
        for optimizer in optimizers
        for group in optimizer.param_groups
        for p in group["params"]
    ]
    assert sorted(n for _, n, _ in owned) == sorted(names.values())
    muon = {n for kind, n, _ in owned if kind == "Muon"}
    if name == "muon":
        assert "fc.weight" in muon and any(".mlp." in n for n in muon)
    assert not any("embed" in n or "lm_head" in n or "norm" in n or "mask" in n for n in muon)
    assert all(decay == 0 for _, n, decay in owned if "norm" in n or n == "mask_hidden")
