"""`peagle train`: runs and plans."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from peagle.disk import LOCK_NAME, locked
from peagle.errors import UserError
from peagle.training import training_plan as plans
from peagle.training.config import TrainConfig
from peagle.training.trainer import Trainer
from serving.warm import WarmProcess
from tests.cli.conftest import Peagle, Result, environment
from tests.conftest import VOCAB_SIZE, make_target_folder


def write_config(
    root: Path, target: Path, *, rows: int, length: int, steps: int, data: str = "", run: str = ""
) -> Path:
    """Write a training configuration and random sequences for it."""
    generator = torch.Generator().manual_seed(0)
    with (root / "data.jsonl").open("w") as lines:
        for _ in range(rows):
            ids = torch.randint(2, VOCAB_SIZE, (length,), generator=generator).tolist()
            row = {"prompt_token_ids": ids[:4], "response_token_ids": ids[4:]}
            lines.write(json.dumps(row) + "\n")
    path = root / "head.toml"
    path.write_text(
        f"""
target = "{target}"
output = "run"
[head]
num_layers = 1
[data]
train = "data.jsonl"
batch_tokens = 256
length_multiple = 8
{data}
[method]
depth = 3
[optimizer]
steps = {steps}
[run]
{run}
"""
    )
    return path


@pytest.fixture
def config(target_folder: Path, tmp_path: Path) -> Path:
    data, run = 'validation = "data.jsonl"', 'device = "cpu"\nlog_every = 2'
    return write_config(tmp_path, target_folder, rows=40, length=20, steps=6, data=data, run=run)


@pytest.fixture(autouse=True)
def _keep_handlers() -> Iterator[None]:
    """The command takes the signals of its process, which is the tests' own here."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_json_progress_and_the_head(peagle: Peagle, config: Path) -> None:
    done = peagle("train", config, "--format", "json")
    assert done.status == 0, done.err
    reports = [json.loads(line) for line in done.out.splitlines()]
    assert [r["kind"] for r in reports] == ["train"] * 3 + ["validation", "result"]
    assert len(reports[0]["accuracy"]) == len(reports[3]["acceptance_lengths"]) == 3
    assert (Path(reports[-1]["head"]) / "model.safetensors").is_file()
    assert (config.parent / "run" / "train.json").is_file()
    assert done.err == ""
    # As any file: 0666 less the umask.
    (other := config.parent / "other").touch()
    for file in (config.parent / "run").rglob("*.*"):
        if file.is_file():
            assert file.stat().st_mode == other.stat().st_mode, file


def test_text_progress_names_everything(
    peagle: Peagle, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(config.parent)
    pruned = ["--set", "head.draft_vocab_size=100"]
    done = peagle("train", config, "--output", "run/../other", *pruned)
    assert done.status == 0, done.err
    assert "draft vocabulary: 100 of 320 tokens cover" in done.err
    phases = ("loading the target", "making the head", "step 1 of 6", "validating", "saving")
    places = [done.err.index(f"peagle: {phase}") for phase in phases]
    assert places == sorted(places)
    for expected in ("loss", "AL", "(K=3)", "accuracy by depth", "tokens/s", "left", "validation"):
        assert expected in done.out
    for expected in (
        "conditional, greedy",
        "conditional, T=1",
        "head of step 6 (acceptance",
        " to other/head ",
    ):
        assert expected in done.out
    assert (config.parent / "other" / "head" / "config.json").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.toml"], "is not there"),
        (["CONFIG", "--set", "optimizer.steps=-1"], "optimizer.steps is -1"),
        (["CONFIG", "--set", "data.train=none.jsonl"], "none.jsonl"),
        (["CONFIG", "--set", "target=none"], "is not there"),
        (["CONFIG", "--set", "data.validation=none.jsonl"], "--validation-share alone"),
        (["CONFIG", "--output", "CONFIG"], "cannot be written: Not a directory"),
        (["CONFIG", "--output", "/proc/none"], "cannot be written: "),
        (["CONFIG", "--resume"], "no checkpoint to resume from"),
        (
            ["CONFIG", "--correction-on", "none"],
            "none' is not there; expected a folder with config.json",
        ),
        (["CONFIG", "--set", "correction.rank=0"], "correction.rank is 0"),
        (["CONFIG", "--set", "correction.rank=1000000000"], "less than or equal to 8192"),
        (
            ["CONFIG", "--correction-on", ".", "--set", "method.name=eagle3"],
            "method.name 'eagle3' and method.depth 3; expected 'peagle' and at least 2",
        ),
        (["CONFIG", "--correction-on", ".", "--plan"], "--plan is of training a head"),
        (["CONFIG", "--set", "run.device=tpu9"], "tpu9"),
        ([], "Missing argument"),
    ],
)
def test_mistakes_exit_with_2(
    peagle: Peagle, config: Path, arguments: list[str], message: str
) -> None:
    done = peagle("train", *(config if a == "CONFIG" else a for a in arguments))
    assert (done.status, done.out) == (2, "")
    told = done.err.splitlines()[-1 if arguments else 0]
    assert told.startswith("peagle: error: ") and message in told


