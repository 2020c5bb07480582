"""The probe that an architecture passes to become a target.

A tiny random model of the real class runs over the paged cache and is compared with transformers'
eager attention, in float64 throughout. Controls show that the comparison would see a mistake.
"""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Mxfp4Config

from peagle.attention import Prepared, TorchAttention
from peagle.attention.torch_backend import DenseCausalAttention
from peagle.errors import CheckpointError
from peagle.models.architectures import SUPPORTED_MODEL_TYPES
from peagle.models.target import TargetModel
from tests.conftest import CONFIGS, byte_tokenizer
from tests.models.paging import LENS, Paged, largest_difference, make_sequences
from tests.models.tiny import EXPERTS, LOCAL, LOCAL_GLOBAL, TEXT_SIZES, VISION, make_model

WINDOW, SINKS, SOFTCAP, FINAL = "sliding_window", "sinks", "softcap", "final softcap"
ROPE = {"rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {**ROPE, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
GEMMA = {**LOCAL_GLOBAL, "query_pre_attn_scalar": 20, "final_logit_softcapping": 20.0}
GEMMA4 = {**LOCAL_GLOBAL, "global_head_dim": 16}
PER_LAYER_INPUT = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 320}


@dataclass(frozen=True)
class Architecture:
    """A tiny configuration, and the special ways of attending that it must bring up."""

    model_type: str
    options: dict[str, Any]
    special: set[str]
    kv_shapes: tuple[tuple[int, int], ...] = ((2, 8),) * 4


ARCHITECTURES = {
    **{kind: Architecture(kind, {"head_dim": 8}, set()) for kind in CONFIGS},
    "qwen2 with a window": Architecture(
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2},
        {WINDOW},
    ),
    "llama, heads not grouped": Architecture(
        "llama", {"num_key_value_heads": 4}, set(), ((4, 8),) * 4
    ),
    "llama, one kv head, tied": Architecture(
        "llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}, set(), ((1, 8),) * 4
    ),
    "linear rope": Architecture(
        "llama",
        {"rope_parameters": {"rope_theta": 10000.0, "factor": 4.0, "rope_type": "linear"}},
        set(),
    ),
    "yarn rope": Architecture(
        "qwen3", {"head_dim": 8, "rope_parameters": {**ROPE, "rope_type": "yarn"}}, set()
    ),
    "llama3 rope": Architecture("llama", {"rope_parameters": LLAMA3}, set()),
    "mistral": Architecture("mistral", LOCAL, {WINDOW}),
    "phi": Architecture("phi", {"partial_rotary_factor": 0.5, "qk_layernorm": True}, set()),
    "phi3": Architecture("phi3", {"sliding_window": 6}, {WINDOW}),
    "qwen3_moe": Architecture("qwen3_moe", {"num_experts": 4, **EXPERTS}, set()),
    "gpt_oss": Architecture(
        "gpt_oss", {**LOCAL_GLOBAL, "num_local_experts": 4, **EXPERTS}, {WINDOW, SINKS}
    ),
    "gemma2": Architecture(
        "gemma2", {**GEMMA, "attn_logit_softcapping": 5.0}, {WINDOW, SOFTCAP, FINAL}
    ),
    "gemma3, text": Architecture("gemma3_text", GEMMA, {WINDOW, FINAL}),
    "gemma3, text and image": Architecture(
        "gemma3",
        {"text_config": {**TEXT_SIZES, **GEMMA}, "vision_config": VISION},
        {WINDOW},  # it has a final softcap in its configuration and takes no notice of it
    ),
    "gemma4, shared keys": Architecture(
        "gemma4_text",
        {**GEMMA4, **PER_LAYER_INPUT, "num_kv_shared_layers": 2, "final_logit_softcapping": 20.0},
        {WINDOW, FINAL},
        ((2, 8), (2, 16)),
    ),
    "gemma4, experts, keys as values": Architecture(
        "gemma4_text",
        {
            **GEMMA4,
            **EXPERTS,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
        },
        {WINDOW},
        ((2, 8), (1, 16)) * 2,
    ),
    "gemma4, text and image": Architecture(
        "gemma4",
        {
            "text_config": {**TEXT_SIZES, **GEMMA4, **PER_LAYER_INPUT},
            "vision_config": {**VISION, "num_key_value_heads": 2, "head_dim": 8},
            "audio_config": None,
        },
        {WINDOW},
        ((2, 8), (2, 16)) * 2,
    ),
}
WITH_EXPERTS = ["qwen3_moe", "gpt_oss", "gemma4, experts, keys as values"]


