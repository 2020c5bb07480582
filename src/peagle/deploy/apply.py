"""Make what a plan says, all of it or nothing; what cannot be taken back is listed exactly."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from peagle.deploy import uploads
from peagle.deploy.aws import Clients
from peagle.deploy.aws_errors import explain, may_have_happened
from peagle.deploy.calls import Call
from peagle.deploy.endpoints import wait_in_service
from peagle.deploy.interrupts import Interrupts
from peagle.deploy.plan import Step, Upload, Wait
from peagle.deploy.undo import Stayed, Undo, owns, take_away
from peagle.deploy.uploads import Removal
from peagle.errors import UserError

Report = Callable[[str], None]
# Modules whose errors are AWS's or the network's.
_OF_BOTO3 = ("botocore.", "boto3.", "s3transfer.")


class Unfinished(UserError):
    """Something is there that should not be.

    Attributes:
        cause: what went wrong first.
        stayed: what is still there, with the commands that delete it, in the order to run them.
    """

    def __init__(self, cause: str, stayed: Sequence[Stayed]) -> None:
        lines = "\n".join(map(str, stayed))
        super().__init__(
            f"{cause}\nThis stayed, and may cost money; what ends it, in this order:\n{lines}"
        )
        self.cause = cause
        self.stayed = tuple(stayed)

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        return {"error": self.cause, "stayed": [item.to_json() for item in self.stayed]}


@dataclass(frozen=True, slots=True)
class Applied:
    """What was done.

    Attributes:
        created: in words, in order.
        deleted: in words, in order.
    """

    created: tuple[str, ...] = ()
    deleted: tuple[str, ...] = ()


def to_stderr(line: str) -> None:
    """Progress where no results go."""
    print(f"peagle: {line}", file=sys.stderr, flush=True)


def apply(
    steps: Sequence[Step],
    clients: Clients,
    *,
    wait: bool = True,
    report: Report = to_stderr,
) -> Applied:
    """Do the steps of a plan, in order.

    Where one fails, or somebody interrupts, all before it are undone in reverse. The last steps of
    a plan that have no undo (an update's old model, all of a deletion) are clean-up: each is tried,
    and the failure of one takes nothing back.

    Args:
        steps: of `plan`, and removals of uploads.
        clients: of AWS.
        wait: false ends where it would be waited for the endpoint; the steps after that are not
            done.
        report: gets lines of progress.

    Raises:
        Unfinished: something stayed that should not; it is listed.
        UserError: a step failed, and everything before it was undone.
        KeyboardInterrupt: somebody interrupted, and everything was undone.
    """
    steps = list(steps)
    waits = [number for number, step in enumerate(steps) if isinstance(step, Wait)]
    if waits and not wait:
        left = len(steps) - waits[0] - 1
        report(f"not waiting for the endpoint: {left} later steps of the plan are not done")
        steps = steps[: waits[0]]
    first = len(steps)
    while first and _is_cleanup(steps[first - 1]):
        first -= 1
    cleanup = [step for step in steps[first:] if not isinstance(step, Wait)]
    with Interrupts() as interrupts:
        run = _Run(clients, report, interrupts)
        for step in steps[:first]:
            run.do(step)
        deleted, stayed = run.clean_up(cleanup)
    if stayed:
        done = "All was made as planned, but not" if first else "Not"
        raise Unfinished(f"{done} everything that had to go could be deleted.", stayed)
    return Applied(tuple(run.created), tuple(deleted))


def _is_cleanup(step: Step) -> bool:
    if isinstance(step, Removal):
        return True
    return isinstance(step, Call) and step.undo is None and not step.creates


@dataclass(slots=True)
class _Run:
    """The steps so far.

    Attributes:
        clients, report, interrupts: as `apply` has them.
        begun: what undoes them, oldest first: written down before a step begins.
        created: what they made, in words.
        config: the endpoint configuration that the endpoint is to come into service with.
    """

    clients: Clients
    report: Report
    interrupts: Interrupts
    begun: list[Call | Upload] = field(default_factory=list)
    created: list[str] = field(default_factory=list)
    config: str = ""

    def do(self, step: Step) -> None:
        """One step; if it fails, everything is undone."""
        before = list(self.begun)
        try:
            self._do(step)
        except KeyboardInterrupt as error:
            self._undo("Interrupted.", error)
        except Exception as error:
            if isinstance(step, Call) and not may_have_happened(error):
                self.begun = before
            known = isinstance(error, UserError) or type(error).__module__.startswith(_OF_BOTO3)
            cause = explain(error) if known else error
            self._undo(str(cause), cause)

    def _do(self, step: Step) -> None:
        if isinstance(step, Wait):
            wait_in_service(
                self.clients, step.endpoint_name, step.timeout_s, self.report, config=self.config
            )
        elif isinstance(step, Upload):
            uploads.require_empty(step, self.clients)
            self.begun.append(step)
            uploads.upload(step, self.clients, self.report)
            self.created.append(f"uploads under {step.uri}")
        elif isinstance(step, Call):
            self.begun.append(step)
            with self.interrupts.held():
                _perform(step, self.clients)
            self.config = step.parameters.get("EndpointConfigName", self.config)
            if step.creates:
                self.created.append(step.creates)
                self.report(f"created {step.creates}")

    def _undo(self, cause: str, error: BaseException) -> NoReturn:
        """Take back what was begun, newest first."""
        steps: list[Undo] = []
        made_by: dict[int, Call] = {}
        for step in reversed(self.begun):
            undo = step if isinstance(step, Upload) else step.undo
            if undo is not None:
                steps.append(undo)
            if isinstance(step, Call):
                made_by[id(undo)] = step
        if steps:
            self.report(f"{cause.splitlines()[0]} Taking back what was made.")
        _, stayed = self.clean_up(
            steps, lambda undo: id(undo) not in made_by or owns(made_by[id(undo)], self.clients)
        )
        if stayed:
            raise Unfinished(cause, stayed) from None
        back = "Everything that had been made was taken back: nothing stayed." if steps else ""
        if isinstance(error, UserError):
            raise UserError(f"{error}\n{back}".rstrip()) from None
        if steps:
            self.report(back)
        raise error

    def clean_up(
        self, steps: Sequence[Undo], is_ours: Callable[[Undo], bool] = lambda undo: True
    ) -> tuple[list[str], list[Stayed]]:
        """Take things away; a first interruption only warns, a second one leaves the rest."""
        with self.interrupts.ignored_once(
            lambda: self.report("deleting; interrupt again to leave what is still there")
        ):
            return take_away(steps, self.clients, self.report, is_ours)


def _perform(call: Call, clients: Clients) -> None:
    """A call; one that AWS did, though its answer was lost, has succeeded.

    Raises:
        botocore's errors: it failed, or nobody can tell.
    """
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        clients.call(call)
    except (BotoCoreError, ClientError) as error:
        if not may_have_happened(error) or not _has_happened(call, clients):
            raise


def _has_happened(call: Call, clients: Clients) -> bool:
    """Whether what a call was to do is done; false if nobody can tell."""
    from botocore.exceptions import BotoCoreError, ClientError

    operation, parameters = call.operation, call.parameters
    try:
        if operation in ("CreateModel", "CreateEndpointConfig"):
            name = operation.removeprefix("Create") + "Name"
            describe = operation.replace("Create", "Describe")
            clients.request("sagemaker", describe, **{name: parameters[name]})
            return True
        if operation == "UpdateEndpoint":
            as_created = Call(call.service, "CreateEndpoint", parameters)
            return owns(as_created, clients)
        return operation == "CreateEndpoint" and owns(call, clients)
    except (BotoCoreError, ClientError):
        return False
