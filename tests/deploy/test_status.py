"""An endpoint at a glance, of what AWS, CloudWatch and the log say."""

import json
from datetime import UTC, datetime, timedelta

import pytest

from deploy.operating import drafts, make_endpoint, put, put_acceptance, put_log, vllm_line
from peagle.cli.deploy_operate import status_lines
from peagle.deploy import monitoring
from peagle.deploy.status import age, describe, read_status
from peagle.deploy.template import METRICS
from peagle.engine.stats import SpeculationStats

# The last whole minute, so that what happens at it is in one period.
NOW = datetime.now(UTC).replace(second=0, microsecond=0)
AGO = [NOW - timedelta(minutes=minutes) for minutes in range(120)]


def status(aws, **options):
    clients = aws.clients()
    return read_status(clients, describe(clients, "code"), now=NOW, **options)


def test_metrics_are_pooled_over_minutes_and_latencies_are_milliseconds(aws):
    make_endpoint(aws)
    put(aws, "AWS/SageMaker", AGO[5], Invocations=[1, 1, 1], ModelLatency=[100e3, 200e3, 300e3])
    put(aws, "AWS/SageMaker", AGO[9], Invocations=1, ModelLatency=1000e3, OverheadLatency=500.0)
    put(aws, "AWS/SageMaker", AGO[90], Invocations=50)  # before the window
    put(aws, "/aws/sagemaker/Endpoints", AGO[5], GPUUtilization=[40.0, 60.0])
    found = {value.metric.name: value for value in status(aws).values}
    assert found["Invocations"].total == 4
    # (100 + 200 + 300 + 1000) / 4, not the mean of the minutes' means.
    assert found["ModelLatency"].average == pytest.approx(400)
    assert found["ModelLatency"].maximum == pytest.approx(1000)
    assert found["OverheadLatency"].average == pytest.approx(0.5)
    assert found["GPUUtilization"].average == pytest.approx(50)
    assert found["FirstChunkLatency"].average is None
    text = "\n".join(status_lines(status(aws)))
    assert "400.0 ms" in text
    assert "no data" in text


def test_acceptance_is_that_of_all_drafts_of_the_window(aws):
    make_endpoint(aws)
    every = [drafts(3, 3, 2, 0), drafts(3, *[1] * 40)]
    for when, stats in zip(AGO[1::20], every):
        put_acceptance(aws, when, stats)
    put_acceptance(aws, AGO[100], drafts(3, *[0] * 1000))
    total = SpeculationStats.pooled(every)
    found = status(aws).acceptance
    assert found is not None
    assert found.acceptance_length == pytest.approx(total.acceptance_length)
    assert found.unconditional == pytest.approx(total.acceptance_per_pos)
    assert found.source == "CloudWatch"


def test_the_managed_container_tells_in_its_log(aws):
    make_endpoint(aws)
    put_log(
        aws,
        "AllTraffic/i-1",
        (AGO[70], vllm_line(drafts(3, 0, 0, 0))),
        (AGO[6], vllm_line(drafts(3, 3, 2))),
        (AGO[5], "INFO Avg generation throughput: 10 tokens/s"),
    )
    put_log(aws, "AllTraffic/i-2", (AGO[5], vllm_line(drafts(3, 1, 0, 3, 3))))
    found = status(aws)
    assert found.acceptance is not None
    assert found.acceptance.num_drafts == 6
    assert found.acceptance.acceptance_length == 1 + 12 / 6
    assert "vLLM's log" in "\n".join(status_lines(found))
    # Days of a log are not read: the last hour stands for them.
    longer = status(aws, window_s=86400)
    assert longer.acceptance == found.acceptance
    assert any("last hour" in note for note in longer.notes)


