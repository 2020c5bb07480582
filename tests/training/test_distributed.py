"""Training on several processes (gloo, on a CPU) against training on one."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from peagle.data.batches import BatchStream
from peagle.data.dataset import ResponseDataset
from peagle.disk import locked
from peagle.errors import UserError
from peagle.training.config import TrainConfig
from peagle.training.distributed import ONE_PROCESS
from peagle.training.step_memory import estimate_memory
from peagle.training.trainer import Trainer
from serving.warm import WarmProcess
from tests.training import runs, together
from tests.training.processes import Ending, run_together, values
from tests.training.runs import read_checkpoint
from tests.training.step_runs import Case

STEPS = 6
REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def responses(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ragged sequences of random tokens, as JSONL."""
    generator = torch.Generator().manual_seed(5)
    path = tmp_path_factory.mktemp("data") / "responses.jsonl"
    with path.open("w") as lines:
        for number in range(40):
            tokens = torch.randint(2, 300, (8 + number % 24,), generator=generator).tolist()
            row = {"prompt_token_ids": tokens[:4], "response_token_ids": tokens[4:]}
            lines.write(json.dumps(row) + "\n")
    return path


def make_config(target: Path, responses: Path, output: Path, **changes: Any) -> TrainConfig:
    every = {"log_every": 1, "validate_every": 4, "save_every": 2}
    changes["optimizer"] = {"steps": STEPS, **changes.get("optimizer", {})}
    changes["data"] = {"batch_tokens": 128, **changes.get("data", {})}
    changes["run"] = {**every, **changes.get("run", {})}
    return runs.make_config(target, responses, output, **changes)


def assert_same_run(one: dict[str, Any], other: dict[str, Any], start: int = 0) -> None:
    """The same figures from a step on, to float32's exactness, and the same head."""
    figures = ("loss", "gradient_norm", "accuracy", "acceptance_lengths", "num_drafts")
    entries = [[e for e in run["entries"] if e["step"] > start] for run in (one, other)]
    assert len(entries[0]) == len(entries[1]) > 0
    for first, second in zip(*entries, strict=True):
        where = first["kind"], first["step"]
        assert where == (second["kind"], second["step"])
        for name in figures:
            if first[name] is not None:
                assert second[name] == pytest.approx(first[name], rel=2e-4), (*where, name)
    assert one["tokens"] == other["tokens"]
    for name, weight in one["weights"].items():
        assert (weight - other["weights"][name]).norm() < 1e-3 * weight.norm(), name


# ---- exactness ----


def test_gradients_of_two_processes_equal_those_of_one_pass() -> None:
    heads: list[dict[str, Any]] = [
        {},
        {"num_layers": 1, "norm_before_fc": True, "frozen": True},
        {"norm_output": True, "fc_norm": True, "attention_bias": True},
    ]
    for errors in values(run_together(together.gradient_errors, 2, heads, [1, 2, 5, 40])):
        assert len(errors) == 24 and max(errors) < 1e-9


def test_gradients_travel_once_a_step_however_many_segments() -> None:
    for counts in values(run_together(together.collectives_of_a_step, 2, [1, 6])):
        blocks = 2 + 3  # layers; embeddings, lm_head, and what is left
        for within, after in counts:
            assert within == {"allreduce_": 2}, "denominator and loss, and no gradient"
            assert after == {
                "_reduce_scatter_base_": blocks,
                "allreduce_": 1,  # the norm
                "_allgather_base_": blocks,
            }


def test_a_bfloat16_head_is_rounded_from_float32_shares() -> None:
    assert values(run_together(together.bfloat16_publishes_what_the_optimizer_moved, 2)) == [[], []]


def test_each_process_rounds_whole_float32_weights() -> None:
    """As one process does: not shares of groups, and not weights that bfloat16 rounded before."""
    assert values(run_together(together.rounds_whole_float32_weights, 2)) == [[], []]


def test_all_processes_take_the_segments_of_the_one_with_least_memory() -> None:
    shape = Case(rows=4, length=512, method={"depth": 8}).shape
    needed = [estimate_memory(shape, segments, False).total for segments in (1, 3)]
    for sizes in (needed, needed[::-1]):
        assert values(run_together(together.segments_chosen, 2, sizes)) == [3, 3]


