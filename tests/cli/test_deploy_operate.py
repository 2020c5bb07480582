"""`peagle deploy sagemaker status | invoke | scale | logs` against the stand-in of AWS."""

import json
import re
import shlex
from datetime import UTC, datetime, timedelta
from pathlib import Path

import boto3
import pytest
import typer

from deploy.aws_wire import stream_error
from deploy.curves import throughput, tune
from deploy.fake_aws import ACCESS_KEY, REGION, SECRET_KEY, FakeAws
from deploy.fake_endpoints import ContainerError, Frame
from deploy.operating import (
    STREAM,
    USAGE,
    WHOLE,
    WORDS,
    chunk,
    drafts,
    events,
    make_endpoint,
    put,
    put_acceptance,
    put_log,
)
from peagle.cli.main import LazyCommand, app
from peagle.deploy import stack
from peagle.deploy.models import ModelSource
from tests.deploy.deployments import a_deployment


def now() -> datetime:
    """Return the time now: the whole suite may have run for long when a test begins."""
    return datetime.now(UTC)


SESSION = boto3.Session(ACCESS_KEY, SECRET_KEY, region_name=REGION)


@pytest.fixture(scope="module")
def server():
    with FakeAws(change_s=0) as fake:
        yield fake


@pytest.fixture
def aws(server, monkeypatch):
    server.reset()
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    # One session for all commands: most of a command's time is that it reads the service models.
    monkeypatch.setattr("peagle.deploy.aws._session", lambda: SESSION)
    make_endpoint(server)
    return server


@pytest.fixture
def run(aws, peagle):
    """Runs a subcommand; no output ever holds a credential."""

    def call(*arguments):
        result = peagle("deploy", "sagemaker", *arguments)
        for secret in (ACCESS_KEY, SECRET_KEY):
            assert secret not in result.out + result.err
        return result

    return call


# ---- invoke ----


def bodies(aws, *parts: bytes) -> list[dict]:
    """Lets the container answer so; what it is asked is put into the list."""
    asked: list[dict] = []

    def answer(invocation) -> list[bytes]:
        asked.append(json.loads(invocation.body))
        return list(parts)

    aws.endpoints.answer_with = answer
    return asked


def test_a_streamed_answer(aws, run):
    asked = bodies(aws, *(STREAM[i : i + 7] for i in range(0, len(STREAM), 7)))
    result = run("invoke", "code", "Hi", "--max-tokens", 9, "--temperature", 0)
    assert (result.status, result.out) == (0, "".join(WORDS) + "\n")
    for said in ("5 + 3 tokens", "acceptance length 2.50 over 2 drafts", "to the first text"):
        assert said in result.err
    assert "variant AllTraffic" in result.err
    (body,) = asked
    assert body["messages"] == [{"role": "user", "content": "Hi"}]
    assert (body["max_tokens"], body["temperature"], body["stream"]) == (9, 0, True)
    assert body["speculation"] == {"report": True}


def test_events_and_answers_as_json(aws, run):
    bodies(aws, STREAM)
    result = run("invoke", "code", "Hi", "--format", "json")
    found = [json.loads(line) for line in result.out.splitlines()]
    assert found[0] == chunk(WORDS[0])
    assert found[-1]["usage"] == USAGE
    asked = bodies(aws, json.dumps(WHOLE).encode())
    result = run("invoke", "code", "Hi", "--no-stream", "--no-report", "--format", "json")
    assert json.loads(result.out) == WHOLE
    assert asked == [{"messages": [{"role": "user", "content": "Hi"}]}]
    assert run("invoke", "code", "Hi", "--no-stream").out == "Zürich\n"


