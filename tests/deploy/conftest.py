"""The stand-in for AWS that the tests of this folder share."""

from collections.abc import Iterator

import pytest

from deploy.fake_aws import FakeAws, NoSleep
from peagle.deploy.aws import Clients


@pytest.fixture(scope="session")
def server() -> Iterator[FakeAws]:
    with FakeAws() as fake:
        yield fake


@pytest.fixture
def aws(server: FakeAws, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeAws]:
    """An empty account with one bucket; every request must be one that AWS takes."""
    monkeypatch.setattr("botocore.endpoint.time", NoSleep)
    server.reset()
    server.make_bucket()
    yield server
    assert not server.violations


@pytest.fixture
def clients(aws: FakeAws) -> Clients:
    """Clients without a socket, which try a call twice."""
    return aws.clients(direct=True, retries={"mode": "standard", "total_max_attempts": 2})
