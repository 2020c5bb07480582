"""The manifest: valid for Kubernetes, and in agreement with the server and the image."""

import json
import re
import shlex
import tomllib
from dataclasses import fields
from ipaddress import ip_address, ip_network
from types import SimpleNamespace
from typing import Any, cast

import pytest

from peagle.serving.keys import ENVIRONMENT_VARIABLE, ApiKeys
from serving.asgi import guard
from serving.image import ROOT, USER, environment_of, last

yaml = pytest.importorskip("yaml")

MANIFEST = ROOT / "deploy" / "kubernetes.yaml"
OBJECTS = {obj["kind"]: obj for obj in yaml.safe_load_all(MANIFEST.read_text())}
# Kinds that a cluster has only with the Prometheus operator.
FOREIGN = {"PodMonitor"}
# The first and the last Kubernetes that it is checked against; the header names the first.
OLDEST, NEWEST = "1.27", "1.34"

DEPLOYMENT = OBJECTS["Deployment"]
POD = DEPLOYMENT["spec"]["template"]["spec"]
(SERVER,) = POD["containers"]
LABELS = {"app.kubernetes.io/name": "peagle"}


def options() -> dict[str, str]:
    """The arguments of the server: values by option, the model under ""."""
    found: dict[str, str] = {}
    words = iter(SERVER["args"][1:])
    for word in words:
        name, equals, value = word.partition("=")
        found[name if word.startswith("--") else ""] = (
            (value if equals else next(words)) if word.startswith("--") else word
        )
    return found


# ---- validity ----


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("kind", sorted(OBJECTS.keys() - FOREIGN))
def test_schema(kind, version):
    validator = pytest.importorskip("kubernetes_validate")
    assert validator.validate(OBJECTS[kind], version, strict=True) == version


def test_schema_finds_mistakes():
    validator = pytest.importorskip("kubernetes_validate")
    broken = json.loads(json.dumps(DEPLOYMENT))
    broken["spec"]["template"]["spec"]["containers"][0]["portz"] = []
    with pytest.raises(validator.ValidationError):
        validator.validate(broken, NEWEST, strict=True)


def test_kinds():
    assert set(OBJECTS) == FOREIGN | {
        *("ServiceAccount", "Deployment", "Service"),
        *("PodDisruptionBudget", "HorizontalPodAutoscaler", "NetworkPolicy"),
    }
    assert f"Kubernetes {OLDEST} or newer" in MANIFEST.read_text().splitlines()[0]
    assert all(obj["metadata"]["name"] == "peagle" for obj in OBJECTS.values())


# ---- agreement among the objects ----


