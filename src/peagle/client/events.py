"""The reader of event streams, as servers with OpenAI's interface send them."""

from __future__ import annotations

DONE = b"[DONE]"
MAX_EVENT_BYTES = 16 << 20


class EventReader:
    """Splits the bytes of an event stream into the data of its events.

    Such servers write an event as one line `data: JSON`; other lines say nothing here.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, raw: bytes | bytearray) -> list[bytes]:
        """Return the data of the events that these bytes complete.

        Raises:
            ValueError: a line is longer than MAX_EVENT_BYTES.
        """
        *lines, self._rest = (self._rest + raw).split(b"\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise ValueError(f"an event of more than {MAX_EVENT_BYTES} bytes")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]
