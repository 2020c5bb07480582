"""Routers of transformers' mixtures in one kernel: those that are known, and no others."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from peagle.models.routers import OneKernelRouter, is_among_chosen, use_routers

pytest.importorskip("triton", reason="needs triton")
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}


def make_model(model_type: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SIZES, **settings)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


QWEN = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 3}
GPT_OSS = {"num_local_experts": 8, "num_experts_per_tok": 3}


@pytest.mark.parametrize(
    ("model_type", "settings", "among_chosen"),
    [
        ("qwen3_moe", {**QWEN, "norm_topk_prob": True}, True),
        ("qwen3_moe", {**QWEN, "norm_topk_prob": False}, False),
        ("gpt_oss", GPT_OSS, True),
    ],
)
def test_known_routers_choose_as_before(
    model_type: str, settings: dict[str, Any], among_chosen: bool
) -> None:
    model = make_model(model_type, **settings)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    plain = copy.deepcopy(model)
    assert use_routers(model) == 2
    assert use_routers(model) == 0
    routers = [m for m in model.modules() if isinstance(m, OneKernelRouter)]
    assert [router.among_chosen for router in routers] == [among_chosen] * 2
    assert len({type(router) for router in routers}) == 1
    before = [m for m in plain.modules() if is_router(m)]
    x = torch.randn(9, 32)
    for router, other in zip(routers, before, strict=True):
        for found, expected in zip(router(x), other(x), strict=True):
            torch.testing.assert_close(found.double(), expected.double(), rtol=1e-5, atol=1e-6)
    ids = torch.randint(64, (1, 12))
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, plain(ids).logits, rtol=1e-4, atol=1e-5)


def is_router(module: nn.Module) -> bool:
    return type(module).__name__.endswith("TopKRouter")


class Scaled(nn.Module):
    """A router that computes something else."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.top_k, self.factor = 2, factor
        self.weight = nn.Parameter(torch.randn(8, 16))

    def forward(self, x: torch.Tensor) -> Any:
        logits = x @ self.weight.mT
        top, index = (logits * self.factor).softmax(-1).topk(self.top_k)
        return logits, top, index


def test_other_routers_stay() -> None:
    assert is_among_chosen(Scaled(1.0)) is False
    for factor in (2.0, -1.0):
        model = nn.Sequential(Scaled(factor))
        assert use_routers(model) == 0
        assert type(model[0]) is Scaled


def test_a_layer_with_its_own_norm_stays() -> None:
    gemma = make_model(
        "gemma4_text",
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=32,
        enable_moe_block=True,
        vocab_size_per_layer_input=64,
        hidden_size_per_layer_input=0,
        global_head_dim=16,
    )
    assert use_routers(gemma) == 0
