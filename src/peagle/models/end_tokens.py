"""The tokens that end an answer of a target."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peagle.models.checkpoint.files import read_object

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def eos_token_ids(folder: str | Path, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the tokens that end an answer of the target in `folder`, as in vLLM.

    They are the tokenizer's end token and those that generation_config.json names or, where it
    names none, config.json. Fine-tunes often name another one in the files than in the tokenizer,
    and end the turns of their training texts with the tokenizer's.

    Raises:
        CheckpointError: one of the files is not a JSON object.
    """
    end: Any = tokenizer.eos_token_id  # typed more widely than it is
    named = _named_in(Path(folder) / "generation_config.json")
    named = named or _named_in(Path(folder) / "config.json")
    return tuple(dict.fromkeys(one for one in (end, *named) if type(one) is int))


def _named_in(path: Path) -> list[Any]:
    """Return the end tokens in a file of a model; none where there is no such file."""
    data = read_object(path) if path.is_file() else {}
    text = data.get("text_config")
    inner = text.get("eos_token_id") if isinstance(text, Mapping) else None
    value = data.get("eos_token_id") if inner is None else inner
    return value if isinstance(value, list) else [] if value is None else [value]
