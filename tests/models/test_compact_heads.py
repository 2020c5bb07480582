"""Compact heads: their ends are the target's, their layers are quantised, and they draft the same.

compressed-tensors, which defines the format of the quantised layers, reads what is written here.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from peagle import LLM, SamplingParams
from peagle.backends.vllm.launch import VllmLaunch, with_head
from peagle.config import SpeculativeConfig
from peagle.doctor.files import examine_files
from peagle.errors import CheckpointError, UserError
from peagle.models.checkpoint import (
    compact_head,
    convert_head,
    load_correction,
    load_drafter,
    save_drafter,
    split_tensors,
)
from peagle.models.checkpoint.ends import ENDS, FROM_TARGET_KEY, has_target_ends
from peagle.models.checkpoint.whole import whole_head
from peagle.models.drafter import Drafter
from peagle.models.fingerprint import TargetFingerprint
from peagle.models.head_quantization import StoredQuantization
from peagle.models.target import TargetModel
from peagle.models.target_ends import TargetEnds
from peagle.training.published_head import read_published
from tests.compressed import unpacked_weights
from tests.conftest import make_drafter, make_target_folder
from tests.corrections import add_correction
from tests.models.editing import edit_config, edit_tensors

TYPES: tuple[StoredQuantization, ...] = ("int8", "int4")
HEADS: list[dict[str, Any]] = [{}, {"draft_vocab_size": 90}, {"parallel": False, "num_layers": 1}]


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def own_target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target_folder(tmp_path_factory.mktemp("own"), tie_word_embeddings=request.param)


def with_target_ends(target: TargetModel, **options: Any) -> Drafter:
    """A random head whose ends are the target's."""
    drafter = make_drafter(target, **{"intermediate_size": 64, **options})
    with torch.no_grad():
        drafter.embed_tokens.weight.copy_(target.embedding_weight())
        drafter.lm_head.weight.copy_(target.lm_head_weight()[drafter.target_ids()])
    return drafter


def save_compact(folder: Path, target_folder: Path, **options: Any) -> Path:
    target = TargetModel.load(target_folder)
    drafter = with_target_ends(target, **options)
    mark = TargetFingerprint.of(target)
    save_drafter(folder, drafter, fingerprint=mark, dtype=torch.bfloat16, ends_are_targets=True)
    return folder


def weights(drafter: Drafter) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in split_tensors(drafter)}


# ---- ends ----


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "dtype"),
    list(zip(HEADS, (torch.float32, torch.bfloat16, torch.float32), strict=True)),
    ids=str,
)
def test_ends_that_are_not_stored_are_the_targets(
    own_target: Path, tmp_path: Path, options: dict[str, Any], dtype: torch.dtype
) -> None:
    folder = save_compact(tmp_path / "head", own_target, **options)
    stored = load_file(folder / "model.safetensors")
    assert not set(ENDS) & set(stored)
    rows = load_file(own_target / "model.safetensors")
    embedding = rows["model.embed_tokens.weight"]
    ids = range(320)
    if "d2t" in stored:
        ids = [number + int(offset) for number, offset in enumerate(stored["d2t"])]
    lm_head = rows.get("lm_head.weight", embedding)[list(ids)]
    target = TargetModel.load(own_target, dtype=dtype)
    for facts in (target, TargetEnds.load(own_target, dtype=dtype)):
        drafter = load_drafter(folder, facts)
        assert torch.equal(drafter.embed_tokens.weight, embedding.to(dtype))
        assert torch.equal(drafter.lm_head.weight, lm_head.to(dtype))
    files = examine_files(folder, TargetModel.load(own_target))
    assert files.loads and files.head is not None
    assert torch.equal(files.head.tensors["lm_head.weight"], lm_head)


def test_one_row_that_differs_is_not_the_targets(target_folder: Path) -> None:
    target = TargetModel.load(target_folder)
    drafter = with_target_ends(target, draft_vocab_size=90)
    assert has_target_ends(drafter, target)
    for end in (drafter.embed_tokens, drafter.lm_head):
        with torch.no_grad():
            end.weight[7, 3] += 1e-3
        assert not has_target_ends(drafter, target)
        with torch.no_grad():
            end.weight[7, 3] -= 1e-3
    assert not has_target_ends(make_drafter(target, hidden_size=16, head_dim=4), target)


