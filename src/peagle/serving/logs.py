"""The server's log: one line a record, as text or JSON, limited in rate.

The log has no text of users or models, unless a record has the extra field `log_prompts`.
"""

import io
import json
import logging
import math
import re
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

from peagle.errors import UserError

LOGGER = "peagle.serving"
LEVELS = ("debug", "info", "warning", "error", "critical")
# Libraries that run in the server; their lines must not break the log's form.
_LIBRARIES = ("uvicorn", "opentelemetry", "asyncio")
_OF_UVICORN = ("uvicorn.error", "uvicorn.access", "uvicorn.asgi")
_NOT_EXTRA = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName", "color_message"}
_USER_TEXT = {
    *("prompt", "prompts", "prompt_token_ids", "messages", "content", "input", "body"),
    *("text", "output", "outputs", "completion", "token_ids", "tools", "arguments"),
}
WINDOW_S = 10.0
MAX_IN_WINDOW = 50
_QUERY = re.compile(r"[?&#;].*", re.DOTALL)
_CREDENTIALS = re.compile(r"[^/]*@")


def recorded_path(path: str) -> str:
    """Return the path of a request as logs and spans record it, at most 200 characters.

    A client that escapes its URL twice, or puts a whole URL into a path, brings a query or
    credentials along, which may hold a key. They are left out.
    """
    return _CREDENTIALS.sub("", _QUERY.sub("", path))[:200]


def configure_logging(format: Literal["text", "json"] = "text", level: str = "info") -> None:
    """Send the records of this server and of its libraries to stderr, one line each.

    A kind of record that comes very often is limited in rate, see `RateLimitedHandler`. Warnings
    become records. With "json" all else that is written to `sys.stderr` becomes a record a line
    too. Start uvicorn with `log_config=None`, or it puts its own handlers back. May be called
    again.

    Args:
        format: "json": objects with time (ISO 8601, UTC), level, logger, message, the extra
            fields of the record and, with an exception, its traceback in `exception`. "text": the
            same for people; a traceback follows on indented lines.
        level: one of LEVELS, in any case.

    Raises:
        UserError: an unknown format or level.
    """
    formatters = {"text": TextFormatter, "json": JsonFormatter}
    if format not in formatters:
        raise UserError(f"The log format is {format!r}; expected text or json.")
    if level.lower() not in LEVELS:
        raise UserError(f"The log level is {level!r}; expected one of {', '.join(LEVELS)}.")
    stderr = sys.stderr.stream if isinstance(sys.stderr, JsonLines) else sys.stderr
    handler = RateLimitedHandler(stderr)
    handler.setFormatter(formatters[format]())
    for name in (LOGGER, *_LIBRARIES, *_OF_UVICORN):
        logger = logging.getLogger(name)
        logger.setLevel(level.upper())
        logger.propagate = name in _OF_UVICORN
        logger.handlers = [] if name in _OF_UVICORN else [handler]

    def log_warning(message: Warning | str, *_: object, **__: object) -> None:
        logging.getLogger(LOGGER).warning("%s", message)

    warnings.showwarning = log_warning
    sys.stderr = JsonLines(stderr) if format == "json" else stderr
    # Libraries that are imported already keep the stream that they found.
    for other in logging.Logger.manager.loggerDict.values():
        for kept in getattr(other, "handlers", ()):
            is_other = isinstance(kept, logging.StreamHandler) and kept is not handler
            if is_other and kept.stream is stderr:
                kept.setStream(sys.stderr)


class JsonLines(io.TextIOBase):
    """Turns each line written to it into a record in JSON on `stream`; drops blank lines."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self._formatter = JsonFormatter()
        self._lock = threading.Lock()
        self._rest = ""

    def write(self, text: str) -> int:
        """Write a record for each line that `text` ends."""
        with self._lock:
            *lines, self._rest = re.split(r"[\r\n]", self._rest + text)
            for line in filter(str.strip, lines):
                is_error = line.startswith("peagle: error: ")
                level = logging.ERROR if is_error else logging.WARNING
                line = line.removeprefix("peagle: error: ")
                record = logging.LogRecord("stderr", level, "", 0, "%s", (line,), None)
                self.stream.write(self._formatter.format(record) + "\n")
        return len(text)

    def flush(self) -> None:
        """Flush the stream; a line that has not ended is kept."""
        self.stream.flush()

    def fileno(self) -> int:
        return self.stream.fileno()


class JsonFormatter(logging.Formatter):
    """Records as JSON objects in ASCII, so that no character can end a line."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields |= {name: value for name, value in _extra(record).items() if name not in fields}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, allow_nan=False)


