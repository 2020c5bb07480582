"""Training end to end on the tiny Llama: it learns, resumes exactly, and survives interruption."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from peagle import LLM, SamplingParams
from peagle.errors import UserError
from peagle.models.checkpoint import read_head, trained_length
from peagle.training import state
from peagle.training.reporting import TrainingReport
from peagle.training.trainer import Trainer, TrainingStopped
from tests.training.runs import make_config, read_checkpoint, run_until_step


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        {"name": "peagle"},
        {"name": "peagle", "loss": "ce", "cod_ratio": 0.6},
        {"name": "eagle3", "depth": 7, "depth_decay": 0.8},
    ],
    ids=lambda m: "-".join(str(v) for v in m.values()),
)
def test_training_learns_and_the_head_serves(
    target_folder: Path, responses: Path, tmp_path: Path, method: dict[str, Any]
) -> None:
    reports: list[TrainingReport] = []
    config = make_config(
        target_folder,
        responses,
        tmp_path,
        method=method,
        optimizer={"steps": 80, "learning_rate": 6e-3},
        run={"save_every": 40},
    )
    record = Trainer(config, reports.append).run()
    validations = [r for r in reports if r.kind == "validation"]
    assert validations[-1].loss < 0.7 * validations[0].loss or validations[-1].loss < 0.05
    assert validations[-1].acceptance_lengths[-1] > 1.3
    assert record["steps"] == 80 and record["data_sha256"]
    assert json.loads((tmp_path / "train.json").read_text())["validation"]["step"] == 80

    rows = [json.loads(line) for line in responses.read_text().splitlines()]
    speculative = {
        "model": str(tmp_path / "head"),
        "num_speculative_tokens": config.method.depth,
    }
    facts = read_head(tmp_path / "head").facts
    assert trained_length(facts) == max(
        len(r["prompt_token_ids"]) + len(r["response_token_ids"]) for r in rows
    )
    llm = LLM(target_folder, speculative_config=speculative, max_num_seqs=48)
    outputs = llm.generate(
        [r["prompt_token_ids"] for r in rows], SamplingParams(max_tokens=24, ignore_eos=True)
    )
    assert [o.token_ids for o in outputs] == [r["response_token_ids"] for r in rows]
    served = llm.engine.stats.speculation.acceptance_length
    assert abs(served - validations[-1].acceptance_lengths[-1]) < 0.15, (
        "what training promises is what serving gives"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "optimizer", "run", "head"),
    [
        ("peagle", "adamw", {}, {}),
        ("eagle3", "adamw", {}, {}),
        ("peagle", "muon", {}, {"freeze_embeddings": True, "freeze_lm_head": True}),
        ("peagle", "adamw", {"segments": 2, "recompute_layers": True}, {}),
    ],
)
def test_resumed_run_equals_uninterrupted_run(
    target_folder: Path,
    responses: Path,
    tmp_path: Path,
    method: str,
    optimizer: str,
    run: dict[str, Any],
    head: dict[str, Any],
) -> None:
    every = {"log_every": 4, "validate_every": 4, "save_every": 4}
    changes = {
        "method": {"name": method},
        "optimizer": {"name": optimizer, "steps": 12},
        "run": {**every, **run},
        "head": head,
    }
    whole = make_config(target_folder, responses, tmp_path / "whole", **changes)
    Trainer(whole).run()
    halved = make_config(target_folder, responses, tmp_path / "halved", **changes)
    run_until_step(Trainer(halved), 8)
    resumed = Trainer(halved)
    resumed.run(resume=True)
    first, second = (read_checkpoint(tmp_path / name) for name in ("whole", "halved"))
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
    per_epoch = resumed.stream.steps_per_epoch
    assert 4 % per_epoch and 4 < per_epoch < 12, "from the midst of an epoch into the next"


@pytest.mark.slow
def test_seed_decides_the_run(target_folder: Path, responses: Path, tmp_path: Path) -> None:
    heads = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        config = make_config(
            target_folder, responses, tmp_path / name, run={"seed": seed}, optimizer={"steps": 5}
        )
        Trainer(config).run()
        heads.append(load_file(tmp_path / name / "head" / "model.safetensors"))
    assert all(torch.equal(heads[0][n], heads[1][n]) for n in heads[0])
    assert not torch.equal(heads[0]["fc.weight"], heads[2]["fc.weight"])


@pytest.mark.slow
def test_a_full_disk_leaves_the_last_checkpoint_whole(
    target_folder: Path, responses: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = {"validate_every": 4, "save_every": 2}
    config = make_config(target_folder, responses, tmp_path, optimizer={"steps": 8}, run=every)
    calls = []

    class FullDisk(state.HuggingFaceStorageWriter):
        def write_data(self, plan: Any, planner: Any) -> Any:
            calls.append(self.path)
            if len(calls) > 2:
                (Path(self.path) / "shard-00001.safetensors").write_bytes(b"half a file")
                raise OSError(28, "No space left on device")
            return super().write_data(plan, planner)

    monkeypatch.setattr(state, "HuggingFaceStorageWriter", FullDisk)
    with pytest.raises(UserError, match="No space left") as caught:
        Trainer(config).run()
    assert "run again; `peagle train --resume` goes on" in str(caught.value)
    assert not (tmp_path / "checkpoint.part").exists()
    monkeypatch.undo()
    resumed = Trainer(config)
    resumed.run(resume=True)
    assert resumed.step == 8
    assert json.loads((tmp_path / "checkpoint" / "state.json").read_text())["step"] == 8


@pytest.mark.slow
def test_resume_refuses_another_configuration(
    target_folder: Path, responses: Path, tmp_path: Path
) -> None:
    Trainer(make_config(target_folder, responses, tmp_path, optimizer={"steps": 10})).run()
    with pytest.raises(UserError, match="--resume or choose another output"):
        Trainer(make_config(target_folder, responses, tmp_path)).run()
    other = make_config(
        target_folder, responses, tmp_path, run={"seed": 9}, optimizer={"steps": 10}
    )
    with pytest.raises(UserError, match=r"made with run.seed 0 \(now 9\)\. To resume") as caught:
        Trainer(other).run(resume=True)
    assert "{" not in str(caught.value)
    slower = {"steps": 20, "learning_rate": 1e-4}
    other = make_config(target_folder, responses, tmp_path, optimizer=slower, method={"depth": 3})
    changed = r"method.depth 4 \(now 3\), optimizer.learning_rate 0.003 \(now 0.0001\)\. To"
    with pytest.raises(UserError, match=changed):
        Trainer(other).run(resume=True)
    nowhere = make_config(target_folder, responses, tmp_path / "new")
    with pytest.raises(UserError, match="no checkpoint"):
        Trainer(nowhere).run(resume=True)


@pytest.mark.slow
def test_a_resumed_run_may_have_more_steps_or_fewer(
    target_folder: Path, responses: Path, tmp_path: Path
) -> None:
    def run(steps: int, *, resume: bool) -> list[TrainingReport]:
        reports: list[TrainingReport] = []
        changes = {"optimizer": {"steps": steps}, "run": {"log_every": 1, "save_every": 4}}
        config = make_config(target_folder, responses, tmp_path, **changes)
        Trainer(config, reports.append).run(resume=resume)
        return [report for report in reports if report.kind == "train"]

    run(8, resume=False)
    with pytest.raises(UserError, match=r"steps is 7, but the checkpoint .* is of step 8"):
        run(7, resume=True)
    further = run(16, resume=True)
    assert [report.step for report in further] == list(range(9, 17))
    # Linear decay to zero at step 16, as if there had been 16 steps from the start.
    expected = [3e-3 * (16 - min(step, 15)) / 15 for step in range(9, 17)]
    assert [report.learning_rate for report in further] == pytest.approx(expected)
    record = json.loads((tmp_path / "head" / "train.json").read_text())
    assert (record["steps"], record["planned_steps"], record["stop_reason"]) == (16, 16, "steps")
    assert record == json.loads((tmp_path / "train.json").read_text())
    assert run(16, resume=True) == []


def test_draft_vocabulary_is_the_most_frequent_response_tokens(
    target_folder: Path, responses: Path, tmp_path: Path
) -> None:
    config = make_config(
        target_folder, responses, tmp_path, head={"draft_vocab_size": 40, "num_layers": 1}
    )
    trainer = Trainer(config)
    rows = [json.loads(line)["response_token_ids"] for line in responses.read_text().splitlines()]
    flat = [token for row in rows for token in row]
    counts = torch.bincount(torch.tensor(flat), minlength=320)
    ids = trainer.drafter.target_ids()
    counts[0] = counts.max() + 1  # the end of text is always kept
    assert counts[ids].sum() == counts.topk(40).values.sum()
    assert len(ids.unique()) == 40 and torch.equal(ids, ids.sort().values)
    assert torch.equal(trainer.drafter.lm_head.weight, trainer.target.lm_head_weight()[ids])


@pytest.mark.slow
def test_a_requested_stop_saves_the_step_at_hand(
    target_folder: Path, responses: Path, tmp_path: Path
) -> None:
    config = make_config(
        target_folder, responses, tmp_path, run={"log_every": 1}, optimizer={"steps": 12}
    )
    trainer = Trainer(config, lambda r: setattr(trainer, "stop_requested", r.step == 7))
    with pytest.raises(TrainingStopped, match="step 7 of 12"):
        trainer.run()
    record = json.loads((tmp_path / "head" / "train.json").read_text())
    assert (record["steps"], record["planned_steps"], record["stop_reason"]) == (7, 12, None)
    assert record["best"] is None and record["tokens"] > 0
    assert not (tmp_path / "train.json").exists(), "the run is not finished"
    resumed = Trainer(config)
    resumed.run(resume=True)
    assert next(e["step"] for e in resumed.history.entries if e["kind"] == "train") == 8


@pytest.mark.slow
def test_a_partitioned_run_is_the_run_in_one_pass(
    target_folder: Path, responses: Path, tmp_path: Path
) -> None:
    """Segments, recomputed layers and small chunks of the loss are only ways to save memory."""
    changes: dict[str, dict[str, Any]] = {
        "whole": {},
        "split": {"segments": 3, "recompute_layers": True, "loss_chunk_rows": 50},
    }
    histories, heads = [], []
    for name, run in changes.items():
        config = make_config(
            target_folder, responses, tmp_path / name, run=run, optimizer={"steps": 10}
        )
        trainer = Trainer(config)
        initial = trainer.drafter.fc.weight.detach().clone()
        trainer.run()
        histories.append(trainer.history.entries)
        heads.append({n: p.detach() for n, p in trainer.drafter.named_parameters()})
    for one, other in zip(*histories, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)
        for name in ("accuracy", "acceptance_lengths"):
            assert one[name] == pytest.approx(other[name], abs=0.01), one["kind"]
    assert {entry["kind"] for entry in histories[0]} == {"train", "validation"}
    moved = (heads[0]["fc.weight"] - initial).norm()
    assert (heads[0]["fc.weight"] - heads[1]["fc.weight"]).norm() < 1e-3 * moved


def test_memory_options_of_p_eagle_are_refused_for_eagle3(tmp_path: Path) -> None:
    sections = {"method": {"name": "eagle3"}}
    with pytest.raises(ValueError, match=r"run.segments is 4 .* leave it out"):
        make_config(tmp_path, tmp_path, tmp_path, run={"segments": 4}, **sections)
    with pytest.raises(ValueError, match=r"run.recompute_layers is True"):
        make_config(tmp_path, tmp_path, tmp_path, run={"recompute_layers": True}, **sections)


def test_depth_weights_have_one_for_each_depth(tmp_path: Path) -> None:
    folders = (tmp_path, tmp_path, tmp_path)
    with pytest.raises(ValueError, match="3 weights; expected one for each of the 4 depths"):
        make_config(*folders, method={"depth_weights": (1, 0.5, 0.2)})
    with pytest.raises(ValueError, match="all 0"):
        make_config(*folders, method={"depth_weights": (0, 0, 0, 0)})
    given = make_config(*folders, method={"depth_weights": (1, 0.5, 0.2, 0.1)})
    assert given.method.weights() == [1, 0.5, 0.2, 0.1]
    assert make_config(*folders, method={"depth_decay": 0.5}).method.weights()[2] == 0.25


def test_checkpoints_from_before_an_option_can_be_resumed(tmp_path: Path) -> None:
    folders = (tmp_path, tmp_path, tmp_path)
    old = {
        "name": "peagle",
        "depth": 4,
        "cod_ratio": 0.8,
        "cod_floor": 0.2,
        "loss": "kl",
        "depth_decay": 1.0,
    }
    assert make_config(*folders).method.facts() == old
    weighed = make_config(*folders, method={"tv_share": 0.1}).method.facts()
    assert weighed == {**old, "tv_share": 0.1}
    plain, frozen = (
        make_config(*folders, head={"freeze_lm_head": is_frozen}).head.facts()
        for is_frozen in (False, True)
    )
    assert "freeze_lm_head" not in plain and frozen == {**plain, "freeze_lm_head": True}
