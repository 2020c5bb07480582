"""How `quantization_config` of a checkpoint says that the weight of a layer is stored.

Its fields are checked here: impossible values, and fields that change the weights in a way that
peagle does not compute, are refused by name. Fields that only say how the numbers were found
(observers, damping, `ignore`) are not read. Fields of activations only say whether activations may
be rounded to FP8; whatever else they say, activations stay as they are.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from peagle.errors import CheckpointError

METHODS = ("fp8", "fbgemm_fp8", "compressed-tensors", "gptq", "awq", "mxfp4")
_VLLM_ADVICE = "`peagle serve --engine vllm` may serve it."
# Formats of compressed-tensors: those whose tensors peagle reads.
_FORMATS = (
    *("dense", "fakequant", "naive-quantized", "int-quantized", "float-quantized"),
    *("pack-quantized", "mixed-precision"),
)
_STRATEGIES = ("tensor", "channel", "group", "block")
# Where a transform of compressed-tensors is part of the stored weights already.
_STORED_PLACES = ("weight_input", "weight_output")
_MISSING: Any = object()  # in place of the value of a field that is not there


@dataclass(frozen=True, slots=True)
class Scheme:
    """How the weight of one linear layer is stored.

    Attributes:
        method: one of `METHODS`.
        bits: of a number.
        is_float: they are floating-point numbers; else integers.
        blocks: rows and inputs that share a scale; 0 are all of them. Of several the shape of the
            scales decides.
        is_symmetric: there need be no zero points.
        has_order: the layer says in which order its inputs are grouped.
        rounds_inputs: the model was made for activations in FP8; their scales, each for a row and
            128 inputs, are found while it runs.
    """

    method: str
    bits: int
    is_float: bool
    blocks: tuple[tuple[int, int], ...]
    is_symmetric: bool = True
    has_order: bool = False
    rounds_inputs: bool = False

    @property
    def text(self) -> str:
        """Return the scheme in words, for errors."""
        kind = "float" if self.is_float else "integer"
        scales = " or ".join(_block_text(*block) for block in self.blocks)
        return f"{self.method}: {kind}s of {self.bits} bits, a scale for {scales}"


def _block_text(rows: int, inputs: int) -> str:
    if not rows:
        return "the whole weight"
    if not inputs:
        return "each row"
    return f"{inputs} inputs" if rows == 1 else f"blocks of {rows} x {inputs}"


def check_config(data: Mapping[str, Any]) -> None:
    """Refuse a quantization_config with fields of wrong types, and one that peagle does not read.

    Raises:
        CheckpointError: naming the field.
    """
    method = data.get("quant_method")
    if method not in METHODS:
        named = repr(str(method)[:100]) if method else "no method that its config.json names"
        raise CheckpointError(
            f"The checkpoint is quantised by {named}; peagle reads {', '.join(METHODS)}. "
            f"{_VLLM_ADVICE}"
        )
    if method == "compressed-tensors":
        _refuse_transforms(data.get("transform_config"))
        _refuse_sparsity(data.get("sparsity_config"))
        _check_format(data, "format")
        for _, group, key in _groups(data):
            _group_scheme(group, key)
    elif method != "mxfp4":
        scheme_of(data, "")


def scheme_of(data: Mapping[str, Any], name: str) -> Scheme:
    """Return how the weight of a layer is stored.

    Args:
        data: a quantization_config whose method is one of `METHODS`.
        name: the layer's name in the checkpoint.

    Raises:
        CheckpointError: a field cannot be, or no field describes the layer.
    """
    method = data["quant_method"]
    if method in ("fp8", "fbgemm_fp8"):
        given = data.get("weight_block_size")
        blocks = ((0, 0), (1, 0)) if given is None else (_block(given, "weight_block_size"),)
        # Scales of blocks come with scales of 128 inputs, in every implementation of the method.
        is_dynamic = method == "fp8" and data.get("activation_scheme", "dynamic") == "dynamic"
        return Scheme(method, 8, True, blocks, rounds_inputs=is_dynamic and given is not None)
    if method == "compressed-tensors":
        return _group_scheme(*_group_of(data, name))
    if method == "gptq":
        return _gptq_scheme(data, name)
    if method == "awq":
        return _awq_scheme(data)
    raise CheckpointError(
        f"The checkpoint stores {name!r} quantised, which its method, {method!r}, does not "
        "describe: it stores experts alone, as blocks and scales. Copy or convert the checkpoint "
        "again."
    )


# ---- fields ----


def _wrong(key: str, value: Any, expected: str) -> CheckpointError:
    text = f"no {key}" if value is _MISSING else f"{key} {value!r}"
    text = text if len(text) <= 200 else f"{text[:200]}..."
    return CheckpointError(
        f"quantization_config has {text}; expected {expected}. Correct its "
        "config.json, or copy the checkpoint again."
    )


def _mapping(value: Any, key: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _wrong(key, value, "an object")
    return value


def _bits(data: Mapping[str, Any], key: str, prefix: str = "") -> int:
    value = data.get(key, _MISSING)
    if type(value) is not int or not 1 <= value <= 16:
        raise _wrong(prefix + key, value, "a whole number of bits from 1 to 16")
    return value


def _is_set(data: Mapping[str, Any], key: str, default: bool, prefix: str = "") -> bool:
    value = data.get(key, default)
    if not isinstance(value, bool):
        raise _wrong(prefix + key, value, "true or false")
    return value


def _group_size(data: Mapping[str, Any], key: str) -> tuple[int, int]:
    """Return the block of a group of inputs; a size of -1 gives one group of all inputs."""
    value = data.get(key, _MISSING)
    if type(value) is not int or (value < 1 and value != -1):
        raise _wrong(key, value, "a positive whole number of inputs, or -1 for all of them")
    return 1, max(value, 0)


def _block(value: Any, key: str) -> tuple[int, int]:
    found: list[Any] = list(value) if isinstance(value, list | tuple) else []
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,9}x[0-9]{1,9}", value):
        found = [int(number) for number in value.split("x")]
    if len(found) != 2 or not all(type(number) is int and number > 0 for number in found):
        raise _wrong(key, value, "two positive whole numbers, of rows and of inputs")
    return found[0], found[1]


def _matches(pattern: str, name: str, key: str) -> bool:
    try:
        return re.match(pattern, name) is not None
    except (re.error, RecursionError, OverflowError):
        raise _wrong(key, pattern, "a regular expression") from None


# ---- GPTQ and AWQ ----


def _gptq_scheme(data: Mapping[str, Any], name: str) -> Scheme:
    settings = dict(data)
    # GPTQModel: settings of the layers whose names match; "-:" is for layers that stay plain.
    for pattern, changes in _mapping(data.get("dynamic") or {}, "dynamic").items():
        is_used = not pattern.startswith("-:")
        if is_used and _matches(pattern.removeprefix("+:"), name, "dynamic"):
            settings |= _mapping(changes, f"dynamic.{pattern}")
            break
    stored = settings.get("checkpoint_format")
    if stored not in (None, "gptq", "gptq_v2") or settings.get("is_marlin_format"):
        found = stored if stored not in (None, "gptq", "gptq_v2") else "marlin"
        raise _wrong("checkpoint_format", found, f"'gptq' or 'gptq_v2' ({_VLLM_ADVICE[:-1]})")
    _is_set(settings, "sym", True)
    return Scheme(
        "gptq",
        _bits(settings, "bits"),
        is_float=False,
        blocks=(_group_size(settings, "group_size"),),
        is_symmetric=False,  # zeros are stored in any case
        has_order=_is_set(settings, "desc_act", False),
    )


def _awq_scheme(data: Mapping[str, Any]) -> Scheme:
    version = data.get("version", "gemm")
    if version not in ("gemm", "GEMM"):
        raise _wrong("version", version, f"'gemm' ({_VLLM_ADVICE[:-1]})")
    older = "w_bit" in data and "bits" not in data
    return Scheme(
        "awq",
        _bits(data, "w_bit" if older else "bits"),
        is_float=False,
        blocks=(_group_size(data, "q_group_size" if older else "group_size"),),
        is_symmetric=False,
    )


# ---- compressed-tensors ----


def _refuse_transforms(transforms: Any) -> None:
    """Refuse rotations of activations; rotations of stored weights alone are in the weights."""
    groups = _mapping(transforms or {}, "transform_config").get("config_groups") or {}
    for name, group in _mapping(groups, "transform_config.config_groups").items():
        places = group.get("apply") if isinstance(group, Mapping) else None
        places = places if isinstance(places, list) else []
        found = [place.get("location") if isinstance(place, Mapping) else None for place in places]
        if not found or any(place not in _STORED_PLACES for place in found):
            kind = group.get("type") if isinstance(group, Mapping) else None
            raise CheckpointError(
                f"The checkpoint has a transform_config: its group {name!r} ({kind or 'no type'}) "
                "rotates activations while the model runs (QuIP, SpinQuant), which peagle does not "
                f"compute. Quantise without transforms; {_VLLM_ADVICE}"
            )


def _refuse_sparsity(sparsity: Any) -> None:
    stored = _mapping(sparsity or {}, "sparsity_config").get("format", "dense")
    if stored != "dense":
        raise CheckpointError(
            f"The checkpoint has a sparsity_config of format {str(stored)[:100]!r}; peagle reads "
            f"weights that store every number ('dense'). {_VLLM_ADVICE}"
        )


def _check_format(data: Mapping[str, Any], key: str, prefix: str = "") -> None:
    stored = data.get(key)
    if stored is not None and stored not in _FORMATS:
        raise CheckpointError(
            f"quantization_config has {prefix}{key} {str(stored)[:100]!r}; peagle "
            f"reads {', '.join(_FORMATS)}. {_VLLM_ADVICE}"
        )


def _groups(data: Mapping[str, Any]) -> Iterator[tuple[list[str], Mapping[str, Any], str]]:
    """Yield the targets, the settings and the key of each group that quantises weights."""
    groups = _mapping(data.get("config_groups") or {}, "config_groups")
    for name, group in groups.items():
        key = f"config_groups.{name}"
        targets = _mapping(group, key).get("targets")
        if not isinstance(targets, list) or not all(isinstance(t, str) for t in targets):
            raise _wrong(f"{key}.targets", targets, "a list of names")
        _check_format(group, "format", f"{key}.")
        if group.get("weights") is not None:
            _mapping(group["weights"], f"{key}.weights")
            yield targets, group, key


def _group_of(data: Mapping[str, Any], name: str) -> tuple[Mapping[str, Any], str]:
    """Return the group of a layer and its key: by its name, then by its class, else the only."""
    groups = list(_groups(data))
    for targets, group, key in groups:
        if any(_is_target(target, name, key) for target in targets):
            return group, key
    rest = [group for group in groups if "Linear" in group[0]] or groups
    if len(rest) == 0 or (len(rest) > 1 and "Linear" not in rest[0][0]):
        raise CheckpointError(
            f"The checkpoint stores {name!r} quantised, and none of the {len(groups)} "
            "config_groups of its quantization_config that quantise weights has it as a target. "
            "Correct its config.json, or copy the checkpoint again."
        )
    return rest[0][1], rest[0][2]


def _is_target(target: str, name: str, key: str) -> bool:
    if target.startswith("re:"):
        return _matches(target.removeprefix("re:"), name, f"{key}.targets")
    return target == name or name.endswith(f".{target}")


def _group_scheme(group: Mapping[str, Any], key: str) -> Scheme:
    weights, prefix = group["weights"], f"{key}.weights."
    kind = weights.get("type", "int")
    if kind not in ("int", "float"):
        raise _wrong(f"{prefix}type", kind, "'int' or 'float'")
    if weights.get("dynamic", False) is not False:
        raise _wrong(f"{prefix}dynamic", weights["dynamic"], "false for weights")
    order = weights.get("actorder")
    if order not in (None, False, "weight", "static"):
        raise CheckpointError(
            f"quantization_config has {prefix}actorder {str(order)[:100]!r}: its "
            "layers order their inputs by activation, which peagle reads from GPTQ checkpoints "
            f"only. Quantise without actorder, or with 'weight'; {_VLLM_ADVICE}"
        )
    return Scheme(
        "compressed-tensors",
        _bits(weights, "num_bits", prefix),
        is_float=kind == "float",
        blocks=(_weights_block(weights, prefix),),
        is_symmetric=_is_set(weights, "symmetric", True, prefix),
        rounds_inputs=_rounds_inputs(group.get("input_activations")),
    )


def _rounds_inputs(activations: Any) -> bool:
    """Return whether settings of activations are those of `Scheme.rounds_inputs`."""
    wanted = {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "group"}
    wanted["group_size"] = 128
    if not isinstance(activations, Mapping):
        return False
    return all(activations.get(field) == value for field, value in wanted.items())


def _weights_block(weights: Mapping[str, Any], prefix: str) -> tuple[int, int]:
    size, strategy = weights.get("group_size"), weights.get("strategy")
    if size is not None and (type(size) is not int or (size < 1 and size != -1)):
        raise _wrong(f"{prefix}group_size", size, "a positive whole number of inputs, -1 or null")
    if strategy is None:
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    if strategy not in _STRATEGIES:
        text = f"one of {', '.join(_STRATEGIES)} ({_VLLM_ADVICE[:-1]})"
        raise _wrong(f"{prefix}strategy", strategy, text)
    if strategy == "block":
        return _block(weights.get("block_structure"), f"{prefix}block_structure")
    if (strategy == "group") != (size is not None and size > 0):
        text = "a positive number with strategy 'group', and -1 or null with all others"
        raise _wrong(f"{prefix}group_size", size, text)
    return {"tensor": (0, 0), "channel": (1, 0)}.get(strategy, (1, size or 0))
