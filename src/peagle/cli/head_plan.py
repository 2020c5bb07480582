"""Budgets of `peagle make-head`: measured costs, and the work that fits the minutes.

Training gets as much time as possible and its data as little as needed: training sees the data at
most `MAX_EPOCHS` times, and data gets at least `MIN_DATA_SHARE` of the time of both.
"""

from dataclasses import dataclass
from typing import Any

from peagle.errors import UserError

MAX_EPOCHS = 3.0  # more epochs overfit (docs/lab/bundled.md)
MIN_DATA_SHARE = 0.35
CORRECTION_SHARE = 0.1  # share of the time without starts
EVAL_SHARE = 0.05
MAX_CORRECTION_STEPS = 1100
MIN_STEPS = 50  # fewer steps make no useful head or correction
MIN_EVAL_PROMPTS = 4  # prompts of each set
ANSWERS_PER_PROMPT = 2  # one greedy, one at a temperature


@dataclass(frozen=True, slots=True)
class HeadProbe:
    """The times of the small first part of each stage on this machine.

    Attributes:
        spent_s: seconds of the probe.
        starts_s: seconds of each stage without its own work: loading, compiling, saving.
        prompt_s: seconds for a kept prompt; 0 if the user brings prompts.
        answer_s: seconds for an answer.
        answer_tokens: training tokens of an answer, its prompt included.
        step_s: seconds of a training step.
        step_tokens: training tokens of a step.
        eval_prompt_s: seconds for a prompt of an evaluation set, with both methods.
        num_sets: number of evaluation sets.
        has_correction: whether the head gets a correction.
    """

    spent_s: float
    starts_s: dict[str, float]
    prompt_s: float
    answer_s: float
    answer_tokens: float
    step_s: float
    step_tokens: float
    eval_prompt_s: float
    num_sets: int
    has_correction: bool


@dataclass(frozen=True, slots=True)
class HeadPlan:
    """The work of each stage, and its seconds with its start.

    Attributes:
        prompts: prompts to write; each is answered `ANSWERS_PER_PROMPT` times.
        steps: approximate training steps; the prepared data fixes the number.
        epochs: times that training sees the data.
        correction_steps: steps of the correction, 0 without one.
        eval_limit: most prompts of each evaluation set.
        seconds: seconds of each stage, in order; the first is the probe.
    """

    prompts: int
    steps: int
    epochs: float
    correction_steps: int
    eval_limit: int
    seconds: dict[str, float]

    def rows(self) -> list[tuple[str, float, str]]:
        """Return stage, minutes and work of each stage, in order."""
        answers = ANSWERS_PER_PROMPT * self.prompts
        work = {
            "probe": "done",
            "synthesize": f"{self.prompts:,} prompts",
            "regenerate": f"{answers:,} answers, half of them greedy",
            "train": f"about {self.steps:,} steps, {self.epochs:.1f} epochs",
            "correction": f"{self.correction_steps:,} steps",
            "eval": f"up to {self.eval_limit:,} prompts of each set",
        }
        return [(name, s / 60, work.get(name, "")) for name, s in self.seconds.items()]

    def to_json(self) -> dict[str, Any]:
        """Return the plan as a JSON object."""
        return {
            "prompts": self.prompts,
            "steps": self.steps,
            "epochs": self.epochs,
            "correction_steps": self.correction_steps,
            "eval_limit": self.eval_limit,
            "minutes": {name: seconds / 60 for name, seconds in self.seconds.items()},
        }


def make_head_plan(probe: HeadProbe, minutes: float) -> HeadPlan:
    """Return the work that fits into `minutes`, the probe and all starts included.

    With x prompts, data takes c x seconds and has t x tokens, and training of r tokens/s gets the
    rest R - c x. x is the larger of r R / (MAX_EPOCHS t + r c), at which training sees the data
    `MAX_EPOCHS` times, and MIN_DATA_SHARE R / c.

    Raises:
        UserError: `minutes` have no room for the least work of a stage; it names the stage and the
            minutes that are needed.
    """
    least = {
        "train": MIN_STEPS * probe.step_s,
        "correction": MIN_STEPS * probe.step_s if probe.has_correction else 0.0,
        "eval": MIN_EVAL_PROMPTS * probe.num_sets * probe.eval_prompt_s,
    }
    left = 60 * minutes - probe.spent_s
    for name, start in probe.starts_s.items():
        left -= start + least.get(name, 0.0)
        if left < 0:
            needed = probe.spent_s + sum(probe.starts_s.values()) + sum(least.values())
            raise too_short(minutes, name, needed)
    work = left + sum(least.values())
    correction_s = 0.0
    if probe.has_correction:
        most = MAX_CORRECTION_STEPS * probe.step_s
        correction_s = min(max(CORRECTION_SHARE * work, least["correction"]), most)
    eval_prompts = max(EVAL_SHARE * work, least["eval"]) / probe.eval_prompt_s
    eval_limit = max(MIN_EVAL_PROMPTS, int(eval_prompts / probe.num_sets))
    eval_s = min(eval_limit * probe.num_sets * probe.eval_prompt_s, EVAL_SHARE * work)
    rest = work - correction_s - eval_s
    speed = probe.step_tokens / probe.step_s
    one_s = probe.prompt_s + ANSWERS_PER_PROMPT * probe.answer_s
    one_tokens = ANSWERS_PER_PROMPT * probe.answer_tokens
    prompts = max(
        speed * rest / (MAX_EPOCHS * one_tokens + speed * one_s), MIN_DATA_SHARE * rest / one_s
    )
    prompts = max(1, int(prompts))
    train_s = rest - prompts * one_s
    starts = probe.starts_s
    seconds = {
        "synthesize": prompts * probe.prompt_s,
        "regenerate": prompts * ANSWERS_PER_PROMPT * probe.answer_s,
        "train": train_s,
        "correction": correction_s,
        "eval": eval_s,
    }
    return HeadPlan(
        prompts=prompts,
        steps=max(MIN_STEPS, int(train_s / probe.step_s)),
        epochs=train_s * speed / (prompts * one_tokens),
        correction_steps=round(correction_s / probe.step_s),
        eval_limit=eval_limit,
        seconds={
            "probe": probe.spent_s,
            **{name: start + seconds.get(name, 0.0) for name, start in starts.items()},
        },
    )


def training_steps(seconds: float, step_s: float, step_tokens: float, num_tokens: int) -> int:
    """Return the training steps that fit into `seconds`, in at most `MAX_EPOCHS` epochs."""
    most = max(1, int(MAX_EPOCHS * num_tokens / step_tokens))
    return min(most, max(MIN_STEPS, int(seconds / step_s)))


def too_short(minutes: float, stage: str, needed_s: float) -> UserError:
    """Return the error for minutes that are too short for a stage."""
    needed = 1.05 * needed_s / 60
    return UserError(
        f"--minutes is {minutes:g}, too short for the stage {stage!r}: this machine needs at least "
        f"{max(needed, 0.1):.1f} minutes for the least work of all stages. Give more --minutes, or "
        "a smaller target."
    )
