"""Norms of heads and RoPE, against plain torch."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.kernels.attention.rotation import rotate_heads
from tests.kernels.devices import DEVICES

pytest.importorskip("triton", reason="needs triton")


def turn(x_THd: Tensor, cos_Td: Tensor, sin_Td: Tensor) -> Tensor:
    first, second = x_THd.chunk(2, -1)
    return x_THd * cos_Td[:, None] + torch.cat([-second, first], -1) * sin_Td[:, None]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize(
    ("tokens", "heads", "key_heads", "size"),
    [(1, 4, 4, 64), (7, 9, 3, 64), (5, 32, 8, 128), (3, 6, 2, 16), (0, 4, 1, 128)],
)
def test_norms_and_turns(
    tokens: int,
    heads: int,
    key_heads: int,
    size: int,
    has_norm: bool,
    dtype: torch.dtype,
    device: str,
) -> None:
    torch.manual_seed(tokens)
    qkv = (torch.randn(tokens, (heads + 2 * key_heads) * size) * 3).to(device, dtype)
    cos, sin = torch.randn(2, tokens, size).to(device, dtype)
    weights = (torch.rand(2, size) + 0.5).to(device, dtype)
    norms = (weights[0], weights[1]) if has_norm else None
    found = rotate_heads(qkv, cos, sin, (heads, key_heads), norms, 1e-3)
    parts = qkv.double().unflatten(1, (-1, size)).split([heads, key_heads, key_heads], 1)
    for x, part, weight in zip(found, parts[:2], weights.double(), strict=True):
        if has_norm:
            part = F.rms_norm(part, (size,), weight, 1e-3)
        expected = turn(part, cos.double(), sin.double())
        assert x.shape == expected.shape and x.dtype == dtype
        assert torch.allclose(
            x.double(), expected, *(2 * [1e-5 if dtype == torch.float32 else 2e-2])
        )


@pytest.mark.parametrize("device", DEVICES)
def test_the_operator_is_what_it_says(device: str) -> None:
    qkv, cos = torch.randn(3, 6 * 32, device=device), torch.randn(3, 32, device=device)
    given = qkv, cos, cos.clone(), 2, 2, None, None, 0.0
    found = torch.library.opcheck(torch.ops.peagle.rotate_heads, given)
    assert set(found.values()) == {"SUCCESS"}
