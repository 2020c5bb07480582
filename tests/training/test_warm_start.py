"""Heads that start from another one: what is taken over, what is refused, and that it pays."""

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from peagle.data.dataset import ResponseDataset
from peagle.errors import UserError
from peagle.models.checkpoint import CORRECTION_NAME, load_drafter, read_head, save_drafter
from peagle.models.drafter import Drafter
from peagle.models.target import TargetModel, load_tokenizer
from peagle.models.target_ends import TargetEnds
from peagle.training.build import build_drafter
from peagle.training.config import TrainConfig
from peagle.training.reporting import TrainingReport
from peagle.training.trainer import Trainer, TrainingStopped
from peagle.training.warm_start import InitHead, features_by, start_mask_hidden
from tests.conftest import make_drafter, make_target_folder
from tests.models.editing import edit_config, edit_tensors, rename_a_token
from tests.models.published_heads import FOREIGN_HEADS, head_folder
from tests.models.reference_head import ReferenceHead
from tests.training.runs import (
    configure,
    read_checkpoint,
    save,
    tensors_of,
    warm,
    write_data,
    write_responses,
)

HEADS: list[dict[str, Any]] = [
    {"num_layers": 1},
    {"num_layers": 2, "draft_vocab_size": 100, "norm_before_residual": True},
    {"num_layers": 1, "attention_bias": True, "norm_output": True},
    {"num_layers": 1, "qk_norm": True, "fc_norm": True, "head_dim": 16},
    {"num_layers": 1, "norm_before_fc": True, "hidden_size": 24, "rms_norm_eps": 0.01},
]


@pytest.fixture
def peagle_head(target: TargetModel, tmp_path: Path) -> Path:
    return save(tmp_path / "p", target, make_drafter(target, trained_depth=6))


@pytest.fixture
def eagle3_head(target: TargetModel, tmp_path: Path) -> Path:
    drafter = make_drafter(target, parallel=False, num_layers=1)
    return save(tmp_path / "e", target, drafter)


# ---- from EAGLE-3 to P-EAGLE ----


@torch.no_grad()
def causal_logits(drafter: Drafter, tokens: Tensor, hidden: Tensor) -> Tensor:
    """One pass over slots that see what is before them."""

    def attend(_: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        )
        return out.squeeze(0).transpose(0, 1)

    return drafter.compute_logits(drafter(tokens, hidden, torch.arange(len(tokens)), attend))


@pytest.mark.parametrize("format", ["vllm", "speculators"])
@pytest.mark.parametrize("options", HEADS, ids=str)
def test_depth_0_is_the_eagle3_heads_own(
    target: TargetModel,
    target_folder: Path,
    tmp_path: Path,
    options: dict[str, Any],
    format: Any,
) -> None:
    """In float64, whether mask slots follow or not; a changed new layer is noticed."""
    head = save(tmp_path / "e", target, make_drafter(target, parallel=False, **options))
    if format == "speculators":
        save(tmp_path / "s", target, load_drafter(head, target), format=format)
    init = tmp_path / format[0] if format == "speculators" else head
    before = load_drafter(head, target)
    built = warm(target_folder, init, tmp_path, head={"num_layers": 4})
    after = built.drafter.double()
    assert after.config.num_layers == 4 and after.config.mask_token_id == 1
    assert after.config.trained_depth == 4

    generator = torch.Generator().manual_seed(3)
    features = torch.randn(9, before.config.feature_size, generator=generator).double()
    tokens = torch.randint(320, (9,), generator=generator)
    expected = causal_logits(before, tokens, before.combine_features(features))

    def depth_0(num_slots: int) -> Tensor:
        hidden = after.combine_features(features)
        slots = torch.cat((hidden, after.shared_hidden().expand(num_slots, -1)))
        masks = torch.ones(num_slots, dtype=torch.int64)
        return causal_logits(after, torch.cat((tokens, masks)), slots)[: len(tokens)]

    assert torch.equal(depth_0(0), expected)
    torch.testing.assert_close(depth_0(3), expected, atol=1e-12, rtol=1e-12)
    reference = ReferenceHead(head)
    slots = reference.context([0, *tokens.tolist()], features)
    theirs = torch.stack([reference.logits(row) for row in reference.run(slots)])
    torch.testing.assert_close(depth_0(3), theirs, atol=1e-6, rtol=1e-6)
    with torch.no_grad():
        after.layers[3].mlp.down_proj.weight.add_(0.1)  # type: ignore[union-attr]
    assert (depth_0(3) - expected).abs().max() > 1e-3

    assert built.warm_start is not None
    record = built.warm_start
    added = range(options["num_layers"], 4)
    fresh = {name for name in tensors_of(after) if any(f"layers.{i}." in name for i in added)}
    assert set(record.fresh) == fresh | {"mask_hidden"} and not record.dropped
    assert record.num_taken + len(record.fresh) == len(tensors_of(after))
    assert (record.kind, record.num_layers, record.num_added_layers) == (
        "EAGLE-3",
        options["num_layers"],
        len(added),
    )


