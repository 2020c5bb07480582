"""The suites of the make targets, and which parts a change touches."""

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.suites import LONG_RUNS, PARTS, ROOT, SUITES, is_in, part_of, touched_parts

EVERY_PART = PARTS.keys() - {LONG_RUNS}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with a branch that begins at main."""
    git(tmp_path, "init", "--quiet", "--initial-branch", "main")
    commit(tmp_path, "src/peagle/llm.py")
    commit(tmp_path, "docs/serving.md")
    return tmp_path


def git(folder: Path, *words: str) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    subprocess.run(["git", *who, *words], cwd=folder, check=True)


def write(folder: Path, name: str) -> None:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as opened:
        opened.write("a line\n")


def commit(folder: Path, name: str) -> None:
    write(folder, name)
    git(folder, "add", name)
    git(folder, "commit", "--quiet", "-m", name)


@pytest.mark.parametrize(
    ("file", "parts"),
    [
        ("src/peagle/llm.py", set()),
        ("docs/serving.md", {"documents"}),
        ("docs/benchmark/new.md", {"documents"}),
        ("recipes/published/README.md", {"documents", "recipes"}),
        ("recipes/published/show.py", {"recipes"}),
        ("src/peagle/evaluation/report/page.py", {"browsers"}),
        ("src/peagle/serving/playground/page.js", {"browsers", "load tests"}),
        ("src/peagle/serving/metrics.py", {"Kubernetes", "Grafana", "load tests"}),
        ("benchmarks/serving/load.py", {"recipes", "load tests"}),
        ("benchmarks/nodes.py", {"recipes", "long runs"}),
        ("deploy/Dockerfile", {"containers", "release"}),
        ("pyproject.toml", EVERY_PART),
        ("tests/conftest.py", EVERY_PART),
    ],
)
@pytest.mark.parametrize("is_committed", [True, False], ids=["commit", "working tree"])
def test_a_change_touches_the_parts_of_its_files(
    checkout: Path, file: str, parts: set[str], is_committed: bool
) -> None:
    git(checkout, "switch", "--quiet", "--create", "change")
    (commit if is_committed else write)(checkout, file)
    commit(checkout, "src/peagle/engine/engine.py")
    assert touched_parts.__wrapped__(checkout) == parts


def test_what_has_come_to_main_meanwhile_is_no_change(checkout: Path) -> None:
    git(checkout, "switch", "--quiet", "--create", "change")
    commit(checkout, "src/peagle/llm.py")
    git(checkout, "switch", "--quiet", "main")
    commit(checkout, "deploy/Dockerfile")
    git(checkout, "switch", "--quiet", "change")
    assert touched_parts.__wrapped__(checkout) == set()


def test_all_parts_run_where_a_change_cannot_be_told(
    checkout: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert touched_parts.__wrapped__(checkout) == EVERY_PART, "on main"
    assert touched_parts.__wrapped__(tmp_path_factory.mktemp("bare")) == EVERY_PART, "no git"
    git(checkout, "branch", "--move", "main", "trunk")
    commit(checkout, "src/peagle/llm.py")
    assert touched_parts.__wrapped__(checkout) == EVERY_PART, "no main branch"
    monkeypatch.setenv("PATH", "")
    assert touched_parts.__wrapped__(checkout) == EVERY_PART, "no git installed"


@pytest.mark.parametrize("name", PARTS)
def test_a_part_names_files_and_tests_that_exist(name: str) -> None:
    for test in PARTS[name].tests:
        file, _, function = test.partition("::")
        assert (ROOT / file).exists(), test
        assert not function or f"def {function}(" in (ROOT / file).read_text(), test
        assert part_of(test) == name
    for pattern in PARTS[name].files:
        assert [*ROOT.glob(pattern)], pattern


class Item:
    """As much of a collected test as a suite looks at."""

    def __init__(self, nodeid: str, *fixtures: str, is_slow: bool = False, **imported: Any) -> None:
        self.nodeid, self.fixturenames = nodeid, fixtures
        self.module = SimpleNamespace(**imported)
        self._is_slow = is_slow

    def get_closest_marker(self, name: str) -> bool:
        return self._is_slow and name == "slow"


def test_each_suite_has_its_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    light = Item("tests/test_config.py::test_x")
    slow = Item("tests/test_config.py::test_y", is_slow=True)
    served = Item("tests/serving/test_logs.py::test_x", "server", "tmp_path")
    starting = Item("tests/cli/test_train.py::test_x", subprocess=subprocess)
    grafana = Item("tests/serving/test_grafana.py::test_x")
    page = Item("tests/docs/test_pages.py::test_commands_of_a_page_run_in_order[README.md]")
    monkeypatch.setattr("tests.suites.touched_parts", lambda: {"Grafana"})
    items = [light, slow, served, starting, grafana, page]
    found = {suite: [item for item in items if is_in(suite, item)] for suite in SUITES}
    assert found == {
        "quick": [light],
        "main": [light, slow, served, starting],
        "touched": [light, slow, served, starting, grafana],
        "repo": [grafana, page],
    }


def test_every_part_runs_each_night_and_touched_ones_with_a_change() -> None:
    assert "- run: make test-repo\n" in (ROOT / ".github/workflows/nightly.yml").read_text()
    assert "fetch-depth: 0" in (ROOT / ".github/workflows/ci.yml").read_text()
    assert "make test SUITE=touched " in (ROOT / ".ci/run").read_text()


@pytest.mark.parametrize("failing", ["", "style", "types", "test"])
def test_what_fails_fails_the_whole_and_is_shown(failing: str, tmp_path: Path) -> None:
    make = tmp_path / "make"
    make.write_text(f'#!/bin/sh\necho "output of $1" >&2\ntest "$1" != "{failing}" || exit 3\n')
    make.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path}
    with (tmp_path / "shown").open("w") as shown:
        run = subprocess.run([ROOT / ".ci/run"], env=environment, stdout=shown, stderr=shown)
    targets = ["style"] if failing == "style" else ["style", "test", "types"]
    lines = [f"output of {target}" for target in targets]
    assert (tmp_path / "shown").read_text().splitlines() == lines
    assert run.returncode == (3 if failing else 0)