@pytest.mark.parametrize(
    "selector",
    [
        DEPLOYMENT["spec"]["selector"]["matchLabels"],
        POD["topologySpreadConstraints"][0]["labelSelector"]["matchLabels"],
        OBJECTS["Service"]["spec"]["selector"],
        OBJECTS["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
        OBJECTS["PodMonitor"]["spec"]["selector"]["matchLabels"],
        OBJECTS["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"],
    ],
)
def test_selectors_find_the_pods(selector):
    assert selector == LABELS == DEPLOYMENT["spec"]["template"]["metadata"]["labels"]


def test_references():
    assert POD["serviceAccountName"] == OBJECTS["ServiceAccount"]["metadata"]["name"]
    scaled = OBJECTS["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
    assert (scaled["kind"], scaled["name"]) == ("Deployment", DEPLOYMENT["metadata"]["name"])
    assert scaled["apiVersion"] == DEPLOYMENT["apiVersion"]
    assert "replicas" not in DEPLOYMENT["spec"]
    mounts = {mount["name"] for mount in SERVER["volumeMounts"]}
    assert mounts == {volume["name"] for volume in POD["volumes"]}


def test_ports():
    (port,) = SERVER["ports"]
    assert port["containerPort"] == int(options()["--port"])
    (service,) = OBJECTS["Service"]["spec"]["ports"]
    (metrics,) = OBJECTS["PodMonitor"]["spec"]["podMetricsEndpoints"]
    probed = {probe["httpGet"]["port"] for probe in probes().values()}
    assert {service["targetPort"], metrics["port"], *probed} == {port["name"]}


# ---- agreement with the server ----


def probes() -> dict[str, dict[str, Any]]:
    return {name: SERVER[f"{name}Probe"] for name in ("startup", "readiness", "liveness")}


def test_arguments_are_understood():
    from peagle.cli.main import LazyCommand
    from peagle.config import SpeculativeConfig

    assert SERVER["command"] == ["peagle"] and SERVER["args"][0] == "serve"
    command = LazyCommand("serve").load()
    known = {name for parameter in command.params for name in parameter.opts}
    assert options().keys() - {""} <= known
    # Parses them as a whole, and refuses values of the wrong kind.
    context = command.make_context("serve", [*SERVER["args"][1:]])
    assert context.params["model"] == options()[""]
    config = SpeculativeConfig.parse(options()["--speculative-config"])
    assert config.parallel_drafting and config.model


def test_the_server_has_the_routes(routes):
    asked = {probe["httpGet"]["path"] for probe in probes().values()}
    asked |= {point["path"] for point in OBJECTS["PodMonitor"]["spec"]["podMetricsEndpoints"]}
    assert asked <= routes


@pytest.fixture
def routes() -> set[str]:
    """The paths of the server's application."""
    pytest.importorskip("fastapi")
    from peagle.serving.app import create_app
    from peagle.serving.config import ServerConfig

    # What it serves matters only to those who call a route.
    app = create_app(cast(Any, SimpleNamespace(config=ServerConfig(), swaps=None)))
    return {getattr(route, "path", "") for route in app.routes}


def test_probes_need_no_key():
    """The kubelet has none, and the secret's cannot be put into a probe's headers."""
    server = guard(keys=ApiKeys(["k" * 20]))
    paths = {probe["httpGet"]["path"] for probe in probes().values()}
    assert {server(path=path).status for path in paths} == {200}
    assert server(path="/v1/models").status == 401
    # Other paths are scraped with the key that the server is given.
    (scraped,) = OBJECTS["PodMonitor"]["spec"]["podMetricsEndpoints"]
    (key,) = [v for v in SERVER["env"] if v["name"] == ENVIRONMENT_VARIABLE]
    assert scraped["authorization"]["type"] == "Bearer"
    assert scraped["authorization"]["credentials"] == key["valueFrom"]["secretKeyRef"]


def test_probes_ask_for_the_right_thing():
    """A pod that loads or drains is not ready, but must not be killed."""
    asked = {name: probe["httpGet"]["path"] for name, probe in probes().items()}
    assert asked == {"startup": "/health", "readiness": "/health", "liveness": "/live"}
    startup = SERVER["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 900
    assert (
        startup["periodSeconds"] * startup["failureThreshold"]
        <= (DEPLOYMENT["spec"]["progressDeadlineSeconds"])
    )


def test_there_is_time_to_drain():
    (_, pause) = SERVER["lifecycle"]["preStop"]["exec"]["command"]
    drain = float(options()["--drain-timeout"])
    readiness = SERVER["readinessProbe"]
    assert int(pause) + drain + 10 <= POD["terminationGracePeriodSeconds"]
    assert int(pause) >= readiness["periodSeconds"]


def test_autoscaler_reads_a_metric_that_is_there():
    """By way of the adapter's rule in the comment: the server's name there, ours here."""
    pytest.importorskip("prometheus_client")
    from peagle.engine.stats import Calibration, EngineStats, SpeculationStats
    from peagle.serving.metrics import Metrics

    comment = re.search(r"(#   rules:\n(?:#   .*\n)+)", MANIFEST.read_text())
    assert comment is not None
    (rule,) = yaml.safe_load(comment[1].replace("#   ", ""))["rules"]["custom"]
    (metric,) = OBJECTS["HorizontalPodAutoscaler"]["spec"]["metrics"]
    assert rule["name"]["as"] == metric["pods"]["metric"]["name"]

    sizes = dict.fromkeys((field.name for field in fields(EngineStats)), 0)
    own: dict[str, Any] = {"speculation": SpeculationStats(), "calibration": Calibration()}
    own |= {name: {} for name in ("step_times", "eager_steps", "decode_steps")}
    metrics = Metrics("m")
    metrics.record_engine(0, EngineStats(**{**sizes, **own, "num_kv_blocks": 1, "num_waiting": 3}))
    name = rule["seriesQuery"].partition("{")[0]
    text = metrics.render()[0].decode()
    assert re.findall(rf"^{re.escape(name)}\{{.*\}} (.*)$", text, re.MULTILINE) == ["3.0"]


# ---- safety ----


def test_pod_is_locked_down():
    uid, gid = map(int, USER.split(":"))
    context = POD["securityContext"]
    assert context["runAsNonRoot"] is True
    assert (context["runAsUser"], context["runAsGroup"], context["fsGroup"]) == (uid, gid, gid)
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert SERVER["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert POD["automountServiceAccountToken"] is False
    assert not POD.keys() & {"hostNetwork", "hostPID", "hostIPC"}


def check_traffic(policy: dict[str, Any], among: list[dict[str, Any]]) -> None:
    """What a policy lets through: `among` is between the pods that it is about."""
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert policy["ingress"][: len(among)] == [{"from": [peer]} for peer in among]
    clients, prometheus = policy["ingress"][len(among) :]
    assert clients["ports"] == prometheus["ports"] == [{"port": "http", "protocol": "TCP"}]
    # One peer with two selectors: a pod must match both of them.
    assert clients["from"] == [
        {"namespaceSelector": {}, "podSelector": {"matchLabels": {"peagle-client": "true"}}}
    ]
    namespace = {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}
    assert prometheus["from"] == [{"namespaceSelector": namespace}]
    assert policy["egress"][: len(among)] == [{"to": [peer]} for peer in among]
    names, hub = policy["egress"][len(among) :]
    assert names == {"ports": [{"port": 53, "protocol": p} for p in ("UDP", "TCP")]}
    assert hub["ports"] == [{"port": 443, "protocol": "TCP"}]
    blocks = [peer["ipBlock"] for peer in hub["to"]]
    for address, reached in (
        ("18.164.174.55", True),
        ("2600:9000:20d3::1", True),
        ("10.96.0.1", False),
        ("172.20.0.1", False),
        ("192.168.1.1", False),
        ("169.254.169.254", False),
        ("fd00:ec2::254", False),
        ("fe80::1", False),
    ):
        assert any(is_in(address, block) for block in blocks) is reached, address


def is_in(address: str, block: dict[str, Any]) -> bool:
    found = ip_address(address)
    return found in ip_network(block["cidr"]) and not any(
        found in ip_network(left_out) for left_out in block["except"]
    )


def test_only_clients_and_prometheus_reach_the_server():
    check_traffic(OBJECTS["NetworkPolicy"]["spec"], among=[])


def test_what_is_written_has_a_place():
    """The root file system is read-only."""
    mounted = {mount["mountPath"] for mount in SERVER["volumeMounts"]}
    (volume,) = json.loads(last("cuda", "VOLUME"))
    assert mounted == {volume, "/tmp"}
    environment = environment_of("cuda")
    assert all(environment[name].startswith(volume) for name in ("HF_HOME", "PEAGLE_CACHE"))
    assert all("emptyDir" in volume for volume in POD["volumes"])


def test_secrets_are_references():
    for variable in SERVER["env"]:
        assert "value" not in variable and variable["valueFrom"]["secretKeyRef"]["name"] == "peagle"
    (key,) = [v for v in SERVER["env"] if v["name"] == ENVIRONMENT_VARIABLE]
    assert "optional" not in key["valueFrom"]["secretKeyRef"]  # no key, no pod
    (command,) = [line for line in MANIFEST.read_text().splitlines() if "create secret" in line]
    assert "openssl rand" in command and "peagle" in shlex.split(command.strip("# "))


def test_image_is_this_version_for_a_gpu():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert SERVER["image"].endswith(f"/peagle:{version}-cuda")
    for amounts in SERVER["resources"].values():
        assert amounts["nvidia.com/gpu"] == "1"
