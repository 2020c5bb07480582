"""Several tensors in one copy to the device."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from peagle.kernels.upload import pack_all, unpack_all, upload_together
from tests.kernels.devices import DEVICES

TYPES = (torch.int64, torch.float64, torch.float32, torch.bool)
SHAPES = st.lists(st.integers(0, 7), min_size=0, max_size=3)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    shape, dtype = draw(SHAPES), draw(st.sampled_from(TYPES))
    count = torch.Size(shape).numel()
    values = draw(st.lists(st.integers(0, 1000), min_size=count, max_size=count))
    return torch.tensor(values, dtype=torch.int64).view(shape).to(dtype)


def check(found: Sequence[Tensor], values: list[Tensor]) -> None:
    assert len(found) == len(values)
    for one, value in zip(found, values, strict=True):
        assert one.dtype == value.dtype and torch.equal(one.cpu(), value)


@pytest.mark.slow
@given(values=st.lists(tensors(), max_size=6))
def test_packed_tensors_are_whole(values: list[Tensor]) -> None:
    packed, starts = pack_all(values)
    found = unpack_all(packed, starts, values)
    check(found, values)
    for one in found:
        offset = one.data_ptr() - packed.data_ptr()
        assert not one.numel() or offset % 16 == 0, "kernels take such a start for granted"


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@given(values=st.lists(tensors(), max_size=6))
def test_every_tensor_arrives(device: str, values: list[Tensor]) -> None:
    found = upload_together(values, device)
    check(found, values)
    assert {one.device.type for one in found} <= {torch.device(device).type}


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(12).view(3, 4).T,
        torch.arange(12).view(3, 4)[1:2, 2],
        torch.arange(3).unsqueeze(1).expand(3, 4),
        torch.from_numpy(np.zeros((0, 0), dtype=np.int32)),
        torch.zeros(0, 5)[:, :0],
    ],
    ids=["transposed", "one", "expanded", "empty array", "empty"],
)
def test_what_is_not_contiguous_keeps_its_order(value: Tensor) -> None:
    (found,) = unpack_all(*pack_all([value]), [value])
    assert found.dtype == value.dtype and torch.equal(found, value)


@pytest.mark.gpu
def test_a_later_copy_leaves_an_earlier_one_alone() -> None:
    """The host goes on before the copies are done, and its memory is used again."""
    device = torch.device("cuda")
    upload_together([torch.ones(1)], device)  # allocates
    torch.cuda._sleep(20_000_000)
    event = torch.cuda.Event()
    found = [
        upload_together([torch.full((1000,), value), torch.full((3,), -value)], device)
        for value in range(1, 6)
    ]
    event.record()
    assert not event.query(), "the host has waited for a copy"
    torch.cuda.synchronize()
    values = [(set(a.tolist()), set(b.tolist())) for a, b in found]
    assert values == [({value}, {-value}) for value in range(1, 6)]
