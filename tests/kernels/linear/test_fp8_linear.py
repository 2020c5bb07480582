"""FP8 activations and their products in Triton, against plain torch on the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.kernels.launch import DeviceLimits
from peagle.kernels.linear.experts import layout_of
from peagle.kernels.linear.fp8_activations import FP8, QuantisedRows, quantise, tiled_inputs
from peagle.kernels.linear.fp8_linear import (
    MIN_ROWS,
    Fp8Config,
    choose_config,
    fp8_linear,
    library_obstacle,
    library_product,
    library_scales,
    numbers_of,
    triton_product,
)
from peagle.kernels.linear.packed_linear import packed_linear
from peagle.kernels.linear.packed_weights import PackedWeight, make_fp8
from tests.kernels.compile_for_card import SHARED_BYTES
from tests.kernels.devices import DEVICES, compile_for_card

pytest.importorskip("triton", reason="needs triton")

N, K = 256, 640
H200 = DeviceLimits(132, 227 * 1024)


def make_weight(n: int, k: int, device: str) -> PackedWeight:
    """A weight as a checkpoint stores it, with scales that differ."""
    q = torch.randn(n, k).mul(60).to(FP8)
    scale = torch.rand(n // 128, k // 128).add(0.5) / (60 * k**0.5)
    return make_fp8(q.to(device), scale.to(device), (128, 128))


def plain(weight: PackedWeight) -> Tensor:
    return weight.unpack(torch.float32).double()


def quantise_in_torch(x: Tensor) -> QuantisedRows:
    """`quantise` in plain torch."""
    parts = x.float().unflatten(1, (-1, 128))
    scale = parts.abs().amax(-1).clamp(min=1e-10) / 448
    q = (parts / scale[..., None]).to(FP8).flatten(1).view(torch.uint8)
    in_order = q[:, tiled_inputs(x.shape[1]).to(q.device)].view(FP8)
    return QuantisedRows(in_order, scale.T.contiguous(), len(x))


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantises_as_torch(dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    x = (torch.randn(5, 384) * torch.logspace(-3, 3, 5)[:, None]).to(device, dtype)
    x[2, 128:] = 0
    rows, expected = quantise(x), quantise_in_torch(x)
    assert torch.allclose(rows.scale[:, :5], expected.scale)
    is_same = rows.q[:5].float() == expected.q.float()
    # The interpreter drops the carry where rounding leads to the next power of two.
    assert is_same.float().mean() > (0.95 if device == "cpu" else 0.999)
    assert distance(rows.dequantise(), x.double()) < 2**-4  # numbers keep three bits behind a one
    assert len(rows.q) == 16 and rows.dequantise().shape == x.shape


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [0, 1, 3, 16, 17, 64, 130])
def test_products_of_the_same_numbers(rows: int, device: str) -> None:
    torch.manual_seed(rows)
    weight = make_weight(N, K, device)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    bias = torch.randn(N).to(device, dtype) if rows % 2 == 0 else None
    x = torch.randn(rows, K).to(device, dtype)
    found = fp8_linear(x, weight, bias)
    assert found.shape == (rows, N) and found.dtype == dtype and found.is_contiguous()
    if not rows:
        return
    added = 0 if bias is None else bias.double()
    same_numbers = F.linear(quantise(x).dequantise().double(), plain(weight)) + added
    assert distance(found, same_numbers) < (1e-5 if device == "cpu" else 4e-3)
    # Rounding to three bits behind a one is off by 2^-4 at most, and by less on average.
    assert distance(found, F.linear(x.double(), plain(weight)) + added) < 2**-4


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("config", [Fp8Config(16, 32, 4, 4, wx=True), Fp8Config(32, 128, 8, 2)])
@pytest.mark.parametrize("split_k", [1, 2, 4])
def test_every_way_to_cut_a_product(config: Any, split_k: int, device: str) -> None:
    torch.manual_seed(0)
    weight = make_weight(N, 384, device)  # the last of four shares is empty
    x = quantise(torch.randn(35, 384, device=device))
    config = Fp8Config(*(config.block_m, config.block_n, 4, 2, config.wx, split_k))
    for _ in range(2):  # counters are zero again
        out = triton_product(x, weight, dtype=torch.float32, config=config)
        assert distance(out, F.linear(x.dequantise().double(), plain(weight))) < 1e-5


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [5, 20, 140])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_rows_stay_alone(bad: float, rows: int, device: str) -> None:
    torch.manual_seed(0)
    weight = make_weight(128, 128, device)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    x = torch.randn(rows, 128).to(device, dtype)
    x[2] = 0
    expected = fp8_linear(x, weight)
    assert not expected[2].any(), "a row of zeros gives zeros"
    x[1, 7] = bad
    found = fp8_linear(x, weight)
    if device == "cuda":  # the interpreter makes another number of NaN in FP8
        assert found[1].isnan().all()
    others = [row for row in range(rows) if row != 1]
    assert torch.equal(found[others], expected[others])


@pytest.mark.parametrize("device", DEVICES)
def test_takes_rows_that_are_not_contiguous(device: str) -> None:
    torch.manual_seed(0)
    weight = make_weight(128, 128, device)
    x = torch.randn(3, 256, device=device)
    assert torch.equal(fp8_linear(x[:, :128], weight), fp8_linear(x[:, :128].clone(), weight))


def test_parameters_follow_the_rows() -> None:
    def label(rows: int, n: int, k: int, limits: DeviceLimits = H200) -> str:
        return choose_config(rows, n, k, limits).label

    # q/k/v and down of Qwen3-8B
    assert label(1, 6144, 4096) == label(16, 6144, 4096) == "wx m16 n64 w4 st4 s4"
    assert label(17, 6144, 4096) == label(32, 6144, 4096) == "wx m32 n64 w4 st4 s4"
    assert label(33, 6144, 4096) == "xw m64 n32 w4 st4 s2"
    assert label(128, 6144, 4096) == "xw m64 n32 w4 st4 s1"
    assert label(16, 4096, 12288) == "wx m16 n64 w4 st4 s4"
    # Sums over many inputs are shared by more programs than there are multiprocessors.
    assert label(64, 4096, 4096) == "xw m64 n32 w4 st4 s2"
    assert label(64, 4096, 12288) == "xw m64 n32 w4 st4 s4"
    assert label(129, 4096, 12288) == "xw m128 n64 w8 st3 s4"
    assert label(1, 128, 128) == "wx m16 n64 w4 st4 s1"
    assert label(500, 4096, 4096, DeviceLimits(40, 65_536)) == "xw m128 n64 w8 st2 s1"


def test_the_library_reads_scales_in_fours() -> None:
    scale = torch.rand(2, 5)
    found = library_scales(scale)
    assert found.shape == (8, 2) and found.stride() == (1, 8)
    assert torch.equal(found[:5], scale.T)
    whole = torch.rand(2, 8)
    assert library_scales(whole).data_ptr() == whole.data_ptr()
    assert library_obstacle(torch.device("cpu")) == "block scales need a card"


@pytest.mark.gpu
@pytest.mark.parametrize("k", [640, 1024])
def test_the_library_computes_the_same(k: int) -> None:
    if reason := library_obstacle(torch.device("cuda")):
        pytest.skip(reason)
    torch.manual_seed(0)
    weight = make_weight(N, k, "cuda")
    x, bias = quantise(torch.randn(131, k, device="cuda", dtype=torch.bfloat16)), torch.randn(N)
    bias = bias.to("cuda", torch.bfloat16)
    expected = F.linear(x.dequantise().double(), plain(weight)) + bias.double()
    assert distance(library_product(x, weight, bias), expected) < 5e-3


@pytest.mark.parametrize("device", DEVICES)
def test_few_rows_keep_their_activations(device: str) -> None:
    torch.manual_seed(0)
    weight, dtype = make_weight(N, K, device), torch.float32 if device == "cpu" else torch.bfloat16
    bias = torch.randn(N).to(device, dtype)
    x = torch.randn(1, MIN_ROWS, K).to(device, dtype)
    many = packed_linear(x, weight, bias, fp8_activations=True)
    assert many.shape == (1, MIN_ROWS, N) and torch.equal(many[0], fp8_linear(x[0], weight, bias))
    few = x[:, 1:]
    found = packed_linear(few, weight, bias, fp8_activations=True)
    assert torch.equal(found, packed_linear(few, weight, bias))
    assert not torch.equal(many, packed_linear(x, weight, bias))


@pytest.mark.parametrize("device", DEVICES)
def test_takes_numbers_out_of_tiles(device: str) -> None:
    """Every number of e4m3 at every place of a word."""
    q = (torch.arange(256)[:, None] + 3 * torch.arange(384)).to(torch.uint8)
    weight = make_fp8(q.view(FP8).to(device), torch.ones(2, 3, device=device), (128, 128))
    assert torch.equal(numbers_of(weight).view(torch.uint8).cpu(), q[:, tiled_inputs(384)])


@pytest.mark.parametrize("device", DEVICES)
def test_the_operator_is_what_it_says(device: str) -> None:
    torch.manual_seed(0)
    weight = make_weight(128, 128, device)
    bias = torch.randn(128, device=device, dtype=torch.bfloat16)
    for rows in (3, 130):
        x = torch.randn(rows, 128, device=device, dtype=torch.bfloat16)
        # Other checks compute with numbers in FP8, which torch does not do.
        arguments = x, weight.data, weight.scale, None, bias, [*layout_of(weight), 1]
        found = torch.library.opcheck(
            *(torch.ops.peagle.packed_linear, arguments), test_utils="test_faketensor"
        )
        assert found == {"test_faketensor": "SUCCESS"}


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 17, 130])
def test_a_graph_computes_the_same(rows: int) -> None:
    torch.manual_seed(rows)
    weight = make_weight(N, 1024, "cuda")
    x = torch.randn(rows, 1024, device="cuda", dtype=torch.bfloat16)
    fp8_linear(x, weight)  # outside of graphs first, as the engine does
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fp8_linear(x, weight)
    x.copy_(torch.randn_like(x))
    for _ in range(2):
        graph.replay()
        assert torch.equal(out, fp8_linear(x, weight))


@pytest.mark.slow
def test_compiles_for_cards() -> None:
    found = compile_for_card("fp8")
    assert all(found.pop(name)["stack"] == 0 for name in ("quantise", "numbers"))
    assert len(found) == 8
    for name, needs in found.items():
        assert needs["mma"], name
        assert needs["shared"] <= SHARED_BYTES[int(name.split()[0])], name
        assert needs["whole_words"] and needs["stack"] <= 16, (name, needs)