def test_mask_hidden_starts_as_the_mean_feature_of_responses(
    target_folder: Path, eagle3_head: Path, tmp_path: Path
) -> None:
    responses = [list(range(10, 30)), list(range(200, 206))]
    drafter = warm(target_folder, eagle3_head, tmp_path, responses).drafter
    model = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float64)
    rows = []
    for response in responses:
        output = model(torch.tensor([[3, 4, *response]]), output_hidden_states=True)
        # hidden_states[i] enters layer i.
        features = [output.hidden_states[i][0, 2:] for i in drafter.config.aux_layer_ids]
        rows.append(torch.cat(features, dim=-1))
    assert drafter.mask_hidden is not None
    expected = torch.cat(rows).mean(0).float()
    torch.testing.assert_close(drafter.mask_hidden.detach().flatten(), expected)


def test_stored_features_can_start_mask_hidden(
    target_folder: Path, eagle3_head: Path, tmp_path: Path
) -> None:
    """Without the target's layers it is random until somebody gives features."""
    tokenizer = load_tokenizer(target_folder)
    data = write_data(tmp_path / "data.jsonl", [list(range(10, 60))] * 3)
    config = configure(target_folder, tmp_path / "out", eagle3_head, data)
    dataset = ResponseDataset.load(data, tokenizer, 320, 2048)
    target = TargetModel.load(target_folder)
    ends = build_drafter(config, TargetEnds.load(target_folder), tokenizer, dataset)
    whole = build_drafter(config, target, tokenizer, dataset)
    for built in (ends, whole):
        assert built.warm_start is not None and built.warm_start.mask_hidden_is_new
    differ = {
        name
        for name, value in tensors_of(ends.drafter).items()
        if not torch.equal(value, tensors_of(whole.drafter)[name])
    }
    assert differ == {"mask_hidden"}
    features_of = features_by(target, dataset, ends.drafter.config.aux_layer_ids)
    start_mask_hidden(ends.drafter, dataset, features_of)
    assert ends.drafter.mask_hidden is not None and whole.drafter.mask_hidden is not None
    assert torch.equal(ends.drafter.mask_hidden, whole.drafter.mask_hidden)


def test_the_mask_token_is_chosen_as_for_a_fresh_head(
    target_folder: Path, eagle3_head: Path, tmp_path: Path
) -> None:
    assert warm(target_folder, eagle3_head, tmp_path).drafter.config.mask_token_id == 1
    asked: dict[str, Any] = {"mask_token_id": 50}
    built = warm(target_folder, eagle3_head, tmp_path, head=asked)
    assert built.drafter.config.mask_token_id == 50
    assert built.warm_start is not None
    assert any("mask token 50 occurs 3 times" in w for w in built.warm_start.warnings)
    asked = {"mask_token_id": 320}
    with pytest.raises(UserError, match="mask_token_id is 320"):
        warm(target_folder, eagle3_head, tmp_path, head=asked)


def test_a_foreign_map_is_kept(
    target: TargetModel, target_folder: Path, eagle3_head: Path, tmp_path: Path
) -> None:
    """Draft ids in no order, of another integer type, and without t2d, as some heads have it."""
    head = save(tmp_path / "f", target, make_drafter(target, parallel=False, draft_vocab_size=100))
    ids = torch.randperm(320, generator=torch.Generator().manual_seed(1))[:100]

    def shuffle(tensors: dict[str, Tensor]) -> None:
        tensors["d2t"] = (ids - torch.arange(100)).to(torch.int32)
        del tensors["t2d"]

    edit_tensors(head, shuffle)
    built = warm(target_folder, head, tmp_path)
    drafter, record = built.drafter, built.warm_start
    assert torch.equal(drafter.target_ids(), ids)
    assert drafter.t2d is not None and set(drafter.t2d.nonzero().flatten().tolist()) == set(
        ids.tolist()
    )
    assert record is not None and record.coverage is not None
    assert record.fresh == ("mask_hidden",), "t2d follows from d2t"
    inside = sum(3 for token in range(10, 60) if token in ids.tolist())
    assert (record.coverage.num_tokens, record.coverage.num_inside) == (150, inside)
    assert any(f"covers {inside / 150:.1%} of the training" in w for w in record.warnings)
    assert any("lacks tokens that a new head would keep" in w for w in record.warnings)
    covered = [int(ids[0]), int(ids[1])] * 9
    record = warm(target_folder, head, tmp_path, [covered]).warm_start
    assert record is not None and record.coverage is not None and record.coverage.share == 1
    assert not any("covers" in w for w in record.warnings)


