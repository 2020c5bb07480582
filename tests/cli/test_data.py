"""`peagle data`: the three commands from prompts to a file that train reads."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from peagle.cli import data, progress
from peagle.data.dataset import ResponseDataset
from tests.cli.conftest import Pair, Peagle, environment, kill_when
from tests.conftest import VOCAB_SIZE, byte_tokenizer
from tests.data.files import write

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|endoftext|>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CHAT = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "yes"}]}


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    rows = [{"id": f"p{i}", "prompt": f"say {i}"} for i in range(6)]
    return write(tmp_path / "prompts.jsonl", *rows, {"id": "again", "prompt": "say 0"})


@pytest.fixture
def template(tmp_path: Path) -> Path:
    path = tmp_path / "chat.jinja"
    path.write_text(TEMPLATE)
    return path


def test_from_prompts_to_what_train_reads(
    peagle: Peagle, pair: Pair, prompts: Path, tmp_path: Path
) -> None:
    responses, train = tmp_path / "responses.jsonl", tmp_path / "train.safetensors"
    command = ["data", "regenerate", prompts, *pair.options, "--output", responses]
    command += ["--max-new-tokens", 12, "--ignore-eos", "--format", "json"]
    result = peagle(*command)
    assert result.status == 0, result.err
    told = json.loads(result.out)
    assert (told["prompts"], told["duplicates"], told["answers"], told["tokens"]) == (6, 1, 6, 72)
    result = peagle(*command)
    assert (json.loads(result.out)["resumed"], json.loads(result.out)["answers"]) == (6, 0)
    result = peagle("data", "prepare", responses, "--target", pair.target, "-o", train)
    assert result.status == 0 and result.err == "", result.err
    assert result.out.startswith(f"{train}: 6 samples of 6 records, 102 tokens, 70.6% supervised\n")
    dataset = ResponseDataset.load(train, byte_tokenizer(), VOCAB_SIZE, 64)
    assert len(dataset) == 6 and dataset.prompt_lens.tolist() == [5] * 6
    result = peagle("data", "inspect", train, "--format", "json", "--samples", 1)
    found = json.loads(result.out)
    assert (found["samples"], found["supervised"], found["duplicates"]) == (6, 72, 0)
    assert found["length"]["p50"] == 17 and found["metadata"]["kind"] == "prepare"
    assert len(found["shown"]) == 1 and len(found["shown"][0]["response_token_ids"]) == 12


def test_no_thinking_is_fine_for_a_target_without_a_template(
    peagle: Peagle, pair: Pair, prompts: Path, tmp_path: Path
) -> None:
    responses, train = tmp_path / "responses.jsonl", tmp_path / "train.safetensors"
    target = ["--target", pair.target, "--no-thinking"]
    for command in (
        ["regenerate", prompts, *target, "-o", responses, "--limit", 1, "--max-new-tokens", 4],
        ["prepare", responses, *target, "-o", train],
        ["inspect", train, *target],
    ):
        result = peagle("data", *command)
        assert result.status == 0, result.err


def test_samples_are_shown_with_their_mask(
    peagle: Peagle, pair: Pair, template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chats = write(tmp_path / "chats.jsonl", CHAT)
    command = ["data", "inspect", chats, "--target", pair.target, "--chat-template", template]
    result = peagle(*command)
    assert result.status == 0, result.err
    assert "<user>q<|endoftext|>\n<assistant>[[yes<|endoftext|>]]\n" in result.out
    assert result.out.startswith(f"{chats}: 1 samples, 24 tokens, 4 supervised (16.7%)\n")
    monkeypatch.setattr(data, "has_styles", lambda _: True)
    monkeypatch.setattr(data, "dim", lambda text, _: f"<dim>{text}</dim>")
    monkeypatch.setattr(data, "bright", lambda text, _: f"<bright>{text}</bright>")
    assert "<assistant></dim><bright>yes<|endoftext|></bright>" in peagle(*command).out


def test_prepare_tells_what_it_leaves_out(
    peagle: Peagle, pair: Pair, template: Path, tmp_path: Path
) -> None:
    ids = {"prompt_token_ids": [1], "response_token_ids": [2] * 90}
    empty = {"messages": [CHAT["messages"][0], {"role": "assistant", "content": ""}]}
    source = write(tmp_path / "a.jsonl", CHAT, CHAT, ids, empty)
    output = tmp_path / "b.jsonl"
    command = ["data", "prepare", source, "--target", pair.target, "-o", output]
    command += ["--chat-template", template, "--max-length", 50]
    result = peagle(*command)
    assert result.status == 0
    assert "does not say which tokenizer" in result.err
    assert "truncated at 50 tokens: 1\n" in result.out
    assert "left out, equal to another: 1\n" in result.out
    assert f"dropped, empty answer: 1 (first: {source}, line 4)\n" in result.out
    result = peagle(*command)
    assert result.status == 2 and "--overwrite" in result.err
    result = peagle(*command, "--overwrite", "--format", "json", "--long", "drop")
    told = json.loads(result.out)
    assert told["samples"] == 1 and told["dropped"]["longer than 50 tokens"] == 1


@pytest.mark.parametrize("share", [0.0001, 0.9999])
def test_a_share_gives_each_file_a_conversation(
    peagle: Peagle, pair: Pair, tmp_path: Path, share: float
) -> None:
    """Without --validation the second file is named after the first."""
    source = write(tmp_path / "a.jsonl", *({"prompt": p, "response": "answer"} for p in "abc"))
    output, held = tmp_path / "b.safetensors", tmp_path / "b.validation.safetensors"
    command = ["data", "prepare", source, "--target", pair.target, "-o", output]
    result = peagle(*command, "--validation-share", share)
    assert result.status == 0 and f"{held}: {1 if share < 0.5 else 2} samples" in result.out
    files = [ResponseDataset.load(f, byte_tokenizer(), VOCAB_SIZE, 64) for f in (output, held)]
    prompts = [[int(d.tokens[begin]) for begin in d.start_loc[:-1]] for d in files]
    assert sorted(map(len, prompts)) == [1, 2] and len({*prompts[0], *prompts[1]}) == 3
    result = peagle(*command, "--validation-share", share)
    assert result.status == 2 and "--overwrite" in result.err
    assert peagle(*command, "--overwrite").status == 0, "no share, no second file"
    named = tmp_path / "c.jsonl"
    result = peagle(*command, "--overwrite", "--validation", named, "--format", "json")
    assert result.status == 0 and json.loads(result.out)["validation_samples"] == 1
    assert len(named.read_text().splitlines()) == 1
    write(source, {"prompt": "a", "response": "answer"})
    result = peagle(*command[:-1], tmp_path / "d.jsonl", "--validation-share", 0.5)
    assert result.status == 2 and not (tmp_path / "d.jsonl").exists()
    assert "The validation share is 0.5, and all 1 samples are of one conversation" in result.err


@pytest.mark.parametrize(
    "arguments",
    [
        ["regenerate", "P", "-o", "P/x.jsonl"],
        ["regenerate", "P", "-o", "folder.jsonl"],
        ["prepare", "P", "-o", "P/x.jsonl"],
        ["prepare", "P", "-o", "folder.jsonl", "--overwrite"],
        ["prepare", "P", "-o", "x.jsonl", "--validation", "/proc/x/y.jsonl"],
        ["features", "P", "-o", "P"],
        ["features", "P", "-o", "/proc/x"],
    ],
)
def test_outputs_that_cannot_be_written_are_refused_first(
    peagle: Peagle,
    prompts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
) -> None:
    """Before the target is looked for, which is not there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.jsonl").mkdir()
    given = [argument.replace("P", str(prompts)) for argument in arguments]
    result = peagle("data", *given, "--target", "./none")
    assert (result.status, result.out) == (2, "")
    assert "cannot be written" in result.err or "is a folder" in result.err
    assert result.err.count("\n") == 1


