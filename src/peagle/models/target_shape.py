"""The sizes of a target from its config.json alone: nothing of its weights is read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from peagle.config import require_folder
from peagle.errors import CheckpointError
from peagle.models.architectures import check_architecture
from peagle.models.target import load_config


@dataclass(frozen=True, slots=True)
class TargetShape:
    """What a target is made of.

    Attributes:
        name: its folder.
        text_config: the configuration of its decoder.
        num_parameters: all of them, tied ones once.
        num_active: those that multiply one token on its way through the layers: no embedding, no
            lm_head, and of experts as many as a token goes to.
        num_lm_head: those of lm_head.
    """

    name: str
    text_config: transformers.PretrainedConfig
    num_parameters: int
    num_active: int
    num_lm_head: int

    @classmethod
    def read(cls, path: str | Path) -> TargetShape:
        """Read a folder that has at least a config.json.

        Raises:
            UserError: the folder is not there.
            CheckpointError: it is not a causal LM that peagle supports.
        """
        folder = require_folder(path, "The target model")
        config = load_config(folder)
        check_architecture(config)
        skeleton: Any = model_skeleton(folder, config)
        lm_head = skeleton.get_output_embeddings()
        text = config.get_text_config()
        ends = {
            id(parameter): parameter.numel()
            for module in (skeleton.get_input_embeddings(), lm_head)
            for parameter in module.parameters()
        }
        inner = [(n, p.numel()) for n, p in skeleton.named_parameters() if id(p) not in ends]
        return cls(
            name=str(path),
            text_config=text,
            num_parameters=sum(ends.values()) + sum(count for _, count in inner),
            num_active=sum(round(count * _share(name, text)) for name, count in inner),
            num_lm_head=sum(parameter.numel() for parameter in lm_head.parameters()),
        )

    @property
    def hidden_size(self) -> int:
        """H."""
        return self.text_config.hidden_size

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.text_config.vocab_size

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return self.text_config.num_hidden_layers


def model_skeleton(folder: Path, config: Any) -> transformers.PreTrainedModel:
    """The model without values: it knows the names, shapes and ties of its tensors.

    Raises:
        CheckpointError: transformers cannot build it.
    """
    try:
        with torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(config)
    except (ValueError, TypeError, KeyError, RuntimeError, ImportError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise CheckpointError(
            f"The target model {str(folder)!r} cannot be built: {first_line}"
        ) from None


def _share(name: str, text: Any) -> float:
    """Share of a tensor that multiplies one token; below 1 for experts only."""
    if "experts." not in name or "shared_expert" in name:
        return 1.0
    chosen = _first(text, "num_experts_per_tok", "experts_per_token", "top_k_experts")
    count = _first(text, "num_local_experts", "num_experts", "n_routed_experts")
    return chosen / count if chosen and count else 1.0


def _first(text: Any, *names: str) -> int | None:
    values = (getattr(text, name, None) for name in names)
    return next((value for value in values if value), None)
