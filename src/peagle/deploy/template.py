"""The CloudFormation template of an endpoint: model, configuration, endpoint, scaling, alarms.

Properties have the names of the resource schemas AWS::SageMaker::*, AWS::ApplicationAutoScaling::*,
AWS::SecretsManager::Secret and AWS::CloudWatch::Alarm.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from typing import Any

from pydantic import TypeAdapter

from peagle.config import cloudwatch as names
from peagle.deploy.container import container_environment, is_secret_name, variable_of
from peagle.deploy.deployment import (
    ENDPOINT_TAG,
    SOURCE_TAG,
    VARIANT,
    Autoscaling,
    Capture,
    Deployment,
    KeptSecret,
    Secret,
)
from peagle.deploy.monitoring import ENOUGH_DRAFTS, TOLERATED_DROP, expected_from_tags
from peagle.errors import UserError

METADATA = "peagle"
ROLE_PARAMETER = "RoleArn"
DIMENSION = "sagemaker:variant:DesiredInstanceCount"
# The command's names of metrics, and the predefined metrics. The first is measured every ten
# seconds and counts waiting requests too; the second counts the requests of a minute.
METRICS = {
    "concurrency": "SageMakerVariantConcurrentRequestsPerModelHighResolution",
    "invocations": "SageMakerVariantInvocationsPerInstance",
}
# Seconds after a change before the next. A new instance loads a large model for ten minutes: to
# give one up too early costs more than to keep it for a while.
SCALE_OUT_COOLDOWN_S = 300
SCALE_IN_COOLDOWN_S = 900
_SCALING = ("ScalableTarget", "ScalingPolicy")
_MAX_ERROR_SHARE = 0.01
# Fields that hold for one change alone; the metadata leaves them out.
_TRANSIENT_FIELDS = ("stamp", "sets_count", "transfers")

Template = dict[str, Any]
Resources = dict[str, dict[str, Any]]


def endpoint_template(d: Deployment) -> Template:
    """Return the template of a deployment, without secrets; UserError as for its variables."""
    variables = container_environment(d)
    secrets = _secret_parameters(variables, d.stamp)
    parameters: Resources = {
        key: {"Type": "String", "NoEcho": True, "Description": f"Value of the variable {name}"}
        for name, key in secrets.items()
    }
    if not d.role:
        description = "ARN of the IAM role that the containers have"
        parameters[ROLE_PARAMETER] = {"Type": "String", "Description": description}
    return {
        "AWSTemplateFormatVersion": "2010-09-09",
        "Description": f"SageMaker endpoint {d.endpoint_name}, made by peagle",
        "Metadata": {METADATA: _metadata(_described(d, secrets))},
        **({"Parameters": parameters} if parameters else {}),
        "Resources": {
            **_secret_resources(d, secrets),
            **_endpoint_resources(d, variables, secrets),
            **_scaling_resources(d.endpoint_name, d.autoscaling),
            **_alarm_resources(d),
        },
    }


def parameter_values(d: Deployment) -> list[dict[str, Any]]:
    """Return the parameters of a change set: new secrets, and parameters that keep their value."""
    variables = container_environment(d)
    role = [] if d.role else [{"ParameterKey": ROLE_PARAMETER, "UsePreviousValue": True}]
    return role + [
        {"ParameterKey": key, "UsePreviousValue": True}
        if isinstance(variables[name], KeptSecret)
        else {"ParameterKey": key, "ParameterValue": variables[name]}
        for name, key in _secret_parameters(variables, d.stamp).items()
    ]


def with_autoscaling(template: Template, autoscaling: Autoscaling | None) -> Template:
    """Return a template of `endpoint_template` with this scaling in place of its own."""
    endpoint = deployment_of(template, "").endpoint_name
    kept = {k: v for k, v in template["Resources"].items() if k not in _SCALING}
    described = json.loads(template["Metadata"][METADATA])
    described["autoscaling"] = None if autoscaling is None else asdict(autoscaling)
    return {
        **template,
        "Metadata": {**template["Metadata"], METADATA: _metadata(described)},
        "Resources": kept | _scaling_resources(endpoint, autoscaling),
    }


# ---- what the metadata keeps ----


def _metadata(described: Mapping[str, Any]) -> str:
    """Return JSON as text: templates have no null and refuse references to parameters here."""
    return json.dumps(described).replace("${", "\\u0024{")


def stored_deployment(template: Mapping[str, Any]) -> dict[str, Any]:
    """Return the deployment in the metadata of a template; {} if another tool made it."""
    try:
        return dict(json.loads((template.get("Metadata") or {})[METADATA]))
    except (KeyError, TypeError, ValueError):
        return {}


def _described(d: Deployment, secrets: Mapping[str, str]) -> dict[str, Any]:
    """Return the deployment as JSON, with the names of parameters in place of secrets."""
    described = asdict(d)
    for name in _TRANSIENT_FIELDS:
        del described[name]
    for field, variable in (("environment", str), ("vllm_flags", variable_of)):
        described[field] = {
            name: {"parameter": secrets[variable(name)]} if isinstance(value, Secret) else value
            for name, value in getattr(d, field).items()
        }
    return described


def deployment_of(template: Mapping[str, Any], stamp: str) -> Deployment:
    """Return the deployment of a template, with a new stamp.

    Raises:
        UserError: another tool or another version of peagle made it.
    """
    kept = stored_deployment(template)
    known = {f.name for f in fields(Deployment)} - {*_TRANSIENT_FIELDS}
    if set(kept) != known:
        raise UserError(
            "This version of `peagle deploy sagemaker create` did not make the endpoint's stack. "
            "Delete the endpoint and create it anew, or use the version that made it."
        )
    secret = {
        name: {
            key: KeptSecret(value["parameter"]) if isinstance(value, dict) else value
            for key, value in kept.pop(name).items()
        }
        for name in ("environment", "vllm_flags")
    }
    made = TypeAdapter(Deployment).validate_python({**kept, "stamp": stamp})
    return replace(made, **secret)


# ---- secrets ----


def _secret_parameters(variables: Mapping[str, str], stamp: str) -> dict[str, str]:
    """Return the parameter of each secret variable.

    A new value gets a new parameter, so that CloudFormation sees the change of its users.
    """
    made = "Value" + re.sub(r"\W|-", "", stamp)
    secret = {name: value for name, value in variables.items() if isinstance(value, Secret)}
    return {
        name: str(value) if isinstance(value, KeptSecret) else f"{made}N{number}"
        for number, (name, value) in enumerate(secret.items())
    }


def _secret_resources(d: Deployment, secrets: Mapping[str, str]) -> Resources:
    """Return the secrets that keep tokens and keys, named after their parameters."""
    return {
        f"Secret{key}": _resource(
            "AWS::SecretsManager::Secret",
            Description=f"Variable {name} of endpoint {d.endpoint_name}",
            SecretString={"Ref": key},
            KmsKeyId=d.kms_key,
            Tags=_tags(d),
        )
        for name, key in secrets.items()
        if is_secret_name(name)
    }


def _variable_value(name: str, value: str, secrets: Mapping[str, str]) -> Any:
    key = secrets.get(name)
    if key is None:
        return value
    if is_secret_name(name):
        return {"Fn::Sub": f"{{{{resolve:secretsmanager:${{Secret{key}}}:SecretString}}}}"}
    return {"Ref": key}


# ---- resources ----


def _resource(kind: str, *, after: str = "", **properties: Any) -> dict[str, Any]:
    """Return a resource without its empty properties."""
    given = {k: v for k, v in properties.items() if v not in (None, "", [], {})}
    return {"Type": kind, **({"DependsOn": after} if after else {}), "Properties": given}


def _substituted(text: str) -> Any:
    return {"Fn::Sub": text} if "${AWS::" in text else text


def _tags(d: Deployment) -> list[dict[str, str]]:
    tags = {**d.tags, ENDPOINT_TAG: d.endpoint_name, SOURCE_TAG: d.source}
    return [{"Key": key, "Value": value} for key, value in tags.items()]


def _endpoint_resources(
    d: Deployment, variables: Mapping[str, str], secrets: Mapping[str, str]
) -> Resources:
    container: dict[str, Any] = {
        "Image": _substituted(d.image),
        "Environment": {n: _variable_value(n, value, secrets) for n, value in variables.items()},
    }
    data = next((m.name for m in (d.target, d.draft) if m is not None and m.kind == "s3"), "")
    if data:
        source = {"S3Uri": _substituted(data), "S3DataType": "S3Prefix", "CompressionType": "None"}
        container["ModelDataSource"] = {"S3DataSource": source}
    network = d.vpc and {
        "Subnets": list(d.vpc.subnets),
        "SecurityGroupIds": list(d.vpc.security_groups),
    }
    variant: dict[str, Any] = {
        "VariantName": VARIANT,
        "ModelName": {"Fn::GetAtt": ["Model", "ModelName"]},
        "InstanceType": d.instance_type,
        "InitialInstanceCount": d.instance_count,
        "InitialVariantWeight": 1.0,
        "ContainerStartupHealthCheckTimeoutInSeconds": d.startup_timeout_s,
        # An answer of many tokens occupies an instance for long: go where the fewest are.
        "RoutingConfig": {"RoutingStrategy": "LEAST_OUTSTANDING_REQUESTS"},
    }
    if data:
        variant["ModelDataDownloadTimeoutInSeconds"] = d.startup_timeout_s
    if d.ami:
        variant["InferenceAmiVersion"] = d.ami
    return {
        "Model": _resource(
            "AWS::SageMaker::Model",
            PrimaryContainer=container,
            ExecutionRoleArn=d.role or {"Ref": ROLE_PARAMETER},
            VpcConfig=network,
            Tags=_tags(d),
        ),
        "EndpointConfig": _resource(
            "AWS::SageMaker::EndpointConfig",
            ProductionVariants=[variant],
            DataCaptureConfig=_capture_config(d.capture),
            KmsKeyId=d.kms_key,
            Tags=_tags(d),
        ),
        "Endpoint": _resource(
            "AWS::SageMaker::Endpoint",
            EndpointName=d.endpoint_name,
            EndpointConfigName={"Fn::GetAtt": ["EndpointConfig", "EndpointConfigName"]},
            # Scaling may have changed the number of instances: an update must not reset it.
            RetainAllVariantProperties=True,
            ExcludeRetainedVariantProperties=[{"VariantPropertyType": "DesiredInstanceCount"}]
            if d.sets_count
            else None,
            Tags=_tags(d),
        ),
    }


def _capture_config(capture: Capture | None) -> dict[str, Any]:
    """Return the DataCaptureConfig; other content types than JSON are captured in base64."""
    if capture is None:
        return {}
    return {
        "EnableCapture": True,
        "InitialSamplingPercentage": capture.percent,
        "DestinationS3Uri": _substituted(capture.uri),
        "CaptureOptions": [{"CaptureMode": "Input"}, {"CaptureMode": "Output"}],
        "CaptureContentTypeHeader": {"JsonContentTypes": ["application/json"]},
        **({"KmsKeyId": capture.kms_key} if capture.kms_key else {}),
    }


def resource_of(endpoint: str, variant: str) -> str:
    """Return Application Auto Scaling's name of a variant."""
    return f"endpoint/{endpoint}/variant/{variant}"


