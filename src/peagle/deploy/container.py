"""The container of a deployment: its image and its environment.

Both containers, ours and the managed vLLM one, read SM_VLLM_* as options of vLLM (ours through
`serving.sagemaker`), so one environment fits both.
Source of the managed container's rules: https://aws.github.io/deep-learning-containers/vllm/.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from peagle.deploy.deployment import MODEL_FOLDER, VARIANT, Deployment, KeptSecret, Secret, Source
from peagle.deploy.monitoring import container_environment
from peagle.errors import UserError

PREFIX = "SM_VLLM_"
SPECULATIVE = "SM_VLLM_SPECULATIVE_CONFIG"

MANAGED_TAG = "server-sagemaker-cuda-v2.3"
_MANAGED_ACCOUNT = "763104351884"
# Where the account differs. Source: image_uri_config/huggingface-llm.json of sagemaker-python-sdk.
_ACCOUNTS = {
    "af-south-1": "626614931356",
    "ap-east-1": "871362719292",
    "ap-northeast-3": "364406365360",
    "ap-south-2": "772153158452",
    "ap-southeast-3": "907027046896",
    "ap-southeast-4": "457447274322",
    "ap-southeast-5": "550225433462",
    "ap-southeast-7": "590183813437",
    "ca-west-1": "204538143572",
    "cn-north-1": "727897471807",
    "cn-northwest-1": "727897471807",
    "eu-central-2": "380420809688",
    "eu-south-1": "692866216735",
    "eu-south-2": "503227376785",
    "il-central-1": "780543022126",
    "me-central-1": "914824155844",
    "me-south-1": "217643126080",
    "mx-central-1": "637423239942",
    "us-gov-east-1": "446045086412",
    "us-gov-west-1": "442386744353",
}

# Drivers of the hosts, by the documentation of ProductionVariant.InferenceAmiVersion in
# SageMaker's service model: 550 (CUDA 12.4) and 580 (CUDA 13.0). CUDA 13 needs driver 580.
AMI_CUDA_12 = "al2-ami-sagemaker-inference-gpu-3-1"
AMI_CUDA_13 = "al2023-ami-sagemaker-inference-gpu-4-1"
# Of the managed images, v1 has CUDA 12.9 and v2 CUDA 13.0 (their changelog).
_CUDA_12_TAG = re.compile(r"cu12\d|server-sagemaker-cuda-v1(\.|$)")

# EnvironmentKey, EnvironmentValue and EnvironmentMap of SageMaker's service model.
_VARIABLE = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_MAX_CHARACTERS = 1024
_MAX_VARIABLES = 100
_FLAG = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_SECRET_NAME = re.compile(r"(^|[_-])(key|token|password|secret|credentials?)$", re.IGNORECASE)
# Options that are not the user's here, and what to do instead.
_OURS = {
    "model": "Name the model as the argument of the command.",
    "speculative-config": "Use --speculative-config, --draft and --num-speculative-tokens.",
    "host": "SageMaker calls port 8080 of the container.",
    "port": "SageMaker calls port 8080 of the container.",
    "api-key": "SageMaker itself checks who may call.",
    "hf-token": "Use --pass-hf-token.",
}


def managed_image(region: str = "") -> str:
    """URI of the managed vLLM container's image in a region; "" leaves the region to the stack."""
    if not region:
        return f"{_MANAGED_ACCOUNT}.dkr.ecr.${{AWS::Region}}.${{AWS::URLSuffix}}/vllm:{MANAGED_TAG}"
    account = _ACCOUNTS.get(region, _MANAGED_ACCOUNT)
    domain = "amazonaws.com.cn" if region.startswith("cn-") else "amazonaws.com"
    return f"{account}.dkr.ecr.{region}.{domain}/vllm:{MANAGED_TAG}"


def default_ami(image: str) -> str:
    """The hosts' image whose driver runs a container: by the CUDA version in the image's tag.

    A tag that names none counts as CUDA 13, which our own image and today's managed ones have.
    """
    return AMI_CUDA_12 if _CUDA_12_TAG.search(image.rpartition(":")[2]) else AMI_CUDA_13


def is_secret_name(name: str) -> bool:
    """Whether a variable or option of this name holds what nobody should read."""
    return _SECRET_NAME.search(name) is not None


def environment(d: Deployment) -> dict[str, str]:
    """All variables of the container, sorted by name.

    Raises:
        UserError: a name or value that SageMaker refuses, or one variable given in two ways.
    """
    own = {variable_of(name): value for name, value in d.vllm_flags.items()}
    own |= _model_variables(d, own)
    if d.speculative_config is not None:
        own[SPECULATIVE] = json.dumps(_speculative(d), separators=(",", ":"))
    if twice := sorted(set(own) & set(d.environment)):
        raise UserError(
            f"The variable {twice[0]} is given with --env, and set by another option too; leave "
            "one of them out."
        )
    # SageMaker does not tell a container which endpoint it is of: our metrics are named by it.
    named = container_environment(d.endpoint_name, VARIANT) if d.source == "native" else {}
    merged = {**_runner(d), **own, **d.environment, **named}
    _check(merged)
    return dict(sorted(merged.items()))


