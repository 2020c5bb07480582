"""The target: an unmodified transformers causal LM over the paged KV cache, with aux taps.

Shapes: T packed tokens, H target width, A aux states, V vocabulary.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from peagle.attention import LayerKVCache, Prepared
from peagle.config import require_folder
from peagle.errors import CheckpointError, UserError

ATTENTION_NAME = "peagle"
SUPPORTED_MODEL_TYPES = ("llama", "qwen2", "qwen3")
SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
# Keywords that models pass along and that do not change the result of attention.
_BENIGN_KEYWORDS = frozenset({"position_ids", "use_cache", "output_router_logits", "is_causal"})


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    attend: Prepared | None = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls: [1, heads, T, d] in, [1, T, heads, d] out."""
    if attend is None:
        raise RuntimeError('attention "peagle" runs only inside peagle: call TargetModel.forward')
    unknown = {name for name, given in keywords.items() if given is not None} - _BENIGN_KEYWORDS
    if unknown or attention_mask is not None or dropout:
        what = ", ".join(sorted(unknown)) or "attention_mask or dropout"
        raise RuntimeError(
            f"{type(module).__name__} passes {what}, which peagle does not implement"
        )
    out_THd = attend(
        *(x.squeeze(0).transpose(0, 1) for x in (query, key, value)),
        cache=getattr(module, "peagle_cache", None),
        scaling=scaling if scaling is not None else query.shape[-1] ** -0.5,
        sliding_window=sliding_window,
    )
    return out_THd.unsqueeze(0), None


AttentionInterface.register(ATTENTION_NAME, _attention)


