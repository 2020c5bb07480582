"""The draft vocabulary: which tokens it keeps, and how much of the text it covers."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen3Config

from peagle.data.dataset import ResponseDataset
from peagle.errors import UserError
from peagle.models.drafter import Drafter
from peagle.models.target import TargetModel, load_tokenizer
from peagle.training.build import build_drafter as build_head
from peagle.training.config import TrainConfig
from peagle.training.vocabulary import (
    always_kept,
    choose_draft_vocabulary,
    vocabulary_report,
)
from tests.conftest import VOCAB_SIZE, make_target_folder

EOS, MASK = 0, 1  # of the byte tokenizer


# ---- the choice ----


@given(st.data())
def test_the_most_frequent_tokens_are_kept(data: st.DataObject) -> None:
    counts = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=30))
    size = data.draw(st.integers(1, len(counts)))
    ids = list(range(len(counts)))
    always = data.draw(st.lists(st.sampled_from(ids), unique=True, max_size=size))
    before = torch.tensor(counts)
    found = choose_draft_vocabulary(before, size, always).tolist()
    assert before.tolist() == counts
    others = sorted((i for i in ids if i not in always), key=lambda i: (-counts[i], i))
    assert found == sorted([*always, *others[: size - len(always)]])


def test_ends_of_text_and_special_tokens(tmp_path: Path) -> None:
    """Every stop id counts, those of the generation config and that of the tokenizer."""
    folder = make_target_folder(tmp_path, eos_token_id=[7, 9])
    target, tokenizer = TargetModel.load(folder), load_tokenizer(folder)

    def kept(special_tokens: bool, mask_token_id: int | None) -> set[int]:
        return always_kept(
            target, tokenizer, special_tokens=special_tokens, mask_token_id=mask_token_id
        )

    assert kept(False, None) == kept(False, MASK) == {EOS, 7, 9}
    assert kept(True, MASK) == {EOS, 7, 9}, "the mask token is never drafted"
    assert kept(True, None) == {EOS, MASK, 7, 9}
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|tool|>"]})  # type: ignore[arg-type]
    tool: Any = tokenizer.convert_tokens_to_ids("<|tool|>")
    assert kept(True, MASK) == {EOS, 7, 9, tool}
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<{i}>" for i in range(99)]})  # type: ignore[arg-type]
    assert max(kept(True, MASK)) < VOCAB_SIZE, "ids that the target does not have"


# ---- the report ----


def write_responses(path: Path, responses: list[list[int]]) -> Path:
    rows = ({"prompt_token_ids": [300, 301], "response_token_ids": r} for r in responses)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def train_file(tmp_path: Path) -> Path:
    """Token i occurs 200 - i times, from 10 to 199; prompts hold others."""
    flat = [token for token in range(10, 200) for _ in range(200 - token)]
    rows = [flat[i : i + 50] for i in range(0, len(flat), 50)]
    return write_responses(tmp_path / "train.jsonl", [row for row in rows if len(row) > 1])


@pytest.fixture
def validation_file(tmp_path: Path) -> Path:
    return write_responses(tmp_path / "validation.jsonl", [[10, 11, 12, 310], [10, 250, 250, 10]])


def build(target_folder: Path, train: Path, validation: Path | None, **head: Any) -> tuple:
    config = TrainConfig.model_validate(
        {
            "target": target_folder,
            "output": "unused",
            "head": {"num_layers": 1, **head},
            "data": {"train": train, "validation": validation},
            "optimizer": {"steps": 1},
        }
    )
    target, tokenizer = TargetModel.load(target_folder), load_tokenizer(target_folder)
    load = (tokenizer, target.vocab_size, 2048)
    dataset = ResponseDataset.load(train, *load)
    others = ResponseDataset.load(validation, *load) if validation else None
    drafter = build_head(config, target, tokenizer, dataset).drafter
    return target, drafter, dataset, others


def test_a_built_head_keeps_the_end_of_text_and_reports_its_coverage(
    target_folder: Path, train_file: Path, validation_file: Path
) -> None:
    target, drafter, dataset, others = build(
        target_folder, train_file, validation_file, draft_vocab_size=21
    )
    assert drafter.target_ids().tolist() == [EOS, *range(10, 30)]
    assert torch.equal(drafter.lm_head.weight, target.lm_head_weight()[drafter.target_ids()])
    report = vocabulary_report(drafter, dataset, others)
    assert report is not None
    counts = Counter(int(t) for t in dataset.tokens) - Counter({300: 10**6, 301: 10**6})
    total, inside = counts.total(), sum(counts[i] for i in range(10, 30))
    sizes = {}
    for share in (0.95, 0.99, 0.999):
        size, covered = 0, 0
        while covered < share * total:
            covered += counts.most_common()[size][1]
            size += 1
        sizes[f"{share:g}"] = size
    assert report.to_json() == {
        "size": 21,
        "vocab_size": VOCAB_SIZE,
        "num_unseen": 1,
        "training": {"num_tokens": total, "num_inside": inside, "share": inside / total},
        "validation": {"num_tokens": 8, "num_inside": 5, "share": 0.625},
        "size_for_share": sizes,
    }
    json.dumps(report.to_json())
    percent = int(inside / total * 10_000) / 100
    assert str(report) == (
        f"draft vocabulary: 21 of 320 tokens cover {percent:g}% of the training responses, "
        f"62.5% of the validation (most frequent tokens for 95%: {sizes['0.95']}, "
        f"99%: {sizes['0.99']}, 99.9%: {sizes['0.999']})"
    )


def test_a_share_is_never_rounded_up_to_all(target_folder: Path, tmp_path: Path) -> None:
    file = write_responses(tmp_path / "t.jsonl", [[5] * 99] * 1000 + [[5, 6]])
    _, drafter, dataset, _ = build(target_folder, file, None, draft_vocab_size=2)
    assert "cover 99.99% of the training responses (" in str(vocabulary_report(drafter, dataset))
    assert vocabulary_report(build(target_folder, file, None)[1], dataset) is None


def test_special_tokens_are_kept_if_asked(target_folder: Path, train_file: Path) -> None:
    for asked in (False, True):
        options = {"draft_vocab_size": 3, "keep_special_tokens": asked, "mask_token_id": 319}
        _, drafter, _, _ = build(target_folder, train_file, None, **options)
        assert (MASK in drafter.target_ids().tolist()) is asked


def test_too_small_a_vocabulary_is_refused(tmp_path: Path, train_file: Path) -> None:
    folder = make_target_folder(tmp_path / "target", eos_token_id=[7, 9])
    with pytest.raises(UserError, match=r"head.draft_vocab_size is 2; expected room for the 3"):
        build(folder, train_file, None, draft_vocab_size=2)


# ---- other options of the head ----


def test_qwen3_style_heads_can_be_built(target_folder: Path, train_file: Path) -> None:
    options = {"qk_norm": True, "norm_output": True, "head_dim": 16}
    drafter: Drafter = build(target_folder, train_file, None, **options)[1]
    assert drafter.config.qk_norm and drafter.config.norm_output
    assert drafter.config.head_dim == 16
    assert "layers.0.self_attn.q_norm.weight" in drafter.state_dict()


def test_rope_is_that_of_the_targets_global_layers(target_folder: Path, train_file: Path) -> None:
    from peagle.training.build import _rope_parameters

    plain = {"rope_type": "default", "rope_theta": 1e4}
    config = Qwen3Config(rope_parameters={**plain, "partial_rotary_factor": 0.5})
    assert _rope_parameters(config) == plain
    config.rope_parameters = {  # as Gemma 3 has it
        "full_attention": {**plain, "rope_theta": 1e6},
        "sliding_attention": plain,
    }
    assert _rope_parameters(config) == {**plain, "rope_theta": 1e6}
