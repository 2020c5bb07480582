"""Clients, requests checked without a network, and what errors of AWS mean to the user."""

import builtins
import os
import subprocess
import sys
from pathlib import Path

import botocore.exceptions as faults
import pytest
from botocore.exceptions import ClientError

from deploy.fake_aws import ACCESS_KEY, KINDS, REGION, ROLE, SECRET_KEY
from peagle.deploy.aws import MAX_ATTEMPTS, Clients, explain, is_gone
from peagle.errors import UserError

SRC = Path(__file__).parents[2] / "src"
NO_AWS = {
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": "/nonexistent/config",
    "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent/credentials",
}


@pytest.fixture(autouse=True)
def _no_configuration(monkeypatch):
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    for name, value in NO_AWS.items():
        monkeypatch.setenv(name, value)


# ---- clients ----


def test_no_region():
    with pytest.raises(UserError, match=r"No AWS region is known.*--region"):
        Clients()


def test_no_credentials():
    with pytest.raises(UserError, match=r"No AWS credentials .*AWS_ACCESS_KEY_ID") as e:
        Clients("us-east-1")
    assert "AWS_PROFILE" in str(e.value) and "~/.aws/credentials" in str(e.value)


def test_half_a_credential(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    with pytest.raises(UserError, match="credentials are missing or not complete") as caught:
        Clients("us-east-1")
    assert ACCESS_KEY not in str(caught.value)


def test_unknown_profile(monkeypatch):
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(UserError, match=r"nobody.*AWS_PROFILE"):
        Clients("us-east-1")


def test_region_that_is_none(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    with pytest.raises(UserError, match="not a region/"):
        Clients("not a region/").client("sagemaker")


def test_credentials_and_region_of_boto3s_chain(aws, tmp_path, monkeypatch):
    keys = f"aws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {SECRET_KEY}\n"
    (tmp_path / "credentials").write_text(f"[work]\n{keys}")
    (tmp_path / "config").write_text("[profile work]\nregion = us-east-1\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", "work")
    monkeypatch.setenv("AWS_ENDPOINT_URL", aws.url)
    clients = Clients()
    assert clients.region == "us-east-1"
    assert clients.request("sagemaker", "ListModels")["Models"] == []
    assert SECRET_KEY not in repr(clients) + repr(vars(clients))


def test_without_boto3(monkeypatch):
    imported = builtins.__import__

    def without(name, *arguments, **options):
        if name.partition(".")[0] in ("boto3", "botocore"):
            raise ImportError(name)
        return imported(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UserError, match=r"-m pip install .*\[sagemaker\]'"):
        Clients("us-east-1")


def test_modules_load_without_boto3_and_torch():
    names = ("aws", "stack", "template", "uploads")
    imports = "; ".join(f"import peagle.deploy.{name}" for name in names)
    program = f"import sys; {imports}; print({{'boto3', 'botocore', 'torch'}} & set(sys.modules))"
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    command = [sys.executable, "-c", program]
    assert subprocess.check_output(command, env=environment, text=True) == "set()\n"


@pytest.mark.parametrize("kind", ["throttling", "internal", "time-out before"])
def test_what_passes_is_tried_again(aws, kind):
    aws.fail(kind, "ListModels", attempts=1)
    assert aws.clients().request("sagemaker", "ListModels")["Models"] == []
    assert [request.attempt for request in aws.calls] == [1, 2]


def test_trying_again_is_bounded(aws):
    aws.fail("internal", "ListModels")
    with pytest.raises(ClientError) as caught:
        aws.clients().request("sagemaker", "ListModels")
    assert len(aws.calls) == MAX_ATTEMPTS
    assert "ListModels failed inside AWS" in str(explain(caught.value))


def test_throttling_slows_this_process_down(aws):
    """boto3's adaptive mode: what is throttled is sent more slowly."""
    config = aws.clients().client("sagemaker").meta.config
    assert config.retries["mode"] == "adaptive"
    assert config.retries["total_max_attempts"] == MAX_ATTEMPTS


def test_silent_server(aws, monkeypatch):
    """A server that takes the request and says nothing."""
    import socket

    monkeypatch.setattr("peagle.deploy.aws.READ_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        clients = Clients(REGION, url, session=aws.session)
        with pytest.raises(faults.ReadTimeoutError) as caught:
            clients.request("sagemaker", "ListModels")
    assert "AWS gave no answer" in str(explain(caught.value))


# ---- errors ----


def error(kind: str, operation: str = "CreateEndpoint", retries: int = 0) -> ClientError:
    code, message, status = KINDS[kind]
    return answered(
        code, message.format(action="sagemaker:" + operation), operation, status, retries
    )


def answered(code, message, operation="CreateEndpoint", status=400, retries=0) -> ClientError:
    metadata = {"HTTPStatusCode": status, "RetryAttempts": retries}
    said = {"Error": {"Code": code, "Message": message}, "ResponseMetadata": metadata}
    return ClientError(said, operation)


PASS_ROLE = (
    "User: arn:aws:sts::123456789012:assumed-role/dev/me is not authorized to perform: "
    f"iam:PassRole on resource: {ROLE} because no identity-based policy allows it"
)


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (error("throttling", retries=5), "AWS throttled CreateEndpoint 6 times"),
        (error("access denied"), "allow sagemaker:CreateEndpoint on * in the policy"),
        (answered("AccessDenied", "Access Denied", "PutObject"), "AWS denied PutObject: Access"),
        (answered("AccessDeniedException", PASS_ROLE), f"Allow iam:PassRole on {ROLE} in"),
        (error("quota"), "quota 'ml.g5.xlarge for endpoint usage' of the account: it is 0, 0 are"),
        (error("quota"), "Service Quotas"),
        (answered("ResourceLimitExceeded", "Too many"), "goes beyond a quota of the account: Too"),
        (error("role"), "SageMaker cannot use the role"),
        (error("expired"), "credentials have expired (ExpiredTokenException)"),
        (answered("UnrecognizedClientException", "bad"), "AWS does not accept the credentials"),
        (answered("InvalidAccessKeyId", f"{ACCESS_KEY} is not known"), "does not accept the cred"),
        (error("validation"), "AWS refused CreateEndpoint (ValidationException): 1 validation"),
        (error("internal"), "failed inside AWS"),
        (faults.ReadTimeoutError(endpoint_url="https://x"), "AWS gave no answer"),
        (faults.ConnectTimeoutError(endpoint_url="https://x"), "AWS gave no answer"),
        (faults.EndpointConnectionError(endpoint_url="https://x"), "AWS gave no answer"),
        (faults.ConnectionClosedError(endpoint_url="https://x"), "AWS gave no answer"),
        (faults.SSLError(endpoint_url="https://x", error="bad"), "AWS gave no answer"),
        (faults.NoCredentialsError(), "AWS_ACCESS_KEY_ID"),
        (faults.NoRegionError(), "--region"),
        (faults.UnauthorizedSSOTokenError(), "aws sso login"),
        (faults.ParamValidationError(report="no such thing"), "no such thing"),
        (faults.UnknownServiceError(service_name="x", known_service_names=""), "boto3 failed"),
        (UserError("as it was"), "as it was"),
    ],
)
def test_errors_say_what_to_do(raised, told):
    said = str(explain(raised))
    assert told in said
    assert ACCESS_KEY not in said and "\n" not in said


def test_text_cannot_steer_a_terminal():
    said = str(explain(answered("ValidationException", "a\x1b[2Jb\r\nc")))
    assert said.isprintable() and "a [2Jb c" in said


@pytest.mark.parametrize(
    ("code", "message", "gone"),
    [
        ("ValidationException", 'Could not find endpoint "arn:aws:x".', True),
        ("ValidationException", 'Could not find model "arn:aws:x".', True),
        ("ObjectNotFoundException", "No scalable target found for service", True),
        ("ResourceNotFound", "Hub content does not exist.", True),
        ("404", "Not Found", True),
        ("ValidationException", 'Cannot update in-progress endpoint "arn:aws:x".', False),
        ("AccessDeniedException", "not found or not allowed", False),
    ],
)
def test_what_is_gone(code, message, gone):
    assert is_gone(answered(code, message)) is gone