# ---- from P-EAGLE, and to EAGLE-3 ----


@pytest.mark.parametrize("format", ["vllm", "speculators"])
@pytest.mark.parametrize("options", HEADS, ids=str)
def test_all_of_a_p_eagle_head_is_taken(
    target: TargetModel,
    target_folder: Path,
    tmp_path: Path,
    options: dict[str, Any],
    format: Any,
) -> None:
    drafter = make_drafter(target, mask_token_id=77, trained_depth=6, **options)
    head = save(tmp_path / "p", target, drafter, format=format)
    built = warm(target_folder, head, tmp_path, method={"depth": 8})
    expected, found = load_file(head / "model.safetensors"), tensors_of(built.drafter)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    assert all(parameter.requires_grad for parameter in built.drafter.parameters())
    config = built.drafter.config
    assert (config.mask_token_id, config.trained_depth) == (77, 8)
    assert config.rms_norm_eps == drafter.config.rms_norm_eps
    record = built.warm_start
    assert record is not None and record.num_taken == len(expected) and not record.fresh
    assert record.differences == ()
    digest = hashlib.sha256((head / "model.safetensors").read_bytes()).hexdigest()
    assert record.sha256 == {"model.safetensors": digest}
    assert record.name == f"{tmp_path.name}/p" and record.trained_depth == 6
    assert json.loads(json.dumps(record.to_json()))["kind"] == "P-EAGLE"


def test_geometry_left_out_is_the_heads(
    target_folder: Path, peagle_head: Path, tmp_path: Path
) -> None:
    """Also where the defaults of [head] say otherwise, and if it is given and agrees."""
    config = warm(target_folder, peagle_head, tmp_path).drafter.config
    assert (config.num_layers, config.intermediate_size) == (2, 40)
    same: dict[str, Any] = {"num_layers": 2, "intermediate_size": 40, "mask_token_id": 1}
    same |= {"aux_layer_ids": config.aux_layer_ids, "draft_vocab_size": 320, "fc_norm": False}
    again = warm(target_folder, peagle_head, tmp_path, head={**same, "hidden_size": None})
    assert again.drafter.config == config
    grown = warm(target_folder, peagle_head, tmp_path, head={"num_layers": 3})
    assert grown.warm_start is not None and grown.warm_start.num_added_layers == 1
    frozen = warm(target_folder, peagle_head, tmp_path, head={"freeze_embeddings": True})
    assert not frozen.drafter.embed_tokens.weight.requires_grad


@pytest.mark.slow
def test_rows_longer_than_a_head_knows_have_angles_of_their_own(
    target: TargetModel, target_folder: Path, tmp_path: Path
) -> None:
    head = save(tmp_path / "short", target, make_drafter(target, max_position_embeddings=16))
    drafter = warm(target_folder, head, tmp_path).drafter
    cos, _ = drafter._rope_at(torch.tensor([15, 255]), torch.float64)
    assert not torch.equal(cos[0], cos[1])
    assert drafter.config.max_position_embeddings == 16


def test_a_correction_that_is_left_out_is_told(
    target_folder: Path, peagle_head: Path, tmp_path: Path
) -> None:
    (peagle_head / CORRECTION_NAME).write_bytes(b"")
    for method, is_told in (("peagle", True), ("eagle3", False)):
        changes: dict[str, Any] = {"method": {"name": method}}
        record = warm(target_folder, peagle_head, tmp_path, **changes).warm_start
        assert record is not None
        assert any("correction.train" in one for one in record.warnings) is is_told
    (peagle_head / CORRECTION_NAME).unlink()
    record = warm(target_folder, peagle_head, tmp_path).warm_start
    assert record is not None and not any("correction" in one for one in record.warnings)