@pytest.mark.slow
def test_two_processes_train_as_one(target_folder: Path, responses: Path, tmp_path: Path) -> None:
    kinds: list[dict[str, Any]] = [
        {"run": {"segments": 3}},
        {"optimizer": {"name": "muon", "weight_decay": 0.1}},
        {"method": {"name": "eagle3"}, "head": {"freeze_embeddings": True}},
        {"head": {"freeze_embeddings": True, "freeze_lm_head": True}},
        {"head": {"quantization": "int8", "group_size": 16}},
        {
            "correction": {"train": "together", "own_drafts": 0.25},
            "run": {"segments": 3},
        },
        {"run": {"validation_batches": 1}, "data": {"batch_tokens": 64}},
    ]

    def configs(name: str) -> list[TrainConfig]:
        folders = [tmp_path / f"{name}{number}" for number in range(len(kinds))]
        return [
            make_config(target_folder, responses, folder, **kind)
            for folder, kind in zip(folders, kinds, strict=True)
        ]

    first, second = values(run_together(together.train_all, 2, configs("two")))
    alone = together.train_all(ONE_PROCESS, configs("one"))
    for number, (one, mine, yours) in enumerate(zip(alone, first, second, strict=True)):
        assert_same_run(one, mine)
        assert all(torch.equal(mine["weights"][n], w) for n, w in yours["weights"].items())
        folder = tmp_path / f"two{number}"
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        assert len(lines) == len(mine["entries"]), "written by one of them"
        trained = json.loads((folder / "train.json").read_text())
        assert trained["steps"] == STEPS and (folder / "head/model.safetensors").is_file()


# ---- resuming ----


@pytest.mark.slow
def test_resumed_on_any_number_of_processes(
    target_folder: Path, responses: Path, tmp_path: Path
) -> None:
    def config(name: str) -> TrainConfig:
        # Muon has AdamW beside it.
        muon = {"optimizer": {"name": "muon"}}
        return make_config(target_folder, responses, tmp_path / name, **muon)

    assert Trainer(config("unused")).stream.steps_per_epoch > 3, "stops in the midst of an epoch"
    stopped = [config("two-two"), config("two-one")]
    endings = run_together(together.resume_all, 2, config("two"), stopped, 3)
    whole, _ = values(endings)[0]
    first, second = (read_checkpoint(tmp_path / name) for name in ("two", "two-two"))
    assert first.keys() == second.keys() and len({key.split("-")[1] for key in first}) == 2
    assert all(torch.equal(value, second[key]) for key, value in first.items())

    assert_same_run(whole, together.resume(ONE_PROCESS, config("two-one")), start=3)
    together.train(ONE_PROCESS, config("one-two"), stop_at=3)
    again = values(run_together(together.resume, 2, config("one-two")))[0]
    assert_same_run(whole, again, start=3)

    other = make_config(target_folder, responses, tmp_path / "one-two", run={"seed": 7})
    errors = sorted(ending.error for ending in run_together(together.resume, 2, other))
    assert errors[0] == "SystemExit: 2" and "optimizer" in errors[1], "told once"


def test_all_processes_plan_the_steps_of_the_slowest(
    target_folder: Path, responses: Path, tmp_path: Path
) -> None:
    own = {"optimizer": {"steps": None}, "run": {"minutes": 0.08}, "data": {"validation": None}}
    config = make_config(target_folder, responses, tmp_path, **own)
    assert values(run_together(together.plan_by_time, 2, config)) == [3, 3]


# ---- accidents ----


def assert_reported_loss(ending: Ending) -> None:
    assert ending.status == 0 and ending.error.startswith("UserError: Another process"), ending
    assert "--resume" in ending.error


@pytest.mark.slow
def test_a_killed_process_ends_the_run_at_once(
    target_folder: Path, responses: Path, tmp_path: Path
) -> None:
    config = make_config(target_folder, responses, tmp_path)
    survivor, killed = run_together(together.die_in_a_step, 2, config, 3, timeout=200, patience=150)
    assert killed.status == -signal.SIGKILL
    assert_reported_loss(survivor)
    assert survivor.seconds < 140, "it does not wait for the patience to end"
    rest = together.resume(ONE_PROCESS, config)["entries"]
    assert rest[0]["step"] == 3 and rest[-1]["step"] == STEPS


def test_a_process_that_hangs_is_given_up(
    target_folder: Path, responses: Path, tmp_path: Path
) -> None:
    config = make_config(target_folder, responses, tmp_path)
    waiting, _ = run_together(together.hang_in_a_step, 2, config, patience=2)
    assert_reported_loss(waiting)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "full"])
def test_a_save_that_fails_leaves_the_last_checkpoint(
    target_folder: Path, responses: Path, tmp_path: Path, how: str
) -> None:
    config = make_config(target_folder, responses, tmp_path)
    first, second = run_together(together.fail_in_a_save, 2, config, 2, how)
    if how == "killed":
        assert second.status == -signal.SIGKILL
        assert_reported_loss(first)
    else:
        errors = sorted((first.error, second.error))
        assert errors[0] == "SystemExit: 2", "told once"
        assert "No space left" in errors[1] and "--resume" in errors[1]
        assert not (tmp_path / "checkpoint.part").exists()
    rest = together.resume(ONE_PROCESS, config)["entries"]
    assert rest[0]["step"] == 3 and rest[-1]["step"] == STEPS


