"""The life of a stack, and what is left of it where a call, CloudFormation or a user ends it."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from deploy.fake_aws import BUCKET, FakeAws
from peagle.deploy import stack
from peagle.deploy.aws import Clients
from peagle.deploy.deployment import Autoscaling, Deployment, Secret, Transfer
from peagle.deploy.models import ModelSource
from peagle.deploy.stack import Unfinished
from peagle.deploy.template import deployment_of
from peagle.errors import UserError
from tests.deploy.deployments import a_deployment

NAME = "chat"
STACK = f"peagle-endpoint-{NAME}"


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    """A model from a folder here, with a secret."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    uri = f"s3://{BUCKET}/peagle/{NAME}/s1/target/"
    return a_deployment(
        endpoint_name=NAME,
        stamp="s1",
        target=ModelSource("s3", uri),
        environment={"DATABASE_URL": Secret("db://u:p@h")},
        uploads=(uri,),
        transfers=(Transfer(ModelSource("local", str(tmp_path)), uri),),
    )


def quiet(line: str) -> None:
    pass


def changed(clients: Clients, deployment: Deployment, **fields: Any) -> tuple[Any, ...]:
    """The deployment, changed and with new files, with what `stack.update` needs beside it."""
    present = stack.template_of(clients, NAME)
    base = deployment_of(present, "s2")
    uri = f"s3://{BUCKET}/peagle/{NAME}/s2/target/"
    files = dataclasses.replace(deployment.transfers[0], uri=uri)
    moved = {"target": ModelSource("s3", uri), "uploads": (uri,), "transfers": (files,)}
    return dataclasses.replace(base, **{**moved, **fields}), base, present


def running(aws: FakeAws) -> dict[str, str]:
    """The environment of the endpoint's container."""
    return dict(aws.endpoints.container(NAME)["Environment"])


# ---- what goes well ----


def test_create_update_and_delete(aws: FakeAws, clients: Clients, deployment: Deployment) -> None:
    told: list[str] = []
    stack.create(clients, deployment, report=told.append)
    assert aws.stacks.status(STACK) == "CREATE_COMPLETE"
    assert running(aws)["DATABASE_URL"] == "db://u:p@h"
    assert f"endpoint {NAME}" in aws.holdings()
    assert any("CREATE_IN_PROGRESS" in line for line in told)
    assert "u:p" not in "".join(told)

    new, base, present = changed(clients, deployment, vllm_flags={"seed": "1"})
    stack.update(clients, new, base, present, report=quiet)
    assert running(aws)["SM_VLLM_SEED"] == "1"
    # A secret stays without being known; old files and the old model are gone.
    assert running(aws)["DATABASE_URL"] == "db://u:p@h"
    held = aws.holdings()
    assert len([name for name in held if name.startswith("model ")]) == 1
    assert not any("/s1/" in name for name in held) and any("/s2/" in name for name in held)

    assert stack.uploads_of(clients, NAME) == new.uploads
    stack.delete(clients, NAME, new.uploads, quiet)
    assert aws.holdings() == set()
    stack.delete(clients, NAME, (), quiet)  # once more


def test_no_wait_leaves_the_rest_to_cloudformation(
    aws: FakeAws, clients: Clients, deployment: Deployment
) -> None:
    stack.create(clients, deployment, wait=False, report=quiet)
    assert aws.stacks.status(STACK) == "CREATE_IN_PROGRESS"
    aws.clock.sleep(1000)
    aws.stacks.settle()
    new, base, present = changed(clients, deployment)
    stack.update(clients, new, base, present, wait=False, report=quiet)
    aws.clock.sleep(1000)
    aws.stacks.settle()
    # Nobody waited, so the old files are still there: delete knows them.
    assert set(stack.uploads_of(clients, NAME)) == {*deployment.uploads, *new.uploads}


