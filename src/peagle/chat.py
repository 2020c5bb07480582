"""Conversations to prompts: chat templates, thinking mode, and answers back into conversations.

Templates come with models and are untrusted. Here they are parsed, to see which variables they
read; only the sandboxed renderer of transformers runs them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.sandbox
from jinja2.parser import Parser

from peagle.encoding import Marks, encode_text, special_tokens_of
from peagle.errors import UserError, require_characters, short_repr
from peagle.messages import (
    ChatMessage,
    Message,
    calls_of,
    checked_messages,
    in_template_form,
    tools_in_template_form,
)
from peagle.model_folder import read_json
from peagle.thinking import is_harmony

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

THINKING_VARIABLES = ("enable_thinking", "thinking")

# Filters and methods that change a text.
_CHANGES_OF_TEXT = {
    *("replace", "join", "translate", "format", "reject", "select", "map"),
    *("lower", "upper", "title", "capitalize", "swapcase", "casefold"),
}
_FILE_SUFFIXES = (".jinja", ".jinja2", ".j2")
_PROBE = "7310592846"
_RENDER_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RecursionError,
    ImportError,
)


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    chat_template: str | Path | None = None,
    thinking: bool | None = None,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool = False,
    template_kwargs: Mapping[str, Any] | None = None,
    tools: Sequence[Mapping[str, Any]] | str | None = None,
    parse_special_tokens: bool = False,
    check_text: Callable[[str], None] | None = None,
    encode: Callable[[str], list[int]] | None = None,
) -> list[int]:
    """Return the token ids of the prompt that opens the model's answer to a conversation.

    Args:
        messages: the conversation, as OpenAI's API has it; `peagle.messages` brings it into the
            form that the template reads. Other keys of a mapping reach the template as they are.
            Text parts are joined by newlines.
        chat_template: path of a .jinja file, a Jinja template, or the name of one of the
            tokenizer's templates; None takes the tokenizer's default.
        thinking: None leaves the template's default; True and False set `enable_thinking` and
            `thinking`, whichever the template reads. A template that reads neither renders the
            same for False and refuses True.
        add_generation_prompt: end with the opening of an assistant message; None does so unless
            `continue_final_message`.
        continue_final_message: leave the final message open, for the model to go on with.
        template_kwargs: further variables of the template.
        tools: JSON schemas of functions, for templates that read `tools`; or that list as JSON
            text.
        parse_special_tokens: let messages, tools and `template_kwargs` spell special tokens. They
            are text otherwise, so that the prompt has the special tokens of the template alone.
        check_text: called with the rendered text before it is encoded.
        encode: encodes a rendered text in which the conversation spells no special token; None
            takes the tokenizer.

    Raises:
        UserError: the template is unknown, does not parse or refuses the messages; a message is
            malformed; an option would have no effect on this template.
    """
    source = resolve_chat_template(tokenizer, chat_template, with_tools=bool(tools))
    facts = _facts(source)
    variables = facts.variables
    if add_generation_prompt is None:
        add_generation_prompt = not continue_final_message
    conversation = checked_messages(messages, facts.words)
    _check_ending(conversation, add_generation_prompt, continue_final_message)
    options = _template_options(variables, thinking, template_kwargs or {})
    is_without = thinking is False or _names_no_thinking(template_kwargs or {})
    formed_tools = tools_in_template_form(tools, is_harmony=is_harmony(source))
    _check_tools(formed_tools, variables)

    marks = None
    if not parse_special_tokens:
        marks = Marks(
            special_tokens_of(tokenizer),
            facts.literals,
            facts.words | facts.attributes,
            changes_text=facts.changes_text,
        )

    def render(conversation: Sequence[Mapping[str, Any]]) -> str:
        formed = in_template_form(
            conversation, knows_developer="developer" in facts.words, is_harmony=is_harmony(source)
        )
        given = {"tools": formed_tools or None, **options}
        try:
            if marks is not None:
                # Roles are words that the template knows.
                formed = [{**marks.marked(one), "role": one["role"]} for one in formed]
                given = {name: marks.marked(value) for name, value in given.items()}
            rendered: Any = tokenizer.apply_chat_template(
                formed,
                chat_template=source,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tokenize=False,
                **given,
            )
        except _RENDER_ERRORS as error:
            reason = str(error) if marks is None else marks.removed(str(error))
            raise UserError(
                f"The chat template cannot render these {len(conversation)} messages: {reason}. "
                "Change the messages accordingly, or pass another chat_template."
            ) from error
        return rendered

    try:
        rendered = render(conversation)
    except UserError:
        if all("content" in message for message in conversation):
            raise
        # Such a template reads the content of every message, of one with calls alone too.
        conversation = [{"content": "", **message} for message in conversation]
        rendered = render(conversation)
    text = rendered if marks is None else marks.removed(rendered)
    _check_developers(conversation, text, render)
    if "tool_calls" not in facts.attributes | facts.words:
        _check_calls(conversation, text)
    require_characters("The conversation, as the chat template renders it,", text)
    if check_text is not None:
        check_text(text)

    encode = encode or partial(encode_text, tokenizer, add_special_tokens=False)
    token_ids = encode(text) if marks is None else marks.encode(rendered, encode)
    if not token_ids:
        raise UserError(
            f"The chat template renders these {len(conversation)} messages as an empty prompt; "
            "pass another chat_template."
        )
    if is_without and not _switches(variables) and opens_thinking(tokenizer, token_ids):
        raise UserError(
            "No thinking was asked for, and the chat template opens the model's reasoning in every "
            f"prompt (it reads neither {' nor '.join(THINKING_VARIABLES)}); leave thinking out."
        )
    return list(token_ids)


def _check_ending(
    conversation: Sequence[Mapping[str, Any]], is_opened: bool, is_continued: bool
) -> None:
    """Refuse a prompt with two endings, or with two answers in a row."""
    if is_opened and is_continued:
        raise UserError(
            "add_generation_prompt and continue_final_message are both True; the prompt ends "
            "either in a new assistant message or in the final one. Leave one out."
        )
    if is_opened and conversation[-1]["role"] == "assistant":
        raise UserError(
            "The final message is the assistant's, and the answer would be a second one after it; "
            "set continue_final_message to go on with it, or add a user message."
        )


def _check_tools(tools: Sequence[Mapping[str, Any]], variables: frozenset[str]) -> None:
    if tools and "tools" not in variables:
        raise UserError(
            f"{len(tools)} tools were given, and the chat template does not read tools; "
            "leave them out, or pass chat_template, one that does."
        )


def _check_calls(conversation: Sequence[Mapping[str, Any]], rendered: str) -> None:
    """Raise a UserError if the template leaves out the tool calls of a message."""
    for number, message in enumerate(conversation, 1):
        which = f"Message {number} of {len(conversation)}"
        calls = calls_of(message.get("tool_calls"), which)
        if calls and "tool_calls" not in rendered:  # it may write whole messages
            raise UserError(
                f"{which} has tool calls, and the chat template does not read tool_calls: it would "
                "leave them out. Leave out the calls and their results, or pass another "
                "chat_template."
            )


def _check_developers(
    conversation: Sequence[Mapping[str, Any]],
    rendered: str,
    render: Callable[[Sequence[Mapping[str, Any]]], str],
) -> None:
    """Raise a UserError if the template leaves out a developer message."""
    for number, message in enumerate(conversation):
        if message["role"] != "developer" or message["content"].strip() in rendered:
            continue
        # The template may change the words, so it is asked again with other words.
        probe = list(conversation)
        probe[number] = {**message, "content": _PROBE}
        if _PROBE not in render(probe):
            raise UserError(
                f"Message {number + 1} of {len(conversation)} is a developer message, and the chat "
                "template would leave it out. Put its text into the first message, or pass another "
                "chat_template."
            )


def resolve_chat_template(
    tokenizer: PreTrainedTokenizerBase,
    chat_template: str | Path | None = None,
    *,
    with_tools: bool = False,
) -> str:
    """Return the Jinja source of the template that `chat_template` names, as in `render_chat`.

    Raises:
        UserError: no such template; the error names the value and the templates that exist.
    """
    own: Any = getattr(tokenizer, "chat_template", None)
    named: dict[str, str] = own if isinstance(own, dict) else {}
    if chat_template is None:
        return _default_template(own, named, with_tools)
    if not isinstance(chat_template, str | Path) or not str(chat_template).strip():
        raise UserError(f"The chat template is {chat_template!r}; expected {_choices(named)}.")
    if str(chat_template) in named:
        return named[str(chat_template)]
    if isinstance(chat_template, str) and ("{{" in chat_template or "{%" in chat_template):
        return chat_template
    if isinstance(chat_template, Path) or chat_template.endswith(_FILE_SUFFIXES):
        return _read_template(Path(chat_template))
    raise UserError(f"Unknown chat template {chat_template!r}; expected {_choices(named)}.")


def check_template_file(chat_template: str | Path | None) -> None:
    """Raise a UserError for a template file that cannot be read; no tokenizer is needed."""
    if isinstance(chat_template, Path) or (chat_template or "").endswith(_FILE_SUFFIXES):
        _read_template(Path(str(chat_template)))


def may_have_template(folder: Path) -> bool:
    """Return whether the files of a model's folder hold a chat template, without a tokenizer."""
    if any(folder.glob("chat_template*")) or (folder / "additional_chat_templates").is_dir():
        return True
    try:
        config = read_json(folder / "tokenizer_config.json")
    except FileNotFoundError:
        return False
    except (OSError, ValueError):
        return True  # the tokenizer reports the fault of the file
    return not isinstance(config, dict) or bool(config.get("chat_template"))


