"""`peagle demo` on a tiny pair: the table, the JSON object, the live picture."""

import io
import json
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from peagle import LLM, SamplingParams
from peagle.bundled import BUNDLED, FOLDERS
from peagle.cli.demo import LiveView, identity_text
from peagle.cli.terminal import command_prefix
from peagle.evaluation.prompts import Prompt, load_prompt_set
from peagle.llm import StreamChunk
from tests.cli.conftest import Pair, Peagle, environment
from tests.conftest import byte_tokenizer

PAIR2 = Path(__file__).resolve().parents[1] / "fixtures" / "pair2"
METHODS = ["plain", "EAGLE-3", "P-EAGLE", "P-EAGLE tree"]


def options(pair: Pair) -> tuple[object, ...]:
    return (*pair.options, "--eagle3", pair.eagle3, "--limit", 2, "--max-new-tokens", 10)


def test_json(peagle: Peagle, pair: Pair) -> None:
    more = ("-k", 3, "--dtype", "float64", "--format", "json", "--threads", 1)
    result = peagle("demo", *options(pair), *more)
    assert result.status == 0, result.err
    report = json.loads(result.out)
    expected = {"num_prompts": 2, "num_speculative_tokens": 3, "dtype": "float64"}
    expected |= {"temperature": 0, "identical_outputs": True, "num_different_outputs": 0}
    assert {name: report[name] for name in expected} == expected
    assert report["environment"]["threads"] == 1
    tree = {"num_parallel_trees": 8, "prediction_depth": 3, "max_nodes": 19}
    assert report["parallel_drafting_spec"] == tree
    assert [output["id"] for output in report["outputs"]] == ["HumanEval/0", "HumanEval/1"]
    assert [method["name"] for method in report["methods"]] == METHODS
    plain, *drafted = report["methods"]
    assert plain["speed_up"] == 1 and plain["num_drafts"] == 0
    for method in drafted:
        # Copies of the text make paths that are deeper than K.
        num_positions = len(method["unconditional_acceptance_per_pos"])
        assert num_positions == 3 or (method["name"] == METHODS[-1] and num_positions > 3)
        assert method["acceptance_length"] >= 1 and method["tokens_per_s"] > 0
        assert method["different_outputs"] == []


def test_a_chat_model_answers_questions_by_its_template(peagle: Peagle) -> None:
    target, head = PAIR2 / "target", PAIR2 / "peagle"
    options = ("--max-new-tokens", 12, "--limit", 1, "--dtype", "float64", "--threads", 1)
    result = peagle("demo", target, "--draft", head, *options, "--format", "json")
    assert result.status == 0, result.err
    report = json.loads(result.out)
    question = load_prompt_set("mt_bench", 1)[0]
    assert report["prompt_set"] == "mt_bench" and report["identical_outputs"]
    (output,) = report["outputs"]
    llm = LLM(target, dtype="float64")
    messages = [{"role": "user", "content": question.text}]
    expected = llm.chat(messages, SamplingParams(max_tokens=12, temperature=0))[0]
    assert (output["id"], output["token_ids"]) == (question.id, expected.token_ids)


@pytest.mark.parametrize("colours", [["--no-color"], []])
def test_text_outside_a_terminal(peagle: Peagle, pair: Pair, colours: list[str]) -> None:
    result = peagle("demo", *options(pair), *colours)
    assert result.status == 0, result.err
    assert "\x1b" not in result.out
    shown = " ".join(result.out.split())
    facts = ("HumanEval/0", "HumanEval/1", "acceptance", "speed-up", "K=7, trees of 19 nodes")
    for words in (*METHODS, *facts):
        assert words in shown
    # Copies of the text are deeper than K, which is the last position that is shown.
    row = next(line for line in result.out.splitlines() if line.strip().startswith(METHODS[-1]))
    assert len(row.split()) == 2 + 1 + 7 + 2  # the name, the length, the positions, the speed
    assert "unconditional" in result.out
    assert "Identical outputs" in result.out


def test_a_target_without_an_eagle3_head(peagle: Peagle, pair: Pair) -> None:
    call = ("demo", *pair.options, "--limit", 1, "--max-new-tokens", 4, "--format", "json")
    report = json.loads(peagle(*call).out)
    assert [method["name"] for method in report["methods"]] == [
        "plain",
        "P-EAGLE",
        "P-EAGLE tree",
    ]


