"""The budgets of `peagle make-head`."""

from dataclasses import replace

import pytest

from peagle.cli.head_plan import (
    MAX_EPOCHS,
    MIN_DATA_SHARE,
    HeadProbe,
    eval_prompts,
    make_head_plan,
    training_steps,
)
from peagle.errors import UserError

STARTS = {"synthesize": 20, "regenerate": 50, "prepare": 10, "train": 60, "correction": 60}
# A chat model of 135M parameters on a data-centre GPU, about.
GPU = HeadProbe(
    spent_s=130,
    starts_s={**STARTS, "eval": 40},
    written=4096,
    answered=4096,
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
    written=24,
    answered=24,
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
    total = sum(plan.seconds.values())
    assert 0.99 * 60 * minutes <= total <= 60 * minutes + 1e-6
    # Recomputed from the work, not from the formula; a prompt more would be too much.
    one_s = probe.prompt_s + probe.answer_s
    new_s = plan.seconds["synthesize"] + plan.seconds["regenerate"]
    new_s -= probe.starts_s["synthesize"] + probe.starts_s["regenerate"]
    assert new_s == pytest.approx((plan.prompts - probe.answered) * one_s)
    data_s = plan.prompts * one_s
    work_s = plan.seconds["train"] - probe.starts_s["train"]
    epochs = work_s / probe.step_s * probe.step_tokens / (plan.prompts * probe.answer_tokens)
    assert epochs == pytest.approx(plan.epochs, rel=1e-3) and epochs <= MAX_EPOCHS * 1.01
    assert data_s / (data_s + work_s) >= MIN_DATA_SHARE * 0.99
    assert bool(plan.correction_steps) is probe.has_correction


def test_twenty_minutes_of_a_small_model_on_a_gpu() -> None:
    plan = make_head_plan(GPU, 20)
    minutes = {name: seconds / 60 for name, seconds in plan.seconds.items()}
    assert 4.0 < minutes["synthesize"] + minutes["regenerate"] < 7.5
    assert 6 < minutes["train"] < 10


# SmolLM2 on an H200, as measured with 4 processes side by side.
MEASURED = replace(
    GPU,
    starts_s={
        **{"synthesize": 52, "regenerate": 49.4, "prepare": 49.4},
        **{"train": 80, "correction": 80, "eval": 74},
    },
    prompt_s=0.002016,
    answer_s=0.00374,
    answer_tokens=398,
    step_s=0.1882,
    step_tokens=31_997,
)


def measured(minutes: float, written: int, answered: int) -> HeadProbe:
    """The probe after so many prompts and answers: a cold start, a start, and a short training."""
    spent = 80 + written * MEASURED.prompt_s + 49.4 + answered * MEASURED.answer_s + 89
    return replace(MEASURED, spent_s=spent, written=written, answered=answered)


# First prompts: 1,000 for each process and each minute after the eighth.
@pytest.mark.parametrize(("minutes", "written"), [(18, 40_000), (20, 48_000), (25, 68_000)])
def test_fewer_starts_are_more_answers_and_more_training(minutes: float, written: int) -> None:
    plan = make_head_plan(measured(minutes, written, written), minutes)
    assert plan.epochs <= MAX_EPOCHS * 1.01
    assert plan.prompts == written and not {"synthesize", "regenerate"} & set(plan.seconds)
    assert sum(plan.seconds.values()) <= 60 * minutes + 1e-6
    # Each writing stage begins twice after a smaller or larger first part, or is too long.
    for other in (written // 10, written // 2, 3 * written // 2):
        assert plan.steps > 1.08 * make_head_plan(measured(minutes, other, other), minutes).steps


def test_a_stage_starts_again_where_that_brings_more_training() -> None:
    # Enough for 18 minutes: nothing is written again.
    plan = make_head_plan(measured(18, 40_000, 38_000), 18)
    assert plan.prompts == 38_000 and set(plan.seconds) >= {"prepare", "train"}
    assert "regenerate" not in plan.seconds
    # Further answers to the prompts that are there.
    plan = make_head_plan(measured(18, 40_000, 8_000), 18)
    assert "regenerate" in plan.seconds and "synthesize" not in plan.seconds
    assert 8_000 < plan.prompts <= 40_000
    # Further prompts too.
    plan = make_head_plan(measured(18, 8_000, 8_000), 18)
    assert {"synthesize", "regenerate"} <= set(plan.seconds) and plan.prompts > 8_000
    # No time for a start: the answers that are there, three times at most.
    short = replace(measured(18, 8_000, 8_000), starts_s={**MEASURED.starts_s, "regenerate": 2000})
    plan = make_head_plan(short, 18)
    assert plan.prompts == 8_000 and "regenerate" not in plan.seconds
    assert plan.steps == pytest.approx(3 * 8_000 * 398 / 31_997, abs=1)
    # The correction has the rest, and sees the data three times too.
    assert plan.correction_steps == pytest.approx(plan.steps, abs=1)


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


def test_a_late_evaluation_has_fewer_prompts() -> None:
    plan = make_head_plan(GPU, 20)  # of 0.1 s for each of two sets
    assert plan.eval_limit > 100
    assert [eval_prompts(s, plan, GPU) for s in (1e6, 20, 0.1, -30)] == [plan.eval_limit, 100, 4, 4]


def test_a_plan_without_time_for_more_answers_than_the_probe_has_is_none() -> None:
    """24 prompts are too few, though the time for a training on them is there."""
    slow = replace(CPU, starts_s={**CPU.starts_s, "regenerate": 500.0})
    with pytest.raises(UserError, match="10, too short for the stage") as told:
        make_head_plan(slow, 10)
    needed = float(str(told.value).partition("at least ")[2].split()[0])
    assert make_head_plan(slow, needed).prompts > CPU.answered
    enough = make_head_plan(replace(slow, answered=2_000, written=2_000), 10)
    assert enough.prompts == 2_000 and enough.steps >= 50
