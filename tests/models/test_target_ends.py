"""The ends of a target without its layers give what the whole target gives, or are refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from peagle.errors import CheckpointError, UserError
from peagle.models.checkpoint import load_drafter
from peagle.models.fingerprint import TargetFingerprint
from peagle.models.target import TargetModel
from peagle.models.target_ends import TargetEnds
from tests.conftest import make_target_folder
from tests.models.test_architectures import ARCHITECTURES, pack_experts
from tests.models.tiny import make_model

EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"


def assert_same(folder: Path, dtype: torch.dtype | None) -> TargetEnds:
    """The ends of the model in `folder` are those of the whole model; returns them."""
    whole, ends = TargetModel.load(folder, dtype=dtype), TargetEnds.load(folder, dtype=dtype)
    for name in ("name", "hidden_size", "vocab_size", "num_layers", "dtype", "device"):
        assert getattr(ends, name) == getattr(whole, name), name
    assert TargetFingerprint.of(ends) == TargetFingerprint.of(whole)
    for name in ("intermediate_size", "num_attention_heads", "rope_parameters"):
        assert getattr(ends.text_config, name) == getattr(whole.text_config, name), name
    assert torch.equal(ends.lm_head_weight(), whole.lm_head_weight())
    assert torch.equal(ends.embedding_weight(), whole.embedding_weight())
    hidden = torch.randn(5, whole.hidden_size, generator=torch.Generator().manual_seed(0)) * 3
    hidden = hidden.to(whole.dtype)
    assert torch.equal(ends.compute_logits(hidden), whole.compute_logits(hidden))
    ids = torch.tensor([7, 300, 2])
    assert torch.equal(ends.logits_of(ids)(hidden), whole.logits_of(ids)(hidden))
    return ends


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("sharded", [False, True])
def test_they_are_those_of_the_whole_target(
    tmp_path: Path, tied: bool, sharded: bool, dtype: torch.dtype | None
) -> None:
    folder = make_target_folder(tmp_path, tie_word_embeddings=tied, dtype="bfloat16")
    if sharded:
        model = AutoModelForCausalLM.from_pretrained(folder)
        (folder / "model.safetensors").unlink()
        model.save_pretrained(folder, max_shard_size="20KB")
        assert len(list(folder.glob("model-*.safetensors"))) > 2
    ends = assert_same(folder, dtype)
    assert (ends.embedding_weight() is ends.lm_head_weight()) == tied


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_has_them(tmp_path: Path, name: str) -> None:
    architecture = ARCHITECTURES[name]
    make_model(architecture.model_type, **architecture.options).save_pretrained(tmp_path)
    ends = assert_same(tmp_path, torch.float32)
    bias, softcap = ends._bias_V is not None, ends._softcap is not None
    assert (bias, softcap) == (name == "phi", "final softcap" in architecture.special)


def test_quantised_layers_do_not_matter(tmp_path: Path) -> None:
    options = {**ARCHITECTURES["gpt_oss"].options, "intermediate_size": 64}
    make_model("gpt_oss", **options).save_pretrained(tmp_path)
    pack_experts(tmp_path)
    assert_same(tmp_path, torch.bfloat16)


def edited(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("is_equal", [True, False])
def test_tied_weights_that_are_both_stored(tmp_path: Path, is_equal: bool) -> None:
    """They stay tied if they are equal, as in transformers."""
    folder = make_target_folder(tmp_path, tie_word_embeddings=True)
    edited(folder, lambda t: t.update({LM_HEAD: t[EMBEDDING] + (0 if is_equal else 1)}))
    ends = assert_same(folder, None)
    assert torch.equal(ends.lm_head_weight(), ends.embedding_weight()) == is_equal


def test_of_tied_weights_either_may_be_stored(tmp_path: Path) -> None:
    folder = make_target_folder(tmp_path, tie_word_embeddings=True)
    edited(folder, lambda t: t.update({LM_HEAD: t.pop(EMBEDDING)}))
    assert_same(folder, None)


def test_hidden_states_may_be_of_another_type(target_folder: Path) -> None:
    ends = TargetEnds.load(target_folder, dtype=torch.float32)
    hidden = torch.randn(3, 32).bfloat16()
    assert torch.equal(ends.compute_logits(hidden), ends.compute_logits(hidden.float()))


def test_only_the_ends_are_read(target_folder: Path, tmp_path: Path) -> None:
    """Whatever the layers hold: here nothing."""
    folder = Path(shutil.copytree(target_folder, tmp_path / "copy"))
    edited(folder, lambda t: [t.pop(name) for name in list(t) if ".layers." in name])
    with pytest.raises(CheckpointError, match="lacks tensor"):
        TargetModel.load(folder)
    ends, whole = TargetEnds.load(folder), TargetEnds.load(target_folder)
    assert torch.equal(ends.lm_head_weight(), whole.lm_head_weight())


def test_a_head_is_loaded_for_them(
    head_folders: Callable[..., Path], target_folder: Path, tmp_path: Path
) -> None:
    folder, ends = head_folders(), TargetEnds.load(target_folder)
    whole = TargetModel.load(target_folder)
    for one, other in zip(
        load_drafter(folder, ends).parameters(), load_drafter(folder, whole).parameters()
    ):
        assert torch.equal(one, other)
    other = TargetEnds.load(make_target_folder(tmp_path / "other", seed=1))
    with pytest.raises(CheckpointError, match="lm_head_sha256"):
        load_drafter(folder, other)


# ---- what is refused ----


def quantized(tensors: dict[str, torch.Tensor]) -> None:
    tensors[LM_HEAD] = tensors[LM_HEAD].to(torch.float8_e4m3fn)


REFUSED: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no lm_head": (lambda t: t.pop(LM_HEAD), f"lacks tensor '{LM_HEAD}'. Its weights are inc"),
    "no embedding": (lambda t: t.pop(EMBEDDING), f"lacks tensor '{EMBEDDING}'"),
    "narrow": (lambda t: t.update({LM_HEAD: t[LM_HEAD][:, :7].clone()}), "of shape [320, 7]"),
    "float8": (quantized, "as torch.float8_e4m3fn of shape"),
    "two of a kind": (
        lambda t: t.update({f"a.{LM_HEAD}": t[LM_HEAD].clone(), f"b.{LM_HEAD}": t.pop(LM_HEAD)}),
        f"lacks tensor '{LM_HEAD}'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_ends_that_cannot_be_read_are_refused(
    target_folder: Path, tmp_path: Path, name: str
) -> None:
    folder = Path(shutil.copytree(target_folder, tmp_path / "copy"))
    edit, message = REFUSED[name]
    edited(folder, edit)
    with pytest.raises(CheckpointError) as caught:
        TargetEnds.load(folder)
    assert message in str(caught.value)


def test_quantised_ends_name_the_remedy(target_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(target_folder, tmp_path / "copy"))
    edited(folder, lambda t: t.update({"lm_head.qweight": t.pop(LM_HEAD).to(torch.int8)}))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="It is quantised: use the checkpoint that it was"):
        TargetEnds.load(folder)


def test_broken_folders_are_named(target_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not there"):
        TargetEnds.load(tmp_path / "none")
    folder = Path(shutil.copytree(target_folder, tmp_path / "copy"))
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="is not readable as safetensors"):
        TargetEnds.load(folder)
    weights.rename(folder / "other.safetensors")
    with pytest.raises(CheckpointError, match=r"has neither model.safetensors nor"):
        TargetEnds.load(folder)
    (folder / "other.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="is a pickle"):
        TargetEnds.load(folder)
    (folder / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(CheckpointError, match="model type 'mamba'"):
        TargetEnds.load(folder)


def test_a_shard_that_is_not_there_is_named(tmp_path: Path) -> None:
    folder = make_target_folder(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="20KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    (folder / index["weight_map"][LM_HEAD]).unlink()
    with pytest.raises(CheckpointError, match="is not readable as safetensors"):
        TargetEnds.load(folder)
