"""Log records, request ids and spans."""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peagle.engine.outputs import RequestOutput
from peagle.engine.stats import SpeculationStats
from peagle.errors import UserError
from peagle.extras import install_extra
from peagle.serving.request_ids import request_id_from
from peagle.serving.telemetry import (
    JsonFormatter,
    TextFormatter,
    configure_logging,
    make_tracer,
    span_attributes,
)

SOURCE = Path(__file__).resolve().parents[2] / "src"
NAMES = ("peagle.serving", "uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi")
NAMES += ("opentelemetry", "asyncio")
SECRET = "my diagnosis is"
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")


@pytest.fixture
def loggers():
    """Puts the loggers back as they were."""
    kept = [(log, log.handlers, log.level, log.propagate) for log in map(logging.getLogger, NAMES)]
    yield
    for log, handlers, level, propagate in kept:
        log.handlers, log.propagate = handlers, propagate
        log.setLevel(level)


def record(message: str = "hello", error: BaseException | None = None, **extra: Any):
    made = logging.makeLogRecord(
        {"name": "peagle.serving", "levelno": 20, "levelname": "INFO", "msg": message, **extra}
    )
    if error is not None:
        made.exc_info = (type(error), error, error.__traceback__)
    return made


def as_json(*args: Any, **extra: Any) -> dict[str, Any]:
    line = JsonFormatter().format(record(*args, **extra))
    assert len(line.splitlines()) == 1
    return json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def raised(message: str) -> ValueError:
    try:
        raise ValueError(message)
    except ValueError as error:
        return error


# ---- logs -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("loggers")
def test_a_json_line(capsys):
    configure_logging("json", "info")
    logger = logging.getLogger("peagle.serving.app")
    logger.info("%s answered", "request", extra={"request_id": "r1", "status": 200, "seconds": 0.5})
    logger.debug("too much detail")
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    fields = json.loads(line)
    when = datetime.fromisoformat(fields.pop("time"))
    assert when.utcoffset() == timedelta(0)
    assert abs(datetime.now(UTC) - when) < timedelta(minutes=1)
    assert fields == {
        "level": "info",
        "logger": "peagle.serving.app",
        "message": "request answered",
        "request_id": "r1",
        "status": 200,
        "seconds": 0.5,
    }
    assert out == ""


@pytest.mark.usefixtures("loggers")
def test_a_text_line(capsys):
    configure_logging("text", "WARNING")
    extra = {"request_id": "r1", "seconds": 0.5, "path": "/v1/completions", "why": "no room"}
    logging.getLogger("peagle.serving").warning("refused", extra=extra)
    when, _, rest = capsys.readouterr().err.partition(" ")
    assert TIME.fullmatch(when)
    assert rest == (
        "WARNING peagle.serving: refused request_id=r1 seconds=0.5 path=/v1/completions "
        'why="no room"\n'
    )


@pytest.mark.usefixtures("loggers")
def test_the_last_configuration_holds(capsys):
    configure_logging("text", "debug")
    configure_logging("json", "error")
    logging.getLogger("peagle.serving").warning("no")
    logging.getLogger("peagle.serving").error("yes")
    (line,) = capsys.readouterr().err.splitlines()
    assert json.loads(line)["message"] == "yes"


@pytest.mark.usefixtures("loggers")
def test_uvicorn_and_opentelemetry_write_the_same_lines(capsys):
    import uvicorn

    configure_logging("json", "info")
    uvicorn.Config("nothing:app", log_config=None, log_level=None)
    # The arguments that uvicorn gives, color_message among them.
    logging.getLogger("uvicorn.error").info(
        "Started server process [%d]", 7, extra={"color_message": "Started \x1b[36m%d\x1b[0m"}
    )
    logging.getLogger("uvicorn.access").info(
        '%s - "%s %s HTTP/%s" %d', "127.0.0.1:5", "GET", "/health", "1.1", 200
    )
    logging.getLogger("opentelemetry.sdk._shared_internal").warning("Queue full, dropping Span.")
    out, err = capsys.readouterr()
    first, second, third = map(json.loads, err.splitlines())
    assert first["message"] == "Started server process [7]"
    assert first.keys() == {"time", "level", "logger", "message"}
    assert second["message"] == '127.0.0.1:5 - "GET /health HTTP/1.1" 200'
    assert third["level"] == "warning"
    assert out == ""


