"""Heads whose linear layers are stored quantised, written by compressed-tensors."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from peagle import LLM, SamplingParams
from peagle.errors import CheckpointError
from peagle.models.checkpoint import convert_head, head_identity, load_drafter, read_head
from peagle.models.packed_layers import PackedLinear
from peagle.models.target import TargetModel
from tests.models.editing import edit_config
from tests.models.test_packed_loading import FORMATS

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
QUANTISED = [name for name in FORMATS if name.startswith(("fp8", "int"))]
TOKENS = torch.arange(9)


def quantised(folder: Path, format: str) -> dict[str, torch.Tensor]:
    """Store a head's linear layers so; returns the tensors that this stands for."""
    write, config = FORMATS[format]
    path = folder / "model.safetensors"
    stored, plain = {}, {}
    for name, value in load_file(path).items():
        is_linear = value.dim() == 2 and name.startswith(("layers.", "fc."))
        if not is_linear:
            stored[name] = plain[name] = value
            continue
        tensors, plain[name] = write(value.float())
        layer = name.removesuffix("weight")
        stored |= {f"{layer}{last}": one.contiguous() for last, one in tensors.items()}
    save_file(stored, path)
    edit_config(folder, quantization_config={"quant_method": "compressed-tensors", **config})
    return plain


def outputs(drafter: Any) -> torch.Tensor:
    def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
        return query

    hidden = drafter.combine_features(torch.linspace(-1, 1, 9 * 96).view(9, -1))
    return drafter.compute_logits(drafter(TOKENS, hidden, TOKENS, attend))


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("format", [*QUANTISED, "gptq by activation"])
def test_a_quantised_head_is_what_it_stands_for(
    target_folder: Path, head_folders: Callable[..., Path], format: str
) -> None:
    folder = head_folders(num_kv_heads=2, **SIZES)
    plain = quantised(folder, format)
    target = TargetModel.load(target_folder, dtype=torch.float32)
    drafter = load_drafter(folder, target)
    fused = {"q_proj": "qkv_proj", "gate_proj": "gate_up_proj"}
    for name, module in drafter.named_modules():
        for part, joined in fused.items():
            if name.endswith(joined):
                first = plain[f"{name.replace(joined, part)}.weight"]
                found = module.weight[: len(first)]  # type: ignore[index]
                torch.testing.assert_close(found, first.float(), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(drafter.fc.weight, plain["fc.weight"].float(), atol=1e-6, rtol=1e-6)
    packed = load_drafter(folder, target, unpack=False)
    # Weights whose inputs have an order of their own are unpacked.
    num_packed = 2 * 4 if format in QUANTISED else 0
    assert sum(isinstance(one, PackedLinear) for one in packed.modules()) == num_packed
    torch.testing.assert_close(outputs(packed), outputs(drafter), atol=2e-2, rtol=2e-2)
    head_identity(folder, read_head(folder).config)


def test_an_engine_drafts_with_it(target_folder: Path, head_folders: Callable[..., Path]) -> None:
    folder = head_folders(**SIZES)
    quantised(folder, "int4")
    config = {"model": str(folder), "num_speculative_tokens": 3}
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    (output,) = LLM(target_folder, speculative_config=config, dtype="float32").generate(
        "abc", params
    )
    (plain,) = LLM(target_folder, dtype="float32").generate("abc", params)
    assert output.token_ids == plain.token_ids and output.stats.num_drafts > 0


def test_what_cannot_be_read_is_named(
    target: TargetModel, head_folders: Callable[..., Path], tmp_path: Path
) -> None:
    folder = head_folders(**SIZES)
    quantised(folder, "int4")
    shutil.copytree(folder, tmp_path / "undescribed")
    edit_config(tmp_path / "undescribed", quantization_config=None)
    with pytest.raises(CheckpointError, match=r"stored quantised, and its config.json does not sa"):
        convert_head(tmp_path / "undescribed", tmp_path / "other", "speculators")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    lost = tensors.pop("layers.0.self_attn.q_proj.weight_scale")
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=r"lacks tensor 'layers.0.self_attn.q_proj.weight_sc"):
        load_drafter(folder, target)
    save_file({**tensors, "layers.0.self_attn.q_proj.weight_scale": lost[:1]}, path)
    with pytest.raises(CheckpointError, match=r"q_proj.weight_scale' as .*; expected"):
        load_drafter(folder, target)
    edit_config(folder, quantization_config={"quant_method": "hqq"})
    with pytest.raises(CheckpointError, match=r"safetensors: .*'hqq'; peagle reads"):
        load_drafter(folder, target)
