"""The result of an examination: checks, and the causes of low acceptance."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from peagle.results import TrainingRecord

CheckStatus = Literal["agrees", "differs", "not checked"]
Where = Literal["head", "prompts", "serving"]

# Names of the causes, by their ids.
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
    "correction": "correction of the drafts",
    "trees": "candidate trees",
    "serving": "serving side",
}


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One property that was examined: its name, its state in this head, figures on one line."""

    name: str
    status: CheckStatus
    text: str


@dataclass(frozen=True, slots=True)
class Cause:
    """One cause of low acceptance: a key of CAUSES, its place, the evidence, and the remedy.

    The place is "head" (its files), "prompts" (the way they are rendered) or "serving".
    """

    id: str
    where: Where
    evidence: str
    remedy: str

    @property
    def title(self) -> str:
        """Name of the cause for people."""
        return CAUSES[self.id]


@dataclass(slots=True)
class Examination:
    """The examination of a head: all checks in order, and the causes that were found.

    Attributes:
        figures: acceptance on the training side and served, by position.
        training: the length of the head's training, None where no record tells it.
    """

    checks: list[CheckResult] = field(default_factory=list)
    causes: list[Cause] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    training: TrainingRecord | None = None

    @property
    def is_healthy(self) -> bool:
        """Return whether no cause was found."""
        return not self.causes

    @property
    def advice(self) -> str:
        """Return sentences that say what to do."""
        if self.causes:
            again = " Then run the doctor again: other causes may go." * (len(self.causes) > 1)
            return self.causes[0].remedy + again
        advice = "Keep the head as it is: the training side and the serving side agree."
        if self.training is not None and self.training.is_little:
            advice += f" It was trained for only {self.training}: more training may raise the "
            advice += "acceptance length."
        return advice

    def check(self, name: str, status: CheckStatus, text: str) -> None:
        """Add a check with its status and a text about it."""
        self.checks.append(CheckResult(name, status, text))

    def blame(self, id: str, where: Where, evidence: str, remedy: str) -> None:
        """Add a cause; a cause that is there already gets more evidence and the new remedy."""
        for index, known in enumerate(self.causes):
            if (known.id, known.where) == (id, where):
                self.causes[index] = Cause(id, where, f"{known.evidence}; {evidence}", remedy)
                return
        self.causes.append(Cause(id, where, evidence, remedy))

    def blames(self, *ids: str) -> bool:
        """Return whether one of these causes was found."""
        return any(cause.id in ids for cause in self.causes)

    def to_json(self) -> dict[str, Any]:
        """Return the examination as a JSON object."""
        return {
            "healthy": self.is_healthy,
            "advice": self.advice,
            "causes": [{**asdict(cause), "title": cause.title} for cause in self.causes],
            "training": None if self.training is None else self.training.to_json(),
            "checks": [asdict(check) for check in self.checks],
            **self.figures,
        }
