"""From a request to a deployment, and everything that is refused on the way."""

from __future__ import annotations

import dataclasses
import json
import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from peagle.deploy.catalog import load_catalog
from peagle.deploy.current import deployed
from peagle.deploy.deployment import Autoscaling, Deployment, Vpc, check_endpoint_name
from peagle.deploy.heads import HeadFacts, check_target, head_facts
from peagle.deploy.models import ModelSource
from peagle.deploy.plan import create_calls
from peagle.deploy.request import Lookups, Request, ScalingAsked
from peagle.deploy.speculation import Asked
from peagle.deploy.wanted import changed_deployment, name_of, new_deployment
from peagle.errors import UserError
from tests.conftest import make_target_folder
from tests.deploy.wishes import ROLE, STAMP, as_described

HUB_IMAGE = "763104351884.dkr.ecr.us-east-1.amazonaws.com/vllm:server-sagemaker-cuda-v2.2"


def hub_answer(**changes: Any) -> dict[str, Any]:
    document = {
        "HostingEcrUri": HUB_IMAGE,
        "InferenceEnvironmentVariables": [
            {
                "Name": "SM_VLLM_SPECULATIVE_CONFIG",
                "Default": '{"method": "eagle3", "model": "/opt/ml/model/draft", '
                '"num_speculative_tokens": 7, "parallel_drafting": true}',
            }
        ],
        "DefaultInferenceInstanceType": "ml.g7e.4xlarge",
        **changes,
    }
    return {"HubContentName": "x", "HubContentDocument": json.dumps(document)}


def lookups(
    answer: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None
) -> Lookups:
    """Who asks nobody: heads here are looked at, others are P-EAGLE heads."""

    def read_head(draft: ModelSource) -> HeadFacts | None:
        return head_facts(draft) if draft.kind == "local" else HeadFacts(True)

    def check(facts: HeadFacts, draft: ModelSource, target: ModelSource) -> None:
        if "local" in (draft.kind, target.kind) and target.kind != "hub":
            check_target(facts, draft, target)

    return Lookups(load_catalog(), read_head, check, lambda _: answer, environ or {})


def made(model: str, answer: Mapping[str, Any] | None = None, **said: Any) -> Deployment:
    """The deployment, with a role; no warning may come."""
    request = Request(model, "us-east-1", **{"role": ROLE, **said})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return new_deployment(request, STAMP, lookups(answer))


def refused(model: str, answer: Mapping[str, Any] | None = None, **said: Any) -> str:
    with pytest.raises(UserError) as caught:
        made(model, answer, **said)
    return str(caught.value)


# ---- create ---------------------------------------------------------------------------------


def test_one_click() -> None:
    found = made("gpt-oss-20b")
    assert found.endpoint_name == "peagle-gpt-oss-20b"
    assert (found.source, found.instance_type) == ("managed", "ml.g7e.2xlarge")
    assert found.target.name == "openai/gpt-oss-20b"
    assert found.draft == ModelSource("hub", "amazon/GPT-OSS-20B-P-EAGLE")
    assert found.num_speculative_tokens == 7
    assert found.image.endswith("us-east-1.amazonaws.com/vllm:server-sagemaker-cuda-v2.3")
    assert found.startup_timeout_s == 900 and found.instance_count == 1


