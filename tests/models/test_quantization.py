"""Tensors and settings of quantised layers that cannot be are refused by name, never read."""

import copy
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from peagle.errors import CheckpointError
from peagle.models.quantization import (
    check_linear,
    check_mxfp4,
    quantization_of,
    read_linear,
    read_mxfp4,
)
from tests.models.test_packed_loading import AWQ, FORMATS, GPTQ, INT, by_compressed_tensors

Tensors = dict[str, Tensor]
N, K = 48, 96
NAME = "model.layers.1.self_attn.k_proj"
WEIGHT = torch.randn(N, K, generator=torch.Generator().manual_seed(1))
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e8m0fnu)
I32, I64, I8, F8 = torch.int32, torch.int64, torch.int8, torch.float8_e4m3fn
DTYPES = [*FLOATS, I32, I64, I8, F8, torch.int16, torch.uint8, torch.float8_e5m2, torch.bool]

# Of every format, what its tensors must be: their shapes and types, as the formats define them.
Expected = dict[str, tuple[list[tuple[int, ...]], tuple[torch.dtype, ...]]]
WORDS: Expected = {"weight_packed": ([(48, 12)], (I32,)), "weight_shape": ([(2,)], (I64, I32))}
GPTQ_TENSORS: Expected = {
    "qweight": ([(12, 48)], (I32,)),
    "qzeros": ([(3, 6)], (I32,)),
    "scales": ([(3, 48)], FLOATS[:4]),
    "g_idx": ([(96,)], (I32, I64)),
}
ROWS = [(48, 1), (48,)]
EXPECTED: dict[str, Expected] = {
    "fp8 blocks": {"weight": ([(48, 96)], (F8,)), "weight_scale_inv": ([(2, 3)], FLOATS)},
    "fp8 channels": {"weight": ([(48, 96)], (F8,)), "weight_scale": (ROWS, FLOATS)},
    "fp8 tensors": {
        "weight": ([(48, 96)], (F8,)),
        "weight_scale": ([(1, 1), (1,), ()], FLOATS),
    },
    "fp8 blocks of compressed-tensors": {
        "weight": ([(48, 96)], (F8,)),
        "weight_scale": ([(3, 3)], FLOATS),
    },
    "int8 channels": {"weight": ([(48, 96)], (I8,)), "weight_scale": (ROWS, FLOATS)},
    "int8 in words": {
        **WORDS,
        "weight_packed": ([(48, 24)], (I32,)),
        "weight_scale": ([(48, 3)], FLOATS),
    },
    "int4": {**WORDS, "weight_scale": ([(48, 3)], FLOATS)},
    "int4 channels": {**WORDS, "weight_scale": ([(48, 1)], FLOATS)},
    "int4 with zeros": {
        **WORDS,
        "weight_scale": ([(48, 3)], FLOATS),
        "weight_zero_point": ([(6, 3)], (I32,)),
    },
    "gptq 1": GPTQ_TENSORS,
    "gptq 2": GPTQ_TENSORS,
    "gptq by activation": GPTQ_TENSORS,
    "awq": {
        "qweight": ([(96, 6)], (I32,)),
        "qzeros": ([(3, 6)], (I32,)),
        "scales": ([(3, 48)], FLOATS[:4]),
    },
}
OPTIONAL = {("gptq 1", "g_idx"), ("gptq 2", "g_idx")} | {(f, "weight_shape") for f in FORMATS}


def stored(format: str) -> tuple[Tensors, dict[str, Any], Tensor]:
    """The tensors of a layer, its configuration, and the weight that they stand for."""
    writer, quantization = FORMATS[format]
    tensors, plain = writer(WEIGHT)
    return tensors, copy.deepcopy(quantization), plain


def read(tensors: Tensors, quantization: dict[str, Any]) -> Tensor:
    """The weight, checked first without values, as a loader does."""
    described = {name: tensor.to("meta") for name, tensor in tensors.items()}
    check_linear(described.get, NAME, (N, K), quantization, tensors.keys())
    found = read_linear(tensors.get, NAME, (N, K), quantization)
    weight = found.weight.unpack(torch.float32)
    if found.input_order is not None:
        weight[:, found.input_order] = weight.clone()
    return weight


