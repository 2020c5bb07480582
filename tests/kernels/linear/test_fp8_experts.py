"""Experts over FP8 activations, against plain torch on the same numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.kernels.linear import experts as experts_module
from peagle.kernels.linear.experts import (
    ExpertWeights,
    Gate,
    GroupedConfig,
    choose_fp8_config,
    experts_in_fp8,
    grouped_product,
    plan_tiles,
    run_experts,
    run_experts_reference,
    uses_fp8,
)
from peagle.kernels.linear.fp8_activations import FP8, quantise, tiled_inputs
from peagle.kernels.linear.fp8_linear import fits_fp8
from peagle.kernels.linear.packed_weights import PackedWeight, make_fp8, pack_fp8
from tests.kernels.compile_for_card import SHARED_BYTES
from tests.kernels.devices import FP8_DEVICES, INTERPRETED, WITHOUT_FP8, compile_for_card
from tests.kernels.gluon_in_torch import launcher_of
from tests.kernels.linear.test_fp8_linear import quantise_in_torch

pytest.importorskip("triton", reason="needs triton")
SILU = Gate("silu")


@pytest.fixture
def exact_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        monkeypatch.setattr(experts_module, "quantise", quantise_in_torch)


def make_weight(experts: int, n: int, k: int, device: str) -> PackedWeight:
    """A weight as a checkpoint stores it, with scales that differ and every sign and exponent."""
    q = (torch.randn(experts, n, k) * torch.logspace(-3, 2, n)[:, None]).to(FP8)
    scale = torch.rand(experts, n // 128, k // 128).add(0.5) / (60 * k**0.5)
    return make_fp8(q.to(device), scale.to(device), (128, 128))


def make_experts(experts: int, hidden: int, inner: int, device: str) -> ExpertWeights:
    up = pack_fp8(torch.randn(experts, 2 * inner, hidden) / hidden**0.5, (128, 128))
    down = pack_fp8(torch.randn(experts, hidden, inner) / inner**0.5, (128, 128))
    up, down = (replace(w, data=w.data.to(device), scale=_on(w.scale, device)) for w in (up, down))
    return ExpertWeights(up, down, SILU, fp8_activations=True)


def _on(scale: Tensor | None, device: str) -> Tensor:
    assert scale is not None
    return scale.to(device)


def make_tokens(tokens: int, experts: int, chosen: int, hidden: int, device: str) -> Any:
    """States, the experts of each token and their weights; the first experts get most tokens, and
    the last one of several none.
    """
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    odds = torch.logspace(0, -2, max(experts - 1, 1)).expand(tokens, -1)
    index = torch.multinomial(odds, chosen)
    x, weights = torch.randn(tokens, hidden), torch.rand(tokens, chosen)
    return x.to(device, dtype), index.to(device), weights.to(device, dtype)


def products(x: Tensor, weight: PackedWeight, index_S: Tensor) -> Tensor:
    """W[expert of s] x[s // chosen] in float64, one expert after the other."""
    matrices = weight.unpack(torch.float64)
    rows = x.double().repeat_interleave(len(index_S) // len(x), 0)
    out = rows.new_empty(len(rows), weight.num_outputs)
    for expert in index_S.unique().tolist():
        out[index_S == expert] = F.linear(rows[index_S == expert], matrices[expert])
    return out


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def test_weights_lie_in_the_order_of_tiled_inputs() -> None:
    """Every number of e4m3 at every place of a word."""
    order = tiled_inputs(256)
    assert sorted(order.tolist()) == list(range(256))
    q = (torch.arange(256)[:, None] + 3 * torch.arange(256)).to(torch.uint8)
    tiles = make_fp8(q.view(FP8), torch.ones(1, 1), (256, 256)).data
    assert torch.equal(tiles.transpose(1, 2).reshape(256, 256), q[:, order])


CUTS = [
    *(choose_fp8_config(rows, 1) for rows in (12, 32, 33)),
    GroupedConfig(16, 32, 128, 1, 4, 4, kind="warpgroup", split_k=2),
    GroupedConfig(128, 64, 128, 1, 8, 2, kind="warpgroup"),
]


@pytest.mark.parametrize("device", FP8_DEVICES)
@pytest.mark.parametrize("config", CUTS, ids=str)
@pytest.mark.parametrize("gate", [None, SILU], ids=str)
@pytest.mark.parametrize(
    ("tokens", "experts", "chosen", "n", "k"),
    [(1, 1, 1, 256, 128), (7, 5, 3, 256, 640), (41, 16, 4, 768, 128)],
)
def test_products_of_the_same_numbers(
    monkeypatch: pytest.MonkeyPatch,
    tokens: int,
    experts: int,
    chosen: int,
    n: int,
    k: int,
    gate: Gate | None,
    config: GroupedConfig,
    device: str,
) -> None:
    torch.manual_seed(tokens)
    weight = make_weight(experts, n, k, device)
    x, index, _ = make_tokens(tokens, experts, chosen, k, device)
    index_S, rows = index.view(-1), quantise(x, is_tiled=True)
    plan = plan_tiles(index_S, experts, config.block_m)
    if device == "cpu":
        in_torch = launcher_of("peagle.kernels.linear.packed_gluon", "packed_kernel")
        monkeypatch.setattr(experts_module, "launch", in_torch)
    found = grouped_product(
        rows, weight, None, gate, index_S=index_S, plan=plan, chosen=chosen, config=config
    )
    expected = products(rows.dequantise(), weight, index_S)
    expected = SILU(expected) if gate else expected
    assert found.dtype == torch.bfloat16
    # The matrix unit adds numbers of FP8 with fewer bits, and gate and up are rounded before SiLU.
    assert distance(found, expected) < (1e-2 if gate else 6e-3)


@pytest.mark.usefixtures("exact_rounding")
@pytest.mark.parametrize("device", FP8_DEVICES)
@pytest.mark.parametrize(
    ("tokens", "experts", "chosen", "hidden", "inner"),
    [
        (1, 1, 1, 128, 128),
        (5, 4, 2, 384, 128),
        (45, 16, 4, 128, 256),
        pytest.param(97, 2, 1, 256, 384, marks=pytest.mark.slow),
        pytest.param(300, 3, 2, 512, 128, marks=pytest.mark.slow),
    ],
)
def test_experts_with_fp8_activations(
    tokens: int, experts: int, chosen: int, hidden: int, inner: int, device: str
) -> None:
    torch.manual_seed(tokens)
    layer = make_experts(experts, hidden, inner, device)
    x, index, weights = make_tokens(tokens, experts, chosen, hidden, device)
    index_S = index.view(-1)
    found = experts_in_fp8(x, index_S, layer, chosen)
    inner_SI = SILU(products(quantise_in_torch(x).dequantise(), layer.gate_up, index_S))
    rows = quantise_in_torch(inner_SI.to(x.dtype)).dequantise()
    expected = products(rows, layer.down, index_S)
    # Sums in another order lead some numbers between both products to the next one of FP8.
    assert distance(found, expected) < (1e-2 if device == "cpu" else 2.5e-2)
    found = (found.view(tokens, chosen, hidden) * weights[..., None]).sum(1)
    assert distance(found, run_experts_reference(x, index, weights, layer).double()) < 2**-4


@pytest.mark.usefixtures("exact_rounding")
@pytest.mark.parametrize("device", FP8_DEVICES)
def test_many_assignments_use_fp8(device: str) -> None:
    torch.manual_seed(0)
    layer = make_experts(8, 128, 128, device)
    off = replace(layer, fp8_activations=False)
    for tokens, is_fp8 in ((1, False), (3, False), (4, True), (75, True)):
        x, index, weights = make_tokens(tokens, 9, 2, 128, device)
        assert uses_fp8(x, layer, 2 * tokens) == is_fp8 and not uses_fp8(x, off, 2 * tokens)
        found, plain = (run_experts(x, index, weights, one) for one in (layer, off))
        assert torch.equal(found, plain) != is_fp8
        assert distance(found, plain.double()) < 2**-4


def test_weights_that_fit() -> None:
    fp8 = torch.randn(2, 256, 128)
    assert fits_fp8(pack_fp8(fp8, (128, 128)))
    others = [pack_fp8(fp8, (1, 128)), PackedWeight(fp8), pack_fp8(fp8[:, :200], (128, 128))]
    others.append(pack_fp8(torch.randn(2, 256, 192), (128, 128)))
    assert not any(fits_fp8(weight) for weight in others)
    layer = make_experts(2, 128, 128, "cpu")
    bias = torch.zeros(2, 128)
    for change in ({"down": others[0]}, {"gate": Gate("gelu_tanh")}, {"down_bias": bias}):
        with pytest.raises(AssertionError):
            replace(layer, **change)


@pytest.mark.parametrize("device", FP8_DEVICES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_tokens_stay_alone(bad: float, device: str) -> None:
    torch.manual_seed(0)
    layer = make_experts(2, 128, 128, device)
    x, index, weights = make_tokens(40, 3, 2, 128, device)
    x[2] = 0
    expected = run_experts(x, index, weights, layer)
    assert not expected[2].any(), "a token of zeros gives zeros"
    x[7, 100] = bad
    found = run_experts(x, index, weights, layer)
    if device == "cuda":  # the interpreter makes another number of NaN in FP8
        assert found[7].isnan().all()
    others = [token for token in range(40) if token != 7]
    assert torch.equal(found[others], expected[others])


@pytest.mark.slow
@pytest.mark.parametrize("device", FP8_DEVICES)
def test_a_compiler_sees_one_operator(device: str) -> None:
    torch.manual_seed(0)
    layer = make_experts(8, 128, 128, device)

    def run(x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return run_experts(x, index, weights, layer) + x

    compiled = torch.compile(run, backend="eager", fullgraph=True, dynamic=True)
    for tokens in (3, 40):  # without and with FP8 activations
        given = make_tokens(tokens, 9, 2, 128, device)
        assert torch.equal(compiled(*given), run(*given))


@pytest.mark.gpu
@WITHOUT_FP8
def test_a_graph_computes_the_same() -> None:
    torch.manual_seed(0)
    layer = make_experts(4, 256, 128, "cuda")
    x, index, weights = make_tokens(100, 5, 2, 256, "cuda")
    run_experts(x, index, weights, layer)  # outside of graphs first, as the engine does
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run_experts(x, index, weights, layer)
    for _ in range(2):
        for old, new in zip((x, index), make_tokens(100, 5, 2, 256, "cuda"), strict=False):
            old.copy_(new)
        graph.replay()
        assert torch.equal(out, run_experts(x, index, weights, layer))


@pytest.mark.slow
def test_compiles_for_cards() -> None:
    found = compile_for_card("fp8_of_experts")
    assert len(found) == 4
    for name, needs in found.items():
        assert needs["wgmma"] and needs["shared"] <= SHARED_BYTES[90], name
        assert needs["stack"] <= 16, f"{name} has too few registers"
