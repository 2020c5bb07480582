"""What fits the OpenAPI document, or nearly does, is never a fault of the server."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis.errors import Unsatisfiable

from serving.live import LiveServer, running

schemathesis = pytest.importorskip("schemathesis")
SUPPRESSED = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]


@pytest.fixture(scope="module")
def short_server() -> Iterator[LiveServer]:
    """A context so short that no valid request takes long."""
    with running("--max-model-len", 64, "--no-playground", warm=True) as live:
        yield live


def test_no_fault(short_server: LiveServer) -> None:
    schema = schemathesis.openapi.from_url(f"{short_server.url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) >= 12
    statuses: set[int] = set()
    for operation in operations:
        _send_cases(operation, short_server, statuses)
    assert {200, 400} <= statuses


def _send_cases(operation: Any, server: LiveServer, statuses: set[int]) -> None:
    """Bodies that fit the document and bodies that do not."""
    for mode in schemathesis.GenerationMode:

        @settings(max_examples=15, deadline=None, suppress_health_check=SUPPRESSED, database=None)
        @seed(1)
        @given(case=operation.as_strategy(generation_mode=mode))
        def send(case: Any) -> None:
            response = case.call(base_url=server.url, timeout=60)
            statuses.add(response.status_code)
            assert response.status_code < 500, response.text
            if response.status_code >= 400:
                error = response.json()["error"]
                assert error["message"] and "Traceback" not in error["message"]
            assert server.process.poll() is None

        with suppress(Unsatisfiable):  # nothing to vary, or nothing that does not fit
            send()
