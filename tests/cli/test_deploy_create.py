"""`peagle deploy sagemaker create | update | plan`: from a command line to calls."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.fake_aws import ACCESS_KEY, BUCKET, ROLE, SECRET_KEY, FakeAws
from peagle.cli.deploy import SUBCOMMANDS
from peagle.deploy.aws import Clock
from tests.cli.conftest import Pair, Peagle, Result, environment

SAGEMAKER = ("deploy", "sagemaker")
PLAN = (*SAGEMAKER, "plan")
HERE = ("--region", "us-east-1", "--role", ROLE)
NATIVE = (
    *HERE,
    "--source",
    "native",
    "--image",
    "123456789012.dkr.ecr.us-east-1.amazonaws.com/a:b",
)


@pytest.fixture(scope="module")
def server() -> Iterator[FakeAws]:
    with FakeAws(change_s=0) as fake:
        yield fake


@pytest.fixture
def aws(server: FakeAws, monkeypatch: pytest.MonkeyPatch) -> FakeAws:
    """AWS, empty, as boto3 finds it; what waits does so on the stand-in's clock."""
    server.reset()
    for name in ("now", "sleep"):
        monkeypatch.setattr(Clock, name, staticmethod(getattr(server.clock, name)))
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    return server


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No network, no credentials, no region."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
    for name in ("AWS_DEFAULT_REGION", "AWS_REGION", "AWS_ACCESS_KEY_ID", "SAGEMAKER_ROLE"):
        monkeypatch.delenv(name, raising=False)


def planned(result: Result) -> dict[str, Any]:
    assert result.status == 0, result.err
    return json.loads(result.out)


def operations(plan: dict[str, Any]) -> list[str]:
    return [call["operation"] for call in plan["calls"]]


def template_of(plan: dict[str, Any]) -> dict[str, Any]:
    (change,) = (c for c in plan["calls"] if c["operation"] == "CreateChangeSet")
    return change["parameters"]["TemplateBody"]


def environment_of(plan: dict[str, Any]) -> dict[str, Any]:
    model = template_of(plan)["Resources"]["Model"]["Properties"]
    return model["PrimaryContainer"]["Environment"]


# ---- help ----


@pytest.mark.parametrize("command", list(SUBCOMMANDS))
def test_help_has_examples(peagle: Peagle, command: str) -> None:
    result = peagle(*SAGEMAKER, command, "--help")
    assert (result.status, result.err) == (0, "")
    assert f"peagle deploy sagemaker {command}" in result.out.partition("Examples:")[2]


def test_help_lists_the_commands(peagle: Peagle) -> None:
    result = peagle(*SAGEMAKER, "--help")
    assert result.status == 0
    assert all(name in result.out for name in SUBCOMMANDS)


# ---- plan ----


@pytest.mark.usefixtures("offline")
def test_plan_touches_nothing(peagle: Peagle) -> None:
    plan = planned(peagle(*PLAN, "gpt-oss-20b", *HERE, "-k", 5, "--", "--max-model-len", "4096"))
    assert operations(plan) == [
        *("DescribeStacks", "DescribeEndpoint", "CreateChangeSet", "DescribeChangeSet"),
        *("ExecuteChangeSet", "DescribeStacks"),
    ]
    assert environment_of(plan)["SM_VLLM_MAX_MODEL_LEN"] == "4096"
    assert json.loads(environment_of(plan)["SM_VLLM_SPECULATIVE_CONFIG"]) == {
        "method": "eagle3",
        "model": "amazon/GPT-OSS-20B-P-EAGLE",
        "num_speculative_tokens": 5,
        "parallel_drafting": True,
    }


@pytest.mark.usefixtures("offline")
def test_plan_with_candidate_trees(peagle: Peagle) -> None:
    """The catalog's K is 7; K of trees is their depth."""
    shape = {"num_parallel_trees": 8, "prediction_depth": 5}
    for options in (
        ("--parallel-drafting-spec", json.dumps(shape)),
        ("--speculative-config", json.dumps({"parallel_drafting_spec": shape})),
    ):
        plan = planned(peagle(*PLAN, "gpt-oss-20b", *NATIVE, *options))
        config = json.loads(environment_of(plan)["SM_VLLM_SPECULATIVE_CONFIG"])
        assert (config["num_speculative_tokens"], config["parallel_drafting_spec"]) == (5, shape)


