"""Containers: images, hosts, and an environment that reads back as the options that were meant."""

import json
import string
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peagle.deploy.container import (
    AMI_CUDA_12,
    AMI_CUDA_13,
    choose_image,
    container_environment,
    default_ami,
    flags_from,
    is_secret_name,
    managed_image,
)
from peagle.deploy.deployment import ContainerSource, KeptSecret, Secret
from peagle.deploy.models import ModelSource
from peagle.errors import UserError
from peagle.serving.sagemaker import vllm_flags
from tests.deploy.deployments import TEXT, WORD, a_deployment

S3 = ModelSource("s3", "s3://bucket/model/")
HEAD_IN_S3 = ModelSource("s3", "s3://bucket/model/draft/")
CONFIG = {"method": "eagle3", "num_speculative_tokens": 7, "parallel_drafting": True}


# ---- images and hosts ----


@pytest.mark.parametrize(
    ("region", "registry"),
    [
        ("us-east-1", "763104351884.dkr.ecr.us-east-1.amazonaws.com"),
        ("me-south-1", "217643126080.dkr.ecr.me-south-1.amazonaws.com"),
        ("cn-north-1", "727897471807.dkr.ecr.cn-north-1.amazonaws.com.cn"),
    ],
)
def test_managed_image_of_a_region(region: str, registry: str) -> None:
    assert managed_image(region) == f"{registry}/vllm:server-sagemaker-cuda-v2.3"


@pytest.mark.parametrize(
    ("tag", "ami"),
    [
        ("server-sagemaker-cuda-v2.3", AMI_CUDA_13),
        ("0.27.1-gpu-py312-cu130-ubuntu22.04-sagemaker", AMI_CUDA_13),
        ("cuda", AMI_CUDA_13),
        ("server-sagemaker-cuda-v1", AMI_CUDA_12),
        ("server-sagemaker-cuda-v1.3", AMI_CUDA_12),
        ("server-sagemaker-cuda-v10", AMI_CUDA_13),
        ("0.11.0-gpu-py312-cu128-ubuntu22.04-sagemaker-v1.7", AMI_CUDA_12),
    ],
)
def test_hosts_have_the_driver_of_the_image(tag: str, ami: str) -> None:
    assert default_ami(f"763104351884.dkr.ecr.us-east-1.amazonaws.com/vllm:{tag}") == ami


def test_our_own_image_must_be_named() -> None:
    with pytest.raises(UserError, match="no image of it is published"):
        choose_image("native", None, "")
    assert choose_image("native", "a/b:c", "") == ("a/b:c", AMI_CUDA_13)
    assert choose_image("managed", None, "eu-west-1") == (managed_image("eu-west-1"), AMI_CUDA_13)
    with pytest.raises(UserError, match="expected the URI of an image"):
        choose_image("managed", "two words", "")


# ---- the environment, and its reader ----


def read(variables: dict[str, str]) -> dict[str, tuple[str, ...] | None]:
    """vLLM's options that a container makes of its environment."""
    return {flag.name: flag.tokens for flag in vllm_flags(variables)}


FLAG_NAMES = st.from_regex(r"[a-z]{1,6}(-[a-z0-9]{1,5}){0,2}", fullmatch=True).filter(
    lambda name: name not in {"model", "host", "port", "revision"}
)
# What stands behind an option on vLLM's command line; none is a switch.
WORDS = st.lists(
    st.text(string.ascii_letters + '0123456789_.{}[]", ', max_size=8)
    | st.sampled_from(["true", "false"]),
    max_size=3,
)


@given(st.dictionaries(FLAG_NAMES, WORDS, max_size=4))
def test_a_command_line_of_vllm_arrives_as_it_was_written(flags: dict[str, list[str]]) -> None:
    line = [word for name, words in flags.items() for word in (f"--{name}", *words)]
    got = read(container_environment(a_deployment(vllm_flags=flags_from([], line))))
    expected = {f"--{name}": tuple(words) for name, words in flags.items()}
    assert got == {**expected, "--model": ("owner/target",)}


@given(
    k=st.integers(1, 64),
    parallel=st.booleans(),
    target=st.sampled_from([ModelSource("hub", "a/b"), ModelSource("hub", "a/b", "v1"), S3]),
    draft=st.sampled_from([ModelSource("hub", "c/d"), ModelSource("hub", "c/d", "v2"), HEAD_IN_S3]),
    further=st.dictionaries(WORD.map("V_".__add__), TEXT, max_size=2),
)
def test_head_and_target_arrive(
    k: int, parallel: bool, target: ModelSource, draft: ModelSource, further: dict[str, str]
) -> None:
    """In one token each; the model is found where it is mounted, and has a name for clients."""
    config = {"method": "eagle3", "num_speculative_tokens": k, "parallel_drafting": parallel}
    variables = container_environment(
        a_deployment(target=target, draft=draft, speculative_config=config, environment=further)
    )
    flags = read(variables)
    tokens = flags.pop("--speculative-config")
    assert tokens is not None
    (text,) = tokens
    mounted = "/opt/ml/model/draft/" if target.kind == "s3" else "/opt/ml/model/"
    model = draft.name if draft.kind == "hub" else mounted
    revision = {"revision": draft.revision} if draft.revision else {}
    assert json.loads(text) == {**config, "model": model, **revision}
    if target.kind == "s3":
        assert flags == {"--served-model-name": ("peagle-test",)}
    else:
        own = {"--revision": (target.revision,)} if target.revision else {}
        assert flags == {"--model": ("a/b",), **own}
    assert further.items() <= variables.items()


