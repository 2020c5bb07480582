"""Deployments of all kinds."""

import string
from typing import Any

from hypothesis import strategies as st

from peagle.deploy.deployment import Autoscaling, Capture, Deployment, Secret, Vpc
from peagle.deploy.models import ModelSource

ROLE = "arn:aws:iam::123456789012:role/service-role/sagemaker-execution"
STAMP = "20260102030405-ab12"
HUB = ModelSource("hub", "owner/target")
TOPIC = "arn:aws:sns:us-east-1:123456789012:alarms"
WORD = st.text(string.ascii_lowercase + string.digits, min_size=1, max_size=12)
NAMES = st.from_regex(r"[a-zA-Z0-9](-?[a-zA-Z0-9]){0,30}", fullmatch=True)
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=30)


def a_deployment(**fields: Any) -> Deployment:
    """A plain one, with some fields of your own."""
    plain: dict[str, Any] = {
        "endpoint_name": "peagle-test",
        "stamp": STAMP,
        "source": "managed",
        "image": "763104351884.dkr.ecr.us-east-1.amazonaws.com/vllm:tag",
        "target": HUB,
        "role": ROLE,
        "instance_type": "ml.g7e.2xlarge",
    }
    return Deployment(**{**plain, **fields})


SOURCES = st.one_of(
    st.builds(lambda a, b, r: ModelSource("hub", f"{a}/{b}", r), WORD, WORD, st.none() | WORD),
    WORD.map(lambda word: ModelSource("s3", f"s3://models-of-mine/{word}/")),
)
SPECULATIVE = st.fixed_dictionaries(
    {"method": st.just("eagle3"), "num_speculative_tokens": st.integers(1, 64)},
    optional={"parallel_drafting": st.booleans(), "draft_tensor_parallel_size": st.just(1)},
)
FLAGS = st.dictionaries(
    st.sampled_from(["max-model-len", "enforce-eager", "served-model-name", "lora-modules", "x-y"]),
    st.sampled_from(["8192", "true", "false", "a name", '["a", "b"]', '{"a": [1]}', "[broken", ""]),
)
AUTOSCALING = st.builds(
    Autoscaling,
    min_instances=st.integers(1, 3),
    max_instances=st.integers(3, 9),
    target_value=st.floats(0.5, 64),
)


@st.composite
def deployments(draw: st.DrawFn) -> Deployment:
    """Any that `create` could come to."""
    config = draw(st.none() | SPECULATIVE)
    target = draw(SOURCES)
    draft = draw(SOURCES) if config is not None else None
    if draft is not None and {target.kind, draft.kind} == {"s3"}:
        draft = ModelSource("s3", f"{target.name}peagle/chat/draft/")
    secrets = st.dictionaries(
        st.sampled_from(["HF_TOKEN", "DATABASE_URL"]), st.just(Secret("nobody_may_see_it"))
    )
    further = st.dictionaries(WORD.map(str.upper).map("V_".__add__), TEXT, max_size=3)
    return a_deployment(
        endpoint_name=draw(NAMES),
        source=draw(st.sampled_from(["native", "managed"])),
        image=draw(st.sampled_from(["a/b:c", "1.dkr.ecr.${AWS::Region}.amazonaws.com/x:1"])),
        target=target,
        draft=draft,
        speculative_config=config,
        role=draw(st.sampled_from([ROLE, ""])),
        instance_count=draw(st.integers(1, 20)),
        ami=draw(st.sampled_from(["", "al2023-ami-sagemaker-inference-gpu-4-1"])),
        startup_timeout_s=draw(st.integers(60, 3600)),
        sets_count=draw(st.booleans()),
        tags=draw(st.dictionaries(WORD, WORD, max_size=3))
        | draw(st.sampled_from([{}, {"peagle-acceptance-length": "3.1"}])),
        kms_key=draw(st.sampled_from(["", "alias/mine", "1234abcd-12ab-34cd-56ef-1234567890ab"])),
        vpc=draw(st.none() | st.just(Vpc(("subnet-12345678",), ("sg-12345678",)))),
        environment={**draw(further), **draw(secrets)},
        vllm_flags=draw(FLAGS),
        autoscaling=draw(st.none() | AUTOSCALING),
        capture=draw(st.sampled_from([None, Capture(20, "s3://b/c"), Capture(1, "s3://b", "k")])),
        alarm_topic=draw(st.sampled_from(["", TOPIC])),
        uploads=draw(st.sampled_from([(), ("s3://b/peagle/x/1/target/",)])),
    )
