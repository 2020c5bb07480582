"""The target: an unmodified transformers causal LM over the paged KV cache, with aux taps.

Shapes: T packed tokens, H target width, A aux states, V vocabulary.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
import transformers
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers.utils import logging as transformers_logging

from peagle.attention import LayerKVCache, Prepared
from peagle.config import require_folder
from peagle.errors import CheckpointError, UserError
from peagle.models.architectures import capped, check_architecture, final_softcap, fix_longrope
from peagle.models.fp8_layers import multiplies_fp8
from peagle.models.kv_scales import read_kv_scales
from peagle.models.quantization import quantization_of
from peagle.models.quantize import quantize_model
from peagle.models.stored_tensors import StoredTensors
from peagle.models.target_attention import (
    AttentionLayer,
    DryRun,
    attention_layers,
    decoder_layers,
    dry_run,
    register_attention,
)
from peagle.models.target_facts import TargetFacts, load_config, refuse_pickles

if TYPE_CHECKING:
    from peagle.config.engine import Fp8Activations, KVCacheDType
    from peagle.config.speculative import Quantization
    from peagle.models.compilation import CompiledLayers
_LENGTHS = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")


class TargetModel(TargetFacts):
    """A transformers causal LM whose attention is ours; greedy output equals transformers' own.

    Attributes:
        model: the transformers module, unmodified.
        max_model_len: the longest context.
        aux_layer_ids: layers whose *entering* hidden states make the feature (may be empty).
        name: where it was loaded from.
        quantization: type of the quantised weights of its layers; None: they are plain.
        fp8_activations: "auto" if some of its layers multiply FP8 activations.
        kv_cache_dtype: type of its KV caches; "auto" is the activations' type.
        kv_scales: scales of keys and values in each KV cache, in the order of `kv_shapes`.
        compiled: its compiled layers, see `models.acceleration`; None: they run as they are.
    """

    quantization: str | None = None
    fp8_activations: Fp8Activations = "off"
    kv_cache_dtype: KVCacheDType = "auto"
    compiled: CompiledLayers | None = None

    def __init__(
        self,
        model: transformers.PreTrainedModel,
        *,
        aux_layer_ids: Sequence[int] = (),
        name: str = "",
    ) -> None:
        check_architecture(model.config)
        config = model.config.get_text_config()
        model.set_attn_implementation(register_attention())
        fit_experts(model)
        self.model = model.eval().requires_grad_(False)
        self.name = name
        self.text_config = config
        self.max_model_len: int = config.max_position_embeddings
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        # Modules of transformers are duck-typed: what is used of them differs by architecture.
        self._decoder: Any = model.get_decoder()
        self._lm_head: Any = model.get_output_embeddings()
        self._layers = decoder_layers(model)
        self._final_softcap = final_softcap(model.config)
        self.fix_rope(self.max_model_len)
        self._attention_layers = self._probe()
        self.kv_scales: list[tuple[float, float]] = [(1.0, 1.0)] * len(self.kv_shapes())
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
        quantization: Quantization | None = None,
        fp8_activations: Fp8Activations = "off",
        kv_cache_dtype: KVCacheDType = "auto",
        max_model_len: int | None = None,
    ) -> TargetModel:
        """Load a folder in Hugging Face format (safetensors only, no remote code).

        Quantised weights stay packed on a GPU, and are unpacked on a CPU, with a warning.

        Args:
            path: the folder.
            dtype: type of the plain weights and of the activations; None keeps the stored type.
            device: where they go.
            quantization: type that the plain weights of its layers get, see `models.quantize`.
            fp8_activations: "auto" lets linear layers and experts multiply FP8 activations where
                their checkpoint was made for it, see `models.fp8_layers`, and warns of the others.
            kv_cache_dtype: type of its KV caches; "fp8" is e4m3, with the scales of the checkpoint.
            max_model_len: a context that it must have, checked before weights are read.

        Raises:
            UserError: the folder is not there, its weights cannot be quantised so, or its longest
                context is shorter.
            CheckpointError: it is not a causal LM that peagle supports, or its weights are broken.
        """
        folder = require_folder(path, "The target model")
        config = load_config(folder)
        check_architecture(config)
        check_length(max_model_len, config.get_text_config().max_position_embeddings)
        refuse_pickles(folder)
        place = torch.device(device)
        stored = quantization_of(config)
        if stored is not None and quantization is not None:
            raise UserError(
                f"quantization is {quantization!r}, but the target {str(path)!r} is quantised "
                f"already ({stored['quant_method']}); leave the option out."
            )
        unpack = place.type != "cuda"  # no kernel reads packed weights on a CPU
        if stored is not None:
            model = _load_quantized(
                *(folder, config, stored, dtype, place),
                unpack=unpack,
                fp8_activations=fp8_activations == "auto",
            )
        else:
            if fp8_activations == "auto":
                warnings.warn(
                    "fp8_activations is 'auto', and the target is not stored in FP8: its "
                    "activations stay as they are.",
                    stacklevel=3,
                )
            model = _load_weights(folder, config, dtype)
            if quantization is not None:
                if unpack:
                    warnings.warn(
                        f"The target's weights are rounded to {quantization}; on this device they "
                        "take the memory of their own type.",
                        stacklevel=3,
                    )
                quantize_model(model, quantization, place, unpack=unpack)
        target = cls(model.to(place), name=str(path))
        target.quantization = stored["quant_method"] if stored else quantization
        if any(multiplies_fp8(module) for module in model.modules()):
            target.fp8_activations = "auto"
        if kv_cache_dtype == "fp8":
            target.round_kv(read_kv_scales(StoredTensors(folder, torch.device("cpu"))))
        return target

    def tap_aux(self, layer_ids: Sequence[int]) -> None:
        """Choose the layers whose entering hidden states `forward` returns, in ascending order.

        Raises:
            UserError: an id is not a layer of this model, or they are not distinct and ascending.
        """
        ids = tuple(layer_ids)
        check_aux_layer_ids(ids, self.num_layers)
        for hook in self._hooks:
            hook.remove()
        self.aux_layer_ids = ids
        self._hooks = [
            self._layers[i].register_forward_pre_hook(self._tap, with_kwargs=True) for i in ids
        ]

    def _tap(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        self._taps.append(hidden.squeeze(0))

    def fix_rope(self, max_model_len: int) -> None:
        """Fix the angles of LongRoPE for contexts up to `max_model_len`; others have no choice."""
        fix_longrope(self._decoder, max_model_len)

    def _probe(self) -> list[AttentionLayer]:
        """Find the attention of each layer by one token through the model."""
        run = dry_run(self.model)
        layers = attention_layers(self.model, run.calls)
        self._check_logits(run)
        return layers

    def _check_logits(self, run: DryRun) -> None:
        if not run.logits_TV.isfinite().all():
            raise CheckpointError(
                f"{type(self.model).__name__} {self.name!r} gives NaN or infinite logits for a "
                f"single token, in {self.dtype}. Load it in a type of wider range, or check its "
                "weights."
            )
        difference = (self.compute_logits(run.hidden_TH) - run.logits_TV).abs().max()
        tolerance = max(1e-4, 2 * torch.finfo(self.dtype).eps)
        if not difference <= tolerance * run.logits_TV.abs().max():
            raise CheckpointError(
                f"{type(self.model).__name__} cannot be a target: what it does to the logits "
                "after lm_head is more than a softcap, which is all that peagle knows."
            )

    def kv_shapes(self) -> list[tuple[int, int]]:
        """Return (key/value heads, head size) of each KV cache; layers may share one."""
        return list({layer.cache: layer.kv_shape for layer in self._attention_layers}.values())

    @property
    def kv_dtype(self) -> torch.dtype:
        """Return the type of the numbers in its KV caches."""
        return torch.float8_e4m3fn if self.kv_cache_dtype == "fp8" else self.dtype

    @property
    def kv_type(self) -> str:
        """Return the type in its KV caches as text, with the origin of its scales if it has any."""
        if self.kv_cache_dtype == "auto":
            return str(self.dtype).removeprefix("torch.")
        scales = "1" if set(self.kv_scales) <= {(1.0, 1.0)} else "of the checkpoint"
        return f"{self.kv_cache_dtype}, scales {scales}"

    def round_kv(self, scales: Mapping[int, tuple[float, float]]) -> None:
        """Let keys and values be FP8, in KV caches and in passes without one.

        Args:
            scales: of keys and values, by decoder layer; a layer that is left out has 1.
        """
        self.kv_cache_dtype = "fp8"
        owners = {layer.cache: i for i, layer in reversed([*enumerate(self._attention_layers)])}
        self.kv_scales = [
            scales.get(owners[cache], (1.0, 1.0)) for cache in range(len(self.kv_shapes()))
        ]
        self.drop_kv_caches()

    def make_kv_caches(self, num_blocks: int, block_size: int) -> list[LayerKVCache]:
        """Return empty KV caches, in the order of `kv_shapes`."""
        return [
            LayerKVCache(num_blocks, block_size, *shape, self.kv_dtype, self.device, scales)
            for shape, scales in zip(self.kv_shapes(), self.kv_scales, strict=True)
        ]

    def set_kv_caches(self, caches: Sequence[LayerKVCache]) -> None:
        """Give the layers their KV caches, in the order of `kv_shapes`."""
        assert len(caches) == len(self.kv_shapes())
        self.kv_caches = caches
        for layer in self._attention_layers:
            layer.module.peagle_cache = caches[layer.cache]

    def drop_kv_caches(self) -> None:
        """Let go of the KV caches, which else stay until another engine brings its own."""
        self.kv_caches = ()
        # Passes without a cache round keys and values as an empty one says.
        empty = self.make_kv_caches(0, 1) if self.kv_cache_dtype == "fp8" else None
        for layer in self._attention_layers:
            layer.module.peagle_cache = empty and empty[layer.cache]

    def forward(
        self, tokens_T: Tensor, positions_T: Tensor, attend: Prepared
    ) -> tuple[Tensor, Tensor]:
        """Run the target over packed tokens.

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
        """Return the model's logits for the given rows, [N, V].

        They are lm_head's output, under the softcap c * tanh(x / c) if the architecture has one.
        """
        return capped(self._lm_head(hidden_NH), self._final_softcap)

    def logits_of(self, token_ids: Tensor) -> Callable[[Tensor], Tensor]:
        """Make a function that computes the logits of some tokens, from a copy of their rows.

        Args:
            token_ids: int64 [n]; the function gives [N, n] in this order.
        """
        weight_nH = self._lm_head.weight.detach()[token_ids]
        bias = self._lm_head.bias
        bias_n = None if bias is None else bias.detach()[token_ids]
        cap = self._final_softcap
        return lambda hidden_NH: capped(F.linear(hidden_NH, weight_nH, bias_n), cap)

    def lm_head_weight(self) -> Tensor:
        """Return the output embedding, [V, H]."""
        return self._lm_head.weight

    def embedding_weight(self) -> Tensor:
        """Return the input embedding, [V, H]."""
        embedding: Any = self.model.get_input_embeddings()
        return embedding.weight

    def generation_defaults(self) -> dict[str, Any]:
        """Return the values of the model's generation config, under the names of `SamplingParams`.

        The sampling values count only where the generation config asks for sampling.
        """
        given = self.model.generation_config.to_diff_dict()
        names, defaults = dict(_LENGTHS), dict[str, Any]()
        if given.get("do_sample"):
            names |= {name: name for name in _SAMPLING}
            defaults["temperature"] = 1.0
        return defaults | {
            ours: given[theirs] for theirs, ours in names.items() if given.get(theirs) is not None
        }


