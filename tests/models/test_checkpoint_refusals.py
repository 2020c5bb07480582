"""Draft heads that are refused, each with a message that names what is wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from peagle.errors import CheckpointError, UserError
from peagle.models.checkpoint import load_drafter, save_drafter
from peagle.models.fingerprint import TargetFingerprint
from peagle.models.target import TargetModel
from tests.conftest import make_drafter, make_target_folder
from tests.models.editing import edit_config, edit_tensors


def refusal(folder: Path, target: TargetModel) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_drafter(folder, target)
    return str(caught.value)


# ---- what is refused ------------------------------------------------------------------------


def test_a_missing_folder_is_refused(target: TargetModel, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="draft head .*nothing' is not there"):  # noqa: RUF043
        load_drafter(tmp_path / "nothing", target)


def test_a_missing_config_is_refused(head: Path, target: TargetModel) -> None:
    (head / "config.json").unlink()
    assert refusal(head, target) == f"The draft head {str(head)!r} has no config.json."


@pytest.mark.parametrize("text", [b"{", b"", b"[]", b'"x"', b"\xff\xfe\x00"])
def test_a_config_that_is_not_an_object_is_refused(
    head: Path, target: TargetModel, text: bytes
) -> None:
    (head / "config.json").write_bytes(text)
    message = refusal(head, target)
    assert str(head / "config.json") in message
    assert "is not JSON" in message or "expected an object" in message


AUX = "eagle_aux_hidden_state_layer_ids"
BAD_VALUES: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["PEagleForCausalLM"]}, "expected one of LlamaForCausalLMEagle3"),
    ({"architectures": None}, "architectures is []"),
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; expected 'silu'"),
    ({AUX: None, "eagle_config": {}}, "eagle_config.eagle_aux_hidden_state_layer_ids is missing"),
    ({"eagle_config": [1]}, "eagle_config is [1]; expected an object"),
    ({"peagle": "x"}, "peagle is 'x'; expected an object"),
    ({"peagle": {"format_version": 2}}, "format_version is 2, newer than this peagle reads (1)"),
    ({"peagle": {"format_version": "2"}}, "format_version is '2'; expected a whole number"),
    ({"hidden_size": None}, "the key 'hidden_size' is missing"),
    ({"vocab_size": None}, "the key 'vocab_size' is missing"),
    ({"num_hidden_layers": "2"}, "num_layers is '2'; expected a whole number"),
    ({"intermediate_size": 40.5}, "intermediate_size is 40.5"),
    ({"num_attention_heads": [4]}, "num_attention_heads is [4]"),
    ({"num_attention_heads": "4", "head_dim": None}, "a value is of the wrong type"),
    ({"mask_token_id": 320, "pard_token": None}, "mask token id is 320"),
    ({"draft_vocab_size": 321}, "draft_vocab_size is 321"),
    ({"rope_parameters": {"rope_type": "longrope"}}, "RoPE type is 'longrope'"),
    ({"rope_parameters": None, "rope_scaling": {"type": "ntk"}}, "RoPE type is 'ntk'"),
    ({"rope_parameters": 3}, "rope_parameters is 3; expected an object"),
]


@pytest.mark.parametrize(("change", "message"), BAD_VALUES, ids=lambda v: str(v))
def test_bad_values_are_refused(
    head: Path, target: TargetModel, change: dict[str, Any], message: str
) -> None:
    edit_config(head, **change)
    found = refusal(head, target)
    assert message in found
    assert str(head / "config.json") in found


@pytest.mark.parametrize(
    "name",
    [
        "fc.weight",
        "norm.weight",
        "layers.0.hidden_norm.weight",
        "layers.0.self_attn.k_proj.weight",
        "layers.1.mlp.up_proj.weight",
        "mask_hidden",
    ],
)
def test_a_missing_tensor_is_named(head: Path, target: TargetModel, name: str) -> None:
    edit_tensors(head, lambda tensors: tensors.pop(name))
    message = refusal(head, target)
    assert f"tensor {name!r} is missing" in message
    assert str(head / "model.safetensors") in message
    assert ("so it is a P-EAGLE head" in message) == (name == "mask_hidden")


def test_a_pruned_head_needs_its_own_output_embedding(target: TargetModel, tmp_path: Path) -> None:
    save_drafter(tmp_path, make_drafter(target, draft_vocab_size=100))
    for name in ("lm_head.weight", "d2t"):
        folder = Path(shutil.copytree(tmp_path, tmp_path / name))
        edit_tensors(folder, lambda tensors, name=name: tensors.pop(name))
        assert f"tensor {name!r} is missing" in refusal(folder, target)


def test_an_unknown_tensor_is_named(head: Path, target: TargetModel) -> None:
    more = {"layers.2.mlp.up_proj.weight": torch.zeros(40, 32), "z": torch.zeros(1)}
    edit_tensors(head, lambda tensors: tensors.update(more))
    message = refusal(head, target)
    assert "tensor 'layers.2.mlp.up_proj.weight' is unknown to this head (2 in all)" in message


def test_an_autoregressive_head_with_a_mask_state_is_refused(
    head: Path, target: TargetModel
) -> None:
    edit_config(head, mask_token_id=None, pard_token=None, ptd_token_id=None)
    assert "tensor 'mask_hidden' is unknown" in refusal(head, target)


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("fc.weight", (32, 64), [32, 96]),
        ("layers.0.self_attn.q_proj.weight", (32, 32), [32, 64]),
        ("layers.1.self_attn.v_proj.weight", (32, 32), [16, 32]),
        ("norm.weight", (1, 32), [32]),
        ("mask_hidden", (1, 1, 64), [1, 1, 96]),
        ("embed_tokens.weight", (319, 32), [320, 32]),
    ],
)
def test_a_misshapen_tensor_is_named(
    head: Path, target: TargetModel, name: str, shape: tuple[int, ...], expected: list[int]
) -> None:
    edit_tensors(head, lambda tensors: tensors.update({name: torch.zeros(shape)}))
    message = refusal(head, target)
    assert f"tensor {name!r} has shape {list(shape)}; expected {expected}" in message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t["d2t"].add_(300), "expected distinct ids from 0 to 319"),
        (lambda t: t["d2t"].sub_(300), "expected distinct ids from 0 to 319"),
        (lambda t: t.update(d2t=-torch.arange(100)), "maps draft ids to target ids 0 to 0"),
        (lambda t: t.update(t2d=~t["t2d"]), "d2t and t2d disagree"),
    ],
    ids=["too high", "below zero", "not distinct", "disagree"],
)
def test_wrong_vocabulary_maps_are_refused(
    target: TargetModel, tmp_path: Path, change: Callable[..., Any], message: str
) -> None:
    save_drafter(tmp_path, make_drafter(target, draft_vocab_size=100))
    edit_tensors(tmp_path, change)
    assert message in refusal(tmp_path, target)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "head.pt", "model.ckpt"])
def test_pickled_weights_are_refused_unread(head: Path, target: TargetModel, name: str) -> None:
    (head / "model.safetensors").rename(head / name)
    message = refusal(head, target)
    assert str(head / name) in message
    assert "is a pickle" in message
    assert "expected model.safetensors" in message


def test_missing_and_broken_weights_are_refused(head: Path, target: TargetModel) -> None:
    file = head / "model.safetensors"
    content = file.read_bytes()
    for broken in (content[:-8], b"", b"x" * 64):
        file.write_bytes(broken)
        assert f"{str(file)!r} is not readable as safetensors" in refusal(head, target)
    file.unlink()
    assert refusal(head, target) == f"The draft head {str(head)!r} has no model.safetensors."


# ---- another target -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 300}, "has vocab_size 320, the target"),
        ({"hidden_size": 48}, "has target_hidden_size 32, the target"),
        ({"num_hidden_layers": 3}, "reads target layers [1, 2, 3], but"),
    ],
    ids=str,
)
def test_a_head_of_a_target_of_other_sizes_is_refused(
    head: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    other = TargetModel.load(make_target_folder(tmp_path / "other", **change))
    found = refusal(head, other)
    assert message in found
    assert "it is a head of another target" in found
    assert str(tmp_path / "other") in found


def test_a_head_of_another_target_of_the_same_sizes_is_refused(head: Path, tmp_path: Path) -> None:
    other = TargetModel.load(make_target_folder(tmp_path / "other", seed=1))
    message = refusal(head, other)
    assert "was trained for target 'llama" in message
    assert f"not for {str(tmp_path / 'other')!r}: lm_head_sha256 is" in message
    assert '"check_target": false' in message
    load_drafter(head, other, check_target=False)


def test_other_depth_and_other_tokenizer_are_refused(
    head: Path, target_folder: Path, tmp_path: Path
) -> None:
    deeper = TargetModel.load(make_target_folder(tmp_path / "deeper", num_hidden_layers=6))
    assert "num_layers is 6, the head expects 4" in refusal(head, deeper)
    other = Path(shutil.copytree(target_folder, tmp_path / "other"))
    with (other / "tokenizer.json").open("a") as file:
        file.write("\n")
    assert "tokenizer_sha256 is" in refusal(head, TargetModel.load(other))
    (other / "tokenizer.json").unlink()
    load_drafter(head, TargetModel.load(other))  # nothing to compare with


def test_a_head_without_fingerprint_loads(target: TargetModel, tmp_path: Path) -> None:
    drafter = make_drafter(target)
    save_drafter(tmp_path, drafter)
    assert load_drafter(tmp_path, target).config == drafter.config


@pytest.mark.parametrize("fingerprint", [{"name": "x"}, {"unknown": 1}, [], "x"], ids=str)
def test_an_unreadable_fingerprint_is_refused(
    head: Path, target: TargetModel, fingerprint: Any
) -> None:
    edit_config(head, peagle={"format_version": 1, "target": fingerprint})
    assert "fingerprint is not readable" in refusal(head, target)


def test_the_fingerprint_is_the_same_in_every_type(target_folder: Path, tmp_path: Path) -> None:
    """Heads are trained in one type and served in another; bfloat16 is the common ground."""
    model = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.bfloat16)
    folder = tmp_path / target_folder.name
    shutil.copytree(target_folder, folder)
    model.save_pretrained(folder)
    types = (torch.float32, torch.float64, torch.bfloat16, None)
    found = [TargetFingerprint.of(TargetModel.load(folder, dtype=dtype)) for dtype in types]
    assert len(set(found)) == 1
    # A float32 checkpoint rounds to the same rows as its bfloat16 copy.
    stored_wide = TargetFingerprint.of(TargetModel.load(target_folder, dtype=torch.float64))
    assert stored_wide == found[0]
    # float16 loses small values: the rows are then not compared, the rest is.
    narrow = TargetModel.load(folder, dtype=torch.float16)
    found[0].check(narrow, "head")
    assert TargetFingerprint.from_json(json.loads(json.dumps(found[0].to_json()))) == found[0]


def test_the_fingerprint_sees_a_changed_output_embedding(target: TargetModel) -> None:
    before = TargetFingerprint.of(target)
    target.lm_head_weight()[0] *= 1.5
    with pytest.raises(CheckpointError, match="lm_head_sha256"):
        before.check(target, "head")
