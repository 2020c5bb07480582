"""The examples for several nodes: valid, in agreement with the command line, and safe."""

import json
import os
import re
import socket
import subprocess
import threading
import tomllib
from pathlib import Path

import pytest

from serving.test_kubernetes import check_traffic

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "deploy" / "vllm-ray.sh"
MANIFEST = ROOT / "deploy" / "vllm-kubernetes.yaml"
OBJECTS = list(yaml.safe_load_all(MANIFEST.read_text()))
BY_NAME = {(one["kind"], one["metadata"]["name"]): one for one in OBJECTS}
HEAD = BY_NAME["StatefulSet", "peagle-vllm-head"]
WORKER = BY_NAME["StatefulSet", "peagle-vllm-worker"]
LABEL = {"app.kubernetes.io/name": "peagle-vllm"}


def pod(stateful_set: dict) -> dict:
    return stateful_set["spec"]["template"]["spec"]


def container(stateful_set: dict) -> dict:
    (only,) = pod(stateful_set)["containers"]
    return only


# ---- Kubernetes ----


@pytest.mark.parametrize("version", ["1.27", "1.34"])
@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_schema(name, version):
    validator = pytest.importorskip("kubernetes_validate")
    validator.validate(BY_NAME[name], version, strict=True)
    broken = json.loads(json.dumps(BY_NAME[name])) | {"spek": 1}
    with pytest.raises(validator.ValidationError):
        validator.validate(broken, version, strict=True)


def test_names_agree():
    assert len(BY_NAME) == len(OBJECTS) == 6
    for one in (HEAD, WORKER):
        labels = one["spec"]["template"]["metadata"]["labels"]
        assert one["spec"]["selector"]["matchLabels"] == labels
        assert labels.items() >= LABEL.items()
        assert ("Service", one["spec"]["serviceName"]) in BY_NAME
        assert ("ServiceAccount", pod(one)["serviceAccountName"]) in BY_NAME
        mounts = {mount["name"] for mount in container(one)["volumeMounts"]}
        assert mounts == {volume["name"] for volume in pod(one)["volumes"]}
    (_, address) = container(WORKER)["args"]
    assert address == f"{HEAD['metadata']['name']}-0.{HEAD['spec']['serviceName']}"
    head_labels = HEAD["spec"]["template"]["metadata"]["labels"]
    assert BY_NAME["Service", "peagle-vllm"]["spec"]["selector"] == head_labels
    ray = BY_NAME["Service", "peagle-vllm-ray"]["spec"]
    assert ray["clusterIP"] == "None" and ray["publishNotReadyAddresses"] is True
    assert ray["selector"] == LABEL
    ports = {port["name"]: port["containerPort"] for port in container(HEAD)["ports"]}
    assert ports == {"http": 8080, "ray": 6379} and "RAY_PORT:-6379" in SCRIPT.read_text()
    (volume,) = [v for v in pod(HEAD)["volumes"] if "configMap" in v]
    (create,) = re.findall(r"create configmap (\S+) --from-file=(\S+)", MANIFEST.read_text())
    assert create == (volume["configMap"]["name"], SCRIPT.relative_to(ROOT).as_posix())
    assert container(HEAD)["command"] == ["sh", f"/scripts/{SCRIPT.name}"]


def test_sizes_agree():
    args = container(HEAD)["args"]
    assert args[0] == "head"
    nodes = HEAD["spec"]["replicas"] + WORKER["spec"]["replicas"]
    assert int(args[1]) == nodes
    gpus = int(container(HEAD)["resources"]["limits"]["nvidia.com/gpu"])
    (size,) = [word for word in args if word.startswith("--tensor-parallel-size=")]
    assert int(size.partition("=")[2]) == nodes * gpus
    assert container(WORKER)["resources"] == container(HEAD)["resources"]


def test_the_command_line_is_understood():
    from peagle.backends.vllm.checks import check_flags
    from peagle.cli.main import LazyCommand

    words = container(HEAD)["args"][2:]
    assert words[:2] == ["peagle", "serve"]
    context = LazyCommand("serve").load().make_context("serve", words[2:])
    assert context.params["engine"] == "vllm" and context.params["model"] == "openai/gpt-oss-120b"
    assert list(check_flags(context.params["flags"])) == []
    drain, grace = context.params["drain_timeout"], pod(HEAD)["terminationGracePeriodSeconds"]
    (_, pause) = container(HEAD)["lifecycle"]["preStop"]["exec"]["command"]
    assert drain + int(pause) + 10 <= grace
    probes = {
        container(HEAD)[f"{name}Probe"]["httpGet"]["port"] for name in ("startup", "liveness")
    }
    assert probes == {"http"} and context.params["port"] == 8080


