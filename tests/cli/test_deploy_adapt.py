"""`peagle deploy sagemaker adapt`: from what an endpoint captured to its next head."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from deploy.fake_aws import ACCESS_KEY, BUCKET, ROLE, SECRET_KEY, FakeAws
from peagle import LLM, SamplingParams
from peagle.bundled import BUNDLED_PEAGLE, BUNDLED_TARGET
from peagle.deploy.aws import Clock
from peagle.errors import UserError
from peagle.models.checkpoint import CORRECTION_NAME
from peagle.training.trainer import Trainer
from tests.cli.conftest import Pair, Peagle, Result
from tests.cli.test_adapt import accessors

SAGEMAKER = ("deploy", "sagemaker")
NATIVE = ("--source", "native", "--image", "123456789012.dkr.ecr.us-east-1.amazonaws.com/a:b")
CAPTURED = "peagle/chat/capture/chat/AllTraffic/2026/01/02/03/x.jsonl"
Run = Callable[..., Result]


@pytest.fixture(scope="module")
def server() -> Iterator[FakeAws]:
    with FakeAws(change_s=0) as fake:
        yield fake


@pytest.fixture
def aws(server: FakeAws, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeAws]:
    server.reset()
    server.make_bucket()
    for name in ("now", "sleep"):
        monkeypatch.setattr(Clock, name, staticmethod(getattr(server.clock, name)))
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("peagle.deploy.aws._session", lambda: server.session)
    yield server
    assert not server.violations


@pytest.fixture
def run(aws: FakeAws, peagle: Peagle, tmp_path: Path) -> Run:
    """run("adapt", ...): of the endpoint "chat"; nothing that is printed holds a credential."""

    def call(command: str, *arguments: object) -> Result:
        own = ["--work", tmp_path / "work"] if command == "adapt" else []
        result = peagle(*SAGEMAKER, command, "chat", *own, *arguments)
        assert ACCESS_KEY not in result.out + result.err
        assert SECRET_KEY not in result.out + result.err
        return result

    return call


def create(peagle: Peagle, target: Path, *options: object) -> None:
    place = ("--instance-type", "ml.g6.xlarge", "--name", "chat", "--role", ROLE)
    made = peagle(*SAGEMAKER, "create", target, *place, *options)
    assert made.status == 0, made.err


def capture(aws: FakeAws, count: int) -> None:
    """Captured completions: the first lines of a long file."""
    answers = [{"prompt": f"q{n:03}:", "text": f" a{n * 37 % 1000:03}{n:03}"} for n in range(count)]
    lines = []
    for one in answers:
        sides = {
            "Input": {"prompt": one["prompt"]},
            "Output": {"choices": [{"text": one["text"], "finish_reason": "length"}]},
        }
        data = {
            f"endpoint{name}": {"data": json.dumps(side), "encoding": "JSON"}
            for name, side in sides.items()
        }
        lines.append(json.dumps({"captureData": data, "eventMetadata": {}}) + "\n")
    body = "".join(lines).encode()
    aws.client("s3").put_object(Bucket=BUCKET, Key=CAPTURED, Body=body)


@pytest.fixture
def verdict(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The gate's: {"refusal": ""}; outputs that a random target did not write are taken."""
    told = {"refusal": ""}
    monkeypatch.setattr("peagle.evaluation.adaptation._MIN_OWN_SHARE", 0.0)
    monkeypatch.setattr("peagle.evaluation.adaptation.refusal", lambda *_: told["refusal"])
    return told


@pytest.fixture
def chat(aws: FakeAws, peagle: Peagle, pair: Pair, verdict: dict[str, str]) -> None:
    """The endpoint, of a tiny pair, with traffic."""
    create(peagle, pair.target, "--draft", pair.peagle, *NATIVE, "--capture-share", 1)
    capture(aws, 110)


def config_of(aws: FakeAws) -> dict[str, Any]:
    environment = aws.endpoints.container("chat")["Environment"]
    return json.loads(environment["SM_VLLM_SPECULATIVE_CONFIG"])


