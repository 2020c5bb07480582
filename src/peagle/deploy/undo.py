"""Taking resources away again: what was made half way, what an update replaces, what is deleted."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from peagle.deploy import uploads
from peagle.deploy.aws import Clients
from peagle.deploy.aws_errors import explain, is_busy, is_gone, may_pass
from peagle.deploy.calls import Call
from peagle.deploy.endpoints import POLL_S, wait_in_service, wait_until_gone
from peagle.deploy.plan import Upload
from peagle.deploy.uploads import Removal
from peagle.errors import UserError

# Beyond boto3's own attempts: pauses before the same removal is tried again.
_PAUSES_S = (5.0, 20.0, 60.0)
# SageMaker deletes no endpoint that is being created or updated: so long the end of that is waited
# for; and so long an endpoint may take to go.
_BUSY_TIMEOUT_S = 5400.0
_GONE_TIMEOUT_S = 900.0

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Stayed:
    """Something that is still there, or may be.

    Attributes:
        what: in words, "model 'chat-20260101'".
        command: deletes it.
        reason: why it could not be deleted.
    """

    what: str
    command: str
    reason: str = ""

    def __str__(self) -> str:
        return f"  {self.what}{f' ({self.reason})' if self.reason else ''}\n    {self.command}"

    def to_json(self) -> dict[str, str]:
        """For programs."""
        return {"what": self.what, "command": self.command, "reason": self.reason}


# What takes something away: a call, an upload's opposite, or a removal of earlier uploads.
Undo = Call | Upload | Removal


def take_away(
    steps: Sequence[Undo],
    clients: Clients,
    report: Report,
    is_ours: Callable[[Undo], bool] = lambda undo: True,
) -> tuple[list[str], list[Stayed]]:
    """Take things away, one after another; what fails does not keep the next from being tried.

    Where an endpoint stays, so does what it runs with: its configuration, models and uploads. An
    interruption leaves the rest.

    Args:
        steps: in the order in which they are to go.
        clients: of AWS.
        report: gets a line for each that went.
        is_ours: asked before each; what is not stays, and is not listed.

    Returns:
        What went, in words, and what stayed.
    """
    gone: list[str] = []
    stayed: list[Stayed] = []
    in_use, is_interrupted = "", False
    for step in steps:
        why = "interrupted" if is_interrupted else in_use if _is_part(step) else ""
        if not why:
            try:
                if _take(step, clients, report, is_ours):
                    gone.append(what_of(step))
                    report(f"deleted {what_of(step)}" if _deletes(step) else what_of(step))
                continue
            except KeyboardInterrupt:
                why, is_interrupted = "interrupted", True
            except UserError as error:
                why = str(error)
            if _holds_parts(step):
                in_use = f"{what_of(step)} stays, and needs it"
        stayed.append(Stayed(what_of(step), command_of(step, clients.region), why))
    return gone, stayed


def _take(step: Undo, clients: Clients, report: Report, is_ours: Callable[[Undo], bool]) -> bool:
    """Take one thing away; false if it was not there.

    Raises:
        UserError: it could not be taken away.
    """
    from botocore.exceptions import BotoCoreError, ClientError

    deadline = clients.clock.now() + _BUSY_TIMEOUT_S
    pauses = list(_PAUSES_S)
    told = False
    while True:
        try:
            return is_ours(step) and _try(step, clients, report)
        except (BotoCoreError, ClientError) as error:
            if is_gone(error) and _deletes(step):
                return False
            if is_busy(error) and clients.clock.now() < deadline:
                if not told:
                    report(f"{what_of(step)}: AWS is changing it; waiting for the end of that")
                told = True
                clients.clock.sleep(POLL_S)
            elif may_pass(error) and _is_away(step, clients):
                return True
            elif may_pass(error) and pauses:
                clients.clock.sleep(pauses.pop(0))
            else:
                raise explain(error) from None


def _try(step: Undo, clients: Clients, report: Report) -> bool:
    if isinstance(step, Upload):
        return uploads.take_back(step, clients) > 0
    if isinstance(step, Removal):
        return _remove(step, clients, report)
    return _call(step, clients, report)


def _is_away(step: Undo, clients: Clients) -> bool:
    """Whether what a deletion was about is gone, though its answer was lost."""
    from botocore.exceptions import BotoCoreError, ClientError

    if not isinstance(step, Call) or step.service != "sagemaker" or not _deletes(step):
        return False
    try:
        describe = step.operation.replace("Delete", "Describe")
        found = clients.request(step.service, describe, **step.parameters)
        is_going = found.get("EndpointStatus") == "Deleting"
        name = found.get("EndpointName", "")
        return is_going and wait_until_gone(clients, name, _GONE_TIMEOUT_S)
    except (BotoCoreError, ClientError) as error:
        return is_gone(error)


def _remove(step: Removal, clients: Clients, report: Report) -> bool:
    count, others = uploads.remove(step, clients)
    if others:
        report(f"{len(others)} objects under {step.uri} were not uploaded by peagle: they stay")
    return count > 0


def _call(call: Call, clients: Clients, report: Report) -> bool:
    name = call.parameters.get("EndpointName", "")
    if call.operation == "UpdateEndpoint":
        return _update_back(call, clients, report)
    clients.call(call)
    if call.operation == "DeleteEndpoint" and not wait_until_gone(clients, name, _GONE_TIMEOUT_S):
        raise UserError("SageMaker is still deleting it")
    return True


def _update_back(call: Call, clients: Clients, report: Report) -> bool:
    """Give an endpoint its earlier configuration again, unless it has it."""
    name, config = call.parameters["EndpointName"], call.parameters["EndpointConfigName"]
    endpoint = clients.request("sagemaker", "DescribeEndpoint", EndpointName=name)
    pending = endpoint.get("PendingDeploymentSummary", {}).get("EndpointConfigName")
    has_it = endpoint.get("EndpointConfigName") == config and pending in (None, config)
    if endpoint["EndpointStatus"] == "Failed":
        raise UserError("it has failed, and can only be deleted")
    if has_it and endpoint["EndpointStatus"] == "InService":
        return False
    if not (has_it and endpoint["EndpointStatus"] in ("Updating", "RollingBack")):
        clients.call(call)
    wait_in_service(clients, name, _BUSY_TIMEOUT_S, report, config=config)
    return True


def owns(call: Call, clients: Clients) -> bool:
    """Whether the endpoint that a CreateEndpoint was to make is the one that it made.

    Models and endpoint configurations have names that nobody else uses; an endpoint has the user's.

    Raises:
        botocore's errors: AWS refused or gave no answer.
    """
    if call.operation != "CreateEndpoint":
        return True
    name = call.parameters["EndpointName"]
    endpoint = clients.request("sagemaker", "DescribeEndpoint", EndpointName=name)
    pending = endpoint.get("PendingDeploymentSummary", {}).get("EndpointConfigName")
    return call.parameters["EndpointConfigName"] in (endpoint.get("EndpointConfigName"), pending)


# ---- in words ---------------------------------------------------------------------------------

_PARTS = ("DeleteEndpointConfig", "DeleteModel")
_NAMED = {
    "DeleteEndpoint": ("endpoint", "EndpointName"),
    "DeleteEndpointConfig": ("endpoint configuration", "EndpointConfigName"),
    "DeleteModel": ("model", "ModelName"),
    "DeregisterScalableTarget": ("scalable target", "ResourceId"),
    "DeleteScalingPolicy": ("scaling policy", "PolicyName"),
}


def _is_part(step: Undo) -> bool:
    """Whether an endpoint may run with it."""
    return not isinstance(step, Call) or step.operation in _PARTS


def _holds_parts(step: Undo) -> bool:
    return isinstance(step, Call) and step.operation in ("DeleteEndpoint", "UpdateEndpoint")


def _deletes(step: Undo) -> bool:
    return not isinstance(step, Call) or step.operation in _NAMED


def what_of(step: Undo) -> str:
    """What it takes away, in words."""
    if isinstance(step, Upload | Removal):
        return f"uploads under {step.uri}"
    if step.operation in _NAMED:
        kind, parameter = _NAMED[step.operation]
        return f"{kind} {step.parameters[parameter]!r}"
    if step.operation == "UpdateEndpoint":
        given = step.parameters
        return f"endpoint {given['EndpointName']!r} back on {given['EndpointConfigName']!r}"
    given = step.parameters
    about = given.get("ResourceId") or given.get("EndpointName") or given.get("ResourceArn", "")
    words = " ".join(re.findall(r"[A-Z][a-z]*", step.operation)).lower()
    return f"{words}: {about}"


def command_of(step: Undo, region: str) -> str:
    """A command of the AWS CLI that does the same."""
    if isinstance(step, Upload | Removal):
        return shlex.join(["aws", "s3", "rm", step.uri, "--recursive", "--region", region])
    from botocore import xform_name

    words = ["aws", step.service, xform_name(step.operation, "-")]
    given = step.parameters
    if all(isinstance(value, str | int | float) for value in given.values()):
        for name, value in given.items():
            words += [f"--{xform_name(name, '-')}", str(value)]
    else:
        words += ["--cli-input-json", json.dumps(dict(given))]
    return shlex.join([*words, "--region", region])
