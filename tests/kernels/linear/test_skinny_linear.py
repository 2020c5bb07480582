"""Products of few rows in Triton against F.linear. On a CPU they run under Triton's interpreter."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from peagle.kernels.launch import arrivals
from peagle.kernels.linear import skinny_linear as module
from peagle.kernels.linear.skinny_linear import (
    SkinnyConfig,
    skinny_linear,
    skinny_swiglu,
    skinny_swiglu_reference,
)
from tests.kernels.devices import DEVICES

pytest.importorskip("triton", reason="needs triton")
CONFIGS = [
    SkinnyConfig(16, 32, 32, 1, 4, 3),
    SkinnyConfig(16, 16, 64, 3, 4, 2),
    SkinnyConfig(32, 64, 32, 2, 4, 2),
    SkinnyConfig(16, 64, 32, 1, 4, 3, kind="wx"),
    SkinnyConfig(8, 32, 32, 4, 4, 2, kind="wx"),
    SkinnyConfig(128, 64, 32, 2, 8, 3, kind="wx"),
    SkinnyConfig(1, 16, 64, 1, 4, 1, kind="gemv"),
    SkinnyConfig(1, 32, 128, 2, 4, 3, kind="gemv"),
]
DESCRIPTORS = [
    SkinnyConfig(16, 64, 64, 2, 4, 3, tma=True),
    SkinnyConfig(16, 64, 64, 2, 4, 3, kind="wx", tma=True),
    SkinnyConfig(128, 64, 64, 1, 4, 3, kind="wx", tma=True),
    SkinnyConfig(128, 64, 64, 2, 8, 3, tma=True),
]
SHAPES = [(1, 32, 64), (2, 40, 72), (5, 33, 100), (17, 130, 64), (33, 16, 257)]  # M, N, K


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Memory that a launch does not clear is full of NaN; counters end as they began."""
    real = torch.empty

    def empty(*size: Any, **options: Any) -> Tensor:
        memory = real(*size, **options)
        return memory.fill_(torch.nan) if memory.is_floating_point() else memory

    monkeypatch.setattr(module.torch, "empty", empty)
    yield
    for device in (torch.device("cpu"), torch.device("cuda", 0)):
        if device.type == "cpu" or torch.cuda.is_available():
            assert not module.arrivals(device).any()


