"""Draft heads on disk, in the style that vLLM loads (reference/peagle.md, "Checkpoint formats")."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from peagle.config import require_folder
from peagle.errors import CheckpointError
from peagle.models.drafter import Drafter, DrafterConfig
from peagle.models.fingerprint import TargetFingerprint
from peagle.models.target import TargetModel

FORMAT_VERSION = 1
WEIGHTS_NAME = "model.safetensors"
ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM")
# Searched in vLLM's order.
_MASK_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")


def config_to_json(config: DrafterConfig, extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The config.json of a head, vLLM style; what that style lacks goes under "peagle".

    Args:
        config: shape of the head.
        extra: further keys of the "peagle" object, the fingerprint for one.
    """
    data: dict[str, Any] = {
        "architectures": [ARCHITECTURES[0]],
        "model_type": "llama",
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
        "rope_theta": config.rope_parameters.get("rope_theta", 10000.0),
        "tie_word_embeddings": False,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "norm_before_residual": config.norm_before_residual,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(config.aux_layer_ids),
            "use_aux_hidden_state": True,
        },
        "peagle": {"format_version": FORMAT_VERSION, **(extra or {})},
    }
    if config.target_hidden_size != config.hidden_size:
        data["target_hidden_size"] = config.target_hidden_size
    for name in ("norm_before_fc", "fc_norm"):
        if getattr(config, name):
            data[name] = True
    if config.mask_token_id is not None:
        data.update(dict.fromkeys(_MASK_KEYS, config.mask_token_id))
    if config.trained_depth is not None:
        data["peagle"]["num_speculative_tokens_trained"] = config.trained_depth
    return data


def config_from_json(data: Mapping[str, Any], source: str) -> DrafterConfig:
    """Read the shape of a head from its config.json.

    Raises:
        CheckpointError: a key is missing, of the wrong type, or asks for what peagle lacks.
    """
    architectures = data.get("architectures") or []
    if not set(architectures) & set(ARCHITECTURES):
        raise CheckpointError(
            f"{source}: architectures is {architectures}; "
            f"expected one of {', '.join(ARCHITECTURES)}."
        )
    own = _object(data, "peagle", source)
    version = own.get("format_version", 1)
    if type(version) is not int or version < 1:
        raise CheckpointError(f"{source}: format_version is {version!r}; expected a whole number.")
    if version > FORMAT_VERSION:
        raise CheckpointError(
            f"{source}: format_version is {version}, newer than this peagle reads "
            f"({FORMAT_VERSION}). Upgrade peagle."
        )
    if data.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"{source}: hidden_act is {data['hidden_act']!r}; expected 'silu'.")
    eagle = _object(data, "eagle_config", source)
    aux = eagle.get(
        "eagle_aux_hidden_state_layer_ids", data.get("eagle_aux_hidden_state_layer_ids")
    )
    if not aux:
        raise CheckpointError(
            f"{source}: eagle_config.eagle_aux_hidden_state_layer_ids is missing; expected the "
            "target layers that the head reads. Write them into the file."
        )
    rope = _object(data, "rope_parameters", source) or _old_rope_parameters(data, source)
    mask = next((data[key] for key in _MASK_KEYS if data.get(key) is not None), None)
    try:
        heads, size = data["num_attention_heads"], data["hidden_size"]
        return DrafterConfig(
            hidden_size=size,
            intermediate_size=data["intermediate_size"],
            num_layers=data["num_hidden_layers"],
            num_attention_heads=heads,
            num_kv_heads=data.get("num_key_value_heads") or heads,
            head_dim=data.get("head_dim") or size // heads,
            vocab_size=data["vocab_size"],
            draft_vocab_size=data.get("draft_vocab_size") or data["vocab_size"],
            target_hidden_size=data.get("target_hidden_size") or size,
            # vLLM concatenates in ascending layer order, whatever the list says.
            aux_layer_ids=tuple(sorted(aux)),
            mask_token_id=mask,
            norm_before_residual=data.get("norm_before_residual", False),
            norm_before_fc=data.get("norm_before_fc", False),
            fc_norm=data.get("fc_norm", False),
            attention_bias=data.get("attention_bias", False),
            rms_norm_eps=data.get("rms_norm_eps", 1e-6),
            max_position_embeddings=data.get("max_position_embeddings", 2048),
            rope_parameters=rope,
            trained_depth=own.get("num_speculative_tokens_trained", data.get("speculative_tokens")),
        )
    except KeyError as error:
        raise CheckpointError(f"{source}: the key {error} is missing.") from None
    except TypeError as error:
        raise CheckpointError(f"{source}: a value is of the wrong type: {error}.") from None
    except CheckpointError as error:
        raise CheckpointError(f"{source}: {error}") from None