def test_pods_are_locked_down():
    for one in (HEAD, WORKER):
        assert pod(one)["automountServiceAccountToken"] is False
        assert pod(one)["securityContext"]["runAsNonRoot"] is True
        assert container(one)["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert not pod(one).keys() & {"hostNetwork", "hostPID", "hostIPC"}
        variables = {variable["name"]: variable for variable in container(one)["env"]}
        assert "value" not in variables["HF_TOKEN"]
        # The server needs the key; workers do not get it.
        assert ("PEAGLE_API_KEY" in variables) == (one is HEAD)
        assert "value" not in variables.get("PEAGLE_API_KEY", {})
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    images = {container(one)["image"] for one in (HEAD, WORKER)}
    assert images == {f"registry.example.com/peagle-vllm:{version}"}


def test_only_its_own_pods_reach_ray():
    policy = BY_NAME["NetworkPolicy", "peagle-vllm"]["spec"]
    assert policy["podSelector"]["matchLabels"] == LABEL
    check_traffic(policy, among=[{"podSelector": {"matchLabels": LABEL}}])


# ---- the script ----

RAY = '''
import json, os, sys

def init(**given): pass

def nodes():
    """One more node at every look."""
    path = os.environ["FAKE_RAY"] + ".looks"
    looks = int(open(path).read()) + 1 if os.path.exists(path) else 1
    open(path, "w").write(str(looks))
    return [{"Alive": True}] * looks + [{"Alive": False}]
'''
SCRIPTS = """
import json, os, sys
with open(os.environ["FAKE_RAY"], "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
"""


@pytest.fixture
def ray(tmp_path, gpu_python):
    """Run the script with a stand-in for ray; its process, and the arguments that ray got."""
    (tmp_path / "ray" / "scripts").mkdir(parents=True)
    (tmp_path / "ray" / "__init__.py").write_text(RAY)
    (tmp_path / "ray" / "scripts" / "__init__.py").write_text("")
    (tmp_path / "ray" / "scripts" / "scripts.py").write_text(SCRIPTS)
    log = tmp_path / "log"

    def run(*words: str, **variables: str):
        environment = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(tmp_path),
            "PEAGLE_VLLM_PYTHON": str(gpu_python),
            "FAKE_RAY": str(log),
            "RAY_WAIT_S": "20",
            **variables,
        }
        ran = subprocess.run(
            ["sh", str(SCRIPT), *words],
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
        )
        told = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        return ran, told

    return run


def test_head_waits_for_the_nodes_and_becomes_the_command(ray):
    ran, told = ray("head", "2", "sh", "-c", 'echo "$0 $*"; exit 7', "a b", "c")
    assert (ran.returncode, ran.stdout) == (7, "a b c\n")
    assert told == [["start", "--head", "--port=6379", "--include-dashboard=false"]]
    assert "2 nodes" in ran.stderr


def test_head_gives_up(ray):
    ran, _ = ray("head", "50", "echo", "never", RAY_WAIT_S="0")
    assert ran.returncode == 1 and "1 of 50 nodes came" in ran.stderr and ran.stdout == ""


def test_worker_waits_for_the_head(ray):
    with socket.socket() as head:
        head.bind(("127.0.0.1", 0))
        port = str(head.getsockname()[1])
        later = threading.Timer(0.5, head.listen)
        later.start()
        ran, told = ray("worker", "127.0.0.1", RAY_PORT=port, VLLM_HOST_IP="10.0.0.2")
        later.join()
    assert ran.returncode == 0, ran.stderr
    address = f"--address=127.0.0.1:{port}"
    assert told == [["start", address, "--block", "--node-ip-address=10.0.0.2"]]


def test_worker_gives_up(ray):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ran, told = ray("worker", "127.0.0.1", RAY_PORT=port, RAY_WAIT_S="0")
    assert ran.returncode == 1 and told == []
    assert f"127.0.0.1 port {port} does not answer" in ran.stderr


@pytest.mark.parametrize("words", [[], ["head"], ["head", "2"], ["worker"], ["other"]])
def test_usage(ray, words):
    ran, told = ray(*words)
    assert ran.returncode == 2 and told == []
    assert "On every other node" in ran.stderr and "set -eu" not in ran.stderr


def test_absent_python(ray):
    ran, _ = ray("worker", "x", PEAGLE_VLLM_PYTHON="/nowhere")
    assert ran.returncode == 2 and "set PEAGLE_VLLM_PYTHON" in ran.stderr


def test_examples_in_the_script_are_understood():
    from peagle.cli.main import LazyCommand

    text = SCRIPT.read_text().replace("\\\n#", "")
    (command,) = re.findall(r"head 2 (peagle serve .*)", text)
    words = command.split()[2:]
    context = LazyCommand("serve").load().make_context("serve", words)
    assert context.params["engine"] == "vllm" and context.params["tensor_parallel_size"] == 16
    assert context.params["flags"] == ["--distributed-executor-backend", "ray"]
