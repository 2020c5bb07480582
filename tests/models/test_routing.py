"""Routing is recorded as the routers chose it, whether layers are compiled or not."""

from typing import Any

import pytest
import torch
from torch import Tensor

from peagle.attention.torch_backend import DenseCausalAttention
from peagle.models.acceleration import accelerate_target
from peagle.models.routing import num_experts_of, record_routing
from peagle.models.target import TargetModel
from tests.models.test_architectures import ARCHITECTURES, WITH_EXPERTS
from tests.models.tiny import make_model

TOKENS = torch.arange(20, 31)


def make_target(name: str) -> TargetModel:
    found = ARCHITECTURES[name]
    return TargetModel(make_model(found.model_type, **found.options), aux_layer_ids=(1, 3))


@torch.inference_mode()
def run(target: TargetModel) -> tuple[Tensor, Tensor]:
    attend = DenseCausalAttention(1)
    return target.forward(TOKENS, torch.arange(len(TOKENS)), attend)


def routers(target: TargetModel) -> list[Any]:
    return [m for m in target.model.modules() if type(m).__name__.endswith("Router")]


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_what_the_routers_chose(name: str) -> None:
    """The reference is the output of each router, which its own hook reads."""
    target = make_target(name)
    seen: list[Tensor] = []

    def watch(module: Any, args: Any, output: Any) -> None:
        seen.append(next(part for part in output if part.dtype == torch.int64))

    hooks = [router.register_forward_hook(watch) for router in routers(target)]
    assert len(hooks) == 4 and num_experts_of(target) == 4
    with record_routing(target) as chosen:
        run(target)
        assert len(chosen) == len(seen) == 4
        assert all(found.equal(expected) for found, expected in zip(chosen, seen))
        assert chosen[0].shape == (len(TOKENS), 2)
    run(target)
    assert len(chosen) == 4 and len(seen) == 8, "nothing is recorded afterwards"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_compiled_layers_record_too_and_are_compiled_again_afterwards(name: str) -> None:
    target = make_target(name)
    with record_routing(target) as expected:
        run(target)
    torch._dynamo.reset()
    compiled = accelerate_target(target, [len(TOKENS)], backend="eager")
    before = run(target)
    with record_routing(target) as chosen:
        assert compiled.is_suspended
        during = run(target)
    assert [one.tolist() for one in chosen] == [one.tolist() for one in expected]
    assert not compiled.is_suspended and not compiled.left
    for after in (during, run(target)):
        assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(before, after))
    assert len(chosen) == 4


def test_dense_models_have_none() -> None:
    target = make_target("qwen3")
    with record_routing(target) as chosen:
        run(target)
    assert not chosen and num_experts_of(target) == 0
