"""What a resumed run must have in common with its checkpoint, and the head that belongs to it."""

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from peagle.cli.main import run
from peagle.data.dataset import ResponseDataset
from peagle.errors import UserError
from peagle.models.checkpoint import CORRECTION_NAME
from peagle.training.config import TrainConfig
from peagle.training.trainer import Trainer, TrainingStopped
from tests.conftest import make_target_folder
from tests.training.runs import make_config, read_checkpoint, write_rows


def rows(seed: int, count: int = 16) -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(2, 300, (count, 24), generator=generator).tolist()
    return [{"prompt_token_ids": ids[:4], "response_token_ids": ids[4:]} for ids in drawn]


@pytest.fixture(scope="module")
def trained(
    target_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., TrainConfig]:
    """A run of two steps; the configuration of a copy of it, with changes."""
    folder = tmp_path_factory.mktemp("resume")
    for name, seed in (("train", 1), ("validation", 2)):
        write_rows(folder / f"{name}.jsonl", rows(seed))

    def config_in(place: Path, **changes: Any) -> TrainConfig:
        data = {name: place / f"{name}.jsonl" for name in ("train", "validation")}
        own = changes.pop("data", {})
        sections = {"optimizer": {"steps": 3}, "run": {"save_every": 1}, **changes}
        target = sections.pop("target", target_folder)
        return make_config(
            target, place, place / "out", data={**data, "max_length": 64, **own}, **sections
        )

    whole = config_in(folder)
    trainer = Trainer(whole)
    trainer._stepped = lambda step: setattr(trainer, "stop_requested", step == 2)
    with pytest.raises(TrainingStopped):
        trainer.run()

    def copy(place: Path, **changes: Any) -> TrainConfig:
        shutil.copytree(folder, place, dirs_exist_ok=True)
        return config_in(place, **changes)

    return copy


def resume(config: TrainConfig) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return Trainer(config).run(resume=True)


def test_the_same_data_elsewhere_resumes(
    trained: Callable[..., TrainConfig], tmp_path: Path
) -> None:
    """The file may move and have another name; other keys of the run may change."""
    trained(tmp_path)
    (tmp_path / "train.jsonl").rename(tmp_path / "moved.jsonl")
    config = trained(
        tmp_path / "two", data={"train": tmp_path / "moved.jsonl"}, optimizer={"steps": 4}
    )
    assert resume(config)["steps"] == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": {"max_length": 20}}, r"data.max_length 64 \(now 20\)"),
        ({"data": {"length_multiple": 16}}, r"data.length_multiple 8 \(now 16\)"),
        ({"data": {"batch_tokens": 128}}, r"data.batch_tokens 256 \(now 128\)"),
        ({"data": {"validation": None}}, r"data.validation SHA-256 \w{12}\.\.\. \(now None\)"),
        ({"run": {"seed": 5}}, r"run.seed 0 \(now 5\)"),
    ],
)
def test_what_decides_the_batches_may_not_change(
    trained: Callable[..., TrainConfig], tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=rf"was made with {message}\. To resume, restore"):
        resume(trained(tmp_path, **change))


@pytest.mark.parametrize("name", ["train", "validation"])
def test_other_data_of_the_same_name_and_size_are_refused(
    trained: Callable[..., TrainConfig], tmp_path: Path, name: str
) -> None:
    config = trained(tmp_path)
    before = read_checkpoint(tmp_path / "out")
    file = tmp_path / f"{name}.jsonl"
    size = file.stat().st_size
    text = file.read_text()
    digit = max(i for i, letter in enumerate(text) if letter in "12")
    file.write_text(text[:digit] + ("2" if text[digit] == "1" else "1") + text[digit + 1 :])
    assert file.stat().st_size == size
    pattern = rf"made with data.{name} SHA-256 \w{{12}}\.\.\. \(now SHA-256 \w{{12}}\.\.\.\)\. To"
    with pytest.raises(UserError, match=pattern):
        resume(config)
    after = read_checkpoint(tmp_path / "out")
    assert all(torch.equal(value, after[key]) for key, value in before.items())


def test_another_target_is_refused(trained: Callable[..., TrainConfig], tmp_path: Path) -> None:
    other = make_target_folder(tmp_path / "other", seed=7)
    with pytest.raises(UserError, match=r"target.lm_head_sha256 SHA-256 \w+\.\.\. \(now SHA-256"):
        resume(trained(tmp_path / "one", target=other))


