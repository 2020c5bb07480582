"""Budgets of `peagle make-head`: measured costs, and the work that fits the minutes.

Training gets as much time as possible and its data as little as needed: training sees the data at
most `MAX_EPOCHS` times, and data gets at least `MIN_DATA_SHARE` of the time of both, if the probe
has not written enough of it.
"""

from collections.abc import Sequence
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
_WRITING = ("synthesize", "regenerate")  # stages that the probe begins


@dataclass(frozen=True, slots=True)
class HeadProbe:
    """The first part of the data, and the times of all stages on this machine.

    Attributes:
        spent_s: seconds of the probe.
        starts_s: seconds of each stage without its own work: loading, compiling, saving.
        written: prompts that are there.
        answered: prompts that have their answer.
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
    written: int
    answered: int
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
        answered: prompts that the probe has answered.
        prompts: prompts that are answered in the end.
        steps: approximate training steps; the prepared data fixes the number.
        epochs: times that training sees the data.
        correction_steps: steps of the correction, 0 without one.
        eval_limit: most prompts of each evaluation set.
        seconds: seconds of each stage, in order; the first is the probe. A writing stage is left
            out if the probe has written enough.
    """

    answered: int
    prompts: int
    steps: int
    epochs: float
    correction_steps: int
    eval_limit: int
    seconds: dict[str, float]

    def rows(self) -> list[tuple[str, float, str]]:
        """Return stage, minutes and work of each stage, in order."""
        work = {
            "probe": f"done: {self.answered:,} answers, half of them greedy",
            "synthesize": f"{self.prompts:,} prompts in all",
            "regenerate": f"{self.prompts:,} answers in all",
            "train": f"about {self.steps:,} steps, {self.epochs:.1f} epochs",
            "correction": f"{self.correction_steps:,} steps",
            "eval": f"up to {self.eval_limit:,} prompts of each set",
        }
        return [(name, s / 60, work.get(name, "")) for name, s in self.seconds.items()]

    def to_json(self) -> dict[str, Any]:
        """Return the plan as a JSON object."""
        return {
            "answered": self.answered,
            "prompts": self.prompts,
            "steps": self.steps,
            "epochs": self.epochs,
            "correction_steps": self.correction_steps,
            "eval_limit": self.eval_limit,
            "minutes": {name: seconds / 60 for name, seconds in self.seconds.items()},
        }


def make_head_plan(probe: HeadProbe, minutes: float) -> HeadPlan:
    """Return the work that fits into `minutes`, the probe and all starts included.

    Of three plans the one with most training steps is taken, in doubt the one with fewer starts:
    train on the answers that are there, answer more of the prompts that are there, write more
    prompts too.

    Raises:
        UserError: `minutes` have no room for the least work of a stage; it names the stage and the
            minutes that are needed.
    """
    writes = [name for name in _WRITING if name in probe.starts_s]
    plans, problem = [], None
    for first in reversed(range(len(writes) + 1)):
        try:
            plans.append(_plan(probe, minutes, writes[first:]))
        except UserError as error:
            problem = error
    best = max(plans, key=lambda plan: plan.steps, default=None)
    if best is None or (problem is not None and best.steps < MIN_STEPS):
        assert problem is not None  # a plan is missing
        raise problem  # too few answers are there, and there is no time for more
    return best


def _plan(probe: HeadProbe, minutes: float, writes: Sequence[str]) -> HeadPlan:
    """Return the plan in which only these of the writing stages go on.

    With x prompts, data takes c x - d seconds (d is what the probe has done) and has t x tokens,
    and training of r tokens/s gets the rest R + d - c x. x is the larger of
    r (R + d) / (MAX_EPOCHS t + r c), at which training sees the data `MAX_EPOCHS` times, and
    MIN_DATA_SHARE (R + d) / c. Time in which training would see the data more often goes to the
    correction, which sees it `MAX_EPOCHS` times at most too.
    """
    least = {
        "train": MIN_STEPS * probe.step_s,
        "correction": MIN_STEPS * probe.step_s if probe.has_correction else 0.0,
        "eval": MIN_EVAL_PROMPTS * probe.num_sets * probe.eval_prompt_s,
    }
    starts = {
        name: start
        for name, start in probe.starts_s.items()
        if name in writes or name not in _WRITING
    }
    left = 60 * minutes - probe.spent_s
    for name, start in starts.items():
        left -= start + least.get(name, 0.0)
        if left < 0:
            needed = probe.spent_s + sum(starts.values()) + sum(least.values())
            raise too_short(minutes, name, needed)
    work = left + sum(least.values())
    correction_s, most_correction_s = 0.0, MAX_CORRECTION_STEPS * probe.step_s
    if probe.has_correction:
        correction_s = min(max(CORRECTION_SHARE * work, least["correction"]), most_correction_s)
    eval_prompts = max(EVAL_SHARE * work, least["eval"]) / probe.eval_prompt_s
    eval_limit = max(MIN_EVAL_PROMPTS, int(eval_prompts / probe.num_sets))
    eval_s = min(eval_limit * probe.num_sets * probe.eval_prompt_s, EVAL_SHARE * work)
    rest = work - correction_s - eval_s
    speed = probe.step_tokens / probe.step_s
    prompts, seconds = probe.answered, dict.fromkeys(writes, 0.0)
    if writes:
        prompt_s = probe.prompt_s if "synthesize" in writes else 0.0
        one_s = prompt_s + probe.answer_s
        whole = rest + prompt_s * probe.written + probe.answer_s * probe.answered
        balanced = speed * whole / (MAX_EPOCHS * probe.answer_tokens + speed * one_s)
        wanted = int(max(balanced, MIN_DATA_SHARE * whole / one_s))
        if "synthesize" in writes:
            prompts = max(wanted, probe.answered)
            seconds["synthesize"] = max(0, prompts - probe.written) * prompt_s
        else:
            prompts = max(min(wanted, probe.written), probe.answered)
        seconds["regenerate"] = (prompts - probe.answered) * probe.answer_s
    train_s = rest - sum(seconds.values())
    tokens = prompts * probe.answer_tokens
    most_s = MAX_EPOCHS * tokens / speed
    spare_s = max(0.0, train_s - most_s)
    train_s -= spare_s
    if probe.has_correction:
        correction_s = min(correction_s + spare_s, max(most_s, least["correction"]))
        correction_s = min(correction_s, most_correction_s)
    seconds |= {"train": train_s, "correction": correction_s, "eval": eval_s}
    return HeadPlan(
        answered=probe.answered,
        prompts=prompts,
        steps=int(train_s / probe.step_s),
        epochs=train_s * speed / tokens,
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


def eval_prompts(seconds: float, plan: HeadPlan, probe: HeadProbe) -> int:
    """Return the prompts of each set that fit into `seconds`, at most those of the plan."""
    fitting = int(seconds / (probe.num_sets * probe.eval_prompt_s))
    return min(plan.eval_limit, max(MIN_EVAL_PROMPTS, fitting))


def too_short(minutes: float, stage: str, needed_s: float) -> UserError:
    """Return the error for minutes that are too short for a stage."""
    needed = 1.05 * needed_s / 60
    return UserError(
        f"--minutes is {minutes:g}, too short for the stage {stage!r}: this machine needs at least "
        f"{max(needed, 0.1):.1f} minutes for the least work of all stages. Give more --minutes, or "
        "a smaller target."
    )
