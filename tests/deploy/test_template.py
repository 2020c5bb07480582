"""Templates: what CloudFormation's own resource schemas take, and what stays secret."""

import dataclasses
import json
from typing import Any

import pytest
from cfnlint.api import ManualArgs, lint
from hypothesis import given

from peagle.deploy.catalog import load_catalog
from peagle.deploy.deployment import Autoscaling, Capture, Deployment, KeptSecret, Secret
from peagle.deploy.models import ModelSource
from peagle.deploy.request import DeploymentRequest, Lookups, new_deployment
from peagle.deploy.speculation import SpeculationFlags
from peagle.deploy.template import (
    deployment_of,
    endpoint_template,
    parameter_values,
    with_autoscaling,
)
from peagle.errors import UserError
from tests.deploy.deployments import ROLE, STAMP, TOPIC, a_deployment, deployments

SECRET = Secret("nobody_may_see_it")


def problems(template: dict[str, Any]) -> list[str]:
    """What cfn-lint, with the schemas of the resources, says of a template."""
    text = json.dumps(template)
    found = lint(text, config=ManualArgs(regions=["us-east-1"]))
    return [f"{one.rule.id} {one.message}" for one in found]


# Every option of the template, in as few templates as can hold them: a lint takes a second.
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no role, no region": {
        "role": None,
        "region": "",
        "image": "a/b:cu128",
        "ami": "al2-ami-sagemaker-inference-gpu-3-1",
        "capture_share": 1,
        "speculation": SpeculationFlags(speculation=False),
    },
    "native": {
        "source": "native",
        "image": "a/b:c",
        "alarm_topic": TOPIC,
        "tags": ("peagle-acceptance-length=3.1", "team=nlp"),
        "kms_key": "alias/mine",
        "env": ("MY_KEY=x", "A=b"),
        "hf_token": "hf_x",
    },
    "managed": {
        "alarm_topic": TOPIC,
        "subnets": ("subnet-12345678",),
        "security_groups": ("sg-12345678",),
        "min_instances": 2,
        "max_instances": 4,
        "scale_target": 16.0,
        "instance_count": 3,
        "instance_type": "ml.p5en.48xlarge",
        "startup_timeout_s": 3600,
        "capture_share": 0.2,
        "capture_kms_key": "arn:aws:kms:us-east-1:123456789012:key/mine",
        "vllm_flags": {"max-model-len": "4096"},
        "speculation": SpeculationFlags(draft="s3://mine/head/"),
    },
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gpt-oss-120b", {}),
        ("qwen3-coder-30b-a3b-instruct", {}),
        *(("gpt-oss-20b", options) for options in OPTIONS.values()),
    ],
    ids=["gpt-oss-120b", "qwen3", *OPTIONS],
)
def test_schemas_take_every_entry_and_option(name: str, options: dict[str, Any]) -> None:
    given = {"region": "us-east-1", "role": ROLE, **options}
    d = new_deployment(DeploymentRequest(name, **given), STAMP, Lookups(load_catalog()))
    assert problems(endpoint_template(d)) == []


@pytest.mark.slow
def test_the_lint_finds_what_is_wrong() -> None:
    template = endpoint_template(a_deployment())
    (variant,) = template["Resources"]["EndpointConfig"]["Properties"]["ProductionVariants"]
    variant["InstanceKind"] = "ml.g7e.2xlarge"
    assert any("InstanceKind" in problem for problem in problems(template))


@pytest.mark.slow
@given(deployments())
def test_a_template_tells_the_deployment_and_no_secret(d: Deployment) -> None:
    """Read back, all stays but what holds for one change; secrets are names of parameters."""
    template = endpoint_template(d)
    text = json.dumps(template)
    assert "nobody_may_see_it" not in text
    again = deployment_of(json.loads(text), "s2")
    known = {k: v for k, v in d.environment.items() if not isinstance(v, Secret)}
    assert {k: v for k, v in again.environment.items() if k in known} == known
    kept = dataclasses.replace(again, environment=d.environment, stamp=d.stamp)
    assert kept == dataclasses.replace(d, sets_count=False)
    # A second template has the same parameters, whose values stay.
    assert set(endpoint_template(again).get("Parameters", {})) == set(
        template.get("Parameters", {})
    )
    assert all(p.get("UsePreviousValue") for p in parameter_values(again))
    values = {p.get("ParameterValue") for p in parameter_values(d)} - {None}
    assert values == ({SECRET} if set(d.environment) - set(known) else set())


