"""The budgets of `peagle make-head`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from peagle.cli.head_plan import (
    MAX_EPOCHS,
    MIN_DATA_SHARE,
    HeadProbe,
    make_head_plan,
    training_steps,
)
from peagle.errors import UserError

STARTS = {"synthesize": 20, "regenerate": 50, "prepare": 10, "train": 60, "correction": 60}
# A chat model of 135M parameters on a data-centre GPU, about.
GPU = HeadProbe(
    spent_s=130,
    starts_s={**STARTS, "eval": 40},
    prompt_s=0.0011,
    answer_s=0.0042,
    answer_tokens=400,
    step_s=0.13,
    step_tokens=32_000,
    eval_prompt_s=0.1,
    num_sets=2,
    has_correction=True,
)
CPU = replace(
    GPU,
    spent_s=70,
    starts_s=dict.fromkeys(GPU.starts_s, 8.0),
    prompt_s=0.1,
    answer_s=0.5,
    answer_tokens=300,
    step_s=0.8,
    step_tokens=1000,
    eval_prompt_s=1.0,
    num_sets=1,
)


@pytest.mark.parametrize("minutes", [12, 20, 60, 600])
@pytest.mark.parametrize("probe", [GPU, CPU, replace(GPU, has_correction=False)])
def test_all_minutes_are_planned_and_the_data_is_seen_three_times_at_most(
    probe: HeadProbe, minutes: float
) -> None:
    if not probe.has_correction:
        starts = {name: s for name, s in probe.starts_s.items() if name != "correction"}
        probe = replace(probe, starts_s=starts)
    plan = make_head_plan(probe, minutes)
    # A prompt more would be too much; nothing else is rounded.
    one_s = probe.prompt_s + 2 * probe.answer_s
    total = sum(plan.seconds.values())
    assert 60 * minutes - one_s <= total <= 60 * minutes + 1e-6
    # Recomputed from the work, not from the formula.
    data_s = plan.prompts * one_s
    work_s = plan.seconds["train"] - probe.starts_s["train"]
    epochs = work_s / probe.step_s * probe.step_tokens / (2 * plan.prompts * probe.answer_tokens)
    assert epochs == pytest.approx(plan.epochs) and epochs <= MAX_EPOCHS * 1.01
    assert data_s / (data_s + work_s) >= MIN_DATA_SHARE * 0.99
    assert bool(plan.correction_steps) is probe.has_correction


def test_twenty_minutes_of_a_small_model_on_a_gpu() -> None:
    plan = make_head_plan(GPU, 20)
    minutes = {name: seconds / 60 for name, seconds in plan.seconds.items()}
    assert 4.5 < minutes["synthesize"] + minutes["regenerate"] < 7.5
    assert 6 < minutes["train"] < 10


def test_slow_answers_get_the_time_and_slow_training_the_least_data() -> None:
    slow = make_head_plan(replace(CPU, answer_s=5.0), 60)
    assert slow.epochs == pytest.approx(MAX_EPOCHS, rel=0.05)
    training = make_head_plan(replace(CPU, step_s=50.0), 600)
    assert training.epochs < MAX_EPOCHS / 2


@pytest.mark.parametrize(
    ("change", "stage"),
    [
        ({"spent_s": 700.0}, "synthesize"),
        ({"step_s": 20.0}, "train"),
        ({"step_s": 6.0}, "correction"),
        ({"eval_prompt_s": 120.0}, "eval"),
    ],
)
def test_too_few_minutes_name_the_stage_and_the_minutes_that_do(
    change: dict[str, float], stage: str
) -> None:
    probe = replace(CPU, **change)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=rf"10, too short for the stage '{stage}'") as told:
        make_head_plan(probe, 10)
    needed = float(str(told.value).partition("at least ")[2].split()[0])
    assert make_head_plan(probe, needed).prompts >= 1


def test_steps_by_time_and_by_epochs() -> None:
    assert training_steps(100, 0.5, 1000, 10**9) == 200
    assert training_steps(100, 0.5, 1000, 20_000) == 60
    assert training_steps(-5, 0.5, 1000, 10**9) == 50
