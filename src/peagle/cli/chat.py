"""`peagle chat`: a conversation in the terminal, or through a pipe."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from peagle.bundled import BUNDLED_TARGET
from peagle.cli import groups
from peagle.cli.flags import Flag, Given, takes
from peagle.cli.groups import Format, OutputFormat
from peagle.cli.settings import Layer, Setting, Settings, environment_layers, file_layer
from peagle.cli.setup import Setup, name_target
from peagle.cli.terminal import dim, interrupt_asks
from peagle.errors import UserError

if TYPE_CHECKING:
    from peagle.cli.conversation import LocalModel, RemoteModel

EXAMPLES = """
A chat model, in a folder or on the hub, with or without a draft head:
  peagle chat Qwen/Qwen3-0.6B
  peagle chat --target ./Qwen3-8B --draft ./peagle-head --no-thinking --system 'Be brief.'

Drafts looked up in the conversation; a longer answer, another temperature:
  peagle chat --target ./Qwen3-0.6B --method ngram --max-new-tokens 8000 --temperature 0.6

A model without a chat template, or in place of its own:
  peagle chat --target ./model --chat-template template.jinja

A model that `peagle serve` serves; its key, if it wants one, in the variable PEAGLE_API_KEY:
  peagle chat --server http://127.0.0.1:8000 -k 3

Through a pipe, one message a line; for a program, one JSON object an answer:
  printf 'Hello\\nAnd in French?\\n' | peagle chat --target ./Qwen3-0.6B --format json
