"""Faults at every call of AWS that creating, updating, scaling and deleting an endpoint make.

    python tests/deploy/fault_matrix.py

makes them all, and prints how many were survived. After each, what the stand-in for AWS holds must
be what it held before, or what was to be made, or what the error lists, and no more; and the
commands that the error gives must delete exactly that.
"""

from __future__ import annotations

import io
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest.mock import patch

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2] / "src"), str(Path(__file__).parents[1])]

from deploy.commands import run_command
from deploy.fake_aws import BUCKET, REGION, ROLE, SECRET_KEY, FakeAws
from deploy.fake_faults import ALWAYS, Fault
from peagle.deploy import endpoints
from peagle.deploy.apply import Unfinished, apply
from peagle.deploy.aws import Clients
from peagle.deploy.calls import Call
from peagle.deploy.deployment import VARIANT, Autoscaling, Deployment
from peagle.deploy.models import ModelSource
from peagle.deploy.plan import create_calls, update_calls
from peagle.deploy.scaling import scaling_calls
from peagle.errors import UserError

NAME = "chat"
SCALED = Autoscaling(1, 3, 4.0)
# Attempts of boto3: fewer than peagle's, which changes how long a fault lasts, not what it does.
RETRIES = {"mode": "standard", "total_max_attempts": 2}

PASSING = ("throttling", "time-out before", "time-out after")
KINDS = (*PASSING, "access denied", "validation")
INTERRUPTS = ("interrupt", "interrupt twice before", "interrupt twice after")


def deployment(folder: Path, stamp: str, **changes: Any) -> Deployment:
    """Of a model in a folder here, with a head, scaled."""
    given: dict[str, Any] = {
        "endpoint_name": NAME,
        "region": REGION,
        "stamp": stamp,
        "source": "managed",
        "image": "763104351884.dkr.ecr.us-east-1.amazonaws.com/vllm:server-sagemaker-cuda-v2.3",
        "target": ModelSource("local", str(folder)),
        "role": ROLE,
        "instance_type": "ml.g6e.2xlarge",
        "draft": ModelSource("hub", "owner/head"),
        "speculative_config": {"method": "eagle3", "num_speculative_tokens": 5},
        "bucket": f"s3://{BUCKET}/",
        "autoscaling": SCALED,
    }
    return Deployment(**{**given, **changes})


def model_folder(folder: Path) -> Path:
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(100))
    return folder


# ---- what is done -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Scenario:
    """A command, and what comes before it.

    Attributes:
        prepare: makes what must be there.
        act: the command, with its clients.
        once_more: the state after it may also be this: what a second try would find.
    """

    prepare: Callable[[Clients, Path], None]
    act: Callable[[Clients, Path], None]


def quiet(line: str) -> None:
    """Progress that nobody reads."""


def create(clients: Clients, folder: Path) -> None:
    endpoints.require_new(clients, NAME)
    apply(create_calls(deployment(folder, "a1")), clients, report=quiet)


def update(clients: Clients, folder: Path) -> None:
    found = endpoints.describe(clients, NAME)
    endpoints.require_updatable(found)
    wanted = deployment(folder, "b2", instance_type="ml.g6e.4xlarge")
    apply(update_calls(wanted, found), clients, report=quiet)


def update_scaling(clients: Clients, folder: Path) -> None:
    """The same instances, a model of the hub, other bounds; what was uploaded goes."""
    found = endpoints.describe(clients, NAME)
    target, scaling = ModelSource("hub", "owner/model"), Autoscaling(2, 5, 8.0)
    wanted = deployment(folder, "b2", target=target, autoscaling=scaling)
    apply(update_calls(wanted, found), clients, report=quiet)


def scale(clients: Clients, folder: Path) -> None:
    found = endpoints.describe(clients, NAME)
    wanted = Autoscaling(2, 5, 8.0)
    steps = scaling_calls(NAME, VARIANT, wanted, found.autoscaling, found.scaling_policies)
    apply(steps, clients, report=quiet)


