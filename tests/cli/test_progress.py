"""The progress line, and the text of a training run."""

import io
import re
import time
from dataclasses import replace

import pytest
from rich.console import Console

from peagle.cli import progress as module
from peagle.cli.progress import ProgressLine, time_text
from peagle.cli.train import TrainView, progress_text, training_text
from peagle.training.reporting import TrainingReport

TRAIN = TrainingReport(
    kind="train",
    step=20,
    steps=100,
    loss=1.23456,
    accuracy=[0.5, 0.25, 1.0],
    acceptance=[0.5, 0.2, 0.1],
    acceptance_lengths=[1.5, 1.7, 1.8],
    learning_rate=1e-3,
    tokens_per_s=12_345.6,
    tokens_per_step=4096.0,
    seconds_left=125.0,
)
VALIDATION = replace(
    TRAIN,
    kind="validation",
    is_best=True,
    num_drafts=90,
    acceptance_lengths=[1.512, 1.699, 1.754],
    unconditional_acceptance_per_pos=[0.5, 0.2, 0.0],
    conditional_acceptance_per_pos=[0.5, 0.4, 0.0],
    temperature=0.7,
    sampled_acceptance_lengths=[1.3, 1.4, 1.41],
    sampled_unconditional_acceptance_per_pos=[0.3, 0.0, 0.0],
    sampled_conditional_acceptance_per_pos=[0.3, 0.0, None],
)


def test_training_is_one_line() -> None:
    assert progress_text(TRAIN) == (
        "train      20/100  loss 1.2346  AL 1.80 (K=3)  accuracy by depth .50 .25 1.00  "
        "12,346 tokens/s  2:05 left"
    )


def test_a_validation_is_a_block() -> None:
    assert progress_text(VALIDATION).splitlines() == [
        "validation 20/100  loss 1.2346  the best head so far",
        "  by K; by position of K=3        1     2     3",
        "  acceptance length, greedy    1.51  1.70  1.75",
        "  acceptance length, T=0.7     1.30  1.40  1.41",
        "  unconditional, greedy         .50   .20   .00",
        "  unconditional, T=0.7          .30   .00   .00",
        "  conditional, greedy           .50   .40   .00",
        "  conditional, T=0.7            .30   .00     -",
    ]


def test_what_is_not_known_is_left_out() -> None:
    greedy = replace(
        VALIDATION,
        is_best=False,
        temperature=None,
        sampled_acceptance_lengths=[],
        sampled_unconditional_acceptance_per_pos=[],
        sampled_conditional_acceptance_per_pos=[],
    )
    assert len(progress_text(greedy).splitlines()) == 5
    assert "best" not in progress_text(greedy) and "T=" not in progress_text(greedy)
    nothing = progress_text(replace(VALIDATION, num_drafts=0))
    assert nothing.splitlines()[1:] == ["  no acceptance: every response is shorter than 5 tokens"]


def test_a_deep_head_shows_some_columns() -> None:
    shares = [0.9] * 40
    deep = replace(
        VALIDATION,
        acceptance_lengths=[1 + k / 10 for k in range(40)],
        unconditional_acceptance_per_pos=shares,
        conditional_acceptance_per_pos=shares,
        sampled_acceptance_lengths=shares,
        sampled_unconditional_acceptance_per_pos=shares,
        sampled_conditional_acceptance_per_pos=shares,
    )
    lines = progress_text(deep).splitlines()
    assert lines[1].split()[-7:] == ["1", "2", "4", "8", "16", "32", "40"]
    assert lines[2].split()[-7:] == ["1.00", "1.10", "1.30", "1.70", "2.50", "4.10", "4.90"]
    assert max(map(len, lines)) < 100


def test_the_end_names_the_head_that_was_kept() -> None:
    record = {
        "best": {"step": 40, "k": 3, "temperature": 0.7, "acceptance_length": 1.406},
        "stop_reason": "patience",
        "steps": 80,
        "seconds": 61.4,
        "config": {"run": {"patience": 2}},
    }
    assert training_text(record, "run/head").splitlines() == [
        "stopped at step 80: no better head in 2 validations",
        "head of step 40 (acceptance length 1.41 as served, K=3, temperature 0.7) written to "
        "run/head after 61 s",
    ]
    plain = {**record, "best": None, "stop_reason": "steps"}
    assert training_text(plain, "run/head") == "head written to run/head after 61 s"


_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal(io.StringIO):
    """What a terminal is sent."""

    def isatty(self) -> bool:
        return True

    def lines(self) -> list[str]:
        """Every line that was drawn, without colours."""
        return [line for line in re.split(r"[\r\n]+", _ESCAPE.sub("", self.getvalue())) if line]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that the code under test reads."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def drawn(terminal: Terminal, width: int = 80) -> tuple[ProgressLine, Console]:
    console = Console(file=terminal, force_terminal=True, width=width, highlight=False)
    return ProgressLine("step", console=console), console


