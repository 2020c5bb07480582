"""Spans of requests, sent by OpenTelemetry: OTLP over HTTP, in batches, from a thread of its own.

OpenTelemetry's ASGI instrumentation makes the span of a request; this file adds what the model did.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from peagle import __version__
from peagle.errors import UserError
from peagle.extras import install_extra
from peagle.serving.logs import recorded_path

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from starlette.types import ASGIApp, Receive, Scope, Send

    from peagle.engine.outputs import RequestOutput

# Probes and files of the page have no span.
_UNTRACED_PATHS = "/(live|health|ready|ping|metrics)$,/static/,://[^/]+/?$"
# Names of headers that hold keys, or URLs of other pages.
_SECRETS = re.compile(rb"authorization|cookie|key|password|referer|secret|token")


class Tracing:
    """Sends a span of each request; a slow collector loses the oldest spans and delays nobody.

    OpenTelemetry's variables (OTEL_EXPORTER_OTLP_HEADERS, OTEL_SERVICE_NAME, ...) hold.

    Args:
        endpoint: URL of the collector, such as http://localhost:4318; without a path, /v1/traces
            is added.
        exporter: takes the spans instead.

    Raises:
        UserError: the endpoint is no such URL, or OpenTelemetry is not installed.
    """

    def __init__(self, endpoint: str, *, exporter: SpanExporter | None = None) -> None:
        try:
            from opentelemetry import trace
            from opentelemetry.instrumentation.asgi import OpenTelemetryMiddleware
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor

            exporter = exporter or _otlp_exporter(endpoint)
        except ImportError:
            raise UserError(
                f"Tracing to {endpoint!r} needs OpenTelemetry, which is not installed; run "
                f"{install_extra('otel')}"
            ) from None
        self._trace, self._middleware = trace, OpenTelemetryMiddleware
        names = {"service.name": os.environ.get("OTEL_SERVICE_NAME", "peagle")}
        resource = Resource.create({**names, "service.version": __version__})
        # Not at exit: a dead collector would hold the process for half a minute.
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("peagle.serving", __version__)

    def wrap(self, app: ASGIApp) -> ASGIApp:
        """Return the application with a span around each request; probes get none."""

        def name_request(span: Any, scope: Scope) -> None:
            span.set_attribute("http.route", scope["path"])
            request_id = scope.get("state", {}).get("request_id", "")
            span.set_attribute("peagle.request_id", request_id)

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            await app(scope.get("peagle.whole_scope", scope), receive, send)

        middleware = self._middleware(
            answer,
            excluded_urls=_UNTRACED_PATHS,
            server_request_hook=name_request,
            tracer_provider=self._provider,
            exclude_spans=["receive", "send"],
        )

        async def trace(scope: Scope, receive: Receive, send: Send) -> None:
            traced = without_secrets(scope) if scope["type"] == "http" else scope
            await middleware(traced, receive, send)

        return trace

    def describe(
        self,
        attributes: Mapping[str, Any],
        started_s: float,
        queue_s: float | None,
        ttft_s: float | None,
        end_s: float,
    ) -> None:
        """Add attributes, and the children "queue", "prefill" and "decode", to the current span.

        Args:
            attributes: `span_attributes` and others; "error.type" marks a failure, None is left
                out. No text of users or models belongs here.
            started_s, end_s: when the request came and when it was answered, in seconds since 1970.
            queue_s: seconds before its prompt was begun. None: not known; without a first token it
                counts as never begun, with one there is no child "queue".
            ttft_s: seconds to its first token; None if it got none.
        """
        span = self._trace.get_current_span()
        known = {name: value for name, value in attributes.items() if value is not None}
        span.set_attributes(known)
        if "error.type" in attributes:
            span.set_status(self._trace.StatusCode.ERROR)
        end_s = max(started_s, end_s)
        begun_s = first_s = end_s  # of prefill and decode
        if queue_s is not None or ttft_s is not None:
            begun_s = min(started_s + (queue_s or 0.0), end_s)
        if ttft_s is not None:
            first_s = min(max(started_s + ttft_s, begun_s), end_s)
        for name, begin_s, stop_s, is_reached in (
            ("queue", started_s, begun_s, queue_s is not None or ttft_s is None),
            ("prefill", begun_s, first_s, queue_s is not None or ttft_s is not None),
            ("decode", first_s, end_s, ttft_s is not None),
        ):
            if is_reached:
                child = self._tracer.start_span(name, start_time=round(begin_s * 1e9))
                child.end(round(stop_s * 1e9))

    def shutdown(self, timeout_s: float = 5.0) -> None:
        """Send the spans that are left; return after `timeout_s` at the latest."""
        # A daemon: it may still be waiting for the collector when the process ends.
        worker = threading.Thread(target=self._provider.shutdown, daemon=True)
        worker.start()
        worker.join(timeout_s)


def without_secrets(scope: Scope) -> Scope:
    """Return a request without secrets, for a span; the item "peagle.whole_scope" is the request.

    Left out are the query, parts of the path that may hold a key, and headers with keys, which
    OTEL_INSTRUMENTATION_HTTP_CAPTURE_HEADERS_SERVER_REQUEST could ask for.
    """
    headers = [(name, value) for name, value in scope["headers"] if not _SECRETS.search(name)]
    path = recorded_path(scope["path"])
    given = {"path": path, "raw_path": path.encode(), "query_string": b"", "headers": headers}
    return {**scope, **given, "peagle.whole_scope": scope}


def span_attributes(route: str, model: str, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Return OpenTelemetry's gen_ai.* of a finished request, and its drafts.

    A prompt counts once, whatever n was.
    """
    prompts = [output for output in outputs if output.index == 0]
    drafts = sum(output.stats.num_drafts for output in outputs)
    accepted = sum(output.stats.num_accepted_tokens for output in outputs)
    return {
        "gen_ai.operation.name": "chat" if "chat" in route else "text_completion",
        "gen_ai.provider.name": "peagle",
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
