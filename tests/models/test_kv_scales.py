"""Scales of an FP8 KV cache: written by compressed-tensors or by name, read into a target."""

from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    apply_quantization_config,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

from peagle import LLM
from peagle.attention.torch_backend import DenseCausalAttention
from peagle.config.engine import KVCacheDType
from peagle.errors import CheckpointError, UserError
from peagle.models.target import TargetModel
from peagle.models.target_facts import precision_of
from tests.models.paging import Paged, largest_difference, make_sequences
from tests.models.test_architectures import ARCHITECTURES
from tests.models.test_packed_loading import distance
from tests.models.tiny import make_model

FP8 = torch.float8_e4m3fn
NAMES = {"k": "self_attn.k_scale", "v": "self_attn.v_scale"}
OLD_NAMES = {"k": "self_attn.k_proj.output_scale", "v": "self_attn.v_proj.output_scale"}


def make() -> Any:
    return make_model("qwen3", hidden_size=64, intermediate_size=96, head_dim=16).eval()


def scales_of(layer: int) -> tuple[float, float]:
    return 0.0625 * (layer + 1), 0.125 * (layer + 1)


def add_tensors(folder: Path, tensors: dict[str, Any]) -> None:
    file = folder / "model.safetensors"
    added = {name: torch.as_tensor(value) for name, value in tensors.items()}
    save_file(load_file(file) | added, file, {"format": "pt"})


def test_those_that_compressed_tensors_writes(tmp_path: Path) -> None:
    model = make()
    args = QuantizationArgs(num_bits=8, type="float", strategy="tensor")
    config = QuantizationConfig(config_groups={}, kv_cache_scheme=args)
    apply_quantization_config(model, config)
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.k_scale.data.fill_(scales_of(index)[0])
        layer.self_attn.v_scale.data.fill_(scales_of(index)[1])
    compressor: Any = ModelCompressor.from_pretrained_model(model)
    model.save_pretrained(tmp_path)
    compressor.update_config(str(tmp_path))
    with pytest.warns(UserWarning, match="quantised"):
        target = TargetModel.load(tmp_path, dtype=torch.float32, kv_cache_dtype="fp8")
    assert target.kv_scales == [scales_of(layer) for layer in range(4)]
    assert target.kv_type == "fp8, scales of the checkpoint"
    for cache, scales in zip(target.make_kv_caches(2, 4), target.kv_scales, strict=True):
        assert (cache.keys.dtype, cache.values.dtype) == (FP8, FP8)
        assert (cache.key_scale, cache.value_scale) == scales


@pytest.mark.parametrize("names", [NAMES, OLD_NAMES])
def test_both_names_beside_plain_weights(tmp_path: Path, names: dict[str, str]) -> None:
    make().save_pretrained(tmp_path)
    scales = {f"model.layers.{i}.{names['k']}": scales_of(i)[0] for i in (0, 2)}
    scales |= {f"model.layers.2.{names['v']}": scales_of(2)[1], "model.layers.1.q_scale": 9.0}
    add_tensors(tmp_path, scales)
    target = TargetModel.load(tmp_path, kv_cache_dtype="fp8")
    one = (1.0, 1.0)
    assert target.kv_scales == [(scales_of(0)[0], 1.0), one, scales_of(2), one]
    plain = TargetModel.load(tmp_path)
    assert plain.kv_scales == [one] * 4 and plain.make_kv_caches(1, 4)[2].key_scale == 1.0
    assert plain.kv_type == "float32" and precision_of(plain) == "float32"


def test_layers_that_share_a_cache_have_its_owner_s_scales(tmp_path: Path) -> None:
    found = ARCHITECTURES["gemma4, shared keys"]
    make_model(found.model_type, **found.options).save_pretrained(tmp_path)
    target = TargetModel.load(tmp_path)
    count = len(target.kv_shapes())
    assert count < target.num_layers
    target.round_kv({layer: scales_of(layer) for layer in range(target.num_layers)})
    owners = [scales_of(layer) for layer in range(count)]
    assert target.kv_scales == owners


