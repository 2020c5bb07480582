"""The checkpoint on the disk: whole after a crash at any step, and refused where it is damaged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from peagle.errors import UserError
from peagle.training import state
from peagle.training.optimizers import Masters
from peagle.training.state import load_state, recover_state, save_state
from tests.crashes import disk_events, kills

FACTS: dict[str, Any] = {"seed": 0, "data": {"train": "0" * 64}, "target": {"vocab_size": 9}}


class Run:
    """A small model with its optimizer, which takes a step and saves it."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.masters = Masters(nn.Linear(3, 2), torch.float32)
        self.optimizer = torch.optim.AdamW([p for _, p in self.masters.named()], lr=0.1)

    def move(self, steps: int) -> Run:
        for _ in range(steps):
            for _, parameter in self.masters.named():
                parameter.grad = parameter.detach().clone()
            self.optimizer.step()
        return self

    def save(self, folder: Path, step: int) -> None:
        save_state(folder, self.masters, [self.optimizer], step, FACTS, {"note": step})

    def load(self, folder: Path, facts: dict[str, Any] = FACTS) -> int:
        step, progress = load_state(folder, self.masters, [self.optimizer], facts)
        assert progress == {"note": step}
        return step

    def values(self) -> list[torch.Tensor]:
        weights = [p.detach() for _, p in self.masters.named()]
        moments = [s[name] for s in self.optimizer.state.values() for name in sorted(s)]
        return [x.clone() for x in (*weights, *moments)]


def assert_step(folder: Path, step: int) -> None:
    """The checkpoint holds the run after so many steps, bit for bit."""
    found = Run()
    assert found.load(folder) == step
    expected = Run().move(step).values()
    assert all(torch.equal(*pair) for pair in zip(found.values(), expected, strict=True))


@pytest.mark.slow
def test_a_crash_at_any_step_of_a_save_leaves_a_checkpoint(tmp_path: Path) -> None:
    folder, before = tmp_path / "run" / "checkpoint", tmp_path / "before"
    Run().move(1).save(before / "checkpoint", 1)
    newer = Run().move(2)

    def prepare() -> None:
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        shutil.copytree(before, tmp_path / "run")

    found = []
    for _ in kills(prepare, lambda: newer.save(folder, 2)):
        recover_state(folder)
        step = json.loads((folder / "state.json").read_text())["step"]
        assert_step(folder, step)
        assert [path.name for path in folder.parent.iterdir()] == ["checkpoint"]
        found.append(step)
    assert found == sorted(found) and set(found) == {1, 2} and len(found) > 10
    assert_step(folder, 2)


@pytest.mark.slow
def test_a_crash_in_the_first_save_leaves_none_or_a_whole_one(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    prepare, run = (lambda: shutil.rmtree(folder, ignore_errors=True)), Run().move(1)
    for _ in kills(prepare, lambda: run.save(folder, 1)):
        recover_state(folder)
        if folder.exists():
            assert_step(folder, 1)
            continue
        with pytest.raises(UserError, match="no checkpoint to resume from"):
            Run().load(folder)
    assert_step(folder, 1)


def test_every_file_is_on_the_disk_before_the_checkpoint_appears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, done = tmp_path / "checkpoint", disk_events(monkeypatch)
    Run().save(folder, 0)
    appears = done.index("checkpoint.part to checkpoint")
    written = {path.name for path in folder.iterdir()}
    synced = {name.removesuffix(".part") for name in done[:appears]}
    assert len(written) == 3 and written <= synced, done
    assert done[appears - 1] == "checkpoint.part", "its names last"
    assert done[appears + 1 :] == [tmp_path.name], "and then its own"


def flip(path: Path) -> None:
    """Change one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "flipped": flip,
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-9]),
    "empty": lambda path: path.write_bytes(b""),
    "gone": Path.unlink,
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize(
    "name", ["shard-00001-model-00001-of-00001.safetensors", "state.json", "manifest.json"]
)
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, name: str, damage: str) -> None:
    folder = tmp_path / "checkpoint"
    Run().move(1).save(folder, 1)
    DAMAGES[damage](folder / name)
    message = f"'{folder}' is damaged: .*{name}.*Restore the checkpoint from a copy"
    if (name, damage) == ("manifest.json", "flipped"):
        message = "is damaged: .* has SHA-256"  # which of the two is wrong, nobody knows
    if (name, damage) == ("state.json", "gone"):
        message = "no checkpoint to resume from"
    run = Run()
    before = run.values()
    with pytest.raises(UserError, match=message):
        run.load(folder)
    assert all(torch.equal(*pair) for pair in zip(run.values(), before, strict=True))


def test_a_file_that_is_not_the_checkpoints_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    Run().save(folder, 0)
    (folder / "notes.txt").write_text("nothing reads this")
    Run().load(folder)
    shard = next(folder.glob("*.safetensors"))
    shutil.copy(shard, folder / "other.safetensors")
    with pytest.raises(UserError, match=r"other\.safetensors is not a part of it"):
        Run().load(folder)


def test_the_checkpoint_before_a_damaged_one_is_named_if_it_is_whole(tmp_path: Path) -> None:
    folder, previous = tmp_path / "checkpoint", tmp_path / "checkpoint.old"
    Run().move(1).save(previous, 1)
    Run().move(2).save(folder, 2)
    Run().move(1).save(previous, 1)  # a death before the older one was removed leaves both
    flip(next(folder.glob("*.safetensors")))
    with pytest.raises(UserError, match=f"remove '{folder}' and run again with --resume"):
        Run().load(folder)
    flip(next(previous.glob("*.safetensors")))
    with pytest.raises(UserError, match="Restore the checkpoint from a copy"):
        Run().load(folder)
    Run().move(1).save(previous, 1)
    shutil.rmtree(folder)
    recover_state(folder)
    assert_step(folder, 1)


def test_an_older_checkpoint_goes_on_with_a_warning(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    Run().move(1).save(folder, 1)
    (folder / "manifest.json").unlink()
    record = json.loads((folder / "state.json").read_text())
    del record["data"], record["target"]
    (folder / "state.json").write_text(json.dumps(record))
    with pytest.warns(UserWarning, match="is of an older peagle, which did not store"):
        assert_step(folder, 1)
    with pytest.raises(UserError, match=r"seed 0 \(now 1\)"), pytest.warns(UserWarning):
        Run().load(folder, FACTS | {"seed": 1})
    Run().move(2).save(folder, 2)
    with pytest.raises(
        UserError, match=r"data.train SHA-256 0{12}\.\.\. \(now SHA-256 1{12}\.\.\.\)"
    ):
        Run().load(folder, FACTS | {"data": {"train": "1" * 64}})


def test_hashing_several_files_gives_each_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "_FILE_BYTES", 16)
    Run().move(1).save(tmp_path / "checkpoint", 1)
    shards = sorted((tmp_path / "checkpoint").glob("shard*"))
    assert len(shards) > 2
    assert_step(tmp_path / "checkpoint", 1)
    first, second = shards[0].read_bytes(), shards[1].read_bytes()
    shards[0].write_bytes(second)
    shards[1].write_bytes(first)
    with pytest.raises(UserError, match=shards[0].name):
        Run().load(tmp_path / "checkpoint")
