"""The life of an endpoint, by the commands that a user gives, against the stand-in for AWS.

Its containers are the image's entry point, run as processes with the environment and the files that
the model's description says; the bundled pair is what they serve.
"""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deploy.container_host import ContainerHost, events_of
from deploy.fake_aws import ROLE, SECRET_KEY, FakeAws, FakeClock
from peagle.bundled import BUNDLED_PEAGLE, BUNDLED_TARGET
from peagle.cli.main import run

NAME = "code"
IMAGE = "123456789012.dkr.ecr.us-east-1.amazonaws.com/peagle:cpu"
PROMPT = {"prompt": "def add(a, b):\n", "max_tokens": 24, "temperature": 0}


class BriskClock(FakeClock):
    """Sleeping also takes a little real time: processes start meanwhile."""

    __slots__ = ()

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        time.sleep(seconds / 20)


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeAws]:
    clock = BriskClock()
    with FakeAws(clock=clock) as aws:
        aws.make_bucket()
        for name, value in aws.environment().items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("peagle.deploy.aws.Clock", lambda: clock)
        yield aws


Command = Callable[..., str]


@pytest.fixture
def sagemaker(capsys: pytest.CaptureFixture[str]) -> Command:
    """sagemaker("create", ...) runs the command: what it printed."""

    def call(*arguments: object) -> str:
        capsys.readouterr()
        status = run(["deploy", "sagemaker", *map(str, arguments)])
        captured = capsys.readouterr()
        assert SECRET_KEY not in captured.out + captured.err
        assert status == 0, captured.err
        return captured.out

    return call


def invoke(aws: FakeAws) -> dict:
    """By boto3's own client."""
    client = aws.client("sagemaker-runtime")
    body = json.dumps(PROMPT)
    answer = client.invoke_endpoint(EndpointName=NAME, Body=body, ContentType="application/json")
    assert answer["InvokedProductionVariant"] == "AllTraffic"
    return json.loads(answer["Body"].read())


def stream(aws: FakeAws) -> str:
    """The text of a streamed answer; its parts cut events anywhere."""
    client = aws.client("sagemaker-runtime")
    answer = client.invoke_endpoint_with_response_stream(
        EndpointName=NAME,
        Body=json.dumps({**PROMPT, "stream": True}),
        ContentType="application/json",
    )
    parts = [event["PayloadPart"]["Bytes"] for event in answer["Body"]]
    assert len(parts) > 10 and any(not part.endswith(b"\n\n") for part in parts)
    return "".join(event["choices"][0]["text"] for event in events_of(b"".join(parts)))


@pytest.mark.slow
def test_whole_life(aws: FakeAws, sagemaker: Command, tmp_path: Path):
    host = ContainerHost(aws, tmp_path)
    try:
        _live(aws, sagemaker)
    finally:
        host.end()
    assert aws.holdings() == set()


def _live(aws: FakeAws, sagemaker: Command) -> None:
    kind = ["--source", "native", "--image", IMAGE, "--instance-type", "ml.g6e.2xlarge"]
    made = sagemaker(
        *("create", BUNDLED_TARGET, "--draft", BUNDLED_PEAGLE, "-k", 3, "--name", NAME, *kind),
        *("--role", ROLE, "--format", "json"),
    )
    assert json.loads(made)["status"] == "created"
    held = aws.holdings()
    assert f"endpoint {NAME}" in held
    objects = {name for name in held if name.startswith("object ")}
    weights = {name for name in objects if name.endswith("/model.safetensors")}
    assert len(weights) == 2 and all(f"/peagle/{NAME}/" in name for name in objects)

    whole = invoke(aws)
    text = whole["choices"][0]["text"]
    assert whole["usage"]["completion_tokens"] == 24 and text
    assert stream(aws) == text
    shown = sagemaker(
        "invoke", NAME, PROMPT["prompt"], "--completion", "--temperature", 0, "--max-tokens", 24
    )
    assert text.strip() in shown
    assert json.loads(sagemaker("status", NAME, "--format", "json"))["status"] == "InService"

    # Another K: a new container; greedy text is the same, and the old model is gone.
    sagemaker("update", NAME, "-k", 5)
    models = [name for name in aws.holdings() if name.startswith("model ")]
    assert len(models) == 1 and models[0] not in held
    assert {name for name in aws.holdings() if name.startswith("object ")} == objects
    configured = aws.endpoints.container(NAME)["Environment"]["SM_VLLM_SPECULATIVE_CONFIG"]
    assert json.loads(configured)["num_speculative_tokens"] == 5
    assert stream(aws) == text

    sagemaker("scale", NAME, "--max", 3, "--target", 4)
    scaled = json.loads(sagemaker("status", NAME, "--format", "json"))["autoscaling"]
    assert scaled["policies"] == [f"peagle-{NAME}"]
    sagemaker("delete", NAME, "--yes")
