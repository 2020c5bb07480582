"""The CloudFormation stack of an endpoint: created and updated by change sets, and deleted.

CloudFormation makes, rolls back and deletes the resources; this file starts it, waits with boto3's
waiters, and says what a failure means.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from peagle.deploy import logs, uploads
from peagle.deploy.aws import Clients
from peagle.deploy.aws_errors import clean, explain
from peagle.deploy.deployment import ENDPOINT_TAG, SOURCE_TAG, Deployment, Transfer
from peagle.deploy.models import folder_files
from peagle.deploy.template import (
    Template,
    endpoint_template,
    metadata_of,
    parameter_values,
    with_autoscaling,
)
from peagle.errors import UserError

POLL_S = 10.0
_REVIEW = "REVIEW_IN_PROGRESS"
_NO_CHANGES = ("didn't contain changes", "No updates are to be performed")
_LOG_LINES, _LOG_S = 12, 600.0

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Stayed:
    """Something that is still there, and the command that ends it."""

    what: str
    command: str
    reason: str = ""

    def __str__(self) -> str:
        return f"  {self.what}{f' ({self.reason})' if self.reason else ''}\n    {self.command}"


class Unfinished(UserError):
    """Something is there that should not be.

    Attributes:
        cause: the first thing that went wrong.
        stayed: what is still there, in the order in which to run its commands.
    """

    def __init__(self, cause: str, stayed: Sequence[Stayed]) -> None:
        lines = "\n".join(map(str, stayed))
        super().__init__(
            f"{cause}\nThis stayed, and may cost money; what ends it, in this order:\n{lines}"
        )
        self.cause = cause
        self.stayed = tuple(stayed)


class StackFailed(UserError):
    """CloudFormation could not do what a change set asked for.

    Attributes:
        status: of the stack now.
    """

    def __init__(self, message: str, status: str) -> None:
        super().__init__(message)
        self.status = status


def to_stderr(line: str) -> None:
    """Write a line of progress where no results go."""
    print(f"peagle: {line}", file=sys.stderr, flush=True)


def stack_name_of(endpoint: str) -> str:
    """The name of an endpoint's stack."""
    return f"peagle-endpoint-{endpoint}"


# ---- what is there --------------------------------------------------------------------------


def find_stack(clients: Clients, endpoint: str) -> dict[str, Any] | None:
    """Return what CloudFormation says of an endpoint's stack; None without one.

    Raises:
        UserError: AWS refused.
    """
    found = clients.ask("cloudformation", "DescribeStacks", StackName=stack_name_of(endpoint))
    stacks = found.get("Stacks", ())
    return next((s for s in stacks if s["StackStatus"] != "DELETE_COMPLETE"), None)


def stack_of(clients: Clients, endpoint: str) -> dict[str, Any]:
    """Return what CloudFormation says of an endpoint's stack.

    Raises:
        UserError: there is none, or AWS refused.
    """
    if (stack := find_stack(clients, endpoint)) is not None:
        return stack
    require_absent(clients, endpoint)
    raise UserError(
        f"There is no endpoint {endpoint!r} in {clients.region}. See which there are: aws "
        f"sagemaker list-endpoints --region {clients.region}"
    )


def require_absent(clients: Clients, endpoint: str) -> None:
    """Refuse an endpoint without a stack.

    Raises:
        UserError: it is there, or AWS refused.
    """
    if clients.ask("sagemaker", "DescribeEndpoint", EndpointName=endpoint):
        raise UserError(
            f"The endpoint {endpoint!r} was not made by this version of peagle: it has no stack "
            f"{stack_name_of(endpoint)}. Change it with what made it, or delete it: aws sagemaker "
            f"delete-endpoint --endpoint-name {endpoint} --region {clients.region}"
        )


def template_of(clients: Clients, endpoint: str) -> Template:
    """Return the template of an endpoint's stack.

    Raises:
        UserError: there is none, or AWS refused.
    """
    found = clients.ask("cloudformation", "GetTemplate", StackName=stack_name_of(endpoint))
    body = found.get("TemplateBody") or {}
    return dict(json.loads(body) if isinstance(body, str) else body)


def require_new(clients: Clients, endpoint: str) -> None:
    """Refuse the name of an endpoint that is there.

    Raises:
        UserError: it is there, or AWS refused.
    """
    stack = find_stack(clients, endpoint)
    status = stack["StackStatus"] if stack else ""
    if status in ("", _REVIEW):
        found = clients.ask("sagemaker", "DescribeEndpoint", EndpointName=endpoint)
        if not found:
            return
        status = found["EndpointStatus"]
    raise UserError(
        f"There is an endpoint {endpoint!r} in {clients.region} already ({status}). Give this one "
        f"another name with --name, change that one (peagle deploy sagemaker update {endpoint}) or "
        f"delete it (peagle deploy sagemaker delete {endpoint})."
    )