def _model_variables(d: Deployment, given: Mapping[str, str]) -> dict[str, str]:
    """The model, where it is not in /opt/ml/model, and the name that clients call it by."""
    if d.target.kind == "hub":
        revision = {PREFIX + "REVISION": d.target.revision} if d.target.revision else {}
        return {PREFIX + "MODEL": d.target.name, **revision}
    name = PREFIX + "SERVED_MODEL_NAME"
    return {} if name in given else {name: d.endpoint_name}


def _runner(d: Deployment) -> dict[str, str]:
    """vLLM's first model runner, since its model runner V2 does not draft in parallel."""
    is_parallel = (d.speculative_config or {}).get("parallel_drafting")
    return {"VLLM_USE_V2_MODEL_RUNNER": "0"} if is_parallel and d.source == "managed" else {}


def _speculative(d: Deployment) -> dict[str, Any]:
    """vLLM's speculative configuration with the place where the container finds the head."""
    config = dict(d.speculative_config or {})
    if d.draft is None:
        return config
    method = {"method": config.pop("method")} if "method" in config else {}
    if d.draft.kind != "hub":
        return {**method, "model": draft_path(d), **config}
    revision = {"revision": d.draft.revision} if d.draft.revision else {}
    return {**method, "model": d.draft.name, **revision, **config}


def draft_path(d: Deployment) -> str:
    """The folder of a head that comes from S3, in the container: below the target's, if any."""
    assert d.draft is not None
    below = d.draft.name.removeprefix(d.target.name) if d.target.kind == "s3" else ""
    return MODEL_FOLDER + below


def variable_of(flag: str) -> str:
    """The variable of an option of vLLM."""
    return PREFIX + flag.upper().replace("-", "_")


def _check(variables: Mapping[str, str]) -> None:
    if len(variables) > _MAX_VARIABLES:
        raise UserError(
            f"The container would have {len(variables)} variables; SageMaker allows "
            f"{_MAX_VARIABLES}. Leave some out."
        )
    for name, value in variables.items():
        if _VARIABLE.fullmatch(name) is None or len(name) > _MAX_CHARACTERS:
            raise UserError(
                f"The variable's name is {name!r}; expected letters, digits and underscores, with "
                "no digit in front."
            )
        if len(value) > _MAX_CHARACTERS and not isinstance(value, KeptSecret):
            raise UserError(
                f"The value of {name} has {len(value)} characters; SageMaker allows "
                f"{_MAX_CHARACTERS}. Shorten it, or put it into a file of the model's folder."
            )


# ---- reading options of vLLM ----------------------------------------------------------------


def flags_from(pairs: list[str], words: list[str]) -> dict[str, str]:
    """Options of vLLM by name, as text of SM_VLLM_*.

    Args:
        pairs: of --vllm-flag: "max-model-len=8192", the value as SM_VLLM_* has it; without one it
            is a switch.
        words: a command line of vLLM: "--max-model-len", "8192", "--enforce-eager". What a variable
            would not say as it stands (several words, "true") becomes a JSON array of words.

    Raises:
        UserError: no name, a name twice, or one that is not the user's to set.
    """
    found: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        _add(found, name.removeprefix("--"), value if equals else "true", f"--vllm-flag {pair}")
    for name, values in _groups(words):
        _add(found, name, _as_variable(values), f"--{name}")
    return found


def _as_variable(words: list[str]) -> str:
    if not words:
        return "true"
    plain = len(words) == 1 and words[0] not in ("", "true", "false")
    return words[0] if plain and not words[0].lstrip().startswith("[") else json.dumps(words)


def _groups(words: list[str]) -> list[tuple[str, list[str]]]:
    groups: list[tuple[str, list[str]]] = []
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            groups.append((name, [value] if equals else []))
        elif groups:
            groups[-1][1].append(word)
        else:
            raise UserError(
                f"{word!r} stands behind --; expected options of vLLM there, like "
                "-- --max-model-len 8192."
            )
    return groups


def _add(found: dict[str, str], name: str, value: str, shown: str) -> None:
    name = name.lower().replace("_", "-")
    if _FLAG.fullmatch(name) is None:
        raise UserError(
            f"{shown!r} has no name that vLLM could know; expected one like max-model-len=8192."
        )
    if name in _OURS:
        raise UserError(f"The option {name} of vLLM cannot be given here. {_OURS[name]}")
    if name in found:
        raise UserError(f"The option {name} of vLLM is given twice; leave one of them out.")
    found[name] = Secret(value) if is_secret_name(name) else value


def check_image(source: Source, image: str | None) -> None:
    """Refuse what has no image.

    Raises:
        UserError: source native without --image, or an image's name that cannot be one.
    """
    if source == "native" and not image:
        raise UserError(
            "--source native runs peagle's own container, and no image of it is published: build "
            "deploy/Dockerfile (target cuda), push it to your ECR, and name it with --image "
            "ACCOUNT.dkr.ecr.REGION.amazonaws.com/peagle:cuda. --source managed needs no image."
        )
    if image and (re.search(r"\s", image) or len(image) > 255):
        raise UserError(
            f"--image is {image!r}; expected the URI of an image, like "
            "123456789012.dkr.ecr.us-east-1.amazonaws.com/peagle:cuda."
        )
