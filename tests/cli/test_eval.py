"""`peagle eval` on engines: entries, going on after an interruption, heads that do not fit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from peagle.cli.eval import EvalView
from peagle.evaluation import dialogues, eval_run
from peagle.models.checkpoint import save_drafter
from peagle.models.fingerprint import TargetFingerprint
from peagle.models.target import TargetModel
from tests.cli.conftest import Pair, Peagle
from tests.cli.eval_helpers import SMALL, entries_of, write_prompts
from tests.conftest import make_drafter, make_target_folder

JSON = ("--format", "json")


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    return write_prompts(tmp_path / "mine.jsonl")


def save_head(folder: Path, target_folder: Path, **options: Any) -> Path:
    """A head that was trained for the target."""
    target = TargetModel.load(target_folder)
    save_drafter(folder, make_drafter(target, **options), fingerprint=TargetFingerprint.of(target))
    return folder


# ---- entries --------------------------------------------------------------------------------


def test_every_method_at_every_k_and_temperature(
    peagle: Peagle, pair: Pair, tmp_path: Path
) -> None:
    small = save_head(
        tmp_path / "small", pair.target, draft_vocab_size=100, max_position_embeddings=2048
    )
    result = peagle(
        *("eval", *pair.options, "--method", f"again={pair.peagle}", "--method", f"small={small}"),
        *(*SMALL, "-k", "2,3", "--temperature", "0,0.7", *JSON),
    )
    entries = entries_of(result)
    names = ("peagle", "again", "small", "ngram")
    assert [(e["method"], e["k"], e["temperature"]) for e in entries] == [
        (name, k, t) for name in names for k in (2, 3) for t in (0.0, 0.7)
    ]
    data = json.loads(result.out)
    assert data["format_version"] == 1 and data["settings"]["sets"] == {"heldout_code": 5}
    assert data["provenance"]["target"] == str(pair.target)
    assert data["provenance"]["dtype"] == "float32"
    for entry in entries:
        assert entry["pooled"]["num_requests"] == 5
        depths = (entry["k"],) if entry["method"] != "ngram" else (0, entry["k"])
        assert len(entry["pooled"]["unconditional"]) in depths
    by_key = {(e["method"], e["k"], e["temperature"]): e["pooled"] for e in entries}
    # The same head under another name: the same figures, sampled ones too.
    for k, t in ((2, 0.0), (2, 0.7), (3, 0.0), (3, 0.7)):
        assert by_key["peagle", k, t] == by_key["again", k, t]
    # A shorter draft is no longer draft cut: it has steps of its own.
    assert by_key["peagle", 2, 0.0]["num_drafts"] >= by_key["peagle", 3, 0.0]["num_drafts"]


def test_the_length_of_training_reaches_the_notes(
    peagle: Peagle, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []
    monkeypatch.setattr(
        eval_run, "beyond_training", lambda _, length, k, seed: lengths.append(length) or "lost"
    )
    head = Path(shutil.copytree(pair.peagle, tmp_path / "head"))
    config = json.loads((head / "config.json").read_text())
    config["peagle"]["max_sequence_length_trained"] = 77
    (head / "config.json").write_text(json.dumps(config))
    options = ("--target", pair.target, "--draft", head, "--method", f"untold={pair.peagle}")
    first, second, *_ = entries_of(peagle("eval", *options, *SMALL, *JSON))
    assert (lengths, first["notes"], second["notes"]) == ([77], ["lost"], [])
    assert "note: lost" in peagle("eval", *options, *SMALL).out
    config["peagle"]["max_sequence_length_trained"] = "long"
    (head / "config.json").write_text(json.dumps(config))
    refused = peagle("eval", *options, *SMALL)
    assert refused.status == 2
    assert "max_sequence_length_trained is 'long'; expected a whole number" in refused.err


def test_the_bundled_pair_by_default(peagle: Peagle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peagle.cli.groups.DEFAULT_LIMIT", 6)
    result = peagle("eval", "--max-new-tokens", 12, "--no-ngram")
    assert result.status == 0, result.err
    *tables, advice = result.out.split("\n\n")
    assert [table.split()[0] for table in tables] == ["peagle", "eagle3"]
    assert advice.startswith("Advice: ") and "EAGLE-3" in advice
    for table in tables:
        assert "K=7  temperature 0  float32  plain prompts  bundled/" in table
        rows = {line[2:20].strip(): line[20:].split() for line in table.splitlines()[1:]}
        assert rows["position"] == [str(i + 1) for i in range(7)]
        shares = [float(share) for share in rows["unconditional"]]
        assert shares == sorted(shares, reverse=True) and shares[0] > 0.4
        for low, share, high in zip(
            rows["95% from"], rows["conditional"], rows["95% to"], strict=True
        ):
            assert "-" in (low, high) or float(low) <= float(share) <= float(high)
    assert "peagle: peagle, K=7, temperature 0: 6 requests" in result.err


TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if enable_thinking %}<think>{% endif %}"
)


@pytest.mark.parametrize(
    ("options", "thinking", "begin", "end"),
    [
        ((), None, "[user]def f0(", "("),
        (("--thinking",), True, "[user]def f0(", "<think>"),
        (("--no-chat-template",), None, "def f0(", "("),
    ],
    ids=["template", "thinking", "text"],
)
def test_second_turns_follow_the_answers(
    peagle: Peagle,
    pair: Pair,
    prompt_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    thinking: bool | None,
    begin: str,
    end: str,
) -> None:
    runs: list[list[tuple[Any, str, Any]]] = []  # the request, the text that it renders, the answer
    run = dialogues.EngineBackend.run

    def watching(self: Any, requests: Any, *rest: Any) -> Any:
        done = run(self, requests, *rest)
        texts = [self.llm.tokenizer.decode(self.encode(request)) for request in requests]
        runs.append(list(zip(requests, texts, done.answers, strict=True)))
        return done

    monkeypatch.setattr(dialogues.EngineBackend, "run", watching)
    folder = Path(shutil.copytree(pair.target, tmp_path / "chat"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    result = peagle(
        *("eval", "--target", folder, "--draft", pair.peagle, "--no-ngram", "--set", prompt_file),
        *("--max-new-tokens", 4, "-k", 2, "--limit", 2, *JSON, *options),
    )
    (entry,) = entries_of(result)
    assert entry["pooled"]["num_requests"] == 4
    assert set(entry["by_category"]) == {f"{prompt_file}/odd", f"{prompt_file}/even"}
    settings, chat = json.loads(result.out)["settings"], "--no-chat-template" not in options
    assert (settings["chat_template"], settings["thinking"]) == (chat, thinking)
    for (request, first, answer), (later, second, _) in zip(*runs, strict=True):
        assert later.params.seed != request.params.seed
        if not chat:
            assert later.prompt == f"{request.prompt}{answer.text}\n\nMore"
            continue
        assert [m["role"] for m in later.prompt] == ["user", "assistant", "user"]
        # An answer that breaks off inside its reasoning leaves none of it to the next turn.
        kept = "" if thinking else answer.text
        assert second.startswith(f"{first.removesuffix('<think>')}[assistant]{kept}[user]More")
    first = runs[0][0][1]
    assert first.startswith(begin) and first.endswith(end)


def test_thinking_needs_a_template(peagle: Peagle, pair: Pair) -> None:
    result = peagle("eval", *pair.options, *SMALL, "--thinking")
    assert result.status == 2 and "no thinking mode" in result.err
    assert peagle("eval", *pair.options, *SMALL, "--no-thinking").status == 0


# ---- kept and taken up ----------------------------------------------------------------------


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Keys of the entries that are measured, not taken from a file."""
    keys: list[str] = []
    begin = EvalView.begin

    def watching(self: EvalView, key: Any, num_requests: int) -> None:
        keys.append(str(key))
        begin(self, key, num_requests)

    monkeypatch.setattr(EvalView, "begin", watching)
    return keys


