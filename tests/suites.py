"""Which tests the make targets run: `pytest --suite quick`, `main`, `touched` or `repo`."""

import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Part:
    """Tests of something that stands beside the package.

    Attributes:
        tests: files of tests, or single tests as `FILE::NAME`.
        files: what the tests are about: git runs them where a change touches one (pathspecs).
    """

    tests: tuple[str, ...]
    files: tuple[str, ...]


_PAGES = "tests/docs/test_pages.py"
# Run each night, and with a change of their own files alone: each holds a worker for 15 to 50 s.
LONG_RUNS = "long runs"
PARTS = {
    LONG_RUNS: Part(
        (
            "tests/recipes/test_mixture_pair.py::test_the_whole_recipe_in_tiny_sizes",
            "tests/serving/test_against_vllm.py::test_a_run_of_a_real_pair",
            "tests/serving/test_load_scripts.py::test_nobody_can_hang_the_server",
            "tests/test_benchmarks.py::test_nodes_are_measured_beside_both_heads_and_without_loops",
            "tests/test_benchmarks.py::test_step_price_compares_the_three_prices_of_a_mixture",
        ),
        (
            *("recipes/mixture_pair", "benchmarks/nodes.py", "benchmarks/step_price.py"),
            *("benchmarks/serving/abuse.py", "benchmarks/serving/attacks.py"),
            "benchmarks/serving/against_vllm.py",
        ),
    ),
    "documents": Part(
        (
            f"{_PAGES}::test_commands_of_a_page_run_in_order",
            f"{_PAGES}::test_python_of_a_page_runs",
            "tests/test_examples.py",
        ),
        (
            *("README.md", "CONTRIBUTING.md", "SECURITY.md", "docs/*.md", "recipes/*/README.md"),
            *("examples", "src/peagle/cli", "tests/docs", "tests/test_examples.py"),
        ),
    ),
    "recipes": Part(
        (
            "tests/recipes/",
            "tests/test_benchmarks.py",
            "tests/serving/test_against_vllm.py",
        ),
        (
            *("recipes", "benchmarks", "src/peagle/bundled", "tests/recipes"),
            *("tests/test_benchmarks.py", "tests/serving/test_against_vllm.py"),
        ),
    ),
    "load tests": Part(
        ("tests/serving/test_load_scripts.py",),
        ("benchmarks/serving", "src/peagle/serving", "tests/serving/test_load_scripts.py"),
    ),
    "browsers": Part(
        ("tests/serving/test_playground.py", "tests/evaluation/test_report_page.py"),
        (
            *("src/peagle/serving/playground*", "src/peagle/evaluation/report*"),
            *("tests/browsing.py", "tests/serving/test_playground.py"),
            *("tests/evaluation/report_pages.py", "tests/evaluation/test_report_page.py"),
        ),
    ),
    "containers": Part(
        ("tests/serving/test_container.py", "tests/deploy/test_life.py"),
        (
            *("deploy/Dockerfile", "deploy/entrypoint.py", ".dockerignore", "src/peagle/deploy"),
            *("tests/serving/image.py", "tests/serving/test_container.py", "tests/deploy"),
        ),
    ),
    "release": Part(
        ("tests/test_release.py",),
        (
            *("CHANGELOG.md", "LICENSE", "THIRD_PARTY.md", "tools/*dist.py"),
            *("tools/smoke_wheel.sh", ".github/workflows/release.yml", "deploy/Dockerfile"),
            "tests/test_release.py",
        ),
    ),
    "Kubernetes": Part(
        ("tests/serving/test_kubernetes.py",),
        ("deploy/kubernetes.yaml", "src/peagle/serving/*.py", "tests/serving/test_kubernetes.py"),
    ),
    "Grafana": Part(
        ("tests/serving/test_grafana.py", "tests/serving/test_alerts.py"),
        (
            *("deploy/grafana.json", "deploy/prometheus-alerts.yaml", "src/peagle/serving/*.py"),
            *("tests/serving/alerts_test.yaml", "tests/serving/test_alerts.py"),
            "tests/serving/test_grafana.py",
        ),
    ),
}
# A change of these may change every part.
_EVERYWHERE = ("pyproject.toml", "constraints.txt", "Makefile", ".ci", "tests/suites.py")
_EVERYWHERE += ("tests/conftest.py", "tests/serving/warm.py", "tests/serving/live.py")
# Fixtures that start a server, and what a file needs to start a process.
_SERVERS = {"server", "strict", "client", "collector"}
_STARTERS = {
    "subprocess",
    "multiprocessing",
    "together",
    "forks",
    "running",
    "WarmProcess",
    "warm_serve",
    "start_warm",
}
SUITES = ("quick", "main", "touched", "repo")


def part_of(test: str) -> str | None:
    """Return the part that a test belongs to, by its node id; None for a test of the package."""
    return next((name for name, part in PARTS.items() if test.startswith(part.tests)), None)


@cache
def touched_parts(root: Path = ROOT) -> frozenset[str]:
    """Return the parts that a change touches: commits since main and what is not committed yet.

    All parts but the long runs where there is no git, no main branch, no change (on main itself) or
    a change of what all tests share.
    """
    base = _git(root, "merge-base", "HEAD", "origin/main") or _git(
        root, "merge-base", "HEAD", "main"
    )
    is_any = not base or not _changed(root, base) or _changed(root, base, *_EVERYWHERE)
    return frozenset(
        name
        for name, part in PARTS.items()
        if (is_any and name != LONG_RUNS) or (base and _changed(root, base, *part.files))
    )


def is_in(suite: str, item: Any) -> bool:
    """Return whether a suite runs a test."""
    part = part_of(item.nodeid)
    if suite == "repo":
        return part is not None
    if part is not None:
        return suite == "touched" and part in touched_parts()
    return suite != "quick" or not (item.get_closest_marker("slow") or _starts_a_process(item))


def _starts_a_process(item: Any) -> bool:
    """Return whether a test, or another of its file, may start a process."""
    return bool(_SERVERS & {*item.fixturenames} or _STARTERS & vars(item.module).keys())


def _changed(root: Path, base: str, *files: str) -> str:
    untracked = _git(root, "ls-files", "--others", "--exclude-standard", "--", *files)
    return _git(root, "diff", "--name-only", base, "--", *files) + untracked


def _git(root: Path, *words: str) -> str:
    # safe.directory: in CI containers the checkout often belongs to another user.
    command = ["git", "-c", f"safe.directory={root}", *words]
    try:
        return subprocess.run(command, cwd=root, capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:
        return ""
