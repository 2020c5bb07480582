"""`peagle deploy sagemaker delete`, against the stand-in for AWS."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deploy.fake_aws import ACCESS_KEY, BUCKET, SECRET_KEY, FakeAws
from peagle.deploy import stack
from peagle.deploy.deployment import Autoscaling, Transfer
from peagle.deploy.models import ModelSource
from tests.cli.conftest import Peagle, Result
from tests.deploy.deployments import a_deployment

NAME = "chat"
FILES = f"s3://{BUCKET}/peagle/{NAME}/s1/target/"


@pytest.fixture(scope="module")
def server() -> Iterator[FakeAws]:
    with FakeAws(change_s=0) as aws:
        yield aws


@pytest.fixture
def aws(server: FakeAws, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeAws]:
    """A stand-in with an endpoint and its files."""
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("peagle.deploy.aws.Clock", lambda: server.clock)
    # One that has read the service models already; tests/deploy/test_aws.py is about boto3's own.
    monkeypatch.setattr("peagle.deploy.aws._session", lambda: server.session)
    server.reset()
    server.make_bucket()
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    d = a_deployment(
        endpoint_name=NAME,
        target=ModelSource("s3", FILES),
        autoscaling=Autoscaling(1, 4, 8.0),
        uploads=(FILES,),
        transfers=(Transfer(ModelSource("local", str(tmp_path)), FILES),),
    )
    stack.create(server.clients(direct=True), d, report=lambda line: None)
    yield server
    assert not server.violations


Delete = Callable[..., Result]


@pytest.fixture
def delete(peagle: Peagle) -> Delete:
    def call(*arguments: str) -> Result:
        result = peagle("deploy", "sagemaker", "delete", *arguments)
        for secret in (ACCESS_KEY, SECRET_KEY):
            assert secret not in result.out + result.err
        return result

    return call


def test_everything_goes(aws: FakeAws, delete: Delete) -> None:
    result = delete(NAME, "--yes")
    assert (result.status, aws.holdings()) == (0, set())
    assert result.out.startswith("deleted:\n  AWS::SageMaker::")
    for kind in ("Model", "EndpointConfig", "Endpoint"):
        assert f"  AWS::SageMaker::{kind} " in result.out
    assert result.out.endswith(f"  {FILES}\n")
    again = delete(NAME, "--yes")
    assert (again.status, again.out) == (0, "There is nothing of endpoint 'chat'.\n")


def test_uploads_can_stay(aws: FakeAws, delete: Delete) -> None:
    objects = {name for name in aws.holdings() if name.startswith("object")}
    result = delete(NAME, "--yes", "--keep-uploads", "--format", "json")
    told = json.loads(result.out)
    assert result.status == 0
    assert (told["endpoint"], told["region"], told["kept"]) == (NAME, "us-east-1", [FILES])
    assert objects and aws.holdings() == objects


def test_nothing_goes_without_an_answer(aws: FakeAws, delete: Delete) -> None:
    held = aws.holdings()
    result = delete(NAME)
    assert result.status == 2
    assert "To be deleted in us-east-1:\n  AWS::SageMaker::" in result.err
    assert "Give --yes" in result.err
    assert aws.holdings() == held


@pytest.mark.parametrize(("answer", "goes"), [("y\n", True), ("n\n", False)])
def test_asks(
    aws: FakeAws, delete: Delete, monkeypatch: pytest.MonkeyPatch, answer: str, goes: bool
) -> None:
    terminal = io.StringIO(answer)
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", terminal)
    result = delete(NAME)
    assert "Delete it? [y/N]" in result.err
    assert (result.status == 0) is goes
    assert (aws.holdings() == set()) is goes


def test_endpoint_of_others(aws: FakeAws, delete: Delete) -> None:
    client = aws.client("sagemaker")
    config = client.list_endpoint_configs()["EndpointConfigs"][0]["EndpointConfigName"]
    client.create_endpoint(EndpointName="theirs", EndpointConfigName=config)
    result = delete("theirs", "--yes")
    assert result.status == 2
    assert "This version of peagle did not make" in result.err
    assert "aws sagemaker delete-endpoint --endpoint-name theirs" in result.err
    assert "endpoint theirs" in aws.holdings()


def test_what_stays_is_listed_as_json_too(aws: FakeAws, delete: Delete) -> None:
    aws.stacks.fail_next("DELETE", "Model", "AccessDenied")
    result = delete(NAME, "--yes", "--format", "json")
    assert result.status == 2
    told = json.loads(result.out)
    assert "Model: DELETE_FAILED (AccessDenied)" in told["error"]
    one = told["stayed"][0]
    assert one["command"] == f"peagle deploy sagemaker delete {NAME} --yes --region us-east-1"
    assert one["command"] in result.err


@pytest.mark.parametrize("name", ["", "-x", "a_b", "a" * 64])
def test_name_that_is_none(aws: FakeAws, delete: Delete, name: str) -> None:
    before = len(aws.calls)
    result = delete("--yes", "--", name)
    assert result.status == 2
    assert "The endpoint's name is" in result.err
    assert len(aws.calls) == before
