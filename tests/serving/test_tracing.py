"""Spans: one for each request, with its phases, on their way to a collector."""

import asyncio
import re
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote

import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.testclient import TestClient

from peagle.engine.outputs import RequestOutput
from peagle.engine.stats import SpeculationStats
from peagle.errors import UserError
from peagle.extras import install_extra
from peagle.serving.app import create_app
from peagle.serving.tracing import Tracing, span_attributes
from serving.collector import collecting
from serving.live import wait_for

memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
pytest.importorskip("opentelemetry.instrumentation.asgi")

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
START = 1_700_000_000.0
ROUTE = "/v1/chat/completions"


def output(index: int = 0, drafts: tuple[int, ...] = (3, 1), **fields: Any) -> RequestOutput:
    stats = SpeculationStats()
    for num_accepted in drafts:
        stats.record(4, num_accepted)
    given = {"text": "x", "token_ids": [7] * 5, "prompt_token_ids": [1, 2, 3]}
    given |= {"finish_reason": "stop", "elapsed_s": 1.0, "num_cached_tokens": 2}
    return RequestOutput(**{**given, "stats": stats, "index": index, **fields})


def client_of(tracing: Tracing, describe: Callable[[], None], status: int = 200) -> TestClient:
    """A client of an application that describes each request, and answers with `status`."""

    async def answer(request: Any) -> Response:
        describe()
        return JSONResponse({}, status)

    app = Starlette(routes=[Route(ROUTE, answer), Route("/health", answer)])
    return TestClient(tracing.wrap(app))


@pytest.fixture
def traced() -> Callable[..., dict[str, Any]]:
    """Sends a request and returns its spans by name."""
    exporter = memory.InMemorySpanExporter()
    tracing = Tracing("", exporter=exporter)

    def request(
        queue_s: float | None = 0.25,
        ttft_s: float | None = 1.0,
        end_s: float = START + 3,
        attributes: dict[str, Any] | None = None,
        parent: str | None = None,
        status: int = 200,
        path: str = ROUTE,
    ) -> dict[str, Any]:
        def describe() -> None:
            tracing.describe(attributes or {}, START, queue_s, ttft_s, end_s)

        headers = {} if parent is None else {"traceparent": parent}
        with client_of(tracing, describe, status) as client:
            assert client.get(path, headers=headers).status_code == status
        tracing.shutdown()
        return {span.name: span for span in exporter.get_finished_spans()}

    return request


def seconds(span: Any) -> tuple[float, float]:
    """Start and end after START, in seconds."""
    return tuple(round(at / 1e9 - START, 3) for at in (span.start_time, span.end_time))


def test_a_request_and_its_phases(traced):
    spans = traced(attributes=span_attributes(ROUTE, "m", [output()]))
    whole = spans.pop(f"GET {ROUTE}")
    times = {name: seconds(span) for name, span in spans.items()}
    assert times == {"queue": (0, 0.25), "prefill": (0.25, 1), "decode": (1, 3)}
    assert whole.parent is None
    assert {span.parent.span_id for span in spans.values()} == {whole.context.span_id}
    assert {span.context.trace_id for span in spans.values()} == {whole.context.trace_id}
    assert whole.kind.name == "SERVER" and whole.status.is_unset
    assert (
        whole.attributes.items()
        >= {
            "http.route": ROUTE,
            "http.status_code": 200,
            "peagle.request_id": "",
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
        }.items()
    )
    assert whole.resource.attributes["service.name"] == "peagle"


def test_several_outputs_share_their_prompt():
    outputs = [output(0), output(1, (), finish_reason="length"), output(0)]
    found = span_attributes("/v1/completions", "m", outputs)
    assert found["gen_ai.operation.name"] == "text_completion"
    assert found["gen_ai.usage.input_tokens"] == 6  # two prompts, one of them with n = 2
    assert found["gen_ai.usage.output_tokens"] == 15
    assert found["gen_ai.response.finish_reasons"] == ["stop", "length", "stop"]
    assert found["peagle.acceptance_length"] == 1 + 8 / 4
    assert span_attributes(ROUTE, "m", [output(drafts=())])["peagle.acceptance_length"] == 1.0


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
    del spans[f"GET {ROUTE}"]
    assert {name: seconds(span) for name, span in spans.items()} == phases


