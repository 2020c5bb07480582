"""Plans: every request is one that AWS takes, in order, with its opposite, and without secrets."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
from botocore.loaders import create_loader
from botocore.model import ServiceModel
from botocore.validate import ParamValidator
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from peagle.deploy import aws
from peagle.deploy.calls import Call
from peagle.deploy.current import deployed
from peagle.deploy.deployment import Autoscaling, Current, Deployment, Secret
from peagle.deploy.models import ModelSource
from peagle.deploy.plan import (
    Step,
    Upload,
    Wait,
    create_calls,
    delete_calls,
    reading_calls,
    shown,
    update_calls,
)
from peagle.deploy.uploads import Removal
from peagle.errors import UserError
from tests.deploy.wishes import AUTOSCALING, a_deployment, as_described, calls, deployments

MODELS = {
    name: ServiceModel(create_loader().load_service_model(name, "service-2"), name)
    for name in ("sagemaker", "s3", "application-autoscaling")
}
SOME = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A local model of two files."""
    made = tmp_path_factory.mktemp("model")
    (made / "config.json").write_text("{}")
    (made / "model.safetensors").write_bytes(b"12345")
    return made


def requests_of(step: Step) -> list[tuple[str, str, dict]]:
    """What is sent for a step, by what `plan` prints, and for its opposite."""
    printed = [shown(step)]
    if isinstance(step, Call) and step.undo is not None:
        printed.append(shown(step.undo))
    return [(p["service"], p["operation"], p["parameters"]) for p in printed]


def refusals(steps: list[Step]) -> list[str]:
    """What botocore has against the printed requests."""
    found = []
    for step in steps:
        for service, operation, parameters in requests_of(step):
            shape = MODELS[service].operation_model(operation).input_shape
            report = ParamValidator().validate(parameters, shape)
            found += [f"{operation}: {report.generate_report()}"] if report.has_errors() else []
    return found


@SOME
@given(data=st.data())
def test_botocore_takes_every_request_that_is_printed(folder: Path, data: st.DataObject) -> None:
    """Of create, update and delete; and the requests keep the patterns and bounds of the model."""
    old, new = data.draw(deployments(folder)), data.draw(deployments(folder))
    new = dataclasses.replace(new, endpoint_name=old.endpoint_name, stamp="20270102030405")
    current = as_described(old)
    plans = [create_calls(old), update_calls(new, current), delete_calls(current)]
    for steps in [*plans, reading_calls(current)]:
        assert refusals(steps) == []
        for step in steps:
            if isinstance(step, Call):
                aws.validate(step)


@SOME
@given(data=st.data())
def test_no_secret_is_printed(folder: Path, data: st.DataObject) -> None:
    deployment = data.draw(deployments(folder))
    given = {"HF_TOKEN": "hf_nobody", "DATABASE_URL": Secret("db://nobody")}
    deployment = dataclasses.replace(deployment, environment=given)
    steps = create_calls(deployment)
    assert "nobody" not in json.dumps([shown(step) for step in steps])
    # Yet it is sent.
    sent = calls(steps)["CreateModel"].parameters["PrimaryContainer"]["Environment"]
    assert sent["HF_TOKEN"] == "hf_nobody"


def test_what_was_given_with_env_stays_hidden_when_it_is_updated() -> None:
    """SageMaker tells the values back; nothing says any more which were secrets."""
    given = {"DATABASE_URL": Secret("db://nobody"), "MODE": "nobody-either"}
    old = as_described(a_deployment(environment=given, vllm_flags={"max-model-len": "4096"}))
    new = deployed(old, "1")
    assert new.environment == given and "nobody" not in repr(new)
    printed = json.dumps([shown(step) for step in update_calls(new, old)])
    assert "nobody" not in printed and "4096" in printed


@SOME
@given(data=st.data())
def test_what_is_made_can_be_unmade(folder: Path, data: st.DataObject) -> None:
    """Each call that creates has the deletion of that very name; the names are AWS's and unique."""
    deployment = data.draw(deployments(folder))
    for name, call in calls(create_calls(deployment)).items():
        if not name.startswith("Create"):
            continue
        assert call.undo is not None and call.undo.operation == name.replace("Create", "Delete")
        ((key, made),) = call.undo.parameters.items()
        assert call.parameters[key] == made and made in call.creates
        assert re.fullmatch(r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}", made)
        tags = {tag["Key"]: tag["Value"] for tag in call.parameters["Tags"]}
        assert tags["peagle:endpoint"] == deployment.endpoint_name


