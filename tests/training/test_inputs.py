"""A run from stored features against the run whose target is in the process."""

from pathlib import Path
from typing import Any

import pytest
import torch

from peagle import LLM
from peagle.cli.main import run
from peagle.errors import UserError
from peagle.models.target_ends import TargetEnds
from peagle.training.config import TrainConfig
from peagle.training.trainer import Trainer
from tests.training.runs import make_config, twelve_steps


@pytest.fixture(scope="module")
def store(target_folder: Path, responses: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Features that the command wrote, of the layers that training taps by default."""
    folder = tmp_path_factory.mktemp("store") / "features"
    options = ["--target", str(target_folder), "--output", str(folder), "--dtype", "fp32"]
    threads = torch.get_num_threads()
    assert run(["data", "features", str(responses), *options, "--device", "cpu"]) == 0
    torch.set_num_threads(threads)
    return folder


def stored(store: Path, **changes: Any) -> dict[str, Any]:
    return {"features": store, "validation_features": store, **changes}


@pytest.mark.slow
def test_stored_features_give_the_run_of_the_live_target(
    target_folder: Path, responses: Path, store: Path, tmp_path: Path
) -> None:
    histories = []
    for name, data in (("live", {}), ("stored", stored(store))):
        config = make_config(
            target_folder, responses, tmp_path / name, data=data, **twelve_steps(segments=2)
        )
        trainer = Trainer(config)
        assert isinstance(trainer.target, TargetEnds) == (name == "stored")
        trainer.run()
        histories.append(trainer.history.entries)
    for one, other in zip(*histories, strict=True):
        assert one["kind"] == other["kind"] and one["step"] == other["step"]
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)
        assert one["acceptance_lengths"] == pytest.approx(other["acceptance_lengths"], abs=0.02)
    head = {"model": str(tmp_path / "stored" / "head"), "num_speculative_tokens": 3}
    output = LLM(target_folder, speculative_config=head).generate(["abc"])[0]
    assert output.token_ids, "the head of a run from a store serves its target"


@pytest.mark.slow
def test_a_resumed_run_from_a_store_goes_on(
    target_folder: Path, responses: Path, store: Path, tmp_path: Path
) -> None:
    config = make_config(
        target_folder, responses, tmp_path, data=stored(store), **twelve_steps(segments=1)
    )
    trainer = Trainer(config, lambda r: setattr(trainer, "stop_requested", r.step == 5))
    with pytest.raises(Exception, match="stopped at step 5"):
        trainer.run()
    again = Trainer(config)
    again.run(resume=True)
    assert again.step == 12


def test_one_store_without_the_other_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(
        'target = "t"\noutput = "o"\n[data]\ntrain = "a.jsonl"\nvalidation = "b.jsonl"\n'
        'features = "f"\n[optimizer]\nsteps = 5\n'
    )
    with pytest.raises(UserError, match="peagle data features"):
        TrainConfig.read(tmp_path / "c.toml")
    config = TrainConfig.read(tmp_path / "c.toml", ["data.validation_features=v"])
    assert config.data.features == tmp_path / "f"
    assert config.data.validation_features == tmp_path / "v"


def test_a_store_of_other_layers_is_refused(
    target_folder: Path, responses: Path, store: Path, tmp_path: Path
) -> None:
    head = {"num_layers": 1, "aux_layer_ids": (0, 2, 3)}
    config = make_config(target_folder, responses, tmp_path, data=stored(store), head=head)
    with pytest.raises(UserError, match="layers"):
        Trainer(config)
