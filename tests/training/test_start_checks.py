"""What of a run is refused before its target is loaded, and the room that it needs."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from peagle.errors import UserError
from peagle.training.checkpoint_facts import continued
from peagle.training.config import RunSection, TrainConfig, optimizer_note
from peagle.training.start_checks import _SAVED_BYTES, check_start, least_sizes
from peagle.training.trainer import Trainer, TrainingStopped
from peagle.training.training_plan import make_plan
from tests.training.runs import make_config


@pytest.fixture(scope="module")
def begun(
    target_folder: Path, responses: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., TrainConfig]:
    """A run that was stopped after its first step; the configuration of a copy, with changes."""
    folder = tmp_path_factory.mktemp("begun")
    shutil.copy(responses, folder / "data.jsonl")

    def config_in(place: Path, **changes: Any) -> TrainConfig:
        changes = {"optimizer": {"steps": 3}, **changes}
        return make_config(target_folder, place / "data.jsonl", place / "out", **changes)

    trainer = Trainer(config_in(folder))
    trainer.stop_requested = True
    with pytest.raises(TrainingStopped):
        trainer.run()

    def copy(place: Path, **changes: Any) -> TrainConfig:
        shutil.copytree(folder, place, dirs_exist_ok=True)
        return config_in(place, **changes)

    return copy


def test_a_right_start_is_not_refused(begun: Callable[..., TrainConfig], tmp_path: Path) -> None:
    config = begun(tmp_path)
    check_start(config, resume=True)
    check_start(config.model_copy(update={"output": tmp_path / "new"}), resume=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"run": {"seed": 5}}, r"run.seed 0 \(now 5\)"),
        ({"method": {"depth": 3}}, r"method.depth 4 \(now 3\)"),
        ({"head": {"num_layers": 2}}, r"head.num_layers 1 \(now 2\)"),
        ({"optimizer": {"learning_rate": 1e-4}}, r"learning_rate 0.003 \(now 0.0001\)"),
        ({"optimizer": {"name": "muon"}}, r"optimizer.name 'adamw' \(now 'muon'\)"),
        ({"data": {"max_length": 20}}, r"data.max_length 2048 \(now 20\)"),
        ({"data": {"batch_tokens": 128}}, r"data.batch_tokens 256 \(now 128\)"),
        ({"data": {"validation": None}}, r"data.validation SHA-256 \w{12}\.\.\. \(now None\)"),
        ({"optimizer": {"steps": None}, "run": {"minutes": 2}}, r"run.minutes None \(now 2.0\)"),
    ],
)
def test_changed_keys_are_refused_before_the_target_loads(
    begun: Callable[..., TrainConfig], tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=rf"was made with .*{message}.*To resume, restore"):
        check_start(continued(begun(tmp_path, **changes)), resume=True)


def test_other_data_and_too_few_steps_are_refused(
    begun: Callable[..., TrainConfig], tmp_path: Path
) -> None:
    config = begun(tmp_path)
    state = tmp_path / "out" / "checkpoint" / "state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"step": 4}))
    with pytest.raises(UserError, match=r"optimizer.steps is 3, but .* is of step 4"):
        check_start(config, resume=True)
    with (tmp_path / "data.jsonl").open("a") as file:
        file.write("\n")
    with pytest.raises(UserError, match=r"data.train SHA-256 \w+\.\.\. \(now SHA-256"):
        check_start(config, resume=True)


def test_an_earlier_run_is_refused(begun: Callable[..., TrainConfig], tmp_path: Path) -> None:
    config = begun(tmp_path)
    with pytest.raises(UserError, match="holds an earlier run"):
        check_start(config, resume=False)
    # A crash between the two renames of a save.
    (tmp_path / "out" / "checkpoint").rename(tmp_path / "out" / "checkpoint.old")
    with pytest.raises(UserError, match="holds an earlier run"):
        check_start(config, resume=False)
    check_start(config, resume=True)
    shutil.rmtree(tmp_path / "out")
    with pytest.raises(UserError, match="no checkpoint to resume from"):
        check_start(config, resume=True)


def test_a_damaged_checkpoint_is_left_to_the_trainer(
    begun: Callable[..., TrainConfig], tmp_path: Path
) -> None:
    config = begun(tmp_path)
    (tmp_path / "out" / "checkpoint" / "state.json").write_text("{")
    check_start(config, resume=True)
    with pytest.raises(UserError, match=r"is damaged: state.json has SHA-256"):
        Trainer(config).run(resume=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {"train": Path("x.txt")}}, "data.train is .*x.txt'; expected a file that ends"),
        ({"data": {"features": Path("f"), "validation_features": Path("g")}}, "is no folder"),
        ({"head": {"init": Path(".")}}, "head.init: '.' has no config.json"),
        ({"head": {"init": Path("run/head")}}, "where this run writes its head"),
    ],
)
def test_wrong_paths(
    target_folder: Path,
    responses: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.txt").touch()
    Path("run/head").mkdir(parents=True)
    Path("run/head/config.json").touch()
    with pytest.raises(UserError, match=message):
        check_start(make_config(target_folder, responses, Path("run"), **changes), resume=False)


# ---- an optimizer that the file leaves open ----


def test_a_resumed_run_keeps_its_optimizer_and_tells(
    begun: Callable[..., TrainConfig], tmp_path: Path
) -> None:
    """It began with AdamW at 3e-3: the file then lost both keys, or says another rate."""

    def without_rate(**optimizer: Any) -> TrainConfig:
        data = begun(tmp_path).model_dump()
        data["optimizer"] = {"steps": 3, **optimizer}
        return TrainConfig.model_validate(data)

    config = without_rate()
    assert config.optimizer.name == "muon"
    kept = continued(config)
    assert (kept.optimizer.name, kept.optimizer.learning_rate) == ("adamw", 3e-3)
    assert optimizer_note(config, kept) == (
        "the run goes on with the AdamW at 0.003 that it began with; a new one would have Muon at "
        "0.005."
    )
    assert Trainer(config).run(resume=True)["config"]["optimizer"]["name"] == "adamw"
    assert continued(without_rate(name="adamw")).optimizer.learning_rate == 3e-3
    with pytest.raises(UserError, match=r"optimizer.learning_rate 0.003 \(now 0.1\)"):
        check_start(continued(without_rate(learning_rate=0.1)), resume=True)
    with pytest.raises(UserError, match=r"optimizer.name 'adamw' \(now 'muon'\)"):
        check_start(continued(without_rate(name="muon")), resume=True)


# ---- room on the disk ----

FROZEN = {"freeze_embeddings": True, "freeze_lm_head": True}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"optimizer": {"name": "muon"}, "head": {"num_layers": 3}},
        {"method": {"name": "eagle3"}, "head": {"draft_vocab_size": 100, "fc_norm": True}},
        {"head": {"freeze_embeddings": True, "qk_norm": True, "head_dim": 16}},
        {"head": {"freeze_lm_head": True}, "run": {"precision": "float32"}},
        {"head": {**FROZEN, "draft_vocab_size": 100}, "run": {"precision": "float32"}},
        {"head": {"hidden_size": 64, "num_attention_heads": 8, "num_kv_heads": 2}},
        {
            "head": {"aux_layer_ids": (1,), "intermediate_size": 200},
            "run": {"save_dtype": "float32"},
        },
    ],
    ids=str,
)
def test_sizes_are_found_without_torch(
    target_folder: Path, responses: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    """Of the real shapes: never more, and less only by norms and maps of vocabularies."""
    config = make_config(target_folder, responses, tmp_path, **changes)
    disk, least = make_plan(config).disk, least_sizes(config)
    assert least is not None
    for found, exact in zip(least, (disk["checkpoint"], disk["head"]), strict=True):
        assert 0.93 * exact < found <= exact


def test_sizes_of_a_head_to_start_from(
    target_folder: Path, responses: Path, tmp_path: Path
) -> None:
    init = Trainer(make_config(target_folder, responses, tmp_path, optimizer={"steps": 1}))
    init.run()
    head = {"init": tmp_path / "head"}
    config = make_config(target_folder, responses, tmp_path / "b", head=head)
    least, numbers = least_sizes(config), sum(p.numel() for p in init.drafter.parameters())
    assert least is not None and least[1] == pytest.approx(2 * numbers, rel=0.02)
    frozen = make_config(
        target_folder,
        responses,
        tmp_path / "c",
        head={**head, **FROZEN},
        run={"precision": "float32"},
    )
    less, disk = least_sizes(frozen), make_plan(frozen).disk
    assert less is not None and 0.93 * disk["checkpoint"] < less[0] <= disk["checkpoint"]
    assert less[0] < least[0]


def test_too_little_room_is_refused_before_and_by_the_trainer(
    target_folder: Path, responses: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(target_folder, responses, tmp_path / "new" / "run")
    trainer = Trainer(config)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    message = r"A run writes .* KiB to '.*run', where 1000 B are free; name another output"
    with pytest.raises(UserError, match=message):
        check_start(config, resume=False)
    assert not (tmp_path / "new").exists()
    with pytest.raises(UserError, match=message):
        trainer.run()
    config = config.model_copy(update={"target": tmp_path})
    (tmp_path / "config.json").write_text("{}")
    check_start(config, resume=False)  # nothing is known of the head: the target's loader tells why


def test_a_resumed_run_needs_room_for_one_more_checkpoint(
    begun: Callable[..., TrainConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = begun(tmp_path)
    sizes = least_sizes(config)
    assert sizes is not None
    usage = SimpleNamespace(free=sum(sizes))
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    check_start(config, resume=True)
    usage.free -= 1
    with pytest.raises(UserError, match="A run writes"):
        check_start(config, resume=True)


def test_sizes_know_every_type_that_is_saved() -> None:
    for name in RunSection.model_fields["save_dtype"].annotation.__args__:  # type: ignore[union-attr]
        assert _SAVED_BYTES[name] == getattr(torch, name).itemsize
