"""FP8 checkpoints whose linear layers and experts multiply FP8 activations, against plain torch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor import config as inductor_config

from peagle import LLM
from peagle.attention.torch_backend import DenseCausalAttention
from peagle.errors import UserError
from peagle.kernels.linear import experts as experts_module
from peagle.kernels.linear import fp8_activations, fp8_linear
from peagle.kernels.linear.experts import ExpertWeights
from peagle.kernels.linear.fp8_linear import MIN_ROWS
from peagle.kernels.linear.packed_linear import packed_linear
from peagle.models.acceleration import accelerate_target
from peagle.models.fp8_layers import device_obstacle, experts_obstacle, multiplies_fp8
from peagle.models.fusion import FusedPackedLinear, fuse
from peagle.models.gated_mlps import GatedMLP, use_gated_mlps
from peagle.models.joined_norms import join_norms
from peagle.models.joined_residuals import ResidualPass, join_residuals
from peagle.models.packed_layers import PackedLinear, experts_of
from peagle.models.packed_loading import load_packed
from peagle.models.quantization import quantization_of
from peagle.models.target import TargetModel
from peagle.models.target_facts import load_config, precision_of
from tests.kernels.devices import FP8_DEVICES, INTERPRETED, WITHOUT_FP8
from tests.kernels.linear.test_fp8_linear import make_weight, quantise_in_torch
from tests.models.paging import largest_difference
from tests.models.test_packed_layers import passes
from tests.models.test_packed_loading import (
    dense,
    distance,
    write_checkpoint,
    write_quantised,
)
from tests.models.tiny import make_model

pytest.importorskip("triton", reason="needs triton")
needs_interpreter = pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET is not 1")

DYNAMIC = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
FP8 = torch.float8_e4m3fn
_ACTIVATIONS = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 128}
_WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}


def compressed(**activations: Any) -> dict[str, Any]:
    """The configuration of compressed-tensors for the same weights."""
    inputs = {**_ACTIVATIONS, "dynamic": True, **activations}
    group = {"targets": ["Linear"], "weights": _WEIGHTS, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


def blocks(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of a weight with a scale for each 128 x 128, and the weight they stand for."""
    n, k = weight.shape
    padded = F.pad(weight, (0, -k % 128, 0, -n % 128))
    parts = padded.unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
    scale = parts.abs().amax((1, 3)) / 448
    spread = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:n, :k]
    q = (weight / spread).to(FP8)
    return {"weight": q, "weight_scale_inv": scale}, q.float() * spread


class DynamicLinear(nn.Module):
    """A linear layer that quantises each row's 128 inputs while it runs, in plain torch."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        rounded = quantise_in_torch(x.flatten(0, -2)).dequantise()
        return self.linear(rounded.to(x.dtype)).view(*x.shape[:-1], -1)


@pytest.fixture(autouse=True)
def exact_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantise in torch on a CPU: the interpreter drops the carry of some numbers."""
    if INTERPRETED:
        monkeypatch.setattr(fp8_activations, "quantise", quantise_in_torch)
        monkeypatch.setattr(experts_module, "quantise", quantise_in_torch)


def make(**options: Any) -> Any:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, **options}
    return make_model("qwen2", **sizes).eval().requires_grad_(False)


def write(folder: Path, model: Any, quantization: dict[str, Any] = DYNAMIC) -> Any:
    """Save the model in FP8; return the model that it stands for."""
    return write_quantised(folder, blocks, quantization, model)


def load(folder: Path, *, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Any:
    config = load_config(folder)
    found = quantization_of(config)
    assert found is not None
    return load_packed(
        *(folder, config, found, dtype, torch.device(device)), unpack=False, fp8_activations=True
    )


@torch.no_grad()
def logits(model: Any) -> Tensor:
    """Of more rows than those up to which activations stay as they are."""
    return model(torch.arange(MIN_ROWS + 3, device=model.device)[None]).logits.cpu()


def layers_of(model: Any, kind: type) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, kind)]


def in_fp8(model: Any) -> list[Any]:
    """The linear layers that multiply FP8 activations."""
    return [module for module in layers_of(model, PackedLinear) if multiplies_fp8(module)]


def quantise_inputs(model: Any) -> Any:
    """Replace every linear layer of the decoder by one that quantises its inputs."""
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and "layers." in name:
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, DynamicLinear(module))
    return model