def test_plan_needs_neither_boto3_nor_torch() -> None:
    command = [*PLAN, "gpt-oss-20b", *HERE, "--max-instances", "2", "--scale-target", "4"]
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('boto3', 'botocore', 'torch')))\n"
        f"from peagle.cli.main import run; sys.exit(run({command!r}))"
    )
    result = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True)
    assert result.returncode == 0, result.stderr
    assert "ScalingPolicy" in template_of(json.loads(result.stdout))["Resources"]


@pytest.mark.usefixtures("offline")
def test_plan_hides_secrets(peagle: Peagle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_nobody_may_see_it")
    result = peagle(*PLAN, "gpt-oss-20b", *HERE, "--pass-hf-token", "--env", "MY_KEY=hush")
    plan = planned(result)
    (change,) = (c for c in plan["calls"] if c["operation"] == "CreateChangeSet")
    values = {one["ParameterValue"] for one in change["parameters"]["Parameters"]}
    assert values == {"********"}
    assert "nobody" not in result.out + result.err and "hush" not in result.out + result.err


@pytest.mark.usefixtures("offline")
def test_plan_needs_neither_region_nor_role(peagle: Peagle) -> None:
    plan = planned(peagle(*PLAN, "gpt-oss-20b"))
    assert plan["region"] is None
    assert any("No role was given" in note for note in plan["notes"])
    assert "RoleArn" in template_of(plan)["Parameters"]
    assert "${AWS::Region}" in json.dumps(template_of(plan)["Resources"])
    told = planned(peagle(*PLAN, "gpt-oss-20b", *HERE))
    assert (told["region"], told["notes"]) == ("us-east-1", [])
    assert "Parameters" not in template_of(told)


@pytest.mark.usefixtures("offline")
def test_template_is_that_of_the_plan(peagle: Peagle, pair: Pair) -> None:
    result = peagle(*SAGEMAKER, "template", "gpt-oss-20b", *HERE)
    assert result.status == 0, result.err
    assert json.loads(result.out) == template_of(planned(peagle(*PLAN, "gpt-oss-20b", *HERE)))
    local = peagle(*SAGEMAKER, "template", pair.target, "--instance-type", "ml.g6.xlarge", *HERE)
    assert f"Put the files of {pair.target} under s3://{BUCKET}/peagle/" in local.err


@pytest.mark.usefixtures("offline")
def test_plan_of_later_commands(peagle: Peagle) -> None:
    delete = planned(peagle(*PLAN, "chat", "--for", "delete"))
    assert operations(delete)[-2:] == ["DeleteStack", "DescribeStacks"]
    update = planned(peagle(*PLAN, "chat", "--for", "update", "--model", "gpt-oss-20b", *HERE))
    (change,) = (c for c in update["calls"] if c["operation"] == "CreateChangeSet")
    assert change["parameters"]["ChangeSetType"] == "UPDATE"


@pytest.mark.usefixtures("offline")
def test_plan_of_models_here(peagle: Peagle, pair: Pair) -> None:
    options = ("--draft", pair.eagle3, "--instance-type", "ml.g6.xlarge", "--name", "x", *HERE)
    plan = planned(peagle(*PLAN, pair.target, *options))
    assert operations(plan)[2:4] == ["PutObject", "PutObject"]
    target, draft = plan["calls"][2:4]
    assert target["parameters"]["Bucket"] == BUCKET
    assert any(key.endswith("/target/tokenizer.json") for key in target["keys"])
    assert any(key.endswith("/draft/config.json") for key in draft["keys"])
    config = json.loads(environment_of(plan)["SM_VLLM_SPECULATIVE_CONFIG"])
    assert config["parallel_drafting"] is False
    assert config["model"].startswith("/opt/ml/model/peagle/x/")


@pytest.mark.usefixtures("offline")
def test_plan_of_a_model_whose_head_only_jumpstart_has(peagle: Peagle, pair: Pair) -> None:
    told = planned(peagle(*PLAN, "google/gemma-4-31B-it", *HERE, "--no-speculation"))
    assert environment_of(told)["SM_VLLM_MODEL"] == "google/gemma-4-31B-it"
    assert "SM_VLLM_SPECULATIVE_CONFIG" not in environment_of(told)
    own = planned(peagle(*PLAN, "gemma-4-31b-it", *HERE, "--draft", pair.peagle, "-k", 3))
    config = json.loads(environment_of(own)["SM_VLLM_SPECULATIVE_CONFIG"])
    assert config["model"] == "/opt/ml/model/" and config["num_speculative_tokens"] == 3


@pytest.mark.usefixtures("offline")
def test_plan_says_what_it_did_not_look_at(peagle: Peagle) -> None:
    plan = planned(peagle(*PLAN, "gpt-oss-20b", *HERE, "--draft", "owner/head"))
    assert plan["notes"] == [
        "peagle did not read the head 'owner/head', and takes it for a P-EAGLE head."
    ]
    plain = planned(peagle(*PLAN, "gpt-oss-20b", *HERE, "--no-speculation"))
    assert "SM_VLLM_SPECULATIVE_CONFIG" not in environment_of(plain)


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gpt-oss-2b", *HERE], "Did you mean gpt-oss-20b"),
        (["gpt-oss-20b", *HERE, "--source", "vllm"], "expected one of managed, native"),
        (["gpt-oss-20b", *HERE, "--source", "jumpstart"], "by the id that `peagle catalog NAME`"),
        (["gemma-4-31b-it", *HERE], "Name a head of your own with --draft"),
        (["google/gemma-4-31B-it", *HERE, "-k", "5"], "Name one with --draft"),
        (["gpt-oss-20b", *HERE, "--min-instances", "2"], "--min-instances is given without"),
        (["gpt-oss-20b", *HERE, "--max-instances", "2"], "give --scale-from"),
        (["gpt-oss-20b", *HERE, "stray"], "expected options of vLLM there"),
        (["gpt-oss-120b", *HERE, "--instance-type", "ml.g6.xlarge"], "it needs"),
        (["x", "--for", "update", *HERE], "give --model"),
        (["x", "--for", "delete", "--model", "y", *HERE], "contradict each other"),
        (["under_score", "--for", "delete", *HERE], "The endpoint's name is 'under_score'"),
        (
            [
                "gpt-oss-20b",
                *HERE,
                "--source",
                "native",
                "--image",
                "a/b:c",
                "--",
                "--quantization=x",
            ],
            "SM_VLLM_QUANTIZATION",
        ),
        (
            ["gpt-oss-20b", *HERE, "--speculative-config", '{"parallel_drafting_spec": {}}'],
            "candidate trees",
        ),
        (["gpt-oss-20b", *HERE, "--parallel-drafting-spec", "{}"], "candidate trees"),
        (["gpt-oss-20b", *HERE, "--parallel-drafting-spec", "auto"], "candidate trees"),
        (["gpt-oss-20b", *HERE, "--parallel-drafting-spec", "4"], "'4' is not a JSON object"),
        (["gpt-oss-20b", *NATIVE, "--parallel-drafting-spec", '{"depth": 4}'], "Each key may be"),
        (
            ["gpt-oss-20b", *NATIVE, "--parallel-drafting-spec", '{"prediction_depth": 11}'],
            "expected at most 10, which the head 'amazon/GPT-OSS-20B-P-EAGLE' was trained for",
        ),
    ],
)
def test_mistakes(peagle: Peagle, arguments: list[str], message: str) -> None:
    result = peagle(*PLAN, *arguments)
    assert (result.status, result.out) == (2, "")
    assert result.err.startswith("peagle: error: ") and message in result.err


