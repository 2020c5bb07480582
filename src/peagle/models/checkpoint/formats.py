"""config.json of a head, in the vLLM style and in the style of the `speculators` package.

The vLLM style is one flat object, as the published `amazon/*-p-eagle` heads have it. The
speculators style nests the configuration of the layers and names the proposal. Facts that neither
style has a place for (target fingerprint, trained depth and length, format version) stand under the
key "peagle" in both. The target's name, for which the speculators style has a place, moves there
from "peagle" and back.
"""

from collections.abc import Mapping
from typing import Any, Literal, get_args

from peagle.errors import CheckpointError
from peagle.models.checkpoint.files import object_at
from peagle.models.drafter import DrafterConfig
from peagle.models.head_json import DEPTH_KEY, MASK_KEYS, refuse_whole_model, trained_depth
from peagle.models.target import default_aux_layer_ids

HeadFormat = Literal["vllm", "speculators"]
FORMATS: tuple[HeadFormat, ...] = get_args(HeadFormat)
FORMAT_VERSION = 1

LENGTH_KEY = "max_sequence_length_trained"
_OWN_KEYS = ("format_version", DEPTH_KEY)
_SPECULATORS_KEYS = ("speculators_model_type", "speculators_config", "transformer_layer_config")
_LLAMA, _QWEN3 = "llama", "qwen3"
AUX_KEY = "eagle_aux_hidden_state_layer_ids"
_OPTIONS = ("norm_before_fc", "fc_norm", "norm_output")
_USUAL_NUM_AUX = 3  # what vLLM assumes where it finds no list
# What the transformers configuration of a type assumes for absent keys.
_QWEN3_HEAD_DIM = 128
_MAX_POSITIONS = {_LLAMA: 2048, _QWEN3: 32768}
_DEFAULT_THETA = 10000.0
_SLIDING, _FULL = "sliding_attention", "full_attention"
_QWEN3_FULL_LAYERS, _QWEN3_WINDOW = 28, 4096
# Values that peagle's drafter does not implement, and the ones that it does.
_FIXED_VALUES = {"hidden_act": "silu", "mlp_bias": False, "logit_scale": 1.0}
# Model type of the layers behind each name; the first of a type is the one that is written.
_ARCHITECTURES = {
    "LlamaForCausalLMEagle3": _LLAMA,
    "Eagle3LlamaForCausalLM": _LLAMA,
    "LlamaForCausalLM": _LLAMA,
    "Eagle3Qwen3ForCausalLM": _QWEN3,
    "Qwen3ForCausalLM": _QWEN3,
}
# SpecForge's name of the layers of a P-EAGLE head. vLLM does not know it, and SpecForge keeps the
# mask token in the options of its training alone.
_SPECFORGE = "PEagleDraftModel"
# By kind of head, `norm_before_residual` of a file that does not say. It is vLLM's assumption: for
# "eagle3" the package's own class assumes false, but that class always writes the key, so a file
# without it comes from elsewhere and has been served by vLLM.
_KINDS = {"peagle": False, "eagle3": True}
_CLASSES = {"peagle": "PEagleDraftModel", "eagle3": "Eagle3DraftModel"}
# Tokens to propose where the trained depth is unknown: the package's default.
_UNKNOWN_DEPTH = 5
_LAYERS = "transformer_layer_config"


def format_of(data: Mapping[str, Any]) -> HeadFormat:
    """Return the style that a config.json is in."""
    return "speculators" if any(key in data for key in _SPECULATORS_KEYS) else "vllm"


def config_to_json(
    config: DrafterConfig, extra: Mapping[str, Any] | None = None, *, format: HeadFormat = "vllm"
) -> dict[str, Any]:
    """Return the config.json of a head.

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
    own |= {name: value for name, value in (extra or {}).items() if name not in _OWN_KEYS}
    if format == "vllm":
        return {**_write_vllm(config), "peagle": own}
    verifier = verifier_of(own)
    own.pop("verifier", None)
    return {**_write_speculators(config, verifier), "peagle": own}


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
    read = _read_speculators if format_of(data) == "speculators" else _read_vllm
    try:
        _own_facts(data)  # refuses an object that cannot be read
        depth = trained_depth(data)
        return DrafterConfig(**read(data, num_target_layers), trained_depth=depth)
    except TypeError as error:
        raise CheckpointError(f"{source}: a value is of the wrong type: {error}.") from None
    except CheckpointError as error:
        raise CheckpointError(f"{source}: {error}") from None


def facts_from_json(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the "peagle" object, and under "verifier" the target's name where the style has one.

    Raises:
        CheckpointError: a value is of the wrong type.
    """
    facts = _own_facts(data)
    if format_of(data) == "speculators":
        verifier = _read_verifier(data)
        if verifier != verifier_of(facts):
            facts["verifier"] = verifier
    return facts


