"""`peagle data`: from prompts to a file that train reads, and to a store of features."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from peagle.cli import data_features, data_inspect, progress
from peagle.cli.setup import Setup
from peagle.data.dataset import ResponseDataset
from peagle.data.features import FeatureStore
from peagle.data.recorded import RecordFolder
from peagle.errors import UserError
from peagle.models.target_ends import TargetEnds
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
    assert result.out.startswith(f"{train}: 6 samples of 6 records, 6 answers, 102 tokens, ")
    dataset = ResponseDataset.load(train, byte_tokenizer(), VOCAB_SIZE, 64)
    assert len(dataset) == 6 and dataset.prompt_lens.tolist() == [5] * 6
    result = peagle("data", "inspect", train, "--format", "json", "--samples", 1)
    found = json.loads(result.out)
    assert (found["samples"], found["supervised"], found["duplicates"]) == (6, 72, 0)
    assert found["length"]["p50"] == 17 and found["metadata"]["kind"] == "prepare"
    assert len(found["shown"]) == 1 and len(found["shown"][0]["response_token_ids"]) == 12


def test_answers_at_two_temperatures(
    peagle: Peagle, pair: Pair, prompts: Path, tmp_path: Path
) -> None:
    def run(name: str, temperature: str) -> Path:
        path = tmp_path / f"{name}.jsonl"
        command = ["data", "regenerate", prompts, "--target", pair.target, "--output", path]
        result = peagle(*command, "--temperature", temperature, "--max-new-tokens", 12)
        assert result.status == 0, result.err
        return path

    def by_id(path: Path, at: float | None = None) -> dict[str, dict[str, Any]]:
        rows = map(json.loads, path.read_text().splitlines())
        return {row.pop("id"): row for row in rows if at is None or row.pop("temperature") == at}

    both = run("both", "0,0.7")
    found = {at: by_id(both, float(at)) for at in ("0", "0.7")}
    for at in found:
        alone = run(at, f"{at},{at}")  # the same one twice is one
        assert found[at] and found[at].items() <= by_id(alone).items() and len(by_id(alone)) == 6
        assert all("temperature" not in row for row in by_id(alone).values())
        side = json.loads(Path(f"{alone}.meta.json").read_text())
        assert side["options"]["sampling"]["temperature"] == float(at)
        assert side["answers"] == 6 and "by_temperature" not in side
    assert not found["0"].keys() & found["0.7"].keys()
    side = json.loads(Path(f"{both}.meta.json").read_text())
    assert side["options"]["sampling"]["temperature"] == [0.0, 0.7] and side["answers"] == 6

    # The output of one run is none of another, in both directions.
    for name, other in (("both", "0"), ("0", "0,0.7")):
        command = ["data", "regenerate", prompts, "--target", pair.target]
        command += ["-o", tmp_path / f"{name}.jsonl", "--max-new-tokens", 12]
        result = peagle(*command, "--temperature", other)
        assert result.status == 2 and "was begun with sampling" in result.err


@pytest.mark.slow
def test_prompts_that_the_target_writes(peagle: Peagle, pair: Pair, tmp_path: Path) -> None:
    prompts = tmp_path / "p.jsonl"
    command = ["data", "synthesize", *pair.options, "--output", prompts, "--format", "json"]
    result = peagle(*command, "--count", 2, "--max-new-tokens", 24)
    assert result.status == 0, result.err
    told = json.loads(result.out)
    assert (told["count"], told["kept"], told["resumed"]) == (2, 2, 0)
    assert told["samples"] == 2 + sum(told["dropped"].values())
    assert told["output"] == str(prompts)
    side = json.loads((tmp_path / "p.jsonl.meta.json").read_text())
    assert side["options"]["chat"] is False and "humaneval" in side["held_out"]
    # Sampled output depends on the seed alone, so a run without the head writes the same.
    other = tmp_path / "other.jsonl"
    plain = ["data", "synthesize", "--target", pair.target, "--output", other]
    result = peagle(*plain, "--count", 2, "--max-new-tokens", 24)
    assert result.status == 0, result.err
    assert result.out.startswith(f"{other}: 2 prompts of {told['samples']} samples")
    assert other.read_text() == prompts.read_text()
    more = peagle(*command, "--count", 3, "--max-new-tokens", 24)
    assert json.loads(more.out)["resumed"] == 2
    assert "was begun with sampling" in peagle(*command, "--count", 4).err
    answers = tmp_path / "a.jsonl"
    few = ["--limit", 2, "--max-new-tokens", 4]
    result = peagle("data", "regenerate", prompts, *pair.options, "-o", answers, *few)
    assert result.status == 0, result.err
    rows = [json.loads(line) for line in prompts.read_text().splitlines()]
    asked = {row["id"]: row["prompt"] for row in map(json.loads, answers.open())}
    assert asked == {row["id"]: row["turns"][0] for row in rows[:2]}


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
    assert result.out.startswith(
        f"{chats}: 1 samples, 1 answers, 24 tokens, 4 supervised (16.7%)\n"
    )
    monkeypatch.setattr(data_inspect, "has_styles", lambda _: True)
    monkeypatch.setattr(data_inspect, "dim", lambda text, _: f"<dim>{text}</dim>")
    monkeypatch.setattr(data_inspect, "bright", lambda text, _: f"<bright>{text}</bright>")
    assert "<assistant></dim><bright>yes<|endoftext|></bright>" in peagle(*command).out


def test_every_answer_of_a_sample_is_marked(
    peagle: Peagle, pair: Pair, template: Path, tmp_path: Path
) -> None:
    several = [*CHAT["messages"], {"role": "user", "content": "r"}]
    several.append({"role": "assistant", "content": "n" * 700})
    chats = write(tmp_path / "chats.jsonl", {"messages": several})
    command = ["data", "inspect", chats, "--target", pair.target, "--chat-template", template]
    result = peagle(*command)
    assert result.status == 0 and ": 1 samples, 2 answers, " in result.out, result.err
    assert "tokens with 2 answers\n" in result.out
    shown = "<user>q<|endoftext|>\n<assistant>[[yes<|endoftext|>]]\n<user>r<|endoftext|>\n"
    assert f"{shown}<assistant>[[nnn" in result.out and "nnn...]]" in result.out
    (one,) = json.loads(peagle(*command, "--format", "json").out)["shown"]
    (first, begin), (end, last) = one["answers"]
    ids = one["prompt_token_ids"] + one["response_token_ids"]
    assert (first, last) == (len(one["prompt_token_ids"]), len(ids))
    between = byte_tokenizer().decode(ids[begin:end])
    assert between == "\n<user>r<|endoftext|>\n<assistant>"


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
        (["features", ".", "--target", "T", "-o", "x.f"], "'.' is a folder; expected a file"),
        (["inspect", "none.jsonl"], "is not there"),
        (["inspect", "P"], "has the keys id, prompt"),
        (["inspect", "P", "--samples", "-1"], "--samples"),
        (["synthesize", "-o", "x.jsonl"], "--count"),
        (["synthesize", "--count", "0", "-o", "x.jsonl"], "--count"),
        (["synthesize", "--count", "1", "-o", "x.jsonl", "--turns", "3"], "--turns"),
        (
            ["synthesize", "--count", "1", "-o", "y.jsonl", "--target", "T", "--turns", "2"],
            "has no chat template, so it begins documents",
        ),
        (["regenerate", "P"], "--output"),
        (["regenerate", "P", "-o", "x.txt"], "expected a name that ends in .jsonl"),
        (["regenerate", "none.jsonl", "-o", "x.jsonl"], "is not there"),
        (["regenerate", "P", "-o", "x.jsonl", "--limit", "0"], "--limit"),
        (
            ["regenerate", "P", "-o", "x.jsonl", "--temperature", "0,warm"],
            "--temperature: temperature is '0,warm'; expected numbers like 0,0.7",
        ),
        (["regenerate", "P", "-o", "x.jsonl", "--temperature", "0,"], "temperature is '0,'"),
        (["regenerate", "P", "-o", "x.jsonl", "--temperature", "0,-1"], "temperature is -1.0"),
        (["regenerate", "P", "-o", "x.jsonl", "--temperature", "0.7,nan"], "temperature is nan"),
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


def test_sources_that_cannot_be_read_exit_with_2(
    peagle: Peagle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the target is looked for, which is not there."""
    monkeypatch.chdir(tmp_path)
    for name, target in (("broken", "/nowhere"), ("loop", "loop"), ("part/a.jsonl", "/nowhere")):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).symlink_to(target)
    Path("empty").mkdir()
    RecordFolder.create(tmp_path / "unread")

    def prepared(source: str) -> str:
        result = peagle("data", "prepare", source, "--target", "./none", "-o", "x.safetensors")
        assert (result.status, result.out, result.err.count("\n")) == (2, "", 1)
        return result.err

    assert "'broken' is a broken link" in prepared("broken")
    assert "'loop' is a broken link" in prepared("loop")
    assert "'part/a.jsonl' cannot be read: No such file" in prepared("part")
    assert "it holds nothing" in prepared("empty")
    denied = PermissionError(errno.EACCES, "Permission denied", "unread")
    for owner, name, source in ((os, "scandir", "part"), (Path, "iterdir", "unread")):
        monkeypatch.setattr(owner, name, Mock(side_effect=denied))
        assert "'unread' cannot be used: Permission denied. Correct the path." in prepared(source)


