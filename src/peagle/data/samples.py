"""Turn records into token sequences whose end is supervised: the loss mask of chat templates.

An answer is one pass of serving: the prompt as the template renders it before the answer, and the
tokens that the model then writes, its end-of-turn token included. Answers of one conversation share
a sample where the prompt of the later answer begins, token for token, with the whole sample so far.
Where a template renders earlier answers differently from the newest (without reasoning), each
answer has a sample of its own. So each supervised token has the context that it has in serving.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from peagle.chat import render_chat
from peagle.data.readers import (
    Dropped,
    Record,
    RecordedConversation,
    UnusableRecord,
    conversation_of,
    conversation_with,
)
from peagle.data.segments import SegmentEncoder
from peagle.errors import UserError
from peagle.model_shape import ModelShape
from peagle.models.checkpoint.files import read_object
from peagle.thinking import END, START

_ID_PAIRS = ("prompt_token_ids", "response_token_ids")
_PROBE = [{"role": "user", "content": "Hello"}]
# Reasoning without a word at the start of an answer, perhaps opened by the prompt.
_NO_REASONING = re.compile(rf"\s*({START})?\s*{END}|\s*<\|channel>\w*\s*<channel\|>")


@dataclass(frozen=True, slots=True)
class Sample:
    """A sequence of token ids with one or more supervised answers.

    Attributes:
        ids: token ids up to the end of the last answer.
        answers: (begin, end) of each answer within `ids`. The model did not write what stands
            before and between them.
        group: equal for all samples of one conversation.
    """

    ids: list[int]
    answers: tuple[tuple[int, int], ...]
    group: str = ""

    @classmethod
    def of(cls, ids: list[int], answers: Sequence[tuple[int, int]], group: str) -> Sample:
        """Make a sample of the (begin, end) of its answers, at least one, within `ids`."""
        return cls(ids[: answers[-1][1]], tuple(answers), group)

    @classmethod
    def answered(cls, prompt: list[int], response: list[int], group: str = "") -> Sample:
        """Make a sample of one answer."""
        ids = prompt + response
        return cls(ids, ((len(prompt), len(ids)),), group)

    @property
    def begin(self) -> int:
        """Return the index of the first answer's first token."""
        return self.answers[0][0]

    @property
    def prompt(self) -> list[int]:
        """Return the tokens before the last answer, which the model read before it wrote that."""
        return self.ids[: self.answers[-1][0]]

    @property
    def response(self) -> list[int]:
        """Return the tokens of all answers, which the model wrote."""
        return [id for begin, end in self.answers for id in self.ids[begin:end]]

    @property
    def loss_mask(self) -> bytearray:
        """Return 1 for each token of an answer, else 0."""
        mask = bytearray(len(self.ids))
        for begin, end in self.answers:
            mask[begin:end] = b"\1" * (end - begin)
        return mask

    def followed_by(self, later: Sample) -> Sample | None:
        """Return this sample with the answers of a later one behind it.

        None if the first prompt of the later one does not begin with this whole sample.
        """
        if not continues(self.ids, later.ids[: later.begin]):
            return None
        return Sample.of(later.ids, [*self.answers, *later.answers], self.group)


def continues(ids: Sequence[int], prompt: Sequence[int]) -> bool:
    """Return whether a prompt begins with all of `ids`, and goes on."""
    return len(ids) < len(prompt) and prompt[: len(ids)] == ids


def join_answers(samples: Iterable[Sample | Dropped]) -> Iterator[Sample | Dropped]:
    """Yield the samples of a conversation, each joined with the one before it where that fits."""
    last: Sample | None = None
    for sample in samples:
        if isinstance(sample, Dropped):
            yield sample
            continue
        longer = None if last is None else last.followed_by(sample)
        if last is not None and longer is None:
            yield last
        last = longer or sample
    if last is not None:
        yield last