def test_an_interrupted_eval_goes_on(
    peagle: Peagle, pair: Pair, tmp_path: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    command = ("eval", *pair.options, *SMALL, "-k", "2,3", "--no-ngram", "--output", out)
    whole = peagle(*command[:-2], *JSON)
    measured.clear()
    run = eval_run.run_dialogues

    def interrupted(*rest: Any, **options: Any) -> Any:
        if len(measured) == 2:
            raise KeyboardInterrupt
        return run(*rest, **options)

    with monkeypatch.context() as patch:
        patch.setattr(eval_run, "run_dialogues", interrupted)
        stopped = peagle(*command)
    assert stopped.status == 130 and f"1 measurements are kept in {out}" in stopped.err
    assert len(json.loads((out / "acceptance.json").read_text())["entries"]) == 1
    measured.clear()
    again = peagle(*command, *JSON)
    assert measured == ["peagle, K=3, temperature 0"] and "measured before" in again.err
    for one, other in zip(entries_of(again), entries_of(whole), strict=True):
        assert one["pooled"] == other["pooled"]
    assert json.loads((out / "acceptance.json").read_text()) == json.loads(again.out)
    assert (out / "report.html").is_file()
    measured.clear()
    assert peagle(*command[:-2], "--temperature", "0,1", "--output", out).status == 0
    assert measured == ["peagle, K=2, temperature 1", "peagle, K=3, temperature 1"]


def test_another_run_is_not_taken_for_the_same(peagle: Peagle, pair: Pair, tmp_path: Path) -> None:
    out, head = tmp_path / "out", Path(shutil.copytree(pair.peagle, tmp_path / "head"))
    models = ("--target", pair.target, "--draft", head)
    base = ("eval", *models, "--no-ngram", "--output", out, "-k", 2)
    assert peagle(*base, *SMALL).status == 0
    before = (out / "acceptance.json").read_bytes()
    for extra, message in (
        (("--max-new-tokens", 9), "max_new_tokens 8, not 9"),
        (("--limit", 4), 'sets {"heldout_code": 5}, not {"heldout_code": 4}'),
        (("--shuffle-seed", 3), "prompts_sha256"),
        (("--dtype", "float64"), 'dtype "float32", not "float64"'),
        (("--seed", 5), "seed 0, not 5"),
    ):
        result = peagle(*base, *SMALL, *extra)
        assert result.status == 2 and message in result.err and "another --output" in result.err
    assert (out / "acceptance.json").read_bytes() == before
    save_head(head, pair.target, seed=5, max_position_embeddings=2048)
    result = peagle(*base, *SMALL)
    assert result.status == 2 and "has changed since" in result.err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "holds list; expected a JSON object"),
        ('{"format_version": 9}', "format_version 9"),
        ('{"format_version": 1, "provenance": {"target": "t"}}', "malformed at entries"),
    ],
)
def test_a_damaged_file_is_refused(
    peagle: Peagle, pair: Pair, tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "acceptance.json").write_text(text)
    result = peagle("eval", *pair.options, *SMALL, "--output", tmp_path)
    assert result.status == 2 and message in result.err
    assert (tmp_path / "acceptance.json").read_text() == text