@pytest.mark.slow
def test_a_death_between_the_renames_of_a_save(
    target_folder: Path, responses: Path, tmp_path: Path
) -> None:
    config = make_config(target_folder, responses, tmp_path)
    together.train(ONE_PROCESS, config, stop_at=2)
    os.replace(tmp_path / "checkpoint", tmp_path / "checkpoint.old")
    assert together.resume(ONE_PROCESS, config)["entries"][0]["step"] == 3
    assert not (tmp_path / "checkpoint.old").exists()


def test_a_checkpoint_that_lacks_a_share_is_refused(
    target_folder: Path, responses: Path, tmp_path: Path
) -> None:
    config = make_config(target_folder, responses, tmp_path)
    values(run_together(together.train, 2, config))
    (share,) = (tmp_path / "checkpoint").glob("shard-00002*")
    whole = share.read_bytes()
    share.write_bytes(whole[: len(whole) // 2])
    errors = sorted(ending.error for ending in run_together(together.resume, 2, config))
    assert errors[0] == "SystemExit: 2", "told once"
    assert f"is damaged: {share.name} has SHA-256" in errors[1]
    share.unlink()
    with pytest.raises(UserError, match=f"is damaged: {share.name} is missing"):
        Trainer(config).run(resume=True)
    share.write_bytes(whole)
    Trainer(config).run(resume=True)


# ---- on GPUs ----

NCCL: dict[str, Any] = {
    "device": "cuda",
    "precision": "float32",
    "target_dtype": "float32",
    "attention": "dense",
}


@pytest.fixture
def two_gpus() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")


@pytest.mark.gpu
@pytest.mark.usefixtures("two_gpus")
def test_two_gpus_train_as_one_process(
    target_folder: Path, responses: Path, tmp_path: Path
) -> None:
    def configs(name: str, run: dict[str, Any]) -> list[TrainConfig]:
        kinds: list[dict[str, Any]] = [{}, {"optimizer": {"name": "muon"}}]
        return [
            make_config(target_folder, responses, tmp_path / f"{name}{number}", run=run, **kind)
            for number, kind in enumerate(kinds)
        ]

    pair = configs("two", NCCL)
    found = values(run_together(together.train_all, 2, pair, timeout=300, fresh=True))[0]
    for one, two in zip(together.train_all(ONE_PROCESS, configs("one", {})), found, strict=True):
        # TF32 there, none here; Muon iterates in bfloat16 on a GPU.
        for first, second in zip(one["entries"], two["entries"], strict=True):
            assert second["loss"] == pytest.approx(first["loss"], rel=0.02)


# ---- started by torchrun ----


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]

ENVIRONMENT = os.environ | {
    "PYTHONPATH": os.pathsep.join(
        filter(None, [str(REPOSITORY / "src"), os.environ.get("PYTHONPATH")])
    ),
    "OMP_NUM_THREADS": "1",
}


def write_config(folder: Path, target: Path, responses: Path) -> str:
    file = folder / "head.toml"
    file.write_text(
        f'target = "{target}"\noutput = "run"\n[data]\ntrain = "{responses}"\n'
        "batch_tokens = 128\nlength_multiple = 8\n[head]\nnum_layers = 1\n"
        '[optimizer]\nsteps = 3\n[run]\ndevice = "cpu"\nlog_every = 1\n'
    )
    return str(file)


@pytest.mark.slow
def test_torchrun_trains_a_head(target_folder: Path, responses: Path, tmp_path: Path) -> None:
    """The processes that torchrun starts import everything; torchrun itself is forked."""
    config = write_config(tmp_path, target_folder, responses)
    script = tmp_path / "torchrun.py"
    script.write_text("from torch.distributed.run import main\nmain()\n")
    words = ["torchrun", *TORCHRUN[3:], "-m", "peagle", "train", config]
    torchrun = WarmProcess(words, ENVIRONMENT, tmp_path / "log", script=script)
    try:
        told, _ = torchrun.communicate(timeout=400)
    finally:
        torchrun.kill()
        torchrun.wait()
    assert torchrun.returncode == 0, told
    assert told.count("train      3/3") == told.count("head written to") == 1
    assert told.count("3 steps on 2 times cpu") == 1
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == 3
    assert {p.name for p in (tmp_path / "run/head").iterdir()} >= {"model.safetensors"}


@pytest.mark.gpu
@pytest.mark.usefixtures("two_gpus")
def test_a_process_killed_beside_a_gpu(
    target_folder: Path, responses: Path, tmp_path: Path
) -> None:
    """NCCL's kernels wait for it, and their process with them: torchrun ends that one."""
    checkpoint = kill_the_second(target_folder, responses, tmp_path, "cuda")
    assert read_checkpoint(checkpoint), "the last checkpoint is whole"


def kill_the_second(target: Path, responses: Path, folder: Path, device: str) -> Path:
    """Kill the second process of a run by torchrun; the folder of the run that this ended."""
    config, run = write_config(folder, target, responses), folder / "run"
    changes = {"run.device": f'"{device}"', "run.attention": '"dense"', "run.save_every": 2}
    changes |= {"optimizer.steps": 100_000}
    words = [word for pair in changes.items() for word in ("--set", "{}={}".format(*pair))]
    words += ["--set", f'output="{run}"']
    with (folder / "told").open("w") as told:
        torchrun = subprocess.Popen(
            [*TORCHRUN, "-m", "peagle", "train", config, *words],
            stdout=subprocess.DEVNULL,
            stderr=told,
            env=ENVIRONMENT,
        )
    try:
        deadline = time.monotonic() + 240
        while not (run / "checkpoint").exists():
            assert torchrun.poll() is None and time.monotonic() < deadline, told_by(folder)
            time.sleep(0.1)
        workers = workers_of(torchrun.pid)
        os.kill(workers["1"], signal.SIGKILL)
        assert torchrun.wait(timeout=120) != 0
        assert "SIGKILL" in told_by(folder), "torchrun names the cause"
        assert len(workers) == 2
        assert not any(Path(f"/proc/{pid}").exists() for pid in workers.values())
    finally:
        if torchrun.poll() is None:
            for pid in [*workers_of(torchrun.pid).values(), torchrun.pid]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            torchrun.wait()
    return run


def told_by(folder: Path) -> str:
    return (folder / "told").read_text()


def workers_of(parent: int) -> dict[str, int]:
    """The children of a process, by their RANK."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == parent:
                variables = (stat.parent / "environ").read_text().split("\0")
                found |= {v[5:]: int(stat.parent.name) for v in variables if v[:5] == "RANK="}
    return found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("data.batch_tokens=96", "holds 3 rows of 32 tokens, and 2 processes cannot share these"),
        ("optimizer.speed=9", "optimizer.speed is not a known key"),
    ],
)
def test_a_mistake_is_told_once(
    target_folder: Path, responses: Path, tmp_path: Path, change: str, message: str
) -> None:
    arguments = ["train", write_config(tmp_path, target_folder, responses), "--set", change]
    found = values(run_together(together.command, 2, arguments, tmp_path, joins=False))
    assert [status for status, _ in found] == [2, 2]
    told = "".join(text for _, text in found)
    assert told.count("peagle: error:") == told.count(message) == 1 and "Traceback" not in told


def test_the_processes_of_a_run_share_its_folder(
    target_folder: Path, responses: Path, tmp_path: Path
) -> None:
    """The first of them keeps it: a run of two passes, and is refused beside another run."""
    arguments = ["train", write_config(tmp_path, target_folder, responses)]
    arguments += ["--output", str(tmp_path / "shared"), "--set", "optimizer.steps=1"]
    with locked(tmp_path / "shared"):
        found = values(run_together(together.command, 2, arguments, tmp_path, joins=False))
    assert [status for status, _ in found] == [2, 2]
    told = "".join(text for _, text in found)
    assert told.count("error: Another process is writing") == 1 and "loading" not in told
    endings = run_together(together.command, 2, arguments, tmp_path, joins=False)
    assert [ending.status for ending in endings] == [0, 0]
    assert sorted(path.name for path in (tmp_path / "shared").iterdir()) == [
        *("checkpoint", "head", "metrics.jsonl", "train.json")
    ]


@pytest.mark.parametrize(
    ("processes", "batch_tokens", "advice"),
    [
        (2, 24, "set data.batch_tokens to 32, which holds 4 rows"),
        (3, 32, "set data.batch_tokens to 24, which holds 3 rows"),
        (5, 32, "start at most 4 processes"),
    ],
)
def test_rows_that_processes_cannot_share(processes: int, batch_tokens: int, advice: str) -> None:
    dataset = ResponseDataset.of_prompts(
        torch.ones(32), torch.arange(0, 33, 8), torch.ones(4).long()
    )
    with pytest.raises(UserError, match=advice):
        BatchStream(dataset, batch_tokens, 8, seed=0, world_size=processes)
    assert BatchStream(dataset, 32, 8, seed=0, world_size=4).num_rows == 4
