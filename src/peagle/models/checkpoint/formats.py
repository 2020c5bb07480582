"""config.json of a head, in either style.

Facts that neither style has a place for (target fingerprint, trained depth and length, format
version) stand under the key "peagle" in both. The target's name, for which the speculators style
has a place, moves there from "peagle" and back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from peagle.errors import CheckpointError
from peagle.models.checkpoint import speculators_style, vllm_style
from peagle.models.checkpoint.files import object_at
from peagle.models.drafter import DrafterConfig
from peagle.models.trained_depth import DEPTH_KEY, trained_depth
from peagle.models.whole_model import refuse_whole_model

HeadFormat = Literal["vllm", "speculators"]
FORMATS: tuple[HeadFormat, ...] = get_args(HeadFormat)
FORMAT_VERSION = 1

LENGTH_KEY = "max_sequence_length_trained"
_WRITTEN_HERE = ("format_version", DEPTH_KEY)
_SPECULATORS_KEYS = ("speculators_model_type", "speculators_config", "transformer_layer_config")


def format_of(data: Mapping[str, Any]) -> HeadFormat:
    """The style that a config.json is in."""
    return "speculators" if any(key in data for key in _SPECULATORS_KEYS) else "vllm"


def config_to_json(
    config: DrafterConfig, extra: Mapping[str, Any] | None = None, *, format: HeadFormat = "vllm"
) -> dict[str, Any]:
    """The config.json of a head.

    Args:
        config: shape of the head.
        extra: further keys of the "peagle" object, the fingerprint ("target") for one.
        format: the style.

    Raises:
        CheckpointError: the format is unknown.
    """
    if format not in FORMATS:
        raise CheckpointError(f"format is {format!r}; expected one of {', '.join(FORMATS)}.")
    own: dict[str, Any] = {"format_version": FORMAT_VERSION}
    if config.trained_depth is not None:
        own[DEPTH_KEY] = config.trained_depth
    own |= {name: value for name, value in (extra or {}).items() if name not in _WRITTEN_HERE}
    if format == "vllm":
        return {**vllm_style.write(config), "peagle": own}
    verifier = verifier_of(own)
    own.pop("verifier", None)
    return {**speculators_style.write(config, verifier), "peagle": own}


def config_from_json(
    data: Mapping[str, Any], source: str, *, num_target_layers: int | None = None
) -> DrafterConfig:
    """Read the shape of a head from its config.json.

    Args:
        data: the file, in either style.
        source: its name, for messages.
        num_target_layers: layers of the target, which give the default of the aux layers.

    Raises:
        UserError: it is the file of a whole model.
        CheckpointError: a key is missing, of the wrong type, or asks for what peagle lacks.
    """
    refuse_whole_model(data, source)
    style = speculators_style if format_of(data) == "speculators" else vllm_style
    try:
        _own_facts(data)  # refuses an object that cannot be read
        depth = trained_depth(data)
        return DrafterConfig(**style.read(data, num_target_layers), trained_depth=depth)
    except TypeError as error:
        raise CheckpointError(f"{source}: a value is of the wrong type: {error}.") from None
    except CheckpointError as error:
        raise CheckpointError(f"{source}: {error}") from None


def facts_from_json(data: Mapping[str, Any]) -> dict[str, Any]:
    """The "peagle" object, and under "verifier" the target's name where the style has one.

    Raises:
        CheckpointError: a value is of the wrong type.
    """
    facts = _own_facts(data)
    if format_of(data) == "speculators":
        verifier = speculators_style.read_verifier(data)
        if verifier != verifier_of(facts):
            facts["verifier"] = verifier
    return facts


def trained_length(facts: Mapping[str, Any]) -> int | None:
    """Tokens of the longest sequence that the head was trained on, None if it is not told.

    Args:
        facts: the "peagle" object.

    Raises:
        CheckpointError: the value is no number of tokens.
    """
    length = facts.get(LENGTH_KEY)
    if length is not None and (type(length) is not int or length < 1):
        raise CheckpointError(
            f"{LENGTH_KEY} is {length!r}; expected a whole number of at least 1, or none."
        )
    return length


def verifier_of(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The target as the speculators style names it: as told, else by the fingerprint."""
    if told := object_at(facts, "verifier"):
        return told
    target = facts.get("target")
    name = target.get("name") if isinstance(target, Mapping) else None
    return {"name_or_path": name, "architectures": []}


def _own_facts(data: Mapping[str, Any]) -> dict[str, Any]:
    own = object_at(data, "peagle")
    version = own.get("format_version", 1)
    if type(version) is not int or version < 1:
        raise CheckpointError(f"format_version is {version!r}; expected a whole number.")
    if version > FORMAT_VERSION:
        raise CheckpointError(
            f"format_version is {version}, newer than this peagle reads ({FORMAT_VERSION}). "
            "Upgrade peagle."
        )
    return own