def _default_template(own: Any, named: Mapping[str, str], with_tools: bool) -> str:
    if isinstance(own, str) and own:
        return own
    for name in ("tool_use", "default") if with_tools else ("default",):
        if name in named:
            return named[name]
    if named:
        raise UserError(
            "The tokenizer has several chat templates and none is the default; pass chat_template, "
            f"one of: {', '.join(sorted(named))}."
        )
    raise UserError(
        "The tokenizer has no chat template, as is usual for a base model; pass chat_template (a "
        ".jinja file or a Jinja template), or use generate with a plain prompt."
    )


def _choices(named: Mapping[str, str]) -> str:
    names = f"one of the tokenizer's ({', '.join(sorted(named))})" if named else ""
    ways = [names, "a path to a .jinja file", "a Jinja template, with '{{' or '{%'"]
    note = "" if named else "; this tokenizer has no named templates, None takes its own if any"
    return " or ".join(way for way in ways if way) + note


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(
            f"The chat template file {str(path)!r} cannot be read: {reason}. Expected a Jinja "
            "template in UTF-8; check the path."
        ) from None


class _GenerationBlock(jinja2.ext.Extension):
    """Parse `{% generation %}`, which marks the model's words, as its plain content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@dataclass(frozen=True, slots=True)
class _Facts:
    """The variables, words and fields in the source of a template.

    Attributes:
        variables: names that the template reads and does not define itself.
        literals: the texts that it writes or compares.
        words: quoted literals of one word, the known roles among them, without names of fields.
        attributes: names of the attributes and fields that it reads.
        changes_text: whether it may shorten a text or change its letters.
    """

    variables: frozenset[str]
    literals: frozenset[str]
    words: frozenset[str]
    attributes: frozenset[str]
    changes_text: bool


@lru_cache(maxsize=16)
def _facts(source: str) -> _Facts:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"],
    )
    try:
        parsed = environment.parse(source)
    except jinja2.TemplateSyntaxError as error:
        raise UserError(
            f"The chat template does not parse: line {error.lineno}: {error.message}. Correct it, "
            "or pass another chat_template."
        ) from None
    nodes = jinja2.nodes
    texts = [n for n in parsed.find_all(nodes.Const) if isinstance(n.value, str)]
    plain = {node.data for node in parsed.find_all(nodes.TemplateData)}
    read = [*parsed.find_all(nodes.Getattr), *parsed.find_all(nodes.Getitem)]
    fields = {id(node.arg) for node in read if isinstance(node, nodes.Getitem)}
    attributes = {node.attr for node in read if isinstance(node, nodes.Getattr)}
    used = attributes | {node.name for node in parsed.find_all(nodes.Filter)}
    return _Facts(
        # find_undeclared_variables folds constants of the parsed template, so it comes last.
        frozenset(jinja2.meta.find_undeclared_variables(parsed)),
        frozenset({node.value for node in texts} | plain),
        frozenset(n.value for n in texts if id(n) not in fields and n.value.isidentifier()),
        frozenset(attributes | {node.value for node in texts if id(node) in fields}),
        not used.isdisjoint(_CHANGES_OF_TEXT),
    )


def _template_options(
    variables: frozenset[str], thinking: bool | None, template_kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the variables for the template; raise a UserError for one that it does not read."""
    options = dict(template_kwargs)
    known = variables - _renderer_names() - set(jinja2.sandbox.SandboxedEnvironment().globals)
    switches = _switches(variables)
    # "No thinking" needs no switch in a template without thinking; efforts are a thinking mode too.
    is_met = not switches and "reasoning_effort" not in known
    if is_met:
        options = {n: v for n, v in options.items() if not _names_no_thinking({n: v})}
    for name in options:
        if name not in known:
            names = ", ".join(sorted(known)) or "none"
            raise UserError(
                f"The chat template has no option {short_repr(name)}, so "
                f"{short_repr(options[name])} would have no effect; it reads: {names}. Leave it "
                "out of template_kwargs."
            )
    if thinking is None:
        return options
    if not isinstance(thinking, bool):
        raise UserError(f"thinking is {thinking!r}; expected True, False or None.")
    if is_met and not thinking:
        return options
    if not switches:
        instead = "" if is_met else "; set reasoning_effort in template_kwargs"
        raise UserError(
            f"thinking is {thinking}, and the chat template has no thinking mode to set (it reads "
            f"neither {' nor '.join(THINKING_VARIABLES)}); leave thinking out{instead}."
        )
    if twice := [name for name in switches if name in options]:
        raise UserError(
            f"thinking is {thinking}, and template_kwargs has {twice[0]!r}: "
            f"{short_repr(options[twice[0]])}; give one of them."
        )
    return {**options, **dict.fromkeys(switches, thinking)}


