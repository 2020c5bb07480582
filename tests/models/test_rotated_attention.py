"""Attention whose norms and rotation are one kernel, against transformers' own modules."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaAttention

from peagle.models.fusion import fuse
from peagle.models.rotated_attention import RotatedAttention, use_rotation
from peagle.models.target import TargetModel
from tests.kernels.devices import INTERPRETED
from tests.models.paging import largest_difference
from tests.models.test_fusion import MODELS, make_target
from tests.models.test_packed_layers import passes

pytest.importorskip("triton", reason="needs triton")
pytestmark = pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET is not 1")

# All four layers of these change; the attention of others does more, or something else.
ROTATED = {
    *("llama", "llama, biases, tied", "llama, heads not grouped", "llama, one kv head, tied"),
    *("linear rope", "yarn rope", "llama3 rope", "qwen2", "qwen2 with a window"),
    *("qwen3", "qwen3_moe", "qwen3_moe, some dense"),
}


def rotated(target: TargetModel) -> int:
    return sum(isinstance(module, RotatedAttention) for module in target.model.modules())


@pytest.mark.parametrize("name", MODELS)
def test_computes_what_the_module_did(name: str) -> None:
    target = make_target(name, torch.float32)
    fuse(target.model)
    before = passes(target)
    count = use_rotation(target.model)
    assert count == rotated(target) == (4 if name in ROTATED else 0)
    assert use_rotation(target.model) == 0
    assert largest_difference(passes(target), before) < 1e-4


class ScaledLate(LlamaAttention):
    """Attention that does more from position 100 on."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        late = kwargs["position_ids"].unsqueeze(-1) >= 100
        return super().forward(hidden_states * (1 + late), *args, **kwargs)


def test_modules_that_depend_on_the_position_stay() -> None:
    target = make_target("llama", torch.float32)
    fuse(target.model)
    decoder: Any = target.model.get_decoder()
    decoder.layers[0].self_attn.__class__ = ScaledLate
    assert use_rotation(target.model) == 3


def test_float64_keeps_its_precision() -> None:
    target = make_target("llama")
    fuse(target.model)
    assert use_rotation(target.model) == 0
