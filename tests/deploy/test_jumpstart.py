"""Documents of SageMaker's hub: image, environment, files, heads, licences."""

from __future__ import annotations

import json
from typing import Any

import pytest

from peagle.deploy.jumpstart import check_eula, describe_call, read_answer
from peagle.errors import UserError

IMAGE = "763104351884.dkr.ecr.us-east-1.amazonaws.com/djl-inference:1"
DOCUMENT: dict[str, Any] = {
    "HostingEcrUri": IMAGE,
    "HostingArtifactUri": "s3://jumpstart-cache-prod-us-east-1/model/artifacts/",
    "HostingArtifactS3DataType": "S3Prefix",
    "HostingArtifactCompressionType": "None",
    "InferenceEnvironmentVariables": [
        {"Name": "HF_MODEL_ID", "DefaultValue": "/opt/ml/model", "Scope": "container"},
        {"Name": "WORKERS", "Default": 1, "Scope": "container"},
        {"Name": "UNSET", "Scope": "container"},
        {"Name": "OF_THE_SDK", "Default": "x", "Scope": "algorithm"},
    ],
    "DefaultInferenceInstanceType": "ml.g7e.2xlarge",
    "SupportedInferenceInstanceTypes": ["ml.g7e.2xlarge", "ml.p5.48xlarge"],
    "InferenceAmiVersion": "al2023-ami-sagemaker-inference-gpu-4-1",
    "ContainerStartupHealthCheckTimeout": 1200,
}


def read(changes: dict[str, Any] | None = None, instance_type: str = ""):
    document = json.dumps({**DOCUMENT, **(changes or {})})
    answer = {"HubContentName": "a-model", "HubContentDocument": document}
    return read_answer(answer, "us-east-1", instance_type)


def test_what_is_asked() -> None:
    assert describe_call("a-model").parameters == {
        "HubName": "SageMakerPublicHub",
        "HubContentType": "Model",
        "HubContentName": "a-model",
    }


def test_a_document() -> None:
    found = read()
    assert found.image == IMAGE
    assert found.model.environment == {"HF_MODEL_ID": "/opt/ml/model", "WORKERS": "1"}
    assert found.model.data == {
        "S3Uri": "s3://jumpstart-cache-prod-us-east-1/model/artifacts/",
        "S3DataType": "S3Prefix",
        "CompressionType": "None",
    }
    assert (found.instance_type, found.startup_timeout_s) == ("ml.g7e.2xlarge", 1200)
    assert found.ami == "al2023-ami-sagemaker-inference-gpu-4-1"
    check_eula(found, accepted=False)


def test_a_packed_model_and_a_preferred_package() -> None:
    found = read(
        {
            "HostingArtifactS3DataType": None,
            "HostingArtifactCompressionType": None,
            "HostingPrepackedArtifactUri": "packed/model.tar.gz",
        }
    )
    assert found.model.data == {
        "S3Uri": "s3://jumpstart-cache-prod-us-east-1/packed/model.tar.gz",
        "S3DataType": "S3Object",
        "CompressionType": "Gzip",
    }
    assert read({"HostingArtifactUri": None}).model.data is None


def test_the_configuration_that_ranks_first() -> None:
    """Its components lie over the document: image, variables, and the head."""
    source = {"S3Uri": "head/v1/", "S3DataType": "S3Prefix", "CompressionType": "None"}
    head = {"ChannelName": "draft_model", "S3DataSource": {**source, "Unknown": 1}}
    component = {
        "HostingEcrUri": IMAGE + "-faster",
        "HostingAdditionalDataSources": {"SpeculativeDecoding": [head], "Scripts": []},
    }
    found = read(
        {
            "InferenceConfigs": {
                "plain": {"ComponentNames": []},
                "fast": {"ComponentNames": ["with-head", "absent"]},
            },
            "InferenceConfigComponents": {"with-head": component},
            "InferenceConfigRankings": {"overall": {"Rankings": ["gone", "fast", "plain"]}},
        }
    )
    assert found.image == IMAGE + "-faster"
    ((channel, data),) = found.model.additional
    assert channel == "draft_model"
    assert data == {**source, "S3Uri": "s3://jumpstart-cache-prod-us-east-1/head/v1/"}


def test_an_instance_type_of_its_own_kind() -> None:
    """Of a family and of the type: image by alias, variables over the document's."""
    variants = {
        "Aliases": {"gpu": "an-image"},
        "Variants": {
            "p5": {"properties": {"image_uri": "$gpu"}},
            "ml.p5.48xlarge": {"properties": {"environment_variables": {"WORKERS": "8"}}},
        },
    }
    found = read({"HostingInstanceTypeVariants": variants}, "ml.p5.48xlarge")
    assert found.image == "an-image"
    assert found.model.environment == {"HF_MODEL_ID": "/opt/ml/model", "WORKERS": "8"}
    assert read({"HostingInstanceTypeVariants": variants}).image == IMAGE


def test_a_gated_model_needs_its_licence_accepted() -> None:
    found = read({"GatedBucket": True, "HostingEulaUri": "s3://x/eula.txt"})
    check_eula(found, accepted=True)
    with pytest.raises(UserError, match=r"read its licence \(s3://x/eula.txt\), and give --accept"):
        check_eula(found, accepted=False)
    packed = read({"GatedBucket": True, "HostingArtifactUri": "m/"}).model.data
    assert packed is not None
    assert packed["S3Uri"] == "s3://jumpstart-private-cache-prod-us-east-1/m/"


def test_an_instance_type_that_the_hub_does_not_offer() -> None:
    with pytest.raises(
        UserError, match=r"on 'ml.g5.xlarge'; expected one of ml.g7e.2xlarge, ml.p5"
    ):
        read(instance_type="ml.g5.xlarge")


@pytest.mark.parametrize(
    "document",
    [
        *("", "[]", "{}", "not JSON", '{"HostingEcrUri": "x", "InferenceConfigs": 5}'),
        '{"HostingEcrUri": "x", "InferenceEnvironmentVariables": [1]}',
        '{"HostingEcrUri": "x", "HostingAdditionalDataSources": {"SpeculativeDecoding": [{}]}}',
    ],
)
def test_documents_that_cannot_be_read(document: str) -> None:
    with pytest.raises(UserError, match="'a-model' is not one that can be read"):
        read_answer({"HubContentName": "a-model", "HubContentDocument": document}, "us-east-1")
    with pytest.raises(UserError, match="not one that can be read"):
        read_answer({}, "us-east-1")