# ---- heads ----------------------------------------------------------------------------------


def test_a_head_of_another_target_is_named_before_anything_runs(
    peagle: Peagle, pair: Pair, tmp_path: Path, measured: list[str]
) -> None:
    stranger = save_head(tmp_path / "head", make_target_folder(tmp_path / "other", seed=3))
    result = peagle("eval", *pair.options, "--method", f"stranger={stranger}", *SMALL)
    assert result.status == 2 and "The head of stranger" in result.err
    assert "was trained for target 'other'" in result.err
    assert measured == []


def test_the_first_head_is_compared_with_the_others(
    peagle: Peagle, pair: Pair, tmp_path: Path
) -> None:
    options = ["eval", *pair.options, "--method", f"same={pair.peagle}", *SMALL, "-k", "2"]
    result = peagle(*options, "--output", tmp_path / "out")
    data = json.loads((tmp_path / "out" / "acceptance.json").read_text())
    found = {one["over"]: one for one in data["comparisons"]}
    assert set(found) == {"same", "ngram"}
    assert (found["same"]["difference"], found["same"]["ci"]) == (0.0, [0.0, 0.0])
    first = data["entries"][0]
    drafts = sum(drafts for drafts, *_ in first["by_conversation"].values())
    assert drafts == first["pooled"]["num_drafts"]
    assert "No difference between P-EAGLE and same is shown" in data["advice"]
    assert result.out.rstrip().endswith(f"Advice: {data['advice']}")
    assert data["advice"] in (tmp_path / "out" / "report.html").read_text()
    # A run that measures nothing gives the same advice again.
    again = peagle(*options, "--output", tmp_path / "out", *JSON)
    assert json.loads(again.out)["advice"] == data["advice"]