def test_a_p_eagle_head_becomes_an_eagle3_head_without_its_mask_state(
    target_folder: Path, peagle_head: Path, eagle3_head: Path, tmp_path: Path
) -> None:
    for head, dropped in ((peagle_head, ("mask_hidden",)), (eagle3_head, ())):
        built = warm(target_folder, head, tmp_path, method={"name": "eagle3", "depth": 7})
        assert not built.drafter.config.is_parallel and built.drafter.config.trained_depth == 7
        assert built.warm_start is not None
        assert (built.warm_start.dropped, built.warm_start.fresh) == (dropped, ())
        expected = load_file(head / "model.safetensors")
        for name, value in tensors_of(built.drafter).items():
            assert torch.equal(value, expected[name]), name


def test_embeddings_that_a_head_lacks_are_the_targets(
    target: TargetModel, target_folder: Path, peagle_head: Path, tmp_path: Path
) -> None:
    for name in ("embed_tokens.weight", "lm_head.weight"):
        edit_tensors(peagle_head, lambda tensors, name=name: tensors.pop(name))
    built = warm(target_folder, peagle_head, tmp_path)
    drafter, record = built.drafter.double(), built.warm_start
    assert torch.equal(drafter.embed_tokens.weight, target.embedding_weight())
    assert torch.equal(drafter.lm_head.weight, target.lm_head_weight())
    assert record is not None and record.fresh == ("embed_tokens.weight", "lm_head.weight")
    assert any("no lm_head.weight of its own" in warning for warning in record.warnings)


FOREIGN = sorted(path.parent.name for path in FOREIGN_HEADS.glob("*/config.json"))


@pytest.mark.parametrize("method", ["peagle", "eagle3"])
@pytest.mark.parametrize("name", FOREIGN)
def test_heads_of_others_go_on(tmp_path: Path, name: str, method: str) -> None:
    """Published layouts and those of the speculators package, for either method."""
    folder = make_target_folder(tmp_path / "small", vocab_size=64, hidden_size=16)
    responses = [[5, 9, 2, 40, 7, 7, 8, 30]] * 4
    built = warm(folder, head_folder(name), tmp_path, responses, method={"name": method})
    target = TargetModel.load(folder, dtype=torch.float32)
    expected = tensors_of(load_drafter(head_folder(name), target))
    found = tensors_of(built.drafter)
    assert (expected.keys() ^ found.keys()) <= {"mask_hidden"}
    config = read_head(head_folder(name)).config
    mask = None if method == "eagle3" else config.mask_token_id or 1
    assert built.drafter.config == replace(config, trained_depth=4, mask_token_id=mask)
    for tensor in expected.keys() & found.keys():
        assert torch.equal(found[tensor], expected[tensor]), tensor
    record = built.warm_start
    assert record is not None and "does not say which target" in record.warnings[0]
    if name.startswith("speculators"):
        assert record.target == "example/tiny"


# ---- what is told ----


def test_what_cannot_be_checked_or_looks_wrong_is_told(
    target: TargetModel, target_folder: Path, tmp_path: Path
) -> None:
    save_drafter(tmp_path / "p", make_drafter(target, trained_depth=6))
    record = warm(target_folder, tmp_path / "p", tmp_path, [[7, 1, 1, 9]]).warm_start
    assert record is not None and record.target is None and record.coverage is None
    text = str(record)
    assert text.startswith(f"warm start: P-EAGLE head '{tmp_path.name}/p', ")
    for words in (
        "does not say which target",
        "trained to depth 6 and method.depth is 4",
        "mask token 1 occurs 2 times",
    ):
        assert sum(f"warning: {w}" in text and words in w for w in record.warnings) == 1, words


def test_paths_are_relative_to_the_file_and_not_part_of_a_dump(tmp_path: Path) -> None:
    text = '[head]\ninit = "old/head"\n[data]\ntrain = "t.jsonl"\n[optimizer]\nsteps = 1\n'
    file = tmp_path / "run.toml"
    file.write_text('target = "t"\noutput = "o"\n' + text)
    config = TrainConfig.read(file)
    assert config.head.init == tmp_path / "old/head"
    assert config.head.model_fields_set == {"init"}
    assert TrainConfig.read(file, ["head.init=a/b"]).head.init == tmp_path / "a/b"
    # Checkpoints from before the option have no such key, and can be resumed.
    assert "init" not in config.head.model_dump(mode="json")


# ---- what is refused ----