def test_a_target_that_moved_resumes(
    trained: Callable[..., TrainConfig], target_folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(target_folder, tmp_path / "elsewhere")
    assert resume(trained(tmp_path / "one", target=tmp_path / "elsewhere"))["steps"] == 3


@pytest.mark.slow
def test_stored_features_are_compared_by_their_index(
    trained: Callable[..., TrainConfig], target_folder: Path, tmp_path: Path
) -> None:
    trained(tmp_path)

    def store(name: str, data: str, dtype: str) -> Path:
        command = ["data", "features", tmp_path / f"{data}.jsonl", "--target", target_folder]
        command += ["--output", tmp_path / name, "--max-length", 64, "--dtype", dtype]
        assert run([str(word) for word in command]) == 0
        return tmp_path / name

    pair = {
        "features": store("a", "train", "bf16"),
        "validation_features": store("b", "validation", "bf16"),
    }
    with pytest.raises(UserError, match=r"made with data.features None \(now SHA-256"):
        resume(trained(tmp_path / "one", data=pair))
    config = trained(tmp_path / "two", data=pair)
    shutil.rmtree(config.output)
    Trainer(config).run()

    def changed(**data: Path) -> TrainConfig:
        optimizer = config.optimizer.model_copy(update={"steps": 4})
        update = {"data": config.data.model_copy(update=data), "optimizer": optimizer}
        return config.model_copy(update=update)

    assert resume(changed(features=pair["features"].rename(tmp_path / "moved")))["steps"] == 4
    with pytest.raises(UserError, match=r"made with data.features SHA-256 .* \(now SHA-256"):
        resume(changed(features=store("c", "train", "fp8")))


def test_a_file_that_changes_while_it_is_read_is_refused(
    trained: Callable[..., TrainConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, load = trained(tmp_path), ResponseDataset.load

    def slow_load(path: Path, *arguments: Any) -> ResponseDataset:
        dataset = load(path, *arguments)
        with path.open("a") as file:
            file.write("\n")
        return dataset

    monkeypatch.setattr(ResponseDataset, "load", slow_load)
    with pytest.raises(UserError, match=r"validation.jsonl' changed while it was read"):
        Trainer(config)


@pytest.mark.slow
def test_a_file_that_changes_while_training_runs_is_noticed_when_it_resumes(
    trained: Callable[..., TrainConfig], tmp_path: Path
) -> None:
    config = trained(tmp_path, optimizer={"steps": 6})
    trainer = Trainer(config)

    def stepped(step: int) -> None:
        if step == 4:
            write_rows(tmp_path / "train.jsonl", rows(9))
            trainer.stop_requested = True

    trainer._stepped = stepped
    with pytest.raises(TrainingStopped):
        trainer.run(resume=True)
    with pytest.raises(UserError, match=r"made with data\.train SHA-256"):
        resume(config)
    write_rows(tmp_path / "train.jsonl", rows(1))
    assert resume(config)["steps"] == 6, "it had trained on what it read"


def test_a_run_without_resume_sees_the_checkpoint_between_two_renames(
    trained: Callable[..., TrainConfig], tmp_path: Path
) -> None:
    config = trained(tmp_path)
    (tmp_path / "out" / "checkpoint").rename(tmp_path / "out" / "checkpoint.old")
    with pytest.raises(UserError, match="holds an earlier run; continue with --resume"):
        Trainer(config).run()
    assert resume(config)["steps"] == 3


# ---- the head beside the checkpoint ----


def lose(head: Path) -> None:
    head.unlink()


def spoil(head: Path) -> None:
    save_file({name: value + 1 for name, value in load_file(head).items()}, head)


@pytest.mark.parametrize("accident", [lose, spoil])
@pytest.mark.parametrize("validated", [False, True])
def test_the_head_of_the_checkpoint_is_written_again(
    target_folder: Path, tmp_path: Path, validated: bool, accident: Callable[[Path], None]
) -> None:
    """A crash between the last head and its checkpoint left another head, or none."""
    data: dict[str, Any] = {"train": write_rows(tmp_path / "train.jsonl", rows(1))}
    data["validation"] = data["train"] if validated else None
    config = make_config(
        target_folder,
        tmp_path,
        tmp_path / "out",
        data=data,
        optimizer={"steps": 4},
        run={"save_every": 4, "validate_every": 4},
    )
    Trainer(config).run()
    head = tmp_path / "out" / "head" / "model.safetensors"
    before = head.read_bytes()
    accident(head)
    assert resume(config)["steps"] == 4
    assert head.read_bytes() == before


@pytest.mark.slow
def test_a_head_that_is_not_the_best_one_is_told(target_folder: Path, tmp_path: Path) -> None:
    """The best head is of an earlier step than the checkpoint, which cannot bring it back."""
    train = write_rows(tmp_path / "train.jsonl", rows(1))
    config = make_config(
        target_folder,
        train,
        tmp_path / "out",
        optimizer={"steps": 5},
        run={"save_every": 5, "validate_every": 1},
    )
    trainer = Trainer(config)
    real = trainer.selection.consider
    trainer.selection.consider = lambda report: report.step == 2 and real(report)
    trainer.run()
    assert trainer.selection.best is not None and trainer.selection.best["step"] == 2
    head = tmp_path / "out" / "head" / "model.safetensors"
    assert resume(config)["best"]["step"] == 2, "no word where it is the one"
    spoil(head)
    spoilt = head.read_bytes()
    with pytest.warns(UserWarning, match="is not what the checkpoint knows as the best"):
        Trainer(config).run(resume=True)
    assert head.read_bytes() == spoilt


@pytest.mark.slow
def test_a_correction_that_is_gone_is_written_again(
    target_folder: Path, tmp_path: Path, responses: Path
) -> None:
    Trainer(make_config(target_folder, responses, tmp_path / "run", optimizer={"steps": 10})).run()
    head = tmp_path / "run" / "head"
    config = TrainConfig.model_validate(
        {
            "target": target_folder,
            "output": tmp_path / "run" / "correction",
            "data": {"train": responses, "batch_tokens": 256, "length_multiple": 8},
            "method": {"depth": 4},
            "optimizer": {},
            "correction": {"on": head, "steps": 4},
            "run": {"device": "cpu"},
        }
    )
    Trainer(config).run()
    before = (head / CORRECTION_NAME).read_bytes()
    (head / CORRECTION_NAME).unlink()
    resume(config)
    after = load_file(head / CORRECTION_NAME)
    (tmp_path / "before.st").write_bytes(before)
    assert all(torch.equal(v, after[k]) for k, v in load_file(tmp_path / "before.st").items())
    assert json.loads((config.output / "train.json").read_text())["steps"] == 4
