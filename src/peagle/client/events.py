"""The reader of event streams (server-sent events) of servers with OpenAI's interface."""

import json

DONE = b"[DONE]"
MAX_EVENT_BYTES = 16 << 20


class EventReader:
    """Splits the bytes of an event stream into the data of its events.

    An event is its `data:` lines, joined, up to a blank line. Lines end with LF or CRLF. Comments,
    other fields and events without data are skipped.
    """

    def __init__(self) -> None:
        self._rest = b""  # the line that has no end yet
        self._data: list[bytes] = []  # of the event that has no end yet
        self._num_bytes = 0  # of that data

    def feed(self, raw: bytes | bytearray) -> list[bytes]:
        """Return the data of the events that these bytes complete.

        Raises:
            ValueError: an event is longer than MAX_EVENT_BYTES.
        """
        *lines, self._rest = (self._rest + raw).split(b"\n")
        complete = []
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[5:].strip())
                self._num_bytes += len(line)
            elif self._data and line in (b"", b"\r"):
                complete += self._pop_event()
        if self._num_bytes + len(self._rest) > MAX_EVENT_BYTES:
            raise ValueError(f"an event of more than {MAX_EVENT_BYTES} bytes")
        return complete

    def end(self) -> list[bytes]:
        """Return the data of the last event if only its end is missing; drop half an event."""
        return [data for data in self.feed(b"\n\n") if data == DONE or _is_json(data)]

    def _pop_event(self) -> list[bytes]:
        data = b"\n".join(self._data)
        self._data, self._num_bytes = [], 0
        return [data] if data else []


def _is_json(data: bytes) -> bool:
    try:
        json.loads(data)
    except (ValueError, RecursionError):
        return False
    return True
