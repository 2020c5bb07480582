"""The prompts of an examination, and the ways in which they may reach the model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from peagle.chat import render_chat
from peagle.errors import UserError
from peagle.evaluation.decoding import Message
from peagle.evaluation.prompts import load_prompt_set, read_prompts

_SETS = ("humaneval", "mt_bench", "gsm8k", "heldout_code")
_OF_EACH_SET = 16
_MOST_PROMPTS = 64
# Of shorter ones too little is known, longer ones take time without telling more.
_LENGTHS = range(4, 513)


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt: as it is asked, and the token ids that the training side makes of it."""

    prompt: str | tuple[Message, ...]
    token_ids: list[int]

    @property
    def text(self) -> str:
        """The user's text."""
        return self.prompt if isinstance(self.prompt, str) else self.prompt[-1]["content"]


@dataclass(frozen=True, slots=True)
class Style:
    """How prompts reach the model.

    Attributes:
        is_chat: behind the chat template, as a user's message; otherwise as plain text.
        chat_template: None is the tokenizer's own.
        thinking: None leaves it to the template.
    """

    is_chat: bool
    chat_template: str | None = None
    thinking: bool | None = None

    def __str__(self) -> str:
        if not self.is_chat:
            return "plain text"
        mode = {None: "", True: ", thinking on", False: ", thinking off"}[self.thinking]
        return f"behind the chat template{mode}"

    def ask(self, text: str, tokenizer: PreTrainedTokenizerBase) -> Question:
        """A question of this text.

        Raises:
            UserError: the template cannot render it.
        """
        if not self.is_chat:
            return Question(text, list(tokenizer(text).input_ids))
        messages = ({"role": "user", "content": text},)
        ids = render_chat(
            tokenizer, messages, chat_template=self.chat_template, thinking=self.thinking
        )
        return Question(messages, ids)


def usual_style(
    tokenizer: PreTrainedTokenizerBase,
    *,
    plain: bool = False,
    chat_template: str | None = None,
    thinking: bool | None = None,
) -> Style:
    """Behind the chat template where there is one, unless told otherwise.

    Raises:
        UserError: the options contradict each other.
    """
    if plain and (chat_template is not None or thinking):
        raise UserError("Plain prompts have neither a chat template nor a thinking mode.")
    has_template = bool(getattr(tokenizer, "chat_template", None)) or chat_template is not None
    if thinking and not has_template:
        raise UserError("A thinking mode was given, but the tokenizer has no chat template.")
    return Style(has_template and not plain, chat_template, thinking)


def other_styles(style: Style, tokenizer: PreTrainedTokenizerBase) -> list[Style]:
    """The ways in which the same prompts might reach the model instead."""
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if not style.is_chat:
        return [Style(True)] if has_template else []
    others = [Style(False)]
    for thinking in (True, False):
        other = replace(style, thinking=thinking)
        if thinking != style.thinking and _renders_otherwise(other, style, tokenizer):
            others.append(other)
    return others


def _renders_otherwise(style: Style, than: Style, tokenizer: PreTrainedTokenizerBase) -> bool:
    try:
        return style.ask("Hi", tokenizer).token_ids != than.ask("Hi", tokenizer).token_ids
    except UserError:
        return False


def choose_texts(file: Path | None, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Texts to ask: of a file, else the shortest of the bundled sets, which mix code and prose.

    Raises:
        UserError: the file cannot be read, or has no prompt of a usable length.
    """
    sets = [read_prompts(file)] if file else [load_prompt_set(name) for name in _SETS]
    chosen: list[str] = []
    for prompts in sets:
        sized = [(len(tokenizer(p.text).input_ids), p.text) for p in prompts]
        fitting = [(size, text) for size, text in sized if size in _LENGTHS]
        texts = [text for _, text in (fitting if file else sorted(fitting))]
        chosen += texts[: _MOST_PROMPTS if file else _OF_EACH_SET]
    if len(chosen) < 2:
        raise UserError(
            f"{str(file)!r} has {len(chosen)} prompts of {_LENGTHS.start} to {_LENGTHS.stop - 1} "
            "tokens; expected at least 2, better 64."
        )
    return chosen
