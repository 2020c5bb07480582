"""The stand-in for AWS is as strict as AWS, and its streams are what boto3 reads."""

from __future__ import annotations

import json
from typing import Any

import pytest
from botocore.config import Config
from botocore.exceptions import ClientError, EventStreamError
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.aws_wire import stream_error
from deploy.fake_aws import ROLE, FakeAws
from deploy.fake_endpoints import ContainerError, Frame

UNCHECKED = Config(parameter_validation=False, retries={"total_max_attempts": 1})
IMAGE = {"Image": "1.dkr.ecr.us-east-1.amazonaws.com/x:1"}


@pytest.fixture
def aws():
    with FakeAws() as aws:
        aws.make_bucket()
        yield aws


@pytest.fixture(scope="module")
def serving():
    """An endpoint in service."""
    with FakeAws() as aws:
        _make(aws)
        yield aws


def _make(aws: FakeAws) -> None:
    client = aws.client("sagemaker")
    client.create_model(ModelName="m", ExecutionRoleArn=ROLE, PrimaryContainer=IMAGE)
    variant = {"VariantName": "AllTraffic", "ModelName": "m", "InitialInstanceCount": 1}
    client.create_endpoint_config(
        EndpointConfigName="c", ProductionVariants=[{**variant, "InstanceType": "ml.g6e.2xlarge"}]
    )
    client.create_endpoint(EndpointName="e", EndpointConfigName="c")
    aws.clock.sleep(100)


def unchecked(aws: FakeAws, service: str) -> Any:
    """A client that sends anything."""
    return aws.session.client(service, endpoint_url=aws.url, config=UNCHECKED)


@pytest.mark.parametrize(
    ("service", "method", "parameters", "problem"),
    [
        ("sagemaker", "delete_model", {}, "Missing required"),
        ("sagemaker", "delete_model", {"ModelName": "a_b"}, "does not match"),
        ("sagemaker", "create_endpoint", {"EndpointName": "e"}, "Missing required"),
        ("application-autoscaling", "register_scalable_target",
         {"ServiceNamespace": "nowhere", "ResourceId": "r", "ScalableDimension": "d"},
         "expected one of"),
        ("s3", "list_objects_v2", {"Bucket": "b", "MaxKeys": "many"}, "many"),
        ("logs", "filter_log_events", {"logGroupName": "a b"}, "does not match"),
        ("cloudwatch", "get_metric_data", {"MetricDataQueries": []}, "Missing required"),
    ],
)  # fmt: skip
def test_wrong_requests_are_found(service, method, parameters, problem):
    aws = FakeAws()
    with pytest.raises(AssertionError, match=problem), aws, pytest.raises(ClientError):
        getattr(unchecked(aws, service), method)(**parameters)
    assert len(aws.violations) == 1


def test_requests_are_read_as_they_were_meant(aws):
    aws.make_bucket("bucket")
    client = aws.client("s3")
    client.put_object(Bucket="bucket", Key="a b/ü", Body=b"", Metadata={"peagle": "x"})
    client.delete_objects(Bucket="bucket", Delete={"Objects": [{"Key": "a b/ü"}], "Quiet": True})
    put, deleted = aws.calls
    assert (put.operation, put.parameters["Key"]) == ("PutObject", "a b/ü")
    assert put.parameters["Metadata"] == {"peagle": "x"}
    assert deleted.parameters["Delete"] == {"Objects": [{"Key": "a b/ü"}], "Quiet": True}
    aws.client("cloudwatch").list_metrics(Namespace="peagle", RecentlyActive="PT3H")
    assert aws.calls[-1].parameters == {"Namespace": "peagle", "RecentlyActive": "PT3H"}


# ---- invocations ------------------------------------------------------------------------------


def stream(aws: FakeAws) -> Any:
    client = aws.client("sagemaker-runtime")
    return client.invoke_endpoint_with_response_stream(EndpointName="e", Body=b"{}")["Body"]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=300), min_size=1, max_size=8))
def test_parts_arrive_as_they_were_sent(serving, parts):
    serving.endpoints.answer_with = lambda invocation: parts
    assert [event["PayloadPart"]["Bytes"] for event in stream(serving)] == parts


@pytest.mark.parametrize("kind", ["ModelStreamError", "InternalStreamFailure"])
def test_streams_end_with_an_error(serving, kind):
    end = Frame(stream_error(kind, "it broke", "ModelInvocationTimeExceeded"))
    serving.endpoints.answer_with = lambda invocation: [b"one", end]
    seen = []
    with pytest.raises(EventStreamError, match="it broke"):
        seen.extend(event["PayloadPart"]["Bytes"] for event in stream(serving))


def test_damaged_frame_is_noticed(serving):
    """botocore checks the checksums, which are therefore right elsewhere."""
    good = stream_error("InternalStreamFailure", "x")
    serving.endpoints.answer_with = lambda invocation: [b"one", Frame(good[:-1] + b"?")]
    with pytest.raises(Exception, match="Checksum mismatch"):
        list(stream(serving))


def test_errors_of_the_container(serving):
    def fail(invocation):
        raise ContainerError(400, '{"error": "no such model"}')

    serving.endpoints.answer_with = fail
    with pytest.raises(ClientError) as caught:
        serving.client("sagemaker-runtime").invoke_endpoint(EndpointName="e", Body=b"{}")
    assert caught.value.response["Error"]["Code"] == "ModelError"
    assert json.loads(caught.value.response["OriginalMessage"]) == {"error": "no such model"}
    assert caught.value.response["OriginalStatusCode"] == 400


def test_endpoint_that_is_not_there(serving):
    with pytest.raises(ClientError, match="not found"):
        serving.client("sagemaker-runtime").invoke_endpoint(EndpointName="x", Body=b"{}")
