"""Heads with one fault or two: the doctor names these faults and nothing else."""

import json
from pathlib import Path

import pytest
import torch

from peagle.bundled import BUNDLED_PEAGLE
from peagle.doctor.examiner import examine
from peagle.doctor.findings import Examination
from peagle.doctor.probe import Probe, PromptStyle
from peagle.doctor.serving import EngineServing
from peagle.models.checkpoint import convert_head
from tests.doctor.conftest import HEADS, PAIR2, make_probe, pair2_texts
from tests.doctor.planting import (
    FILE_FAULTS,
    MAP_FAULTS,
    OVERFLOW,
    Fault,
    config_of,
    copy_head,
    scramble_tokenizer,
    train_shortly,
    turn_target,
    without_fingerprint,
)
from tests.models.editing import edit_config

FAULTS = {fault.name: fault for fault in [*FILE_FAULTS, *MAP_FAULTS]}
# One of each kind, with what the remedy has to say; benchmarks/doctor.py plants them all.
SINGLE = {
    "aux layers + 1": "[2, 4, 5]",
    "mask id": "to 1 in config.json",
    "no mask id": "mask_token_id",
    "mask_hidden after fc": "before fc",
    "theta": "rope_theta",
    "few positions": "max_position_embeddings to 1024",
    "sliding window": "layer_types",
    "norm flag": "norm_before_fc to false",
    "residual": "norm_before_residual to false",
    "infinite weight": "bfloat16",
    "t2d contradicts": "d2t and t2d",
    "d2t leaves": "d2t and t2d",
}
PAIRS = [
    ("aux layers - 1", "d2t shuffled"),
    ("mask ids contradict", "mask_hidden untrained"),
    ("final norm missing", "map rebuilt"),
]


def ids(report: Examination) -> set[str]:
    return {cause.id for cause in report.causes}


def examine_faulty(probe: Probe, source: Path, folder: Path, *faults: Fault) -> Examination:
    return examine(probe, copy_head(source, folder, *faults))


@pytest.mark.slow
@pytest.mark.parametrize("name", SINGLE)
def test_a_fault_in_the_files_is_named(pair2: Probe, tmp_path: Path, name: str) -> None:
    fault = FAULTS[name]
    report = examine_faulty(pair2, HEADS["pair2"], tmp_path / "head", fault)
    assert ids(report) == {fault.cause}
    assert report.causes[0].where == "head"
    assert SINGLE[name] in report.causes[0].remedy


@pytest.mark.slow
@pytest.mark.parametrize("names", PAIRS, ids=" and ".join)
def test_two_faults_are_both_named(pair2: Probe, tmp_path: Path, names: tuple[str, str]) -> None:
    faults = [FAULTS[name] for name in names]
    report = examine_faulty(pair2, HEADS["pair2"], tmp_path / "head", *faults)
    assert ids(report) == {fault.cause for fault in faults}


@pytest.mark.slow
def test_a_fault_of_the_bundled_head(bundled: Probe, tmp_path: Path) -> None:
    """In the second pair the two norms are too much alike for their exchange to matter."""
    report = examine_faulty(bundled, BUNDLED_PEAGLE, tmp_path / "head", FAULTS["norms exchanged"])
    assert ids(report) == {"norms"}


@pytest.mark.slow
def test_prompts_of_another_style(pair2: Probe) -> None:
    """The pair was trained with its chat template, thinking as the template has it."""
    for style, cause in (
        (PromptStyle(False), "chat_template"),
        (PromptStyle(True, None, False), "thinking"),
    ):
        report = examine(pair2.in_other_styles[style], HEADS["pair2"])
        assert ids(report) == {cause}, style
        assert report.causes[0].where == "prompts"


@pytest.mark.slow
def test_a_type_that_cannot_hold_the_head(tmp_path: Path) -> None:
    head = copy_head(HEADS["pair2"], tmp_path / "head", OVERFLOW)
    texts = pair2_texts()[:16]
    whole = make_probe(PAIR2 / "target", head, texts)
    assert ids(examine(whole, head)) == set()
    half = make_probe(PAIR2 / "target", head, texts, dtype=torch.float16)
    assert ids(examine(half, head)) == {"dtype"}
    assert ids(examine(half, HEADS["pair2"])) == set()