def refusal(folder: Path, target: Path, **options: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_drafter(folder, TargetModel.load(target), **options)
    return str(caught.value)


@pytest.mark.parametrize("check_target", [True, False])
def test_another_targets_rows_are_refused(
    target_folder: Path, tmp_path: Path, check_target: bool
) -> None:
    """Other sizes in any case; of the same sizes unless the user says that the head fits."""
    folder = save_compact(tmp_path / "head", target_folder, draft_vocab_size=90)
    large = make_target_folder(tmp_path / "large", vocab_size=400)
    wide = make_target_folder(tmp_path / "wide", hidden_size=64)
    options = {"check_target": check_target}
    assert "has vocab_size 320, the target" in refusal(folder, large, **options)
    assert "has target_hidden_size 32, the target" in refusal(folder, wide, **options)
    other = make_target_folder(tmp_path / "other", seed=9)
    if check_target:
        assert "lm_head_sha256" in refusal(folder, other)
    else:
        load_drafter(folder, TargetModel.load(other), check_target=False)


def test_what_from_target_may_say(target_folder: Path, tmp_path: Path) -> None:
    folder = save_compact(tmp_path / "head", target_folder, draft_vocab_size=90)
    own = json.loads((folder / "config.json").read_text())["peagle"]
    for value in ("lm_head.weight", ["norm.weight"], {"lm_head.weight": True}, [["x"]], 3):
        edit_config(folder, peagle={**own, FROM_TARGET_KEY: value})
        assert f"peagle.from_target is {value!r}; expected a list" in refusal(folder, target_folder)
    edit_config(folder, peagle={**own, FROM_TARGET_KEY: []})
    assert "tensor 'lm_head.weight' is missing" in refusal(folder, target_folder)
    edit_config(folder, peagle=own)
    edit_tensors(folder, lambda tensors: tensors.update({ENDS[1]: torch.zeros(90, 32)}))
    assert "'lm_head.weight' is stored, and peagle.from_target" in refusal(folder, target_folder)
    narrow = tmp_path / "narrow"
    save_drafter(narrow, make_drafter(TargetModel.load(target_folder), hidden_size=16, head_dim=4))
    edit_config(narrow, peagle={FROM_TARGET_KEY: [ENDS[0]]})
    assert "the head is 16 wide and its target 32" in refusal(narrow, target_folder)


# ---- quantised layers ----


@pytest.mark.parametrize("group", [16, 32])
@pytest.mark.parametrize("quantization", TYPES)
def test_rounding_stays_within_half_a_step(
    target_folder: Path, tmp_path: Path, quantization: StoredQuantization, group: int
) -> None:
    """INT8 errs by at most 1/253 of the largest weight of its group. INT4 may cut a group's largest
    weight where that makes the sum of squares smaller; its steps are up to 1/7 of that weight.
    """
    folder = save_compact(tmp_path / "head", target_folder, draft_vocab_size=90)
    before = {n: v.float() for n, v in load_file(folder / "model.safetensors").items()}
    done = compact_head(folder, tmp_path / "small", quantization=quantization, group_size=group)
    assert done.dtype == f"bfloat16, {quantization}"
    target = TargetModel.load(target_folder, dtype=torch.float32)
    loaded, found = (
        weights(load_drafter(tmp_path / "small", target)),
        unpacked_weights(tmp_path / "small"),
    )
    assert len(found) == 1 + 2 * 7, "fc and the linear layers"
    for name, value in found.items():
        torch.testing.assert_close(loaded[name], value.float(), atol=1e-6, rtol=1e-6)
        error = (value.float() - before[name]).abs().unflatten(1, (-1, group))
        largest = before[name].abs().unflatten(1, (-1, group)).amax(-1, keepdim=True)
        cosine = torch.cosine_similarity(value.float().flatten(), before[name].flatten(), dim=0)
        if quantization == "int8":
            assert bool((error <= largest / 253).all()) and cosine > 0.99995
        else:
            assert bool((error <= 0.4 * largest).all()) and cosine > 0.993
            assert float((error / largest).square().mean().sqrt()) < 0.05
    for name in set(before) - set(found) - {"d2t", "t2d"}:
        assert torch.equal(loaded[name], before[name]), name


def test_groups_divide_the_inputs(target_folder: Path, tmp_path: Path) -> None:
    folder = save_compact(tmp_path / "head", target_folder, intermediate_size=48)
    message = r"group size is 32 and 'layers.0.mlp.down_proj' has 48 inputs; expected a size that"
    with pytest.raises(UserError, match=message):
        compact_head(folder, tmp_path / "small", quantization="int8")
    assert not (tmp_path / "small").exists()
    with pytest.raises(UserError, match=r"has 48 inputs; expected a multiple of 32 for int4"):
        compact_head(folder, tmp_path / "small", quantization="int4", group_size=16)
    with pytest.raises(UserError, match="group size is 24; expected a multiple of 16 inputs"):
        compact_head(folder, tmp_path / "small", quantization="int8", group_size=24)
    assert not (tmp_path / "small").exists()
    mixed = {"quantization": "int4", "int8_layers": ["down_proj"], "group_size": 16}
    compact_head(folder, tmp_path / "mixed", **mixed)
    load_drafter(tmp_path / "mixed", TargetModel.load(target_folder))
    compact_head(folder, tmp_path / "small", quantization="int8", group_size=16)
    with pytest.raises(CheckpointError, match="is stored quantised already"):
        compact_head(tmp_path / "small", tmp_path / "again", quantization="int4", group_size=16)


def test_a_layer_of_zeros_stays_one(target_folder: Path, tmp_path: Path) -> None:
    """As added layers of a warm start begin."""
    folder = save_compact(tmp_path / "head", target_folder)
    name = "layers.1.self_attn.o_proj.weight"
    edit_tensors(folder, lambda tensors: tensors[name].zero_())
    for quantization in TYPES:
        compact_head(folder, tmp_path / quantization, quantization=quantization)
        drafter = load_drafter(tmp_path / quantization, TargetModel.load(target_folder))
        assert not weights(drafter)[name].any()


# ---- the whole head ----


def drafted(target: Path, head: Path, **options: Any) -> tuple[Any, ...]:
    """Outputs, and how many drafts passed at each position: what the drafts decide."""
    config = {"model": str(head), "num_speculative_tokens": 3, **options}
    llm = LLM(target, speculative_config=config, dtype="bfloat16", max_num_seqs=4)
    prompts = [[5, 9, 12], [40, 41], [100, 7, 8, 9]]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=24, ignore_eos=True))
    counts = llm.engine.stats.speculation
    return (
        [one.token_ids for one in outputs],
        counts.num_drafts,
        tuple(counts.num_accepted_tokens_per_pos),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "quantization"),
    [(HEADS[0], None), (HEADS[0], "int4"), (HEADS[1], "int8"), (HEADS[2], "int4")],
    ids=str,
)
def test_the_whole_head_is_the_compact_one(
    own_target: Path, tmp_path: Path, options: dict[str, Any], quantization: Any
) -> None:
    """Of all tensors in bfloat16, which the whole head stores, and of what an engine drafts."""
    folder = save_compact(tmp_path / "head", own_target, **options)
    has_correction = options.get("parallel", True)
    if has_correction:
        add_correction(folder)
    compact_head(folder, tmp_path / "small", quantization=quantization)
    done = convert_head(tmp_path / "small", tmp_path / "whole", "vllm", target=str(own_target))
    assert done.dtype == "bfloat16" and "is whole" in " ".join(done.notes).replace("are", "is")
    stored = load_file(tmp_path / "whole" / "model.safetensors")
    data = json.loads((tmp_path / "whole" / "config.json").read_text())
    assert set(ENDS) <= set(stored) and "quantization_config" not in data
    assert FROM_TARGET_KEY not in data["peagle"]
    floats = {v.dtype for v in stored.values() if v.is_floating_point()}
    assert floats == {torch.bfloat16}
    target = TargetModel.load(own_target, dtype=torch.bfloat16)
    small, whole = (load_drafter(tmp_path / name, target) for name in ("small", "whole"))
    for name, value in weights(small).items():
        assert torch.equal(value, weights(whole)[name]), name
        assert torch.equal(value, stored[name].to(value.dtype)), name
    corrections = [load_correction(tmp_path / n, whole) for n in ("head", "small", "whole")]
    assert [one is not None for one in corrections] == [has_correction] * 3
    compact, expanded = (drafted(own_target, tmp_path / name) for name in ("small", "whole"))
    assert compact == expanded and sum(compact[2]) >= 0 and compact[1] > 0
    convert_head(tmp_path / "small", tmp_path / "s", "speculators", target=str(own_target))
    assert load_file(tmp_path / "s" / "model.safetensors").keys() == stored.keys()


