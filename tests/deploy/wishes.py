"""Deployments of all kinds, and how AWS would describe what their calls made."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from peagle.deploy.calls import Call
from peagle.deploy.deployment import Autoscaling, Current, Deployment, HubModel, Secret, Vpc
from peagle.deploy.models import ModelSource
from peagle.deploy.plan import Step, create_calls

ROLE = "arn:aws:iam::123456789012:role/service-role/sagemaker-execution"
STAMP = "20260102030405"
HUB = ModelSource("hub", "owner/target")
WORD = st.text(string.ascii_lowercase + string.digits, min_size=1, max_size=12)
NAMES = st.from_regex(r"[a-zA-Z0-9](-?[a-zA-Z0-9]){0,30}", fullmatch=True)
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=30)


def a_deployment(**fields: Any) -> Deployment:
    """A plain one, with some fields of your own."""
    plain: dict[str, Any] = {
        "endpoint_name": "peagle-test",
        "region": "us-east-1",
        "stamp": STAMP,
        "source": "managed",
        "image": "763104351884.dkr.ecr.us-east-1.amazonaws.com/vllm:tag",
        "target": HUB,
        "role": ROLE,
        "instance_type": "ml.g7e.2xlarge",
        "bucket": "s3://bucket/",
    }
    return Deployment(**{**plain, **fields})


def sources(local: Path) -> st.SearchStrategy[ModelSource]:
    """A model on the hub, in S3, or in the folder."""
    return st.one_of(
        st.builds(lambda a, b, r: ModelSource("hub", f"{a}/{b}", r), WORD, WORD, st.none() | WORD),
        WORD.map(lambda word: ModelSource("s3", f"s3://models-of-mine/{word}/")),
        st.just(ModelSource("local", str(local))),
    )


SPECULATIVE = st.fixed_dictionaries(
    {"method": st.just("eagle3"), "num_speculative_tokens": st.integers(1, 64)},
    optional={"parallel_drafting": st.booleans(), "draft_tensor_parallel_size": st.just(1)},
)
FLAGS = st.dictionaries(
    st.sampled_from(["max-model-len", "enforce-eager", "served-model-name", "lora-modules", "x-y"]),
    st.sampled_from(["8192", "true", "false", "a name", '["a", "b"]', '{"a": [1]}', "[broken", ""]),
)
HUB_MODELS = st.builds(
    HubModel,
    name=WORD,
    environment=st.just({"HF_MODEL_ID": "/opt/ml/model", "SM_VLLM_DTYPE": "auto"}),
    data=st.sampled_from(
        [
            None,
            {"S3Uri": "s3://jumpstart/x/", "S3DataType": "S3Prefix", "CompressionType": "None"},
        ]
    ),
    additional=st.sampled_from(
        [
            (),
            (
                (
                    "draft_model",
                    {"S3Uri": "s3://j/d/", "S3DataType": "S3Prefix", "CompressionType": "None"},
                ),
            ),
        ]
    ),
    gated=st.just(True),
)
AUTOSCALING = st.builds(
    Autoscaling,
    min_instances=st.integers(1, 3),
    max_instances=st.integers(3, 9),
    target_value=st.floats(0.5, 64),
)


@st.composite
def deployments(draw: st.DrawFn, local: Path) -> Deployment:
    """Any that `create` could come to."""
    source = draw(st.sampled_from(["native", "managed", "jumpstart"]))
    hub = draw(HUB_MODELS) if source == "jumpstart" else None
    config = draw(st.none() | SPECULATIVE)
    secrets = st.dictionaries(st.just("HF_TOKEN"), st.just(Secret("hf_nobody_may_see_it")))
    further = st.dictionaries(WORD.map(str.upper).map("V_".__add__), TEXT, max_size=3)
    return a_deployment(
        endpoint_name=draw(NAMES),
        source=source,
        target=HUB if hub else draw(sources(local)),
        draft=draw(sources(local)) if config is not None else None,
        speculative_config=config,
        instance_count=draw(st.integers(1, 20)),
        ami=draw(st.none() | st.just("al2023-ami-sagemaker-inference-gpu-4-1")),
        startup_timeout_s=draw(st.integers(60, 3600)),
        tags=draw(st.dictionaries(WORD, WORD, max_size=3)),
        kms_key=draw(st.sampled_from(["", "alias/mine", "1234abcd-12ab-34cd-56ef-1234567890ab"])),
        vpc=draw(st.none() | st.just(Vpc(("subnet-1", "subnet-2"), ("sg-1",)))),
        environment={**draw(further), **draw(secrets)},
        vllm_flags={} if hub else draw(FLAGS),
        autoscaling=draw(st.none() | AUTOSCALING),
        accept_eula=hub is not None,
        hub_model=hub,
    )


def calls(steps: list[Step]) -> dict[str, Call]:
    """The calls among the steps, by operation."""
    return {step.operation: step for step in steps if isinstance(step, Call)}


def as_described(d: Deployment) -> Current:
    """What the describe calls would tell after the calls of `create`."""
    made = calls(create_calls(d))
    model, config, endpoint = (
        dict(made[f"Create{kind}"].parameters) for kind in ("Model", "EndpointConfig", "Endpoint")
    )
    tags = {tag["Key"]: tag["Value"] for tag in endpoint.pop("Tags")}
    arn = f"arn:aws:sagemaker:us-east-1:123456789012:endpoint/{d.endpoint_name.lower()}"
    return Current(
        endpoint_name=d.endpoint_name,
        region=d.region,
        status="InService",
        config_name=config["EndpointConfigName"],
        model_names=(model["ModelName"],),
        endpoint={
            **endpoint,
            "EndpointArn": arn,
            "ProductionVariants": [
                {"VariantName": "AllTraffic", "DesiredInstanceCount": d.instance_count}
            ],
        },
        config=config,
        model=model,
        tags=tags,
        autoscaling=d.autoscaling,
        scaling_policies=(f"peagle-{d.endpoint_name}",) if d.autoscaling else (),
        uploads=(tags["peagle:uploads"],) if "peagle:uploads" in tags else (),
    )
