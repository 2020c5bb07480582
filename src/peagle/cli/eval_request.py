"""What the options of `peagle eval` ask for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from peagle.config import SamplingParams
from peagle.evaluation.prompts import Prompt


@dataclass(frozen=True, slots=True)
class EvalRequest:
    """What the options ask for, beside models.

    Attributes:
        prompts: by the name of their set.
        ks: () where none was given.
        temperatures: each once.
        params: how to sample otherwise, with a seed.
        draft_sampling: of heads.
        concurrency: requests in flight.
        chat_template: None decides by the model.
        thinking: None leaves it to the template.
        output: folder of the results.
        as_json: print one JSON object.
    """

    prompts: dict[str, list[Prompt]]
    ks: tuple[int, ...]
    temperatures: tuple[float, ...]
    params: SamplingParams
    draft_sampling: str
    concurrency: int
    chat_template: bool | None
    thinking: bool | None
    output: Path | None
    as_json: bool