def test_tokens_are_references_to_secrets_manager() -> None:
    d = a_deployment(environment={"HF_TOKEN": SECRET, "DATABASE_URL": Secret("db://u:p@h")})
    template = endpoint_template(d)
    resources, parameters = template["Resources"], template["Parameters"]
    variables = resources["Model"]["Properties"]["PrimaryContainer"]["Environment"]
    (name,) = [key for key in resources if key.startswith("Secret")]
    assert variables["HF_TOKEN"] == {
        "Fn::Sub": f"{{{{resolve:secretsmanager:${{{name}}}:SecretString}}}}"
    }
    key = resources[name]["Properties"]["SecretString"]["Ref"]
    assert parameters[key]["NoEcho"] and parameters[variables["DATABASE_URL"]["Ref"]]["NoEcho"]
    # A new token is a new secret, or CloudFormation would see no change of the model.
    later = dataclasses.replace(d, stamp="s2")
    assert name not in endpoint_template(later)["Resources"]
    same = dataclasses.replace(later, environment={"HF_TOKEN": KeptSecret(key)})
    assert name in endpoint_template(same)["Resources"]


def test_secrets_among_options_of_vllm() -> None:
    d = a_deployment(vllm_flags={"ssl-key": SECRET})
    template = endpoint_template(d)
    assert "nobody" not in json.dumps(template)
    again = deployment_of(template, "s2")
    assert isinstance(again.vllm_flags["ssl-key"], KeptSecret)


def test_an_update_keeps_the_count_that_scaling_set() -> None:
    plain = endpoint_template(a_deployment())["Resources"]["Endpoint"]["Properties"]
    assert plain["RetainAllVariantProperties"] is True
    assert "ExcludeRetainedVariantProperties" not in plain
    told = endpoint_template(a_deployment(sets_count=True))["Resources"]["Endpoint"]["Properties"]
    assert told["ExcludeRetainedVariantProperties"] == [
        {"VariantPropertyType": "DesiredInstanceCount"}
    ]


def test_files_are_mounted_from_one_prefix() -> None:
    def data(**fields: Any) -> str:
        resources = endpoint_template(a_deployment(**fields))["Resources"]
        variant = resources["EndpointConfig"]["Properties"]["ProductionVariants"][0]
        container = resources["Model"]["Properties"]["PrimaryContainer"]
        assert ("ModelDataDownloadTimeoutInSeconds" in variant) == ("ModelDataSource" in container)
        source = container.get("ModelDataSource", {}).get("S3DataSource", {})
        return source.get("S3Uri", "")

    target, head = ModelSource("s3", "s3://b/t/"), ModelSource("s3", "s3://b/t/draft/")
    config = {"method": "eagle3", "num_speculative_tokens": 3}
    assert data() == ""
    assert data(target=target) == "s3://b/t/"
    assert data(target=target, draft=head, speculative_config=config) == "s3://b/t/"
    assert data(draft=head, speculative_config=config) == "s3://b/t/draft/"


def test_capture_is_of_inputs_and_outputs() -> None:
    def config(capture: Capture | None) -> dict[str, Any]:
        resources = endpoint_template(a_deployment(capture=capture))["Resources"]
        return resources["EndpointConfig"]["Properties"].get("DataCaptureConfig", {})

    assert config(None) == {}
    expected = {
        "EnableCapture": True,
        "InitialSamplingPercentage": 20,
        "DestinationS3Uri": "s3://b/c",
        "CaptureOptions": [{"CaptureMode": "Input"}, {"CaptureMode": "Output"}],
        "CaptureContentTypeHeader": {"JsonContentTypes": ["application/json"]},
    }
    assert config(Capture(20, "s3://b/c")) == expected
    assert config(Capture(20, "s3://b/c", "a-key")) == expected | {"KmsKeyId": "a-key"}


def test_alarms_have_what_they_need() -> None:
    def alarms(**fields: Any) -> set[str]:
        resources = endpoint_template(a_deployment(**fields))["Resources"]
        return {n for n, r in resources.items() if r["Type"] == "AWS::CloudWatch::Alarm"}

    told: dict[str, Any] = {
        "alarm_topic": TOPIC,
        "source": "native",
        "tags": {"peagle-acceptance-length": "3.1"},
        "draft": ModelSource("hub", "a/b"),
        "speculative_config": {"num_speculative_tokens": 3},
    }
    assert alarms(**told) == {"ServerErrors", "AcceptanceDrift"}
    assert alarms(**{**told, "alarm_topic": ""}) == set()
    for less in ({"source": "managed"}, {"tags": {}}, {"draft": None, "speculative_config": None}):
        assert alarms(**{**told, **less}) == {"ServerErrors"}


def test_scaling_alone_changes() -> None:
    template = endpoint_template(a_deployment())
    wanted = Autoscaling(1, 4, 8.0)
    scaled = with_autoscaling(template, wanted)
    assert scaled == endpoint_template(a_deployment(autoscaling=wanted))
    assert with_autoscaling(scaled, None) == template


@pytest.mark.parametrize(
    "metadata", [{}, {"peagle": "{"}, {"peagle": '{"endpoint_name": "x"}'}, {"peagle": 3}]
)
def test_templates_of_others(metadata: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="did not make the endpoint"):
        deployment_of({"Metadata": metadata, "Resources": {}}, "s2")