class SampleMaker:
    """Makes samples of records in these forms:

    - {"prompt_token_ids", "response_token_ids"}: taken as they are;
    - {"input_ids", "loss_mask"}: each supervised run is an answer;
    - {"messages"}: with all answers of a weight above 0; with "turn", as `peagle data regenerate`
      writes, only with the last;
    - {"prompt", "response"}: a conversation of one turn, or plain text where `chat` is False; with
      "add_special_tokens", which says how a server tokenised the prompt, plain text too.

    Args:
        tokenizer: tokenizer of the target; None makes samples of token ids only.
        stop_ids: tokens that end a turn.
        chat: render {"prompt", "response"} with the chat template; None does so if the tokenizer
            has one.
        chat_template, thinking: as `peagle.chat.render_chat` has them.

    Raises:
        UserError: the template is not usable, or has no thinking mode to set.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        stop_ids: Sequence[int] = (),
        *,
        chat: bool | None = None,
        chat_template: str | Path | None = None,
        thinking: bool | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self._options: dict[str, Any] = {"chat_template": chat_template, "thinking": thinking}
        if tokenizer is not None:
            # Each prompt has the whole conversation before it.
            self._options["encode"] = SegmentEncoder(tokenizer)
        added = tokenizer.added_tokens_decoder if tokenizer is not None else {}
        self._special_ids = frozenset(id for id, token in added.items() if token.special)
        self._stop_ids = frozenset(stop_ids)
        self._chat = chat
        has_template = bool(getattr(tokenizer, "chat_template", None)) or chat_template is not None
        if chat is None:
            self._chat = has_template
        is_chosen = thinking is not None or chat_template is not None
        # Text without a template has no thinking mode to turn off.
        if tokenizer is not None and is_chosen and (has_template or thinking):
            render_chat(tokenizer, _PROBE, **self._options)

    @property
    def lacks_thinking(self) -> bool:
        """Return whether the template has a thinking mode and none was chosen."""
        if self.tokenizer is None or self._options["thinking"] is not None:
            return False
        try:
            render_chat(self.tokenizer, _PROBE, **self._options)
            render_chat(self.tokenizer, _PROBE, **{**self._options, "thinking": True})
        except UserError:
            return False
        return True

    def renders(self, record: Record) -> bool:
        """Return whether the samples of this record need the chat template."""
        data = record.data
        if not {*_ID_PAIRS, "input_ids", "loss_mask"}.isdisjoint(data):
            return False
        if not {"messages", "conversations"}.isdisjoint(data):
            return True
        return bool(self._chat) and "add_special_tokens" not in data

    def samples(self, record: Record) -> Iterator[Sample | Dropped]:
        """Yield the samples of a record, or the reasons why there are none.

        Raises:
            UserError: the record is text, and there is no tokenizer.
        """
        yield from join_answers(self._usable_samples(record))

    def _usable_samples(self, record: Record) -> Iterator[Sample | Dropped]:
        try:
            yield from self._samples(record)
        except UnusableRecord as error:
            yield error.why

    def _samples(self, record: Record) -> Iterator[Sample | Dropped]:
        data = record.data
        record.check()
        if any(name in data for name in _ID_PAIRS):
            prompt, response = (_ids(data.get(name), name) for name in _ID_PAIRS)
            yield Sample.answered(prompt, response, _group(record, prompt))
        elif "input_ids" in data or "loss_mask" in data:
            yield _masked(record)
        elif (conversation := conversation_of(record)) is not None:
            yield from self._conversation(record, conversation)
        else:
            texts = [data.get("prompt"), data.get("response")]
            if not all(isinstance(text, str) for text in texts):
                raise UnusableRecord(
                    "the record has none of the forms",
                    f"it has the keys {_names(data)}; expected messages, "
                    "prompt and response (text), prompt_token_ids and response_token_ids, or "
                    "input_ids and loss_mask",
                )
            yield from self._pair(record, str(texts[0]), str(texts[1]))

    def _pair(self, record: Record, prompt: str, response: str) -> Iterator[Sample | Dropped]:
        specials = record.data.get("add_special_tokens")
        if self._chat and specials is None:
            messages = [
                {"role": "user", "content": prompt},
                {"role": "assistant", "content": response},
            ]
            yield from self._conversation(record, conversation_with(record, messages))
            return
        encode = self._tokenizer(record).encode
        ids = encode(prompt, add_special_tokens=bool(specials))
        yield Sample.answered(ids, encode(response, add_special_tokens=False), _group(record, ids))

    def _conversation(
        self, record: Record, conversation: RecordedConversation
    ) -> Iterator[Sample | Dropped]:
        self._tokenizer(record)
        messages, weights = conversation.messages, conversation.weights
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if conversation.rest is not None:
            yield conversation.rest
        elif not answers:
            yield Dropped("no answer in the conversation")
        if "turn" in record.data:
            answers = answers[-1:]
        group = _group(record, [])
        was_cut = record.data.get("finish_reason") == "length" and conversation.rest is None
        for index in answers:
            if weights[index] == 0:
                yield Dropped("an answer of weight 0")
            elif weights[index] != 1:
                detail = f"weight is {json.dumps(weights[index])[:60]}; expected 0 or 1"
                yield Dropped("an answer of a weight other than 0 and 1", detail)
            else:
                ends = not was_cut or index < len(messages) - 1
                yield self._answer(messages[: index + 1], group, conversation.tools, ends=ends)

    def _answer(
        self, messages: list[dict[str, Any]], group: str, tools: Any, *, ends: bool
    ) -> Sample | Dropped:
        """Make a sample of the last message: the model wrote it after the prompt of the others."""
        tokenizer, (*before, answer) = self.tokenizer, messages
        assert tokenizer is not None
        content, calls = answer.get("content", ""), answer.get("tool_calls")
        if not content.strip() and not calls:
            return Dropped("empty answer")
        if calls and not ends:
            return Dropped("a call of a tool that was cut off")
        if not before:
            return Dropped("an answer that nothing was asked before")
        try:
            prompt = begun = render_chat(tokenizer, before, tools=tools, **self._options)
            opened, closed = self._answered(before, answer, tools)
            response = self._continuation(begun, opened)
            if response is None:
                # The template of gpt-oss leaves out the reasoning before a call once an answer
                # follows. The answer is the same behind a conversation without it.
                bare = [_without_reasoning(message) for message in before]
                begun = render_chat(tokenizer, bare, tools=tools, **self._options)
                opened, closed = self._answered(bare, answer, tools)
                response = self._continuation(begun, opened)
        except UserError as error:
            return Dropped("the chat template does not render it", str(error))
        if response is None:
            return Dropped(
                "the template renders the answer otherwise than a prompt for it begins",
                "let the target answer in this process, or use another thinking mode",
            )
        text = _text(tokenizer, response)
        reasoning = str(answer.get("reasoning_content") or answer.get("reasoning") or "").strip()
        if reasoning not in text:
            return Dropped("the template leaves out the reasoning of the answer")
        if _NO_REASONING.match(text) and not (reasoning or _NO_REASONING.match(content)):
            return Dropped(
                "the answer has no reasoning, and the template writes an empty block of it",
                "let the target answer, or prepare with --no-thinking if the head will serve so",
            )
        if calls:
            return Sample.answered(prompt, self._up_to_end(response), group)
        rest = self._continuation(opened, closed)
        if rest is None:
            return Dropped("the template renders a finished answer otherwise than an open one")
        if ends:
            response = response + self._end_of_turn(rest)
        return Sample.answered(prompt, response, group)

    def _answered(
        self, before: list[dict[str, Any]], answer: dict[str, Any], tools: Any
    ) -> tuple[list[int], list[int]]:
        """Render a conversation with an answer that is open and that is closed."""
        tokenizer, messages = self.tokenizer, [*before, answer]
        assert tokenizer is not None
        options = {**self._options, "tools": tools}
        closed = render_chat(tokenizer, messages, add_generation_prompt=False, **options)
        if answer.get("tool_calls"):
            # Calls stand behind the content, and the template closes each.
            return closed, closed
        opened = render_chat(tokenizer, messages, continue_final_message=True, **options)
        return opened, closed

    def _continuation(self, first: list[int], longer: list[int]) -> list[int] | None:
        """Return the tokens by which `longer` continues `first`, None if it begins otherwise."""
        if longer[: len(first)] == first:
            return longer[len(first) :]
        assert self.tokenizer is not None
        # The tokenizer may join the end of `first` with what follows; a model that goes on cannot.
        before, whole = (_text(self.tokenizer, ids) for ids in (first, longer))
        if not whole.startswith(before):
            return None
        rest = self.tokenizer.encode(whole[len(before) :], add_special_tokens=False)
        # Of a special token that the answer only spells, this makes the token.
        is_forged = self._num_special(rest) != self._num_special(longer) - self._num_special(first)
        return None if is_forged else rest

    def _num_special(self, ids: list[int]) -> int:
        return sum(id in self._special_ids for id in ids)

    def _end_of_turn(self, rest: list[int]) -> list[int]:
        """Return the tokens behind an answer that the model writes: up to a stop token."""
        assert self.tokenizer is not None
        for ends in (self._stop_ids, frozenset(self.tokenizer.all_special_ids)):
            for index, token in enumerate(rest):
                if token in ends:
                    return rest[: index + 1]
        return []

    def _up_to_end(self, response: list[int]) -> list[int]:
        """Return the tokens of an answer up to its last stop token: the model writes no more."""
        ends = [index for index, token in enumerate(response) if token in self._stop_ids]
        return response[: ends[-1] + 1] if ends else response

    def _tokenizer(self, record: Record) -> PreTrainedTokenizerBase:
        if self.tokenizer is None:
            raise UserError(
                f"{record.where} is text; name the model whose tokenizer reads it with --target."
            )
        return self.tokenizer


def vocab_size_of(folder: Path, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the rows of the target's embedding, by its config; else the tokenizer's tokens."""
    path = folder / "config.json"
    shape = ModelShape.from_json(read_object(path) if path.is_file() else {})
    return shape.vocab_size or len(tokenizer)


