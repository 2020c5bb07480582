"""How many CPU threads torch gets, by the model, the machine and earlier settings."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from peagle.engine import placement
from peagle.engine.placement import BYTES_PER_THREAD, choose_threads, fast_threads, usable_cores
from peagle.errors import UserError

SOURCE = Path(__file__).resolve().parents[2] / "src"
SMALL = nn.Linear(8, 8)


@pytest.fixture(autouse=True)
def _undecided(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Four cores, torch's default, and no earlier setting."""
    before = torch.get_num_threads()
    for variable in placement.THREAD_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(placement, "_is_set", False)
    monkeypatch.setattr(placement, "_chosen", None)
    monkeypatch.setattr(placement, "_defaults", lambda: (8, 4))
    monkeypatch.setattr(placement, "_CPU_MAX", Path("nowhere"))
    monkeypatch.setattr(placement, "_CPU_TIMES", Path("nowhere"))
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("weight_bytes", "expected"),
    [(0, 1), (19 * 10**6, 1), (2 * BYTES_PER_THREAD, 2), (10**10, 4)],
)
def test_a_thread_needs_bytes_to_read(weight_bytes: int, expected: int) -> None:
    assert fast_threads(weight_bytes, 4) == expected


@pytest.mark.parametrize(("quota", "cores"), [("max 100000", 4), ("250000 100000", 2), ("9 99", 1)])
def test_cores_are_those_that_may_be_used(
    quota: str, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.setattr(placement, "_CPU_MAX", tmp_path / "cpu.max")
    assert usable_cores() == cores


def test_a_small_model_gets_one_thread_and_a_large_one_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    choose_threads(SMALL)
    assert torch.get_num_threads() == 1
    monkeypatch.setattr(placement, "BYTES_PER_THREAD", 8)
    choose_threads(SMALL)
    assert torch.get_num_threads() == 4


def test_other_programs_keep_their_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 8 processors others took 5 for a second, and this process half of one."""
    clock, own = [0.0], [10.0]
    stat = tmp_path / "stat"

    def write(busy_s: float) -> None:
        lines = [f"cpu{i} {busy_s * 100 / 8:.0f} 0 0 500 900 0 0 0 0 0" for i in range(8)]
        stat.write_text("\n".join(["cpu 1 2 3", *lines, "cpu8 99999 0 0 0 0 0 0 0", "intr 7"]))

    monkeypatch.setattr(placement, "_CPU_TIMES", stat)
    monkeypatch.setattr(placement.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(placement, "_own_seconds", lambda: own[0])
    monkeypatch.setattr(placement.os, "sched_getaffinity", lambda _: set(range(8)))
    write(80.0)
    others = placement.OtherPrograms()
    assert others.busy_cores() is None and others.free_cores() == 8
    clock[0], own[0] = 1.0, 10.5
    write(85.5)
    assert others.busy_cores() == pytest.approx(5, abs=0.05) and others.free_cores() == 3
    monkeypatch.setattr(placement, "_others", others)
    monkeypatch.setattr(placement, "BYTES_PER_THREAD", 8)
    choose_threads(SMALL)
    assert torch.get_num_threads() == 3
    write(90.5)
    choose_threads(SMALL)
    assert torch.get_num_threads() == 1
    stat.unlink()
    assert placement.OtherPrograms().free_cores() == 8


def test_a_model_that_is_not_on_a_cpu_gets_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "BYTES_PER_THREAD", 8)
    choose_threads(nn.Linear(8, 8, device="meta"))
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize("variable", placement.THREAD_VARIABLES)
def test_the_environment_wins(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "4")
    choose_threads(SMALL)
    assert torch.get_num_threads() == 4


def test_an_option_and_a_program_win() -> None:
    torch.set_num_threads(3)  # neither torch's default nor a number from here
    choose_threads(SMALL)
    assert torch.get_num_threads() == 3
    placement.fix_threads(4)
    choose_threads(SMALL)
    assert torch.get_num_threads() == 4
    with pytest.raises(UserError, match="--threads is 0; expected at least 1"):
        placement.fix_threads(0)


@pytest.mark.slow
def test_torch_starts_with_one_of_the_numbers_that_count_as_its_own() -> None:
    code = (
        "import torch; from peagle.engine import placement\n"
        "print(torch.get_num_threads(), *placement._defaults())\n"
        "from peagle import LLM\n"
        "LLM('bundled'); print(torch.get_num_threads())"
    )
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    output = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
    at_start, *defaults, of_a_small_model = output.split()
    assert at_start in defaults and of_a_small_model == "1"
