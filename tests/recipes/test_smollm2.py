"""The recipe of SmolLM2's heads: its phases, what they skip, and commands that exist."""

import importlib.util
import json
import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.docs.command_line import check_peagle
from tests.recipes.pretraining import ROOT

from peagle.training.config import TrainConfig

RECIPE = ROOT / "recipes" / "smollm2"


@pytest.fixture
def recipe() -> Any:
    """`make.py`, under a name that no other recipe has."""
    spec = importlib.util.spec_from_file_location("smollm2_make", RECIPE / "make.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_heads_differ_in_method_alone() -> None:
    heads = {name: TrainConfig.read(RECIPE / f"{name}.toml") for name in ("peagle", "eagle3")}
    peagle, eagle3 = heads.values()
    same = [(one.target, one.data, one.optimizer, one.run) for one in heads.values()]
    assert same[0] == same[1]
    assert (peagle.head.num_layers, eagle3.head.num_layers) == (4, 1)
    for config in heads.values():
        assert config.head.freeze_embeddings and config.head.freeze_lm_head
        assert config.head.quantization == "int4"
    free, frozen = TrainConfig.read(RECIPE / "free.toml").model_dump(), peagle.model_dump()
    for name in ("freeze_embeddings", "freeze_lm_head", "quantization", "int8_layers"):
        assert not free["head"].pop(name) and frozen["head"].pop(name)
    assert free | {"output": frozen["output"]} == frozen
    correction = TrainConfig.read(RECIPE / "correction.toml", ["correction.on=head"])
    assert (correction.data.train, correction.target) == (peagle.data.train, peagle.target)


def test_each_phase_runs_commands_that_exist_and_is_skipped_when_done(
    recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[str, dict[str, Any], int]] = []
    answer = json.dumps({"text": "a\u2028b"}, ensure_ascii=False)

    def run_jobs(jobs: Sequence[Any], places: Sequence[str], logs: Path, seconds: float) -> Any:
        for job in jobs:
            assert job.command[1:3] == ("-m", "peagle")
            params = check_peagle(list(job.command[3:])).params
            ran.append((job.name, params, len(places)))
            output = Path(params["output"])
            if job.command[3] == "data":
                output.parent.mkdir(parents=True, exist_ok=True)
                output.write_text(f"{answer}\n" * 10, encoding="utf-8")
                Path(f"{output}.meta.json").write_text(f'{{"by": "{job.name}"}}')
                output.with_suffix(".validation.safetensors").touch()
            else:
                (output / "head").mkdir(parents=True, exist_ok=True)
                (output / "head" / "config.json").touch()
        return {job.name: 0 for job in jobs}

    monkeypatch.setattr(recipe, "run_jobs", run_jobs)

    def make() -> list[str]:
        ran.clear()
        maker = recipe.Maker("target", tmp_path, ["0", "1"])
        maker.prompts(80)
        maker.answers()
        maker.data()
        maker.heads(1.5, free_head=True)
        (tmp_path / "peagle" / "head" / "correction.st").touch()
        maker.correction()
        return [name for name, *_ in ran]

    names = make()
    params = {name: found for name, found, _ in ran}
    assert [params[f"answers-{i}"]["temperature"] for i in range(4)] == ["0.0", "0.7"] * 2
    assert len({params[f"prompts-{i}"]["seed"] for i in range(8)}) == 8
    for part in range(recipe.PARTS):  # what the model card tells goes along
        side = tmp_path / "parts" / f"3-{part}.jsonl.meta.json"
        assert json.loads(side.read_text()) == {"by": "answers-3"}
    assert names[-4:] == ["peagle", "eagle3", "free", "correction"]
    config = TrainConfig.read(RECIPE / "free.toml", params["free"]["overrides"])
    assert config.run.minutes == 1.5
    parts = [(tmp_path / "parts" / f"3-{part}.jsonl").read_text("utf-8") for part in range(4)]
    assert sorted("".join(parts).split("\n")) == ["", *[answer] * 10]
    assert {count for name, _, count in ran if name.startswith("answers")} == {2 * recipe.AT_ONCE}
    assert not make(), "all is there"


def test_a_failed_phase_names_the_logs(
    recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipe, "run_jobs", lambda jobs, *_: {job.name: 1 for job in jobs})
    with pytest.raises(SystemExit, match="phase prompts failed"):
        recipe.Maker("target", tmp_path, [""]).prompts(8)


def test_the_card_names_the_target_and_the_origin_of_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = {"model": "target", "prompts": 800, "samples": 1000, "sha256": "p"}
    origins = [
        {
            "model": "target",
            "answers": 790,
            "temperature": at,
            "prompts": prompts,
            "sha256": f"{at}",
        }
        for at in (0.0, 0.7)
    ]
    record = {
        "config": {"method": {"name": "peagle", "depth": 8, "loss": "kl"}},
        "target": {"name": "target"},
        "data": {"train": {"responses": 1560, "origins": origins}},
        "validation": {"step": 9, "loss": 2.0, "acceptance_lengths": [1.6, 2.0, 2.25]},
        **{"steps": 1200, "epochs": 2.5, "seconds": 480.0, "device": "card", "commit": "abc"},
        **{"torch": "2", "transformers": "5", "peagle": "0.1"},
    }
    (tmp_path / "train.json").write_text(json.dumps(record))
    monkeypatch.setattr("sys.argv", ["card.py", str(tmp_path), str(tmp_path)])
    runpy.run_path(str(RECIPE / "card.py"), run_name="__main__")
    card = (tmp_path / "README.md").read_text()
    assert "# P-EAGLE head of SmolLM2-135M-Instruct" in card
    for row in (
        "| prompts | 800, kept of 1,000 samples of the target itself |",
        "| answers | the target itself: 790 at temperature 0, 790 at temperature 0.7 |",
        "| simulated acceptance length | 2.250 at K = 3 |",
    ):
        assert row in card.splitlines()
    assert "HuggingFaceTB" in card and "Apache-2.0" in card and "begins with" not in card
    earlier = tmp_path / "earlier.md"
    earlier.write_text(card)
    words = ["card.py", str(tmp_path), str(tmp_path), "--earlier", str(earlier)]
    monkeypatch.setattr("sys.argv", words)
    runpy.run_path(str(RECIPE / "card.py"), run_name="__main__")
    row = "an earlier head of 1,560 responses: 1,200 steps (2.50 epochs), card, 8.0 minutes"
    assert f"| begins with | {row} |" in (tmp_path / "README.md").read_text().splitlines()
    del record["data"]["train"]["origins"]
    (tmp_path / "train.json").write_text(json.dumps(record))
    with pytest.raises(SystemExit, match="does not say who wrote the prompts"):
        runpy.run_path(str(RECIPE / "card.py"), run_name="__main__")
