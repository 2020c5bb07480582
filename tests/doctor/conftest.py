"""Examiners of both trained pairs, each made once, on few prompts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from peagle.bundled import BUNDLED_PEAGLE, BUNDLED_TARGET
from peagle.doctor.probed_target import ProbedTarget
from peagle.doctor.questions import choose_texts, usual_style
from peagle.models.checkpoint import read_head_config
from peagle.models.target import TargetModel, load_tokenizer

PAIR2 = Path(__file__).resolve().parents[1] / "fixtures" / "pair2"
HEADS = {"pair2": PAIR2 / "peagle", "bundled": BUNDLED_PEAGLE}


def make_examiner(
    target: Path, head: Path, texts: list[str], *, dtype: torch.dtype = torch.float32
) -> ProbedTarget:
    model, tokenizer = TargetModel.load(target, dtype=dtype), load_tokenizer(target)
    config, _ = read_head_config(head, num_target_layers=model.num_layers)
    style = usual_style(tokenizer)
    return ProbedTarget.of(model, tokenizer, style, texts, 6, config.aux_layer_ids)


def pair2_texts() -> list[str]:
    return choose_texts(PAIR2 / "prompts.jsonl", load_tokenizer(PAIR2 / "target"))


@pytest.fixture(scope="session")
def pair2() -> ProbedTarget:
    return make_examiner(PAIR2 / "target", PAIR2 / "peagle", pair2_texts())


@pytest.fixture(scope="session")
def pair2_small() -> ProbedTarget:
    return make_examiner(PAIR2 / "target", PAIR2 / "peagle", pair2_texts()[:24])


@pytest.fixture(scope="session")
def bundled() -> ProbedTarget:
    texts = choose_texts(None, load_tokenizer(BUNDLED_TARGET))[::2]
    return make_examiner(BUNDLED_TARGET, BUNDLED_PEAGLE, texts)
