"""`--engine vllm` of eval, doctor and bench without vLLM: options, mistakes, what is started.

tests/interop holds the same commands against real vLLM (make test-vllm).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from peagle.backends.vllm.installation import VllmInstallation
from peagle.backends.vllm.launch import VllmLaunch
from peagle.errors import UserError
from tests.cli.conftest import Pair, Peagle
from tests.cli.eval_helpers import entries_of
from tests.evaluation.fake_endpoint import Script, endpoint, metrics

SMALL = ("--set", "heldout_code", "--limit", 2, "--max-new-tokens", 4, "--concurrency", 2)


class Starts(list[VllmLaunch]):
    """What was started, and why starting fails, if it does."""

    problem = ""


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Starts]:
    """vLLM is a script that counts drafts, for K = 4."""
    found = VllmInstallation(Path(sys.executable), "0.32.0", is_cpu=False)
    monkeypatch.setattr("peagle.backends.vllm.installation.find_vllm", lambda python=None: found)
    started = Starts()
    with ExitStack() as running:

        class Server:
            """As VllmServer, for what is used of it."""

            def __init__(self, launch: VllmLaunch, installation: Any, **_: Any) -> None:
                assert installation is found
                self.launch, self.model, self.api_key = launch, "m", "secret"
                self.notes, self.url = ["a note"], ""

            def start(self) -> None:
                if started.problem:
                    raise UserError(started.problem)
                started.append(self.launch)
                script = Script(models=[{"id": "m"}], metrics=metrics(0), counts=True)
                self.url = running.enter_context(endpoint(script))

            def stop(self) -> None:
                self.url = ""

        monkeypatch.setattr("peagle.evaluation.vllm_server.VllmServer", Server)
        yield started


def test_eval_starts_it_for_every_k(
    peagle: Peagle, pair: Pair, starts: Starts, tmp_path: Path
) -> None:
    command = ("eval", *pair.options, "-k", "2,4", *SMALL)
    command += ("--engine", "vllm", "--output", tmp_path / "out", "--format", "json")
    flags = ("--", "--max-logprobs", 5)
    result = peagle(*command, *flags)
    entries = entries_of(result)
    told = [(one["method"], one["engine"], one["k"]) for one in entries]
    assert told == [("peagle", "vllm", 2), ("peagle", "vllm", 4)]
    assert entries[0]["source"] == str(pair.peagle)
    assert entries[0]["pooled"]["acceptance_length"] == 2.0  # the script's
    assert json.loads(result.out)["provenance"]["dtype"] == "float32"
    assert [one.speculative.num_speculative_tokens for one in starts] == [2, 4]
    first = starts[0]
    assert (first.target, first.speculative.model) == (str(pair.target), str(pair.peagle))
    assert (first.port, first.keys, first.max_num_seqs) == (0, None, 2)
    assert (first.enable_prefix_caching, first.extra) == (False, ("--max-logprobs", "5"))
    assert "a note" in result.err and "secret" not in result.out + result.err
    # What was measured is not measured again, and nothing is started for it.
    assert entries_of(peagle(*command, *flags)) == entries
    assert len(starts) == 2


def test_doctor_tells_that_it_does_not_start(peagle: Peagle, pair: Pair, starts: Starts) -> None:
    starts.problem = "vLLM ended with status 1"
    result = peagle("doctor", *pair.options, "--engine", "vllm", "--format", "json")
    assert result.status == 1
    causes = json.loads(result.out)["causes"]
    assert [one["evidence"] for one in causes if one["id"] == "serving"] == [starts.problem]


def test_bench_has_it_beside(peagle: Peagle, pair: Pair, starts: Starts) -> None:
    result = peagle(
        *("bench", *pair.options, "-k", 4, "--limit", 2, "--max-new-tokens", 4, "--repeats", 1),
        *("--concurrency", 1, "--warm-up", 0, "--engine", "vllm", "--format", "json"),
    )
    assert result.status == 0, result.err
    cells = json.loads(result.out)["cells"]
    assert {(one["method"], one["engine"]) for one in cells} == {
        *(("plain", "peagle"), ("peagle", "peagle"), ("vllm", "vllm")),
    }
    (launch,) = starts
    assert launch.speculative.model == str(pair.peagle)


@pytest.mark.parametrize("command", ["eval", "doctor", "bench"])
def test_without_vllm_it_says_how_to_get_it(
    command: str, peagle: Peagle, pair: Pair, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PEAGLE_VLLM_PYTHON", raising=False)
    small = ("-k", 4, *SMALL[:4]) if command != "doctor" else ()
    python = ("--vllm-python", sys.executable)
    result = peagle(command, *pair.options, *small, "--engine", "vllm", *python)
    assert result.status == 2
    assert "has no vLLM" in result.err and "pip install vllm" in result.err
    assert "Traceback" not in result.err


MISTAKES: dict[str, tuple[tuple[object, ...], str]] = {
    "python without engine": (("eval", "--vllm-python", "x"), "needs --engine vllm"),
    "flags without engine": (("doctor", "--", "--max-num-seqs", 2), "--max-num-seqs"),
    "no such engine": (("bench", "--engine", "sglang"), "sglang"),
    "eval, endpoint too": (("eval", "--engine", "vllm", "--endpoint", "http://x"), "--endpoint"),
    "doctor, endpoint too": (("doctor", "--engine", "vllm", "--endpoint", "http://x"), "leave one"),
    "certificate": (("eval", "--engine", "vllm", "--certify"), "--certify"),
    "drawn drafts": (
        ("eval", "--engine", "vllm", "--draft-sampling", "probabilistic"),
        "--draft-sampling",
    ),
    "prompt lookup": (("eval", "--engine", "vllm", "--method", "ngram"), "ngram"),
    "two K": (("bench", "--engine", "vllm", "-k", "3,5"), "-k has 2"),
    "two called vllm": (
        ("bench", "--engine", "vllm", "-k", 3, "--endpoint", "vllm=http://x"),
        "another",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name: str, peagle: Peagle, starts: Callable[..., Any]) -> None:
    arguments, text = MISTAKES[name]
    result = peagle(*arguments)
    assert result.status == 2, result.out + result.err
    assert text in result.err
    assert not starts
