"""SageMaker's public hub: what it says of a model, and what of that a deployment takes over.

The hub's document is JSON text; its keys are those that sagemaker-python-sdk reads
(src/sagemaker/jumpstart/hub/interfaces.py, class HubModelDocument; additional data sources as in
src/sagemaker/jumpstart/types.py). No document of a P-EAGLE model could be looked at from here, so
everything but the image may be absent.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from peagle.deploy.calls import Call
from peagle.deploy.deployment import HubModel
from peagle.errors import UserError

HUB = "SageMakerPublicHub"
_SPECULATIVE_SOURCES = "SpeculativeDecoding"


@dataclass(frozen=True, slots=True)
class HubDocument:
    """What the hub says.

    Attributes:
        model: environment and files.
        image: URI of the container's image.
        instance_type: the hub's default; "" if it names none.
        instance_types: that it supports; () if it names none.
        ami: of the hosts; None if it names none.
        startup_timeout_s: None if it names none.
        eula_uri: of the licence; "" without one.
    """

    model: HubModel
    image: str
    instance_type: str = ""
    instance_types: tuple[str, ...] = ()
    ami: str | None = None
    startup_timeout_s: int | None = None
    eula_uri: str = ""


def describe_call(model_id: str) -> Call:
    """The call that asks the hub for a model."""
    parameters = {"HubName": HUB, "HubContentType": "Model", "HubContentName": model_id}
    return Call("sagemaker", "DescribeHubContent", parameters)


def read_answer(answer: Mapping[str, Any], region: str, instance_type: str = "") -> HubDocument:
    """Read DescribeHubContent's answer.

    Args:
        answer: as boto3 returns it.
        region: whose bucket holds files that are named without one.
        instance_type: that is wanted; "" takes the hub's default.

    Raises:
        UserError: the document is not readable, names no image, or does not support the type.
    """
    name = str(answer.get("HubContentName", ""))
    try:
        base = json.loads(answer["HubContentDocument"])
        document = {**base, **_configuration(base)}
        types = tuple(document.get("SupportedInferenceInstanceTypes") or ())
        chosen = instance_type or document.get("DefaultInferenceInstanceType") or ""
        variant = _variant(document.get("HostingInstanceTypeVariants") or {}, chosen, region)
        image = variant.get("image_uri") or document["HostingEcrUri"]
        gated = bool(document.get("GatedBucket"))
        model = HubModel(
            name,
            {**_environment(document), **(variant.get("environment_variables") or {})},
            _artifact(document, region, gated),
            _additional(document, region),
            gated,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"The hub's document of {name!r} is not one that can be read "
            f"({type(error).__name__}: {error}). Deploy with --source managed."
        ) from None
    if types and chosen not in types:
        raise UserError(
            f"The hub does not offer {name!r} on {chosen!r}; expected one of {', '.join(types)}. "
            "Choose one with --instance-type, or deploy with --source managed."
        )
    timeout = document.get("ContainerStartupHealthCheckTimeout")
    return HubDocument(
        model=model,
        image=image,
        instance_type=chosen,
        instance_types=types,
        ami=document.get("InferenceAmiVersion"),
        startup_timeout_s=int(timeout) if timeout else None,
        eula_uri=str(document.get("HostingEulaUri") or ""),
    )


def check_eula(document: HubDocument, accepted: bool) -> None:
    """Refuse a gated model whose licence was not accepted.

    Raises:
        UserError: it is gated, and --accept-eula was not given.
    """
    if document.model.gated and not accepted:
        where = document.eula_uri or "the model's page in SageMaker JumpStart"
        raise UserError(
            f"The model {document.model.name!r} is gated: read its licence ({where}), and give "
            "--accept-eula if you accept it."
        )


def _configuration(document: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the inference configuration that the document ranks first."""
    configurations = document.get("InferenceConfigs") or {}
    if not configurations:
        return {}
    rankings = (document.get("InferenceConfigRankings") or {}).get("overall") or {}
    ranked = [n for n in rankings.get("Rankings") or () if n in configurations]
    chosen = configurations[ranked[0] if ranked else next(iter(configurations))]
    components = document.get("InferenceConfigComponents") or {}
    merged: dict[str, Any] = {}
    for name in chosen.get("ComponentNames") or ():
        merged |= components.get(name) or {}
    return merged


def _variant(variants: Mapping[str, Any], instance_type: str, region: str) -> dict[str, Any]:
    """Properties of an instance type: of its family, and over them its own."""
    aliases = variants.get("Aliases") or (variants.get("RegionalAliases") or {}).get(region) or {}
    table, family = variants.get("Variants") or {}, instance_type.rpartition(".")[0]
    properties: dict[str, Any] = {}
    for name in (family.removeprefix("ml."), family, instance_type):
        found = table.get(name) or {}
        for key in ("properties", "Properties", "regional_properties", "RegionalProperties"):
            properties |= found.get(key) or {}
    image = properties.get("image_uri") or properties.get("ImageUri")
    variables = properties.get("environment_variables") or properties.get("EnvironmentVariables")
    if isinstance(image, str) and image.startswith("$"):
        image = aliases.get(image[1:])
    return {"image_uri": image, "environment_variables": variables}


def _environment(document: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for variable in document.get("InferenceEnvironmentVariables") or ():
        value = variable.get("DefaultValue", variable.get("Default"))
        if value is not None and variable.get("Scope", "container") == "container":
            found[variable["Name"]] = value if isinstance(value, str) else json.dumps(value)
    return found


def _artifact(document: Mapping[str, Any], region: str, gated: bool) -> dict[str, Any] | None:
    """S3DataSource of the model's files."""
    prepacked = document.get("HostingPrepackedArtifactUri")
    uri = prepacked or document.get("HostingArtifactUri")
    if not uri:
        return None
    compressed = str(uri).endswith((".tar.gz", ".tgz"))
    kind = document.get("HostingArtifactS3DataType")
    packing = document.get("HostingArtifactCompressionType")
    return {
        "S3Uri": _uri(str(uri), region, gated),
        "S3DataType": kind or ("S3Object" if compressed else "S3Prefix"),
        "CompressionType": packing or ("Gzip" if compressed else "None"),
    }


def _additional(document: Mapping[str, Any], region: str) -> tuple[tuple[str, dict[str, Any]], ...]:
    """Channels of heads; keys of the source that CreateModel does not know are left out."""
    sources = document.get("HostingAdditionalDataSources") or {}
    found = []
    for source in sources.get(_SPECULATIVE_SOURCES) or ():
        data = source["S3DataSource"]
        gated = bool(source.get("HostingEulaKey") or source.get("HostingEulaUri"))
        made = {
            "S3Uri": _uri(data["S3Uri"], region, gated),
            "S3DataType": data.get("S3DataType", "S3Prefix"),
            "CompressionType": data.get("CompressionType", "None"),
        }
        found.append((source["ChannelName"], made))
    return tuple(found)


def _uri(uri: str, region: str, gated: bool) -> str:
    """The hub names some files without their bucket, which is then the region's own."""
    bucket = f"jumpstart-{'private-' if gated else ''}cache-prod-{region}"
    return uri if uri.startswith("s3://") else f"s3://{bucket}/{uri}"