def masked_ids(record: Record) -> tuple[list[int], list[int]]:
    """Return input_ids and loss_mask of a record.

    Raises:
        UnusableRecord: they are malformed.
    """
    ids, mask = (_ids(record.data.get(name), name) for name in ("input_ids", "loss_mask"))
    if len(mask) != len(ids) or not set(mask) <= {0, 1}:
        raise UnusableRecord(
            "the loss_mask does not fit the input_ids",
            f"loss_mask has {len(mask)} values for {len(ids)} input_ids; expected a 0 or 1 for "
            "each",
        )
    return ids, mask


def _masked(record: Record) -> Sample | Dropped:
    ids, mask = masked_ids(record)
    borders = [i for i, (before, on) in enumerate(pairwise([0, *mask, 0])) if before != on]
    if not borders:
        return Dropped("nothing is supervised")
    answers = list(zip(borders[::2], borders[1::2], strict=True))
    return Sample.of(ids, answers, _group(record, ids[: borders[0]]))


def _ids(value: Any, name: str) -> list[int]:
    if not isinstance(value, list) or not all(type(one) is int for one in value):
        raise UnusableRecord(
            "token ids that are no list of whole numbers", f"{name} is {json.dumps(value)[:60]}"
        )
    return value


def _group(record: Record, prompt: Sequence[int]) -> str:
    """Return the first question of the conversation, which all of its samples have in common."""
    messages = record.data.get("messages", record.data.get("conversations"))
    if isinstance(messages, list):
        users = (m for m in messages if isinstance(m, Mapping))
        users = (m for m in users if m.get("role", m.get("from")) in ("user", "human"))
        return json.dumps([m.get("content", m.get("value")) for m in users][:1])
    text = record.data.get("prompt")
    return json.dumps([text]) if isinstance(text, str) else json.dumps(list(prompt))


def _without_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message without reasoning; content beside a call counts as such."""
    kept = {k: v for k, v in message.items() if k not in ("reasoning", "reasoning_content")}
    return {**kept, "content": ""} if message.get("tool_calls") else kept


def _text(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    text: Any = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text


def _names(data: Mapping[str, Any]) -> str:
    """Return the keys of a record, for messages; of a key without a value it says so."""
    return ", ".join(f"{k} (null)" if v is None else str(k) for k, v in data.items()) or "none"