class TextFormatter(logging.Formatter):
    """Records as `time LEVEL logger: message name=value`, with unprintable characters escaped."""

    def format(self, record: logging.LogRecord) -> str:
        line = f"{_time(record)} {record.levelname} {record.name}: {record.getMessage()}"
        for name, value in _extra(record).items():
            text = value if isinstance(value, str) else json.dumps(value)
            plain = re.fullmatch(r"[\w./:+-]+", text, re.ASCII) or not isinstance(value, str)
            line += f" {name}={text if plain else json.dumps(text, ensure_ascii=False)}"
        lines = [line]
        if record.exc_info:
            # Indented, since a message with newlines could otherwise pass for a record.
            lines += ["    " + part for part in self.formatException(record.exc_info).splitlines()]
        return "\n".join(
            part
            if part.isprintable()
            else "".join(
                c if c.isprintable() else c.encode("unicode_escape").decode() for c in part
            )
            for part in lines
        )


def _time(record: logging.LogRecord) -> str:
    time = datetime.fromtimestamp(record.created, UTC)
    return time.isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"


def _extra(record: logging.LogRecord) -> dict[str, Any]:
    return {
        name: _json_value(value, name, is_shown=name == "log_prompts")
        for name, value in vars(record).items()
        if name not in _NOT_EXTRA
    }


def _json_value(value: object, name: object = None, *, is_shown: bool = False) -> Any:
    """Return a value of JSON; unless shown, without the text of users and models."""
    if name in _USER_TEXT and not is_shown:
        return "[not logged]"
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        pairs = value.items()
        return {str(key): _json_value(inner, key, is_shown=is_shown) for key, inner in pairs}
    if isinstance(value, list | tuple):
        return [_json_value(inner, is_shown=is_shown) for inner in value]
    return str(value)


# ---- the limit of lines ----


class RateLimitedHandler(logging.StreamHandler[TextIO]):
    """Writes at most 50 records of a kind in 10 seconds, then how many it left out.

    Records are of one kind if logger, level, the first line of the message before its arguments
    are put in, and the HTTP status (where there is one) are the same. Records with status 200 are
    all written: the engines' work bounds how many there are.

    Args:
        window_s: seconds that are looked at together.
    """

    def __init__(self, stream: TextIO, window_s: float = WINDOW_S) -> None:
        super().__init__(stream)
        self._window_s = window_s
        self._window_ends_s = 0.0
        self._counts: Counter[tuple[str, int, str]] = Counter()
        self._timer: threading.Timer | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, or count it; the handler's lock is held."""
        status = getattr(record, "status", None)
        if status == 200:
            return super().emit(record)
        if time.monotonic() >= self._window_ends_s:
            self.write_counts()
            self._window_ends_s = time.monotonic() + self._window_s
        first_line = str(record.msg).partition("\n")[0][:100]
        name = first_line if status is None else f"{first_line} (status {status})"
        kind = (record.name, record.levelno, name)
        self._counts[kind] += 1
        if self._counts[kind] <= MAX_IN_WINDOW:
            super().emit(record)
        elif self._timer is None:
            # Records of other kinds may not come for a long time.
            self._timer = threading.Timer(self._window_s, self.write_counts)
            self._timer.daemon = True
            self._timer.start()

    def write_counts(self) -> None:
        """Write how many records were left out so far."""
        self.acquire()  # a lock that one thread may take twice
        try:
            counts, self._counts = self._counts, Counter()
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            for (name, level, first_line), count in counts.items():
                if count > MAX_IN_WINDOW:
                    text = "left out %d more lines like: %s"
                    arguments = (count - MAX_IN_WINDOW, first_line)
                    super().emit(logging.LogRecord(name, level, "", 0, text, arguments, None))
        finally:
            self.release()

    def close(self) -> None:
        """Write how many records were left out, and close."""
        self.write_counts()
        super().close()