@pytest.mark.parametrize("width", [40, 80, 120])
def test_a_line_fits_the_terminal(width: int, clock: list[float]) -> None:
    terminal = Terminal()
    line, _ = drawn(terminal, width)
    with line:
        line.begin("loading the target, reading the data")
        line._bar.refresh()
        line.update(0, 20_000, "")
        clock[0] += 60
        line.update(400, 20_000, "loss 1.2346  AL 3.41  123,456 tokens/s")
        line._bar.refresh()
    lines = terminal.lines()
    assert all(len(text) <= width for text in lines), lines
    if width >= 80:
        assert any(text.startswith("loading the target, reading the data ") for text in lines)
        last = next(text for text in reversed(lines) if text.startswith("step 400/20000 "))
        assert last.rstrip().endswith("loss 1.2346  AL 3.41  123,456 tokens/s  49:00 left")
        assert "━" in last


def test_a_phase_between_counts_shows_its_seconds() -> None:
    terminal = Terminal()
    line, _ = drawn(terminal)
    with line:
        line.update(3, 6, "loss 1.0")
        line.begin("validating step 3")
        line._bar.refresh()
        line.update(4, 6, "loss 1.0")
        line._bar.refresh()
    phases = [text for text in terminal.lines() if text.startswith("validating step 3 ")]
    assert phases and all(text.rstrip().endswith(" 0:00") for text in phases)
    assert terminal.lines()[-1].startswith("step 4/6 ")


def test_lines_that_stay_are_above_the_bar() -> None:
    terminal = Terminal()
    line, _ = drawn(terminal)
    with line:
        line.begin("loading")
        line.print("[bold]peagle[/bold] head")
    assert any("[bold]peagle[/bold] head" in text for text in terminal.lines())


def test_a_log_has_plain_lines(capsys: pytest.CaptureFixture[str], clock: list[float]) -> None:
    with ProgressLine("answer") as line:
        line.begin("loading the model")
        line.update(0, 10, "", line="0 answers")
        clock[0] += module._LINE_SECONDS
        line.update(4, 10, "9 tokens/s", line="4 answers")
        line.update(5, 10, "9 tokens/s", line="5 answers")
        clock[0] += 60
        line.update(6, 10, "9 tokens/s")
    assert capsys.readouterr().err.splitlines() == [
        "peagle: loading the model",
        "peagle: 4 answers; 0:08 left",
    ]


def test_the_time_left_follows_a_pace_that_falls(clock: list[float]) -> None:
    """100 counts in 100 s, then one in 10 s: the mean since the beginning says 1:03 for 20 more."""
    line = ProgressLine("prompt", quiet=True)
    for done in range(101):
        found = line._time_left(done, 140)
        clock[0] += 1
    assert found == "0:40 left"
    for done in range(101, 121):
        clock[0] += 10
        found = line._time_left(done, 140)
    minutes, seconds = map(int, found.removesuffix(" left").split(":"))
    assert 180 <= 60 * minutes + seconds <= 220
    clock[0] += 1000
    assert line._time_left(120, 140) == "", "nothing was counted for half of the time"


def test_a_quiet_line_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressLine("step", quiet=True) as line:
        line.begin("loading")
        line.print("a head")
        line.update(1, 2, "", line="one")
    assert capsys.readouterr() == ("", "")


def test_training_is_on_the_line_and_validations_above_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = Terminal()
    line, _ = drawn(terminal)
    monkeypatch.setattr("sys.stdout", terminal)
    with line:
        view = TrainView(line, lambda: 100)
        view.stepped(19)
        view.report(TRAIN)
        line._bar.refresh()
        view.report(VALIDATION)
    text = "\n".join(terminal.lines())
    assert "step 20/100 " in text and "loss 1.2346  AL 1.80  12,346 tokens/s" in text
    assert "accuracy by depth" not in text and "acceptance length, greedy" in text


def test_a_log_has_a_line_for_each_report(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressLine("step") as line:
        view = TrainView(line, lambda: 100)
        for step in (20, 40):
            view.stepped(step)
            view.report(replace(TRAIN, step=step))
    out, err = capsys.readouterr()
    assert [text.split()[1] for text in out.splitlines()] == ["20/100", "40/100"] and err == ""


def test_durations() -> None:
    assert [time_text(s) for s in (0.4, 59.6, 125, 3725)] == ["0:00", "1:00", "2:05", "1:02:05"]
