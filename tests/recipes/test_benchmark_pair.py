"""The benchmark model: several processes, jobs on GPUs, one report of many measurements."""

import json
import lzma
import re
import signal
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from tests.recipes.pretraining import ROOT, VOCAB, scripts, train, write_data
from tests.training.processes import run_together, values
from transformers import LlamaConfig, LlamaForCausalLM

from peagle.evaluation.journal import BENCH_LOG, Journal
from peagle.evaluation.sweep import SweepPoint
from peagle.evaluation.throughput import summarize
from peagle.results import RunFigures
from peagle.training.config import TrainConfig

scripts()

sys.path.append(str(ROOT / "benchmarks"))

import evaluate  # noqa: E402
import nodes  # noqa: E402
import sitting  # noqa: E402
from jobs import Job, available_cores, run_jobs, shares  # noqa: E402

RECIPE = ROOT / "recipes" / "benchmark_pair"
HEADS = [f"{name}.toml" for name in evaluate.HEADS]


# ---- sizes and settings ----


def test_the_target_has_the_size_that_is_promised() -> None:
    config = LlamaConfig(**json.loads((RECIPE / "target.json").read_text()))
    with torch.device("meta"):
        count = sum(p.numel() for p in LlamaForCausalLM(config).parameters())
    assert 100e6 <= count <= 200e6
    assert config.num_hidden_layers >= 24 and config.vocab_size == 16_384
    assert config.max_position_embeddings == 4_096


def test_heads_differ_in_method_and_layers_alone() -> None:
    configs = {Path(name).stem: TrainConfig.read(RECIPE / name) for name in HEADS}
    shared = [
        (c.target, c.data, c.optimizer, c.run, c.head.draft_vocab_size) for c in configs.values()
    ]
    assert all(one == shared[0] for one in shared)
    layers = {name: config.head.num_layers for name, config in configs.items()}
    assert layers == {"peagle": 4, "peagle_8l": 8, "eagle3": 1, "eagle3_4l": 4}
    names = {name: config.method.name for name, config in configs.items()}
    assert names == {name: name.split("_")[0] for name in names}
    assert {config.method.depth for config in configs.values()} == {7}
    assert {config.method.loss for config in configs.values()} == {"kl"}
    # Paths are those that a sitting with its default folder makes.
    assert configs["peagle"].target.resolve() == Path("build/benchmark_pair/target").resolve()


def test_the_budget_is_the_one_written_down() -> None:
    rows = re.findall(r"^\| (\w+) \| ([\d.]+) \|", (RECIPE / "budget.md").read_text(), re.M)
    assert {name: float(minutes) for name, minutes in rows} == sitting.BUDGET
    assert list(sitting.BUDGET) == list(sitting.PHASES)
    assert sum(sitting.BUDGET.values()) <= 27


@pytest.mark.parametrize("small", [False, True])
def test_measurements_are_commands_that_peagle_understands(tmp_path: Path, small: bool) -> None:
    from peagle.cli.main import app

    for name in evaluate.HEADS:
        (tmp_path / name / "head").mkdir(parents=True)
    group: Any = typer.main.get_command(app)
    jobs = evaluate.measurements(tmp_path, small=small)
    jobs.append(evaluate.tuning(tmp_path, small=small))
    assert len({job.name for job in jobs}) == len(jobs)
    for job in jobs:
        python, first, *rest = job.command
        assert python == sys.executable
        if Path(first).parent == evaluate.BENCHMARKS:
            assert first == nodes.__file__
            nodes.parser().parse_args(rest)
            continue
        module, verb, *arguments = rest
        assert (first, module) == ("-m", "peagle")
        context = group.commands[verb].make_context(verb, arguments)
        assert context.params["output"] == tmp_path / "evaluation" / job.name


# ---- several processes ----


def test_two_processes_train_the_target_as_one(tmp_path: Path) -> None:
    write_data(tmp_path)
    alone = train(None, tmp_path, steps=6)
    for together in values(run_together(train, 2, tmp_path, 6, timeout=120, patience=90)):
        assert together["summary"] == pytest.approx(alone["summary"], rel=1e-3)
        for name, gradient in alone["gradients"].items():
            np.testing.assert_allclose(together["gradients"][name], gradient, atol=2e-6)
        for name, weight in alone["weights"].items():
            difference = np.linalg.norm(together["weights"][name] - weight)
            assert difference < 1e-3 * np.linalg.norm(weight), name
    assert set(alone["gradients"]) == set(alone["weights"])


