"""The command line as a whole: help pages, exit statuses, lazy imports."""

import errno
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

import peagle as package
from peagle.cli import main
from peagle.errors import UserError
from serving.live import wait_for
from serving.warm import WarmProcess
from tests.cli.conftest import Pair, Peagle, environment


def test_help_lists_every_command(peagle: Peagle) -> None:
    for arguments in (["--help"], ["-h"], []):
        result = peagle(*arguments)
        assert result.status == 0 and result.err == ""
        for name in main.COMMANDS:
            assert name in result.out


@pytest.mark.parametrize("command", list(main.COMMANDS))
def test_help_of_a_command_has_examples(peagle: Peagle, command: str) -> None:
    result = peagle(command, "--help")
    assert result.status == 0 and result.err == ""
    examples = result.out.partition("Examples:")[2]
    assert f"\n   peagle {command}" in examples.replace("     peagle", "   peagle")


def test_version(peagle: Peagle) -> None:
    result = peagle("--version")
    assert (result.status, result.out) == (0, f"peagle {package.__version__}\n")


def test_help_needs_no_torch() -> None:
    commands = [["--help"], ["--version"], *([name, "--help"] for name in main.COMMANDS)]
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        f"from peagle.cli.main import run; sys.exit(max(map(run, {commands!r})))"
    )
    result = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True)
    assert result.returncode == 0, result.stderr


def test_help_of_the_program_imports_no_command() -> None:
    code = (
        "import sys; from peagle.cli.main import run; run(['--help'])\n"
        "slow = 'rich', 'markdown_it', 'pydantic', 'importlib.metadata', 'asyncio', 'torch'\n"
        "loaded = [m for m in sys.modules if m.startswith('peagle.cli.') or m in slow]\n"
        "print(*loaded, file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True)
    assert result.stderr.split() == [b"peagle.cli.main"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "No such command 'nothing'"),
        (["generat"], "Did you mean 'generate'?"),
        (["--nothing"], "No such option: --nothing"),
        (["generate", "--nothing"], "No such option: --nothing"),
        (["generate", "--top-k"], "--top-k"),
        (["generate", "--top-k", "many"], "--top-k"),
        (["generate", "--prompt", "x", "--format", "yaml"], "'yaml' is not one of"),
        (["generate", "org/x", "stray"], "stray"),
        (["generate", "--model", "x"], "named with --target MODEL, or as the first word: peagle g"),
        (["serve", "--model", "x"], "as the first word: peagle serve MODEL."),
        (["data", "regenerate", "p", "--model", "x"], "The target is named with --target MODEL."),
        (["train"], "CONFIG"),
        (["demo", "--limit", "x"], "--limit"),
    ],
)
def test_usage_errors(peagle: Peagle, arguments: list[str], message: str) -> None:
    result = peagle(*arguments)
    assert result.status == 2
    assert result.out == ""
    assert result.err.startswith("peagle: error: ")
    assert message in result.err
    assert "--help" in result.err.splitlines()[-1]


