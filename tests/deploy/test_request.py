"""From a request to a deployment, and everything that is refused on the way."""

import dataclasses
import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from peagle.deploy import model_files
from peagle.deploy.catalog import CatalogEntry, load_catalog
from peagle.deploy.container import container_environment
from peagle.deploy.deployment import (
    Autoscaling,
    Capture,
    Deployment,
    Transfer,
    Vpc,
    check_endpoint_name,
)
from peagle.deploy.memory import GIB, ModelFacts
from peagle.deploy.model_files import HeadFacts
from peagle.deploy.models import ModelSource
from peagle.deploy.request import (
    DeploymentRequest,
    Lookups,
    changed_deployment,
    new_deployment,
    require_role,
)
from peagle.deploy.speculation import SpeculationFlags
from peagle.deploy.template import deployment_of, endpoint_template
from peagle.errors import UserError
from peagle.models.checkpoint import LENGTH_KEY
from peagle.serving.sagemaker import arguments_from
from tests.conftest import make_target_folder
from tests.deploy.deployments import ROLE, STAMP

PREFIX = f"s3://sagemaker-us-east-1-123456789012/peagle/chat/{STAMP}/"


@pytest.fixture(autouse=True)
def _no_role(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SAGEMAKER_ROLE", raising=False)


def made(model: str, **options: Any) -> Deployment:
    """The deployment, with a role; no warning may come."""
    request = DeploymentRequest(model, "us-east-1", **{"role": ROLE, **options})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return new_deployment(request, STAMP, Lookups(load_catalog()))


def refused(model: str, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        made(model, **options)
    return str(caught.value)


# ---- create ----


def test_one_click() -> None:
    found = made("gpt-oss-20b")
    assert found.endpoint_name == "peagle-gpt-oss-20b"
    assert (found.source, found.instance_type) == ("managed", "ml.g7e.2xlarge")
    assert found.target.name == "openai/gpt-oss-20b"
    assert found.draft == ModelSource("hub", "amazon/GPT-OSS-20B-P-EAGLE")
    assert found.num_speculative_tokens == 7
    assert found.image.endswith("us-east-1.amazonaws.com/vllm:server-sagemaker-cuda-v2.3")
    assert found.startup_timeout_s == 900 and found.instance_count == 1


@pytest.mark.parametrize(
    ("entry", "source"), [(e, s) for e in load_catalog().values() for s in e.sources], ids=str
)
def test_every_entry_of_the_catalog_from_every_source_that_it_lists(
    entry: CatalogEntry, source: str
) -> None:
    options: dict[str, Any] = {"source": source, "image": "a/b:c" if source == "native" else None}
    if entry.is_head_in_jumpstart:
        options["speculation"] = SpeculationFlags(draft="me/head")
    found = made(entry.name, **options)
    assert endpoint_template(found)
    if source == "native":
        arguments_from(container_environment(found), with_model=False)


@pytest.mark.parametrize("model", ["gemma-4-31b-it", "google/gemma-4-31B-it"])
@pytest.mark.parametrize(
    ("flags", "config"),
    [
        (SpeculationFlags(draft="me/head"), {"method": "eagle3", "num_speculative_tokens": 7}),
        (
            SpeculationFlags(config='{"model": "me/head", "num_speculative_tokens": 3}'),
            {"method": "eagle3", "num_speculative_tokens": 3},
        ),
        (
            SpeculationFlags(config='{"method": "ngram", "num_speculative_tokens": 4}'),
            {"method": "ngram", "num_speculative_tokens": 4},
        ),
        (SpeculationFlags(speculation=False), None),
    ],
)
def test_a_model_whose_head_only_jumpstart_has(
    model: str, flags: SpeculationFlags, config: dict[str, Any] | None
) -> None:
    found = made(model, speculation=flags)
    assert found.target == ModelSource("hub", "google/gemma-4-31B-it")
    assert found.instance_type == "ml.g7e.2xlarge"
    has_head = config is not None and config["method"] == "eagle3"
    assert found.draft == (ModelSource("hub", "me/head") if has_head else None)
    parallel = {"parallel_drafting": True} if has_head else {}
    assert found.speculative_config == (config and config | parallel)


@pytest.mark.parametrize(
    ("options", "message"),
    [
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
            {"model": "Qwen/Qwen3-14B"},
            "does not know 'Qwen/Qwen3-14B'. Give one with --instance-type",
        ),
        (
            {"model": "gemma-4-31b-it"},
            r"with --draft .* or --speculative-config, take --no-speculation, or deploy "
            "JumpStart's in SageMaker Studio as 'huggingface-vlm-gemma-4-31b-it'",
        ),
        (
            {"model": "gemma-4-31b-it", "speculation": SpeculationFlags(num_speculative_tokens=5)},
            "No draft head is known for this model, and none was named. Name one with --draft",
        ),
        ({"source": "jumpstart"}, "expected one of managed, native"),
        ({"vllm_flags": {"pipeline-parallel-size": "2"}}, "not do over several stages"),
        ({"max_instances": 1, "min_instances": 2, "scale_target": 4.0}, "expected 1 <= fewest"),
        ({"max_instances": 4}, "without a target: give --scale-from"),
        ({"max_instances": 4, "scale_target": 0.0}, "The target is 0.0"),
        (
            {"max_instances": 4, "scale_target": 2.0, "scale_from": Path("x")},
            "contradict each other",
        ),
        (
            {"speculation": SpeculationFlags(config='{"parallel_drafting_spec": {}}')},
            "candidate trees",
        ),
    ],
)
def test_refused_before_anything_is_made(options: dict[str, Any], message: str) -> None:
    options = dict(options)
    assert re.search(message, refused(options.pop("model", "gpt-oss-20b"), **options))


def test_options_reach_the_deployment() -> None:
    found = made(
        "gpt-oss-20b",
        name="chat",
        tags=("team=nlp", "cost=a=b"),
        env=("A=1", "MY_TOKEN=secret", "B=", "DATABASE_URL=db://user:pass@host"),
        subnets=("subnet-1",),
        security_groups=("sg-1", "sg-2"),
        kms_key="alias/mine",
        instance_count=2,
        startup_timeout_s=1800,
        ami="an-ami",
        hf_token="hf_x",
        vllm_flags={"max-model-len": "4096"},
        min_instances=2,
        max_instances=4,
        scale_target=16.0,
    )
    assert found.tags == {"team": "nlp", "cost": "a=b"}
    variables = {"A": "1", "MY_TOKEN": "secret", "B": "", "DATABASE_URL": "db://user:pass@host"}
    assert found.environment == {**variables, "HF_TOKEN": "hf_x"}
    assert not any(word in repr(found) for word in ("secret", "hf_x", "user:pass", "'1'"))
    assert found.vpc == Vpc(("subnet-1",), ("sg-1", "sg-2"))
    assert (found.kms_key, found.ami) == ("alias/mine", "an-ami")
    assert (found.instance_count, found.startup_timeout_s) == (2, 1800)
    assert found.vllm_flags == {"max-model-len": "4096", "max-num-seqs": "128"}
    assert found.autoscaling == Autoscaling(2, 4, 16.0)


def test_role_and_variables_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAGEMAKER_ROLE", ROLE)
    monkeypatch.setenv("HERE", "value")
    found = made("gpt-oss-20b", env=("HERE",), role=None)
    assert (found.role, found.environment) == (ROLE, {"HERE": "value"})


def test_plans_need_no_role() -> None:
    found = made("gpt-oss-20b", role=None)
    with pytest.raises(UserError, match=r"No role: .* Give --role, or set SAGEMAKER_ROLE"):
        require_role(found)


@pytest.mark.parametrize(
    ("source", "flag"), [("managed", "tensor-parallel-size"), ("native", "data-parallel-size")]
)
def test_all_gpus_of_an_instance_are_used(source: str, flag: str) -> None:
    options: dict[str, Any] = {
        "source": source,
        "image": "a/b:c",
        "instance_type": "ml.p5en.48xlarge",
    }
    assert made("gpt-oss-20b", **options).vllm_flags[flag] == "8"
    told = made("gpt-oss-20b", vllm_flags={flag: "2"}, **options)
    assert told.vllm_flags[flag] == "2"
    assert flag not in made("gpt-oss-20b", **{**options, "instance_type": None}).vllm_flags


def test_models_here(
    head_folders: Callable[..., Path], target_folder: Path, tmp_path: Path
) -> None:
    """Their own checks: the head is of this target, of its kind, and its depth is known."""
    head = str(head_folders(parallel=False))
    options: dict[str, Any] = {
        "instance_type": "ml.g6.xlarge",
        "speculation": SpeculationFlags(draft=head),
    }
    found = made(str(target_folder), name="chat", **options)
    assert found.transfers == (
        Transfer(ModelSource("local", str(target_folder)), f"{PREFIX}target/"),
        Transfer(ModelSource("local", head), f"{PREFIX}target/peagle/chat/{STAMP}/draft/"),
    )
    assert [transfer.uri for transfer in found.transfers] == list(found.uploads)
    assert found.speculative_config == {
        "method": "eagle3",
        "num_speculative_tokens": 7,
        "parallel_drafting": False,
    }
    assert found.served_model_name == "chat"
    other = make_target_folder(tmp_path / "other", hidden_size=64, head_dim=16)
    assert "is of another target" in refused(str(other), **options)


def trained_on(head: Path, tokens: int) -> Path:
    """The head, which says that no text of its training was longer."""
    file = head / "config.json"
    config = json.loads(file.read_text())
    config["peagle"][LENGTH_KEY] = tokens
    file.write_text(json.dumps(config))
    return head


BEYOND = r"was trained on texts of up to 64 tokens, and its config.json has no window: vLLM"


@pytest.mark.parametrize(
    ("parallel", "context", "source", "asked"),
    [
        (True, "64", "managed", None),
        (True, "65", "managed", "max-model-len is 65, but"),
        (True, "1k", "managed", "max-model-len is 1000, but"),
        (True, None, "managed", "max-model-len is 256, but"),  # the target's own
        (True, "65", "native", None),
        (False, "65", "managed", None),
    ],
)
def test_contexts_beyond_the_heads_training(
    parallel: bool,
    context: str | None,
    source: str,
    asked: str | None,
    head_folders: Callable[..., Path],
    target_folder: Path,
) -> None:
    head = trained_on(head_folders(parallel=parallel), 64)
    options: dict[str, Any] = {
        "source": source,
        "image": "a/b:c",
        "instance_type": "ml.g6.xlarge",
        "speculation": SpeculationFlags(draft=str(head)),
        "vllm_flags": {} if context is None else {"max-model-len": context},
    }
    if asked is None:
        assert made(str(target_folder), **options).vllm_flags["max-model-len"] == context
        return
    with pytest.raises(UserWarning, match=f"{asked} the head .* {BEYOND}"):
        made(str(target_folder), **options)


def test_a_head_with_windows_may_have_longer_contexts(
    head_folders: Callable[..., Path], target_folder: Path
) -> None:
    head = trained_on(head_folders(windows=(64, 64)), 64)
    options = {"instance_type": "ml.g6.xlarge", "vllm_flags": {"max-model-len": "65"}}
    found = made(str(target_folder), speculation=SpeculationFlags(draft=str(head)), **options)
    assert found.vllm_flags["max-model-len"] == "65"


@pytest.mark.filterwarnings("ignore:peagle did not check")
def test_a_context_that_nobody_knows_may_be_beyond_the_heads_training(
    head_folders: Callable[..., Path],
) -> None:
    head = trained_on(head_folders(), 64)
    request = DeploymentRequest(
        "me/model",
        instance_type="ml.g6.xlarge",
        speculation=SpeculationFlags(draft=str(head)),
    )
    with pytest.warns(UserWarning, match=f"max-model-len is not given, but the head .* {BEYOND}"):
        new_deployment(request, STAMP, Lookups(load_catalog()))


@pytest.mark.parametrize(
    ("target", "draft", "transfers", "path"),
    [
        (
            "s3://mine/t/",
            "s3://mine/h/",
            [f"s3://mine/t/peagle/chat/{STAMP}/draft/"],
            f"peagle/chat/{STAMP}/draft/",
        ),
        ("s3://mine/t/", "s3://mine/t/draft", [], "draft/"),
        ("a/b", "s3://mine/h/", [], ""),
    ],
)
@pytest.mark.filterwarnings("ignore:peagle did not check")
def test_a_head_in_s3_lies_below_its_target(
    target: str, draft: str, transfers: list[str], path: str
) -> None:
    """A container mounts one prefix; a head of the hub's model is the prefix itself."""
    request = DeploymentRequest(
        target,
        "us-east-1",
        name="chat",
        role=ROLE,
        kms_key="alias/mine",
        instance_type="ml.g6.xlarge",
        speculation=SpeculationFlags(draft=draft),
    )
    found = new_deployment(request, STAMP, Lookups(load_catalog()))
    assert [transfer.uri for transfer in found.transfers] == transfers
    assert all(transfer.kms_key == "alias/mine" for transfer in found.transfers)
    config = container_environment(found)["SM_VLLM_SPECULATIVE_CONFIG"]
    assert f'"model":"/opt/ml/model/{path}"' in config


def test_uploads_have_a_place(head_folders: Callable[..., Path]) -> None:
    head = SpeculationFlags(draft=str(head_folders()))
    request = DeploymentRequest("a/b", upload_to="s3://mine/models", name="chat", speculation=head)
    options: dict[str, Any] = {"instance_type": "ml.g6.xlarge"}
    with pytest.warns(UserWarning, match="did not check"):
        found = new_deployment(
            dataclasses.replace(request, **options), STAMP, Lookups(load_catalog())
        )
        usual = new_deployment(
            dataclasses.replace(request, upload_to=None, **options), STAMP, Lookups(load_catalog())
        )
    assert found.uploads == (f"s3://mine/models/peagle/chat/{STAMP}/draft/",)
    assert usual.uploads[0].startswith("s3://sagemaker-${AWS::Region}-${AWS::AccountId}/peagle/")


def test_a_model_without_a_head_is_told() -> None:
    request = DeploymentRequest("a/b", "us-east-1", role=ROLE, instance_type="ml.g6.xlarge")
    with pytest.warns(UserWarning) as caught:
        found = new_deployment(request, STAMP, Lookups(load_catalog()))
    assert found.speculative_config is None
    told = [str(warning.message) for warning in caught]
    assert any("served without speculation. Name a head with --draft" in text for text in told)
    assert any("did not check" in text for text in told)


def test_a_gated_model_needs_a_token(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        'format_version = 1\n[models.mine]\ntarget = "a/b"\nprecision = "bf16"\n'
        'weights_gib = 1.0\ninstance_types = ["ml.g6.xlarge"]\ngated = true\n'
    )
    request = DeploymentRequest("mine", "us-east-1", role=ROLE)
    mine = Lookups(load_catalog([file]))
    with pytest.warns(UserWarning) as caught:
        new_deployment(request, STAMP, mine)
    assert any("a/b is gated on the hub" in str(warning.message) for warning in caught)


@pytest.mark.parametrize("name", ["Meta.Llama_3", "a" * 80, "--x--", "über/straße"])
def test_names_are_made_of_models(name: str, tmp_path: Path) -> None:
    """A folder may have any name."""
    folder = make_target_folder(tmp_path / name.replace("/", "_"))
    options: dict[str, Any] = {"instance_type": "ml.g6.xlarge"}
    options["speculation"] = SpeculationFlags(speculation=False)
    assert check_endpoint_name(made(str(folder), **options).endpoint_name)


# ---- update ----


def changed(base: Deployment, model: str = "", **options: Any) -> Deployment:
    there = deployment_of(endpoint_template(base), "s2")
    request = DeploymentRequest(model, "us-east-1", **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return changed_deployment(there, request, Lookups(load_catalog()))


BASE = dataclasses.replace(made("gpt-oss-20b", instance_count=3), tags={"team": "nlp"})


@pytest.mark.parametrize(
    ("options", "changes"),
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
        (
            {"speculation": SpeculationFlags(speculation=False)},
            {"draft": None, "speculative_config": None},
        ),
        (
            {"speculation": SpeculationFlags(num_speculative_tokens=5)},
            {
                "speculative_config": {
                    **(BASE.speculative_config or {}),
                    "num_speculative_tokens": 5,
                }
            },
        ),
        ({"speculation": SpeculationFlags(draft="a/b")}, {"draft": ModelSource("hub", "a/b")}),
        ({"max_instances": 4, "scale_target": 8.0}, {"autoscaling": Autoscaling(1, 4, 8.0)}),
    ],
)
def test_options_that_are_not_given_stay(options: dict[str, Any], changes: dict[str, Any]) -> None:
    expected = dataclasses.replace(
        BASE, stamp="s2", sets_count="instance_count" in options, **changes
    )
    assert changed(BASE, **options) == expected


def test_capture_is_changed_and_ended() -> None:
    default = "s3://sagemaker-us-east-1-123456789012/peagle/peagle-gpt-oss-20b/capture"
    assert changed(BASE, capture_share=0.07).capture == Capture(7, default)
    base = dataclasses.replace(BASE, capture=Capture(7, "s3://bucket/c", "a-key"))
    assert changed(base, instance_count=4).capture == base.capture
    assert changed(base, capture_share=1).capture == Capture(100, "s3://bucket/c", "a-key")
    assert changed(base, capture_to="s3://mine", capture_kms_key="").capture == Capture(
        7, "s3://mine"
    )
    assert changed(base, capture_share=0).capture is None


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"capture_share": 20}, "--capture-share is 20; expected a share of 0 to 1"),
        ({"capture_share": float("nan")}, "--capture-share is nan; expected"),
        ({"capture_share": 0.125}, "is 0.125; expected a share of 0 to 1 in whole percent"),
        ({"capture_to": "s3://bucket/c"}, "--capture-to is given, but nothing is captured"),
        ({"capture_kms_key": "a-key"}, "--capture-kms-key is given, but nothing is captured"),
        ({"capture_share": 1, "capture_to": "bucket/c"}, "--capture-to is 'bucket/c'; expected"),
        ({"capture_share": 1, "capture_kms_key": "a key"}, "--capture-kms-key is 'a key'; exp"),
    ],
)
def test_captures_that_are_refused(options: dict[str, Any], told: str) -> None:
    assert told in refused("gpt-oss-20b", **options)


