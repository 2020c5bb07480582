"""Runs of a head and its correction together: what they report, save, resume and serve."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from peagle import LLM, SamplingParams
from peagle.cli.main import run
from peagle.errors import UserError
from peagle.models.checkpoint import CORRECTION_NAME, load_correction, load_drafter
from peagle.models.target import TargetModel
from peagle.training.config import TrainConfig
from peagle.training.reporting import TrainingReport
from peagle.training.trainer import Trainer
from tests.training.runs import make_config, read_checkpoint, run_until_step, twelve_steps

SMALL = {"train": "together", "rank": 16, "width": 32}


def configure(target: Path, responses: Path, output: Path, **changes: Any) -> TrainConfig:
    own = {**SMALL, **changes.pop("correction", {})}
    return make_config(target, responses, output, correction=own, **changes)


@pytest.mark.slow
def test_validation_tells_what_serving_gives(
    target_folder: Path, responses: Path, tmp_path: Path
) -> None:
    reports: list[TrainingReport] = []
    config = configure(
        target_folder,
        responses,
        tmp_path,
        optimizer={"steps": 100, "learning_rate": 6e-3},
        run={"validate_every": 100, "save_every": 100, "save_dtype": "float32"},
    )
    record = Trainer(config, reports.append).run()
    *_, last = [report for report in reports if report.kind == "validation"]
    corrected, alone = last.acceptance_lengths[-1], last.acceptance_lengths_alone[-1]
    assert corrected > alone + 0.01, "drafts know more with the correction"
    assert last.acceptance_lengths[0] == last.acceptance_lengths_alone[0], "slot 0 is left alone"
    assert record["correction_parameters"] > 0
    head = tmp_path / "head"
    with safe_open(head / CORRECTION_NAME, framework="pt") as reader:
        facts = json.loads(reader.metadata()["peagle_correction"])
    assert facts["record"]["steps"] == 100
    names = [path.name for path in head.glob("*.safetensors")]
    assert names == ["model.safetensors"], "the tensors that vLLM reads"
    with safe_open(head / names[0], framework="pt") as reader:
        assert not any("correction" in name for name in reader.keys())  # noqa: SIM118

    rows = [json.loads(line) for line in responses.read_text().splitlines()]
    for speculation, promised in (
        ({}, corrected),
        ({"correction": False}, alone),
        ({"parallel_drafting_spec": {"max_nodes": 8}}, None),
    ):
        speculative = {"model": str(head), "num_speculative_tokens": 4, **speculation}
        llm = LLM(target_folder, speculative_config=speculative, max_num_seqs=48)
        outputs = llm.generate(
            [row["prompt_token_ids"] for row in rows],
            SamplingParams(max_tokens=24, ignore_eos=True),
        )
        assert [o.token_ids for o in outputs] == [row["response_token_ids"] for row in rows]
        served = llm.engine.stats.speculation.acceptance_length
        assert promised is None or abs(served - promised) < 0.15, speculation


@pytest.mark.slow
def test_a_resumed_run_equals_an_uninterrupted_one(
    target_folder: Path, responses: Path, tmp_path: Path
) -> None:
    def config(name: str) -> TrainConfig:
        own = {"own_drafts": 0.25}
        return configure(
            target_folder, responses, tmp_path / name, correction=own, **twelve_steps()
        )

    Trainer(config("whole")).run()
    run_until_step(Trainer(config("halved")), 8)
    (tmp_path / "halved/head" / CORRECTION_NAME).write_bytes(b"half a file")
    Trainer(config("halved")).run(resume=True)
    first, second = (read_checkpoint(tmp_path / name) for name in ("whole", "halved"))
    assert first.keys() == second.keys()
    assert any("correction.tokens" in name for name in first)
    assert any("optimizer.exp_avg.correction" in name for name in first)
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
    files = [
        (tmp_path / name / "head" / CORRECTION_NAME).read_bytes() for name in ("whole", "halved")
    ]
    assert load(files[0], tmp_path) == load(files[1], tmp_path)


def load(data: bytes, folder: Path) -> dict[str, list[float]]:
    """The numbers of a correction's file, which names when it was made."""
    (folder / "some.st").write_bytes(data)
    with safe_open(folder / "some.st", framework="pt") as reader:
        return {n: reader.get_tensor(n).flatten().tolist() for n in reader.keys()}  # noqa: SIM118


