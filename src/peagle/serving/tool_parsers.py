"""Tool calls in a growing output, by the form in which a family of models writes them.

Text that is not surely a call is content, byte for byte. A call is sure once its function's name is
known and its arguments have begun; from there on the parser passes the arguments on as the model
writes them, so they may be cut off or no valid JSON, as in OpenAI's API. Arguments that a model
writes in a form of its own (Qwen3-Coder, Gemma 4) are given out as JSON, whatever it writes; they
are cut off only where the output is. Marks and braces around calls, and blanks between them, are
neither content nor arguments.

Parsers are generators that read the text as if it were complete, and yield to wait for more.
"""

import json
import math
import re
import string
from abc import ABC, abstractmethod
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from typing import Any, Self, TypeVar

from peagle.markers import SIGN, open_tail, unmarked
from peagle.serving.tools import (
    CallDelta,
    ContentDelta,
    Delta,
    ToolChoiceDict,
    merge_deltas,
    new_call_id,
)
from peagle.thinking import is_harmony

_T = TypeVar("_T")
Steps = Generator[None, None, _T]  # each yield waits for more text

_BLANKS = " \t\n\r"
_ARGUMENTS = ('"arguments"', '"parameters"')
_KEYS = ('"name"', *_ARGUMENTS, '"id"', '"type"')
_CLOSING = {"{": "}", "[": "]"}
_TURNS = {False: re.compile(r'["{}\[\]]'), True: re.compile(r'["\\]')}  # in a string?


