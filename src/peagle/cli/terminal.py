"""Text for a terminal, and Ctrl-C from it."""

import os
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


def command_prefix() -> str:
    """Return the words that start this peagle in this folder.

    They are `peagle` if PATH leads to this environment, else the path of its script, else this
    Python with `-m peagle`.
    """
    script = Path(sys.executable).with_name("peagle")
    found = shutil.which("peagle")
    if found is not None and Path(found).absolute() == script:
        return "peagle"
    if not script.is_file():
        return f"{shlex.quote(sys.executable)} -m peagle"
    here = Path.cwd()
    shown = script.relative_to(here) if script.is_relative_to(here) else script
    return shlex.quote(str(shown))


def printable(text: str) -> str:
    """Return the text without characters that control a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def safe(text: str, stream: TextIO) -> str:
    """Return the text, without control characters if the stream is a terminal."""
    return printable(text) if stream.isatty() else text


def has_styles(stream: TextIO) -> bool:
    """Return whether a stream is a terminal with styles, and NO_COLOR is not set."""
    is_dumb = os.environ.get("TERM", "dumb") in ("dumb", "unknown")
    return stream.isatty() and not is_dumb and not os.environ.get("NO_COLOR")


def dim(text: str, stream: TextIO) -> str:
    """Return the text dimmed, if the stream has styles."""
    return f"\x1b[2m{text}\x1b[0m" if has_styles(stream) else text


def bright(text: str, stream: TextIO) -> str:
    """Return the text in bold green, if the stream has styles."""
    return f"\x1b[1;32m{text}\x1b[0m" if has_styles(stream) else text


@contextmanager
def interrupt_asks() -> Iterator[Callable[[], bool]]:
    """Turn a first Ctrl-C into a request to stop; the second interrupts.

    Yields a function that returns whether there was a request. The engine could not go on after a
    step that was interrupted in the middle.
    """
    asked = False

    def ask(number: int, frame: object) -> None:
        nonlocal asked
        asked = True
        signal.signal(number, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)