@pytest.mark.slow
@pytest.mark.parametrize("has_fingerprint", [True, False])
def test_another_target_and_another_tokenizer(tmp_path: Path, has_fingerprint: bool) -> None:
    head = copy_head(HEADS["pair2"], tmp_path / "head")
    if not has_fingerprint:
        without_fingerprint(head)
    other = turn_target(PAIR2 / "target", tmp_path / "other")
    texts = pair2_texts()[:16]
    assert ids(examine(make_probe(other, head, texts), head)) == {"wrong_target"}
    scrambled = scramble_tokenizer(PAIR2 / "target", tmp_path / "scrambled")
    assert ids(examine(make_probe(scrambled, head, texts), head)) == {"tokenizer"}


@pytest.mark.slow
def test_healthy_heads(pair2: Probe, bundled: Probe, tmp_path: Path) -> None:
    speculators = tmp_path / "speculators"
    convert_head(HEADS["pair2"], speculators, "speculators", force=False, target=None)
    # The engine does not keep the doctor's texts to a window of 9 tokens.
    short = copy_head(HEADS["pair2"], tmp_path / "short")
    edit_config(short, peagle=config_of(short)["peagle"] | {"max_sequence_length_trained": 9})
    for folder in (HEADS["pair2"], speculators, short):
        report = examine(pair2, folder, EngineServing(pair2.target, folder, 6))
        assert report.is_healthy, report.causes
    report = examine(bundled, BUNDLED_PEAGLE)
    assert report.is_healthy, report.causes
    assert {check.status for check in report.checks} == {"agrees", "not checked"}


def test_a_head_that_cannot_be_read(pair2: Probe, tmp_path: Path) -> None:
    head = copy_head(HEADS["pair2"], tmp_path / "head")
    (head / "model.safetensors").unlink()
    report = examine(pair2, head)
    assert ids(report) == {"weights"}
    report = examine(pair2, copy_head(HEADS["bundled"], tmp_path / "other"))
    assert ids(report) == {"wrong_target"}
    assert {check.name for check in report.checks if check.status == "differs"} == {"target"}


def record(head: Path, steps: int) -> None:
    told = {"steps": steps, "tokens": 512 * steps, "config": {"optimizer": {"steps": steps}}}
    (head / "train.json").write_text(json.dumps(told))


@pytest.fixture(scope="module")
def undertrained(pair2: Probe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new head of the second pair after a dozen steps on answers of its target."""
    return train_shortly(pair2, tmp_path_factory.mktemp("undertrained"), steps=12)


@pytest.mark.slow
@pytest.mark.parametrize("has_record", [True, False])
def test_a_head_that_was_trained_too_little(
    pair2: Probe, undertrained: Path, tmp_path: Path, has_record: bool
) -> None:
    head = undertrained
    if not has_record:
        head = copy_head(undertrained, tmp_path / "copy")
    report = examine(pair2, head)
    if has_record:
        assert ids(report) == {"training"}
        assert "trained for 12 steps" in report.causes[0].evidence
        assert report.training is not None and report.training.is_little
    else:  # a head that has learned nothing may as well be of another target
        assert ids(report) <= {"training", "wrong_target"}
        assert report.causes
    assert "Train" in report.advice or "train" in report.advice


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "cause"), [(40, "training"), (12_000, "mask_hidden"), (0, "")])
def test_the_record_tells_little_training_from_a_lost_mask_hidden(
    bundled: Probe, tmp_path: Path, steps: int, cause: str
) -> None:
    head = copy_head(BUNDLED_PEAGLE, tmp_path / "head", FAULTS["mask_hidden untrained"])
    if steps:
        record(head, steps)
    report = examine(bundled, head)
    assert ids(report) == {cause or "mask_hidden"}
    assert report.advice.startswith(report.causes[0].remedy)