def head_of(aws: FakeAws) -> dict[str, bytes]:
    """The files that the container finds as its head."""
    container = aws.endpoints.container("chat")
    root = container["ModelDataSource"]["S3DataSource"]["S3Uri"]
    return aws.objects(root + config_of(aws)["model"].removeprefix("/opt/ml/model/"))


def files_of(folder: Path) -> dict[str, bytes]:
    return {one.name: one.read_bytes() for one in folder.iterdir() if not one.name.startswith(".")}


def stored_heads(held: set[str]) -> set[str]:
    return {one.rpartition("/draft/")[0] for one in held if "/draft/" in one}


@pytest.mark.slow
def test_a_better_correction_reaches_the_endpoint_and_goes_back(
    aws: FakeAws, run: Run, peagle: Peagle, tmp_path: Path
) -> None:
    """The endpoint's container is the bundled target, which answers greedily."""
    create(
        peagle, BUNDLED_TARGET, "--draft", BUNDLED_PEAGLE, *NATIVE, "-k", 7, "--capture-share", 1
    )
    texts = accessors()
    outputs = LLM("bundled", speculative_config={"model": str(BUNDLED_PEAGLE)}).generate(
        texts, SamplingParams(max_tokens=32, temperature=0.0)
    )
    answers = {text: one.text for text, one in zip(texts, outputs, strict=True)}

    def answer(invocation: Any) -> list[bytes]:
        choice = {"text": answers[json.loads(invocation.body)["prompt"]], "finish_reason": "length"}
        return [json.dumps({"choices": [choice]}).encode()]

    aws.endpoints.answer_with = answer
    client = aws.client("sagemaker-runtime")
    for text in texts:
        body = json.dumps({"prompt": text, "add_special_tokens": False})
        client.invoke_endpoint(EndpointName="chat", Body=body, ContentType="application/json")
    before, old, held = config_of(aws), head_of(aws), aws.holdings()
    assert old == files_of(BUNDLED_PEAGLE)

    options = ("--steps", 10, "--set", "data.batch_tokens=1024", "--format", "json")
    result = run("adapt", *options)
    assert result.status == 0, result.err
    told = json.loads(result.out)
    assert (told["status"], told["refusal"], told["k"]) == ("updated", "", 7)
    assert told["held_out"]["gain_ci"][0] > 0 and told["requests"]["requests"] == 110
    assert "change set: " in result.err
    # The head has changed, and nothing else; the old one is still there.
    new, config = head_of(aws), config_of(aws)
    assert config | {"model": before["model"]} == before != config
    assert new == files_of(Path(told["head"]))
    assert {name for name in new if new[name] != old.get(name)} == {CORRECTION_NAME}
    assert {one for one in held if one.startswith("object ")} < aws.holdings()
    work = tmp_path / "work"
    assert (work / "captured").stat().st_mode & 0o077 == 0
    assert json.loads((work / "report.json").read_text()) == told

    # By the command that was printed, the old head is back, and the new one gone.
    back = peagle(*shlex.split(told["roll_back"])[1:])
    assert back.status == 0, back.err
    assert config_of(aws) == before and head_of(aws) == old
    assert {one for one in aws.holdings() if one.startswith("object ")} == {
        one for one in held if one.startswith("object ")
    }


def test_a_head_that_does_not_pass_changes_nothing(
    aws: FakeAws, run: Run, chat: None, verdict: dict[str, str], tmp_path: Path
) -> None:
    held, num_calls = aws.holdings(), len(aws.calls)
    verdict["refusal"] = "It gains nothing."
    result = run("adapt", "--steps", 1, "--format", "json")
    assert result.status == 3 and "refused: It gains nothing." in result.err
    told = json.loads(result.out)
    assert (told["status"], told["head"], told["endpoint"]) == ("refused", None, "chat")
    assert aws.holdings() == held
    reading = ("Describe", "Get", "List", "Head")
    assert all(one.operation.startswith(reading) for one in aws.calls[num_calls:])
    work = tmp_path / "work"
    assert sorted(one.name for one in work.iterdir()) == ["captured", "models", "report.json"]
    # What was fetched is not fetched again.
    again = run("adapt", "--steps", 1)
    assert again.status == 3 and again.err.count("fetched 0 files") == 3


