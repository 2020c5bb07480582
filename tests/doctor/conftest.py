"""Probes of both trained pairs, each made once, on few prompts."""

from pathlib import Path

import pytest
import torch

from peagle.bundled import BUNDLED_PEAGLE, BUNDLED_TARGET
from peagle.doctor.probe import Probe, choose_texts, usual_style
from peagle.models.checkpoint import read_head
from peagle.models.target import TargetModel, load_tokenizer

PAIR2 = Path(__file__).resolve().parents[1] / "fixtures" / "pair2"
HEADS = {"pair2": PAIR2 / "peagle", "bundled": BUNDLED_PEAGLE}


def make_probe(
    target: Path, head: Path, texts: list[str], *, dtype: torch.dtype = torch.float32
) -> Probe:
    model, tokenizer = TargetModel.load(target, dtype=dtype), load_tokenizer(target)
    config = read_head(head, num_target_layers=model.num_layers).config
    style = usual_style(tokenizer)
    return Probe.of(model, tokenizer, style, texts, 6, config.aux_layer_ids)


def pair2_texts() -> list[str]:
    return choose_texts(PAIR2 / "prompts.jsonl", load_tokenizer(PAIR2 / "target"))


@pytest.fixture(scope="session")
def pair2() -> Probe:
    return make_probe(PAIR2 / "target", PAIR2 / "peagle", pair2_texts()[:20])


@pytest.fixture(scope="session")
def bundled() -> Probe:
    texts = choose_texts(None, load_tokenizer(BUNDLED_TARGET))[::5]
    return make_probe(BUNDLED_TARGET, BUNDLED_PEAGLE, texts)
