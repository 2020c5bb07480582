"""A release: what `make dist` writes, and the workflow that runs on a tag."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from describe_dist import bill_of_materials
from tests.test_repository import repository_files

ROOT = Path(__file__).resolve().parent.parent
WORKFLOW = ROOT / ".github" / "workflows" / "release.yml"
if not WORKFLOW.is_file():
    pytest.skip("a source archive has no workflows", allow_module_level=True)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VERSION = PROJECT["version"]


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that `make dist` fills, in a copy of the checkout."""
    pytest.importorskip("build")
    if shutil.which("make") is None:
        pytest.skip("needs make")
    copy = tmp_path_factory.mktemp("release") / "checkout"
    for file in repository_files():
        target = copy / file.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
    subprocess.run(["git", "init", "--quiet", copy], check=True)
    command = ["make", "--silent", "-C", str(copy), "NO_VENV=1", f"PYTHON={sys.executable}", "dist"]
    result = subprocess.run(command, env={**os.environ, "PYTHONPATH": ""}, capture_output=True)
    assert result.returncode == 0, (result.stdout + result.stderr).decode()
    return copy / "dist"


@pytest.fixture(scope="module")
def bill(dist: Path) -> dict[str, Any]:
    return json.loads((dist / f"peagle-{VERSION}.cdx.json").read_text())


def test_dist_writes_archives_bill_and_hashes(dist: Path, bill: dict[str, Any]) -> None:
    wheel = f"peagle-{VERSION}-py3-none-any.whl"
    described = {wheel, f"peagle-{VERSION}.tar.gz", f"peagle-{VERSION}.cdx.json"}
    lines = dict(line.split("  ")[::-1] for line in (dist / "SHA256SUMS").read_text().splitlines())
    assert {file.name for file in dist.iterdir()} == described | {"SHA256SUMS"}
    assert lines == {
        name: hashlib.sha256((dist / name).read_bytes()).hexdigest() for name in described
    }
    product = bill["metadata"]["component"]
    assert product["purl"] == f"pkg:pypi/peagle@{VERSION}"
    assert product["hashes"] == [{"alg": "SHA-256", "content": lines[wheel]}]


def test_the_bill_has_what_an_installation_brings(bill: dict[str, Any]) -> None:
    parts = {part["name"]: part for part in bill["components"]}
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = (line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    pinned = {canonicalize_name(name): version for name, version in pins}
    assert {name: part["version"] for name, part in parts.items()} == {
        name: pinned[name] for name in parts
    }

    def named(lines: list[str]) -> set[str]:
        found = {canonicalize_name(Requirement(line).name) for line in lines}
        return found - {"peagle"}

    base, extras = named(PROJECT["dependencies"]), PROJECT["optional-dependencies"]
    wanted = base.union(*(named(extras[name]) for name in extras if name not in ("dev", "docs")))
    assert wanted <= parts.keys()
    assert not {"pytest", "ruff", "playwright", "mkdocs-material", "peagle"} & parts.keys()
    assert base <= {name for name, part in parts.items() if part["scope"] == "required"}
    assert parts["fastapi"]["scope"] == "optional"
    # What each package needs whatever the platform and the extras.
    for name in parts:
        lines = [line for line in requires(name) or () if Requirement(line).marker is None]
        assert named(lines) <= parts.keys(), name
    assert parts["torch"]["licenses"] and parts["jinja2"]["licenses"]


def test_the_graph_of_the_bill_is_whole(bill: dict[str, Any]) -> None:
    graph = {entry["ref"]: entry["dependsOn"] for entry in bill["dependencies"]}
    root = bill["metadata"]["component"]["bom-ref"]
    assert graph.keys() == {root, *(part["bom-ref"] for part in bill["components"])}
    reached, waiting = set(), [root]
    while waiting:
        if (ref := waiting.pop()) not in reached:
            reached.add(ref)
            waiting += graph[ref]
    assert reached == graph.keys()


def test_a_package_that_is_not_installed_is_named(tmp_path: Path) -> None:
    wheel = tmp_path / "one-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        needed = "Requires-Dist: no-such-package\n"
        archive.writestr("one-1.0.dist-info/METADATA", f"Name: one\nVersion: 1.0\n{needed}")
    with pytest.raises(SystemExit, match="no-such-package is not installed"):
        bill_of_materials(wheel)


def test_the_changelog_has_the_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    headings = re.findall(r"^## \[(.*?)\]", text, re.MULTILINE)
    assert headings[:2] == ["Unreleased", VERSION]
    first = text.partition(f"## [{VERSION}]")[2].partition("\n## ")[0]
    assert len(first.splitlines()) <= 60


def test_commands_of_the_workflow_exist() -> None:
    yaml = pytest.importorskip("yaml")
    workflow = yaml.safe_load(WORKFLOW.read_text())
    assert workflow[True]["push"] == {"tags": ["v*"]}
    jobs = workflow["jobs"]
    runs = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    targets = re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert [run for run in runs if run.startswith("make ")] == ["make dist"]
    assert "dist" in targets
    for run in runs:
        for path in re.findall(r"\b(?:tools|deploy)/[\w./]+", run):
            assert (ROOT / path).is_file(), path
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text()
    for target in jobs["image"]["strategy"]["matrix"]["target"]:
        assert re.search(rf"^FROM .* AS {target}$", dockerfile, re.MULTILINE), target
    (scan,) = (step for step in jobs["image"]["steps"] if "trivy" in step.get("uses", ""))
    (build,) = (run for run in runs if run.startswith("docker build "))
    assert f"--tag {scan['with']['image-ref']} " in build and scan["with"]["exit-code"] == "1"
    (upload,) = (step for step in jobs["dist"]["steps"] if "upload" in step.get("uses", ""))
    assert upload["with"]["path"] == "dist"


@pytest.mark.parametrize(("tag", "is_version"), [(f"v{VERSION}", True), ("v9.9.9", False)])
def test_another_tag_than_the_version_ends_the_workflow(tag: str, is_version: bool) -> None:
    yaml = pytest.importorskip("yaml")
    workflow = yaml.safe_load(WORKFLOW.read_text())
    (step,) = (step for step in workflow["jobs"]["dist"]["steps"] if "tag" in step.get("name", ""))
    variables = {**os.environ, "GITHUB_REF_NAME": tag}
    status = subprocess.run(["bash", "-c", step["run"]], cwd=ROOT, env=variables).returncode
    assert (status == 0) == is_version
