"""`peagle convert`: what it writes and prints, and what it refuses."""

import inspect
import json
import shutil
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from peagle.cli.convert import convert
from peagle.evaluation.training_record import read_training_record
from peagle.models.checkpoint import read_head, save_drafter
from peagle.models.checkpoint.convert import StoredFormat
from peagle.models.target import TargetModel
from tests.cli.conftest import Pair, Peagle
from tests.conftest import make_drafter
from tests.gguf_files import write_gguf

FIELDS = [
    "source",
    "source_format",
    "destination",
    "format",
    "kind",
    "model_type",
    "num_layers",
    "hidden_size",
    "target_hidden_size",
    "vocab_size",
    "draft_vocab_size",
    "aux_layer_ids",
    "mask_token_id",
    "num_speculative_tokens_trained",
    "target",
    "dtype",
    "num_tensors",
    "num_bytes",
    "notes",
]


def test_the_formats_are_those_of_the_library() -> None:
    assert get_args(get_type_hints(convert)["format"]) == (*get_args(StoredFormat), "hf")
    assert inspect.signature(convert).parameters["format"].default.default is ...


@pytest.mark.parametrize("head", ["peagle", "eagle3"])
def test_there_and_back(peagle: Peagle, pair: Pair, tmp_path: Path, head: str) -> None:
    source = tmp_path / "trained"
    shutil.copytree(getattr(pair, head), source)
    (source / "train.json").write_text('{"steps": 5}')
    result = peagle("convert", source, tmp_path / "s", "--format", "speculators")
    assert result.status == 0, result.err
    kind = "P-EAGLE" if head == "peagle" else "EAGLE-3"
    assert result.out.startswith(f"{kind} head, 2 layers, ")
    assert f"{source} (vllm) to {tmp_path / 's'} (speculators)\n" in result.out
    data = json.loads((tmp_path / "s" / "config.json").read_text())
    assert data["speculators_model_type"] == head
    back = peagle("convert", tmp_path / "s", tmp_path / "v", "--format", "vllm")
    assert (back.status, back.err) == (0, "")
    before, after = (load_file(f / "model.safetensors") for f in (source, tmp_path / "v"))
    assert all(value.equal(after[name]) for name, value in before.items())
    back, before = read_head(tmp_path / "v"), read_head(source)
    assert (back.config, back.facts) == (before.config, before.facts)
    record = read_training_record(tmp_path / "v")
    assert record is not None and record.steps == 5


def test_either_style_generates_the_same(peagle: Peagle, pair: Pair, tmp_path: Path) -> None:
    assert peagle("convert", pair.peagle, tmp_path / "s", "--format", "speculators").status == 0
    records = []
    for draft in (pair.peagle, tmp_path / "s"):
        result = peagle(
            *("generate", "--target", pair.target, "--draft", draft, "--prompt", "def f(x):"),
            *("--max-new-tokens", 16, "--format", "json"),
        )
        assert result.status == 0, result.err
        record = json.loads(result.out)
        for name in ("elapsed_s", "time_to_first_token_s", "queue_time_s"):
            del record[name]
        records.append(record)
    assert records[0] == records[1]


def test_json_has_exactly_the_promised_fields(peagle: Peagle, pair: Pair, tmp_path: Path) -> None:
    result = peagle(
        *("convert", pair.peagle, tmp_path / "s", "--format", "speculators"),
        *("--target", "example/name", "--json"),
    )
    assert result.status == 0, result.err
    record = json.loads(result.out)
    assert list(record) == FIELDS
    size = sum(value.nbytes for value in load_file(pair.peagle / "model.safetensors").values())
    assert record["num_bytes"] == size
    assert (record["kind"], record["target"]) == ("P-EAGLE", "example/name")
    assert (record["source_format"], record["format"]) == ("vllm", "speculators")
    assert record["notes"] == [
        "the trained depth is unknown: speculative_tokens is the package's default"
    ]
    assert f"peagle: note: {record['notes'][0]}\n" == result.err


def test_the_target_is_not_needed(peagle: Peagle, pair: Pair, tmp_path: Path) -> None:
    head = make_drafter(TargetModel.load(pair.target), qk_norm=True, head_dim=16)
    save_drafter(tmp_path / "head", head)
    result = peagle("convert", tmp_path / "head", tmp_path / "s", "--format", "speculators")
    assert result.status == 0, result.err
    assert "the target's name is unknown" in result.err


def test_force(peagle: Peagle, pair: Pair, tmp_path: Path) -> None:
    call = ("convert", pair.peagle, tmp_path / "s", "--format", "speculators")
    assert peagle(*call).status == 0
    refused = peagle(*call)
    assert (refused.status, refused.out) == (2, "")
    assert "is not empty" in refused.err and "--force" in refused.err
    assert peagle(*call, "--force").status == 0


