"""COD sampling and the attention rule, against worked examples and plain loops."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.models.elements import (
    Elements,
    attention_mask,
    depth_counts,
    sample_elements,
)
from tests.training.reference import rows_depth


def listed(elements: Elements, row: int = 0) -> set[tuple[int, int]]:
    """(anchor, depth) of the supervised elements of one row."""
    chosen = elements.supervised[row]
    pairs = zip(elements.anchors[row][chosen], elements.depths[row][chosen], strict=True)
    return {(int(a), int(d)) for a, d in pairs}


def test_worked_example_of_the_docstring() -> None:
    deepest = rows_depth(torch.tensor([5]), torch.tensor([1]), 5)
    assert deepest.tolist() == [[2, 1, 0, -1, -1]]
    elements = sample_elements(deepest, 3, ratio=1.0)
    assert listed(elements) == {(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (0, 2)}
    assert elements.anchors[0, :5].tolist() == [0, 1, 2, 3, 4], "depth 0 holds every position"


def test_prompt_positions_are_context_only() -> None:
    # Prompt of 3, response x[3], x[4], x[5]: (2, 0) reads x[3] and predicts x[4].
    deepest = rows_depth(torch.tensor([6]), torch.tensor([3]), 8)
    assert deepest.tolist() == [[-1, -1, 1, 0, -1, -1, -1, -1]]


@given(
    length=st.integers(3, 40),
    prompt=st.integers(1, 39),
    depths=st.integers(1, 9),
    ratio=st.floats(0.3, 1.0),
    floor=st.floats(0.0, 0.6),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_sampled_elements_obey_the_definition(
    length: int, prompt: int, depths: int, ratio: float, floor: float, seed: int
) -> None:
    prompt = min(prompt, length - 1)
    lengths, prompts = torch.tensor([length, 12]), torch.tensor([prompt, 2])
    size = max(length, 12) + 3
    elements = sample_elements(
        rows_depth(lengths, prompts, size),
        depths,
        ratio=ratio,
        floor=floor,
        generator=torch.Generator().manual_seed(seed),
        multiple=8,
    )
    assert elements.anchors.shape[1] % 8 == 0
    for row in range(2):
        chosen = listed(elements, row)
        assert len(chosen) == int(elements.supervised[row].sum()), "no element twice"
        anchors = [a for a in range(size) if prompts[row] <= a + 1 and a + 2 <= lengths[row] - 1]
        assert {a for a, d in chosen if d == 0} == set(anchors)
        kept = [len(anchors), *depth_counts(len(anchors), depths, ratio, floor)]
        for a, d in chosen:
            assert a + d + 2 <= lengths[row] - 1, "the predicted token is in the response"
            assert d == 0 or (a, d - 1) in chosen, "chains are whole"
        for depth in range(depths):
            assert sum(d == depth for _, d in chosen) <= kept[depth]


def test_counts_match_the_ratio_where_there_is_room() -> None:
    deepest = rows_depth(torch.tensor([1000]), torch.tensor([1]), 1000)
    elements = sample_elements(deepest, 6, ratio=0.7, floor=0.3)
    for depth in range(6):
        expected = 998 * max(0.7**depth, 0.3)
        found = sum(d == depth for _, d in listed(elements))
        assert expected * 0.98 - 8 <= found <= expected + 1
    first = {a for a, d in listed(elements) if d == 5}
    again = {a for a, d in listed(sample_elements(deepest, 6, ratio=0.7, floor=0.3)) if d == 5}
    assert first != again, "the subset is random"


def test_a_generator_decides_the_sample() -> None:
    deepest = rows_depth(torch.tensor([60]), torch.tensor([4]), 64)
    draws = [
        sample_elements(deepest, 5, generator=torch.Generator().manual_seed(seed))
        for seed in (3, 3, 4)
    ]
    assert torch.equal(draws[0].supervised, draws[1].supervised)
    assert torch.equal(draws[0].anchors, draws[1].anchors)
    assert not torch.equal(draws[0].anchors, draws[2].anchors)


@pytest.mark.parametrize("multiple", [1, 16])
def test_attention_rule_against_the_definition(multiple: int) -> None:
    deepest = rows_depth(torch.tensor([9, 7]), torch.tensor([2, 3]), 9)
    e = sample_elements(deepest, 4, ratio=0.8, floor=0.2, multiple=multiple)
    mask = attention_mask(e, e)[:, 0]
    for row in range(2):
        for i in range(e.anchors.shape[1]):
            a, d = int(e.anchors[row, i]), int(e.depths[row, i])
            for j in range(e.anchors.shape[1]):
                b, c = int(e.anchors[row, j]), int(e.depths[row, j])
                same = e.documents[row, i] == e.documents[row, j]
                expected = bool(same) and ((c == 0 and b <= a) or (b == a and c <= d))
                assert bool(mask[row, i, j]) == expected
                if d == 0 and c > 0:
                    assert not mask[row, i, j], "depth 0 never sees a deeper element"
