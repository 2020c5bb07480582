"""Attention among elements against a plain loop; FlexAttention against the dense form on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from peagle.models.elements import Elements, sample_elements, supervised_depth
from peagle.training.element_attention import dense_attention, flex_attention


def make_elements(device: str, multiple: int, rows: int = 3, length: int = 40) -> Elements:
    lengths = torch.tensor([length - 3 * i for i in range(rows)], device=device)
    prompts = torch.tensor([2 + i for i in range(rows)], device=device)
    deepest = supervised_depth(lengths, prompts, length)
    return sample_elements(deepest, 5, ratio=0.8, floor=0.2, multiple=multiple)


def random_heads(elements: Elements, dtype: torch.dtype, query_heads: int = 4) -> list[Tensor]:
    rows, count = elements.anchors.shape
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randn(rows, count, h, 32, generator=generator) for h in (query_heads, 2, 2)]
    return [t.to(elements.anchors.device, dtype).requires_grad_() for t in tensors]


def plain_attention(elements: Elements, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Softmax attention of every element over the elements it may see, one at a time."""
    out = torch.zeros_like(query)
    groups = query.shape[2] // key.shape[2]
    for row in range(query.shape[0]):
        described = list(
            zip(
                *(x[row].tolist() for x in (elements.anchors, elements.depths, elements.documents)),
                strict=True,
            )
        )
        for i, (a, d, doc) in enumerate(described):
            seen = [
                j
                for j, (b, c, other) in enumerate(described)
                if doc == other and ((c == 0 and b <= a) or (b == a and c <= d))
            ]
            for head in range(query.shape[2]):
                scores = key[row, seen, head // groups] @ query[row, i, head] * 32**-0.5
                out[row, i, head] = scores.softmax(0) @ value[row, seen, head // groups]
    return out


@pytest.mark.parametrize("multiple", [1, 32])
def test_dense_attention_against_a_plain_loop(multiple: int) -> None:
    elements = make_elements("cpu", multiple, rows=2, length=12)
    query, key, value = (t.detach() for t in random_heads(elements, torch.float64))
    out = dense_attention(elements, elements)(query, key, value)
    expected = plain_attention(elements, query, key, value)
    torch.testing.assert_close(out, expected, atol=1e-10, rtol=1e-10)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_flex_attention_equals_dense_attention(dtype: torch.dtype) -> None:
    elements = make_elements("cuda", 128, length=150)
    results = []
    for make in (dense_attention, flex_attention):
        tensors = random_heads(elements, dtype)
        out = make(elements, elements)(*tensors)
        graded = out[elements.supervised]
        (graded.float() * torch.arange(32, device="cuda")).sum().backward()
        results.append([graded, *(t.grad for t in tensors)])
    tolerance = 2e-2 if dtype == torch.bfloat16 else 2e-3
    for dense, flex in zip(*results, strict=True):
        error = (dense.float() - flex.float()).norm() / dense.float().norm()
        assert error < tolerance
