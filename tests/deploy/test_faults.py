"""Faults at every call of AWS that create, update, scale and delete make; see fault_matrix."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from moto.core.utils import method_names_from_class

from deploy.fake_aws import ACCESS_KEY, SECRET_KEY, FakeAws
from deploy.fault_matrix import (
    ASKED,
    KINDS,
    NAME,
    PASSING,
    SCENARIOS,
    Case,
    Matrix,
    NoSleep,
    deployment,
    model_folder,
    reads,
)
from peagle.deploy.apply import Unfinished, apply
from peagle.deploy.aws import Clock
from peagle.deploy.plan import create_calls
from peagle.errors import UserError

SRC = Path(__file__).parents[2] / "src"


@pytest.fixture(scope="module")
def matrix(tmp_path_factory) -> Matrix:
    return Matrix(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr("botocore.endpoint.time", NoSleep)


@pytest.fixture(autouse=True)
def _known_once(monkeypatch):
    """What botocore and moto find out for every request, and is the same for all."""
    monkeypatch.setattr("botocore.useragent.UserAgentString.to_string", lambda agent: "test")
    names = "moto.core.responses.method_names_from_class"
    monkeypatch.setattr(names, cache(method_names_from_class))


# The rest of the scenarios and kinds: python tests/deploy/fault_matrix.py
@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["create", "update", "scale", "rescale", "delete"])
def test_nothing_unlisted_remains(matrix, scenario, capsys):
    ends: Counter[str] = Counter()
    tried = set()
    for case in matrix.cases(ASKED):
        if case.scenario == scenario:
            outcome = matrix.run(case)
            assert SECRET_KEY not in outcome.output and ACCESS_KEY not in outcome.output
            ends[outcome.end] += 1
            tried.add(case.number)
    calls = len(matrix.clean[scenario])
    assert tried == set(range(1, calls + 1)) and ends.total() >= 4 * calls
    with capsys.disabled():
        print(f"\n{scenario}: {ends.total()} faults at {calls} calls, {dict(ends)}")


@pytest.mark.parametrize("kind", PASSING)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_what_passes_is_survived(matrix, scenario, kind):
    """One lost attempt of a call changes nothing: the first call that changes something."""
    operations = matrix.clean[scenario]
    number, operation = next(
        (number, name) for number, name in enumerate(operations, 1) if not reads(name)
    )
    assert matrix.run(Case(scenario, number, operation, kind, "once")).end == "done"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("scenario", "operation", "listed"),
    [
        ("create", "CreateModel", False),
        ("create", "CreateEndpoint", False),
        ("update", "UpdateEndpoint", False),
        ("delete", "DeleteEndpoint", True),
    ],
)
def test_what_never_passes(matrix, scenario, operation, listed, kind):
    """A call that fails for good: what was made before it is taken back.

    Where only answers are lost, describe calls tell that it was done.
    """
    number = matrix.clean[scenario].index(operation) + 1
    outcome = matrix.run(Case(scenario, number, operation, kind, "operation"))
    is_done = kind == "time-out after"
    assert outcome.end == ("done" if is_done else "listed" if listed else "undone")


def test_unfinished_is_listed_exactly(matrix):
    """No permission to delete: everything stays, in the order in which it can be deleted."""
    matrix.run(Case("create", 1, "", "validation", "operation"))  # an empty start
    aws = matrix.aws
    aws.reset()
    aws.make_bucket()
    for operation in ("DeleteEndpoint", "DeleteModel", "DeleteEndpointConfig", "DeleteObjects"):
        aws.fail("access denied", operation, calls=1000)
    aws.fail("access denied", "RegisterScalableTarget")
    said: list[str] = []
    with pytest.raises(Unfinished) as caught:
        steps = create_calls(deployment(matrix.folder, "a1"))
        apply(steps, aws.clients(direct=True), report=said.append)
    assert [item.what for item in caught.value.stayed] == [
        f"endpoint '{NAME}'",
        f"endpoint configuration '{NAME}-a1'",
        f"model '{NAME}-a1'",
        f"uploads under s3://sagemaker-us-east-1-123456789012/peagle/{NAME}/a1/target/",
    ]
    first, second, *_ = caught.value.stayed
    assert first.command == (
        f"aws sagemaker delete-endpoint --endpoint-name {NAME} --region us-east-1"
    )
    assert "sagemaker:DeleteEndpoint" in first.reason
    assert second.reason == f"endpoint '{NAME}' stays, and needs it"
    assert first.command in str(caught.value)
    told = caught.value.to_json()
    assert "RegisterScalableTarget was denied" in told["error"]
    assert told["stayed"][0] == {
        "what": first.what,
        "command": first.command,
        "reason": first.reason,
    }


def test_endpoint_of_others_is_left_alone(matrix):
    """A name that is taken after it was looked up: what is there is not ours to undo."""
    aws = matrix.aws
    aws.reset()
    aws.make_bucket()
    clients = aws.clients(direct=True, retries={"mode": "standard", "total_max_attempts": 2})
    apply(create_calls(deployment(matrix.folder, "a1")), clients, report=lambda line: None)
    held = aws.holdings()
    # Even where the answers of the first attempts are lost.
    for kind in (None, "time-out before"):
        if kind:
            aws.fail(kind, "CreateEndpoint", attempts=1)
        with pytest.raises(UserError, match="already existing endpoint"):
            steps = create_calls(deployment(matrix.folder, "z9"))
            apply(steps, clients, report=lambda line: None)
        assert aws.holdings() == held


# ---- a real process and real signals ----------------------------------------------------------

PROGRAM = """
import pickle, sys
from peagle.deploy import endpoints, undo
from peagle.deploy.apply import apply
from peagle.deploy.aws import Clients
endpoints.POLL_S = undo.POLL_S = 0.5
apply(pickle.load(open(sys.argv[1], "rb")), Clients())
"""


@pytest.mark.slow
def test_signal_while_waiting(tmp_path):
    """Everything is taken back, by the clock on the wall; the matrix has Ctrl-C."""
    folder = model_folder(tmp_path)
    plan = tmp_path / "plan"
    plan.write_bytes(pickle.dumps(create_calls(deployment(folder, "p1"))))
    with FakeAws(clock=Clock(), create_s=3, delete_s=1) as aws:
        aws.make_bucket()
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, plan],
            env={**os.environ, **aws.environment(), "PYTHONPATH": str(SRC)},
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if "Creating" in line:
                process.send_signal(signal.SIGTERM)
                break
        rest = process.communicate(timeout=60)[1]
        assert aws.holdings() == set(), "".join(lines) + rest
    assert process.returncode != 0
    assert "peagle: Interrupted. Taking back what was made." in rest
    assert "nothing stayed" in rest
    assert SECRET_KEY not in "".join(lines) + rest
