"""A target and its own answers, which the examination of every head is held against."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from peagle.doctor.diagnosis import Progress
from peagle.doctor.probe import Probe
from peagle.doctor.questions import Style
from peagle.doctor.served import Question
from peagle.models.target import TargetModel


@dataclass(frozen=True)
class ProbedTarget:
    """A target that has answered the texts on which heads are examined.

    Attributes:
        target, tokenizer: the model.
        style: how prompts reach it.
        texts: the prompts.
        questions: those of them that were answered at length, as they were asked.
        probe: their answers, with the target's features.
        progress: told what is going on.
    """

    target: TargetModel
    tokenizer: PreTrainedTokenizerBase
    style: Style
    texts: tuple[str, ...]
    questions: tuple[Question, ...]
    probe: Probe
    progress: Progress
