"""`peagle eval` with engines and servers."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from peagle.cli.eval import EvalView, entry_text
from peagle.cli.flags import Given
from peagle.cli.harness import find_models, named_methods
from peagle.cli.settings import Setting
from peagle.errors import UserError
from peagle.evaluation import dialogues, eval_run
from peagle.evaluation.decoding_methods import DecodingMethod
from peagle.models.checkpoint import save_drafter
from peagle.models.fingerprint import TargetFingerprint
from peagle.models.target import TargetModel
from peagle.results import CertificateResults, CertifiedCase, Entry
from tests.cli.conftest import Pair, Peagle, entries_of
from tests.conftest import make_drafter, make_target_folder
from tests.evaluation.fake_endpoint import Script, endpoint, metrics

JSON = ("--format", "json")


# Long prompts would take most of the time of a tiny pair.
PROMPTS = Path(__file__).resolve().parents[1] / "fixtures" / "short_prompts.jsonl"
SMALL = ("--set", PROMPTS, "--limit", 5, "--max-new-tokens", 8, "--concurrency", 3)


def write_prompts(path: Path) -> Path:
    """Six prompts of two turns, in two categories."""
    records = [
        {"id": f"p/{i}", "category": "odd" if i % 2 else "even", "turns": [f"def f{i}(", "More"]}
        for i in range(6)
    ]
    path.write_text("\n".join(map(json.dumps, records)))
    return path


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    return write_prompts(tmp_path / "mine.jsonl")


def save_head(folder: Path, target_folder: Path, **options: Any) -> Path:
    """A head that was trained for the target."""
    target = TargetModel.load(target_folder)
    save_drafter(folder, make_drafter(target, **options), fingerprint=TargetFingerprint.of(target))
    return folder


# ---- entries ----


@pytest.mark.slow
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
    assert data["format_version"] == 1 and data["settings"]["sets"] == {str(PROMPTS): 5}
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


TREES = '{"num_parallel_trees": 2, "prediction_depth": 3, "max_nodes": 6}'


@pytest.mark.slow
def test_trees_are_methods_of_their_own(peagle: Peagle, pair: Pair) -> None:
    options = (*pair.options, "--eagle3", pair.eagle3, *SMALL, "--no-ngram", *JSON)
    entries = entries_of(peagle("eval", *options, "-k", 2, "--parallel-drafting-spec", TREES))
    trees = [f"{head}-tree-w2-n6" for head in ("peagle", "eagle3")]
    named = [
        one
        for head, tree in zip(("peagle", "eagle3"), trees, strict=True)
        for one in ((head, 2), (tree, 3), (f"{tree}-text", 3))
    ]
    assert [(one["method"], one["k"]) for one in entries] == named
    depths = [len(one["pooled"]["unconditional"]) for one in entries]
    assert depths[0::3] == [2, 2] and depths[1::3] == [3, 3]
    assert len({one["pooled"]["num_tokens"] for one in entries}) == 1
    words = (*options, "-k", 2, "--parallel-drafting-spec", TREES, "--no-prompt-lookup")
    without = entries_of(peagle("eval", *words))
    assert [one["method"] for one in without] == ["peagle", trees[0], "eagle3", trees[1]]
    assert without[1]["pooled"] == entries[1]["pooled"]


def test_an_eagle3_head_drafts_what_it_can_of_trees_and_says_so(
    pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def found(trained: int, **shape: int) -> str:
        text = json.dumps({"peagle": {"num_speculative_tokens_trained": trained}})
        (tmp_path / "config.json").write_text(text)
        given = {"target": str(pair.target), "speculative.parallel_drafting_spec": shape}
        given = Given({key: Setting(value, "--option") for key, value in given.items()})
        find_models(given, [DecodingMethod("mine", str(tmp_path)), DecodingMethod("ngram")])
        return capsys.readouterr().err

    assert found(5, num_parallel_trees=8, prediction_depth=5) == found(5) == ""
    line = found(5, num_parallel_trees=9, prediction_depth=7)
    assert f"head {str(tmp_path)!r} drafts no larger trees than" in line
    assert '"num_parallel_trees": 8, "prediction_depth": 5' in line
    with pytest.raises(UserError, match="from 8 nodes at 9 depths; expected at most 64"):
        found(12, num_parallel_trees=9, prediction_depth=10)


@pytest.mark.slow
def test_trees_follow_k_and_say_what_they_draft(peagle: Peagle, pair: Pair) -> None:
    """K sets the depth of trees that leave it open, as in `peagle generate`."""
    trees = ("--parallel-drafting-spec", '{"max_nodes": 6}', "--no-prompt-lookup")
    drawn = ("-k", "2,3", "--temperature", "0,1", "--drawn-chains-from", 0.5)
    entries = entries_of(peagle("eval", *pair.options, *SMALL, "--no-ngram", *trees, *drawn, *JSON))
    name, argmax = "peagle-tree-w6-n6", "argmax"
    found = [(e["method"], e["k"], e["temperature"], e["draft_sampling"]) for e in entries]
    assert found == [
        *[("peagle", k, t, argmax) for k in (2, 3) for t in (0.0, 1.0)],
        *[(name, k, t, "probabilistic" if t else argmax) for k in (2, 3) for t in (0.0, 1.0)],
    ]
    for entry in entries[4:]:
        assert entry["parallel_drafting_spec"]["prediction_depth"] == entry["k"]
        assert len(entry["pooled"]["unconditional"]) == entry["k"]
    chain, tree = (entry_text(Entry.model_validate(entries[i]), "", chat=False) for i in (1, 5))
    assert "temperature 1, argmax drafts" in chain
    assert "temperature 1, argmax trees behind drawn chains" in tree


@pytest.mark.slow
def test_the_seed_decides_behind_drawn_chains(peagle: Peagle, pair: Pair) -> None:
    """Such requests go without seeds of their own."""
    options = (*pair.options, *SMALL, "--no-ngram", "--temperature", 1, *JSON)
    options = (*options, "--parallel-drafting-spec", TREES, "--no-prompt-lookup")
    one, again, other = (
        entries_of(peagle("eval", *options, "--seed", seed))[1]["samples"] for seed in (1, 1, 2)
    )
    assert one == again != other


@pytest.mark.parametrize("draft", ["bundled", "bundled-eagle3", "smollm2-eagle3"])
def test_an_eagle3_head_is_not_compared_with_the_default_one(draft: str) -> None:
    given = Given({"speculative.model": Setting(draft, "--draft")})
    methods = named_methods(given, None, [], ngram=False)
    assert [one.name for one in methods] == ["", "eagle3"][: 2 if draft == "bundled" else 1]


@pytest.mark.slow
def test_copies_of_the_text_are_told_apart(peagle: Peagle, pair: Pair) -> None:
    options = (*pair.options, *SMALL, "-k", 3, "--parallel-drafting-spec", TREES)
    chains, alone, trees, ngram = entries_of(peagle("eval", *options, *JSON))
    assert "text_per_pos" not in chains["pooled"] | alone["pooled"]
    pooled = trees["pooled"]
    accepted, of_text = (pooled[f"num_accepted_{kind}tokens_per_pos"] for kind in ("", "text_"))
    assert sum(of_text) > 0 and len(accepted) > 3, "deeper than the trees of the head"
    shares = zip(pooled["head_per_pos"], pooled["text_per_pos"], strict=True)
    assert [head + text for head, text in shares] == pytest.approx(pooled["unconditional"])
    assert ngram["pooled"]["text_per_pos"] == ngram["pooled"]["unconditional"]
    shown = entry_text(Entry.model_validate(trees), "float32", chat=False)
    assert shown.count("by the text alone") == shown.count("by the head") == 1


@pytest.mark.slow
def test_a_window_of_the_heads(peagle: Peagle) -> None:
    """What sees itself alone drafts otherwise, and outputs stay."""
    options = ("--target", "bundled", "--draft", "bundled", "--no-ngram", "-k", 2, *JSON)
    options = (*options, "--set", "humaneval", "--limit", 1, "--max-new-tokens", 12)
    whole, *_ = entries_of(peagle("eval", *options))
    blind, *_ = entries_of(peagle("eval", *options, "--draft-window", 1))
    assert blind["pooled"]["num_tokens"] == whole["pooled"]["num_tokens"]
    assert blind["pooled"]["acceptance_length"] < whole["pooled"]["acceptance_length"]


@pytest.mark.slow
def test_several_sets_have_a_pivot(peagle: Peagle, pair: Pair, tmp_path: Path) -> None:
    sizes = ("--limit", 2, "--max-new-tokens", 6, "-k", "1,2", "--output", tmp_path)
    result = peagle("eval", *pair.options, "--no-ngram", *sizes, "--set", "humaneval,mt_bench")
    assert result.status == 0, result.err
    _, table = result.out.split("acceptance length by set\n")
    header, *lines = table.splitlines()[:3]
    names = ["humaneval AL", "mt_bench (both turns) AL"]
    assert re.split("  +", header.strip()) == ["method", "K", *names]
    assert "\n  mt_bench (both turns)  " in result.out
    entries = json.loads((tmp_path / "acceptance.json").read_text())["entries"]
    assert [line.split() for line in lines] == [
        [
            *(entry["method"], str(entry["k"])),
            *(
                f"{entry['by_set'][name]['acceptance_length']:.2f}"
                for name in ("humaneval", "mt_bench")
            ),
        ]
        for entry in entries
    ]


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_thinking_needs_a_template(peagle: Peagle, pair: Pair) -> None:
    result = peagle("eval", *pair.options, *SMALL, "--thinking")
    assert result.status == 2 and "no thinking mode" in result.err
    assert peagle("eval", *pair.options, *SMALL, "--no-thinking").status == 0


# ---- kept and taken up ----


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


@pytest.mark.slow
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


@pytest.mark.slow
def test_another_run_is_not_taken_for_the_same(peagle: Peagle, pair: Pair, tmp_path: Path) -> None:
    out, head = tmp_path / "out", Path(shutil.copytree(pair.peagle, tmp_path / "head"))
    models = ("--target", pair.target, "--draft", head)
    base = ("eval", *models, "--no-ngram", "--output", out, "-k", 2)
    assert peagle(*base, *SMALL).status == 0
    before = (out / "acceptance.json").read_bytes()
    for extra, message in (
        (("--max-new-tokens", 9), "max_new_tokens 8, not 9"),
        (("--limit", 4), f'sets {{"{PROMPTS}": 5}}, not {{"{PROMPTS}": 4}}'),
        (("--shuffle-seed", 3), "prompts_sha256"),
        (("--dtype", "float64"), 'dtype "float32", not "float64"'),
        (("--seed", 5), "seed 0, not 5"),
        (("--draft-window", 5), "draft_window"),
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


# ---- heads ----


def test_a_head_of_another_target_is_named_before_anything_runs(
    peagle: Peagle, pair: Pair, tmp_path: Path, measured: list[str]
) -> None:
    stranger = save_head(tmp_path / "head", make_target_folder(tmp_path / "other", seed=3))
    result = peagle("eval", *pair.options, "--method", f"stranger={stranger}", *SMALL)
    assert result.status == 2 and "The head of stranger" in result.err
    assert "was trained for target 'other'" in result.err
    assert measured == []


@pytest.mark.slow
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


# ---- certificate ----


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

    monkeypatch.setattr("peagle.evaluation.certify.run.run_certificate", run)
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


# ---- mistakes ----


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
        (("--parallel-drafting-spec", "4"), "'4' is not a JSON object"),
        (
            ("--parallel-drafting-spec", "auto"),
            "spec is auto; expected a shape",
        ),
        (
            ("--parallel-drafting-spec", '{"max_nodes": 4, "max_nodes": 5}'),
            "--parallel-drafting-spec: The JSON object has the key 'max_nodes' twice",
        ),
        (("--parallel-drafting-spec", '{"trees": 4}'), "has the unknown key 'trees'"),
        (
            ("--parallel-drafting-spec", TREES, "--draft-sampling", "probabilistic"),
            'expected "argmax" with parallel_drafting_spec',
        ),
        (("--concurrency", "0"), "--concurrency is 0"),
        (("--method", "plain"), "--method: 'plain' is not ngram or NAME=MODEL"),
        (("--method", "ngram=./x"), "--method: 'ngram=./x' calls a head 'ngram'"),
        (("--endpoint", "=http://127.0.0.1:1"), "is not [NAME=]URL"),
        (("--no-chat-template", "--thinking"), "--no-chat-template was given"),
        (("--model", "m"), "without --endpoint"),
        (("--samples", "9"), "without --certify"),
        (("--tolerance", "1"), "--tolerance is 1.0 without --certify --endpoint"),
        (("--certify", "--reference-endpoint", "http://x"), "without --certify --endpoint"),
        (("--draft-window", "-2"), "draft_window is -2; expected a whole number, 0 for no"),
        (("--certify", "--draft-window", "9"), "no window changes; leave it out"),
        (
            ("--certify", "--parallel-drafting-spec", TREES, "--drawn-chains-from", "never"),
            "behind drawn chains and trees without them, at one temperature; leave it out",
        ),
        (
            ("--draft", "EAGLE3", "--parallel-drafting-spec", TREES, "--drawn-chains-from", "0.5"),
            "--drawn-chains-from is 0.5, but no trees of a P-EAGLE head are measured",
        ),
        (
            ("--draft-window", "9", "--engine", "vllm"),
            "the windows of a head from its config",
        ),
        (("--certify", "--kv-cache-dtype", "fp8"), "does not round keys and values; leave"),
        (("--certify", "--fp8-activations", "auto"), "activations are not rounded; leave"),
        (("--certify", "--set", "humaneval,gsm8k"), "takes its prompts from one"),
        (("--endpoint", "http://x", "--eagle3", "y"), "--eagle3 and --endpoint contradict"),
        (("--endpoint", "http://x", "--dtype", "float32"), "--dtype and --endpoint contradict"),
        (("--endpoint", "http://127.0.0.1:9"), "No server answers at"),
        (("--eagle3", "PEAGLE"), "--eagle3 is"),
        (("--method", "peagle=PEAGLE"), "Two methods are called 'peagle'"),
        (("--draft", "./nowhere"), "nowhere"),
        (("--output", "FILE"), "cannot be written: Not a directory"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, tuple) else "",
)
def test_mistakes(
    peagle: Peagle, pair: Pair, tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    (tmp_path / "file").write_text("")
    words = {"PEAGLE": str(pair.peagle), "peagle=PEAGLE": f"peagle={pair.peagle}"}
    words |= {"FILE": str(tmp_path / "file"), "EAGLE3": str(pair.eagle3)}
    options = tuple(words.get(text, text) for text in options)
    models = () if "--endpoint" in options else pair.options
    if "--draft" in options:
        models = ("--target", pair.target)
    result = peagle("eval", *models, *options)
    assert (result.status, result.out) == (2, ""), result.err
    assert message in result.err and "Traceback" not in result.err


@pytest.mark.slow
def test_the_model_may_be_the_first_word(peagle: Peagle, pair: Pair) -> None:
    options = ("--draft", pair.peagle, *SMALL, "--no-ngram", "-k", 1, *JSON)
    (first,) = entries_of(peagle("eval", pair.target, *options))
    (named,) = entries_of(peagle("eval", "--target", pair.target, *options))
    assert first["pooled"] == named["pooled"]
    both = peagle("eval", pair.target, "--target", "x", *options)
    assert both.status == 2 and "and --target were both given" in both.err
    flags = peagle("eval", *options, "--", "--kv-cache-dtype", "fp8")
    assert "'--kv-cache-dtype' was given after --, where flags of vLLM stand" in flags.err


@pytest.mark.slow
def test_a_second_name_of_a_head_is_that_of_its_trees(peagle: Peagle, pair: Pair) -> None:
    """Its chains are measured once, and its trees too."""
    options = (*pair.options, "--method", f"wide={pair.peagle}", *SMALL, "--no-ngram", *JSON)
    entries = entries_of(peagle("eval", *options, "-k", 2, "--parallel-drafting-spec", TREES))
    assert [(one["method"], one["k"]) for one in entries] == [
        ("peagle", 2),
        ("wide", 3),
        ("wide-text", 3),
    ]
    # Without trees a second name is a second run, as asked for.
    entries = entries_of(peagle("eval", *options, "-k", 2))
    assert [one["method"] for one in entries] == ["peagle", "wide"]