def test_conversations_and_bodies(aws, run, tmp_path):
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    path = tmp_path / "chat.json"
    path.write_text(json.dumps(messages))
    asked = bodies(aws, STREAM)
    assert run("invoke", "code", "--messages", path).status == 0
    assert asked[-1]["messages"] == messages
    body = {"prompt": "Once", "max_tokens": 4, "n": 2}
    assert run("invoke", "code", "--body", json.dumps(body)).status == 0
    assert asked[-1] == {**body, "stream": True, "stream_options": {"include_usage": True}}
    path.write_text(json.dumps(body))
    bodies(aws, json.dumps(WHOLE).encode())
    assert run("invoke", "code", "--body", path, "--no-stream").status == 0
    asked = bodies(aws, STREAM)
    run("invoke", "code", "def f(", "--completion", "--no-report")
    assert asked[-1]["prompt"] == "def f("


def test_further_choices_and_reasoning(aws, run):
    second = {"choices": [{"index": 1, "delta": {"content": "B"}}]}
    thought = {"choices": [{"index": 0, "delta": {"reasoning_content": "hm"}}]}
    bodies(aws, events(thought, second, chunk("A"), "[DONE]"))
    result = run("invoke", "code", "Hi")
    assert result.out == "A\n=== 2\nB\n"
    assert result.err.startswith("hm\n")


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (Frame(stream_error("ModelStreamError", "hangs")), "ModelStreamError: hangs"),
        (Frame(stream_error("InternalStreamFailure", "oh")), "InternalStreamFailure"),
        (b"", "no [DONE]"),
        (events({"error": {"message": "out of memory"}}, "[DONE]"), "out of memory"),
    ],
)
def test_an_answer_that_breaks_off_is_shown_and_told(aws, run, end, said):
    bodies(aws, events(chunk("Zür"), chunk("ich")), end)
    result = run("invoke", "code", "Hi")
    assert (result.status, result.out) == (2, "Zürich\n")
    assert f"{said}" in result.err
    assert "The answer is not complete" in result.err
    assert "Traceback" not in result.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "one of them; none of them was given"),
        (("Hi", "--body", "{}"), "PROMPT and --body was given"),
        (("",), "prompt is empty"),
        (("--body", "{}"), 'needs "messages" (a chat) or "prompt"'),
        (("--body", "{nothing"), "--body is not JSON"),
        (("--body", "no-such.json"), "not readable"),
        (("--body", '{"prompt": "x", "stream": true}'), '--body has "stream"'),
        (("--body", '{"prompt": "x"}', "--max-tokens", 3), "put --max-tokens into it"),
        (("--messages", "no-such.json"), "not readable"),
    ],
)
def test_requests_that_are_none(aws, run, arguments, said):
    before = len(aws.calls)
    result = run("invoke", "code", *arguments)
    assert (result.status, result.out) == (2, "")
    assert said in result.err
    assert len(aws.calls) == before  # nothing was asked


def test_a_refusal_of_the_container(aws, run):
    def refuse(_):
        raise ContainerError(400, '{"error": {"message": "max_tokens is 0."}}')

    aws.endpoints.answer_with = refuse
    result = run("invoke", "code", "Hi")
    assert result.status == 2
    assert "The container answered 400: max_tokens is 0." in result.err


# ---- status and logs ----


def test_status(aws, run):
    put(aws, "AWS/SageMaker", now() - timedelta(minutes=5), Invocations=3)
    put_acceptance(aws, now() - timedelta(minutes=5), drafts(3, *[1] * 900))
    result = run("status", "code", "--expected", "3")
    assert result.status == 0
    assert "code: InService" in result.out
    assert "acceptance length 2.00 over 900 drafts (CloudWatch)" in result.out
    assert "DRIFT: -33.3%" in result.out
    data = json.loads(run("status", "code", "--expected", "3", "--format", "json").out)
    assert data["metrics"]["Invocations"] == {"total": 3}
    assert data["drift"]["is_drift"] is True


def test_status_again_and_again(aws, run, monkeypatch):
    from peagle.deploy.aws import Clock

    waited = []

    def sleep(self, seconds):
        waited.append(seconds)
        if len(waited) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Clock, "sleep", sleep)
    result = run("status", "code", "--watch", "--format", "json")
    assert result.status == 130
    assert len(result.out.splitlines()) == 2
    assert waited == [30.0, 30.0]