class ToolCallParser:
    """Finds no calls: everything is content. Base of the parsers that find some.

    Joined deltas are the same however the text is cut into pieces. Calls of functions other than
    `names` are content.

    Attributes:
        markers: names of marker tokens that the text may have, each behind `SIGN`.
        needs_sign: a name without the sign is no marker.
    """

    markers: tuple[str, ...] = ()
    needs_sign = False

    def __init__(self, names: Collection[str] = ()) -> None:
        self._names = {f'"{name}"': name for name in names}
        self._text = ""
        self._start = 0  # the text before this is given out or dropped
        self._at = 0  # the text from start to here is read, and held back
        self._ended = False
        self._calls = 0
        self._deltas: list[Delta] = []
        self._steps = self._parse()

    @classmethod
    def for_tools(cls, tools: Sequence[Mapping[str, Any]]) -> Self:
        """Return a parser of calls of these tools, in OpenAI's form."""
        return cls([tool["function"]["name"] for tool in tools])

    def add(self, text: str, *, final: bool = False) -> list[Delta]:
        """Return the deltas of new text; `final` settles the text that was held back."""
        assert not self._ended
        new = text if self.needs_sign else unmarked(text)
        self._text = self._text[self._start :] + new
        self._at -= self._start
        self._start = 0
        self._ended = final
        next(self._steps, None)
        deltas, self._deltas = self._deltas, []
        return merge_deltas(deltas)

    def _parse(self) -> Steps[None]:
        while (yield from self._more()):
            self._give(len(self._text))

    # ---- reading: each moves self._at ----

    def _more(self) -> Steps[bool]:
        """Wait for a character; False at the end of the text."""
        while self._at == len(self._text):
            if self._ended:
                return False
            yield
        return True

    def _one_of(self, options: Iterable[str]) -> Steps[str]:
        """Move past the option with which the text goes on, and return it, or "".

        No option begins with another one.
        """
        options = list(options)
        while True:
            for option in options:
                if self._text.startswith(option, self._at):
                    self._at += len(option)
                    return option
            left = len(self._text) - self._at
            options = [
                o for o in options if len(o) > left and self._text.endswith(o[:left], self._at)
            ]
            if self._ended or not options:
                return ""
            yield

    def _blanks(self) -> Steps[None]:
        while (yield from self._more()) and self._text[self._at] in _BLANKS:
            self._at += 1

    def _value(self, opening: str, *, stream: bool = False) -> Steps[bool]:
        """Move past a string, object or array that begins with `opening`; return whether it ends.

        With `stream` it is given out as arguments of the current call.
        """
        if not (yield from self._more()) or self._text[self._at] != opening:
            return False
        balance = _Balance()
        while balance.is_open and (yield from self._more()):
            self._at = balance.scan(self._text, self._at)
            if stream:
                self._argue()
        return balance.is_closed

    # ---- settling: each moves self._start ----

    def _give(self, end: int) -> None:
        """Give out the text up to `end` as content, and go on there."""
        if end > self._start:
            self._deltas.append(ContentDelta(unmarked(self._text[self._start : end])))
        self._start = self._at = end

    def _drop(self) -> None:
        """Leave out the text that was read: it belongs to a call."""
        self._start = self._at

    def _begin(self, name: str, arguments: str = "") -> None:
        """Begin a call, to which the text that was read belongs."""
        self._deltas.append(CallDelta(self._calls, arguments, new_call_id(), name))
        self._calls += 1
        self._drop()

    def _argue(self) -> None:
        """Give out the text that was read as arguments of the current call."""
        self._say(self._text[self._start : self._at])

    def _say(self, arguments: str) -> None:
        """Give out arguments of the current call that stand for the text that was read."""
        if arguments:
            self._deltas.append(CallDelta(self._calls - 1, unmarked(arguments)))
        self._drop()

    # ---- calls: each settles what belongs to the call, or nothing and returns False ----

    def _object(self) -> Steps[bool]:
        """Read a call that is an object of name and arguments."""
        name = arguments = ""
        separator = yield from self._one_of("{")
        while separator and separator != "}":
            key = yield from self._key()
            begin = self._at - self._start
            if key == '"name"' and not name:
                name = yield from self._one_of(self._names)
                is_read = bool(name)
            elif key in _ARGUMENTS and name and not arguments:
                if not (yield from self._more()) or self._text[self._at] != "{":
                    return False
                self._begin(self._names[name])
                if (yield from self._value("{", stream=True)):
                    yield from self._end_of_object()
                return True
            elif key in _ARGUMENTS and not arguments:
                is_read = yield from self._value("{")
                arguments = self._text[self._start + begin : self._at]
            else:
                is_read = key in ('"id"', '"type"') and (yield from self._value('"'))
            if not is_read:
                return False
            yield from self._blanks()
            separator = yield from self._one_of(",}")
        if not separator or not name:
            return False
        self._begin(self._names[name], arguments or "{}")
        return True

    def _key(self) -> Steps[str]:
        """Read a key and its colon; return "" if no call has such a key."""
        yield from self._blanks()
        key = yield from self._one_of(_KEYS)
        yield from self._blanks()
        if not (yield from self._one_of(":")):
            return ""
        yield from self._blanks()
        return key

    def _end_of_object(self) -> Steps[None]:
        """Read from the arguments up to the brace; all other text stays."""
        while True:
            yield from self._blanks()
            separator = yield from self._one_of(",}")
            if separator == "}":
                return self._drop()
            is_read = separator and (yield from self._key()) in ('"id"', '"type"')
            if not is_read or not (yield from self._value('"')):
                self._at = self._start
                return

    def _array(self) -> Steps[bool]:
        """Read an array of calls, up to the first element that is no call."""
        if not (yield from self._one_of("[")):
            return False
        yield from self._blanks()
        if not (yield from self._object()):
            return False
        while True:
            yield from self._blanks()
            separator = yield from self._one_of(",]")
            if separator == "]":
                self._drop()
                return True
            yield from self._blanks()
            if not separator or not (yield from self._object()):
                self._at = self._start
                return True


class _Balance:
    """Follows the strings and brackets of one JSON value, with any text between them."""

    def __init__(self) -> None:
        self.is_open = True
        self.is_closed = False
        self._expected: list[str] = []
        self._in_string = False
        self._escaped = False

    def scan(self, text: str, at: int) -> int:
        """Return where the value ends, or where text begins that cannot belong to it."""
        while at < len(text) and self.is_open:
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            found = _TURNS[self._in_string].search(text, at)
            if not found:
                return len(text)
            if not self._turn(found[0]):
                return found.start()
            at = found.end()
        return at

    def _turn(self, char: str) -> bool:
        """Take a quote, a backslash or a bracket; return False for a wrong closing bracket."""
        if char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = not self._in_string
        elif char in _CLOSING:
            self._expected.append(_CLOSING[char])
        elif self._expected.pop() != char:
            self.is_open = False
            return False
        if not self._expected and not self._in_string:
            self.is_open, self.is_closed = False, True
        return True


# ---- families of models ----

_LETTERS = string.ascii_letters + string.digits


