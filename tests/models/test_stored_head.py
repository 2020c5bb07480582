"""The one reader of a head's folder, on bundled and on published heads."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from peagle.bundled import BUNDLED_PEAGLE
from peagle.errors import CheckpointError
from peagle.models.checkpoint import ANY_DEPTH, StoredHead, read_head

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures" / "heads"
HEADS = sorted(one.parent for one in FIXTURES.glob("*/config.json"))


def test_a_bundled_head() -> None:
    data = json.loads((BUNDLED_PEAGLE / "config.json").read_text())
    head = read_head(BUNDLED_PEAGLE)
    assert head.data == data and head.source == str(BUNDLED_PEAGLE / "config.json")
    assert head.format == "vllm" and head.config.kind == "P-EAGLE"
    assert head.facts == data["peagle"]
    assert not head.is_quantised
    assert head.fingerprint is not None
    assert head.fingerprint.to_json() == {"tokens_sha256": None} | data["peagle"]["target"]
    assert head.target_name == data["peagle"]["target"]["name"]


@pytest.mark.parametrize("folder", HEADS, ids=lambda one: one.name)
def test_published_heads(folder: Path) -> None:
    data = json.loads((folder / "config.json").read_text())
    head = read_head(folder, num_target_layers=ANY_DEPTH)
    own = data.get("peagle") or {}
    assert head.is_compact == ("from_target" in own)
    assert head.format == ("speculators" if "speculators_model_type" in data else "vllm")
    assert head.fingerprint is None or head.fingerprint.to_json() == own["target"]
    assert StoredHead.from_json(data, head.source, num_target_layers=ANY_DEPTH) == head


def test_tensors_are_those_of_the_file() -> None:
    head = read_head(BUNDLED_PEAGLE)
    tensors, packed = head.read_tensors(BUNDLED_PEAGLE)
    assert packed == {}
    with safe_open(BUNDLED_PEAGLE / "model.safetensors", "pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert len(tensors) == len(stored)
    for name in set(tensors) & set(stored):
        assert torch.equal(tensors[name], stored[name])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": "org/model"}, "fingerprint is not readable"),
        ({"target": {"nam": 1}}, "fingerprint is not readable"),
        ({"max_sequence_length_trained": "x"}, "expected a whole number"),
        ({"from_target": ["norm.weight"]}, r"expected a list of embed_tokens.weight and"),
    ],
)
def test_facts_of_the_wrong_type(changes: dict[str, Any], message: str) -> None:
    data = json.loads((BUNDLED_PEAGLE / "config.json").read_text())
    head = StoredHead.from_json({**data, "peagle": {**data["peagle"], **changes}}, "config.json")
    with pytest.raises(CheckpointError, match=message):
        _ = head.fingerprint, head.trained_length, head.from_target