@pytest.mark.usefixtures("loggers")
@pytest.mark.parametrize("name", ["peagle.serving", "uvicorn.error", "uvicorn.access"])
def test_a_record_is_written_once(capsys, caplog, name):
    # caplog has a handler at the root, as a library's basicConfig would put there.
    configure_logging("text", "info")
    logging.getLogger(name).info("once")
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert caplog.records == []


@pytest.mark.parametrize("args", [("xml", "info"), ("json", "loud"), ("json", "notset")])
@pytest.mark.usefixtures("loggers")
def test_unknown_formats_and_levels(args):
    bad = args[0] if args[0] != "json" else args[1]
    with pytest.raises(UserError, match=f"{bad}.*expected"):
        configure_logging(*args)


ANY_TEXT = st.text(st.characters())  # surrogates too


@given(ANY_TEXT, ANY_TEXT)
def test_no_value_can_forge_a_line(message, value):
    fields = as_json(message, path=value, engine={value: [value]})
    assert fields["message"] == message
    assert fields["path"] == value
    text = TextFormatter().format(record(message, path=value, engine={value: [value]}))
    assert text.isprintable() and len(text.splitlines()) == 1
    text.encode()  # a surrogate would not


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r", "\x0b", "\x85", "\u2028", "\x1b[2K\r"])
def test_an_exception_cannot_forge_a_line(end):
    forged = "2026-01-01T00:00:00.000Z INFO peagle.serving: forged"
    error = raised(f"bad{end}{forged}")
    head, *rest = TextFormatter().format(record("failed", error)).splitlines()
    assert head.endswith("peagle.serving: failed")
    assert all(line.startswith("    ") for line in rest)
    assert any("Traceback" in line for line in rest) and any("raised" in line for line in rest)
    fields = as_json("failed", error)
    assert fields["message"] == "failed"
    assert fields["exception"].startswith("Traceback") and forged in fields["exception"]


@pytest.mark.parametrize("name", ["prompt", "messages", "text", "output", "prompt_token_ids"])
def test_what_users_and_models_write_is_left_out(name):
    extras: tuple[dict[str, Any], ...] = (
        {name: SECRET},
        {name: [{"role": "user", "content": SECRET}]},
        {"request": {"inner": [{name: SECRET}]}},
    )
    for extra in extras:
        for formatter in (JsonFormatter(), TextFormatter()):
            line = formatter.format(record("done", **extra, status=200))
            assert SECRET not in line and "not logged" in line and "200" in line


def test_what_users_write_is_there_where_it_is_asked_for():
    asked = {"prompt": SECRET, "output": ["a\nb"]}
    assert as_json("done", log_prompts=asked)["log_prompts"] == asked
    assert SECRET in TextFormatter().format(record("done", log_prompts=asked))


def test_extra_fields_do_not_replace_those_of_the_record():
    fields = as_json("hello", time="yesterday", level="fatal", logger="other", engine=1)
    assert TIME.fullmatch(fields["time"])
    assert (fields["level"], fields["logger"], fields["engine"]) == ("info", "peagle.serving", 1)


def test_values_that_json_does_not_know():
    fields = as_json("x", a=float("nan"), b=float("inf"), c=Path("/p"), d=(1, None), e={2: True})
    found = {name: fields[name] for name in "abcde"}
    assert found == {"a": "nan", "b": "inf", "c": "/p", "d": [1, None], "e": {"2": True}}


# ---- request ids ----------------------------------------------------------------------------


@pytest.mark.parametrize("given_id", ["a", "A-b_c.9", "x" * 128])
@pytest.mark.parametrize("name", ["x-request-id", "X-Request-ID"])
def test_a_fit_request_id_is_kept(name, given_id):
    assert request_id_from({"host": "h", name: given_id}) == given_id


@pytest.mark.parametrize("given_id", ["", "x" * 129, "a b", "a\n", "ä", "a/b", "٣", "a\x00"])
def test_another_is_replaced(given_id):
    ids = {request_id_from({"x-request-id": given_id}) for _ in range(3)} | {request_id_from({})}
    assert len(ids) == 4
    assert all(re.fullmatch(r"[0-9a-f]{32}", new) for new in ids)


@given(st.text())
def test_request_ids_are_always_fit(given_id):
    assert re.fullmatch(r"[A-Za-z0-9._-]{1,128}", request_id_from({"x-request-id": given_id}))


# ---- spans ----------------------------------------------------------------------------------

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
START = 1_700_000_000.0


def output(index: int = 0, drafts: tuple[int, ...] = (3, 1), **fields: Any) -> RequestOutput:
    stats = SpeculationStats()
    for num_accepted in drafts:
        stats.record(4, num_accepted)
    given = {"text": SECRET, "token_ids": [7] * 5, "prompt_token_ids": [1, 2, 3]}
    given |= {"finish_reason": "stop", "elapsed_s": 1.0, "num_cached_tokens": 2}
    return RequestOutput(**{**given, "stats": stats, "index": index, **fields})


@pytest.fixture
def traced():
    """Reports a request and gives its spans by name."""
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    exporter = memory.InMemorySpanExporter()
    tracer = make_tracer(None, exporter=exporter)

    def request(
        queue_s: float | None = 0.25,
        ttft_s: float | None = 1.0,
        end_s: float = START + 3,
        attributes: dict[str, Any] | None = None,
        parent: str | None = None,
    ) -> dict[str, Any]:
        route = "/v1/chat/completions"
        tracer.request("r1", route, START, queue_s, ttft_s, end_s, attributes or {}, parent)
        tracer.shutdown()
        return {span.name: span for span in exporter.get_finished_spans()}

    return request


def seconds(span: Any) -> tuple[float, float]:
    """Start and end after START, in seconds."""
    return tuple(round(at / 1e9 - START, 3) for at in (span.start_time, span.end_time))


def test_a_request_and_its_phases(traced):
    spans = traced(attributes=span_attributes("m", [output()]))
    times = {name: seconds(span) for name, span in spans.items()}
    assert times == {
        "llm_request": (0, 3),
        "queue": (0, 0.25),
        "prefill": (0.25, 1),
        "decode": (1, 3),
    }
    whole = spans.pop("llm_request")
    assert whole.parent is None
    assert {span.parent.span_id for span in spans.values()} == {whole.context.span_id}
    assert {span.context.trace_id for span in spans.values()} == {whole.context.trace_id}
    assert whole.kind.name == "SERVER" and whole.status.is_unset
    assert dict(whole.attributes) == {
        "http.route": "/v1/chat/completions",
        "peagle.request_id": "r1",
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "peagle",
        "gen_ai.request.model": "m",
        "gen_ai.response.model": "m",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 2,
        "gen_ai.usage.output_tokens": 5,
        "peagle.num_drafts": 2,
        "peagle.num_accepted_tokens": 4,
        "peagle.acceptance_length": 3.0,
    }
    assert whole.resource.attributes["service.name"] == "peagle"


def test_several_outputs_share_their_prompt():
    found = span_attributes("m", [output(0), output(1, (), finish_reason="length"), output(0)])
    assert found["gen_ai.usage.input_tokens"] == 6  # two prompts, one of them with n = 2
    assert found["gen_ai.usage.output_tokens"] == 15
    assert found["gen_ai.response.finish_reasons"] == ["stop", "length", "stop"]
    assert found["peagle.acceptance_length"] == 1 + 8 / 4
    assert span_attributes("m", [output(drafts=())])["peagle.acceptance_length"] == 1.0


@pytest.mark.parametrize(
    ("queue_s", "ttft_s", "phases"),
    [
        (None, None, {"queue": (0, 3)}),
        (None, 1.0, {"prefill": (0, 1), "decode": (1, 3)}),
        (1.0, None, {"queue": (0, 1), "prefill": (1, 3)}),
        (1.0, 0.5, {"queue": (0, 1), "prefill": (1, 1), "decode": (1, 3)}),
        (1.0, 9.0, {"queue": (0, 1), "prefill": (1, 3), "decode": (3, 3)}),
        (9.0, 9.5, {"queue": (0, 3), "prefill": (3, 3), "decode": (3, 3)}),
    ],
)
def test_phases_that_were_not_reached_or_do_not_fit(traced, queue_s, ttft_s, phases):
    spans = traced(queue_s, ttft_s)
    assert {name: seconds(span) for name, span in spans.items()} == {
        "llm_request": (0, 3),
        **phases,
    }


def test_a_clock_that_was_set_back(traced):
    assert {seconds(span) for span in traced(end_s=START - 60).values()} == {(0, 0)}


def test_a_failure(traced):
    span = traced(attributes={"error.type": "timeout", "gen_ai.usage.output_tokens": None})
    whole = span["llm_request"]
    assert whole.status.status_code.name == "ERROR"
    assert whole.attributes["error.type"] == "timeout"
    assert "gen_ai.usage.output_tokens" not in whole.attributes


def test_the_clients_trace_goes_on(traced):
    spans = traced(parent=f"00-{TRACE}-{PARENT}-01")
    whole = spans["llm_request"]
    assert f"{whole.parent.span_id:016x}" == PARENT
    assert {f"{span.context.trace_id:032x}" for span in spans.values()} == {TRACE}


def test_a_client_that_does_not_sample_is_not_traced(traced):
    assert traced(parent=f"00-{TRACE}-{PARENT}-00") == {}


@pytest.mark.parametrize(
    "parent", ["", "nonsense", f"00-{'0' * 32}-{PARENT}-01", f"ff-{TRACE}-{PARENT}-01", "ä\n"]
)
def test_a_bad_traceparent_counts_as_none(traced, parent):
    spans = traced(parent=parent)
    assert spans["llm_request"].parent is None
    assert len(spans) == 4


def test_without_an_endpoint_nothing_is_imported():
    code = (
        "import sys\n"
        "from peagle.serving.telemetry import make_tracer\n"
        "tracer = make_tracer(None)\n"
        "tracer.request('r', '/v1/completions', 0.0, None, None, 1.0, {}, 'x')\n"
        "tracer.shutdown()\n"
        "loaded = {name.partition('.')[0] for name in sys.modules}\n"
        "print(sorted(loaded & {'opentelemetry', 'torch', 'requests', 'google'}))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.stdout.strip() == "[]", result.stderr


@pytest.mark.parametrize("missing", ["opentelemetry", "opentelemetry.exporter.otlp.proto.http"])
def test_a_missing_package_is_named(monkeypatch, missing):
    for name in [name for name in sys.modules if name.startswith(missing)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(UserError, match=re.escape(install_extra("otel"))):
        make_tracer("http://127.0.0.1:4318")


@pytest.mark.parametrize(
    "endpoint", ["", "localhost:4318", "grpc://h:4317", "http://", "http://h:x", "http://[h"]
)
def test_an_endpoint_that_is_no_url(endpoint):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    with pytest.raises(UserError, match=re.escape(repr(endpoint))):
        make_tracer(endpoint)


# ---- spans on their way ---------------------------------------------------------------------


@pytest.fixture
def collector():
    """An OTLP collector over HTTP: `url`, and the (path, body) of every request to it."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    received: list[tuple[str, bytes]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield SimpleNamespace(url=f"http://127.0.0.1:{server.server_port}", received=received)
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("path", "expected"), [("", "/v1/traces"), ("/", "/v1/traces"), ("/otlp/x", "/otlp/x")]
)
def test_spans_reach_a_collector(collector, path, expected):
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    tracer = make_tracer(collector.url + path)
    for i in range(10):
        tracer.request(f"r{i}", "/v1/completions", START, 0.1, 0.2, START + 1, {})
    tracer.shutdown()
    assert {at for at, _ in collector.received} == {expected}
    assert len(collector.received) == 1  # a batch, not one request each
    message = ExportTraceServiceRequest.FromString(collector.received[0][1])
    spans = [s for r in message.resource_spans for scope in r.scope_spans for s in scope.spans]
    assert len(spans) == 40
    ids = {a.value.string_value for s in spans for a in s.attributes if "request_id" in a.key}
    assert ids == {f"r{i}" for i in range(10)}


def test_a_collector_that_hangs_holds_nobody():
    export = pytest.importorskip("opentelemetry.sdk.trace.export")
    released = threading.Event()

    class Hanging(export.SpanExporter):
        def export(self, spans: Any) -> Any:
            released.wait(60)
            return export.SpanExportResult.FAILURE

    tracer = make_tracer(None, exporter=Hanging())
    begun = time.monotonic()
    for _ in range(1500):  # more spans than are kept
        tracer.request("r", "/v1/completions", START, 0.1, 0.2, START + 1, {})
    tracer.shutdown(timeout_s=0.2)
    taken = time.monotonic() - begun
    released.set()
    assert taken < 20


def test_a_dead_collector_does_not_hold_the_end():
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    with socket.socket() as closed:  # a port that nobody listens at
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    tracer = make_tracer(f"http://127.0.0.1:{port}")
    tracer.request("r", "/v1/completions", START, 0.1, 0.2, START + 1, {})
    begun = time.monotonic()
    tracer.shutdown(timeout_s=0.2)
    assert time.monotonic() - begun < 5