@cache
def _renderer_names() -> frozenset[str]:
    """Return the names that the renderer defines for every template."""
    from transformers import PreTrainedTokenizerBase

    own = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters.keys()
    return frozenset({"messages", "raise_exception", "strftime_now"} | own - {"documents"})


def _switches(variables: frozenset[str]) -> list[str]:
    """Return the variables that turn the template's thinking mode on and off."""
    return [name for name in THINKING_VARIABLES if name in variables]


def _names_no_thinking(options: Mapping[str, Any]) -> bool:
    return any(options.get(name) is False for name in THINKING_VARIABLES)


def split_thinking(
    text: str, start: str = "<think>", end: str = "</think>", *, opened: bool | None = None
) -> tuple[str, str]:
    """Split an output into (reasoning, answer); either may be "".

    Reasoning comes first or not at all: a `start` further on is part of the answer. Reasoning that
    was cut off before `end` leaves no answer. Newlines around the markers are dropped.

    Args:
        text: output of the model.
        start: marker that opens the reasoning.
        end: marker that closes the reasoning.
        opened: whether the prompt ended with `start` (see `opens_thinking`); None assumes so if
            the text has `end` and does not begin with `start`.
    """
    body = text.lstrip()
    if body.startswith(start):
        body = body[len(start) :]
    elif opened is False or (opened is None and end not in text):
        return "", text
    reasoning, _, answer = body.partition(end)
    return reasoning.strip(), answer.lstrip("\n")