def test_regeneration_says_what_it_is_doing(
    peagle: Peagle, pair: Pair, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_LINE_SECONDS", 0.0)
    command = ["data", "regenerate", prompts, *pair.options, "--output", tmp_path / "a.jsonl"]
    result = peagle(*command, "--max-new-tokens", 4, "--max-num-seqs", 2)
    assert result.status == 0
    lines = result.err.splitlines()
    assert lines[0] == "peagle: loading the model"
    assert lines[1].startswith("peagle: 0 answers to 6 prompts")
    assert lines[-1].startswith("peagle: 6 answers to 6 prompts") and lines[-1].endswith(
        "0:00 left"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "No such command 'nothing'"),
        ([], "Missing command"),
        (["prepare"], "FILE"),
        (["prepare", "none.jsonl", "--target", "T", "-o", "x.jsonl"], "'none.jsonl' is not there"),
        (["prepare", "P", "--target", "T", "-o", "x.csv"], "must end in"),
        (["prepare", "P", "--target", "T", "-o", "P"], "choose another output"),
        (["prepare", "P", "--target", "./none", "-o", "x.jsonl"], "'none' is not there"),
        (["prepare", "P", "--target", "T", "-o", "x.jsonl", "--long", "x"], "'x' is not one of"),
        (["prepare", "P", "--target", "T", "-o", "x.jsonl", "--thinking"], "no chat template"),
        (["prepare", "P", "--target", "T", "-o", "x.jsonl"], "has the keys id, prompt"),
        (["inspect", "none.jsonl"], "is not there"),
        (["inspect", "P"], "has the keys id, prompt"),
        (["inspect", "P", "--samples", "-1"], "--samples"),
        (["regenerate", "P"], "--output"),
        (["regenerate", "P", "-o", "x.txt"], "expected a name that ends in .jsonl"),
        (["regenerate", "none.jsonl", "-o", "x.jsonl"], "is not there"),
        (["regenerate", "P", "-o", "x.jsonl", "--limit", "0"], "--limit"),
        (["regenerate", "P", "-o", "x.jsonl", "--endpoint", "x"], "--endpoint is 'x'"),
        (
            ["regenerate", "P", "-o", "x.jsonl", "--endpoint", "http://x", "--dtype", "float32"],
            "--dtype has no effect on a server",
        ),
        (["regenerate", "P", "-o", "x.jsonl", "--target", "T", "--raw", "--thinking"], "--raw"),
        (["regenerate", "P", "-o", "x.jsonl", "--target", "T", "--chat"], "no chat template"),
    ],
)
def test_mistakes_exit_with_2(
    peagle: Peagle,
    pair: Pair,
    prompts: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(prompts.parent)
    names = {"P": prompts, "T": pair.target}
    result = peagle("data", *(names.get(argument, argument) for argument in arguments))
    assert (result.status, result.out) == (2, "")
    assert "peagle: error: " in result.err and message in result.err
    assert not list(prompts.parent.glob("x.*"))


def test_help_of_each_has_examples_and_needs_no_torch() -> None:
    actions = ("regenerate", "prepare", "inspect", "features")
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "from peagle.cli.main import run\n"
        f"sys.exit(max(run(['data', action, '--help']) for action in {actions}))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    for action, text in zip(actions, result.stdout.split("Examples:")[1:], strict=True):
        assert f"\n     peagle data {action} " in text


def test_failures_are_told_after_the_rest_is_done(
    peagle: Peagle, pair: Pair, tmp_path: Path
) -> None:
    rows = [{"id": "fine", "prompt": "x"}, {"id": "long", "prompt": "y" * 3000}]
    output = tmp_path / "out.jsonl"
    result = peagle(
        *("data", "regenerate", write(tmp_path / "p.jsonl", *rows), "--target", pair.target),
        *("-o", output, "--max-new-tokens", 3),
    )
    assert result.status == 2 and "1 answers to 2 prompts, " in result.out
    assert "1 of 2 prompts have no whole answer; the first, 'long'" in result.err
    assert [json.loads(line)["id"] for line in output.read_text().splitlines()] == ["fine"]


def test_kill_and_go_on(peagle: Peagle, pair: Pair, tmp_path: Path) -> None:
    """kill -9 in the middle: the same command completes it as an uninterrupted run would have."""
    rows = [{"id": i, "prompt": f"text {i}"} for i in range(60)]
    source, output = write(tmp_path / "p.jsonl", *rows), tmp_path / "out.jsonl"

    def command(path: Path) -> list[str]:
        given = ["--target", pair.target, "-o", path, "--max-new-tokens", 30, "--temperature", 1]
        return ["data", "regenerate", *map(str, [source, *given, "--max-num-seqs", 8])]

    def has_begun() -> bool:
        return output.exists() and output.read_bytes().count(b"\n") >= 5

    kill_when(has_begun, command(output))
    there = output.read_bytes().count(b"\n")
    assert 5 <= there < 60
    shutil.copy(output, tmp_path / "before.jsonl")
    for path in (output, tmp_path / "whole.jsonl"):
        assert peagle(*command(path)).status == 0
    kept = (tmp_path / "before.jsonl").read_bytes()
    assert output.read_bytes().startswith(kept[: kept.rindex(b"\n") + 1])
    halves, whole = (
        {row["id"]: row for row in map(json.loads, path.read_text().splitlines())}
        for path in (output, tmp_path / "whole.jsonl")
    )
    assert halves == whole and len(whole) == 60
