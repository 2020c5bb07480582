"""The tokens that end an answer: the tokenizer's, and those that the model's files name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from peagle import LLM, SamplingParams
from peagle.config import StructuredOutput
from peagle.errors import CheckpointError
from peagle.evaluation.certify.reference import TargetReference
from peagle.models.end_tokens import eos_token_ids
from peagle.models.target import load_tokenizer
from tests.conftest import byte_tokenizer, make_target_folder

PROMPT = [40, 50, 60, 50]
GREEDY = SamplingParams(temperature=0, max_tokens=24)


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [3, 0]}, {"eos_token_id": 5}, (0, 3)),
        ({"eos_token_id": 4}, {"eos_token_id": 5}, (0, 4)),
        ({"eos_token_id": 0}, {"eos_token_id": 5}, (0,)),
        ({"temperature": 0.5}, {"eos_token_id": [5, 6]}, (0, 5, 6)),
        (None, {"eos_token_id": 5}, (0, 5)),
        (None, {"eos_token_id": None}, (0,)),
        (None, {"text_config": {"eos_token_id": 7}, "eos_token_id": 5}, (0, 7)),
        (None, {"text_config": {}, "eos_token_id": [5, 8]}, (0, 5, 8)),
        (None, None, (0,)),
    ],
)
def test_which_tokens_end_an_answer(
    tmp_path: Path,
    generation: dict[str, Any] | None,
    config: dict[str, Any] | None,
    expected: tuple[int, ...],
) -> None:
    for name, data in (("generation_config", generation), ("config", config)):
        if data is not None:
            (tmp_path / f"{name}.json").write_text(json.dumps(data))
    assert eos_token_ids(tmp_path, byte_tokenizer()) == expected
    without = byte_tokenizer()
    without.eos_token = None
    named = eos_token_ids(tmp_path, without)
    assert set(named) | {0} == set(expected)


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match=r"config.json' holds list; expected an object"):
        eos_token_ids(tmp_path, byte_tokenizer())


@pytest.fixture(scope="module")
def fine_tuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int], int]:
    """A target whose tokenizer ends texts with another token than its files name; its free greedy
    output, and the place of the tokenizer's end there.
    """
    folder = make_target_folder(tmp_path_factory.mktemp("target"), eos_token_id=319)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    prompt = torch.tensor([PROMPT])
    whole = model.generate(prompt, max_new_tokens=24, do_sample=False, eos_token_id=None)
    free = whole[0, len(PROMPT) :].tolist()
    end = next(i for i, token in enumerate(free) if i > 3 and 2 <= token < 258 not in free[:i])
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(free[end])
    tokenizer.save_pretrained(folder)
    assert load_tokenizer(folder).eos_token_id == free[end]
    return folder, free, end


@pytest.fixture(scope="module")
def llm(fine_tuned: tuple[Path, list[int], int]) -> LLM:
    return LLM(fine_tuned[0], dtype="float64")


def test_the_tokenizers_end_ends_an_answer(
    fine_tuned: tuple[Path, list[int], int], llm: LLM
) -> None:
    folder, free, end = fine_tuned
    output = llm.generate([PROMPT], GREEDY)[0]
    assert (output.token_ids, output.finish_reason) == (free[: end + 1], "stop")
    assert output.stop_reason is None, "the model ended, not a stop of the request"
    assert (
        output.token_ids == TargetReference(folder, torch.float64).greedy(PROMPT, GREEDY).token_ids
    ), "and transformers with the same end tokens"


def test_drafts_do_not_pass_it(fine_tuned: tuple[Path, list[int], int]) -> None:
    folder, free, end = fine_tuned
    prompt = PROMPT + free[: end + 2] + PROMPT  # which a prompt lookup drafts
    speculative = {"method": "ngram", "num_speculative_tokens": 4}
    drafting = LLM(folder, dtype="float64", speculative_config=speculative)
    for ids in (prompt, PROMPT):
        expected = TargetReference(folder, torch.float64).greedy(ids, GREEDY).token_ids
        assert drafting.generate([ids], GREEDY)[0].token_ids == expected


def test_it_is_ignored_if_asked(fine_tuned: tuple[Path, list[int], int], llm: LLM) -> None:
    _, free, _ = fine_tuned
    ignoring = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    assert llm.generate([PROMPT], ignoring)[0].token_ids == free


def test_it_may_not_come_before_min_tokens(
    fine_tuned: tuple[Path, list[int], int], llm: LLM
) -> None:
    folder, free, end = fine_tuned
    late = SamplingParams(temperature=0, max_tokens=24, min_tokens=end + 3)
    output = llm.generate([PROMPT], late)[0].token_ids
    assert free[end] not in output[: end + 3] and len(output) >= end + 3
    assert output == TargetReference(folder, torch.float64).greedy(PROMPT, late).token_ids


def test_it_ends_a_structured_output(fine_tuned: tuple[Path, list[int], int], llm: LLM) -> None:
    pytest.importorskip("xgrammar")
    choice = StructuredOutput.json_schema({"const": "ab"})
    params = SamplingParams(temperature=0, structured_output=choice, max_tokens=9)
    output = llm.generate([PROMPT], params)[0]
    assert (output.text, output.finish_reason) == ('"ab"', "stop")
    assert output.token_ids[-1] in eos_token_ids(fine_tuned[0], llm.tokenizer)


def test_an_end_without_logits_is_left_out(tmp_path: Path) -> None:
    folder = make_target_folder(tmp_path)
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([f"<{i}>" for i in range(99)])
    tokenizer.eos_token = "<98>"
    tokenizer.save_pretrained(folder)
    llm = LLM(folder, dtype="float64")
    assert llm.tokenizer.eos_token_id >= llm.target.vocab_size
    assert llm.engine.eos_token_ids == (0,)
    assert llm.generate([PROMPT], SamplingParams(max_tokens=4, min_tokens=4))[0].token_ids
