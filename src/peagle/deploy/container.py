"""The container of a deployment: its image and its environment.

Our container (`serving.sagemaker`) and the managed vLLM container both read SM_VLLM_* as options of
vLLM, so both take the same environment.
Source of the managed container's rules: https://aws.github.io/deep-learning-containers/vllm/.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from peagle.config import cloudwatch as names
from peagle.deploy.deployment import (
    MODEL_FOLDER,
    VARIANT,
    ContainerSource,
    Deployment,
    KeptSecret,
    Secret,
)
from peagle.deploy.instances import sagemaker_facts
from peagle.errors import UserError

PREFIX = "SM_VLLM_"
SPECULATIVE = "SM_VLLM_SPECULATIVE_CONFIG"

MANAGED_TAG = "server-sagemaker-cuda-v2.3"
_MANAGED_ACCOUNT = "763104351884"
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
_SPECULATIVE_OPTION = "speculative-config"
# Options of vLLM that users cannot set, and what to do instead.
_REFUSED = {
    "model": "Name the model as the argument of the command.",
    _SPECULATIVE_OPTION: "Use --speculative-config, --draft and --num-speculative-tokens.",
    "host": "SageMaker calls port 8080 of the container.",
    "port": "SageMaker calls port 8080 of the container.",
    "api-key": "SageMaker itself checks its callers.",
    "hf-token": "Use --pass-hf-token.",
}


def managed_image(region: str = "") -> str:
    """Return the URI of the managed vLLM image; without a region CloudFormation fills it in."""
    if not region:
        return f"{_MANAGED_ACCOUNT}.dkr.ecr.${{AWS::Region}}.${{AWS::URLSuffix}}/vllm:{MANAGED_TAG}"
    account = sagemaker_facts()["accounts"].get(region, _MANAGED_ACCOUNT)
    domain = "amazonaws.com.cn" if region.startswith("cn-") else "amazonaws.com"
    return f"{account}.dkr.ecr.{region}.{domain}/vllm:{MANAGED_TAG}"


def default_ami(image: str) -> str:
    """Return the host image (AMI) whose driver fits the CUDA version in the tag of `image`.

    A tag without a version counts as CUDA 13, the version of our image and of today's managed ones.
    """
    return AMI_CUDA_12 if _CUDA_12_TAG.search(image.rpartition(":")[2]) else AMI_CUDA_13


def is_secret_name(name: str) -> bool:
    """Return whether a variable or option of this name holds a secret."""
    return _SECRET_NAME.search(name) is not None


def container_environment(d: Deployment) -> dict[str, str]:
    """Return all variables of the container, sorted by name.

    Raises:
        UserError: SageMaker refuses a name or a value, or two options set one variable.
    """
    own = {variable_of(name): value for name, value in d.vllm_flags.items()}
    if d.target.kind == "hub":
        own[PREFIX + "MODEL"] = d.target.name
        if d.target.revision:
            own[PREFIX + "REVISION"] = d.target.revision
    else:  # the container finds the model in /opt/ml/model; clients call it by this name
        own.setdefault(PREFIX + "SERVED_MODEL_NAME", d.endpoint_name)
    further: dict[str, str] = {}
    if d.speculative_config is not None:
        own[SPECULATIVE] = json.dumps(_speculative_config(d), separators=(",", ":"))
        if d.speculative_config.get("parallel_drafting") and d.source == "managed":
            further["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # vLLM's runner V2 cannot draft in parallel
    if twice := sorted(set(own) & set(d.environment)):
        raise UserError(
            f"The variable {twice[0]} is given with --env, and set by another option too; leave "
            "one of them out."
        )
    for name, value in d.environment.items():
        option = _option(name[len(PREFIX) :]) if name.upper().startswith(PREFIX) else ""
        if option == _SPECULATIVE_OPTION and not isinstance(value, KeptSecret):
            # peagle would not check such a value, and the managed container has no candidate trees.
            raise UserError(f"The variable {name} cannot be given with --env. {_REFUSED[option]}")
    merged = {**further, **own, **d.environment}
    if d.source == "native":
        # SageMaker does not tell a container the name of its endpoint, which our metrics need.
        merged |= {names.ENDPOINT_VARIABLE: d.endpoint_name, names.VARIANT_VARIABLE: VARIANT}
    _check(merged)
    return dict(sorted(merged.items()))


def _speculative_config(d: Deployment) -> dict[str, Any]:
    """Return vLLM's speculative configuration with the folder or hub id of the head."""
    config = dict(d.speculative_config or {})
    if d.draft is None:
        return config
    method = {"method": config.pop("method")} if "method" in config else {}
    if d.draft.kind != "hub":
        # A head that comes from S3 lies below the target, if that comes from S3 too.
        below = d.draft.name.removeprefix(d.target.name) if d.target.kind == "s3" else ""
        return {**method, "model": MODEL_FOLDER + below, **config}
    revision = {"revision": d.draft.revision} if d.draft.revision else {}
    return {**method, "model": d.draft.name, **revision, **config}


def variable_of(flag: str) -> str:
    """Return the container's variable for an option of vLLM."""
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


# ---- reading options of vLLM ----


def flags_from(pairs: list[str], words: list[str]) -> dict[str, str]:
    """Return the options of vLLM by name, with values as SM_VLLM_* variables hold them.

    Args:
        pairs: values of --vllm-flag, like "max-model-len=8192"; a switch has no "=value".
        words: a command line of vLLM: "--max-model-len", "8192", "--enforce-eager". Values that a
            variable cannot hold as they are (several words, "true") become a JSON array of words.

    Raises:
        UserError: a name is missing or given twice, or users cannot set the option.
    """
    found: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        _add(found, name.removeprefix("--"), value if equals else "true", f"--vllm-flag {pair}")
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
    for name, values in groups:
        plain = len(values) == 1 and values[0] not in ("", "true", "false")
        if not values:
            text = "true"
        elif plain and not values[0].lstrip().startswith("["):
            text = values[0]
        else:
            text = json.dumps(values)
        _add(found, name, text, f"--{name}")
    return found


def _option(name: str) -> str:
    """Return the full name of an option; like vLLM, complete a shortened "speculative-config"."""
    name = name.lower().replace("_", "-")
    is_short = name.startswith("spec") and _SPECULATIVE_OPTION.startswith(name)
    return _SPECULATIVE_OPTION if is_short else name


def _add(found: dict[str, str], name: str, value: str, typed: str) -> None:
    name = _option(name)
    if _FLAG.fullmatch(name) is None:
        raise UserError(
            f"{typed!r} has no name that vLLM could know; expected one like max-model-len=8192."
        )
    if name in _REFUSED:
        raise UserError(f"The option {name} of vLLM cannot be given here. {_REFUSED[name]}")
    if name in found:
        raise UserError(f"The option {name} of vLLM is given twice; leave one of them out.")
    found[name] = Secret(value) if is_secret_name(name) else value


def choose_image(source: ContainerSource, image: str | None, region: str) -> tuple[str, str]:
    """Return the image of the container (by default AWS's) and the AMI of the hosts.

    Raises:
        UserError: source native without an image, or text that is no URI of an image.
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
    chosen = image or managed_image(region)
    return chosen, default_ami(chosen)
