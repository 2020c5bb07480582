"""What the options of `peagle tune` ask for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from peagle.config import SamplingParams


@dataclass(frozen=True, slots=True)
class TuneRequest:
    """What the options ask for, beside models.

    Attributes:
        ks: draft tokens per step; () takes 1 to what the acceptance or the head allows.
        batches: sequences together.
        acceptance: file of `peagle eval`; None measures it.
        method: of that file.
        sets: names of prompt sets.
        limit: prompts of each.
        chat: None decides by the model.
        params: of the requests, with a seed.
        context, steps, rounds, threshold: of the measurement and the schedule.
        output: folder of the results.
        as_json: print one JSON object.
    """

    ks: tuple[int, ...]
    batches: tuple[int, ...]
    acceptance: Path | None
    method: str | None
    sets: tuple[str, ...]
    limit: int
    chat: bool | None
    params: SamplingParams
    context: int
    steps: int
    rounds: int
    threshold: float
    output: Path | None
    as_json: bool
