"""Groups of options composed into commands."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Annotated, Any

import pytest
import typer

from peagle.cli import chat, demo, generate
from peagle.cli.flags import Flag, Given, group, pick, takes
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
    assert [flag.shown_name for flag in pick(FLAGS, "shape")] == ["--round", "--square"]


@pytest.mark.parametrize("command", [generate.generate, chat.chat, demo.demo])
def test_commands_have_every_option_once(command: Any) -> None:
    names = list(inspect.signature(command).parameters)
    assert len(names) == len(set(names)) and "given" not in names


def test_generate_has_a_flag_for_every_sampling_parameter() -> None:
    from peagle.cli import groups

    flags = groups.SAMPLING + groups.FINER_SAMPLING + groups.STRUCTURE + groups.RESULTS
    keys = {f"sampling.{one.name}" for one in fields(SECTIONS["sampling"])}
    # K of one request among others means nothing where there is only one set of parameters, and
    # markers are for those that parse chats.
    without = {"sampling.num_speculative_tokens", "sampling.marker_token_ids"}
    assert {flag.key for flag in flags} == keys - without