def _object(data: Mapping[str, Any], key: str, source: str) -> dict[str, Any]:
    value = data.get(key) or {}
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{source}: {key} is {value!r}; expected an object.")
    return dict(value)


def _old_rope_parameters(data: Mapping[str, Any], source: str) -> dict[str, Any]:
    """RoPE as older files have it: `rope_scaling`, whose type may be called "type"."""
    scaling = _object(data, "rope_scaling", source)
    rope_type = scaling.pop("type", "default")
    return {"rope_type": rope_type, **scaling, "rope_theta": data.get("rope_theta", 10000.0)}


def save_drafter(
    folder: str | Path,
    drafter: Drafter,
    *,
    fingerprint: TargetFingerprint | None = None,
    extra: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write a head as config.json and model.safetensors, vLLM style.

    Args:
        folder: made if it is not there.
        drafter: the head.
        fingerprint: of its target, checked at load.
        extra: further facts for the "peagle" object of config.json.
        dtype: type of the stored weights; None keeps the module's.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    facts = dict(extra or {})
    if fingerprint is not None:
        facts["target"] = fingerprint.to_json()
    tensors = {
        name: value.detach().to(dtype if value.is_floating_point() else None).cpu().contiguous()
        for name, value in split_tensors(drafter)
    }
    data = config_to_json(drafter.config, facts)
    data["dtype"] = str(next(v for v in tensors.values() if v.is_floating_point()).dtype).split(
        "."
    )[1]
    # The large write first: if it fails, an older head in the folder is still whole.
    temporary = folder / (WEIGHTS_NAME + ".part")
    save_file(tensors, temporary, metadata={"format": "pt"})
    write_json(folder / "config.json", data)
    os.replace(temporary, folder / WEIGHTS_NAME)


def write_json(path: Path, data: object) -> None:
    """Write JSON so that a reader sees the old file or the new one, never half of one."""
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def read_head_config(folder: str | Path) -> tuple[DrafterConfig, dict[str, Any]]:
    """The shape of the head in `folder`, and its "peagle" object.

    Raises:
        UserError: no such folder.
        CheckpointError: config.json is missing or not a head's.
    """
    path = require_folder(folder, "The draft head") / "config.json"
    if not path.is_file():
        raise CheckpointError(f"The draft head {str(folder)!r} has no config.json.")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{str(path)!r} is not JSON: {error}.") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{str(path)!r} holds {type(data).__name__}; expected an object.")
    return config_from_json(data, str(path)), dict(data.get("peagle", {}))


def load_drafter(
    folder: str | Path,
    target: TargetModel,
    *,
    dtype: torch.dtype | None = None,
    check_target: bool = True,
) -> Drafter:
    """Load a head for `target`, onto its device.

    `embed_tokens` and `lm_head` may be absent: they are then the target's own, as in vLLM.

    Args:
        folder: the head.
        target: the model it drafts for.
        dtype: type of the weights; None takes the target's.
        check_target: compare the fingerprint where the head has one.

    Raises:
        CheckpointError: another target; a tensor missing, unknown or misshapen; a pickle.
    """
    folder = Path(folder)
    config, facts = read_head_config(folder)
    _check_fits(config, target, str(folder))
    if check_target and "target" in facts:
        TargetFingerprint.from_json(facts["target"]).check(target, str(folder))
    tensors = _read_tensors(folder)
    shared = {"embed_tokens.weight": target.embedding_weight()}
    if not config.is_pruned:
        shared["lm_head.weight"] = target.lm_head_weight()
    for name, value in shared.items():
        tensors.setdefault(name, value)
    drafter = Drafter(config)
    _load_tensors(drafter, tensors, str(folder / WEIGHTS_NAME))
    if drafter.d2t is not None:
        _check_vocabulary_maps(drafter, str(folder / WEIGHTS_NAME))
    drafter.requires_grad_(False).eval()
    return drafter.to(device=target.device, dtype=dtype or target.dtype)


