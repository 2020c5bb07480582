"""What an examination finds: checks, one by one, and the causes that they amount to."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from peagle.results import TrainingRecord

Status = Literal["agrees", "differs", "not checked"]

# What may be wrong, as the verdict names it.
CAUSES = {
    "aux_layers": "aux layers",
    "token_shift": "one-token shift",
    "mask_token_id": "mask token id",
    "mask_hidden": "mask_hidden",
    "mask_slots": "mask slots (mask token id or mask_hidden)",
    "draft_vocabulary": "draft vocabulary maps (d2t, t2d)",
    "vocabulary_rebuilt": "draft vocabulary rebuilt from other data",
    "rope": "RoPE",
    "max_positions": "maximum position",
    "sliding_window": "sliding window",
    "norms": "norms",
    "residual": "residual flag (norm_before_residual)",
    "chat_template": "chat template",
    "thinking": "thinking mode",
    "dtype": "dtype",
    "parallel_drafting": "parallel drafting off",
    "tokenizer": "tokenizer",
    "wrong_target": "wrong target",
    "weights": "weights",
    "training": "trained too little",
    "serving": "serving side",
}


@dataclass(frozen=True, slots=True)
class Check:
    """One thing looked at.

    Attributes:
        name: what.
        status: "agrees" and "differs" say how it stands to what a healthy head has.
        text: the figures, on one line.
    """

    name: str
    status: Status
    text: str


@dataclass(frozen=True, slots=True)
class Cause:
    """Something that is wrong.

    Attributes:
        id: a key of CAUSES.
        where: "head" (its files), "prompts" (how they are rendered) or "serving".
        evidence: what shows it, with figures.
        remedy: what to do about it.
    """

    id: str
    where: Literal["head", "prompts", "serving"]
    evidence: str
    remedy: str

    @property
    def title(self) -> str:
        """The name of the cause."""
        return CAUSES[self.id]


@dataclass(slots=True)
class Examination:
    """The examination of a head.

    Attributes:
        checks: all that was looked at, in order.
        causes: what is wrong; none in a healthy head.
        figures: acceptance on the training side and served, by position.
        training: how long the head was trained, None where no record tells.
    """

    checks: list[Check] = field(default_factory=list)
    causes: list[Cause] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    training: TrainingRecord | None = None

    @property
    def is_healthy(self) -> bool:
        """Nothing wrong was found."""
        return not self.causes

    @property
    def advice(self) -> str:
        """What to do, in a sentence or two."""
        if self.is_healthy:
            advice = "Keep the head as it is: the training side and the serving side agree."
            if self.training is not None and self.training.is_little:
                advice += f" It was trained for only {self.training}: more training may raise the "
                advice += "acceptance length."
            return advice
        first, *others = self.causes
        return f"{first.remedy}{' Then run the doctor again: other causes may go.' * bool(others)}"

    def check(self, name: str, status: Status, text: str) -> None:
        """Note a check."""
        self.checks.append(Check(name, status, text))

    def blame(self, cause: Cause) -> None:
        """Note a cause; what is known of it already is added to, and the newer remedy holds."""
        for index, known in enumerate(self.causes):
            if (known.id, known.where) == (cause.id, cause.where):
                evidence = f"{known.evidence}; {cause.evidence}"
                self.causes[index] = replace(cause, evidence=evidence)
                return
        self.causes.append(cause)

    def blames(self, *ids: str) -> bool:
        """Whether one of these causes was found."""
        return any(cause.id in ids for cause in self.causes)

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {
            "healthy": self.is_healthy,
            "advice": self.advice,
            "causes": [{**asdict(cause), "title": cause.title} for cause in self.causes],
            "training": None if self.training is None else self.training.to_json(),
            "checks": [asdict(check) for check in self.checks],
            **self.figures,
        }
