"""Heads broken in one way or two: the doctor names what was done to them, and nothing else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from peagle.bundled import BUNDLED_PEAGLE
from peagle.doctor.examiner import Examiner
from peagle.doctor.findings import Report
from peagle.doctor.questions import Style
from peagle.doctor.served import EngineServing
from peagle.models.checkpoint import convert_head
from tests.doctor.conftest import HEADS, PAIR2, make_examiner, pair2_texts
from tests.doctor.planting import (
    FILE_FAULTS,
    MAP_FAULTS,
    OVERFLOW,
    Fault,
    copy_head,
    without_fingerprint,
)

FAULTS = {fault.name: fault for fault in [*FILE_FAULTS, *MAP_FAULTS]}
PAIRS = [
    ("aux layers - 1", "d2t shuffled"),
    ("mask_hidden after fc", "theta"),
    ("mask ids contradict", "mask_hidden untrained"),
    ("final norm missing", "map rebuilt"),
    ("infinite weight", "residual"),
]


def ids(report: Report) -> set[str]:
    return {cause.id for cause in report.causes}


def examine(examiner: Examiner, source: Path, folder: Path, *faults: Fault) -> Report:
    return examiner.examine(copy_head(source, folder, *faults))


# The two norms of the second pair are too much alike for their exchange to matter.
@pytest.mark.parametrize("name", [name for name in FAULTS if name != "norms exchanged"])
def test_a_fault_in_the_files_is_named(pair2: Examiner, tmp_path: Path, name: str) -> None:
    fault = FAULTS[name]
    report = examine(pair2, HEADS["pair2"], tmp_path / "head", fault)
    assert ids(report) == {fault.cause}
    assert report.causes[0].where == "head" and report.causes[0].remedy


@pytest.mark.parametrize("names", PAIRS, ids=" and ".join)
def test_two_faults_are_both_named(pair2: Examiner, tmp_path: Path, names: tuple[str, str]) -> None:
    faults = [FAULTS[name] for name in names]
    report = examine(pair2, HEADS["pair2"], tmp_path / "head", *faults)
    assert ids(report) == {fault.cause for fault in faults}


@pytest.mark.parametrize("name", ["norms exchanged", "mask_hidden untrained"])
def test_faults_of_the_bundled_head(bundled: Examiner, tmp_path: Path, name: str) -> None:
    fault = FAULTS[name]
    report = examine(bundled, BUNDLED_PEAGLE, tmp_path / "head", fault)
    assert ids(report) == {fault.cause}


def test_the_remedy_says_what_to_write(pair2: Examiner, tmp_path: Path) -> None:
    report = examine(pair2, HEADS["pair2"], tmp_path / "head", FAULTS["aux layers + 1"])
    assert "[2, 4, 5]" in report.causes[0].remedy
    report = examine(pair2, HEADS["pair2"], tmp_path / "mask", FAULTS["mask id"])
    assert "to 1 in config.json" in report.causes[0].remedy


def test_prompts_of_another_style(pair2: Examiner, tmp_path: Path) -> None:
    """The pair was trained with its chat template, thinking as the template has it."""
    for style, cause in ((Style(False), "chat_template"), (Style(True, None, False), "thinking")):
        other = Examiner.of(pair2.target, pair2.tokenizer, style, pair2.texts, 6, (2, 4, 5))
        report = other.examine(HEADS["pair2"])
        assert ids(report) == {cause}, style
        assert report.causes[0].where == "prompts"


def test_a_type_that_cannot_hold_the_head(tmp_path: Path) -> None:
    head = copy_head(HEADS["pair2"], tmp_path / "head", OVERFLOW)
    texts = pair2_texts()[:16]
    whole = make_examiner(PAIR2 / "target", head, texts)
    assert ids(whole.examine(head)) == set()
    half = make_examiner(PAIR2 / "target", head, texts, dtype=torch.float16)
    assert ids(half.examine(head)) == {"dtype"}
    assert ids(half.examine(HEADS["pair2"])) == set()


@pytest.mark.parametrize("has_fingerprint", [True, False])
def test_another_target_and_another_tokenizer(tmp_path: Path, has_fingerprint: bool) -> None:
    head = copy_head(HEADS["pair2"], tmp_path / "head")
    if not has_fingerprint:
        without_fingerprint(head)
    other = shutil.copytree(PAIR2 / "target", tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    order = torch.randperm(80, generator=torch.Generator().manual_seed(1))
    # The same function of the tokens, with its hidden units in another order.
    for name, value in tensors.items():
        if value.shape[-1] == 80 and not name.endswith(("q_norm.weight", "k_norm.weight")):
            tensors[name] = value[..., order].contiguous()
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = tensors[name][order].contiguous()
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    texts = pair2_texts()[:16]
    found = ids(make_examiner(other, head, texts).examine(head))
    # Prompts are noise to this target in any case, so without a fingerprint both are possible.
    assert found == {"wrong_target"} or (not has_fingerprint and found == {"tokenizer"})

    scrambled = shutil.copytree(PAIR2 / "target", tmp_path / "scrambled")
    file = scrambled / "tokenizer.json"
    data = json.loads(file.read_text())
    added = {token["id"] for token in data["added_tokens"]}
    words = [(word, i) for word, i in data["model"]["vocab"].items() if i not in added]
    numbers = [i for _, i in words]
    moved = dict(zip((w for w, _ in words), numbers[300:] + numbers[:300], strict=True))
    data["model"]["vocab"].update(moved)
    file.write_text(json.dumps(data))
    assert "tokenizer" in ids(make_examiner(scrambled, head, texts).examine(head))


def test_healthy_heads(pair2: Examiner, bundled: Examiner, tmp_path: Path) -> None:
    speculators = tmp_path / "speculators"
    convert_head(HEADS["pair2"], speculators, "speculators", force=False, target=None)
    for folder in (HEADS["pair2"], speculators):
        report = pair2.examine(folder, EngineServing(pair2.target, folder, 6))
        assert report.is_healthy, report.causes
    report = bundled.examine(BUNDLED_PEAGLE)
    assert report.is_healthy, report.causes
    assert {check.status for check in report.checks} == {"agrees", "not checked"}


def test_a_head_that_cannot_be_read(pair2: Examiner, tmp_path: Path) -> None:
    head = copy_head(HEADS["pair2"], tmp_path / "head")
    (head / "model.safetensors").unlink()
    report = pair2.examine(head)
    assert ids(report) == {"weights"}
    report = pair2.examine(copy_head(HEADS["bundled"], tmp_path / "other"))
    assert "wrong_target" in ids(report)
