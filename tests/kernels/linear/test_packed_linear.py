"""Linear layers over packed weights in Triton against plain torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from peagle.kernels.linear.packed_linear import MAX_ROWS, MAX_ROWS_IN_REGISTERS, packed_linear
from peagle.kernels.linear.unpacking import unpack_weight
from tests.kernels.devices import DEVICES, compile_for_card
from tests.kernels.linear.test_experts import FORMATS, check, make_weight

pytest.importorskip("triton", reason="needs triton")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("k", [32, 96, 160, 384])
def test_unpacks_as_the_reference(k: int, format: str, device: str) -> None:
    torch.manual_seed(4)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    weight = make_weight(format, 3, 72, k, device=device, dtype=dtype)
    assert torch.equal(unpack_weight(weight, dtype), weight.unpack(dtype))
    assert torch.equal(unpack_weight(weight.expert(1), dtype), weight.expert(1).unpack(dtype))


@pytest.mark.slow
def test_unpacking_compiles_for_a_card() -> None:
    assert set(compile_for_card("unpacking")) == {"fp8", "int8", "int4", "mxfp4"}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("format", ["fp8", "fp8 128", "int4 zeros", "mxfp4"])
@pytest.mark.parametrize(
    "rows", [0, 1, 3, *(m + i for m in (MAX_ROWS, MAX_ROWS_IN_REGISTERS) for i in (0, 1))]
)
def test_few_and_many_rows(rows: int, format: str, device: str) -> None:
    torch.manual_seed(rows)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    weight = make_weight(format, 72, 96, device=device, dtype=dtype)
    bias = torch.randn(72).to(device, dtype)
    x = torch.randn(1, rows, 96).to(device, dtype)
    found = packed_linear(x, weight, bias)
    assert found.shape == (1, rows, 72)
    if rows:
        check(found, F.linear(x.double(), weight.unpack(torch.float64), bias.double()))
