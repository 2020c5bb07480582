"""A plan against what a run then does: its data, its arithmetic, its files."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from peagle.data.features import Index, StoreFacts, plan_shards
from peagle.errors import UserError
from peagle.models.target import TargetModel
from peagle.training import training_plan as plans
from peagle.training.config import TrainConfig
from peagle.training.trainer import Trainer
from peagle.training.training_plan import GPU_TFLOPS, TrainingPlan, make_plan
from tests.conftest import make_target_folder
from tests.training.runs import write_data

GIB = 2**30


# ---- a run ----


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """A run of the tiny Llama."""
    root = tmp_path_factory.mktemp("plan")
    make_target_folder(root / "target")
    generator = torch.Generator().manual_seed(1)
    lens = torch.randint(20, 60, (50,), generator=generator).tolist()
    rows = [torch.randint(2, 300, (n,), generator=generator).tolist() for n in lens]
    return TrainConfig.model_validate(
        {
            "target": root / "target",
            "output": root / "out",
            "head": {"num_layers": 2, "draft_vocab_size": 200, "freeze_embeddings": True},
            "data": {
                "train": write_data(root / "data.jsonl", rows),
                "batch_tokens": 300,
                "length_multiple": 8,
            },
            "method": {"depth": 4},
            "optimizer": {"steps": 4, "name": "muon"},
            "run": {"device": "cpu", "memory_gib": 1},
        }
    )


def without_weights(config: TrainConfig, folder: Path) -> TrainConfig:
    folder.mkdir()
    for file in config.target.iterdir():
        if file.suffix == ".json":
            (folder / file.name).write_bytes(file.read_bytes())
    return config.model_copy(update={"target": folder})


def test_the_run_is_the_planned_one(config: TrainConfig, tmp_path: Path) -> None:
    bare = without_weights(config, tmp_path / "bare")
    plan = make_plan(bare)
    output = tmp_path / "out"
    trainer = Trainer(config.model_copy(update={"output": output}))
    record = trainer.run()
    found = plan.to_json()
    assert found["problem"] == ""
    assert plan.shape.head == trainer.drafter.config
    assert found["head"]["parameters"]["total"] == record["parameters"]
    assert found["data"]["sequences"] == record["sequences"]
    assert found["data"]["tokens_per_step"] == record["tokens_per_step"]
    assert found["epochs"] == record["epochs"]
    assert found["memory"]["segments"] == record["segments"] == 1
    assert found["memory"]["recompute_layers"] is record["recompute_layers"] is False
    assert found["memory"]["peak"] == record["planned_memory_bytes"]
    assert isinstance(trainer.target, TargetModel)
    model = trainer.target.model
    assert found["target"]["parameters"] == sum(p.numel() for p in model.parameters())
    for name in ("checkpoint", "head"):
        files = [f for f in (output / name).rglob("*") if f.suffix == ".safetensors"]
        size = sum(os.path.getsize(file) for file in files)
        assert 0 <= size - found["disk"][name] < 0.25 * size, name  # headers, counters


def test_a_store_has_the_planned_size(config: TrainConfig) -> None:
    plan = make_plan(config)
    trainer = Trainer(config)
    aux = trainer.drafter.config.aux_layer_ids
    facts = StoreFacts.of(trainer.dataset, trainer.target, aux, "bf16", "float32")
    shards = plan_shards(trainer.dataset, facts)
    size = sum(shard.layout.size - len(shard.layout.header) for shard in shards)
    assert plan.disk["store"] == size - 8 * len(trainer.dataset)  # numbers of the sequences


def plan_of(config: TrainConfig, **changes: Any) -> TrainingPlan:
    """A plan with other sections of the configuration, or other options of the plan."""
    data, options = config.model_dump(), {}
    data["head"]["init"] = None
    for name, change in changes.items():
        if name in data:
            data[name] = {**data[name], **change}
        else:
            options[name] = change
    return make_plan(TrainConfig.model_validate(data), **options)


def test_memory_decides_segments(config: TrainConfig) -> None:
    ample = plan_of(config)
    assert [memory.segments for memory in ample.by_segments] == [1, 2, 4, 8]
    assert ample.by_segments[0] == ample.memory
    budget = (ample.by_segments[2].total + 1) / GIB
    tight = plan_of(config, run={"memory_gib": budget})
    assert not tight.problem and tight.memory.segments <= 4
    assert tight.memory.total <= budget * GIB < ample.memory.total
    none = plan_of(config, run={"memory_gib": 1e-5})
    assert "A step may take" in none.problem and "run.memory_gib is 1e-05" in none.problem
    # What is written is checked as well.
    fixed = {"segments": 1, "recompute_layers": False, "memory_gib": 1e-5}
    assert plan_of(config, run=fixed).problem


@pytest.mark.slow
def test_a_run_takes_the_segments_that_fit(config: TrainConfig, tmp_path: Path) -> None:
    ample = make_plan(config)
    budget = (ample.by_segments[2].total + 1) / GIB
    losses = {}
    for name, gib in (("ample", 1.0), ("tight", budget)):
        run = config.run.model_copy(update={"memory_gib": gib})
        chosen = config.model_copy(update={"run": run, "output": tmp_path / name})
        trainer = Trainer(chosen)
        assert trainer.memory == make_plan(chosen).memory
        record = trainer.run()
        losses[name] = record["final"]["loss"]
        assert (record["segments"] > 1) == (name == "tight")
    assert losses["tight"] == pytest.approx(losses["ample"], rel=1e-4)
    run = config.run.model_copy(update={"memory_gib": 1e-6})
    with pytest.raises(UserError, match="A step may take 1"):
        Trainer(config.model_copy(update={"run": run}))


def test_stored_features_spare_the_target(config: TrainConfig, tmp_path: Path) -> None:
    whole = make_plan(config)
    stored = plan_of(config, data={"features": tmp_path / "store"})
    assert stored.memory.total < whole.memory.total
    assert sum(stored.flops.values()) < sum(whole.flops.values())
    assert stored.to_json()["disk"]["store"] > 0 and " in bf16" in str(stored)
    text = str(stored)
    assert ", from stored features" in text and "would take" not in text
    # One that is there says of what type it is.
    trainer = Trainer(config)
    aux = trainer.drafter.config.aux_layer_ids
    facts = StoreFacts.of(trainer.dataset, trainer.target, aux, "fp32", "float32")
    (tmp_path / "store").mkdir()
    index = Index(facts, 1, ())
    (tmp_path / "store" / "index.json").write_text(json.dumps(index.to_json()))
    wide = plan_of(config, data={"features": tmp_path / "store"})
    assert wide.disk["store"] == 2 * stored.disk["store"]


@pytest.fixture
def _any_step_tells_the_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "MIN_STEP_SECONDS", 0.0)


@pytest.mark.usefixtures("_any_step_tells_the_pace")
def test_hours_from_arithmetic_or_from_a_measurement(config: TrainConfig) -> None:
    assert plan_of(config).hours is None
    run = {"device": "auto", "memory_gib": None}
    on_gpu = plan_of(config, gpu_memory_gib=80, run=run)
    assert on_gpu.shape.device.type == "cuda" and on_gpu.shape.dtype == torch.bfloat16
    assert on_gpu.hours is not None and f"{GPU_TFLOPS:g} TFLOP/s" in on_gpu.basis
    seconds = 4 * sum(on_gpu.flops.values()) / (GPU_TFLOPS * 1e12)
    assert on_gpu.hours * 3600 == pytest.approx(seconds)
    measured = plan_of(config, tokens_per_s=50.0)
    assert measured.hours is not None
    assert measured.hours * 3600 * 50 == pytest.approx(4 * measured.stream.tokens_per_step)


@pytest.mark.usefixtures("_any_step_tells_the_pace")
def test_several_gpus_share_rows_and_states(config: TrainConfig) -> None:
    run = {"device": "auto", "memory_gib": None}
    data = {"batch_tokens": 384}
    one = plan_of(config, gpu_memory_gib=80, run=run, data=data)
    half = plan_of(config, gpu_memory_gib=80, num_gpus=2, run=run, data=data)
    assert one.stream.num_rows == half.stream.num_rows == 2 * half.shape.batch.rows
    assert half.memory.parts["optimizer"] == one.memory.parts["optimizer"] // 2
    assert half.hours is not None and one.hours is not None
    assert half.hours == pytest.approx(one.hours / 2, rel=0.01)
    with pytest.raises(UserError, match="cannot share these evenly"):
        plan_of(config, gpu_memory_gib=80, num_gpus=4, run=run, data=data)


def test_the_text_says_it_all(config: TrainConfig) -> None:
    plan = make_plan(config, tokens_per_s=20.0)
    text = str(plan)
    for expected in (
        "peagle head for",
        "2 layers of width 32, 200 of 320 tokens",
        "0.0M of them frozen in float32",
        "50 sequences",
        f"4, {plan.stream.steps_per_epoch} an epoch: 0.",
        " at the peak, estimated",
        "may take                        1.0 GiB (run.memory_gib is 1)",
        "chosen                          1 segment, layers kept",
        f"by segments                     S=1 {plan.memory.total / 2**20:.1f} MiB, S=2 ",
        "would take ",
        "GFLOP (layers",
        "20 tokens/s, as given",
        "minutes, without validation and saving",
    ):
        assert expected in text, (expected, text)
    assert json.loads(json.dumps(plan.to_json()))["memory"]["parts"] == plan.memory.parts


def test_eagle3_is_planned_without_segments(config: TrainConfig) -> None:
    plan = plan_of(config, method={"name": "eagle3"})
    assert len(plan.by_segments) == 1 and not plan.problem
    text = str(plan)
    assert "eagle3 head for" in text and "deeper elements" in text and "segment" not in text


def test_the_shape_of_a_head_to_start_from(config: TrainConfig, head_folders: Any) -> None:
    init = head_folders(parallel=False, num_layers=1)
    data = config.model_dump()
    data["head"] = {"init": init, "num_layers": 3}
    plan = make_plan(TrainConfig.model_validate(data))
    assert (plan.shape.head.num_layers, plan.shape.head.intermediate_size) == (3, 40)
    data["head"]["init"] = init / "nothing"
    with pytest.raises(UserError, match=r"head\.init"):
        make_plan(TrainConfig.model_validate(data))


def test_too_little_disk(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    assert "where 1000 B are free" in make_plan(config).problem
    run = {"device": "auto"}
    elsewhere = plan_of(config, gpu_memory_gib=80, run=run)
    assert not elsewhere.problem and "1000 B, too little" in str(elsewhere)