class _MarkedParser(ToolCallParser, ABC):
    """Reads calls behind a marker anywhere, and without one at the start and after a call."""

    marker: str

    def _parse(self) -> Steps[None]:
        is_start = True
        while True:
            if is_start:
                yield from self._blanks()
            marked = yield from self._one_of([self.marker])
            held = self._at - self._start
            if (marked or is_start) and (yield from self._call(bool(marked))):
                is_start = True
                continue
            self._at = self._start + held
            if not marked and not (yield from self._more()):
                break
            self._give(self._at if marked else self._next_marker())
            is_start = False
        if not self._calls:  # else they are blanks after a call
            self._give(self._at)

    def _next_marker(self) -> int:
        """Return where the marker, or the start of one, first is after the next character."""
        after = self._at + 1
        found = self._text.find(self.marker, after)
        if found >= 0:
            return found
        return len(self._text) - open_tail(self._text[after:], (self.marker,))

    @abstractmethod
    def _call(self, marked: bool) -> Steps[bool]:
        """Read one call or several, as `_object`."""


class HermesParser(_MarkedParser):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen."""

    marker = "<tool_call>"
    markers = ("<tool_call>", "</tool_call>")

    def _call(self, marked: bool) -> Steps[bool]:
        if not marked:
            return False
        yield from self._blanks()
        if not (yield from self._object()):
            return False
        yield from self._blanks()
        if (yield from self._one_of(["</tool_call>"])):
            self._drop()
        self._at = self._start
        return True


class Qwen3CoderParser(_MarkedParser):
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`.

    Arguments are given out as JSON. A value is a string, and comes as it is written, unless the
    parameter's schema allows no string: then it is read as JSON, and stays a string if it is none,
    or has NaN or a number that is too large. One line break after `>` and one before `</parameter>`
    do not belong to the value. The end of the call ends a parameter without an end of its own.
    """

    marker = "<tool_call>"
    markers = ("<tool_call>", "</tool_call>")

    def __init__(
        self, names: Collection[str] = (), schemas: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        super().__init__(names)
        self._heads = {f"<function={name}>": name for name in names}
        self._schemas = schemas or {}

    @classmethod
    def for_tools(cls, tools: Sequence[Mapping[str, Any]]) -> ToolCallParser:
        functions = [tool["function"] for tool in tools]
        schemas = {f["name"]: (f.get("parameters") or {}).get("properties", {}) for f in functions}
        return cls(list(schemas), schemas)

    def _call(self, marked: bool) -> Steps[bool]:
        yield from self._blanks()
        head = yield from self._one_of(self._heads)
        if not head:
            return False
        name = self._heads[head]
        self._begin(name)
        separator = "{"
        while True:
            yield from self._blanks()
            tag = yield from self._one_of(_TAGS)
            if tag != "<parameter=":
                break
            key = yield from self._up_to(">")
            if key is None:
                return True
            self._say(f"{separator}{_json(key)}: ")
            separator = ", "
            if _is_text(self._schemas.get(name, {}).get(key)):
                is_whole = yield from self._text_value()
            else:
                is_whole = yield from self._other_value()
            if not is_whole:
                return True
        rest = self._text[self._at :]
        if not tag and self._ended and any(tag.startswith(rest) for tag in _TAGS):  # cut off
            self._at = len(self._text)
            self._drop()
            return True
        self._say("{}" if separator == "{" else "}")
        if tag:
            self._drop()
            yield from self._blanks()
            if (yield from self._one_of(["</tool_call>"])):
                self._drop()
        self._at = self._start
        return True

    def _up_to(self, end: str) -> Steps[str | None]:
        """Move past `end`, and return the text before it; if it does not come, drop the text."""
        while (at := self._text.find(end, self._at)) < 0:
            if self._ended:
                self._at = len(self._text)
                self._drop()
                return None
            yield
        found = self._text[self._at : at]
        self._at = at + len(end)
        return found

    def _end_of_value(self, begin: int) -> tuple[int, int] | None:
        """Return where a value ends and where the text behind it begins; None: not there yet."""
        end = self._text.find(_END, begin)
        closed = (_CLOSED_AT_END if self._ended else _CLOSED).search(self._text, begin)
        if closed and not 0 <= end < closed.start():
            return closed.start(), closed.start()
        return (end, end + len(_END)) if end >= 0 else None

    def _text_value(self) -> Steps[bool]:
        """Give out a value as a JSON string while it is written; return whether it ends."""
        self._say('"')
        yield from self._one_of("\n")
        self._drop()
        while True:
            found = self._end_of_value(self._at)
            if found is not None:
                value = self._text[self._start : found[0]].removesuffix("\n")
                self._say(f'{_json(value)[1:-1]}"')
                self._at = found[1]
                self._drop()
                return True
            held = 0 if self._ended else _open_end(self._text[self._at :])
            self._at = len(self._text) - held
            self._say(_json(self._text[self._start : self._at])[1:-1])
            if self._ended:
                return False
            yield

    def _other_value(self) -> Steps[bool]:
        """Give out a value once it is whole, as JSON; return whether it ends."""
        searched = 0  # characters of the value in which no end begins
        while (found := self._end_of_value(self._at + searched)) is None:
            if self._ended:
                self._at = len(self._text)
                self._drop()
                return False
            searched = max(0, len(self._text) - self._at - _LONGEST_END)
            yield
        value = self._text[self._at : found[0]].strip()
        self._at = found[1]
        self._say(_as_json(value))
        return True


_TAGS = ("<parameter=", "</function>")
_END = "</parameter>"
# The end of a call also ends a parameter that has none of its own.
_CLOSED = re.compile(r"</function>[ \t\r\n]{0,8}</tool_call>")
_CLOSED_AT_END = re.compile(r"</function>[ \t\r\n]{0,8}(?:</tool_call>|\Z)")
_LONGEST_END = len("</function></tool_call>") + 8


def _open_end(text: str) -> int:
    """Return the length of the longest end of a value's text that may begin the value's end."""
    held = open_tail(text, (_END, f"\n{_END}", "</function>", "\n</function>"))
    function, tag, rest = text[-_LONGEST_END:].rpartition("</function>")
    if tag and "</tool_call>".startswith(rest.lstrip(_BLANKS)):
        held = max(held, len(tag) + len(rest) + function.endswith("\n"))
    return held


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _as_json(text: str) -> str:
    """Return a written value as it is if it is JSON, else the JSON that stands for it.

    Of words of Python True, False and None stand for true, false and null; all else is a string.
    """
    try:
        json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        return {"True": "true", "False": "false", "None": "null"}.get(text, _json(text))
    return text


def _as_string(text: str) -> str:
    """Return a quoted string as JSON: as it is if it is JSON, else its text between the quotes."""
    text = unmarked(text)
    try:
        json.loads(text)
    except ValueError:
        return _json(text[1:-1])
    return text


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _finite(number: str) -> float:
    if not math.isfinite(value := float(number)):
        raise ValueError(f"{number} is too large for a number")
    return value


def _is_text(schema: Any) -> bool:
    """Return whether a parameter may be a string; a schema that cannot be allows one."""
    if not isinstance(schema, Mapping):
        return True
    kinds = schema.get("type")
    if kinds is None:
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if values:
            return not isinstance(values, list) or any(isinstance(value, str) for value in values)
        found = (schema.get(key) for key in ("anyOf", "oneOf"))
        options = [option for one in found if isinstance(one, list) for option in one]
        return not options or any(map(_is_text, options))
    if isinstance(kinds, list):
        return "string" in kinds
    return kinds == "string" or not isinstance(kinds, str)


class Llama3JsonParser(_MarkedParser):
    """`{"name": ..., "parameters": {...}}`, several with `;` between, or after `<|python_tag|>`."""

    marker = "<|python_tag|>"
    markers = ("<|python_tag|>",)

    def _call(self, marked: bool) -> Steps[bool]:
        yield from self._blanks()
        if self._calls and not marked and (yield from self._one_of(";")):
            yield from self._blanks()
            yield from self._one_of([self.marker])
            yield from self._blanks()
        return (yield from self._object())


class MistralParser(_MarkedParser):
    """`[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]` or `[TOOL_CALLS]name{...}`."""

    marker = "[TOOL_CALLS]"
    markers = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")

    def __init__(self, names: Collection[str] = ()) -> None:
        super().__init__(names)
        self._heads = {name + end: name for name in names for end in ("{", "[ARGS]", "[CALL_ID]")}

    def _call(self, marked: bool) -> Steps[bool]:
        yield from self._blanks()
        held = self._at - self._start
        if (yield from self._array()):
            return True
        self._at = self._start + held
        head = yield from self._one_of(self._heads)
        if head.endswith("[CALL_ID]"):
            while (yield from self._more()) and self._text[self._at] in _LETTERS:
                self._at += 1
            if not (yield from self._one_of(["[ARGS]"])):
                return False
        if head.endswith("{"):
            self._at -= 1
        if not head or not (yield from self._more()) or self._text[self._at] != "{":
            return False
        self._begin(self._heads[head])
        yield from self._value("{", stream=True)
        return True


class GptOssParser(_MarkedParser):
    """Calls in the one form in which `HarmonySplitter` gives them; arguments are JSON."""

    marker = f"{SIGN}<|channel|>"
    needs_sign = True

    def __init__(self, names: Collection[str] = ()) -> None:
        super().__init__(names)
        self._heads = {
            f"commentary to={space}{name}{SIGN}<|message|>": name
            for name in names
            for space in ("functions.", "")
        }

    def _call(self, marked: bool) -> Steps[bool]:
        head = (yield from self._one_of(self._heads)) if marked else ""
        if not head:
            return False
        self._begin(self._heads[head])
        has_arguments = False
        while (yield from self._more()):
            end = self._text.find(SIGN, self._at)
            self._at = end if end >= 0 else len(self._text)
            has_arguments |= self._at > self._start
            self._argue()
            if end >= 0:
                self._say("" if has_arguments else "{}")
                yield from self._one_of(_ENDS)
                self._drop()
                break
        return True


_ENDS = [f"{SIGN}{name}" for name in ("<|call|>", "<|end|>", "<|return|>")]


class Gemma4Parser(_MarkedParser):
    """`<|tool_call>call:NAME{KEY:VALUE,...}<tool_call|>`, with strings between `<|"|>` tokens.

    Arguments are given out as JSON. Keys have no quotes. A value is a string, an object `{...}`, an
    array `[...]`, or a bare word: a number, true, false, null or, if it is none of them, a string.
    Keys and strings in the quotes of JSON are read too. Where arguments are broken, open brackets
    and strings are closed, and the text that follows is content.
    """

    marker = f"{SIGN}<|tool_call>"
    markers = ("<|tool_call>", "<tool_call|>", '<|"|>')
    needs_sign = True

    def __init__(self, names: Collection[str] = ()) -> None:
        super().__init__(names)
        self._heads = {f"call:{name}{{": name for name in names}

    def _call(self, marked: bool) -> Steps[bool]:
        if not marked:
            return False
        yield from self._blanks()
        head = yield from self._one_of(self._heads)
        if not head:
            return False
        self._begin(self._heads[head])
        self._say("{")
        yield from self._members("}")
        yield from self._blanks()
        if (yield from self._one_of([f"{SIGN}<tool_call|>"])):
            self._drop()
        self._at = self._start
        return True

    def _members(self, closing: str) -> Steps[None]:
        """Give out the members of an object or array, and of the ones within it, up to its end."""
        closings, separator = [closing], ""
        while closings:
            yield from self._blanks()
            if (yield from self._one_of([closings[-1]])):
                self._say(closings.pop())
                separator = ", "
                continue
            if separator:
                if not (yield from self._one_of([","])):
                    break
                yield from self._blanks()
                if (yield from self._more()) and self._text[self._at] == closings[-1]:
                    continue
            key = ""
            if closings[-1] == "}":
                key = yield from self._member_key()
                if not key:
                    break
                self._say(separator + key)
                separator = ""
            yield from self._blanks()
            kind = yield from self._one_of([_QUOTE, "{", "["])
            if kind == _QUOTE:
                is_whole = yield from self._string(separator)
            elif kind:
                self._say(separator + kind)
                closings.append(_CLOSING[kind])
                separator = ""
                continue
            else:
                self._drop()
                is_quoted = (yield from self._more()) and self._text[self._at] == '"'
                word = self._word(separator, is_needed=bool(key))
                is_whole = yield from self._quoted(separator) if is_quoted else word
            separator = ", "
            if not is_whole:
                break
        if self._ended and self._at == len(self._text):  # cut off
            self._drop()
        else:
            self._at = self._start
            self._say("".join(reversed(closings)))

    def _member_key(self) -> Steps[str]:
        """Read a key and its colon; return them as JSON, or "" if there is none."""
        begin = self._at - self._start
        if (yield from self._one_of([_QUOTE])):
            found = yield from self._find(_ANY_SIGN)
            key = _json(found.string[self._at : found.start()]) if found else ""
            self._at = found.start() if found else self._at
            is_whole = bool((yield from self._one_of([_QUOTE])))
        elif (yield from self._value('"')):
            key, is_whole = _as_string(self._text[self._start + begin : self._at]), True
        else:
            found = yield from self._find(_KEY_END)
            key = _json(found.string[self._at : found.start()].strip()) if found else ""
            self._at = found.start() if found else self._at
            is_whole = found is not None
        yield from self._blanks()
        return f"{key}: " if is_whole and (yield from self._one_of([":"])) else ""

    def _find(self, pattern: re.Pattern[str]) -> Steps[re.Match[str] | None]:
        """Wait for a pattern; if it does not come, move to the end."""
        while not (found := pattern.search(self._text, self._at)):
            if self._ended:
                self._at = len(self._text)
                return None
            yield
        return found

    def _string(self, separator: str) -> Steps[bool]:
        """Give out a string while it is written; return whether it ends."""
        self._say(f'{separator}"')
        while True:
            end = self._text.find(SIGN, self._at)
            self._at = end if end >= 0 else len(self._text)
            self._say(_json(self._text[self._start : self._at])[1:-1])
            if end >= 0:
                is_whole = bool((yield from self._one_of([_QUOTE])))
                self._say('"')
                return is_whole
            if self._ended:
                return False
            yield

    def _quoted(self, separator: str) -> Steps[bool]:
        """Give out a string in the quotes of JSON once it is whole; return whether it ends."""
        is_whole = yield from self._value('"')
        if is_whole:
            self._say(separator + _as_string(self._text[self._start : self._at]))
        return is_whole

    def _word(self, separator: str, *, is_needed: bool) -> Steps[bool]:
        """Give out a bare word once it is whole; return whether there is one."""
        found = yield from self._find(_WORD_END)
        if found is None:
            return False
        word = self._text[self._at : found.start()].strip()
        if not word and not is_needed:
            return False
        self._at = found.start()
        self._say(separator + _as_json(word))
        return True


_QUOTE = f'{SIGN}<|"|>'
_ANY_SIGN = re.compile(SIGN)
_KEY_END = re.compile(f"[:{SIGN}]")
_WORD_END = re.compile(rf"[,}}\]{SIGN}]")


class ForcedCall(ToolCallParser):
    """Reads all text as the arguments of one call of a given function."""

    def __init__(self, name: str) -> None:
        super().__init__([name])

    def _parse(self) -> Steps[None]:
        (name,) = self._names.values()
        if (yield from self._more()):
            self._begin(name)
        while (yield from self._more()):
            self._at = len(self._text)
            self._argue()


class ForcedCalls(ToolCallParser):
    """Reads an array of calls and nothing else, in the form of `tools.constraint`."""

    def _parse(self) -> Steps[None]:
        yield from self._blanks()
        yield from self._array()
        self._at = self._start
        if self._calls:
            yield from self._blanks()
        while (yield from self._more()):
            self._give(len(self._text))


PARSERS: dict[str, type[ToolCallParser]] = {
    "gemma4": Gemma4Parser,
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "mistral": MistralParser,
    "openai": GptOssParser,
    "qwen3_coder": Qwen3CoderParser,
    "none": ToolCallParser,
}


def detect_parser(chat_template: str) -> str:
    """Return the key of `PARSERS` for the calls that a chat template asks for, or "none"."""
    if "<tool_call>" in chat_template:
        if "<function=" in chat_template:
            return "qwen3_coder"
        return "none" if "<arg_key>" in chat_template else "hermes"  # GLM's arguments are XML
    if "[TOOL_CALLS]" in chat_template:
        return "mistral"
    if is_harmony(chat_template):
        return "openai"
    if "<|tool_call>" in chat_template:
        return "gemma4"
    is_llama = re.search(r'\{\\?"name\\?": function name, \\?"parameters\\?"', chat_template)
    return "llama3_json" if is_llama or "<|python_tag|>" in chat_template else "none"


def parser_for(
    kind: str, tools: Sequence[Mapping[str, Any]] | None, tool_choice: ToolChoiceDict = None
) -> ToolCallParser:
    """Return a parser for one output of a request, whose tools were checked.

    Args:
        kind: a key of `PARSERS`, for outputs that are not forced.
        tools: in OpenAI's form.
    """
    names = [tool["function"]["name"] for tool in tools or ()]
    if not names or tool_choice == "none":
        return ToolCallParser()
    if isinstance(tool_choice, Mapping):
        return ForcedCall(tool_choice["function"]["name"])
    return ForcedCalls(names) if tool_choice == "required" else PARSERS[kind].for_tools(tools or ())
