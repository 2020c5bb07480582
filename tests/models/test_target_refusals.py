"""Architectures that may not be a target: the reason given is the one that the probe finds."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from peagle.errors import CheckpointError
from peagle.models import architectures
from peagle.models.architectures import REFUSED_MODEL_TYPES
from peagle.models.target import TargetModel
from tests.models.paging import LENS, Paged, largest_difference, make_sequences
from tests.models.tiny import LOCAL_GLOBAL, TEXT_SIZES, make_model

LINEAR_ATTENTION = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
QWEN_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "num_key_value_heads": 4,
}
FALCON_H1 = {
    "mamba_d_ssm": 32,
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
}
STATE_SPACE = {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 2}
JAMBA = {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_d_state": 8}
CONV = {"layer_types": ["conv", "full_attention"] * 2}
MINIMAX = {"num_local_experts": 4, "head_dim": 8, "block_size": 4}
GPT = {"n_embd": 32, "n_layer": 4, "n_head": 4}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}

CALLED_BY = "attention is called by layers"
# Model type: options, and what the probe says. None: only the numbers tell.
REFUSED: dict[str, tuple[dict[str, Any], str | None]] = {
    "mamba": ({"state_size": 8}, f"{CALLED_BY} [],"),
    "mamba2": (STATE_SPACE, f"{CALLED_BY} [],"),
    "jamba": ({**JAMBA, "use_mamba_kernels": False}, f"{CALLED_BY} [1, 3],"),
    "lfm2": (CONV, f"{CALLED_BY} [1, 3],"),
    "minimax": (MINIMAX, f"{CALLED_BY} [0, 2],"),
    "qwen3_next": ({"head_dim": 8, **QWEN_EXPERTS, **LINEAR_ATTENTION}, f"{CALLED_BY} [3],"),
    "recurrent_gemma": ({"lru_width": 32, "attention_window_size": 16}, f"{CALLED_BY} [2],"),
    "falcon_h1": (FALCON_H1, None),
    "t5": (T5, "it is an encoder-decoder"),
    "gpt2": (GPT, "its decoder has no list of layers"),
    "bloom": ({"n_layer": 4, "n_head": 4}, "its decoder has no list of layers"),
    "stablelm": ({}, "runs only inside peagle"),
    "deepseek_v3": (LATENT, "keys and values of layer 0 differ in size"),
    "cohere": ({"logit_scale": 0.5}, "after lm_head"),
    "granite": ({"logits_scaling": 2.0}, "after lm_head"),
}


def refused_model(model_type: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A tiny model of a refused type, with the list of types lifted so that the probe runs."""
    monkeypatch.setattr(architectures, "SUPPORTED_MODEL_TYPES", (model_type,))
    auto = AutoModelForSeq2SeqLM if model_type == "t5" else AutoModelForCausalLM
    return make_model(model_type, auto, **REFUSED[model_type][0]).eval()


def test_every_reason_is_probed() -> None:
    assert set(REFUSED) == set(REFUSED_MODEL_TYPES)


@pytest.mark.parametrize("model_type", REFUSED)
def test_the_refusal_names_type_reason_and_what_is_supported(
    model_type: str, tmp_path: Path
) -> None:
    AutoConfig.for_model(model_type).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        TargetModel.load(tmp_path)
    message = str(caught.value)
    assert f"is of model type '{model_type}', {REFUSED_MODEL_TYPES[model_type]}; " in message
    assert "supported: llama, qwen2, qwen3, qwen3_moe, mistral, phi, phi3, gpt_oss" in message


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [name for name, (_, found) in REFUSED.items() if found])
def test_the_probe_refuses(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = refused_model(model_type, monkeypatch)
    with pytest.raises(CheckpointError) as caught:
        TargetModel(model)
    assert str(REFUSED[model_type][1]) in str(caught.value)
    assert f"{type(model).__name__} cannot be a target" in str(caught.value)


@torch.no_grad()
def test_a_state_beside_attention_shows_in_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    model, sequences = refused_model("falcon_h1", monkeypatch), make_sequences()
    expected = [model(torch.tensor([s]), use_cache=False).logits[0] for s in sequences]
    prompts, _, _ = Paged(TargetModel(model), sequences).prefill()
    assert largest_difference(prompts, [e[:n] for e, n in zip(expected, LENS)]) > 1e-2


# ---- supported types whose layers are not as they should be ----


class Passing(nn.Module):
    """A decoder layer without attention."""

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
        return hidden_states


def test_a_layer_that_never_attends_is_refused() -> None:
    model: Any = make_model("llama")
    model.model.layers[2] = Passing()
    with pytest.raises(CheckpointError, match=r"layers \[0, 1, 3\], expected 0 to 3 once each"):
        TargetModel(model)


def test_attention_that_looks_ahead_is_refused() -> None:
    model = make_model("gemma3_text", **LOCAL_GLOBAL, use_bidirectional_attention=True)
    with pytest.raises(CheckpointError, match="the attention of layer 0 looks ahead"):
        TargetModel(model)


# ---- RoPE ----

ORIGINAL, LONGEST = 64, 256
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 5.0, 7.0],
    "original_max_position_embeddings": ORIGINAL,
}


def longrope_model(model_type: str) -> Any:
    options = {"rope_parameters": LONGROPE, "original_max_position_embeddings": ORIGINAL}
    return make_model(model_type, **options, attn_implementation="eager").double().eval()


def logits_of(target: TargetModel, tokens: list[int], split: int) -> torch.Tensor:
    """Logits of one sequence, run in two passes that meet at `split`."""
    paged = Paged(target, [tokens])
    first, _, _ = paged.run([0], [split])
    rest, _, _ = paged.run([split], [len(tokens) - split])
    return torch.cat((first[0], rest[0]))


@torch.no_grad()
@pytest.mark.parametrize("model_type", ["phi3", "llama"])
@pytest.mark.parametrize(("limit", "length"), [(ORIGINAL, 60), (LONGEST, 80), (None, 80)])
def test_longrope_is_fixed_by_the_longest_context(
    model_type: str, limit: int | None, length: int
) -> None:
    tokens = torch.randint(2, 300, (length,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = longrope_model(model_type)(torch.tensor([tokens]), use_cache=False).logits[0]
    target = TargetModel(longrope_model(model_type))
    if limit is not None:
        target.fix_rope(LONGEST)  # whatever was chosen before
        target.fix_rope(limit)
    # The first pass ends before the switching point: transformers would take the short factors.
    assert float((logits_of(target, tokens, split=50) - expected).abs().max()) < 1e-5
    target.fix_rope(ORIGINAL if limit != ORIGINAL else LONGEST)
    assert float((logits_of(target, tokens, split=50) - expected).abs().max()) > 1e-3


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_rope_that_looks_at_the_batch_is_refused_in_any_layer(
    rope_type: str, tmp_path: Path
) -> None:
    rope = {layer: {"rope_type": "default"} for layer in set(LOCAL_GLOBAL["layer_types"])}
    config = AutoConfig.for_model("gemma3_text", **TEXT_SIZES, **LOCAL_GLOBAL)
    config.rope_parameters = {**rope, "full_attention": {**LONGROPE, "rope_type": rope_type}}
    with pytest.raises(CheckpointError, match=f"RoPE type '{rope_type}', whose angles depend"):
        architectures.check_architecture(config)
