"""Models whose layers take few rows through Triton compute what they computed, in as few graphs.

On a CPU the kernels run under Triton's interpreter, whatever the size of a layer.
"""

import copy
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

from peagle.attention.torch_backend import DenseCausalAttention
from peagle.kernels.linear import skinny_linear
from peagle.models import skinny
from peagle.models.acceleration import accelerate_drafter, accelerate_target
from peagle.models.drafter import Drafter, DrafterConfig, DrafterMLP
from peagle.models.fusion import FusedLinear, FusedPart, fuse
from peagle.models.skinny import SkinnyFusedLinear, SkinnyLinear, SkinnySwiGLU, use_skinny
from peagle.models.target import TargetModel
from tests.conftest import HEAD_SIZES
from tests.models.tiny import make_model

pytest.importorskip("triton", reason="needs triton")
needs_interpreter = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="TRITON_INTERPRET is not 1"
)
LIMIT = 40
# One, part of a tile, a full tile, more than one; and beyond the limit.
ROWS = [1, 3, 16, 33, 70]
NUM_LAYERS = 2  # of the targets that run in Triton alone
TOLERANCES = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
SIZES = {"head_dim": 8}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Nothing traced yet."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of the products in Triton; compilers do not see this."""
    seen: list[int] = []
    real = skinny_linear._multiply

    def noted(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.append(x.shape[0])
        return real(x, *args, **kwargs)

    monkeypatch.setattr(skinny_linear, "_multiply", noted)
    return seen


def make_target(
    kind: str = "qwen3",
    dtype: torch.dtype = torch.float32,
    aux: tuple[int, ...] = (1, 3),
    **sizes: Any,
) -> Any:
    model: Any = make_model(kind, **{**SIZES, **sizes})
    return TargetModel(model.to(dtype), aux_layer_ids=aux)


def make_head(dtype: torch.dtype = torch.float32, **sizes: Any) -> Drafter:
    torch.manual_seed(0)
    options: dict[str, Any] = {
        **HEAD_SIZES,
        "vocab_size": 320,
        "draft_vocab_size": 320,
        "target_hidden_size": 32,
        "aux_layer_ids": (1, 2, 3),
        "mask_token_id": 1,
        "max_position_embeddings": 256,
    }
    return Drafter(DrafterConfig(**{**options, **sizes})).to(dtype).requires_grad_(False)


@torch.inference_mode()
def logits_of(target: Any, rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(rows)
    tokens = torch.randint(2, 300, (rows,), generator=generator).to(target.device)
    positions = torch.arange(rows, device=target.device)
    hidden, features = target.forward(tokens, positions, DenseCausalAttention(1))
    return torch.cat((target.compute_logits(hidden), features), dim=-1)


@torch.inference_mode()
def draft_of(head: Drafter, rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(rows)
    tokens = torch.randint(2, 300, (rows,), generator=generator)
    features = torch.randn(rows, head.config.feature_size, generator=generator)
    hidden = head.combine_features(features.to(head.fc.weight))

    def attend(_: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        groups = query.shape[-2] // key.shape[-2]
        return query + (key + value).repeat_interleave(groups, -2)

    return head.compute_logits(head(tokens, hidden, torch.arange(rows), attend))


def check(found: Tensor, expected: Tensor, factor: float = 4.0) -> None:
    assert found.dtype == expected.dtype and found.shape == expected.shape
    error = (found.double() - expected.double()).norm() / expected.double().norm()
    assert error <= factor * TOLERANCES[found.dtype]


@needs_interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_a_target_computes_the_same(kind: str, dtype: torch.dtype, calls: list[int]) -> None:
    target = make_target(kind, dtype, (1,), hidden_size=64, num_hidden_layers=NUM_LAYERS)
    expected = {rows: logits_of(target, rows) for rows in ROWS}
    names = {name: x.clone() for name, x in target.model.state_dict().items()}
    fuse(target.model)
    # q/k/v, o, gate/up, down and SwiGLU of every layer, and lm_head.
    assert use_skinny(target.model, max_rows=LIMIT) == NUM_LAYERS * 5 + 1
    assert use_skinny(target.model, max_rows=LIMIT) == 0
    for name, tensor in target.model.state_dict().items():
        assert torch.equal(names.pop(name), tensor)
    assert not names
    for rows in ROWS:
        calls.clear()
        check(logits_of(target, rows), expected[rows])
        assert calls == ([rows] * (NUM_LAYERS * 4 + 1) if rows <= LIMIT else [])


@needs_interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_drafter_computes_the_same(dtype: torch.dtype, calls: list[int]) -> None:
    head = make_head(dtype)
    expected = {rows: draft_of(head, rows) for rows in ROWS}
    # q/k/v, o, gate/up, down and SwiGLU of two layers, fc and lm_head.
    assert use_skinny(head, max_rows=LIMIT) == 2 * 5 + 2
    assert use_skinny(head, max_rows=LIMIT) == 0
    for rows in ROWS:
        calls.clear()
        check(draft_of(head, rows), expected[rows])
        assert calls == ([rows] * (2 * 4 + 2) if rows <= LIMIT else [])


@pytest.mark.slow
@needs_interpreter
def test_accelerated_models_compute_the_same(calls: list[int]) -> None:
    """Compiled for the few rows of steps, a vector and a tile; 33 and 70 are of any size."""
    sizes = [1, 5]
    # Layers 0 and 2 are of one kind, a tap stands before layer 1.
    target, head = make_target(aux=(1,), num_hidden_layers=3), make_head()
    rows_run = [*sizes, 33, 70]
    expected = {rows: (logits_of(target, rows), draft_of(head, rows)) for rows in rows_run}
    compiled = [
        accelerate_target(target, sizes, backend="eager", max_skinny_rows=LIMIT),
        accelerate_drafter(
            head,
            sizes,
            num_feature_rows=sizes,
            num_logit_rows=sizes,
            backend="eager",
            max_skinny_rows=LIMIT,
        ),
    ]
    for rows in rows_run:
        calls.clear()
        check(logits_of(target, rows), expected[rows][0])
        num_of_target = len(calls)
        check(draft_of(head, rows), expected[rows][1])
        # In a graph of any size there is none; the target's lm_head is in no graph.
        in_graph, outside = ((3 * 4, 2 * 4), (1, 2)) if rows in sizes else ((0, 0), (1, 0))
        if rows > LIMIT:
            outside = (0, 0)
        assert num_of_target == in_graph[0] + outside[0]
        assert len(calls) - num_of_target == in_graph[1] + outside[1]
    assert not any(x.left for x in compiled)
    assert not counters["graph_break"]
    graphs = counters["stats"]["unique_graphs"]
    for rows in [*sizes, 71, 17, 65]:
        logits_of(target, rows)
        draft_of(head, rows)
    assert counters["stats"]["unique_graphs"] == graphs


@pytest.mark.slow
@needs_interpreter
def test_an_accelerated_head_reads_the_same() -> None:
    """Keys and values alone, of any number of rows, in one graph."""
    head = make_head()

    def attend(_: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return query + (key + value).repeat_interleave(2, -2)

    def read(rows: int) -> list[Tensor]:
        written: list[Tensor] = []
        hidden = torch.randn(rows, 32, generator=torch.Generator().manual_seed(rows))
        positions = torch.arange(rows)
        last = head.read(
            positions + 2, hidden, positions, attend, lambda *kv: written.extend(kv[1:])
        )
        return [*written, last]

    expected = {rows: read(rows) for rows in (3, 33, 70)}
    accelerate_drafter(head, [1], backend="eager", max_skinny_rows=LIMIT)
    read(9)
    graphs = counters["stats"]["unique_graphs"]
    for rows, tensors in expected.items():
        for found, wanted in zip(read(rows), tensors, strict=True):
            check(found, wanted)
    assert counters["stats"]["unique_graphs"] == graphs > 0
    assert not counters["graph_break"]


@pytest.mark.slow
@needs_interpreter
def test_graphs_of_any_size_leave_all_to_the_library(calls: list[int]) -> None:
    target = make_target()
    fuse(target.model)
    use_skinny(target.model, max_rows=64)
    decoder: Any = target.model.get_decoder()
    mlp = decoder.layers[0].mlp
    expected = {rows: mlp(torch.ones(1, rows, 32)) for rows in (65, 7)}
    calls.clear()
    compiled = torch.compile(mlp.forward, fullgraph=True, dynamic=True, backend="eager")
    for rows in (65, 100, 512, 1000, 4096, 64, 17, 7, 2):
        out = compiled(torch.ones(1, rows, 32))
        assert counters["stats"]["unique_graphs"] == 1
        if rows in expected:
            check(out, expected[rows])
    assert not calls


@pytest.mark.slow
@needs_interpreter
def test_equal_layers_share_a_graph() -> None:
    """Traced as Inductor has it too, kernels included."""
    target = make_target()
    expected = logits_of(target, 4)
    accelerate_target(target, [4], backend="aot_eager", max_skinny_rows=64)
    check(logits_of(target, 4), expected)
    shared = counters["stats"]["unique_graphs"]
    assert shared <= 4  # a layer, with or without a tap before it; norm; angles
    check(logits_of(target, 4), expected)
    assert counters["stats"]["unique_graphs"] == shared


class Like(nn.Module):
    """An MLP with a change."""

    def __init__(self, change: str = "", bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.change = change
        self.fused_gate_up_proj = FusedLinear([nn.Linear(16, 24, bias=bias) for _ in range(2)])
        self.gate_proj = FusedPart(self.fused_gate_up_proj, 0)
        self.up_proj = FusedPart(self.fused_gate_up_proj, 1)
        self.down_proj = nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        if self.change == "swapped":
            gate, up = up, gate
        if self.change == "limited":
            up = up.clamp(-7, 7)
        activation = F.gelu if self.change == "gelu" else F.silu
        x = self.down_proj(activation(gate) * up)
        return x * 1.1 if self.change == "scaled" else x


@needs_interpreter
def test_only_swiglu_is_taken_for_it() -> None:
    x = torch.randn(3, 16)
    mlp = Like()
    expected = mlp(x)
    assert use_skinny(mlp, max_rows=8) == 3
    assert isinstance(mlp, SkinnySwiGLU) and isinstance(mlp, Like)
    check(mlp(x), expected)
    for changed in (Like("swapped"), Like("limited"), Like("gelu"), Like("scaled"), Like("", True)):
        expected = changed(x)
        assert use_skinny(changed, max_rows=8) == 2
        assert type(changed) is Like
        check(changed(x), expected)
        assert changed.fused_gate_up_proj.is_idle


@needs_interpreter
def test_a_module_that_then_differs_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skinny, "skinny_swiglu", lambda x, weight: x.new_zeros(len(x), 24))
    mlp = Like()
    assert use_skinny(mlp, max_rows=8) == 2
    assert type(mlp) is Like and not hasattr(mlp, "skinny_swiglu_rows")


def test_nothing_changes_on_a_cpu_by_itself() -> None:
    head = make_head(torch.bfloat16)
    assert use_skinny(head) == 0
    assert type(head.fc) is nn.Linear and type(head.layers[0].mlp) is DrafterMLP


@pytest.mark.gpu
@pytest.mark.parametrize("max_rows", [None, 64])
def test_a_compiled_target_on_a_card(max_rows: int | None) -> None:
    """`None` leaves such small layers alone."""
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "head_dim": 64, "vocab_size": 4096}
    model: Any = make_model("qwen3", **sizes)
    model.to("cuda", torch.bfloat16)
    plain = TargetModel(copy.deepcopy(model), aux_layer_ids=(1, 3))
    target = TargetModel(model, aux_layer_ids=(1, 3))
    accelerate_target(target, [1, 3, 8, 16, 33], max_skinny_rows=max_rows)
    changed = [x for x in target.model.modules() if isinstance(x, SkinnyLinear | SkinnyFusedLinear)]
    assert len(changed) == (0 if max_rows is None else 4 * 4 + 1)
    for rows in [*ROWS, 8]:
        check(logits_of(target, rows), logits_of(plain, rows), factor=1.0)


@pytest.mark.gpu
def test_large_layers_on_a_card_and_in_a_graph() -> None:
    sizes = {"hidden_size": 2048, "intermediate_size": 6144, "draft_vocab_size": 4096}
    sizes |= {"vocab_size": 4096, "num_attention_heads": 32, "num_kv_heads": 8, "head_dim": 64}
    head = make_head(torch.bfloat16, **sizes).to("cuda")
    mlp: Any = head.layers[0].mlp
    plain = copy.deepcopy(mlp)
    assert use_skinny(head) > 0
    assert isinstance(mlp, SkinnySwiGLU) and isinstance(head.lm_head, SkinnyLinear)
    for rows in [*ROWS, 8]:
        x = torch.randn(rows, 2048, device="cuda", dtype=torch.bfloat16)
        with torch.inference_mode():
            expected = plain(x)
            check(mlp(x), expected)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = mlp(x)
            graph.replay()
            check(out, expected)