def test_scaling_ends_while_the_instance_type_changes(
    aws: FakeAws, clients: Clients, deployment: Deployment
) -> None:
    """SageMaker refuses it otherwise."""
    scaled = dataclasses.replace(deployment, autoscaling=Autoscaling(1, 4, 8.0))
    stack.create(clients, scaled, report=quiet)
    new, base, present = changed(clients, deployment, instance_type="ml.p5.4xlarge")
    first, second = stack.update_requests(new, base, present)
    assert "ScalableTarget" not in first["TemplateBody"]["Resources"]
    assert "ScalableTarget" in second["TemplateBody"]["Resources"]
    assert (
        len(stack.update_requests(dataclasses.replace(base, tags={"a": "b"}), base, present)) == 1
    )

    # If the update then fails, the endpoint is scaled as before.
    aws.stacks.fail_next("UPDATE", "ScalableTarget", "no")
    with pytest.raises(UserError, match="serves as before"):
        stack.update(clients, new, base, present, report=quiet)
    assert "ScalableTarget" in stack.template_of(clients, NAME)["Resources"]
    stack.update(clients, new, base, present, report=quiet)
    config = aws.clients(direct=True).client("sagemaker").list_endpoint_configs()["EndpointConfigs"]
    assert len(config) == 1


def test_an_empty_change_set_has_a_name(
    aws: FakeAws, clients: Clients, deployment: Deployment
) -> None:
    stack.create(clients, deployment, report=quiet)
    new, base, present = changed(clients, deployment)
    aws.stacks.refuse_next("The submitted information didn't contain changes. Submit others.")
    with pytest.raises(UserError, match="Nothing is to change about 'chat'; name an option"):
        stack.update(clients, new, base, present, report=quiet)
    assert aws.stacks.status(STACK) == "CREATE_COMPLETE"


def test_a_template_that_cloudformation_refuses(
    aws: FakeAws, clients: Clients, deployment: Deployment
) -> None:
    aws.stacks.refuse_next("Template error: no such attribute")
    with pytest.raises(UserError, match="refused the template: Template error: no such"):
        stack.create(clients, deployment, report=quiet)
    assert aws.holdings() == set()


# ---- what fails ----

REASON = "The primary container did not pass the ping health check."


def test_a_creation_that_fails_is_taken_back(
    aws: FakeAws, clients: Clients, deployment: Deployment
) -> None:
    aws.stacks.fail_next("CREATE", "Endpoint", REASON)
    with pytest.raises(UserError) as caught:
        stack.create(clients, deployment, report=quiet)
    assert f"Endpoint: CREATE_FAILED ({REASON})" in str(caught.value)
    assert "nothing stayed" in str(caught.value)
    assert aws.holdings() == set()


def test_an_update_that_fails_goes_back(
    aws: FakeAws, clients: Clients, deployment: Deployment
) -> None:
    stack.create(clients, deployment, report=quiet)
    held = aws.holdings()
    aws.stacks.fail_next("UPDATE", "Endpoint", REASON)
    new, base, present = changed(clients, deployment, vllm_flags={"seed": "1"})
    with pytest.raises(UserError) as caught:
        stack.update(clients, new, base, present, report=quiet)
    assert REASON in str(caught.value) and "serves as before" in str(caught.value)
    assert aws.holdings() == held


@pytest.mark.parametrize(
    ("status", "remedy"),
    [
        ("UPDATE_ROLLBACK_FAILED", f"continue-update-rollback --stack-name {STACK}"),
        ("ROLLBACK_FAILED", f"peagle deploy sagemaker delete {NAME}"),
        ("ROLLBACK_COMPLETE", f"an empty stack is left .* delete {NAME}"),
        ("DELETE_FAILED", f"delete it again: peagle deploy sagemaker delete {NAME}"),
        ("CREATE_FAILED", f"peagle deploy sagemaker delete {NAME}"),
        ("UPDATE_IN_PROGRESS", "being changed .* sagemaker status chat"),
        ("UPDATE_ROLLBACK_IN_PROGRESS", "being changed"),
    ],
)
def test_stacks_that_cannot_be_updated(status: str, remedy: str) -> None:
    assert re.search(f"(?s){remedy}", refusal_of(status))


@pytest.mark.parametrize(
    "status", ["CREATE_COMPLETE", "UPDATE_COMPLETE", "UPDATE_ROLLBACK_COMPLETE"]
)
def test_stacks_that_can_be_updated(status: str) -> None:
    assert refusal_of(status) == ""


def refusal_of(status: str) -> str:
    """Return what is said of an update of a stack in this state; nothing where it may come."""
    try:
        stack.require_updatable({"StackStatus": status}, NAME, "us-east-1")
    except UserError as error:
        return str(error)
    return ""


