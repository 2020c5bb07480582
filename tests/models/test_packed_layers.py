"""Experts modules of transformers over our kernels, against transformers' own computation."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from peagle.attention.torch_backend import DenseCausalAttention
from peagle.kernels.linear.experts import ExpertWeights, Gate
from peagle.kernels.linear.packed_weights import PackedWeight, pack_fp8, pack_int4, pack_int8
from peagle.models.acceleration import accelerate_target
from peagle.models.fusion import FusedPackedLinear, fuse
from peagle.models.packed_layers import (
    PackedLinear,
    experts_of,
    find_gate,
    hold_experts,
    use_experts,
)
from peagle.models.target import TargetModel
from tests.kernels.devices import DEVICES
from tests.models.paging import largest_difference
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


# ---- dense layers ----

PACK: dict[str, Callable[[Tensor], PackedWeight]] = {
    "fp8": lambda weight: pack_fp8(weight, (16, 32)),
    "int8": lambda weight: pack_int8(weight, (1, 64)),
    "int4": lambda weight: pack_int4(weight, 32),
}


def packed_target(pack: Callable[[str, Tensor], PackedWeight], **options: Any) -> TargetModel:
    """A target whose layers hold packed weights; `pack` gets the name of the projection too."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    model = make_model("qwen2", **sizes, **options).eval().requires_grad_(False)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and "layers." in name:
            parent, _, last = name.rpartition(".")
            packed = PackedLinear(pack(last, module.weight), module.bias)
            setattr(model.get_submodule(parent), last, packed)
    return TargetModel(model, aux_layer_ids=(1, 3))


@torch.inference_mode()
def passes(target: TargetModel) -> list[Tensor]:
    """Logits and features of a few tokens."""
    tokens = torch.arange(20, 27)
    hidden, features = target.forward(tokens, torch.arange(7), DenseCausalAttention(1))
    return [target.compute_logits(hidden), features]


@pytest.mark.slow
@pytest.mark.parametrize("format", PACK)
def test_fused_packed_projections_compute_the_same(format: str) -> None:
    target = packed_target(lambda _, weight: PACK[format](weight))
    before = passes(target)
    assert not [result.reason for result in fuse(target.model) if result.reason]
    fused = [m for m in target.model.modules() if isinstance(m, FusedPackedLinear)]
    assert [m.sizes for m in fused] == [[64, 32, 32], [96, 96]] * 4
    assert largest_difference(passes(target), before) < 1e-5
    packed = [m for m in target.model.modules() if isinstance(m, PackedLinear)]
    assert len(packed) == 4 * 4, "no projection is there twice"


@pytest.mark.slow
def test_projections_of_unlike_formats_stay_apart() -> None:
    unlike = {"k_proj": PACK["int8"], "up_proj": PACK["int4"]}
    target = packed_target(lambda name, weight: unlike.get(name, PACK["fp8"])(weight))
    before = passes(target)
    reasons = {result.reason for result in fuse(target.model)}
    assert reasons == {"they differ in input size, type, format or device"}
    assert largest_difference(passes(target), before) == 0


@pytest.mark.slow
def test_projections_with_orders_of_their_own_stay_apart() -> None:
    target = packed_target(lambda _, weight: PACK["int4"](weight))
    decoder: Any = target.model.get_decoder()
    for layer in decoder.layers:
        layer.self_attn.q_proj.input_order = torch.arange(64).flip(0)
    before = passes(target)
    results = fuse(target.model)
    assert {result.reason for result in results} == {None, "each orders its inputs by activation"}
    assert largest_difference(passes(target), before) < 1e-5


@pytest.mark.slow
def test_packed_layers_share_compiled_graphs() -> None:
    target = TargetModel(model_with_experts("qwen3_moe"), aux_layer_ids=(1, 3))
    for module in experts_of(target.model):
        gate = find_gate(module)
        assert gate is not None
        weights = [PACK["fp8"](w) for w in (module.gate_up_proj, module.down_proj)]
        hold_experts(module, ExpertWeights(weights[0], weights[1], gate))
    use_experts(target.model)
    before = passes(target)
    torch._dynamo.reset()
    counters.clear()
    compiled = accelerate_target(target, [4], backend="eager")
    assert largest_difference(passes(target), before) < 1e-5
    assert compiled.left == {}
    assert counters["stats"]["unique_graphs"] <= 4, "layers behind taps and others, norm, angles"