def refused(tensors: Tensors, quantization: dict[str, Any], match: str) -> None:
    """Names, shapes and types are refused without values: there are none on "meta"."""
    described = {name: tensor.to("meta") for name, tensor in tensors.items()}
    with pytest.raises(CheckpointError, match=match):
        check_linear(described.get, NAME, (N, K), quantization, tensors.keys())


# ---- shapes and types ----


@pytest.mark.parametrize("format", FORMATS)
def test_what_is_published_is_read(format: str) -> None:
    tensors, quantization, plain = stored(format)
    assert set(EXPECTED[format]) == set(tensors)
    assert torch.allclose(read(tensors, quantization), plain, rtol=1e-6, atol=1e-7)


def reshaped(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Shapes that a damaged or wrongly converted tensor may have."""
    found: list[tuple[int, ...]] = [(), (0,), (1,), shape[::-1], (1, *shape), (*shape, 1)]
    for i, size in enumerate(shape):
        found += [(*shape[:i], other, *shape[i + 1 :]) for other in (0, size - 1, size + 1)]
        found += [(*shape[:i], other, *shape[i + 1 :]) for other in (size // 2, 2 * size)]
    return found


@pytest.mark.parametrize("format", FORMATS)
def test_faults_of_every_tensor_are_refused(format: str) -> None:
    tensors, quantization, _ = stored(format)
    for suffix, (shapes, dtypes) in EXPECTED[format].items():
        given = tensors[suffix]
        for shape in set(reshaped(tuple(given.shape))) - set(shapes):
            changed = {**tensors, suffix: torch.empty(shape, dtype=given.dtype)}
            expected = rf"'{NAME}\.{suffix}' as .* of shape {re.escape(str(list(shape)))}; expected"
            refused(changed, quantization, expected)
        for dtype in set(DTYPES) - set(dtypes):
            changed = {**tensors, suffix: torch.empty(given.shape, dtype=dtype)}
            refused(changed, quantization, rf"'{NAME}\.{suffix}' as .*; expected .* of shape")
        rest = {name: tensor for name, tensor in tensors.items() if name != suffix}
        if (format, suffix) in OPTIONAL:
            read(rest, quantization)
        else:
            refused(rest, quantization, rf"lacks tensor '{NAME}\.")


SHAPES = st.lists(st.sampled_from([0, 1, 2, 3, 6, 12, 24, 48, 96]) | st.integers(0, 97), max_size=4)


@pytest.mark.slow
@settings(deadline=None, max_examples=150)
@given(format=st.sampled_from([*FORMATS]), shape=SHAPES, data=st.data())
def test_no_shape_or_type_is_read_but_the_right_one(
    format: str, shape: list[int], data: st.DataObject
) -> None:
    writer, quantization = FORMATS[format]
    tensors, _ = writer(WEIGHT)
    suffix = data.draw(st.sampled_from(sorted(tensors)))
    dtype = data.draw(st.sampled_from([tensors[suffix].dtype, *DTYPES]))
    shapes, dtypes = EXPECTED[format][suffix]
    size = tuple(shape)
    tensors[suffix] = torch.ones(size if sum(size) < 300 else (1,), dtype=torch.float32).to(dtype)
    is_right = tuple(tensors[suffix].shape) in shapes and dtype in dtypes
    try:
        weight = read(tensors, quantization)
    except CheckpointError as error:
        assert f"{NAME}.{suffix}" in str(error)
        # Groups of inputs and the shape of the weight have wrong values of the right type.
        assert not is_right or suffix in ("g_idx", "weight_shape")
    else:
        assert is_right and weight.shape == (N, K)


@pytest.mark.parametrize(
    ("format", "suffix"),
    [
        ("int4", "weight_global_scale"),
        ("fp8 blocks", "weight_scale"),
        ("gptq 1", "weight"),
        ("awq", "g_idx"),
        ("awq", "bitmask"),
    ],
)
def test_surplus_tensors_are_refused(format: str, suffix: str) -> None:
    tensors, quantization, _ = stored(format)
    refused({**tensors, suffix: torch.ones(1)}, quantization, f"has tensor '{NAME}.{suffix}', whi")


def test_tensors_of_activations_are_left_out() -> None:
    tensors, quantization, plain = stored("int8 channels")
    tensors |= {"input_scale": torch.ones(1), "input_zero_point": torch.ones(1, dtype=I8)}
    assert torch.allclose(read(tensors, quantization), plain)


@pytest.mark.parametrize(
    ("shape", "quantization", "message"),
    [
        ((48, 100), {**GPTQ, "group_size": 64}, "has 100 inputs, and a scale for 64 of them"),
        ((48, 96), {**GPTQ, "group_size": 24}, "has 96 inputs, and a scale for 24 of them"),
        ((48, 48), {**AWQ, "group_size": 16}, "has 48 outputs and 48 inputs; expected a multiple"),
        ((44, 96), AWQ, "has 44 outputs and 96 inputs; .* GPTQ and AWQ a multiple of 8 outputs"),
        ((48, 96), {"quant_method": "fp8", "weight_block_size": [32, 24]}, "a scale for 24 of"),
    ],
)
def test_groups_that_do_not_divide_a_layer(
    shape: tuple[int, int], quantization: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        check_linear({}.get, NAME, shape, quantization)


# ---- values ----


def set_first(value: float) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        changed = tensor.clone()
        changed.flatten()[0] = value
        return changed

    return change


@pytest.mark.parametrize("format", FORMATS)
def test_scales_that_no_quantiser_writes(format: str) -> None:
    tensors, quantization, _ = stored(format)
    suffix = next(name for name in tensors if "scale" in name)
    faults = [set_first(float("nan")), set_first(float("inf")), torch.zeros_like]
    if format.startswith("fp8"):
        faults += [set_first(0.0), set_first(-1.0)]
    for change in faults:
        changed = {**tensors, suffix: change(tensors[suffix])}
        with pytest.raises(CheckpointError, match=rf"'{NAME}\.{suffix}', the scales .*; expected"):
            read(changed, quantization)


def test_integers_may_have_negative_scales() -> None:
    tensors, quantization, plain = stored("int4")
    changed = read({**tensors, "weight_scale": -tensors["weight_scale"]}, quantization)
    assert torch.allclose(changed, -plain)


@pytest.mark.parametrize(
    ("format", "suffix", "value", "message"),
    [
        (
            "int4",
            "weight_shape",
            torch.tensor([96, 48]),
            r"has \[96, 48\] in .*expected \[48, 96\]",
        ),
        (
            "gptq 1",
            "g_idx",
            torch.arange(96, dtype=I32) // 32 - 1,
            "the groups -1 to 1; expected 0",
        ),
        ("gptq 1", "g_idx", torch.arange(96, dtype=I32) // 16, "the groups 0 to 5; expected 0 to"),
        ("gptq 2", "g_idx", torch.zeros(96, dtype=I32), "different numbers of inputs"),
        ("int8 channels", "weight_zero_point", torch.ones(48, 1, dtype=I8), "8 bits and zero poi"),
        ("fp8 channels", "weight_zero_point", torch.ones(48, 1).to(F8), "8 bits and zero points"),
        ("fp8 channels", "weight", torch.full((48, 96), -torch.nan).to(F8), r"NaN in '.*\.weight'"),
    ],
)
def test_values_that_cannot_be(format: str, suffix: str, value: Tensor, message: str) -> None:
    tensors, quantization, _ = stored(format)
    with pytest.raises(CheckpointError, match=message):
        read({**tensors, suffix: value}, quantization)


def test_zero_points_of_zero_are_read() -> None:
    tensors, quantization, plain = stored("int8 channels")
    tensors["weight_zero_point"] = torch.zeros(48, 1, dtype=I8)
    assert torch.allclose(read(tensors, quantization), plain)


# ---- settings ----


def compressed(**changes: Any) -> dict[str, Any]:
    """The configuration of "int4" with other settings of its weights; None removes one."""
    quantization = copy.deepcopy(FORMATS["int4"][1])
    quantization["config_groups"]["group_0"]["weights"] |= changes
    return quantization


def without(quantization: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in quantization.items() if name != key}


WRONG_NUMBERS = [None, "4", "128", -5, 0, 1.5, True, [4], {"a": 4}]
WRONG: list[tuple[dict[str, Any], str]] = [
    *(({**GPTQ, "bits": value}, "has bits") for value in [*WRONG_NUMBERS, 17]),
    *(({**GPTQ, "group_size": value}, "has group_size") for value in WRONG_NUMBERS),
    *(({**AWQ, "group_size": value}, "has group_size") for value in WRONG_NUMBERS),
    (without(GPTQ, "bits"), "has no bits; expected a whole number of bits"),
    (without(AWQ, "bits"), "has no bits"),
    (without(GPTQ, "group_size"), "has no group_size"),
    (without(AWQ, "group_size"), "has no group_size"),
    ({**GPTQ, "desc_act": "false"}, "has desc_act 'false'; expected true or false"),
    ({**GPTQ, "sym": None}, "has sym None"),
    ({**GPTQ, "checkpoint_format": "marlin"}, "has checkpoint_format 'marlin'; expected 'gptq'"),
    ({**GPTQ, "is_marlin_format": True}, "has checkpoint_format 'marlin'"),
    ({**GPTQ, "dynamic": [1]}, "has dynamic"),
    ({**AWQ, "version": "gemv"}, "has version 'gemv'; expected 'gemm'"),
    ({**AWQ, "version": ["gemm"]}, "has version"),
    *(
        ({"quant_method": "fp8", "weight_block_size": value}, "has weight_block_size")
        for value in (128, "x", [128], [0, 128], [128, -1], ["128", "128"], [1.0, 2], {"a": 1}, [])
    ),
    ({"quant_method": "compressed-tensors", "config_groups": [1]}, "has config_groups"),
    ({"quant_method": "compressed-tensors", "config_groups": {"W4A16": ["Linear"]}}, r"\.W4A16 \["),
    *((compressed(num_bits=value), r"group_0\.weights\.num_bits") for value in WRONG_NUMBERS),
    *(
        (compressed(group_size=value), r"group_0\.weights\.group_size")
        for value in WRONG_NUMBERS
    ),
    (compressed(type="uint"), r"weights\.type 'uint'; expected 'int' or 'float'"),
    (compressed(strategy="tensor_group"), r"weights\.strategy 'tensor_group'; .*--engine vllm"),
    (compressed(strategy=["group"]), r"weights\.strategy"),
    (compressed(strategy="channel"), r"weights\.group_size 32; expected a positive number with"),
    (compressed(symmetric=None), r"weights\.symmetric None"),
    (compressed(dynamic=True), r"weights\.dynamic True"),
    (compressed(strategy="block", group_size=None), r"weights\.block_structure None; expected two"),
    (compressed(actorder="group"), r"weights\.actorder 'group': its layers order their inputs"),
    (compressed(actorder=True), r"weights\.actorder"),
    ({**FORMATS["int4"][1], "format": "marlin-24"}, "has format 'marlin-24'; peagle reads"),
    ({**FORMATS["int4"][1], "format": "nvfp4-pack-quantized"}, "has format 'nvfp4-pack-quantized'"),
    ({**FORMATS["int4"][1], "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
    ({**FORMATS["int4"][1], "sparsity_config": "2:4"}, "has sparsity_config '2:4'; expected"),
    ({"quant_method": "hqq"}, "quantised by 'hqq'; peagle reads"),
    ({"quant_method": ["fp8"]}, "quantised by"),
    ({"bits": 4}, "quantised by no method that its config.json names;"),
]  # fmt: skip


def config_of(quantization: Any) -> Any:
    return SimpleNamespace(quantization_config=quantization)


@pytest.mark.parametrize(("quantization", "message"), WRONG)
def test_settings_that_cannot_be(quantization: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        quantization_of(config_of(quantization))


@pytest.mark.parametrize("given", ["gptq", 4, [GPTQ], True])
def test_a_configuration_that_is_no_object(given: Any) -> None:
    with pytest.raises(
        CheckpointError, match=r"has the quantization_config .*; expected an object"
    ):
        quantization_of(config_of(given))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
BASES = [GPTQ, AWQ, FORMATS["fp8 blocks"][1], FORMATS["int4"][1], FORMATS["fp8 channels"][1]]


@pytest.mark.slow
@settings(deadline=None, max_examples=200)
@given(base=st.sampled_from(BASES), value=JSON, data=st.data())
def test_settings_of_any_type_are_read_or_refused(
    base: dict[str, Any], value: Any, data: st.DataObject
) -> None:
    quantization = copy.deepcopy(base)
    place = quantization
    while True:
        key = data.draw(st.sampled_from(sorted(place)))
        if not isinstance(place[key], dict) or not place[key] or data.draw(st.booleans()):
            break
        place = place[key]
    place[key] = value
    format = next(name for name, (_, one) in FORMATS.items() if one is base)
    tensors, _, plain = stored(format)
    try:
        found = quantization_of(config_of(quantization))
        assert found is not None
        weight = read(tensors, found)
    except CheckpointError:
        return
    assert torch.allclose(weight, plain, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "changes",
    [
        {"observer": "mse", "observer_kwargs": {"maxshrink": 0.2}},
        {"actorder": "weight"},
        {"actorder": "static"},
        {"actorder": False},
        {"strategy": None},
    ],
)
def test_settings_that_do_not_matter(changes: dict[str, Any]) -> None:
    tensors, _, plain = stored("int4")
    quantization = quantization_of(config_of(compressed(**changes)))
    assert quantization is not None
    quantization |= {"ignore": ["lm_head", "re:.*gate$"], "sparsity_config": {}, "extra": 1}
    quantization |= {"kv_cache_scheme": {"num_bits": 8}, "transform_config": {}}
    assert torch.allclose(read(tensors, quantization), plain)


def rotation(*places: Any) -> dict[str, Any]:
    group = {"type": "hadamard", "apply": [{"targets": ["Linear"], "location": p} for p in places]}
    return {**FORMATS["int4"][1], "transform_config": {"config_groups": {"u": group}}}


@pytest.mark.parametrize("places", [("weight_input", "input"), ("output",), ("q_attn",), (), (3,)])
def test_rotations_of_activations_are_refused(places: tuple[Any, ...]) -> None:
    with pytest.raises(CheckpointError, match=r"transform_config: its group 'u' \(hadamard\)"):
        quantization_of(config_of(rotation(*places)))


@pytest.mark.parametrize("given", ["QuIP", {"config_groups": [1]}, {"config_groups": {"u": None}}])
def test_transforms_of_another_type_are_refused(given: Any) -> None:
    with pytest.raises(CheckpointError, match="transform_config"):
        quantization_of(config_of({**FORMATS["int4"][1], "transform_config": given}))


def test_rotations_that_are_in_the_weights_are_read() -> None:
    tensors, _, plain = stored("int4")
    quantization = quantization_of(config_of(rotation("weight_input", "weight_output")))
    assert quantization is not None and torch.allclose(read(tensors, quantization), plain)


def test_what_the_configuration_and_the_tensors_do_not_agree_on() -> None:
    for format, other, message in [
        ("gptq 1", {**GPTQ, "bits": 8}, "gptq: integers of 8 bits"),
        ("gptq 1", {**GPTQ, "group_size": 16}, r"'.*qzeros' as .*; expected int32 of .* \[6, 6\]"),
        ("gptq 1", FORMATS["int4"][1], "lacks tensor '.*weight_packed'"),
        ("int4", FORMATS["fp8 channels"][1], "lacks tensor '.*weight'"),
        ("int4", {"quant_method": "mxfp4"}, "'mxfp4', does not describe"),
        ("int4", compressed(num_bits=3), "integers of 3 bits"),
        ("int4", compressed(symmetric=False), "lacks tensor '.*zero_point'.* symmetric false"),
        ("int4", compressed(type="float"), "floats of 4 bits"),
        ("int8 channels", {**FORMATS["int8 channels"][1], "config_groups": {}}, "none of the 0"),
    ]:  # fmt: skip
        refused(stored(format)[0], other, message)
    given = {name: t for name, t in stored("gptq by activation")[0].items() if name != "g_idx"}
    refused(given, FORMATS["gptq by activation"][1], "lacks tensor '.*g_idx'.* desc_act true")


# ---- groups of layers ----

FOUR, EIGHT = (by_compressed_tensors("pack-quantized", **INT), FORMATS["fp8 channels"])


def grouped(first: str, second: str) -> dict[str, Any]:
    """A configuration of two groups, with other settings for two lists of targets."""
    weights = [one[1]["config_groups"]["group_0"]["weights"] for one in (EIGHT, FOUR)]
    groups = {
        f"group_{i}": {"targets": [target], "weights": one}
        for i, (target, one) in enumerate(zip((first, second), weights, strict=True))
    }
    return {"quant_method": "compressed-tensors", "config_groups": groups}


@pytest.mark.parametrize(
    "targets",
    [("Linear", r"re:.*\.k_proj$"), ("re:.*mlp.*", NAME), ("re:x", NAME.removeprefix("model."))],
)
def test_a_layer_has_the_settings_of_its_group(targets: tuple[str, str]) -> None:
    tensors, _, plain = stored("int4")
    assert torch.allclose(read(tensors, grouped(*targets)), plain)
    refused(tensors, grouped(*reversed(targets)), "lacks tensor '.*weight'")


def test_a_layer_of_no_group_and_a_wrong_pattern_are_refused() -> None:
    tensors = stored("int4")[0]
    refused(tensors, grouped("re:a", "re:b"), f"{NAME}' quantised, and none of the 2 config_groups")
    refused(tensors, grouped("re:(", "Linear"), r"targets '\('; expected a regular expression")


def test_gptq_has_other_settings_for_some_layers() -> None:
    tensors, _, plain = stored("gptq 1")
    quantization = {**GPTQ, "group_size": 96, "dynamic": {"-:.*q_proj": {}, "+:.*mlp": {"bits": 8}}}
    refused(tensors, quantization, r"expected int32 of shape \[1, 6\]")
    quantization["dynamic"][r"+:.*\.k_proj"] = {"group_size": 32}
    assert torch.allclose(read(tensors, quantization), plain)
    quantization["dynamic"] = {"+:.*k_proj": {"bits": 8}}
    refused(tensors, quantization, "integers of 8 bits")
    quantization["dynamic"] = {"+:.*k_proj": 8}
    refused(tensors, quantization, "has dynamic")
    quantization["dynamic"] = {"(": {}}
    refused(tensors, quantization, r"has dynamic '\('; expected a regular expression")


def test_names_of_older_awq() -> None:
    tensors, _, plain = stored("awq")
    quantization = {"quant_method": "awq", "w_bit": 4, "q_group_size": 32, "version": "GEMM"}
    assert torch.allclose(read(tensors, quantization), plain)


@pytest.mark.parametrize("scale", [torch.tensor(0.5), torch.full((N, 1), 0.5)])
@pytest.mark.parametrize("method", ["fp8", "fbgemm_fp8"])
def test_fp8_without_blocks_has_scales_of_all_or_of_rows(method: str, scale: Tensor) -> None:
    weight = WEIGHT.to(F8)
    found = read({"weight": weight, "weight_scale": scale}, {"quant_method": method})
    assert torch.equal(found, weight.float() * 0.5)


# ---- MXFP4 ----

EXPERTS = (3, 32, 64)
BLOCKS, SCALES = (3, 32, 2, 16), (3, 32, 2)


@settings(deadline=None, max_examples=200)
@given(
    shape=SHAPES | st.sampled_from([BLOCKS, SCALES]),
    dtype=st.sampled_from(DTYPES),
    is_scale=st.booleans(),
)
def test_experts_of_mxfp4(shape: list[int], dtype: torch.dtype, is_scale: bool) -> None:
    tensors = {"blocks": torch.zeros(BLOCKS), "scales": torch.full(SCALES, 127)}
    found = {name: tensor.to(torch.uint8) for name, tensor in tensors.items()}
    name = "scales" if is_scale else "blocks"
    size = tuple(shape) if sum(shape) < 200 else ()
    found[name] = torch.zeros(size).to(dtype)
    if size == (SCALES if is_scale else BLOCKS) and dtype == torch.uint8:
        weight = read_mxfp4(found["blocks"], found["scales"], "experts.down_proj", EXPERTS)
        assert torch.equal(weight.unpack(torch.float32), torch.zeros(EXPERTS))
        return
    meta = {name: tensor.to("meta") for name, tensor in found.items()}
    with pytest.raises(
        CheckpointError, match=rf"'experts\.down_proj_{name}' as .*; expected uint8"
    ):
        check_mxfp4(meta["blocks"], meta["scales"], "experts.down_proj", EXPERTS)


def test_mxfp4_needs_whole_scales() -> None:
    with pytest.raises(CheckpointError, match="have 40 inputs; expected a multiple of 32"):
        check_mxfp4(torch.zeros(1), torch.zeros(1), "down_proj", (3, 32, 40))