@SOME
@given(data=st.data())
def test_a_deployment_is_read_back_from_what_it_made(folder: Path, data: st.DataObject) -> None:
    """An update that changes nothing would create the same model and configuration again."""
    deployment = data.draw(deployments(folder))
    before = calls(create_calls(deployment))
    again = calls(create_calls(deployed(as_described(deployment), deployment.stamp)))
    for name in ("CreateModel", "CreateEndpointConfig"):
        one, other = dict(before[name].parameters), dict(again[name].parameters)
        # What was uploaded then is not uploaded again: the tag is only with the first.
        tags = [[t for t in x.pop("Tags") if t["Key"] != "peagle:uploads"] for x in (one, other)]
        assert sorted(map(str, tags[0])) == sorted(map(str, tags[1]))
        assert one == other


# ---- order ----------------------------------------------------------------------------------


def kinds(steps: list[Step]) -> list[str]:
    return [s.operation if isinstance(s, Call) else type(s).__name__ for s in steps]


def test_create_in_order(folder: Path) -> None:
    """Uploads first, scaling last, behind the wait: there must be something to scale."""
    local = ModelSource("local", str(folder))
    deployment = a_deployment(
        target=ModelSource("s3", "s3://bucket/model/"),
        draft=local,
        speculative_config={"method": "eagle3", "num_speculative_tokens": 5},
        autoscaling=Autoscaling(1, 4, 8.0),
        kms_key="alias/mine",
        startup_timeout_s=1200,
    )
    steps = create_calls(deployment)
    assert kinds(steps) == [
        *("Upload", "CreateModel", "CreateEndpointConfig", "CreateEndpoint", "Wait"),
        *("RegisterScalableTarget", "PutScalingPolicy"),
    ]
    upload, wait = steps[0], steps[4]
    prefix = "peagle/peagle-test/20260102030405/draft/"
    assert upload == Upload(folder, "bucket", prefix, 2, 7, "alias/mine")
    assert wait == Wait("peagle-test", 1800 + 2 * 1200)
    container = calls(steps)["CreateModel"].parameters["PrimaryContainer"]
    assert container["ModelDataSource"]["S3DataSource"] == {
        "S3Uri": "s3://bucket/model/",
        "S3DataType": "S3Prefix",
        "CompressionType": "None",
    }
    (channel,) = container["AdditionalModelDataSources"]
    assert channel["ChannelName"] == "drafter"
    assert channel["S3DataSource"]["S3Uri"] == f"s3://bucket/{prefix}"
    assert json.loads(container["Environment"]["SM_VLLM_SPECULATIVE_CONFIG"]) == {
        "method": "eagle3",
        "model": "/opt/ml/additional-model-data-sources/drafter/",
        "num_speculative_tokens": 5,
    }
    config = calls(steps)["CreateEndpointConfig"].parameters
    assert config["KmsKeyId"] == "alias/mine"
    (variant,) = config["ProductionVariants"]
    assert variant["ContainerStartupHealthCheckTimeoutInSeconds"] == 1200
    assert variant["ModelDataDownloadTimeoutInSeconds"] == 1200


def test_an_upload_is_shown_with_all_its_keys(folder: Path) -> None:
    printed = shown(Upload(folder, "bucket", "a/", 2, 7, "key"))
    assert printed["keys"] == ["a/config.json", "a/model.safetensors"]
    assert printed["parameters"] == {
        "Bucket": "bucket",
        "Key": "a/config.json",
        "ServerSideEncryption": "aws:kms",
        "SSEKMSKeyId": "key",
    }
    assert printed["bytes"] == 7


def test_the_head_is_left_out_without_speculation(folder: Path) -> None:
    deployment = a_deployment(draft=ModelSource("local", str(folder)))
    steps = create_calls(deployment)
    assert kinds(steps) == ["CreateModel", "CreateEndpointConfig", "CreateEndpoint", "Wait"]
    container = calls(steps)["CreateModel"].parameters["PrimaryContainer"]
    assert container["Environment"] == {"SM_VLLM_MODEL": "owner/target"}
    assert "AdditionalModelDataSources" not in container


def update_of(old: Deployment, **changes: object) -> list[Step]:
    new = dataclasses.replace(old, stamp="20270102030405", **changes)
    return update_calls(new, as_described(old))