@dataclass
class Probe:
    """One saved architecture, its sequences, and what transformers makes of them."""

    architecture: Architecture
    folder: Path
    sequences: list[list[int]]
    logits: list[Tensor]
    states: list[list[Tensor]]  # of each sequence; index i enters layer i

    def target(self) -> TargetModel:
        return TargetModel.load(self.folder, dtype=torch.float64)

    def after_prompts(self) -> list[Tensor]:
        return [logits[n:] for logits, n in zip(self.logits, LENS)]


@contextmanager
def float64_throughout() -> Iterator[None]:
    """Lifts the casts to float32 that softmax, routers and some norms have in transformers."""
    softmax, to_float32 = F.softmax, Tensor.float
    with (
        patch.object(F, "softmax", lambda x, dim=None, dtype=None, **_: softmax(x, dim=dim)),
        patch.object(Tensor, "float", lambda x: x if x.dtype == torch.float64 else to_float32(x)),
    ):
        yield


@pytest.fixture
def exactly() -> Iterator[None]:
    with float64_throughout():
        yield


def reference(folder: Path, dtype: torch.dtype = torch.float64) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    ).eval()


@pytest.fixture(scope="module")
def probes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Probe]:
    """probes(name) makes the probe of an architecture, once."""
    made: dict[str, Probe] = {}

    @torch.no_grad()
    def make(name: str) -> Probe:
        architecture, folder = ARCHITECTURES[name], tmp_path_factory.mktemp("target")
        make_model(architecture.model_type, **architecture.options).save_pretrained(folder)
        byte_tokenizer().save_pretrained(folder)
        model, sequences = reference(folder), make_sequences()
        with float64_throughout():
            outputs = [model(torch.tensor([s]), output_hidden_states=True) for s in sequences]
        return Probe(
            architecture,
            folder,
            sequences,
            [out.logits[0] for out in outputs],
            [[h[0] for h in out.hidden_states] for out in outputs],
        )

    return lambda name: made.setdefault(name, made.get(name) or make(name))


@pytest.fixture(params=ARCHITECTURES)
def probe(request: pytest.FixtureRequest, probes: Callable[[str], Probe]) -> Probe:
    return probes(request.param)


def test_every_supported_model_type_is_probed() -> None:
    assert {a.model_type for a in ARCHITECTURES.values()} == set(SUPPORTED_MODEL_TYPES)


def test_shared_keys_without_inputs_per_layer_are_refused() -> None:
    """transformers itself fails on more than one token of such a model."""
    options = {**GEMMA4, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 0}
    with pytest.raises(CheckpointError, match="num_kv_shared_layers 2 and hidden_size_per_layer"):
        TargetModel(make_model("gemma4_text", **options))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_target_that_gives_nan_is_told_so(value: float) -> None:
    model = make_model("mistral", **LOCAL)
    model.get_output_embeddings().weight.data[5] = value  # type: ignore[union-attr]
    with pytest.raises(CheckpointError, match="gives NaN or infinite logits for a single token"):
        TargetModel(model)


@pytest.mark.usefixtures("exactly")
def test_prefill_and_verify_equal_transformers(probe: Probe) -> None:
    target = probe.target()
    assert tuple(target.kv_shapes()) == probe.architecture.kv_shapes
    assert min(float(logits.std(0).max()) for logits in probe.logits) > 0.1, "logits must vary"
    paged = Paged(target, probe.sequences)
    logits, _, calls = paged.prefill()
    assert calls == target.num_layers, "every layer attends through us, once"
    assert largest_difference(logits, [e[:n] for e, n in zip(probe.logits, LENS)]) < 1e-10
    assert largest_difference(paged.verify(), probe.after_prompts()) < 1e-10
    # Drafts that were rejected are simply run over by the next tokens at their positions.
    assert largest_difference(paged.verify(), probe.after_prompts()) < 1e-10


@pytest.mark.usefixtures("exactly")
def test_aux_features_are_the_states_entering_the_layers(probe: Probe) -> None:
    target = probe.target()
    for ids in [(0,), (1, 2, 3), (0, 3)]:
        target.tap_aux(ids)
        _, features, _ = Paged(target, probe.sequences).prefill()
        found = [
            [torch.cat([h[i + shift] for i in ids], -1)[:n] for h, n in zip(probe.states, LENS)]
            for shift in (0, 1)
        ]
        assert largest_difference(features, found[0]) < 1e-10
        assert largest_difference(features, found[1]) > 1e-2, "an off-by-one would be seen"


@pytest.mark.usefixtures("exactly")
def test_whole_sequences_as_in_training_equal_transformers(probe: Probe) -> None:
    target = probe.target()
    longest = max(map(len, probe.sequences))
    rows = torch.tensor([s + [0] * (longest - len(s)) for s in probe.sequences])
    hidden, _ = target.forward(
        rows.flatten(), torch.arange(longest).repeat(len(rows)), DenseCausalAttention(len(rows))
    )
    logits = target.compute_logits(hidden).unflatten(0, rows.shape)
    found = [row[: len(s)] for row, s in zip(logits, probe.sequences)]
    assert largest_difference(found, probe.logits) < 1e-10