def test_a_rollback_that_fails_has_a_name(
    aws: FakeAws, clients: Clients, deployment: Deployment
) -> None:
    stack.create(clients, deployment, report=quiet)
    aws.stacks.fail_next("UPDATE", "Endpoint", REASON)
    aws.stacks.fail_next("ROLLBACK", "Endpoint", "no instances")
    new, base, present = changed(clients, deployment)
    with pytest.raises(Unfinished) as caught:
        stack.update(clients, new, base, present, report=quiet)
    assert "continue-update-rollback" in caught.value.cause
    # The files of the new deployment may be in use: they stay.
    assert any("/s2/" in name for name in aws.holdings())


def test_a_deletion_that_fails_is_listed(
    aws: FakeAws, clients: Clients, deployment: Deployment
) -> None:
    stack.create(clients, deployment, report=quiet)
    aws.stacks.fail_next("DELETE", "EndpointConfig", "AccessDenied")
    with pytest.raises(Unfinished) as caught:
        stack.delete(clients, NAME, deployment.uploads, quiet)
    assert "EndpointConfig: DELETE_FAILED (AccessDenied)" in caught.value.cause
    assert caught.value.stayed[0].command == (
        f"peagle deploy sagemaker delete {NAME} --yes --region us-east-1"
    )
    # Files of an endpoint that may still serve stay.
    assert any("/s1/" in name for name in aws.holdings())
    stack.delete(clients, NAME, deployment.uploads, quiet)
    assert aws.holdings() == set()


def test_a_creation_that_cannot_be_taken_back_is_listed(
    aws: FakeAws, clients: Clients, deployment: Deployment
) -> None:
    aws.stacks.fail_next("CREATE", "Endpoint", REASON)
    aws.stacks.fail_next("ROLLBACK", "Model", "AccessDenied")
    with pytest.raises(Unfinished) as caught:
        stack.create(clients, deployment, report=quiet)
    commands = [one.command for one in caught.value.stayed]
    assert commands[0].startswith(f"peagle deploy sagemaker delete {NAME}")
    assert commands[-1].startswith("aws s3 rm ")


def test_files_that_cannot_be_deleted_are_listed(
    aws: FakeAws, clients: Clients, deployment: Deployment
) -> None:
    stack.create(clients, deployment, report=quiet)
    aws.fail("access denied", "DeleteObjects", calls=9)
    with pytest.raises(Unfinished) as caught:
        stack.delete(clients, NAME, deployment.uploads, quiet)
    (one,) = caught.value.stayed
    assert one.command == f"aws s3 rm {deployment.uploads[0]} --recursive --region us-east-1"
    assert "denied" in one.reason


# ---- the fault matrix ----

CREATE_CALLS = ("PutObject", "CreateChangeSet", "DescribeChangeSet", "ExecuteChangeSet")
KINDS = ("access denied", "throttling", "internal", "time-out before")


@pytest.mark.parametrize("operation", CREATE_CALLS)
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_stays_of_a_creation_with_a_fault(
    aws: FakeAws, clients: Clients, deployment: Deployment, operation: str, kind: str
) -> None:
    aws.fail(kind, operation)
    with pytest.raises(UserError):
        stack.create(clients, deployment, report=quiet)
    left = {name for name in aws.holdings() if name != f"stack {STACK}"}
    assert left == set()
    # An answer that was lost may leave a stack in review, which holds nothing and is used again.
    assert aws.stacks.status(STACK) in ("", "REVIEW_IN_PROGRESS")
    again = dataclasses.replace(deployment, stamp="s3")
    stack.require_new(clients, NAME)
    stack.create(clients, again, report=quiet)
    assert aws.stacks.status(STACK) == "CREATE_COMPLETE"


@pytest.mark.parametrize("operation", CREATE_CALLS)
@pytest.mark.parametrize("kind", ["access denied", "time-out before"])
def test_an_update_with_a_fault_changes_nothing(
    aws: FakeAws, clients: Clients, deployment: Deployment, operation: str, kind: str
) -> None:
    stack.create(clients, deployment, report=quiet)
    held, was = aws.holdings(), running(aws)
    aws.fail(kind, operation)
    new, base, present = changed(clients, deployment, vllm_flags={"seed": "1"})
    with pytest.raises(UserError):
        stack.update(clients, new, base, present, report=quiet)
    assert (aws.holdings(), running(aws)) == (held, was)