@pytest.mark.slow
@pytest.mark.parametrize(
    "head",
    [
        {"freeze_embeddings": True, "freeze_lm_head": True},
        {"quantization": "int8", "group_size": 16},
    ],
    ids=str,
)
def test_it_goes_with_heads_of_all_kinds(
    target_folder: Path, responses: Path, tmp_path: Path, head: dict[str, Any]
) -> None:
    config = configure(
        target_folder, responses, tmp_path, head=head, optimizer={"steps": 4}, run={"segments": 2}
    )
    trainer = Trainer(config)
    trainer.run()
    folder, target = tmp_path / "head", TargetModel.load(target_folder)
    drafter = load_drafter(folder, target)
    found = load_correction(folder, drafter)
    assert found is not None and trainer.correction is not None
    assert found.down_rW is not None
    stored = trainer.correction.down.weight.detach().bfloat16().to(found.down_rW.dtype)
    assert torch.equal(found.down_rW, stored) and stored.abs().max() > 0


@pytest.mark.slow
def test_stored_features_train_the_same(
    target_folder: Path, responses: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    command = ["data", "features", responses, "--target", target_folder, "--output", store]
    assert run([str(word) for word in [*command, "--max-length", 2048]]) == 0
    weights = []
    for data in ({}, {"features": store, "validation_features": store}):
        config = configure(
            target_folder,
            responses,
            tmp_path / str(len(data)),
            data=data,
            optimizer={"steps": 6, "name": "muon"},
        )
        trainer = Trainer(config)
        trainer.run()
        assert trainer.correction is not None
        weights.append(dict(trainer.correction.named_parameters()))
    for name, weight in weights[0].items():
        # Stored states are rounded to bfloat16.
        assert (weight - weights[1][name]).norm() < 0.05 * weight.norm(), name


def test_a_correction_is_part_of_what_a_resumed_run_shares(
    target_folder: Path, responses: Path, tmp_path: Path
) -> None:
    few = {"optimizer": {"steps": 2}, "run": {"validate_every": 2, "save_every": 1}}
    Trainer(configure(target_folder, responses, tmp_path, **few)).run()
    few["optimizer"] = {"steps": 3}
    with pytest.raises(UserError, match=r"correction.rank 16 \(now 8\)"):
        other = configure(target_folder, responses, tmp_path, correction={"rank": 8}, **few)
        Trainer(other).run(resume=True)
    with pytest.raises(UserError, match=r"correction .*'together'.* \(now None\)"):
        Trainer(make_config(target_folder, responses, tmp_path, **few)).run(resume=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": {"name": "eagle3"}}, "train is 'together' with method.name 'eagle3'"),
        ({"method": {"depth": 1}}, "method.depth 1; expected 'peagle' and at least 2"),
        ({"correction": {"on": "head"}}, "'head', a head that stays as it is"),
        ({"correction": {"own_drafts": 0.3}}, "less than or equal to 0.25"),
    ],
    ids=str,
)
def test_options_that_cannot_be(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        configure(tmp_path, tmp_path, tmp_path, **changes)


def test_a_run_goes_on_with_the_correction_of_the_head_to_start_from(
    target_folder: Path, responses: Path, tmp_path: Path
) -> None:
    """At the first step both are what was saved; a correction of other sizes is refused."""
    steps = {"optimizer": {"steps": 30, "learning_rate": 6e-3}, "run": {"save_dtype": "float32"}}
    Trainer(configure(target_folder, responses, tmp_path / "a", **steps)).run()
    init = tmp_path / "a" / "head"
    again = Trainer(
        configure(target_folder, responses, tmp_path / "b", head={"init": init}, **steps)
    )
    stored = load_file(init / CORRECTION_NAME)
    found = again.correction
    assert found is not None and stored["down.weight"].abs().max() > 0
    assert all(torch.equal(value, stored[name]) for name, value in found.state_dict().items())

    deeper = configure(
        target_folder, responses, tmp_path / "c", head={"init": init}, method={"depth": 6}
    )
    slots = Trainer(deeper).correction
    assert slots is not None and len(slots.slots) == 5
    assert torch.equal(slots.slots[:3], stored["slots"])
    assert torch.equal(slots.slots[3:], stored["slots"][-1:].expand(2, -1))

    for name, stored_size in (("rank", 16), ("width", 32)):
        other = configure(
            target_folder, responses, tmp_path / "d", correction={name: 8}, head={"init": init}
        )
        with pytest.raises(UserError, match=rf"Set correction\.{name} to {stored_size} to go on"):
            Trainer(other)
    (init / CORRECTION_NAME).unlink()
    fresh = Trainer(
        configure(target_folder, responses, tmp_path / "e", head={"init": init})
    ).correction
    assert fresh is not None and not fresh.down.weight.any()
