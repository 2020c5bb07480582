"""The correction of drafts: its term, its file beside the head, and the heads that it refuses."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from peagle.errors import CheckpointError
from peagle.models.checkpoint import (
    CORRECTION_NAME,
    convert_head,
    head_identity,
    load_correction,
    load_drafter,
    read_head,
    save_correction,
)
from peagle.models.correction import Correction, DraftCorrection
from peagle.models.target import TargetModel
from tests.corrections import add_correction, random_correction, term_of


def test_the_term_is_what_the_formula_says() -> None:
    """A chain at a time, slot after slot, by plain products."""
    torch.manual_seed(0)
    correction = random_correction(12, rank=3, width=10, num_slots=2).double()
    normed, embedding = torch.randn(4, 5, 12).double(), torch.randn(20, 12).double()
    lm_head, tokens = torch.randn(15, 12).double(), torch.randint(20, (4, 5))
    ready = DraftCorrection(correction, embedding, lm_head)
    states = ready.start(normed)
    slots = torch.arange(5).expand(4, 5)
    trained = correction(normed, embedding[tokens], slots) @ lm_head.T
    for slot in range(5):
        before = tokens[:, slot]
        found = normed[:, slot] @ lm_head.T
        if slot:
            found = ready.add(found, states[:, slot], before)
        for chain in range(4):
            expected = normed[chain, slot]
            if slot:
                expected = expected + term_of(correction, expected, embedding[before[chain]], slot)
            torch.testing.assert_close(found[chain], lm_head @ expected)
            torch.testing.assert_close(trained[chain, slot], lm_head @ expected)


def test_a_fresh_correction_changes_nothing() -> None:
    correction = Correction(12, rank=3, width=10, num_slots=2)
    correction.reset(0)
    normed, embedding = torch.randn(4, 5, 12), torch.randn(4, 5, 12)
    assert torch.equal(correction(normed, embedding, torch.ones(4, 5).long()), normed)


@pytest.fixture
def head(head_folders: Callable[..., Path]) -> Path:
    return head_folders(draft_vocab_size=200)


def test_it_is_loaded_beside_its_head(head: Path, target: TargetModel) -> None:
    drafter = load_drafter(head, target)
    assert load_correction(head, drafter) is None
    add_correction(head)
    found = load_correction(head, drafter)
    assert found is not None
    assert found.weight_Vr.shape == (200, 4) and found.weight_Vr.dtype == torch.float64
    assert found.tokens_VW.shape[0] == target.vocab_size
    state = set(drafter.state_dict())
    drafter.correction = found
    assert set(drafter.state_dict()) == state, "not part of the head's own tensors"
    assert [path.name for path in head.glob("*.safetensors")] == ["model.safetensors"], (
        "what vLLM reads of a head"
    )


@pytest.mark.parametrize("format", ["vllm", "speculators"])
def test_it_goes_with_a_converted_head(
    head: Path, target: TargetModel, tmp_path: Path, format: Any
) -> None:
    add_correction(head)
    done = convert_head(head, tmp_path / "other", format)
    assert any("draft without the correction" in note for note in done.notes)
    found = load_correction(tmp_path / "other", load_drafter(tmp_path / "other", target))
    assert found is not None


def test_a_head_without_one_leaves_none_behind(head: Path, tmp_path: Path) -> None:
    shutil.copytree(head, tmp_path / "old")
    add_correction(tmp_path / "old")
    done = convert_head(head, tmp_path / "old", "vllm", force=True)
    assert done.notes == ()
    assert not (tmp_path / "old" / CORRECTION_NAME).exists()


# ---- refusals ----


def refusal(folder: Path, target: TargetModel) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_correction(folder, load_drafter(folder, target))
    assert CORRECTION_NAME in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"seed": 1}, "sha256"),
        ({"draft_vocab_size": 100}, "draft_vocab_size 200; the head beside it has 100"),
        ({"hidden_size": 48}, "hidden_size 32; the head beside it has 48"),
    ],
    ids=str,
)
def test_the_correction_of_another_head_is_refused(
    head: Path,
    target: TargetModel,
    head_folders: Callable[..., Path],
    other: dict[str, Any],
    named: str,
) -> None:
    folder = head_folders(**{"draft_vocab_size": 200, **other})
    add_correction(head)
    shutil.copy(head / CORRECTION_NAME, folder)
    message = refusal(folder, target)
    assert named in message and "--correction-on" in message and '"correction": false' in message


def test_an_autoregressive_head_has_none(
    target: TargetModel, head_folders: Callable[..., Path]
) -> None:
    folder = head_folders(parallel=False)
    add_correction(folder)
    assert "expected a P-EAGLE head" in refusal(folder, target)


def test_a_broken_file_is_refused(head: Path, target: TargetModel) -> None:
    path = add_correction(head)
    tensors = load_file(path)
    with safe_open(path, framework="pt") as reader:
        metadata = reader.metadata()
    (key,) = metadata

    def save(changes: dict[str, Any], facts: dict[str, str] | None = None) -> str:
        save_file(tensors | changes, path, metadata if facts is None else facts)
        message = refusal(head, target)
        assert "--correction-on" in message or "Upgrade" in message
        return message

    assert "expected the tensors" in save({"slots": torch.zeros(3)})
    assert "expected the tensors" in save({"slots": torch.zeros(0, 8)})
    assert "expected {" in save({"tokens.weight": torch.zeros(2, 2)})
    assert "expected {" in save(
        {"slots": torch.zeros(1, 10**6), "up.weight": torch.zeros(10**6, 1)}
    )
    assert "expected finite numbers" in save({"slots": tensors["slots"] * torch.nan})
    assert "is torch.float8_e4m3fn" in save({"slots": tensors["slots"].to(torch.float8_e4m3fn)})
    wide = random_correction(48).state_dict()
    assert "hidden_size of 48; expected the head's, 32" in save(wide)
    assert "does not say which head" in save({}, {})
    assert "nested more than" in save({}, {key: "[" * 10**5})
    assert "head is 'x'; expected an object" in save(
        {}, {key: json.dumps({"format_version": 1, "head": "x"})}
    )
    newer = json.dumps({**json.loads(metadata[key]), "format_version": 99})
    assert "Upgrade peagle" in save({}, {key: newer})
    facts = json.loads(metadata[key])
    assert facts["format_version"] == 1 and "form" not in facts
    other = json.dumps({**facts, "format_version": 2, "form": "markov"})
    message = save({}, {key: other})
    assert "the form 'markov'; expected 'gated'" in message and "--correction-on" in message
    path.write_bytes(b"no safetensors")
    assert "not readable" in refusal(head, target)


def test_a_name_without_a_file_is_refused(head: Path, target: TargetModel, tmp_path: Path) -> None:
    path = head / CORRECTION_NAME
    path.symlink_to(tmp_path / "gone")
    assert "is a link that leads to no file; expected" in refusal(head, target)
    path.unlink()
    path.mkdir()
    assert "is a folder; expected" in refusal(head, target)


def test_the_identity_of_a_head_does_not_depend_on_its_style(head: Path, tmp_path: Path) -> None:
    convert_head(head, tmp_path / "other", "speculators")
    config = read_head(head).config
    assert head_identity(head, config) == head_identity(tmp_path / "other", config)


def test_an_interrupted_write_leaves_the_old_one(
    head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = add_correction(head)
    before = path.read_bytes()
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(Exception, match="could not be written: full"):
        save_correction(
            head, random_correction(32, rank=4, width=8, num_slots=3), {}, dtype=torch.float32
        )
    assert path.read_bytes() == before
    assert sorted(p.name for p in head.iterdir()) == [
        "config.json",
        CORRECTION_NAME,
        "model.safetensors",
    ]
