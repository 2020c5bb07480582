"""The CloudFormation stack of an endpoint: created and updated by change sets, and deleted.

CloudFormation makes, rolls back and deletes the resources. This file starts it, waits for it, and
says what a failure means.
"""

import json
import shlex
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from peagle.deploy import logs, uploads
from peagle.deploy.aws import Clients, call_errors, explain, explained_errors, is_gone, one_line
from peagle.deploy.deployment import ENDPOINT_TAG, SOURCE_TAG, Deployment
from peagle.deploy.models import folder_files, split_uri
from peagle.deploy.template import (
    Template,
    endpoint_template,
    parameter_values,
    stored_deployment,
    with_autoscaling,
)
from peagle.deploy.uploads import Report
from peagle.errors import UserError

POLL_S = 10.0
_REVIEW = "REVIEW_IN_PROGRESS"  # a stack whose first change set was never executed
_NO_CHANGES = ("didn't contain changes", "No updates are to be performed")
_LOG_LINES, _LOG_S = 12, 600.0
# Statuses of stacks that cannot be updated, and the cause and remedy of each.
_REMEDIES = {
    "UPDATE_ROLLBACK_FAILED": (
        "an update failed, and CloudFormation could not go back ({status}). Mend the reason that "
        "`peagle deploy sagemaker status` shows, then: aws cloudformation "
        "continue-update-rollback --stack-name {stack} --region {region}"
    ),
    "CREATE_FAILED": (
        "its creation failed, and CloudFormation could not take everything back ({status}). "
        "Delete it: {delete}"
    ),
    "ROLLBACK_COMPLETE": (
        "its creation failed, and an empty stack is left ({status}). Delete it: {delete}"
    ),
    "DELETE_FAILED": (
        "CloudFormation could not delete all of it ({status}). Mend the reason that `peagle deploy "
        "sagemaker status` shows, and delete it again: {delete}"
    ),
}
_REMEDIES["ROLLBACK_FAILED"] = _REMEDIES["CREATE_FAILED"]


@dataclass(frozen=True, slots=True)
class Leftover:
    """Something that still exists, and the command that deletes it."""

    what: str
    command: str
    reason: str = ""

    def __str__(self) -> str:
        return f"  {self.what}{f' ({self.reason})' if self.reason else ''}\n    {self.command}"


class Unfinished(UserError):
    """A failure that left something behind.

    Attributes:
        cause: the first thing that went wrong.
        stayed: the resources that still exist, in the order in which to run the commands.
    """

    def __init__(self, cause: str, stayed: Sequence[Leftover]) -> None:
        lines = "\n".join(map(str, stayed))
        super().__init__(
            f"{cause}\nThis stayed, and may cost money; run these commands in this order:\n{lines}"
        )
        self.cause = cause
        self.stayed = tuple(stayed)


class StackFailed(UserError):
    """CloudFormation could not carry out a change set; `status` is the stack's now."""

    def __init__(self, message: str, status: str) -> None:
        super().__init__(message)
        self.status = status


def to_stderr(line: str) -> None:
    """Write a line of progress to standard error."""
    print(f"peagle: {line}", file=sys.stderr, flush=True)


def stack_name_of(endpoint: str) -> str:
    """Return the name of an endpoint's stack."""
    return f"peagle-endpoint-{endpoint}"


# ---- stacks and endpoints that exist; UserError if AWS refuses a call ----


def find_stack(clients: Clients, endpoint: str) -> dict[str, Any] | None:
    """Return CloudFormation's description of an endpoint's stack; None without one."""
    found = clients.find("cloudformation", "DescribeStacks", StackName=stack_name_of(endpoint))
    stacks = found.get("Stacks", ())
    return next((s for s in stacks if s["StackStatus"] != "DELETE_COMPLETE"), None)


