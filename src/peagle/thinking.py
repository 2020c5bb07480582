"""Reasoning and answer of a thinking model, told apart while they are written.

Most families put the reasoning between `<think>` and `</think>`. gpt-oss and Gemma 4 write channels
between special tokens. `family_splitter` knows them by their chat template.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

from peagle.markers import SIGN, open_tail, unmarked

START, END = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Piece:
    """Some new text, of the reasoning or of the answer."""

    text: str
    is_reasoning: bool


class AnswerSplitter(ABC):
    """Cuts a growing output into pieces of reasoning and of the answer.

    Attributes:
        markers: names of the special tokens that it reads, each behind `SIGN`. Calls of tools, with
            their own marker tokens, are part of the answer.
    """

    markers: tuple[str, ...] = ()

    @abstractmethod
    def add(self, text: str, *, final: bool = False) -> Iterator[Piece]:
        """Yield the pieces that new text completes; `final` releases a marker's supposed start."""

    def opening(self, function: str | None) -> str:
        """Return the text that opens an answer in the prompt.

        It is for a request whose whole output is constrained, so that the model writes no marker.
        `function` names the function whose arguments the output is.
        """
        return ""


class ThinkingSplitter(AnswerSplitter):
    """Cuts at `<think>` and `</think>`; the pieces make the result of `chat.split_thinking`.

    Args:
        opened: the prompt ended by opening the reasoning (see `peagle.chat.opens_thinking`).
    """

    markers = (START, END)

    def __init__(self, *, opened: bool) -> None:
        self._opened = opened
        self._held = ""
        self._is_reasoning: bool | None = None  # None: the text may yet begin with a marker
        self._is_first = True  # no text of the reasoning, or of the answer behind it, is out

    def add(self, text: str, *, final: bool = False) -> Iterator[Piece]:
        self._held += unmarked(text)
        if self._is_reasoning is None:
            body = self._held.lstrip()
            if not final and START.startswith(body):
                return
            has_marker = body.startswith(START)
            self._is_reasoning = self._is_first = has_marker or self._opened
            if self._is_reasoning:
                self._held = body[len(START) * has_marker :]
        if self._is_reasoning:
            yield from self._read_reasoning(final)
        if not self._is_reasoning:
            answer = self._held.lstrip("\n") if self._is_first else self._held
            self._held = ""
            if answer:
                self._is_first = False
                yield Piece(answer, is_reasoning=False)

    def _read_reasoning(self, final: bool) -> Iterator[Piece]:
        reasoning, end, answer = self._held.partition(END)
        if not end and not final:
            reasoning = self._held[: len(self._held) - open_tail(self._held, (END,))]
        reasoning = reasoning.rstrip()
        new = reasoning.lstrip() if self._is_first else reasoning
        if new:
            self._is_first = False
            yield Piece(new, is_reasoning=True)
        self._held = answer if end else self._held[len(reasoning) :]
        if end:
            self._is_reasoning, self._is_first = False, True


class _ChannelSplitter(AnswerSplitter):
    """Reads text and marker tokens in turn."""

    def __init__(self) -> None:
        self._signed = tuple(f"{SIGN}{name}" for name in self.markers)
        self._pattern = re.compile("|".join(map(re.escape, self._signed)))
        self._held = ""

    def add(self, text: str, *, final: bool = False) -> Iterator[Piece]:
        for piece in self._pieces(text, final):
            if piece.text:
                yield piece

    def _pieces(self, text: str, final: bool) -> Iterator[Piece]:
        self._held += text
        while found := self._pattern.search(self._held):
            before, self._held = self._held[: found.start()], self._held[found.end() :]
            yield from self._read(before)
            yield from self._turn(found[0].removeprefix(SIGN))
        size = len(self._held) - (0 if final else open_tail(self._held, self._signed))
        settled, self._held = self._held[:size], self._held[size:]
        yield from self._read(settled)
        if final:
            yield from self._flush()

    @abstractmethod
    def _read(self, text: str) -> Iterator[Piece]:
        """Take text between two markers; it may come in parts, and be empty."""

    @abstractmethod
    def _turn(self, marker: str) -> Iterator[Piece]:
        """Take a marker: end the part of the answer before it, or open the part behind it."""

    @abstractmethod
    def _flush(self) -> Iterator[Piece]:
        """Settle the text held back at the end of the output."""


# ---- gpt-oss ----

_CHANNEL = re.compile(re.escape(f"{SIGN}<|channel|>") + r"\s*(\w*)")
_RECIPIENT = re.compile(rf"\bto=([^\s{SIGN}]+)")