def test_a_clock_that_was_set_back(traced):
    spans = traced(end_s=START - 60)
    del spans[f"GET {ROUTE}"]
    assert {seconds(span) for span in spans.values()} == {(0, 0)}


def test_a_failure(traced):
    given = {"error.type": "timeout", "gen_ai.usage.output_tokens": None}
    whole = traced(attributes=given)[f"GET {ROUTE}"]
    assert whole.status.status_code.name == "ERROR"
    assert whole.attributes["error.type"] == "timeout"
    assert "gen_ai.usage.output_tokens" not in whole.attributes


def test_a_status_of_the_server_is_a_failure(traced):
    assert traced(status=503)[f"GET {ROUTE}"].status.status_code.name == "ERROR"


def test_probes_have_no_span_of_their_own(traced):
    assert "GET /health" not in traced(path="/health")


def test_the_clients_trace_goes_on(traced):
    spans = traced(parent=f"00-{TRACE}-{PARENT}-01")
    assert f"{spans[f'GET {ROUTE}'].parent.span_id:016x}" == PARENT
    assert {f"{span.context.trace_id:032x}" for span in spans.values()} == {TRACE}


def test_a_client_that_does_not_sample_is_not_traced(traced):
    assert traced(parent=f"00-{TRACE}-{PARENT}-00") == {}


@pytest.mark.parametrize(
    "parent", ["", "nonsense", f"00-{'0' * 32}-{PARENT}-01", f"ff-{TRACE}-{PARENT}-01"]
)
def test_a_bad_traceparent_counts_as_none(traced, parent):
    spans = traced(parent=parent)
    assert spans[f"GET {ROUTE}"].parent is None
    assert len(spans) == 4


@pytest.mark.parametrize("convention", ["", "http", "http/dup"])
@pytest.mark.parametrize(
    "url",
    [
        "/v1/models?api_key=SECRET",
        "/v1/models?a=b&key=SECRET#SECRET",
        "/v1/models?api%5Fkey=%53ECRET",
        "/v1/models%3Fapi_key=SECRET",
        "/v1/models&key=SECRET",
        "/v1/models;key=SECRET",
        "/http://user:SECRET@localhost/v1/models",
        "//user:SECRET@localhost/v1/models",
        "//SECRET@localhost/v1/models?key=SECRET",
    ],
)
def test_spans_and_logs_have_no_secret_of_a_url(monkeypatch, caplog, url, convention):
    from opentelemetry.instrumentation import _semconv

    state = _semconv._OpenTelemetrySemanticConventionStability
    monkeypatch.setattr(state, "_initialized", False)
    monkeypatch.setenv("OTEL_SEMCONV_STABILITY_OPT_IN", convention)
    monkeypatch.setenv("OTEL_INSTRUMENTATION_HTTP_CAPTURE_HEADERS_SERVER_REQUEST", ".*")
    caplog.set_level("INFO", "peagle.serving")
    exporter = memory.InMemorySpanExporter()
    tracing = Tracing("", exporter=exporter)
    seen: list[Any] = []
    service: Any = SimpleNamespace(
        metrics=SimpleNamespace(failed=lambda reason: None),
        config=SimpleNamespace(playground=False),
        swaps=None,
    )
    app = create_app(service)

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope)
        await app(scope, receive, send)

    target, _, query = url.partition("?")
    headers = [("host", "localhost"), ("user-agent", "a client"), ("x-tenant", "a tenant")]
    headers += [("authorization", "Bearer SECRET"), ("cookie", "a=SECRET"), ("api-key", "SECRET")]
    headers += [("referer", "http://a/?key=SECRET"), ("x-auth-token", "SECRET")]
    scope = {
        **{"type": "http", "http_version": "1.1", "method": "POST", "scheme": "http"},
        **{"path": unquote(target), "raw_path": target.encode(), "query_string": query.encode()},
        **{"server": ("127.0.0.1", 80), "client": ("127.0.0.1", 1), "root_path": "", "state": {}},
        "headers": [(name.encode(), value.encode()) for name, value in headers],
    }
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    asyncio.run(tracing.wrap(answer)(scope, receive, send))
    tracing.shutdown()
    assert seen == [scope] and sent[0]["status"] in (404, 405)
    (span,) = exporter.get_finished_spans()
    text = span.to_json()
    assert "/v1/models" in text and "a client" in text and "a tenant" in text
    records = [str(vars(record)) for record in caplog.records if record.name == "peagle.serving"]
    assert len(records) == 1 and "/v1/models" in records[0]
    assert "SECRET" not in text + records[0]
    assert "SECRET" not in sent[1]["body"].decode()
    monkeypatch.setattr(state, "_initialized", False)


