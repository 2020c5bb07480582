"""All of a plan or nothing; and endpoints as they are found and waited for."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.fake_aws import BUCKET, ROLE, FakeAws
from deploy.fault_matrix import NAME, NoSleep, deployment, model_folder
from peagle.deploy import endpoints
from peagle.deploy.apply import Applied, Unfinished, apply
from peagle.deploy.calls import Call
from peagle.deploy.deployment import ENDPOINT_TAG
from peagle.deploy.interrupts import Interrupted, Interrupts
from peagle.deploy.models import ModelSource
from peagle.deploy.plan import Wait, create_calls, delete_calls, update_calls
from peagle.errors import UserError

HUB = ModelSource("hub", "owner/model")


@pytest.fixture
def aws(monkeypatch):
    monkeypatch.setattr("botocore.endpoint.time", NoSleep)
    aws = FakeAws()
    aws.make_bucket()
    yield aws
    assert not aws.violations


@pytest.fixture
def clients(aws):
    return aws.clients(direct=True, retries={"mode": "standard", "total_max_attempts": 2})


@pytest.fixture
def folder(tmp_path) -> Path:
    return model_folder(tmp_path)


def quiet(line: str) -> None:
    pass


def made(clients, folder: Path, **changes):
    apply(create_calls(deployment(folder, "a1", **changes)), clients, report=quiet)
    return endpoints.describe(clients, NAME)


# ---- plans ------------------------------------------------------------------------------------


def test_what_was_made_and_deleted_is_told(aws, clients, folder, capsys):
    done = apply(create_calls(deployment(folder, "a1", autoscaling=None)), clients)
    assert done.created == (
        f"uploads under s3://{BUCKET}/peagle/chat/a1/target/",
        "model 'chat-a1'",
        "endpoint configuration 'chat-a1'",
        "endpoint 'chat'",
    )
    said = capsys.readouterr()
    assert said.out == ""
    assert "peagle: created model 'chat-a1'\n" in said.err
    assert "peagle: endpoint chat: Creating, 0:00 min of 60:00 min\n" in said.err
    assert "peagle: endpoint chat: InService, 1:00 min of 60:00 min\n" in said.err
    done = apply(delete_calls(endpoints.describe(clients, NAME)), clients, report=quiet)
    assert done.created == () and len(done.deleted) == 4
    assert aws.holdings() == set()


def test_deleting_again_finds_nothing(aws, clients, folder):
    steps = delete_calls(made(clients, folder))
    apply(steps, clients, report=quiet)
    assert apply(steps, clients, report=quiet) == Applied((), ())


def test_not_waiting(aws, clients, folder):
    said: list[str] = []
    apply(create_calls(deployment(folder, "a1")), clients, wait=False, report=said.append)
    assert aws.endpoints.status(NAME) == "Creating"
    assert said[0] == "not waiting for the endpoint: 2 later steps of the plan are not done"
    assert not any("scal" in name for name in aws.holdings())


def test_container_that_does_not_start(aws, clients, folder):
    """SageMaker's reason and the end of the log are told, and nothing stays."""
    reason = "The primary container for production variant AllTraffic did not pass the ping check."
    aws.endpoints.fail_next("CreateEndpoint", reason)
    _log(clients, [f"line {number}" for number in range(30)] + ["CUDA out of \x1b[31mmemory"])
    with pytest.raises(UserError) as caught:
        apply(create_calls(deployment(folder, "a1")), clients, report=quiet)
    said = str(caught.value)
    assert f"The endpoint 'chat' is Failed: {reason}" in said
    assert "\n  | line 29\n  | CUDA out of [31mmemory\n" in said and "line 10" not in said
    assert said.endswith("nothing stayed.")
    assert aws.holdings() == set()


def _log(clients, lines):
    client = clients.client("logs")
    group, stream = f"/aws/sagemaker/Endpoints/{NAME}", "AllTraffic/i-1"
    client.create_log_group(logGroupName=group)
    client.create_log_stream(logGroupName=group, logStreamName=stream)
    now = int(time.time() * 1000)
    events = [{"timestamp": now + n, "message": line} for n, line in enumerate(lines)]
    client.put_log_events(logGroupName=group, logStreamName=stream, logEvents=events)