def make(m: int, n: int, k: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight and bias; rows of both matrices lie apart."""
    torch.manual_seed(m + n + k)

    def rows(count: int, size: int) -> Tensor:
        wide = torch.full((count, size + 16), torch.nan, device=device, dtype=dtype)
        wide[:, :size] = torch.randn(count, size)
        return wide[:, :size]

    return rows(m, k), rows(n, k), torch.randn(n).to(device, dtype)


def check(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """`expected` is in float64."""
    assert found.dtype == dtype and found.is_contiguous()
    error = (found.double() - expected).norm() / expected.norm()
    assert error < {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}[dtype]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("config", [None, *CONFIGS], ids=str)
@pytest.mark.parametrize(
    ("m", "n", "k", "dtype"),
    [(*shape, torch.float32) for shape in SHAPES] + [(5, 33, 100, torch.float16)],
)
def test_equals_the_reference(
    m: int, n: int, k: int, config: SkinnyConfig | None, dtype: torch.dtype, device: str
) -> None:
    x, weight, bias = make(m, n, k, dtype, device)
    product = F.linear(x.double(), weight.double())
    if m == 2:  # without a bias alike, whatever the shape
        check(skinny_linear(x, weight, config=config), product, dtype)
    check(skinny_linear(x, weight, bias, config=config), product + bias.double(), dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("config", [None, *CONFIGS], ids=str)
@pytest.mark.parametrize(
    ("m", "n", "k", "dtype"),
    [(1, 64, 64, torch.float16), (3, 66, 100, torch.float32), (20, 34, 33, torch.float32)],
)
def test_swiglu_equals_the_reference(
    m: int, n: int, k: int, config: SkinnyConfig | None, dtype: torch.dtype, device: str
) -> None:
    x, weight, *_ = make(m, n, k, dtype, device)
    expected = skinny_swiglu_reference(x.double(), weight.double())
    check(skinny_swiglu(x, weight, config=config), expected, dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("config", DESCRIPTORS, ids=str)
@pytest.mark.parametrize("m", [96, 130])
@pytest.mark.parametrize("is_aligned", [True, False])
def test_descriptors(m: int, config: SkinnyConfig, is_aligned: bool, device: str) -> None:
    x, weight, bias = make(m, 232, 200, torch.float16, device)
    if not is_aligned:  # x is then read without one
        x = torch.cat((x[:, :1], x), 1)[:, 1:]
    expected = F.linear(x.double(), weight.double(), bias.double())
    check(skinny_linear(x, weight, bias, config=config), expected, torch.float16)
    expected = skinny_swiglu_reference(x.double(), weight.double())
    check(skinny_swiglu(x, weight, config=config), expected, torch.float16)


@pytest.mark.parametrize("device", DEVICES)
def test_a_split_sum_is_the_same_every_time(device: str) -> None:
    x, weight, *_ = make(7, 96, 512, torch.float16, device)
    config = SkinnyConfig(16, 32, 64, 8, 4, 2)
    first = skinny_linear(x, weight, config=config)
    for _ in range(3):
        assert torch.equal(skinny_linear(x, weight, config=config), first)
    assert torch.equal(
        skinny_linear(x[:, :100], weight[:, :100], config=config),  # shares of nothing
        skinny_linear(x[:, :100], weight[:, :100], config=config),
    )


def test_counters_first_made_in_inference_mode_may_change_outside() -> None:
    arrivals.cache_clear()
    with torch.inference_mode():
        counters = arrivals(torch.device("cpu"))
    assert not counters.is_inference()
    counters[0] = 1
    assert counters.sum() == 1
    counters[0] = 0


@pytest.mark.parametrize("device", DEVICES)
def test_leading_dimensions_and_strides(device: str) -> None:
    x, weight, bias = make(6, 48, 64, torch.float32, device)
    expected = F.linear(x, weight, bias)
    found = skinny_linear(x.reshape(2, 3, 64), weight, bias)
    torch.testing.assert_close(found, expected.view(2, 3, 48))
    transposed = x.t().contiguous().t()
    torch.testing.assert_close(skinny_linear(transposed, weight, bias), expected)
    assert skinny_linear(x[:0], weight).shape == (0, 48)
    assert skinny_swiglu(x[:0], weight).shape == (0, 24)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_is_one_operator_to_a_compiler(device: str) -> None:
    x, weight, bias = make(3, 48, 64, torch.float32, device)

    def layer(x: Tensor) -> Tensor:
        return skinny_linear(x, weight, bias).relu() @ skinny_swiglu(x, weight).sum(0).outer(bias).T

    layer = torch.compile(layer, backend="aot_eager", fullgraph=True)
    up = F.linear(x, weight, bias).relu()
    expected = up @ skinny_swiglu_reference(x, weight).sum(0).outer(bias).T
    torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-3)
    for operator, args in (
        (torch.ops.peagle.skinny_linear.default, (x, weight, bias, None)),
        (torch.ops.peagle.skinny_swiglu.default, (x, weight, None)),
    ):
        torch.library.opcheck(operator, args, test_utils=["test_schema", "test_faketensor"])


@pytest.mark.gpu
@pytest.mark.parametrize("config", [None, *CONFIGS, *DESCRIPTORS], ids=str)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 4096, 4096), (8, 6144, 4096), (33, 1032, 2056)])
def test_bfloat16_on_the_device(m: int, n: int, k: int, config: SkinnyConfig | None) -> None:
    x, weight, bias = make(m, n, k, torch.bfloat16, "cuda")
    expected = F.linear(x.double(), weight.double(), bias.double())
    check(skinny_linear(x, weight, bias, config=config), expected, torch.bfloat16)
    expected = skinny_swiglu_reference(x.double(), weight.double())
    check(skinny_swiglu(x, weight, config=config), expected, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("config", [None, *CONFIGS, *DESCRIPTORS], ids=str)
def test_replays_in_a_graph(config: SkinnyConfig | None) -> None:
    """A chain in which each product reads what the one before wrote."""
    x, weight, *_ = make(8, 512, 512, torch.bfloat16, "cuda")
    weight = weight * (0.6 * 512**-0.5)
    gate_up = torch.cat((weight, weight.flip(0)))

    def chain() -> Tensor:
        rows = x
        for _ in range(8):
            rows = skinny_swiglu(rows, gate_up, config=config)
            rows = skinny_linear(rows, weight, config=config) + x
        return rows

    chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain()
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, chain())
        rows = x.double()
        for _ in range(8):
            rows = skinny_swiglu_reference(rows, gate_up.double())
            rows = F.linear(rows, weight.double()) + x.double()
        assert (out.double() - rows).norm() / rows.norm() < 1e-2