class HarmonySplitter(_ChannelSplitter):
    """Reads the messages of gpt-oss (the harmony format).

    An output is one message or several, `{header}<|message|>{text}` and then `<|end|>`, `<|call|>`
    or `<|return|>`. The prompt ended with the role, `<|start|>assistant`; the header goes on with a
    channel and perhaps the recipient of a call:
    `<|channel|>commentary to=functions.NAME <|constrain|>json`. The recipient may also stand before
    the channel.

    Text of the channel `analysis` is reasoning, a message to a recipient is a call, all other text
    is the answer. A line break separates two messages of a kind. A call comes as part of the answer
    in one form, whatever its header was:
    `<|channel|>commentary to=RECIPIENT<|message|>{arguments}<|call|>`.

    Where the format is broken, text is kept: text without a header, and text in a header that has
    no `<|message|>`. A header that is cut off has no text.
    """

    markers = (
        *("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"),
        *("<|end|>", "<|call|>", "<|return|>"),
    )

    def __init__(self) -> None:
        super().__init__()
        self._header: str | None = ""  # None within the text of a message
        self._has_marker = False  # in the header
        self._is_reasoning = self._is_call = self._is_new = False
        self._kinds: set[bool] = set()  # of the messages that had text: reasoning or answer

    def opening(self, function: str | None) -> str:
        if function is None:
            return "<|channel|>final<|message|>"
        return f" to=functions.{function}<|channel|>commentary <|constrain|>json<|message|>"

    def _read(self, text: str) -> Iterator[Piece]:
        if self._header is not None:
            self._header += text
            if self._has_marker:
                return
            start = self._header.lstrip()
            if start.startswith("to=") or "to=".startswith(start):
                return
            text = self._header
            self._begin("")
        yield self._piece(text)

    def _turn(self, marker: str) -> Iterator[Piece]:
        if marker in ("<|end|>", "<|call|>", "<|return|>"):
            if self._header is not None:
                yield from self._headless()
            elif self._is_call:
                yield Piece(SIGN + marker, False)
            self._header, self._has_marker = "", False
        elif marker == "<|message|>":
            if self._header is not None:
                yield self._begin(self._header)
        elif marker == "<|start|>" or (marker == "<|channel|>" and self._header is None):
            # A message without an end ends where the next one begins.
            if self._header is not None:
                yield from self._headless()
            elif self._is_call:
                yield Piece(f"{SIGN}<|end|>", False)
            self._header, self._has_marker = SIGN + marker, True
        elif self._header is not None:
            self._header, self._has_marker = self._header + SIGN + marker, True

    def _flush(self) -> Iterator[Piece]:
        if self._header and not self._has_marker:
            text, self._is_call, self._is_reasoning = self._header, False, False
            yield self._piece(text)

    def _begin(self, header: str) -> Piece:
        """Begin the text of a message; return the header if it is a call's."""
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        is_analysis = channel is not None and channel[1] == "analysis"
        is_function = recipient is not None and recipient[1].startswith("functions.")
        self._is_call = is_function or (recipient is not None and not is_analysis)
        self._is_reasoning = is_analysis and not self._is_call
        self._header, self._is_new = None, True
        if not self._is_call or recipient is None:
            return Piece("", False)
        return Piece(f"{SIGN}<|channel|>commentary to={recipient[1]}{SIGN}<|message|>", False)

    def _headless(self) -> Iterator[Piece]:
        """Give out the text of a header that has no `<|message|>`."""
        header = self._header or ""
        channel = _CHANNEL.search(header)
        if channel is not None and not _RECIPIENT.search(header):
            text = header[channel.end() :].partition(SIGN)[0].strip()
            self._begin(channel[0])
            yield self._piece(text)

    def _piece(self, text: str) -> Piece:
        if text and self._is_new and not self._is_call:
            self._is_new = False
            if self._is_reasoning in self._kinds:
                text = "\n" + text
            self._kinds.add(self._is_reasoning)
        return Piece(text, self._is_reasoning)


# ---- Gemma 4 ----

_NAME = re.compile(r"\s*\w*[ \t]*")  # the first line in a channel


class GemmaSplitter(_ChannelSplitter):
    """Reads the channels of Gemma 4: `<|channel>thought`, reasoning, `<channel|>`, then the answer.

    The name of the channel and line breaks around the markers are left out. A call of a tool ends
    the reasoning too.
    """

    markers = ("<|channel>", "<channel|>", "<|tool_call>")

    def __init__(self) -> None:
        super().__init__()
        self._in_channel = self._is_start = self._has_reasoned = False
        self._waiting = ""  # text of a channel that may be its name, or line breaks at its end

    def _read(self, text: str) -> Iterator[Piece]:
        if not self._in_channel:
            if self._is_start:
                text = text.lstrip("\n")
                self._is_start = not text
            yield Piece(text, False)
            return
        text = self._waiting + unmarked(text)
        if self._is_start:
            line, line_break, rest = text.partition("\n")
            self._waiting = text
            if _NAME.fullmatch(line):
                if not line_break:
                    return
                text = rest
            self._is_start = False
            text = "\n" * self._has_reasoned + text
        settled = text.rstrip("\n")
        self._waiting = text[len(settled) :]
        self._has_reasoned |= bool(settled)
        yield Piece(settled, True)

    def _turn(self, marker: str) -> Iterator[Piece]:
        if marker == "<|channel>":
            self._in_channel = self._is_start = True
            self._waiting = ""
            return
        if self._in_channel:
            self._in_channel, self._is_start = False, True
        if marker == "<|tool_call>":
            self._is_start = False
            yield Piece(SIGN + marker, False)

    def _flush(self) -> Iterator[Piece]:
        return iter(())


def is_harmony(chat_template: str) -> bool:
    """Return whether a chat template is gpt-oss's."""
    return "<|channel|>" in chat_template and "<|message|>" in chat_template


def family_splitter(chat_template: str) -> AnswerSplitter | None:
    """Return the splitter of a family that writes channels; None for other chat templates."""
    if is_harmony(chat_template):
        return HarmonySplitter()
    return GemmaSplitter() if "<|channel>" in chat_template else None
