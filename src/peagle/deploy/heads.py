"""What a draft head's files tell before it is deployed: its kind, its depth, its target.

What cannot be read from here is told; the container refuses at its start what does not fit.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peagle.deploy.memory import ModelFacts, model_facts
from peagle.deploy.model_files import CONFIG, HubFiles, files_of, unseen_is_told, warn_unseen
from peagle.deploy.models import ModelSource
from peagle.errors import CheckpointError

_HEAD = "The head"
# The aux layers of a head that does not name them depend on it; nothing here looks at them.
_ANY_NUMBER_OF_LAYERS = 32
_SIZES = ("vocab_size", "hidden_size", "num_layers")


@dataclass(frozen=True, slots=True)
class HeadFacts:
    """What is known of a head.

    Attributes:
        is_parallel: P-EAGLE, which drafts all K tokens in one pass; else EAGLE-3.
        trained_depth: K that it was trained for, None if unknown.
        target: of the target that it was trained for: name, vocab_size, hidden_size, num_layers,
            tokenizer_sha256, as far as the head tells.
    """

    is_parallel: bool
    trained_depth: int | None = None
    target: Mapping[str, Any] = field(default_factory=dict)


def head_facts(source: ModelSource, s3: Any = None) -> HeadFacts | None:
    """What a head's files tell; None, with a warning, where they cannot be read from here.

    Args:
        source: where it is.
        s3: boto3's client, for heads in S3.

    Raises:
        CheckpointError: they can be read, and it is no head, or a P-EAGLE head without mask_hidden.
    """
    files = files_of(source, s3)
    if files is None:
        warn_unseen(source, _HEAD)
        return None
    with unseen_is_told(source, _HEAD):
        return facts_of_files(files.config(), files.tensor_names(), source.name)
    return None


def facts_of_files(data: Mapping[str, Any], tensors: Collection[str], name: str) -> HeadFacts:
    """What config.json and the names of the tensors tell.

    Raises:
        CheckpointError: not a head's configuration, or a P-EAGLE head without mask_hidden.
    """
    from peagle.models.checkpoint.formats import config_from_json, facts_from_json

    config = config_from_json(data, f"{name}/{CONFIG}", num_target_layers=_ANY_NUMBER_OF_LAYERS)
    if config.is_parallel and "mask_hidden" not in tensors:
        raise CheckpointError(
            f"The head {name!r} has a mask token but no tensor mask_hidden: a P-EAGLE head cannot "
            "draft in parallel without it, and vLLM refuses it. Export the head anew from its "
            "training run, or name another one with --draft."
        )
    told = facts_from_json(data).get("target")
    target = dict(told) if isinstance(told, Mapping) else {}
    target |= {"vocab_size": config.vocab_size, "hidden_size": config.target_hidden_size}
    return HeadFacts(config.is_parallel, config.trained_depth, target)


def check_target(facts: HeadFacts, draft: ModelSource, target: ModelSource, s3: Any = None) -> None:
    """Refuse a head of another target, as far as config.json and tokenizer.json tell.

    Raises:
        CheckpointError: naming what differs.
    """
    found = _target_facts(target, s3)
    pairs = ((key, facts.target.get(key), found.get(key)) for key in (*_SIZES, "tokenizer_sha256"))
    for key, expected, given in pairs:
        if None not in (expected, given) and expected != given:
            trained = facts.target.get("name")
            raise CheckpointError(
                f"The head {draft.name!r} is of another target"
                f"{f', {trained!r}' if trained else ''}: its {key} is {expected}, that of "
                f"{target.name!r} is {given}. Every draft would be rejected. Name the head of "
                "this target with --draft, or take --no-speculation."
            )


def _target_facts(target: ModelSource, s3: Any) -> dict[str, Any]:
    """Sizes of a target; {} where it cannot be read from here."""
    facts: dict[str, Any] = {}
    files = files_of(target, s3)
    if files is None:
        return facts
    data: dict[str, Any] = {}
    with unseen_is_told(target, "The model"):
        data = files.config()
    if target.kind == "local":
        from peagle.models.fingerprint import tokenizer_digest

        facts["tokenizer_sha256"] = tokenizer_digest(Path(target.name))
    text = data.get("text_config") or data
    facts |= {key: text.get(key) for key in ("vocab_size", "hidden_size")}
    return facts | {"num_layers": text.get("num_hidden_layers")}


def facts_of_hub(source: ModelSource) -> ModelFacts | None:
    """Return the sizes of a model on the hub; None for others.

    None, too, with a warning, where the hub does not answer or has no safetensors of it: the
    container may well be able to.
    """
    if source.kind == "hub":
        with unseen_is_told(source, "The model"):
            files = HubFiles(source)
            return model_facts(files.config(), files.tensors())
    return None
