"""The configuration of a training run: paths, overrides and mistakes."""

from pathlib import Path

import pytest

from peagle.errors import UserError
from peagle.training.config import TrainConfig, optimizer_note

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
        (MINIMAL.replace("steps = 5", ""), "optimizer.steps is missing, and so is run.minutes"),
        (MINIMAL + "[run]\nminutes = 20", "optimizer.steps is 5 and run.minutes is 20, which"),
        (MINIMAL + "[run]\nminutes = 0", "run.minutes is 0"),
        (MINIMAL + f"[run]\nseed = {1 << 63}", "run.seed is 9223372036854775808"),
        (MINIMAL + "speed = 3", "optimizer.speed is not a known key"),
        (
            MINIMAL + "learnig_rate = 3",
            r"learnig_rate is .* Did you mean 'optimizer.learning_rate'",
        ),
        (
            MINIMAL.replace("optimizer", "optimiser"),
            r"optimiser is not .* Did you mean 'optimizer'",
        ),
        (MINIMAL.replace("output", "ouput"), r"ouput is not a known key. Did you mean 'output'"),
        (MINIMAL + "depth = 8", r"optimizer.depth is not .* Did you mean 'method.depth'"),
        (MINIMAL + "k = 3", "optimizer.k is not a known key. Known: name, steps"),
        (MINIMAL + "[head.layers]\nnum = 3", "layers is .* Did you mean 'head.num_layers'"),
        (MINIMAL + "[head.num_layers]\nx = 3", "head.num_layers is {'x': 3}: Input should be"),
        (
            "head = 3\n" + MINIMAL,
            r"head is 3; expected a table, \[head\], with some of num_layers, .*, init\.$",
        ),
        (MINIMAL + '[run]\nsegments = "aut"', "segments is 'aut': expected \"auto\" or a whole"),
        ("steps = 9\n" + MINIMAL, "mean 'correction.steps' or 'optimizer.steps'"),
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
    with pytest.raises(UserError, match="is a folder; expected a TOML file"):
        TrainConfig.read(tmp_path)


@pytest.mark.parametrize(
    ("option", "rest"),
    [
        ("optimizer.steps=0", "optimizer.steps is 0: Input"),
        ("method.depth_weights=[-1]", "method.depth_weights.0 is"),
        ("optimizer.stps=3", "optimizer.stps is not a known key. Did you mean 'optimizer"),
        ("optimzer.steps=2", "optimzer is not a known key. Did you mean 'optimizer"),
        ("run.minutes=2", "optimizer.steps is 5 and run.minutes is 2"),
        ("head.group_size=64", "head: group_size is 64 and"),
    ],
)
def test_a_mistake_of_an_option_names_the_option(tmp_path: Path, option: str, rest: str) -> None:
    with pytest.raises(UserError) as caught:
        read(tmp_path, MINIMAL, option, "run.seed=1")
    file = f"{str(tmp_path / 'c.toml')!r} with " if " and" in rest else ""
    assert str(caught.value).startswith(f"{file}--set {option}: {rest}")


def test_true_is_no_number(tmp_path: Path) -> None:
    for key in ("correction.rank", "run.minutes", "method.cod_ratio", "format_version"):
        with pytest.raises(UserError, match=f"{key} is True: expected a number, not true"):
            read(tmp_path, MINIMAL, f"{key}=true")
    with pytest.raises(UserError, match=r"depth_weights is \[1, True\]: expected a number, not"):
        read(tmp_path, MINIMAL, "method.depth=2", "method.depth_weights=[1, true]")
    assert read(tmp_path, MINIMAL, "run.recompute_layers=true").run.recompute_layers is True


@pytest.mark.parametrize(
    ("text", "name", "rate"),
    [
        ("", "muon", 5e-3),
        ('name = "muon"', "muon", 5e-3),
        ('name = "adamw"', "adamw", 1e-4),
        ("learning_rate = 3e-4", "adamw", 3e-4),
        ('name = "muon"\nlearning_rate = 3e-4', "muon", 3e-4),
        ("weight_decay = 0.1", "muon", 5e-3),
    ],
)
def test_the_optimizer_that_a_file_has(tmp_path: Path, text: str, name: str, rate: float) -> None:
    config = read(tmp_path, MINIMAL + text)
    assert (config.optimizer.name, config.optimizer.learning_rate) == (name, rate)
    note = optimizer_note(config, config)
    if text.startswith("learning_rate"):
        assert "is a rate of AdamW" in note and "Muon at 0.005" in note and note.count(".") < 9
    else:
        assert note == ""
    assert TrainConfig.model_validate(config.model_dump()).optimizer == config.optimizer


def test_a_correction_has_its_own_optimizer_and_steps(tmp_path: Path) -> None:
    """Whatever the head's run has, also if time plans its steps."""
    text = MINIMAL.replace("steps = 5", "") + "[run]\nminutes = 20\n[correction]\nsteps = 7"
    (tmp_path / "c.toml").write_text(text)
    config = TrainConfig.read(tmp_path / "c.toml", correction_on="head")
    assert (config.optimizer.name, config.optimizer.steps, config.run.minutes) == ("adamw", 7, None)
    assert optimizer_note(config, config) == ""
    with pytest.raises(UserError, match=r"toml' with --correction-on: correction.on is"):
        (tmp_path / "c.toml").write_text(text + '\ntrain = "together"')
        TrainConfig.read(tmp_path / "c.toml", correction_on="head")


def test_the_steps_that_minutes_have_room_for(tmp_path: Path) -> None:
    text = MINIMAL.replace("steps = 5", "") + "[run]\nminutes = 20"
    run = read(tmp_path, text).run
    assert [run.steps_within(seconds) for seconds in (1.5, 7.0, 5000.0)] == [800, 171, 1]
