"""How a model asks to be sampled, in its generation config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers

_LENGTHS = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")


def generation_defaults(config: transformers.GenerationConfig) -> dict[str, Any]:
    """What a generation config asks for, under the names of `SamplingParams`.

    How to sample only where it asks to be sampled at all.
    """
    given = config.to_diff_dict()
    names, asked = dict(_LENGTHS), dict[str, Any]()
    if given.get("do_sample"):
        names |= {name: name for name in _SAMPLING}
        asked["temperature"] = 1.0
    return asked | {
        ours: given[theirs] for theirs, ours in names.items() if given.get(theirs) is not None
    }


def read_generation_defaults(folder: Path) -> dict[str, Any]:
    """The same of a model's folder; {} if it has no generation config."""
    try:
        config = transformers.GenerationConfig.from_pretrained(folder, local_files_only=True)
    except OSError:
        return {}
    return generation_defaults(config)
