"""The alerts: sound for promtool, and asking only for what /metrics has."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "deploy" / "prometheus-alerts.yaml"
UNIT_TESTS = Path(__file__).with_name("alerts_test.yaml")
ALERTS: dict[str, dict[str, Any]] = {
    rule["alert"]: rule
    for group in yaml.safe_load(FILE.read_text())["groups"]
    for rule in group["rules"]
}
NAMES = sorted(ALERTS)
PROMTOOL = shutil.which("promtool")


def test_what_matters_is_watched():
    assert NAMES == [
        "PeagleAcceptanceDropped",
        "PeagleDown",
        "PeagleEngineHung",
        "PeagleEngineRestarted",
        "PeagleRequestsWait",
        "PeagleServerErrors",
    ]


@pytest.mark.parametrize("name", NAMES)
def test_an_alert_says_what_to_do(name):
    alert = ALERTS[name]
    assert re.fullmatch(r"\d+m", alert["for"])
    assert alert["labels"] in ({"severity": "critical"}, {"severity": "warning"})
    assert set(alert["annotations"]) == {"summary", "runbook"}
    page, _, anchor = alert["annotations"]["runbook"].partition("#")
    headings = re.findall(r"^#+ (\S.*)$", (ROOT / page).read_text(), re.MULTILINE)
    assert name in headings and anchor == name.lower()


@pytest.mark.parametrize("name", NAMES)
def test_an_alert_asks_for_metrics_and_labels_that_exist(name, rendered):
    alert = ALERTS[name]
    metrics = set(re.findall(r"peagle:\w+", alert["expr"]))
    assert metrics and metrics <= rendered.keys()
    # Prometheus adds these two itself.
    labels = {"job", "instance"}.union(*(rendered[metric] for metric in metrics))
    grouped = re.findall(r"(?:by|on) \(([^)]*)\)", alert["expr"])
    used = {label.strip() for group in grouped for label in group.split(",")}
    used |= set(re.findall(r"[{,](\w+)=", alert["expr"]))
    used |= set(re.findall(r"\$labels\.(\w+)", alert["annotations"]["summary"]))
    assert used <= labels


def test_counters_are_read_over_a_time_and_gauges_as_they_are():
    for name, alert in ALERTS.items():
        for metric, window in re.findall(r"(peagle:\w+)(?:\{[^}]*\})?(\[)?", alert["expr"]):
            assert bool(window) == metric.endswith(("_total", "_info")), (name, metric)


def test_every_alert_is_tested_both_ways():
    expected: dict[str, set[bool]] = {name: set() for name in NAMES}
    for test in yaml.safe_load(UNIT_TESTS.read_text())["tests"]:
        for one in test["alert_rule_test"]:
            expected[one["alertname"]].add(bool(one["exp_alerts"]))
    assert all(ways == {False, True} for ways in expected.values()), expected


# ---- promtool ----

needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="promtool is not installed (Debian and Ubuntu: package prometheus)"
)


def promtool(*words: object) -> subprocess.CompletedProcess[str]:
    assert PROMTOOL is not None
    return subprocess.run([PROMTOOL, *map(str, words)], capture_output=True, text=True)


@needs_promtool
def test_promtool_takes_the_rules():
    result = promtool("check", "rules", "--lint-fatal", FILE)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"{len(ALERTS)} rules found" in result.stdout


@needs_promtool
def test_alerts_go_off_when_they_should():
    result = promtool("test", "rules", UNIT_TESTS)
    assert result.returncode == 0, result.stdout + result.stderr


@needs_promtool
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("expression", ["vector(1) == 0", "vector(1)"])
def test_promtool_misses_an_alert_that_never_or_always_goes_off(name, expression, tmp_path):
    rules = yaml.safe_load(FILE.read_text())
    for rule in rules["groups"][0]["rules"]:
        if rule["alert"] == name:
            rule["expr"] = expression
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rules))
    tests = yaml.safe_load(UNIT_TESTS.read_text()) | {"rule_files": ["rules.yaml"]}
    tests["tests"] = [test for test in tests["tests"] if test["name"] == name]
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(tests))
    result = promtool("test", "rules", tmp_path / "tests.yaml")
    assert result.returncode == 1 and name in result.stdout + result.stderr