def stack_of(clients: Clients, endpoint: str) -> dict[str, Any]:
    """Return CloudFormation's description of an endpoint's stack, or refuse one without a stack."""
    if (stack := find_stack(clients, endpoint)) is not None:
        return stack
    require_absent(clients, endpoint)
    raise UserError(
        f"There is no endpoint {endpoint!r} in {clients.region}. List the endpoints: aws "
        f"sagemaker list-endpoints --region {clients.region}"
    )


def require_absent(clients: Clients, endpoint: str) -> None:
    """Refuse an endpoint that exists without a stack."""
    if clients.find("sagemaker", "DescribeEndpoint", EndpointName=endpoint):
        raise UserError(
            f"This version of peagle did not make the endpoint {endpoint!r}: it has no stack "
            f"{stack_name_of(endpoint)}. Change it with the tool that made it, or delete it: aws "
            f"sagemaker delete-endpoint --endpoint-name {endpoint} --region {clients.region}"
        )


def template_of(clients: Clients, endpoint: str) -> Template:
    """Return the template of an endpoint's stack; {} without one."""
    found = clients.find("cloudformation", "GetTemplate", StackName=stack_name_of(endpoint))
    body = found.get("TemplateBody") or {}
    return dict(json.loads(body) if isinstance(body, str) else body)


def uploads_of(clients: Clients, endpoint: str) -> tuple[str, ...]:
    """Return the s3:// prefixes that peagle filled for an endpoint."""
    return tuple(stored_deployment(template_of(clients, endpoint)).get("uploads", ()))


def require_new(clients: Clients, endpoint: str) -> None:
    """Refuse the name of an endpoint that exists."""
    stack = find_stack(clients, endpoint)
    status = stack["StackStatus"] if stack else _REVIEW
    if status == _REVIEW:
        found = clients.find("sagemaker", "DescribeEndpoint", EndpointName=endpoint)
        if not found:
            return
        status = found["EndpointStatus"]
    raise UserError(
        f"There is an endpoint {endpoint!r} in {clients.region} already ({status}). Give this one "
        f"another name with --name, change that one (peagle deploy sagemaker update {endpoint}) or "
        f"delete it (peagle deploy sagemaker delete {endpoint})."
    )


def require_updatable(stack: dict[str, Any], endpoint: str, region: str) -> None:
    """Refuse a stack that CloudFormation would not update now."""
    status = stack["StackStatus"]
    if status.endswith("_IN_PROGRESS"):
        raise UserError(
            f"The endpoint {endpoint!r} is being changed ({status}), and CloudFormation takes no "
            "other change until that has ended. See how far it is: peagle deploy sagemaker status "
            f"{endpoint}"
        )
    if remedy := _remedy(status, endpoint, region):
        raise UserError(f"The endpoint {endpoint!r} cannot be changed: {remedy}")


def _remedy(status: str, endpoint: str, region: str) -> str:
    return _REMEDIES.get(status, "").format(
        status=status,
        stack=stack_name_of(endpoint),
        region=region,
        delete=f"peagle deploy sagemaker delete {endpoint} --region {region}",
    )


def stack_events(clients: Clients, stack: str) -> list[dict[str, Any]]:
    """Return the events of a stack, oldest first; [] without a stack."""
    found = clients.find("cloudformation", "DescribeStackEvents", StackName=stack)
    return list(reversed(found.get("StackEvents", ())))


def event_line(event: dict[str, Any]) -> str:
    """Return an event in one line."""
    reason = one_line(event.get("ResourceStatusReason", ""))
    name = event.get("LogicalResourceId", "")
    return f"{name}: {event['ResourceStatus']}{f' ({reason})' if reason else ''}"


def resources_of(clients: Clients, endpoint: str) -> list[str]:
    """Return the resources of an endpoint's stack in words."""
    return [name for name, _, _ in _resources(clients, stack_name_of(endpoint))]


def _resources(clients: Clients, stack: str) -> list[tuple[str, str, str]]:
    """Return the name, status and reason of each resource of a stack."""
    found = clients.find("cloudformation", "DescribeStackResources", StackName=stack)
    return [
        (
            f"{one['ResourceType']} {one.get('PhysicalResourceId', '')}".rstrip(),
            one["ResourceStatus"],
            one_line(one.get("ResourceStatusReason", "")),
        )
        for one in found.get("StackResources", ())
    ]