def test_an_endpoint_that_is_not_there(aws, run):
    for command in ("status", "scale"):
        more = ("--off",) if command == "scale" else ()
        result = run(command, "cod", *more)
        assert result.status == 2
        assert "Did you mean 'code'?" in result.err
    assert "no log of endpoint 'cod'" in run("logs", "cod").err


def test_logs(aws, run):
    put_log(aws, "AllTraffic/i-1", (now() - timedelta(minutes=3), "ready \x1b[31m"))
    result = run("logs", "code")
    assert (result.status, result.err) == (0, "")
    assert result.out.endswith("Z AllTraffic/i-1 ready \ufffd[31m\n")
    data = json.loads(run("logs", "code", "--format", "json").out)
    assert (data["stream"], data["message"]) == ("AllTraffic/i-1", "ready \x1b[31m")
    result = run("logs", "code", "--since", "1m")
    assert (result.status, result.out) == (0, "")
    assert "--since looks further back" in result.err
    assert "time span" in run("logs", "code", "--since", "soon").err


# ---- scale ----


@pytest.fixture
def stacked(aws):
    """An endpoint of a stack, that drafts 3 tokens."""
    config = {"method": "eagle3", "num_speculative_tokens": 3, "parallel_drafting": True}
    d = a_deployment(
        endpoint_name="chat", draft=ModelSource("hub", "a/b"), speculative_config=config
    )
    stack.create(aws.clients(), d, report=lambda line: None)
    return aws


def scaling(run):
    return json.loads(run("status", "chat", "--format", "json").out)["autoscaling"]


def test_scaling_on_changed_and_off(stacked, run):
    result = run("scale", "chat", "--max", 4, "--target", 16)
    assert (result.status, result.out) == (
        0,
        "chat: 1 to 4 instances at 16 requests at once on each\n",
    )
    assert scaling(run)["policies"] == ["peagle-chat"]
    assert run("scale", "chat", "--min", 2, "--max", 3, "--target", 8).status == 0
    data = scaling(run)
    assert (data["min_instances"], data["max_instances"], data["target_value"]) == (2, 3, 8.0)
    # A number of one's own would be changed again.
    result = run("scale", "chat", "--instances", 5)
    assert result.status == 2
    assert "scaled automatically (2 to 3 instances)" in result.err
    assert run("scale", "chat", "--off").status == 0
    assert scaling(run) is None
    told = json.loads(run("scale", "chat", "--max", 2, "--target", 5, "--format", "json").out)
    assert (told["autoscaling"]["max_instances"], told["autoscaling"]["target_value"]) == (2, 5.0)
    assert run("scale", "chat", "--off").status == 0
    assert "is not scaled automatically" in run("scale", "chat", "--off").err


def test_scaling_that_fails_leaves_what_was_there(stacked, run):
    run("scale", "chat", "--max", 4, "--target", 16)
    stacked.stacks.fail_next("UPDATE", "ScalingPolicy", "no")
    result = run("scale", "chat", "--max", 9, "--target", 2)
    assert result.status == 2 and "ScalingPolicy: UPDATE_FAILED (no)" in result.err
    data = scaling(run)
    assert (data["max_instances"], data["target_value"]) == (4, 16.0)


def test_endpoints_of_others_are_not_scaled(aws, run):
    result = run("scale", "code", "--max", 4, "--target", 16)
    assert result.status == 2
    assert "This version of peagle did not make" in result.err


def test_the_target_of_a_measured_curve(stacked, run, tmp_path):
    path = throughput(tmp_path / "throughput.json", k=3)
    result = run("scale", "chat", "--max", 4, "--from", path)
    assert result.out == "chat: 1 to 4 instances at 11 requests at once on each\n"
    assert "one instance carries 16 requests at once (at 32 drafts no longer pay" in result.err
    result = run("scale", "chat", "--max", 4, "--from", path, "--max-itl-ms", 20)
    assert "at 5 requests at once" in result.out
    result = run("scale", "chat", "--max", 4, "--from", path, "--metric", "invocations")
    assert "at 420 requests a minute" in result.out
    metric = json.loads(run("status", "chat", "--format", "json").out)["autoscaling"]["metric"]
    assert metric == "SageMakerVariantInvocationsPerInstance"
    # The endpoint drafts 3 tokens; the file has 7.
    result = run("scale", "chat", "--max", 4, "--from", tune(tmp_path / "tune.json"))
    assert "no speeds at K = 3" in result.err
    assert run("scale", "chat", "--max", 4, "--from", tmp_path / "tune.json", "-k", 7).status == 0