def test_an_answer_that_is_lost_of_what_was_done(
    aws: FakeAws, clients: Clients, deployment: Deployment
) -> None:
    aws.fail("time-out after", "ExecuteChangeSet", attempts=2)
    stack.create(clients, deployment, report=quiet)
    assert aws.stacks.status(STACK) == "CREATE_COMPLETE"


def test_aws_that_falls_silent_while_it_works(
    aws: FakeAws, clients: Clients, deployment: Deployment
) -> None:
    """CloudFormation goes on: nothing is taken back, and the message says so."""
    aws.fail("expired", "DescribeStacks", calls=99)
    with pytest.raises(UserError, match="CloudFormation goes on by itself"):
        stack.create(clients, deployment, report=quiet)
    aws.faults.clear()
    aws.clock.sleep(1000)
    aws.stacks.settle()
    assert aws.stacks.status(STACK) == "CREATE_COMPLETE"
    assert any(name.startswith("object ") for name in aws.holdings())


def test_ctrl_c_takes_a_creation_back(
    aws: FakeAws, clients: Clients, deployment: Deployment
) -> None:
    done: list[str] = []

    def report(line: str) -> None:
        done.append(line)
        if line.endswith("CREATE_IN_PROGRESS") and len(done) < 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stack.create(clients, deployment, report=report)
    assert aws.holdings() == set()
    assert "nothing stayed" in done[-1]


@pytest.mark.parametrize("operation", ["PutObject", "CreateChangeSet"])
def test_ctrl_c_before_cloudformation_begins(
    aws: FakeAws, clients: Clients, deployment: Deployment, operation: str
) -> None:
    aws.fail("interrupt", operation)
    with pytest.raises(KeyboardInterrupt):
        stack.create(clients, deployment, report=quiet)
    assert not any(name.startswith(("object", "endpoint", "model")) for name in aws.holdings())


def test_ctrl_c_takes_an_update_back(
    aws: FakeAws, clients: Clients, deployment: Deployment
) -> None:
    stack.create(clients, deployment, report=quiet)
    held, was = aws.holdings(), running(aws)
    once: list[str] = []

    def report(line: str) -> None:
        if "UPDATE_IN_PROGRESS" in line and not once:
            once.append(line)
            raise KeyboardInterrupt

    new, base, present = changed(clients, deployment, vllm_flags={"seed": "1"})
    with pytest.raises(KeyboardInterrupt):
        stack.update(clients, new, base, present, report=report)
    assert (aws.holdings(), running(aws)) == (held, was)
    assert aws.stacks.status(STACK) == "UPDATE_ROLLBACK_COMPLETE"


# ---- endpoints of others ----


def test_a_name_that_is_taken(aws: FakeAws, clients: Clients, deployment: Deployment) -> None:
    stack.require_new(clients, NAME)
    with pytest.raises(UserError, match="There is no endpoint 'chat' in us-east-1"):
        stack.stack_of(clients, NAME)
    stack.create(clients, deployment, report=quiet)
    with pytest.raises(UserError, match=r"There is an endpoint 'chat' .* \(CREATE_COMPLETE\)"):
        stack.require_new(clients, NAME)
    client = aws.clients(direct=True).client("sagemaker")
    config = client.list_endpoint_configs()["EndpointConfigs"][0]["EndpointConfigName"]
    client.create_endpoint(EndpointName="theirs", EndpointConfigName=config)
    for check in (stack.stack_of, stack.require_absent):
        with pytest.raises(UserError, match="This version of peagle did not make"):
            check(clients, "theirs")
    with pytest.raises(UserError, match="There is an endpoint 'theirs'"):
        stack.require_new(clients, "theirs")


def test_the_calls_of_a_plan_are_those_that_are_made(
    aws: FakeAws, clients: Clients, deployment: Deployment
) -> None:
    request = stack.change_set_request(deployment, creates=True)
    planned = stack.planned_calls(deployment, [request])
    assert "u:p" not in json.dumps(planned)
    stack.create(clients, deployment, report=quiet)
    made = [call.operation for call in aws.calls]
    positions = [made.index(call["operation"]) for call in planned]
    assert positions == sorted(positions)
    assert made.count("PutObject") == len(planned[0]["keys"])