def split_tensors(drafter: Drafter) -> Iterator[tuple[str, Tensor]]:
    """The head's tensors under their checkpoint names; fused projections are split."""
    config = drafter.config
    for name, value in drafter.state_dict().items():
        fused = _fused_parts(name, config)
        if fused is None:
            yield name, value
            continue
        parts = value.split([size for _, size in fused])
        for (part_name, _), part in zip(fused, parts, strict=True):
            yield part_name, part


def _fused_parts(name: str, config: DrafterConfig) -> list[tuple[str, int]] | None:
    """Checkpoint names and row counts of a fused parameter, None for one that is not fused."""
    kv_rows = config.num_kv_heads * config.head_dim
    fused = {
        "qkv_proj": (
            ("q_proj", config.num_attention_heads * config.head_dim),
            ("k_proj", kv_rows),
            ("v_proj", kv_rows),
        ),
        "gate_up_proj": (
            ("gate_proj", config.intermediate_size),
            ("up_proj", config.intermediate_size),
        ),
    }
    for key, parts in fused.items():
        if f".{key}." in name:
            return [(name.replace(key, part), rows) for part, rows in parts]
    return None


def _load_tensors(drafter: Drafter, tensors: dict[str, Tensor], source: str) -> None:
    own = drafter.state_dict()
    known: set[str] = set()
    for name, parameter in own.items():
        fused = _fused_parts(name, drafter.config) or [(name, parameter.shape[0])]
        offset = 0
        for part_name, rows in fused:
            known.add(part_name)
            expected = (rows, *parameter.shape[1:])
            value = _take(tensors, part_name, expected, source)
            parameter[offset : offset + rows].copy_(value)
            offset += rows
    if unknown := sorted(set(tensors) - known):
        raise CheckpointError(
            f"{source}: tensor {unknown[0]!r} is unknown to this head ({len(unknown)} in all). "
            "Its config.json and its weights do not belong together."
        )


def _take(tensors: dict[str, Tensor], name: str, expected: tuple[int, ...], source: str) -> Tensor:
    if name not in tensors:
        hint = ""
        if name == "mask_hidden":
            hint = (
                " It has a mask token, so it is a P-EAGLE head and needs its shared hidden state."
            )
        raise CheckpointError(f"{source}: tensor {name!r} is missing.{hint}")
    value = tensors[name]
    if name == "mask_hidden" and value.numel() == torch.Size(expected).numel():
        return value.reshape(expected)
    if tuple(value.shape) != expected:
        raise CheckpointError(
            f"{source}: tensor {name!r} has shape {list(value.shape)}; expected {list(expected)}."
        )
    return value


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickles = sorted(
            p for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt")
        )
        if pickles:
            raise CheckpointError(
                f"{str(pickles[0])!r} is a pickle, which can run code when it is read; expected "
                f"{WEIGHTS_NAME}. Save the tensors with safetensors."
            )
        raise CheckpointError(f"The draft head {str(folder)!r} has no {WEIGHTS_NAME}.")
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as reader:
                for name in reader.keys():  # noqa: SIM118 (not a mapping)
                    key = (
                        name.replace("midlayer.", "layers.0.", 1)
                        if name.startswith("midlayer.")
                        else name
                    )
                    tensors[key] = reader.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{str(file)!r} is not readable as safetensors: {error}."
            ) from None
    return tensors


def _check_fits(config: DrafterConfig, target: TargetModel, head: str) -> None:
    for name, given in (
        ("vocab_size", target.vocab_size),
        ("target_hidden_size", target.hidden_size),
    ):
        expected = getattr(config, name)
        if expected != given:
            raise CheckpointError(
                f"The head {head!r} has {name} {expected}, the target {target.name!r} has {given}: "
                "it is a head of another target."
            )
    if max(config.aux_layer_ids) >= target.num_layers:
        raise CheckpointError(
            f"The head {head!r} reads target layers {list(config.aux_layer_ids)}, but "
            f"{target.name!r} has {target.num_layers} layers: it is a head of another target."
        )


def _check_vocabulary_maps(drafter: Drafter, source: str) -> None:
    ids, kept = drafter.target_ids(), drafter.t2d
    assert kept is not None
    vocab_size = drafter.config.vocab_size
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size or len(ids.unique()) < len(ids):
        raise CheckpointError(
            f"{source}: d2t maps draft ids to target ids {int(ids.min())} to {int(ids.max())}; "
            f"expected distinct ids from 0 to {vocab_size - 1}."
        )
    if int(kept.sum()) != len(ids) or not bool(kept[ids].all()):
        raise CheckpointError(f"{source}: d2t and t2d disagree about the draft vocabulary.")
