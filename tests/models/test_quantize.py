"""Targets quantised while they load: what their layers hold then, and what is refused."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from peagle import LLM, SamplingParams
from peagle.config.speculative import Quantization
from peagle.errors import UserError
from peagle.kernels.linear.packed_weights import PackedWeight
from peagle.models.packed_layers import PackedLinear, experts_of
from peagle.models.quantize import pack_weight, quantize_head, quantize_model
from peagle.models.skinny import use_skinny
from peagle.models.target import TargetModel
from tests.kernels.devices import INTERPRETED
from tests.models.test_architectures import ARCHITECTURES, WITH_EXPERTS
from tests.models.test_packed_loading import SIZES, distance, logits, write_checkpoint
from tests.models.test_skinny import draft_of, make_head
from tests.models.tiny import make_model

METHODS: list[Quantization] = ["fp8", "int8", "int4"]
# Largest |W' - W| / |W| of weights that are normally distributed.
ERRORS = {"fp8": 0.03, "int8": 0.012, "int4": 0.13}
DENSE = [
    "llama",
    "qwen3",
    "mistral",
    "phi",
    "phi3",
    "gemma2",
    "gemma3, text",
    "gemma4, shared keys",
]
NAMES = ["qwen2", *WITH_EXPERTS]


def make(name: str) -> Any:
    found = ARCHITECTURES[name]
    options = {**found.options, "hidden_size": 64, "intermediate_size": 96}
    if name in WITH_EXPERTS:
        options["moe_intermediate_size"] = 32
    return make_model(found.model_type, **options).eval().requires_grad_(False)


def expected_weight(weight: torch.Tensor, method: Quantization) -> torch.Tensor:
    """Rounded to the nearest number of the type, by rows or groups, in plain torch."""
    if method == "int4":
        group = 128 if weight.shape[-1] % 128 == 0 else 32
        groups = weight.unflatten(-1, (-1, group))
        shrinks = torch.linspace(1, 0.6, 21)
        scales = groups.abs().amax(-1, keepdim=True) / 7 * shrinks.view(21, *[1] * groups.ndim)
        tried = (groups / scales).round().clamp(-8, 7) * scales
        best = (tried - groups).square().sum(-1, keepdim=True).argmin(0, keepdim=True)
        return tried.take_along_dim(best, 0)[0].flatten(-2)
    largest = 127 if method == "int8" else 448
    scale = weight.abs().amax(-1, keepdim=True) / largest
    scaled = weight / scale
    rounded = scaled.round() if method == "int8" else scaled.to(torch.float8_e4m3fn).float()
    return rounded * scale


@pytest.mark.slow
@pytest.mark.parametrize(("name", "method"), [*product(NAMES, METHODS), *product(DENSE, ["int8"])])
def test_layers_are_rounded_and_all_else_is_not(name: str, method: Quantization) -> None:
    model, plain = make(name), dict(make(name).named_parameters())
    quantize_model(model, method, torch.device("cpu"), unpack=True)
    changed = []
    for key, parameter in model.named_parameters():
        before = plain[key]
        if torch.equal(parameter, before):
            continue
        changed.append(key)
        is_turned = before.ndim == 3 and name == "gpt_oss"
        rows = before.mT if is_turned else before
        expected = expected_weight(rows, method)
        assert distance(parameter.mT if is_turned else parameter, expected) < 1e-6, key
        assert distance(expected, rows) < ERRORS[method]
    assert not [key for key in changed if "layers." not in key], "embedding, norm and lm_head stay"
    assert not [key for key in changed if "norm" in key or "router" in key or "mlp.gate." in key]
    inner = [key for key, weight in plain.items() if "layers." in key and weight.ndim > 1]
    plain_ones = ("norm", "router", "mlp.gate.", "bias", "sinks", "embed_tokens")
    assert sorted(changed) == sorted(k for k in inner if not any(one in k for one in plain_ones))


@pytest.mark.slow
@pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET is not 1")
@pytest.mark.parametrize(
    ("name", "method"),
    [
        *product(["qwen2", "qwen3_moe"], METHODS),
        ("gpt_oss", "int4"),
        ("gemma4, experts, keys as values", "fp8"),
    ],
)
def test_packed_layers_compute_what_the_rounded_ones_do(name: str, method: Quantization) -> None:
    packed, rounded = make(name), make(name)
    quantize_model(packed, method, torch.device("cpu"), unpack=False)
    quantize_model(rounded, method, torch.device("cpu"), unpack=True)
    assert distance(logits(packed), logits(rounded)) < 1e-4
    linears = {key for key, m in packed.named_modules() if type(m) is nn.Linear}
    assert {key for key in linears if "router" not in key} == {"lm_head"}
    held = [m for m in packed.modules() if isinstance(m, PackedLinear)]
    weights = [m.packed for m in held]
    for module in experts_of(packed):
        weights += [module.expert_weights.gate_up, module.expert_weights.down]
    assert {weight.format for weight in weights} == {method}
    assert len(weights) >= 4 * 4


def test_a_target_says_how_it_is_quantised(target_folder: Path) -> None:
    assert TargetModel.load(target_folder).quantization is None
    plain = LLM(target_folder, dtype="float32")
    with pytest.warns(UserWarning, match="rounded to int8; on this device they take the memory"):
        rounded = LLM(target_folder, dtype="float32", quantization="int8")
    assert rounded.target.quantization == "int8"
    weights = [dict(llm.target.model.named_parameters()) for llm in (plain, rounded)]
    name = next(key for key in weights[0] if key.endswith("q_proj.weight"))
    assert not torch.equal(weights[0][name], weights[1][name])
    output = rounded.generate([[5, 6, 7]], SamplingParams(max_tokens=8, ignore_eos=True))
    model = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32)
    quantize_model(model, "int8", torch.device("cpu"), unpack=True)
    expected = model.generate(
        torch.tensor([[5, 6, 7]]), do_sample=False, max_new_tokens=8, min_new_tokens=8
    )
    assert output[0].outputs[0].token_ids == expected[0, 3:].tolist()


@torch.no_grad()
@pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET is not 1")
@pytest.mark.parametrize("method", METHODS)
def test_a_head_computes_what_the_rounded_one_does(method: Quantization) -> None:
    heads = [make_head(intermediate_size=64) for _ in range(3)]
    quantize_head(heads[0], method, unpack=False)
    quantize_head(heads[1], method, unpack=True)
    packed, rounded, plain = (draft_of(head, 5) for head in heads)
    assert distance(packed, rounded) < 1e-5
    assert distance(rounded, plain) > 1e-4
    assert {type(m) for m in heads[0].layers[0].self_attn.children()} == {PackedLinear}
    for name, parameter in heads[1].named_parameters():
        is_layer = "layers." in name and parameter.ndim > 1
        assert torch.equal(parameter, heads[2].get_parameter(name)) != is_layer, name
    assert use_skinny(heads[0], max_rows=4) == 2, "fc and lm_head"


@pytest.mark.slow
def test_the_engine_quantises_the_head() -> None:
    outputs = []
    for quantization in (None, "int4"):
        speculative = {"model": "bundled", "quantization": quantization}
        llm = LLM(speculative_config=speculative)
        (output,) = llm.generate(["def add(a, b):"], SamplingParams(max_tokens=24))
        outputs.append((output.outputs[0].token_ids, llm.stats.speculation.acceptance_length))
    assert outputs[0][0] == outputs[1][0], "the head changes no output"
    assert outputs[1][1] > 1


# ---- refusals ----


def test_refuses_inputs_that_do_not_divide() -> None:
    with pytest.raises(
        UserError, match=r"layers\.0\.o_proj has 40 inputs; expected a multiple of 32"
    ):
        pack_weight(torch.ones(8, 40), "int4", "layers.0.o_proj")
    assert isinstance(pack_weight(torch.ones(8, 40), "int8", "layers.0.o_proj"), PackedWeight)


def test_refuses_what_is_quantised_already(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "awq", make_model("qwen3", **SIZES).eval().requires_grad_(False))
    with pytest.raises(UserError, match=r"'int8', but the target .* quantised already \(awq\)"):
        TargetModel.load(tmp_path, quantization="int8")


def test_refuses_other_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("qwen3_moe")
    monkeypatch.setattr("peagle.models.quantize.find_gate", lambda _: None)
    with pytest.raises(UserError, match="have an activation that peagle does not compute"):
        quantize_model(model, "fp8", torch.device("cpu"), unpack=True)


@pytest.mark.parametrize("given", ["fp4", 8])
def test_refuses_other_types(target_folder: Path, given: Any) -> None:
    with pytest.raises(UserError, match=r"quantization is .*fp8.*int8.*int4"):
        LLM(target_folder, quantization=given)


def test_refuses_it_for_a_loaded_target(target_folder: Path) -> None:
    target = TargetModel.load(target_folder)
    with pytest.raises(UserError, match=r"quantization 'fp8'.*; it is .* quantization None"):
        LLM(model=target, quantization="fp8")
