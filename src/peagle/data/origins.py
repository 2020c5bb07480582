"""The origin of answers: the model that gave them, and the author of its prompts.

`peagle data synthesize` and `regenerate` write it beside their outputs; `prepare` passes it on with
the data, and training with the record of the head.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import AliasChoices, AliasPath, BaseModel, ConfigDict, Field, ValidationError

from peagle.data.readers import read_side


def _at(name: str, *path: str) -> Any:
    """Return a field that is read by its own name, or out of the provenance of a file."""
    return Field(validation_alias=AliasChoices(name, AliasPath(*path)))


class PromptOrigin(BaseModel):
    """A file of prompts that a model wrote.

    Attributes:
        model: name of the model.
        prompts, samples: how many were kept, and how many were sampled.
        sha256: of the file.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    model: str = _at("model", "options", "model")
    prompts: int
    samples: int
    sha256: str = _at("sha256", "output_sha256")


class AnswerOrigin(BaseModel):
    """The answers of a file that a model gave at one temperature.

    Attributes:
        model: name of the model.
        answers: their number.
        temperature: of sampling, None where it was the default.
        prompts: the origin of the prompts, None if it is not known.
        sha256: of the file.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    model: str = _at("model", "options", "model")
    answers: int
    temperature: float | None = Field(
        default=None,
        validation_alias=AliasChoices(
            "temperature", AliasPath("options", "sampling", "temperature")
        ),
    )
    prompts: PromptOrigin | None = None
    sha256: str = _at("sha256", "output_sha256")


def read_prompt_origin(path: Any) -> PromptOrigin | None:
    """Return the origin of a file of prompts, None unless `peagle data synthesize` wrote it.

    Raises:
        UserError: the provenance cannot be read.
    """
    metadata = read_side(path)
    try:
        return PromptOrigin.model_validate(metadata) if _is_of("synthesize", metadata) else None
    except ValidationError:
        return None


def answer_origins(metadata: Mapping[str, Any]) -> tuple[AnswerOrigin, ...]:
    """Return the origins of all answers of a file by its provenance, () where that leaves some out.

    A file of a run that was stopped has none.
    """
    try:
        if _is_of("regenerate", metadata):
            # A run at several temperatures counts the answers of each.
            parts = metadata.get("by_temperature") or [{}]
            return tuple(AnswerOrigin.model_validate({**metadata, **part}) for part in parts)
        if _is_of("prepare", metadata):
            return tuple(map(AnswerOrigin.model_validate, metadata.get("origins", ())))
    except (ValidationError, TypeError):
        pass
    return ()


def joined_origins(files: Iterable[tuple[AnswerOrigin, ...]]) -> tuple[AnswerOrigin, ...]:
    """Return the origins of several files together; () if one of them does not tell its own."""
    found = list(files)
    return tuple(dict.fromkeys(one for every in found for one in every)) if all(found) else ()


def _is_of(kind: str, metadata: Mapping[str, Any]) -> bool:
    return metadata.get("kind") == kind