def test_a_longer_context_asks_for_the_heads_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the head that drafts now, which an update of other options does not read."""
    facts = HeadFacts(True, 8, 64, {})
    monkeypatch.setattr(model_files, "head_facts", lambda *_: facts)
    monkeypatch.setattr(model_files, "check_target", lambda *_: None)
    monkeypatch.setattr(model_files, "facts_of_hub", lambda _: ModelFacts(GIB, "bf16"))
    own = made("gpt-oss-20b", speculation=SpeculationFlags(draft="me/head"))
    there, lookups = (
        deployment_of(endpoint_template(own), "s2"),
        Lookups(load_catalog(), s3=object()),
    )
    longer = DeploymentRequest("", "us-east-1", vllm_flags={"max-model-len": "4096"})
    with pytest.warns(UserWarning, match=f"max-model-len is 4096, but the head 'me/head' {BEYOND}"):
        found = changed_deployment(there, longer, lookups)
    assert (found.draft, found.speculative_config) == (own.draft, own.speculative_config)
    off = dataclasses.replace(there, draft=None, speculative_config=None)
    assert changed_deployment(off, longer, lookups).speculative_config is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other = dataclasses.replace(longer, vllm_flags={"seed": "1"})
        assert changed_deployment(there, other, lookups).vllm_flags["seed"] == "1"


def test_an_own_head_of_a_model_of_the_catalog_keeps_its_kind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The catalog's facts are those of its own head alone."""
    monkeypatch.setattr(model_files, "head_facts", lambda *_: HeadFacts(False))
    monkeypatch.setattr(model_files, "check_target", lambda *_: None)
    monkeypatch.setattr(model_files, "facts_of_hub", lambda _: ModelFacts(GIB, "bf16"))
    lookups = Lookups(load_catalog(), s3=object())
    eagle3 = SpeculationFlags(config='{"model": "me/eagle3", "parallel_drafting": false}')
    own = made("gpt-oss-20b", speculation=eagle3)
    fewer = SpeculationFlags(num_speculative_tokens=3)
    request = DeploymentRequest("", "us-east-1", speculation=fewer)
    found = changed_deployment(deployment_of(endpoint_template(own), "s2"), request, lookups)
    assert found.draft == ModelSource("hub", "me/eagle3")
    assert found.speculative_config == {
        "method": "eagle3",
        "num_speculative_tokens": 3,
        "parallel_drafting": False,
    }