@pytest.mark.parametrize("name", ["gpt-oss-120b", "gpt-oss-20b", "qwen3-coder-30b-a3b-instruct"])
@pytest.mark.parametrize("source", ["managed", "native"])
def test_every_entry_of_the_catalog(name: str, source: str) -> None:
    """Or it says why not, and what fits."""
    from peagle.deploy.container import environment
    from peagle.serving.sagemaker import arguments_from

    try:
        found = made(name, source=source, image="a/b:c" if source == "native" else None)
    except UserError as error:
        assert source == "native" and "does not fit" in str(error)
        return
    assert create_calls(found)
    if source == "native":
        arguments_from(environment(found), with_model=False)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"role": None}, "No role: .* Give --role, or set SAGEMAKER_ROLE"),
        ({"role": "sagemaker"}, "expected the ARN of an IAM role"),
        ({"name": "under_score"}, "The endpoint's name is 'under_score'"),
        ({"name": "x" * 64}, "1 to 63 letters"),
        ({"name": "-x"}, "no hyphen at either end"),
        ({"source": "native"}, "no image of it is published"),
        ({"instance_type": "ml.g5.xlarge", "model": "gpt-oss-120b"}, "it needs .* GiB"),
        ({"instance_type": "ml.m5.xlarge"}, "ml.m5.xlarge"),
        ({"startup_timeout_s": 59}, "60 to 3600"),
        ({"startup_timeout_s": 3601}, "60 to 3600"),
        ({"instance_count": 0}, "expected at least 1"),
        ({"kms_key": "two words"}, "id, ARN or alias of a key"),
        ({"tags": ("x",)}, "expected KEY=VALUE"),
        ({"tags": ("aws:x=1",)}, "does not begin with aws:"),
        ({"tags": ("a=<b>",)}, "expected KEY=VALUE"),
        ({"env": ("NOT_SET",)}, "'NOT_SET', which is not set here"),
        ({"env": ("1A=2",)}, "expected letters"),
        ({"subnets": ("subnet-1",)}, "0 security groups"),
        ({"security_groups": ("sg-1",)}, "0 subnets"),
        ({"upload_to": "bucket"}, "--upload-to is 'bucket'; expected a prefix in S3"),
        ({"model": "gpt-oss-2b"}, "Did you mean gpt-oss-20b"),
        (
            {"model": "Qwen/Qwen3-8B"},
            "does not know 'Qwen/Qwen3-8B'. Give one with --instance-type",
        ),
        ({"model": "gemma-4-31b-it", "source": "managed"}, "jumpstart"),
        ({"vllm_flags": {"pipeline-parallel-size": "2"}}, "not do over several stages"),
        ({"scaling": ScalingAsked(1, 2, 4.0)}, "expected 1 <= --min-instances"),
        ({"scaling": ScalingAsked(4)}, "the target is None: give --scale-from"),
        ({"scaling": ScalingAsked(4, 1, 0.0)}, "the target is 0.0"),
        ({"scaling": ScalingAsked(4, 1, 2.0, Path("x"))}, "contradict each other"),
        ({"speculative": Asked(config='{"parallel_drafting_spec": {}}')}, "candidate trees"),
    ],
)
def test_refused_before_anything_is_made(said: dict[str, Any], message: str) -> None:
    said = dict(said)
    assert re.search(message, refused(said.pop("model", "gpt-oss-20b"), **said))


def test_options_reach_the_deployment() -> None:
    found = made(
        "gpt-oss-20b",
        name="chat",
        tags=("team=nlp", "cost=a=b"),
        env=("A=1", "MY_TOKEN=secret", "B=", "DATABASE_URL=db://user:pass@host"),
        subnets=("subnet-1",),
        security_groups=("sg-1", "sg-2"),
        kms_key="alias/mine",
        upload_to="s3://mine/models",
        instance_count=2,
        startup_timeout_s=1800,
        ami="an-ami",
        hf_token="hf_x",
        vllm_flags={"max-model-len": "4096"},
        scaling=ScalingAsked(4, 2, 16.0),
    )
    assert found.tags == {"team": "nlp", "cost": "a=b"}
    variables = {"A": "1", "MY_TOKEN": "secret", "B": "", "DATABASE_URL": "db://user:pass@host"}
    assert found.environment == {**variables, "HF_TOKEN": "hf_x"}
    assert not any(word in repr(found) for word in ("secret", "hf_x", "user:pass", "'1'"))
    assert found.vpc == Vpc(("subnet-1",), ("sg-1", "sg-2"))
    assert (found.kms_key, found.bucket, found.ami) == ("alias/mine", "s3://mine/models/", "an-ami")
    assert (found.instance_count, found.startup_timeout_s) == (2, 1800)
    assert found.vllm_flags == {"max-model-len": "4096", "max-num-seqs": "128"}
    assert found.autoscaling == Autoscaling(2, 4, 16.0)


def test_role_and_variables_of_this_process() -> None:
    environ = {"SAGEMAKER_ROLE": ROLE, "HERE": "value"}
    request = Request("gpt-oss-20b", "us-east-1", env=("HERE",))
    found = new_deployment(request, STAMP, lookups(environ=environ))
    assert (found.role, found.environment) == (ROLE, {"HERE": "value"})
    assert found.bucket == "s3://sagemaker-us-east-1-123456789012/"


