"""Quantised checkpoints, written by compressed-tensors or packed number by number, as targets."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
)
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Mxfp4Config

from peagle import LLM, SamplingParams
from peagle.errors import CheckpointError
from peagle.models.fingerprint import TargetFingerprint
from peagle.models.fusion import fuse
from peagle.models.packed_loading import load_packed
from peagle.models.quantization import quantization_of
from peagle.models.target import TargetModel
from peagle.models.target_facts import load_config
from tests.kernels.devices import DEVICES, INTERPRETED
from tests.models.test_architectures import ARCHITECTURES, pack_experts
from tests.models.tiny import EXPERTS, make_model

Tensors = dict[str, Tensor]
Writer = Callable[[Tensor], tuple[Tensors, Tensor]]
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
needs_interpreter = pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET is not 1")
TOKENS = torch.randint(320, (1, 12), generator=torch.Generator().manual_seed(7))


# ---- writers: of one weight, its tensors and what it stands for ----


def fp8_blocks(weight: Tensor) -> tuple[Tensors, Tensor]:
    """As Qwen publishes it: a scale for each block, by which the numbers are multiplied."""
    n, k = weight.shape
    stored, scales = (
        torch.zeros(n, k).to(torch.float8_e4m3fn),
        torch.zeros(-(-n // 32), -(-k // 32)),
    )
    plain = torch.zeros(n, k)
    for i in range(0, n, 32):
        for j in range(0, k, 32):
            block = weight[i : i + 32, j : j + 32]
            scale = block.abs().max() / 448
            q = (block / scale).to(torch.float8_e4m3fn)
            stored[i : i + 32, j : j + 32], scales[i // 32, j // 32] = q, scale
            plain[i : i + 32, j : j + 32] = q.float() * scale
    return {"weight": stored, "weight_scale_inv": scales}, plain


def by_compressed_tensors(format: str, **arguments: Any) -> tuple[Writer, dict[str, Any]]:
    """A writer of the package that defines the format, and the configuration that it writes.

    The package's own reader says what is stored.
    """
    args = QuantizationArgs(**arguments)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=CompressionFormat(format))
    config = QuantizationConfig(
        config_groups={"group_0": scheme}, format=format, ignore=["lm_head"]
    )

    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        n, k = weight.shape
        rows = {"channel": (n, 1), "tensor": (1, 1), "group": (n, k // (args.group_size or k))}
        shape = rows.get(str(args.strategy))
        if shape is None:
            assert args.block_structure is not None
            shape = (n // args.block_structure[0], k // args.block_structure[1])
        blocks = weight.view(shape[0], n // shape[0], shape[1], k // shape[1])
        low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
        largest = {4: 7.0, 8: 448.0 if args.type == "float" else 127.0}[args.num_bits]
        state = {"weight": weight, "weight_scale": torch.maximum(-low, high) / largest}
        if not args.symmetric:
            scale = (high - low) / 15
            state["weight_scale"] = scale
            state["weight_zero_point"] = (-8 - low / scale).round().clamp(-8, 7).to(torch.int8)
        compressor: Any = BaseCompressor.get_value_from_registry(format)
        stored = compressor.compress(state, scheme)
        plain = compressor.decompress(dict(stored), scheme)["weight"]
        return dict(stored), plain

    return write, config.model_dump(mode="json")


def integers(weight: Tensor, group: int) -> tuple[Any, Any, Any]:
    """Numbers, scales and zeros of [N, K] in groups of inputs."""
    blocks = weight.unflatten(1, (-1, group))
    low, high = blocks.amin(-1).clamp(max=0), blocks.amax(-1).clamp(min=0)
    scale = ((high - low) / 15).half().float()
    zero = (-low / scale).round().clamp(1, 15)
    q = (blocks / scale[..., None] + zero[..., None]).round().clamp(0, 15).flatten(1)
    return q.int(), scale, zero.int()


def words(numbers: Any, order: range | tuple[int, ...] = range(8)) -> Tensor:
    """Eight numbers of the last dimension in an int32: place i has number order[i]."""
    rows, columns = numbers.shape
    packed = numpy.zeros((rows, columns // 8), dtype=numpy.uint32)
    for i, number in enumerate(order):
        packed |= numbers[:, number::8].astype(numpy.uint32) << numpy.uint32(4 * i)
    return torch.from_numpy(packed.view(numpy.int32))


def gptq(version: int, *, by_activation: bool = False) -> Callable[[Tensor], Any]:
    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        k, group = weight.shape[1], 32
        order = torch.arange(k)
        if by_activation:
            order = torch.randperm(k, generator=torch.Generator().manual_seed(3))
        q, scale, zero = integers(weight[:, order], group)
        spread = lambda t: t.repeat_interleave(group, 1)  # noqa: E731
        plain = torch.empty_like(weight)
        plain[:, order] = (q - spread(zero)).float() * spread(scale)
        g_idx, by_input = torch.empty(k, dtype=torch.int32), torch.empty_like(q)
        g_idx[order] = torch.arange(k, dtype=torch.int32) // group
        by_input[:, order] = q
        stored = {
            "qweight": words(by_input.numpy()).T.contiguous(),
            "qzeros": words((zero - int(version == 1)).T.numpy()),
            "scales": scale.T.contiguous().half(),
            "g_idx": g_idx,
        }
        return stored, plain

    return write


def awq(weight: Tensor) -> tuple[Tensors, Tensor]:
    q, scale, zero = integers(weight, 32)
    plain = (q - zero.repeat_interleave(32, 1)).float() * scale.repeat_interleave(32, 1)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        "qweight": words(q.T.numpy(), order),
        "qzeros": words(zero.T.numpy(), order),
        "scales": scale.T.contiguous().half(),
    }, plain


FP8 = {"num_bits": 8, "type": "float"}
INT = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
INT8 = {"num_bits": 8, "type": "int"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
CT = {"quant_method": "compressed-tensors"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
FORMATS: dict[str, tuple[Writer, dict[str, Any]]] = {
    "fp8 blocks": (fp8_blocks, {"quant_method": "fp8", "weight_block_size": [32, 32]}),
    "fp8 channels": by_compressed_tensors("float-quantized", **FP8, strategy="channel"),
    "fp8 tensors": by_compressed_tensors("float-quantized", **FP8, strategy="tensor"),
    "fp8 blocks of compressed-tensors": by_compressed_tensors(
        "float-quantized", **FP8, strategy="block", block_structure=[16, 32]
    ),
    "int8 channels": by_compressed_tensors("int-quantized", **INT8, strategy="channel"),
    "int8 in words": by_compressed_tensors(
        "pack-quantized", **INT8, strategy="group", group_size=32
    ),
    "int4": by_compressed_tensors("pack-quantized", **INT),
    "int4 channels": by_compressed_tensors(
        "pack-quantized", num_bits=4, type="int", strategy="channel"
    ),
    "int4 with zeros": by_compressed_tensors("pack-quantized", **INT, symmetric=False),
    "gptq 1": (gptq(1), GPTQ),
    "gptq 2": (gptq(2), {**GPTQ, "checkpoint_format": "gptq_v2"}),
    "gptq by activation": (gptq(1, by_activation=True), {**GPTQ, "desc_act": True}),
    "awq": (awq, AWQ),
}


# ---- checkpoints ----


def write_checkpoint(folder: Path, format: str, model: Any) -> Any:
    """Save the model quantised; what it stands for, as a plain model of transformers."""
    return write_quantised(folder, *FORMATS[format], model)


def write_quantised(folder: Path, writer: Writer, quantization: dict[str, Any], model: Any) -> Any:
    """Save the model as a writer stores its layers; what it stands for, as a plain model."""
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name, module in model.named_modules():
        is_inner = isinstance(module, nn.Linear) and "layers." in name and name[-4:] != "gate"
        if is_inner:
            stored, plain = writer(tensors.pop(f"{name}.weight").float())
            tensors |= {f"{name}.{last}": value.contiguous() for last, value in stored.items()}
            module.weight.data = plain
    for name in [name for name in tensors if ".experts." in name]:
        parent, _, last = name.rpartition(".")
        stored, plain = writer(tensors.pop(name).float())
        tensors |= {f"{parent}.{key}": value.contiguous() for key, value in stored.items()}
        experts, expert, part = parent.rsplit(".", 2)
        fused = model.get_submodule(experts)
        inner = plain.shape[0]
        if part == "down_proj":
            fused.down_proj.data[int(expert)] = plain
        else:
            first = inner if part == "up_proj" else 0
            fused.gate_up_proj.data[int(expert), first : first + inner] = plain
        assert last == "weight"
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    edit(folder, quantization_config=quantization)
    return model


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def dense() -> Any:
    return make_model("qwen3", num_hidden_layers=2, **SIZES).eval().requires_grad_(False)


def mixture() -> Any:
    options = {**EXPERTS, "head_dim": 16, "moe_intermediate_size": 32, "num_experts": 4}
    options |= {"hidden_size": 64, "num_hidden_layers": 2}
    return make_model("qwen3_moe", **options).eval().requires_grad_(False)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(TOKENS.to(model.device)).logits.cpu()


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.filterwarnings("ignore:The target is quantised")
@pytest.mark.parametrize("format", FORMATS)
def test_unpacks_what_is_published(tmp_path: Path, format: str) -> None:
    plain = write_checkpoint(tmp_path, format, dense())
    target = TargetModel.load(tmp_path, dtype=torch.float32)
    weights = dict(target.model.named_parameters())
    for name, parameter in plain.named_parameters():
        assert distance(weights[name], parameter) < 1e-6, name
    assert distance(logits(plain), logits(dense())) > 1e-3, "the numbers of the format show"


@pytest.mark.filterwarnings("ignore:The target is quantised")
@pytest.mark.parametrize("format", ["fp8 blocks", "fp8 tensors", "int4 with zeros", "awq"])
def test_experts_that_are_stored_apart(tmp_path: Path, format: str) -> None:
    plain = write_checkpoint(tmp_path, format, mixture())
    target = TargetModel.load(tmp_path, dtype=torch.float32)
    weights = dict(target.model.named_parameters())
    assert sum("experts" in name for name in weights) == 2 * 2
    for name, parameter in plain.named_parameters():
        assert distance(weights[name], parameter) < 1e-6, name


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("format", "make"),
    [*((f, dense) for f in FORMATS), *((f, mixture) for f in ("fp8 blocks", "fp8 tensors", "awq"))],
)
def test_layers_that_stay_packed(
    tmp_path: Path, format: str, make: Callable[[], Any], device: str
) -> None:
    expected = logits(write_checkpoint(tmp_path, format, make()))
    # In bfloat16 a router may choose another expert.
    dtype = torch.bfloat16 if device == "cuda" and make is dense else torch.float32
    model = load(tmp_path, device=device, unpack=False, dtype=dtype)
    bound = 1e-4 if dtype == torch.float32 else 5e-2
    assert distance(logits(model), expected) < bound
    stored = sum(p.numel() for name, p in model.named_parameters() if "layers." in name)
    assert stored < 3000, "norms and the router alone are plain"


def load(
    folder: Path,
    *,
    device: str = "cpu",
    unpack: bool = True,
    dtype: torch.dtype = torch.float32,
) -> Any:
    config = load_config(folder)
    found = quantization_of(config)
    assert found is not None
    return load_packed(folder, config, found, dtype, torch.device(device), unpack=unpack)


@pytest.mark.filterwarnings("ignore:The target is quantised")
def test_a_head_of_the_plain_target_fits(tmp_path: Path) -> None:
    dense().save_pretrained(tmp_path / "plain")
    write_checkpoint(tmp_path / "fp8", "fp8 blocks", dense())
    fingerprint = TargetFingerprint.of(TargetModel.load(tmp_path / "plain", dtype=torch.bfloat16))
    quantised = TargetModel.load(tmp_path / "fp8", dtype=torch.bfloat16)
    assert fingerprint.difference(quantised, "the head") == ""


def test_tells_that_it_unpacks(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "fp8 blocks", dense())
    with pytest.warns(UserWarning, match=r"quantised \(fp8\); on this device .* to float32"):
        TargetModel.load(tmp_path, dtype=torch.float32)


def write_gpt_oss(folder: Path) -> None:
    """Save a GPT-OSS of two layers, its experts packed."""
    options = {**ARCHITECTURES["gpt_oss"].options, "intermediate_size": 64}
    options |= {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    make_model("gpt_oss", **options).save_pretrained(folder)
    pack_experts(folder)


@pytest.mark.gpu
def test_packed_experts_of_gpt_oss_on_a_card(tmp_path: Path) -> None:
    write_gpt_oss(tmp_path)
    expected = logits(load(tmp_path, device="cuda"))
    assert distance(logits(load(tmp_path, device="cuda", unpack=False)), expected) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("unpack", [True, pytest.param(False, marks=needs_interpreter)])
def test_gpt_oss_is_as_transformers_unpacks_it(tmp_path: Path, unpack: bool) -> None:
    write_gpt_oss(tmp_path)
    unpacked = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=Mxfp4Config(dequantize=True), dtype=torch.float32
    )
    found = load(tmp_path, unpack=unpack)
    assert distance(logits(found), logits(unpacked)) < (1e-6 if unpack else 1e-4)
    names = [name for name, _ in found.named_parameters() if name.endswith("gate_up_proj")]
    assert bool(names) == unpack


@pytest.mark.filterwarnings("ignore:The target is quantised")
def test_is_generated_as_from_what_it_stands_for(tmp_path: Path) -> None:
    plain = write_checkpoint(tmp_path, "awq", dense())
    prompt = TOKENS[0].tolist()
    output = LLM(tmp_path, dtype="float32").generate(
        [prompt], SamplingParams(max_tokens=16, ignore_eos=True)
    )
    length = {"max_new_tokens": 16, "min_new_tokens": 16}
    expected = plain.generate(TOKENS, do_sample=False, **length)[0, len(prompt) :]
    assert output[0].outputs[0].token_ids == expected.tolist()


# ---- refusals ----


def change(folder: Path, alter: Callable[[Tensors], Any]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    alter(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


Q = "model.layers.0.self_attn.q_proj"
REFUSALS: list[tuple[str, Callable[[Tensors], Any], str]] = [
    ("fp8 blocks", lambda t: t.pop(f"{Q}.weight_scale_inv"), "without a scale"),
    (
        "fp8 blocks",
        lambda t: t.update({f"{Q}.weight_scale_inv": torch.ones(3, 2)}),
        r"q_proj.weight_scale_inv' as float32 of shape \[3, 2\]; expected .* of shape \[2, 2\] \(",
    ),
    ("fp8 blocks", lambda t: t.pop("model.norm.weight"), "lacks tensor 'model.norm.weight'"),
    ("fp8 blocks", lambda t: t.update({f"{Q}.weight": torch.ones(64, 64)}), "expected float8_e4m3"),
    ("gptq 1", lambda t: t.pop(f"{Q}.qzeros"), "lacks tensor .*qzeros"),
    (
        "gptq 1",
        lambda t: t.update({f"{Q}.qweight": torch.ones(4, 64, dtype=torch.int32)}),
        r"expected int32 of shape \[8, 64\]",
    ),
    (
        "gptq by activation",
        lambda t: t.update({f"{Q}.g_idx": torch.zeros(64, dtype=torch.int32)}),
        "different numbers of inputs into the groups; expected 32",
    ),
    (
        "int4",
        lambda t: t.update({f"{Q}.weight_g_idx": torch.zeros(64)}),
        "orders its inputs by activation",
    ),
    (
        "int8 channels",
        lambda t: t.update({f"{Q}.weight_zero_point": torch.ones(64, 1)}),
        "8 bits and zero points",
    ),
    (
        "int4",
        lambda t: t.update({f"{Q}.weight_scale": torch.ones(64, 5)}),
        r"q_proj.weight_scale' as float32 of shape \[64, 5\]; expected .* of shape \[64, 2\]",
    ),
]


@pytest.mark.parametrize(("format", "alter", "message"), REFUSALS)
def test_refusals(
    tmp_path: Path, format: str, alter: Callable[[Tensors], Any], message: str
) -> None:
    write_checkpoint(tmp_path, format, dense())
    change(tmp_path, alter)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def cannot_read(*_: Any) -> Any:
    raise AssertionError("a weight is read before all tensors are checked")


@pytest.mark.parametrize("format", ["fp8 blocks", "int4 with zeros", "gptq by activation"])
def test_every_tensor_is_checked_before_a_weight_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    write_checkpoint(tmp_path, format, dense())
    whole = load_file(tmp_path / "model.safetensors")
    with monkeypatch.context() as patched:
        for reader in ("read_linear", "read_mxfp4"):
            patched.setattr(f"peagle.models.packed_loading.{reader}", cannot_read)
        with pytest.raises(AssertionError, match="a weight is read"):
            load(tmp_path)
        last = "model.layers.1.mlp.down_proj."
        names = [name for name in whole if name.startswith(last)]
        assert len(names) >= 2
        for name in [*names, "model.norm.weight"]:
            changed = {**whole, name: whole[name].new_zeros(3, 5, 7)}
            save_file(changed, tmp_path / "model.safetensors", metadata={"format": "pt"})
            with pytest.raises(CheckpointError, match=rf"'{name}' as .*\[3, 5, 7\]; expected"):
                load(tmp_path)
    save_file(whole, tmp_path / "model.safetensors", metadata={"format": "pt"})
    load(tmp_path)


E = "model.layers.1.mlp.experts"
UNLIKE: list[tuple[str, Callable[[Tensors], Any], str]] = [
    (
        "fp8 tensors",
        lambda t: t.update(plain_instead(t, f"{E}.2.up_proj")),
        rf"'{E}.2.up_proj' as plain numbers, and '{E}.0.gate_proj' as fp8, a scale for 32 x 64; ",
    ),
    (
        "fp8 tensors",
        lambda t: t.update(plain_instead(t, f"{E}.0.down_proj")),
        rf"'{E}.1.down_proj' as fp8, .*, and '{E}.0.down_proj' as plain numbers",
    ),
    ("int4 with zeros", lambda t: t.pop(f"{E}.1.up_proj.weight_zero_point"), "zero_point'.* symm"),
    ("awq", lambda t: t.pop(f"{E}.3.down_proj.qzeros"), f"lacks tensor '{E}.3.down_proj.qzeros'"),
    ("awq", lambda t: drop(t, f"{E}.3.down_proj."), f"lacks tensor '{E}.3.down_proj.weight'"),
    ("awq", lambda t: t.update(another(t, 4)), rf"stores the expert '{E}.4.gate_proj'.* 4 experts"),
    (
        "awq",
        lambda t: t.update({f"{E}.0.up_proj.bias": torch.ones(32)}),
        f"has tensor '{E}.0.up_proj.bias'.* no bias",
    ),
]


def drop(tensors: Tensors, prefix: str) -> None:
    for name in [name for name in tensors if name.startswith(prefix)]:
        del tensors[name]


def plain_instead(tensors: Tensors, name: str) -> Tensors:
    shape = tensors[f"{name}.weight"].shape
    drop(tensors, f"{name}.")
    return {f"{name}.weight": torch.ones(shape)}


def another(tensors: Tensors, number: int) -> Tensors:
    """One more expert, equal to the first."""
    first = f"{E}.0."
    found = [name for name in tensors if name.startswith(first)]
    return {name.replace(first, f"{E}.{number}."): tensors[name].clone() for name in found}


@pytest.mark.parametrize("unpack", [True, False])
@pytest.mark.parametrize(("format", "alter", "message"), UNLIKE)
def test_experts_that_do_not_fit_each_other(
    tmp_path: Path, format: str, alter: Callable[[Tensors], Any], message: str, unpack: bool
) -> None:
    write_checkpoint(tmp_path, format, mixture())
    change(tmp_path, alter)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, unpack=unpack)


def test_experts_of_a_mixture_with_zeros_in_some(tmp_path: Path) -> None:
    """Symmetric settings leave the zero points to the file; some experts have them here."""
    write_checkpoint(tmp_path, "int4 with zeros", mixture())
    edit(tmp_path, quantization_config=FORMATS["int4"][1])
    load(tmp_path)
    change(tmp_path, lambda t: t.pop(f"{E}.1.up_proj.weight_zero_point"))
    with pytest.raises(
        CheckpointError, match=r"'.*experts\.1\.up_proj' as .*, and .* zero points; "
    ):
        load(tmp_path)


GPT_OSS = "model.layers.1.mlp.experts"
MXFP4_FAULTS: list[tuple[Callable[[Tensors], Any], str]] = [
    (lambda t: t.pop(f"{GPT_OSS}.down_proj_scales"), f"lacks {GPT_OSS}.down_proj_blocks or"),
    (lambda t: t.pop(f"{GPT_OSS}.gate_up_proj_blocks"), f"lacks {GPT_OSS}.gate_up_proj_blocks or"),
    (
        lambda t: t.update({f"{GPT_OSS}.down_proj_scales": torch.zeros(4, 3, 2).byte()}),
        rf"'{GPT_OSS}.down_proj_scales' as uint8 of shape \[4, 3, 2\]; expected uint8 of shape",
    ),
    (lambda t: t.pop(f"{GPT_OSS}.down_proj_bias"), f"lacks tensor '{GPT_OSS}.down_proj_bias'"),
]


@pytest.mark.parametrize(("alter", "message"), MXFP4_FAULTS)
def test_experts_of_gpt_oss_that_cannot_be(
    tmp_path: Path, alter: Callable[[Tensors], Any], message: str
) -> None:
    write_gpt_oss(tmp_path)
    change(tmp_path, alter)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("unpack", [True, pytest.param(False, marks=needs_interpreter)])
def test_projections_of_unlike_formats(tmp_path: Path, unpack: bool) -> None:
    """Of q/k/v two are int4 and one is FP8, and one of gate/up stays plain."""
    plain = dense()
    plain.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    writers = {"q_proj": "int4", "k_proj": "fp8 channels", "v_proj": "int4", "up_proj": "int4"}
    for name, module in plain.named_modules():
        if (format := writers.get(name.rpartition(".")[2])) is not None:
            stored, module.weight.data = FORMATS[format][0](tensors.pop(f"{name}.weight"))
            tensors |= {f"{name}.{last}": value for last, value in stored.items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    groups = {
        name: FORMATS[format][1]["config_groups"]["group_0"] | {"targets": [target]}
        for name, format, target in (("a", "int4", "Linear"), ("b", "fp8 channels", "re:.*k_proj"))
    }
    edit(tmp_path, quantization_config={**CT, "config_groups": groups})
    model = load(tmp_path, unpack=unpack)
    fuse(model)
    assert distance(logits(model), logits(plain)) < (1e-6 if unpack else 1e-4)


LM_HEAD_OUTPUTS = 320


@pytest.mark.parametrize("unpack", [True, False])
def test_a_quantised_lm_head_is_unpacked(tmp_path: Path, unpack: bool) -> None:
    model = dense()
    model.save_pretrained(tmp_path)
    stored, plain = awq(model.lm_head.weight)
    change(tmp_path, lambda t: (t.pop("lm_head.weight"), t.update(prefixed("lm_head", stored))))
    edit(tmp_path, quantization_config=AWQ)
    found = load(tmp_path, unpack=unpack).lm_head.weight
    assert found.shape == (LM_HEAD_OUTPUTS, 64) and distance(found, plain) < 1e-6
    edit(tmp_path, tie_word_embeddings=True)
    with pytest.raises(CheckpointError, match=r"'lm_head' quantised, .*tie_word_embeddings"):
        load(tmp_path)


def prefixed(name: str, tensors: Tensors) -> Tensors:
    return {f"{name}.{last}": value.contiguous() for last, value in tensors.items()}


def test_a_quantised_embedding_is_refused(tmp_path: Path) -> None:
    model = dense()
    write_checkpoint(tmp_path, "int8 channels", model)
    stored, _ = FORMATS["int8 channels"][0](model.model.embed_tokens.weight)
    change(tmp_path, lambda t: t.update(prefixed("model.embed_tokens", stored)))
    with pytest.raises(
        CheckpointError, match=r"'model.embed_tokens' quantised, of the class Embedding; "
    ):
        load(tmp_path)


def test_a_bias_that_the_layer_does_not_have(tmp_path: Path) -> None:
    """Some quantisers store a bias of zeros for every layer."""
    plain = write_checkpoint(tmp_path, "gptq 1", dense())
    change(tmp_path, lambda t: t.update({f"{Q}.bias": torch.zeros(64)}))
    assert distance(logits(load(tmp_path)), logits(plain)) < 1e-6
    change(tmp_path, lambda t: t.update({f"{Q}.bias": torch.ones(64)}))
    with pytest.raises(CheckpointError, match=f"has tensor '{Q}.bias', .* no bias"):
        load(tmp_path)


def test_a_file_that_is_cut(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "awq", dense())
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    for size in (0, 7, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"'.*model\.safetensors' is not readable as"):
            load(tmp_path)


def test_settings_of_the_decoder_of_a_larger_model(tmp_path: Path) -> None:
    """Where config.json has them in text_config."""
    found = ARCHITECTURES["gemma3, text and image"]
    make_model(found.model_type, **found.options).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["text_config"]["quantization_config"] = {**GPTQ, "bits": "4"}
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="has bits '4'; expected a whole number of bits"):
        TargetModel.load(tmp_path)


def test_refuses_methods_that_it_does_not_know(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "fp8 blocks", dense())
    edit(tmp_path, quantization_config={"quant_method": "hqq"})
    with pytest.raises(CheckpointError, match=r"quantised by 'hqq'; .*awq.* --engine vllm"):
        TargetModel.load(tmp_path)


def test_refuses_experts_ordered_by_activation(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "gptq by activation", mixture())
    with pytest.raises(CheckpointError, match="which peagle does not read of experts"):
        load(tmp_path)


def test_plain_weights_are_left_to_transformers(tmp_path: Path) -> None:
    model = dense()
    model.save_pretrained(tmp_path)
    assert quantization_of(load_config(tmp_path)) is None
    weights = dict(TargetModel.load(tmp_path).model.named_parameters())
    for name, parameter in AutoModelForCausalLM.from_pretrained(tmp_path).named_parameters():
        assert torch.equal(weights[name], parameter)
