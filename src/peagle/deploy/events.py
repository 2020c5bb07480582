"""Server-sent events out of bytes that are cut anywhere.

SageMaker passes a streamed answer on in payload parts whose borders have nothing to do with lines,
events or even characters. The format is that of the HTML standard, section "Server-sent events".
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_LINE_END = re.compile(rb"\r\n|\r|\n")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Event:
    """One event.

    Attributes:
        data: its lines of data, joined by line feeds.
        name: its type, "message" where none was given.
    """

    data: str
    name: str = "message"


class EventReader:
    """Puts events together again; `feed` takes the parts as they come."""

    def __init__(self) -> None:
        self._tail = bytearray()  # of a line that has not ended
        self._begun = False
        self._skip_lf = False  # the last part ended between \r and \n
        self._data: list[str] = []
        self._name = ""

    def feed(self, part: bytes) -> Iterator[Event]:
        """The events that this part completes."""
        if part and self._skip_lf:
            part = part.removeprefix(b"\n")
            self._skip_lf = False
        if _LINE_END.search(part) is None:
            self._tail += part
            return
        self._skip_lf = part.endswith(b"\r")
        *lines, rest = _LINE_END.split(bytes(self._tail) + part)
        self._tail = bytearray(rest)
        for line in lines:
            yield from self._line(line)

    def _line(self, line: bytes) -> Iterator[Event]:
        if not self._begun:
            self._begun = True
            line = line.removeprefix(_BYTE_ORDER_MARK)
        if not line:
            if self._data:
                yield Event("\n".join(self._data), self._name or "message")
            self._data, self._name = [], ""
            return
        # Decoded only here: a character may have been cut in two before.
        field, _, value = line.decode(errors="replace").partition(":")
        value = value.removeprefix(" ")
        if field == "data":
            self._data.append(value)
        elif field == "event":
            self._name = value
