"""Where answers come from: told by the provenance of every step, or by none."""

from pathlib import Path
from typing import Any

import pytest

from peagle.data.origins import (
    AnswerOrigin,
    PromptOrigin,
    answer_origins,
    joined_origins,
    read_prompt_origin,
)
from peagle.data.regenerate import write_side

WRITTEN: dict[str, Any] = {
    "kind": "synthesize",
    "options": {"model": "tiny", "sampling": {"temperature": 1.0}},
    "prompts": 8,
    "samples": 11,
    "output_sha256": "a",
}
ANSWERED: dict[str, Any] = {
    "kind": "regenerate",
    "options": {"model": "tiny", "sampling": {"temperature": 0.7}},
    "answers": 7,
    "prompts": {"model": "tiny", "prompts": 8, "samples": 11, "sha256": "a"},
    "output_sha256": "b",
}
PROMPTS = PromptOrigin(model="tiny", prompts=8, samples=11, sha256="a")
ANSWERS = AnswerOrigin(model="tiny", answers=7, temperature=0.7, prompts=PROMPTS, sha256="b")


@pytest.mark.parametrize(
    ("facts", "found"),
    [
        (WRITTEN, PROMPTS),
        ({**WRITTEN, "kind": "regenerate"}, None),
        ({name: WRITTEN[name] for name in ("kind", "options")}, None),  # a run that goes on
        ({**WRITTEN, "prompts": "many"}, None),
    ],
)
def test_prompts_that_a_model_wrote(tmp_path: Path, facts: Any, found: PromptOrigin | None) -> None:
    path = tmp_path / "prompts.jsonl"
    assert read_prompt_origin(path) is None
    write_side(path, facts)
    assert read_prompt_origin(path) == found


@pytest.mark.parametrize(
    ("facts", "found"),
    [
        (ANSWERED, (ANSWERS,)),
        (
            {
                **ANSWERED,
                "options": {"model": "tiny", "sampling": {"temperature": [0.0, 0.7]}},
                "by_temperature": [
                    {"temperature": 0.0, "answers": 3},
                    {"temperature": 0.7, "answers": 4},
                ],
            },
            tuple(
                AnswerOrigin(model="tiny", answers=n, temperature=at, prompts=PROMPTS, sha256="b")
                for n, at in ((3, 0.0), (4, 0.7))
            ),
        ),
        ({"kind": "prepare", "origins": [ANSWERS.model_dump()]}, (ANSWERS,)),
        ({"kind": "prepare"}, ()),
        ({"kind": "prepare", "origins": 3}, ()),
        ({"kind": "regenerate", "options": {"model": "tiny"}}, ()),
        ({}, ()),
    ],
)
def test_answers_of_a_model(facts: Any, found: tuple[AnswerOrigin, ...]) -> None:
    assert answer_origins(facts) == found


def test_files_together() -> None:
    other = ANSWERS.model_copy(update={"sha256": "c"})
    # Parts of one file are one origin.
    assert joined_origins([(ANSWERS,), (ANSWERS, other)]) == (ANSWERS, other)
    assert joined_origins([(ANSWERS,), ()]) == ()
    assert joined_origins([]) == ()
