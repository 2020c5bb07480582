"""`peagle make-head`: its stages, run in this process on a tiny target, and where it goes on."""

import io
import json
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from peagle.cli import make_head, stages
from peagle.cli.main import run
from peagle.engine import placement
from peagle.training.published_head import model_card, read_published
from tests.cli.conftest import Peagle, environment
from tests.conftest import make_target_folder


class Commands:
    """Runs the stages in this process, and keeps their words; one of them may fail."""

    def __init__(self) -> None:
        self.words: list[list[str]] = []
        self.fails: Callable[[list[str]], bool] = lambda words: False

    @contextmanager
    def start(self, commands: Sequence[Sequence[str]], output: int) -> Iterator[Any]:
        yield [self.run(list(words)) for words in commands]

    def run(self, words: list[str]) -> SimpleNamespace:
        self.words.append(words)
        text, status = io.StringIO(), 3
        if not self.fails(words):
            with redirect_stdout(text):
                status = run(words)
        return SimpleNamespace(communicate=lambda: (text.getvalue(), None), returncode=status)


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> Commands:
    found = Commands()
    monkeypatch.setattr(stages, "_stoppable", found.start)
    monkeypatch.setattr(make_head, "_PROBE_MINUTES", 0.005)
    monkeypatch.setattr(make_head, "_PROBE_PROMPTS", {"cpu": 6, "cuda": 6})
    return found


@pytest.fixture(autouse=True)
def _keep_handlers() -> Iterator[None]:
    """Training takes the signals of its process, which is the tests' own here."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def kind(words: Sequence[str]) -> str:
    """A command and the file that it writes."""
    output = next((words[i + 1] for i, word in enumerate(words) if word == "--output"), "")
    return " ".join([*words[: 2 if words[0] == "data" else 1], Path(output).name]).strip()


def test_an_interrupt_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command of the stage tells it, so `peagle make-head` ends in silence."""
    command = [sys.executable, "-c", "raise SystemExit(130)"]
    real = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda _, **options: real(command, **options))
    with pytest.raises(SystemExit) as end, stages._stoppable([["x"]], None) as processes:
        signal.raise_signal(signal.SIGINT)
        processes[0].communicate()
    assert end.value.code == 130


OPTIONS = [
    *("--max-new-tokens", 24, "--set", "head.num_layers=1", "--set", "method.depth=3"),
    *("--set", "data.batch_tokens=256", "--set", "data.length_multiple=8"),
]


