"""The configuration of a training run: paths, overrides and mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest

from peagle.errors import UserError
from peagle.training.config import TrainConfig

MINIMAL = """
target = "t"
output = "o"
[data]
train = "d.jsonl"
[optimizer]
steps = 5
"""


def read(tmp_path: Path, text: str, *overrides: str) -> TrainConfig:
    (tmp_path / "c.toml").write_text(text)
    return TrainConfig.read(tmp_path / "c.toml", overrides)


def test_paths_and_overrides(tmp_path: Path) -> None:
    config = read(tmp_path, MINIMAL, "optimizer.steps=9", "method.name=eagle3", "run.seed = 3")
    assert config.target == tmp_path / "t" and config.data.train == tmp_path / "d.jsonl"
    assert config.optimizer.steps == 9 and config.method.name == "eagle3" and config.run.seed == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("target =", "is not TOML"),
        (MINIMAL.replace("steps = 5", ""), "optimizer.steps is missing"),
        (MINIMAL + "speed = 3", "optimizer.speed is not a known key"),
        (MINIMAL.replace("steps = 5", "steps = 0"), "optimizer.steps is 0"),
        ("format_version = 99\n" + MINIMAL, "newer than this peagle reads"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read(tmp_path, text)
    with pytest.raises(UserError, match="KEY=VALUE"):
        read(tmp_path, MINIMAL, "optimizer.steps")
    with pytest.raises(UserError, match="is not there"):
        TrainConfig.read(tmp_path / "none.toml")