def test_a_correction_goes_beside_its_head(peagle: Peagle, config: Path) -> None:
    root = config.parent
    assert peagle("train", config).status == 0
    options = ("--correction-on", root / "run" / "head", "--set", "correction.steps=4")
    done = peagle("train", config, *options, "--format", "json")
    assert (done.status, done.err) == (0, "")
    reports = [json.loads(line) for line in done.out.splitlines()]
    kinds = ["validation", "train", "train", "validation", "result"]
    assert [report["kind"] for report in reports] == kinds
    assert reports[0]["step"] == 0, "the head by itself comes first"
    assert Path(reports[-1]["head"]) == root / "run" / "head"
    files = sorted(path.name for path in (root / "run" / "correction").iterdir())
    assert files == ["checkpoint", "metrics.jsonl", "train.json"]
    kept = (root / "run" / "head" / "correction.st").exists()
    assert kept == (reports[-1]["best"]["step"] > 0)
    done = peagle("train", config, *options, "--output", root / "other")
    assert done.status == 0, done.err
    assert "correction: " in done.err and "4 steps on cpu" in done.err
    assert (root / "other" / "correction" / "train.json").is_file()
    assert "correction of step" in done.out or "no correction written" in done.out


@pytest.mark.parametrize("wrong", ["data.validation=none.jsonl", "target=none"])
def test_a_wrong_path_is_refused_before_torch_is_imported(config: Path, wrong: str) -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "from peagle.cli.main import run; sys.exit(run(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "train", str(config), "--set", wrong]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 2 and "is not there" in result.stderr, result.stderr


def test_interrupt_saves_and_resumes(config: Path, tmp_path: Path) -> None:
    command = ["peagle", "train", str(config), "--format", "json"]
    command += ["--set", "optimizer.steps=100000", "--set", "run.log_every=1"]
    log = tmp_path / "log"
    process = WarmProcess(command, environment(), log)
    until = time.monotonic() + 240
    while "\n{" not in "\n" + log.read_text() and time.monotonic() < until:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    told, _ = process.communicate(timeout=240)
    assert process.returncode == 130, told
    assert "continue with --resume" in told and "Traceback" not in told
    record = json.loads((config.parent / "run" / "checkpoint" / "state.json").read_text())
    assert record["step"] >= 1


def test_a_second_run_into_one_folder_is_refused_at_once(peagle: Peagle, config: Path) -> None:
    folder = config.parent / "run"
    with locked(folder):
        for options in ([], ["--resume"]):
            done = peagle("train", config, *options)
            assert (done.status, done.out) == (2, "")
            assert f"error: Another process is writing '{folder}'; wait for it, or" in done.err
            assert "loading" not in done.err
        assert peagle("train", config, "--plan").status == 0
    assert list(folder.iterdir()) == []


def test_a_run_from_python_keeps_its_folder_to_itself(config: Path) -> None:
    folder = config.parent / "run"
    plan = TrainConfig.read(config)
    with locked(folder), pytest.raises(UserError, match=f"Another process is writing '{folder}'"):
        Trainer(plan).run()
    assert list(folder.iterdir()) == []
    kept = []

    def stepped(_: int) -> None:
        with pytest.raises(UserError, match="Another process is writing"), locked(folder):
            pass
        kept.append(True)

    Trainer(plan, stepped=stepped).run()
    assert len(kept) == 6 and not (folder / LOCK_NAME).exists()
    with pytest.raises(UserError, match="holds an earlier run"):
        Trainer(plan).run()
    assert not (folder / LOCK_NAME).exists()


