"""`peagle deploy sagemaker delete`, against the stand-in for AWS."""

from __future__ import annotations

import io
import json
import os

import pytest

from deploy.fake_aws import ACCESS_KEY, BUCKET, SECRET_KEY, FakeAws
from deploy.fault_matrix import NAME, NoSleep, create_with_rest, model_folder

ROOT = f"s3://{BUCKET}/peagle/{NAME}/a1/"


@pytest.fixture(scope="module")
def deployed(tmp_path_factory):
    """A stand-in, and what brings an endpoint there back."""
    with FakeAws() as aws:
        aws.make_bucket()
        folder = model_folder(tmp_path_factory.mktemp("model"))
        create_with_rest(aws.clients(direct=True), folder)
        yield aws, aws.snapshot()


@pytest.fixture
def aws(deployed, monkeypatch):
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setattr("botocore.endpoint.time", NoSleep)
    aws, restore = deployed
    restore()
    for name, value in aws.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("peagle.deploy.aws.Clock", lambda: aws.clock)
    # One that has read the service models already; tests/deploy/test_aws.py is about boto3's own.
    monkeypatch.setattr("peagle.deploy.aws._session", lambda: aws.session)
    yield aws
    assert not aws.violations


@pytest.fixture
def delete(peagle):
    def call(*arguments):
        result = peagle("deploy", "sagemaker", "delete", *arguments)
        for secret in (ACCESS_KEY, SECRET_KEY):
            assert secret not in result.out + result.err
        return result

    return call


def test_everything_goes(aws, delete):
    result = delete(NAME, "--yes")
    assert (result.status, aws.holdings()) == (0, set())
    assert result.out == (
        "deleted:\n"
        "  scaling policy 'peagle-chat'\n"
        "  scalable target 'endpoint/chat/variant/AllTraffic'\n"
        "  endpoint 'chat'\n"
        "  endpoint configuration 'chat-a1'\n"
        "  model 'chat-a1'\n"
        "  model 'chat-a0'\n"
        f"  uploads under {ROOT}\n"
    )
    again = delete(NAME, "--yes")
    assert (again.status, again.out) == (0, "There is nothing of endpoint 'chat'.\n")


def test_uploads_can_stay(aws, delete):
    objects = {name for name in aws.holdings() if name.startswith("object")}
    result = delete(NAME, "--yes", "--keep-uploads", "--format", "json")
    told = json.loads(result.out)
    assert result.status == 0
    assert (told["endpoint"], told["region"], told["kept"]) == (NAME, "us-east-1", [ROOT])
    assert len(told["deleted"]) == 6
    assert aws.holdings() == objects


def test_nothing_goes_unasked(aws, delete):
    held = aws.holdings()
    result = delete(NAME)
    assert result.status == 2
    assert f"To be deleted in us-east-1:\n  scaling policy 'peagle-{NAME}'\n" in result.err
    assert "Give --yes" in result.err
    assert aws.holdings() == held


@pytest.mark.parametrize(("answer", "goes"), [("y\n", True), ("n\n", False)])
def test_asks(aws, delete, monkeypatch, answer, goes):
    terminal = io.StringIO(answer)
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", terminal)
    result = delete(NAME)
    assert "Delete it? [y/N]" in result.err
    assert (result.status == 0) is goes
    assert (aws.holdings() == set()) is goes


def test_endpoint_of_others(aws, delete):
    client = aws.client("sagemaker")
    client.create_endpoint(EndpointName="theirs", EndpointConfigName="chat-a1")
    aws.clock.sleep(100)
    result = delete("theirs", "--yes")
    assert result.status == 2
    assert "was not made by peagle: it has no tag peagle:endpoint" in result.err
    assert "endpoint theirs" in aws.holdings()


def test_configuration_and_model_of_others_stay(aws, delete):
    """Somebody else updated the endpoint to what is theirs."""
    client = aws.client("sagemaker")
    client.create_model(
        ModelName="their-model",
        ExecutionRoleArn="arn:aws:iam::123456789012:role/r",
        PrimaryContainer={"Image": "1.dkr.ecr.us-east-1.amazonaws.com/x:1"},
    )
    variant = {"VariantName": "AllTraffic", "ModelName": "their-model"}
    client.create_endpoint_config(
        EndpointConfigName="their-config",
        ProductionVariants=[
            {**variant, "InstanceType": "ml.g6e.2xlarge", "InitialInstanceCount": 1}
        ],
    )
    client.update_endpoint(EndpointName=NAME, EndpointConfigName="their-config")
    aws.clock.sleep(100)
    assert delete(NAME, "--yes").status == 0
    assert aws.holdings() == {"model their-model", "endpoint configuration their-config"}


def test_what_stays_is_listed_as_json_too(aws, delete):
    aws.fail("access denied", "DeleteModel", calls=10)
    result = delete(NAME, "--yes", "--format", "json")
    assert result.status == 2
    told = json.loads(result.out)
    assert [item["what"] for item in told["stayed"]] == ["model 'chat-a1'", "model 'chat-a0'"]
    assert told["stayed"][0]["command"] == (
        "aws sagemaker delete-model --model-name chat-a1 --region us-east-1"
    )
    assert "Not everything that had to go could be deleted." in told["error"]
    assert told["stayed"][0]["command"] in result.err
    assert aws.holdings() == {"model chat-a0", "model chat-a1"}


def test_endpoint_that_is_being_updated(aws, delete):
    """SageMaker deletes it after that."""
    client = aws.client("sagemaker")
    client.update_endpoint(EndpointName=NAME, EndpointConfigName="chat-a1")
    result = delete(NAME, "--yes")
    assert result.status == 0
    assert "endpoint 'chat': AWS is changing it; waiting for the end of that" in result.err
    assert aws.holdings() == set()


@pytest.mark.parametrize("name", ["", "-x", "a_b", "a" * 64])
def test_name_that_is_none(aws, delete, name):
    result = delete("--yes", "--", name)
    assert result.status == 2
    assert "The endpoint's name is" in result.err
    assert aws.calls == []


def test_help_has_examples(peagle):
    result = peagle("deploy", "sagemaker", "delete", "--help")
    assert result.status == 0
    assert "--keep-uploads" in result.out and "peagle deploy sagemaker delete qwen3" in result.out
