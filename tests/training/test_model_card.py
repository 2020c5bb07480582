"""What a model card says, and which folders may be published at all."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file

from peagle.config import SpeculativeConfig
from peagle.errors import CheckpointError, UserError
from peagle.models.checkpoint import convert_head
from peagle.training.config import TrainConfig
from peagle.training.published_head import PublishedHead, model_card, read_published
from peagle.training.trainer import Trainer
from tests.conftest import VOCAB_SIZE

REPO, TARGET = "org/tiny-head", "example/Tiny-Llama"
Heads = Callable[..., Path]
WEIGHTS = "model.safetensors"
VALIDATION = {"step": 4320, "loss": 2.13579, "acceptance_lengths": [1.61, 2.0514]}


@pytest.fixture
def head(head_folders: Heads, tmp_path: Path) -> Path:
    """A head trained for K = 5, in a folder of the test's own."""
    return Path(shutil.copytree(head_folders(trained_depth=5), tmp_path / "run" / "head"))


def card_of(head: Path, **options: Any) -> str:
    return model_card(read_published(head), REPO, TARGET, "apache-2.0", **options)


def section(card: str, name: str) -> str:
    return card.partition(f"\n## {name}\n")[2].partition("\n## ")[0].strip()


def speculation(card: str) -> list[dict[str, Any]]:
    """The speculative configurations that the card shows, vLLM's and SageMaker's."""
    return [json.loads(text) for text in re.findall(r"'(\{.*\})'", card)]


def write_record(path: Path, head: PublishedHead, **changes: Any) -> None:
    """A train.json with everything in it that fits the head."""
    record = {
        "peagle": "0.9.1",
        "commit": "abc1234",
        "torch": "2.77.0",
        "transformers": "5.88.0",
        "device": "Some|GPU `x`",
        "command": "peagle train /home/me/private.toml",
        "data_sha256": "d" * 64,
        "config": {
            "method": {"name": "peagle", "depth": 5, "loss": "kl", "cod_ratio": 0.8},
            "run": {"target_dtype": "float32", "precision": "bfloat16", "seed": 0},
        },
        "parameters": head.parameters,
        "steps": 4321,
        "epochs": 2.875,
        "sequences": 98765,
        "seconds": 438.0,
        "validation": VALIDATION,
    }
    path.write_text(json.dumps({**record, **changes}))


# ---- the card ----


def test_a_head_without_a_record(head: Path) -> None:
    card = card_of(head)
    data = ModelCard(card).data.to_dict()
    assert data == {
        "base_model": TARGET,
        "library_name": "peagle",
        "license": "apache-2.0",
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", "p-eagle", "peagle", "vllm"],
    }
    assert card.startswith("---\n") and "\n# tiny-head\n" in card
    assert "| kind | P-EAGLE (parallel drafting) |" in card
    assert "| layers | 2, width 32 |" in card
    assert "| K it was trained for | 5 |" in card
    assert section(card, "Training") == section(card, "Acceptance") == "Not recorded."
    (note,) = read_published(head).notes
    assert "there is no train.json" in note


def test_every_number_on_the_card_is_one_of_the_head(head: Path) -> None:
    facts = read_published(head)
    config, mark = facts.config, facts.fingerprint
    card = card_of(head)
    # Less the metadata, the hashes, and the names with a digit in them.
    text = re.sub(
        r"`[0-9a-f]{64}`|EAGLE-3|eagle3|float32|1 \+ accepted", "", card.partition("\n---\n")[2]
    )
    text = text.replace("SHA-256", "")
    known = {5, config.num_layers, config.hidden_size, facts.parameters, config.vocab_size}
    known |= {mark.num_layers, mark.hidden_size, config.max_position_embeddings}
    known |= set(config.aux_layer_ids)
    assert {int(n.replace(",", "")) for n in re.findall(r"\d[\d,]*\b", text)} == known
    assert facts.parameters == sum(t.numel() for t in load_file(head / WEIGHTS).values())
    assert facts.dtype == "float32"