@pytest.mark.parametrize(
    ("source", "flag"), [("managed", "tensor-parallel-size"), ("native", "data-parallel-size")]
)
def test_all_gpus_of_an_instance_are_used(source: str, flag: str) -> None:
    said: dict[str, Any] = {"source": source, "image": "a/b:c", "instance_type": "ml.p5en.48xlarge"}
    assert made("gpt-oss-20b", **said).vllm_flags[flag] == "8"
    told = made("gpt-oss-20b", vllm_flags={flag: "2"}, **said)
    assert told.vllm_flags[flag] == "2"
    assert flag not in made("gpt-oss-20b", **{**said, "instance_type": None}).vllm_flags


def test_models_here(
    head_folders: Callable[..., Path], target_folder: Path, tmp_path: Path
) -> None:
    """Their own checks: the head is of this target, of its kind, and its depth is known."""
    head = str(head_folders(parallel=False))
    said: dict[str, Any] = {"instance_type": "ml.g6.xlarge", "speculative": Asked(draft=head)}
    found = made(str(target_folder), **said)
    assert found.target.kind == found.draft.kind == "local"  # type: ignore[union-attr]
    assert found.speculative_config == {
        "method": "eagle3",
        "num_speculative_tokens": 7,
        "parallel_drafting": False,
    }
    assert found.served_model_name == found.endpoint_name == "peagle-" + target_folder.name
    other = make_target_folder(tmp_path / "other", hidden_size=64, head_dim=16)
    assert "is of another target" in refused(str(other), **said)


def test_a_model_without_a_head_is_told() -> None:
    request = Request("a/b", "us-east-1", role=ROLE, instance_type="ml.g6.xlarge")
    with pytest.warns(UserWarning) as caught:
        found = new_deployment(request, STAMP, lookups())
    assert not found.speculation
    told = [str(warning.message) for warning in caught]
    assert any("served without speculation. Name a head with --draft" in text for text in told)
    assert any("was not checked" in text for text in told)


def test_a_gated_model_needs_a_token(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        'format_version = 1\n[models.mine]\ntarget = "a/b"\nprecision = "bf16"\n'
        'weights_gib = 1.0\ninstance_types = ["ml.g6.xlarge"]\ngated = true\n'
    )
    request = Request("mine", "us-east-1", role=ROLE)
    mine = dataclasses.replace(lookups(), entries=load_catalog([file]))
    with pytest.warns(UserWarning) as caught:
        new_deployment(request, STAMP, mine)
    assert any("a/b is gated on the hub" in str(warning.message) for warning in caught)


@pytest.mark.parametrize("name", ["Meta.Llama_3", "a" * 80, "--x--", "über/straße"])
def test_names_are_made_of_models(name: str) -> None:
    assert check_endpoint_name(name_of(None, ModelSource("hub", f"owner/{name}")))


# ---- SageMaker's hub ------------------------------------------------------------------------


def test_what_the_hub_says() -> None:
    found = made("gpt-oss-20b", hub_answer(), source="jumpstart")
    assert (found.source, found.image) == ("jumpstart", HUB_IMAGE)
    assert (found.instance_type, found.draft) == ("ml.g7e.4xlarge", None)
    assert found.speculative_config == {
        "method": "eagle3",
        "model": "/opt/ml/model/draft",
        "num_speculative_tokens": 7,
        "parallel_drafting": True,
    }
    deeper = made(
        "gpt-oss-20b",
        hub_answer(),
        source="jumpstart",
        speculative=Asked(num_speculative_tokens=3),
    )
    assert deeper.num_speculative_tokens == 3
    plain = made(
        "gpt-oss-20b", hub_answer(), source="jumpstart", speculative=Asked(speculation=False)
    )
    assert plain.speculative_config is None
    # A model of the hub that the catalog does not know.
    assert made("any-model", hub_answer(), source="jumpstart").endpoint_name == "peagle-any-model"


def test_the_hub_without_a_head_takes_the_catalogs() -> None:
    answer = hub_answer(InferenceEnvironmentVariables=[])
    found = made("gpt-oss-20b", answer, source="jumpstart")
    assert found.draft == ModelSource("hub", "amazon/GPT-OSS-20B-P-EAGLE")
    assert found.num_speculative_tokens == 7