def require_updatable(stack: dict[str, Any], endpoint: str, region: str) -> None:
    """Refuse a stack that CloudFormation would not update now.

    Raises:
        UserError: it is being changed, or has failed.
    """
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
    """What the status of a stack that failed means, and what to do; "" for other statuses."""
    name = stack_name_of(endpoint)
    delete = f"peagle deploy sagemaker delete {endpoint} --region {region}"
    if status == "UPDATE_ROLLBACK_FAILED":
        return (
            f"an update failed, and CloudFormation could not go back ({status}). Mend the reason "
            "that `peagle deploy sagemaker status` shows, then: aws cloudformation "
            f"continue-update-rollback --stack-name {name} --region {region}"
        )
    if status in ("CREATE_FAILED", "ROLLBACK_FAILED"):
        return (
            f"its creation failed, and CloudFormation could not take everything back ({status}). "
            f"Delete it: {delete}"
        )
    if status == "ROLLBACK_COMPLETE":
        return f"its creation failed, and an empty stack is left ({status}). Delete it: {delete}"
    if status == "DELETE_FAILED":
        return (
            f"CloudFormation could not delete all of it ({status}). Mend the reason that `peagle "
            f"deploy sagemaker status` shows, and delete it again: {delete}"
        )
    return ""


# ---- requests -------------------------------------------------------------------------------


