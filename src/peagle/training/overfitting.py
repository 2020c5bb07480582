"""Signs that a head learns its data by heart: a plan of many epochs, a validation that gets worse.

Heads for a chat model of 135M parameters overfitted at 9.3 and 7.0 epochs of 12M tokens; with 61M
tokens, at 1.9 and 1.4 epochs, their validation still improved (docs/lab/bundled.md).
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

MANY_EPOCHS = 3.0
FEW_TOKENS = 50_000_000
_MIN_RISES = 2  # validations in a row that are worse than the one before

Report = Mapping[str, Any]


def epochs_warning(steps: int, steps_per_epoch: int, num_tokens: int) -> str:
    """Warn of more than `MANY_EPOCHS` epochs of less than `FEW_TOKENS` tokens; "" if they are not.

    Args:
        steps: steps of the whole run.
        num_tokens: tokens of the training data.
    """
    epochs = steps / steps_per_epoch
    if epochs <= MANY_EPOCHS or num_tokens >= FEW_TOKENS:
        return ""
    fewer = int(MANY_EPOCHS * steps_per_epoch)
    return (
        f"The plan is {epochs:,.1f} epochs of {num_tokens:,} tokens; heads learn so few tokens by "
        "heart when they see them so often. Best train on more data: `peagle data regenerate` "
        f"answers further prompts. Or take fewer steps: {MANY_EPOCHS:g} epochs are optimizer.steps "
        f"= {fewer}."
    )


def rising_validation(reports: Sequence[Report]) -> str:
    """Warn if the validation loss rose twice in a row while the training loss fell; "" if not.

    Args:
        reports: the run's reports so far, in order ("kind", "step" and "loss" of each).
    """
    validations = [one for one in reports if one["kind"] == "validation"][-1 - _MIN_RISES :]
    if len(validations) <= _MIN_RISES:
        return ""
    if not all(later["loss"] > earlier["loss"] for earlier, later in pairwise(validations)):
        return ""
    first, last = validations[0], validations[-1]
    training = [one for one in reports if one["kind"] == "train"]
    before = [one["loss"] for one in training if one["step"] <= first["step"]]
    after = [one["loss"] for one in training if one["step"] > first["step"]]
    if not before or not after or after[-1] >= before[-1]:
        return ""
    losses = ", ".join(f"{one['loss']:.3f}" for one in validations)
    return (
        f"The validation loss rose from step {first['step']} to {last['step']} ({losses}) while "
        f"the training loss fell ({before[-1]:.3f}, {after[-1]:.3f}): the head learns its data by "
        "heart. The best head so far is kept. Train on more data (`peagle data regenerate` answers "
        "further prompts) or for fewer steps; run.patience ends such a run by itself."
    )
