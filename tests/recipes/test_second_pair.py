"""The second pair: it loads, and its head accepts what its README says, in its own mode alone."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from peagle import LLM
from peagle.chat import render_chat
from peagle.models.checkpoint import read_head

PAIR = Path(__file__).parents[1] / "fixtures" / "pair2"
MAX_BYTES = 800_000
RECORD = json.loads((PAIR / "acceptance.json").read_text())


def load_recipe() -> Any:
    path = Path(__file__).parents[2] / "recipes" / "second_pair" / "record.py"
    spec = importlib.util.spec_from_file_location("second_pair_record", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


recipe = load_recipe()


@pytest.fixture(scope="module")
def llm() -> LLM:
    return recipe.load(PAIR)


@pytest.mark.parametrize("mode", RECORD["acceptance"])
def test_it_accepts_what_was_recorded(llm: LLM, mode: str) -> None:
    found, recorded = recipe.measure(llm, recipe.prompts_of(PAIR), mode), RECORD["acceptance"][mode]
    assert found.acceptance_length == pytest.approx(recorded["acceptance_length"], abs=0.1)
    assert found.acceptance_per_pos == pytest.approx(recorded["unconditional"], abs=0.05)


def test_the_head_is_good_in_its_own_mode_only() -> None:
    own = RECORD["acceptance"]["thinking"]
    assert own["unconditional"][0] >= 0.5 and own["unconditional"][1] >= 0.25
    for mode in ("not thinking", "raw"):
        other = RECORD["acceptance"][mode]
        assert other["acceptance_length"] < 0.6 * own["acceptance_length"]


def test_it_is_small_and_has_what_it_is_there_for(llm: LLM) -> None:
    assert sum(file.stat().st_size for file in PAIR.rglob("*") if file.is_file()) <= MAX_BYTES
    config = json.loads((PAIR / "target" / "config.json").read_text())
    assert config["model_type"] == "qwen3" and not config["tie_word_embeddings"]
    head = read_head(PAIR / "peagle", num_target_layers=config["num_hidden_layers"]).config
    assert (head.num_layers, head.trained_depth, head.is_pruned) == (2, 6, True)
    messages = [{"role": "user", "content": "Hi"}]
    prompts = [render_chat(llm.tokenizer, messages, thinking=mode) for mode in (None, True, False)]
    assert prompts[0] == prompts[1] != prompts[2]
