"""Checks that a command of a page would be understood, without running it."""

import argparse
import re
import runpy
import sys
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import typer

from peagle.cli.main import app
from tests.docs.pages import ROOT


class NotUnderstoodError(Exception):
    """A command that does not exist, or arguments that it does not take."""


def complaints(check: Callable[[Any], Any], shown: Iterable[Any]) -> list[str]:
    """Return what a check says against some commands or code; nothing where it takes all."""
    found = []
    for one in shown:
        try:
            check(one)
        except NotUnderstoodError as error:
            found.append(str(error))
    return found


def check(words: list[str]) -> None:
    """Check one command of a shell block.

    Args:
        words: the program and its arguments.

    Raises:
        NotUnderstoodError: the program, the file or an option does not exist.
    """
    while "=" in words[0] and words[0].partition("=")[0].isidentifier():
        words = words[1:]  # variables before the program
        if not words:
            return
    program, *arguments = words
    if program in _CHECKS:
        _CHECKS[program](arguments)
    elif "/" in program:
        _exists(program)
        if "peagle" in arguments:
            check_peagle(arguments[arguments.index("peagle") + 1 :])
    else:
        raise NotUnderstoodError(f"no known program: {program!r} of {words}")


def check_peagle(arguments: list[str]) -> Any:
    """Let peagle's own command line parse the arguments; it runs nothing.

    Returns:
        The click context of the command.

    Raises:
        NotUnderstoodError: it refuses them.
    """
    command: Any = typer.main.get_command(app)
    context: Any = None
    name, rest = "peagle", list(arguments)
    try:
        while True:
            load = getattr(command, "load", None)
            command = load() if load is not None else command
            context = command.make_context(name, rest, parent=context)
            rest = [*context._protected_args, *context.args]
            if not rest or not hasattr(command, "resolve_command"):
                return context
            name, command, rest = command.resolve_command(context, rest)
    except typer.Exit:
        return context  # --help and --version
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        raise NotUnderstoodError(f"peagle {' '.join(arguments)}: {error}") from error


def check_span(span: str) -> None:
    """Check the commands and options of inline code like `peagle deploy sagemaker delete NAME`.

    Raises:
        NotUnderstoodError: a command or an option does not exist.
    """
    words = span.split()[1:]
    command: Any = typer.main.get_command(app)
    while words and hasattr(command, "get_command"):
        if re.search(r"[^a-z|-]|^-", words[0]):
            break
        found = [command.get_command(None, name) for name in words[0].split("|")]
        if None in found:
            raise NotUnderstoodError(f"{span!r}: there is no command {words[0]!r}")
        command = getattr(found[0], "load", lambda one=found[0]: one)()
        words = words[1:]
    known = {"--help", "-h"}.union(*(one.opts + one.secondary_opts for one in command.params))
    for word in words:
        if word == "--":
            break
        if re.match(r"--?[a-z]", word) and (option := word.partition("=")[0]) not in known:
            raise NotUnderstoodError(f"{span!r}: there is no option {option}")


class _ParsedError(Exception):
    """A script's arguments were understood."""


def _check_python(arguments: list[str]) -> None:
    if arguments[0] == "-c":
        compile(arguments[1], "-c", "exec")
    elif arguments[:2] == ["-m", "pytest"]:
        for path in arguments[2:]:
            _exists(path)
    elif arguments[:2] == ["-m", "peagle"]:
        check_peagle(arguments[2:])
    elif arguments[0] == "-m":
        if arguments[1] != "venv":
            raise NotUnderstoodError(f"no known module: python {' '.join(arguments)}")
    else:
        _parse_script(_exists(arguments[0]), arguments[1:])


def _parse_script(script: Path, arguments: list[str]) -> None:
    """Run a script up to where argparse has read its arguments, if it uses argparse."""
    text = script.read_text()
    if "argparse" not in text and "parse_args" not in text:
        compile(text, str(script), "exec")
        return
    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(parser: argparse.ArgumentParser, args: Any = None, space: Any = None) -> Any:
        parse(parser, args, space)
        raise _ParsedError

    names = set(sys.modules)
    try:
        with (
            patch.object(argparse.ArgumentParser, "parse_args", parse_and_stop),
            patch.object(sys, "argv", [str(script), *arguments]),
            patch.object(sys, "path", [str(script.parent), *sys.path]),
        ):
            runpy.run_path(str(script), run_name="__main__")
    except _ParsedError:
        return
    except SystemExit as error:
        raise NotUnderstoodError(f"python {script.name} {' '.join(arguments)}") from error
    finally:
        for name in set(sys.modules) - names:
            file = getattr(sys.modules[name], "__file__", None)
            if file and Path(file).parent == script.parent:
                del sys.modules[name]
    raise NotUnderstoodError(f"{script.name} read no arguments")


def _check_torchrun(arguments: list[str]) -> None:
    if "peagle" not in arguments:
        raise NotUnderstoodError(f"torchrun {' '.join(arguments)} runs no peagle")
    check_peagle(arguments[arguments.index("peagle") + 1 :])


def _check_make(arguments: list[str]) -> None:
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for word in arguments:
        if "=" not in word and word not in targets:
            raise NotUnderstoodError(f"make has no target {word!r}")


def _check_pip(arguments: list[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for word in arguments:
        if re.match(r"peagle(?![\w.-])", word):
            raise NotUnderstoodError(
                f"{word}: no package index has peagle; name a clone or a wheel"
            )
        if extras := re.search(r"(?:\.whl|\.)\[(.*)\]$", word):
            unknown = set(extras[1].split(",")) - set(project["optional-dependencies"])
            if unknown:
                raise NotUnderstoodError(f"{word}: there is no extra {sorted(unknown)}")


def _check_docker(arguments: list[str]) -> None:
    if "--file" in arguments:
        _exists(arguments[arguments.index("--file") + 1])


def _check_aws(arguments: list[str]) -> None:
    if "--template-file" in arguments:
        _exists(arguments[arguments.index("--template-file") + 1])


def _exists(name: str) -> Path:
    if not (ROOT / name).exists():
        raise NotUnderstoodError(f"there is no {name!r} in the repository")
    return ROOT / name


_OTHERS = ("cd", "curl", "export", "guidellm", "gzip", "head", "mkdir", "sha256sum", "source")
_OTHERS += ("chmod", "openssl", "tail")
_CHECKS = {
    "peagle": check_peagle,
    "python": _check_python,
    "torchrun": _check_torchrun,
    "make": _check_make,
    "pip": _check_pip,
    ".venv-vllm/bin/pip": _check_pip,
    "docker": _check_docker,
    "aws": _check_aws,
    **dict.fromkeys(_OTHERS, lambda arguments: None),
}