# ---- requests ----


def change_set_request(
    d: Deployment, template: Template | None = None, *, creates: bool = False
) -> dict[str, Any]:
    """Return the parameters of CreateChangeSet, with the template as an object.

    Args:
        d: the deployment.
        template: None takes the deployment's.
        creates: whether the stack is new; if its creation fails, CloudFormation deletes it.
    """
    tags = {**d.tags, ENDPOINT_TAG: d.endpoint_name, SOURCE_TAG: d.source}
    return {
        "StackName": stack_name_of(d.endpoint_name),
        "ChangeSetName": f"peagle-{d.stamp}",
        "ChangeSetType": "CREATE" if creates else "UPDATE",
        **({"OnStackFailure": "DELETE"} if creates else {}),
        "TemplateBody": template or endpoint_template(d),
        "Parameters": parameter_values(d),
        "Tags": [{"Key": key, "Value": value} for key, value in tags.items()],
    }


def update_requests(d: Deployment, base: Deployment, present: Template) -> list[dict[str, Any]]:
    """Return the parameters of the change sets that update an endpoint.

    SageMaker refuses to change the instance type of an endpoint that is scaled automatically
    (https://docs.aws.amazon.com/sagemaker/latest/dg/endpoint-scaling.html), so scaling ends first.
    """
    wanted = change_set_request(d)
    if base.autoscaling is None or base.instance_type == d.instance_type:
        return [wanted]
    return [scaling_request(base, with_autoscaling(present, None)), wanted]


def scaling_request(base: Deployment, template: Template) -> dict[str, Any]:
    """Return the parameters of a change set that changes nothing but scaling."""
    request = change_set_request(base, template)
    return {**request, "ChangeSetName": f"{request['ChangeSetName']}-scaling"}