def test_a_batch_that_cannot_be_shared_is_refused(tmp_path: Path) -> None:
    import pretrain

    write_data(tmp_path)
    config = pretrain.TrainConfig(1, None, 7, 16, "muon", 0.01, 1, 0.5, 0.1, 1.0, 0.0, 0)
    model = pretrain.build_model(tmp_path / "tiny.json", 0)
    with pytest.raises(ValueError, match="--batch is 7, expected a multiple of the 2 processes"):
        pretrain.Trainer(model, config, tmp_path, 0.0, pretrain.Processes(0, 2))


# ---- heads ----


class Done:
    """A process that has ended."""

    def wait(self) -> int:
        return 0


def test_heads_go_on_at_the_steps_planned_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import heads

    started: list[tuple[Any, ...]] = []
    plans: list[dict[str, str]] = []
    monkeypatch.setattr(heads, "start", lambda *a: started.append((*a[2:3], *a[4:])) or Done())
    monkeypatch.setattr(heads, "measure_pace", lambda trials, logs: plans.append(logs))
    monkeypatch.setattr(heads, "steps_within", lambda log, seconds: round(seconds))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-5")
    command = ["heads.py", "one.toml", "two.toml", "--minutes", "0.5", "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [*command, "--resume", "--set", "run.seed=2"])
    heads.main()
    assert [settings for _, settings, *_ in started] == [
        *2 * [["run.seed=2", "run.log_every=10"]],
        *2 * [["run.seed=2", "optimizer.steps=30"]],
    ]
    assert len(plans) == 1 and json.loads((tmp_path / "steps.json").read_text())["two"] == 30

    (tmp_path / "one" / "checkpoint").mkdir(parents=True)
    started.clear()
    heads.main()
    steps = ["run.seed=2", "optimizer.steps=30"]
    assert started == [(tmp_path / "one", steps, ["--resume"]), (tmp_path / "two", steps, [])]
    assert len(plans) == 1, "no second trial"


def test_more_heads_than_gpus_come_in_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import heads

    started: list[tuple[str, str, bool]] = []
    monkeypatch.setattr(
        heads,
        "start",
        lambda config, gpu, output, log, *_: (
            started.append((config, gpu, "trial" in log.name)) or Done()
        ),
    )
    monkeypatch.setattr(heads, "measure_pace", lambda trials, logs: None)
    monkeypatch.setattr(heads, "steps_within", lambda log, seconds: round(seconds))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-5")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "train.json").write_text("{}")
    configs = ["a.toml", "b.toml", "c.toml", "d.toml"]
    monkeypatch.setattr(
        sys, "argv", ["heads.py", *configs, "--minutes", "1", "--output", str(tmp_path), "--resume"]
    )
    heads.main()
    first, second = [("a.toml", "3")], [("c.toml", "3"), ("d.toml", "GPU-5")]
    turns = [(*one, trial) for turn in (first, second) for trial in (True, False) for one in turn]
    assert started == turns
    assert set(json.loads((tmp_path / "steps.json").read_text())) == {"a", "c", "d"}


# ---- setup ----


def test_setup_unpacks_tokens_and_prompts(tmp_path: Path) -> None:
    data, work = tmp_path / "data", tmp_path / "work"
    (data / "tokenizer").mkdir(parents=True)
    (data / "tokenizer" / "tokenizer.json").write_text("{}")
    tokens = np.random.default_rng(1).integers(0, VOCAB, 500).astype("<u2")
    (data / "train.u16.xz").write_bytes(lzma.compress(tokens.tobytes()))
    tokens[:100].tofile(data / "val.u16")
    np.savez(data / "response_prompts.npz", p16=np.array([3, 480], np.int32), p4=np.array([7]))
    arguments = ["setup", "--data", str(data), "--work", str(work)]
    sitting.main(arguments)
    with np.load(work / "response_prompts.npz") as prompts:
        assert prompts["p16"].tolist() == [tokens[3:19].tolist(), tokens[480:496].tolist()]
        assert prompts["p4"].tolist() == [tokens[7:11].tolist()]
    assert np.fromfile(work / "train.u16", "<u2").tolist() == tokens.tolist()
    before = (work / "response_prompts.npz").stat().st_mtime_ns
    sitting.main(arguments)  # is done already
    assert (work / "response_prompts.npz").stat().st_mtime_ns == before


# ---- jobs ----


def python(name: str, code: str, **limits: float) -> Job:
    return Job(name, (sys.executable, "-c", f"import os, signal, sys, time\n{code}"), **limits)


def test_jobs_take_turns_on_each_gpu(tmp_path: Path) -> None:
    code = (
        f"place = open({str(tmp_path / 'places')!r}, 'a')\n"
        "gpu = os.environ['CUDA_VISIBLE_DEVICES']\n"
        "place.write(f'+{gpu}\\n'); place.flush(); time.sleep(0.1); place.write(f'-{gpu}\\n')"
    )
    lines: list[str] = []
    jobs = [python(f"job{n}", code) for n in range(5)]
    codes = run_jobs(
        [*jobs, python("bad", "sys.exit('why')")], ["0", "1"], tmp_path, 60, lines.append
    )
    assert codes == {**{f"job{n}": 0 for n in range(5)}, "bad": 1}
    events = (tmp_path / "places").read_text().split()
    for gpu in "01":
        own = [event[0] for event in events if event[1] == gpu]
        assert own == ["+", "-"] * (len(own) // 2) and own, "one at a time"
    assert len(events) == 10
    assert lines[:2] == ["job0 begins on GPU 0", "job1 begins on GPU 1"]
    assert "why" in lines, "what a failed one said last"


@pytest.mark.skipif(len(available_cores()) < 2, reason="needs two cores")
def test_jobs_beside_each_other_have_cores_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "time.sleep(0.3)\n"
        f"name = os.path.join({str(tmp_path)!r}, os.environ['CUDA_VISIBLE_DEVICES'])\n"
        "open(name, 'w').write(' '.join(map(str, sorted(os.sched_getaffinity(0)))))"
    )
    run_jobs(
        [python("one", code), python("two", code)], ["0", "1"], tmp_path, 60, lambda line: None
    )
    first, second = ((tmp_path / gpu).read_text().split() for gpu in "01")
    assert first and second and not set(first) & set(second)
    again = 'os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["PLACE"]\n'
    monkeypatch.setenv("PLACE", "left")
    monkeypatch.setenv("OTHER", "right")
    run_jobs(
        [python("left", again + code), python("right", again.replace("PLACE", "OTHER") + code)],
        ["", ""],
        tmp_path,
        60,
        lambda line: None,
    )
    left, right = ((tmp_path / name).read_text().split() for name in ("left", "right"))
    assert left and right and not set(left) & set(right), "places of the same name"
    assert shares([3, 4, 7, 9, 10], 2) == [[3, 4], [7, 9]]
    assert shares([3], 2) == [[3], [3]] and shares([], 1) == [[]]


def test_the_deadline_interrupts_and_begins_nothing_more(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    patient = f"""
try:
    time.sleep(60)
except KeyboardInterrupt:
    open({str(kept)!r}, "w").write("what it had")
    sys.exit(130)
"""
    jobs = [python("patient", patient), python("never", ""), python("long", "", least_s=1000)]
    started = time.monotonic()
    codes = run_jobs(jobs, [""], tmp_path, 1.5, lambda line: None)
    assert codes == {"patient": None, "never": None, "long": None}
    assert kept.read_text() == "what it had" and time.monotonic() - started < 15


def test_a_job_that_had_its_seconds_leaves_its_place(tmp_path: Path) -> None:
    lines: list[str] = []
    jobs = [python("endless", "time.sleep(60)", most_s=0.5), python("next", "")]
    codes = run_jobs(jobs, [""], tmp_path, 60, lines.append)
    assert codes == {"endless": None, "next": 0}
    assert "endless had its 0.5 seconds: interrupted" in lines


def test_sigterm_interrupts_and_ends_the_process(tmp_path: Path) -> None:
    job = python("one", "os.kill(os.getppid(), signal.SIGTERM); time.sleep(9)")
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with pytest.raises(SystemExit, match="143"):
        run_jobs([job], [""], tmp_path, 60)
    assert "KeyboardInterrupt" in (tmp_path / "one.log").read_text()
    assert signal.signal(signal.SIGTERM, before) is signal.SIG_IGN


# ---- one report ----


def figures(speed: float) -> dict[str, Any]:
    spread = {"p50": 0.1, "p90": 0.2, "p99": 0.3, "mean": 0.15}
    return {
        "seconds": 100 / speed,
        "num_requests": 4,
        "num_tokens": 100,
        "output_tokens_per_s": speed,
        "requests_per_s": speed / 25,
        "ttft_s": spread,
        "itl_s": spread,
        "e2e_s": spread,
        "acceptance_length": None,
        "gpu_busy": None,
        "errors": 0,
    }


def write_sweep(
    folder: Path, name: str, repeats: int, **settings: Any
) -> dict[SweepPoint, list[Any]]:
    """A sweep's log as it is after so many repeats, the last line cut."""
    shared = {"target": "t", "dtype": "float32", "sets": {name: 4}, "temperature": 0.0}
    log = Journal(folder / BENCH_LOG, {**shared, "max_new_tokens": 16, "seed": 0, **settings})
    measured: dict[SweepPoint, list[Any]] = {}
    for repeat in range(repeats):
        for number, method in enumerate(("plain", "eagle3", "peagle")):
            for concurrency in (1, 4):
                k = 3 if number else 0
                cell = SweepPoint(method, "", "peagle", k, concurrency, name)
                speed = 100.0 * (number + 1) * concurrency + repeat
                log.add(cell.key(repeat), figures(speed))
                figured = RunFigures.model_validate(figures(speed))
                measured.setdefault(cell, []).append(figured)
    with (folder / BENCH_LOG).open("a") as file:
        file.write('{"key": {"cell": {"method": "pla')
    return measured


def test_sweeps_of_several_gpus_become_one(tmp_path: Path) -> None:
    folder = tmp_path / "evaluation"
    measured = write_sweep(folder / "bench-humaneval", "humaneval", 3)
    measured |= write_sweep(folder / "bench-mt_bench", "mt_bench", 1)
    report = evaluate.merge(tmp_path)
    found = json.loads((report / "throughput.json").read_text())
    expected = summarize(measured, None, provenance={"target": "t"}, settings={}).to_json()
    for name in ("cells", "best_k", "goodput"):
        assert found[name] == expected[name]
    assert found["settings"]["sets"] == {"humaneval": 4, "mt_bench": 4}
    assert found["settings"]["repeats"] == 3 and found["provenance"]["target"] == "t"
    html = (report / "report.html").read_text()
    assert "humaneval" in html and "mt_bench" in html
    packed = evaluate.pack(tmp_path, tmp_path / "out")
    assert len(packed) <= 8 and {file.name for file in packed} >= {"report.html", "results.json"}
    with tarfile.open(tmp_path / "out" / "records.tar.xz") as archive:
        assert "report/throughput.json" in archive.getnames()


def test_sweeps_of_other_settings_are_not_mixed(tmp_path: Path) -> None:
    write_sweep(tmp_path / "evaluation" / "bench-a", "a", 1)
    write_sweep(tmp_path / "evaluation" / "bench-b", "b", 1, temperature=1.0)
    with pytest.raises(ValueError, match=r"temperature is 0\.0 and 1\.0"):
        evaluate.merge(tmp_path)


def test_entries_of_several_runs_become_one_file() -> None:
    def file(temperature: float, seed: int = 0) -> dict[str, Any]:
        return {
            "format_version": 1,
            "provenance": {"command": f"peagle eval --temperature {temperature}", "target": "t"},
            "settings": {"seed": seed},
            "entries": [{"temperature": temperature}],
        }

    merged = evaluate.merged_acceptance([file(0.0), file(1.0)])
    assert merged["entries"] == [{"temperature": 0.0}, {"temperature": 1.0}]
    assert evaluate.merged_acceptance([file(0.0)] * 2)["entries"] == [{"temperature": 0.0}]
    assert merged["settings"] == {"seed": 0}
    assert merged["provenance"]["command"].count("peagle eval") == 2
    with pytest.raises(ValueError, match="seed is 0 and 1"):
        evaluate.merged_acceptance([file(0.0), file(1.0, seed=1)])


def test_nothing_measured_is_said(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="nothing was measured yet"):
        evaluate.merge(tmp_path)
