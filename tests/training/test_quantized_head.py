"""Runs that round the linear layers of a head: what is trained is what the file holds.

compressed-tensors, which defines the format of the file, unpacks it here.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from peagle.errors import UserError
from peagle.models.checkpoint import compact_head, convert_head, load_drafter, read_head
from peagle.models.checkpoint.packed import Rounding, pack_tensors
from peagle.models.head_quantization import HeadQuantization, StoredQuantization
from peagle.models.target import TargetModel
from peagle.training.config import HeadSection, TrainConfig
from peagle.training.optimizers import Masters
from peagle.training.start_checks import least_sizes
from peagle.training.trainer import Trainer, TrainingStopped
from peagle.training.training_plan import make_plan
from tests.compressed import unpacked_weights
from tests.conftest import make_drafter
from tests.training.runs import make_config, read_checkpoint, tensors_of

INT4: dict[str, Any] = {"quantization": "int4", "group_size": 16}
MIXED: dict[str, Any] = {**INT4, "int8_layers": ("q_proj", "fc")}
FROZEN = {"freeze_embeddings": True, "freeze_lm_head": True}
EAGLE3: dict[str, Any] = {"name": "eagle3", "depth": 3}


def few_steps(target: Path, responses: Path, output: Path, **changes: Any) -> TrainConfig:
    optimizer = {"steps": 6, "name": "muon", "learning_rate": 5e-3}
    run = {"validate_every": 3, "save_every": 3, "log_every": 1, **changes.pop("run", {})}
    changes["optimizer"] = {**optimizer, **changes.get("optimizer", {})}
    changes["head"] = {"intermediate_size": 64, **changes.get("head", {})}
    return make_config(target, responses, output, run=run, **changes)


def masters_of(trainer: Trainer) -> dict[str, Tensor]:
    return {name: master.detach().clone() for name, master in trainer.masters.named()}


# ---- what is trained is what is stored ----


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head", "changes"),
    [
        ({**INT4, "draft_vocab_size": 60}, {}),
        ({**INT4, **FROZEN}, {"run": {"precision": "bfloat16"}}),
        ({**MIXED, **FROZEN, "num_layers": 2}, {"run": {"precision": "bfloat16"}}),
        ({**MIXED, "group_size": 32}, {"method": EAGLE3, "run": {"save_dtype": "float32"}}),
        ({"quantization": "int8"}, {"run": {"save_dtype": "float16"}}),
        ({"quantization": "int8", **FROZEN}, {"run": {"precision": "bfloat16"}}),
    ],
    ids=str,
)
def test_the_file_holds_the_weights_of_the_training(
    target_folder: Path,
    responses: Path,
    tmp_path: Path,
    head: dict[str, Any],
    changes: dict[str, Any],
) -> None:
    run = changes.get("run", {})
    last = {"data": {"validation": None}}  # the head that is kept is then the last one
    config = few_steps(target_folder, responses, tmp_path, head=head, **last, **changes)
    trainer = Trainer(config)
    record = trainer.run()
    trained = tensors_of(trainer.drafter)
    found = unpacked_weights(tmp_path / "head")
    linear = {n for n, v in trained.items() if v.dim() == 2 and "embed" not in n and "lm" not in n}
    assert set(found) == linear
    dtype = getattr(torch, config.run.precision) if "precision" in run else torch.float32
    for name, weight in found.items():
        assert trained[name].dtype == dtype
        assert torch.equal(weight.to(dtype), trained[name]), name
    for name, master in masters_of(trainer).items():
        own = trainer.drafter.get_parameter(name)
        is_rounded = own.dim() == 2 and name.startswith(("fc", "layers"))
        assert master.dtype == torch.float32
        assert torch.equal(master.to(dtype), own) != is_rounded, name
    target = TargetModel.load(target_folder, dtype=dtype)
    loaded = tensors_of(load_drafter(tmp_path / "head", target))
    assert all(torch.equal(loaded[name], trained[name]) for name in found)
    saved = load_file(tmp_path / "head" / "model.safetensors")
    save_dtype = getattr(torch, config.run.save_dtype)
    assert torch.equal(saved["norm.weight"], trained["norm.weight"].to(save_dtype))
    assert "t2d" not in saved and saved.get("d2t", torch.zeros(1).int()).dtype == torch.int32
    assert record["config"]["head"]["quantization"] == head["quantization"]
    assert record["config"]["head"]["int8_layers"] == list(head.get("int8_layers", ()))


@pytest.mark.slow
@pytest.mark.parametrize("head", [INT4, MIXED, {"quantization": "int8"}], ids=str)
def test_weights_are_rounded_as_by_peagle_convert(
    target_folder: Path, responses: Path, tmp_path: Path, head: dict[str, Any]
) -> None:
    """The first step of a run from a whole head sees what its compact form holds."""
    whole = few_steps(target_folder, responses, tmp_path / "whole", run={"save_dtype": "float32"})
    Trainer(whole).run()
    compact_head(tmp_path / "whole" / "head", tmp_path / "compact", **head)
    init = {"init": tmp_path / "whole" / "head", **head}
    trainer = Trainer(few_steps(target_folder, responses, tmp_path / "on", head=init))
    own = tensors_of(trainer.drafter)
    target = TargetModel.load(target_folder)
    for name, weight in unpacked_weights(tmp_path / "compact").items():
        assert torch.equal(own[name], weight), name
    for name, weight in tensors_of(load_drafter(tmp_path / "compact", target)).items():
        assert torch.equal(own[name], weight), name
    again = {"init": tmp_path / "compact", **FROZEN}
    plain = Trainer(few_steps(target_folder, responses, tmp_path / "plain", head=again))
    assert all(torch.equal(own[n], w) for n, w in tensors_of(plain.drafter).items())


def test_gradients_go_to_the_masters_as_if_nothing_were_rounded(
    target_folder: Path, responses: Path, tmp_path: Path
) -> None:
    """The step of a run equals that of a whole head with the rounded weights, applied elsewhere."""

    def trainer(name: str, **head: Any) -> Trainer:
        return Trainer(few_steps(target_folder, responses, tmp_path / name, head=head))

    def step(one: Trainer) -> tuple[float, float]:
        [(batch, states)] = one.inputs.source(one._batch_at).range(0, 1)
        outcome, norm = one._train_step(batch, states, 1e-3)
        return float(outcome.loss), float(norm)

    rounded, whole = trainer("rounded", **INT4), trainer("whole")
    before = masters_of(rounded)
    started = {n: p.detach().clone() for n, p in rounded.drafter.named_parameters()}
    with torch.no_grad():
        for name, parameter in whole.drafter.named_parameters():
            parameter.copy_(started[name])
    assert step(rounded) == step(whole)
    own = dict(whole.drafter.named_parameters())
    for name, after in masters_of(rounded).items():
        moved, expected = after - before[name], own[name].detach() - started[name]
        assert bool(moved.any()) or name == "embed_tokens.weight"
        torch.testing.assert_close(moved, expected, atol=2e-6, rtol=1e-4)


@pytest.mark.slow
def test_validation_is_of_the_head_that_is_saved(
    target_folder: Path, responses: Path, tmp_path: Path
) -> None:
    run = {"save_dtype": "float32"}
    trainer = Trainer(few_steps(target_folder, responses, tmp_path / "a", head=INT4, run=run))
    best = trainer.run()["best"]["validation"]
    init = {"init": tmp_path / "a" / "head"}
    report = Trainer(few_steps(target_folder, responses, tmp_path / "b", head=init)).validate()
    assert report is not None
    for name in ("loss", "accuracy", "acceptance_lengths", "sampled_acceptance_lengths"):
        assert best[name] == getattr(report, name), name


# ---- resuming, processes, memory ----


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_resumed_run_equals_an_uninterrupted_one(
    target_folder: Path, responses: Path, tmp_path: Path, precision: str
) -> None:
    def config(name: str) -> TrainConfig:
        run = {"precision": precision}
        return few_steps(target_folder, responses, tmp_path / name, head=MIXED, run=run)

    Trainer(config("whole")).run()
    stopped = Trainer(config("halved"))
    stopped._stepped = lambda step: setattr(stopped, "stop_requested", step == 4)
    with pytest.raises(TrainingStopped):
        stopped.run()
    Trainer(config("halved")).run(resume=True)
    first, second = (read_checkpoint(tmp_path / name) for name in ("whole", "halved"))
    assert first.keys() == second.keys()
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    files = [tmp_path / name / "head" / "model.safetensors" for name in ("whole", "halved")]
    assert files[0].read_bytes() == files[1].read_bytes()
    with pytest.raises(UserError, match=r"head.int8_layers \['q_proj', 'fc'\] \(now None\)"):
        Trainer(
            few_steps(
                target_folder,
                responses,
                tmp_path / "halved",
                head=INT4,
                run={"precision": precision},
            )
        ).run(resume=True)


def test_old_checkpoints_lack_the_options() -> None:
    plain = HeadSection().facts()  # type: ignore[call-arg]
    assert not {"quantization", "int8_layers", "group_size"} & plain.keys()
    found = HeadSection.model_validate(MIXED).facts()
    assert found == {**plain, **MIXED, "int8_layers": ["q_proj", "fc"]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head", "run"),
    [
        (INT4, {}),
        ({**INT4, **FROZEN, "draft_vocab_size": 60}, {"precision": "bfloat16"}),
        ({"quantization": "int8", **FROZEN, "num_layers": 2}, {"save_dtype": "float32"}),
        (MIXED, {}),
    ],
    ids=str,
)
def test_plan_and_checks_count_what_is_stored(
    target_folder: Path,
    responses: Path,
    tmp_path: Path,
    head: dict[str, Any],
    run: dict[str, Any],
) -> None:
    config = few_steps(target_folder, responses, tmp_path, head=head, run=run)
    plan, least = make_plan(config), least_sizes(config)
    whole = few_steps(
        target_folder, responses, tmp_path, head={**head, "quantization": None, **WHOLE}, run=run
    )
    assert f"layers stored in {config.head.layer_quantization}" in str(plan)
    assert "stored in int" not in str(make_plan(whole))
    assert plan.disk["checkpoint"] == make_plan(whole).disk["checkpoint"]
    assert plan.disk["head"] < make_plan(whole).disk["head"]
    trainer = Trainer(config)
    trainer.run()
    tensors = load_file(tmp_path / "head" / "model.safetensors").values()
    shapes = 16 * sum(value.dtype == torch.int32 for value in tensors)  # of words of INT4
    assert abs(sum(value.nbytes for value in tensors) - shapes - plan.disk["head"]) < 64
    assert least is not None
    assert least[0] <= plan.disk["checkpoint"] and 0.5 * plan.disk["head"] < least[1]
    assert least[1] <= plan.disk["head"]
    copies = sum(p.nbytes for n, p in trainer.masters.named() if n in trainer.masters._copies)
    assert plan.memory.parts["float32 weights"] == copies > 0


WHOLE: dict[str, Any] = {"int8_layers": (), "group_size": 32}


# ---- beside other options ----


@pytest.mark.slow
def test_a_correction_sees_the_rounded_head(
    target_folder: Path, responses: Path, tmp_path: Path
) -> None:
    for precision in ("float32", "bfloat16"):
        run = {"precision": precision, "save_dtype": "float32"}
        folder = tmp_path / precision
        config = few_steps(
            target_folder, responses, folder, head=INT4, run=run, data={"validation": None}
        )
        trainer = Trainer(config)
        trainer.run()
        data = config.model_dump(mode="json", exclude_none=True)
        data["output"] = folder / "fit"
        correction = {"on": folder / "head", "rank": 8, "width": 8, "steps": 2}
        fitted = Trainer(TrainConfig.model_validate({**data, "correction": correction}))
        for name, weight in tensors_of(fitted.drafter).items():
            assert torch.equal(weight, tensors_of(trainer.drafter)[name]), name
        fitted.run()
        for name, weight in tensors_of(fitted.drafter).items():
            assert torch.equal(weight, tensors_of(trainer.drafter)[name]), name
        assert (folder / "head" / "correction.st").is_file()


def test_other_runtimes_get_the_trained_weights(
    target_folder: Path, responses: Path, tmp_path: Path
) -> None:
    run = {"precision": "bfloat16"}
    data = {"validation": None}
    trainer = Trainer(
        few_steps(target_folder, responses, tmp_path, head={**INT4, **FROZEN}, run=run, data=data)
    )
    trainer.run()
    convert_head(tmp_path / "head", tmp_path / "whole", "vllm", target=str(target_folder))
    stored = load_file(tmp_path / "whole" / "model.safetensors")
    for name, weight in tensors_of(trainer.drafter).items():
        if name not in ("d2t", "t2d"):
            assert torch.equal(stored[name], weight.bfloat16()), name
    assert "from_target" not in read_head(tmp_path / "whole").facts


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ({"quantization": "int2"}, "Input should be 'int8' or 'int4'"),
        ({**INT4, "int8_layers": ["q"]}, "Input should be 'fc', 'q_proj'"),
        ({**INT4, "group_size": 24}, "multiple of 16"),
        ({"int8_layers": ["fc"]}, r"int8_layers is \('fc',\) and there is no quantization"),
        ({"group_size": 64}, "group_size is 64 and there is no quantization"),
    ],
)
def test_options_that_cannot_be(head: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HeadSection.model_validate(head)


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ({**INT4, "group_size": 64}, "group size is 64 and 'fc' has 96 inputs; expected a size"),
        ({**INT4, "intermediate_size": 48}, "'layers.0.mlp.down_proj' has 48 inputs; expected a m"),
    ],
)
def test_layers_that_cannot_be_grouped(
    target_folder: Path, responses: Path, tmp_path: Path, head: dict[str, Any], message: str
) -> None:
    """Refused before the target is run, by the plan and by the trainer."""
    config = few_steps(target_folder, responses, tmp_path, head=head)
    with pytest.raises(UserError, match=message):
        make_plan(config)
    with pytest.raises(UserError, match=message):
        Trainer(config)
    assert not (tmp_path / "head").exists()


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_integers_are_found_again_in_bfloat16(
    target_folder: Path, quantization: StoredQuantization
) -> None:
    """In groups of all sizes, of which one is 0: the file is packed from the head's weights."""
    head = make_drafter(TargetModel.load(target_folder), intermediate_size=64).float()
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.dim() == 2:
                sizes = torch.logspace(-36, 30, len(parameter))
                parameter.mul_(sizes.unsqueeze(1))
                parameter[3, 16:32] = 0
    how = HeadQuantization(quantization, (), 16)
    expected, _ = pack_tensors(tensors_of(head), how)
    rounding = Rounding(head.config, how)
    Masters(head.requires_grad_(), torch.bfloat16, rounding)
    found, _ = rounding.pack(tensors_of(head))
    packed = [name for name in expected if "scale" in name or not found[name].is_floating_point()]
    assert len([name for name in packed if "scale" in name]) == 1 + 2 * 7
    assert all(torch.equal(found[name], expected[name]) for name in packed)
