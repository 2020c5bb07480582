"""Commands of peagle that run one after another, and the journal of those that are done."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import typer

from peagle.cli.terminal import bright, command_prefix
from peagle.errors import UserError

_VERSION = 1


@dataclass(frozen=True, slots=True)
class Stage:
    """A command that is done.

    Attributes:
        name: of the stage.
        arguments: words of the command behind `peagle`.
        seconds: what it took; parts that were interrupted do not count.
        outputs: size of each file that it wrote.
        result: figures of it.
    """

    name: str
    arguments: list[str]
    seconds: float
    outputs: dict[str, int] = field(default_factory=dict)
    result: dict[str, Any] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """Whether all files that it wrote are there, as large as they were."""
        return all(
            Path(name).is_file() and Path(name).stat().st_size == size
            for name, size in self.outputs.items()
        )


class Stages:
    """Runs commands, and skips those that the journal has as done.

    Args:
        journal: JSON file of the stages that are done, and of the options that decide them.
        options: of this run.
        text_output: file descriptor that receives what commands print for people.

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
        """Return the seconds of the stages that are done, some of them left out."""
        return sum(stage.seconds for stage in self.done if stage.name not in without)

    def fix(self, options: Mapping[str, Any]) -> None:
        """Let options decide the stages from now on.

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

    def find(self, name: str) -> Stage | None:
        """Return a stage that is done and whose files are whole, None without."""
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
    ) -> Stage:
        """Run a command of peagle, shown as a line to copy; return it at once if it is done.

        Args:
            name: of the stage.
            arguments: words of the command.
            outputs: files that it writes.
            result: reads its result from files; without, its standard output is one JSON object.
            going_on: further words that let it go on with what an interrupted run left.

        Raises:
            typer.Exit: it failed, and has said why. The same command of ours goes on there.
            KeyboardInterrupt: it was interrupted.
        """
        words = [str(word) for word in arguments]
        before = self.find(name)
        if before is not None and before.arguments == words:
            return before
        line = f"{command_prefix()} {shlex.join([*words, *going_on])}"
        print(bright(line, sys.stderr), file=sys.stderr, flush=True)
        start = time.monotonic()
        output = subprocess.PIPE if result is None else self._text_output
        with _stoppable([*words, *going_on], output) as process:
            text, _ = process.communicate()
        if process.returncode:
            print(
                f"peagle: the stage {name!r} ended with status {process.returncode}; "
                "the same peagle make-head command goes on there",
                file=sys.stderr,
            )
            raise typer.Exit(process.returncode if process.returncode > 0 else 1)
        stage = Stage(
            name,
            words,
            time.monotonic() - start,
            {str(path.absolute()): path.stat().st_size for path in outputs},
            json.loads(text) if result is None else result(),
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
def _stoppable(words: Sequence[str], output: Any) -> Iterator[subprocess.Popen[str]]:
    """Start a command of peagle that ends with this process.

    Ctrl-C reaches both, and the command saves what it has; SIGTERM is handed on as one.
    """
    process: subprocess.Popen[str] = subprocess.Popen(
        [sys.executable, "-m", "peagle", *words], stdout=output, text=True
    )
    stopped = False

    def stop(number: int, frame: object) -> None:
        nonlocal stopped
        stopped = True
        if number == signal.SIGTERM:
            process.send_signal(signal.SIGINT)

    handlers: dict[int, Callable[..., Any] | int | None] = {
        number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield process
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if process.poll() is None:
            process.kill()
            process.wait()
    if stopped:
        raise KeyboardInterrupt
