"""Values as errors show them: like their repr, and never more than a little of it."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peagle.errors import short_repr

VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary()),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner),
    max_leaves=40,
)


@pytest.mark.slow
@given(VALUES)
def test_a_short_value_is_its_repr(value: Any) -> None:
    whole, shown = repr(value), short_repr(value)
    if len(whole) <= 200:
        assert shown == whole
    else:
        assert shown == whole or whole.startswith(shown.rpartition("...")[0])
        assert len(shown) < 240


@pytest.mark.parametrize(
    "value",
    [
        "x" * 10**6,
        "\x00" * 10**6,
        b"\xff" * 10**6,
        ["x" * 10**6] * 10**3,
        [[[["x"] * 10**6]]],
        tuple(range(10**6)),
        {"x" * 10**6: 1},
        {str(i): [i] for i in range(10**5)},
    ],
)
def test_a_large_value_is_cut(value: Any) -> None:
    shown = short_repr(value)
    assert 200 < len(shown) < 240 and "..." in shown
    if isinstance(value, str):
        assert shown.endswith(" (1000000 characters)")


def test_no_more_is_read_than_is_shown() -> None:
    class Element:
        count = 0

        def __repr__(self) -> str:
            Element.count += 1
            return "e"

    assert short_repr([Element()] * 10**6).startswith("[e, e, ")
    assert Element.count < 100