"""

MAX_NEW_TOKENS = 2048
_LENGTH = f"{MAX_NEW_TOKENS}; with --server, as many as there is room for"
_OWN_SOURCE = "peagle chat"
_K = "speculative.num_speculative_tokens"
_DEFAULTS = Layer(
    {
        "engine.max_num_seqs": Setting(1, _OWN_SOURCE),
        "sampling.max_tokens": Setting(MAX_NEW_TOKENS, _OWN_SOURCE),
    }
)
# Fields that a generation_config.json may set.
_OF_MODEL = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")


def _for_chat(flag: Flag) -> Flag:
    """Return a flag with this command's defaults: one conversation, the model's own sampling."""
    if flag.key == "target":
        return replace(flag, default="the bundled code model, which needs --chat-template")
    if flag.key == "sampling.max_tokens":
        return replace(flag, help="Most tokens of an answer.", default=_LENGTH)
    if flag.key == "sampling.seed":
        return replace(flag, help="The same seed gives the same answers.", default="the engine's")
    if flag.key.removeprefix("sampling.") in _OF_MODEL:
        return replace(flag, default=f"the model's own, else {flag.shown_default}")
    return flag


_FLAGS = tuple(
    _for_chat(flag)
    for flag in (
        *groups.MODEL,
        *groups.SPECULATION,
        *groups.SAMPLING,
        *groups.FINER_SAMPLING,
        *groups.STRUCTURE,
        *groups.ENGINE,
        *groups.SETTINGS,
    )
    if flag.key != "engine.max_num_seqs"
)


@takes(*_FLAGS)
def chat(
    given: Given,
    target_model: groups.Model = None,
    system: str | None = typer.Option(None, metavar="TEXT", help="The system message."),
    thinking: bool | None = typer.Option(
        None,
        "--thinking/--no-thinking",
        help="Whether a thinking model reasons first; the reasoning is dim, beside the answer.",
        show_default="what its chat template does",
    ),
    chat_template: str | None = typer.Option(
        None,
        metavar="FILE",
        help="Jinja template, or the name of one of the model's.",
        show_default="the model's",
    ),
    server: str | None = typer.Option(
        None,
        metavar="URL",
        help="Talk with a model on a server, like http://127.0.0.1:8000; its key, if it wants "
        "one, is read from PEAGLE_API_KEY.",
        show_default="a model in this process",
    ),
    model: str | None = typer.Option(
        None, metavar="NAME", help="Name of the model on the server.", show_default="its first"
    ),
    output_format: Format = OutputFormat.TEXT,
) -> None:
    """Talk with a model in the terminal.

    Answers stream to standard output, statistics go to standard error.
    /help lists the commands: /new, /undo, /stats, /save FILE, /exit.
    """
    name_target(given, target_model)
    if server is not None:
        speaker = _remote(given, server, model, thinking, chat_template)
        _converse(speaker, f"{speaker.name} on {server}", system, output_format)
        return
    if model is not None:
        raise UserError(
            f"--model {model!r} is for --server; name a model here with --target {model}, or as "
            f"the first word: peagle chat {model}."
        )
    setup = Setup(given, _DEFAULTS)
    if "show_config" in given:
        setup.show(of_model=_OF_MODEL)
        return
    template: dict[str, Any] = {"chat_template": chat_template, "thinking": thinking}
    if chat_template and Path(chat_template).is_file():
        template["chat_template"] = Path(chat_template)
    _converse(_local(setup, system, template), setup.target, system, output_format)


def _local(setup: Setup, system: str | None, template: dict[str, Any]) -> LocalModel:
    """Load the model of a setup."""
    setup.check_paths()
    from peagle.chat import may_have_template
    from peagle.models.loading import resolve_model

    folder = resolve_model(setup.target, setup.settings.value("revision"))
    if template["chat_template"] is None and not may_have_template(folder):
        raise _no_template(setup)
    setup.prepare()
    _check_template(folder, setup, system, template)
    llm = setup.load(folder)
    from peagle.cli.conversation import LocalModel

    return LocalModel(llm, setup.settings.build("sampling", llm.default_params()), **template)


def _remote(
    given: Given, url: str, name: str | None, thinking: bool | None, chat_template: str | None
) -> RemoteModel:
    """Return the model of a server, with the given sampling options."""
    for_servers = ("config", "no_speculation", _K)
    foreign = [
        setting.source
        for key, setting in given.items()
        if not key.startswith("sampling.") and key not in for_servers
    ]
    foreign += ["--chat-template"] if chat_template else []
    if foreign:
        raise UserError(
            f"{foreign[0]} and --server contradict each other: the server has its model loaded "
            "already. Leave one of them out."
        )
    file = given.value("config")
    typed = Layer({key: s for key, s in given.items() if key.startswith("sampling.")})
    layers = [] if file is None else [file_layer(file)]
    settings = Settings(*layers, *environment_layers(os.environ), typed)
    from peagle.cli.conversation import RemoteModel
    from peagle.client.api import KEY_VARIABLE, ApiClient, key_from_environment
    from peagle.client.fields import sampling_fields

    fields = sampling_fields(settings.build("sampling"), settings.section("sampling"))
    if thinking is not None:
        fields["chat_template_kwargs"] = {"enable_thinking": thinking}
    k = 0 if "no_speculation" in given else given.value(_K)
    client = ApiClient(url, key_from_environment(KEY_VARIABLE), option="--server")
    return RemoteModel(client, name, fields, num_speculative_tokens=k)


def _converse(
    model: LocalModel | RemoteModel, name: str, system: str | None, output_format: OutputFormat
) -> None:
    """Talk until the input ends; exit with status 2 if a message in a pipe got no answer."""
    from peagle.cli.conversation import Conversation, JsonScreen, TextScreen

    is_text = output_format is OutputFormat.TEXT
    is_live = is_text and sys.stdin.isatty() and sys.stdout.isatty()
    if is_live:
        k = model.num_speculative_tokens
        drafting = f"{k} draft tokens a step" if k else "plain decoding"
        _aside(f"{name}, {drafting}. /help lists the commands, Ctrl-D leaves.")
    conversation = Conversation(model, system)
    screen = TextScreen(is_live) if is_text else JsonScreen()
    all_answered = True
    for line in _typed_lines() if is_live else _piped_lines():
        is_command = line.startswith("/") and not line.startswith("//")
        try:
            if is_command:
                _aside(conversation.command(line))
            elif line.strip():
                # In a pipe, Ctrl-C ends the program as usual.
                with interrupt_asks() if is_live else nullcontext(lambda: False) as stopped:
                    for piece in conversation.say(line.removeprefix("/"), stopped):
                        screen.show(piece)
                screen.end(conversation)
        except UserError as error:
            all_answered = False
            print(f"peagle: error: {error}", file=sys.stderr)
            if not is_command:
                screen.refuse(conversation, str(error))
        if conversation.is_over:
            break
    if not (all_answered or is_live):
        raise typer.Exit(2)


def _typed_lines() -> Iterator[str]:
    """Yield lines from a terminal, with line editing and a history."""
    with suppress(ImportError):
        import readline  # noqa: F401 (input() uses it once it is imported)
    while True:
        try:
            line = input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            _aside("Ctrl-D or /exit leaves.")
            continue
        except UnicodeDecodeError:
            _aside("That was not UTF-8 text.")
            continue
        yield line


def _piped_lines() -> Iterator[str]:
    try:
        for line in sys.stdin:
            yield line.rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise UserError(
            f"Standard input is not UTF-8 text (byte {error.object[error.start]:#04x}); expected "
            "one message a line."
        ) from None


def _aside(text: str) -> None:
    if text:
        print(dim(text, sys.stderr), file=sys.stderr, flush=True)


def _check_template(
    folder: Path, setup: Setup, system: str | None, template: dict[str, Any]
) -> None:
    """Render a first message, so that a wrong template is refused before weights are loaded."""
    from peagle.chat import render_chat
    from peagle.models.target import load_tokenizer

    tokenizer = load_tokenizer(folder)
    name = template["chat_template"]
    own: Any = getattr(tokenizer, "chat_template", None)
    if name is None and not own:
        raise _no_template(setup)
    named = own if isinstance(own, dict) else {}
    if isinstance(name, str) and name not in named and not ("{{" in name or "{%" in name):
        there = f", nor one of the model's templates ({', '.join(sorted(named))})" if named else ""
        raise UserError(f"--chat-template {name!r} is not a file{there}. Check the path.")
    messages = [{"role": "user", "content": "Hello"}]
    with _naming("--chat-template" if name else ""):
        render_chat(tokenizer, messages, chat_template=name)
    with _naming("--no-thinking" if template["thinking"] is False else "--thinking"):
        render_chat(tokenizer, messages, **template)
    if system is not None:
        with _naming("--system"):
            render_chat(tokenizer, [{"role": "system", "content": system}, *messages], **template)


def _no_template(setup: Setup) -> UserError:
    is_bundled = setup.target == str(BUNDLED_TARGET)
    return UserError(
        f"{'The bundled code model' if is_bundled else repr(setup.target)} has no chat template, "
        "so it is no chat model. Name one that has, like --target Qwen/Qwen3-0.6B, give it a "
        "template with --chat-template FILE, or let it complete text with `peagle generate`."
    )


@contextmanager
def _naming(option: str) -> Iterator[None]:
    """Add the option to the message of a UserError."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{option}: {error}" if option else str(error)) from None