@pytest.mark.parametrize("device", FP8_DEVICES)
@pytest.mark.parametrize("quantization", [DYNAMIC, compressed()], ids=["fp8", "compressed"])
def test_logits_are_those_of_dynamic_quantisation(
    tmp_path: Path, quantization: dict[str, Any], device: str
) -> None:
    weight_only = write(tmp_path, make(), quantization)
    plain = logits(weight_only)
    expected = logits(quantise_inputs(weight_only))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = load(tmp_path, device=device)
    assert len(in_fp8(model)) == len(layers_of(model, PackedLinear)) == 7
    found = logits(model)
    # On a card sums differ in their last bits, and a few inputs round to the next number of FP8.
    assert distance(found, expected) < (1e-4 if device == "cpu" else 5e-2)
    assert 1e-2 < distance(found, plain) < 0.1, "the rounding of activations shows"
    assert not any("_proj" in name for name, _ in model.named_parameters())


@pytest.mark.parametrize("device", FP8_DEVICES)
def test_fused_projections_compute_the_same(tmp_path: Path, device: str) -> None:
    write(tmp_path, make())
    target = TargetModel(load(tmp_path, device=device))

    @torch.inference_mode()
    def hidden() -> Tensor:
        tokens, positions = (torch.arange(i, i + MIN_ROWS, device=device) % 128 for i in (20, 0))
        return target.forward(tokens, positions, DenseCausalAttention(1))[0]

    before = hidden()
    assert not [result.reason for result in fuse(target.model) if result.reason]
    fused = layers_of(target.model, FusedPackedLinear)
    assert [m.sizes for m in fused] == [[128, 128, 128], [256, 256]]
    assert all(multiplies_fp8(m.linear) for m in fused)
    assert fused[0].linear.bias is not None and fused[1].linear.bias is None
    assert len(in_fp8(target.model)) == 4, "no projection is there twice"
    assert distance(hidden(), before) < (1e-5 if device == "cpu" else 1e-2)


@needs_interpreter
def test_projections_of_unlike_layers_stay_apart(tmp_path: Path) -> None:
    write(tmp_path, make(num_key_value_heads=1))
    with pytest.warns(UserWarning, match=r"2 of 7 .* \(a width of 64, which 128 .*: 2\)"):
        target = TargetModel(load(tmp_path))
    reasons = {result.projections: result.reason for result in fuse(target.model)}
    apart = "they differ in input size, type, format or device"
    assert reasons == {("q_proj", "k_proj", "v_proj"): apart, ("gate_proj", "up_proj"): None}


STATIC = {**DYNAMIC, "activation_scheme": "static"}


@needs_interpreter
@pytest.mark.parametrize(
    ("quantization", "reason"),
    [
        (STATIC, "activations without dynamic scales of 128 inputs"),
        ({**DYNAMIC, "activation_scheme": ["dynamic"]}, "activations without dynamic"),
        (compressed(dynamic=False), "activations without dynamic scales of 128 inputs"),
        (compressed(strategy="token", group_size=None), "activations without dynamic"),
        (compressed(num_bits=4), "activations without dynamic"),
    ],
)
def test_other_activations_stay_as_they_are(
    tmp_path: Path, quantization: dict[str, Any], reason: str
) -> None:
    plain = logits(write(tmp_path, make(), quantization))
    with pytest.warns(UserWarning, match=rf"'auto', and 7 of 7 quantised .*{reason}.*: 7"):
        model = load(tmp_path)
    assert not in_fp8(model)
    assert distance(logits(model), plain) < 1e-4


@needs_interpreter
def test_other_weights_stay_packed(tmp_path: Path) -> None:

    for format, reason in (
        ("fp8 blocks", "a width of 64, which 128 does not divide"),
        ("int4", "weights of the kind int4 in words"),
    ):
        write_checkpoint(tmp_path / format, format, dense())
        with pytest.warns(UserWarning, match=f"14 of 14 .*{reason}: "):
            assert not in_fp8(load(tmp_path / format))


@needs_interpreter
def test_blocks_of_another_size(tmp_path: Path) -> None:
    def by_rows(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        scale = weight.abs().amax(1, keepdim=True) / 448
        q = (weight / scale).to(FP8)
        return {"weight": q, "weight_scale_inv": scale}, q.float() * scale

    quantization = {**DYNAMIC, "weight_block_size": [1, 4096]}
    write_quantised(tmp_path, by_rows, quantization, make())
    with pytest.warns(UserWarning, match="a scale for 1 x 128 weights, not 128 x 128"):
        assert not in_fp8(load(tmp_path))


def make_mixture(**options: Any) -> Any:
    sizes = {"hidden_size": 128, "moe_intermediate_size": 128, "head_dim": 64, "num_experts": 16}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2}
    model = make_model("qwen3_moe", **{**sizes, "num_experts_per_tok": 2, **options})
    return model.eval().requires_grad_(False)