def test_endpoint_that_takes_too_long(aws, clients, folder):
    """It can be deleted only when SageMaker has given up or is done: that is waited for."""
    steps = create_calls(deployment(folder, "a1"))
    (wait,) = [step for step in steps if isinstance(step, Wait)]
    aws.endpoints.create_s = 500
    steps[steps.index(wait)] = Wait(NAME, 120)
    with pytest.raises(UserError, match=r"still Creating after 2:00 min.*--startup-timeout"):
        apply(steps, clients, report=quiet)
    assert aws.holdings() == set()


@pytest.mark.parametrize("reason", ["The container did not become healthy.", "Failed"])
def test_update_that_fails(aws, clients, folder, reason):
    found = made(clients, folder)
    held = aws.holdings()
    aws.endpoints.fail_next("UpdateEndpoint", reason)
    wanted = deployment(folder, "b2", target=HUB)
    with pytest.raises(UserError) as caught:
        apply(update_calls(wanted, found), clients, report=quiet)
    if reason == "Failed":  # what it runs with cannot be told: all of it stays, and is listed
        assert isinstance(caught.value, Unfinished)
        whats = [item.what for item in caught.value.stayed]
        assert whats[1:] == ["endpoint configuration 'chat-b2'", "model 'chat-b2'"]
        assert "can only be deleted" in caught.value.stayed[0].reason
    else:
        assert f"took the update of 'chat' back: {reason[:-1]}. The endpoint serves" in str(
            caught.value
        )
        assert aws.holdings() == held


def test_status_that_lags_behind(aws, clients, folder, monkeypatch):
    """The first answers after UpdateEndpoint still say InService, with the old configuration."""
    found = made(clients, folder)
    ask = clients.request
    late = iter([True, True])

    def request(service, operation, **parameters):
        answer = ask(service, operation, **parameters)
        if operation == "DescribeEndpoint" and next(late, False):
            answer |= {"EndpointStatus": "InService", "EndpointConfigName": "chat-a1"}
        return answer

    monkeypatch.setattr(clients, "request", request)
    apply(update_calls(deployment(folder, "b2", target=HUB), found), clients, report=quiet)
    assert "model chat-b2" in aws.holdings() and "model chat-a1" not in aws.holdings()


def test_model_that_is_replaced_cannot_be_deleted(aws, clients, folder):
    """The update stands; what it should have deleted is listed."""
    found = made(clients, folder)
    aws.fail("access denied", "DeleteModel", calls=10)
    steps = update_calls(deployment(folder, "b2", target=HUB), found)
    with pytest.raises(Unfinished, match="All was made as planned, but not everything") as caught:
        apply(steps, clients, report=quiet)
    assert [item.what for item in caught.value.stayed] == ["model 'chat-a1'"]
    assert {"model chat-a1", "model chat-b2"} <= aws.holdings()
    assert "endpoint configuration chat-a1" not in aws.holdings()