def test_show_config_prints_what_is_decided(peagle: Peagle, config: Path) -> None:
    """Also what a resumed run takes from its checkpoint; nothing is made."""
    call = ("train", config, "--show-config")
    done = peagle(*call)
    assert (done.status, done.err) == (0, "")
    shown = json.loads(done.out)
    assert shown["optimizer"]["name"] == "muon" and shown["optimizer"]["learning_rate"] == 5e-3
    assert shown["optimizer"]["steps"] == 6 and shown["run"]["minutes"] is None
    assert shown["target"] and shown["data"]["train"] == str(config.parent / "data.jsonl")
    assert not (config.parent / "run").exists()
    timed = config.with_name("timed.toml")
    timed.write_text(config.read_text().replace("steps = 6", "") + "minutes = 20\n")
    shown = json.loads(peagle("train", timed, "--show-config").out)
    assert (shown["optimizer"]["steps"], shown["run"]["minutes"]) == (None, 20)
    assert peagle("train", config, "--set", "optimizer.learning_rate=1e-3").status == 0
    shown = json.loads(peagle(*call, "--resume").out)
    assert (shown["optimizer"]["name"], shown["optimizer"]["learning_rate"]) == ("adamw", 1e-3)


def test_options_of_rounding(peagle: Peagle, config: Path) -> None:
    def call(*words: str) -> Result:
        return peagle("train", config, *(part for word in words for part in ("--set", word)))

    rounded = ("head.quantization=int8", 'head.int8_layers=["fc"]', "head.group_size=16")
    done = peagle("train", config, "--show-config", *(p for w in rounded for p in ("--set", w)))
    head = json.loads(done.out)["head"]
    assert (head["quantization"], head["int8_layers"], head["group_size"]) == ("int8", ["fc"], 16)
    for words, message in (
        (["head.quantisation=int4"], "quantisation is not a known key. Did you mean 'head.quanti"),
        (["head.quantization=int2"], "head.quantization is 'int2': Input should be 'int8' or 'i"),
        (["head.group_size=16"], "group_size is 16 and there is no quantization"),
        ([*rounded[:2], "head.group_size=40"], "head.group_size is 40: Input should be a multiple"),
        ([*rounded[:2], "head.group_size=80"], "size is 80 and 'fc' has 96 inputs; expected a siz"),
    ):
        done = call(*words)
        assert done.status == 2 and message in done.err, words
    done = call(*rounded)
    assert done.status == 0, done.err
    assert "fc and linear layers are rounded to int8, groups of 16\n" in done.out + done.err


def test_a_learning_rate_without_an_optimizer_is_told(peagle: Peagle, config: Path) -> None:
    call = ("train", config, "--set", "optimizer.learning_rate=1e-3", "--format", "json")
    done = peagle(*call)
    assert done.status == 0
    assert done.err.splitlines() == [
        "peagle: note: optimizer.learning_rate = 0.001 without optimizer.name is a rate of AdamW, "
        "which is used; the default is Muon at 0.005, which learns far faster: leave the rate out "
        "for it, or name the optimizer."
    ]
    more = ("--set", "optimizer.steps=8", "--format", "json")
    done = peagle("train", config, "--resume", *more)
    assert done.status == 0, done.err
    assert "goes on with the AdamW at 0.001 that it began with" in done.err
    done = peagle("train", config, "--resume", "--set", "optimizer.name=adamw", *more)
    assert (done.status, done.err) == (0, "")


def test_steps_by_time_are_shown(peagle: Peagle, config: Path) -> None:
    """So few minutes are one step, or a few on a fast machine."""
    timed = config.with_name("timed.toml")
    timed.write_text(config.read_text().replace("steps = 6", "") + "minutes = 0.0001\n")
    done = peagle("train", timed)
    assert done.status == 0, done.err
    assert "0.0001 minutes on cpu" in done.err and "measuring a step" in done.err
    record = json.loads((config.parent / "run" / "train.json").read_text())
    assert record["steps"] == record["planned_steps"] >= 1
    assert f"step 1 of {record['steps']}" in done.err