@pytest.mark.parametrize("place", ["beside", "inside", "best"])
def test_a_record_is_told_wherever_training_or_its_owner_put_it(head: Path, place: str) -> None:
    folder = head if place == "inside" else head.parent
    last = {"step": 9, "loss": 9.0, "acceptance_lengths": [9.0]}
    changes = {"best": {"validation": VALIDATION}, "validation": last} if place == "best" else {}
    if place == "best":  # several answers of a conversation are one sequence
        changes |= {"data": {"train": {"responses": 98765}}, "sequences": 4000}
    write_record(folder / "train.json", read_published(head), **changes)
    facts = read_published(head)
    assert facts.notes == () and ("train.json" in facts.files) == (place == "inside")
    training = section(card_of(head), "Training")
    for line in (
        "| method | peagle, depth 5 |",
        "| loss | kl |",
        "| steps | 4,321 |",
        "| epochs | 2.88 |",
        "| responses of the target trained on | 98,765 |",
        f"| data, SHA-256 | {'d' * 64} |",
        "| validation loss | 2.1358 |",
        "| hardware | Some\\|GPU \\`x\\` |",
        "| duration | 7.3 minutes |",
        "| software | peagle 0.9.1, torch 2.77.0, transformers 5.88.0 |",
        "| commit of peagle | abc1234 |",
    ):
        assert line in training.splitlines()
    acceptance = section(card_of(head), "Acceptance")
    assert acceptance.endswith("| K | acceptance length |\n|---|---|\n| 1 | 1.610 |\n| 2 | 2.051 |")
    assert "at step 4,320" in acceptance and "target float32, head bfloat16" in acceptance
    assert "at temperature 0" in acceptance
    assert "private" not in card_of(head), "the command line names files of its owner"


def test_what_a_record_leaves_out_is_not_recorded(head: Path) -> None:
    facts = read_published(head)
    record = {
        "config": {"method": {"name": "peagle", "depth": 5}},
        "parameters": facts.parameters,
    }
    (head.parent / "train.json").write_text(json.dumps(record))
    card = card_of(head)
    rows = section(card, "Training").splitlines()[2:]
    assert rows[0] == "| method | peagle, depth 5 |"
    assert len(rows) == 13
    assert all(row.endswith("| not recorded |") for row in rows[1:])
    assert section(card, "Acceptance") == "Not recorded."


@pytest.mark.parametrize(
    "changes",
    [
        {"parameters": 1},
        {"config": {"method": {"name": "eagle3", "depth": 5}}},
        {"config": {"method": {"name": "peagle", "depth": 6}}},
        {"config": {}},
    ],
)
def test_the_record_of_another_head_is_left_out(head: Path, changes: dict[str, Any]) -> None:
    write_record(head.parent / "train.json", read_published(head), **changes)
    facts = read_published(head)
    assert facts.training is None
    assert "is the record of another head" in facts.notes[0]
    assert section(card_of(head), "Acceptance") == "Not recorded."


def test_the_card_says_how_layers_were_rounded(head: Path) -> None:
    config = {"method": {"name": "peagle", "depth": 5, "loss": "kl"}}
    rounded = {"quantization": "int4", "int8_layers": ["q_proj", "fc"], "group_size": 16}
    for options, row in (
        (rounded, "| linear layers rounded in training | int4, groups of 16; int8: q\\_proj, fc |"),
        ({"quantization": None}, None),
    ):
        write_record(
            head.parent / "train.json", read_published(head), config={**config, "head": options}
        )
        text = section(card_of(head), "Training")
        assert "linear layers" not in text if row is None else row in text.splitlines()