def client_models(aws: FakeAws) -> list[dict[str, Any]]:
    """The models that are there."""
    client = aws.client("sagemaker")
    names = [model["ModelName"] for model in client.list_models()["Models"]]
    return [client.describe_model(ModelName=name) for name in names]


# ---- create and update ----


def test_create_update_and_what_they_tell(peagle: Peagle, aws: FakeAws) -> None:
    arguments = ("gpt-oss-20b", "--role", ROLE, "--name", "chat", "--tag", "team=nlp")
    result = peagle(*SAGEMAKER, "create", *arguments)
    assert result.status == 0, result.err
    assert "CloudFormation works on the stack peagle-endpoint-chat" in result.err
    assert result.out.startswith("created: chat in us-east-1, openai/gpt-oss-20b (K = 7) on 1 x ")
    assert "peagle deploy sagemaker invoke chat --region us-east-1 'Hello'" in result.out
    assert aws.endpoints.status("chat") == "InService"

    again = peagle(*SAGEMAKER, "create", *arguments)
    assert again.status == 2 and "There is an endpoint 'chat'" in again.err

    same = peagle(*SAGEMAKER, "update", "chat")
    assert same.status == 2 and "Nothing is to change about 'chat'" in same.err

    changed = peagle(*SAGEMAKER, "update", "chat", "-k", 5, "--format", "json")
    assert changed.status == 0, changed.err
    told = json.loads(changed.out)
    assert (told["status"], told["num_speculative_tokens"]) == ("updated", 5)
    assert (told["model"], told["draft"]) == ("openai/gpt-oss-20b", "amazon/GPT-OSS-20B-P-EAGLE")
    # The old model and configuration are gone.
    (model,) = client_models(aws)
    config = json.loads(model["PrimaryContainer"]["Environment"]["SM_VLLM_SPECULATIVE_CONFIG"])
    assert config["num_speculative_tokens"] == 5
    assert model["PrimaryContainer"]["Environment"]["SM_VLLM_MAX_MODEL_LEN"] == "32768"
    printed = "".join(r.out + r.err for r in (result, again, same, changed))
    assert ACCESS_KEY not in printed and SECRET_KEY not in printed