def planned_calls(d: Deployment, requests: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the calls that fill S3 and run change sets, as JSON, with secrets hidden."""
    calls = []
    for transfer in d.transfers:
        if transfer.source.kind != "local":
            call = planned_call("s3", "CopyObject", uploads.put_parameters(transfer, ""))
            calls.append({**call, "from": transfer.source.name})
            continue
        folder = Path(transfer.source.name)
        sent = folder_files(folder)
        names = [file.relative_to(folder).as_posix() for file in sent]
        prefix = split_uri(transfer.uri)[1]
        calls.append(
            {
                **planned_call("s3", "PutObject", uploads.put_parameters(transfer, names[0])),
                "folder": str(folder),
                "keys": [prefix + name for name in names],
                "bytes": sum(file.stat().st_size for file in sent),
            }
        )
    for request in requests:
        hidden = [
            {**p, "ParameterValue": "********"} if "ParameterValue" in p else p
            for p in request["Parameters"]
        ]
        change = {key: request[key] for key in ("StackName", "ChangeSetName")}
        stack = {"StackName": request["StackName"]}
        end = f"{request['ChangeSetType']}_COMPLETE"
        calls += [
            planned_call("cloudformation", "CreateChangeSet", {**request, "Parameters": hidden}),
            planned_call("cloudformation", "DescribeChangeSet", change, until="CREATE_COMPLETE"),
            planned_call("cloudformation", "ExecuteChangeSet", change),
            planned_call("cloudformation", "DescribeStacks", stack, until=end),
        ]
    return calls


def planned_call(
    service: str, operation: str, parameters: dict[str, Any], *, until: str = ""
) -> dict[str, Any]:
    """Return a call as JSON; the command repeats it until the status is `until`."""
    call = {"service": service, "operation": operation, "parameters": parameters}
    return {**call, "until": until} if until else call


# ---- changes ----


def create(
    clients: Clients, d: Deployment, *, wait: bool = True, report: Report = to_stderr
) -> None:
    """Put the files into S3 and create the stack; a failure or Ctrl-C takes all of it back.

    Raises:
        Unfinished: something stayed; the error lists it.
        UserError: it failed, and nothing stayed.
        KeyboardInterrupt: the user interrupted it, and nothing stayed.
    """
    request = change_set_request(d, creates=True)
    made = [transfer.uri for transfer in d.transfers]
    uploads.put(d.transfers, clients, report)
    change = _Change(clients, d.endpoint_name, report)
    taken_back = "Everything that had been made was taken back: nothing stayed."
    try:
        change.run(request, wait=wait)
    except KeyboardInterrupt:
        report("interrupted: deleting the stack; interrupt again to leave it to CloudFormation")
        change.delete()
        _remove_files(clients, made, "Interrupted.", report)
        report(taken_back)
        raise
    except UserError as error:
        if isinstance(error, StackFailed) and error.status != "DELETE_COMPLETE":
            stayed = [*change.leftovers(), *(_files_left(uri, clients) for uri in made)]
            raise Unfinished(str(error), stayed) from None
        if change.is_running:
            raise  # CloudFormation goes on
        change.delete_empty()
        _remove_files(clients, made, str(error), report)
        raise UserError(f"{error}\n{taken_back}") from None


def update(
    clients: Clients,
    d: Deployment,
    base: Deployment,
    present: Template,
    *,
    wait: bool = True,
    report: Report = to_stderr,
) -> None:
    """Put new files into S3 and update the stack; a failure or Ctrl-C goes back to before.

    Args:
        clients: of AWS.
        d, base: the new deployment, and the present one.
        present: the stack's template.
        wait: false returns once CloudFormation has begun.
        report: gets lines of progress.

    Raises:
        Unfinished: something stayed; the error lists it.
        UserError: it failed, and the endpoint serves as before.
        KeyboardInterrupt: the user interrupted it, and the endpoint serves as before.
    """
    if not wait:  # no command deletes the old files then: the stack keeps their names for `delete`
        d = replace(d, uploads=tuple(dict.fromkeys([*base.uploads, *d.uploads])))
    *first, last = update_requests(d, base, present)
    made = [transfer.uri for transfer in d.transfers]
    uploads.put(d.transfers, clients, report)
    change = _Change(clients, d.endpoint_name, report)
    scaling_ended = False

    def restore(cause: str) -> None:
        if scaling_ended:
            _restore_scaling(clients, base, present, report)
        _remove_files(clients, made, cause, report)

    try:
        for request in first:
            change.run(request)
            scaling_ended = True
        change.run(last, wait=wait)
    except KeyboardInterrupt:
        report("interrupted: going back; interrupt again to leave it to CloudFormation")
        change.cancel()
        restore("Interrupted.")
        raise
    except UserError as error:
        if isinstance(error, StackFailed) and error.status != "UPDATE_ROLLBACK_COMPLETE":
            raise Unfinished(str(error), change.leftovers()) from None
        if change.is_running:
            raise
        restore(str(error))
        raise UserError(f"{error}\nThe endpoint serves as before.") from None
    if wait:
        old = [uri for uri in base.uploads if uri not in d.uploads]
        _remove_files(clients, old, "The endpoint is updated, but old files stayed.", report)


def rescale(clients: Clients, base: Deployment, template: Template, report: Report) -> None:
    """Update the scaling of an endpoint; after a UserError it is scaled as before."""
    _Change(clients, base.endpoint_name, report).run(scaling_request(base, template))


def _restore_scaling(clients: Clients, base: Deployment, present: Template, report: Report) -> None:
    """Scale as before, after an update that ended scaling first and then failed."""
    try:
        rescale(clients, base, present, report)
    except UserError as error:
        scaled = base.autoscaling
        assert scaled is not None
        command = (
            f"peagle deploy sagemaker scale {base.endpoint_name} --min {scaled.min_instances} "
            f"--max {scaled.max_instances} --target {scaled.target_value:g} --region "
            f"{clients.region}"
        )
        raise Unfinished(
            f"The update failed, and the endpoint is no longer scaled automatically: {error}",
            [Leftover("an endpoint with a fixed number of instances", command)],
        ) from None


def delete(
    clients: Clients, endpoint: str, files: Sequence[str], report: Report = to_stderr
) -> None:
    """Delete an endpoint's stack, and then the files that peagle put into S3 for it.

    Raises:
        Unfinished: something could not be deleted; the error lists it.
        UserError: AWS refused.
    """
    change = _Change(clients, endpoint, report)
    try:
        change.delete()
    except StackFailed as error:
        raise Unfinished(str(error), change.leftovers()) from None
    _remove_files(clients, files, "The endpoint is deleted, but not all files in S3.", report)


def _remove_files(clients: Clients, files: Sequence[str], cause: str, report: Report) -> None:
    if stayed := uploads.remove(files, clients, report):
        listed = [_files_left(uri, clients, reason) for uri, reason in stayed.items()]
        raise Unfinished(cause, listed) from None


def _files_left(uri: str, clients: Clients, reason: str = "") -> Leftover:
    command = shlex.join(["aws", "s3", "rm", uri, "--recursive", "--region", clients.region])
    return Leftover(f"files under {uri}", command, reason)


class _Change:
    """One change of a stack, from its request to its end.

    Attributes:
        is_running: whether CloudFormation may still be at work.
    """

    def __init__(self, clients: Clients, endpoint: str, report: Report) -> None:
        self._clients, self._endpoint, self._report = clients, endpoint, report
        self._name = stack_name_of(endpoint)
        self._stack = self._name  # later its id, since a deleted stack has no name
        self._change_set = ""
        self._seen: set[str] = set()
        self._failures: list[str] = []
        self.is_running = False

    def _request(self, operation: str, **parameters: Any) -> dict[str, Any]:
        return self._clients.request("cloudformation", operation, **parameters)

    def run(self, request: dict[str, Any], *, wait: bool = True) -> None:
        """Make a change set, execute it, and wait.

        Raises:
            StackFailed: CloudFormation failed, and has gone back as far as it can.
            UserError: AWS refused; or, if `is_running`, AWS does not tell how far it is.
        """
        body = json.dumps(request["TemplateBody"])
        with explained_errors():
            made = self._request("CreateChangeSet", **{**request, "TemplateBody": body})
            self._stack, self._change_set = made["StackId"], made["Id"]
            for change in self._wait_for_change_set():
                if request["ChangeSetType"] == "UPDATE":
                    self._report(f"change set: {_change_line(change['ResourceChange'])}")
            self._skip_events()
            try:
                self._request("ExecuteChangeSet", ChangeSetName=self._change_set)
            except call_errors():
                # AWS may have begun although its answer was lost.
                found = self._request("DescribeChangeSet", ChangeSetName=self._change_set)
                if not found.get("ExecutionStatus", "").startswith("EXECUTE"):
                    raise
        self.is_running = True
        self._report(f"CloudFormation works on the stack {self._name}")
        if wait:
            self._wait(f"{request['ChangeSetType']}_COMPLETE")

    def _wait_for_change_set(self) -> list[dict[str, Any]]:
        """Wait until the change set is made; return its changes."""
        while True:
            found = self._request("DescribeChangeSet", ChangeSetName=self._change_set)
            if found["Status"] not in ("CREATE_PENDING", "CREATE_IN_PROGRESS"):
                break
            self._clients.clock.sleep(POLL_S / 5)
        if found["Status"] == "CREATE_COMPLETE":
            return found.get("Changes", [])
        reason = one_line(found.get("StatusReason", "") or "no reason was given")
        self._request("DeleteChangeSet", ChangeSetName=self._change_set)
        if any(text in reason for text in _NO_CHANGES):
            raise UserError(
                f"Nothing is to change about {self._endpoint!r}; name an option (`peagle deploy "
                "sagemaker update --help`)."
            )
        raise UserError(f"CloudFormation refused the template: {reason}")

    def _wait(self, expected: str) -> None:
        """Wait until the stack has a status that lasts, and report its events until then."""
        status = ""
        while not status or status.endswith("_IN_PROGRESS"):
            if status:
                self._clients.clock.sleep(POLL_S)
            try:
                try:
                    (stack,) = self._request("DescribeStacks", StackName=self._stack)["Stacks"]
                    status = stack["StackStatus"]
                except call_errors() as error:
                    if expected != "DELETE_COMPLETE" or not is_gone(error):
                        raise
                    status = expected
                self._report_events()
            except (*call_errors(), UserError) as error:
                raise UserError(
                    f"{explain(error)}\nCloudFormation goes on by itself. See how far it is: "
                    f"peagle deploy sagemaker status {self._endpoint}"
                ) from None
        self.is_running = False
        if status != expected:
            why = "; ".join(self._failures) or "CloudFormation gave no reason"
            remedy = _remedy(status, self._endpoint, self._clients.region)
            raise StackFailed(
                f"The endpoint {self._endpoint!r} failed: {why.rstrip('.')}. The stack is {status}"
                f"{': ' + remedy if remedy else '.'}"
                f"{_last_log_lines(self._clients, self._endpoint)}",
                status,
            )

    def _skip_events(self) -> None:
        self._seen |= {event["EventId"] for event in stack_events(self._clients, self._stack)}

    def _report_events(self) -> None:
        for event in stack_events(self._clients, self._stack):
            if event["EventId"] in self._seen:
                continue
            self._seen.add(event["EventId"])
            line = event_line(event)
            self._report(line)
            is_cause = "cancelled" not in line and event["LogicalResourceId"] != self._name
            if event["ResourceStatus"].endswith("_FAILED") and is_cause:
                self._failures.append(line)

    def delete(self) -> None:
        """Delete the stack, and wait until it is gone; StackFailed if a resource stays."""
        found = self._clients.find("cloudformation", "DescribeStacks", StackName=self._stack)
        if not found:
            return
        self._stack = found["Stacks"][0]["StackId"]
        self._skip_events()
        self._clients.find("cloudformation", "DeleteStack", StackName=self._stack)
        self._wait("DELETE_COMPLETE")

    def delete_empty(self) -> None:
        """Delete the stack if this change made it and CloudFormation made nothing in it."""
        stack = find_stack(self._clients, self._endpoint)
        if self._change_set and stack and stack["StackStatus"] == _REVIEW:
            self.delete()

    def cancel(self) -> None:
        """Let CloudFormation go back from an update, and wait; StackFailed if it could not."""
        if self.is_running and self._clients.find(
            "cloudformation", "CancelUpdateStack", StackName=self._stack
        ):
            self._wait("UPDATE_ROLLBACK_COMPLETE")

    def leftovers(self) -> list[Leftover]:
        """Return the resources that CloudFormation could not delete, or else the stack itself."""
        region = self._clients.region
        again = f"peagle deploy sagemaker delete {self._endpoint} --yes --region {region}"
        stayed = [
            Leftover(name, again, reason)
            for name, status, reason in _resources(self._clients, self._stack)
            if status.endswith("_FAILED")
        ]
        return stayed or [Leftover(f"stack {self._name}", again)]


def _change_line(change: dict[str, Any]) -> str:
    is_replaced = change.get("Replacement") == "True"
    return f"{'Replace' if is_replaced else change['Action']} {change['LogicalResourceId']}"


def _last_log_lines(clients: Clients, endpoint: str) -> str:
    """Return the last lines of the containers' log, to follow a message; "" without a log."""
    since_ms = int((time.time() - _LOG_S) * 1000)
    try:
        lines = deque(logs.read(clients, endpoint, since_ms), _LOG_LINES)
    except UserError:
        return ""
    return "".join(f"\n  | {one_line(line.text)}" for line in lines)