def load_tokenizer(path: str | Path) -> transformers.PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder.

    Raises:
        CheckpointError: there is none that loads.
    """
    try:
        return transformers.AutoTokenizer.from_pretrained(
            path, trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # of a broken file, transformers and tokenizers raise any
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"The tokenizer of {str(path)!r} does not load: {first_line}"
        ) from None


def check_length(asked: int | None, limit: int) -> None:
    """Refuse a context longer than a target's, with a UserError."""
    if asked is not None and asked > limit:
        raise UserError(
            f"max_model_len is {asked}; the target's positions end at {limit}. Ask for no more."
        )


def check_aux_layer_ids(ids: Sequence[int], num_layers: int) -> None:
    """Refuse layers that a target does not have, or not in ascending order.

    Raises:
        UserError: naming them.
    """
    if any(not 0 <= i < num_layers for i in ids) or list(ids) != sorted(set(ids)):
        raise UserError(
            f"aux layer ids are {list(ids)}; expected distinct ascending ids from 0 to "
            f"{num_layers - 1} (the target has {num_layers} layers)."
        )


def default_aux_layer_ids(num_layers: int) -> tuple[int, ...]:
    """Return the layers whose entering states make the feature: (2, L // 2, L - 3) of L layers.

    Where these collide or do not ascend (L < 7), distinct ids are spread over the layers; a target
    of fewer than three layers gives one state per layer.
    """
    ids = (2, num_layers // 2, num_layers - 3)
    if ids[0] < ids[1] < ids[2]:
        return ids
    if num_layers > 3:
        return (1, num_layers // 2, num_layers - 1)
    return tuple(range(num_layers))


def _load_weights(folder: Path, config: Any, dtype: torch.dtype | None) -> Any:
    transformers_logging.disable_progress_bar()
    try:
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype or "auto",
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            attn_implementation=register_attention(),
            output_loading_info=True,
        )
    except (OSError, SafetensorError, RuntimeError, ValueError, ImportError) as error:
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
    return model


def _load_quantized(
    folder: Path,
    config: Any,
    quantization: Mapping[str, Any],
    dtype: torch.dtype | None,
    device: torch.device,
    *,
    unpack: bool,
    fp8_activations: bool,
) -> Any:
    from peagle.models.packed_loading import load_packed

    stored = getattr(config.get_text_config(), "dtype", None)
    dtype = dtype or (stored if isinstance(stored, torch.dtype) else torch.bfloat16)
    if unpack:
        method, name = quantization["quant_method"], str(dtype).removeprefix("torch.")
        warnings.warn(
            f"The target is quantised ({method}); on this device its weights are unpacked to "
            f"{name}.",
            stacklevel=4,
        )
    return load_packed(
        *(folder, config, quantization, dtype, device),
        unpack=unpack,
        fp8_activations=fp8_activations,
    )


def fit_experts(model: transformers.PreTrainedModel) -> None:
    """Choose an implementation of transformers that runs the experts of a float64 model."""
    if model.dtype == torch.float64 and "grouped_mm" in model.get_experts_implementation().values():
        model.set_experts_implementation("eager")  # the default knows no float64