@pytest.mark.slow
def test_help_of_each_has_examples_and_needs_no_torch() -> None:
    actions = ("synthesize", "regenerate", "prepare", "inspect", "features")
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


ODD = [
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "parts"}]}]},
    {"id": None, "prompt": "no id"},
    {"messages": [{"role": "user", "content": ""}]},
    {"messages": [{"role": "system", "content": "x"}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    {"id": 1.5, "prompt": "x"},
    {"text": "x"},
    {"system": "s", "prompt": "third"},
    {"id": "8", "prompt": "an id that is taken"},
]


def test_records_that_cannot_be_asked_are_counted(
    peagle: Peagle, pair: Pair, template: Path, tmp_path: Path
) -> None:
    source, output = write(tmp_path / "p.jsonl", *ODD), tmp_path / "out.jsonl"
    command = ["data", "regenerate", source, "--target", pair.target, "-o", output]
    command += ["--chat-template", template, "--max-new-tokens", 2]
    result = peagle(*command)
    assert result.status == 0, result.err
    assert ": 3 answers to 3 prompts, " in result.out and ", 6 dropped; " in result.out
    assert f"dropped, a message of the user is empty: 1 (first: {source}, line 3)\n" in result.out
    lines = map(json.loads, output.read_text().splitlines())
    asked = {one["id"]: [m["content"] for m in one["messages"][:-1]] for one in lines}
    assert asked == {"1": ["parts"], "2": ["no id"], "8": ["s", "third"]}
    told = json.loads(peagle(*command, "--format", "json").out)
    assert told["prompts"] == told["resumed"] == 3
    assert told["dropped"] == {
        "a message of the user is empty": 1,
        "there is no message of the user": 1,
        "the content of a message is not text": 1,
        "the id is neither text nor a whole number": 1,
        "there is no prompt": 1,
        "a different prompt before has its id": 1,
    }
    assert told["details"]["there is no prompt"].startswith(f"{source}, line 7: expected")
    # A limit counts prompts.
    told = json.loads(peagle(*command, "--format", "json", "--limit", 3).out)
    assert told["prompts"] == 3 and sum(told["dropped"].values()) == 5


def test_a_file_without_any_prompt_says_why(peagle: Peagle, pair: Pair, tmp_path: Path) -> None:
    source, output = write(tmp_path / "p.jsonl", *ODD[2:5]), tmp_path / "out.jsonl"
    result = peagle("data", "regenerate", source, "--target", pair.target, "-o", output)
    assert result.status == 2
    assert f"no prompts: 1 × a message of the user is empty (first: {source}, line 1)" in result.err


def test_what_plain_text_leaves_out_is_told(peagle: Peagle, pair: Pair, tmp_path: Path) -> None:
    source = write(tmp_path / "p.jsonl", {"prompt": "q", "system": "s"}, {"prompt": "r"})
    command = ["data", "regenerate", source, "--target", pair.target, "-o", tmp_path / "o.jsonl"]
    result = peagle(*command, "--max-new-tokens", 2)
    assert "1 of 2 prompts have further turns, system messages or tools" in result.err


@pytest.mark.slow
def test_kill_and_go_on(peagle: Peagle, pair: Pair, tmp_path: Path) -> None:
    """kill -9 in the middle: the same command completes it as an uninterrupted run would have."""
    rows = [{"id": i, "prompt": f"text {i}"} for i in range(60)]
    source, output = write(tmp_path / "p.jsonl", *rows), tmp_path / "out.jsonl"

    def command(path: Path) -> list[str]:
        given = ["--target", pair.target, "-o", path, "--max-new-tokens", 30, "--temperature", 1]
        return ["data", "regenerate", *map(str, [source, *given, "--max-num-seqs", 8])]

    def has_begun() -> bool:
        return output.exists() and output.read_bytes().count(b"\n") >= 5

    kill_when(has_begun, command(output), tmp_path / "log")
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


SMALL = ["--shard-gib", 30_000 / 2**30]


def write_random(path: Path, count: int, length: int) -> Path:
    """Responses of random tokens, all of unlike lengths."""
    generator = torch.Generator().manual_seed(count)
    with path.open("w") as lines:
        for index in range(count):
            ids = torch.randint(2, 300, (length + index % 40,), generator=generator).tolist()
            row = {"prompt_token_ids": ids[:5], "response_token_ids": ids[5:]}
            lines.write(json.dumps(row) + "\n")
    return path


@pytest.fixture
def train(tmp_path: Path) -> Path:
    return write_random(tmp_path / "train.jsonl", count=30, length=20)


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_store_is_written_that_training_opens(
    peagle: Peagle, pair: Pair, train: Path, tmp_path: Path
) -> None:
    output = tmp_path / "deep" / "features"
    command = ["data", "features", train, "--target", pair.target, "-o", output, *SMALL]
    result = peagle(*command)
    assert result.status == 0, result.err
    size = sum(map(len, files_of(output).values()))
    assert f"{size / 2**10:,.1f} KiB ({size:,} bytes) in " in result.err
    assert "layers 1,2,3 in bf16; " in result.err and "iB are free" in result.err
    shards = len(files_of(output)) - 1
    assert shards > 3
    assert result.out.startswith(f"{output}: whole, 30 sequences in {shards} shards, ")

    ends = TargetEnds.load(pair.target)
    dataset = ResponseDataset.load(train, byte_tokenizer(), VOCAB_SIZE, 2048)
    store = FeatureStore.open(output, dataset, ends, (1, 2, 3))
    assert store.features_of(29).shape == (int(dataset.start_loc[-1] - dataset.start_loc[-2]), 96)

    again = peagle(*command, "--verify", "--format", "json")
    assert again.status == 0 and f"{shards} shards are there, 0 B to write" in again.err
    told = json.loads(again.out)
    assert (told["computed_tokens"], told["verified"], told["bytes"]) == (0, True, size)
    assert (told["num_shards"], told["num_sequences"], told["dtype"]) == (shards, 30, "bf16")
    assert told["target_dtype"] == "float32" and told["aux_layer_ids"] == [1, 2, 3]

    path = output / "features-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    assert peagle(*command).status == 0
    result = peagle(*command, "--verify")
    assert (result.status, result.out) == (2, "")
    assert "features-00001.safetensors' of stored features was altered" in result.err
    refused = peagle(*command, "--dtype", "fp8")
    assert refused.status == 2 and "holds features of other things: dtype" in refused.err


def test_options_are_heard(peagle: Peagle, pair: Pair, train: Path, tmp_path: Path) -> None:
    command = ["data", "features", train, "--target", pair.target, "-o", tmp_path / "f"]
    command += ["--aux-layer-ids", "0, 2", "--dtype", "fp8", "--target-dtype", "float64"]
    command += ["--max-length", 24, "--batch-tokens", 50, "--max-disk-gib", 1, "--format", "json"]
    result = peagle(*command)
    assert result.status == 0, result.err
    told = json.loads(result.out)
    assert told["aux_layer_ids"] == [0, 2] and told["dtype"] == "fp8" and told["longest"] == 24
    assert told["target_dtype"] == "float64" and told["computed_tokens"] == told["num_tokens"]
    dataset = ResponseDataset.load(train, byte_tokenizer(), VOCAB_SIZE, 24)
    store = FeatureStore.open(tmp_path / "f", dataset, TargetEnds.load(pair.target), (0, 2))
    assert store.features_dtype == torch.bfloat16


def test_features_of_an_fp8_kv_cache(
    peagle: Peagle, pair: Pair, train: Path, tmp_path: Path
) -> None:
    features = []
    for name in ("auto", "fp8"):
        command = ["data", "features", train, "--target", pair.target, "-o", tmp_path / name]
        command += ["--dtype", "fp32", "--kv-cache-dtype", name, "--format", "json"]
        result = peagle(*command)
        assert result.status == 0, result.err
        expected = "float32" if name == "auto" else "float32, fp8 KV cache"
        assert json.loads(result.out)["target_dtype"] == expected
        dataset = ResponseDataset.load(train, byte_tokenizer(), VOCAB_SIZE, 2048)
        store = FeatureStore.open(tmp_path / name, dataset, TargetEnds.load(pair.target), (1, 2, 3))
        features.append(store.features_of(0))
    difference = (features[1] - features[0]).norm() / features[0].norm()
    assert 1e-4 < difference < 0.1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-disk-gib", "0.000001"], " KiB and --max-disk-gib allows 1.0 KiB. Store less"),
        (["--max-disk-gib", "-1"], "--max-disk-gib is -1.0; expected a size of 0 or more"),
        (["--shard-gib", "0"], "--shard-gib is 0.0; expected a size above 0"),
        (["--aux-layer-ids", "1,x"], "--aux-layer-ids is '1,x'; expected layer numbers"),
        (["--aux-layer-ids", "1,9"], "aux layer ids are [1, 9]; expected distinct ascending"),
        (["--dtype", "int4"], "'int4' is not one of"),
        (["--kv-cache-dtype", "int8"], "'int8' is not one of"),
        (["--device", "tpu"], "device is 'tpu'"),
        (["--max-length", "8"], "longer one"),
        (["--target", "./none"], "'none' is not there"),
    ],
)
def test_mistakes_exit_with_2_before_anything_is_written(
    peagle: Peagle, pair: Pair, train: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    output = tmp_path / "features"
    if message == "longer one":
        train.write_text(json.dumps({"prompt_token_ids": [2] * 8, "response_token_ids": [3, 4]}))
        message = "no sequence with at least two response tokens within max_length 8"
    result = peagle("data", "features", train, "--target", pair.target, "-o", output, *arguments)
    assert (result.status, result.out) == (2, "")
    assert "peagle: error: " in result.err and message in result.err
    assert not output.exists()


@pytest.mark.slow
def test_an_interrupt_leaves_whole_shards(
    peagle: Peagle, pair: Pair, train: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["data", "features", train, "--target", pair.target, *SMALL, "--batch-tokens", 1]
    calls: list[Any] = []

    def interrupted(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == 17:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(data_features, "_show_features", interrupted)
        result = peagle(*command, "-o", tmp_path / "halved")
    assert (result.status, result.out) == (130, "")
    whole = len(list((tmp_path / "halved").glob("features-*.safetensors")))
    assert whole >= 1 and f"peagle: {whole} of " in result.err
    assert "shards are whole; the same command goes on after them" in result.err
    for name in ("halved", "whole"):
        assert peagle(*command, "-o", tmp_path / name).status == 0
    assert files_of(tmp_path / "halved") == files_of(tmp_path / "whole")


def test_progress_is_told(
    peagle: Peagle, pair: Pair, train: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_LINE_SECONDS", 0.0)
    command = ["data", "features", train, "--target", pair.target, *SMALL, "--batch-tokens", 1]
    told = [
        line for line in peagle(*command, "-o", tmp_path / "f").err.splitlines() if "/s" in line
    ]
    assert len(told) == 30 and "tokens/s; 0:00 left" in told[-1]
    assert "peagle: 0 of " in told[0] and "tokens, " in told[0]


@pytest.mark.slow
def test_a_killed_store_goes_on(peagle: Peagle, pair: Pair, tmp_path: Path) -> None:
    """kill -9 in the middle: the same command completes it as an uninterrupted run would have."""
    train = write_random(tmp_path / "train.jsonl", count=150, length=40)

    def command(output: str) -> list[str]:
        given = ["--target", pair.target, "-o", tmp_path / output, *SMALL, "--batch-tokens", 1]
        return ["data", "features", *map(str, [train, *given])]

    def shards() -> list[Path]:
        return sorted((tmp_path / "killed").glob("features-*.safetensors"))

    kill_when(lambda: len(shards()) >= 5, command("killed"), tmp_path / "log")
    before = {path: path.stat().st_mtime_ns for path in shards()}
    assert len(before) >= 5
    for output in ("killed", "whole"):
        assert peagle(*command(output)).status == 0
    assert len(before) < len(shards()), "it was killed in the middle"
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())
    assert files_of(tmp_path / "killed") == files_of(tmp_path / "whole")


@pytest.mark.parametrize(
    ("device", "given", "expected"),
    [("cuda", (), 256), ("cpu", (), 16), ("cuda", ("--max-num-seqs", 8), 8)],
)
def test_a_gpu_answers_many_questions_at_once(
    peagle: Peagle,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    given: tuple[object, ...],
    expected: int,
) -> None:
    found = []

    def load(setup: Setup, *_: object) -> None:
        found.append(setup.engine.max_num_seqs)
        raise UserError("enough")

    monkeypatch.setattr(Setup, "load", load)
    monkeypatch.setattr("peagle.engine.placement.resolve_device", lambda _: torch.device(device))
    source = tmp_path / "p.txt"
    source.write_text("Hello\n")
    peagle("data", "regenerate", source, "-o", tmp_path / "o.jsonl", *given)
    assert found == [expected]
