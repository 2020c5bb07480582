"""The target as it is loaded: taps, defaults, and every folder that it refuses.

That it computes what transformers does, test_architectures.py shows.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, GPT2Config

from peagle.errors import CheckpointError, UserError
from peagle.models.target import TargetModel, default_aux_layer_ids, load_tokenizer
from peagle.models.target_attention import attention
from tests.models.editing import edit_config, edit_tensors
from tests.models.paging import Paged, make_sequences

ROPE = {"rope_theta": 10000.0, "factor": 4.0}


def test_taps_are_replaced_and_removed(target: TargetModel) -> None:
    widths = []
    for ids in [(1, 2, 3), (2,), ()]:
        target.tap_aux(ids)
        _, features, _ = Paged(target, make_sequences()).prefill()
        widths.append(features[0].shape[-1])
    assert widths == [96, 32, 0]


@pytest.mark.parametrize("ids", [(4,), (-1, 2), (2, 1), (1, 1, 2)], ids=str)
def test_bad_aux_layers_are_refused(target: TargetModel, ids: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match=r"from 0 to 3 \(the target has 4 layers\)") as caught:
        target.tap_aux(ids)
    assert str(list(ids)) in str(caught.value)


DEFAULT_AUX = {
    1: (0,), 2: (0, 1), 3: (0, 1, 2), 4: (1, 2, 3), 5: (1, 2, 4), 6: (1, 3, 5), 7: (2, 3, 4),
    8: (2, 4, 5), 9: (2, 4, 6), 10: (2, 5, 7), 11: (2, 5, 8), 12: (2, 6, 9), 13: (2, 6, 10),
    14: (2, 7, 11), 15: (2, 7, 12), 16: (2, 8, 13), 17: (2, 8, 14), 18: (2, 9, 15),
    19: (2, 9, 16), 20: (2, 10, 17), 21: (2, 10, 18), 22: (2, 11, 19), 23: (2, 11, 20),
    24: (2, 12, 21), 25: (2, 12, 22), 26: (2, 13, 23), 27: (2, 13, 24), 28: (2, 14, 25),
    29: (2, 14, 26), 30: (2, 15, 27), 31: (2, 15, 28), 32: (2, 16, 29), 33: (2, 16, 30),
    34: (2, 17, 31), 35: (2, 17, 32), 36: (2, 18, 33), 37: (2, 18, 34), 38: (2, 19, 35),
    39: (2, 19, 36), 40: (2, 20, 37),
}  # fmt: skip


def test_default_aux_layers() -> None:
    assert {n: default_aux_layer_ids(n) for n in range(1, 41)} == DEFAULT_AUX
    for num_layers, ids in DEFAULT_AUX.items():
        assert len(ids) == min(3, num_layers)
        assert list(ids) == sorted(set(ids))
        assert ids[-1] < num_layers


# ---- what the attention function refuses ----


def call_attention(**keywords: Any) -> None:
    rows = torch.zeros(1, 2, 3, 4)
    keywords = {"attend": lambda q, k, v, **_: q, "attention_mask": None, **keywords}
    attention(torch.nn.Identity(), rows, rows, rows, **keywords)


@pytest.mark.parametrize("name", ["position_bias", "sinks", "indices"])
def test_keywords_that_change_the_result_are_refused(name: str) -> None:
    call_attention(**{name: None, "position_ids": torch.zeros(1), "is_causal": True})
    with pytest.raises(RuntimeError, match=name):
        call_attention(**{name: torch.ones(1)})


@pytest.mark.parametrize("extra", [{"attention_mask": torch.ones(1)}, {"dropout": 0.1}], ids=str)
def test_masks_and_dropout_are_refused(extra: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match="attention_mask or dropout"):
        call_attention(**extra)


def test_the_model_runs_only_inside_peagle(target: TargetModel) -> None:
    with pytest.raises(RuntimeError, match="only inside peagle"):
        target.model(torch.tensor([[1, 2]]), use_cache=False)


# ---- folders that are not usable ----


@pytest.fixture
def broken(target_folder: Path, tmp_path: Path) -> Path:
    """A copy of the tiny Llama, to be broken."""
    return Path(shutil.copytree(target_folder, tmp_path / "broken"))


def refusal(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        TargetModel.load(folder)
    return str(caught.value)


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    message = refusal(tmp_path / "nothing")
    assert str(tmp_path / "nothing") in message
    assert "is not there; expected a folder with config.json" in message


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("")
    assert "is a file, not a folder" in refusal(tmp_path / "model")


def test_a_folder_without_config_is_refused(broken: Path) -> None:
    (broken / "config.json").unlink()
    message = refusal(broken)
    assert str(broken) in message
    assert "has no config.json; expected a folder in Hugging Face format" in message


@pytest.mark.parametrize("text", ["{", "", "[1, 2]", '"llama"', "{}", '{"model_type": "nonsense"}'])
def test_a_config_that_is_not_a_models_is_refused(broken: Path, text: str) -> None:
    (broken / "config.json").write_text(text)
    assert str(broken / "config.json") in refusal(broken)


@pytest.mark.parametrize("config", [BertConfig(), GPT2Config()], ids=lambda c: c.model_type)
def test_an_unsupported_architecture_is_refused(config: Any, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path)
    message = refusal(tmp_path)
    assert repr(config.model_type) in message
    assert "supported: llama, qwen2, qwen3" in message


@pytest.mark.parametrize(
    "change",
    [
        {"rope_parameters": {**ROPE, "rope_type": "dynamic"}},
        {"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
    ],
    ids=["dynamic", "dynamic, old style"],
)
def test_rope_that_looks_at_the_batch_is_refused(broken: Path, change: dict[str, Any]) -> None:
    edit_config(broken, **change)
    message = refusal(broken)
    assert "'dynamic'" in message
    assert "supported: default, linear, llama3, yarn" in message


def test_pickled_weights_are_refused_unread(broken: Path) -> None:
    (broken / "model.safetensors").unlink()
    # Not even a pickle: reading it would fail in another way.
    (broken / "pytorch_model.bin").write_bytes(b"never read")
    message = refusal(broken)
    assert str(broken / "pytorch_model.bin") in message
    assert "is a pickle" in message
    assert "expected *.safetensors" in message
    assert "save_pretrained" in message


def test_missing_weights_are_refused(broken: Path) -> None:
    (broken / "model.safetensors").unlink()
    assert "has no *.safetensors weights" in refusal(broken)


def test_a_context_beyond_the_targets_is_refused_before_its_weights(broken: Path) -> None:
    (broken / "model.safetensors").unlink()
    with pytest.raises(UserError, match="max_model_len is 257; the target's positions end at 256"):
        TargetModel.load(broken, max_model_len=257)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def fill_with_text(file: Path) -> None:
    file.write_text("not a tensor file")


def drop_a_tensor(file: Path) -> None:
    edit_tensors(file.parent, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))


def reshape_a_tensor(file: Path) -> None:
    edit_tensors(file.parent, lambda t: t.update({"model.norm.weight": torch.ones(7)}))


@pytest.mark.parametrize("damage", [truncate, fill_with_text, drop_a_tensor, reshape_a_tensor])
def test_broken_weights_are_refused(broken: Path, damage: Any) -> None:
    damage(broken / "model.safetensors")
    message = refusal(broken)
    assert str(broken) in message
    if damage is drop_a_tensor:
        assert "model.layers.1.mlp.up_proj.weight" in message


def test_a_folder_without_tokenizer_is_refused(broken: Path) -> None:
    for file in broken.glob("*token*"):
        file.unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer of .*broken.* does not load"):
        load_tokenizer(broken)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_loads_in_the_type_asked_for_and_frozen(target_folder: Path, dtype: torch.dtype) -> None:
    target = TargetModel.load(target_folder, dtype=dtype)
    assert {p.dtype for p in target.model.parameters()} == {dtype}
    assert target.dtype == dtype
    assert not any(p.requires_grad for p in target.model.parameters())
    assert not target.model.training
