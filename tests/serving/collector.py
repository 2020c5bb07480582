"""An OTLP collector over HTTP, for spans."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(slots=True)
class Collector:
    """Its address, and the path and body of every request to it."""

    url: str
    received: list[tuple[str, bytes]] = field(default_factory=list)

    def spans(self) -> list[dict[str, Any]]:
        """All spans so far: name, id, the parent's id, attributes."""
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

        parse = trace_service_pb2.ExportTraceServiceRequest.FromString
        return [
            {
                "name": span.name,
                "id": span.span_id,
                "parent": span.parent_span_id,
                "attributes": {a.key: _value(a.value) for a in span.attributes},
            }
            for _, body in list(self.received)
            for resource in parse(body).resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


def _value(value: Any) -> Any:
    return getattr(value, value.WhichOneof("value") or "string_value")


@contextmanager
def collecting() -> Iterator[Collector]:
    """Collect on a free port."""
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
    try:
        yield Collector(f"http://127.0.0.1:{server.server_port}", received)
    finally:
        server.shutdown()
        server.server_close()
