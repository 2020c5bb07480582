"""Attention among elements against a plain loop; FlexAttention against the dense form on a GPU."""

import pytest
import torch
from torch import Tensor

from peagle.models.elements import (
    Elements,
    attention_mask,
    sample_elements,
)
from peagle.training.element_attention import BLOCK, BlockTable, dense_attention, flex_attention
from peagle.training.partition import split_by_anchor
from peagle.training.training_methods import concatenate
from tests.training.reference import rows_depth


def make_elements(device: str, multiple: int, rows: int = 3, length: int = 40) -> Elements:
    lengths = torch.tensor([length - 3 * i for i in range(rows)], device=device)
    prompts = torch.tensor([2 + i for i in range(rows)], device=device)
    deepest = rows_depth(lengths, prompts, length)
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


def packed_elements(length: int, multiple: int, seed: int) -> Elements:
    """Two rows of several documents each, with padding at the end."""
    generator = torch.Generator().manual_seed(seed)
    documents = torch.full((2, length), -1)
    deepest = torch.full((2, length), -1)
    for row in range(2):
        start = number = 0
        while (size := int(torch.randint(3, length // 2, (1,), generator=generator))) + start < (
            length - row * 40
        ):
            documents[row, start : start + size] = number
            inside = torch.arange(start + size // 3, start + size - 2)
            deepest[row, inside] = start + size - 3 - inside
            start, number = start + size, number + 1
    return sample_elements(
        deepest,
        6,
        ratio=0.8,
        floor=0.2,
        generator=generator,
        multiple=multiple,
        documents_BN=documents,
    )


def masks(blocks: Tensor, queries: int, keys: int) -> Tensor:
    return blocks.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)[:, :queries, :keys]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("segments", [None, 1, 3])
@pytest.mark.parametrize(("length", "multiple"), [(384, 128), (300, 1), (700, 128)])
def test_blocks_are_full_or_empty_only_where_all_pairs_are(
    length: int, multiple: int, segments: int | None, seed: int
) -> None:
    elements = packed_elements(length, multiple, seed)
    if segments is None:
        pairs = [(elements, elements)]
    else:
        names = ("anchors", "depths", "documents", "supervised")
        context = Elements(*(getattr(elements, name)[:, :length] for name in names))
        parts = split_by_anchor(elements, length, segments, 6, multiple)
        pairs = [(context, context), *((part, concatenate([context, part])) for part in parts)]
    found_full = found_partial = visited = needed = 0
    for queries, keys in pairs:
        exact = attention_mask(queries, keys).squeeze(1)
        sizes = exact.shape[1:]
        mask = BlockTable.of(queries, keys).mask(queries, keys)
        shape = (2, -(-sizes[0] // BLOCK), -(-sizes[1] // BLOCK))
        kinds = []
        for counts, indices in (
            (mask.full_kv_num_blocks, mask.full_kv_indices),
            (mask.kv_num_blocks, mask.kv_indices),
        ):
            ordered = torch.arange(shape[2]) < counts.squeeze(1).unsqueeze(-1)
            kinds.append(
                torch.zeros(shape, dtype=torch.bool).scatter(2, indices.squeeze(1).long(), ordered)
            )
        full, partial = kinds
        assert not (full & partial).any()
        assert exact[masks(full, *sizes)].all()
        assert not exact[~masks(full | partial, *sizes)].any()
        seen = torch.nn.functional.pad(exact, (0, -sizes[1] % BLOCK, 0, -sizes[0] % BLOCK))
        seen = seen.unflatten(2, (-1, BLOCK)).unflatten(1, (-1, BLOCK)).any(4).any(2)
        visited += int((full | partial).sum())
        needed += int(seen.sum())
        found_full += int(full.sum())
        found_partial += int(partial.sum())
    assert found_partial > 0
    # Caution has a price.
    assert segments is None or visited <= 1.3 * needed


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