OTHER = dict.fromkeys(
    ("hidden_size", "intermediate_size", "num_attention_heads", "head_dim", "draft_vocab_size"), 6
)


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
    rename_a_token(other / "tokenizer.json")
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


# ---- whole runs ----


def test_every_parameter_of_a_grown_head_learns(
    target_folder: Path, eagle3_head: Path, tmp_path: Path
) -> None:
    """Projections of zero must not hold their layer back for more than a step."""
    data = write_data(tmp_path / "data.jsonl", [[*range(10 + i, 40 + i)] for i in range(20)])
    config = configure(
        target_folder,
        tmp_path / "out",
        eagle3_head,
        data,
        head={"num_layers": 2},
        optimizer={"steps": 3, "learning_rate": 1e-3},
    )
    trainer = Trainer(config)
    before = {n: p.detach().clone() for n, p in trainer.drafter.named_parameters()}
    trainer.run()
    for name, parameter in trainer.drafter.named_parameters():
        assert not torch.equal(parameter, before[name]), name


@pytest.mark.slow
def test_a_warm_started_run_resumes_exactly(
    target_folder: Path, eagle3_head: Path, tmp_path: Path
) -> None:
    data = write_data(tmp_path / "data.jsonl", [[*range(10 + i, 40 + i)] for i in range(20)])

    def trainer(name: str, *, stop: bool = False) -> Trainer:
        changes = {"optimizer": {"steps": 6}, "run": {"log_every": 1}}
        config = configure(target_folder, tmp_path / name, eagle3_head, data, **changes)
        run = Trainer(config, lambda report: setattr(run, "stop_requested", stop))
        return run

    facts = json.loads((eagle3_head / "config.json").read_text())["peagle"]
    edit_config(eagle3_head, peagle={**facts, "max_sequence_length_trained": 500})
    trainer("whole").run()
    assert read_head(tmp_path / "whole/head").trained_length == 500, "more than this run's 30"
    with pytest.raises(TrainingStopped):
        trainer("halved", stop=True).run()
    trainer("halved").run(resume=True)
    first, second = (read_checkpoint(tmp_path / name) for name in ("whole", "halved"))
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


# ---- a fine-tuned target ----


def fine_tuned(folder: Path, source: Path) -> Path:
    """The target with every weight a little different."""
    shutil.copytree(source, folder)
    model = AutoModelForCausalLM.from_pretrained(source)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(0.02 * parameter.std().nan_to_num(0) * noise)
    model.save_pretrained(folder)
    return folder


def train(
    target: Path, data: Path, output: Path, init: Path | None, **optimizer: Any
) -> TrainingReport:
    """The last validation of a run."""
    reports: list[TrainingReport] = []
    config = configure(
        target,
        output,
        init,
        data,
        head={} if init else {"num_layers": 1},
        data={"validation": data},
        optimizer=optimizer,
        run={"save_dtype": "float32"},
    )
    Trainer(config, reports.append).run()
    return [report for report in reports if report.kind == "validation"][-1]


@pytest.mark.slow
def test_a_head_goes_on_for_a_fine_tuned_target(
    target_folder: Path, responses: Path, tmp_path: Path
) -> None:
    train(target_folder, responses, tmp_path / "old", None, steps=150, learning_rate=3e-3)
    tuned = fine_tuned(tmp_path / "tuned", target_folder)
    data = write_responses(tuned, tmp_path / "new.jsonl")
    head = tmp_path / "old/head"
    with pytest.raises(UserError, match="was trained for target"):
        load_drafter(head, TargetModel.load(tuned))

    # One step so small that it changes nothing shows what each begins with.
    begin = {"steps": 1, "learning_rate": 1e-9}
    fresh = train(tuned, data, tmp_path / "fresh", None, **begin)
    first = train(tuned, data, tmp_path / "first", head, **begin)
    assert first.loss < 0.7 * fresh.loss
    assert first.acceptance_lengths[-1] > fresh.acceptance_lengths[-1] + 0.2
    last = train(tuned, data, tmp_path / "last", head, steps=40, learning_rate=3e-3)
    assert last.loss < 0.9 * first.loss
    assert last.acceptance_lengths[-1] >= first.acceptance_lengths[-1]
    load_drafter(tmp_path / "last/head", TargetModel.load(tuned))

    differences = InitHead.read(head, TargetModel.load(tuned)).differences
    assert differences == (
        f"it was {target_folder.name!r} and is 'tuned'",
        "the weights of lm_head are others",
    )