def test_drafts_again() -> None:
    """Turned off and on: the head is the catalog's again."""
    off = dataclasses.replace(BASE, draft=None, speculative_config=None)
    assert changed(off, instance_count=4).speculative_config is None
    on = changed(off, speculation=SpeculationFlags(speculation=True))
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


def test_uploads_that_are_no_longer_read_are_forgotten() -> None:
    old = (
        "s3://mine/peagle/chat/s1/target/",
        "s3://mine/peagle/chat/s1/target/peagle/chat/s1/draft/",
    )
    base = dataclasses.replace(
        BASE,
        target=ModelSource("s3", old[0]),
        draft=ModelSource("s3", old[1]),
        uploads=old,
    )
    with pytest.warns(UserWarning, match="did not check"):
        there = deployment_of(endpoint_template(base), "s2")
        request = DeploymentRequest(
            "", "us-east-1", speculation=SpeculationFlags(speculation=False)
        )
        found = changed_deployment(there, request, Lookups(load_catalog()))
    assert found.uploads == old[:1]


# ---- sizes of models on the hub ----


@pytest.mark.parametrize(
    ("instance_type", "flags", "told"),
    [
        ("ml.g5.xlarge", {}, "does not fit ml.g5.xlarge: it needs 52.0 GiB on one GPU"),
        ("ml.g5.12xlarge", {}, ""),  # 50/4 + 2 GiB on each of 4 GPUs
        ("ml.g5.12xlarge", {"data-parallel-size": "4"}, "it needs 52.0 GiB on one GPU"),
        ("ml.g6e.xlarge", {"gpu-memory-utilization": "0.5"}, r"may be used \(50%\)"),
    ],
)
def test_a_model_of_the_hub_that_is_too_large(
    monkeypatch: pytest.MonkeyPatch, instance_type: str, flags: dict[str, str], told: str
) -> None:
    facts = ModelFacts(50 * GIB, "bf16")
    monkeypatch.setattr(model_files, "facts_of_hub", lambda _: facts)
    request = DeploymentRequest(
        "me/model",
        "us-east-1",
        role=ROLE,
        speculation=SpeculationFlags(speculation=False),
        instance_type=instance_type,
        vllm_flags=flags,
    )
    lookups = Lookups(load_catalog(), s3=object())
    if told:
        with pytest.raises(UserError, match=told):
            new_deployment(request, "1", lookups)
    else:
        assert new_deployment(request, "1", lookups).instance_type == instance_type
