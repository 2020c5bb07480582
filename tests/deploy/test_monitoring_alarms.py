"""The alarms of deploy/cloudwatch-alarms.yaml: linted, created, read back, and worked out."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cfnlint.decode
import pytest
from cfnlint.api import lint_file

from peagle.config import cloudwatch as names
from peagle.deploy import monitoring, status
from peagle.engine.stats import SpeculationStats
from peagle.serving.emf import dimensions_from, document

TEMPLATE = Path(__file__).parents[2] / "deploy" / "cloudwatch-alarms.yaml"
TOPIC = "arn:aws:sns:us-east-1:123456789012:people"


class Template:
    """What CloudFormation makes of the template; moto's CloudFormation has no alarms."""

    def __init__(self, **given: object) -> None:
        self.source, problems = cfnlint.decode.decode(str(TEMPLATE))
        assert not problems
        parameters = self.source["Parameters"]
        assert given.keys() <= parameters.keys()
        self.values = {
            name: str(given[name] if name in given else parameter["Default"])
            for name, parameter in parameters.items()
        }

    def properties(self) -> list[dict[str, Any]]:
        """Of every resource whose condition holds."""
        return [
            self.value(resource["Properties"])
            for resource in self.source["Resources"].values()
            if "Condition" not in resource or self.holds(resource["Condition"])
        ]

    def holds(self, condition: str) -> bool:
        return self.value(self.source["Conditions"][condition])

    def value(self, node: Any) -> Any:
        """A node with its functions worked out; those that the template does not use fail."""
        if isinstance(node, list):
            return [self.value(one) for one in node]
        if not isinstance(node, dict):
            return node
        if len(node) == 1:
            ((name, inside),) = node.items()
            if name == "Ref":
                return None if inside == "AWS::NoValue" else self.values[inside]
            if name == "Fn::Sub":
                return re.sub(r"\$\{(\w+)\}", lambda match: self.values[match[1]], inside)
            if name == "Fn::If":
                return self.value(inside[1] if self.holds(inside[0]) else inside[2])
            if name == "Fn::Not":
                return not self.value(inside[0])
            if name == "Fn::Equals":
                return len({str(self.value(one)) for one in inside}) == 1
            assert not name.startswith("Fn::"), name
        every = {name: self.value(inside) for name, inside in node.items()}
        return {name: inside for name, inside in every.items() if inside is not None}


@pytest.fixture
def create(aws) -> Callable[..., dict[str, dict[str, Any]]]:
    """Creates the alarms, and returns them by name as AWS tells of them."""

    def make(**parameters: object) -> dict[str, dict[str, Any]]:
        client = aws.client("cloudwatch")
        for properties in Template(**parameters).properties():
            properties["Threshold"] = float(properties["Threshold"])  # CloudFormation has text
            client.put_metric_alarm(**properties)
        found = client.describe_alarms()["MetricAlarms"]
        return {alarm["AlarmName"]: alarm for alarm in found}

    return make


@pytest.mark.slow
def test_the_template_is_what_cloudformation_takes():
    assert lint_file(TEMPLATE) == []


@pytest.mark.slow
def test_the_linter_would_have_told(tmp_path):
    path = tmp_path / "wrong.yaml"
    path.write_text(TEMPLATE.read_text().replace("TreatMissingData", "TreatMissing"))
    assert lint_file(path)


def test_the_alarms_are_created(create):
    alarms = create(EndpointName="qwen3", ExpectedAcceptanceLength=3.1, TopicArn=TOPIC)
    assert set(alarms) == {"qwen3-AllTraffic-acceptance-drift", "qwen3-AllTraffic-5xx"}
    for alarm in alarms.values():
        assert alarm["AlarmActions"] == alarm["OKActions"] == [TOPIC]
        assert alarm["TreatMissingData"] == "notBreaching"
    errors = alarms["qwen3-AllTraffic-5xx"]
    assert (errors["Statistic"], errors["Threshold"]) == ("Average", 0.01)
    assert errors["Dimensions"] == [
        {"Name": "EndpointName", "Value": "qwen3"},
        {"Name": "VariantName", "Value": "AllTraffic"},
    ]


