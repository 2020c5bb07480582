"""Groups of options composed into commands."""

import inspect
from dataclasses import dataclass, fields
from typing import Annotated, Any

import pytest
import typer

from peagle.cli import bench, chat, data, demo, eval, generate, tune
from peagle.cli.flags import Flag, Given, group, pick_flags, spread, takes
from peagle.cli.settings import SECTIONS, Setting
from peagle.errors import UserError

FLAGS = group(
    "Things",
    """
    --top-k INT
        Most likely tokens.
    --no-cache = engine.enable_prefix_caching
        No cache.
    --round TEXT = shape
        A shape.
    --square TEXT = shape
        Another shape.
    --word WORD ... = words
        Some words. [default: none]
    """,
    section="sampling",
)


def called(*arguments: str, flags: tuple[Flag, ...] = FLAGS) -> tuple[Given, int]:
    """What a command with these flags and one option of its own got."""
    got: list[Any] = []

    @takes(*flags)
    def command(given: Given, size: Annotated[int, typer.Option(help="Its own.")] = 3) -> None:
        got.append((given, size))

    app = typer.Typer(add_completion=False)
    app.command()(command)
    typer.main.get_command(app).main(args=list(arguments), standalone_mode=False)
    return got[0]


def test_a_command_gets_what_was_given_and_nothing_else() -> None:
    assert called() == ({}, 3)
    given, size = called("--top-k", "0", "--no-cache", "--word", "a", "--word", "b", "--size", "4")
    assert size == 4
    assert given == {
        "sampling.top_k": Setting(0, "--top-k"),
        "engine.enable_prefix_caching": Setting(False, "--no-cache"),
        "words": Setting(["a", "b"], "--word"),
    }
    assert (given.value("words"), given.value("shape"), given.value("shape", 1)) == (
        ["a", "b"],
        None,
        1,
    )


def test_flags_of_one_key_exclude_each_other() -> None:
    assert called("--square", "x")[0] == {"shape": Setting("x", "--square")}
    with pytest.raises(UserError, match="--round and --square contradict each other; leave one"):
        called("--square", "x", "--round", "y")


def test_a_value_that_cannot_be_read_names_its_flag() -> None:
    def refuse(text: str) -> None:
        raise UserError(f"{text!r} is wrong.")

    with pytest.raises(UserError, match="--shape: 'x' is wrong"):
        called("--shape", "x", flags=(Flag("shape", str, "A shape.", read=refuse),))


def test_the_default_shown_is_that_of_the_configuration() -> None:
    by_name = {flag.shown_name: flag.shown_default for flag in FLAGS}
    assert by_name["--top-k"] == "0"
    assert set(by_name.values()) == {"0", "none", ""}
    assert [flag.shown_name for flag in pick_flags(FLAGS, "shape")] == ["--round", "--square"]


@dataclass(frozen=True)
class Options:
    """Options as a command declares them: a required argument, a default, an annotation."""

    file: str = typer.Argument(...)
    size: int = typer.Option(3, help="A size.")
    name: Annotated[str | None, typer.Option("--called")] = None


@pytest.mark.parametrize("flags", [None, FLAGS])
def test_each_field_of_a_dataclass_is_an_option(flags: tuple[Flag, ...] | None) -> None:
    got: list[Any] = []

    @spread
    def plain(options: Options) -> None:
        """Its help."""
        got.append(options)

    @takes(*(flags or ()))
    @spread
    def composed(given: Given, options: Options) -> None:
        """Its help."""
        got.append((given.value("sampling.top_k"), options))

    app = typer.Typer(add_completion=False)
    app.command()(plain if flags is None else composed)
    command = typer.main.get_command(app)
    assert command.help == "Its help." and command.params[0].name == "file"

    def run(*arguments: str) -> Any:
        command.main(args=list(arguments), standalone_mode=False)
        return got.pop()

    if flags is None:
        assert run("a") == Options("a", 3, None)
        assert run("a", "--size", "4", "--called", "b") == Options("a", 4, "b")
    else:
        assert run("a", "--top-k", "5", "--size", "4") == (5, Options("a", 4, None))


@pytest.mark.parametrize(
    "command",
    [generate.generate, chat.chat, demo.demo, bench.bench, eval.eval, tune.tune, data.regenerate],
)
def test_commands_have_every_option_once(command: Any) -> None:
    names = list(inspect.signature(command).parameters)
    assert len(names) == len(set(names)) and "given" not in names


def test_generate_has_a_flag_for_every_sampling_parameter() -> None:
    from peagle.cli import groups

    flags = groups.SAMPLING + groups.FINER_SAMPLING + groups.STRUCTURE + groups.RESULTS
    keys = {f"sampling.{one.name}" for one in fields(SECTIONS["sampling"])}
    # What one request drafts otherwise than the others means nothing where there is only one set of
    # parameters, and markers are for those that parse chats.
    without = {
        f"sampling.{one}" for one in ("num_speculative_tokens", "prompt_lookup", "prediction")
    }
    without |= {"sampling.marker_token_ids", "sampling.correction"}
    assert {flag.key for flag in flags} == keys - without