@pytest.mark.parametrize(
    ("source", "parallel", "said", "runner"),
    [
        ("managed", True, {}, "0"),
        ("managed", True, {"VLLM_USE_V2_MODEL_RUNNER": "1"}, "1"),
        ("managed", False, {}, None),
        ("native", True, {}, None),
    ],
)
def test_the_runner_that_drafts_in_parallel(
    source: ContainerSource, parallel: bool, said: dict[str, str], runner: str | None
) -> None:
    deployment = a_deployment(
        source=source,
        draft=ModelSource("hub", "a/b"),
        speculative_config={**CONFIG, "parallel_drafting": parallel},
        environment=said,
    )
    assert container_environment(deployment).get("VLLM_USE_V2_MODEL_RUNNER") == runner


@pytest.mark.parametrize(
    ("pairs", "line", "variables"),
    [
        (["max-model-len=8192"], [], {"MAX_MODEL_LEN": "8192"}),
        (["--max_model_len=8192"], [], {"MAX_MODEL_LEN": "8192"}),
        (["enforce-eager"], [], {"ENFORCE_EAGER": "true"}),
        (['hf-overrides={"a": 1}'], [], {"HF_OVERRIDES": '{"a": 1}'}),
        (["x=a=b"], [], {"X": "a=b"}),
        ([], ["--dtype=half", "--seed", "5", "--x"], {"DTYPE": "half", "SEED": "5", "X": "true"}),
        ([], ["--lora-modules", "a=1", "b=2"], {"LORA_MODULES": '["a=1", "b=2"]'}),
        (["a=1"], ["--b", "2"], {"A": "1", "B": "2"}),
    ],
)
def test_options_of_vllm(pairs: list[str], line: list[str], variables: dict[str, str]) -> None:
    got = container_environment(a_deployment(vllm_flags=flags_from(pairs, line)))
    expected = {f"SM_VLLM_{name}": value for name, value in variables.items()}
    assert got == {**expected, "SM_VLLM_MODEL": "owner/target"}


@pytest.mark.parametrize(
    ("pairs", "line", "message"),
    [
        (["=1"], [], "has no name"),
        (["two words=1"], [], "has no name"),
        (["-x=1"], [], "has no name"),
        ([], ["8192"], "expected options of vLLM there"),
        (["x=1"], ["--x", "2"], "given twice"),
        (["model=a/b"], [], "argument of the command"),
        ([], ["--speculative-config", "{}"], "--draft"),
        (['Speculative_Config={"parallel_drafting_spec": {}}'], [], "--draft"),
        ([], ['--speculative-conf={"parallel_drafting_spec": {}}'], "--draft"),
        ([], ["--speculative-config.parallel_drafting_spec.max_nodes", "4"], "has no name"),
        (["port=80"], [], "8080"),
        (["api-key=s"], [], "checks its callers"),
        (["hf-token=s"], [], "--pass-hf-token"),
    ],
)
def test_options_that_are_refused(pairs: list[str], line: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        flags_from(pairs, line)


def test_secrets_among_the_options_are_hidden() -> None:
    found = flags_from(["ssl-key=abc", "x=abc"], [])
    assert "abc" not in repr(found["ssl-key"]) and "abc" in repr(found["x"])
    assert found["ssl-key"] == "abc"


@pytest.mark.parametrize(
    ("name", "hidden"),
    [
        *[("HF_TOKEN", True), ("api-key", True), ("DB_PASSWORD", True), ("TOKEN", True)],
        *[("SM_VLLM_MAX_NUM_BATCHED_TOKENS", False), ("MONKEY", False), ("KEY_FILE", False)],
    ],
)
def test_names_of_secrets(name: str, hidden: bool) -> None:
    assert is_secret_name(name) == hidden


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"environment": {"A": "x" * 1025}}, "A has 1025 characters; SageMaker allows 1024"),
        ({"environment": {f"A{n}": "" for n in range(101)}}, "102 variables"),
        ({"environment": {"1A": ""}}, "expected letters"),
        ({"environment": {"A-B": ""}}, "expected letters"),
        (
            {"environment": {"SM_VLLM_SEED": "1"}, "vllm_flags": {"seed": "2"}},
            "SM_VLLM_SEED is given with --env, and",
        ),
        ({"environment": {"SM_VLLM_MODEL": "x"}}, "SM_VLLM_MODEL is given with --env"),
    ],
)
def test_what_sagemaker_would_refuse(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        container_environment(a_deployment(**fields))


@pytest.mark.parametrize("source", ["managed", "native"])
@pytest.mark.parametrize("head", [{}, {"draft": ModelSource("hub", "a/b")}], ids=["alone", "head"])
@pytest.mark.parametrize("name", ["SPECULATIVE_CONFIG", "spec", "Speculative_Conf"])
def test_no_variable_carries_speculation_past_its_checks(
    source: ContainerSource, head: dict[str, Any], name: str
) -> None:
    """vLLM's parser completes names. A value that the stack keeps was there before, and stays."""
    variable = f"SM_VLLM_{name}"
    trees = Secret('{"parallel_drafting_spec": {"max_nodes": 4}}')
    with pytest.raises(UserError, match=f"The variable {variable} cannot be .* Use --spec"):
        container_environment(a_deployment(source=source, environment={variable: trees}, **head))
    kept = {"SM_VLLM_SPECULATIVE_CONFIG": KeptSecret("Key")}
    assert (
        kept.items()
        <= container_environment(a_deployment(source=source, environment=kept, **head)).items()
    )


def test_a_value_that_is_too_long_is_not_shown() -> None:
    with pytest.raises(UserError) as caught:
        container_environment(a_deployment(environment={"MY_TOKEN": Secret("s3cr3t" * 200)}))
    assert "s3cr3t" not in str(caught.value)
