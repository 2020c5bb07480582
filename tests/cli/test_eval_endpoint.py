"""`peagle eval` on servers, its certificate, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from peagle.results import CertificateResults, CertifiedCase
from tests.cli.conftest import Pair, Peagle
from tests.cli.eval_helpers import entries_of, write_prompts
from tests.evaluation.fake_endpoint import Script, endpoint, metrics


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    return write_prompts(tmp_path / "mine.jsonl")


# ---- a server -------------------------------------------------------------------------------

PLAIN_MODELS = [{"id": "m"}]


def test_a_server_with_counters_gives_figures_by_category(
    peagle: Peagle, prompt_file: Path
) -> None:
    script = Script(models=PLAIN_MODELS, metrics=metrics(0), counts=True)
    with endpoint(script) as url:
        result = peagle(
            *("eval", "--endpoint", f"vllm={url}", "--set", prompt_file, "--format", "json"),
            *("--no-chat-template", "--temperature", "0.5", "--concurrency", 2),
        )
    (entry,) = entries_of(result)
    assert (entry["method"], entry["engine"], entry["source"]) == ("vllm", url, "m")
    assert entry["k"] == 4  # of the counters
    # Each answer of the script counts 9 drafts with 9 accepted tokens over two engines.
    assert entry["pooled"]["num_requests"] == 12
    assert entry["pooled"]["num_accepted_tokens_per_pos"] == [6 * 12, 3 * 12, 0, 0]
    for name in ("odd", "even"):
        one = entry["by_category"][f"{prompt_file}/{name}"]
        assert (one["num_requests"], one["num_drafts"]) == (6, 54)
        assert one["acceptance_length"] == 2.0
    sampled = [body for body in script.bodies if body["max_tokens"] > 1]
    assert {body["temperature"] for body in sampled} == {0.5}
    assert len({body["seed"] for body in sampled}) == 12
    assert all(body["top_p"] == 1.0 for body in sampled)
    # One category after the other, each turn by turn.
    turns = [body["prompt"].startswith("def f") for body in sampled]
    assert all(turns)
    assert [int(body["prompt"][5]) % 2 for body in sampled] == [0] * 6 + [1] * 6


def test_our_server_tells_the_drafts_of_requests(peagle: Peagle) -> None:
    models = [
        {
            "id": "m",
            "chat": False,
            "speculation": {
                "default": "peagle",
                "proposers": [{"name": "peagle", "num_speculative_tokens": 4}],
            },
        }
    ]
    script = Script(models=models, report=True, metrics=metrics(0))
    with endpoint(script) as url:
        result = peagle(
            *("eval", "--endpoint", url, "--set", "humaneval", "--limit", 6, "-k", 4),
            *("--format", "json"),
        )
    (entry,) = entries_of(result)
    assert entry["pooled"]["num_drafts"] == 18
    assert entry["pooled"]["acceptance_length"] == 2.0
    assert entry["pooled"]["acceptance_length_ci"] == [2.0, 2.0]
    assert entry["histogram"][-1] == {"from": 2.0, "to": 2.5, "count": 6}
    # The server reads 5 tokens of every prompt: the first steps begin below 32 of output.
    assert entry["by_output_position"][0]["slice"]["num_drafts"] == 18
    asked = {body["speculation"]["num_speculative_tokens"] for body in script.bodies[1:]}
    assert asked == {4}


def test_a_server_without_counters_says_what_still_works(peagle: Peagle, tmp_path: Path) -> None:
    with endpoint(Script(models=PLAIN_MODELS)) as url:
        result = peagle(
            "eval", "--endpoint", url, "--limit", 3, "--set", "humaneval", "--output", tmp_path
        )
    assert result.status == 0, result.err
    assert "acceptance length unknown" in result.out
    assert "output tokens/s" in result.out
    assert "acceptance is not known, speed and texts are" in result.out
    data = json.loads((tmp_path / "acceptance.json").read_text())
    assert data["settings"]["chat_template"], "it answers messages"
    (entry,) = data["entries"]
    assert entry["pooled"]["acceptance_length"] is None
    assert (tmp_path / "report.html").is_file()


def test_a_server_that_does_not_converse_gets_text(peagle: Peagle, tmp_path: Path) -> None:
    script = Script(models=[{"id": "m", "chat": False}])
    with endpoint(script) as url:
        command = ("eval", "--endpoint", url, "--set", "humaneval", "--limit", 2)
        assert peagle(*command).status == 0
        refused = peagle(*command, "--thinking")
        other_k = peagle(*command, "-k", 3)
    assert all("prompt" in body for body in script.bodies)
    assert refused.status == other_k.status == 2
    assert "does not converse" in refused.err
    assert "decides on its own K" in other_k.err


def test_failed_requests_are_counted_and_the_others_stand(peagle: Peagle, tmp_path: Path) -> None:
    prompts = tmp_path / "some.txt"
    prompts.write_text("one\n[fail]\nthree\n")
    with endpoint(Script(models=PLAIN_MODELS)) as url:
        result = peagle("eval", "--endpoint", url, "--set", prompts, "--no-chat-template")
    assert result.status == 0, result.err
    assert "1 requests have no answer" in result.out
    assert "planned" in result.out


# ---- certificate ----------------------------------------------------------------------------


@pytest.mark.parametrize("passed", [True, False])
def test_the_certificate_decides_the_status(
    peagle: Peagle, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passed: bool
) -> None:
    seen: dict[str, Any] = {}

    def run(
        target: Any, folder: Path, methods: Any, k: int, options: Any, provenance: Any, watch: Any
    ) -> Any:
        seen.update(folder=folder, names=[m.name for m in methods], k=k, options=options)
        watch("a part")
        case = CertifiedCase(feature="f", method="m", faults=[] if passed else ["wrong"])
        return CertificateResults(provenance=provenance, identity=[case], seconds=1)

    monkeypatch.setattr("peagle.evaluation.certify.run.run", run)
    result = peagle(
        *("eval", *pair.options, "--certify", "-k", "3,5", "--limit", 4, "--samples", 500),
        *("--temperature", "0,0.9", "--max-new-tokens", 20, "--output", tmp_path),
    )
    assert result.status == (0 if passed else 1)
    assert "Losslessness certificate" in result.out
    assert "peagle: a part" in result.err
    assert seen["folder"] == pair.target
    assert (seen["names"], seen["k"]) == (["peagle", "ngram"], 5)
    options = seen["options"]
    assert (options.prompts, options.samples, options.max_new_tokens) == (4, 500, 20)
    assert options.temperature == 0.9
    assert json.loads((tmp_path / "certificate.json").read_text())["passed"] == passed


# ---- mistakes -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--set", "humanevil"), "Did you mean humaneval"),
        (("--set", "humaneval,humaneval"), "names 'humaneval' twice"),
        (("--limit", "0"), "limit is 0"),
        (("-k", "3,x"), "-k is '3,x'; expected whole numbers"),
        (("-k", "0"), "expected whole numbers from 1 to 64"),
        (("--temperature", "-1"), "temperature is -1.0"),
        (("--temperature", "warm"), "expected numbers like 0,0.7"),
        (("--draft-sampling", "best"), "draft_sampling is 'best'"),
        (("--concurrency", "0"), "--concurrency is 0"),
        (("--method", "plain"), "Plain decoding drafts nothing"),
        (("--method", "x"), "The method is 'x'"),
        (("--no-chat-template", "--thinking"), "--no-chat-template was given"),
        (("--model", "m"), "without --endpoint"),
        (("--samples", "9"), "without --certify"),
        (("--certify", "--endpoint", "http://x"), "leave --endpoint out"),
        (("--certify", "--set", "humaneval,gsm8k"), "takes its prompts from one"),
        (("--endpoint", "http://x", "--eagle3", "y"), "--eagle3 and --endpoint contradict"),
        (("--endpoint", "http://x", "--dtype", "float32"), "--dtype and --endpoint contradict"),
        (("--endpoint", "http://127.0.0.1:9"), "No server answers at"),
        (("--eagle3", "PEAGLE"), "--eagle3 is"),
        (("--method", "peagle=PEAGLE"), "Two methods are called 'peagle'"),
        (("--draft", "./nowhere"), "nowhere"),
        (("--output", "FILE"), "cannot be made"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, tuple) else "",
)
def test_mistakes(
    peagle: Peagle, pair: Pair, tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    (tmp_path / "file").write_text("")
    words = {"PEAGLE": str(pair.peagle), "peagle=PEAGLE": f"peagle={pair.peagle}"}
    words["FILE"] = str(tmp_path / "file")
    options = tuple(words.get(text, text) for text in options)
    models = () if "--endpoint" in options else pair.options
    if "--draft" in options:
        models = ("--target", pair.target)
    result = peagle("eval", *models, *options)
    assert (result.status, result.out) == (2, ""), result.err
    assert message in result.err and "Traceback" not in result.err