def change_set_request(
    d: Deployment, template: Template | None = None, *, creates: bool = False
) -> dict[str, Any]:
    """Return the parameters of CreateChangeSet, with the template as an object.

    Args:
        d: the deployment.
        template: None takes that of the deployment.
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


# ---- changes --------------------------------------------------------------------------------


def create(
    clients: Clients, d: Deployment, *, wait: bool = True, report: Report = to_stderr
) -> None:
    """Put the files into S3 and create the stack; a failure or Ctrl-C takes all of it back.

    Raises:
        Unfinished: something stayed; it is listed.
        UserError: it failed, and nothing stayed.
        KeyboardInterrupt: somebody interrupted, and nothing stayed.
    """
    request = change_set_request(d, creates=True)
    made = [transfer.uri for transfer in d.transfers]
    uploads.put(d.transfers, clients, report)
    change = _Change(clients, d.endpoint_name, report)
    try:
        change.run(request, "stack_create_complete", wait=wait)
    except KeyboardInterrupt:
        report("interrupted: deleting the stack; interrupt again to leave it to CloudFormation")
        change.delete()
        _remove_files(clients, made, "Interrupted.", report)
        report("Everything that had been made was taken back: nothing stayed.")
        raise
    except UserError as error:
        if isinstance(error, StackFailed) and error.status != "DELETE_COMPLETE":
            files = [_file_stayed(uri, clients) for uri in made]
            raise Unfinished(str(error), [*change.stayed(), *files]) from None
        if change.is_running:
            raise  # CloudFormation goes on
        change.delete_empty()
        _remove_files(clients, made, str(error), report)
        raise UserError(
            f"{error}\nEverything that had been made was taken back: nothing stayed."
        ) from None


def update(
    clients: Clients,
    d: Deployment,
    base: Deployment,
    present: Template,
    *,
    wait: bool = True,
    report: Report = to_stderr,
) -> None:
    """Put new files into S3 and update the stack; a failure or Ctrl-C goes back to what was.

    Args:
        clients: of AWS.
        d, base: the deployment as it shall be, and as it is.
        present: the stack's template.
        wait: false returns once CloudFormation has begun.
        report: gets lines of progress.

    Raises:
        Unfinished: something stayed; it is listed.
        UserError: it failed, and the endpoint serves as before.
        KeyboardInterrupt: somebody interrupted, and the endpoint serves as before.
    """
    if not wait:  # nobody deletes the old files: the stack keeps their names for `delete`
        d = replace(d, uploads=tuple(dict.fromkeys([*base.uploads, *d.uploads])))
    requests = update_requests(d, base, present)
    made = [transfer.uri for transfer in d.transfers]
    uploads.put(d.transfers, clients, report)
    done = 0
    change = _Change(clients, d.endpoint_name, report)
    try:
        for request in requests:
            last = request is requests[-1]
            change.run(request, "stack_update_complete", wait=wait or not last)
            done += 1
    except KeyboardInterrupt:
        report("interrupted: going back; interrupt again to leave it to CloudFormation")
        change.cancel()
        _rescale(clients, base, present, report, done)
        _remove_files(clients, made, "Interrupted.", report)
        raise
    except UserError as error:
        if isinstance(error, StackFailed) and error.status != "UPDATE_ROLLBACK_COMPLETE":
            raise Unfinished(str(error), change.stayed()) from None
        if change.is_running:
            raise
        _rescale(clients, base, present, report, done)
        _remove_files(clients, made, str(error), report)
        raise UserError(f"{error}\nThe endpoint serves as before.") from None
    if wait:
        old = [uri for uri in base.uploads if uri not in d.uploads]
        _remove_files(clients, old, "The endpoint is updated, but old files stayed.", report)


def rescale(clients: Clients, base: Deployment, template: Template, report: Report) -> None:
    """Update the scaling of an endpoint.

    Raises:
        UserError: it failed, and the endpoint is scaled as before.
    """
    change = _Change(clients, base.endpoint_name, report)
    change.run(scaling_request(base, template), "stack_update_complete")


def _rescale(
    clients: Clients, base: Deployment, present: Template, report: Report, done: int
) -> None:
    """Scale again as before, where an update ended scaling first and then failed."""
    if done:
        try:
            rescale(clients, base, present, report)
        except UserError as error:
            scaled = base.autoscaling
            assert scaled is not None
            raise Unfinished(
                f"The update failed, and the endpoint is no longer scaled automatically: {error}",
                [
                    Stayed(
                        "an endpoint with a fixed number of instances",
                        f"peagle deploy sagemaker scale {base.endpoint_name} --min "
                        f"{scaled.min_instances} --max {scaled.max_instances} --target "
                        f"{scaled.target_value:g} --region {clients.region}",
                    )
                ],
            ) from None


def delete(
    clients: Clients, endpoint: str, files: Sequence[str], report: Report = to_stderr
) -> None:
    """Delete an endpoint's stack, and then the files that were put into S3 for it.

    Raises:
        Unfinished: something could not be deleted; it is listed.
        UserError: AWS refused.
    """
    change = _Change(clients, endpoint, report)
    try:
        change.delete()
    except StackFailed as error:
        raise Unfinished(str(error), change.stayed()) from None
    _remove_files(clients, files, "The endpoint is deleted, but not all files in S3.", report)


def _remove_files(clients: Clients, files: Sequence[str], cause: str, report: Report) -> None:
    """Delete uploaded files; if that fails, raise `Unfinished` with the cause of the deletion."""
    if stayed := uploads.remove(files, clients, report):
        listed = [_file_stayed(uri, clients, reason) for uri, reason in stayed.items()]
        raise Unfinished(cause, listed) from None


def _file_stayed(uri: str, clients: Clients, reason: str = "") -> Stayed:
    command = shlex.join(["aws", "s3", "rm", uri, "--recursive", "--region", clients.region])
    return Stayed(f"files under {uri}", command, reason)


class _Change:
    """One change of a stack, from its request to its end.

    Attributes:
        is_running: whether CloudFormation may still be at work.
    """

    def __init__(self, clients: Clients, endpoint: str, report: Report) -> None:
        self._clients, self._endpoint, self._report = clients, endpoint, report
        self._name = stack_name_of(endpoint)
        self._stack = self._name  # its id, once it is known: a deleted stack is found by that alone
        self._change_set = ""
        self._seen: set[str] = set()
        self._failures: list[str] = []
        self.is_running = False

    def run(self, request: dict[str, Any], waiter: str, *, wait: bool = True) -> None:
        """Make a change set, execute it, and wait.

        Raises:
            StackFailed: CloudFormation failed, and has gone back as far as it can.
            UserError: AWS refused; or `is_running`, and it cannot be told how it goes.
        """
        from botocore.exceptions import BotoCoreError, ClientError

        body = json.dumps(request["TemplateBody"])
        try:
            made = self._clients.request(
                "cloudformation", "CreateChangeSet", **{**request, "TemplateBody": body}
            )
            self._stack, self._change_set = made["StackId"], made["Id"]
            self._wait_for_change_set()
            self._skip_events()
            self._execute()
        except (BotoCoreError, ClientError) as error:
            raise explain(error) from None
        self.is_running = True
        self._report(f"CloudFormation works on the stack {self._name}")
        if wait:
            self._wait(waiter)

    def _wait_for_change_set(self) -> None:
        from botocore.exceptions import WaiterError

        waiter = self._clients.client("cloudformation").get_waiter("change_set_create_complete")
        while True:
            try:
                waiter.wait(ChangeSetName=self._change_set, WaiterConfig={"MaxAttempts": 1})
                return
            except WaiterError as error:
                found = error.last_response
                if found.get("Status") in ("CREATE_PENDING", "CREATE_IN_PROGRESS"):
                    self._clients.clock.sleep(POLL_S / 5)
                    continue
            reason = clean(found.get("StatusReason", "") or "no reason was given")
            self._clients.request(
                "cloudformation", "DeleteChangeSet", ChangeSetName=self._change_set
            )
            if any(text in reason for text in _NO_CHANGES):
                raise UserError(
                    f"Nothing is to change about {self._endpoint!r}; name an option (`peagle "
                    "deploy sagemaker update --help`)."
                )
            raise UserError(f"CloudFormation refused the template: {reason}")

    def _execute(self) -> None:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            self._clients.request(
                "cloudformation", "ExecuteChangeSet", ChangeSetName=self._change_set
            )
        except (BotoCoreError, ClientError):
            # An answer may be lost of what AWS does: its status tells.
            stack = self._clients.request(
                "cloudformation", "DescribeChangeSet", ChangeSetName=self._change_set
            )
            if not stack.get("ExecutionStatus", "").startswith("EXECUTE"):
                raise

    def _wait(self, waiter: str) -> None:
        """Wait for an end, and report CloudFormation's events until then."""
        from botocore.exceptions import BotoCoreError, ClientError, WaiterError

        wait = self._clients.client("cloudformation").get_waiter(waiter).wait
        while True:
            try:
                try:
                    wait(StackName=self._stack, WaiterConfig={"MaxAttempts": 1})
                    self._tell_events()
                    self.is_running = False
                    return
                except WaiterError as error:
                    self._tell_events()
                    found = error.last_response
                    status = (found.get("Stacks") or [{}])[0].get("StackStatus", "")
                    if "Error" in found:
                        raise ClientError(found, "DescribeStacks") from None
                if not status.endswith("_IN_PROGRESS"):
                    self.is_running = False
                    raise self._failed(status)
            except (BotoCoreError, ClientError) as error:
                raise UserError(
                    f"{explain(error)}\nCloudFormation goes on by itself. See how far it is: "
                    f"peagle deploy sagemaker status {self._endpoint}"
                ) from None
            self._clients.clock.sleep(POLL_S)

    def _failed(self, status: str) -> StackFailed:
        why = "; ".join(self._failures) or "CloudFormation gave no reason"
        remedy = _remedy(status, self._endpoint, self._clients.region)
        return StackFailed(
            f"The endpoint {self._endpoint!r} failed: {why.rstrip('.')}. The stack is {status}"
            f"{': ' + remedy if remedy else '.'}{_last_lines(self._clients, self._endpoint)}",
            status,
        )

    # ---- events -------------------------------------------------------------------------

    def _skip_events(self) -> None:
        self._seen |= {event["EventId"] for event in stack_events(self._clients, self._stack)}

    def _tell_events(self) -> None:
        for event in stack_events(self._clients, self._stack):
            if event["EventId"] in self._seen:
                continue
            self._seen.add(event["EventId"])
            line = event_line(event)
            self._report(line)
            is_cause = "cancelled" not in line and event["LogicalResourceId"] != self._name
            if event["ResourceStatus"].endswith("_FAILED") and is_cause:
                self._failures.append(line)

    # ---- going back ---------------------------------------------------------------------

    def delete(self) -> None:
        """Delete the stack, and wait until it is gone.

        Raises:
            StackFailed: something of it could not be deleted.
        """
        found = self._clients.ask("cloudformation", "DescribeStacks", StackName=self._stack)
        if not found:
            return
        self._stack = found["Stacks"][0]["StackId"]
        self._skip_events()
        self._clients.ask("cloudformation", "DeleteStack", StackName=self._stack)
        self._wait("stack_delete_complete")

    def delete_empty(self) -> None:
        """Delete a stack of which nothing was made yet; nobody else's."""
        stack = find_stack(self._clients, self._endpoint)
        if self._change_set and stack and stack["StackStatus"] == _REVIEW:
            self.delete()

    def cancel(self) -> None:
        """Let CloudFormation go back from an update, and wait until it has.

        Raises:
            StackFailed: it could not.
        """
        if not self.is_running:
            return
        if self._clients.ask("cloudformation", "CancelUpdateStack", StackName=self._stack):
            self._wait("stack_rollback_complete")

    def stayed(self) -> list[Stayed]:
        """The resources that CloudFormation could not delete, or else the stack itself."""
        region = self._clients.region
        again = f"peagle deploy sagemaker delete {self._endpoint} --yes --region {region}"
        stayed = [
            Stayed(name, again, reason)
            for name, status, reason in _resources(self._clients, self._stack)
            if status.endswith("_FAILED")
        ]
        return stayed or [Stayed(f"stack {self._name}", again)]