def test_a_run_keeps_its_folder_to_itself(
    peagle: Peagle, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, kept = config.parent / "run", []

    def report(*_: object) -> None:
        with pytest.raises(UserError, match="Another process is writing"), locked(folder):
            pass
        kept.append(True)

    monkeypatch.setattr("peagle.cli.train.TrainView.report", report)
    folder.mkdir()
    (folder / LOCK_NAME).touch()  # a run that was killed left it
    assert peagle("train", config).status == 0
    assert len(kept) == 4
    assert sorted(path.name for path in folder.iterdir()) == [
        *("checkpoint", "head", "metrics.jsonl", "train.json")
    ]


@pytest.fixture(scope="module")
def plan_config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training configuration whose target has no weights."""
    root = tmp_path_factory.mktemp("plan")
    target = make_target_folder(root / "target")
    (target / "model.safetensors").unlink()
    return write_config(root, Path("target"), rows=30, length=40, steps=20)


CPU = ("--set", "run.device=cpu")


def test_a_plan_for_people(peagle: Peagle, plan_config: Path) -> None:
    result = peagle("train", plan_config, "--plan", *CPU, "--tokens-per-s", 100)
    assert (result.status, result.err) == (0, "")
    data, memory = "30 sequences, 1,200 tokens", "at the peak, estimated"
    for line in (data, memory, "1 segment, layers kept", "S=8 "):
        assert line in result.out
    assert "100 tokens/s, as given" in result.out
    assert not (plan_config.parent / "run").exists()


def test_a_plan_for_programs(peagle: Peagle, plan_config: Path) -> None:
    result = peagle("train", plan_config, "--plan", *CPU, "--format", "json")
    assert (result.status, result.err) == (0, "")
    plan = json.loads(result.out)
    assert plan["problem"] == "" and plan["pace"] is None
    assert plan["memory"]["peak"] == sum(plan["memory"]["parts"].values())
    assert [way["segments"] for way in plan["memory"]["by_segments"]] == [1, 2, 4, 8]
    assert plan["steps"] == 20 and plan["epochs"] == 20 / plan["data"]["steps_per_epoch"]


def test_for_a_gpu_that_is_not_here(
    peagle: Peagle, plan_config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "MIN_STEP_SECONDS", 0.0)
    call = ("train", plan_config, "--plan", "--format", "json", "--gpu-memory-gib", 80)
    plan = json.loads(peagle(*call).out)
    assert plan["device"] == "cuda" and plan["head"]["dtype"] == "bfloat16"
    assert plan["memory"]["budget"] == 72 * 2**30
    assert plan["pace"]["hours"] > 0 and "H100" in plan["pace"]["basis"]
    plan = json.loads(peagle(*call, "--gpus", 2).out)
    assert plan["processes"] == 2


def test_no_hours_where_arithmetic_does_not_decide(peagle: Peagle, plan_config: Path) -> None:
    """20,000 steps of a tiny head would be "0.1 minutes" by their arithmetic."""
    many = ("train", plan_config, "--plan", "--set", "optimizer.steps=20000")
    for where in (("--gpu-memory-gib", 80), CPU):
        assert json.loads(peagle(*many, *where, "--format", "json").out)["pace"] is None
        told = peagle(*many, *where).out
        assert "give --tokens-per-s" in told and "minutes" not in told
    assert "all steps  " in peagle(*many, *CPU, "--tokens-per-s", 100).out


def test_what_does_not_fit_exits_with_2(peagle: Peagle, plan_config: Path) -> None:
    result = peagle("train", plan_config, "--plan", *CPU, "--set", "run.memory_gib=0.0001")
    assert result.status == 2
    assert "takes least" in result.out and "may take" in result.out
    assert "error: A step may take 104.9 KiB (run.memory_gib is 0.0001)" in result.err
    again = peagle(
        "train", plan_config, "--plan", *CPU, "--set", "run.memory_gib=0.0001", "--format", "json"
    )
    assert again.status == 2 and json.loads(again.out)["problem"] in again.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--plan", "--set", "data.train=none.jsonl"), "none.jsonl"),
        (("--plan", "--set", "target=none"), "is not there"),
        (("--plan", *CPU, "--gpu-memory-gib", "80"), "run.device is 'cpu'"),
        (("--plan", "--gpu-memory-gib", "0"), "expected a number above 0"),
        (("--plan", "--tokens-per-s", "nan"), "expected a number above 0"),
        (("--gpu-memory-gib", "80"), "it goes with --plan"),
        (("--gpus", "2"), "it goes with --plan"),
        (("--tokens-per-s", "5"), "it goes with --plan"),
        (("--plan", "--set", "run.segments=0"), "run.segments is 0"),
        (("--plan", "--set", "run.recompute_layers=often"), "run.recompute_layers is 'often'"),
        (("--plan", "--set", "head.init=nothing"), "head.init"),
    ],
)
def test_mistakes(
    peagle: Peagle, plan_config: Path, arguments: tuple[str, ...], message: str
) -> None:
    result = peagle("train", plan_config, *arguments)
    assert result.status == 2 and result.out == ""
    assert message in result.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_missing_gpu_needs_its_size(peagle: Peagle, plan_config: Path) -> None:
    result = peagle("train", plan_config, "--plan", "--set", "run.device=cuda")
    assert result.status == 2 and "--gpu-memory-gib 80" in result.err