def test_commands_are_printed_as_this_folder_can_call_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = tmp_path / "a venv" / "bin"
    programs.mkdir(parents=True)
    monkeypatch.setattr(sys, "executable", str(programs / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert shlex.split(command_prefix()) == [str(programs / "python"), "-m", "peagle"]
    (programs / "peagle").write_text("#!/bin/sh\n")
    (programs / "peagle").chmod(0o755)
    assert shlex.split(command_prefix()) == [str(programs / "peagle")]
    monkeypatch.chdir(tmp_path)
    assert command_prefix() == "'a venv/bin/peagle'"
    monkeypatch.setenv("PATH", str(programs))
    assert command_prefix() == "peagle"


def terminal(*, no_color: bool) -> Console:
    """A terminal of 80 by 24 that writes into a string."""
    return Console(
        file=io.StringIO(),
        force_terminal=True,
        color_system="standard",
        no_color=no_color,
        width=80,
        height=24,
        _environ={"TERM": "xterm"},
    )


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_live_picture(peagle: Peagle, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    console = terminal(no_color=False)
    monkeypatch.setattr("peagle.cli.demo.make_console", lambda _: console)
    assert peagle("demo", *options(pair)).status == 0
    shown = written(console)
    assert "HumanEval/0, plain" in shown
    assert "HumanEval/1, P-EAGLE" in shown
    assert "accepted draft tokens" in shown
    assert shown.rstrip().endswith("left out.\x1b[0m")
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h"), "the cursor must come back"


@pytest.mark.parametrize("no_color", [False, True])
def test_accepted_tokens_are_marked(no_color: bool) -> None:
    console = terminal(no_color=no_color)
    tokenizer = byte_tokenizer()
    view = LiveView(console)
    with view.running({"P-EAGLE": SimpleNamespace(tokenizer=tokenizer)}):  # type: ignore[dict-item]
        view.begin(Prompt("p", ("the prompt ",)), "P-EAGLE")
        for text, num_accepted in (("A", 0), ("BCD", 2), ("E", 0)):
            view.show(StreamChunk(0, text, tokenizer.encode(text), num_accepted, 3, None))
    style = "\x1b[1m" if no_color else "\x1b[1;32m"
    assert f" A{style}BC\x1b[0mDE" in written(console).splitlines()[-2]


def test_a_difference_is_reported() -> None:
    report = {
        "num_different_outputs": 1,
        "num_prompts": 2,
        "dtype": "float32",
        "methods": [
            {"name": "plain", "different_outputs": []},
            {"name": "P-EAGLE", "different_outputs": ["HumanEval/1"]},
        ],
    }
    text = identity_text(report).plain
    assert "Outputs differ (plain, P-EAGLE) on 1 of 2 prompts: HumanEval/1." in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--draft", "PEAGLE", "--limit", 0), "The limit is 0"),
        (("--draft", "PEAGLE", "-k", 0), "num_speculative_tokens is 0"),
        (("--draft", "PEAGLE", "--max-new-tokens", 0), "max_tokens is 0"),
        (("--draft", "PEAGLE", "--threads", -1), "--threads is -1"),
        ((), "was given without --draft"),
        (("--draft", "EAGLE3"), "expected a head of P-EAGLE, not of EAGLE-3"),
        (("--draft", "PEAGLE", "--eagle3", "PEAGLE"), "expected a head of EAGLE-3, not of P-EAGLE"),
    ],
)
def test_mistakes(peagle: Peagle, pair: Pair, arguments: tuple[object, ...], message: str) -> None:
    heads = {"PEAGLE": pair.peagle, "EAGLE3": pair.eagle3}
    given = [heads.get(str(one), one) for one in arguments]
    result = peagle("demo", "--target", pair.target, *given)
    assert (result.status, result.out) == (2, "")
    assert message in result.err


def test_missing_bundled_weights(
    peagle: Peagle, pair: Pair, monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    monkeypatch.setitem(FOLDERS["target"], BUNDLED, tmp_path / "target")
    for command in (["demo"], ["generate", "--prompt", "x", "--no-speculation"]):
        result = peagle(*command)
        assert result.status == 2
        assert "This installation has no bundled target" in result.err
        assert "--target and --draft" in result.err


def test_the_view_needs_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import peagle.cli.demo"
    assert subprocess.run([sys.executable, "-c", code], env=environment()).returncode == 0