# ---- controls: mistakes that the probe must see ----


@pytest.mark.slow
@pytest.mark.parametrize("part", ["keys", "values"])
def test_a_corrupted_cache_fails_the_probe(probe: Probe, part: str) -> None:
    target = probe.target()
    for cache in range(len(target.kv_shapes())):
        paged = Paged(target, probe.sequences)
        paged.prefill()
        paged.corrupt(cache, part)
        for found, wanted in zip(paged.verify(), probe.after_prompts(), strict=True):
            assert float((found - wanted).abs().max()) > 1e-4, (cache, part)


@dataclass
class Forgetful:
    """Attention that takes no notice of one thing that the model asks for."""

    inner: Prepared
    forgets: str
    was_asked: bool = False

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        self.was_asked |= kwargs.get(self.forgets) is not None
        return self.inner(*args, **{**kwargs, self.forgets: None})


@pytest.mark.slow
@pytest.mark.parametrize("name", [WINDOW, SINKS, SOFTCAP, FINAL])
def test_each_special_way_of_attending_is_probed(
    probe: Probe, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = probe.target()
    asked: list[Forgetful] = []
    if name == FINAL:
        assert (target._final_softcap is not None) == (FINAL in probe.architecture.special)
        target._final_softcap = None
    else:
        prepare = TorchAttention.prepare

        def forgetful(self: TorchAttention, metadata: Any) -> Prepared:
            asked.append(Forgetful(prepare(self, metadata), name))
            return asked[-1]

        monkeypatch.setattr(TorchAttention, "prepare", forgetful)
    paged = Paged(target, probe.sequences)
    paged.prefill()
    difference = largest_difference(paged.verify(), probe.after_prompts())
    assert all(call.was_asked == (name in probe.architecture.special) for call in asked)
    assert (difference > 1e-4) == (name in probe.architecture.special)


# ---- mixtures of experts ----


@torch.no_grad()
@pytest.mark.parametrize("name", WITH_EXPERTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_run_as_transformers_chooses(
    probes: Callable[[str], Probe], name: str, dtype: torch.dtype
) -> None:
    probe = probes(name)
    model = AutoModelForCausalLM.from_pretrained(probe.folder, dtype=dtype).eval()
    theirs = [model(torch.tensor([s])).logits[0, n:] for s, n in zip(probe.sequences, LENS)]
    target = TargetModel.load(probe.folder, dtype=dtype)
    assert target.model.get_experts_implementation() == model.get_experts_implementation()
    paged = Paged(target, probe.sequences)
    paged.prefill()
    # In bfloat16 a token may go to another expert: as far from the truth as transformers' own is.
    errors = [
        float(torch.cat([f - w for f, w in zip(logits, probe.after_prompts())]).abs().mean())
        for logits in (paged.verify(), theirs)
    ]
    assert errors[0] < 2 * errors[1]
    assert errors[0] < (1e-6 if dtype == torch.float32 else 0.2), errors


def test_experts_avoid_what_knows_no_float64(probes: Callable[[str], Probe]) -> None:
    assert probes("qwen3_moe").target().model.get_experts_implementation() == {"": "eager"}


def pack_experts(folder: Path) -> None:
    """Rewrite expert weights as MXFP4, as gpt-oss is published: 32 values a scale, 2 a byte."""
    tensors, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = (experts, outputs, inputs // 32)
        options = {"generator": generator, "dtype": torch.uint8}
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), **options)
        tensors[f"{name}_scales"] = torch.randint(120, 127, shape, **options)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    others = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens"]
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [*others, "lm_head"],
    }
    (folder / "config.json").write_text(json.dumps(config))


@torch.no_grad()
def test_packed_experts_are_unpacked(tmp_path: Path) -> None:
    options = {**ARCHITECTURES["gpt_oss"].options, "intermediate_size": 64}
    make_model("gpt_oss", **options).save_pretrained(tmp_path)
    pack_experts(tmp_path)
    target = TargetModel.load(tmp_path, dtype=torch.float64)
    assert {p.dtype for p in target.model.parameters()} == {torch.float64}
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path,
        dtype=torch.float64,
        quantization_config=Mxfp4Config(dequantize=True),
        attn_implementation="eager",
        experts_implementation="eager",
    )
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.float64)
    sequences = make_sequences()
    expected = [model(torch.tensor([s])).logits[0, :n] for s, n in zip(sequences, LENS)]
    assert largest_difference(Paged(target, sequences).prefill()[0], expected) < 1e-10
