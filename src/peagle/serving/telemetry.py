"""What the server tells about its requests: log records and, if asked for, spans.

Nothing here writes what a user wrote or what a model answered, unless the caller passes it to a log
record as the extra field `log_prompts`.
"""

from __future__ import annotations

import io
import json
import logging
import math
import os
import re
import sys
import threading
import warnings
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, Protocol, TextIO
from urllib.parse import urlsplit

from peagle import __version__
from peagle.errors import UserError
from peagle.extras import install_extra
from peagle.serving.log_rate import RateLimitedHandler

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

    from peagle.engine.outputs import RequestOutput

# ---- logs -----------------------------------------------------------------------------------

LOGGER = "peagle.serving"
LEVELS = ("debug", "info", "warning", "error", "critical")
# Those of libraries that run in the server; what they write must not break the log's form.
_LIBRARIES = ("uvicorn", "opentelemetry", "asyncio")
_OF_UVICORN = ("uvicorn.error", "uvicorn.access", "uvicorn.asgi")
_NOT_EXTRA = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName", "color_message"}
_USER_TEXT = {
    *("prompt", "prompts", "prompt_token_ids", "messages", "content", "input", "body"),
    *("text", "output", "outputs", "completion", "token_ids", "tools", "arguments"),
}
_WITHHELD = "[not logged]"


def configure_logging(format: Literal["text", "json"] = "text", level: str = "info") -> None:
    """Send the records of this server and of its libraries to stderr, one line each.

    A kind of record that comes very often is limited in rate, see `RateLimitedHandler`.

    Warnings become records. With "json" all else that is written to `sys.stderr` becomes a record
    a line too. Start uvicorn with `log_config=None`, or it puts its own handlers back. May be
    called again.

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
    warnings.showwarning = _log_warning
    sys.stderr = JsonLines(stderr) if format == "json" else stderr
    # Libraries that are imported already keep the stream that they found.
    for other in logging.Logger.manager.loggerDict.values():
        for kept in getattr(other, "handlers", ()):
            is_other = isinstance(kept, logging.StreamHandler) and kept is not handler
            if is_other and kept.stream is stderr:
                kept.setStream(sys.stderr)


def _log_warning(message: Warning | str, *_: object, **__: object) -> None:
    logging.getLogger(LOGGER).warning("%s", message)


class JsonLines(io.TextIOBase):
    """Turns each line written to it into a record in JSON; blank lines are dropped.

    Attributes:
        stream: takes the records.
    """

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
        """The stream's."""
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
    """Records as `time LEVEL logger: message name=value`; what is not printable is escaped."""

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
        return "\n".join(_printable(part) for part in lines)


def _time(record: logging.LogRecord) -> str:
    time = datetime.fromtimestamp(record.created, UTC)
    return time.isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"


def _extra(record: logging.LogRecord) -> dict[str, Any]:
    given = vars(record)
    return {
        name: _json_value(given[name]) if name == "log_prompts" else _without_text(name, value)
        for name, value in given.items()
        if name not in _NOT_EXTRA
    }


def _without_text(name: object, value: object) -> Any:
    """A value as JSON has it, without what users and models wrote."""
    if name in _USER_TEXT:
        return _WITHHELD
    if isinstance(value, Mapping):
        return {str(key): _without_text(key, inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_text(None, inner) for inner in value]
    return _json_value(value)


def _json_value(value: object) -> Any:
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): _json_value(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(inner) for inner in value]
    return str(value)