def trained_length(facts: Mapping[str, Any]) -> int | None:
    """Return the tokens of the longest sequence that the head was trained on.

    None if it does not say.

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
    """Return the target as the speculators style names it: as given, else by the fingerprint."""
    if verifier := object_at(facts, "verifier"):
        return verifier
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


# ---- the vLLM style ----


def _write_vllm(config: DrafterConfig) -> dict[str, Any]:
    """Return config.json without "peagle"; some readers need the aux layers at the top level."""
    layers = _write_layers(config)
    aux_layer_ids = list(config.aux_layer_ids)
    architecture = next(n for n, kind in _ARCHITECTURES.items() if kind == layers["model_type"])
    data: dict[str, Any] = {
        "architectures": [architecture],
        **layers,
        "draft_vocab_size": config.draft_vocab_size,
        "norm_before_residual": config.norm_before_residual,
        AUX_KEY: aux_layer_ids,
        "eagle_config": {AUX_KEY: aux_layer_ids, "use_aux_hidden_state": True},
    }
    if config.target_hidden_size != config.hidden_size:
        data["target_hidden_size"] = config.target_hidden_size
    if config.mask_token_id is not None:
        data.update(dict.fromkeys(MASK_KEYS, config.mask_token_id))
    return data


def _read_vllm(data: Mapping[str, Any], num_target_layers: int | None) -> dict[str, Any]:
    """Read the arguments of `DrafterConfig`; absent keys have vLLM's defaults."""
    named = data.get("architectures") or []
    mask = next((data[k] for k in MASK_KEYS if data.get(k) is not None), None)
    if _SPECFORGE in named and mask is None:
        raise CheckpointError(
            f"architectures is {named}, a P-EAGLE head of SpecForge, and no mask token is named. "
            f'Add "{MASK_KEYS[0]}" to config.json: the token id that its training was given as '
            "mask token."
        )
    known = {**_ARCHITECTURES, _SPECFORGE: _LLAMA}
    model_type = next((known[name] for name in known if name in named), None)
    if model_type is None:
        raise CheckpointError(f"architectures is {named}; expected one of {', '.join(known)}.")
    eagle = object_at(data, "eagle_config")
    if eagle.get("use_aux_hidden_state") is False:
        raise CheckpointError(
            "eagle_config.use_aux_hidden_state is false; expected a head that reads hidden states "
            "of several target layers (EAGLE-3, P-EAGLE)."
        )
    layers = _read_layers(data, model_type)
    return {
        **layers,
        **_read_head(data, layers),
        "aux_layer_ids": _read_aux_layers(
            data.get(AUX_KEY) or eagle.get(AUX_KEY), f"eagle_config.{AUX_KEY}", num_target_layers
        ),
        "mask_token_id": mask,
        "norm_before_residual": _value_at(data, "norm_before_residual", False),
        "norm_before_fc": _value_at(
            eagle, "norm_before_fc", _value_at(data, "norm_before_fc", False)
        ),
    }


# ---- the speculators style ----


def _write_speculators(config: DrafterConfig, verifier: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json without "peagle"; `verifier` has the target's name and architectures."""
    kind = "peagle" if config.is_parallel else "eagle3"
    width = config.target_hidden_size if config.target_hidden_size != config.hidden_size else None
    data: dict[str, Any] = {
        "architectures": [_CLASSES[kind]],
        "speculators_model_type": kind,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": width,
        AUX_KEY: list(config.aux_layer_ids),
        "norm_before_residual": config.norm_before_residual,
        **{name: getattr(config, name) for name in _OPTIONS},
        "embed_requires_grad": config.is_parallel,
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": config.trained_depth or _UNKNOWN_DEPTH,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": dict(verifier),
        },
        _LAYERS: _write_layers(config),
    }
    if config.is_parallel:
        data["mask_token_id"] = config.mask_token_id
    return data