def test_calls_are_printed_and_not_made(stacked, run):
    result = run("scale", "chat", "--max", 4, "--target", 16, "--print-calls")
    calls = json.loads(result.out)
    assert calls[0]["operation"] == "CreateChangeSet"
    assert "ScalingPolicy" in calls[0]["parameters"]["TemplateBody"]["Resources"]
    assert scaling(run) is None
    count = json.loads(run("scale", "chat", "--instances", 3, "--print-calls").out)
    assert [c["operation"] for c in count] == ["UpdateEndpointWeightsAndCapacities"]


def test_a_number_of_instances(aws, run):
    result = run("scale", "code", "--instances", 3)
    assert (result.status, result.out) == (0, "code: 3 instances of AllTraffic\n")
    (variant,) = aws.client("sagemaker").describe_endpoint(EndpointName="code")[
        "ProductionVariants"
    ]
    assert variant["DesiredInstanceCount"] == 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "one of them"),
        (("--off", "--max", 4), "one of them"),
        (("--max", 4), "neither was given"),
        (("--max", 4, "--target", 3, "--from", "x"), "both were given"),
        (("--off", "--target", 3), "go with --max"),
        (("--max", 0, "--target", 3), "1 <= fewest <= most"),
        (("--max", 4, "--target", -3), "above 0"),
        (("--instances", 0), "at least 1"),
        (("--max", 4, "--from", "x", "--percentile", 95), "50, 90 or 99"),
        (("--max", 4, "--target", 3, "--variant", "blue"), "has the variants: AllTraffic"),
    ],
)
def test_scaling_that_cannot_be(aws, run, arguments, said):
    before = aws.holdings()
    result = run("scale", "code", *arguments)
    assert (result.status, result.out) == (2, "")
    assert said in result.err
    assert aws.holdings() == before


@pytest.mark.parametrize("command", ["status", "invoke", "scale", "logs"])
def test_every_command_has_help_with_examples(run, command):
    result = run(command, "--help")
    assert result.status == 0
    assert f"peagle deploy sagemaker {command}" in result.out.partition("Examples:")[2]


# ---- docs/operations.md ----


def commands_of(text: str) -> list[list[str]]:
    """The peagle commands of code blocks and of code in sentences, as words."""
    blocks = "".join(re.findall(r"```sh[^\n]*\n(.*?)```", text, re.DOTALL)).splitlines()
    spans = [" ".join(span.split()) for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", text)]
    # Within sentences the beginning is left out.
    spans = [
        f"peagle deploy sagemaker {span}"
        if re.match(r"(update|logs|create|scale) ", span)
        else span
        for span in spans
    ]
    found = [line for line in (*blocks, *spans) if line.startswith("peagle ")]
    return [shlex.split(line, comments=True)[1:] for line in found]


def test_every_command_of_the_page_exists():
    root = Path(__file__).resolve().parents[2]
    commands = commands_of((root / "docs" / "operations.md").read_text())
    assert len(commands) > 20
    for words in commands:
        node = typer.main.get_command(app)
        rest = list(words)
        while rest and (isinstance(node, LazyCommand) or hasattr(node, "commands")):
            node = node.load() if isinstance(node, LazyCommand) else node.commands[rest.pop(0)]
        options = {o for p in node.params for o in (*p.opts, *p.secondary_opts)}
        given = {word.partition("=")[0] for word in rest if re.match(r"--?[a-z]", word)}
        assert given <= options, (words, given - options)