def test_a_head_from_nothing_and_where_it_goes_on(
    peagle: Peagle,
    commands: Commands,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "made"
    target_folder = make_target_folder(tmp_path / "target", max_position_embeddings=1024)
    words = ["make-head", target_folder, "--output", out, *OPTIONS]
    commands.fails = lambda words: "--correction-on" in words
    # All but the minutes of the plan is real: this plan is as short as a test must be.
    real = make_head.make_head_plan

    def short(probe: Any, minutes: float) -> Any:
        assert (probe.written, probe.answered) == (6, 6)
        plan = real(probe, minutes)
        assert {"synthesize", "regenerate"} <= set(plan.seconds)
        return replace(plan, prompts=10, correction_steps=3, eval_limit=1)

    monkeypatch.setattr(make_head, "make_head_plan", short)
    monkeypatch.setattr(make_head, "training_steps", lambda *_: 6)
    monkeypatch.setattr(make_head, "MAX_CORRECTION_STEPS", 3)
    stopped = peagle(*words, "--minutes", 10)
    assert stopped.status == 3
    assert "the stage 'correction' ended with status 3" in stopped.err
    assert [kind(one) for one in commands.words] == [
        "data synthesize prompts.jsonl",
        "data regenerate answers.jsonl",
        "train trial",
        "data synthesize prompts.jsonl",
        "data regenerate answers.jsonl",
        "data prepare train.safetensors",
        "train",
        "train",
    ]
    for line in commands.words:
        assert f"peagle {shlex.join(line)}" in stopped.err
    # Half of the answers are greedy.
    rows = list(map(json.loads, (out / "answers.jsonl").read_text().splitlines()))
    assert Counter(row["temperature"] for row in rows) == {0.0: 5, 0.7: 5}
    assert len((out / "prompts.jsonl").read_text().splitlines()) == 10
    assert not (out / "make-head" / "trial").exists()

    # A file of a whole stage is gone: that stage runs again, and so do those that are missing.
    (out / "answers.jsonl").unlink()
    commands.words.clear()
    commands.fails = lambda words: False
    done = peagle(*words, "--minutes", 10, "--format", "json")
    assert done.status == 0, done.err
    assert [kind(one) for one in commands.words] == [
        "data regenerate answers.jsonl",
        "train",
        "eval eval",
    ]
    result = json.loads(done.out)
    assert result["serve"].endswith(f"serve {target_folder} --draft {out / 'head'}")
    assert {entry["method"] for entry in result["acceptance"]} == {"peagle", "ngram"}
    assert [one["name"] for one in result["stages"]][-3:] == ["regenerate", "correction", "eval"]

    # The card of the head tells that the target wrote prompts and answers itself.
    side = {
        name: json.loads((out / f"{name}.jsonl.meta.json").read_text())
        for name in ("prompts", "answers")
    }
    card = model_card(read_published(out / "head"), "me/head", "org/target", "apache-2.0")
    assert side["prompts"]["prompts"] == 10 <= side["prompts"]["samples"]
    assert (
        f"| origin of the prompts | 10, kept of {side['prompts']['samples']} samples of the target "
        "itself |"
    ) in card
    assert (
        "| origin of the answers | the target itself: 5 at temperature 0, 5 at temperature 0.7 |"
    ) in card
    assert side["answers"]["answers"] == 10

    # All is done: nothing runs, and the same is told.
    commands.words.clear()
    again = peagle(*words, "--minutes", 10)
    assert again.status == 0 and commands.words == []
    assert result["serve"] in again.out
    (out / "head" / "correction.st").unlink()
    assert peagle(*words, "--minutes", 10).status == 0
    assert ["--correction-on" in one for one in commands.words] == [True]
    assert (out / "head" / "correction.st").is_file()
    ours, lookup = (
        next(one for one in result["acceptance"] if (one["method"], one["set"]) == (name, "all"))
        for name in ("peagle", "ngram")
    )
    assert (
        f"all: {ours['tokens_per_step']:.2f} tokens a step, "
        f"{'better' if ours['tokens_per_step'] > lookup['tokens_per_step'] else 'no better'} than "
        f"prompt lookup ({lookup['tokens_per_step']:.2f})"
    ) in again.out

    for changed, told in (
        (["--minutes", 12], "begun with minutes 10.0, now it is 12.0"),
        (["--minutes", 10, "--head", "eagle3"], "begun with head 'peagle', now it is 'eagle3'"),
    ):
        other = peagle(*words, *changed)
        assert other.status == 2 and told in other.err, other.err


def test_processes_that_write_side_by_side_have_a_part_of_the_prompts_each(
    peagle: Peagle, commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU with a small target, whose memory the processes share."""
    out = tmp_path / "made"
    target_folder = make_target_folder(tmp_path / "target", max_position_embeddings=1024)
    monkeypatch.setattr(make_head, "_num_processes", lambda folder, on_gpu: 2)
    monkeypatch.setattr(make_head, "_free_gib", lambda: 6)
    # 10 minutes: 7.5 prompts for each of two processes, and answers to all of them.
    monkeypatch.setattr(make_head, "_PROBE_PROMPTS", {"cpu": 2})
    monkeypatch.setattr(make_head, "_PROMPTS_A_MINUTE", 3.75)
    real = make_head.make_head_plan
    probes = []

    def short(probe: Any, minutes: float) -> Any:
        probes.append(probe)
        plan = real(probe, minutes)
        # As if a head learned enough from so few.
        seconds = {k: s for k, s in plan.seconds.items() if k not in ("synthesize", "regenerate")}
        return replace(plan, prompts=15, correction_steps=3, eval_limit=1, seconds=seconds)

    monkeypatch.setattr(make_head, "make_head_plan", short)
    monkeypatch.setattr(make_head, "training_steps", lambda *_: 6)
    monkeypatch.setattr(make_head, "MAX_CORRECTION_STEPS", 3)
    words = ["make-head", target_folder, "--output", out, *OPTIONS, "--minutes", 10]
    commands.fails = lambda words: words[0] == "train"
    assert peagle(*words).status == 3
    commands.fails = lambda words: words[0] == "eval"
    monkeypatch.setattr(make_head, "_free_gib", lambda: 60)
    stopped = peagle(*words)
    assert stopped.status == 3 and "the stage 'eval' ended with status 3" in stopped.err
    kinds = [kind(one) for one in commands.words]
    both = [f"data synthesize prompts-{n}.jsonl" for n in (0, 1)]
    # The probe has written enough: no process starts again.
    assert [one for one in kinds if "synthesize" in one] == both
    assert kinds.count("data regenerate answers-0.jsonl") == 1
    assert kinds.count("data regenerate answers-1.jsonl") == 1
    assert (probes[0].written, probes[0].answered) == (15, 15)
    for one in commands.words:
        if one[:2] in (["data", "synthesize"], ["data", "regenerate"]):
            # 0.7 of the 6 GiB that were free when it began, for two.
            assert one[one.index("--kv-cache-gib") + 1] == "2"
    lines = [(out / f"prompts-{n}.jsonl").read_text().splitlines() for n in (0, 1)]
    assert list(map(len, lines)) == [8, 7] and not set(lines[0]) & set(lines[1])
    prepared = [one for one in commands.words if one[:2] == ["data", "prepare"]][-1]
    assert [Path(one).name for one in prepared[2:4]] == ["answers-0.jsonl", "answers-1.jsonl"]
    journal = json.loads((out / "make-head" / "journal.json").read_text())
    stage = next(one for one in journal["stages"] if one["name"] == "probe of regenerate")
    assert stage["result"]["prompts"] == 8 and stage["results"][0]["prompts"] == 7
    assert stage["result"]["answers"] == 8

    # A file that the probe wrote is gone: its process answers again, the other has all answers.
    commands.words.clear()
    (out / "answers-1.jsonl").unlink()
    assert peagle(*words).status == 3
    again = [one for one in commands.words if one[:2] == ["data", "regenerate"]]
    assert [kind(one) for one in commands.words] == [*map(kind, again), "eval eval"]
    journal = json.loads((out / "make-head" / "journal.json").read_text())
    stage = next(one for one in journal["stages"] if one["name"] == "regenerate")
    assert stage["result"]["resumed"] == 8 and stage["results"][0]["answers"] == 7


@pytest.mark.parametrize(
    ("mib", "cores", "on_gpu", "expected"),
    [
        (256, 16, True, 4),
        (256, 4, True, 2),
        (256, 1, True, 1),
        (3000, 16, True, 1),
        (256, 16, False, 1),
        (0, 16, True, 1),
    ],
)
def test_a_small_target_on_a_gpu_gets_several_processes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mib: int,
    cores: int,
    on_gpu: bool,
    expected: int,
) -> None:
    monkeypatch.setattr(placement, "usable_cores", lambda: cores)
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(mib * 2**20)
    assert make_head._num_processes(tmp_path, on_gpu) == expected


def test_commands_side_by_side_are_told_of_and_stopped(tmp_path: Path) -> None:
    """Real processes: the words of one that fails are shown, though its progress is not."""
    found = stages.Stages(tmp_path / "journal.json", {}, 1)
    good, bad = ["data", "inspect", "--help"], ["data", "inspect", str(tmp_path / "none.jsonl")]
    told = io.StringIO()
    with pytest.raises(typer.Exit) as failed, redirect_stderr(told):
        found.run("two", good, beside=[bad])
    assert failed.value.exit_code == 2
    said = told.getvalue()
    assert "the stage 'two' ended with status 2" in said and "none.jsonl" in said


def test_too_few_minutes_end_it_before_the_work(
    peagle: Peagle, commands: Commands, target_folder: Path, tmp_path: Path
) -> None:
    words = ["make-head", target_folder, "--output", tmp_path / "made", *OPTIONS]
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"say {number} things\n" for number in range(8)))
    words += ["--prompts", prompts, "--head", "eagle3"]
    short = peagle(*words, "--minutes", 0.001)
    assert short.status == 2 and "--minutes is 0.001, too short for the stage" in short.err
    assert kind(commands.words[0]) == "data regenerate answers.jsonl"
    assert len(commands.words) == 2
    # Other minutes go on with what was measured.
    commands.words.clear()
    assert peagle(*words, "--minutes", 0.002).status == 2
    assert commands.words == []


@pytest.mark.slow
@pytest.mark.parametrize("change", ["train=together", "learning_rate=1e-30"])
def test_heads_without_a_fitted_correction(
    peagle: Peagle,
    commands: Commands,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: str,
) -> None:
    """Trained together there is nothing to fit; a fit that gains nothing leaves no file."""
    target = make_target_folder(tmp_path / "target", max_position_embeddings=1024)
    real, out = make_head.make_head_plan, tmp_path / "made"

    def short(*given: Any) -> Any:
        return replace(real(*given), prompts=10, eval_limit=1)

    monkeypatch.setattr(make_head, "make_head_plan", short)
    monkeypatch.setattr(make_head, "training_steps", lambda *_: 3)
    words = ["make-head", target, "--output", out, *OPTIONS, "--set", f"correction.{change}"]
    done = peagle(*words, "--minutes", 10)
    assert done.status == 0, done.err
    fits = ["--correction-on" in one for one in commands.words]
    is_together = change == "train=together"
    assert any(fits) != is_together
    assert (out / "head" / "correction.st").is_file() == is_together


@pytest.mark.parametrize(
    ("head", "changes", "fits"),
    [
        ("peagle", [], True),
        ("peagle", ["correction.train=together"], False),
        ("peagle", ["method.depth=1"], False),
        ("peagle", ["method.name=eagle3"], False),
        ("eagle3", [], False),
    ],
)
def test_a_correction_is_fitted_on_heads_that_can_have_one(
    head: str, changes: list[str], fits: bool
) -> None:
    """Else the stage fails when the head is made."""
    assert make_head._check_overrides(head, changes) is fits


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--minutes", "0"], "--minutes is 0; expected a finite number above 0"),
        (["--minutes", "inf"], "--minutes is inf; expected a finite number above 0"),
        (["--minutes", "nan"], "--minutes is nan; expected a finite number above 0"),
        (["--set", "head.layers=3"], "--set head.layers=3: head.layers is not a known key"),
        (["--set", "head.group_size=64"], "error: --set head.group_size=64: head: group_size is"),
        (["--set", "run.minutes=5"], "--set run.minutes=5: `peagle make-head` plans the steps"),
        (["--set", "optimizer.steps = 9"], "and give other --minutes"),
        (["--set", "correction.on=head"], "makes a head and its correction"),
        (["--prompts", "none.jsonl"], "'none.jsonl' is not there"),
        (["--output", "full"], "is not empty, and `peagle make-head` did not begin it"),
        (["--output", "file"], "file"),
    ],
)
def test_mistakes_are_refused_at_once(
    peagle: Peagle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "other").touch()
    (tmp_path / "file").touch()
    refused = peagle("make-head", "bundled", "--output", "made", *words)
    assert refused.status == 2 and told in refused.err, refused.err
    assert not (tmp_path / "made").exists()


def test_a_damaged_journal_is_named(tmp_path: Path) -> None:
    journal = tmp_path / "journal.json"
    journal.write_text("{")
    with pytest.raises(stages.UserError, match=r"journal.json' is damaged"):
        stages.Stages(journal, {}, 2)


def test_a_stopped_run_leaves_no_command_behind(tmp_path: Path) -> None:
    """SIGTERM reaches the command of the stage, which saves; then this process ends with 130."""
    words = ["make-head", "bundled", "--output", str(tmp_path / "made")]
    process = subprocess.Popen(
        [sys.executable, "-m", "peagle", *words],
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "loading the model" in line:
            break
    children = children_of(process.pid)
    assert len(children) == 1
    process.terminate()
    assert process.wait(60) == 130
    until = time.monotonic() + 10
    while time.monotonic() < until and Path(f"/proc/{children[0]}").exists():
        time.sleep(0.05)
    assert not Path(f"/proc/{children[0]}").exists()


def children_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