def _read_speculators(data: Mapping[str, Any], num_target_layers: int | None) -> dict[str, Any]:
    """Read the arguments of `DrafterConfig`."""
    kind = data.get("speculators_model_type")
    if kind not in _KINDS:
        raise CheckpointError(
            f"speculators_model_type is {kind!r}; expected one of {', '.join(_KINDS)}."
        )
    nested = object_at(data, _LAYERS)
    model_type = nested.get("model_type")
    if model_type not in (_LLAMA, _QWEN3):
        raise CheckpointError(
            f"{_LAYERS}.model_type is {model_type!r}; expected {_LLAMA} or {_QWEN3}."
        )
    mask = data.get("mask_token_id") if kind == "peagle" else None
    if kind == "peagle" and mask is None:
        raise CheckpointError("mask_token_id is missing; a P-EAGLE head needs its mask token.")
    layers = _read_layers(nested, model_type, f"{_LAYERS}.")
    return {
        **layers,
        **_read_head(data, layers),
        "aux_layer_ids": _read_aux_layers(data.get(AUX_KEY), AUX_KEY, num_target_layers),
        "mask_token_id": mask,
        "norm_before_residual": _value_at(data, "norm_before_residual", _KINDS[kind]),
    }


def _read_verifier(data: Mapping[str, Any]) -> dict[str, Any]:
    """Read the target that the file names: "name_or_path" and "architectures"."""
    verifier = object_at(object_at(data, "speculators_config"), "verifier")
    name, architectures = verifier.get("name_or_path"), verifier.get("architectures") or []
    if name is not None and not isinstance(name, str):
        raise CheckpointError(
            f"speculators_config.verifier.name_or_path is {name!r}; expected the target's name."
        )
    return {"name_or_path": name, "architectures": architectures}


# ---- what both styles share ----


def _write_layers(config: DrafterConfig) -> dict[str, Any]:
    """Return the keys of a transformers configuration for the layers of `config`.

    From the speculators style vLLM builds its configuration out of these keys and a few others, so
    the keys that it would not find otherwise are here: a number of aux states other than three, and
    `fc_norm` of a P-EAGLE head.
    """
    data: dict[str, Any] = {
        "model_type": _QWEN3 if config.qk_norm else _LLAMA,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": config.attention_bias,
        "mlp_bias": False,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_parameters": dict(config.rope_parameters),
        "rope_theta": config.rope_parameters.get("rope_theta", _DEFAULT_THETA),
        "tie_word_embeddings": False,
        "vocab_size": config.vocab_size,
    }
    if sizes := sorted({window for window in config.windows if window is not None}):
        if len(sizes) > 1:
            raise CheckpointError(
                f"The layers have windows of {sizes} positions; config.json has one sliding_window "
                "for all of them."
            )
        data["layer_types"] = [_SLIDING if window else _FULL for window in config.windows]
        data["sliding_window"] = sizes[0]
        if config.qk_norm:  # without it Qwen3's configuration drops the window
            data["use_sliding_window"] = True
    if len(config.aux_layer_ids) != _USUAL_NUM_AUX:
        data["num_aux_hidden_states"] = len(config.aux_layer_ids)
    return data | {name: True for name in _OPTIONS if getattr(config, name)}


def _read_layers(data: Mapping[str, Any], model_type: str, path: str = "") -> dict[str, Any]:
    """Read the layers' keys, which stand at `path`, as arguments of `DrafterConfig`."""
    _refuse_unsupported(data, path)

    def need(key: str) -> Any:
        if data.get(key) is None:
            raise CheckpointError(f"the key {path + key!r} is missing.")
        return data[key]

    heads, size, vocab_size = need("num_attention_heads"), need("hidden_size"), need("vocab_size")
    head_dim = _value_at(data, "head_dim", None)
    if head_dim is None:
        head_dim = _QWEN3_HEAD_DIM if model_type == _QWEN3 else size // heads
    return {
        "hidden_size": size,
        "intermediate_size": need("intermediate_size"),
        "num_layers": need("num_hidden_layers"),
        "num_attention_heads": heads,
        "num_kv_heads": _value_at(data, "num_key_value_heads", heads),
        "head_dim": head_dim,
        "vocab_size": vocab_size,
        "attention_bias": _value_at(data, "attention_bias", False),
        "rms_norm_eps": _value_at(data, "rms_norm_eps", 1e-6),
        "max_position_embeddings": _value_at(
            data, "max_position_embeddings", _MAX_POSITIONS[model_type]
        ),
        "rope_parameters": _rope_parameters(data),
        "qk_norm": model_type == _QWEN3,
        "windows": _read_windows(data, model_type, need("num_hidden_layers"), path),
    }