def test_faults_of_our_own_undo_too(aws, clients, folder, monkeypatch):
    monkeypatch.setattr("peagle.deploy.apply.wait_in_service", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        apply(create_calls(deployment(folder, "a1")), clients, report=quiet)
    assert aws.holdings() == set()


# ---- interruptions ----------------------------------------------------------------------------


def test_call_that_was_sent_comes_back_first():
    with Interrupts() as interrupts:
        steps = []
        with pytest.raises(Interrupted), interrupts.held():
            os.kill(os.getpid(), signal.SIGTERM)
            steps.append("answered")
        assert steps == ["answered"]
        with pytest.raises(Interrupted):
            os.kill(os.getpid(), signal.SIGINT)


def test_second_interruption_does_not_wait():
    with Interrupts() as interrupts, pytest.raises(Interrupted), interrupts.held():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("not reached")


def test_handlers_are_put_back():
    before = signal.getsignal(signal.SIGTERM)
    with Interrupts():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before


def test_first_interruption_while_undoing_only_warns(aws, clients, folder):
    said: list[str] = []

    def report(line: str) -> None:
        said.append(line)
        if line.startswith("deleted endpoint configuration"):
            os.kill(os.getpid(), signal.SIGINT)

    aws.endpoints.fail_next("CreateEndpoint", "no")
    with pytest.raises(UserError, match="nothing stayed"):
        apply(create_calls(deployment(folder, "a1")), clients, report=report)
    assert "deleting; interrupt again to leave what is still there" in said
    assert aws.holdings() == set()


def test_second_interruption_while_undoing_leaves_the_rest(aws, clients, folder):
    def report(line: str) -> None:
        if line.startswith("deleted endpoint 'chat'"):
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    aws.endpoints.fail_next("CreateEndpoint", "no")
    with pytest.raises(Unfinished) as caught:
        apply(create_calls(deployment(folder, "a1")), clients, report=report)
    assert [item.reason for item in caught.value.stayed] == ["interrupted"] * 4
    assert "model chat-a1" in aws.holdings()


# ---- endpoints --------------------------------------------------------------------------------


def test_what_an_endpoint_consists_of(aws, clients, folder):
    found = made(clients, folder)
    assert (found.status, found.config_name, found.model_names) == (
        "InService",
        "chat-a1",
        ("chat-a1",),
    )
    assert found.tags[ENDPOINT_TAG] == "chat"
    assert found.uploads == (f"s3://{BUCKET}/peagle/chat/a1/",)
    assert found.autoscaling is not None and found.autoscaling.max_instances == 3
    assert found.scaling_policies == ("peagle-chat",)
    assert found.leftovers == ()
    assert found.model["ExecutionRoleArn"] == ROLE


def test_leftovers_are_those_with_the_endpoints_tag(aws, clients, folder):
    made(clients, folder)
    other = replace(deployment(folder, "a1", target=HUB), endpoint_name="chat-2")
    apply(create_calls(other), clients, report=quiet)
    untagged = {"Image": "1.dkr.ecr.us-east-1.amazonaws.com/x:1"}
    clients.request(
        "sagemaker",
        "CreateModel",
        ModelName="chat-of-others",
        ExecutionRoleArn=ROLE,
        PrimaryContainer=untagged,
    )
    steps = create_calls(deployment(folder, "a0", target=HUB))
    for step in steps[:2]:
        assert isinstance(step, Call)
        clients.call(step)
    found = endpoints.describe(clients, NAME)
    assert found.leftovers == (("endpoint configuration", "chat-a0"), ("model", "chat-a0"))


def test_unknown_endpoint_suggests_the_nearest(aws, clients, folder):
    made(clients, folder)
    with pytest.raises(UserError, match=r"no endpoint 'chatt' in us-east-1\. Did you mean 'chat'"):
        endpoints.describe(clients, "chatt")


def test_endpoint_that_is_there(aws, clients, folder):
    endpoints.require_new(clients, NAME)
    made(clients, folder)
    with pytest.raises(UserError, match=r"an endpoint 'chat' .*already \(InService\).*--name"):
        endpoints.require_new(clients, NAME)


def test_endpoint_that_is_being_changed(aws, clients, folder):
    found = made(clients, folder)
    endpoints.require_updatable(found)
    changed = update_calls(deployment(folder, "b2", target=HUB), found)
    apply(changed, clients, wait=False, report=quiet)
    with pytest.raises(UserError, match="'chat' is Updating: it is being changed"):
        endpoints.require_updatable(endpoints.describe(clients, NAME))


def test_status_that_cannot_be_asked_for(aws, clients, folder):
    """Minutes without an answer are let pass, a refusal is not."""
    made(clients, folder)
    aws.fail("time-out before", "DescribeEndpoint", calls=20)
    endpoints.wait_in_service(clients, NAME, 600, quiet)
    aws.fail("time-out before", "DescribeEndpoint", calls=1000)
    with pytest.raises(UserError, match="AWS gave no answer"):
        endpoints.wait_in_service(clients, NAME, 6000, quiet)
    aws.faults.clear()
    aws.fail("access denied", "DescribeEndpoint")
    with pytest.raises(UserError, match="sagemaker:DescribeEndpoint"):
        endpoints.wait_in_service(clients, NAME, 600, quiet)


def test_waiting_tells_how_far_it_is(aws, clients, folder):
    aws.endpoints.create_s = 200
    steps = [s for s in create_calls(deployment(folder, "a1")) if not isinstance(s, Wait)][:4]
    apply(steps, clients, report=quiet)
    said: list[str] = []
    endpoints.wait_in_service(clients, NAME, 900, said.append)
    assert said == [
        f"endpoint chat: {status}, {minutes} min of 15:00 min"
        for status, minutes in [
            ("Creating", "0:00"),
            ("Creating", "1:00"),
            ("Creating", "2:00"),
            ("Creating", "3:00"),
            ("InService", "3:20"),
        ]
    ]