def opens_thinking(tokenizer: PreTrainedTokenizerBase, prompt_token_ids: Sequence[int]) -> bool:
    """Return whether a prompt ends with "<think>": the output then begins inside the reasoning."""
    # A marker is at most one token a byte.
    tail = list(prompt_token_ids[-len("<think>") - 8 :])
    text: Any = tokenizer.decode(tail, skip_special_tokens=False)
    return text.rstrip().endswith("<think>")


def with_answer(
    messages: Sequence[Message], text: str, *, opened: bool | None = None
) -> list[dict[str, Any]]:
    """Return the conversation with the model's output added, without its reasoning.

    After an assistant message (`continue_final_message`) the output goes on with that message.
    Arguments are those of `split_thinking`; `messages` is left as it is.

    Raises:
        UserError: a message is malformed.
    """
    # Roles were checked against the template when the prompt was made.
    roles = [
        str(m.role if isinstance(m, ChatMessage) else m.get("role"))
        for m in messages
        if isinstance(m, ChatMessage | Mapping)
    ]
    conversation = checked_messages(messages, roles)
    last = conversation[-1]
    if last["role"] != "assistant":
        _, answer = split_thinking(text, opened=opened)
        return [*conversation, {"role": "assistant", "content": answer}]
    before = last.get("content", "")
    _, answer = split_thinking(before + text, opened=opened)
    return [*conversation[:-1], {**last, "content": answer}]