def _read_windows(
    data: Mapping[str, Any], model_type: str, num_layers: int, path: str
) -> tuple[int | None, ...]:
    """Read the window of each layer, with the meaning that vLLM and transformers give the keys."""
    is_qwen3, kinds = model_type == _QWEN3, data.get("layer_types")
    is_used = _value_at(data, "use_sliding_window", not is_qwen3)
    size = data.get("sliding_window", _QWEN3_WINDOW if is_qwen3 else None)
    if kinds is None and is_qwen3 and is_used and size is not None:
        first = _value_at(data, "max_window_layers", _QWEN3_FULL_LAYERS)
        kinds = [_FULL if i < first else _SLIDING for i in range(num_layers)]
    if kinds is not None and not isinstance(kinds, list):
        raise CheckpointError(
            f"{path}layer_types is {kinds!r}; expected a list with {_SLIDING} or {_FULL} for each "
            "layer."
        )
    kinds = kinds or []
    if unknown := [kind for kind in kinds if kind not in (_SLIDING, _FULL)]:
        raise CheckpointError(
            f"{path}layer_types names {unknown[0]!r}; expected {_SLIDING} or {_FULL} for each "
            "layer."
        )
    if _SLIDING not in kinds or not is_used:
        return ()
    if len(kinds) != num_layers:
        raise CheckpointError(
            f"{path}layer_types names {len(kinds)} layers; expected {num_layers} "
            "(num_hidden_layers)."
        )
    if type(size) is not int or size < 1:
        raise CheckpointError(
            f"{path}layer_types names {_SLIDING}, and {path}sliding_window is {size!r}; expected "
            "the positions that such a layer attends to, a whole number of at least 1."
        )
    return tuple(size if kind == _SLIDING else None for kind in kinds)


def _read_head(data: Mapping[str, Any], layers: Mapping[str, Any]) -> dict[str, Any]:
    """Return the widths and options of the head; absent widths are the layers' own."""
    return {
        "draft_vocab_size": _value_at(data, "draft_vocab_size", layers["vocab_size"]),
        "target_hidden_size": _value_at(data, "target_hidden_size", layers["hidden_size"]),
        **{name: _value_at(data, name, False) for name in _OPTIONS},
    }


def _read_aux_layers(given: Any, key: str, num_target_layers: int | None) -> tuple[int, ...]:
    """Read the layers whose entering states are the feature.

    A file without them means vLLM's default, (2, L // 2, L - 3) of a target of L layers.
    """
    if given:
        # vLLM concatenates in ascending layer order, whatever the list says.
        return tuple(sorted(given))
    if num_target_layers is not None and num_target_layers > 2 * _USUAL_NUM_AUX:
        return default_aux_layer_ids(num_target_layers)
    raise CheckpointError(
        f"{key} is missing; expected the target layers that the head reads. Write them into the "
        "file: vLLM takes [2, L // 2, L - 3] of a target with L layers, L of at least 7."
    )


def _value_at(data: Mapping[str, Any], key: str, default: Any) -> Any:
    """Return the value of `key`; `default` where it is absent or null."""
    value = data.get(key)
    return default if value is None else value


def _refuse_unsupported(data: Mapping[str, Any], path: str) -> None:
    for key, supported in _FIXED_VALUES.items():
        if _value_at(data, key, supported) != supported:
            raise CheckpointError(f"{path}{key} is {data[key]!r}; expected {supported!r}.")


def _rope_parameters(data: Mapping[str, Any]) -> dict[str, Any]:
    """Read RoPE as transformers 5 writes it, or as `rope_scaling` of older files."""
    rope = object_at(data, "rope_parameters")
    if not rope:
        rope = object_at(data, "rope_scaling")
        rope = {"rope_type": rope.pop("type", "default"), **rope}
    rope.setdefault("rope_theta", _value_at(data, "rope_theta", _DEFAULT_THETA))
    return rope