def stack_events(clients: Clients, stack: str) -> list[dict[str, Any]]:
    """Return the events of a stack, oldest first; [] where there is none.

    Raises:
        UserError: AWS refused.
    """
    found = clients.ask("cloudformation", "DescribeStackEvents", StackName=stack)
    return list(reversed(found.get("StackEvents", ())))


def event_line(event: dict[str, Any]) -> str:
    """An event in one line."""
    reason = clean(event.get("ResourceStatusReason", ""))
    name = event.get("LogicalResourceId", "")
    return f"{name}: {event['ResourceStatus']}{f' ({reason})' if reason else ''}"


def _last_lines(clients: Clients, endpoint: str) -> str:
    """The last lines of the containers' log, to go behind a message; "" where there is none."""
    since_ms = int((time.time() - _LOG_S) * 1000)
    try:
        lines = deque(logs.read(clients, endpoint, since_ms), _LOG_LINES)
    except UserError:
        return ""
    return "".join(f"\n  | {clean(line.text)}" for line in lines)


def resources_of(clients: Clients, endpoint: str) -> list[str]:
    """Return the resources of an endpoint's stack in words.

    Raises:
        UserError: AWS refused.
    """
    return [name for name, _, _ in _resources(clients, stack_name_of(endpoint))]


def _resources(clients: Clients, stack: str) -> list[tuple[str, str, str]]:
    """Name, status and reason of each resource of a stack."""
    found = clients.ask("cloudformation", "DescribeStackResources", StackName=stack)
    return [
        (
            f"{one['ResourceType']} {one.get('PhysicalResourceId', '')}".rstrip(),
            one["ResourceStatus"],
            clean(one.get("ResourceStatusReason", "")),
        )
        for one in found.get("StackResources", ())
    ]


