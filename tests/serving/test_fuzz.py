"""What fits the OpenAPI document, or nearly does, is never a fault of the server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from serving.live import LiveServer, running

schemathesis = pytest.importorskip("schemathesis")
SUPPRESSED = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]


@pytest.fixture(scope="module")
def short_server() -> Iterator[LiveServer]:
    """A context so short that no valid request takes long."""
    with running("--max-model-len", 64, "--no-playground") as live:
        yield live


@pytest.fixture
def api_schema(short_server: LiveServer) -> Any:
    return schemathesis.openapi.from_url(f"{short_server.url}/openapi.json")


schema = schemathesis.pytest.from_fixture("api_schema")


@schema.parametrize()
@settings(max_examples=25, deadline=None, suppress_health_check=SUPPRESSED, derandomize=True)
def test_no_fault(case: Any, short_server: LiveServer) -> None:
    response = case.call(base_url=short_server.url, timeout=60)
    assert response.status_code < 500, response.text
    if response.status_code >= 400:
        error = response.json()["error"]
        assert error["message"] and "Traceback" not in error["message"]
    assert short_server.process.poll() is None