def test_the_record_that_training_writes_is_read(target_folder: Path, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(2, VOCAB_SIZE, (24, 20), generator=generator).tolist()
    data = tmp_path / "data.jsonl"
    data.write_text(
        "\n".join(
            json.dumps({"prompt_token_ids": ids[:4], "response_token_ids": ids[4:]}) for ids in rows
        )
    )
    config = TrainConfig.model_validate(
        {
            "target": target_folder,
            "output": tmp_path / "run",
            "head": {"num_layers": 1},
            "data": {"train": data, "validation": data, "batch_tokens": 256, "length_multiple": 8},
            "method": {"depth": 3},
            "optimizer": {"steps": 2},
            "run": {"device": "cpu", "log_every": 1},
        }
    )
    record = Trainer(config).run()
    facts = read_published(tmp_path / "run" / "head")
    assert facts.training is not None and facts.notes == ()
    card = card_of(tmp_path / "run" / "head")
    lengths = record["validation"]["acceptance_lengths"]
    table = [f"| {k} | {length:.3f} |" for k, length in enumerate(lengths, start=1)]
    assert section(card, "Acceptance").splitlines()[-3:] == table
    assert "| steps | 2 |" in card and "| K it was trained for | 3 |" in card
    assert record["data_sha256"] in card


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[1]", "expected an object"),
        ('{"steps": "many"}', "steps: Input should be a valid integer"),
        ('{"validation": {"loss": NaN}}', "validation.loss: Input should be a finite number"),
    ],
)
def test_a_broken_record_is_refused(head: Path, text: str, message: str) -> None:
    (head / "train.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        read_published(head)


def test_how_to_serve(head: Path) -> None:
    card = card_of(head)
    first, second = speculation(card)
    assert first == second
    config = SpeculativeConfig.parse(first)
    assert (config.model, config.num_speculative_tokens, config.method) == (REPO, 5, "eagle3")
    assert config.parallel_drafting is True
    assert f"peagle serve {TARGET} --draft {REPO} --num-speculative-tokens 5\n" in card
    assert f"vllm serve {TARGET} \\\n" in card and f"SM_VLLM_MODEL={TARGET}\n" in card
    pinned = card_of(head, revision="trial")
    assert SpeculativeConfig.parse(speculation(pinned)[0]).revision == "trial"
    assert f"--draft {REPO}@trial " in pinned


def test_heads_of_other_kinds(head_folders: Heads, head: Path, tmp_path: Path) -> None:
    eagle3 = card_of(head_folders(parallel=False, num_layers=1))
    assert "| kind | EAGLE-3 (autoregressive) |" in eagle3 and "one after another" in eagle3
    assert "eagle-3" in ModelCard(eagle3).data.to_dict()["tags"]
    assert "| K it was trained for | not recorded |" in eagle3
    assert "K = 7 is peagle's default; the K that the head was trained for is not" in eagle3
    assert "parallel_drafting" not in speculation(eagle3)[0]
    deep = card_of(head_folders(trained_depth=16))
    assert "K = 7 in the examples; the head was trained for K up to 16." in deep
    convert_head(head, tmp_path / "s", "speculators", target=TARGET)
    assert read_published(tmp_path / "s").target == TARGET
    converted = card_of(tmp_path / "s")
    assert "| checkpoint | style of speculators, safetensors |" in converted
    assert "speculators" in ModelCard(converted).data.to_dict()["tags"]
    pruned = card_of(head_folders(draft_vocab_size=100))
    assert f"| draft vocabulary | 100 of {VOCAB_SIZE} tokens |" in pruned


# ---- the folder ----


def message_of(head: Path) -> str:
    with pytest.raises(UserError) as caught:
        read_published(head)
    return str(caught.value)


def test_shards_and_weights_of_another_name(head: Path) -> None:
    (head / WEIGHTS).rename(head / "weights.safetensors")
    assert read_published(head).files == ("config.json", "weights.safetensors")
    (head / "weights.safetensors").rename(head / WEIGHTS)
    tensors = load_file(head / WEIGHTS)
    (head / WEIGHTS).unlink()
    names = sorted(tensors)
    places = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in sorted(set(places.values())):
        save_file({n: tensors[n] for n in names if places[n] == file}, head / file)
    index = head / f"{WEIGHTS}.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    assert read_published(head).files == ("config.json", *sorted(set(places.values())), index.name)
    shutil.copy(head / places[names[0]], head / "other.safetensors")
    assert "'other.safetensors', no part of a head" in message_of(head)
    (head / "other.safetensors").unlink()
    (head / places[names[0]]).unlink()
    assert "is missing" in message_of(head)


def add_bytes(path: Path) -> None:
    path.write_bytes(
        (path.parent / WEIGHTS).read_bytes() if path.suffix == ".safetensors" else b"{}"
    )


def add_link(path: Path) -> None:
    (path.parent.parent / "text").write_text("x")
    path.symlink_to(path.parent.parent / "text")


@pytest.mark.parametrize(
    ("name", "add", "message"),
    [
        ("pytorch_model.bin", add_bytes, "is a pickle, which can run code"),
        ("optimizer.PT", add_bytes, "is a pickle"),
        (".env", add_bytes, "looks like a secret by its name"),
        (".env.local", add_bytes, "looks like a secret"),
        ("id_ed25519", add_bytes, "looks like a secret"),
        ("server.pem", add_bytes, "looks like a secret"),
        ("aws_credentials.json", add_bytes, "looks like a secret"),
        ("token", add_bytes, "looks like a secret"),
        ("notes.txt", add_bytes, "holds 'notes.txt', no part of a head"),
        ("model.safetensors.part", add_bytes, "no part of a head"),
        ("consolidated.safetensors", add_bytes, "no part of a head"),
        ("other.safetensors", add_bytes, "'other.safetensors', no part of a head"),
        (f"{WEIGHTS}.index.json", add_bytes, "is not an index of shards"),
        ("tokenizer.json", add_bytes, "no part of a head"),
        ("checkpoint", Path.mkdir, "holds 'checkpoint', no part of a head"),
        ("LICENSE", add_link, "is a link out of the folder, to"),
        ("LICENSE", lambda path: path.symlink_to("LICENSE"), "holds 'LICENSE'"),
        ("NOTICE", os.mkfifo, "holds 'NOTICE'"),
    ],
)
def test_files_that_are_not_published(
    head: Path, name: str, add: Callable[[Path], Any], message: str
) -> None:
    for text in ("README.md", "LICENSE", "NOTICE"):
        if text != name:
            (head / text).write_text("text")
    kept = {"LICENSE", "NOTICE", "README.md", "config.json", WEIGHTS} - {name}
    assert read_published(head).files == tuple(sorted(kept))
    add(head / name)
    assert message in message_of(head)


@pytest.mark.parametrize(
    "secret",
    [
        "hf_" + "aB3" * 11,
        "sk-" + "a1" * 12,
        "ghp_" + "x9" * 18,
        "AKIA" + "ABCD1234" * 2,
        "-----BEGIN RSA PRIVATE KEY-----",
    ],
)
def test_secrets_in_texts(head: Path, secret: str) -> None:
    (head / "README.md").write_text(f"# Head\n\nexport KEY={secret}\n")
    message = message_of(head)
    assert "looks like a secret in line 3" in message and secret not in message


def test_heads_that_are_not_whole(head: Path, tmp_path: Path) -> None:
    tensors, config = load_file(head / WEIGHTS), json.loads((head / "config.json").read_text())

    def with_tensors(**changes: torch.Tensor) -> str:
        save_file({**tensors, **changes}, head / WEIGHTS)
        return message_of(head)

    assert "holds NaN" in with_tensors(**{"fc.weight": tensors["fc.weight"] * float("nan")})
    assert "has shape [3]; expected" in with_tensors(**{"norm.weight": torch.ones(3)})
    assert "'extra' is unknown" in with_tensors(extra=torch.ones(3))
    save_file({n: t for n, t in tensors.items() if n != "mask_hidden"}, head / WEIGHTS)
    assert "'mask_hidden' is missing" in message_of(head)
    save_file(tensors, head / WEIGHTS)
    data = (head / WEIGHTS).read_bytes()
    (head / WEIGHTS).write_bytes(data[:-4])
    assert "is cut or damaged" in message_of(head)
    (head / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\n")
    assert "pointer of Git LFS" in message_of(head)
    (head / WEIGHTS).unlink()
    assert "has no model.safetensors" in message_of(head)
    (head / WEIGHTS).write_bytes(data)

    own = config["peagle"]
    for target, message in (
        (None, "has no fingerprint of its target"),
        ({**own["target"], "vocab_size": 9}, "fingerprint of a target with vocab_size 9"),
        ({**own["target"], "more": 1}, "fingerprint is not readable"),
    ):
        changed = {**config, "peagle": {**own, "target": target}}
        (head / "config.json").write_text(json.dumps(changed))
        assert message in message_of(head)
    (head / "config.json").unlink()
    assert "has no config.json" in message_of(head)
    assert "is not there" in message_of(tmp_path / "nowhere")