def test_without_scales_they_are_1(target_folder: Path) -> None:
    target = TargetModel.load(target_folder, kv_cache_dtype="fp8")
    assert set(target.kv_scales) == {(1.0, 1.0)} and target.kv_type == "fp8, scales 1"
    assert precision_of(target).endswith(", fp8 KV cache")


def test_scales_change_what_is_rounded(tmp_path: Path) -> None:
    make().save_pretrained(tmp_path)
    tokens, attend = torch.arange(5, 45), DenseCausalAttention(1)

    def hidden(kv_cache_dtype: KVCacheDType = "fp8") -> Tensor:
        target = TargetModel.load(tmp_path, kv_cache_dtype=kv_cache_dtype)
        return target.forward(tokens, torch.arange(40), attend)[0]

    plain, at_1 = hidden("auto"), hidden()
    add_tensors(tmp_path, {f"model.layers.{i}.{NAMES['k']}": 0.013 for i in range(4)})
    scaled = hidden()
    add_tensors(tmp_path, {f"model.layers.{i}.{NAMES['k']}": 1e-5 for i in range(4)})
    cut = hidden()
    assert torch.equal(plain, hidden("auto"))
    assert 0 < distance(at_1, plain) < 0.1 and 0 < distance(scaled, plain) < 0.1
    assert distance(scaled, at_1) > 1e-4
    assert distance(cut, plain) > 2 * distance(at_1, plain), "all keys are cut to 448e-5"


# ---- every architecture ----


@torch.no_grad()
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_paged_passes_compute_what_whole_ones_do(name: str) -> None:
    """Prompts, then drafts, over shuffled blocks; windows, sinks and softcaps included."""
    found = ARCHITECTURES[name]
    target = TargetModel(make_model(found.model_type, **found.options).double())
    plain = whole(target)
    target.round_kv({layer: scales_of(layer) for layer in range(0, target.num_layers, 2)})
    paged = Paged(target, make_sequences())
    prompts = paged.prefill()[0]
    drafts = paged.verify()
    assert {cache.keys.dtype for cache in paged.caches} == {FP8}
    expected = whole(target)
    logits = [torch.cat(both) for both in zip(prompts, drafts, strict=True)]
    assert largest_difference(logits, expected) < 1e-10
    assert largest_difference(expected, plain) > 1e-4


def whole(target: TargetModel) -> list[Tensor]:
    """Logits of every sequence in one pass without a cache."""
    logits = []
    for sequence in make_sequences():
        tokens, positions = torch.tensor(sequence), torch.arange(len(sequence))
        hidden, _ = target.forward(tokens, positions, DenseCausalAttention(1))
        logits.append(target.compute_logits(hidden))
    return logits


# ---- refusals ----


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (torch.ones(2, 1, 1), r"\[2, 1, 1\] numbers"),
        (0.0, "with 0.0"),
        (-1.0, "with -1.0"),
        (float("nan"), "with nan"),
    ],
)
def test_refuses_scales_that_are_not_one_positive_number(
    tmp_path: Path, value: Any, named: str
) -> None:
    make().save_pretrained(tmp_path)
    name = f"model.layers.1.{NAMES['v']}"
    add_tensors(tmp_path, {name: value})
    with pytest.raises(CheckpointError, match=rf"{name}.*{named}; expected one positive number"):
        TargetModel.load(tmp_path, kv_cache_dtype="fp8")
    TargetModel.load(tmp_path)  # only where they are asked for


@pytest.mark.parametrize("given", ["fp4", "fp8_e5m2", 8])
def test_refuses_other_types(target_folder: Path, given: Any) -> None:
    with pytest.raises(UserError, match=r"kv_cache_dtype is .*; expected one of auto, fp8"):
        LLM(target_folder, kv_cache_dtype=given)


def test_refuses_it_for_a_loaded_target(target_folder: Path) -> None:
    target = TargetModel.load(target_folder)
    with pytest.raises(UserError, match=r"kv_cache_dtype 'fp8'; it is .* kv_cache_dtype 'auto'"):
        LLM(model=target, kv_cache_dtype="fp8")
