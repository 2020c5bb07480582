"""FP8 activations and products of linear layers, against plain torch on the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.kernels.linear import fp8_linear as fp8_linear_module
from peagle.kernels.linear.experts import layout_of
from peagle.kernels.linear.fp8_activations import (
    FP8,
    QuantisedRows,
    quantise,
    quantise_normed,
    tiled_inputs,
)
from peagle.kernels.linear.fp8_linear import (
    MIN_ROWS,
    LinearConfig,
    Norm,
    fp8_linear,
    fp8_obstacle,
    fp8_product,
    fp8_product_reference,
    library_product,
    library_scales,
)
from peagle.kernels.linear.packed_linear import packed_linear
from peagle.kernels.linear.packed_weights import PackedWeight, make_fp8
from tests.kernels.devices import DEVICES, FP8_DEVICES, WITHOUT_FP8, compile_for_card
from tests.kernels.gluon_in_torch import launcher_of

pytest.importorskip("triton", reason="needs triton")

N, K = 256, 640
CUTS = [LinearConfig(64, 1), LinearConfig(32, 2), LinearConfig(128, 4)]


def make_weight(n: int, k: int, device: str) -> PackedWeight:
    """A weight as a checkpoint stores it, with scales that differ."""
    q = torch.randn(n, k).mul(60).to(FP8)
    scale = torch.rand(n // 128, k // 128).add(0.5) / (60 * k**0.5)
    return make_fp8(q.to(device), scale.to(device), (128, 128))


def multiply(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    assert weight.scale is not None
    return fp8_linear(x, weight.fp8_numbers(), weight.scale, bias)


def plain(weight: PackedWeight) -> Tensor:
    return weight.unpack(torch.float32).double()


def quantise_in_torch(
    x: Tensor, *, is_tiled: bool = False, is_gated: bool = False
) -> QuantisedRows:
    """`quantise` in plain torch."""
    if is_gated:
        gate, up = x.chunk(2, 1)
        x = F.silu(gate) * up
    parts = x.float().unflatten(1, (-1, 128))
    scale = parts.abs().amax(-1).clamp(min=1e-10) / 448
    q = (parts / scale[..., None]).to(FP8).flatten(1).view(torch.uint8)
    if is_tiled:
        q = q[:, tiled_inputs(x.shape[1]).to(q.device)]
    return QuantisedRows(q.view(FP8), scale.T.contiguous(), len(x), is_tiled)


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_tiled", [False, True])
def test_quantises_as_torch(is_tiled: bool, dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    x = (torch.randn(5, 384) * torch.logspace(-3, 3, 5)[:, None]).to(device, dtype)
    x[2, 128:] = 0
    rows, expected = (f(x, is_tiled=is_tiled) for f in (quantise, quantise_in_torch))
    assert torch.allclose(rows.scale[:, :5], expected.scale)
    is_same = rows.q[:5].float() == expected.q.float()
    # The interpreter drops the carry where rounding leads to the next power of two.
    assert is_same.float().mean() > (0.95 if device == "cpu" else 0.999)
    assert distance(rows.dequantise(), x.double()) < 2**-4  # numbers keep three bits behind a one
    assert len(rows.q) == 16 and rows.dequantise().shape == x.shape


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("k", [128, 640, 4096])
def test_quantises_normed_rows(k: int, device: str) -> None:
    torch.manual_seed(k)
    x, weight = torch.randn(5, k).mul(3).to(device), (torch.rand(k) + 0.5).to(device)
    normed = F.rms_norm(x, (k,), weight, 1e-2)
    q, scale = quantise_normed(x, weight, 1e-2)
    rows, expected = QuantisedRows(q, scale, 5), quantise_in_torch(normed)
    assert q.shape == (16, k) and torch.allclose(scale[:, :5], expected.scale, rtol=1e-5)
    # The interpreter drops the carry where rounding leads to the next power of two.
    assert distance(rows.dequantise(), normed.double()) < (0.1 if device == "cpu" else 2**-4)


@pytest.mark.parametrize("device", DEVICES)
def test_quantises_what_a_gate_lets_through(device: str) -> None:
    torch.manual_seed(0)
    gate_up = torch.randn(37, 2 * 1536).mul(3).to(device)  # more than one block of programs
    gate, up = gate_up.chunk(2, 1)
    rows, expected = quantise(gate_up, is_gated=True), quantise_in_torch(F.silu(gate) * up)
    assert torch.allclose(rows.scale[:, :37], expected.scale, rtol=1e-5)
    most = 0.1 if device == "cpu" else 2**-4
    assert distance(rows.dequantise(), (F.silu(gate) * up).double()) < most


@pytest.mark.parametrize("device", FP8_DEVICES)
@pytest.mark.parametrize("kind", ["plain", "swiglu", "norm"])
def test_a_compiler_sees_operators(kind: str, device: str) -> None:
    torch.manual_seed(0)
    weight, dtype = make_weight(N, K, device), torch.float32 if device == "cpu" else torch.bfloat16
    numbers, bias = weight.fp8_numbers(), torch.randn(N).to(device, dtype)

    norm = Norm((torch.rand(K) + 0.5).to(device, dtype), 1e-3)
    before: Any = {"plain": None, "norm": norm}.get(kind, kind)

    def layer(x: Tensor) -> Tensor:
        return packed_linear(x + x, weight, bias, numbers, before)

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (MIN_ROWS - 1, MIN_ROWS + 3, 200):
        x = torch.randn(rows, 2 * K if kind == "swiglu" else K).to(device, dtype)
        plain_x = (x + x).double()
        if kind == "swiglu":
            gate, up = plain_x.chunk(2, 1)
            plain_x = F.silu(gate) * up
        elif kind == "norm":
            plain_x = F.rms_norm(plain_x, (K,), norm.weight.double(), norm.eps)
        found, expected = compiled(x), F.linear(plain_x, plain(weight)) + bias.double()
        assert distance(found, expected) < (1e-2 if rows < MIN_ROWS else 2**-4)
        assert torch.equal(found, layer(x))


@pytest.mark.parametrize("device", FP8_DEVICES)
@pytest.mark.parametrize("rows", [1, 3, 17, 130])
def test_products_of_the_same_numbers(rows: int, device: str) -> None:
    torch.manual_seed(rows)
    weight = make_weight(N, K, device)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    bias = torch.randn(N).to(device, dtype) if rows % 2 == 0 else None
    x = torch.randn(rows, K).to(device, dtype)
    found = multiply(x, weight, bias)
    assert found.shape == (rows, N) and found.dtype == dtype
    added = 0 if bias is None else bias.double()
    same_numbers = F.linear(quantise(x).dequantise().double(), plain(weight)) + added
    assert distance(found, same_numbers) < (1e-5 if device == "cpu" else 6e-3)
    # Rounding to three bits behind a one is off by 2^-4 at most, and by less on average.
    assert distance(found, F.linear(x.double(), plain(weight)) + added) < 2**-4


@pytest.mark.parametrize("rows", [1, 35, 70])
@pytest.mark.parametrize("split_k", [1, 4])
def test_the_kernel_on_a_cpu(split_k: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(rows)
    in_torch = launcher_of("peagle.kernels.linear.fp8_linear_gluon", "linear_kernel")
    monkeypatch.setattr(fp8_linear_module, "launch", in_torch)
    # An odd number of blocks: the last turn has one, and the last of four shares none.
    weight, x = make_weight(N, 1408, "cpu"), quantise_in_torch(torch.randn(rows, 1408))
    assert weight.scale is not None
    padded = F.pad(x.scale, (0, -rows % 16), value=torch.nan)  # as `quantise` gives scales
    given = x.q, padded, weight.fp8_numbers(), weight.scale
    residual, cut = torch.randn(rows, N).bfloat16(), LinearConfig(64, split_k)
    found = fp8_product(*given, config=cut)
    expected = fp8_product_reference(x.q, x.scale, *given[2:])
    assert distance(found, expected.double()) < 3e-3
    assert torch.equal(fp8_product(*given, residual, cut), found + residual)


@pytest.mark.parametrize("device", FP8_DEVICES)
@pytest.mark.parametrize("rows", [5, 140])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_rows_stay_alone(bad: float, rows: int, device: str) -> None:
    torch.manual_seed(0)
    weight = make_weight(128, 128, device)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    x = torch.randn(rows, 128).to(device, dtype)
    x[2] = 0
    expected = multiply(x, weight)
    assert not expected[2].any(), "a row of zeros gives zeros"
    x[1, 7] = bad
    found = multiply(x, weight)
    if device == "cuda":  # the interpreter makes another number of NaN in FP8
        assert found[1].isnan().all()
    others = [row for row in range(rows) if row != 1]
    assert torch.equal(found[others], expected[others])


@pytest.mark.parametrize("device", FP8_DEVICES)
def test_takes_rows_that_are_not_contiguous(device: str) -> None:
    torch.manual_seed(0)
    weight = make_weight(128, 128, device)
    x = torch.randn(3, 256, device=device).bfloat16()
    assert torch.equal(multiply(x[:, :128], weight), multiply(x[:, :128].clone(), weight))


def test_the_library_reads_scales_in_fours() -> None:
    scale = torch.rand(2, 5)
    found = library_scales(scale)
    assert found.shape == (8, 2) and found.stride() == (1, 8)
    assert torch.equal(found[:5], scale.T)
    whole = torch.rand(2, 8)
    assert library_scales(whole).data_ptr() == whole.data_ptr()
    assert fp8_obstacle(torch.device("cpu")) == "block scales need a card"


@pytest.mark.gpu
@WITHOUT_FP8
@pytest.mark.parametrize("n, k", [(N, 640), (N, 1024), (128, 128), (4096, 12288)])
@pytest.mark.parametrize("rows", [1, 16, 31, 64, 131])
def test_our_products_and_the_librarys(rows: int, n: int, k: int) -> None:
    torch.manual_seed(0)
    weight = make_weight(n, k, "cuda")
    x = quantise(torch.randn(rows, k, device="cuda", dtype=torch.bfloat16))
    assert weight.scale is not None
    given = x.scale, weight.fp8_numbers(), weight.scale
    expected = fp8_product_reference(x.q, *given)[:rows].double()
    residual = torch.randn(rows, n, device="cuda", dtype=torch.bfloat16)
    for config in (None, *CUTS):
        found = fp8_product(x.q[:rows], *given, config=config)
        assert distance(found, expected) < 5e-3, config
        added = fp8_product(x.q[:rows], *given, residual, config)
        assert torch.equal(added, found + residual), config
    if k > 128:  # of the smallest the library takes other strides
        assert distance(library_product(x.q, *given)[:rows], expected) < 5e-3


@pytest.mark.parametrize("device", FP8_DEVICES)
def test_few_rows_keep_their_activations(device: str) -> None:
    torch.manual_seed(0)
    weight, dtype = make_weight(N, K, device), torch.float32 if device == "cpu" else torch.bfloat16
    bias, numbers = torch.randn(N).to(device, dtype), weight.fp8_numbers()
    x = torch.randn(1, MIN_ROWS, K).to(device, dtype)
    many = packed_linear(x, weight, bias, numbers)
    assert many.shape == (1, MIN_ROWS, N) and torch.equal(many[0], multiply(x[0], weight, bias))
    few = x[:, 1:]
    assert torch.equal(packed_linear(few, weight, bias, numbers), packed_linear(few, weight, bias))
    assert not torch.equal(many, packed_linear(x, weight, bias))


def test_takes_numbers_out_of_tiles() -> None:
    """Every number of e4m3 at every place of a word."""
    q = (torch.arange(256)[:, None] + 3 * torch.arange(384)).to(torch.uint8)
    weight = make_fp8(q.view(FP8), torch.ones(2, 3), (128, 128))
    assert torch.equal(weight.fp8_numbers().view(torch.uint8), q)


@pytest.mark.parametrize("device", DEVICES)
def test_the_operator_is_what_it_says(device: str) -> None:
    torch.manual_seed(0)
    weight = make_weight(128, 128, device)
    bias = torch.randn(128, device=device, dtype=torch.bfloat16)
    for rows in (3, 130):
        x = torch.randn(rows, 128, device=device, dtype=torch.bfloat16)
        # Other checks compute with numbers in FP8, which torch does not do.
        arguments = x, weight.data, weight.scale, None, bias, layout_of(weight)
        found = torch.library.opcheck(
            *(torch.ops.peagle.packed_linear, arguments), test_utils="test_faketensor"
        )
        assert found == {"test_faketensor": "SUCCESS"}


@pytest.mark.gpu
@WITHOUT_FP8
@pytest.mark.parametrize("rows", [1, 17, 130])
def test_a_graph_computes_the_same(rows: int) -> None:
    torch.manual_seed(rows)
    weight = make_weight(N, 1024, "cuda")
    x = torch.randn(rows, 1024, device="cuda", dtype=torch.bfloat16)
    numbers, scale = weight.fp8_numbers(), weight.scale
    assert scale is not None
    fp8_linear(x, numbers, scale)  # outside of graphs first, as the engine does
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fp8_linear(x, numbers, scale)
    x.copy_(torch.randn_like(x))
    for _ in range(2):
        graph.replay()
        assert torch.equal(out, fp8_linear(x, numbers, scale))


@pytest.mark.slow
def test_compiles_for_cards() -> None:
    found = compile_for_card("fp8")
    assert [needs["stack"] for needs in found.values()] == [0] * 6