def test_a_hub_that_does_not_answer() -> None:
    found = made("gpt-oss-20b", None, source="jumpstart")
    assert (found.source, found.hub_model) == ("managed", None)
    assert "does not tell about" in refused("gemma-4-31b-it", None)
    assert "does not tell about 'any'" in refused("any", None, source="jumpstart")


def test_a_gated_model_of_the_hub() -> None:
    answer = hub_answer(GatedBucket=True, HostingArtifactUri="m/")
    assert "give --accept-eula" in refused("gpt-oss-20b", answer, source="jumpstart")
    found = made("gpt-oss-20b", answer, source="jumpstart", accept_eula=True)
    assert found.hub_model is not None and found.accept_eula


# ---- update ---------------------------------------------------------------------------------


def changed(base: Deployment, model: str = "", **said: Any) -> Deployment:
    there = deployed(as_described(base), "20270102030405")
    request = Request(model, "us-east-1", **said)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return changed_deployment(there, request, lookups())


BASE = dataclasses.replace(made("gpt-oss-20b", instance_count=3), tags={"team": "nlp"})


@pytest.mark.parametrize(
    ("said", "changes"),
    [
        ({}, {}),
        ({"instance_count": 5}, {"instance_count": 5}),
        ({"instance_type": "ml.p5.4xlarge"}, {"instance_type": "ml.p5.4xlarge"}),
        ({"startup_timeout_s": 1200}, {"startup_timeout_s": 1200}),
        ({"tags": ("a=b",)}, {"tags": {"team": "nlp", "a": "b"}}),
        ({"env": ("A=1",)}, {"environment": {"A": "1"}}),
        (
            {"vllm_flags": {"seed": "1"}},
            {"vllm_flags": {"max-model-len": "32768", "max-num-seqs": "128", "seed": "1"}},
        ),
        (
            {"image": "a/b:cu128"},
            {"image": "a/b:cu128", "ami": "al2-ami-sagemaker-inference-gpu-3-1"},
        ),
        ({"speculative": Asked(speculation=False)}, {"draft": None, "speculative_config": None}),
        (
            {"speculative": Asked(num_speculative_tokens=5)},
            {
                "speculative_config": {
                    **(BASE.speculative_config or {}),
                    "num_speculative_tokens": 5,
                }
            },
        ),
        ({"speculative": Asked(draft="a/b")}, {"draft": ModelSource("hub", "a/b")}),
        ({"scaling": ScalingAsked(4, 1, 8.0)}, {"autoscaling": Autoscaling(1, 4, 8.0)}),
    ],
)
def test_what_is_not_said_stays(said: dict[str, Any], changes: dict[str, Any]) -> None:
    expected = dataclasses.replace(
        BASE, stamp="20270102030405", bucket="s3://sagemaker-us-east-1-123456789012/", **changes
    )
    assert changed(BASE, **said) == expected


def test_drafts_again() -> None:
    """Turned off and on: the head is the catalog's again."""
    off = dataclasses.replace(BASE, draft=None, speculative_config=None)
    assert changed(off, instance_count=4).speculative_config is None
    on = changed(off, speculative=Asked(speculation=True))
    assert (on.draft, on.speculative_config) == (BASE.draft, BASE.speculative_config)


def test_another_model_takes_its_own_head() -> None:
    other = changed(BASE, "gpt-oss-120b")
    assert other.target.name == "openai/gpt-oss-120b"
    assert other.draft == ModelSource("hub", "amazon/gpt-oss-120b-p-eagle")
    assert other.num_speculative_tokens == 5


def test_gpus_follow_the_instance_type() -> None:
    large = changed(BASE, instance_type="ml.p5en.48xlarge")
    assert large.vllm_flags["tensor-parallel-size"] == "8"
    small = changed(dataclasses.replace(large, stamp=STAMP), instance_type="ml.g7e.2xlarge")
    assert "tensor-parallel-size" not in small.vllm_flags


def test_the_hubs_deployment_stays_the_hubs() -> None:
    base = made("gpt-oss-20b", hub_answer(), source="jumpstart")
    again = changed(base, speculative=Asked(num_speculative_tokens=2))
    assert again.num_speculative_tokens == 2 and again.hub_model is not None
    assert again.speculative_config["model"] == "/opt/ml/model/draft"  # type: ignore[index]
    with pytest.raises(UserError, match="its model cannot be changed"):
        changed(base, "gpt-oss-120b")