def _printable(text: str) -> str:
    """The text with control, format and other unprintable characters as escapes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


# ---- spans ----------------------------------------------------------------------------------


class Tracer(Protocol):
    """Where finished requests are reported to."""

    def request(
        self,
        request_id: str,
        route: str,
        started_s: float,
        queue_s: float | None,
        ttft_s: float | None,
        end_s: float,
        attributes: Mapping[str, Any],
        parent: str | None = None,
    ) -> None:
        """Report a request as a span "llm_request" with the children "queue", "prefill", "decode".

        Args:
            request_id: becomes the attribute peagle.request_id.
            route: such as /v1/completions.
            started_s, end_s: when it came and when it was answered, as time.time() has it.
            queue_s: seconds before its prompt was begun. None: not known; without a first token it
                counts as never begun, with one there is no child "queue".
            ttft_s: seconds to its first token; None if it got none.
            attributes: `span_attributes` and others; "error.type" marks a failure, None is left
                out. No text of users or models belongs here.
            parent: the header traceparent (W3C); another than a valid one counts as none.
        """
        ...

    def shutdown(self, timeout_s: float = 5.0) -> None:
        """Send what is left; returns after `timeout_s` at the latest."""
        ...


def make_tracer(endpoint: str | None, *, exporter: SpanExporter | None = None) -> Tracer:
    """A tracer that sends spans by OTLP over HTTP, in batches and from a thread of its own.

    OpenTelemetry's variables (OTEL_EXPORTER_OTLP_HEADERS, OTEL_SERVICE_NAME, ...) hold.

    Args:
        endpoint: URL of the collector, such as http://localhost:4318; without a path, /v1/traces
            is added. None: a tracer that does nothing and imports nothing.
        exporter: where the spans go instead.

    Raises:
        UserError: the endpoint is no such URL, or OpenTelemetry is not installed.
    """
    if endpoint is None and exporter is None:
        return _NoTracer()
    try:
        return _OtelTracer(exporter or _otlp_exporter(endpoint or ""))
    except ImportError:
        raise UserError(
            f"Tracing to {endpoint!r} needs OpenTelemetry, which is not installed; run "
            f"{install_extra('otel')}"
        ) from None


def span_attributes(model: str, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """OpenTelemetry's gen_ai.* of a finished request, and what its drafts did.

    Args:
        model: the name that the client asked for.
        outputs: all outputs of the request; a prompt counts once, whatever n was.
    """
    prompts = [output for output in outputs if output.index == 0]
    drafts = sum(output.stats.num_drafts for output in outputs)
    accepted = sum(output.stats.num_accepted_tokens for output in outputs)
    return {
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.response.finish_reasons": [output.finish_reason for output in outputs],
        "gen_ai.usage.input_tokens": sum(len(output.prompt_token_ids) for output in prompts),
        "gen_ai.usage.cache_read.input_tokens": sum(o.num_cached_tokens for o in prompts),
        "gen_ai.usage.output_tokens": sum(len(output.token_ids) for output in outputs),
        "peagle.num_drafts": drafts,
        "peagle.num_accepted_tokens": accepted,
        "peagle.acceptance_length": 1 + accepted / drafts if drafts else 1.0,
    }


class _NoTracer:
    def request(self, *args: Any, **kwargs: Any) -> None:
        pass

    def shutdown(self, timeout_s: float = 5.0) -> None:
        pass


class _OtelTracer:
    """Spans in batches; if the collector is slow, the newest are kept and nobody waits."""

    def __init__(self, exporter: SpanExporter) -> None:
        from opentelemetry import trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._trace = trace
        self._propagator = TraceContextTextMapPropagator()
        names = {"service.name": os.environ.get("OTEL_SERVICE_NAME", "peagle")}
        resource = Resource.create({**names, "service.version": __version__})
        # Not at exit: a dead collector would hold the process for half a minute.
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("peagle.serving", __version__)

    def request(
        self,
        request_id: str,
        route: str,
        started_s: float,
        queue_s: float | None,
        ttft_s: float | None,
        end_s: float,
        attributes: Mapping[str, Any],
        parent: str | None = None,
    ) -> None:
        known = {name: value for name, value in attributes.items() if value is not None}
        span = self._tracer.start_span(
            "llm_request",
            context=self._propagator.extract({"traceparent": parent} if parent else {}),
            kind=self._trace.SpanKind.SERVER,
            attributes={**_of_route(route), "peagle.request_id": request_id, **known},
            start_time=_nanoseconds(started_s),
        )
        if "error.type" in known:
            span.set_status(self._trace.StatusCode.ERROR)
        inside = self._trace.set_span_in_context(span)
        for name, start_s, stop_s in _phases(started_s, queue_s, ttft_s, end_s):
            child = self._tracer.start_span(name, inside, start_time=_nanoseconds(start_s))
            child.end(_nanoseconds(stop_s))
        span.end(_nanoseconds(max(started_s, end_s)))

    def shutdown(self, timeout_s: float = 5.0) -> None:
        # A daemon: it may still be waiting for the collector when the process ends.
        worker = threading.Thread(target=self._provider.shutdown, daemon=True)
        worker.start()
        worker.join(timeout_s)


def _otlp_exporter(endpoint: str) -> SpanExporter:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    try:
        parts = urlsplit(endpoint)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port or an address that is none
        parts, valid = urlsplit(""), False
    if not valid:
        raise UserError(
            f"The endpoint for traces is {endpoint!r}; expected the URL of an OTLP collector over "
            "HTTP, such as http://localhost:4318."
        )
    if parts.path in ("", "/"):
        parts = parts._replace(path="/v1/traces")
    return OTLPSpanExporter(endpoint=parts.geturl())


def _of_route(route: str) -> dict[str, str]:
    operation = "chat" if "chat" in route else "text_completion"
    return {
        "http.route": route,
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "peagle",
    }


def _phases(
    started_s: float, queue_s: float | None, ttft_s: float | None, end_s: float
) -> list[tuple[str, float, float]]:
    """(name, start, end) of the phases that a request reached, one after the other."""
    end_s = max(started_s, end_s)
    if queue_s is None and ttft_s is None:
        return [("queue", started_s, end_s)]
    begun_s = min(started_s + (queue_s or 0.0), end_s)
    queue = [] if queue_s is None else [("queue", started_s, begun_s)]
    if ttft_s is None:
        return [*queue, ("prefill", begun_s, end_s)]
    first_s = min(max(started_s + ttft_s, begun_s), end_s)
    return [*queue, ("prefill", begun_s, first_s), ("decode", first_s, end_s)]


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