def experts_in_torch(x: Tensor, index: Tensor, weights: Tensor, experts: ExpertWeights) -> Tensor:
    """`run_experts` with activations that are rounded to FP8 before both products."""
    out = torch.zeros_like(x)
    for expert in range(experts.gate_up.num_experts):
        token, place = (index == expert).nonzero(as_tuple=True)
        up, down = (w.expert(expert).unpack(x.dtype) for w in (experts.gate_up, experts.down))
        rows = quantise_in_torch(x[token]).dequantise().to(x.dtype)
        inner = quantise_in_torch(experts.gate(F.linear(rows, up))).dequantise().to(x.dtype)
        out.index_add_(0, token, F.linear(inner, down) * weights[token, place, None].to(x.dtype))
    return out


@pytest.mark.parametrize("device", FP8_DEVICES)
def test_experts_multiply_fp8_activations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    write(tmp_path, make_mixture())
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = load(tmp_path, device=device, dtype=dtype)
    layers = [module.expert_weights for module in experts_of(model)]
    assert len(layers) == 2 and all(layer.fp8_activations for layer in layers)
    assert len(in_fp8(model)) == 8, "q, k, v and o of both layers"

    def run(tokens: int) -> Tensor:
        with torch.no_grad():
            return model(torch.arange(tokens, device=device)[None]).logits.cpu()

    many, few = run(40), run(7)
    monkeypatch.setattr("peagle.models.packed_layers.run_experts", experts_in_torch)
    assert distance(many, run(40)) < (1e-3 if device == "cpu" else 6e-2)
    assert distance(few, run(7)) > (1e-3 if device == "cpu" else 0)


@needs_interpreter
def test_other_experts_stay_as_they_are(tmp_path: Path) -> None:
    cases = (
        ({"moe_intermediate_size": 64}, DYNAMIC, "a width of 64, which 128 does not divide: 2", 2),
        ({"hidden_act": "gelu_pytorch_tanh"}, DYNAMIC, "activation is not SiLU: 2", 2),
        ({}, STATIC, "activations without dynamic scales of 128 inputs: 10", 10),
    )
    for case, (options, quantization, reason, count) in enumerate(cases):
        write(tmp_path / str(case), make_mixture(**options), quantization)
        with pytest.warns(UserWarning, match=rf"{count} of 10 quantised layers .*{reason}"):
            model = load(tmp_path / str(case))
        assert not any(module.expert_weights.fp8_activations for module in experts_of(model))


@needs_interpreter
def test_experts_on_a_card_need_bfloat16(tmp_path: Path) -> None:
    write(tmp_path, make_mixture())
    (module, *_), card = experts_of(load(tmp_path)), torch.device("cuda")
    text = "experts in float16, not bfloat16"
    assert experts_obstacle(module, [], torch.float16, card) == text
    assert experts_obstacle(module, [], torch.bfloat16, card) is None


def test_a_card_needs_products_of_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    card = torch.device("cuda")
    for capability in ((8, 6), (9, 0), (12, 0)):
        fp8_linear.fp8_obstacle.cache_clear()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        text = "block scales need compute capability 9.0, not {}.{}".format(*capability)
        assert device_obstacle(card) == (None if capability == (9, 0) else text)
    fp8_linear.fp8_obstacle.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert device_obstacle(card) == "block scales need CUDA 12.9, not 12.8"
    fp8_linear.fp8_obstacle.cache_clear()
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert device_obstacle(torch.device("cpu")) == "the device is no GPU"


@pytest.mark.filterwarnings("ignore:The target is quantised")
def test_nothing_changes_without_the_option(tmp_path: Path) -> None:
    write(tmp_path, make())
    target = TargetModel.load(tmp_path)
    assert target.fp8_activations == "off" and "activations" not in precision_of(target)