def test_a_head_with_ends_of_its_own_is_whole_without_a_target(
    head_folders: Callable[..., Path], target_folder: Path, tmp_path: Path
) -> None:
    folder = head_folders(intermediate_size=64, draft_vocab_size=90)
    compact_head(folder, tmp_path / "small", quantization="int8")
    convert_head(tmp_path / "small", tmp_path / "whole", "vllm")
    target = TargetModel.load(target_folder, dtype=torch.bfloat16)
    one, other, before = (
        weights(load_drafter(f, target)) for f in (tmp_path / "small", tmp_path / "whole", folder)
    )
    assert all(torch.equal(value, other[name]) for name, value in one.items())
    assert all(torch.equal(one[name], before[name]) for name in (*ENDS, "d2t", "t2d"))


def test_ends_of_the_target_need_it(target_folder: Path, tmp_path: Path) -> None:
    folder = save_compact(tmp_path / "head", target_folder, draft_vocab_size=90)
    with pytest.raises(UserError, match=r"does not store its embed_tokens.weight and lm_head.we"):
        convert_head(folder, tmp_path / "whole", "vllm")
    other = make_target_folder(tmp_path / "other", seed=9)
    with pytest.raises(CheckpointError, match="was trained for target"):
        convert_head(folder, tmp_path / "whole", "vllm", target=str(other))
    with pytest.raises(UserError, match="is not there"):
        convert_head(folder, tmp_path / "whole", "vllm", target=str(tmp_path / "none"))
    assert not (tmp_path / "whole").exists()
    with pytest.raises(CheckpointError, match=r"is stored compactly.*peagle convert"):
        read_published(folder)