def scale_first(clients: Clients, folder: Path) -> None:
    apply(scaling_calls(NAME, VARIANT, SCALED), clients, report=quiet)


def create_unscaled(clients: Clients, folder: Path) -> None:
    apply(create_calls(deployment(folder, "a1", autoscaling=None)), clients, report=quiet)


def delete(clients: Clients, folder: Path) -> None:
    from peagle.cli.deploy_delete import delete as command

    with patch("peagle.deploy.aws.Clients", lambda region: clients):
        command(NAME, REGION, False, True)


def create_with_rest(clients: Clients, folder: Path) -> None:
    """An endpoint, and a model of an earlier try that stayed."""
    create(clients, folder)
    steps = create_calls(deployment(folder, "a0", target=ModelSource("hub", "owner/model")))
    (model,) = [s for s in steps if isinstance(s, Call) and s.operation == "CreateModel"]
    clients.call(model)


def nothing(clients: Clients, folder: Path) -> None:
    pass


SCENARIOS = {
    "create": Scenario(nothing, create),
    "update": Scenario(create, update),
    "update to the hub": Scenario(create, update_scaling),
    "scale": Scenario(create_unscaled, scale_first),
    "rescale": Scenario(create, scale),
    "delete": Scenario(create_with_rest, delete),
}


# ---- faults -----------------------------------------------------------------------------------


class Case(NamedTuple):
    """What goes wrong: at the n-th call of a scenario.

    `lasts`: "once" (an attempt), "call" (all attempts of it), "operation" (from then on, for all
    such calls) or "all" (every call from then on).
    """

    scenario: str
    number: int
    operation: str
    kind: str
    lasts: str


def reads(operation: str) -> bool:
    """Whether a call changes nothing."""
    return operation.startswith(("Describe", "List", "Head"))


class Outcome(NamedTuple):
    """How a case ended: "done", "undone" or "listed"; output: all that was written."""

    end: str
    stayed: int
    output: str