@pytest.mark.filterwarnings("ignore:The target is quantised")
@pytest.mark.parametrize("make", [make, make_mixture])
def test_a_cpu_says_that_activations_stay(tmp_path: Path, make: Callable[[], Any]) -> None:
    write(tmp_path, make())
    text = r"(\d+) of \1 quantised layers .* \(weights that are unpacked: \1\)\. Leave the option"
    with pytest.warns(UserWarning, match=text):
        target = TargetModel.load(tmp_path, fp8_activations="auto")
    assert target.fp8_activations == "off"


def test_a_target_of_plain_weights(target_folder: Path) -> None:
    with pytest.warns(UserWarning, match="'auto', and the target is not stored in FP8"):
        TargetModel.load(target_folder, fp8_activations="auto")


@pytest.mark.gpu
@WITHOUT_FP8
def test_an_engine_multiplies_fp8_activations(tmp_path: Path) -> None:
    write(tmp_path, make())
    target = TargetModel.load(tmp_path, dtype=torch.bfloat16, device="cuda", fp8_activations="auto")
    assert precision_of(target) == "bfloat16, fp8 activations, fp8 weights"
    assert len(in_fp8(target.model)) == 7


@pytest.mark.parametrize("given", ["on", True, 8])
def test_values_that_cannot_be(target_folder: Path, given: Any) -> None:
    with pytest.raises(UserError, match=r"fp8_activations is .*; expected one of auto, off"):
        LLM(target_folder, fp8_activations=given)


def test_a_loaded_target_has_its_activations(target_folder: Path) -> None:
    target = TargetModel.load(target_folder)
    with pytest.raises(UserError, match=r"fp8_activations 'auto', .* fp8_activations 'off'"):
        LLM(model=target, fp8_activations="auto")


@needs_interpreter
@pytest.mark.parametrize("activation", ["gelu", "gelu_pytorch_tanh", "quick_gelu", "relu"])
def test_only_swiglu_is_joined_with_the_rounding(activation: str, tmp_path: Path) -> None:
    write(tmp_path, make(hidden_act=activation))
    model = load(tmp_path)
    fuse(model)
    assert use_gated_mlps(model) == 0


@needs_interpreter
def test_norms_that_others_read_stay(tmp_path: Path) -> None:
    write(tmp_path, make_mixture())
    model = load(tmp_path)
    fuse(model)
    assert join_norms(model) == 2, "routers read what comes before experts"


@needs_interpreter
@pytest.mark.usefixtures("exact_rounding")
@inductor_config.patch(post_grad_custom_post_pass=None, force_disable_caches=True)
def test_residuals_are_added_by_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of a product and what came in are one node; products that others read stay alone."""
    join_residuals()
    graphs, joined = list[str](), ResidualPass.__call__

    def note(own: ResidualPass, graph: torch.fx.Graph) -> None:
        joined(own, graph)
        graphs.append(str(graph))

    torch.manual_seed(0)
    weight = make_weight(128, 256, "cpu")
    numbers = weight.fp8_numbers()

    def layer(x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        first = residual + packed_linear(x, weight, None, numbers)
        other, own, row = (packed_linear(x * i, weight, None, numbers) for i in (2, 3, 4))
        broadcast = row.view(-1, 1, 128) + residual.expand(2, -1, -1).transpose(0, 1)
        return first, other + residual * other, own + own, broadcast

    monkeypatch.setattr(ResidualPass, "__call__", note)
    x, residual = torch.randn(1, 48, 256), torch.randn(1, 48, 128)
    torch._dynamo.reset()
    found = torch.compile(layer, fullgraph=True, dynamic=True)(x, residual)
    assert largest_difference(list(found), list(layer(x, residual))) < 1e-5
    (graph,) = graphs
    assert graph.count("peagle.fp8_product") == 4 and graph.count("aten.add") == 3


@pytest.mark.slow
@needs_interpreter
def test_compiled_layers_compute_the_same(tmp_path: Path) -> None:
    write(tmp_path, make(num_hidden_layers=4))
    target = TargetModel(load(tmp_path), aux_layer_ids=(1, 3))
    before = passes(target)
    torch._dynamo.reset()
    compiled = accelerate_target(target, [4], backend="eager")
    mlps = [m for m in target.model.modules() if isinstance(m, GatedMLP)]
    assert len(mlps) == 4 and use_gated_mlps(target.model) == 0
    products = layers_of(target.model, FusedPackedLinear)
    assert len(products) == 8 and all(product.norm is not None for product in products)
    assert join_norms(target.model) == 0
    assert largest_difference(passes(target), before) < 1e-5
    assert compiled.left == {}
