"""`peagle doctor`: verdict, exit status, formats, mistakes, and a server over HTTP."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from peagle.bundled import BUNDLED_EAGLE3, BUNDLED_PEAGLE, BUNDLED_TARGET
from peagle.config import CandidateTrees, EngineConfig
from peagle.doctor.findings import Examination
from peagle.doctor.serving import examine_trees
from peagle.models.target import TargetModel
from tests.cli.conftest import Peagle
from tests.corrections import add_correction
from tests.doctor.conftest import PAIR2
from tests.doctor.planting import FILE_FAULTS, copy_head
from tests.serving.live import running

FAULTS = {fault.name: fault for fault in FILE_FAULTS}


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few prompts that the second pair knows."""
    lines = (PAIR2 / "prompts.jsonl").read_text().splitlines()[:16]
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    file.write_text("\n".join(lines))
    return file


def options(head: Path, prompts: Path) -> list[object]:
    return ["--target", PAIR2 / "target", "--draft", head, "--prompts", prompts]


def test_a_healthy_head(peagle: Peagle, prompts: Path) -> None:
    result = peagle("doctor", *options(PAIR2 / "peagle", prompts))
    assert result.status == 0, result.out + result.err
    assert "Healthy" in result.out
    assert "the target answers" in result.err


def test_a_healthy_head_over_an_fp8_kv_cache(peagle: Peagle, prompts: Path) -> None:
    call = ("doctor", *options(PAIR2 / "peagle", prompts), "--kv-cache-dtype", "fp8")
    result = peagle(*call, "--format", "json")
    assert result.status == 0, result.out + result.err
    report = json.loads(result.out)
    assert report["healthy"] and report["dtype"] == "float32, fp8 KV cache"


def test_a_broken_head(peagle: Peagle, prompts: Path, tmp_path: Path) -> None:
    head = copy_head(PAIR2 / "peagle", tmp_path / "head", FAULTS["residual"])
    result = peagle("doctor", *options(head, prompts), "--format", "json")
    assert result.status == 1
    report = json.loads(result.out)
    assert not report["healthy"]
    assert [cause["id"] for cause in report["causes"]] == ["residual"]
    assert "norm_before_residual to false" in report["causes"][0]["remedy"]
    before, after = (report[k]["acceptance_length"] for k in ("training_side", "repaired"))
    assert after > before + 0.3


TREES = {"num_parallel_trees": 4, "prediction_depth": 6, "max_nodes": 16}


def with_trees(**shape: int) -> list[object]:
    return ["--parallel-drafting-spec", json.dumps(TREES | shape)]


def test_candidate_trees_that_an_engine_starts_with(peagle: Peagle, prompts: Path) -> None:
    arguments = [*options(PAIR2 / "peagle", prompts), *with_trees(), "--max-num-seqs", 5]
    result = peagle("doctor", *arguments, "--format", "json")
    assert result.status == 0, result.out + result.err
    (check,) = (c for c in json.loads(result.out)["checks"] if c["name"] == "candidate trees")
    assert check["status"] == "agrees"
    assert check["text"].startswith("16 nodes a step; a request has 24 KV slots ahead, and 5 of ")


def test_candidate_trees_deeper_than_the_head_was_trained(peagle: Peagle, prompts: Path) -> None:
    arguments = [*options(PAIR2 / "peagle", prompts), *with_trees(prediction_depth=15)]
    result = peagle("doctor", *arguments, "--format", "json")
    assert result.status == 1
    report = json.loads(result.out)
    (cause,) = report["causes"]
    assert (cause["id"], cause["where"]) == ("trees", "serving")
    assert "prediction_depth is 15" in cause["evidence"] and "trained for" in cause["evidence"]
    # The rest is examined with as many drafts as the head was trained for.
    assert report["num_speculative_tokens"] < 15


def test_what_an_engine_with_candidate_trees_refuses() -> None:
    target, trees = TargetModel.load(BUNDLED_TARGET), CandidateTrees(**TREES)
    wide = replace(trees, num_parallel_trees=9)
    for head, shape, sizes, told in (
        (BUNDLED_EAGLE3, wide, {}, "num_parallel_trees is 9"),
        (BUNDLED_EAGLE3, trees, {}, None),
        (BUNDLED_PEAGLE, trees, {"kv_cache_gib": 1e-6}, "Raise kv_cache_gib"),
        (BUNDLED_PEAGLE, trees, {}, None),
    ):
        report = Examination()
        examine_trees(target, head, shape, EngineConfig(**sizes), report)
        (check,) = report.checks
        assert check.status == ("differs" if told else "agrees")
        assert [told in cause.evidence for cause in report.causes] == [True] * bool(told)


def test_a_correction_that_the_engine_refuses(
    peagle: Peagle, prompts: Path, tmp_path: Path
) -> None:
    head = copy_head(PAIR2 / "peagle", tmp_path / "head")
    path = add_correction(head)
    for status, text in ((0, "rank 4, width 8"), (1, "the engine refuses it")):
        result = peagle("doctor", *options(head, prompts), *with_trees(), "--format", "json")
        report = json.loads(result.out)
        texts = {check["name"]: check["text"] for check in report["checks"]}
        assert result.status == status and text in texts["correction"]
        assert [cause["id"] for cause in report["causes"]] == ["correction"] * status
        path.write_bytes(path.read_bytes()[:1000])


def test_mistakes(peagle: Peagle, prompts: Path, tmp_path: Path) -> None:
    head = PAIR2 / "peagle"
    for arguments, text in (
        (["--target", PAIR2 / "target"], "--draft"),
        (["bundled"], "'bundled' was given without an option"),
        (["bundled", "--engine", "vllm"], "name a target with --target"),
        ([*options(tmp_path / "none", prompts)], "none"),
        ([*options(head, prompts), "-k", 17], "1 to 16"),
        ([*options(head, prompts), "--plain", "--thinking"], "neither"),
        ([*options(head, prompts), "--endpoint-model", "x"], "--endpoint"),
        ([*options(head, tmp_path / "no.jsonl")], "no.jsonl"),
        ([*options(head, prompts), "--endpoint", "http://127.0.0.1:9"], "127.0.0.1:9"),
        ([*options(head, prompts), *with_trees(), "--endpoint", "http://x"], "with --endpoint"),
        ([*options(head, prompts), "--max-num-seqs", 4], "without --parallel-drafting-spec"),
        ([*options(head, prompts), "--parallel-drafting-spec", "auto"], "auto; expected a shape"),
    ):
        result = peagle("doctor", *arguments)
        assert result.status == 2, arguments
        assert text in result.err and "Traceback" not in result.err


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The pair behind our server."""
    pair = ("--target", PAIR2 / "target", "--draft", PAIR2 / "peagle")
    with running(*pair, "-k", 6, warm=True) as live:
        yield live.url


@pytest.mark.slow
def test_a_server(peagle: Peagle, prompts: Path, server: str) -> None:
    arguments = [*options(PAIR2 / "peagle", prompts), "--endpoint", server, "--format", "json"]
    result = peagle("doctor", *arguments)
    assert result.status == 0, result.out + result.err
    report = json.loads(result.out)
    checks = {check["name"]: check["status"] for check in report["checks"]}
    for name in ("served prompts", "served outputs", "served drafts"):
        assert checks[name] == "agrees", report["checks"]
    assert report["num_speculative_tokens"] == 6