def _scaling_resources(endpoint: str, wanted: Autoscaling | None) -> Resources:
    if wanted is None:
        return {}
    tracking = {
        "TargetValue": wanted.target_value,
        "PredefinedMetricSpecification": {"PredefinedMetricType": wanted.metric},
        "ScaleOutCooldown": SCALE_OUT_COOLDOWN_S,
        "ScaleInCooldown": SCALE_IN_COOLDOWN_S,
    }
    return {
        "ScalableTarget": _resource(
            "AWS::ApplicationAutoScaling::ScalableTarget",
            after="Endpoint",
            ServiceNamespace="sagemaker",
            ResourceId=resource_of(endpoint, VARIANT),
            ScalableDimension=DIMENSION,
            MinCapacity=wanted.min_instances,
            MaxCapacity=wanted.max_instances,
        ),
        "ScalingPolicy": _resource(
            "AWS::ApplicationAutoScaling::ScalingPolicy",
            PolicyName=f"peagle-{endpoint}",
            PolicyType="TargetTrackingScaling",
            ScalingTargetId={"Ref": "ScalableTarget"},
            TargetTrackingScalingPolicyConfiguration=tracking,
        ),
    }


def _alarm_resources(d: Deployment) -> Resources:
    """Return the alarms on failures and, if our container reports acceptance, on its drift."""
    if not d.alarm_topic:
        return {}
    dimensions = [
        {"Name": names.ENDPOINT, "Value": d.endpoint_name},
        {"Name": names.VARIANT, "Value": VARIANT},
    ]
    common: dict[str, Any] = {
        "after": "Endpoint",
        "ComparisonOperator": "GreaterThanThreshold",
        "TreatMissingData": "notBreaching",
        "AlarmActions": [d.alarm_topic],
        "OKActions": [d.alarm_topic],
    }
    alarms = {
        # One sample a request, 1 for a failure and 0 else: the average is the share.
        "ServerErrors": _resource(
            "AWS::CloudWatch::Alarm",
            **common,
            AlarmDescription=f"Requests to {d.endpoint_name} fail with status 500 and above.",
            Namespace="AWS/SageMaker",
            MetricName="Invocation5XXErrors",
            Dimensions=dimensions,
            Statistic="Average",
            Period=60,
            EvaluationPeriods=5,
            DatapointsToAlarm=3,
            Threshold=_MAX_ERROR_SHARE,
        )
    }
    expected = expected_from_tags(d.tags)
    if expected is None or d.source != "native" or d.speculative_config is None:
        return alarms

    def counted(name: str, metric: str) -> dict[str, Any]:
        described = {"Namespace": names.NAMESPACE, "MetricName": metric, "Dimensions": dimensions}
        stat = {"Stat": "Sum", "Period": 300, "Metric": described}
        return {"Id": name, "ReturnData": False, "MetricStat": stat}

    length = expected.acceptance_length
    share = f"1 - (1 + accepted / drafts) / {length:g}"
    alarms["AcceptanceDrift"] = _resource(
        "AWS::CloudWatch::Alarm",
        **common,
        AlarmDescription=f"Drafts of {d.endpoint_name} are accepted less than expected "
        f"(acceptance length {length:g}): decoding is slower, answers are not worse.",
        Metrics=[
            {
                "Id": "drop",
                "Label": "Share of the expected acceptance length that is missing",
                "Expression": f"IF(drafts >= {ENOUGH_DRAFTS}, {share}, 0)",
                "ReturnData": True,
            },
            counted("accepted", names.NUM_ACCEPTED_TOKENS),
            counted("drafts", names.NUM_DRAFTS),
        ],
        Threshold=TOLERATED_DROP,
        EvaluationPeriods=6,
        DatapointsToAlarm=4,
    )
    return alarms