def test_a_correction_of_another_head_stays_refused(target_folder: Path, tmp_path: Path) -> None:
    folder = save_compact(tmp_path / "head", target_folder)
    file = add_correction(folder)
    other = save_compact(tmp_path / "other", target_folder, seed=3)
    shutil.copy(file, other)
    compact_head(other, tmp_path / "small", quantization="int8")
    drafter = load_drafter(tmp_path / "small", TargetModel.load(target_folder))
    with pytest.raises(CheckpointError, match="was fitted on a head with sha256"):
        load_correction(tmp_path / "small", drafter)


# ---- for vLLM ----


def test_vllm_gets_a_whole_head_out_of_the_cache(
    target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    plain = save_compact(tmp_path / "head", target_folder, draft_vocab_size=90)
    compact_head(plain, tmp_path / "small", quantization="int4")

    def launched(head: Path, target: Path = target_folder) -> str:
        launch = with_head(VllmLaunch(str(target), SpeculativeConfig(model=str(head))))
        assert launch.speculative is not None and launch.is_parallel
        assert launch.head_folder == launch.speculative.model
        return cast(str, launch.head_folder)

    found = Path(launched(tmp_path / "small"))
    assert found.name == "small" and found.is_relative_to(tmp_path / "cache")
    convert_head(tmp_path / "small", tmp_path / "whole", "vllm", target=str(target_folder))
    expected, stored = (load_file(f / "model.safetensors") for f in (tmp_path / "whole", found))
    assert all(torch.equal(value, stored[name]) for name, value in expected.items())
    written = (found / "model.safetensors").stat().st_mtime_ns
    moved = shutil.copytree(tmp_path / "small", tmp_path / "elsewhere" / "other")
    assert Path(launched(moved)) == found and len(list(found.parent.iterdir())) == 1
    assert (found / "model.safetensors").stat().st_mtime_ns == written
    assert Path(launched(plain)) != found
    whole = str(tmp_path / "whole")
    assert launched(tmp_path / "whole") == whole
    fine_tuned = shutil.copytree(target_folder, tmp_path / "tuned")
    edit_tensors(fine_tuned, lambda tensors: tensors["model.embed_tokens.weight"].mul_(1.5))
    again = Path(launched(tmp_path / "small", fine_tuned))
    assert again != found, "the fingerprint does not see the embedding, the cache does"


def test_a_cache_that_cannot_be_written_is_named(
    target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = save_compact(tmp_path / "head", target_folder)
    with pytest.raises(UserError, match=r"cannot be written: .*Set XDG_CACHE_HOME"):
        whole_head(folder, target_folder)


@pytest.mark.gpu
def test_a_gpu_computes_with_plain_weights(target_folder: Path, tmp_path: Path) -> None:
    folder = save_compact(tmp_path / "head", target_folder, draft_vocab_size=90)
    compact_head(folder, tmp_path / "small", quantization="int4")
    convert_head(tmp_path / "small", tmp_path / "whole", "vllm", target=str(target_folder))
    one, other = (drafted(target_folder, tmp_path / name) for name in ("small", "whole"))
    assert one == other


def test_some_layers_get_more_bits(target_folder: Path, tmp_path: Path) -> None:
    folder = save_compact(tmp_path / "head", target_folder)
    before = load_file(folder / "model.safetensors")
    done = compact_head(
        folder, tmp_path / "mixed", quantization="int4", int8_layers=["q_proj", "fc"]
    )
    assert set(done.dtype.split(", ")) == {"bfloat16", "int4", "int8"}
    drafter = weights(load_drafter(tmp_path / "mixed", TargetModel.load(target_folder)))
    stored = load_file(tmp_path / "mixed" / "model.safetensors")
    for name in before.keys() & drafter.keys():
        error = float((drafter[name] - before[name].float()).norm() / before[name].float().norm())
        last = name.split(".")[-2] if name != "mask_hidden" else ""
        if last in ("q_proj", "fc"):
            assert stored[name].dtype == torch.int8 and 0 < error < 0.01
        elif name.endswith("proj.weight"):
            assert name.replace("weight", "weight_packed") in stored and 0.03 < error < 0.12
        else:
            assert error == 0
    with pytest.raises(
        UserError, match=r"no linear layer 'k'; expected names out of fc, down_proj,"
    ):
        compact_head(folder, tmp_path / "no", quantization="int4", int8_layers=["k"])