def test_update_in_order() -> None:
    """New ones, the switch, the wait; only then do the old ones go. Undone, it switches back."""
    old = a_deployment()
    steps = update_of(old, instance_count=3)
    assert kinds(steps) == [
        *("CreateModel", "CreateEndpointConfig", "UpdateEndpoint", "Wait"),
        *("DeleteEndpointConfig", "DeleteModel"),
    ]
    update = calls(steps)["UpdateEndpoint"]
    assert update.parameters["EndpointConfigName"] == "peagle-test-20270102030405"
    assert update.undo is not None
    assert update.undo.parameters["EndpointConfigName"] == "peagle-test-20260102030405"
    gone = [s.parameters for s in steps if isinstance(s, Call) and s.operation.startswith("Delete")]
    assert gone == [
        {"EndpointConfigName": "peagle-test-20260102030405"},
        {"ModelName": "peagle-test-20260102030405"},
    ]


@given(before=st.none() | AUTOSCALING, after=st.none() | AUTOSCALING, moved=st.booleans())
def test_update_of_what_scales(
    before: Autoscaling | None, after: Autoscaling | None, moved: bool
) -> None:
    """SageMaker refuses another instance type for what scales: scaling ends before, undoably."""
    old = a_deployment(autoscaling=before)
    changes = {"instance_type": "ml.p5.4xlarge"} if moved else {}
    steps = update_of(old, autoscaling=after or before, **changes)
    order = kinds(steps)
    unscaled = [n for n, kind in enumerate(order) if kind == "DeregisterScalableTarget"]
    assert len(unscaled) == (moved and before is not None)
    assert all(n < order.index("UpdateEndpoint") for n in unscaled)
    if unscaled:
        call = steps[unscaled[0]]
        assert isinstance(call, Call) and call.undo is not None and before is not None
        undone = call.undo
        assert undone.operation == "RegisterScalableTarget"
        assert undone.parameters["MaxCapacity"] == before.max_instances
    wanted = after or before
    scaled = wanted is not None and (moved or wanted != before)
    assert ("PutScalingPolicy" in order[order.index("Wait") :]) == scaled


def test_update_removes_what_was_uploaded_and_is_read_no_more(folder: Path) -> None:
    local = ModelSource("local", str(folder))
    config = {"method": "eagle3", "num_speculative_tokens": 5}
    old = a_deployment(target=local, draft=local, speculative_config=config)
    old = dataclasses.replace(old, draft=ModelSource("s3", "s3://bucket/head/"))
    current = as_described(old)
    base = deployed(current, "20270102030405", "s3://bucket/")
    assert base.target.name == "s3://bucket/peagle/peagle-test/20260102030405/target/"
    kept = update_calls(dataclasses.replace(base, instance_count=2), current)
    assert not [step for step in kept if isinstance(step, Removal)]
    replaced = update_calls(dataclasses.replace(base, target=local), current)
    assert replaced[-1] == Removal("s3://bucket/peagle/peagle-test/20260102030405/target/")
    # The head is the user's own, and stays.
    assert sum(isinstance(step, Removal) for step in replaced) == 1
    # And the endpoint, which stays, learns where the new files are.
    (tag,) = calls(replaced)["AddTags"].parameters["Tags"]
    assert tag["Value"] == "s3://bucket/peagle/peagle-test/20270102030405/"


def test_delete_in_order() -> None:
    current = dataclasses.replace(
        as_described(a_deployment(autoscaling=Autoscaling(1, 2, 3.0))),
        leftovers=(("model", "old"), ("endpoint configuration", "old")),
        uploads=("s3://bucket/peagle/peagle-test/1/",),
    )
    assert kinds(delete_calls(current)) == [
        *("DeleteScalingPolicy", "DeregisterScalableTarget", "DeleteEndpoint"),
        *("DeleteEndpointConfig", "DeleteModel", "DeleteEndpointConfig", "DeleteModel"),
        "Removal",
    ]


def test_delete_of_what_is_half_there() -> None:
    """An endpoint whose configuration is gone."""
    assert kinds(delete_calls(Current("x", "us-east-1", "Failed"))) == ["DeleteEndpoint"]


@pytest.mark.parametrize("text", ["", "{", "[]"])
def test_a_configuration_that_somebody_broke(text: str) -> None:
    current = as_described(a_deployment(environment={"X": "1"}))
    container = dict(current.model["PrimaryContainer"])
    container["Environment"] = {"SM_VLLM_SPECULATIVE_CONFIG": text}
    broken = dataclasses.replace(current, model={**current.model, "PrimaryContainer": container})
    with pytest.raises(UserError, match="not a JSON object"):
        deployed(broken, "1")


@pytest.mark.parametrize("change", [{"tags": {}}, {"model": {}}, {"config": {}}])
def test_what_peagle_did_not_make_is_not_updated(change: dict) -> None:
    current = dataclasses.replace(as_described(a_deployment()), **change)
    with pytest.raises(UserError, match="cannot be updated from here"):
        deployed(current, "1")