def test_mistakes(peagle: Peagle, pair: Pair, tmp_path: Path) -> None:
    def message(*arguments: object) -> str:
        result = peagle("convert", *arguments)
        assert (result.status, result.out) == (2, "")
        assert result.err.startswith("peagle: error: ")
        return result.err

    out = tmp_path / "out"
    speculators = ("--format", "speculators")
    assert "Missing option '--format'" in message(pair.peagle, out)
    assert "'gguf' is not one of 'vllm', 'speculators'" in message(
        pair.peagle, out, "--format", "gguf"
    )
    assert "Missing argument" in message(pair.peagle, *speculators)
    assert "'nowhere' is not there" in message("nowhere", out, *speculators)
    assert "has no config.json" in message(tmp_path, out, *speculators)
    assert "is a whole model" in message(pair.target, out, *speculators)
    assert "is the source; expected another" in message(pair.peagle, pair.peagle, *speculators)
    forced = (pair.peagle, pair.peagle, *speculators, "--force")
    assert "is the source; expected another" in message(*forced)
    file = tmp_path / "file"
    file.write_text("x")
    assert "is a file; expected a folder" in message(pair.peagle, file, *speculators)
    assert "could not be written" in message(pair.peagle, file / "below", *speculators)
    broken = Path(shutil.copytree(pair.peagle, tmp_path / "broken"))
    (broken / "model.safetensors").write_bytes(b"x" * 40)
    assert "is not readable as safetensors" in message(broken, out, *speculators)
    (broken / "config.json").write_text("{")
    assert "is not JSON" in message(broken, out, *speculators)
    assert not out.exists()


@pytest.mark.slow
def test_a_gguf_file_becomes_a_folder(peagle: Peagle, pair: Pair, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(pair.target)
    file = write_gguf(model, tmp_path / "x.gguf")
    result = peagle("convert", file, tmp_path / "a", "--format", "hf")
    assert (result.status, result.err) == (0, "")
    size = (tmp_path / "a" / "model.safetensors").stat().st_size
    line = f"{size / 1e6:.1f} MB of float32: {file} (F32) to {tmp_path / 'a'} (hf)\n"
    assert result.out == f"{model.config.model_type}, {line}"
    result = peagle("convert", file, tmp_path / "b", "--format", "hf", "--json")
    assert json.loads(result.out) == {
        "source": str(file),
        "destination": str(tmp_path / "b"),
        "format": "hf",
        "model_type": model.config.model_type,
        "quantization": ["F32"],
        "dtype": "float32",
        "num_bytes": size,
    }


@pytest.mark.slow
def test_commands_take_a_gguf_file(
    peagle: Peagle, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = write_gguf(AutoModelForCausalLM.from_pretrained(pair.target), tmp_path / "x.gguf")
    assert peagle("convert", file, tmp_path / "folder", "--format", "hf").status == 0
    words = ("generate", "--prompt", "def f(x):", "--max-new-tokens", "8", "--format", "json")
    outputs = [
        peagle(*words, *model)
        for model in (["--target", file], [file], ["--target", tmp_path / "folder"])
    ]
    assert [one.status for one in outputs] == [0, 0, 0], [one.err for one in outputs]
    ids = [json.loads(one.out)["token_ids"] for one in outputs]
    assert ids[0] == ids[1] == ids[2]
    # Once: the second command finds the folder.
    assert len(list((tmp_path / "cache").rglob("config.json"))) == 1


# ---- compact heads ----


def test_a_compact_head_and_back(peagle: Peagle, pair: Pair, tmp_path: Path) -> None:
    target = TargetModel.load(pair.target)
    save_drafter(tmp_path / "head", make_drafter(target, intermediate_size=64))
    small = ("--format", "compact", "--quantization", "int4", "--int8-layers", "fc, q_proj")
    done = peagle("convert", tmp_path / "head", tmp_path / "c", *small, "--json")
    assert done.status == 0, done.err
    found = json.loads(done.out)
    assert (found["format"], found["dtype"]) == ("compact", "float32, int8, int4")
    whole = peagle("convert", tmp_path / "c", tmp_path / "w", "--format", "vllm")
    assert whole.status == 0 and "its weights are whole now, in bfloat16" in whole.err
    names = load_file(tmp_path / "head" / "model.safetensors").keys()
    assert load_file(tmp_path / "w" / "model.safetensors").keys() == names


def test_a_gguf_file_that_is_not_there(peagle: Peagle, tmp_path: Path) -> None:
    for style in ("hf", "vllm"):
        result = peagle("convert", "gone.gguf", tmp_path / "c", "--format", style)
        assert result.status == 2 and "The GGUF file 'gone.gguf' is not there" in result.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--format vllm --quantization int4", "--quantization is for --format compact; leave it"),
        ("--format hf --group-size 32", "--group-size is for --format compact; leave it out with"),
        ("--format compact --group-size 32", "--group-size needs --quantization; without it no"),
        ("--format compact --int8-layers fc", "--int8-layers needs --quantization; without it"),
        ("--format compact --quantization int8 --int8-layers x", "no linear layer 'x'; expected"),
        ("--format compact --quantization int8 --group-size 112", "The group size is 112 and"),
    ],
)
def test_options_of_compact_heads(
    peagle: Peagle, pair: Pair, tmp_path: Path, words: str, message: str
) -> None:
    result = peagle("convert", pair.peagle, tmp_path / "c", *words.split())
    assert result.status == 2 and message in result.err
    assert not (tmp_path / "c").exists()