FAULTS: dict[str, Callable[[FakeAws], Any]] = {
    "upload": lambda aws: aws.fail("access denied", "PutObject", number=2, calls=99),
    "change set": lambda aws: aws.fail("validation", "CreateChangeSet"),
    "update": lambda aws: aws.stacks.fail_next("UPDATE", "Endpoint", "It is not healthy."),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_head_that_was_not_deployed_is_deployed_by_a_second_run(
    aws: FakeAws, run: Run, chat: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: str
) -> None:
    held, before = aws.holdings(), config_of(aws)
    FAULTS[fault](aws)
    result = run("adapt", "--steps", 1)
    assert result.status == 2, result.err
    assert aws.holdings() == held and config_of(aws) == before
    aws.faults.clear()
    monkeypatch.setattr(Trainer, "run", None)
    again = run("adapt")
    assert again.status == 0, again.err
    assert "passed in an earlier run" in again.err and "Roll back: peagle deploy" in again.out
    (new,) = (tmp_path / "work").glob("deployed-*")
    assert head_of(aws) == files_of(new) and not (tmp_path / "work" / "adapted").exists()


def test_calls_are_printed_and_made_later(
    aws: FakeAws, run: Run, chat: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = aws.holdings()
    result = run("adapt", "--steps", 1, "--print-calls")
    assert result.status == 0, result.err
    calls = [call["operation"] for call in json.loads(result.out)]
    assert calls[:2] == ["PutObject", "CreateChangeSet"] and "ExecuteChangeSet" in calls
    assert "held-out traffic" in result.err and aws.holdings() == held
    with monkeypatch.context() as full:
        refuse = Mock(side_effect=UserError("No room for the report."))
        full.setattr("peagle.cli.deploy_adapt.write_figures", refuse)
        deployed = run("adapt")
    assert deployed.status == 2 and "Roll back: peagle deploy" in deployed.out
    # The next head goes out from this one; the one before it is then gone.
    (first,), two = stored_heads(held), stored_heads(aws.holdings())
    assert run("adapt", "--steps", 1).status == 0
    assert first in two and two - {first} < stored_heads(aws.holdings()) and len(two) == 2
    assert len(stored_heads(aws.holdings())) == 2
    assert run("delete", "--yes").status == 0
    assert [one for one in aws.holdings() if one.startswith("object ")] == [
        f"object s3://{BUCKET}/{CAPTURED}"
    ]


def test_trees_stay_and_so_does_what_changed_meanwhile(
    aws: FakeAws,
    run: Run,
    peagle: Peagle,
    pair: Pair,
    verdict: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trees = json.dumps({"num_parallel_trees": 4, "prediction_depth": 3})
    options = (*NATIVE, "--capture-share", 1, "--parallel-drafting-spec", trees)
    create(peagle, pair.target, "--draft", pair.peagle, *options)
    capture(aws, 110)
    before = config_of(aws)

    def update(*_: object) -> str:
        assert run("update", "--capture-share", 0.5).status == 0
        return ""

    monkeypatch.setattr("peagle.evaluation.adaptation.refusal", update)
    result = run("adapt", "--steps", 1, "--format", "json")
    assert result.status == 0, result.err
    assert config_of(aws) | {"model": before["model"]} == before != config_of(aws)
    percent = [
        config["DataCaptureConfig"]["InitialSamplingPercentage"] for config in configurations(aws)
    ]
    assert percent == [50]
    assert peagle(*shlex.split(json.loads(result.out)["roll_back"])[1:]).status == 0
    assert config_of(aws) == before


def test_another_head_meanwhile_is_kept(
    aws: FakeAws, run: Run, pair: Pair, chat: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def update(*_: object) -> str:
        assert run("update", "--draft", pair.peagle).status == 0
        return ""

    monkeypatch.setattr("peagle.evaluation.adaptation.refusal", update)
    result = run("adapt", "--steps", 1)
    assert result.status == 2 and "got another head meanwhile" in result.err
    assert head_of(aws) == files_of(pair.peagle)
    again = run("adapt")
    assert again.status == 2 and "was adapted from the endpoint's present head" in again.err


def test_a_report_without_room_names_what_deploys_the_head(
    aws: FakeAws, run: Run, peagle: Peagle, chat: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(path: Path, result: Any, advice: str) -> None:
        raise UserError(advice)

    with monkeypatch.context() as full:
        full.setattr("peagle.cli.deploy_adapt.write_figures", write)
        result = run("adapt", "--steps", 1)
    assert result.status == 2 and run("adapt").status == 2
    command = result.err.split("`")[1]
    assert peagle(*shlex.split(command)[1:]).status == 0
    assert head_of(aws) == files_of(Path(shlex.split(command)[-1]))


def configurations(aws: FakeAws) -> list[dict[str, Any]]:
    client = aws.client("sagemaker")
    names = [one["EndpointConfigName"] for one in client.list_endpoint_configs()["EndpointConfigs"]]
    return [client.describe_endpoint_config(EndpointConfigName=name) for name in names]


def test_a_managed_container_gets_a_head_without_a_correction(
    aws: FakeAws, run: Run, peagle: Peagle, pair: Pair, verdict: dict[str, str]
) -> None:
    create(peagle, pair.target, "--draft", pair.peagle, "--capture-share", 1)
    capture(aws, 110)
    refused = run("adapt")
    assert refused.status == 2 and "(managed container) drafts without corrections" in refused.err
    options = ("--what", "head", "--old-share", 0, "--steps", 1, "--format", "json")
    held = run("adapt", *options, "--print-calls")
    assert held.status == 0, held.err
    result = run("adapt", "--format", "json")  # deploys that head
    assert result.status == 0, result.err
    assert json.loads(result.out)["steps"] == {"head": 1}
    assert CORRECTION_NAME not in head_of(aws)


def test_little_traffic_and_none(aws: FakeAws, run: Run, chat: None) -> None:
    capture(aws, 60)
    result = run("adapt", "--steps", 1)
    assert result.status == 2 and "holds 60 usable requests" in result.err
    for options in (("--since", "1h"), ("--since", "999999d"), ()):
        if not options:
            aws.client("s3").delete_object(Bucket=BUCKET, Key=CAPTURED)
        else:
            old = aws_object(aws, CAPTURED)
            year = 2020 if options[1] == "1h" else 1969  # the longest time reaches to 1970
            old.last_modified = old.last_modified.replace(year=year)
        result = run("adapt", *options)
        assert result.status == 2 and "There are no captured files" in result.err, result.err


def aws_object(aws: FakeAws, key: str) -> Any:
    from moto.s3.models import s3_backends

    return s3_backends["123456789012"]["aws"].buckets[BUCKET].keys[key]


def test_endpoints_that_cannot_be_adapted(
    aws: FakeAws, run: Run, peagle: Peagle, pair: Pair, tmp_path: Path
) -> None:
    gone = run("adapt")
    assert gone.status == 2 and "There is no endpoint 'chat'" in gone.err
    create(peagle, pair.target, "--draft", pair.peagle, *NATIVE)
    plain = run("adapt")
    assert plain.status == 2
    assert "update chat --region us-east-1 --capture-share 0.2" in plain.err
    assert run("update", "--no-speculation", "--capture-share", 1).status == 0
    headless = run("adapt")
    assert headless.status == 2 and "drafts without a head" in headless.err
    for option, value in (
        *(("--max-gib", "0"), ("--max-gib", "inf")),
        *(("--minutes", "0"), ("--since", "x")),
    ):
        wrong = run("adapt", option, value)
        assert wrong.status == 2 and f"{option} is {value}" in wrong.err.replace("'", "")
    unknown = run("adapt", "--set", "run.sed=1")  # of an endpoint that would be refused, too
    assert unknown.status == 2 and "run.sed is not a known key" in unknown.err
    assert not (tmp_path / "work").exists()
