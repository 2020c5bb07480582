"""The `peagle` command: finds the subcommand, runs it, turns errors into exit statuses.

Status 0: done. 1: the reader of the output went away, or there is no room for it. 2: a mistake in
the input (`UserError` or usage), or a disk that is full. 3: `adapt` keeps the old head. 130:
interrupted. A fault of peagle shows its traceback.
"""

import errno
import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from textwrap import indent
from typing import Any, NoReturn, cast

import typer
from typer.core import TyperCommand, TyperGroup

from peagle import __version__
from peagle.disk import FULL_DISK_ERRORS
from peagle.errors import UserError

INTERRUPTED = 130
_UNWRITABLE_ERRORS = (errno.EPIPE, *FULL_DISK_ERRORS)
_WRONG_PATH_ERRORS = (errno.EACCES, errno.EISDIR, errno.ENOTDIR, errno.ELOOP)

# Name and one-line help of each command. The command is the function of that name (_ for -) in the
# module peagle.cli.NAME, whose EXAMPLES close the help page; a call of the command imports it.
COMMANDS = {
    "adapt": "Make a better draft head from recorded traffic, if it proves to be better.",
    "bench": "Measure throughput and latency by method, K and concurrency.",
    "catalog": "List the models with published draft heads, and what it takes to deploy them.",
    "chat": "Talk with a model in the terminal.",
    "convert": "Rewrite a draft head in the style of vLLM or of speculators.",
    "data": "Make, prepare and inspect training data.",
    "demo": "Complete HumanEval prompts with plain decoding, EAGLE-3 and P-EAGLE, and compare.",
    "deploy": "Deploy a model and its draft head on Amazon SageMaker.",
    "doctor": "Find out why a draft head accepts less than it should.",
    "eval": "Measure the acceptance of draft heads, or certify that decoding is lossless.",
    "generate": "Complete prompts of your own.",
    "make-head": "Make a draft head for a model from nothing, in the minutes that you give.",
    "push": "Push a draft head and its model card to a Hugging Face hub.",
    "records": "List recorded traffic of a server, and delete that of an API key.",
    "serve": "Serve a model over HTTP, compatible with OpenAI's API.",
    "train": "Train a draft head by a TOML file.",
    "tune": "Choose K by batch size for this machine and head.",
    "watch": "Follow the acceptance of a running server, and warn where it falls.",
}

CONTEXT = {"help_option_names": ["-h", "--help"]}
# The class of click, or of the copy inside typer, by the version of typer.
_UsageError: Any = typer.BadParameter.__base__


def with_examples(kind: type[Any], examples: str) -> type[Any]:
    """Return a kind of command whose help page ends with these examples, unchanged."""

    class WithExamples(kind):
        def format_help(self, ctx: Any, formatter: Any) -> None:
            super().format_help(ctx, formatter)
            formatter.write(f" Examples:\n{indent(examples.strip(), '   ')}\n")

    return WithExamples


def command_of(name: str, function: Callable[..., None], examples: str) -> TyperCommand:
    """Return a function as a command, with examples on its help page."""
    app = typer.Typer(add_completion=False, context_settings=CONTEXT)
    app.command(name, cls=with_examples(TyperCommand, examples))(function)
    return cast(TyperCommand, typer.main.get_command(app))


class LazyCommand(TyperCommand):
    """A command's name and short help; the command is imported when it is called."""

    def make_context(self, *args: Any, **keywords: Any) -> Any:
        return self.load().make_context(*args, **keywords)

    def get_short_help_str(self, limit: int = 0) -> str:
        return self.help or ""

    def load(self) -> TyperCommand | TyperGroup:
        """Import the command, which may be a group of commands."""
        assert self.name is not None
        name = self.name.replace("-", "_")
        module = import_module(f"peagle.cli.{name}")
        if isinstance(found := getattr(module, name), typer.Typer):
            return cast(TyperGroup, typer.main.get_command(found))
        return command_of(self.name, found, module.EXAMPLES)


class LazyGroup(TyperGroup):
    """The group of the commands in `COMMANDS`."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for name, text in COMMANDS.items():
            self.add_command(LazyCommand(name, help=text))


def _show_version(asked: bool) -> None:
    if asked:
        print(f"peagle {__version__}")
        raise typer.Exit


# This page does without rich, whose import takes longer than everything else here.
app = typer.Typer(
    cls=LazyGroup,
    add_completion=False,
    invoke_without_command=True,
    context_settings=CONTEXT,
    rich_markup_mode=None,
)


@app.callback()
def peagle(
    context: typer.Context,
    version: bool = typer.Option(
        False, "--version", callback=_show_version, is_eager=True, help="Show the version."
    ),
) -> None:
    """Parallel-drafting speculative decoding (P-EAGLE) for Hugging Face causal language models."""
    if context.invoked_subcommand is None:
        print(context.get_help())


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, by default that of this process, and return its exit status."""
    try:
        status = typer.main.get_command(app).main(
            args=arguments, prog_name="peagle", standalone_mode=False
        )
        sys.stdout.flush()
    except UserError as error:
        return _fail(str(error))
    except _UsageError as error:
        command = error.ctx.command_path if error.ctx else "peagle"
        return _fail(f"{error.format_message()}{_right_name(error)}\nTry: {command} --help")
    except (KeyboardInterrupt, typer.Abort):
        status = INTERRUPTED
    except OSError as error:
        if error.errno in _WRONG_PATH_ERRORS and error.filename is not None:
            path = str(error.filename)
            return _fail(f"{path!r} cannot be used: {error.strerror}. Correct the path.")
        if error.errno not in _UNWRITABLE_ERRORS:
            raise
        # The interpreter flushes standard output again at its end, which must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno != errno.EPIPE:
            where = error.filename2 or error.filename or "output"
            text = f"{error.strerror}: {where}. Make room, then run the command again."
            print(f"peagle: error: {text}", file=sys.stderr)
        return 1
    if status == INTERRUPTED:
        print("peagle: interrupted", file=sys.stderr)
    return status if isinstance(status, int) else 0


def _right_name(error: Any) -> str:
    """Name the target's option to a user who typed --model, as other programs call it."""
    if getattr(error, "option_name", None) != "--model" or error.ctx is None:
        return ""
    options = error.ctx.command.params
    if not any("--target" in option.opts for option in options):
        return ""
    is_argument = any(getattr(option, "metavar", None) == "[MODEL]" for option in options)
    first = f", or as the first word: {error.ctx.command_path} MODEL" if is_argument else ""
    return f"\nThe target is named with --target MODEL{first}."


def _fail(message: str) -> int:
    print(f"peagle: error: {message}", file=sys.stderr)
    return 2


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    """Print a warning of peagle; warnings of libraries are for developers."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__") == "warnings":
        frame = frame.f_back
    module = str(frame.f_globals.get("__name__")).partition(".")[0]
    # Code in C++ has no frame of its own; torch marks its warnings in the text.
    if module == "peagle" and "(Triggered internally at" not in str(message):
        print(f"peagle: warning: {message}", file=sys.stderr)


def main() -> NoReturn:
    """Run the `peagle` script and exit with its status."""
    warnings.showwarning = _show_warning
    # Torch reads both at its import: the levels of its loggers and of the log of its C++ code.
    os.environ.setdefault("TORCH_LOGS", "-all")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    status: Any = INTERRUPTED
    try:
        status = run()
    except KeyboardInterrupt:  # the second one, while the first is told
        pass
    except SystemExit as end:
        status = end.code
    if status == INTERRUPTED:
        # One more Ctrl-C would show a traceback of what the interpreter does at its end.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(status)


if __name__ == "__main__":
    main()
