"""Heads that no run can start from, each with a message that says why and what to do."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from peagle.errors import UserError
from peagle.models.target import TargetModel
from peagle.training.warm_start import InitHead
from tests.conftest import make_drafter, make_target_folder
from tests.models.editing import edit_config, edit_tensors
from tests.training.warm_starting import save, warm

OTHER = dict.fromkeys(
    ("hidden_size", "intermediate_size", "num_attention_heads", "head_dim", "draft_vocab_size"), 6
)


@pytest.fixture
def peagle_head(target: TargetModel, tmp_path: Path) -> Path:
    return save(tmp_path / "p", target, make_drafter(target, trained_depth=6))


def refusal(target_folder: Path, init: Path, tmp_path: Path, **changes: Any) -> str:
    with pytest.raises(UserError) as caught:
        warm(target_folder, init, tmp_path, **changes)
    return str(caught.value)


@pytest.mark.parametrize(
    ("given", "values"),
    [
        *(({name: value}, f"head.{name} is {value}, but") for name, value in OTHER.items()),
        ({"num_kv_heads": 4}, "has 2. Leave head.num_kv_heads out"),
        ({"aux_layer_ids": (0, 1, 3)}, "head.aux_layer_ids is [0, 1, 3], but"),
        ({"fc_norm": True}, "head.fc_norm is true, but"),
        ({"norm_before_fc": True}, "has false"),
        ({"norm_before_residual": True}, "has false"),
        ({"norm_output": True}, "has false"),
        ({"qk_norm": True}, "has false"),
        ({"mask_token_id": 5}, "head.mask_token_id is 5, but"),
        ({"num_layers": 1}, "has 2 layers; expected as many or more"),
    ],
    ids=str,
)
def test_geometry_that_contradicts_the_head_is_refused(
    target_folder: Path, peagle_head: Path, tmp_path: Path, given: dict[str, Any], values: str
) -> None:
    message = refusal(target_folder, peagle_head, tmp_path, head=given)
    assert values in message and str(peagle_head) in message
    assert f"Leave head.{next(iter(given))} out" in message.replace("\n", " ")


def test_heads_for_other_tokens_or_features_are_refused(
    target: TargetModel, peagle_head: Path, tmp_path: Path
) -> None:
    others: tuple[tuple[str, dict[str, Any], str], ...] = (
        ("v", {"vocab_size": 330}, "has vocab_size 320, the target"),
        ("h", {"hidden_size": 40}, "has target_hidden_size 32, the target"),
        ("l", {"num_hidden_layers": 2}, "reads target layers [1, 2, 3], but"),
    )
    for name, change, message in others:
        other = make_target_folder(tmp_path / name, **change)
        found = refusal(other, peagle_head, tmp_path)
        assert message in found and found.startswith("head.init: ")
        assert "leave head.init out" in found.lower()


def test_another_tokenizer_is_refused(
    target: TargetModel, target_folder: Path, peagle_head: Path, tmp_path: Path
) -> None:
    other = shutil.copytree(target_folder, tmp_path / "tuned")
    with (other / "tokenizer.json").open("a") as file:
        file.write("\n")
    message = refusal(other, peagle_head, tmp_path)
    assert "trained with another tokenizer" in message and "copy the tokenizer.json of" in message
    (other / "tokenizer.json").unlink()
    init = InitHead.read(peagle_head, TargetModel.load(other))
    assert any("the target has no tokenizer.json" in warning for warning in init.warnings)


def spoil(tensors: dict[str, Tensor]) -> None:
    tensors["fc.weight"][0, 0] = float("nan")


def narrow(tensors: dict[str, Tensor]) -> None:
    tensors["norm.weight"] = tensors["norm.weight"][:-1]


def test_broken_heads_are_refused(target_folder: Path, peagle_head: Path, tmp_path: Path) -> None:
    def copy(name: str) -> Path:
        return Path(shutil.copytree(peagle_head, tmp_path / name / "head"))

    assert "not there" in refusal(target_folder, tmp_path / "nothing", tmp_path)
    run = copy("run").parent
    assert f"Did you mean {str(run / 'head')!r}?" in refusal(target_folder, run, tmp_path)
    assert "a file, not a folder" in refusal(target_folder, run / "head/config.json", tmp_path)
    assert "head.init: " in refusal(target_folder, target_folder, tmp_path)
    for name, change, message in (
        ("nan", spoil, "'fc.weight' holds NaN"),
        ("narrow", narrow, "'norm.weight' has shape [31]; expected [32]"),
        ("less", lambda tensors: tensors.pop("mask_hidden"), "'mask_hidden' is missing"),
    ):
        head = copy(name)
        edit_tensors(head, change)
        assert message in refusal(target_folder, head, tmp_path)
    pickled = copy("pickled")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    assert "is a pickle" in refusal(target_folder, pickled, tmp_path)
    unreadable = copy("unreadable")
    edit_config(unreadable, peagle={"target": {"name": "x"}})
    assert "fingerprint is not readable" in refusal(target_folder, unreadable, tmp_path)
    own = save_to_output(tmp_path, peagle_head)
    assert "where this run writes its head" in refusal(target_folder, own, tmp_path)


def save_to_output(tmp_path: Path, head: Path) -> Path:
    return Path(shutil.copytree(head, tmp_path / "out" / "head"))