class Matrix:
    """Runs scenarios against one stand-in."""

    def __init__(self, folder: Path) -> None:
        self.folder = model_folder(folder)
        self.aws = FakeAws(create_s=5, update_s=5, rollback_s=5, delete_s=5)
        self.clean: dict[str, list[str]] = {}
        self.states: dict[str, tuple[set[str], set[str]]] = {}
        self._restore: dict[str, Callable[[], None]] = {}
        self._used = 0
        for name, scenario in SCENARIOS.items():
            self.aws.reset()
            self.aws.make_bucket()
            scenario.prepare(self._clients(), self.folder)
            self._restore[name] = self.aws.snapshot()
            before = self._prepare(name)
            with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
                scenario.act(self._clients(), self.folder)
            ids = dict.fromkeys((request.id, request.operation) for request in self.aws.calls)
            self.clean[name] = [operation for _, operation in ids]
            self.states[name] = before, self.aws.holdings(detailed=True)
            assert not self.aws.violations, self.aws.violations

    def _clients(self) -> Clients:
        """Clients, new ones now and then: boto3 gives up trying again after many failures."""
        if self._used % 20 == 0:
            self._made = self.aws.clients(direct=True, retries=RETRIES)
        self._used += 1
        return self._made

    def _prepare(self, name: str) -> set[str]:
        self._restore[name]()
        return self.aws.holdings(detailed=True)

    def cases(self, kinds: Iterable[tuple[str, str]]) -> Iterable[Case]:
        """Every call of every scenario with each (kind, lasts).

        A call that only reads has no effect, after which its answer could be lost; and what is
        interrupted there is interrupted before or after the next call that has one.
        """
        for name, operations in self.clean.items():
            for number, operation in enumerate(operations, 1):
                for kind, lasts in kinds:
                    if not (reads(operation) and kind in ("time-out after", "interrupt")):
                        yield Case(name, number, operation, kind, lasts)

    def run(self, case: Case) -> Outcome:
        """One case; AssertionError if anything stays that is not listed, or the other way round."""
        before = self._prepare(case.scenario)
        wanted = self.states[case.scenario][1]
        nth = self.clean[case.scenario][: case.number].count(case.operation)
        self.aws.faults.append(_fault(case, nth))
        output = io.StringIO()
        end, error = "done", None
        with redirect_stdout(output), redirect_stderr(output):
            try:
                SCENARIOS[case.scenario].act(self._clients(), self.folder)
            except (UserError, KeyboardInterrupt) as raised:
                end, error = "undone", raised
        self.aws.faults.clear()
        output.write(str(error))
        assert not self.aws.violations, (case, self.aws.violations)
        if isinstance(error, Unfinished):
            return self._check_listed(case, error, before, wanted, output.getvalue())
        held = self.aws.holdings(detailed=True)
        if end == "undone":
            assert held == before, (case, error, held ^ before)
        else:
            assert held == wanted, (case, held ^ wanted)
        return Outcome(end, 0, output.getvalue())

    def _check_listed(
        self, case: Case, error: Unfinished, before: set[str], wanted: set[str], output: str
    ) -> Outcome:
        """What is too much is listed, and the commands delete that and nothing else."""
        assert error.stayed
        for item in error.stayed:
            if item.command.startswith("peagle "):
                words = ["deploy", "sagemaker", "delete", NAME, "--yes", "--region", REGION]
                assert item.command.split() == ["peagle", *words]
                with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
                    delete(self._clients(), self.folder)
            else:
                run_command(self.aws, item.command)
        self.aws.clock.sleep(1000)
        held = self.aws.holdings(detailed=True)
        assert held in (before, wanted), (case, error, held ^ before, held ^ wanted)
        assert not self.aws.violations, (case, self.aws.violations)
        return Outcome("listed", len(error.stayed), output)


def _fault(case: Case, nth: int) -> Fault:
    if case.lasts == "operation":
        return Fault(case.kind, case.operation, number=nth, calls=ALWAYS)
    calls = ALWAYS if case.lasts == "all" else 1
    attempts = 1 if case.lasts == "once" else ALWAYS
    return Fault(case.kind, number=case.number, calls=calls, attempts=attempts)


# What the tests make, and what is made beyond that.
ASKED = [*((kind, "call") for kind in KINDS), ("interrupt", "once")]
FURTHER = [
    *((kind, "once") for kind in PASSING),
    *((kind, "operation") for kind in KINDS),
    *((kind, "all") for kind in ("time-out before", "access denied")),
    *((kind, "once") for kind in INTERRUPTS[1:]),
]


class NoSleep:
    """Of boto3 between attempts."""

    @staticmethod
    def sleep(seconds: float) -> None:
        pass


def main() -> None:
    """Make every case and print the sums."""
    start = time.perf_counter()
    ends: Counter[tuple[str, str]] = Counter()
    with TemporaryDirectory() as folder, ExitStack() as stack:
        stack.enter_context(patch("botocore.endpoint.time", NoSleep))
        matrix = Matrix(Path(folder))
        for case in matrix.cases([*ASKED, *FURTHER]):
            outcome = matrix.run(case)
            assert SECRET_KEY not in outcome.output
            ends[case.scenario, outcome.end] += 1
        calls = {name: len(operations) for name, operations in matrix.clean.items()}
    for name, count in calls.items():
        sums = {end: ends[name, end] for end in ("done", "undone", "listed")}
        print(f"{name}: {count} calls, {sum(sums.values())} faults: {sums}")
    total = sum(ends.values())
    print(
        f"{total} faults at {sum(calls.values())} calls, nothing unlisted remained "
        f"({time.perf_counter() - start:.0f} s)"
    )


if __name__ == "__main__":
    main()
