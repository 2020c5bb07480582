"""An endpoint in service, with metrics and a log, for the tests of those who operate it."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from deploy.fake_aws import ROLE, FakeAws
from peagle.deploy.logs import group_of
from peagle.engine.stats import SpeculationStats
from peagle.serving.emf import document

SPECULATION = {
    "method": "eagle3",
    "model": "/opt/ml/model/draft/",
    "num_speculative_tokens": 3,
    "parallel_drafting": True,
}
DIMENSIONS = {"EndpointName": "code", "VariantName": "AllTraffic"}


def make_endpoint(
    aws: FakeAws,
    *,
    speculation: Mapping[str, Any] | None = SPECULATION,
    tags: Mapping[str, str] | None = None,
) -> None:
    """The endpoint "code" with the variant AllTraffic."""
    client = aws.client("sagemaker")
    environment = {"SM_VLLM_SPECULATIVE_CONFIG": json.dumps(speculation)} if speculation else {}
    container = {"Image": "image", "Environment": environment}
    client.create_model(ModelName="m", ExecutionRoleArn=ROLE, PrimaryContainer=container)
    variant = {"VariantName": "AllTraffic", "ModelName": "m", "InitialInstanceCount": 1}
    variants = [{**variant, "InstanceType": "ml.g7e.2xlarge"}]
    client.create_endpoint_config(EndpointConfigName="c", ProductionVariants=variants)
    listed = [{"Key": key, "Value": value} for key, value in (tags or {}).items()]
    client.create_endpoint(EndpointName="code", EndpointConfigName="c", Tags=listed)
    assert aws.endpoints.status("code") == "InService"


def put(aws: FakeAws, namespace: str, when: datetime, **values: float | Sequence[float]) -> None:
    """Metrics of the variant at one moment."""
    dimensions = [{"Name": name, "Value": value} for name, value in DIMENSIONS.items()]
    data = [
        {"MetricName": name, "Dimensions": dimensions, "Timestamp": when, "Value": value}
        for name, every in values.items()
        for value in (every if isinstance(every, Sequence) else [every])
    ]
    aws.client("cloudwatch").put_metric_data(Namespace=namespace, MetricData=data)


def put_acceptance(aws: FakeAws, when: datetime, stats: SpeculationStats) -> None:
    """What CloudWatch makes of a line of our container."""
    told = document(stats, DIMENSIONS, round(when.timestamp() * 1000))
    (directive,) = told["_aws"]["CloudWatchMetrics"]
    names = [metric["Name"] for metric in directive["Metrics"]]
    put(aws, directive["Namespace"], when, **{name: told[name] for name in names})


def put_log(aws: FakeAws, stream: str, *lines: tuple[datetime, str]) -> None:
    """Lines of an instance, "AllTraffic/i-1"."""
    client, group = aws.client("logs"), group_of("code")
    groups = client.describe_log_groups(logGroupNamePrefix=group)["logGroups"]
    if not groups:
        client.create_log_group(logGroupName=group)
    streams = client.describe_log_streams(logGroupName=group, logStreamNamePrefix=stream)
    if not streams["logStreams"]:
        client.create_log_stream(logGroupName=group, logStreamName=stream)
    events = [{"timestamp": round(t.timestamp() * 1000), "message": text} for t, text in lines]
    client.put_log_events(logGroupName=group, logStreamName=stream, logEvents=events)


# ---- what containers answer ----

REPORT = {"num_drafts": 2, "num_accepted_tokens": 3, "acceptance_length": 2.5}
USAGE = {"prompt_tokens": 5, "completion_tokens": 3, "speculation": REPORT}
WHOLE = {
    "choices": [{"index": 0, "message": {"content": "Zürich"}, "finish_reason": "stop"}],
    "usage": USAGE,
}


def chunk(text: str, **more) -> dict:
    return {"choices": [{"index": 0, "delta": {"content": text}, **more}]}


def events(*every: dict | str, end: str = "\n") -> bytes:
    lines = [e if isinstance(e, str) else json.dumps(e, ensure_ascii=False) for e in every]
    return "".join(f"data: {line}{end}{end}" for line in lines).encode()


WORDS = ("Zür", "ich 🦅", " und", " 日本")
STREAM = events(
    *(chunk(word) for word in WORDS),
    chunk("", finish_reason="stop"),
    {"choices": [], "usage": USAGE},
    "[DONE]",
)


# ---- what vLLM logs ----

# As SpecDecodingLogging.log of vLLM 0.32 writes it, behind the prefix of its logger.
VLLM_LINE = (
    "(APIServer pid=1) INFO 11-22 00:10:00 [metrics.py:128] SpecDecoding metrics: "
    "Mean acceptance length: {length:.2f}, Accepted throughput: 17.10 tokens/s, "
    "Drafted throughput: 40.00 tokens/s, Accepted: {accepted} tokens, Drafted: {drafted} tokens, "
    "Per-position acceptance rate: {rates}, Avg Draft acceptance rate: {share:.1f}%"
)


def vllm_line(stats: SpeculationStats) -> str:
    """What vLLM would log of these drafts."""
    return VLLM_LINE.format(
        length=stats.acceptance_length,
        accepted=stats.num_accepted_tokens,
        drafted=stats.num_draft_tokens,
        rates=", ".join(f"{share:.3f}" for share in stats.acceptance_per_pos),
        share=100 * stats.num_accepted_tokens / stats.num_draft_tokens,
    )


def drafts(k: int, *accepted: int) -> SpeculationStats:
    stats = SpeculationStats()
    for count in accepted:
        stats.record(k, count)
    return stats