def test_drift_beside_the_tag_or_what_is_given(aws):
    make_endpoint(aws, tags={monitoring.EXPECTED_TAG: "3.2"})
    put_acceptance(aws, AGO[5], drafts(3, *[1] * 600))
    found = status(aws)
    assert found.drift is not None and found.drift.is_drift
    assert "DRIFT: -37.5% beside the expected 3.20 (tag" in "\n".join(status_lines(found))
    calm = status(aws, expected="2.1")
    assert calm.drift is not None and not calm.drift.is_drift
    assert "drift: -4.8%" in "\n".join(status_lines(calm))
    put_acceptance(aws, AGO[119], drafts(3, 0))
    assert "too few drafts" in "\n".join(
        status_lines(read_status(aws.clients(), describe(aws.clients(), "code"), now=AGO[118]))
    )


def test_state_speculation_and_scaling(aws):
    make_endpoint(aws, tags={"peagle:source": "native"})
    client = aws.client("application-autoscaling")
    where = {
        "ServiceNamespace": "sagemaker",
        "ResourceId": "endpoint/code/variant/AllTraffic",
        "ScalableDimension": "sagemaker:variant:DesiredInstanceCount",
    }
    client.register_scalable_target(**where, MinCapacity=1, MaxCapacity=4)
    metric = {"PredefinedMetricType": METRICS["concurrency"]}
    client.put_scaling_policy(
        PolicyName="p",
        **where,
        PolicyType="TargetTrackingScaling",
        TargetTrackingScalingPolicyConfiguration={
            "TargetValue": 11.0,
            "PredefinedMetricSpecification": metric,
        },
    )
    found = status(aws)
    text = "\n".join(status_lines(found))
    for said in (
        "code: InService, us-east-1",
        "container: native",
        "AllTraffic: 1 x ml.g7e.2xlarge",
        "eagle3, /opt/ml/model/draft/, K = 3, parallel drafting",
        "1 to 4 instances, 11 requests at once on each",
        "acceptance length: not known",
    ):
        assert said in text
    data = json.loads(json.dumps(found.to_json()))
    assert data["autoscaling"]["target_value"] == 11.0
    assert data["speculation"]["num_speculative_tokens"] == 3
    assert (data["acceptance"], data["drift"], data["notes"]) == (None, None, [])


def test_an_endpoint_without_drafts(aws):
    make_endpoint(aws, speculation=None)
    text = "\n".join(status_lines(status(aws)))
    assert "speculation: none" in text
    assert "acceptance" not in text


def test_a_failed_endpoint_says_why(aws):
    make_endpoint(aws)
    clients = aws.clients()
    current = describe(clients, "code")
    reason = "The primary container did not pass the ping health check."
    failed = {**current.endpoint, "EndpointStatus": "Failed", "FailureReason": reason}
    from dataclasses import replace

    found = read_status(clients, replace(current, status="Failed", endpoint=failed), now=NOW)
    assert f"why: {reason}" in "\n".join(status_lines(found))
    assert found.to_json()["failure_reason"] == reason


@pytest.mark.parametrize("operation", ["GetMetricData", "FilterLogEvents"])
def test_what_may_not_be_read_is_a_note(aws, operation):
    make_endpoint(aws)
    put_log(aws, "AllTraffic/i-1", (AGO[6], "x"))
    aws.fail("access denied", operation)
    found = status(aws)
    assert found.current.status == "InService"
    assert len(found.notes) == 1
    assert "denied" in found.notes[0]


def test_long_windows_have_few_periods_and_queries_fit_a_call(aws):
    make_endpoint(aws, speculation={"method": "eagle3"})  # K unknown: all positions are asked for
    for window_s in (3600, 86400 * 30):
        status(aws, window_s=window_s)
        asked = [call for call in aws.calls if call.operation == "GetMetricData"][-1].parameters
        (period,) = {query["MetricStat"]["Period"] for query in asked["MetricDataQueries"]}
        assert period % 60 == 0
        assert window_s / period <= 1440
        assert len(asked["MetricDataQueries"]) <= 500


def test_ages(aws):
    make_endpoint(aws)
    current = describe(aws.clients(), "code")
    created = current.endpoint["CreationTime"]
    for after, said in (
        (timedelta(minutes=5), "5 min"),
        (timedelta(hours=3, minutes=7), "3 h 7 min"),
        (timedelta(days=3, hours=4), "3 d 4 h"),
    ):
        assert age(current, created + after) == said
