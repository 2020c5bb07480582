"""A head that looks back no further than it did in training drafts on where the text is longer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from peagle import LLM, SamplingParams
from peagle.bundled import BUNDLED_PEAGLE, BUNDLED_TARGET
from peagle.errors import CheckpointError, UserError
from peagle.evaluation.prompts import load_prompt_set
from peagle.models.checkpoint import trained_length
from tests.engine.engines import K, make_llm
from tests.models.editing import edit_config


def window_of(llm: LLM) -> int | None:
    drafting: Any = llm.engine.drafting
    return drafting.proposer.drafter.window


@pytest.fixture
def telling(head_folders: Callable[..., Path], tmp_path: Path) -> Callable[..., str]:
    """telling(length, parallel=...) -> a head whose config.json tells that length of training."""

    def tell(length: object, *, parallel: bool = True) -> str:
        head = Path(shutil.copytree(head_folders(parallel=parallel), tmp_path / "telling"))
        edit_config(head, peagle={"max_sequence_length_trained": length})
        return str(head)

    return tell


@pytest.mark.parametrize("parallel", [True, False], ids=["peagle", "eagle3"])
@pytest.mark.parametrize(
    ("told", "asked", "expected"),
    [(None, None, None), (9, None, 9), (9, 4, 4), (9, 30, 30), (9, 0, None), (None, 7, 7)],
)
def test_the_window_is_what_was_asked_for_or_the_length_of_training(
    target_folder: Path,
    telling: Callable[..., str],
    parallel: bool,
    told: int | None,
    asked: int | None,
    expected: int | None,
) -> None:
    config = {"model": telling(told, parallel=parallel), "num_speculative_tokens": K}
    llm = make_llm(target_folder, {**config, "draft_window": asked})
    assert window_of(llm) == expected


def test_a_length_that_is_none_is_refused(target_folder: Path, telling: Callable[..., str]) -> None:
    with pytest.raises(CheckpointError, match="max_sequence_length_trained is 'long'; expected"):
        make_llm(target_folder, {"model": telling("long"), "num_speculative_tokens": K})


@pytest.mark.parametrize("value", [-1, 2.5, True, "9"])
def test_a_window_that_is_none_is_refused(target_folder: Path, value: object) -> None:
    with pytest.raises(UserError, match=r"draft_window is .*; expected a whole number, 0 for no"):
        make_llm(target_folder, {"model": "head", "draft_window": value})


def test_the_bundled_head_drafts_on_beyond_the_lengths_of_its_training() -> None:
    """Without the window mask slots guess badly there; with it they do as before."""
    config = json.loads((BUNDLED_PEAGLE / "config.json").read_text())
    length = trained_length(config["peagle"])
    assert length == 768
    (prompt,) = load_prompt_set("humaneval", 1)
    params = SamplingParams(max_tokens=1150, temperature=0.0, ignore_eos=True)
    found = {}
    for window in (None, 0):
        speculative = {"model": str(BUNDLED_PEAGLE), "draft_window": window}
        llm = LLM(BUNDLED_TARGET, speculative_config=speculative)
        size, steps, late = len(llm.requests.encode(prompt.text)), 0, 0
        for chunk in llm.stream([prompt.text], params):
            size += len(chunk.token_ids)
            steps += size > length
            late += len(chunk.token_ids) * (size > length)
        found[window] = late / steps
    assert found[None] > 1.5 * found[0], found