def test_what_an_endpoint_captures_is_prepared(
    peagle: Peagle, aws: FakeAws, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the calls, until an update ends it; the files outlive the endpoint."""
    aws.make_bucket()
    body = json.dumps({"prompt": "again"})
    answer = json.dumps({"choices": [{"text": " and again, and again", "finish_reason": "stop"}]})
    monkeypatch.setattr(aws.endpoints, "answer_with", lambda _: [answer.encode()])
    client = aws.client("sagemaker-runtime")
    options = ("--role", ROLE, "--name", "chat", "--capture-share", 0.5)
    for command in (("create", "gpt-oss-20b", *options), ("update", "chat", "--capture-share", 0)):
        made = peagle(*SAGEMAKER, *command)
        assert made.status == 0, made.err
        for _ in range(4):
            client.invoke_endpoint(EndpointName="chat", Body=body, ContentType="application/json")
    assert peagle(*SAGEMAKER, "delete", "chat", "--yes").status == 0
    for name, content in aws.objects(f"s3://{BUCKET}/peagle/chat/capture/").items():
        file = tmp_path / "captured" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    where = ("--target", "bundled", "--output", tmp_path / "x.safetensors", "--format", "json")
    counts = planned(peagle("data", "prepare", tmp_path / "captured", *where))
    assert (counts["records"], counts["samples"], counts["duplicates"]) == (2, 1, 1)


def test_create_of_models_here(peagle: Peagle, aws: FakeAws, pair: Pair) -> None:
    """What the plan says is what is sent, but for names with the time in them."""
    aws.make_bucket()
    options = ("--draft", pair.peagle, "--instance-type", "ml.g6.xlarge", "--name", "mine")
    plan = planned(peagle(*PLAN, pair.target, *options, *HERE))
    result = peagle(*SAGEMAKER, "create", pair.target, *options, *HERE)
    assert result.status == 0, result.err
    keys = {key for call in plan["calls"] for key in call.get("keys", ())}
    listed = aws.client("s3").list_objects_v2(Bucket=BUCKET)["Contents"]
    found = {x["Key"] for x in listed}
    stripped = [{re.sub(r"/\d{14}-\w{4}/", "/", key) for key in one} for one in (keys, found)]
    assert stripped[0] == stripped[1]
    assert "peagle/mine/target/model.safetensors" in stripped[0]
    assert "peagle/mine/target/peagle/mine/draft/config.json" in stripped[0]


@pytest.mark.filterwarnings("ignore:Whether the model fits")
def test_a_head_in_s3_is_looked_at(peagle: Peagle, aws: FakeAws, pair: Pair) -> None:
    """With the user's credentials, before anything is made; of weights only the header."""
    aws.make_bucket()
    client = aws.client("s3")
    for folder, name in ((pair.eagle3, "head"), (pair.target, "model")):
        for file in folder.iterdir():
            client.put_object(Bucket=BUCKET, Key=f"{name}/{file.name}", Body=file.read_bytes())
    head = f"s3://{BUCKET}/head"
    place = ("--instance-type", "ml.g6.xlarge", *HERE)
    model = f"s3://{BUCKET}/model"
    create, options = (*SAGEMAKER, "create", model), ("--draft", head, *place)
    before = aws.holdings()
    config = json.dumps({"model": head, "parallel_drafting": True})
    refused = peagle(*create, "--speculative-config", config, *place)
    assert refused.status == 2 and "an EAGLE-3 head: it has no mask_hidden" in refused.err
    assert aws.holdings() == before
    made = peagle(*create, *options, "--name", "x")
    assert made.status == 0, made.err
    (described,) = client_models(aws)
    container = described["PrimaryContainer"]
    found = json.loads(container["Environment"]["SM_VLLM_SPECULATIVE_CONFIG"])
    assert found["parallel_drafting"] is False
    assert container["ModelDataSource"]["S3DataSource"]["S3Uri"] == f"s3://{BUCKET}/model/"
    copied = f"s3://{BUCKET}/model/" + found["model"].removeprefix("/opt/ml/model/")
    assert aws.objects(copied) == aws.objects(f"s3://{BUCKET}/head/")

    plan = planned(peagle(*PLAN, model, *options, "--name", "y"))
    assert "CopyObject" in operations(plan)
    assert "did not read" in plan["notes"][0]
    client.put_object(Bucket=BUCKET, Key="head/model.safetensors", Body=b"broken")
    broken = peagle(*create, *options, "--name", "y")
    assert broken.status == 2 and "is not readable as safetensors" in broken.err
    client.delete_object(Bucket=BUCKET, Key="head/config.json")
    with pytest.warns(UserWarning, match="peagle could not read the head .* in S3"):
        assert peagle(*create, *options, "--name", "y").status == 0


def test_nothing_stays_of_what_fails(peagle: Peagle, aws: FakeAws) -> None:
    before = aws.holdings()
    aws.stacks.fail_next("CREATE", "Endpoint", "no instances")
    result = peagle(*SAGEMAKER, "create", "gpt-oss-20b", *HERE)
    assert result.status == 2 and result.out == ""
    assert "nothing stayed" in result.err
    assert aws.holdings() == before


def test_a_role_is_needed(peagle: Peagle, aws: FakeAws, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SAGEMAKER_ROLE", raising=False)
    result = peagle(*SAGEMAKER, "create", "gpt-oss-20b")
    assert result.status == 2 and "No role" in result.err
    assert not aws.holdings()


def test_a_measured_curve_scales(peagle: Peagle, tmp_path: Path) -> None:
    """tune.json: at K = 7 drafts pay up to 8 at once; 70% of that is the target."""
    speeds = {(1, 0): 100.0, (1, 7): 250.0, (8, 0): 600.0, (8, 7): 900.0, (16, 0): 1100.0}
    speeds[16, 7] = 1000.0
    rows = [
        {"batch": b, "k": k, "fitted": True, "predicted_tokens_per_s": s}
        for (b, k), s in speeds.items()
    ]
    file = tmp_path / "tune.json"
    tuned = {"format_version": 1, "provenance": {"target": "t"}, "schedule": []}
    file.write_text(json.dumps({**tuned, "predictions": rows, "best_single_k": 7}))
    plan = planned(peagle(*PLAN, "gpt-oss-20b", *HERE, "--max-instances", 4, "--scale-from", file))
    policy = template_of(plan)["Resources"]["ScalingPolicy"]["Properties"]
    tracking = policy["TargetTrackingScalingPolicyConfiguration"]
    assert tracking["TargetValue"] == 5.0