def uploads_of(clients: Clients, endpoint: str) -> tuple[str, ...]:
    """Return the prefixes that peagle filled for an endpoint.

    Raises:
        UserError: AWS refused.
    """
    return tuple(metadata_of(template_of(clients, endpoint)).get("uploads", ()))


# ---- what would be called -------------------------------------------------------------------


def planned_calls(d: Deployment, requests: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the calls that put files into S3 and run change sets, as JSON, with secrets hidden."""
    calls = [_transfer_call(transfer) for transfer in d.transfers]
    for request in requests:
        hidden = [
            {**p, "ParameterValue": "********"} if "ParameterValue" in p else p
            for p in request["Parameters"]
        ]
        change = {key: request[key] for key in ("StackName", "ChangeSetName")}
        stack = {"StackName": request["StackName"]}
        calls += [
            planned_call("cloudformation", "CreateChangeSet", {**request, "Parameters": hidden}),
            planned_call("cloudformation", "DescribeChangeSet", change)
            | {"until": "CREATE_COMPLETE"},
            planned_call("cloudformation", "ExecuteChangeSet", change),
            planned_call("cloudformation", "DescribeStacks", stack)
            | {"until": f"{request['ChangeSetType']}_COMPLETE"},
        ]
    return calls


def planned_call(service: str, operation: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """A call as JSON."""
    return {"service": service, "operation": operation, "parameters": parameters}


def _transfer_call(transfer: Transfer) -> dict[str, Any]:
    if transfer.source.kind != "local":
        call = planned_call("s3", "CopyObject", uploads.put_parameters(transfer, ""))
        return {**call, "from": transfer.source.name}
    folder = Path(transfer.source.name)
    files = folder_files(folder)
    names = [file.relative_to(folder).as_posix() for file in files]
    prefix = uploads.split_uri(transfer.uri)[1]
    return {
        **planned_call("s3", "PutObject", uploads.put_parameters(transfer, names[0])),
        "folder": str(folder),
        "keys": [prefix + name for name in names],
        "bytes": sum(file.stat().st_size for file in files),
    }