@pytest.mark.parametrize(
    "missing",
    [
        "opentelemetry",
        "opentelemetry.exporter.otlp.proto.http",
        "opentelemetry.instrumentation.asgi",
    ],
)
def test_a_missing_package_is_named(monkeypatch, missing):
    for name in [name for name in sys.modules if name.startswith(missing)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(UserError, match=re.escape(install_extra("otel"))):
        Tracing("http://127.0.0.1:4318")


@pytest.mark.parametrize(
    "endpoint", ["", "localhost:4318", "grpc://h:4317", "http://", "http://h:x", "http://[h"]
)
def test_an_endpoint_that_is_no_url(endpoint):
    with pytest.raises(UserError, match=re.escape(repr(endpoint))):
        Tracing(endpoint)


# ---- spans on their way ----


def send(tracing: Tracing, count: int) -> None:
    """Describe requests outside of any span of their own: three spans each."""
    for _ in range(count):
        tracing.describe({}, START, 0.1, 0.2, START + 1)


@pytest.mark.parametrize(
    ("path", "expected"), [("", "/v1/traces"), ("/", "/v1/traces"), ("/otlp/x", "/otlp/x")]
)
def test_spans_reach_a_collector(path, expected):
    with collecting() as collector:
        tracing = Tracing(collector.url + path)
        send(tracing, 10)
        tracing.shutdown()
    assert {at for at, _ in collector.received} == {expected}
    assert len(collector.received) == 1  # a batch, not one request each
    assert len(collector.spans()) == 30


@pytest.mark.parametrize("stream", [False, True])
def test_a_served_request_is_one_span_with_its_phases(server, collector, stream):
    request_id = f"traced-{stream}"
    headers = {"X-Request-ID": request_id}
    body = {"prompt": "def f(", "max_tokens": 8, "stream": stream}
    with server.client() as client:
        text = client.post("/v1/completions", json=body, headers=headers).text
        assert ("[DONE]" in text) == stream

    def whole() -> list[Any]:
        return [
            s for s in collector.spans() if s["attributes"].get("peagle.request_id") == request_id
        ]

    wait_for(lambda: len(whole()) == 1)
    (span,) = whole()
    assert span["name"] == "POST /v1/completions"
    assert span["attributes"]["gen_ai.usage.output_tokens"] == 8
    assert span["attributes"]["peagle.num_drafts"] > 0
    children = {s["name"] for s in collector.spans() if s["parent"] == span["id"]}
    assert children == {"queue", "prefill", "decode"}


@pytest.mark.slow
def test_a_collector_that_hangs_holds_nobody():
    export = pytest.importorskip("opentelemetry.sdk.trace.export")
    released = threading.Event()
    answered: list[bool] = []

    class Hanging(export.SpanExporter):
        def export(self, spans: Any) -> Any:
            answered.append(released.wait(60))
            return export.SpanExportResult.FAILURE

    tracing = Tracing("", exporter=Hanging())
    send(tracing, 1500)  # more spans than are kept
    tracing.shutdown(timeout_s=0.2)
    assert not answered
    released.set()