def test_user_errors_are_one_line_without_traceback(
    peagle: Peagle, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peagle.cli import generate

    def fail(*_: object) -> None:
        raise UserError("The value is 3; expected 4.")

    monkeypatch.setattr(generate, "_prompts", fail)
    result = peagle("generate", "--prompt", "x")
    assert (result.status, result.err) == (2, "peagle: error: The value is 3; expected 4.\n")


def test_faults_of_peagle_are_not_hidden(peagle: Peagle, monkeypatch: pytest.MonkeyPatch) -> None:
    from peagle.cli import generate

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(generate, "_prompts", fail)
    with pytest.raises(ZeroDivisionError):
        peagle("generate", "--prompt", "x")


def test_a_second_interrupt_shows_no_traceback() -> None:
    """It comes while the interpreter ends, which takes long where torch is loaded."""
    code = """
import atexit, os, signal
from peagle.cli import main
atexit.register(os.kill, os.getpid(), signal.SIGINT)
main.run = lambda: main.INTERRUPTED
main.main()
"""
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (main.INTERRUPTED, "")


def test_interrupt_ends_cleanly(pair: Pair, tmp_path: Path) -> None:
    """In the midst of much output."""
    prompts, log = tmp_path / "prompts.txt", tmp_path / "log"
    prompts.write_text("some text\n" * 5000)
    command = ["generate", *pair.options, "--prompts", prompts, "--max-new-tokens", 4]
    words = ["peagle", *map(str, command), "--format", "json"]
    process = WarmProcess(words, {**environment(), "OMP_NUM_THREADS": "1"}, log)
    try:
        wait_for(lambda: "}\n" in log.read_text())
        process.send_signal(signal.SIGINT)
        text, _ = process.communicate(timeout=240)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == main.INTERRUPTED
    *lines, last = text.splitlines(keepends=True)
    assert last == "peagle: interrupted\n" and 0 < len(lines) < 5000
    assert all(line.startswith("{") for line in lines)


def test_a_reader_that_goes_away_is_no_error(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the midst of the output, of which it has read a line."""
    (tmp_path / "prompts.txt").write_text("some text\n" * 500)
    command = ["generate", *pair.options, "--prompts", tmp_path / "prompts.txt"]
    command += ["--max-new-tokens", 4, "--format", "json"]
    read_end, write_end = os.pipe()
    lines: list[str] = []

    def read_one() -> None:
        with open(read_end) as reader:
            lines.append(reader.readline())

    thread = threading.Thread(target=read_one)
    thread.start()
    # What is left in its buffer has no reader at the end.
    with suppress(BrokenPipeError), open(write_end, "w") as writer:
        monkeypatch.setattr(sys, "stdout", writer)
        with pytest.raises(SystemExit) as left:  # click sees to it before `run` does
            main.run([str(argument) for argument in command])
        assert left.value.code == 1
    thread.join()
    assert lines[0].startswith("{") and capsys.readouterr().err == ""


def test_a_process_whose_reader_is_gone_ends_in_silence() -> None:
    """The interpreter flushes standard output once more; a command that needs no torch is quick."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "peagle", "catalog"]
    with open(writer, "w") as gone:
        result = subprocess.run(
            command, env=environment(), stdout=gone, stderr=subprocess.PIPE, text=True
        )
    assert (result.returncode, result.stderr) == (1, "")


full_disk = pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
FULL_DISK = "peagle: error: No space left on device: output. "
FULL_DISK += "Make room, then run the command again.\n"


@full_disk
def test_a_full_disk_is_no_traceback(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        command = ["generate", *map(str, pair.options), "--prompt", "x", "--max-new-tokens", "4"]
        assert main.run(command) == 1
    assert capsys.readouterr().err == FULL_DISK


@full_disk
def test_a_full_disk_names_the_end_of_a_copy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def copy(**_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "from", None, "to")

    monkeypatch.setattr("typer.main.get_command", lambda _: SimpleNamespace(main=copy))
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main.run([]) == 1
    assert capsys.readouterr().err == FULL_DISK.replace("output", "to")


@full_disk
def test_a_process_with_a_full_disk_ends_without_a_traceback() -> None:
    """The interpreter flushes standard output once more; a command that needs no torch is quick."""
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [sys.executable, "-m", "peagle", "catalog"],
            env=environment(),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert (result.returncode, result.stderr) == (1, FULL_DISK)


def test_libraries_warn_developers_and_peagle_warns_users() -> None:
    code = """
import logging, sys, warnings
from peagle.cli import main as command

def run():
    import torch
    # As code of these modules warns.
    exec("import warnings; warnings.warn('of peagle', stacklevel=3)", {"__name__": "peagle.disk"})
    exec("import warnings; warnings.warn('of a library', stacklevel=2)", {"__name__": "torch.nn"})
    torch.tensor([1.0], requires_grad=True).sum().to(torch.cfloat).to(torch.float).backward()
    logging.getLogger("torch._inductor").warning("of a logger of torch")
    return 0

command.run = run
command.main()
"""
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True
    )
    assert (result.returncode, result.stderr) == (0, "peagle: warning: of peagle\n")
