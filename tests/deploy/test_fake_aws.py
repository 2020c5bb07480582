"""The stand-in for AWS refuses requests that AWS would refuse."""

from typing import Any

import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from deploy.fake_aws import FakeAws

UNCHECKED = Config(parameter_validation=False, retries={"total_max_attempts": 1})


def unchecked(aws: FakeAws, service: str) -> Any:
    """A client that sends anything."""
    return aws.session.client(service, endpoint_url=aws.url, config=UNCHECKED)


@pytest.mark.slow
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
