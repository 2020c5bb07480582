"""Stages of commands of peagle, run one after another, and the journal of the finished ones."""

import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import typer

from peagle.cli.main import INTERRUPTED
from peagle.cli.terminal import bright, command_prefix
from peagle.errors import UserError

_VERSION = 1


@dataclass(frozen=True, slots=True)
class Stage:
    """A finished stage: a command, or several that ran side by side.

    Attributes:
        name: name of the stage.
        arguments: words of the command behind `peagle`.
        seconds: seconds of the stage, without interrupted parts.
        outputs: size in bytes of each file that the stage wrote.
        result: figures of the command.
        beside: words of each further command.
        results: figures of each further command.
    """

    name: str
    arguments: list[str]
    seconds: float
    outputs: dict[str, int] = field(default_factory=dict)
    result: dict[str, Any] = field(default_factory=dict)
    beside: list[list[str]] = field(default_factory=list)
    results: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        """Return whether all files that the stage wrote exist with their sizes."""
        return all(
            Path(name).is_file() and Path(name).stat().st_size == size
            for name, size in self.outputs.items()
        )


class Stages:
    """Runs commands, and skips those that the journal has as finished.

    Args:
        journal: JSON file of the finished stages, and of the options that decide them.
        options: options of this run.
        text_output: file descriptor for the text that commands print for people.

    Raises:
        UserError: the journal was begun with other options, or is damaged.
    """

    def __init__(self, journal: Path, options: Mapping[str, Any], text_output: int) -> None:
        self._journal, self._text_output = journal, text_output
        self._options: dict[str, Any] = {}
        self.done: list[Stage] = []
        if journal.is_file():
            self._read()
        self.fix(options)

    def seconds(self, *, without: Collection[str] = ()) -> float:
        """Return the seconds of the finished stages, except those named in `without`."""
        return sum(stage.seconds for stage in self.done if stage.name not in without)

    def fix(self, options: Mapping[str, Any]) -> None:
        """Add options that all further stages must share.

        Raises:
            UserError: earlier stages had another value of one.
        """
        for name, value in json.loads(json.dumps(dict(options))).items():
            old = self._options.setdefault(name, value)
            if old != value:
                raise UserError(
                    f"{str(self._journal.parent.parent)!r} was begun with {name} {old!r}, now it "
                    f"is {value!r}; go on with the same options, or choose another --output."
                )

    def fixed(self, name: str, find: Callable[[], Any]) -> Any:
        """Return an option of the journal; the first call takes it from `find`."""
        if name not in self._options:
            self._options[name] = find()
        return self._options[name]

    def find(self, name: str) -> Stage | None:
        """Return a finished stage whose files are whole; None without one."""
        found = next((stage for stage in self.done if stage.name == name), None)
        return found if found is not None and found.is_whole else None

    def run(
        self,
        name: str,
        arguments: Sequence[str | Path],
        outputs: Sequence[Path] = (),
        *,
        result: Callable[[], dict[str, Any]] | None = None,
        going_on: Sequence[str] = (),
        beside: Sequence[Sequence[str | Path]] = (),
    ) -> Stage:
        """Run a command of peagle, shown as a line to copy; return a finished stage at once.

        Args:
            name: name of the stage.
            arguments: words of the command.
            outputs: files that the stage writes; a fit writes no correction that drafts no better.
            result: reads the figures from files; without it, standard output is one JSON object.
            going_on: further words that let the command resume after an interruption.
            beside: words of further commands that run side by side with the first; each prints one
                JSON object, and the progress of the first command stands for all.

        Raises:
            typer.Exit: the command failed and printed the reason; running it again resumes there.
            KeyboardInterrupt: the command was interrupted.
        """
        words, *others = [[str(word) for word in one] for one in (arguments, *beside)]
        before = self.find(name)
        if before is not None and (before.arguments, before.beside) == (words, others):
            return before
        commands = [[*words, *going_on], *others]
        for one in commands:
            line = f"{command_prefix()} {shlex.join(one)}"
            print(bright(line, sys.stderr), file=sys.stderr, flush=True)
        start = time.monotonic()
        output = subprocess.PIPE if result is None else self._text_output
        with _stoppable(commands, output) as processes:
            texts = [process.communicate()[0] for process in processes]
        if failed := [process.returncode for process in processes if process.returncode]:
            print(
                f"peagle: the stage {name!r} ended with status {failed[0]}; "
                "the same peagle make-head command goes on there",
                file=sys.stderr,
            )
            raise typer.Exit(failed[0] if failed[0] > 0 else 1)
        stage = Stage(
            name,
            words,
            time.monotonic() - start,
            {str(path.absolute()): path.stat().st_size for path in outputs if path.is_file()},
            json.loads(texts[0]) if result is None else result(),
            others,
            list(map(json.loads, texts[1:])),
        )
        self.done = [one for one in self.done if one.name != name] + [stage]
        self._write()
        return stage

    def _write(self) -> None:
        from peagle.models.checkpoint.files import write_json

        data = {
            "format_version": _VERSION,
            "options": self._options,
            "stages": [asdict(stage) for stage in self.done],
        }
        write_json(self._journal, data)

    def _read(self) -> None:
        try:
            data = json.loads(self._journal.read_text(encoding="utf-8"))
            self._options = dict(data["options"])
            self.done = [Stage(**stage) for stage in data["stages"]]
        except (ValueError, KeyError, TypeError):
            raise UserError(
                f"{str(self._journal)!r} is damaged; remove it to measure and begin again."
            ) from None


@contextmanager
def _stoppable(
    commands: Sequence[Sequence[str]], output: Any
) -> Iterator[list[subprocess.Popen[str]]]:
    """Start commands of peagle that end with this process.

    Ctrl-C reaches all, and the commands save their work; SIGTERM is passed on as Ctrl-C. The
    messages of the commands behind the first are shown only if they fail.
    """
    with ExitStack() as stack:
        said = [stack.enter_context(TemporaryFile("w+", encoding="utf-8")) for _ in commands[1:]]
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "peagle", *words], stdout=output, stderr=errors, text=True
            )
            for words, errors in zip(commands, (None, *said), strict=True)
        ]
        stopped = False

        def stop(number: int, frame: object) -> None:
            nonlocal stopped
            stopped = True
            if number == signal.SIGTERM:
                for process in processes:
                    process.send_signal(signal.SIGINT)

        handlers: dict[int, Callable[..., Any] | int | None] = {
            number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield processes
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            for process in processes:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        for process, errors in zip(processes[1:], said, strict=True):
            if process.returncode and not stopped:
                errors.seek(0)
                print(errors.read()[-2000:], end="", file=sys.stderr)
    if stopped and processes[0].returncode == INTERRUPTED:
        raise SystemExit(INTERRUPTED)  # the command has said so
    if stopped:
        raise KeyboardInterrupt