class TargetModel:
    """A transformers causal LM whose attention is ours; greedy output equals transformers' own.

    Attributes:
        model: the transformers module, unmodified.
        hidden_size, vocab_size, num_layers, max_model_len: its sizes.
        aux_layer_ids: layers whose *entering* hidden states make the feature (may be empty).
        name: where it was loaded from.
    """

    def __init__(
        self, model: PreTrainedModel, *, aux_layer_ids: Sequence[int] = (), name: str = ""
    ) -> None:
        config = model.config.get_text_config()
        _check_architecture(config)
        model.set_attn_implementation(ATTENTION_NAME)
        self.model = model.eval().requires_grad_(False)
        self.name = name
        self.hidden_size: int = config.hidden_size
        self.vocab_size: int = config.vocab_size
        self.num_layers: int = config.num_hidden_layers
        self.max_model_len: int = config.max_position_embeddings
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        # Modules of transformers are duck-typed: what is used of them differs by architecture.
        self._decoder: Any = model.get_decoder()
        self._lm_head: Any = model.get_output_embeddings()
        self._layers: list[nn.Module] = list(self._decoder.layers)
        self._attention_modules: list[Any] = [layer.self_attn for layer in self._layers]
        self._hooks: list[Any] = []
        self._taps: list[Tensor] = []
        self.aux_layer_ids: tuple[int, ...] = ()
        self.kv_caches: Sequence[LayerKVCache] = ()
        self.tap_aux(aux_layer_ids)

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        dtype: torch.dtype | None = None,
        device: str | torch.device = "cpu",
    ) -> TargetModel:
        """Load a folder in Hugging Face format (safetensors only, no remote code).

        Args:
            path: the folder.
            dtype: type of the weights; None keeps the stored one.
            device: where they go.

        Raises:
            UserError: the folder is not there.
            CheckpointError: it is not a causal LM that peagle supports, or its weights are broken.
        """
        folder = require_folder(path, "The target model")
        config = _load_config(folder)
        _check_architecture(config)
        _refuse_pickles(folder)
        transformers_logging.disable_progress_bar()
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=dtype or "auto",
                use_safetensors=True,
                trust_remote_code=False,
                local_files_only=True,
                attn_implementation=ATTENTION_NAME,
                output_loading_info=True,
            )
        except (OSError, SafetensorError, RuntimeError, ValueError) as error:
            first_line = str(error).strip().splitlines()[0]
            raise CheckpointError(
                f"The target model {str(folder)!r} does not load: {first_line}"
            ) from None
        model, report = loaded
        # transformers would fill them with random numbers and go on.
        if missing := sorted(report["missing_keys"]):
            raise CheckpointError(
                f"The target model {str(folder)!r} lacks tensor {missing[0]!r} ({len(missing)} "
                "missing in all). Its weights are incomplete: copy or convert them again."
            )
        return cls(model.to(torch.device(device)), name=str(path))

    def tap_aux(self, layer_ids: Sequence[int]) -> None:
        """Choose the layers whose entering hidden states `forward` returns, in ascending order.

        Raises:
            UserError: an id is not a layer of this model, or they are not distinct and ascending.
        """
        ids = tuple(layer_ids)
        if any(not 0 <= i < self.num_layers for i in ids) or list(ids) != sorted(set(ids)):
            raise UserError(
                f"aux layer ids are {list(ids)}; expected distinct ascending ids from 0 to "
                f"{self.num_layers - 1} (the target has {self.num_layers} layers)."
            )
        for hook in self._hooks:
            hook.remove()
        self.aux_layer_ids = ids
        self._hooks = [
            self._layers[i].register_forward_pre_hook(self._tap, with_kwargs=True) for i in ids
        ]

    def _tap(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        self._taps.append(hidden.squeeze(0))

    def kv_shapes(self) -> list[tuple[int, int]]:
        """(key/value heads, head size) of each layer."""
        return [
            (module.k_proj.out_features // module.head_dim, module.head_dim)
            for module in self._attention_modules
        ]

    def set_kv_caches(self, caches: Sequence[LayerKVCache]) -> None:
        """Give each layer its KV cache."""
        self.kv_caches = caches
        for module, cache in zip(self._attention_modules, caches, strict=True):
            module.peagle_cache = cache

    def forward(
        self, tokens_T: Tensor, positions_T: Tensor, attend: Prepared
    ) -> tuple[Tensor, Tensor]:
        """Run packed tokens.

        Args:
            tokens_T: int64 token ids.
            positions_T: int64 position ids.
            attend: the prepared attention pass.

        Returns:
            final hidden states [T, H] after the last norm, and aux features [T, A * H] (width 0
            when nothing is tapped).
        """
        self._taps = []
        output = self._decoder(
            input_ids=tokens_T.unsqueeze(0),
            position_ids=positions_T.unsqueeze(0),
            use_cache=False,
            attend=attend,
        )
        hidden_TH = output.last_hidden_state.squeeze(0)
        features = torch.cat(self._taps, dim=-1) if self._taps else hidden_TH[:, :0]
        self._taps = []
        return hidden_TH, features

    def compute_logits(self, hidden_NH: Tensor) -> Tensor:
        """lm_head of the given rows: [N, V]."""
        return self._lm_head(hidden_NH)

    def lm_head_weight(self) -> Tensor:
        """The output embedding, [V, H]."""
        return self._lm_head.weight

    def embedding_weight(self) -> Tensor:
        """The input embedding, [V, H]."""
        embedding: Any = self.model.get_input_embeddings()
        return embedding.weight

    def eos_token_ids(self) -> tuple[int, ...]:
        """End-of-text ids of the model's generation config, else of its config."""
        generation = self.model.generation_config
        value = getattr(generation, "eos_token_id", None)
        if value is None:
            value = self.model.config.eos_token_id
        if value is None:
            return ()
        return tuple(value) if isinstance(value, list | tuple) else (value,)


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder.

    Raises:
        CheckpointError: there is none that loads.
    """
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise CheckpointError(
            f"The tokenizer of {str(path)!r} does not load: {first_line}"
        ) from None


def default_aux_layer_ids(num_layers: int) -> tuple[int, ...]:
    """Layers whose entering states make the feature: (2, L // 2, L - 3) of an L-layer target.

    Where these collide or do not ascend (L < 7), distinct ids are spread over the layers; a target
    of fewer than three layers gives one state per layer.
    """
    ids = (2, num_layers // 2, num_layers - 3)
    if ids[0] < ids[1] < ids[2]:
        return ids
    if num_layers > 3:
        return (1, num_layers // 2, num_layers - 1)
    return tuple(range(num_layers))


def _load_config(folder: Path) -> Any:
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"The target model {str(folder)!r} has no config.json; expected a folder in Hugging "
            "Face format (config.json, *.safetensors, tokenizer files)."
        )
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise CheckpointError(
            f"{str(folder / 'config.json')!r} is not a model: {first_line}"
        ) from None


def _check_architecture(config: Any) -> None:
    if config.model_type not in SUPPORTED_MODEL_TYPES:
        raise CheckpointError(
            f"The target is of model type {config.model_type!r}; "
            f"supported: {', '.join(SUPPORTED_MODEL_TYPES)}."
        )
    rope = getattr(config, "rope_parameters", None) or {}
    rope_type = rope.get("rope_type", "default")
    if rope_type not in SUPPORTED_ROPE_TYPES:
        raise CheckpointError(
            f"The target uses RoPE type {rope_type!r}, whose angles depend on the batch; "
            f"supported: {', '.join(SUPPORTED_ROPE_TYPES)}."
        )


def _refuse_pickles(folder: Path) -> None:
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