def test_latency_alarms_are_made_where_there_is_a_bound(create):
    alarms = create(
        EndpointName="qwen3",
        VariantName="blue",
        ExpectedAcceptanceLength=2,
        MaxModelLatencyMs=9000,
        MaxFirstChunkMs=400,
    )
    assert len(alarms) == 4
    for name, metric, most in (
        ("model-latency", "ModelLatency", 9000),
        ("first-chunk", "FirstChunkLatency", 400),
    ):
        alarm = alarms[f"qwen3-blue-{name}"]
        stated = alarm["Metrics"][1]["MetricStat"]
        assert (stated["Metric"]["MetricName"], stated["Stat"]) == (metric, "p90")
        assert alarm["Threshold"] == most
        # SageMaker counts microseconds.
        assert worked_out(alarm["Metrics"][0]["Expression"], latency=most * 1000) == most
        assert not alarm.get("AlarmActions")


def worked_out(expression: str, **values: float) -> float:
    """An expression of CloudWatch's metric math, for one value of each metric."""

    class Lazy(dict):
        def __missing__(self, key: str) -> Any:
            raise KeyError(key)

    scope = {"IF": lambda condition, yes, no: yes if condition else no, **values}
    return eval(expression, {"__builtins__": {}}, Lazy(scope))


@pytest.mark.parametrize(
    ("length", "drafts", "breaches"),
    [
        (3.0, 10_000, False),
        (2.56, 10_000, False),  # 85.3% of 3
        (2.54, 10_000, True),
        (1.0, 499, False),  # too few drafts
        (1.0, 500, True),
        (4.0, 10_000, False),
    ],
)
def test_drift_is_what_status_calls_drift(create, length, drafts, breaches):
    alarms = create(EndpointName="qwen3", ExpectedAcceptanceLength=3)
    alarm = alarms["qwen3-AllTraffic-acceptance-drift"]
    accepted = (length - 1) * drafts
    share = worked_out(alarm["Metrics"][0]["Expression"], drafts=drafts, accepted=accepted)
    assert alarm["ComparisonOperator"] == "GreaterThanThreshold"
    assert (share > alarm["Threshold"]) is breaches
    measured = monitoring.Acceptance(drafts, accepted, (), "")
    drift = monitoring.drift(measured, monitoring.ExpectedAcceptance(3.0))
    assert drift.is_drift is breaches


def test_the_alarm_reads_what_the_server_writes(create):
    """Namespace, dimensions and names of the alarm are those of a line of the server."""
    environment = {names.ENDPOINT_VARIABLE: "qwen3", names.VARIANT_VARIABLE: "AllTraffic"}
    told = document(SpeculationStats(4, 8, 5, [3, 2]), dimensions_from(environment, "m"), 10**12)
    (directive,) = told["_aws"]["CloudWatchMetrics"]
    written = {metric["Name"] for metric in directive["Metrics"]}
    alarm = create(EndpointName="qwen3", ExpectedAcceptanceLength=3)[
        "qwen3-AllTraffic-acceptance-drift"
    ]
    for query in alarm["Metrics"][1:]:
        metric = query["MetricStat"]["Metric"]
        assert query["MetricStat"]["Stat"] == "Sum"
        assert metric["Namespace"] == directive["Namespace"] == names.NAMESPACE
        assert metric["MetricName"] in written
        dimensions = {d["Name"]: d["Value"] for d in metric["Dimensions"]}
        assert list(dimensions) == directive["Dimensions"][0]
        assert dimensions.items() <= told.items()
    assert set(monitoring.metric_names(2)) <= written


def test_defaults_are_those_of_status():
    parameters = Template(EndpointName="x", ExpectedAcceptanceLength=2).source["Parameters"]
    assert parameters["ToleratedDrop"]["Default"] == monitoring.TOLERATED_DROP
    assert parameters["MinimumDrafts"]["Default"] == monitoring.ENOUGH_DRAFTS
    shown = {metric.name for metric in status.METRICS}
    assert {"Invocation5XXErrors", "ModelLatency", "FirstChunkLatency"} <= shown
