"""Facts of a target without its layers: its configuration, its sizes, embedding and lm_head.

Shapes: N rows, H target width, V vocabulary.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
import transformers
from torch import Tensor

from peagle.config import require_folder
from peagle.errors import CheckpointError
from peagle.model_folder import read_json
from peagle.models.architectures import check_architecture


class TargetSizes:
    """The sizes of a target: `TargetFacts`, or `TargetShape` of its configuration alone.

    Attributes:
        name: where it was loaded from.
        text_config: the configuration of its decoder.
    """

    name: str
    text_config: transformers.PretrainedConfig

    @property
    def hidden_size(self) -> int:
        """Return H, the width of the hidden states."""
        return self.text_config.hidden_size

    @property
    def vocab_size(self) -> int:
        """Return V, the number of tokens in the vocabulary."""
        return self.text_config.vocab_size

    @property
    def num_layers(self) -> int:
        """Return the number of decoder layers."""
        return self.text_config.num_hidden_layers


class TargetFacts(TargetSizes, ABC):
    """The sizes of a target and both of its ends: `TargetModel`, or `TargetEnds` without layers.

    Attributes:
        dtype, device: type and device of its weights.
    """

    dtype: torch.dtype
    device: torch.device

    @abstractmethod
    def compute_logits(self, hidden_NH: Tensor) -> Tensor:
        """Compute the logits [N, V] of final hidden states, after the last norm."""

    @abstractmethod
    def logits_of(self, token_ids: Tensor) -> Callable[[Tensor], Tensor]:
        """Make a function that computes the logits of some tokens only, [N, n]."""

    @abstractmethod
    def lm_head_weight(self) -> Tensor:
        """Return the output embedding, [V, H]."""

    @abstractmethod
    def embedding_weight(self) -> Tensor:
        """Return the input embedding, [V, H]."""


@dataclass(frozen=True, slots=True)
class TargetShape(TargetSizes):
    """The sizes of a target.

    Attributes:
        name: its folder.
        text_config: the configuration of its decoder.
        num_parameters: all of them, tied ones once.
        num_active: parameters that multiply one token on its way through the layers: no
            embedding, no lm_head, and of experts as many as a token goes to.
        num_lm_head: parameters of lm_head.
    """

    name: str
    text_config: transformers.PretrainedConfig
    num_parameters: int
    num_active: int
    num_lm_head: int

    @classmethod
    def read(cls, path: str | Path) -> Self:
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


def precision_of(target: TargetFacts) -> str:
    """Return the type a target computes in, with its weights' and KV cache's if they differ."""
    quantization: str | None = getattr(target, "quantization", None)
    kv_cache_dtype: str = getattr(target, "kv_cache_dtype", "auto")
    dtype = str(target.dtype).removeprefix("torch.")
    if getattr(target, "fp8_activations", "off") != "off":
        dtype += ", fp8 activations"
    return precision_text(dtype, quantization, kv_cache_dtype)


def precision_text(dtype: str, quantization: str | None, kv_cache_dtype: str) -> str:
    """Return the types of a target as results name them."""
    weights = f", {quantization} weights" if quantization else ""
    return dtype + weights + (f", {kv_cache_dtype} KV cache" if kv_cache_dtype != "auto" else "")


def model_skeleton(folder: Path, config: Any) -> transformers.PreTrainedModel:
    """Make the model without values: it knows the names, shapes and ties of its tensors.

    Raises:
        CheckpointError: transformers cannot build it.
    """

    def make() -> Any:
        with torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(config)

    return build_model(str(folder), make)


def build_model(name: str, make: Callable[[], Any]) -> Any:
    """Call the function that builds the model `name` of transformers.

    Raises:
        CheckpointError: transformers cannot build it.
    """
    try:
        return make()
    except (ValueError, TypeError, KeyError, RuntimeError, ImportError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise CheckpointError(f"The target model {name!r} cannot be built: {first_line}") from None


def generation_config(folder: Path, model: Any) -> Any:
    """Load the generation config of a folder; without one return the model's own."""
    try:
        return transformers.GenerationConfig.from_pretrained(folder, local_files_only=True)
    except OSError:
        return model.generation_config


def _share(name: str, text: Any) -> float:
    """Return the share of a tensor that multiplies one token; below 1 for experts only."""
    if "experts." not in name or "shared_expert" in name:
        return 1.0
    chosen = _first(text, "num_experts_per_tok", "experts_per_token", "top_k_experts")
    count = _first(text, "num_local_experts", "num_experts", "n_routed_experts")
    return chosen / count if chosen and count else 1.0


def _first(text: Any, *names: str) -> int | None:
    values = (getattr(text, name, None) for name in names)
    return next((value for value in values if value), None)


def load_config(folder: Path) -> Any:
    """Load the configuration of a model folder.

    Raises:
        CheckpointError: there is none, or none that transformers knows.
    """
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"The target model {str(folder)!r} has no config.json; expected a folder in Hugging "
            "Face format (config.json, *.safetensors, tokenizer files)."
        )
    read_json(folder / "config.json")  # refuses what transformers would read without an end
    try:
        return transformers.AutoConfig.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # of a broken file, transformers raises any
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"{str(folder / 'config.json')!r} is not a model: {first_line}"
        ) from None


def refuse_pickles(folder: Path) -> None:
    """Refuse a folder without safetensors files.

    Raises:
        CheckpointError: naming the pickle that is there instead, if one is.
    """
    if any(name.endswith(".safetensors") for name in os.listdir(folder)):
        return
    pickles = sorted(n for n in os.listdir(folder) if n.endswith((".bin", ".pt", ".pth", ".ckpt")))
    if pickles:
        raise CheckpointError(
            f"{str(folder / pickles[0])!r} is a pickle, which can run code when it is read; "
            "expected *.safetensors. Convert it with `model.save_pretrained(folder)` of "
            "transformers."
        )
    raise CheckpointError(f"The target model {str(folder)!r} has no *.safetensors weights.")
